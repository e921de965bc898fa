# SPDX-License-Identifier: Apache-2.0
"""Bad input ends a run before its first step: one sentence as the last line, an exit code, and nothing half-written."""

import os

import numpy as np
import pytest

from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter


@pytest.fixture
def assert_refused(start, finish, tmp_path):
  """Runs the trainer and checks how it ends."""

  def check(prefix: str, code: int, *expected: str, **keys) -> None:
    run = finish(start(prefix, **keys))
    assert run.code == code and not run.losses, run.log[-3000:]
    for text in expected:
      assert text in run.last_line
    assert run.last_line.endswith(".") and "Traceback" not in run.log, run.log[-3000:]
    written = [name for _, _, names in os.walk(tmp_path) for name in names]
    assert not [name for name in written if name.endswith((".npy", ".tmp", ".json"))]
    assert not [path for path, _, _ in os.walk(tmp_path / "out") if os.path.basename(path).isdigit()], "no checkpoint"

  return check


def test_bad_key(assert_refused, dataset):
  expected = "mmap_npy_split: the split '99;1' is not one to three non-negative numbers"
  assert_refused(dataset, 2, expected, mmap_npy_split="99;1")


def test_truncated_bin(assert_refused, write_dataset, tmp_path):
  prefix = write_dataset(tmp_path / "short")
  size = os.path.getsize(prefix + ".bin")
  os.truncate(prefix + ".bin", size - 1)
  assert_refused(prefix, 1, f"short.bin is truncated: it has {size - 1} bytes, and the index needs {size}")


def test_sentence_split_file(assert_refused, tmp_path):
  with IndexedDatasetWriter(str(tmp_path / "split"), np.uint16) as writer:
    for _ in range(30):
      writer.add_sequence(range(3, 20))
      writer.add_sequence([5, 6, 2])
      writer.end_document()
  assert_refused(
    str(tmp_path / "split"),
    1,
    "split.idx has documents of several sequences (60 sequences in 30 documents)",
    "set mmap_split_sentences=true if that is meant",
  )
