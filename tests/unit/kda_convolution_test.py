# SPDX-License-Identifier: Apache-2.0
"""ShortConvolution: hand-made rows (K2), documents apart, gradients against a plain sum, one pass."""

from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.layers import _short_convolution
from maxtext.layers.attention_kda import ShortConvolution
from support import one_sentence

B, T, D, TAPS = 2, 11, 3, 4


def convolution(channels=1, taps=(1, 10, 100, 1000), **keywords) -> ShortConvolution:
  layer = ShortConvolution(channels, len(taps), rngs=nnx.Rngs(0), **keywords)
  layer.kernel[...] = jnp.broadcast_to(jnp.asarray(taps, jnp.float32)[:, None], layer.kernel.shape)
  return layer


def convolve(values, ids=None) -> list[float]:
  x = jnp.asarray(values, jnp.float32)[None, :, None]
  return convolution()(x, None if ids is None else jnp.asarray([ids], jnp.int32))[0, :, 0].tolist()


def test_k2_short_convolution():
  assert convolve([1, 2, 3, 4, 5], [1, 1, 2, 2, 2]) == [1000, 2100, 3000, 4300, 5430]
  assert convolve([1, 2, 3, 4, 5]) == convolve([1, 2, 3, 4, 5], [1] * 5) == [1000, 2100, 3210, 4321, 5432]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_k2_fewer_tokens_than_taps(length):
  expected = [1000, 2100, 3210][:length]
  assert convolve([1, 2, 3][:length]) == convolve([1, 2, 3][:length], [7] * length) == expected


def test_k2_padding_reaches_no_real_token():
  assert convolve([9, 1, 2, 9, 9, 3, 9], [0, 1, 1, 0, 0, 2, 0]) == [0, 1000, 2100, 0, 0, 3000, 0]
  assert convolve([1, 9, 2, 3], [1, 0, 1, 1]) == [1000, 0, 2000, 3200], "an id that comes again is another document"


def test_rows_do_not_see_each_other():
  x = jnp.arange(1.0, 7).reshape(2, 3, 1)
  ids = jnp.ones((2, 3), jnp.int32)
  np.testing.assert_array_equal(convolution()(x, ids)[1, :, 0], [4000, 5400, 6540])


def pairs_of(ids) -> np.ndarray:
  """Which token reads which at each distance, [TAPS, B, T, T]: the two lie in one unbroken run of a positive id."""
  position = np.arange(ids.shape[1])
  distance = position[:, None] - position[None, :]
  run = np.cumsum(np.diff(ids, axis=1, prepend=ids[:, :1]) != 0, axis=1)
  together = (run[:, :, None] == run[:, None, :]) & (ids != 0)[:, :, None]
  return np.stack([(distance == d) & together for d in range(TAPS)]).astype(np.float32)


def plain_sum(x, kernel, pairs):
  return jnp.einsum("dbts,bsc,dc->btc", pairs, x, kernel[::-1], precision="highest")


def with_gradients(function):
  def run(x, kernel, dy, *rest):
    o, pull = jax.vjp(lambda x, kernel: function(x, kernel, *rest), x, kernel)
    return o, *pull(dy)

  return jax.jit(run)


ours, theirs = with_gradients(_short_convolution.short_convolution), with_gradients(plain_sum)


def example(seed):
  rng = np.random.default_rng(seed)
  return [rng.normal(size=shape).astype(np.float32) for shape in ((B, T, D), (TAPS, D), (B, T, D))]


@given(st.lists(st.integers(0, 3), min_size=B * T, max_size=B * T), st.integers(0, 2**16))
def test_outputs_and_gradients_are_a_plain_sums(ids, seed):
  ids = np.asarray(ids, np.int32).reshape(B, T)
  arrays = example(seed)
  for found, expected in zip(ours(*arrays, ids), theirs(*arrays, pairs_of(ids)), strict=True):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)  # float32 sums of at most B * T terms


def test_without_ids_rows_are_one_segment():
  arrays = example(1)
  for found, expected in zip(ours(*arrays), theirs(*arrays, pairs_of(np.ones((B, T)))), strict=True):
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-5)


def test_several_axes_of_channels_are_the_flat_ones():
  rng = np.random.default_rng(2)
  x = jnp.asarray(rng.normal(size=(B, T, 2, D)), jnp.float32)
  layer = ShortConvolution((2, D), rngs=nnx.Rngs(0))
  flat = ShortConvolution(2 * D, rngs=nnx.Rngs(0))
  flat.kernel[...] = layer.kernel[...].reshape(4, 2 * D)
  np.testing.assert_array_equal(layer(x).reshape(B, T, 2 * D), flat(x.reshape(B, T, 2 * D)))


def test_bfloat16_is_summed_in_float32():
  x = jnp.asarray(np.random.default_rng(3).normal(size=(B, T, D)), jnp.bfloat16)
  layer = ShortConvolution(D, rngs=nnx.Rngs(0))
  exact = layer(x.astype(jnp.float32))
  assert layer(x).dtype == jnp.bfloat16
  np.testing.assert_array_equal(layer(x), exact.astype(jnp.bfloat16))
  wide = ShortConvolution(D, dtype=jnp.float32, rngs=nnx.Rngs(0))
  np.testing.assert_array_equal(wide(x), exact)


def test_forward_is_one_pass_without_copies_per_tap():
  """Beside the output, at most one padded copy of x is held: XLA reads the shifted copies in place."""
  x, kernel = jax.ShapeDtypeStruct((1, 1024, 64), jnp.float32), jax.ShapeDtypeStruct((TAPS, 64), jnp.float32)
  ids = jax.ShapeDtypeStruct((1, 1024), jnp.int32)
  compiled = jax.jit(_short_convolution.short_convolution).lower(x, kernel, ids).compile()
  entry = compiled.as_text().split("ENTRY")[1]
  assert sum(" = f32[1,1024,64]" in line and "parameter(" not in line for line in entry.splitlines()) == 1
  assert compiled.memory_analysis().temp_size_in_bytes < 1.25 * 4 * 1024 * 64


def test_what_is_kept_for_the_backward_pass_is_x():
  x, kernel = jnp.ones((1, 64, 8)), jnp.ones((TAPS, 8))
  ids = jnp.ones((1, 64), jnp.int32)
  _, pull = jax.vjp(lambda x, kernel: _short_convolution.short_convolution(x, kernel, ids), x, kernel)
  kept = [leaf for leaf in jax.tree.leaves(pull) if getattr(leaf, "shape", ()) == x.shape]
  assert len(kept) == 1


@pytest.mark.parametrize("x, ids", [((2, 3), None), ((1, 3, 2), None), ((1, 3, 1), (1, 4))])
def test_shapes_that_do_not_fit_are_refused(x, ids):
  with pytest.raises(ValueError, match=r"has shape \(") as caught:
    convolution()(jnp.ones(x), None if ids is None else jnp.ones(ids, jnp.int32))
  one_sentence(caught.value)
