# SPDX-License-Identifier: Apache-2.0
"""An iterator over one global order of samples, whose state does not depend on hosts, workers or threads."""

from __future__ import annotations

import multiprocessing
from multiprocessing import resource_tracker
import os
import threading
from typing import Any

import grain.python as grain
import numpy as np

from maxtext.input_pipeline._mmap_indexed_dataset import MMapError

STATE_FORMAT = 1


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


class GlobalOrderDataset(grain.IterDataset):
  """Batches of one host, drawn from a global order.

  Step s of all hosts together reads samples s * B to (s + 1) * B - 1, B being the global batch size; host h of H
  takes h, h + H, h + 2 H, ... of them. Workers and threads load whole batches ahead and never change their order.

  Args:
    samples: random access to the global order; element i is a dict of arrays.
    global_batch_size: samples of one step over all hosts, divisible by `shard_count`.
    shard_index, shard_count: this host, and hosts in all.
    order: JSON-able, what decides the order; kept in the state. See `describe_order`.
    workers: processes that load batches, 0 to load in threads of this process.
    worker_buffer: batches that each worker keeps ready for this process.
    buffered: batches that the threads of a process read ahead.
    threads: that read within a process.
  """

  def __init__(
      self,
      samples: grain.MapDataset,
      global_batch_size: int,
      shard_index: int,
      shard_count: int,
      order: dict[str, Any],
      workers: int = 0,
      worker_buffer: int = 1,
      buffered: int = 1,
      threads: int = 1,
  ):
    super().__init__()
    if global_batch_size % shard_count:
      raise MMapError(
          f"the global batch of {global_batch_size} samples cannot be divided among {shard_count} hosts; change "
          "per_device_batch_size."
      )
    self.samples, self.global_batch_size = samples, global_batch_size
    self.shard_index, self.shard_count, self.order = shard_index, shard_count, order
    self.workers, self.worker_buffer = workers, max(worker_buffer, 1)
    self.buffered, self.threads = max(buffered, 1), max(threads, 1)

  def batches_from(self, sample: int) -> grain.DatasetIterator:
    """Starts reading at a sample of the global order."""
    part = self.samples[sample + self.shard_index :: self.shard_count]
    batches = part.batch(self.global_batch_size // self.shard_count, drop_remainder=True)
    dataset = batches.to_iter_dataset(
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
  """Iterator of a `GlobalOrderDataset`. Its state is the next sample of the global order, and the order itself."""

  def __init__(self, dataset: GlobalOrderDataset):
    super().__init__()
    self._dataset = dataset
    self._next_sample = 0
    self._batches: grain.DatasetIterator | None = None

  def __next__(self):
    if self._next_sample + self._dataset.global_batch_size > len(self._dataset.samples):
      raise StopIteration
    if self._batches is None:
      self._batches = self._dataset.batches_from(self._next_sample)
    batch = next(self._batches)
    if self._dataset.workers:  # out of shared memory, which would outlive a batch that is held at the end of the process
      batch = {field: np.array(values) for field, values in batch.items()}
    self._next_sample += self._dataset.global_batch_size
    return batch

  @property
  def order(self) -> dict[str, Any]:
    """What decides the order, see `describe_order`."""
    return self._dataset.order

  @property
  def global_batch_size(self) -> int:
    return self._dataset.global_batch_size

  @property
  def available_samples(self) -> int:
    """Samples of the global order."""
    return len(self._dataset.samples)

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


def describe_order(description, request, needed: int) -> dict[str, Any]:
  """Returns what a checkpoint says of the order.

  Args:
    description: IndexDescription of the order: all that decides it goes into the state.
    request: IndexRequest that led to it; its number of samples is kept, since users know the order by it.
    needed: samples that the run reads.
  """
  return {
      **description.built_from,
      "requested_samples": request.num_samples,
      "available_samples": description.plan.samples,
      "needed_samples": needed,
  }


_ADVICE = {
    "datasets": "read the dataset that the saved run read",
    "sequences": "set mmap_npy_split as in the saved run",
    "sequence_length": "set max_target_length as in the saved run",
    "seed": "set data_shuffle_seed as in the saved run",
}


_NOUNS = {
    "datasets": "its dataset is",
    "sequences": "it reads sequences",
    "sequence_length": "the sequence length is",
    "seed": "the seed is",
}


def check_state(state: Any, order: dict[str, Any]) -> None:
  """Raises MMapError unless a saved iterator state continues in this order."""
  saved, position = (state.get("order"), state.get("next_sample")) if isinstance(state, dict) else (None, None)
  whole = isinstance(saved, dict) and type(position) is int and position >= 0  # True is an int too
  if not whole or state.get("format") != STATE_FORMAT:
    raise MMapError(
        "the checkpoint's data iterator state was not saved by grain_file_type=mmap_npy of this version, so its position "
        "cannot be continued; start a new run_name (load_parameters_path keeps the weights)."
    )
  # Not the split's text: equal ranges of sequences are equal orders.
  ignored = {"split", "split_index", "requested_samples", "available_samples", "needed_samples"}
  differing = [key for key in order if key not in ignored and saved.get(key) != order[key]]
  if not differing:
    return
  for key, advice in _ADVICE.items():
    if key in differing:
      raise MMapError(
          f"the checkpoint was saved with another order of samples: {_NOUNS[key]} {_short(saved.get(key))} there and "
          f"{_short(order[key])} here; {advice}, or start a new run_name."
      )
  asked, available, needed = saved.get("requested_samples"), saved.get("available_samples") or 0, order["needed_samples"]
  if available >= needed:
    advice = f"set mmap_npy_num_samples={asked} to continue"
  else:
    advice = f"its order has {available} samples and this run needs {needed}, so lower steps to continue"
  raise MMapError(
      f"the checkpoint was saved by a run that asked for {asked} samples ({_epochs(saved)}) and this run asks for "
      f"{order['requested_samples']} ({_epochs(order)}), which is another order; {advice}, or start a new run_name."
  )


def _short(value: Any) -> str:
  """Says a value of an order; datasets by size and the beginning of their checksum."""
  if isinstance(value, list) and value and all(isinstance(part, dict) and "digest" in part for part in value):
    parts = ((part.get("sequences"), part.get("tokens"), str(part["digest"])[:8]) for part in value)
    return ", ".join(f"{sequences} sequences, {tokens} tokens, {digest}" for sequences, tokens, digest in parts)
  return f"{value[0]} to {value[1]}" if isinstance(value, list) and len(value) == 2 else str(value)


def _epochs(order: dict[str, Any]) -> str:
  apart = ", the last shuffled apart" if order.get("separate_last_epoch") else ""
  return f"{order.get('num_epochs')} epoch{'s' if order.get('num_epochs') != 1 else ''}{apart}"
