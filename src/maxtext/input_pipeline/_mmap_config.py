# SPDX-License-Identifier: Apache-2.0
"""Checks of the config keys of the Megatron file types, made when the config is read."""

from __future__ import annotations

from collections.abc import Iterator
import math

from etils import epath

from maxtext.input_pipeline._mmap_files import MMapError

FILE_TYPES = ("mmap", "mmap_npy")
_EXPECTED = {
    "mmap": "a dataset's path without suffix, or a folder of datasets",
    "mmap_npy": "'npy_dir|dataset', a folder for index files and a path without suffix",
}
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
  return config.mmap_npy_num_samples or train_reads(config)


def train_reads(config) -> int:
  """Samples of the order that training needs: those before its start, and those it reads."""
  return config.mmap_npy_start_sample + config.steps * config.global_batch_size_to_train_on


def eval_samples(config) -> int | None:
  """The requested number of evaluation samples, which decides their order; None for one whole pass."""
  return config.mmap_npy_num_eval_samples or eval_reads(config) or None


def eval_reads(config) -> int:
  """Samples that one evaluation reads; 0 for all there are."""
  return max(config.eval_steps, 0) * config.global_batch_size_to_eval_on


def continues(config) -> bool:
  """Whether a run starts from a saved step, whose data position is checked where it is restored."""
  if config.load_full_state_path:
    return True
  if not config.enable_checkpointing:
    return False
  folder = epath.Path(config.checkpoint_dir)
  return folder.exists() and any(step.name.isdigit() for step in folder.iterdir())


def require_files(values: dict) -> None:
  """Checks, before any other key, that the datasets which a run reads are named."""
  evaluates = int(values.get("eval_interval") or -1) > 0
  for key, needed in (("grain_train_files", True), ("grain_eval_files", evaluates)):
    if needed and not values.get(key):
      raise MMapError(f"{key} is empty; expected {_EXPECTED[values['grain_file_type']]}.")


def validate(config) -> None:
  """Checks the keys of a config whose derived values are set.

  Raises:
    MMapError: one sentence about the first key that cannot be used.
  """
  for problem in problems(config):
    raise MMapError(problem)


def problems(config) -> Iterator[str]:
  """Yields a sentence about each key that cannot be used; no file is looked at."""
  yield from _of_modes(config)
  yield from _of_batches(config)
  yield from _of_files(config, "grain_train_files")
  if config.eval_interval > 0:
    yield from _of_files(config, "grain_eval_files")
  for key in ("mmap_npy_num_samples", "mmap_npy_num_eval_samples", "mmap_npy_start_sample", "mmap_npy_blend_margin"):
    if not 0 <= getattr(config, key) < math.inf:
      yield f"{key} is {getattr(config, key)}; expected 0 or more."
  yield from _of_file_type(config)
  yield from _of_split(config)


def _of_file_type(config) -> Iterator[str]:
  """Keys of Megatron's order where the file type has no such order."""
  if config.grain_file_type == "mmap_npy":
    return
  for key in ("mmap_npy_num_samples", "mmap_npy_num_eval_samples", "mmap_npy_start_sample", "mmap_npy_split"):
    if getattr(config, key):
      yield f"{key} is set, but grain_file_type=mmap has no such order; use mmap_npy, or leave the key out."


def _of_split(config) -> Iterator[str]:
  from maxtext.input_pipeline import _mmap_index_utils as index_utils

  if config.mmap_npy_split:
    try:
      shares = index_utils.parse_split(config.mmap_npy_split)
    except MMapError as error:
      yield f"mmap_npy_split: {error}"
      return
    for index, needed in enumerate((True, config.eval_interval > 0)):
      if needed and not shares[index]:
        part, reader = index_utils.SPLIT_NAMES[index], ("training", "evaluation")[index]
        yield (
            f"mmap_npy_split is {config.mmap_npy_split!r} and gives the {part} part nothing, but {reader} reads it; "
            "give it a share."
        )


def _of_modes(config) -> Iterator[str]:
  """What would read the data in another way than Megatron's order allows."""
  for key in _MODES:
    if getattr(config, key, False):
      yield f"{key} is true, which grain_file_type={config.grain_file_type} does not support; set it to false."
  if config.expansion_factor_real_data not in (-1, 0, 1):
    yield (
        f"expansion_factor_real_data is {config.expansion_factor_real_data}; with Megatron datasets every host loads its "
        "own data, leave it at -1."
    )
  if config.max_target_length < 1:
    yield f"max_target_length is {config.max_target_length}; expected the tokens of a sample, 1 or more."
  if not 0 <= config.data_shuffle_seed < 2**32:
    yield f"data_shuffle_seed is {config.data_shuffle_seed}; expected 0 to {2**32 - 1}."
  if config.mmap_eod_id < 0:
    yield f"mmap_eod_id is {config.mmap_eod_id}; expected the token id that preprocessing appended, 0 or more."
  if config.mmap_eod_id >= config.vocab_size:
    yield (
        f"mmap_eod_id is {config.mmap_eod_id}, outside the vocabulary (vocab_size={config.vocab_size}); set the id that "
        "preprocessing appended, or the vocabulary's size."
    )


def _of_batches(config) -> Iterator[str]:
  """Batches of no sample."""
  reads = {"": config.global_batch_size_to_train_on}
  if config.eval_interval > 0:
    reads["eval_"] = config.global_batch_size_to_eval_on
  for prefix, used in reads.items():
    if used < 1:
      key = f"{prefix}per_device_batch_size"
      yield f"{key} is {getattr(config, key)}, which is less than one sample a step on all devices together; raise it."


def _of_files(config, key: str) -> Iterator[str]:
  """What a key says of datasets."""
  from maxtext.input_pipeline import _mmap_mixture as mixtures  # here, since every run imports this module

  text = getattr(config, key)
  try:
    if config.grain_file_type == "mmap":
      from maxtext.input_pipeline import _mmap_window_rows as window_rows

      window_rows.check_mmap_files(key, text)
      return
    mixture = mixtures.parse_mixture(text, key)
    for entry in mixture.entries:
      mixtures.parse_npy_entry(entry, key)
  except MMapError as error:
    yield str(error)
    return
  samples = train_samples(config) if key == "grain_train_files" else eval_samples(config)
  if mixture.weights is not None and samples is None:
    yield (
        f"{key} is a blend with weights, and eval_steps is {config.eval_steps}; set eval_steps or "
        "mmap_npy_num_eval_samples, since the blend needs a size."
    )
