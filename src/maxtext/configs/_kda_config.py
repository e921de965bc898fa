# SPDX-License-Identifier: Apache-2.0
"""Checks of the config keys of Kimi Delta Attention, made when the config is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import math

import numpy as np

IMPLEMENTATIONS = ("auto", "pallas", "xla", "tokamax", "tops", "reference")
# Other libraries' kernels: they take offsets with room for a fixed number of segments, and know no context parallelism.
EXTERNAL = ("tokamax", "tops")
# Values of decoder_block whose layers use Kimi Delta Attention.
DECODER_BLOCKS: frozenset[str] = frozenset()

_CHUNK = 64
_TOKAMAX_BOUND = -5.0  # tokamax 0.0.17 takes lower bounds from here to below 0 (its ops/kda/base.py)


class KdaConfigError(ValueError):
  """A key of Kimi Delta Attention that cannot be used; the message is one sentence for the user."""


def uses_kda(config) -> bool:
  """Whether the layers of a config's model use Kimi Delta Attention."""
  return str(getattr(config.decoder_block, "value", config.decoder_block)) in DECODER_BLOCKS


def validate(config, uses_kda: bool) -> None:
  """Checks the keys of a config.

  Args:
    config: with the keys of the field group KimiDeltaAttention and those of the release.
    uses_kda: whether the model has such layers; if so, what the rest of the run must allow them is checked too.

  Raises:
    KdaConfigError: one sentence about the first key that cannot be used.
  """
  for problem in _of_keys(config):
    raise KdaConfigError(problem)
  if uses_kda:
    sizes = {
        key: getattr(config, f"ici_{key}_parallelism", 1) * getattr(config, f"dcn_{key}_parallelism", 1)
        for key in dict.fromkeys((config.context_sharding, "context_usp_ulysses"))
    }
    validate_context_parallelism(config, sizes)


def validate_context_parallelism(config, sizes: Mapping[str, int]) -> None:
  """Checks what rows whose tokens are sharded need.

  Args:
    config: as in `validate`.
    sizes: the size of each mesh axis that shards the tokens of a row.

  Raises:
    KdaConfigError: one sentence about the key that cannot be used.
  """
  # A size of -1, "what is left of the devices", is known when there is a mesh: the layer checks again.
  size = math.prod(size for size in sizes.values() if size > 0)
  if size == 1:
    return
  if config.context_parallel_load_balance:
    raise KdaConfigError(
        f"context_parallel_load_balance is true and {size} devices share each row ({_named(sizes)}); Kimi Delta "
        "Attention carries a state from token to token and needs them in order, set it to false."
    )
  if config.kda_implementation in EXTERNAL:
    raise KdaConfigError(
        f"kda_implementation is {config.kda_implementation}, which cannot continue a segment that another device began, "
        f"and {size} devices share each row ({_named(sizes)}); use auto."
    )


def _named(sizes: Mapping[str, int]) -> str:
  return ", ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)


def _of_keys(config) -> Iterator[str]:
  """Yields a sentence about each key that cannot be used."""
  if config.linear_conv_kernel_dim < 1:
    yield f"linear_conv_kernel_dim is {config.linear_conv_kernel_dim}; expected the taps of a convolution, 1 or more."
  yield from _of_gate(config)
  name = config.kda_implementation
  if name not in IMPLEMENTATIONS:
    yield f"kda_implementation is {name!r}; expected one of {', '.join(IMPLEMENTATIONS)}."
  segments = config.max_kda_segments
  if segments < 0:
    yield f"max_kda_segments is {segments}; expected 0 (no maximum) or the most segments of one device's rows."
  if name in EXTERNAL and segments == 0:
    yield (
        f"max_kda_segments is 0 and kda_implementation is {name}, whose kernels have room for a fixed number of "
        "segments; set it to the most segments that one device's rows hold (mmap-index stats counts them), or use auto."
    )
  if name == "tokamax":
    yield from _of_tokamax(config)


def _of_gate(config) -> Iterator[str]:
  bound = config.kda_lower_bound
  if not config.use_kda_safe_gate:
    if bound != 0:
      yield (
          f"kda_lower_bound is {bound} and use_kda_safe_gate is false, whose gate has no bound; set use_kda_safe_gate to "
          "true, or kda_lower_bound to 0."
      )
    return
  least = float(np.finfo(np.float32).max) / _CHUNK
  if not (-least < bound and np.float32(bound) < 0):
    yield (
        f"kda_lower_bound is {bound} and use_kda_safe_gate is true; expected a negative number (Ling 3: -5) of which "
        f"{_CHUNK}, a chunk's sum of log decays, are finite in float32."
    )


def _of_tokamax(config) -> Iterator[str]:
  if not config.use_kda_safe_gate:
    yield (
        "use_kda_safe_gate is false and kda_implementation is tokamax, whose gate needs a lower bound; set "
        "use_kda_safe_gate to true and kda_lower_bound to the model's (Ling 3: -5), or use auto."
    )
  elif config.kda_lower_bound < _TOKAMAX_BOUND:
    yield (
        f"kda_lower_bound is {config.kda_lower_bound} and kda_implementation is tokamax, which takes {_TOKAMAX_BOUND:g} "
        "or more; use auto."
    )
