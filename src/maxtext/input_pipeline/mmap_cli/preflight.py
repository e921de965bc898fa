# SPDX-License-Identifier: Apache-2.0
"""`preflight`: what a run will read and build, and everything that is wrong with it, before it is started."""

from __future__ import annotations

import argparse
from typing import Any

from maxtext.input_pipeline.mmap_cli import console, run_config

NAME = "preflight"
SUMMARY = "check the data of a run before it is started"
DESCRIPTION = """\
Reads a config as the run does and says what the run will read, in which order, and what it has to build for it; and
reports every problem at once. Needs no accelerator and builds nothing. The exit code is 1 if there is a problem.

Index files are looked at by their headers, blends by their first draws too; 'mmap-index verify' reads them whole.
"""
EXAMPLE = """\
example (a run on 8 devices):
  mmap-index preflight run.yml --devices 8 per_device_batch_size=8
"""
TAKES_OTHER_ARGUMENTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
  run_config.add_arguments(parser)


def run(options: argparse.Namespace) -> dict:
  """Reads the config and looks at its data.

  Raises:
    MMapError: if the config reads no Megatron dataset.
  """
  from maxtext.input_pipeline._mmap_files import MMapError
  from maxtext.input_pipeline.mmap_cli import resources

  findings, builds = resources.Findings(), []
  config = _read_config(options, findings)
  facts: dict[str, Any] = {"config": options.config, "parts": []}
  if config is not None:
    from maxtext.input_pipeline import _mmap_config
    from maxtext.input_pipeline.mmap_cli import preflight_checks as checks

    if config.grain_file_type not in _mmap_config.FILE_TYPES:
      raise MMapError(
          f"{options.config} has grain_file_type={config.grain_file_type}; a run on Megatron datasets needs mmap_npy or "
          "mmap."
      )
    facts |= {
        "file_type": config.grain_file_type,
        "devices": config.num_target_devices,
        "global_batch_size": config.global_batch_size_to_train_on,
        "steps": config.steps,
        "start_sample": config.mmap_npy_start_sample,
        "not_strict": checks.not_strict(config),
    }
    parts = [False, True] if config.eval_interval > 0 else [False]
    facts["parts"] = [checks.check_part(config, evaluation, findings, builds) for evaluation in parts]
    facts |= {"disk": resources.check_disk(builds, findings), "memory": resources.check_memory(builds, findings)}
    resources.check_output(config, findings)
  return {**facts, "warnings": list(findings.warnings), "problems": list(findings.problems)}


def _read_config(options: argparse.Namespace, findings):
  """Returns the config; one that is refused is read again without its checks of data, so that more problems are found."""
  from maxtext.input_pipeline import _mmap_config
  from maxtext.input_pipeline._mmap_files import MMapError

  try:
    config = run_config.read(options)
  except MMapError as error:
    findings.problem(error)
    try:
      config = run_config.read(options, dataset_type="synthetic")
    except MMapError:
      return None
    for problem in _mmap_config.problems(config):
      findings.problem(problem)
    return config
  if config.dataset_type != "grain":
    found = config.dataset_type.value
    raise MMapError(f"{options.config} has dataset_type={found}; a run on Megatron datasets needs dataset_type=grain.")
  return config


def exit_code(facts: dict) -> int:
  return 1 if facts["problems"] else 0


def render(facts: dict) -> str:
  blocks = []
  if "file_type" in facts:
    blocks.append(_heading(facts))
    blocks += [_part(part) for part in facts["parts"]]
    blocks.append(_needs(facts))
  blocks += [_sentences("warning", facts["warnings"]), _sentences("problem", facts["problems"])]
  if not facts["problems"]:
    blocks.append("no problem found")
  return "\n\n".join(filter(None, blocks))


def _heading(facts: dict) -> str:
  other = ", ".join(f"{key}={str(value).lower()}" for key, value in facts["not_strict"].items())
  return console.table({
      "config": f"{facts['config']} ({facts['file_type']})",
      "global batch": f"{facts['global_batch_size']:,} samples on {facts['devices']:,} device(s)",
      "steps": f"{facts['steps']:,}" + (f", from sample {facts['start_sample']:,}" if facts["start_sample"] else ""),
      **({"other than mmap_npy_megatron_gpt.yml": other or "nothing"} if facts["file_type"] == "mmap_npy" else {}),
  })


def _part(part: dict) -> str:
  asked = part["samples_asked"]
  title = (
      f"{part['key']}: {_number(part['samples_read'])} samples read"
      + (f", {asked:,} asked for" if asked is not None else "")
      + f", {_number(part['samples_available'])} in the order"
  )
  header = ["", "dataset", "weight", "sequences", "tokens", "used", "epochs", "asked", "has", "drawn", "indices"]
  rows = [_row(dataset) for dataset in part["datasets"]]
  lines = [title, console.columns(header, rows)] if rows else [title]
  if part["blend"]:
    lines.append(f"blend of {part['blend']['samples']:,} samples: {part['blend']['indices']}")
  return "\n".join(lines)


def _row(dataset: dict) -> list[str]:
  used = dataset.get("sequences_used")
  epochs = _number(dataset.get("epochs")) + (" (last apart)" if dataset.get("separate_last_epoch") else "")
  name = dataset.get("name") or ":".join(dataset["paths"])
  shards = f" ({dataset['shards']} shards)" if dataset.get("shards", 1) > 1 else ""
  return [
      str(dataset["number"]),
      name + shards,
      "-" if dataset.get("weight") is None else f"{dataset['weight']:g}",
      _number(dataset.get("sequences")),
      _number(dataset.get("tokens")),
      f"{used[0]:,} to {used[1]:,}" if used else "-",
      epochs,
      _number(dataset.get("samples_asked")),
      _number(dataset["samples_available"]),
      _number(dataset.get("samples_drawn")),
      dataset.get("indices", "-"),
  ]


def _number(value: int | None) -> str:
  return "-" if value is None else f"{value:,}"


def _needs(facts: dict) -> str:
  rows = {f"disk, {disk['folder']}": f"{disk['needed']:,} bytes of {disk['free']:,}" for disk in facts["disk"]}
  memory = facts["memory"]
  rows["memory to build"] = f"{memory['needed']:,} bytes of {_number(memory['free'])}"
  return console.table(rows)


def _sentences(name: str, texts: list[str]) -> str:
  return "\n".join(f"{name}: {text}" for text in texts)
