# SPDX-License-Identifier: Apache-2.0
"""What the entry takes besides float32 and int32 arrays under jit, and the transformations that it stands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_support import (
    COTANGENTS,
    IMPLEMENTATIONS,
    QUICK,
    TOKENS,
    assert_close,
    documents_of_offsets,
    draw,
    error_of,
    ids_of,
    recurrence,
    results_and_gradients,
    run,
    separate,
)
from maxtext.kernels.kda import chunk_kda
from support import one_sentence

LENGTH, OFFSETS = 140, (0, 70, 100, 130)  # beyond int8 and, negated, beyond uint8
SMALL = {"chunk_size": 16}

every = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def with_offsets(arrays, offsets, implementation):
  inputs = {name: value for name, value in arrays.items() if name not in COTANGENTS}
  return chunk_kda(**inputs, cu_seqlens=offsets, output_final_state=True, implementation=implementation, **SMALL)


@functools.cache
def row_with_states():
  """A row with a state for each segment, and its results."""
  arrays = draw(1, rows=1, length=LENGTH, states=len(OFFSETS) - 1)
  return arrays, separate(arrays, documents_of_offsets(np.array(OFFSETS)))


def assert_results(found, expected):
  for value, name in zip(found, ("o", "final_state"), strict=True):
    assert error_of(value, expected[name]) < 1e-5, name


@every
def test_numpy_arrays_without_jit(implementation):
  arrays, expected = row_with_states()
  assert_results(with_offsets(arrays, np.array(OFFSETS), implementation), expected)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "uint32"])
def test_integer_types_of_offsets(dtype):
  arrays, expected = row_with_states()
  assert_results(with_offsets(arrays, np.array(OFFSETS, dtype), "reference"), expected)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32"])
def test_offsets_that_fall_are_refused_in_any_integer_type(dtype):
  arrays, _ = row_with_states()
  with pytest.raises(ValueError, match=r"cu_seqlens is \[0, 100, 70, 120\]") as caught:
    with_offsets(arrays, np.array([0, 100, 70, 120], dtype), "reference")
  one_sentence(caught.value)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32"])
def test_integer_types_of_ids(dtype):
  arrays = draw(2)
  segment_ids = 60 * ids_of(50, 60)
  expected = run(arrays, "reference", segment_ids=segment_ids)
  found = run(arrays, "reference", segment_ids=segment_ids.astype(dtype))
  for name, value in expected.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)


@every
def test_rows_mapped_and_rematerialized(implementation):
  """jax.vmap over rows and jax.checkpoint give the results and gradients of the recurrence."""
  arrays, segment_ids = draw(3, length=40), ids_of(5, 20)[:, :40]

  def gradients_of_row(arrays, segment_ids):
    one = {name: value[None] for name, value in arrays.items()}
    inputs = {name: one[name] for name in one if name not in COTANGENTS}

    @jax.checkpoint
    def results(inputs):
      segments = {"segment_ids": segment_ids[None], "output_final_state": True}
      return chunk_kda(**inputs, **segments, **SMALL, implementation=implementation)

    (o, final_state), pull = jax.vjp(results, inputs)
    (gradients,) = pull((one["do"], one["dfinal"]))
    named = {"o": o, "final_state": final_state} | {f"d{name}": value for name, value in gradients.items()}
    return {name: value[0] for name, value in named.items()}

  found = jax.jit(jax.vmap(gradients_of_row), compiler_options=QUICK)(arrays, segment_ids)
  assert_close({name: np.asarray(value) for name, value in found.items()}, recurrence(arrays, segment_ids=segment_ids))


@every
def test_results_and_gradients_have_the_inputs_types(implementation):
  """o as v, gradients as their inputs, states float32; nothing is computed."""
  arrays = draw(4, length=40)
  types = dict.fromkeys((*TOKENS, "initial_state"), "float32")
  types |= {"q": "bfloat16", "v": "float16", "beta": "bfloat16", "initial_state": "bfloat16"}
  shapes = {name: jax.ShapeDtypeStruct(x.shape, types.get(name, "float32")) for name, x in arrays.items()}
  found = jax.eval_shape(lambda arrays: results_and_gradients(arrays, {}, implementation), shapes)
  expected = {"o": types["v"], "final_state": "float32"} | {f"d{name}": dtype for name, dtype in types.items()}
  assert {name: str(value.dtype) for name, value in found.items()} == expected
  assert all(found[f"d{name}"].shape == arrays[name].shape for name in types)


@every
def test_float64(implementation):
  """Float64 inputs are computed in float64 everywhere."""
  arrays, segment_ids = draw(3, length=40), ids_of(5, 20)[:, :40]
  with jax.enable_x64(True):
    wide = {name: np.asarray(value, np.float64) for name, value in arrays.items()}
    found = run(wide, implementation, quick=True, settings=SMALL, segment_ids=segment_ids)
  assert_close(found, recurrence(arrays, segment_ids=segment_ids), results=1e-14, gradients=1e-14)


def test_only_what_is_asked_for_has_a_gradient():
  """The gradient of a loss on the final state alone, by the state alone."""
  arrays = draw(5, length=40)
  tokens = {name: jnp.asarray(arrays[name]) for name in TOKENS}

  def loss(state, implementation):
    _, final_state = chunk_kda(
        **tokens, initial_state=state, output_final_state=True, implementation=implementation, **SMALL
    )
    return jnp.sum(final_state * arrays["dfinal"])

  expected = recurrence(arrays | {"do": np.zeros_like(arrays["do"])})["dinitial_state"]
  for implementation in IMPLEMENTATIONS:
    by_state = jax.jit(jax.grad(functools.partial(loss, implementation=implementation)), compiler_options=QUICK)
    assert error_of(by_state(arrays["initial_state"]), expected) < 1e-5, implementation
