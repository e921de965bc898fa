# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention as a layer: projections, short convolutions, delta rule, gated norm."""

import math
from typing import Any, cast

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import maxtext.common.common_types as names
from maxtext.configs import _kda_config
from maxtext.kernels import kda
from maxtext.layers._kda_mixer import Mixer, MixerArrays
from maxtext.layers._kda_segments import segment_ids_to_cu_seqlens as segment_ids_to_cu_seqlens
from maxtext.layers._short_convolution import ShortConvolution as ShortConvolution
from maxtext.layers.linears import DenseGeneral
from maxtext.layers.normalizations import RMSNorm
from maxtext.utils import sharding

_INPUT_AXES = (names.BATCH_ATTN, names.ATTN_INPUT_LENGTH, names.ATTN_EMBED)
_OUTPUT_AXES = (names.BATCH, "activation_norm_length", names.EMBED)
_HEAD_AXES = (names.KV_BATCH, names.ATTN_LENGTH, names.HEAD, None)
_IN_KERNEL_AXES = ("embed_attn", "q_heads", "kv")
_OUT_KERNEL_AXES = ("heads", "kv", "embed_attn")
_LEAST_STEP = 1e-4


def _log_rates(key, shape) -> jax.Array:
  """A_log as flash-linear-attention draws it: decay rates uniform between 1 and 16."""
  return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0))


def _step_biases(key, shape) -> jax.Array:
  """dt_bias as flash-linear-attention draws it: softplus of it is log-uniform between 0.001 and 0.1."""
  step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, math.log(1e-3), math.log(1e-1)))
  step = jnp.maximum(step, _LEAST_STEP)
  return step + jnp.log(-jnp.expm1(-step))


class KimiDeltaAttention(nnx.Module):
  """A Kimi Delta Attention layer, for training on rows that may hold several documents.

  q, k and v are projections of the tokens, each with a short convolution and SiLU; q and k are normalised in the kernel.
  The gate's input f, the step size beta = sigmoid(b) and the output gate g are projections too. What comes out of the
  delta rule is normalised per head (RMSNorm), multiplied by sigmoid(g) and projected back. There is no positional
  embedding.

  With several devices, batch and heads are sharded, and so are the tokens of a row if a mesh axis for context parallelism
  is larger than 1. Every device runs the kernel on its own part.

  For rematerialization the projections carry the release's names: "query_proj", "key_proj" and "value_proj"; "kv_proj"
  (f, b and g); "out_proj". The kernel's output is "context", like an attention kernel's.

  Source: Kimi Linear (arXiv 2510.26692); Ling 3.0's layer, as in transformers' `bailing_hybrid`. Differences from that
  code in low precision: the log decay is not rounded to the activations' dtype, and beta and its projection are float32.
  """

  def __init__(self, config, layer_idx: int, mesh: Mesh, *, quant: Any = None, rngs: nnx.Rngs):
    """Makes the parameters.

    Args:
      config: emb_dim, num_query_heads, head_dim (that of keys and values), normalization_layer_epsilon, dtype,
        weight_dtype, matmul_precision, shard_mode, logical_axis_rules, and the field group KimiDeltaAttention.
      layer_idx: the layer's number in the model.
      mesh: of the devices that the layer runs on.
      quant: quantization of the projections, as for other layers.
      rngs: the stream "params" is used.

    Raises:
      KdaConfigError: keys that cannot be used, or not on this mesh.
      ValueError: the heads cannot be divided over the mesh.
    """
    self.config = config
    self.layer_idx = layer_idx
    self.mesh = mesh
    self.num_heads, self.head_dim = config.num_query_heads, config.head_dim
    _kda_config.validate(config, uses_kda=True)
    self._check_mesh()
    self._implementation = cast(
        kda.Implementation, kda.resolve_implementation(config.kda_implementation, _platform(mesh))
    )

    heads = (self.num_heads, self.head_dim)
    self.query = self._projection(heads, _IN_KERNEL_AXES, quant, rngs)
    self.key = self._projection(heads, _IN_KERNEL_AXES, quant, rngs)
    self.value = self._projection(heads, _IN_KERNEL_AXES, quant, rngs)
    self.forget_gate = self._projection(heads, _IN_KERNEL_AXES, quant, rngs)
    # In float32: it is small, and narrow products of bfloat16 are summed in bfloat16 on a CPU.
    self.beta = self._projection((self.num_heads,), _IN_KERNEL_AXES[:2], quant, rngs, dtype=jnp.float32)
    self.output_gate = self._projection(heads, _IN_KERNEL_AXES, quant, rngs)
    self.query_conv, self.key_conv, self.value_conv = (
        ShortConvolution(
            heads, config.linear_conv_kernel_dim, dtype=config.dtype, kernel_axes=(None, *_IN_KERNEL_AXES[1:]), rngs=rngs
        )
        for _ in range(3)
    )
    # float32 whatever weight_dtype: small errors of a rate are multiplied over all tokens.
    self.A_log = nnx.Param(_log_rates(rngs.params(), (self.num_heads,)), sharding=("q_heads",))
    self.dt_bias = nnx.Param(_step_biases(rngs.params(), (self.num_heads * self.head_dim,)), sharding=("q_heads",))
    self.norm = RMSNorm(
        self.head_dim,
        epsilon=config.normalization_layer_epsilon,
        dtype=jnp.float32,
        weight_dtype=config.weight_dtype,
        shard_mode=config.shard_mode,
        kernel_axes=(None,),
        rngs=rngs,
    )
    self.out = self._projection((config.emb_dim,), _OUT_KERNEL_AXES, quant, rngs, of=heads)

  def _projection(self, features, axes, quant, rngs, of=None, dtype=None) -> DenseGeneral:
    config = self.config
    return DenseGeneral(
        in_features_shape=(config.emb_dim,) if of is None else of,
        out_features_shape=features,
        axis=(-1,) if of is None else (-2, -1),
        kernel_axes=axes,
        dtype=config.dtype if dtype is None else dtype,
        weight_dtype=config.weight_dtype,
        quant=quant,
        matmul_precision=config.matmul_precision,
        shard_mode=config.shard_mode,
        block_size=getattr(config, "weight_block_size", None),
        rngs=rngs,
    )

  def __call__(
      self,
      hidden_states: jax.Array,
      decoder_positions: jax.Array | None = None,
      deterministic: bool = True,
      model_mode: str = names.MODEL_MODE_TRAIN,
      *,
      decoder_segment_ids: jax.Array | None = None,
  ) -> jax.Array:
    """Mixes the tokens of each document.

    Args:
      hidden_states: [B, T, E].
      decoder_positions: not used; the order of the tokens is their position.
      deterministic: not used; there is no dropout.
      model_mode: "train".
      decoder_segment_ids: int32 [B, T], 0 at padding; None: rows are one document.

    Returns:
      [B, T, E] in the config's dtype, zero at padding.

    Raises:
      ValueError: another model_mode, or shapes that do not fit the layer or the mesh.
    """
    del decoder_positions, deterministic
    self._check_call(hidden_states, model_mode, decoder_segment_ids)
    batch = hidden_states.shape[0]
    by_head = self._sharding(_HEAD_AXES, batch)
    x = sharding.maybe_shard_with_name(hidden_states, self._sharding(_INPUT_AXES, batch), self.config.shard_mode)

    def project(projection: DenseGeneral, name: str) -> jax.Array:
      return checkpoint_name(projection(x, out_sharding=by_head), name)

    output_gate = project(self.output_gate, "kv_proj")
    arrays = MixerArrays(
        q=project(self.query, "query_proj"),
        k=project(self.key, "key_proj"),
        v=project(self.value, "value_proj"),
        f=project(self.forget_gate, "kv_proj"),
        beta=jax.nn.sigmoid(project(self.beta, "kv_proj")),
        q_taps=self.query_conv.kernel[...],
        k_taps=self.key_conv.kernel[...],
        v_taps=self.value_conv.kernel[...],
        A_log=self.A_log[...],
        dt_bias=self.dt_bias[...],
        segment_ids=decoder_segment_ids,
    )
    o = checkpoint_name(self._mix(arrays, by_head.spec), "context")
    o = self.norm(o, out_sharding=by_head) * jax.nn.sigmoid(output_gate.astype(jnp.float32))
    output = self.out(o.astype(self.config.dtype), out_sharding=self._sharding(_OUTPUT_AXES, batch))
    return checkpoint_name(output, "out_proj")

  def _mix(self, arrays: MixerArrays, spec: PartitionSpec) -> jax.Array:
    """Convolutions and kernel [B, T, H, D], on each device's part."""
    config = self.config
    batch, length, heads, _ = spec
    mixer = Mixer(
        implementation=self._implementation,
        lower_bound=config.kda_lower_bound if config.use_kda_safe_gate else None,
        max_segments=config.max_kda_segments,
        axis_name=_axes_of(length),
        dtype=config.dtype,
    )
    if self.mesh.size == 1:
      return mixer(arrays)
    taps = PartitionSpec(None, heads, None)
    specs = MixerArrays(
        q=spec,
        k=spec,
        v=spec,
        f=spec,
        beta=PartitionSpec(batch, length, heads),
        q_taps=taps,
        k_taps=taps,
        v_taps=taps,
        A_log=PartitionSpec(heads),
        dt_bias=PartitionSpec(heads),
        segment_ids=None if arrays.segment_ids is None else PartitionSpec(batch, length),
    )
    if config.shard_mode == names.ShardMode.EXPLICIT:  # shard_map takes arrays as they are, and they must fit
      arrays = jax.tree.map(lambda x, s: jax.sharding.reshard(x, NamedSharding(self.mesh, s)), arrays, specs)
    run = jax.shard_map(mixer, mesh=self.mesh, in_specs=(specs,), out_specs=spec, check_vma=False)
    return run(arrays)

  def _sharding(self, axes: tuple[str | None, ...], batch: int | None = None) -> NamedSharding:
    """Where an activation lies; not divided over axes that its batch (if given) is too small for."""
    rules = sharding.get_logical_axis_rules() or self.config.logical_axis_rules
    spec = sharding.logical_to_mesh_axes(axes, self.mesh, rules=rules)
    if batch is not None:
      sizes = (batch, *(1 for _ in axes[1:]))
      spec = sharding.remove_incompatible_mesh_axes_from_partition_spec(
          spec, sizes, self.mesh, dims=(0,), allow_remove_axes=True
      )
    return NamedSharding(self.mesh, PartitionSpec(*spec, *(None,) * (len(axes) - len(spec))))

  def _check_mesh(self) -> None:
    """What this mesh allows: rows in order where their tokens are sharded, heads that can be divided."""
    _, length, heads, _ = self._sharding(_HEAD_AXES).spec
    _kda_config.validate_context_parallelism(self.config, self._sizes(length))
    sizes = self._sizes(heads)
    if self.num_heads % math.prod(sizes.values()):
      raise ValueError(
          f"num_query_heads is {self.num_heads}, which cannot be divided over the mesh axes {sizes}; use another number"
          " of heads, or smaller axes."
      )

  def _check_call(self, hidden_states, model_mode: str, segment_ids) -> None:
    if model_mode != names.MODEL_MODE_TRAIN:
      raise ValueError(f"model_mode is {model_mode!r}; Kimi Delta Attention keeps no state to decode from, use 'train'.")
    if hidden_states.ndim != 3 or hidden_states.shape[-1] != self.config.emb_dim:
      raise ValueError(
          f"hidden_states has shape {hidden_states.shape}; [B, T, E] with E = {self.config.emb_dim} (emb_dim) is needed."
      )
    if segment_ids is not None and segment_ids.shape != hidden_states.shape[:2]:
      raise ValueError(
          f"decoder_segment_ids has shape {segment_ids.shape}; [B, T] = {hidden_states.shape[:2]} is needed."
      )
    sizes = self._sizes(self._sharding(_HEAD_AXES).spec[1])
    if hidden_states.shape[1] % math.prod(sizes.values()):
      raise ValueError(
          f"hidden_states has shape {hidden_states.shape}, and its T cannot be divided over the mesh axes {sizes}; use"
          " another max_target_length, or smaller axes."
      )

  def _sizes(self, axes) -> dict[str, int]:
    return {axis: self.mesh.shape[axis] for axis in _axes_of(axes)}


def _axes_of(entry) -> tuple[str, ...]:
  """The mesh axes of one entry of a PartitionSpec."""
  if entry is None:
    return ()
  return (entry,) if isinstance(entry, str) else tuple(entry)


def _platform(mesh) -> str | None:
  """The platform of a mesh's devices, which need not be this machine's; None if the mesh does not say."""
  device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else mesh.abstract_device
  return None if device is None else device.platform
