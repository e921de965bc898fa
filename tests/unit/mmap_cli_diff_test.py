# SPDX-License-Identifier: Apache-2.0
"""Tests of `mmap-index diff`: the first other sample of two orders, whoever made them, and the reason."""

import json
import os
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from maxtext.input_pipeline import _megatron_blending as blending
from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline._mmap_index_cache import IndexRequest
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter
from maxtext.input_pipeline.mmap_cli import blends, diff, order_kernels, orders

D1_LENGTHS = [5, 7, 3, 9, 6, 4]


def write(prefix, lengths) -> str:
  with IndexedDatasetWriter(str(prefix), np.int32) as writer:
    for row, length in enumerate(lengths):
      writer.add_document(100 * row + np.arange(length))
  return str(prefix)


@pytest.fixture
def build(tmp_path):
  """Writes an order of D1's file, or of other lengths; returns its folder."""

  def run(name, *request, lengths=D1_LENGTHS, **settings_) -> str:
    prefix = write(tmp_path / f"data-{len(lengths)}", lengths)
    cache.write_index(str(tmp_path / name), prefix, IndexRequest(*request, **settings_))
    return str(tmp_path / name)

  return run


@pytest.fixture
def compare(mmap_index):
  """Runs `diff --json`; returns the facts."""

  def run(a, b):
    code, facts, errors = mmap_index("diff", a, b, "--json")
    assert errors == "" and code == (0 if facts["identical"] else 1)
    return facts

  return run


def reasons(facts) -> dict:
  return {reason["what"]: (reason["a"], reason["b"]) for reason in facts["reasons"]}


def as_megatron(folder, request, arrays) -> str:
  folder.mkdir()
  name = f"{'0' * 32}-GPTDataset-train"
  cache.save_indices(str(folder), name, arrays)
  content = {
    "dataset_path": "/elsewhere/data-6", "num_samples": request.num_samples, "index_split": "train",
    "random_seed": request.seed, "sequence_length": request.seq_length, "split": "1,0,0",
  }  # fmt: skip
  (folder / f"{name}-description.txt").write_text(json.dumps(content))
  return str(folder)


def test_an_order_is_identical_to_itself_whoever_wrote_it(build, compare, mmap_index, tmp_path):
  ours = build("a", 4, 42, 9)
  documents, samples, draws = orders.find(ours).arrays()
  wide = (documents.astype(np.int64), samples.astype(np.int64), draws.astype(np.int64))
  megatrons = as_megatron(tmp_path / "megatron", IndexRequest(4, 42, 9), wide)
  assert compare(ours, ours)["identical"] and compare(ours, megatrons)["identical"]
  assert mmap_index("diff", ours, megatrons) == (0, "identical (16 samples)\n", "")


@pytest.mark.parametrize(
  "request_, position, expected",
  [
    ((4, 43, 9), 0, {"seed": (42, 43)}),
    ((4, 42, 8), 0, {"epochs": (2, 1), "separate last epoch": (True, False), "samples": (16, 8)}),
    ((4, 42, 14), 0, {"separate last epoch": (True, False)}),
    ((5, 42, 9), 0, {"sequence length": (4, 5), "samples": (16, 13)}),
    ((4, 42, 9, None, "1,1"), 0, {"split": ("", "1,1"), "sequences used": ([0, 6], [0, 3]), "epochs": (2, 3)}),
  ],
)
def test_the_reason_is_what_differs(build, compare, request_, position, expected):
  facts = compare(build("a", 4, 42, 9), build("b", *request_))
  assert facts["position"] == position
  found = reasons(facts)
  assert {key: found.get(key) for key in expected} == expected
  assert "seed" in expected or "seed" not in found


def test_another_dataset_is_a_reason(build, compare):
  facts = compare(build("a", 4, 42, 8), build("b", 4, 42, 7, lengths=[5, 7, 3, 9, 6]))
  assert reasons(facts)["sequences used"] == ([0, 6], [0, 5]) and "dataset (checksums)" in reasons(facts)


def test_a_shorter_order_ends(build, compare, mmap_index, tmp_path):
  ours = build("a", 4, 42, 8)
  documents, samples, draws = orders.find(ours).arrays()
  cache.save_indices(str(tmp_path / "b"), "x", (documents, samples, draws[:5]))
  facts = compare(ours, tmp_path / "b")
  assert facts["position"] == 5 and facts["samples"][1] is None and reasons(facts) == {"samples": (8, 5)}
  assert "there is none" in mmap_index("diff", ours, tmp_path / "b")[1]


def test_samples_are_named_by_their_pieces(build, compare, mmap_index, tmp_path):
  ours = build("a", 4, 42, 8)
  documents, samples, draws = (array.copy() for array in orders.find(ours).arrays())
  draws[[2, 3]] = draws[[3, 2]]
  cache.save_indices(str(tmp_path / "b"), "x", (documents, samples, draws))
  facts = compare(ours, tmp_path / "b")
  # D1: documents 0 1 5 2 4 3, shuffle 5 0 3 6: sample 3 is (2,0) to (3,0), sample 6 (4,5) to (5,3)
  assert facts["position"] == 2 and facts["reasons"] == [] and facts["unknown"] == ["seed", "seq_length", "split"]
  assert facts["samples"][0] == [{"sequence": 5, "from": 0}, {"sequence": 2, "to": 0}]
  assert facts["samples"][1] == [{"sequence": 4, "from": 5}, {"sequence": 3, "to": 3}]
  text = mmap_index("diff", ours, tmp_path / "b")[1]
  assert "sample 2 (of 8 in A and 8 in B)" in text and "sequence 5 from token 0, 2 to token 0" in text
  assert "reason: no file says: seed, seq_length, split" in text


def test_a_damaged_copy_is_said_to_be_damaged(build, mmap_index, tmp_path):
  a, b = build("a", 4, 42, 8), build("b", 4, 42, 8)
  (path,) = Path(b).glob("*shuffle_index.npy")
  draws = np.load(path)
  draws[-1] = 0
  np.save(path, draws)
  assert "all settings agree, so one is damaged" in mmap_index("diff", a, b)[1]
  draws[-1] = 100
  np.save(path, draws)
  assert "shuffle_index is empty or has values outside 0 to 7" in mmap_index("diff", a, b)[2]


def test_orders_of_one_folder_by_the_beginning_of_a_name(build, compare, mmap_index):
  folder = build("a", 4, 42, 8)
  build("a", 4, 43, 8)
  names = orders.names_in(folder)
  assert reasons(compare(f"{folder}/{names[0][:9]}", f"{folder}/{names[1]}-shuffle_index.npy")).keys() == {"seed"}
  assert f"{folder} holds 2 orders" in mmap_index("diff", folder, folder)[2]
  assert "holds no index files" in mmap_index("diff", f"{folder}/zz", folder)[2]
  assert "is not a folder" in mmap_index("diff", f"{folder}/x/y", folder)[2]


def make_blend(folder, prefixes, weights, size=50, seed=42) -> str:
  specs = [
    {"input": [prefix], "weight": weight, "output_dir": f"{folder}/dataset_{number}"}
    for number, (prefix, weight) in enumerate(zip(prefixes, weights, strict=True))
  ]
  utils.convert_blend(specs, size, 4, seed, blend_index_output_dir=str(folder))
  return str(folder)


def test_blends(compare, mmap_index, tmp_path):
  prefixes = [write(tmp_path / "data", D1_LENGTHS), write(tmp_path / "more", [30, 8, 49])]
  a = make_blend(tmp_path / "a", prefixes, (7, 3))
  assert compare(a, make_blend(tmp_path / "same", prefixes, (0.7, 0.3)))["identical"]
  other = compare(a, make_blend(tmp_path / "weights", prefixes, (6, 4)))
  assert other["position"] == 0 or other["samples"][0] != other["samples"][1]
  assert reasons(other)["shares"] == ([0.7, 0.3], [0.6, 0.4])
  seed = compare(a, make_blend(tmp_path / "seed", prefixes, (7, 3), seed=43))
  assert seed["position"] == 0 and reasons(seed["children"][0]) == {"seed": (42, 43)}
  text = mmap_index("diff", a, tmp_path / "seed")[1]
  assert "sample 0 of dataset 0" in text and "dataset 1: first difference" in text
  longer = compare(a, make_blend(tmp_path / "longer", prefixes, (7, 3), size=51))
  assert longer["position"] == 50 and longer["samples"] == [None, {"dataset": 0, "sample": 35}]


def test_a_blend_and_a_single_dataset_are_of_two_kinds(build, mmap_index, tmp_path):
  blend = make_blend(tmp_path / "a", [write(tmp_path / "data", D1_LENGTHS)], (1,))
  assert "is the folder of a blend and the other is not" in mmap_index("diff", blend, build("b", 4, 42, 9))[2]


def test_a_blend_differs_where_a_child_does(tmp_path, compare):
  prefixes = [write(tmp_path / "data", D1_LENGTHS), write(tmp_path / "more", [30, 8, 29])]
  a, b = (make_blend(tmp_path / name, prefixes, (7, 3), size=20) for name in "ab")
  (path,) = Path(b, "dataset_1").glob("*shuffle_index.npy")
  draws = np.load(path)
  draws[[2, 3]] = draws[[3, 2]]
  np.save(path, draws)
  facts = compare(a, b)
  datasets, samples = blending.draw(blending.weighted_blend([7, 3], 20))[0]
  assert facts["position"] == int(np.flatnonzero((datasets == 1) & (samples == 2))[0])
  assert facts["samples"][0] == facts["samples"][1] == {"dataset": 1, "sample": 2}
  os.remove(path)
  assert "is missing" in json.dumps(blends.check(blends.pairs_in(b)[0], None)["problems"])


# Against a plain comparison of token ids.


def tokens(lengths, arrays, position) -> list[tuple[int, int]]:
  """The tokens of a sample as (sequence, place)."""
  documents, samples, draws = arrays
  (entry, offset), (last, end) = samples[draws[position]].tolist(), samples[draws[position] + 1].tolist()
  found = []
  for number in range(entry, last + 1):
    sequence = int(documents[number])
    stop = end + 1 if number == last else lengths[sequence]
    found += [(sequence, place) for place in range(offset, stop)]
    offset = 0
  return found


@settings(max_examples=40)
@given(data=st.data())
def test_the_first_other_sample_has_other_tokens(data):
  lengths = data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=8))
  length = data.draw(st.integers(1, 5))
  triplets = []
  for _ in range(2):
    tokens_ = sum(lengths)
    plan = utils.plan_epochs(tokens_, length, None, data.draw(st.integers(1, 3))) if tokens_ > length else None
    if plan is None:
      return
    seed = data.draw(st.integers(0, 3))
    sizes = np.array(lengths, np.int32)
    indices = utils.iter_indices(sizes, max(lengths), 0, len(lengths), plan, length, seed)
    triplets.append(tuple(array for _, array in indices))
  common = min(len(triplet[2]) for triplet in triplets)
  both = [[tokens(lengths, triplet, position) for position in range(common)] for triplet in triplets]
  plain = [position for position, (a, b) in enumerate(zip(*both, strict=True)) if a != b]
  found = order_kernels.first_other_sample(*triplets[0], *triplets[1], 0, common)
  assert found == (plain[0] if plain else -1)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(diff, "_PIECE", data.draw(st.integers(1, 5)))
    whole = diff._first_other(*triplets)
  ended = None if len(triplets[0][2]) == len(triplets[1][2]) else common
  assert whole == (plain[0] if plain else ended)
