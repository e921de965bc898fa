# SPDX-License-Identifier: Apache-2.0
"""Our blends against a live megatron-core: the draws, and whole builds of BlendedMegatronDatasetBuilder."""

import json
import os
import tempfile

from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.blended_megatron_dataset_builder import _get_size_per_split_per_dataset
from megatron.core.datasets.utils import normalize
import numpy as np
import pytest

MANY = settings(deadline=None, max_examples=300)
BUILDS = settings(deadline=None, max_examples=60)
SPLITS = [("1", 1), ("8,2", 2), ("6,3,1", 3), ("0.5,0.5", 2)]  # with the parts that they have


@pytest.fixture(scope="module")
def blending(load_module):
  return load_module("_megatron_blending")


@pytest.fixture(scope="module")
def utils(load_module):
  return load_module("_mmap_index_utils")


@pytest.fixture(scope="module")
def cache(load_module):
  return load_module("_mmap_index_cache")


def weight_lists(most=40):
  """Weights: anything positive, whole numbers with many ties, or of very different magnitude."""
  one = st.floats(1e-6, 1e6) | st.integers(1, 5).map(float) | st.sampled_from([0.1, 0.25, 0.5, 1.0, 1 / 3])
  return st.lists(one, min_size=1, max_size=most) | st.lists(st.just(0.1), min_size=1, max_size=most)


def assert_equal(ours, theirs) -> None:
  for one, other in zip(ours, theirs, strict=True):
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(one, other)


@MANY
@given(weights=weight_lists(), size=st.integers(0, 700))
def test_draws_by_weight(blending, blend_golden, weights, size):
  shares = normalize(weights)
  ours = np.empty(size, np.int16), np.empty(size, np.int64)
  blending.build_blending_indices(*ours, np.array(shares), len(shares), size)
  assert_equal(ours, blend_golden.blend(shares, size))


@MANY
@given(weights=weight_lists(), size=st.integers(1, 700))
def test_weights_are_normalised_as_the_builder_and_then_the_blend_do(blending, blend_golden, weights, size):
  shares = blend_golden.normalize_twice(weights)
  request = blending.weighted_blend(weights, size)
  assert request.weights.tolist() == shares
  assert_equal(blending.draw(request)[0], blend_golden.blend(shares, size))


@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_draws_of_many_children_and_many_samples(blending, blend_golden, data):
  rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
  weights = rng.random(data.draw(st.sampled_from([2, 3, 8, 300, 1001]))).tolist()
  request = blending.weighted_blend(weights, 300_000 // len(weights) + 20_000)
  assert_equal(blending.draw(request)[0], blend_golden.blend(blend_golden.normalize_twice(weights), request.size))


@MANY
@given(sizes=st.lists(st.integers(1, 60), min_size=1, max_size=20) | st.lists(st.just(7), min_size=1, max_size=20))
def test_exhaustive_draws(blending, blend_golden, sizes):
  arrays, counts = blending.draw(blending.whole_blend(sizes, None))
  assert_equal(arrays, blend_golden.blend_exhaustively(sizes))
  assert counts == sizes


@MANY
@given(weights=weight_lists(12), size=st.integers(1, 10**7))
def test_samples_asked_of_each_child(utils, weights, size):
  shares = normalize(weights)
  theirs = [sizes[0] for sizes in _get_size_per_split_per_dataset(shares, [size], surplus=0.005)]
  assert utils.compute_blend_buffers(size, shares, 0.5) == theirs


@st.composite
def builds(draw):
  """Children's lengths, weights or None, split, part and sequence length.

  No part is without a sample: megatron-core would look for one for ever.
  """
  lengths = st.lists(st.integers(5, 40), min_size=10, max_size=20).map(lambda lengths: [*lengths[:-1], 40])
  children = draw(st.lists(lengths, min_size=2, max_size=4))
  weights = draw(st.none() | st.lists(st.floats(0.05, 1), min_size=len(children), max_size=len(children)))
  split, parts = draw(st.sampled_from(SPLITS))
  return children, weights, split, draw(st.integers(0, parts - 1)), draw(st.integers(2, 12))


def asked_for(utils, weights, size):
  """Samples that each child is asked for, as `_mmap_stream.plan_children` asks."""
  return utils.compute_blend_buffers(size, utils._normalize_weights(weights), 0.5)


@BUILDS
@given(build=builds(), size=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_parts_of_megatrons_builder(blending, cache, utils, blend_golden, build, size, seed):
  """Train, valid and test: the indices of every child, and which child each sample comes from."""
  children, weights, split, part, seq_length = build
  sizes = [size if number == part else (1 if weights else None) for number in range(3)]
  if not weights and size % 3 == 0:
    sizes[part] = None
  with tempfile.TemporaryDirectory() as folder:
    prefixes = blend_golden.write_children(folder, "child", children)
    settings_ = {"seq_length": seq_length, "seed": seed, "weights": weights, "split": split, "per_split": None}
    theirs = blend_golden.build(prefixes, sizes, mask_loss=False, **settings_)[part]
    counts = asked_for(utils, weights, size) if weights else [None] * len(children)
    for prefix, count, child in zip(prefixes, counts, theirs.datasets, strict=True):
      epochs = 1 if count is None else None
      request = cache.IndexRequest(seq_length, seed, count, epochs, split, part)
      ours = cache.open_index(os.path.join(folder, "npy"), prefix, request).arrays
      assert_equal(ours, (child.document_index, child.sample_index, child.shuffle_index))
    lengths = [len(child) for child in theirs.datasets]
    blend = blending.weighted_blend(weights, size) if weights else blending.whole_blend(lengths, sizes[part])
    arrays, drawn = blending.draw(blend)
    blend.check(drawn, lengths)
    assert blend.size == (size if weights else len(theirs))
    assert_equal(arrays, [array[: blend.size] for array in (theirs.dataset_index, theirs.dataset_sample_index)])


def test_golden_file_is_what_the_script_writes(blend_golden):
  text = blend_golden.OUTPUT.read_text(encoding="utf-8")
  assert blend_golden.render(blend_golden.build_content(), json.loads(text)["provenance"]) == text
