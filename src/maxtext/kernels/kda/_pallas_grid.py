# SPDX-License-Identifier: Apache-2.0
"""Which program of a TPU kernel sees which block of the arrays: one program for each chunk of each group of heads."""

from collections.abc import Callable
import functools

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from maxtext.kernels.kda._pallas_chunk import Rows

# Bytes. The default on v5e and v5p, 16 MiB, is too little for the backward pass of four heads.
_VMEM_LIMIT = 32 * 2**20


def heads_together(heads: int, chunk_size: int, width: int) -> int:
  """How many heads one program computes, up to four: their chains of products fill each other's waits."""
  room = 4 * 64 * 128 // (chunk_size * max(width, 128))  # of VMEM
  return next(group for group in (4, 2, 1) if heads % group == 0 and group <= max(room, 1))


class Grid:
  """Programs (row, group of heads, chunk), the chunks of a row one after the other, and the blocks that they see.

  A block has the axis of its heads first; the state table's entry is that of the chunk's slot. The attributes are block
  specifications: `keys` of [B, H, T, K], `values` of [B, H, T, V], `beta` of [B, H, N, 1, C], `state` of
  [B, H, N, V, K], `entry` of the state table [S, H, V, K].
  """

  def __init__(self, rows: Rows, chunk_size: int, slots: jax.Array | None, *, backwards: bool = False):
    """The grid of `rows` ([B, H, T, ...]); slots: int32 [B * N] or None; backwards: from the last chunk to the first."""
    batch, heads, length, keys = rows.k.shape
    values, chunks = rows.v.shape[-1], length // chunk_size
    group = heads_together(heads, chunk_size, max(keys, values))
    self.shape = (batch, heads // group, chunks)
    self.carried = pltpu.VMEM((group, values, keys), rows.k.dtype)
    self.states = (batch, heads, chunks, values, keys)
    self._slots = [] if slots is None else [slots]

    def chunk(n):
      return chunks - 1 - n if backwards else n

    def spec(block, index):
      return pl.BlockSpec(block, lambda b, h, n, *slots: index(b, h, chunk(n), *slots))

    self.keys = spec((None, group, chunk_size, keys), lambda b, h, n, *_: (b, h, n, 0))
    self.values = spec((None, group, chunk_size, values), lambda b, h, n, *_: (b, h, n, 0))
    self.beta = spec((None, group, None, 1, chunk_size), lambda b, h, n, *_: (b, h, n, 0, 0))
    self.state = spec((None, group, None, values, keys), lambda b, h, n, *_: (b, h, n, 0, 0))
    self.entry = spec(
        (None, group, values, keys), lambda b, h, n, *slots: (slots[0][b * chunks + n] if slots else b, h, 0, 0)
    )

  def whole(self, array) -> pl.BlockSpec:
    """The same matrix for every program."""
    return pl.BlockSpec(array.shape, lambda *_: (0, 0))

  def run(self, kernel: Callable, inputs: list[tuple], outputs: list[tuple], *, name: str, interpret: bool):
    """Calls the kernel.

    Args:
      kernel: (slots or None, references of inputs, of outputs, the carried state [heads, V, K]).
      inputs: pairs of array and block.
      outputs: pairs of shape (float32, or as the rows) and block.
      name: of the kernel.
      interpret: run without a TPU.
    """
    arrays, in_specs = zip(*inputs, strict=True)
    shapes, out_specs = zip(*outputs, strict=True)
    return pl.pallas_call(
        kernel if self._slots else functools.partial(kernel, None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(self._slots),
            grid=self.shape,
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[self.carried],
        ),
        out_shape=[jax.ShapeDtypeStruct(shape, self.carried.dtype) for shape in shapes],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=_VMEM_LIMIT
        ),
        interpret=interpret,
        name=name,
    )(*self._slots, *arrays)
