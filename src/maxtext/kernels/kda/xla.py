# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention in chunks, in pure JAX, for any backend.

Within a chunk of C tokens that starts with state S, with B and F the decay from the chunk's start to each token and
from each token to the chunk's end, and the matrices `qk` and `kk` of `_decay`:

    U = (I + beta kk)^-1 beta (V - (k B) S)          what each token writes
    O = scale ((q B) S + qk U)
    S <- exp(sum g) S + (k F)^T U

Source: Kimi Linear (arXiv 2510.26692), section 3; the gradients are those of these three lines, by hand. A border between
segments is a decay of zero (`_prepare.mark_borders`), so packed rows take the path of unpacked ones.

Chunks go in groups: what does not depend on the state is computed for a whole group at once, then the states one chunk
after the other. Only the state at each group's start is kept for the backward pass, which computes a group's matrices
again.
"""

import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from maxtext.kernels.kda import _decay, _platform, _prepare, _vjp
from maxtext.kernels.kda._types import Options, Prepared, Segments

# Chunks of all rows and heads that a group holds, by platform: so many fit a core's cache on a CPU; elsewhere enough to
# fill the device, few enough to bound the matrices in memory.
_GROUP_CHUNKS = {"cpu": 16}
_GROUP_CHUNKS_DEFAULT = 512

_einsum = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


class _Chunks(NamedTuple):
  """The inputs of a group of chunks: X chunks of all rows and heads, [X, C, K or V], beta [X, C, 1]."""

  q: jax.Array
  k: jax.Array
  v: jax.Array
  g: jax.Array
  beta: jax.Array


class _Matrices(NamedTuple):
  """What does not depend on the state. [X, C, ...]; end_decay [X, K, 1]."""

  levels: list[_decay.Sums]
  pairs: _decay.Pairs
  inverse: jax.Array  # (I + beta kk)^-1
  q_in: jax.Array  # q, decayed from the chunk's start
  k_in: jax.Array
  k_out: jax.Array  # k, decayed to the chunk's end
  end_decay: jax.Array
  erase: jax.Array  # inverse beta k_in: what the state takes from the writes
  writes: jax.Array  # inverse beta v


def _matrices(chunks: _Chunks) -> _Matrices:
  levels = _decay.decay_sums(chunks.g)
  pairs = _decay.pair_matrices(chunks.q, chunks.k, levels)
  inverse = _decay.unit_lower_inverse(chunks.beta * pairs.kk)
  start_decay = jnp.exp(levels[-1].before)
  k_in = chunks.k * start_decay
  width = k_in.shape[-1]
  both = _einsum("xij,xjd->xid", inverse, chunks.beta * jnp.concatenate([k_in, chunks.v], axis=-1))
  return _Matrices(
      levels=levels,
      pairs=pairs,
      inverse=inverse,
      q_in=chunks.q * start_decay,
      k_in=k_in,
      k_out=chunks.k * jnp.exp(levels[-1].after),
      end_decay=start_decay[:, -1, :, None],
      erase=both[..., :width],
      writes=both[..., width:],
  )


class _Layout(NamedTuple):
  """How [B, T, H, D] lies in groups: [groups, chunks of a group * B * H, C, D], the last group padded with zeros."""

  batch: int
  heads: int
  chunk_size: int
  chunks: int
  group: int
  groups: int

  @classmethod
  def of(cls, prepared: Prepared, options: Options) -> "_Layout":
    batch, length, heads, _ = prepared.k.shape
    chunks = length // options.chunk_size
    limit = _GROUP_CHUNKS.get(_platform.platform(), _GROUP_CHUNKS_DEFAULT)
    groups = -(-chunks * batch * heads // limit)
    group = -(-chunks // min(groups, chunks))
    return cls(batch, heads, options.chunk_size, chunks, group, -(-chunks // group))

  def split(self, x: jax.Array) -> jax.Array:
    """[B, T, H, D] to [groups, X, C, D]."""
    x = x.reshape(self.batch, self.chunks, self.chunk_size, self.heads, -1).transpose(1, 0, 3, 2, 4)
    x = jnp.pad(x, ((0, self.group * self.groups - self.chunks),) + ((0, 0),) * 4)
    return x.reshape(self.groups, -1, self.chunk_size, x.shape[-1])

  def merge(self, x: jax.Array) -> jax.Array:
    """[groups, X, C, D] to [B, T, H, D]."""
    x = x.reshape(-1, self.batch, self.heads, self.chunk_size, x.shape[-1])[: self.chunks]
    return x.transpose(1, 0, 3, 2, 4).reshape(self.batch, -1, self.heads, x.shape[-1])

  def by_chunk(self, x: jax.Array) -> jax.Array:
    """[X, ...] of one group to [chunks of the group, B * H, ...]."""
    return x.reshape(self.group, -1, *x.shape[1:])


def _split_inputs(prepared: Prepared, segments: Segments, layout: _Layout) -> _Chunks:
  q, k, v, g, beta = prepared
  return _Chunks(*(layout.split(x) for x in (q, k, v, _prepare.mark_borders(g, segments), beta[..., None])))


class _Table(NamedTuple):
  """For states of single segments, B = 1: the entry of each chunk in the table, and whether it is the entry's first,
  last.

  int32 and bool [groups, chunks of a group].
  """

  slot: jax.Array
  first: jax.Array
  last: jax.Array


def _table(segments: Segments, layout: _Layout) -> _Table | None:
  if segments.slots is None:
    return None
  slot = jnp.pad(segments.slots[0], (0, layout.group * layout.groups - layout.chunks), mode="edge")
  change = slot[1:] != slot[:-1]
  columns = slot, jnp.pad(change, (1, 0), constant_values=True), jnp.pad(change, (0, 1), constant_values=True)
  return _Table(*(x.reshape(layout.groups, layout.group) for x in columns))


def _run_states(state, m: _Matrices, layout: _Layout, table: _Table | None, initial, finals):
  """The states through a group.

  Returns:
    The state after the group [B * H, K, V] and the table of final states; the state before each chunk [X, K, V] and what
    each chunk writes [X, C, V].
  """

  def step(carry, chunk):
    state, finals = carry
    erase, writes, k_out, end_decay, entry = chunk
    if entry is not None:
      state = jnp.where(entry.first, initial[entry.slot], state)
    writes = writes - _einsum("xck,xkv->xcv", erase, state)
    after = end_decay * state + _einsum("xck,xcv->xkv", k_out, writes)
    if entry is not None and finals is not None:
      finals = finals.at[entry.slot].set(after)
    return (after, finals), (state, writes)

  by_chunk = [layout.by_chunk(x) for x in (m.erase, m.writes, m.k_out, m.end_decay)]
  carry, (before, writes) = lax.scan(step, (state, finals), (*by_chunk, table))
  return carry, before.reshape(-1, *before.shape[2:]), writes.reshape(-1, *writes.shape[2:])


def _forward(prepared: Prepared, segments: Segments, initial_state: jax.Array | None, options: Options):
  """The forward pass, as `_vjp.differentiable` wants it. The residual is the state at each group's start."""
  layout = _Layout.of(prepared, options)
  width, value_width = prepared.k.shape[-1], prepared.v.shape[-1]
  table = _table(segments, layout)
  if table is None and initial_state is not None:
    state = initial_state.reshape(-1, width, value_width)
  else:
    state = jnp.zeros((layout.batch * layout.heads, width, value_width), prepared.v.dtype)
  finals = initial_state if table is not None and options.output_final_state else None

  def step(carry, group):
    chunks, entries = group
    m = _matrices(chunks)
    after, before, writes = _run_states(carry[0], m, layout, entries, initial_state, carry[1])
    o = _einsum("xck,xkv->xcv", m.q_in, before) + _einsum("xij,xjv->xiv", m.pairs.qk, writes)
    return after, (options.scale * o, carry[0])

  (state, finals), (o, starts) = lax.scan(step, (state, finals), (_split_inputs(prepared, segments, layout), table))
  final_state = None
  if options.output_final_state:
    final_state = finals if table is not None else state.reshape(layout.batch, layout.heads, width, value_width)
  return layout.merge(o), final_state, starts


def _pull_states(dstate, m: _Matrices, do, layout: _Layout, table: _Table | None, dfinal, dinitial):
  """The gradients of the states backwards through a group.

  Returns:
    The gradients of the state before the group and of the table of initial states; of the state after each chunk
    [X, K, V], and of what each chunk writes [X, C, V].
  """
  dwrites = _einsum("xij,xiv->xjv", m.pairs.qk, do)
  dreads = _einsum("xck,xcv->xkv", m.q_in, do)

  def step(carry, chunk):
    dafter, dinitial = carry
    erase, k_out, end_decay, dwrites, dread, entry = chunk
    if entry is not None and dfinal is not None:
      dafter = dafter + jnp.where(entry.last, dfinal[entry.slot], 0)
    dwrites = dwrites + _einsum("xck,xkv->xcv", k_out, dafter)
    dbefore = dread + end_decay * dafter - _einsum("xck,xcv->xkv", erase, dwrites)
    if entry is not None:
      dinitial = jnp.where(entry.first, dinitial.at[entry.slot].set(dbefore), dinitial)
      dbefore = jnp.where(entry.first, 0, dbefore)
    return (dbefore, dinitial), (dafter, dwrites)

  by_chunk = [layout.by_chunk(x) for x in (m.erase, m.k_out, m.end_decay, dwrites, dreads)]
  carry, (dafter, dwrites) = lax.scan(step, (dstate, dinitial), (*by_chunk, table), reverse=True)
  return carry, dafter.reshape(-1, *dafter.shape[2:]), dwrites.reshape(-1, *dwrites.shape[2:])


def _pull_chunks(chunks: _Chunks, m: _Matrices, before, writes, do, dafter, dwrites) -> _Chunks:
  """The gradients of a group's inputs, each chunk for itself, from those of its outputs, writes and last states."""
  dtargets = _einsum("xji,xjv->xiv", m.inverse, dwrites)  # of beta (v - k_in S)
  dsystem = -_einsum("xiv,xjv->xij", dtargets, writes)  # of beta kk, below the diagonal
  dreads = _einsum("xiv,xkv->xik", dtargets, before)
  dk_in = -chunks.beta * dreads
  dq_in = _einsum("xiv,xkv->xik", do, before)
  dk_out = _einsum("xiv,xkv->xik", writes, dafter)
  dbeta = jnp.sum(dtargets * chunks.v, -1) - jnp.sum(dreads * m.k_in, -1) + jnp.sum(dsystem * m.pairs.kk, -1)
  dend = jnp.sum(dafter * before, -1) * m.end_decay[..., 0]
  size = chunks.q.shape[1]
  last = jnp.arange(size)[:, None] == size - 1
  dbefore_sum = dq_in * m.q_in + dk_in * m.k_in + jnp.where(last, dend[:, None], 0)
  dpairs = _decay.Pairs(_einsum("xiv,xjv->xij", do, writes), chunks.beta * dsystem)
  dsums = _decay.Sums(dbefore_sum, dk_out * m.k_out)
  local = _decay.pull_pair_matrices(chunks.q, chunks.k, m.levels, dpairs, dsums)
  start_decay, rest_decay = jnp.exp(m.levels[-1].before), jnp.exp(m.levels[-1].after)
  return _Chunks(
      q=local.q + dq_in * start_decay,
      k=local.k + dk_in * start_decay + dk_out * rest_decay,
      v=chunks.beta * dtargets,
      g=local.g,
      beta=dbeta[..., None],
  )


def _backward(prepared: Prepared, segments: Segments, starts, initial_state, do, dfinal, options: Options):
  """The backward pass, as `_vjp.differentiable` wants it: group by group from the end, each computed again."""
  layout = _Layout.of(prepared, options)
  table = _table(segments, layout)
  dstate, dinitial = jnp.zeros_like(starts[0]), None
  if table is not None:
    dinitial = jnp.zeros_like(initial_state)
  elif dfinal is not None:
    dstate = dfinal.reshape(dstate.shape)

  def step(carry, group):
    chunks, entries, start, do = group
    m = _matrices(chunks)
    do = options.scale * do
    _, before, writes = _run_states(start, m, layout, entries, initial_state, None)
    carry, dafter, dwrites = _pull_states(carry[0], m, do, layout, entries, dfinal, carry[1])
    return carry, _pull_chunks(chunks, m, before, writes, do, dafter, dwrites)

  groups = _split_inputs(prepared, segments, layout), table, starts, layout.split(do)
  (dstate, dinitial), grads = lax.scan(step, (dstate, dinitial), groups, reverse=True)
  dq, dk, dv, dg, dbeta = (layout.merge(x) for x in grads)
  dprepared = Prepared(dq, dk, dv, dg, dbeta[..., 0])
  if initial_state is None:
    return dprepared, None
  return dprepared, dinitial if table is not None else dstate.reshape(initial_state.shape)


kda = _vjp.differentiable(_forward, _backward)
