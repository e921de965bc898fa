# SPDX-License-Identifier: Apache-2.0
"""Tests of `mmap-index stats`: what it counts without reading tokens is what the pipeline would make of them."""

import sys

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline._mmap_datasource import MegatronNpyDataSource
from maxtext.input_pipeline._mmap_index_cache import IndexRequest
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter
from maxtext.input_pipeline._mmap_shards import ShardedDataset
from maxtext.input_pipeline.input_pipeline_utils import MegatronSplitInputsTargets
from maxtext.input_pipeline.mmap_cli import mixtures, segments
from maxtext.input_pipeline.mmap_cli.histogram import LengthHistogram

EOD = 99


def write(prefix, lengths) -> str:
  """Writes documents of some tokens and EOD; a length of 0 is a document without a sequence."""
  with IndexedDatasetWriter(str(prefix), np.int32) as writer:
    for row, length in enumerate(lengths):
      writer.add_document([*range(100 * row + 100, 100 * row + 99 + length), EOD] if length else [])
  return str(prefix)


@pytest.fixture
def books(tmp_path) -> str:
  return write(tmp_path / "books", [5, 7, 3, 9, 0, 6, 4])


@pytest.fixture
def code(tmp_path) -> str:
  return write(tmp_path / "code", [30, 8, 49])


def test_document_lengths(mmap_index, books, code):
  status, facts, errors = mmap_index("stats", books, code, "--json")
  assert status == 0 and errors == ""
  first = {key: facts["datasets"][0][key] for key in ("documents", "tokens", "shortest", "50%", "longest", "mean")}
  assert first == {"documents": 6, "tokens": 34, "shortest": 3, "50%": 5, "longest": 9, "mean": 5.7}
  assert facts["datasets"][0]["empty_documents"] == 1
  assert (facts["datasets"][1]["eod_id"], facts["datasets"][1]["ends_with_eod"]) == (EOD, 3)
  assert facts["document_lengths"]["documents"] == 9 and facts["document_lengths"]["longest"] == 49
  assert "segments" not in facts
  assert "99: 100.0%" in mmap_index("stats", books)[1]


def test_segments_of_the_d1_order(mmap_index, books):
  facts = mmap_index("stats", books, "--seq-length", 4, "--seed", 42, "--samples", 8, "--json")[1]
  arrays = cache.build_in_memory(books, IndexRequest(4, 42, 8))[:3]
  rows = MegatronNpyDataSource("", books, EOD, 4, prebuilt_indices=arrays)
  fields = [MegatronSplitInputsTargets(EOD, eod_mask_loss=True).map(rows[place]) for place in range(8)]
  counts = [int(field["inputs_segmentation"][-1]) for field in fields]
  assert facts["segments"]["most"] == max(counts) and facts["segments"]["mean"] == pytest.approx(np.mean(counts))
  assert facts["histogram"] == np.bincount(counts).tolist()
  assert facts["loss_share"] == pytest.approx(np.mean([field["targets_segmentation"] for field in fields]))
  assert facts["recommended"] == {"max_kda_segments": 8, "packing_max_segments_per_sample": 0}


def test_the_rule_of_max_kda_segments():
  assert [segments.recommend(most, 4096, True) for most in (1, 8, 9, 100)] == [8, 8, 16, 104]
  assert [segments.recommend(most, 4096, False) for most in (1, 8, 13)] == [8, 16, 24]
  assert segments.recommend(4, 4, False) == 8


@settings(max_examples=25)
@given(data=st.data())
def test_counts_are_those_of_the_tokens(data, tmp_path_factory):
  folder = tmp_path_factory.mktemp("data")
  lengths = data.draw(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=10), min_size=1, max_size=2))
  prefixes = [write(folder / f"part-{number}", [7, *part]) for number, part in enumerate(lengths)]
  length = data.draw(st.integers(1, 6))
  arrays = cache.build_in_memory(prefixes, IndexRequest(length, data.draw(st.integers(0, 9)), None, 2))[:3]
  merges = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
  count = data.draw(st.integers(1, len(arrays[2])))
  counter = segments.Counter(length, merges)
  counter.add(ShardedDataset(prefixes), arrays, count)
  source = MegatronNpyDataSource("", prefixes, EOD, length, prebuilt_indices=arrays)
  rows = source.read_rows(range(count))
  assert counter.eods == int((rows[:, :-1] == EOD).sum())
  assert counter.beginnings == int((rows[:, :-2] == EOD).sum())
  for number, merge in enumerate(merges):
    split = MegatronSplitInputsTargets(EOD, min_segment_length=length // merge if merge else 0)
    found = [int(split.map({"text": row})["inputs_segmentation"][-1]) for row in rows]
    assert counter.histogram[number].tolist() == np.bincount(found, minlength=length + 1).tolist()
    assert counter.most[number] == max(found)
    assert counter.merged[number] == counter.beginnings - sum(found) + count


def test_sentences_are_not_documents(tmp_path):
  with IndexedDatasetWriter(str(tmp_path / "data"), np.int32) as writer:
    for document in ([[1, 2], [3, EOD]], [[4, EOD]], [[5], [6], [7, EOD]]):
      for sentence in document:
        writer.add_sequence(sentence)
      writer.end_document()
  ends = segments._document_ends(ShardedDataset(str(tmp_path / "data")))
  assert ends.tolist() == [False, True, True, False, False, True]


def test_merge_settings_join_documents(mmap_index, books):
  facts = mmap_index("stats", books, "--seq-length", 16, "--seed", 1, "--merge", 2, "--json")[1]
  rows = {row["packing_max_segments_per_sample"]: row for row in facts["merges"]}
  assert [*rows] == [0, 2, 8] and [row["joins_up_to"] for row in rows.values()] == [0, 8, 2]
  assert rows[0]["joined"] == 0 and rows[0]["most"] > rows[2]["most"] == facts["segments"]["most"]
  assert rows[2]["joined_share"] > rows[8]["joined_share"] >= 0


def test_shares_of_a_blend(mmap_index, books, code):
  arguments = ("--datasets", f"{books},7;{code}:{books},0;{code},3", "--seq-length", 4, "--samples", 50)
  status, facts, _ = mmap_index("stats", *arguments, "--json")
  assert status == 0 and facts["samples"] == 50
  assert [(own["dataset"], own["samples"], own["share"], own["target"]) for own in facts["datasets"]] == [
    (books, 35, 0.7, 0.7), (code, 15, 0.3, 0.3),
  ]  # fmt: skip
  assert [own["epochs"] for own in facts["datasets"]] == [5, 1]
  assert "70.000%" in mmap_index("stats", *arguments)[1]


def test_reading_finds_eod_that_is_not_where_it_is_assumed(mmap_index, tmp_path):
  with IndexedDatasetWriter(str(tmp_path / "data"), np.int32) as writer:
    for _ in range(6):
      writer.add_document([1, EOD, 2, EOD])
  facts = mmap_index("stats", tmp_path / "data", "--seq-length", 8, "--eod-id", EOD, "--read", "--json")[1]
  (read,) = facts["read"]
  assert read["samples"] == 2 and read["eods"] == 2 * read["assumed_eods"] == 8
  assert read["most"] == 4 and facts["segments"]["most"] == 2
  assert "counted without reading" in mmap_index("stats", tmp_path / "data", "--seq-length", 8, "--read", 1)[1]


def test_an_index_folder_is_used_and_left_alone(mmap_index, books, tmp_path):
  folder = tmp_path / "npy"
  cache.write_index(str(folder), books, IndexRequest(4, 1234, 8))
  before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
  for entry in (f"{folder}|{books}", f"{tmp_path / 'none'}|{books}", books):
    facts = mmap_index("stats", entry, "--seq-length", 4, "--samples", 8, "--json")[1]
    assert facts["samples"] == 8
  assert before == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
  assert not (tmp_path / "none").exists()


def test_a_picture(mmap_index, books, code, tmp_path):
  for name, arguments in (
    ("documents", (books,)),
    ("datasets", (books, code)),
    ("samples", (books, code, "--seq-length", 4)),
    ("no_suffix", (books,)),
    ("blend", ("--datasets", f"{books},7;{code},3", "--seq-length", 16, "--samples", 50)),
  ):
    path = tmp_path / (name if name == "no_suffix" else f"{name}.png")
    status, text, errors = mmap_index("stats", *arguments, "--plot", path)
    assert status == 0 and errors == "" and f"drawn to {path}" in text
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10000


def test_a_picture_that_cannot_be_drawn(mmap_index, books, tmp_path, monkeypatch):
  assert "give a name that ends in .png" in mmap_index("stats", books, "--plot", tmp_path / "x.what")[2]
  assert "cannot write" in mmap_index("stats", books, "--plot", tmp_path / "nowhere" / "x.png")[2]
  monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
  assert "needs matplotlib, which is not installed" in mmap_index("stats", books, "--plot", tmp_path / "x.png")[2]


def test_arguments_that_cannot_be_used(mmap_index, books):
  for arguments, expected in (
    ((), "give either datasets, or --datasets"),
    ((books, "--datasets", f"{books},1"), "give either datasets, or --datasets"),
    ((books, "--samples", 8), "give --seq-length"),
    (("--datasets", f"{books},1", "--seq-length", 4), "give --samples"),
    (("--datasets", f"{books},x"), "entry 0 is"),
    (("--datasets", f"{books},nan"), "entry 0 is"),
    (("--datasets", f"{books},0"), "the weights add up to 0"),
    ((books, "--split-index", 1), "--split-index 1 needs --split"),
    ((books, "--seq-length", 100), "do not make one sample of 100"),
    (("nowhere",), "found neither nowhere.idx"),
  ):
    status, out, errors = mmap_index("stats", *arguments)
    assert status == 1 and out == "" and errors.startswith("error: ") and expected in errors, arguments


def test_entries():
  assert mixtures.weighted(" a:b ,1; npy|c,d,2;") == [
    mixtures.Entry("a:b", ["a", "b"], None, 1.0), mixtures.Entry("npy|c,d", ["c,d"], "npy", 2.0),
  ]  # fmt: skip


@given(values=st.lists(st.lists(st.one_of(st.integers(0, 5000), st.integers(0, 2**40)), max_size=30), max_size=4))
def test_the_histogram_of_lengths(values):
  histogram, flat = LengthHistogram(), sorted(value for part in values for value in part)
  for part in values:
    histogram.add(np.array(part, np.int64))
  assert (histogram.count, histogram.total) == (len(flat), sum(flat))
  assert (histogram.shortest, histogram.longest) == ((flat[0], flat[-1]) if flat else (None, None))
  for share in (0.01, 0.5, 0.9, 1.0):
    exact = flat[max(int(np.ceil(share * len(flat))), 1) - 1] if flat else None
    found = histogram.quantile(share)
    assert found == exact if exact is None or exact < 4096 else exact * 0.9995 - 1 <= found <= exact
  edges = np.array([0, 1, 10, 4096, 2**50])
  counts, tokens = histogram.buckets(edges)
  assert counts.tolist() == np.histogram(flat, edges)[0].tolist()
  assert tokens.tolist() == np.histogram(flat, edges, weights=np.array(flat, float))[0].astype(int).tolist()
