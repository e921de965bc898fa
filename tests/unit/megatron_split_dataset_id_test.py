# SPDX-License-Identifier: Apache-2.0
"""Parts of a split: their index files hold the dataset's own sequence ids, and each part reads its own documents. D6."""

import os
import pickle
import types

from hypothesis import assume, given
from hypothesis import strategies as st
import numpy as np
import pytest

from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline._mmap_datasource import MegatronNpyDataSource
from maxtext.input_pipeline._mmap_index_cache import IndexRequest
from maxtext.input_pipeline._mmap_indexed_dataset import MMapError
from maxtext.input_pipeline._mmap_stream import StreamSettings, open_stream, settings_for
from support import write_numbered

EOD = 99_999
LENGTH = 4
LENGTHS = [5, 7, 3, 9, 6, 4, 8, 5, 5, 7, 6, 9, 4, 5, 8]  # 15 sequences, the example of D6
SPLIT = "0.7,0.2,0.1"
RANGES = [(0, 11), (11, 14), (14, 15)]

each_part = pytest.mark.parametrize("part", range(3), ids=utils.SPLIT_NAMES)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory) -> str:
  return write_numbered(tmp_path_factory.mktemp("data") / "data", LENGTHS)


def open_part(folder, paths, part, split=SPLIT, epochs=1, samples=None) -> MegatronNpyDataSource:
  request = IndexRequest(LENGTH, 42, samples, None if samples else epochs, split, part)
  return MegatronNpyDataSource(str(folder), paths, EOD, LENGTH, request=request)


def sequences_read(source) -> set[int]:
  """The sequences that the tokens of a source's samples are from."""
  return set((source.read_rows(np.arange(len(source))) // 100).ravel().tolist())


def saved(folder, source, name) -> np.ndarray:
  """An index file as it lies on disk."""
  return np.load(source.index.description.paths(str(folder))[name])


@each_part
def test_index_files_keep_global_ids(tmp_path, prefix, part):
  source = open_part(tmp_path, prefix, part)
  assert sorted(saved(tmp_path, source, "document_index").tolist()) == list(range(*RANGES[part]))


def test_d1_sequences_3_to_5_only(tmp_path):
  """The values that the list of cases prints."""
  prefix = write_numbered(tmp_path / "data", [5, 7, 3, 9, 6, 4])
  source = open_part(tmp_path, prefix, 1, "1,1", samples=4)
  assert saved(tmp_path, source, "document_index").tolist() == [3, 4, 5]
  assert saved(tmp_path, source, "sample_index").tolist() == [[0, 0], [0, 4], [0, 8], [1, 3], [2, 1]]
  assert saved(tmp_path, source, "shuffle_index").tolist() == [1, 3, 2, 0]
  assert source[0]["text"].tolist() == [304, 305, 306, 307, 308]


@each_part
def test_each_part_reads_its_own_documents(tmp_path, prefix, part):
  source = open_part(tmp_path, prefix, part, epochs=3)
  assert sequences_read(source) <= set(range(*RANGES[part]))
  for sample in range(len(source)):
    rows = [piece.row for piece in source.pieces(sample)]
    assert set(rows) <= set(range(*RANGES[part]))


def test_the_tokens_of_all_parts_are_those_of_the_dataset(tmp_path, prefix):
  """But for what is left over at the end of each part, less than a sample."""
  sources = [open_part(tmp_path, prefix, part) for part in range(3)]
  lengths = [sum(LENGTHS[begin:end]) for begin, end in RANGES]
  read = [set(source.read_rows(np.arange(len(source))).ravel().tolist()) for source in sources]
  for one, count in zip(read, lengths, strict=True):
    assert count - LENGTH < len(one) <= count
  assert sum(map(len, read)) == len(set.union(*read)), "no token is in two parts"


@given(
  lengths=st.lists(st.integers(0, 12), min_size=1, max_size=25),
  shares=st.lists(st.integers(0, 9), min_size=1, max_size=3).filter(any),
)
def test_parts_of_any_split_are_disjoint_and_complete(lengths, shares):
  split = ",".join(map(str, shares))
  ranges = [utils.parse_split_range(split, part, len(lengths)) for part in range(3)]
  assert ranges[0][0] == 0 and ranges[2][1] == len(lengths)
  assert [end for _, end in ranges[:2]] == [begin for begin, _ in ranges[1:]]
  assert all((begin < end) <= bool(share) for (begin, end), share in zip(ranges, [*shares, 0, 0], strict=False))


@given(data=st.data(), lengths=st.lists(st.integers(0, 12), min_size=3, max_size=25))
def test_document_indices_of_any_part_and_epochs_are_global(data, lengths):
  begin = data.draw(st.integers(0, len(lengths) - 1))
  end = data.draw(st.integers(begin + 1, len(lengths)))
  tokens = sum(lengths[begin:end])
  epochs = data.draw(st.integers(1, 4))
  assume(epochs * tokens > LENGTH)
  sizes = np.array(lengths, np.int32)
  plan = utils.plan_epochs(tokens, LENGTH, None, epochs)
  arrays = dict(utils.iter_indices(sizes, int(sizes.max()), begin, end, plan, LENGTH, 7))
  counts = np.bincount(arrays["document_index"], minlength=len(lengths))
  assert counts.tolist() == [epochs * (begin <= row < end) for row in range(len(lengths))]


# Files and processes.


def test_the_files_of_the_parts_do_not_collide(tmp_path, prefix):
  first = [open_part(tmp_path, prefix, part) for part in range(3)]
  assert len({source.index.description.name for source in first}) == 3
  again = [open_part(tmp_path, prefix, part) for part in range(3)]
  assert [source.index.found for source in (*first, *again)] == [False] * 3 + [True] * 3
  assert [sequences_read(source) for source in again] == [sequences_read(source) for source in first]


@each_part
def test_a_worker_reads_the_documents_of_its_part(tmp_path, prefix, part):
  source = open_part(tmp_path, prefix, part)
  copy = pickle.loads(pickle.dumps(source))
  assert sequences_read(copy) == sequences_read(source) <= set(range(*RANGES[part]))


def test_files_are_read_by_the_name_of_a_part(tmp_path, prefix):
  source = open_part(tmp_path, prefix, 1)
  named = MegatronNpyDataSource(str(tmp_path), prefix, EOD, LENGTH, expected_hash=source.index.description.name)
  assert sequences_read(named) == sequences_read(source)


@pytest.mark.parametrize("part, split", [(1, "99,1"), (2, "1,1"), (0, "0,1,1")])
def test_an_empty_part_is_refused_by_name_and_only_when_it_is_used(tmp_path, prefix, part, split):
  used = next(other for other in range(3) if np.diff(utils.parse_split_range(split, other, len(LENGTHS)))[0])
  assert len(open_part(tmp_path, prefix, used, split)) > 0
  begin, end = utils.parse_split_range(split, part, len(LENGTHS))
  with pytest.raises(MMapError, match=f"{utils.SPLIT_NAMES[part]} part of split '{split}' is sequences {begin} to {end}"):
    open_part(tmp_path, prefix, part, split)


# Shards, blends and runs.


@each_part
def test_shards_are_split_as_one_dataset(tmp_path, part):
  """Ids count through the shards; a part may begin and end within one."""
  bounds = [0, 4, 9, 12, 15]
  ranges = enumerate(zip(bounds, bounds[1:], strict=False))
  shards = [write_numbered(tmp_path / f"s{n}", LENGTHS[begin:end], begin) for n, (begin, end) in ranges]
  whole = write_numbered(tmp_path / "whole", LENGTHS)
  source, alone = open_part(tmp_path / "npy", shards, part), open_part(tmp_path / "npy", whole, part)
  for name in cache.ARRAYS:
    np.testing.assert_array_equal(saved(tmp_path / "npy", source, name), saved(tmp_path / "npy", alone, name))
  np.testing.assert_array_equal(source.read_rows(np.arange(len(source))), alone.read_rows(np.arange(len(alone))))
  for piece in source.pieces(0):
    assert bounds[piece.shard] + piece.row in range(*RANGES[part])


@each_part
def test_each_child_of_a_blend_is_split(tmp_path, part):
  """Sequences of the second child are numbered from 100 on."""
  lengths = LENGTHS, [6] * 40
  children = [write_numbered(tmp_path / f"child-{number}", rows, 100 * number) for number, rows in enumerate(lengths)]
  files = ";".join(f"{tmp_path}/npy|{child},{weight}" for child, weight in zip(children, (2, 1), strict=True))
  stream = open_stream(StreamSettings(files, LENGTH, EOD, num_samples=60, split=SPLIT, split_index=part))
  own = [set(range(*RANGES[part])), {100 + row for row in range(*utils.parse_split_range(SPLIT, part, 40))}]
  for sample in range(len(stream)):
    child, _ = stream.source.child(sample)
    assert set((stream.source[sample]["text"] // 100).tolist()) <= own[child]


def test_a_run_trains_on_the_first_part_and_evaluates_on_the_second(tmp_path, prefix):
  files = f"{tmp_path}/npy|{prefix}"
  config = types.SimpleNamespace(
    grain_train_files=files, grain_eval_files=files, max_target_length=LENGTH, mmap_eod_id=EOD, data_shuffle_seed=3,
    mmap_npy_split=SPLIT, mmap_split_sentences=False, mmap_npy_blend_margin=0.5, blend_cache_dir="", blend_index_dir="",
    mmap_npy_num_samples=0, mmap_npy_num_eval_samples=0, mmap_npy_start_sample=0, steps=20, eval_steps=6,
    global_batch_size_to_load=2, global_batch_size_to_train_on=2, load_full_state_path="", enable_checkpointing=False,
    global_batch_size_to_load_eval=2, global_batch_size_to_eval_on=2,
  )  # fmt: skip
  training, evaluation = (open_stream(settings_for(config, part)) for part in (False, True))
  assert sequences_read(training.source) == set(range(*RANGES[0]))
  assert sequences_read(evaluation.source) == set(range(*RANGES[1]))
  assert len(os.listdir(tmp_path / "npy")) == 2 * 4 + 1, "two orders of four files, and the stamps"
