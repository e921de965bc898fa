# SPDX-License-Identifier: Apache-2.0
"""A resumed run reads on where it stopped, whatever its workers, or is refused. CASES D11 and D15."""

import json
import re
import shutil

import pytest

SAMPLES = {"mmap_npy_num_samples": 20}  # both halves of a run share one order


@pytest.mark.parametrize("workers", [(0, 2), (2, 1), (1, 0)], ids="{0[0]} to {0[1]} workers".format)
def test_second_half_has_the_losses_of_an_unbroken_run(train, dataset, workers):
  whole = train(dataset, run_name="whole")
  assert whole.code == 0 and sorted(whole.losses) == list(range(10)), whole.log[-3000:]
  first = train(dataset, steps=5, grain_worker_count=workers[0], **SAMPLES)
  second = train(dataset, steps=10, grain_worker_count=workers[1], **SAMPLES)
  assert (first.code, second.code) == (0, 0), second.log[-3000:]
  assert sorted(second.losses) == [5, 6, 7, 8, 9]
  assert {**first.losses, **second.losses} == whole.losses
  assert "Data continues at sample 10 of the global order" in second.log


@pytest.fixture
def saved(train, dataset, tmp_path):
  """A run that was saved after 4 steps; returns the folder of its last checkpoint."""
  run = train(dataset, steps=4)
  assert run.code == 0, run.log[-3000:]
  return tmp_path / "out" / "run" / "checkpoints" / "3"


def test_state_is_the_position_in_the_global_order(saved):
  state = json.loads((saved / "iter" / "process_0-of-1.json").read_text())
  assert state["next_sample"] == 8
  assert state["order"]["requested_samples"] == 8 and state["order"]["num_epochs"] == 1


def test_refusals(saved, train, dataset, write_dataset, tmp_path):
  """Another epoch count (D11), another dataset, damaged and no iterator state (D15), each in one sentence."""
  longer = train(dataset, steps=70)
  assert longer.code == 1 and not longer.losses
  assert "asked for 8 samples (1 epoch) and this run asks for 140 (2 epochs" in longer.last_line
  assert "so lower steps to continue" in longer.last_line

  other = write_dataset(tmp_path / "other", seed=1)
  replaced = train(other)
  assert replaced.code == 1 and not replaced.losses
  assert "its dataset is 60 sequences, " in replaced.last_line
  assert "read the dataset that the saved run read" in replaced.last_line

  (saved / "iter" / "process_0-of-1.json").write_text("{")
  damaged = train(dataset)
  assert damaged.code == 1 and not damaged.losses
  assert "data iterator state was not saved by grain_file_type=mmap_npy or mmap of this version" in damaged.last_line

  shutil.rmtree(saved / "iter")
  without = train(dataset)
  assert without.code == 1 and not without.losses
  assert "has no data iterator state" in without.last_line


def test_batches_of_less_than_a_sample_per_device(train, start, finish, dataset):
  """Four devices at 0.5, with accumulation: the step uses four of the eight rows it gets, and no sample is lost."""
  keys = {"steps": 3, "gradient_accumulation_steps": 2, "enable_checkpointing": False, "log_batch_digest": True}
  keys |= {"dtype": "float32", "weight_dtype": "float32"}
  whole = train(dataset, per_device_batch_size=2, **keys)
  assert "grain_train_files: " in whole.log and "step 2: batch digest " in whole.log, whole.log[-3000:]
  four = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
  spread = finish(start(dataset, four, per_device_batch_size=0.5, **keys))
  assert spread.code == 0 and sorted(spread.losses) == [0, 1, 2], spread.log[-3000:]
  digests, others = (re.findall(r"step \d: batch digest .*", run.log) for run in (whole, spread))
  assert digests == others and len(digests) == 3
  said = [" ".join(run.losses.values()) for run in (whole, spread)]
  values, others = ([float(loss) for loss in re.findall(r" loss: ([0-9.]+)", words)] for words in said)
  assert len(values) == 3 and others == pytest.approx(values, abs=2e-3)  # the sum over rows in another order, in float32
