# SPDX-License-Identifier: Apache-2.0
"""Index files that Megatron-LM wrote (`--data-cache-path`): found by their descriptions, and checked. NumPy only.

Each order has a `<md5>-GPTDataset-<split>-description.txt`, JSON with the dataset's path and the settings, and its arrays
beside it; each blend a `<md5>-BlendedDataset-<split>-description.txt`. The names cover paths and settings and not the
content of the dataset, so before the first use the arrays are built again and compared; `Stamps` remember it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
import dataclasses
import functools
import json
import os
from typing import Any

import numpy as np

from maxtext.input_pipeline import _mmap_guard
from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline._mmap_files import MMapError

PAIR = ("dataset_index", "dataset_sample_index")
_DESCRIPTION = "description.txt"
_PIECE = 1 << 20  # entries that are compared at a time
_MOST_BYTES = 1 << 24  # of a description; that of a blend of thousands of datasets has a few million


@dataclasses.dataclass(frozen=True)
class Candidate:
  """What one description file says.

  Attributes:
    folder: that it lies in.
    start: its name without `-description.txt`.
    content: its JSON.
  """

  folder: str
  start: str
  content: dict[str, Any]

  @property
  def path(self) -> str:
    return os.path.join(self.folder, f"{self.start}-{_DESCRIPTION}")

  def array_paths(self, names: Iterable[str]) -> tuple[str, ...]:
    return tuple(os.path.join(self.folder, f"{self.start}-{name}.npy") for name in names)

  @property
  def dataset(self) -> str:
    """Path of the dataset where Megatron read it; older versions call it `path_prefix`."""
    return _dataset_path(self.content)


@dataclasses.dataclass(frozen=True)
class Found:
  """What a folder holds of Megatron's for an order or a blend.

  Attributes:
    paths: the arrays' files, or None.
    reason: with `paths` None, which file of Megatron's comes nearest and in what it differs, a sentence without a stop;
      "" if the folder has nothing of Megatron's that could be meant.
  """

  paths: tuple[str, ...] | None
  reason: str = ""


def _dataset_path(content: dict[str, Any]) -> str:
  return str(content.get("dataset_path") or content.get("path_prefix") or "")


def _last_component(path: str) -> str:
  return path.replace("\\", "/").rstrip("/").rpartition("/")[2]


def is_description(name: str) -> bool:
  """Whether a file name is that of one of Megatron's descriptions."""
  return name.endswith(f"-{_DESCRIPTION}")


def _candidates(folder: str) -> tuple[Candidate, ...]:
  """Reads the descriptions of a folder, once while no file is added: every child of a blend asks for them."""
  try:
    return _read_candidates(folder, tuple(sorted(filter(is_description, os.listdir(folder)))))
  except OSError:
    return ()


@functools.lru_cache(maxsize=8)
def _read_candidates(folder: str, names: tuple[str, ...]) -> tuple[Candidate, ...]:
  return tuple(found for name in names if (found := _read_candidate(folder, name)) is not None)


def _read_candidate(folder: str, name: str) -> Candidate | None:
  """Reads a description; None for a file that is none."""
  try:
    with open(os.path.join(folder, name), encoding="utf-8") as file:
      content = json.loads(file.read(_MOST_BYTES))
  except (OSError, ValueError, RecursionError):
    return None
  start = name.removesuffix(f"-{_DESCRIPTION}")
  return Candidate(folder, start, content) if isinstance(content, dict) else None


# The indices of one dataset.


def find_index(folder: str, request: cache.IndexRequest, description: cache.IndexDescription, prefix: str) -> Found:
  """Finds Megatron's files of an order, by their descriptions and by the arrays' dtypes and shapes.

  Args:
    folder: Megatron's cache directory.
    request: the order's settings.
    description: what its arrays must look like.
    prefix: the dataset; it may lie elsewhere than Megatron read it, under the same name.
  """
  of_datasets = [found for found in _candidates(folder) if str(found.content.get("class", "")).endswith("GPTDataset")]
  name = _last_component(prefix)
  named = [found for found in of_datasets if _last_component(found.dataset) == name]
  named.sort(key=lambda found: (-_shared_end(found.dataset, prefix), found.start))
  nearest: list[tuple[int, str]] = []
  for found in named:
    differences = list(_differences(found, request, description))
    if not differences:
      return Found(found.array_paths(cache.ARRAYS))
    nearest.append((len(differences), f"{found.path} {differences[0]}"))
  if nearest:
    return Found(None, min(nearest, key=lambda entry: entry[0])[1])
  if of_datasets:
    others = sorted({_last_component(found.dataset) for found in of_datasets})
    return Found(None, f"{folder} holds indices of {', '.join(others[:3])} and not of {name}")
  return Found(None)


def _shared_end(path: str, other: str) -> int:
  """Components that two paths share at their ends: of several datasets of one name, the likelier one."""
  pairs = zip(reversed(path.split("/")), reversed(other.split("/")), strict=False)
  count = 0
  for one, two in pairs:
    if one != two:
      break
    count += 1
  return count


def _differences(found: Candidate, request: cache.IndexRequest, description: cache.IndexDescription) -> Iterator[str]:
  """Yields in what a description, or an array beside it, is not of the order; the weightiest first."""
  content = found.content
  wanted = {"sequence_length": request.seq_length, "random_seed": request.seed}
  wanted["add_extra_token_to_sequence"] = bool(request.add_extra_token)
  if content.get("index_split") == "valid":
    wanted["drop_last_partial_validation_sequence"] = True
  for field, value in wanted.items():
    there = content.get(field, value)  # versions differ in what they write; the arrays decide in the end
    if there != value:
      yield f"has {field} {there}, and this run asks for {value}"
  sequences = sum(fact["sequences"] for fact in description.facts)
  bounds = _bounds(content, sequences)
  if bounds != (description.begin, description.end):
    part = f"is of {_range(bounds)} of {sequences} sequences (split {content.get('split')}, {content.get('index_split')})"
    yield f"{part}, and this run reads {description.begin} to {description.end}"
  samples = content.get("num_samples")
  epochs = _epochs(samples, request, description)
  if epochs != (description.plan.num_epochs, description.plan.separate_last_epoch):
    yield (
        f"has num_samples {samples}, which is {_plan(epochs)}, and this run's {_asked(request)} are "
        f"{_plan((description.plan.num_epochs, description.plan.separate_last_epoch))}"
    )
  for name, path in zip(cache.ARRAYS, found.array_paths(cache.ARRAYS), strict=True):
    problem = _array_problem(path, *description.expected()[name])
    if problem:
      yield f"has beside it a {name} that {problem}"


def _bounds(content: dict[str, Any], sequences: int) -> tuple[int, int] | None:
  """Returns the range of sequences that Megatron used, or None if the description does not tell."""
  part = content.get("index_split", "train")
  number = utils.SPLIT_NAMES.index(part) if part in utils.SPLIT_NAMES else None
  matrix, text = content.get("split_matrix"), content.get("split")
  try:
    if matrix is not None and number is not None:
      begin, end = (int(round(bound * float(sequences))) for bound in matrix[number])
      return begin, end
    if text and number is not None:
      return utils.parse_split_range(str(text), number, sequences)
  except (TypeError, ValueError, LookupError, OverflowError):
    return None
  return (0, sequences) if number is not None else None


def _range(bounds: tuple[int, int] | None) -> str:
  return f"{bounds[0]} to {bounds[1]}" if bounds else "an unknown part"


def _epochs(samples: Any, request: cache.IndexRequest, description: cache.IndexDescription) -> tuple[int, bool] | None:
  """Returns the epochs of a number of samples, and whether the last is apart; None if there is no such order."""
  if samples is not None and type(samples) is not int:
    return None
  try:
    plan = utils.plan_epochs(
        description.tokens_per_epoch, request.seq_length, samples, 1 if samples is None else None, request.add_extra_token
    )
  except MMapError:
    return None
  return plan.num_epochs, plan.separate_last_epoch


def _plan(epochs: tuple[int, bool] | None) -> str:
  if epochs is None:
    return "no order of this dataset"
  count, apart = epochs
  return f"{count} epoch{'s' if count != 1 else ''}{' with the last shuffled apart' if apart else ''}"


def _asked(request: cache.IndexRequest) -> str:
  return f"{request.num_samples} samples" if request.num_samples is not None else f"{request.num_epochs} whole epochs"


def _array_problem(path: str, dtype: str, shape: tuple[int, ...]) -> str:
  """Says in what a file is not an array of this dtype and shape; "" if it is."""
  try:
    array = cache.map_array(path)
  except FileNotFoundError:
    return "is missing"
  except (cache.StaleIndexError, OSError) as error:
    return f"cannot be used ({error})"
  if (array.dtype.str, array.shape) != (dtype, shape):
    return f"is {array.dtype.str}{list(array.shape)} where {dtype}{list(shape)} is expected"
  return ""


def load_index(
    folder: str, dataset, request: cache.IndexRequest, description: cache.IndexDescription, stamps: cache.Stamps
) -> tuple[tuple[str, ...], cache.Triplet] | None:
  """Maps Megatron's files of an order, after a check of every value unless a stamp vouches for it.

  Args:
    folder: Megatron's cache directory.
    dataset: ShardedDataset; Megatron has no orders over several shards.
    request, description: the order.
    stamps: of the folder.

  Returns:
    Paths and arrays, or None if the folder has nothing of Megatron's that could be meant.

  Raises:
    StaleIndexError: if it has, and this is not the order; the message gives file and difference.
    OSError: if a file cannot be read, or was truncated while it was checked.
  """
  if len(dataset.shards) != 1:
    return None
  found = find_index(folder, request, description, dataset.prefixes[0])
  if found.paths is None:
    if found.reason:
      raise cache.StaleIndexError(found.reason)
    return None
  arrays = tuple(map(cache.map_array, found.paths))
  try:
    records = [stamps.get(path) for path in found.paths]
    if not all(record and record.get("order") == description.name for record in records):
      stats = [cache.stat_of(path) for path in found.paths]
      check_content(found.paths, arrays, dataset, request, description)
      for path, stat in zip(found.paths, stats, strict=True):
        stamps.put(path, stat, order=description.name)
  finally:
    _mmap_guard.check()
  return found.paths, arrays


def check_content(
    paths: Sequence[str],
    arrays: cache.Triplet,
    dataset,
    request: cache.IndexRequest,
    description: cache.IndexDescription,
) -> None:
  """Builds an order again, an array at a time, and compares.

  Args:
    paths: of the arrays, for the message.
    arrays: document, sample and shuffle index.
    dataset: see `_mmap_index_cache.open_dataset`.
    request, description: the order.

  Raises:
    StaleIndexError: at the first array that differs, with the first position.
  """
  rebuilt = cache.iter_description(dataset, request, description)
  for path, array, (_, expected) in zip(paths, arrays, rebuilt, strict=True):
    position = first_difference(array, expected)
    if position is not None:
      there, here = (_entry(values, position) for values in (array, expected))
      raise cache.StaleIndexError(
          f"{path} was not built from this dataset: position {position} is {there}, and the dataset gives {here}"
      )


def first_difference(array: np.ndarray, expected: np.ndarray) -> int | None:
  """Returns the first row in which two arrays differ, or None; the longer one differs where the other ends."""
  shared = min(len(array), len(expected))
  for first in range(0, shared, _PIECE):
    last = min(first + _PIECE, shared)
    differs = array[first:last] != expected[first:last]
    if differs.any():
      rows = differs if differs.ndim == 1 else differs.any(axis=1)
      return first + int(np.argmax(rows))
  return None if len(array) == len(expected) else shared


def _entry(array: np.ndarray, position: int) -> Any:
  return array[position].tolist() if position < len(array) else "missing"


# The pair of a blend.


def find_blend(
    folder: str,
    split: str,
    weights: Sequence[float],
    size: int,
    sizes: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
) -> Found:
  """Finds Megatron's pair of a blend by its description; what the pair holds is for the caller to check.

  Args:
    folder: Megatron's cache directory.
    split: train, valid or test.
    weights: of the datasets, of sum 1, as the draws use them.
    size: draws that are needed; Megatron's pair may have more, since it rounds each share up.
    sizes: of an exhaustive blend, how often each dataset is drawn; else None.
    names: paths of the datasets, of which the last components must be Megatron's; None: not looked at.
  """
  of_blends = [found for found in _candidates(folder) if found.content.get("class") == "BlendedDataset"]
  nearest: list[tuple[int, str]] = []
  fitting: list[tuple[int, Candidate]] = []
  for found in of_blends:
    differences = list(_blend_differences(found, split, weights, size, sizes, names))
    if differences:
      nearest.append((len(differences), f"{found.path} {differences[0]}"))
    else:
      fitting.append((found.content.get("size") or 0, found))
  if fitting:
    _, chosen = min(fitting, key=lambda entry: (entry[0], entry[1].start))  # the shortest that is long enough
    return Found(chosen.array_paths(PAIR))
  return Found(None, min(nearest, key=lambda entry: entry[0])[1] if nearest else "")


def _blend_differences(found: Candidate, split, weights, size, sizes, names) -> Iterator[str]:
  """Yields in what the description of a pair, or a file beside it, is not the blend."""
  content = found.content
  if content.get("split", split) != split:
    yield f"is of the {content['split']} part, and this blend is of the {split} part"
  children = content.get("datasets")
  if isinstance(children, list) and names is not None:
    theirs = [_last_component(_dataset_path(child)) for child in children if isinstance(child, dict)]
    ours = [_last_component(name) for name in names]
    if theirs != ours:
      yield f"is of the datasets {_some(theirs)}, and this blend is of {_some(ours)}"
  if sizes is not None:
    if content.get("size") is not None or content.get("weights") != list(sizes):
      there = f"has weights {_some(content.get('weights'))} and size {content.get('size')}"
      yield f"{there}, and this blend draws {_some(sizes)} and no more"
  else:
    if not _same_weights(content.get("weights"), weights):
      yield f"has weights {_some(content.get('weights'))}, and this blend has {_some(weights)}"
    if type(content.get("size")) is not int or content["size"] < size:
      yield f"has size {content.get('size')}, and this blend has {size} draws"
  for path in found.array_paths(PAIR):
    if not os.path.isfile(path):
      yield f"has no {os.path.basename(path)} beside it"


def _same_weights(there: Any, here: Sequence[float]) -> bool:
  """Whether weights are equal but for the last bits, in which versions of Megatron differ."""
  if not isinstance(there, list) or len(there) != len(here):
    return False
  try:
    return np.allclose(np.array(there, np.float64), np.asarray(here, np.float64), rtol=1e-12, atol=0)
  except (TypeError, ValueError, OverflowError):
    return False


def _some(values: Any) -> str:
  if not isinstance(values, Sequence) or isinstance(values, str):
    return str(values)
  return ", ".join(map(str, list(values)[:4])) + (", ..." if len(values) > 4 else "")
