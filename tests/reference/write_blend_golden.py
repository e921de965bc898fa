# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/megatron_blend.json: what megatron-core makes of blends of small datasets.

Run in the reference environment: `python tests/reference/write_blend_golden.py [output]`. As with write_golden.py, the
output depends on nothing but the versions that its `provenance` names, and nothing of this repository takes part.
Long arrays are kept as their length, their beginning and the SHA-256 of their bytes.
"""

import functools
import hashlib
from pathlib import Path
import sys
import tempfile

from megatron.core.datasets import helpers
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import normalize
import numpy as np
from write_golden import EOD, SEED, Tokenizer, render, sample_tokens, write_dataset
from write_golden import provenance as gpt_provenance

OUTPUT = Path(__file__).resolve().parents[1] / "golden" / "megatron_blend.json"
COMMAND = "python tests/reference/write_blend_golden.py"
SHORT = 48  # entries up to which an array is kept whole
BEGINNING = 16
MOST_SAMPLES = 10  # kept of each part
MOST_MASKS = 4


def summary(array) -> dict:
  """Says what an array is: whole if it is short, else its beginning and a digest."""
  array = np.ascontiguousarray(array)
  kept = array if array.size <= SHORT else array[:BEGINNING]
  digest = hashlib.sha256(array.tobytes()).hexdigest()
  return {"dtype": array.dtype.str, "shape": list(array.shape), "begin": kept.tolist(), "sha256": digest}


# The two ways to mix children.


def blend(weights, size) -> tuple[np.ndarray, np.ndarray]:
  """Returns megatron-core's dataset index and dataset sample index for normalised weights."""
  arrays = np.zeros(size, np.int16), np.zeros(size, np.int64)
  helpers.build_blending_indices(*arrays, weights, len(weights), size, False)
  return arrays


def blend_exhaustively(sizes) -> tuple[np.ndarray, np.ndarray]:
  """Returns megatron-core's dataset index and dataset sample index that draw every sample of every child once."""
  arrays = np.zeros(sum(sizes), np.int16), np.zeros(sum(sizes), np.int64)
  helpers.build_exhaustive_blending_indices(*arrays, sizes, len(sizes))
  return arrays


def normalize_twice(weights) -> list[float]:
  """Normalises as the builder does, and then BlendedDataset."""
  return normalize(normalize(weights))


def weight_vectors(rng):
  """Weights as a user writes them, and draws."""
  yield [0.7, 0.3], 10
  yield [7, 3], 10
  yield [1, 1, 1], 12
  yield [3, 3, 3], 12
  yield [0.001, 0.999], 2000
  yield [0.999, 0.001], 2000
  yield [0.5, 0.5], 40
  yield [0.5, 0.25, 0.25], 40
  yield [0.1] * 10, 400
  yield [0.2, 0.3, 0.5], 1000
  yield [0.3, 0.3, 0.2, 0.1, 0.1], 1000
  yield [1e-9, 1.0, 1e-9], 500
  yield [1] * 300, 1000
  for children in (2, 2, 2, 3, 3, 3, 4, 4, 5, 6, 7, 8, 9, 11, 13, 16, 17, 23, 32, 40):
    yield rng.random(children).tolist(), int(rng.integers(200, 4000))
  for children in (2, 3, 4, 6, 9, 16, 33):  # whole numbers: many ties
    yield rng.integers(1, 6, children).tolist(), int(rng.integers(200, 4000))
  for children in (2, 5, 8, 20):  # weights of very different magnitude
    yield (10.0 ** rng.uniform(-4, 2, children)).tolist(), 3000
  yield [round(weight, 4) for weight in rng.random(300).tolist()], 6000


def run_weights(weights, size) -> dict:
  arrays = blend(normalize_twice(weights), size)
  names = ("dataset_index", "dataset_sample_index")
  return {"weights": weights, "size": size, **{name: summary(array) for name, array in zip(names, arrays, strict=True)}}


def child_sizes(rng):
  yield from ([2, 5], [5, 2], [1], [1, 1, 1], [7, 7], [1, 100], [3, 1, 4, 1, 5, 9, 2, 6], [1000, 1, 10])
  for children in (2, 3, 5, 8, 13, 40):
    yield rng.integers(1, 120, children).tolist()
  yield rng.integers(1, 20, 300).tolist()


def run_sizes(sizes) -> dict:
  arrays = blend_exhaustively(sizes)
  names = ("dataset_index", "dataset_sample_index")
  return {"sizes": sizes, **{name: summary(array) for name, array in zip(names, arrays, strict=True)}}


# Whole builds.


def tokens_of(child, lengths) -> list[list[int]]:
  """Tokens 10000 * child + 100 * sequence + position, the last of each sequence EOD; for fewer than 99 tokens each."""
  rows = [list(range(10000 * child + 100 * row, 10000 * child + 100 * row + n)) for row, n in enumerate(lengths)]
  return [[*row[:-1], EOD] if row else row for row in rows]


def write_children(folder, name, children) -> list[str]:
  """Writes datasets with the given sequence lengths; returns their prefixes."""
  prefixes = [str(Path(folder) / f"{name}-{number}") for number in range(len(children))]
  for number, (prefix, lengths) in enumerate(zip(prefixes, children, strict=True)):
    write_dataset(prefix, tokens_of(number, lengths), range(len(lengths) + 1), "int32")
  return prefixes


def make_config(prefixes, cache, seq_length, seed, weights, split, per_split, mask_loss, **settings) -> GPTDatasetConfig:
  """Returns megatron-core's config of a build; `per_split` is [children, weights or None] or None for each part."""
  if per_split:
    blends = [entry and ([prefixes[number] for number in entry[0]], entry[1]) for entry in per_split]
    data = {"blend_per_split": blends}
  else:
    data = {"blend": (prefixes, weights), "split": split}
  return GPTDatasetConfig(
    random_seed=seed,
    sequence_length=seq_length,
    path_to_cache=cache,
    tokenizer=Tokenizer(),
    reset_position_ids=True,
    reset_attention_mask=True,
    eod_mask_loss=mask_loss,
    **data,
    **settings,
  )


def build(prefixes, sizes, cache=None, *, seq_length, seed, weights, split, per_split, mask_loss, **settings):
  """Returns the train, valid and test datasets (or None) of BlendedMegatronDatasetBuilder.

  Args:
    sizes: samples asked for in each part; None: all that one epoch of the children gives.
    cache: folder of index files; with one, torch.distributed must be up.
    weights: of the children, or None.
    split: "shares,of,parts", where `per_split` is not given.
  """
  config = make_config(prefixes, cache, seq_length, seed, weights, split, per_split, mask_loss, **settings)
  return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


def random_lengths(rng, sequences, longest=60) -> list[int]:
  lengths = rng.integers(1, longest, sequences)
  lengths[rng.random(sequences) < 0.1] = 0
  lengths[[0, -1]] = longest  # so that no part of a split is empty
  return lengths.tolist()


def named_builds(rng):
  """Settings of builds, as keyword arguments of `run_build`."""
  two = [random_lengths(rng, 20), random_lengths(rng, 31)]
  three = [random_lengths(rng, count) for count in (12, 40, 25)]
  five = [random_lengths(rng, int(count)) for count in rng.integers(12, 50, 5)]
  yield {"name": "d7", "children": two, "weights": [0.7, 0.3], "sizes": [1000, 40, 20], "split": "8,1,1"}
  yield {"name": "unnormalised", "children": two, "weights": [7, 3], "sizes": [333, 21, 7], "split": "80,10,10"}
  yield {"name": "thirds", "children": three, "weights": [1, 1, 1], "sizes": [100, 16, 0], "split": "90,10,0"}
  yield {"name": "five", "children": five, "weights": rng.random(5).tolist(), "sizes": [700, 60, 30], "split": "6,3,1"}
  yield {"name": "mask-loss", "children": three, "weights": [0.2, 0.3, 0.5], "sizes": [150, 9, 9], "split": "7,2,1",
         "mask_loss": True}  # fmt: skip
  yield {"name": "one-child", "children": two[:1], "weights": [1.0], "sizes": [200, 8, 0], "split": "9,1,0"}
  yield {"name": "one-unweighted", "children": two[:1], "weights": None, "sizes": [200, 8, 0], "split": "9,1,0"}
  yield {"name": "unweighted", "children": three, "weights": None, "sizes": [90, 20, None], "split": "6,3,1"}
  yield {"name": "unweighted-capped", "children": two, "weights": None, "sizes": [10**6, 10**6, 1], "split": "7,2,1"}
  yield {"name": "full-validation", "children": five, "weights": None, "sizes": [120, None, None], "split": "6,3,1"}
  per_split = [[[0, 1], [0.6, 0.4]], [[2], None], [[3, 4], None]]
  yield {"name": "per-split", "children": five, "per_split": per_split, "sizes": [250, 30, None]}
  per_split = [[[0, 2, 4], [5, 3, 2]], [[1, 3], [0.5, 0.5]], None]
  yield {"name": "per-split-weighted", "children": five, "per_split": per_split, "sizes": [250, 30, 0]}
  per_split = [[[0, 1], None], [[2, 3, 4], None], [[0], [2.0]]]
  yield {"name": "per-split-unweighted", "children": five, "per_split": per_split, "sizes": [60, 25, 12]}


def evaluation_builds(rng):
  """Builds whose validation size is that of a run: Megatron asks for the samples of all evaluations together."""
  children = [random_lengths(rng, count) for count in (25, 40)]
  alone = {"children": children[:1], "split": "8,2,0"}
  blended = {"children": children, "weights": [0.7, 0.3], "split": "7,2,1"}
  per_split = {"children": children, "per_split": [[[0], None], [[0, 1], [1, 3]], None]}
  for name, data in (("eval-alone", alone), ("eval-blend", blended), ("eval-per-split", per_split)):
    for train_iters, eval_interval, eval_iters, batch in ((100, 30, 2, 4), (90, 30, 3, 8)):
      run = {"train_iters": train_iters, "eval_interval": eval_interval, "eval_iters": eval_iters, "batch": batch}
      valid = (train_iters // eval_interval + 1) * eval_iters * batch
      sizes = [train_iters * batch, valid, eval_iters * batch]
      yield {"name": f"{name}-{valid}", "sizes": sizes, "run": run, **data}


def run_build(
  folder, name, children, sizes, weights=None, split=None, per_split=None, seq_length=16, mask_loss=False, run=None
):
  """Returns the settings of a build with what megatron-core made of each part.

  Args:
    run: numbers of a run; kept, and the digest of all tokens of the validation part's first samples is added.
  """
  prefixes = write_children(folder, name, children)
  settings = {"seq_length": seq_length, "seed": 1234, "weights": weights, "split": split, "per_split": per_split}
  parts = build(prefixes, sizes, mask_loss=mask_loss, **settings)
  results = [None if part is None else run_part(part) for part in parts]
  if run:
    tokens = np.array([tokens_at(parts[1], position) for position in range(sizes[1])], np.int32)
    settings |= {"run": run}
    results = [None, results[1] | {"tokens": summary(tokens) | {"begin": []}}, None]
  return {
    "name": name,
    "children": children,
    "sizes": sizes,
    **settings,
    "mask_loss": mask_loss,
    "parts": results,
  }


def run_part(part) -> dict:
  """Says what one part of a build is: its blend, its children's indices, and its first samples."""
  blended = isinstance(part, BlendedDataset)
  result: dict = {"length": len(part), "blended": blended}
  if blended:
    result |= {"size": part.size, "weights": part.weights}
    result |= {name: summary(getattr(part, name)) for name in ("dataset_index", "dataset_sample_index")}
  result["children"] = [run_child(child) for child in (part.datasets if blended else [part])]
  kept = range(min(len(part), MOST_SAMPLES))
  result["samples"] = [tokens_at(part, position) for position in kept]
  result["masks"] = [mask_at(part, position) for position in kept[:MOST_MASKS]]
  return result


def run_child(child) -> dict:
  arrays = {name: summary(getattr(child, name)) for name in ("document_index", "sample_index", "shuffle_index")}
  for entry in arrays.values():
    entry["begin"] = entry["begin"][:4]
  return {"num_samples": child.num_samples, **arrays}


def tokens_at(part, position) -> list[int]:
  """Returns the L + 1 tokens of a sample of a blend or of a single dataset."""
  if not isinstance(part, BlendedDataset):
    return sample_tokens(part, position)
  child = part.datasets[part.dataset_index[position]]
  return sample_tokens(child, int(part.dataset_sample_index[position]))


def mask_at(part, position) -> dict[str, list[int]]:
  sample = part[position]
  return {name: [int(value) for value in sample[name]] for name in ("loss_mask", "position_ids")}


@functools.lru_cache(1)
def provenance() -> dict[str, str | int]:
  return gpt_provenance() | {"command": COMMAND}


def build_content() -> dict[str, list]:
  """Returns the sections of the golden file."""
  rng = np.random.default_rng(SEED)
  with tempfile.TemporaryDirectory() as folder:
    return {
      "weights": [run_weights(*case) for case in weight_vectors(rng)],
      "sizes": [run_sizes(sizes) for sizes in child_sizes(rng)],
      "builds": [run_build(folder, **case) for case in (*named_builds(rng), *evaluation_builds(rng))],
    }


def main(output=OUTPUT) -> None:
  Path(output).write_text(render(build_content(), provenance()), encoding="utf-8")


if __name__ == "__main__":
  main(*sys.argv[1:2])
