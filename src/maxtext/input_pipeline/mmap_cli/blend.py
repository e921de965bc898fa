# SPDX-License-Identifier: Apache-2.0
"""`blend`: the indices of every dataset of a weighted blend, and the blend itself, before a run."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from maxtext.input_pipeline.mmap_cli import build, console

NAME = "blend"
SUMMARY = "build the indices of a weighted blend and of its datasets"
DESCRIPTION = """\
Builds the indices of each dataset of a blend, several side by side, in <output-dir>/dataset_0, dataset_1, ..., and the
blend indices dataset_index.npy and dataset_sample_index.npy in <output-dir>.

The files are those that a run with the same settings would build itself. The closing lines are the keys of that run.
"""
EXAMPLE = """\
example (a run of 1000 steps with 8 samples a step):
  mmap-index blend --datasets 'data/books,0.7;data/code,0.3' --output-dir data/blend --seq-length 2048 \\
      --total-samples 8000 --seed 1234
"""
_MANY = 4  # datasets from which on finished bars are taken away


def add_arguments(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add(
      "--datasets",
      required=True,
      metavar="LIST",
      help="'dataset,weight;dataset,weight;...'; a dataset is a path without suffix, a folder of shards, or several",
  )
  add("--output-dir", required=True, metavar="DIR", help="folder for all files; made if need be")
  build.add_length(parser)
  add(
      "--total-samples",
      required=True,
      type=console.positive,
      metavar="N",
      help="samples of the run: steps * global batch size, or mmap_npy_num_samples",
  )
  add(
      "--margin",
      type=_percent,
      default=0.5,
      metavar="PERCENT",
      help="samples to build beyond each dataset's share; mmap_npy_blend_margin of the run; default: %(default)s",
  )
  add("--max-workers", type=console.positive, metavar="N", help="datasets built at a time; default: one for each core")
  build.add_order(parser)


def _percent(text: str) -> float:
  value = float(text)
  if not 0 <= value < float("inf"):
    raise argparse.ArgumentTypeError(f"{text} is not a percentage of 0 or more")
  return value


def run(options: argparse.Namespace) -> dict:
  """Builds and writes everything; returns what was built and the keys of a run that reads it."""
  from maxtext.input_pipeline import _megatron_blending as blending
  from maxtext.input_pipeline import _mmap_index_cache as cache
  from maxtext.input_pipeline.mmap_cli import mixtures

  build.check_split(options)
  start = time.monotonic()
  entries = mixtures.weighted(options.datasets)
  folders = [os.path.join(options.output_dir, f"dataset_{number}") for number in range(len(entries))]
  specs = [
      {"input": entry.paths, "weight": entry.weight, "output_dir": folder}
      for entry, folder in zip(entries, folders, strict=True)
  ]
  request = cache.IndexRequest(
      options.seq_length,
      options.seed,
      options.total_samples,
      None,
      options.split,
      options.split_index,
      options.add_extra_token,
  )
  progress = _progress(entries)
  written = blending.write_blend(specs, request, options.margin, options.max_workers, options.output_dir, progress)
  children = [_child(child, entries[child["number"]], folders[child["number"]]) for child in written]
  files = [path for child in written for path in child["paths"].values()] + [*blending.pair_paths(options.output_dir)]
  return {
      "samples": options.total_samples,
      "children": children,
      "seconds": time.monotonic() - start,
      "bytes": sum(map(os.path.getsize, files)),
      "files": files,
      "run": _keys(options, children),
  }


def _progress(entries):
  """Returns a function (number of the dataset or None, stage, done, total) that draws bars on a terminal, or None."""
  show = console.progress_bars(keep=len(entries) <= _MANY)
  if show is None:
    return None
  names = {number: f"{number} {os.path.basename(entry.paths[0].rstrip('/'))}: " for number, entry in enumerate(entries)}
  return lambda number, stage, done, total: show(f"{names.get(number, '')}{stage}", done, total)


def _child(child: dict, entry, folder: str) -> dict[str, Any]:
  description = child["description"]
  return {
      "number": child["number"],
      "dataset": ":".join(entry.paths),
      "folder": folder,
      "weight": entry.weight,
      "share": child["weight"],
      "asked": child["buffer_samples"],
      "built": description.plan.samples,
      "epochs": description.plan.num_epochs,
      "tokens_per_epoch": description.tokens_per_epoch,
  }


def _keys(options, children: list[dict]) -> dict[str, Any]:
  """Returns the keys of a run that finds these files."""
  files = ";".join(f"{child['folder']}|{child['dataset']},{child['weight']!r}" for child in children)
  keys = {
      "grain_eval_files" if options.split_index == 1 else "grain_train_files": files + ";" * (len(children) == 1),
      "blend_index_dir": options.output_dir,
      "max_target_length": options.seq_length,
      "data_shuffle_seed": options.seed,
      "mmap_npy_num_eval_samples" if options.split_index == 1 else "mmap_npy_num_samples": options.total_samples,
      "mmap_npy_blend_margin": options.margin,
  }
  return keys | ({"mmap_npy_split": options.split} if options.split else {})


def render(facts: dict) -> str:
  header = ("dataset", "weight", "samples asked", "built", "epochs", "tokens an epoch")
  rows = [
      (
          child["dataset"],
          f"{child['weight']:g}",
          *(f"{child[key]:,}" for key in ("asked", "built", "epochs", "tokens_per_epoch")),
      )
      for child in facts["children"]
  ]
  closing = {
      "samples": f"{facts['samples']:,}",
      "seconds": f"{facts['seconds']:.2f}",
      "bytes written": f"{facts['bytes']:,} in {len(facts['files']):,} files",
  }
  keys = "\n".join(f"{key}: {_yaml(value)}" for key, value in facts["run"].items())
  return "\n\n".join([console.columns(header, rows), console.table(closing), "Keys of the run:\n" + keys])


def _yaml(value) -> str:
  """Writes a value for a YAML file; a text in quotes."""
  return "'" + value.replace("'", "''") + "'" if isinstance(value, str) else str(value)
