# SPDX-License-Identifier: Apache-2.0
"""Our chunked implementation against two that nobody here wrote: tokamax's recurrence and its chunks in JAX.

float32, relative to an array's largest entry. Their recurrence is as exact as ours (measured: 2e-7 for outputs, 3e-7 for
gradients) and held to 1e-5. Their chunks take exponents as differences of sums over the chunk (measured: 2e-6 and 1e-5)
and are held to 1e-5 for outputs and 1e-4 for gradients. Layouts are data: one compilation for all.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokamax.ops import kimi_delta_attention

from kda_support import QUICK
from maxtext.kernels.kda import chunk_kda

ROWS, LENGTH, HEADS, KEYS, VALUES, SEGMENTS = 2, 128, 2, 16, 16, 5


def draw(seed: int) -> dict[str, np.ndarray]:
  random = np.random.default_rng(seed)
  normal = lambda *shape: random.normal(size=shape).astype(np.float32)
  return {
      "q": normal(ROWS, LENGTH, HEADS, KEYS),
      "k": normal(ROWS, LENGTH, HEADS, KEYS),
      "v": normal(ROWS, LENGTH, HEADS, VALUES),
      "g": 2 * normal(ROWS, LENGTH, HEADS, KEYS),
      "beta": 1 / (1 + np.exp(-normal(ROWS, LENGTH, HEADS))),
      "A_log": normal(HEADS),
      "dt_bias": normal(HEADS * KEYS),
  }


ARRAYS, COTANGENT = draw(0), np.random.default_rng(1).normal(size=(ROWS, LENGTH, HEADS, VALUES)).astype(np.float32)


def ours(arrays, segment_ids, lower_bound):
  gate = {"safe_gate": lower_bound is not None, "lower_bound": lower_bound}
  return chunk_kda(
      **arrays,
      **gate,
      use_gate_in_kernel=True,
      use_qk_l2norm_in_kernel=True,
      segment_ids=segment_ids,
      implementation="xla",
  )[0]


def theirs(arrays, segment_ids, lower_bound, implementation):
  o, _ = kimi_delta_attention(
      *(jnp.moveaxis(arrays[name], 2, 0) for name in ("q", "k", "v", "g", "beta")),
      a_log=arrays["A_log"],
      delta_time_bias=arrays["dt_bias"],
      use_qk_l2norm=True,
      use_gate_in_kernel=True,
      segment_ids=segment_ids,
      max_num_segments=None if segment_ids is None else SEGMENTS,
      lower_bound=lower_bound,
      implementation=implementation,
  )
  return jnp.moveaxis(o, 0, 2)


@functools.partial(jax.jit, static_argnames=("implementation", "lower_bound", "gradients"), compiler_options=QUICK)
def run(arrays, segment_ids, implementation, lower_bound=-5.0, gradients=True):
  """The output and the gradients of all inputs, by name."""
  of = ours if implementation == "ours" else functools.partial(theirs, implementation=implementation)
  if not gradients:
    return {"o": of(arrays, segment_ids, lower_bound)}
  o, pull = jax.vjp(lambda arrays: of(arrays, segment_ids, lower_bound), arrays)
  return {"o": o, **pull(COTANGENT)[0]}


def assert_close(got, expected, outputs: float, gradients: float):
  for name, other in expected.items():
    one, other = np.asarray(got[name], np.float64), np.asarray(other, np.float64)
    tolerance = outputs if name == "o" else gradients
    assert np.isfinite(other).all() and np.abs(one - other).max() <= tolerance * np.abs(other).max(), name


def ids_of(*rows: tuple[int, ...]) -> np.ndarray:
  """Ids 1, 2, ... of documents, then padding: what tokamax takes."""
  numbers = [np.repeat(np.arange(1, len(row) + 1, dtype=np.int32), row) for row in rows]
  return np.stack([np.pad(row, (0, LENGTH - len(row))) for row in numbers])


LAYOUTS = [
    ids_of((128,), (128,)),
    ids_of((64, 64), (63, 65)),
    ids_of((1, 127), (10, 20, 30, 40, 28)),
    ids_of((62, 1, 1, 50), (5, 7, 9, 11)),  # padding at the end
    ids_of((128,), ()),  # a row of padding
]


@pytest.mark.parametrize("segment_ids", LAYOUTS)
def test_tokamax_recurrence(segment_ids):
  assert_close(run(ARRAYS, segment_ids, "ours"), run(ARRAYS, segment_ids, "xla"), 1e-5, 1e-5)


@pytest.mark.parametrize("segment_ids", LAYOUTS)
def test_tokamax_chunks(segment_ids):
  assert_close(run(ARRAYS, segment_ids, "ours"), run(ARRAYS, segment_ids, "xla_chunked"), 1e-5, 1e-4)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_outputs_of_unpacked_rows(lower_bound):
  settings = {"lower_bound": lower_bound, "gradients": False}
  implementation = "xla" if lower_bound is None else "xla_chunked"
  assert_close(run(ARRAYS, None, "ours", **settings), run(ARRAYS, None, implementation, **settings), 1e-5, 1e-5)
