# SPDX-License-Identifier: Apache-2.0
"""Our shuffle against numpy.random.RandomState.shuffle, which it reproduces, and against the limit of the memory.

The limit is a loop of independent updates at random places that are distributed as a shuffle's: one cache line is read
and written an element, and nothing else is done. It is measured plain, with as many misses in flight as the processor
finds by itself, and with prefetches. A shuffle also draws its places, and swaps.
"""

from __future__ import annotations

import time

from common import SEED, interleave, median, parse_arguments, ratio, report
import numba
import numpy as np

from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline._mmap_index_kernels import prefetch

EXAMPLE = "python benchmarks/mmap_shuffle.py --repeats 5 > shuffle.json"
_PIECE = 1 << 22
_AHEAD = 96  # updates between a prefetch and its use


def main() -> None:
  started, options = time.monotonic(), parse_arguments(__doc__, EXAMPLE, repeats=5)
  sizes = (10_000, 100_000) if options.quick else (1_000_000, 20_000_000, 100_000_000)
  results = {f"{size} elements": measure(size, options.repeats * (1 if size > 10**7 else 5)) for size in sizes}
  report("mmap_shuffle", options, started, results, [])


def measure(size: int, repeats: int) -> dict:
  """Returns nanoseconds per element, and whether permutation and generator state are NumPy's."""
  array, partners = np.arange(size, dtype=np.int32), draw_partners(size)
  calls = {
      "numpy": lambda: timed(lambda: np.random.RandomState(SEED).shuffle(array)),
      "ours": lambda: timed(lambda: utils.shuffle(array, np.random.RandomState(SEED))),
      "updates": lambda: timed(lambda: update(array, partners)),
      "prefetched updates": lambda: timed(lambda: update_prefetched(array, partners)),
  }
  rows = interleave(repeats, calls, f"shuffling {size}")
  nanoseconds = {name: median(row) / size * 1e9 for name, row in rows.items()}
  return {
      "ns/element": nanoseconds,
      "numpy / ours": ratio(nanoseconds["numpy"], nanoseconds["ours"]),
      "ours / limit": ratio(nanoseconds["ours"], min(nanoseconds["updates"], nanoseconds["prefetched updates"])),
      "same_permutation_and_state": same(size),
  }


def timed(function) -> dict[str, float]:
  start = time.perf_counter()
  function()
  return {"seconds": time.perf_counter() - start}


def draw_partners(size: int) -> np.ndarray:
  """Returns for the elements from the last to the first a random one that is not after it, uint32[size]."""
  rng, partners = np.random.default_rng(SEED), np.empty(size, np.uint32)
  for first in range(0, size, _PIECE):
    count = min(_PIECE, size - first)
    partners[first : first + count] = rng.random(count) * np.arange(size - first, size - first - count, -1)
  return partners


@numba.njit
def update(array, partners):
  """Changes array[partner] for each partner."""
  for step in range(len(partners)):
    array[np.uint64(partners[step])] ^= np.int32(step)


@numba.njit
def update_prefetched(array, partners):
  """Does what `update` does."""
  last = len(partners) - 1
  for step in range(len(partners)):
    prefetch(array, np.uint64(partners[min(step + _AHEAD, last)]))
    array[np.uint64(partners[step])] ^= np.int32(step)


def same(size: int) -> bool:
  """Whether both shuffles give the same array and leave the same generator state."""
  arrays, states = [], []
  for shuffle in (lambda array, rng: rng.shuffle(array), utils.shuffle):
    array, rng = np.arange(size, dtype=np.int32), np.random.RandomState(SEED)
    shuffle(array, rng)
    arrays.append(array)
    states.append(rng.get_state())
  (_, key, position, *_), (_, other_key, other_position, *_) = states
  return bool(np.array_equal(*arrays) and np.array_equal(key, other_key) and position == other_position)


if __name__ == "__main__":
  main()
