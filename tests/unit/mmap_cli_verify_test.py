# SPDX-License-Identifier: Apache-2.0
"""Tests of `mmap-index verify`: it passes what is right, and names the file and place of what is not."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from maxtext.input_pipeline import _megatron_blending as blending
from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline import _mmap_megatron_cache as megatron_cache
from maxtext.input_pipeline import _mmap_remote_copy as remote_copy
from maxtext.input_pipeline._mmap_index_cache import IndexRequest
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter
from maxtext.input_pipeline.mmap_cli import blends, candidates, orders, rebuild
from maxtext.input_pipeline.mmap_cli import verify as verify_command

D1_LENGTHS = [5, 7, 3, 9, 6, 4]
REQUESTS = [
  IndexRequest(4, 42, 8),
  IndexRequest(4, 42, 9),  # the last epoch apart
  IndexRequest(4, 42, 14),
  IndexRequest(4, 42, 20),
  IndexRequest(4, 7, None, 3),
  IndexRequest(4, 7, 3, None, "1,1", 1),
  IndexRequest(4, 7, 30, None, "1,1", 0),
  IndexRequest(4, 7, 9, add_extra_token=0),
]


def write(prefix, lengths, first=0) -> str:
  with IndexedDatasetWriter(str(prefix), np.int32) as writer:
    for row, length in enumerate(lengths):
      writer.add_document(first + 100 * row + np.arange(length))
  return str(prefix)


@pytest.fixture
def dataset(tmp_path) -> str:
  return write(tmp_path / "data", D1_LENGTHS)


@pytest.fixture
def verify(mmap_index):
  """Runs `verify --json`; returns the exit code and the facts."""

  def run(*arguments):
    code, facts, errors = mmap_index("verify", *arguments, "--json")
    assert errors == "" and (code == 1) == bool(facts["problems"])
    return code, facts

  return run


def change(path, position, value) -> None:
  """Changes one entry of a `.npy` file, and keeps its size."""
  array = np.load(path)
  array[position] = value
  np.save(path, array)


def as_megatron(folder, dataset, request) -> dict:
  """Writes an order as Megatron's cache holds it; returns its description."""
  part = utils.SPLIT_NAMES[request.split_index]
  description = {
    "class": "GPTDataset", "dataset_path": f"/elsewhere/{os.path.basename(dataset)}", "num_samples": request.num_samples,
    "index_split": part, "random_seed": request.seed, "sequence_length": request.seq_length,
    "split": request.split or None, "split_matrix": None, "tokenizer": {"class": "none"},
  }  # fmt: skip
  start = describe(folder, f"GPTDataset-{part}", description)
  cache.save_indices(str(folder), os.path.basename(start), cache.build_in_memory(dataset, request)[:3])
  return description


def describe(folder, end, content) -> str:
  """Writes one of Megatron's descriptions under its checksum; returns what the names beside it begin with."""
  text = json.dumps(content, indent=4)
  start = f"{folder}/{hashlib.md5(text.encode()).hexdigest()}-{end}"
  Path(start + "-description.txt").write_text(text)
  return start


@pytest.mark.parametrize("request_", REQUESTS, ids=str)
def test_what_a_run_writes_is_right(verify, dataset, tmp_path, request_):
  cache.write_index(str(tmp_path / "npy"), dataset, request_)
  code, facts = verify(tmp_path / "npy", dataset)
  (order,) = facts["orders"]
  assert code == 0 and order["maker"] == "this branch" and order["dataset"] == dataset
  assert order["samples"] == len(cache.build_in_memory(dataset, request_)[2])
  assert order["settings"]["seed"] == request_.seed and order["settings"]["seq_length"] == 4


def test_several_orders_datasets_and_shards(verify, dataset, tmp_path):
  other, folder = write(tmp_path / "more", [3, 8, 2], 1000), str(tmp_path / "npy")
  shards = f"{dataset}:{other}"
  for paths in (dataset, other, [dataset, other]):
    cache.write_index(folder, paths, IndexRequest(4, 42, 8))
  code, facts = verify(folder, dataset, other, shards)
  assert code == 0 and {order["dataset"] for order in facts["orders"]} == {dataset, other, shards}
  code, facts = verify(folder, dataset)
  assert code == 1 and len(facts["problems"]) == 2
  assert any("2 file(s) with 9 sequences and 47 tokens" in problem for problem in facts["problems"])
  name = next(order["name"] for order in facts["orders"] if not order["problems"])
  assert verify(folder, dataset, "--name", name[:8])[0] == 0


@pytest.mark.parametrize("array, position", [("document_index", 1), ("sample_index", 5), ("shuffle_index", 7)])
def test_a_changed_value_is_named(verify, dataset, tmp_path, array, position):
  paths, _ = cache.write_index(str(tmp_path / "npy"), dataset, IndexRequest(4, 42, 8))
  before = np.load(paths[array])[position]
  change(paths[array], position, 0)
  code, facts = verify(tmp_path / "npy", dataset)
  assert code == 1 and facts["orders"][0]["differences"] == [
    {"file": paths[array], "position": position, "found": (before * 0).tolist(), "expected": before.tolist()}
  ]
  assert sum("xxh3_128" in problem for problem in facts["problems"]) == 1
  assert f"{paths[array]}: entry {position} is {(before * 0).tolist()}; expected" in " ".join(facts["problems"])


def test_the_first_of_several_differences_is_found_beyond_a_piece(monkeypatch):
  monkeypatch.setattr(megatron_cache, "_PIECE", 4)
  found, expected = np.arange(20), np.arange(20)
  found[[13, 17]] = 0
  assert rebuild.first_difference(found, expected) == {"position": 13, "found": 0, "expected": 13}
  assert rebuild.first_difference(expected, expected) is None
  shapes = rebuild.first_difference(found[:3], expected)
  assert shapes == {"position": None, "found": [3], "expected": [20]}


def test_a_file_that_is_cut_or_missing(verify, dataset, tmp_path):
  paths, _ = cache.write_index(str(tmp_path / "npy"), dataset, IndexRequest(4, 42, 8))
  os.truncate(paths["sample_index"], 150)
  assert "sample_index.npy has 22 bytes of data" in verify(tmp_path / "npy", dataset)[1]["problems"][0]
  os.remove(paths["sample_index"])
  assert "sample_index.npy is missing" in verify(tmp_path / "npy", dataset)[1]["problems"][0]
  os.remove(paths["metadata"])
  cache.write_index(str(tmp_path / "npy"), dataset, IndexRequest(4, 42, 8))
  os.remove(paths["metadata"])
  assert "says what it was built from" in verify(tmp_path / "npy", dataset)[1]["problems"][0]
  Path(paths["metadata"]).write_text("{")
  assert "is not JSON" in verify(tmp_path / "npy", dataset)[1]["problems"][0]


def test_metadata_of_other_settings(verify, dataset, tmp_path):
  paths, _ = cache.write_index(str(tmp_path / "npy"), dataset, IndexRequest(4, 42, 8))
  metadata = json.loads(Path(paths["metadata"]).read_text())
  metadata["built_from"]["seed"] = 43
  Path(paths["metadata"]).write_text(json.dumps(metadata))
  code, facts = verify(tmp_path / "npy", dataset)
  assert code == 1 and {os.path.basename(d["file"]).split("-")[1] for d in facts["orders"][0]["differences"]} == {
    "document_index.npy", "sample_index.npy", "shuffle_index.npy",
  }  # fmt: skip
  assert "its name should be" in facts["problems"][0]


def test_a_replaced_dataset_of_the_same_size(verify, dataset, tmp_path):
  cache.write_index(str(tmp_path / "npy"), dataset, IndexRequest(4, 42, 8))
  write(dataset, D1_LENGTHS[::-1])
  code, facts = verify(tmp_path / "npy", dataset)
  assert code == 1 and "was built from 1 file(s) with 6 sequences and 34 tokens" in facts["problems"][0]


RELEASED = """
import sys
import numpy as np
from maxtext.input_pipeline import _mmap_index_utils as released
folder, prefix, with_empty = sys.argv[1:]
for name, data, samples, epochs, split in (
  ("few", prefix, 9, None, None), ("epochs", prefix, None, 3, None), ("split", prefix, 6, None, "2,1"),
  ("empty", with_empty, 9, None, None),
):
  released.convert([data], folder + "/" + name, 4, samples, epochs, 42, split)
np.savez(folder + "/results.npz", module=released.__file__)
"""


def test_the_releases_files(verify, dataset, tmp_path, run_released):
  with_empty, peer = str(tmp_path / "with_empty"), tmp_path / "peer"
  with IndexedDatasetWriter(with_empty, np.int32) as writer:
    for row, length in enumerate(D1_LENGTHS):
      writer.add_document(np.arange(length))
      if row == 2:
        writer.add_document([])
  peer.mkdir()
  run_released(peer, RELEASED, peer, dataset, with_empty)
  for name in ("few", "epochs", "split"):
    code, facts = verify(peer / name, dataset)
    assert code == 0 and facts["orders"][0]["maker"] == "the release"
    (path,) = (peer / name).glob("*document_index.npy")
    change(path, 0, np.load(path)[1])
    assert "document_index.npy: entry 0 is" in verify(peer / name, dataset)[1]["problems"][0]
  code, facts = verify(peer / "empty", with_empty)  # it counts documents
  assert code == 1 and "the release counts documents (7 here)" in facts["problems"][-1]


@pytest.mark.parametrize("request_", [given for given in REQUESTS if given.num_samples and given.add_extra_token])
def test_megatrons_files(verify, dataset, tmp_path, request_):
  other = write(tmp_path / "more", [3, 8, 2], 1000)
  (tmp_path / "npy").mkdir()
  as_megatron(tmp_path / "npy", dataset, request_)
  for paths in ([dataset], [other, dataset]):
    code, facts = verify(tmp_path / "npy", *paths)
    assert code == 0 and facts["orders"][0]["maker"] == "Megatron" and facts["orders"][0]["dataset"] == dataset
  (path,) = (tmp_path / "npy").glob("*shuffle_index.npy")
  (description,) = (tmp_path / "npy").glob("*description.txt")
  text = description.read_text()
  description.write_text(text.replace("none", "some"))
  assert "was changed: the name of what it says" in verify(tmp_path / "npy", dataset)[1]["problems"][0]
  description.write_text(text)
  np.save(path, np.load(path).astype(np.int64))
  assert "shuffle_index.npy holds <i8; expected <u4" in verify(tmp_path / "npy", dataset)[1]["problems"][0]
  change(path, 2, 77)
  assert verify(tmp_path / "npy", dataset)[1]["orders"][0]["differences"][0]["position"] == 2
  assert "was built from /elsewhere/data" in verify(tmp_path / "npy", other, other)[1]["problems"][0]


GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "megatron_cache"


def test_a_cache_that_megatron_core_wrote(verify, tmp_path):
  lengths = json.loads((GOLDEN / "builds.json").read_text())["children"]
  prefixes = [str(tmp_path / f"books-{number}") for number in range(len(lengths))]
  for prefix, own in zip(prefixes, lengths, strict=True):
    with IndexedDatasetWriter(prefix, np.int32) as writer:
      for length in own:  # empty sequences are kept
        writer.add_sequence(np.arange(length))
        writer.end_document()
  code, facts = verify(GOLDEN, *prefixes)
  assert code == 0 and len(facts["orders"]) == 11 and len(facts["blends"]) == 5
  assert all(pair["weights"] for pair in facts["blends"]) and all(order["samples"] for order in facts["orders"])


def test_a_description_without_a_seed(verify, dataset, tmp_path):
  (tmp_path / "npy").mkdir()
  as_megatron(tmp_path / "npy", dataset, REQUESTS[0])
  (path,) = (tmp_path / "npy").glob("*description.txt")
  path.write_text("{}")
  assert "does not say what an order was built from (KeyError" in verify(tmp_path / "npy", dataset)[1]["problems"][0]


# Blends.


@pytest.fixture
def blend(dataset, tmp_path) -> tuple[Path, list[str]]:
  """A blend of three datasets, the second of weight 0; its folder and the datasets."""
  prefixes = [dataset, write(tmp_path / "unused", [9]), write(tmp_path / "more", [3, 8, 2], 1000)]
  specs = [
    {"input": [prefix], "weight": weight, "output_dir": str(tmp_path / "blend" / f"dataset_{number}")}
    for number, (prefix, weight) in enumerate(zip(prefixes, (7, 0, 3), strict=True))
  ]
  utils.convert_blend(specs, 50, 4, 42, blend_index_output_dir=str(tmp_path / "blend"))
  return tmp_path / "blend", prefixes


def test_a_blend_and_its_children(verify, blend, mmap_index):
  folder, prefixes = blend
  code, facts = verify(folder, *prefixes, "--weights", "7,0,3")
  assert code == 0 and [order["dataset"] for order in facts["orders"]] == [prefixes[0], prefixes[2]]
  (pair,) = facts["blends"]
  assert pair["draws"] == 50 and pair["counts"] == [35, 15] and pair["weights"] == [0.7, 0.3]
  code, facts = verify(folder, *prefixes)
  assert code == 0 and facts["blends"][0]["weights"] is None
  assert "counts only" in mmap_index("verify", folder, *prefixes)[1]


def test_a_blend_of_other_weights_and_a_changed_draw(verify, blend):
  folder, prefixes = blend
  problem = verify(folder, *prefixes, "--weights", "6,0,4")[1]["problems"][0]
  assert "dataset_index.npy: draw 3 is sample 2 of dataset 0; expected sample 1 of dataset 1" in problem
  change(folder / "dataset_sample_index.npy", 3, 9)
  assert "dataset_sample_index.npy: draw 3 is sample 9 of dataset 0" in verify(folder, *prefixes)[1]["problems"][0]
  os.remove(folder / "dataset_sample_index.npy")
  assert "dataset_sample_index.npy is missing" in verify(folder, *prefixes)[1]["problems"][0]


def test_a_child_with_too_few_samples(verify, blend):
  folder, prefixes = blend
  for path in (folder / "dataset_2").iterdir():
    path.unlink()
  cache.write_index(str(folder / "dataset_2"), prefixes[2], IndexRequest(4, 42, 3))
  problem = verify(folder, *prefixes)[1]["problems"][0]
  assert "15 samples are drawn from dataset 1, whose indices have 3" in problem


def write_pair(folder, content, request) -> str:
  """Writes a blend as Megatron's cache holds it; returns the path of its description."""
  start = describe(folder, "BlendedDataset-train", content)
  for array, values in zip(blending.ARRAYS, blending.draw(request)[0], strict=True):
    np.save(f"{start}-{array}.npy", values)
  return start + "-description.txt"


def test_megatrons_blend(verify, dataset, tmp_path):
  other, folder = write(tmp_path / "more", [3, 8, 2], 1000), tmp_path / "npy"
  folder.mkdir()
  requests = ((dataset, IndexRequest(4, 42, 29)), (other, IndexRequest(4, 42, 13)))
  children = [as_megatron(folder, prefix, request) for prefix, request in requests]
  content = {"class": "BlendedDataset", "datasets": children, "split": "train", "weights": [0.7, 0.3], "size": 40}
  request = blending.weighted_blend([0.7, 0.3], 40)
  description = write_pair(folder, content, request)
  code, facts = verify(folder, dataset, other)
  assert code == 0 and len(facts["orders"]) == 2 and facts["blends"][0]["weights"] == [0.7, 0.3]
  Path(description).write_text(json.dumps({**content, "weights": [0.6, 0.4]}))
  problems = verify(folder, dataset, other)[1]["problems"]
  assert "draw 3 is sample 2 of dataset 0; expected sample 1 of dataset 1" in problems[0]
  assert "was changed: the name of what it says begins with" in problems[1]
  os.remove(description)
  write_pair(folder, {**content, "size": 39}, request)
  assert "has 40 draws; expected 39" in " ".join(verify(folder, dataset, other)[1]["problems"])


def test_an_exhaustive_blend_of_megatron(tmp_path):
  content = {"datasets": [], "weights": [2, 5], "size": None}
  description = write_pair(tmp_path, content, blending.whole_blend([2, 5], None))
  facts = blends.check(description.removesuffix("description.txt"), None)
  assert facts["problems"] == [] and facts["counts"] == [2, 5] and facts["draws"] == 7


@pytest.mark.parametrize(
  "change_", [{"weights": ["x"]}, {"weights": [1, -1]}, {"size": "x"}, {"datasets": 3}, {"weights": 1}]
)
def test_a_blend_whose_description_is_damaged(tmp_path, change_):
  content = {"datasets": [], "weights": [0.5, 0.5], "size": 4, **change_}
  description = write_pair(tmp_path, content, blending.weighted_blend([1, 1], 4))
  facts = blends.check(description.removesuffix("description.txt"), None)
  assert len(facts["problems"]) == 1 and "does not say what an order was built from" in facts["problems"][0]


@given(data=st.data())
def test_draws_are_counted_as_one_would(data):
  datasets = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=40))
  samples = [datasets[:place].count(dataset) for place, dataset in enumerate(datasets)]
  if data.draw(st.booleans()):
    samples[data.draw(st.integers(0, len(samples) - 1))] = 50
  arrays = np.array(datasets, np.int16), np.array(samples, np.int64)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(blends, "_PIECE", data.draw(st.integers(1, 10)))
    counts, place = blends.count(arrays)
  assert place == (samples.index(50) if 50 in samples else None)
  if place is None:
    assert counts == [datasets.count(dataset) for dataset in range(max(datasets) + 1)]


def test_arguments_that_cannot_be_used(mmap_index, dataset, tmp_path):
  (tmp_path / "empty").mkdir()
  for arguments, expected in (
    ((tmp_path / "nowhere", dataset), "is not a folder"),
    ((tmp_path / "empty", dataset), "holds no index files"),
    ((tmp_path / "empty", tmp_path / "nothing"), "found neither"),
    ((tmp_path / "empty", dataset, "--weights", "1,x"), "is not a number for each of 1 datasets"),
  ):
    code, out, errors = mmap_index("verify", *arguments)
    assert code == 1 and out == "" and errors.startswith("error: ") and expected in errors


def test_the_request_of_an_order_is_the_one_that_built_it(dataset, tmp_path):
  for request in REQUESTS:
    description = cache.write_index(str(tmp_path / "npy"), dataset, request)[1]
    order = orders.open_order(str(tmp_path / "npy"), description.name)
    again = rebuild.describe(order, cache.open_dataset(dataset))
    assert dataclasses.replace(again, facts=()) == dataclasses.replace(description, facts=())


@given(data=st.data())
def test_damaged_metadata_is_a_problem_and_no_traceback(data, tmp_path_factory):
  folder = tmp_path_factory.mktemp("npy")
  prefix = write(folder / "data", D1_LENGTHS)
  metadata = Path(cache.write_index(str(folder), prefix, IndexRequest(4, 42, 9))[0]["metadata"])
  content = json.loads(metadata.read_text())
  place = content if data.draw(st.booleans()) else content["built_from"]
  numbers = st.booleans() | st.integers(-2, 2**70) | st.floats()
  values = st.none() | numbers | st.text(max_size=3) | st.lists(numbers, max_size=2)
  key, value = data.draw(st.sampled_from(sorted(place))), data.draw(values)
  changed = place[key] != value
  place[key] = value
  metadata.write_text(json.dumps(content))
  facts = verify_command._check(str(folder), metadata.name.removesuffix("-metadata.json"), candidates.open_all([prefix]))
  used = place is not content or key in ("arrays", "built_from")
  assert bool(facts["problems"]) == (changed and used), (key, value)
  assert all(problem.endswith(".") for problem in facts["problems"])


def test_datasets_and_folders_at_a_url(verify, mmap_index, dataset, tmp_path, monkeypatch):
  fsspec = pytest.importorskip("fsspec")
  monkeypatch.setattr(remote_copy, "_cache_dir", str(tmp_path / "cache"))
  cache.write_index(str(tmp_path / "npy"), dataset, IndexRequest(4, 42, 9))
  store = fsspec.filesystem("memory")
  store.put(str(tmp_path / "npy"), "/url_test/npy", recursive=True)
  for end in (".idx", ".bin"):
    store.put(dataset + end, "/url_test/data" + end)
  url, folder = "memory://url_test/data", "memory://url_test/npy"
  code, facts = verify(folder, url)
  assert code == 0 and facts["orders"][0]["dataset"] == url
  assert mmap_index("diff", folder, tmp_path / "npy")[:2] == (0, "identical (16 samples)\n")
  for path in (url, "memory://url_test"):
    code, facts, _ = mmap_index("inspect", path, "--vocab-size", 100, "--json")
    assert code == 1 and facts["total"]["tokens"] == 34 and facts["datasets"][0]["ids"]["outside"] == 29
  assert mmap_index("inspect", "memory://url_test/nothing")[0] == 1
