# SPDX-License-Identifier: Apache-2.0
"""`packing_max_segments_per_sample`: when short documents of a sample are merged, and when the key has no effect."""

import types

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pydantic
import pytest

from maxtext.configs import pyconfig
from maxtext.input_pipeline.grain_data_processing import megatron_rows
from maxtext.input_pipeline.input_pipeline_utils import (
  GenerateDocSegmentIds,
  MegatronSplitInputsTargets,
  megatron_min_segment_length,
  segments_and_positions,
)

EOD = 99


def segments_of(tokens, distance) -> list[int]:
  return segments_and_positions(np.array(tokens), EOD, distance)[0].tolist()


# The threshold: L // P tokens.


@pytest.mark.parametrize(
  "length, most, threshold",
  [(4096, 25, 163), (100, 25, 4), (100, 26, 3), (99, 100, 0), (100, 100, 1), (8, 1, 8), (8, 10**9, 0)],
)
def test_threshold_is_the_length_divided_by_the_key(length, most, threshold):
  keys = {"max_target_length": length, "packing_max_segments_per_sample": most, "reset_attention_mask": True}
  assert megatron_min_segment_length(types.SimpleNamespace(**keys)) == threshold


@pytest.mark.parametrize("distance, boundary", [(2, True), (3, True), (4, False), (5, False)])
def test_a_boundary_at_the_threshold_or_nearer_is_dropped(distance, boundary):
  assert segments_of([1, 2, 3, EOD, 5, 6], distance) == ([1, 1, 1, 1, 2, 2] if boundary else [1] * 6)


def test_short_documents_are_merged_into_the_one_before():
  tokens = [1, 99, 2, 99, 3, 4, 99, 5, 6]
  segments, positions = segments_and_positions(np.array(tokens), EOD, 3)
  assert segments.tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 2]
  assert positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]


def test_a_dropped_boundary_is_not_measured_from():
  """Beginnings 2, 4 and 6 with distance 4: only the one that lies more than 4 after the row's own is kept."""
  assert segments_of([1, 99, 1, 99, 1, 99, 1, 1], 4) == [1, 1, 1, 1, 1, 1, 2, 2]


def test_the_first_segment_may_be_short_and_the_last_too():
  """Only the distance between two beginnings counts, and not what is left of the last document."""
  assert segments_of([1, 2, 3, 4, 5, EOD, 7], 4) == [1, 1, 1, 1, 1, 1, 2]
  assert segments_of([1, EOD, 3, 4, 5, 6, 7], 4) == [1] * 7


@given(tokens=st.lists(st.sampled_from([1, 2, EOD]), max_size=60), distance=st.integers(-1, 12))
def test_segments_follow_the_definition(tokens, distance):
  segment, start, expected = 1, 0, []
  for position in range(len(tokens)):
    if position and tokens[position - 1] == EOD and (distance < 2 or position - start > distance):
      segment, start = segment + 1, position
    expected.append((segment, position - start))
  segments, positions = segments_and_positions(np.array(tokens, np.int32), EOD, distance)
  assert segments.dtype == positions.dtype == np.int32
  assert list(zip(segments.tolist(), positions.tolist(), strict=True)) == expected


@given(
  tokens=st.lists(st.sampled_from([1, 2, EOD]), min_size=1, max_size=120),
  most=st.integers(1, 30),
)
def test_a_sample_has_no_more_segments_than_the_key_says(tokens, most):
  """Which is what the key is named for; it holds where the threshold is in effect, 2 tokens or more."""
  config = types.SimpleNamespace(
    max_target_length=len(tokens), packing_max_segments_per_sample=most, reset_attention_mask=True
  )
  distance = megatron_min_segment_length(config)
  segments = segments_of(tokens, distance)
  assert segments[-1] <= (most if distance > 1 else len(tokens))


# Without effect.


TOKENS = [1, EOD, 2, EOD, 3, 4, EOD, 5, 6]
ALL_KEPT = [1, 1, 2, 2, 3, 3, 3, 4]


def rows_of(**keys) -> dict[str, list[int]]:
  """The fields of one sample as a run makes them."""
  source = types.SimpleNamespace(read_rows=lambda indices: np.array([TOKENS] * len(indices), np.int32))
  settings = {"max_target_length": 8, "packing_max_segments_per_sample": 2, "reset_attention_mask": True} | keys
  config = types.SimpleNamespace(vocab_size=100, mmap_eod_id=EOD, **{"eod_mask_loss": False} | settings)
  return {name: values[0].tolist() for name, values in megatron_rows(source, config).rows(np.arange(1)).items()}


def test_a_run_merges_by_its_keys():
  fields = rows_of()
  assert fields["inputs_segmentation"] == [1, 1, 1, 1, 1, 1, 1, 2], "the one boundary more than 4 tokens in is at 7"
  assert fields["inputs_position"] == fields["targets_position"] == [0, 1, 2, 3, 4, 5, 6, 0]


@pytest.mark.parametrize("most", [0, -1, -25])
def test_zero_and_less_keep_every_boundary(most):
  fields = rows_of(packing_max_segments_per_sample=most)
  assert fields["inputs_segmentation"] == ALL_KEPT
  assert fields["inputs_position"] == [0, 1, 0, 1, 0, 1, 2, 0]


@pytest.mark.parametrize("most", [8, 9, 1000])
def test_a_threshold_below_two_tokens_keeps_every_boundary(most):
  assert rows_of(packing_max_segments_per_sample=most)["inputs_segmentation"] == ALL_KEPT


@pytest.mark.parametrize("most", [1, 2, 25])
def test_without_resets_there_is_nothing_to_merge(most):
  fields = rows_of(reset_attention_mask=False, packing_max_segments_per_sample=most)
  assert fields["inputs_segmentation"] == [1] * 8
  assert fields["inputs_position"] == list(range(8))


@pytest.mark.parametrize("mask_loss", [False, True])
def test_the_loss_mask_does_not_depend_on_it(mask_loss):
  expected = [1, 0, 1, 0, 1, 1, 0, 1] if mask_loss else [1] * 8
  for most in (0, 1, 2, 4, 25):
    fields = rows_of(packing_max_segments_per_sample=most, eod_mask_loss=mask_loss)
    assert fields["targets_segmentation"] == expected
    assert (fields["inputs"], fields["targets"]) == (TOKENS[:-1], TOKENS[1:])


def test_both_transforms_merge_alike():
  tokens = np.array(TOKENS)
  split = MegatronSplitInputsTargets(EOD, min_segment_length=4).map({"text": tokens})
  generated = GenerateDocSegmentIds(EOD, min_segment_length=4).map({"inputs": tokens[:-1]})
  for name in ("inputs_segmentation", "inputs_position"):
    assert split[name].tolist() == generated[name].tolist()


# The key in a config.


def load(tmp_path, *keys):
  arguments = ["skip_jax_distributed_system=true", "run_name=t", f"base_output_directory={tmp_path}"]
  return pyconfig.initialize(["", "base.yml", "model_name=gpt3-52k", *arguments, *keys])


def test_the_default_merges_and_megatrons_strict_semantics_do_not(tmp_path):
  config = load(tmp_path, "max_target_length=100")
  assert (config.packing_max_segments_per_sample, megatron_min_segment_length(config)) == (25, 4)
  assert megatron_min_segment_length(load(tmp_path, "packing_max_segments_per_sample=0")) == 0


@pytest.mark.parametrize("value", ["many", "2.5", "[1]", "none"])
def test_a_value_that_is_no_whole_number_is_refused_by_name(tmp_path, value):
  with pytest.raises((pydantic.ValidationError, ValueError, TypeError), match="packing_max_segments_per_sample"):
    load(tmp_path, f"packing_max_segments_per_sample={value}")
