# SPDX-License-Identifier: Apache-2.0
"""The samples that `head` shows, from index files, from settings, or from a run's config."""

from __future__ import annotations

import argparse
import collections
from typing import Any, NamedTuple

from maxtext.input_pipeline import _mmap_stream as streams
from maxtext.input_pipeline._mmap_datasource import MegatronNpyDataSource
from maxtext.input_pipeline._mmap_files import MMapError
from maxtext.input_pipeline._mmap_shards import ShardedDataset
from maxtext.input_pipeline.input_pipeline_utils import MegatronSplitInputsTargets, megatron_min_segment_length
from maxtext.input_pipeline.mmap_cli import candidates, documents, mixtures, orders, segments


class View(NamedTuple):
  """Samples, and how they become the model's fields.

  Attributes:
    source: element i is {"text": int32[L + 1]}; `pieces(i)`, and `child(i)` where it is a blend.
    datasets: of each child.
    fields: the transform to the model's fields.
    eod_id: token that ends documents.
    eod_share: where it was guessed, the share of documents that end with it.
  """

  source: Any
  datasets: list[ShardedDataset]
  fields: MegatronSplitInputsTargets
  eod_id: int
  eod_share: float | None = None


def open_view(options: argparse.Namespace, progress=None) -> View:
  """Opens the samples that the options of `head` name; writes nothing.

  Raises:
    MMapError: if they cannot be opened.
  """
  if options.config:
    return _of_config(options, progress)
  entries = mixtures.entries_of(options)
  eod_id, share = (options.eod_id, None) if options.eod_id is not None else _guess_eod(entries)
  if options.seq_length is None:
    return _of_folder(options, entries, eod_id)._replace(eod_share=share)
  if len(entries) > 1 and not options.datasets:
    raise MMapError(f"{len(entries)} datasets were given; name one, or a blend: --datasets 'dataset,0.7;dataset,0.3'.")
  settings = streams.StreamSettings(
      files=_files(entries, bool(options.datasets)),
      seq_length=options.seq_length,
      eod_id=eod_id,
      seed=options.seed,
      num_samples=options.samples,
      split=options.split,
      split_index=options.split_index,
      split_sentences=True,
      blend_margin=options.margin,
      key="--datasets" if options.datasets else "DATASET",
  )
  stream = streams.open_stream(settings, write=False, progress=progress)
  datasets = [child.source.dataset for child in stream.children]
  return View(stream.source, datasets, _fields(options, eod_id), eod_id, share)


def _files(entries: list[mixtures.Entry], blend: bool) -> str:
  """Returns the entries as `grain_train_files` has them; those without an index folder get one that holds nothing."""
  texts = [f"{entry.npy_dir or mixtures.NOWHERE}|{':'.join(entry.paths)}" for entry in entries]
  if not blend:
    return texts[0]
  return "".join(f"{text},{entry.weight};" for text, entry in zip(texts, entries, strict=True))


def _guess_eod(entries: list[mixtures.Entry]) -> tuple[int, float]:
  """Returns the most common last token of documents, and the share of those looked at that end with it."""
  tokens = collections.Counter()
  for entry in entries:
    for shard in ShardedDataset(entry.paths).shards:
      tokens.update(documents.last_tokens(shard, 100).tolist())
  if not tokens:
    raise MMapError(f"{entries[0].text}: no document has a token; there is nothing to show.")
  token, count = tokens.most_common(1)[0]
  return token, count / tokens.total()


def _of_folder(options, entries: list[mixtures.Entry], eod_id: int) -> View:
  """Opens the one order of an index folder, whoever made it."""
  if len(entries) != 1 or entries[0].npy_dir is None:
    raise MMapError("nothing says how long samples are; give --seq-length, or 'npy_dir|dataset' with one order there.")
  order = orders.find(entries[0].npy_dir)
  candidates.choose(order, candidates.open_all([":".join(entries[0].paths)]))  # another dataset gives other samples
  arrays = order.arrays()
  length = order.settings.get("seq_length") or orders.facts_of(order, arrays)["seq_length"]
  if length is None:
    raise MMapError(f"{entries[0].npy_dir}: nothing says how long samples are; give --seq-length.")
  source = MegatronNpyDataSource("", entries[0].paths, eod_id, length, True, prebuilt_indices=arrays)
  return View(source, [source.dataset], _fields(options, eod_id, length), eod_id)


def _fields(options, eod_id: int, length: int | None = None) -> MegatronSplitInputsTargets:
  distance = segments.distance(length or options.seq_length, options.merge)
  return MegatronSplitInputsTargets(eod_id, not options.no_reset, options.eod_mask_loss, min_segment_length=distance)


def _of_config(options, progress) -> View:
  """Opens the training or evaluation samples of a config, with its fields."""
  from maxtext.input_pipeline.mmap_cli import run_config

  options.keys, options.devices = options.paths, None
  config: Any = run_config.read(options)
  if config.grain_file_type != "mmap_npy":
    raise MMapError(f"{options.config} has grain_file_type={config.grain_file_type}; head shows the samples of mmap_npy.")
  stream = streams.open_stream(streams.settings_for(config, options.eval), write=False, progress=progress)
  fields = MegatronSplitInputsTargets(
      config.mmap_eod_id,
      config.reset_attention_mask,
      config.eod_mask_loss,
      min_segment_length=megatron_min_segment_length(config),
  )
  return View(stream.source, [child.source.dataset for child in stream.children], fields, config.mmap_eod_id)
