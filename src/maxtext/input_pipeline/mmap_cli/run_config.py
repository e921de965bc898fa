# SPDX-License-Identifier: Apache-2.0
"""Reads a run's config as the run does, on a machine without its devices."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
import contextlib
import importlib
import logging
import os
import re
import textwrap
from typing import Any

from maxtext.input_pipeline.mmap_cli import console

_LOGGERS = ("absl", "maxtext._release.configs.pyconfig")


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds CONFIG, keys and devices; the command's TAKES_OTHER_ARGUMENTS lets keys follow an option too."""
  parser.allow_abbrev = False
  add = parser.add_argument
  add("config", metavar="CONFIG.yml", help="config of the run: a path, or a name such as mmap_npy_megatron_gpt.yml")
  add("keys", nargs="*", metavar="key=value", help="keys as on the command line of the run")
  add("--devices", type=console.positive, metavar="N", help="devices of the run; default: 1, or compile_topology's")


def read(options: argparse.Namespace, **keys: Any):
  """Returns the config; nothing touches an accelerator.

  Args:
    keys: more keys, which go before those of the options.

  Raises:
    MMapError: what is wrong with it, in one sentence.
  """
  from maxtext.input_pipeline._mmap_files import MMapError

  if not options.config.endswith(".yml"):
    raise MMapError(f"{options.config!r} is no config; name a file that ends in .yml.")
  given = [*options.keys, *options.others]  # others: those after an option
  for text in given:
    if "=" not in text or text.startswith("-"):
      raise MMapError(f"{text!r} is no key=value; write keys as on the command line of the run.")
  os.environ["JAX_PLATFORMS"] = "cpu"
  with _quiet():
    return _read(options, given, keys)


def _read(options: argparse.Namespace, given: list[str], keys: dict[str, Any]):
  from maxtext.input_pipeline._mmap_files import MMapError

  pyconfig: Any = importlib.import_module("maxtext.configs.pyconfig")  # here, since it imports JAX

  keys = {"skip_jax_distributed_system": True, "log_config": False, **keys}
  if options.devices is not None:
    keys |= {"internal_compile": True, "internal_compile_num_devices": options.devices}
  words = [*given, *(f"{key}={value}" for key, value in keys.items())]
  try:
    return pyconfig.HyperParameters(pyconfig._initialize_pydantic(["", options.config, *words]))
  except Exception as error:
    raise MMapError(_sentence(error, pyconfig._error_for_user(error))) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
  """Keeps MaxText's own log lines about a config out of a command's answer; errors are still logged."""
  loggers = [logging.getLogger(name) for name in _LOGGERS]
  levels = [logger.level for logger in loggers]
  for logger in loggers:
    logger.setLevel(logging.ERROR)
  try:
    yield
  finally:
    for logger, level in zip(loggers, levels, strict=True):
      logger.setLevel(level)


def _sentence(error: Exception, ours: Exception | None) -> str:
  """Returns what is wrong as one line: an error of ours, or what pydantic and others say, shortened."""
  import pydantic

  if ours is not None:
    return str(ours)
  if isinstance(error, pydantic.ValidationError):
    found = error.errors(include_url=False, include_input=False)
    texts = [": ".join(filter(None, (".".join(map(str, part["loc"])), part["msg"]))) for part in found]
  elif unknown := re.match(r"'(\w+)' not in '", str(error)):
    texts = [f"there is no key {unknown[1]!r}"]
  else:
    texts = [str(error)]
  text = textwrap.shorten("; ".join(texts), 400, placeholder=" ...").rstrip(".")
  return f"the config cannot be used ({text}); correct the key."
