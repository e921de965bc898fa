# SPDX-License-Identifier: Apache-2.0
"""Works out what a run on Megatron datasets will read, build and need, and everything that is wrong with it at once.

Nothing is built. Of datasets, the headers, some tokens, and what the stamps of an index folder do not know is read; of
index files, the headers, and the first draws of a blend.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

import numpy as np

from maxtext.input_pipeline import _megatron_blending as blending
from maxtext.input_pipeline import _mmap_config as mmap_config
from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_megatron_cache as megatron_cache
from maxtext.input_pipeline import _mmap_stream as streams
from maxtext.input_pipeline import _mmap_window_rows as window_rows
from maxtext.input_pipeline._mmap_files import MMapError
from maxtext.input_pipeline._mmap_index_utils import split_paths
from maxtext.input_pipeline._mmap_indexed_dataset import MMapIndexedDataset
from maxtext.input_pipeline._mmap_shards import ShardedDataset
from maxtext.input_pipeline.mmap_cli import documents
from maxtext.input_pipeline.mmap_cli.resources import Build, Findings, can_write

STRICT = {"reset_attention_mask": True, "eod_mask_loss": False, "packing_max_segments_per_sample": 0}
_SHARDS = 20  # shards whose tokens are looked at
_EOD_PROBES = 100  # documents looked at for EOD, in all of them
_ID_PROBES, _ID_TOKENS = 100, 2048  # sequences of a shard whose ids are looked at, and the first ids of each
_BLEND_BYTES = 10  # of a draw
_PAIR_DRAWS = 1 << 16  # draws of a pair that are compared with the blend


def check_part(config, evaluation: bool, findings: Findings, builds: list[Build]) -> dict[str, Any]:
  """Looks at the data of training or evaluation; returns its facts, JSON-able."""
  part = "valid" if evaluation else "train"
  windows = config.grain_file_type == "mmap"
  settings: Any = (window_rows if windows else streams).settings_for(config, evaluation)
  if windows:
    facts = _check_windows(config, settings, evaluation, findings)
  else:
    facts = _check_stream(config, settings, findings, builds)
  available, reads = facts["samples_available"], facts["samples_read"]
  if available is not None and available < reads and (evaluation or not mmap_config.continues(config)):
    if windows:
      findings.problem(window_rows.too_short(settings, available, reads, evaluation))
    else:
      whole = facts["blend"] is not None and facts["datasets"][0]["weight"] is None
      findings.problem(streams.too_short(settings, available, whole))
  return {"part": part, **facts}


# grain_file_type=mmap_npy.


def _check_stream(config, settings: streams.StreamSettings, findings: Findings, builds: list[Build]) -> dict[str, Any]:
  facts: dict[str, Any] = {
      "key": settings.key,
      "samples_asked": settings.num_samples,
      "samples_read": settings.needed,
      "samples_available": None,
      "blend": None,
      "datasets": [],
  }
  try:
    planned, mixture = streams.plan_children(settings)
  except MMapError as error:
    findings.problem(error)
    return facts
  facts["datasets"] = [_check_child(config, settings, child, findings, builds) for child in planned]
  lengths = [child["samples_available"] for child in facts["datasets"]]
  if None in lengths:
    return facts
  facts["samples_available"] = lengths[0]
  if mixture.mixed:
    try:
      blend = streams.plan_blend(settings, planned, lengths)
    except MMapError as error:
      findings.problem(error)
      return {**facts, "samples_available": None}
    facts["samples_available"] = blend.size
    facts["blend"] = _check_blend(settings, blend, facts["datasets"], findings, builds)
  return facts


def _check_child(config, settings, child, findings: Findings, builds: list[Build]) -> dict[str, Any]:
  facts = {
      "number": child.number,
      "weight": child.weight,
      "paths": list(child.paths),
      "samples_asked": child.requested,
      "samples_available": None,
  }
  try:
    dataset = ShardedDataset(list(child.paths))
    folder = cache.local_folder(child.npy_dir)
    description = cache.describe(dataset, settings.request(child.requested), stamps=cache.Stamps(folder))
  except MMapError as error:
    findings.problem(error)
    return facts
  facts |= _dataset_facts(dataset, description.facts) | {
      "sequences_used": [description.begin, description.end],
      "tokens_per_epoch": description.tokens_per_epoch,
      "epochs": description.plan.num_epochs,
      "separate_last_epoch": description.plan.separate_last_epoch,
      "samples_available": description.plan.samples,
  }
  _check_layout(dataset, description.facts, settings.split_sentences, findings)
  _check_tokens(config, dataset, findings)
  return facts | _check_indices(child, dataset, settings.request(child.requested), description, findings, builds)


def _dataset_facts(dataset: ShardedDataset, facts) -> dict[str, Any]:
  return {
      "name": dataset.name,
      "shards": len(dataset.shards),
      "sequences": sum(fact["sequences"] for fact in facts),
      "documents": sum(fact["documents"] for fact in facts),
      "tokens": sum(fact["tokens"] for fact in facts),
      "dtype": ", ".join(sorted({fact["dtype"] for fact in facts})),
  }


def _check_layout(dataset: ShardedDataset, facts, split_sentences: bool, findings: Findings) -> None:
  for shard, fact in zip(dataset.shards, facts, strict=True):
    if fact["sentence_split"] and not split_sentences:
      findings.problem(
          f"{shard.path_prefix}.idx has documents of several sequences, as --split-sentences makes them; set "
          "mmap_split_sentences=true if that is meant."
      )
    stray = shard.bin_file.size - fact["end"]
    if stray:
      findings.warn(f"{shard.path_prefix}.bin has {stray} bytes after its last sequence; they are ignored.")


def _check_tokens(config, dataset: ShardedDataset, findings: Findings) -> None:
  """Looks at the last tokens of some documents, which should be EOD, and at ids of some sequences."""
  numbers = documents.spread(len(dataset.shards), _SHARDS).tolist()
  try:
    pieces = [documents.last_tokens(dataset.shards[number], -(-_EOD_PROBES // len(numbers))) for number in numbers]
    outside = [_ids_outside(dataset.shards[number], config.vocab_size) for number in numbers]
  except MMapError as error:
    findings.problem(error)
    return
  ends = np.concatenate(pieces)
  if not len(ends):
    return
  with_eod = int((ends == config.mmap_eod_id).sum())
  if not with_eod:
    say = findings.problem if config.reset_attention_mask or config.eod_mask_loss else findings.warn
    say(
        f"{dataset.name}: none of {len(ends)} documents ends with mmap_eod_id={config.mmap_eod_id} (the first ends with "
        f"{ends[0]}); set mmap_eod_id to the token that preprocessing wrote."
    )
  bad = np.concatenate([*outside, ends[(ends < 0) | (ends >= config.vocab_size)]])
  if len(bad):
    findings.problem(
        f"{dataset.name} holds token id {bad[0]}, outside the vocabulary (vocab_size={config.vocab_size}); set the "
        "vocab_size of the tokenizer that the data was made with."
    )


def _ids_outside(shard: MMapIndexedDataset, vocab_size: int) -> np.ndarray:
  """Returns ids that are not of the vocabulary, int64[any], among the first ones of sequences spread over a shard."""
  dtype = shard.header.dtype
  pieces = []
  for row in documents.spread(len(shard), _ID_PROBES).tolist():
    pieces.append((int(shard.pointers[row]), min(int(shard.sizes[row]), _ID_TOKENS) * dtype.itemsize))
  ids = np.frombuffer(b"".join(shard.read_many(pieces)), dtype)
  return ids[(ids < 0) | (ids >= vocab_size)].astype(np.int64)


def _check_indices(child, dataset, request, description, findings: Findings, builds: list[Build]) -> dict[str, Any]:
  """Says whether the indices are there, or what it takes to build them."""
  size = sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in description.expected().values())
  state = _state_of_ours(child.npy_dir, description)
  if state != "found" and _has_megatrons(child.npy_dir, dataset, request, description, findings):
    state = "found, Megatron's"
  if not state.startswith("found"):
    keeps = can_write(child.npy_dir)
    if not keeps:
      findings.warn(f"{child.npy_dir} cannot be written; every start builds its indices again and keeps them in memory.")
    builds.append(Build(child.npy_dir if keeps else "", size))
  return {"indices": state, "index_folder": child.npy_dir, "index_bytes": size, "index_name": description.name}


def _state_of_ours(folder: str, description: cache.IndexDescription) -> str:
  """Looks at the headers of our index files; their checksums are the run's to look at."""
  names = [*description.paths("").values(), description.metadata_path("")]
  local = cache.local_folder(folder, [os.path.basename(name) for name in names])
  try:
    with open(description.metadata_path(local), encoding="utf-8") as file:
      if json.load(file)["built_from"] != description.built_from:
        return "built from other data or settings, to be built again"
    for name, (dtype, shape) in description.expected().items():
      array = cache.map_array(description.paths(local)[name])
      if (array.dtype.str, array.shape) != (dtype, shape):
        return f"damaged ({name}), to be built again"
  except (FileNotFoundError, NotADirectoryError):
    return "to be built"
  except (OSError, ValueError, KeyError, TypeError, cache.StaleIndexError) as error:
    return f"damaged ({type(error).__name__}), to be built again"
  return "found"


def _has_megatrons(folder: str, dataset: ShardedDataset, request, description, findings: Findings) -> bool:
  """Whether the folder is Megatron's cache and holds this order; its content is the run's to check."""
  if len(dataset.shards) > 1 or "://" in folder:
    return False
  found = megatron_cache.find_index(folder, request, description, dataset.prefixes[0])
  if found.reason:
    findings.warn(f"Megatron's {found.reason}; the indices will be built.")
  return found.paths is not None


def _check_blend(settings, blend, children, findings: Findings, builds: list[Build]) -> dict[str, Any]:
  """Counts the draws of each child, and compares them with what it has."""
  counts = blending.count_draws(blend)
  for child, count in zip(children, counts, strict=True):
    child["samples_drawn"] = count
    if count > child["samples_available"]:
      findings.problem(
          f"{settings.key}: the blend asks dataset {child['number']} ({child['name']}) for {count} samples, and its "
          f"indices have {child['samples_available']}; raise mmap_npy_blend_margin."
      )
  state = _find_pair(settings, blend, findings)
  if state != "found":
    folder = settings.blend_cache_dir if settings.blend_cache_dir and can_write(settings.blend_cache_dir) else ""
    builds.append(Build(folder, blend.size * _BLEND_BYTES, True))
  return {"samples": blend.size, "shares": [count / blend.size for count in counts], "indices": state}


def _find_pair(settings, blend: blending.BlendRequest, findings: Findings) -> str:
  """Says whether a blend's pair lies in one of its folders, after a look at its first draws."""
  state = "to be drawn"
  for folder, name in ((settings.blend_index_dir, None), (settings.blend_cache_dir, blend.name)):
    if folder and "://" not in folder:
      try:
        paths = blending.pair_paths(folder, name) if name else blending.find_pair(folder, settings.part, blend)
      except MMapError as error:
        findings.warn(error)
        continue
      if paths and all(map(os.path.isfile, paths)):
        reason = _other_blend(paths, blend)
        if not reason:
          return "found"
        findings.warn(f"{reason}; the blend will be drawn.")
        state = "another blend's, to be drawn"
  return state


def _other_blend(paths, blend: blending.BlendRequest) -> str:
  """Says why a pair is not this blend, by its headers and first draws; empty if they are its."""
  try:
    blending.check_draws(paths, blending.map_pair(paths, blend), blend, _PAIR_DRAWS)
  except (OSError, cache.StaleIndexError) as error:
    return str(error)
  return ""


# grain_file_type=mmap.


def _check_windows(config, settings, evaluation: bool, findings: Findings) -> dict[str, Any]:
  batch = config.global_batch_size_to_eval_on if evaluation else config.global_batch_size_to_train_on
  steps = max(config.eval_steps, 1) if evaluation else config.steps
  facts: dict[str, Any] = {
      "key": settings.key,
      "samples_asked": None,
      "samples_read": steps * batch,
      "samples_available": None,
      "blend": None,
      "datasets": [],
  }
  try:
    paths, weights = window_rows.parse_files(settings.files, settings.key)
  except MMapError as error:
    findings.problem(error)
    return facts
  for number, path in enumerate(paths):
    facts["datasets"].append(_check_windows_of(config, settings, number, path, findings))
    facts["datasets"][-1]["weight"] = weights[number] if len(weights) > 1 else None
  windows = [dataset["samples_available"] for dataset in facts["datasets"]]
  if None not in windows and min(windows) > 0:
    order = window_rows.WindowOrder(windows, window_rows.mix_proportions(weights), settings.seed, settings.epochs)
    facts["samples_available"] = len(order)
  return facts


def _check_windows_of(config, settings, number: int, path: str, findings: Findings) -> dict[str, Any]:
  result: dict[str, Any] = {"number": number, "paths": [path], "samples_available": None}
  try:
    dataset = ShardedDataset(split_paths(path))
    folder = cache.local_folder(settings.stamps_folder) if settings.stamps_folder else ""
    stamps = cache.Stamps(folder) if folder else None
    facts = [cache.dataset_facts(shard, stamps) for shard in dataset.shards]
  except MMapError as error:
    findings.problem(error)
    return result
  _check_layout(dataset, facts, settings.split_sentences, findings)
  result |= _dataset_facts(dataset, facts) | {"epochs": settings.epochs}
  result["samples_available"] = result["tokens"] // settings.seq_length
  if not result["samples_available"]:
    findings.problem(
        f"{settings.key}: {path} has {result['tokens']} tokens, which is less than one window of "
        f"max_target_length={settings.seq_length} tokens; give more data."
    )
  else:
    _check_tokens(config, dataset, findings)
  return result


def not_strict(config) -> dict[str, Any]:
  """Returns the keys that differ from mmap_npy_megatron_gpt.yml, with their values."""
  if config.grain_file_type != "mmap_npy":
    return {}
  return {key: getattr(config, key) for key, value in STRICT.items() if getattr(config, key) != value}
