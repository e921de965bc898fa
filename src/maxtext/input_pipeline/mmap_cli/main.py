# SPDX-License-Identifier: Apache-2.0
"""Command line of the Megatron data system: builds indices and shows what is in datasets, indices and samples.

Needs no accelerator. Each command explains itself: `COMMAND --help`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from typing import Any

from maxtext.input_pipeline.mmap_cli import console

# The modules of this package that are commands, in the order of the help text. Each has
#   NAME, SUMMARY, DESCRIPTION, EXAMPLE   the command, a line about it, its help, and what the help ends in
#   add_arguments(parser)                 adds its arguments; --json is added here
#   run(options) -> dict                  does the work and returns facts for JSON; raises MMapError or OSError
#   render(facts) -> str                  the facts for people
#   TAKES_OTHER_ARGUMENTS                 only where options.others, those that its parser does not know, are used
#   exit_code(facts) -> int               only where facts may be bad news, as in cmp and diff: 1 then
# and imports the standard library only until it runs, so that help is there at once.
COMMANDS = (
    "build",
    "blend",
    "inspect_data",
    "verify",
    "diff",
    "stats",
    "head",
    "from_megatron",
    "preflight",
    "trace",
)


def main(arguments: list[str] | None = None) -> int:
  """Runs the command line; returns the exit code: 0, 1 for an error or bad news (a usage error exits with 2)."""
  _quiet_libraries()
  options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
  command = options.command
  from maxtext.input_pipeline import _mmap_guard
  from maxtext.input_pipeline._mmap_files import MMapError

  try:
    facts = command.run(options)
    _mmap_guard.check()
    print(json.dumps(facts) if options.json else command.render(facts), flush=True)
  except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
  except (MMapError, OSError) as error:
    print(f"error: {console.sentence(error)}", file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print("error: interrupted.", file=sys.stderr)
    return 130
  return command.exit_code(facts) if hasattr(command, "exit_code") else 0


def _quiet_libraries() -> None:
  """Keeps what JAX and transformers say of themselves out of the answers; neither may be imported before."""
  os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
  if os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0") == "0":  # the package sets 0 if the user sets none
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "1"


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
  """Returns the options, with the module of the command as `command`.

  Arguments without a command are the released tool's first form, which means `convert`.
  """
  if arguments and arguments[0].startswith("-") and arguments[0] not in ("-h", "--help"):
    arguments = ["convert", *arguments]
  prog = "mmap-index" if os.path.basename(sys.argv[0]) == "main.py" else None  # `python -m ...main`
  parser = argparse.ArgumentParser(prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  commands = parser.add_subparsers(required=True, metavar="COMMAND")
  for name in COMMANDS:
    _add_command(commands, importlib.import_module(f"{__package__}.{name}"))
  options, options.others = parser.parse_known_args(arguments)
  if options.others and not hasattr(options.command, "TAKES_OTHER_ARGUMENTS"):
    parser.error(f"unrecognized arguments: {' '.join(options.others)}")
  return options


def _add_command(commands: Any, command: Any) -> None:
  parser = commands.add_parser(
      command.NAME,
      help=command.SUMMARY,
      description=command.DESCRIPTION,
      epilog=command.EXAMPLE,
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  command.add_arguments(parser)
  parser.add_argument("--json", action="store_true", help="print the facts as one line of JSON")
  parser.set_defaults(command=command)


if __name__ == "__main__":
  sys.exit(main())
