# SPDX-License-Identifier: Apache-2.0
"""Training on Megatron data: a failure of the data ends the run with one sentence and a non-zero exit code.

The stand-in `train.py` puts it into the release's trainer. The release logs a failure of the data iterator as "Training
stopped" and exits 0, without a last checkpoint. Here, a failure in the loop saves the last whole step (with one process
and checkpoints on) and is raised again; and the sentence of an MMapError is the last line on stderr, in place of a stack
trace. With `log_batch_digest`, each step also logs a digest of its global batch. Other runs are the release's, but that a
batch with too many segments for Kimi Delta Attention's kernels ends any run so.
"""

import functools
import inspect
import sys
import traceback

import jax
from jax.experimental import multihost_utils
import numpy as np

from maxtext._release.trainers.pre_train import train as release
from maxtext.input_pipeline import _mmap_config as mmap_config
from maxtext.input_pipeline import _mmap_digest as mmap_digest
from maxtext.input_pipeline import multihost_dataloading
from maxtext.input_pipeline._kda_segments_check import KdaSegmentsError
from maxtext.input_pipeline._mmap_indexed_dataset import MMapError
from maxtext.input_pipeline._mmap_iterator import GlobalOrderIterator
from maxtext.utils import exceptions, max_logging

_released_iteration = inspect.unwrap(release.training_loop_iteration)


class DataFailureError(MMapError):
  """The data of a step could not be loaded; the message is one sentence."""


@functools.wraps(_released_iteration)
def training_loop_iteration(jax_device_state, python_vars, immutable_data):
  """One step of the release's loop; raises DataFailureError where the release would stop quietly."""
  evaluation = _hold_failures(python_vars, immutable_data["config"])
  try:
    metrics = _released_iteration(jax_device_state, python_vars, immutable_data)
  except exceptions.StopTraining as stop:
    config, step = immutable_data["config"], python_vars["step"]
    cause = stop.__context__
    megatron = mmap_config.uses_megatron_data(config)
    if cause is None or not (megatron or isinstance(cause, KdaSegmentsError)):
      raise
    saved = ""
    if megatron and step > immutable_data["start_step"]:  # other data's position is behind the failed batch
      saved = _save_last_step(jax_device_state["state"], python_vars, config, step - 1)
    raise DataFailureError(f"Training ended at step {step}: {_sentence(cause)}{saved}") from cause
  if evaluation is not None and evaluation.failure is not None:
    config, step, cause = immutable_data["config"], python_vars["step"], evaluation.failure
    saved = _save_last_step(jax_device_state["state"], python_vars, config, step)
    raise DataFailureError(f"Training ended in the evaluation after step {step}: {_sentence(cause)}{saved}") from cause
  if immutable_data["config"].log_batch_digest:
    _log_batch_digest(python_vars["step"], immutable_data["config"], python_vars["data_iterator"])
  return metrics


def _log_batch_digest(step: int, config, data_iterator) -> None:
  """Logs the digest of the global batch that a step has read; every process takes part, the first one logs."""
  iterator = getattr(data_iterator, "local_iterator", None)
  if isinstance(iterator, GlobalOrderIterator):
    if iterator.last_batch is None:
      return
    offsets, first = iterator.offsets, iterator.last_first_sample
    digests = mmap_digest.row_digests(mmap_digest.raw_tokens(iterator.last_batch))
  else:  # a host whose rows are all cut loads no data
    offsets, first = np.full(config.global_batch_size_to_load // jax.process_count(), -1), -1
    digests = np.zeros(len(offsets), np.uint64)
  digests, first = _gather_rows(digests, offsets, first)
  if jax.process_index() == 0:
    max_logging.log(mmap_digest.line(step, mmap_digest.combine(digests), first, len(digests)))


def _gather_rows(digests: np.ndarray, offsets: np.ndarray, first: int) -> tuple[np.ndarray, int]:
  """Returns the digests of the rows that all hosts use, uint64[rows] in global order, and the step's first sample."""
  if jax.process_count() > 1:
    halves = digests.view(np.uint32).reshape(-1, 2)  # JAX would cut 64 bits to 32
    first_halves = np.array([first], np.int64).view(np.uint32)
    mine = {"halves": halves, "offsets": offsets.astype(np.int32), "first": first_halves}
    everyones = multihost_utils.process_allgather(mine)
    digests = np.ascontiguousarray(everyones["halves"]).view(np.uint64).reshape(-1)
    offsets = np.asarray(everyones["offsets"]).reshape(-1)
    first = int(np.ascontiguousarray(everyones["first"]).view(np.int64).max())
  return mmap_digest.in_order(digests, offsets), first


class _HeldFailure:
  """An evaluation iterator that ends where it would fail, and keeps the failure.

  The release evaluates inside its iteration, which has the new state to itself until it returns.
  """

  def __init__(self, iterator):
    self._iterator = iterator
    self.failure: Exception | None = None

  def reset(self) -> None:
    self._iterator.reset()

  def __iter__(self):
    iter(self._iterator)
    return self

  def __next__(self):
    try:
      return next(self._iterator)
    except StopIteration:
      raise
    except Exception as error:
      self.failure = error
      raise StopIteration from error


def _hold_failures(python_vars, config) -> _HeldFailure | None:
  """Puts a `_HeldFailure` around the evaluation iterator of a run on Megatron data, once."""
  iterator = python_vars["eval_data_iterator"]
  if iterator is None or not mmap_config.uses_megatron_data(config):
    return None
  if not isinstance(iterator, _HeldFailure):
    iterator = python_vars["eval_data_iterator"] = _HeldFailure(iterator)
  return iterator


def _save_last_step(state, python_vars, config, step: int) -> str:
  """Saves the state after a step, unless it is saved already; returns what to tell the user.

  Not with several processes: the others may stand in a collective already.
  """
  manager = python_vars["checkpoint_manager"]
  if manager is None or jax.process_count() > 1:
    return ""
  checkpointing = release.checkpointing
  checkpointing.wait_until_finished(manager)
  if checkpointing.latest_step(manager) != step:
    checkpointing.save_checkpoint(manager, step, state, config, python_vars["data_iterator"], force=True)
  checkpointing.wait_until_finished(manager)
  return f" Step {step} is saved; a restart continues after it."


def _sentence(error: BaseException) -> str:
  """The message of an error of ours, wherever a worker process or Grain wrapped it; else what is known of it."""
  seen: BaseException | None = error
  while seen is not None:
    if isinstance(seen, MMapError):
      return str(seen)
    seen = seen.__cause__ or seen.__context__
  if isinstance(error, StopIteration):
    return "the data iterator has no more samples; lower steps, or raise mmap_npy_num_samples (for mmap: num_epoch)."
  text = " ".join(str(error).split())
  if "Worker process was terminated" in text:
    return f"a data worker process died ({text}); look for the cause above (memory is the usual one) and start again."
  return f"{type(error).__name__}: {text}"


def main(argv) -> None:
  """The release's main, with an MMapError reported as one sentence and exit code 1."""
  try:
    release.main(argv)
  except MMapError as error:
    if isinstance(error, DataFailureError) and error.__cause__ is not None and not isinstance(error.__cause__, MMapError):
      max_logging.log("".join(traceback.format_exception(error.__cause__)))
    multihost_dataloading.cleanup_all_iterators()  # workers that end later would write below the sentence
    sys.stdout.flush()
    print(error, file=sys.stderr, flush=True)
    sys.exit(1)


release.training_loop_iteration = training_loop_iteration
