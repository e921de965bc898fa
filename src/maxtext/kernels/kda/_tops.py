# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention by `tops.ops.kda.chunk_kda`, the library whose kernels have since been published inside tokamax.

It is on no package index: the package `tops` of PyPI simulates power systems.
"""

from collections.abc import Callable
import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp

from maxtext.kernels.kda import _offsets
from maxtext.kernels.kda._types import Inputs, Options

_REMEDY = "use implementation='tokamax', which has the same kernels, or implementation='auto'"


def tops_kda(
    inputs: Inputs,
    *,
    segment_ids: jax.Array | None,
    cu_seqlens: jax.Array | None,
    initial_state: jax.Array | None,
    options: Options,
) -> tuple[jax.Array, jax.Array | None]:
  """Runs `tops.ops.kda.chunk_kda`, whose layout and arguments are flash-linear-attention's.

  Args:
    inputs: the caller's arrays, checked.
    segment_ids: refused, see `_offsets.refuse_segment_ids`.
    cu_seqlens: integer [N + 1] or None; given to a tops that takes only segment ids as ids [T], from 1 on, 0 at the end.
    initial_state: [B, H, K, V], with cu_seqlens [N, H, K, V], or None.
    options: of the entry.

  Returns:
    o [B, T, H, V] in v's dtype, and the final state in initial_state's shape, or None.

  Raises:
    ValueError: tops is not installed, is another package of that name, or cannot do what is asked.
  """
  _offsets.refuse_segment_ids("tops", segment_ids)
  chunk_kda = _load()
  parameters = _parameters(chunk_kda)
  length = inputs.q.shape[1]
  if cu_seqlens is None:
    if length % options.chunk_size:
      raise ValueError(
          f"q has shape {tuple(inputs.q.shape)} with T = {length} and implementation is 'tops', which takes multiples of "
          f"chunk_size = {options.chunk_size}; pad the rows, or use implementation='auto'."
      )
    return _call(chunk_kda, parameters, inputs, {}, initial_state, options)
  real = (jnp.arange(length) < cu_seqlens[-1])[None]
  segments = {"cu_seqlens": cu_seqlens.astype(jnp.int32)}
  if parameters is not None and "cu_seqlens" not in parameters and "segment_ids" in parameters:
    segments = {"segment_ids": _offsets.number(cu_seqlens, length).ids[0]}
  inputs = _offsets.zero_padding(inputs, real)
  o, final_state = _call(chunk_kda, parameters, inputs, segments, initial_state, options)
  return _offsets.finish(o, final_state, real, cu_seqlens)


def _load() -> Callable[..., Any]:
  try:
    module = importlib.import_module("tops.ops.kda")
  except ModuleNotFoundError as error:
    if error.name == "tops":
      raise ValueError(
          "implementation is 'tops' and no module tops is installed (the package of that name on PyPI is a power-system "
          f"simulator); {_REMEDY}."
      ) from error
    if error.name is None or not error.name.startswith("tops"):
      raise ValueError(
          f"implementation is 'tops' and tops needs the module {error.name}; install it, or {_REMEDY}."
      ) from error
    raise ValueError(
        f"implementation is 'tops' and the tops at {_place()} has no tops.ops.kda, as the power-system simulator of that "
        f"name on PyPI; remove it from the path, and {_REMEDY}."
    ) from error
  if not callable(getattr(module, "chunk_kda", None)):
    raise ValueError(f"implementation is 'tops' and tops.ops.kda at {module.__file__} has no chunk_kda; {_REMEDY}.")
  return module.chunk_kda


def _place() -> str:
  """Where the module tops lies; the simulator is a folder without __init__.py."""
  tops = importlib.import_module("tops")
  return getattr(tops, "__file__", None) or next(iter(getattr(tops, "__path__", ())), "an unknown place")


def _parameters(chunk_kda: Callable[..., Any]) -> set[str] | None:
  """The names that the function takes, None if it takes any."""
  parameters = inspect.signature(chunk_kda).parameters
  if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
    return None
  return set(parameters)


def _call(chunk_kda, parameters: set[str] | None, inputs: Inputs, segments: dict[str, jax.Array], initial_state, options):
  wanted = {
      "A_log": inputs.A_log,
      "dt_bias": inputs.dt_bias,
      "scale": options.scale,
      "initial_state": initial_state,
      "output_final_state": options.output_final_state,
      "use_qk_l2norm_in_kernel": options.l2norm,
      "use_gate_in_kernel": options.gate != "log",
      "safe_gate": options.lower_bound is not None,
      "lower_bound": options.lower_bound,
      "chunk_size": options.chunk_size,
      **segments,
  }
  # What says nothing may be missing.
  wanted = {name: value for name, value in wanted.items() if value is not None and value is not False}
  if parameters is not None and (missing := sorted(set(wanted) - parameters)):
    raise ValueError(f"implementation is 'tops' and its chunk_kda takes no {', '.join(missing)}; {_REMEDY}.")
  o, final_state = chunk_kda(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, **wanted)
  return o.astype(inputs.v.dtype), final_state if options.output_final_state else None
