# SPDX-License-Identifier: Apache-2.0
"""The golden file of Kimi Delta Attention is what the installed oracles give, and the oracles agree with one another."""

import importlib
import json

import numpy as np
import pytest
import torch
from transformers.models.bailing_hybrid import modeling_bailing_hybrid as transformers_ling


@pytest.fixture(scope="module")
def golden():
  """The script beside this file that writes the golden file."""
  return importlib.import_module("write_kda_golden")


def assert_close(found, expected, tolerance):
  assert {*found} == {*expected}
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=0, atol=tolerance * np.abs(value).max(), err_msg=name)


def test_the_golden_file_is_written_again(golden):
  with np.load(golden.OUTPUT) as file:
    assert json.loads(str(file["provenance"]))["seed"] == golden.SEED
    for name, value in golden.build_content().items():
      tolerance = 0.1 if name.startswith("bfloat16/") else 1e-6
      np.testing.assert_allclose(file[name], value, rtol=0, atol=tolerance * np.abs(value).max(), err_msg=name)


@pytest.mark.parametrize(
    "oracle",
    ["naive_chunk_kda", "chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"],
)
def test_the_other_oracles_agree_with_the_recurrence(golden, oracle):
  """In float32 to 1e-5. fla-core's chunked form takes whole chunks of 64 tokens."""
  case = golden.draw(np.random.default_rng(1), golden.mild, length=128, state=True)
  with golden.naive_in_float64():
    expected = golden.run(golden.naive().naive_recurrent_kda, case)
  function = getattr(golden.naive(), oracle, None) or getattr(transformers_ling, oracle)
  assert_close(golden.run(function, case, torch.float32), expected, 1e-5)
