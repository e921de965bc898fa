# SPDX-License-Identifier: Apache-2.0
"""Batches as a training loop gets them, by one implementation in a process of its own; see peer.py."""

from __future__ import annotations

import os
import time
import zlib

import numpy as np
from peer_common import PeakMemory, require_release, serve, status_bytes


def read_config(**keys):
  """Reads MaxText's configuration with some keys set, as a training run does."""
  from maxtext.configs import pyconfig
  from maxtext.utils.globals import MAXTEXT_CONFIGS_DIR

  settings = {
      "model_name": "gpt3-52k",
      "override_model_config": True,
      "vocab_size": 32000,
      "dataset_type": "grain",
      "grain_file_type": "mmap_npy",
      "mmap_eod_id": 2,
      "reset_attention_mask": True,
      "eod_mask_loss": False,
      "packing_max_segments_per_sample": 0,
      "hardware": "cpu",
      "skip_jax_distributed_system": True,
      "enable_checkpointing": False,
      "log_config": False,
      **keys,
  }
  return pyconfig.initialize(["", os.path.join(MAXTEXT_CONFIGS_DIR, "base.yml")], **settings)


class Implementation:
  """What an implementation must offer: `dataset` opens the data of a configuration, whose elements are batches."""

  def __init__(self):
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # as absl's app.run does; Grain reads flags before it starts workers
    self.config = self.batches = None

  def open(self, compared, **keys):
    """Opens the data and starts reading; returns checksums of the fields of the first batches."""
    self.config = read_config(**keys)
    self.batches = iter(self.dataset(self.config))
    sums = [{name: zlib.crc32(values) for name, values in sorted(next(self.batches).items())} for _ in range(compared)]
    return {"checksums": sums}

  def read(self, warm_up, batches):
    """Times the next batches; returns seconds, after `warm_up` ones that use up what was read ahead."""
    for _ in range(warm_up):
      next(self.batches)
    start = time.perf_counter()
    for _ in range(batches):
      next(self.batches)
    return {"seconds": time.perf_counter() - start}

  def close(self):
    """Ends the reading and the worker processes."""
    self.batches.close()
    self.batches = None
    return {}


class Ours(Implementation):
  """This branch."""

  def __init__(self):
    super().__init__()
    self.stream = None

  def dataset(self, config):
    """Does what make_grain_train_iterator does, up to the transfer to devices."""
    from maxtext.input_pipeline import _mmap_stream
    from maxtext.input_pipeline._mmap_iterator import GlobalOrderDataset
    from maxtext.input_pipeline.grain_data_processing import megatron_rows

    self.stream = _mmap_stream.open_stream(_mmap_stream.settings_for(config))
    batch = config.global_batch_size_to_load
    return GlobalOrderDataset(
        megatron_rows(self.stream.source, config),
        batch,
        0,
        1,
        self.stream.order,
        config.grain_worker_count,
        config.grain_per_worker_buffer_size,
        max(config.grain_prefetch_buffer_size // batch, 2),
        config.grain_num_threads,
    )

  def first_batch(self, started, **keys):
    """Reads one batch, the first thing that this process does.

    Args:
      started: time.monotonic() of the caller when it started this process.

    Returns:
      Seconds of each part and from the start on, and the memory after the imports and at the peak.
    """
    seconds = {"interpreter": time.monotonic() - started}
    clock = _Clock(seconds)
    import jax

    from maxtext.input_pipeline import grain_data_processing  # noqa: F401  pylint: disable=unused-import

    jax.devices()
    clock.take("imports")
    config = read_config(**keys)
    clock.take("configuration")
    before = status_bytes("RssAnon")
    with PeakMemory(every=0.02) as peak:
      dataset = self.dataset(config)
      clock.take("opening")
      batches = iter(dataset)
      shape = np.shape(next(batches)["inputs"])
      clock.take("first batch")
    seconds["all"] = time.monotonic() - started
    batches.close()
    indices = [child.index for child in self.stream.children]
    return {
        "seconds": seconds,
        "shape": shape,
        "children": len(indices),
        "shards": sum(len(index.description.facts) for index in indices),
        "cached": all(index.found for index in indices),
        "imported": before,
        "growth": peak.growth,
    }


class Release(Implementation):
  """MaxText 0.2.5: its own data and pipeline, called as its make_grain_train_iterator calls them."""

  def __init__(self):
    super().__init__()
    require_release()

  def dataset(self, config):
    from maxtext.input_pipeline import grain_data_processing as pipeline

    samples = pipeline.get_datasets(
        config.grain_train_files,
        config.grain_file_type,
        shuffle=config.enable_data_shuffling,
        shuffle_seed=config.data_shuffle_seed,
        shuffle_buffer_size=config.grain_shuffle_buffer_size,
        num_epoch=config.num_epoch,
        dataloading_host_index=0,
        dataloading_host_count=1,
        grain_worker_count=config.grain_worker_count,
        grain_num_threads=config.grain_num_threads,
        grain_prefetch_buffer_size=config.grain_prefetch_buffer_size,
        grain_data_source_max_workers=config.grain_data_source_max_workers,
        dataset_config=pipeline._build_dataset_config(  # pylint: disable=protected-access
            config, num_samples=config.steps * config.global_batch_size_to_load, seed=config.data_shuffle_seed
        ),
    )
    counts = config.grain_worker_count, config.grain_per_worker_buffer_size
    return pipeline._mmap_pretrain_pipeline(samples, config, "text", *counts)  # pylint: disable=protected-access


class _Clock:
  """Notes the seconds since the last note."""

  def __init__(self, seconds):
    self._seconds, self._last = seconds, time.monotonic()

  def take(self, name):
    now = time.monotonic()
    self._seconds[name], self._last = now - self._last, now


if __name__ == "__main__":
  serve({"ours": Ours, "release": Release})
