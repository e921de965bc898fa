# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/megatron_gpt.json: what megatron-core's GPTDataset makes of small datasets.

Run in the reference environment: `python tests/reference/write_golden.py [output]`. The output depends on nothing but
the versions that its `provenance` names; `indices_reference.py` checks that the repository's file is what this writes.
Nothing of this repository takes part: files, indices, samples and fields are all megatron-core's.
"""

import functools
import itertools
import json
from pathlib import Path
import sys
import tempfile

import megatron.core
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, _get_ltor_masks_and_position_ids
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
import numpy as np
import torch

OUTPUT = Path(__file__).resolve().parents[1] / "golden" / "megatron_gpt.json"
COMMAND = "python tests/reference/write_golden.py"
SEED = 20240607
EOD = 99
MOST_SAMPLES = 24  # kept of each case
FIELD_NAMES = ("first_visible", "loss_mask", "position_ids")
SPLITS = [
  ("0.7,0.2,0.1", 15),
  ("50,50,0", 5),
  ("99,1", 50),
  ("969,30,1", 100),
  ("98,1,1", 50),
  ("1", 7),
  ("0,1", 7),
  ("0.1,0.2,0.7", 35),
  ("1,1,1", 100),
  ("3,3,3", 11),
  ("949,50,1", 1000),
  (".5,.25,.25", 10),
  ("0.3,0.6,0.1", 5),
  ("0.45,0.45,0.1", 10),
]


class Tokenizer:
  """The little that GPTDataset asks of a tokenizer."""

  vocab_size, eod, pad, unique_identifiers = 32000, EOD, -1, {"class": "none"}


class RangesOnly(GPTDataset):
  """A GPTDataset that keeps the sequences it was given and builds no index, so that an empty part does no harm."""

  def _build_document_sample_shuffle_indices(self):
    return None, None, None

  def __len__(self):
    return 0


def write_dataset(prefix, sequences, documents, dtype) -> None:
  """Writes a dataset with megatron-core.

  Args:
    sequences: tokens of each sequence.
    documents: first sequence of each document, then the number of sequences.
  """
  builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.dtype(dtype).type)
  for begin, end in itertools.pairwise(documents):
    for tokens in sequences[begin:end]:
      builder.add_item(torch.from_numpy(np.asarray(tokens, np.int64)))
    builder.end_document()
  builder.finalize(f"{prefix}.idx")


def build_parts(prefix, cls, sizes, seq_length, seed, split, extra=True, reset=False, mask_loss=False):
  """Returns the train, valid and test dataset (or None) that megatron-core's builder makes of one prefix.

  Args:
    cls: GPTDataset or a subclass.
    sizes: samples asked for in each part, or None for one epoch.
  """
  config = GPTDatasetConfig(
    random_seed=seed,
    sequence_length=seq_length,
    blend=([str(prefix)], None),
    split=split,
    path_to_cache=f"{prefix}-cache",
    tokenizer=Tokenizer(),
    reset_position_ids=reset,
    reset_attention_mask=reset,
    eod_mask_loss=mask_loss,
    add_extra_token_to_sequence=extra,
  )
  return BlendedMegatronDatasetBuilder(cls, sizes, lambda: True, config).build()


def split_ranges(prefix, split) -> list[list[int]]:
  """Returns [begin, end) of each part of a split; [0, 0] where megatron-core makes no dataset."""
  parts = build_parts(prefix, RangesOnly, [1, 1, 1], 4, 0, split)
  rows = [[] if part is None else part.indices.tolist() for part in parts]
  return [[part[0], part[-1] + 1] if part else [0, 0] for part in rows]


def build_gpt_dataset(prefix, seq_length, seed, num_samples, begin, end, **settings) -> GPTDataset:
  """Returns megatron-core's GPTDataset over sequences [begin, end), with `num_samples` None for one epoch."""
  settings = {"extra": True, "reset": False, "mask_loss": False} | settings
  (whole, _, _) = build_parts(prefix, RangesOnly, [1, None, None], seq_length, seed, "1", **settings)
  rows = np.arange(begin, end, dtype=np.int32)
  return GPTDataset(whole.dataset, str(prefix), rows, num_samples, whole.index_split, whole.config)


def sample_tokens(dataset, position) -> list[int]:
  """Returns the L + 1 tokens of a sample (L without the extra token)."""
  sample = dataset[position]
  last = sample["labels"][-1:] if dataset.config.add_extra_token_to_sequence else sample["labels"][:0]
  return torch.cat([sample["tokens"], last]).tolist()


def fields_of(attention_mask, loss_mask, position_ids) -> dict[str, list[int]]:
  """Writes megatron-core's fields in short; `first_visible` is the first position that each position sees.

  What a position sees must be all from there to itself, or the short form would not say it.
  """
  visible = ~attention_mask[0].numpy()
  first = visible.argmax(axis=1)
  columns = np.arange(visible.shape[1])
  np.testing.assert_array_equal(visible, (columns >= first[:, None]) & (columns <= columns[:, None]))
  values = (first, loss_mask, position_ids)
  return {name: [int(value) for value in column] for name, column in zip(FIELD_NAMES, values, strict=True)}


def numbered(lengths) -> list[list[int]]:
  """Tokens 100 * sequence + position."""
  return [[100 * row + position for position in range(length)] for row, length in enumerate(lengths)]


def named_cases():
  """Cases D1 to D6 of the list of cases, as keyword arguments of `run_case`."""
  lengths = [5, 7, 3, 9, 6, 4]
  for samples in (8, 9, 13, 14, 20):
    yield {"name": f"d1-{samples}-samples", "lengths": lengths, "seed": 42, "num_samples": samples}
  yield {"name": "d1-part", "lengths": lengths, "seed": 42, "num_samples": 4, "split": "50,50", "split_index": 1}
  yield {"name": "d1-short", "lengths": [3, 2, 4], "seed": 42, "num_samples": 2, "seq_length": 16}
  yield {"name": "d2", "lengths": [5, 7, 3, 9], "seed": 1234, "num_samples": 5}
  yield {"name": "d3", "lengths": [3, 0, 4, 0, 0, 6], "seed": 1234, "num_samples": 3}
  for number, documents in enumerate([[0, 1, 2], [0, 1, 1, 2], [0, 1, 2, 2], [0, 0, 1, 2]]):
    yield {"name": f"d4-{number}", "lengths": [3, 4], "seed": 1234, "num_samples": 3, "documents": documents}
  yield {"name": "d5", "lengths": [2, 3, 4, 6], "seed": 7, "num_samples": 3, "documents": [0, 2, 4]}
  for part in range(3):
    split = {"split": "0.7,0.2,0.1", "split_index": part}
    yield {"name": f"d6-part-{part}", "lengths": [5] * 15, "seed": 42, "num_samples": 6, **split}


def random_cases(rng):
  """Datasets with EOD at the end of most sequences, some of them empty, over one to five epochs."""
  splits = [("", 0), ("", 0), ("99,1", 0), ("8,2", 1), ("6,2,2", 2)]
  for number in range(24):
    seq_length = int(rng.integers(2, 17))
    lengths = rng.integers(0, [seq_length, 4 * seq_length, 30][number % 3], rng.integers(10, 24), endpoint=True)
    lengths[rng.random(len(lengths)) < 0.15] = 0
    lengths[[0, -1]] += 20  # the last part of a split is never too short
    split, part = splits[number % len(splits)]
    tokens = [rng.integers(0, 98, length).tolist() for length in lengths]
    for sequence in tokens:
      if sequence and rng.random() < 0.9:
        sequence[-1] = EOD
    epochs = 1 + number % 5
    share = {0: 1.0, 1: 0.2}.get(part, 0.2)
    most = max(int(lengths.sum() * share * (epochs - 1 + (0.3, 0.95)[number // 5 % 2]) / seq_length), 1)
    yield {
      "name": f"random-{number}",
      "lengths": lengths.tolist(),
      "tokens": tokens,
      "dtype": ("uint16", "int32", "uint8", "int64")[number % 4],
      "seq_length": seq_length,
      "seed": int(rng.integers(2**31)),
      "num_samples": most if number % 6 else None,
      "split": split,
      "split_index": part,
      "reset": bool(number & 1),
      "mask_loss": bool(number & 2),
    }


def run_case(
  folder,
  name,
  lengths,
  seed,
  num_samples,
  seq_length=4,
  tokens=None,
  documents=None,
  dtype="uint16",
  split="",
  split_index=0,
  reset=True,
  mask_loss=False,
):
  """Returns the settings of a case with megatron-core's indices, samples and fields (of the first three samples)."""
  tokens = tokens or numbered(lengths)
  documents = documents or list(range(len(lengths) + 1))
  prefix = Path(folder) / name
  write_dataset(prefix, tokens, documents, dtype)
  begin, end = split_ranges(prefix, split)[split_index] if split else (0, len(lengths))
  assert sum(lengths[begin:end]), f"{name} has no tokens; megatron-core would add epochs for ever"
  dataset = build_gpt_dataset(prefix, seq_length, seed, num_samples, begin, end, reset=reset, mask_loss=mask_loss)
  arrays = {key: getattr(dataset, key) for key in ("document_index", "sample_index", "shuffle_index")}
  kept = range(min(len(dataset), MOST_SAMPLES))
  fields = [dataset[position] for position in range(min(len(dataset), 3))]
  return {
    "name": name,
    "lengths": lengths,
    "documents": documents,
    "dtype": dtype,
    "tokens": [token for sequence in tokens for token in sequence],
    "seq_length": seq_length,
    "seed": seed,
    "num_samples": num_samples,
    "split": split,
    "split_index": split_index,
    "reset": reset,
    "mask_loss": mask_loss,
    "dtypes": [array.dtype.str for array in arrays.values()],
    **{key: array.tolist() for key, array in arrays.items()},
    "samples": [sample_tokens(dataset, position) for position in kept],
    "fields": [fields_of(row["attention_mask"], row["loss_mask"], row["position_ids"]) for row in fields],
  }


def field_rows(rng):
  """Input tokens of D9, and random ones with EOD at any rate."""
  yield from ([10, 11, 99, 20], [99, 99, 5, 6], [5, 6, 7, 99], [99, 5, 99, 6, 99], [1, 2, 3], [99] * 5, [99], [7])
  for rate in (0.02, 0.1, 0.3, 0.6, 0.9) * 4:
    length = int(rng.integers(1, 33))
    yield np.where(rng.random(length) < rate, EOD, rng.integers(0, 98, length)).tolist()


def run_fields(row) -> dict:
  """Returns megatron-core's fields of one row of input tokens, for both settings of both options."""
  results = {"inputs": row}
  for reset, mask_loss in itertools.product((False, True), repeat=2):
    fields = _get_ltor_masks_and_position_ids(torch.tensor(row), EOD, reset, reset, mask_loss, True)
    results[f"reset={int(reset)},mask_loss={int(mask_loss)}"] = fields_of(*fields)
  return results


def run_split(folder, split, sequences) -> dict:
  prefix = Path(folder) / f"split-{sequences}"
  write_dataset(prefix, [[1]] * sequences, range(sequences + 1), np.uint8)
  return {"split": split, "sequences": sequences, "ranges": split_ranges(prefix, split)}


@functools.lru_cache(1)
def provenance() -> dict[str, str | int]:
  return {"megatron-core": megatron.core.__version__, "numpy": np.__version__, "seed": SEED, "command": COMMAND}


def build_content() -> dict[str, list]:
  """Returns the sections of the golden file."""
  with tempfile.TemporaryDirectory() as folder:
    rng = np.random.default_rng(SEED)
    return {
      "cases": [run_case(folder, **case) for case in (*named_cases(), *random_cases(rng))],
      "fields": [run_fields(row) for row in field_rows(rng)],
      "splits": [run_split(folder, split, sequences) for split, sequences in SPLITS],
    }


def render(content, source) -> str:
  """Writes the golden file's text, one entry a line."""
  lines = [f'{{"provenance": {json.dumps(source)}']
  for section, entries in content.items():
    lines.append(f',"{section}": [')
    lines.append(",\n".join(json.dumps(entry, separators=(",", ":")) for entry in entries))
    lines.append("]")
  return "\n".join([*lines, "}\n"])


def main(output=OUTPUT) -> None:
  Path(output).write_text(render(build_content(), provenance()), encoding="utf-8")


if __name__ == "__main__":
  main(*sys.argv[1:2])
