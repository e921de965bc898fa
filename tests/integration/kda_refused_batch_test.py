# SPDX-License-Identifier: Apache-2.0
"""A batch with more segments than max_kda_segments ends a run before its step: one sentence, code 1. CASES K7."""

from types import SimpleNamespace

import pytest

from maxtext.input_pipeline._kda_segments_check import KdaSegmentsError
from maxtext.trainers.pre_train import _mmap_training as training
from maxtext.utils import exceptions

KEYS = {"kda_implementation": "tokamax", "use_kda_safe_gate": True, "kda_lower_bound": -5}


def test_training(train, dataset):
  run = train(dataset, max_kda_segments=1, **KEYS)
  assert run.code == 1 and not run.losses, run.log[-3000:]
  assert run.last_line.startswith(
      "Training ended at step 0: kda_implementation=tokamax has room for max_kda_segments=1 segments on a device, and "
      "rows 0 and 1 of the training batch, which a device holds at once, have "
  )
  assert run.last_line.endswith(" or more, or use kda_implementation=auto, which needs no maximum.")
  assert "Traceback" not in run.log


def test_evaluation(train, dataset, write_dataset, tmp_path):
  short = write_dataset(tmp_path / "short", documents=600, longest=4)  # 10 documents and more in a row; above, 7 at most
  run = train(
      dataset,
      max_kda_segments=14,
      steps=3,
      grain_eval_files=f"{tmp_path / 'indices'}|{short}",
      eval_interval=2,
      eval_steps=1,
      grain_worker_count_eval=0,
      **KEYS,
  )
  assert run.code == 1 and 0 in run.losses, run.log[-3000:]
  assert "Training ended in the evaluation after step" in run.last_line
  assert "of the evaluation batch, which a device holds at once, have " in run.last_line


def test_other_data_ends_so_too_but_saves_no_step(monkeypatch):
  def stop(*_):
    stopped = exceptions.StopTraining("`next(self.data_iterator)` failed")
    stopped.__context__ = KdaSegmentsError("too many segments.")  # as the release's loader raises it
    raise stopped

  monkeypatch.setattr(training, "_released_iteration", stop)
  state = {"step": 5, "eval_data_iterator": None}  # no checkpoint manager: it is not asked for
  keys = {"config": SimpleNamespace(dataset_type="hf", grain_file_type="arrayrecord"), "start_step": 0}
  with pytest.raises(training.DataFailureError, match=r"Training ended at step 5: too many segments\.$"):
    training.training_loop_iteration({}, state, keys)
