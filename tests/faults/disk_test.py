# SPDX-License-Identifier: Apache-2.0
"""Real file systems that are full or read-only; mounting one takes root, so elsewhere these are skipped."""

import contextlib
import json
import logging
import os
from pathlib import Path
import shutil
import subprocess
import sys

import numpy as np
import pytest

from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter, MMapError

REQUEST = cache.IndexRequest(4, 42, 90)


def call(*command) -> bool:
  return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture
def small_disk(tmp_path):
  """A file system of 256 KiB; unmounted after the test, whatever is still mapped."""
  folder = tmp_path / "disk"
  folder.mkdir()
  if not shutil.which("mount") or not call("mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)):
    pytest.skip("this user may not mount a file system")
  yield folder
  assert call("umount", "-l", str(folder))


@pytest.fixture
def dataset(tmp_path) -> str:
  with IndexedDatasetWriter(str(tmp_path / "data"), np.uint16) as writer:
    writer.add_documents(np.ones(300, np.uint16), np.full(100, 3))
  return str(tmp_path / "data")


@contextlib.contextmanager
def read_only(folder: Path):
  assert call("mount", "-o", "remount,ro", str(folder))
  try:
    yield
  finally:
    assert call("mount", "-o", "remount,rw", str(folder))


def test_a_full_file_system_with_every_amount_of_room(tmp_path, small_disk):
  script = Path(__file__).parent / "full_disk.py"
  command = [sys.executable, str(script), "--data", str(tmp_path / "data"), "--folder", str(small_disk / "indices")]
  done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
  assert done.returncode == 0, done.stderr[-3000:]
  met = json.loads(done.stdout)
  assert 1 < met["saved"] < met["attempts"] and met["attempts"] > 40


def test_whole_files_on_a_read_only_file_system_are_used_in_silence(small_disk, dataset, caplog):
  folder = str(small_disk / "indices")
  assert cache.open_index(folder, dataset, REQUEST, write=True).saved
  os.remove(os.path.join(folder, cache.STAMPS))  # every start checks every file, and cannot note it
  caplog.set_level(logging.WARNING)
  with read_only(small_disk):
    for _ in range(2):
      assert cache.open_index(folder, dataset, REQUEST, write=True).found
    assert not os.path.exists(os.path.join(folder, cache.STAMPS)) and not caplog.records


@pytest.mark.parametrize("there", [True, False])
def test_a_read_only_file_system_without_the_files(small_disk, dataset, caplog, there):
  folder = small_disk / "indices"
  if there:
    folder.mkdir()
  caplog.set_level(logging.WARNING)
  with read_only(small_disk):
    index = cache.open_index(str(folder), dataset, REQUEST, write=True)
    (message,) = caplog.messages
    assert not index.saved and len(index.arrays[2]) == (2 * 300 - 1) // 4
    assert message.startswith(f"Cannot write indices to {folder} ([Errno 30] Read-only file system")
    assert (os.listdir(folder) if there else os.listdir(small_disk)) == []
    with pytest.raises(MMapError, match=r"cannot write indices to .* \(\[Errno 30\] Read-only file system.*; give a "):
      cache.write_index(str(folder), dataset, REQUEST)
  assert cache.open_index(str(folder), dataset, REQUEST, write=True).saved


def test_a_damaged_file_on_a_read_only_file_system_is_built_in_memory(small_disk, dataset, caplog):
  folder = str(small_disk / "indices")
  first = cache.open_index(folder, dataset, REQUEST, write=True)
  right = [array.copy() for array in first.arrays]
  Path(first.description.paths(folder)["shuffle_index"]).write_bytes(b"damaged")
  caplog.set_level(logging.WARNING)
  with read_only(small_disk):
    index = cache.open_index(folder, dataset, REQUEST, write=True)
  assert not index.saved and all(map(np.array_equal, index.arrays, right))
  assert len(caplog.messages) == 2 and "is not a NumPy array file; building the indices again" in caplog.messages[0]


def test_a_dataset_on_a_full_file_system_is_an_error_and_no_half_files(small_disk):
  with (
    pytest.raises(MMapError, match=r"cannot write .*data\.bin: No space left on device; give a writable folder with"),
    IndexedDatasetWriter(str(small_disk / "data"), np.uint16) as writer,
  ):
    writer.add_documents(np.ones(400_000, np.uint16), np.full(4, 100_000))
  assert os.listdir(small_disk) == []
