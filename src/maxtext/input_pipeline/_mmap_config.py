# SPDX-License-Identifier: Apache-2.0
"""Checks of the config keys of the Megatron file types, made when the config is read."""

from __future__ import annotations

from maxtext.input_pipeline._mmap_files import MMapError

FILE_TYPES = ("mmap", "mmap_npy")
_MODES = (
    "use_sft",
    "use_dpo",
    "enable_rampup_batch_size",
    "grain_use_elastic_iterator",
    "colocated_python_data_input",
    "enable_emergency_checkpoint",  # these two save no iterator state
    "enable_multi_tier_checkpointing",
)


def uses_megatron_data(config) -> bool:
  """Whether a run reads Megatron datasets, so that this branch's data rules hold for it."""
  return config.dataset_type == "grain" and config.grain_file_type in FILE_TYPES


def train_samples(config) -> int:
  """The requested number of training samples, which decides the order."""
  return config.mmap_npy_num_samples or config.steps * config.global_batch_size_to_load


def eval_samples(config) -> int | None:
  """The requested number of evaluation samples; None for one whole pass."""
  return config.eval_steps * config.global_batch_size_to_load_eval if config.eval_steps > 0 else None


def require_files(values: dict) -> None:
  """Checks, before any other key, that the datasets which a run reads are named."""
  evaluates = int(values.get("eval_interval") or -1) > 0
  for key, needed in (("grain_train_files", True), ("grain_eval_files", evaluates)):
    if needed and not values.get(key):
      raise MMapError(f"{key} is empty; expected 'npy_dir|dataset', a folder for index files and a path without suffix.")


def validate(config) -> None:
  """Checks the keys of a config whose derived values are set.

  Raises:
    MMapError: one sentence about the first key that cannot be used.
  """
  if config.grain_file_type == "mmap":
    raise MMapError("grain_file_type is 'mmap', which is not supported yet; use mmap_npy, which keeps Megatron's order.")
  _check_modes(config)
  _check_files("grain_train_files", config.grain_train_files)
  if config.eval_interval > 0:
    _check_files("grain_eval_files", config.grain_eval_files)
  if config.mmap_npy_num_samples < 0:
    raise MMapError(f"mmap_npy_num_samples is {config.mmap_npy_num_samples}; expected 0 (derived from steps) or more.")
  _check_split(config)


def _check_split(config) -> None:
  from maxtext.input_pipeline import _mmap_index_utils as index_utils

  if config.mmap_npy_split:
    try:
      shares = index_utils.parse_split(config.mmap_npy_split)
    except MMapError as error:
      raise MMapError(f"mmap_npy_split: {error}") from None
    for index, needed in enumerate((True, config.eval_interval > 0)):
      if needed and not shares[index]:
        part, reader = index_utils.SPLIT_NAMES[index], ("training", "evaluation")[index]
        raise MMapError(
            f"mmap_npy_split is {config.mmap_npy_split!r} and gives the {part} part nothing, but {reader} reads it; "
            "give it a share."
        )


def _check_modes(config) -> None:
  """Refuses what would read the data in another way than Megatron's order allows."""
  for key in _MODES:
    if getattr(config, key, False):
      raise MMapError(f"{key} is true, which grain_file_type=mmap_npy does not support; set it to false.")
  if config.expansion_factor_real_data not in (-1, 0, 1):
    raise MMapError(
        f"expansion_factor_real_data is {config.expansion_factor_real_data}; with grain_file_type=mmap_npy every host "
        "loads its own data, leave it at -1."
    )
  if config.max_target_length < 1:
    raise MMapError(f"max_target_length is {config.max_target_length}; expected the tokens of a sample, 1 or more.")
  if not 0 <= config.data_shuffle_seed < 2**32:
    raise MMapError(f"data_shuffle_seed is {config.data_shuffle_seed}; expected 0 to {2**32 - 1}.")
  if config.mmap_eod_id < 0:
    raise MMapError(f"mmap_eod_id is {config.mmap_eod_id}; expected the token id that preprocessing appended, 0 or more.")
  if config.mmap_eod_id >= config.vocab_size:
    raise MMapError(
        f"mmap_eod_id is {config.mmap_eod_id}, outside the vocabulary (vocab_size={config.vocab_size}); set the id that "
        "preprocessing appended, or the vocabulary's size."
    )


def _check_files(key: str, text: str) -> None:
  from maxtext.input_pipeline import _mmap_datasource as datasource  # here, since every run imports this module

  entries = datasource.parse_entries(text, key)
  for entry, _ in entries:
    datasource.parse_npy_entry(entry, key)
  if len(entries) > 1:
    raise MMapError(datasource.several_datasets(key, len(entries)))
