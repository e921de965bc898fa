# SPDX-License-Identifier: Apache-2.0
"""The seam between the branch and the release: names kept, imports light, nobody else's processes touched."""

import importlib
from importlib.metadata import distribution
import inspect
import os
from pathlib import Path
import shutil
import signal
import subprocess
import sys
import time

import pytest

import maxtext

OURS = Path(maxtext.__path__[0])
RELEASED = Path(maxtext.__path__[1])


def run_python(code, **env):
  return subprocess.run(
    [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False, env=os.environ | env
  )


def shared_modules():
  """Dotted names below `maxtext` of every module that both folders have: stand-ins, replacements and package faces."""
  for file in sorted(OURS.rglob("*.py")):
    inner = file.relative_to(OURS)
    if inner.parts[0] != "_release" and (RELEASED / inner).is_file():
      parts = inner.with_suffix("").parts
      yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def import_below(package, name):
  return importlib.import_module(f"{package}.{name}" if name else package)


def test_walk_finds_the_stand_ins():
  assert {"", "version", "configs.types", "configs.pyconfig"} <= {*shared_modules()}


def is_stand_in(ours):
  return hasattr(ours, "release")


def defined_names(module):
  """What a module itself defines: its classes, functions and constants, not the modules and names that it imports."""
  return {
    key
    for key, value in vars(module).items()
    if not inspect.ismodule(value) and getattr(value, "__module__", module.__name__) == module.__name__
  }


@pytest.mark.parametrize("name", shared_modules(), ids=lambda name: name or "maxtext")
def test_every_public_name_of_the_release_is_kept(name):
  release, ours = import_below("maxtext._release", name), import_below("maxtext", name)
  assert Path(ours.__file__).is_relative_to(OURS) and not Path(ours.__file__).is_relative_to(RELEASED)
  names = {*vars(release)} if is_stand_in(ours) else defined_names(release)
  names |= {*getattr(release, "__all__", [])}
  assert sorted(key for key in names if not key.startswith("_") and not hasattr(ours, key)) == []


@pytest.mark.parametrize("name", shared_modules(), ids=lambda name: name or "maxtext")
def test_a_stand_in_keeps_private_names(name):
  """Released code imports private names from other modules, so a stand-in must have them too."""
  release, ours = import_below("maxtext._release", name), import_below("maxtext", name)
  if is_stand_in(ours):
    assert ours.release is release
    assert sorted(key for key in vars(release) if not key.startswith("__") and not hasattr(ours, key)) == []


def test_every_package_of_ours_has_a_face_that_reaches_the_release():
  for folder in sorted({file.parent for file in OURS.rglob("*.py")}):
    inner = folder.relative_to(OURS)
    if inner.parts[:1] == ("_release",) or inner == Path(""):
      continue
    assert (folder / "__init__.py").is_file(), f"{inner} needs an __init__.py"
    if (RELEASED / inner).is_dir():
      package = importlib.import_module(".".join(("maxtext", *inner.parts)))
      assert list(package.__path__) == [str(folder), str(RELEASED / inner)]


def test_a_module_that_only_the_release_has_keeps_its_name():
  module = importlib.import_module("maxtext.utils.max_logging")
  assert module.__name__ == "maxtext.utils.max_logging" and Path(module.__file__).is_relative_to(RELEASED)


def test_top_level_names():
  assert maxtext.__version__.startswith("0.2.5+megatron.")
  assert set(dir(maxtext)) == set(maxtext.__all__) >= {"pyconfig", "MaxTextConfig", "Transformer", "from_pretrained"}
  assert maxtext.MaxTextConfig.__module__ == "maxtext.configs.types"
  assert maxtext.pyconfig is importlib.import_module("maxtext.configs.pyconfig")
  with pytest.raises(AttributeError, match="module 'maxtext' has no attribute 'nonsense'"):
    _ = maxtext.nonsense


def test_the_console_scripts_of_the_release_and_our_own_are_there():
  scripts = {script.name: script for script in distribution("maxtext").entry_points if script.group == "console_scripts"}
  assert len(scripts) == 7 and "mmap-index" in scripts and all(callable(script.load()) for script in scripts.values())


def test_import_is_light(monkeypatch):
  monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
  done = run_python(
    "import os, sys, time; start = time.perf_counter(); import maxtext; took = time.perf_counter() - start;"
    "print(sorted({'jax', 'numpy', 'pydantic', 'omegaconf'} & {*sys.modules}), os.environ['TF_CPP_MIN_LOG_LEVEL'], took)"
  )
  assert done.returncode == 0, done.stderr
  loaded, level, took = done.stdout.rsplit(maxsplit=2)
  assert (loaded, level) == ("[]", "0")
  assert float(took) < 1  # about 3 ms; the bound only says that nothing heavy comes along


def test_a_source_tree_without_the_release_says_how_to_install(tmp_path):
  (tmp_path / "maxtext").mkdir()
  shutil.copy(OURS / "__init__.py", tmp_path / "maxtext")
  done = run_python("import maxtext", PYTHONPATH=str(tmp_path))
  assert done.returncode == 1
  last = done.stderr.strip().splitlines()[-1]
  assert last.startswith("ImportError: ") and "_release" in last and "pip install -e ." in last


def parent_of(pid):
  return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_clean_up_leaves_the_orphans_of_others_alone():
  from maxtext.input_pipeline import multihost_dataloading

  # A process whose parent ends at once, with a command line as a worker of another job would have.
  orphan = "import time; time.sleep(60)"
  starter = (
    "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1], 'multiprocessing.spawn'],"
    "stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL); print(p.pid)"
  )
  pid = int(subprocess.run([sys.executable, "-c", starter, orphan], capture_output=True, check=True, timeout=60).stdout)
  try:
    multihost_dataloading.cleanup_all_iterators()
    multihost_dataloading.release._cleanup_orphaned_multiprocessing_processes()
    time.sleep(0.2)
    assert "multiprocessing.spawn" in Path(f"/proc/{pid}/cmdline").read_text(), "the process was ended"
    if parent_of(pid) != 1:
      pytest.skip("orphans do not go to process 1 here, so the release would not have ended it either")
  finally:
    os.kill(pid, signal.SIGKILL)
