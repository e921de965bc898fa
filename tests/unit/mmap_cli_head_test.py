# SPDX-License-Identifier: Apache-2.0
"""Tests of `mmap-index head`: the samples it shows are those that a run reads."""

import json
from pathlib import Path

import numpy as np
import pytest

import maxtext
from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline import _mmap_tokenize
from maxtext.input_pipeline._mmap_datasource import MegatronNpyDataSource
from maxtext.input_pipeline._mmap_index_cache import IndexRequest
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter
from maxtext.input_pipeline._mmap_stream import StreamSettings, open_stream
from maxtext.input_pipeline.mmap_cli import head

EOD = 99
EXAMPLE = [10, 11, EOD, 20, 21]


def write(prefix, rows) -> str:
  with IndexedDatasetWriter(str(prefix), np.int32) as writer:
    for row in rows:
      writer.add_document(row)
  return str(prefix)


@pytest.fixture
def books(tmp_path) -> str:
  lengths = [5, 7, 3, 9, 6, 4]
  return write(tmp_path / "books", [[*range(100 * r + 100, 100 * r + 99 + n), EOD] for r, n in enumerate(lengths)])


@pytest.fixture
def samples(mmap_index):
  """Runs `head --json`; returns the samples."""

  def run(*arguments):
    code, facts, errors = mmap_index("head", *arguments, "--json")
    assert code == 0, errors
    return facts["samples"]

  return run


def test_the_fields_of_the_example(samples, tmp_path):
  prefix = write(tmp_path / "data", [[10, 11, EOD], [20, 21]])
  (sample,) = samples(prefix, "--seq-length", 4, "--seed", 1, "--eod-id", EOD)  # this seed keeps the order
  assert sample["inputs"] == EXAMPLE[:4] and sample["targets"] == EXAMPLE[1:]
  assert sample["inputs_segmentation"] == [1, 1, 1, 2] and sample["inputs_position"] == [0, 1, 2, 0]
  assert sample["targets_segmentation"] == [1, 1, 1, 1]
  assert sample["pieces"] == [
    {"dataset": prefix, "sequence": 0, "offset": 0, "length": 3},
    {"dataset": prefix, "sequence": 1, "offset": 0, "length": 2},
  ]
  settings = (prefix, "--seq-length", 4, "--seed", 1, "--eod-id", EOD)
  (masked,) = samples(*settings, "--eod-mask-loss", "--no-reset")
  assert masked["targets_segmentation"] == [1, 1, 0, 1] and masked["inputs_segmentation"] == [1, 1, 1, 1]
  (merged,) = samples(*settings, "--merge", 1)
  assert merged["inputs_segmentation"] == [1, 1, 1, 1]


def test_text_for_people(mmap_index, tmp_path, monkeypatch):
  monkeypatch.setenv("COLUMNS", "80")
  prefix = write(tmp_path / "data", [[10, 11, EOD], [20, 21]])
  text = mmap_index("head", prefix, "--seq-length", 4, "--seed", 1, "--eod-id", EOD)[1]
  assert text.splitlines() == [
    f"sample 0: {prefix}, sequence 0, tokens 0 to 3 and 1 more",
    "token     10 11 99 20",
    "segment    1  1  1  2",
    "position   0  1  2  0",
    "loss       1  1  1  1",
  ]


def test_samples_of_an_index_folder_need_no_settings(samples, books, tmp_path):
  cache.write_index(str(tmp_path / "npy"), books, IndexRequest(4, 42, 9))
  source = MegatronNpyDataSource("", books, EOD, 4, request=IndexRequest(4, 42, 9), write=False)
  shown = samples(f"{tmp_path / 'npy'}|{books}", "-n", 4, "--position", 2)
  assert [sample["position"] for sample in shown] == [2, 3, 4, 5]
  for sample in shown:
    assert [*sample["inputs"], sample["targets"][-1]] == source[sample["position"]]["text"].tolist()
  assert len(samples(f"{tmp_path / 'npy'}|{books}", "-n", 40, "--position", 10)) == 6


def test_samples_of_settings_are_those_of_a_run(samples, books):
  source = MegatronNpyDataSource("", books, EOD, 4, request=IndexRequest(4, 7, 20, None, "1,1", 1), write=False)
  shown = samples(books, "--seq-length", 4, "--seed", 7, "--samples", 20, "--split", "1,1", "--split-index", 1)
  assert [sample["inputs"] for sample in shown] == [source[place]["text"][:-1].tolist() for place in range(3)]


def test_samples_of_a_blend(samples, books, tmp_path):
  code = write(tmp_path / "code", [[*range(1000, 1029), EOD]])
  files = f"{tmp_path / 'none'}|{books},7;{tmp_path / 'none'}|{code},3"
  stream = open_stream(StreamSettings(files, 4, EOD, 42, 20), write=False)
  shown = samples("--datasets", f"{books},7;{code},3", "--seq-length", 4, "--seed", 42, "--samples", 20, "-n", 20)
  rows = stream.source.read_rows(range(20))
  assert [sample["inputs"] for sample in shown] == rows[:, :-1].tolist()
  assert [sample["child"] for sample in shown[:5]] == [0, 1, 0, 0, 1]
  assert {sample["pieces"][0]["dataset"] for sample in shown} == {books, code}
  assert not (tmp_path / "none").exists()


def test_samples_of_a_config(samples, books, tmp_path):
  keys = {
    "grain_train_files": f"{tmp_path / 'npy'}|{books}", "mmap_eod_id": EOD, "max_target_length": 4, "steps": 8,
    "model_name": "gpt3-52k", "per_device_batch_size": 1, "run_name": "x", "data_shuffle_seed": 42, "hardware": "cpu",
    "override_model_config": True, "vocab_size": 1000, "eod_mask_loss": True,
  }  # fmt: skip
  shown = samples("--config", "mmap_npy_megatron_gpt.yml", *(f"{key}={value}" for key, value in keys.items()), "-n", 8)
  source = MegatronNpyDataSource("", books, EOD, 4, request=IndexRequest(4, 42, 8), write=False)
  assert [sample["inputs"] for sample in shown] == source.read_rows(range(8))[:, :-1].tolist()
  assert all((np.array(s["inputs"]) != EOD).astype(int).tolist() == s["targets_segmentation"] for s in shown)
  assert not (tmp_path / "npy").exists()


@pytest.fixture
def llama2() -> str:
  found = [Path(folder) / "assets" / "tokenizers" / "tokenizer.llama2" for folder in maxtext.__path__]
  return str(next(path for path in found if path.exists()))


def test_decoded_text(mmap_index, samples, llama2, tmp_path):
  ids = _mmap_tokenize.load_tokenizer(llama2).encode(["Hello, big world\n"])[0]
  prefix = write(tmp_path / "data", [[*ids, 70000]])
  (sample,) = samples(prefix, "--seq-length", len(ids), "--tokenizer", llama2, "--eod-id", 2)
  assert "".join(sample["texts"]) == " Hello, big world<0x0A>"
  text = mmap_index("head", prefix, "--seq-length", len(ids), "--tokenizer", llama2, "--eod-id", 2)[1]
  assert "\u00b7Hello" in text and "text " in text and "token " not in text
  (beyond,) = samples(write(tmp_path / "more", [[70000, 5]]), "--seq-length", 1, "--tokenizer", llama2)
  assert beyond["texts"] == ["<70000?>"]


@pytest.mark.parametrize("folder", [False, True])
def test_a_hugging_face_tokenizer_decodes_each_id(tmp_path, folder):
  tokenizers = pytest.importorskip("tokenizers")
  model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
  model.save(str(tmp_path / "tokenizer.json"))
  config = {"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
  if folder:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
  found = _mmap_tokenize.load_tokenizer(str(tmp_path))
  assert found.decode([1, 2, 0]) == ["b", "</s>", "a"]


def test_cells_are_aligned_and_wrapped():
  rows = {"text": ["\u4e16", "ab", "e\u0301", "x"], "n": [1, 2, 333, 4]}
  assert head.aligned(rows, 80) == ["text  \u4e16 ab   e\u0301 x", "n      1  2 333 4"]
  assert head.aligned(rows, 13) == ["text  \u4e16 ab", "n      1  2", "", "text    e\u0301 x", "n     333 4"]
  assert head.aligned({"a": ["long"]}, 2) == ["a  long"]
  assert [head._visible(text) for text in (" a", "\n", "", "\u0007", 7)] == ["\u00b7a", "\\n", "-", "\\x07", "7"]


def test_only_some_tokens_are_shown(mmap_index, books):
  text = mmap_index("head", books, "--seq-length", 16, "--seed", 1, "--tokens", 3, "-n", 1)[1]
  assert "13 more tokens; segments in all: " in text and "1 more samples; EOD is 99" in text
  whole = mmap_index("head", books, "--seq-length", 16, "--seed", 1, "--tokens", 0, "-n", 1)[1]
  assert "more tokens" not in whole


def test_what_cannot_be_shown(mmap_index, books, tmp_path):
  cache.write_index(str(tmp_path / "npy"), books, IndexRequest(4, 42, 8))
  empty = write(tmp_path / "empty", [[]])
  utils.convert(books, str(tmp_path / "two"), 4, 8)
  utils.convert(books, str(tmp_path / "two"), 4, 8, seed=1)
  for arguments, expected in (
    ((f"{tmp_path / 'npy'}|{books}", "--position", 8), "--position 8 is beyond the 8 samples"),
    ((books,), "give --seq-length, or 'npy_dir|dataset'"),
    ((books, books, "--seq-length", 4), "2 datasets were given"),
    ((empty, "--seq-length", 4), "no document has a token"),
    ((f"{tmp_path / 'two'}|{books}",), "holds 2 orders"),
    ((books, "--seq-length", 4, "--tokenizer", tmp_path / "none"), "does not exist; give the path of a tokenizer"),
    (("--config", tmp_path / "x"), "is no config; name a file that ends in .yml"),
    ((), "give either datasets"),
  ):
    code, out, errors = mmap_index("head", *arguments)
    assert code == 1 and out == "" and errors.startswith("error: ") and expected in errors, arguments


def test_indices_of_another_dataset_are_not_shown(mmap_index, tmp_path):
  books = write(tmp_path / "books", [[10, 11, EOD], [20, 21, EOD]])
  folder = str(tmp_path / "indices")
  write(tmp_path / "code", [[1] * 9, [2] * 9])
  assert mmap_index("convert", "--input", books, "--output-dir", folder, "--seq-length", 4, "--num-samples", 1)[0] == 0
  assert mmap_index("head", f"{folder}|{books}", "-n", 1)[0] == 0
  code, out, errors = mmap_index("head", f"{folder}|{tmp_path / 'code'}", "-n", 1)
  assert code == 1 and out == "" and "name the dataset that it was built from" in errors


def test_an_eod_that_is_a_guess_is_said(mmap_index, tmp_path):
  prefix = write(tmp_path / "data", [[10, 11, 12], [20, 21, 22], [30, 31, 32]])
  note = "is a guess, the most common last token, and 33.3% of the documents looked at end with it; give --eod-id"
  assert note in mmap_index("head", prefix, "--seq-length", 4, "-n", 1)[1]
  assert "is a guess" not in mmap_index("head", prefix, "--seq-length", 4, "-n", 1, "--eod-id", 9)[1]
