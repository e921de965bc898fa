# SPDX-License-Identifier: Apache-2.0
"""Datasets and index folders in S3 and GCS, over HTTP, with connections that break."""

from __future__ import annotations

from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time

import fsspec
import numpy as np
import pytest

from maxtext.input_pipeline import _mmap_index_utils as index_utils
from maxtext.input_pipeline import _mmap_remote as remote
from maxtext.input_pipeline import _mmap_remote_copy as remote_copy
from maxtext.input_pipeline import _mmap_remote_io as remote_io
from maxtext.input_pipeline import _mmap_remote_retry as remote_retry
from maxtext.input_pipeline._mmap_datasource import MegatronNpyDataSource
from maxtext.input_pipeline._mmap_files import MMapFileNotFoundError, MMapReadError
from maxtext.input_pipeline._mmap_index_cache import IndexRequest
from maxtext.input_pipeline._mmap_indexed_dataset import MMapIndexedDataset
from maxtext.input_pipeline._mmap_iterator import GlobalOrderDataset
from maxtext.input_pipeline._mmap_shards import Piece, ShardedDataset
from maxtext.input_pipeline._mmap_windows import Shard, TokenStream
from support import TextRows, content_of, one_sentence

CONTENT = np.random.default_rng(3).bytes(100_000)
PIECES = [(1000 * number, 300) for number in range(20)]
SLICES = [CONTENT[position : position + size] for position, size in PIECES]


def read(url: str) -> list[bytes]:
  file = remote.look(url)
  return remote.read_many([(file, position, size) for position, size in PIECES])


def test_a_dataset_in_a_store_is_the_dataset(store, dataset):
  url = store.put_dataset(dataset, "same/corpus")
  here, there = MMapIndexedDataset(dataset), MMapIndexedDataset(url)
  assert there.scan() == here.scan()
  pieces = [(int(position), 4) for position in here.pointers[:-1]]
  assert there.read_many(pieces) == here.read_many(pieces)
  assert (there[17] == here[17]).all()
  assert remote.resolve(url) == [url] and remote.resolve(url.rpartition("/")[0]) == [url]
  asked = len(store.proxy.requests)
  again = pickle.loads(pickle.dumps(there))
  assert len(store.proxy.requests) == asked and (again[5] == here[5]).all()


def test_ranges_are_read_side_by_side_up_to_the_bound(store):
  url = store.put("side/x.bin", CONTENT)
  remote.look(url)
  store.proxy.gate = threading.Barrier(remote_io.CONCURRENCY).wait  # nobody passes unless all are there at once
  file = remote.look(url)
  pieces = [(1000 * number, 10) for number in range(2 * remote_io.CONCURRENCY)]
  assert remote.read_many([(file, *piece) for piece in pieces]) == [CONTENT[p : p + size] for p, size in pieces]
  assert store.proxy.most == remote_io.CONCURRENCY


@pytest.mark.parametrize("fault", ["drop", "reset", "short", 503, 500, 429])
def test_a_reply_that_breaks_loses_nothing_and_is_asked_for_once_more(store, fault, monkeypatch):
  monkeypatch.setattr("random.random", lambda: 0.0)  # the pauses of gcsfs, which tries some of it again itself
  url = store.put("faults/x.bin", CONTENT)
  remote.look(url)
  store.proxy.faults = [None] * 5 + [fault]
  assert read(url) == SLICES
  spans = store.proxy.spans("x.bin")
  assert len(spans) == len(PIECES) + 1 and len(set(spans)) == len(PIECES)


def test_many_faults_in_a_row_lose_nothing(s3):
  url = s3.put("faults/x.bin", CONTENT)
  s3.proxy.faults = ["drop", 503, "reset", "short", None] * 8
  assert read(url) == SLICES
  assert len(s3.proxy.spans("x.bin")) == len(PIECES) + 32


def test_a_reply_that_does_not_come_is_asked_for_again_with_more_time(store, monkeypatch):
  url = store.put("stall/x.bin", CONTENT)
  remote.look(url)
  monkeypatch.setattr(remote_retry, "PATIENCE", remote_retry.Patience(0.3, 10.0, 0.01, 0.02))
  store.proxy.faults = ["stall"] + [lambda: time.sleep(0.4)] * 100  # no reply comes within the first time limit
  file = remote.look(url)
  assert remote.read_many([(file, 5, 10)]) == [CONTENT[5:15]]
  assert 2 <= len(store.proxy.spans("x.bin")) <= 5


@pytest.fixture
def small_parts(monkeypatch):
  monkeypatch.setattr(remote_copy, "PART", 10_000)


@pytest.mark.parametrize("fault", ["drop", 503])
def test_a_copy_outlasts_broken_replies(store, small_parts, fault):
  url = store.put("copies/x.idx", CONTENT)
  store.proxy.faults = [None] * 3 + [fault]
  assert content_of(remote.fetch(url)) == CONTENT
  spans = store.proxy.spans("x.idx")
  assert len(spans) == 11 and len(set(spans)) == 10


def test_a_bit_that_flipped_on_the_way_is_found(store, small_parts):
  url = store.put("flip/x.idx", CONTENT)
  store.proxy.faults = [None] * 3 + ["flip"]
  assert content_of(remote.fetch(url)) == CONTENT
  assert len(store.proxy.spans("x.idx")) == 20


def test_an_object_without_a_checksum_is_copied(s3, monkeypatch):
  key = "parts/x.idx"
  upload = s3.direct.call_s3("create_multipart_upload", Bucket="corpora", Key=key)["UploadId"]
  parts = []
  for number, data in enumerate([CONTENT * 53, CONTENT], 1):  # all but the last have 5 MiB or more
    keys = {"Bucket": "corpora", "Key": key, "UploadId": upload, "PartNumber": number}
    parts.append({"PartNumber": number, "ETag": s3.direct.call_s3("upload_part", **keys, Body=data)["ETag"]})
  keys = {"Bucket": "corpora", "Key": key, "UploadId": upload}
  s3.direct.call_s3("complete_multipart_upload", **keys, MultipartUpload={"Parts": parts})
  monkeypatch.setattr(remote_copy, "PART", 1 << 20)
  assert remote.look(f"s3://corpora/{key}").md5 == ""
  assert content_of(remote.fetch(f"s3://corpora/{key}")) == CONTENT * 54


RACE = """
import os, sys
from maxtext.input_pipeline import _mmap_remote as remote, _mmap_remote_copy as remote_copy
remote_copy.PART = 10_000
remote.configure(sys.argv[2])
import s3fs, gcsfs
children = []
for number in range(int(sys.argv[3])):
  children.append(os.fork())
  if not children[-1]:
    with open(remote.fetch(sys.argv[1]), "rb") as file:
      os._exit(file.read() != open(sys.argv[4], "rb").read())
print(*children, flush=True)
sys.exit(any([os.waitpid(child, 0)[1] for child in children]))
"""


def racers(store, url: str, tmp_path, count: int) -> subprocess.Popen:
  """Starts processes that copy one object into one cache folder and compare it."""
  (tmp_path / "content").write_bytes(CONTENT)
  command = [sys.executable, "-c", RACE, url, tmp_path / "cache", str(count), tmp_path / "content"]
  return subprocess.Popen(command, env=os.environ | store.environment, stdout=subprocess.PIPE, text=True)


def test_eight_processes_that_race_for_a_cold_cache_copy_once(store, tmp_path):
  url = store.put("race/x.idx", CONTENT)
  assert racers(store, url, tmp_path, 8).wait(60) == 0
  assert len(store.proxy.spans("x.idx")) == 10


def test_a_copy_goes_on_at_once_where_a_killed_process_left_off(store, small_parts, tmp_path):
  url = store.put("killed/x.idx", CONTENT)
  store.proxy.faults = [None] * 4 + ["stall"] * 6
  process = racers(store, url, tmp_path, 1)
  end = time.monotonic() + 60
  while len(store.proxy.spans("x.idx")) < 10:
    assert time.monotonic() < end
    time.sleep(0.01)
  journal = next(tmp_path.joinpath("cache").rglob("*.parts"))
  while sum(any(journal.read_bytes()[first : first + 16]) for first in range(0, 160, 16)) < 4:
    assert time.monotonic() < end
    time.sleep(0.01)
  os.kill(int(process.stdout.readline()), signal.SIGKILL)
  assert process.wait(60) == 1
  store.proxy.reset()
  assert content_of(remote.fetch(url)) == CONTENT
  assert len(store.proxy.spans("x.idx")) == 6


def serve_files(folder, with_ranges: bool):
  """Serves a folder over plain HTTP, with or without an answer to requests for ranges."""

  class Handler(SimpleHTTPRequestHandler):
    def __init__(self, *arguments):
      super().__init__(*arguments, directory=str(folder))

    def log_message(self, format, *args):
      pass

    def do_GET(self):
      span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if with_ranges else None
      if not span:
        return super().do_GET()
      data = content_of(self.translate_path(self.path))[int(span[1]) : int(span[2]) + 1]
      self.send_response(206)
      self.send_header("Content-Length", str(len(data)))
      self.end_headers()
      self.wfile.write(data)

  server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
  threading.Thread(target=server.serve_forever, daemon=True).start()
  return server, f"http://127.0.0.1:{server.server_address[1]}"


@pytest.fixture
def web(dataset, tmp_path, prepared, s3_store):
  prepared(s3_store)
  servers = []

  def serve(with_ranges: bool) -> str:
    server, url = serve_files(os.path.dirname(dataset), with_ranges)
    servers.append(server)
    return f"{url}/{os.path.basename(dataset)}"

  yield serve
  for server in servers:
    server.shutdown()


def test_a_dataset_on_a_web_server_is_the_dataset(dataset, web):
  here, there = MMapIndexedDataset(dataset), MMapIndexedDataset(web(True))
  assert all((there[row] == here[row]).all() for row in range(0, len(here), 7))
  prefix = there.path_prefix
  assert prefix in remote.resolve(prefix.rpartition("/")[0] + "/")


def test_a_web_server_without_ranges_is_refused(web):
  text = one_sentence(pytest.raises(MMapReadError, lambda: MMapIndexedDataset(web(False))[3]).value)
  assert "use a server that answers range requests" in text


# Sentences.


def test_an_object_that_was_replaced_is_refused_by_the_store_itself(store):
  url = store.put("replaced/x.bin", CONTENT)
  assert read(url) == SLICES
  store.put("replaced/x.bin", CONTENT[::-1])
  if store.scheme == "gs":
    assert all("generation=" in request.path for request in store.proxy.requests if request.span)
    store.proxy.faults = [404] * 20  # what GCS answers for a generation that is gone; the emulator does not look at it
  error = pytest.raises(remote.ObjectChangedError, read, url).value
  assert f"{url} was changed while it is in use" in one_sentence(error)


def test_a_missing_bucket_object_and_half_of_a_pair_are_named(store):
  store.put("some/half.idx", b"1")
  base = f"{store.scheme}://corpora"
  for url, part in (
      (f"{store.scheme}://no-such-bucket/x", f"there is no bucket {store.scheme}://no-such-bucket"),
      (f"{base}/none", f"{base}/none names no dataset"),
      (f"{base}/some/half", f"{base}/some/half.bin is missing"),
      (f"{base}/some", f"{base}/some/half.bin is missing"),
  ):
    assert part in one_sentence(pytest.raises(MMapFileNotFoundError, remote.resolve, url).value)


@pytest.mark.parametrize(("status", "part"), [(401, "without valid credentials"), (403, "the store denies access")])
def test_a_store_that_denies_access_is_named_at_once(store, status, part, caplog):
  url = store.put("denied/x.bin", CONTENT)
  store.proxy.statuses = {"denied": status}
  text = one_sentence(pytest.raises(MMapReadError, read, url).value)
  assert text.startswith(f"{url} cannot be read") and part in text
  assert len(store.proxy.requests) < 4 and not [record for record in caplog.records if record.exc_info]


def test_a_bucket_that_is_not_public_denies_who_is_anonymous(s3, monkeypatch):
  url = s3.put("private/x.bin", CONTENT)
  monkeypatch.setitem(fsspec.config.conf, "s3", {"anon": True})
  assert "denies access" in one_sentence(pytest.raises(MMapReadError, read, url).value)


def test_missing_credentials_are_named_with_the_way_out(s3, monkeypatch):
  monkeypatch.delenv("AWS_ACCESS_KEY_ID")
  text = one_sentence(pytest.raises(MMapReadError, read, s3.put("credentials/x.bin", CONTENT)).value)
  assert "without valid credentials" in text and "AWS_PROFILE" in text and "anon" in text


def test_a_store_that_does_not_answer_is_given_up_with_the_number_of_tries(store, monkeypatch):
  monkeypatch.setattr(remote_retry, "PATIENCE", remote_retry.Patience(0.2, 1.0, 0.01, 0.02))
  monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
  monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:9")
  url = f"{store.scheme}://corpora/x.bin"
  text = one_sentence(pytest.raises(MMapReadError, remote.look, url).value)
  assert text.startswith(f"{url} cannot be read") and "tried" in text


def test_an_endless_outage_is_given_up_with_the_number_of_tries(s3, monkeypatch):
  url = s3.put("outage/x.bin", CONTENT)
  file = remote.look(url)
  monkeypatch.setattr(remote_retry, "PATIENCE", remote_retry.Patience(20.0, 0.3, 0.01, 0.02))
  s3.proxy.statuses = {"outage": 503}
  text = one_sentence(pytest.raises(MMapReadError, remote.read_many, [(file, 0, 10)]).value)
  assert "the store answers 503" in text and f"(tried {len(s3.proxy.spans())} times in " in text
  assert len(s3.proxy.spans()) > 3


# Whole runs.


def source_of(url: str, npy_dir) -> MegatronNpyDataSource:
  return MegatronNpyDataSource(str(npy_dir), url, 2, 32, request=IndexRequest(32, num_samples=100))


def wait_until(condition) -> None:
  end = time.monotonic() + 30
  while not condition():
    assert time.monotonic() < end
    time.sleep(0.01)


def test_samples_of_a_store_are_the_samples(store, dataset, tmp_path):
  url = store.put_dataset(dataset, "samples/corpus")
  here, there = source_of(dataset, tmp_path / "i"), source_of(url, f"{store.scheme}://corpora/samples/indices")
  assert (here.read_rows(range(100)) == there.read_rows(range(100))).all()
  (tmp_path / "pickled").write_bytes(pickle.dumps(there))
  assert (pickle.loads((tmp_path / "pickled").read_bytes())[7]["text"] == here[7]["text"]).all()
  assert not [request for request in store.proxy.requests if request.method not in ("GET", "HEAD")]


def test_a_batch_is_one_wave_of_requests(s3, dataset, tmp_path):
  source = source_of(s3.put_dataset(dataset, "wave/corpus"), tmp_path / "i")
  s3.proxy.gate = threading.Barrier(remote_io.CONCURRENCY).wait  # more samples than that are asked for at once
  indices = range(3 * remote_io.CONCURRENCY)
  expected = source_of(dataset, tmp_path / "i").read_rows(indices)

  def open_gate():
    wait_until(lambda: s3.proxy.most == remote_io.CONCURRENCY)
    s3.proxy.gate = None

  opener = threading.Thread(target=open_gate)
  opener.start()
  assert (source.read_rows(indices) == expected).all()
  opener.join()


def test_pieces_of_many_shards_are_one_wave(s3, dataset):
  for number in range(remote_io.CONCURRENCY):
    s3.put_dataset(dataset, f"shards/{number:02}")
  shards = ShardedDataset("s3://corpora/shards")
  s3.proxy.gate = threading.Barrier(remote_io.CONCURRENCY).wait
  expected = MMapIndexedDataset(dataset).get(9, 0, 3)
  found = shards.read([Piece(number, 9, 0, 3) for number in range(remote_io.CONCURRENCY)])
  assert all((tokens == expected).all() for tokens in found)


def test_windows_of_a_store_are_the_windows(store, dataset):
  url = store.put_dataset(dataset, "windows/corpus")
  here, there = (TokenStream([Shard.of(MMapIndexedDataset(prefix))]) for prefix in (dataset, url))
  starts = range(0, len(here) - 33, 33)
  windows = np.zeros((2, len(starts), 33), np.int32)
  here.read(starts, windows[0])
  there.read(starts, windows[1])
  assert windows.any() and (windows[0] == windows[1]).all()


def test_indices_that_the_store_lacks_are_built_once_on_each_machine(s3, dataset, tmp_path, monkeypatch):
  monkeypatch.setattr(index_utils, "is_primary_process", lambda: False)
  url, folder = s3.put_dataset(dataset, "lacking/corpus"), "s3://corpora/lacking/indices"
  first = source_of(url, folder)
  again = source_of(url, folder)
  assert not first.index.found and again.index.found and again.index.description.name == first.index.description.name
  assert not [request for request in s3.proxy.requests if request.method not in ("GET", "HEAD")]


def test_next_batches_are_read_while_the_store_is_slow_and_nobody_asks_for_them(s3, dataset, tmp_path):
  source = source_of(s3.put_dataset(dataset, "ahead/corpus"), tmp_path / "i")
  first = {(shard, row) for shard, row, _, _ in source.pieces(0)}
  held = threading.Event()
  s3.proxy.reset()
  s3.proxy.gate = lambda: held.wait(60)
  iterator = iter(GlobalOrderDataset(TextRows(source), 1, 0, 1, {}, buffered=4, threads=4))
  found = []
  consumer = threading.Thread(target=lambda: found.append(next(iterator)))
  consumer.start()
  wait_until(lambda: s3.proxy.under_way > len(first))  # requests of later batches wait beside those of the first
  assert not found
  held.set()
  consumer.join()
  wait_until(lambda: len(s3.proxy.spans()) > 4)
  assert (found[0]["text"][0] == source_of(dataset, tmp_path / "i")[0]["text"]).all()
  iterator.close()


def test_many_shards_are_opened_with_few_requests(s3, dataset):
  for number in range(20):
    s3.put_dataset(dataset, f"many/{number:02}")
  s3.proxy.reset()
  prefixes = remote.resolve("s3://corpora/many")
  remote.prepare(prefixes)
  assert sum(len(MMapIndexedDataset(prefix)) for prefix in prefixes) == 20 * len(MMapIndexedDataset(dataset))
  assert len(s3.proxy.requests) <= 2 + 2 + 1 + 20  # is it a dataset, list it, and each index


def test_a_run_from_a_store_logs_the_losses_of_a_local_run(s3, dataset, train, tmp_path):
  keys = {"steps": 3, "enable_checkpointing": False, "mmap_remote_cache_dir": tmp_path / "copies"}
  local = train(dataset, run_name="local", **keys)
  assert local.code == 0 and len(local.losses) == 3
  url = s3.put_dataset(dataset, "train/corpus")
  for path in (tmp_path / "indices").iterdir():
    s3.put_file(str(path), f"train/indices/{path.name}")
  s3.proxy.reset()
  for workers in (0, 2):
    remote.forget()
    files = f"s3://corpora/train/indices|{url}"
    distant = train(url, run_name=f"workers{workers}", grain_train_files=files, grain_worker_count=workers, **keys)
    assert distant.code == 0 and distant.losses == local.losses
  assert s3.proxy.spans("corpus.bin")
  assert len(s3.proxy.spans("corpus.idx")) == 1 and len(s3.proxy.spans("-shuffle_index.npy")) == 1
  assert not [request for request in s3.proxy.requests if request.method not in ("GET", "HEAD")]
  assert not [name for name in os.listdir(tmp_path) if name == "xdg"]


def test_a_run_without_credentials_ends_with_one_sentence(s3, dataset, train, monkeypatch):
  url = s3.put_dataset(dataset, "refused/corpus")
  monkeypatch.delenv("AWS_ACCESS_KEY_ID")
  run = train(url, steps=3, enable_checkpointing=False)
  assert run.code == 1 and not run.losses
  assert f"{url}.idx cannot be read without valid credentials" in run.last_line
  assert "Traceback" not in run.log and "botocore" not in run.log
