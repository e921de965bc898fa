# SPDX-License-Identifier: Apache-2.0
"""Stand-in: on Megatron data, a failure of the data ends the run with one sentence and a non-zero exit code.

See `_mmap_training`. Other runs are the release's. A spawned data worker imports the main module of a run once more, as
`__mp_main__`, and needs nothing of it; the trainer's imports would take seconds of each worker's start.
"""

if __name__ != "__mp_main__":
  from absl import app

  from maxtext._release.trainers.pre_train import train as release
  from maxtext.trainers.pre_train import _mmap_training

  globals().update({k: v for k, v in vars(release).items() if not k.startswith("__")})
  training_loop_iteration, main = _mmap_training.training_loop_iteration, _mmap_training.main

  if __name__ == "__main__":
    app.run(main)
