# SPDX-License-Identifier: Apache-2.0
"""How many segments the samples of an order hold, under several merge settings. NumPy and Numba only."""

from __future__ import annotations

from typing import Any

import numpy as np

from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline.mmap_cli import documents, order_kernels
from maxtext.input_pipeline.mmap_cli.mixtures import Child, PlannedChild, open_child

_PIECE = 1 << 18  # samples between two looks at the progress
_MOST_BINS = 1 << 16
_MERGES = (0, 8, 16, 25, 32, 64, 128)
_QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


def count(planned: list[PlannedChild], datasets, options, described: list[dict[str, Any]], progress) -> dict[str, Any]:
  """Counts the segments of the samples that a run reads, for each merge setting; one dataset's order at a time.

  Args:
    planned, datasets: the datasets.
    options: of the command `stats`.
    described: facts of each dataset, of which `eod_id` is used; target, share, samples and epochs are added.
  """
  length = options.seq_length
  others = [merge for merge in _MERGES if merge != options.merge and (not merge or length // merge > 1)]
  counter = Counter(length, [options.merge, *others])
  request = cache.IndexRequest(length, options.seed, None, 1, options.split, options.split_index)
  read = []
  for child, dataset, own in zip(planned, datasets, described, strict=True):
    opened = open_child(child, dataset, request, progress)
    counter.add(dataset, opened.index.arrays, opened.drawn, progress, child.entry.text)
    own |= {"target": child.share, "samples": opened.drawn, "epochs": opened.index.description.plan.num_epochs}
    if options.read:
      read.append(_read(opened, own, counter, options))
  samples = sum(own["samples"] for own in described)
  for own in described:
    own["share"] = own["samples"] / samples
  most = max(int(counter.most[0]), *(facts["most"] for facts in read), 0)
  return {
      "seq_length": length,
      "merge": options.merge,
      "samples": samples,
      "whole_order": options.samples is not None,
      "loss_share": 1 - counter.eods / (samples * length),
      "segments": _distribution(counter.histogram[0], int(counter.most[0])),
      "merges": _merges([options.merge, *others], counter),
      "histogram": np.trim_zeros(counter.histogram[0], "b").tolist(),
      "recommended": {
          "max_kda_segments": recommend(most, length, options.samples is not None),
          "packing_max_segments_per_sample": 0,
      },
      **({"read": read} if read else {}),
  }


def _merges(merges: list[int], counter: Counter) -> list[dict[str, Any]]:
  """Returns what each merge setting does, by setting."""
  return [
      {
          "packing_max_segments_per_sample": merge,
          "joins_up_to": distance(counter.length, merge),
          "joined": int(counter.merged[number]),
          "joined_share": int(counter.merged[number]) / max(counter.beginnings, 1),
          "mean": _mean(counter.histogram[number]),
          "most": int(counter.most[number]),
      }
      for number, merge in sorted(enumerate(merges), key=lambda pair: pair[1])
  ]


def distance(length: int, merge: int) -> int:
  """Returns how many tokens after the last kept beginning a document is joined; 0: never, as in the pipeline."""
  found = length // merge if merge else 0
  return found if found > 1 else 0


def recommend(most: int, length: int, whole: bool) -> int:
  """Returns max_kda_segments for orders whose samples hold at most `most` segments: see the help of `stats`."""
  if not whole:
    most = most + -(-most // 4)
  return -(-min(most, length) // 8) * 8


class Counter:
  """Segments of samples, under several merge settings at once; see `order_kernels.count_segments`."""

  def __init__(self, length: int, merges: list[int]):
    self.length = length
    self.distances = np.array([distance(length, merge) for merge in merges], np.int64)
    self.histogram = np.zeros((len(merges), min(length, _MOST_BINS) + 1), np.int64)
    self.most, self.merged = np.zeros(len(merges), np.int64), np.zeros(len(merges), np.int64)
    self.eods = self.beginnings = 0

  def add(self, dataset, arrays, count: int, progress=None, name: str = "") -> None:
    """Counts the first `count` samples of an order."""
    cache.check_ranges(arrays, len(dataset), name)
    sizes, ends = dataset.sizes, _document_ends(dataset)
    state = (self.length, self.distances, self.histogram, self.most, self.merged)
    for first in range(0, count, _PIECE):
      last = min(first + _PIECE, count)
      eods, beginnings = order_kernels.count_segments(sizes, ends, *arrays, first, last, *state)
      self.eods, self.beginnings = self.eods + int(eods), self.beginnings + int(beginnings)
      if progress:
        progress(f"{name}: segments", last, count)


def _document_ends(dataset):
  """Returns whether each sequence ends a document, bool[N]; all do unless documents are split into sentences."""
  parts = []
  for shard in dataset.shards:
    ends = np.zeros(len(shard), bool)
    last = shard.doc_idx[1:] - 1
    ends[last[last >= 0]] = True
    parts.append(ends)
  return np.concatenate(parts)


def _mean(histogram) -> float:
  return float((histogram * range(len(histogram))).sum() / max(histogram.sum(), 1))


def _distribution(histogram, most: int) -> dict[str, Any]:
  ends = np.cumsum(histogram)
  quantiles = {f"{share:.0%}": int(np.searchsorted(ends, share * ends[-1])) for share in _QUANTILES}
  return {"mean": _mean(histogram), **quantiles, "most": most}


def _read(child: Child, own, counter: Counter, options) -> dict[str, Any]:
  """Reads samples here and there and compares their EOD tokens with the count without reading."""
  from maxtext.input_pipeline._mmap_datasource import MegatronNpyDataSource  # these import Grain and JAX
  from maxtext.input_pipeline._mmap_fields import rows_of_segments_and_positions

  chosen = documents.spread(child.drawn, options.read)
  document_index, samples, draws = child.index.arrays
  indices = document_index, samples, draws
  source = MegatronNpyDataSource(
      "", [*child.dataset.prefixes], own["eod_id"], options.seq_length, True, prebuilt_indices=indices
  )
  eods, segments = 0, []
  for first in range(0, len(chosen), 64):
    inputs = source.read_rows(chosen[first : first + 64])[:, :-1]
    numbers, _ = rows_of_segments_and_positions(inputs, own["eod_id"], int(counter.distances[0]))
    eods += int((inputs == own["eod_id"]).sum())
    segments += numbers[:, -1].tolist()
  assumed = Counter(options.seq_length, [options.merge])
  assumed.add(child.dataset, (document_index, samples, draws[chosen]), len(chosen))
  return {
      "dataset": child.planned.entry.text,
      "samples": len(chosen),
      "eods": eods,
      "assumed_eods": assumed.eods,
      "mean": sum(segments) / len(segments),
      "most": max(segments),
  }
