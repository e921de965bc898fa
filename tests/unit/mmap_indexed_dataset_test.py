# SPDX-License-Identifier: Apache-2.0
"""Tests of the .bin/.idx format: what the reader returns, what it refuses and how, and what the writer leaves behind."""

from concurrent.futures import ThreadPoolExecutor
import errno
import itertools
import os
from pathlib import Path
import pickle
import struct
import subprocess
import sys
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline import _mmap_indexed_dataset as library
from maxtext.input_pipeline._mmap_datasource import MegatronNpyDataSource
from maxtext.input_pipeline._mmap_files import FileIdentity, map_file
from maxtext.input_pipeline._mmap_indexed_dataset import (
  DESCRIPTORS,
  DTYPE_CODES,
  IndexedDatasetWriter,
  MMapError,
  MMapFileNotFoundError,
  MMapIndexedDataset,
  MMapReadError,
  read_header,
)

MAGIC = b"MMIDIDX\x00\x00"
HEADER = 34
CODES = {code: np.dtype(dtype) for code, dtype in DTYPE_CODES.items()}
INTEGERS = {code: dtype for code, dtype in CODES.items() if dtype.kind != "f"}
INT32 = 4


def index_bytes(lengths, offsets=None, documents=None, *, code=INT32, version=1, count=None, entries=None, magic=MAGIC):
  """The bytes of an .idx file, made from the layout alone; a header field that is given may contradict the arrays."""
  if offsets is None:
    offsets = np.cumsum([0, *lengths])[:-1] * CODES.get(code, CODES[INT32]).itemsize
  documents = range(len(lengths) + 1) if documents is None else documents
  count = len(lengths) if count is None else count
  entries = len(documents) if entries is None else entries
  arrays = np.array(lengths, "<i4"), np.array(offsets, "<i8"), np.array(documents, "<i8")
  return magic + struct.pack("<QBQQ", version, code, count, entries) + b"".join(array.tobytes() for array in arrays)


def write_pair(prefix, index: bytes, tokens=()) -> str:
  Path(f"{prefix}.idx").write_bytes(index)
  Path(f"{prefix}.bin").write_bytes(tokens if isinstance(tokens, bytes) else np.array(tokens, np.int32).tobytes())
  return str(prefix)


def refusal(action, *arguments) -> str:
  """The message of the MMapError that an action raises: one sentence."""
  with pytest.raises(MMapError) as caught:
    action(*arguments)
  return one_sentence(caught.value)


def one_sentence(error: MMapError) -> str:
  message = str(error)
  assert "\n" not in message and message.endswith(".") and len(message) < 600, message
  return message


def open_and_scan(prefix):
  dataset = MMapIndexedDataset(prefix)
  return dataset, dataset.scan()


@pytest.fixture
def prefix(tmp_path) -> str:
  """Three int32 sequences of 3, 0 and 4 tokens."""
  return write_pair(tmp_path / "data", index_bytes([3, 0, 4]), range(7))


# What the reader returns.


def test_sequences_are_read_back(prefix):
  dataset, facts = open_and_scan(prefix)
  assert len(dataset) == 3 and dataset.dtype is np.int32
  assert [dataset[row].tolist() for row in range(3)] == [[0, 1, 2], [], [3, 4, 5, 6]]
  assert dataset.sizes.tolist() == [3, 0, 4] and dataset.pointers.tolist() == [0, 12, 12]
  assert dataset.doc_idx.tolist() == [0, 1, 2, 3]
  assert facts == library.IndexFacts(7, 4, 0, 28, True, False)


@pytest.mark.parametrize("code", sorted(INTEGERS))
def test_every_integer_dtype_is_read_by_its_code(tmp_path, code):
  info = np.iinfo(INTEGERS[code])
  tokens = np.array([info.min, 0, 1, info.max], INTEGERS[code])
  prefix = write_pair(tmp_path / "data", index_bytes([1, 3], code=code), tokens.tobytes())
  dataset, _ = open_and_scan(prefix)
  assert dataset.header.dtype == INTEGERS[code]
  np.testing.assert_array_equal(np.concatenate(dataset[:]), tokens)
  assert dataset[1].dtype == INTEGERS[code]


def test_get_reads_parts_of_a_sequence(prefix):
  dataset = MMapIndexedDataset(prefix)
  assert dataset.get(2).tolist() == [3, 4, 5, 6]
  assert dataset.get(2, 1).tolist() == [4, 5, 6]
  assert dataset.get(2, 1, 2).tolist() == [4, 5]
  assert dataset.get(2, 4).tolist() == dataset.get(2, 4, 0).tolist() == dataset.get(1).tolist() == []
  assert dataset.get(-1, 3).tolist() == dataset.get(2, 3, 1).tolist() == [6]
  assert [part.tolist() for part in dataset[1:]] == [[], [3, 4, 5, 6]]
  assert [part.tolist() for part in dataset[:-1:1]] == [[0, 1, 2], []]


@pytest.mark.parametrize("step", [2, -1, -2])
def test_a_slice_with_a_step_is_refused(prefix, step):
  dataset = MMapIndexedDataset(prefix)
  assert f"data: the slice has step {step}; only slices of step 1" in refusal(lambda: dataset[::step])


@pytest.mark.parametrize("arguments", [(3,), (-4,), (0, -1), (0, 4), (0, 0, 4), (0, 2, 2), (0, 0, -1), (1, 0, 1)])
def test_get_refuses_what_lies_outside(prefix, arguments):
  with pytest.raises(IndexError, match="data: "):
    MMapIndexedDataset(prefix).get(*arguments)


def test_arrays_cannot_be_written_to(prefix):
  dataset = MMapIndexedDataset(prefix)
  for array in (dataset.sizes, dataset.pointers, dataset.doc_idx, dataset[0]):
    with pytest.raises(ValueError, match="read-only"):
      array[0] = 1


def test_paths_may_be_path_objects(tmp_path):
  with IndexedDatasetWriter(tmp_path / "data", np.int32) as writer:
    writer.add_document([1, 2])
  with IndexedDatasetWriter(tmp_path / "copy", np.int32) as writer:
    writer.append(tmp_path / "data")
  dataset = MMapIndexedDataset(tmp_path / "copy")
  assert dataset[0].tolist() == [1, 2] and dataset.path_prefix == str(tmp_path / "copy")
  assert pickle.loads(pickle.dumps(dataset))[0].tolist() == [1, 2]


def test_arrays_outlive_the_dataset(prefix):
  sizes = MMapIndexedDataset(prefix).sizes
  assert sizes.tolist() == [3, 0, 4]


def test_a_dataset_pickles_as_its_path(prefix):
  data = pickle.dumps(MMapIndexedDataset(prefix))
  assert len(data) < 200 + len(prefix)
  assert pickle.loads(data)[2].tolist() == [3, 4, 5, 6]


def test_both_conventions_of_the_document_count(tmp_path):
  for entries in (4, 3):  # with the last entry, as Megatron writes it; and without
    prefix = write_pair(tmp_path / str(entries), index_bytes([3, 0, 4], entries=entries), range(7))
    dataset, _ = open_and_scan(prefix)
    assert dataset.header.num_documents == 3 and dataset.doc_idx.tolist() == [0, 1, 2, 3]


def test_documents_of_several_sequences_and_of_none(tmp_path):
  for documents, split in (([0, 0, 1, 2, 3, 3], False), ([0, 2, 3], True), ([0, 0, 3], True)):
    prefix = write_pair(tmp_path / "data", index_bytes([3, 0, 4], documents=documents), range(7))
    dataset, facts = open_and_scan(prefix)
    assert dataset.header.num_documents == len(documents) - 1
    assert facts.sentence_split is split


def test_gaps_between_sequences_are_allowed(tmp_path):
  prefix = write_pair(tmp_path / "data", index_bytes([2, 2], [4, 16]), range(7))
  dataset, facts = open_and_scan(prefix)
  assert [part.tolist() for part in dataset[:]] == [[1, 2], [4, 5]]
  assert not facts.contiguous and (facts.tokens, facts.end) == (4, 24)


def test_stray_bytes_are_not_tokens(tmp_path):
  prefix = write_pair(tmp_path / "data", index_bytes([3, 4]), np.arange(7, dtype=np.int32).tobytes() + b"abc")
  _, facts = open_and_scan(prefix)
  assert (facts.tokens, facts.end) == (7, 28)


@pytest.mark.parametrize("documents", [[0], [0, 0], [0, 0, 0]])
def test_a_file_without_sequences_opens_and_has_no_tokens(tmp_path, documents):
  dataset, facts = open_and_scan(write_pair(tmp_path / "data", index_bytes([], documents=documents)))
  assert len(dataset) == facts.tokens == facts.longest == facts.shortest == facts.end == 0
  assert dataset[:] == [] and dataset.header.num_documents == len(documents) - 1


@pytest.mark.parametrize("rows", [65_535, 65_536, 65_537, 200_000])
def test_scan_over_several_pieces(tmp_path, rows):
  lengths = np.arange(rows) % 7
  dataset, facts = open_and_scan(write_pair(tmp_path / "data", index_bytes(lengths), bytes(4 * int(lengths.sum()))))
  total = int(lengths.sum())
  assert facts == library.IndexFacts(total, 6, 0, 4 * total, True, False)


# What the reader refuses.


def test_magic(tmp_path):
  message = refusal(read_header, write_pair(tmp_path / "data", index_bytes([3], magic=b"MMIDIDX\x00\x01"), range(3)))
  assert "data.idx begins with b'MMIDIDX\\x00\\x01', not with b'MMIDIDX\\x00\\x00'" in message


def test_a_bin_given_the_name_of_an_idx(tmp_path):
  assert "data.idx begins with" in refusal(read_header, write_pair(tmp_path / "data", bytes(1000), range(3)))


@pytest.mark.parametrize("version", [0, 2, 2**64 - 1])
def test_version(tmp_path, version):
  message = refusal(read_header, write_pair(tmp_path / "data", index_bytes([3], version=version), range(3)))
  assert f"data.idx has format version {version}; expected 1" in message


@pytest.mark.parametrize("code", [0, 9, 255])
def test_unknown_dtype_code(tmp_path, code):
  message = refusal(read_header, write_pair(tmp_path / "data", index_bytes([3], code=code), range(3)))
  assert f"data.idx has dtype code {code}; expected one of [1, 2, 3, 4, 5, 6, 7, 8]" in message


@pytest.mark.parametrize("code, name", [(6, "float64"), (7, "float32")])
def test_float_tokens(tmp_path, code, name):
  message = refusal(read_header, write_pair(tmp_path / "data", index_bytes([3], code=code), range(6)))
  assert f"data.idx holds {name} values; tokens must be integers" in message


def test_every_truncation_of_the_index_is_refused(tmp_path):
  whole = index_bytes([3, 0, 4])
  for size in range(len(whole)):
    message = refusal(MMapIndexedDataset, write_pair(tmp_path / "data", whole[:size], range(7)))
    assert "data.idx" in message
    # A cut by the length of one entry makes a file of the older convention, which lacks its last entry.
    assert size == len(whole) - 8 or "truncated" in message or "begins with" in message, message


def test_every_truncation_of_the_older_convention_is_refused(tmp_path):
  whole = index_bytes([3, 0, 4], entries=3)
  for size in range(len(whole)):
    assert "data.idx" in refusal(MMapIndexedDataset, write_pair(tmp_path / "data", whole[:size], range(7)))


def test_a_header_without_documents_or_sequences_is_truncated(tmp_path):
  message = refusal(read_header, write_pair(tmp_path / "data", index_bytes([], documents=[], entries=0)))
  assert "data.idx is truncated: it has 34 bytes, and 0 sequences with 0 document index entries take 42" in message


@pytest.mark.parametrize("extra", [1, 2, 4, 7, 9, 100])
def test_extra_bytes_in_the_index(tmp_path, extra):
  message = refusal(read_header, write_pair(tmp_path / "data", index_bytes([3, 0, 4, 1, 1]) + bytes(extra), range(9)))
  assert f"data.idx has {extra} bytes more than its 5 sequences and 6 document index entries take" in message


@pytest.mark.parametrize("count", [2**31, 2**32, 2**63, 2**64 - 1])
def test_more_sequences_than_megatron_can_name(tmp_path, count):
  message = refusal(read_header, write_pair(tmp_path / "data", index_bytes([3], count=count), range(3)))
  assert f"data.idx has {count} sequences" in message and "at most 2147483647" in message


def test_a_count_that_the_size_does_not_hold(tmp_path):
  for fields in ({"count": 2**31 - 1}, {"entries": 2**64 - 1}, {"entries": 5}, {"count": 4}):
    message = refusal(read_header, write_pair(tmp_path / "data", index_bytes([3], **fields), range(3)))
    assert "data.idx is truncated" in message


@pytest.mark.parametrize("sequences", [1, 2, 7, 8, 9, 16])
@pytest.mark.parametrize("entries_less", [0, 1])
def test_multimodal_index_is_refused_by_name(tmp_path, sequences, entries_less):
  lengths = [2] * sequences
  index = index_bytes(lengths, entries=sequences + 1 - entries_less) + bytes([0, 1] * sequences)[:sequences]
  message = refusal(MMapIndexedDataset, write_pair(tmp_path / "data", index, range(2 * sequences)))
  assert "data.idx is the index of a multimodal dataset (a mode per sequence)" in message


def test_eight_sequences_of_the_older_convention_are_text(tmp_path):
  """A mode per sequence would be as long as the entry that the older convention does not count."""
  for documents in ([*range(9)], [0, 8, 8], [0, 0, 8]):
    index = index_bytes([2] * 8, documents=documents, entries=len(documents) - 1)
    dataset, facts = open_and_scan(write_pair(tmp_path / "data", index, range(16)))
    assert dataset.doc_idx.tolist() == documents and facts.tokens == 16


@pytest.mark.parametrize("missing, there", [(".idx", ".bin"), (".bin", ".idx")])
def test_missing_half(prefix, missing, there):
  os.remove(prefix + missing)
  with pytest.raises(MMapFileNotFoundError, match=rf"data\{missing} is missing, but the other half") as caught:
    MMapIndexedDataset(prefix)
  one_sentence(caught.value)
  assert isinstance(caught.value, FileNotFoundError)
  os.remove(prefix + there)
  assert f"found neither {prefix}.idx nor {prefix}.bin" in refusal(MMapIndexedDataset, prefix)


@pytest.mark.parametrize("half", [".idx", ".bin"])
def test_a_folder_in_place_of_a_file_is_a_missing_half(prefix, half):
  os.remove(prefix + half)
  os.mkdir(prefix + half)
  assert f"data{half} is missing" in refusal(MMapIndexedDataset, prefix)


@pytest.mark.parametrize("documents", [[1, 2, 3], [0, 1, 2], [0, 1, 4], [-1, 1, 3]])
def test_document_index_must_run_over_all_sequences(tmp_path, documents):
  message = refusal(MMapIndexedDataset, write_pair(tmp_path / "data", index_bytes([3, 0, 4], None, documents), range(7)))
  assert f"data.idx: the document index runs from {documents[0]} to {documents[-1]}; expected 0 to 3" in message


@pytest.mark.parametrize("documents, row", [([0, 2, 1, 3], 2), ([0, -5, 3], 1), ([0, 2**63 - 1, -2, 3], 1)])
def test_document_index_must_not_decrease(tmp_path, documents, row):
  index = index_bytes([3, 0, 4], documents=documents)
  message = refusal(open_and_scan, write_pair(tmp_path / "data", index, range(7)))
  assert f"data.idx: row {row} of the document index" in message


@pytest.mark.parametrize(
  "lengths, offsets, row, found",
  [
    ([3, -1, 4], [0, 12, 12], 1, "length -1"),
    ([3, 0, -(2**31)], [0, 12, 12], 2, "length -2147483648"),
    ([3, 0, 4], [-4, 12, 12], 0, "byte offset -4"),
    ([3, 0, 4], [0, -(2**63), 12], 1, f"byte offset {-(2**63)}"),
    ([3, 1, 3], [12, 8, 12], 1, "byte offset 8"),
    ([3, 1, 3], [0, 12, 8], 2, "byte offset 8"),
    ([3, 1, 1], [0, 13, 20], 1, "byte offset 13"),
    ([3, 5, 1], [0, 12, 16], 1, "end 32"),
    ([3, 2**31 - 1, 1], [0, 12, 16], 1, f"end {12 + 4 * (2**31 - 1)}"),
    ([3, 1, 1], [0, 2**62, 24], 1, f"byte offset {2**62}"),
    ([3, 9, 1], [0, 2**63 - 4, 24], 1, f"byte offset {2**63 - 4}"),
  ],
)
def test_d8_damaged_row_is_named(tmp_path, lengths, offsets, row, found):
  message = refusal(open_and_scan, write_pair(tmp_path / "data", index_bytes(lengths, offsets), range(7)))
  assert f"data.idx: row {row} has {found}; expected " in message


@pytest.mark.parametrize("row", [65_535, 65_536, 99_999])
@pytest.mark.parametrize("offset", [-4, 2, 0, 2**63 - 4])
def test_d8_damaged_row_in_a_later_piece_is_named(tmp_path, row, offset):
  lengths, offsets = np.ones(100_000, int), 4 * np.arange(100_000)
  offsets[row], lengths[row] = offset, 2
  index = index_bytes(lengths, offsets)
  message = refusal(open_and_scan, write_pair(tmp_path / "data", index, bytes(400_000)))
  assert f"data.idx: row {row} has byte offset {offset}; expected " in message or "data.bin is truncated" in message


@pytest.mark.parametrize("size", [0, 1, 27])
def test_truncated_bin(tmp_path, size):
  prefix = write_pair(tmp_path / "data", index_bytes([3, 0, 4]), bytes(size))
  assert f"data.bin is truncated: it has {size} bytes, and the index needs 28" in refusal(MMapIndexedDataset, prefix)


def test_bin_that_shrinks_after_it_was_opened(prefix):
  dataset = MMapIndexedDataset(prefix)
  assert dataset[0].tolist() == [0, 1, 2]
  os.truncate(prefix + ".bin", 20)
  assert dataset[0].tolist() == [0, 1, 2]
  with pytest.raises(MMapReadError) as caught:
    dataset.get(2)
  message = one_sentence(caught.value)
  assert isinstance(caught.value, OSError), "as in the release"
  assert "data.bin is truncated: 16 bytes were expected at byte 12 and 8 were there; the file has 20 bytes now" in message


@pytest.mark.parametrize(
  "data, change",
  [
    (bytes(28), "its modification time was 2001-09-09T01:46:40.000000000 and is 1970-01-01T00:00:00.000000001 now;"),
    (bytes(32), "it had 28 bytes and has 32 now;"),
  ],
  ids=["the same size", "another size"],
)
def test_bin_that_was_replaced_before_it_was_read(prefix, data, change):
  os.utime(prefix + ".bin", ns=(10**18, 10**18))
  dataset = MMapIndexedDataset(prefix)
  Path(prefix + ".new").write_bytes(data)
  os.utime(prefix + ".new", ns=(1, 1))
  os.replace(prefix + ".new", prefix + ".bin")
  assert f"data.bin was changed while it is in use: {change} start again" in refusal(dataset.get, 0)
  assert MMapIndexedDataset(prefix)[0].tolist() == [0, 0, 0], "opened anew it is another file"


def test_bin_that_was_removed_before_it_was_read(prefix):
  dataset = MMapIndexedDataset(prefix)
  os.remove(prefix + ".bin")
  message = refusal(dataset.get, 0)
  assert "data.bin cannot be opened any more (No such file or directory); put it back and start again." in message


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="no file that can be opened and not read")
def test_idx_that_cannot_be_read(tmp_path):
  prefix = write_pair(tmp_path / "data", index_bytes([3]), range(3))
  os.remove(prefix + ".idx")
  os.symlink("/proc/self/mem", prefix + ".idx")
  message = refusal(MMapIndexedDataset, prefix)
  assert "data.idx cannot be read (Input/output error); check its disk or network mount and start again." in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["data.idx", "data.bin", ""])
def test_files_without_permission(prefix, tmp_path, name):
  os.chmod(tmp_path / name, 0)
  try:
    message = refusal(lambda: MMapIndexedDataset(prefix)[0])
  finally:
    os.chmod(tmp_path / name, 0o700)
  assert "(Permission denied); give this user the right to read it." in message


def failing(monkeypatch, function: str, code: int) -> None:
  def fail(*_, **__):
    raise OSError(code, os.strerror(code))

  monkeypatch.setattr(function, fail)


REASONS = [
  (errno.EACCES, MMapReadError, "Permission denied", "give this user the right to read it"),
  (errno.ESTALE, MMapReadError, "Stale file handle", "check its disk or network mount and start again"),
  (errno.EMFILE, MMapReadError, "Too many open files", "raise the limit of open files (ulimit -n) and start again"),
  (errno.ENOENT, MMapFileNotFoundError, "No such file or directory", "put it back and start again"),
  (errno.ENOTDIR, MMapFileNotFoundError, "Not a directory", "put it back and start again"),
]


@pytest.mark.parametrize("code, kind, reason, advice", REASONS, ids=[row[2] for row in REASONS])
@pytest.mark.parametrize(
  "function, suffix, action",
  [
    ("builtins.open", ".idx", read_header),
    ("os.open", ".idx", lambda prefix: map_file(prefix + ".idx")),
    ("os.stat", ".bin", lambda prefix: FileIdentity.of(prefix + ".bin")),
  ],
  ids=["read_header", "map_file", "FileIdentity"],
)
def test_an_error_of_the_system_names_file_reason_and_advice(
  prefix, monkeypatch, function, suffix, action, code, kind, reason, advice
):
  with monkeypatch.context() as patch, pytest.raises(kind) as caught:
    failing(patch, function, code)
    action(prefix)
  error, path = caught.value, prefix + suffix
  assert one_sentence(error) == f"{path} cannot be read ({reason}); {advice}."
  assert (error.errno, error.strerror, error.filename) == (code, reason, path)
  assert isinstance(error, FileNotFoundError) is (kind is MMapFileNotFoundError) and isinstance(error, OSError)
  assert str(pickle.loads(pickle.dumps(error))) == str(error), "as it comes from a worker process"


def test_a_half_that_cannot_be_looked_at_is_not_a_missing_one(prefix, monkeypatch):
  with monkeypatch.context() as patch, pytest.raises(MMapReadError) as caught:
    failing(patch, "os.stat", errno.EACCES)
    library.check_pair(prefix)
  assert "data.idx cannot be read (Permission denied)" in one_sentence(caught.value)


@pytest.mark.parametrize("function", ["os.open", "os.fstat", "os.pread"])
@pytest.mark.parametrize("code, kind, reason, advice", REASONS[:3], ids=[row[2] for row in REASONS[:3]])
def test_bin_that_cannot_be_read_any_more(prefix, monkeypatch, function, code, kind, reason, advice):
  dataset = MMapIndexedDataset(prefix)
  with monkeypatch.context() as patch, pytest.raises(kind) as caught:
    failing(patch, function, code)
    dataset.get(0)
  failure = "cannot be read" if function == "os.pread" else "cannot be opened any more"
  assert one_sentence(caught.value) == f"{prefix}.bin {failure} ({reason}); {advice}."
  assert dataset[0].tolist() == [0, 1, 2], "the descriptor was given back"


def test_bin_that_was_replaced_after_it_was_read_is_still_the_old_one(prefix):
  dataset = MMapIndexedDataset(prefix)
  assert dataset[0].tolist() == [0, 1, 2]
  Path(prefix + ".new").write_bytes(bytes(28))
  os.replace(prefix + ".new", prefix + ".bin")
  assert dataset[0].tolist() == [0, 1, 2]


FIELDS = {"version": (9, 8), "code": (17, 1), "count": (18, 8), "entries": (26, 8)}
EXTREMES = [0, 1, 2, 7, 8, 9, 2**7, 2**31 - 1, 2**31, 2**32, 2**62, 2**63 - 4, 2**63 - 1, 2**63, 2**64 - 4, 2**64 - 1]


@st.composite
def mutated_pairs(draw):
  """An index and its tokens, of which some bytes, fields or array elements are no longer what they were."""
  lengths = draw(st.lists(st.integers(0, 5), max_size=12))
  bounds = sorted(draw(st.lists(st.integers(0, len(lengths)), max_size=4))) or range(1, len(lengths))
  documents = [0, *bounds, len(lengths)]
  code = draw(st.sampled_from(sorted(INTEGERS)))
  gap = draw(st.sampled_from([0, 0, 8]))
  itemsize = INTEGERS[code].itemsize
  offsets = (np.cumsum([0, *lengths])[:-1] * itemsize + gap * np.arange(len(lengths))).tolist()
  entries = len(documents) - draw(st.sampled_from([0, 0, 1]))
  index = bytearray(index_bytes(lengths, offsets, documents, code=code, entries=entries))
  tokens = bytearray(range(256)) * 2
  tokens = tokens[: sum(lengths) * itemsize + gap * len(lengths)]
  for _ in range(draw(st.integers(0, 3))):
    value = draw(st.sampled_from(EXTREMES) | st.integers(0, 2**64 - 1))
    at = draw(st.integers(0, max(len(index) - 1, 0)))
    match draw(st.sampled_from(["flip", "field", "element", "element", "cut", "insert", "end", "bin"])):
      case "flip" if index:
        index[at] ^= 1 << value % 8
      case "field":
        start, size = FIELDS[draw(st.sampled_from(sorted(FIELDS)))]
        index[start : start + size] = value.to_bytes(8, "little")[:size]
      case "element":  # an aligned int32 length, or an int64 offset or document
        size = draw(st.sampled_from([4, 8]))
        start = HEADER + max(at - HEADER, 0) // 4 * 4
        index[start : start + size] = value.to_bytes(8, "little")[:size]
      case "cut":
        del index[at : at + draw(st.sampled_from([1, 4, 8, 12, 100]))]
      case "insert":
        index[at:at] = value.to_bytes(8, "little")[: draw(st.sampled_from([1, 4, 8]))]
      case "end":
        index += bytes(draw(st.sampled_from([1, 4, 8, len(lengths), 1000])))
      case "bin":
        tokens = tokens[: value % (len(tokens) + 1)]
  return bytes(index), bytes(tokens)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
  return tmp_path_factory.mktemp("mutated")


@given(pair=mutated_pairs())
def test_a_damaged_pair_is_refused_or_read_right(scratch, pair):
  prefix = write_pair(scratch / "data", *pair)
  tracemalloc.start()
  try:
    dataset, facts = open_and_scan(prefix)
    found = dataset[:]
    assert [len(tokens) for tokens in found] == dataset.sizes.tolist()
    for tokens, position in zip(found, dataset.pointers.tolist(), strict=True):
      assert tokens.tobytes() == pair[1][position : position + tokens.nbytes]
    assert facts.tokens == sum(map(len, found))
    assert dataset.doc_idx[0] == 0 and (np.diff(dataset.doc_idx) >= 0).all() and dataset.doc_idx[-1] == len(dataset)
    request = cache.IndexRequest(4, 1, 1)
    assert facts.tokens or one_sentence(pytest.raises(MMapError, cache.describe, prefix, request).value)
  except MMapError as error:
    assert prefix in one_sentence(error)
  finally:
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
  assert peak < 2**20


# Bytes read and files kept open.


def bytes_read() -> int:
  """Bytes that this process has read, and what the last look at this number took."""
  with open("/proc/self/io", encoding="ascii") as file:
    return int(file.readline().split()[1])


def bytes_read_by(action) -> int:
  """Bytes that an action reads; the least of several, since another thread may read meanwhile."""
  found = []
  for _ in range(5):
    first, start = bytes_read(), bytes_read()
    action()
    found.append(bytes_read() - start - (start - first))
  return min(found)


@pytest.mark.skipif(not os.path.exists("/proc/self/io"), reason="the kernel does not count reads")
def test_d2_a_window_of_a_long_sequence_reads_its_own_bytes(tmp_path):
  count, window = 10_000_000, 2049
  prefix = write_pair(tmp_path / "data", index_bytes([count], code=8))
  os.truncate(prefix + ".bin", 2 * count)
  request = cache.IndexRequest(window - 1, num_samples=9)
  source = MegatronNpyDataSource(str(tmp_path), prefix, 0, window - 1, request=request)
  dataset = MMapIndexedDataset(prefix)
  for read in (lambda: dataset.get(0, count // 2, window), lambda: source[3]["text"]):
    assert len(read()) == window
    assert 2 * window <= bytes_read_by(read) <= 1.05 * 2 * window


MANY = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
from maxtext.input_pipeline._mmap_indexed_dataset import MMapIndexedDataset
folder, count = sys.argv[1], int(sys.argv[2])
datasets = [MMapIndexedDataset(f"{folder}/s_{number}") for number in range(count)]
for _ in range(2):
  for number, dataset in enumerate(datasets):
    assert dataset.scan().tokens == 3
    assert dataset[0].tolist() == [number, number + 1, number + 2], number
print(len(os.listdir("/proc/self/fd")))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="open files cannot be counted")
def test_d10_888_datasets_under_a_limit_of_512_open_files(tmp_path):
  index = index_bytes([3])
  for number in range(888):
    write_pair(tmp_path / f"s_{number}", index, [number, number + 1, number + 2])
  command = [sys.executable, "-c", MANY, str(tmp_path), "888"]
  done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
  assert done.returncode == 0, done.stderr[-2000:]
  assert int(done.stdout) < 160  # a quarter of the limit, and what an idle interpreter has open


def test_threads_share_fewer_descriptors_than_datasets(tmp_path, monkeypatch):
  monkeypatch.setattr(DESCRIPTORS, "capacity", 2)
  datasets = []
  for number in range(12):
    datasets.append(MMapIndexedDataset(write_pair(tmp_path / str(number), index_bytes([3]), [number] * 3)))
  picks = np.random.default_rng(0).integers(0, 12, 3000).tolist()
  with ThreadPoolExecutor(8) as pool:
    found = list(pool.map(lambda number: datasets[number][0].tolist(), picks))
  assert found == [[number] * 3 for number in picks]


def test_close_gives_up_the_descriptor(prefix):
  dataset = MMapIndexedDataset(prefix)
  assert dataset[0].tolist() == [0, 1, 2]
  dataset.close()
  os.remove(prefix + ".bin")
  assert "cannot be opened any more" in refusal(dataset.get, 0)


def test_d8_sequences_beyond_32_bits(tmp_path):
  """The files of the case, 8 GiB of which the file system does not store."""
  lengths, start = [2147483548, 123], 8589934192
  prefix = write_pair(tmp_path / "data", index_bytes(lengths))
  with open(prefix + ".bin", "r+b") as file:
    file.truncate(start + 4 * 123)
    file.seek(start - 8)
    file.write(np.arange(1, 126, dtype=np.int32).tobytes())
  dataset, facts = open_and_scan(prefix)
  assert dataset.pointers.tolist() == [0, start]
  assert (facts.tokens, facts.longest, facts.end) == (sum(lengths), lengths[0], start + 492)
  assert dataset[1].tolist() == [*range(3, 126)]
  assert dataset.get(0, lengths[0] - 3, 3).tolist() == [0, 1, 2]
  indices = (
    np.array([0, 1], np.int32), np.array([[0, lengths[0] - 3], [1, 1], [1, 5]], np.int32), np.array([1, 0], np.uint32)
  )
  source = MegatronNpyDataSource("", prefix, 125, 4, prebuilt_indices=indices)
  assert [source[sample]["text"].tolist() for sample in range(2)] == [[4, 5, 6, 7, 8], [0, 1, 2, 3, 4]]


# The writer.


def bytes_of(prefix) -> tuple[bytes, bytes]:
  return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.mark.parametrize("code", sorted(INTEGERS))
def test_writer_lays_out_the_format(tmp_path, code):
  dtype = INTEGERS[code]
  with IndexedDatasetWriter(str(tmp_path / "data"), dtype) as writer:
    writer.add_document([1, 2, 3])
    writer.add_document([])
    writer.add_sequence([4])
    writer.add_sequence([])
    writer.end_document()
  tokens, index = bytes_of(tmp_path / "data")
  assert tokens == np.array([1, 2, 3, 4], dtype).tobytes()
  assert index == index_bytes([3, 1, 0], documents=[0, 1, 1, 3], code=code)
  assert sorted(os.listdir(tmp_path)) == ["data.bin", "data.idx"]


def test_writer_makes_folders_and_a_dataset_without_documents(tmp_path):
  with IndexedDatasetWriter(str(tmp_path / "a" / "b" / "data"), np.uint16):
    pass
  assert bytes_of(tmp_path / "a" / "b" / "data") == (b"", index_bytes([], documents=[0], code=8))


@given(
  documents=st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=6), max_size=20),
  at=st.integers(0, 20),
)
def test_documents_at_once_are_the_documents_one_by_one(scratch, documents, at):
  with IndexedDatasetWriter(str(scratch / "one"), np.uint16) as writer:
    for document in documents:
      writer.add_document(document)
  with IndexedDatasetWriter(str(scratch / "many"), np.uint16) as writer:
    for part in (documents[:at], documents[at:]):
      writer.add_documents([*itertools.chain(*part)], [len(document) for document in part])
  assert bytes_of(scratch / "one") == bytes_of(scratch / "many")
  dataset, facts = open_and_scan(str(scratch / "one"))
  assert [tokens.tolist() for tokens in dataset[:]] == [document for document in documents if document]
  assert facts.contiguous and not facts.sentence_split


def test_writer_grows_past_its_first_buffers(tmp_path):
  with IndexedDatasetWriter(str(tmp_path / "data"), np.int32) as writer:
    for number in range(5000):
      writer.add_document([number] * (number % 3 + 1))
  dataset = MMapIndexedDataset(str(tmp_path / "data"))
  assert len(dataset) == dataset.header.num_documents == 5000
  assert dataset[4999].tolist() == [4999, 4999] and dataset.scan().tokens == int(dataset.sizes.sum())


@pytest.mark.parametrize("dtype, token", [("uint16", 65536), ("uint16", -1), ("int8", 128), ("int32", 2**31)])
def test_writer_refuses_tokens_that_do_not_fit(tmp_path, dtype, token):
  def write():
    with IndexedDatasetWriter(str(tmp_path / "data"), dtype) as writer:
      writer.add_document([1, 2])
      writer.add_document([token])

  assert f"data: tokens {token} to {token} do not fit {dtype}" in refusal(write)
  assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint32, np.uint64, bool])
def test_writer_refuses_dtypes(tmp_path, dtype):
  name = np.dtype(dtype).name
  assert f"data: cannot write {name} tokens" in refusal(IndexedDatasetWriter, str(tmp_path / "data"), dtype)
  assert os.listdir(tmp_path) == []


def test_writer_leaves_an_older_dataset_alone_on_an_error(prefix, tmp_path):
  before = bytes_of(prefix)
  with pytest.raises(ZeroDivisionError), IndexedDatasetWriter(prefix, np.uint16) as writer:
    writer.add_document([1])
    writer.add_document([1 // 0])
  assert bytes_of(prefix) == before and sorted(os.listdir(tmp_path)) == ["data.bin", "data.idx"]


def test_writer_that_cannot_name_its_files_leaves_no_temporary_and_no_mixture(prefix, tmp_path, monkeypatch):
  tokens, _ = bytes_of(prefix)

  def fail(*_):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(library.os, "replace", fail)
  with pytest.raises(MMapError) as caught, IndexedDatasetWriter(prefix, np.uint16) as writer:
    writer.add_document([1])
  assert one_sentence(caught.value).startswith(f"cannot write {prefix}.bin: No space left on device; ")
  assert os.listdir(tmp_path) == ["data.bin"] and Path(prefix + ".bin").read_bytes() == tokens


FULL = """
import resource, sys
import numpy as np
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter, MMapError
prefix, documents, tokens, limit = sys.argv[1], *map(int, sys.argv[2:])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
  with IndexedDatasetWriter(prefix, np.int32) as writer:
    for _ in range(documents):
      writer.add_document([1] * tokens)
except MMapError as error:
  print(error)
"""


@pytest.mark.parametrize(
  "documents, tokens, limit, suffix",
  [(1000, 1000, 100_000, ".bin"), (1, 1000, 100, ".bin"), (1000, 1, 5000, ".idx")],
  ids=["while it writes", "when it closes", "in the index"],
)
def test_writer_on_a_full_disk_says_so_and_leaves_nothing(tmp_path, documents, tokens, limit, suffix):
  command = [sys.executable, "-c", FULL, str(tmp_path / "data"), *map(str, (documents, tokens, limit))]
  done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
  message = f"cannot write {tmp_path}/data{suffix}: File too large; give a writable folder with room.\n"
  assert (done.stdout, done.stderr) == (message, "") and os.listdir(tmp_path) == []


def test_writer_in_a_folder_that_cannot_be_made(tmp_path):
  (tmp_path / "file").write_text("not a folder")
  message = refusal(IndexedDatasetWriter, tmp_path / "file" / "data", np.uint16)
  assert message.startswith(f"cannot write {tmp_path}/file/data.bin: ")


def test_files_of_a_killed_writer_are_no_dataset(prefix, tmp_path, monkeypatch):
  writer = IndexedDatasetWriter(tmp_path / "books", np.uint16)
  writer.add_document([1])
  failing(monkeypatch, "os.replace", errno.EIO)
  refusal(writer.close)
  pid = os.getpid()
  found = sorted(os.listdir(tmp_path))
  assert found == [f".books.bin.{pid}.tmp", f".books.idx.{pid}.tmp", "data.bin", "data.idx"]
  assert utils.resolve_shard_prefixes(str(tmp_path)) == [prefix]
  writer.abort()
  assert sorted(os.listdir(tmp_path)) == ["data.bin", "data.idx"]


def test_writer_never_shows_new_tokens_under_an_old_index(prefix, monkeypatch):
  """A process killed between the two renames leaves half a dataset, which is refused, and not a mixed one."""
  replace, seen = os.replace, []

  def look(source, target):
    replace(source, target)
    seen.append(os.path.exists(prefix + ".idx"))

  monkeypatch.setattr(library.os, "replace", look)
  with IndexedDatasetWriter(prefix, np.int32) as writer:
    writer.add_document([9] * 7)
  assert seen == [False, True]
  assert MMapIndexedDataset(prefix)[0].tolist() == [9] * 7


def test_append_joins_datasets(tmp_path):
  write_pair(tmp_path / "a", index_bytes([3, 0, 4], documents=[0, 1, 1, 3]), range(7))
  write_pair(tmp_path / "b", index_bytes([2]), [8, 9])
  with IndexedDatasetWriter(str(tmp_path / "joined"), np.int32) as writer:
    writer.append(str(tmp_path / "a"))
    writer.add_document([5])
    writer.append(str(tmp_path / "b"))
  tokens = np.array([*range(7), 5, 8, 9], np.int32).tobytes()
  assert bytes_of(tmp_path / "joined") == (tokens, index_bytes([3, 0, 4, 1, 2], documents=[0, 1, 1, 3, 4, 5]))


def test_append_takes_tokens_and_not_stray_bytes(tmp_path):
  write_pair(tmp_path / "a", index_bytes([2]), [1, 2, 77])
  with IndexedDatasetWriter(str(tmp_path / "joined"), np.int32) as writer:
    writer.append(str(tmp_path / "a"))
    writer.add_document([3])
  assert [tokens.tolist() for tokens in MMapIndexedDataset(str(tmp_path / "joined"))[:]] == [[1, 2], [3]]


def test_append_refuses_tokens_that_go_away(tmp_path, monkeypatch):
  source = write_pair(tmp_path / "a", index_bytes([2]), [1, 2])
  scan = MMapIndexedDataset.scan
  monkeypatch.setattr(MMapIndexedDataset, "scan", lambda self: (scan(self), os.truncate(source + ".bin", 4))[0])

  def write():
    with IndexedDatasetWriter(tmp_path / "joined", np.int32) as writer:
      writer.append(source)

  assert "a.bin was changed while it is in use" in refusal(write)
  assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


def test_append_refuses_gaps_and_another_dtype(tmp_path):
  gaps = write_pair(tmp_path / "gaps", index_bytes([2, 2], [4, 16]), range(7))
  small = write_pair(tmp_path / "small", index_bytes([2], code=1), b"ab")
  with IndexedDatasetWriter(str(tmp_path / "joined"), np.int32) as writer:
    assert "gaps.idx" in refusal(writer.append, gaps)
    assert "small.idx holds uint8 tokens" in refusal(writer.append, small)
    writer.add_document([3])
  assert MMapIndexedDataset(str(tmp_path / "joined"))[:][0].tolist() == [3]


@pytest.mark.parametrize("vocabulary, dtype", [(1, "uint16"), (65499, "uint16"), (65500, "int32"), (200_000, "int32")])
def test_dtype_that_megatron_would_choose(vocabulary, dtype):
  assert library.optimal_dtype(vocabulary) == dtype
