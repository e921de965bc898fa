# SPDX-License-Identifier: Apache-2.0
"""Tests of `mmap-index inspect`."""

import json
import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter, MMapIndexedDataset
from maxtext.input_pipeline.mmap_cli import documents, inspect_data, main

EOD = 99


def write(prefix, rows, dtype=np.int32) -> str:
  """Writes a document a row of tokens."""
  with IndexedDatasetWriter(str(prefix), dtype) as writer:
    for row in rows:
      writer.add_document(row)
  return str(prefix)


@pytest.fixture
def books(tmp_path) -> str:
  return write(tmp_path / "books", [[1, 2, EOD], [3, 4, 5, 6, EOD], [], [7, EOD]])


@pytest.fixture
def code(tmp_path) -> str:
  return write(tmp_path / "code", [[10, 11, 12], [13, EOD]], np.uint16)


def test_facts_of_one_dataset(mmap_index, books):
  code, facts, _ = mmap_index("inspect", books, "--eod-id", EOD, "--vocab-size", 100, "--json")
  (found,) = facts["datasets"]
  assert code == 0 and facts["problems"] == []
  assert found == {
    "prefix": books, "dtype": "int32", "document_index": "documents + 1", "idx_bytes": 34 + 3 * 12 + 5 * 8,
    "bin_bytes": 40, "sequences": 3, "documents": 4, "empty_documents": 1, "tokens": 10, "longest": 5, "shortest": 2,
    "sentence_split": False, "gap_bytes": 0, "stray_bytes": 0, "problems": [], "notes": [],
    "ends": {"documents": 3, "most_common": EOD, "with_most_common": 3, "eod_id": EOD, "with_eod": 3},
    "ids": {"vocab_size": 100, "lowest": 1, "highest": 99, "outside": 0},
  }  # fmt: skip
  text = mmap_index("inspect", books)[1]
  assert "100.0% with 99, the most common, of 3 looked at" in text and "4 (1 empty)" in text and "problems  none" in text


def test_totals_of_several(mmap_index, books, code, tmp_path):
  for paths in ([f"{books}:{code}"], [books, code], [tmp_path], [tmp_path, books], [books + ".idx", code + ".bin"]):
    status, facts, _ = mmap_index("inspect", *paths, "--json")
    assert status == 0 and [found["prefix"] for found in facts["datasets"]] == [books, code]
    assert facts["total"] == {
      "datasets": 2, "sequences": 5, "documents": 6, "empty_documents": 1, "tokens": 15, "idx_bytes": 110 + 34 + 24 + 24,
      "bin_bytes": 50, "longest": 5, "shortest": 2, "dtypes": ["int32", "uint16"],
    }  # fmt: skip
  text = mmap_index("inspect", books, code)[1]
  assert "2 (int32, uint16)" in text and "5 with 2 to 5 tokens" in text and "99: 100.0%" in text and "12: 50.0%" in text


def test_every_problem_is_listed_and_the_rest_goes_on(mmap_index, books, code, tmp_path):
  (tmp_path / "half.bin").write_bytes(b"")
  (tmp_path / "noise.idx").write_bytes(b"noise")
  (tmp_path / "noise.bin").write_bytes(b"")
  os.truncate(code + ".bin", 4)
  empty = write(tmp_path / "zero", [[], []])
  (tmp_path / "folder").mkdir()
  status, facts, _ = mmap_index("inspect", tmp_path, tmp_path / "nowhere", tmp_path / "folder", "--json")
  assert status == 1 and facts["total"]["datasets"] == 2 and facts["total"]["tokens"] == 10
  expected = ("folder has no .idx and no .bin", "code.bin is truncated", "half.idx is missing", "noise.idx begins with",
              f"{empty}.idx has 0 sequences and 0 tokens", "found neither")  # fmt: skip
  assert len(facts["problems"]) == len(expected)
  assert all(part in problem for part, problem in zip(expected, facts["problems"], strict=True))
  assert all(problem.endswith(".") for problem in facts["problems"])
  text = mmap_index("inspect", tmp_path)[1]
  assert "code.bin is truncated" in text and "books" in text


def test_documents_that_do_not_end_with_the_named_eod(mmap_index, books, code):
  status, facts, _ = mmap_index("inspect", books, code, "--eod-id", 12, "--json")
  assert status == 1 and len(facts["problems"]) == 1
  assert "none of 3 documents ends with EOD 12, and 3 end with 99" in facts["problems"][0]
  assert "50.0% with EOD 12, of 2 looked at" in mmap_index("inspect", code, "--eod-id", 12)[1]


def test_ids_outside_the_vocabulary_are_counted_and_placed(mmap_index, tmp_path, monkeypatch):
  monkeypatch.setattr(inspect_data, "_READ", 8)  # two tokens at a time
  prefix = write(tmp_path / "data", [[1, 2, 3], [4, 50, 6], [-1, 7]])
  status, facts, _ = mmap_index("inspect", prefix, "--vocab-size", 50, "--json")
  ids = facts["datasets"][0]["ids"]
  assert status == 1 and (ids["lowest"], ids["highest"], ids["outside"]) == (-1, 50, 2)
  assert ids["first_outside"] == {"sequence": 1, "offset": 1, "id": 50}
  assert "first 50 at token 1 of sequence 1" in facts["problems"][0]
  assert mmap_index("inspect", write(tmp_path / "good", [[0, 49]]), "--vocab-size", 50)[0] == 0


def test_gaps_and_stray_bytes_are_notes(mmap_index, tmp_path):
  prefix = write(tmp_path / "data", [[1, 2], [3, 77], [5]])
  raw = bytearray((tmp_path / "data.idx").read_bytes())
  offsets = np.frombuffer(raw, "<i8", 3, 34 + 12)
  assert offsets.tolist() == [0, 8, 16]
  offsets[1:] += 4
  (tmp_path / "data.idx").write_bytes(raw)
  tokens = np.array([1, 2, 1000, 3, 4, 5, 6, 6], np.int32)
  (tmp_path / "data.bin").write_bytes(tokens.tobytes())
  status, facts, _ = mmap_index("inspect", prefix, "--vocab-size", 100, "--json")  # 1000 lies in the gap
  found = facts["datasets"][0]
  assert status == 0 and found["gap_bytes"] == 4 and found["stray_bytes"] == 8 and len(found["notes"]) == 2
  assert found["ids"]["highest"] == 5
  assert "4 bytes between sequences" in mmap_index("inspect", prefix)[1]


def test_sentence_split_and_the_older_document_index(mmap_index, tmp_path):
  with IndexedDatasetWriter(str(tmp_path / "data"), np.int32) as writer:
    for document in ([[1, 2], [3, EOD]], [[4, 5, EOD], []]):
      for sentence in document:
        writer.add_sequence(sentence)
      writer.end_document()
  raw = bytearray((tmp_path / "data.idx").read_bytes())
  raw[26:34] = (2).to_bytes(8, "little")
  (tmp_path / "data.idx").write_bytes(raw)
  found = mmap_index("inspect", tmp_path / "data", "--eod-id", EOD, "--json")[1]["datasets"][0]
  assert found["sentence_split"] and found["document_index"] == "documents" and found["ends"]["with_eod"] == 2
  assert found["documents"] == 2 and found["sequences"] == 4 and "mmap_split_sentences=true" in found["notes"][0]


@given(rows=st.lists(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=3), min_size=1, max_size=12))
def test_document_lengths_and_ends(rows, tmp_path_factory):
  prefix = str(tmp_path_factory.mktemp("data") / "data")
  with IndexedDatasetWriter(prefix, np.int32) as writer:
    for document in rows:
      for sentence in document:
        writer.add_sequence(sentence)
      writer.end_document()
  flat = [[token for sentence in document for token in sentence] for document in rows]
  dataset = MMapIndexedDataset(prefix)
  pieces = utils.iter_document_sizes(dataset)
  assert np.concatenate([np.zeros(0, np.int64), *pieces]).tolist() == [len(document) for document in flat]
  assert documents.last_tokens(dataset, 100).tolist() == [document[-1] for document in flat if document]


@given(data=st.data())
def test_a_damaged_index_is_a_problem_and_no_traceback(data, tmp_path_factory):
  prefix = write(tmp_path_factory.mktemp("data") / "data", [[1, 2, EOD], [], [3, EOD], [4]])
  path = Path(prefix + ".idx")
  raw = bytearray(path.read_bytes())
  for _ in range(data.draw(st.integers(1, 3))):
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
  path.write_bytes(raw[: data.draw(st.integers(0, len(raw))) or None])
  options = main.parse_arguments(["inspect", prefix, "--vocab-size", "50", "--eod-id", str(EOD)])
  facts = inspect_data.run(options)
  assert all(problem.endswith(".") for problem in facts["problems"])
  assert inspect_data.render(facts) and json.dumps(facts)
  readable = facts["total"]["datasets"]
  assert facts["problems"] and readable in (0, 1)  # 99 is outside the vocabulary, where it can be read at all
