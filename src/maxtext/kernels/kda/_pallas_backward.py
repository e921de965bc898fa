# SPDX-License-Identifier: Apache-2.0
"""The backward TPU kernel: walks the chunks of a head from the last to the first and carries the state's gradient."""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from maxtext.kernels.kda import _pallas_chunk as chunk


def _kernel(
    slots, sums, relation, q, k, v, g, beta, segment, states, do, dfinal, dq, dk, dv, dg, dbeta, dinitial, carried, *,
    scale,
):  # fmt: skip
  row, step, steps = pl.program_id(0), pl.program_id(2), pl.num_programs(2)
  at = row * steps + steps - 1 - step

  @pl.when((step == 0) | (slots[at] != slots[jnp.minimum(at + 1, (row + 1) * steps - 1)]))
  def _():
    carried[...] = dfinal[...]

  rows = chunk.Rows(q[...], k[...], v[...], g[...], beta[...], segment[...])
  dq[...], dk[...], dv[...], dg[...], dbeta[...], dstate = chunk.backward(
      rows, states[...], do[...], carried[...], sums[...], relation[...], scale
  )
  carried[...] = dstate
  dinitial[...] = dstate


def backward(rows, states, do, dfinal, slots, *, scale: float, chunk_size: int, interpret: bool):
  """Gradients of the forward kernel.

  Args:
    rows: chunk.Rows, as given to the forward kernel.
    states: [B, H, N, V, K], before each chunk.
    do: [B, H, T, V].
    dfinal: [S, H, V, K].
    slots: int32 [B * N].
    scale: of the outputs.
    chunk_size: C.
    interpret: run without a TPU.

  Returns:
    Gradients of q, k, v, g and beta in the shapes of `rows`, and of the state table, as `dfinal`.
  """
  batch, heads, length, keys = rows.k.shape
  values, chunks = rows.v.shape[-1], length // chunk_size
  dtype = rows.k.dtype
  tables = chunk.tables(chunk_size, dtype)
  last = chunks - 1

  def whole(x):
    return pl.BlockSpec(x.shape, lambda b, h, n, slots: (0, 0))

  def tokens(width):
    return pl.BlockSpec((None, None, chunk_size, width), lambda b, h, n, slots: (b, h, last - n, 0))

  beta = pl.BlockSpec((None, None, None, 1, chunk_size), lambda b, h, n, slots: (b, h, last - n, 0, 0))
  segment = pl.BlockSpec((None, None, 1, chunk_size), lambda b, h, n, slots: (b, last - n, 0, 0))
  entry = pl.BlockSpec((None, None, values, keys), lambda b, h, n, slots: (slots[b * chunks + last - n], h, 0, 0))
  state = pl.BlockSpec((None, None, None, values, keys), lambda b, h, n, slots: (b, h, last - n, 0, 0))
  inputs = [*(tokens(width) for width in (keys, keys, values, keys)), beta]
  return pl.pallas_call(
      functools.partial(_kernel, scale=scale),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=1,
          grid=(batch, heads, chunks),
          in_specs=[*(whole(x) for x in tables), *inputs, segment, state, tokens(values), entry],
          out_specs=[*inputs, entry],
          scratch_shapes=[pltpu.VMEM((values, keys), dtype)],
      ),
      out_shape=[jax.ShapeDtypeStruct(x.shape, dtype) for x in (*rows[:5], dfinal)],
      compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
      interpret=interpret,
      name="kda_backward",
  )(slots, *tables, *rows, states, do, dfinal)
