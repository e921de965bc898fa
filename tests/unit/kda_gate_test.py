# SPDX-License-Identifier: Apache-2.0
"""The gate (K6) and the norm of q and k (K8), by themselves and through every implementation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_support import IMPLEMENTATIONS, KEYS, QUICK, assert_close, draw, ids_of, recurrence, run
from maxtext.kernels.kda import _prepare, chunk_kda

every = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)

A_LOG = np.array([100, 0, 1], np.float32)
ARGUMENTS = np.array([[-1, 0, 1], [0, 2, 0], [-1, -1, -1]], np.float32)  # x + bias, for each head
BIAS = np.array([[0.5, -0.25, 0.5], [0.5, 0.5, 0.5], [-1, 0, 2]], np.float32)
SAFE = np.array([[0, -2.5, -5], [-2.5, -4.404, -2.5], [-0.3095, -0.3095, -0.3095]])
SOFTPLUS = np.array([[-0.6931, -2.1269, -0.6931], [-0.8515, -0.8515, -0.8515]])  # of the last two heads


def assert_rounds_to(found, expected):
  """To four digits, as the cases are written."""
  np.testing.assert_allclose(found, expected, rtol=0, atol=6e-5 * max(1, np.abs(expected).max()))


def values_and_gradients(gate):
  """A gate's values, and the gradients of their sum."""
  total = lambda *inputs: (lambda value: (jnp.sum(value), value))(gate(*inputs))
  (_, values), gradients = jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(
      ARGUMENTS - BIAS, A_LOG, BIAS.ravel()
  )
  return values, gradients


def assert_gradients_of_a_saturated_gate(gradients):
  """Zero at the ends, and finite everywhere, also where the rate is e^100."""
  dg, dA_log, ddt_bias = map(np.asarray, gradients)
  assert all(np.isfinite(x).all() for x in (dg, dA_log, ddt_bias))
  assert dg.reshape(3, 3)[0, 0] == dg.reshape(3, 3)[0, 2] == dA_log[0] == 0


def test_k6_saturated_gate():
  values, gradients = values_and_gradients(lambda g, A_log, bias: _prepare.log_decay(g, A_log, bias, "sigmoid", -5.0))
  assert_rounds_to(values, SAFE)
  assert_gradients_of_a_saturated_gate(gradients)
  # Ordinary heads: d/dx of -5 sigmoid(rate x), by hand.
  rate, x = np.exp(A_LOG[1:, None]), ARGUMENTS[1:]
  slope = 1 / (1 + np.exp(-rate * x)) / (1 + np.exp(rate * x))
  np.testing.assert_allclose(gradients[0][1:], -5 * rate * slope, rtol=1e-5)
  np.testing.assert_allclose(gradients[1][1:], (-5 * rate * x * slope).sum(1), rtol=1e-5)
  np.testing.assert_allclose(gradients[2].reshape(3, 3), gradients[0], rtol=1e-6)


def test_k6_softplus_gate():
  values, gradients = values_and_gradients(lambda g, A_log, bias: _prepare.log_decay(g, A_log, bias, "softplus", None))
  assert_rounds_to(values[1:], SOFTPLUS)
  assert np.isfinite(values).all() and (np.asarray(values) <= 0).all()
  assert all(np.isfinite(x).all() for x in gradients)
  rate, x = np.exp(A_LOG[1:, None]), ARGUMENTS[1:]
  np.testing.assert_allclose(gradients[0][1:], -rate / (1 + np.exp(-x)), rtol=1e-5)
  np.testing.assert_allclose(gradients[1][1:], (-rate * np.log1p(np.exp(x))).sum(1), rtol=1e-5)


def decay_of_a_state(g, A_log, bias, implementation, settings):
  """exp(gate): what one token without a write leaves of a state of ones."""
  token = jnp.zeros((1, 1, 3, 3))
  _, final_state = chunk_kda(
      token, token, token[..., :1], g[None, None], token[..., 0], A_log=A_log, dt_bias=bias, use_gate_in_kernel=True,
      initial_state=jnp.ones((1, 3, 3, 1)), output_final_state=True, chunk_size=16, implementation=implementation,
      **settings,
  )  # fmt: skip
  return final_state[0, ..., 0]


@every
def test_k6_gates_through_the_entry(implementation):
  bounded = {"safe_gate": True, "lower_bound": -5.0}
  safe = functools.partial(decay_of_a_state, implementation=implementation, settings=bounded)
  values, gradients = jax.jit(lambda: values_and_gradients(safe), compiler_options=QUICK)()
  assert_rounds_to(np.log(values), SAFE)
  assert_gradients_of_a_saturated_gate(gradients)
  softplus = functools.partial(decay_of_a_state, implementation=implementation, settings={})
  values, gradients = jax.jit(lambda: values_and_gradients(softplus), compiler_options=QUICK)()
  assert_rounds_to(np.log(values[1:]), SOFTPLUS)
  assert all(np.isfinite(x).all() for x in gradients)


@every
def test_gate_and_norm_over_borders_equal_the_recurrence(implementation):
  """Gradients of A_log and dt_bias sum over documents; rates from e^-2 to e^3."""
  arrays = draw(6)
  arrays["g"] = 2 * arrays["q"]
  arrays |= {"A_log": np.array([-2, 3], np.float32), "dt_bias": np.linspace(-1, 1, 2 * KEYS, dtype=np.float32)}
  settings = {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -5.0, "use_qk_l2norm_in_kernel": True}
  segment_ids = ids_of(5, 60, 1, 40)
  found = run(arrays, implementation, quick=True, settings=settings, segment_ids=segment_ids)
  assert_close(found, recurrence(arrays, settings, segment_ids=segment_ids))


def test_k8_norm():
  np.testing.assert_allclose(_prepare.l2_normalize(jnp.full(128, 1e-4)), 0.0662, atol=5e-5)
  zero, pull = jax.vjp(_prepare.l2_normalize, jnp.zeros(128))
  assert not zero.any()
  np.testing.assert_allclose(pull(jnp.ones(128))[0], 1e3, rtol=1e-6)  # 1 / sqrt(1e-6)


@every
def test_k8_norm_through_the_entry(implementation):
  """A token that reads what it wrote gives the product of its normalised q and k, times v."""

  def output(q, k):
    token = jnp.ones((1, 1, 1, 1))
    return chunk_kda(
        q, k, token, jnp.zeros_like(q), token[..., 0], scale=1.0, use_qk_l2norm_in_kernel=True, chunk_size=16,
        implementation=implementation,
    )[0].sum()  # fmt: skip

  both = jax.jit(jax.value_and_grad(output, argnums=(0, 1)), compiler_options=QUICK)
  small = jnp.full((1, 1, 1, 128), 1e-4)
  o, _ = both(small, small)
  np.testing.assert_allclose(o, 128 * 0.0662**2, rtol=2e-3)
  np.testing.assert_allclose(o, 1.28 / 2.28, rtol=1e-5)  # 128e-8 / (128e-8 + 1e-6)
  o, gradients = both(0 * small, 0 * small)
  assert o == 0 and all(np.isfinite(gradient).all() for gradient in gradients)
