# SPDX-License-Identifier: Apache-2.0
"""Looks at a dataset here and there: numbers spread over it, and the ends of documents. NumPy only."""

from __future__ import annotations

import numpy as np

from maxtext.input_pipeline._mmap_indexed_dataset import MMapIndexedDataset


def spread(length: int, most: int) -> np.ndarray:
  """Returns at most `most` of the numbers below `length`, at even distances, int64."""
  return np.unique(np.linspace(0, length - 1, min(most, length)).astype(np.int64)) if length else np.empty(0, np.int64)


def last_tokens(dataset: MMapIndexedDataset, most: int) -> np.ndarray:
  """Returns the last token of documents spread over the dataset, int64[at most `most`]; empty ones are left out."""
  dtype, pieces = dataset.header.dtype, []
  for document in spread(dataset.header.num_documents, most).tolist():
    row = _last_row(dataset, int(dataset.doc_idx[document]), int(dataset.doc_idx[document + 1]))
    if row is not None:
      end = int(dataset.pointers[row]) + int(dataset.sizes[row]) * dtype.itemsize
      pieces.append((end - dtype.itemsize, dtype.itemsize))
  return np.frombuffer(b"".join(dataset.read_many(pieces)), dtype).astype(np.int64)


def _last_row(dataset: MMapIndexedDataset, first: int, end: int) -> int | None:
  """Returns the last sequence of [first, end) that has tokens."""
  return next((row for row in range(end - 1, first - 1, -1) if dataset.sizes[row]), None)
