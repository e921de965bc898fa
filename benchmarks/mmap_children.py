# SPDX-License-Identifier: Apache-2.0
"""Time and memory of building a blend offline with its children side by side, against one after the other.

Two children of 20,000,000 sequences of 100 to 1,100 tokens (`.bin` sparse), 10,000,000 samples of 2,048 tokens from both;
all files written. Either way a child's array is written while its next one is built, so that one child alone uses part of
a second core.
"""

from __future__ import annotations

import os
import time

from common import SEED, Peer, interleave, median, parse_arguments, ratio, report, sparse_dataset, warm

EXAMPLE = "python benchmarks/mmap_children.py --repeats 5 > children.json"
SEQ_LENGTH = 2048
WORKERS = {"side by side": 2, "one after the other": 1}


def main() -> None:
  started, options = time.monotonic(), parse_arguments(__doc__, EXAMPLE, repeats=5)
  sequences = 100_000 if options.quick else 20_000_000
  prefixes = [sparse_dataset(options.data_dir, sequences, 100, 1100, number) for number in range(2)]
  for prefix in prefixes:
    warm(prefix, [".idx"])
  blend = {"prefixes": prefixes, "folder": str(options.data_dir / "children"), "seq_length": SEQ_LENGTH, "seed": SEED}
  blend["size"] = sequences // 2
  with Peer("ours", options, "peer_blend.py") as ours:
    calls = {noun: lambda count=count: ours.ask("children", workers=count, **blend) for noun, count in WORKERS.items()}
    rows = interleave(options.repeats, calls, "children")
  seconds = {noun: median(row) for noun, row in rows.items()}
  memory = {noun: max(entry["growth"] for entry in row) for noun, row in rows.items()}
  size = rows["side by side"][0]["bytes"]
  sums = [entry["checksums"] for row in rows.values() for entry in row]
  results = {
      "seconds": seconds,
      "one after the other / side by side": ratio(seconds["one after the other"], seconds["side by side"]),
      "cores": os.cpu_count(),
      "peak memory": memory,
      "bytes of arrays": size,
      "peak memory / arrays": {noun: peak / size for noun, peak in memory.items()},
      "same_files": all(row == sums[0] for row in sums),
  }
  report("mmap_children", options, started, results, [])


if __name__ == "__main__":
  main()
