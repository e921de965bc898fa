# SPDX-License-Identifier: Apache-2.0
"""Commands and Python snippets of README.md and docs/ run, in the order of their page, and print what the page shows.

Each page has a folder of its own with small data under the names that the pages use. A training command on the CPU is run
as it is written. Of the others, whose models are large, the config is read and the data is opened, as written, at their
real numbers of samples. What a page shows as output is compared without its numbers. What does not run is listed below.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import io
import json
import logging
import os
from pathlib import Path
import re
import shlex
import shutil
import subprocess
import sys
from typing import NamedTuple

from absl import flags
import numpy as np
import pytest

import maxtext
from maxtext.configs import types
from maxtext.input_pipeline import _megatron_blending as blending
from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline import grain_data_processing
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter
from maxtext.input_pipeline.mmap_cli import main as mmap_index
from maxtext.input_pipeline.mmap_cli import run_config

CHECKOUT = Path(__file__).parents[2]
PAGES = sorted([CHECKOUT / "README.md", *CHECKOUT.glob("docs/**/*.md")])
TRAIN = "python -m maxtext.trainers.pre_train.train "
EOD = 2

# Commands that do not run here: what they begin with, and why.
LEFT_OUT = {
  "make demo": "CI runs it",
  "make test": "it would run this test in itself",
  "python -m pytest": "it would run this test in itself",
  "python -m pip install": "it changes the environment; wheel_test.py and CI install",
  "python3.11 -m venv": "the reference environment needs Python 3.11; make test-reference makes it",
  "reference/bin/python": "the reference environment needs Python 3.11; make test-reference makes it",
  "ruff check": "make lint, which CI runs",
  "pyrefly check": "make lint, which CI runs",
  "sphinx-build": "make docs, which CI runs",
}
# What stands for places that are not here. Stores themselves are tested in object_store/.
STAND_INS = {"gs://my-bucket": "file://$PWD/bucket", "/tmp/maxtext-cache": "$PWD/cache"}
# Commands that find what they look for and say so by their exit code.
BAD_NEWS = ("mmap-index diff data/indices data/longer",)
# Pages that go on with a run of another page: that page, and what the command begins with.
BEFORE = {"megatron_resume.md": ("megatron_mmap.md", TRAIN + "mmap_npy_megatron_gpt.yml run_name=small")}


class Block(NamedTuple):
  """A fenced block: `section` counts the headings before it, `line` is that of the fence."""

  section: int
  line: int
  language: str
  text: str


def blocks(page: Path) -> list[Block]:
  found, section, opened = [], 0, None
  lines = page.read_text(encoding="utf-8").splitlines()
  for number, line in enumerate(lines, 1):
    if opened is None:
      section += line.startswith("#")
      if match := re.fullmatch(r"```(\S*)", line):
        opened = number, match[1]
    elif line == "```":
      found.append(Block(section, opened[0], opened[1], "\n".join(lines[opened[0] : number - 1])))
      opened = None
  assert opened is None, f"{page}:{opened[0]} is never closed"
  return found


def commands(block: Block) -> list[str]:
  return [line.strip() for line in block.text.replace("\\\n", " ").splitlines() if line.strip()]


# The folder in which a page runs.

SENTENCE = "the river carries stones from hills to sea and a mill by its bank grinds corn for every town below"
DATASETS = {  # documents, and the most words of one
  "corpus": (400, 300),
  "books": (600, 400),
  "code": (250, 200),
  "web/part_00": (200, 300),
  "web/part_01": (150, 300),
}
MEGATRON_SCRIPT = """\
torchrun --nproc-per-node 8 pretrain_gpt.py \\
    --data-path 0.7 data/books 0.3 data/code --split 99,1,0 --data-cache-path megatron/cache \\
    --seq-length 2048 --global-batch-size 16 --train-iters 1000 --seed 1234 \\
    --eval-interval 500 --eval-iters 10 --reset-position-ids --reset-attention-mask \\
    --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model --vocab-size 32000 \\
    --lr 3e-4 --min-lr 3e-5 --bf16 --save-interval 100 --num-workers 2
"""


def texts(seed: int, count: int, longest: int) -> list[str]:
  rng = np.random.default_rng(seed)
  return [" ".join(rng.choice(SENTENCE.split(), rng.integers(4, longest))) + "." for _ in range(count)]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
  """Text, datasets made of such text, a tokenizer, and a launch script of Megatron's."""
  import sentencepiece

  folder = tmp_path_factory.mktemp("prepared")
  tokenizer = Path(maxtext.__path__[-1]) / "assets" / "tokenizers" / "tokenizer.llama2"
  shutil.copy(tokenizer, folder / "tokenizer.model")
  (folder / "corpus").mkdir()
  (folder / "corpus" / "notes.txt").write_text("\n".join(texts(1, 40, 90)) + "\n")
  (folder / "more.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(2, 20, 90)))
  (folder / "train.sh").write_text(MEGATRON_SCRIPT)
  model = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer))
  (folder / "data" / "web").mkdir(parents=True)
  for seed, (name, (count, longest)) in enumerate(DATASETS.items(), 3):
    with IndexedDatasetWriter(str(folder / "data" / name), np.uint16) as writer:
      for tokens in model.encode(texts(seed, count, longest)):
        writer.add_document(np.array([*tokens, EOD]))
  shutil.copytree(folder / "data", folder / "bucket" / "data")
  (folder / "tools").symlink_to(CHECKOUT / "tools")
  with contextlib.chdir(folder):
    write_megatron_cache(Path("megatron", "cache"))
  return folder


def write_megatron_cache(folder: Path) -> None:
  """Writes what megatron-core 0.16.1 leaves of the run in `MEGATRON_SCRIPT`, name for name; see cache_reference.py."""
  folder.mkdir(parents=True)
  weights = {"data/books": 0.7, "data/code": 0.3}
  for part, size in (("train", 16000), ("valid", 480)):
    children = []
    buffers = utils.compute_blend_buffers(size, list(weights.values()), 0.5)
    for prefix, count in zip(weights, buffers, strict=True):
      number = utils.SPLIT_NAMES.index(part)
      arrays = cache.build_in_memory(prefix, cache.IndexRequest(2048, 1234, count, None, "99,1,0", number))[:3]
      child = {"class": "GPTDataset", "dataset_path": prefix, "num_samples": count, "index_split": part}
      child |= {"random_seed": 1234, "sequence_length": 2048, "split": "99,1,0"}
      child |= {"split_matrix": [[0, 0.99], [0.99, 1.0], None], "tokenizer": {"class": "none"}}
      children.append(child)
      write_described(folder, f"GPTDataset-{part}", child, dict(zip(cache.ARRAYS, arrays, strict=True)))
    pair = blending.draw(blending.weighted_blend(list(weights.values()), size))[0]
    content = {"class": "BlendedDataset", "datasets": children, "split": part}
    content |= {"weights": [*weights.values()], "size": size}
    write_described(folder, f"BlendedDataset-{part}", content, dict(zip(blending.ARRAYS, pair, strict=True)))


def write_described(folder: Path, kind: str, content: dict, arrays: dict) -> None:
  text = json.dumps(content, indent=4)
  start = folder / f"{hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()}-{kind}"
  Path(f"{start}-description.txt").write_text(text)
  for name, array in arrays.items():
    np.save(f"{start}-{name}.npy", array)


@pytest.fixture
def place(prepared, tmp_path, monkeypatch) -> Path:
  """A copy of the prepared folder, as the working directory."""
  folder = tmp_path / "place"
  shutil.copytree(prepared, folder, symlinks=True)
  monkeypatch.chdir(folder)
  monkeypatch.setenv("XDG_CACHE_HOME", str(folder / ".cache"))
  monkeypatch.setenv("PWD", str(folder))
  return folder


# Running.


def run(command: str) -> str:
  """Runs a command as written; returns what it prints."""
  for name, stand_in in STAND_INS.items():
    command = command.replace(name, stand_in)
  if command.startswith(TRAIN):
    words = shlex.split(os.path.expandvars(command.removeprefix(TRAIN)))
    return train(words) if "hardware=cpu" in words else open_data(words)
  code, printed = run_in_process(command) if command.startswith("mmap-index ") else run_process(command)
  assert code == int(command.startswith(BAD_NEWS)), f"{command}\nends with {code}:\n{printed}"
  return printed


def run_in_process(command: str) -> tuple[int, str]:
  """Runs `mmap-index`, which saves its imports."""
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
    try:
      code = mmap_index.main(shlex.split(os.path.expandvars(command))[1:])
    except SystemExit as end:
      code = end.code
  return code, printed.getvalue()


def run_process(command: str) -> tuple[int, str]:
  command = re.sub(r"^python ", f"{shlex.quote(sys.executable)} ", command)
  done = subprocess.run(command, shell=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
  return done.returncode, done.stdout


@contextlib.contextmanager
def logged():
  """Collects what is logged."""
  lines: list[str] = []
  handler = logging.Handler(logging.INFO)
  handler.emit = lambda record: lines.append(record.getMessage())
  root = logging.getLogger()
  root.addHandler(handler)
  root.setLevel(logging.INFO)
  try:
    yield lines
  finally:
    root.removeHandler(handler)


def train(words: list[str]) -> str:
  from maxtext.trainers.pre_train import train as trainer

  flags.FLAGS.mark_as_parsed()  # as absl's app.run does; Grain reads flags before it starts workers
  with logged() as lines:
    trainer.main(["train", *words, "enable_goodput_recording=false", "log_config=false"])
  return "\n".join(lines)


def open_data(words: list[str]) -> str:
  """Reads the config of a run and opens its data."""
  config = run_config.read(argparse.Namespace(config=words[0], keys=words[1:], others=[], devices=None))
  with logged() as lines:
    rows, order = grain_data_processing._rows(config, evaluation=False)
    fields = rows.rows(np.arange(2))
  assert fields["inputs"].shape == (2, config.max_target_length) and len(rows) >= order["needed_samples"]
  return "\n".join(lines)


def plain(text: str) -> str:
  """Takes numbers, hashes and line breaks out of a text."""
  text = re.sub(r"\b(?=\w*\d)[0-9a-f]{8,}\b", "HASH", text)
  return " ".join(re.sub(r"\d[\d,.]*", "#", text).split())


def assert_shown(shown: str, printed: str, where: str) -> None:
  """Each line that a page shows, between its dots, is among what was printed."""
  everything = plain(printed)
  for line in filter(None, shown.splitlines()):
    for part in re.split(r"\.\.\.", line):
      assert plain(part).rstrip(".") in everything, f"{where} shows {line!r}, and this was printed:\n{printed[-6000:]}"


def steps_of(page: Path) -> list[Block]:
  return [block for block in blocks(page) if block.language in ("sh", "python", "text", "yaml")]


def begun_by(page: str, beginning: str) -> str:
  """Returns the one command of a page that begins so."""
  (found,) = (path for path in PAGES if path.name == page)
  (command,) = (command for command in shell_commands(found) if command.startswith(beginning))
  return command


def shell_commands(page: Path) -> list[str]:
  return [command for block in blocks(page) if block.language == "sh" for command in commands(block)]


def left_out(command: str) -> bool:
  return command.startswith(tuple(LEFT_OUT))


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> dict[str, tuple[Path, str]]:
  """What training commands left, and printed, for pages that go on with it."""
  return {}


def train_once(command: str, place: Path, kept, tmp_path_factory) -> str:
  """Trains, or takes over what the same command left on another page."""
  if command not in kept:
    printed, folder = run(command), tmp_path_factory.mktemp("kept")
    for name in ("output", "data/indices"):
      shutil.copytree(place / name, folder / name)
    kept[command] = folder, printed
  folder, printed = kept[command]
  shutil.copytree(folder, place, dirs_exist_ok=True)
  return printed


@pytest.mark.parametrize("page", [page for page in PAGES if steps_of(page)], ids=lambda page: page.name)
def test_page(page, place, kept, tmp_path_factory):
  before = {name: begun_by(*begins) for name, begins in BEFORE.items()}

  def run_or_take(command: str) -> str:
    if command in before.values():
      return train_once(command, place, kept, tmp_path_factory)
    return run(command)

  if page.name in before:
    run_or_take(before[page.name])
  printed, section, ran = "", 0, 0
  for block in steps_of(page):
    where = f"{page.relative_to(CHECKOUT)}:{block.line}"
    if block.section != section:
      section, printed = block.section, ""
    if block.language == "python":
      exec(compile(block.text, where, "exec"), given(page, place))
      ran += 1
    elif block.language == "sh":
      wanted = [command for command in commands(block) if not left_out(command)]
      printed += "\n".join(map(run_or_take, wanted))
      ran += len(wanted)
    elif printed:  # the first such block after commands is their output
      assert_shown(block.text, printed, where)
      printed = ""
  shown = any(block.language in ("sh", "python") and not all(map(left_out, commands(block))) for block in steps_of(page))
  assert bool(ran) == shown


def given(page: Path, place: Path) -> dict:
  """Names that a page's snippet takes as given: on Megatron's side, its dataset, a step and the global batch size."""
  names: dict = {"__name__": "snippet"}
  if page.name == "moving_from_megatron.md":
    config = run_config.read(argparse.Namespace(config="run.yml", keys=[], others=[], devices=8))
    rows, _ = grain_data_processing._rows(config, evaluation=False)
    batch = config.global_batch_size_to_train_on
    fields = rows.rows(np.arange(batch))
    train_ds = [{"tokens": fields["inputs"][i], "labels": fields["targets"][i]} for i in range(batch)]

    def compare(step, digest):
      assert f"batch digest {digest} " in run(f"mmap-index trace run.yml --step {step} --row 0 --devices 8")

    names |= {"train_ds": train_ds, "step": 0, "batch": batch, "print": compare}
  return names


def test_what_is_left_out_is_written_somewhere():
  every = [command for page in PAGES for command in shell_commands(page)]
  for beginning in (*LEFT_OUT, *BAD_NEWS):
    assert any(command.startswith(beginning) for command in every), beginning


# What the pages name.


def said_in_code() -> list[str]:
  """Returns every text in the branch's code, with "..." where it has a value."""
  found = []
  for path in (CHECKOUT / "src" / "maxtext").rglob("*.py"):
    if "_release" in path.parts:
      continue
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
      if isinstance(node, ast.JoinedStr):
        found.append("".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values))
      elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        found.append(re.sub(r"%[sdr]", "...", node.value))
  return found


def messages(page: Path) -> list[str]:
  rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
  return [message.replace("\\|", "|") for row in rows for message in re.findall(r"`([^`]+)`", re.split(r" \| ", row)[0])]


def test_messages_of_the_tables_are_the_code_s():
  texts = said_in_code()
  found = messages(CHECKOUT / "docs" / "guides" / "megatron_errors.md")
  assert len(found) > 50
  for message in found:
    parts = [part.strip() for part in message.split("...") if part.strip()]
    assert any(in_order(parts, text) for text in texts), message


def in_order(parts: list[str], text: str) -> bool:
  place = 0
  for part in parts:
    place = text.find(part, place)
    if place < 0:
      return False
    place += len(part)
  return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_keys_that_a_page_names_exist(page):
  text = page.read_text(encoding="utf-8")
  named = {*re.findall(r"\b((?:grain|blend|mmap_npy|mmap_remote|packing|eval)_[a-z_]+[a-z])\b(?!\.py|/|-)", text)}
  modules = {"grain_data_processing", "eval_iters", "mmap_npy_megatron_gpt"}
  assert named - modules <= {*types.MaxTextConfig.model_fields}


def test_every_command_has_a_section():
  page = (CHECKOUT / "docs" / "guides" / "megatron_tools.md").read_text(encoding="utf-8")
  parser = run_in_process("mmap-index --help")[1]
  names = re.findall(r"^    ([a-z][a-z-]+)", parser, re.MULTILINE)
  assert len(names) >= 10
  for name in names:
    assert f"\n## {name}\n" in page, name
