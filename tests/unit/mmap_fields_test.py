# SPDX-License-Identifier: Apache-2.0
"""Tests of segments, positions and loss masks: case D9, and the released classes on random inputs."""

import itertools

import numpy as np
import pytest

from maxtext.input_pipeline.input_pipeline_utils import (
  GenerateDocSegmentIds,
  MegatronSplitInputsTargets,
)

EOD = 99
FIELDS = ("inputs", "targets", "inputs_segmentation", "targets_segmentation", "inputs_position", "targets_position")
D9 = [
  ([10, 11, 99, 20], [1, 1, 1, 2], [0, 1, 2, 0]),
  ([99, 99, 5, 6], [1, 2, 3, 3], [0, 0, 0, 1]),
  ([5, 6, 7, 99], [1, 1, 1, 1], [0, 1, 2, 3]),
  ([99, 5, 99, 6, 99], [1, 2, 2, 3, 3], [0, 0, 1, 0, 1]),
]


def split(tokens, *arguments, **settings_) -> dict[str, list[int]]:
  fields = MegatronSplitInputsTargets(EOD, *arguments, **settings_).map({"text": np.array(tokens, np.int32)})
  return {name: values.tolist() for name, values in fields.items()}


# Case D9.


def test_d9_example():
  assert split([10, 11, 99, 20, 21]) == {
    "inputs": [10, 11, 99, 20],
    "targets": [11, 99, 20, 21],
    "inputs_segmentation": [1, 1, 1, 2],
    "targets_segmentation": [1, 1, 1, 1],
    "inputs_position": [0, 1, 2, 0],
    "targets_position": [0, 1, 2, 0],
  }


@pytest.mark.parametrize("inputs, segments, positions", D9)
def test_d9_segments_and_positions(inputs, segments, positions):
  fields = split([*inputs, 7])
  assert fields["inputs_segmentation"] == segments
  assert fields["inputs_position"] == fields["targets_position"] == positions
  assert fields["targets_segmentation"] == [1] * len(inputs)


@pytest.mark.parametrize("reset", [False, True])
def test_d9_loss_is_masked_where_the_input_is_eod(reset):
  assert split([10, 11, 99, 20, 21], reset, True)["targets_segmentation"] == [1, 1, 0, 1]
  assert split([10, 11, 20, 21, 99], reset, True)["targets_segmentation"] == [1, 1, 1, 1]


def test_d9_without_reset_there_is_one_segment():
  fields = split([10, 11, 99, 20, 21], reset_attention_mask=False)
  assert fields["inputs_segmentation"] == [1, 1, 1, 1]
  assert fields["inputs_position"] == fields["targets_position"] == [0, 1, 2, 3]


# Options.


def test_dataset_ids():
  settings_ = {"no_attnmask_dataset_ids": {3}, "emit_dataset_id": True}
  transform = MegatronSplitInputsTargets(EOD, **settings_)
  for dataset_id, segments in ((3, [1, 1, 1]), (4, [1, 1, 2])):
    fields = transform.map({"text": np.array([5, 99, 6, 7]), "dataset_id": np.int64(dataset_id)})
    assert fields["inputs_segmentation"].tolist() == segments
    assert (fields["dataset_id"].tolist(), fields["dataset_id"].dtype) == ([dataset_id] * 3, np.int32)
  assert "dataset_id" not in transform.map({"text": np.array([5, 99, 6, 7])})


@pytest.mark.parametrize(
  "reset, mask, segments, positions",
  [
    (True, False, [1, 1, 2], [0, 1, 0]),
    (True, True, [1, 1, 2], [0, 1, 0]),
    (False, False, [1, 1, 1], [0, 1, 2]),
    (False, True, [1, 0, 1], [0, 1, 2]),
  ],
)
def test_fields_of_the_order_free_type(reset, mask, segments, positions):
  element = GenerateDocSegmentIds(EOD, reset, mask).map({"inputs": np.array([5, 99, 6]), "targets": np.array([1, 2, 3])})
  added = [f"{name}_{end}" for name in ("inputs", "targets") for end in ("segmentation", "position")]
  assert list(element) == ["inputs", "targets", *added]
  assert element["inputs_segmentation"].tolist() == segments
  assert element["inputs_position"].tolist() == positions
  assert element["targets_segmentation"].tolist() == [1, 1, 1]
  assert element["inputs_segmentation"].dtype == element["inputs_position"].dtype == np.int32


# The released classes.


RUN_RELEASED = """
import sys
import numpy as np
from maxtext.input_pipeline import input_pipeline_utils as utils

inputs, results = np.load(sys.argv[1]), {}
for name in inputs.files:
  kind, number, reset, mask, shortest, dataset_id = name.split("_")
  if kind == "split":
    transform = utils.MegatronSplitInputsTargets(99, reset == "1", mask == "1", {1}, int(shortest), True)
    element = {"text": inputs[name]} | ({"dataset_id": int(dataset_id)} if dataset_id != "none" else {})
  else:
    transform = utils.GenerateDocSegmentIds(99, reset == "1", mask == "1", int(shortest))
    element = {"inputs": inputs[name], "targets": inputs[name][::-1].copy()}
  results.update({f"{name}/{field}": values for field, values in transform.map(element).items()})
np.savez(sys.argv[2], module=np.array(utils.__file__), **results)
"""


def random_tokens(rng) -> np.ndarray:
  length = int(rng.integers(1, 70))
  tokens = np.where(rng.random(length) < rng.choice([0, 0.03, 0.2, 0.5, 0.9]), EOD, rng.integers(0, 98, length))
  return tokens.astype(np.int32)


@pytest.fixture(scope="module")
def released(tmp_path_factory, run_released):
  """Random inputs and what the release's own classes, in a process without ours, make of them."""
  folder = tmp_path_factory.mktemp("released")
  rng = np.random.default_rng(11)
  options = itertools.product(("split", "segments"), range(40), "01", "01", (0, 1, 2, 5, 12), ("none", "0", "1"))
  names = ["_".join(map(str, option)) for option in options if option[0] == "split" or option[5] == "none"]
  inputs = {name: random_tokens(rng) for name in names}
  np.savez(folder / "inputs.npz", **inputs)
  return inputs, run_released(folder, RUN_RELEASED, folder / "inputs.npz", folder / "results.npz")


def test_split_fields_equal_the_releases(released):
  inputs, results = released
  checked = 0
  for name, tokens in inputs.items():
    kind, _, reset, mask, shortest, dataset_id = name.split("_")
    if kind != "split":
      continue
    transform = MegatronSplitInputsTargets(EOD, reset == "1", mask == "1", {1}, int(shortest), True)
    fields = transform.map({"text": tokens} | ({"dataset_id": int(dataset_id)} if dataset_id != "none" else {}))
    assert list(fields) == [*FIELDS] + ["dataset_id"] * (dataset_id != "none")
    for field, values in fields.items():
      expected = results[f"{name}/{field}"]
      assert values.dtype == expected.dtype, (name, field)
      np.testing.assert_array_equal(values, expected, f"{name} {field} {tokens.tolist()}")
    checked += 1
  assert checked == 40 * 4 * 5 * 3


def test_segment_fields_equal_the_releases(released):
  inputs, results = released
  checked = 0
  for name, tokens in inputs.items():
    kind, _, reset, mask, shortest, _ = name.split("_")
    if kind != "segments":
      continue
    transform = GenerateDocSegmentIds(EOD, reset == "1", mask == "1", int(shortest))
    fields = transform.map({"inputs": tokens, "targets": tokens[::-1].copy()})
    assert sorted(fields) == sorted(key.split("/")[1] for key in results if key.startswith(f"{name}/"))
    for field, values in fields.items():
      expected = results[f"{name}/{field}"]
      assert values.dtype == expected.dtype, (name, field)
      np.testing.assert_array_equal(values, expected, f"{name} {field} {tokens.tolist()}")
    checked += 1
  assert checked == 40 * 4 * 5
