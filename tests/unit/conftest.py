# SPDX-License-Identifier: Apache-2.0
"""The release's own code as a peer, in a process of its own: within ours, the release's modules import our stand-ins."""

import json
import os
from pathlib import Path
import subprocess
import sys

import numpy as np
import pytest

import maxtext
from maxtext.input_pipeline.mmap_cli import main as command_line


@pytest.fixture(scope="session")
def run_released():
  """Runs Python code with the plain release as `maxtext` and returns the arrays that it saves.

  The code gets `arguments` in sys.argv and writes results.npz to `folder`, with the file of the released module that it
  used under "module".
  """

  def run(folder: Path, code: str, *arguments) -> dict[str, np.ndarray]:
    (folder / "maxtext").symlink_to(Path(maxtext.__path__[1]), target_is_directory=True)
    done = subprocess.run(
      [sys.executable, "-c", code, *map(str, arguments)],
      env=os.environ | {"PYTHONPATH": str(folder)},
      capture_output=True,
      text=True,
      timeout=120,
      check=False,
    )
    assert done.returncode == 0, done.stderr
    with np.load(folder / "results.npz") as file:
      results = dict(file)
    assert str(results.pop("module")).startswith(str(folder)), "the release's module was not the one that ran"
    return results

  return run


@pytest.fixture
def mmap_index(capsys):
  """Runs the command line `mmap-index`; returns its exit code, stdout (parsed where --json is given) and stderr."""

  def run(*arguments):
    code = command_line.main([*map(str, arguments)])
    out, errors = capsys.readouterr()
    return code, json.loads(out) if "--json" in arguments and out else out, errors

  return run
