# SPDX-License-Identifier: Apache-2.0
"""Loads our NumPy-only modules in the reference environment, where `maxtext` and JAX are not installed.

Run there: `pytest tests/reference -o python_files='*_reference.py'`. The pattern keeps these files out of a plain run.
"""

import importlib
from pathlib import Path
import sys
import types

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
sys.path.insert(0, str(Path(__file__).resolve().parent))  # the scripts here import one another


def _load_module(name: str) -> types.ModuleType:
  """Imports `maxtext.<package>.<module>` under its full name without running any package's `__init__`.

  Each parent becomes an empty package that knows its folder, so that our modules' own imports of one another work too.

  Args:
    name: dotted name, or the bare name of a module of `maxtext.input_pipeline`.
  """
  full = name if name.startswith("maxtext.") else f"maxtext.input_pipeline.{name}"
  parents = full.split(".")[:-1]
  for depth in range(1, len(parents) + 1):
    package = ".".join(parents[:depth])
    if package not in sys.modules:
      stub = types.ModuleType(package)
      stub.__path__ = [str(SOURCE.joinpath(*parents[:depth]))]
      sys.modules[package] = stub
  return importlib.import_module(full)


@pytest.fixture(scope="session")
def load_module():
  """The function `load_module(name)`; see `_load_module`."""
  return _load_module


@pytest.fixture(scope="session")
def golden():
  """The script that writes the golden file of single datasets; it also knows how to make megatron-core's datasets."""
  return importlib.import_module("write_golden")


@pytest.fixture(scope="session")
def blend_golden():
  """The script that writes the golden file of blends."""
  return importlib.import_module("write_blend_golden")
