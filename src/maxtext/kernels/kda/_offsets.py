# SPDX-License-Identifier: Apache-2.0
"""cu_seqlens for kernels of other libraries, which have room for a fixed number of segments."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxtext.kernels.kda import _segments
from maxtext.kernels.kda._types import Inputs


class Numbered(NamedTuple):
  """The segments of one row of T tokens, counted without the empty ones, and N places for them.

  ids: int32 [1, T], from 1 without gaps, 0 after the last offset.
  order: int32 [N], for each place the segment of cu_seqlens that it holds, the empty ones last.
  place: int32 [N], for each segment of cu_seqlens its place.
  empty: bool [N], of each segment of cu_seqlens.
  """

  ids: jax.Array
  order: jax.Array
  place: jax.Array
  empty: jax.Array


def number(cu_seqlens: jax.Array, length: int) -> Numbered:
  """Counts the segments of a row that is cut at the given offsets.

  Args:
    cu_seqlens: integer [N + 1], as the entry takes it; overflowed offsets make every token padding.
    length: T.
  """
  empty = cu_seqlens[1:] == cu_seqlens[:-1]
  order = jnp.argsort(empty, stable=True).astype(jnp.int32)
  place = jnp.argsort(order).astype(jnp.int32)
  tokens = jnp.arange(length)
  segment = jnp.clip(jnp.searchsorted(cu_seqlens, tokens, side="right") - 1, 0, empty.shape[0] - 1)
  ids = jnp.where(tokens < cu_seqlens[-1], place[segment] + 1, 0)
  return Numbered(ids[None], order, place, empty)


def zero_padding(inputs: Inputs, real: jax.Array) -> Inputs:
  """The inputs with zeros where real, bool [B, T], is False; gradients there are zero whatever a kernel gives."""

  def masked(x):
    return jnp.where(real.reshape(real.shape + (1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))

  q, k, v, g, beta = map(masked, inputs[:5])
  return Inputs(q, k, v, g, beta, inputs.A_log, inputs.dt_bias)


def finish(
    o: jax.Array, final_state: jax.Array | None, real: jax.Array, cu_seqlens: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
  """Outputs [B, T, H, V] with zeros at padding, and NaN everywhere if the offsets are overflowed."""
  poison = jnp.where(_segments.overflowed(cu_seqlens, real.shape[1]), jnp.nan, 1.0)
  o = jnp.where(real[:, :, None, None], o, jnp.zeros((), o.dtype)) * poison.astype(o.dtype)
  return o, None if final_state is None else final_state * poison.astype(final_state.dtype)


def refuse_segment_ids(name: str, segment_ids: jax.Array | None) -> None:
  """Raises ValueError where segments are given by ids, which say nothing about how many there can be."""
  if segment_ids is not None:
    raise ValueError(
        f"segment_ids of shape {tuple(segment_ids.shape)} is given and implementation is {name!r}, which has room for a "
        "fixed number of segments; pass cu_seqlens from segment_ids_to_cu_seqlens(segment_ids, max_segs) and the rows as "
        "one (in the layer: set max_kda_segments), or use implementation='auto', which needs no maximum."
    )
