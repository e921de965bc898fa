# SPDX-License-Identifier: Apache-2.0
"""Stand-in: the data position of a run on Megatron data is restored whatever number of hosts saved it.

The state is the position in one global order, equal on all hosts, so any host's file will do.
"""

import functools
import inspect
import re
from typing import TYPE_CHECKING

from maxtext._release.common import grain_utility as release
from maxtext.input_pipeline._mmap_iterator import GlobalOrderIterator

if TYPE_CHECKING:
  from maxtext._release.common.grain_utility import *  # noqa: F403

globals().update({k: v for k, v in vars(release).items() if not k.startswith("__")})

_released_for_restore = inspect.unwrap(release.for_restore)


def saved_process(folder) -> tuple[int, int] | None:
  """Returns a process and the number of processes whose iterator state is in a folder: the same on every host.

  Args:
    folder: the `iter` folder of a checkpoint, an epath.
  """
  names = (re.fullmatch(r"process_(\d+)-of-(\d+)\.json", file.name) for file in folder.glob("process_*-of-*.json"))
  return min(((int(name[1]), int(name[2])) for name in names if name), default=None)


@functools.wraps(_released_for_restore)
def for_restore(checkpoint_manager, step: int, data_iterator, expansion_factor_real_data: int):
  """Returns what Orbax restores the iterator with; see the release for other iterators."""
  iterator = getattr(data_iterator, "local_iterator", None)
  if isinstance(iterator, GlobalOrderIterator):
    saved = saved_process(checkpoint_manager.directory / str(step) / "iter")
    if saved is not None:
      return release.GrainCheckpointable(iterator, restore_process_index=saved[0], restore_process_count=saved[1])
  return _released_for_restore(checkpoint_manager, step, data_iterator, expansion_factor_real_data)


release.for_restore = for_restore
