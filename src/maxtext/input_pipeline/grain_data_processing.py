# SPDX-License-Identifier: Apache-2.0
"""Stand-in: `grain_file_type=mmap_npy` gets a pipeline of its own, in Megatron's order whatever the hosts and workers.

Every other file type is the release's.
"""

from typing import TYPE_CHECKING

import grain.python as grain
import jax

from maxtext._release.input_pipeline import grain_data_processing as release
from maxtext.input_pipeline import _mmap_config as mmap_config
from maxtext.input_pipeline import _mmap_datasource as datasource
from maxtext.input_pipeline import input_pipeline_utils, multihost_dataloading
from maxtext.input_pipeline._mmap_index_cache import IndexRequest
from maxtext.input_pipeline._mmap_indexed_dataset import MMapError
from maxtext.input_pipeline._mmap_iterator import GlobalOrderDataset, describe_order
from maxtext.utils import max_logging

if TYPE_CHECKING:
  from maxtext._release.input_pipeline.grain_data_processing import *  # noqa: F403

globals().update({k: v for k, v in vars(release).items() if not k.startswith("__")})


def make_grain_train_iterator(config, global_mesh, process_indices):
  """Makes the training iterator of this host; see the release for other file types."""
  if config.grain_file_type not in mmap_config.FILE_TYPES:
    return release.make_grain_train_iterator(config, global_mesh, process_indices)
  _log_semantics(config)
  dataset = _global_order(
      config,
      process_indices,
      key="grain_train_files",
      global_batch_size=config.global_batch_size_to_load,
      num_samples=mmap_config.train_samples(config),
      needed=config.steps * config.global_batch_size_to_load,
      split_index=0,
      reading=_reading(config),
  )
  return multihost_dataloading.MultiHostDataLoadIterator(dataset, global_mesh, config.generate_padding_batch_train)


def make_grain_eval_iterator(config, global_mesh, process_indices):
  """Makes the evaluation iterator of this host; every evaluation reads the same samples from the first on."""
  if config.grain_file_type not in mmap_config.FILE_TYPES:
    return release.make_grain_eval_iterator(config, global_mesh, process_indices)
  samples = mmap_config.eval_samples(config)
  dataset = _global_order(
      config,
      process_indices,
      key="grain_eval_files",
      global_batch_size=config.global_batch_size_to_load_eval,
      num_samples=samples,
      needed=samples or config.global_batch_size_to_load_eval,
      split_index=1,
      reading=_reading(config, "_eval"),
  )
  return multihost_dataloading.MultiHostDataLoadIterator(dataset, global_mesh, config.generate_padding_batch_eval)


def _reading(config, suffix: str = "") -> tuple[int, int, int, int]:
  """Returns Grain's worker processes, batches each keeps ready, samples to read ahead, and threads."""
  names = ("worker_count", "per_worker_buffer_size", "prefetch_buffer_size", "num_threads")
  workers, worker_buffer, ahead, threads = (getattr(config, f"grain_{name}{suffix}") for name in names)
  return workers, worker_buffer, ahead, threads


def _global_order(
    config, process_indices, *, key, global_batch_size, num_samples, needed, split_index, reading
) -> GlobalOrderDataset:
  """Opens a dataset, says what it is, and lays out its samples for this host.

  Args:
    key: config key that names the dataset.
    num_samples: samples asked for; None for one epoch.
    needed: samples that will be read.
    split_index: part of `mmap_npy_split`, where that is set.
    reading: see `_reading`.
  """
  ((entry, _),) = datasource.parse_entries(getattr(config, key), key)
  npy_dir, path = datasource.parse_npy_entry(entry, key)
  request = IndexRequest(
      config.max_target_length,
      config.data_shuffle_seed,
      num_samples,
      1 if num_samples is None else None,
      config.mmap_npy_split,
      split_index if config.mmap_npy_split else 0,
  )
  source = datasource.MegatronNpyDataSource(
      npy_dir, path, config.mmap_eod_id, config.max_target_length, config.mmap_split_sentences, request=request
  )
  index = source.index
  assert index is not None  # a source with a request has one
  _log_dataset(key, npy_dir, source.path_prefix, index, request)
  if len(source) < needed:
    advice = "raise mmap_npy_num_samples or lower steps"
    if key == "grain_eval_files":
      advice = "lower eval_per_device_batch_size or evaluate on more data"
    raise MMapError(
        f"{key}: the order of {num_samples or 'all'} samples that was asked for has {len(source)}, but the run reads "
        f"{needed}; {advice}."
    )
  samples = _with_fields(config, source)
  workers, worker_buffer, ahead, threads = reading
  host_batch = max(global_batch_size // len(process_indices), 1)
  if workers < 0:
    workers = _chosen_workers(config, samples.batch(host_batch))
  return GlobalOrderDataset(
      samples,
      global_batch_size,
      process_indices.index(jax.process_index()),
      len(process_indices),
      describe_order(index.description, request, needed),
      workers,
      worker_buffer,
      max(ahead // host_batch, 2),
      threads,
  )


def _with_fields(config, source) -> grain.MapDataset:
  """Checks the tokens of each sample and splits them into the model's fields."""
  fields = input_pipeline_utils.MegatronSplitInputsTargets(
      eod_id=config.mmap_eod_id,
      reset_attention_mask=config.reset_attention_mask,
      eod_mask_loss=config.eod_mask_loss,
      min_segment_length=input_pipeline_utils.megatron_min_segment_length(config),
  )
  check = input_pipeline_utils.CheckTokenIds(config.vocab_size, source.path_prefix)
  return grain.MapDataset.source(source).map(check).map(fields)


def _chosen_workers(config, batches: grain.MapDataset) -> int:
  """Returns the number of worker processes that Grain chooses for this machine."""
  options = grain.experimental.pick_performance_config(
      ds=batches.to_iter_dataset(), ram_budget_mb=config.grain_ram_budget_mb, max_workers=None, max_buffer_size=None
  ).multiprocessing_options
  return options.num_workers if options else 0


def _log_dataset(key, npy_dir, path_prefix, index, request) -> None:
  """Says in one line what is read, and in which order."""
  description, plan = index.description, index.description.plan
  facts = description.facts[0]
  where = "found in" if index.found else "written to" if index.saved else "built in memory, not in"
  max_logging.log(
      f"{key}: {path_prefix} has {facts['sequences']} sequences and {facts['tokens']} tokens ({facts['dtype']}); "
      f"reading sequences {description.begin} to {description.end}, {description.tokens_per_epoch} tokens an epoch, "
      f"{plan.num_epochs} epoch(s){', the last shuffled apart' if plan.separate_last_epoch else ''}, {plan.samples} "
      f"samples of {request.seq_length} tokens for {request.num_samples or 'all'} asked, seed {request.seed}; indices "
      f"{description.name} {where} {npy_dir}."
  )


def _log_semantics(config) -> None:
  """Says which of Megatron's GPT semantics the keys leave out."""
  strict = {"reset_attention_mask": True, "eod_mask_loss": False, "packing_max_segments_per_sample": 0}
  other = [f"{key}={getattr(config, key)} ({value})" for key, value in strict.items() if getattr(config, key) != value]
  if other:
    max_logging.log(
        "mmap_npy: tokens and order are Megatron's; segments, positions and loss masks follow keys that differ from "
        f"strict Megatron GPT semantics (in brackets): {', '.join(other)}."
    )
