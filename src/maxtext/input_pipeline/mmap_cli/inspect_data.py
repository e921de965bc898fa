# SPDX-License-Identifier: Apache-2.0
"""`inspect`: what is in datasets, and what is wrong with them."""

from __future__ import annotations

import argparse
import collections
from collections.abc import Iterator
import glob
import os
import struct
from typing import Any

from maxtext.input_pipeline.mmap_cli import console

NAME = "inspect"
SUMMARY = "say what is in datasets, and every problem found"
DESCRIPTION = """\
Says what each dataset holds and what all hold together: layout, sequences, documents, tokens, and how documents end.

The whole .idx is read and checked, and the last token of some documents. The exit code is 1 if there is a problem; a
dataset that cannot be read is one, and the others are still shown. Notes are things that a run copes with.
"""
EXAMPLE = """\
example (two datasets, and all in a folder):
  mmap-index inspect data/books:data/code data/web/ --eod-id 2 --vocab-size 32000
"""

_READ = 1 << 24  # bytes of .bin at a time


def add_arguments(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add("paths", nargs="+", metavar="PREFIX", help="dataset, with .idx or .bin or without; folder; several by ':'")
  add("--eod-id", type=console.not_negative, metavar="ID", help="token that should end documents; default: ask the data")
  add(
      "--documents",
      type=console.not_negative,
      default=1000,
      metavar="N",
      help="document ends to look at in each dataset, spread evenly; 0: all; default: %(default)s",
  )
  add(
      "--vocab-size",
      type=console.positive,
      metavar="V",
      help="look for ids outside 0 to V - 1; this reads the whole .bin, in pieces of 16 MiB",
  )


def run(options: argparse.Namespace) -> dict:
  """Looks at every dataset; returns facts of each, their sums, and the problems of all."""
  prefixes, problems = _find(console.split_paths(options.paths))
  datasets = []
  progress = console.progress_bars("B")
  from maxtext.input_pipeline._mmap_files import MMapError

  for prefix in prefixes:
    try:
      datasets.append(_look(prefix, options, progress))
    except (MMapError, OSError) as error:
      datasets.append({"prefix": prefix, "problems": [console.sentence(error)], "notes": []})
  problems += [problem for facts in datasets for problem in facts["problems"]]
  return {"datasets": datasets, "total": _total([facts for facts in datasets if "tokens" in facts]), "problems": problems}


def _find(paths: list[str]) -> tuple[list[str], list[str]]:
  """Returns the datasets that paths name, halves of a pair included, and a problem for each path that names none."""
  from maxtext.input_pipeline import _mmap_index_utils as utils
  from maxtext.input_pipeline._mmap_files import MMapError

  prefixes, problems = [], []
  for path in paths:
    if "://" not in path and os.path.isdir(path) and not os.path.exists(path + ".idx"):
      files = glob.glob(os.path.join(glob.escape(path), "*.idx")) + glob.glob(os.path.join(glob.escape(path), "*.bin"))
      found = sorted({os.path.splitext(file)[0] for file in files})
      if not found:
        problems.append(f"{path} has no .idx and no .bin files; give a dataset's path without suffix, or its folder.")
    elif "://" in path:
      try:
        found = utils.resolve_shard_prefixes([path])
      except (MMapError, OSError) as error:
        found = []
        problems.append(console.sentence(error))
    else:
      found = [os.path.splitext(path)[0] if path.endswith((".idx", ".bin")) and os.path.isfile(path) else path]
    prefixes += found
  return list(dict.fromkeys(prefixes)), problems


def _look(prefix: str, options: argparse.Namespace, progress: console.Progress | None) -> dict[str, Any]:
  """Returns the facts of one dataset; raises MMapError where its index or size is wrong."""
  from maxtext.input_pipeline._mmap_index_utils import iter_document_sizes
  from maxtext.input_pipeline._mmap_indexed_dataset import MMapIndexedDataset

  dataset = MMapIndexedDataset(prefix)
  head, found = dataset.header, dataset.scan()
  itemsize = head.dtype.itemsize
  empty = sum(int((lengths == 0).sum()) for lengths in iter_document_sizes(dataset))
  facts: dict[str, Any] = {
      "prefix": prefix,
      "dtype": head.dtype.name,
      "document_index": _document_index_form(dataset),
      "idx_bytes": dataset.idx_file.size,
      "bin_bytes": dataset.bin_file.size,
      "sequences": head.num_sequences,
      "documents": head.num_documents,
      "empty_documents": empty,
      "tokens": found.tokens,
      "longest": found.longest,
      "shortest": found.shortest,
      "sentence_split": found.sentence_split,
      "gap_bytes": found.end - found.tokens * itemsize,
      "stray_bytes": dataset.bin_file.size - found.end,
      "problems": [],
      "notes": [],
  }
  facts["ends"] = _ends(dataset, options.documents or head.num_documents, options.eod_id, facts)
  if not found.tokens:
    facts["problems"].append(f"{prefix}.idx has {head.num_sequences:,} sequences and 0 tokens; there is nothing to read.")
  if options.vocab_size and found.tokens:
    facts["ids"] = _ids(dataset, found, options.vocab_size, progress, facts)
  _note_layout(facts)
  return facts


def _document_index_form(dataset) -> str:
  """Returns which of its two forms the document index has: an entry more than documents, or as many."""
  from maxtext.input_pipeline._mmap_files import reading

  head = dataset.header
  path = dataset.idx_file.path
  with reading(path), open(path, "rb") as file:
    file.seek(head.lengths_at - 8)
    (entries,) = struct.unpack("<Q", file.read(8))
  return "documents" if entries == head.num_documents else "documents + 1"


def _ends(dataset, most: int, eod_id: int | None, facts) -> dict[str, Any]:
  """Counts how documents end; adds a problem if none ends with the EOD id that was named."""
  from maxtext.input_pipeline.mmap_cli import documents

  tokens = documents.last_tokens(dataset, most).tolist()
  common = collections.Counter(tokens).most_common(1)
  token, count = common[0] if common else (None, 0)
  ends: dict[str, Any] = {"documents": len(tokens), "most_common": token, "with_most_common": count}
  if eod_id is not None:
    ends |= {"eod_id": eod_id, "with_eod": tokens.count(eod_id)}
    if tokens and not ends["with_eod"]:
      facts["problems"].append(
          f"{facts['prefix']}: none of {len(tokens):,} documents ends with EOD {eod_id}, and {count:,} end with {token}; "
          "name the id that preprocessing wrote, or preprocess with --append-eod."
      )
  return ends


def _ids(dataset, found, vocab_size: int, progress, facts) -> dict[str, Any]:
  """Reads every token; adds a problem with the place of the first id outside the vocabulary."""
  import numpy as np

  low, high, outside, first, done = None, None, 0, None, 0
  itemsize = dataset.header.dtype.itemsize
  for position, tokens in _pieces(dataset, found):
    least, most = int(tokens.min()), int(tokens.max())
    low = least if low is None else min(low, least)
    high = most if high is None else max(high, most)
    if least < 0 or most >= vocab_size:
      bad = (tokens < 0) | (tokens >= vocab_size)
      outside += int(np.count_nonzero(bad))
      if first is None:
        at = int(np.argmax(bad))
        first = position + at * itemsize, int(tokens[at])
    done += tokens.nbytes
    if progress:
      progress(facts["prefix"] + ".bin", done, found.tokens * itemsize)
  ids: dict[str, Any] = {"vocab_size": vocab_size, "lowest": low, "highest": high, "outside": outside}
  if first is not None:
    byte, token = first
    row = int(np.searchsorted(dataset.pointers, byte, "right")) - 1
    ids["first_outside"] = {"sequence": row, "offset": (byte - int(dataset.pointers[row])) // itemsize, "id": token}
    facts["problems"].append(
        f"{facts['prefix']}.bin has {outside:,} ids outside 0 to {vocab_size - 1}, first {token} at token "
        f"{ids['first_outside']['offset']:,} of sequence {row:,}; use the vocabulary of the tokenizer that made the data."
    )
  return ids


def _pieces(dataset, found) -> Iterator[tuple[int, Any]]:
  """Yields the tokens of all sequences in bounded pieces, each with its first byte in `.bin`."""
  itemsize = dataset.header.dtype.itemsize
  spans = [(0, found.end)]
  if not found.contiguous:
    spans = ((int(start), int(size) * itemsize) for start, size in zip(dataset.pointers, dataset.sizes, strict=True))
  for start, size in spans:
    for first in range(start, start + size, _READ):
      yield first, dataset.read_bytes(first, min(_READ, start + size - first) // itemsize)


def _note_layout(facts) -> None:
  notes = facts["notes"]
  if facts["sentence_split"]:
    notes.append("documents have several sequences (--split-sentences); a run needs mmap_split_sentences=true")
  if facts["gap_bytes"] > 0:
    notes.append(f"{facts['gap_bytes']:,} bytes between sequences belong to none; they are ignored")
  if facts["gap_bytes"] < 0:
    notes.append(f"sequences share {-facts['gap_bytes']:,} bytes or more of the .bin")
  if facts["stray_bytes"]:
    notes.append(f"{facts['stray_bytes']:,} bytes after the last sequence; they are ignored")


def _total(datasets: list[dict]) -> dict[str, Any]:
  """Adds up the facts of the datasets that could be read."""
  names = ("sequences", "documents", "empty_documents", "tokens", "idx_bytes", "bin_bytes")
  total: dict[str, Any] = {name: sum(facts[name] for facts in datasets) for name in names}
  filled = [facts for facts in datasets if facts["sequences"]]
  return {
      "datasets": len(datasets),
      **total,
      "longest": max((facts["longest"] for facts in filled), default=0),
      "shortest": min((facts["shortest"] for facts in filled), default=0),
      "dtypes": sorted({facts["dtype"] for facts in datasets}),
  }


def exit_code(facts: dict) -> int:
  return 1 if facts["problems"] else 0


def render(facts: dict) -> str:
  readable = [dataset for dataset in facts["datasets"] if "tokens" in dataset]
  parts = []
  if len(readable) == 1:
    parts.append(console.table(_detail(readable[0])))
  elif readable:
    header = ("dataset", "dtype", "sequences", "documents", "empty", "tokens", "shortest", "longest", "ends", "notes")
    parts.append(console.columns(header, map(_row, readable)))
    parts.append(console.table(_sums(facts["total"])))
    notes = [f"{dataset['prefix']}: {note}" for dataset in readable for note in dataset["notes"]]
    if notes:
      parts.append(console.table({"notes": notes}))
  problems = facts["problems"]
  parts.append(console.table({"problems": problems or "none"}))
  return "\n\n".join(parts)


def _detail(facts: dict) -> dict[str, Any]:
  rows = {
      "dataset": facts["prefix"],
      "tokens": f"{facts['tokens']:,} ({facts['dtype']})",
      "sequences": f"{facts['sequences']:,} with {facts['shortest']:,} to {facts['longest']:,} tokens",
      "documents": f"{facts['documents']:,} ({facts['empty_documents']:,} empty)",
      "sentence-split": "yes" if facts["sentence_split"] else "no",
      "document ends": _ends_text(facts["ends"]),
      "document index": f"{facts['document_index']} entries",
      "bytes": f"{facts['bin_bytes']:,} (.bin), {facts['idx_bytes']:,} (.idx)",
  }
  if "ids" in facts:
    ids = facts["ids"]
    rows["ids"] = f"{ids['lowest']:,} to {ids['highest']:,} ({ids['outside']:,} outside the vocabulary)"
  if facts["notes"]:
    rows["notes"] = facts["notes"]
  return rows


def _ends_text(ends: dict) -> str:
  looked = f"of {ends['documents']:,} looked at"
  if not ends["documents"]:
    return "no document has tokens"
  if "eod_id" in ends:
    return f"{ends['with_eod'] / ends['documents']:.1%} with EOD {ends['eod_id']}, {looked}"
  return f"{ends['with_most_common'] / ends['documents']:.1%} with {ends['most_common']}, the most common, {looked}"


def _row(facts: dict) -> tuple[str, ...]:
  ends = facts["ends"]
  token, count = ends["most_common"], ends["with_most_common"]
  if "eod_id" in ends:
    token, count = ends["eod_id"], ends["with_eod"]
  names = ("sequences", "documents", "empty_documents", "tokens", "shortest", "longest")
  share = f"{token}: {count / ends['documents']:.1%}" if ends["documents"] else "-"
  return facts["prefix"], facts["dtype"], *(f"{facts[name]:,}" for name in names), share, str(len(facts["notes"]) or "-")


def _sums(total: dict) -> dict[str, str]:
  return {
      "datasets": f"{total['datasets']:,} ({', '.join(total['dtypes'])})",
      "tokens": f"{total['tokens']:,}",
      "sequences": f"{total['sequences']:,} with {total['shortest']:,} to {total['longest']:,} tokens",
      "documents": f"{total['documents']:,} ({total['empty_documents']:,} empty)",
      "bytes": f"{total['bin_bytes']:,} (.bin), {total['idx_bytes']:,} (.idx)",
  }
