# SPDX-License-Identifier: Apache-2.0
"""The global stream of `grain_file_type=mmap_npy`: the samples that a config describes, in the order of the run.

One dataset, or a blend of several. Made before hosts, workers and batches take their parts.
"""

from __future__ import annotations

from collections.abc import Callable
import concurrent.futures
import dataclasses
import os
from typing import Any

from maxtext.input_pipeline import _megatron_blending as blending
from maxtext.input_pipeline import _mmap_config as mmap_config
from maxtext.input_pipeline import _mmap_datasource as datasource
from maxtext.input_pipeline import _mmap_index_cache as cache
from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline._mmap_files import MMapError
from maxtext.input_pipeline._mmap_mixture import Mixture, parse_mixture, parse_npy_entry
from maxtext.input_pipeline._mmap_shards import ShardedDataset

_MOST_AT_ONCE = 8  # children opened side by side
_MOST_LISTED = 16  # shards that a checkpoint lists one by one


@dataclasses.dataclass(frozen=True)
class StreamSettings:
  """What decides a stream.

  Attributes:
    files: value of `grain_train_files` or `grain_eval_files`.
    seq_length: tokens of a sample, without the extra one.
    eod_id: token that ends a document.
    seed: of the shuffles.
    num_samples: samples asked for, which decides the order; None: `num_epochs` whole passes.
    num_epochs: whole passes, where `num_samples` is None.
    needed: samples that the run reads.
    check_length: whether fewer samples than `needed` are an error; not where a checkpoint decides where to go on.
    split, split_index: shares such as "99,1", or "" for whole datasets; 0 train, 1 valid.
    split_sentences: the data was made with `--split-sentences`.
    blend_margin: samples to build for each child of a blend beyond its share, in percent.
    blend_cache_dir, blend_index_dir: see `_megatron_blending.open_pair`.
    part: train or valid, to find Megatron's own blend files.
    key: config key, for messages.
  """

  files: str
  seq_length: int
  eod_id: int
  seed: int = 1234
  num_samples: int | None = None
  num_epochs: int = 1
  needed: int = 1
  check_length: bool = True
  split: str = ""
  split_index: int = 0
  split_sentences: bool = False
  blend_margin: float = 0.5
  blend_cache_dir: str = ""
  blend_index_dir: str = ""
  part: str = "train"
  key: str = "grain_train_files"

  def request(self, num_samples: int | None) -> cache.IndexRequest:
    """Returns the request for the indices of one dataset."""
    epochs = max(1, self.num_epochs) if num_samples is None else None
    return cache.IndexRequest(self.seq_length, self.seed, num_samples, epochs, self.split, self.split_index)


def settings_for(config, evaluation: bool = False) -> StreamSettings:
  """Returns the settings of a config's training or evaluation stream."""
  if evaluation:
    key, samples, part = "grain_eval_files", mmap_config.eval_samples(config), "valid"
    needed = mmap_config.eval_reads(config) or config.global_batch_size_to_eval_on
  else:
    key, samples, part = "grain_train_files", mmap_config.train_samples(config), "train"
    needed = mmap_config.train_reads(config)
  return StreamSettings(
      files=getattr(config, key),
      seq_length=config.max_target_length,
      eod_id=config.mmap_eod_id,
      seed=config.data_shuffle_seed,
      num_samples=samples,
      needed=needed,
      check_length=evaluation or not mmap_config.continues(config),
      split=config.mmap_npy_split,
      split_index=int(evaluation) if config.mmap_npy_split else 0,
      split_sentences=config.mmap_split_sentences,
      blend_margin=config.mmap_npy_blend_margin,
      blend_cache_dir=config.blend_cache_dir,
      blend_index_dir=config.blend_index_dir,
      part=part,
      key=key,
  )


@dataclasses.dataclass(frozen=True)
class Child:
  """One dataset of a stream.

  Attributes:
    number: its place in the key's value.
    weight: as written; None where no entry has one.
    npy_dir: folder of its index files.
    paths: prefixes or folders of its shards, as written.
    requested: samples that its indices were asked for; None: whole epochs.
    source: its samples.
  """

  number: int
  weight: float | None
  npy_dir: str
  paths: tuple[str, ...]
  requested: int | None
  source: datasource.MegatronNpyDataSource

  @property
  def prefixes(self) -> tuple[str, ...]:
    return self.source.dataset.prefixes

  @property
  def index(self) -> cache.Index:
    assert self.source.index is not None  # it was opened with a request
    return self.source.index


@dataclasses.dataclass(frozen=True)
class Stream:
  """The samples of a run.

  Attributes:
    settings: what it was made from.
    source: element i is {"text": int32[seq_length + 1]}; `read_rows`, `pieces`.
    children: the datasets, those of weight 0 left out.
    blend: the blend of the children; None for one dataset alone.
    order: JSON-able, what decides the order; kept in checkpoints.
  """

  settings: StreamSettings
  source: datasource.MegatronNpyDataSource | blending.MegatronBlendedDataSource
  children: tuple[Child, ...]
  blend: blending.BlendRequest | None
  order: dict[str, Any]

  def __len__(self) -> int:
    return len(self.source)


@dataclasses.dataclass(frozen=True)
class PlannedChild:
  """A dataset to open: see `Child`."""

  number: int
  weight: float | None
  npy_dir: str
  paths: tuple[str, ...]
  requested: int | None


def plan_children(settings: StreamSettings) -> tuple[list[PlannedChild], Mixture]:
  """Says which datasets a stream opens and how many samples it asks each for.

  Raises:
    MMapError: if the key's value cannot be parsed, or a weighted blend has no size.
  """
  mixture = parse_mixture(settings.files, settings.key)
  requested: list[int | None] = [settings.num_samples]
  if mixture.weights is not None:
    if settings.num_samples is None:
      raise MMapError(
          f"{settings.key} is a blend with weights, and no number of samples is set; set eval_steps, or "
          "mmap_npy_num_eval_samples."
      )
    shares = utils._normalize_weights([mixture.weights[number] for number in mixture.used])
    _check_shares(settings, mixture, shares)
    requested = list(utils.compute_blend_buffers(settings.num_samples, shares, settings.blend_margin))
  elif mixture.mixed:
    requested = [None] * len(mixture.entries)
  planned = []
  for number, count in zip(mixture.used, requested, strict=True):
    npy_dir, paths = parse_npy_entry(mixture.entries[number], settings.key)
    weight = mixture.weights[number] if mixture.weights is not None else None
    planned.append(PlannedChild(number, weight, npy_dir, tuple(paths), count))
  return planned, mixture


def _check_shares(settings: StreamSettings, mixture: Mixture, shares: list[float]) -> None:
  """Raises MMapError for a weight that vanishes beside the others: 1e-300 of 1e300 is a share of 0."""
  for number, share in zip(mixture.used, shares, strict=True):
    if not share and mixture.weights is not None:
      raise MMapError(
          f"{settings.key}: the weight {mixture.weights[number]} of entry {number} is nothing beside a total of "
          f"{sum(mixture.weights)}; give it a larger weight, or 0 to leave the entry out."
      )


def plan_blend(settings: StreamSettings, planned: list[PlannedChild], lengths: list[int]) -> blending.BlendRequest:
  """Returns the blend of children that have `lengths` samples."""
  numbers = tuple(child.number for child in planned)
  if planned[0].weight is None:
    return blending.whole_blend(lengths, settings.num_samples, numbers)
  assert settings.num_samples is not None  # plan_children refuses
  return blending.weighted_blend([child.weight or 0.0 for child in planned], settings.num_samples, numbers)


def open_stream(settings: StreamSettings, write: bool | None = None, progress: Callable | None = None) -> Stream:
  """Opens the datasets of a stream, and builds or loads their indices; children of a blend side by side.

  Args:
    write: whether to write what had to be built; None: if this is the primary process.
    progress: called with (child's number, stage, done, total).

  Raises:
    MMapError: if a dataset or an index cannot be used, or the stream has fewer samples than the run needs.
  """
  planned, mixture = plan_children(settings)

  def open_child(child: PlannedChild, dataset: ShardedDataset) -> Child:
    report = progress and (lambda *state: progress(child.number, *state))
    source = datasource.MegatronNpyDataSource(
        child.npy_dir,
        dataset,
        settings.eod_id,
        settings.seq_length,
        settings.split_sentences,
        request=settings.request(child.requested),
        write=write,
        progress=report,
    )
    return Child(**dataclasses.asdict(child), source=source)

  # Each child that has to be built needs memory for its arrays while it is built.
  with concurrent.futures.ThreadPoolExecutor(min(len(planned), os.cpu_count() or 1, _MOST_AT_ONCE)) as pool:
    datasets = list(pool.map(lambda child: ShardedDataset(child.paths), planned))  # all, before anything is built
    children = tuple(pool.map(open_child, planned, datasets))
  blend = plan_blend(settings, planned, [len(child.source) for child in children]) if mixture.mixed else None
  if blend is None:
    source: Any = children[0].source
  else:
    source = blending.MegatronBlendedDataSource(
        [child.source for child in children],
        cache_dir=settings.blend_cache_dir,
        blend_index_dir=settings.blend_index_dir,
        split=settings.part,
        request=blend,
        write=write,
    )
  stream = Stream(settings, source, children, blend, describe_order(settings, children, blend, len(source)))
  if settings.check_length and len(stream) < settings.needed:
    raise MMapError(too_short(settings, len(stream), blend is not None and planned[0].weight is None))
  return stream


def too_short(settings: StreamSettings, available: int, whole: bool) -> str:
  """Says that a stream has too few samples, and what to do; `whole`: it is a blend without weights."""
  training = settings.key == "grain_train_files"
  fewer = "lower steps" if training else "lower eval_steps or eval_per_device_batch_size"
  if whole:
    more = f"give the datasets weights to read them more than once, or {'train' if training else 'evaluate'} on more data"
  else:
    more = f"raise {'mmap_npy_num_samples' if training else 'mmap_npy_num_eval_samples'}"
  return (
      f"{settings.key}: the order of {settings.num_samples or 'all'} samples that was asked for has {available}, but the "
      f"run reads {settings.needed}; {fewer}, or {more}."
  )


def describe_order(settings: StreamSettings, children, blend, available: int) -> dict[str, Any]:
  """Returns what a checkpoint says of the order: all that decides it, and the numbers by which users know it."""
  counts = {
      "requested_samples": settings.num_samples,
      "available_samples": available,
      "needed_samples": settings.needed,
  }
  built_from = [_short_form(child.index.description.built_from) for child in children]
  if blend is None:
    return {**built_from[0], **counts}
  # A weighted blend begins alike whatever its size. One without weights takes its weights from the children.
  exhaustive = blend.sizes is not None
  blend_order = {"weights": blend.weights.tolist(), "exhaustive": exhaustive, "children": built_from}
  return {**blend_order, **counts, "blend_margin": settings.blend_margin}


def _short_form(built_from: dict[str, Any]) -> dict[str, Any]:
  """Replaces a long list of shards by its sums and one checksum: the state is written with every checkpoint."""
  shards = built_from["datasets"]
  if len(shards) <= _MOST_LISTED:
    return built_from
  total = {key: sum(shard[key] for shard in shards) for key in ("sequences", "tokens")}
  return {
      **built_from,
      "datasets": [{"digest": cache.digest_of_json({"shards": shards}), "shards": len(shards), **total}],
  }
