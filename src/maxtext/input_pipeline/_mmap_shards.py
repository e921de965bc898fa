# SPDX-License-Identifier: Apache-2.0
"""Several Megatron datasets read as one: the sequences of the first, then those of the second, and so on. NumPy only."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
import os
from typing import NamedTuple

import numpy as np

from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline import _mmap_remote as remote
from maxtext.input_pipeline._mmap_files import MMapError
from maxtext.input_pipeline._mmap_indexed_dataset import MAX_SEQUENCES, MMapIndexedDataset


class Piece(NamedTuple):
  """Tokens that follow each other within one sequence of one file.

  Attributes:
    shard: number of the dataset.
    row: sequence within its file.
    offset: first token.
    length: tokens.
  """

  shard: int
  row: int
  offset: int
  length: int


class ShardedDataset:
  """The sequences of one or several datasets, numbered through.

  Args:
    paths: one or several prefixes or folders of datasets; see `resolve_shard_prefixes`, which gives the order.

  Raises:
    MMapError: if a path names no dataset, or one that cannot be opened, or they have 2**31 sequences or more.
  """

  def __init__(self, paths: str | os.PathLike | Sequence[str | os.PathLike]):
    self.shards = tuple(MMapIndexedDataset(prefix) for prefix in utils.resolve_shard_prefixes(paths))
    self._firsts = np.cumsum([0, *map(len, self.shards)], dtype=np.int64).tolist()
    if len(self) > MAX_SEQUENCES:
      raise MMapError(
          f"{self.name} have {len(self)} sequences together, and Megatron's document index is int32; give at most "
          f"{MAX_SEQUENCES} sequences to one dataset, and blend several."
      )

  def __len__(self) -> int:
    return self._firsts[-1]

  @property
  def prefixes(self) -> tuple[str, ...]:
    return tuple(shard.path_prefix for shard in self.shards)

  @property
  def name(self) -> str:
    """The datasets as a message names them."""
    first = self.shards[0].path_prefix
    return first if len(self.shards) == 1 else f"{first} and {len(self.shards) - 1} more"

  @property
  def sizes(self) -> np.ndarray:
    """Tokens of every sequence, int32[N]; a copy where there are several shards."""
    sizes = [shard.sizes for shard in self.shards]
    return sizes[0] if len(sizes) == 1 else np.concatenate(sizes)

  def locate(self, sequence: int) -> tuple[int, int]:
    """Returns the number of the shard that holds a sequence, and the sequence's row there.

    Raises:
      IndexError: if there is no such sequence.
    """
    if not 0 <= sequence < len(self):
      raise IndexError(f"{self.name}: sequence {sequence} of {len(self)}")
    shard = bisect.bisect_right(self._firsts, sequence) - 1
    return shard, sequence - self._firsts[shard]

  def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
    """Reads part of a sequence; see `MMapIndexedDataset.get`."""
    shard, row = self.locate(sequence)
    return self.shards[shard].get(row, offset, length)

  def read(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
    """Reads pieces, each in its file's dtype; those at a URL side by side.

    Raises:
      IndexError: if a piece lies outside its sequence.
      MMapError: if it cannot be read.
    """
    distant = [self._place(piece) for piece in pieces if self.shards[piece.shard].is_remote]
    fetched = iter(remote.read_many(distant) if distant else ())
    found = []
    for piece in pieces:
      shard = self.shards[piece.shard]
      if shard.is_remote:
        found.append(np.frombuffer(next(fetched), shard.header.dtype))
      else:
        found.append(shard.get(piece.row, piece.offset, piece.length))
    return found

  def _place(self, piece: Piece) -> tuple[remote.RemoteFile, int, int]:
    """Returns the object of a piece at a URL, its first byte and its number of bytes."""
    shard, (_, row, offset, length) = self.shards[piece.shard], piece
    file = shard.bin_file
    assert isinstance(file, remote.RemoteFile)
    if not 0 <= offset <= offset + length <= shard.sizes[row]:
      raise IndexError(f"{shard.path_prefix}: tokens {offset} to {offset + length} of sequence {row}")
    itemsize = shard.header.dtype.itemsize
    return file, int(shard.pointers[row]) + offset * itemsize, length * itemsize
