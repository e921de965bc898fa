# SPDX-License-Identifier: Apache-2.0
"""Which file a config argument means, which model config belongs to it, and what is refused."""

import importlib
import os
from pathlib import Path
import subprocess
import sys

import omegaconf
import pytest

from maxtext.configs import pyconfig, types

OURS = Path(pyconfig.__file__).parent
RELEASED = OURS.parent / "_release" / "configs"
MODELS = sorted(file.stem for file in RELEASED.glob("models/*.yml"))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
  """A working directory without configs, so that nothing is found by accident."""
  monkeypatch.chdir(tmp_path)
  return tmp_path


def arguments(tmp_path, *extra):
  return ["skip_jax_distributed_system=true", "run_name=t", f"base_output_directory={tmp_path}", *extra]


def load(tmp_path, *args):
  """A whole config from an optional YAML name and keys."""
  yaml = [a for a in args if a.endswith(".yml")]
  return pyconfig.initialize(["", *yaml, *arguments(tmp_path, *(a for a in args if a not in yaml))])


@pytest.mark.parametrize("argument", [
  "base.yml", "src/maxtext/configs/base.yml", "maxtext/configs/base.yml", str(OURS / "base.yml"),
  str(RELEASED / "base.yml"),  # how released tools name it
])
def test_names_of_the_base_config(argument):
  assert pyconfig.resolve_config_path(argument) == str(OURS / "base.yml")


@pytest.mark.parametrize("name", [
  "post_train/sft.yml", "inference/inference.yml", "gpu/gpu_smoke_test.yml", "tpu/tpu_smoke_test.yml",
])
def test_names_of_released_configs(name):
  for argument in (name, f"src/maxtext/configs/{name}", str(OURS / name), str(RELEASED / name)):
    assert pyconfig.resolve_config_path(argument) == str(RELEASED / name)
  assert pyconfig._load_config(str(RELEASED / name)).mmap_npy_num_samples == 0, "not over our base.yml"


def test_the_repository_path_works_in_the_repository(monkeypatch):
  monkeypatch.chdir(OURS.parents[2])
  path = pyconfig.resolve_config_path("src/maxtext/configs/base.yml")
  assert os.path.samefile(path, OURS / "base.yml")


def test_a_base_config_is_a_name_too():
  path, rest = pyconfig._resolve_or_infer_config(["", "a=1"], base_config="post_train/sft.yml")
  assert (path, rest) == (str(RELEASED / "post_train/sft.yml"), ["a=1"])


def test_a_users_yaml_anywhere(tmp_path):
  (tmp_path / "mine").mkdir()
  mine = tmp_path / "mine" / "run.yml"
  mine.write_text('base_config: "base.yml"\nper_device_batch_size: 3\nmmap_npy_num_samples: 11\n')
  config = load(tmp_path, str(mine), "model_name=gpt3-52k")
  assert (config.per_device_batch_size, config.mmap_npy_num_samples, config.emb_dim) == (3, 11, 16)


def test_a_users_base_yml_over_ours(tmp_path):
  (tmp_path / "base.yml").write_text('base_config: "base.yml"\nsteps: 77\n')
  cfg = pyconfig._load_config(str(tmp_path / "base.yml"))
  assert (cfg.steps, cfg.mmap_npy_num_samples) == (77, 0)


def test_a_base_beside_the_file_comes_first(tmp_path):
  (tmp_path / "common.yml").write_text('base_config: "base.yml"\nsteps: 5\nseed: 6\n')
  (tmp_path / "run.yml").write_text('base_config: "common.yml"\nsteps: 7\n')
  cfg = pyconfig._load_config(str(tmp_path / "run.yml"))
  assert (cfg.steps, cfg.seed, cfg.mmap_npy_num_samples) == (7, 6, 0)


def test_without_a_config_argument(tmp_path):
  assert pyconfig.initialize(["", *arguments(tmp_path)]).mmap_npy_num_samples == 0
  assert pyconfig._resolve_or_infer_config() == (str(OURS / "base.yml"), [])


@pytest.mark.parametrize("module, name", sorted(pyconfig._CONFIG_FILE_MAPPING.items()))
def test_default_config_of_every_entry_point(module, name):
  script = OURS.parent / "_release" / Path(*module.split(".")[1:]).with_suffix(".py")
  if not script.is_file():
    pytest.skip("the release names this module but does not have it")
  path, rest = pyconfig._resolve_or_infer_config([str(script), "steps=1"])
  assert (path, rest) == (str((OURS if name == "base.yml" else RELEASED) / name), ["steps=1"])


def test_module_from_path():
  assert pyconfig._module_from_path(str(OURS / "types.py")) == "maxtext.configs.types"
  assert pyconfig._module_from_path(str(RELEASED / "types.py")) == "maxtext.configs.types"
  assert pyconfig._module_from_path("/somewhere/train.py") is None


def test_a_missing_config_names_close_ones():
  sentence = r"'post_train/sfd\.yml' was not found.*did you mean post_train/sft\.yml"
  with pytest.raises(pyconfig.ConfigNotFoundError, match=sentence):
    pyconfig._load_config(pyconfig.resolve_config_path("post_train/sfd.yml"))


def test_a_missing_base_config_names_the_file_and_the_key(tmp_path):
  (tmp_path / "run.yml").write_text('base_config: "bse.yml"\n')
  sentence = r"run\.yml: base_config 'bse\.yml' was not found.*did you mean base\.yml"
  with pytest.raises(pyconfig.ConfigNotFoundError, match=sentence):
    pyconfig._load_config(str(tmp_path / "run.yml"))


@pytest.mark.parametrize("name", sorted(
  str(file.relative_to(RELEASED)) for file in RELEASED.rglob("*.yml") if "base_config:" in file.read_text()
))
def test_every_released_config_with_a_base_loads_over_ours(name):
  assert pyconfig._load_config(str(RELEASED / name)).mmap_npy_num_samples == 0


def find_model(config_path, model):
  """The model config that the release's lookup ends at, and how it is found: as `_initialize_pydantic` does it."""
  pyconfig._resolve_or_infer_config(["", str(config_path)])
  pyconfig._resolve_or_infer_addl_config(model_name=model, base_output_directory="x")
  folders = [Path(config_path).parent, Path(config_path).parent.parent, Path(pyconfig.release.__file__).parent]
  return next(f for folder in folders if (f := folder / "models" / f"{model.replace('-Instruct', '')}.yml").is_file())


@pytest.mark.parametrize("model", MODELS)
def test_every_released_model_is_found(model, tmp_path):
  (tmp_path / "run.yml").write_text('base_config: "base.yml"\n')
  for config in (OURS / "base.yml", RELEASED / "post_train/sft.yml", tmp_path / "run.yml"):
    assert find_model(config, model) == RELEASED / "models" / f"{model}.yml"
  assert find_model(tmp_path / "run.yml", f"{model}-Instruct") == RELEASED / "models" / f"{model}.yml"


def test_a_model_beside_the_users_config_comes_first(tmp_path):
  (tmp_path / "models").mkdir()
  (tmp_path / "run.yml").write_text('base_config: "base.yml"\n')
  own = tmp_path / "models" / "gpt3-52k.yml"
  released = (RELEASED / "models/gpt3-52k.yml").read_text()
  own.write_text(released.replace("base_num_decoder_layers: 1", "base_num_decoder_layers: 3"))
  assert find_model(tmp_path / "run.yml", "gpt3-52k") == own
  assert load(tmp_path, str(tmp_path / "run.yml"), "model_name=gpt3-52k").base_num_decoder_layers == 3


def test_a_model_of_ours_is_found_from_every_config(tmp_path, monkeypatch):
  ours = tmp_path / "ours"
  (ours / "models").mkdir(parents=True)
  (ours / "models/llama2-7b.yml").write_text("base_num_decoder_layers: 2\n")
  (tmp_path / "run.yml").write_text('base_config: "base.yml"\n')
  monkeypatch.setattr(pyconfig, "_CONFIG_DIRS", (ours, RELEASED))
  assert find_model(tmp_path / "run.yml", "llama2-7b") == ours / "models/llama2-7b.yml"
  assert find_model(tmp_path / "run.yml", "gpt3-52k") == RELEASED / "models/gpt3-52k.yml"


def test_no_model_of_ours_has_the_name_of_a_released_one():
  """A released config finds the release's models beside itself, before ours."""
  assert not {file.stem for file in OURS.glob("models/*.yml")} & {*MODELS}


def test_a_config_can_be_its_own_model():
  """The release's omni pipeline describes its model in the base config of its run configs, under the model's name."""
  name = "experimental/omni_pipeline/configs/sft-maxtext-omni-gemma3-qwen3.yml"
  path = pyconfig.resolve_config_path(f"src/maxtext/{name}")
  assert path == str(RELEASED.parent / name)
  pyconfig._resolve_or_infer_config(["", path])
  pyconfig._resolve_or_infer_addl_config(**pyconfig._load_config(path))


def test_a_missing_model_is_an_error_that_names_close_ones(tmp_path):
  sentence = r"model_name 'llama2-7' has no config.*did you mean .*llama2-7b"
  with pytest.raises(pyconfig.ConfigNotFoundError, match=sentence) as caught:
    load(tmp_path, "base.yml", "model_name=llama2-7")
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["gpt3-52k", "llama2-7b", "deepseek2-16b", "qwen3-0.6b", "llama3.1-8b-Instruct"])
def test_some_models_load_whole(model, tmp_path):
  config = load(tmp_path, f"model_name={model}")
  cfg = omegaconf.OmegaConf.load(RELEASED / "models" / f"{model.replace('-Instruct', '')}.yml")
  assert config.base_num_decoder_layers == cfg.base_num_decoder_layers


@pytest.mark.parametrize("name", ["post_train/sft.yml", "post_train/dpo.yml", "gpu/gpu_smoke_test.yml"])
def test_released_configs_load_whole(name, tmp_path):
  assert load(tmp_path, name, "hf_path=x", "tokenizer_path=x").mmap_npy_num_samples == 0


@pytest.mark.parametrize("name", ["post_train/rl.yml", "post_train/rl_mt_jt.yml", "inference/vllm.yml", "base.yml"])
def test_reinforcement_learning_configs_are_accepted(name):
  fields = types.RLConfig.model_fields
  cfg = pyconfig._load_config(pyconfig.resolve_config_path(name))
  assert [key for key in cfg if not pyconfig._check_for_invalid_keys(key, fields)] == []


def test_the_rl_config_loads_whole(tmp_path):
  argv = ["", "post_train/rl.yml", *arguments(tmp_path, "tokenizer_path=x", "mmap_npy_num_samples=3")]
  config = pyconfig.initialize_pydantic(argv, config_class=types.RLConfig)
  assert isinstance(config, types.release.RLConfig) and config.mmap_npy_num_samples == 3


def test_an_unknown_key_is_refused(tmp_path):
  with pytest.raises(ValueError, match="'mmap_npy_samples' not in"):
    load(tmp_path, "base.yml", "mmap_npy_samples=1")


def test_the_module_can_be_called_and_has_hidden_names(tmp_path):
  config = pyconfig(["", "base.yml", *arguments(tmp_path)])
  assert isinstance(config, pyconfig.HyperParameters)
  assert isinstance(config._pydantic_config, types.MaxTextConfig)
  assert isinstance(config._pydantic_config, types.release.MaxTextConfig)
  deprecated = importlib.import_module("maxtext.configs.pyconfig_deprecated")
  assert pyconfig.validate_and_update_keys is deprecated.validate_and_update_keys


def test_reloading_the_stand_in_changes_nothing():
  """`python -m` can load a module twice; the rebinding must not stack up."""
  wrapped = pyconfig.release._resolve_or_infer_addl_config.__wrapped__
  importlib.reload(pyconfig)
  assert pyconfig.release._resolve_or_infer_addl_config is pyconfig._resolve_or_infer_addl_config
  assert pyconfig._resolve_or_infer_addl_config.__wrapped__ is wrapped


SAMPLE = "mmap_npy_megatron_gpt.yml"


def test_the_sample_for_megatron_semantics():
  cfg = pyconfig._load_config(pyconfig.resolve_config_path(SAMPLE))
  expected = {
    "dataset_type": "grain", "grain_file_type": "mmap_npy", "max_target_length": 2048, "mmap_eod_id": 2,
    "data_shuffle_seed": 1234, "reset_attention_mask": True, "eod_mask_loss": False,
    "packing_max_segments_per_sample": 0, "mmap_npy_split": "", "mmap_npy_num_samples": 0,
  }
  assert {key: cfg[key] for key in expected} == expected
  own = omegaconf.OmegaConf.load(OURS / SAMPLE)
  assert {*own} <= {*pyconfig._load_config(str(OURS / "base.yml")), "base_config"}


def test_the_data_check_runs_after_the_derived_values(tmp_path, monkeypatch):
  from maxtext.input_pipeline import _mmap_config

  seen = []
  monkeypatch.setattr(_mmap_config, "validate", lambda c: seen.append((c.global_batch_size_to_train_on, c.steps)))
  load(tmp_path, SAMPLE, "grain_train_files=a|b", "steps=9", "per_device_batch_size=2", "tokenizer_path=x")
  load(tmp_path, "base.yml", "dataset_type=synthetic", "grain_file_type=mmap_npy")
  load(tmp_path, "base.yml", "dataset_type=grain", "grain_train_files=x", "tokenizer_path=x")
  assert len(seen) == 1 and seen[0][1] == 9 and seen[0][0] % 2 == 0 and seen[0][0] > 0


def test_bad_data_is_one_sentence_and_exit_code_2(tmp_path):
  """In a process of its own: under pytest the handler raises."""
  code = """
import sys
from maxtext.configs import pyconfig
from maxtext.input_pipeline import _mmap_config, _mmap_indexed_dataset
def validate(config):
  raise _mmap_indexed_dataset.MMapError("x.idx has bad magic; expected MMIDIDX.")
_mmap_config.validate = validate
pyconfig.initialize(sys.argv)
"""
  argv = [SAMPLE, *arguments(tmp_path, "grain_train_files=a|b", "tokenizer_path=x")]
  done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=120, check=False)
  assert done.returncode == 2
  assert done.stderr.strip().splitlines()[-1] == "x.idx has bad magic; expected MMIDIDX."
  assert "validation error" not in done.stderr + done.stdout and "Traceback" not in done.stderr
