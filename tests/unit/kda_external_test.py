# SPDX-License-Identifier: Apache-2.0
"""The adapters to tokamax and tops: numbers against the float64 recurrence, and what they refuse.

Outputs and states are held to 1e-5 of an array's largest entry, gradients to 1e-4: tokamax's chunks are exact to about
6e-6 and 2e-5 in float32. Layouts and rates are data, so that one compilation serves all of them.
"""

import functools
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType
import numpy as np
import pytest
import tokamax  # noqa: F401 (before the first compilation, see maxtext.kernels.kda._tokamax)

from kda_support import QUICK
from maxtext.kernels.kda import _tokamax, chunk_kda
from support import one_sentence

LENGTH, HEADS, KEYS, VALUES, SEGMENTS = 130, 2, 16, 8, 5
STATES = ("o", "final_state")
SAFE = {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -5.0}

LAYOUTS = [
    (0, 30, 30, 100, 120, 120),  # an empty segment inside and one at the end, padding after the last
    (0, 0, 64, 65, 65, 130),  # an empty one first, borders on and beside a chunk's
    (0, 130, 130, 130, 130, 130),
    (0, 1, 2, 3, 4, 5),
    (0, 0, 0, 0, 0, 0),
]
offsets = st.lists(st.integers(0, LENGTH), min_size=SEGMENTS, max_size=SEGMENTS).map(lambda ends: (0, *sorted(ends)))


def draw(
    seed: int, rows: int, states: int, length: int = LENGTH, heads: int = HEADS, keys: int = KEYS, values: int = VALUES
):
  """Inputs with the safe gate's, and the cotangents of outputs and states."""
  random = np.random.default_rng(seed)
  normal = lambda *shape: random.normal(size=shape).astype(np.float32)
  return {
      "q": normal(rows, length, heads, keys),
      "k": normal(rows, length, heads, keys),
      "v": normal(rows, length, heads, values),
      "g": 2 * normal(rows, length, heads, keys),
      "beta": 1 / (1 + np.exp(-normal(rows, length, heads))),
      "A_log": 0.3 * normal(heads),
      "dt_bias": 0.3 * normal(heads * keys),
      "initial_state": normal(states, heads, keys, values),
      "do": normal(rows, length, heads, values),
      "dfinal": normal(states, heads, keys, values),
  }


def outputs(inputs, cu_seqlens, implementation, gate):
  settings = {}
  if gate == "log":
    inputs = {name: value for name, value in inputs.items() if name not in ("A_log", "dt_bias")}
    inputs["g"] = -jax.nn.softplus(inputs["g"])
  else:
    settings = SAFE if gate == "sigmoid" else {"use_gate_in_kernel": True}
  return chunk_kda(
      **inputs,
      **settings,
      cu_seqlens=cu_seqlens,
      use_qk_l2norm_in_kernel=True,
      output_final_state=True,
      implementation=implementation,
  )


@functools.partial(jax.jit, static_argnames=("implementation", "gate", "gradients"), compiler_options=QUICK)
def run(arrays, cu_seqlens, implementation="tokamax", gate="sigmoid", gradients=True):
  """Outputs, final states, and the gradients of all inputs."""
  inputs = {name: value for name, value in arrays.items() if name not in ("do", "dfinal")}
  if not gradients:
    return dict(zip(STATES, outputs(inputs, cu_seqlens, implementation, gate), strict=True))
  (o, final_state), pull = jax.vjp(lambda inputs: outputs(inputs, cu_seqlens, implementation, gate), inputs)
  (of_inputs,) = pull((arrays["do"].astype(o.dtype), arrays["dfinal"].astype(final_state.dtype)))
  return {"o": o, "final_state": final_state, **of_inputs}


def recurrence(arrays, cu_seqlens, **settings):
  with jax.enable_x64(True):
    wide = {name: np.asarray(value, np.float64) for name, value in arrays.items()}
    return run(wide, cu_seqlens, "reference", **settings)


def assert_close(got, expected):
  for name, other in expected.items():
    one, other = np.asarray(got[name], np.float64), np.asarray(other)
    tolerance = 1e-5 if name in STATES else 1e-4
    assert np.isfinite(one).all(), name
    least = 1.0 if name == "A_log" else 1e-6  # the gradient of A_log sums terms of both signs over all tokens
    assert np.abs(one - other).max() <= tolerance * max(np.abs(other).max(), least), name


def offsets_of(layout) -> np.ndarray:
  return np.asarray(layout, np.int32)


PACKED = draw(0, 1, SEGMENTS)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_rows_equal_the_recurrence(layout):
  cu_seqlens = offsets_of(layout)
  assert_close(run(PACKED, cu_seqlens), recurrence(PACKED, cu_seqlens))


@given(layout=offsets)
def test_any_offsets_equal_the_recurrence(layout):
  cu_seqlens = offsets_of(layout)
  assert_close(run(PACKED, cu_seqlens), recurrence(PACKED, cu_seqlens))


def test_a_saturated_gate_is_finite():
  arrays = PACKED | {"A_log": np.full(HEADS, 100, np.float32), "dt_bias": np.zeros(HEADS * KEYS, np.float32)}
  arrays["g"] = np.sign(arrays["g"]) * (np.abs(arrays["g"]) > 1)  # -1, 0 and 1
  cu_seqlens = offsets_of(LAYOUTS[0])
  assert_close(run(arrays, cu_seqlens), recurrence(arrays, cu_seqlens))


def test_what_stands_at_padding_does_not_matter():
  cu_seqlens = offsets_of(LAYOUTS[0])
  spoilt = {name: np.array(value) for name, value in PACKED.items()}
  for name in ("q", "k", "v", "g", "beta", "do"):
    spoilt[name][:, cu_seqlens[-1] :] = np.nan
  got, expected = run(spoilt, cu_seqlens), run(PACKED, cu_seqlens)
  for name, value in expected.items():
    np.testing.assert_array_equal(got[name], value)
  assert not np.asarray(got["o"])[:, cu_seqlens[-1] :].any()
  assert not np.asarray(got["k"])[:, cu_seqlens[-1] :].any()


def test_more_segments_than_places_give_nan():
  got = run(PACKED, offsets_of((0, 30, 60, 90, 120, -1)))
  assert np.isnan(got["o"]).all() and np.isnan(got["final_state"]).all()


@pytest.mark.parametrize("length", [64, 70])
def test_rows_of_one_document_equal_the_recurrence(length):
  arrays = draw(1, 2, 2, length)
  assert_close(run(arrays, None, gradients=False), recurrence(arrays, None, gradients=False))


@pytest.mark.parametrize("gate, gradients", [("softplus", True), ("log", False)])
def test_gates_without_a_bound_equal_the_recurrence(gate, gradients):
  arrays, cu_seqlens, settings = draw(2, 1, 3, 40), offsets_of((0, 13, 13, 38)), {"gate": gate, "gradients": gradients}
  assert_close(run(arrays, cu_seqlens, **settings), recurrence(arrays, cu_seqlens, **settings))


def test_bfloat16_is_within_its_rounding():
  # Rounding of the inputs is in both; the output's own is half a step, and tokamax rounds its chunks' matrices too.
  narrow = PACKED | {name: jnp.asarray(PACKED[name], jnp.bfloat16) for name in ("q", "k", "v", "g", "beta")}
  cu_seqlens = offsets_of(LAYOUTS[1])
  got, expected = run(narrow, cu_seqlens, gradients=False), recurrence(narrow, cu_seqlens, gradients=False)
  assert got["o"].dtype == jnp.bfloat16 and got["final_state"].dtype == jnp.float32
  for name, other in expected.items():
    difference = np.abs(np.asarray(got[name], np.float64) - np.asarray(other)).max()
    assert difference <= 2 * 2**-8 * np.abs(np.asarray(other)).max(), name


def tpu(kind: str):
  """What is traced in this context is traced for a TPU."""
  device = AbstractDevice(device_kind=kind, num_cores=1, platform="tpu")
  return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device))


@pytest.mark.parametrize("rate", [0, -10, 100])
@pytest.mark.parametrize("layout", [(0, 30, 30, 100, 120), (0, 0, 64, 65, 130)])
def test_the_tpu_kernels_equal_the_recurrence(layout, rate, monkeypatch):
  # In tokamax's fused gate, small rates spoil the final states and chunks without tokens the gradients of the rates.
  monkeypatch.setenv("PALLAS_INTERPRET", "1")
  arrays = draw(3, 1, 4, heads=1, keys=8, values=8)
  arrays["A_log"] = arrays["A_log"] + np.float32(rate)
  cu_seqlens = offsets_of(layout)
  with tpu("TPU v6 lite"):
    got = run(arrays, cu_seqlens)
  assert_close(got, recurrence(arrays, cu_seqlens))


def refusal(implementation: str, arrays=PACKED, **settings) -> str:
  names = ["q", "k", "v", "g", "beta"]
  if settings.get("use_gate_in_kernel"):
    names += ["A_log", "dt_bias"]
  inputs = {name: arrays[name] for name in names}
  with pytest.raises(ValueError) as caught:
    jax.eval_shape(lambda inputs: chunk_kda(**inputs, **settings, implementation=implementation), inputs)
  return one_sentence(caught.value)


@pytest.mark.parametrize("implementation", ["tokamax", "tops"])
def test_segment_ids_are_refused(implementation):
  message = refusal(implementation, **SAFE, segment_ids=np.ones((1, LENGTH), np.int32))
  assert "(1, 130)" in message and "cu_seqlens" in message and "max_kda_segments" in message


@pytest.mark.parametrize(
    "settings, part",
    [
        (SAFE | {"lower_bound": -5.5}, "lower_bound is -5.5"),
        (SAFE | {"chunk_size": 32}, "chunk_size is 32"),
    ],
)
def test_tokamax_refuses(settings, part):
  assert part in refusal("tokamax", **settings)


def test_tokamax_refuses_dtypes():
  arrays = PACKED | {"v": PACKED["v"].astype(np.float16)}
  assert "float16, float32" in refusal("tokamax", arrays, **SAFE)


@pytest.mark.parametrize(
    "settings, part",
    [
        ({}, "no lower_bound"),
        ({"use_gate_in_kernel": True}, "no lower_bound"),
        ({"safe_gate": True, "lower_bound": -6.0}, "lower_bound is -6.0"),
    ],
)
def test_tokamax_refuses_unbounded_gates_on_a_tpu(settings, part):
  with tpu("TPU v6 lite"):
    assert part in refusal("tokamax", **settings)


def test_tokamax_refuses_older_tpus_and_wide_heads():
  with tpu("TPU v5 lite"):
    assert "generation 5" in refusal("tokamax", **SAFE)
  with tpu("TPU v6 lite"):
    assert "(1, 64, 1, 257)" in refusal("tokamax", draw(0, 1, 1, 64, 1, 257, 8), **SAFE)


def test_tokamax_that_is_not_installed_or_too_old(monkeypatch):
  monkeypatch.setitem(sys.modules, "tokamax", None)
  assert "pip install tokamax" in refusal("tokamax", **SAFE)
  old = type(sys)("tokamax")
  old.__version__ = "0.0.9"
  monkeypatch.setitem(sys.modules, "tokamax", old)
  assert "0.0.9" in refusal("tokamax", **SAFE)


def test_the_choice_within_tokamax_is_logged_once(monkeypatch):
  lines = []
  monkeypatch.setattr(_tokamax.logging, "info", lambda text, *parts: lines.append(text % parts))
  _tokamax._log_choice.cache_clear()
  inputs = {name: PACKED[name] for name in ("q", "k", "v", "g", "beta")}
  rates = {name: PACKED[name] for name in ("A_log", "dt_bias")}
  for _ in range(2):
    jax.eval_shape(lambda: chunk_kda(**inputs, **rates, **SAFE, implementation="tokamax"))
    jax.eval_shape(lambda: chunk_kda(**inputs, implementation="tokamax"))
  assert [line.split("implementation ")[1] for line in lines if "tokamax's" in line] == [
      "xla_chunked (gate sigmoid, on cpu).",
      "xla (gate log, on cpu).",
  ]


def test_other_libraries_are_imported_only_when_chosen():
  code = "import sys; from maxtext.kernels.kda import chunk_kda, external; print({'tokamax', 'tops'} & set(sys.modules))"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
  assert done.stdout.strip() == "set()"
