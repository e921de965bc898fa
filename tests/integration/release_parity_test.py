# SPDX-License-Identifier: Apache-2.0
"""With none of the branch's keys set, a run through the branch is the release's run, to the last digit that it logs."""

import os
from pathlib import Path
import re
import subprocess
import sys

import pytest

import maxtext

RELEASED = Path(maxtext.__path__[1])
PRE_TRAIN = "maxtext.trainers.pre_train."


@pytest.fixture(scope="module")
def plain_release(tmp_path_factory):
  """A folder for PYTHONPATH in which `maxtext` is the release, so that none of our modules can be found."""
  folder = tmp_path_factory.mktemp("plain")
  (folder / "maxtext").symlink_to(RELEASED, target_is_directory=True)
  return folder


def run_module(module, folder, *args, pythonpath=None, **env):
  path = {"PYTHONPATH": str(pythonpath)} if pythonpath else {}
  command = [sys.executable, "-m", module, f"base_output_directory={folder}", "run_name=t", *args]
  done = subprocess.run(
    command, cwd=folder, env=os.environ | path | env, capture_output=True, text=True, timeout=300, check=False
  )
  assert done.returncode == 0, done.stderr[-3000:]
  return done.stdout + done.stderr


def steps(log):
  """What the log says of each step, times and speeds left out."""
  lines = re.findall(r"completed step: .*", log)
  return [[part for part in line.split(", ") if not re.match(r"seconds|TFLOP|Tokens/s", part)] for line in lines]


def test_losses_of_a_synthetic_run(tmp_path, plain_release):
  args = [
    "model_name=gpt3-52k", "dataset_type=synthetic", "steps=5", "enable_checkpointing=false", "hardware=cpu",
    "skip_jax_distributed_system=true", "per_device_batch_size=1", "max_target_length=128",
    "enable_goodput_recording=false",
  ]  # fmt: skip
  check = "import maxtext.configs.pyconfig as p; print(p.__file__)"
  where = subprocess.run(
    [sys.executable, "-c", check], env=os.environ | {"PYTHONPATH": str(plain_release)}, cwd=tmp_path,
    capture_output=True, text=True, check=True, timeout=120,
  )  # fmt: skip
  assert Path(where.stdout.split()[-1]).is_relative_to(plain_release)

  branch = steps(run_module(PRE_TRAIN + "train", tmp_path, *args))
  release = steps(run_module(PRE_TRAIN + "train", tmp_path, *args, pythonpath=plain_release))
  assert len(branch) == 5 and all("total_weights: 128" in step for step in branch)
  assert any(part.startswith("loss: ") for part in branch[0])
  assert branch == release


def test_train_compile(tmp_path):
  pytest.importorskip("libtpu", reason="compiling ahead of time for a TPU needs libtpu")
  args = [
    "model_name=gpt3-52k", "dataset_type=synthetic", "compile_topology=v5e-4", "compile_topology_num_slices=1",
    "per_device_batch_size=1", "max_target_length=128", "enable_goodput_recording=false",
  ]  # fmt: skip
  log = run_module(PRE_TRAIN + "train_compile", tmp_path, *args, TPU_SKIP_MDS_QUERY="1")
  assert "Finished train_compile.py successfully" in log
