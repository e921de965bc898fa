# SPDX-License-Identifier: Apache-2.0
"""Refuses a batch with more segments than the kernels of tokamax and tops have room for, before a step sees it.

Those kernels have room for `max_kda_segments` segments on a device. What exceeds it becomes NaN there; here it is a
sentence. The batch is still NumPy, of this host's rows. A row lies on one device, or on several that share it, and a
device holds these rows at once:

- consecutive rows of the global batch, as many as its share of the batch axes (`activation_kv_batch`);
- with gradient accumulation every n-th of them, since the step deals its rows out to the n microbatches in turn;
- with pipeline parallelism or a batch size that ramps up, rows that depend on more than this batch: every row may then
  have its share of the room, `max_kda_segments` / rows on a device. This refuses some batches that would fit, and none
  where the maximum is that of a row times the rows of a device.

The same share is what a host's part of a device's rows may have where hosts feed one device. Batches that never are this
process's NumPy arrays (`dataset_type=synthetic`, `colocated_python_data_input`) are not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from maxtext.common import common_types as names
from maxtext.configs import _kda_config
from maxtext.input_pipeline import multihost_dataloading
from maxtext.input_pipeline._mmap_files import MMapError
from maxtext.input_pipeline.grain_data_processing import kept_rows
from maxtext.utils import sharding

_FIELD = "inputs_segmentation"  # what the model gets as decoder_segment_ids


class KdaSegmentsError(MMapError):
  """A batch with more segments than max_kda_segments; the message is one sentence for the user."""


def install(iterator, config, mesh, evaluation: bool) -> None:
  """Lets an iterator, or each of a list, refuse batches if the config's kernels have a maximum; else does nothing."""
  if config.kda_implementation not in _kda_config.EXTERNAL or config.max_kda_segments <= 0:
    return
  for one in iterator if isinstance(iterator, list) else [iterator]:
    if isinstance(one, multihost_dataloading.MultiHostDataLoadIterator):
      one.check = SegmentCheck(config, mesh, evaluation)


def count_segments(segment_ids: np.ndarray) -> np.ndarray:
  """Counts the segments of each row as `segment_ids_to_cu_seqlens` does.

  Args:
    segment_ids: integers [B, T], 0 at padding.

  Returns:
    int64[B]. A row's start is a border, and so is each change to another id, also across padding.
  """
  later = segment_ids[:, 1:]
  begins = (later != segment_ids[:, :-1]) & (later != 0)
  return np.count_nonzero(begins, axis=1) + (segment_ids[:, 0] != 0)


class Layout(NamedTuple):
  """Which rows of this host a device holds at once.

  Attributes:
    places: int64[rows of this host], the place of each in the global batch; -1 if the step cuts it.
    groups: int64[rows of this host], rows of one number are held at once; -1 if cut.
    rows: rows that a device holds at once, some of them perhaps in other groups or on other hosts.
  """

  places: np.ndarray
  groups: np.ndarray
  rows: int


def lay_out(places: np.ndarray, used: int, shards: int, microbatches: int = 1, parts: int | None = None) -> Layout:
  """Lays out this host's rows.

  Args:
    places: see `Layout`.
    used: rows of the global batch, a multiple of shards * microbatches.
    shards: of the batch among the devices.
    microbatches: steps of gradient accumulation.
    parts: if not None, the rows of a shard and microbatch are taken in this many parts, in an order not known here.
  """
  on_shard = used // shards
  rows = on_shard // microbatches
  groups = places // on_shard * microbatches + places % microbatches
  if parts is not None:
    groups, rows = np.arange(len(places)), -(-rows // parts)
  return Layout(places, np.where(places < 0, -1, groups), rows)


class SegmentCheck:
  """Checks the batches of a run, or of its evaluation.

  A call takes a batch of this host, a mapping with `inputs_segmentation` [B, T] (without it, nothing is checked), and
  raises KdaSegmentsError if a device would hold more segments than max_kda_segments.
  """

  def __init__(self, config, mesh: jax.sharding.Mesh, evaluation: bool):
    self._config, self._mesh, self._evaluation = config, mesh, evaluation
    self._layout: Layout | None = None

  def __call__(self, batch: Mapping[str, Any]) -> None:
    if _FIELD not in batch:
      return
    ids = np.asarray(batch[_FIELD])
    if self._layout is None or len(self._layout.places) != len(ids):
      self._layout = self._lay_out(len(ids))
    problem = _problem(count_segments(ids), self._layout, self._config.max_kda_segments)
    if problem is not None:
      name, most = self._config.kda_implementation, self._config.max_kda_segments
      kind = "evaluation" if self._evaluation else "training"
      raise KdaSegmentsError(
          f"kda_implementation={name} has room for max_kda_segments={most} segments on a device, and {problem.rows} of "
          f"the {kind} batch, {problem.share}; raise max_kda_segments to {problem.needed} or more, or use "
          "kda_implementation=auto, which needs no maximum."
      )

  def _lay_out(self, local: int) -> Layout:
    """Lays out the rows of this host, `local` in number."""
    config, parts = self._config, None
    if self._evaluation:
      microbatches, micro = 1, config.micro_batch_size_to_eval_on
    else:
      # Tunix takes the microbatches from the iterator one by one.
      microbatches = 1 if config.use_tunix_gradient_accumulation else config.gradient_accumulation_steps
      micro = config.micro_batch_size_to_train_on
      parts = 1 if config.enable_rampup_batch_size else None
    if config.using_pipeline_parallelism:
      parts = config.num_pipeline_microbatches
    shards = batch_shards(config, self._mesh, micro)
    used = micro * microbatches
    return lay_out(kept_rows(self._mesh, local * jax.process_count(), used), used, shards, microbatches, parts)


def batch_shards(config, mesh: jax.sharding.Mesh, rows: int) -> int:
  """Returns among how many groups of devices the layers divide a batch of some rows."""
  replicas = mesh.shape["diloco"] if config.enable_diloco else 1
  axes = (names.KV_BATCH, names.ATTN_LENGTH, names.HEAD)
  spec = sharding.logical_to_mesh_axes(axes, mesh, rules=config.logical_axis_rules)
  # As in the layer: not divided over axes that the batch is too small for.
  spec = sharding.remove_incompatible_mesh_axes_from_partition_spec(
      spec, (rows // replicas, 1, 1), mesh, dims=(0,), allow_remove_axes=True
  )
  batch = spec[0] if len(spec) else None
  used = (batch,) if isinstance(batch, str) else batch or ()
  return replicas * math.prod(mesh.shape[axis] for axis in used)


class _Problem(NamedTuple):
  """Rows with too many segments: which, how many on which terms, and the maximum that they need."""

  rows: str
  share: str
  needed: int


def _problem(counts: np.ndarray, layout: Layout, most: int) -> _Problem | None:
  """Returns the rows that need the largest maximum if it is above `most`, given the segments of each row."""
  kept = layout.groups >= 0
  if not kept.any():
    return None
  sums = np.bincount(layout.groups[kept], counts[kept]).astype(np.int64)
  here = np.bincount(layout.groups[kept])
  needed = -(-sums * layout.rows // np.maximum(here, 1))
  worst = int(needed.argmax())
  if needed[worst] <= most:
    return None
  places = layout.places[layout.groups == worst]
  have = "has" if len(places) == 1 else "have"
  if len(places) == layout.rows:
    share = f"which a device holds at once, {have} {sums[worst]}"
  else:
    of_all = f"{len(places)} of the {layout.rows} that a device holds at once"
    share = f"{of_all}, {have} {sums[worst]}, more than a fair share"
  return _Problem(_named(np.sort(places)), share, int(needed[worst]))


def _named(places: np.ndarray) -> str:
  """Names rows of the global batch, in ascending order."""
  if len(places) == 1:
    return f"row {places[0]}"
  steps = np.unique(np.diff(places))
  if len(places) == 2 or len(steps) > 1:
    return f"rows {', '.join(map(str, places[:-1]))} and {places[-1]}"
  return f"rows {places[0]} to {places[-1]}" + (f" in steps of {steps[0]}" if steps[0] > 1 else "")
