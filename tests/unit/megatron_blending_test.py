# SPDX-License-Identifier: Apache-2.0
"""Tests of blends: their draws, the pairs on disk, and the source of blended samples. CASES D7, D13 and D16."""

import logging
import os
import pickle
import shutil

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from maxtext.input_pipeline import _megatron_blending as library
from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter
from support import refusal

POSITIVE = st.floats(1e-6, 1e3)


def draws(request) -> tuple[list[int], list[int]]:
  (datasets, samples), counts = library.draw(request)
  assert datasets.dtype == np.int16 and samples.dtype == np.int64
  assert np.bincount(datasets, minlength=len(request.weights)).tolist() == counts
  return datasets.tolist(), samples.tolist()


def by_definition(weights, size) -> list[int]:
  """Each draw takes the dataset that lags most behind its share, the first of equals."""
  drawn, chosen = np.zeros(len(weights)), []
  for position in range(size):
    chosen.append(int(np.argmax(weights * max(float(position), 1.0) - drawn)))
    drawn[chosen[-1]] += 1
  return chosen


# Draws.


def test_d7_two_datasets():
  assert draws(library.weighted_blend([0.7, 0.3], 10)) == ([0, 1, 0, 0, 1, 0, 0, 1, 0, 0], [0, 0, 1, 2, 1, 3, 4, 2, 5, 6])


def test_d7_ties_go_to_the_first_dataset():
  assert draws(library.weighted_blend([1, 1, 1], 12))[0] == [0, 1, 2] * 4


def test_d7_a_rare_dataset():
  datasets, _ = draws(library.weighted_blend([0.001, 0.999], 2000))
  assert np.flatnonzero(np.array(datasets) == 0).tolist() == [1, 1000]


def test_d7_only_the_ratio_of_weights_counts():
  for weights in ([0.75, 0.25], [0.5, 0.375, 0.125], [1 / 3] * 3):
    tripled = [3 * weight for weight in weights]
    assert draws(library.weighted_blend(tripled, 500)) == draws(library.weighted_blend(weights, 500))


@given(st.lists(POSITIVE, min_size=1, max_size=40), st.integers(1, 200))
def test_draws_follow_the_definition(weights, size):
  request = library.weighted_blend(weights, size)
  datasets, samples = draws(request)
  assert datasets == by_definition(request.weights, size)
  seen = dict.fromkeys(datasets, 0)
  for dataset, sample in zip(datasets, samples, strict=True):
    assert sample == seen[dataset]
    seen[dataset] += 1


@given(st.lists(POSITIVE, min_size=1, max_size=9), st.integers(1, 100), st.integers(1, 100))
def test_a_longer_blend_begins_like_a_shorter_one(weights, size, more):
  short, long = (draws(library.weighted_blend(weights, count)) for count in (size, size + more))
  assert short == tuple(part[:size] for part in long)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12))
def test_a_whole_blend_draws_every_sample_once(lengths):
  datasets, samples = draws(library.whole_blend(lengths, None))
  every = [(dataset, sample) for dataset, length in enumerate(lengths) for sample in range(length)]
  assert sorted(zip(datasets, samples, strict=True)) == every


def test_a_whole_blend_in_megatrons_order():
  assert draws(library.whole_blend([2, 5], None))[0] == [1, 0, 1, 1, 0, 1, 1]
  assert draws(library.whole_blend([2, 5], 4))[0] == [1, 0, 1, 1]
  assert len(draws(library.whole_blend([2, 5], 100))[0]) == 7


def test_d7_three_hundred_datasets():
  weights = np.random.default_rng(0).random(300)
  request = library.weighted_blend(weights.tolist(), 3000)
  assert draws(request)[0] == by_definition(request.weights, 3000)


def test_d7_more_datasets_than_int16_can_name():
  message = refusal(library.weighted_blend, [1.0] * 32768, 5)
  assert "a blend of 32768 datasets was asked for; expected 1 to 32767" in message
  assert len(library.weighted_blend([1.0] * 32767, 1).weights) == 32767


@pytest.mark.parametrize("weights", [[], [0.0], [1, -1], [1, float("nan")], [float("inf"), 1], [0, 0]])
def test_d7_weights_that_cannot_be_used(weights):
  refusal(library.weighted_blend, weights, 4)


def test_the_released_function_fills_arrays_of_the_caller():
  dataset_index, dataset_sample_index = np.zeros(10, np.int16), np.zeros(10, np.int64)
  library.build_blending_indices(dataset_index, dataset_sample_index, np.array([0.7, 0.3]), 2, 10)
  assert dataset_index.tolist() == [0, 1, 0, 0, 1, 0, 0, 1, 0, 0]
  faults = (([0.5, 0.2], "must sum to 1"), ([1.0, 0.0], "expected 2 positive"), ([1.0], "expected 2 positive"))
  for weights, message in faults:
    arguments = (dataset_index, dataset_sample_index, np.array(weights), 2, 10)
    assert message in refusal(library.build_blending_indices, *arguments)
  assert "expected (9,) for both" in refusal(
    library.build_blending_indices, dataset_index, dataset_sample_index, np.array([0.7, 0.3]), 2, 9
  )


# Pairs on disk.


REQUEST = library.weighted_blend([0.7, 0.3], 1000)
ENOUGH = [1000, 1000]


@pytest.fixture
def folder(tmp_path) -> str:
  return str(tmp_path / "blend")


@pytest.fixture(autouse=True)
def log(caplog):
  caplog.set_level(logging.WARNING, logger=library.__name__)
  return caplog


def warnings(caplog) -> str:
  return "\n".join(record.getMessage() for record in caplog.records)


def same(pair, request=REQUEST) -> bool:
  return all(np.array_equal(*arrays) for arrays in zip(pair.arrays, library.draw(request)[0], strict=True))


def test_a_pair_is_kept_in_the_cache_folder_and_found(folder):
  first = library.open_pair(REQUEST, ENOUGH, cache_dir=folder)
  second = library.open_pair(REQUEST, ENOUGH, cache_dir=folder)
  assert (first.found, second.found) == (False, True)
  assert first.paths == second.paths and same(first) and same(second)
  other = library.open_pair(library.weighted_blend([0.6, 0.4], 1000), ENOUGH, cache_dir=folder)
  assert not other.found and other.paths != first.paths


def test_a_pair_that_was_checked_is_not_drawn_again(folder, monkeypatch):
  library.open_pair(REQUEST, ENOUGH, cache_dir=folder)
  monkeypatch.setattr(library, "first_difference", None)
  assert library.open_pair(REQUEST, ENOUGH, cache_dir=folder).found


def test_the_index_folder_goes_before_the_cache_folder(folder, tmp_path):
  library.build_and_save_blend_indices(folder, [0.7, 0.3], ENOUGH, 1000)
  pair = library.open_pair(REQUEST, ENOUGH, cache_dir=str(tmp_path / "cache"), index_dir=folder)
  assert pair.found and pair.paths == library.pair_paths(folder) and not (tmp_path / "cache").exists()


def test_a_longer_pair_serves_and_a_shorter_one_is_named(folder, log):
  library.build_and_save_blend_indices(folder, [0.7, 0.3], ENOUGH, 1200)
  assert same(library.open_pair(REQUEST, ENOUGH, index_dir=folder)) and not log.records
  library.build_and_save_blend_indices(folder, [0.7, 0.3], ENOUGH, 900)
  pair = library.open_pair(REQUEST, ENOUGH, index_dir=folder)
  assert same(pair) and pair.paths is None
  assert "dataset_index.npy is int16[900]; expected int16[1000] or longer; drawing the blend again." in warnings(log)


def test_d7_a_stale_pair_is_named_and_drawn_again(folder, log):
  library.build_and_save_blend_indices(folder, [0.6, 0.4], ENOUGH, 1000)
  assert same(library.open_pair(REQUEST, ENOUGH, index_dir=folder))
  assert f"{folder}/dataset_index.npy and its partner are not this blend: draw " in warnings(log)


@pytest.mark.parametrize("array", [0, 1])
def test_d16_one_wrong_draw_is_found(folder, log, array):
  library.open_pair(REQUEST, ENOUGH, cache_dir=folder)
  path = library.pair_paths(folder, REQUEST.name)[array]
  values = np.load(path)
  values[777] += 1
  np.save(path, values)
  assert same(library.open_pair(REQUEST, ENOUGH, cache_dir=folder))
  assert "draw 777 is" in warnings(log)
  log.clear()
  assert library.open_pair(REQUEST, ENOUGH, cache_dir=folder).found and not log.records, "it was written again"


def test_d16_swapped_datasets_are_found(folder, log):
  library.build_and_save_blend_indices(folder, [0.7, 0.3], ENOUGH, 1000)
  values = np.load(library.pair_paths(folder)[0])
  np.save(library.pair_paths(folder)[0], 1 - values)
  assert same(library.open_pair(REQUEST, ENOUGH, index_dir=folder)) and "not this blend" in warnings(log)


@pytest.mark.parametrize("size", [0, 5, 200, 1000])
def test_d16_a_truncated_file_is_no_traceback(folder, log, size):
  library.build_and_save_blend_indices(folder, [0.7, 0.3], ENOUGH, 1000)
  os.truncate(library.pair_paths(folder)[1], size)
  assert same(library.open_pair(REQUEST, ENOUGH, index_dir=folder)) and "dataset_sample_index.npy" in warnings(log)


def test_a_missing_pair_and_several_pairs_are_named(folder, log):
  assert same(library.open_pair(REQUEST, ENOUGH, index_dir=folder))
  assert f"{folder} holds no pair of blend indices" in warnings(log)
  for size in (1000, 1001):
    library.open_pair(library.weighted_blend([0.7, 0.3], size), [2000, 2000], cache_dir=folder)
  log.clear()
  assert same(library.open_pair(REQUEST, ENOUGH, index_dir=folder))
  assert f"{folder} holds 2 pairs of blend indices" in warnings(log)


def test_one_pair_of_any_name_is_found_and_megatrons_by_its_split(folder):
  library.open_pair(REQUEST, ENOUGH, cache_dir=folder)
  paths = library.pair_paths(folder, REQUEST.name)
  assert library.find_pair(folder, "train", REQUEST) == paths
  for split in ("train", "valid"):
    for path, array in zip(paths, library.ARRAYS, strict=True):
      shutil.copy(path, f"{folder}/0123-BlendedDataset-{split}-{array}.npy")
  assert library.find_pair(folder, "valid", REQUEST)[0] == f"{folder}/0123-BlendedDataset-valid-dataset_index.npy"


def test_d7_a_dataset_that_has_too_few_samples(folder):
  request = library.weighted_blend([0.7, 0.3], 1000, (0, 2))
  message = refusal(library.open_pair, request, [1000, 299], folder)
  assert "the blend asks dataset 2 for 300 samples, and its indices have 299; raise mmap_npy_blend_margin" in message
  library.open_pair(request, [1000, 300], folder)
  refusal(library.open_pair, request, [1000, 299], folder)


def test_d13_iii_a_folder_that_cannot_be_written_is_a_warning(tmp_path, log):
  (tmp_path / "file").write_text("not a folder")
  pair = library.open_pair(REQUEST, ENOUGH, cache_dir=str(tmp_path / "file"))
  assert same(pair) and pair.paths is None and "it stays in memory and every start draws it again" in warnings(log)


def test_another_process_than_the_first_does_not_write(folder):
  assert same(library.open_pair(REQUEST, ENOUGH, cache_dir=folder, write=False)) and not os.path.exists(folder)


# The source.


class Numbers(list):
  """Elements that say where they come from."""

  def read_rows(self, indices):
    return np.array([self[index] for index in indices], np.int32).reshape(len(indices), 2)


def source(weights=(0.7, 0.3), lengths=(8, 8), **settings):
  datasets = [Numbers((number, row) for row in range(length)) for number, length in enumerate(lengths)]
  return library.MegatronBlendedDataSource(datasets, weights, **settings)


def test_elements_are_those_of_the_children():
  blended = source(size=10)
  datasets, samples = [0, 1, 0, 0, 1, 0, 0, 1, 0, 0], [0, 0, 1, 2, 1, 3, 4, 2, 5, 6]
  assert [blended[k] for k in range(10)] == list(zip(datasets, samples, strict=True))
  assert blended[-1] == (0, 6) and blended.child(4) == (1, 1)
  for index in (10, -11):
    with pytest.raises(IndexError, match=f"sample {index} of 10"):
      blended[index]


@given(st.lists(st.integers(-60, 59), max_size=30))
def test_rows_of_several_children_come_in_the_order_asked_for(indices):
  blended = source((0.5, 0.2, 0.3), (60, 60, 60), size=60)
  rows = blended.read_rows(np.array(indices, np.int64))
  assert rows.dtype == np.int32 and rows.shape == (len(indices), 2)
  assert [tuple(row) for row in rows.tolist()] == [blended[index] for index in indices]


def test_d7_weight_zero_is_left_out_and_keeps_the_numbers():
  blended = source((0.7, 0, 0.3), (8, 1, 8), size=10)
  assert {blended[k][0] for k in range(10)} == {0, 2}
  assert "the blend asks dataset 2 for 3 samples" in refusal(source, (0.7, 0, 0.3), (8, 1, 2), size=10)


def test_without_a_size_no_child_is_exhausted():
  assert len(source((0.7, 0.3), (70, 40))) == 100 and len(source((1, 1), (5, 100))) == 10


@pytest.mark.parametrize("weights", [(1,), (), (0, 0), (1, -1), (1, float("nan"))])
def test_weights_that_do_not_fit_the_datasets(weights):
  refusal(source, weights, (5, 5), size=4)


@pytest.mark.parametrize("kept", [True, False])
def test_a_worker_gets_the_files_of_the_blend(folder, kept):
  blended = source(lengths=(1000, 1000), size=1000, cache_dir=folder if kept else None)
  worker = pickle.loads(pickle.dumps(blended))
  assert [worker[k] for k in range(1000)] == [blended[k] for k in range(1000)]


# Offline.


def write(prefix, lengths) -> str:
  with IndexedDatasetWriter(str(prefix), np.int32) as writer:
    for row, length in enumerate(lengths):
      writer.add_document(100 * row + np.arange(length))
  return str(prefix)


def test_convert_blend_writes_what_a_run_would(tmp_path):
  prefixes = [write(tmp_path / name, [5, 7, 3, 9, 6, 4]) for name in "abc"]
  specs = [
    {"input": [prefix], "weight": weight, "output_dir": str(tmp_path / f"out/dataset_{number}")}
    for number, (prefix, weight) in enumerate(zip(prefixes, (0.7, 0, 0.3), strict=True))
  ]
  results = utils.convert_blend(specs, 20, 4, seed=42, blend_index_output_dir=str(tmp_path / "out"))
  assert [(r["number"], r["weight"], r["buffer_samples"]) for r in results] == [(0, 0.7, 15), (2, 0.3, 7)]
  assert sorted(os.listdir(tmp_path / "out")) == [
    "dataset_0", "dataset_2", "dataset_index.npy", "dataset_sample_index.npy", "stamps.json"
  ]
  for result, prefix in zip(results, (prefixes[0], prefixes[2]), strict=True):
    folder = os.path.dirname(result["paths"]["metadata"])
    assert cache.open_index(folder, prefix, cache.IndexRequest(4, 42, result["buffer_samples"])).found
  assert same(
    library.open_pair(library.weighted_blend([0.7, 0.3], 20), [99, 99], index_dir=str(tmp_path / "out")),
    library.weighted_blend([0.7, 0.3], 20),
  )


@pytest.mark.parametrize("weights", [(0, 0), (1, -1), (1, float("nan")), ()])
def test_convert_blend_refuses_weights(tmp_path, weights):
  specs = [{"input": ["x"], "weight": weight, "output_dir": str(tmp_path)} for weight in weights]
  refusal(utils.convert_blend, specs, 20, 4)
