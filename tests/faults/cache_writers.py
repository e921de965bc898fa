# SPDX-License-Identifier: Apache-2.0
"""Kills processes that write one cache, at random moments, and looks at what the next start finds.

    python tests/faults/cache_writers.py --folder /tmp/killed --rounds 100 --writers 1

Every round forks `writers` processes that open the same orders in one folder, kills some of them after a random time
with SIGKILL, and waits for the rest, which must end well with the right arrays. Then this process opens every order:
whatever is there, the arrays must be right, every file under an index's own name must be whole, and a second start must
find everything. Prints what the kills met as JSON; exits non-zero, with round and seed, at the first wrong thing.
"""

import argparse
import json
import logging
import os
from pathlib import Path
import random
import shutil
import signal
import sys
import time
import traceback

import numpy as np

from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter

SEEDS = (1, 2)


def request(seed: int) -> cache.IndexRequest:
  return cache.IndexRequest(8, seed, 1_000_000)


def write_dataset(prefix: str) -> str:
  lengths = np.random.default_rng(0).integers(1, 40, 20_000)
  with IndexedDatasetWriter(prefix, np.uint16) as writer:
    writer.add_documents(np.ones(lengths.sum(), np.uint16), lengths)
  return prefix


def fork(task) -> int:
  """Runs a function in a new process, which exits with 0, or 1 if it fails; returns its id."""
  child = os.fork()
  if child:
    return child
  code = 1
  try:
    task()
    code = 0
  except BaseException:
    traceback.print_exc()
  os._exit(code)


def check(index: cache.Index, right) -> None:
  for array, expected in zip(index.arrays, right, strict=True):
    assert array.dtype == expected.dtype and np.array_equal(array, expected), "an array is wrong"


def open_all(prefix: str, folder: str, right, found: list | None = None) -> None:
  for seed in SEEDS:
    index = cache.open_index(folder, prefix, request(seed), write=True)
    check(index, right[seed])
    if found is not None:
      found.append(index.found)


def whole_files(folder: str) -> int:
  """Reads every file that has an index's own name, which fails if it is cut; returns the number of other files."""
  others = 0
  for name in os.listdir(folder) if os.path.isdir(folder) else []:
    path = os.path.join(folder, name)
    if name.endswith(".npy"):
      np.load(path)
    elif name.endswith(".json"):
      json.loads(Path(path).read_text(encoding="utf-8"))
    else:
      assert name.startswith(".") and name.endswith(".tmp"), f"{name} is no file of ours"
      others += 1
  return others


def wait_for_a_write(folder: str, seconds: float) -> None:
  """Returns when a file is being written in a folder."""
  end = time.perf_counter() + seconds
  while time.perf_counter() < end and not (os.path.isdir(folder) and any(".tmp" in name for name in os.listdir(folder))):
    pass


def one_round(prefix: str, folder: str, right, writers: int, rng: random.Random, span: float) -> dict[str, int]:
  """Returns what was met: processes killed, temporary files left, orders found and rebuilt."""
  shutil.rmtree(folder, ignore_errors=True)
  children = [fork(lambda: open_all(prefix, folder, right)) for _ in range(writers)]
  killed = children[: max(1, writers // 3)]
  for child in killed:
    time.sleep(rng.random() * span / len(killed))
    if rng.random() < 0.5:
      wait_for_a_write(folder, span)
    os.kill(child, signal.SIGKILL)
  codes = {child: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children}
  assert all(code in ((0, -signal.SIGKILL) if child in killed else (0,)) for child, code in codes.items()), codes
  temporaries = whole_files(folder)
  found: list[bool] = []
  open_all(prefix, folder, right, found)
  again: list[bool] = []
  open_all(prefix, folder, right, again)
  assert all(again), "a second start builds again"
  assert whole_files(folder) == temporaries, "the next start left temporary files"
  died = sum(code != 0 for code in codes.values())
  return {"killed": died, "temporary files": temporaries, "found": sum(found), "rebuilt": len(found) - sum(found)}


def time_of_a_writer(prefix: str, folder: str, right) -> float:
  """Returns the seconds that a process needs to write all orders."""
  shutil.rmtree(folder, ignore_errors=True)
  begin = time.perf_counter()
  os.waitpid(fork(lambda: open_all(prefix, folder, right)), 0)
  return time.perf_counter() - begin


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--folder", required=True, help="scratch folder")
  parser.add_argument("--rounds", type=int, default=100)
  parser.add_argument("--writers", type=int, default=1, help="processes at once; a third of them is killed")
  parser.add_argument("--seed", type=int, default=0, help="of the moments; they also depend on the machine")
  options = parser.parse_args()
  logging.basicConfig(level=logging.ERROR)  # a rebuilt order is a warning, and expected here
  rng = random.Random(options.seed)
  os.makedirs(options.folder, exist_ok=True)
  prefix = write_dataset(os.path.join(options.folder, "data"))
  right = {seed: cache.build_in_memory(prefix, request(seed))[:3] for seed in SEEDS}
  folder, totals = os.path.join(options.folder, "indices"), {}
  span = min(time_of_a_writer(prefix, folder, right) for _ in range(3)) * max(1, options.writers / (os.cpu_count() or 1))
  for number in range(options.rounds):
    try:
      met = one_round(prefix, folder, right, options.writers, rng, span)
    except Exception:
      traceback.print_exc()
      sys.exit(f"round {number} with --seed {options.seed} --writers {options.writers} failed; see {folder}")
    totals = {key: totals.get(key, 0) + value for key, value in met.items()}
  print(json.dumps(totals))


if __name__ == "__main__":
  main()
