# SPDX-License-Identifier: Apache-2.0
"""Data sources of the `mmap` file type: documents, and windows of fixed length over the tokens of all documents.

The sequences of a dataset stand in its `.bin` one after the other, so a window is a span of bytes. It is read as one; the
arrays of `.idx` are looked at only where a file has gaps. Public names and signatures are the release's.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
import concurrent.futures
import dataclasses
import logging
import pickle
from typing import Any, NamedTuple

import grain.python as grain
import numpy as np

from maxtext.input_pipeline import _mmap_guard
from maxtext.input_pipeline import _mmap_index_kernels as kernels
from maxtext.input_pipeline import _mmap_remote as remote
from maxtext.input_pipeline._mmap_files import MMapError
from maxtext.input_pipeline._mmap_index_utils import get_document_sizes, resolve_shard_prefixes, split_paths
from maxtext.input_pipeline._mmap_indexed_dataset import MMapIndexedDataset
from maxtext.input_pipeline._mmap_mixture import _parse_weighted_mixture

log = logging.getLogger(__name__)

_EOD_PROBES = 20  # document ends read to see whether a dataset has EOD tokens
_SCANNERS = 8  # threads that scan index files
_BLOCK = 1 << 12  # sequences between two entries of the table that a file with gaps needs
_INT32 = np.iinfo(np.int32)


# Tokens by position.


class Shard(NamedTuple):
  """What a token stream knows of a dataset before it opens it.

  Attributes:
    prefix: path without suffix.
    tokens: in all its sequences.
    contiguous: no gaps between its sequences, see `IndexFacts`.
    pickled: the dataset as it goes to worker processes.
    files: `.bin` and `.idx` as they were when the dataset was looked at.
  """

  prefix: str
  tokens: int
  contiguous: bool
  pickled: bytes
  files: tuple[Any, ...]

  @classmethod
  def of(cls, dataset: MMapIndexedDataset, facts: dict[str, Any] | None = None) -> Shard:
    """Describes an open dataset; `facts` are those of `dataset_facts`, found by a scan if None."""
    if facts is None:
      facts = dataclasses.asdict(dataset.scan())
    files = (dataset.bin_file, dataset.idx_file)
    return cls(dataset.path_prefix, facts["tokens"], bool(facts["contiguous"]), pickle.dumps(dataset), files)

  def open(self) -> MMapIndexedDataset:
    """Opens the dataset again.

    Raises:
      MMapError: if it is not the one that was looked at.
    """
    dataset: MMapIndexedDataset = pickle.loads(self.pickled)
    for then, now in zip(self.files, (dataset.bin_file, dataset.idx_file), strict=True):
      if not then.unchanged(now):
        raise MMapError(f"{now.path} was changed since the run opened it; start again with the dataset as it is to be.")
    return dataset


class _Span(NamedTuple):
  """Tokens from a byte of a `.bin` file on, and the part of the output that they fill."""

  dataset: MMapIndexedDataset
  position: int
  length: int
  row: int
  column: int


class TokenStream:
  """The tokens of all sequences of one or several datasets, numbered through. Pickles by the paths of its files.

  A dataset is opened when its first token is asked for, so that thousands of them cost nothing until they are read.

  Args:
    shards: in their order.
  """

  def __init__(self, shards: Sequence[Shard]):
    self.shards = tuple(shards)
    self._ends = np.cumsum([shard.tokens for shard in self.shards], dtype=np.int64).tolist()
    self._open: dict[int, MMapIndexedDataset] = {}
    self._tables: dict[int, np.ndarray] = {}

  def __len__(self) -> int:
    return self._ends[-1] if self._ends else 0

  def __reduce__(self):
    return TokenStream, (self.shards,)

  def read(self, starts: Sequence[int], out: np.ndarray) -> None:
    """Reads spans of tokens of equal length; nothing else of `.bin` is touched.

    Args:
      starts: first token of each, [n].
      out: int32[n, length], filled.

    Raises:
      IndexError: if a span lies outside the stream.
      MMapError: if a file cannot be read, was changed, or holds ids outside int32.
    """
    spans: list[_Span] = []
    for row, start in enumerate(starts):
      if not 0 <= start <= start + out.shape[1] <= len(self):
        raise IndexError(f"tokens {start} to {start + out.shape[1]} of {len(self)}")
      spans.extend(self._spans(start, row, out.shape[1]))
    for span, tokens in zip(spans, _read_spans(spans), strict=True):
      if tokens.itemsize == 8 and kernels.any_outside(tokens, _INT32.min, _INT32.max):
        raise MMapError(f"{span.dataset.bin_file.path} holds token ids outside int32; MaxText's tokens are int32.")
      out[span.row, span.column : span.column + span.length] = tokens
    _mmap_guard.check()

  def shard_at(self, token: int) -> int:
    """Returns the number of the shard that holds a token."""
    return bisect.bisect_right(self._ends, token)

  def _spans(self, start: int, row: int, length: int) -> Iterator[_Span]:
    column = 0
    while column < length:
      number = self.shard_at(start + column)
      first = start + column - (self._ends[number] - self.shards[number].tokens)
      count = min(length - column, self.shards[number].tokens - first)
      for position, piece in self._locate(number, first, count):
        yield _Span(self._opened(number), position, piece, row, column)
        column += piece

  def _locate(self, number: int, first: int, count: int) -> Iterator[tuple[int, int]]:
    """Yields byte position and tokens of the pieces in which tokens of one shard lie."""
    dataset = self._opened(number)
    itemsize = dataset.header.dtype.itemsize
    if self.shards[number].contiguous:
      yield first * itemsize, count
      return
    table = self._table(number)
    block = int(np.searchsorted(table, first, side="right")) - 1
    row, offset = block * _BLOCK, first - int(table[block])
    ends = np.cumsum(dataset.sizes[row : row + _BLOCK], dtype=np.int64)
    skipped = int(np.searchsorted(ends, offset, side="right"))
    row, offset = row + skipped, offset - (int(ends[skipped - 1]) if skipped else 0)
    while count:
      if row == len(dataset):  # the total was counted when the stream was opened
        raise MMapError(f"{dataset.idx_file.path} was changed since the run opened it; start again.")
      piece = min(count, int(dataset.sizes[row]) - offset)
      if piece:
        yield int(dataset.pointers[row]) + offset * itemsize, piece
      row, offset, count = row + 1, 0, count - piece
    _mmap_guard.check([dataset.tail])

  def _table(self, number: int) -> np.ndarray:
    """Returns the first token of every `_BLOCK`-th sequence, int64; a file with gaps needs it to find a token."""
    table = self._tables.get(number)
    if table is None:
      sizes = self._opened(number).sizes
      sums = [int(sizes[row : row + _BLOCK].sum(dtype=np.int64)) for row in range(0, len(sizes), _BLOCK)]
      table = self._tables[number] = np.cumsum([0, *sums[:-1]], dtype=np.int64)
    return table

  def _opened(self, number: int) -> MMapIndexedDataset:
    dataset = self._open.get(number)
    if dataset is None:
      dataset = self._open[number] = self.shards[number].open()
    return dataset


def _read_spans(spans: Sequence[_Span]) -> list[np.ndarray]:
  """Reads spans, each in its file's dtype; those of files at URLs in one wave."""
  distant = []
  for span in spans:
    file = span.dataset.bin_file
    if isinstance(file, remote.RemoteFile):
      distant.append((file, span.position, span.length * span.dataset.header.dtype.itemsize))
  fetched = iter(remote.read_many(distant) if distant else ())
  return [
      np.frombuffer(next(fetched), span.dataset.header.dtype)
      if span.dataset.is_remote
      else span.dataset.read_bytes(span.position, span.length)
      for span in spans
  ]


# Documents.


class MMapIndexedDataSource(grain.RandomAccessDataSource):
  """The documents of one Megatron dataset: element i is {feature_name: tokens in the dataset's dtype, [length]}.

  Args:
    path_prefix: path of the dataset without suffix.
    feature_name: key of the tokens.
    split_sentences: join the sequences of a document, as `--split-sentences` makes them; otherwise every sequence is a
      document.

  Raises:
    MMapError: if the dataset cannot be opened.
  """

  def __init__(self, path_prefix: str, feature_name: str = "text", split_sentences: bool = False):
    self._path_prefix, self._feature_name, self._split_sentences = path_prefix, feature_name, split_sentences
    self._dataset = MMapIndexedDataset(path_prefix)

  def __len__(self) -> int:
    return self._dataset.header.num_documents if self._split_sentences else len(self._dataset)

  def __getitem__(self, index) -> dict[str, np.ndarray]:
    document = _in_range(index, len(self), self._path_prefix)
    first, last = self._rows(document)
    pieces = [self._dataset.get(row) for row in range(first, last)]
    return {self._feature_name: np.concatenate(pieces or [np.empty(0, self._dataset.dtype)])}

  def _rows(self, document: int) -> tuple[int, int]:
    """Returns the sequences [first, last) of a document."""
    if not self._split_sentences:
      return document, document + 1
    first, last = self._dataset.doc_idx[document : document + 2].tolist()
    return first, last

  def doc_token_counts(self) -> np.ndarray:
    """Returns the tokens of each document, int64[documents]; a document without sequences has 0."""
    if self._split_sentences:
      return get_document_sizes([self._path_prefix])
    return self._dataset.sizes.astype(np.int64)

  def check_eod_presence(self, eod_id: int, mode_label: str) -> None:
    """Warns if no document that is looked at ends with EOD; `mode_label` names the file type in the warning."""
    _warn_without_eod(self.last_tokens(_EOD_PROBES), eod_id, self._path_prefix, mode_label)

  def last_tokens(self, most: int) -> list[int]:
    """Returns the last tokens of up to `most` documents, spread over the dataset; empty documents have none."""
    found = []
    for document in np.linspace(0, len(self) - 1, min(most, len(self)), dtype=np.int64).tolist():
      row = self._rows(document)[1] - 1
      if row >= self._rows(document)[0] and self._dataset.sizes[row]:
        found.append(int(self._dataset.get(row, int(self._dataset.sizes[row]) - 1, 1)[0]))
    return found

  def token_stream(self) -> TokenStream:
    """Returns the tokens of all documents by position; scans the index.

    Raises:
      MMapError: if the index is damaged.
    """
    return TokenStream([self.shard()])

  def shard(self, facts: dict[str, Any] | None = None) -> Shard:
    return Shard.of(self._dataset, facts)

  def __getstate__(self):
    return {
        "path_prefix": self._path_prefix,
        "feature_name": self._feature_name,
        "split_sentences": self._split_sentences,
    }

  def __setstate__(self, state):
    self.__init__(**state)


class MultiShardMMapIndexedDataSource(grain.RandomAccessDataSource):
  """The documents of several datasets as one: those of the first, then those of the second, and so on.

  Args:
    path_prefixes: paths of the datasets without suffix.
    feature_name, split_sentences: see `MMapIndexedDataSource`.

  Raises:
    MMapError: if a dataset cannot be opened.
  """

  def __init__(self, path_prefixes: list[str], feature_name: str = "text", split_sentences: bool = False):
    self._path_prefixes = list(path_prefixes)
    self._feature_name, self._split_sentences = feature_name, split_sentences
    self._sources = [MMapIndexedDataSource(prefix, feature_name, split_sentences) for prefix in self._path_prefixes]
    self._ends = np.cumsum([len(source) for source in self._sources], dtype=np.int64).tolist()

  def __len__(self) -> int:
    return self._ends[-1] if self._ends else 0

  def __getitem__(self, index) -> dict[str, np.ndarray]:
    document = _in_range(index, len(self), self._name)
    shard = bisect.bisect_right(self._ends, document)
    return self._sources[shard][document - self._ends[shard] + len(self._sources[shard])]

  @property
  def datasets(self) -> list[MMapIndexedDataset]:
    return [source._dataset for source in self._sources]

  @property
  def _name(self) -> str:
    more = len(self._path_prefixes) - 1
    return self._path_prefixes[0] + (f" and {more} more" if more else "") if self._path_prefixes else "no dataset"

  def doc_token_counts(self) -> np.ndarray:
    """Returns the tokens of each document, int64[documents]."""
    return np.concatenate([source.doc_token_counts() for source in self._sources] or [np.empty(0, np.int64)])

  def check_eod_presence(self, eod_id: int, mode_label: str) -> None:
    """Warns if no document that is looked at, in datasets spread over the list, ends with EOD."""
    filled = [source for source in self._sources if len(source)]
    chosen = np.linspace(0, len(filled) - 1, min(_EOD_PROBES, len(filled)), dtype=np.int64).tolist()
    tokens = [token for number in chosen for token in filled[number].last_tokens(-(-_EOD_PROBES // len(chosen)))]
    _warn_without_eod(tokens, eod_id, self._name, mode_label)

  def token_stream(self, facts: Sequence[dict[str, Any]] | None = None) -> TokenStream:
    """Returns the tokens of all documents by position; scans the indices if `facts` of all datasets are not given."""
    with concurrent.futures.ThreadPoolExecutor(_SCANNERS) as pool:
      known = facts or [None] * len(self._sources)
      return TokenStream(list(pool.map(MMapIndexedDataSource.shard, self._sources, known)))

  def __getstate__(self):
    return {
        "path_prefixes": self._path_prefixes,
        "feature_name": self._feature_name,
        "split_sentences": self._split_sentences,
    }

  def __setstate__(self, state):
    self.__init__(**state)


def _in_range(index, length: int, name: str) -> int:
  """Returns an index counted from the front.

  Raises:
    IndexError: if it is outside [-length, length).
  """
  position = index + length if index < 0 else index
  if not 0 <= position < length:
    raise IndexError(f"{name}: index {index} is outside a length of {length}")
  return int(position)


def _warn_without_eod(last_tokens: list[int], eod_id: int, name: str, mode_label: str) -> None:
  if last_tokens and eod_id not in last_tokens:
    log.warning(
        "NO EOD TOKEN FOUND (%s): none of %d documents of %s ends with mmap_eod_id=%d (the first ends with %d), and none "
        "is inserted, so documents are not separated. Set mmap_eod_id to the token that preprocessing wrote, or "
        "preprocess with --append-eod.",
        mode_label,
        len(last_tokens),
        name,
        eod_id,
        last_tokens[0],
    )


# Windows.


class MMapSampleIndexDataSource(grain.RandomAccessDataSource):
  """Windows of fixed length over the tokens of all documents: element i is {"text": int32[seq_length]}.

  Nothing is inserted between documents. A read takes the bytes of the window and no more.

  Args:
    inner_source: one of the sources above; or any source of {"text": tokens} that has `doc_token_counts()`, of which
      whole documents are read.
    seq_length: tokens of a window.
    eod_id: token that ends a document; fills the last window.
    drop_last: leave out a last window that is not full.

  Raises:
    MMapError: if `seq_length` is not positive or an index is damaged.
  """

  def __init__(self, inner_source, seq_length: int, eod_id: int, drop_last: bool = True):
    if seq_length <= 0:
      raise MMapError(f"seq_length must be positive, got {seq_length}.")
    self._seq_length, self._eod_id = seq_length, eod_id
    has_stream = hasattr(inner_source, "token_stream")
    self._stream = inner_source.token_stream() if has_stream else _DocumentStream(inner_source)
    tokens = len(self._stream)
    self._num_samples = tokens // seq_length if drop_last else -(-tokens // seq_length)
    inner_source.check_eod_presence(eod_id, "mmap mode")

  def __len__(self) -> int:
    return self._num_samples

  def __getitem__(self, index) -> dict[str, np.ndarray]:
    start = _in_range(index, self._num_samples, "windows") * self._seq_length
    window = np.full((1, self._seq_length), self._eod_id, np.int32)
    self._stream.read([start], window[:, : len(self._stream) - start])
    return {"text": window[0]}


class _DocumentStream:
  """Like `TokenStream`, of a source that gives whole documents; keeps 8 bytes per document."""

  def __init__(self, source):
    self._source, self._ends = source, np.cumsum(source.doc_token_counts(), dtype=np.int64)

  def __len__(self) -> int:
    return int(self._ends[-1]) if len(self._ends) else 0

  def read(self, starts: Sequence[int], out: np.ndarray) -> None:
    for row, start in zip(out, starts, strict=True):
      document, filled = int(np.searchsorted(self._ends, start, side="right")), 0
      while filled < len(row):
        tokens = self._source[document]["text"]
        offset = start + filled - (int(self._ends[document]) - len(tokens))
        piece = tokens[offset : offset + len(row) - filled]
        row[filled : filled + len(piece)] = piece
        document, filled = document + 1, filled + len(piece)


def open_documents(paths, split_sentences: bool) -> MMapIndexedDataSource | MultiShardMMapIndexedDataSource:
  """Opens the documents of the dataset that a path names: one shard, a folder of them, or several joined by ':'.

  Raises:
    MMapError: if the path names no dataset, or one that cannot be opened.
  """
  prefixes = resolve_shard_prefixes(split_paths(paths) if isinstance(paths, str) else paths)
  if len(prefixes) == 1:
    return MMapIndexedDataSource(prefixes[0], split_sentences=split_sentences)
  return MultiShardMMapIndexedDataSource(prefixes, split_sentences=split_sentences)


def create_mmap_source(path_prefix, split_sentences, seq_length, eod_id) -> grain.MapDataset:
  """Opens a dataset as Grain's dataset of windows, or of documents if `seq_length` is 0 or None or `eod_id` is None."""
  source = open_documents(path_prefix, split_sentences)
  if seq_length and eod_id is not None:
    source = MMapSampleIndexDataSource(source, seq_length=seq_length, eod_id=eod_id)
  return grain.MapDataset.source(source)


def get_mmap_dataset(
    data_file_pattern,
    split_sentences,
    seq_length,
    eod_id,
    shuffle,
    shuffle_seed,
    num_epoch,
    host_index,
    host_count,
    num_threads,
    prefetch_buffer_size,
    apply_transforms,
):
  """The released entry to the windows of one host; `apply_transforms` shuffles, repeats, shards and makes an iterator.

  Weighted datasets are mixed after that, so a mixture depends on the number of hosts; that of `open_windows` does not.
  """
  reading = (shuffle, shuffle_seed, num_epoch, host_index, host_count, num_threads, prefetch_buffer_size)
  if ";" not in data_file_pattern:
    return apply_transforms(create_mmap_source(data_file_pattern, split_sentences, seq_length, eod_id), *reading)
  paths, weights = _parse_weighted_mixture(data_file_pattern, "mmap")
  datasets = [create_mmap_source(path, split_sentences, seq_length, eod_id) for path in paths]
  return grain.IterDataset.mix([apply_transforms(dataset, *reading) for dataset in datasets], weights)
