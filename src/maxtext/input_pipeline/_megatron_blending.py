# SPDX-License-Identifier: Apache-2.0
"""Blends: which dataset each sample of a weighted mixture comes from, as megatron-core's BlendedDataset decides it.

Replaces the release's module of this name; public names and signatures are kept. A blend is two arrays, the dataset of
each sample (`dataset_index`, int16) and the sample within it (`dataset_sample_index`, int64). The same weights give the
same beginning whatever the size, so a longer pair serves a shorter blend.

A pair on disk is checked by drawing it again, piece by piece, before its first use; `stamps.json` beside it spares later
starts the work, as for other index files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import dataclasses
import glob
import logging
import math
import os

import numpy as np

from maxtext.input_pipeline import _mmap_guard
from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_kernels as kernels
from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline import _mmap_megatron_cache as megatron
from maxtext.input_pipeline._mmap_files import MMapError

log = logging.getLogger(__name__)

ARRAYS = megatron.PAIR
MAX_DATASETS = 32767  # the dataset index is int16
_PIECE = 1 << 16  # draws between two looks at the progress


@dataclasses.dataclass(frozen=True)
class BlendRequest:
  """What decides a blend.

  Attributes:
    weights: float64[datasets], of sum 1, as the draws use them.
    size: draws.
    sizes: for an exhaustive blend, int64[datasets], how often each dataset is drawn; else None.
    numbers: the datasets as messages call them, by default 0, 1, ...
  """

  weights: np.ndarray
  size: int
  sizes: np.ndarray | None = None
  numbers: tuple[int, ...] | None = None

  @property
  def name(self) -> str:
    """The beginning of the files' names in a cache folder: equal for equal blends."""
    sizes = None if self.sizes is None else self.sizes.tolist()
    return cache.digest_of_json({"weights": self.weights.tolist(), "size": self.size, "sizes": sizes})

  def draws(self) -> Draws:
    return Draws(self)

  def check(self, counts: Sequence[int], lengths: Sequence[int]) -> None:
    """Raises MMapError if a dataset is drawn from more often than it has samples."""
    for number, (count, length) in enumerate(zip(counts, lengths, strict=True)):
      if count > length:
        name = self.numbers[number] if self.numbers else number
        raise MMapError(
            f"the blend asks dataset {name} for {count} samples, and its indices have {length}; raise "
            "mmap_npy_blend_margin, or build its indices for more samples."
        )


class Draws:
  """The draws of a blend, from the first on."""

  def __init__(self, request: BlendRequest):
    self._request = request
    self._done = 0
    datasets = len(request.weights)
    self._drawn = np.zeros(datasets)
    self._left = np.array([*range(datasets), datasets], np.int64)

  @property
  def counts(self) -> list[int]:
    """How often each dataset was drawn so far."""
    return self._drawn.astype(np.int64).tolist()

  def next(self, dataset_index: np.ndarray, dataset_sample_index: np.ndarray) -> None:
    """Fills int16[n] and int64[n] with the next n draws."""
    request, out = self._request, (self._drawn, dataset_index, dataset_sample_index)
    if request.sizes is None:
      kernels.blend(request.weights, self._done, *out)
    else:
      kernels.blend_exhaustively(request.sizes, request.weights, self._left, self._done, *out)
    self._done += len(dataset_index)


def normalized(weights: Sequence[float]) -> np.ndarray:
  """Returns positive weights divided by their sum, float64[datasets], in NumPy's arithmetic as Megatron's.

  Raises:
    MMapError: unless there are 1 to 32,767 finite positive weights.
  """
  vector = np.asarray(weights, np.float64)
  if vector.ndim != 1 or not 1 <= len(vector) <= MAX_DATASETS:
    raise MMapError(
        f"a blend of {vector.size} datasets was asked for; expected 1 to {MAX_DATASETS}, as the dataset index is int16."
    )
  if not np.isfinite(vector).all() or (vector <= 0).any():
    raise MMapError(f"the weights of a blend are {_some(vector.tolist())}; expected finite positive numbers.")
  return np.array(utils._normalize_weights(vector.tolist()))


def _some(values: Sequence) -> str:
  return ", ".join(map(str, values[:8])) + (", ..." if len(values) > 8 else "")


def weighted_blend(weights: Sequence[float], size: int, numbers: tuple[int, ...] | None = None) -> BlendRequest:
  """A blend of `size` draws by weight: Megatron divides weights by their sum, and BlendedDataset does it again."""
  return BlendRequest(normalized(normalized(weights).tolist()), _positive(size), None, numbers)


def whole_blend(lengths: Sequence[int], size: int | None, numbers: tuple[int, ...] | None = None) -> BlendRequest:
  """Megatron's blend of datasets without weights: each in proportion to its samples, none drawn twice.

  Args:
    lengths: samples of each dataset in one epoch.
    size: draws; at most the sum of the lengths. None: all.
  """
  total = sum(lengths)
  if size is None:
    shares = np.array([length / total for length in lengths])
    normalized(lengths)
    return BlendRequest(shares, total, np.array(lengths, np.int64), numbers)
  return BlendRequest(normalized(lengths), min(_positive(size), total), None, numbers)


def _positive(size: int) -> int:
  if size < 1:
    raise MMapError(f"a blend of {size} samples was asked for; expected 1 or more.")
  return int(size)


def draw(request: BlendRequest, progress: Callable | None = None) -> tuple[tuple[np.ndarray, np.ndarray], list[int]]:
  """Returns the two arrays of a blend, int16[size] and int64[size], and how often each dataset is drawn."""
  dataset_index, dataset_sample_index = np.empty(request.size, np.int16), np.empty(request.size, np.int64)
  draws = request.draws()
  step = _PIECE * 64
  for first in range(0, request.size, step):
    draws.next(dataset_index[first : first + step], dataset_sample_index[first : first + step])
    if progress:
      progress("blend", min(first + step, request.size), request.size)
  return (dataset_index, dataset_sample_index), draws.counts


def _pieces(draws: Draws, size: int) -> Iterator[tuple[int, list[np.ndarray]]]:
  """Yields the first `size` draws, a piece at a time in the same memory: the number of its first, and both arrays."""
  buffers = np.empty(_PIECE, np.int16), np.empty(_PIECE, np.int64)
  for first in range(0, size, _PIECE):
    piece = [buffer[: size - first] for buffer in buffers]
    draws.next(*piece)
    yield first, piece


def count_draws(request: BlendRequest, progress: Callable | None = None) -> list[int]:
  """Returns how often each dataset is drawn, without keeping the draws."""
  draws = request.draws()
  for first, piece in _pieces(draws, request.size):
    if progress:
      progress("blend", first + len(piece[0]), request.size)
  return draws.counts


def first_difference(
    request: BlendRequest, arrays: Sequence[np.ndarray], most: int | None = None
) -> tuple[int | None, list[int]]:
  """Compares a pair, or its first `most` draws, with the blend.

  Returns:
    The first draw that differs, or None, and the counts up to there.
  """
  draws = request.draws()
  for first, wanted in _pieces(draws, min(request.size, most or request.size)):
    count = len(wanted[0])
    equal = wanted[0] == arrays[0][first : first + count]
    equal &= wanted[1] == arrays[1][first : first + count]
    if not equal.all():
      return first + int(np.argmin(equal)), draws.counts
  return None, draws.counts


# Pairs on disk.


def pair_paths(folder: str, name: str | None = None) -> tuple[str, ...]:
  """Returns the two files of a pair: with fixed names in a `blend_index_dir`, by name in a cache folder."""
  return tuple(os.path.join(folder, f"{name}-{array}.npy" if name else f"{array}.npy") for array in ARRAYS)


def find_pair(folder: str, split: str, request: BlendRequest) -> tuple[str, ...] | None:
  """Finds the pair of a folder: the fixed names, else what Megatron's descriptions name, else the only pair there.

  Raises:
    MMapError: if several pairs could be meant, or Megatron's are of other blends.
  """
  fixed = pair_paths(folder)
  if all(map(os.path.isfile, fixed)):
    return fixed
  sizes = None if request.sizes is None else request.sizes.tolist()
  megatrons = megatron.find_blend(folder, split, request.weights.tolist(), request.size, sizes)
  if megatrons.paths:
    return megatrons.paths
  if megatrons.reason:
    raise MMapError(f"Megatron's {megatrons.reason}.")
  ends = [f"-{array}.npy" for array in ARRAYS]
  starts = [path.removesuffix(ends[0]) for path in sorted(glob.glob(os.path.join(glob.escape(folder), f"*{ends[0]}")))]
  pairs = [start for start in starts if os.path.isfile(start + ends[1])]
  of_split = [start for start in pairs if start.endswith(f"-BlendedDataset-{split}")]
  chosen = of_split or pairs
  if len(chosen) > 1:
    names = ", ".join(map(os.path.basename, chosen[:3]))
    raise MMapError(f"{folder} holds {len(chosen)} pairs of blend indices ({names}, ...); keep the one that is meant.")
  return tuple(chosen[0] + end for end in ends) if chosen else None


def map_pair(paths: Sequence[str], request: BlendRequest) -> tuple[np.ndarray, ...]:
  """Maps a pair, which may be longer than the blend; returns its first `size` draws, whose values are not looked at.

  Raises:
    FileNotFoundError: if a file is missing.
    StaleIndexError: if a file has another type, or is too short.
  """
  arrays = []
  for path, dtype in zip(paths, (np.int16, np.int64), strict=True):
    array = cache.map_array(path)
    if array.dtype != dtype or array.ndim != 1 or len(array) < request.size:
      raise cache.StaleIndexError(
          f"{path} is {array.dtype.name}{list(array.shape)}; expected {np.dtype(dtype).name}[{request.size}] or longer"
      )
    arrays.append(array[: request.size])
  return tuple(arrays)


def check_draws(paths: Sequence[str], arrays: Sequence[np.ndarray], request: BlendRequest, most: int | None = None):
  """Returns the counts of a pair; raises StaleIndexError unless its draws, or the first `most`, are the blend's."""
  position, counts = first_difference(request, arrays, most)
  if position is not None:
    found = tuple(int(array[position]) for array in arrays)
    raise cache.StaleIndexError(f"{paths[0]} and its partner are not this blend: draw {position} is {found}")
  return counts


def load_pair(
    paths: Sequence[str], request: BlendRequest, stamps: cache.Stamps
) -> tuple[tuple[np.ndarray, ...], list[int]]:
  """Maps a pair, which may be longer than the blend; returns its first `size` draws, and the counts.

  Raises:
    FileNotFoundError: if a file is missing.
    StaleIndexError: if the pair is not this blend.
  """
  arrays = map_pair(paths, request)
  records = [stamps.get(path) for path in paths]
  if records[0] and all(record and record.get("blend") == request.name for record in records):
    return arrays, records[0]["counts"]
  stats = [cache.stat_of(path) for path in paths]
  counts = check_draws(paths, arrays, request)
  for path, stat in zip(paths, stats, strict=True):
    stamps.put(path, stat, blend=request.name, counts=counts)
  return arrays, counts


@dataclasses.dataclass(frozen=True)
class Pair:
  """The two arrays of a blend, and where they are; `paths` is None if they are in memory only."""

  arrays: tuple[np.ndarray, ...]
  paths: tuple[str, ...] | None
  found: bool


def open_pair(
    request: BlendRequest,
    lengths: Sequence[int],
    cache_dir: str = "",
    index_dir: str = "",
    split: str = "train",
    write: bool | None = None,
) -> Pair:
  """Loads a blend from `index_dir`, else from `cache_dir`, else draws it, and writes it to `cache_dir`.

  Args:
    lengths: samples that each dataset has.
    split: train, valid or test, to find Megatron's own files.
    write: whether to write; None: if this is the primary process.

  Raises:
    MMapError: if a dataset has fewer samples than are drawn from it.
  """
  for folder, fixed in ((index_dir, True), (cache_dir, False)):
    found = _look(folder, fixed, request, split, write) if folder else None
    if found:
      request.check(found[1], lengths)
      return found[0]
  arrays, counts = draw(request)
  request.check(counts, lengths)
  if not cache_dir or not cache.writes(write):
    return Pair(arrays, None, False)
  try:
    paths = pair_paths(cache.local_folder(cache_dir), request.name)
    _save_pair(paths, arrays, request, counts)
    return Pair(tuple(map(cache.map_array, paths)), paths, False)
  except (OSError, cache.StaleIndexError) as error:
    log.warning("Cannot keep the blend in %s (%s); it stays in memory and every start draws it again.", cache_dir, error)
    return Pair(arrays, None, False)


def _look(folder: str, fixed: bool, request, split, write) -> tuple[Pair, list[int]] | None:
  """Loads a pair from a folder; says why if it does not."""
  try:
    local = _local_pair_folder(folder, None if fixed else request.name)
    paths = find_pair(local, split, request) if fixed else pair_paths(local, request.name)
    if paths is None:
      log.warning("%s holds no pair of blend indices (dataset_index.npy and dataset_sample_index.npy).", folder)
      return None
    stamps = cache.Stamps(local)
    try:
      arrays, counts = load_pair(paths, request, stamps)
    finally:
      _mmap_guard.check()
    if cache.writes(write):
      stamps.save()
    return Pair(arrays, paths, True), counts
  except (FileNotFoundError, NotADirectoryError):
    (log.warning if fixed else log.info)("%s does not have the indices of this blend.", folder)
  except (MMapError, cache.StaleIndexError) as error:
    log.warning("%s; drawing the blend again.", str(error).rstrip("."))
  except OSError as error:
    log.warning("%s cannot be read (%s); drawing the blend again.", error.filename, error.strerror)
  return None


def _local_pair_folder(folder: str, name: str | None) -> str:
  """Returns a folder itself, or for a URL a local copy of its pair."""
  if "://" not in folder:
    return folder
  from maxtext.input_pipeline import _mmap_remote as remote  # pylint: disable=import-outside-toplevel

  wanted = pair_paths("", name) if name else [n for n in remote.list_names(folder) if _is_of_pair(n)]
  return cache.local_folder(folder, [os.path.basename(path) for path in wanted])


def _is_of_pair(name: str) -> bool:
  return name.endswith(tuple(f"{array}.npy" for array in ARRAYS)) or megatron.is_description(name)


def _save_pair(paths: Sequence[str], arrays: Sequence[np.ndarray], request: BlendRequest, counts: list[int]) -> None:
  """Writes a pair and stamps it as checked."""
  stamps = cache.Stamps(os.path.dirname(paths[0]))
  for path, array in zip(paths, arrays, strict=True):
    cache.save_array(path, array)
    stamps.put(path, cache.stat_of(path), blend=request.name, counts=counts)
  stamps.save()


# Building offline.


def write_blend(
    dataset_specs, request: cache.IndexRequest, margin: float, max_workers, output_dir, progress=None
) -> list[dict]:
  """Builds the indices of every child of a blend side by side, then the blend; writes all.

  Args:
    dataset_specs: dicts of "input" (paths of one dataset), "weight" and "output_dir".
    request: `num_samples` is the size of the blend; the rest holds for every child.
    margin: samples to build beyond each share, in percent.
    max_workers: children built at a time; None: one for each core.
    output_dir: for the pair with fixed names; None: no pair.
    progress: called with (number of the child or None, stage, done, total).

  Returns:
    For each child of positive weight: "number" in `dataset_specs`, "paths" by name, "weight" (normalised),
    "buffer_samples" (asked for) and "description" (IndexDescription).

  Raises:
    MMapError: if a child cannot be built, or has too few samples.
  """
  if not dataset_specs:
    raise MMapError("a blend of 0 datasets was asked for; name at least one.")
  weights = [float(spec["weight"]) for spec in dataset_specs]
  if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not sum(weights):
    raise MMapError(f"the weights of a blend are {_some(weights)}; expected 0 or more, with a positive total.")
  numbers = tuple(number for number, weight in enumerate(weights) if weight)
  blend = weighted_blend([weights[number] for number in numbers], request.num_samples or 0, numbers)
  shares = utils._normalize_weights([weights[number] for number in numbers])
  buffers = utils.compute_blend_buffers(blend.size, shares, margin)

  def build(position: int) -> dict:
    number = numbers[position]
    spec, child = dataset_specs[number], dataclasses.replace(request, num_samples=buffers[position])
    report = progress and (lambda *state: progress(number, *state))
    paths, description = cache.write_index(spec["output_dir"], spec["input"], child, report)
    return {
        "number": number,
        "paths": paths,
        "weight": shares[position],
        "buffer_samples": buffers[position],
        "description": description,
    }

  with concurrent.futures.ThreadPoolExecutor(max_workers or os.cpu_count() or 1) as pool:
    children = list(pool.map(build, range(len(numbers))))
  if output_dir:
    report = progress and (lambda *state: progress(None, *state))
    arrays, counts = draw(blend, report)
    blend.check(counts, [child["description"].plan.samples for child in children])
    _write(output_dir, arrays, blend, counts)
  return children


def _write(folder: str, arrays, blend: BlendRequest, counts) -> tuple[str, ...]:
  """Writes a pair with its fixed names."""
  paths = pair_paths(folder)
  try:
    _save_pair(paths, arrays, blend, counts)
  except OSError as error:
    raise MMapError(f"cannot write blend indices to {folder} ({error}); give a writable folder with room.") from error
  return paths


def build_and_save_blend_indices(
    output_dir: str, weights: Sequence[float], dataset_lengths: Sequence[int], size: int
) -> dict[str, str]:
  """Draws a blend and writes its pair with fixed names; returns their paths.

  Args:
    output_dir: folder, made if need be.
    weights: of the datasets; those of weight 0 are left out.
    dataset_lengths: samples of each.
    size: draws.
  """
  kept, lengths = _kept(weights, dataset_lengths)
  blend = BlendRequest(normalized([weights[number] for number in kept]), _positive(size), None, kept)
  arrays, counts = draw(blend)
  blend.check(counts, lengths)
  return dict(zip(ARRAYS, _write(str(output_dir), arrays, blend, counts), strict=True))


def build_blending_indices(
    dataset_index: np.ndarray,
    dataset_sample_index: np.ndarray,
    weights: np.ndarray,
    num_datasets: int,
    size: int,
) -> None:
  """Fills int16[size] and int64[size] with a blend, as the function of this name in megatron-core's helpers does.

  Args:
    weights: float64[num_datasets], of sum 1.
  """
  weights = np.ascontiguousarray(weights, np.float64)
  if size < 0:
    raise MMapError(f"size must be non-negative, got {size}.")
  if num_datasets < 1 or weights.shape != (num_datasets,) or not (weights > 0).all():
    raise MMapError(f"the weights are {_some(weights.ravel().tolist())}; expected {num_datasets} positive ones.")
  if not np.isclose(weights.sum(), 1.0, rtol=1e-4, atol=1e-6):
    raise MMapError(f"weights must sum to 1, got {_some(weights.tolist())}.")
  if dataset_index.shape != (size,) or dataset_sample_index.shape != (size,):
    raise MMapError(
        f"the arrays are {dataset_index.shape} and {dataset_sample_index.shape}; expected ({size},) for both."
    )
  kernels.blend(weights, 0, np.zeros(num_datasets), dataset_index, dataset_sample_index)


def _kept(weights: Sequence[float], lengths: Sequence[int]) -> tuple[tuple[int, ...], list[int]]:
  """Returns the numbers of the datasets of positive weight, and their lengths."""
  if len(weights) != len(lengths) or not len(weights):
    raise MMapError(f"{len(weights)} weights and {len(lengths)} datasets were given; expected one for each.")
  vector = np.asarray(weights, np.float64)
  if not np.isfinite(vector).all() or (vector < 0).any() or not vector.sum():
    raise MMapError(f"the weights of a blend are {_some(vector.tolist())}; expected 0 or more, with a positive total.")
  numbers = tuple(np.flatnonzero(vector).tolist())
  return numbers, [int(lengths[number]) for number in numbers]


class MegatronBlendedDataSource:
  """The samples of several datasets, blended as megatron-core's BlendedDataset blends them.

  Element i is element `dataset_sample_index[i]` of dataset `dataset_index[i]`.

  Args:
    map_datasets: random access to the samples of each dataset.
    weights: of each; a dataset of weight 0 is left out. Divided by their sum.
    size: elements; None: as many as no dataset is asked for more than it has.
    dataset_lengths: samples of each dataset; None: their len().
    cache_dir, blend_index_dir, split: see `open_pair`.
    request: the blend, instead of weights and size; of the datasets given.
    write: see `open_pair`.
  """

  def __init__(
      self,
      map_datasets: Sequence,
      weights: Sequence[float] | None = None,
      size: int | None = None,
      dataset_lengths: Sequence[int] | None = None,
      cache_dir: str | None = None,
      blend_index_dir: str | None = None,
      split: str = "train",
      *,
      request: BlendRequest | None = None,
      write: bool | None = None,
  ):
    lengths = [len(dataset) for dataset in map_datasets] if dataset_lengths is None else list(dataset_lengths)
    self._datasets = list(map_datasets)
    if request is None:
      weights = weights if weights is not None else []
      kept, lengths = _kept(weights, lengths)
      self._datasets = [map_datasets[number] for number in kept]
      shares = normalized([weights[number] for number in kept])
      if size is None:
        size = math.floor(min(length / share for length, share in zip(lengths, shares.tolist(), strict=True)))
      request = BlendRequest(shares, _positive(size), None, kept)
    self.pair = open_pair(request, lengths, cache_dir or "", blend_index_dir or "", split, write)
    self._set_arrays(cache.StoredArrays(self.pair.arrays, ARRAYS, self.pair.paths))

  def _set_arrays(self, stored: cache.StoredArrays) -> None:
    self._stored = stored
    self._dataset_index, self._dataset_sample_index = stored.arrays

  def __len__(self) -> int:
    return len(self._dataset_index)

  def child(self, index: int) -> tuple[int, int]:
    """Returns the number of the dataset that element `index` comes from, and the element there."""
    position = int(index)
    if position < 0:
      position += len(self)
    if not 0 <= position < len(self):
      raise IndexError(f"sample {index} of {len(self)}")
    return int(self._dataset_index[position]), int(self._dataset_sample_index[position])

  def __getitem__(self, index):
    dataset, element = self.child(index)
    return self._datasets[dataset][element]

  def read_rows(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
    """Reads several elements, int32[len(indices), seq_length + 1]; each dataset's in one call."""
    places = [self.child(index) for index in indices]
    _mmap_guard.check(self._stored.tails)
    if not places:
      return self._datasets[0].read_rows([])
    rows_of: dict[int, list[int]] = {}
    for row, (dataset, _) in enumerate(places):
      rows_of.setdefault(dataset, []).append(row)
    parts = [self._datasets[dataset].read_rows([places[row][1] for row in own]) for dataset, own in rows_of.items()]
    tokens = np.concatenate(parts)
    out = np.empty_like(tokens)
    out[np.concatenate(list(rows_of.values()))] = tokens
    return out

  def pieces(self, index: int):
    """Returns where the tokens of element `index` lie in the files of its dataset."""
    dataset, element = self.child(index)
    return self._datasets[dataset].pieces(element)

  def file_of(self, index: int, token: int) -> str:
    """Returns the path of the file that holds a token of element `index`."""
    dataset, element = self.child(index)
    return self._datasets[dataset].file_of(element, token)

  def __reduce__(self):
    return _reopen, (self._datasets, self._stored.ship())


def _reopen(datasets, shipped: cache.ShippedArrays) -> MegatronBlendedDataSource:
  """Opens a source in a worker process."""
  source = MegatronBlendedDataSource.__new__(MegatronBlendedDataSource)
  source._datasets = datasets
  source._set_arrays(shipped.open())
  return source
