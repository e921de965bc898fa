# SPDX-License-Identifier: Apache-2.0
"""The global stream of the `mmap` file type: Grain's shuffle over windows, epochs, weights, and the model's fields.

The stream is the released pipeline's of one host without worker processes; it is cut into hosts afterwards, so that the
data does not depend on their number. Tokens come from `_mmap_windows`.
"""

from __future__ import annotations

from collections.abc import Sequence
import concurrent.futures
import contextlib
import dataclasses
import math
import os
from typing import Any

import grain.python as grain
import numpy as np
import xxhash

from maxtext.input_pipeline import _mmap_config as mmap_config
from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_kernels as kernels
from maxtext.input_pipeline._mmap_fields import check_token_ids, ones_but_eod, rows_of_segments_and_positions
from maxtext.input_pipeline._mmap_files import MMapError
from maxtext.input_pipeline._mmap_index_utils import _normalize_weights, resolve_shard_prefixes, split_paths
from maxtext.input_pipeline._mmap_mixture import parse_mixture
from maxtext.input_pipeline._mmap_windows import MultiShardMMapIndexedDataSource, TokenStream

_READERS = 4  # threads that read index files which are not known yet


@dataclasses.dataclass(frozen=True)
class WindowSettings:
  """What decides the stream, and the fields that are made of it.

  Attributes:
    key: config key that names the datasets, for messages.
    files: "path", or "path,weight;path,weight;...", a path being a prefix, a folder, or several joined by ':'.
    seq_length: tokens of a window.
    eod_id: token that ends a document.
    seed: of the shuffle; None: windows in the order of the files.
    epochs: passes over each dataset.
    split_sentences: the data was made with `--split-sentences`; the windows are the same.
    reset_attention_mask, eod_mask_loss, min_segment_length: see `GenerateDocSegmentIds`.
    vocab_size: token ids outside it are refused; None: not looked at.
    stamps_folder: folder that remembers which index files were read whole; "" for none.
  """

  key: str
  files: str
  seq_length: int
  eod_id: int
  seed: int | None = None
  epochs: int = 1
  split_sentences: bool = False
  reset_attention_mask: bool = True
  eod_mask_loss: bool = False
  min_segment_length: int = 0
  vocab_size: int | None = None
  stamps_folder: str = ""


def settings_for(config, evaluation: bool = False) -> WindowSettings:
  """Returns what a config says. Evaluation reads every window once, in the order of the files."""
  from maxtext.input_pipeline.input_pipeline_utils import megatron_min_segment_length  # here: data workers do without

  key = "grain_eval_files" if evaluation else "grain_train_files"
  shuffled = config.enable_data_shuffling and not evaluation
  return WindowSettings(
      key=key,
      files=getattr(config, key),
      seq_length=config.max_target_length,
      eod_id=config.mmap_eod_id,
      seed=config.data_shuffle_seed if shuffled else None,
      epochs=1 if evaluation else config.num_epoch,
      split_sentences=config.mmap_split_sentences,
      reset_attention_mask=config.reset_attention_mask,
      eod_mask_loss=config.eod_mask_loss,
      min_segment_length=megatron_min_segment_length(config),
      vocab_size=config.vocab_size,
      stamps_folder=config.blend_cache_dir,
  )


# Which window comes when.


class WindowOrder:
  """Random access to the order of windows.

  Each dataset is shuffled by Grain and repeated, every epoch in another order. Several are mixed as Grain's
  `IterDataset.mix` does it, and the stream ends where that ends: at the first draw from a dataset that is used up.

  Args:
    windows: of each dataset, all positive.
    proportions: of each dataset, see `mix_proportions`.
    seed: of the shuffle; None: no shuffle.
    epochs: passes over each dataset, positive.
  """

  def __init__(self, windows: Sequence[int], proportions: Sequence[int], seed: int | None, epochs: int):
    self._windows, self._proportions = tuple(windows), tuple(proportions)
    self._shuffled = None
    if seed is not None:
      self._shuffled = [grain.MapDataset.range(count).shuffle(seed=seed).repeat(epochs) for count in windows]
    self._length = _mix_length([count * epochs for count in windows], self._proportions)

  def __len__(self) -> int:
    return self._length

  def locate(self, indices) -> tuple[np.ndarray, np.ndarray]:
    """Returns number of the dataset and window for elements of the stream, both int64[n].

    Raises:
      IndexError: outside the stream.
    """
    indices = np.asarray(indices, np.int64)
    if indices.size and not 0 <= indices.min() <= indices.max() < self._length:
      raise IndexError(f"samples {indices.min()} to {indices.max()} of {self._length}")
    children, draws = _mix(indices, self._proportions)
    if self._shuffled is None:
      return children, draws % np.array(self._windows)[children]
    pairs = zip(children.tolist(), draws.tolist(), strict=True)
    return children, np.array([self._shuffled[child][draw] for child, draw in pairs], np.int64)


def mix_proportions(weights: Sequence[float]) -> tuple[int, ...]:
  """Returns the whole-numbered proportions, 100 or about 100 for the smallest, in which Grain mixes."""
  scale = 100 / min(weights)
  return tuple(int(weight * scale) for weight in weights)


def _mix(indices: np.ndarray, proportions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
  """Returns for each draw of a mixture the dataset, and how often that was drawn before, both int64[n].

  As Grain does it: of k draws that are left to dataset i and those after it, these get floor(k * theirs / all) and
  dataset i the rest, in the proportions of datasets i and after. A draw belongs to the dataset whose share it raises.
  """
  left = sum(proportions)
  exact = np.int64 if (int(indices.max(initial=0)) + 1) * left < 2**63 else object
  before, after = indices.astype(exact), indices.astype(exact) + 1
  children, draws = np.full(len(indices), -1, np.int64), np.zeros(len(indices), np.int64)
  for child, proportion in enumerate(proportions):
    before_rest, after_rest = before * (left - proportion) // left, after * (left - proportion) // left
    drawn, count = before - before_rest, after - after_rest
    here = (children < 0) & (drawn != count)
    children[here], draws[here] = child, drawn[here]
    before, after, left = before_rest, after_rest, left - proportion
  return children, draws


def _mix_length(lengths: Sequence[int], proportions: Sequence[int]) -> int:
  """Returns the number of draws until a dataset is asked for more than its length."""
  low, high = 0, sum(lengths)
  while low < high:
    middle = (low + high + 1) // 2
    if all(count <= length for count, length in zip(_counts(middle, proportions), lengths, strict=True)):
      low = middle
    else:
      high = middle - 1
  return low


def _counts(draws: int, proportions: Sequence[int]) -> list[int]:
  """Returns how often each dataset is among the first draws of a mixture."""
  counts, left = [], sum(proportions)
  for proportion in proportions:
    rest = draws * (left - proportion) // left
    counts.append(draws - rest)
    draws, left = rest, left - proportion
  return counts


# Rows.


class MMapRows:
  """The stream as the model's fields. Threads may share it; it pickles by the paths of its files.

  Args:
    streams: tokens of each dataset.
    order: of the windows.
    settings: what the fields are.
  """

  def __init__(self, streams: Sequence[TokenStream], order: WindowOrder, settings: WindowSettings):
    self.streams, self.order, self._settings = tuple(streams), order, settings

  def __len__(self) -> int:
    return len(self.order)

  def read_rows(self, indices) -> np.ndarray:
    """Returns the tokens of samples, int32[n, seq_length].

    Raises:
      IndexError: outside the stream.
      MMapError: if a file cannot be read, or holds a token id that the vocabulary does not have.
    """
    children, windows = self.order.locate(indices)
    length = self._settings.seq_length
    tokens, starts = np.empty((len(windows), length), np.int32), windows * length
    for child in np.unique(children).tolist():
      rows = np.flatnonzero(children == child)
      part = np.empty((len(rows), length), np.int32)
      self.streams[child].read(starts[rows].tolist(), part)
      tokens[rows] = part
    self._check_ids(tokens, children, starts)
    return tokens

  def rows(self, indices) -> dict[str, np.ndarray]:
    """Returns the fields of samples, each int32[n, seq_length].

    They are what the release's Rekey, GenerateDocSegmentIds, batch and ShiftData make of the tokens: a target is the
    next token, EOD at the end; `targets_segmentation` is 0 there and wherever the target is EOD, whatever
    `eod_mask_loss`, since EOD is the release's padding too. Positions are not shifted.
    """
    inputs, eod_id = self.read_rows(indices), self._settings.eod_id
    segments, positions = self._segments_and_positions(inputs)
    targets, weighted = np.full_like(inputs, eod_id), np.zeros_like(segments)
    targets[:, :-1] = inputs[:, 1:]
    weighted[:, :-1] = np.where(targets[:, :-1] != eod_id, segments[:, 1:], 0)
    return {
        "inputs": inputs,
        "targets": targets,
        "inputs_segmentation": segments,
        "targets_segmentation": weighted,
        "inputs_position": positions,
        "targets_position": positions.copy(),
    }

  def _segments_and_positions(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    settings = self._settings
    if not settings.reset_attention_mask:
      segments = ones_but_eod(tokens, settings.eod_id, settings.eod_mask_loss)
      return segments, np.tile(np.arange(tokens.shape[1], dtype=np.int32), (len(tokens), 1))
    return rows_of_segments_and_positions(tokens, settings.eod_id, settings.min_segment_length)

  def _check_ids(self, tokens: np.ndarray, children: np.ndarray, starts: np.ndarray) -> None:
    """Raises MMapError at a token id outside the vocabulary: an embedding look-up would clamp it, silently."""
    size = self._settings.vocab_size
    if size is None or not kernels.any_outside(tokens.ravel(), 0, size - 1):
      return

    def file_of(row: int, column: int) -> str:
      stream = self.streams[children[row]]
      return stream.shards[stream.shard_at(int(starts[row]) + column)].prefix + ".bin"

    check_token_ids(tokens, size, file_of)


# Opening.


@dataclasses.dataclass(frozen=True)
class Windows:
  """An open stream.

  Attributes:
    rows: the samples.
    order: JSON-able, what decides the order, for checkpoints. Not the epochs: more of them only make the stream longer.
    lines: one for each dataset, for the log.
  """

  rows: MMapRows
  order: dict[str, Any]
  lines: tuple[str, ...]


def parse_files(text: str, key: str = "grain_train_files") -> tuple[list[str], list[float]]:
  """Parses "path" or "path,weight;path,weight;..." to paths and weights of sum 1; entries of weight 0 are left out.

  Raises:
    MMapError: for an empty path, an index folder, missing or unusable weights.
  """
  mixture = parse_mixture(text, key)
  for entry in mixture.entries:
    if "|" in entry:
      raise MMapError(
          f"{key}: {entry!r} has an index folder before '|', and grain_file_type=mmap has no indices; name the dataset "
          "alone, or set grain_file_type=mmap_npy."
      )
    try:
      split_paths(entry)
    except MMapError as error:
      raise MMapError(f"{key}: {error}") from None
  if mixture.weights is None:
    if len(mixture.entries) > 1:
      raise MMapError(
          f"{key}: {mixture.entries[0]!r} has no weight, and grain_file_type=mmap mixes several datasets by weight; give "
          "'path,weight;path,weight', or join shards of one dataset by ':'."
      )
    return list(mixture.entries), [1.0]
  used = [(entry, weight) for entry, weight in zip(mixture.entries, mixture.weights, strict=True) if weight > 0]
  weights = _normalize_weights([weight for _, weight in used])
  if not min(weights) > 0 or not math.isfinite(100 / min(weights)):
    raise MMapError(f"{key}: a weight is nothing beside the others; leave that dataset out or raise its weight.")
  return [entry for entry, _ in used], weights


def check_mmap_files(key: str, text: str) -> None:
  """Checks what a config key says, without looking at files.

  Raises:
    MMapError: see `parse_files`.
  """
  parse_files(text, key)


def open_windows(settings: WindowSettings, write: bool | None = None) -> Windows:
  """Opens the datasets that settings name, as one stream.

  Args:
    write: whether to write to `stamps_folder`; None: if this is the primary process.

  Raises:
    MMapError: if a dataset cannot be opened, is damaged, or is shorter than a window.
  """
  paths, weights = parse_files(settings.files, settings.key)
  folder = cache.local_folder(settings.stamps_folder)
  stamps = cache.Stamps(folder) if folder else None
  with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
    opened = list(pool.map(lambda path: _open(path, settings, stamps), paths))
  if stamps and stamps.changed and cache.writes(write):
    with contextlib.suppress(OSError):  # stamps only save work
      os.makedirs(folder, exist_ok=True)
    stamps.save()
  streams, identities, lines = zip(*opened, strict=True)
  proportions = mix_proportions(weights)
  counts = [len(stream) // settings.seq_length for stream in streams]
  order = WindowOrder(counts, proportions, settings.seed, settings.epochs)
  said = {
      "kind": "mmap",
      "datasets": list(identities),
      "sequence_length": settings.seq_length,
      "seed": settings.seed,
      "weights": list(proportions),
      "available_samples": len(order),
  }
  if len(weights) > 1:
    lines = [f"{line[:-1]}, weight {weight:.6g}." for line, weight in zip(lines, weights, strict=True)]
  return Windows(MMapRows(streams, order, settings), said, tuple(lines))


def _open(path: str, settings: WindowSettings, stamps) -> tuple[TokenStream, dict[str, Any], str]:
  """Opens one entry; returns its tokens, its identity and a line for the log."""
  prefixes = resolve_shard_prefixes(split_paths(path))
  documents = MultiShardMMapIndexedDataSource(prefixes, split_sentences=settings.split_sentences)
  with concurrent.futures.ThreadPoolExecutor(_READERS) as pool:
    facts = list(pool.map(lambda dataset: cache.dataset_facts(dataset, stamps), documents.datasets))
  stream = documents.token_stream(facts)
  sequences, windows = sum(fact["sequences"] for fact in facts), len(stream) // settings.seq_length
  if not windows:
    raise MMapError(
        f"{settings.key}: {path} has {sequences} sequences and {len(stream)} tokens, which is less than one window of "
        f"max_target_length={settings.seq_length} tokens; give more data."
    )
  documents.check_eod_presence(settings.eod_id, "grain_file_type=mmap")
  digest = facts[0]["digest"]
  if len(facts) > 1:
    digest = xxhash.xxh3_128_hexdigest(" ".join(fact["digest"] for fact in facts).encode())
  shuffle = "in file order" if settings.seed is None else f"shuffled with seed {settings.seed}"
  line = (
      f"{settings.key}: {path} has {len(prefixes)} shard(s){_shards(prefixes)}, {sequences} sequences and {len(stream)} "
      f"tokens; {windows} windows of {settings.seq_length} tokens, {shuffle}, {settings.epochs} epoch(s)."
  )
  return stream, {"digest": digest, "sequences": sequences, "tokens": len(stream)}, line


def _shards(prefixes: Sequence[str]) -> str:
  """Says the order of shards: all, or the first and the last of many."""
  if len(prefixes) == 1:
    return ""
  shown = [*prefixes[:4], "...", prefixes[-1]] if len(prefixes) > 6 else prefixes
  return f" in this order: {', '.join(shown)}"


def too_short(settings: WindowSettings, available: int, reads: int, evaluation: bool) -> str:
  """Says that a stream has too few samples, and what to do."""
  advice = "lower eval_steps or evaluate on more data" if evaluation else "raise num_epoch or lower steps"
  return (
      f"{settings.key}: the stream has {available} samples ({settings.epochs} epoch(s)), but the run reads {reads}; "
      f"{advice}."
  )


def make_mmap_rows(config, evaluation: bool = False) -> Windows:
  """Opens the stream that a config describes, for training or for evaluation, and says in the log what it is.

  The order gets `needed_samples`, what the run reads of it.

  Raises:
    MMapError: see `open_windows`; and if the run reads more samples than there are.
  """
  from maxtext.utils import max_logging  # here, since worker processes import this module and do not need it

  settings = settings_for(config, evaluation)
  windows = open_windows(settings)
  for line in windows.lines:
    max_logging.log(line)
  if not config.eod_mask_loss and not evaluation:
    max_logging.warning(
        "grain_file_type=mmap gives no loss at EOD targets although eod_mask_loss=false, since EOD is its padding too; "
        "use grain_file_type=mmap_npy to train on EOD."
    )
  steps, batch = config.steps, config.global_batch_size_to_train_on
  if evaluation:
    steps, batch = max(config.eval_steps, 1), config.global_batch_size_to_eval_on
  if steps * batch > len(windows.rows) and (evaluation or not mmap_config.continues(config)):
    raise MMapError(too_short(settings, len(windows.rows), steps * batch, evaluation))
  return dataclasses.replace(windows, order={**windows.order, "needed_samples": steps * batch})
