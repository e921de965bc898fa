# SPDX-License-Identifier: Apache-2.0
"""Compiles outputs and gradients of chunk_kda for a TPU, without one. Arguments: topology, T, H, dtype, packed (0 or 1).

Prints JSON: the custom calls of the compiled program, and its peak of HBM in bytes.
"""

import json
import re
import sys

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np

from maxtext.kernels.kda import chunk_kda

WIDTH = 128


def loss(q, k, v, g, beta, A_log, dt_bias, segment_ids):
  gate = {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": -5.0, "A_log": A_log, "dt_bias": dt_bias}
  o, _ = chunk_kda(q, k, v, g, beta, **gate, use_qk_l2norm_in_kernel=True, segment_ids=segment_ids)
  return jnp.sum(o.astype(jnp.float32))


def compile_for(topology: str, length: int, heads: int, dtype: str, packed: bool) -> dict:
  """The compiled program's kernels and its peak of HBM."""
  device = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]
  mesh = Mesh(np.array([device]), ("x",), axis_types=(AxisType.Auto,))
  named = AbstractDevice(
      device_kind=device.device_kind, num_cores=getattr(device, "num_cores", None) or 1, platform="tpu"
  )
  shapes = [(1, length, heads, WIDTH)] * 4 + [(1, length, heads)]
  shapes = [(shape, dtype) for shape in shapes] + [((heads,), "float32"), ((heads * WIDTH,), "float32")]
  shapes += [((1, length), "int32")] if packed else []
  sharding = NamedSharding(mesh, PartitionSpec())
  arguments = [jax.ShapeDtypeStruct(shape, jnp.dtype(kind), sharding=sharding) for shape, kind in shapes]
  step = jax.grad(lambda *arrays: loss(*arrays, *[None] * (8 - len(arrays))), argnums=range(5))
  with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=named)):
    compiled = jax.jit(step).trace(*arguments).lower().compile()
  kernels = re.findall(r"kda_(?:forward|backward)(?=[_.\d]* = .*tpu_custom_call)", compiled.as_text())
  return {"kernels": sorted(kernels), "peak": compiled.memory_analysis().peak_memory_in_bytes}


if __name__ == "__main__":
  topology, length, heads, dtype, packed = sys.argv[1:]
  print(json.dumps(compile_for(topology, int(length), int(heads), dtype, packed == "1")))
