# SPDX-License-Identifier: Apache-2.0
"""Our reading of Megatron-LM's arguments against a live megatron-core, on random lists of arguments."""

import importlib.util
import json
from pathlib import Path

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core.datasets.utils import get_blend_from_list
import pytest

MANY = settings(deadline=None, max_examples=500)
WORDS = st.sampled_from(["a", "b/c", " d ", "0.7", "3", "1e-1", "0", "e5"])


@pytest.fixture(scope="module")
def golden():
  """The script beside this file that writes the golden file."""
  spec = importlib.util.spec_from_file_location("write_golden", Path(__file__).with_name("write_arguments_golden.py"))
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture(scope="module")
def ours(load_module):
  return load_module("maxtext.input_pipeline.mmap_cli.megatron_arguments")


def _is_number(word) -> bool:
  try:
    return float(word) >= 0
  except ValueError:
    return False


@MANY
@given(words=st.lists(WORDS, min_size=1, max_size=8))
def test_blends(ours, words):
  weighted = [_is_number(word) for word in words[::2]]
  if len(words) % 2 == 0 and any(weighted) and not all(weighted):  # Megatron misses some, and takes weights for datasets
    with pytest.raises(ours.MMapError):
      ours.read_blend(words, "--data-path")
    return
  prefixes, weights = get_blend_from_list(words)
  assume(weights is None or sum(weights))  # Megatron divides by the sum
  blend = ours.read_blend(words, "--data-path")
  assert list(blend.prefixes) == prefixes
  assert (None if blend.weights is None else [float(weight) for weight in blend.weights]) == weights


@st.composite
def runs(draw):
  """Arguments that decide how many samples Megatron asks for."""
  batch = draw(st.integers(1, 30))
  words = ["--seq-length", "8", "--data-path", "a", "--global-batch-size", str(batch)]
  if draw(st.booleans()):
    words += ["--train-iters", str(draw(st.integers(1, 500)))]
  else:
    words += ["--train-samples", str(draw(st.integers(1, 3000)))]
    if draw(st.booleans()):
      increment = draw(st.integers(1, batch))
      steps = draw(st.integers(0, (batch - 1) // increment))
      ramp = batch - steps * increment, increment, draw(st.integers(1, 1000))
      words += ["--rampup-batch-size", *map(str, ramp)] * (steps > 0)  # megatron-core divides by the steps
  for name, low, high in (("--eval-interval", 1, 300), ("--eval-iters", 0, 50)):
    words += [name, str(draw(st.integers(low, high)))] * draw(st.booleans())
  return words + ["--full-validation"] * draw(st.booleans())


@MANY
@given(words=runs())
def test_samples_asked_for(golden, ours, words):
  args = golden.parser().parse_args(words)
  data = ours.read_data(ours.Arguments(words))
  assert list(data.samples) == golden.samples_asked(args)
  assert data.train_iters == golden.iterations(args)


def test_golden_file_is_what_its_script_writes(golden):
  content = json.loads(golden.OUTPUT.read_text(encoding="utf-8"))
  assert content.pop("provenance") == golden.provenance()
  assert content == golden.build_content()
