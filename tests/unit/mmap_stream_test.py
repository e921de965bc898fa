# SPDX-License-Identifier: Apache-2.0
"""Tests of the global stream: shards as one dataset, blends, and the order in a checkpoint. CASES D5, D7, D10, D11."""

import dataclasses
import json
import logging
import pickle

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from maxtext.input_pipeline import _mmap_shards as shards
from maxtext.input_pipeline import _mmap_stream as library
from maxtext.input_pipeline._mmap_datasource import MegatronNpyDataSource
from maxtext.input_pipeline._mmap_index_cache import IndexRequest
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter
from maxtext.input_pipeline._mmap_order import STATE_FORMAT, check_state
from maxtext.input_pipeline._mmap_shards import Piece, ShardedDataset
from maxtext.input_pipeline._mmap_stream import StreamSettings, open_stream
from support import refusal

EOD = 9999
D1_LENGTHS = [5, 7, 3, 9, 6, 4]


def write(prefix, lengths=D1_LENGTHS, first=0, dtype=np.int32) -> str:
  """Writes tokens 100 * (first + sequence) + position."""
  prefix.parent.mkdir(parents=True, exist_ok=True)
  with IndexedDatasetWriter(str(prefix), dtype) as writer:
    for row, length in enumerate(lengths):
      writer.add_document(100 * (first + row) + np.arange(length))
  return str(prefix)


def samples_of(source) -> list[list[int]]:
  return source.read_rows(np.arange(len(source))).tolist()


@pytest.fixture
def settings(tmp_path):
  """Makes settings; `{npy}` and `{data}` in the files are folders."""

  def make(files: str, **changes) -> StreamSettings:
    files = files.format(npy=tmp_path / "npy", data=tmp_path)
    return StreamSettings(files, **{"seq_length": 4, "eod_id": EOD, "seed": 42, "num_samples": 8, **changes})

  return make


# Shards.


def split_in_shards(folder, cuts, dtypes) -> list[str]:
  """Writes D1's sequences as several datasets."""
  bounds = [0, *cuts, len(D1_LENGTHS)]
  return [
    write(folder / f"s_{number}", D1_LENGTHS[begin:end], begin, dtypes[number % len(dtypes)])
    for number, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
  ]


@given(
  cuts=st.lists(st.integers(0, 6), max_size=4).map(sorted),
  dtypes=st.lists(st.sampled_from([np.int32, np.uint16, np.int64]), min_size=1, max_size=3),
  count=st.sampled_from([8, 9, 14, 20]),
)
def test_shards_of_any_cut_give_the_samples_of_one_file(tmp_path_factory, cuts, dtypes, count):
  folder = tmp_path_factory.mktemp("shards")
  one, request = write(folder / "one" / "data"), IndexRequest(4, 42, count)
  expected = samples_of(MegatronNpyDataSource(str(folder / "npy"), one, EOD, 4, request=request))
  prefixes = split_in_shards(folder / "many", cuts, dtypes)
  source = MegatronNpyDataSource(str(folder / "npy"), prefixes[::-1], EOD, 4, request=request)
  assert source.dataset.prefixes == tuple(prefixes)
  assert samples_of(source) == expected == samples_of(pickle.loads(pickle.dumps(source)))
  assert source[-1]["text"].tolist() == expected[-1]


def test_d10_shards_are_read_in_the_order_of_their_names_as_text(settings, tmp_path):
  for number in (2, 10):
    write(tmp_path / "s" / f"s_{number}", [6], number)
  child = open_stream(settings("{npy}|{data}/s", num_samples=2)).children[0]
  assert child.prefixes == (str(tmp_path / "s" / "s_10"), str(tmp_path / "s" / "s_2"))
  assert child.source.dataset.get(0, 0, 1).tolist() == [1000]


def test_shards_of_one_name_in_several_folders(settings, tmp_path, monkeypatch):
  """Folders may use the same names; each file is looked at once all the same."""
  paths = ":".join(write(tmp_path / folder / "part", D1_LENGTHS, 10 * n) for n, folder in enumerate("ab"))
  first = open_stream(settings("{npy}|" + paths, num_samples=20))
  from maxtext.input_pipeline._mmap_indexed_dataset import MMapIndexedDataset

  monkeypatch.setattr(MMapIndexedDataset, "scan", None)
  again = open_stream(settings("{npy}|" + paths, num_samples=20))
  assert samples_of(again.source) == samples_of(first.source) and again.children[0].index.found


def test_d8_more_sequences_than_int32_can_number(tmp_path, monkeypatch):
  monkeypatch.setattr(shards, "MAX_SEQUENCES", 6)
  paths = split_in_shards(tmp_path, [3], [np.int32])
  assert len(ShardedDataset(paths)) == 6
  message = refusal(ShardedDataset, [*paths, write(tmp_path / "t", [4])])
  assert "s_0 and 2 more have 7 sequences together, and Megatron's document index is int32" in message


def test_children_that_share_a_folder_keep_each_others_stamps(settings, tmp_path, monkeypatch):
  """They are opened side by side, and each writes what it found out of its files."""
  entries = ("{npy}|" + write(tmp_path / f"c{number}", [5 + number] * 9, number) + ",1" for number in range(24))
  files = ";".join(entries)
  first = open_stream(settings(files, num_samples=200))
  monkeypatch.setattr(shards.MMapIndexedDataset, "scan", None)
  again = open_stream(settings(files, num_samples=200))
  assert samples_of(again.source) == samples_of(first.source)


def test_what_cannot_be_built_names_its_dataset(settings, tmp_path):
  short = write(tmp_path / "short", [1])
  message = refusal(open_stream, settings("{npy}|" + write(tmp_path / "a") + ";{npy}|" + short))
  assert message.startswith(f"{short}: 1 epochs of 1 tokens do not make one sample of 4 + 1 tokens; ")
  message = refusal(open_stream, settings("{npy}|" + short, num_samples=10**14))
  assert message.startswith(f"{short}: the indices of {10**14} samples ") and "memory; ask for fewer samples" in message


def test_an_empty_shard_among_others_does_no_harm(settings, tmp_path):
  write(tmp_path / "s" / "a", [])
  write(tmp_path / "s" / "b")
  write(tmp_path / "s" / "c", [0, 0])
  assert open_stream(settings("{npy}|{data}/s")).source[0]["text"].tolist() == [401, 402, 403, 404, 405]
  write(tmp_path / "e" / "a", [])
  assert "e/a.idx has no sequences" in refusal(open_stream, settings("{npy}|{data}/e"))
  write(tmp_path / "e" / "b", [])
  assert "e/a and 1 more has no sequences; the dataset is empty" in refusal(open_stream, settings("{npy}|{data}/e"))


def test_pieces_say_where_the_tokens_of_a_sample_lie(settings, tmp_path):
  split_in_shards(tmp_path / "s", [3, 5], [np.int32])
  source = open_stream(settings("{npy}|{data}/s")).source
  position = next(k for k in range(8) if source[k]["text"].tolist() == [500, 501, 502, 503, 200])
  assert source.pieces(position) == [Piece(2, 0, 0, 4), Piece(0, 2, 0, 1)]
  assert source.file_of(position, 3) == str(tmp_path / "s" / "s_2.bin")
  assert source.file_of(position, 4) == str(tmp_path / "s" / "s_0.bin")


def test_a_token_outside_int32_in_a_shard(settings, tmp_path):
  write(tmp_path / "s" / "a", [9], 0)
  write(tmp_path / "s" / "b", [9], 2**30, np.int64)
  stream = open_stream(settings("{npy}|{data}/s", num_samples=4))
  messages = {refusal(stream.source.read_rows, [k]) for k in range(4) if max(p.shard for p in stream.source.pieces(k))}
  assert messages and all("has token ids outside int32" in message for message in messages)


def test_locating_a_sequence(tmp_path):
  dataset = ShardedDataset(split_in_shards(tmp_path, [0, 2, 2], [np.int32]))
  assert [dataset.locate(row) for row in range(6)] == [(1, 0), (1, 1), (3, 0), (3, 1), (3, 2), (3, 3)]
  assert dataset.sizes.tolist() == D1_LENGTHS and len(dataset) == 6
  for row in (-1, 6):
    with pytest.raises(IndexError):
      dataset.locate(row)


# Blends.


@pytest.fixture
def two(tmp_path) -> str:
  write(tmp_path / "a", [11, 12, 13], 0)
  write(tmp_path / "b", [14, 15], 50)
  return "{npy}/0|{data}/a,0.7;{npy}/1|{data}/b,0.3"


def test_d7_children_get_the_margin_and_the_blend_the_size_asked_for(settings, two):
  stream = open_stream(settings(two, num_samples=1000))
  assert [child.requested for child in stream.children] == [704, 302] and len(stream) == 1000
  assert [child.number for child in stream.children] == [0, 1]
  for k in (0, 1, 500, 999):
    number, element = stream.source.child(k)
    assert stream.source[k]["text"].tolist() == stream.children[number].source[element]["text"].tolist()
  rows = stream.source.read_rows(np.arange(1000))
  assert (rows == pickle.loads(pickle.dumps(stream.source)).read_rows(np.arange(1000))).all()


def test_d7_another_margin(settings, two):
  stream = open_stream(settings(two, num_samples=1000, blend_margin=10.0))
  assert [child.requested for child in stream.children] == [771, 330]  # 700 * 1.1 is above 770


def test_d7_weight_zero_is_neither_opened_nor_counted(settings, two):
  stream = open_stream(settings("{npy}|{data}/none,0;" + two, num_samples=100))
  assert [child.number for child in stream.children] == [1, 2]
  assert samples_of(stream.source) == samples_of(open_stream(settings(two, num_samples=100)).source)


@pytest.mark.parametrize("small, share", [("1e-300", 0), ("5e-324", 0), ("1e-10", 2)])
def test_d7_a_weight_that_vanishes_beside_the_others(settings, tmp_path, small, share):
  text = f"{{npy}}|{write(tmp_path / 'a')},{small};{{npy}}|{write(tmp_path / 'b')},{'1' if share else '1e300'}"
  if share:
    assert open_stream(settings(text)).children[0].requested == share
    return
  message = refusal(open_stream, settings(text))
  assert f"grain_train_files: the weight {small} of entry 0 is nothing beside a total of 1e+300" in message


def test_a_blend_of_one_dataset_is_a_blend(settings, two):
  """As Megatron's --data-path 1.0 PREFIX: the child is asked for the margin too."""
  stream = open_stream(settings("{npy}|{data}/a,1;", num_samples=1000))
  assert stream.blend is not None and [child.requested for child in stream.children] == [1005] and len(stream) == 1000


def test_one_dataset_without_a_weight_is_no_blend(settings, two):
  """As Megatron's --data-path PREFIX; a ';' behind it changes nothing, also where it is read more than once."""
  alone, ended = (open_stream(settings("{npy}|{data}/a" + end, num_samples=20)) for end in ("", ";"))
  assert ended.blend is None and ended.order == alone.order and samples_of(ended.source) == samples_of(alone.source)


def test_a_blend_without_weights_reads_every_sample_of_one_epoch(settings, two):
  text = "{npy}/0|{data}/a;{npy}/1|{data}/b"
  stream = open_stream(settings(text, num_samples=None))
  lengths = [len(child.source) for child in stream.children]
  assert lengths == [8, 7] and len(stream) == 15 and [child.requested for child in stream.children] == [None, None]
  assert sorted(samples_of(stream.source)) == sorted(sum((samples_of(child.source) for child in stream.children), []))
  assert len(open_stream(settings(text, num_samples=6))) == 6 and len(open_stream(settings(text, num_samples=99))) == 15
  message = refusal(open_stream, settings(text, num_samples=99, needed=99))
  assert "has 15, but the run reads 99; lower steps, or give the datasets weights to read them more than once" in message


def test_a_blend_is_loaded_before_it_is_drawn(settings, two, tmp_path):
  drawn = open_stream(settings(two, num_samples=100, blend_cache_dir=str(tmp_path / "cache")))
  again = open_stream(settings(two, num_samples=100, blend_cache_dir=str(tmp_path / "cache")))
  assert (drawn.source.pair.found, again.source.pair.found) == (False, True)
  assert all(child.index.found for child in again.children)
  assert samples_of(again.source) == samples_of(drawn.source)


def test_d5_every_child_is_checked(settings, tmp_path, two):
  with IndexedDatasetWriter(str(tmp_path / "c"), np.int32) as writer:
    writer.add_sequence([1, 2, 3])
    writer.add_sequence([4, 5, 6])
    writer.end_document()
  assert "c.idx has documents of several sequences" in refusal(open_stream, settings(two + ";{npy}/2|{data}/c,1"))


def test_the_log_of_a_child_without_eod_names_it(settings, two, tmp_path, caplog):
  caplog.set_level(logging.WARNING)
  open_stream(settings(two))
  assert [str(tmp_path / name) in caplog.text for name in "ab"] == [True, True]


# The order in a checkpoint.


def order_of(settings_) -> dict:
  return json.loads(json.dumps(open_stream(settings_).order))


def check(saved, now) -> None:
  check_state({"format": STATE_FORMAT, "next_sample": 4, "order": saved}, now)


def test_the_same_blend_elsewhere_continues(settings, two, tmp_path):
  saved = order_of(settings(two, num_samples=20))
  assert str(tmp_path) not in json.dumps(saved)
  check(saved, order_of(settings(two.replace("{npy}", "{data}/elsewhere"), num_samples=20)))
  check(saved, order_of(settings("{npy}|{data}/a,0;" + two, num_samples=20)))
  check(saved, order_of(settings(two.replace("0.7", "1.4").replace("0.3", "0.6"), num_samples=20)))


@pytest.mark.parametrize(
  "change, text",
  [
    ({"seed": 1}, "with another order of samples of dataset 0: the seed is 42 there and 1 here; set data_shuffle_seed"),
    ({"seq_length": 3}, "the sequence length is 4 there and 3 here; set max_target_length"),
    ({"num_samples": 8}, "asked for 20 samples (epochs of the datasets: 2, 1) and this run asks for 8 (epochs of the"),
    ({"blend_margin": 300.0}, "saved with mmap_npy_blend_margin=0.5 and this run has 300.0, which is another order"),
  ],
)
def test_d11_another_blend_is_refused_with_the_key_that_mends_it(settings, two, change, text):
  saved = order_of(settings(two, num_samples=20))
  message = refusal(check, saved, order_of(settings(two, **{"num_samples": 20, **change})))
  assert text in message and message.endswith("or start a new run_name.")


def test_d11_other_weights_children_and_kinds(settings, two):
  saved = order_of(settings(two, num_samples=20))
  other = order_of(settings(two.replace("0.7", "0.3"), num_samples=20))
  assert "the weights are 0.7 to 0.3 there and 0.5 to 0.5 here" in refusal(check, saved, other)
  swapped = order_of(settings("{npy}/1|{data}/b,0.7;{npy}/0|{data}/a,0.3", num_samples=20))
  assert "of samples of dataset 0: its dataset is 3 sequences, 36 tokens" in refusal(check, saved, swapped)
  alone = order_of(settings("{npy}/0|{data}/a", num_samples=20))
  assert "read a blend of 2 datasets, and this run reads one dataset" in refusal(check, saved, alone)
  assert "read one dataset, and this run reads a blend of 2 datasets" in refusal(check, alone, saved)


@pytest.mark.parametrize("value", [None, 3, "text", [], [3, None], [{}, {}], {"a": 1}])
def test_garbage_in_place_of_children_is_refused(settings, two, value):
  saved = order_of(settings(two, num_samples=20))
  refusal(check, {**saved, "children": value}, saved)


def test_many_shards_are_kept_short(settings, tmp_path):
  for number in range(40):
    write(tmp_path / "s" / f"s_{number}", [5], number)
  saved = order_of(settings("{npy}|{data}/s", num_samples=20))
  assert len(json.dumps(saved)) < 1000 and saved["datasets"][0]["shards"] == 40
  check(saved, order_of(settings("{npy}|{data}/s", num_samples=20)))
  write(tmp_path / "s" / "s_7", [4], 7)
  message = refusal(check, saved, order_of(settings("{npy}|{data}/s", num_samples=20)))
  assert "its dataset is 40 sequences, 200 tokens" in message


def test_a_stream_that_is_too_short_names_the_key_to_change(settings, tmp_path):
  write(tmp_path / "a")
  message = refusal(open_stream, settings("{npy}|{data}/a", num_samples=8, needed=9))
  assert "grain_train_files: the order of 8 samples that was asked for has 8, but the run reads 9; lower steps" in message
  assert message.endswith("or raise mmap_npy_num_samples.")
  evaluation = dataclasses.replace(settings("{npy}|{data}/a", num_samples=8, needed=9), key="grain_eval_files")
  message = refusal(open_stream, evaluation)
  assert message.endswith("lower eval_steps or eval_per_device_batch_size, or raise mmap_npy_num_eval_samples.")


def test_reports_name_the_child(settings, two):
  seen = set()
  open_stream(settings(two), progress=lambda *state: seen.add(state[:2]))
  assert seen == {(child, stage) for child in (0, 1) for stage in ("document index", "sample index", "shuffle index")}


def test_children_that_are_planned_say_what_they_are_asked_for(settings, two):
  planned, mixture = library.plan_children(settings(two, num_samples=1000))
  asked = [(child.number, child.weight, child.requested) for child in planned]
  assert mixture.mixed and asked == [(0, 0.7, 704), (1, 0.3, 302)]
  assert "is a blend with weights, and no number of samples is set" in refusal(
    library.plan_children, settings(two, num_samples=None)
  )
