# SPDX-License-Identifier: Apache-2.0
"""Lengths and ends of the documents of a dataset, in pieces, so that files of any size fit. NumPy only."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from maxtext.input_pipeline._mmap_indexed_dataset import MMapIndexedDataset

_PIECE = 1 << 16  # documents at a time


def lengths(dataset: MMapIndexedDataset) -> Iterator[np.ndarray]:
  """Yields the tokens of consecutive documents, int64[at most 65,536]; the index must have passed `scan`."""
  for first in range(0, dataset.header.num_documents, _PIECE):
    bounds = dataset.doc_idx[first : first + _PIECE + 1]
    ends = np.zeros(int(bounds[-1] - bounds[0]) + 1, np.int64)
    np.cumsum(dataset.sizes[bounds[0] : bounds[-1]], out=ends[1:])
    yield np.diff(ends[bounds - bounds[0]])


def last_tokens(dataset: MMapIndexedDataset, most: int) -> np.ndarray:
  """Returns the last token of documents spread over the dataset, int64[at most `most`]; empty ones are left out."""
  documents, dtype = dataset.header.num_documents, dataset.header.dtype
  chosen = np.unique(np.linspace(0, documents - 1, min(most, documents)).astype(np.int64)) if documents else ()
  pieces = []
  for document in chosen:
    row = _last_row(dataset, int(dataset.doc_idx[document]), int(dataset.doc_idx[document + 1]))
    if row is not None:
      end = int(dataset.pointers[row]) + int(dataset.sizes[row]) * dtype.itemsize
      pieces.append((end - dtype.itemsize, dtype.itemsize))
  return np.frombuffer(b"".join(dataset.read_many(pieces)), dtype).astype(np.int64)


def _last_row(dataset: MMapIndexedDataset, first: int, end: int) -> int | None:
  """Returns the last sequence of [first, end) that has tokens."""
  return next((row for row in range(end - 1, first - 1, -1) if dataset.sizes[row]), None)
