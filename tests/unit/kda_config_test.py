# SPDX-License-Identifier: Apache-2.0
"""The config keys of Kimi Delta Attention: defaults, refusals in one sentence, context parallelism."""

import subprocess
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from maxtext.configs import _kda_config, pyconfig, types
from maxtext.configs._kda_config import KdaConfigError
from support import one_sentence

TOKAMAX = {
    "kda_implementation": "tokamax",
    "max_kda_segments": 32,
    "use_kda_safe_gate": True,
    "kda_lower_bound": -5.0,
    "max_target_length": 512,
}


def keys(**given) -> SimpleNamespace:
  """The keys that are checked, at their defaults but for those given."""
  defaults = {name: field.default for name, field in types.KimiDeltaAttention.model_fields.items()}
  others = {"max_target_length": 100, "context_sharding": "context", "context_parallel_load_balance": True}
  return SimpleNamespace(**defaults | others | {"decoder_block": types.DecoderBlockType.LLAMA2} | given)


def refused(uses_kda: bool = False, **given) -> str:
  with pytest.raises(KdaConfigError) as caught:
    _kda_config.validate(keys(**given), uses_kda)
  return one_sentence(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"use_kda_safe_gate": True, "kda_lower_bound": -5.0},
        {"use_kda_safe_gate": True, "kda_lower_bound": -1e30},
        {"kda_implementation": "pallas"},
        {"kda_implementation": "tops", "max_kda_segments": 8},
        TOKAMAX,
    ],
    ids=str,
)
def test_what_can_be_used(given):
  _kda_config.validate(keys(**given), uses_kda=True)


@pytest.mark.parametrize("bound", [0.0, 5.0, float("-inf"), float("nan"), -1e37, -1e-60])
def test_the_safe_gate_needs_a_bound_that_a_chunk_can_hold(bound):
  sentence = refused(use_kda_safe_gate=True, kda_lower_bound=bound)
  assert sentence.startswith(f"kda_lower_bound is {bound} and use_kda_safe_gate is true")


def test_a_bound_without_the_safe_gate_is_refused():
  assert "use_kda_safe_gate is false" in refused(kda_lower_bound=-5.0)


@pytest.mark.parametrize(
    "given, beginning",
    [
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim is 0"),
        ({"max_kda_segments": -1}, "max_kda_segments is -1"),
        ({"kda_implementation": "triton"}, "kda_implementation is 'triton'; expected one of auto, pallas, xla"),
        ({"kda_implementation": "tops"}, "max_kda_segments is 0 and kda_implementation is tops"),
        (TOKAMAX | {"max_kda_segments": 0}, "max_kda_segments is 0 and kda_implementation is tokamax"),
        (TOKAMAX | {"use_kda_safe_gate": False, "kda_lower_bound": 0.0}, "use_kda_safe_gate is false and kda_impl"),
        (TOKAMAX | {"kda_lower_bound": -5.5}, "kda_lower_bound is -5.5 and kda_implementation is tokamax"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(given, beginning):
  assert refused(**given).startswith(beginning)


def test_the_bound_of_tokamax_is_the_installed_one():
  from tokamax._src.ops.kda import api

  wide, flat = jnp.ones((1, 1, 64, 16)), jnp.ones((1, 1, 64))
  with pytest.raises(ValueError, match=rf"\[{_kda_config._TOKAMAX_BOUND:g}, 0\)"):
    gate = {"a_log": flat[0, 0, :1], "use_gate_in_kernel": True, "lower_bound": -5.5}
    api.kimi_delta_attention(wide, wide, wide, wide, flat, **gate, implementation="xla")


AXES = ["ici_context_parallelism", "dcn_context_parallelism", "ici_context_usp_ulysses_parallelism"]


@pytest.mark.parametrize("axis", AXES)
def test_load_balanced_context_parallelism_is_refused_for_models_with_kda(axis):
  sentence = refused(True, **{axis: 4})
  assert sentence.startswith("context_parallel_load_balance is true and 4 devices share each row")
  _kda_config.validate(keys(**{axis: 4}, context_parallel_load_balance=False), uses_kda=True)
  _kda_config.validate(keys(**{axis: 4}), uses_kda=False)


def test_the_axis_that_shards_rows_may_be_the_experts_one():
  assert "(expert 2)" in refused(True, context_sharding="expert", ici_expert_parallelism=2)
  _kda_config.validate(keys(ici_expert_parallelism=2), uses_kda=True)


def test_context_parallelism_is_not_for_other_libraries_kernels():
  sentence = refused(True, **TOKAMAX, ici_context_parallelism=2, context_parallel_load_balance=False)
  assert sentence.startswith("kda_implementation is tokamax, which cannot continue a segment")


@pytest.fixture
def load(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  fixed = ["skip_jax_distributed_system=true", "run_name=t", f"base_output_directory={tmp_path}", "hardware=cpu"]
  return lambda *given: pyconfig.initialize(["", "base.yml", *fixed, *given])


def test_keys_are_read_and_checked_with_the_config(load):
  config = load("use_kda_safe_gate=true", "kda_lower_bound=-5", "max_kda_segments=16", "kda_implementation=reference")
  found = (config.linear_conv_kernel_dim, config.kda_lower_bound, config.max_kda_segments, config.kda_implementation)
  assert found == (4, -5.0, 16, "reference")
  with pytest.raises(ValueError, match="kda_lower_bound is 1.0 and use_kda_safe_gate is true"):
    load("use_kda_safe_gate=true", "kda_lower_bound=1")


def test_both_config_classes_have_the_keys():
  for name in types.KimiDeltaAttention.model_fields:
    assert name in types.MaxTextConfig.model_fields and name in types.RLConfig.model_fields


def test_a_decoder_block_that_uses_kda_switches_the_checks_on(load, monkeypatch):
  monkeypatch.setattr(_kda_config, "DECODER_BLOCKS", frozenset({"llama2"}))
  with pytest.raises(ValueError, match="context_parallel_load_balance is true and 2 devices share each row"):
    load("decoder_block=llama2", "ici_context_parallelism=2")
  load("decoder_block=gemma", "ici_context_parallelism=2")


def test_a_bad_key_is_one_sentence_and_exit_code_2(tmp_path):
  """In a process of its own: under pytest the handler raises."""
  code = """
from maxtext.configs import pyconfig
pyconfig.initialize(["", "base.yml", "run_name=t", "skip_jax_distributed_system=true", "kda_lower_bound=-5"])
"""
  command = [sys.executable, "-c", code]
  done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
  assert done.returncode == 2, done.stderr
  assert done.stderr.strip().splitlines()[-1].startswith("kda_lower_bound is -5.0 and use_kda_safe_gate is false")
