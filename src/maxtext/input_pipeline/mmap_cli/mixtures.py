# SPDX-License-Identifier: Apache-2.0
"""Datasets as the command line names them, and the orders of their samples; without JAX and Grain."""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import math
import os
from typing import NamedTuple

import numpy as np

from maxtext.input_pipeline import _megatron_blending as blending
from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline._mmap_files import MMapError
from maxtext.input_pipeline._mmap_shards import ShardedDataset
from maxtext.input_pipeline.mmap_cli import console

_PIECE = 1 << 20  # draws at a time
NOWHERE = os.devnull  # an index folder that holds nothing and keeps nothing


class Entry(NamedTuple):
  """A dataset as written: its paths, its index folder if one was named, its weight if it has one."""

  text: str
  paths: list[str]
  npy_dir: str | None
  weight: float | None


@dataclasses.dataclass(frozen=True)
class Child:
  """A dataset and the order of its samples.

  Attributes:
    entry: as written.
    number: its place among those written.
    dataset: its sequences.
    index: the order.
    share: weight divided by the sum; None without weights.
    drawn: samples that are read, from the first.
  """

  entry: Entry
  number: int
  dataset: ShardedDataset
  index: cache.Index
  share: float | None
  drawn: int


def weighted(text: str) -> list[Entry]:
  """Parses 'entry,weight;entry,weight;...'; a comma before the last belongs to a path.

  Raises:
    MMapError: for an entry that cannot be read; weights are finite, not negative, with a positive total.
  """
  entries = []
  for number, part in enumerate(filter(str.strip, text.split(";"))):
    name, _, weight = part.rpartition(",")
    try:
      value = float(weight)
    except ValueError:
      value = math.nan
    if not name.strip() or not math.isfinite(value) or value < 0:
      raise MMapError(
          f"--datasets: entry {number} is {part.strip()!r}; expected 'dataset,weight' with a finite weight of 0 or more."
      )
    entries.append(plain(name.strip())._replace(weight=value))
  if not 0 < sum(entry.weight or 0 for entry in entries) < math.inf:
    raise MMapError(f"--datasets {text!r} gives no dataset a positive weight; write 'dataset,0.7;dataset,0.3'.")
  return entries


def plain(text: str) -> Entry:
  """Parses 'dataset' or 'npy_dir|dataset', where a dataset may be several paths joined by ':'."""
  folder, bar, paths = text.rpartition("|")
  return Entry(text, utils.split_paths(paths), folder.strip() if bar else None, None)


def entries_of(options: argparse.Namespace) -> list[Entry]:
  """Returns the datasets of the arguments `datasets` (weighted) and `paths` (each one dataset)."""
  if bool(options.datasets) == bool(options.paths):
    raise MMapError("give either datasets, or --datasets 'dataset,0.7;dataset,0.3', and not both.")
  return weighted(options.datasets) if options.datasets else [plain(path) for path in options.paths]


def open_children(
    entries: list[Entry], request: cache.IndexRequest, margin: float, progress: console.Progress | None
) -> list[Child]:
  """Loads the orders of datasets, or builds them in memory side by side; those of weight 0 are left out.

  Args:
    request: `num_samples` is of the whole blend where there are weights, else of each dataset.
    margin: samples to build for each child of a blend beyond its share, in percent.
  """
  kept = [number for number, entry in enumerate(entries) if entry.weight != 0]
  shares: list[float | None] = [None] * len(kept)
  sizes: list[int | None] = [request.num_samples] * len(kept)
  blend = None
  if entries[kept[0]].weight is not None:
    if request.num_samples is None:
      raise MMapError("a blend with weights has no size of its own; give --samples, steps * global batch size.")
    weights = [entries[number].weight or 0.0 for number in kept]
    blend = blending.weighted_blend(weights, request.num_samples, tuple(kept))
    normal = utils._normalize_weights(weights)
    shares[:], sizes[:] = normal, utils.compute_blend_buffers(blend.size, normal, margin)

  def open_one(place: int) -> tuple[ShardedDataset, cache.Index]:
    entry, own = entries[kept[place]], dataclasses.replace(request, num_samples=sizes[place])
    dataset = ShardedDataset(entry.paths)

    def report(stage: str, done: int, total: int) -> None:
      if progress:
        progress(f"{entry.text}: {stage}", done, total)

    return dataset, cache.open_index(entry.npy_dir or NOWHERE, dataset, own, write=False, progress=report)

  with concurrent.futures.ThreadPoolExecutor(min(len(kept), os.cpu_count() or 1)) as pool:
    opened = list(pool.map(open_one, range(len(kept))))
  lengths = [len(index.arrays[2]) for _, index in opened]
  drawn = [min(length, size or length) for length, size in zip(lengths, sizes, strict=True)]
  if blend is not None:
    drawn = draws_of(blend, progress)
    blend.check(drawn, lengths)
  return [
      Child(entries[number], number, dataset, index, share, int(count))
      for number, (dataset, index), share, count in zip(kept, opened, shares, drawn, strict=True)
  ]


def draws_of(blend: blending.BlendRequest, progress: console.Progress | None = None) -> list[int]:
  """Returns how often a blend draws each dataset, without keeping the draws."""
  draws = blend.draws()
  buffers = np.empty(_PIECE, np.int16), np.empty(_PIECE, np.int64)
  for first in range(0, blend.size, _PIECE):
    count = min(_PIECE, blend.size - first)
    draws.next(buffers[0][:count], buffers[1][:count])
    if progress:
      progress("blend", first + count, blend.size)
  return draws.counts
