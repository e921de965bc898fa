# SPDX-License-Identifier: Apache-2.0
"""Our `.bin/.idx` writer, reader and tokenizing against megatron-core's IndexedDatasetBuilder and IndexedDataset."""

import json
from pathlib import Path
import struct

from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
import numpy as np
import pytest
import tokenizers
import torch

INTEGER_DTYPES = [np.uint8, np.int8, np.int16, np.uint16, np.int32, np.int64]
WORDS = ["the", "cat", "sat", "on", "a", "mat", "</s>"]


@pytest.fixture(scope="module")
def indexed(load_module):
  return load_module("_mmap_indexed_dataset")


@pytest.fixture(scope="module")
def tokenizing(load_module):
  return load_module("_mmap_tokenize")


def random_documents(dtype, seed: int, most_sequences: int) -> list[list[np.ndarray]]:
  """Documents of 0 to `most_sequences` sequences of 1 to 40 tokens, anywhere in the dtype's range."""
  rng, limit = np.random.default_rng(seed), np.iinfo(dtype)
  counts = rng.integers(0, most_sequences, 60, endpoint=True)
  return [
      [rng.integers(limit.min, limit.max, rng.integers(1, 40, endpoint=True), dtype, endpoint=True) for _ in range(count)]
      for count in counts
  ]


def as_tensor(tokens) -> torch.Tensor:
  return torch.from_numpy(np.asarray(tokens, np.int64))


def write_with_megatron(prefix: str, documents, dtype) -> None:
  builder = IndexedDatasetBuilder(prefix + ".bin", dtype=dtype)
  for sequences in documents:
    for tokens in sequences:
      builder.add_item(as_tensor(tokens))
    builder.end_document()
  builder.finalize(prefix + ".idx")


def write_with_ours(indexed, prefix: str, documents, dtype) -> None:
  with indexed.IndexedDatasetWriter(prefix, dtype) as writer:
    for sequences in documents:
      for tokens in sequences:
        writer.add_sequence(tokens)
      writer.end_document()


def assert_same_files(first, second) -> None:
  for suffix in (".bin", ".idx"):
    assert Path(f"{first}{suffix}").read_bytes() == Path(f"{second}{suffix}").read_bytes(), suffix


@pytest.mark.parametrize("most_sequences", [1, 4])
@pytest.mark.parametrize("dtype", INTEGER_DTYPES)
def test_writer_makes_megatrons_bytes(indexed, tmp_path, dtype, most_sequences):
  documents = random_documents(dtype, 1234, most_sequences)
  write_with_megatron(f"{tmp_path}/theirs", documents, dtype)
  write_with_ours(indexed, f"{tmp_path}/ours", documents, dtype)
  assert_same_files(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("dtype", INTEGER_DTYPES)
def test_megatron_reads_what_the_writer_wrote(indexed, tmp_path, dtype):
  documents = random_documents(dtype, 7, 4)
  write_with_ours(indexed, f"{tmp_path}/ours", documents, dtype)
  dataset = IndexedDataset(f"{tmp_path}/ours")
  sequences = [tokens for document in documents for tokens in document]
  assert dataset.index.dtype == dtype
  assert len(dataset) == len(sequences)
  np.testing.assert_array_equal(dataset.document_indices, np.cumsum([0, *map(len, documents)]))
  for row, tokens in enumerate(sequences):
    np.testing.assert_array_equal(dataset[row], tokens)


@pytest.mark.parametrize("dtype", INTEGER_DTYPES)
def test_reader_reads_what_megatron_wrote(indexed, tmp_path, dtype):
  documents = random_documents(dtype, 42, 4)
  write_with_megatron(f"{tmp_path}/theirs", documents, dtype)
  ours, theirs = indexed.MMapIndexedDataset(f"{tmp_path}/theirs"), IndexedDataset(f"{tmp_path}/theirs")
  np.testing.assert_array_equal(ours.doc_idx, theirs.document_indices)
  np.testing.assert_array_equal(ours.sizes, theirs.sequence_lengths)
  np.testing.assert_array_equal(ours.pointers, theirs.index.sequence_pointers)
  assert len(ours) == len(theirs)
  for row in range(len(ours)):
    assert ours[row].dtype == dtype
    np.testing.assert_array_equal(ours[row], theirs[row])


@pytest.mark.parametrize("most_sequences", [1, 4])
def test_reader_takes_the_older_count_of_documents(indexed, tmp_path, most_sequences):
  documents = random_documents(np.int32, 3, most_sequences)
  write_with_megatron(f"{tmp_path}/new", documents, np.int32)
  raw = Path(tmp_path / "new.idx").read_bytes()
  (entries,) = struct.unpack_from("<Q", raw, 26)
  assert entries == len(documents) + 1
  Path(tmp_path / "old.idx").write_bytes(raw[:26] + struct.pack("<Q", entries - 1) + raw[34:])
  Path(tmp_path / "old.bin").write_bytes(Path(tmp_path / "new.bin").read_bytes())
  new, old = indexed.MMapIndexedDataset(f"{tmp_path}/new"), indexed.MMapIndexedDataset(f"{tmp_path}/old")
  np.testing.assert_array_equal(old.doc_idx, new.doc_idx)
  for row in range(len(new)):
    np.testing.assert_array_equal(old[row], new[row])


def test_append_makes_megatrons_bytes(indexed, tmp_path):
  for name, seed in (("first", 1), ("second", 2)):
    write_with_megatron(f"{tmp_path}/{name}", random_documents(np.uint16, seed, 3), np.uint16)
  builder = IndexedDatasetBuilder(f"{tmp_path}/theirs.bin", dtype=np.uint16)
  with indexed.IndexedDatasetWriter(f"{tmp_path}/ours", np.uint16) as writer:
    for name in ("first", "second", "first"):
      builder.add_index(f"{tmp_path}/{name}")
      writer.append(f"{tmp_path}/{name}")
  builder.finalize(f"{tmp_path}/theirs.idx")
  assert_same_files(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize("vocab_size", [1, 32000, 65499, 65500, 65536, 157184])
def test_optimal_dtype_is_megatrons(indexed, vocab_size):
  assert indexed.optimal_dtype(vocab_size) == DType.optimal_dtype(vocab_size)


def word_tokenizer(folder: Path) -> Path:
  model = tokenizers.models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="a")
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  tokenizer.save(str(folder / "tokenizer.json"))
  return folder / "tokenizer.json"


@pytest.mark.parametrize("append_eod", [False, True])
def test_tokenized_jsonl_is_what_megatrons_preprocessing_writes(tokenizing, tmp_path, append_eod):
  rng = np.random.default_rng(5)
  texts = [" ".join(rng.choice(WORDS[:-1], rng.integers(0, 20))) for _ in range(200)]
  source = tmp_path / "text.jsonl"
  source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
  path = word_tokenizer(tmp_path)
  model = tokenizers.Tokenizer.from_file(str(path))
  eod = model.token_to_id("</s>")

  # The loop of Megatron-LM's tools/preprocess_data.py: no EOD and no sequence where there are no tokens.
  dtype = DType.optimal_dtype(model.get_vocab_size())
  builder = IndexedDatasetBuilder(f"{tmp_path}/theirs.bin", dtype=dtype)
  for text in texts:
    ids = model.encode(text, add_special_tokens=False).ids
    lengths = [len(ids)] if ids else []
    if ids and append_eod:
      ids.append(eod)
      lengths[-1] += 1
    builder.add_document(ids, lengths)
  builder.finalize(f"{tmp_path}/theirs.idx")

  tokenizer = tokenizing.load_tokenizer(str(path))
  recipe = tokenizing.Recipe(str(path), "auto", "text", False, eod if append_eod else None, np.dtype(dtype).name)
  tokenizing.tokenize_files([str(source)], f"{tmp_path}/ours", tokenizer, recipe)
  assert_same_files(tmp_path / "ours", tmp_path / "theirs")
