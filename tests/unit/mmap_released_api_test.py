# SPDX-License-Identifier: Apache-2.0
"""Names that code written for the released modules imports; what they give is the release's, over our files."""

import importlib.util
from pathlib import Path
import subprocess
import sys

import numpy as np
import pytest

from maxtext.input_pipeline import _mmap_datasource as datasource
from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter

ROOT = Path(__file__).parents[2]


@pytest.fixture
def dataset(tmp_path) -> Path:
  with IndexedDatasetWriter(str(tmp_path / "data"), np.int32) as writer:
    for sequence, length in enumerate([5, 7, 3, 9, 6, 4]):
      writer.add_document(100 * sequence + np.arange(length))
  return tmp_path / "data"


def test_the_tools_convert_and_the_source_that_finds_its_files(dataset, tmp_path):
  spec = importlib.util.spec_from_file_location("builder", ROOT / "tools" / "data_processing" / "mmap_index_builder.py")
  builder = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(builder)
  folder = str(tmp_path / "npy")
  paths = builder.convert(input_paths=[str(dataset)], output_dir=folder, seq_length=4, num_samples=8, seed=42)
  assert set(paths) == {"document_index", "sample_index", "shuffle_index", "metadata"}
  source = datasource.MegatronNpyDataSource(npy_dir=folder, bin_paths=dataset, eod_id=99, seq_length=4)
  assert len(source) == 8 and source[0]["text"].tolist() == [401, 402, 403, 404, 405]
  assert datasource._discover_npy_indices(folder) == tuple(paths[name] for name in list(paths)[:3])


def test_discovery_errors(dataset, tmp_path):
  with pytest.raises(FileNotFoundError):
    datasource._discover_npy_indices(str(tmp_path / "nowhere"))
  with pytest.raises(FileNotFoundError):
    datasource._discover_npy_indices(str(tmp_path), expected_hash="abc")
  for samples in (8, 9):
    utils.convert([str(dataset)], str(tmp_path / "two"), 4, num_samples=samples)
  with pytest.raises(ValueError, match="Ambiguous NPY directory"):
    datasource._discover_npy_indices(str(tmp_path / "two"))


def test_a_miss_gives_the_arrays_and_a_hit_none(dataset, tmp_path):
  folder = str(tmp_path / "npy")
  name, arrays = datasource._ensure_npy_indices(folder, [str(dataset)], 8, 4, seed=42)
  again, none = datasource._ensure_npy_indices(folder, [str(dataset)], 8, 4, seed=42)
  assert name == again and none is None
  np.testing.assert_array_equal(arrays[2], [5, 0, 3, 6, 2, 1, 7, 4])
  assert name == utils.compute_index_hash([str(dataset)], 1, False, 42, 4)


def test_parsers():
  assert datasource._parse_mmap_npy_spec(" npy | a:b ") == ("npy", ["a", "b"])
  with pytest.raises(ValueError, match="mmap_npy spec must be"):
    datasource._parse_mmap_npy_spec("a")
  assert datasource._parse_weighted_mixture("a|b,3;c|d,0;e|f,1", "mmap_npy") == (["a|b", "e|f"], [0.75, 0.25])
  with pytest.raises(ValueError, match="Malformed mmap_npy mixture"):
    datasource._parse_weighted_mixture("a|b;c|d,1", "mmap_npy")
  assert utils._normalize_weights([3, 1]) == [0.75, 0.25]


@pytest.mark.parametrize(
  "pattern, words",
  [
    ("path", "Malformed mmap mixture"), (",1.0", "Empty spec"), ("path,x", "Invalid weight"), ("a,1;", "Malformed"),
    ("a,1;b,nan", "Invalid weight"), ("path,-1.0", "Negative weight"), ("a,0;b,0", "Total weight"),
  ],
)  # fmt: skip
def test_mixture_errors_have_the_released_words(pattern, words):
  with pytest.raises(ValueError, match=words) as caught:
    datasource._parse_weighted_mixture(pattern, "mmap")
  assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def test_a_mixture_of_one_has_a_weight_and_a_comma_may_be_in_a_path():
  assert datasource._parse_weighted_mixture("npy|bin,c,3.0", "mmap_npy") == (["npy|bin,c"], [1.0])


def test_weights_are_normalised_in_float64_as_megatron_does():
  raw = [0.1, 0.7, 0.3, 0.2, 0.9, 0.4, 0.6, 0.8, 0.5]
  vector = np.array(raw)
  expected = (vector / np.sum(vector)).tolist()
  assert utils._normalize_weights(raw) == expected
  mixture = ";".join(f"{name},{weight}" for name, weight in zip("abcdefghi", raw, strict=True))
  assert datasource._parse_weighted_mixture(mixture, "mmap")[1] == expected


TOOL_IMPORT = """
import sys
from tools.data_processing import mmap_index_builder as tool
assert not {"numpy", "numba", "maxtext"} & {*sys.modules}
from tools.data_processing.mmap_index_builder import convert, discover_shards
from maxtext.input_pipeline import _mmap_index_utils as utils
assert convert is utils.convert and discover_shards is utils.resolve_shard_prefixes
assert all(callable(getattr(tool, name)) for name in tool.RELEASED)
assert not hasattr(tool, "no_such_name")
"""


def test_the_tool_can_be_imported_from_the_repository():
  done = subprocess.run(
    [sys.executable, "-c", TOOL_IMPORT], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
  )
  assert done.returncode == 0, done.stderr


def test_index_parts_share_one_generator():
  rng = np.random.RandomState(42)
  documents = utils._build_doc_index_flat(6, 1, rng)
  assert documents.tolist() == [0, 1, 5, 2, 4, 3]
  assert utils._build_shuffle_index(8, 8, rng).tolist() == [5, 0, 3, 6, 2, 1, 7, 4]


def test_headers_and_document_sizes(tmp_path):
  with IndexedDatasetWriter(tmp_path / "parts", np.uint16) as writer:
    for document in ([2, 3], [], [4], [1, 1, 1]):
      for length in document:
        writer.add_sequence(np.arange(length))
      writer.end_document()
  prefix = str(tmp_path / "parts")
  assert utils._read_idx_header(prefix) == (6, 4, np.uint16, 5)
  assert utils.get_document_sizes([prefix]).tolist() == [5, 0, 4, 3]
  assert utils.get_split_tokens([prefix], 1, 3) == 4 and utils.get_total_tokens([prefix]) == 12
  assert datasource._resolve_bin_prefixes(tmp_path) == [prefix]


def test_metadata_has_the_released_keys():
  assert utils.build_metadata("h", "one", 4, 8, 1, 42, None, 0, 1, 6, 8, "convert")["input_paths"] == ["one"]
  facts = utils.build_metadata("h", ["b", "a"], 4, 8, 1, 42, None, 0, 1, 6, 8, "convert")
  assert facts.pop("created_at").endswith("+00:00")
  assert facts == {
    "hash": "h", "source": "convert", "input_paths": ["a", "b"], "seq_length": 4, "num_samples_requested": 8,
    "num_epochs": 1, "seed": 42, "split": None, "split_index": 0, "add_extra_token": 1, "doc_index_len": 6,
    "total_samples": 8,
  }  # fmt: skip
