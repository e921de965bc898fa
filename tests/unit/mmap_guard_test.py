# SPDX-License-Identifier: Apache-2.0
"""A mapped file that is truncated under the run is an error with its name; every other bus error stays one."""

import ctypes
import multiprocessing
import os
from pathlib import Path
import signal
import subprocess
import sys
import threading
import timeit

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from maxtext.input_pipeline import _mmap_guard as guard
from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline._mmap_files import FileIdentity, MMapReadError, map_file
from maxtext.input_pipeline._mmap_index_kernels import any_outside
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter, MMapIndexedDataset

pytestmark = [
  pytest.mark.skipif(not guard.SUPPORTED, reason="bus errors are handled on 64-bit Linux only"),
  pytest.mark.usefixtures("forget_truncated_files"),
]

PAGE = os.sysconf("SC_PAGE_SIZE")


def forget() -> None:
  """What one example has truncated must not be told in the next."""
  while guard._guard._gone:
    guard._guard._gone.pop()
  guard.check()


def ones(path, pages: int = 4) -> str:
  Path(path).write_bytes(b"\1" * pages * PAGE)
  return str(path)


def replace(path: str, content: bytes) -> None:
  Path(path + ".new").write_bytes(content)
  os.replace(path + ".new", path)


def run(code: str, *arguments) -> subprocess.CompletedProcess:
  command = [sys.executable, "-c", code, *map(str, arguments)]
  return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# Our mappings.


def test_truncated_idx_is_named_with_its_sizes(tmp_path):
  prefix = str(tmp_path / "data")
  with IndexedDatasetWriter(prefix, np.uint16) as writer:
    writer.add_documents(np.ones(9000, np.uint16), np.ones(9000, np.int64))
  dataset = MMapIndexedDataset(prefix)
  guard.check()
  os.truncate(prefix + ".idx", PAGE)
  assert dataset.sizes[100] == 1 and dataset.sizes[8999] == 0
  size = dataset.header.file_size
  expected = f"{prefix}.idx was truncated while it is in use: it had {size} bytes and has {PAGE} now; start again with"
  with pytest.raises(MMapReadError) as failure:
    guard.check()
  assert str(failure.value) == f"{expected} the dataset as it is to be."
  assert failure.value.filename == prefix + ".idx"


def test_truncated_npy_is_named(tmp_path):
  path = str(tmp_path / "array.npy")
  np.save(path, np.ones(3 * PAGE, np.int32))
  array = cache.map_array(path)
  os.truncate(path, 0)
  assert array.sum() == 0
  with pytest.raises(MMapReadError, match=r"array\.npy was truncated while it is in use: .* and has 0 now"):
    guard.check()


@given(before=st.integers(1, 3 * PAGE), share=st.floats(0, 1), start=st.floats(0, 1))
def test_what_is_left_reads_as_it_was_and_the_rest_as_zeros(tmp_path_factory, before, share, start):
  path = str(tmp_path_factory.getbasetemp() / "guarded")
  Path(path).write_bytes(b"\7" * before)
  mapped, after = map_file(path), int(share * before)
  tail = guard.Tail(FileIdentity.of(path), mapped)
  os.truncate(path, after)
  first = int(start * before)  # the first page that is touched may be any
  assert mapped[first:].sum() == 7 * max(after - first, 0)
  assert mapped.sum() == 7 * after
  faults = -(-after // PAGE) < -(-before // PAGE)
  for tails, seen in (((), faults), ((tail,), after < before)):
    if seen:
      with pytest.raises(MMapReadError, match="guarded was truncated"):
        guard.check(tails)
    else:
      guard.check(tails)
  del mapped, tail, tails
  forget()


@given(end=st.lists(st.sampled_from(b"\0\0\0\1\xff"), min_size=8, max_size=64), pages=st.integers(0, 2), data=st.data())
def test_a_cut_within_the_last_page_is_seen_just_if_it_loses_something(tmp_path_factory, end, pages, data):
  path = str(tmp_path_factory.getbasetemp() / "cut")
  content = b"\1" * pages * PAGE + bytes(end[: len(end) // 8 * 8])
  replace(path, content)
  array = map_file(path).view(data.draw(st.sampled_from([np.uint8, np.int64])))
  tail = guard.Tail(FileIdentity.of(path), array)
  os.truncate(path, pages * PAGE + data.draw(st.integers(1, len(content) - pages * PAGE)))
  assert tail.lost == (array.tobytes() != content)
  if tail.lost:
    with pytest.raises(MMapReadError, match="cut was truncated"):
      guard.check([tail])
  else:
    guard.check([tail])


def test_an_empty_array_has_no_tail(tmp_path):
  path = ones(tmp_path / "file")
  assert not guard.Tail(FileIdentity.of(path), map_file(path)[:0].view(np.int32)).lost


def test_an_error_is_told_while_the_mapping_is_there_and_not_after(tmp_path):
  mapped = map_file(ones(tmp_path / "file"))
  os.truncate(tmp_path / "file", 0)
  assert mapped[0] == 0
  for _ in range(3):
    with pytest.raises(MMapReadError):
      guard.check()
  del mapped
  guard.check()


def test_an_error_of_a_mapping_that_is_gone_is_told_once(tmp_path):
  path = ones(tmp_path / "file")
  mapped = map_file(path)
  os.truncate(path, 0)
  assert mapped.sum() == 0
  del mapped
  with pytest.raises(MMapReadError, match="file was truncated"):
    guard.check()
  guard.check()
  again = map_file(ones(path))
  assert again.sum() == 4 * PAGE
  guard.check()


def test_every_truncated_file_is_told_until_the_last_is_unmapped(tmp_path):
  first, second = (map_file(ones(tmp_path / name)) for name in ("first", "second"))
  for name in ("first", "second"):
    os.truncate(tmp_path / name, 0)
  assert first.sum() + second.sum() == 0
  del first
  told = []
  for _ in range(3):
    with pytest.raises(MMapReadError) as failure:
      guard.check()
    told.append(os.path.basename(failure.value.filename))
  assert told == ["first", "second", "second"]
  del second
  guard.check()


def test_a_file_that_was_written_again_cannot_hide_the_fault(tmp_path):
  path = ones(tmp_path / "file")
  mapped = map_file(path)
  os.truncate(path, 0)
  assert mapped[2 * PAGE] == 0
  ones(path)
  size = 4 * PAGE
  with pytest.raises(MMapReadError, match=f"was written again or its disk .*: it had {size} bytes and has {size} now"):
    guard.check()
  os.remove(path)
  with pytest.raises(MMapReadError, match="and is not there now"):
    guard.check()
  assert mapped[0] == 1, "pages before the one that faulted stay the file's"


@pytest.mark.parametrize("change", ["replaced", "removed", "touched"])
def test_a_mapping_outlives_the_name_of_its_file(tmp_path, change):
  path = ones(tmp_path / "file")
  mapped = map_file(path)
  tail = guard.Tail(FileIdentity.of(path), mapped)
  match change:
    case "replaced":
      (tmp_path / "other").write_bytes(b"other")
      os.replace(tmp_path / "other", path)
    case "removed":
      os.remove(path)
    case "touched":
      os.utime(path, ns=(1, 1))
  guard.check([tail])
  assert mapped.sum() == 4 * PAGE


def test_compiled_code_meets_the_end_of_a_file(tmp_path):
  mapped = map_file(ones(tmp_path / "file"))
  assert not any_outside(mapped, 1, 1)
  os.truncate(tmp_path / "file", PAGE)
  assert any_outside(mapped, 1, 1), "the zeros are outside"
  with pytest.raises(MMapReadError):
    guard.check()


def test_threads_read_map_and_unmap_while_files_shrink(tmp_path):
  stop, wrong = threading.Event(), []

  def churn(number):
    path = ones(tmp_path / f"churn{number}", 1)
    while not stop.is_set():
      if map_file(path).sum() != PAGE:
        wrong.append(path)

  def meet_the_end(number):
    for turn in range(50):
      path = ones(tmp_path / f"short{number}-{turn}")
      mapped = map_file(path)
      os.truncate(path, PAGE)
      if mapped.sum() != PAGE:
        wrong.append(path)

  churners = [threading.Thread(target=churn, args=(number,)) for number in range(3)]
  readers = [threading.Thread(target=meet_the_end, args=(number,)) for number in range(3)]
  for thread in churners + readers:
    thread.start()
  for thread in readers:
    thread.join()
  stop.set()
  for thread in churners:
    thread.join()
  assert not wrong
  told = set()
  for _ in range(150):
    with pytest.raises(MMapReadError) as failure:
      guard.check()
    told.add(failure.value.filename)
  assert told == {str(tmp_path / f"short{number}-{turn}") for number in range(3) for turn in range(50)}
  guard.check()


def test_one_mapping_read_by_many_threads(tmp_path):
  path = ones(tmp_path / "file", 64)
  mapped = map_file(path)
  os.truncate(path, 0)
  sums, barrier = [], threading.Barrier(8)

  def read(number):
    barrier.wait()
    sums.append(int(mapped[number * 8 * PAGE :: PAGE].sum()))

  threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  assert sums == [0] * 8
  with pytest.raises(MMapReadError):
    guard.check()


def test_5000_mappings(tmp_path):
  paths = [ones(tmp_path / str(number), 1) for number in range(50)]
  mapped = [map_file(path) for path in paths * 100]
  rows = guard._guard.words[guard._ROWS]
  assert rows >= 5000
  guard.check()
  os.truncate(paths[7], 0)
  assert [int(array[0]) for array in mapped] == [number != 7 for number in range(50)] * 100
  with pytest.raises(MMapReadError, match=f"{paths[7]} was truncated"):
    guard.check()
  del mapped
  for _ in range(99):  # one is told
    with pytest.raises(MMapReadError):
      guard.check()
  guard.check()
  again = [map_file(path) for path in paths[8:] * 10]
  assert guard._guard.words[guard._ROWS] == rows and len(again) == 420, "rows of the table are used again"


def test_a_check_costs_a_comparison(tmp_path):
  mapped = map_file(ones(tmp_path / "file"))
  assert min(timeit.repeat(guard.check, number=10_000, repeat=5)) < 10_000 * 2e-6
  assert mapped[0] == 1


# Processes.

TRUNCATED = """
import os, sys
from maxtext.input_pipeline import _mmap_guard as guard
from maxtext.input_pipeline._mmap_files import map_file
mapped = map_file(sys.argv[1])
os.truncate(sys.argv[1], 0)
mapped.sum()
guard.check()
"""


def test_a_process_ends_with_the_sentence_and_not_by_a_signal(tmp_path):
  done = run(TRUNCATED, ones(tmp_path / "file"))
  assert done.returncode == 1
  assert "MMapReadError" in done.stderr.splitlines()[-1] and "file was truncated while" in done.stderr.splitlines()[-1]


def read_and_check(mapped) -> None:
  mapped.sum()
  try:
    guard.check()
  except MMapReadError:
    os._exit(7)
  os._exit(0)


def test_a_forked_process_has_the_guard_too(tmp_path):
  mapped, whole = map_file(ones(tmp_path / "file")), map_file(ones(tmp_path / "whole"))
  for array, expected in ((whole, 0), (mapped, 7), (whole, 0)):
    if array is mapped:
      os.truncate(tmp_path / "file", 0)
    child = os.fork()
    if not child:
      read_and_check(array)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == expected
  guard.check()  # this process has read nothing


def _map_truncate_and_read(path) -> None:
  mapped = map_file(path)
  os.truncate(path, 0)
  read_and_check(mapped)


def test_a_spawned_process_makes_its_own(tmp_path):
  process = multiprocessing.get_context("spawn").Process(target=_map_truncate_and_read, args=(ones(tmp_path / "file"),))
  process.start()
  process.join(60)
  assert process.exitcode == 7


def test_nothing_is_compiled_before_something_is_mapped():
  code = """
import sys
from maxtext.input_pipeline import _mmap_guard, _mmap_indexed_dataset
_mmap_guard.check()
assert _mmap_guard._guard is None and not {"llvmlite", "numba", "jax"} & set(sys.modules)
"""
  assert run(code).returncode == 0


# Bus errors of others.

FOREIGN = """
import ctypes, faulthandler, mmap, os, signal, sys
from maxtext.input_pipeline._mmap_files import map_file
before, after, cause, path = sys.argv[1:]

def handle(name):
  if name == "faulthandler":
    faulthandler.disable()
    faulthandler.enable()
  if name == "python":
    signal.signal(signal.SIGBUS, lambda *_: (print("handled"), sys.exit(3)))
  if name == "ignored":
    signal.signal(signal.SIGBUS, signal.SIG_IGN)

handle(before)
ours = map_file(path)
handle(after)
if after == "faulthandler":
  ours = [ours, map_file(path)]  # puts our handler before it again
if cause == "truncated":
  with open(path, "r+b") as file:
    other = mmap.mmap(file.fileno(), 0)
  os.truncate(path, 0)
  other[0]
elif cause == "sent":
  os.kill(os.getpid(), signal.SIGBUS)
print("survived")
"""


@pytest.mark.parametrize("cause", ["truncated", "sent"])
@pytest.mark.parametrize(
  "before, after",
  [("none", "none"), ("faulthandler", "none"), ("none", "faulthandler"), ("faulthandler", "faulthandler")],
)
def test_a_foreign_bus_error_still_kills(tmp_path, before, after, cause):
  done = run(FOREIGN, before, after, cause, ones(tmp_path / "file"))
  assert done.returncode == -signal.SIGBUS, done
  assert done.stderr.count("Fatal Python error: Bus error") == ("faulthandler" in (before, after))
  assert "survived" not in done.stdout


def test_a_signal_that_was_sent_reaches_the_handler_of_before(tmp_path):
  done = run(FOREIGN, "python", "none", "sent", ones(tmp_path / "file"))
  assert (done.returncode, done.stdout) == (3, "handled\n"), done.stderr
  done = run(FOREIGN, "ignored", "none", "sent", ones(tmp_path / "file"))
  assert (done.returncode, done.stdout) == (0, "survived\n"), done.stderr


def test_a_handler_that_came_later_is_put_behind_at_the_next_file(tmp_path):
  code = """
import faulthandler, os, sys
from maxtext.input_pipeline import _mmap_guard as guard
from maxtext.input_pipeline._mmap_files import map_file
first = map_file(sys.argv[1])
faulthandler.enable()
second = map_file(sys.argv[1])
os.truncate(sys.argv[1], 0)
first.sum()
guard.check()
"""
  done = run(code, ones(tmp_path / "file"))
  assert done.returncode == 1 and "was truncated while it is in use" in done.stderr and "Fatal" not in done.stderr


def test_pytest_has_its_fault_handler_and_the_guard_comes_first(tmp_path):
  mapped = map_file(ones(tmp_path / "file"))
  libc, current = ctypes.CDLL(None), guard._Sigaction()
  libc.sigaction(signal.SIGBUS, None, ctypes.byref(current))
  assert current.handler == guard._guard._handler and mapped[0] == 1
