# SPDX-License-Identifier: Apache-2.0
"""Where the tokens of training samples lie, for both Megatron file types. Nothing is written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from maxtext.input_pipeline import _mmap_stream as streams
from maxtext.input_pipeline import _mmap_window_rows as window_rows
from maxtext.input_pipeline._mmap_files import MMapError
from maxtext.input_pipeline._mmap_indexed_dataset import MMapIndexedDataset
from maxtext.input_pipeline._mmap_shards import Piece
from maxtext.input_pipeline._mmap_windows import TokenStream


class Places(Protocol):
  """The samples of a run, in their global order."""

  def __len__(self) -> int:
    """Samples of the order."""
    ...

  def raw_tokens(self, samples: Sequence[int]) -> np.ndarray:
    """Returns what the digest of a batch is made of, see `_mmap_digest`, int32[n, L + 1]."""
    ...

  def locate(self, sample: int) -> dict[str, Any]:
    """Returns the dataset ("child"), the sample's number in it ("child_sample"), and where its tokens lie ("pieces")."""
    ...


def open_places(config) -> Places:
  """Opens the training samples of a config.

  Raises:
    MMapError: if they cannot be opened, or are not Megatron's.
  """
  if config.dataset_type == "grain" and config.grain_file_type == "mmap_npy":
    return OrderPlaces(streams.open_stream(streams.settings_for(config), write=False))
  if config.dataset_type == "grain" and config.grain_file_type == "mmap":
    settings = window_rows.settings_for(config)
    return WindowPlaces(window_rows.open_windows(settings, write=False).rows, settings)
  raise MMapError(
      f"the config has dataset_type={config.dataset_type.value} and grain_file_type={config.grain_file_type}; a run on "
      "Megatron datasets needs grain and mmap_npy or mmap."
  )


class OrderPlaces:
  """The samples of `mmap_npy`."""

  def __init__(self, stream: streams.Stream):
    self._stream = stream

  def __len__(self) -> int:
    return len(self._stream)

  def raw_tokens(self, samples: Sequence[int]) -> np.ndarray:
    return self._stream.source.read_rows(samples)

  def locate(self, sample: int) -> dict[str, Any]:
    source: Any = self._stream.source
    number, place = (0, sample) if self._stream.blend is None else source.child(sample)
    child = self._stream.children[number]
    shards = child.source.dataset.shards
    pieces = [piece_facts(shards[piece.shard], piece) for piece in child.source.pieces(place)]
    return {"child": child.number, "child_sample": place, "pieces": pieces}


class WindowPlaces:
  """The windows of `mmap`."""

  def __init__(self, rows: window_rows.MMapRows, settings: window_rows.WindowSettings):
    self._rows, self._settings = rows, settings
    self._ends: dict[tuple[int, int], np.ndarray] = {}

  def __len__(self) -> int:
    return len(self._rows)

  def raw_tokens(self, samples: Sequence[int]) -> np.ndarray:
    """The window and the target of its last token, which is EOD for padding."""
    windows = self._rows.read_rows(samples)
    return np.pad(windows, ((0, 0), (0, 1)), constant_values=self._settings.eod_id)

  def locate(self, sample: int) -> dict[str, Any]:
    (child,), (window,) = (array.tolist() for array in self._rows.order.locate([sample]))
    length = self._settings.seq_length
    pieces = list(self._pieces(child, window * length, length))
    return {"child": child, "child_sample": window, "pieces": pieces}

  def _pieces(self, child: int, token: int, left: int) -> Iterator[dict[str, Any]]:
    """Yields the pieces of `left` tokens of a dataset from `token` on."""
    stream: TokenStream = self._rows.streams[child]
    while left:
      number = stream.shard_at(token)
      dataset = stream.shards[number].open()
      ends = self._ends.setdefault((child, number), np.cumsum(dataset.sizes, dtype=np.int64))
      within = token - sum(shard.tokens for shard in stream.shards[:number])
      row = int(np.searchsorted(ends, within, side="right"))
      count = min(int(ends[row]) - within, left)
      yield piece_facts(dataset, Piece(number, row, int(dataset.sizes[row]) - (int(ends[row]) - within), count))
      token, left = token + count, left - count


def piece_facts(dataset: MMapIndexedDataset, piece: Piece) -> dict[str, Any]:
  """Returns a piece by names, with its document and its bytes."""
  itemsize = dataset.header.dtype.itemsize
  return {
      "dataset": dataset.path_prefix,
      "sequence": piece.row,
      "document": int(np.searchsorted(dataset.doc_idx, piece.row, side="right")) - 1,
      "offset": piece.offset,
      "length": piece.length,
      "bin_position": int(dataset.pointers[piece.row]) + piece.offset * itemsize,
      "bin_bytes": piece.length * itemsize,
  }
