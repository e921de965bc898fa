# SPDX-License-Identifier: Apache-2.0
"""Grain data sources over Megatron datasets, and what `grain_train_files` may say about them.

Replaces the release's module of this name; public names and signatures are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import dataclasses
import functools
import itertools
import logging

import grain.python as grain
import numpy as np

from maxtext.input_pipeline import _mmap_guard
from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_kernels as kernels
from maxtext.input_pipeline import _mmap_mixture as mixtures
from maxtext.input_pipeline._mmap_files import FileIdentity
from maxtext.input_pipeline._mmap_index_cache import IndexRequest
from maxtext.input_pipeline._mmap_index_utils import resolve_shard_prefixes, split_paths
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
from maxtext.input_pipeline._mmap_mixture import Mixture, parse_mixture, parse_npy_entry
from maxtext.input_pipeline._mmap_shards import Piece, ShardedDataset
from maxtext.input_pipeline._mmap_windows import (
    MMapIndexedDataSource,
    MMapSampleIndexDataSource,
    MultiShardMMapIndexedDataSource,
    create_mmap_source,
    get_mmap_dataset,
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
    "Mixture",
    "MultiShardMMapIndexedDataSource",
    "create_mmap_npy_source",
    "create_mmap_source",
    "get_mmap_dataset",
    "get_mmap_npy_dataset",
    "parse_mixture",
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


# Samples in Megatron's order.


class MegatronNpyDataSource(grain.RandomAccessDataSource):
  """The samples of one Megatron dataset in Megatron's order.

  Element i is {"text": int32[seq_length + 1]}, the tokens that megatron-core's GPTDataset returns for i. Nothing is
  inserted. A read takes the bytes of the sample and no more. Threads may share a source; it pickles by the paths of its
  files, which a worker process maps without checking them again, after a look whether they are the same.

  Args:
    npy_dir: folder of index files.
    bin_paths: one or several prefixes of datasets, or folders of datasets, read as one; or a ShardedDataset.
    eod_id: token that ends a document, looked for at some document ends; a warning says if it is nowhere.
    seq_length: tokens of a sample, without the extra one.
    split_sentences: the data was made with `--split-sentences`; otherwise such data is refused.
    expected_hash: beginning of the index files' names; None if `npy_dir` holds one order.
    prebuilt_indices: document, sample and shuffle index, instead of files.
    request: the order to load from `npy_dir` or to build there, instead of `expected_hash`.
    write: whether to write indices that had to be built; None: if this is the primary process.
    progress: see `_mmap_index_utils.iter_indices`.

  Raises:
    MMapError: if dataset or indices cannot be used.
  """

  def __init__(
      self,
      npy_dir: str,
      bin_paths: str | list[str] | ShardedDataset,
      eod_id: int,
      seq_length: int,
      split_sentences: bool = False,
      expected_hash: str | None = None,
      prebuilt_indices: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
      *,
      request: IndexRequest | None = None,
      write: bool | None = None,
      progress=None,
  ):
    self.dataset = cache.open_dataset(bin_paths)
    self._seq_length, self._eod_id = seq_length, eod_id
    self.index: cache.Index | None = None
    check = functools.partial(self._check_layout, split_sentences)
    paths: tuple[str, ...] | None = None
    if request is not None:
      self.index = cache.open_index(npy_dir, self.dataset, request, write, progress, check)
      arrays, paths = self.index.arrays, self.index.paths
    else:
      check([dataclasses.asdict(shard.scan()) for shard in self.dataset.shards])
      if prebuilt_indices is not None:
        arrays = prebuilt_indices
        cache.check_ranges(arrays, len(self.dataset), "prebuilt_indices")
      else:
        paths, arrays = cache.open_triplet(npy_dir, expected_hash, len(self.dataset))
    self._set_arrays(cache.StoredArrays(arrays, cache.ARRAYS, paths))
    self._check_eod(split_sentences)
    if request is None:
      self._check_seq_length(npy_dir)

  def _set_arrays(self, stored: cache.StoredArrays) -> None:
    self._stored = stored
    self._document_index, self._sample_index, self._shuffle_index = stored.arrays
    self._tails = (*stored.tails, self.dataset.shards[0].tail)

  def _check_layout(self, split_sentences: bool, facts) -> None:
    for shard, fact in zip(self.dataset.shards, facts, strict=True):
      head = shard.header
      if fact["sentence_split"] and not split_sentences:
        raise MMapError(
            f"{shard.path_prefix}.idx has documents of several sequences ({head.num_sequences} sequences in "
            f"{head.num_documents} documents), as --split-sentences makes them; set mmap_split_sentences=true if that is "
            "meant."
        )
      stray = shard.bin_file.size - fact["end"]
      if stray:
        log.warning("%s has %d bytes after its last sequence; they are ignored.", shard.bin_file.path, stray)

  def _check_eod(self, split_sentences: bool) -> None:
    """Warns if no document that is looked at ends with the EOD token."""
    pieces = (piece for piece in self._document_ends(split_sentences) if piece.length)
    tokens: list[int] = []
    for part in (itertools.islice(pieces, 1), pieces):  # in most datasets the first one has it
      tokens += [int(token[0]) for token in self.dataset.read(list(part))]
      if self._eod_id in tokens:
        return
    if tokens:
      log.warning(
          "NO EOD TOKEN FOUND: none of %d documents of %s ends with mmap_eod_id=%d (the first ends with %d), so "
          "documents are not separated. Set mmap_eod_id to the token that preprocessing wrote, or preprocess with "
          "--append-eod.",
          len(tokens),
          self.dataset.name,
          self._eod_id,
          tokens[0],
      )

  def _document_ends(self, split_sentences: bool) -> Iterator[Piece]:
    """Yields the last tokens of documents here and there; pieces of length 0 for empty documents."""
    shards = self.dataset.shards
    chosen = np.linspace(0, len(shards) - 1, min(_EOD_PROBES, len(shards)), dtype=np.int64).tolist()
    for number in chosen:
      shard = shards[number]
      documents = shard.header.num_documents if split_sentences else len(shard)
      probes = np.linspace(0, documents - 1, min(-(-_EOD_PROBES // len(chosen)), documents), dtype=np.int64)
      rows = shard.doc_idx[probes + 1] - 1 if split_sentences else probes
      for row in (row for row in rows.tolist() if row >= 0):
        size = int(shard.sizes[row])
        yield Piece(number, row, max(size - 1, 0), min(size, 1))

  def _check_seq_length(self, where: str) -> None:
    """Refuses indices that were built for another sequence length."""
    (document, offset), (last, end) = self._sample_index[0].tolist(), self._sample_index[1].tolist()
    lengths = [self._length(int(sequence)) for sequence in self._document_index[document:last]]
    tokens = sum(lengths) - offset + end
    if len(self._shuffle_index) > 1 and tokens != self._seq_length:
      raise MMapError(
          f"{where}: the indices were built for a sequence length of {tokens}, not {self._seq_length}; build them again."
      )

  def _length(self, sequence: int) -> int:
    shard, row = self.dataset.locate(sequence)
    return int(self.dataset.shards[shard].sizes[row])

  @property
  def name(self) -> str:
    """The dataset as a message names it."""
    return self.dataset.name

  def __len__(self) -> int:
    return len(self._shuffle_index)

  def __getitem__(self, index) -> dict[str, np.ndarray]:
    tokens = self._read_one(index)
    return {"text": self.read_rows([index])[0] if tokens is None else tokens}

  def _read_one(self, index) -> np.ndarray | None:
    """Reads a whole sample of one local file, the usual case, faster than `read_rows`; None if it is not that."""
    shard = self.dataset.shards[0]
    file, dtype, position = shard.bin_file, shard.header.dtype, int(index)
    if not isinstance(file, FileIdentity) or len(self.dataset.shards) > 1 or dtype.itemsize == 8:
      return None
    if not 0 <= position < len(self):
      return None
    sample = self._sample(position)
    raw = np.empty((self._seq_length + 2) * dtype.itemsize, np.uint8)  # a token more, to see one that is too long
    arrays = shard.sizes, shard.pointers, self._document_index, self._sample_index
    descriptor = DESCRIPTORS.acquire(file)
    try:
      filled = kernels.read_sample(descriptor, dtype.itemsize, *arrays, sample, 1, raw)
    finally:
      DESCRIPTORS.release(file)
    if filled != len(raw) - dtype.itemsize:
      return None
    _mmap_guard.check(self._tails)
    return raw[:filled].view(dtype).astype(np.int32)

  def _sample(self, index) -> int:
    """Returns the row of the sample index that element `index` is."""
    position = int(index)
    if position < 0:
      position += len(self)
    if not 0 <= position < len(self):
      raise IndexError(f"sample {index} of {len(self)}")
    sample = int(self._shuffle_index[position])
    if not 0 <= sample < len(self._sample_index) - 1:
      self._refuse_place(sample, IndexError(f"there are {len(self._sample_index) - 1} samples"))
    return sample

  def read_rows(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
    """Reads several elements, int32[len(indices), seq_length + 1]."""
    shards = self.dataset.shards
    try:
      samples = [self._sample(index) for index in indices]
      if len(shards) == 1 and not shards[0].is_remote:
        return self._read_compiled(shards[0], samples)
      return self._read_pieces(samples)
    finally:  # a mapped file that was truncated explains whatever went wrong
      _mmap_guard.check(self._tails)

  def _read_compiled(self, shard: MMapIndexedDataset, samples: list[int]) -> np.ndarray:
    """Reads samples of the one local file in one call."""
    dtype, wanted = shard.header.dtype, self._seq_length + 1
    raw = np.empty((len(samples), (wanted + 1) * dtype.itemsize), np.uint8)  # a token more, to see one that is too long
    filled = np.empty(len(samples), np.int64)
    file = shard.bin_file
    assert isinstance(file, FileIdentity)
    descriptor = DESCRIPTORS.acquire(file)
    try:
      kernels.read_samples(
          descriptor,
          dtype.itemsize,
          shard.sizes,
          shard.pointers,
          self._document_index,
          self._sample_index,
          np.array(samples, np.int64),
          1,
          raw,
          filled,
      )
    finally:
      DESCRIPTORS.release(file)
    tokens = raw.view(dtype)[:, :wanted]
    for row in np.flatnonzero(filled != wanted * dtype.itemsize).tolist():
      if filled[row] < 0:  # piece by piece, which retries interrupted calls and tells what is wrong
        pieces = self._pieces(samples[row])
        found = np.concatenate(self._read(pieces, samples[row]))[: wanted + 1]
        filled[row] = found.nbytes
        raw.view(dtype)[row, : len(found)] = found
      self._check_count(samples[row], int(filled[row]) // dtype.itemsize)
      tokens[row, int(filled[row]) // dtype.itemsize :] = self._eod_id
    if dtype.itemsize == 8 and kernels.any_outside(tokens.ravel(), 0, np.iinfo(np.int32).max):
      bad = ((tokens < 0) | (tokens > np.iinfo(np.int32).max)).any(axis=1)
      self._refuse_ids(samples[int(np.argmax(bad))])
    return tokens.astype(np.int32)

  def _read_pieces(self, samples: list[int]) -> np.ndarray:
    """Reads samples of several files, or of files at a URL, all pieces in one wave."""
    pieces = [self._pieces(sample) for sample in samples]
    found = iter(self._read([piece for sample in pieces for piece in sample], samples[0] if samples else 0))
    rows = np.full((len(samples), self._seq_length + 1), self._eod_id, np.int32)
    for row, (sample, parts) in enumerate(zip(samples, pieces, strict=True)):
      self._check_count(sample, sum(piece.length for piece in parts))
      filled = 0
      for piece in parts:
        tokens = next(found)
        if tokens.dtype.itemsize == 8 and kernels.any_outside(tokens, 0, np.iinfo(np.int32).max):
          self._refuse_ids(sample)
        rows[row, filled : filled + piece.length] = tokens
        filled += piece.length
    used = {piece.shard for sample in pieces for piece in sample}
    _mmap_guard.check(self.dataset.shards[number].tail for number in used)
    return rows

  def _read(self, pieces: Sequence[Piece], sample: int) -> list[np.ndarray]:
    try:
      return self.dataset.read(pieces)
    except IndexError as error:
      self._refuse_place(sample, error)

  @property
  def _where(self) -> str:
    """The file of the tokens, or of the first of several shards."""
    shards = self.dataset.shards
    return shards[0].bin_file.path if len(shards) == 1 else self.name

  def _refuse_place(self, sample: int, error: Exception):
    raise MMapError(
        f"{self._where}: sample {sample} lies outside the dataset ({error}); the dataset was replaced or the indices are "
        "damaged, start again."
    ) from error

  def _refuse_ids(self, sample: int) -> None:
    raise MMapError(f"{self._where}: sample {sample} has token ids outside int32; MaxText's tokens are int32.")

  def _check_count(self, sample: int, count: int) -> None:
    """Raises MMapError unless a sample has as many tokens as it should; the last row may have fewer."""
    wanted = self._seq_length + 1
    if count > wanted or count < wanted and sample != len(self._sample_index) - 2:
      raise MMapError(
          f"{self._where}: sample {sample} has {'at least ' * (count > wanted)}{count} tokens; expected {wanted}; the "
          "indices are damaged, build them again."
      )

  def pieces(self, index: int) -> list[Piece]:
    """Returns where the tokens of element `index` lie, in order."""
    return self._pieces(self._sample(index))

  def file_of(self, index: int, token: int) -> str:
    """Returns the path of the `.bin` that holds a token of element `index`."""
    ends = 0
    for piece in self.pieces(index):
      ends += piece.length
      if token < ends:
        return self.dataset.shards[piece.shard].bin_file.path
    return self.name  # of a partial last sample

  def _pieces(self, sample: int) -> list[Piece]:
    (entry, offset), (last, end) = self._sample_index[sample].tolist(), self._sample_index[sample + 1].tolist()
    pieces, left = [], self._seq_length + 2
    while entry <= last and left > 0:
      try:
        shard, row = self.dataset.locate(int(self._document_index[entry]) if entry >= 0 else entry)
      except IndexError as error:
        self._refuse_place(sample, error)
      stop = end + 1 if entry == last else int(self.dataset.shards[shard].sizes[row])
      pieces.append(Piece(shard, row, offset, min(stop - offset, left)))
      left -= stop - offset
      entry, offset = entry + 1, 0
    return [piece for piece in pieces if piece.length]

  def __reduce__(self):
    files = tuple((shard.bin_file, shard.idx_file) for shard in self.dataset.shards)
    return _reopen, (self.dataset, files, self._stored.ship(), self._eod_id, self._seq_length)


def _reopen(dataset, files: Sequence[tuple[FileIdentity, ...]], shipped, eod_id: int, seq_length: int):
  """Opens a source in a worker process.

  Raises:
    MMapError: if a file is not the one that the sending process had opened.
  """
  source = MegatronNpyDataSource.__new__(MegatronNpyDataSource)
  source.dataset = dataset
  for then, shard in zip(files, source.dataset.shards, strict=True):
    for before, now in zip(then, (shard.bin_file, shard.idx_file), strict=True):
      if not before.unchanged(now):
        raise MMapError(f"{now.path} was changed since the run opened it; start again with the dataset as it is to be.")
  source._set_arrays(shipped.open())
  source._eod_id, source._seq_length = eod_id, seq_length
  source.index = None
  return source


def create_mmap_npy_source(
    spec, eod_id, seq_length, split_sentences, num_samples=None, seed=1234, split=None, split_index=0, num_epoch=1
) -> grain.MapDataset:
  """Opens "npy_dir|path:path..." as a Grain dataset of samples.

  Args:
    spec: see `parse_npy_entry`.
    num_samples: samples asked for; None: `num_epoch` whole passes.
    Others: see `MegatronNpyDataSource` and `IndexRequest`.
  """
  npy_dir, paths = parse_npy_entry(spec)
  epochs = None if num_samples else max(1, num_epoch)
  request = IndexRequest(seq_length, seed, num_samples or None, epochs, split or "", split_index)
  source = MegatronNpyDataSource(npy_dir, paths, eod_id, seq_length, split_sentences, request=request)
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
  from maxtext.input_pipeline import _mmap_stream as stream  # pylint: disable=import-outside-toplevel

  settings = stream.StreamSettings(
      files=data_file_pattern,
      seq_length=seq_length,
      eod_id=eod_id,
      seed=seed,
      num_samples=num_samples or None,
      num_epochs=num_epoch,
      split=split or "",
      split_index=split_index,
      split_sentences=split_sentences,
      blend_margin=blend_margin,
      blend_cache_dir=blend_cache_dir or "",
      blend_index_dir=blend_index_dir or "",
      part={"eval": "valid"}.get(blend_split, blend_split),
  )
  dataset = grain.MapDataset.source(stream.open_stream(settings).source)
  return apply_transforms(dataset, False, 0, 1, host_index, host_count, num_threads, prefetch_buffer_size)


# Names of the released module, for those who import them.


_parse_weighted_mixture = mixtures._parse_weighted_mixture


def _resolve_bin_prefixes(bin_paths) -> list[str]:
  return resolve_shard_prefixes(bin_paths)


def _parse_mmap_npy_spec(spec: str) -> tuple[str, list[str]]:
  """Returns the index folder and the dataset paths of "npy_dir|path:path..."."""
  if spec.count("|") != 1:
    raise MMapError(f"mmap_npy spec must be 'npy_dir|bin_paths', got: {spec!r}.")
  folder, paths = spec.split("|")
  return folder.strip(), split_paths(paths)


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
