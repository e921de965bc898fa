# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of one chunk of one head, as the TPU kernels see it: rows are tokens, and everything is a plain matrix.

C rows, a power of two of at least 8. Two rows j < i belong to the level h, the highest bit in which i and j differ: they
lie in the lower and the upper half of one block of 2 h rows. Their decay is the product of a factor of row i, from the
middle of the block to i, and one of row j, from j to the middle. So at each level one array of exponents serves rows and
columns, and a matrix product gives all pairs. Every exponent is a sum of log decays between two rows of the block, at
most 0: nothing overflows, and nothing cancels.

States are kept transposed, [V, K], so that the decay of the key channels runs along the lanes.
"""

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

_DIAGONAL = -1.0
_APART = -2.0


class Tables(NamedTuple):
  """Constants of a chunk size, with L = log2(C) levels.

  sums: [(L + 2) * C, C], zeros and ones: times g it gives, one below the other, the exponents of each level, those from
    the chunk's start up to and with a row, and those from behind a row to the chunk's end.
  relation: [C, C]: the level's number where the column lies before the row, -1 on the diagonal, -2 behind it.
  """

  sums: np.ndarray
  relation: np.ndarray


def tables(chunk_size: int, dtype: jnp.dtype) -> Tables:
  """The constants for chunks of `chunk_size` rows."""
  i, j = np.indices((chunk_size, chunk_size))
  before, behind = j <= i, j > i
  levels = chunk_size.bit_length() - 1
  sums = [((i ^ j) < (1 << n)) & np.where(i & (1 << n), before, behind) for n in range(levels)]
  relation = np.floor(np.log2(np.maximum(i ^ j, 1)))
  relation = np.where(j < i, relation, np.where(i == j, _DIAGONAL, _APART))
  return Tables(np.concatenate([*sums, before, behind]).astype(dtype), relation.astype(dtype))


class Rows(NamedTuple):
  """A chunk's tokens.

  q, k, g: [C, K]. v: [C, V]. beta: [1, C]. segment: [1, C], how far the segment's id is above that of the token
  before the chunk, as floating point: 0 where the incoming state belongs to the row.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  g: jax.Array
  beta: jax.Array
  segment: jax.Array


class Pairs(NamedTuple):
  """What a chunk's rows are to each other.

  decays: for each level [C, K], the factor of a row as a row or column of that level's pairs.
  start: [C, K], decay from the incoming state to a row, 0 in later segments.
  end: [C, K], decay from a row to the outgoing state, 0 in earlier segments.
  relation: [C, C], as in Tables, with -2 between segments.
  beta: [C, 1].
  kk, qk: [C, C], decayed products k_i k_j for j < i, and q_i k_j for j <= i; 0 between segments.
  inverse: [C, C], of I + beta kk.
  """

  decays: list[jax.Array]
  start: jax.Array
  end: jax.Array
  relation: jax.Array
  beta: jax.Array
  kk: jax.Array
  qk: jax.Array
  inverse: jax.Array


def _dot(a: jax.Array, b: jax.Array, axis_a: int = 1, axis_b: int = 0) -> jax.Array:
  dimensions = (((axis_a,), (axis_b,)), ((), ()))
  return lax.dot_general(a, b, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=a.dtype)


def _dot_bt(a: jax.Array, b: jax.Array) -> jax.Array:
  return _dot(a, b, 1, 1)


def _dot_at(a: jax.Array, b: jax.Array) -> jax.Array:
  return _dot(a, b, 0, 0)


def _column(row: jax.Array, diagonal: jax.Array) -> jax.Array:
  """[1, C] to [C, 1], exact."""
  return jnp.sum(jnp.where(diagonal, row, 0.0), axis=1, keepdims=True)


def _row(column: jax.Array, diagonal: jax.Array) -> jax.Array:
  """[C, 1] to [1, C], exact."""
  return jnp.sum(jnp.where(diagonal, column, 0.0), axis=0, keepdims=True)


def _pairs(rows: Rows, sums: jax.Array, relation: jax.Array) -> Pairs:
  size = rows.k.shape[0]
  diagonal = relation == _DIAGONAL
  segment = _column(rows.segment, diagonal)
  relation = jnp.where(segment == rows.segment, relation, _APART)
  beta = _column(rows.beta, diagonal)

  decays = jnp.exp(_dot(sums, rows.g))
  *decays, start, end = [decays[n : n + size] for n in range(0, decays.shape[0], size)]
  start = jnp.where(segment == 0, start, 0.0)
  end = jnp.where(segment == segment[size - 1 :], end, 0.0)

  kk = jnp.zeros((size, size), rows.k.dtype)
  qk = jnp.where(diagonal, jnp.sum(rows.q * rows.k, axis=1, keepdims=True), 0.0)
  inverse = jnp.where(diagonal, 1.0, 0.0).astype(rows.k.dtype)
  for level, decay in enumerate(decays):
    here = relation == level
    k = rows.k * decay
    kk_level = jnp.where(here, _dot_bt(k, k), 0.0)
    qk = jnp.where(here, _dot_bt(rows.q * decay, k), qk)
    kk = kk + kk_level
    # Blocks of 2 h rows from their halves: [[a, 0], [x, b]]^-1 = [[a^-1, 0], [-b^-1 x a^-1, b^-1]].
    inverse = inverse - _dot(_dot(inverse, beta * kk_level), inverse)
  return Pairs(decays, start, end, relation, beta, kk, qk, inverse)


def forward(rows: Rows, state: jax.Array, sums: jax.Array, relation: jax.Array, scale: float):
  """A chunk's outputs and the state behind it.

  Args:
    rows: the tokens.
    state: [V, K], before the chunk.
    sums, relation: of Tables.
    scale: of the outputs.

  Returns:
    o [C, V]; the state [V, K] after the chunk.
  """
  pairs = _pairs(rows, sums, relation)
  u = _dot(pairs.inverse, pairs.beta * (rows.v - _dot_bt(rows.k * pairs.start, state)))
  o = scale * (_dot_bt(rows.q * pairs.start, state) + _dot(pairs.qk, u))
  return o, state * pairs.start[-1:] + _dot_at(u, rows.k * pairs.end)


def backward(
    rows: Rows, state: jax.Array, do: jax.Array, dstate: jax.Array, sums: jax.Array, relation: jax.Array, scale: float
):
  """Gradients of a chunk.

  Args:
    rows: the tokens.
    state: [V, K], before the chunk.
    do: [C, V], gradient of the outputs.
    dstate: [V, K], gradient of the state after the chunk.
    sums, relation: of Tables.
    scale: of the outputs.

  Returns:
    Gradients of q, k, v, g (as the rows), of beta [1, C], and of the state before the chunk [V, K].
  """
  q, k = rows.q, rows.k
  pairs = _pairs(rows, sums, relation)
  start, end = pairs.start, pairs.end
  error = rows.v - _dot_bt(k * start, state)
  u = _dot(pairs.inverse, pairs.beta * error)

  do = scale * do
  du = _dot_at(pairs.qk, do) + _dot_bt(k * end, dstate)
  dscaled = _dot_at(pairs.inverse, du)  # of beta * error
  derror = pairs.beta * dscaled
  dqk = _dot_bt(do, u)
  dsystem = -_dot_bt(dscaled, u)  # of beta * kk
  # `dsystem` is wanted where kk is not masked; there kk is 0, and so is the product.
  dbeta = jnp.sum(dscaled * error, axis=1, keepdims=True) + jnp.sum(dsystem * pairs.kk, axis=1, keepdims=True)
  dkk = pairs.beta * dsystem

  # Through the incoming and the outgoing state.
  dq_start, dk_start, dk_end = _dot(do, state), -_dot(derror, state), _dot(u, dstate)
  last = start[-1:]
  dprevious = dstate * last + _dot_at(do, q * start) - _dot_at(derror, k * start)
  dlast = last * jnp.sum(state * dstate, axis=0, keepdims=True)
  at_end = lax.broadcasted_iota(jnp.int32, start.shape, 0) == start.shape[0] - 1
  dstart = (dq_start * q + dk_start * k) * start + jnp.where(at_end, dlast, 0.0)

  # Between the chunk's rows.
  diagonal = pairs.relation == _DIAGONAL
  dself = jnp.sum(jnp.where(diagonal, dqk, 0.0), axis=1, keepdims=True)
  dq = dq_start * start + dself * k
  dk = dk_start * start + dk_end * end + dself * q
  dsums = []
  for level, decay in enumerate(pairs.decays):
    here = pairs.relation == level
    q_level, k_level = q * decay, k * decay
    dqk_level, dkk_level = jnp.where(here, dqk, 0.0), jnp.where(here, dkk, 0.0)
    dq_level = _dot(dqk_level, k_level) * decay
    dk_level = (_dot(dkk_level, k_level) + _dot_at(dkk_level, k_level) + _dot_at(dqk_level, q_level)) * decay
    dq, dk = dq + dq_level, dk + dk_level
    dsums.append(dq_level * q + dk_level * k)
  dsums += [dstart, dk_end * k * end]
  dg = _dot_at(sums, jnp.concatenate(dsums))
  return dq, dk, derror, dg, _row(dbeta, diagonal), dprevious
