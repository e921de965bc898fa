# SPDX-License-Identifier: Apache-2.0
"""Data that fails inside the training loop ends the run with one sentence, code 1 and a whole checkpoint. CASES D14."""

import os
import re

import numpy as np
import psutil
import pytest

from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline._mmap_datasource import MegatronNpyDataSource
from maxtext.input_pipeline._mmap_indexed_dataset import MMapIndexedDataset

EOD, VOCAB, LENGTH, BATCH = 2, 512, 32, 2
STEP = 5  # the first step whose data is bad


@pytest.fixture
def bad_at_step_5(write_dataset, tmp_path):
  """A dataset with an id outside the vocabulary that no sample before step 5 holds."""
  prefix = write_dataset(tmp_path / "bad")
  dataset = MMapIndexedDataset(prefix)
  request = cache.IndexRequest(LENGTH, 0, num_samples=20)
  source = MegatronNpyDataSource(str(tmp_path / "unused"), prefix, EOD, LENGTH, request=request)
  documents, samples, order = source.index.arrays
  first = int(order[STEP * BATCH])
  row = int(documents[samples[first, 0]])
  position = int(dataset.pointers[row]) + 2 * (int(samples[first, 1]) + 1)  # the sample's second token: no other has it
  with open(prefix + ".bin", "r+b") as file:
    file.seek(position)
    file.write(np.uint16(700).tobytes())
  return prefix


@pytest.mark.parametrize("workers", [0, 2])
def test_id_outside_the_vocabulary(start, finish, train, bad_at_step_5, workers, tmp_path):
  run = finish(start(bad_at_step_5, grain_worker_count=workers))
  assert run.code == 1, run.log[-3000:]
  assert sorted(run.losses) == list(range(STEP))
  assert re.match(rf"Training ended at step {STEP}: .*bad\.bin holds token id 700, outside the vocabulary", run.last_line)
  assert run.last_line.endswith("Step 4 is saved; a restart continues after it.")
  assert "4" in os.listdir(tmp_path / "out" / "run" / "checkpoints")

  again = train(bad_at_step_5)  # meets the same sample first, having lost nothing
  assert again.code == 1 and not again.losses
  assert f"Training ended at step {STEP}: " in again.last_line


def test_file_that_shrinks(start, finish, wait_for, write_dataset, tmp_path):
  prefix = write_dataset(tmp_path / "large", documents=20_000)
  process = start(prefix, steps=100_000, learning_rate_schedule_steps=100_000, grain_prefetch_buffer_size=2)
  wait_for(process, "completed step: 3")
  os.truncate(prefix + ".bin", 1000)
  run = finish(process)
  assert run.code == 1, run.log[-3000:]
  last = max(run.losses)
  assert re.match(rf"Training ended at step {last + 1}: .*large\.bin ", run.last_line)
  assert f"Step {last} is saved" in run.last_line


def test_killed_worker(start, finish, wait_for, write_dataset, tmp_path):
  prefix = write_dataset(tmp_path / "large", documents=20_000)
  process = start(prefix, steps=100_000, learning_rate_schedule_steps=100_000, grain_worker_count=2)
  wait_for(process, "completed step: 3")
  workers = [child for child in psutil.Process(process.pid).children() if "spawn_main" in " ".join(child.cmdline())]
  assert len(workers) == 2
  workers[0].kill()
  run = finish(process)
  assert run.code == 1, run.log[-3000:]
  assert re.match(r"Training ended at step \d+: a data worker process died", run.last_line), run.last_line


def test_workers_end_with_a_killed_trainer(start, wait_for, write_dataset, tmp_path):
  prefix = write_dataset(tmp_path / "large", documents=20_000)
  process = start(prefix, steps=100_000, learning_rate_schedule_steps=100_000, grain_worker_count=1)
  wait_for(process, "completed step: 3")
  children = psutil.Process(process.pid).children(recursive=True)
  process.kill()
  _, alive = psutil.wait_procs(children, timeout=60)
  assert not alive


def test_evaluation_data_fails(train, dataset, write_dataset, tmp_path):
  bad = write_dataset(tmp_path / "bad", bad_id=700)
  files = f"{tmp_path / 'eval'}|{bad}"
  run = train(dataset, grain_eval_files=files, eval_interval=4, eval_steps=2, grain_worker_count_eval=0)
  assert run.code == 1, run.log[-3000:]
  assert run.last_line.startswith("Training ended in the evaluation after step 0: ")
  assert "bad.bin holds token id 700" in run.last_line
  assert run.last_line.endswith("Step 0 is saved; a restart continues after it.")
