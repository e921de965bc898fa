# SPDX-License-Identifier: Apache-2.0
"""Tests of Megatron's own cache directory as a source of indices, on one that megatron-core 0.16.1 wrote.

tests/golden/megatron_cache is written by tests/reference/write_cache_golden.py.
"""

import json
import os
from pathlib import Path
import shutil
import tempfile

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from maxtext.input_pipeline import _megatron_blending as blending
from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline import _mmap_megatron_cache as megatron
from maxtext.input_pipeline._mmap_index_cache import IndexRequest, StaleIndexError
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter
from maxtext.input_pipeline._mmap_stream import StreamSettings, open_stream

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "megatron_cache"
CONTENT = json.loads((GOLDEN / "builds.json").read_text(encoding="utf-8"))
EOD = 99
FIRST = IndexRequest(16, 1234, 44, split="8,2")  # the first child of the first build: ceil(ceil(61 * .7) * 1.005)


def write(prefix, lengths, step=100) -> str:
  with IndexedDatasetWriter(str(prefix), "int32") as writer:
    for row, length in enumerate(lengths):
      tokens = step * row + np.arange(length)
      tokens[-1:] = EOD
      writer.add_sequence(tokens)
      writer.end_document()
  return str(prefix)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory) -> list[str]:
  """The datasets of the cache, in another folder than megatron-core read them in."""
  folder = tmp_path_factory.mktemp("moved")
  return [write(folder / f"books-{number}", lengths) for number, lengths in enumerate(CONTENT["children"])]


@pytest.fixture
def folder(tmp_path) -> str:
  """A copy of the cache directory that a test may change."""
  return shutil.copytree(GOLDEN, tmp_path / "cache").as_posix()


def load(folder, prefix, request=FIRST):
  """Loads as a run does; returns paths, arrays and the stamps."""
  stamps = cache.Stamps(folder)
  dataset = cache.open_dataset(prefix)
  found = megatron.load_index(folder, dataset, request, cache.describe(dataset, request), stamps)
  return found, stamps


def find(folder, prefix, request=FIRST) -> megatron.Found:
  return megatron.find_index(folder, request, cache.describe(prefix, request), prefix)


def description_of(folder, request, prefix) -> Path:
  """The description file of an order that the folder holds."""
  paths = find(folder, prefix, request).paths
  assert paths is not None
  return Path(paths[0].replace("document_index.npy", "description.txt"))


def change(folder, prefix, request=FIRST, **fields) -> None:
  """Rewrites fields of the description of an order; None takes one out."""
  path = description_of(folder, request, prefix)
  content = json.loads(path.read_text(encoding="utf-8")) | fields
  path.write_text(json.dumps({key: value for key, value in content.items() if value != "gone"}), encoding="utf-8")
  megatron._read_candidates.cache_clear()  # descriptions are read once


# What is in the directory.


def orders():
  """Every order of the three builds, as (number of the dataset, its request)."""
  for build in CONTENT["builds"]:
    for part in range(2):
      numbers, weights = [0, 1], build["weights"]
      if build.get("per_split"):
        numbers, weights = build["per_split"][part]
      size = build["sizes"][part]
      shares = utils._normalize_weights(weights) if weights else []
      counts = utils.compute_blend_buffers(size, shares, 0.5) if weights else [None] * len(numbers)
      if len(numbers) == 1:
        counts = [size]
      for number, count in zip(numbers, counts, strict=True):
        split = build.get("split", "")
        request = IndexRequest(
          build["seq_length"], build["seed"], count, None if count else 1, split, part if split else 0
        )
        yield pytest.param(number, request, id=f"books-{number}-{build['seq_length']}-{part}-{count}")


def test_cache_says_where_it_is_from():
  assert CONTENT["provenance"]["megatron-core"] == "0.16.1"
  assert sum(megatron.is_description(path.name) for path in GOLDEN.iterdir()) == 16


@pytest.mark.parametrize("number, request_", orders())
def test_every_order_of_the_directory_is_found_and_is_ours(datasets, folder, number, request_):
  (found, stamps) = load(folder, datasets[number], request_)
  assert found is not None and stamps.changed
  paths, arrays = found
  assert [os.path.dirname(path) for path in paths] == [folder] * 3
  for array, expected in zip(arrays, cache.build_in_memory(datasets[number], request_)[:3], strict=True):
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize("split", ["8,2", "80,20", "0.8,0.2", "8,1,1"])
def test_a_split_agrees_by_its_ranges_and_not_by_its_text(datasets, folder, split):
  request = IndexRequest(16, 1234, 43, split=split)
  assert find(folder, datasets[0], request).paths == find(folder, datasets[0]).paths


@pytest.mark.parametrize("samples", [42, 43, 48])
def test_a_number_of_samples_agrees_by_its_epochs(datasets, folder, samples):
  """The same epochs are the same arrays, whoever asked for how many samples of them."""
  request = IndexRequest(16, 1234, samples, split="8,2")
  assert cache.describe(datasets[0], request).name == cache.describe(datasets[0], FIRST).name
  assert find(folder, datasets[0], request).paths == find(folder, datasets[0]).paths


def test_an_order_without_a_split_is_one_of_a_part_of_its_own(datasets, folder):
  """Per-split paths: the description has neither split nor matrix."""
  request = IndexRequest(8, 7, None, 1)
  content = json.loads(description_of(folder, request, datasets[1]).read_text(encoding="utf-8"))
  assert (content["split"], content["split_matrix"], content["num_samples"]) == (None, None, None)


# Older and other versions.


@pytest.mark.parametrize(
  "fields",
  [
    {"dataset_path": "gone", "path_prefix": "/old/place/books-0"},
    {"dataset_path": r"D:\data\books-0"},
    {"split_matrix": "gone"},
    {"tokenizer": "gone", "unknown": {"field": [1]}},
    {"add_extra_token_to_sequence": True, "drop_last_partial_validation_sequence": False},
    {"class": "MyGPTDataset"},
  ],
  ids=str,
)
def test_descriptions_of_other_versions(datasets, folder, fields):
  change(folder, datasets[0], **fields)
  found, _ = load(folder, datasets[0])
  assert found is not None


@pytest.mark.parametrize(
  "fields, reason",
  [
    ({"sequence_length": 2048}, "has sequence_length 2048, and this run asks for 16"),
    ({"random_seed": 1}, "has random_seed 1, and this run asks for 1234"),
    ({"add_extra_token_to_sequence": False}, "has add_extra_token_to_sequence False, and this run asks for True"),
    ({"num_samples": 4000}, "has num_samples 4000, which is 388 epochs"),
    ({"num_samples": "many"}, "has num_samples many, which is no order of this dataset"),
    ({"split_matrix": [[0, 0.7], [0.7, 1.0], None]}, "is of 0 to 7 of 10 sequences (split 8,2, train)"),
    ({"split_matrix": [None, [0.8, 1.0], None]}, "is of an unknown part of 10 sequences"),
    ({"split_matrix": 7}, "is of an unknown part of 10 sequences"),
    ({"split_matrix": "gone", "split": "1,1"}, "is of 0 to 5 of 10 sequences"),
    ({"index_split": "later"}, "is of an unknown part of 10 sequences (split 8,2, later)"),
  ],
  ids=str,
)
def test_the_nearest_description_is_named_with_what_differs(datasets, folder, fields, reason):
  path = description_of(folder, FIRST, datasets[0])
  change(folder, datasets[0], **fields)
  for other in Path(folder).glob("*-description.txt"):
    if other != path:
      other.unlink()
  found = find(folder, datasets[0])
  assert found.paths is None
  assert found.reason.startswith(f"{path} ")
  assert reason in found.reason
  with pytest.raises(StaleIndexError, match=path.name):
    load(folder, datasets[0])


def test_of_several_descriptions_the_nearest_is_named(datasets, folder):
  request = IndexRequest(16, 1235, 43, split="8,2")
  found = find(folder, datasets[0], request)
  assert found.paths is None
  assert "has random_seed 1234, and this run asks for 1235" in found.reason


def test_of_two_datasets_of_one_name_the_one_with_the_likelier_path_is_taken(datasets, folder):
  """`a/books-0` and `b/books-0` have the same order by their descriptions."""
  path = description_of(folder, FIRST, datasets[0])
  start = path.as_posix().removesuffix("-description.txt")
  place = Path(datasets[0]).parent.name
  for name in (*cache.ARRAYS, "description"):
    suffix = "txt" if name == "description" else "npy"
    shutil.copy(f"{start}-{name}.{suffix}", f"{folder}/0other-GPTDataset-train-{name}.{suffix}")
  other = Path(folder) / "0other-GPTDataset-train-description.txt"
  assert find(folder, datasets[0]).paths[0].startswith(f"{folder}/0other")
  change(folder, datasets[0], dataset_path="/elsewhere/books-0")
  content = json.loads(path.read_text(encoding="utf-8")) | {"dataset_path": f"/old/{place}/books-0"}
  path.write_text(json.dumps(content), encoding="utf-8")
  megatron._read_candidates.cache_clear()
  assert find(folder, datasets[0]).paths[0].startswith(start)
  assert "/elsewhere/" in other.read_text(encoding="utf-8")


# Nothing there.


def test_a_folder_without_megatrons_files(tmp_path, datasets):
  assert find(str(tmp_path), datasets[0]) == megatron.Found(None, "")
  assert find(str(tmp_path / "none"), datasets[0]) == megatron.Found(None, "")
  assert load(str(tmp_path), datasets[0])[0] is None


def test_a_folder_of_other_datasets(tmp_path, folder):
  prefix = write(tmp_path / "news", CONTENT["children"][0])
  assert find(folder, prefix).reason == f"{folder} holds indices of books-0, books-1 and not of news"


def test_shards_have_no_order_of_megatrons(folder, datasets):
  assert load(folder, datasets, IndexRequest(16, 1234, 40))[0] is None


@pytest.mark.parametrize("text", ["", "{", "[1]", "7", "\udc80", '{"class": "GPTDataset"}', "[" * 100_000])
def test_descriptions_that_are_none(tmp_path, datasets, text):
  (tmp_path / "x-GPTDataset-train-description.txt").write_bytes(text.encode("utf-8", "surrogateescape"))
  assert find(str(tmp_path), datasets[0]).paths is None


ANY_JSON = st.recursive(
  st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400) | st.just("books-0"),
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
  max_leaves=6,
)
FIELDS = ("dataset_path", "num_samples", "index_split", "random_seed", "sequence_length", "split", "split_matrix", "size",
          "weights", "datasets", "add_extra_token_to_sequence")  # fmt: skip


@given(data=st.data())
def test_any_json_is_a_reason_and_not_a_failure(datasets, data):
  kind = data.draw(st.sampled_from(["GPTDataset", "BlendedDataset"]))
  changes = data.draw(st.dictionaries(st.sampled_from(FIELDS), ANY_JSON, min_size=1))
  with tempfile.TemporaryDirectory() as folder:
    for path in GOLDEN.glob(f"*-{kind}-train-description.txt"):
      content = json.loads(path.read_text(encoding="utf-8")) | changes
      Path(folder, path.name).write_text(json.dumps(content), encoding="utf-8")
    assert find(folder, datasets[0]).paths is None, "no array is there"
    found = find_blend(folder, WEIGHTED, "train")
    assert found.paths is None and bool(found.reason) == (kind == "BlendedDataset")


# Damaged, replaced and foreign arrays.


def arrays_of(folder, prefix) -> tuple[str, ...]:
  paths = find(folder, prefix).paths
  assert paths is not None
  return paths


@pytest.mark.parametrize("number", range(3))
def test_a_missing_array_is_named(datasets, folder, number):
  os.remove(arrays_of(folder, datasets[0])[number])
  found = find(folder, datasets[0])
  assert found.paths is None
  assert found.reason.endswith(f"has beside it a {cache.ARRAYS[number]} that is missing")


def test_an_array_of_another_shape_is_named(datasets, folder):
  path = arrays_of(folder, datasets[0])[1]
  np.save(path, np.load(path)[:-1])
  assert "has beside it a sample_index that is <i4[" in find(folder, datasets[0]).reason


def test_a_truncated_array_is_named(datasets, folder):
  path = arrays_of(folder, datasets[0])[2]
  os.truncate(path, os.path.getsize(path) // 2)
  assert "has beside it a shuffle_index that cannot be used" in find(folder, datasets[0]).reason


@pytest.mark.parametrize("number, position", [(0, 0), (0, -1), (1, 3), (2, 5)])
def test_d16_one_changed_value_is_found_with_its_position(datasets, folder, number, position):
  path = arrays_of(folder, datasets[0])[number]
  array = np.load(path)
  before = array[position].tolist()
  array[position] = 0 if np.any(array[position]) else 1
  np.save(path, array)
  with pytest.raises(StaleIndexError) as error:
    load(folder, datasets[0])
  assert str(error.value) == (
    f"{path} was not built from this dataset: position {position % len(array)} is {array[position].tolist()}, and the "
    f"dataset gives {before}"
  )


def test_a_dataset_replaced_in_place_is_found(tmp_path, datasets, folder):
  """Megatron's own cache is keyed by path and settings: the same totals in other sequences have the same file names."""
  lengths = list(CONTENT["children"][0])
  lengths[0], lengths[1] = lengths[1], lengths[0]
  prefix = write(tmp_path / "books-0", lengths)
  assert find(folder, prefix).paths is not None
  with pytest.raises(StaleIndexError, match="sample_index.npy was not built from this dataset: position"):
    load(folder, prefix)


def test_the_check_is_made_once(datasets, folder, monkeypatch):
  _, stamps = load(folder, datasets[0])
  stamps.save()
  checked = []
  monkeypatch.setattr(megatron, "check_content", lambda *arguments: checked.append(arguments))
  found, _ = load(folder, datasets[0])
  assert found is not None and not checked
  os.utime(found[0][0], ns=(1, 1))  # another file, for all that the stamps know
  load(folder, datasets[0])
  assert len(checked) == 1


@pytest.mark.parametrize("length", [0, 1, 5, 3000])
def test_first_difference(length, monkeypatch):
  monkeypatch.setattr(megatron, "_PIECE", 7)
  array = np.arange(2 * length).reshape(-1, 2)
  assert megatron.first_difference(array, array.copy()) is None
  assert megatron.first_difference(array, np.vstack([array, [[1, 1]]])) == length
  for position in range(0, length, 250):
    other = array.copy()
    other[position:, 1] += 1
    assert megatron.first_difference(array, other) == position


# Pairs of blends.


WEIGHTED = blending.weighted_blend([0.7, 0.3], 61)


def find_blend(folder, request, split, names=("x/books-0", "y/books-1")):
  sizes = None if request.sizes is None else request.sizes.tolist()
  return megatron.find_blend(folder, split, request.weights.tolist(), request.size, sizes, names)


def children_of(datasets, build, part):
  """Samples of each dataset of a build without weights, in one epoch."""
  split = build.get("split", "")
  request = IndexRequest(build["seq_length"], build["seed"], None, 1, split, part if split else 0)
  return [cache.describe(prefix, request).plan.samples for prefix in datasets]


def test_the_pair_of_a_weighted_blend(folder):
  """Megatron's pair has a draw more, since each share is rounded up."""
  found = find_blend(folder, WEIGHTED, "train")
  assert found.paths is not None
  arrays, _ = blending.load_pair(found.paths, WEIGHTED, cache.Stamps(folder))
  for array, expected in zip(arrays, blending.draw(WEIGHTED)[0], strict=True):
    np.testing.assert_array_equal(array, expected)
  assert len(np.load(found.paths[0])) == 62


@pytest.mark.parametrize("build, part", [(1, 0), (1, 1), (2, 0)])
def test_pairs_of_blends_without_weights(datasets, folder, build, part):
  build = CONTENT["builds"][build]
  request = blending.whole_blend(children_of(datasets, build, part), build["sizes"][part])
  found = find_blend(folder, request, utils.SPLIT_NAMES[part])
  assert found.paths is not None, found.reason
  arrays, _ = blending.load_pair(found.paths, request, cache.Stamps(folder))
  assert len(np.load(found.paths[0])) == request.size
  for array, expected in zip(arrays, blending.draw(request)[0], strict=True):
    np.testing.assert_array_equal(array, expected)


@pytest.mark.parametrize(
  "request_, split, names, reason",
  [
    (blending.weighted_blend([0.6, 0.4], 61), "train", None, "has weights 0.7, 0.3, and this blend has 0.6, 0.4"),
    (blending.weighted_blend([0.7, 0.3], 63), "train", None, "has size 62, and this blend has 63 draws"),
    (WEIGHTED, "test", None, "is of the train part, and this blend is of the test part"),
    (WEIGHTED, "train", ("books-1", "books-0"), "datasets books-0, books-1, and this blend is of books-1, books-0"),
    (blending.weighted_blend([0.7, 0.2, 0.1], 61), "train", None, "and this blend has 0.7, "),
    (blending.whole_blend([3, 4], None), "train", None, "and this blend draws 3, 4 and no more"),
  ],
  ids=["weights", "size", "split", "datasets", "number", "sizes"],
)
def test_the_nearest_pair_is_named_with_what_differs(folder, request_, split, names, reason):
  found = find_blend(folder, request_, split, names)
  assert found.paths is None
  assert reason in found.reason


def test_of_several_pairs_the_shortest_that_is_long_enough_is_taken(folder):
  found = find_blend(folder, WEIGHTED, "train")
  content = json.loads(Path(found.paths[0].replace("dataset_index.npy", "description.txt")).read_text(encoding="utf-8"))
  for name, size in (("0long", 500), ("0short", 60), ("0just", 61)):
    start = Path(folder) / f"{name}-BlendedDataset-train"
    Path(f"{start}-description.txt").write_text(json.dumps(content | {"size": size}), encoding="utf-8")
    for array in megatron.PAIR:
      Path(f"{start}-{array}.npy").touch()
  assert find_blend(folder, WEIGHTED, "train").paths[0].startswith(f"{folder}/0just-")


def test_a_pair_with_a_missing_half(folder):
  paths = find_blend(folder, WEIGHTED, "train").paths
  os.remove(paths[1])
  found = find_blend(folder, WEIGHTED, "train")
  assert found.paths is None
  assert "has no " in found.reason and "dataset_sample_index.npy beside it" in found.reason


def test_a_folder_without_pairs(tmp_path):
  assert find_blend(str(tmp_path), WEIGHTED, "train") == megatron.Found(None, "")


# A run on it.


@pytest.mark.parametrize("moved", [False, True])
def test_a_run_keeps_the_very_arrays_that_megatron_trained_on(folder, datasets, caplog, moved):
  """Both children and the blend; in a folder of descriptions and arrays alone, as Megatron left it."""
  if moved:
    folder = shutil.move(folder, folder + "-elsewhere")
  before = {path.name for path in Path(folder).iterdir()}
  files = ";".join(f"{folder}|{prefix},{weight}" for prefix, weight in zip(datasets, (0.7, 0.3), strict=True))
  settings = StreamSettings(files, 16, EOD, 1234, 61, split="8,2", blend_index_dir=folder)
  stream = open_stream(settings)
  assert [child.index.found for child in stream.children] == [True, True] and stream.source.pair.found
  paths = [path for child in stream.children for path in child.index.paths] + list(stream.source.pair.paths)
  assert all("Dataset-train-" in path for path in paths) and not caplog.records
  assert {path.name for path in Path(folder).iterdir()} == before | {"stamps.json"}
  assert open_stream(settings).order == stream.order


def open_blend(folder, datasets, **settings):
  """Opens the first build's training stream, with its index folders in Megatron's directory."""
  files = "".join(f"{folder}|{prefix},{weight};" for prefix, weight in zip(datasets, (7, 3), strict=True))
  settings = {"num_samples": 61, "split": "8,2", "blend_index_dir": folder} | settings
  return open_stream(StreamSettings(files, 16, EOD, **settings))


def built_elsewhere(tmp_path, datasets, **settings):
  return open_blend(str(tmp_path / "own"), datasets, **settings)


def same_tokens(one, other) -> bool:
  rows = np.arange(len(other))
  return len(one) == len(other) and np.array_equal(one.source.read_rows(rows), other.source.read_rows(rows))


@pytest.mark.parametrize("part", [0, 1], ids=["train", "valid"])
def test_a_run_takes_every_array_from_megatrons_directory(tmp_path, datasets, folder, part):
  before = {path.name for path in GOLDEN.iterdir()}
  settings = {"num_samples": (61, 10)[part], "split_index": part, "part": utils.SPLIT_NAMES[part]}
  stream = open_blend(folder, datasets, **settings)
  assert [child.index.found for child in stream.children] + [stream.source.pair.found] == [True] * 3
  assert {path.name for path in Path(folder).iterdir()} == before | {cache.STAMPS}
  assert same_tokens(stream, built_elsewhere(tmp_path, datasets, **settings))


def test_a_process_that_does_not_write_leaves_the_directory_as_it_is(datasets, folder):
  before = sorted(os.listdir(folder))
  settings = StreamSettings(f"{folder}|{datasets[0]}", 16, EOD, num_samples=44, split="8,2")
  stream = open_stream(settings, write=False)
  assert stream.children[0].index.found
  assert sorted(os.listdir(folder)) == before


def test_a_run_says_what_differs_and_builds_its_own(tmp_path, datasets, folder, caplog):
  settings = {"num_samples": 70, "seed": 5}
  stream = open_blend(folder, datasets, **settings)
  assert [child.index.found for child in stream.children] + [stream.source.pair.found] == [False] * 3
  assert same_tokens(stream, built_elsewhere(tmp_path, datasets, **settings))
  assert "has random_seed 1234, and this run asks for 5; building the indices" in caplog.text
  assert "has size 62, and this blend has 70 draws; drawing the blend again" in caplog.text
  assert open_blend(folder, datasets, **settings).children[0].index.found, "ours lie beside Megatron's now"


def test_a_run_builds_again_what_megatron_built_of_other_data(tmp_path, folder, caplog):
  lengths = [list(rows) for rows in CONTENT["children"]]
  lengths[0][:2] = lengths[0][1::-1]
  datasets = [write(tmp_path / f"books-{number}", rows) for number, rows in enumerate(lengths)]
  stream = open_blend(folder, datasets)
  assert [child.index.found for child in stream.children] == [False, True]
  assert "was not built from this dataset: position" in caplog.text
  assert same_tokens(stream, built_elsewhere(tmp_path, datasets))
