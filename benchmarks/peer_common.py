# SPDX-License-Identifier: Apache-2.0
"""What the peers share: they answer calls line by line, measure time and memory, and tell which `maxtext` they run."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
import zlib

import numpy as np


def serve(peers):
  """Reads [method, arguments] a line from stdin, calls it, and writes what it returns as a line of JSON.

  Args:
    peers: makes a peer, by its name, which is the first argument of the process.
  """
  replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
  os.dup2(2, 1)  # what libraries print must not get among the replies
  peer = peers[sys.argv[1]]()
  for line in sys.stdin:
    method, arguments = json.loads(line)
    print(json.dumps(getattr(peer, method)(**arguments)), file=replies, flush=True)


def require_release():
  """Raises RuntimeError unless `maxtext` is the released package, without modules of ours."""
  import maxtext

  first = os.environ["PYTHONPATH"].split(os.pathsep)[0]
  if not str(maxtext.__file__).startswith(first) or any("_release" in path for path in maxtext.__path__):
    raise RuntimeError(f"maxtext is {maxtext.__file__}, not the release in {first}")


def timed(function):
  """Returns the seconds that a call takes, and its result."""
  gc.collect()
  start = time.perf_counter()
  result = function()
  return time.perf_counter() - start, result


def checksums(arrays):
  return [f"{array.dtype.str}{list(array.shape)}:{zlib.crc32(np.ascontiguousarray(array)):08x}" for array in arrays]


def bytes_read():
  """Returns the bytes that read calls of this process gave, from Linux."""
  with open("/proc/self/io", encoding="ascii") as file:
    return int(file.readline().split()[1])


def status_bytes(name):
  with open("/proc/self/status", encoding="ascii") as file:
    return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))


class PeakMemory:
  """Samples the anonymous memory of the process in a thread; `growth` is the highest value less the first.

  Args:
    every: seconds between samples; many of them slow down Python code in other threads.
  """

  def __init__(self, every=2e-4):
    self._every = every

  def __enter__(self):
    self.growth, self.taken, self._ended = 0, 0, False
    self._first = status_bytes("RssAnon")
    self._thread = threading.Thread(target=self._sample)
    self._thread.start()
    return self

  def _sample(self):
    while not self._ended:
      self._take()
      time.sleep(self._every)

  def _take(self):
    self.growth = max(self.growth, status_bytes("RssAnon") - self._first)
    self.taken += 1

  def __exit__(self, *unused):
    self._ended = True
    self._thread.join()
    self._take()
