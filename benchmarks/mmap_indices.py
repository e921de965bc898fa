# SPDX-License-Identifier: Apache-2.0
"""Time and memory of building Megatron's three indices, against MaxText 0.2.5 and megatron-core, in one run.

The dataset has 1,000,000 sequences of 100 to 1,100 tokens; asked for are 500,000 samples of 2,048 tokens: two epochs,
the last shuffled apart. "In memory" returns arrays, "files" also writes them into an empty folder (ours with its checks
of the dataset and checksums). Re-opening is measured in a new process on 10,000,000 sequences whose `.bin` is sparse.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
import shutil
import time

from common import (
  SEED,
  Peer,
  interleave,
  median,
  parse_arguments,
  peer_names,
  ratio,
  report,
  sparse_dataset,
  target,
  uniform_dataset,
  warm,
)

EXAMPLE = "python benchmarks/mmap_indices.py --repeats 15 > indices.json"
SEQ_LENGTH = 2048


def main() -> None:
  started, options = time.monotonic(), parse_arguments(__doc__, EXAMPLE, repeats=15)
  sequences, many = (20_000, 200_000) if options.quick else (1_000_000, 10_000_000)
  order = order_of(uniform_dataset(options.data_dir, sequences, 100, 1100), sequences)
  large = order_of(sparse_dataset(options.data_dir, many, 100, 1100), many)
  small = order_of(uniform_dataset(options.data_dir, 2_000, 100, 1100), 2_000)
  warm(order["prefix"])
  times = measure_times(options, order)
  stages = measure_stages(options, order)
  memory = {
      f"{count} sequences, {noun}": measure_memory(options, small, big, files)
      for count, big in ((sequences, order), (many, large))
      for noun, files in (("in memory", False), ("files", True))
  }
  reopened = measure_reopening(options, large)
  results = {"seconds": times["seconds"], "same_indices": times["same"], "stages": stages, "memory": memory}
  results |= {"ratios": times["ratios"], "reopen": reopened}
  targets = [
      target("in memory: times faster than the release", times["ratios"]["release / ours, in memory"], 30),
      target("files: times faster than megatron-core", times["ratios"]["megatron-core / ours, files"], 2),
      *(target(f"peak memory / arrays, {name}", row["ratio"], 1.3, at_most=True) for name, row in memory.items()),
      target(f"re-opening {many} sequences, seconds", reopened["seconds"], 0.2, at_most=True),
  ]
  report("mmap_indices", options, started, results, targets)


def order_of(prefix: str, sequences: int) -> dict:
  """What to build for a dataset: two epochs, the last apart."""
  return {"prefix": prefix, "seq_length": SEQ_LENGTH, "seed": SEED, "num_samples": sequences // 2}


def measure_times(options, order: dict) -> dict:
  """Returns medians in seconds, their ratios, and whether all peers built the same arrays."""
  with contextlib.ExitStack() as stack:
    peers = {name: stack.enter_context(Peer(name, options)) for name in peer_names(options)}
    calls = {
        f"{name}, in memory": lambda peer=peer: peer.ask("build_in_memory", **order)
        for name, peer in peers.items()
        if name != "megatron"
    }
    calls |= {
        f"{name}, files": lambda peer=peer, folder=str(options.data_dir / f"files-{name}"): peer.ask(
            "build_files", folder=folder, **order
        )
        for name, peer in peers.items()
        if name != "release"
    }
    results = interleave(options.repeats, calls, "building indices")
  seconds = {name: median(rows) for name, rows in results.items()}
  sums = [row["checksums"] for rows in results.values() for row in rows]
  ratios = {
      "release / ours, in memory": ratio(seconds["release, in memory"], seconds["ours, in memory"]),
      "megatron-core / ours, files": ratio(seconds.get("megatron, files"), seconds["ours, files"]),
  }
  seconds.setdefault("megatron, files", None)
  return {"seconds": seconds, "ratios": ratios, "same": all(row == sums[0] for row in sums)}


def measure_stages(options, order: dict) -> dict[str, float]:
  """Returns the median seconds of each part of our build, one after another."""
  folder = str(options.data_dir / "stages")
  with Peer("ours", options) as ours:
    results = interleave(options.repeats, {"ours": lambda: ours.ask("stages", folder=folder, **order)}, "stages")["ours"]
  return {stage: median([row["seconds"] for row in results], stage) for stage in results[0]["seconds"]}


def measure_memory(options, small: dict, large: dict, files: bool) -> dict:
  """Returns the memory of our build in a new process: the run with the highest peak of up to three."""
  folder = str(options.data_dir / "memory") if files else None
  rows = []
  for _ in range(min(options.repeats, 3)):
    with Peer("ours", options) as ours:
      rows.append(ours.ask("memory", small=small, large=large, folder=folder))
  return max(rows, key=lambda row: row["growth"])


def measure_reopening(options, order: dict) -> dict:
  """Returns the medians of opening written indices in new processes; `process` includes start and imports."""
  folder = options.data_dir / "reopen"
  shutil.rmtree(folder, ignore_errors=True)
  rows = []
  for turn in range(options.repeats + 2):  # the first builds, the second also fills the page cache
    start = time.perf_counter()
    with Peer("ours", options) as ours:
      row = ours.ask("reopen", folder=str(folder), **order)
      row["process"] = time.perf_counter() - start
    if turn > 1:
      rows.append(row)
  assert all(row["found"] for row in rows)
  size = sum(map(os.path.getsize, Path(folder).glob("*.npy")))
  shutil.rmtree(folder)
  keys = ("seconds", "imports", "process", "mapped_bytes_touched")
  return {**{key: median(rows, key) for key in keys}, "bytes_of_arrays": size}


if __name__ == "__main__":
  main()
