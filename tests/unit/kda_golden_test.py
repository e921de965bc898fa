# SPDX-License-Identifier: Apache-2.0
"""Every implementation against the golden file of two PyTorch codes: outputs, final states and gradients.

Tolerances are of the largest difference, relative to the largest number of the array: in float32 1e-5 for results and
1e-4 for gradients. tests/reference/write_kda_golden.py says what the arrays are.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_support import IMPLEMENTATIONS, QUICK
from maxtext.kernels.kda import chunk_kda

GOLDEN = Path(__file__).parents[1] / "golden" / "kda.npz"
INPUTS = ("q", "k", "v", "g", "beta")
CASES = ("plain", "strong", "state", "packed", "norm")


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
  with np.load(GOLDEN) as file:
    return dict(file)


@functools.cache
def runner(implementation: str, l2norm: bool, low: bool):
  """A compiled run: results and gradients of one row. All cases in float32 but "norm", in smaller chunks, share one."""

  def run(inputs, state, ids, do, dfinal):
    def results(inputs, state):
      return chunk_kda(
          *inputs,
          initial_state=state,
          output_final_state=True,
          segment_ids=ids,
          use_qk_l2norm_in_kernel=l2norm,
          chunk_size=16 if l2norm else 64,
          implementation=implementation,
      )

    (o, final_state), pull = jax.vjp(results, inputs, state)
    gradients, dstate = pull((do.astype(o.dtype), dfinal))
    named = {f"d{name}": gradient for name, gradient in zip(INPUTS, gradients, strict=True)}
    return {"o": o, "final_state": final_state, "dinitial_state": dstate, **named}

  return jax.jit(run, compiler_options=QUICK if l2norm or low else None)


def results_of(golden, case, implementation, dtype=jnp.float32) -> dict[str, np.ndarray]:
  """Our results for a case, under its names. Without states they are zero, without documents the row is one."""
  array = {name: golden.get(f"{case}/{name}") for name in (*INPUTS, "do", "initial_state", "dfinal", "documents")}
  length, heads, keys = array["k"].shape
  zero = np.zeros((heads, keys, array["v"].shape[-1]), np.float32)
  state, dfinal = (zero if array[name] is None else array[name] for name in ("initial_state", "dfinal"))
  lengths = [length] if array["documents"] is None else array["documents"]
  ids = np.repeat(np.arange(len(lengths)) + 1, lengths).astype(np.int32)
  inputs = tuple(jnp.asarray(array[name], dtype)[None] for name in INPUTS)
  compiled = runner(implementation, case == "norm", dtype != jnp.float32)
  found = compiled(inputs, state[None], ids[None], array["do"][None], dfinal[None])
  return {name: np.asarray(value[0], np.float64) for name, value in found.items()}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients(golden, case, implementation):
  found = results_of(golden, case, implementation)
  for name, value in found.items():
    if f"{case}/{name}" in golden:
      expected = golden[f"{case}/{name}"]
      tolerance = 1e-4 if name.startswith("d") else 1e-5
      assert np.abs(value - expected).max() < tolerance * np.abs(expected).max(), name
    else:
      assert "state" in name  # the case has none, and the results of ours are of zeros


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_errs_at_most_twice_as_much_as_the_oracle(golden, implementation):
  """Both against the exact results of the same rounded inputs: ours of the recurrence in float32, here exact enough."""
  rounded = {name: np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for name, x in golden.items() if "plain/" in name}
  exact = results_of(rounded, "plain", "reference")
  found = results_of(rounded, "plain", implementation, jnp.bfloat16)
  for name in ("o", *(f"d{name}" for name in INPUTS)):
    error = np.linalg.norm(found[name] - exact[name]) / np.linalg.norm(exact[name])
    assert error <= 2 * golden[f"bfloat16/{name}"], name
