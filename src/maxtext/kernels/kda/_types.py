# SPDX-License-Identifier: Apache-2.0
"""What the entry hands to an implementation of Kimi Delta Attention.

Letters: B rows, T tokens, H heads, K key channels, V value channels, C tokens of a chunk, N chunks of a row.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax

Gate = Literal["log", "softplus", "sigmoid"]


class Inputs(NamedTuple):
  """The arrays as the caller gave them, bfloat16, float32 or float64.

  q, k, g: [B, T, H, K]; v: [B, T, H, V]; beta: [B, T, H]; A_log: [H] or None; dt_bias: [H * K] or None.
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  g: jax.Array
  beta: jax.Array
  A_log: jax.Array | None = None
  dt_bias: jax.Array | None = None


class Prepared(NamedTuple):
  """What the chunk arithmetic sees: float32, or float64 where the inputs are; zeros at padding; T a multiple of C.

  q, k: [B, T, H, K], normalised if asked for, q without the output scale; v: [B, T, H, V]; g: [B, T, H, K], the log
  decay, at most 0; beta: [B, T, H].
  """

  q: jax.Array
  k: jax.Array
  v: jax.Array
  g: jax.Array
  beta: jax.Array


class Segments(NamedTuple):
  """Where the documents of packed rows lie. All None: each row is one document.

  ids: int32 [B, T], at least 0, and never falls within a row. Padding carries the id of the segment before it, leading
    padding that of the first segment.
  real: bool [B, T], False at padding.
  slots: int32 [B, N], only where every chunk holds one segment: the entry of the state table that each chunk belongs to.
    At the first chunk of a slot the state is the table's initial state, after its last chunk it is the slot's final
    state.
    None: row b starts from entry b, in its first segment, and ends with the state of its last segment.
  """

  ids: jax.Array | None = None
  real: jax.Array | None = None
  slots: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class Options:
  """What is known when the computation is traced.

  scale: factor of the outputs.
  l2norm: normalise q and k.
  gate: what g is: the log decay itself ("log"), or the input of the softplus or of the bounded ("sigmoid") gate.
  lower_bound: the bound of the "sigmoid" gate, negative.
  chunk_size: C, tokens that are computed together.
  output_final_state: whether the final states are wanted.
  """

  scale: float
  l2norm: bool = False
  gate: Gate = "log"
  lower_bound: float | None = None
  chunk_size: int = 64
  output_final_state: bool = False
