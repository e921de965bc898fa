# SPDX-License-Identifier: Apache-2.0
"""HBM bytes and scheduled bundles of KDA on a TPU, ours and tokamax's, without a TPU: compiled ahead of time by libtpu.

Prints JSON that repeats exactly. It needs libtpu beside jax (pip install 'maxtext[tpu]').

Targets: ours, the Pallas kernels with segment ids; xla, ours in pure JAX; tokamax, its mosaic kernels, whose programs are
made for a number of segments. Ours are made for any number: one program serves all rows with segments. All have q and k
normalised, the safe gate, and gradients of q, k, v, g, beta, A_log and dt_bias; states are neither given nor returned.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
import contextlib
import fcntl
import importlib.metadata
import importlib.util
import json
import os
from pathlib import Path
import subprocess
import sys
import tempfile
import time

from tpu_bundles import dump_flags

EXAMPLE = "python benchmarks/tpu_static.py --topology v6e:2x2 --segments 0 16 > tpu.json"
TARGETS = ("ours", "tokamax", "xla")
# The name by which libtpu knows a machine with four chips of a family.
_ACCELERATORS = {"v5e": "v5litepod-4", "v5p": "v5p-8", "v6e": "v6e-4"}
_BUSY = ("libtpu multi-process lockfile", "libtpu_lockfile", "already in use by process", "TPU is already in use")
_RETRIES, _PAUSE = 40, 15.0


def main() -> None:
  options = parse_arguments()
  rows, programs = [], {}
  for job in jobs(options):
    key = json.dumps(program_of(job))
    if key not in programs:
      say(f"compiling {describe(job)}")
      programs[key] = compile_job(job)
    rows.append({name: job[name] for name in ("target", "direction", "segments")} | programs[key])
    print_row(rows[-1])
  shape = {name: getattr(options, name) for name in ("batch", "length", "heads", "key_width", "value_width", "dtype")}
  versions = {name: version_of(name) for name in ("jax", "libtpu", "tokamax")}
  content = {"benchmark": "tpu_static", "topology": options.topology, **shape, "versions": versions, "results": rows}
  print(json.dumps(content, indent=2), flush=True)
  sys.exit(any("error" in row for row in rows))


def say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
      description=__doc__, epilog=f"example:\n  {EXAMPLE}", formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add("--topology", type=_topology, default="v6e:2x2", help="v6e:2x2, v5e:2x2, v5p:2x2x1, ...; default: %(default)s")
  add("--target", nargs="+", choices=TARGETS, default=["ours", "tokamax"], help="default: ours tokamax")
  add("--segments", nargs="+", type=_at_least(0), default=[0, 16, 128, 1024], metavar="N",
      help="numbers of segments of a row, 0 for rows without segments; default: 0 16 128 1024")  # fmt: skip
  add("--direction", nargs="+", choices=("forward", "both"), default=["both"],
      help="forward alone, or with the backward pass; default: both")  # fmt: skip
  for name, size in (("batch", 1), ("length", 8192), ("heads", 32), ("key-width", 128), ("value-width", 128)):
    add(f"--{name}", type=_at_least(1), default=size, metavar="N", help="default: %(default)s")
  add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of q, k, v, g and beta; default: %(default)s")
  options = parser.parse_args(arguments)
  if importlib.util.find_spec("libtpu") is None:
    parser.error(
        "libtpu is not installed and compiles for the TPU; run `pip install 'maxtext[tpu]'`, or put it on PYTHONPATH."
    )
  return options


def _topology(text: str) -> str:
  family, _, shape = text.partition(":")
  if family not in _ACCELERATORS or not all(size.isdecimal() for size in shape.split("x")):
    raise argparse.ArgumentTypeError(
        f"{text!r} is no topology; a family of {', '.join(_ACCELERATORS)} and its chips are needed, as in v6e:2x2."
    )
  return text


def _at_least(least: int):
  def convert(text: str) -> int:
    if not text.isdecimal() or int(text) < least:
      raise argparse.ArgumentTypeError(f"{text!r} is no number of {least} or more.")
    return int(text)

  return convert


def jobs(options: argparse.Namespace) -> Iterator[dict]:
  common = {name: value for name, value in vars(options).items() if name not in ("target", "segments", "direction")}
  for target in options.target:
    for direction in options.direction:
      for segments in options.segments:
        yield common | {"target": target, "direction": direction, "segments": segments}


def program_of(job: dict) -> dict:
  """The job whose program a job runs. Only tokamax makes another one for each number of segments."""
  return job if job["target"] == "tokamax" else job | {"segments": min(job["segments"], 1)}


def describe(job: dict) -> str:
  segments = f"{job['segments']} segments" if job["segments"] else "no segments"
  return f"{job['target']}, {'forward' if job['direction'] == 'forward' else 'forward + backward'}, {segments}"


def compile_job(job: dict) -> dict:
  """Runs a job in a process of its own; returns its figures, or the error as `error`."""
  environment = {
      "JAX_PLATFORMS": "cpu",
      "TPU_SKIP_MDS_QUERY": "1",  # there is no TPU machine's metadata server to ask
      "TPU_WORKER_HOSTNAMES": "localhost",
      "TPU_ACCELERATOR_TYPE": _ACCELERATORS[job["topology"].partition(":")[0]],
  }
  script = str(Path(__file__).with_name("tpu_compile.py"))
  with only_one():
    for attempt in range(1, _RETRIES + 1):
      with tempfile.TemporaryDirectory(prefix="tpu-static-") as dumps:
        flags = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {dump_flags(dumps)}".strip()
        result = subprocess.run(
            [sys.executable, script, json.dumps(job), dumps],
            env=os.environ | environment | {"LIBTPU_INIT_ARGS": flags},
            capture_output=True,
            text=True,
            check=False,
        )
      if result.returncode == 0:
        return json.loads(result.stdout.splitlines()[-1])
      if not any(words in result.stderr for words in _BUSY):
        break
      say(f"another process holds libtpu: attempt {attempt} of {_RETRIES}, the next in {_PAUSE:g} s")
      time.sleep(_PAUSE)
  say(result.stderr[-4000:])
  return {"error": last_error(result.stderr)}


@contextlib.contextmanager
def only_one():
  """Waits until no other run of this script compiles: libtpu serves one process on a machine."""
  path = Path(tempfile.gettempdir(), "maxtext-tpu-static.lock")
  with open(path, "w") as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      say(f"another run of this script compiles: waiting for {path}")
      fcntl.flock(file, fcntl.LOCK_EX)
    yield


def last_error(text: str) -> str:
  """The line of a traceback that names the error."""
  lines = [line for line in text.splitlines() if line and not line.startswith((" ", "-", "Traceback", "For simplicity"))]
  errors = [line for line in lines if "Error" in line.partition(":")[0]]
  return (errors or lines or ["the process ended without a word"])[-1][:500]


def print_row(row: dict) -> None:
  say(f"{describe(row):<50}{row['error'] if 'error' in row else str(row['peak_gib']) + ' GiB at the peak'}")
  for kernel in row.get("kernels", ()):
    say(f"  {kernel['name']:<48}grid {kernel['grid']}, {kernel['bundles']:,} bundles ({kernel['final']:,} stored)")


def version_of(name: str) -> str | None:
  try:
    return importlib.metadata.version(name)
  except importlib.metadata.PackageNotFoundError:
    return None


if __name__ == "__main__":
  main()
