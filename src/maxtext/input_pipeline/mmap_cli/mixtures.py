# SPDX-License-Identifier: Apache-2.0
"""Datasets as the command line names them, and the orders of their samples; without JAX and Grain."""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import NamedTuple

from maxtext.input_pipeline import _megatron_blending as blending
from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline._mmap_files import MMapError
from maxtext.input_pipeline._mmap_mixture import parse_mixture
from maxtext.input_pipeline._mmap_shards import ShardedDataset
from maxtext.input_pipeline.mmap_cli import console

NOWHERE = os.devnull  # an index folder that holds nothing and keeps nothing


class Entry(NamedTuple):
  """A dataset as written: its paths, its index folder if one was named, its weight if it has one."""

  text: str
  paths: list[str]
  npy_dir: str | None
  weight: float | None


class PlannedChild(NamedTuple):
  """What is asked of a dataset.

  Attributes:
    entry: as written.
    number: its place among those written.
    share: weight divided by the sum; None without weights.
    requested: samples that its order is asked for; None: one epoch.
    drawn: samples that a blend takes; None without weights.
  """

  entry: Entry
  number: int
  share: float | None
  requested: int | None
  drawn: int | None


class Child(NamedTuple):
  """A dataset and the order of its samples, of which the first `drawn` are read."""

  planned: PlannedChild
  dataset: ShardedDataset
  index: cache.Index
  drawn: int


def weighted(text: str) -> list[Entry]:
  """Parses 'entry,weight;entry,weight;...'; a comma before the last belongs to a path.

  Raises:
    MMapError: for an entry that cannot be read; weights are finite, not negative, with a positive total.
  """
  mixture = parse_mixture(text.rstrip("; ") + ";", "--datasets")
  if mixture.weights is None:
    raise MMapError(f"--datasets {text!r} has no weights; write 'dataset,0.7;dataset,0.3'.")
  return [plain(name)._replace(weight=weight) for name, weight in zip(mixture.entries, mixture.weights, strict=True)]


def plain(text: str) -> Entry:
  """Parses 'dataset' or 'npy_dir|dataset', where a dataset may be several paths joined by ':'."""
  folder, bar, paths = text.rpartition("|")
  return Entry(text, utils.split_paths(paths), folder.strip() if bar else None, None)


def entries_of(options: argparse.Namespace) -> list[Entry]:
  """Returns the datasets of the arguments `datasets` (weighted) and `paths` (each one dataset)."""
  if bool(options.datasets) == bool(options.paths):
    raise MMapError("give either datasets, or --datasets 'dataset,0.7;dataset,0.3', and not both.")
  return weighted(options.datasets) if options.datasets else [plain(path) for path in options.paths]


def plan(
    entries: list[Entry], num_samples: int | None, margin: float, progress: console.Progress | None = None
) -> list[PlannedChild]:
  """Says how many samples each dataset is asked for and gives; those of weight 0 are left out.

  Args:
    num_samples: of the whole blend where there are weights, else of each dataset; None: one epoch.
    margin: samples to build for each child of a blend beyond its share, in percent.
  """
  if entries[0].weight is None:
    return [PlannedChild(entry, number, None, num_samples, None) for number, entry in enumerate(entries)]
  if num_samples is None:
    raise MMapError("a blend with weights has no size of its own; give --samples, steps * global batch size.")
  kept = [number for number, entry in enumerate(entries) if entry.weight]
  weights = [entries[number].weight or 0.0 for number in kept]
  blend = blending.weighted_blend(weights, num_samples, tuple(kept))
  shares = utils._normalize_weights(weights)
  sizes, drawn = utils.compute_blend_buffers(num_samples, shares, margin), blending.count_draws(blend, progress)
  return [
      PlannedChild(entries[number], number, share, size, count)
      for number, share, size, count in zip(kept, shares, sizes, drawn, strict=True)
  ]


def open_child(
    planned: PlannedChild, dataset: ShardedDataset, request: cache.IndexRequest, progress: console.Progress | None = None
) -> Child:
  """Loads the order of a dataset, or builds it in memory.

  Raises:
    MMapError: if a blend draws more samples than it has.
  """

  def report(stage: str, done: int, total: int) -> None:
    if progress:
      progress(f"{planned.entry.text}: {stage}", done, total)

  epochs = 1 if planned.requested is None else None
  request = dataclasses.replace(request, num_samples=planned.requested, num_epochs=epochs)
  index = cache.open_index(planned.entry.npy_dir or NOWHERE, dataset, request, write=False, progress=report)
  available = len(index.arrays[2])
  drawn = min(planned.requested or available, available) if planned.drawn is None else planned.drawn
  if drawn > available:
    raise MMapError(
        f"the blend asks dataset {planned.number} ({planned.entry.text}) for {drawn} samples, and its indices have "
        f"{available}; raise --margin."
    )
  return Child(planned, dataset, index, drawn)
