# SPDX-License-Identifier: Apache-2.0
"""Stand-in: a run on Megatron data resumes at its exact sample, whatever the number of hosts, or is refused.

The release restarts at sample 0 where a checkpoint has no iterator state, and reads changed data at the old position.
"""

import functools
import inspect
import json
from typing import TYPE_CHECKING

from maxtext._release.common import checkpointing as release
from maxtext.common import grain_utility
from maxtext.input_pipeline._mmap_files import MMapError, unreadable
from maxtext.input_pipeline._mmap_iterator import GlobalOrderIterator
from maxtext.input_pipeline._mmap_order import check_state
from maxtext.utils import max_logging

if TYPE_CHECKING:
  from maxtext._release.common.checkpointing import *  # noqa: F403

globals().update({k: v for k, v in vars(release).items() if not k.startswith("__")})

_released_load = inspect.unwrap(release.load_state_if_possible)


@functools.wraps(_released_load)
def load_state_if_possible(checkpoint_manager, data_iterator, *args, step: int = -1, **kwargs):
  """The release's function, after a look at the data iterator's saved state.

  Raises:
    MMapError: if a checkpoint of this run exists whose data position cannot be continued.
  """
  iterator = getattr(data_iterator, "local_iterator", None)
  if checkpoint_manager is not None and isinstance(iterator, GlobalOrderIterator):
    found = release.latest_step(checkpoint_manager) if step < 0 else step
    if found is not None:
      _check_position(checkpoint_manager.directory / str(found), found, iterator, kwargs.get("maxtext_config"))
    elif kwargs.get("load_full_state_from_path", args[1] if len(args) > 1 else ""):
      max_logging.warning(
          "load_full_state_path restores the step but not the data's position: the data starts at sample "
          f"{iterator.next_sample} of its order, as mmap_npy_start_sample says. To continue the data too, resume with "
          "the run_name of the saved run, or set that key to the samples that it had read."
      )
  return _released_load(checkpoint_manager, data_iterator, *args, step=step, **kwargs)


def _check_position(checkpoint, step: int, iterator: GlobalOrderIterator, config) -> None:
  """Raises MMapError unless a checkpoint's data position can be continued to the last step of the run."""
  path = _state_path(checkpoint)
  state = _read_state(path)
  try:
    check_state(state, iterator.order)
  except MMapError as error:
    raise MMapError(f"{path}: {error}") from None
  position, batch, available = state["next_sample"], iterator.global_batch_size, iterator.available_samples
  if config is not None and position + (config.steps - step - 1) * batch > available:  # the batch size may have changed
    raise MMapError(
        f"{checkpoint} continues at sample {position}, and {config.steps - step - 1} more steps of {batch} samples read "
        f"past the {available} of the order; lower steps, or start a new run_name."
    )
  max_logging.log(f"Data continues at sample {position} of the global order ({path}).")


def _state_path(checkpoint):
  """Returns a file with the iterator state of a checkpoint: it is the same on every host of the saved run."""
  folder = checkpoint / "iter"
  if not folder.exists():
    raise MMapError(
        f"{checkpoint} has no data iterator state (no 'iter' folder), so the data would start again at sample 0; start a "
        "new run_name (load_parameters_path keeps the weights)."
    )
  saved = grain_utility.saved_process(folder)
  if saved is None:
    raise MMapError(
        f"{folder} has no process_0-of-N.json, so the data's position is not known; start a new run_name "
        "(load_parameters_path keeps the weights)."
    )
  return folder / f"process_{saved[0]}-of-{saved[1]}.json"


def _read_state(path) -> dict:
  """Returns the iterator state in a file."""
  try:
    return json.loads(path.read_text())
  except (ValueError, RecursionError):
    return {}  # which no order accepts
  except OSError as error:
    raise unreadable(str(path), error) from error


# restore_lora and others of the release call it in this module.
release.load_state_if_possible = load_state_if_possible
