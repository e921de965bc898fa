# SPDX-License-Identifier: Apache-2.0
"""Tests of what all commands of `mmap-index` share: help, JSON, errors, exit codes, tables and bars."""

import importlib
import os
from pathlib import Path
import shlex
import shutil
import subprocess
import sys
import tomllib

import numpy as np
import pytest

import maxtext
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter
from maxtext.input_pipeline.mmap_cli import build, console, main

COMMANDS = [importlib.import_module(f"maxtext.input_pipeline.mmap_cli.{name}") for name in main.COMMANDS]
HELP = """
import sys
from maxtext.input_pipeline.mmap_cli import main
try:
  main.main(sys.argv[1:])
except SystemExit as end:
  assert end.code == 0, end.code
print(sorted({"jax", "grain", "numpy", "numba", "tqdm", "matplotlib", "transformers", "yaml"} & {*sys.modules}))
"""


@pytest.mark.parametrize("arguments", [["--help"], *([command.NAME, "--help"] for command in COMMANDS)])
def test_help_imports_nothing_heavy(arguments):
  done = subprocess.run([sys.executable, "-c", HELP, *arguments], capture_output=True, text=True, timeout=60, check=False)
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[-1] == "[]"


def test_the_list_names_every_command_with_a_line(mmap_index, capsys):
  with pytest.raises(SystemExit):
    mmap_index("--help")
  text = " ".join(capsys.readouterr().out.split())
  assert all(f"{command.NAME} {command.SUMMARY}" in text for command in COMMANDS)
  assert len({command.NAME for command in COMMANDS}) == len(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.NAME)
def test_every_help_ends_in_an_example_and_has_json(mmap_index, capsys, command):
  with pytest.raises(SystemExit):
    mmap_index(command.NAME, "--help")
  text = capsys.readouterr().out
  assert f"mmap-index {command.NAME} " in text[text.rindex("example") :] and "--json" in text
  assert text.rstrip().endswith(command.EXAMPLE.rstrip())


@pytest.fixture
def examples_folder(tmp_path, monkeypatch, mmap_index):
  """A folder with the files that the examples of this file's commands name."""
  monkeypatch.chdir(tmp_path)
  for name in ("books", "code", "web/pages"):
    with IndexedDatasetWriter(f"data/{name}", np.uint16) as writer:
      for _ in range(50):
        writer.add_document([*range(3, 203), 2])
  built = ("--seq-length", 2048, "--output-dir")
  assert mmap_index("convert", "--input", "data/books", "--num-samples", 80, *built, "data/indices")[0] == 0
  blend = ("--datasets", "data/books,0.7;data/code,0.3", "--total-samples", 80, *built, "data/blend")
  assert mmap_index("blend", *blend)[0] == 0
  shutil.copytree("data/indices", "megatron/cache")
  found = [Path(folder) / "assets" / "tokenizers" / "tokenizer.llama2" for folder in maxtext.__path__]
  shutil.copy(next(path for path in found if path.exists()), "tokenizer.model")


@pytest.mark.parametrize("name", ["convert", "blend", "inspect", "verify", "diff", "stats", "head"])
def test_the_examples_of_the_help_run(mmap_index, examples_folder, name):
  (command,) = [command for command in COMMANDS if name == command.NAME]
  lines = command.EXAMPLE.replace("\\\n", " ").splitlines()
  examples = [shlex.split(line) for line in lines if line.startswith("  mmap-index")]
  assert examples
  for program, *arguments in examples:
    code, out, errors = mmap_index(*arguments)
    assert program == "mmap-index" and code == 0 and out, errors


def test_the_console_script_is_this_front():
  text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
  assert tomllib.loads(text)["project"]["scripts"]["mmap-index"] == f"{main.__name__}:main"


def test_no_command_and_an_unknown_one_are_usage_errors(mmap_index, capsys):
  for arguments in ((), ("nothing",), ("inspect",)):
    with pytest.raises(SystemExit) as end:
      mmap_index(*arguments)
    assert end.value.code == 2 and "usage: " in capsys.readouterr().err


def test_an_interrupt_is_a_sentence(mmap_index, monkeypatch):
  def interrupt(options):
    raise KeyboardInterrupt

  monkeypatch.setattr(build, "run", interrupt)
  arguments = ("convert", "--input", "x", "--output-dir", "y", "--seq-length", 4, "--num-samples", 1)
  assert mmap_index(*arguments) == (130, "", "error: interrupted.\n")


def test_a_reader_that_stops_early_is_no_traceback(tmp_path):
  command = [sys.executable, "-m", main.__name__, "inspect", *(str(tmp_path / str(n)) for n in range(5))]
  read, write = os.pipe()
  os.close(read)
  done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
  os.close(write)
  assert done.returncode == 1 and done.stderr == ""


def test_tables():
  assert console.table({"a": "1", "long name": ["2", "3"], "none": []}) == (
    "a          1\nlong name  2\n           3\nnone"
  )
  rows = [("x", "1,000", "5%"), ("yy", "2", "10 %")]
  assert console.columns(("name", "n", "share"), rows) == "name      n  share\nx     1,000     5%\nyy        2   10 %"
  assert console.columns(("name", "n"), []) == "name  n"


def test_bars_only_on_a_terminal(monkeypatch, capsys):
  assert console.progress_bars() is None
  monkeypatch.setattr(sys.stderr.__class__, "isatty", lambda self: True, raising=False)
  show = console.progress_bars("B")
  show("reading", 5, 10)
  show("reading", 10, 10)
  assert "reading: 100%" in capsys.readouterr().err
