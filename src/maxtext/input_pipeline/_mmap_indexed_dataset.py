# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's indexed dataset format: a `.bin` file of tokens and an `.idx` file that says where sequences lie.

Layout of `.idx`, little-endian, without padding:

    9 bytes   magic, b"MMIDIDX\\x00\\x00"
    uint64    version, 1
    uint8     dtype code of the tokens
    uint64    number of sequences, N
    uint64    length of the document index, or (an older variant) the number of documents
    int32[N]  sequence lengths, in tokens
    int64[N]  byte offset of each sequence in `.bin`
    int64[]   document index: the first sequence of each document, and N at the end

Source: the writer and reader of megatron-core, `megatron/core/datasets/indexed_dataset.py`. NumPy only, and fsspec for
a dataset at a URL.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
import os
import stat
import struct

import numpy as np

from maxtext.input_pipeline import _mmap_guard
from maxtext.input_pipeline import _mmap_remote as remote
from maxtext.input_pipeline._mmap_files import (
    DESCRIPTORS,
    FileIdentity,
    MMapError,
    MMapFileNotFoundError,
    MMapReadError,
    map_file,
    reading,
    unreadable,
)

MMAP_INDEX_MAGIC = b"MMIDIDX\x00\x00"
MMAP_INDEX_MAGIC_LEN = len(MMAP_INDEX_MAGIC)
MMAP_INDEX_VERSION = 1
MMAP_INDEX_HEADER_SIZE = 34

DTYPE_CODES = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
DTYPE_CODES_INV = {dtype: code for code, dtype in DTYPE_CODES.items()}

# Megatron's document index is int32, so it cannot name more sequences than this.
MAX_SEQUENCES = 2**31 - 1

_SCAN_ROWS = 1 << 16  # rows of the index checked at a time: they stay in the cache


@dataclasses.dataclass(frozen=True)
class IndexHeader:
  """What the first 34 bytes and the size of an `.idx` file say.

  Attributes:
    dtype: token dtype, an integer type.
    num_sequences: N.
    num_documents: documents, empty ones included.
  """

  dtype: np.dtype
  num_sequences: int
  num_documents: int

  @property
  def lengths_at(self) -> int:
    return MMAP_INDEX_HEADER_SIZE

  @property
  def offsets_at(self) -> int:
    return self.lengths_at + 4 * self.num_sequences

  @property
  def documents_at(self) -> int:
    return self.offsets_at + 8 * self.num_sequences

  @property
  def file_size(self) -> int:
    return self.documents_at + 8 * (self.num_documents + 1)


@dataclasses.dataclass(frozen=True)
class IndexFacts:
  """What one pass over the arrays of an `.idx` file finds.

  Attributes:
    tokens: total of the sequence lengths.
    longest: tokens of the longest sequence.
    shortest: tokens of the shortest sequence.
    end: bytes of `.bin` that the index describes.
    contiguous: each sequence begins where the one before ends, and the first at byte 0.
    sentence_split: some document has several sequences, as `--split-sentences` makes them.
  """

  tokens: int
  longest: int
  shortest: int
  end: int
  contiguous: bool
  sentence_split: bool


def check_pair(prefix: str) -> None:
  """Raises MMapFileNotFoundError unless both `prefix.idx` and `prefix.bin` exist; MMapReadError if that is unknown."""
  missing = [suffix for suffix in (".idx", ".bin") if not _is_file(prefix + suffix)]
  if len(missing) == 2:
    raise MMapFileNotFoundError(
        f"{prefix}: found neither {prefix}.idx nor {prefix}.bin; give the path of a dataset without suffix."
    )
  if missing:
    raise MMapFileNotFoundError(
        f"{prefix}{missing[0]} is missing, but the other half of the pair exists; restore it beside the other."
    )


def _is_file(path: str) -> bool:
  """Like os.path.isfile, but a file that cannot be looked at (no permission, say) is an error and not a missing file."""
  if remote.is_url(path):
    return remote.exists(path)
  try:
    with reading(path):
      return stat.S_ISREG(os.stat(path).st_mode)
  except MMapFileNotFoundError:
    return False
  except ValueError as error:
    if isinstance(error, MMapError):
      raise
    return False  # a NUL or half a surrogate pair: no file has such a name


def index_path(prefix: str) -> str:
  """Returns the path of `prefix.idx` on this machine; at a URL, that of a copy."""
  return remote.fetch(prefix + ".idx") if remote.is_url(prefix) else prefix + ".idx"


def read_header(prefix: str) -> IndexHeader:
  """Reads and checks the header of `prefix.idx` against the size of the file.

  Raises:
    MMapError: for anything that is not a text dataset's index of integer tokens, whole and without extra bytes,
      and for a file that cannot be read.
  """
  return _read_header(prefix + ".idx", index_path(prefix))


def _read_header(name: str, path: str) -> IndexHeader:
  """Reads the header of the file at `path`, which messages call `name`."""
  with reading(path), open(path, "rb") as file:
    size = os.fstat(file.fileno()).st_size
    raw = file.read(MMAP_INDEX_HEADER_SIZE)
  magic = raw[:MMAP_INDEX_MAGIC_LEN]
  if magic != MMAP_INDEX_MAGIC[: len(magic)] or not magic:
    raise MMapError(
        f"{name} begins with {magic!r}, not with {MMAP_INDEX_MAGIC!r}; it is not the index of a Megatron dataset."
    )
  if len(raw) < MMAP_INDEX_HEADER_SIZE:
    raise MMapError(f"{name} is truncated: it has {size} bytes, and the header alone has {MMAP_INDEX_HEADER_SIZE}.")
  version, code, num_sequences, entries = struct.unpack("<QBQQ", raw[MMAP_INDEX_MAGIC_LEN:])
  if version != MMAP_INDEX_VERSION:
    raise MMapError(f"{name} has format version {version}; expected {MMAP_INDEX_VERSION}.")
  if code not in DTYPE_CODES:
    raise MMapError(f"{name} has dtype code {code}; expected one of {sorted(DTYPE_CODES)}.")
  dtype = np.dtype(DTYPE_CODES[code])
  if dtype.kind == "f":
    raise MMapError(f"{name} holds {dtype.name} values; tokens must be integers.")
  if num_sequences > MAX_SEQUENCES:
    raise MMapError(
        f"{name} has {num_sequences} sequences; Megatron's document index is int32 and names at most {MAX_SEQUENCES}."
    )
  return IndexHeader(dtype, num_sequences, _count_documents(name, path, size, num_sequences, entries))


def _count_documents(name: str, path: str, size: int, num_sequences: int, entries: int) -> int:
  """Returns the number of documents, telling the two conventions of the count apart by the size of the file."""
  if entries > size:
    raise MMapError(f"{name} is truncated: it announces {entries} document index entries and has {size} bytes.")
  fixed = MMAP_INDEX_HEADER_SIZE + 12 * num_sequences
  current, older = fixed + 8 * entries, fixed + 8 * (entries + 1)
  if size == current + num_sequences and size == older and _is_multimodal(path, num_sequences, current):
    size = -1  # eight sequences: a mode per sequence is as long as one more entry
  if size == current and entries:
    return entries - 1
  if size == older:
    return entries
  if num_sequences and size in (-1, current + num_sequences, older + num_sequences):
    raise MMapError(f"{name} is the index of a multimodal dataset (a mode per sequence); only text datasets can be read.")
  if size < current or not entries:
    raise MMapError(
        f"{name} is truncated: it has {size} bytes, and {num_sequences} sequences with {entries} document index "
        f"entries take {max(current, fixed + 8)}."
    )
  raise MMapError(
      f"{name} has {size - current} bytes more than its {num_sequences} sequences and {entries} document index "
      f"entries take ({current}); write it again."
  )


def _is_multimodal(path: str, num_sequences: int, end: int) -> bool:
  """Whether the document index already ends at `end`, and what follows is not its last entry."""
  with reading(path), open(path, "rb") as file:
    file.seek(max(end - 8, 0))
    before, after = struct.unpack("<qq", file.read(16))
  return before == num_sequences and after != num_sequences


class MMapIndexedDataset:
  """Random access to the sequences of one Megatron dataset.

  The arrays of `.idx` are mapped, not read; `.bin` is read by position, exactly the bytes asked for, so that a
  file that shrinks under a running job is an error and not a bus error. At a URL, `.idx` is mapped from a copy on this
  machine and `.bin` is read by range requests, see `_mmap_remote`. Pickles as its path; at a URL, also as the versions
  of its objects, which the process that unpickles it need not ask for.

  Args:
    path_prefix: path or URL of the pair without `.idx` and `.bin`.

  Attributes:
    bin_file: `.bin` as it was when it was opened; its path is the URL of a dataset at a URL.
    idx_file: `.idx`, on this machine.
    is_remote: whether the dataset is at a URL.
    tail: of `.idx`, for `_mmap_guard.check`.

  Raises:
    MMapError: if a file is missing or its header does not fit its size. The arrays are checked by `scan`.
  """

  def __init__(self, path_prefix: str | os.PathLike[str]):
    self.path_prefix = path_prefix = os.fspath(path_prefix)
    self.is_remote = remote.is_url(path_prefix)
    check_pair(path_prefix)
    bin_path = path_prefix + ".bin"
    self.bin_file: FileIdentity | remote.RemoteFile
    self.bin_file = remote.look(bin_path) if self.is_remote else FileIdentity.of(bin_path)
    idx_path = index_path(path_prefix)
    self._idx_object = remote.look(path_prefix + ".idx") if self.is_remote else None
    self.header = _read_header(path_prefix + ".idx", idx_path)
    self.idx_file = FileIdentity.of(idx_path)
    raw = map_file(idx_path)
    if len(raw) != self.header.file_size:
      raise MMapError(f"{path_prefix}.idx changed its size to {len(raw)} bytes while it was opened; try again.")
    head = self.header
    self._sizes = raw[head.lengths_at : head.offsets_at].view("<i4")
    self._pointers = raw[head.offsets_at : head.documents_at].view("<i8")
    self._doc_idx = raw[head.documents_at :].view("<i8")
    self.tail = _mmap_guard.Tail(self.idx_file, self._doc_idx)
    try:
      self._check_ends()
    finally:
      _mmap_guard.check()

  def _check_ends(self) -> None:
    """Checks what can be checked without reading the arrays: the first and last entries."""
    head, idx = self.header, self.path_prefix + ".idx"
    if self._doc_idx[0] != 0 or self._doc_idx[-1] != head.num_sequences:
      raise MMapError(
          f"{idx}: the document index runs from {self._doc_idx[0]} to {self._doc_idx[-1]}; expected 0 to "
          f"{head.num_sequences}, the number of sequences."
      )
    if not head.num_sequences:
      return
    if self._pointers[0] < 0 or self._pointers[-1] < self._pointers[0] or self._sizes[-1] < 0:
      self.scan()  # names the row
    needed = int(self._pointers[-1]) + int(self._sizes[-1]) * head.dtype.itemsize
    size = self.bin_file.size
    if needed > size:
      raise MMapError(
          f"{self.path_prefix}.bin is truncated: it has {size} bytes, and the index needs {needed}; copy it again."
      )

  @property
  def dtype(self):
    """Token type, a NumPy scalar class."""
    return self.header.dtype.type

  @property
  def sizes(self) -> np.ndarray:
    """int32[N], tokens in each sequence."""
    return self._sizes

  @property
  def pointers(self) -> np.ndarray:
    """int64[N], byte offset of each sequence in `.bin`."""
    return self._pointers

  @property
  def doc_idx(self) -> np.ndarray:
    """int64[documents + 1], the first sequence of each document, then N."""
    return self._doc_idx

  def __len__(self) -> int:
    return self.header.num_sequences

  def scan(self) -> IndexFacts:
    """Reads the arrays of the index once, in pieces that fit the cache, and says what they hold.

    Raises:
      MMapError: at the first value that cannot be right, with its row.
    """
    itemsize, bin_size = self.header.dtype.itemsize, self.bin_file.size
    tokens = longest = 0
    shortest, end = MAX_SEQUENCES, 0
    contiguous = True
    for first in range(0, len(self), _SCAN_ROWS):
      sizes = self._sizes[first : first + _SCAN_ROWS]
      pointers = self._pointers[first : first + _SCAN_ROWS]
      least = int(sizes.min())
      ends = pointers + np.multiply(sizes, itemsize, dtype=np.int64)
      in_order = least >= 0 and pointers[0] == end and bool((ends[:-1] == pointers[1:]).all())
      if not in_order or ends[-1] > bin_size:
        self._explain(first, sizes, pointers, ends, end and int(self._pointers[first - 1]), bin_size)
        contiguous = contiguous and in_order
      tokens += int(sizes.sum(dtype=np.int64))
      longest, shortest = max(longest, int(sizes.max())), min(shortest, least)
      end = int(ends[-1]) if contiguous else max(end, int(ends.max()))
    facts = IndexFacts(tokens, longest, shortest if len(self) else 0, end, contiguous, self._longest_document() > 1)
    _mmap_guard.check([self.tail])
    return facts

  def _longest_document(self) -> int:
    """Returns the most sequences in a document, checking that the document index never decreases."""
    most = 0
    for first in range(0, self.header.num_documents, _SCAN_ROWS):
      counts = np.diff(self._doc_idx[first : first + _SCAN_ROWS + 1])
      most = max(most, int(counts.max()))
      if counts.min() < 0 or most > len(self):  # differences of 64-bit values can wrap around
        row = first + int(np.argmax((counts < 0) | (counts > len(self)))) + 1
        raise MMapError(
            f"{self.path_prefix}.idx: row {row} of the document index is {int(self._doc_idx[row])} after "
            f"{int(self._doc_idx[row - 1])}; expected values that rise from 0 to {len(self)}; the file is damaged, write "
            "it again."
        )
    return most

  def _explain(self, first, sizes, pointers, ends, before, bin_size) -> None:
    """Raises MMapError for the first row of a piece that breaks a rule; gaps between sequences break none."""
    itemsize, bin_path = self.header.dtype.itemsize, self.bin_file.path
    rules = (
        (sizes < 0, sizes, "length", "0 or more"),
        ((pointers < 0) | (pointers > bin_size), pointers, "byte offset", f"0 to {bin_size}, the size of {bin_path}"),
        (np.diff(pointers, prepend=before) < 0, pointers, "byte offset", "no less than that of the row before"),
        (pointers % itemsize != 0, pointers, "byte offset", f"a multiple of the {itemsize} bytes of a token"),
        (ends > bin_size, ends, "end", f"at most {bin_size}, the size of {bin_path}"),
    )
    for bad, values, noun, expected in rules:
      if bad.any():
        row = int(np.argmax(bad))
        raise MMapError(
            f"{self.path_prefix}.idx: row {first + row} has {noun} {int(values[row])}; expected {expected}; "
            "the file is damaged, copy or write it again."
        )

  def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
    """Reads part of a sequence.

    Args:
      idx: sequence, negative from the end.
      offset: first token.
      length: tokens; all that follow `offset` if None.

    Returns:
      Tokens in the dataset's dtype, [length].

    Raises:
      IndexError: outside the dataset or the sequence.
      MMapReadError: if `.bin` is shorter than its index says, or a file cannot be read or was truncated.
    """
    row = idx + len(self) if idx < 0 else idx
    if not 0 <= row < len(self):
      raise IndexError(f"{self.path_prefix}: sequence {idx} of {len(self)}")
    size, position = int(self._sizes[row]), int(self._pointers[row])
    _mmap_guard.check()
    length = size - offset if length is None else int(length)
    if offset < 0 or length < 0 or offset + length > size:
      raise IndexError(f"{self.path_prefix}: tokens {offset} to {offset + length} of sequence {row}, which has {size}")
    return self.read_bytes(position + offset * self.header.dtype.itemsize, length)

  def read_bytes(self, position: int, length: int) -> np.ndarray:
    """Reads `length` tokens that begin at byte `position` of `.bin`."""
    dtype, file = self.header.dtype, self.bin_file
    wanted = length * dtype.itemsize
    if isinstance(file, remote.RemoteFile):
      return np.frombuffer(remote.read_many([(file, position, wanted)])[0], dtype)
    descriptor = DESCRIPTORS.acquire(file)
    try:
      return np.frombuffer(_read_whole(descriptor, file.path, position, wanted), dtype)
    finally:
      DESCRIPTORS.release(file)

  def read_many(self, pieces: Sequence[tuple[int, int]]) -> list[bytes]:
    """Reads pieces of `.bin`, given as first byte and number of bytes; those at a URL many at a time.

    Raises:
      MMapReadError: if `.bin` ends too early, or cannot be read.
    """
    file = self.bin_file
    if isinstance(file, remote.RemoteFile):
      return remote.read_many([(file, position, size) for position, size in pieces])
    descriptor = DESCRIPTORS.acquire(file)
    try:
      return [_read_whole(descriptor, file.path, position, size) for position, size in pieces]
    finally:
      DESCRIPTORS.release(file)

  def __getitem__(self, idx):
    if isinstance(idx, slice):
      start, stop, step = idx.indices(len(self))
      if step != 1:
        raise MMapError(f"{self.path_prefix}: the slice has step {step}; only slices of step 1 can be read.")
      return [self.get(row) for row in range(start, stop)]
    return self.get(idx)

  def close(self) -> None:
    """Gives up the descriptor of `.bin`; the mapping of `.idx` goes with the object."""
    if isinstance(self.bin_file, FileIdentity):
      DESCRIPTORS.forget(self.bin_file)

  def __reduce__(self):
    if not isinstance(self.bin_file, remote.RemoteFile) or self._idx_object is None:
      return MMapIndexedDataset, (self.path_prefix,)
    return _reopen, (self.path_prefix, remote.known((self.bin_file, self._idx_object)))


def _reopen(path_prefix: str, state: remote.Known) -> MMapIndexedDataset:
  """Opens a dataset at a URL as the process that pickled it had it open."""
  remote.adopt(state)
  return MMapIndexedDataset(path_prefix)


def _read_whole(descriptor: int, path: str, position: int, wanted: int) -> bytes:
  """Reads exactly `wanted` bytes."""
  try:
    data = os.pread(descriptor, wanted, position)
    while 0 < len(data) < wanted and (more := os.pread(descriptor, wanted - len(data), position + len(data))):
      data += more
  except OSError as error:
    raise unreadable(path, error) from error
  if len(data) != wanted:
    raise _short_read(path, position, wanted, len(data))
  return data


def _short_read(path: str, position: int, wanted: int, found: int) -> MMapReadError:
  """The error for a `.bin` that ends before the bytes its index promises."""
  return MMapReadError(
      f"{path} is truncated: {wanted} bytes were expected at byte {position} and {found} were there; the file has "
      f"{os.path.getsize(path) if os.path.exists(path) else 0} bytes now, copy it again."
  )


def optimal_dtype(vocab_size: int) -> np.dtype:
  """The dtype that Megatron's preprocessing chooses: uint16 below 65,500 ids, else int32."""
  return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedDatasetWriter:
  """Writes a dataset, byte for byte as megatron-core's IndexedDatasetBuilder does.

      with IndexedDatasetWriter("/data/books", np.uint16) as writer:
        writer.add_document(tokens)

  Tokens stream to a temporary `.bin`; both files take their names when the `with` block ends without an error, so
  that nothing half-written can be mistaken for a dataset. Memory: 4 bytes per sequence and 8 per document.

  Args:
    path_prefix: path of the pair without suffix; its folder is made.
    dtype: an integer dtype of `DTYPE_CODES`.

  Raises:
    MMapError: here and from every method: for tokens that do not fit the dtype, and files that cannot be written.
  """

  def __init__(self, path_prefix: str | os.PathLike[str], dtype):
    self.path_prefix = path_prefix = os.fspath(path_prefix)
    self.dtype = np.dtype(dtype).newbyteorder("<")
    if self.dtype.type not in DTYPE_CODES_INV or self.dtype.kind == "f":
      raise MMapError(f"{path_prefix}: cannot write {self.dtype.name} tokens; use an integer type of the format.")
    folder, base = os.path.split(path_prefix)
    # Neither ends in .idx: what a killed process leaves must not be taken for a dataset.
    self._temporary = {end: os.path.join(folder, f".{base}{end}.{os.getpid()}.tmp") for end in (".bin", ".idx")}
    with self._writing(".bin"):
      os.makedirs(folder or ".", exist_ok=True)
      self._bin = open(self._temporary[".bin"], "wb")  # noqa: SIM115  open until close()
    self._lengths = _Column(np.int32)
    self._documents = _Column(np.int64)
    self._documents.extend([0])

  def add_sequence(self, tokens) -> None:
    """Appends one sequence, [length], to the current document."""
    self._lengths.extend([self._write(tokens)])

  def _write(self, tokens) -> int:
    array = np.asarray(tokens)
    if array.size and (array.min() < np.iinfo(self.dtype).min or array.max() > np.iinfo(self.dtype).max):
      raise MMapError(f"{self.path_prefix}: tokens {array.min()} to {array.max()} do not fit {self.dtype.name}.")
    self._write_bytes(np.ascontiguousarray(array, self.dtype).tobytes())
    return array.size

  def _write_bytes(self, data: bytes) -> None:
    with self._writing(".bin"):
      self._bin.write(data)

  @contextlib.contextmanager
  def _writing(self, suffix: str) -> Iterator[None]:
    """Turns an OSError into an MMapError that names the file."""
    try:
      yield
    except OSError as error:
      raise MMapError(
          f"cannot write {self.path_prefix}{suffix}: {error.strerror or error}; give a writable folder with room."
      ) from error

  def end_document(self) -> None:
    """Ends the current document, which may have no sequence at all."""
    self._documents.extend([len(self._lengths)])

  def add_document(self, tokens) -> None:
    """Appends a document of one sequence, or of none where there are no tokens, as Megatron's preprocessing does."""
    if len(tokens):
      self.add_sequence(tokens)
    self.end_document()

  def add_documents(self, tokens, lengths) -> None:
    """Appends many documents at once.

    Args:
      tokens: of all documents, [sum of lengths].
      lengths: tokens of each document, [documents]; one of length 0 gets no sequence.
    """
    lengths = np.asarray(lengths)
    if self._write(tokens) != lengths.sum(dtype=np.int64):
      raise MMapError(f"{self.path_prefix}: {len(tokens)} tokens were given for {lengths.sum(dtype=np.int64)} expected.")
    filled = lengths > 0
    self._documents.extend(len(self._lengths) + np.cumsum(filled))
    self._lengths.extend(lengths[filled])

  def append(self, other: str) -> None:
    """Appends all documents of another dataset of the same dtype, without its index in memory twice."""
    dataset = MMapIndexedDataset(other)
    if dataset.header.dtype != self.dtype:
      raise MMapError(f"{other}.idx holds {dataset.dtype.__name__} tokens; {self.path_prefix} holds {self.dtype.name}.")
    facts = dataset.scan()
    if not facts.contiguous:
      raise MMapError(f"{other}.idx has gaps between its sequences; only a dataset without gaps can be appended.")
    self._documents.extend(dataset.doc_idx[1:] + len(self._lengths))
    self._lengths.extend(dataset.sizes)
    piece = 1 << 22
    for first in range(0, facts.tokens, piece):  # and no stray bytes
      tokens = dataset.read_bytes(first * self.dtype.itemsize, min(piece, facts.tokens - first))
      self._write_bytes(tokens.tobytes())
    dataset.close()

  def close(self) -> None:
    """Writes `.idx` and gives both files their names; `.idx` last, since readers look for it first."""
    with self._writing(".bin"):
      self._bin.close()
    lengths, documents = self._lengths.array(), self._documents.array()
    offsets = np.zeros(len(lengths), np.int64)
    np.cumsum(lengths[:-1], dtype=np.int64, out=offsets[1:])
    offsets *= self.dtype.itemsize
    with self._writing(".idx"), open(self._temporary[".idx"], "wb") as file:
      code = DTYPE_CODES_INV[self.dtype.type]
      file.write(MMAP_INDEX_MAGIC + struct.pack("<QBQQ", MMAP_INDEX_VERSION, code, len(lengths), len(documents)))
      for column in (lengths, offsets, documents):
        file.write(column.tobytes())
    with self._writing(".idx"), contextlib.suppress(FileNotFoundError):
      os.remove(self.path_prefix + ".idx")  # of an older dataset: it must never stand beside the new tokens
    for suffix, temporary in self._temporary.items():
      with self._writing(suffix):
        os.replace(temporary, self.path_prefix + suffix)

  def abort(self) -> None:
    """Removes what was written."""
    with contextlib.suppress(OSError):  # closing writes what is buffered, which fails again on a full disk
      self._bin.close()
    for temporary in self._temporary.values():
      with contextlib.suppress(OSError):
        os.remove(temporary)

  def __enter__(self):
    return self

  def __exit__(self, kind, value, traceback):
    try:
      if kind is None:
        self.close()
    finally:
      self.abort()  # what has its name by now is no longer temporary


class _Column:
  """A growing array: a Python list of ints would take eight times the memory."""

  def __init__(self, dtype):
    self._data = np.empty(1024, dtype)
    self._used = 0

  def __len__(self) -> int:
    return self._used

  def extend(self, values) -> None:
    used = self._used + len(values)
    if used > len(self._data):
      grown = np.empty(max(used, 2 * len(self._data)), self._data.dtype)
      grown[: self._used] = self._data[: self._used]
      self._data = grown
    self._data[self._used : used] = values
    self._used = used

  def array(self) -> np.ndarray:
    return self._data[: self._used]
