# SPDX-License-Identifier: Apache-2.0
"""Fuzzes `.idx` files, index folders, pairs of blend indices and spec strings.

    python tests/fuzz/run.py --seconds 600           every target, each its share of the time
    python tests/fuzz/run.py --seconds 60 idx        one target
    python tests/fuzz/run.py --seconds 0             only the kept inputs
    python tests/fuzz/run.py --try FILE idx          one input, in this process

A finding is an error that is not one of ours, a wrong result, an allocation far beyond the input, a crash or a hang. Its
input goes to --findings, its place in the code to stderr, and the exit status is 1. Inputs that reach a new line of code
are kept while it runs, and with --keep in tests/fuzz/corpus. A worker process does the work; when it dies, the input it
was at is known, and a new one goes on.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback

CORPUS = Path(__file__).parent / "corpus"
NAMES = ("idx", "arrays", "blend", "text")
SLOWEST = 20  # seconds of work for one input; six times as long by the clock, on a machine that has other work
MEMORY = 4 << 30  # bytes of address space for one worker above what it has at its start


def name_of(data: bytes) -> str:
  return hashlib.sha256(data).hexdigest()[:16]


def kept(target: str) -> list[bytes]:
  return [path.read_bytes() for path in sorted((CORPUS / target).glob("*"))]


# The worker: runs inputs and prints a line of JSON at its end.


class Lines:
  """Counts lines of our package that ran for the first time; each costs one call, ever."""

  def __init__(self):
    self.seen = 0
    monitoring = sys.monitoring
    monitoring.use_tool_id(monitoring.COVERAGE_ID, "fuzz")
    monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, self._line)
    monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)

  def _line(self, code, line: int):
    self.seen += "/input_pipeline/" in code.co_filename
    return sys.monitoring.DISABLE


def work(name: str, seconds: float, seed: int, last: str, fresh: str) -> None:
  """Runs kept inputs, seeds, and then changed ones for a time. `last` gets each input before it runs."""
  import logging

  from mutate import mutate, mutate_text
  from targets import TARGETS

  logging.disable(logging.CRITICAL)
  os.environ.setdefault("OMP_NUM_THREADS", "1")
  lines, rng = Lines(), random.Random(seed)
  change = mutate_text if name == "text" else mutate
  with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
    target = TARGETS[name](folder)
    inputs = kept(name) + target.seeds()
    target.run(inputs[0])  # compiles
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    descriptor = os.open(last, os.O_WRONLY | os.O_CREAT)
    pool: list[bytes] = []
    runs, end, slowest, begin = 0, None, 0.0, time.monotonic()
    while end is None or time.monotonic() < end:
      data = inputs[runs] if runs < len(inputs) else change(rng.choice(pool), pool, rng, target.most)
      os.ftruncate(descriptor, 0)
      os.pwrite(descriptor, data, 0)
      before, started = lines.seen, time.monotonic()
      signal.setitimer(signal.ITIMER_PROF, SLOWEST)  # nobody handles the signals: they end the process
      signal.setitimer(signal.ITIMER_REAL, 6 * SLOWEST)
      target.run(data)
      signal.setitimer(signal.ITIMER_PROF, 0)
      signal.setitimer(signal.ITIMER_REAL, 0)
      slowest = max(slowest, time.monotonic() - started)
      runs += 1
      if runs <= len(inputs):
        pool.append(data)
      elif lines.seen > before or rng.random() < 0.001:  # now and then any, to walk away from what is known
        pool.append(data)
        if lines.seen > before:
          Path(fresh, name_of(data)).write_bytes(data)
      if runs == len(inputs):
        begin = time.monotonic()
        end = begin + seconds
    rate = round((runs - len(inputs)) / max(time.monotonic() - begin, 1e-9)) if seconds else 0
    print(json.dumps({"runs": runs, "per second": rate, "lines": lines.seen, "slowest": round(slowest, 3)}))


# The driver.


def fuzz(name: str, seconds: float, seed: int, findings: Path, keep: bool) -> tuple[dict, int]:
  """Fuzzes one target; returns what the workers said, and the number of findings."""
  end, found, totals = time.monotonic() + seconds, 0, {}
  with tempfile.TemporaryDirectory() as folder:
    last, fresh = os.path.join(folder, "last"), os.path.join(folder, "fresh")
    os.makedirs(fresh)
    while True:
      left = max(end - time.monotonic(), 0.0)
      command = [sys.executable, __file__, "--worker", last, fresh, "--seconds", str(left), "--seed", str(seed), name]
      done = subprocess.run(command, capture_output=True, text=True, check=False)
      if done.returncode == 0:
        totals = json.loads(done.stdout)
        break
      found += 1
      seed += 1
      data = Path(last).read_bytes() if os.path.exists(last) else b""
      path = findings / name / name_of(data)
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(data)
      why = signal.Signals(-done.returncode).name if done.returncode < 0 else done.stderr[-2500:]
      print(f"FINDING in {name}: {path}\n{why}", file=sys.stderr)
      if time.monotonic() >= end or found >= 20:
        break
    if keep:
      (CORPUS / name).mkdir(parents=True, exist_ok=True)
      for path in Path(fresh).iterdir():
        (CORPUS / name / path.name).write_bytes(path.read_bytes())
  return totals, found


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("targets", nargs="*", default=NAMES, help=", ".join(NAMES))
  parser.add_argument("--seconds", type=float, default=60)
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--keep", action="store_true", help="add inputs that reach new lines to the corpus")
  parser.add_argument("--findings", type=Path, default=Path("fuzz_findings"))
  parser.add_argument("--try", dest="one", type=Path, help="run one input of one target and show what happens")
  parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
  options = parser.parse_args()
  if options.worker:
    try:
      work(options.targets[0], options.seconds, options.seed, *options.worker)
    except BaseException:
      traceback.print_exc()
      sys.exit(1)
    return
  if options.one:
    from targets import TARGETS

    with tempfile.TemporaryDirectory() as folder:
      TARGETS[options.targets[0]](folder).run(options.one.read_bytes())
    return
  findings = 0
  for name in options.targets:
    totals, found = fuzz(name, options.seconds / len(options.targets), options.seed, options.findings, options.keep)
    findings += found
    print(json.dumps({"target": name, **totals, "findings": found}), flush=True)
  sys.exit(1 if findings else 0)


if __name__ == "__main__":
  main()
