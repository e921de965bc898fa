# SPDX-License-Identifier: Apache-2.0
"""The forward TPU kernel: walks the chunks of a head and carries the state in VMEM."""

import functools

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from maxtext.kernels.kda import _pallas_chunk as chunk
from maxtext.kernels.kda._pallas_grid import Grid


def _kernel(slots, sums, relation, q, k, v, g, beta, initial, o, states, final, carried, *, scale):
  n = pl.program_id(2)
  starts = n == 0
  if slots is not None:
    at = pl.program_id(0) * pl.num_programs(2) + n
    starts |= slots[at] != slots[jnp.maximum(at - 1, 0)]

  @pl.when(starts)
  def _():
    carried[...] = initial[...]

  state = carried[...]
  states[...] = state
  group = q.shape[0]
  shared = [jnp.broadcast_to(x[...], (group, *x.shape)) for x in (sums, relation)]
  heads = jax.vmap(functools.partial(chunk.forward, scale=scale))
  o[...], state = heads(q[...], k[...], v[...], g[...], beta[...], state, *shared)
  carried[...] = state
  final[...] = state


def forward(rows, initial, slots, *, scale: float, chunk_size: int, interpret: bool):
  """Outputs, chunk states and final states.

  Args:
    rows: chunk.Rows of q, k, g [B, H, T, K], v [B, H, T, V], beta [B, H, N, 1, C].
    initial: [S, H, V, K], the state table.
    slots: int32 [B * N], the entry of the table that each chunk belongs to, or None: row b uses entry b.
    scale: of the outputs.
    chunk_size: C.
    interpret: run without a TPU.

  Returns:
    o [B, H, T, V]; the states before each chunk [B, H, N, V, K]; the final states as `initial`.
  """
  grid = Grid(rows, chunk_size, slots)
  tables = chunk.tables(chunk_size, rows.k.dtype)
  blocks = [grid.keys, grid.keys, grid.values, grid.keys, grid.beta]
  return grid.run(
      functools.partial(_kernel, scale=scale),
      inputs=[*((x, grid.whole(x)) for x in tables), *zip(rows, blocks, strict=True), (initial, grid.entry)],
      outputs=[(rows.v.shape, grid.values), (grid.states, grid.state), (initial.shape, grid.entry)],
      name="kda_forward",
      interpret=interpret,
  )
