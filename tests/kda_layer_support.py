# SPDX-License-Identifier: Apache-2.0
"""Small Kimi Delta Attention layers for tests."""

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from kda_support import QUICK
from maxtext.configs import pyconfig
from maxtext.layers.attention_kda import KimiDeltaAttention
from maxtext.utils import maxtext_utils

EMBED, HEADS, HEAD_DIM = 32, 2, 16
SAFE = {"use_kda_safe_gate": True, "kda_lower_bound": -5.0}


def read_config(folder, **keys):
  """A config of a layer with 2 heads of 16 in float32, and the keys given."""
  small = {"base_emb_dim": EMBED, "base_num_query_heads": HEADS, "base_num_kv_heads": HEADS, "head_dim": HEAD_DIM}
  run = {"skip_jax_distributed_system": True, "run_name": "t", "base_output_directory": folder, "hardware": "cpu"}
  precision = {"dtype": "float32", "weight_dtype": "float32", "matmul_precision": "highest", "log_config": False}
  given = (small | run | precision | keys).items()
  return pyconfig.initialize(["", "base.yml", *(f"{key}={value}" for key, value in given)])


def make_layer(config, seed: int = 0) -> KimiDeltaAttention:
  """A layer on one device."""
  mesh = maxtext_utils.get_mesh_from_config(config, jax.devices()[:1])
  return KimiDeltaAttention(config, 0, mesh, rngs=nnx.Rngs(seed))


def runner(layer: KimiDeltaAttention):
  """A compiled (state, x, segment_ids, cotangents) -> (o, gradient of state, gradient of x)."""
  graph = nnx.graphdef(layer)

  def run(state, x, ids, cotangents):
    o, pull = jax.vjp(lambda state, x: nnx.merge(graph, state)(x, decoder_segment_ids=ids), state, x)
    return o, *pull(cotangents.astype(o.dtype))

  return jax.jit(run, compiler_options=QUICK)


def flat(state) -> dict[str, np.ndarray]:
  """The arrays of a state by their path: "query/kernel"."""
  return {"/".join(map(str, path)): np.asarray(leaf[...], np.float64) for path, leaf in nnx.to_flat_state(state)}


def relative(found, expected) -> float:
  """The largest difference, relative to the largest number expected."""
  found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
  return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30))


def normal(seed: int, *shape: int) -> jax.Array:
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)
