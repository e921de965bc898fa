# SPDX-License-Identifier: Apache-2.0
"""Datasets at a URL, on a store in memory whose faults are chosen by the test."""

from __future__ import annotations

import base64
import collections
import hashlib
import os
import pickle
import subprocess
import sys
import threading

import fsspec
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from maxtext.input_pipeline import _mmap_remote as remote
from maxtext.input_pipeline import _mmap_remote_copy as remote_copy
from maxtext.input_pipeline import _mmap_remote_io as remote_io
from maxtext.input_pipeline import _mmap_remote_retry as remote_retry
from maxtext.input_pipeline._mmap_files import MMapError, MMapFileNotFoundError, MMapReadError
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter, MMapIndexedDataset
from support import content_of, one_sentence

QUICK = remote_retry.Patience(reply=5.0, total=20.0, first_pause=0.001, longest_pause=0.002)
NO_PATIENCE = remote_retry.Patience(reply=5.0, total=0.0, first_pause=0.001, longest_pause=0.002)


class FlakyStore(MemoryFileSystem):
  """A store in memory that fails as told.

  Attributes:
    faults: one for each of the next reads: an exception to raise, a function to apply to the bytes, or None.
    reads: ranges that were asked for, failed reads included.
    asked: how often an object was looked at.
    checksums: whether objects have the MD5 checksum that GCS gives.
  """

  protocol = "flaky"
  store: dict = {}
  pseudo_dirs = [""]
  faults: collections.deque = collections.deque()
  reads: list = []
  asked = 0
  checksums = False

  @classmethod
  def _strip_protocol(cls, path):
    return super()._strip_protocol(path.removeprefix("flaky://"))

  def cat_file(self, path, start=None, end=None, **kwargs):
    type(self).reads.append((start, end))
    fault = self.faults.popleft() if self.faults else None
    if isinstance(fault, Exception):
      raise fault
    data = super().cat_file(path, start=start, end=end)
    return fault(data) if fault else data

  def info(self, path, **kwargs):
    type(self).asked += 1
    found = super().info(path)
    if self.checksums and found["type"] == "file":
      content = super().cat_file(path)
      found["md5Hash"] = base64.b64encode(hashlib.md5(content).digest()).decode()
    return found


fsspec.register_implementation("flaky", FlakyStore, clobber=True)


def reset() -> None:
  remote.forget()
  FlakyStore.store.clear()
  FlakyStore.pseudo_dirs[:] = [""]
  FlakyStore.faults.clear()
  FlakyStore.reads, FlakyStore.asked, FlakyStore.checksums = [], 0, False


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
  """The store, empty and without faults, and an empty cache folder."""
  reset()
  monkeypatch.setattr(remote_retry, "PATIENCE", QUICK)
  monkeypatch.setattr(remote_copy, "_cache_dir", str(tmp_path / "cache"))
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))  # for the test of the default
  return FlakyStore()


def put(path: str, content: bytes) -> str:
  FlakyStore().pipe_file(path, content)
  return f"flaky://{path}"


def read(url: str, *pieces: tuple[int, int]) -> list[bytes]:
  file = remote.look(url)
  return remote.read_many([(file, position, size) for position, size in pieces])


# URLs.


@pytest.mark.parametrize("path", ["gs://bucket/books", "s3://b/c", "memory://x", "file:///data", "simplecache::s3://b/c"])
def test_a_url_is_known_by_its_scheme(path):
  assert remote.is_url(path)


@pytest.mark.parametrize("path", ["/data/books", "data/books", "c://x", "a:b", "/data/gs://x", "", "://x"])
def test_other_paths_are_no_urls(path):
  assert not remote.is_url(path)


def test_an_unknown_scheme_is_named():
  assert "nosuch://b/x cannot be used" in one_sentence(pytest.raises(MMapError, remote.look, "nosuch://b/x").value)


def test_a_missing_package_is_named_by_its_extra():
  code = (
      "import sys; sys.modules['s3fs'] = None\n"
      "from maxtext.input_pipeline import _mmap_remote as remote\n"
      "try: remote.look('s3://b/x')\n"
      "except remote.remote_io.MMapError as error: print(error)"
  )
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert "pip install 'maxtext[s3]'" in done.stdout and len(done.stdout.splitlines()) == 1


def test_nothing_of_fsspec_is_imported_without_a_url():
  code = "import sys, maxtext.input_pipeline._mmap_indexed_dataset; assert 'fsspec' not in sys.modules"
  subprocess.run([sys.executable, "-c", code], check=True)


# Reading ranges.

SIZE = 300
FAULTS = (None, OSError("reset"), TimeoutError(), lambda data: data[:-1], lambda data: b"")


@given(
    st.lists(st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted), max_size=40),
    st.lists(st.sampled_from(FAULTS), max_size=8),
    st.sampled_from([1, 50, 1 << 20]),
)
def test_ranges_are_slices_of_the_object_whatever_fails_and_passes(ranges, faults, largest):
  reset()
  content = np.random.default_rng(0).bytes(SIZE)
  url = put("b/x", content)
  remote.look(url)
  FlakyStore.faults.extend(faults)
  before, remote_io.LARGEST_READ = remote_io.LARGEST_READ, largest
  try:
    assert read(url, *((a, b - a) for a, b in ranges)) == [content[a:b] for a, b in ranges]
  finally:
    remote_io.LARGEST_READ = before


def test_no_byte_is_read_that_was_not_asked_for_and_none_twice():
  url = put("b/x", bytes(1000))
  read(url, (10, 5), (15, 5), (12, 4), (500, 1), (100, 0))
  assert sorted(FlakyStore.reads) == [(10, 20), (500, 501)]


def test_pieces_of_several_objects_are_read_in_one_wave(store, monkeypatch):
  urls = [put(f"b/{number}", bytes([number] * 8)) for number in range(8)]
  files = [remote.look(url) for url in urls]
  all_at_once = threading.Barrier(8)
  plain = FlakyStore.cat_file
  monkeypatch.setattr(FlakyStore, "cat_file", lambda *args, **keys: (all_at_once.wait(10), plain(*args, **keys))[1])
  assert remote.read_many([(file, 1, 2) for file in files]) == [bytes([number] * 2) for number in range(8)]


def test_requests_under_way_are_bounded(store, monkeypatch):
  url = put("b/x", bytes(1000))
  under_way, most, lock = 0, 0, threading.Lock()
  plain = FlakyStore.cat_file

  def counted(*args, **keys):
    nonlocal under_way, most
    with lock:
      under_way, most = under_way + 1, max(most, under_way + 1)
    threading.Event().wait(0.005)
    try:
      return plain(*args, **keys)
    finally:
      with lock:
        under_way -= 1

  monkeypatch.setattr(FlakyStore, "cat_file", counted)
  callers = [threading.Thread(target=read, args=(url, *((2 * i, 1) for i in range(40)))) for _ in range(4)]
  for caller in callers:
    caller.start()
  for caller in callers:
    caller.join()
  assert most == remote_io.CONCURRENCY


@pytest.mark.parametrize("fault", [OSError("reset"), TimeoutError("slow"), ConnectionResetError(), lambda data: data[:3]])
def test_what_may_pass_is_tried_again_and_counted(fault):
  url = put("b/x", b"0123456789")
  FlakyStore.faults.extend([fault] * 3)
  assert read(url, (2, 5)) == [b"23456"]
  assert FlakyStore.reads == [(2, 7)] * 4


def test_patience_ends_with_a_sentence_that_says_how_often_it_was_tried(monkeypatch):
  url = put("b/x", b"0123456789")
  remote.look(url)
  monkeypatch.setattr(remote_retry, "PATIENCE", remote_retry.Patience(5.0, 0.05, 0.001, 0.002))
  FlakyStore.faults.extend([OSError("connection reset by peer")] * 1000)
  text = one_sentence(pytest.raises(MMapReadError, read, url, (0, 4)).value)
  assert url in text and "connection reset by peer" in text and f"tried {len(FlakyStore.reads)} times" in text
  assert len(FlakyStore.reads) > 3


@pytest.mark.parametrize("fault", [PermissionError("no rights"), NotImplementedError("ranges"), KeyError("x")])
def test_what_does_not_pass_is_not_tried_again(fault):
  url = put("b/x", b"0123456789")
  FlakyStore.faults.extend([fault] * 3)
  assert url in one_sentence(pytest.raises(MMapReadError, read, url, (0, 4)).value)
  assert len(FlakyStore.reads) == 1


class HttpError(Exception):
  """As gcsfs raises them."""

  def __init__(self, code):
    super().__init__(f"status {code}")
    self.code = code


@pytest.mark.parametrize(
    ("status", "tries"),
    [(429, 2), (408, 2), (500, 2), (503, 2), (301, 1), (400, 1), (401, 1), (403, 1), (416, 1)],
)
def test_the_status_says_whether_another_try_helps(status, tries):
  url = put("b/x", b"0123456789")
  FlakyStore.faults.append(HttpError(status))
  if tries == 2:
    assert read(url, (0, 4)) == [b"0123"]
  else:
    assert str(status) in one_sentence(pytest.raises(MMapReadError, read, url, (0, 4)).value)
  assert len(FlakyStore.reads) == tries


def test_a_server_that_ignores_ranges_is_refused():
  url = put("b/x", b"0123456789")
  FlakyStore.faults.append(lambda data: b"0123456789")
  assert "range requests" in one_sentence(pytest.raises(MMapReadError, read, url, (0, 4)).value)


def test_bytes_after_the_end_are_refused_without_a_request():
  url = put("b/x", b"0123456789")
  assert "has 10" in one_sentence(pytest.raises(MMapReadError, read, url, (8, 3)).value)
  assert not FlakyStore.reads


@pytest.mark.parametrize("now", [b"01234", b"01234567890123456789", b"9876543210"])
def test_an_object_that_was_replaced_is_refused(monkeypatch, now):
  url = put("b/x", b"0123456789")
  file = remote.look(url)
  put("b/x", now)
  monkeypatch.setattr(remote_io, "_LOOK_AGAIN", 0.0)
  error = pytest.raises(remote.ObjectChangedError, remote.read_many, [(file, 0, 8)]).value
  assert "was changed while it is in use" in one_sentence(error)


def test_an_object_that_was_removed_is_named(store):
  url = put("b/x", b"0123456789")
  file = remote.look(url)
  store.rm_file("b/x")
  error = pytest.raises(remote.ObjectChangedError, remote.read_many, [(file, 0, 8)]).value
  assert "was removed while it is in use" in one_sentence(error)


def test_a_missing_object_and_a_folder_are_named():
  put("b/folder/x", b"1")
  assert "does not exist" in one_sentence(pytest.raises(MMapFileNotFoundError, remote.look, "flaky://b/none").value)
  assert "is a folder" in one_sentence(pytest.raises(MMapFileNotFoundError, remote.look, "flaky://b/folder").value)


# Copies.


@pytest.fixture
def small_parts(monkeypatch):
  monkeypatch.setattr(remote_copy, "PART", 10)


def test_an_object_is_copied_once_and_again_when_it_was_replaced(small_parts):
  url = put("b/x.idx", b"0123456789abcdef")
  path = remote.fetch(url)
  assert content_of(path) == b"0123456789abcdef" and os.path.basename(path) == "x.idx"
  assert sorted(FlakyStore.reads) == [(0, 10), (10, 16)]
  assert remote.fetch(url) == path and len(FlakyStore.reads) == 2
  put("b/x.idx", b"another")
  remote.forget()
  assert content_of(remote.fetch(url)) == b"another" and content_of(path) == b"0123456789abcdef"


def test_an_empty_object_is_copied():
  assert content_of(remote.fetch(put("b/empty", b""))) == b""


def test_a_copy_goes_on_where_the_last_process_left_off(small_parts, monkeypatch):
  content = bytes(range(95))
  url = put("b/x", content)
  remote.look(url)
  monkeypatch.setattr(remote_io, "CONCURRENCY", 1)
  monkeypatch.setattr(remote_io, "_pools", {})
  monkeypatch.setattr(remote_retry, "PATIENCE", NO_PATIENCE)
  FlakyStore.faults.extend([None] * 4 + [OSError("reset")])
  with pytest.raises(MMapReadError):
    remote.fetch(url)
  assert FlakyStore.reads[:5] == [(0, 10), (10, 20), (20, 30), (30, 40), (40, 50)]
  there = {begin for begin, _ in FlakyStore.reads} - {40}  # the thread may have begun others before it was told to stop
  FlakyStore.reads.clear()
  assert content_of(remote.fetch(url)) == content
  assert {begin for begin, _ in FlakyStore.reads} == set(range(0, 95, 10)) - there


def test_a_part_that_was_damaged_since_is_copied_again(small_parts, monkeypatch):
  content = bytes(range(50))
  url = put("b/x", content)

  def interrupt(self):
    raise KeyboardInterrupt

  with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
    patched.setattr(remote_copy._Download, "_check", interrupt)  # all parts are there, but the copy has not got its name
    remote.fetch(url)
  (partial,) = (path for path in walk(remote.cache_root()) if path.endswith(".partial"))
  with open(partial, "r+b") as file:
    file.seek(25)
    file.write(b"\xff")
  FlakyStore.reads.clear()
  assert content_of(remote.fetch(url)) == content
  assert FlakyStore.reads == [(20, 30)]


def walk(folder: str) -> list[str]:
  return [os.path.join(here, name) for here, _, names in os.walk(folder) for name in names]


def test_threads_that_race_for_one_object_copy_it_once(small_parts):
  content = bytes(range(200))
  url = put("b/x", content)
  found = []
  racers = [threading.Thread(target=lambda: found.append(content_of(remote.fetch(url)))) for _ in range(8)]
  for racer in racers:
    racer.start()
  for racer in racers:
    racer.join()
  assert found == [content] * 8
  assert sorted(FlakyStore.reads) == [(begin, begin + 10) for begin in range(0, 200, 10)]


def test_bytes_that_changed_on_the_way_are_found_by_the_checksum_and_copied_again(small_parts):
  FlakyStore.checksums = True
  url = put("b/x", bytes(range(30)))
  FlakyStore.faults.append(lambda data: data[:-1] + b"?")
  assert content_of(remote.fetch(url)) == bytes(range(30))
  assert len(FlakyStore.reads) == 6


def test_copies_that_differ_from_each_other_and_the_checksum_are_refused(small_parts):
  FlakyStore.checksums = True
  url = put("b/x", bytes(range(30)))
  FlakyStore.faults.extend([lambda data: data[:-1] + b"?", None, None, lambda data: data[:-1] + b"!"])
  assert "two copies differ" in one_sentence(pytest.raises(MMapReadError, remote.fetch, url).value)
  assert content_of(remote.fetch(url)) == bytes(range(30))


def test_copies_that_agree_are_believed_more_than_a_tag_that_is_no_checksum(small_parts, monkeypatch):
  url = put("b/x", bytes(range(30)))
  monkeypatch.setattr(remote, "look", lambda *args, **keys: remote.RemoteFile(url, 30, "tag", "0" * 32))
  monkeypatch.setattr(remote_io, "_check_unchanged", lambda *args: None)
  assert content_of(remote.fetch(url)) == bytes(range(30))
  assert len(FlakyStore.reads) == 6


def test_an_object_that_is_replaced_during_the_copy_is_copied_anew(small_parts, monkeypatch):
  url = put("b/x", bytes(30))
  remote.look(url)

  def replace(data):
    put("b/x", b"1" * 25)
    return data[:4]

  FlakyStore.faults.append(replace)
  assert content_of(remote.fetch(url)) == b"1" * 25


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
  url = put("b/x", b"123")
  (tmp_path / "file").write_bytes(b"")
  monkeypatch.setattr(remote_copy, "_cache_dir", str(tmp_path / "file"))
  text = one_sentence(pytest.raises(MMapError, remote.fetch, url).value)
  assert str(tmp_path / "file") in text and "mmap_remote_cache_dir" in text
  assert "mmap_remote_cache_dir" in str(pytest.raises(MMapError, remote.fetch_files, "flaky://b", ["x"]).value)


def test_a_cache_folder_without_room_is_named_before_anything_is_read(monkeypatch):
  url = put("b/x", bytes(100))
  monkeypatch.setattr(remote_copy, "PART", 10)
  usage = collections.namedtuple("usage", "free")
  monkeypatch.setattr(remote_copy.shutil, "disk_usage", lambda path: usage(50))
  assert "has room for 50" in one_sentence(pytest.raises(MMapError, remote.fetch, url).value)
  assert not FlakyStore.reads


def test_copies_of_versions_replaced_long_ago_are_removed(monkeypatch):
  monkeypatch.setattr(remote_copy, "_KEEP_OLD", -1)
  url = put("b/x", b"old")
  old = remote.fetch(url)
  put("b/x", b"newer")
  remote.forget()
  assert content_of(remote.fetch(url)) == b"newer" and not os.path.exists(old)


def test_the_folder_for_copies_is_the_configured_one_or_the_users_cache(tmp_path, monkeypatch):
  remote.configure("")
  assert remote.cache_root() == str(tmp_path / "xdg" / "maxtext" / "mmap")
  remote.configure("~/elsewhere")
  assert remote.cache_root() == os.path.expanduser("~/elsewhere")


# Index folders.


def names_in(folder: str) -> dict[str, bytes]:
  return {name: content_of(os.path.join(folder, name)) for name in os.listdir(folder) if not name.startswith(".")}


def test_an_index_folder_is_mirrored_as_far_as_it_exists():
  put("b/indices/a.npy", b"a")
  put("b/indices/other.npy", b"o")
  folder = remote.fetch_files("flaky://b/indices/", ["a.npy", "b.npy"])
  assert names_in(folder) == {"a.npy": b"a"}
  assert remote.fetch_files("flaky://b/indices", ["other.npy"]) == folder
  assert names_in(folder) == {"a.npy": b"a", "other.npy": b"o"}


def test_an_index_folder_that_does_not_exist_is_empty_and_can_be_written():
  folder = remote.fetch_files("flaky://b/none", ["a.npy"])
  assert names_in(folder) == {}
  with open(os.path.join(folder, "a.npy"), "wb") as file:
    file.write(b"built")
  assert names_in(remote.fetch_files("flaky://b/none", ["a.npy"])) == {"a.npy": b"built"}


def test_a_file_built_in_place_of_a_copy_stays_until_the_store_has_another(store):
  put("b/i/a.npy", b"stale")
  folder = remote.fetch_files("flaky://b/i", ["a.npy"])
  with open(os.path.join(folder, "new"), "wb") as file:
    file.write(b"built")
  os.replace(os.path.join(folder, "new"), os.path.join(folder, "a.npy"))
  assert names_in(remote.fetch_files("flaky://b/i", ["a.npy"])) == {"a.npy": b"built"}
  put("b/i/a.npy", b"newer")
  assert names_in(remote.fetch_files("flaky://b/i", ["a.npy"])) == {"a.npy": b"newer"}
  store.rm_file("b/i/a.npy")
  assert names_in(remote.fetch_files("flaky://b/i", ["a.npy"])) == {}


def test_folders_within_an_index_folder_are_mirrored():
  put("b/blend/dataset_0/a.npy", b"a")
  folder = remote.fetch_files("flaky://b/blend", ["dataset_0/a.npy", "dataset_1/a.npy"])
  assert content_of(os.path.join(folder, "dataset_0", "a.npy")) == b"a"
  assert not os.path.exists(os.path.join(folder, "dataset_1", "a.npy"))


# Datasets.


@pytest.fixture
def local(tmp_path) -> str:
  """A dataset on this machine."""
  rng = np.random.default_rng(1)
  with IndexedDatasetWriter(str(tmp_path / "data" / "books"), np.uint16) as writer:
    for length in rng.integers(0, 40, 50):
      writer.add_document(rng.integers(0, 1000, length))
  return str(tmp_path / "data" / "books")


@pytest.fixture
def distant(local) -> str:
  """The same dataset at a URL."""
  for suffix in (".idx", ".bin"):
    put(f"b/data/books{suffix}", content_of(local + suffix))
  return "flaky://b/data/books"


def test_a_dataset_at_a_url_is_the_dataset(local, distant):
  here, there = MMapIndexedDataset(local), MMapIndexedDataset(distant)
  assert there.is_remote and not here.is_remote
  assert there.bin_file.path == distant + ".bin" and os.path.isfile(there.idx_file.path)
  assert (there.sizes == here.sizes).all() and there.scan() == here.scan()
  assert all((there[row] == here[row]).all() for row in range(len(here)))
  assert (there.get(5, 1, 2) == here.get(5, 1, 2)).all()
  pieces = [(2 * begin, 6) for begin in range(0, 60, 7)]
  assert there.read_many(pieces) == here.read_many(pieces)
  there.close()


def test_a_url_of_a_file_works_like_its_path(local):
  here, there = MMapIndexedDataset(local), MMapIndexedDataset(f"file://{local}")
  assert all((there[row] == here[row]).all() for row in range(len(here)))


def test_bin_is_never_copied(distant):
  MMapIndexedDataset(distant)[3]
  assert not [path for path in walk(remote.cache_root()) if path.endswith(".bin")]


def test_a_dataset_at_a_url_pickles_with_what_is_known_of_it(distant):
  dataset = MMapIndexedDataset(distant)
  text = pickle.dumps(dataset)
  expected = dataset[4]
  remote.forget()
  FlakyStore.reads, FlakyStore.asked = [], 0
  again = pickle.loads(text)
  assert again.bin_file == dataset.bin_file and again.idx_file == dataset.idx_file
  assert not FlakyStore.asked and not FlakyStore.reads
  assert (again[4] == expected).all()


def test_another_process_reads_with_the_cache_folder_of_the_first(local, tmp_path):
  dataset = MMapIndexedDataset(f"file://{local}")
  (tmp_path / "pickled").write_bytes(pickle.dumps(dataset))
  code = (
      "import pickle, sys; dataset = pickle.load(open(sys.argv[1], 'rb'))\n"
      "print(dataset.idx_file.path, dataset.get(7).tolist())"
  )
  done = subprocess.run([sys.executable, "-c", code, tmp_path / "pickled"], capture_output=True, text=True, check=True)
  assert done.stdout.strip() == f"{dataset.idx_file.path} {dataset.get(7).tolist()}"
  assert dataset.idx_file.path.startswith(str(tmp_path / "cache"))


def test_a_forked_process_reads(local, tmp_path):
  code = (
      "import os, sys\n"
      "from maxtext.input_pipeline._mmap_indexed_dataset import MMapIndexedDataset\n"
      "dataset = MMapIndexedDataset(sys.argv[1]); expected = dataset.get(7).tolist(); pid = os.fork()\n"
      "if not pid: os._exit(dataset.get(7).tolist() != expected)\n"
      "sys.exit(os.waitpid(pid, 0)[1])"
  )
  subprocess.run([sys.executable, "-c", code, f"file://{local}"], check=True, timeout=60)


def test_a_dataset_whose_bin_was_replaced_is_refused(distant, monkeypatch):
  dataset = MMapIndexedDataset(distant)
  put("b/data/books.bin", bytes(dataset.bin_file.size))
  monkeypatch.setattr(remote_io, "_LOOK_AGAIN", 0.0)
  assert "was changed" in one_sentence(pytest.raises(MMapError, dataset.get, 3).value)


def test_a_truncated_bin_is_refused_when_it_is_opened(distant):
  put("b/data/books.bin", b"12")
  assert f"{distant}.bin is truncated" in one_sentence(pytest.raises(MMapError, MMapIndexedDataset, distant).value)


def test_messages_about_an_index_name_its_url(distant):
  put("b/data/books.idx", b"nonsense" * 10)
  assert f"{distant}.idx begins with" in str(pytest.raises(MMapError, MMapIndexedDataset, distant).value)


def test_a_url_resolves_to_its_datasets(local, distant):
  assert remote.resolve(distant) == [distant]
  for suffix in (".idx", ".bin"):
    put(f"b/data/atlas{suffix}", content_of(local + suffix))
  put("b/data/readme.txt", b"")
  assert remote.resolve("flaky://b/data") == remote.resolve("flaky://b/data/") == ["flaky://b/data/atlas", distant]


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("flaky://b/half", "flaky://b/half.bin is missing"),
        ("flaky://b/folder", "flaky://b/folder/half.bin is missing"),
        ("flaky://b/texts", "has no .idx files"),
        ("flaky://b/none", "names no dataset"),
    ],
)
def test_a_url_without_a_whole_dataset_is_named(path, part):
  for name in ("half.idx", "folder/half.idx", "texts/readme.txt"):
    put(f"b/{name}", b"1")
  assert part in one_sentence(pytest.raises(MMapFileNotFoundError, remote.resolve, path).value)


def test_many_datasets_are_looked_at_once(local):
  for number in range(20):
    for suffix in (".idx", ".bin"):
      put(f"b/many/{number}{suffix}", content_of(local + suffix))
  prefixes = remote.resolve("flaky://b/many")
  remote.prepare([*prefixes, local])
  assert len(FlakyStore.reads) == 20
  FlakyStore.asked = 0
  assert sum(len(MMapIndexedDataset(prefix)) for prefix in prefixes) == 20 * len(MMapIndexedDataset(local))
  assert len(FlakyStore.reads) == 20 and not FlakyStore.asked
