# SPDX-License-Identifier: Apache-2.0
"""What `grain_train_files` and `grain_eval_files` say. Neither files nor Grain are touched."""

from __future__ import annotations

import math
from typing import NamedTuple

from maxtext.input_pipeline._mmap_files import MMapError
from maxtext.input_pipeline._mmap_index_utils import _normalize_weights, split_paths


class Mixture(NamedTuple):
  """The datasets that a key names.

  Attributes:
    entries: each as written, without its weight.
    weights: as written, or None where no entry has one.
    mixed: whether they are a blend, as Megatron has it: several, or one with a weight.
  """

  entries: tuple[str, ...]
  weights: tuple[float, ...] | None
  mixed: bool

  @property
  def used(self) -> list[int]:
    """Numbers of the entries that do not have weight 0."""
    return [number for number in range(len(self.entries)) if self.weights is None or self.weights[number] > 0]


def parse_mixture(text: str, key: str = "grain_train_files") -> Mixture:
  """Parses "entry", "entry,weight;entry,weight;..." or, to use each entry once and whole, "entry;entry;...".

  A comma belongs to the path where there is only one entry, and before the last comma elsewhere.

  Raises:
    MMapError: for a missing entry or weight, and for weights that are not finite, not negative, with a positive total.
  """
  if not text.replace(";", "").strip():
    raise MMapError(f"{key} is empty; expected the path of a Megatron dataset.")
  if ";" not in text:
    return Mixture((text.strip(),), None, False)
  parts = [part.strip() for part in text.split(";") if part.strip()]
  if not any("," in part for part in parts):
    return Mixture(tuple(parts), None, len(parts) > 1)
  entries, weights = zip(*(parse_weighted(part, number, key) for number, part in enumerate(parts)), strict=True)
  total = sum(weights)
  if not 0 < total < math.inf:
    raise MMapError(f"{key}: the weights add up to {total}; expected a positive finite total.")
  return Mixture(entries, weights, True)


def parse_weighted(part: str, number: int, key: str) -> tuple[str, float]:
  """Parses "entry,weight"."""
  entry, comma, text = part.rpartition(",")
  try:
    weight = float(text) if comma else math.nan
  except ValueError:
    weight = math.nan
  if not entry.strip() or not math.isfinite(weight) or weight < 0:
    raise MMapError(f"{key}: entry {number} is {part!r}; expected 'entry,weight' with a finite weight of 0 or more.")
  return entry.strip(), weight


def parse_npy_entry(entry: str, key: str = "grain_train_files") -> tuple[str, list[str]]:
  """Parses "npy_dir|path:path:..." to the index folder and the paths of the dataset's shards.

  Raises:
    MMapError: if a half is missing.
  """
  folder, bar, paths = (half.strip() for half in entry.partition("|"))
  if not bar or not folder or not paths or "|" in paths:
    raise MMapError(f"{key}: {entry!r} is not 'npy_dir|bin_prefix_or_directory', a folder for index files and a dataset.")
  try:
    return folder, split_paths(paths)
  except MMapError as error:
    raise MMapError(f"{key}: {error}") from None


# Of the released `_mmap_datasource`, for those who import it there.


def _parse_weighted_mixture(data_file_pattern: str, format_name: str) -> tuple[list[str], list[float]]:
  """Returns entries and normalised weights of "entry,weight;...", those of weight 0 left out.

  Unlike `parse_mixture`, a single entry has a weight too.
  """
  entries, weights = [], []
  for number, part in enumerate(data_file_pattern.split(";")):
    entry, comma, text = part.rpartition(",")
    try:
      weight = float(text)
    except ValueError:
      weight = math.nan
    for fault, found in (
        ("Malformed", not comma),
        ("Empty spec in", not entry.strip()),
        ("Invalid weight in", not math.isfinite(weight)),
        ("Negative weight in", weight < 0),
    ):
      if found:
        raise MMapError(f"{fault} {format_name} mixture entry {number}: {part!r} is not 'entry,weight' of 0 or more.")
    entries.append(entry.strip())
    weights.append(weight)
  if not 0 < sum(weights) < math.inf:
    raise MMapError(f"Total weight of {format_name} mixture is {sum(weights)}; expected a positive finite total.")
  kept = [pair for pair in zip(entries, _normalize_weights(weights), strict=True) if pair[1] > 0]
  return [entry for entry, _ in kept], [weight for _, weight in kept]
