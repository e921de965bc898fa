# SPDX-License-Identifier: Apache-2.0
"""The datasets given on the command line, and which of them an order was built from. NumPy only."""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline._mmap_files import MMapError
from maxtext.input_pipeline._mmap_shards import ShardedDataset
from maxtext.input_pipeline.mmap_cli import orders


class Candidate(NamedTuple):
  """A dataset as it was given, and opened."""

  text: str
  dataset: ShardedDataset

  @property
  def digests(self) -> tuple[str, ...]:
    """Checksums of its `.idx` files."""
    return tuple(_digest(prefix) for prefix in self.dataset.prefixes)


@functools.cache
def _digest(prefix: str) -> str:
  return cache.dataset_facts(prefix)["digest"]


def open_all(texts: list[str]) -> list[Candidate]:
  """Opens the datasets of arguments; each argument is one dataset, of several shards where it joins paths by ':'."""
  _digest.cache_clear()  # of a dataset that was replaced since, in a process that runs several commands
  return [Candidate(text, ShardedDataset(utils.split_paths(text))) for text in texts]


def choose(order: orders.Order, candidates: list[Candidate]) -> Candidate:
  """Returns the dataset that an order was built from: by checksum, or by file names where only paths are known.

  Raises:
    MMapError: if it is none of those given.
  """
  if order.maker == orders.BRANCH:
    found = [candidate for candidate in candidates if candidate.digests == order.datasets]
  elif len(candidates) == 1:
    found = candidates  # paths differ from mount to mount; the values will tell
  else:
    found = [candidate for candidate in candidates if _same_names(order.datasets, candidate)]
  if found:
    return found[0]
  given = ", ".join(candidate.text for candidate in candidates[:3]) + (", ..." if len(candidates) > 3 else "")
  where = os.path.join(order.folder, order.name)
  raise MMapError(
      f"{where} was built from {_origin(order)}, which is not {given}; name the dataset that it was built from."
  )


def _same_names(paths: tuple[str, ...], candidate: Candidate) -> bool:
  """Whether paths on another machine may be this dataset: the same file names, or the folder that holds them."""
  names = sorted(map(os.path.basename, candidate.dataset.prefixes))
  folders = {os.path.basename(os.path.dirname(prefix)) for prefix in candidate.dataset.prefixes}
  given = [os.path.basename(path.rstrip("/")) for path in paths]
  return sorted(given) == names or {*given} == folders


def _origin(order: orders.Order) -> str:
  """Says what an order was built from."""
  if order.maker == orders.BRANCH:
    shards = order.metadata["built_from"]["datasets"]
    tokens, sequences = (sum(shard[key] for shard in shards) for key in ("tokens", "sequences"))
    return f"{len(shards)} file(s) with {sequences:,} sequences and {tokens:,} tokens (checksum {order.datasets[0][:12]})"
  return ", ".join(order.datasets[:3])
