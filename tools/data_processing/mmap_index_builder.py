# SPDX-License-Identifier: Apache-2.0
"""Builds indices of Megatron datasets before a run, and shows what is in datasets, indices and samples.

The same as the console script `mmap-index`, for those who run it from a checkout, and the released tool's functions for
scripts that import them from here. The commands are in `maxtext.input_pipeline.mmap_cli`.
"""

from __future__ import annotations

from pathlib import Path
import sys

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
  """Gives a function of the library when it is first asked for, so that importing the tool costs nothing."""
  if name not in RELEASED:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  from maxtext.input_pipeline import _mmap_index_utils

  return getattr(_mmap_index_utils, RELEASED[name])


def main(arguments: list[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  try:
    from maxtext.input_pipeline.mmap_cli import main as front
  except ImportError as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  return front.main(arguments)


if __name__ == "__main__":
  # Where nothing is installed, the package in the checkout says what to do.
  sys.path.append(str(Path(__file__).resolve().parents[2] / "src"))
  sys.exit(main())
