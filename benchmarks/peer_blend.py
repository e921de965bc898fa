# SPDX-License-Identifier: Apache-2.0
"""Drawing of blends and building of their children, by one implementation in a process of its own; see peer.py."""

from __future__ import annotations

import gc
import os
import shutil

import numpy as np
from peer_common import PeakMemory, checksums, require_release, serve, timed


class Implementation:
  """What an implementation must offer: `arrays` makes the two arrays of a blend."""

  def draw(self, weights, size, compared):
    """Times a blend from nothing to both arrays; returns seconds, and checksums of the first `compared` draws."""
    seconds, arrays = timed(lambda: self.arrays(weights, size))
    return {"seconds": seconds, "checksums": checksums([array[:compared] for array in arrays])}


class Ours(Implementation):
  """This branch."""

  def arrays(self, weights, size):
    from maxtext.input_pipeline import _megatron_blending as blending

    return blending.draw(blending.weighted_blend(weights, size))[0]

  def draw_memory(self, weights, size):
    """Returns the bytes that memory grows by while a blend is drawn, and those of its arrays."""
    self.arrays(weights, 1000)
    gc.collect()
    with PeakMemory() as peak:
      arrays = self.arrays(weights, size)
    return {"growth": peak.growth, "bytes": sum(array.nbytes for array in arrays)}

  def write_pair(self, folder, weights, size):
    """Writes a pair to a cache folder."""
    self._open(folder, weights, size)
    return {}

  def load_pair(self, folder, weights, size, checked):
    """Times the opening of a pair in a cache folder; `checked`: stamps say that it was checked before."""
    stamps = os.path.join(folder, "stamps.json")
    if not checked:
      os.remove(stamps)
    gc.collect()
    with PeakMemory() as peak:
      seconds, pair = timed(lambda: self._open(folder, weights, size))
    if not pair.found or not os.path.isfile(stamps):
      raise RuntimeError(f"the pair in {folder} was not used")
    return {"seconds": seconds, "growth": peak.growth}

  def _open(self, folder, weights, size):
    from maxtext.input_pipeline import _megatron_blending as blending

    return blending.open_pair(blending.weighted_blend(weights, size), [size] * len(weights), cache_dir=folder)

  def children(self, prefixes, folder, seq_length, seed, size, workers):
    """Times the building of a blend and its children with files; returns seconds, checksums, peak and bytes of arrays."""
    from maxtext.input_pipeline import _megatron_blending as blending
    from maxtext.input_pipeline import _mmap_index_cache as cache

    shutil.rmtree(folder, ignore_errors=True)
    folders = [os.path.join(folder, f"dataset_{number}") for number in range(len(prefixes))]
    specs = [
        {"input": [prefix], "weight": 1.0, "output_dir": child} for prefix, child in zip(prefixes, folders, strict=True)
    ]
    request = cache.IndexRequest(seq_length, seed, size)
    gc.collect()
    with PeakMemory(every=0.005) as peak:
      seconds, _ = timed(lambda: blending.write_blend(specs, request, 0.5, workers, folder))
    names = [sorted(path for path in os.listdir(place) if path.endswith(".npy")) for place in (folder, *folders)]
    paths = [os.path.join(place, name) for place, found in zip((folder, *folders), names, strict=True) for name in found]
    arrays = [np.load(path, mmap_mode="r") for path in paths]
    sums = checksums(arrays)
    shutil.rmtree(folder)
    return {"seconds": seconds, "checksums": sums, "growth": peak.growth, "bytes": sum(array.nbytes for array in arrays)}


class Release(Implementation):
  """MaxText 0.2.5."""

  def __init__(self):
    require_release()

  def arrays(self, weights, size):
    from maxtext.input_pipeline._megatron_blending import build_blending_indices

    return _filled(build_blending_indices, weights, size)


class Megatron(Implementation):
  """megatron-core's compiled helper, as its BlendedDataset calls it."""

  def arrays(self, weights, size):
    from megatron.core.datasets import helpers_cpp

    return _filled(lambda *arguments: helpers_cpp.build_blending_indices(*arguments, False), weights, size)


def _filled(build, weights, size):
  """Calls a function with megatron-core's signature, with weights that are normalised as BlendedDataset does."""
  shares = np.array(weights)
  for _ in range(2):
    shares = shares / np.sum(shares)
  arrays = np.zeros(size, np.int16), np.zeros(size, np.int64)
  build(*arrays, shares, len(weights), size)
  return arrays


if __name__ == "__main__":
  serve({"ours": Ours, "release": Release, "megatron": Megatron})
