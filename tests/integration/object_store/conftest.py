# SPDX-License-Identifier: Apache-2.0
"""An S3 server and a GCS emulator on loopback, each behind a proxy that breaks replies as told."""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import dataclasses
import http.client
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
import json
import logging
import os
import re
import socket
import struct
import threading
from typing import Any

import fsspec
import fsspec.config
from gcp_storage_emulator.server import create_server
from moto.server import ThreadedMotoServer
import pytest
import s3fs

from maxtext.input_pipeline import _mmap_remote as remote
from maxtext.input_pipeline import _mmap_remote_copy as remote_copy
from maxtext.input_pipeline import _mmap_remote_retry as remote_retry

# gcsfs asks GCS over gRPC what kind of bucket it is; no emulator speaks that. It reads the switch when it is imported.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"

BUCKET = "corpora"
DROP, RESET, STALL, SHORT, FLIP = "drop", "reset", "stall", "short", "flip"


@dataclasses.dataclass(frozen=True)
class Request:
  """A request as the proxy saw it; `span` is its Range header without "bytes=", or ""."""

  method: str
  path: str
  span: str


class Proxy(ThreadingHTTPServer):
  """Hands requests on to a server, and breaks the replies to some.

  Attributes:
    requests: what came, in order.
    faults: one for each of the next requests for a range: a status to answer with, DROP (half of the body, then a
      reset), RESET (no reply), STALL (no reply until the end of the test), SHORT (a whole reply of half the bytes),
      FLIP (a bit of the body), a function to call first, or None.
    statuses: path pattern to a status to answer all requests with.
    most: most requests for a range that were under way at once.
    gate: if set, called by each request for a range before it is handed on.
  """

  daemon_threads = True
  request_queue_size = 128

  def __init__(self, host: str, port: int):
    self.upstream = host, port
    super().__init__(("127.0.0.1", 0), _Handler)
    self.url = f"http://127.0.0.1:{self.server_address[1]}"
    self.lock = threading.Lock()
    self.released = threading.Event()
    self.reset()
    threading.Thread(target=self.serve_forever, daemon=True).start()

  def reset(self) -> None:
    self.released.set()  # lets go of those that stall
    self.released = threading.Event()
    self.requests: list[Request] = []
    self.faults: list[Any] = []
    self.statuses: dict[str, int] = {}
    self.under_way = self.most = 0
    self.gate: Callable[[], Any] | None = None

  def spans(self, part: str = "") -> list[str]:
    """Ranges that were asked for, of paths that contain `part`."""
    return [request.span for request in self.requests if request.span and part in request.path]

  @contextlib.contextmanager
  def watch(self, request: Request):
    """Notes a request and gives its fault."""
    with self.lock:
      self.requests.append(request)
      fault = next((status for pattern, status in self.statuses.items() if re.search(pattern, request.path)), None)
      if fault is None and request.span and self.faults:
        fault = self.faults.pop(0)
      self.under_way += bool(request.span)
      self.most = max(self.most, self.under_way)
    try:
      if request.span and self.gate:
        self.gate()
      yield fault
    finally:
      with self.lock:
        self.under_way -= bool(request.span)

  def handle_error(self, request, client_address):
    """Clients that gave up are part of the tests."""


class _Handler(BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  server: Proxy

  def log_message(self, format, *args):
    pass

  def do_GET(self):
    span = self.headers.get("Range", "").removeprefix("bytes=")
    with self.server.watch(Request(self.command, self.path, span)) as fault:
      if callable(fault):
        fault = fault()
      if fault == RESET:
        self._reset()
      elif fault == STALL:
        self.server.released.wait(60)
        self._reset()
      elif isinstance(fault, int):
        self._answer(fault, {}, b"")
      else:
        self._hand_on(fault)

  def do_HEAD(self):
    self.do_GET()

  def do_POST(self):
    self.do_GET()

  def do_PUT(self):
    self.do_GET()

  def do_DELETE(self):
    self.do_GET()

  def _hand_on(self, fault) -> None:
    body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
    connection = http.client.HTTPConnection(*self.server.upstream, timeout=30)
    connection.request(self.command, self.path, body, dict(self.headers))
    reply = connection.getresponse()
    data, headers = reply.read(), dict(reply.getheaders())
    connection.close()
    if fault == SHORT:
      data = data[: len(data) // 2]
    if fault == FLIP:
      data = data[:-1] + bytes([data[-1] ^ 1])
    self._answer(reply.status, headers, data, len(data) // 2 if fault == DROP else None)

  def _answer(self, status: int, headers: dict[str, str], data: bytes, stop: int | None = None) -> None:
    self.send_response_only(status)
    for name, value in headers.items():
      if name.lower() not in ("content-length", "transfer-encoding", "connection"):
        self.send_header(name, value)
    length = headers.get("Content-Length", "0") if self.command == "HEAD" else str(len(data))
    self.send_header("Content-Length", length)
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(data if stop is None else data[:stop])
    if stop is not None:
      self._reset()

  def _reset(self) -> None:
    """Closes the connection without the ceremony of a close."""
    self.wfile.flush()
    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    self.connection.close()
    self.close_connection = True


@dataclasses.dataclass
class Store:
  """A store that a test may use.

  Attributes:
    scheme: s3 or gs.
    proxy: in front of it; what is tested goes through it.
    direct: file system that writes past the proxy.
    environment: what a process needs to find the proxy.
  """

  scheme: str
  proxy: Proxy
  direct: Any
  environment: dict[str, str]

  def put(self, name: str, content: bytes) -> str:
    self.direct.pipe_file(f"{BUCKET}/{name}", content)
    return f"{self.scheme}://{BUCKET}/{name}"

  def put_file(self, path: str, name: str) -> str:
    with open(path, "rb") as file:
      return self.put(name, file.read())

  def put_dataset(self, prefix: str, name: str) -> str:
    for suffix in (".idx", ".bin"):
      self.put_file(prefix + suffix, name + suffix)
    return f"{self.scheme}://{BUCKET}/{name}"


@pytest.fixture(scope="session")
def s3_store():
  """moto's server: S3 over HTTP, in memory."""
  logging.getLogger("werkzeug").setLevel(logging.ERROR)
  server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
  server.start()
  host, port = server.get_host_and_port()
  proxy = Proxy(host, port)
  direct = s3fs.S3FileSystem(
      endpoint_url=f"http://{host}:{port}", key="test", secret="test", client_kwargs={"region_name": "us-east-1"}
  )
  direct.call_s3("create_bucket", Bucket=BUCKET)
  environment = {
      "AWS_ENDPOINT_URL": proxy.url,
      "AWS_ACCESS_KEY_ID": "test",
      "AWS_SECRET_ACCESS_KEY": "test",
      "AWS_DEFAULT_REGION": "us-east-1",
      "AWS_EC2_METADATA_DISABLED": "true",
      "AWS_CONFIG_FILE": os.devnull,
      "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
  }
  yield Store("s3", proxy, direct, environment)
  proxy.shutdown()
  server.stop()


@pytest.fixture(scope="session")
def gs_store():
  """gcp-storage-emulator: the JSON interface of GCS, in memory."""
  logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
  with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
  server = create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
  server.start()
  proxy = Proxy("127.0.0.1", port)
  environment = {"STORAGE_EMULATOR_HOST": proxy.url, "FSSPEC_GS": json.dumps({"token": "anon"})}
  import gcsfs  # here, after the switch

  direct = gcsfs.GCSFileSystem(token="anon", endpoint_url=f"http://127.0.0.1:{port}", use_listings_cache=False)
  yield Store("gs", proxy, direct, environment)
  proxy.shutdown()
  server.stop()


QUICK = remote_retry.Patience(reply=20.0, total=60.0, first_pause=0.01, longest_pause=0.02)


@pytest.fixture
def prepared(tmp_path, monkeypatch):
  """Makes a store the one that URLs of its scheme lead to, with an empty cache folder."""

  def prepare(store: Store) -> Store:
    store.proxy.reset()
    for name in [name for name in os.environ if name.startswith("AWS_")]:
      monkeypatch.delenv(name)
    for name, value in store.environment.items():
      monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
    monkeypatch.setattr(remote_retry, "PATIENCE", QUICK)
    monkeypatch.setattr(remote_copy, "_cache_dir", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    remote.forget()
    fsspec.get_filesystem_class(store.scheme).clear_instance_cache()
    return store

  yield prepare
  remote.forget()


@pytest.fixture(params=["s3", "gs"])
def store(request, prepared):
  """Each store in turn."""
  return prepared(request.getfixturevalue(f"{request.param}_store"))


@pytest.fixture
def s3(s3_store, prepared):
  return prepared(s3_store)


@pytest.fixture
def gs(gs_store, prepared):
  return prepared(gs_store)
