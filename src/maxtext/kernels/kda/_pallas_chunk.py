# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of one chunk of one head, as the TPU kernels see it: rows are tokens, and everything is a plain matrix.

C rows, a power of two of at least 8. Two rows j < i belong to the level h, the highest bit in which i and j differ: they
lie in the lower and the upper half of one block of 2 h rows. Their decay is the product of a factor of row i, from the
middle of the block to i, and one of row j, from j to the middle. So at each level one array of exponents serves rows and
columns, and a matrix product gives all pairs. Every exponent is a sum of log decays between two rows of the block, at
most 0: nothing overflows, and nothing cancels. Between segments lies a decay of zero.

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
  relation: [2 C, C], twice the same [C, C]: the level's number where the column lies before the row, -1 on the diagonal,
    -2 behind it.
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
  return Tables(np.concatenate([*sums, before, behind]).astype(dtype), np.concatenate([relation, relation]).astype(dtype))


class Rows(NamedTuple):
  """A chunk's tokens: q, k [C, K]; v [C, V]; beta [1, C]; g [C, K], `_prepare.BORDER` where a segment starts."""

  q: jax.Array
  k: jax.Array
  v: jax.Array
  g: jax.Array
  beta: jax.Array


class Pairs(NamedTuple):
  """What a chunk's rows are to each other. Arrays of 2 C rows are for the keys and, below them, for the queries.

  levels: for each level [2 C, K], the rows times the factors of that level.
  decays: for each level [2 C, K], those factors.
  start: [2 C, K], decay from the incoming state to a row.
  end: [C, K], decay from a row to the outgoing state.
  beta: [C, 1].
  products: [2 C, C], decayed products k_i k_j for j < i, and q_i k_j for j <= i.
  inverse: [C, C], of I + beta k_i k_j.
  """

  levels: list[jax.Array]
  decays: list[jax.Array]
  start: jax.Array
  end: jax.Array
  beta: jax.Array
  products: jax.Array
  inverse: jax.Array


def _dot(a: jax.Array, b: jax.Array, axis_a: int = 1, axis_b: int = 0) -> jax.Array:
  dimensions = (((axis_a,), (axis_b,)), ((), ()))
  return lax.dot_general(a, b, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=a.dtype)


def _dot_bt(a: jax.Array, b: jax.Array) -> jax.Array:
  return _dot(a, b, 1, 1)


def _dot_at(a: jax.Array, b: jax.Array) -> jax.Array:
  return _dot(a, b, 0, 0)


def _stack(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.concatenate([a, b], axis=0)


def _column(row: jax.Array, diagonal: jax.Array) -> jax.Array:
  """[1, C] to [C, 1], exact."""
  return jnp.sum(jnp.where(diagonal, row, 0.0), axis=1, keepdims=True)


def _row(column: jax.Array, diagonal: jax.Array) -> jax.Array:
  """[C, 1] to [1, C], exact."""
  return jnp.sum(jnp.where(diagonal, column, 0.0), axis=0, keepdims=True)


def _pairs(rows: Rows, sums: jax.Array, relation: jax.Array) -> Pairs:
  size = rows.k.shape[0]
  diagonal = relation[:size] == _DIAGONAL
  beta = _column(rows.beta, diagonal)

  decays = jnp.exp(_dot(sums, rows.g))
  *decays, start, end = [decays[n : n + size] for n in range(0, decays.shape[0], size)]
  decays, start = [_stack(decay, decay) for decay in decays], _stack(start, start)

  both = _stack(rows.k, rows.q)
  levels = [both * decay for decay in decays]
  identity = jnp.where(diagonal, 1.0, 0.0).astype(both.dtype)
  inverse = identity
  products = _stack(jnp.zeros_like(identity), identity * jnp.sum(rows.q * rows.k, axis=1, keepdims=True))
  for number, level in enumerate(levels):
    here = jnp.where(relation == number, _dot_bt(level, level[:size]), 0.0)
    products = products + here
    # Blocks of 2 h rows from their halves: [[a, 0], [x, b]]^-1 = [[a^-1, 0], [-b^-1 x a^-1, b^-1]].
    below = beta * here[:size]
    inverse = inverse - (_dot(_dot(inverse, below), inverse) if number else below)
  return Pairs(levels, decays, start, end, beta, products, inverse)


def forward(q, k, v, g, beta, state, sums, relation, *, scale: float):
  """A chunk's outputs and the state behind it.

  Args:
    q, k, v, g, beta: as in Rows.
    state: [V, K], before the chunk.
    sums, relation: of Tables.
    scale: of the outputs.

  Returns:
    o [C, V]; the state [V, K] after the chunk.
  """
  size = k.shape[0]
  pairs = _pairs(Rows(q, k, v, g, beta), sums, relation)
  from_state = _dot_bt(_stack(k, q) * pairs.start, state)
  u = _dot(pairs.inverse, pairs.beta * (v - from_state[:size]))
  o = scale * (from_state[size:] + _dot(pairs.products[size:], u))
  return o, state * pairs.start[size - 1 : size] + _dot_at(u, k * pairs.end)


def backward(q, k, v, g, beta, state, do, dstate, sums, relation, *, scale: float):
  """Gradients of a chunk.

  Args:
    q, k, v, g, beta: as in Rows.
    state: [V, K], before the chunk.
    do: [C, V], gradient of the outputs.
    dstate: [V, K], gradient of the state after the chunk.
    sums, relation: of Tables.
    scale: of the outputs.

  Returns:
    Gradients of q, k, v, g (as the rows), of beta [1, C], and of the state before the chunk [V, K].
  """
  size = k.shape[0]
  pairs = _pairs(Rows(q, k, v, g, beta), sums, relation)
  both = _stack(k, q)
  at_start, at_end = both * pairs.start, k * pairs.end
  error = v - _dot_bt(at_start[:size], state)
  u = _dot(pairs.inverse, pairs.beta * error)

  do = scale * do
  du = _dot_at(pairs.products[size:], do) + _dot_bt(at_end, dstate)
  dscaled = _dot_at(pairs.inverse, du)  # of beta * error
  dsystem = -_dot_bt(dscaled, u)  # of beta * the keys' products, also where those are zero
  dbeta = jnp.sum(dscaled * error, axis=1, keepdims=True)
  dbeta += jnp.sum(dsystem * pairs.products[:size], axis=1, keepdims=True)
  derror = pairs.beta * dscaled
  dproducts = _stack(pairs.beta * dsystem, _dot_bt(do, u))

  # Through the incoming and the outgoing state.
  dfrom_state = _stack(-derror, do)
  last = pairs.start[size - 1 : size]
  dprevious = dstate * last + _dot_at(dfrom_state, at_start)
  dboth = _dot(dfrom_state, state) * pairs.start
  dstart = _halves(dboth * both)
  dlast = last * jnp.sum(state * dstate, axis=0, keepdims=True)
  dstart += jnp.where(lax.broadcasted_iota(jnp.int32, dstart.shape, 0) == size - 1, dlast, 0.0)
  dk_end = _dot(u, dstate) * pairs.end

  # Between the chunk's rows.
  dself = jnp.sum(jnp.where(relation[size:] == _DIAGONAL, dproducts[size:], 0.0), axis=1, keepdims=True)
  dboth += _stack(dk_end + dself * q, dself * k)
  dsums = []
  for number, (level, decay) in enumerate(zip(pairs.levels, pairs.decays, strict=True)):
    here = jnp.where(relation == number, dproducts, 0.0)
    dlevel = _dot(here, level[:size])
    dlevel = _stack(dlevel[:size] + _dot_at(here, level), dlevel[size:])
    dboth += dlevel * decay
    dsums.append(_halves(dlevel * level))
  dg = _dot_at(sums, jnp.concatenate([*dsums, dstart, dk_end * k], axis=0))
  return dboth[size:], dboth[:size], derror, dg, _row(dbeta, relation[:size] == _DIAGONAL), dprevious


def _halves(x: jax.Array) -> jax.Array:
  """[2 C, K] to [C, K]: the sum of the keys' and the queries' rows."""
  return x[: x.shape[0] // 2] + x[x.shape[0] // 2 :]
