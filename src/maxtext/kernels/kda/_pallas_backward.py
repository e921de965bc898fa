# SPDX-License-Identifier: Apache-2.0
"""The backward TPU kernel: walks the chunks of a head from the last to the first and carries the state's gradient."""

import functools

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from maxtext.kernels.kda import _pallas_chunk as chunk
from maxtext.kernels.kda._pallas_grid import Grid


def _kernel(
    slots, sums, relation, q, k, v, g, beta, states, do, dfinal, dq, dk, dv, dg, dbeta, dinitial, carried, *,
    scale,
):  # fmt: skip
  step = pl.program_id(2)
  ends = step == 0
  if slots is not None:
    after = (pl.program_id(0) + 1) * pl.num_programs(2) - step
    ends |= slots[after - 1] != slots[jnp.minimum(after, pl.num_programs(0) * pl.num_programs(2) - 1)]

  @pl.when(ends)
  def _():
    carried[...] = dfinal[...]

  group = q.shape[0]
  shared = [jnp.broadcast_to(x[...], (group, *x.shape)) for x in (sums, relation)]
  heads = jax.vmap(functools.partial(chunk.backward, scale=scale))
  dq[...], dk[...], dv[...], dg[...], dbeta[...], dstate = heads(
      q[...], k[...], v[...], g[...], beta[...], states[...], do[...], carried[...], *shared
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
    slots: int32 [B * N] or None, as given to the forward kernel.
    scale: of the outputs.
    chunk_size: C.
    interpret: run without a TPU.

  Returns:
    Gradients of q, k, v, g and beta in the shapes of `rows`, and of the state table, as `dfinal`.
  """
  grid = Grid(rows, chunk_size, slots, backwards=True)
  tables = chunk.tables(chunk_size, rows.k.dtype)
  tokens = list(zip(rows, [grid.keys, grid.keys, grid.values, grid.keys, grid.beta], strict=True))
  return grid.run(
      functools.partial(_kernel, scale=scale),
      inputs=[
          *((x, grid.whole(x)) for x in tables),
          *tokens,
          (states, grid.state),
          (do, grid.values),
          (dfinal, grid.entry),
      ],
      outputs=[*((x.shape, block) for x, block in tokens), (dfinal.shape, grid.entry)],
      name="kda_backward",
      interpret=interpret,
  )
