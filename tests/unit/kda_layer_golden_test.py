# SPDX-License-Identifier: Apache-2.0
"""The layer against transformers' layer of Ling 3.0, with its parameters: documents packed here, one by one there."""

import json
import os
from pathlib import Path

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kda_layer_support import EMBED, HEAD_DIM, HEADS, SAFE, flat, make_layer, read_config, relative, runner

GOLDEN = Path(__file__).parents[1] / "golden" / "kda_layer.npz"
LENGTH = 72
# Where each document of the golden file lies: row, first token. The rest is padding, in front and at the end.
PLACES = ((0, 0), (1, 2), (1, 7), (1, 8))
GATES = {"safe": SAFE, "softplus": {}}
# The recurrence compiles in a third of the time of the chunked kernel.
CASES = [("safe", "xla"), ("softplus", "reference")]
if os.environ.get("HYPOTHESIS_PROFILE") == "long":
  CASES += [("safe", "reference"), ("softplus", "xla"), ("safe", "pallas"), ("softplus", "pallas")]
_BY_HEAD = (EMBED, HEADS, HEAD_DIM)
# Our parameters and transformers': torch's weights are [out, in].
PARAMETERS = {
    "query/kernel": ("q_proj.weight", _BY_HEAD),
    "key/kernel": ("k_proj.weight", _BY_HEAD),
    "value/kernel": ("v_proj.weight", _BY_HEAD),
    "forget_gate/kernel": ("forget_gate.f_proj.weight", _BY_HEAD),
    "output_gate/kernel": ("g_proj.weight", _BY_HEAD),
    "beta/kernel": ("b_proj.weight", (EMBED, HEADS)),
    "out/kernel": ("o_proj.weight", (HEADS, HEAD_DIM, EMBED)),
    "A_log": ("forget_gate.A_log", (HEADS,)),
    "dt_bias": ("forget_gate.dt_bias", (HEADS * HEAD_DIM,)),
    "norm/scale": ("o_norm.weight", (HEAD_DIM,)),
}
CONVOLUTIONS = ("query_conv/kernel", "key_conv/kernel", "value_conv/kernel")
THEIR_NAMES = {
    **{name: other for name, (other, _) in PARAMETERS.items()},
    **dict.fromkeys(CONVOLUTIONS, "conv1d.weight"),
    "output": "output",
    "inputs": "inputs",
}


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
  with np.load(GOLDEN) as file:
    return dict(file)


def in_our_form(theirs) -> dict[str, np.ndarray]:
  """Their parameters, or their gradients, under our names."""
  ours = {name: theirs(other).T.reshape(shape) for name, (other, shape) in PARAMETERS.items()}
  taps = np.split(theirs("conv1d.weight")[:, 0].T, 3, axis=1)  # the channels of q, k and v, one after another
  return ours | {name: part.reshape(4, HEADS, HEAD_DIM) for name, part in zip(CONVOLUTIONS, taps, strict=True)}


def pack(golden, name) -> np.ndarray:
  rows = np.zeros((2, LENGTH, EMBED), np.float32)
  for (row, first), tokens in zip(PLACES, documents(golden, name), strict=True):
    rows[row, first : first + len(tokens)] = tokens
  return rows


def unpack(golden, rows) -> np.ndarray:
  lengths = golden["documents"]
  return np.concatenate([rows[row, first : first + n] for (row, first), n in zip(PLACES, lengths, strict=True)])


def documents(golden, name) -> list[np.ndarray]:
  return np.split(golden[name], np.cumsum(golden["documents"])[:-1])


def segment_ids(golden) -> np.ndarray:
  ids = np.zeros((2, LENGTH), np.int32)
  for number, ((row, first), length) in enumerate(zip(PLACES, golden["documents"], strict=True), 1):
    ids[row, first : first + length] = number
  return ids


def layer_and_parameters(golden, folder, gate, kernel, **keys):
  epsilon = json.loads(str(golden["provenance"]))["epsilon"]
  layer = make_layer(
      read_config(folder, normalization_layer_epsilon=epsilon, kda_implementation=kernel, **GATES[gate], **keys)
  )
  state = nnx.state(layer)
  parameters = in_our_form(lambda name: golden[f"parameters/{name}"])
  for path, leaf in nnx.to_flat_state(state):
    leaf[...] = jnp.asarray(parameters["/".join(map(str, path))], leaf[...].dtype)
  return layer, state


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request, golden, tmp_path_factory):
  """The gate's name, a compiled run, and the parameters."""
  layer, state = layer_and_parameters(golden, tmp_path_factory.mktemp("golden"), *request.param)
  return request.param[0], runner(layer), state


@pytest.fixture(scope="module")
def results(case, golden):
  """The gate's name, outputs, and gradients by our names."""
  gate, run, state = case
  o, gradients, dx = run(state, pack(golden, "inputs"), segment_ids(golden), pack(golden, "cotangents"))
  return gate, np.asarray(o), np.asarray(dx), flat(gradients)


def test_outputs(results, golden):
  gate, o, _, _ = results
  assert relative(unpack(golden, o), golden[f"{gate}/output"]) < 1e-5
  assert not o[segment_ids(golden) == 0].any()


def test_every_gradient(results, golden):
  gate, _, dx, gradients = results
  assert relative(unpack(golden, dx), golden[f"{gate}/inputs"]) < 1e-4
  expected = in_our_form(lambda name: golden[f"{gate}/{name}"])
  assert {*gradients} == {*expected}
  differences = {name: relative(gradients[name], value) for name, value in expected.items()}
  assert max(differences.values()) < 1e-4, differences


def test_bfloat16_errs_at_most_twice_as_much_as_theirs(case, golden, tmp_path):
  """Both against float32 with the same rounded numbers; theirs is in the golden file."""
  gate, run, state = case
  keys = {"dtype": "bfloat16", "weight_dtype": "bfloat16", "matmul_precision": "default"}
  layer, low = layer_and_parameters(golden, tmp_path, gate, "reference", **keys)
  x, cotangents = (jnp.asarray(pack(golden, name), jnp.bfloat16) for name in ("inputs", "cotangents"))
  exact = jax.tree.map(lambda wide, narrow: narrow.astype(wide.dtype), state, low)
  found = runner(layer)(low, x, segment_ids(golden), cotangents)
  expected = run(exact, x.astype(jnp.float32), segment_ids(golden), cotangents.astype(jnp.float32))
  errors = {name: root_mean_square(value, flat(expected[1])[name]) for name, value in flat(found[1]).items()}
  errors |= {"output": root_mean_square(found[0], expected[0]), "inputs": root_mean_square(found[2], expected[2])}
  theirs = {name: float(golden[f"{gate}/bfloat16/{other}"]) for name, other in THEIR_NAMES.items()}
  assert {*errors} == {*theirs}
  assert all(errors[name] <= 2 * theirs[name] for name in theirs), (errors, theirs)


def root_mean_square(found, expected) -> float:
  found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
  return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
