# SPDX-License-Identifier: Apache-2.0
"""Our indices, samples and fields against what megatron-core gave for the same datasets, written by write_golden.py."""

import itertools
import json
from pathlib import Path
import pickle

import numpy as np
import pytest

from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline._mmap_datasource import MegatronNpyDataSource
from maxtext.input_pipeline._mmap_index_cache import IndexRequest
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter, MMapError
from maxtext.input_pipeline.input_pipeline_utils import MegatronSplitInputsTargets

GOLDEN = json.loads((Path(__file__).resolve().parents[1] / "golden" / "megatron_gpt.json").read_text(encoding="utf-8"))
EOD = 99
INDICES = ("document_index", "sample_index", "shuffle_index")

each_case = pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])


def test_golden_file_says_where_it_is_from():
  assert GOLDEN["provenance"]["megatron-core"] == "0.16.1"
  assert (len(GOLDEN["cases"]), len(GOLDEN["fields"]), len(GOLDEN["splits"])) == (41, 28, 14)


def write(folder, case) -> str:
  prefix = str(folder / case["name"])
  sequences = np.split(np.array(case["tokens"]), np.cumsum(case["lengths"])[:-1])
  with IndexedDatasetWriter(prefix, case["dtype"]) as writer:
    for begin, end in itertools.pairwise(case["documents"]):
      for tokens in sequences[begin:end]:
        writer.add_sequence(tokens)
      writer.end_document()
  return prefix


def request_of(case) -> IndexRequest:
  epochs = 1 if case["num_samples"] is None else None
  return IndexRequest(
    case["seq_length"], case["seed"], case["num_samples"], epochs, case["split"], case["split_index"]
  )


def open_source(folder, case, **settings) -> MegatronNpyDataSource:
  settings = {"split_sentences": case["name"] == "d5", "request": request_of(case)} | settings
  return MegatronNpyDataSource(str(folder / "npy"), write(folder, case), EOD, case["seq_length"], **settings)


def split_fields(case):
  return MegatronSplitInputsTargets(EOD, reset_attention_mask=case["reset"], eod_mask_loss=case["mask_loss"])


def assert_megatrons_fields(fields, expected) -> None:
  """Compares fields; a position sees what lies in its own segment, up to itself."""
  segments = fields["inputs_segmentation"]
  first_visible = (segments[:, None] == segments[None, :]).argmax(axis=1)
  visible = np.tril(segments[:, None] == segments[None, :])
  np.testing.assert_array_equal(visible.sum(axis=1), np.arange(len(segments)) - first_visible + 1)
  np.testing.assert_array_equal(first_visible, expected["first_visible"])
  np.testing.assert_array_equal(fields["targets_segmentation"], expected["loss_mask"])
  for name in ("inputs_position", "targets_position"):
    np.testing.assert_array_equal(fields[name], expected["position_ids"])
  for name in ("inputs_segmentation", "targets_segmentation", "inputs_position", "targets_position"):
    assert fields[name].dtype == np.int32


@each_case
def test_indices_are_megatrons(tmp_path, case):
  request = request_of(case)
  arrays = utils.build_indices(
    write(tmp_path, case),
    request.seq_length,
    request.num_samples,
    request.num_epochs,
    request.seed,
    request.split,
    request.split_index,
  )[:3]
  for name, array, dtype in zip(INDICES, arrays, case["dtypes"], strict=True):
    assert array.dtype.str == dtype
    np.testing.assert_array_equal(array, case[name], name)


@each_case
def test_samples_are_megatrons(tmp_path, case):
  source = open_source(tmp_path, case)
  assert len(source) == len(case["shuffle_index"])
  assert [source[position]["text"].tolist() for position in range(len(case["samples"]))] == case["samples"]
  assert {source[position]["text"].dtype.name for position in range(len(source))} == {"int32"}


@each_case
def test_fields_are_megatrons(tmp_path, case):
  source, transform = open_source(tmp_path, case), split_fields(case)
  for position, (tokens, expected) in enumerate(zip(case["samples"], case["fields"], strict=False)):
    fields = transform.map(source[position])
    assert (fields["inputs"].tolist(), fields["targets"].tolist()) == (tokens[:-1], tokens[1:])
    assert_megatrons_fields(fields, expected)


def cases_named(start):
  return [pytest.param(case, id=case["name"]) for case in GOLDEN["cases"] if case["name"].startswith(start)]


@pytest.mark.parametrize("case", cases_named("random-1"))
def test_samples_are_megatrons_in_a_worker_and_after_a_restart(tmp_path, case):
  source = open_source(tmp_path, case)
  copy = pickle.loads(pickle.dumps(source))
  again = open_source(tmp_path, case)
  assert (source.index.found, again.index.found) == (False, True)
  for other in (again, copy):
    assert [other[position]["text"].tolist() for position in range(len(case["samples"]))] == case["samples"]


@pytest.mark.parametrize("case", cases_named("d1-8"))
def test_samples_are_megatrons_from_indices_given_by_the_caller(tmp_path, case):
  arrays = tuple(np.array(case[name], dtype) for name, dtype in zip(INDICES, case["dtypes"], strict=True))
  source = open_source(tmp_path, case, request=None, prebuilt_indices=arrays)
  assert [source[position]["text"].tolist() for position in range(8)] == case["samples"]


def bytes_read() -> int:
  """Bytes that this process has asked of the system so far."""
  return int(Path("/proc/self/io").read_text(encoding="utf-8").split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs /proc/self/io")
def test_d2_a_window_of_a_long_sequence_reads_the_bytes_of_the_window(tmp_path):
  case = {"name": "long", "lengths": [10_000_000], "documents": [0, 1], "dtype": "uint16", "seq_length": 64}
  case |= {"tokens": np.arange(10_000_000) % 60_000, "seed": 3, "num_samples": 1000, "split": "", "split_index": 0}
  source = open_source(tmp_path, case)
  first = source[0]["text"]  # opens the file
  np.testing.assert_array_equal(np.diff(first) % 60_000, np.ones(64))
  before = bytes_read()
  alone = bytes_read() - before
  for position in range(1, 51):
    assert len(source[position]["text"]) == 65
  assert bytes_read() - before - 2 * alone <= 1.05 * 50 * 65 * 2


@pytest.mark.parametrize("case", cases_named("d5"))
def test_d5_sentence_split_file_is_refused_unless_it_is_meant(tmp_path, case):
  with pytest.raises(MMapError, match="mmap_split_sentences=true"):
    open_source(tmp_path, case, split_sentences=False)


@pytest.mark.parametrize("row", GOLDEN["fields"], ids=lambda row: f"{len(row['inputs'])} tokens")
@pytest.mark.parametrize("mask_loss", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_fields_of_all_options_are_megatrons(row, reset, mask_loss):
  transform = MegatronSplitInputsTargets(EOD, reset_attention_mask=reset, eod_mask_loss=mask_loss)
  fields = transform.map({"text": np.array([*row["inputs"], 5], np.int32)})
  assert_megatrons_fields(fields, row[f"reset={int(reset)},mask_loss={int(mask_loss)}"])


@pytest.mark.parametrize("entry", GOLDEN["splits"], ids=lambda entry: f"{entry['split']} of {entry['sequences']}")
def test_d6_split_ranges_are_megatrons(entry):
  for part, (begin, end) in enumerate(entry["ranges"]):
    ours = utils.parse_split_range(entry["split"], part, entry["sequences"])
    assert ours[1] - ours[0] == end - begin
    assert end == begin or ours == (begin, end)
