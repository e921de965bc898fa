# SPDX-License-Identifier: Apache-2.0
"""An index file that is truncated under a training run ends it with one sentence, and not by a bus error."""

import os
import re

import pytest

from maxtext.input_pipeline import _mmap_guard

ARRAYS = ("document_index", "sample_index", "shuffle_index")
LONG = int(os.environ.get("FAULT_ROUNDS", "0")) > 3  # make test-long
CASES = [("idx", 0), *([(name, workers) for name in ("idx", *ARRAYS) for workers in (0, 2)][1:] if LONG else [])]


@pytest.mark.skipif(not _mmap_guard.SUPPORTED, reason="bus errors are handled on 64-bit Linux only")
@pytest.mark.parametrize("name, workers", CASES)
def test_mapped_file_that_shrinks(start, finish, wait_for, write_dataset, tmp_path, name, workers):
  prefix = write_dataset(tmp_path / "large", documents=20_000)
  keys = {"steps": 100_000, "learning_rate_schedule_steps": 100_000, "grain_prefetch_buffer_size": 2}
  process = start(prefix, grain_worker_count=workers, **keys)
  wait_for(process, "completed step: 3")
  path = prefix + ".idx" if name == "idx" else str(next((tmp_path / "indices").glob(f"*-{name}.npy")))
  os.truncate(path, 1000)
  run = finish(process)
  assert run.code == 1, run.log[-3000:]
  last = max(run.losses)
  sentence = rf"Training ended at step {last + 1}: .*{re.escape(path)} was truncated while it is in use"
  assert re.match(sentence, run.last_line), run.last_line
  assert f"Step {last} is saved" in run.last_line
