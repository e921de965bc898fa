# SPDX-License-Identifier: Apache-2.0
"""The wheel holds the branch and the release, and trains where there is no checkout."""

from email.parser import Parser
import os
from pathlib import Path
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile

import pytest

CHECKOUT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
  folder = tmp_path_factory.mktemp("wheel")
  command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(folder), str(CHECKOUT)]
  done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
  assert done.returncode == 0, done.stderr[-3000:]
  (built,) = folder.glob("*.whl")
  return built


def test_contents(wheel):
  assert wheel.name.startswith("maxtext-0.2.5+megatron.")
  with zipfile.ZipFile(wheel) as archive:
    names = archive.namelist()
    info = next(n.split("/")[0] for n in names if n.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr(archive.read(f"{info}/METADATA").decode())
    scripts = archive.read(f"{info}/entry_points.txt").decode()
  for name in (
    "maxtext/__init__.py",
    "maxtext/configs/base.yml",
    "maxtext/configs/mmap_npy_megatron_gpt.yml",
    "maxtext/_release/LICENSE",
    "maxtext/_release/AUTHORS",
    "maxtext/_release/__init__.py",
    "maxtext/_release/configs/base.yml",
    "maxtext/_release/configs/models/gpt3-52k.yml",
    "dependencies/scripts/run_tutorial.py",
    f"{info}/licenses/LICENSE",
  ):
    assert name in names
  assert {name.split("/")[0] for name in names} == {"maxtext", "dependencies", info}
  assert not [n for n in names if n.endswith((".pyc", ".nbi", ".nbc")) or "__pycache__" in n or "_release/_release" in n]
  assert len(names) == len({*names})
  released = (f for f in (CHECKOUT / "src/maxtext/_release").rglob("*") if f.is_file() and "__pycache__" not in f.parts)
  assert {str(f.relative_to(CHECKOUT / "src")) for f in released} == {n for n in names if "/_release/" in n}
  assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.12"
  assert {"tpu", "cuda12", "test", "docs"} <= {*metadata.get_all("Provides-Extra")}
  assert scripts.count("dependencies.scripts.") == 6
  assert "mmap-index = maxtext.input_pipeline.mmap_cli.main:main" in scripts


def evaluate(python, expression):
  """What an expression is in another environment, as printed there."""
  module = re.search(r"\w+", expression)[0]
  code = f"import {module}; print({expression})"
  return subprocess.check_output([python, "-P", "-c", code], text=True, timeout=60).strip()


def test_trains_outside_the_checkout(wheel, tmp_path):
  """In an environment of its own, which borrows the libraries of this one but not its editable maxtext."""
  venv.create(tmp_path / "venv", with_pip=False)
  python = tmp_path / "venv" / "bin" / "python"
  site = Path(evaluate(python, "sysconfig.get_path('purelib')"))
  install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(site), str(wheel)]
  subprocess.run(install, check=True, timeout=300, capture_output=True)
  # A plain path line adds the folder but does not process its .pth files, so an editable install there stays out.
  (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
  command = [
    python, "-m", "maxtext.trainers.pre_train.train", "base.yml", "run_name=t", f"base_output_directory={tmp_path}",
    "model_name=gpt3-52k", "dataset_type=synthetic", "steps=2", "enable_checkpointing=false", "hardware=cpu",
    "skip_jax_distributed_system=true", "per_device_batch_size=1", "max_target_length=128",
    "enable_goodput_recording=false", "log_config=false",
  ]  # fmt: skip
  env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
  done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
  log = done.stdout + done.stderr
  assert done.returncode == 0, log[-3000:]
  assert log.count("completed step: ") == 2
  assert str(CHECKOUT / "src") not in log
  code = "import sys; from maxtext.input_pipeline.mmap_cli.main import main; sys.exit(main(['stats', '--help']))"
  shown = subprocess.run([python, "-P", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
  assert shown.returncode == 0 and "max_kda_segments" in shown.stdout, shown.stderr
  assert evaluate(python, "*maxtext.__path__").split() == [str(site / "maxtext"), str(site / "maxtext" / "_release")]
