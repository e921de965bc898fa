# SPDX-License-Identifier: Apache-2.0
"""Stand-in: adds the branch's field groups to the config classes, and checks their keys.

Both classes that read YAMLs get the fields: `MaxTextConfig`, and `RLConfig` of the reinforcement-learning trainers.
"""

from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, Field, model_validator

from maxtext._release.configs import types as release
from maxtext.configs import _kda_config
from maxtext.input_pipeline import _mmap_config
from maxtext.input_pipeline._mmap_files import MMapError

if TYPE_CHECKING:  # a type checker cannot read the next line
  from maxtext._release.configs.types import *  # noqa: F403
globals().update({k: v for k, v in vars(release).items() if not k.startswith("__")})


class MegatronDataset(BaseModel):
  """The keys for Megatron-LM datasets that the release's `MMapDataset` does not have."""

  mmap_npy_num_samples: int = Field(
    0,
    description="grain_file_type=mmap_npy: the requested number of training samples, and with it the order; "
    "0 means steps * global_batch_size_to_train_on.",
  )
  mmap_npy_num_eval_samples: int = Field(
    0,
    description="grain_file_type=mmap_npy: the requested number of evaluation samples, and with it their order; "
    "0 means eval_steps * global_batch_size_to_eval_on.",
  )
  mmap_npy_start_sample: int = Field(
    0,
    description="grain_file_type=mmap_npy: the sample of the global order that training starts at (Megatron's consumed "
    "samples); a checkpoint's position goes before it.",
  )
  mmap_npy_blend_margin: float = Field(
    0.5,
    description="grain_file_type=mmap_npy: samples to build for each dataset of a blend beyond its share, in percent.",
  )
  mmap_remote_cache_dir: release.PathStr = Field(
    "", description="Local folder for copies of the .idx and index files of Megatron datasets that lie at a URL."
  )
  log_batch_digest: bool = Field(
    False, description="Megatron datasets: log a digest of the global batch of each training step."
  )


class KimiDeltaAttention(BaseModel):
  """The keys of Kimi Delta Attention layers."""

  linear_conv_kernel_dim: int = Field(4, description="Taps of the short convolutions before Kimi Delta Attention.")
  use_kda_safe_gate: bool = Field(
    False, description="Bound the log decay: kda_lower_bound * sigmoid(...) in place of -exp(A_log) * softplus(...)."
  )
  kda_lower_bound: float = Field(0.0, description="The bound of the safe gate, negative (Ling 3: -5); 0 without it.")
  max_kda_segments: int = Field(
    0,
    description="The most segments (documents, or parts of them) that the rows of one device hold together; needed by "
    "kda_implementation=tokamax and tops, 0 means no maximum.",
  )
  kda_implementation: str = Field(
    "auto",
    description="Kernels of Kimi Delta Attention: auto (pallas on TPU, xla elsewhere), pallas, xla, tokamax, tops or "
    "reference.",
  )


class MaxTextConfig(release.MaxTextConfig, MegatronDataset, KimiDeltaAttention):
  """The release's config with the branch's keys."""

  @model_validator(mode="before")
  @classmethod
  def require_megatron_dataset(cls, data: Any) -> Any:
    """Says that a dataset is missing before the release says it of its own file types, or of an empty value."""
    megatron = isinstance(data, dict) and data.get("grain_file_type") in _mmap_config.FILE_TYPES
    if megatron and data.get("dataset_type") == "grain":
      _mmap_config.require_files(data)
      if isinstance(data.get("mmap_npy_split"), (int, float)):
        return {**data, "mmap_npy_split": str(data["mmap_npy_split"])}  # one share, which YAML reads as a number
    return data

  # Pydantic runs a base class's validators first, so the release's derived values are set when this one runs.
  @model_validator(mode="after")
  def validate_megatron_dataset(self) -> Self:
    """Checks the keys of a Megatron dataset; what only its files can tell is checked when they are opened."""
    if self.dataset_type == release.DatasetType.GRAIN and self.grain_file_type in _mmap_config.FILE_TYPES:
      _mmap_config.validate(self)
    elif self.log_batch_digest:
      raise MMapError(
        "log_batch_digest is true, and the run reads no Megatron dataset; set grain_file_type to mmap_npy or mmap, or it "
        "to false."
      )
    return self

  @model_validator(mode="after")
  def validate_kimi_delta_attention(self) -> Self:
    """Checks the keys of Kimi Delta Attention, and in a model that uses it what the run's other keys must allow."""
    _kda_config.validate(self, uses_kda=_kda_config.uses_kda(self))
    return self


class RLConfig(release.RLConfig, release.MMapDataset, MegatronDataset, KimiDeltaAttention):
  """The release's reinforcement-learning config with the branch's keys, and with those of base.yml that it lacks.

  Without `MMapDataset` the release refuses its own base.yml here, and every YAML based on it (`post_train/rl_mt_jt.yml`).
  """
