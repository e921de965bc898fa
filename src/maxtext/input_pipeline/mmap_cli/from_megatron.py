# SPDX-License-Identifier: Apache-2.0
"""`from-megatron`: a config of ours that reads what a Megatron-LM run reads, in the same order."""

from __future__ import annotations

import argparse

from maxtext.input_pipeline.mmap_cli import console

NAME = "from-megatron"
SUMMARY = "turn Megatron-LM's arguments into a config"
DESCRIPTION = """\
Reads the command-line arguments of a Megatron-LM run and writes the YAML of a run here that reads the same samples in
the same order: the numbers of samples that Megatron asks for are worked out and pinned.

Give the arguments as they are in the launch script. Those that do not concern the data, or are not known, are
ignored; those that have no equal here are named at the top of the YAML.
"""
EXAMPLE = """\
example:
  mmap-index from-megatron --output run.yml --eod-id 2 \\
      --data-path 0.7 data/books 0.3 data/code --split 98,2,0 --seq-length 2048 --global-batch-size 64 \\
      --train-iters 2000 --eval-interval 100 --eval-iters 10 --reset-position-ids --reset-attention-mask
"""
TAKES_OTHER_ARGUMENTS = True  # main puts those that the parser does not know into options.others


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.allow_abbrev = False  # an argument of Megatron's that begins like one of these is Megatron's
  parser.usage = "%(prog)s [options] MEGATRON_ARGUMENT ..."
  add = parser.add_argument
  add("--args-file", metavar="FILE", help="file that holds the arguments, or the part of a launch script that does")
  add("--output", metavar="YAML", help="file to write; default: standard output")
  add("--index-dir", metavar="DIR", help="folder for index files; default: Megatron's --data-cache-path, or indices")
  add("--eod-id", type=console.not_negative, metavar="ID", help="token that preprocessing appended to each document")
  add("--devices", type=console.positive, metavar="N", help="devices of the run here; default: 1")
  add(
      "--consumed-samples",
      type=console.not_negative,
      default=0,
      metavar="N",
      help="samples that the Megatron run has read, to continue it here; default: %(default)s",
  )


def run(options: argparse.Namespace) -> dict:
  """Translates the arguments; returns the keys, what has no equal, and the YAML, which is also written if asked for.

  Raises:
    MMapError: if an argument cannot be used, or if Megatron would refuse the arguments.
    OSError: if a file cannot be read or written.
  """
  from maxtext.input_pipeline.mmap_cli import megatron_arguments, megatron_keys

  words = list(options.others)
  if options.args_file:
    with open(options.args_file, encoding="utf-8") as file:
      words += megatron_arguments.words_of_script(file.read())
  facts = megatron_keys.translate(words, options.index_dir, options.eod_id, options.devices, options.consumed_samples)
  if options.output:
    with open(options.output, "w", encoding="utf-8") as file:
      file.write(facts["yaml"])
  return {**facts, "output": options.output}


def render(facts: dict) -> str:
  if not facts["output"]:
    return facts["yaml"].rstrip("\n")
  named = [f"no equal: {name}: {reason}" for name, reason in facts["no_equal"].items()]
  return "\n".join([f"{facts['output']} is written.", *named, *(f"to be set: {line}" for line in facts["to_set"])])
