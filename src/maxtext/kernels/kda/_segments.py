# SPDX-License-Identifier: Apache-2.0
"""The two ways of saying where documents lie, made one: `Segments`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxtext.kernels.kda._types import Inputs, Segments


def from_segment_ids(segment_ids: jax.Array) -> Segments:
  """Segments of rows with an id for each token.

  A row's start and every change of the id is a border; 0 is padding, which belongs to the segment before it.

  Args:
    segment_ids: integer [B, T].
  """
  real = segment_ids != 0
  before = jnp.pad(segment_ids[:, :-1], ((0, 0), (1, 0)))
  starts = real & (segment_ids != before)  # a row's first token has padding before it
  count = jnp.cumsum(starts.astype(jnp.int32), axis=1)
  return Segments(jnp.maximum(count - 1, 0), real)


def from_cu_seqlens(cu_seqlens: jax.Array, length: int) -> Segments:
  """Segments of one row that is cut at the given offsets; tokens after the last offset are padding.

  Args:
    cu_seqlens: integer [N + 1], 0 first, never falling; equal neighbours are empty segments.
    length: T.
  """
  tokens = jnp.arange(length)
  ids = jnp.searchsorted(cu_seqlens, tokens, side="right").astype(jnp.int32) - 1
  last = jnp.searchsorted(cu_seqlens, jnp.maximum(cu_seqlens[-1], 1) - 1, side="right").astype(jnp.int32) - 1
  return Segments(jnp.minimum(ids, last)[None], (tokens < cu_seqlens[-1])[None])


def overflowed(cu_seqlens: jax.Array, length: int) -> jax.Array:
  """bool [], whether the offsets were marked as not holding every segment (the last one is -1), fall elsewhere, or do not
  lie between 0, the first one, and T."""
  return (cu_seqlens[1:] < cu_seqlens[:-1]).any() | (cu_seqlens[0] != 0) | (cu_seqlens[-1] > length)


class Aligned(NamedTuple):
  """A copy of one row in which every segment starts at a chunk.

  source: int32 [T'], for each token of the copy the token of the row that it holds (any token at padding).
  place: int32 [T], for each token of the row its place in the copy (any place after the last offset).
  segments: of the copy.
  """

  source: jax.Array
  place: jax.Array
  segments: Segments


def align(cu_seqlens: jax.Array, length: int, chunk_size: int) -> Aligned:
  """Where the tokens of one row go so that no chunk holds two segments: T' = (ceil(T / C) + N) * C tokens.

  Only states of single segments need this; outputs do not.

  Args:
    cu_seqlens: integer [N + 1].
    length: T.
    chunk_size: C.
  """
  count = cu_seqlens.shape[0] - 1
  lengths = cu_seqlens[1:] - cu_seqlens[:-1]
  chunks = -(-lengths // chunk_size)
  first_chunk = jnp.pad(jnp.cumsum(chunks), (1, 0))[:count]
  slots = jnp.searchsorted(first_chunk, jnp.arange(-(-length // chunk_size) + count), side="right").astype(jnp.int32) - 1
  ids = jnp.repeat(slots, chunk_size)
  offset = jnp.arange(ids.shape[0]) - first_chunk[ids] * chunk_size
  source = jnp.clip(cu_seqlens[ids] + offset, 0, length - 1)
  tokens = jnp.arange(length)
  owner = jnp.clip(jnp.searchsorted(cu_seqlens, tokens, side="right") - 1, 0, count - 1)
  place = jnp.clip(first_chunk[owner] * chunk_size + tokens - cu_seqlens[owner], 0, ids.shape[0] - 1)
  return Aligned(source, place, Segments(ids[None], (offset < lengths[ids])[None], slots[None]))


def take(inputs: Inputs, tokens: jax.Array) -> Inputs:
  """The inputs with the tokens of the (only) row picked: q, k, v, g and beta of shape [1, len(tokens), ...]."""
  q, k, v, g, beta = (jnp.take(x, tokens, axis=1) for x in inputs[:5])
  return Inputs(q, k, v, g, beta, inputs.A_log, inputs.dt_bias)
