# SPDX-License-Identifier: Apache-2.0
"""Copies of remote objects on this machine: shared between processes, resumed where a process left off, checked."""

from __future__ import annotations

from collections.abc import Generator
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import threading
import time

import xxhash

from maxtext.input_pipeline import _mmap_remote_io as remote_io
from maxtext.input_pipeline._mmap_files import MMapError, MMapReadError
from maxtext.input_pipeline._mmap_remote_io import RemoteFile

log = logging.getLogger(__name__)

PART = 8 << 20  # bytes of an object that are copied by one request
_REPORT_EVERY = 10.0  # seconds between two reports about a long copy
_KEEP_OLD = 7 * 86400  # seconds after which the copy of a version that was replaced may be removed

_cache_dir = ""


def configure(cache_dir: str) -> None:
  """Sets the folder for copies of this process and of the workers that it starts later; "" for the default."""
  global _cache_dir
  _cache_dir = os.path.abspath(os.path.expanduser(cache_dir)) if cache_dir else ""


def cache_root() -> str:
  """Returns the folder for copies: as configured, else `maxtext/mmap` in $XDG_CACHE_HOME or ~/.cache."""
  base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
  return _cache_dir or os.path.join(base, "maxtext", "mmap")


def hash_of(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()[:32]


@contextlib.contextmanager
def writing() -> Generator[None]:
  """Turns an OSError about the cache folder into an MMapError."""
  try:
    yield
  except MMapError:
    raise
  except OSError as error:
    raise MMapError(
        f"cannot write copies of remote files to {cache_root()} ({error.strerror or error}); set mmap_remote_cache_dir "
        "to a writable folder with room."
    ) from error


def copy_of(file: RemoteFile) -> str:
  """Returns the copy of an object, making it if need be."""
  versions = os.path.join(cache_root(), "objects", hash_of(file.path))
  folder = os.path.join(versions, hash_of(f"{file.size} {file.version}"))
  path = os.path.join(folder, file.path.rpartition("/")[2])
  if _is_whole(path, file):
    return path
  with writing():
    os.makedirs(folder, exist_ok=True)
  with _lock(os.path.join(folder, "lock"), file.path):
    if not _is_whole(path, file):
      _Download(file, path).run()
  _remove_old(versions, folder)
  return path


def _is_whole(path: str, file: RemoteFile) -> bool:
  try:
    return os.path.getsize(path) == file.size
  except OSError:
    return False


def _remove_old(versions: str, present: str) -> None:
  """Removes copies of other versions of an object, unless they are young: a run may still open them."""
  with contextlib.suppress(OSError):  # another process may be at it too
    for entry in os.scandir(versions):
      if entry.path != present and time.time() - entry.stat().st_mtime > _KEEP_OLD:
        shutil.rmtree(entry.path, ignore_errors=True)


@contextlib.contextmanager
def _lock(path: str, what: str) -> Generator[None]:
  """Holds a lock file; the system frees it when its owner ends, however that happens."""
  with writing():
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
      if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
        os.close(descriptor)
        raise
      log.info("Waiting for another process that copies %s.", what)
      fcntl.flock(descriptor, fcntl.LOCK_EX)
  try:
    yield
  finally:
    os.close(descriptor)


class _Download:
  """Copies one object by parts. Only the owner of the lock runs it.

  Beside the file that grows, `.partial`, lies `.parts`: a checksum of 16 bytes for each part that is there, so that a
  later process trusts what it finds, also after a crash of the machine.
  """

  def __init__(self, file: RemoteFile, path: str):
    self.file, self.path = file, path
    self.partial, self.parts = path + ".partial", path + ".parts"
    self._begin, self._reported = time.monotonic(), time.monotonic()
    self._copied = 0
    self._reporting = threading.Lock()

  def run(self) -> None:
    digests = set()
    while True:
      with writing():
        self._copy()
      whole, digest = self._check()
      if whole or digest in digests:
        break
      if digests:
        self._clear()
        raise MMapReadError(
            f"{self.file.path}: two copies differ, and neither has the store's checksum {self.file.md5}; check network "
            "and memory of this machine, then start again."
        )
      digests.add(digest)
      log.warning("%s: the copy does not have the store's checksum %s; copying again.", self.file.path, self.file.md5)
      self._clear()
    if not whole:  # two copies agree: not all entity tags are checksums
      log.info("%s: its entity tag %s is no checksum of its content.", self.file.path, self.file.version)
    with writing():
      os.replace(self.partial, self.path)
      os.remove(self.parts)

  def _copy(self) -> None:
    """Makes `.partial` whole."""
    count = -(-self.file.size // PART)
    data, journal = (os.open(path, os.O_RDWR | os.O_CREAT, 0o666) for path in (self.partial, self.parts))
    try:
      missing = self._missing(data, journal, count)
      room = shutil.disk_usage(os.path.dirname(self.path)).free
      if len(missing) * PART > room + PART:
        raise MMapError(
            f"{self.file.path} has {self.file.size} bytes and {cache_root()} has room for {room}; set "
            "mmap_remote_cache_dir to a folder with more room."
        )
      os.ftruncate(data, self.file.size)
      os.ftruncate(journal, 16 * count)
      if len(missing) > 1:
        log.info("Copying %s, %d of its %d parts.", self.file.path, len(missing), count)
      self._copied = count - len(missing)
      remote_io.run_all([(self._copy_part, (data, journal, number, count)) for number in missing])
      os.fsync(data)
    finally:
      os.close(data)
      os.close(journal)

  def _missing(self, data: int, journal: int, count: int) -> list[int]:
    """Returns the parts that are not there, or not as they were written."""
    missing, checksums = [], os.pread(journal, 16 * count, 0)
    for number in range(count):
      checksum = checksums[16 * number : 16 * number + 16]
      begin, end = self._bounds(number)
      written = len(checksum) == 16 and any(checksum)
      if not written or checksum != xxhash.xxh3_128_digest(os.pread(data, end - begin, begin)):
        missing.append(number)
    return missing

  def _bounds(self, number: int) -> tuple[int, int]:
    return number * PART, min((number + 1) * PART, self.file.size)

  def _copy_part(self, data: int, journal: int, number: int, count: int) -> None:
    begin, end = self._bounds(number)
    content = remote_io.read_range(self.file, begin, end)
    written = 0
    while written < len(content):
      written += os.pwrite(data, memoryview(content)[written:], begin + written)
    os.pwrite(journal, xxhash.xxh3_128_digest(content), 16 * number)
    with self._reporting:
      self._copied += 1
      if time.monotonic() - self._reported > _REPORT_EVERY:
        self._reported = time.monotonic()
        log.info("Copying %s: %d of its %d parts are there.", self.file.path, self._copied, count)

  def _check(self) -> tuple[bool, str]:
    """Whether the copy has the checksum of the store, if there is one; and its MD5 checksum."""
    if not self.file.md5:
      return True, ""
    with writing(), open(self.partial, "rb") as file:
      digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    return digest == self.file.md5, digest

  def _clear(self) -> None:
    with writing():
      os.remove(self.partial)
      os.remove(self.parts)
