# SPDX-License-Identifier: Apache-2.0
"""Cases that have broken implementations of Kimi Delta Attention: K1, K3, K4, K7 for every one of ours.

K2 is in kda_convolution_test.py, K5 in kda_bitwise_test.py, K6 and K8 in kda_gate_test.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_support import (
    IMPLEMENTATIONS,
    LENGTH,
    LONG,
    LONG_RUN,
    ROWS,
    SEGMENTS,
    assert_close,
    documents_of_ids,
    documents_of_offsets,
    draw,
    ids_of,
    offsets_of,
    recurrence,
    row_of,
    run,
    separate,
    without_states,
)
from maxtext.kernels.kda import chunk_kda
from maxtext.layers.attention_kda import segment_ids_to_cu_seqlens

every = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
# Offsets without states become the segments that ids give, before an implementation sees them.
without_states_too = pytest.mark.parametrize("implementation", IMPLEMENTATIONS if LONG_RUN else ("reference",))


def assert_separate(arrays, segment_ids, implementation):
  assert_close(run(arrays, implementation, segment_ids=segment_ids), separate(arrays, documents_of_ids(segment_ids)))


@functools.partial(jax.jit, static_argnames="implementation")
def tiny(inputs, segment_ids, implementation):
  settings = {"scale": 1.0, "output_final_state": True, "chunk_size": 16, "implementation": implementation}
  return chunk_kda(*inputs, segment_ids=segment_ids, **settings)


@every
def test_k1_tiny_golden(implementation):
  q = [[1, 0], [0, 1], [1, 1], [0, 1]]
  k = [[1, 0], [0.6, 0.8], [1, 0], [0, 1]]
  v = [[2], [1], [3], [4]]
  decay = [[0.5, 0.5], [0.5, 0.25], [0.9, 0.9], [0.8, 0.5]]
  beta = [1, 0.5, 1, 0.5]
  inputs = [np.array(x, np.float32)[None, :, None] for x in (q, k, v, np.log(decay), beta)]
  for ids, outputs in (([1, 1, 1, 1], [2, 0.16, 3.144, 2.036]), ([1, 1, 2, 2], [2, 0.16, 3, 2])):
    o, final_state = tiny(inputs, np.array([ids], np.int32), implementation)
    np.testing.assert_allclose(o[0, :, 0, 0], outputs, rtol=1e-5)
    np.testing.assert_allclose(final_state[0, 0, :, 0], [2.4, outputs[-1]], rtol=1e-5)


@every
@pytest.mark.parametrize(
    "lengths", [(63, 65), (1, 127), (64, 64), (62, 1, 1, 64), (10, 100, 18), (5, 7, 9, 11, 13, 19)], ids=str
)
def test_k3_border_inside_a_chunk(lengths, implementation):
  """Gates near a lower bound of -5 everywhere."""
  arrays = draw(3)
  arrays["g"] = np.maximum(-5 + 0.01 * arrays["q"], -5).astype(np.float32)
  assert_separate(arrays, ids_of(*lengths), implementation)


DECAYS = {
    "all -5": np.full(LENGTH, -5.0),
    "all -3": np.full(LENGTH, -3.0),
    "one token of -2661": np.where(np.arange(LENGTH) == 30, -2661, -0.01),
    "a ramp": np.interp(np.arange(LENGTH), [0, 63], [-0.001, -20]),
    "some of minus infinity": np.where(np.arange(LENGTH) % 20 < 2, -np.inf, -0.01),
}


@every
@pytest.mark.parametrize("decay", DECAYS)
def test_k4_strong_decay(decay, implementation):
  """One row of 64 tokens, and one of all; gradients too within 1e-5."""
  arrays = draw(4)
  arrays["g"] = np.broadcast_to(DECAYS[decay][:, None, None], arrays["g"].shape).astype(np.float32)
  segment_ids = np.stack([row_of((1, 64)), row_of((1, LENGTH))])
  found = run(arrays, implementation, segment_ids=segment_ids)
  assert_close(found, separate(arrays, documents_of_ids(segment_ids)), gradients=1e-5)


LAYOUTS = {
    "gaps in ids": [row_of((1, 20), (3, 50), (900, 60)), row_of((7, 130))],
    "padding first": [row_of((0, 5), (1, 125)), row_of((0, 70), (1, 10), (2, 50))],
    "padding last": [row_of((1, 60), (2, 5)), row_of((1, 129))],
    "padding in the middle": [row_of((1, 30), (0, 80), (2, 20)), row_of((1, 30), (0, 1), (1, 99))],
    "all padding": [row_of(), row_of((1, 130))],
    "a row ends with the id that the next begins with": [row_of((1, 50), (2, 80)), row_of((2, 30), (1, 100))],
    "ids fall": [row_of((3, 50), (2, 1), (1, 79)), row_of((2, 64), (1, 66))],
}


@every
@pytest.mark.parametrize("layout", LAYOUTS)
def test_k7_odd_segment_ids(layout, implementation):
  assert_separate(draw(7), np.stack(LAYOUTS[layout]), implementation)


@every
def test_k7_nothing_but_padding(implementation):
  arrays = draw(7)
  found = run(arrays, implementation, segment_ids=np.zeros((ROWS, LENGTH), np.int32))
  for name, value in {"final_state": arrays["initial_state"], "dinitial_state": arrays["dfinal"]}.items():
    np.testing.assert_array_equal(found.pop(name), value, err_msg=name)
  assert all(not value.any() for value in found.values())


@every
@pytest.mark.parametrize("length", [1, 63, 65])
def test_k7_odd_lengths(length, implementation):
  arrays = draw(length, rows=1, length=length)
  assert_close(run(arrays, implementation, quick=True), recurrence(arrays))


# Of rows of 256 tokens: empty segments, ends below T, no token at all.
OFFSETS = [(0, 0, 64), (0, 128, 128, 256), (0, 100, 100, 200), (0, 0), (0, 0, 0, 1, 1, 2, 255)]


@every
def test_k7_odd_offsets(implementation):
  arrays = draw(7, rows=1, length=LONG, states=SEGMENTS)
  for offsets in (offsets_of(*case) for case in OFFSETS):
    found = run(arrays, implementation, quick=True, cu_seqlens=offsets)
    assert_close(found, separate(arrays, documents_of_offsets(offsets)))


@without_states_too
def test_k7_odd_offsets_without_states(implementation):
  arrays = without_states(draw(7, rows=1, length=LONG))
  for offsets in (offsets_of(*case) for case in OFFSETS):
    found = run(arrays, implementation, quick=True, cu_seqlens=offsets)
    assert_close(found, separate(arrays, documents_of_offsets(offsets)))


# Known only on the device: -1 marks more segments than places.
NO_OFFSETS = {
    "too many": (0, 100, 200, 256, 256, 256, -1),
    "falling": (0, 128, 100, 256),
    "not from 0": (5, 128, 256),
    "beyond T": (0, 128, 257),
}


@every
@pytest.mark.parametrize("offsets", NO_OFFSETS.values(), ids=NO_OFFSETS.keys())
def test_k7_offsets_that_hold_no_segments_give_nan(offsets, implementation):
  arrays = draw(7, rows=1, length=LONG, states=SEGMENTS)
  found = run(arrays, implementation, quick=True, cu_seqlens=offsets_of(*offsets))
  assert np.isnan(found["o"]).all() and np.isnan(found["final_state"]).all()


@without_states_too
@pytest.mark.parametrize("offsets", NO_OFFSETS.values(), ids=NO_OFFSETS.keys())
def test_k7_offsets_that_hold_no_segments_give_nan_without_states(offsets, implementation):
  arrays = without_states(draw(7, rows=1, length=LONG))
  assert np.isnan(run(arrays, implementation, quick=True, cu_seqlens=offsets_of(*offsets))["o"]).all()


@without_states_too
def test_k7_more_segments_than_the_maximum_are_never_joined(implementation):
  arrays = without_states(draw(7, rows=1, length=LONG))
  for documents, finite in ((SEGMENTS, True), (SEGMENTS + 1, False)):
    ids = row_of(*((n + 1, 30) for n in range(documents)), length=LONG)
    cu_seqlens = np.asarray(segment_ids_to_cu_seqlens(jnp.asarray(ids)[None], SEGMENTS))
    o = run(arrays, implementation, quick=True, cu_seqlens=cu_seqlens)["o"]
    assert np.isfinite(o).all() == finite and np.isnan(o).all() != finite
