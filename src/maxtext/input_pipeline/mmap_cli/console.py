# SPDX-License-Identifier: Apache-2.0
"""What all command lines share: arguments, errors as a sentence, tables and progress bars. Standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
import re
import sys
import threading

Progress = Callable[[str, int, int], None]


def positive(text: str) -> int:
  """Reads an argument that is an integer of 1 or more."""
  value = int(text)
  if value < 1:
    raise argparse.ArgumentTypeError(f"{value} is less than 1")
  return value


def not_negative(text: str) -> int:
  """Reads an argument that is an integer of 0 or more."""
  value = int(text)
  if value < 0:
    raise argparse.ArgumentTypeError(f"{value} is less than 0")
  return value


def split_paths(texts: Iterable[str]) -> list[str]:
  """Returns the paths of arguments that may each join several by ':'."""
  from maxtext.input_pipeline import _mmap_index_utils as utils

  return [path for text in texts for path in utils.split_paths(text)]


def sentence(error: BaseException) -> str:
  """Returns an error as one sentence that names its file; the library's own errors, which are ValueErrors, are one."""
  if isinstance(error, OSError) and not isinstance(error, ValueError) and error.filename is not None:
    return f"{error.filename}: {error.strerror}."
  return str(error)


def table(rows: Mapping[str, str | Sequence[str]]) -> str:
  """Returns a line a fact, values in one column; a value of several texts gets a line each."""
  width = max(map(len, rows), default=0) + 2
  lines = []
  for name, value in rows.items():
    first, *others = [value] if isinstance(value, str) else [*value] or [""]
    lines.append(f"{name:<{width}}{first}".rstrip())
    lines.extend(" " * width + other for other in others)
  return "\n".join(lines)


def columns(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """Returns a table under a header; columns of numbers stand to the right."""
  body = [[*map(str, row)] for row in rows]
  widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
  numbers = [all(re.fullmatch(r"-?[\d,.]+( ?%)?|-?", cell) for cell in column) for column in zip(*body, strict=True)]
  numbers = numbers or [False] * len(widths)

  def line(cells: Sequence[str]) -> str:
    aligned = zip(cells, widths, numbers, strict=True)
    return "  ".join(f"{cell:>{width}}" if right else f"{cell:<{width}}" for cell, width, right in aligned).rstrip()

  return "\n".join([line(header), *map(line, body)])


def progress_bars(unit: str = "entries", keep: bool = True) -> Progress | None:
  """Returns a function (stage, done, total) that draws a bar a stage if stderr is a terminal, or None.

  Args:
    unit: of `done` and `total`.
    keep: leave finished bars on the screen.
  """
  if not sys.stderr.isatty():
    return None
  import tqdm

  bars: dict[str, tqdm.tqdm] = {}
  lock = threading.Lock()  # datasets are built side by side

  def show(stage: str, done: int, total: int) -> None:
    with lock:
      bar = bars.get(stage)
      if bar is None or bar.total != total:  # the last epoch's shuffle has a total of its own
        bar = bars[stage] = tqdm.tqdm(total=total, desc=stage, unit=f" {unit}", unit_scale=True, leave=keep)
      bar.update(done - bar.n)
      if done == total:
        bar.close()

  return show
