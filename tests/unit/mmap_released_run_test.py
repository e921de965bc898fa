# SPDX-License-Identifier: Apache-2.0
"""A run of the release's own mmap_npy: the same samples for shards and blends, and its position, which is refused."""

import json
import os

import numpy as np
import pytest

from maxtext.input_pipeline import _megatron_blending as blending
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter, MMapError
from maxtext.input_pipeline._mmap_order import check_state
from maxtext.input_pipeline._mmap_stream import StreamSettings, open_stream

L, EOD, SEED, STEPS = 8, 2, 7, 3
COUNTS = [37, 150, 400]  # one epoch, a separate last one, several
ENTRIES = {
  "one": "{npy}|{data}/a",
  "shards": "{npy}|{data}/b_1:{data}/b_10:{data}/b_2",
  "folder": "{npy}|{data}/folder",
  "blend": "{npy}/0|{data}/a,0.7;{npy}/1|{data}/b_1:{data}/b_2,0.2;{npy}/2|{data}/folder,0;{npy}/3|{data}/b_10,0.1",
}
RUN_RELEASED = """
import json, sys
import numpy as np
import grain.python as grain
from maxtext.input_pipeline import _mmap_datasource as datasource

folder, entries, counts, (length, eod, seed, steps) = sys.argv[1], *map(json.loads, sys.argv[2:])

def transforms(dataset, shuffle, seed, epochs, host, hosts, threads, ahead):
  return dataset[host::hosts].to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead))

results, states = {}, {}
for name, entry in entries.items():
  for count in counts:
    dataset = datasource.get_mmap_npy_dataset(
      entry, False, length, eod, 1, 0, 1, 1, 8, None, f"{folder}/blend-{count}", "train", transforms, count, seed
    )
    iterator = iter(dataset)
    results[f"{name}-{count}"] = np.stack([next(iterator)["text"] for _ in range(count)])
    iterator = iter(dataset.batch(2))
    for _ in range(steps):
      next(iterator)
    states[name] = iterator.get_state()
json.dump(states, open(f"{folder}/states.json", "w"))
np.savez(f"{folder}/results.npz", module=np.array(datasource.__file__), **results)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
  folder = tmp_path_factory.mktemp("data")
  (folder / "folder").mkdir()
  rng = np.random.default_rng(11)
  for name in ("a", "b_1", "b_2", "b_10", "folder/x", "folder/y"):
    with IndexedDatasetWriter(str(folder / name), np.uint16) as writer:
      for length in rng.integers(1, 60, 20):
        writer.add_document(np.append(rng.integers(3, 500, length), EOD))
  return folder


def entry(name: str, data, npy) -> str:
  return ENTRIES[name].format(data=data, npy=npy)


@pytest.fixture(scope="module")
def released(tmp_path_factory, data, run_released):
  folder = tmp_path_factory.mktemp("released")
  entries = {name: entry(name, data, folder / name) for name in ENTRIES}
  arrays = run_released(folder, RUN_RELEASED, folder, *map(json.dumps, (entries, COUNTS, (L, EOD, SEED, STEPS))))
  return folder, arrays, json.loads((folder / "states.json").read_text())


def stream(name: str, count: int, data, npy, **changes):
  return open_stream(StreamSettings(entry(name, data, npy), L, EOD, SEED, count, **changes))


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("count", COUNTS)
def test_samples_are_the_releases(released, data, tmp_path, name, count):
  rows = stream(name, count, data, tmp_path / name).source.read_rows(np.arange(count))
  np.testing.assert_array_equal(rows, released[1][f"{name}-{count}"])


@pytest.mark.parametrize("name", ENTRIES)
def test_the_releases_index_folder_can_be_used_on(released, data, name):
  """Its files stay, and ours lie beside them."""
  folder = released[0] / name
  before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
  rows = stream(name, COUNTS[1], data, folder).source.read_rows(np.arange(COUNTS[1]))
  np.testing.assert_array_equal(rows, released[1][f"{name}-{COUNTS[1]}"])
  assert before and all(path.read_bytes() == content for path, content in before.items())


def test_a_blend_pair_of_the_release_is_loaded(data, tmp_path):
  os.makedirs(tmp_path / "pair")
  blend = blending.weighted_blend([0.7, 0.2, 0.1], 150)
  for array, values in zip(blending.ARRAYS, blending.draw(blend)[0], strict=True):
    np.save(tmp_path / "pair" / f"0123456789abcdef-{array}.npy", values)  # as its blend_cache_dir names them
  opened = stream("blend", 150, data, tmp_path / "npy", blend_index_dir=str(tmp_path / "pair"))
  assert opened.source.pair.found


@pytest.mark.parametrize("name", ENTRIES)
def test_the_position_of_a_released_run_is_refused(released, data, tmp_path, name):
  """Its state is Grain's, without a word on the order: which samples come next cannot be told from it."""
  with pytest.raises(MMapError, match="was not saved by grain_file_type=mmap_npy or mmap of this version") as caught:
    check_state(released[2][name], stream(name, COUNTS[0], data, tmp_path).order)
  assert "load_parameters_path keeps the weights" in str(caught.value) and "mmap_npy_start_sample" in str(caught.value)
