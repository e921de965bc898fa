# SPDX-License-Identifier: Apache-2.0
"""Grain data sources over Megatron datasets, and what `grain_train_files` may say about them.

Replaces the release's module of this name; public names and signatures are kept. The classes of the order-free `mmap`
file type are still the release's.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import math
import os
import shutil
import tempfile
from typing import NamedTuple

import grain.python as grain
import numpy as np

from maxtext._release.input_pipeline._mmap_datasource import (
  MMapIndexedDataSource,
  MMapSampleIndexDataSource,
  MultiShardMMapIndexedDataSource,
  create_mmap_source,
  get_mmap_dataset,
)
from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_kernels as kernels
from maxtext.input_pipeline._mmap_files import FileIdentity
from maxtext.input_pipeline._mmap_index_cache import IndexRequest
from maxtext.input_pipeline._mmap_index_utils import _normalize_weights, resolve_dataset, resolve_shard_prefixes
from maxtext.input_pipeline._mmap_indexed_dataset import (
  DESCRIPTORS,
  DTYPE_CODES,
  DTYPE_CODES_INV,
  MMAP_INDEX_HEADER_SIZE,
  MMAP_INDEX_MAGIC,
  MMAP_INDEX_MAGIC_LEN,
  MMAP_INDEX_VERSION,
  MMapError,
  MMapIndexedDataset,
)

__all__ = [
    "DTYPE_CODES",
    "DTYPE_CODES_INV",
    "MMAP_INDEX_HEADER_SIZE",
    "MMAP_INDEX_MAGIC",
    "MMAP_INDEX_MAGIC_LEN",
    "MMAP_INDEX_VERSION",
    "MMapDatasetConfig",
    "MMapIndexedDataSource",
    "MMapIndexedDataset",
    "MMapSampleIndexDataSource",
    "MegatronNpyDataSource",
    "MultiShardMMapIndexedDataSource",
    "create_mmap_npy_source",
    "create_mmap_source",
    "get_mmap_dataset",
    "get_mmap_npy_dataset",
    "parse_entries",
    "parse_npy_entry",
]

log = logging.getLogger(__name__)

_EOD_PROBES = 100  # document ends read to see whether the dataset has EOD tokens


@dataclasses.dataclass(frozen=True)
class MMapDatasetConfig:
  """Settings of the mmap and mmap_npy file types, as the released pipeline passes them around."""

  max_target_length: int
  eod_id: int
  mmap_split_sentences: bool
  blend_cache_dir: str = ""
  blend_index_dir: str = ""
  num_samples: int | None = None
  seed: int = 1234
  split_ratio: str | None = None
  split_index: int = 0


# What grain_train_files says.


def parse_entries(text: str, key: str = "grain_train_files") -> list[tuple[str, float]]:
  """Parses "entry" or "entry,weight;entry,weight;..." to entries and their weights as written.

  A comma belongs to the path where there is only one entry, and before the last comma elsewhere.

  Raises:
    MMapError: for a missing entry or weight, and for weights that are not finite, not negative, with a positive total.
  """
  if not text.replace(";", "").strip():
    raise MMapError(f"{key} is empty; expected the path of a Megatron dataset.")
  if ";" not in text:
    return [(text.strip(), 1.0)]
  entries = []
  for number, part in enumerate(filter(str.strip, text.split(";"))):
    entry, comma, weight = part.rpartition(",")
    try:
      value = float(weight) if comma else math.nan
    except ValueError:
      value = math.nan
    if not entry.strip() or not math.isfinite(value) or value < 0:
      raise MMapError(
          f"{key}: entry {number} is {part.strip()!r}; expected 'entry,weight' with a finite weight of 0 or more."
      )
    entries.append((entry.strip(), value))
  total = sum(weight for _, weight in entries)
  if not 0 < total < math.inf:
    raise MMapError(f"{key}: the weights add up to {total}; expected a positive finite total.")
  return entries


def parse_npy_entry(entry: str, key: str = "grain_train_files") -> tuple[str, str]:
  """Parses "npy_dir|bin_prefix_or_directory" to its two halves.

  Raises:
    MMapError: if a half is missing, or the second names several paths.
  """
  folder, bar, path = (half.strip() for half in entry.partition("|"))
  if not bar or not folder or not path or "|" in path:
    raise MMapError(f"{key}: {entry!r} is not 'npy_dir|bin_prefix_or_directory', a folder for index files and a dataset.")
  if "://" in folder + path:
    raise MMapError(f"{key}: {entry!r} has a URL; object stores are not supported yet, mount it or copy the dataset.")
  if ":" in path:
    raise MMapError(f"{key}: {path!r} joins several paths by ':', which is not supported yet; give one dataset.")
  return folder, path


# Samples in Megatron's order.


class MegatronNpyDataSource(grain.RandomAccessDataSource):
  """The samples of one Megatron dataset in Megatron's order.

  Element i is {"text": int32[seq_length + 1]}, the tokens that megatron-core's GPTDataset returns for i. Nothing is
  inserted. A read takes the bytes of the sample and no more. Threads may share a source; it pickles by the paths of its
  files, which a worker process maps without checking them again, after a look whether they are the same.

  Args:
    npy_dir: folder of index files.
    bin_paths: path of the dataset without suffix, or a folder that holds one dataset.
    eod_id: token that ends a document, looked for at some document ends; a warning says if it is nowhere.
    seq_length: tokens of a sample, without the extra one.
    split_sentences: the data was made with `--split-sentences`; otherwise such data is refused.
    expected_hash: beginning of the index files' names; None if `npy_dir` holds one order.
    prebuilt_indices: document, sample and shuffle index, instead of files.
    request: the order to load from `npy_dir` or to build there, instead of `expected_hash`.
    write: whether to write indices that had to be built; None: if this is the primary process.

  Raises:
    MMapError: if dataset or indices cannot be used.
  """

  def __init__(
      self,
      npy_dir: str,
      bin_paths: str | list[str],
      eod_id: int,
      seq_length: int,
      split_sentences: bool = False,
      expected_hash: str | None = None,
      prebuilt_indices: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
      *,
      request: IndexRequest | None = None,
      write: bool | None = None,
  ):
    prefix = resolve_dataset(bin_paths)
    self._dataset = MMapIndexedDataset(prefix)
    self._seq_length, self._eod_id = seq_length, eod_id
    self.index: cache.Index | None = None
    check = functools.partial(self._check_layout, split_sentences)
    self._paths: tuple[str, ...] | None = None
    if request is not None:
      self.index = cache.open_index(npy_dir, prefix, request, write, check=check)
      arrays, self._paths = self.index.arrays, self.index.paths
    else:
      check(dataclasses.asdict(self._dataset.scan()))
      if prebuilt_indices is not None:
        arrays = prebuilt_indices
        cache.check_ranges(arrays, len(self._dataset), "prebuilt_indices")
      else:
        self._paths, arrays = cache.open_triplet(npy_dir, expected_hash, len(self._dataset))
    self._document_index, self._sample_index, self._shuffle_index = arrays
    self._check_eod(split_sentences)
    if request is None:
      self._check_seq_length(npy_dir)

  def _check_layout(self, split_sentences: bool, facts) -> None:
    prefix, head = self._dataset.path_prefix, self._dataset.header
    if facts["sentence_split"] and not split_sentences:
      raise MMapError(
          f"{prefix}.idx has documents of several sequences ({head.num_sequences} sequences in {head.num_documents} "
          "documents), as --split-sentences makes them; set mmap_split_sentences=true if that is meant."
      )
    stray = self._dataset.bin_file.size - facts["end"]
    if stray:
      log.warning("%s has %d bytes after its last sequence; they are ignored.", self._bin_path, stray)

  def _check_eod(self, split_sentences: bool) -> None:
    """Warns if no document that is looked at ends with the EOD token."""
    dataset = self._dataset
    documents = dataset.header.num_documents if split_sentences else len(dataset)
    probes = np.linspace(0, documents - 1, min(_EOD_PROBES, documents), dtype=np.int64)
    rows = dataset.doc_idx[probes + 1] - 1 if split_sentences else probes
    rows = [row for row in rows.tolist() if row >= 0 and dataset.sizes[row]]
    if rows and not any(dataset.get(row, int(dataset.sizes[row]) - 1, 1)[0] == self._eod_id for row in rows):
      last = int(dataset.get(rows[0], int(dataset.sizes[rows[0]]) - 1, 1)[0])
      log.warning(
          "NO EOD TOKEN FOUND: none of %d documents of %s ends with mmap_eod_id=%d (the first ends with %d), so "
          "documents are not separated. Set mmap_eod_id to the token that preprocessing wrote, or preprocess with "
          "--append-eod.",
          len(rows),
          dataset.path_prefix,
          self._eod_id,
          last,
      )

  def _check_seq_length(self, where: str) -> None:
    """Refuses indices that were built for another sequence length."""
    (document, offset), (last, end) = self._sample_index[0].tolist(), self._sample_index[1].tolist()
    sizes = self._dataset.sizes[self._document_index[document:last]]
    tokens = int(sizes.sum(dtype=np.int64)) - offset + end
    if len(self._shuffle_index) > 1 and tokens != self._seq_length:
      raise MMapError(
          f"{where}: the indices were built for a sequence length of {tokens}, not {self._seq_length}; build them again."
      )

  @property
  def path_prefix(self) -> str:
    return self._dataset.path_prefix

  @property
  def _bin_path(self) -> str:
    return self._dataset.bin_file.path

  def __len__(self) -> int:
    return len(self._shuffle_index)

  def __getitem__(self, index) -> dict[str, np.ndarray]:
    position = int(index)
    if position < 0:
      position += len(self)
    if not 0 <= position < len(self):
      raise IndexError(f"sample {index} of {len(self)}")
    return {"text": self._read(int(self._shuffle_index[position]))}

  def _read(self, sample: int) -> np.ndarray:
    """Reads the tokens of one row of the sample index, int32[seq_length + 1]."""
    dtype, wanted = self._dataset.header.dtype, self._seq_length + 1
    raw = np.empty((wanted + 1) * dtype.itemsize, np.uint8)  # a token more, to see a sample that is too long
    descriptor = DESCRIPTORS.acquire(self._dataset.bin_file)
    try:
      filled = kernels.read_sample(
          descriptor,
          dtype.itemsize,
          self._dataset.sizes,
          self._dataset.pointers,
          self._document_index,
          self._sample_index,
          sample,
          1,
          raw,
      )
    finally:
      DESCRIPTORS.release(self._dataset.bin_file)
    if filled < 0:
      filled = self._read_by_piece(sample, raw)
    count = filled // dtype.itemsize
    if count > wanted or count < wanted and sample != len(self._sample_index) - 2:  # the last may be partial
      raise MMapError(
          f"{self._bin_path}: sample {sample} has {'at least ' * (count > wanted)}{count} tokens; expected {wanted}; the "
          "indices are damaged, build them again."
      )
    tokens = raw.view(dtype)[:wanted]
    tokens[count:] = self._eod_id
    if dtype.itemsize == 8 and kernels.any_outside(tokens, 0, np.iinfo(np.int32).max):
      raise MMapError(f"{self._bin_path}: sample {sample} has token ids outside int32; MaxText's tokens are int32.")
    return tokens.astype(np.int32)

  def _read_by_piece(self, sample: int, raw: np.ndarray) -> int:
    """Reads a sample piece by piece, which retries interrupted calls and tells what is wrong; returns the bytes read."""
    (document, offset), (last, end) = self._sample_index[sample].tolist(), self._sample_index[sample + 1].tolist()
    filled = 0
    for entry in range(document, last + 1):
      sequence = int(self._document_index[entry])
      stop = end + 1 if entry == last else int(self._dataset.sizes[sequence])
      room = (len(raw) - filled) // self._dataset.header.dtype.itemsize
      try:
        piece = self._dataset.get(sequence, offset, min(stop - offset, room)).view(np.uint8)
      except IndexError as error:
        raise MMapError(
            f"{self._bin_path}: sample {sample} lies outside the dataset ({error}); the dataset was replaced or the "
            "indices are damaged, start again."
        ) from error
      raw[filled : filled + len(piece)] = piece
      filled, offset = filled + len(piece), 0
    return filled

  def __reduce__(self):
    return _reopen, (self._shipped(),)

  def _shipped(self) -> _Shipped:
    """Says what a worker process needs; arrays that are in memory only are written to a temporary folder, once."""
    arrays = (self._document_index, self._sample_index, self._shuffle_index)
    if self._paths is None:
      folder = tempfile.mkdtemp(prefix="maxtext-indices-")
      atexit.register(shutil.rmtree, folder, ignore_errors=True)
      self._paths = tuple(os.path.join(folder, f"{name}.npy") for name in cache.ARRAYS)
      for path, array in zip(self._paths, arrays, strict=True):
        cache.save_array(path, array)
    shapes = tuple((array.dtype.str, array.shape) for array in arrays)
    files = (self._dataset.bin_file, self._dataset.idx_file)
    return _Shipped(self._dataset.path_prefix, files, self._paths, shapes, self._eod_id, self._seq_length)


class _Shipped(NamedTuple):
  """A source as it goes to a worker process.

  Attributes:
    prefix: of the dataset.
    files: its `.bin` and `.idx` as the source opened them.
    paths, shapes: index files, and dtype and shape of their arrays.
    eod_id, seq_length: see `MegatronNpyDataSource`.
  """

  prefix: str
  files: tuple[FileIdentity, ...]
  paths: tuple[str, ...]
  shapes: tuple[tuple[str, tuple[int, ...]], ...]
  eod_id: int
  seq_length: int


def _reopen(shipped: _Shipped) -> MegatronNpyDataSource:
  """Opens a source in a worker process.

  Raises:
    MMapError: if a file is not the one that the sending process had opened.
  """
  source = MegatronNpyDataSource.__new__(MegatronNpyDataSource)
  source._dataset = MMapIndexedDataset(shipped.prefix)
  for then, now in zip(shipped.files, (source._dataset.bin_file, source._dataset.idx_file), strict=True):
    if not then.unchanged(now):
      raise MMapError(f"{now.path} was changed since the run opened it; start again with the dataset as it is to be.")
  try:
    arrays = tuple(map(cache.map_array, shipped.paths))
  except cache.StaleIndexError as error:
    raise MMapError(f"{error}; it was changed since the run opened it, start again.") from error
  if tuple((array.dtype.str, array.shape) for array in arrays) != shipped.shapes:
    raise MMapError(f"{shipped.paths[0]} or a file beside it was changed since the run opened it; start again.")
  source._document_index, source._sample_index, source._shuffle_index = arrays
  source._paths, source._eod_id, source._seq_length = shipped.paths, shipped.eod_id, shipped.seq_length
  source.index = None
  return source


def create_mmap_npy_source(
    spec, eod_id, seq_length, split_sentences, num_samples=None, seed=1234, split=None, split_index=0, num_epoch=1
) -> grain.MapDataset:
  """Opens "npy_dir|bin_prefix_or_directory" as a Grain dataset of samples.

  Args:
    spec: see `parse_npy_entry`.
    num_samples: samples asked for; None: `num_epoch` whole passes.
    Others: see `MegatronNpyDataSource` and `IndexRequest`.
  """
  npy_dir, bin_path = parse_npy_entry(spec)
  epochs = None if num_samples else max(1, num_epoch)
  request = IndexRequest(seq_length, seed, num_samples or None, epochs, split or "", split_index)
  source = MegatronNpyDataSource(npy_dir, bin_path, eod_id, seq_length, split_sentences, request=request)
  return grain.MapDataset.source(source)


def get_mmap_npy_dataset(
    data_file_pattern,
    split_sentences,
    seq_length,
    eod_id,
    num_epoch,
    host_index,
    host_count,
    num_threads,
    prefetch_buffer_size,
    blend_cache_dir,
    blend_index_dir,
    blend_split,
    apply_transforms,
    num_samples=None,
    seed=1234,
    blend_margin=0.5,
    split=None,
    split_index=0,
):
  """The released entry to the samples of one host; `apply_transforms` shards them and makes an iterator."""
  del blend_cache_dir, blend_index_dir, blend_split, blend_margin  # only for several datasets
  entries = parse_entries(data_file_pattern)
  if len(entries) > 1:
    raise MMapError(several_datasets("grain_train_files", len(entries)))
  dataset = create_mmap_npy_source(
      entries[0][0], eod_id, seq_length, split_sentences, num_samples, seed, split, split_index, num_epoch
  )
  return apply_transforms(dataset, False, 0, 1, host_index, host_count, num_threads, prefetch_buffer_size)


def several_datasets(key: str, count: int) -> str:
  return f"{key} names {count} weighted datasets; blends are not supported yet, name one dataset."


# Names of the released module, for those who import them.


def _resolve_bin_prefixes(bin_paths) -> list[str]:
  return resolve_shard_prefixes(bin_paths)


def _parse_mmap_npy_spec(spec: str) -> tuple[str, list[str]]:
  """Returns the index folder and the dataset paths of "npy_dir|path:path..."."""
  if spec.count("|") != 1:
    raise MMapError(f"mmap_npy spec must be 'npy_dir|bin_paths', got: {spec!r}.")
  folder, paths = spec.split("|")
  return folder.strip(), [path.strip() for path in paths.split(":")]


def _parse_weighted_mixture(data_file_pattern: str, format_name: str) -> tuple[list[str], list[float]]:
  """Returns entries and normalised weights of "entry,weight;...", those of weight 0 left out.

  Unlike `parse_entries`, a single entry has a weight too.
  """
  entries, weights = [], []
  for number, part in enumerate(data_file_pattern.split(";")):
    entry, comma, text = part.rpartition(",")
    try:
      weight = float(text)
    except ValueError:
      weight = math.nan
    for fault, found in (
        ("Malformed", not comma),
        ("Empty spec in", not entry.strip()),
        ("Invalid weight in", not math.isfinite(weight)),
        ("Negative weight in", weight < 0),
    ):
      if found:
        raise MMapError(f"{fault} {format_name} mixture entry {number}: {part!r} is not 'entry,weight' of 0 or more.")
    entries.append(entry.strip())
    weights.append(weight)
  if not 0 < sum(weights) < math.inf:
    raise MMapError(f"Total weight of {format_name} mixture is {sum(weights)}; expected a positive finite total.")
  kept = [pair for pair in zip(entries, _normalize_weights(weights), strict=True) if pair[1] > 0]
  return [entry for entry, _ in kept], [weight for _, weight in kept]


def _discover_npy_indices(npy_dir: str, expected_hash: str | None = None) -> tuple[str, ...]:
  """Returns the paths of the document, sample and shuffle index in a folder."""
  return cache.triplet_paths(npy_dir, expected_hash)


def _ensure_npy_indices(
    npy_dir, bin_paths, num_samples, seq_length, seed=1234, split=None, split_index=0, add_extra_token=1, num_epoch=1
):
  """Returns the name of an order, and None if its files were there or the arrays if they had to be built."""
  epochs = None if num_samples else max(1, num_epoch)
  request = IndexRequest(seq_length, seed, num_samples or None, epochs, split or "", split_index, add_extra_token)
  index = cache.open_index(npy_dir, bin_paths, request)
  return index.description.name, None if index.found else index.arrays
