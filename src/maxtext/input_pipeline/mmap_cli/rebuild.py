# SPDX-License-Identifier: Apache-2.0
"""Builds an order again and compares it, value by value, with the arrays of a folder. NumPy and Numba only.

Memory: the document index, and one array of the rest at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_megatron_cache as megatron_cache
from maxtext.input_pipeline._mmap_shards import ShardedDataset
from maxtext.input_pipeline.mmap_cli import orders


def describe(order: orders.Order, dataset: ShardedDataset) -> cache.IndexDescription:
  """Returns what the order must be if it is built from a dataset with the settings that it names."""
  return cache.describe(dataset, order.request(), order.settings.get("separate_last_epoch"))


def differences(
    order: orders.Order, dataset: ShardedDataset, description: cache.IndexDescription, progress=None
) -> list[dict[str, Any]]:
  """Builds the order and returns, for each array that differs, where first: see `first_difference`."""
  found = []
  arrays = dict(zip(cache.ARRAYS, order.arrays(), strict=True))
  for name, expected in cache.iter_description(dataset, order.request(), description, progress):
    difference = first_difference(arrays[name], expected)
    if difference:
      found.append({"file": order.paths[name], **difference})
    del expected
  return found


def first_difference(found: np.ndarray, expected: np.ndarray) -> dict[str, Any] | None:
  """Returns `position`, `found` and `expected` of the first entry that differs, or both shapes, or None."""
  if found.shape != expected.shape:
    return {"position": None, "found": list(found.shape), "expected": list(expected.shape)}
  row = megatron_cache.first_difference(found, expected)
  if row is None:
    return None
  return {"position": row, "found": found[row].tolist(), "expected": expected[row].tolist()}
