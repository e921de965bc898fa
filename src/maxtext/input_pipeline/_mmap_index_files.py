# SPDX-License-Identifier: Apache-2.0
"""Files of an index folder: written so that nobody sees half of one, mapped, remembered once checked. NumPy only."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
import glob
import json
import math
import os
import secrets
import shutil
import tempfile
import threading
import time
from typing import Any, NamedTuple

import numpy as np
import xxhash

from maxtext.input_pipeline import _mmap_guard
from maxtext.input_pipeline._mmap_files import FileIdentity, MMapError, map_file, reading

STAMPS = "stamps.json"
_MOST_STAMPS = 50_000
_SAVING_STAMPS = threading.Lock()
_ABANDONED_AFTER = 3600  # seconds until a temporary file of a process that died is removed


class StaleIndexError(Exception):
  """An index file that does not hold what its name says; the message gives file and reason."""


# Writing.


def save_json(path: str, content: dict) -> None:
  text = json.dumps(content, indent=2, sort_keys=True) + "\n"
  write_atomically(path, lambda file: file.write(text.encode()))


def save_array(path: str, array: np.ndarray) -> None:
  """Writes an array as `.npy` so that `path` is never seen half-written."""
  write_atomically(path, lambda file: _write_array(file, array))


def _write_array(file, array: np.ndarray) -> None:
  """Writes `.npy`, as np.save does; but np.save does not tell when the last bytes found no room on the disk."""
  array = np.asarray(array, order="C")
  np.lib.format.write_array_header_1_0(file, np.lib.format.header_data_from_array_1_0(array))
  file.write(memoryview(array).cast("B") if array.size else b"")


def write_atomically(path: str, write) -> None:
  """Calls `write` with a temporary binary file beside `path`, which then takes its name."""
  folder, base = os.path.split(path)
  os.makedirs(folder or ".", exist_ok=True)
  _remove_abandoned(folder, base)
  temporary = os.path.join(folder, f".{base}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
  try:
    with open(temporary, "wb") as file:
      write(file)
    os.replace(temporary, path)
  except BaseException:
    if os.path.exists(temporary):
      os.remove(temporary)
    raise


def _remove_abandoned(folder: str, base: str) -> None:
  for path in glob.glob(os.path.join(glob.escape(folder), f".{glob.escape(base)}.*.tmp")):
    try:
      if time.time() - os.path.getmtime(path) > _ABANDONED_AFTER:
        os.remove(path)
    except OSError:
      pass  # its owner, or another process, was faster


def digest_of(array: np.ndarray) -> str:
  return xxhash.xxh3_128_hexdigest(memoryview(array).cast("B") if array.size else b"")


def digest_of_json(content: dict) -> str:
  return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


# Reading.


def map_array(path: str) -> np.ndarray:
  """Maps a `.npy` file read-only, without keeping it open.

  Raises:
    StaleIndexError: if the file is no `.npy` file or its size does not fit its header.
  """
  try:
    with reading(path), open(path, "rb") as file:
      major, _ = np.lib.format.read_magic(file)
      read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
      shape, fortran, dtype = read(file)
      start = file.tell()
  except OSError:
    raise
  except Exception as error:  # NumPy evaluates the header as Python text, which fails in many ways
    raise StaleIndexError(f"{path} is not a NumPy array file") from error
  raw = map_file(path)
  fits = min(shape, default=0) >= 0 and len(raw) - start == math.prod(shape) * dtype.itemsize
  if dtype.kind not in "iu" or fortran and len(shape) > 1 or not fits:
    raise StaleIndexError(f"{path} has {len(raw) - start} bytes of data; its header says {dtype.str}{list(shape)}")
  return raw[start:].view(dtype).reshape(shape)


# What was checked.


class Stamps:
  """Records about files that stay true while a file keeps its size and times; kept in `stamps.json` of a folder.

  By name without folder, since a folder may be reached by other paths from other machines, and by size and times, since
  datasets in several folders may share a name.
  """

  # The file that was read or written last, its status and records: all children of a blend may share a folder.
  _latest: tuple[str, list[int], dict[str, dict[str, Any]]] = ("", [], {})

  def __init__(self, folder: str):
    self._path = os.path.join(folder, STAMPS)
    self._records = self._read()
    self._new: dict[str, dict[str, Any]] = {}

  def _read(self) -> dict[str, dict[str, Any]]:
    try:
      stat = stat_of(self._path)
      path, known, records = Stamps._latest
      if (path, known) != (self._path, stat):
        with open(self._path, encoding="utf-8") as file:
          content = json.load(file)
        records = content["records"]
        if content["xxh3_128"] != digest_of_json(records):
          return {}
        Stamps._latest = self._path, stat, records
      return dict(records)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
      return {}  # only a saving of work

  @property
  def changed(self) -> bool:
    return bool(self._new)

  def get(self, path: str) -> dict[str, Any] | None:
    """Returns the record of a file, or None if there is none or the file has changed."""
    return self._records.get(_stamp_key(path, stat_of(path)))

  def put(self, path: str, stat: list[int], **record) -> dict[str, Any]:
    """Keeps a record; `stat` is `stat_of(path)` from before the file was read."""
    key = _stamp_key(path, stat)
    self._records[key] = self._new[key] = record
    return record

  def save(self) -> None:
    """Adds the new records to those that the file has by now: datasets opened side by side may share a folder."""
    if not self._new:
      return
    with _SAVING_STAMPS:
      kept = {key: record for key, record in self._read().items() if key not in self._new}
      self._records = dict([*kept.items(), *self._new.items()][-_MOST_STAMPS:])  # the latest are the last
      try:
        save_json(self._path, {"records": self._records, "xxh3_128": digest_of_json(self._records)})
        Stamps._latest = self._path, stat_of(self._path), dict(self._records)
        self._new = {}
      except OSError:
        pass


def _stamp_key(path: str, stat: list[int]) -> str:
  return "|".join((os.path.basename(path), *map(str, stat)))


def stat_of(path: str) -> list[int]:
  status = os.stat(path)
  return [status.st_size, status.st_mtime_ns, status.st_ctime_ns]


# For worker processes.


class StoredArrays:
  """Arrays and the files they are in, so that worker processes map them instead of receiving copies.

  Args:
    arrays: in memory, or mapped from `paths`.
    names: of the arrays, for files that have to be written.
    paths: the files; None if the arrays are in memory only.
  """

  def __init__(self, arrays: Sequence[np.ndarray], names: Sequence[str], paths: Sequence[str] | None = None):
    self.arrays, self._names, self._paths = tuple(arrays), tuple(names), paths
    mapped = zip(paths, self.arrays, strict=True) if paths else ()
    self.tails = tuple(_mmap_guard.Tail(FileIdentity.of(path), array) for path, array in mapped)

  def ship(self) -> ShippedArrays:
    """Says what a worker process needs; arrays in memory go to a temporary folder, once, which ends with the process."""
    if self._paths is None:
      folder = tempfile.mkdtemp(prefix="maxtext-indices-")
      atexit.register(shutil.rmtree, folder, ignore_errors=True)
      self._paths = [os.path.join(folder, f"{name}.npy") for name in self._names]
      for path, array in zip(self._paths, self.arrays, strict=True):
        save_array(path, array)
    return ShippedArrays(self._names, tuple(self._paths), tuple((array.dtype.str, array.shape) for array in self.arrays))


class ShippedArrays(NamedTuple):
  """Stored arrays as they go to a worker process: names and files, dtype and shape of each."""

  names: tuple[str, ...]
  paths: tuple[str, ...]
  shapes: tuple[tuple[str, tuple[int, ...]], ...]

  def open(self) -> StoredArrays:
    """Maps the files.

    Raises:
      MMapError: if one is not what the sending process had.
    """
    try:
      found = tuple(map(map_array, self.paths))
    except StaleIndexError as error:
      raise MMapError(f"{error}; it was changed since the run opened it, start again.") from error
    arrays = []
    for path, array, (dtype, shape) in zip(self.paths, found, self.shapes, strict=True):
      size = math.prod(shape)
      if array.dtype.str != dtype or array.ndim != len(shape) or array.size < size:
        raise MMapError(f"{path} was changed since the run opened it; start again.")
      arrays.append(array.reshape(-1)[:size].reshape(shape))  # of a blend that is longer than asked for, the beginning
    return StoredArrays(arrays, self.names, self.paths)
