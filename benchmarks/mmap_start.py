# SPDX-License-Identifier: Apache-2.0
"""Time and memory from the start of a process to its first batch, with 1,000 shards whose indices are cached.

The shards have 20,000 sequences of 100 to 1,100 tokens (`.bin` sparse): 20,000,000 in all. They are one dataset; or the
1,000 children of a blend, with a folder of indices each, or with one folder for all. The process imports MaxText's input
pipeline, reads a configuration, opens the data and reads one batch of 32 samples of 2,048 tokens, by itself and with one
worker process. The page cache is warm, and no file is checked for the first time.
"""

from __future__ import annotations

from pathlib import Path
import time

from common import Peer, median, parse_arguments, report, say, sparse_dataset, target, warm

EXAMPLE = "python benchmarks/mmap_start.py --repeats 5 > start.json"
SEQ_LENGTH = 2048
BATCH = 32
PARTS = ("interpreter", "imports", "configuration", "opening", "first batch", "all")


def main() -> None:
  started, options = time.monotonic(), parse_arguments(__doc__, EXAMPLE, repeats=5)
  shards, sequences = (20, 200) if options.quick else (1000, 20_000)
  folder = options.data_dir / f"shards-{shards}-{sequences}"
  folder.mkdir(exist_ok=True)
  prefixes = [sparse_dataset(folder, sequences, 100, 1100, number) for number in range(shards)]
  # About half of the samples of an epoch, so that a blend of any shares has them too.
  num_samples = shards * sequences * 600 // SEQ_LENGTH // 2
  keys = {"steps": num_samples // BATCH, "per_device_batch_size": BATCH, "max_target_length": SEQ_LENGTH}
  keys |= {"blend_cache_dir": str(folder / "blend"), "mmap_eod_id": 0}  # a sparse file's tokens are 0
  kinds = {
      "one dataset": f"{folder / 'one'}|{folder}",
      "a blend": ";".join(f"{folder / 'children' / Path(prefix).name}|{prefix},1" for prefix in prefixes),
      "a blend, one folder": ";".join(f"{folder / 'shared'}|{prefix},1" for prefix in prefixes),
  }
  cases = [(noun, workers) for noun in kinds for workers in (0, 1)]
  if options.quick:  # a start takes seconds whatever the sizes
    cases = [("a blend", 0)]
  results, targets = {"shards": shards, "sequences": shards * sequences}, []
  for noun, workers in cases:
    for prefix in prefixes:
      warm(prefix, [".idx"])
    name = f"{noun}, {workers} workers"
    results[name] = measure(options, name, {**keys, "grain_train_files": kinds[noun], "grain_worker_count": workers})
    targets.append(target(f"{name}: seconds to the first batch", results[name]["seconds"]["all"], 5, at_most=True))
  report("mmap_start", options, started, results, targets)


def measure(options, noun: str, keys: dict) -> dict:
  """Returns the median seconds of each part of a start, and memory; the first start builds and does not count."""
  rows = []
  for turn in range(options.repeats + 1):
    say(f"{noun}: start {turn} of {options.repeats}" + ("" if turn else " (builds what is missing, does not count)"))
    with Peer("ours", options, "peer_stream.py") as ours:
      row = ours.ask("first_batch", started=ours.started, **keys)
    if turn:
      rows.append(row)
  seconds = {part: median([row["seconds"] for row in rows], part) for part in PARTS}
  largest = max(rows, key=lambda row: row["growth"])
  return {
      "seconds": seconds,
      "without interpreter and imports": seconds["all"] - seconds["interpreter"] - seconds["imports"],
      "memory after the imports": largest["imported"],
      "growth to the peak": largest["growth"],
      "children": largest["children"],
      "shards": largest["shards"],
      "cached": all(row["cached"] for row in rows),
  }


if __name__ == "__main__":
  main()
