# SPDX-License-Identifier: Apache-2.0
"""The kept inputs of tests/fuzz and some seconds of new ones; FUZZ_SECONDS=600 (`make test-long`) looks longer."""

import importlib.util
import json
import os
from pathlib import Path
import subprocess
import sys

import numpy as np
import pytest

from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline._mmap_indexed_dataset import MMapIndexedDataset

FOLDER = Path(__file__).parents[1] / "fuzz"
SECONDS = float(os.environ.get("FUZZ_SECONDS", "3"))
CORPUS = sorted(path for path in (FOLDER / "corpus").glob("*/*"))


def test_no_finding(tmp_path):
  command = [sys.executable, str(FOLDER / "run.py"), "--seconds", str(SECONDS), "--findings", str(tmp_path)]
  done = subprocess.run(command, capture_output=True, text=True, timeout=300 + 2 * SECONDS, check=False)
  assert done.returncode == 0, done.stderr[-5000:]
  for line in done.stdout.splitlines():
    said = json.loads(line)
    assert said["findings"] == 0 and said["runs"] > len(list((FOLDER / "corpus" / said["target"]).iterdir())), said
  assert list(tmp_path.iterdir()) == []


def test_corpus_is_small():
  assert len(CORPUS) > 30 and sum(path.stat().st_size for path in CORPUS) < 200_000


@pytest.fixture(scope="module")
def targets():
  spec = importlib.util.spec_from_file_location("fuzz_targets", FOLDER / "targets.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def damage_array(arrays):
  wrong = [array.copy() for array in arrays]
  wrong[2][:] = wrong[2][::-1]
  return tuple(wrong)


def load_without_checksum(folder, description, stamps):
  del stamps
  return damage_array(tuple(map(cache.map_array, description.paths(folder).values())))


WRONG = {
  "idx": (MMapIndexedDataset, "get", lambda self, row: np.zeros(int(self.sizes[row]), self.dtype)),
  "arrays": (cache, "load", load_without_checksum),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_reader_that_is_wrong_is_found(tmp_path, targets, monkeypatch, name):
  target = targets.TARGETS[name](str(tmp_path))
  seed = target.seeds()[0]
  target.run(seed)
  monkeypatch.setattr(*WRONG[name])
  with pytest.raises(targets.FindingError, match="not what lies there|a wrong array was believed"):
    target.run(seed)


def test_a_parser_that_fails_otherwise_is_found(tmp_path, targets, monkeypatch):
  def fail(*_):
    raise KeyError("not an error of ours")

  target = targets.TARGETS["text"](str(tmp_path))
  target.run(b"a|b")
  monkeypatch.setattr(targets, "parse_npy_entry", fail)
  with pytest.raises(KeyError):
    target.run(b"a|b")
