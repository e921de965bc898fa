# SPDX-License-Identifier: Apache-2.0
"""Tests of the iterator over a global order: hosts, its state, and the states that it refuses. CASES D11 and D12."""

import dataclasses
import json
import re

from absl import flags
from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline._mmap_datasource import MegatronNpyDataSource
from maxtext.input_pipeline._mmap_index_cache import IndexRequest
from maxtext.input_pipeline._mmap_indexed_dataset import MMapError
from maxtext.input_pipeline._mmap_iterator import GlobalOrderDataset
from maxtext.input_pipeline._mmap_order import STATE_FORMAT, check_state
from support import TextRows, write_numbered

D1_LENGTHS = [5, 7, 3, 9, 6, 4]
EOD = 99
LENGTH, SEED = 4, 42


@pytest.fixture(scope="module")
def d1(tmp_path_factory) -> str:
  return write_numbered(tmp_path_factory.mktemp("d1") / "data", D1_LENGTHS)


@pytest.fixture(scope="module")
def source(d1) -> MegatronNpyDataSource:
  """The 16 samples of two epochs."""
  return MegatronNpyDataSource("/dev/null/none", d1, EOD, LENGTH, request=IndexRequest(LENGTH, SEED, 14))


def describe_order(description, request, needed):
  """The order of a stream of one dataset."""
  counts = {"requested_samples": request.num_samples, "available_samples": description.plan.samples}
  return {**description.built_from, **counts, "needed_samples": needed}


def order_of(prefix, num_samples=14, needed=None, **changes):
  request = IndexRequest(**{"seq_length": LENGTH, "seed": SEED, "num_samples": num_samples, **changes})
  return describe_order(cache.describe(prefix, request), request, needed or num_samples)


def iterate(source, batch=4, host=0, hosts=1, **settings):
  order = order_of(source.dataset.prefixes[0])
  return iter(GlobalOrderDataset(TextRows(source), batch, host, hosts, order, **settings))


def global_batches(iterators, steps=None) -> list[list[list[int]]]:
  """The samples of each step: the hosts' rows put back in stride order."""
  batches = []
  while steps is None or len(batches) < steps:
    parts = [next(iterator, None) for iterator in iterators]
    if parts[0] is None:
      assert parts == [None] * len(parts), "all hosts end at the same step"
      break
    assert len({part["text"].shape for part in parts}) == 1
    batches.append([row for rows in zip(*(part["text"].tolist() for part in parts), strict=True) for row in rows])
  return batches


def in_order(source, batch) -> list[list[list[int]]]:
  samples = [source[position]["text"].tolist() for position in range(len(source) // batch * batch)]
  return [samples[first : first + batch] for first in range(0, len(samples), batch)]


# Batches.


@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("batch", [4, 8, 12])
def test_d12_hosts_together_read_the_one_host_batch(source, hosts, batch):
  iterators = [iterate(source, batch, host, hosts) for host in range(hosts)]
  assert global_batches(iterators) == in_order(source, batch)


def test_d12_stop_on_two_hosts_and_go_on_with_one_and_four(source):
  """Sixteen samples, global batch 4, two batches on two hosts; then on other numbers of hosts."""
  expected = in_order(source, 4)
  two = [iterate(source, 4, host, 2) for host in range(2)]
  assert global_batches(two, 2) == expected[:2]
  states = [iterator.get_state() for iterator in two]
  assert states[0] == states[1], "a state does not depend on the host that saved it"
  for hosts in (1, 4):
    others = [iterate(source, 4, host, hosts) for host in range(hosts)]
    for iterator in others:
      iterator.set_state(states[0])
    assert global_batches(others) == expected[2:]
  assert global_batches(two) == expected[2:]


@given(
  before=st.tuples(st.sampled_from([1, 2, 4]), st.integers(0, 4)),
  after=st.sampled_from([1, 2, 4]),
  batches=st.tuples(st.sampled_from([4, 8]), st.sampled_from([4, 8, 12])),
  buffered=st.integers(0, 5),
)
def test_any_step_hosts_and_batch_size_continue(source, before, after, batches, buffered):
  hosts, steps = before
  first = [iterate(source, batches[0], host, hosts, buffered=buffered) for host in range(hosts)]
  seen = sum(global_batches(first, steps), [])
  state = json.loads(json.dumps(first[0].get_state()))
  second = [iterate(source, batches[1], host, after, buffered=buffered) for host in range(after)]
  for iterator in second:
    iterator.set_state(state)
  seen += sum(global_batches(second), [])
  assert seen == sum(in_order(source, 1), [])[: len(seen)]
  assert len(source) - len(seen) < batches[1]


def test_rows_that_the_step_cuts_off_take_no_sample(source):
  """Two hosts of two rows, of which the step uses two; and a host whose rows are all cut."""
  expected = in_order(source, 2)
  offsets = [np.array([0, -1]), np.array([-1, 1]), np.array([-1, -1])]
  hosts = [iterate(source, 2, offsets=places) for places in offsets]
  for step in range(8):
    rows = [next(host)["text"].tolist() for host in hosts]
    assert [rows[0][0], rows[1][1]] == expected[step] and all(len(part) == 2 for part in rows)
  assert [next(host, None) for host in hosts] == [None] * 3


def test_data_ends_before_a_batch_that_is_not_whole(source):
  iterator = iterate(source, 5)
  assert len(global_batches([iterator])) == 3
  for _ in range(2):
    with pytest.raises(StopIteration):
      next(iterator)
  assert iterator.get_state()["next_sample"] == 15


def test_threads_and_buffers_keep_the_order(source):
  assert global_batches([iterate(source, 2, buffered=8, threads=8)]) == in_order(source, 2)


def test_iterators_of_one_dataset_are_independent(source):
  dataset = GlobalOrderDataset(TextRows(source), 4, 0, 1, order_of(source.dataset.prefixes[0]))
  first, second = iter(dataset), iter(dataset)
  assert global_batches([first], 2) == global_batches([second], 2) == in_order(source, 4)[:2]


def test_a_batch_that_hosts_cannot_share_is_refused(source):
  with pytest.raises(MMapError, match="the global batch of 6 samples cannot be divided among 4 hosts; change per_device"):
    iterate(source, 6, 0, 4)


def test_close_and_go_on(source):
  iterator = iterate(source, 4)
  seen = global_batches([iterator], 1)
  iterator.close()
  assert seen + global_batches([iterator], 1) == in_order(source, 4)[:2]


def test_a_worker_process_keeps_the_order(source):
  flags.FLAGS.mark_as_parsed()  # Grain reads flags before it starts workers
  iterator = iterate(source, 4, workers=1, buffered=2)
  try:
    iterator.set_state({**iterator.get_state(), "next_sample": 4})
    batch = next(iterator)
    assert batch["text"].tolist() == in_order(source, 4)[1] and batch["text"].flags.owndata
    assert iterator.get_state()["next_sample"] == 8
  finally:
    iterator.close()


# State.


def test_a_state_is_small_json_and_says_the_order(source, d1):
  iterator = iterate(source, 4)
  next(iterator)
  state = iterator.get_state()
  assert (state["format"], state["next_sample"], state["order"]) == (STATE_FORMAT, 4, iterator.order)
  assert json.loads(json.dumps(state)) == state and len(json.dumps(state)) < 1000
  order = state["order"]
  assert (order["seed"], order["sequence_length"], order["sequences"], order["num_epochs"]) == (42, 4, [0, 6], 2)
  assert (order["requested_samples"], order["available_samples"], order["needed_samples"]) == (14, 16, 14)
  assert d1 not in json.dumps(state), "the same data elsewhere is the same order"


def test_going_back_and_forth(source):
  iterator = iterate(source, 4)
  states = []
  for _ in range(4):
    states.append(iterator.get_state())
    next(iterator)
  for step in (2, 0, 3, 1):
    iterator.set_state(states[step])
    assert global_batches([iterator], 1) == [in_order(source, 4)[step]]


def test_a_state_at_the_end_has_nothing_left(source):
  iterator = iterate(source, 4)
  global_batches([iterator])
  other = iterate(source, 4)
  other.set_state(iterator.get_state())
  assert global_batches([other]) == []


def test_a_refused_state_leaves_the_iterator_where_it_is(source):
  iterator = iterate(source, 4)
  next(iterator)
  with pytest.raises(MMapError):
    iterator.set_state({"format": STATE_FORMAT, "next_sample": 0, "order": {}})
  assert global_batches([iterator], 1) == [in_order(source, 4)[1]]


# States that are refused.


def refusal(saved, order) -> str:
  with pytest.raises(MMapError) as caught:
    check_state({"format": STATE_FORMAT, "next_sample": 4, "order": saved}, order)
  message = str(caught.value)
  assert "\n" not in message and message.endswith("or start a new run_name."), message
  return message


def accepts(saved, order) -> bool:
  check_state({"format": STATE_FORMAT, "next_sample": 4, "order": json.loads(json.dumps(saved))}, order)
  return True


@pytest.mark.parametrize("saved, now", [(8, 7), (9, 13), (13, 9), (14, 16), (8, 8)])
def test_d11_counts_of_the_same_order_continue(d1, saved, now):
  assert accepts(order_of(d1, saved), order_of(d1, now))


@pytest.mark.parametrize(
  "saved, now, texts",
  [
    (8, 9, ("8 samples (1 epoch)", "9 (2 epochs, the last shuffled apart)")),
    (13, 14, ("13 samples (2 epochs, the last shuffled apart)", "14 (2 epochs)")),
    (14, 13, ("14 samples (2 epochs)", "13 (2 epochs, the last shuffled apart)")),
    (20, 8, ("20 samples (3 epochs, the last shuffled apart)", "8 (1 epoch)")),
  ],
)
def test_d11_another_order_names_both_counts(d1, saved, now, texts):
  message = refusal(order_of(d1, saved), order_of(d1, now))
  assert f"saved by a run that asked for {texts[0]} and this run asks for {texts[1]}, which is another order" in message


@pytest.mark.parametrize("saved, now", [(13, 14), (14, 9), (20, 8)])
def test_d11_the_key_that_mends_it_is_named_and_does(d1, saved, now):
  message = refusal(order_of(d1, saved), order_of(d1, now))
  (pinned,) = re.findall(r"set mmap_npy_num_samples=(\d+) to continue", message)
  assert accepts(order_of(d1, saved), order_of(d1, int(pinned), needed=now))


def test_d11_an_order_that_is_too_small_for_this_run_is_no_advice(d1):
  message = refusal(order_of(d1, 8), order_of(d1, 9))
  assert "its order has 8 samples and this run needs 9, so lower steps to continue" in message
  assert "mmap_npy_num_samples" not in message


@pytest.mark.parametrize(
  "changes, text",
  [
    ({"seed": 43}, "the seed is 42 there and 43 here; set data_shuffle_seed (and enable_data_shuffling) as in the saved"),
    ({"seq_length": 3}, "the sequence length is 4 there and 3 here; set max_target_length as in the saved run"),
    ({"split": "1,1"}, "it reads sequences 0 to 6 there and 0 to 3 here; set mmap_npy_split as in the saved run"),
  ],
)
def test_d15_other_settings_are_named_with_their_key(d1, changes, text):
  assert text in refusal(order_of(d1), order_of(d1, **changes))


def test_d15_another_dataset_is_named_by_what_it_is(tmp_path, d1):
  other = write_numbered(tmp_path / "other", [5, 7, 3, 9, 10])
  message = refusal(order_of(d1), order_of(other))
  assert re.search(r"its dataset is 6 sequences, 34 tokens, [0-9a-f]{8} there and 5 sequences, 34 tokens, ", message)
  assert "read the dataset that the saved run read" in message


def test_the_dataset_is_said_before_what_follows_from_it(tmp_path, d1):
  other = write_numbered(tmp_path / "other", [9] * 9)
  assert "its dataset is" in refusal(order_of(d1), order_of(other, seed=1, seq_length=8))


def test_the_same_dataset_elsewhere_continues(tmp_path, d1):
  assert accepts(order_of(d1), order_of(write_numbered(tmp_path / "copy", D1_LENGTHS)))


def test_equal_ranges_under_another_split_text_continue(d1):
  assert accepts(order_of(d1, 4, split="1,1"), order_of(d1, 4, split="50,50,0"))
  assert accepts(order_of(d1, 4, split="1,1"), order_of(d1, 4, split="0,1,1", split_index=1))
  assert accepts(order_of(d1), order_of(d1, split="1"))
  assert "it reads sequences" in refusal(order_of(d1, 4, split="1,1"), order_of(d1, 4, split="1,1", split_index=1))


def test_every_key_that_decides_the_order_is_compared(d1):
  """A key that joins `built_from` later must be refused too, if only as another order."""
  description = cache.describe(d1, IndexRequest(LENGTH, SEED, 14))
  order = order_of(d1)
  for key in description.built_from.keys() - {"split", "split_index"}:
    assert "another order" in refusal({**order, key: None}, order)
    assert "another order" in refusal({name: value for name, value in order.items() if name != key}, order)


def assert_not_a_state(state, order) -> None:
  with pytest.raises(MMapError, match="was not saved by grain_file_type=mmap_npy or mmap of this version") as caught:
    check_state(state, order)
  assert "start a new run_name" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("state", [None, 3, "text", b"bytes", [], {}, [{}], {"order": {}}])
def test_something_else_is_no_state(d1, state):
  assert_not_a_state(state, order_of(d1))


@pytest.mark.parametrize(
  "changes",
  [
    {"format": STATE_FORMAT + 1},
    {"format": None},
    *({"next_sample": value} for value in (None, "4", 4.0, -4, True, [4])),
    *({"order": value} for value in (None, "text", [], 3)),
  ],
  ids=str,
)
def test_a_state_of_other_fields_is_refused(d1, changes):
  order = order_of(d1)
  state = {"format": STATE_FORMAT, "next_sample": 4, "order": order}
  check_state(state, order)
  assert_not_a_state({**state, **changes}, order)
  assert_not_a_state({key: value for key, value in state.items() if key not in changes}, order)


@pytest.mark.parametrize("value", [None, 3, "text", [], [{}], [1], {}, [[]]])
@pytest.mark.parametrize("key", ["datasets", "sequences", "seed", "num_epochs", "separate_last_epoch"])
def test_an_order_with_garbage_in_it_is_refused(d1, key, value):
  order = order_of(d1)
  assert "another order" in refusal({**order, key: value}, order)


def test_needed_samples_do_not_decide_the_order(d1):
  request = IndexRequest(LENGTH, SEED, 14)
  description = cache.describe(d1, request)
  orders = [describe_order(description, request, needed) for needed in (1, 14)]
  orders.append(describe_order(description, dataclasses.replace(request, num_samples=16), 16))
  assert all(accepts(saved, now) for saved in orders for now in orders)
