# SPDX-License-Identifier: Apache-2.0
"""The custom VJP that the chunked implementations share."""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp

from maxtext.kernels.kda import _prepare
from maxtext.kernels.kda._types import Inputs, Options, Prepared, Segments

Forward = Callable[[Prepared, Segments, jax.Array | None, Options], tuple[jax.Array, jax.Array | None, Any]]
Backward = Callable[
    [Prepared, Segments, Any, jax.Array | None, jax.Array, jax.Array | None, Options],
    tuple[Prepared, jax.Array | None],
]
Implementation = Callable[[Inputs, Segments, jax.Array | None, Options], tuple[jax.Array, jax.Array | None]]

# For rematerialization, the states between chunks have the name that the release gives to what its attention kernels
# keep: a policy that saves it has both the output and the states, and runs no forward kernel again.
RESIDUALS = "context"


def differentiable(forward: Forward, backward: Backward) -> Implementation:
  """Makes an implementation of a forward and a backward pass over prepared arrays.

  What is kept between the passes is the caller's arrays and the residuals of `forward`; norm, gate and casts are computed
  again, so that no float32 copy of a bfloat16 input is kept.

  Args:
    forward: (prepared, segments, initial_state, options) -> (o [B, T', H, V], final_state, residuals), T' the padded T.
    backward: (prepared, segments, residuals, initial_state, do, dfinal, options) -> (gradients of prepared, of
      initial_state).

  Returns:
    (inputs, segments, initial_state, options) -> (o [B, T, H, V] in v's dtype, final_state float32 or wider, or None).
  """

  def run_forward(inputs, segments, initial_state, options):
    prepared = _prepare.prepare(inputs, segments, options)
    padded = _prepare.pad_segments(segments, options.chunk_size)
    if initial_state is not None:
      initial_state = initial_state.astype(prepared.v.dtype)
    o, final_state, residuals = forward(prepared, padded, initial_state, options)
    return (o[:, : inputs.v.shape[1]].astype(inputs.v.dtype), final_state), residuals

  @functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
  def run(inputs, segments, initial_state, options):
    return run_forward(inputs, segments, initial_state, options)[0]

  def run_fwd(inputs, segments, initial_state, options):
    outputs, residuals = run_forward(inputs, segments, initial_state, options)
    residuals = jax.tree.map(lambda x: checkpoint_name(x, RESIDUALS), residuals)
    return outputs, (inputs, segments, initial_state, residuals)

  def run_bwd(options, saved, cotangents):
    inputs, segments, initial_state, residuals = saved
    do, dfinal = cotangents
    prepared, pull = jax.vjp(lambda x: _prepare.prepare(x, segments, options), inputs)
    dtype = prepared.v.dtype
    if segments.real is not None:
      do = jnp.where(segments.real[:, :, None, None], do, jnp.zeros((), do.dtype))
    do = _prepare.pad_tokens(do.astype(dtype), options.chunk_size)
    padded = _prepare.pad_segments(segments, options.chunk_size)
    state = None if initial_state is None else initial_state.astype(dtype)
    dprepared, dinitial = backward(prepared, padded, residuals, state, do, dfinal, options)
    (dinputs,) = pull(dprepared)
    if initial_state is not None and dinitial is not None:
      dinitial = dinitial.astype(initial_state.dtype)
    return dinputs, None, dinitial

  run.defvjp(run_fwd, run_bwd)
  return run
