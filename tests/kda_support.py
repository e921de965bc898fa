# SPDX-License-Identifier: Apache-2.0
"""Random rows for Kimi Delta Attention, compiled runs of them, and the float64 results that they are held to.

Errors are the largest difference relative to the largest number of the float64 array: at most 1e-5 for outputs and
states and 1e-4 for gradients, in float32. Layouts, decays and states are data, so that one compilation of each
implementation serves most tests.
"""

import os
from typing import NamedTuple

import jax
import numpy as np

from maxtext.kernels.kda import (
    chunk_kda,
    pallas,  # noqa: F401 (adds to JAX's configuration, which drops what was compiled before)
)

LONG_RUN = os.environ.get("HYPOTHESIS_PROFILE") == "long"
CHUNKED = ("xla", "pallas")
IMPLEMENTATIONS = ("reference", *CHUNKED)

ROWS, LENGTH, HEADS, KEYS, VALUES = 2, 130, 2, 16, 8
LONG, SEGMENTS = 256, 6  # of rows that are cut by offsets
TOKENS = ("q", "k", "v", "g", "beta")  # the arguments with an entry for each token
RESULTS = ("o", "final_state")
COTANGENTS = ("do", "dfinal")
QUICK = {"xla_backend_optimization_level": 0}  # compiler options: without optimisation, in half the time
PLACES = 24  # documents that run side by side when each is alone

Arrays = dict[str, np.ndarray]


def draw(seed: int, rows: int = ROWS, length: int = LENGTH, states: int | None = None, strength: float = 1.0) -> Arrays:
  """Arguments of the entry, and cotangents "do" and "dfinal" of its results. Keys have length 1, as after the norm.

  Args:
    seed: of NumPy's generator.
    rows: B.
    length: T.
    states: entries of initial_state, B if None.
    strength: factor of the log decay, which is -1 on median.
  """
  random = np.random.default_rng(seed)
  normal = lambda *shape: random.normal(size=shape).astype(np.float32)
  k = normal(rows, length, HEADS, KEYS)
  states = rows if states is None else states
  return {
      "q": normal(rows, length, HEADS, KEYS),
      "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
      "v": normal(rows, length, HEADS, VALUES),
      "g": -np.float32(strength) * np.exp(normal(rows, length, HEADS, KEYS)),
      "beta": 1 / (1 + np.exp(-normal(rows, length, HEADS))),
      "initial_state": normal(states, HEADS, KEYS, VALUES),
      "do": normal(rows, length, HEADS, VALUES),
      "dfinal": normal(states, HEADS, KEYS, VALUES),
  }


def without_states(arrays: Arrays) -> Arrays:
  return {name: value for name, value in arrays.items() if name not in ("initial_state", "dfinal")}


def results_and_gradients(arrays, segments, implementation: str, settings: tuple = ()):
  """The results of the entry, and d<name> for each argument. Without "dfinal" no final state is asked for."""
  inputs = {name: value for name, value in arrays.items() if name not in COTANGENTS}
  with_state = "dfinal" in arrays

  def results(inputs):
    return chunk_kda(**inputs, **segments, **dict(settings), output_final_state=with_state, implementation=implementation)

  (o, final_state), pull = jax.vjp(results, inputs)
  dfinal = arrays["dfinal"].astype(final_state.dtype) if with_state else None
  (gradients,) = pull((arrays["do"].astype(o.dtype), dfinal))
  named = {f"d{name}": gradient for name, gradient in gradients.items()}
  return {"o": o, **({"final_state": final_state} if with_state else {}), **named}


compiled = jax.jit(results_and_gradients, static_argnums=(2, 3))
compiled_quickly = jax.jit(results_and_gradients, static_argnums=(2, 3), compiler_options=QUICK)


def run(arrays: Arrays, implementation: str, *, quick: bool = False, settings: dict | None = None, **segments) -> Arrays:
  """Results and gradients of an implementation; `segments` are segment_ids or cu_seqlens, `settings` other arguments.

  Args:
    arrays: of `draw`; without initial_state and dfinal there are no states.
    implementation: its name.
    quick: compile without optimisation; for a shape that few tests have.
    settings: arguments of the entry that are known when it is traced.
    **segments: segment_ids or cu_seqlens.
  """
  function = compiled_quickly if quick else compiled
  found = function(arrays, segments, implementation, tuple(sorted((settings or {}).items())))
  return {name: np.asarray(value) for name, value in found.items()}


def recurrence(arrays: Arrays, settings: dict | None = None, **segments) -> Arrays:
  """The definition in float64."""
  with jax.enable_x64(True):
    wide = {name: np.asarray(value, np.float64) for name, value in arrays.items()}
    return run(wide, "reference", settings=settings, **segments)


class Document(NamedTuple):
  """Tokens of a row, and the entries of the state table that it starts from and ends in, where it has them."""

  row: int
  start: int
  end: int
  initial: int | None
  final: int | None


def documents_of_ids(segment_ids: np.ndarray) -> list[Document]:
  """The longest runs of one id that is not 0; each row's first one has the initial state, its last one the final."""
  documents = []
  for row, ids in enumerate(segment_ids):
    borders = [0, *(np.flatnonzero(np.diff(ids)) + 1), len(ids)]
    runs = [(start, end) for start, end in zip(borders[:-1], borders[1:], strict=True) if ids[start] != 0]
    for n, (start, end) in enumerate(runs):
      documents.append(Document(row, start, end, row if n == 0 else None, row if n == len(runs) - 1 else None))
  return documents


def documents_of_offsets(cu_seqlens: np.ndarray) -> list[Document]:
  """The segments between offsets of one row; each has both states."""
  return [
      Document(0, start, end, n, n) for n, (start, end) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True))
  ]


def separate(arrays: Arrays, documents: list[Document]) -> Arrays:
  """What packed rows must give: each document alone, in a row of its own without segment ids, by the float64 recurrence.

  Other tokens have zeros, and a state that no document has is handed on.
  """
  with_states = {name: value for name, value in arrays.items() if name in ("initial_state", "dfinal")}
  alone = {name: np.zeros((len(documents), *value.shape[1:])) for name, value in arrays.items()}
  for n, document in enumerate(documents):
    for name in (*TOKENS, "do"):
      alone[name][n, : document.end - document.start] = arrays[name][document.row, document.start : document.end]
    if with_states and document.initial is not None:
      alone["initial_state"][n] = arrays["initial_state"][document.initial]
    if with_states and document.final is not None:
      alone["dfinal"][n] = arrays["dfinal"][document.final]
  found = _side_by_side(alone)
  like = {"o": "do", **{f"d{name}": name for name in TOKENS}}
  packed = {name: np.zeros(arrays[other].shape) for name, other in like.items()}
  if with_states:
    packed["final_state"] = np.array(arrays["initial_state"], np.float64)
    packed["dinitial_state"] = np.array(arrays["dfinal"], np.float64)
  for n, document in enumerate(documents):
    for name in like:
      packed[name][document.row, document.start : document.end] = found[name][n, : document.end - document.start]
    if with_states and document.initial is not None:
      packed["dinitial_state"][document.initial] = found["dinitial_state"][n]
    if with_states and document.final is not None:
      packed["final_state"][document.final] = found["final_state"][n]
  return packed


def _side_by_side(alone: Arrays) -> Arrays:
  """The recurrence over any number of rows, PLACES at a time."""
  count = len(alone["q"])
  groups = []
  for start in range(0, max(count, 1), PLACES):
    part = {name: value[start : start + PLACES] for name, value in alone.items()}
    part = {name: np.pad(x, ((0, PLACES - len(x)),) + ((0, 0),) * (x.ndim - 1)) for name, x in part.items()}
    groups.append(recurrence(part))
  return {name: np.concatenate([group[name] for group in groups])[:count] for name in groups[0]}


def error_of(found: np.ndarray, expected: np.ndarray) -> float:
  """The largest difference relative to the largest number expected; infinite where something found is not finite."""
  found = np.asarray(found, np.float64)
  if not np.isfinite(found).all():
    return np.inf
  return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-6))


def assert_close(found: Arrays, expected: Arrays, results: float = 1e-5, gradients: float = 1e-4) -> None:
  """Both have the same arrays, and each error is within the tolerance of its kind."""
  assert {*found} == {*expected}
  for name, value in expected.items():
    assert found[name].shape == value.shape, name
    error = error_of(found[name], value)
    assert error <= (results if name in RESULTS else gradients), (name, error)


def row_of(*runs: tuple[int, int], length: int = LENGTH) -> np.ndarray:
  """The ids [T] of runs (id, tokens), cut at T or filled with padding."""
  ids = np.repeat([id for id, _ in runs], [tokens for _, tokens in runs]).astype(np.int32)[:length]
  return np.pad(ids, (0, length - len(ids)))


def ids_of(*lengths: int) -> np.ndarray:
  """Ids [B, T] of documents of the given lengths, then padding, in every row."""
  return np.tile(row_of(*enumerate(lengths, 1)), (ROWS, 1))


def offsets_of(*offsets: int) -> np.ndarray:
  """int32 [SEGMENTS + 1]: the offsets, and empty segments at the end."""
  return np.pad(np.array(offsets, np.int32), (0, SEGMENTS + 1 - len(offsets)), mode="edge")
