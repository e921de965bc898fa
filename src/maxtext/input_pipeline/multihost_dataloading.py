# SPDX-License-Identifier: Apache-2.0
"""Stand-in: the release's clean-up of iterators no longer ends processes that are not its own.

The release scans the machine for `multiprocessing` processes whose parent is process 1 and kills them, whoever started
them: in a container or on a shared host these are workers of other jobs. And iterators of Megatron data end their own
workers when they are closed.
"""

import functools
import inspect
from typing import TYPE_CHECKING

from maxtext._release.input_pipeline import multihost_dataloading as release
from maxtext.input_pipeline._mmap_iterator import GlobalOrderDataset, GlobalOrderIterator

if TYPE_CHECKING:
  from maxtext._release.input_pipeline.multihost_dataloading import *  # noqa: F403

globals().update({k: v for k, v in vars(release).items() if not k.startswith("__")})


def _cleanup_orphaned_multiprocessing_processes():
  """Does nothing: our own workers end with their iterator, or with this process, and no other process is ours to end."""


_released_terminate = inspect.unwrap(release._terminate_iterator_workers)


@functools.wraps(_released_terminate)
def _terminate_iterator_workers(obj):
  """The release's search for workers in private attributes, which asserts in an iterator without a Grain parent."""
  if not isinstance(obj, (GlobalOrderDataset, GlobalOrderIterator)):
    _released_terminate(obj)


# The release's iterators and cleanup_all_iterators call them by these names.
release._cleanup_orphaned_multiprocessing_processes = _cleanup_orphaned_multiprocessing_processes
release._terminate_iterator_workers = _terminate_iterator_workers
