# SPDX-License-Identifier: Apache-2.0
"""Time and memory of drawing a blend, against MaxText 0.2.5 and megatron-core, in one run.

The blend has 8 children of random weights and 10,000,000 draws, from nothing to both arrays in memory. MaxText 0.2.5
draws in Python and is timed on 200,000 draws. For information: blends of 2, 40 and 300 children with 2,000,000 draws, and
the opening of the pair of 10,000,000 draws from a cache folder, checked before and not.
"""

from __future__ import annotations

import contextlib
import shutil
import time

from common import SEED, Peer, interleave, median, parse_arguments, peer_names, ratio, report, target
import numpy as np

EXAMPLE = "python benchmarks/mmap_blend.py --repeats 9 > blend.json"
CHILDREN = (8, 2, 40, 300)
# A plain write of the arrays, 10 bytes a draw, is what no way of drawing can beat.
BYTES_PER_DRAW = 10


def main() -> None:
  started, options = time.monotonic(), parse_arguments(__doc__, EXAMPLE, repeats=9)
  size, in_python = (100_000, 10_000) if options.quick else (10_000_000, 200_000)
  with contextlib.ExitStack() as stack:
    peers = {name: stack.enter_context(Peer(name, options, "peer_blend.py")) for name in peer_names(options)}
    draws = {
        f"{children} children": measure_draws(options, peers, children, size if children == 8 else size // 5, in_python)
        for children in CHILDREN
    }
    pair = measure_pair(options, peers["ours"], size)
  with Peer("ours", options, "peer_blend.py") as ours:
    memory = ours.ask("draw_memory", weights=weights_of(CHILDREN[0]), size=size)
  memory["ratio"] = memory["growth"] / memory["bytes"]
  ratios = draws["8 children"]["others / ours"]
  results = {"draws": draws, "plain write, ns/draw": measure_write(options, size), "pair on disk": pair, "memory": memory}
  targets = [
      target("8 children: times faster than the release", ratios["release"], 100),
      target("8 children: times faster than megatron-core", ratios["megatron"], 1.5),
  ]
  report("mmap_blend", options, started, results, targets)


def weights_of(children: int) -> list[float]:
  """Returns random weights between 0.1 and 1."""
  return np.random.default_rng([SEED, children]).uniform(0.1, 1, children).tolist()


def measure_draws(options, peers, children: int, size: int, in_python: int) -> dict:
  """Returns medians of nanoseconds per draw, their ratios, and whether all peers draw alike."""
  weights, sizes = weights_of(children), {name: in_python if name == "release" else size for name in peers}
  calls = {
      name: lambda peer=peer: peer.ask("draw", weights=weights, size=sizes[peer.name], compared=in_python)
      for name, peer in peers.items()
  }
  rows = interleave(options.repeats, calls, f"blend of {children}")
  times = {name: median(row) / sizes[name] * 1e9 for name, row in rows.items()}
  times.setdefault("megatron", None)
  ratios = {name: ratio(times[name], times["ours"]) for name in ("release", "megatron")}
  sums = [row[0]["checksums"] for row in rows.values()]
  return {"ns/draw": times, "others / ours": ratios, "same_draws": all(row == sums[0] for row in sums)}


def measure_write(options, size: int) -> float:
  """Returns the nanoseconds that writing as many bytes as a draw gives takes, memory being new each time."""

  def write() -> dict[str, float]:
    start = time.perf_counter()
    np.empty(size * BYTES_PER_DRAW, np.uint8)[:] = 1
    return {"seconds": time.perf_counter() - start}

  return median(interleave(options.repeats, {"write": write}, "plain write")["write"]) / size * 1e9


def measure_pair(options, ours, size: int) -> dict:
  """Returns seconds to open a pair in a cache folder, checked before and not, and the bytes that memory grows by."""
  pair = {"folder": str(options.data_dir / "blend"), "weights": weights_of(CHILDREN[0]), "size": size}
  shutil.rmtree(pair["folder"], ignore_errors=True)
  ours.ask("write_pair", **pair)
  calls = {
      noun: lambda checked=checked: ours.ask("load_pair", checked=checked, **pair)
      for noun, checked in (("checked now", False), ("checked before", True))
  }
  rows = interleave(options.repeats, calls, "pair on disk")
  shutil.rmtree(pair["folder"])
  results = {f"{noun}, seconds": median(row) for noun, row in rows.items()}
  return results | {f"{noun}, growth": max(entry["growth"] for entry in row) for noun, row in rows.items()}


if __name__ == "__main__":
  main()
