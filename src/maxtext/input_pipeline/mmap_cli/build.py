# SPDX-License-Identifier: Apache-2.0
"""`convert`: the three indices of one dataset, before a run."""

from __future__ import annotations

import argparse
import os
import time

from maxtext.input_pipeline.mmap_cli import console

NAME = "convert"
SUMMARY = "build the indices of one dataset"
DESCRIPTION = """\
Builds Megatron's document, sample and shuffle index of a dataset before a run, so that the run only loads them.

The files are those that a run with the same dataset, sequence length, seed, split and epochs would build itself; give
their folder as the first half of grain_train_files: '<output-dir>|<dataset>'.
"""
EXAMPLE = """\
example (a run of 20 steps with 4 samples a step):
  mmap-index convert --input data/books --output-dir data/indices --seq-length 2048 --num-samples 80 --seed 1234
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add(
      "--input",
      required=True,
      nargs="+",
      metavar="PATH",
      help="dataset without .bin and .idx, or a folder of shards; several, also joined by ':', are one dataset",
  )
  add("--output-dir", required=True, metavar="DIR", help="folder for the index files; made if need be")
  add_length(parser)
  amount = parser.add_mutually_exclusive_group(required=True)
  amount.add_argument(
      "--num-samples",
      type=console.positive,
      metavar="N",
      help="samples of the run: steps * global batch size, or mmap_npy_num_samples",
  )
  amount.add_argument(
      "--num-epochs",
      type=console.positive,
      metavar="N",
      help="whole passes instead; a run finds them only if it asks for most of the last one",
  )
  add_order(parser)


def add_length(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
      "--seq-length",
      required=True,
      type=console.positive,
      metavar="L",
      help="tokens of a sample: max_target_length of the run",
  )


def add_order(parser: argparse.ArgumentParser, extra_token: bool = True) -> None:
  """Adds the settings of an order that have a default; `extra_token`: also --add-extra-token."""
  add = parser.add_argument
  add("--seed", type=int, default=1234, help="data_shuffle_seed of the run; default: %(default)s")
  add("--split", default="", metavar="SHARES", help="mmap_npy_split of the run, such as 99,1; default: no split")
  add("--split-index", type=int, default=0, choices=(0, 1, 2), help="0 train, 1 valid, 2 test; default: %(default)s")
  if extra_token:
    add(
        "--add-extra-token",
        type=int,
        default=1,
        choices=(0, 1),
        help="1: a sample has L + 1 tokens, as a run reads it; 0 only for comparison with Megatron; default: %(default)s",
    )


def check_split(options: argparse.Namespace) -> None:
  """Refuses a part of no split."""
  from maxtext.input_pipeline._mmap_files import MMapError

  if options.split_index and not options.split:
    raise MMapError(f"--split-index {options.split_index} needs --split; name the shares, such as 99,1.")


def run(options: argparse.Namespace) -> dict:
  """Builds and writes the indices; returns what they are and how long it took."""
  from maxtext.input_pipeline import _mmap_index_cache as cache

  check_split(options)
  start = time.monotonic()
  request = cache.IndexRequest(
      options.seq_length,
      options.seed,
      options.num_samples,
      options.num_epochs,
      options.split,
      options.split_index,
      options.add_extra_token,
  )
  progress = console.progress_bars()
  paths, description = cache.write_index(options.output_dir, console.split_paths(options.input), request, progress)
  plan, facts = description.plan, description.facts
  return {
      "datasets": len(facts),
      "documents": sum(fact["documents"] for fact in facts),
      "sequences": sum(fact["sequences"] for fact in facts),
      "sequences_used": [description.begin, description.end],
      "tokens_per_epoch": description.tokens_per_epoch,
      "epochs": plan.num_epochs,
      "samples": plan.samples,
      "separate_last_epoch": plan.separate_last_epoch,
      "seconds": time.monotonic() - start,
      "bytes": sum(map(os.path.getsize, paths.values())),
      "files": list(paths.values()),
  }


def render(facts: dict) -> str:
  first, end = facts["sequences_used"]
  return console.table({
      "documents": f"{facts['documents']:,}",
      "sequences": f"{facts['sequences']:,} (used: {first:,} to {end:,})",
      "tokens per epoch": f"{facts['tokens_per_epoch']:,}",
      "epochs": f"{facts['epochs']:,}",
      "samples": f"{facts['samples']:,}",
      "separate last epoch": "yes" if facts["separate_last_epoch"] else "no",
      "seconds": f"{facts['seconds']:.2f}",
      "bytes written": f"{facts['bytes']:,}",
      "files": facts["files"],
  })
