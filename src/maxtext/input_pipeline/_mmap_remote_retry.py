# SPDX-License-Identifier: Apache-2.0
"""Requests to object stores: which failures pass, how long they are tried, and how the others are told to the user."""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import logging
import random
import threading
import time
from typing import Any

from maxtext.input_pipeline._mmap_files import MMapError, MMapFileNotFoundError, MMapReadError

log = logging.getLogger(__name__)

# The store behind a scheme, which is also the extra of our package that it needs.
STORES = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}


def scheme_of(url: str) -> str:
  return url.partition("://")[0].lower()


@dataclasses.dataclass(frozen=True)
class Patience:
  """How long a request is tried.

  Attributes:
    reply: seconds to wait for one reply; doubled whenever none came, since a store may be slow and not broken.
    total: seconds until a request is given up, all tries together.
    first_pause: seconds between the first two tries, on average; doubled from try to try.
    longest_pause: the most seconds between two tries.
  """

  reply: float = 30.0
  total: float = 300.0
  first_pause: float = 0.2
  longest_pause: float = 20.0


PATIENCE = Patience()


class ObjectChangedError(MMapError):
  """An object that is not the one that was looked at any more."""


def patiently(url: str, action: Callable[[float], Any], patience: Patience | None = None) -> Any:
  """Calls `action` with the seconds that its reply may take, again and again while what fails may pass.

  Raises:
    MMapFileNotFoundError, MMapReadError: if there is no such object, the store refuses, or the patience ends.
    ObjectChangedError: if the store says that the object is another one by now.
  """
  patience = patience or PATIENCE
  begin, reply, tries = time.monotonic(), patience.reply, 0
  while True:
    tries += 1
    try:
      return action(reply)
    except MMapError:
      raise
    except Exception as error:  # pylint: disable=broad-exception-caught
      if _kind(error) != "passing":
        raise lasting(url, error) from error
      reason = _reason(error, reply)
      pause = min(patience.first_pause * 2 ** (tries - 1), patience.longest_pause) * random.uniform(0.5, 1.5)
      spent = time.monotonic() - begin
      if spent + pause > patience.total or not threading.main_thread().is_alive():  # or Python is about to end
        raise MMapReadError(
            f"{url} cannot be read: {reason} (tried {tries} times in {spent:.0f} seconds); check the network and the "
            "store, then start again."
        ) from error
      if isinstance(error, TimeoutError):
        reply *= 2
      log.log(logging.WARNING if tries > 2 else logging.INFO, "%s: %s; try %d follows.", url, reason, tries + 1)
    time.sleep(pause)


class ShortReplyError(OSError):
  """A reply of fewer bytes than were asked for."""


_CREDENTIALS = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
    "SSOTokenLoadError",
    "UnauthorizedSSOTokenError",
    "TokenRetrievalError",
    "DefaultCredentialsError",
    "RefreshError",
}
# Errors of the packages below fsspec that are no OSError and pass: of connections, and of replies that end early.
_PASSING = {
    "aiohttp.ClientError",
    "botocore.ChecksumError",
    "botocore.ConnectionError",
    "botocore.FlexibleChecksumError",
    "botocore.HTTPClientError",
    "botocore.IncompleteReadError",
    "botocore.ResponseParserError",
    "gcsfs.ChecksumError",
    "google.TransportError",
    "http.HTTPException",
    "urllib3.HTTPError",
}


def _kind(error: BaseException) -> str:
  """Returns missing, credentials, denied, changed, passing or refused."""
  classes = type(error).__mro__
  status = status_of(error)
  if status == 401 or {cls.__name__ for cls in classes} & _CREDENTIALS and not getattr(error, "retryable", False):
    return "credentials"
  if isinstance(error, FileNotFoundError | NotADirectoryError) or status in (404, 410):
    return "missing"
  if isinstance(error, PermissionError) or status == 403 or str(error).startswith("Forbidden"):
    return "denied"
  if status == 412:
    return "changed"
  if status is not None and status >= 300:
    return "passing" if status >= 500 or status in (408, 425, 429) else "refused"
  passing = isinstance(error, OSError | EOFError) and not isinstance(error, IsADirectoryError | FileExistsError)
  if passing or {f"{cls.__module__.partition('.')[0]}.{cls.__name__}" for cls in classes} & _PASSING:
    return "passing"
  return "refused"


def status_of(error: BaseException | None) -> int | None:
  """Returns the HTTP status behind an error of one of the packages below fsspec, if it has one."""
  found = getattr(error, "status", None) or getattr(error, "code", None)
  for part in (error, error and error.__cause__):  # s3fs raises an OSError from botocore's error
    response = getattr(part, "response", None)
    if isinstance(response, dict):
      found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
  return int(str(found)) if str(found).isdigit() else None


def one_line(error: BaseException) -> str:
  """What an error says, as part of a sentence."""
  return " ".join(str(error).split())[:300].rstrip(".").replace(". ", "; ") or type(error).__name__


def _reason(error: BaseException, reply: float) -> str:
  status = status_of(error)
  if isinstance(error, TimeoutError) and status is None:
    return f"no whole reply came within {reply:g} seconds"
  if status is not None:
    return f"the store answers {status} ({one_line(error)})"
  return f"{type(error).__name__}, {one_line(error)}"


def lasting(url: str, error: BaseException) -> MMapError:
  """The error for what another try would not mend."""
  kind, scheme = _kind(error), scheme_of(url)
  if kind == "missing":
    return MMapFileNotFoundError(f"{url} does not exist; check the URL.")
  if kind == "changed":
    return ObjectChangedError(
        f"{url} was changed while it is in use; start again with the dataset as it is to be."
    )
  if kind == "credentials":
    advice = {
        "s3": "set AWS_PROFILE or AWS_ACCESS_KEY_ID, or FSSPEC_S3='{\"anon\": true}' for a public bucket",
        "gcs": "set GOOGLE_APPLICATION_CREDENTIALS or log in with gcloud, or FSSPEC_GS='{\"token\": \"anon\"}' for a "
        "public bucket",
    }.get(STORES.get(scheme, ""), f"set them as fsspec's {scheme}:// expects them")
    return MMapReadError(f"{url} cannot be read without valid credentials ({one_line(error)}); {advice}.")
  if kind == "denied":
    return MMapReadError(
        f"{url} cannot be read: the store denies access ({one_line(error)}); give these credentials the right to read "
        "and to list it."
    )
  return MMapReadError(f"{url} cannot be read: {_reason(error, 0)}; check the URL and the store's settings.")
