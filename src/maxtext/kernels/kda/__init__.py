# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention: one entry, `chunk_kda`, over several implementations.

`reference` is the recurrence and the definition. `xla` computes chunks in pure JAX on any backend, `pallas` in TPU
kernels: both take packed rows as they are. `tokamax` and `tops` are adapters to other libraries' kernels.
"""

import importlib
from typing import Literal

from absl import logging
import jax
import jax.numpy as jnp

from maxtext.kernels.kda import _arguments, _platform, _segments
from maxtext.kernels.kda._types import Inputs, Options, Segments

Implementation = Literal["auto", "pallas", "xla", "tokamax", "tops", "reference"]

_logged: set[str] = set()  # implementations whose choice was logged

__all__ = ["Implementation", "chunk_kda", "resolve_implementation"]


def chunk_kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    *,
    A_log: jax.Array | None = None,
    dt_bias: jax.Array | None = None,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    segment_ids: jax.Array | None = None,
    cu_seqlens: jax.Array | None = None,
    chunk_size: int = 64,
    implementation: Implementation = "auto",
) -> tuple[jax.Array, jax.Array | None]:
  """Kimi Delta Attention over rows that may hold several documents.

  Arguments and their names are those of flash-linear-attention's `chunk_kda`; `segment_ids` and `implementation` are
  added.

  Args:
    q: [B, T, H, K], bfloat16 or float32, T >= 1. Arithmetic is float32 (float64 with float64 inputs).
    k: [B, T, H, K].
    v: [B, T, H, V].
    g: [B, T, H, K], the log decay, at most 0; with use_gate_in_kernel the gate's input.
    beta: [B, T, H], the step size, between 0 and 1.
    A_log: [H], the gate's log rate; needed with use_gate_in_kernel.
    dt_bias: [H * K], added to the gate's input.
    scale: factor of the outputs; K ** -0.5 if None.
    initial_state: [B, H, K, V], the state that each row's first segment starts from; [N, H, K, V] with cu_seqlens, one
      for each segment. Zeros if None.
    output_final_state: return the state after each row's last segment, or after each segment of cu_seqlens.
    use_qk_l2norm_in_kernel: normalise q and k over K, with 1e-6 added to the sum of squares.
    use_gate_in_kernel: g is the gate's input: g <- -exp(A_log) * softplus(g + dt_bias).
    safe_gate: with use_gate_in_kernel, g <- lower_bound * sigmoid(exp(A_log) * (g + dt_bias)). Without it, a promise that
      g is above lower_bound, which only tokamax needs.
    lower_bound: negative; the bound of the safe gate.
    segment_ids: integer [B, T]; 0 is padding (zero output, no influence), any other change of value starts a document. A
      row's start is always a border. There is no maximum, and no cost.
    cu_seqlens: integer [N + 1], B = 1: the offsets of the segments in the row, 0 first. Empty segments are allowed;
      tokens after the last offset are padding. A last offset of -1 (more segments than places) gives NaN, and so do
      offsets that fall, do not begin with 0, or end after T. With states, the row is copied so that every segment starts
      at a chunk.
    chunk_size: tokens that are computed together, a power of two from 16 on.
    implementation: "auto" (pallas on a TPU, xla elsewhere), "pallas", "xla", "tokamax", "tops" or "reference".

  Returns:
    o [B, T, H, V] in v's dtype, and the final state (float32) in initial_state's shape, or None.

  Raises:
    ValueError: shapes, dtypes or arguments that do not fit, or that the implementation cannot do, when traced.
  """
  inputs = Inputs(q, k, v, g, beta, A_log, dt_bias)
  _arguments.check_inputs(inputs)
  _arguments.check_segments(inputs, segment_ids, cu_seqlens)
  _arguments.check_state(inputs, initial_state, cu_seqlens)
  _arguments.check_chunk_size(chunk_size)
  options = Options(
      scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
      l2norm=use_qk_l2norm_in_kernel,
      gate=_arguments.gate_of(inputs, use_gate_in_kernel, safe_gate, lower_bound),
      lower_bound=lower_bound if safe_gate else None,
      chunk_size=chunk_size,
      output_final_state=output_final_state,
  )
  if cu_seqlens is not None:
    cu_seqlens = jnp.asarray(cu_seqlens, jnp.int32)  # differences of unsigned or narrow offsets would wrap
  name = resolve_implementation(implementation)
  if name in ("tokamax", "tops"):
    external = importlib.import_module("maxtext.kernels.kda.external")
    adapter = getattr(external, f"{name}_kda")
    return adapter(inputs, segment_ids=segment_ids, cu_seqlens=cu_seqlens, initial_state=initial_state, options=options)
  kda = importlib.import_module(f"maxtext.kernels.kda.{name}").kda
  if cu_seqlens is None:
    segments = Segments() if segment_ids is None else _segments.from_segment_ids(segment_ids)
    return kda(inputs, segments, initial_state, options)
  if initial_state is None and not output_final_state:
    o, final_state = kda(inputs, _segments.from_cu_seqlens(cu_seqlens, q.shape[1]), None, options)
  else:
    o, final_state = _with_segment_states(kda, inputs, cu_seqlens, initial_state, options)
  poison = jnp.where(_segments.overflowed(cu_seqlens, q.shape[1]), jnp.nan, 1.0)
  return o * poison.astype(o.dtype), None if final_state is None else final_state * poison.astype(final_state.dtype)


def _with_segment_states(kda, inputs: Inputs, cu_seqlens, initial_state, options: Options):
  """Runs an implementation on a chunk-aligned copy, with a state for each segment."""
  count = cu_seqlens.shape[0] - 1
  length, heads, width = inputs.k.shape[1:]
  table = jnp.zeros((count, heads, width, inputs.v.shape[-1])) if initial_state is None else jnp.asarray(initial_state)
  aligned = _segments.align(cu_seqlens, length, options.chunk_size)
  o, final_state = kda(_segments.take(inputs, aligned.source), aligned.segments, table, options)
  o = jnp.take(o, aligned.place, axis=1)
  o = jnp.where((jnp.arange(length) < cu_seqlens[-1])[None, :, None, None], o, jnp.zeros((), o.dtype))
  if final_state is None:
    return o, None
  empty = cu_seqlens[1:] == cu_seqlens[:-1]
  return o, jnp.where(empty[:, None, None, None], table.astype(final_state.dtype), final_state)


def resolve_implementation(implementation: str, platform: str | None = None) -> str:
  """The implementation that a name stands for here: "auto" is pallas on a TPU, xla elsewhere. Logged once for each
  answer.

  Args:
    implementation: a name, or "auto".
    platform: "tpu", "gpu" or "cpu". None: that of the abstract mesh's device where one is set (ahead-of-time
      compilation), else JAX's default.

  Raises:
    ValueError: an unknown name.
  """
  if implementation == "auto":
    platform = platform or _platform.platform()
    name = "pallas" if platform == "tpu" else "xla"
    _log_choice(name, f"auto, on {platform}")
    return name
  if implementation not in _arguments.IMPLEMENTATIONS:
    known = ", ".join(("auto", *_arguments.IMPLEMENTATIONS))
    raise ValueError(f"implementation is {implementation!r}; one of {known} is needed.")
  _log_choice(implementation, "as asked")
  return implementation


def _log_choice(name: str, why: str) -> None:
  """Logs a choice the first time that it is made, with the first reason."""
  if name in _logged:
    return
  _logged.add(name)
  logging.info("Kimi Delta Attention: implementation %s (%s).", name, why)
