# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's document, sample and shuffle indices, its epochs and its splits. NumPy and Numba only.

Replaces the release's module of this name; public names and signatures are kept. What megatron-core's GPTDataset
builds is built here bit for bit, dtypes included: one `RandomState(seed)` shuffles the document index, then the
shuffle index. The unit that Megatron calls a document is one sequence of the `.idx` file.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import datetime
import functools
import glob
import math
import os
import re
import sys
from typing import Any

import numpy as np

from maxtext.input_pipeline import _mmap_index_kernels as kernels
from maxtext.input_pipeline import _mmap_remote as remote
from maxtext.input_pipeline._mmap_indexed_dataset import (
  MMapError,
  MMapFileNotFoundError,
  MMapIndexedDataset,
  check_pair,
  read_header,
)

LAST_EPOCH_THRESHOLD = 0.80
SPLIT_NAMES = ("train", "valid", "test")
_PIECE = 1 << 22  # elements between two progress reports
_DOCUMENTS = 1 << 16  # documents whose sizes are added up at a time

_SCHEME = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]+")
_HOST = re.compile(_SCHEME.pattern + r"://[^/]*")
_BRACKET = re.compile(_SCHEME.pattern + r"://\[[^\]/]*")  # an IPv6 address
_PORT = re.compile(r"\d+(/|\s*$)")

Progress = Callable[[str, int, int], None]


def _silent(stage: str, done: int, total: int) -> None:
  del stage, done, total


# Finding datasets.


def split_paths(text: str) -> list[str]:
  """Splits paths that are joined by ':'; the colon of a scheme or before a port is part of its URL.

  Raises:
    MMapError: if a path between two colons is empty.
  """
  paths: list[str] = []
  for part in text.split(":"):
    before = paths[-1] if paths else ""
    in_brackets = _BRACKET.fullmatch(before)
    in_scheme = part.startswith("//") and _SCHEME.fullmatch(before)
    in_host = _PORT.match(part) and _HOST.fullmatch(before)
    if in_scheme or in_host or in_brackets:
      paths[-1] += ":" + part
    else:
      paths.append(part)
  paths = [path.strip() for path in paths]
  if not all(paths):
    raise MMapError(f"{text!r} has an empty path; give one path, or several joined by ':'.")
  return paths


def resolve_shard_prefixes(paths: str | os.PathLike | Sequence[str | os.PathLike]) -> list[str]:
  """Finds the datasets that paths name, in the order in which they are read as one: sorted as text.

  So `part_10` comes before `part_2`, as in the release.

  Args:
    paths: one or several dataset prefixes (`/data/books` for `/data/books.idx`) or folders of datasets; local or URLs.

  Returns:
    Sorted prefixes, without suffix.

  Raises:
    MMapError: if a path names no dataset or half of one, or two paths name the same.
  """
  found: list[str] = []
  for path in _as_list(paths):
    found.extend(remote.resolve(path) if remote.is_url(path) else _resolve_local(path))
  if not found:
    raise MMapFileNotFoundError("no dataset path was given; give a path without .idx or .bin, or a folder of datasets.")
  twice = [path for path, count in collections.Counter(found).items() if count > 1]
  if twice:
    raise MMapError(f"{twice[0]} is named twice in one dataset; name each of its shards once.")
  remote.prepare(found)
  return sorted(found)


def _resolve_local(path: str) -> list[str]:
  if os.path.isfile(path + ".idx") or os.path.isfile(path + ".bin") or not os.path.isdir(path):
    prefixes = [path]
  else:
    prefixes = [name[: -len(".idx")] for name in glob.glob(os.path.join(glob.escape(path), "*.idx"))]
    if not prefixes:
      raise MMapFileNotFoundError(f"{path} has no .idx files; give a dataset's path without suffix, or its folder.")
  for prefix in prefixes:
    check_pair(prefix)
  return prefixes


def _as_list(paths: str | os.PathLike | Sequence[str | os.PathLike]) -> list[str]:
  return [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]


def get_num_documents(path_prefixes: Sequence[str]) -> int:
  """Returns the number of documents of several datasets, from their headers alone."""
  return sum(read_header(prefix).num_documents for prefix in path_prefixes)


def get_document_sizes(path_prefixes: Sequence[str]) -> np.ndarray:
  """Returns the tokens of each document, int64[documents]; a document without sequences has 0."""
  return np.concatenate([_document_sizes(prefix) for prefix in path_prefixes] or [np.empty(0, np.int64)])


def _document_sizes(prefix: str) -> np.ndarray:
  dataset = MMapIndexedDataset(prefix)
  facts, documents = dataset.scan(), dataset.header.num_documents
  if documents == len(dataset) and not facts.sentence_split:  # the usual file: every document is one sequence
    return dataset.sizes.astype(np.int64)
  tokens, first = np.zeros(documents, np.int64), 0
  for piece in iter_document_sizes(dataset):
    tokens[first : first + len(piece)] = piece
    first += len(piece)
  return tokens


def iter_document_sizes(dataset: MMapIndexedDataset) -> Iterator[np.ndarray]:
  """Yields the tokens of consecutive documents, int64[at most 65,536]; the index must have passed `scan`."""
  for first in range(0, dataset.header.num_documents, _DOCUMENTS):
    bounds = dataset.doc_idx[first : first + _DOCUMENTS + 1]
    ends = np.zeros(int(bounds[-1] - bounds[0]) + 1, np.int64)
    np.cumsum(dataset.sizes[bounds[0] : bounds[-1]], out=ends[1:])
    yield np.diff(ends[bounds - bounds[0]])


def get_total_tokens(path_prefixes: Sequence[str]) -> int:
  """Returns the tokens of several datasets; counted by the index, since a `.bin` may have stray bytes at its end."""
  return sum(int(MMapIndexedDataset(prefix).sizes.sum(dtype=np.int64)) for prefix in path_prefixes)


def get_split_tokens(path_prefixes: Sequence[str], start_doc: int, end_doc: int) -> int:
  """Returns the tokens of documents [start_doc, end_doc) of several datasets."""
  return int(get_document_sizes(path_prefixes)[start_doc:end_doc].sum())


# Splits.


def parse_split(split_str: str) -> list[float]:
  """Parses Megatron's split text, such as "969,30,1", to three shares that sum to 1.

  Raises:
    MMapError: if the text is not one to three non-negative numbers with a positive sum.
  """
  try:
    shares = [float(field) for field in split_str.split(",")]
  except ValueError:
    shares = []
  if not set(split_str) <= set("0123456789., "):  # "1e-1" and "1_0" are floats to Python, and two numbers to Megatron
    shares = []
  if not 1 <= len(shares) <= len(SPLIT_NAMES) or not all(math.isfinite(share) and share >= 0 for share in shares):
    raise MMapError(
        f"the split {split_str!r} is not one to three non-negative numbers; write shares of train, valid and test such "
        "as '99,1' or '969,30,1'."
    )
  if not sum(shares):
    raise MMapError(f"the split {split_str!r} gives every part a share of zero; at least one must be positive.")
  return _normalize_weights(shares + [0.0] * (len(SPLIT_NAMES) - len(shares)))


def parse_split_range(split_str: str, split_index: int, num_docs: int) -> tuple[int, int]:
  """Returns the range [begin, end) of sequences that belongs to one part of a split, rounded as Megatron does.

  Args:
    split_str: shares, see `parse_split`.
    split_index: 0 train, 1 valid, 2 test.
    num_docs: sequences in the dataset.
  """
  shares = parse_split(split_str)
  if not 0 <= split_index < len(shares):
    raise MMapError(f"split index {split_index} is not 0 (train), 1 (valid) or 2 (test).")
  bounds = functools.reduce(lambda ends, share: [*ends, ends[-1] + share], shares, [0.0])
  begin, end = (int(round(bound * float(num_docs))) for bound in bounds[split_index : split_index + 2])
  return begin, end


# Epochs.


@dataclasses.dataclass(frozen=True)
class EpochPlan:
  """How a requested number of samples is laid out over epochs.

  Attributes:
    num_epochs: passes over the sequences.
    separate_last_epoch: whether the last pass is shuffled apart from the others.
    samples: samples that all passes give, at least the requested number.
    samples_before_last: samples that begin and end before the last pass, where that is separate; else `samples`.
  """

  num_epochs: int
  separate_last_epoch: bool
  samples: int
  samples_before_last: int


def plan_epochs(
    tokens_per_epoch: int,
    seq_length: int,
    num_samples: int | None = None,
    num_epochs: int | None = None,
    add_extra_token: int = 1,
) -> EpochPlan:
  """Plans for `num_samples` samples or for `num_epochs` whole passes; one of them must be given.

  Raises:
    MMapError: if the tokens do not make one sample.
  """
  if (num_samples is None) == (num_epochs is None):
    raise MMapError("give either a number of samples or a number of epochs, and not both.")
  if num_samples is not None:
    num_epochs = compute_num_epochs(tokens_per_epoch, num_samples, seq_length, add_extra_token)
  assert num_epochs is not None
  samples = (num_epochs * tokens_per_epoch - add_extra_token) // seq_length
  if samples < 1 or num_epochs < 1:
    raise MMapError(
        f"{num_epochs} epochs of {tokens_per_epoch} tokens do not make one sample of {seq_length} + {add_extra_token} "
        "tokens; use a shorter sequence length, more epochs or more data."
    )
  requested = samples if num_samples is None else num_samples
  separate = should_separate_last_epoch(num_epochs, tokens_per_epoch, requested, seq_length, add_extra_token)
  plan = EpochPlan(num_epochs, False, samples, samples)
  return with_last_epoch(plan, separate, tokens_per_epoch, seq_length, add_extra_token)


def with_last_epoch(plan: EpochPlan, separate: bool, tokens_per_epoch: int, seq_length: int, extra: int = 1) -> EpochPlan:
  """Returns a plan whose last epoch is shuffled apart, or not."""
  apart = separate and plan.num_epochs > 1
  before = ((plan.num_epochs - 1) * tokens_per_epoch - extra) // seq_length if apart else plan.samples
  return dataclasses.replace(plan, separate_last_epoch=separate, samples_before_last=before)


def compute_num_epochs(total_tokens: int, num_samples: int, seq_length: int, add_extra_token: int = 1) -> int:
  """Returns the fewest epochs of `total_tokens` that hold `num_samples` samples."""
  if total_tokens < 1:
    raise MMapError("the dataset holds 0 tokens; every sequence is empty.")
  return max(1, -(-(num_samples * seq_length + add_extra_token) // total_tokens))


def should_separate_last_epoch(
    num_epochs: int,
    tokens_per_epoch: int,
    num_samples: int,
    seq_length: int,
    add_extra_token: int = 1,
    threshold: float = LAST_EPOCH_THRESHOLD,
) -> bool:
  """Whether so little of the last epoch is asked for that Megatron shuffles it apart."""
  if num_epochs <= 1:
    return False
  before = ((num_epochs - 1) * tokens_per_epoch - add_extra_token) // seq_length
  per_epoch = (tokens_per_epoch - add_extra_token) // seq_length
  return num_samples - before < int(threshold * per_epoch)


# The three indices.


def shuffle(array: np.ndarray, rng: np.random.RandomState, progress: Progress = _silent, stage: str = "") -> None:
  """Shuffles a one-dimensional integer array in place: `rng.shuffle(array)`, generator's state included, but faster."""
  if not 2 <= len(array) <= kernels.MAX_SHUFFLE or array.dtype.kind not in "iu":
    rng.shuffle(array)
    return
  state: Any = rng.get_state()
  name, key, position, has_gauss, gauss = state
  key, words, draws = key.copy(), np.empty(len(key), np.uint32), np.empty(kernels.DRAWS, np.uint32)
  kernels.temper(key, words)
  for first in range(len(array) - 1, 0, -_PIECE):
    position = kernels.shuffle_steps(array, key, words, position, first, max(first - _PIECE, 0), draws)
    progress(stage, len(array) - max(first - _PIECE, 0), len(array))
  rng.set_state((name, key, position, has_gauss, gauss))


def _document_index(begin: int, end: int, plan: EpochPlan, rng, progress: Progress = _silent) -> np.ndarray:
  """Returns every sequence id of [begin, end) once an epoch, shuffled, int32[epochs * (end - begin)]."""
  count = end - begin
  index = np.empty(plan.num_epochs * count, np.int32)
  kernels.fill_epochs(index, begin, count)
  apart = (plan.num_epochs - 1) * count if plan.separate_last_epoch else len(index)
  shuffle(index[:apart], rng, progress, "document index")
  if apart < len(index):
    shuffle(index[apart:], rng, progress, "document index")
  return index


def _shuffle_index(samples_before_last: int, samples: int, rng, progress: Progress = _silent) -> np.ndarray:
  """Returns a permutation of the samples, the last epoch's apart, uint32[samples] (int64 from 2^32 - 2 on)."""
  index = np.arange(samples, dtype=np.int64 if samples >= np.iinfo(np.uint32).max - 1 else np.uint32)
  shuffle(index[:samples_before_last], rng, progress, "shuffle index")
  if samples_before_last < samples:
    shuffle(index[samples_before_last:], rng, progress, "shuffle index")
  return index


def sample_index_dtype(longest: int, document_index_length: int) -> np.dtype:
  """int32 while both the longest sequence and the length of the document index fit, else int64."""
  return np.dtype(np.int32 if max(longest, document_index_length) <= np.iinfo(np.int32).max else np.int64)


def _sample_index(sizes, longest, document_index, samples, seq_length, extra, progress: Progress = _silent) -> np.ndarray:
  """Returns where each sample begins, [samples + 1, 2]: entry of the document index, token within it."""
  index = np.zeros((samples + 1, 2), sample_index_dtype(longest, len(document_index)))
  state = np.array([0, seq_length - 1 + extra, 1], np.int64)
  for first in range(0, len(document_index), _PIECE):
    last = min(first + _PIECE, len(document_index))
    kernels.sample_index_rows(sizes, document_index, first, last, state, seq_length, extra, index)
    progress("sample index", last, len(document_index))
  if state[2] == samples:  # a partial last sample, kept by drop_last=False, ends with the last sequence
    index[samples] = len(document_index) - 1, int(sizes[document_index[-1]]) - extra
  return index


def iter_indices(
    sizes: np.ndarray,
    longest: int,
    begin: int,
    end: int,
    plan: EpochPlan,
    seq_length: int,
    seed: int,
    add_extra_token: int = 1,
    progress: Progress | None = None,
) -> Iterator[tuple[str, np.ndarray]]:
  """Yields ("document_index", array), ("sample_index", array) and ("shuffle_index", array), each when it is ready.

  Args:
    sizes: int32[N], tokens of every sequence of the dataset.
    longest: tokens of the longest sequence.
    begin, end: the range of sequences to use.
    plan: see `plan_epochs`.
    seq_length: tokens of a sample, without the extra one.
    seed: of `numpy.random.RandomState`.
    progress: called with a stage's name, elements done and elements in all.
  """
  progress = progress or _silent
  rng = np.random.RandomState(seed)
  document_index = _document_index(begin, end, plan, rng, progress)
  yield "document_index", document_index
  yield "sample_index", _sample_index(
      sizes, longest, document_index, plan.samples, seq_length, add_extra_token, progress
  )
  yield "shuffle_index", _shuffle_index(plan.samples_before_last, plan.samples, rng, progress)


def build_document_index(num_docs: int, num_epochs: int, seed: int, separate_last_epoch: bool = False) -> np.ndarray:
  """Returns Megatron's document index of sequences 0 to num_docs - 1, int32[num_epochs * num_docs]."""
  plan = EpochPlan(num_epochs, separate_last_epoch and num_epochs > 1, 0, 0)
  return _document_index(0, num_docs, plan, np.random.RandomState(seed))


def build_sample_index(
    doc_sizes: np.ndarray, doc_index: np.ndarray, seq_length: int, drop_last: bool = True, add_extra_token: int = 1
) -> np.ndarray:
  """Returns Megatron's sample index, int32 or int64 [samples + 1, 2].

  Args:
    doc_sizes: tokens of every sequence, [N].
    doc_index: sequence ids in training order, [D].
    seq_length: tokens of a sample, without the extra one.
    drop_last: leave out a last sample that is not full.
    add_extra_token: 1 if a sample includes the token after it.
  """
  pieces = (doc_index[first : first + _PIECE] for first in range(0, len(doc_index), _PIECE))
  tokens = sum(int(doc_sizes[piece].sum(dtype=np.int64)) for piece in pieces) - add_extra_token
  samples = tokens // seq_length if drop_last else -(-tokens // seq_length)
  longest = int(doc_sizes.max()) if len(doc_sizes) else 0
  return _sample_index(doc_sizes, longest, doc_index, max(samples, 0), seq_length, add_extra_token)


def build_shuffle_index(num_samples: int, total_size: int, seed: int) -> np.ndarray:
  """Returns Megatron's shuffle index of total_size samples, those from num_samples on shuffled apart."""
  return _shuffle_index(num_samples, total_size, np.random.RandomState(seed))


def compute_blend_buffers(num_samples: int, weights: Sequence[float], margin: float) -> list[int]:
  """Returns the samples to build for each child of a blend: its share, and `margin` percent more.

  Source: megatron-core, BlendedMegatronDatasetBuilder.
  """
  return [math.ceil(math.ceil(num_samples * weight) * (1 + margin / 100)) for weight in weights]


# Names of the released module; the work of most is done one room higher.


def _normalize_weights(weights: Sequence[float]) -> list[float]:
  """Returns weights that sum to 1, in the arithmetic of megatron-core's `normalize`."""
  # NumPy's sum, as Megatron takes it: Python's is compensated since 3.12 and rounds otherwise.
  vector = np.array(weights, np.float64)
  return (vector / np.sum(vector)).tolist()


def _read_idx_header(prefix: str) -> tuple[int, int, type, int]:
  """Returns sequences, documents, token type and document index entries of a dataset."""
  header = read_header(prefix)
  return header.num_sequences, header.num_documents, header.dtype.type, header.num_documents + 1


def _build_doc_index_flat(num_docs: int, num_epochs: int, rng) -> np.ndarray:
  """Returns the document index of epochs that are shuffled together; `rng` goes on."""
  return _document_index(0, num_docs, EpochPlan(num_epochs, False, 0, 0), rng)


def _build_shuffle_index(num_samples: int, total_size: int, rng) -> np.ndarray:
  """Returns the shuffle index as `build_shuffle_index` does; `rng` goes on."""
  return _shuffle_index(num_samples, total_size, rng)


def is_primary_process() -> bool:
  """Whether this process writes index files: JAX's process 0, or any process that has not imported JAX."""
  jax = sys.modules.get("jax")
  try:
    return jax is None or jax.process_index() == 0
  except RuntimeError:  # its accelerator belongs to another process, so no run is under way here
    return True


def _request(seq_length, seed, num_samples, num_epochs, split, split_index, add_extra_token):
  """Returns the cache module, which imports this one, and the IndexRequest for released arguments."""
  from maxtext.input_pipeline import _mmap_index_cache as cache  # pylint: disable=import-outside-toplevel

  return cache, cache.IndexRequest(seq_length, seed, num_samples, num_epochs, split or "", split_index, add_extra_token)


def build_indices(
    input_paths, seq_length, num_samples=None, num_epochs=None, seed=1234, split=None, split_index=0, add_extra_token=1
):
  """Builds the three indices of one dataset in memory; returns them and the hash that names their files."""
  cache, request = _request(seq_length, seed, num_samples, num_epochs, split, split_index, add_extra_token)
  return cache.build_in_memory(input_paths, request)


def compute_index_hash(
    input_paths, num_epochs, separate_final_epoch, seed, seq_length, split=None, split_index=0, add_extra_token=1
):
  """Returns the hash that names the index files of a dataset under these settings.

  It covers the content of the `.idx` files, which are read; the release hashes their paths.
  """
  cache, request = _request(seq_length, seed, None, num_epochs, split, split_index, add_extra_token)
  return cache.describe(input_paths, request, separate_final_epoch).name


def save_npy_atomic(path, array):
  """Writes an array so that `path` is never seen half-written."""
  from maxtext.input_pipeline import _mmap_index_cache as cache  # pylint: disable=import-outside-toplevel

  cache.save_array(str(path), array)


def save_indices_atomic(output_dir, file_hash, doc_index, sample_index, shuffle_index, metadata=None):
  """Writes the three arrays, and `metadata` as JSON if given; returns their paths. See `_mmap_index_cache`."""
  from maxtext.input_pipeline import _mmap_index_cache as cache  # pylint: disable=import-outside-toplevel

  return cache.save_indices(output_dir, file_hash, (doc_index, sample_index, shuffle_index), metadata)


def convert(
    input_paths,
    output_dir,
    seq_length,
    num_samples=None,
    num_epochs=None,
    seed=1234,
    split=None,
    split_index=0,
    add_extra_token=1,
):
  """Builds the indices of one dataset and writes them; returns their paths. See `_mmap_index_cache.write_index`."""
  cache, request = _request(seq_length, seed, num_samples, num_epochs, split, split_index, add_extra_token)
  return cache.write_index(output_dir, input_paths, request)[0]


def build_metadata(
    file_hash,
    input_paths,
    seq_length,
    num_samples,
    num_epochs,
    seed,
    split,
    split_index,
    add_extra_token,
    num_docs,
    total_samples,
    source,
):
  """Returns what the released tools keep beside index files; files of this branch say `built_from` instead."""
  return {
      "hash": file_hash,
      "source": source,
      "created_at": datetime.datetime.now(datetime.UTC).isoformat(),
      "input_paths": sorted(_as_list(input_paths or [])),
      "seq_length": seq_length,
      "num_samples_requested": num_samples,
      "num_epochs": num_epochs,
      "seed": seed,
      "split": split,
      "split_index": split_index,
      "add_extra_token": add_extra_token,
      "doc_index_len": num_docs,
      "total_samples": total_samples,
  }


def convert_blend(
    dataset_specs,
    total_samples,
    seq_length,
    seed=1234,
    margin=0.5,
    max_workers=None,
    split=None,
    split_index=0,
    add_extra_token=1,
    blend_index_output_dir=None,
):
  """Builds and writes the indices of a blend and of its children; see `_megatron_blending.write_blend`."""
  from maxtext.input_pipeline import _megatron_blending as blending  # pylint: disable=import-outside-toplevel

  request = _request(seq_length, seed, total_samples, None, split, split_index, add_extra_token)[1]
  return blending.write_blend(dataset_specs, request, margin, max_workers, blend_index_output_dir)
