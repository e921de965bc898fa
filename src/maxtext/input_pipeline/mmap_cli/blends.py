# SPDX-License-Identifier: Apache-2.0
"""Folders of blends: the pair of blend indices, and the folders of the children, `dataset_0`, `dataset_1`, ..."""

from __future__ import annotations

import glob
import hashlib
import os
import re
from typing import Any

import numpy as np

from maxtext.input_pipeline import _megatron_blending as blending
from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline._mmap_files import MMapError, MMapFileNotFoundError
from maxtext.input_pipeline.mmap_cli import console, orders

_PIECE = 1 << 20  # draws looked at at a time


def child_folders(folder: str) -> list[str]:
  """Returns the folders of a blend's children, `dataset_2` before `dataset_10`."""
  found = [path for path in glob.glob(os.path.join(glob.escape(folder), "dataset_*")) if os.path.isdir(path)]
  numbered = [(int(match[1]), path) for path in found if (match := re.search(r"dataset_(\d+)$", path))]
  return [path for _, path in sorted(numbered)]


def pairs_in(folder: str) -> list[str]:
  """Returns what the file names of each pair of a folder begin with, folder included; also where half is missing."""
  starts = set()
  for array in blending.ARRAYS:
    for path in glob.glob(os.path.join(glob.escape(folder), f"*{array}.npy")):
      start = path.removesuffix(f"{array}.npy")
      if not os.path.basename(start) or start.endswith("-"):
        starts.add(start)
  return sorted(starts)


def open_pair(start: str) -> tuple[np.ndarray, np.ndarray]:
  """Maps the dataset index and the dataset sample index of a pair.

  Raises:
    MMapError: if a file is missing or no such array.
  """
  arrays = []
  for path, kind in zip(_paths(start), (np.int16, np.int64), strict=True):
    if not os.path.isfile(path):
      raise MMapFileNotFoundError(f"{path} is missing; draw the blend again.")
    try:
      arrays.append(cache.map_array(path))
    except cache.StaleIndexError as error:
      raise MMapError(f"{error}; draw the blend again.") from error
    if arrays[-1].dtype != kind or arrays[-1].shape != (len(arrays[0]),):
      raise MMapError(
          f"{path} is {arrays[-1].dtype.name}{list(arrays[-1].shape)}; expected {np.dtype(kind).name}[{len(arrays[0])}]."
      )
  return arrays[0], arrays[1]


def _paths(start: str) -> tuple[str, ...]:
  return tuple(f"{start}{array}.npy" for array in blending.ARRAYS)


def description(start: str) -> dict[str, Any] | None:
  """Returns what Megatron says beside a pair of its own."""
  path = start + "description.txt"
  return orders.read_json(path) if os.path.isfile(path) else None


def check(start: str, weights: list[float] | None) -> dict[str, Any]:
  """Checks a pair: each dataset's samples are drawn in turn and exist, and, with weights known, every draw is right.

  Args:
    start: see `pairs_in`.
    weights: of the datasets, those of weight 0 included; None if only Megatron's description may name them.
  """
  facts: dict[str, Any] = {"file": _paths(start)[0], "draws": 0, "datasets": 0, "weights": None, "problems": []}
  try:
    arrays = open_pair(start)
    facts["draws"] = len(arrays[0])
    content = description(start)
    counts, place = count(arrays)
    facts |= {"datasets": len(counts), "counts": counts}
    if place is not None:
      facts["problems"].append(
          f"{_paths(start)[1]}: draw {place:,} is sample {int(arrays[1][place])} of dataset {int(arrays[0][place])}; "
          "expected the next one that was not drawn; draw the blend again."
      )
    facts["problems"] += _too_short(start, counts, content)
    request = _request(start, content, weights, len(arrays[0]))
    if request is not None:
      facts["weights"] = request.weights.tolist()
      facts["problems"] += _wrong_draw(start, arrays, request)
    facts["problems"] += _misnamed(start, content)
  except (MMapError, OSError) as error:
    facts["problems"].append(console.sentence(error))
  return facts


def _misnamed(start: str, content) -> list[str]:
  """Returns a problem if Megatron's description is not the one that its name is the checksum of."""
  return [] if content is None else misnamed(start + "description.txt")


def misnamed(path: str) -> list[str]:
  """Returns a problem if one of Megatron's descriptions is not the text whose MD5 checksum its name begins with."""
  with open(path, "rb") as file:
    digest = hashlib.md5(file.read(), usedforsecurity=False).hexdigest()
  found = os.path.basename(path)[: len(digest)]
  if found == digest:
    return []
  return [f"{path} was changed: the name of what it says begins with {digest}; build it again."]


def count(arrays) -> tuple[list[int], int | None]:
  """Returns how often each dataset is drawn, and the first draw that is not its dataset's next sample, or None."""
  datasets, samples = arrays
  counts = np.zeros(1, np.int64)
  for first in range(0, len(datasets), _PIECE):
    piece, drawn = datasets[first : first + _PIECE], samples[first : first + _PIECE]
    if int(piece.min()) < 0:
      return counts.tolist(), first + int(np.argmax(piece < 0))
    here = np.bincount(piece, minlength=len(counts))
    before = np.zeros(len(here), np.int64)
    before[: len(counts)] = counts
    order = np.argsort(piece, kind="stable")
    starts = np.cumsum(here) - here
    expected = np.empty(len(piece), np.int64)
    expected[order] = np.arange(len(piece)) - np.repeat(starts, here) + np.repeat(before, here)
    wrong = drawn != expected
    if wrong.any():
      return (before + here).tolist(), first + int(np.argmax(wrong))
    counts = before + here
  return counts.tolist(), None


def _too_short(start: str, counts: list[int], content) -> list[str]:
  """Returns a problem for each child whose indices have fewer samples than are drawn from it."""
  problems = []
  for number, (drawn, available) in enumerate(zip(counts, _available(start, content), strict=False)):
    if available is not None and drawn > available:
      problems.append(
          f"{_paths(start)[0]}: {drawn:,} samples are drawn from dataset {number}, whose indices have {available:,}; "
          "build them for more."
      )
  return problems


def _available(start: str, content) -> list[int | None]:
  """Returns the samples that each child's indices have; None where they are not in the folder."""
  return [None if child is None else len(child.arrays()[2]) for child in children(start, content)]


def children(start: str, content: dict[str, Any] | None = None) -> list[orders.Order | None]:
  """Returns the order of each child of a pair, the longest where there are several; None where there is none.

  They lie in the folders beside a pair with fixed names, and in the same folder as Megatron's.
  """
  folder, content = os.path.dirname(start), content or description(start)
  if content is None:
    return [_longest(_orders_in(child)) for child in child_folders(folder)]
  found = _orders_in(folder)
  try:
    return [_longest([order for order in found if order.metadata == child]) for child in content["datasets"]]
  except (KeyError, TypeError) as error:
    raise orders.damaged(start + "description.txt", error) from error


def _orders_in(folder: str) -> list[orders.Order]:
  return [orders.open_order(folder, name) for name in orders.names_in(folder)]


def _longest(found: list[orders.Order]) -> orders.Order | None:
  return max(found, key=lambda order: len(order.arrays()[2]), default=None)


def first_other(a, b, ends: list[int | None]) -> int | None:
  """Returns the first draw of two pairs that gives another sample, or None.

  Args:
    ends: for each dataset, its first sample that differs between the two blends, or None.
  """
  common = min(len(a[0]), len(b[0]))
  never = np.iinfo(np.int64).max
  limits = np.array([never if end is None else end for end in ends] + [never] * (blending.MAX_DATASETS - len(ends)))
  for first in range(0, common, _PIECE):
    piece = slice(first, min(first + _PIECE, common))
    other = (a[0][piece] != b[0][piece]) | (a[1][piece] != b[1][piece]) | (a[1][piece] >= limits[a[0][piece]])
    if other.any():
      return first + int(np.argmax(other))
  return None if len(a[0]) == len(b[0]) else common


def _request(start: str, content, weights: list[float] | None, size: int) -> blending.BlendRequest | None:
  """Returns the blend that a pair must be, or None if nothing says its weights."""
  if content is None:
    return None if weights is None else blending.weighted_blend([weight for weight in weights if weight], size)
  try:
    blending.normalized(content["weights"])  # refuses what is no weight
    if content["size"] is None:
      return blending.whole_blend([int(weight) for weight in content["weights"]], None)
    return blending.BlendRequest(np.array(content["weights"], np.float64), int(content["size"]))
  except (KeyError, TypeError, ValueError, OverflowError) as error:
    raise orders.damaged(start + "description.txt", error) from error


def _wrong_draw(start: str, arrays, request: blending.BlendRequest) -> list[str]:
  if request.size != len(arrays[0]):
    return [f"{_paths(start)[0]} has {len(arrays[0]):,} draws; expected {request.size:,}; draw the blend again."]
  position, _ = blending.first_difference(request, arrays)
  if position is None:
    return []
  found, expected = (int(arrays[0][position]), int(arrays[1][position])), _draw_at(request, position)
  return [
      f"{_paths(start)[0]}: draw {position:,} is sample {found[1]} of dataset {found[0]}; expected sample {expected[1]} "
      f"of dataset {expected[0]}; draw the blend again."
  ]


def _draw_at(request: blending.BlendRequest, position: int) -> tuple[int, int]:
  """Returns the dataset of a draw, and the sample there."""
  draws = request.draws()
  while True:
    pair = tuple(np.empty(min(_PIECE, position + 1), kind) for kind in (np.int16, np.int64))
    draws.next(*pair)
    position -= len(pair[0])
    if position < 0:
      return int(pair[0][-1]), int(pair[1][-1])
