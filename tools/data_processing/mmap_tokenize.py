# SPDX-License-Identifier: Apache-2.0
"""Tokenizes text or JSONL files into a Megatron dataset, PREFIX.bin and PREFIX.idx.

A document is a line of a text file (--document line), a whole text file (--document file) or a line of a JSONL file.
Documents keep the order of the input whatever the number of workers; an empty one stays, without a sequence.
Sentence splitting (Megatron's --split-sentences) is not supported: a document is one sequence.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
from pathlib import Path
import signal
import sys

EXAMPLE = """\
example:
  python tools/data_processing/mmap_tokenize.py --input corpus/ more.jsonl --suffix .txt,.py \\
      --output-prefix data/corpus --tokenizer tokenizer.model --append-eod --workers 8
"""


def main(arguments: list[str] | None = None) -> int:
  """Runs the command line; returns the exit code."""
  try:
    from maxtext.input_pipeline.mmap_cli import console
  except ImportError as error:
    print(f"error: {error}", file=sys.stderr)
    return 1
  options = parse_arguments(arguments, console)
  from maxtext.input_pipeline._mmap_indexed_dataset import MMapError

  try:
    summary = run(options)
  except (MMapError, OSError) as error:
    print(f"error: {console.sentence(error)}", file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print("error: interrupted; nothing was written.", file=sys.stderr)
    return 130
  print(json.dumps(dataclasses.asdict(summary)) if options.json else console.table(closing_table(summary)))
  return 0


def parse_arguments(arguments: list[str] | None, console) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
      description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add("--input", nargs="+", required=True, metavar="PATH", help="files, and folders to search (see --suffix)")
  add("--output-prefix", required=True, metavar="PREFIX", help="path of the dataset without .bin and .idx")
  add("--tokenizer", required=True, metavar="PATH", help="SentencePiece model, tokenizer.json or Hugging Face folder")
  add("--tokenizer-type", choices=("auto", "sentencepiece", "huggingface"), default="auto", help="default: %(default)s")
  add("--format", choices=("auto", "text", "jsonl"), default="auto", help="default: jsonl if named .jsonl or .json")
  add("--document", choices=("line", "file"), default="line", help="what a document of text is; default: %(default)s")
  add("--json-key", default="text", metavar="KEY", help="key of the text in a JSONL line; default: %(default)s")
  add("--suffix", type=names, default=None, metavar="LIST", help="file endings to read; default: .txt,.jsonl,.json")
  add("--exclude", type=names, default=(), metavar="LIST", help="file and folder names, or patterns, to skip in folders")
  add("--append-eod", action="store_true", help="end each document that has tokens with the EOD id")
  add("--eod-id", type=int, metavar="ID", help="EOD id (later: mmap_eod_id); default: the tokenizer's EOS id")
  add("--dtype", choices=("auto", "uint16", "int32"), default="auto", help="default: by vocabulary size, as Megatron")
  add("--workers", type=console.positive, default=cores(), metavar="N", help="processes; default: the CPUs, %(default)s")
  add("--json", action="store_true", help="print the closing summary as JSON")
  return parser.parse_args(arguments)


def names(text: str) -> tuple[str, ...]:
  """Splits a comma-separated list."""
  return tuple(filter(None, (name.strip() for name in text.split(","))))


def cores() -> int:
  """Returns the number of CPUs that this process may use."""
  return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run(options: argparse.Namespace):
  """Tokenizes as `options` say and returns the library's Summary."""
  from maxtext.input_pipeline import _mmap_indexed_dataset as indexed
  from maxtext.input_pipeline import _mmap_tokenize as library

  if not os.path.basename(options.output_prefix):
    raise indexed.MMapError(f"{options.output_prefix!r} is no --output-prefix; end it with a name, not with a slash.")
  files = library.find_files(options.input, options.suffix or library.DEFAULT_SUFFIXES, options.exclude)
  tokenizer = library.load_tokenizer(options.tokenizer, options.tokenizer_type)
  eod = library.choose_eod(tokenizer, options.append_eod, options.eod_id, options.tokenizer)
  dtype = library.choose_dtype(options.dtype, tokenizer.vocab_size, eod)
  recipe = library.Recipe(
      options.tokenizer, options.tokenizer_type, options.json_key, options.document == "file", eod, dtype.name
  )
  with progress_bar(files) as progress:
    return library.tokenize_files(
        files, options.output_prefix, tokenizer, recipe, options.format, options.workers, progress
    )


@contextlib.contextmanager
def progress_bar(files: list[str]):
  """Gives a function to call with bytes done; it draws only if stderr is a terminal."""
  if not sys.stderr.isatty():
    yield lambda source_bytes: None
    return
  import tqdm

  with tqdm.tqdm(total=sum(map(os.path.getsize, files)), unit="B", unit_scale=True, desc="tokenizing") as bar:
    yield bar.update


def closing_table(summary) -> dict[str, str]:
  """Returns the lines of the closing table, numbers with thousands separators."""
  eod = "not appended" if summary.eod_id is None else f"{summary.eod_id} (mmap_eod_id)"
  return {
      "documents": f"{summary.documents:,}",
      "sequences": f"{summary.sequences:,}",
      "tokens": f"{summary.tokens:,}",
      "empty documents": f"{summary.empty_documents:,}",
      "EOD": eod,
      "vocabulary": f"{summary.vocab_size:,}",
      "dtype": summary.dtype,
      "input files": f"{summary.input_files:,}",
      "bytes read": f"{summary.bytes_read:,}",
      "bytes written": f"{summary.bytes_written:,}",
      "seconds": f"{summary.seconds:,.2f}",
      "tokens/s": f"{summary.tokens_per_second:,.0f}",
      "files": "  ".join(summary.files),
  }


def terminate(*_) -> None:
  """SIGTERM as an exception, so that the writer removes its temporary files and the workers stop."""
  raise KeyboardInterrupt


if __name__ == "__main__":
  # Where nothing is installed, the package in the checkout says what to do.
  sys.path.append(str(Path(__file__).resolve().parents[2] / "src"))
  signal.signal(signal.SIGTERM, terminate)
  sys.exit(main())
