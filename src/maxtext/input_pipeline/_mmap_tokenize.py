# SPDX-License-Identifier: Apache-2.0
"""Text and JSONL files to a Megatron dataset, as Megatron-LM's `tools/preprocess_data.py` makes it.

A document is a line of a text file, a whole text file, or a line of a JSONL file. Its tokens, and the EOD id after
them where asked for, become one sequence. A document that yields no tokens keeps its place with no sequence and no
EOD. The tokenizer adds no BOS or EOS of its own. Splitting documents into sentences (Megatron's
`--split-sentences`) is not supported.

The tokenizers' libraries are imported when a tokenizer is loaded, so importing this module costs NumPy only.
"""

from __future__ import annotations

import codecs
import collections
from collections.abc import Callable, Generator, Iterable, Iterator
import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import functools
import itertools
import json
import multiprocessing
import os
import signal
import threading
import time
from typing import Any, NamedTuple

import numpy as np

from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter, MMapError, optimal_dtype

BATCH_BYTES = 1 << 19
BATCH_DOCUMENTS = 4096
JSON_SUFFIXES = (".jsonl", ".json")
DEFAULT_SUFFIXES = (".txt", *JSON_SUFFIXES)


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A loaded tokenizer.

  Attributes:
    vocab_size: number of ids, added tokens included.
    eos_id: its own end-of-sequence id, or None.
    encode: texts to one list of ids per text, without BOS, EOS, padding or truncation.
    decode: ids of the vocabulary to the text of each; half a character is "\\ufffd".
  """

  vocab_size: int
  eos_id: int | None
  encode: Callable[[list[str]], list[list[int]]]
  decode: Callable[[list[int]], list[str]]


class RawDocument(NamedTuple):
  """Undecoded bytes of one document, and where they stand: `line` counts from 1."""

  path: str
  line: int
  data: bytes
  is_json: bool


class Block(NamedTuple):
  """Tokens of consecutive documents: `tokens` [sum(lengths)] in the dataset's dtype, `lengths` int32[documents]."""

  tokens: np.ndarray
  lengths: np.ndarray
  source_bytes: int


@dataclasses.dataclass(frozen=True)
class Recipe:
  """All that a worker needs to turn documents into tokens.

  Attributes:
    tokenizer_path: a SentencePiece model, a `tokenizer.json`, or a folder that transformers can load.
    tokenizer_type: "auto", "sentencepiece" or "huggingface".
    json_key: key of the text in a JSONL line.
    whole_files: a text file is one document, not one a line.
    eod_id: id to end each document with that has tokens, or None.
    dtype: name of the dataset's dtype.
  """

  tokenizer_path: str
  tokenizer_type: str
  json_key: str
  whole_files: bool
  eod_id: int | None
  dtype: str


@dataclasses.dataclass(frozen=True)
class Summary:
  """What a run did; `bytes_read` is text, `bytes_written` is `.bin` and `.idx` together, `seconds` is wall time."""

  documents: int
  sequences: int
  tokens: int
  empty_documents: int
  dtype: str
  vocab_size: int
  eod_id: int | None
  input_files: int
  bytes_read: int
  bytes_written: int
  seconds: float
  tokens_per_second: float
  files: list[str]


def load_tokenizer(path: str, kind: str = "auto") -> Tokenizer:
  """Loads a tokenizer from local files.

  Args:
    path: a SentencePiece model, a `tokenizer.json`, or a folder that transformers can load.
    kind: "sentencepiece", "huggingface", or "auto", which takes a folder or a JSON file for Hugging Face and any other
      file for SentencePiece.

  Raises:
    MMapError: if there is nothing at `path`, or the library refuses it or is not installed.
  """
  # One process is one core: Rust threads in every worker would only compete.
  os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
  os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
  if not os.path.exists(path):
    raise MMapError(f"{path} does not exist; give the path of a tokenizer's file or folder.")
  if kind == "auto":
    kind = "huggingface" if os.path.isdir(path) or _starts_as_json(path) else "sentencepiece"
  load = {"sentencepiece": _load_sentencepiece, "huggingface": _load_huggingface}[kind]
  try:
    return load(path)
  except ImportError as error:
    raise MMapError(f"{path} needs the Python package {error.name}; install it with pip.") from error
  except Exception as error:
    raise MMapError(f"{path} cannot be loaded as a {kind} tokenizer: {' '.join(str(error).split())[:300]}") from error


def _starts_as_json(path: str) -> bool:
  with open(path, "rb") as file:
    return file.read(64).lstrip().startswith(b"{")


def _load_sentencepiece(path: str) -> Tokenizer:
  import sentencepiece

  model = sentencepiece.SentencePieceProcessor(model_file=path)
  encode = functools.partial(model.encode, out_type=int, add_bos=False, add_eos=False, num_threads=1)
  eos = model.eos_id() if model.eos_id() >= 0 else None

  def decode(ids: list[int]) -> list[str]:
    return [piece.replace("\u2581", " ") for piece in model.id_to_piece(ids)]

  return Tokenizer(model.vocab_size(), eos, encode, decode)


def _load_huggingface(path: str) -> Tokenizer:
  if os.path.isfile(path):
    return _load_tokenizer_json(path)
  if os.path.isfile(os.path.join(path, "tokenizer.json")) and not _has_config(path):
    return _load_tokenizer_json(os.path.join(path, "tokenizer.json"))
  from transformers import AutoTokenizer

  model: Any = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
  call = functools.partial(
      model, add_special_tokens=False, padding=False, truncation=False, return_attention_mask=False, verbose=False
  )
  decode = functools.partial(_decode_each, lambda ids: model.decode(ids, clean_up_tokenization_spaces=False))
  return Tokenizer(len(model), model.eos_token_id, lambda texts: call(texts)["input_ids"], decode)


def _has_config(folder: str) -> bool:
  return any(os.path.isfile(os.path.join(folder, name)) for name in ("tokenizer_config.json", "config.json"))


def _load_tokenizer_json(path: str) -> Tokenizer:
  import tokenizers

  model = tokenizers.Tokenizer.from_file(path)
  model.no_padding()
  model.no_truncation()

  def encode(texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in model.encode_batch_fast(texts, add_special_tokens=False)]

  eos = _configured_eos(os.path.join(os.path.dirname(path), "tokenizer_config.json"))
  decode = functools.partial(_decode_each, functools.partial(model.decode, skip_special_tokens=False))
  return Tokenizer(model.get_vocab_size(), None if eos is None else model.token_to_id(eos), encode, decode)


def _decode_each(decode: Callable[[list[int]], str], ids: list[int]) -> list[str]:
  return [decode([token]) for token in ids]


def _configured_eos(path: str) -> str | None:
  """Returns the EOS token that a `tokenizer_config.json` names: a `tokenizer.json` itself names none."""
  if not os.path.isfile(path):
    return None
  with open(path, encoding="utf-8") as file:
    eos = json.load(file).get("eos_token")
  return eos.get("content") if isinstance(eos, dict) else eos


def choose_eod(tokenizer: Tokenizer, append_eod: bool, eod_id: int | None, path: str) -> int | None:
  """Returns the id that ends a document, or None without `append_eod`; `path` names the tokenizer in errors."""
  if not append_eod:
    if eod_id is not None:
      raise MMapError(f"--eod-id {eod_id} has no effect without --append-eod; give both or neither.")
    return None
  eod = tokenizer.eos_id if eod_id is None else eod_id
  if eod is None:
    raise MMapError(f"{path} names no EOS token to append; give the id with --eod-id.")
  if eod < 0:
    raise MMapError(f"--eod-id is {eod}; expected 0 or more.")
  return eod


def choose_dtype(name: str, vocab_size: int, eod_id: int | None) -> np.dtype:
  """Returns the dtype called `name`, or Megatron's choice for "auto"; a dtype too small for the ids is an MMapError."""
  ids = max(vocab_size, 0 if eod_id is None else eod_id + 1)
  dtype = optimal_dtype(ids) if name == "auto" else np.dtype(name)
  most = np.iinfo(dtype).max
  if ids - 1 > most:
    advice = "use --dtype int32" if dtype != np.int32 else "the format's tokens are int32"
    raise MMapError(f"ids go up to {ids - 1}, and {dtype.name} holds at most {most}; {advice}.")
  return dtype


def find_files(inputs: Iterable[str], suffixes: Iterable[str], exclude: Iterable[str] = ()) -> list[str]:
  """Lists the files to read: files as given, folders by the paths beneath them in sorted order.

  Args:
    inputs: files and folders.
    suffixes: endings of the file names that count beneath a folder.
    exclude: patterns (`fnmatch`) of file and folder names to leave out beneath a folder.

  Raises:
    MMapError: for an input that does not exist, or a folder without such a file.
  """
  suffixes, exclude = tuple(suffixes), tuple(exclude)
  files = []
  for path in inputs:
    if os.path.isdir(path):
      found = sorted(_walk(path, suffixes, exclude))
      if not found:
        raise MMapError(f"{path} has no file that ends in {', '.join(suffixes)}; see --suffix.")
      files.extend(found)
    elif os.path.exists(path):
      files.append(path)
    else:
      raise MMapError(f"{path} does not exist; --input takes files and folders.")
  return files


def _walk(root: str, suffixes: tuple[str, ...], exclude: tuple[str, ...]) -> Iterator[str]:
  def kept(name):
    return not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)

  def refuse(error):
    raise error

  for folder, folders, names in os.walk(root, onerror=refuse):
    folders[:] = filter(kept, folders)
    yield from (os.path.join(folder, name) for name in names if name.endswith(suffixes) and kept(name))


def read_documents(files: Iterable[str], file_format: str = "auto", whole_files: bool = False) -> Iterator[RawDocument]:
  """Reads documents one after another, holding one at a time.

  Args:
    files: paths.
    file_format: "text", "jsonl", or "auto": JSONL if the name ends in `.jsonl` or `.json`.
    whole_files: a text file is one document, not one a line.
  """
  for path in files:
    is_json = path.endswith(JSON_SUFFIXES) if file_format == "auto" else file_format == "jsonl"
    with open(path, "rb") as file:
      lines = [file.read()] if whole_files and not is_json else file
      for number, data in enumerate(lines, 1):
        yield RawDocument(path, number, data.removeprefix(codecs.BOM_UTF8) if number == 1 else data, is_json)


def batched(documents: Iterable[RawDocument], batch_bytes: int = BATCH_BYTES) -> Iterator[list[RawDocument]]:
  """Groups documents into lists that end once they hold `batch_bytes` of text or BATCH_DOCUMENTS documents."""
  batch, size = [], 0
  for document in documents:
    batch.append(document)
    size += len(document.data)
    if size >= batch_bytes or len(batch) >= BATCH_DOCUMENTS:
      yield batch
      batch, size = [], 0
  if batch:
    yield batch


def decode(document: RawDocument, recipe: Recipe) -> str:
  """Returns the text of a document, of a line without its line end.

  Raises:
    MMapError: for bytes that are not UTF-8 and JSONL lines that are not an object with a text under
      `recipe.json_key`; names the file and the line.
  """
  try:
    text = document.data.decode("utf-8")
  except UnicodeDecodeError as error:
    line = document.line + document.data.count(b"\n", 0, error.start)
    byte = document.data[error.start]
    raise MMapError(f"{document.path}, line {line}: byte 0x{byte:02x} is not UTF-8; convert the file first.") from error
  if document.is_json:
    return _json_text(text, f"{document.path}, line {document.line}", recipe.json_key) if text.strip() else ""
  return text if recipe.whole_files else text.removesuffix("\n").removesuffix("\r")


def _json_text(line: str, where: str, key: str) -> str:
  try:
    value = json.loads(line)
  except (ValueError, RecursionError) as error:
    raise MMapError(f"{where}: not valid JSON ({error}); expected one object a line.") from error
  if not isinstance(value, dict):
    raise MMapError(f"{where}: found a JSON {type(value).__name__}; expected one object a line.")
  if key not in value:
    raise MMapError(f"{where}: no key {key!r} among {', '.join(map(repr, value)) or 'none'}; see --json-key.")
  text = value[key]
  if not isinstance(text, str):
    raise MMapError(f"{where}: {key!r} holds a {type(text).__name__}; expected one string (sentences are not split).")
  try:
    text.encode("utf-8")
  except UnicodeEncodeError as error:
    raise MMapError(f"{where}: {key!r} holds half of a surrogate pair, which is not text; mend the line.") from error
  return text


def encode_batch(tokenizer: Tokenizer, recipe: Recipe, batch: list[RawDocument]) -> Block:
  """Tokenizes documents, in order, each ended by `recipe.eod_id` if it has tokens."""
  ids = tokenizer.encode([decode(document, recipe) for document in batch])
  if recipe.eod_id is not None:
    ids = [[*row, recipe.eod_id] if row else row for row in ids]
  lengths = np.fromiter(map(len, ids), np.int32, len(ids))
  tokens = np.fromiter(itertools.chain.from_iterable(ids), np.int64, int(lengths.sum(dtype=np.int64)))
  limit = np.iinfo(recipe.dtype)
  if tokens.size and (tokens.max() > limit.max or tokens.min() < limit.min):
    raise MMapError(f"{batch[0].path}: the tokenizer gave id {tokens.max()}, which does not fit {recipe.dtype}.")
  return Block(tokens.astype(recipe.dtype), lengths, sum(len(document.data) for document in batch))


Encoder = Callable[[Iterable[list[RawDocument]]], Iterator[Block]]


@contextlib.contextmanager
def encoder(tokenizer: Tokenizer, recipe: Recipe, workers: int) -> Generator[Encoder]:
  """Gives a function from batches to their blocks, in the same order, by `workers` processes.

  One worker is this process. With more, at most 2 * `workers` batches are in flight, so memory does not grow with
  the input. Processes are spawned: a fork would copy the tokenizers' and the progress bar's threads half.

  Raises:
    MMapError: the first one in the order of the input; also if a worker dies.
  """
  if workers == 1:
    yield functools.partial(map, functools.partial(encode_batch, tokenizer, recipe))
    return
  pool = concurrent.futures.ProcessPoolExecutor(
      workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(recipe,)
  )
  try:
    yield functools.partial(_encode_in_order, pool, 2 * workers)
  except concurrent.futures.process.BrokenProcessPool as error:
    raise MMapError("a worker process died, most often for want of memory; try fewer --workers.") from error
  finally:
    pool.shutdown(cancel_futures=True)


def _encode_in_order(pool, ahead: int, batches: Iterable[list[RawDocument]]) -> Iterator[Block]:
  pending = collections.deque()
  for batch in batches:
    pending.append(pool.submit(_encode_in_worker, batch))
    if len(pending) >= ahead:
      yield pending.popleft().result()
  while pending:
    yield pending.popleft().result()


_encode_in_worker_process: Callable[[list[RawDocument]], Block]


def _start_worker(recipe: Recipe) -> None:
  global _encode_in_worker_process
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent tells its workers to stop
  threading.Thread(target=_end_with_parent, daemon=True).start()
  tokenizer = load_tokenizer(recipe.tokenizer_path, recipe.tokenizer_type)
  _encode_in_worker_process = functools.partial(encode_batch, tokenizer, recipe)


def _end_with_parent() -> None:
  """Waits for the parent and then stops: a parent that is killed must not leave its workers behind."""
  if parent := multiprocessing.parent_process():
    parent.join()
  os._exit(1)


def _encode_in_worker(batch: list[RawDocument]) -> Block:
  return _encode_in_worker_process(batch)


def tokenize_files(
    files: list[str],
    output_prefix: str,
    tokenizer: Tokenizer,
    recipe: Recipe,
    file_format: str = "auto",
    workers: int = 1,
    progress: Callable[[int], object] = lambda source_bytes: None,
    batch_bytes: int = BATCH_BYTES,
) -> Summary:
  """Writes `output_prefix.bin` and `.idx` with the tokens of all documents of `files`, in their order.

  Args:
    files: paths, as `find_files` gives them.
    output_prefix: path of the pair without suffix; files of that name are replaced, once the new ones are whole.
    tokenizer: `recipe`'s, loaded.
    recipe: what a worker does.
    file_format: "text", "jsonl" or "auto".
    workers: processes; fewer are started where the input is a few batches only. The result does not depend on it.
    progress: called with the bytes of text done since the last call.
    batch_bytes: text that a worker gets at a time.

  Raises:
    MMapError: for a document that cannot be read, and for input without a single token; nothing is left written.
  """
  start = time.monotonic()
  documents = sequences = tokens = bytes_read = 0
  workers = max(1, min(workers, -(-sum(map(os.path.getsize, files)) // batch_bytes)))
  batches = batched(read_documents(files, file_format, recipe.whole_files), batch_bytes)
  with IndexedDatasetWriter(output_prefix, recipe.dtype) as writer, encoder(tokenizer, recipe, workers) as encode:
    for block in encode(batches):
      writer.add_documents(block.tokens, block.lengths)
      documents += len(block.lengths)
      sequences += int(np.count_nonzero(block.lengths))
      tokens += block.tokens.size
      bytes_read += block.source_bytes
      progress(block.source_bytes)
    if not tokens:
      raise MMapError(f"{output_prefix}: the input has {documents} documents and not one token; nothing was written.")
  seconds = time.monotonic() - start
  outputs = [output_prefix + ".bin", output_prefix + ".idx"]
  return Summary(
      documents=documents,
      sequences=sequences,
      tokens=tokens,
      empty_documents=documents - sequences,
      dtype=recipe.dtype,
      vocab_size=tokenizer.vocab_size,
      eod_id=recipe.eod_id,
      input_files=len(files),
      bytes_read=bytes_read,
      bytes_written=sum(map(os.path.getsize, outputs)),
      seconds=round(seconds, 3),
      tokens_per_second=round(tokens / max(seconds, 1e-9), 1),
      files=outputs,
  )
