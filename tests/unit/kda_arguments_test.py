# SPDX-License-Identifier: Apache-2.0
"""What the entry refuses when it is traced: one sentence, with the shapes in it.

tokamax and tops have refusals of their own, see kda_external_test.py and kda_tops_test.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_support import IMPLEMENTATIONS
from maxtext.kernels.kda import chunk_kda
from support import one_sentence

BATCH, LENGTH, HEADS, KEYS, VALUES = 2, 40, 3, 8, 5
Q = (BATCH, LENGTH, HEADS, KEYS)
SHAPES = {"q": Q, "k": Q, "v": (*Q[:3], VALUES), "g": Q, "beta": Q[:3]}
KEYWORDS = ("output_final_state", "use_gate_in_kernel", "safe_gate", "lower_bound", "chunk_size", "implementation")


def array(*shape, dtype=jnp.float32):
  return jax.ShapeDtypeStruct(shape, dtype)


def trace(**changes):
  """The shapes of the results, without computing them."""
  arguments = {name: array(*shape) for name, shape in SHAPES.items()} | changes
  settings = {name: value for name, value in arguments.items() if name in KEYWORDS}
  arrays = {name: value for name, value in arguments.items() if name not in KEYWORDS}
  return jax.eval_shape(functools.partial(chunk_kda, **settings), **arrays)


def refusal(**changes) -> str:
  with pytest.raises(ValueError) as caught:
    trace(**changes)
  return one_sentence(caught.value)


ids, gate = array(BATCH, LENGTH, dtype=jnp.int32), {"use_gate_in_kernel": True}
one_row = {name: array(1, *shape[1:]) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_shapes_and_dtypes_of_results(implementation):
  o, final_state = trace(implementation=implementation, segment_ids=ids)
  assert (o.shape, o.dtype, final_state) == ((BATCH, LENGTH, HEADS, VALUES), jnp.float32, None)
  low = {name: array(*shape, dtype=jnp.bfloat16) for name, shape in SHAPES.items()}
  o, final_state = trace(**low, implementation=implementation, output_final_state=True)
  assert (o.dtype, final_state.shape, final_state.dtype) == (jnp.bfloat16, (BATCH, HEADS, KEYS, VALUES), jnp.float32)
  settings = {"cu_seqlens": array(5, dtype=jnp.int32), "output_final_state": True, "implementation": implementation}
  o, final_state = trace(**one_row, **settings)
  assert (o.shape, final_state.shape) == ((1, LENGTH, HEADS, VALUES), (4, HEADS, KEYS, VALUES))


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"q": array(LENGTH, HEADS, KEYS)}, ["q has shape (40, 3, 8)", "[B, T, H, K]"]),
        ({"q": array(BATCH, 0, HEADS, KEYS)}, ["q has shape (2, 0, 3, 8)"]),
        ({"k": array(BATCH, LENGTH, HEADS, 7)}, ["k has shape (2, 40, 3, 7)", "(2, 40, 3, 8)"]),
        ({"k": array(BATCH, LENGTH, 1, KEYS)}, ["k has shape (2, 40, 1, 8)", "(2, 40, 3, 8)"]),
        ({"v": array(BATCH, 41, HEADS, VALUES)}, ["v has shape (2, 41, 3, 5)", "(2, 40, 3)"]),
        ({"v": array(BATCH, LENGTH, HEADS)}, ["v has shape (2, 40, 3)", "(2, 40, 3)"]),
        ({"v": array(BATCH, LENGTH, HEADS, 0)}, ["v has shape (2, 40, 3, 0)", "V > 0"]),
        ({"g": array(BATCH, LENGTH, HEADS)}, ["g has shape (2, 40, 3)", "(2, 40, 3, 8)"]),
        ({"beta": array(*Q)}, ["beta has shape (2, 40, 3, 8)", "[B, T, H] = (2, 40, 3)"]),
        ({"A_log": array(4), **gate}, ["A_log has shape (4,)", "[H] = (3,)"]),
        ({"A_log": array(3), "dt_bias": array(3, 8), **gate}, ["dt_bias has shape (3, 8)", "[H * K] = (24,)"]),
        ({"initial_state": array(2, 3, 5, 8)}, ["initial_state has shape (2, 3, 5, 8)", "[B, H, K, V] = (2, 3, 8, 5)"]),
        ({"segment_ids": array(1, 40, dtype=jnp.int32)}, ["segment_ids has shape (1, 40)", "[B, T] = (2, 40)"]),
        ({"segment_ids": array(80, dtype=jnp.int32)}, ["segment_ids has shape (80,)", "[B, T] = (2, 40)"]),
        ({"q": array(*Q, dtype=jnp.int32)}, ["q has dtype int32"]),
        ({"segment_ids": array(2, 40)}, ["segment_ids has dtype float32"]),
        ({"initial_state": array(2, 3, 8, 5, dtype=jnp.int32)}, ["initial_state has dtype int32"]),
    ],
)
def test_shapes_and_dtypes_that_do_not_fit(changes, parts):
  message = refusal(**changes)
  assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"cu_seqlens": array(3, dtype=jnp.int32)}, ["cu_seqlens", "q of shape (2, 40, 3, 8)", "B = 1"]),
        (
            {**one_row, "segment_ids": array(1, 40, dtype=jnp.int32), "cu_seqlens": array(3, dtype=jnp.int32)},
            ["segment_ids of shape (1, 40) and cu_seqlens of shape (3,) are both given"],
        ),
        ({**one_row, "cu_seqlens": array(1, dtype=jnp.int32)}, ["cu_seqlens has shape (1,)", "[N + 1]"]),
        ({**one_row, "cu_seqlens": array(1, 3, dtype=jnp.int32)}, ["cu_seqlens has shape (1, 3)"]),
        ({**one_row, "cu_seqlens": array(3)}, ["cu_seqlens has dtype float32"]),
        (
            {**one_row, "cu_seqlens": array(4, dtype=jnp.int32), "initial_state": array(1, 3, 8, 5)},
            ["initial_state has shape (1, 3, 8, 5)", "[N, H, K, V] = (3, 3, 8, 5)"],
        ),
    ],
)
def test_segments_that_do_not_fit(changes, parts):
  message = refusal(**changes)
  assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "changes, parts",
    [
        ({"A_log": array(HEADS)}, ["A_log is given and use_gate_in_kernel is False"]),
        ({"dt_bias": array(HEADS * KEYS)}, ["dt_bias is given and use_gate_in_kernel is False"]),
        (gate, ["use_gate_in_kernel is True and A_log is None", "[H] = (3,)"]),
        ({**gate, "A_log": array(HEADS), "safe_gate": True}, ["safe_gate is True and lower_bound is None"]),
        ({**gate, "A_log": array(HEADS), "safe_gate": True, "lower_bound": 0.0}, ["lower_bound is 0.0"]),
        ({**gate, "A_log": array(HEADS), "safe_gate": True, "lower_bound": 5.0}, ["lower_bound is 5.0"]),
        ({**gate, "A_log": array(HEADS), "safe_gate": True, "lower_bound": -np.inf}, ["lower_bound is -inf"]),
        ({**gate, "A_log": array(HEADS), "safe_gate": True, "lower_bound": np.nan}, ["lower_bound is nan"]),
        ({**gate, "A_log": array(HEADS), "lower_bound": -5.0}, ["lower_bound is -5.0 and safe_gate is False"]),
        ({"chunk_size": 48}, ["chunk_size is 48", "power of two"]),
        ({"chunk_size": 8}, ["chunk_size is 8"]),
        ({"chunk_size": 64.0}, ["chunk_size is 64.0"]),
        ({"implementation": "fast"}, ["implementation is 'fast'", "auto, pallas, xla, tokamax, tops, reference"]),
    ],
)
def test_settings_that_contradict_each_other(changes, parts):
  message = refusal(**changes)
  assert all(part in message for part in parts), message


@pytest.mark.parametrize("offsets", [[0, 30, 20, 40], [1, 20, 40], [0, 20, 41], [0, -1, 40], [-2, 40]], ids=str)
@pytest.mark.parametrize("kind", [np.array, jnp.array])
def test_k7_known_offsets_that_are_none(offsets, kind):
  cu_seqlens = kind(offsets)  # known: not made while tracing
  arrays = {name: jnp.zeros(value.shape) for name, value in one_row.items()}
  with pytest.raises(ValueError) as caught:
    jax.eval_shape(lambda: chunk_kda(**arrays, cu_seqlens=cu_seqlens))
  message = one_sentence(caught.value)
  assert str(offsets) in message and "T = 40" in message
