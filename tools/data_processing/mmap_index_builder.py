# SPDX-License-Identifier: Apache-2.0
"""Builds Megatron's document, sample and shuffle index of a dataset before a run, so that the run only loads them.

The files are those that a run with the same dataset, sequence length, seed, split and epochs would build itself; give
their folder as the first half of grain_train_files: '<output-dir>|<dataset>'. Needs no accelerator and no JAX.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

EXAMPLE = """\
example (a run of 20 steps with 4 samples a step):
  python tools/data_processing/mmap_index_builder.py convert --input data/corpus --output-dir data/indices \\
      --seq-length 2048 --num-samples 80 --seed 1234
"""

# What scripts import from the released tool: functions of the library, here with their names there.
RELEASED = {
    "build_document_index": "build_document_index",
    "build_indices": "build_indices",
    "build_sample_index": "build_sample_index",
    "build_shuffle_index": "build_shuffle_index",
    "compute_index_hash": "compute_index_hash",
    "compute_num_epochs": "compute_num_epochs",
    "convert": "convert",
    "convert_blend": "convert_blend",
    "discover_shards": "resolve_shard_prefixes",
    "get_document_sizes": "get_document_sizes",
    "resolve_shard_prefixes": "resolve_shard_prefixes",
    "should_separate_last_epoch": "should_separate_last_epoch",
}


def __getattr__(name: str):
  """Gives a function of the library when it is first asked for, so that --help needs neither NumPy nor Numba."""
  if name not in RELEASED:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  from maxtext.input_pipeline import _mmap_index_utils

  return getattr(_mmap_index_utils, RELEASED[name])


def main(arguments: list[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  options = parse_arguments(arguments)
  from maxtext.input_pipeline._mmap_indexed_dataset import MMapError

  try:
    if options.split_index and not options.split:
      raise MMapError(f"--split-index {options.split_index} needs --split; name the shares, such as 99,1.")
    summary = run(options)
  except (MMapError, OSError) as error:
    print(f"error: {sentence(error)}", file=sys.stderr)
    return 1
  print(json.dumps(summary) if options.json else table(summary))
  return 0


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  commands = parser.add_subparsers(required=True, metavar="COMMAND")
  command = commands.add_parser(
      "convert",
      help="build the indices of one dataset",
      description=__doc__,
      epilog=EXAMPLE,
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  add = command.add_argument
  add("--input", required=True, metavar="PATH", help="dataset without .bin and .idx, or a folder that holds one")
  add("--output-dir", required=True, metavar="DIR", help="folder for the index files; made if need be")
  add("--seq-length", required=True, type=positive, metavar="L", help="tokens of a sample: max_target_length of the run")
  amount = command.add_mutually_exclusive_group(required=True)
  amount.add_argument(
      "--num-samples",
      type=positive,
      metavar="N",
      help="samples of the run: steps * global batch size, or mmap_npy_num_samples",
  )
  amount.add_argument(
      "--num-epochs",
      type=positive,
      metavar="N",
      help="whole passes instead; a run finds them only if it asks for most of the last one",
  )
  add("--seed", type=int, default=1234, help="data_shuffle_seed of the run; default: %(default)s")
  add("--split", default="", metavar="SHARES", help="mmap_npy_split of the run, such as 99,1; default: no split")
  add("--split-index", type=int, default=0, choices=(0, 1, 2), help="0 train, 1 valid, 2 test; default: %(default)s")
  add(
      "--add-extra-token",
      type=int,
      default=1,
      choices=(0, 1),
      help="1: a sample has L + 1 tokens, as a run reads it; 0 only for comparison with Megatron; default: %(default)s",
  )
  add("--json", action="store_true", help="print the closing summary as JSON")
  return parser.parse_args(arguments)


def positive(text: str) -> int:
  value = int(text)
  if value < 1:
    raise argparse.ArgumentTypeError(f"{value} is less than 1")
  return value


def run(options: argparse.Namespace) -> dict:
  """Builds and writes the indices as `options` say; returns the facts of the closing table."""
  from maxtext.input_pipeline import _mmap_index_cache as cache
  from maxtext.input_pipeline._mmap_index_utils import resolve_dataset

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
  paths, description = cache.write_index(options.output_dir, resolve_dataset(options.input), request, progress_bars())
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


def progress_bars():
  """Returns a progress function that draws a bar a stage if stderr is a terminal, or None."""
  if not sys.stderr.isatty():
    return None
  import tqdm

  bars: dict[str, tqdm.tqdm] = {}

  def show(stage: str, done: int, total: int) -> None:
    bar = bars.get(stage)
    if bar is None or bar.total != total:  # the last epoch's shuffle has a total of its own
      bar = bars[stage] = tqdm.tqdm(total=total, desc=stage, unit=" entries", unit_scale=True)
    bar.update(done - bar.n)
    if done == total:
      bar.close()

  return show


def sentence(error: Exception) -> str:
  """Returns an error as one sentence that names its file; the library's own errors, which are ValueErrors, are one."""
  if isinstance(error, OSError) and not isinstance(error, ValueError) and error.filename is not None:
    return f"{error.filename}: {error.strerror}."
  return str(error)


def table(summary: dict) -> str:
  """Returns the closing table: a line a fact, numbers with thousands separators."""
  first, end = summary["sequences_used"]
  rows = {
      "documents": f"{summary['documents']:,}",
      "sequences": f"{summary['sequences']:,} (used: {first:,} to {end:,})",
      "tokens per epoch": f"{summary['tokens_per_epoch']:,}",
      "epochs": f"{summary['epochs']:,}",
      "samples": f"{summary['samples']:,}",
      "separate last epoch": "yes" if summary["separate_last_epoch"] else "no",
      "seconds": f"{summary['seconds']:.2f}",
      "bytes written": f"{summary['bytes']:,}",
      "files": "\n".ljust(22).join(summary["files"]),
  }
  return "\n".join(f"{name:<21}{value}" for name, value in rows.items())


if __name__ == "__main__":
  sys.exit(main())
