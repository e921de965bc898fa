# SPDX-License-Identifier: Apache-2.0
"""Compiles one KDA program ahead of time for a TPU and prints its figures: what `tpu_static.py` runs, once a program.

Its arguments: the job in JSON, and the folder that LIBTPU_INIT_ARGS tells libtpu to dump into.
"""

from __future__ import annotations

import json
import sys

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
import numpy as np
from tpu_bundles import kernel_rows

LOWER_BOUND = -5.0


def main() -> None:
  job, dumps = json.loads(sys.argv[1]), sys.argv[2]
  device = topologies.get_topology_desc(platform="tpu", topology_name=job["topology"]).devices[0]
  traced, compiled = compile_for(device, *program(job))
  memory = compiled.memory_analysis()
  figures = {
      "hbm_bytes": {
          "arguments": memory.argument_size_in_bytes,
          "outputs": memory.output_size_in_bytes,
          "temporaries": memory.temp_size_in_bytes,
          "peak": memory.peak_memory_in_bytes,
      },
      "peak_gib": round(memory.peak_memory_in_bytes / 2**30, 3),
      "kernels": kernel_rows(compiled.as_text(), traced.jaxpr.jaxpr, dumps),
  }
  print(json.dumps(figures), flush=True)


def compile_for(device, function, shapes):
  """Compiles a function for one device of a topology; returns what was traced and what was compiled."""
  axes = {"axis_names": ("device",), "axis_types": (AxisType.Auto,)}
  sharding = NamedSharding(Mesh(np.array([device]), **axes), PartitionSpec())
  arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
  # Libraries ask the mesh, not the process, which TPU they compile for.
  abstract = AbstractDevice(
      device_kind=device.device_kind, num_cores=getattr(device, "num_cores", None) or 1, platform="tpu"
  )
  with jax.sharding.use_abstract_mesh(AbstractMesh((1,), **axes, abstract_device=abstract)):
    traced = jax.jit(function).trace(*arguments)
    return traced, traced.lower().compile()


def program(job: dict):
  """A job's function and the shapes of its arguments: q, k, v, g, beta, A_log, dt_bias, segment ids, and for the backward
  pass the cotangent of the outputs. That function gives the outputs and the gradients of the first seven."""
  batch, length, heads, key, value = (job[name] for name in ("batch", "length", "heads", "key_width", "value_width"))
  heads_first = job["target"] == "tokamax"  # each gets the layout that it wants, so that nobody pays for transposes

  def shape(*width, dtype=job["dtype"]):
    rows = (heads, batch, length) if heads_first else (batch, length, heads)
    return jax.ShapeDtypeStruct((*rows, *width), jnp.dtype(dtype))

  gate = [jax.ShapeDtypeStruct((size,), jnp.float32) for size in (heads, heads * key)]
  ids = jax.ShapeDtypeStruct((batch, length), jnp.int32) if job["segments"] else None
  shapes = [shape(key), shape(key), shape(value), shape(key), shape(), *gate, ids]
  forward = tokamax_forward(job["segments"]) if heads_first else our_forward(job["target"])
  if job["direction"] == "forward":
    return forward, shapes

  def both(*arrays):
    *inputs, ids, cotangent = arrays
    o, pull = jax.vjp(lambda *inputs: forward(*inputs, ids), *inputs)
    return o, pull(cotangent)

  return both, [*shapes, shape(value)]


def our_forward(target: str):
  from maxtext.kernels.kda import chunk_kda

  def forward(q, k, v, g, beta, A_log, dt_bias, ids):
    o, _ = chunk_kda(
        q, k, v, g, beta,
        A_log=A_log, dt_bias=dt_bias, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, safe_gate=True,
        lower_bound=LOWER_BOUND, segment_ids=ids, implementation="pallas" if target == "ours" else "xla",
    )  # fmt: skip
    return o

  return forward


def tokamax_forward(segments: int):
  import tokamax

  def forward(q, k, v, g, beta, A_log, dt_bias, ids):
    with tokamax.config.cross_compile(True):
      o, _ = tokamax.ops.kimi_delta_attention(
          q, k, v, g, beta,
          a_log=A_log, delta_time_bias=dt_bias, use_qk_l2norm=True, use_gate_in_kernel=True, lower_bound=LOWER_BOUND,
          segment_ids=ids, max_num_segments=segments or None, implementation="mosaic",
      )  # fmt: skip
    return o

  return forward


if __name__ == "__main__":
  main()
