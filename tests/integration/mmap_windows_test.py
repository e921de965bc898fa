# SPDX-License-Identifier: Apache-2.0
"""Training on fixed windows, `grain_file_type=mmap`: resumed exactly, evaluated, and with the losses of the release."""

from pathlib import Path
import re

import pytest

import maxtext


@pytest.fixture
def files(dataset, write_dataset, tmp_path) -> str:
  return f"{dataset},0.7;{write_dataset(tmp_path / 'other', seed=1)},0.3"


def test_second_half_has_the_losses_of_an_unbroken_run(train, dataset, files):
  keys = {"grain_file_type": "mmap", "grain_train_files": files}
  evaluated = {"eval_interval": 2, "eval_steps": 2, "grain_eval_files": dataset}
  whole = train(dataset, run_name="whole", steps=4, **keys, **evaluated)
  assert whole.code == 0 and sorted(whole.losses) == [0, 1, 2, 3], whole.log[-3000:]
  weights = re.findall(r"Completed eval after train step \d+, .*total_weights=([\d.]+)", whole.log)
  assert len(weights) == 2 and weights[0] == weights[1] and float(weights[0]) > 0, whole.log[-3000:]
  assert whole.log.count("use grain_file_type=mmap_npy to train on EOD") == 1

  first = train(dataset, steps=2, grain_worker_count=1, **keys)
  second = train(dataset, steps=4, grain_worker_count=2, **keys)
  assert (first.code, second.code) == (0, 0), second.log[-3000:]
  assert sorted(second.losses) == [2, 3]
  assert {**first.losses, **second.losses} == whole.losses
  assert "Data continues at sample 4 of the global order" in second.log

  other = train(dataset, steps=6, **keys | {"grain_train_files": files.replace(",0.7", ",0.6")})
  assert other.code == 1 and not other.losses
  assert "another order of samples: the weights are" in other.last_line


def test_losses_are_the_releases(train, start, finish, dataset, files, tmp_path):
  keys = {"grain_file_type": "mmap", "grain_train_files": files, "steps": 3, "enable_checkpointing": False}
  ours = train(dataset, run_name="ours", **keys)
  (tmp_path / "plain").mkdir()
  (tmp_path / "plain" / "maxtext").symlink_to(Path(maxtext.__path__[1]), target_is_directory=True)
  release = finish(start(dataset, {"PYTHONPATH": str(tmp_path / "plain")}, run_name="release", **keys))
  assert release.code == 0 and "global order" not in release.log, release.log[-3000:]
  assert sorted(ours.losses) == [0, 1, 2] and ours.losses == release.losses
