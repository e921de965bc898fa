# SPDX-License-Identifier: Apache-2.0
"""KDA over rows whose tokens are sharded over a mesh axis (sequence or context parallelism).

For use inside `jax.shard_map(..., check_vma=False)`: each device holds equally many consecutive tokens of every row, in
the order of the axis: one of the mesh, or a tuple of them with the slowest first, as in a PartitionSpec. Tokens stay
where they are; what travels is one map of states per shard, and the taps of a convolution.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from maxtext.kernels import kda

AxisName = str | tuple[str, ...]


def left_halo(x: jax.Array, width: int, axis_name: AxisName) -> jax.Array:
  """Returns the `width` positions before this shard's first one.

  Args:
    x: [B, T, ...], this shard's positions.
    width: how many positions, at most T.
    axis_name: the axis (or tuple of axes) over which T is sharded.

  Returns:
    [B, width, ...] in x's dtype: the last positions of the shard before, zeros on the first shard. Differentiable.

  Raises:
    ValueError: width is negative or larger than T, since positions would then come from more than one shard.
  """
  length = x.shape[1]
  if not 0 <= width <= length:
    raise ValueError(
        f"left_halo takes {width} positions from the shard before, but a shard of {axis_name!r} holds {length} (x has"
        f" shape {x.shape}); shard over fewer devices or use longer rows."
    )
  return _from_left(x[:, length - width :], 1, axis_name)


def chunk_kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    axis_name: AxisName,
    segment_ids: jax.Array | None = None,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    chunk_size: int = 64,
    implementation: kda.Implementation = "auto",
) -> jax.Array:
  """KDA of this shard's tokens; together the shards give what `maxtext.kernels.kda.chunk_kda` gives for the whole rows.

  The recurrence is affine in the state that comes in. One call on the local tokens, with K more value columns that are
  zero and the initial state [0 | I], gives the outputs from a zero state, what an incoming state adds to them, and the
  map from the incoming to the outgoing state. The maps are composed over the axis in ceil(log2(size - 1)) + 1 exchanges,
  and each shard's incoming state completes its outputs. A segment may cross any number of shards, and a shard may hold
  padding only.

  Cost: the chunk arithmetic on V + K value columns instead of V, and float32 arrays of [B, T, H, V + K] (T local) for v
  and o, kept for the backward pass unless the caller rematerialises. Two passes, states first and then outputs from them,
  have the same columns in the first pass and make the chunks' matrices again for V columns in the second; they save the
  wide o. An exchange carries [B, H, K, K + V] in float32; memory does not grow with the axis. On an axis of one device
  this is the one-device call.

  Args:
    q, k, g: [B, T, H, K], this shard's.
    v: [B, T, H, V].
    beta: [B, T, H].
    axis_name: the axis (or tuple of axes) over which T is sharded.
    segment_ids: [B, T] int32, this shard's part of the row's ids, 0 for padding. None: rows are one segment.
    A_log, dt_bias, scale, use_qk_l2norm_in_kernel, use_gate_in_kernel, safe_gate, lower_bound, chunk_size: as in the
      entry; A_log [H] and dt_bias [H * K] are the same on every shard of the axis.
    implementation: as in the entry; one that takes `initial_state` together with segment ids.

  Returns:
    [B, T, H, V] in v's dtype, this shard's. There is no initial or final state of a row.

  Raises:
    ValueError: as the entry does.
  """
  call = {
      "A_log": A_log,
      "dt_bias": dt_bias,
      "scale": scale,
      "use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel,
      "use_gate_in_kernel": use_gate_in_kernel,
      "safe_gate": safe_gate,
      "lower_bound": lower_bound,
      "segment_ids": segment_ids,
      "chunk_size": chunk_size,
      "implementation": implementation,
  }
  if lax.axis_size(axis_name) == 1:
    return kda.chunk_kda(q, k, v, g, beta, **call)[0]

  (batch, _, heads, keys), values = q.shape, v.shape[-1]
  dtype = jnp.promote_types(v.dtype, jnp.float32)  # parts of a sum, so not to be rounded to bfloat16
  wide = jnp.pad(v.astype(dtype), ((0, 0), (0, 0), (0, 0), (0, keys)))
  identity = jnp.broadcast_to(jnp.eye(keys, values + keys, values, dtype), (batch, heads, keys, values + keys))
  o, final = kda.chunk_kda(q, k, wide, g, beta, initial_state=identity, output_final_state=True, **call)
  assert final is not None

  own = _StateMap(_continues(segment_ids, axis_name), final[..., values:], final[..., :values])
  state = _incoming_state(own, axis_name)
  return (o[..., :values] + _product("bthk,bhkv->bthv", o[..., values:], state)).astype(v.dtype)


class _StateMap(NamedTuple):
  """What a stretch of tokens does to the state before it: S becomes `keep` @ S + `add`, with S = 0 unless `continues`."""

  continues: jax.Array | None  # bool [B], whether the first token goes on with the segment before it; None: always
  keep: jax.Array  # [B, H, K, K]
  add: jax.Array  # [B, H, K, V]


def _continues(segment_ids: jax.Array | None, axis_name: AxisName) -> jax.Array | None:
  """Whether each row's first token here belongs to the segment of the last one on the shard before, bool [B].

  As in the entry, a token after padding starts a segment, whatever its id: no state goes beyond padding.
  """
  if segment_ids is None:
    return None
  first = segment_ids[:, 0]
  return (first != 0) & (first == left_halo(segment_ids, 1, axis_name)[:, 0])


def _incoming_state(own: _StateMap, axis_name: AxisName) -> jax.Array:
  """The state [B, H, K, V] before this shard's first token, from the maps of all shards before it."""
  # Zeros come from beyond the first shard: the map to the state zero that every row starts with.
  before = _from_left(own, 1, axis_name)
  reach = 1
  while reach < lax.axis_size(axis_name) - 1:
    before = _compose(_from_left(before, reach, axis_name), before)
    reach *= 2
  return _reaching(before, own).add


def _compose(left: _StateMap, right: _StateMap) -> _StateMap:
  """The map of two neighbouring stretches. Associative, so the maps of a row can be joined in any grouping."""
  left = _reaching(left, right)
  keep = _product("bhkl,bhlm->bhkm", right.keep, left.keep)
  add = _product("bhkl,bhlv->bhkv", right.keep, left.add) + right.add
  return _StateMap(left.continues, keep, add)


def _reaching(left: _StateMap, right: _StateMap) -> _StateMap:
  """`left`, with the map to zero in rows where `right` starts a segment."""
  if right.continues is None:
    return left
  same = right.continues[:, None, None, None]
  return left._replace(keep=jnp.where(same, left.keep, 0), add=jnp.where(same, left.add, 0))


def _from_left(tree, distance: int, axis_name: AxisName):
  """The arrays of the shard `distance` before this one; zeros where there is none."""
  pairs = [(shard, shard + distance) for shard in range(lax.axis_size(axis_name) - distance)]
  return jax.tree.map(lambda x: lax.ppermute(x, axis_name, pairs), tree)


def _product(equation: str, left: jax.Array, right: jax.Array) -> jax.Array:
  return jnp.einsum(equation, left, right, precision=lax.Precision.HIGHEST)
