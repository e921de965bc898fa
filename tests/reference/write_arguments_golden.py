# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/megatron_arguments.json: the samples that megatron-core reads for lists of arguments.

Run in the reference environment: `python tests/reference/write_arguments_golden.py [output]`. The arguments become
datasets by megatron-core's `get_blend_from_list` and `BlendedMegatronDatasetBuilder`, with the numbers of samples that
Megatron-LM's training loop asks for. Nothing of this repository's code takes part.
"""

import argparse
import json
from pathlib import Path
import shlex
import sys
import tempfile

import megatron.core
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.num_microbatches_calculator import RampupBatchsizeNumMicroBatchesCalculator
import numpy as np
import torch
from write_golden import render

OUTPUT = Path(__file__).resolve().parents[1] / "golden" / "megatron_arguments.json"
COMMAND = "python tests/reference/write_arguments_golden.py"
SEED = 20240912
KEPT = 40  # samples of each part
DATASETS = {"a": (23, 30), "b": (31, 20), "c": (40, 25), "d": (700, 6)}  # sequences, longest


class Tokenizer:
  """The little that GPTDataset asks of a tokenizer."""

  vocab_size, eod, pad, unique_identifiers = 65536, 0, -1, {"class": "none"}


def lengths_of(name) -> list[int]:
  sequences, longest = DATASETS[name]
  return np.random.default_rng(ord(name)).integers(1, longest, sequences, endpoint=True).tolist()


def write_dataset(folder, name) -> None:
  """Writes a dataset of running token numbers; each dataset begins with another number."""
  first = 10_000 * "abcd".index(name)
  builder = IndexedDatasetBuilder(f"{folder}/{name}.bin", dtype=np.uint16)
  for length in lengths_of(name):
    builder.add_item(torch.arange(first, first + length))
    builder.end_document()
    first += length
  builder.finalize(f"{folder}/{name}.idx")


def parser() -> argparse.ArgumentParser:
  """The arguments of Megatron-LM that concern the data, with its defaults."""
  result = argparse.ArgumentParser(allow_abbrev=False)
  for name in ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path"):
    result.add_argument(name, nargs="*")
  for name in ("--data-args-path", "--per-split-data-args-path", "--split"):
    result.add_argument(name)
  for name, default in (
    ("--seq-length", None),
    ("--seed", 1234),
    ("--train-samples", None),
    ("--train-iters", None),
    ("--global-batch-size", None),
    ("--eval-interval", 1000),
    ("--eval-iters", 100),
  ):
    result.add_argument(name, type=int, default=default)
  result.add_argument("--mid-level-dataset-surplus", type=float, default=0.005)
  result.add_argument("--full-validation", action="store_true")
  result.add_argument("--rampup-batch-size", nargs=3, type=int)
  return result


def iterations(args) -> int:
  if args.train_iters:
    return args.train_iters
  consumed = count = 0
  if args.rampup_batch_size:
    first, increment, over = args.rampup_batch_size
    ramp = RampupBatchsizeNumMicroBatchesCalculator(args.global_batch_size, 1, 1, False, 1, first, increment, over)
    while consumed <= over and consumed <= args.train_samples:
      ramp.update(consumed, False)
      consumed += ramp.current_global_batch_size
      count += 1
  return count + max(args.train_samples - consumed, 0) // args.global_batch_size


def samples_asked(args) -> list[int | None]:
  """What Megatron-LM's training loop asks for in train, valid and test."""
  evaluation = (iterations(args) // args.eval_interval + 1) * args.eval_iters * args.global_batch_size
  train = args.train_samples or args.train_iters * args.global_batch_size
  return [train, None if args.full_validation else evaluation, args.eval_iters * args.global_batch_size]


def blends(args):
  """Returns the blend, and the blends of the parts; one of them None."""
  if args.data_args_path:
    return get_blend_from_list(Path(args.data_args_path).read_text().split()), None
  if args.data_path:
    return get_blend_from_list(args.data_path), None
  lists = [args.train_data_path, args.valid_data_path, args.test_data_path]
  if args.per_split_data_args_path:
    content = json.loads(Path(args.per_split_data_args_path).read_text())
    lists = [content[part] for part in ("train", "valid", "test")]
    lists = [words.split() if isinstance(words, str) else words for words in lists]
  return None, [get_blend_from_list(words) for words in lists]


def build(args):
  """Returns megatron-core's datasets of train, valid and test for parsed arguments."""
  blend, per_split = blends(args)
  config = GPTDatasetConfig(
    random_seed=args.seed,
    sequence_length=args.seq_length,
    blend=blend,
    blend_per_split=per_split,
    split=args.split or ("969, 30, 1" if args.data_path else None),
    mid_level_dataset_surplus=args.mid_level_dataset_surplus,
    full_validation=args.full_validation,
    tokenizer=Tokenizer(),
    reset_position_ids=False,
    reset_attention_mask=False,
    eod_mask_loss=False,
  )
  return BlendedMegatronDatasetBuilder(GPTDataset, samples_asked(args), lambda: True, config).build()


def tokens_of(dataset, count) -> list[list[int]]:
  """Returns the L + 1 tokens of the first samples."""
  rows = (dataset[position] for position in range(min(count, len(dataset))))
  return [torch.cat([row["tokens"], row["labels"][-1:]]).tolist() for row in rows]


def run_case(words, files=None) -> dict:
  """Returns a list of arguments with the first samples of train and valid (None where there are none).

  Args:
    words: arguments; "{data}" stands for the folder of the datasets and files.
    files: text by name, to be written to that folder.
  """
  with tempfile.TemporaryDirectory() as folder:
    for name in DATASETS:
      write_dataset(folder, name)
    for name, text in (files or {}).items():
      Path(folder, name).write_text(text.replace("{data}", folder))
    args = parser().parse_args([word.replace("{data}", folder) for word in words])
    parts = zip(build(args), samples_asked(args), strict=True)  # a blend may be longer than what is read of it
    kept = [None if part is None else tokens_of(part, min(KEPT, asked or KEPT)) for part, asked in parts]
  return {"arguments": words, "files": files or {}, "train": kept[0], "valid": kept[1]}


def named_cases():
  """One list of arguments for each form that the data may be named in."""
  run = "--seq-length 8 --global-batch-size 4 --eval-interval 5 --eval-iters 2"
  for arguments, files in (
    (f"--data-path {{data}}/d --train-iters 60 {run}", {}),
    (f"--data-path {{data}}/c --split 8,1,1 --train-iters 18 {run} --seed 7", {}),
    (f"--data-path 1.0 {{data}}/c --split 8,1,1 --train-samples 72 {run}", {}),
    (f"--data-path 3 {{data}}/c --split 8,1,1 --train-samples 400 {run} --mid-level-dataset-surplus 0.05", {}),
    (f"--data-path 0.7 {{data}}/c 0.3 {{data}}/d --split 8,1,1 --train-iters 40 {run}", {}),
    (f"--data-path 30 {{data}}/a 10 {{data}}/b 60 {{data}}/c --split 8,1,1 --train-iters 9 {run}", {}),
    (f"--data-path {{data}}/b {{data}}/c --split 8,1,1 --train-iters 4 {run}", {}),
    (f"--data-path {{data}}/a {{data}}/b {{data}}/c --split 8/1/1 --train-samples 30 {run} --full-validation", {}),
    (f"--train-data-path {{data}}/a --valid-data-path {{data}}/b --train-iters 50 {run}", {}),
    (f"--train-data-path 1.0 {{data}}/a --valid-data-path 1 {{data}}/b --train-iters 50 {run}", {}),
    (f"--train-data-path 2 {{data}}/a 1 {{data}}/c --valid-data-path {{data}}/a {{data}}/b --train-iters 20 {run}", {}),
    (f"--train-data-path {{data}}/a {{data}}/c --train-iters 8 {run}", {}),
    (f"--train-data-path {{data}}/a --valid-data-path {{data}}/b --train-iters 9 --full-validation {run}", {}),
    (f"--data-args-path {{data}}/list --split 8,1,1 --train-iters 15 {run}", {"list": "0.2 {data}/d\n0.8\t{data}/c\n"}),
    (
      f"--per-split-data-args-path {{data}}/parts.json --train-iters 15 {run}",
      {"parts.json": '{"train": ["0.5", "{data}/a", "0.5", "{data}/b"], "valid": "{data}/c", "test": null}'},
    ),
    (f"--data-path {{data}}/d --train-samples 200 --rampup-batch-size 2 1 30 {run}", {}),
  ):
    yield shlex.split(arguments), files


def random_cases(rng):
  for _ in range(10):
    names = rng.permutation(list("abcd"))[: rng.integers(1, 5)].tolist()
    weighted = bool(rng.integers(2)) or len(names) == 1
    words = ["--data-path"]
    for name in names:
      words += [f"{rng.random() * 10:.3f}"] * weighted + [f"{{data}}/{name}"]
    words += ["--split", f"{rng.integers(5, 9)},{rng.integers(1, 4)},1"]
    words += ["--seq-length", str(rng.integers(4, 12)), "--seed", str(rng.integers(2**31))]
    words += ["--global-batch-size", str(batch := int(rng.integers(1, 5)))]
    words += ["--train-iters", str(rng.integers(1, 40) if weighted else rng.integers(1, 40 // batch))]
    words += ["--eval-interval", str(rng.integers(1, 20)), "--eval-iters", "1"]
    yield words, {}


def build_content() -> dict[str, list]:
  cases = [*named_cases(), *random_cases(np.random.default_rng(SEED))]
  return {"lengths": [{name: lengths_of(name)} for name in DATASETS], "cases": [run_case(*case) for case in cases]}


def provenance() -> dict[str, str | int]:
  return {"megatron-core": megatron.core.__version__, "numpy": np.__version__, "seed": SEED, "command": COMMAND}


def main(output=OUTPUT) -> None:
  Path(output).write_text(render(build_content(), provenance()), encoding="utf-8")


if __name__ == "__main__":
  main(*sys.argv[1:2])
