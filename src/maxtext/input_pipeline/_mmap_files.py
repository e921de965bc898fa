# SPDX-License-Identifier: Apache-2.0
"""How dataset and index files are opened: mapped without a descriptor, or read by position; and the errors about them.

NumPy only.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
import contextlib
import ctypes
import errno
import os
import resource
import threading
from typing import NamedTuple
import weakref

import numpy as np

from maxtext.input_pipeline import _mmap_guard


class MMapError(ValueError):
  """A dataset, an index file or a config key that cannot be used; the message is one sentence for the user."""

  __str__ = Exception.__str__  # OSError, a base of some, would print errno and file name in place of the message


class MMapFileNotFoundError(MMapError, FileNotFoundError):
  """A dataset or index file that is not there."""


class MMapReadError(MMapError, OSError):
  """A dataset or index file that is there and cannot be read, or ends too early."""


_ADVICE = {
    errno.ENOENT: "put it back and start again",
    errno.ENOTDIR: "put it back and start again",
    errno.EACCES: "give this user the right to read it",
    errno.EPERM: "give this user the right to read it",
    errno.EMFILE: "raise the limit of open files (ulimit -n) and start again",
}


@contextlib.contextmanager
def reading(path: str, failure: str = "cannot be read") -> Iterator[None]:
  """Turns an OSError about a file into MMapFileNotFoundError or MMapReadError, with its errno, strerror and filename."""
  try:
    yield
  except OSError as error:
    raise unreadable(path, error, failure) from error


def unreadable(path: str, error: OSError, failure: str = "cannot be read") -> MMapFileNotFoundError | MMapReadError:
  """The error for a file that the system refuses to open or read."""
  missing = isinstance(error, FileNotFoundError | NotADirectoryError)
  reason = error.strerror or str(error)
  advice = _ADVICE.get(error.errno or 0, "check its disk or network mount and start again")
  found = (MMapFileNotFoundError if missing else MMapReadError)(f"{path} {failure} ({reason}); {advice}.")
  found.errno, found.strerror, found.filename = error.errno, reason, path
  return found


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_PROT_READ, _MAP_SHARED, _MAP_FAILED = 1, 1, ctypes.c_void_p(-1).value


def map_file(path: str) -> np.ndarray:
  """Maps a whole file read-only and returns it as uint8[size].

  Unlike np.memmap, which keeps a duplicate of the descriptor, a mapping holds no open file: a blend of many
  datasets must not run into the limit of open files. A file that is truncated later reads as zeros from there on,
  and `_mmap_guard.check` raises.

  Raises:
    MMapFileNotFoundError, MMapReadError: both are OSError too.
  """
  with reading(path):
    descriptor = os.open(path, os.O_RDONLY)
    try:
      size = os.fstat(descriptor).st_size
      if not size:
        return np.empty(0, np.uint8)
      address = _libc.mmap(None, size, _PROT_READ, _MAP_SHARED, descriptor, 0)
      code = ctypes.get_errno()
    finally:
      os.close(descriptor)
    if address == _MAP_FAILED:
      raise OSError(code, os.strerror(code), path)
  buffer = (ctypes.c_uint8 * size).from_address(address)
  guarded = _mmap_guard.watch(address, size, path)
  weakref.finalize(buffer, _unmap, address, size, guarded).atexit = False
  view = np.frombuffer(buffer, np.uint8)
  view.flags.writeable = False
  return view


def _unmap(address: int, size: int, guarded: int | None) -> None:
  _mmap_guard.unwatch(guarded)
  _libc.munmap(address, size)


class FileIdentity(NamedTuple):
  """A file as it was when it was looked at; another file in its place has another identity."""

  path: str
  size: int
  mtime_ns: int
  inode: int

  @classmethod
  def of(cls, path: str) -> FileIdentity:
    with reading(path):
      return cls._from(path, os.stat(path))

  @classmethod
  def _from(cls, path: str, status: os.stat_result) -> FileIdentity:
    return cls(path, status.st_size, status.st_mtime_ns, status.st_ino)

  def unchanged(self, now: FileIdentity) -> bool:
    """Whether a later look at the path saw the same file; not by inode, which some network file systems make anew."""
    return (self.size, self.mtime_ns) == (now.size, now.mtime_ns)


class DescriptorPool:
  """Read-only file descriptors, at most `capacity` of them open while idle; safe for threads, not kept over a fork."""

  def __init__(self, capacity: int):
    self.capacity = capacity
    self._lock = threading.Lock()
    self._open: collections.OrderedDict[FileIdentity, list[int]] = collections.OrderedDict()  # [descriptor, users]
    self._pid = os.getpid()

  def acquire(self, file: FileIdentity) -> int:
    """Returns a descriptor of a file, which stays open until `release` is called for it.

    Raises:
      MMapError: if another file has taken its place, or it has changed, since it was looked at.
    """
    with self._lock:
      if self._pid != os.getpid():
        self._open.clear()
        self._pid = os.getpid()
      entry = self._open.get(file)
      if entry is None:
        self._close_idle(self.capacity - 1)
        entry = self._open[file] = [_open_unchanged(file), 0]
      self._open.move_to_end(file)
      entry[1] += 1
      return entry[0]

  def release(self, file: FileIdentity) -> None:
    with self._lock:
      self._open[file][1] -= 1

  def forget(self, file: FileIdentity) -> None:
    """Closes the descriptor of a file if nobody uses it."""
    with self._lock:
      entry = self._open.get(file)
      if entry and not entry[1]:
        os.close(self._open.pop(file)[0])

  def _close_idle(self, keep: int) -> None:
    for file in [file for file, (_, users) in self._open.items() if not users][: max(len(self._open) - keep, 0)]:
      os.close(self._open.pop(file)[0])


def _open_unchanged(file: FileIdentity) -> int:
  with reading(file.path, "cannot be opened any more"):
    descriptor = os.open(file.path, os.O_RDONLY)
    try:
      found = FileIdentity._from(file.path, os.fstat(descriptor))
    except OSError:
      os.close(descriptor)
      raise
  if not file.unchanged(found):
    os.close(descriptor)
    if found.size != file.size:
      change = f"it had {file.size} bytes and has {found.size} now"
    else:
      then, now = np.datetime64(file.mtime_ns, "ns"), np.datetime64(found.mtime_ns, "ns")
      change = f"its modification time was {then} and is {now} now"
    raise MMapError(
        f"{file.path} was changed while it is in use: {change}; start again with the dataset as it is to be."
    )
  return descriptor


def _share_of_open_files() -> int:
  """A quarter of the files that this process may have open, for many shards without opening each anew."""
  limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
  return 1024 if limit == resource.RLIM_INFINITY else min(max(limit // 4, 16), 1024)


DESCRIPTORS = DescriptorPool(_share_of_open_files())
