# SPDX-License-Identifier: Apache-2.0
"""From projections to mixed tokens: convolutions, activation and kernel, on the tokens of one device."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxtext.kernels import kda
from maxtext.kernels.kda import context
from maxtext.layers._kda_segments import segment_ids_to_cu_seqlens
from maxtext.layers._short_convolution import short_convolution

_FLATTENED = ("tokamax", "tops")


class MixerArrays(NamedTuple):
  """What is mixed, and with which parameters; also, of the same form, how each is sharded.

  q, k, v, f: [B, T, H, D], projections of the tokens; f is the gate's.
  beta: [B, T, H], float32.
  q_taps, k_taps, v_taps: [taps, H, D], of the convolutions.
  A_log: [H], float32.
  dt_bias: [H * D], float32.
  segment_ids: int32 [B, T], or None: rows are one segment.
  """

  q: Any
  k: Any
  v: Any
  f: Any
  beta: Any
  q_taps: Any
  k_taps: Any
  v_taps: Any
  A_log: Any
  dt_bias: Any
  segment_ids: Any


@dataclasses.dataclass(frozen=True)
class Mixer:
  """Mixes the tokens of one device; inside `jax.shard_map` where there are several.

  Attributes:
    implementation: of the kernel, resolved.
    lower_bound: of the safe gate; None for the softplus gate.
    max_segments: room for segments of all B rows, for kernels that need it.
    axis_name: the mesh axes over which T is sharded, () for none.
    dtype: of what the kernel gets.
  """

  implementation: kda.Implementation
  lower_bound: float | None
  max_segments: int
  axis_name: tuple[str, ...]
  dtype: Any

  def __call__(self, arrays: MixerArrays) -> jax.Array:
    """Returns o [B, T, H, D] in `dtype`, zero at padding."""
    q, k, v = (
        self._convolve(x, taps, arrays.segment_ids)
        for x, taps in ((arrays.q, arrays.q_taps), (arrays.k, arrays.k_taps), (arrays.v, arrays.v_taps))
    )
    keywords: dict[str, Any] = {
        "A_log": arrays.A_log,
        "dt_bias": arrays.dt_bias,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "safe_gate": self.lower_bound is not None,
        "lower_bound": self.lower_bound,
        "implementation": self.implementation,
    }
    ids = arrays.segment_ids
    if self.axis_name:
      return context.chunk_kda(q, k, v, arrays.f, arrays.beta, axis_name=self.axis_name, segment_ids=ids, **keywords)
    if ids is not None and self.implementation in _FLATTENED:
      return self._flattened(q, k, v, arrays.f, arrays.beta, ids, keywords)
    return kda.chunk_kda(q, k, v, arrays.f, arrays.beta, segment_ids=ids, **keywords)[0]

  def _convolve(self, x: jax.Array, taps: jax.Array, ids: jax.Array | None) -> jax.Array:
    # Computed again in the backward pass, so that the projection alone is kept. The activation sees the float32 sum.
    @jax.checkpoint
    def run(x, taps):
      wide = jnp.promote_types(jnp.float32, x.dtype)
      return jax.nn.silu(short_convolution(x, taps, ids, axis_name=self.axis_name or None, dtype=wide)).astype(self.dtype)

    return run(x, taps)

  def _flattened(self, q, k, v, f, beta, ids, keywords) -> jax.Array:
    """Rows laid end to end, with the offsets of their segments; what stands at padding must change no state."""
    cu_seqlens = segment_ids_to_cu_seqlens(ids, self.max_segments)
    real = ids != 0

    def flat(x, zero: bool):
      if zero:
        x = jnp.where(real.reshape(real.shape + (1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))
      return x.reshape(1, -1, *x.shape[2:])

    o, _ = kda.chunk_kda(
        flat(q, False), flat(k, True), flat(v, True), flat(f, False), flat(beta, True), cu_seqlens=cu_seqlens, **keywords
    )
    # Not a product: at padding NaN, which marks too many segments, must not reach the norm of a token that has no loss.
    return jnp.where(real[..., None, None], o.reshape(v.shape), jnp.zeros((), o.dtype))
