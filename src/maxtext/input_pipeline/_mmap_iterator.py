# SPDX-License-Identifier: Apache-2.0
"""An iterator over one global order of samples, whose state does not depend on hosts, workers or threads."""

from __future__ import annotations

import multiprocessing
from multiprocessing import resource_tracker
import os
import threading
from typing import Any, Protocol

import grain.python as grain
import numpy as np

from maxtext.input_pipeline._mmap_indexed_dataset import MMapError
from maxtext.input_pipeline._mmap_order import STATE_FORMAT, check_state


def _end_with_parent(worker_index: int, worker_count: int) -> None:
  """Ends a worker process when the training process dies: nobody else would."""
  del worker_index, worker_count
  parent = multiprocessing.parent_process()
  if parent is not None:
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _start_quiet_tracker() -> None:
  """Starts Python's resource tracker, a process, without its warnings: those about a killed worker would come last."""
  before = os.environ.get("PYTHONWARNINGS")
  os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"
  try:
    resource_tracker.ensure_running()
  finally:
    if before is None:
      del os.environ["PYTHONWARNINGS"]
    else:
      os.environ["PYTHONWARNINGS"] = before


class Rows(Protocol):
  """Random access to the samples of a global order, several at a time. Goes to worker processes, so it can be pickled."""

  def __len__(self) -> int:
    """Samples of the order."""
    ...

  def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the fields of some samples, each [len(indices), length]."""
    ...


class _HostBatches(grain.RandomAccessDataSource):
  """The batches of one host as a Grain source; element b is a dict of arrays [host batch, length]."""

  def __init__(self, rows: Rows, first: int, global_batch_size: int, offsets: np.ndarray):
    self._rows, self._first, self._global_batch_size = rows, first, global_batch_size
    self._kept, self._places = offsets[offsets >= 0], None
    if len(self._kept) < len(offsets):  # what stands in a row that is cut does not matter: the first sample there is
      self._places = np.where(offsets >= 0, np.cumsum(offsets >= 0) - 1, 0)
      self._kept = self._kept if len(self._kept) else np.zeros(1, np.int64)

  def __len__(self) -> int:
    return max(len(self._rows) - self._first, 0) // self._global_batch_size

  def __getitem__(self, index) -> dict[str, np.ndarray]:
    fields = self._rows.rows(self._first + int(index) * self._global_batch_size + self._kept)
    return fields if self._places is None else {field: values[self._places] for field, values in fields.items()}


class GlobalOrderDataset(grain.IterDataset):
  """Batches of one host, drawn from a global order.

  Step s of all hosts together reads samples s * B to (s + 1) * B - 1, B being the global batch size; host h of H
  takes h, h + H, h + 2 H, ... of them. Workers and threads load whole batches ahead and never change their order.

  Args:
    rows: the samples of the global order.
    global_batch_size: samples of one step over all hosts, divisible by `shard_count`.
    shard_index, shard_count: this host, and hosts in all.
    order: JSON-able, what decides the order; kept in the state. See `_mmap_stream.describe_order`.
    workers: processes that load batches, 0 to load in threads of this process.
    worker_buffer: batches that each worker keeps ready for this process.
    buffered: batches that the threads of a process read ahead.
    threads: that read within a process.
    start: sample of the global order to begin at.
    keep_last: keep the last batch, see `GlobalOrderIterator.last_batch`.
    offsets: integers [rows of this host], which sample of the step each row is, counted from the step's first; -1 for a
      row that the step cuts off. None: as above.
  """

  def __init__(
      self,
      rows: Rows,
      global_batch_size: int,
      shard_index: int,
      shard_count: int,
      order: dict[str, Any],
      workers: int = 0,
      worker_buffer: int = 1,
      buffered: int = 1,
      threads: int = 1,
      start: int = 0,
      keep_last: bool = False,
      offsets: np.ndarray | None = None,
  ):
    super().__init__()
    if offsets is None:
      if global_batch_size % shard_count:
        raise MMapError(
            f"the global batch of {global_batch_size} samples cannot be divided among {shard_count} hosts; change "
            "per_device_batch_size."
        )
      offsets = np.arange(shard_index, global_batch_size, shard_count)
    self.offsets = offsets
    self.rows, self.global_batch_size = rows, global_batch_size
    self.order = order
    self.workers, self.worker_buffer = workers, max(worker_buffer, 1)
    self.buffered, self.threads = max(buffered, 1), max(threads, 1)
    self.start, self.keep_last = start, keep_last

  def batches(self, sample: int) -> grain.MapDataset:
    """Returns this host's batches from a sample of the global order on."""
    source = _HostBatches(self.rows, sample, self.global_batch_size, self.offsets)
    return grain.MapDataset.source(source)

  def batches_from(self, sample: int) -> grain.DatasetIterator:
    """Starts reading at a sample of the global order."""
    dataset = self.batches(sample).to_iter_dataset(
        grain.ReadOptions(num_threads=min(self.threads, self.buffered), prefetch_buffer_size=self.buffered)
    )
    if self.workers:
      _start_quiet_tracker()
      options = grain.MultiprocessingOptions(num_workers=self.workers, per_worker_buffer_size=self.worker_buffer)
      dataset = dataset.mp_prefetch(options, worker_init_fn=_end_with_parent)
    return iter(dataset)

  def __iter__(self) -> GlobalOrderIterator:
    return GlobalOrderIterator(self)


class GlobalOrderIterator(grain.DatasetIterator):
  """Iterator of a `GlobalOrderDataset`. Its state is the next sample of the global order, and the order itself.

  Attributes:
    last_batch: with `keep_last`, the batch that was given last, NumPy arrays of this host's rows; else None.
    last_first_sample: position in the global order of the first sample of that step, of all hosts.
  """

  def __init__(self, dataset: GlobalOrderDataset):
    super().__init__()
    self._dataset = dataset
    self._next_sample = dataset.start
    self._batches: grain.DatasetIterator | None = None
    self.last_batch: dict[str, np.ndarray] | None = None
    self.last_first_sample = -1

  def __next__(self):
    if self._next_sample + self._dataset.global_batch_size > len(self._dataset.rows):
      raise StopIteration
    if self._batches is None:
      self._batches = self._dataset.batches_from(self._next_sample)
    batch = next(self._batches)
    if self._dataset.workers:  # out of shared memory, which would outlive a batch that is held at the end of the process
      batch = {field: np.array(values) for field, values in batch.items()}
    if self._dataset.keep_last:
      self.last_batch, self.last_first_sample = batch, self._next_sample
    self._next_sample += self._dataset.global_batch_size
    return batch

  def put_back(self) -> None:
    """Goes back to before the batch that was given last: no step used it, and a checkpoint must not skip it."""
    self.close()
    self._next_sample -= self._dataset.global_batch_size

  @property
  def order(self) -> dict[str, Any]:
    """What decides the order, see `_mmap_stream.describe_order`."""
    return self._dataset.order

  @property
  def next_sample(self) -> int:
    """The sample of the global order that the next batch begins with."""
    return self._next_sample

  @property
  def global_batch_size(self) -> int:
    return self._dataset.global_batch_size

  @property
  def offsets(self) -> np.ndarray:
    """Which sample of a step each row of this host is, see `GlobalOrderDataset`."""
    return self._dataset.offsets

  @property
  def available_samples(self) -> int:
    """Samples of the global order."""
    return len(self._dataset.rows)

  def get_state(self) -> dict[str, Any]:
    return {"format": STATE_FORMAT, "next_sample": self._next_sample, "order": self._dataset.order}

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes to a saved position.

    Raises:
      MMapError: if the state is not of this iterator or of another order.
    """
    check_state(state, self._dataset.order)
    self.close()
    self._next_sample = state["next_sample"]

  def close(self) -> None:
    if self._batches is not None:
      self._batches.close()
      self._batches = None
