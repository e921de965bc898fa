# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention, token by token: the definition that the other implementations are held to.

Per head, with state S [K, V], log decay g_t <= 0 per key channel and beta_t in (0, 1):

    S  <- diag(exp(g_t)) S
    S  <- S + beta_t k_t (v_t - S^T k_t)^T
    o_t = scale * S^T q_t

Source: Kimi Linear (arXiv 2510.26692), section 3. One scan over the tokens; JAX differentiates it. Float64 under
`jax.enable_x64` with float64 inputs.
"""

import jax
from jax import lax
import jax.numpy as jnp

from maxtext.kernels.kda import _prepare
from maxtext.kernels.kda._types import Inputs, Options, Segments

_HIGHEST = lax.Precision.HIGHEST


def kda(
    inputs: Inputs, segments: Segments, initial_state: jax.Array | None, options: Options
) -> tuple[jax.Array, jax.Array | None]:
  """The recurrence over [B, T] tokens.

  Args:
    inputs: the caller's arrays.
    segments: where documents lie; with `slots`, B is 1 and the state table has one entry for each segment.
    initial_state: [B, H, K, V] ([S, H, K, V] with slots), or None for zeros.
    options: scale, norm, gate.

  Returns:
    o [B, T, H, V] in v's dtype; the final states in initial_state's shape (float32, or float64 with float64 inputs), or
    None unless options.output_final_state.
  """
  prepared = _prepare.prepare(inputs, segments, options)
  segments = _prepare.pad_segments(segments, options.chunk_size)
  batch, length, heads, width = prepared.k.shape
  if segments.slots is not None:
    assert initial_state is not None, "a state table needs its initial states"
  if initial_state is None:
    initial_state = jnp.zeros((batch, heads, width, prepared.v.shape[-1]))
  table = initial_state.astype(prepared.v.dtype)
  starts, slots = _starts(segments, batch, length, options.chunk_size)

  def step(carry, token):
    state, finals = carry
    q, k, v, g, beta, start, slot = token
    fresh = table[slot] if segments.slots is not None else jnp.zeros_like(state)
    state = jnp.where(start[:, None, None, None], fresh, state) * jnp.exp(g)[..., None]
    error = v - jnp.einsum("bhkv,bhk->bhv", state, k, precision=_HIGHEST)
    state = state + (beta[..., None] * k)[..., None] * error[:, :, None, :]
    if segments.slots is not None:
      finals = finals.at[slot].set(state)
    return (state, finals), options.scale * jnp.einsum("bhkv,bhk->bhv", state, q, precision=_HIGHEST)

  first = table[slots[:, 0]] if segments.slots is not None else table
  tokens = [jnp.moveaxis(x, 1, 0) for x in (*prepared, starts, slots)]
  (state, finals), o = lax.scan(step, (first, table), tokens)
  o = jnp.moveaxis(o, 0, 1)
  if segments.real is not None:  # zero already: so that no gradient that is not finite comes back from there
    o = jnp.where(segments.real[:, :, None, None], o, jnp.zeros((), o.dtype))
  o = o[:, : inputs.v.shape[1]].astype(inputs.v.dtype)
  if not options.output_final_state:
    return o, None
  return o, finals if segments.slots is not None else state


def _starts(segments: Segments, batch: int, length: int, chunk_size: int) -> tuple[jax.Array, jax.Array]:
  """For each token, whether the state is dropped before it, and its entry of the state table: bool, int32 [B, T]."""
  if segments.ids is None:
    return jnp.zeros((batch, length), bool), jnp.zeros((batch, length), jnp.int32)
  starts = jnp.pad(segments.ids[:, 1:] != segments.ids[:, :-1], ((0, 0), (1, 0)))
  if segments.slots is None:
    return starts, jnp.zeros((batch, length), jnp.int32)
  return starts, jnp.repeat(segments.slots, chunk_size, axis=1)
