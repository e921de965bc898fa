# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention on TPU: a pair of Pallas kernels, one program for each chunk of a few heads.

Packed rows cost what unpacked rows cost: a border between segments is a decay of zero (`_prepare.mark_borders`), and a
chunk may hold several. Without a TPU the kernels run in Pallas' interpret mode. Kept for the backward
pass: the state before each chunk, [B, H, N, V, K] in float32; all else is computed again.
"""

import jax
import jax.numpy as jnp

from maxtext.kernels.kda import _pallas_backward, _pallas_chunk, _pallas_forward, _platform, _prepare, _vjp
from maxtext.kernels.kda._types import Options, Prepared, Segments


def _heads_first(x: jax.Array) -> jax.Array:
  return jnp.swapaxes(x, 1, 2)


def _settings(prepared: Prepared, options: Options) -> dict:
  interpret, dtype = _platform.platform() != "tpu", prepared.v.dtype
  if not interpret and dtype != jnp.float32:
    raise ValueError(
        f"v of shape {prepared.v.shape} asks for arithmetic in {dtype}; implementation 'pallas' computes in float32 on a"
        " TPU: cast the inputs, or choose 'xla'."
    )
  return {"scale": options.scale, "chunk_size": options.chunk_size, "interpret": interpret}


def _rows(prepared: Prepared, segments: Segments, chunk_size: int) -> _pallas_chunk.Rows:
  """The kernels' layout: heads before tokens, and what a token has only one of along the lanes."""
  batch, length, heads, _ = prepared.k.shape
  # Sums are products with a triangle of ones there, where minus infinity times zero would be NaN.
  marked = prepared._replace(g=jnp.maximum(_prepare.mark_borders(prepared.g, segments), _prepare.BORDER))
  q, k, v, g, beta = (_heads_first(x) for x in marked)
  return _pallas_chunk.Rows(q, k, v, g, beta.reshape(batch, heads, length // chunk_size, 1, chunk_size))


def _keep_unused(table: jax.Array, before: jax.Array, segments: Segments) -> jax.Array:
  """The state table that a kernel wrote, with the entries that no chunk belongs to, not written, as they were before."""
  if segments.slots is None:
    return table
  used = jnp.zeros(table.shape[0], bool).at[segments.slots.reshape(-1)].set(True)
  return jnp.where(used[:, None, None, None], table, before)


def _forward(prepared: Prepared, segments: Segments, initial_state: jax.Array | None, options: Options):
  settings = _settings(prepared, options)
  batch, length, heads, keys = prepared.k.shape
  if initial_state is None:
    initial = jnp.zeros((batch, heads, prepared.v.shape[-1], keys), prepared.v.dtype)
  else:
    initial = jnp.swapaxes(initial_state, 2, 3)
  slots = None if segments.slots is None else segments.slots.reshape(-1)
  rows = _rows(prepared, segments, options.chunk_size)
  o, states, final = _pallas_forward.forward(rows, initial, slots, **settings)
  final = jnp.swapaxes(_keep_unused(final, initial, segments), 2, 3) if options.output_final_state else None
  return _heads_first(o), final, states


def _backward(
    prepared: Prepared,
    segments: Segments,
    states: jax.Array,
    initial_state: jax.Array | None,
    do: jax.Array,
    dfinal: jax.Array | None,
    options: Options,
):
  settings = _settings(prepared, options)
  batch, length, heads, keys = prepared.k.shape
  entries = batch if initial_state is None else initial_state.shape[0]
  if dfinal is None:
    dfinal = jnp.zeros((entries, heads, prepared.v.shape[-1], keys), prepared.v.dtype)
  else:
    dfinal = jnp.swapaxes(dfinal, 2, 3).astype(prepared.v.dtype)
  slots = None if segments.slots is None else segments.slots.reshape(-1)
  rows = _rows(prepared, segments, options.chunk_size)
  *gradients, dinitial = _pallas_backward.backward(rows, states, _heads_first(do), dfinal, slots, **settings)
  dq, dk, dv, dg, dbeta = gradients
  dbeta = dbeta.reshape(batch, heads, length)
  dinitial = None if initial_state is None else jnp.swapaxes(_keep_unused(dinitial, dfinal, segments), 2, 3)
  return Prepared(*(_heads_first(x) for x in (dq, dk, dv, dg, dbeta))), dinitial


kda = _vjp.differentiable(_forward, _backward)
