# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says of the order of samples, and whether a run continues in it.

An order is a JSON-able dict. That of one dataset is `IndexDescription.built_from`; that of a blend has `weights` and
`children`; that of `grain_file_type=mmap` has `kind`. Each also has the numbers by which users know it.
"""

from __future__ import annotations

from typing import Any

from maxtext.input_pipeline._mmap_files import MMapError

STATE_FORMAT = 1

# Not the split's text: equal ranges of sequences are equal orders. The rest are numbers for messages.
_IGNORED = {"split", "split_index", "requested_samples", "available_samples", "needed_samples", "blend_margin"}

_ADVICE = {
    "datasets": ("its dataset is", "read the dataset that the saved run read"),
    "sequences": ("it reads sequences", "set mmap_npy_split as in the saved run"),
    "sequence_length": ("the sequence length is", "set max_target_length as in the saved run"),
    "seed": ("the seed is", "set data_shuffle_seed (and enable_data_shuffling) as in the saved run"),
    "weights": ("the weights are", "set the weights as in the saved run"),
    "exhaustive": ("drawing every sample once is", "set eval_steps and the number of samples as in the saved run"),
}


def check_state(state: Any, order: dict[str, Any]) -> None:
  """Raises MMapError unless a saved iterator state continues in this order."""
  saved, position = (state.get("order"), state.get("next_sample")) if isinstance(state, dict) else (None, None)
  whole = isinstance(saved, dict) and type(position) is int and position >= 0  # True is an int too
  if not whole or state.get("format") != STATE_FORMAT:
    raise MMapError(
        "the checkpoint's data iterator state was not saved by grain_file_type=mmap_npy or mmap of this version, so its "
        "position cannot be continued; start a new run_name (load_parameters_path keeps the weights, and "
        "mmap_npy_start_sample=STEPS * BATCH starts the data where a run in the same order stopped)."
    )
  if _kind(saved) != _kind(order):
    raise MMapError(
        f"the checkpoint was saved by a run that read {_kind(saved)}, and this run reads {_kind(order)}; set "
        "grain_file_type and grain_train_files as in the saved run, or start a new run_name."
    )
  _check_part(saved, order, "")
  children = order.get("children", [])
  for number, (then, now) in enumerate(zip(saved.get("children", []), children, strict=True)):
    _check_part(then, now, f" of dataset {number}")
  if any(_other(then, now) for then, now in zip(_parts(saved), _parts(order), strict=True)):
    raise MMapError(_other_epochs(saved, order))


def _kind(order: dict[str, Any]) -> str:
  if order.get("kind") == "mmap":
    return f"grain_file_type=mmap with {len(order.get('datasets') or [])} datasets"
  if "children" in order:
    children = order["children"]
    return f"a blend of {len(children) if isinstance(children, list) else 0} datasets"
  return "one dataset"


def _parts(order: dict[str, Any]) -> list[dict[str, Any]]:
  """Returns an order and those of its children."""
  return [{key: value for key, value in order.items() if key != "children"}, *order.get("children", [])]


def _other(saved: Any, order: dict[str, Any]) -> list[str]:
  """Returns the keys in which two orders differ."""
  if not isinstance(saved, dict):
    return list(order)
  return [key for key in order if key not in _IGNORED | {"children"} and saved.get(key) != order[key]]


def _check_part(saved: dict[str, Any], order: dict[str, Any], which: str) -> None:
  """Raises MMapError for a difference that a key mends."""
  differing = _other(saved, order)
  for key, (noun, advice) in _ADVICE.items():
    if key in differing:
      then = saved.get(key) if isinstance(saved, dict) else None
      raise MMapError(
          f"the checkpoint was saved with another order of samples{which}: {noun} {_short(then)} there and "
          f"{_short(order[key])} here; {advice}, or start a new run_name."
      )


def _other_epochs(saved: dict[str, Any], order: dict[str, Any]) -> str:
  """The sentence for an order that differs in the epochs, which follow from the number of samples asked for."""
  asked, available, needed = saved.get("requested_samples"), saved.get("available_samples") or 0, order["needed_samples"]
  if asked == order["requested_samples"] and saved.get("blend_margin") != order.get("blend_margin"):
    return (
        f"the checkpoint was saved with mmap_npy_blend_margin={saved.get('blend_margin')} and this run has "
        f"{order.get('blend_margin')}, which is another order; set it as in the saved run, or start a new run_name."
    )
  if available >= needed:
    advice = f"set mmap_npy_num_samples={asked} to continue"
  else:
    advice = f"its order has {available} samples and this run needs {needed}, so lower steps to continue"
  return (
      f"the checkpoint was saved by a run that asked for {asked} samples ({_epochs(saved)}) and this run asks for "
      f"{order['requested_samples']} ({_epochs(order)}), which is another order; {advice}, or start a new run_name."
  )


def _short(value: Any) -> str:
  """Says a value of an order; datasets by size and the beginning of their checksum."""
  if isinstance(value, list) and value and all(isinstance(part, dict) and "digest" in part for part in value):
    parts = ((part.get("sequences"), part.get("tokens"), str(part["digest"])[:8]) for part in value)
    return ", ".join(f"{sequences} sequences, {tokens} tokens, {digest}" for sequences, tokens, digest in parts)
  return f"{value[0]} to {value[1]}" if isinstance(value, list) and len(value) == 2 else str(value)


def _epochs(order: dict[str, Any]) -> str:
  children = order.get("children")
  if children:
    return "epochs of the datasets: " + ", ".join(str(child.get("num_epochs")) for child in children)
  apart = ", the last shuffled apart" if order.get("separate_last_epoch") else ""
  return f"{order.get('num_epochs')} epoch{'s' if order.get('num_epochs') != 1 else ''}{apart}"
