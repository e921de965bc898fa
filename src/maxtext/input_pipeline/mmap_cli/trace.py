# SPDX-License-Identifier: Apache-2.0
"""`trace`: the datasets, documents and bytes behind the rows of a training step."""

from __future__ import annotations

import argparse
from typing import Any

from maxtext.input_pipeline.mmap_cli import console, run_config

NAME = "trace"
SUMMARY = "show the data behind a training step"
DESCRIPTION = """\
Shows where the rows of the global batch of a step lie: dataset, sequence, document, tokens and bytes of the .bin file;
and the digest of the batch, which a run with log_batch_digest=true logs.

Steps count from 0, as MaxText logs them. The batch size must be the run's (--devices), and that of all steps before.
Nothing is written; indices that the run's folder does not hold are built in memory.
"""
EXAMPLE = """\
example (a loss spike at step 1234 of a run on 8 devices):
  mmap-index trace run.yml --step 1234 --devices 8 per_device_batch_size=8 --decode tokenizer.model
"""
TAKES_OTHER_ARGUMENTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
  run_config.add_arguments(parser)
  add = parser.add_argument
  add("--step", type=console.not_negative, required=True, metavar="N", help="step of the run, the first is 0")
  add("--row", type=console.not_negative, metavar="R", help="row of the global batch; default: all")
  add("--decode", metavar="TOKENIZER", help="show the text: SentencePiece model, tokenizer.json or Hugging Face folder")
  add("--tokens", type=console.positive, default=64, metavar="N", help="tokens of each row to show; default: %(default)s")


def run(options: argparse.Namespace) -> dict:
  """Opens the training samples of the config and locates those of the step.

  Raises:
    MMapError: if the config or its data cannot be used, or there is no such step or row.
  """
  from maxtext.input_pipeline import _mmap_digest
  from maxtext.input_pipeline._mmap_files import MMapError
  from maxtext.input_pipeline.mmap_cli import places

  config = run_config.read(options)
  decode = _decoder(options.decode)
  samples = places.open_places(config)
  batch = config.global_batch_size_to_train_on
  first = config.mmap_npy_start_sample + options.step * batch
  if first + batch > len(samples):
    raise MMapError(
        f"--step {options.step} reads samples {first} to {first + batch - 1}, and the order has {len(samples)}; name an "
        "earlier step, or the steps and devices of the run."
    )
  if options.row is not None and options.row >= batch:
    raise MMapError(
        f"--row {options.row} is not in a batch of {batch} rows; name 0 to {batch - 1}, or the devices of the run."
    )
  tokens = samples.raw_tokens(range(first, first + batch))
  rows = []
  for row in range(batch) if options.row is None else [options.row]:
    rows.append({"row": row, "sample": first + row, **samples.locate(first + row)})
    if decode:
      rows[-1]["text"] = decode(tokens[row, : options.tokens].tolist())
  return {
      "step": options.step,
      "first_sample": first,
      "global_batch_size": batch,
      "digest": _mmap_digest.batch_digest(tokens),
      "rows": rows,
  }


def _decoder(path: str | None):
  """Returns a function from ids to text, or None without a tokenizer."""
  if path is None:
    return None
  from maxtext.input_pipeline import _mmap_tokenize

  tokenizer = _mmap_tokenize.load_tokenizer(path)
  return lambda ids: "".join(tokenizer.decode([token for token in ids if 0 <= token < tokenizer.vocab_size]))


def render(facts: dict) -> str:
  from maxtext.input_pipeline import _mmap_digest

  batch = facts["global_batch_size"]
  parts = [_mmap_digest.line(facts["step"], facts["digest"], facts["first_sample"], batch)]
  return "\n\n".join([*parts, *map(_row, facts["rows"])])


def _row(row: dict[str, Any]) -> str:
  title = f"row {row['row']:,}: sample {row['sample']:,}, which is {row['child_sample']:,} of dataset {row['child']}"
  header = ["dataset", "sequence", "document", "tokens", "bytes of .bin"]
  table = console.columns(header, [_piece(piece) for piece in row["pieces"]])
  text = [f"text: {row['text']!r}"] if "text" in row else []
  return "\n".join([title, table, *text])


def _piece(piece: dict[str, Any]) -> list[str]:
  begin, size = piece["bin_position"], piece["bin_bytes"]
  return [
      piece["dataset"],
      f"{piece['sequence']:,}",
      f"{piece['document']:,}",
      f"{piece['offset']:,} to {piece['offset'] + piece['length']:,}",
      f"{begin:,} to {begin + size:,}",
  ]
