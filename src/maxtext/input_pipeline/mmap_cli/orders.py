# SPDX-License-Identifier: Apache-2.0
"""The orders that a folder of index files holds: who made them, from what, and with which settings. NumPy only.

An order is three arrays. Files of this branch say in `<name>-metadata.json` what they were built from, the release's
name paths and settings there, and Megatron's have `<name>-description.txt` and names that end in the part of the split.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

import numpy as np

from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline._mmap_files import MMapError, MMapFileNotFoundError

BRANCH, RELEASE, MEGATRON, UNKNOWN = "this branch", "the release", "Megatron", "unknown"
_ENDS = (*(f"-{array}.npy" for array in cache.ARRAYS), "-metadata.json", "-description.txt")

_PAIR_ENDS = ("dataset_index.npy", "dataset_sample_index.npy")


@dataclasses.dataclass(frozen=True)
class Order:
  """One order of a folder.

  Attributes:
    folder, name: the files are `<folder>/<name>-document_index.npy` and so on.
    maker: BRANCH, RELEASE, MEGATRON or UNKNOWN.
    settings: those known of seed, seq_length, num_samples (asked for), num_epochs, separate_last_epoch, split,
      split_index and add_extra_token; for comparison by value.
    datasets: what the order says it was built from: checksums of `.idx` files for BRANCH, paths for the others.
    metadata: the whole content of the JSON; empty if there is none.
  """

  folder: str
  name: str
  maker: str
  settings: dict[str, Any]
  datasets: tuple[Any, ...]
  metadata: dict[str, Any]

  @property
  def paths(self) -> dict[str, str]:
    return cache.array_paths(self.folder, self.name)

  def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Maps the document, sample and shuffle index.

    Raises:
      MMapError: if a file is missing, damaged, or has another shape than such an array.
    """
    arrays = []
    for path in self.paths.values():
      if not os.path.isfile(path):
        raise MMapFileNotFoundError(f"{path} is missing; build the indices again.")
      try:
        arrays.append(cache.map_array(path))
      except cache.StaleIndexError as error:
        raise MMapError(f"{error}; build the indices again.") from error
    documents, samples, draws = arrays
    if documents.ndim != 1 or samples.ndim != 2 or samples.shape[1] != 2 or draws.ndim != 1:
      raise MMapError(
          f"{self.folder}/{self.name}: the arrays have shapes {documents.shape}, {samples.shape} and {draws.shape}; "
          "expected (D,), (samples + 1, 2) and (samples,)."
      )
    return documents, samples, draws

  def request(self) -> cache.IndexRequest:
    """Returns the request that builds the order.

    Raises:
      MMapError: if a setting is not known.
    """
    settings = self.settings
    missing = [key for key in ("seed", "seq_length") if settings.get(key) is None]
    samples, epochs = settings.get("num_samples"), settings.get("num_epochs")
    if samples is None and epochs is None:
      missing.append("num_samples or num_epochs")
    if missing:
      raise MMapError(f"{self.folder}/{self.name}: nothing says {', '.join(missing)}, so it cannot be built again.")
    return cache.IndexRequest(
        settings["seq_length"],
        settings["seed"],
        samples,
        None if samples is not None else epochs,
        settings.get("split") or "",
        settings.get("split_index") or 0,
        settings.get("add_extra_token", 1),
    )


def local(folder: str) -> str:
  """Returns a folder itself, or for a URL a copy of its index files on this machine."""
  if "://" not in folder:
    return folder
  from maxtext.input_pipeline import _mmap_remote as remote

  return cache.local_folder(folder, [name for name in remote.list_names(folder) if name.endswith((*_ENDS, *_PAIR_ENDS))])


def names_in(folder: str) -> list[str]:
  """Returns the names of the orders of a folder, also of those that lack a file.

  Raises:
    MMapFileNotFoundError: if the folder is not there.
  """
  if not os.path.isdir(folder):
    raise MMapFileNotFoundError(f"{folder} is not a folder; expected one with index files.")
  found = {file.removesuffix(end) for file in os.listdir(folder) for end in _ENDS if file.endswith(end)}
  return sorted(name for name in found if "BlendedDataset" not in name and not name.startswith("."))


def description_path(folder: str, name: str) -> str:
  return os.path.join(folder, f"{name}-description.txt")


def open_order(folder: str, name: str) -> Order:
  """Reads what an order says of itself.

  Raises:
    MMapError: if its JSON is damaged.
  """
  description, metadata = description_path(folder, name), cache.metadata_path(folder, name)
  if os.path.isfile(description):
    return _megatron(folder, name, read_json(description))
  if not os.path.isfile(metadata):
    return Order(folder, name, UNKNOWN, {}, (), {})
  content = read_json(metadata)
  return (_branch if "built_from" in content else _release)(folder, name, content)


def read_json(path: str) -> dict[str, Any]:
  """Reads a JSON object; raises MMapError if the file holds none."""
  try:
    with open(path, encoding="utf-8") as file:
      content = json.load(file)
  except (ValueError, RecursionError) as error:
    raise MMapError(f"{path} is not JSON ({error}); build the indices again.") from error
  if not isinstance(content, dict):
    raise MMapError(f"{path} holds a {type(content).__name__}; expected an object; build the indices again.")
  return content


def _branch(folder: str, name: str, content: dict[str, Any]) -> Order:
  try:
    built = content["built_from"]
    settings = {
        "seed": int(built["seed"]),
        "seq_length": int(built["sequence_length"]),
        "num_epochs": int(built["num_epochs"]),
        "separate_last_epoch": bool(built["separate_last_epoch"]),
        "split": str(built["split"]),
        "split_index": int(built["split_index"]),
        "add_extra_token": int(built["add_extra_token"]),
    }
    datasets = tuple(str(dataset["digest"]) for dataset in built["datasets"])
    counts = [int(dataset[key]) for dataset in built["datasets"] for key in ("sequences", "tokens")]
    if not counts:
      raise ValueError("no dataset")
  except (KeyError, TypeError, ValueError, OverflowError) as error:
    raise damaged(cache.metadata_path(folder, name), error) from error
  return Order(folder, name, BRANCH, settings, datasets, content)


def _release(folder: str, name: str, content: dict[str, Any]) -> Order:
  names = {"num_samples": "num_samples_requested", "seq_length": "seq_length", "num_epochs": "num_epochs"}
  try:
    settings = {
        **{key: None if content[given] is None else int(content[given]) for key, given in names.items()},
        "seed": int(content["seed"]),
        "split": content["split"] or "",
        "split_index": int(content["split_index"]) if content["split"] else 0,
        "add_extra_token": int(content["add_extra_token"]),
    }
    datasets = tuple(map(str, content["input_paths"]))
  except (KeyError, TypeError, ValueError, OverflowError) as error:
    raise damaged(cache.metadata_path(folder, name), error) from error
  return Order(folder, name, RELEASE, settings, datasets, content)


def _megatron(folder: str, name: str, content: dict[str, Any]) -> Order:
  path = description_path(folder, name)
  try:
    samples, split = content["num_samples"], content["split"]
    settings = {
        "seed": int(content["random_seed"]),
        "seq_length": int(content["sequence_length"]),
        "num_samples": None if samples is None else int(samples),
        "num_epochs": 1 if samples is None else None,
        "split": split or "",
        "split_index": utils.SPLIT_NAMES.index(content["index_split"]) if split else 0,
        "add_extra_token": int(content.get("add_extra_token_to_sequence", True)),
    }
    datasets = (str(content.get("dataset_path") or content["path_prefix"]),)  # as older versions call it
  except (KeyError, TypeError, ValueError, OverflowError) as error:
    raise damaged(path, error) from error
  return Order(folder, name, MEGATRON, settings, datasets, content)


def damaged(path: str, error: Exception) -> MMapError:
  """The error for a JSON that lacks something or has it in another form."""
  return MMapError(f"{path} does not say what an order was built from ({type(error).__name__}: {error}); build it again.")


def find(path: str) -> Order:
  """Returns the order that a path names: a folder with one order, `<folder>/<name>`, or one of an order's files.

  Raises:
    MMapError: if there is none, or several could be meant.
  """
  path = local(path)
  if os.path.isdir(path):
    folder, names = path, names_in(path)
  else:
    folder, base = os.path.split(path)
    folder = folder or "."
    base = next((base.removesuffix(end) for end in _ENDS if base.endswith(end)), base)
    names = [name for name in names_in(folder) if name == base] or [n for n in names_in(folder) if n.startswith(base)]
  if not names:
    raise MMapFileNotFoundError(f"{path} holds no index files; give a folder with one order, or <folder>/<name>.")
  if len(names) > 1:
    raise MMapError(f"{path} holds {len(names)} orders ({', '.join(names[:3])}, ...); add the beginning of a name to it.")
  return open_order(folder, names[0])


def facts_of(order: Order, arrays: cache.Triplet) -> dict[str, Any]:
  """Returns what the arrays alone say of an order.

  Returns:
    `samples`; `sequences`, the range used; `epochs`; `separate_last_epoch`; `seq_length`, None if no sample lies within
    one sequence; and `dtypes` of the arrays.
  """
  documents, samples, draws = arrays
  begin = int(documents.min()) if len(documents) else 0
  end = int(documents.max()) + 1 if len(documents) else 0
  epochs = len(documents) // max(end - begin, 1)
  return {
      "samples": len(draws),
      "sequences": [begin, end],
      "epochs": epochs,
      "separate_last_epoch": epochs > 1 and _is_one_pass(documents[-(end - begin) :], begin),
      "seq_length": _sample_length(samples),
      "dtypes": [array.dtype.name for array in arrays],
  }


def _is_one_pass(documents: np.ndarray, begin: int) -> bool:
  """Whether every sequence is there once, as at the end of an order whose last epoch is shuffled apart."""
  seen = np.zeros(len(documents), bool)
  seen[documents - begin] = True
  return bool(seen.all())


def _sample_length(samples: np.ndarray) -> int | None:
  """Returns the tokens of a sample, from the first that begins and ends in one sequence."""
  step = 1 << 20
  for first in range(0, len(samples) - 1, step):
    rows = samples[first : first + step + 1]
    within = np.flatnonzero(rows[1:, 0] == rows[:-1, 0])
    if len(within):
      return int(rows[within[0] + 1, 1]) - int(rows[within[0], 1])
  return None
