# SPDX-License-Identifier: Apache-2.0
"""Tests of index files on disk: what names them, what makes them stale, and what a crash leaves. CASES D13 and D16."""

import dataclasses
import itertools
import json
import logging
import os
from pathlib import Path
import shutil
import signal
import subprocess
import sys
import time

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_files as index_files
from maxtext.input_pipeline._mmap_index_cache import IndexRequest
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter, MMapError, MMapIndexedDataset

D1_LENGTHS = [5, 7, 3, 9, 6, 4]
REQUEST = IndexRequest(4, 42, 9)
SUFFIXES = [*(f"{array}.npy" for array in cache.ARRAYS), "metadata.json"]


def write(prefix, lengths=D1_LENGTHS) -> str:
  with IndexedDatasetWriter(str(prefix), np.int32) as writer:
    for row, length in enumerate(lengths):
      writer.add_sequence(100 * row + np.arange(length))
      writer.end_document()
  return str(prefix)


@pytest.fixture
def dataset(tmp_path) -> str:
  return write(tmp_path / "data")


@pytest.fixture
def folder(tmp_path) -> str:
  return str(tmp_path / "indices")


@pytest.fixture
def built(folder, dataset) -> cache.Index:
  """Indices that were just written, with the stamps gone: the next load checks every file."""
  index = cache.open_index(folder, dataset, REQUEST)
  assert index.saved and not index.found
  os.remove(os.path.join(folder, cache.STAMPS))
  return in_memory(index)


@pytest.fixture
def digests(monkeypatch) -> list[int]:
  """Sizes of the arrays whose checksum was computed since the test began."""
  seen, digest = [], cache.digest_of
  monkeypatch.setattr(cache, "digest_of", lambda array: seen.append(array.size) or digest(array))
  return seen


@pytest.fixture
def scans(monkeypatch) -> list[str]:
  """Datasets whose arrays were read since the test began."""
  seen, scan = [], MMapIndexedDataset.scan
  monkeypatch.setattr(MMapIndexedDataset, "scan", lambda self: seen.append(self.path_prefix) or scan(self))
  return seen


@pytest.fixture(autouse=True)
def warnings_are_seen(caplog):
  caplog.set_level(logging.WARNING, logger=cache.__name__)


def in_memory(index: cache.Index) -> cache.Index:
  """Copies the arrays, which are mapped from files that a test is going to damage."""
  return dataclasses.replace(index, arrays=tuple(array.copy() for array in index.arrays))


def same(first, second) -> bool:
  return all(
    one.dtype == other.dtype and np.array_equal(one, other)
    for one, other in zip(first.arrays, second.arrays, strict=True)
  )


def path_of(folder, name, suffix) -> str:
  return os.path.join(folder, f"{name}-{suffix}")


def name_of(prefix, **changes) -> str:
  return cache.describe(prefix, IndexRequest(**{"seq_length": 4, "seed": 42, "num_samples": 9, **changes})).name


# Names.


def test_name_is_keyed_by_the_epochs_and_not_by_the_sample_count(dataset):
  names = {count: name_of(dataset, num_samples=count) for count in (7, 8, 9, 13, 14, 16, 17)}
  assert names[7] == names[8] and names[9] == names[13] and names[14] == names[16]
  assert len(set(names.values())) == 4
  assert name_of(dataset, num_samples=None, num_epochs=2) == names[14], "two whole epochs are shuffled together"


def test_folder_shows_9_as_found_after_13_and_not_8(folder, dataset):
  assert not cache.open_index(folder, dataset, IndexRequest(4, 42, 13)).found
  assert cache.open_index(folder, dataset, IndexRequest(4, 42, 9)).found
  assert not cache.open_index(folder, dataset, IndexRequest(4, 42, 8)).found
  assert len([name for name in os.listdir(folder) if name.endswith("-metadata.json")]) == 2


def test_d13_vi_settings_never_collide(tmp_path):
  prefix = write(tmp_path / "data", [7] * 300)
  variants = {
    "seq_length": [4, 5],
    "seed": [42, 43],
    "split": ["", "99,1", "0.99,0.01", "99,1,0", "99, 1"],
    "split_index": [0, 1],
    "add_extra_token": [1, 0],
  }
  settings = [dict(zip(variants, values, strict=True)) for values in itertools.product(*variants.values())]
  names = {}
  for setting in settings:
    used = setting if setting["split"] else {**setting, "split_index": 0}  # without a split there is one part
    names.setdefault(name_of(prefix, num_samples=3, **setting), set()).add(json.dumps(used))
  assert all(len(used) == 1 for used in names.values())
  assert len(names) == 8 * (4 * 2 + 1)


def test_last_epoch_apart_is_part_of_the_name(dataset):
  names = {cache.describe(dataset, REQUEST, apart).name for apart in (True, False)}
  assert len(names) == 2 and name_of(dataset) in names


def test_identity_is_content_and_not_path_or_time(tmp_path, folder, dataset):
  index = cache.open_index(folder, dataset, REQUEST)
  (tmp_path / "elsewhere").mkdir()
  for suffix in (".bin", ".idx"):
    shutil.copy(dataset + suffix, tmp_path / "elsewhere" / f"other{suffix}")
    os.utime(tmp_path / "elsewhere" / f"other{suffix}", ns=(1, 1))
  shutil.move(folder, tmp_path / "moved")
  again = cache.open_index(str(tmp_path / "moved"), str(tmp_path / "elsewhere" / "other"), REQUEST)
  assert again.found and again.description.name == index.description.name and same(index, again)


def test_other_content_is_another_name(tmp_path, dataset):
  names = [name_of(dataset)]
  for number, lengths in enumerate(([5, 7, 3, 9, 4, 6], [5, 7, 3, 9, 10], [5, 7, 3, 9, 6, 4, 0])):
    names.append(name_of(write(tmp_path / str(number), lengths)))
  assert len(set(names)) == 4


def test_d13_i_separate_folders_hold_identical_files(tmp_path, dataset):
  for place in ("a", "b"):
    assert cache.open_index(str(tmp_path / place), dataset, REQUEST).saved
  names = sorted(name for name in os.listdir(tmp_path / "a") if name != cache.STAMPS)
  assert names == sorted(name for name in os.listdir(tmp_path / "b") if name != cache.STAMPS) and len(names) == 4
  for name in names:
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_found_arrays_are_the_built_ones_and_read_only(folder, dataset, built):
  again = cache.open_index(folder, dataset, REQUEST)
  assert again.found and again.saved and same(built, again)
  for array in again.arrays:
    with pytest.raises(ValueError, match="read-only"):
      array[0] = 0


def test_files_are_ordinary_numpy_files_and_json(folder, built):
  paths = built.description.paths(folder)
  for array, path in zip(built.arrays, paths.values(), strict=True):
    np.testing.assert_array_equal(np.load(path, allow_pickle=False), array)
  metadata = json.loads(Path(built.description.metadata_path(folder)).read_text(encoding="utf-8"))
  assert metadata["built_from"] == built.description.built_from
  assert (metadata["samples"], metadata["samples_before_last_epoch"], metadata["tokens_per_epoch"]) == (16, 8, 34)


# Folders that cannot be used.


def test_d13_iii_folder_that_cannot_be_made(tmp_path, dataset, caplog):
  (tmp_path / "file").write_text("not a folder")
  for folder in (str(tmp_path / "file"), str(tmp_path / "file" / "below")):
    caplog.clear()
    index = cache.open_index(folder, dataset, REQUEST)
    assert not index.found and not index.saved
    np.testing.assert_array_equal(index.arrays[0], cache.build_in_memory(dataset, REQUEST)[0])
    (record,) = caplog.records
    assert f"Cannot write indices to {folder} (" in record.getMessage()
    assert "stay in memory" in record.getMessage()


@pytest.mark.parametrize("call", ["replace", "makedirs"])
def test_d13_iii_folder_that_cannot_be_written(folder, dataset, caplog, monkeypatch, call):
  def fail(*_, **__):
    raise OSError(30, "Read-only file system", folder)

  monkeypatch.setattr(cache.os, call, fail)
  index = cache.open_index(folder, dataset, REQUEST)
  assert not index.saved and len(index.arrays[2]) == 16
  assert [f"Cannot write indices to {folder} (" in record.getMessage() for record in caplog.records] == [True]
  assert not os.path.exists(folder) or os.listdir(folder) == []


def test_d13_iii_disk_that_fills_up_leaves_nothing(folder, dataset, caplog, monkeypatch):
  write_array = index_files._write_array

  def fill(file, array):
    if array.ndim == 2:
      file.write(b"half")
      raise OSError(28, "No space left on device")
    write_array(file, array)

  monkeypatch.setattr(index_files, "_write_array", fill)
  index = cache.open_index(folder, dataset, REQUEST)
  assert not index.saved and "No space left on device" in caplog.text
  assert [name for name in os.listdir(folder) if "sample_index" in name or "metadata" in name] == []
  monkeypatch.undo()
  assert cache.open_index(folder, dataset, REQUEST).saved and cache.open_index(folder, dataset, REQUEST).found


def test_d13_iii_whole_files_in_a_read_only_folder_are_used(folder, dataset, built, caplog, monkeypatch):
  def refuse(*_):
    raise OSError(30, "Read-only file system")

  monkeypatch.setattr(index_files, "write_atomically", refuse)
  again = cache.open_index(folder, dataset, REQUEST)
  assert again.found and same(built, again) and not caplog.records


def test_offline_tool_reports_a_folder_that_cannot_be_written(tmp_path, dataset):
  (tmp_path / "file").write_text("not a folder")
  with pytest.raises(MMapError, match="cannot write indices to .*file .*; give a writable folder with room"):
    cache.write_index(str(tmp_path / "file"), dataset, REQUEST)


def test_only_the_primary_process_writes(folder, dataset):
  index = cache.open_index(folder, dataset, REQUEST, write=False)
  assert not index.found and not index.saved and not os.path.exists(folder)
  assert same(index, cache.open_index(folder, dataset, REQUEST, write=True))


def test_a_process_that_does_not_write_leaves_a_stale_cache_alone(folder, dataset, built, caplog):
  path = path_of(folder, built.description.name, "shuffle_index.npy")
  os.truncate(path, os.path.getsize(path) // 2)
  before = {name: os.stat(os.path.join(folder, name)).st_mtime_ns for name in os.listdir(folder)}
  index = cache.open_index(folder, dataset, REQUEST, write=False)
  assert not index.found and not index.saved and same(index, built) and path in caplog.text
  assert before == {name: os.stat(os.path.join(folder, name)).st_mtime_ns for name in os.listdir(folder)}


# What makes files stale.


def rewrite_array(path, change) -> None:
  """Saves an array anew after `change` of it, which may return another one."""
  array = np.load(path)
  changed = change(array)
  np.save(path, array if changed is None else changed)


def flip_one(array):
  array.reshape(-1)[array.size // 2] ^= 1


def fill(array):
  array[:] = array.flat[0]


CONTENTS = {
  "one flipped value": flip_one,
  "constant": fill,
  "reversed": lambda array: array[::-1].copy(),
  "another dtype": lambda array: array.astype(np.int64),
  "other byte order": lambda array: array.astype(array.dtype.newbyteorder(">")),
  "floats": lambda array: array.astype(np.float32),
  "one row less": lambda array: array[:-1].copy(),
  "another shape": lambda array: array.reshape(1, -1),
  "column order": lambda array: np.asfortranarray(np.stack([array.reshape(-1)] * 2, axis=1)),
  "a scalar": lambda array: array.reshape(-1)[0],
  "nothing": lambda array: array[:0].copy(),
}


@pytest.mark.parametrize("array", cache.ARRAYS)
@pytest.mark.parametrize("change", CONTENTS.values(), ids=CONTENTS.keys())
def test_d16_wrong_content_is_found_and_rebuilt(folder, dataset, built, caplog, array, change):
  path = path_of(folder, built.description.name, f"{array}.npy")
  rewrite_array(path, change)
  assert_rebuilt(folder, dataset, built, caplog, path)


def assert_rebuilt(folder, dataset, built, caplog, path):
  index = cache.open_index(folder, dataset, REQUEST)
  assert not index.found and index.saved and same(index, built)
  (record,) = caplog.records
  message = record.getMessage()
  assert message.startswith(path) and message.endswith("; building the indices again.") and "\n" not in message
  assert cache.open_index(folder, dataset, REQUEST).found and len(caplog.records) == 1


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("keep", [0.5, 0.0, 0.1, 0.99])
def test_d16_truncated_file_is_rebuilt(folder, dataset, built, caplog, suffix, keep):
  path = path_of(folder, built.description.name, suffix)
  os.truncate(path, int(keep * os.path.getsize(path)))
  assert_rebuilt(folder, dataset, built, caplog, path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_d16_garbage_is_rebuilt(folder, dataset, built, caplog, suffix):
  path = path_of(folder, built.description.name, suffix)
  Path(path).write_bytes(bytes(range(256)) * 4)
  assert_rebuilt(folder, dataset, built, caplog, path)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_d16_missing_file_is_rebuilt(folder, dataset, built, caplog, suffix):
  os.remove(path_of(folder, built.description.name, suffix))
  index = cache.open_index(folder, dataset, REQUEST)
  assert not index.found and index.saved and same(index, built) and not caplog.records
  assert cache.open_index(folder, dataset, REQUEST).found


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_d16_folder_in_place_of_a_file(folder, dataset, built, caplog, suffix):
  """Neither read nor replaced: the run goes on in memory."""
  path = path_of(folder, built.description.name, suffix)
  os.remove(path)
  os.mkdir(path)
  index = cache.open_index(folder, dataset, REQUEST)
  assert not index.found and not index.saved and same(index, built)
  assert path in caplog.text and "Cannot write indices" in caplog.text


@pytest.mark.parametrize(
  "text",
  ["", "{}", "[]", "null", "3", '"text"', "{", '{"built_from": 1}', '{"arrays": []}', '{"arrays": {}}', 9**6 * "[", "\0"],
  ids=lambda text: text[:20],
)
def test_d16_metadata_that_is_none(folder, dataset, built, caplog, text):
  path = path_of(folder, built.description.name, "metadata.json")
  Path(path).write_text(text, encoding="utf-8")
  assert_rebuilt(folder, dataset, built, caplog, path)


def test_d16_metadata_of_other_data(tmp_path, folder, dataset, built, caplog):
  other = cache.open_index(folder, write(tmp_path / "other", [5, 7, 3, 9, 4, 6]), REQUEST)
  path = path_of(folder, built.description.name, "metadata.json")
  shutil.copy(other.description.metadata_path(folder), path)
  assert_rebuilt(folder, dataset, built, caplog, path)


def test_d16_arrays_of_other_data(tmp_path, folder, dataset, built, caplog):
  other = cache.open_index(folder, write(tmp_path / "other", [5, 7, 3, 9, 4, 6]), REQUEST)
  path = path_of(folder, built.description.name, "sample_index.npy")
  shutil.copy(other.description.paths(folder)["sample_index"], path)
  assert_rebuilt(folder, dataset, built, caplog, path)


@pytest.mark.parametrize("key", ["xxh3_128", None])
def test_d16_wrong_checksum_in_the_metadata(folder, dataset, built, caplog, key):
  path = path_of(folder, built.description.name, "metadata.json")
  metadata = json.loads(Path(path).read_text(encoding="utf-8"))
  metadata["arrays"]["document_index"] = {key: "0" * 32} if key else {}
  Path(path).write_text(json.dumps(metadata), encoding="utf-8")
  named = path if key is None else path_of(folder, built.description.name, "document_index.npy")
  assert_rebuilt(folder, dataset, built, caplog, named)


HEADERS = [
  "{'descr': '<i4', 'fortran_order': False, 'shape': (%s,), }",
  "{'descr': '<i4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }",
  "{'descr': '<i4', 'fortran_order': False, 'shape': (-12,), }",
  "{'descr': '|O', 'fortran_order': False, 'shape': (12,), }",
  "{'descr': 'abc', 'fortran_order': False, 'shape': (12,), }",
  "{'descr': [('a', '<i4')], 'fortran_order': False, 'shape': (12,), }",
  "{'descr': '<i4', 'fortran_order': False, 'shape': (12,), [}",
  "{[]: 1}",
  "((((",
  "",
]


@pytest.mark.parametrize("header", [HEADERS[0] % 10**30, *HEADERS[1:]])
def test_d16_impossible_array_header(folder, dataset, built, caplog, header):
  path = path_of(folder, built.description.name, "document_index.npy")
  text = header.ljust(117).encode() + b"\n"
  Path(path).write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text)
  assert_rebuilt(folder, dataset, built, caplog, path)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
  """A written cache that examples damage and repair: prefix, folder, index and the bytes of its files."""
  place = tmp_path_factory.mktemp("scratch")
  prefix, folder = write(place / "data"), str(place / "indices")
  index = in_memory(cache.open_index(folder, prefix, REQUEST))
  os.remove(os.path.join(folder, cache.STAMPS))
  return prefix, folder, index, {name: Path(folder, name).read_bytes() for name in os.listdir(folder)}


@given(
  suffix=st.sampled_from(SUFFIXES),
  at=st.floats(0, 1),
  change=st.sampled_from(["flip", "cut", "insert", "end"]),
  data=st.binary(min_size=1, max_size=9),
)
def test_d16_any_damage_is_found(scratch, suffix, at, change, data):
  prefix, folder, built, files = scratch
  for name, content in files.items():
    Path(folder, name).write_bytes(content)
  name = f"{built.description.name}-{suffix}"
  content = bytearray(files[name])
  position = min(int(at * len(content)), len(content) - 1)
  match change:
    case "flip":
      content[position] ^= data[0] or 1
    case "cut":
      del content[position : position + len(data)]
    case "insert":
      content[position:position] = data
    case "end":
      content += data
  Path(folder, name).write_bytes(content)
  index = cache.open_index(folder, prefix, REQUEST, write=False)
  assert same(index, built)
  harmless = suffix == "metadata.json" or content == files[name]  # a space more, or a number that only informs
  # Padding of the header, before its end of line, says nothing about the array.
  harmless = harmless or change == "flip" and position < 128
  assert harmless or not index.found


# Stamps.


def test_stamps_spare_later_loads(folder, dataset, digests, scans):
  cache.open_index(folder, dataset, REQUEST)
  assert sorted(digests) == [12, 16, 34] and len(scans) == 1, "each array once, for the metadata"
  for _ in range(2):
    assert cache.open_index(folder, dataset, REQUEST).found
  assert len(digests) == 3 and len(scans) == 1


def test_first_load_without_stamps_checks_everything_once(folder, dataset, built, digests, scans):
  for _ in range(2):
    assert cache.open_index(folder, dataset, REQUEST).found
  assert sorted(digests) == [12, 16, 34] and len(scans) == 1


def test_stamps_of_another_place_are_not_believed(tmp_path, folder, dataset, digests, scans):
  cache.open_index(folder, dataset, REQUEST)
  shutil.copytree(folder, tmp_path / "copy")
  digests.clear()
  assert cache.open_index(str(tmp_path / "copy"), dataset, REQUEST).found
  assert len(digests) == 3 and len(scans) == 1, "the dataset itself is where it was"


def test_a_touched_file_is_checked_again(folder, dataset, digests):
  index = cache.open_index(folder, dataset, REQUEST)
  digests.clear()
  os.utime(index.description.paths(folder)["sample_index"], ns=(5, 5))
  assert cache.open_index(folder, dataset, REQUEST).found
  assert digests == [34]


def test_a_process_that_does_not_write_keeps_no_stamps(folder, dataset, built):
  assert cache.open_index(folder, dataset, REQUEST, write=False).found
  assert not os.path.exists(os.path.join(folder, cache.STAMPS))


def wait_for_another_ctime(path) -> None:
  """The kernel's clock for files ticks every few milliseconds."""
  probe, before = f"{path}.probe", os.stat(path).st_ctime_ns
  while True:
    Path(probe).write_bytes(b"")
    if os.stat(probe).st_ctime_ns > before:
      os.remove(probe)
      return
    time.sleep(0.002)


def test_d16_damage_under_a_stamp_is_found_though_the_time_was_set_back(folder, dataset, caplog):
  built = cache.open_index(folder, dataset, REQUEST)
  path = path_of(folder, built.description.name, "document_index.npy")
  status = os.stat(path)
  wait_for_another_ctime(path)
  with open(path, "r+b") as file:
    file.seek(-4, os.SEEK_END)
    file.write(b"\0\0\0\0" if built.arrays[0][-1] else b"\1\0\0\0")
  os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
  assert_rebuilt(folder, dataset, built_anew(dataset), caplog, path)


def built_anew(dataset) -> cache.Index:
  *arrays, _ = cache.build_in_memory(dataset, REQUEST)
  return cache.Index(cache.describe(dataset, REQUEST), tuple(arrays), False, False)


@pytest.mark.parametrize("restore_time", [False, True])
def test_d13_iv_dataset_replaced_in_place(folder, dataset, restore_time):
  before = cache.open_index(folder, dataset, REQUEST)
  times = {suffix: os.stat(dataset + suffix) for suffix in (".bin", ".idx")}
  wait_for_another_ctime(dataset + ".idx")
  lengths = [9, 3, 7, 5, 4, 6]
  sizes = {suffix: os.path.getsize(dataset + suffix) for suffix in times}
  write(dataset, lengths)
  assert sizes == {suffix: os.path.getsize(dataset + suffix) for suffix in times}
  if restore_time:
    for suffix, status in times.items():
      os.utime(dataset + suffix, ns=(status.st_atime_ns, status.st_mtime_ns))
  after = cache.open_index(folder, dataset, REQUEST)
  assert not after.found and after.description.name != before.description.name
  assert same(after, built_anew(dataset)) and not same(after, before)


@pytest.mark.parametrize(
  "text",
  ["", "{", "[]", "null", "{}", '{"records": 3}', "[" * 100_000, "\0", '{"a": 1, "b": {}}'],
  ids=lambda text: text[:20],
)
def test_d16_garbage_stamps_only_cost_work(folder, dataset, built, digests, caplog, text):
  Path(folder, cache.STAMPS).write_text(text, encoding="utf-8")
  assert cache.open_index(folder, dataset, REQUEST).found
  assert len(digests) == 3 and not caplog.records
  assert cache.open_index(folder, dataset, REQUEST).found and len(digests) == 3


@pytest.mark.parametrize("changed", ["token count", "a fact less"])
def test_d16_damaged_stamp_does_not_decide_the_order(folder, dataset, changed):
  built = cache.open_index(folder, dataset, REQUEST)
  path = Path(folder, cache.STAMPS)
  text = path.read_text(encoding="utf-8")
  damaged = text.replace('"tokens": 34', '"tokens": 35' if changed == "token count" else '"token": 34')
  assert damaged != text
  path.write_text(damaged, encoding="utf-8")
  again = cache.open_index(folder, dataset, REQUEST)
  assert again.found and same(again, built)


def test_stamps_keep_only_the_latest(tmp_path, folder, dataset, monkeypatch):
  monkeypatch.setattr(index_files, "_MOST_STAMPS", 4)
  cache.open_index(folder, write(tmp_path / "other", [9, 9]), REQUEST)
  cache.open_index(folder, dataset, REQUEST)
  records = json.loads(Path(folder, cache.STAMPS).read_text(encoding="utf-8"))["records"]
  assert len(records) == 4 and not any(key.startswith("other.idx") for key in records)


def test_stamps_hold_for_another_path_to_the_same_files(tmp_path, folder, dataset, monkeypatch):
  cache.open_index(folder, dataset, REQUEST)
  (tmp_path / "mount").symlink_to(tmp_path, target_is_directory=True)
  monkeypatch.setattr(cache, "digest_of", None)  # whoever checks an array again fails
  mount = str(tmp_path / "mount")
  moved = (path.replace(str(tmp_path), mount) for path in (folder, dataset))
  assert cache.open_index(*moved, REQUEST).found


# Facts.


def test_d13_v_stray_bytes_do_not_change_the_order(dataset):
  before = cache.describe(dataset, REQUEST)
  with open(dataset + ".bin", "ab") as file:
    file.write(b"stray bytes")
  after = cache.describe(dataset, REQUEST)
  assert after == before and after.tokens_per_epoch == 34


def test_tokens_of_a_part_where_sequences_have_gaps(tmp_path):
  prefix = write(tmp_path / "data", [2, 3, 4, 5])
  dataset = MMapIndexedDataset(prefix)
  head = dataset.header
  with open(prefix + ".idx", "r+b") as file:
    file.seek(head.offsets_at)
    file.write((dataset.pointers + [0, 0, 4, 8]).astype("<i8").tobytes())
  with open(prefix + ".bin", "ab") as file:
    file.write(bytes(8))
  request = IndexRequest(1, 1, 1, None, "1,1", 0)
  assert cache.describe(prefix, request).tokens_per_epoch == 5
  assert cache.describe(prefix, IndexRequest(1, 1, 1, None, "1,1", 1)).tokens_per_epoch == 9


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_numpy_refuses_is_an_error_of_ours(folder, dataset, seed):
  with pytest.raises(MMapError, match=rf"seed is {seed}; expected 0 to 4294967295"):
    cache.open_index(folder, dataset, IndexRequest(4, seed, 9))


@pytest.mark.parametrize("seq_length", [0, -4])
def test_a_sequence_length_below_one_is_an_error_of_ours(folder, dataset, seq_length):
  with pytest.raises(MMapError, match=f"the sequence length is {seq_length}; expected 1 or more"):
    cache.open_index(folder, dataset, IndexRequest(seq_length, 42, 9))


# Processes.

BUILDER = """
import os, signal, sys, time
import numpy as np
from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_files as index_files
prefix, folder, out, role, signals = sys.argv[1:]
request = cache.IndexRequest(4, 42, 900)

def killed_between_two_files(path, array, save=cache.save_array):
  save(path, array)
  if "document_index" in path:
    os.kill(os.getpid(), signal.SIGKILL)

def truncated(path, array, save=cache.save_array):
  save(path, array)
  if "sample_index" in path:  # as a crash of a file system leaves it: the name stands and the end is missing
    half = open(path, "rb").read()[:os.path.getsize(path) // 2]
    index_files.write_atomically(path, lambda file: file.write(half))

def finds_nothing(*_):  # however late it is, it has not seen what the others wrote
  raise FileNotFoundError

if role != "plain":
  cache.load = finds_nothing
if role == "killed":
  cache.save_array = killed_between_two_files
if role == "truncated":
  cache.save_array = truncated
open(f"{signals}/ready-{role}-{os.getpid()}", "w").close()
while not os.path.exists(f"{signals}/go"):
  time.sleep(0.001)
index = cache.open_index(folder, prefix, request)
np.savez(out, *index.arrays)
"""


def test_d13_ii_eight_processes_on_a_cold_folder(tmp_path, folder, caplog):
  prefix = write(tmp_path / "data", (np.random.default_rng(1).integers(0, 9, 500)).tolist())
  (tmp_path / "signals").mkdir()
  roles = ["killed", "truncated", *["plain"] * 6]
  processes = []
  try:
    for number, role in enumerate(roles):
      arguments = [prefix, folder, str(tmp_path / f"out{number}.npz"), role, str(tmp_path / "signals")]
      processes.append(subprocess.Popen([sys.executable, "-c", BUILDER, *arguments], stderr=subprocess.PIPE, text=True))
    deadline = time.monotonic() + 60
    while len(os.listdir(tmp_path / "signals")) < len(roles):
      assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
      time.sleep(0.005)
    (tmp_path / "signals" / "go").touch()
    errors = [process.communicate(timeout=60)[1] for process in processes]
  finally:
    for process in processes:
      process.kill()
  codes = [process.returncode for process in processes]
  assert codes == [-signal.SIGKILL, 0, *[0] * 6], errors
  *right, name = cache.build_in_memory(prefix, IndexRequest(4, 42, 900))
  for number in range(1, 8):
    with np.load(tmp_path / f"out{number}.npz") as found:
      for array, expected in zip(found.values(), right, strict=True):
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected)
  # Builds again if the truncated file was the last to be written.
  first = cache.open_index(folder, prefix, IndexRequest(4, 42, 900))
  second = cache.open_index(folder, prefix, IndexRequest(4, 42, 900))
  assert second.found and second.description.name == name
  for index in (first, second):
    for array, expected in zip(index.arrays, right, strict=True):
      np.testing.assert_array_equal(array, expected)
  assert sorted(os.listdir(folder)) == sorted([cache.STAMPS, *(f"{name}-{suffix}" for suffix in SUFFIXES)])


KILLED_WHILE_WRITING = """
import os, signal, sys
from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_files as files
prefix, folder, victim = sys.argv[1:]
write = files.write_atomically

class Half:
  def __init__(self, file):
    self.file = file
  def write(self, data):
    self.file.write(bytes(data)[: len(data) // 2])
    self.file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

def kill_in_the_middle(path, content):
  write(path, (lambda file: content(Half(file))) if path.endswith(victim) else content)

files.write_atomically = kill_in_the_middle
cache.open_index(folder, prefix, cache.IndexRequest(4, 42, 9))
"""


@pytest.mark.parametrize("victim", ["document_index.npy", "shuffle_index.npy", "metadata.json", cache.STAMPS])
def test_kill_in_the_middle_of_a_write(folder, dataset, caplog, victim):
  command = [sys.executable, "-c", KILLED_WHILE_WRITING, dataset, folder, victim]
  done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
  assert done.returncode == -signal.SIGKILL, done.stderr
  (temporary,) = (name for name in os.listdir(folder) if name.endswith(".tmp"))
  assert victim in temporary and not any(name.endswith(victim) for name in os.listdir(folder))
  right = built_anew(dataset)
  for name, path in right.description.paths(folder).items():
    if os.path.exists(path):
      np.testing.assert_array_equal(np.load(path), right.arrays[cache.ARRAYS.index(name)])

  index = cache.open_index(folder, dataset, REQUEST)
  assert index.found == (victim == cache.STAMPS) and index.saved and same(index, right) and not caplog.records
  assert temporary in os.listdir(folder), "it may be of a process that is still writing"
  os.utime(os.path.join(folder, temporary), ns=(1, 1))
  os.remove(os.path.join(folder, cache.STAMPS))
  if victim != cache.STAMPS:
    os.remove(path_of(folder, right.description.name, "metadata.json"))
  cache.open_index(folder, dataset, REQUEST)
  assert [name for name in os.listdir(folder) if name.endswith(".tmp")] == []


def test_a_failed_write_leaves_no_temporary(tmp_path, monkeypatch):
  def fail(*_):
    raise OSError(30, "Read-only file system")

  path = str(tmp_path / "array.npy")
  cache.save_array(path, np.arange(3))
  monkeypatch.setattr(cache.os, "replace", fail)
  with pytest.raises(OSError, match="Read-only"):
    cache.save_array(path, np.arange(4))
  assert os.listdir(tmp_path) == ["array.npy"] and len(np.load(path)) == 3


def test_d16_truncated_by_another_process_while_mapped_is_met_at_the_next_start(folder, dataset, built, caplog):
  """A mapped file that is replaced, as every write of ours replaces, stays what it was for who has mapped it."""
  mapped = cache.open_index(folder, dataset, REQUEST)
  path = mapped.description.paths(folder)["document_index"]
  cache.save_array(path, np.zeros(3, np.int32))
  assert same(mapped, built)
  assert_rebuilt(folder, dataset, built, caplog, path)
