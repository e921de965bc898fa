# SPDX-License-Identifier: Apache-2.0
"""Tests of what grain_train_files may say, and of the samples of one dataset in Megatron's order."""

import logging
import os
import pickle
import shutil

from absl import flags
from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from maxtext.input_pipeline import _mmap_datasource as library
from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline._mmap_datasource import MegatronNpyDataSource, Mixture, parse_mixture, parse_npy_entry
from maxtext.input_pipeline._mmap_index_cache import IndexRequest
from maxtext.input_pipeline._mmap_indexed_dataset import (
  DTYPE_CODES,
  IndexedDatasetWriter,
  MMapError,
  MMapFileNotFoundError,
  MMapIndexedDataset,
)
from support import refusal

EOD = 99
D1_LENGTHS = [5, 7, 3, 9, 6, 4]
D1_REQUEST = IndexRequest(4, 42, 8)
INTEGERS = [np.dtype(dtype) for dtype in DTYPE_CODES.values() if np.dtype(dtype).kind != "f"]


def write_sequences(prefix, sequences, documents=None, dtype=np.int32) -> str:
  """Writes token lists; `documents` as in the file, else one a sequence."""
  bounds = range(len(sequences) + 1) if documents is None else documents
  with IndexedDatasetWriter(str(prefix), dtype) as writer:
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
      for tokens in sequences[begin:end]:
        writer.add_sequence(tokens)
      writer.end_document()
  return str(prefix)


def write(prefix, lengths=D1_LENGTHS, documents=None) -> str:
  """Writes tokens 100 * sequence + position."""
  return write_sequences(prefix, [100 * row + np.arange(length) for row, length in enumerate(lengths)], documents)


@pytest.fixture
def dataset(tmp_path) -> str:
  return write(tmp_path / "data")


@pytest.fixture
def folder(tmp_path) -> str:
  return str(tmp_path / "indices")


@pytest.fixture(autouse=True)
def warnings_are_seen(caplog):
  caplog.set_level(logging.WARNING, logger=library.__name__)


def samples_of(source) -> list[list[int]]:
  return [source[position]["text"].tolist() for position in range(len(source))]


# What grain_train_files says.


@pytest.mark.parametrize(
  "text, expected",
  [
    ("npy|bin", Mixture(("npy|bin",), None, False)),
    ("  npy|bin ", Mixture(("npy|bin",), None, False)),
    ("npy|a,b", Mixture(("npy|a,b",), None, False)),  # one entry: the comma is of the path
    ("npy|a,0.5", Mixture(("npy|a,0.5",), None, False)),
    ("npy|a,1;", Mixture(("npy|a",), (1.0,), True)),
    ("a|b;c|d;", Mixture(("a|b", "c|d"), None, True)),
    ("a|b,0.7;c|d,0.3", Mixture(("a|b", "c|d"), (0.7, 0.3), True)),
    ("a|b,2 ; c|d, 1 ;", Mixture(("a|b", "c|d"), (2.0, 1.0), True)),
    ("a|b,c,2;d|e,f,1", Mixture(("a|b,c", "d|e,f"), (2.0, 1.0), True)),  # the last comma is before the weight
    ("a|b,0;c|d,1e-3", Mixture(("a|b", "c|d"), (0.0, 0.001), True)),
  ],
)
def test_d10_entries_and_weights(text, expected):
  assert parse_mixture(text) == expected


@pytest.mark.parametrize("text", ["", "  "])
def test_no_entry_names_the_key(text):
  assert "grain_eval_files is empty" in refusal(parse_mixture, text, "grain_eval_files")


@pytest.mark.parametrize(
  "part", ["c|d", "c|d,", "c|d,x", "c|d,nan", "c|d,inf", "c|d,-inf", "c|d,-1", ",1", " , 2", "c|d,1,", "c|d,1 2", "0.3"]
)
def test_d7_bad_weight_is_quoted_with_its_number(part):
  message = refusal(parse_mixture, f"a|b,1;{part}", "grain_eval_files")
  assert f"grain_eval_files: entry 1 is {part.strip()!r}; expected 'entry,weight'" in message


@pytest.mark.parametrize("text", ["a|b,0;c|d,0", "a|b,0;", "a|b,0.0;c|d,-0"])
def test_d7_weights_that_add_up_to_nothing(text):
  assert "grain_train_files: the weights add up to 0" in refusal(parse_mixture, text)


@pytest.mark.parametrize("text", [";", " ; ; "])
def test_only_separators_are_no_entry(text):
  assert "grain_train_files is empty" in refusal(parse_mixture, text)


@given(st.text(st.sampled_from("ab/|,;. 01-en:"), max_size=20))
def test_any_text_is_parsed_or_refused(text):
  try:
    mixture = parse_mixture(text)
  except MMapError as error:
    assert "grain_train_files" in str(error) and "\n" not in str(error)
  else:
    assert mixture.entries and all(entry and entry in text for entry in mixture.entries)
    assert mixture.used and (mixture.weights is None or min(mixture.weights) >= 0)
    assert mixture.mixed == (len(mixture.entries) > 1 or mixture.weights is not None)


@pytest.mark.parametrize(
  "entry, expected",
  [
    ("npy|bin", ("npy", ["bin"])),
    (" /a b/npy | /c,d/bin ", ("/a b/npy", ["/c,d/bin"])),
    ("a:b|c", ("a:b", ["c"])),
    ("npy|a:b : c", ("npy", ["a", "b", "c"])),
    ("gs://b/npy|/data/bin", ("gs://b/npy", ["/data/bin"])),
    ("npy|gs://b/p", ("npy", ["gs://b/p"])),
    ("npy|gs://b/p:gs://b/q:/r", ("npy", ["gs://b/p", "gs://b/q", "/r"])),
    ("npy|http://host:8000/p:q", ("npy", ["http://host:8000/p", "q"])),
  ],
)
def test_d10_the_two_halves_of_an_entry(entry, expected):
  assert parse_npy_entry(entry) == expected


@pytest.mark.parametrize("entry", ["bin", "|bin", "npy|", " | ", "", "npy|bin|more"])
def test_missing_half_of_an_entry(entry):
  message = refusal(parse_npy_entry, entry, "grain_eval_files")
  assert f"grain_eval_files: {entry!r} is not 'npy_dir|bin_prefix_or_directory'" in message


@pytest.mark.parametrize("entry", ["npy|a:", "npy|:a", "npy|a::b", "npy|gs://b/p: :c"])
def test_an_empty_path_between_colons(entry):
  assert "has an empty path; give one path, or several joined by ':'" in refusal(parse_npy_entry, entry)


# Samples.


def megatron_samples(sequences, seq_length, seed, num_samples) -> list[list[int]]:
  """Megatron's GPT samples by their definition: the documents of all epochs laid end to end, cut, and shuffled."""
  per_epoch, epochs = sum(map(len, sequences)), 1
  while epochs * per_epoch < num_samples * seq_length + 1:
    epochs += 1
  total = (epochs * per_epoch - 1) // seq_length
  before_last = ((epochs - 1) * per_epoch - 1) // seq_length
  apart = epochs > 1 and num_samples - before_last < int(0.8 * ((per_epoch - 1) // seq_length))
  rng = np.random.RandomState(seed)

  def shuffled(values, end):
    parts = [np.array(values[:end]), np.array(values[end:])]
    for part in parts:
      if len(part):
        rng.shuffle(part)
    return [int(value) for part in parts for value in part]

  rows = list(range(len(sequences))) * epochs
  rows = shuffled(rows, len(rows) - len(sequences) if apart else len(rows))
  stream = [int(token) for row in rows for token in sequences[row]]
  order = shuffled(list(range(total)), before_last if apart else total)
  return [stream[sample * seq_length : (sample + 1) * seq_length + 1] for sample in order]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
  return tmp_path_factory.mktemp("samples")


@st.composite
def datasets(draw):
  dtype = draw(st.sampled_from(INTEGERS))
  low, high = np.iinfo(dtype).min, min(np.iinfo(dtype).max, 2**31 - 1)
  token = st.integers(0 if dtype.itemsize == 8 else low, high)
  sequences = draw(st.lists(st.lists(token, max_size=9), min_size=1, max_size=12).filter(any))
  return dtype, sequences


@given(
  dataset=datasets(), seq_length=st.integers(1, 12), num_samples=st.integers(1, 40), seed=st.integers(0, 2**32 - 1)
)
def test_samples_are_megatrons_by_definition(scratch, dataset, seq_length, num_samples, seed):
  dtype, sequences = dataset
  shutil.rmtree(scratch / "indices", ignore_errors=True)
  prefix = write_sequences(scratch / "data", sequences, dtype=dtype)
  request = IndexRequest(seq_length, seed, num_samples)
  source = MegatronNpyDataSource(str(scratch / "indices"), prefix, EOD, seq_length, request=request)
  expected = megatron_samples(sequences, seq_length, seed, num_samples)
  assert samples_of(source) == expected and len(expected) >= num_samples
  assert source[0]["text"].dtype == np.int32


@pytest.mark.parametrize(
  "count, first",
  [(8, [401, 402, 403, 404, 405]), (9, [0, 1, 2, 3, 4]), (14, [*range(102, 107)]), (20, [201, 202, 100, 101, 102])],
)
def test_d1_first_samples(folder, dataset, count, first):
  source = MegatronNpyDataSource(folder, dataset, EOD, 4, request=IndexRequest(4, 42, count))
  assert source[0]["text"].tolist() == first
  assert len(source) == {8: 8, 9: 16, 14: 16, 20: 25}[count]


def test_d2_samples_overlap_by_one_token(tmp_path, folder):
  source = MegatronNpyDataSource(folder, write(tmp_path / "d2", [5, 7, 3, 9]), EOD, 4, request=IndexRequest(4, 1234, 5))
  assert samples_of(source) == [
    [103, 104, 105, 106, 200], [4, 100, 101, 102, 103], [200, 201, 202, 300, 301], [0, 1, 2, 3, 4],
    [301, 302, 303, 304, 305],
  ]


def test_d3_empty_sequences_add_nothing(tmp_path, folder):
  prefix = write(tmp_path / "d3", [3, 0, 4, 0, 0, 6])
  source = MegatronNpyDataSource(folder, prefix, EOD, 4, request=IndexRequest(4, 1234, 3))
  assert samples_of(source) == [[200, 201, 202, 203, 500], [504, 505, 0, 1, 2], [500, 501, 502, 503, 504]]


@pytest.mark.parametrize("documents", [[0, 1, 1, 2], [0, 1, 2, 2], [0, 0, 1, 2]])
def test_d4_documents_without_sequences_add_nothing(tmp_path, folder, documents):
  plain = MegatronNpyDataSource(folder, write(tmp_path / "plain", [3, 4]), EOD, 4, request=IndexRequest(4, 1234, 3))
  prefix = write(tmp_path / "d4", [3, 4], documents)
  source = MegatronNpyDataSource(folder + "4", prefix, EOD, 4, request=IndexRequest(4, 1234, 3))
  assert samples_of(source) == samples_of(plain) and len(source) >= 3


def test_d5_sentence_split_data_is_read_by_sequence_or_refused(tmp_path, folder):
  prefix = write(tmp_path / "d5", [2, 3, 4, 6], [0, 2, 4])
  message = refusal(MegatronNpyDataSource, folder, prefix, EOD, 4, request=IndexRequest(4, 7, 3))
  assert "d5.idx has documents of several sequences (4 sequences in 2 documents)" in message
  assert "mmap_split_sentences=true" in message and not os.path.exists(folder)
  source = MegatronNpyDataSource(folder, prefix, EOD, 4, True, request=IndexRequest(4, 7, 3))
  assert samples_of(source) == [[200, 201, 202, 203, 100], [100, 101, 102, 0, 1], [1, 300, 301, 302, 303]]


def test_d5_sentence_split_data_is_refused_without_a_request_too(tmp_path, folder):
  prefix = write(tmp_path / "d5", [2, 3, 4, 6], [0, 2, 4])
  cache.write_index(folder, prefix, IndexRequest(4, 7, 3))
  assert "documents of several sequences" in refusal(MegatronNpyDataSource, folder, prefix, EOD, 4)


def test_borders_of_the_index(folder, dataset):
  source = MegatronNpyDataSource(folder, dataset, EOD, 4, request=D1_REQUEST)
  assert len(source) == 8
  np.testing.assert_array_equal(source[-1]["text"], source[7]["text"])
  np.testing.assert_array_equal(source[-8]["text"], source[0]["text"])
  np.testing.assert_array_equal(source[np.int64(3)]["text"], source[3]["text"])
  for position in (8, -9, 10**12):
    with pytest.raises(IndexError, match=f"sample {position} of 8"):
      source[position]


def test_samples_can_be_changed_and_are_read_anew(folder, dataset):
  source = MegatronNpyDataSource(folder, dataset, EOD, 4, request=D1_REQUEST)
  source[0]["text"][:] = 0
  assert source[0]["text"].tolist() == [401, 402, 403, 404, 405]


def test_a_folder_of_one_dataset_is_that_dataset(tmp_path, folder):
  write(tmp_path / "corpus" / "books")
  source = MegatronNpyDataSource(folder, str(tmp_path / "corpus"), EOD, 4, request=D1_REQUEST)
  assert source.dataset.prefixes == (str(tmp_path / "corpus" / "books"),) and len(source) == 8


@pytest.mark.parametrize("token", [2**31, -1, -(2**31) - 1, 2**63 - 1])
def test_tokens_outside_int32_are_refused(tmp_path, folder, token):
  prefix = write_sequences(tmp_path / "data", [[1, 2, token]], dtype=np.int64)
  source = MegatronNpyDataSource(folder, prefix, EOD, 2, request=IndexRequest(2, 1, 1))
  assert "data.bin: sample 0 has token ids outside int32" in refusal(source.__getitem__, 0)


# Warnings.


def messages(caplog) -> list[str]:
  return [record.getMessage() for record in caplog.records]


def open_with_ends(tmp_path, folder, ends, split_sentences=False, documents=None) -> MegatronNpyDataSource:
  prefix = write_sequences(tmp_path / "data", [[1, 2, 3, end] for end in ends], documents)
  request = IndexRequest(2, 1, 1)
  return MegatronNpyDataSource(folder, prefix, EOD, 2, split_sentences, request=request)


def test_eod_that_is_there_is_no_warning(tmp_path, folder, caplog):
  open_with_ends(tmp_path, folder, [EOD, EOD])
  open_with_ends(tmp_path, folder, [5, EOD, 5])
  assert not caplog.records


@pytest.mark.parametrize("count", [1, 3, 250])
def test_eod_that_is_nowhere_is_a_loud_warning(tmp_path, folder, caplog, count):
  open_with_ends(tmp_path, folder, [7] * count)
  (message,) = messages(caplog)
  assert message.startswith(f"NO EOD TOKEN FOUND: none of {min(count, 100)} documents of {tmp_path / 'data'} ends with ")
  assert f"mmap_eod_id={EOD} (the first ends with 7)" in message and "--append-eod" in message


def test_eod_of_sentence_split_data_is_at_the_end_of_documents(tmp_path, folder, caplog):
  open_with_ends(tmp_path, folder, [5, EOD, 6, EOD], True, [0, 0, 2, 4])
  assert not caplog.records
  open_with_ends(tmp_path, folder, [EOD, 5, EOD, 6], True, [0, 0, 2, 4])
  assert len(caplog.records) == 1 and "none of 2 documents" in messages(caplog)[0]


def test_empty_sequences_have_no_end(tmp_path, folder, caplog):
  prefix = write_sequences(tmp_path / "data", [[], [1, 2, 3, EOD], []])
  MegatronNpyDataSource(folder, prefix, EOD, 2, request=IndexRequest(2, 1, 1))
  assert not caplog.records


def test_looking_for_eod_reads_a_hundred_ends_of_many_documents(tmp_path, folder, caplog, monkeypatch):
  prefix = write_sequences(tmp_path / "data", [[1, EOD]] * 5000)
  seen = []
  monkeypatch.setattr(MMapIndexedDataset, "get", lambda self, row, *part: seen.append(row) or np.array([5]))
  MegatronNpyDataSource(folder, prefix, EOD, 2, request=IndexRequest(2, 1, 1))
  assert len(set(seen)) == 100 and (min(seen), max(seen)) == (0, 4999)
  assert len(caplog.records) == 1


def test_d13_v_stray_bytes_are_reported_once(tmp_path, folder, caplog):
  prefix = write_sequences(tmp_path / "data", [[1, 2, EOD]])
  with open(prefix + ".bin", "ab") as file:
    file.write(b"stray")
  source = MegatronNpyDataSource(folder, prefix, EOD, 2, request=IndexRequest(2, 1, 1))
  assert messages(caplog) == [f"{prefix}.bin has 5 bytes after its last sequence; they are ignored."]
  assert samples_of(source) == [[1, 2, EOD]]
  worker = pickle.loads(pickle.dumps(source))
  assert samples_of(worker) == samples_of(source) and len(caplog.records) == 1


# Pickling.


def test_pickles_by_description(folder, dataset):
  source = MegatronNpyDataSource(folder, dataset, EOD, 4, request=IndexRequest(4, 42, 100_000))
  data = pickle.dumps(source)
  assert len(data) < 2000
  worker = pickle.loads(data)
  assert len(worker) == len(source)
  np.testing.assert_array_equal(worker[12345]["text"], source[12345]["text"])


def test_a_worker_neither_builds_nor_writes(folder, dataset):
  data = pickle.dumps(MegatronNpyDataSource(folder, dataset, EOD, 4, request=D1_REQUEST))
  shutil.rmtree(folder)
  with pytest.raises(MMapError, match="document_index.npy cannot be read .*; put it back and start again"):
    pickle.loads(data)
  assert not os.path.exists(folder)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_worker_refuses_a_dataset_that_was_replaced(folder, dataset, suffix):
  data = pickle.dumps(MegatronNpyDataSource(folder, dataset, EOD, 4, request=D1_REQUEST))
  os.utime(dataset + suffix, ns=(1, 1))
  with pytest.raises(MMapError, match=f"data{suffix} was changed since the run opened it; start again"):
    pickle.loads(data)


def test_a_worker_refuses_other_arrays(folder, dataset):
  source = MegatronNpyDataSource(folder, dataset, EOD, 4, request=D1_REQUEST)
  data = pickle.dumps(source)
  cache.save_array(source.index.paths[2], np.arange(3, dtype=np.uint32))
  with pytest.raises(MMapError, match="was changed since the run opened it; start again"):
    pickle.loads(data)


def test_d13_iii_a_worker_builds_what_could_not_be_written(tmp_path, dataset):
  (tmp_path / "file").write_text("not a folder")
  source = MegatronNpyDataSource(str(tmp_path / "file"), dataset, EOD, 4, request=D1_REQUEST)
  assert not source.index.saved
  assert samples_of(pickle.loads(pickle.dumps(source))) == samples_of(source)


def test_a_source_of_given_arrays_pickles_with_them(dataset):
  *arrays, _ = cache.build_in_memory(dataset, D1_REQUEST)
  source = MegatronNpyDataSource("", dataset, EOD, 4, prebuilt_indices=tuple(arrays))
  assert source.index is None and source[0]["text"].tolist() == [401, 402, 403, 404, 405]
  assert samples_of(pickle.loads(pickle.dumps(source))) == samples_of(source)


# Indices without a request.


def test_the_one_order_of_a_folder_is_found(folder, dataset):
  _, description = cache.write_index(folder, dataset, D1_REQUEST)
  source = MegatronNpyDataSource(folder, dataset, EOD, 4)
  assert source[0]["text"].tolist() == [401, 402, 403, 404, 405]
  named = MegatronNpyDataSource(folder, dataset, EOD, 4, expected_hash=description.name)
  assert samples_of(named) == samples_of(source) == samples_of(pickle.loads(pickle.dumps(named)))


def test_several_orders_must_be_named(folder, dataset):
  names = [cache.write_index(folder, dataset, IndexRequest(4, 42, count))[1].name for count in (8, 9)]
  message = refusal(MegatronNpyDataSource, folder, dataset, EOD, 4)
  assert f"{folder} holds 2 orders ({', '.join(sorted(names))}" in message
  assert len(MegatronNpyDataSource(folder, dataset, EOD, 4, expected_hash=names[1])) == 16


@pytest.mark.parametrize("array", cache.ARRAYS)
def test_a_missing_file_of_an_order(folder, dataset, array):
  paths, description = cache.write_index(folder, dataset, D1_REQUEST)
  os.remove(paths[array])
  with pytest.raises(MMapFileNotFoundError, match="holds no set of document, sample and shuffle index files"):
    MegatronNpyDataSource(folder, dataset, EOD, 4)
  with pytest.raises(MMapFileNotFoundError, match=f"{description.name}-{array}.npy is missing; build the indices again"):
    MegatronNpyDataSource(folder, dataset, EOD, 4, expected_hash=description.name)


def test_no_folder_and_an_empty_one(tmp_path, folder, dataset):
  assert f"{folder} is not a folder" in refusal(MegatronNpyDataSource, folder, dataset, EOD, 4)
  os.mkdir(folder)
  assert f"{folder} holds no set of" in refusal(MegatronNpyDataSource, folder, dataset, EOD, 4)


@pytest.mark.parametrize("seq_length", [3, 5, 2048])
def test_indices_of_another_sequence_length(folder, dataset, seq_length):
  cache.write_index(folder, dataset, D1_REQUEST)
  message = refusal(MegatronNpyDataSource, folder, dataset, EOD, seq_length)
  assert f"{folder}: the indices were built for a sequence length of 4, not {seq_length}" in message


def test_indices_of_another_dataset(tmp_path, folder, dataset):
  cache.write_index(folder, dataset, D1_REQUEST)
  small = write(tmp_path / "small", [9, 9])
  message = refusal(MegatronNpyDataSource, folder, small, EOD, 4)
  assert f"{folder}: document_index is empty or has values outside 0 to 1, the sequences of the dataset" in message


@pytest.mark.parametrize(
  "array, position, value, limit",
  [
    ("document_index", 3, 6, "0 to 5"),
    ("document_index", 0, -1, "0 to 5"),
    ("sample_index", (4, 0), 6, "0 to 5"),
    ("sample_index", (4, 0), -1, "0 to 5"),
    ("sample_index", (4, 1), -1, "0 to 2147483647"),
    ("shuffle_index", 7, 8, "0 to 7"),
  ],
)
def test_values_that_point_outside(folder, dataset, array, position, value, limit):
  paths, _ = cache.write_index(folder, dataset, D1_REQUEST)
  values = np.load(paths[array])
  values[position] = value
  np.save(paths[array], values)
  message = refusal(MegatronNpyDataSource, folder, dataset, EOD, 4)
  assert f"{folder}: {array}" in message and f"has values outside {limit}" in message


@pytest.mark.parametrize(
  "array, change",
  [
    ("sample_index", lambda values: values[:, 0]),
    ("sample_index", lambda values: values[:1]),
    ("document_index", lambda values: values.reshape(2, 3)),
    ("shuffle_index", lambda values: values.reshape(2, 4)),
    ("shuffle_index", lambda values: values[:0]),
  ],
)
def test_arrays_of_another_shape(folder, dataset, array, change):
  paths, _ = cache.write_index(folder, dataset, D1_REQUEST)
  np.save(paths[array], change(np.load(paths[array])))
  assert f"{folder}: " in refusal(MegatronNpyDataSource, folder, dataset, EOD, 4)


def test_a_file_that_is_no_array(folder, dataset):
  paths, _ = cache.write_index(folder, dataset, D1_REQUEST)
  with open(paths["sample_index"], "wb") as file:
    file.write(b"garbage")
  message = refusal(MegatronNpyDataSource, folder, dataset, EOD, 4)
  assert f"{paths['sample_index']} is not a NumPy array file; build the indices again" in message


def source_of_rows(dataset, change) -> MegatronNpyDataSource:
  """A source of D1's eight samples in the order of the sample index, after `change` of that."""
  documents, rows, _, _ = cache.build_in_memory(dataset, D1_REQUEST)
  change(rows)
  indices = (documents, rows, np.arange(8, dtype=np.uint32))
  return MegatronNpyDataSource("", dataset, EOD, 4, prebuilt_indices=indices)


def test_a_damaged_row_is_refused_and_not_padded_or_cut(dataset):
  def change(rows):
    rows[3] = rows[4]

  source = source_of_rows(dataset, change)
  assert source[1]["text"].tolist() == [4, 100, 101, 102, 103] and len(source[4]["text"]) == 5
  assert "data.bin: sample 2 has at least 6 tokens; expected 5" in refusal(source.__getitem__, 2)
  assert "data.bin: sample 3 has 1 tokens; expected 5" in refusal(source.__getitem__, 3)


def test_a_row_of_decreasing_documents_is_refused(dataset):
  def change(rows):
    rows[4, 0] = 0

  message = refusal(source_of_rows(dataset, change).__getitem__, 3)
  assert "data.bin: sample 3 has 0 tokens; expected 5" in message


def test_a_sample_that_ends_outside_its_sequence(dataset):
  def change(rows):
    rows[5, 1] = 50

  message = refusal(source_of_rows(dataset, change).__getitem__, 4)
  assert "data.bin: sample 4 has at least 6 tokens; expected 5; the indices are damaged" in message


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_partial_last_sample_is_filled_with_eod(tmp_path, dtype):
  prefix = write_sequences(tmp_path / "data", [np.arange(5), 100 + np.arange(6)], dtype=dtype)
  indices = (
    np.array([1, 0], np.int32), np.array([[0, 0], [0, 4], [1, 2], [1, 4]], np.int32), np.arange(3, dtype=np.uint32)
  )
  source = MegatronNpyDataSource("", prefix, EOD, 4, prebuilt_indices=indices)
  assert samples_of(source) == [[100, 101, 102, 103, 104], [104, 105, 0, 1, 2], [2, 3, 4, EOD, EOD]]


# Files that change under a run.


def test_d14_bin_that_shrinks_under_a_source(folder, dataset):
  source = MegatronNpyDataSource(folder, dataset, EOD, 4, request=D1_REQUEST)
  assert source[0]["text"].tolist() == [401, 402, 403, 404, 405]
  os.truncate(dataset + ".bin", 40)
  message = refusal(source.__getitem__, 0)
  assert "data.bin is truncated: " in message and "the file has 40 bytes now" in message


# The released functions.


def test_create_mmap_npy_source(folder, dataset):
  samples = library.create_mmap_npy_source(f"{folder}|{dataset}", EOD, 4, False, num_samples=9, seed=42)
  assert len(samples) == 16 and samples[0]["text"].tolist() == [0, 1, 2, 3, 4]
  two_epochs = library.create_mmap_npy_source(f"{folder}|{dataset}", EOD, 4, False, seed=42, num_epoch=2)
  assert len(two_epochs) == 16 and two_epochs[0]["text"].tolist() == [102, 103, 104, 105, 106]


def test_create_mmap_npy_source_of_a_part(folder, dataset):
  part = library.create_mmap_npy_source(f"{folder}|{dataset}", EOD, 4, False, 4, 42, split="1,1", split_index=1)
  tokens = {token for sample in range(len(part)) for token in part[sample]["text"].tolist()}
  assert len(part) == 4 and {token // 100 for token in tokens} == {3, 4, 5}


def test_get_mmap_npy_dataset_hands_the_samples_to_the_transforms(folder, dataset):
  seen = []

  def transforms(*arguments):
    seen.append(arguments)
    return "iterator"

  entry = f"{folder}|{dataset}"
  given_ = (False, 4, EOD, 1, 1, 2, 16, 500, "", "", None, transforms)
  assert library.get_mmap_npy_dataset(entry, *given_, num_samples=9, seed=42) == "iterator"
  ((samples, *rest),) = seen
  assert len(samples) == 16 and samples[0]["text"].tolist() == [0, 1, 2, 3, 4]
  assert rest == [False, 0, 1, 1, 2, 16, 500]
  message = refusal(library.get_mmap_npy_dataset, f"{entry},1;{entry},2", *given_)
  assert "grain_train_files is a blend with weights, and no number of samples is set" in message


# The life of index files under a run.


def open_d1(folder, dataset, **settings) -> MegatronNpyDataSource:
  return MegatronNpyDataSource(folder, dataset, EOD, 4, request=D1_REQUEST, **settings)


def test_index_files_are_built_once_found_and_mended(folder, dataset, caplog):
  caplog.set_level(logging.WARNING, logger=cache.__name__)
  first = open_d1(folder, dataset)
  assert not first.index.found and first.index.saved
  assert open_d1(folder, dataset).index.found and "again" not in caplog.text
  path = first.index.paths[2]
  array = np.load(path)
  cache.save_array(path, array[::-1])
  mended = open_d1(folder, dataset)
  assert not mended.index.found and f"{path} has changed since it was written" in caplog.text
  np.testing.assert_array_equal(np.load(path), array)
  assert samples_of(mended) == samples_of(open_d1(folder, dataset))


def test_a_process_that_does_not_write_finds_or_builds(folder, dataset):
  alone = open_d1(folder, dataset, write=False)
  assert not alone.index.found and not alone.index.saved and not os.path.exists(folder)
  open_d1(folder, dataset)
  assert open_d1(folder, dataset, write=False).index.found
  assert samples_of(alone) == samples_of(open_d1(folder, dataset))


def test_a_replaced_dataset_has_an_order_of_its_own(tmp_path, folder, dataset):
  before = open_d1(folder, dataset)
  write(tmp_path / "data", D1_LENGTHS[::-1])
  after = open_d1(folder, dataset)
  assert not after.index.found and after.index.description.name != before.index.description.name


# The pipeline of a run.


@pytest.fixture
def run(tmp_path, monkeypatch, folder, dataset):
  """Makes the training or evaluation iterator of a config that reads the dataset."""
  from maxtext.configs import pyconfig
  from maxtext.input_pipeline import grain_data_processing
  from maxtext.utils import maxtext_utils

  monkeypatch.chdir(tmp_path)
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()  # Grain looks at its flags; a training run has parsed them

  def make(part="train", **keys):
    settings = {
      "skip_jax_distributed_system": True, "run_name": "t", "base_output_directory": tmp_path, "model_name": "gpt3-52k",
      "dataset_type": "grain", "grain_file_type": "mmap_npy", "grain_train_files": f"{folder}|{dataset}",
      "grain_eval_files": f"{folder}|{dataset}", "max_target_length": 4, "mmap_eod_id": EOD, "data_shuffle_seed": 42,
      "per_device_batch_size": 4, "steps": 2, "grain_worker_count": 0, "packing_max_segments_per_sample": 0, **keys,
    }  # fmt: skip
    config = pyconfig.initialize(["", "base.yml", *(f"{key}={value}" for key, value in settings.items())])
    mesh = maxtext_utils.get_mesh_from_config(config)
    return getattr(grain_data_processing, f"make_grain_{part}_iterator")(config, mesh, [0])

  return make


def test_a_run_trains_on_megatrons_samples_in_order(run, folder, dataset):
  tokens = np.array(samples_of(open_d1(folder, dataset)))
  iterator = iter(run())
  for step in range(2):
    batch = {name: np.asarray(values) for name, values in next(iterator).items()}
    expected = tokens[4 * step : 4 * step + 4]
    np.testing.assert_array_equal(batch["inputs"], expected[:, :-1])
    np.testing.assert_array_equal(batch["targets"], expected[:, 1:])
    assert batch["inputs_segmentation"].tolist() == batch["targets_segmentation"].tolist() == [[1] * 4] * 4
    assert batch["inputs_position"].tolist() == batch["targets_position"].tolist() == [[0, 1, 2, 3]] * 4


def test_every_evaluation_reads_the_same_samples(run):
  keys = {"eval_interval": 1, "eval_steps": 2, "mmap_npy_num_eval_samples": 20}
  iterator = run("eval", **keys)
  evaluations = []
  for _ in range(2):
    iterator.reset()
    evaluations.append([np.asarray(next(iterator)["inputs"]).tolist() for _ in range(2)])
  assert evaluations[0] == evaluations[1]
  assert evaluations[0][0] != evaluations[0][1]
  assert evaluations[0][0][0] == [201, 202, 100, 101], "the first of D1's 20 samples"
