# SPDX-License-Identifier: Apache-2.0
"""The TPU kernels, in Pallas' interpret mode: outputs, final states and all gradients against the float64 recurrence.

float32 is held to 1e-5 of an array's largest entry for outputs and states, and to 1e-4 for gradients. Layouts, decays and
states are data, so that one compilation serves most tests.
"""

import functools

from hypothesis import given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
import numpy as np
import pytest

from kda_support import QUICK
from maxtext.kernels.kda import chunk_kda
from support import one_sentence

ROWS, LENGTH, HEADS, KEYS, VALUES = 2, 130, 2, 16, 8
NAMES = ("o", "final state", "dq", "dk", "dv", "dg", "dbeta", "dinitial")


def draw(seed: int, rows: int = ROWS, length: int = LENGTH, states: int = ROWS) -> dict[str, np.ndarray]:
  """Inputs, and the cotangents of outputs and states."""
  random = np.random.default_rng(seed)
  normal = lambda *shape: random.normal(size=shape).astype(np.float32)
  q, k = normal(rows, length, HEADS, KEYS), normal(rows, length, HEADS, KEYS)
  return {
      "q": q,
      "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
      "v": normal(rows, length, HEADS, VALUES),
      "g": -np.exp(normal(rows, length, HEADS, KEYS)),
      "beta": 1 / (1 + np.exp(-normal(rows, length, HEADS))),
      "initial_state": normal(states, HEADS, KEYS, VALUES),
      "do": normal(rows, length, HEADS, VALUES),
      "dfinal": normal(states, HEADS, KEYS, VALUES),
  }


@functools.partial(jax.jit, static_argnames="implementation", compiler_options=QUICK)
def run(arrays, segments, implementation):
  """Outputs, final states and gradients, in the order of NAMES."""
  inputs = {name: value for name, value in arrays.items() if name not in ("do", "dfinal")}

  def outputs(inputs):
    return chunk_kda(**inputs, **segments, output_final_state=True, implementation=implementation)

  (o, final), pull = jax.vjp(outputs, inputs)
  (gradients,) = pull((arrays["do"].astype(o.dtype), arrays["dfinal"].astype(final.dtype)))
  return o, final, *(gradients[name] for name in ("q", "k", "v", "g", "beta", "initial_state"))


def kernels(arrays, **segments):
  return run(arrays, segments, "pallas")


def recurrence(arrays, **segments):
  with jax.enable_x64(True):
    wide = {name: np.asarray(value, np.float64) for name, value in arrays.items()}
    return run(wide, segments, "reference")


def assert_close(got, expected):
  for name, one, other in zip(NAMES, got, expected, strict=True):
    one, other = np.asarray(one, np.float64), np.asarray(other)
    tolerance = 1e-5 if name in ("o", "final state") else 1e-4
    assert np.isfinite(one).all(), name
    assert np.abs(one - other).max() <= tolerance * max(np.abs(other).max(), 1e-6), name


def ids_of(*lengths: int) -> np.ndarray:
  """Ids 1, 2, ... of documents, then padding, in every row."""
  ids = np.repeat(np.arange(1, len(lengths) + 1, dtype=np.int32), lengths)
  return np.tile(np.pad(ids, (0, LENGTH - len(ids))), (ROWS, 1))


layout = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 70)), min_size=1, max_size=20)


@settings(max_examples=12)
@given(layouts=st.tuples(layout, layout), strength=st.sampled_from([1e-3, 1.0, 30.0]), seed=st.integers(0, 2**32 - 1))
def test_packed_rows_with_padding_anywhere(layouts, strength, seed):
  arrays = draw(seed)
  arrays["g"] *= np.float32(strength)
  segment_ids = np.zeros((ROWS, LENGTH), np.int32)
  for row, runs in enumerate(layouts):
    ids = np.repeat([id for id, _ in runs], [length for _, length in runs])[:LENGTH]
    segment_ids[row, : len(ids)] = ids
  assert_close(kernels(arrays, segment_ids=segment_ids), recurrence(arrays, segment_ids=segment_ids))


@pytest.mark.parametrize(
    "lengths", [(63, 65), (1, 127), (64, 64), (62, 1, 1, 64), (10, 100, 18), (5, 7, 9, 11, 13, 19)], ids=str
)
def test_borders_inside_a_chunk_near_the_gate_bound(lengths):
  arrays = draw(1)
  arrays["g"] = -5 + np.float32(0.01) * arrays["q"]
  segment_ids = ids_of(*lengths)
  assert_close(kernels(arrays, segment_ids=segment_ids), recurrence(arrays, segment_ids=segment_ids))


SPIKE = np.where(np.arange(LENGTH) == 30, -2661, -0.01)
DECAYS = {"-5": -5.0, "-3": -3.0, "one token": SPIKE, "ramp": np.linspace(-0.001, -20, LENGTH)}


@pytest.mark.parametrize("decay", DECAYS)
def test_strong_decay(decay):
  arrays = draw(2)
  arrays["g"] = np.broadcast_to(np.reshape(DECAYS[decay], (-1, 1, 1)), arrays["g"].shape).astype(np.float32)
  segment_ids = ids_of(LENGTH)
  assert_close(kernels(arrays, segment_ids=segment_ids), recurrence(arrays, segment_ids=segment_ids))


def test_a_document_does_not_depend_on_its_neighbours_in_any_bit():
  segment_ids, other = ids_of(20, 75, 35), draw(4)
  inside = segment_ids[0] == 2
  changed = dict(draw(3))
  for name in ("q", "k", "v", "g", "beta", "do"):
    changed[name] = np.where(inside.reshape(-1, *[1] * (changed[name].ndim - 2)), changed[name], other[name])
  changed["initial_state"], changed["dfinal"] = other["initial_state"], other["dfinal"]
  more_borders = np.where(inside, segment_ids, 10 + np.arange(LENGTH, dtype=np.int32) // 7)
  one, two = kernels(draw(3), segment_ids=segment_ids), kernels(changed, segment_ids=more_borders)
  for name, a, b in zip(NAMES, one, two, strict=True):
    if name not in ("final state", "dinitial"):
      np.testing.assert_array_equal(a[:, inside], b[:, inside], err_msg=name)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_later_tokens_change_no_bit(name):
  arrays = draw(5)
  arrays["do"][:, 68:], arrays["dfinal"] = 0, 0 * arrays["dfinal"]
  changed = dict(arrays)
  changed[name] = np.concatenate([arrays[name][:, :68], draw(6)[name][:, 68:]], axis=1)
  segment_ids = ids_of(LENGTH)
  one, two = kernels(arrays, segment_ids=segment_ids), kernels(changed, segment_ids=segment_ids)
  for label, a, b in zip(NAMES, one, two, strict=True):
    if label != "final state":
      np.testing.assert_array_equal(a[:, :68], b[:, :68], err_msg=label)


def test_states_of_every_segment():
  arrays = draw(7, rows=1, states=6)
  cu_seqlens = np.array([0, 0, 64, 70, 70, 129, 129], np.int32)  # the last token is padding
  got, expected = kernels(arrays, cu_seqlens=cu_seqlens), recurrence(arrays, cu_seqlens=cu_seqlens)
  assert_close(got, expected)
  np.testing.assert_array_equal(np.asarray(got[1])[[0, 3, 5]], arrays["initial_state"][[0, 3, 5]])


def test_unpacked_bfloat16_with_gate_and_norm():
  """Inputs are rounded, arithmetic is not: outputs are off by their own rounding, 2^-8 at most, and gradients also by
  that of the cotangent: 1 % of the largest entry."""
  arrays = {name: value for name, value in draw(8, rows=1, length=65).items() if name in ("q", "k", "v", "g", "beta")}
  arrays = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), arrays)
  arrays |= {"A_log": np.array([0.0, 1.0], np.float32), "dt_bias": np.linspace(-1, 1, HEADS * KEYS, dtype=np.float32)}

  def loss(arrays, implementation):
    o, final = chunk_kda(
        **arrays, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, safe_gate=True, lower_bound=-5.0, scale=0.5,
        implementation=implementation,
    )  # fmt: skip
    assert final is None and o.dtype == arrays["v"].dtype
    return jnp.sum(jnp.sin(o.astype(jnp.promote_types(o.dtype, jnp.float32)))), o

  both = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
  got, o = both(arrays, "pallas")
  with jax.enable_x64(True):
    expected, expected_o = both({name: np.asarray(value, np.float64) for name, value in arrays.items()}, "reference")
  np.testing.assert_allclose(np.asarray(o, np.float64), expected_o, rtol=2**-8, atol=2e-4 * np.abs(expected_o).max())
  for name, gradient in jax.tree.map(np.asarray, expected).items():
    assert np.abs(np.asarray(got[name], np.float64) - gradient).max() <= 0.01 * np.abs(gradient).max(), name


def test_float64_on_a_tpu_is_refused():
  device = AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
  mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
  with jax.enable_x64(True), jax.sharding.use_abstract_mesh(mesh), pytest.raises(ValueError) as caught:
    x = jax.ShapeDtypeStruct((1, 16, 1, 8), jnp.float64)
    beta = jax.ShapeDtypeStruct((1, 16, 1), jnp.float64)
    jax.eval_shape(functools.partial(chunk_kda, implementation="pallas"), x, x, x, x, beta)
  assert "float64" in one_sentence(caught.value)
