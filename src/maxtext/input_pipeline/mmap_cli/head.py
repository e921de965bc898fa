# SPDX-License-Identifier: Apache-2.0
"""`head`: samples as the model will see them."""

from __future__ import annotations

import argparse
import shutil
from typing import Any
import unicodedata

from maxtext.input_pipeline.mmap_cli import build, console

NAME = "head"
SUMMARY = "show the first samples as the model will see them"
DESCRIPTION = """\
Shows samples of an order: tokens or decoded text, and under each its segment, its position in the segment and its loss
weight (0: the loss leaves out what follows this token).

The order is that of 'npy_dir|dataset' (one order in the folder, or <folder>/<name>), of a dataset or a blend and the
settings given here, or of a run's config. Nothing is written.
"""
EXAMPLE = """\
example (an index folder, settings, a config):
  mmap-index head 'data/indices|data/books' --tokenizer tokenizer.model
  mmap-index head data/books --seq-length 2048 --samples 8000 --position 100 -n 1
  mmap-index head --config mmap_npy_megatron_gpt.yml 'grain_train_files=data/indices|data/books' mmap_eod_id=2 steps=20
"""


_USUAL = 0.9  # of the documents end with EOD, or it is worth a note

def add_arguments(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add("paths", nargs="*", metavar="DATASET", help="dataset, or 'npy_dir|dataset'; with --config: key=value")
  add("--datasets", metavar="LIST", help="a blend instead, 'dataset,0.7;dataset,0.3'")
  add("--config", metavar="CONFIG.yml", help="config of a run instead, with key=value as on its command line")
  add("--eval", action="store_true", help="with --config: its evaluation samples")
  add("-n", "--number", type=console.positive, default=3, metavar="N", help="samples to show; default: %(default)s")
  add("--position", type=console.not_negative, default=0, metavar="P", help="the first of them; default: %(default)s")
  add("--tokens", type=console.not_negative, default=96, metavar="N", help="tokens of each, 0: all; default: %(default)s")
  add("--tokenizer", metavar="PATH", help="decode: SentencePiece model, tokenizer.json or Hugging Face folder")
  add("--seq-length", type=console.positive, metavar="L", help="tokens of a sample: max_target_length of the run")
  add("--samples", type=console.positive, metavar="N", help="samples of the run; default: one epoch")
  add("--eod-id", type=console.not_negative, metavar="ID", help="token that ends documents; default: the usual last one")
  add("--merge", type=console.not_negative, default=0, metavar="P", help="packing_max_segments_per_sample; default: 0")
  add("--eod-mask-loss", action="store_true", help="eod_mask_loss=true")
  add("--no-reset", action="store_true", help="reset_attention_mask=false")
  add("--margin", type=float, default=0.5, metavar="PERCENT", help="mmap_npy_blend_margin; default: %(default)s")
  build.add_order(parser, extra_token=False)


def run(options: argparse.Namespace) -> dict:
  """Reads the samples and returns their fields, and where their tokens lie."""
  from maxtext.input_pipeline._mmap_files import MMapError
  from maxtext.input_pipeline.mmap_cli import streams

  build.check_split(options)
  decode = _decoder(options.tokenizer)
  view = streams.open_view(options)
  total = len(view.source)
  if options.position >= total:
    raise MMapError(f"--position {options.position} is beyond the {total} samples of this order; the first one is 0.")
  chosen = range(options.position, min(options.position + options.number, total))
  samples = [_sample(view, position, decode) for position in chosen]
  eod = {"eod_id": view.eod_id, "eod_share": view.eod_share}
  return {"total": total, **eod, "shown": options.tokens, "samples": samples}


def _decoder(path: str | None):
  """Returns a function from ids to their texts, or None without a tokenizer."""
  if path is None:
    return None
  from maxtext.input_pipeline import _mmap_tokenize

  tokenizer = _mmap_tokenize.load_tokenizer(path)

  def decode(ids: list[int]) -> list[str]:
    known = {token for token in ids if 0 <= token < tokenizer.vocab_size}
    texts = dict(zip(known, tokenizer.decode([*known]), strict=True))
    return [texts.get(token, f"<{token}?>") for token in ids]

  return decode


def _sample(view, position: int, decode) -> dict[str, Any]:
  tokens = view.source.read_rows([position])[0]
  fields = view.fields.map({"text": tokens})
  child, place = view.source.child(position) if hasattr(view.source, "child") else (0, position)
  prefixes = view.datasets[child].prefixes
  pieces = [
      {"dataset": prefixes[piece.shard], "sequence": piece.row, "offset": piece.offset, "length": piece.length}
      for piece in view.source.pieces(position)
  ]
  sample = {"position": position, "child": child, "position_in_child": place, "pieces": pieces}
  names = ("inputs", "targets", "inputs_segmentation", "inputs_position", "targets_segmentation")
  sample |= {name: fields[name].tolist() for name in names}
  if decode:
    sample["texts"] = decode(sample["inputs"])
  return sample


# For people.


def render(facts: dict) -> str:
  width = shutil.get_terminal_size().columns
  parts = [_sample_text(sample, facts, width) for sample in facts["samples"]]
  end = facts["samples"][-1]["position"] + 1
  if end < facts["total"]:
    parts.append(f"{facts['total'] - end:,} more samples; EOD is {facts['eod_id']}")
  if facts["eod_share"] is not None and facts["eod_share"] < _USUAL:
    parts.append(
        f"note: EOD {facts['eod_id']} is a guess, the most common last token, and {facts['eod_share']:.1%} of the "
        "documents looked at end with it; give --eod-id"
    )
  return "\n\n".join(parts)


def _sample_text(sample: dict, facts: dict, width: int) -> str:
  count = len(sample["inputs"])
  shown = min(facts["shown"] or count, count)
  name = "text" if "texts" in sample else "token"
  rows = {
      name: [_visible(text) for text in sample.get("texts", sample["inputs"])[:shown]],
      "segment": sample["inputs_segmentation"][:shown],
      "position": sample["inputs_position"][:shown],
      "loss": sample["targets_segmentation"][:shown],
  }
  lines = [_heading(sample), *aligned(rows, width)]
  if shown < count:
    lines.append(f"{count - shown:,} more tokens; segments in all: {sample['inputs_segmentation'][-1]:,}")
  return "\n".join(lines)


def _heading(sample: dict) -> str:
  """Says where the tokens of a sample come from."""
  first, *others = sample["pieces"]
  more = f" and {len(others):,} more" if others else ""
  end = first["offset"] + first["length"]
  place = f"{first['dataset']}, sequence {first['sequence']:,}, tokens {first['offset']:,} to {end:,}{more}"
  return f"sample {sample['position']:,}: {place}"


def aligned(rows: dict[str, list], width: int) -> list[str]:
  """Returns rows of cells under one another, in blocks that fit the width, an empty line between two."""
  cells = {name: [*map(str, values)] for name, values in rows.items()}
  label = max(map(len, cells)) + 1
  widths = [max(map(_cells, column)) + 1 for column in zip(*cells.values(), strict=True)]
  lines, first = [], 0
  while first < len(widths):
    last, used = first + 1, label + widths[first]
    while last < len(widths) and used + widths[last] <= width:
      used += widths[last]
      last += 1
    lines += [""] if first else []
    for name, values in cells.items():
      block = zip(values[first:last], widths[first:last], strict=True)
      lines.append(f"{name:<{label}}" + "".join(" " * (size - _cells(cell)) + cell for cell, size in block))
    first = last
  return lines


def _cells(text: str) -> int:
  """Returns how many columns of a terminal a text takes."""
  return sum((unicodedata.east_asian_width(letter) in "WF") + (not unicodedata.combining(letter)) for letter in text)


def _visible(text) -> str:
  """Returns a token's text with what cannot be seen written out; a space is a middle dot."""
  if isinstance(text, int):
    return str(text)
  shown = (letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text)
  return "".join(shown).replace(" ", "\u00b7") or "-"
