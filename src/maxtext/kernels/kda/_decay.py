# SPDX-License-Identifier: Apache-2.0
"""Decay between the tokens of a chunk, and the matrices that it weights.

The decay from token j to token i is the exponential of the sum of g over j+1..i. A chunk is halved again and again; at
each size h, the tokens i of a second half and j of the first half beside it meet at the border between them, where the
decay is a product: exp(sum after the border up to i) * exp(sum after j up to the border). Both exponents are sums of
numbers that are at most 0 and that lie between j and i, so nothing overflows, nothing cancels, and no other token has a
say, however strong the decay. Each size costs one exponential for each number of the chunk, and one small matrix
product for each pair of halves.

Arrays are [X, C, K], X chunks of any row and head, C a power of two.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

_HIGHEST = lax.Precision.HIGHEST


class Sums(NamedTuple):
  """Sums of g within blocks of h tokens: up to and with each token (before), and after each token (after). [X, C, K]."""

  before: jax.Array
  after: jax.Array


class Pairs(NamedTuple):
  """The two matrices [X, C, C] of a chunk, zero above the diagonal.

  qk: q_i . decay(i, j) k_j for j <= i; kk: k_i . decay(i, j) k_j for j < i.
  """

  qk: jax.Array
  kk: jax.Array


def _halves(x: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
  """First and second halves [X, C / 2h, h, ...] of the blocks of 2h tokens of [X, C, ...]."""
  x = x.reshape(x.shape[0], x.shape[1] // (2 * size), 2, size, *x.shape[2:])
  return x[:, :, 0], x[:, :, 1]


def _join(first: jax.Array, second: jax.Array) -> jax.Array:
  """Undoes `_halves`."""
  x = jnp.stack([first, second], 2)
  return x.reshape(x.shape[0], -1, *x.shape[4:])


def decay_sums(g: jax.Array) -> list[Sums]:
  """Sums of the log decay within blocks of 1, 2, 4, ..., C tokens."""
  levels = [Sums(g, jnp.zeros_like(g))]
  size = 1
  while size < g.shape[1]:
    before1, before2 = _halves(levels[-1].before, size)
    after1, after2 = _halves(levels[-1].after, size)
    total1, total2 = before1[:, :, -1:], before2[:, :, -1:]
    levels.append(Sums(_join(before1, before2 + total1), _join(after1 + total2, after2)))
    size *= 2
  return levels


def _pull_sums(sums: Sums, size: int) -> Sums:
  """Gradients of the sums within blocks of h from those of the sums within blocks of 2h."""
  before1, before2 = _halves(sums.before, size)
  after1, after2 = _halves(sums.after, size)
  last = jnp.arange(size)[:, None] == size - 1  # the sum up to the last token is the total
  before1 = before1 + jnp.where(last, before2.sum(2, keepdims=True), 0)
  before2 = before2 + jnp.where(last, after1.sum(2, keepdims=True), 0)
  return Sums(_join(before1, before2), _join(after1, after2))


def _factors(q: jax.Array, k: jax.Array, sums: Sums, size: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Decay after the border, decay before it, and the decayed rows [q; k] and columns k. All [X, C / 2h, h or 2h, K]."""
  row_decay = jnp.exp(_halves(sums.before, size)[1])
  column_decay = jnp.exp(_halves(sums.after, size)[0])
  k1, k2 = _halves(k, size)
  rows = jnp.concatenate([_halves(q, size)[1] * row_decay, k2 * row_decay], axis=2)
  return row_decay, column_decay, rows, k1 * column_decay


def pair_matrices(q: jax.Array, k: jax.Array, levels: list[Sums]) -> Pairs:
  """The decayed products of every two tokens of a chunk.

  Args:
    q, k: [X, C, K], float32 or wider.
    levels: `decay_sums` of the chunk's log decay.
  """
  chunks, length, _ = q.shape
  qk = jnp.sum(q * k, axis=-1).reshape(chunks, length, 1, 1)
  kk = jnp.zeros_like(qk)
  size = 1
  for sums in levels[:-1]:
    _, _, rows, columns = _factors(q, k, sums, size)
    products = jnp.einsum("xbik,xbjk->xbij", rows, columns, precision=_HIGHEST)
    qk, kk = _grow(qk, products[:, :, :size]), _grow(kk, products[:, :, size:])
    size *= 2
  return Pairs(qk[:, 0], kk[:, 0])


def _grow(blocks: jax.Array, lower: jax.Array) -> jax.Array:
  """Lower triangular blocks [X, C / h, h, h], joined by the blocks between them [X, C / 2h, h, h]."""
  chunks, count, size, _ = blocks.shape
  blocks = blocks.reshape(chunks, count // 2, 2, size, size)
  top = jnp.concatenate([blocks[:, :, 0], jnp.zeros_like(lower)], axis=-1)
  return jnp.concatenate([top, jnp.concatenate([lower, blocks[:, :, 1]], axis=-1)], axis=-2)


def _lower(matrix: jax.Array, size: int) -> jax.Array:
  """The blocks [X, C / 2h, h, h] of [X, C, C] in which second halves meet first halves."""
  count = matrix.shape[1] // (2 * size)
  starts = [2 * size * b for b in range(count)]
  return jnp.stack([matrix[:, s + size : s + 2 * size, s : s + size] for s in starts], axis=1)


def unit_lower_inverse(matrix: jax.Array) -> jax.Array:
  """The inverse of I + matrix, for [X, C, C] that is zero on and above the diagonal.

  Blocks are inverted in pairs, as in [[a, 0], [c, b]]^-1 = [[a^-1, 0], [-b^-1 c a^-1, b^-1]], which stays accurate where
  powers of the matrix grow.
  """
  inverse = jnp.ones((matrix.shape[0], matrix.shape[1], 1, 1), matrix.dtype)
  size = 1
  while size < matrix.shape[1]:
    a, b = _halves(inverse, 1)
    a, b = a[:, :, 0], b[:, :, 0]
    between = jnp.einsum("xbij,xbjk->xbik", _lower(matrix, size), a, precision=_HIGHEST)
    inverse = _grow(inverse, -jnp.einsum("xbij,xbjk->xbik", b, between, precision=_HIGHEST))
    size *= 2
  return inverse[:, 0]


class PairGradients(NamedTuple):
  """Gradients [X, C, K] of q, k and g."""

  q: jax.Array
  k: jax.Array
  g: jax.Array


def pull_pair_matrices(q: jax.Array, k: jax.Array, levels: list[Sums], dpairs: Pairs, dsums: Sums) -> PairGradients:
  """Gradients of q, k and g through `pair_matrices` and `decay_sums`.

  Args:
    q, k, levels: as in `pair_matrices`.
    dpairs: gradients of the two matrices; what stands above the diagonal (of kk also on it) is not looked at.
    dsums: gradients of the sums over the whole chunk, levels[-1].
  """
  diagonal = jnp.diagonal(dpairs.qk, axis1=1, axis2=2)[..., None]
  dq, dk = diagonal * k, diagonal * q
  size = q.shape[1]
  for sums in levels[-2::-1]:
    size //= 2
    dsums = _pull_sums(dsums, size)
    row_decay, column_decay, rows, columns = _factors(q, k, sums, size)
    dproducts = jnp.concatenate([_lower(dpairs.qk, size), _lower(dpairs.kk, size)], axis=2)
    drows = jnp.einsum("xbij,xbjk->xbik", dproducts, columns, precision=_HIGHEST)
    dcolumns = jnp.einsum("xbij,xbik->xbjk", dproducts, rows, precision=_HIGHEST)
    weighted = drows * rows
    zeros = jnp.zeros_like(columns)
    dq = dq + _join(zeros, drows[:, :, :size] * row_decay)
    dk = dk + _join(dcolumns * column_decay, drows[:, :, size:] * row_decay)
    dsums = Sums(
        dsums.before + _join(zeros, weighted[:, :, :size] + weighted[:, :, size:]),
        dsums.after + _join(dcolumns * columns, zeros),
    )
  return PairGradients(dq, dk, dsums.before)
