# SPDX-License-Identifier: Apache-2.0
"""Packed rows give what each document gives alone: outputs, final states and all gradients, for every implementation.

The truth is the float64 recurrence over each document in a row of its own, without segment ids; see `kda_support`.
"""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from kda_support import (
    IMPLEMENTATIONS,
    LENGTH,
    LONG,
    LONG_RUN,
    ROWS,
    SEGMENTS,
    TOKENS,
    assert_close,
    documents_of_ids,
    documents_of_offsets,
    draw,
    row_of,
    run,
    separate,
)

PACKINGS = 200 if LONG_RUN else 20
STRENGTHS = (1e-3, 1.0, 30.0)

seeds = st.integers(0, 2**32 - 1)
# Runs of an id, where equal neighbours are one document and 0 is padding; short ones are as likely as long ones.
tokens = st.one_of(st.integers(1, 4), st.integers(1, LENGTH))
rows = st.lists(st.tuples(st.integers(0, 3), tokens), max_size=20).map(lambda runs: row_of(*runs))
packings = st.tuples(*[rows] * ROWS).map(np.stack)
offsets = st.lists(st.integers(0, LONG), min_size=SEGMENTS, max_size=SEGMENTS).map(lambda ends: (0, *sorted(ends)))


def draw_uneven(seed: int, **sizes):
  """Rows whose decay is weak in some documents, and wipes out the state in others."""
  arrays = draw(seed, **sizes)
  random = np.random.default_rng(seed)
  length = arrays["g"].shape[1]
  strength = np.repeat(random.choice(STRENGTHS, size=-(-length // 10)), 10)[:length]
  arrays["g"] = (arrays["g"] * strength[:, None, None]).astype(np.float32)
  return arrays


def fill(x: np.ndarray, tokens: np.ndarray, value: float) -> np.ndarray:
  """x [B, T, ...] with a value at the given tokens, bool [B, T]."""
  return np.where(tokens.reshape(*tokens.shape, *[1] * (x.ndim - 2)), np.float32(value), x)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=PACKINGS)
@given(segment_ids=packings, seed=seeds)
def test_packed_documents_equal_separate_ones(implementation, segment_ids, seed):
  """Whatever stands at padding, even NaN and in gradients of outputs, has no influence; zeros come out there."""
  arrays = draw_uneven(seed)
  padding = segment_ids == 0
  dirty = {name: fill(arrays[name], padding, np.nan) for name in (*TOKENS, "do")}
  found = run(arrays | dirty, implementation, segment_ids=segment_ids)
  assert_close(found, separate(arrays, documents_of_ids(segment_ids)))
  for name in ("o", *(f"d{name}" for name in TOKENS)):
    assert not found[name][padding].any(), name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=PACKINGS)
@given(ends=offsets, seed=seeds)
def test_segments_with_states_of_their_own_equal_separate_ones(implementation, ends, seed):
  """cu_seqlens with empty segments, and tokens after the last offset, which are padding."""
  arrays = draw_uneven(seed, rows=1, length=LONG, states=SEGMENTS)
  cu_seqlens = np.array(ends, np.int32)
  found = run(arrays, implementation, quick=True, cu_seqlens=cu_seqlens)
  assert_close(found, separate(arrays, documents_of_offsets(cu_seqlens)))
