# SPDX-License-Identifier: Apache-2.0
"""Writes indices into a folder with too little room, for every amount of room that makes a difference.

    python tests/faults/full_disk.py --data /tmp/data --folder /mnt/small/indices    a small file system of its own
    python tests/faults/full_disk.py --data /tmp/data --folder /tmp/indices --limit  a limit on the size of each file

However little there is: the arrays are right, one warning names the folder and the reason, nothing half-written is
left, and with room the next start writes what is missing. Prints how many attempts fitted as JSON.
"""

import argparse
from collections.abc import Iterator
import contextlib
import json
import logging
import os
from pathlib import Path
import resource
import shutil
import signal

import numpy as np

from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter

REQUEST = cache.IndexRequest(4, 42, 9_000)
PAGE = 4096


class Warnings(logging.Handler):
  """Keeps what is logged."""

  def __init__(self):
    super().__init__(logging.WARNING)
    self.messages: list[str] = []

  def emit(self, record: logging.LogRecord) -> None:
    self.messages.append(record.getMessage())


@contextlib.contextmanager
def only_files_of(size: int) -> Iterator[None]:
  before = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def only_room_for(size: int, ballast: str) -> Iterator[None]:
  """Fills the file system with a file up to `size` bytes."""
  status = os.statvfs(os.path.dirname(ballast))
  free = status.f_bavail * status.f_frsize
  assert size < free <= 1 << 24, f"{free} bytes are free; give a folder on a small file system of its own"
  with open(ballast, "wb") as file:
    file.write(bytes(free - size))
  try:
    yield
  finally:
    os.remove(ballast)


def attempt(folder: str, prefix: str, right, room) -> bool:
  """Opens an order while `room` is held and again afterwards; returns whether it could be saved at once."""
  shutil.rmtree(folder, ignore_errors=True)
  heard = Warnings()
  logging.getLogger().addHandler(heard)
  try:
    with room:
      index = cache.open_index(folder, prefix, REQUEST, write=True)
    assert [np.array_equal(*pair) for pair in zip(index.arrays, right, strict=True)] == [True] * 3
    assert len(heard.messages) == (not index.saved), heard.messages
    assert index.saved or heard.messages[0].startswith(f"Cannot write indices to {folder} ("), heard.messages
    for name in os.listdir(folder) if os.path.isdir(folder) else []:
      path = os.path.join(folder, name)
      assert not name.endswith(".tmp"), name
      assert np.load(path) is not None if name.endswith(".npy") else json.loads(Path(path).read_text(encoding="utf-8"))
    heard.messages.clear()
    found = [cache.open_index(folder, prefix, REQUEST, write=True) for _ in range(2)]
    met = [index.saved, found[0].found, found[0].saved, found[1].found]
    assert met in ([False, False, True, True], [True] * 4) and not heard.messages, (met, heard.messages)
    assert [np.array_equal(*pair) for pair in zip(found[1].arrays, right, strict=True)] == [True] * 3
  finally:
    logging.getLogger().removeHandler(heard)
  return index.saved


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--data", required=True, help="prefix of the dataset to write, on another file system")
  parser.add_argument("--folder", required=True, help="of the indices; emptied")
  parser.add_argument("--limit", action="store_true", help="limit the size of files instead of filling the file system")
  options = parser.parse_args()
  signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write beyond the limit fails
  with IndexedDatasetWriter(options.data, np.uint16) as writer:
    writer.add_documents(np.ones(40_000, np.uint16), np.full(5_000, 8))
  right = cache.build_in_memory(options.data, REQUEST)[:3]
  largest = max(array.nbytes for array in right) + PAGE
  saved = []
  if options.limit:
    edges = sorted({bound + step for bound in (1, 128, *(array.nbytes + 128 for array in right)) for step in (-1, 0)})
    for size in [*edges, largest]:
      saved.append(attempt(options.folder, options.data, right, only_files_of(size)))
  else:
    ballast = os.path.join(os.path.dirname(options.folder), "ballast")
    for pages in range(sum(array.nbytes for array in right) // PAGE + 9):
      saved.append(attempt(options.folder, options.data, right, only_room_for(pages * PAGE, ballast)))
  assert saved == sorted(saved) and saved[-1] and not saved[0], saved
  print(json.dumps({"attempts": len(saved), "saved": sum(saved)}))


if __name__ == "__main__":
  main()
