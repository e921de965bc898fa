# SPDX-License-Identifier: Apache-2.0
"""The Kimi Delta Attention layer on 8 devices gives the outputs and gradients of one device.

All meshes run in one process of their own, with 8 virtual CPU devices; what is compared comes back as numbers.
"""

import json
import os
from pathlib import Path
import subprocess
import sys

import pytest

# Each mesh: the sizes of its axes. Together 8; rows of the batch lie on data, fsdp and expert, heads on tensor.
# The kernel is the recurrence, which compiles fastest; HYPOTHESIS_PROFILE=long takes the chunked one too.
MESHES = {
    "data, expert, tensor": {"data": 2, "expert": 2, "tensor": 2},
    "context, fsdp": {"context": 4, "fsdp": 2},
    "explicit": {"fsdp": 4, "tensor": 2, "shard_mode": "explicit"},
}
if os.environ.get("HYPOTHESIS_PROFILE") == "long":
  MESHES["chunked"] = {"data": 2, "fsdp": 2, "tensor": 2, "kernel": "xla"}
  MESHES["chunked, context"] = {"context": 4, "fsdp": 2, "kernel": "xla"}
  MESHES["explicit, context"] = {"context": 4, "tensor": 2, "shard_mode": "explicit"}
  MESHES["expert as context"] = {"expert": 4, "fsdp": 2, "rule": "ep-as-cp"}
# Float32 sums over tokens and features in another order: about 1e-6 of the largest number.
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def differences(tmp_path_factory) -> dict[str, dict[str, float]]:
  folder = tmp_path_factory.mktemp("sharding")
  environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(
      [sys.executable, __file__, str(folder)], env=environment, capture_output=True, text=True, timeout=570, check=False
  )
  assert done.returncode == 0, done.stderr[-4000:]
  return json.loads((folder / "differences.json").read_text())


@pytest.mark.parametrize("mesh", MESHES)
def test_eight_devices_give_the_results_of_one(differences, mesh):
  found = differences[mesh]
  assert len(found) == 15, "outputs, and the gradients of the input and 13 parameters"
  assert max(found.values()) < TOLERANCE, found


def test_heads_that_cannot_be_divided_are_refused(differences):
  sentence = differences["refusals"]["heads"]
  assert sentence.startswith("num_query_heads is 4, which cannot be divided over the mesh axes {'tensor': 8}")


def test_load_balanced_rows_are_refused_by_the_layer(differences):
  assert differences["refusals"]["balance"].startswith("context_parallel_load_balance is true and 8 devices share")


def test_tokens_that_cannot_be_divided_are_refused(differences):
  assert "its T cannot be divided over the mesh axes {'context': 4}" in differences["refusals"]["tokens"]


def main(folder: Path) -> None:
  """Compares each mesh with one device and writes the largest differences, relative to the largest number."""
  from flax import nnx
  from flax.linen import partitioning
  import jax
  import jax.numpy as jnp
  import numpy as np

  from maxtext.configs import pyconfig
  from maxtext.layers.attention_kda import KimiDeltaAttention
  from maxtext.utils import maxtext_utils, sharding

  def configure(shard_mode="auto", balance="false", kernel="reference", rule="", **axes):
    keys = {f"ici_{axis}_parallelism": size for axis, size in {"fsdp": 1, **axes}.items()}
    keys |= {"base_emb_dim": 32, "base_num_query_heads": 4, "base_num_kv_heads": 4, "head_dim": 8, "dtype": "float32"}
    keys |= {"matmul_precision": "highest", "use_kda_safe_gate": "true", "kda_lower_bound": -5.0, "log_config": "false"}
    keys |= {"skip_jax_distributed_system": "true", "run_name": "t", "base_output_directory": folder, "hardware": "cpu"}
    keys |= {"shard_mode": shard_mode, "context_parallel_load_balance": balance, "kda_implementation": kernel}
    keys |= {"custom_mesh_and_rule": rule} if rule else {}
    return pyconfig.initialize(["", "base.yml", *(f"{key}={value}" for key, value in keys.items())])

  def make(config, devices):
    return KimiDeltaAttention(config, 0, maxtext_utils.get_mesh_from_config(config, devices), rngs=nnx.Rngs(3))

  rng = np.random.default_rng(0)
  x, weights = (rng.normal(size=(8, 64, 32)).astype(np.float32) for _ in range(2))
  ids = np.zeros((8, 64), np.int32)
  for row in range(8):  # documents that cross the borders of shards, padding at the end
    ids[row, : 61 - row] = 1 + np.searchsorted(np.sort(rng.choice(50, 3, replace=False)), np.arange(61 - row))

  def run(layer, config):
    mesh = layer.mesh
    graph, state = nnx.split(layer)
    place = lambda value, axes: jax.device_put(value, sharding.create_sharding(mesh, axes))

    def loss(state, x, ids, weights):
      o = nnx.merge(graph, state)(x, decoder_segment_ids=ids)
      return jnp.sum(o * weights), o

    with partitioning.axis_rules(config.logical_axis_rules), jax.set_mesh(mesh):
      state = jax.tree.map(
          lambda leaf: leaf.replace(place(leaf[...], leaf.get_metadata()["out_sharding"])),
          state,
          is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
      )
      rows = ("activation_batch", "activation_length", None)
      arrays = place(x, rows), place(ids, rows[:2]), place(weights, rows)
      (_, o), gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(state, *arrays)
    names = {"/".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(gradients[0])}
    return jax.tree.map(np.asarray, {"o": o, "x": gradients[1], **names})

  config = configure()
  expected = run(make(config, jax.devices()[:1]), config)
  result = {"refusals": {}}
  for name, keys in MESHES.items():
    config = configure(**keys)
    found = run(make(config, jax.devices()), config)
    result[name] = {key: float(np.abs(found[key] - value).max() / np.abs(value).max()) for key, value in expected.items()}

  def refused(name, action):
    try:
      action()
    except ValueError as error:
      result["refusals"][name] = str(error)

  refused("heads", lambda: make(configure(tensor=8), jax.devices()))
  refused("balance", lambda: make(configure(context=8, balance="true"), jax.devices()))
  refused("tokens", lambda: make(configure(context=4, fsdp=2), jax.devices())(x[:, :62]))
  (folder / "differences.json").write_text(json.dumps(result))


if __name__ == "__main__":
  main(Path(sys.argv[1]))
