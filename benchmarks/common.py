# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: their arguments, their datasets, the peers to compare with, and the output."""

from __future__ import annotations

import argparse
import collections
from collections.abc import Callable, Sequence
import contextlib
import json
import os
from pathlib import Path
import platform
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np

import maxtext
from maxtext.input_pipeline._mmap_indexed_dataset import MMAP_INDEX_MAGIC, IndexedDatasetWriter, map_file

REPOSITORY = Path(__file__).resolve().parents[1]
EOD = 2
VOCABULARY = 32000
SEED = 1234
_WRITE_ROWS = 20_000


def parse_arguments(
    description: str | None, example: str, repeats: int, *, datasets: bool = True, switches: dict[str, str] | None = None
) -> argparse.Namespace:
  """Parses the arguments that every benchmark has.

  Args:
    repeats: the default of `--repeats`.
    datasets: whether it reads or writes datasets and has peers that do.
    switches: its own switches, with their help.
  """
  parser = argparse.ArgumentParser(
      description=description, epilog=f"example:\n  {example}", formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add("--repeats", type=_positive, metavar="N",
      help=f"times that each measurement is repeated; default: {repeats}, or 1 with --quick")  # fmt: skip
  add("--quick", action="store_true", help="small sizes: shows that the benchmark works, measures nothing of interest")
  add("--check", action="store_true", help="exit with 1 if a bound that was measured does not hold")
  for name, text in (switches or {}).items():
    add(name, action="store_true", help=text)
  if datasets:
    _add_dataset_arguments(add)
  options = parser.parse_args()
  if options.check and options.quick:
    parser.error("--check and --quick: small sizes have no bounds")
  options.repeats = options.repeats or (1 if options.quick else repeats)
  if datasets:
    if options.reference_python and not options.reference_python.is_file():
      parser.error(f"--reference-python: {options.reference_python} is not a file")
    options.data_dir = options.data_dir.absolute()
    options.data_dir.mkdir(parents=True, exist_ok=True)
  return options


def _add_dataset_arguments(add: Callable) -> None:
  add("--data-dir", type=Path, default=Path(tempfile.gettempdir(), "maxtext-benchmarks"),
      help="datasets, kept for the next run, and files that are written on the way; default: %(default)s")  # fmt: skip
  add("--reference-python", type=Path, default=_reference_python(),
      help="Python with megatron-core; default: that of .venv-reference, and no megatron-core without it")  # fmt: skip


def _positive(text: str) -> int:
  value = int(text)
  if value < 1:
    raise argparse.ArgumentTypeError(f"{value} is less than 1")
  return value


def _reference_python() -> Path | None:
  path = REPOSITORY / ".venv-reference" / "bin" / "python"
  return path if path.is_file() else None


def say(text: str) -> None:
  print(text, file=sys.stderr, flush=True)


# Datasets.


def uniform_dataset(data_dir: Path, sequences: int, low: int, high: int) -> str:
  """Writes, once, uint16 sequences of low to high random tokens that end with EOD; returns the prefix."""
  prefix = str(data_dir / f"tokens-{sequences}-{low}-{high}")
  if not os.path.isfile(prefix + ".idx"):
    rng, lengths = np.random.default_rng(SEED), _lengths(sequences, low, high)
    rows = max(1, _WRITE_ROWS * 600 // high)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
      for first in range(0, sequences, rows):
        say(f"writing {prefix}: sequence {first} of {sequences}")
        part = lengths[first : first + rows]
        tokens = rng.integers(EOD + 1, VOCABULARY, part.sum(dtype=np.int64), dtype=np.uint16)
        tokens[np.cumsum(part) - 1] = EOD
        writer.add_documents(tokens, part)
  return prefix


def sparse_dataset(data_dir: Path, sequences: int, low: int, high: int, number: int = 0) -> str:
  """Writes, once, an `.idx` file whose `.bin` has the right size and occupies no disk; returns the prefix.

  Args:
    number: datasets with other numbers have other lengths.
  """
  prefix = str(data_dir / f"sparse-{sequences}-{low}-{high}{f'-{number}' if number else ''}")
  if not os.path.isfile(prefix + ".idx"):
    say(f"writing {prefix}")
    lengths = _lengths(sequences, low, high, number)
    ends = np.cumsum(lengths, dtype=np.int64) * 2
    with open(prefix + ".bin", "wb") as file:
      file.truncate(int(ends[-1]))
    with open(prefix + ".tmp", "wb") as file:
      file.write(MMAP_INDEX_MAGIC + struct.pack("<QBQQ", 1, 8, sequences, sequences + 1))
      for column in (lengths, ends - 2 * lengths.astype(np.int64), np.arange(sequences + 1, dtype=np.int64)):
        column.tofile(file)
    os.replace(prefix + ".tmp", prefix + ".idx")
  return prefix


def _lengths(sequences: int, low: int, high: int, number: int = 0) -> np.ndarray:
  return np.random.default_rng(sequences + number).integers(low, high, sequences, dtype=np.int32, endpoint=True)


def warm(prefix: str, suffixes: Sequence[str] = (".idx", ".bin")) -> None:
  """Reads the files of a dataset, so that they are in the page cache."""
  for suffix in suffixes:
    data = map_file(prefix + suffix)
    for first in range(0, len(data), 1 << 26):
      data[first : first + (1 << 26) : 4096].max()


# Peers.


class Peer:
  """An implementation in a process of its own. `ask` calls one of its methods by name.

  Args:
    name: ours, release or megatron.
    options: parsed arguments.
    script: what the process runs.
  """

  def __init__(self, name: str, options: argparse.Namespace, script: str = "peer.py"):
    folders = [str(Path(__file__).parent)]
    python = sys.executable
    if name == "megatron":
      python = str(options.reference_python)
    if name == "release":
      folders.insert(0, str(_release_folder(options.data_dir)))
    environment = {"JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(folders)}
    # -P: the folder of the script is searched in its place in PYTHONPATH, after the release.
    command = [python, "-P", str(Path(__file__).with_name(script)), name]
    self.name, self.started = name, time.monotonic()
    self._process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | environment,
        text=True,
    )
    self.pid = self._process.pid
    self._log = _Tail(self._process.stderr)

  def ask(self, method: str, **arguments) -> dict[str, Any]:
    """Returns what the method returns.

    Raises:
      RuntimeError: if it fails; with the end of what the process wrote to stderr.
    """
    self._process.stdin.write(json.dumps([method, arguments]) + "\n")
    self._process.stdin.flush()
    line = self._process.stdout.readline()
    if not line:
      self._process.wait()
      raise RuntimeError(f"{self.name}: {method} failed\n{self._log.text()}")
    return json.loads(line)

  def close(self) -> None:
    self._process.stdin.close()
    self._process.wait()

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    self.close()


class _Tail:
  """Reads a stream in a thread, as a full pipe would stop its writer, and keeps the end."""

  def __init__(self, stream):
    self._lines = collections.deque[str](maxlen=40)
    self._thread = threading.Thread(target=lambda: self._lines.extend(stream), daemon=True)
    self._thread.start()

  def text(self) -> str:
    self._thread.join(5)
    return "".join(self._lines)


def _release_folder(data_dir: Path) -> Path:
  """Returns a folder in which `maxtext` is the released package, without our modules."""
  folder, released = data_dir / "release", Path(maxtext.__path__[1]).resolve()
  folder.mkdir(exist_ok=True)
  link = folder / "maxtext"
  if link.is_symlink() and link.resolve() != released:
    link.unlink()
  if not link.is_symlink():
    link.symlink_to(released, target_is_directory=True)
  return folder


def peer_names(options: argparse.Namespace) -> list[str]:
  """Ours, the release, and megatron-core where its environment is there."""
  if options.reference_python is None:
    say("no reference environment: megatron-core is left out (see --reference-python)")
  return ["ours", "release", *(["megatron"] if options.reference_python else [])]


class TreeMemory:
  """Samples the memory of a process and of those it started, in a thread; `peak` is the highest sum seen, in bytes.

  Counted are private pages and shares of shared memory, not pages of mapped files, which the system may take back.
  """

  def __init__(self, peer: Peer):
    self.peak, self._root, self._ended = 0, peer.pid, threading.Event()
    self._thread = threading.Thread(target=self._sample)

  def __enter__(self):
    self._thread.start()
    return self

  def __exit__(self, *unused):
    self._ended.set()
    self._thread.join()

  def _sample(self) -> None:
    while not self._ended.wait(0.05):
      self.peak = max(self.peak, sum(map(_own_memory, _tree(self._root))))


def _tree(pid: int) -> list[int]:
  """Returns a process and all that descend from it."""
  found = [pid]
  for process in found:
    for path in Path(f"/proc/{process}/task").glob("*/children"):
      with contextlib.suppress(OSError):  # ended in the meantime
        found.extend(map(int, path.read_text().split()))
  return found


def _own_memory(pid: int) -> int:
  with contextlib.suppress(OSError):
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
  return 0


def interleave(repeats: int, calls: dict[str, Callable[[], dict]], noun: str) -> dict[str, list[dict]]:
  """Makes all calls in turn, `repeats` times, after one turn that does not count; returns the results by name."""
  results: dict[str, list[dict]] = {name: [] for name in calls}
  for turn in range(repeats + 1):
    say(f"{noun}: turn {turn} of {repeats}" + ("" if turn else " (does not count)"))
    for name, call in calls.items():
      result = call()
      if turn:
        results[name].append(result)
  return results


def median(results: Sequence[dict] | None, key: str = "seconds") -> float | None:
  return statistics.median(result[key] for result in results) if results else None


def ratio(other: float | None, ours: float | None) -> float | None:
  return other / ours if other and ours else None


# Output.


def target(name: str, measured: float | None, bound: float, at_most: bool = False) -> dict[str, Any]:
  """Compares a measured value with what it should reach; `holds` is None where there was nothing to measure."""
  holds = None if measured is None else measured <= bound if at_most else measured >= bound
  return {"name": name, "measured": measured, "at_most" if at_most else "at_least": bound, "holds": holds}


def report(name: str, options: argparse.Namespace, started: float, results: dict, targets: list[dict]) -> None:
  """Prints the JSON on stdout and a table on stderr. Quick runs have no targets: their sizes are too small.

  Raises:
    SystemExit: with 1 if peers gave different arrays (a result `same_...` is false), or with `--check` if a bound does
      not hold.
  """
  targets = [] if options.quick else targets
  content = {
      "benchmark": name,
      "quick": options.quick,
      "repeats": options.repeats,
      "machine": {
          "cpus": os.cpu_count(),
          "architecture": platform.machine(),
          "python": platform.python_version(),
          "numpy": np.__version__,
          "load": [round(load, 2) for load in os.getloadavg()],
      },
      "seconds": round(time.monotonic() - started, 1),
      "results": results,
      "targets": targets,
  }
  values = list(_flatten(results))
  for path, value in values:
    say(f"{path:<66}{_text(value):>20}")
  for row in targets:
    bound = f"<= {row['at_most']}" if "at_most" in row else f">= {row['at_least']}"
    verdict = {True: "holds", False: "DOES NOT HOLD", None: "not measured"}[row["holds"]]
    say(f"{row['name']:<66}{_text(row['measured']):>20}  {bound:<8} {verdict}")
  print(json.dumps(content, indent=2), flush=True)
  differing = [path for path, value in values if path.rpartition(".")[2].startswith("same_") and not value]
  if differing:
    say(f"the peers do not agree: {', '.join(differing)}")
  if differing or options.check and any(row["holds"] is False for row in targets):
    sys.exit(1)


def _flatten(value: Any, path: str = ""):
  if isinstance(value, dict):
    for key, item in value.items():
      yield from _flatten(item, f"{path}.{key}" if path else str(key))
  else:
    yield path, value


def _text(value: Any) -> str:
  if isinstance(value, float):
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
  return "-" if value is None else f"{value:,}" if type(value) is int else str(value)
