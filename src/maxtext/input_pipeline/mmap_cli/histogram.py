# SPDX-License-Identifier: Apache-2.0
"""Distribution of lengths in a few megabytes, however many there are. NumPy only."""

from __future__ import annotations

import numpy as np

_EXACT = 4096  # lengths below have a bin of their own
_BITS = 12
_HALF = 2048  # bins for each doubling beyond: 0.05 % wide


class LengthHistogram:
  """Counts of lengths: exact below 4,096, in bins of 0.05 % beyond.

  Attributes:
    count, total: lengths added, and their sum.
    shortest, longest: exact; None while nothing was added.
  """

  def __init__(self):
    self._counts = np.zeros(_EXACT, np.int64)
    self._sums = np.zeros(_EXACT, np.int64)
    self.count = self.total = 0
    self.shortest: int | None = None
    self.longest: int | None = None

  def add(self, lengths: np.ndarray) -> None:
    """Adds lengths, integers of 0 or more, [n]."""
    if not len(lengths):
      return
    lengths = np.asarray(lengths, np.int64)
    bins = _bins(lengths)
    size = max(len(self._counts), int(bins.max()) + 1)
    for name, weights in (("_counts", None), ("_sums", lengths)):
      found = np.bincount(bins, weights, size).astype(np.int64)
      old = getattr(self, name)
      found[: len(old)] += old
      setattr(self, name, found)
    self.count += len(lengths)
    self.total += int(lengths.sum())
    low, high = int(lengths.min()), int(lengths.max())
    self.shortest = low if self.shortest is None else min(self.shortest, low)
    self.longest = high if self.longest is None else max(self.longest, high)

  def quantile(self, share: float) -> int | None:
    """Returns the length that at least `share` of all do not exceed, the lower end of its bin."""
    if not self.count:
      return None
    place = int(np.searchsorted(np.cumsum(self._counts), share * self.count))
    return int(_length(np.array([min(place, len(self._counts) - 1)]))[0])

  def buckets(self, edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the lengths, and the tokens of them, that begin in [edges[i], edges[i + 1]), both int64[len(edges) - 1]."""
    used = np.flatnonzero(self._counts)
    place = np.searchsorted(edges, _length(used), "right") - 1
    inside = (place >= 0) & (place < len(edges) - 1)
    counts, tokens = (
        np.bincount(place[inside], values[used][inside], len(edges) - 1).astype(np.int64)
        for values in (self._counts, self._sums)
    )
    return counts, tokens


def _bins(lengths: np.ndarray) -> np.ndarray:
  """Returns the bin of each length."""
  shift = np.maximum(np.frexp(lengths.astype(np.float64))[1] - _BITS, 0)
  return np.where(lengths < _EXACT, lengths, _EXACT + (shift - 1) * _HALF + (lengths >> shift) - _HALF)


def _length(bins: np.ndarray) -> np.ndarray:
  """Returns the least length of each bin."""
  shift = np.maximum((bins - _EXACT) // _HALF + 1, 0)
  return np.where(bins < _EXACT, bins, ((bins - _EXACT) % _HALF + _HALF) << shift)
