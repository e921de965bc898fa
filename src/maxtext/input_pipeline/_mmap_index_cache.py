# SPDX-License-Identifier: Apache-2.0
"""Index files on disk: their names, and how they are written, checked and loaded. Neither JAX nor Grain.

A folder of indices holds, for each order, `<hash>-document_index.npy`, `<hash>-sample_index.npy`,
`<hash>-shuffle_index.npy` and `<hash>-metadata.json`, which says what the arrays were built from and their checksums.
The hash covers the content of the `.idx` files and the settings that decide the order: the epoch bucket, not the
number of samples, and no path or time. So a folder can be built on one machine and used through another mount.

`stamps.json` remembers, by size and times, which files were checked whole; it only saves work and may be deleted.
Every process builds what it misses, in memory; only the primary process writes. No process waits for another.
"""

from __future__ import annotations

from collections.abc import Sequence
import concurrent.futures
import dataclasses
import json
import logging
import math
import os
from typing import Any

import numpy as np
import xxhash

from maxtext.input_pipeline import _mmap_guard
from maxtext.input_pipeline import _mmap_index_kernels as kernels
from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline._mmap_files import MMapError, MMapFileNotFoundError, map_file
from maxtext.input_pipeline._mmap_index_files import (
    STAMPS,
    ShippedArrays,
    StaleIndexError,
    Stamps,
    StoredArrays,
    digest_of,
    digest_of_json,
    map_array,
    save_array,
    save_json,
    stat_of,
)
from maxtext.input_pipeline._mmap_indexed_dataset import MMapIndexedDataset
from maxtext.input_pipeline._mmap_shards import ShardedDataset

__all__ = [  # the module is also the face of `_mmap_index_files`
    "ARRAYS",
    "STAMPS",
    "Index",
    "IndexDescription",
    "IndexRequest",
    "ShippedArrays",
    "StaleIndexError",
    "Stamps",
    "StoredArrays",
    "Triplet",
    "array_paths",
    "build_in_memory",
    "check_ranges",
    "dataset_facts",
    "describe",
    "digest_of_json",
    "iter_description",
    "load",
    "local_folder",
    "map_array",
    "metadata_path",
    "open_dataset",
    "open_index",
    "open_triplet",
    "save_array",
    "save_indices",
    "stat_of",
    "triplet_paths",
    "write_index",
    "writes",
]

log = logging.getLogger(__name__)

FORMAT = 1
ARRAYS = ("document_index", "sample_index", "shuffle_index")
_LARGE = 1 << 22  # bytes of a file that is worth a thread
_SCANNERS = 8  # shards looked at side by side

Triplet = tuple[np.ndarray, ...]  # document, sample and shuffle index


def array_paths(folder: str, name: str) -> dict[str, str]:
  """Returns the path of each array of an order."""
  return {array: os.path.join(folder, f"{name}-{array}.npy") for array in ARRAYS}


def metadata_path(folder: str, name: str) -> str:
  return os.path.join(folder, f"{name}-metadata.json")


@dataclasses.dataclass(frozen=True)
class IndexRequest:
  """The settings that decide an order.

  Attributes:
    seq_length: tokens of a sample, without the extra one.
    seed: of the shuffles.
    num_samples: samples asked for, or None if `num_epochs` is given.
    num_epochs: whole passes asked for, or None if `num_samples` is given.
    split: shares such as "99,1", or "" for the whole dataset.
    split_index: 0 train, 1 valid, 2 test.
    add_extra_token: 1 if a sample includes the token after it.
  """

  seq_length: int
  seed: int = 1234
  num_samples: int | None = None
  num_epochs: int | None = None
  split: str = ""
  split_index: int = 0
  add_extra_token: int = 1


@dataclasses.dataclass(frozen=True)
class IndexDescription:
  """One order: what it is built from, and what its arrays must look like.

  Attributes:
    name: hash of `built_from`, the beginning of the files' names.
    built_from: JSON-able; equal for equal orders.
    plan: epochs and samples.
    begin, end: the range of sequences used.
    tokens_per_epoch: tokens of the range.
    facts: of each dataset, see `dataset_facts`.
  """

  name: str
  built_from: dict[str, Any]
  plan: utils.EpochPlan
  begin: int
  end: int
  tokens_per_epoch: int
  facts: tuple[dict[str, Any], ...]

  @property
  def longest(self) -> int:
    """Tokens of the longest sequence of all datasets."""
    return max(fact["longest"] for fact in self.facts)

  def expected(self) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns dtype and shape of each array."""
    entries = self.plan.num_epochs * (self.end - self.begin)
    rows = utils.sample_index_dtype(self.longest, entries).str
    draws = "<i8" if self.plan.samples >= np.iinfo(np.uint32).max - 1 else "<u4"
    samples = self.plan.samples
    return dict(zip(ARRAYS, (("<i4", (entries,)), (rows, (samples + 1, 2)), (draws, (samples,))), strict=True))

  def paths(self, folder: str) -> dict[str, str]:
    return array_paths(folder, self.name)

  def metadata_path(self, folder: str) -> str:
    return metadata_path(folder, self.name)


@dataclasses.dataclass(frozen=True)
class Index:
  """The arrays of one order.

  Attributes:
    description: what they are.
    arrays: mapped from files, or in memory.
    found: whether the files were there already.
    paths: the files, or None if the arrays are in memory only.
  """

  description: IndexDescription
  arrays: Triplet
  found: bool
  paths: tuple[str, ...] | None

  @property
  def saved(self) -> bool:
    """Whether the arrays are in files now."""
    return self.paths is not None


# What an order is built from.


def dataset_facts(dataset: str | MMapIndexedDataset, stamps: Stamps | None = None) -> dict[str, Any]:
  """Returns the checksum of an `.idx` file and what `MMapIndexedDataset.scan` finds in it, from the stamps if it can.

  Raises:
    MMapError: if the dataset is damaged.
  """
  if isinstance(dataset, str):
    dataset = MMapIndexedDataset(dataset)
  path = dataset.idx_file.path
  facts = stamps.get(path) if stamps else None
  if facts is None:
    stat = stat_of(path)
    facts = _scan(dataset, path)
    _mmap_guard.check([dataset.tail])
    if stamps:
      stamps.put(path, stat, **facts)
  head = dataset.header
  return {**facts, "sequences": head.num_sequences, "documents": head.num_documents, "dtype": head.dtype.name}


def _scan(dataset: MMapIndexedDataset, path: str) -> dict[str, Any]:
  """Reads an `.idx` file whole; the checksum of a large one beside the scan."""
  digest = lambda: xxhash.xxh3_128_hexdigest(map_file(path))
  if dataset.idx_file.size < _LARGE:
    return {**dataclasses.asdict(dataset.scan()), "digest": digest()}
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    checksum = pool.submit(digest)
    return {**dataclasses.asdict(dataset.scan()), "digest": checksum.result()}


def _check_not_empty(dataset: ShardedDataset, facts) -> None:
  """Raises MMapError if all shards together hold nothing to read; one empty shard among others does no harm."""
  where = f"{dataset.name}.idx" if len(dataset.shards) == 1 else dataset.name
  if not len(dataset):
    raise MMapError(f"{where} has no sequences; the dataset is empty.")
  if not sum(fact["tokens"] for fact in facts):
    raise MMapError(f"{where} has {len(dataset)} sequences and 0 tokens; every sequence is empty.")


def open_dataset(paths: str | Sequence[str] | ShardedDataset) -> ShardedDataset:
  return paths if isinstance(paths, ShardedDataset) else ShardedDataset(paths)


def describe(
    input_paths: str | Sequence[str] | ShardedDataset,
    request: IndexRequest,
    separate_last_epoch: bool | None = None,
    stamps: Stamps | None = None,
) -> IndexDescription:
  """Says what the order of a request is built from, reading of the datasets only what the stamps do not know.

  Raises:
    MMapError: if a dataset is damaged, the split cannot be parsed, or its part is empty.
  """
  if request.seq_length < 1:
    raise MMapError(f"the sequence length is {request.seq_length}; expected 1 or more.")
  if request.num_samples is not None and request.num_samples < 1:
    raise MMapError(f"{request.num_samples} samples were asked for; expected 1 or more.")
  if not 0 <= request.seed < 2**32:
    raise MMapError(f"the seed is {request.seed}; expected 0 to {2**32 - 1}, as NumPy's generator takes it.")
  dataset = open_dataset(input_paths)
  if len(dataset.shards) == 1:  # as most children of a blend: a thread would cost more than it saves
    facts = [dataset_facts(dataset.shards[0], stamps)]
  else:
    with concurrent.futures.ThreadPoolExecutor(min(len(dataset.shards), _SCANNERS)) as pool:
      facts = list(pool.map(lambda shard: dataset_facts(shard, stamps), dataset.shards))
  _check_not_empty(dataset, facts)
  sequences = len(dataset)
  begin, end = (0, sequences)
  if request.split:
    begin, end = utils.parse_split_range(request.split, request.split_index, sequences)
  tokens = _tokens_between(dataset, facts, begin, end)
  if not tokens:
    raise MMapError(
        f"the {utils.SPLIT_NAMES[request.split_index]} part of split {request.split!r} is sequences {begin} to {end} of "
        f"{sequences} in {dataset.name} and holds {end - begin} sequences and 0 tokens; give it a larger share."
    )
  try:
    plan = utils.plan_epochs(
        tokens, request.seq_length, request.num_samples, request.num_epochs, request.add_extra_token
    )
  except MMapError as error:
    raise MMapError(f"{dataset.name}: {error}") from None
  if separate_last_epoch is not None:
    plan = utils.with_last_epoch(plan, separate_last_epoch, tokens, request.seq_length, request.add_extra_token)
  built_from = {
      "format": FORMAT,
      "datasets": [{key: fact[key] for key in ("digest", "sequences", "tokens")} for fact in facts],
      "sequences": [begin, end],
      "sequence_length": request.seq_length,
      "add_extra_token": request.add_extra_token,
      "seed": request.seed,
      "split": request.split,
      "split_index": request.split_index if request.split else 0,
      "num_epochs": plan.num_epochs,
      "separate_last_epoch": plan.separate_last_epoch,
  }
  return IndexDescription(digest_of_json(built_from), built_from, plan, begin, end, tokens, tuple(facts))


def _tokens_between(dataset: ShardedDataset, facts, begin: int, end: int) -> int:
  """Returns the tokens of sequences [begin, end); by two byte offsets where sequences follow each other."""
  total = first = 0
  for shard, fact in zip(dataset.shards, facts, strict=True):
    low, high = (min(max(bound - first, 0), len(shard)) for bound in (begin, end))
    first += len(shard)
    if high - low == len(shard):
      total += fact["tokens"]
    elif low < high and fact["contiguous"]:
      ends = [int(shard.pointers[row]) if row < len(shard) else fact["end"] for row in (low, high)]
      total += (ends[1] - ends[0]) // shard.header.dtype.itemsize
    elif low < high:
      total += int(shard.sizes[low:high].sum(dtype=np.int64))
  return total


# Building and writing.


def iter_description(input_paths, request: IndexRequest, description: IndexDescription, progress=None):
  """Yields what `_mmap_index_utils.iter_indices` does, of an order.

  Raises:
    MMapError: if the arrays do not fit into this machine's memory.
  """
  dataset = open_dataset(input_paths)
  needed = sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in description.expected().values())
  memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
  if needed > memory:
    raise MMapError(
        f"{dataset.name}: the indices of {description.plan.samples} samples ({description.plan.num_epochs} epochs) take "
        f"{needed} bytes, and this machine has {memory} of memory; ask for fewer samples, or build them on a larger one."
    )
  for named_array in utils.iter_indices(
      dataset.sizes,
      description.longest,
      description.begin,
      description.end,
      description.plan,
      request.seq_length,
      request.seed,
      request.add_extra_token,
      progress,
  ):
    _mmap_guard.check(shard.tail for shard in dataset.shards)
    yield named_array


def build_in_memory(input_paths, request: IndexRequest):
  """Builds the three indices; returns them and the name of their files."""
  description = describe(input_paths, request)
  return *(array for _, array in iter_description(input_paths, request, description)), description.name


def build_and_save(
    folder: str, input_paths, request: IndexRequest, description: IndexDescription, stamps: Stamps, progress=None
) -> tuple[Triplet, OSError | None]:
  """Builds the three indices and writes each while the next one is built.

  Returns:
    The arrays, and the error that kept them from being written, or None.
  """
  arrays, writes = [], []
  with concurrent.futures.ThreadPoolExecutor(1) as pool:
    for array_name, array in iter_description(input_paths, request, description, progress):
      arrays.append(array)
      writes.append(pool.submit(_save_with_digest, description.paths(folder)[array_name], array))
  try:
    saved = [write.result() for write in writes]
    _save_metadata(folder, description, arrays, [digest for digest, _ in saved])
  except OSError as error:
    return tuple(arrays), error.with_traceback(None)  # whose frames would keep their arrays
  for path, (digest, stat) in zip(description.paths(folder).values(), saved, strict=True):
    stamps.put(path, stat, digest=digest)
  stamps.save()
  return tuple(arrays), None


def _save_with_digest(path: str, array: np.ndarray) -> tuple[str, list[int]]:
  save_array(path, array)
  return digest_of(array), stat_of(path)


def _save_metadata(folder: str, description: IndexDescription, arrays, digests) -> None:
  """Writes the JSON that makes the arrays valid; so it comes last."""
  metadata = {
      "built_from": description.built_from,
      "tokens_per_epoch": description.tokens_per_epoch,
      "samples": description.plan.samples,
      "samples_before_last_epoch": description.plan.samples_before_last,
      "arrays": {
          name: {"dtype": array.dtype.str, "shape": list(array.shape), "xxh3_128": digest}
          for name, array, digest in zip(ARRAYS, arrays, digests, strict=True)
      },
  }
  save_json(description.metadata_path(folder), metadata)


# Loading.


def open_index(
    folder: str, input_paths, request: IndexRequest, write: bool | None = None, progress=None, check=None
) -> Index:
  """Loads the indices of a request from a folder, or builds them, and writes them there if this process should.

  Args:
    folder: of index files, ours or Megatron's; made if need be. Of a URL, a local copy.
    input_paths: dataset prefixes or folders, or a ShardedDataset.
    request: settings of the order.
    write: whether to write what had to be built; None: if this is the primary process, or to a local copy of a URL.
    progress: see `_mmap_index_utils.iter_indices`.
    check: called with the facts of every shard before anything is built; may raise.

  Raises:
    MMapError: if the dataset is damaged or the request cannot be met. A folder that cannot be written is a warning.
  """
  dataset = open_dataset(input_paths)
  source, folder = folder, local_folder(folder)
  write = True if write is None and folder != source else write  # a machine's copy is written by whoever needs it
  stamps = Stamps(folder)
  description = describe(dataset, request, stamps=stamps)
  if check is not None:
    check(description.facts)
  names = [*description.paths("").values(), description.metadata_path("")]
  folder = local_folder(source, [os.path.basename(name) for name in names])
  index = _find_index(folder, description, stamps)
  index = index or _find_megatrons(source, folder, dataset, request, description, stamps)
  if index is not None:
    if stamps.changed and writes(write):
      stamps.save()
    return index
  if not writes(write):
    arrays = tuple(array for _, array in iter_description(dataset, request, description, progress))
    return Index(description, arrays, False, None)
  arrays, error = build_and_save(folder, dataset, request, description, stamps, progress)
  if error:
    log.warning("Cannot write indices to %s (%s); they stay in memory and every start builds them again.", folder, error)
    return Index(description, arrays, False, None)
  paths = tuple(description.paths(folder).values())
  try:
    return Index(description, tuple(map(map_array, paths)), False, paths)  # mapped: the memory is given back
  except (StaleIndexError, OSError):  # somebody else was at work in the folder
    return Index(description, arrays, False, None)


def local_folder(folder: str, names: Sequence[str] = ()) -> str:
  """Returns a folder itself, or for a URL its local copy, into which those of the named files that exist are fetched."""
  if "://" not in folder:
    return folder
  from maxtext.input_pipeline import _mmap_remote as remote  # pylint: disable=import-outside-toplevel

  return remote.fetch_files(folder, names)


def _find_index(folder: str, description: IndexDescription, stamps: Stamps) -> Index | None:
  """Loads an order from this branch's files in the folder; says why if it cannot."""
  try:
    arrays = load(folder, description, stamps)
    return Index(description, arrays, True, tuple(description.paths(folder).values()))
  except (FileNotFoundError, NotADirectoryError):
    log.info("%s: no index files of this order (%s).", folder, description.name)
  except StaleIndexError as error:
    log.warning("%s; building the indices again.", error)
  except OSError as error:
    log.warning("%s cannot be read (%s); building the indices again.", error.filename, error.strerror)
  return None


def _find_megatrons(source: str, folder: str, dataset: ShardedDataset, request, description, stamps) -> Index | None:
  """Loads an order from Megatron's own files in the folder; says why if it cannot."""
  from maxtext.input_pipeline import _mmap_megatron_cache as megatron  # pylint: disable=import-outside-toplevel

  try:
    if folder != source:
      from maxtext.input_pipeline import _mmap_remote as remote  # pylint: disable=import-outside-toplevel

      local_folder(source, [name for name in remote.list_names(source) if "GPTDataset-" in name])
    found = megatron.load_index(folder, dataset, request, description, stamps)
  except MMapFileNotFoundError:
    return None  # no such folder
  except StaleIndexError as error:
    log.warning("Megatron's %s; building the indices.", error)
    return None
  except OSError as error:
    log.warning("%s cannot be read (%s); building the indices.", error.filename, error.strerror)
    return None
  return Index(description, found[1], True, found[0]) if found else None


def writes(write: bool | None) -> bool:
  return utils.is_primary_process() if write is None else write


def load(folder: str, description: IndexDescription, stamps: Stamps) -> Triplet:
  """Maps the three arrays of an order.

  Raises:
    FileNotFoundError: if a file is missing.
    StaleIndexError: if a file does not hold what the description and the checksums say.
    OSError: if one cannot be read, or was truncated while it was checked.
  """
  path = description.metadata_path(folder)
  try:
    with open(path, encoding="utf-8") as file:
      metadata = json.load(file)
    built_from, recorded = metadata["built_from"], metadata["arrays"]
    digests = [recorded[name]["xxh3_128"] for name in ARRAYS]
  except (ValueError, KeyError, TypeError, RecursionError) as error:
    raise StaleIndexError(f"{path} is not the metadata of an index ({type(error).__name__})") from error
  if built_from != description.built_from:
    raise StaleIndexError(f"{path} was built from other data or settings")
  try:
    return _map_checked(folder, description, stamps, digests)
  finally:
    _mmap_guard.check()


def _map_checked(folder: str, description: IndexDescription, stamps: Stamps, digests) -> Triplet:
  """Maps the arrays, comparing dtype, shape and, unless a stamp vouches for it, checksum."""
  arrays = []
  for (name, (dtype, shape)), digest in zip(description.expected().items(), digests, strict=True):
    path = description.paths(folder)[name]
    array = map_array(path)
    if (array.dtype.str, array.shape) != (dtype, shape):
      raise StaleIndexError(f"{path} is {array.dtype.str}{list(array.shape)}; expected {dtype}{list(shape)}")
    record = stamps.get(path)
    if not record or record.get("digest") != digest:
      stat = stat_of(path)
      if digest_of(array) != digest:
        raise StaleIndexError(f"{path} has changed since it was written (checksum)")
      stamps.put(path, stat, digest=digest)
    arrays.append(array)
  return tuple(arrays)


def triplet_paths(folder: str, name: str | None) -> tuple[str, ...]:
  """Returns the paths of the three index files of an order, or of the only order in a folder.

  Raises:
    MMapFileNotFoundError: if a file is not there.
    MMapError: if there are several orders and no name.
  """
  if not os.path.isdir(folder):
    raise MMapFileNotFoundError(f"{folder} is not a folder; expected one with index files.")
  if name is None:
    name = _only_order(folder)
  paths = tuple(array_paths(folder, name).values())
  for path in paths:
    if not os.path.isfile(path):
      raise MMapFileNotFoundError(f"{path} is missing; build the indices again.")
  return paths


def open_triplet(folder: str, name: str | None, num_sequences: int) -> tuple[tuple[str, ...], Triplet]:
  """Maps the three arrays of a folder by name, or the only ones there, checking every value against the dataset.

  Args:
    folder: of index files, whoever built them.
    name: the part of the file names before `-document_index.npy`; None if the folder holds one order.
    num_sequences: sequences of the dataset.

  Raises:
    MMapFileNotFoundError: if the files are not there.
    MMapError: if there are several orders, or an array does not fit.
  """
  paths = triplet_paths(folder, name)
  try:
    arrays = tuple(map_array(path) for path in paths)
  except StaleIndexError as error:
    raise MMapError(f"{error}; build the indices again.") from error
  check_ranges(arrays, num_sequences, folder)
  return paths, arrays


def _only_order(folder: str) -> str:
  """Returns the name of the one order in a folder."""
  suffixes = [f"-{array}.npy" for array in ARRAYS]
  files = os.listdir(folder)
  names = set.intersection(*({file.removesuffix(end) for file in files if file.endswith(end)} for end in suffixes))
  if not names:
    raise MMapFileNotFoundError(f"{folder} holds no set of document, sample and shuffle index files.")
  if len(names) > 1:
    some = ", ".join(sorted(names)[:3])
    raise MMapError(f"Ambiguous NPY directory: {folder} holds {len(names)} orders ({some}, ...); name one of them.")
  return names.pop()


def check_ranges(arrays: Triplet, num_sequences: int, where: str) -> None:
  """Raises MMapError unless every index points into the next array and the last into the dataset."""
  documents, samples, draws = arrays
  if samples.ndim != 2 or samples.shape[1] != 2 or len(samples) < 2 or documents.ndim != 1 or draws.ndim != 1:
    raise MMapError(
        f"{where}: the arrays have shapes {documents.shape}, {samples.shape} and {draws.shape}; expected (D,), "
        "(samples + 1, 2) and (samples,)."
    )
  checks = (
      ("document_index", documents, num_sequences - 1, "sequences of the dataset"),
      ("sample_index", samples[:, 0], len(documents) - 1, "entries of the document index"),
      ("sample_index offsets", samples[:, 1], np.iinfo(np.int32).max, "tokens"),
      ("shuffle_index", draws, len(samples) - 2, "samples"),
  )
  for name, values, high, noun in checks:
    if not len(values) or kernels.any_outside(values, 0, high):
      raise MMapError(f"{where}: {name} is empty or has values outside 0 to {high}, the {noun}; build it again.")


def save_indices(folder: str, name: str, arrays: Triplet, metadata: dict | None = None) -> dict[str, str]:
  """Writes three arrays under a name of the caller's, with metadata of the caller's; returns the paths by name."""
  paths = array_paths(folder, name)
  for path, array in zip(paths.values(), arrays, strict=True):
    save_array(path, array)
  if metadata is not None:
    paths["metadata"] = metadata_path(folder, name)
    save_json(paths["metadata"], metadata)
  return paths


def write_index(
    folder: str, input_paths, request: IndexRequest, progress=None
) -> tuple[dict[str, str], IndexDescription]:
  """Builds and writes the indices of a request; returns the paths by name, and what they were built from."""
  stamps = Stamps(folder)
  description = describe(input_paths, request, stamps=stamps)
  _, error = build_and_save(folder, input_paths, request, description, stamps, progress)
  if error:
    raise MMapError(f"cannot write indices to {folder} ({error}); give a writable folder with room.") from error
  return {**description.paths(folder), "metadata": description.metadata_path(folder)}, description
