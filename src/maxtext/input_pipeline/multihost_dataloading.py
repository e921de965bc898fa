# SPDX-License-Identifier: Apache-2.0
"""Stand-in: iterators can refuse a batch, and their clean-up no longer ends processes that are not the run's own.

The release scans the machine for `multiprocessing` processes whose parent is process 1 and kills them, whoever started
them: in a container or on a shared host these are workers of other jobs. And iterators of Megatron data end their own
workers when they are closed.
"""

from collections.abc import Callable
import functools
import inspect
from typing import TYPE_CHECKING, Any

from maxtext._release.input_pipeline import multihost_dataloading as release
from maxtext.input_pipeline._mmap_files import MMapError
from maxtext.input_pipeline._mmap_iterator import GlobalOrderDataset, GlobalOrderIterator

if TYPE_CHECKING:
  from maxtext._release.input_pipeline.multihost_dataloading import *  # noqa: F403

globals().update({k: v for k, v in vars(release).items() if not k.startswith("__")})


class MultiHostDataLoadIterator(release.MultiHostDataLoadIterator):
  """The release's iterator, which may refuse a batch.

  Attributes:
    check: called with each batch of this host, NumPy arrays, before a step gets it; raises MMapError to refuse it.
  """

  check: Callable[[Any], None] | None = None

  def _get_next_batch_sharded(self):
    batch = super()._get_next_batch_sharded()
    if self.check is not None and not self.out_of_data:  # after the data's end there is only padding
      try:
        self.check(self.last_local_data)
      except MMapError:
        if isinstance(self.local_iterator, GlobalOrderIterator):
          self.local_iterator.put_back()
        raise
    return batch


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
