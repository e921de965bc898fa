# SPDX-License-Identifier: Apache-2.0
"""What is fuzzed, and what must hold of any input: success that an independent reading confirms, or an error of ours.

An input of `arrays` is the files of an index folder in the order of `FILES`, joined by `BORDER`; a missing part is a
missing file. So is one of `blend`, with the pair and its stamps. An input of `text` is UTF-8.
"""

from collections.abc import Callable
import contextlib
import os
from pathlib import Path
import struct
import zlib

import numpy as np

from maxtext.input_pipeline import _megatron_blending as blending
from maxtext.input_pipeline import _mmap_guard as guard
from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline import _mmap_window_rows as window_rows
from maxtext.input_pipeline._mmap_datasource import (
  MegatronNpyDataSource,
  _parse_mmap_npy_spec,
  _parse_weighted_mixture,
  parse_mixture,
  parse_npy_entry,
)
from maxtext.input_pipeline._mmap_files import MMapError
from maxtext.input_pipeline._mmap_indexed_dataset import DTYPE_CODES, IndexedDatasetWriter, MMapIndexedDataset
from maxtext.input_pipeline.mmap_cli import megatron_arguments

BORDER = b"\n--- next file ---\n"
FILES = (*(f"{array}.npy" for array in cache.ARRAYS), "metadata.json", "stamps.json")
L, EOD = 4, 1
REQUEST = cache.IndexRequest(L, 42, 9)
LENGTHS = [5, 7, 3, 9, 6, 4]


class FindingError(Exception):
  """Something that must not happen; the message says what."""


def call(function: Callable, *arguments, **keys):
  """Calls a function that may refuse what it is given; returns its result, or the MMapError."""
  try:
    return function(*arguments, **keys)
  except MMapError as error:
    expect(str(error) and "\n" not in str(error), f"not one sentence: {str(error)!r}")
    return error


def ok(result) -> bool:
  return not isinstance(result, Exception)


def expect(condition, message: str) -> None:
  if not condition:
    raise FindingError(message)


def replace(path: str, data: bytes) -> None:
  Path(path + ".new").write_bytes(data)
  os.replace(path + ".new", path)


def unpack(data: bytes, paths: list[str]) -> None:
  """Writes the parts of an input to their files, and removes files that have no part."""
  parts = data.split(BORDER)
  os.makedirs(os.path.dirname(paths[0]), exist_ok=True)
  for number, path in enumerate(paths):
    if number < len(parts):
      replace(path, parts[number])
    else:
      Path(path).unlink(missing_ok=True)


# `.idx` files.


class Idx:
  """Opens, scans, describes and reads a dataset whose `.idx` is the input; its `.bin` is always the same."""

  most = 1 << 11

  def __init__(self, folder: str):
    self._prefix = os.path.join(folder, "idx")
    self._bin = bytes(k * 7 % 251 for k in range(512))
    Path(self._prefix + ".bin").write_bytes(self._bin)

  def seeds(self) -> list[bytes]:
    found = []
    layouts = (([5, 7, 3], 1), ([3, 0, 4, 0], 1), ([2, 3, 4, 6], 2), ([], 1), ([0, 0], 1), ([1] * 9, 3))
    for dtype in (np.uint16, np.int32, np.uint8, np.int64):
      for lengths, sentences in layouts:
        prefix = self._prefix + "-seed"
        with IndexedDatasetWriter(prefix, dtype) as writer:
          for row, length in enumerate(lengths):
            writer.add_sequence(np.ones(length, dtype))
            if row % sentences == sentences - 1:
              writer.end_document()
          writer.end_document()
        found.append(Path(prefix + ".idx").read_bytes())
    older = bytearray(found[0])
    older[26] -= 1  # the variant that counts documents
    return [*found, bytes(older)]

  def run(self, data: bytes) -> None:
    replace(self._prefix + ".idx", data)
    expected = read_idx(data, len(self._bin))
    dataset = call(MMapIndexedDataset, self._prefix)
    scanned = call(dataset.scan) if ok(dataset) else dataset
    expect(expected is None or ok(scanned), f"a good file is refused: {scanned}")
    if not ok(dataset):
      return
    if not ok(scanned):
      self._read(dataset, [row for row in range(len(dataset)) if dataset.sizes[row] <= len(self._bin)])
      return
    expect(expected is not None, "a bad file is accepted")
    dtype, sizes, pointers, documents = expected
    expect(dataset.header.dtype == dtype and dataset.sizes.tolist() == sizes, "other lengths")
    expect(dataset.pointers.tolist() == pointers and dataset.doc_idx.tolist() == documents, "other places")
    expect((scanned.tokens, scanned.longest) == (sum(sizes), max(sizes, default=0)), "other sums")
    self._read(dataset, range(len(dataset)))
    counts = utils.get_document_sizes([self._prefix]).tolist()
    expect(counts == [sum(sizes[a:b]) for a, b in zip(documents, documents[1:], strict=False)], "other documents")
    self._build(sizes)

  def _read(self, dataset: MMapIndexedDataset, rows) -> None:
    for row in rows:
      try:
        tokens = call(dataset.get, row)
      except IndexError:
        continue
      at, size = int(dataset.pointers[row]), int(dataset.sizes[row]) * dataset.header.dtype.itemsize
      expect(not ok(tokens) or tokens.tobytes() == self._bin[at : at + size], f"row {row} is not what lies there")

  def _build(self, sizes: list[int]) -> None:
    described = call(cache.describe, self._prefix, REQUEST)
    expect(ok(described) == (sum(sizes) > 0), f"description: {described}")
    if not ok(described):
      return
    documents, samples, order, _ = cache.build_in_memory(self._prefix, REQUEST)
    shapes = [(array.dtype.str, array.shape) for array in (documents, samples, order)]
    expect(shapes == list(described.expected().values()), f"{shapes} is not {described.expected()}")
    expect(sorted(order.tolist()) == list(range(len(order))), "the shuffle index is no permutation")
    ends = np.cumsum([0, *(sizes[document] for document in documents)])
    expect((ends[samples[:, 0]] + samples[:, 1]).tolist() == list(range(0, L * len(samples), L)), "samples do not follow")


def read_idx(data: bytes, bin_size: int):
  """Reads an `.idx` by the book: dtype, lengths, offsets and document index; None if it breaks a rule."""
  if len(data) < 34 or data[:9] != b"MMIDIDX\0\0":
    return None
  version, code, count, entries = struct.unpack("<QBQQ", data[9:34])
  if version != 1 or code not in (1, 2, 3, 4, 5, 8) or 12 * count > len(data) or 8 * entries > len(data):
    return None
  fixed = 34 + 12 * count
  if len(data) == fixed + 8 * entries + 8 and not (count == 8 and entries and len(data) == fixed + 8 * entries + count):
    entries += 1
  elif count == 8 and entries and len(data) == fixed + 8 * entries + count:  # a mode per sequence, or one entry more
    before, last = struct.unpack("<qq", data[-16:])
    if before == count != last:
      return None
    entries += 1
  if not entries or len(data) != fixed + 8 * entries:
    return None
  sizes = list(struct.unpack_from(f"<{count}i", data, 34))
  pointers = list(struct.unpack_from(f"<{count}q", data, 34 + 4 * count))
  documents = list(struct.unpack_from(f"<{entries}q", data, fixed))
  dtype = np.dtype(DTYPE_CODES[code])
  good = all(size >= 0 for size in sizes) and pointers == sorted(pointers) and documents == sorted(documents)
  good = good and documents[0] == 0 and documents[-1] == count
  good = good and all(
    at >= 0 and at % dtype.itemsize == 0 and at + size * dtype.itemsize <= bin_size
    for at, size in zip(pointers, sizes, strict=True)
  )
  return (dtype, sizes, pointers, documents) if good else None


# Index folders.


class Arrays:
  """Loads the index folder that the input describes, in each of the ways it can be loaded."""

  most = 1 << 12

  def __init__(self, folder: str):
    self._prefix = os.path.join(folder, "data")
    with IndexedDatasetWriter(self._prefix, np.int32) as writer:
      for row, length in enumerate(LENGTHS):
        writer.add_document(100 * row + np.arange(length, dtype=np.int32))
    self._dataset = MMapIndexedDataset(self._prefix)
    self._tokens = [self._dataset.get(row).tolist() for row in range(len(LENGTHS))]
    self._folder = os.path.join(folder, "indices")
    self._description = cache.describe(self._prefix, REQUEST)
    self._right = cache.build_in_memory(self._prefix, REQUEST)[:3]

  def _path(self, name: str) -> str:
    return os.path.join(self._folder, name if name == cache.STAMPS else f"{self._description.name}-{name}")

  def seeds(self) -> list[bytes]:
    cache.open_index(self._folder, self._prefix, REQUEST, write=True)
    files = [Path(self._path(name)).read_bytes() for name in FILES]
    plain = [Path(self._path(name)).read_bytes() for name in FILES[:3]]
    wide = BORDER.join(_npy(array.astype(np.int64)) for array in self._right)
    return [BORDER.join(files), BORDER.join(files[:4]), BORDER.join(plain), wide]

  def run(self, data: bytes) -> None:
    unpack(data, [self._path(name) for name in FILES])
    for name in FILES[:3]:
      with contextlib.suppress(cache.StaleIndexError, FileNotFoundError):
        array, there = cache.map_array(self._path(name)), Path(self._path(name)).read_bytes()
        expect(array.dtype.kind in "iu" and there.endswith(array.tobytes()), f"{name} is not what lies there")
    with contextlib.suppress(cache.StaleIndexError, FileNotFoundError):
      self._expect_right(cache.load(self._folder, self._description, cache.Stamps(self._folder)))
    if zlib.crc32(data) % 4 == 0:  # takes as long as all the rest
      self._expect_right(cache.open_index(self._folder, self._prefix, REQUEST, write=False).arrays)
    opened = call(cache.open_triplet, self._folder, None, len(self._dataset))
    if ok(opened):
      self._read(opened[1])
    guard.check()

  def _expect_right(self, arrays) -> None:
    for array, expected in zip(arrays, self._right, strict=True):
      expect(array.dtype == expected.dtype and np.array_equal(array, expected), "a wrong array was believed")

  def _read(self, arrays) -> None:
    """Reads every sample of arrays that no checksum vouches for, and compares with the arrays' plain meaning."""
    source = call(MegatronNpyDataSource, self._folder, self._prefix, EOD, L, expected_hash=self._description.name)
    if not ok(source):
      return
    documents, samples, order = (array.tolist() for array in arrays)
    for element in range(min(len(source), 50)):
      found = call(source.__getitem__, element)
      expected = self._sample(documents, samples, order[element])
      last = order[element] == len(samples) - 2
      good = expected is not None and (len(expected) == L + 1 or last and len(expected) <= L)
      expect(ok(found) == good, f"element {element}: {found}, expected {expected}")
      if good:
        padded = expected + [EOD] * (L + 1 - len(expected))
        expect(found["text"].dtype == np.int32 and found["text"].tolist() == padded, f"element {element} is {found}")

  def _sample(self, documents, samples, row: int) -> list[int] | None:
    """The tokens of a row of the sample index; None if it points outside."""
    (entry, offset), (last, end) = samples[row], samples[row + 1]
    tokens: list[int] = []
    while entry <= last and len(tokens) <= L + 1:
      sequence = self._tokens[documents[entry]]
      stop = end + 1 if entry == last else len(sequence)
      if not offset <= stop <= len(sequence):
        return None
      tokens += sequence[offset:stop]
      entry, offset = entry + 1, 0
    return tokens


class Blend:
  """Opens a blend whose pair of files is the input."""

  most = 1 << 11

  def __init__(self, folder: str):
    self._folder = os.path.join(folder, "blend")
    self._request = blending.weighted_blend([0.7, 0.3], 20)
    self._right = blending.draw(self._request)[0]
    self._paths = [*blending.pair_paths(self._folder), os.path.join(self._folder, cache.STAMPS)]

  def seeds(self) -> list[bytes]:
    longer = blending.draw(blending.weighted_blend([0.7, 0.3], 60))[0]
    other = blending.draw(blending.weighted_blend([0.6, 0.4], 20))[0]
    pairs = [BORDER.join(map(_npy, pair)) for pair in (self._right, longer, other)]
    unpack(pairs[0], self._paths)
    stamps = cache.Stamps(self._folder)
    blending.load_pair(self._paths[:2], self._request, stamps)
    stamps.save()
    return [*pairs, BORDER.join([pairs[0], Path(self._paths[2]).read_bytes()])]

  def run(self, data: bytes) -> None:
    unpack(data, self._paths)
    pair = blending.open_pair(self._request, [15, 7], index_dir=self._folder, write=False)
    for array, expected in zip(pair.arrays, self._right, strict=True):
      expect(array.dtype == expected.dtype and np.array_equal(array, expected), "a wrong pair was believed")
    guard.check()


def _npy(array: np.ndarray) -> bytes:
  header = str({"descr": array.dtype.str, "fortran_order": False, "shape": array.shape}).ljust(117).encode() + b"\n"
  return b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header + array.tobytes()


# Spec strings.


class Text:
  """Parses what a config key, a split or Megatron's arguments may say."""

  most = 1 << 9

  def __init__(self, folder: str):
    self._home = folder
    with IndexedDatasetWriter(os.path.join(folder, "text"), np.uint16) as writer:
      writer.add_document(np.ones(9, np.uint16))

  def seeds(self) -> list[bytes]:
    texts = [
      *("indices|text", "indices|text,0.7;indices|text,0.3", "a|b;c|d", "a|gs://b/p:s3://c:9000/d", "a,1;b,0;c,2.5"),
      *("text", "99,1", "969,30,1", "0.7,0.2,0.1", "text:text", "./text:../x"),
      "--data-path 0.7 a 0.3 b --split 99,1 --seq-length 8 --train-samples 100 --seed 1",
      "--train-data-path a --valid-data-path b --seq-length 8 --train-iters 10 --rampup-batch-size 2 2 8",
      "--data-path a b c --seq-length 8 --train-iters 5 --global-batch-size 4",
    ]
    return [text.encode() for text in texts]

  def run(self, data: bytes) -> None:
    text = data.decode("utf-8", "surrogatepass")
    self._mixture(text)
    call(parse_npy_entry, text, "key")
    call(_parse_mmap_npy_spec, text)
    call(window_rows.check_mmap_files, "key", text)
    self._split(text)
    self._paths(text)
    self._arguments(text)

  def _mixture(self, text: str) -> None:
    mixture = call(parse_mixture, text, "key")
    if ok(mixture):
      expect(mixture.entries and all(entry.strip() == entry and entry for entry in mixture.entries), f"entries {mixture}")
      weights = mixture.weights
      expect(weights is None or len(weights) == len(mixture.entries) and min(weights) >= 0 < sum(weights), f"{mixture}")
    else:
      expect("key" in str(mixture), f"the key is not named: {mixture}")
    weighted = call(_parse_weighted_mixture, text, "mmap")
    expect(not ok(weighted) or abs(sum(weighted[1]) - 1) < 1e-6, f"weights {weighted}")

  def _split(self, text: str) -> None:
    shares = call(utils.parse_split, text)
    if not ok(shares):
      expect(repr(text) in str(shares), f"the split is not quoted: {shares}")
      return
    for sequences in (0, 1, 7, 10**6):
      bounds = [utils.parse_split_range(text, part, sequences) for part in range(3)]
      flat = [bound for pair in bounds for bound in pair]
      expect(flat == sorted(flat) and flat[0] == 0 and flat[-1] == sequences, f"{text!r} of {sequences} is {bounds}")

  def _paths(self, text: str) -> None:
    paths = call(utils.split_paths, text)
    if not ok(paths):
      return
    expect(paths and all(path == path.strip() and path for path in paths), f"paths {paths}")
    joined = ":".join(part.strip() for part in ":".join(paths).split(":"))
    expect(joined == ":".join(part.strip() for part in text.split(":")), f"{text!r} was split to {paths}")
    if "://" not in text:
      with contextlib.chdir(self._home):
        found = call(utils.resolve_shard_prefixes, paths)
        expect(not ok(found) or all(os.path.isfile(prefix + ".idx") for prefix in found), f"no dataset: {found}")

  def _arguments(self, text: str) -> None:
    if "args-path" in text:  # names a file to read
      return
    words = call(megatron_arguments.words_of_script, text)
    arguments = call(megatron_arguments.Arguments, words) if ok(words) else words
    if ok(arguments):
      call(megatron_arguments.read_data, arguments)


TARGETS = {"idx": Idx, "arrays": Arrays, "blend": Blend, "text": Text}
