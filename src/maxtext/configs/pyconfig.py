# SPDX-License-Identifier: Apache-2.0
"""Stand-in: finds config files in two places, and turns a missing model config or bad data into one sentence.

- A config name is looked for in this branch's configs first, in the release's second, whatever the working directory.
- `_CONFIG_FILE_MAPPING` (which trainer has which default config) works for modules of both folders.
- A `model_name` without a YAML is an error; the release warns and trains a model of the default sizes.
- A missing config and bad Megatron data end the run with one sentence, no stack trace or pydantic's text around it.
"""

import contextlib
from contextvars import ContextVar
import difflib
import functools
import inspect
import os
from pathlib import Path
import re
import sys
from typing import Any

import omegaconf
import pydantic

from maxtext._release.configs import pyconfig as release
from maxtext.configs._kda_config import KdaConfigError
from maxtext.input_pipeline._mmap_indexed_dataset import MMapError

globals().update({k: v for k, v in vars(release).items() if not k.startswith("__")})

_OURS = Path(__file__).resolve().parent
_RELEASED = _OURS.parent / "_release" / "configs"
# MAXTEXT_CONFIGS_DIR is a user's own folder where the environment sets it, else the release's.
_CONFIG_DIRS = tuple(dict.fromkeys((Path(os.environ.get("MAXTEXT_CONFIGS_DIR", _OURS)), _OURS, _RELEASED)))

# The release looks for the default config and for the model config in two functions; the second needs the first's answer.
_config_path: ContextVar[str | None] = ContextVar("config_path", default=None)


class ConfigNotFoundError(FileNotFoundError):
  """A config file or model config that is not there; the message is one sentence for the user."""


def _find(name: str) -> str | None:
  """The path of a config named relative to the config folders, or None."""
  found = (os.path.normpath(folder / name) for folder in _CONFIG_DIRS if (folder / name).is_file())
  return next(map(_prefer_ours, found), None)


def _prefer_ours(path: str) -> str:
  """Our file in place of the released one of the same name: released tools name the release's base.yml by its path."""
  real = Path(path).resolve()
  if real.is_relative_to(_RELEASED) and (ours := _OURS / real.relative_to(_RELEASED)).is_file():
    return str(ours)
  return path


def resolve_config_path(param: str) -> str:
  """The file that a config argument names: a path, or a name relative to a config folder with or without that folder.

  `base.yml`, `post_train/sft.yml`, `src/maxtext/configs/base.yml` and `<checkout>/src/maxtext/configs/gpu/...` all do,
  and so do YAMLs elsewhere in the package, `src/maxtext/experimental/...`. What is found nowhere comes back below `src`,
  as in the release.
  """
  if os.path.isfile(param):
    return _prefer_ours(param)
  name = os.path.relpath(param, _OURS.parent) if os.path.isabs(param) else re.sub(r"^(src/)?maxtext/", "", param)
  return _find(name.removeprefix("configs/")) or _find(os.path.join("..", name)) or os.path.join("src", param)


def _resolve_or_infer_config(argv: list[str] | None = None, **kwargs) -> tuple[str, list[str]]:
  """The config file that the arguments name, or else the default of the running trainer; and the arguments after it."""
  script, *rest = argv or [""]
  if kwargs.get("base_config"):
    path = resolve_config_path(kwargs["base_config"])
  elif rest and rest[0].endswith(".yml"):
    path, rest = resolve_config_path(rest[0]), rest[1:]
  else:
    name = release._CONFIG_FILE_MAPPING.get(_module_from_path(script) or "", "base.yml")
    path = _find(name) or name
    release.logger.warning("No config file was named, using %s.", path)
  _config_path.set(path)
  return path, rest


def _module_from_path(path: str) -> str | None:
  """The module name of a file of this package, in either folder: the release's name for it, `maxtext....`."""
  real = Path(path).resolve()
  for package in (_RELEASED.parent, _OURS.parent):  # the inner folder first
    if real.is_relative_to(package):
      return ".".join(("maxtext", *real.relative_to(package).with_suffix("").parts))
  return None


def _load_config(config_name: str) -> Any:
  """Loads a YAML over its `base_config`, that one over its own, and so on."""
  return omegaconf.OmegaConf.merge(*reversed(_chain(config_name).values()))


def _chain(config_name: str) -> dict[str, Any]:
  """The contents of a YAML and of the base configs below it, by file.

  A base is looked for beside the file that names it, then in the config folders. A file that is in the chain already is
  passed over, so that a user's own `base.yml` can say `base_config: "base.yml"`.
  """
  if not os.path.isfile(config_name):
    name = config_name.removeprefix("src/")  # what resolve_config_path puts before a name that it does not find
    raise ConfigNotFoundError(
      f"Config {name!r} was not found, neither as a file nor in {_folders()}{_suggestion(name, _names())}; "
      "name an existing YAML file."
    )
  chain: dict[str, Any] = {}
  file: str | None = config_name
  while file:
    cfg: Any = omegaconf.OmegaConf.load(file)
    chain[os.path.realpath(file)] = cfg
    file = _find_base(cfg.base_config, file, chain) if cfg.get("base_config") else None
  return chain


def _find_base(base: str, named_by: str, chain: dict[str, Any]) -> str:
  beside = os.path.join(os.path.dirname(named_by), base)
  for candidate in (_prefer_ours(beside), beside, *(os.path.join(folder, base) for folder in _CONFIG_DIRS)):
    if os.path.isfile(candidate) and os.path.realpath(candidate) not in chain:
      return candidate
  raise ConfigNotFoundError(
    f"{named_by}: base_config {base!r} was not found, neither beside this file nor in {_folders()}"
    f"{_suggestion(base, _names())}; name an existing YAML file."
  )


@functools.wraps(inspect.unwrap(release._resolve_or_infer_addl_config))
def _resolve_or_infer_addl_config(**kwargs):
  # The release looks for the model config right after this call: beside the config file, one folder up, then beside its
  # own __file__, and a miss is a warning. So a miss is an error here, and __file__ is set to the folder, ours or the
  # release's, that has the model.
  model = str(kwargs.get("model_name", "default")).replace("-Instruct", "")
  name = os.path.join("models", f"{model}.yml")
  config = _config_path.get() or ""
  beside = os.path.dirname(config)
  if model != "default" and not any(os.path.isfile(os.path.join(d, name)) for d in (beside, os.path.dirname(beside))):
    if found := _find(name):
      release.__file__ = os.path.join(os.path.dirname(os.path.dirname(found)), "pyconfig.py")
    # A model may also be described by the config itself, in a file of its name.
    elif model not in (Path(file).stem for file in (_chain(config) if config else ())):
      raise ConfigNotFoundError(
        f"model_name {model!r} has no config: there is no {name} beside the config file nor in {_folders()}"
        f"{_suggestion(model, [f.stem for d in _CONFIG_DIRS for f in d.glob('models/*.yml')])}; "
        "name one of the models there, or add the file."
      )
  return _resolve_or_infer_addl_config.__wrapped__(**kwargs)


def _names() -> list[str]:
  return [str(file.relative_to(folder)) for folder in _CONFIG_DIRS for file in folder.rglob("*.yml")]


def _folders() -> str:
  return " or ".join(map(str, _CONFIG_DIRS))


def _suggestion(name: str, names: list[str]) -> str:
  close = difflib.get_close_matches(name, sorted(set(names)))
  return f" (did you mean {' or '.join(close)}?)" if close else ""


def _error_for_user(e: BaseException) -> Exception | None:
  """The one-sentence error that `e` is, or that pydantic wrapped while it ran our validator."""
  if isinstance(e, (MMapError, KdaConfigError, ConfigNotFoundError)):
    return e
  if isinstance(e, pydantic.ValidationError):
    causes = (error.get("ctx", {}).get("error") for error in e.errors(include_url=False, include_input=False))
    return next((cause for cause in causes if isinstance(cause, (MMapError, KdaConfigError))), None)
  return None


@functools.wraps(inspect.unwrap(release._handle_config_exception))
def _handle_config_exception(e: Exception):
  error = _error_for_user(e)
  # Under pytest the release raises. It also does so where `unittest` is loaded, which some libraries do in ordinary runs.
  if error is None or "pytest" in sys.modules:
    return _handle_config_exception.__wrapped__(e)
  with contextlib.suppress(OSError), open("/dev/termination-log", "r+", encoding="utf-8") as log:
    log.write(f"{error}\n")  # where Kubernetes looks for a container's last words, as in the release
  sys.stdout.flush()
  print(error, file=sys.stderr, flush=True)
  sys.exit(2)


# The release's functions find these names in their own module.
release.resolve_config_path = resolve_config_path
release._resolve_or_infer_config = _resolve_or_infer_config
release._module_from_path = _module_from_path
release._load_config = _load_config
release._resolve_or_infer_addl_config = _resolve_or_infer_addl_config
release._handle_config_exception = _handle_config_exception

__all__ = list(release.__all__)
# So that `pyconfig(...)` can be called, as with the release's module.
sys.modules[__name__].__class__ = release._CallablePyconfigModule  # pyrefly: ignore[bad-argument-type]
