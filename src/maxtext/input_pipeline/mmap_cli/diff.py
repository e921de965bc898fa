# SPDX-License-Identifier: Apache-2.0
"""`diff`: the first sample that two orders give differently, and why."""

from __future__ import annotations

import argparse
import os
from typing import Any

from maxtext.input_pipeline.mmap_cli import console

NAME = "diff"
SUMMARY = "find the first sample at which two index folders differ, and why"
DESCRIPTION = """\
Compares two orders sample by sample, from the first: of this branch, of the release or of Megatron (--data-cache-path).

A and B are folders with one order, <folder>/<name> (the beginning of a name is enough), or folders of blends. Only index
files are read: two samples are equal if they take the same tokens of the same sequences, in arrays of whatever type. The
reason comes from what is known of each order (seed, sequence length, samples asked for, epochs, split, dataset). The exit
code is 1 if they differ.
"""
EXAMPLE = """\
example (an order built here, and Megatron's cache):
  mmap-index diff data/indices megatron/cache
"""

_PIECE = 1 << 20  # samples between two looks at the progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("a", metavar="A", help="folder of index files, or one of its orders")
  parser.add_argument("b", metavar="B", help="another")


def run(options: argparse.Namespace) -> dict:
  """Compares the orders or blends that two paths name."""
  from maxtext.input_pipeline._mmap_files import MMapError
  from maxtext.input_pipeline.mmap_cli import blends, orders

  paths = (orders.local(options.a), orders.local(options.b))
  starts = [blends.pairs_in(path) if os.path.isdir(path) else [] for path in paths]
  if all(starts):
    return _compare_blends(paths, [_only(found, path) for found, path in zip(starts, paths, strict=True)])
  for path, start in zip(paths, starts, strict=True):
    if start and not orders.names_in(path):
      raise MMapError(f"{path} is the folder of a blend and the other is not; name one of its dataset_... folders.")
  return _compare(orders.find(paths[0]), orders.find(paths[1]))


def _only(starts: list[str], path: str) -> str:
  """Returns the one pair of a blend's folder; Megatron's training part where there are several parts."""
  from maxtext.input_pipeline._mmap_files import MMapError

  chosen = starts if len(starts) == 1 else [start for start in starts if start.endswith("-train-")]
  if len(chosen) != 1:
    raise MMapError(f"{path} holds {len(starts)} pairs of blend indices; keep the one that is meant in a folder.")
  return chosen[0]


def _compare(a, b) -> dict[str, Any]:
  from maxtext.input_pipeline.mmap_cli import orders

  arrays = [_checked(order) for order in (a, b)]
  position = _first_other(*arrays)
  sides = [
      {
          "order": os.path.join(order.folder, order.name),
          "maker": order.maker,
          "settings": order.settings,
          **orders.facts_of(order, own),
      }
      for order, own in zip((a, b), arrays, strict=True)
  ]
  facts: dict[str, Any] = {"identical": position is None, "position": position, "a": sides[0], "b": sides[1]}
  if position is not None:
    facts["samples"] = [_sample(own, position) for own in arrays]
    facts["reasons"] = _reasons(a, b, *sides)
    facts["unknown"] = _unknown(a, b)
  return facts


def _checked(order):
  from maxtext.input_pipeline import _mmap_index_cache as cache

  arrays = order.arrays()
  cache.check_ranges(arrays, 1 << 31, os.path.join(order.folder, order.name))
  return arrays


def _first_other(a, b) -> int | None:
  """Returns the first position at which two orders differ; the end of the shorter one is a difference."""
  from maxtext.input_pipeline.mmap_cli import order_kernels

  common, progress = min(len(a[2]), len(b[2])), console.progress_bars("samples")
  for first in range(0, common, _PIECE):
    last = min(first + _PIECE, common)
    position = order_kernels.first_other_sample(*a, *b, first, last)
    if position >= 0:
      return int(position)
    if progress:
      progress("comparing", last, common)
  return None if len(a[2]) == len(b[2]) else common


def _sample(arrays, position: int) -> list[dict[str, int]] | None:
  """Returns the pieces of a sample: sequences, the first token of the first and the last token of the last."""
  documents, samples, draws = arrays
  if position >= len(draws):
    return None
  sample = int(draws[position])
  (entry, offset), (last, end) = samples[sample].tolist(), samples[sample + 1].tolist()
  pieces = [{"sequence": int(sequence)} for sequence in documents[entry : last + 1]]
  pieces[0]["from"] = offset
  pieces[-1]["to"] = end
  return pieces


def _reasons(a, b, facts_a: dict, facts_b: dict) -> list[dict[str, Any]]:
  """Returns what is known of both orders and differs."""
  sides = []
  for order, facts in ((a, facts_a), (b, facts_b)):
    known = {key: value for key, value in order.settings.items() if value is not None}
    known.pop("num_epochs", None)
    sides.append({
        "seed": known.get("seed"),
        "sequence length": known.get("seq_length", facts["seq_length"]),
        "samples asked for": known.get("num_samples"),
        "epochs": facts["epochs"],
        "separate last epoch": facts["separate_last_epoch"],
        "split": known.get("split"),
        "part of the split": known.get("split_index"),
        "sequences used": facts["sequences"],
        "extra token": known.get("add_extra_token"),
        "samples": facts["samples"],
        **_origin(order),
    })
  return [
      {"what": key, "a": value, "b": sides[1].get(key)}
      for key, value in sides[0].items()
      if value is not None and sides[1].get(key) not in (None, value)
  ]


def _origin(order) -> dict[str, Any]:
  """Says what an order was built from, in a form that orders of the same kind share."""
  from maxtext.input_pipeline.mmap_cli import orders

  if order.maker == orders.BRANCH:
    return {"dataset (checksums)": [digest[:12] for digest in order.datasets], "shards": len(order.datasets)}
  if order.datasets:
    return {"dataset": sorted(os.path.basename(path.rstrip("/")) for path in order.datasets)}
  return {}


def _unknown(a, b) -> list[str]:
  """Returns the settings that one of two orders does not name."""
  names = ("seed", "seq_length", "split")
  return [name for name in names if a.settings.get(name) is None or b.settings.get(name) is None]


# Blends.


def _compare_blends(paths, starts: list[str]) -> dict[str, Any]:
  """Compares two blends: which child each sample comes from, and the children's own samples."""
  from maxtext.input_pipeline.mmap_cli import blends

  pairs = [blends.open_pair(start) for start in starts]
  children = [blends.children(start) for start in starts]
  compared = [None if None in both else _compare(*both) for both in zip(*children, strict=False)]
  position = blends.first_other(pairs[0], pairs[1], [None if child is None else child["position"] for child in compared])
  sides = [_blend_facts(path, pair) for path, pair in zip(paths, pairs, strict=True)]
  facts: dict[str, Any] = {"identical": position is None, "position": position, "a": sides[0], "b": sides[1]}
  facts["children"] = compared
  if position is not None:
    facts["samples"] = [_draw(pair, position) for pair in pairs]
    differ = [what for what in ("samples", "datasets", "shares") if sides[0][what] != sides[1][what]]
    facts["reasons"] = [{"what": what, "a": sides[0][what], "b": sides[1][what]} for what in differ]
  return facts


def _blend_facts(path: str, pair) -> dict[str, Any]:
  from maxtext.input_pipeline.mmap_cli import blends

  counts, _ = blends.count(pair)
  shares = [round(count / len(pair[0]), 4) for count in counts]
  return {"order": path, "samples": len(pair[0]), "datasets": len(counts), "shares": shares}


def _draw(pair, position: int) -> dict[str, int] | None:
  if position >= len(pair[0]):
    return None
  return {"dataset": int(pair[0][position]), "sample": int(pair[1][position])}


def exit_code(facts: dict) -> int:
  return 0 if facts["identical"] else 1


def render(facts: dict) -> str:
  samples = [facts[side]["samples"] for side in "ab"]
  if facts["identical"]:
    return f"identical ({samples[0]:,} samples)"
  position = facts["position"]
  places: dict[str, Any] = {"first difference": f"sample {position:,} (of {samples[0]:,} in A and {samples[1]:,} in B)"}
  for side, sample in zip("AB", facts["samples"], strict=True):
    places[f"  in {side}"] = _sample_text(sample)
  parts = [console.table(places)]
  if facts["reasons"]:
    rows = [(reason["what"], _short(reason["a"]), _short(reason["b"])) for reason in facts["reasons"]]
    parts.append(console.columns(("reason", "A", "B"), rows))
  elif "children" not in facts:
    unknown = ", ".join(facts["unknown"])
    cause = f"no file says: {unknown}" if unknown else "all settings agree, so one is damaged (see verify)"
    parts.append(f"reason: {cause}")
  for number, child in enumerate(facts.get("children", ())):
    if child is not None and not child["identical"]:
      parts.append(f"dataset {number}: " + render(child))
  return "\n\n".join(parts)


def _sample_text(sample) -> str:
  if sample is None:
    return "there is none"
  if isinstance(sample, dict):
    return f"sample {sample['sample']:,} of dataset {sample['dataset']}"
  if len(sample) == 1:
    piece = sample[0]
    return f"sequence {piece['sequence']:,}, tokens {piece['from']:,} to {piece['to']:,}"
  first, *between, last = sample
  middle = "".join(f", {piece['sequence']:,}" for piece in between[:5]) + (", ..." if len(between) > 5 else "")
  begin = f"sequence {first['sequence']:,} from token {first['from']:,}"
  return f"{begin}{middle}, {last['sequence']:,} to token {last['to']:,}"


def _short(value) -> str:
  text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
  return text if len(text) <= 40 else text[:37] + "..."
