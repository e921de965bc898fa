# SPDX-License-Identifier: Apache-2.0
"""Faults of the machine: killed writers, full disks, files that change under a run; more of each in `make test-long`.

The crash in the middle of a write, eight processes on a cold folder, folders that cannot be written and damaged files are
in mmap_index_cache_test; a bus error by itself in mmap_guard_test; whole training runs in integration/data_failure_test.
"""

import json
import logging
import os
from pathlib import Path
import pickle
import subprocess
import sys

import numpy as np
import pytest

from maxtext.input_pipeline import _mmap_guard as guard
from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_kernels as kernels
from maxtext.input_pipeline._megatron_blending import MegatronBlendedDataSource
from maxtext.input_pipeline._mmap_datasource import MegatronNpyDataSource
from maxtext.input_pipeline._mmap_files import MMapError, MMapReadError
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter, MMapIndexedDataset
from maxtext.input_pipeline._mmap_windows import Shard, TokenStream

SCRIPTS = Path(__file__).parents[1] / "faults"
ROUNDS = int(os.environ.get("FAULT_ROUNDS", "3"))
PAGE = os.sysconf("SC_PAGE_SIZE")
L, EOD = 4, 1

pytestmark = pytest.mark.usefixtures("forget_truncated_files")
needs_guard = pytest.mark.skipif(not guard.SUPPORTED, reason="bus errors are handled on 64-bit Linux only")


def run_script(name: str, *arguments) -> dict:
  command = [sys.executable, str(SCRIPTS / name), *map(str, arguments)]
  done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 10 * ROUNDS, check=False)
  assert done.returncode == 0, done.stderr[-3000:]
  return json.loads(done.stdout)


# Writers of a cache.


def test_killed_at_random_moments_of_a_cache_write(tmp_path):
  met = run_script("cache_writers.py", "--folder", tmp_path, "--rounds", ROUNDS)
  assert met["found"] + met["rebuilt"] == 2 * ROUNDS and met["killed"] > ROUNDS // 2 - 1


def test_two_of_eight_writers_killed_at_random_moments(tmp_path):
  rounds = max(1, ROUNDS // 5)
  met = run_script("cache_writers.py", "--folder", tmp_path, "--rounds", rounds, "--writers", 8, "--seed", 1)
  assert met["found"] + met["rebuilt"] == 2 * rounds


def test_files_that_may_not_grow_to_their_size(tmp_path):
  met = run_script("full_disk.py", "--data", tmp_path / "data", "--folder", tmp_path / "indices", "--limit")
  assert 1 < met["saved"] < met["attempts"]


# Files that change under a source.


@pytest.fixture
def dataset(tmp_path) -> str:
  """1,500 sequences: every index file is longer than a page."""
  return write(str(tmp_path / "data"))


def write(prefix: str) -> str:
  with IndexedDatasetWriter(prefix, np.uint16) as writer:
    for row in range(1_500):
      writer.add_document(np.array([row % 1000 + 2, 7, 7, EOD], np.uint16))
  return prefix


@pytest.fixture
def open_source(tmp_path, dataset):
  """Opens a source; not one itself, since pytest would keep its mappings until after the test."""
  request = cache.IndexRequest(L, 1, 1_499)
  return lambda: MegatronNpyDataSource(str(tmp_path / "indices"), dataset, EOD, L, request=request, write=True)


def mapped_files(source) -> dict[str, str]:
  paths = {"idx": source.dataset.shards[0].idx_file.path}
  return paths | dict(zip(cache.ARRAYS, source.index.paths, strict=True))


@needs_guard
@pytest.mark.parametrize("name", ["idx", *cache.ARRAYS])
@pytest.mark.parametrize("left", ["nothing", "one page", "all but 8 bytes"])
def test_every_mapped_file_that_is_truncated_under_a_source_is_named(open_source, name, left):
  source = open_source()
  everything = range(len(source))
  before = source.read_rows(everything)
  path = mapped_files(source)[name]
  size = os.path.getsize(path)
  os.truncate(path, {"nothing": 0, "one page": PAGE, "all but 8 bytes": size - 8}[left])
  for read in (lambda: source.read_rows(everything), lambda: source[len(source) - 1]):
    with pytest.raises(MMapReadError) as failure:
      read()
    now = os.path.getsize(path)
    expected = f"{path} was truncated while it is in use: it had {size} bytes and has {now} now; start again with the"
    assert str(failure.value) == f"{expected} dataset as it is to be."
  assert before.shape == (1_499, L + 1)


@needs_guard
@pytest.mark.parametrize("left", [0, -8])
def test_the_truncated_one_of_several_shards_is_named(tmp_path, left):
  prefixes = [write(str(tmp_path / f"shard{number}")) for number in range(3)]
  request = cache.IndexRequest(L, 1, 4_000)
  source = MegatronNpyDataSource(str(tmp_path / "indices"), prefixes, EOD, L, request=request, write=True)
  assert source.read_rows(range(4_000)).shape == (4_000, L + 1)
  path = prefixes[2] + ".idx"
  os.truncate(path, 0 if not left else os.path.getsize(path) + left)
  with pytest.raises(MMapReadError, match=rf"shard2\.idx was truncated while .* has {os.path.getsize(path)} now"):
    source.read_rows(range(4_000))


@needs_guard
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("left", [0, -8])
def test_a_truncated_pair_of_blend_indices_is_named(tmp_path, open_source, number, left):
  source = open_source()
  blend = MegatronBlendedDataSource([source, source], [0.5, 0.5], 2_900, cache_dir=str(tmp_path / "blend"), write=True)
  assert blend.read_rows(range(2_900)).shape == (2_900, L + 1)
  path = blend.pair.paths[number]
  os.truncate(path, 0 if not left else os.path.getsize(path) + left)
  with pytest.raises(MMapReadError, match=f"{path} was truncated while it is in use"):
    blend.read_rows(range(2_900))


@needs_guard
@pytest.mark.parametrize("left", [0, PAGE, -8])
def test_windows_over_a_file_with_gaps_name_it(dataset, left):
  pointers = MMapIndexedDataset(dataset).pointers + np.arange(1_500) * 2  # a token between sequences
  with open(dataset + ".idx", "r+b") as file:
    file.seek(MMapIndexedDataset(dataset).header.offsets_at)
    file.write(pointers.astype("<i8").tobytes())
  with open(dataset + ".bin", "ab") as file:
    file.write(bytes(2 * 1_500))
  stream = TokenStream([Shard.of(MMapIndexedDataset(dataset))])
  out = np.empty((375, 16), np.int32)
  stream.read(range(0, 6_000, 16), out)
  path = dataset + ".idx"
  os.truncate(path, left if left >= 0 else os.path.getsize(path) + left)
  with pytest.raises(MMapError, match=r"data\.idx was (truncated while it is in use|changed since the run opened it)"):
    stream.read(range(0, 6_000, 16), out)


@needs_guard
@pytest.mark.parametrize("name", ["idx", *cache.ARRAYS])
def test_a_source_in_a_worker_process_names_it_too(open_source, name):
  source = open_source()
  copy = pickle.loads(pickle.dumps(source))
  assert np.array_equal(copy.read_rows([0, 5]), source.read_rows([0, 5]))
  path = mapped_files(source)[name]
  os.truncate(path, 0)
  with pytest.raises(MMapReadError, match=f"{path} was truncated while it is in use"):
    copy.read_rows(range(len(copy)))


@pytest.mark.parametrize("name", ["idx", *cache.ARRAYS])
def test_a_mapped_file_that_is_replaced_or_removed_changes_nothing(open_source, name):
  source = open_source()
  before = source.read_rows(range(len(source)))
  path = mapped_files(source)[name]
  Path(path + ".new").write_bytes(b"something else")
  os.replace(path + ".new", path)
  assert np.array_equal(source.read_rows(range(len(source))), before)
  os.remove(path)
  assert np.array_equal(source.read_rows(range(len(source))), before)


@pytest.mark.parametrize("value", [0, -1, 1_500, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("name", cache.ARRAYS)
def test_values_that_are_changed_in_place_are_refused_or_read_within_bounds(open_source, name, value):
  source = open_source()
  path = mapped_files(source)[name]
  for _ in range(2):  # the second time, also the row after the first
    array = np.lib.format.open_memmap(path, "r+")
    array.reshape(-1)[-3:] = np.array(value, np.int64).astype(array.dtype)
    array.flush()
    for element in range(len(source)):
      try:
        assert source.read_rows([element]).shape == (1, L + 1)
      except MMapError as error:
        assert str(error).endswith(("start again.", "build them again.", "as it is to be.")) and "\n" not in str(error)


def test_the_reader_looks_at_every_bound():
  """Zeros, as a truncated file reads, and anything else: no crash, no endless loop."""
  rng = np.random.default_rng(0)
  sizes, pointers = np.full(50, 4, np.int32), np.arange(50, dtype=np.int64) * 8
  descriptor = os.open(os.devnull, os.O_RDONLY)
  wild = [0, 1, -1, 49, 50, 2**31 - 1, -(2**31)]
  try:
    for _ in range(3_000):
      documents = rng.choice([*range(50), *wild], 20).astype(np.int32)
      samples = rng.choice([0, 1, 5, 19, *wild], (3, 2)).astype(np.int32)
      out = np.zeros(12, np.uint8)
      filled = kernels.read_sample(descriptor, 2, sizes, pointers, documents, samples, int(rng.integers(2)), 1, out)
      assert filled <= len(out)
  finally:
    os.close(descriptor)


@needs_guard
def test_an_index_that_shrinks_while_it_is_checked_is_built_again(tmp_path, dataset, monkeypatch, caplog):
  request = cache.IndexRequest(L, 1, 1_499)
  folder = str(tmp_path / "indices")
  first = cache.open_index(folder, dataset, request, write=True)
  right = [array.copy() for array in first.arrays]
  os.remove(os.path.join(folder, cache.STAMPS))
  path = first.description.paths(folder)["sample_index"]
  del first
  map_array = cache.map_array

  def shrink(name):
    array = map_array(name)
    if name == path and os.path.getsize(path) > PAGE:
      os.truncate(path, PAGE)
    return array

  monkeypatch.setattr(cache, "map_array", shrink)
  caplog.set_level(logging.WARNING)
  again = cache.open_index(folder, dataset, request, write=False)
  assert not again.found and all(map(np.array_equal, again.arrays, right))
  assert f"{path} cannot be read (changed while it is in use); building the indices again." in caplog.messages
  guard.check()  # it was told, and the file is no longer in use


@needs_guard
def test_a_dataset_that_shrinks_while_indices_are_built_writes_none(tmp_path, dataset, monkeypatch):
  iter_indices = cache.utils.iter_indices

  def shrink(*arguments):
    for number, named in enumerate(iter_indices(*arguments)):
      if not number:
        os.truncate(dataset + ".idx", PAGE)
      yield named

  monkeypatch.setattr(cache.utils, "iter_indices", shrink)
  with pytest.raises(MMapReadError, match=r"data\.idx was truncated while it is in use"):
    cache.open_index(str(tmp_path / "indices"), dataset, cache.IndexRequest(L, 1, 1_499), write=True)
  assert not list(tmp_path.glob("indices/*metadata.json"))


@needs_guard
def test_a_dataset_that_shrinks_while_it_is_scanned_is_named(dataset, monkeypatch):
  scan = MMapIndexedDataset.scan

  def shrink(self):
    os.truncate(dataset + ".idx", PAGE)
    return scan(self)

  monkeypatch.setattr(MMapIndexedDataset, "scan", shrink)
  with pytest.raises(MMapError, match=r"data\.idx"):
    cache.dataset_facts(dataset)
