# SPDX-License-Identifier: Apache-2.0
"""Tests of the document, sample and shuffle indices, of epochs and of splits.

Tests named after a case, such as `test_d1_...`, hold numbers that megatron-core printed.
"""

import sys

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter, MMapError

EXAMPLES = settings(deadline=None, max_examples=60)
D1_LENGTHS = [5, 7, 3, 9, 6, 4]
INT_DTYPES = ["int32", "uint32", "int64"]


def write(prefix, lengths, documents=None) -> str:
  """Writes a dataset with tokens 100 * sequence + position; `documents` as in the file, else one a sequence."""
  bounds = documents or range(len(lengths) + 1)
  with IndexedDatasetWriter(str(prefix), np.int32) as writer:
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
      for row in range(begin, end):
        writer.add_sequence(100 * row + np.arange(lengths[row]))
      writer.end_document()
  return str(prefix)


def build(lengths, num_samples, seq_length=4, seed=42, begin=0, end=None):
  sizes = np.array(lengths, np.int32)
  end = len(lengths) if end is None else end
  plan = utils.plan_epochs(int(sizes[begin:end].sum()), seq_length, num_samples)
  return tuple(array for _, array in utils.iter_indices(sizes, max(lengths), begin, end, plan, seq_length, seed))


def rows(text: str) -> list[list[int]]:
  """Parses "(0,0)(0,4)"."""
  return [[int(number) for number in row.split(",")] for row in text.strip("()").split(")(")]


def numbers(text: str) -> list[int]:
  return [int(number) for number in text.split()]


def tokens_of(lengths, document_index, sample_index, sample, extra=1) -> list[int]:
  """Reads tokens 100 * sequence + position by the meaning of the indices."""
  (document, offset), (last, end) = sample_index[sample].tolist(), sample_index[sample + 1].tolist()
  found = []
  for entry in range(document, last + 1):
    row = int(document_index[entry])
    stop = end + extra if entry == last else lengths[row]
    found += [100 * row + position for position in range(offset if entry == document else 0, stop)]
  return found


# Cases by number.


def test_d1_one_epoch():
  documents, samples, shuffle = build(D1_LENGTHS, 8)
  assert documents.tolist() == [0, 1, 5, 2, 4, 3]
  assert samples.tolist() == rows("(0,0)(0,4)(1,3)(2,0)(3,0)(4,1)(4,5)(5,3)(5,7)")
  assert shuffle.tolist() == [5, 0, 3, 6, 2, 1, 7, 4]
  assert (documents.dtype, samples.dtype, shuffle.dtype) == (np.int32, np.int32, np.uint32)
  first = [tokens_of(D1_LENGTHS, documents, samples, sample) for sample in shuffle[:3].tolist()]
  assert first == [[401, 402, 403, 404, 405], [0, 1, 2, 3, 4], [500, 501, 502, 503, 200]]


@pytest.mark.parametrize("num_samples", [9, 10, 11, 12, 13])
def test_d1_last_epoch_apart(num_samples):
  documents, samples, shuffle = build(D1_LENGTHS, num_samples)
  assert documents.tolist() == [0, 1, 5, 2, 4, 3, 3, 0, 1, 2, 5, 4]
  assert shuffle.tolist() == numbers("0 1 5 3 4 7 2 6 15 10 8 13 14 11 9 12")
  assert tokens_of(D1_LENGTHS, documents, samples, 0) == [0, 1, 2, 3, 4]


def test_d1_last_epoch_together():
  documents, samples, shuffle = build(D1_LENGTHS, 14)
  assert documents.tolist() == [4, 3, 0, 2, 5, 2, 1, 5, 4, 1, 3, 0]
  assert shuffle.tolist() == numbers("8 13 9 6 0 11 3 10 12 14 1 4 5 2 15 7")
  assert tokens_of(D1_LENGTHS, documents, samples, int(shuffle[0])) == [102, 103, 104, 105, 106]


def test_d1_three_epochs():
  documents, samples, shuffle = build(D1_LENGTHS, 20)
  assert documents.tolist() == [4, 3, 0, 2, 5, 2, 1, 5, 4, 1, 3, 0, 0, 5, 3, 1, 4, 2]
  assert tokens_of(D1_LENGTHS, documents, samples, int(shuffle[0])) == [201, 202, 100, 101, 102]


def test_d1_part_of_the_sequences_keeps_their_numbers():
  documents, samples, shuffle = build(D1_LENGTHS, 4, begin=3, end=6)
  assert documents.tolist() == [3, 4, 5]
  assert samples.tolist() == rows("(0,0)(0,4)(0,8)(1,3)(2,1)")
  assert shuffle.tolist() == [1, 3, 2, 0]


def test_d1_epochs_shorter_than_a_sample():
  documents, samples, _ = build([3, 2, 4], 2, seq_length=16)
  assert documents.tolist() == [1, 0, 0, 2, 2, 2, 1, 2, 1, 1, 0, 0]
  assert samples.tolist() == rows("(0,0)(5,0)(10,2)")


def test_d3_empty_sequences():
  lengths = [3, 0, 4, 0, 0, 6]
  documents, samples, shuffle = build(lengths, 3, seed=1234)
  assert documents.tolist() == [2, 1, 5, 0, 4, 3]
  assert samples.tolist() == rows("(0,0)(2,0)(2,4)(3,2)")
  assert shuffle.tolist() == [0, 2, 1]
  expected = [[200, 201, 202, 203, 500], [504, 505, 0, 1, 2], [500, 501, 502, 503, 504]]
  assert [tokens_of(lengths, documents, samples, sample) for sample in shuffle.tolist()] == expected


@pytest.mark.parametrize("documents", [[0, 1, 2], [0, 1, 1, 2], [0, 1, 2, 2], [0, 0, 1, 2]])
def test_d4_documents_without_sequences(tmp_path, documents):
  prefix = write(tmp_path / "data", [3, 4], documents)
  description = cache.describe(prefix, cache.IndexRequest(4, 1234, 3))
  assert description.tokens_per_epoch == 7
  assert not description.facts[0]["sentence_split"]
  *arrays, _ = cache.build_in_memory(prefix, cache.IndexRequest(4, 1234, 3))
  for array, plain in zip(arrays, build([3, 4], 3, seed=1234), strict=True):
    np.testing.assert_array_equal(array, plain)


@pytest.mark.parametrize("lengths, documents", [([], [0, 0, 0]), ([0, 0, 0], [0, 1, 2, 3])])
def test_d4_only_empty_documents(tmp_path, lengths, documents):
  prefix = write(tmp_path / "data", lengths, documents)
  with pytest.raises(MMapError, match=r"data\.idx has (no sequences|3 sequences and 0 tokens)"):
    cache.describe(prefix, cache.IndexRequest(4, 1234, 3))


def test_d5_sentence_split_files_are_read_by_sequence(tmp_path):
  lengths = [2, 3, 4, 6]
  prefix = write(tmp_path / "data", lengths, [0, 2, 4])
  documents, samples, shuffle, _ = utils.build_indices(prefix, 4, num_samples=3, seed=7)
  assert documents.tolist() == [2, 1, 0, 3]
  expected = [[200, 201, 202, 203, 100], [100, 101, 102, 0, 1], [1, 300, 301, 302, 303]]
  assert [tokens_of(lengths, documents, samples, sample) for sample in shuffle.tolist()] == expected


@pytest.mark.parametrize(
  "split, sequences, expected",
  [
    ("0.7,0.2,0.1", 15, [(0, 11), (11, 14), (14, 15)]),
    ("50,50,0", 5, [(0, 2), (2, 5), (5, 5)]),
    ("99,1", 50, [(0, 50), (50, 50), (50, 50)]),
    ("969,30,1", 100, [(0, 97), (97, 100), (100, 100)]),
    ("98,1,1", 50, [(0, 49), (49, 50), (50, 50)]),
  ],
)
def test_d6_rounding(split, sequences, expected):
  assert [utils.parse_split_range(split, part, sequences) for part in range(3)] == expected


@pytest.mark.parametrize("split", ["-1,2", "99,x", "nan,1", "inf,1", "0,0", "0", "1,1,1,1", "", ",", "99,", "99;1"])
def test_d6_bad_split_is_quoted(split):
  with pytest.raises(MMapError) as caught:
    utils.parse_split_range(split, 0, 100)
  assert repr(split) in str(caught.value)


@pytest.mark.parametrize("split", ["1e-1,0.9", "1_0,1", "+1,1", "٣,1"])
def test_d6_number_that_megatron_reads_otherwise_is_refused(split):
  """Python reads each as two numbers; megatron-core finds digits and points, so other shares or none."""
  with pytest.raises(MMapError) as caught:
    utils.parse_split(split)
  assert repr(split) in str(caught.value)


@pytest.mark.parametrize("index", [-1, 3])
def test_d6_bad_split_index(index):
  with pytest.raises(MMapError, match=f"split index {index} "):
    utils.parse_split_range("99,1", index, 100)


@pytest.mark.parametrize(
  "split, lengths, part", [("99,1", [3] * 50, 1), ("2,2", [5, 5, 0, 0], 1), ("1,3", [0, 4, 4, 4], 0)]
)
def test_d6_empty_part_is_named_with_its_range(tmp_path, split, lengths, part):
  prefix = write(tmp_path / "data", lengths)
  begin, end = utils.parse_split_range(split, part, len(lengths))
  name = utils.SPLIT_NAMES[part]
  with pytest.raises(MMapError, match=f"{name} part of split '{split}' is sequences {begin} to {end} "):
    utils.build_indices(prefix, 4, num_samples=1, split=split, split_index=part)
  other = utils.build_indices(prefix, 4, num_samples=1, split=split, split_index=1 - part)
  assert len(other[2]) >= 1


def test_d8_sample_index_dtype():
  limit = 2**31 - 1
  assert utils.sample_index_dtype(limit, 10) == utils.sample_index_dtype(10, limit) == np.int32
  assert utils.sample_index_dtype(10, limit + 1) == utils.sample_index_dtype(limit + 1, 10) == np.int64


def test_d8_offsets_beyond_32_bits(tmp_path):
  """The sizes of the case; the files would take 8 GiB, so only the arithmetic is done."""
  sizes = np.array([2147483548, 123], np.int32)
  index = utils.build_sample_index(sizes, np.array([0, 1, 1, 0], np.int32), 1 << 28)
  assert index.dtype == np.int32
  assert len(index) == (2 * 2147483671 - 1) // (1 << 28) + 1
  starts = np.array([0, 2147483548, 2147483671, 2147483794])
  np.testing.assert_array_equal(starts[index[:, 0]] + index[:, 1], np.arange(len(index)) << 28)


def test_d8_shuffle_index_of_small_input_is_uint32():
  assert utils.build_shuffle_index(5, 8, 3).dtype == np.uint32


@pytest.mark.parametrize("samples, dtype", [(2**32 - 3, "<u4"), (2**32 - 2, "<i8"), (2**32, "<i8")])
def test_d8_shuffle_index_of_large_input_is_expected_as_megatrons(samples, dtype):
  plan = utils.EpochPlan(1, False, samples, samples)
  description = cache.IndexDescription("name", {}, plan, 0, 8, 9, ({"longest": 5},))
  assert description.expected()["shuffle_index"] == (dtype, (samples,))


# Shuffles.


def assert_shuffles_like_numpy(count, dtype, rng_ours, rng_numpy):
  ours, theirs = np.arange(count, dtype=dtype), np.arange(count, dtype=dtype)
  utils.shuffle(ours, rng_ours)
  rng_numpy.shuffle(theirs)
  assert ours.dtype == np.dtype(dtype)
  np.testing.assert_array_equal(ours, theirs)
  for mine, other in zip(rng_ours.get_state(), rng_numpy.get_state(), strict=True):
    np.testing.assert_array_equal(mine, other)
  np.testing.assert_array_equal(rng_ours.randint(0, 2**31, 700), rng_numpy.randint(0, 2**31, 700))


@EXAMPLES
@given(
  count=st.integers(0, 20_000),
  dtype=st.sampled_from(INT_DTYPES),
  seed=st.integers(0, 2**32 - 1),
  words=st.integers(0, 1300),
  normals=st.integers(0, 1),
)
def test_shuffle_is_numpys_from_any_state(count, dtype, seed, words, normals):
  states = [np.random.RandomState(seed) for _ in range(2)]
  for state in states:
    state.randint(0, 2**32, words, dtype=np.uint32)
    state.standard_normal(normals)  # leaves a second value waiting in the state
  assert_shuffles_like_numpy(count, dtype, *states)


@pytest.mark.parametrize("dtype", INT_DTYPES)
@pytest.mark.parametrize("count", sorted({0, 1, 2, 3} | {2**k + d for k in (2, 5, 9, 12, 13, 16) for d in (-1, 0, 1)}))
def test_shuffle_around_powers_of_two(count, dtype):
  assert_shuffles_like_numpy(count, dtype, np.random.RandomState(count), np.random.RandomState(count))


@pytest.mark.parametrize("dtype", INT_DTYPES)
def test_shuffle_of_a_million(dtype):
  assert_shuffles_like_numpy(1_000_000, dtype, np.random.RandomState(7), np.random.RandomState(7))


@pytest.mark.parametrize("piece", [1, 7, 622, 623, 624, 4096, 5000])
def test_pieces_of_work_do_not_change_the_result(monkeypatch, piece):
  lengths = np.random.default_rng(piece).integers(0, 9, 6000).tolist()
  whole = build(lengths, 9000, seed=5)
  monkeypatch.setattr(utils, "_PIECE", piece)
  for array, expected in zip(build(lengths, 9000, seed=5), whole, strict=True):
    np.testing.assert_array_equal(array, expected)


def test_progress_ends_at_the_whole_of_each_stage():
  sizes = np.array(D1_LENGTHS, np.int32)
  plan, reports = utils.plan_epochs(34, 4, 14), []
  for _ in utils.iter_indices(sizes, 9, 0, 6, plan, 4, 42, 1, lambda *report: reports.append(report)):
    pass
  assert reports == [("document index", 12, 12), ("sample index", 12, 12), ("shuffle index", 16, 16)]


# Epochs.


@EXAMPLES
@given(tokens=st.integers(1, 300), samples=st.integers(1, 200), seq_length=st.integers(1, 40), extra=st.integers(0, 1))
def test_epochs_are_the_fewest_that_hold_the_samples(tokens, samples, seq_length, extra):
  epochs = utils.compute_num_epochs(tokens, samples, seq_length, extra)
  assert epochs * tokens >= samples * seq_length + extra
  assert epochs == 1 or (epochs - 1) * tokens < samples * seq_length + extra


@EXAMPLES
@given(tokens=st.integers(2, 300), samples=st.integers(1, 200), seq_length=st.integers(1, 40))
def test_plan_says_what_the_epochs_hold(tokens, samples, seq_length):
  plan = utils.plan_epochs(tokens, seq_length, samples)
  assert plan.samples == (plan.num_epochs * tokens - 1) // seq_length >= samples
  before = ((plan.num_epochs - 1) * tokens - 1) // seq_length
  per_epoch = (tokens - 1) // seq_length
  apart = plan.num_epochs > 1 and samples - before < int(0.8 * per_epoch)
  assert plan.separate_last_epoch == apart
  assert plan.samples_before_last == (before if apart else plan.samples)


@pytest.mark.parametrize("per_epoch, apart", [(100, 79), (101, 79), (104, 82), (10**6, 799_999)])
def test_last_epoch_is_apart_below_four_fifths_of_its_samples(per_epoch, apart):
  """Two epochs of `per_epoch` samples of 4 tokens each; `apart` is the most of the second that is shuffled apart."""
  tokens = 4 * per_epoch + 1
  assert utils.plan_epochs(tokens, 4, per_epoch + apart).separate_last_epoch
  assert not utils.plan_epochs(tokens, 4, per_epoch + apart + 1).separate_last_epoch


def test_plan_for_whole_epochs_asks_for_all_their_samples():
  assert utils.plan_epochs(34, 4, num_epochs=2) == utils.plan_epochs(34, 4, 16) == utils.EpochPlan(2, False, 16, 16)


@pytest.mark.parametrize("request_", [(None, None), (5, 1)])
def test_plan_needs_samples_or_epochs(request_):
  with pytest.raises(MMapError, match="either a number of samples or a number of epochs"):
    utils.plan_epochs(34, 4, *request_)


def test_plan_refuses_less_than_one_sample():
  with pytest.raises(MMapError, match="1 epochs of 16 tokens do not make one sample of 16 "):
    utils.plan_epochs(16, 16, num_epochs=1)
  with pytest.raises(MMapError, match="0 tokens"):
    utils.plan_epochs(0, 16, 5)


def test_no_overflow_in_a_plan_of_a_large_run():
  plan = utils.plan_epochs(10**13, 8192, 10**10)
  assert (plan.num_epochs, plan.samples) == (9, (9 * 10**13 - 1) // 8192)


# Indices in general.


@EXAMPLES
@given(
  lengths=st.lists(st.integers(0, 60), min_size=1, max_size=25).filter(lambda lengths: sum(lengths) > 1),
  epochs=st.integers(1, 4),
  seq_length=st.integers(1, 30),
  extra=st.integers(0, 1),
  seed=st.integers(0, 2**32 - 1),
)
def test_samples_are_windows_of_the_documents_in_order(lengths, epochs, seq_length, extra, seed):
  sizes = np.array(lengths, np.int32)
  documents = utils.build_document_index(len(lengths), epochs, seed)
  index = utils.build_sample_index(sizes, documents, seq_length, True, extra)
  stream = [100 * row + position for row in documents.tolist() for position in range(lengths[row])]
  assert len(index) - 1 == (len(stream) - extra) // seq_length
  for sample in range(len(index) - 1):
    window = stream[sample * seq_length : (sample + 1) * seq_length + extra]
    assert tokens_of(lengths, documents, index, sample, extra) == window


def test_partial_last_sample_ends_with_the_last_sequence():
  sizes, documents = np.array([5, 6], np.int32), np.array([1, 0], np.int32)
  assert utils.build_sample_index(sizes, documents, 4).tolist() == [[0, 0], [0, 4], [1, 2]]
  assert utils.build_sample_index(sizes, documents, 4, drop_last=False).tolist() == [[0, 0], [0, 4], [1, 2], [1, 4]]


@EXAMPLES
@given(count=st.integers(1, 50), epochs=st.integers(1, 4), apart=st.booleans(), seed=st.integers(0, 2**32 - 1))
def test_every_epoch_has_every_document(count, epochs, apart, seed):
  documents = utils.build_document_index(count, epochs, seed, apart)
  assert documents.dtype == np.int32
  assert np.bincount(documents, minlength=count).tolist() == [epochs] * count
  if apart:
    assert sorted(documents[-count:].tolist()) == list(range(count))


def test_document_index_of_nothing_is_empty():
  documents = utils.build_document_index(0, 2, 1)
  assert (documents.shape, documents.dtype) == ((0,), np.int32)


@EXAMPLES
@given(total=st.integers(0, 300), share=st.floats(0, 1), seed=st.integers(0, 2**32 - 1))
def test_shuffle_index_keeps_the_last_epoch_apart(total, share, seed):
  before = int(total * share)
  index = utils.build_shuffle_index(before, total, seed)
  rng = np.random.RandomState(seed)
  first, last = np.arange(before, dtype=np.uint32), np.arange(before, total, dtype=np.uint32)
  rng.shuffle(first)
  rng.shuffle(last)
  np.testing.assert_array_equal(index, np.concatenate([first, last]))


def test_same_request_gives_the_same_name_and_indices(tmp_path):
  prefix = write(tmp_path / "data", D1_LENGTHS)
  *first, name = utils.build_indices(prefix, 4, num_samples=9, seed=42)
  *second, same = utils.build_indices([prefix], 4, num_samples=13, seed=42)
  assert name == same == utils.compute_index_hash(prefix, 2, True, 42, 4)
  assert all(np.array_equal(*pair) for pair in zip(first, second, strict=True))
  assert name != utils.build_indices(prefix, 4, num_samples=14, seed=42)[3]


# Datasets by path, and counts.


def test_counts(tmp_path):
  first = write(tmp_path / "a", [2, 3, 4, 6], [0, 2, 2, 4])
  second = write(tmp_path / "b", [5, 1])
  assert utils.get_num_documents([first, second]) == 5
  assert utils.get_document_sizes([first, second]).tolist() == [5, 0, 10, 5, 1]
  assert utils.get_total_tokens([first, second]) == 21
  assert utils.get_split_tokens([first, second], 1, 4) == 15


def test_prefixes_of_paths_and_folders(tmp_path):
  prefixes = [write(tmp_path / name, [3]) for name in ("s_10", "s_2", "a[1]")]
  assert utils.resolve_shard_prefixes(str(tmp_path)) == sorted(prefixes)
  assert utils.resolve_shard_prefixes(prefixes[:2]) == prefixes[:2]
  folder = write(tmp_path / "both", [3])
  (tmp_path / "both").mkdir()
  assert utils.resolve_shard_prefixes(folder) == [folder]


def test_missing_datasets_are_named(tmp_path):
  (tmp_path / "empty").mkdir()
  prefix = write(tmp_path / "half", [3])
  (tmp_path / "half.bin").unlink()
  messages = {tmp_path / "empty": "has no .idx files", tmp_path / "none": "neither", prefix: "half.bin is missing"}
  for path, message in messages.items():
    with pytest.raises(MMapError, match=message) as caught:
      utils.resolve_shard_prefixes(str(path))
    assert str(path) in str(caught.value)
  with pytest.raises(MMapError, match="no dataset path"):
    utils.resolve_shard_prefixes([])


def test_d7_samples_of_children():
  assert utils.compute_blend_buffers(1000, [0.7, 0.3], 0.5) == [704, 302]


def test_paths_may_be_path_objects(tmp_path):
  prefix = write(tmp_path / "data", [3])
  for path in (tmp_path, tmp_path / "data", [tmp_path / "data"], prefix):
    assert utils.resolve_shard_prefixes(path) == [prefix]
  with pytest.raises(MMapError, match="found neither"):
    utils.resolve_shard_prefixes(tmp_path / "none")


def test_a_shard_that_is_named_twice(tmp_path):
  prefix = write(tmp_path / "data", [3])
  with pytest.raises(MMapError, match=f"{prefix} is named twice in one dataset; name each of its shards once"):
    utils.resolve_shard_prefixes([tmp_path, prefix])


@pytest.mark.parametrize("piece", [1, 2, 3, 100])
def test_pieces_do_not_change_sizes_and_counts(tmp_path, monkeypatch, piece):
  monkeypatch.setattr(utils, "_DOCUMENTS", piece)
  monkeypatch.setattr(utils, "_PIECE", piece)
  lengths = [2, 0, 4, 6, 1, 1]
  split = write(tmp_path / "split", lengths, [0, 0, 2, 2, 3, 6, 6])
  swapped = write(tmp_path / "swapped", lengths, [0, 0, 1, 3, 3, 5, 6])  # as many documents as sequences
  usual = write(tmp_path / "usual", lengths)
  assert utils.get_document_sizes([split]).tolist() == [0, 2, 0, 4, 8, 0]
  assert utils.get_document_sizes([swapped]).tolist() == [0, 2, 4, 0, 7, 1]
  sizes = utils.get_document_sizes([usual])
  assert sizes.tolist() == lengths and sizes.dtype == np.int64
  order = np.array([3, 1, 5, 0, 4, 2], np.int32)
  expected = [[0, 0], [0, 4], [3, 1], [5, 2]]  # tokens 0, 4, 8 and 12 of the order
  assert utils.build_sample_index(sizes, order, 4).tolist() == expected


def test_no_documents_have_no_sizes(tmp_path):
  assert utils.get_document_sizes([write(tmp_path / "none", [], [0])]).tolist() == []
  assert utils.get_document_sizes([]).dtype == np.int64


def test_process_that_writes(monkeypatch):
  class Jax:
    def __init__(self, answer):
      self.answer = answer

    def process_index(self):
      if isinstance(self.answer, Exception):
        raise self.answer
      return self.answer

  for answer, expected in ((0, True), (1, False), (RuntimeError("no backend"), True)):
    monkeypatch.setitem(sys.modules, "jax", Jax(answer))
    assert utils.is_primary_process() is expected
  monkeypatch.delitem(sys.modules, "jax")
  assert utils.is_primary_process() and "jax" not in sys.modules


def test_cache_asks_the_patchable_name_who_writes(tmp_path, monkeypatch):
  prefix = write(tmp_path / "data", D1_LENGTHS)
  monkeypatch.setattr(utils, "is_primary_process", lambda: False)
  cache.open_index(str(tmp_path / "npy"), prefix, cache.IndexRequest(4, 42, 8))
  assert not list(tmp_path.glob("npy/*.npy"))
