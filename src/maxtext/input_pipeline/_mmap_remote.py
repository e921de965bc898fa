# SPDX-License-Identifier: Apache-2.0
"""Datasets and index folders at a URL (`gs://`, `s3://` and whatever else fsspec knows).

`.idx` files and index arrays are copied to a folder of this machine once, and mapped from there; `.bin` files are read
by byte ranges and never copied. The folder holds

    objects/<URL>/<version>/<name>   a whole object, never changed: another version has another folder
    folders/<URL>/<name>             for an index folder: a link to such an object, or a file that was built here

where <URL> and <version> are hashes. Processes share it: one copies an object, the others wait, and when that one dies
the next goes on where it was. It may be deleted whenever no run is starting.
"""

from __future__ import annotations

from collections.abc import Sequence
import concurrent.futures
import contextlib
import os
import re
import secrets
from typing import NamedTuple

from maxtext.input_pipeline import _mmap_remote_io as remote_io
from maxtext.input_pipeline._mmap_files import MMapFileNotFoundError
from maxtext.input_pipeline._mmap_remote_copy import cache_root, configure, copy_of, hash_of, writing
from maxtext.input_pipeline._mmap_remote_io import RemoteFile, forget, is_folder, list_names, look, read_many
from maxtext.input_pipeline._mmap_remote_retry import ObjectChangedError

__all__ = [
    "ObjectChangedError",
    "RemoteFile",
    "adopt",
    "cache_root",
    "configure",
    "exists",
    "fetch",
    "fetch_files",
    "forget",
    "is_folder",
    "is_url",
    "known",
    "list_names",
    "look",
    "prepare",
    "read_many",
    "resolve",
]

_FILES_AT_ONCE = 8
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]+://")


def is_url(path: str | os.PathLike[str]) -> bool:
  """Whether a path begins with a scheme of two letters or more and `://`."""
  return bool(_URL.match(os.fspath(path)))


# Finding objects.


def exists(url: str) -> bool:
  """Whether there is an object (not a folder) at a URL.

  Raises:
    MMapReadError: if the store does not say.
  """
  try:
    look(url)
    return True
  except MMapFileNotFoundError:
    return False


def resolve(path: str) -> list[str]:
  """Returns the prefixes of the datasets that a URL names: itself as a prefix, or all `.idx` files of a folder.

  Raises:
    MMapFileNotFoundError: if it names no dataset, or half of one.
  """
  prefix = path.rstrip("/")
  halves = [suffix for suffix in (".idx", ".bin") if not path.endswith("/") and exists(prefix + suffix)]
  if halves:
    prefixes, names = [prefix], {prefix + suffix for suffix in halves}
  else:
    try:
      names = {f"{prefix}/{name}" for name in list_names(prefix)}
    except MMapFileNotFoundError as error:
      raise MMapFileNotFoundError(
          f"{prefix} names no dataset: {prefix}.idx and {prefix}.bin are not there, and {str(error).rstrip('.')}."
      ) from error
    prefixes = sorted(name.removesuffix(".idx") for name in names if name.endswith(".idx"))
  if not prefixes:
    raise MMapFileNotFoundError(f"{path} has no .idx files; give a dataset's URL without suffix, or its folder.")
  for found in prefixes:
    for suffix in (".idx", ".bin"):
      if found + suffix not in names:
        raise MMapFileNotFoundError(
            f"{found}{suffix} is missing, but the other half of the pair exists; restore it beside the other."
        )
  return prefixes


def prepare(prefixes: Sequence[str]) -> None:
  """Looks at the datasets among `prefixes` that are at a URL and copies their `.idx` files, several at a time.

  What is missing is left to be reported by whoever opens it.
  """

  def one(prefix: str) -> None:
    with contextlib.suppress(MMapFileNotFoundError):
      look(prefix + ".bin")
      fetch(prefix + ".idx")

  urls = [prefix for prefix in prefixes if is_url(prefix)]
  if urls:
    with concurrent.futures.ThreadPoolExecutor(_FILES_AT_ONCE, "remote-prepare") as pool:
      for _ in pool.map(one, urls):
        pass


class Known(NamedTuple):
  """What a process knows of a dataset at a URL, for the workers that it starts.

  Attributes:
    cache_root: see there.
    files: `.bin` and `.idx` as they were seen.
  """

  cache_root: str
  files: tuple[RemoteFile, ...]


def known(files: Sequence[RemoteFile]) -> Known:
  return Known(cache_root(), tuple(files))


def adopt(state: Known) -> None:
  """Takes over what another process knows."""
  if state.cache_root != cache_root():
    configure(state.cache_root)
  remote_io.remember(state.files)


# Copies.


def fetch(url: str) -> str:
  """Returns the path of a copy of an object, made now unless there is one of this very version.

  Raises:
    MMapFileNotFoundError, MMapReadError: if it cannot be read.
    MMapError: if the copy cannot be written, or the object is replaced again and again.
  """
  try:
    return copy_of(look(url))
  except ObjectChangedError:
    return copy_of(look(url, trusted_for=0.0))  # replaced since the look; the new one is as good


def fetch_files(folder_url: str, names: Sequence[str]) -> str:
  """Returns a folder of this machine that holds the files of `names` (or paths within) that a remote folder has.

  Other files may be written there, also in place of those that were copied: such a file stays until another version
  of the remote one appears. Nothing is ever written to the store.

  Raises:
    As `fetch`, but a missing file or folder is no error.
  """
  folder_url = folder_url.rstrip("/")
  mirror = os.path.join(cache_root(), "folders", hash_of(folder_url))
  with writing():
    os.makedirs(mirror, exist_ok=True)

  def one(name: str) -> None:
    url = f"{folder_url}/{name}"
    try:
      look(url, trusted_for=0.0)
      copy = fetch(url)
    except MMapFileNotFoundError:
      copy = None
    with writing():
      _mirror(mirror, name, copy)

  with concurrent.futures.ThreadPoolExecutor(_FILES_AT_ONCE, "remote-fetch") as pool:
    for _ in pool.map(one, names):
      pass
  return mirror


def _mirror(folder: str, name: str, copy: str | None) -> None:
  """Links `copy` as `name` in a folder, unless a file took its place there since it was linked first."""
  path = os.path.join(folder, name)
  folder, name = os.path.split(path)
  record = os.path.join(folder, f".{name}.copied")
  linked = os.readlink(record) if os.path.islink(record) else None
  if copy is None:
    if linked and os.path.islink(path) and os.readlink(path) == linked:
      os.remove(path)  # it is gone from the store
    return
  os.makedirs(folder, exist_ok=True)
  target = os.path.relpath(copy, folder)
  if linked != target or not os.path.exists(path):
    for place in (path, record):  # the record last: until then nothing is taken for done
      temporary = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.link")
      os.symlink(target, temporary)
      os.replace(temporary, place)
