# SPDX-License-Identifier: Apache-2.0
"""Batches with more segments than max_kda_segments are refused on the host: counted as on the device, never too late."""

from types import SimpleNamespace

from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_layer_support import read_config
from maxtext.input_pipeline import _kda_segments_check as checks
from maxtext.input_pipeline import input_pipeline_interface
from maxtext.input_pipeline._kda_segments_check import Layout, SegmentCheck, count_segments, lay_out
from maxtext.input_pipeline._mmap_iterator import GlobalOrderDataset
from maxtext.input_pipeline.multihost_dataloading import MultiHostDataLoadIterator
from maxtext.layers._kda_segments import segment_ids_to_cu_seqlens
from support import refusal

BATCH, LENGTH = 4, 12
ROWS = arrays.arrays(np.int32, (BATCH, LENGTH), elements=st.integers(0, 3))
TOKAMAX = {"kda_implementation": "tokamax", "use_kda_safe_gate": True, "kda_lower_bound": -5.0}
convert = jax.jit(segment_ids_to_cu_seqlens, static_argnums=1)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
  return read_config(tmp_path_factory.mktemp("config"), max_kda_segments=4, **TOKAMAX)


@pytest.fixture(scope="module")
def mesh():
  return jax.make_mesh((1,) * 3, ("data", "fsdp", "tensor"))


def with_keys(config, **keys) -> SimpleNamespace:
  """The keys that the check reads, some of them changed, for a batch of two rows."""
  names = ("kda_implementation", "max_kda_segments", "gradient_accumulation_steps", "logical_axis_rules", "enable_diloco")
  names += ("use_tunix_gradient_accumulation", "enable_rampup_batch_size", "using_pipeline_parallelism")
  sizes = {"micro_batch_size_to_train_on": 2, "micro_batch_size_to_eval_on": 2, "num_pipeline_microbatches": 2}
  return SimpleNamespace(**{name: getattr(config, name) for name in names} | sizes | keys)


def numbered(*counts: int) -> dict[str, np.ndarray]:
  """A batch whose rows have these numbers of segments, and padding."""
  ids = np.arange(1, LENGTH + 1)
  return {"inputs_segmentation": np.array([np.where(ids <= count, ids, 0) for count in counts], np.int32)}


@pytest.mark.parametrize(
    "row, expected",
    [
        ([1, 1, 2, 2, 0, 0], 2),
        ([0, 0, 1, 1], 1),
        ([1, 0, 1], 2),
        ([1, 1, 3, 3], 2),
        ([0, 0], 0),
        ([7], 1),
        ([0], 0),
    ],
)
def test_examples(row, expected):
  assert count_segments(np.array([row, row])).tolist() == [expected, expected]


@given(ids=ROWS)
def test_counts_are_those_of_the_device(ids):
  found = int(count_segments(ids).sum())
  ends = np.asarray(convert(ids, BATCH * LENGTH))
  assert found == np.count_nonzero(np.diff(ends))
  assert (int(convert(ids, 6)[-1]) == -1) == (found > 6), "refused here where it would be NaN there"


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(0, 5))
def test_groups_are_the_rows_of_a_device_and_microbatch(rows, shards, microbatches, cut):
  used = rows * shards * microbatches
  loaded = -(-(used + cut) // microbatches) * microbatches
  # As the step does it: rows are dealt out to the microbatches, each is cut, and its rows are divided among devices.
  dealt = np.arange(loaded).reshape(-1, microbatches).T[:, : used // microbatches]
  expected = {frozenset(part) for micro in dealt.tolist() for part in np.split(np.array(micro), shards)}
  places = np.where(np.arange(loaded) < used, np.arange(loaded), -1)
  layout = lay_out(places, used, shards, microbatches)
  assert layout.rows == rows
  assert {frozenset(places[layout.groups == group]) for group in {*layout.groups} - {-1}} == expected
  assert (layout.groups[used:] == -1).all()


@given(st.lists(st.integers(0, 9), min_size=8, max_size=8), st.sampled_from([1, 2, 4, 8]), st.integers(1, 40))
def test_hosts_that_share_devices_never_let_too_many_pass(counts, hosts, most):
  places, counts = np.arange(8).reshape(hosts, -1), np.array(counts)
  parts = [lay_out(own, 8, 2) for own in places]
  passed = all(checks._problem(counts[own], part, most) is None for own, part in zip(places, parts, strict=True))
  fits = max(counts[:4].sum(), counts[4:].sum()) <= most
  assert fits or not passed
  if hosts <= 2:  # a device's rows come from one host
    assert fits == passed
  if 4 * counts.max() <= most:  # what the guide recommends
    assert passed


@given(st.lists(st.integers(0, 9), min_size=8, max_size=8), st.integers(1, 40), st.permutations(range(8)))
def test_rows_in_an_unknown_order_never_let_too_many_pass(counts, most, order):
  layout = lay_out(np.arange(8), 8, 2, parts=2)
  assert layout.rows == 2
  assume(checks._problem(np.array(counts), layout, most) is None)
  assert np.array(counts)[order].reshape(-1, 2).sum(axis=1).max() <= most


@pytest.mark.parametrize(
    "axes, rows, shards",
    [
        ({"data": 2, "fsdp": 4, "tensor": 2}, 8, 8),
        ({"data": 2, "expert": 2, "context": 4}, 8, 4),
        ({"tensor": 8}, 8, 1),
        ({"fsdp": 8}, 4, 1),  # too few rows: the layers have all of them on each device
        ({"diloco": 2, "fsdp": 2}, 8, 4),
    ],
)
def test_axes_that_divide_the_batch(config, axes, rows, shards):
  mesh = jax.sharding.AbstractMesh((*axes.values(),), (*axes,))
  assert checks.batch_shards(with_keys(config, enable_diloco="diloco" in axes), mesh, rows) == shards


def test_sentence(config, mesh):
  check = SegmentCheck(with_keys(config), mesh, evaluation=False)
  check(numbered(3, 1))
  check({"text": np.ones((2, 3))})
  assert refusal(check, numbered(3, 2)) == (
      "kda_implementation=tokamax has room for max_kda_segments=4 segments on a device, and rows 0 and 1 of the training "
      "batch, which a device holds at once, have 5; raise max_kda_segments to 5 or more, or use "
      "kda_implementation=auto, which needs no maximum."
  )


def test_rows_that_the_step_cuts_do_not_count(config, mesh):
  check = SegmentCheck(with_keys(config), mesh, evaluation=False)
  check(numbered(3, 1, 9, 9))


def test_accumulated_rows_are_counted_for_each_microbatch(config, mesh):
  check = SegmentCheck(with_keys(config, gradient_accumulation_steps=3), mesh, evaluation=False)
  check(numbered(1, 2, 3, 3, 2, 1))
  assert "rows 1 and 4 of the training batch, which a device holds" in refusal(check, numbered(1, 2, 3, 3, 3, 1))
  evaluation = SegmentCheck(with_keys(config, gradient_accumulation_steps=3), mesh, evaluation=True)
  assert "rows 0 and 1 of the evaluation batch" in refusal(evaluation, numbered(3, 3))


def test_where_the_batch_ramps_up_a_row_has_its_share(config, mesh):
  check = SegmentCheck(with_keys(config, enable_rampup_batch_size=True), mesh, evaluation=False)
  check(numbered(2, 2))
  sentence = refusal(check, numbered(3, 1))
  assert "row 0 of the training batch, 1 of the 2 that a device holds at once, has 3, more than a fair share" in sentence
  assert "raise max_kda_segments to 6 or more" in sentence


def test_names_of_rows():
  names = [checks._named(np.array(places)) for places in ([3], [3, 4], [3, 4, 5], [1, 4, 7], [1, 2, 4])]
  assert names == ["row 3", "rows 3 and 4", "rows 3 to 5", "rows 1 to 7 in steps of 3", "rows 1, 2 and 4"]


class Segmented:
  """Samples of 1, 2, 3, ... segments."""

  def __len__(self):
    return 8

  def rows(self, indices):
    return numbered(*(np.asarray(indices) + 1))


def test_an_iterator_refuses_and_a_checkpoint_then_does_not_skip_the_batch(config, mesh):
  iterator = MultiHostDataLoadIterator(GlobalOrderDataset(Segmented(), 2, 0, 1, {}), mesh)
  checks.install(iterator, with_keys(config, max_kda_segments=9), mesh, evaluation=False)
  assert [jnp.max(next(iterator)["inputs_segmentation"], axis=1).tolist() for _ in range(2)] == [[1, 2], [3, 4]]
  assert "have 11; raise max_kda_segments to 11" in refusal(next, iterator)
  assert iterator.local_iterator.next_sample == 4, "a checkpoint of the last whole step"
  checks.install(iterator, with_keys(config, max_kda_segments=11), mesh, evaluation=False)
  assert next(iterator)["inputs_segmentation"][0].max() == 5
  iterator.close()


def test_other_data_and_the_padding_after_its_end(config, mesh):
  iterator = MultiHostDataLoadIterator([numbered(2, 2)], mesh, generate_padding_batch=True)
  checks.install([iterator], with_keys(config), mesh, evaluation=True)
  assert next(iterator)["inputs_segmentation"].any() and not next(iterator)["inputs_segmentation"].any()
  iterator.dataloader = [numbered(3, 2)]
  iterator.reset()
  assert "evaluation batch" in refusal(next, iterator)


@pytest.mark.parametrize("keys", [{"kda_implementation": "auto"}, {"max_kda_segments": 0}], ids=str)
def test_without_the_keys_nothing_is_installed(config, mesh, keys, monkeypatch):
  iterators = [MultiHostDataLoadIterator([numbered(9, 9)], mesh) for _ in range(2)]
  monkeypatch.setattr(input_pipeline_interface.release, "create_data_iterator", lambda config, mesh: (*iterators,))
  assert input_pipeline_interface.create_data_iterator(with_keys(config, **keys), mesh) == (*iterators,)
  assert [iterator.check for iterator in iterators] == [None, None]
  input_pipeline_interface.create_data_iterator(with_keys(config), mesh)
  assert [refusal(next, iterator).count("evaluation batch") for iterator in iterators] == [0, 1]


def test_a_host_whose_rows_are_all_cut_has_nothing_to_refuse():
  layout = Layout(np.array([-1, -1]), np.array([-1, -1]), 2)
  assert checks._problem(np.array([9, 9]), layout, 1) is None
