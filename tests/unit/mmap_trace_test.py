# SPDX-License-Identifier: Apache-2.0
"""`trace` names the bytes of .bin files that the rows of a step are made of."""

import json
import os
from pathlib import Path
import shlex
import shutil

import numpy as np
import pytest

import maxtext
from maxtext.input_pipeline import _mmap_digest as mmap_digest
from maxtext.input_pipeline import _mmap_tokenize
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter
from maxtext.input_pipeline.mmap_cli import from_megatron, places, preflight, run_config
from maxtext.input_pipeline.mmap_cli import main as command_line
from maxtext.input_pipeline.mmap_cli import trace as trace_command

EOD, LENGTH = 2, 32
DTYPES = {"a": np.uint16, "b": np.int32, "c": np.uint16}


@pytest.fixture
def data(tmp_path, monkeypatch):
  """Datasets a, b and c; documents of c have two sequences, one of them empty at times."""
  for number, (name, dtype) in enumerate(DTYPES.items()):
    rng = np.random.default_rng(number)
    with IndexedDatasetWriter(str(tmp_path / name), dtype) as writer:
      for length in rng.integers(0, 60, 40):
        tokens = np.append(rng.integers(3, 500, length), EOD)
        for sequence in np.array_split(tokens, 2) if name == "c" else [tokens]:
          writer.add_sequence(sequence)
        writer.end_document()
  monkeypatch.chdir(tmp_path)
  return tmp_path


@pytest.fixture
def arguments(data):
  def make(*options: str, **keys) -> list[str]:
    settings = {
      "run_name": "t", "base_output_directory": data / "out", "model_name": "gpt3-52k", "hardware": "cpu",
      "override_model_config": True, "vocab_size": 512, "max_target_length": LENGTH, "steps": 6,
      "per_device_batch_size": 3, "mmap_eod_id": EOD, "grain_train_files": "npy|a", **keys,
    }  # fmt: skip
    return ["trace", "mmap_npy_megatron_gpt.yml", *options, *(f"{key}={value}" for key, value in settings.items())]

  return make


@pytest.fixture
def trace(arguments, capsys):
  def run(*options: str, **keys) -> dict:
    assert command_line.main([*arguments(*options, **keys), "--json"]) == 0
    return json.loads(capsys.readouterr().out)

  return run


def tokens_of(pieces) -> np.ndarray:
  """Reads the bytes that are named, and nothing else."""
  parts = []
  for piece in pieces:
    dtype = np.dtype(DTYPES[os.path.basename(piece["dataset"])])
    with open(piece["dataset"] + ".bin", "rb") as file:
      file.seek(piece["bin_position"])
      parts.append(np.frombuffer(file.read(piece["bin_bytes"]), dtype))
    assert len(parts[-1]) == piece["length"] > 0
  return np.concatenate(parts).astype(np.int32)


MMAP = {"grain_file_type": "mmap"}


@pytest.mark.parametrize(
  "keys",
  [
    {},
    {"grain_train_files": "npy|a:b:c", "mmap_split_sentences": True},
    {"grain_train_files": "npy/0|a,0.5;npy/1|b:c,0.3;npy/2|b,0.2", "mmap_split_sentences": True},
    {"grain_train_files": "npy/0|b;npy/1|a", "mmap_npy_start_sample": 5, "mmap_npy_num_samples": 40},
    MMAP | {"grain_train_files": "a"},
    MMAP | {"grain_train_files": "a:c,0.6;b,0.4", "mmap_split_sentences": True},
  ],
)
def test_rows_are_made_of_the_bytes_that_are_named(trace, arguments, keys):
  whole = trace("--step", "3", **keys)
  options = command_line.parse_arguments(arguments("--step", "3", **keys))
  samples = places.open_places(run_config.read(options))
  first = keys.get("mmap_npy_start_sample", 0) + 3 * 3
  raw = samples.raw_tokens(range(first, first + 3))
  assert (whole["first_sample"], whole["global_batch_size"]) == (first, 3)
  assert whole["digest"] == mmap_digest.batch_digest(raw)
  assert [(row["row"], row["sample"]) for row in whole["rows"]] == [(0, first), (1, first + 1), (2, first + 2)]
  length = LENGTH if keys.get("grain_file_type") else LENGTH + 1
  for row, tokens in zip(whole["rows"], raw, strict=True):
    np.testing.assert_array_equal(tokens_of(row["pieces"]), tokens[:length])
    for piece in row["pieces"]:
      assert piece["document"] == piece["sequence"] // (2 if os.path.basename(piece["dataset"]) == "c" else 1)
  assert trace("--step", "3", "--row", "1", **keys) == {**whole, "rows": whole["rows"][1:2]}


def test_nothing_is_written(trace, data):
  trace("--step", "0")
  assert not (data / "npy").exists() and not (data / "out").exists()


def test_devices_make_the_batch(trace):
  facts = trace("--step", "1", "--devices", "2")
  assert (facts["global_batch_size"], facts["first_sample"], len(facts["rows"])) == (6, 6, 6)


def test_zero_weight_keeps_the_numbers_of_the_others(trace):
  facts = trace("--step", "0", grain_train_files="npy/0|b,0;npy/1|a,1;npy/2|b,1")
  assert {row["child"] for row in facts["rows"]} == {1, 2}
  assert all(os.path.basename(row["pieces"][0]["dataset"]) == {1: "a", 2: "b"}[row["child"]] for row in facts["rows"])


def test_decoded_text(trace, monkeypatch):
  tokenizer = _mmap_tokenize.Tokenizer(400, None, lambda texts: [], lambda ids: [f"<{token}>" for token in ids])
  monkeypatch.setattr(_mmap_tokenize, "load_tokenizer", lambda path: tokenizer)
  for row in trace("--step", "1", "--decode", "some.model", "--tokens", "4")["rows"]:
    tokens = tokens_of(row["pieces"])[:4].tolist()
    assert row["text"] == "".join(f"<{token}>" for token in tokens if token < 400)


def test_the_examples_of_the_help_one_after_the_other(mmap_index, tmp_path, monkeypatch):
  """from-megatron writes run.yml, preflight checks it, trace looks into it."""
  monkeypatch.chdir(tmp_path)
  for name in ("books", "code"):
    with IndexedDatasetWriter(f"data/{name}", np.uint16) as writer:
      for _ in range(50):
        writer.add_document([*range(3, 203), EOD])
  found = [Path(folder) / "assets" / "tokenizers" / "tokenizer.llama2" for folder in maxtext.__path__]
  shutil.copy(next(path for path in found if path.exists()), "tokenizer.model")
  for command in (from_megatron, preflight, trace_command):
    (line,) = [line for line in command.EXAMPLE.replace("\\\n", " ").splitlines() if line.startswith("  mmap-index")]
    code, out, errors = mmap_index(*shlex.split(line)[1:], "--json")
    assert code == 0, errors
  assert (out["first_sample"], out["global_batch_size"], len(out["rows"])) == (1234 * 64, 64, 64)
  assert "</s>" in "".join(row["text"] for row in out["rows"])


def test_for_people(arguments, capsys):
  assert command_line.main(arguments("--step", "2", grain_train_files="npy/0|a,1;npy/1|b,1")) == 0
  said = capsys.readouterr().out
  assert said.startswith("step 2: batch digest ") and "(samples 6 to 8)" in said
  assert "row 0: sample 6, which is 3 of dataset 0" in said and "bytes of .bin" in said


@pytest.mark.parametrize(
  ("options", "keys", "words"),
  [
    (("--step", "999"), {}, "--step 999 reads samples 2997 to 2999, and the order has"),
    (("--step", "0", "--row", "3"), {}, "--row 3 is not in a batch of 3 rows"),
    (("--step", "0"), {"dataset_type": "synthetic"}, "dataset_type=synthetic"),
    (("--step", "0"), {"grain_train_files": "npy|gone"}, "found neither gone.idx nor gone.bin"),
    (("--step", "0"), {"mmap_eod_id": 999}, "mmap_eod_id is 999"),
  ],
)
def test_errors_are_one_sentence(arguments, capsys, options, keys, words):
  assert command_line.main(arguments(*options, **keys)) == 1
  (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
  assert words in line and line.endswith(".")
