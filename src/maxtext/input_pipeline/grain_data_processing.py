# SPDX-License-Identifier: Apache-2.0
"""Stand-in: `mmap_npy` and `mmap` get a pipeline of their own, of one global order whatever the hosts and workers.

Every other file type is the release's.
"""

from typing import TYPE_CHECKING

import grain.python as grain
import jax
from jax.experimental import multihost_utils
import numpy as np

from maxtext._release.input_pipeline import grain_data_processing as release
from maxtext.input_pipeline import _mmap_config as mmap_config
from maxtext.input_pipeline import _mmap_index_cache as mmap_cache
from maxtext.input_pipeline import _mmap_remote as mmap_remote
from maxtext.input_pipeline import _mmap_stream as mmap_stream
from maxtext.input_pipeline import _mmap_window_rows as mmap_window_rows
from maxtext.input_pipeline import input_pipeline_utils, multihost_dataloading
from maxtext.input_pipeline._mmap_fields import MegatronRows
from maxtext.input_pipeline._mmap_files import MMapError
from maxtext.input_pipeline._mmap_iterator import GlobalOrderDataset
from maxtext.utils import max_logging

if TYPE_CHECKING:
  from maxtext._release.input_pipeline.grain_data_processing import *  # noqa: F403

globals().update({k: v for k, v in vars(release).items() if not k.startswith("__")})


def make_grain_train_iterator(config, global_mesh, process_indices):
  """Makes the training iterator of this host; see the release for other file types."""
  if config.grain_file_type not in mmap_config.FILE_TYPES:
    return release.make_grain_train_iterator(config, global_mesh, process_indices)
  _log_semantics(config)
  rows, order = _rows(config, evaluation=False)
  dataset = _global_order(config, global_mesh, process_indices, rows, order, False)
  return multihost_dataloading.MultiHostDataLoadIterator(dataset, global_mesh, config.generate_padding_batch_train)


def make_grain_eval_iterator(config, global_mesh, process_indices):
  """Makes the evaluation iterator of this host; every evaluation reads the same samples from the first on."""
  if config.grain_file_type not in mmap_config.FILE_TYPES:
    return release.make_grain_eval_iterator(config, global_mesh, process_indices)
  rows, order = _rows(config, evaluation=True)
  dataset = _global_order(config, global_mesh, process_indices, rows, order, True)
  return multihost_dataloading.MultiHostDataLoadIterator(dataset, global_mesh, config.generate_padding_batch_eval)


def _rows(config, evaluation: bool):
  """Opens the data of a run and says what it is; returns the samples of the global order, and what decides it."""
  mmap_remote.configure(config.mmap_remote_cache_dir)
  if config.grain_file_type == "mmap":
    windows = mmap_window_rows.make_mmap_rows(config, evaluation)
    return windows.rows, windows.order
  stream = mmap_stream.open_stream(mmap_stream.settings_for(config, evaluation))
  _log_stream(stream)
  return megatron_rows(stream.source, config), stream.order


def megatron_rows(source, config) -> MegatronRows:
  """Returns the model's fields of the samples of a source, as the config's keys say."""
  split = input_pipeline_utils.MegatronSplitInputsTargets(
      eod_id=config.mmap_eod_id,
      reset_attention_mask=config.reset_attention_mask,
      eod_mask_loss=config.eod_mask_loss,
      min_segment_length=input_pipeline_utils.megatron_min_segment_length(config),
  )
  return MegatronRows(source, split, config.vocab_size)


def _global_order(config, mesh, process_indices, rows, order, evaluation: bool) -> GlobalOrderDataset:
  """Lays out the samples of a global order for this host."""
  _check_hosts_agree(order, "grain_eval_files" if evaluation else "grain_train_files", len(process_indices))
  used, loaded = config.global_batch_size_to_train_on, config.global_batch_size_to_load
  suffix, start = "", config.mmap_npy_start_sample
  if evaluation:
    used, loaded = config.global_batch_size_to_eval_on, config.global_batch_size_to_load_eval
    suffix, start = "_eval", 0
  names = ("worker_count", "per_worker_buffer_size", "prefetch_buffer_size", "num_threads")
  workers, worker_buffer, ahead, threads = (getattr(config, f"grain_{name}{suffix}") for name in names)
  host_batch = max(used // len(process_indices), 1)
  dataset = GlobalOrderDataset(
      rows,
      used,
      process_indices.index(jax.process_index()),
      len(process_indices),
      order,
      max(workers, 0),
      worker_buffer,
      max(ahead // host_batch, 2),
      threads,
      start,
      config.log_batch_digest,
      kept_rows(mesh, loaded, used) if used != loaded else None,
  )
  if workers < 0:
    dataset.workers = _chosen_workers(config, dataset.batches(start))
  return dataset


def kept_rows(mesh, loaded: int, used: int) -> np.ndarray:
  """Says which rows of this host's batch a step uses, where per_device_batch_size is below 1.

  MaxText then loads a row for each device (and accumulation step), and its step keeps the first rows of the global batch.

  Args:
    mesh: of all devices; their order in it is that of the rows.
    loaded: rows of the global batch.
    used: rows that the step keeps.

  Returns:
    For each row of this host its place in the global batch, or -1 if it is cut, int64[rows of this host].
  """
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names))
  places = sharding.devices_indices_map((loaded,))
  rows = np.concatenate([np.arange(loaded)[places[device]] for device in mesh.local_devices])
  return np.where(rows < used, rows, -1)


def _check_hosts_agree(order, key: str, hosts: int) -> None:
  """Raises MMapError on every host unless all read one order: one may have an older copy of the data on its own disk."""
  if hosts == 1 or hosts != jax.process_count():
    return
  digest = np.frombuffer(bytes.fromhex(mmap_cache.digest_of_json(order)), np.uint32)
  of_hosts = np.asarray(multihost_utils.process_allgather(digest)).reshape(hosts, -1)
  others = np.flatnonzero((of_hosts != of_hosts[0]).any(axis=1)).tolist()
  if others:
    raise MMapError(
        f"{key}: the data or the order of process {_some(list(map(str, others)))} is not that of process 0; give all "
        "hosts the same datasets and the same config (the line of each dataset in their logs shows the difference)."
    )


def _chosen_workers(config, batches: grain.MapDataset) -> int:
  """Returns the number of worker processes that Grain chooses for this machine."""
  options = grain.experimental.pick_performance_config(
      ds=batches.to_iter_dataset(), ram_budget_mb=config.grain_ram_budget_mb, max_workers=None, max_buffer_size=None
  ).multiprocessing_options
  return options.num_workers if options else 0


def _log_stream(stream) -> None:
  """Says what is read and in which order: a line for each dataset, and one for the blend."""
  settings = stream.settings
  for child in stream.children:
    index, name = child.index, settings.key
    if stream.blend is not None:
      name += f" [{child.number}]" + ("" if child.weight is None else f" of weight {child.weight}")
    max_logging.log(f"{name}: {_dataset_line(child, index.description)}; indices {_where(index, child.npy_dir)}.")
  if stream.blend is not None:
    pair = stream.source.pair
    where = f"{'found in' if pair.found else 'written to'} {pair.paths[0]}" if pair.paths else "drawn in memory"
    max_logging.log(
        f"{settings.key}: a blend of {len(stream.children)} datasets, {len(stream)} samples for "
        f"{settings.num_samples or 'all'} asked; {where}."
    )


def _dataset_line(child, description) -> str:
  """Says what a dataset is, which part of it is used, and in how many epochs."""
  facts, plan = description.facts, description.plan
  shards = "" if len(facts) == 1 else f" in {len(facts)} shards, in this order: {_some(child.prefixes)};"
  dtypes = ", ".join(sorted({fact["dtype"] for fact in facts}))
  return (
      f"{child.source.name} has{shards} {sum(fact['sequences'] for fact in facts)} sequences and "
      f"{sum(fact['tokens'] for fact in facts)} tokens ({dtypes}); reading sequences {description.begin} to "
      f"{description.end}, {description.tokens_per_epoch} tokens an epoch, {plan.num_epochs} epoch(s)"
      f"{', the last shuffled apart' if plan.separate_last_epoch else ''}, {plan.samples} samples of "
      f"{description.built_from['sequence_length']} tokens for {child.requested or 'all'} asked, seed "
      f"{description.built_from['seed']}"
  )


def _where(index, npy_dir: str) -> str:
  state = "found in" if index.found else "written to" if index.saved else "built in memory, not in"
  return f"{index.description.name} {state} {npy_dir}"


def _some(names, most: int = 20) -> str:
  """Lists names; of many, the first and the last."""
  if len(names) <= most:
    return ", ".join(names)
  return f"{', '.join(names[: most - 1])}, ... ({len(names) - most} more), {names[-1]}"


def _log_semantics(config) -> None:
  """Says which of Megatron's GPT semantics the keys leave out."""
  strict = {"reset_attention_mask": True, "eod_mask_loss": False, "packing_max_segments_per_sample": 0}
  if config.grain_file_type != "mmap_npy":
    return
  other = [f"{key}={getattr(config, key)} ({value})" for key, value in strict.items() if getattr(config, key) != value]
  if other:
    max_logging.log(
        "mmap_npy: tokens and order are Megatron's; segments, positions and loss masks follow keys that differ from "
        f"strict Megatron GPT semantics (in brackets): {', '.join(other)}."
    )
