# SPDX-License-Identifier: Apache-2.0
"""Compiled loops over orders: comparing two, and counting the segments of samples. NumPy and Numba only.

None checks an index: the arrays must have passed `_mmap_index_cache.check_ranges`.
"""

from __future__ import annotations

from maxtext.input_pipeline._mmap_index_kernels import _jit as jit


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
