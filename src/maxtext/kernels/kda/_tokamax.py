# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention by tokamax's op.

tokamax (tried: 0.0.17) has three implementations of it: `mosaic`, TPU kernels; `xla_chunked`, chunks in JAX; `xla`, the
recurrence. Its arrays have heads first, its states one axis more, its segments are ids from 1 on with a static maximum.
"""

import dataclasses
import functools
import importlib
from types import ModuleType
from typing import Literal

from absl import logging
import jax
from jax.experimental.pallas import tpu as pltpu
import jax.numpy as jnp

from maxtext.kernels.kda import _offsets, _platform, _prepare
from maxtext.kernels.kda._types import Inputs, Options

_CHUNK = 64
_LEAST_BOUND = -5.0
_MOSAIC_MAX_WIDTH = 256
_MOSAIC_GENERATION = 6
_TRIED = "0.0.17"

Kind = Literal["mosaic", "xla_chunked", "xla"]


def tokamax_kda(
    inputs: Inputs,
    *,
    segment_ids: jax.Array | None,
    cu_seqlens: jax.Array | None,
    initial_state: jax.Array | None,
    options: Options,
) -> tuple[jax.Array, jax.Array | None]:
  """Runs tokamax's op: mosaic on a TPU; elsewhere xla_chunked for the safe gate, and xla for other gates.

  Segments are numbered anew, padding is zeroed, and tokens are padded to whole chunks where tokamax needs it. In bfloat16
  its chunked implementations round intermediate results to bfloat16.

  Args:
    inputs: the caller's arrays, checked.
    segment_ids: refused, see `_offsets.refuse_segment_ids`.
    cu_seqlens: integer [N + 1] or None.
    initial_state: [B, H, K, V], with cu_seqlens [N, H, K, V], or None.
    options: of the entry.

  Returns:
    o [B, T, H, V] in v's dtype, and the final state, float32, in initial_state's shape, or None.

  Raises:
    ValueError: tokamax is not installed, has no such op, or cannot do what is asked.

  Importing tokamax adds to what JAX's compilation caches are keyed by: import it before a jitted step is first called, or
  the step is compiled twice. (MaxText's own layers import it.)
  """
  _offsets.refuse_segment_ids("tokamax", segment_ids)
  kind = _choose(inputs, options)
  _load()
  return _run(inputs, cu_seqlens, initial_state, options, kind)


def _load() -> ModuleType:
  try:
    tokamax = importlib.import_module("tokamax")
  except ModuleNotFoundError as error:
    raise ValueError(
        f"implementation is 'tokamax' and the module {error.name} is not installed; run `pip install tokamax=={_TRIED}`, "
        "or use implementation='auto'."
    ) from error
  if not hasattr(getattr(tokamax, "ops", None), "kimi_delta_attention"):
    version = getattr(tokamax, "__version__", "of unknown version")
    raise ValueError(
        f"implementation is 'tokamax' and the installed tokamax {version} has no tokamax.ops.kimi_delta_attention; run "
        f"`pip install tokamax=={_TRIED}`, or use implementation='auto'."
    )
  return tokamax


def _choose(inputs: Inputs, options: Options) -> Kind:
  """Which of tokamax's implementations computes a request, after the checks that it can."""
  dtypes = {x.dtype for x in inputs[:3]}
  if not dtypes <= {jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)}:
    found = ", ".join(sorted(map(str, dtypes)))
    _refuse(f"q, k and v have the dtypes {found}", "bfloat16 and float32")
  if options.chunk_size != _CHUNK:
    _refuse(f"chunk_size is {options.chunk_size}", f"chunks of {_CHUNK}")
  platform = _platform.platform()
  bound = options.lower_bound
  if bound is not None and not _LEAST_BOUND <= bound < 0 and (platform == "tpu" or options.gate == "sigmoid"):
    _refuse(f"lower_bound is {bound}", f"bounds from {_LEAST_BOUND:g} to below 0")
  if platform == "tpu":
    _check_mosaic(inputs, options)
    kind: Kind = "mosaic"
  else:
    kind = "xla_chunked" if options.gate == "sigmoid" else "xla"
  _log_choice(kind, options.gate, platform)
  return kind


def _check_mosaic(inputs: Inputs, options: Options) -> None:
  """What tokamax's TPU kernels cannot do, or do wrongly."""
  if options.lower_bound is None:
    _refuse(
        "no lower_bound is given", "only bounded decays on a TPU (safe_gate=True and lower_bound=-5, if g keeps to it)"
    )
  width = inputs.q.shape[-1]
  if width > _MOSAIC_MAX_WIDTH:
    _refuse(f"q has shape {tuple(inputs.q.shape)} with K = {width}", f"K up to {_MOSAIC_MAX_WIDTH} on a TPU")
  generation = pltpu.get_tpu_info().generation
  if generation < _MOSAIC_GENERATION:
    _refuse(f"the TPU is of generation {generation}", f"TPUs from generation {_MOSAIC_GENERATION} on")


def _refuse(found: str, taken: str) -> None:
  raise ValueError(f"{found} and implementation is 'tokamax', which takes {taken}; use implementation='auto' for this.")


@functools.cache
def _log_choice(kind: str, gate: str, platform: str) -> None:
  """Logs a choice the first time that it is made."""
  logging.info("Kimi Delta Attention: tokamax's implementation %s (gate %s, on %s).", kind, gate, platform)


# Compiled as one, also where the caller is not: else tokamax's Python loops run operation by operation.
@functools.partial(jax.jit, static_argnames=("options", "kind"))
def _run(inputs: Inputs, cu_seqlens, initial_state, options: Options, kind: Kind):
  if cu_seqlens is None:
    return _run_rows(inputs, initial_state, options, kind)
  return _run_packed(inputs, cu_seqlens, initial_state, options, kind)


def _run_rows(inputs: Inputs, initial_state, options: Options, kind: Kind):
  """Rows that are one segment each. tokamax brings only packed rows to whole chunks, so others become packed."""
  batch, length = inputs.q.shape[:2]
  ids = None
  if length % _CHUNK and kind != "xla":
    ids = jnp.ones((batch, length), jnp.int32)
    if kind == "mosaic":
      inputs, options = _with_log_decay(inputs, options)
  table = None if initial_state is None else initial_state[:, None]
  o, final_state = _call(inputs, ids, 1, table, options, kind)
  return o, None if final_state is None else final_state[:, 0]


def _run_packed(inputs: Inputs, cu_seqlens, initial_state, options: Options, kind: Kind):
  """One row. tokamax has the state of the n-th segment that is not empty in place n, whatever its number."""
  numbered = _offsets.number(cu_seqlens, inputs.q.shape[1])
  real = numbered.ids != 0
  inputs = _offsets.zero_padding(inputs, real)
  if kind == "mosaic":
    inputs, options = _with_log_decay(inputs, options)
    inputs = _offsets.zero_padding(inputs, real)
  table = None
  if initial_state is not None:
    # Empty segments' places may hold anything in the gradient, so they take no part in it.
    unused = numbered.empty[numbered.order][:, None, None, None]
    table = jnp.where(unused, jnp.zeros((), initial_state.dtype), initial_state[numbered.order])[None]
  count = cu_seqlens.shape[0] - 1
  o, final_state = _call(inputs, numbered.ids, count, table, options, kind)
  if final_state is not None:
    untouched = jnp.zeros((), final_state.dtype) if initial_state is None else initial_state.astype(final_state.dtype)
    final_state = jnp.where(numbered.empty[:, None, None, None], untouched, final_state[0, numbered.place])
  return _offsets.finish(o, final_state, real, cu_seqlens)


def _call(inputs: Inputs, ids, count: int, table, options: Options, kind: Kind):
  """tokamax's op on our layout.

  Args:
    inputs: [B, T, H, ...].
    ids: int32 [B, T] from 1 without gaps, 0 at the end only; or None.
    count: the most segments of a row.
    table: [B, count, H, K, V] or None.
    options: of the entry.
    kind: tokamax's implementation.

  Returns:
    o [B, T, H, V] in v's dtype, and states [B, count, H, K, V] float32 or None.
  """
  fused = options.gate != "log"
  tokamax = _load()
  dtype = jnp.result_type(*inputs[:3])
  q, k, v = (_heads_first(x.astype(dtype)) for x in inputs[:3])
  A_log = None
  if fused:
    assert inputs.A_log is not None
    A_log = jnp.minimum(inputs.A_log, _prepare.MAX_A_LOG)  # larger rates saturate the gate all the same
  # Our own check of the device is made; tokamax's knows nothing of compiling for another machine.
  with tokamax.config.cross_compile(True):
    o, states = tokamax.ops.kimi_delta_attention(
        q,
        k,
        v,
        _heads_first(inputs.g),
        _heads_first(inputs.beta),
        a_log=A_log,
        delta_time_bias=inputs.dt_bias if fused else None,
        scale=options.scale,
        initial_state=table,
        output_final_state=options.output_final_state,
        use_qk_l2norm=options.l2norm,
        use_gate_in_kernel=fused,
        segment_ids=ids,
        lower_bound=options.lower_bound if fused else None,
        max_num_segments=None if ids is None else count,
        implementation=kind,
    )
  return jnp.moveaxis(o, 0, 2).astype(inputs.v.dtype), None if states is None else states.astype(jnp.float32)


def _with_log_decay(inputs: Inputs, options: Options) -> tuple[Inputs, Options]:
  """Takes the gate out of the TPU kernels, for packed rows.

  Their fused gate lets the tokens that fill a chunk decay the final state, and sums the gradients of A_log and dt_bias
  over chunks that no kernel has written.
  """
  if options.gate == "log":
    return inputs, options
  g = inputs.g.astype(jnp.float32)
  g = _prepare.log_decay(g, inputs.A_log, inputs.dt_bias, options.gate, options.lower_bound)
  return inputs._replace(g=g, A_log=None, dt_bias=None), dataclasses.replace(options, gate="log")


def _heads_first(x: jax.Array) -> jax.Array:
  """[B, T, H, ...] as [H, B, T, ...]."""
  return jnp.moveaxis(x, 2, 0)
