# SPDX-License-Identifier: Apache-2.0
"""A row of many chunks, which the JAX implementation computes in several groups: borders at, before and after them."""

import numpy as np
import pytest

from kda_support import CHUNKED, LONG_RUN, TOKENS, assert_close, documents_of_ids, draw, row_of, run, separate

LENGTH = 330
SETTINGS = {"chunk_size": 16}  # 21 chunks of two heads: groups of seven
PER_TOKEN = ("o", *(f"d{name}" for name in TOKENS))


def run_long(arrays, segment_ids, implementation):
  return run(arrays, implementation, settings=SETTINGS, segment_ids=segment_ids)


LAYOUTS = {
    "one document": [(1, LENGTH)],
    "borders at groups": [(1, 112), (2, 112), (3, LENGTH)],
    "borders beside groups": [(1, 111), (2, 2), (3, 110), (4, 1), (5, LENGTH)],
    "padding for a group": [(1, 100), (0, 130), (2, LENGTH)],
    "the same document on": [(1, 5), (2, 250), (0, 80), (2, LENGTH)],
    "a document for each token": [(n % 2 + 1, 1) for n in range(LENGTH)],
}


@pytest.mark.parametrize("implementation", CHUNKED)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_documents_equal_separate_ones(layout, implementation):
  arrays = draw(1, rows=1, length=LENGTH, strength=0.05)  # states live on for many chunks
  segment_ids = row_of(*layout, length=LENGTH)[None]
  expected = separate(arrays, documents_of_ids(segment_ids))
  assert_close(run_long(arrays, segment_ids, implementation), expected)


@pytest.mark.parametrize("implementation", CHUNKED)
@pytest.mark.parametrize("start, length", [(3, 40), (15, 2), (0, 16)])
def test_a_document_has_the_same_bits_in_every_chunk(start, length, implementation):
  """The same offset in its chunk, in the first and the last group and over the borders of groups."""
  document = draw(2, rows=1, length=length)
  found = []
  for chunk in range(18) if LONG_RUN else (0, 1, 6, 13, 17):
    begin = 16 * chunk + start
    arrays = draw(chunk, rows=1, length=LENGTH)
    arrays |= {name: np.zeros_like(arrays[name]) for name in ("initial_state", "dfinal")}
    for name in (*TOKENS, "do"):
      arrays[name][:, begin : begin + length] = document[name]
    segment_ids = row_of((1, begin), (2, length), (3, LENGTH), length=LENGTH)[None]
    results = run_long(arrays, segment_ids, implementation)
    found.append({name: results[name][:, begin : begin + length].copy().view(np.uint32) for name in PER_TOKEN})
    for name in PER_TOKEN:
      np.testing.assert_array_equal(found[-1][name], found[0][name], err_msg=f"{name}, chunk {chunk}")
