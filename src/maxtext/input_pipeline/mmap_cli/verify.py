# SPDX-License-Identifier: Apache-2.0
"""`verify`: whether index files are what their dataset and settings give, value by value."""

from __future__ import annotations

import argparse
import os
from typing import Any

from maxtext.input_pipeline.mmap_cli import console

NAME = "verify"
SUMMARY = "check index files fully: provenance, checksums and every value"
DESCRIPTION = """\
Builds every order in a folder again, from the dataset and the settings that its files name, and compares all values.

Index files of this branch, of the release and of Megatron (--data-cache-path) can be checked. Each PREFIX is one dataset;
an order is checked against the one that it names. In the folder of a blend, the children's folders and the pair of
blend indices are checked too. The exit code is 1 if anything differs. Memory: about the size of the arrays of one order.
"""
EXAMPLE = """\
example (an order of one dataset, and the folder of a blend):
  mmap-index verify data/indices data/books
  mmap-index verify data/blend data/books data/code --weights 0.7,0.3
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add("folder", metavar="NPY_DIR", help="folder of index files, of a blend, or Megatron's cache")
  add("paths", nargs="+", metavar="PREFIX", help="dataset without .bin and .idx, or a folder of shards or several by ':'")
  add("--name", metavar="HASH", help="check only the orders whose name begins so")
  add("--weights", metavar="LIST", help="weights of a blend's datasets in the order given, such as 0.7,0.3")


def run(options: argparse.Namespace) -> dict:
  """Checks every order, and the blends; returns the facts and problems of each."""
  from maxtext.input_pipeline._mmap_files import MMapFileNotFoundError
  from maxtext.input_pipeline.mmap_cli import blends, candidates, orders

  datasets = candidates.open_all(options.paths)
  weights, root = _weights(options), orders.local(options.folder)
  chosen = [(root, name) for name in orders.names_in(root)]
  chosen += [(child, name) for child in blends.child_folders(root) for name in orders.names_in(child)]
  chosen = [(folder, name) for folder, name in chosen if name.startswith(options.name or "")]
  pairs = [] if options.name else blends.pairs_in(root)
  if not chosen and not pairs:
    raise MMapFileNotFoundError(f"{options.folder} holds no index files{' of that name' if options.name else ''}.")
  found = [_check(folder, name, datasets) for folder, name in chosen]
  blend = [blends.check(start, weights) for start in pairs]
  return {"orders": found, "blends": blend, "problems": [p for facts in (*found, *blend) for p in facts["problems"]]}


def _weights(options: argparse.Namespace) -> list[float] | None:
  """Returns the weights of `--weights`, one for each dataset."""
  from maxtext.input_pipeline._mmap_files import MMapError

  if options.weights is None:
    return None
  try:
    weights = [float(text) for text in options.weights.split(",")]
  except ValueError:
    weights = []
  if len(weights) != len(options.paths):
    raise MMapError(
        f"--weights {options.weights} is not a number for each of {len(options.paths)} datasets; give as many, with ','."
    )
  return weights


def _check(folder: str, name: str, datasets) -> dict[str, Any]:
  """Checks one order against the dataset that it names."""
  from maxtext.input_pipeline._mmap_files import MMapError
  from maxtext.input_pipeline.mmap_cli import orders

  facts: dict[str, Any] = {"folder": folder, "name": name, "maker": orders.UNKNOWN, "problems": [], "differences": []}
  try:
    order = orders.open_order(folder, name)
    facts |= {"maker": order.maker, "settings": order.settings}
    facts["samples"] = len(order.arrays()[2])
    if order.maker == orders.UNKNOWN:
      raise MMapError(
          f"{folder}/{name}: no -metadata.json and no -description.txt says what it was built from; build it again."
      )
    _compare(order, datasets, facts)
  except (MMapError, OSError) as error:
    facts["problems"].append(console.sentence(error))
  return facts


def _compare(order, datasets, facts) -> None:
  from maxtext.input_pipeline.mmap_cli import candidates, orders, rebuild

  candidate = candidates.choose(order, datasets)
  facts["dataset"] = candidate.text
  description = rebuild.describe(order, candidate.dataset)
  facts["problems"] += _provenance(order, description)
  facts["differences"] = rebuild.differences(order, candidate.dataset, description, console.progress_bars())
  facts["problems"] += [_difference_text(difference) for difference in facts["differences"]]
  if facts["differences"] and order.maker == orders.RELEASE:
    documents = sum(shard.header.num_documents for shard in candidate.dataset.shards)
    if documents != len(candidate.dataset):
      facts["problems"].append(
          f"{order.folder}/{order.name}: the release counts documents ({documents:,} here) and Megatron sequences "
          f"({len(candidate.dataset):,}), so its order of this dataset is not Megatron's; build the indices again."
      )


def _difference_text(difference: dict) -> str:
  where = "shape" if difference["position"] is None else f"entry {difference['position']:,}"
  return f"{difference['file']}: {where} is {difference['found']}; expected {difference['expected']}; build it again."


def _provenance(order, description) -> list[str]:
  """Returns the problems of what the files say beside the arrays."""
  from maxtext.input_pipeline import _mmap_index_cache as cache
  from maxtext.input_pipeline.mmap_cli import blends, orders

  if order.maker == orders.MEGATRON:
    return blends.misnamed(orders.description_path(order.folder, order.name)) + _other_types(order, description)
  path = cache.metadata_path(order.folder, order.name)
  if order.maker == orders.RELEASE:
    return _release_provenance(order, path) + _other_types(order, description)
  problems = []
  built, expected = order.metadata["built_from"], description.built_from
  for key in sorted({*built, *expected}):
    if built.get(key) != expected.get(key):
      problems.append(f"{path}: {key} is {built.get(key)}; expected {expected.get(key)}; build the indices again.")
  if order.name != description.name and not problems:
    problems.append(f"{path}: its name should be {description.name}; a run does not find it.")
  return problems + _recorded(order, path)


def _other_types(order, description) -> list[str]:
  """Returns the arrays of a type that a run, which finds these files by type and shape, does not expect."""
  problems = []
  for (name, (dtype, _)), array in zip(description.expected().items(), order.arrays(), strict=True):
    if array.dtype.str != dtype:
      problems.append(f"{order.paths[name]} holds {array.dtype.str}; expected {dtype}; build the indices again.")
  return problems


def _recorded(order, path: str) -> list[str]:
  """Returns the arrays whose type, shape or checksum is not the one that was recorded when they were written."""
  from maxtext.input_pipeline import _mmap_index_cache as cache
  from maxtext.input_pipeline._mmap_index_files import digest_of

  problems = []
  recorded = order.metadata.get("arrays")
  recorded = recorded if isinstance(recorded, dict) else {}
  for name, array in zip(cache.ARRAYS, order.arrays(), strict=True):
    record = recorded.get(name)
    found = {"dtype": array.dtype.str, "shape": list(array.shape), "xxh3_128": digest_of(array)}
    if record != found:
      problems.append(f"{order.paths[name]} is {found}; {os.path.basename(path)} says {record}; build the indices again.")
  return problems


def _release_provenance(order, path: str) -> list[str]:
  documents, _, draws = order.arrays()
  facts = (("hash", order.name), ("doc_index_len", len(documents)), ("total_samples", len(draws)))
  return [
      f"{path}: {key} is {order.metadata.get(key)!r}; expected {expected!r}; build the indices again."
      for key, expected in facts
      if order.metadata.get(key) != expected
  ]


def exit_code(facts: dict) -> int:
  return 1 if facts["problems"] else 0


def render(facts: dict) -> str:
  parts = []
  if facts["orders"]:
    header = ("order", "made by", "dataset", "samples", "result")
    parts.append(console.columns(header, map(_row, facts["orders"])))
  if facts["blends"]:
    header = ("blend", "datasets", "draws", "checked", "result")
    parts.append(console.columns(header, map(_blend_row, facts["blends"])))
  parts.append(console.table({"problems": facts["problems"] or "none"}))
  return "\n\n".join(parts)


def _row(facts: dict) -> tuple[str, ...]:
  samples = f"{facts['samples']:,}" if "samples" in facts else "-"
  name = os.path.join(facts["folder"], facts["name"])
  result = "differs" if facts["differences"] else "problem" if facts["problems"] else "verified"
  return name, facts["maker"], facts.get("dataset", "-"), samples, result


def _blend_row(facts: dict) -> tuple[str, ...]:
  checked = "every draw" if facts["weights"] else "counts only"
  result = "problem" if facts["problems"] else "verified"
  return facts["file"], str(facts["datasets"]), f"{facts['draws']:,}", checked, result
