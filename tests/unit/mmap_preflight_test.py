# SPDX-License-Identifier: Apache-2.0
"""`preflight` says what a run reads and builds, and everything that is wrong with it at once, and builds nothing."""

import json
import logging
import os
from pathlib import Path
import subprocess
import sys

import numpy as np
import pytest

from maxtext.input_pipeline import _megatron_blending as blending
from maxtext.input_pipeline import _mmap_stream as streams
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter
from maxtext.input_pipeline.mmap_cli import main as command_line
from maxtext.input_pipeline.mmap_cli import resources, run_config

EOD, VOCAB = 2, 512
MEGATRON_CACHE = Path(__file__).resolve().parents[1] / "golden" / "megatron_cache"


def write(prefix, documents: int, eod: int | None = EOD, sentences: int = 1) -> None:
  rng = np.random.default_rng(documents)
  with IndexedDatasetWriter(str(prefix), np.uint16) as writer:
    for length in rng.integers(2, 90, documents):
      tokens = rng.integers(3, VOCAB, length)
      tokens[-1] = tokens[-1] if eod is None else eod
      for sentence in np.array_split(tokens, sentences):
        writer.add_sequence(sentence)
      writer.end_document()


@pytest.fixture
def data(tmp_path, monkeypatch):
  write(tmp_path / "a", 200)
  write(tmp_path / "b", 50)
  monkeypatch.chdir(tmp_path)
  return tmp_path


@pytest.fixture
def arguments(data):
  """Makes the arguments of a command for a run on these datasets."""

  def make(command: str, *options: str, config="mmap_npy_megatron_gpt.yml", **keys) -> list[str]:
    settings = {
      "run_name": "t", "base_output_directory": data / "out", "model_name": "gpt3-52k", "hardware": "cpu",
      "override_model_config": True, "vocab_size": VOCAB, "max_target_length": 32, "steps": 20,
      "per_device_batch_size": 2, "mmap_eod_id": EOD, "grain_train_files": "npy|a", **keys,
    }  # fmt: skip
    return [command, config, *options, *(f"{key}={value}" for key, value in settings.items())]

  return make


@pytest.fixture
def preflight(arguments, capsys):
  """Runs the command; returns its facts."""

  def run(*options: str, **keys) -> dict:
    code = command_line.main([*arguments("preflight", *options, **keys), "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert code == (1 if facts["problems"] else 0)
    assert all("\n" not in text and text.endswith(".") for text in facts["problems"] + facts["warnings"])
    return facts

  return run


def open_streams(arguments, evaluation: bool, **keys):
  """Opens the stream as a run does."""
  _, config, *words = arguments("", **keys)
  options = command_line.parse_arguments(["preflight", config, *words])
  return streams.open_stream(streams.settings_for(run_config.read(options), evaluation))


BLEND = {"grain_train_files": "npy/0|a,0.7;npy/1|b,0.3"}
EVALUATION = {"eval_interval": 5, "eval_steps": 3, "grain_eval_files": "npy/e|b"}


@pytest.mark.parametrize(
  "keys",
  [
    {},
    {"steps": 200},
    BLEND | EVALUATION | {"mmap_npy_split": "'8,2'", "blend_cache_dir": "pairs"},
    {"grain_train_files": "npy/0|a;npy/1|b", "steps": 5},
    {"grain_train_files": "npy|a:b", "mmap_npy_num_samples": 90},
  ],
)
def test_says_what_the_run_then_reads_and_finds(preflight, arguments, data, keys):
  facts = preflight(**keys)
  assert not facts["problems"] and not facts["warnings"]
  assert not (data / "npy").exists() and not (data / "out").exists(), "nothing is built"
  for part in facts["parts"]:
    stream = open_streams(arguments, part["part"] == "valid", **keys)
    assert (part["samples_available"], part["samples_asked"]) == (len(stream), stream.settings.num_samples)
    assert part["samples_read"] == stream.settings.needed
    for said, child in zip(part["datasets"], stream.children, strict=True):
      description = child.index.description
      assert said["number"] == child.number and said["weight"] == child.weight
      assert said["samples_asked"] == child.requested and said["samples_available"] == len(child.source)
      assert said["epochs"] == description.plan.num_epochs
      assert said["separate_last_epoch"] == description.plan.separate_last_epoch
      assert said["sequences_used"] == [description.begin, description.end]
      assert said["tokens"] == sum(fact["tokens"] for fact in description.facts)
      assert said["index_bytes"] == sum(array.nbytes for array in child.index.arrays)
      assert said["indices"] == "to be built"
    if stream.blend is not None:
      drawn = [0] * len(stream.children)
      for position in range(len(stream)):
        drawn[stream.source.child(position)[0]] += 1
      assert [said["samples_drawn"] for said in part["datasets"]] == drawn
  again = preflight(**keys)
  assert {said["indices"] for part in again["parts"] for said in part["datasets"]} == {"found"}
  assert again["memory"]["needed"] == sum(
    part["blend"]["samples"] * 10 for part in again["parts"] if part["blend"] and part["blend"]["indices"] != "found"
  )


def test_every_problem_at_once(preflight, data):
  write(data / "sentences", 20, sentences=2)
  write(data / "other", 20, eod=None)
  os.truncate(data / "b.bin", 100)
  facts = preflight(
    grain_train_files="npy/0|a,1;npy/1|b,1;npy/2|gone,1;npy/3|sentences,1;npy/4|other,1",
    eval_interval=5,
    eval_steps=3,
    grain_eval_files="npy/5|other",
    mmap_npy_split="'999,1'",
    mmap_eod_id=VOCAB,
    expansion_factor_real_data=2,
    mmap_npy_start_sample=-3,
    base_output_directory="out",
  )
  text = "\n".join(facts["problems"])
  for words in (
    f"mmap_eod_id is {VOCAB}, outside the vocabulary",
    "expansion_factor_real_data is 2",
    "mmap_npy_start_sample is -3; expected 0 or more",
    f"other: none of 20 documents ends with mmap_eod_id={VOCAB}",
    "b.bin is truncated",
    "found neither gone.idx nor gone.bin",
    "sentences.idx has documents of several sequences",
    "base_output_directory is 'out'",
  ):
    assert words in text, words


def test_data_that_is_wrong_for_the_keys(preflight, data):
  write(data / "other", 20, eod=None)
  with open(data / "a.bin", "ab") as file:
    file.write(b"xyz")
  facts = preflight(
    grain_train_files="npy/0|a,1;npy/1|other,1",
    vocab_size=300,
    eval_interval=5,
    eval_steps=3,
    grain_eval_files="npy/2|other",
    mmap_npy_split="'999,1'",
    base_output_directory="out",
  )
  text = "\n".join(facts["problems"])
  for words in (
    "other: none of 20 documents ends with mmap_eod_id=2",
    "other holds token id",
    "the valid part of split '999,1' is sequences 20 to 20",
    "base_output_directory is 'out'; checkpoints need an absolute path",
  ):
    assert words in text, words
  assert facts["warnings"] == ["a.bin has 3 bytes after its last sequence; they are ignored."]


@pytest.mark.parametrize("file_type", ["mmap_npy", "mmap"])
def test_a_vocabulary_that_is_too_small_for_ids_within_documents(preflight, file_type):
  files = "npy|a" if file_type == "mmap_npy" else "a"
  assert not preflight(grain_file_type=file_type, grain_train_files=files)["problems"]
  (text,) = preflight(grain_file_type=file_type, grain_train_files=files, vocab_size=VOCAB // 2)["problems"]
  assert "a holds token id" in text and f"outside the vocabulary (vocab_size={VOCAB // 2})" in text


def test_negative_ids(preflight, data):
  with IndexedDatasetWriter(str(data / "negative"), np.int32) as writer:
    for _ in range(20):
      writer.add_sequence([5, -7, 6, EOD])
      writer.end_document()
  (text,) = preflight(grain_train_files="npy|negative")["problems"]
  assert "negative holds token id -7, outside the vocabulary" in text


def test_a_pair_of_another_blend(preflight, arguments, data):
  open_streams(arguments, False, **BLEND, blend_cache_dir="pairs")
  for array in ("dataset_index", "dataset_sample_index"):
    (path,) = (data / "pairs").glob(f"*-{array}.npy")
    path.rename(data / "pairs" / f"{array}.npy")
  keys = {"blend_index_dir": "pairs", "mmap_npy_num_samples": 40}
  facts = preflight(**BLEND | keys)
  assert facts["parts"][0]["blend"]["indices"] == "found" and not facts["warnings"]
  facts = preflight(**keys, grain_train_files="npy/0|a,0.6;npy/1|b,0.4")
  assert facts["parts"][0]["blend"]["indices"] == "another blend's, to be drawn" and not facts["problems"]
  (text,) = facts["warnings"]
  assert "dataset_index.npy and its partner are not this blend: draw" in text and text.endswith("will be drawn.")
  os.truncate(data / "pairs" / "dataset_index.npy", 140)
  facts = preflight(**BLEND | keys)
  assert facts["parts"][0]["blend"]["indices"] == "another blend's, to be drawn"
  assert "bytes of data; its header says" in facts["warnings"][0]


def test_too_few_samples(preflight):
  (text,) = preflight(mmap_npy_num_samples=30, steps=1000)["problems"]
  assert "but the run reads 2000; lower steps, or raise mmap_npy_num_samples" in text


def test_a_blend_without_weights_is_cut_to_what_there_is(preflight):
  facts = preflight(grain_train_files="npy/0|a;npy/1|b", mmap_npy_num_samples=1000, steps=5)
  (part,) = facts["parts"]
  assert not facts["problems"]
  assert part["samples_available"] == sum(said["samples_available"] for said in part["datasets"])


def test_a_child_that_is_asked_for_more_than_it_has(preflight, monkeypatch):
  monkeypatch.setattr(blending, "count_draws", lambda blend: [blend.size, 9999])
  (text,) = preflight(**BLEND)["problems"]
  assert "the blend asks dataset 1 (b) for 9999 samples, and its indices have" in text


def test_folder_that_cannot_be_written(preflight, data, monkeypatch):
  (data / "npy").mkdir()
  monkeypatch.setattr(os, "access", lambda path, mode: "npy" not in str(path))
  facts = preflight()
  assert facts["warnings"] == ["npy cannot be written; every start builds its indices again and keeps them in memory."]
  assert facts["disk"] == [] and facts["memory"]["needed"] == facts["parts"][0]["datasets"][0]["index_bytes"]


def test_disk_and_memory_that_are_too_small(preflight, monkeypatch):
  monkeypatch.setattr(resources.shutil, "disk_usage", lambda folder: resources.shutil._ntuple_diskusage(9, 9, 9))
  monkeypatch.setattr(resources, "available_memory", lambda: 10)
  disk, memory = preflight()["problems"]
  assert "and 9 are free; make room" in disk and "and 10 are free; build them on a larger machine" in memory


def test_damaged_index_files(preflight, arguments):
  stream = open_streams(arguments, False)
  os.truncate(stream.children[0].index.paths[1], 200)
  said = preflight()["parts"][0]["datasets"][0]
  assert said["indices"] == "damaged (StaleIndexError), to be built again"


def test_megatrons_own_cache(preflight, data):
  """The cache that megatron-core wrote for a blend of 61 samples of two datasets, see `megatron_cache_test`."""
  content = json.loads((MEGATRON_CACHE / "builds.json").read_text(encoding="utf-8"))
  for number, lengths in enumerate(content["children"]):
    with IndexedDatasetWriter(str(data / f"books-{number}"), np.int32) as writer:
      for row, length in enumerate(lengths):
        writer.add_sequence(np.append(100 * row + np.arange(length), EOD)[1:] if length else [])
        writer.end_document()
  keys = {
    "grain_train_files": f"{MEGATRON_CACHE}|books-0,0.7;{MEGATRON_CACHE}|books-1,0.3",
    "blend_index_dir": MEGATRON_CACHE, "mmap_npy_num_samples": 61, "mmap_npy_split": "'8,2'",
    "max_target_length": 16, "data_shuffle_seed": 1234, "steps": 2, "vocab_size": 100_000,
  }  # fmt: skip
  facts = preflight(**keys)
  (part,) = facts["parts"]
  assert [said["indices"] for said in part["datasets"]] == ["found, Megatron's"] * 2
  assert part["blend"]["indices"] == "found" and facts["memory"]["needed"] == 0
  other = preflight(**keys | {"data_shuffle_seed": 1235})
  assert [said["indices"] for said in other["parts"][0]["datasets"]] == ["to be built"] * 2
  assert all("has random_seed 1234, and this run asks for 1235" in text for text in other["warnings"][:2])


def test_devices_and_keys_that_are_not_strict(preflight):
  facts = preflight("--devices", "4", eod_mask_loss=True)
  assert (facts["devices"], facts["global_batch_size"], facts["parts"][0]["samples_read"]) == (4, 8, 160)
  assert facts["not_strict"] == {"eod_mask_loss": True}


def test_mmap(preflight):
  facts = preflight(grain_file_type="mmap", grain_train_files="a,0.7;b,0.3")
  assert not facts["problems"]
  assert [said["samples_available"] for said in facts["parts"][0]["datasets"]] == [
    said["tokens"] // 32 for said in facts["parts"][0]["datasets"]
  ]
  (text,) = preflight(grain_file_type="mmap", grain_train_files="a", steps=9999)["problems"]
  assert "raise num_epoch or lower steps" in text


def test_for_people(arguments, capsys, caplog):
  levels = [logging.getLogger(name).level for name in run_config._LOGGERS]
  with caplog.at_level(logging.INFO):
    assert command_line.main(arguments("preflight", **BLEND, blend_cache_dir="pairs", eod_mask_loss=True)) == 0
  assert not [record for record in caplog.records if record.name in run_config._LOGGERS], "only its own answer"
  assert [logging.getLogger(name).level for name in run_config._LOGGERS] == levels
  said = capsys.readouterr().out
  assert "other than mmap_npy_megatron_gpt.yml  eod_mask_loss=true" in said
  assert "0  a           0.7        200" in said and "no problem found" in said
  assert command_line.main(arguments("preflight", grain_train_files="npy|gone")) == 1
  assert "problem: gone: found neither gone.idx nor gone.bin" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["preflight", "head"])
def test_nothing_but_the_answer(arguments, data, command):
  _, config, *keys = arguments(command)
  words = ["preflight", config, *keys] if command == "preflight" else ["head", "--config", config, *keys]
  unset = ("TF_CPP_MIN_LOG_LEVEL", "TRANSFORMERS_VERBOSITY")
  environment = {key: value for key, value in os.environ.items() if key not in unset}
  code = [sys.executable, "-m", "maxtext.input_pipeline.mmap_cli.main", *words]
  done = subprocess.run(code, capture_output=True, text=True, cwd=data, env=environment, check=True)
  assert done.stdout and not done.stderr


@pytest.mark.parametrize(
  ("options", "keys", "words"),
  [
    ((), {"dataset_type": "synthetic"}, "dataset_type=synthetic"),
    ((), {"grain_file_type": "arrayrecord"}, "grain_file_type=arrayrecord"),
  ],
)
def test_other_configs_are_refused(arguments, capsys, options, keys, words):
  assert command_line.main(arguments("preflight", *options, **keys)) == 1
  assert words in capsys.readouterr().err


@pytest.mark.parametrize(
  ("keys", "words"),
  [
    ({"no_such_key": 1}, "there is no key 'no_such_key'"),
    ({"config": "none.yml"}, "none.yml"),
    ({"steps": "x"}, "steps"),
  ],
)
def test_a_config_that_cannot_be_read_is_a_problem(preflight, keys, words):
  assert any(words in text for text in preflight(**keys)["problems"])


def test_words_that_are_no_keys(arguments, capsys):
  for words in (["x"], ["--foo"], ["nothing.txt"]):
    command_line.main([*arguments("preflight"), *words])
    assert "is no key=value" in capsys.readouterr().out


def test_counts_of_draws_in_pieces(monkeypatch):
  monkeypatch.setattr(blending, "_PIECE", 7)
  blend = blending.weighted_blend([0.7, 0.2, 0.1], 100)
  assert blending.count_draws(blend) == blending.draw(blend)[1]
