# SPDX-License-Identifier: Apache-2.0
"""The short convolution in front of a linear attention: depthwise, causal, within a document."""

import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from maxtext.kernels.kda import context


class ShortConvolution(nnx.Module):
  """Each channel is mixed with its own last few tokens, of the same row and segment. No bias, no activation.

  Attributes:
    kernel: [kernel_size, *channels], the taps oldest to newest as in torch's Conv1d: kernel[-1] multiplies the token
      itself (torch's weight [D, 1, kernel_size] is its transpose).
  """

  def __init__(
      self,
      channels: int | tuple[int, ...],
      kernel_size: int = 4,
      *,
      dtype: Any = None,
      weight_dtype: Any = jnp.float32,
      kernel_axes: tuple[str | None, ...] = (),
      rngs: nnx.Rngs,
  ):
    """Makes the taps: uniform within kernel_size ** -0.5, as torch does.

    Args:
      channels: D, or the sizes of several axes of channels (heads, head_dim).
      kernel_size: how many tokens are seen, itself included.
      dtype: of the output; the input's if None. Sums are float32 or wider.
      weight_dtype: of the taps.
      kernel_axes: logical axes of the taps.
      rngs: the stream "params" is used.
    """
    shape = (kernel_size, channels) if isinstance(channels, int) else (kernel_size, *channels)
    bound = kernel_size**-0.5
    taps = jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound).astype(weight_dtype)
    self.kernel = nnx.Param(taps, sharding=kernel_axes)
    self.dtype = dtype

  def __call__(
      self,
      x: jax.Array,
      segment_ids: jax.Array | None = None,
      axis_name: context.AxisName | None = None,
  ) -> jax.Array:
    """Convolves x [B, T, D]; see `short_convolution`."""
    return short_convolution(x, self.kernel[...], segment_ids, axis_name=axis_name, dtype=self.dtype)


def short_convolution(
    x: jax.Array,
    kernel: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    axis_name: context.AxisName | None = None,
    dtype: Any = None,
) -> jax.Array:
  """Depthwise causal convolution over the tokens of each row.

  One pass over x forwards, and one over x and the cotangent backwards: the shifted copies are slices of one padded array,
  which XLA reads in place. What is kept for the backward pass is x.

  Args:
    x: [B, T, *channels].
    kernel: [taps, *channels], oldest to newest.
    segment_ids: integer [B, T]. A tap reaches back only over tokens of the same positive id; at padding (0) the output is
      0, and padding reaches no real token. None: rows are one segment.
    axis_name: inside shard_map, the mesh axes over which T is sharded, in the order of the tokens.
    dtype: of the output; x's if None.

  Returns:
    [B, T, *channels] in dtype.

  Raises:
    ValueError: shapes that do not fit one another.
  """
  if x.ndim < 3 or kernel.shape[1:] != x.shape[2:]:
    raise ValueError(f"x has shape {x.shape} and kernel {kernel.shape}; [B, T, D] and [taps, D] are needed.")
  if segment_ids is not None and segment_ids.shape != x.shape[:2]:
    raise ValueError(f"segment_ids has shape {segment_ids.shape}; [B, T] = {x.shape[:2]} is needed.")
  reach = kernel.shape[0] - 1
  halo = None
  ids = segment_ids
  if axis_name is not None and reach:
    halo = context.left_halo(x, reach, axis_name)
    ids = None if ids is None else jnp.concatenate([context.left_halo(ids, reach, axis_name), ids], axis=1)
  elif ids is not None:
    ids = jnp.pad(ids, ((0, 0), (reach, 0)))
  count = None if ids is None else _taps_in_reach(ids, kernel.shape[0])
  return _convolve(x, halo, kernel, count, jnp.dtype(x.dtype if dtype is None else dtype))


def _taps_in_reach(ids: jax.Array, taps: int) -> jax.Array:
  """How many taps of each token lie in its segment, int32 [B, T]: 0 at padding. ids is [B, taps - 1 + T]."""
  length = ids.shape[1] - taps + 1
  own = ids[:, taps - 1 :]
  alive = own != 0
  count = alive.astype(jnp.int32)
  for distance in range(1, taps):
    alive = alive & (ids[:, taps - 1 - distance : taps - 1 - distance + length] == own)
    count += alive
  return count


def _pad(x: jax.Array, left: int, right: int) -> jax.Array:
  return jnp.pad(x, ((0, 0), (left, right)) + ((0, 0),) * (x.ndim - 2))


def _before(x: jax.Array, halo: jax.Array | None, reach: int) -> jax.Array:
  """x with the `reach` positions before it."""
  return _pad(x, reach, 0) if halo is None else jnp.concatenate([halo, x], axis=1)


def _where_reached(count: jax.Array | None, distance: int, x: jax.Array) -> jax.Array:
  """x where the tap at a distance lies in the token's segment, else 0."""
  if count is None:
    return x
  return jnp.where((count > distance).reshape(count.shape + (1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _convolve(x, halo, kernel, count, dtype):
  taps, length = kernel.shape[0], x.shape[1]
  wide = jnp.promote_types(jnp.float32, x.dtype)
  extended = _before(x, halo, taps - 1)
  total = jnp.zeros((), wide)
  for distance in range(taps):
    first = taps - 1 - distance
    product = extended[:, first : first + length].astype(wide) * kernel[first].astype(wide)
    total = total + _where_reached(count, distance, product)
  return total.astype(dtype)


def _convolve_fwd(x, halo, kernel, count, dtype):
  return _convolve(x, halo, kernel, count, dtype), (x, halo, kernel, count)


def _convolve_bwd(dtype, saved, dy):
  del dtype
  x, halo, kernel, count = saved
  taps, length = kernel.shape[0], x.shape[1]
  wide = jnp.promote_types(jnp.float32, x.dtype)
  dy = dy.astype(wide)
  extended = _before(x, halo, taps - 1)
  # Position e of what was read got dy from the tokens e, e + 1, ...; without a halo the first taps - 1 are not wanted.
  wanted = length if halo is None else length + taps - 1
  padding = (wanted - length, taps - 1)
  after = _pad(dy, *padding)
  reached = None if count is None else _pad(count, *padding)
  dread, dkernel = jnp.zeros((), wide), []
  for distance in range(taps):
    part = slice(distance, distance + wanted)
    given = after[:, part] * kernel[taps - 1 - distance].astype(wide)
    dread = dread + _where_reached(None if reached is None else reached[:, part], distance, given)
    first = taps - 1 - distance
    product = dy * extended[:, first : first + length].astype(wide)
    dkernel.append(jnp.sum(_where_reached(count, distance, product), axis=(0, 1)))
  dread = dread.astype(x.dtype)
  dkernel = jnp.stack(dkernel[::-1]).astype(kernel.dtype)
  if halo is None:
    return dread, None, dkernel, None
  return dread[:, taps - 1 :], dread[:, : taps - 1], dkernel, None


_convolve.defvjp(_convolve_fwd, _convolve_bwd)
