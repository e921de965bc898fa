# SPDX-License-Identifier: Apache-2.0
"""Cache directories that a live megatron-core writes, read as index directories of ours."""

import contextlib
import importlib
import json
import os
from pathlib import Path
import tempfile

from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.datasets.utils import Split
import numpy as np
import pytest

BUILDS = settings(deadline=None, max_examples=25)
SPLITS = [("1", 1), ("8,2", 2), ("6,3,1", 3)]


@pytest.fixture(scope="session")
def cache_golden():
  """The script that writes the golden cache directory."""
  return importlib.import_module("write_cache_golden")


@pytest.fixture(scope="module")
def modules(load_module):
  """Our modules by their short names."""
  names = ("_mmap_megatron_cache", "_mmap_index_cache", "_mmap_index_utils", "_megatron_blending")
  return [load_module(name) for name in names]


@BUILDS
@given(data=st.data(), seed=st.integers(0, 2**32 - 1), seq_length=st.integers(2, 12), size=st.integers(1, 200))
def test_every_array_of_a_cache_directory_is_found_and_accepted(modules, cache_golden, data, seed, seq_length, size):
  megatron, cache, utils, blending = modules
  lengths = st.lists(st.integers(5, 40), min_size=10, max_size=20).map(lambda lengths: [*lengths[:-1], 40])
  children = data.draw(st.lists(lengths, min_size=2, max_size=4))
  weights = data.draw(st.none() | st.lists(st.floats(0.05, 1), min_size=len(children), max_size=len(children)))
  split, parts = data.draw(st.sampled_from(SPLITS))
  sizes = [size if part < parts else 1 for part in range(3)]
  settings_ = {"weights": weights, "split": split, "sizes": sizes, "seq_length": seq_length, "seed": seed}
  with tempfile.TemporaryDirectory() as folder:
    prefixes = cache_golden.write_cache(folder, [settings_], children)
    directory = os.path.join(folder, "cache")
    stamps = cache.Stamps(directory)
    counts = [None] * len(children)
    if weights:
      counts = utils.compute_blend_buffers(size, utils._normalize_weights(weights), 0.5)
    used = set()
    for part in range(parts):
      samples = []
      for prefix, count in zip(prefixes, counts, strict=True):
        request = cache.IndexRequest(seq_length, seed, count, None if count else 1, split, part)
        dataset = cache.open_dataset(prefix)
        found = megatron.load_index(directory, dataset, request, cache.describe(dataset, request), stamps)
        used.update(found[0])
        samples.append(len(found[1][2]))
      blend = blending.weighted_blend(weights, size) if weights else blending.whole_blend(samples, size)
      pair = megatron.find_blend(directory, Split(part).name, blend.weights.tolist(), blend.size, None, prefixes)
      blending.load_pair(pair.paths, blend, stamps)
      used.update(pair.paths)
    assert used == {str(path) for path in Path(directory).glob("*.npy")}, "no file of the directory is left over"


def test_golden_directory_is_what_the_script_writes(cache_golden, tmp_path):
  cache_golden.main(tmp_path / "cache")
  written, kept = (sorted(path.iterdir()) for path in (tmp_path / "cache", cache_golden.OUTPUT))
  assert [path.name for path in written] == [path.name for path in kept]
  for one, other in zip(written, kept, strict=True):
    if one.name != "builds.json":
      assert one.read_bytes() == other.read_bytes(), one.name
  contents = [json.loads(path.joinpath("builds.json").read_text()) for path in (tmp_path / "cache", cache_golden.OUTPUT)]
  for content in contents:
    content["provenance"].pop("numpy")
  assert contents[0] == contents[1]


def test_a_replaced_dataset_is_found_which_megatron_core_does_not_notice(modules, cache_golden, blend_golden):
  """megatron-core names its files by path and settings, so it reads the new dataset with the old arrays."""
  megatron, cache, _, _ = modules
  lengths = [30, 12, 0, 41, 7, 22, 35, 18, 9, 26]
  build = {"weights": None, "split": "1", "sizes": [20, 1, 1], "seq_length": 8, "seed": 5}
  with tempfile.TemporaryDirectory() as folder:
    (prefix,) = cache_golden.write_cache(folder, [build], [lengths])
    directory = os.path.join(folder, "cache")
    before = sorted(os.listdir(directory))
    blend_golden.write_children(f"{folder}/corpus", "books", [lengths[::-1]])
    with contextlib.chdir(folder):
      reused, _, _ = blend_golden.build(["corpus/books-0"], cache="cache", per_split=None, mask_loss=False, **build)
    assert sorted(os.listdir(directory)) == before
    request = cache.IndexRequest(8, 5, 20, None, "1", 0)
    assert not np.array_equal(reused.sample_index, cache.build_in_memory(prefix, request)[1])
    dataset = cache.open_dataset(prefix)
    with pytest.raises(cache.StaleIndexError, match="was not built from this dataset"):
      megatron.load_index(directory, dataset, request, cache.describe(dataset, request), cache.Stamps(directory))
