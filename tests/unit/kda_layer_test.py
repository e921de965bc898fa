# SPDX-License-Identifier: Apache-2.0
"""The Kimi Delta Attention layer: parameters, documents packed and apart, other kernels, low precision, refusals."""

import logging
import os
import re

from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_layer_support import EMBED, HEAD_DIM, HEADS, SAFE, flat, make_layer, normal, read_config, relative, runner
from maxtext.kernels import kda
from maxtext.layers import _kda_mixer
from maxtext.layers.attention_kda import KimiDeltaAttention
from support import one_sentence

LENGTH = 24
FAST = {"kda_implementation": "reference"}  # what is tested here is the layer around the kernel


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp("layer")


@pytest.fixture(scope="module")
def layer(folder) -> KimiDeltaAttention:
  return make_layer(read_config(folder, **FAST, **SAFE))


@pytest.fixture(scope="module")
def run(layer):
  return runner(layer)


def test_parameters(layer):
  shapes = {name: value.shape for name, value in flat(nnx.state(layer)).items()}
  wide = (EMBED, HEADS, HEAD_DIM)
  projections = ("query", "key", "value", "forget_gate", "output_gate")
  assert shapes == {
      **{f"{name}/kernel": wide for name in projections},
      **{f"{name}_conv/kernel": (4, HEADS, HEAD_DIM) for name in projections[:3]},
      "beta/kernel": (EMBED, HEADS),
      "out/kernel": (HEADS, HEAD_DIM, EMBED),
      "norm/scale": (HEAD_DIM,),
      "A_log": (HEADS,),
      "dt_bias": (HEADS * HEAD_DIM,),
  }


def test_rates_start_in_their_ranges(layer):
  rates, steps = np.exp(layer.A_log[...]), np.log1p(np.exp(layer.dt_bias[...]))
  assert (rates >= 1).all() and (rates <= 16).all()
  assert (steps >= 0.999e-3).all() and (steps <= 0.1001).all() and np.ptp(steps) > 0.01


def rows(lengths: list[list[int]]) -> np.ndarray:
  """Ids of rows of documents, cut at LENGTH: a negative length is padding."""
  ids = np.zeros((len(lengths), LENGTH), np.int32)
  for row, parts in zip(ids, lengths, strict=True):
    first = 0
    for number, part in enumerate(parts, 1):
      row[first : first + abs(part)] = number if part > 0 else 0
      first += abs(part)
  return ids


PARTS = st.lists(st.integers(-4, 16), max_size=6)


@settings(max_examples=200 if os.environ.get("HYPOTHESIS_PROFILE") == "long" else 8)
@given(first=PARTS, second=PARTS)
@example(first=[7, 1, 16], second=[-2, 3, 15, -4])
@example(first=[1] * 24, second=[-24])
def test_packed_documents_give_what_each_gives_alone(layer, run, first, second):
  ids, state = rows([first, second]), nnx.state(layer)
  x, cotangents = normal(1, 2, LENGTH, EMBED), normal(2, 2, LENGTH, EMBED)
  o, gradients, dx = run(state, x, ids, cotangents)
  expected_o, expected_dx = np.zeros(x.shape), np.zeros(x.shape)
  total = jax.tree.map(jnp.zeros_like, gradients)
  for row, number in ((at, n) for at in (0, 1) for n in np.unique(ids[at]) if n):
    mine = np.flatnonzero(ids[row] == number)
    alone = [np.zeros((2, LENGTH, EMBED), np.float32) for _ in range(2)]
    alone[0][0, : len(mine)], alone[1][0, : len(mine)] = x[row, mine], cotangents[row, mine]
    found = run(state, alone[0], (np.arange(LENGTH) < len(mine)) * np.array([[9], [0]], np.int32), alone[1])
    expected_o[row, mine], expected_dx[row, mine] = found[0][0, : len(mine)], found[2][0, : len(mine)]
    total = jax.tree.map(jnp.add, total, found[1])
  assert relative(o, expected_o) < 1e-5  # float32, in another order
  assert relative(dx, expected_dx) < 1e-4
  found = flat(gradients)
  for name, value in flat(total).items():
    assert relative(found[name], value) < 1e-4, name
  assert not np.asarray(o)[ids == 0].any() and not np.asarray(dx)[ids == 0].any()


def test_without_ids_rows_are_one_document(layer, run):
  state, x, cotangents = nnx.state(layer), normal(3, 2, LENGTH, EMBED), normal(4, 2, LENGTH, EMBED)
  ones = run(state, x, np.ones((2, LENGTH), np.int32), cotangents)
  for one, other in zip(jax.tree.leaves(run(state, x, None, cotangents)), jax.tree.leaves(ones), strict=True):
    assert relative(one, other) < 1e-5


def test_one_token(layer, run):
  x = normal(5, 2, LENGTH, EMBED)
  alone = layer(x[:, :1], decoder_segment_ids=jnp.ones((2, 1), jnp.int32))
  o = run(nnx.state(layer), x, np.ones((2, LENGTH), np.int32), x)[0]
  assert alone.shape == (2, 1, EMBED) and relative(alone, o[:, :1]) < 1e-5


def test_offsets_give_what_ids_give(folder, layer, run, monkeypatch):
  """The way of the kernels that take one flat row and offsets, with a kernel that can do both."""
  ids, x = rows([[7, 1, 12], [-2, 3, 15]]), normal(6, 2, LENGTH, EMBED)
  expected = run(nnx.state(layer), x, ids, x)
  monkeypatch.setattr(_kda_mixer, "_FLATTENED", ("reference",))
  flattening = runner(make_layer(read_config(folder, max_kda_segments=6, **FAST, **SAFE)))
  for one, other in zip(jax.tree.leaves(flattening(nnx.state(layer), x, ids, x)), jax.tree.leaves(expected), strict=True):
    assert relative(one, other) < 1e-5
  overfull = flattening(nnx.state(layer), x, rows([[1] * 7, [3]]), x)[0]
  assert np.isnan(np.asarray(overfull)[0, :7]).all(), "more segments than room"


def test_float32_parameters_and_a_bfloat16_run(folder, layer):
  config = read_config(folder, dtype="bfloat16", weight_dtype="bfloat16", matmul_precision="default", **FAST, **SAFE)
  low = make_layer(config)
  dtypes = {"/".join(map(str, path)): leaf[...].dtype for path, leaf in nnx.to_flat_state(nnx.state(low))}
  wide = {name for name, dtype in dtypes.items() if dtype == jnp.float32}
  assert wide == {"A_log", "dt_bias", "query_conv/kernel", "key_conv/kernel", "value_conv/kernel"}
  assert {dtypes[name] for name in {*dtypes} - wide} == {jnp.dtype(jnp.bfloat16)}
  x, ids = normal(7, 2, LENGTH, EMBED), rows([[7, 1, 16], [-2, 3, 15]])
  o, gradients, _ = runner(low)(nnx.state(low), x.astype(jnp.bfloat16), ids, x)
  assert o.dtype == jnp.bfloat16 and jnp.isfinite(o).all()
  assert {"/".join(map(str, path)): leaf[...].dtype for path, leaf in nnx.to_flat_state(gradients)} == dtypes
  # The same numbers in float32: what is left is rounding of activations, 2 ** -8 at each of a handful of steps.
  state = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), nnx.state(low))
  rounded = x.astype(jnp.bfloat16).astype(jnp.float32)
  exact = nnx.merge(nnx.graphdef(layer), state)(rounded, decoder_segment_ids=jnp.asarray(ids))
  assert relative(o, exact) < 0.03


def test_names_for_rematerialization(layer):
  graph, state = nnx.split(layer)
  jaxpr = str(jax.make_jaxpr(lambda state, x: nnx.merge(graph, state)(x))(state, jnp.ones((1, 8, EMBED))))
  names = re.findall(r"name\[name=(\w+)\]", jaxpr)
  assert sorted(names) == ["context", "key_proj", "kv_proj", "kv_proj", "kv_proj", "out_proj", "query_proj", "value_proj"]


def test_the_choice_of_a_kernel_is_logged_once(folder, caplog):
  kda._logged.clear()
  with caplog.at_level(logging.INFO, logger="absl"):
    layer = make_layer(read_config(folder, **SAFE))
    for _ in range(2):
      jax.eval_shape(layer, jax.ShapeDtypeStruct((1, 8, EMBED), jnp.float32))
  lines = [record.getMessage() for record in caplog.records if "Kimi Delta Attention" in record.getMessage()]
  assert lines == ["Kimi Delta Attention: implementation xla (auto, on cpu)."]


@pytest.mark.parametrize("mode", ["prefill", "autoregressive"])
def test_decoding_is_refused(layer, mode):
  with pytest.raises(ValueError, match=f"model_mode is '{mode}'; Kimi Delta Attention keeps no state") as caught:
    layer(jnp.ones((1, 4, EMBED)), model_mode=mode)
  one_sentence(caught.value)


def test_shapes_that_do_not_fit_are_refused(layer):
  with pytest.raises(ValueError, match=r"hidden_states has shape \(1, 4, 31\)") as caught:
    layer(jnp.ones((1, 4, 31)))
  one_sentence(caught.value)
  with pytest.raises(ValueError, match=r"decoder_segment_ids has shape \(1, 5\)") as caught:
    layer(jnp.ones((1, 4, EMBED)), decoder_segment_ids=jnp.ones((1, 5), jnp.int32))
  one_sentence(caught.value)
