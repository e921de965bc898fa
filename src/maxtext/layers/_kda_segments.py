# SPDX-License-Identifier: Apache-2.0
"""Segment ids as the offsets that variable-length kernels take."""

import jax
import jax.numpy as jnp


def segment_ids_to_cu_seqlens(segment_ids: jax.Array, max_segs: int) -> jax.Array:
  """Where the segments of rows begin and end when the rows are laid end to end.

  The convention is flash-linear-attention's: segment n is [cu_seqlens[n], cu_seqlens[n + 1]). A row's start is always a
  border, also between two rows that end and begin with the same id, and so is each change to another positive id. A
  segment ends where the next begins, so padding belongs to the segment before it, and padding at a row's start to the
  row's first segment; the last segment ends after its last real token. Where k, v and beta are zero at padding, that
  padding changes nothing. Offsets after the last segment repeat it: empty segments.

  The size of the result does not depend on the ids, so it can be traced. Cost: two prefix sums over B * T integers and
  a binary search for each offset.

  Args:
    segment_ids: integer [B, T], 0 at padding.
    max_segs: how many segments the result has room for, over all B rows; 1 or more.

  Returns:
    int32 [max_segs + 1], never falling. All zeros if there is only padding. If there are more segments than room, the
    last offset is -1: the arrays that a kernel makes of it must not be used.

  Raises:
    ValueError: segment_ids is not an integer array of two axes, or max_segs is less than 1.
  """
  if segment_ids.ndim != 2 or not jnp.issubdtype(segment_ids.dtype, jnp.integer):
    raise ValueError(
        f"segment_ids has shape {tuple(segment_ids.shape)} and dtype {segment_ids.dtype}; integers [B, T] are needed."
    )
  if max_segs < 1:
    raise ValueError(f"max_segs is {max_segs}; room for at least one segment is needed (max_kda_segments).")
  begins, end = _beginnings(segment_ids)
  count = jnp.cumsum(begins.astype(jnp.int32))
  # The n-th beginning is the first token with n beginnings up to it; there is none for n above the count.
  offsets = jnp.searchsorted(count, jnp.arange(1, max_segs + 2, dtype=jnp.int32)).astype(jnp.int32)
  offsets = jnp.minimum(offsets, end).at[0].set(0)
  return offsets.at[-1].set(jnp.where(count[-1] > max_segs, -1, end))


def _beginnings(segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Whether a segment begins at each token, bool [B * T], and the offset after the last real token."""
  batch, length = segment_ids.shape
  real = segment_ids != 0
  before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
  starts = real & (segment_ids != before)
  count = jnp.cumsum(starts.astype(jnp.int32), axis=1)
  begins = (starts & (count > 1)).at[:, 0].set(count[:, -1] > 0)  # a row's first segment begins with the row
  after = jnp.arange(1, batch * length + 1, dtype=jnp.int32).reshape(batch, length)
  return begins.reshape(-1), jnp.max(jnp.where(real, after, 0))
