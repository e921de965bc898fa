# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/megatron_cache/: a cache directory as megatron-core leaves it, of two small datasets.

Run in the reference environment: `python tests/reference/write_cache_golden.py [folder]`. The builds that filled the
directory and the datasets' lengths are in `builds.json` beside the cache's own files; tokens are those of
`write_blend_golden.tokens_of`. Nothing of this repository takes part.
"""

import contextlib
import json
import os
from pathlib import Path
import shutil
import sys
import tempfile

import torch
from write_blend_golden import build, provenance, write_children

OUTPUT = Path(__file__).resolve().parents[1] / "golden" / "megatron_cache"
COMMAND = "python tests/reference/write_cache_golden.py"
CHILDREN = [[30, 12, 0, 41, 7, 22, 35, 18, 9, 26], [11, 25, 38, 16, 0, 29, 33, 8, 21, 40, 14, 27]]
WHERE = "corpus"  # the datasets' folder when megatron-core reads them; part of the descriptions and file names
BUILDS = [
  {"weights": [0.7, 0.3], "split": "8,2", "sizes": [61, 10, 0], "seq_length": 16, "seed": 1234},
  {"weights": None, "split": "8,2", "sizes": [None, 5, None], "seq_length": 16, "seed": 1234},
  {"weights": None, "per_split": [[[0, 1], None], [[1], None], None], "sizes": [None, 12, 0], "seq_length": 8, "seed": 7},
]


@contextlib.contextmanager
def one_process():
  """Brings torch.distributed up, which megatron-core asks for where a blend has a cache directory."""
  torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
  try:
    yield
  finally:
    torch.distributed.destroy_process_group()


def write_cache(folder, builds, children=CHILDREN) -> list[str]:
  """Fills a cache directory by megatron-core's builds of datasets in `corpus/`; returns the datasets' prefixes.

  Args:
    folder: existing; the datasets come to `folder/corpus`, the cache to `folder/cache`.
    builds: keyword arguments of `write_blend_golden.build`.
  """
  with contextlib.chdir(folder), one_process():
    os.makedirs(WHERE)
    prefixes = write_children(WHERE, "books", children)
    for settings in builds:
      settings = {"split": None, "per_split": None, "mask_loss": False} | settings
      build(prefixes, cache="cache", **settings)
  return [os.path.join(folder, prefix) for prefix in prefixes]


def main(output=OUTPUT) -> None:
  with tempfile.TemporaryDirectory() as folder:
    write_cache(folder, BUILDS)
    shutil.rmtree(output, ignore_errors=True)
    shutil.copytree(os.path.join(folder, "cache"), output)
  source = provenance() | {"command": COMMAND}
  content = {"provenance": source, "where": WHERE, "children": CHILDREN, "builds": BUILDS}
  Path(output, "builds.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
  main(*sys.argv[1:2])
