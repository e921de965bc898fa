# SPDX-License-Identifier: Apache-2.0
"""The golden file of the Kimi Delta Attention layer is what the installed transformers gives."""

import importlib
import json

import numpy as np
import pytest


@pytest.fixture(scope="module")
def golden():
  """The script beside this file that writes the golden file."""
  return importlib.import_module("write_kda_layer_golden")


def test_the_golden_file_is_written_again(golden):
  content = golden.build_content()
  with np.load(golden.OUTPUT) as file:
    assert {*file.files} == {*content, "provenance"}
    assert json.loads(str(file["provenance"]))["seed"] == golden.SEED
    for name, value in content.items():
      # Other processors add numbers in another order, which moves an error in bfloat16 more than a float32 number.
      tolerance = 0.1 if "/bfloat16/" in name else 1e-6
      np.testing.assert_allclose(file[name], value, rtol=0, atol=tolerance * np.abs(value).max(), err_msg=name)


def test_gates_are_not_all_at_a_bound(golden):
  """What is compared says something about the gate only where it moves."""
  content = golden.build_content()
  for gate in ("safe", "softplus"):
    assert np.abs(content[f"{gate}/forget_gate.dt_bias"]).max() > 1e-3
    assert np.abs(content[f"{gate}/forget_gate.A_log"]).max() > 1e-3
