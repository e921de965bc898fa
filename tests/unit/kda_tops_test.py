# SPDX-License-Identifier: Apache-2.0
"""The adapter to `tops.ops.kda.chunk_kda`, with packages of that name made here: right ones, and others."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.kernels.kda import chunk_kda
from support import one_sentence

LENGTH, HEADS, KEYS, VALUES = 64, 1, 8, 4
SAFE = {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -5.0}

# Notes what it is called with, and answers by the recurrence.
RIGHT = """
from maxtext.kernels import kda
calls = []
def chunk_kda(q, k, v, g, beta, **settings):
  calls.append(settings)
  return kda.chunk_kda(q, k, v, g, beta, **settings, implementation="reference")
"""
ONLY_IDS = """
from maxtext.kernels import kda
def chunk_kda(q, k, v, g, beta, *, A_log, dt_bias, scale, use_gate_in_kernel, safe_gate, lower_bound, chunk_size,
              segment_ids):
  return kda.chunk_kda(q, k, v, g, beta, A_log=A_log, dt_bias=dt_bias, scale=scale, segment_ids=segment_ids[None],
                       use_gate_in_kernel=True, safe_gate=True, lower_bound=lower_bound, implementation="reference")
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
  """Puts a package tops on the path, a file for each name."""

  def make(files: dict[str, str]):
    for name, text in files.items():
      file = tmp_path / "tops" / name
      file.parent.mkdir(parents=True, exist_ok=True)
      file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))

  def forget():
    for name in [name for name in sys.modules if name == "tops" or name.startswith("tops.")]:
      del sys.modules[name]

  forget()
  yield make
  forget()


def right(text: str = RIGHT) -> dict[str, str]:
  return {"__init__.py": "", "ops/__init__.py": "", "ops/kda/__init__.py": text}


def draw(gate: bool = True) -> dict[str, jax.Array]:
  random = np.random.default_rng(0)
  normal = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)
  arrays = {
      "q": normal(1, LENGTH, HEADS, KEYS),
      "k": 0.3 * normal(1, LENGTH, HEADS, KEYS),
      "v": normal(1, LENGTH, HEADS, VALUES),
      "g": -jnp.exp(normal(1, LENGTH, HEADS, KEYS)),
      "beta": jax.nn.sigmoid(normal(1, LENGTH, HEADS)),
  }
  if gate:
    arrays |= {"A_log": normal(HEADS), "dt_bias": normal(HEADS * KEYS)}
  return arrays


def refusal(arrays=None, **settings) -> str:
  with pytest.raises(ValueError) as caught:
    chunk_kda(**draw(False) if arrays is None else arrays, **settings, implementation="tops")
  return one_sentence(caught.value)


def test_offsets_and_states_pass_through(package):
  package(right())
  arrays, cu_seqlens = draw(), jnp.asarray([0, 20, 20, 50], jnp.int32)
  state = jnp.ones((3, HEADS, KEYS, VALUES))
  settings = SAFE | {"initial_state": state, "cu_seqlens": cu_seqlens, "output_final_state": True, "scale": 0.5}
  o, final_state = chunk_kda(**arrays, **settings, use_qk_l2norm_in_kernel=True, implementation="tops")
  expected = chunk_kda(**arrays, **settings, use_qk_l2norm_in_kernel=True, implementation="reference")
  np.testing.assert_array_equal(o, expected[0])
  np.testing.assert_array_equal(final_state, expected[1])
  assert not np.asarray(o)[:, 50:].any()
  (call,) = sys.modules["tops.ops.kda"].calls
  assert call["lower_bound"] == -5.0 and call["chunk_size"] == 64 and call["scale"] == 0.5
  np.testing.assert_array_equal(call["cu_seqlens"], cu_seqlens)


def test_rows_of_one_document_and_gradients(package):
  package(right())
  arrays = draw(False)

  def loss(arrays, implementation):
    return jnp.sum(jnp.square(chunk_kda(**arrays, implementation=implementation)[0]))

  got, expected = (jax.grad(loss)(arrays, implementation) for implementation in ("tops", "reference"))
  for name, value in expected.items():
    np.testing.assert_array_equal(got[name], value)
  (call,) = sys.modules["tops.ops.kda"].calls
  assert set(call) == {"scale", "chunk_size"}


def test_a_tops_that_takes_only_ids(package):
  package(right(ONLY_IDS))
  settings = SAFE | {"cu_seqlens": jnp.asarray([0, 0, 20, 50], jnp.int32)}
  o, _ = chunk_kda(**draw(), **settings, implementation="tops")
  np.testing.assert_allclose(o, chunk_kda(**draw(), **settings, implementation="reference")[0], rtol=0, atol=1e-6)
  assert "output_final_state" in refusal(draw(), **settings, output_final_state=True)


def test_more_segments_than_places_give_nan(package):
  package(right())
  o, _ = chunk_kda(**draw(), **SAFE, cu_seqlens=jnp.asarray([0, 9, 20, -1], jnp.int32), implementation="tops")
  assert np.isnan(o).all()


def test_no_tops(package, monkeypatch):
  monkeypatch.setattr(sys, "path", [])
  message = refusal()
  assert "no module tops is installed" in message and "power-system" in message and "tokamax" in message


def test_the_power_system_simulator(package, tmp_path):
  package({"dynamic.py": "", "modal_analysis.py": ""})  # it has no __init__.py
  message = refusal()
  assert str(tmp_path) in message and "power-system" in message and "tokamax" in message


def test_a_tops_without_the_function(package):
  package(right(""))
  assert "has no chunk_kda" in refusal()


def test_a_tops_that_needs_another_module(package):
  package(right("import a_module_that_is_not_there"))
  assert "a_module_that_is_not_there" in refusal()


def test_rows_that_are_no_whole_chunks(package):
  package(right())
  assert "T = 60" in refusal({name: value[:, :60] for name, value in draw(False).items()})
