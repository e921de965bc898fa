# SPDX-License-Identifier: Apache-2.0
"""Tests of `mmap-index blend`: it writes what a run with the keys that it prints would write."""

from pathlib import Path
import re
import sys

import numpy as np
import pytest
import yaml

from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter
from maxtext.input_pipeline._mmap_stream import StreamSettings, open_stream

PAIR = ("dataset_index.npy", "dataset_sample_index.npy")


@pytest.fixture
def datasets(tmp_path) -> list[str]:
  prefixes = []
  for number, lengths in enumerate(([5, 7, 3, 9, 6, 4], [9], [30, 8], [11, 12])):
    prefixes.append(str(tmp_path / f"data-{number}"))
    with IndexedDatasetWriter(prefixes[-1], np.int32) as writer:
      for row, length in enumerate(lengths):
        writer.add_document(1000 * number + 100 * row + np.arange(length))
  return prefixes


@pytest.fixture
def blend(mmap_index, tmp_path):
  """Runs `blend`; returns exit code, stdout and stderr."""

  def run(files, *arguments, folder=tmp_path / "blend"):
    fixed = ("--datasets", files, "--output-dir", folder, "--seq-length", 4, "--total-samples", 50)
    return mmap_index("blend", *fixed, *arguments)

  return run


def settings_of(keys: dict, **changes) -> StreamSettings:
  """The settings of a run with the printed keys."""
  part = "valid" if "grain_eval_files" in keys else "train"
  return StreamSettings(
    files=keys.get("grain_train_files") or keys["grain_eval_files"],
    seq_length=keys["max_target_length"],
    eod_id=0,
    seed=keys["data_shuffle_seed"],
    num_samples=keys.get("mmap_npy_num_samples") or keys["mmap_npy_num_eval_samples"],
    split=keys.get("mmap_npy_split", ""),
    split_index=int(part == "valid"),
    blend_margin=keys["mmap_npy_blend_margin"],
    blend_index_dir=keys["blend_index_dir"],
    part=part,
    **changes,
  )


@pytest.mark.parametrize(
  "arguments",
  [(), ("--seed", 7, "--margin", 10), ("--split", "1,1"), ("--split", "1,1", "--split-index", 1), ("--max-workers", 1)],
)
def test_a_run_finds_every_file(blend, datasets, arguments):
  files = f"{datasets[0]},7;{datasets[2]}:{datasets[3]},3"
  code, facts, errors = blend(files, *arguments, "--json")
  assert code == 0 and errors == ""
  stream = open_stream(settings_of(facts["run"]), write=False)
  assert stream.source.pair.found and all(child.index.found for child in stream.children)
  assert [child.requested for child in stream.children] == [child["asked"] for child in facts["children"]]
  assert [len(child.source) for child in stream.children] == [child["built"] for child in facts["children"]]
  assert len(stream) == 50 and stream.children[1].prefixes == (datasets[2], datasets[3])


def test_the_files_are_those_that_a_run_builds(blend, datasets, tmp_path):
  files = f"{datasets[0]},7;{datasets[1]},0;{datasets[2]},3"
  code, facts, _ = blend(files, "--json")
  assert code == 0
  keys = facts["run"]
  other = keys["grain_train_files"].replace(str(tmp_path / "blend"), str(tmp_path / "run"))
  changed = {**keys, "grain_train_files": other, "blend_index_dir": ""}
  stream = open_stream(settings_of(changed, blend_cache_dir=str(tmp_path / "run")), write=True)
  assert [child.npy_dir for child in stream.children] == [f"{tmp_path}/run/dataset_{number}" for number in (0, 2)]
  for number in (0, 2):
    folders = [tmp_path / name / f"dataset_{number}" for name in ("blend", "run")]
    built, ran = ({path.name: path for path in folder.iterdir()} for folder in folders)
    assert built.keys() == ran.keys() and len(built) == 5
    assert all(built[name].read_bytes() == ran[name].read_bytes() for name in built if name != "stamps.json")
  assert {path.name for path in (tmp_path / "blend").iterdir()} == {*PAIR, "dataset_0", "dataset_2", "stamps.json"}
  for name, array in zip(PAIR, stream.source.pair.arrays, strict=True):
    np.testing.assert_array_equal(np.load(tmp_path / "blend" / name), array)
  assert sorted(map(str, facts["files"])) == sorted(map(str, (tmp_path / "blend").rglob("*-*.*"))) + [
    str(tmp_path / "blend" / name) for name in PAIR
  ]


def test_closing_table_and_keys(blend, datasets):
  code, text, _ = blend(f"{datasets[0]},7;{datasets[1]},0;{datasets[2]},3.0")
  assert code == 0
  table, closing, keys = text.split("\n\n")
  rows = [re.split(r"  +", line) for line in table.splitlines()]
  assert rows[0] == ["dataset", "weight", "samples asked", "built", "epochs", "tokens an epoch"]
  assert rows[1:] == [[datasets[0], "7", "36", "42", "5", "34"], [datasets[2], "3", "16", "18", "2", "38"]]
  assert "samples        50\n" in closing and "in 10 files" in closing
  heading, _, lines = keys.partition("\n")
  assert heading == "Keys of the run:"
  folder = Path(datasets[0]).parent / "blend"
  assert yaml.safe_load(lines) == {
    "grain_train_files": f"{folder}/dataset_0|{datasets[0]},7.0;{folder}/dataset_2|{datasets[2]},3.0",
    "blend_index_dir": str(folder), "max_target_length": 4, "data_shuffle_seed": 1234, "mmap_npy_num_samples": 50,
    "mmap_npy_blend_margin": 0.5,
  }  # fmt: skip


def test_a_blend_of_one(blend, datasets):
  code, facts, _ = blend(f"{datasets[0]},2", "--json")
  assert code == 0 and facts["run"]["grain_train_files"].endswith(",2.0;")
  assert open_stream(settings_of(facts["run"]), write=False).source.pair.found


def test_evaluation_has_keys_of_its_own(blend, datasets):
  keys = blend(f"{datasets[0]},2", "--split", "1,1", "--split-index", 1, "--json")[1]["run"]
  assert "grain_eval_files" in keys and keys["mmap_npy_num_eval_samples"] == 50 and keys["mmap_npy_split"] == "1,1"


def test_bars_name_their_dataset(blend, datasets, monkeypatch):
  monkeypatch.setattr(sys.stderr.__class__, "isatty", lambda self: True, raising=False)
  code, _, errors = blend(f"{datasets[0]},7;{datasets[2]},3")
  assert code == 0
  for bar in ("0 data-0: document index", "1 data-2: shuffle index", "blend"):
    assert f"{bar}: 100%" in errors


def test_errors_are_one_sentence(blend, datasets, tmp_path):
  (tmp_path / "file").write_text("")
  for files, arguments, expected in (
    (datasets[0], (), "has no weights"),
    (f"{datasets[0]},-1", (), "entry 0 is"),
    (f"{datasets[0]},0", (), "the weights add up to 0"),
    (f"{datasets[0]},1;{tmp_path}/none,1", (), "found neither"),
    (f"{datasets[0]},1", ("--split-index", 1), "needs --split"),
    (f"{datasets[0]},1", ("--split", "0,1"), "the train part of split '0,1'"),
  ):
    code, out, errors = blend(files, *arguments)
    assert code == 1 and out == "" and errors.startswith("error: ") and errors.count("\n") == 1 and expected in errors
  assert "cannot write indices to" in blend(f"{datasets[0]},1", folder=tmp_path / "file")[2]


@pytest.mark.parametrize(
  "arguments", [("--margin", "-1"), ("--margin", "nan"), ("--total-samples", 0), ("--max-workers", 0)]
)
def test_arguments_that_cannot_be_used(blend, datasets, arguments):
  with pytest.raises(SystemExit) as end:
    blend(f"{datasets[0]},1", *arguments)
  assert end.value.code == 2
