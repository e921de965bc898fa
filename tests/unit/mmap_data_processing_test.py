# SPDX-License-Identifier: Apache-2.0
"""The `mmap` file type: files, documents, windows, order and fields; the release's own pipeline is a peer."""

import itertools
import json
import os
from pathlib import Path
import pickle
import resource
import struct
import tempfile
import types

import fsspec
import grain.python as grain
from hypothesis import given
from hypothesis import settings as settings_of_examples
from hypothesis import strategies as st
import numpy as np
import pytest

from maxtext.input_pipeline import _mmap_window_rows as window_rows
from maxtext.input_pipeline import _mmap_windows as windows
from maxtext.input_pipeline._mmap_datasource import (
  MMapIndexedDataSource,
  MMapSampleIndexDataSource,
  MultiShardMMapIndexedDataSource,
  create_mmap_source,
  get_mmap_dataset,
)
from maxtext.input_pipeline._mmap_files import DESCRIPTORS
from maxtext.input_pipeline._mmap_indexed_dataset import DTYPE_CODES_INV, MMapError, MMapIndexedDataset
from maxtext.input_pipeline._mmap_iterator import GlobalOrderDataset
from maxtext.input_pipeline._mmap_window_rows import WindowOrder, WindowSettings, open_windows

EOD = 99
KEY = "grain_train_files"
FIELDS = (
  "inputs", "targets", "inputs_segmentation", "targets_segmentation", "inputs_position", "targets_position",
)  # fmt: skip


def write_pair(prefix, sequences, dtype=np.uint16, documents=None, gap=0, older=False) -> str:
  """Writes `.idx` and `.bin` field by field, with `gap` tokens of 77 before every sequence."""
  dtype, offsets, data = np.dtype(dtype), [], b""
  for tokens in sequences:
    data += np.full(gap, 77, dtype).tobytes()
    offsets.append(len(data))
    data += np.asarray(tokens, dtype).tobytes()
  documents = list(range(len(sequences) + 1)) if documents is None else documents
  head = struct.pack("<QBQQ", 1, DTYPE_CODES_INV[dtype.type], len(sequences), len(documents) - older)
  arrays = (np.array([len(s) for s in sequences], "<i4"), np.array(offsets, "<i8"), np.array(documents, "<i8"))
  Path(f"{prefix}.idx").write_bytes(b"MMIDIDX\0\0" + head + b"".join(array.tobytes() for array in arrays))
  Path(f"{prefix}.bin").write_bytes(data)
  return str(prefix)


def texts(source) -> list[list[int]]:
  return [source[index]["text"].tolist() for index in range(len(source))]


def settings(files, length=4, **keys) -> WindowSettings:
  return WindowSettings(KEY, str(files), length, EOD, **keys)


def open_rows(files, length=4, **keys) -> window_rows.MMapRows:
  return open_windows(settings(files, length, **keys)).rows


# Reading files.


@pytest.mark.parametrize("older", [False, True], ids=["Megatron's document count", "the older count"])
@pytest.mark.parametrize("dtype", DTYPE_CODES_INV)
def test_every_dtype_and_both_document_counts_are_read(tmp_path, dtype, older):
  prefix = write_pair(tmp_path / "a", [[1, 2, 3], [4], [5, 6]], dtype, documents=[0, 2, 3], older=older)
  if np.dtype(dtype).kind == "f":
    with pytest.raises(MMapError, match="tokens must be integers"):
      MMapIndexedDataset(prefix)
    return
  dataset = MMapIndexedDataset(prefix)
  assert dataset.dtype is dtype and len(dataset) == 3 and dataset.header.num_documents == 2
  assert dataset.sizes.tolist() == [3, 1, 2] and dataset.doc_idx.tolist() == [0, 2, 3]
  assert [tokens.tolist() for tokens in dataset[:]] == [[1, 2, 3], [4], [5, 6]]
  assert dataset[-1].tolist() == [5, 6] and dataset.get(0, 1, 2).tolist() == [2, 3]


def test_borders_of_the_reader(tmp_path):
  dataset = MMapIndexedDataset(write_pair(tmp_path / "a", [[1, 2, 3], [], [4]]))
  assert dataset.get(1).tolist() == [] and dataset.get(0, 3).tolist() == [] and dataset.get(0, 0, 0).tolist() == []
  for arguments in [(3,), (-4,), (0, 4), (0, -1), (0, 2, 2), (0, 0, -1), (1, 0, 1)]:
    with pytest.raises(IndexError):
      dataset.get(*arguments)
  with pytest.raises(ValueError, match="step 2"):
    dataset[::2]


@pytest.mark.parametrize(
  "damage, words",
  [
    (lambda idx: b"MMIDIDY" + idx[7:], "begins with"), (lambda idx: idx[:20], "truncated"),
    (lambda idx: idx[:-8], "truncated"), (lambda idx: idx + bytes(3), "mode per sequence"),
    (lambda idx: idx + bytes(5), "bytes more"), (lambda idx: idx[:9] + b"\2" + idx[10:], "version 2"),
    (lambda idx: idx[:17] + b"\x0b" + idx[18:], "dtype code 11"),
    (lambda idx: idx[:-8] + struct.pack("<q", 2), "0 to 3"),
  ],
)  # fmt: skip
@pytest.mark.parametrize("open_source", [MMapIndexedDataSource, lambda prefix: create_mmap_source(prefix, False, 2, EOD)])
def test_damaged_index_files_are_refused_by_name(tmp_path, damage, words, open_source):
  prefix = write_pair(tmp_path / "a", [[1, 2, 3], [4], [5, 6]])
  Path(f"{prefix}.idx").write_bytes(damage(Path(f"{prefix}.idx").read_bytes()))
  with pytest.raises(MMapError, match=words) as caught:
    open_source(prefix)
  assert f"{prefix}.idx" in str(caught.value)


def test_a_bad_row_inside_the_index_is_refused_with_its_number(tmp_path):
  prefix = write_pair(tmp_path / "a", [[1, 2, 3], [4], [5, 6]])
  raw = bytearray(Path(f"{prefix}.idx").read_bytes())
  raw[38:42] = struct.pack("<i", -1)  # the second length
  Path(f"{prefix}.idx").write_bytes(raw)
  with pytest.raises(MMapError, match="row 1 has length -1"):
    create_mmap_source(prefix, False, 2, EOD)


def test_missing_and_short_files(tmp_path):
  with pytest.raises(FileNotFoundError):
    create_mmap_source(str(tmp_path / "none"), False, 2, EOD)
  prefix = write_pair(tmp_path / "a", [[1, 2, 3], [4], [5, 6]])
  Path(f"{prefix}.bin").write_bytes(bytes(10))
  with pytest.raises(MMapError, match="a.bin is truncated"):
    create_mmap_source(prefix, False, 2, EOD)
  Path(f"{prefix}.bin").unlink()
  with pytest.raises(FileNotFoundError, match="a.bin is missing"):
    create_mmap_source(prefix, False, 2, EOD)


def test_a_file_that_shrinks_while_it_is_read_is_named(tmp_path):
  rows = open_rows(write_pair(tmp_path / "a", [range(8)]))
  os.truncate(tmp_path / "a.bin", 10)
  with pytest.raises(MMapError, match="a.bin"):
    rows.rows([1])


# Documents.


def test_documents_of_one_dataset(tmp_path):
  source = MMapIndexedDataSource(write_pair(tmp_path / "a", [[1, 2, 3], [], [4]], np.int32))
  assert len(source) == 3 and texts(source) == [[1, 2, 3], [], [4]]
  assert source[-1]["text"].tolist() == [4] and source[np.int64(0)]["text"].dtype == np.int32
  assert source[0]["text"].flags.writeable
  assert source.doc_token_counts().tolist() == [3, 0, 1] and source.doc_token_counts().dtype == np.int64
  assert list(MMapIndexedDataSource(str(tmp_path / "a"), "tokens")[0]) == ["tokens"]


def test_d5_sentences_of_a_document_are_joined(tmp_path):
  sequences = [[0, 1], [100, 101, 102], [200, 201, 202, 203], [300, 301, 302, 303, 304, 305]]
  prefix = write_pair(tmp_path / "a", sequences, documents=[0, 2, 4])
  joined = MMapIndexedDataSource(prefix, split_sentences=True)
  assert texts(joined) == [[0, 1, 100, 101, 102], [200, 201, 202, 203, 300, 301, 302, 303, 304, 305]]
  assert joined.doc_token_counts().tolist() == [5, 10]
  assert texts(MMapIndexedDataSource(prefix)) == sequences


@pytest.mark.parametrize("documents", [[0, 1, 1, 2], [0, 1, 2, 2], [0, 0, 1, 2]])
def test_d4_a_document_without_sequences_has_no_tokens(tmp_path, documents):
  """NumPy's add.reduceat gives such a document the next one's tokens, or fails at the end; Megatron counts 0."""
  prefix = write_pair(tmp_path / "a", [[1, 2, 3], [4, 5, 6, 7]], documents=documents)
  source = MMapIndexedDataSource(prefix, split_sentences=True)
  assert sorted(source.doc_token_counts().tolist()) == [0, 3, 4]
  assert source[documents.index(1, 1)]["text"].tolist() in ([], [1, 2, 3], [4, 5, 6, 7])
  assert [len(text) for text in texts(source)] == source.doc_token_counts().tolist()
  assert texts(create_mmap_source(prefix, True, 3, EOD)) == [[1, 2, 3], [4, 5, 6]]


def test_documents_of_several_datasets_follow_each_other(tmp_path):
  shards = {"a": [[1, 2], [3]], "b": [], "c": [[4]]}
  prefixes = [write_pair(tmp_path / name, sequences) for name, sequences in shards.items()]
  source = MultiShardMMapIndexedDataSource(prefixes)
  assert len(source) == 3 and texts(source) == [[1, 2], [3], [4]]
  assert source[-1]["text"].tolist() == [4] and source.doc_token_counts().tolist() == [2, 1, 1]
  empty = MultiShardMMapIndexedDataSource([])
  assert len(empty) == 0 and empty.doc_token_counts().tolist() == []


@pytest.mark.parametrize("split", [False, True])
def test_no_element_outside_a_source(tmp_path, split):
  prefix = write_pair(tmp_path / "a", [[1, 2, 3, 4]])
  document = MMapIndexedDataSource(prefix, split_sentences=split)
  for source in (document, MultiShardMMapIndexedDataSource([prefix]), MMapSampleIndexDataSource(document, 4, EOD)):
    assert len(source) == 1
    for index in (1, -2):
      with pytest.raises(IndexError):
        source[index]
    with pytest.raises(TypeError):
      source[0:1]


def test_sources_pickle(tmp_path):
  prefix = write_pair(tmp_path / "a", [[1, 2, 3], [4], [5, 6]], documents=[0, 2, 3])
  one = MMapIndexedDataSource(prefix, "tokens", True)
  several = MultiShardMMapIndexedDataSource([prefix], split_sentences=True)
  for source in (one, several, MMapSampleIndexDataSource(several, 2, EOD, drop_last=False)):
    again = pickle.loads(pickle.dumps(source))
    assert [str(again[i]) for i in range(len(source))] == [str(source[i]) for i in range(len(source))]


# Windows.


def test_windows_over_documents(tmp_path):
  prefix = write_pair(tmp_path / "a", [[1, 2, 3], [4], [], [5, 6, 7]])
  source = MMapIndexedDataSource(prefix)
  assert texts(MMapSampleIndexDataSource(source, 3, EOD)) == [[1, 2, 3], [4, 5, 6]]
  assert texts(MMapSampleIndexDataSource(source, 3, EOD, drop_last=False)) == [[1, 2, 3], [4, 5, 6], [7, EOD, EOD]]
  assert MMapSampleIndexDataSource(source, 3, EOD)[-1]["text"].dtype == np.int32
  assert len(MMapSampleIndexDataSource(source, 8, EOD)) == 0
  with pytest.raises(ValueError, match="must be positive, got 0"):
    MMapSampleIndexDataSource(source, 0, EOD)
  for length, eod_id in ((0, EOD), (3, None)):
    assert texts(create_mmap_source(prefix, False, length, eod_id)) == texts(source)


def test_windows_over_a_source_of_ones_own():
  class Source:
    documents = [[1, 2], [], [3], [4, 5, 6, 7]]

    def doc_token_counts(self):
      return np.array([len(document) for document in self.documents])

    def check_eod_presence(self, eod_id, mode_label):
      self.checked = eod_id, mode_label

    def __getitem__(self, index):
      return {"text": np.array(self.documents[index], np.uint16)}

  source = Source()
  assert texts(MMapSampleIndexDataSource(source, 3, EOD, drop_last=False)) == [[1, 2, 3], [4, 5, 6], [7, EOD, EOD]]
  assert source.checked == (EOD, "mmap mode")


def test_a_read_takes_the_bytes_of_its_windows_and_no_more(tmp_path, monkeypatch):
  rows = open_rows(write_pair(tmp_path / "a", [range(10), np.arange(10**6) % 90, range(10)]), 16)
  read, pread = [], os.pread
  monkeypatch.setattr(os, "pread", lambda *arguments: read.append(arguments[1]) or pread(*arguments))
  rows.read_rows([5, 60_000])
  assert read == [32, 32]


def test_d10_more_shards_than_open_files(tmp_path, monkeypatch):
  monkeypatch.setattr(DESCRIPTORS, "capacity", 64)  # what a process that starts under such a limit would keep at most
  for shard in range(300):
    write_pair(tmp_path / f"s_{shard:03}", [[shard, shard]])
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 80, hard))
  try:
    opened = open_windows(settings(tmp_path, 3))
    tokens = opened.rows.read_rows(np.arange(200))
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
  np.testing.assert_array_equal(tokens.ravel(), np.repeat(np.arange(300), 2))
  assert "s_000, " in opened.lines[0] and "..., " in opened.lines[0] and "s_299" in opened.lines[0]


def test_windows_of_shards_at_a_url(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  store = fsspec.filesystem("memory")
  for shard in range(3):
    prefix = write_pair(tmp_path / f"s{shard}", [np.arange(10) + 20 * shard] * 4)
    for suffix in (".idx", ".bin"):
      store.pipe(f"/windows/s{shard}{suffix}", Path(prefix + suffix).read_bytes())
  urls = ":".join(f"memory://windows/s{shard}" for shard in range(3))
  for files in ("memory://windows", urls):
    distant, local = (open_windows(settings(where, 8, seed=1)) for where in (files, tmp_path))
    assert distant.order == local.order
    rows = np.arange(15)
    np.testing.assert_array_equal(distant.rows.read_rows(rows), local.rows.read_rows(rows))


SEQUENCES = st.lists(st.lists(st.integers(0, 98), max_size=9), min_size=1, max_size=12)


@given(SEQUENCES, st.integers(1, 7), st.data())
def test_windows_are_the_tokens_in_order_in_any_layout(sequences, length, data):
  """Shards, documents, gaps, sentences and dtypes make no difference; every window lies at its place."""
  tokens = list(itertools.chain.from_iterable(sequences))
  with tempfile.TemporaryDirectory() as folder:
    borders = data.draw(st.lists(st.integers(0, len(sequences)), max_size=3).map(sorted))
    for number, (first, last) in enumerate(itertools.pairwise([0, *borders, len(sequences)])):
      dtype = data.draw(st.sampled_from([np.uint8, np.uint16, np.int32, np.int64]))
      write_pair(f"{folder}/{number}", sequences[first:last], dtype, gap=data.draw(st.integers(0, 2)))
    documents = windows.open_documents(folder, split_sentences=data.draw(st.booleans()))
    source = MMapSampleIndexDataSource(documents, length, EOD, drop_last=False)
    found = [source[index]["text"].tolist() for index in range(len(source))]
    padded = tokens + [EOD] * (-len(tokens) % length)
    assert list(itertools.chain.from_iterable(found)) == padded
    if len(tokens) >= length:
      rows = open_rows(folder, length).read_rows(np.arange(len(tokens) // length))
      np.testing.assert_array_equal(rows, np.reshape(padded, (-1, length))[: len(rows)])


def test_windows_of_a_large_file_with_gaps(tmp_path):
  lengths = np.random.default_rng(0).integers(0, 4, 10_000)  # more than one entry of the table
  tokens = np.arange(lengths.sum())
  prefix = write_pair(tmp_path / "a", np.split(tokens, np.cumsum(lengths)[:-1]), np.int32, gap=1)
  rows = open_rows(prefix, 5).read_rows(np.arange(len(tokens) // 5))
  np.testing.assert_array_equal(rows.ravel(), tokens[: rows.size])


# Tokens that cannot be right.


def test_ids_outside_the_vocabulary_are_refused_with_the_shard(tmp_path):
  write_pair(tmp_path / "a", [[1, 2, 3]])
  write_pair(tmp_path / "b", [[1, 512, 3]])
  rows = open_rows(tmp_path, 3, vocab_size=512)
  assert rows.read_rows([0]).tolist() == [[1, 2, 3]]
  with pytest.raises(MMapError, match=r"b.bin holds token id 512, outside the vocabulary \(vocab_size=512\)"):
    rows.rows([0, 1])
  assert open_rows(tmp_path, 3, vocab_size=513).read_rows([1]).tolist() == [[1, 512, 3]]


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1])
def test_ids_outside_int32_are_refused(tmp_path, token):
  with pytest.raises(MMapError, match="a.bin holds token ids outside int32"):
    open_rows(write_pair(tmp_path / "a", [[1, token]], np.int64), 2).rows([0])


def test_documents_that_do_not_end_with_eod_are_told(tmp_path, caplog):
  write_pair(tmp_path / "a", [[1, 2, 3], [], [4, 5]])
  write_pair(tmp_path / "b", [[6, 7]])
  open_rows(tmp_path, 2)
  assert "NO EOD TOKEN FOUND" in caplog.text and "ends with mmap_eod_id=99 (the first ends with 3)" in caplog.text
  caplog.clear()
  write_pair(tmp_path / "b", [[6, EOD]])
  open_rows(tmp_path, 2)
  assert not caplog.text


# Fields.


def fields_of(tmp_path, tokens, **keys) -> dict[str, list[int]]:
  rows = open_rows(write_pair(tmp_path / "fields", [tokens]), len(tokens), **keys)
  return {name: values[0].tolist() for name, values in rows.rows([0]).items()}


def test_fields_of_the_example(tmp_path):
  """The last target is EOD, as padding; targets that are EOD have no loss, and positions are those of the inputs."""
  assert fields_of(tmp_path, [10, 11, 99, 20]) == {
    "inputs": [10, 11, 99, 20],
    "targets": [11, 99, 20, 99],
    "inputs_segmentation": [1, 1, 1, 2],
    "targets_segmentation": [1, 0, 2, 0],
    "inputs_position": [0, 1, 2, 0],
    "targets_position": [0, 1, 2, 0],
  }


@pytest.mark.parametrize("mask", [False, True])
def test_without_reset_there_is_one_segment_less_its_eods_if_masked(tmp_path, mask):
  found = fields_of(tmp_path, [10, 99, 20, 99, 30], reset_attention_mask=False, eod_mask_loss=mask)
  assert found["inputs_segmentation"] == ([1, 0, 1, 0, 1] if mask else [1, 1, 1, 1, 1])
  assert found["targets_segmentation"] == [0, 1, 0, 1, 0]
  assert found["inputs_position"] == [0, 1, 2, 3, 4]


def test_eod_mask_loss_changes_nothing_with_reset(tmp_path):
  tokens = [10, 99, 20, 21, 99, 30]
  assert fields_of(tmp_path, tokens, eod_mask_loss=True) == fields_of(tmp_path, tokens, eod_mask_loss=False)


def test_short_segments_are_merged(tmp_path):
  tokens = [1, 99, 2, 99, 3, 4, 5, 99, 6]
  assert fields_of(tmp_path, tokens, min_segment_length=4)["inputs_segmentation"] == [1, 1, 1, 1, 1, 1, 1, 1, 2]
  assert fields_of(tmp_path, tokens, min_segment_length=3)["inputs_segmentation"] == [1, 1, 1, 1, 2, 2, 2, 2, 3]
  assert fields_of(tmp_path, tokens, min_segment_length=1)["inputs_segmentation"] == [1, 1, 2, 2, 3, 3, 3, 3, 4]


def test_no_eod_is_inserted_between_documents(tmp_path):
  rows = open_rows(write_pair(tmp_path / "a", [[1, 2], [3, 4], [5, 6]]), 6).rows([0])
  assert rows["inputs"].tolist() == [[1, 2, 3, 4, 5, 6]] and rows["inputs_segmentation"].tolist() == [[1] * 6]
  assert rows["inputs_position"].tolist() == [[0, 1, 2, 3, 4, 5]]


def test_rows_are_int32_and_any_choice_of_them_gives_the_same(tmp_path):
  files = ";".join(f"{write_pair(tmp_path / name, [range(40)])},{weight}" for name, weight in [("a", 2), ("b", 1)])
  rows = open_rows(files, seed=5, epochs=2)
  whole = rows.rows(np.arange(len(rows)))
  chosen = np.array([7, 3, 3, len(rows) - 1])
  for name, values in rows.rows(chosen).items():
    assert values.dtype == np.int32 and values.shape == (4, 4)
    np.testing.assert_array_equal(values, whole[name][chosen])
  assert tuple(whole) == FIELDS
  for outside in ([-1], [len(rows)]):
    with pytest.raises(IndexError):
      rows.rows(outside)
  assert rows.rows([])["inputs"].shape == (0, 4)


def test_rows_pickle_and_refuse_changed_files(tmp_path):
  prefix = write_pair(tmp_path / "a", [range(8)])
  rows = open_rows(prefix, seed=1)
  shipped = pickle.dumps(rows)
  np.testing.assert_array_equal(pickle.loads(shipped).rows([0, 1])["inputs"], rows.rows([0, 1])["inputs"])
  write_pair(prefix, [range(9)])
  with pytest.raises(MMapError, match="was changed since the run opened it"):
    pickle.loads(shipped).rows([0])


# Order.


@settings_of_examples(max_examples=40)
@given(
  st.lists(st.tuples(st.integers(1, 12), st.floats(0.01, 10)), min_size=1, max_size=5),
  st.integers(1, 3),
  st.none() | st.integers(0, 2**32 - 1),
)
def test_order_is_grains_to_its_end(children, epochs, seed):
  counts, weights = zip(*children, strict=True)
  weights = window_rows._normalize_weights(weights)
  parents = []
  for child, count in enumerate(counts):
    dataset = grain.MapDataset.source([(child, window) for window in range(count)])
    dataset = (dataset.shuffle(seed=seed) if seed is not None else dataset).repeat(epochs)
    parents.append(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)))
  expected = list(grain.IterDataset.mix(parents, weights))
  order = WindowOrder(counts, window_rows.mix_proportions(weights), seed, epochs)
  found = zip(*(part.tolist() for part in order.locate(np.arange(len(order)))), strict=True)
  assert list(found) == expected


def test_proportions_beyond_64_bits():
  order = WindowOrder([30, 3], window_rows.mix_proportions([1.0, 1e-30]), None, 1)
  children, drawn = order.locate(np.arange(len(order)))
  assert len(order) == 30 + int(children.sum()) and sorted(drawn[children == 0].tolist()) == list(range(30))


def stable(order) -> dict:
  return {key: value for key, value in order.items() if key != "available_samples"}


def test_order_is_what_decides_the_samples_and_nothing_else(tmp_path):
  prefix = write_pair(tmp_path / "a", [range(40)])
  other = write_pair(tmp_path / "b", [range(20), range(20)])
  order = open_windows(settings(prefix, seed=1)).order
  assert json.loads(json.dumps(order)) == order and order["kind"] == "mmap"
  for keys in ({"epochs": 2}, {"vocab_size": 100}, {"eod_mask_loss": True}):
    assert stable(open_windows(settings(prefix, seed=1, **keys)).order) == stable(order)
  assert open_windows(settings(prefix, seed=1, epochs=2)).order["available_samples"] == 2 * order["available_samples"]
  assert stable(open_windows(settings(f"{prefix},5;{other},0", seed=1)).order) == stable(order)
  different = [
    settings(prefix, seed=2), settings(prefix), settings(prefix, 5, seed=1), settings(other, seed=1),
    settings(f"{prefix},1;{other},1", seed=1), settings(f"{prefix},1;{other},2", seed=1),
    settings(f"{prefix}:{other}", seed=1),
  ]  # fmt: skip
  found = [json.dumps(stable(open_windows(one).order)) for one in different]
  assert len({*found, json.dumps(stable(order))}) == len(different) + 1


def test_stamps_spare_reading_the_index_again(tmp_path, monkeypatch):
  prefix, stamps = write_pair(tmp_path / "a", [range(40)]), str(tmp_path / "stamps")
  first = open_windows(settings(prefix, stamps_folder=stamps), write=True)
  monkeypatch.setattr(MMapIndexedDataset, "scan", lambda self: pytest.fail("the index was read again"))
  again = open_windows(settings(prefix, stamps_folder=stamps))
  assert again.order == first.order and len(again.rows) == 10


def test_d12_any_number_of_hosts_reads_the_same_steps_also_after_a_resume(tmp_path):
  files = ";".join(f"{write_pair(tmp_path / name, [range(40)])},{weight}" for name, weight in [("a", 2), ("b", 1)])
  opened = open_windows(settings(files, seed=4, epochs=2))

  def hosts(count, state=None) -> list:
    iterators = [iter(GlobalOrderDataset(opened.rows, 4, host, count, opened.order)) for host in range(count)]
    for iterator in iterators:
      if state is not None:
        iterator.set_state(state)
    return iterators

  def steps(iterators, count) -> list[list[str]]:
    return [sorted(str(row) for it in iterators for row in next(it)["inputs"].tolist()) for _ in range(count)]

  whole = steps(hosts(1), 6)
  assert [row for step in whole for row in step] != sorted(row for step in whole for row in step)
  two = hosts(2)
  assert steps(two, 2) == whole[:2]
  states = [json.loads(json.dumps(iterator.get_state())) for iterator in two]
  assert states[0] == states[1] and states[0]["next_sample"] == 8
  for count in (1, 2, 4):
    assert steps(hosts(count, states[0]), 4) == whole[2:]
  other = open_windows(settings(files, seed=5, epochs=2))
  with pytest.raises(MMapError, match="the seed is 4 there and 5 here"):
    iter(GlobalOrderDataset(other.rows, 4, 0, 1, other.order)).set_state(states[0])


# What the keys say.


@pytest.mark.parametrize(
  "text, words",
  [
    ("", "is empty"), (" ; ", "is empty"), ("npy|a", "index folder before '|'"), ("a;b", "has no weight"),
    ("a,1;b", "expected 'entry,weight'"), ("a,x;b,1", "expected 'entry,weight'"), ("a,nan;b,1", "finite weight"),
    ("a,-1;b,1", "finite weight"), ("a,0;b,0", "positive finite total"), ("a::b", "empty path"),
    ("a,1;b,1e-320", "nothing beside the others"),
  ],
)  # fmt: skip
def test_bad_files_are_refused_in_one_sentence_that_names_the_key(text, words):
  with pytest.raises(MMapError) as caught:
    window_rows.check_mmap_files("grain_eval_files", text)
  assert str(caught.value).startswith("grain_eval_files") and words in str(caught.value)


@pytest.mark.parametrize("text", ["a", "a,b", "a:b", "gs://bucket/a:b", "a,1;b,2", "a,1;", "a:c,0.5;b,0"])
def test_good_files_pass(text):
  window_rows.check_mmap_files(KEY, text)


@pytest.fixture
def config(tmp_path):
  return types.SimpleNamespace(
    grain_train_files=write_pair(tmp_path / "train", [[*range(39), EOD]]),
    grain_eval_files=write_pair(tmp_path / "eval", [[*range(19), EOD]]),
    max_target_length=4,
    mmap_eod_id=EOD,
    mmap_split_sentences=False,
    enable_data_shuffling=True,
    data_shuffle_seed=3,
    num_epoch=2,
    reset_attention_mask=True,
    eod_mask_loss=False,
    packing_max_segments_per_sample=2,
    vocab_size=100,
    blend_cache_dir="",
    steps=10,
    global_batch_size_to_train_on=2,
    eval_steps=2,
    global_batch_size_to_eval_on=2,
    load_full_state_path="",
    enable_checkpointing=False,
  )


@pytest.fixture
def logged(monkeypatch):
  lines = []
  for name in ("log", "warning"):
    monkeypatch.setattr(f"maxtext.utils.max_logging.{name}", lines.append)
  return lines


def test_training_is_shuffled_and_evaluation_is_not(config, logged):
  training, evaluation = (window_rows.make_mmap_rows(config, part) for part in (False, True))
  assert (len(training.rows), len(evaluation.rows)) == (20, 5)
  assert evaluation.rows.read_rows(np.arange(5)).ravel().tolist() == [*range(19), EOD]
  shuffled = training.rows.read_rows(np.arange(20))
  for epoch in (shuffled[:10], shuffled[10:]):
    assert sorted(epoch.ravel().tolist()) == [*range(39), EOD] and epoch.ravel().tolist() != [*range(39), EOD]
  assert shuffled[:10].tolist() != shuffled[10:].tolist()
  assert (training.order["seed"], training.order["needed_samples"]) == (3, 20)
  assert (evaluation.order["seed"], evaluation.order["needed_samples"]) == (None, 4)
  assert "10 windows of 4 tokens, shuffled with seed 3, 2 epoch(s)." in logged[0]
  config.enable_data_shuffling = False
  assert window_rows.make_mmap_rows(config).rows.read_rows([0, 10]).tolist() == [[0, 1, 2, 3]] * 2


def test_the_limit_on_eod_loss_is_told_once_and_names_the_way_out(config, logged):
  for part in (False, True):
    window_rows.make_mmap_rows(config, part)
  told = [line for line in logged if "eod_mask_loss" in line]
  assert len(told) == 1 and "mmap_npy" in told[0] and "\n" not in told[0]
  config.eod_mask_loss = True
  logged.clear()
  window_rows.make_mmap_rows(config)
  assert logged and not any("eod_mask_loss" in line for line in logged)


def test_merging_of_segments_follows_the_keys(config):
  assert window_rows.settings_for(config).min_segment_length == 2
  config.packing_max_segments_per_sample = 0
  assert window_rows.settings_for(config).min_segment_length == 0
  config.packing_max_segments_per_sample, config.reset_attention_mask = 2, False
  assert window_rows.settings_for(config).min_segment_length == 0


def test_a_run_that_reads_more_than_there_is_is_refused(config, logged):
  config.steps = 11
  with pytest.raises(MMapError, match=r"has 20 samples \(2 epoch\(s\)\), but the run reads 22; raise num_epoch"):
    window_rows.make_mmap_rows(config)
  config.eval_steps = 3
  with pytest.raises(MMapError, match="grain_eval_files: .* lower eval_steps"):
    window_rows.make_mmap_rows(config, True)
  config.max_target_length = 41
  with pytest.raises(MMapError, match="has 1 sequences and 40 tokens, which is less than one window"):
    window_rows.make_mmap_rows(config)


# The release's own pipeline on random data.

RUN_RELEASED = """
import functools, json, sys, types
import numpy as np
from maxtext.input_pipeline import _mmap_datasource as datasource
from maxtext.input_pipeline import grain_data_processing as processing

folder, results = sys.argv[1], {}
for number, case in enumerate(json.load(open(f"{folder}/cases.json"))):
  config = types.SimpleNamespace(**case["config"])
  dataset_config = processing._build_dataset_config(config)
  for host in range(case["hosts"]):
    dataset = processing.get_datasets(
      case["files"], "mmap", case["shuffle"], case["seed"], 100, case["epochs"], host, case["hosts"], 0, 0, 0, 1,
      dataset_config=dataset_config,
    )
    results[f"{number}-{host}-count"] = np.array(sum(1 for _ in dataset))
    dataset = processing.pretrain_preprocessing_pipeline(dataset, config, ("text",), False, 0, 1)
    batches = list(dataset)
    for field in batches[0] if batches else ():
      results[f"{number}-{host}-{field}"] = np.stack([batch[field] for batch in batches])
  if ";" in case["files"]:
    continue
  split, length = config.mmap_split_sentences, config.max_target_length
  prefixes = datasource._resolve_bin_prefixes(case["files"])
  source = datasource.MultiShardMMapIndexedDataSource(prefixes, split_sentences=split)
  results[f"{number}-counts"] = source.doc_token_counts()
  results[f"{number}-documents"] = np.concatenate([source[i]["text"] for i in range(len(source))])
  for name, drop in (("windows", True), ("all windows", False)):
    part = datasource.MMapSampleIndexDataSource(source, length, config.mmap_eod_id, drop)
    results[f"{number}-{name}"] = np.stack([part[i - len(part)]["text"] for i in range(len(part))])
np.savez(f"{folder}/results.npz", module=np.array(datasource.__file__), **results)
"""
PEER_EOD = 7
FIELD_KEYS = list(itertools.product([False, True], [False, True], [0, 1, 2, 5]))  # reset, mask, most segments
ORDER_KEYS = list(itertools.product([False, True], [1, 2], [1, 2]))  # shuffle, epochs, hosts
CASES = 64  # every choice of the first with four of the second


def peer_dataset(folder, rng, split: bool) -> str:
  """Writes a folder of one to three shards without empty documents, which the release counts wrongly."""
  folder.mkdir()
  for shard in range(rng.integers(1, 4)):
    lengths = rng.integers(1, rng.choice([3, 10, 40]), rng.integers(8, 30))
    sequences = [rng.integers(1, 30, length) for length in lengths]
    for tokens in sequences:
      if rng.random() < 0.8:
        tokens[-1] = PEER_EOD
    documents = None
    if split:
      documents = sorted({0, len(sequences), *rng.integers(0, len(sequences), 5).tolist()})
    write_pair(folder / f"s{shard}", sequences, rng.choice([np.uint8, np.uint16, np.int32, np.int64]), documents)
  return str(folder)


def peer_case(folder, rng, number: int) -> dict:
  reset, mask, most = FIELD_KEYS[number % 16]
  shuffle, epochs, hosts = ORDER_KEYS[(3 * number + number // 16) % 8]
  split, mixed = bool(rng.integers(2)), hosts == 1 and number % 3 == 0
  files = peer_dataset(folder / f"{number}", rng, split)
  if mixed:
    others = [peer_dataset(folder / f"{number}-{child}", rng, split) for child in range(rng.integers(1, 4))]
    weights = [*rng.uniform(0.05, 3, len(others)).round(3).tolist(), 0]
    files = ";".join(f"{path},{weight}" for path, weight in zip([files, *others], [1, *weights], strict=False))
  config = {
    "grain_file_type": "mmap", "max_target_length": int(rng.integers(4, 14)), "mmap_eod_id": PEER_EOD,
    "mmap_split_sentences": split, "blend_cache_dir": "", "blend_index_dir": "", "reset_attention_mask": reset,
    "eod_mask_loss": mask, "packing_max_segments_per_sample": most, "elastic_enabled": False,
    "global_batch_size_to_load": int(rng.integers(1, 4)), "expansion_factor_real_data": -1,
    "vocab_size": 30,
  }  # fmt: skip
  seed = int(rng.integers(2**32))
  return {"files": files, "shuffle": shuffle, "seed": seed, "epochs": epochs, "hosts": hosts, "config": config}


@pytest.fixture(scope="module")
def released(tmp_path_factory, run_released):
  """Cases, and what the release's own code gives for each."""
  folder, rng = tmp_path_factory.mktemp("released"), np.random.default_rng(17)
  cases = [peer_case(folder, rng, number) for number in range(CASES)]
  (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
  return cases, run_released(folder, RUN_RELEASED, folder)


def stream_of(case) -> window_rows.MMapRows:
  config = types.SimpleNamespace(
    **case["config"],
    grain_train_files=case["files"],
    enable_data_shuffling=case["shuffle"],
    data_shuffle_seed=case["seed"],
    num_epoch=case["epochs"],
  )
  return open_windows(window_rows.settings_for(config)).rows


def test_batches_equal_the_releases_field_by_field(released):
  """Every host's batches, up to the last that is whole: the release fills it up with EOD in every field."""
  cases, results = released
  compared = 0
  for number, case in enumerate(cases):
    rows, batch, hosts = stream_of(case), case["config"]["global_batch_size_to_load"], case["hosts"]
    assert sum(int(results[f"{number}-{host}-count"]) for host in range(hosts)) == len(rows), case
    for host in range(hosts):
      mine = np.arange(host, len(rows), hosts)
      whole = len(mine) // batch
      found = rows.rows(mine[: whole * batch])
      for field in FIELDS:
        expected = results[f"{number}-{host}-{field}"][:whole]
        assert found[field].dtype == expected.dtype == np.int32
        np.testing.assert_array_equal(found[field].reshape(expected.shape), expected, f"{case} {host} {field}")
        compared += expected.size
  assert compared > 50_000


def test_elements_equal_the_releases(released):
  cases, results = released
  compared = 0
  for number, case in enumerate(cases):
    if ";" in case["files"]:
      continue
    split, length = case["config"]["mmap_split_sentences"], case["config"]["max_target_length"]
    source = windows.open_documents(case["files"], split)
    np.testing.assert_array_equal(source.doc_token_counts(), results[f"{number}-counts"])
    documents = np.concatenate([source[index]["text"] for index in range(len(source))])
    np.testing.assert_array_equal(documents, results[f"{number}-documents"])
    for name, drop in (("windows", True), ("all windows", False)):
      part = MMapSampleIndexDataSource(source, length, PEER_EOD, drop)
      np.testing.assert_array_equal(np.array(texts(part)), results[f"{number}-{name}"])
      compared += len(part)
  assert compared > 1000


def test_the_released_entry_gives_what_it_gave(released):
  """`get_mmap_dataset` with the release's transforms, our sources in them: elements of one host, mixtures too."""
  from maxtext._release.input_pipeline.grain_data_processing import _apply_mapdataset_transforms

  cases, results = released
  for number, case in list(enumerate(cases))[::7]:
    if case["hosts"] > 1:
      continue
    config, batch = case["config"], case["config"]["global_batch_size_to_load"]
    dataset = get_mmap_dataset(
      case["files"], config["mmap_split_sentences"], config["max_target_length"], PEER_EOD, case["shuffle"], case["seed"],
      case["epochs"], 0, 1, 0, 0, apply_transforms=_apply_mapdataset_transforms,
    )  # fmt: skip
    elements = np.stack([element["text"] for element in dataset])
    expected = results[f"{number}-0-inputs"]
    whole = len(elements) // batch
    np.testing.assert_array_equal(elements[: whole * batch].reshape(expected[:whole].shape), expected[:whole])
