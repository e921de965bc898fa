# SPDX-License-Identifier: Apache-2.0
"""A small dataset, and whole training runs on it in processes of their own, as users start them."""

from __future__ import annotations

import dataclasses
import fcntl
import logging
import os
import re
import signal
import subprocess
import sys
import time

from absl import flags
import numpy as np
import pytest

from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter

EOD, VOCAB, LENGTH, BATCH = 2, 512, 32, 2
TIMEOUT = 240


@dataclasses.dataclass(frozen=True)
class Run:
  """How a training run ended. `losses` maps each step that it logged to weights and losses, as printed."""

  code: int
  log: str
  losses: dict[int, str]

  @property
  def last_line(self) -> str:
    return self.log.rstrip().splitlines()[-1]


@pytest.fixture(scope="session")
def write_dataset():
  """Writes documents of random tokens that end with EOD; `bad_id` goes into the middle of each."""

  def write(prefix, documents: int = 60, seed: int = 0, bad_id: int | None = None, longest: int = 90) -> str:
    rng = np.random.default_rng(seed)
    with IndexedDatasetWriter(str(prefix), np.uint16) as writer:
      for length in rng.integers(2, longest, documents):
        tokens = rng.integers(EOD + 1, VOCAB, length)
        tokens[-1] = EOD
        if bad_id is not None:
          tokens[length // 2] = bad_id
        writer.add_document(tokens)
    return str(prefix)

  return write


@pytest.fixture(scope="session")
def dataset(tmp_path_factory, write_dataset) -> str:
  return write_dataset(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture
def arguments(tmp_path):
  """Makes the command line of a run on a dataset; indices and output go to tmp_path."""

  def make(prefix: str, run_name: str = "run", **keys) -> list[str]:
    settings = {
        "run_name": run_name,
        "base_output_directory": tmp_path / "out",
        "model_name": "gpt3-52k",
        "override_model_config": True,
        "vocab_size": VOCAB,
        "dataset_type": "grain",
        "grain_file_type": "mmap_npy",
        "grain_train_files": f"{tmp_path / 'indices'}|{prefix}",
        "mmap_eod_id": EOD,
        "steps": 10,
        "learning_rate_schedule_steps": 10,
        "checkpoint_period": 3,
        "async_checkpointing": False,
        "per_device_batch_size": BATCH,
        "max_target_length": LENGTH,
        "grain_worker_count": 0,
        "hardware": "cpu",
        "skip_jax_distributed_system": True,
        "enable_goodput_recording": False,
        "log_config": False,
        **keys,
    }
    return [f"{key}={value}" for key, value in settings.items()]

  return make


@pytest.fixture
def train(arguments, capsys):
  """Trains in this process, which saves the imports of a new one."""
  from maxtext.trainers.pre_train import train as trainer

  flags.FLAGS.mark_as_parsed()  # as absl's app.run does; Grain reads flags before it starts workers

  def run(prefix: str, **keys) -> Run:
    lines: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    code = 0
    try:
      trainer.main(["train", *arguments(prefix, **keys)])
    except SystemExit as end:
      code = end.code
    finally:
      root.removeHandler(handler)
    log = "\n".join([*lines, capsys.readouterr().err])
    return Run(code, log, losses(log))

  return run


@pytest.fixture
def start(tmp_path, arguments):
  """Starts training in a process of its own; its output goes to the file `process.log`."""
  started = []

  def begin(prefix: str, environment=None, **keys):
    command = [sys.executable, "-m", "maxtext.trainers.pre_train.train", *arguments(prefix, **keys)]
    path = tmp_path / f"log{len(started)}"
    with open(path, "wb") as log:
      process = subprocess.Popen(
          command,
          cwd=tmp_path,
          stdout=log,
          stderr=subprocess.STDOUT,
          env=os.environ | {"PYTHONUNBUFFERED": "1"} | (environment or {}),
      )
    process.log = path
    started.append(process)
    return process

  yield begin
  for process in started:
    if process.poll() is None:
      process.send_signal(signal.SIGKILL)


@pytest.fixture
def train_hosts(start, finish, tmp_path_factory):
  """Trains as several hosts on loopback, each a process with one device; returns their runs, host 0 first."""

  def run(hosts: int, prefix: str, own_keys=lambda host: {}, **keys) -> list[Run]:
    lock = tmp_path_factory.getbasetemp().parent / "coordinator.lock"  # MaxText's coordinator has one port
    with open(lock, "w") as file:
      fcntl.flock(file, fcntl.LOCK_EX)
      processes = []
      for host in range(hosts):
        environment = {
          "JAX_PLATFORMS": "cpu",
          "JAX_COORDINATOR_ADDRESS": "localhost",
          "JOB_INDEX": "0",
          "JOB_COMPLETION_INDEX": str(host),
          "PROCESSES_IN_JOB": str(hosts),
          "JAX_PROCESS_COUNT": str(hosts),
        }
        settings = {"skip_jax_distributed_system": False, **keys, **own_keys(host)}
        processes.append(start(prefix, environment, **settings))
      return [finish(process) for process in processes]

  return run


@pytest.fixture
def finish():
  """Waits for the end of a started process."""

  def wait(process) -> Run:
    code = process.wait(TIMEOUT)
    log = process.log.read_text(errors="replace")
    return Run(code, log, losses(log))

  return wait


def losses(log: str) -> dict[int, str]:
  """What the log says of each step, times and speeds left out."""
  found = re.findall(r"completed step: (\d+),.*?(total_weights: .*)", log)
  return {int(step): rest for step, rest in found}


@pytest.fixture
def wait_for():
  """Waits until the log of a process contains a text."""

  def wait(process, text: str) -> None:
    end = time.monotonic() + TIMEOUT
    while text not in process.log.read_text(errors="replace"):
      assert process.poll() is None and time.monotonic() < end, process.log.read_text(errors="replace")[-3000:]
      time.sleep(0.05)

  return wait
