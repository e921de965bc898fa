# SPDX-License-Identifier: Apache-2.0
"""The forward TPU kernel: walks the chunks of a head and carries the state in VMEM."""

import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from maxtext.kernels.kda import _pallas_chunk as chunk


def _kernel(slots, sums, relation, q, k, v, g, beta, segment, initial, o, states, final, carried, *, scale):
  row, n = pl.program_id(0), pl.program_id(2)
  at = row * pl.num_programs(2) + n

  @pl.when((n == 0) | (slots[at] != slots[jnp.maximum(at - 1, 0)]))
  def _():
    carried[...] = initial[...]

  state = carried[...]
  states[...] = state
  rows = chunk.Rows(q[...], k[...], v[...], g[...], beta[...], segment[...])
  o[...], state = chunk.forward(rows, state, sums[...], relation[...], scale)
  carried[...] = state
  final[...] = state


def forward(rows, initial, slots, *, scale: float, chunk_size: int, interpret: bool):
  """Outputs, chunk states and final states.

  Args:
    rows: chunk.Rows of q, k, g [B, H, T, K], v [B, H, T, V], beta [B, H, N, 1, C], segment [B, N, 1, C].
    initial: [S, H, V, K], the state table.
    slots: int32 [B * N], the entry of the table that each chunk belongs to.
    scale: of the outputs.
    chunk_size: C.
    interpret: run without a TPU.

  Returns:
    o [B, H, T, V]; the states before each chunk [B, H, N, V, K]; the final states as `initial`.
  """
  batch, heads, length, keys = rows.k.shape
  values, chunks = rows.v.shape[-1], length // chunk_size
  dtype = rows.k.dtype
  tables = chunk.tables(chunk_size, dtype)

  def whole(x):
    return pl.BlockSpec(x.shape, lambda b, h, n, slots: (0, 0))

  def tokens(width):
    return pl.BlockSpec((None, None, chunk_size, width), lambda b, h, n, slots: (b, h, n, 0))

  beta = pl.BlockSpec((None, None, None, 1, chunk_size), lambda b, h, n, slots: (b, h, n, 0, 0))
  segment = pl.BlockSpec((None, None, 1, chunk_size), lambda b, h, n, slots: (b, n, 0, 0))
  entry = pl.BlockSpec((None, None, values, keys), lambda b, h, n, slots: (slots[b * chunks + n], h, 0, 0))
  state = pl.BlockSpec((None, None, None, values, keys), lambda b, h, n, slots: (b, h, n, 0, 0))
  return pl.pallas_call(
      functools.partial(_kernel, scale=scale),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=1,
          grid=(batch, heads, chunks),
          in_specs=[
              *(whole(x) for x in tables),
              *(tokens(width) for width in (keys, keys, values, keys)),
              beta,
              segment,
              entry,
          ],
          out_specs=[tokens(values), state, entry],
          scratch_shapes=[pltpu.VMEM((values, keys), dtype)],
      ),
      out_shape=[
          jax.ShapeDtypeStruct((batch, heads, length, values), dtype),
          jax.ShapeDtypeStruct((batch, heads, chunks, values, keys), dtype),
          jax.ShapeDtypeStruct(initial.shape, dtype),
      ],
      compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
      interpret=interpret,
      name="kda_forward",
  )(slots, *tables, *rows, initial)
