# SPDX-License-Identifier: Apache-2.0
"""Our indices, samples, blends and fields against what megatron-core gave for the same datasets.

The golden files are written by write_golden.py and write_blend_golden.py, in tests/reference, which also compare live.
"""

import hashlib
import itertools
import json
from pathlib import Path
import pickle
import types

from absl import flags
from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest

from maxtext.input_pipeline import _megatron_blending as blending
from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline._mmap_datasource import MegatronNpyDataSource
from maxtext.input_pipeline._mmap_index_cache import IndexRequest
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter, MMapError
from maxtext.input_pipeline._mmap_iterator import GlobalOrderDataset
from maxtext.input_pipeline._mmap_stream import StreamSettings, open_stream, settings_for
from maxtext.input_pipeline.input_pipeline_utils import MegatronSplitInputsTargets
from support import TextRows

GOLDEN_FOLDER = Path(__file__).resolve().parents[1] / "golden"
GOLDEN = json.loads((GOLDEN_FOLDER / "megatron_gpt.json").read_text(encoding="utf-8"))
BLENDS = json.loads((GOLDEN_FOLDER / "megatron_blend.json").read_text(encoding="utf-8"))
EOD = 99
INDICES = ("document_index", "sample_index", "shuffle_index")

each_case = pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: case["name"])


def test_golden_files_say_where_they_are_from():
  for golden, counts in ((GOLDEN, (41, 28, 14)), (BLENDS, (45, 15, 19))):
    assert golden["provenance"]["megatron-core"] == "0.16.1"
    assert tuple(len(entries) for entries in golden.values() if isinstance(entries, list)) == counts


def write(folder, case) -> str:
  prefix = str(folder / case["name"])
  sequences = np.split(np.array(case["tokens"]), np.cumsum(case["lengths"])[:-1])
  with IndexedDatasetWriter(prefix, case["dtype"]) as writer:
    for begin, end in itertools.pairwise(case["documents"]):
      for tokens in sequences[begin:end]:
        writer.add_sequence(tokens)
      writer.end_document()
  return prefix


def request_of(case) -> IndexRequest:
  epochs = 1 if case["num_samples"] is None else None
  return IndexRequest(
    case["seq_length"], case["seed"], case["num_samples"], epochs, case["split"], case["split_index"]
  )


def open_source(folder, case, **settings) -> MegatronNpyDataSource:
  settings = {"split_sentences": case["name"] == "d5", "request": request_of(case)} | settings
  return MegatronNpyDataSource(str(folder / "npy"), write(folder, case), EOD, case["seq_length"], **settings)


def split_fields(case):
  return MegatronSplitInputsTargets(EOD, reset_attention_mask=case["reset"], eod_mask_loss=case["mask_loss"])


def assert_megatrons_fields(fields, expected) -> None:
  """Compares fields; a position sees what lies in its own segment, up to itself."""
  segments = fields["inputs_segmentation"]
  first_visible = (segments[:, None] == segments[None, :]).argmax(axis=1)
  visible = np.tril(segments[:, None] == segments[None, :])
  np.testing.assert_array_equal(visible.sum(axis=1), np.arange(len(segments)) - first_visible + 1)
  np.testing.assert_array_equal(first_visible, expected["first_visible"])
  np.testing.assert_array_equal(fields["targets_segmentation"], expected["loss_mask"])
  for name in ("inputs_position", "targets_position"):
    np.testing.assert_array_equal(fields[name], expected["position_ids"])
  for name in ("inputs_segmentation", "targets_segmentation", "inputs_position", "targets_position"):
    assert fields[name].dtype == np.int32


@each_case
def test_indices_are_megatrons(tmp_path, case):
  request = request_of(case)
  arrays = utils.build_indices(
    write(tmp_path, case),
    request.seq_length,
    request.num_samples,
    request.num_epochs,
    request.seed,
    request.split,
    request.split_index,
  )[:3]
  for name, array, dtype in zip(INDICES, arrays, case["dtypes"], strict=True):
    assert array.dtype.str == dtype
    np.testing.assert_array_equal(array, case[name], name)


@each_case
def test_samples_are_megatrons(tmp_path, case):
  source = open_source(tmp_path, case)
  assert len(source) == len(case["shuffle_index"])
  assert [source[position]["text"].tolist() for position in range(len(case["samples"]))] == case["samples"]
  assert {source[position]["text"].dtype.name for position in range(len(source))} == {"int32"}


@each_case
def test_fields_are_megatrons(tmp_path, case):
  source, transform = open_source(tmp_path, case), split_fields(case)
  for position, (tokens, expected) in enumerate(zip(case["samples"], case["fields"], strict=False)):
    fields = transform.map(source[position])
    assert (fields["inputs"].tolist(), fields["targets"].tolist()) == (tokens[:-1], tokens[1:])
    assert_megatrons_fields(fields, expected)


def cases_named(start):
  return [pytest.param(case, id=case["name"]) for case in GOLDEN["cases"] if case["name"].startswith(start)]


@pytest.mark.parametrize("case", cases_named("random-1"))
def test_samples_are_megatrons_in_a_worker_and_after_a_restart(tmp_path, case):
  source = open_source(tmp_path, case)
  copy = pickle.loads(pickle.dumps(source))
  again = open_source(tmp_path, case)
  assert (source.index.found, again.index.found) == (False, True)
  for other in (again, copy):
    assert [other[position]["text"].tolist() for position in range(len(case["samples"]))] == case["samples"]


@pytest.mark.parametrize("case", cases_named("d1-8"))
def test_samples_are_megatrons_from_indices_given_by_the_caller(tmp_path, case):
  arrays = tuple(np.array(case[name], dtype) for name, dtype in zip(INDICES, case["dtypes"], strict=True))
  source = open_source(tmp_path, case, request=None, prebuilt_indices=arrays)
  assert [source[position]["text"].tolist() for position in range(8)] == case["samples"]


def bytes_read() -> int:
  """Bytes that this process has asked of the system so far."""
  return int(Path("/proc/self/io").read_text(encoding="utf-8").split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs /proc/self/io")
def test_d2_a_window_of_a_long_sequence_reads_the_bytes_of_the_window(tmp_path):
  case = {"name": "long", "lengths": [10_000_000], "documents": [0, 1], "dtype": "uint16", "seq_length": 64}
  case |= {"tokens": np.arange(10_000_000) % 60_000, "seed": 3, "num_samples": 1000, "split": "", "split_index": 0}
  source = open_source(tmp_path, case)
  first = source[0]["text"]  # opens the file
  np.testing.assert_array_equal(np.diff(first) % 60_000, np.ones(64))
  before = bytes_read()
  alone = bytes_read() - before
  for position in range(1, 51):
    assert len(source[position]["text"]) == 65
  assert bytes_read() - before - 2 * alone <= 1.05 * 50 * 65 * 2


@pytest.mark.parametrize("case", cases_named("d5"))
def test_d5_sentence_split_file_is_refused_unless_it_is_meant(tmp_path, case):
  with pytest.raises(MMapError, match="mmap_split_sentences=true"):
    open_source(tmp_path, case, split_sentences=False)


@pytest.mark.parametrize("row", GOLDEN["fields"], ids=lambda row: f"{len(row['inputs'])} tokens")
@pytest.mark.parametrize("mask_loss", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_fields_of_all_options_are_megatrons(row, reset, mask_loss):
  transform = MegatronSplitInputsTargets(EOD, reset_attention_mask=reset, eod_mask_loss=mask_loss)
  fields = transform.map({"text": np.array([*row["inputs"], 5], np.int32)})
  assert_megatrons_fields(fields, row[f"reset={int(reset)},mask_loss={int(mask_loss)}"])


@pytest.mark.parametrize("entry", GOLDEN["splits"], ids=lambda entry: f"{entry['split']} of {entry['sequences']}")
def test_d6_split_ranges_are_megatrons(entry):
  for part, (begin, end) in enumerate(entry["ranges"]):
    ours = utils.parse_split_range(entry["split"], part, entry["sequences"])
    assert ours[1] - ours[0] == end - begin
    assert end == begin or ours == (begin, end)


# Blends: which child each sample comes from.


def assert_as_summarised(array, expected, name="") -> None:
  """Compares an array with its summary, see write_blend_golden.py."""
  assert (array.dtype.str, list(array.shape)) == (expected["dtype"], expected["shape"]), name
  np.testing.assert_array_equal(array[: len(expected["begin"])], expected["begin"], name)
  assert hashlib.sha256(np.ascontiguousarray(array)).hexdigest() == expected["sha256"], name


def assert_blend(arrays, expected) -> None:
  for name, array in zip(blending.ARRAYS, arrays, strict=True):
    assert_as_summarised(array, expected[name], name)


each_weights = pytest.mark.parametrize(
  "case", BLENDS["weights"], ids=lambda case: f"{len(case['weights'])} weights, {case['size']} draws"
)


@each_weights
def test_d7_draws_by_weight_are_megatrons(case):
  (arrays, counts) = blending.draw(blending.weighted_blend(case["weights"], case["size"]))
  assert_blend(arrays, case)
  assert counts == np.bincount(arrays[0], minlength=len(case["weights"])).tolist()


@each_weights
def test_released_function_draws_as_megatrons(case):
  arrays = np.empty(case["size"], np.int16), np.empty(case["size"], np.int64)
  weights = blending.weighted_blend(case["weights"], case["size"]).weights
  blending.build_blending_indices(*arrays, weights, len(weights), case["size"])
  assert_blend(arrays, case)


def test_d7_named_draws():
  """The values that the list of cases prints."""
  (first, second), _ = blending.draw(blending.weighted_blend([0.7, 0.3], 10))
  assert (first.tolist(), second.tolist()) == ([0, 1, 0, 0, 1, 0, 0, 1, 0, 0], [0, 0, 1, 2, 1, 3, 4, 2, 5, 6])
  (thirds, _), _ = blending.draw(blending.weighted_blend([1, 1, 1], 12))
  assert thirds.tolist() == [0, 1, 2] * 4
  (rare, _), _ = blending.draw(blending.weighted_blend([0.001, 0.999], 2000))
  assert np.flatnonzero(rare == 0).tolist() == [1, 1000]
  (exhaustive, _), _ = blending.draw(blending.whole_blend([2, 5], None))
  assert exhaustive.tolist() == [1, 0, 1, 1, 0, 1, 1]


@pytest.mark.parametrize("case", BLENDS["sizes"], ids=lambda case: f"{len(case['sizes'])} children")
def test_exhaustive_draws_are_megatrons(case):
  (arrays, counts) = blending.draw(blending.whole_blend(case["sizes"], None))
  assert_blend(arrays, case)
  assert counts == case["sizes"]


@given(data=st.data())
def test_a_longer_blend_begins_like_a_shorter_one(data):
  """Megatron draws sum(ceil(N * w)) samples and we N: the first N are the same."""
  weights = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
  size = data.draw(st.integers(1, 60))
  longer, _ = blending.draw(blending.weighted_blend(weights, size + data.draw(st.integers(0, len(weights)))))
  shorter, _ = blending.draw(blending.weighted_blend(weights, size))
  for one, other in zip(shorter, longer, strict=True):
    np.testing.assert_array_equal(one, other[:size])


# Whole builds of BlendedMegatronDatasetBuilder: train, valid and test.


def parts_of_builds():
  """Every part that megatron-core made a dataset of, as (build, number of the part)."""
  return [
    pytest.param(build, part, id=f"{build['name']}-{utils.SPLIT_NAMES[part]}")
    for build in BLENDS["builds"]
    for part in range(3)
    if build["parts"][part] is not None
  ]


each_part = pytest.mark.parametrize("build, part", parts_of_builds())


def write_child(folder, number, lengths) -> str:
  """Writes tokens 10000 * child + 100 * sequence + position, the last of each sequence EOD."""
  prefix = str(folder / f"child-{number}")
  with IndexedDatasetWriter(prefix, "int32") as writer:
    for row, length in enumerate(lengths):
      tokens = 10000 * number + 100 * row + np.arange(length)
      tokens[-1:] = EOD
      writer.add_sequence(tokens)
      writer.end_document()
  return prefix


def files_of(folder, build, part) -> str:
  """Returns the value of `grain_train_files` that asks for what Megatron was asked."""
  numbers, weights = range(len(build["children"])), build["weights"]
  if build["per_split"]:
    numbers, weights = build["per_split"][part]
  entries = [f"{folder}/npy-{n}|{write_child(folder, n, build['children'][n])}" for n in numbers]
  if weights is None or build["per_split"] and len(entries) == 1:  # a part's own single dataset is never a blend
    return ";".join(entries)
  return "".join(f"{entry},{weight!r};" for entry, weight in zip(entries, weights, strict=True))


def settings_of(folder, build, part) -> StreamSettings:
  return StreamSettings(
    files_of(folder, build, part),
    build["seq_length"],
    EOD,
    build["seed"],
    num_samples=build["sizes"][part],
    split=build["split"] or "",
    split_index=part if build["split"] else 0,
    part=utils.SPLIT_NAMES[part],
  )


@pytest.fixture(scope="module")
def streams(tmp_path_factory):
  """Opens the stream of a part of a build, once."""
  opened = {}

  def of(build, part):
    key = build["name"], part
    if key not in opened:
      opened[key] = open_stream(settings_of(tmp_path_factory.mktemp(f"{key[0]}-{part}"), build, part))
    return opened[key]

  return of


@each_part
def test_child_indices_are_megatrons_builders(streams, build, part):
  expected, stream = build["parts"][part], streams(build, part)
  assert len(stream.children) == len(expected["children"])
  for child, golden in zip(stream.children, expected["children"], strict=True):
    assert child.requested == golden["num_samples"]
    for name, array in zip(INDICES, child.index.arrays, strict=True):
      assert_as_summarised(array, golden[name], f"child {child.number} {name}")


@each_part
def test_blend_dispatch_is_megatrons_builders(streams, build, part):
  expected, stream = build["parts"][part], streams(build, part)
  if not expected["blended"]:
    assert (stream.blend, len(stream)) == (None, expected["length"])
    return
  assert stream.blend is not None
  weighted = build["per_split"][part][1] if build["per_split"] else build["weights"]
  if weighted is None:
    assert len(stream) == expected["length"]
    assert_blend(stream.source.pair.arrays, expected)
    return
  # Megatron rounds each child's share up and adds: it draws up to one sample a child more than was asked for.
  assert len(stream) == build["sizes"][part] <= expected["length"] <= len(stream) + len(stream.children)
  assert stream.blend.weights.tolist() == expected["weights"]
  whole, _ = blending.draw(blending.weighted_blend(weighted, expected["size"]))
  assert_blend(whole, expected)
  for ours, theirs in zip(stream.source.pair.arrays, whole, strict=True):
    np.testing.assert_array_equal(ours, theirs[: len(stream)])


@each_part
def test_samples_are_megatrons_builders(streams, build, part):
  expected, stream = build["parts"][part], streams(build, part)
  kept = expected["samples"][: len(stream)]
  assert [stream.source[position]["text"].tolist() for position in range(len(kept))] == kept
  assert stream.source.read_rows(np.arange(len(kept))).tolist() == kept


@each_part
def test_masks_and_positions_are_megatrons_builders(streams, build, part):
  expected, stream = build["parts"][part], streams(build, part)
  fields = MegatronSplitInputsTargets(EOD, True, build["mask_loss"])
  for position, masks in enumerate(expected["masks"][: len(stream)]):
    found = fields.map(stream.source[position])
    assert found["targets_segmentation"].tolist() == masks["loss_mask"]
    assert found["inputs_position"].tolist() == found["targets_position"].tolist() == masks["position_ids"]


# Hosts.


@pytest.mark.parametrize("hosts", [1, 2, 4])
@pytest.mark.parametrize("name", ["d7", "full-validation", "one-unweighted"])
def test_hosts_together_read_megatrons_samples_in_stride_order(streams, name, hosts):
  (build,) = [build for build in BLENDS["builds"] if build["name"] == name]
  stream = streams(build, 0)
  iterators = [iter(GlobalOrderDataset(TextRows(stream.source), 4, host, hosts, stream.order)) for host in range(hosts)]
  read = []
  for _ in range(2):
    batches = [next(iterator)["text"] for iterator in iterators]
    assert {batch.shape for batch in batches} == {(4 // hosts, build["seq_length"] + 1)}
    union = np.empty((4, build["seq_length"] + 1), np.int32)
    for host, batch in enumerate(batches):
      union[host::hosts] = batch
    read += union.tolist()
  assert read == build["parts"][0]["samples"][:8]


# Evaluation.


def config_of(settings, train_iters, eval_interval, eval_iters, batch):
  """The keys of a run whose evaluation is pinned to the samples that Megatron builds its validation split for."""
  return types.SimpleNamespace(
    grain_eval_files=settings.files,
    max_target_length=settings.seq_length,
    mmap_eod_id=EOD,
    data_shuffle_seed=settings.seed,
    mmap_npy_num_eval_samples=(train_iters // eval_interval + 1) * eval_iters * batch,
    mmap_npy_split=settings.split,
    mmap_split_sentences=False,
    mmap_npy_blend_margin=0.5,
    blend_cache_dir="",
    blend_index_dir="",
    eval_steps=eval_iters,
    global_batch_size_to_load_eval=batch, global_batch_size_to_eval_on=batch,
  )


@pytest.mark.parametrize(
  "build", [build for build in BLENDS["builds"] if "run" in build], ids=lambda build: build["name"]
)
def test_evaluation_is_megatrons_validation_split(tmp_path, build):
  """Megatron asks its validation split for all evaluations together; that number pins the order here."""
  run = build["run"]
  settings = settings_for(config_of(settings_of(tmp_path, build, 1), **run), evaluation=True)
  stream, expected = open_stream(settings), build["parts"][1]
  assert settings.num_samples == build["sizes"][1]
  for child, golden in zip(stream.children, expected["children"], strict=True):
    for name, array in zip(INDICES, child.index.arrays, strict=True):
      assert_as_summarised(array, golden[name], f"child {child.number} {name}")
  tokens = stream.source.read_rows(np.arange(build["sizes"][1]))
  assert hashlib.sha256(np.ascontiguousarray(tokens, "<i4")).hexdigest() == expected["tokens"]["sha256"]


@pytest.mark.parametrize("name", ["eval-alone-32", "eval-blend-96"])
def test_the_batches_of_a_runs_evaluation_are_megatrons(tmp_path, monkeypatch, name):
  """Through a whole config and its evaluation iterator: tokens, loss masks and positions of the first evaluation."""
  from maxtext.configs import pyconfig
  from maxtext.input_pipeline import grain_data_processing
  from maxtext.utils import maxtext_utils

  monkeypatch.chdir(tmp_path)
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()  # Grain looks at its flags; a training run has parsed them
  (build,) = [build for build in BLENDS["builds"] if build["name"] == name]
  expected, run, files = build["parts"][1], build["run"], files_of(tmp_path, build, 1)
  settings = {
    "skip_jax_distributed_system": True, "run_name": "t", "base_output_directory": tmp_path, "model_name": "gpt3-52k",
    "dataset_type": "grain", "grain_file_type": "mmap_npy", "grain_train_files": f"'{files}'",
    "grain_eval_files": f"'{files}'", "max_target_length": build["seq_length"], "vocab_size": 100_000, "mmap_eod_id": EOD,
    "data_shuffle_seed": build["seed"], "mmap_npy_split": f"'{build['split']}'", "packing_max_segments_per_sample": 0,
    "eval_interval": run["eval_interval"], "eval_steps": run["eval_iters"], "eval_per_device_batch_size": run["batch"],
    "mmap_npy_num_eval_samples": build["sizes"][1], "steps": run["train_iters"], "override_model_config": True,
  }  # fmt: skip
  config = pyconfig.initialize(["", "base.yml", *(f"{key}={value}" for key, value in settings.items())])
  assert config.global_batch_size_to_load_eval == run["batch"]
  mesh = maxtext_utils.get_mesh_from_config(config)
  iterator = grain_data_processing.make_grain_eval_iterator(config, mesh, [0])
  for _ in range(2):  # every evaluation begins with the first
    iterator.reset()
    batches = [{field: np.asarray(values) for field, values in next(iterator).items()} for _ in range(run["eval_iters"])]
    fields = {field: np.concatenate([batch[field] for batch in batches]) for field in batches[0]}
    assert len(fields["inputs"]) == run["eval_iters"] * run["batch"]
    for row, tokens in enumerate(expected["samples"][: len(fields["inputs"])]):
      assert [*fields["inputs"][row].tolist(), int(fields["targets"][row, -1])] == tokens
    for row, masks in enumerate(expected["masks"]):
      assert fields["targets_segmentation"][row].tolist() == masks["loss_mask"]
      assert fields["targets_position"][row].tolist() == masks["position_ids"]
