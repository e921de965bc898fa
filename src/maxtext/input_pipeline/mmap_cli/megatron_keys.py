# SPDX-License-Identifier: Apache-2.0
"""Config keys for what a Megatron-LM run reads, and the YAML that holds them."""

from __future__ import annotations

from collections.abc import Iterator
import json
import math
import re
import textwrap
from typing import Any, NamedTuple

from maxtext.input_pipeline._mmap_files import MMapError
from maxtext.input_pipeline.mmap_cli import megatron_arguments
from maxtext.input_pipeline.mmap_cli.megatron_arguments import Arguments, Blend, MegatronData

BASE_CONFIG = "mmap_npy_megatron_gpt.yml"


def translate(
    words: list[str],
    index_dir: str | None = None,
    eod_id: int | None = None,
    devices: int | None = None,
    consumed_samples: int = 0,
) -> dict[str, Any]:
  """Translates Megatron's arguments.

  Args:
    words: the arguments, each a word as a shell makes it.
    index_dir: folder for index files; None: Megatron's `--data-cache-path`, or `indices`.
    eod_id: token that ends a document; None: to be set by the user.
    devices: of the run here; None: written for one, to be changed by the user.
    consumed_samples: sample of the order to begin with.

  Returns:
    "keys": config keys and values; "no_equal": reason by argument; "ignored": names of the other arguments; "to_set":
    sentences for the user; "yaml": text.
  """
  arguments = Arguments(words)
  data = megatron_arguments.read_data(arguments)
  folder = index_dir or arguments.text("--data-cache-path") or "indices"
  keys = [
      *_data_keys(arguments, data, folder),
      *_length_keys(data, devices or 1, consumed_samples),
      *_evaluation_keys(arguments, data, folder, devices or 1),
      *_field_keys(arguments, eod_id),
      *_other_keys(arguments),
  ]
  facts = {
      "keys": {key.name: key.value for key in keys},
      "no_equal": dict(_no_equal(arguments, data, consumed_samples)),
      "ignored": list(arguments.ignored),
      "to_set": list(_to_set(arguments, data, eod_id, devices)),
  }
  return {**facts, "yaml": _yaml(keys, facts)}


class _Key(NamedTuple):
  """A config key, and where its value comes from."""

  name: str
  value: Any
  source: str


# The keys.


def _data_keys(arguments: Arguments, data: MegatronData, folder: str) -> Iterator[_Key]:
  if data.parts[0] is None:
    yield _Key("dataset_type", "synthetic", "--mock-data")
  else:
    yield _Key("grain_train_files", _files(data.parts[0], folder), _sources(arguments, "train"))
    by_default = _by_default(arguments, "--split") if data.split else ": each part has data of its own"
    yield _Key("mmap_npy_split", data.split, f"--split{by_default}")
  yield _Key("max_target_length", data.seq_length, "--seq-length")
  yield _Key("data_shuffle_seed", data.seed, "--seed" + _by_default(arguments, "--seed"))
  if "--mid-level-dataset-surplus" in arguments:
    yield _Key("mmap_npy_blend_margin", _percent(data.surplus), "--mid-level-dataset-surplus, in percent")
  cache = arguments.text("--data-cache-path")
  if cache is not None and folder == cache and any(blend and len(blend.prefixes) > 1 for blend in data.parts[:2]):
    yield _Key("blend_index_dir", cache, "--data-cache-path, where Megatron keeps the blend too")
  cache = arguments.text("--object-storage-cache-path")
  if cache is not None:
    yield _Key("mmap_remote_cache_dir", cache, "--object-storage-cache-path")


def _files(blend: Blend, folder: str) -> str:
  """Returns the value of grain_train_files or grain_eval_files.

  Raises:
    MMapError: if a path holds what the key gives a meaning of its own.
  """
  several = len(blend.prefixes) > 1
  for path in (folder, *blend.prefixes):
    marks = ";|" + "," * (several and blend.weights is None)
    if not path or any(mark in path for mark in marks) or re.search(r":(?!//)", path):
      raise MMapError(
          f"{path!r} cannot be named in grain_train_files, where ':', ';', '|' and ',' have a meaning; give it another "
          "name by a link."
      )
  entries = [f"{folder}|{prefix}" for prefix in blend.prefixes]
  if several and blend.weights is not None:
    entries = [f"{entry},{weight}" for entry, weight in zip(entries, blend.weights, strict=True)]
  return ";".join(entries)


def _sources(arguments: Arguments, part: str) -> str:
  """Names the argument that the data of a part comes from."""
  names = ("--data-path", "--data-args-path", f"--{part}-data-path", "--per-split-data-args-path")
  return next(name for name in names if name in arguments)


def _percent(surplus: float) -> float:
  """Returns a share in percent, which divided by 100 is the share again where floating-point numbers can say it."""
  rounded = round(surplus * 100, 10)
  return rounded if 1 + rounded / 100 == 1 + surplus else surplus * 100


def _length_keys(data: MegatronData, devices: int, consumed: int) -> Iterator[_Key]:
  asked, batch = data.samples[0], data.global_batch_size
  per_device = _per_device(batch, devices, "--global-batch-size")
  steps = (asked - consumed) // batch
  if steps < 1:
    raise MMapError(
        f"--consumed-samples {consumed} leaves no step of {batch} of the run's {asked} samples; give the samples read so "
        "far."
    )
  if data.parts[0] is not None:
    source = "train_iters * global_batch_size, or train_samples"
    yield _Key("mmap_npy_num_samples", data.requested(0), source + _surplus(data, 0))
    if consumed:
      yield _Key("mmap_npy_start_sample", consumed, "--consumed-samples")
  yield _Key("steps", steps, "those that are left" if consumed else "--train-iters, or --train-samples")
  yield _Key("per_device_batch_size", per_device, f"--global-batch-size {batch} on {devices} device(s)")


def _evaluation_keys(arguments: Arguments, data: MegatronData, folder: str, devices: int) -> Iterator[_Key]:
  valid = data.parts[1]
  if valid is None or not data.evaluates() or _several_validations(arguments, data):
    yield _Key("eval_interval", -1, "no evaluation")
    return
  per_device = _per_device(data.eval_batch_size, devices, "--eval-global-batch-size")
  yield _Key("grain_eval_files", _files(valid, folder), _sources(arguments, "valid"))
  yield _Key("eval_interval", data.eval_interval, "--eval-interval" + _by_default(arguments, "--eval-interval"))
  if data.samples[1] is None:
    yield _Key("eval_steps", -1, "--full-validation")
  else:
    yield _Key("eval_steps", data.eval_iters, "--eval-iters" + _by_default(arguments, "--eval-iters"))
    source = "(train_iters // eval_interval + 1) * eval_iters * global_batch_size"
    yield _Key("mmap_npy_num_eval_samples", data.requested(1), source + _surplus(data, 1))
  if data.eval_batch_size != data.global_batch_size:  # else it follows per_device_batch_size
    source = f"--eval-global-batch-size {data.eval_batch_size} on {devices} device(s)"
    yield _Key("eval_per_device_batch_size", per_device, source)


def _per_device(batch: int, devices: int, source: str) -> int | float:
  """Returns the samples of a device; a share of one where there are more devices than samples, as MaxText multiplies it.

  Raises:
    MMapError: if no such number gives the batch.
  """
  if batch % devices == 0:
    return batch // devices
  if batch < devices and int(devices * (batch / devices)) == batch:
    return batch / devices
  raise MMapError(f"{source} {batch} cannot be divided among {devices} devices; give another --devices.")


def _surplus(data: MegatronData, part: int) -> str:
  return ", and the surplus of a blend of one" if data.requested(part) != data.samples[part] else ""


def _by_default(arguments: Arguments, name: str) -> str:
  return "" if name in arguments else " (Megatron's default)"


def _field_keys(arguments: Arguments, eod_id: int | None) -> Iterator[_Key]:
  reset = "--reset-attention-mask" in arguments
  yield _Key("reset_attention_mask", reset, "--reset-attention-mask and --reset-position-ids")
  yield _Key("eod_mask_loss", "--eod-mask-loss" in arguments, "--eod-mask-loss")
  yield _Key("packing_max_segments_per_sample", 0, "Megatron keeps every document boundary")
  if eod_id is not None:
    yield _Key("mmap_eod_id", eod_id, "--eod-id")
  if (padded := _padded_vocabulary(arguments)) is not None:
    yield _Key("vocab_size", padded, "--vocab-size, padded; the value of a model_name goes before it")


def _padded_vocabulary(arguments: Arguments) -> int | None:
  if (padded := arguments.given("--padded-vocab-size", 1)) is not None:
    return padded
  if (size := arguments.given("--vocab-size", 1)) is None:
    return None
  multiple = arguments.whole("--make-vocab-size-divisible-by", 128, 1)
  multiple *= arguments.whole("--tensor-model-parallel-size", 1, 1)
  return math.ceil(size / multiple) * multiple


def _other_keys(arguments: Arguments) -> Iterator[_Key]:
  if (workers := arguments.given("--num-workers")) is not None:
    yield _Key("grain_worker_count", workers, "--num-workers")
  if (period := arguments.given("--save-interval", 1)) is not None:
    yield _Key("checkpoint_period", period, "--save-interval")


# What is left to say.

_REASONS = {
    "--test-data-path": "MaxText has no test phase",
    "--rampup-batch-size": "the batch size is constant here; the order of samples is the same, their steps are not",
    "--step-batch-size-schedule": "the batch size is constant here, and Megatron asks for other numbers of samples",
    "--phase-transition-iterations": "Megatron asks for the samples of a phase; mmap_npy_num_samples is the whole run's",
    "--iterations-to-skip": "every step trains here",
    "--skip-train": "a run here trains; Megatron asks for other numbers of samples when it only evaluates",
    "--start-eval-at-iter": "evaluation begins with the first eval_interval; the numbers of samples are Megatron's",
    "--sft": "conversations are not read by mmap_npy",
    "--allow-ambiguous-pad-tokens": "no token id is treated as padding here",
    "--dataloader-inter-document-masking": "reset_attention_mask keeps attention in a document, and resets positions",
}


def _no_equal(arguments: Arguments, data: MegatronData, consumed: int) -> Iterator[tuple[str, str]]:
  """Yields arguments that have no equal here, each with the reason."""
  yield from ((name, _REASONS[name]) for name in arguments.names() if name in _REASONS)
  for name in arguments.names():
    if name.startswith("--fim-"):
      yield name, "samples are not rearranged to fill in the middle"
  loader = arguments.text("--dataloader-type", "single")
  if loader != "single":
    yield f"--dataloader-type {loader}", "samples are read once through in their order, as by Megatron's 'single'"
  resets = [name for name in ("--reset-attention-mask", "--reset-position-ids") if name in arguments]
  if len(resets) == 1:
    other = "positions start again with each document" if resets[0] == "--reset-attention-mask" else "neither is reset"
    yield f"{resets[0]} alone", f"one key resets attention and positions: with this YAML, {other}"
  if data.split and megatron_arguments.shares_of(data.split)[2] > 0:
    yield "--split (test part)", "MaxText has no test phase"
  if _several_validations(arguments, data):
    yield "--multiple-validation-sets", "one validation set is read; evaluation is off until grain_eval_files names it"
  elif data.evaluates() and data.samples[1] is not None:
    yield "evaluation after the first", "every evaluation reads the same samples from the first on; Megatron reads on"
  for number, blend in enumerate(data.parts[:1] if data.split else data.parts[:2]):
    if blend is not None and any(float(weight) == 0 for weight in blend.weights or ()):
      part = "" if data.split else ("train", "valid")[number] + " data: "
      yield f"{part}weight 0", "the dataset is never read here; Megatron may draw from it where shares are equal"

  rest = (data.samples[0] - consumed) % data.global_batch_size
  if consumed and rest and data.parts[0] is not None:
    yield (
        f"--consumed-samples {consumed}",
        f"it leaves no whole number of steps; the last {rest} of the run's {data.samples[0]} samples are not read",
    )


def _several_validations(arguments: Arguments, data: MegatronData) -> bool:
  """Whether Megatron evaluates each dataset of the valid part alone."""
  valid = data.parts[1]
  return "--multiple-validation-sets" in arguments and not data.split and valid is not None and len(valid.prefixes) > 1


def _to_set(arguments: Arguments, data: MegatronData, eod_id: int | None, devices: int | None) -> Iterator[str]:
  model = arguments.text("--tokenizer-model")
  theirs = "" if model is None else f" (Megatron: --tokenizer-model {model})"
  yield f"model_name, tokenizer_path{theirs}, run_name, base_output_directory: this YAML only describes the data."
  for part, blend in list(zip(megatron_arguments.PARTS, data.parts, strict=True))[: 1 if data.split else 2]:
    for number in blend.numbers() if blend is not None else ():
      yield (
          f"weights: {number!r} of {_sources(arguments, part)} is taken as a dataset's path, as Megatron does, since the "
          "list is not one of a weight before each dataset."
      )
  if eod_id is None and data.parts[0] is not None:
    yield "mmap_eod_id: the token that preprocessing appended with --append-eod (its default in the base config is 2)."
  if devices is None:
    yield (
        f"per_device_batch_size: {data.global_batch_size} divided by the devices; with gradient_accumulation_steps, by "
        "these too, and eval_per_device_batch_size, which they do not change."
    )
  if _padded_vocabulary(arguments) is None:
    yield "vocab_size: the padded one of the Megatron run, which it logs at the start."


# The text.


def _yaml(keys: list[_Key], facts: dict) -> str:
  ignored = [", ".join(facts["ignored"])] if facts["ignored"] else []
  lines = [
      "# Made by mmap-index from-megatron. Samples and their order are those of the Megatron-LM run, as long as the",
      "# pinned numbers of samples stay.",
      *_paragraph("To be set", facts["to_set"]),
      *_paragraph("No equal", [f"{name}: {reason}." for name, reason in facts["no_equal"].items()]),
      *_paragraph("Ignored, since they do not concern the data or are not known", ignored),
      f'base_config: "{BASE_CONFIG}"',
      "",
  ]
  width = max(len(f"{key.name}: {_scalar(key.value)}") for key in keys if len(_scalar(key.value)) < 40)
  lines += [f"{f'{key.name}: {_scalar(key.value)}':<{width}}  # {key.source}" for key in keys]
  return "\n".join(lines) + "\n"


def _paragraph(title: str, items: list[str]) -> list[str]:
  if not items:
    return []
  indents = {"initial_indent": "# - ", "subsequent_indent": "#   "}
  wrap = textwrap.TextWrapper(118, **indents, break_on_hyphens=False, break_long_words=False)
  return ["#", f"# {title}:", *(line for item in items for line in wrap.wrap(" ".join(item.split())))]


def _scalar(value: Any) -> str:
  """Writes a value as YAML: what JSON writes is YAML too."""
  return json.dumps(value, ensure_ascii=False)
