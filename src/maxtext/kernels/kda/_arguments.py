# SPDX-License-Identifier: Apache-2.0
"""Checks of the entry's arguments, when the computation is traced."""

import jax
import jax.numpy as jnp
import numpy as np

from maxtext.kernels.kda._types import Gate, Inputs

IMPLEMENTATIONS = ("pallas", "xla", "tokamax", "tops", "reference")


def _expect(name: str, array: jax.Array, expected: tuple[int, ...], letters: str, because: str) -> None:
  if tuple(array.shape) != expected:
    raise ValueError(f"{name} has shape {tuple(array.shape)}; {because} needs {letters} = {expected}.")


def check_inputs(inputs: Inputs) -> None:
  """Shapes and dtypes of the arrays.

  Raises:
    ValueError: a shape does not fit the others, or a dtype is not a floating type.
  """
  q = inputs.q
  if q.ndim != 4 or 0 in q.shape:
    raise ValueError(f"q has shape {tuple(q.shape)}; it needs four axes [B, T, H, K], none of length 0.")
  batch, length, heads, width = q.shape
  because = f"q of shape {tuple(q.shape)}"
  _expect("k", inputs.k, tuple(q.shape), "[B, T, H, K]", because)
  _expect("g", inputs.g, tuple(q.shape), "[B, T, H, K]", because)
  _expect("beta", inputs.beta, (batch, length, heads), "[B, T, H]", because)
  v = inputs.v
  if v.ndim != 4 or tuple(v.shape[:3]) != (batch, length, heads) or v.shape[3] == 0:
    raise ValueError(f"v has shape {tuple(v.shape)}; {because} needs [B, T, H, V] = {(batch, length, heads)} and V > 0.")
  if inputs.A_log is not None:
    _expect("A_log", inputs.A_log, (heads,), "[H]", because)
  if inputs.dt_bias is not None:
    _expect("dt_bias", inputs.dt_bias, (heads * width,), "[H * K]", because)
  for name, array in inputs._asdict().items():
    if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
      raise ValueError(f"{name} has dtype {array.dtype}; a floating dtype is needed (bfloat16, float32).")


def gate_of(inputs: Inputs, use_gate_in_kernel: bool, safe_gate: bool, lower_bound: float | None) -> Gate:
  """Which gate the arguments ask for.

  Raises:
    ValueError: they contradict each other.
  """
  if lower_bound is not None and not safe_gate:
    raise ValueError(
        f"lower_bound is {lower_bound} and safe_gate is False; set safe_gate to True, or lower_bound to None."
    )
  if not use_gate_in_kernel:
    if inputs.A_log is not None or inputs.dt_bias is not None:
      given = "A_log" if inputs.A_log is not None else "dt_bias"
      raise ValueError(f"{given} is given and use_gate_in_kernel is False; set it to True, or pass g as the log decay.")
    return "log"
  if inputs.A_log is None:
    heads = inputs.q.shape[2]
    raise ValueError(f"use_gate_in_kernel is True and A_log is None; pass A_log of shape [H] = ({heads},).")
  if not safe_gate:
    return "softplus"
  if lower_bound is None or not -float(np.finfo(np.float32).max) < lower_bound < 0:
    raise ValueError(
        f"safe_gate is True and lower_bound is {lower_bound}; a finite negative number is needed (Ling 3: -5)."
    )
  return "sigmoid"


def check_chunk_size(chunk_size: int) -> None:
  """Raises ValueError unless the chunk size is a power of two from 16 on."""
  if not isinstance(chunk_size, int) or chunk_size < 16 or chunk_size & (chunk_size - 1):
    raise ValueError(f"chunk_size is {chunk_size}; a power of two from 16 on is needed (64).")


def check_segments(inputs: Inputs, segment_ids: jax.Array | None, cu_seqlens: jax.Array | None) -> None:
  """Shape, dtype and, where the values are known, order of the segment argument.

  Raises:
    ValueError: both forms are given, or one that does not fit q, or falling offsets.
  """
  q = inputs.q
  if segment_ids is not None and cu_seqlens is not None:
    raise ValueError(
        f"segment_ids of shape {tuple(segment_ids.shape)} and cu_seqlens of shape {tuple(cu_seqlens.shape)} are both "
        "given; pass one of them."
    )
  if segment_ids is not None:
    _expect("segment_ids", segment_ids, tuple(q.shape[:2]), "[B, T]", f"q of shape {tuple(q.shape)}")
    _check_integers("segment_ids", segment_ids)
  if cu_seqlens is not None:
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2:
      raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; [N + 1] for N >= 1 segments is needed.")
    if q.shape[0] != 1:
      raise ValueError(
          f"cu_seqlens is given with q of shape {tuple(q.shape)}; it needs B = 1 (flatten the rows into one)."
      )
    _check_integers("cu_seqlens", cu_seqlens)
    _check_offsets(cu_seqlens, q.shape[1])


def _check_integers(name: str, array: jax.Array) -> None:
  if not jnp.issubdtype(array.dtype, jnp.integer):
    raise ValueError(f"{name} has dtype {array.dtype}; an integer dtype is needed (int32).")


def _check_offsets(cu_seqlens: jax.Array, length: int) -> None:
  """Order of offsets whose values are known: not those of an outer jit, and not those marked as overflowed."""
  if isinstance(cu_seqlens, jax.core.Tracer):
    return
  offsets = np.asarray(cu_seqlens).astype(np.int64)  # unsigned offsets that fall would wrap
  if offsets[-1] < 0:
    return
  if offsets[0] != 0 or (np.diff(offsets) < 0).any() or offsets[-1] > length:
    raise ValueError(
        f"cu_seqlens is {offsets.tolist()}; offsets that begin with 0, never fall and end at most at T = {length} are "
        "needed."
    )


def check_state(inputs: Inputs, initial_state: jax.Array | None, cu_seqlens: jax.Array | None) -> None:
  """Raises ValueError unless initial_state is None or [H, K, V] for each row, or for each segment of cu_seqlens."""
  if initial_state is None:
    return
  count, letter = inputs.q.shape[0], "B"
  if cu_seqlens is not None:
    count, letter = cu_seqlens.shape[0] - 1, "N"
  expected = (count, inputs.q.shape[2], inputs.q.shape[3], inputs.v.shape[3])
  _expect("initial_state", initial_state, expected, f"[{letter}, H, K, V]", f"q of shape {tuple(inputs.q.shape)}")
  if not jnp.issubdtype(initial_state.dtype, jnp.floating):
    raise ValueError(f"initial_state has dtype {initial_state.dtype}; a floating dtype is needed (float32).")
