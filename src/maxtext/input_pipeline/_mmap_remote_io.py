# SPDX-License-Identifier: Apache-2.0
"""Objects behind a URL: what they are, and reads of byte ranges that outlast the faults of networks and stores.

fsspec and its packages speak the protocols; they are imported when the first URL is used. Where a store is, and who
asks, is for their own settings to say (AWS_PROFILE, AWS_ENDPOINT_URL, GOOGLE_APPLICATION_CREDENTIALS,
STORAGE_EMULATOR_HOST, files in ~/.config/fsspec and so on). Neither NumPy nor JAX.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
import concurrent.futures
import logging
import os
import re
import threading
import time
from typing import Any, NamedTuple

from maxtext.input_pipeline._mmap_files import MMapError, MMapFileNotFoundError, MMapReadError
from maxtext.input_pipeline._mmap_remote_retry import (
  STORES,
  ObjectChangedError,
  Patience,
  ShortReplyError,
  one_line,
  patiently,
  scheme_of,
  status_of,
)

CONCURRENCY = 16  # requests of a process that are under way at the same time
LARGEST_READ = 8 << 20  # bytes up to which ranges that touch are read as one
_TRUSTED_FOR = 600.0  # seconds for which what an object is need not be asked again, where every read says it anyway
_LOOK_AGAIN = 30.0  # the same for stores whose reads cannot say it
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


class RemoteFile(NamedTuple):
  """An object as it was when it was looked at; another object in its place has another version.

  Attributes:
    path: its URL.
    size: bytes.
    version: generation, entity tag or time, whichever the store has.
    md5: checksum of the content in hexadecimal digits, or "" if the store gives none.
  """

  path: str
  size: int
  version: str
  md5: str = ""

  def unchanged(self, now: RemoteFile) -> bool:
    """Whether a later look at the URL saw the same object."""
    return (self.size, self.version) == (now.size, now.version)


# File systems.


def file_system(url: str) -> tuple[Any, str]:
  """Returns fsspec's file system for a URL, and the path in it.

  Raises:
    MMapError: if the scheme is unknown or its package is not installed.
  """
  scheme = scheme_of(url)
  extra = STORES.get(scheme)
  try:
    from fsspec.config import conf  # pylint: disable=import-outside-toplevel
    from fsspec.core import url_to_fs  # pylint: disable=import-outside-toplevel

    found, path = url_to_fs(url, **_options(scheme, conf))
  except ImportError as error:
    package = f"pip install 'maxtext[{extra}]'" if extra else f"install what fsspec needs for {scheme}://"
    raise MMapError(f"{url} needs a package that is not installed ({one_line(error)}); {package}.") from error
  except Exception as error:  # every package has its own errors for settings it cannot use
    raise MMapError(
        f"{url} cannot be used: {one_line(error)}; check the URL and the settings of {scheme}:// for fsspec."
    ) from error
  if extra is None:
    found.invalidate_cache()  # of listings: what is known of objects is remembered here
  if extra == "s3":
    found.retries = 1  # `patiently` tries again
  if extra == "gcs" and not (logger := logging.getLogger("gcsfs")).level:
    logger.setLevel(logging.CRITICAL)  # it logs errors with their stack, and raises them too
  return found, path


def _options(scheme: str, settings: dict[str, dict[str, Any]]) -> dict[str, Any]:
  """Returns options of the stores that are known; others may not take them, nor a chain of file systems."""
  if scheme not in STORES:
    return {}
  options: dict[str, Any] = {"use_listings_cache": False}
  if STORES[scheme] == "s3":
    theirs = {name: value for part in ("s3", "s3a") for name, value in settings.get(part, {}).items()}
    ours = {"max_pool_connections": 2 * CONCURRENCY, "retries": {"total_max_attempts": 1}}
    options["config_kwargs"] = {**theirs.get("config_kwargs", {}), **ours}
  return options


def _missing_bucket(url: str) -> str:
  """Says that the bucket of a missing object is missing too, if so."""
  scheme, _, rest = url.partition("://")
  bucket = f"{scheme}://{rest.partition('/')[0]}"
  if scheme.lower() not in STORES or bucket == url.rstrip("/"):
    return ""
  try:
    found, path = file_system(bucket)
    found.info(path)
  except FileNotFoundError:
    return f", and there is no bucket {bucket}"
  except Exception:  # pylint: disable=broad-exception-caught  # only a help in a message
    pass
  return ""


# What objects are.

_seen: dict[str, tuple[float, RemoteFile]] = {}  # by URL: when it was looked at, and what it was


def look(url: str, trusted_for: float = _TRUSTED_FOR) -> RemoteFile:
  """Says what an object is.

  Args:
    url: of an object.
    trusted_for: seconds for which an earlier look is good enough: opening many shards asks for each only once.

  Raises:
    MMapFileNotFoundError: if there is none, or a folder in its place.
    MMapReadError: if the store does not say.
  """
  when, file = _seen.get(url, (0.0, None))
  if file is not None and time.monotonic() - when < trusted_for:
    return file
  found, path = file_system(url)
  info = patiently(url, lambda reply: found.info(path, **_within(found, reply)))
  if info.get("type") == "directory":
    raise MMapFileNotFoundError(f"{url} is a folder; expected an object.")
  return _remember(_describe(url, info))


def _within(found, reply: float) -> dict[str, float]:
  """The argument that limits how long a call of an asynchronous file system takes."""
  return {"timeout": reply} if found.async_impl else {}


def _describe(url: str, info: dict[str, Any]) -> RemoteFile:
  size = info.get("size")
  if size is None:
    raise MMapReadError(f"{url} has no size that its server tells, so it cannot be read in parts; use another server.")
  keys = ("generation", "ETag", "etag", "mtime", "LastModified", "last_modified", "Last-Modified", "created")
  version = next((str(info[key]) for key in keys if info.get(key)), "")
  digest = ""
  if info.get("md5Hash"):
    digest = binascii.hexlify(base64.b64decode(info["md5Hash"])).decode()
  elif STORES.get(scheme_of(url)) == "s3" and (tag := _MD5.fullmatch(version)):
    digest = tag[1]
  return RemoteFile(url, int(size), version, digest)


def _remember(file: RemoteFile) -> RemoteFile:
  _seen[file.path] = (time.monotonic(), file)
  return file


def remember(files: Sequence[RemoteFile]) -> None:
  """Takes over what another process saw, so that both read the same objects."""
  for file in files:
    _remember(file)


def forget() -> None:
  """Forgets what was seen, so that objects that were replaced meanwhile are read anew."""
  _seen.clear()


def is_folder(url: str) -> bool:
  """Whether there are objects below a URL.

  Raises:
    MMapReadError: if the store does not say.
  """
  found, path = file_system(url.rstrip("/"))
  try:
    return patiently(url, lambda reply: found.info(path, **_within(found, reply)))["type"] == "directory"
  except MMapFileNotFoundError:
    return False


def list_names(folder_url: str) -> list[str]:
  """Returns the sorted names of the objects in a folder, and remembers what the listing says of them.

  Raises:
    MMapFileNotFoundError: if there is no such folder.
    MMapReadError: if the store does not list it.
  """
  url = folder_url.rstrip("/")
  found, path = file_system(url)
  try:
    entries = patiently(url, lambda reply: found.ls(path, detail=True, **_within(found, reply)))
  except MMapFileNotFoundError as error:
    raise MMapFileNotFoundError(f"{url} is no folder{_missing_bucket(url)}; check the URL.") from error
  names = []
  for info in entries:
    full = info["name"].rstrip("/")
    if info.get("type") != "file" or full == path.rstrip("/"):  # some list a folder or an object as its own content
      continue
    names.append(full.rpartition("/")[2])
    if info.get("size") is not None:
      _remember(_describe(f"{url}/{names[-1]}", info))
  return sorted(names)


# Reading.

_pools: dict[int, concurrent.futures.ThreadPoolExecutor] = {}
_pools_lock = threading.Lock()


def pool() -> concurrent.futures.ThreadPoolExecutor:
  """The threads of this process that wait for replies; their number bounds its requests."""
  with _pools_lock:
    if os.getpid() not in _pools:  # a forked process has no threads of its parent
      _pools.clear()
      _pools[os.getpid()] = concurrent.futures.ThreadPoolExecutor(CONCURRENCY, "remote-read")
    return _pools[os.getpid()]


def read_many(pieces: Sequence[tuple[RemoteFile, int, int]], patience: Patience | None = None) -> list[bytes]:
  """Reads byte ranges of objects, many at a time.

  Args:
    pieces: object, first byte and number of bytes of each.
    patience: how long each is tried.

  Returns:
    The bytes of each piece, exactly as many as asked for.

  Raises:
    MMapReadError: for bytes after the end of an object, and what `patiently` gives up.
    ObjectChangedError: if an object is not the one that was looked at.
  """
  for file, position, size in pieces:
    if position < 0 or position + size > file.size:
      raise MMapReadError(
          f"{file.path} is truncated: {size} bytes were expected at byte {position}, and it has {file.size}; copy it "
          "again."
      )
  results: list[bytes] = [b""] * len(pieces)

  def read(file: RemoteFile, begin: int, end: int, numbers: list[int]) -> None:
    data = memoryview(read_range(file, begin, end, patience))
    for number in numbers:
      first = pieces[number][1] - begin
      results[number] = bytes(data[first : first + pieces[number][2]])

  for file in {piece[0].path: piece[0] for piece in pieces}.values():
    _check_unchanged(file)
  run_all([(read, span) for span in _spans(pieces)])
  return results


def run_all(calls: Sequence[tuple[Callable, tuple]]) -> None:
  """Makes calls in the threads of `pool` and waits for them; raises the first error, once nothing runs any more."""
  futures = [pool().submit(function, *arguments) for function, arguments in calls]
  try:
    concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
  finally:
    for future in futures:
      future.cancel()
  concurrent.futures.wait(futures)
  for future in futures:
    if not future.cancelled():
      future.result()


def _spans(pieces) -> list[tuple[RemoteFile, int, int, list[int]]]:
  """Returns ranges that cover the pieces and nothing else: object, begin, end and the numbers of their pieces."""
  spans: list[list] = []
  for number in sorted(range(len(pieces)), key=lambda number: (pieces[number][0].path, pieces[number][1])):
    file, begin, size = pieces[number]
    last = spans[-1] if spans else None
    if last and last[0] == file and begin <= last[2] and max(last[2], begin + size) - last[1] <= LARGEST_READ:
      last[2] = max(last[2], begin + size)
      last[3].append(number)
    else:
      spans.append([file, begin, begin + size, [number]])
  return [tuple(span) for span in spans if span[2] > span[1]]


def read_range(file: RemoteFile, begin: int, end: int, patience: Patience | None = None) -> bytes:
  """Reads bytes [begin, end) of an object; see `read_many`."""
  found, path = file_system(file.path)

  def read(reply: float) -> bytes:
    try:
      data = _read_once(found, path, file, begin, end, reply)
    except Exception as error:
      if isinstance(error, FileNotFoundError) or status_of(error) in (404, 412, 416):
        _check_unchanged(file, 0.0)
      raise
    if len(data) > end - begin:
      raise MMapReadError(
          f"{file.path} cannot be read in parts: {end - begin} bytes were asked for and {len(data)} came; use a server "
          "that answers range requests."
      )
    if len(data) < end - begin:
      _check_unchanged(file, 0.0)
      raise ShortReplyError(f"{len(data)} of {end - begin} bytes came")
    return data

  return patiently(file.path, read, patience)


def _read_once(found, path: str, file: RemoteFile, begin: int, end: int, reply: float) -> bytes:
  """Reads once, of the version that was looked at if the store can be asked for it."""
  kind = STORES.get(scheme_of(file.path))
  if kind == "s3":
    from fsspec.asyn import sync  # pylint: disable=import-outside-toplevel

    data: Any = sync(found.loop, _read_s3, found, path, file.version, begin, end, timeout=reply)
    return data
  version = {"generation": file.version} if kind == "gcs" and file.version.isdigit() else {}
  return found.cat_file(path, start=begin, end=end, **version, **_within(found, reply))


async def _read_s3(found, path: str, tag: str, begin: int, end: int) -> bytes:
  """Reads from S3 on the condition that the entity tag is the one that was seen, which `cat_file` cannot say."""
  bucket, key, version = found.split_path(path)
  condition = {"IfMatch": tag} if tag.startswith('"') else {}  # else it is a time: some servers give no tags
  if version:
    condition["VersionId"] = version
  reply = await found._call_s3("get_object", Bucket=bucket, Key=key, Range=f"bytes={begin}-{end - 1}", **condition)
  async with reply["Body"] as body:
    return await body.read()


def _check_unchanged(file: RemoteFile, trusted_for: float | None = None) -> None:
  """Raises ObjectChangedError if the URL has another object now than the one that was looked at."""
  if trusted_for is None:
    if STORES.get(scheme_of(file.path)):
      return  # every read says it
    trusted_for = _LOOK_AGAIN
  try:
    now = look(file.path, trusted_for)
  except MMapFileNotFoundError as error:
    raise ObjectChangedError(f"{file.path} was removed while it is in use; put it back and start again.") from error
  if not file.unchanged(now):
    change = f"version {file.version or 'unknown'} and is {now.version or 'unknown'} now"
    if file.size != now.size:
      change = f"{file.size} bytes and has {now.size} now"
    raise ObjectChangedError(
        f"{file.path} was changed while it is in use: it had {change}; start again with the dataset as it is to be."
    )
