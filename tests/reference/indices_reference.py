# SPDX-License-Identifier: Apache-2.0
"""Our document, sample and shuffle indices, splits and samples against a live megatron-core, on random datasets."""

import json
import os
import re
import tempfile

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_config import (
  convert_split_vector_to_split_matrix,
  parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset
import numpy as np
import pytest

EXAMPLES = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.filter_too_much])
MANY = settings(EXAMPLES, max_examples=500)
SPLITS = ["99,1", "98,1,1", "969,30,1", "0.7,0.2,0.1", "50,50,0", "1,1,1", "0.3,0.6,0.1", ".5,.25,.25", "7"]
SPLIT_TEXT = r"[1-9]?[0-9]{0,3}[.]?[0-9](,[0-9]{1,3}([.][0-9])?){0,2}"


@pytest.fixture(scope="module")
def utils(load_module):
  return load_module("_mmap_index_utils")


@pytest.fixture(scope="module")
def kernels(load_module):
  return load_module("_mmap_index_kernels")


@pytest.fixture(scope="module")
def indexed(load_module):
  return load_module("_mmap_indexed_dataset")


def assert_same_arrays(ours, theirs) -> None:
  for name, mine, other in zip(("document", "sample", "shuffle"), ours, theirs, strict=True):
    assert mine.dtype == other.dtype, name
    np.testing.assert_array_equal(mine, other, name)


def indices_of(dataset):
  return dataset.document_index, dataset.sample_index, dataset.shuffle_index


@st.composite
def length_lists(draw, longest=80):
  """Sequence lengths, [1 to 30], from mostly empty to many times a sample."""
  most = draw(st.sampled_from([1, 3, 12, longest]))
  lengths = draw(st.lists(st.integers(0, most), min_size=1, max_size=30))
  assume(sum(lengths) > 1)
  return lengths


@st.composite
def requests(draw, tokens, seq_length, extra):
  """Samples to ask for, of one to five epochs: any of the last epoch's, or just at the border of a last epoch apart."""
  epochs = draw(st.integers(1, 5))
  low = max(((epochs - 1) * tokens - extra) // seq_length + 1, 1)
  high = (epochs * tokens - extra) // seq_length
  border = ((epochs - 1) * tokens - extra) // seq_length + int(0.8 * ((tokens - extra) // seq_length))
  near = [samples for samples in range(border - 1, border + 2) if low <= samples <= high]
  return draw(st.integers(low, max(low, high)) | st.sampled_from(near or [low]))


def write_random(golden, folder, lengths, dtype="int32"):
  """Writes a dataset of running token numbers and returns its prefix."""
  prefix = os.path.join(folder, "data")
  tokens = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
  golden.write_dataset(prefix, tokens, range(len(lengths) + 1), dtype)
  return prefix


def build_ours(utils, lengths, begin, end, num_samples, seq_length, seed, extra):
  sizes = np.array(lengths, np.int32)
  epochs = 1 if num_samples is None else None
  plan = utils.plan_epochs(int(sizes[begin:end].sum()), seq_length, num_samples, epochs, extra)
  arrays = dict(utils.iter_indices(sizes, int(sizes.max()), begin, end, plan, seq_length, seed, extra))
  return arrays["document_index"], arrays["sample_index"], arrays["shuffle_index"]


def read_ours(kernels, indexed, prefix, arrays, seq_length, extra):
  """Reads every sample in order as MegatronNpyDataSource does."""
  dataset = indexed.MMapIndexedDataset(prefix)
  dtype = dataset.header.dtype
  document_index, sample_index, shuffle_index = arrays
  descriptor = os.open(prefix + ".bin", os.O_RDONLY)
  try:
    for sample in shuffle_index.tolist():
      raw = np.empty((seq_length + extra) * dtype.itemsize, np.uint8)
      filled = kernels.read_sample(
        descriptor, dtype.itemsize, dataset.sizes, dataset.pointers, document_index, sample_index, sample, extra, raw
      )
      assert filled == len(raw)
      yield raw.view(dtype).tolist()
  finally:
    os.close(descriptor)


@EXAMPLES
@given(data=st.data(), lengths=length_lists(), seq_length=st.integers(2, 16), seed=st.integers(0, 2**32 - 1))
def test_indices_and_samples(golden, utils, kernels, indexed, data, lengths, seq_length, seed):
  extra = data.draw(st.sampled_from([1, 1, 0]), "extra")
  begin = data.draw(st.integers(0, len(lengths) - 1), "begin")
  end = data.draw(st.integers(begin + 1, len(lengths)), "end")
  tokens = sum(lengths[begin:end])
  assume(tokens > 1)
  num_samples = data.draw(requests(tokens, seq_length, extra), "samples")
  if (tokens - extra) // seq_length and data.draw(st.booleans(), "one epoch"):
    num_samples = None
  dtype = data.draw(st.sampled_from(["int32", "uint16", "int64"]), "dtype")
  with tempfile.TemporaryDirectory() as folder:
    prefix = write_random(golden, folder, lengths, dtype)
    theirs = golden.build_gpt_dataset(prefix, seq_length, seed, num_samples, begin, end, extra=bool(extra))
    ours = build_ours(utils, lengths, begin, end, num_samples, seq_length, seed, extra)
    assert_same_arrays(ours, indices_of(theirs))
    samples = list(read_ours(kernels, indexed, prefix, ours, seq_length, extra))
    assert samples == [golden.sample_tokens(theirs, position) for position in range(len(theirs))]


@EXAMPLES
@given(data=st.data(), lengths=length_lists(), seq_length=st.integers(2, 16), seed=st.integers(0, 2**32 - 1))
def test_parts_of_megatrons_builder(golden, load_module, data, lengths, seq_length, seed):
  """The whole way, from a split's text to the files, through the library's entry point."""
  cache = load_module("_mmap_index_cache")
  split = data.draw(st.sampled_from(SPLITS), "split")
  with tempfile.TemporaryDirectory() as folder:
    prefix = write_random(golden, folder, lengths)
    ranges = golden.split_ranges(prefix, split)
    tokens = [sum(lengths[begin:end]) for begin, end in ranges]
    part = data.draw(st.sampled_from([number for number in range(3) if tokens[number] > 1] or [None]), "part")
    assume(part is not None)
    sizes: list[int | None] = [None] * 3  # megatron-core would look for one sample in an empty part for ever
    sizes[part] = data.draw(requests(tokens[part], seq_length, 1), "samples")
    theirs = golden.build_parts(prefix, GPTDataset, sizes, seq_length, seed, split)[part]
    request = cache.IndexRequest(seq_length, seed, sizes[part], None, split, part)
    assert_same_arrays(cache.build_in_memory(prefix, request)[:3], indices_of(theirs))
    for _ in range(2):  # built, then loaded
      assert_same_arrays(cache.open_index(os.path.join(folder, "npy"), prefix, request).arrays, indices_of(theirs))


@MANY
@given(split=st.sampled_from(SPLITS) | st.from_regex(SPLIT_TEXT, fullmatch=True), sequences=st.integers(0, 2**31))
def test_split_shares_and_bounds(utils, split, sequences):
  assume(any(float(number) for number in re.findall(r"[.0-9]+", split)))
  shares = parse_and_normalize_split(split)
  assert utils.parse_split(split) == shares
  for part, bounds in enumerate(convert_split_vector_to_split_matrix(shares)):
    begin, end = utils.parse_split_range(split, part, sequences)
    if bounds is None:
      assert begin == end
    else:
      assert (begin, end) == tuple(round(bound * float(sequences)) for bound in bounds)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("sequences", [1, 2, 5, 15, 50, 100])
def test_split_ranges(golden, utils, tmp_path, split, sequences):
  prefix = write_random(golden, tmp_path, [1] * sequences)
  for part, (begin, end) in enumerate(golden.split_ranges(prefix, split)):
    ours = utils.parse_split_range(split, part, sequences)
    assert ours == (begin, end) or (begin == end and ours[0] == ours[1])


@MANY
@given(data=st.data(), lengths=length_lists(), seq_length=st.integers(2, 40), extra=st.sampled_from([0, 1]),
       epochs=st.integers(1, 5), drop_last=st.booleans(), seed=st.integers(0, 999))  # fmt: skip
def test_sample_index_of_megatrons_helpers(utils, data, lengths, seq_length, extra, epochs, drop_last, seed):
  sizes = np.array(lengths, np.int32)
  order = np.random.default_rng(seed).permutation(np.tile(np.arange(len(sizes), dtype=np.int32), epochs))
  # Megatron's partial last sample in an empty sequence would begin at token -1, which it refuses.
  assume(drop_last or sizes[order[-1]])
  theirs = helpers.build_sample_idx(sizes, order, seq_length, epochs, int(sizes.sum()), drop_last, bool(extra))
  ours = utils.build_sample_index(sizes, order, seq_length, drop_last, extra)
  assert ours.dtype == theirs.dtype
  np.testing.assert_array_equal(ours, theirs)


def test_sample_index_of_64_bits(utils, kernels):
  """Megatron takes int64 where the document index is too long for int32; the loop is the same for small input."""
  sizes = np.random.default_rng(1).integers(0, 50, 200, dtype=np.int32)
  order = np.random.RandomState(2).permutation(np.tile(np.arange(200, dtype=np.int32), 3))
  theirs = helpers.build_sample_idx_int64(sizes, order, 16, 3, int(sizes.sum()), True, 1)
  ours = np.zeros_like(theirs)
  kernels.sample_index_rows(sizes, order, 0, len(order), np.array([0, 16, 1], np.int64), 16, 1, ours)
  assert ours.dtype == np.int64
  np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("order", [[0, 1], [1, 0], [1, 0, 0, 1]])
@pytest.mark.parametrize("lengths", [[2147483548, 123], [2147483647, 1]])
def test_d8_sequences_near_the_limit_of_32_bits(utils, lengths, order):
  sizes, order = np.array(lengths, np.int32), np.array(order, np.int32)
  theirs = helpers.build_sample_idx(sizes, order, 1 << 20, len(order) // 2, int(sizes.sum(dtype=np.int64)), True, True)
  ours = utils.build_sample_index(sizes, order, 1 << 20)
  assert ours.dtype == theirs.dtype == np.int32
  np.testing.assert_array_equal(ours, theirs)


def test_golden_file_is_what_the_script_writes(golden):
  text = golden.OUTPUT.read_text(encoding="utf-8")
  assert golden.render(golden.build_content(), json.loads(text)["provenance"]) == text
