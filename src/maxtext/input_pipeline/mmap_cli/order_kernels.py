# SPDX-License-Identifier: Apache-2.0
"""Compiled loops over orders: comparing two, and counting the segments of samples. NumPy and Numba only.

None checks an index: the arrays must have passed `_mmap_index_cache.check_ranges`.
"""

from __future__ import annotations

from maxtext.input_pipeline._mmap_index_kernels import jit


@jit
def first_other_sample(documents_a, samples_a, draws_a, documents_b, samples_b, draws_b, first, last):
  """Returns the first position in [first, last) at which two orders give other tokens of a dataset, or -1.

  Args:
    documents, samples, draws: document index int32[D], sample index [samples + 1, 2] and shuffle index of each order.
  """
  for position in range(first, last):
    a, b = draws_a[position], draws_b[position]
    entry_a, entry_b = samples_a[a, 0], samples_b[b, 0]
    more = samples_a[a + 1, 0] - entry_a
    if (
        samples_a[a, 1] != samples_b[b, 1]
        or samples_a[a + 1, 1] != samples_b[b + 1, 1]
        or samples_b[b + 1, 0] - entry_b != more
    ):
      return position
    for k in range(more + 1):
      if documents_a[entry_a + k] != documents_b[entry_b + k]:
        return position
  return -1


@jit
def count_segments(sizes, ends, documents, samples, draws, first, last, length, distances, histogram, most, merged):
  """Counts the segments of samples, as if each document that has tokens ended with EOD and held no other.

  Args:
    sizes: int32[N], tokens of each sequence.
    ends: bool[N], whether a sequence ends a document.
    documents, samples, draws: the order; its positions first to last - 1 are counted.
    length: tokens of a sample's inputs.
    distances: int64[C], each a merge setting: a document begins a segment only if it begins more than this after the
      beginning of the last segment.
    histogram: int64[C, bins], added to: samples by number of segments, the last bin for that many and more.
    most: int64[C], updated: segments of the sample with most.
    merged: int64[C], added to: beginnings of documents that begin no segment.

  Returns:
    EOD tokens among the inputs, and beginnings of documents within samples.
  """
  eods, beginnings = 0, 0
  settings, bins = distances.shape[0], histogram.shape[1]
  for position in range(first, last):
    row = draws[position]
    entry, end = samples[row, 0], samples[row + 1, 0]
    for c in range(settings):
      place = sizes[documents[entry]] - samples[row, 1]
      k, segments, start = entry, 1, 0
      while place <= length and k <= end:
        if place > 0 and sizes[documents[k]] > 0 and ends[documents[k]]:
          if c == 0:
            eods += 1
          if place < length:
            if c == 0:
              beginnings += 1
            if place - start > distances[c]:
              segments += 1
              start = place
            else:
              merged[c] += 1
        k += 1
        if k <= end:
          place += sizes[documents[k]]
      histogram[c, min(segments, bins - 1)] += 1
      most[c] = max(most[c], segments)
  return eods, beginnings
