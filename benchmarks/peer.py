# SPDX-License-Identifier: Apache-2.0
"""Building of indices and reading of samples, by one implementation in a process of its own.

Started by the benchmarks as `python peer.py ours|release|megatron`, in the environment and with the search path that
the implementation needs; of this folder it imports `peer_common` alone. Each method times what it measures, without
imports.
"""

from __future__ import annotations

import gc
import os
import shutil
import time
from types import SimpleNamespace
import zlib

import numpy as np
from peer_common import PeakMemory, bytes_read, checksums, require_release, serve, status_bytes, timed


class Implementation:
  """What an implementation must offer; `source` is random access to samples."""

  def __init__(self):
    self.source = None

  def build_in_memory(self, **order):
    """Times an index build; returns seconds, and checksums of the arrays."""
    seconds, arrays = timed(lambda: self.indices(**order))
    return {"seconds": seconds, "checksums": checksums(arrays)}

  def build_files(self, folder, **order):
    """Times an index build into an empty folder; returns seconds, and checksums of the arrays."""
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    seconds, _ = timed(lambda: self.write(folder, **order))
    sums = checksums([np.load(path, mmap_mode="r") for path in self.array_paths(folder)])
    shutil.rmtree(folder)
    return {"seconds": seconds, "checksums": sums}

  @staticmethod
  def array_paths(folder):
    names = sorted(os.listdir(folder))
    return [
        os.path.join(folder, name)
        for array in ("document_index", "sample_index", "shuffle_index")
        for name in names
        if name.endswith(f"{array}.npy")
    ]

  def read(self, positions):
    """Times reading of samples; returns seconds, and the bytes that the process read (no mapped ones)."""
    source = self.source
    before = bytes_read()
    start = time.perf_counter()
    for position in positions:
      source[position]
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "bytes": bytes_read() - before}

  def sample_checksum(self, positions):
    """Returns a checksum of the tokens of some samples."""
    tokens = [self.tokens(position) for position in positions]
    return {"checksum": zlib.crc32(np.concatenate(tokens).astype("<i4")), "length": len(tokens[0])}


class MaxTextImplementation(Implementation):
  """What ours and the release share."""

  def tokens(self, position):
    return self.source[position]["text"]

  def split(self, seq_length, merge):
    from maxtext.input_pipeline.input_pipeline_utils import MegatronSplitInputsTargets

    shortest = merge and seq_length // merge
    return MegatronSplitInputsTargets(eod_id=2, reset_attention_mask=True, min_segment_length=shortest)

  def fields(self, positions, seq_length, merge=0, rounds=1):
    """Times the model's fields of samples that are in memory; returns seconds."""
    transform, elements = self.split(seq_length, merge), [self.source[position] for position in positions]
    start = time.perf_counter()
    for _ in range(rounds):
      for element in elements:
        transform.map(dict(element))
    seconds = time.perf_counter() - start
    results = [transform.map(dict(element)) for element in elements]
    names = sorted(results[0])
    sums = [zlib.crc32(np.stack([result[name] for result in results])) for name in names]
    return {"seconds": seconds, "checksums": dict(zip(names, sums, strict=True))}

  def pipeline(self, samples, seq_length, batch, threads):
    """Times batches of fields as the training loop gets them, without worker processes; returns seconds."""
    batches = iter(self.batches(seq_length, batch, threads))
    next(batches)  # threads have started and buffers are full
    start = time.perf_counter()
    for _ in range(samples // batch):
      next(batches)
    return {"seconds": time.perf_counter() - start}


class Ours(MaxTextImplementation):
  """This branch."""

  def request(self, order):
    from maxtext.input_pipeline._mmap_index_cache import IndexRequest

    return IndexRequest(order["seq_length"], order["seed"], order["num_samples"])

  def indices(self, prefix, **order):
    from maxtext.input_pipeline import _mmap_index_utils as utils

    return utils.build_indices([prefix], **order)[:3]

  def write(self, folder, prefix, **order):
    from maxtext.input_pipeline import _mmap_index_cache as cache

    cache.write_index(folder, [prefix], self.request(order))

  def stages(self, folder, prefix, **order):
    """Times the parts of a build one after another (a build with files writes while it computes)."""
    import xxhash

    from maxtext.input_pipeline import _mmap_index_cache as cache

    seconds, request = {}, self.request(order)
    seconds["scan and checksum of the .idx"], description = timed(lambda: cache.describe([prefix], request))
    steps = cache.iter_description([prefix], request, description)
    arrays = {}
    for stage in cache.ARRAYS:
      seconds[stage], (_, arrays[stage]) = timed(lambda: next(steps))
    os.makedirs(folder, exist_ok=True)
    for stage, array in arrays.items():
      path = os.path.join(folder, stage)
      seconds[f"write {stage}"], _ = timed(lambda path=path, array=array: cache.save_array(path, array))
      seconds[f"checksum {stage}"], _ = timed(lambda array=array: xxhash.xxh3_128_hexdigest(memoryview(array).cast("B")))
    shutil.rmtree(folder)
    return {"seconds": seconds}

  def memory(self, small, large, folder=None):
    """Returns the growth of anonymous memory at its peak during a build, and the bytes of the arrays.

    Args:
      small, large: orders; the small one is built first, so that compiled code is loaded.
      folder: to write files to, else only in memory.
    """

    def build(order):
      if folder is None:
        return self.indices(**order)
      self.write(folder, **order)
      return [np.load(path, mmap_mode="r") for path in self.array_paths(folder)]

    build(small)
    if folder:
      shutil.rmtree(folder)
    gc.collect()
    with PeakMemory() as peak:
      arrays = build(large)
    size = sum(array.nbytes for array in arrays)
    if folder:
      shutil.rmtree(folder)
    return {"growth": peak.growth, "bytes": size, "ratio": peak.growth / size, "samples_taken": peak.taken}

  def reopen(self, folder, prefix, **order):
    """Times `open_index`, the first thing that this process does; returns seconds, and whether it found the files."""
    start = time.perf_counter()
    from maxtext.input_pipeline import _mmap_index_cache as cache

    imports = time.perf_counter() - start
    before = status_bytes("RssFile")
    seconds, index = timed(lambda: cache.open_index(folder, [prefix], self.request(order)))
    return {
        "seconds": seconds,
        "imports": imports,
        "found": index.found,
        "bytes": sum(array.nbytes for array in index.arrays),
        "mapped_bytes_touched": status_bytes("RssFile") - before,
    }

  def open_source(self, folder, prefix, **order):
    from maxtext.input_pipeline._mmap_datasource import MegatronNpyDataSource

    self.source = MegatronNpyDataSource(folder, prefix, 2, order["seq_length"], request=self.request(order))
    return {"samples": len(self.source)}

  def batches(self, seq_length, batch, threads):
    from maxtext.input_pipeline._mmap_iterator import GlobalOrderDataset
    from maxtext.input_pipeline.grain_data_processing import megatron_rows

    keys = {"mmap_eod_id": 2, "vocab_size": 32000, "reset_attention_mask": True, "eod_mask_loss": False}
    config = SimpleNamespace(max_target_length=seq_length, packing_max_segments_per_sample=0, **keys)
    return GlobalOrderDataset(megatron_rows(self.source, config), batch, 0, 1, {}, buffered=16, threads=threads)


class Release(MaxTextImplementation):
  """MaxText 0.2.5."""

  def __init__(self):
    super().__init__()
    require_release()

  def forget(self):
    """Empties caches that would make every build but the first cheaper."""
    from maxtext.input_pipeline import _mmap_index_utils as utils

    for cached in (utils._resolve_shard_prefixes_cached, utils._get_single_shard_doc_sizes):  # pylint: disable=protected-access
      cached.cache_clear()

  def indices(self, prefix, **order):
    from maxtext.input_pipeline import _mmap_index_utils as utils

    return utils.build_indices([prefix], **order)[:3]

  def build_in_memory(self, **order):
    self.forget()
    return super().build_in_memory(**order)

  def write(self, folder, prefix, **order):
    from maxtext.input_pipeline import _mmap_index_utils as utils

    utils.convert([prefix], folder, **order)

  def open_source(self, folder, prefix, **order):
    from maxtext.input_pipeline._mmap_datasource import MegatronNpyDataSource

    shutil.rmtree(folder, ignore_errors=True)
    self.write(folder, prefix, **order)
    self.source = MegatronNpyDataSource(folder, prefix, 2, order["seq_length"])
    return {"samples": len(self.source)}

  def batches(self, seq_length, batch, threads):
    import grain.python as grain

    samples = grain.MapDataset.source(self.source).map(self.split(seq_length, 0)).batch(batch)
    return samples.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=16))


class Megatron(Implementation):
  """megatron-core's GPTDataset."""

  def __init__(self):
    super().__init__()
    import megatron.core.datasets.helpers  # noqa: F401  pylint: disable=unused-import

  def dataset(self, folder, prefix, seq_length, seed, num_samples):
    """Returns a function that builds a GPTDataset, its `.idx` being open already, which saves or loads its indices."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import Split

    class Tokenizer:
      vocab_size, eod, pad, unique_identifiers = 32000, 2, -1, {"class": "none"}

    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=seq_length,
        blend=([prefix], None),
        split="1",
        path_to_cache=folder,
        tokenizer=Tokenizer(),
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    tokens = GPTDataset.build_low_level_dataset(prefix, config)
    rows = np.arange(len(tokens), dtype=np.int32)
    return lambda: GPTDataset(tokens, prefix, rows, num_samples, Split.train, config)

  def build_files(self, folder, **order):
    shutil.rmtree(folder, ignore_errors=True)
    seconds, dataset = timed(self.dataset(folder, **order))
    sums = checksums([dataset.document_index, dataset.sample_index, dataset.shuffle_index])
    shutil.rmtree(folder)
    return {"seconds": seconds, "checksums": sums}

  def open_source(self, folder, **order):
    shutil.rmtree(folder, ignore_errors=True)
    build = self.dataset(folder, **order)
    build()
    self.source = build()  # loaded, not built: its arrays are mapped, as in the other peers
    return {"samples": len(self.source)}

  def tokens(self, position):
    sample = self.source[position]
    return np.append(sample["tokens"].numpy(), sample["labels"][-1].item())


if __name__ == "__main__":
  serve({"ours": Ours, "release": Release, "megatron": Megatron})
