# SPDX-License-Identifier: Apache-2.0
"""With log_batch_digest each step logs the digest of its global batch; see `hosts_test` for several hosts."""

import json
import re

import numpy as np
import pytest

from maxtext.input_pipeline import _mmap_digest as mmap_digest
from maxtext.input_pipeline._mmap_datasource import MegatronNpyDataSource
from maxtext.input_pipeline._mmap_index_cache import IndexRequest
from maxtext.input_pipeline.mmap_cli import main as command_line

EOD, LENGTH, BATCH, STEPS = 2, 32, 2, 8


def digests(run) -> dict[int, tuple[str, int, int]]:
  """Digest, first and last sample of each step in a run's log."""
  found = re.findall(r"step (\d+): batch digest ([0-9a-f]{16}) \(samples (\d+) to (\d+)\)", run.log)
  assert len(found) == len({step for step, *_ in found})
  return {int(step): (digest, int(first), int(last)) for step, digest, first, last in found}


@pytest.fixture
def expected(dataset, tmp_path):
  """Makes the digests of STEPS steps from the samples that the library reads."""

  def make(first: int = 0, num_samples: int = STEPS * BATCH) -> dict[int, tuple[str, int, int]]:
    request = IndexRequest(LENGTH, 0, num_samples=num_samples)
    source = MegatronNpyDataSource(str(tmp_path / "own"), dataset, EOD, LENGTH, request=request)
    result = {}
    for step in range(STEPS):
      samples = np.arange(BATCH) + first + step * BATCH
      result[step] = mmap_digest.batch_digest(source.read_rows(samples)), int(samples[0]), int(samples[-1])
    return result

  return make


@pytest.mark.parametrize("workers", [0, 2])
def test_each_step_logs_its_digest(train, dataset, expected, workers):
  run = train(dataset, steps=STEPS, log_batch_digest=True, grain_worker_count=workers)
  assert run.code == 0 and digests(run) == expected()


def test_after_a_resume(train, dataset, expected):
  run = train(dataset, steps=3, mmap_npy_num_samples=STEPS * BATCH, log_batch_digest=True)
  again = train(dataset, steps=STEPS, mmap_npy_num_samples=STEPS * BATCH, log_batch_digest=True)
  assert sorted(digests(run)) == [0, 1, 2] and sorted(digests(again)) == [3, 4, 5, 6, 7]
  assert digests(run) | digests(again) == expected()


@pytest.fixture
def trace(arguments, capsys):
  """Asks `mmap-index trace` for the digest and the first sample of a step."""

  def ask(step: int, prefix: str, **keys) -> tuple[str, int]:
    capsys.readouterr()
    assert command_line.main(["trace", "base.yml", "--step", str(step), *arguments(prefix, **keys), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    return facts["digest"], facts["first_sample"]

  return ask


def test_from_a_start_sample_with_evaluation_between(train, trace, dataset, expected, tmp_path):
  keys = {
    "steps": STEPS,
    "mmap_npy_start_sample": 3,
    "mmap_npy_num_samples": 3 + STEPS * BATCH,
    "log_batch_digest": True,
    "eval_interval": 2,
    "eval_steps": 1,
    "grain_eval_files": f"{tmp_path / 'indices'}|{dataset}",
  }
  run = train(dataset, **keys)
  assert digests(run) == expected(3, 3 + STEPS * BATCH)
  assert trace(5, dataset, **keys) == digests(run)[5][:2]


def test_without_the_key_nothing_is_logged(train, dataset):
  assert "batch digest" not in train(dataset, steps=2).log


def test_mmap(train, trace, dataset):
  keys = {"grain_file_type": "mmap", "grain_train_files": dataset, "steps": 4, "log_batch_digest": True}
  runs = [train(dataset, run_name=f"workers-{workers}", grain_worker_count=workers, **keys) for workers in (0, 2)]
  assert trace(2, dataset, **keys) == digests(runs[0])[2][:2]
  assert digests(runs[0]) == digests(runs[1])
  assert [(first, last) for _, first, last in digests(runs[0]).values()] == [(0, 1), (2, 3), (4, 5), (6, 7)]
