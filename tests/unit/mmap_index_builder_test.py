# SPDX-License-Identifier: Apache-2.0
"""Tests of tools/data_processing/mmap_index_builder.py, the command line that builds indices before a run."""

import importlib.util
import json
import os
from pathlib import Path
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline._mmap_files import unreadable
from maxtext.input_pipeline._mmap_index_cache import IndexRequest
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter
from maxtext.input_pipeline.mmap_cli import build, console

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "data_processing" / "mmap_index_builder.py"
D1_LENGTHS = [5, 7, 3, 9, 6, 4]


@pytest.fixture(scope="module")
def tool():
  spec = importlib.util.spec_from_file_location("mmap_index_builder", SCRIPT)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture
def dataset(tmp_path) -> str:
  """D1's sequences, and a document without one."""
  with IndexedDatasetWriter(str(tmp_path / "data"), np.int32) as writer:
    for row, length in enumerate(D1_LENGTHS):
      writer.add_document(100 * row + np.arange(length))
    writer.add_document([])
  return str(tmp_path / "data")


@pytest.fixture
def convert(tool, tmp_path, dataset, capsys):
  """Runs `convert` on D1's file; returns exit code, stdout and stderr."""

  def run(*arguments, source=dataset, folder=tmp_path / "indices", seq_length=4):
    sources = [source] if isinstance(source, str) else source
    fixed = ["--input", *sources, "--output-dir", str(folder), "--seq-length", str(seq_length)]
    code = tool.main(["convert", *fixed, *map(str, arguments)])
    return (code, *capsys.readouterr())

  return run


def facts_of(table: str) -> dict[str, str]:
  """The closing table as names and values; continued lines belong to the last name."""
  rows = re.findall(r"^(\S[^\n]*?)  +(\S.*(?:\n +\S.*)*)$", table, re.MULTILINE)
  return {name: " ".join(value.split()) for name, value in rows}


def test_closing_table(convert, tmp_path):
  code, table, errors = convert("--num-samples", 9, "--seed", 42)
  facts = facts_of(table)
  assert code == 0 and errors == ""
  assert float(facts.pop("seconds")) >= 0
  files = facts.pop("files").split()
  assert facts == {
    "documents": "7",
    "sequences": "6 (used: 0 to 6)",
    "tokens per epoch": "34",
    "epochs": "2",
    "samples": "16",
    "separate last epoch": "yes",
    "bytes written": f"{sum(map(os.path.getsize, files)):,}",
  }
  suffixes = ["document_index.npy", "sample_index.npy", "shuffle_index.npy", "metadata.json"]
  assert [os.path.basename(file).split("-", 1)[1] for file in files] == suffixes
  assert {os.path.dirname(file) for file in files} == {str(tmp_path / "indices")}


def test_json_says_the_same(convert, dataset):
  code, text, _ = convert("--num-samples", 14, "--seed", 42, "--json")
  summary = json.loads(text)
  assert code == 0 and text.count("\n") == 1
  assert summary.pop("seconds") >= 0 and len(summary.pop("files")) == 4 and summary.pop("bytes") > 0
  assert summary == {
    "datasets": 1, "documents": 7, "sequences": 6, "sequences_used": [0, 6], "tokens_per_epoch": 34, "epochs": 2,
    "samples": 16, "separate_last_epoch": False,
  }  # fmt: skip


@pytest.mark.parametrize(
  "arguments, request_",
  [
    (["--num-samples", "8", "--seed", "42"], IndexRequest(4, 42, 8)),
    (["--num-samples", "9"], IndexRequest(4, 1234, 13)),
    (["--num-epochs", "2", "--seed", "0"], IndexRequest(4, 0, 16)),
    (["--num-samples", "3", "--split", "1,1"], IndexRequest(4, 1234, 3, None, "1,1", 0)),
    (["--num-samples", "3", "--split", "1,1", "--split-index", "1"], IndexRequest(4, 1234, 3, None, "1,1", 1)),
  ],
)
def test_a_run_finds_what_was_built(convert, dataset, tmp_path, arguments, request_):
  assert convert(*arguments)[0] == 0
  index = cache.open_index(str(tmp_path / "indices"), dataset, request_, write=False)
  assert index.found
  for array, expected in zip(index.arrays, cache.build_in_memory(dataset, request_)[:3], strict=True):
    np.testing.assert_array_equal(array, expected)


def test_indices_without_the_extra_token_are_another_order(convert, dataset, tmp_path):
  assert convert("--num-epochs", 1, "--add-extra-token", 0)[0] == 0
  folder = str(tmp_path / "indices")
  assert not cache.open_index(folder, dataset, IndexRequest(4, 1234, None, 1), write=False).found
  assert cache.open_index(folder, dataset, IndexRequest(4, 1234, None, 1, add_extra_token=0), write=False).found


def test_a_second_run_writes_the_same_files(convert, tmp_path):
  convert("--num-samples", 9)
  before = {path.name: path.read_bytes() for path in (tmp_path / "indices").iterdir() if path.name != cache.STAMPS}
  assert convert("--num-samples", 9)[0] == 0
  after = {path.name: path.read_bytes() for path in (tmp_path / "indices").iterdir() if path.name != cache.STAMPS}
  assert before == after and len(after) == 4


def test_a_folder_of_one_dataset(convert, tmp_path):
  corpus = tmp_path / "corpus"
  with IndexedDatasetWriter(str(corpus / "books"), np.int32) as writer:
    writer.add_document(range(9))
  assert facts_of(convert("--num-epochs", 1, source=str(corpus))[1])["tokens per epoch"] == "9"


def test_several_paths_are_one_dataset(convert, dataset, tmp_path):
  with IndexedDatasetWriter(str(tmp_path / "more" / "books"), np.int32) as writer:
    writer.add_document(range(9))
  more = str(tmp_path / "more" / "books")
  summaries = []
  for source in ([dataset, more], f"{dataset}:{more}", [more + ":" + dataset]):
    code, text, _ = convert("--num-epochs", 1, "--json", source=source)
    summaries.append({key: value for key, value in json.loads(text).items() if key != "seconds"})
    assert code == 0 and summaries[-1] == summaries[0]
  assert summaries[0]["datasets"] == 2 and summaries[0]["sequences"] == 7 and summaries[0]["tokens_per_epoch"] == 43


def test_arguments_without_a_command_mean_convert(tool, convert, dataset, tmp_path, capsys):
  arguments = ["--output-dir", str(tmp_path / "flat"), "--seq-length", "4", "--num-samples", "9", "--input", dataset]
  assert tool.main(arguments) == 0
  flat = facts_of(capsys.readouterr().out)
  command = facts_of(convert("--num-samples", 9)[1])
  assert {**flat, "files": 0, "seconds": 0} == {**command, "files": 0, "seconds": 0}
  assert {path.name for path in (tmp_path / "flat").iterdir()} == {path.name for path in (tmp_path / "indices").iterdir()}


# Errors.


def refuse(result) -> str:
  """The error of a run: one sentence on stderr, exit code 1, and nothing on stdout."""
  code, out, errors = result
  assert code == 1 and out == ""
  assert errors.startswith("error: ") and errors.endswith(".\n") and errors.count("\n") == 1
  return errors


def test_errors_are_one_sentence(convert, dataset, tmp_path):
  missing = str(tmp_path / "missing")
  assert f"found neither {missing}.idx nor" in refuse(convert("--num-samples", 9, source=missing))
  assert "the split 'x' is not" in refuse(convert("--num-samples", 9, "--split", "x"))
  assert "the valid part of split '1,0' is sequences" in refuse(
    convert("--num-samples", 9, "--split", "1,0", "--split-index", 1)
  )
  assert "--split-index 1 needs --split" in refuse(convert("--num-samples", 9, "--split-index", 1))
  assert "do not make one sample of 2048" in refuse(convert("--num-epochs", 1, seq_length=2048))
  assert "the seed is -1; expected" in refuse(convert("--num-samples", 9, "--seed", -1))
  os.truncate(dataset + ".bin", 3)
  assert "data.bin is truncated" in refuse(convert("--num-samples", 9))
  os.truncate(dataset + ".idx", 50)
  assert "data.idx is truncated" in refuse(convert("--num-samples", 9))
  assert not (tmp_path / "indices").exists()


@pytest.mark.parametrize(
  "error, expected",
  [
    (PermissionError(13, "Permission denied", "/data/x.npy"), "error: /data/x.npy: Permission denied.\n"),
    (unreadable("/data/x.idx", OSError(5, "Input/output error")), "error: /data/x.idx cannot be read (Input/output err"),
  ],
)
def test_an_error_of_the_system_names_its_file(convert, monkeypatch, error, expected):
  def fail(options):
    raise error

  monkeypatch.setattr(build, "run", fail)
  assert refuse(convert("--num-samples", 9)).startswith(expected)


def test_a_folder_that_cannot_be_written(convert, tmp_path):
  (tmp_path / "file").write_text("not a folder")
  assert "cannot write indices to " in refuse(convert("--num-samples", 9, folder=tmp_path / "file"))


@pytest.mark.parametrize(
  "arguments",
  [
    [], ["--num-samples", "9", "--num-epochs", "1"], ["--num-samples", "0"], ["--num-epochs", "-1"],
    ["--num-samples", "x"], ["--num-samples", "9", "--split-index", "3"], ["--num-samples", "9", "--seed", "x"],
  ],
)  # fmt: skip
def test_arguments_that_cannot_be_used(convert, capsys, arguments):
  with pytest.raises(SystemExit) as end:
    convert(*arguments)
  assert end.value.code == 2 and "usage: " in capsys.readouterr().err


def test_an_error_ends_the_process_with_code_1(tmp_path):
  command = [sys.executable, SCRIPT, "convert", "--input", tmp_path / "x", "--output-dir", tmp_path / "y"]
  command += ["--seq-length", "4", "--num-samples", "9"]
  done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
  assert refuse((done.returncode, done.stdout, done.stderr)) and not (tmp_path / "y").exists()


# Starting.


def test_help_shows_an_example(tool, capsys):
  for arguments in (["--help"], ["convert", "--help"]):
    with pytest.raises(SystemExit) as end:
      tool.main(arguments)
    assert end.value.code == 0
  text = capsys.readouterr().out
  example = text[text.index("example (") :]
  assert "mmap-index convert --input" in example and "--num-samples 80" in example


IMPORTS = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
  runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as end:
  assert end.code == 0, end.code
print(sorted({"jax", "grain", "flax", "torch", "transformers", "numba"} & {*sys.modules}))
"""


def test_starts_without_jax_or_grain(tmp_path, dataset):
  for arguments, imported in (
    (["--help"], "[]"),
    (["--input", dataset, "--output-dir", tmp_path / "out", "--seq-length", "4", "--num-samples", "9"], "['numba']"),
  ):
    command = [sys.executable, "-c", IMPORTS, SCRIPT, "convert", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == imported


def test_a_checkout_that_was_not_installed_says_what_to_do(tmp_path):
  for folder in ("tools", "src/maxtext/input_pipeline"):
    shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
  for file in (ROOT / "src" / "maxtext").glob("*.py"):
    shutil.copy(file, tmp_path / "src" / "maxtext")
  for script in ("mmap_index_builder.py", "mmap_tokenize.py"):
    command = [sys.executable, "-S", tmp_path / "tools" / "data_processing" / script, "--help"]  # no site-packages
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "run `pip install -e .` in the checkout" in refuse((done.returncode, done.stdout, done.stderr))


def test_no_bar_where_stderr_is_no_terminal(monkeypatch):
  monkeypatch.setattr(sys, "stderr", open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
  assert console.progress_bars() is None


def test_bars_where_stderr_is_a_terminal(tool, convert, monkeypatch):
  monkeypatch.setattr(sys.stderr.__class__, "isatty", lambda self: True, raising=False)
  code, table, errors = convert("--num-samples", 9)
  assert code == 0 and facts_of(table)["samples"] == "16"
  for stage in ("document index", "sample index", "shuffle index"):
    assert f"{stage}: 100%" in errors


def test_the_released_command_line_still_runs(tmp_path, dataset):
  arguments = ["--input", dataset, "--output-dir", tmp_path / "out", "--seq-length", "4", "--num-samples", "9"]
  for given in (["--help"], arguments):
    command = [sys.executable, "-m", "maxtext.utils.mmap_index_builder", *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert given is arguments or "usage: mmap_index_builder.py" in done.stdout
  assert cache.open_index(str(tmp_path / "out"), dataset, IndexRequest(4, 1234, 9), write=False).found


def test_the_released_command_line_blends_as_this_one(tool, tmp_path, dataset, capsys):
  with IndexedDatasetWriter(str(tmp_path / "more"), np.int32) as writer:
    writer.add_document(range(30))
    writer.add_document(range(8))
  arguments = ["blend", "--datasets", f"{dataset},0.7;{tmp_path / 'more'},0.3", "--seq-length", "4"]
  arguments += ["--total-samples", "50", "--seed", "42", "--output-dir"]
  command = [sys.executable, "-m", "maxtext.utils.mmap_index_builder", *arguments, tmp_path / "released"]
  done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
  assert done.returncode == 0, done.stderr[-2000:]
  assert tool.main([*arguments, str(tmp_path / "ours")]) == 0
  assert "grain_train_files: " in capsys.readouterr().out
  files = [
    {path.relative_to(root): path for path in root.rglob("*") if path.is_file() and path.name != cache.STAMPS}
    for root in (tmp_path / "released", tmp_path / "ours")
  ]
  assert files[0].keys() == files[1].keys() and len(files[0]) == 10
  assert all(files[0][name].read_bytes() == files[1][name].read_bytes() for name in files[0])
