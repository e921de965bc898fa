# SPDX-License-Identifier: Apache-2.0
"""The model's fields of Megatron samples: segments, positions and loss masks, in one compiled pass.

Data workers import this, so it must not need the release: `input_pipeline_utils` gives these names to its pipelines.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grain.python as grain
import numpy as np

from maxtext.input_pipeline import _mmap_index_kernels as kernels
from maxtext.input_pipeline._mmap_files import MMapError


def segments_and_positions(tokens: np.ndarray, eod_id: int, min_segment_length: int = 0) -> tuple[np.ndarray, np.ndarray]:
  """Numbers the documents of a sample from 1, and the tokens of each from 0.

  Args:
    tokens: integers, [length].
    eod_id: ends a document and belongs to it.
    min_segment_length: with 2 or more, a document that begins this many tokens or fewer after the last kept beginning is
      merged into the one before it; 0 and 1 keep all, as in the release.

  Returns:
    Segment ids and positions, both int32[length].
  """
  segments, positions = np.empty(len(tokens), np.int32), np.empty(len(tokens), np.int32)
  kernels.segments_and_positions(tokens, eod_id, min_segment_length, segments, positions)
  return segments, positions


def rows_of_segments_and_positions(
    tokens: np.ndarray, eod_id: int, min_segment_length: int = 0
) -> tuple[np.ndarray, np.ndarray]:
  """Calls `segments_and_positions` for each row of int[n, length]; both results are int32[n, length]."""
  segments, positions = np.empty(tokens.shape, np.int32), np.empty(tokens.shape, np.int32)
  kernels.batch_segments_and_positions(tokens, eod_id, min_segment_length, segments, positions)
  return segments, positions


class GenerateDocSegmentIds(grain.MapTransform):
  """Adds `<field>_segmentation` and `<field>_position`, int32[length], to each token field of an `mmap` sample.

  Args:
    eod_id: token that ends a document; the data must hold it, nothing is inserted.
    reset_attention_mask: number documents and restart positions; otherwise one segment and positions 0, 1, ...
    eod_mask_loss: without `reset_attention_mask`, give EOD tokens segment 0.
    min_segment_length: see `segments_and_positions`.
  """

  def __init__(
      self, eod_id: int, reset_attention_mask: bool = True, eod_mask_loss: bool = False, min_segment_length: int = 0
  ):
    self.eod_id = eod_id
    self.reset_attention_mask = reset_attention_mask
    self.eod_mask_loss = eod_mask_loss
    self.min_segment_length = min_segment_length

  def map(self, element):
    for field, tokens in list(element.items()):
      if self.reset_attention_mask:
        segments, positions = segments_and_positions(tokens, self.eod_id, self.min_segment_length)
      else:
        segments = ones_but_eod(tokens, self.eod_id, self.eod_mask_loss)
        positions = np.arange(len(tokens), dtype=np.int32)
      element[f"{field}_segmentation"], element[f"{field}_position"] = segments, positions
    return element


class MegatronSplitInputsTargets(grain.MapTransform):
  """Splits {"text": int[L + 1]} into the model's fields, each [L], with Megatron's masks and positions.

  `inputs` and `targets` are the tokens without the last and without the first. `inputs_segmentation` and both positions
  follow `reset_attention_mask`; `targets_segmentation` (the loss mask) follows `eod_mask_loss` alone, and the two are
  independent, as in megatron-core's `_get_ltor_masks_and_position_ids`.

  Args:
    eod_id: token that ends a document.
    reset_attention_mask: number documents and restart positions after EOD.
    eod_mask_loss: no loss where the input is EOD.
    no_attnmask_dataset_ids: samples with one of these `dataset_id` never reset.
    min_segment_length: see `segments_and_positions`.
    emit_dataset_id: also give `dataset_id`, int32[L], where the sample has one.
  """

  def __init__(
      self,
      eod_id: int,
      reset_attention_mask: bool = True,
      eod_mask_loss: bool = False,
      no_attnmask_dataset_ids: set[int] | None = None,
      min_segment_length: int = 0,
      emit_dataset_id: bool = False,
  ):
    self.eod_id = eod_id
    self.reset_attention_mask = reset_attention_mask
    self.eod_mask_loss = eod_mask_loss
    self.no_attnmask_dataset_ids = no_attnmask_dataset_ids or set()
    self.min_segment_length = min_segment_length
    self.emit_dataset_id = emit_dataset_id

  def map(self, element) -> Any:
    inputs, targets = element["text"][:-1], element["text"][1:]
    dataset_id = element.get("dataset_id")
    if self.reset_attention_mask and (dataset_id is None or int(dataset_id) not in self.no_attnmask_dataset_ids):
      segments, positions = segments_and_positions(inputs, self.eod_id, self.min_segment_length)
    else:
      segments, positions = np.ones(len(inputs), np.int32), np.arange(len(inputs), dtype=np.int32)
    fields = {
        "inputs": inputs,
        "targets": targets,
        "inputs_segmentation": segments,
        "targets_segmentation": ones_but_eod(inputs, self.eod_id, self.eod_mask_loss),
        "inputs_position": positions,
        "targets_position": positions,
    }
    if self.emit_dataset_id and dataset_id is not None:
      fields["dataset_id"] = np.full(len(inputs), int(dataset_id), np.int32)
    return fields

  def split_rows(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Splits several samples at once, int[n, L + 1]; the fields are int32[n, L], row for row those of `map`."""
    inputs, targets = np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])
    if self.reset_attention_mask:
      segments, positions = rows_of_segments_and_positions(inputs, self.eod_id, self.min_segment_length)
    else:
      segments, positions = np.ones(inputs.shape, np.int32), np.empty(inputs.shape, np.int32)
      positions[:] = np.arange(inputs.shape[1])
    return {
        "inputs": inputs,
        "targets": targets,
        "inputs_segmentation": segments,
        "targets_segmentation": ones_but_eod(inputs, self.eod_id, self.eod_mask_loss),
        "inputs_position": positions,
        "targets_position": positions.copy(),
    }


def check_token_ids(tokens: np.ndarray, vocab_size: int, file_of: Callable[[int, int], str]) -> None:
  """Raises MMapError at a token id outside 0 to vocab_size - 1.

  Without this, an embedding look-up clamps the id and the run trains on.

  Args:
    tokens: int32[n, length].
    file_of: called with row and column; returns the path of the file that holds the token.
  """
  if tokens.size and (tokens.max() >= vocab_size or tokens.min() < 0):
    row, column = np.argwhere((tokens >= vocab_size) | (tokens < 0))[0].tolist()
    raise MMapError(
        f"{file_of(row, column)} holds token id {tokens[row, column]}, outside the vocabulary (vocab_size={vocab_size}); "
        "set the vocab_size of the tokenizer that the data was made with, or make the data again."
    )


def ones_but_eod(tokens: np.ndarray, eod_id: int, mask_eod: bool) -> np.ndarray:
  """Returns 1 everywhere, or with `mask_eod` 0 at EOD, int32 in the shape of `tokens`."""
  return (tokens != eod_id).astype(np.int32) if mask_eod else np.ones(tokens.shape, np.int32)


class MegatronRows:
  """The model's fields of the samples of a stream.

  Args:
    source: `len()`, `read_rows` and `file_of`, see `MegatronNpyDataSource`.
    split: makes the fields.
    vocab_size: token ids outside it are refused.
  """

  def __init__(self, source, split: MegatronSplitInputsTargets, vocab_size: int):
    self._source, self._split, self._vocab_size = source, split, vocab_size

  def __len__(self) -> int:
    return len(self._source)

  def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the fields of samples, each int32[len(indices), L].

    Raises:
      MMapError: if a sample cannot be read, or holds a token id outside the vocabulary.
    """
    tokens = self._source.read_rows(indices)
    check_token_ids(tokens, self._vocab_size, lambda row, column: self._source.file_of(indices[row], column))
    return self._split.split_rows(tokens)
