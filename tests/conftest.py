# SPDX-License-Identifier: Apache-2.0
"""All tests run on the CPU; set before anything imports JAX, and inherited by the processes that tests start."""

import gc
import os

from hypothesis import settings
import pytest

os.environ["JAX_PLATFORMS"] = "cpu"

# HYPOTHESIS_PROFILE=long looks longer for counterexamples. Tests with settings of their own keep them.
settings.register_profile("short", deadline=None, max_examples=60)
settings.register_profile("long", deadline=None, max_examples=3000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))


@pytest.fixture
def forget_truncated_files():
  """What a test has truncated under a mapping must not be told in the next one."""
  from maxtext.input_pipeline import _mmap_guard  # here, since tests/reference runs without `maxtext`

  yield
  while True:
    try:
      _mmap_guard.check()
      return
    except OSError:
      gc.collect()
      faulted = _mmap_guard._guard._table[: _mmap_guard._guard.words[_mmap_guard._ROWS], _mmap_guard._FAULTED]
      assert not faulted.any(), "a truncated file is still mapped"
