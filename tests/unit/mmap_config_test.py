# SPDX-License-Identifier: Apache-2.0
"""Each config key of the Megatron file types that cannot be used is refused in one sentence that names it."""

import pydantic
import pytest

from maxtext.configs import pyconfig
from maxtext.input_pipeline import _mmap_config
from maxtext.input_pipeline._mmap_indexed_dataset import MMapError

FILES = "npy|data/corpus"


@pytest.fixture
def load(tmp_path, monkeypatch):
  """Reads a config of a Megatron run with some keys changed; none of its files exists."""
  monkeypatch.chdir(tmp_path)

  def read(**keys):
    settings = {
      "skip_jax_distributed_system": True, "run_name": "t", "base_output_directory": tmp_path, "model_name": "gpt3-52k",
      "dataset_type": "grain", "grain_file_type": "mmap_npy", "grain_train_files": FILES, "steps": 10, **keys,
    }  # fmt: skip
    return pyconfig.initialize(["", "base.yml", *(f"{key}={value}" for key, value in settings.items())])

  return read


@pytest.fixture
def refusal(load):
  """The sentence that a config is refused with, as a user sees it."""

  def read(**keys) -> str:
    with pytest.raises((pydantic.ValidationError, MMapError)) as caught:
      load(**keys)
    error = pyconfig._error_for_user(caught.value)
    assert isinstance(error, MMapError), caught.value
    message = str(error)
    assert "\n" not in message and message.endswith("."), message
    return message

  return read


def test_a_config_that_can_be_used(load):
  config = load(per_device_batch_size=3, mmap_eod_id=5)
  assert _mmap_config.uses_megatron_data(config)
  samples = 10 * config.global_batch_size_to_train_on
  assert _mmap_config.train_samples(config) == samples == 10 * 3 * config.num_target_devices
  assert _mmap_config.eval_samples(config) is None


def test_a_pinned_sample_count(load):
  assert _mmap_config.train_samples(load(mmap_npy_num_samples=77)) == 77


def test_evaluation_samples(load):
  config = load(eval_interval=5, eval_steps=4, grain_eval_files=FILES)
  assert _mmap_config.eval_samples(config) == 4 * config.global_batch_size_to_eval_on > 0


@pytest.mark.parametrize(
  "keys",
  [{"dataset_type": "synthetic"}, {"grain_file_type": "arrayrecord", "tokenizer_path": "x"}],
  ids=["another dataset_type", "another file type"],
)
def test_other_datasets_are_not_checked(load, keys):
  config = load(mmap_npy_split="abc", mmap_eod_id=10**6, grain_train_files="no entry", **keys)
  assert not _mmap_config.uses_megatron_data(config)


def test_digests_of_other_data_are_refused(refusal):
  message = refusal(dataset_type="synthetic", log_batch_digest=True)
  assert "log_batch_digest is true, and the run reads no Megatron dataset" in message


def test_the_unordered_file_type_has_no_index_folder_and_no_order(refusal):
  assert "has an index folder before '|', and grain_file_type=mmap has no indices" in refusal(grain_file_type="mmap")
  message = refusal(grain_file_type="mmap", grain_train_files="data/corpus", mmap_npy_num_samples=8)
  assert "mmap_npy_num_samples is set, but grain_file_type=mmap has no such order; use mmap_npy" in message


# Files.


@pytest.mark.parametrize("file_type", ["mmap", "mmap_npy"])
def test_no_training_files(refusal, file_type):
  assert "grain_train_files is empty" in refusal(grain_file_type=file_type, grain_train_files="")


def test_no_evaluation_files_where_a_run_evaluates(refusal, load):
  assert "grain_eval_files is empty" in refusal(eval_interval=5, eval_steps=4)
  assert load(eval_interval=-1, eval_steps=4).eval_interval == -1


BAD_FILES = [
  ("data/corpus", "'data/corpus' is not 'npy_dir|bin_prefix_or_directory'"),
  ("npy|a::b", "'a::b' has an empty path; give one path, or several joined by ':'"),
  ("npy|a,1;b,1", "'b' is not 'npy_dir|bin_prefix_or_directory'"),
  ("npy|a,1;npy|b", "entry 1 is 'npy|b'; expected 'entry,weight'"),
  ("npy|a,0;npy|b,0", "the weights add up to 0"),
]


@pytest.mark.parametrize("text, expected", BAD_FILES)
def test_files_that_cannot_be_parsed(refusal, text, expected):
  message = refusal(grain_train_files=text)
  assert expected in message


@pytest.mark.parametrize("text", ["npy|gs://bucket/corpus", "npy|a:b", "npy|a,1;npy|b,1", "npy|a;npy|b", "s3://b/n|s3://b/p"])
def test_files_of_every_form(load, text):
  assert load(grain_train_files=text).grain_train_files == text


def test_a_weighted_blend_needs_a_size(refusal, load):
  blend = {"eval_interval": 5, "grain_eval_files": "npy|a,1;npy|b,1"}
  assert "grain_eval_files is a blend with weights, and eval_steps is -1; set eval_steps or" in refusal(**blend)
  assert _mmap_config.eval_samples(load(**blend, mmap_npy_num_eval_samples=9)) == 9


def test_a_start_sample_adds_to_what_is_asked_for(load):
  config = load(mmap_npy_start_sample=100)
  assert _mmap_config.train_samples(config) == 100 + config.steps * config.global_batch_size_to_train_on
  assert _mmap_config.train_samples(load(mmap_npy_start_sample=100, mmap_npy_num_samples=7)) == 7


@pytest.mark.parametrize("share", ["", "eval_"])
def test_less_than_one_sample_a_step(refusal, load, share):

  keys = {f"{share}per_device_batch_size": 0.5, "grain_eval_files": FILES, "eval_steps": 2}
  message = refusal(eval_interval=5, **keys)
  assert f"{share}per_device_batch_size is 0.5, which is less than one sample a step on all devices together" in message
  if share:
    assert load(**keys).global_batch_size_to_eval_on == 0, "of no account where a run does not evaluate"


@pytest.mark.parametrize("text, expected", BAD_FILES[:1])
def test_evaluation_files_are_checked_where_a_run_evaluates(refusal, load, text, expected):
  message = refusal(grain_eval_files=text, eval_interval=5)
  assert message.startswith("grain_eval_files") and expected in message
  assert load(grain_eval_files=text, eval_interval=-1).grain_eval_files == text


# Numbers.


def test_sample_count(refusal):
  assert "mmap_npy_num_samples is -1; expected 0 or more" in refusal(mmap_npy_num_samples=-1)


def test_eod_id_must_be_in_the_vocabulary(refusal, load):
  assert "mmap_eod_id is -1; expected" in refusal(mmap_eod_id=-1)
  size = load().vocab_size
  assert load(mmap_eod_id=size - 1).mmap_eod_id == size - 1
  message = refusal(mmap_eod_id=size)
  assert f"mmap_eod_id is {size}, outside the vocabulary (vocab_size={size})" in message


@pytest.mark.parametrize("value", [-1, 2**32])
def test_seed(refusal, value):
  assert f"data_shuffle_seed is {value}; expected 0 to 4294967295" in refusal(data_shuffle_seed=value)


def test_sequence_length(refusal):
  assert "max_target_length is 0; expected" in refusal(max_target_length=0)


# Splits.


@pytest.mark.parametrize("split", ["train", "-1,2", "1,2,3,4", "0,0"])
def test_d6_split_that_cannot_be_parsed(refusal, split):
  message = refusal(mmap_npy_split=split)
  assert message.startswith("mmap_npy_split: ") and repr(split) in message


def test_d6_split_must_give_to_who_reads(refusal, load):
  assert load(mmap_npy_split="1,0", eval_interval=-1).mmap_npy_split == "1,0"
  assert load(mmap_npy_split="99,1", eval_interval=5, grain_eval_files=FILES).mmap_npy_split == "99,1"
  message = refusal(mmap_npy_split="0,1")
  assert "mmap_npy_split is '0,1' and gives the train part nothing, but training reads it" in message
  message = refusal(mmap_npy_split="1,0,1", eval_interval=5, grain_eval_files=FILES)
  assert "mmap_npy_split is '1,0,1' and gives the valid part nothing, but evaluation reads it" in message


# Ways of training and loading that would read the data in another order.


@pytest.mark.parametrize(
  "key, others",
  [
    ("use_sft", {}),
    ("use_dpo", {"packing": False}),
    ("enable_rampup_batch_size", {}),
    ("colocated_python_data_input", {"expansion_factor_real_data": 1, "enable_single_controller": True}),
  ],
)
def test_modes(refusal, key, others):
  assert f"{key} is true, which grain_file_type=mmap_npy does not support" in refusal(**{key: True}, **others)


def test_elastic_iterator_is_refused_by_the_release(load):
  with pytest.raises(pydantic.ValidationError, match="`grain_use_elastic_iterator=True` only supports"):
    load(grain_use_elastic_iterator=True)


def test_expansion_factor(refusal, load):
  message = refusal(expansion_factor_real_data=2)
  assert "expansion_factor_real_data is 2.0" in message and "every host loads its own data" in message
  assert load(expansion_factor_real_data=1).expansion_factor_real_data == 1
