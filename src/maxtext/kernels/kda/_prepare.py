# SPDX-License-Identifier: Apache-2.0
"""From the caller's arrays to what the chunk arithmetic sees: gate, norm, padding, in float32 or wider."""

import jax
import jax.numpy as jnp

from maxtext.kernels.kda._types import Gate, Inputs, Options, Prepared, Segments

_NORM_EPSILON = 1e-6
# exp(A_log) is held below this power of e: larger rates saturate the gate all the same, and infinity times zero is NaN.
MAX_A_LOG = 80.0


def compute_dtype(*arrays: jax.Array) -> jnp.dtype:
  """float32, or float64 if one of the arrays is."""
  return jnp.promote_types(jnp.float32, jnp.result_type(*arrays))


@jax.custom_vjp
def l2_normalize(x: jax.Array, real: jax.Array | None = None) -> jax.Array:
  """x / sqrt(sum x^2 + 1e-6) over the last axis, in x's dtype: float32 or wider. A zero vector stays zero.

  Args:
    x: [..., K].
    real: bool [..., 1] or None. Where it is False, the result and the gradient are zero whatever x is. The VJP is by
      hand, so that this costs no pass over x of its own.
  """
  return _keep(x * _inverse_norm(x, real), real)


def _inverse_norm(x: jax.Array, real: jax.Array | None) -> jax.Array:
  return jax.lax.rsqrt(_keep(jnp.sum(x * x, axis=-1, keepdims=True), real) + _NORM_EPSILON)


def _keep(x: jax.Array, real: jax.Array | None) -> jax.Array:
  return x if real is None else jnp.where(real, x, jnp.zeros((), x.dtype))


def _l2_normalize_fwd(x, real):
  return l2_normalize(x, real), (x, real)


def _l2_normalize_bwd(saved, dy):
  x, real = saved
  inverse = _inverse_norm(x, real)
  along = jnp.sum(dy * x, axis=-1, keepdims=True)
  return _keep(inverse * (dy - x * (along * inverse * inverse)), real), None


l2_normalize.defvjp(_l2_normalize_fwd, _l2_normalize_bwd)


def log_decay(
    g: jax.Array, A_log: jax.Array | None, dt_bias: jax.Array | None, gate: Gate, lower_bound: float | None
) -> jax.Array:
  """The log decay of the gate's input.

  Args:
    g: [..., H, K], float32 or wider.
    A_log: [H], the logarithm of the decay rate.
    dt_bias: [H * K] or None, added to g.
    gate: "log" gives g itself; "softplus" gives -exp(A_log) * softplus(g + dt_bias); "sigmoid" gives
      lower_bound * sigmoid(exp(A_log) * (g + dt_bias)).
    lower_bound: negative, of the "sigmoid" gate.

  Returns:
    [..., H, K] in g's dtype, at most 0.
  """
  if gate == "log":
    return g
  assert A_log is not None
  if dt_bias is not None:
    g = g + dt_bias.astype(g.dtype).reshape(g.shape[-2:])
  rate = jnp.exp(jnp.minimum(A_log.astype(g.dtype), MAX_A_LOG))[:, None]
  if gate == "softplus":
    return -rate * jax.nn.softplus(g)
  assert lower_bound is not None
  return lower_bound * jax.nn.sigmoid(rate * g)


def pad_tokens(x: jax.Array, chunk_size: int, mode: str = "constant") -> jax.Array:
  """[B, T, ...] with T grown to a multiple of the chunk size, by zeros or (mode="edge") by the last token's value."""
  missing = -x.shape[1] % chunk_size
  if not missing:
    return x
  return jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2), mode=mode)


def pad_segments(segments: Segments, chunk_size: int) -> Segments:
  """Segments of the padded tokens, which are padding of the row's last segment."""
  ids, real, slots = segments
  return Segments(
      ids if ids is None else pad_tokens(ids, chunk_size, "edge"),
      real if real is None else pad_tokens(real, chunk_size),
      slots,
  )


def prepare(inputs: Inputs, segments: Segments, options: Options) -> Prepared:
  """Casts, zeroes padding, normalises q and k, applies the gate, and pads T to a multiple of the chunk size.

  Args:
    inputs: as the caller gave them.
    segments: of the same tokens.
    options: which steps to take.

  Returns:
    Arrays in float32, or in float64 if one of q, k, v is.
  """
  dtype = compute_dtype(inputs.q, inputs.k, inputs.v)
  q, k, v, g, beta = (x.astype(dtype) for x in inputs[:5])
  real = None if segments.real is None else segments.real[:, :, None]
  real_heads = None if real is None else real[..., None]
  # Zeroed within the norm and before the gate, so that whatever stands at padding gives no NaN in their gradients.
  if options.l2norm:
    q, k = l2_normalize(q, real_heads), l2_normalize(k, real_heads)
  else:
    q, k = _keep(q, real_heads), _keep(k, real_heads)
  v, g, beta = _keep(v, real_heads), _keep(g, real_heads), _keep(beta, real)
  if options.gate != "log":
    g = _keep(log_decay(g, inputs.A_log, inputs.dt_bias, options.gate, options.lower_bound), real_heads)
  return Prepared(*(pad_tokens(x, options.chunk_size) for x in (q, k, v, g, beta)))


# The log decay of a segment's first token, as good as minus infinity: sums of 2**20 of them are finite, and exp gives 0.
BORDER = -1e30


def mark_borders(g: jax.Array, segments: Segments) -> jax.Array:
  """The log decay with the state wiped out at every border: BORDER at the first token of each segment but a row's first.

  The exponential of any sum over a border is then exactly zero, so chunk arithmetic that takes its exponents as sums
  needs no other mask. With `slots` nothing is marked: there the state is set at the segment's first chunk.

  Args:
    g: [B, T, H, K], float32 or wider.
    segments: of the same tokens.
  """
  if segments.ids is None or segments.slots is not None:
    return g
  starts = jnp.pad(segments.ids[:, 1:] != segments.ids[:, :-1], ((0, 0), (1, 0)))
  return jnp.where(starts[:, :, None, None], jnp.asarray(BORDER, g.dtype), g)
