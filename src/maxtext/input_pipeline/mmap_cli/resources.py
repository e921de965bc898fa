# SPDX-License-Identifier: Apache-2.0
"""What a run needs of folders, disks and memory, against what there is; and a list of what is found. Standard library."""

from __future__ import annotations

import dataclasses
import os
import shutil
from typing import Any


class Findings:
  """What is wrong, and what is only to be known; each a sentence, said once."""

  def __init__(self):
    self.problems: dict[str, None] = {}
    self.warnings: dict[str, None] = {}

  def problem(self, text: object) -> None:
    self.problems[str(text)] = None

  def warn(self, text: object) -> None:
    self.warnings[str(text)] = None


@dataclasses.dataclass
class Build:
  """Files that the run has to make.

  Attributes:
    folder: they go to; "" if they stay in memory.
    size: bytes.
    of_blend: whether they are a blend's, which is made after its children.
  """

  folder: str
  size: int
  of_blend: bool = False


def existing(folder: str) -> str:
  """Returns a folder, or the nearest one above it that exists."""
  folder = os.path.abspath(folder)
  while not os.path.exists(folder):
    folder = os.path.dirname(folder)
  return folder


def can_write(folder: str) -> bool:
  """Whether files can be made in a folder, which need not exist yet; never in a URL's, of which a copy is read."""
  return "://" not in folder and os.path.isdir(existing(folder)) and os.access(existing(folder), os.W_OK | os.X_OK)


def check_disk(builds: list[Build], findings: Findings) -> list[dict[str, Any]]:
  """Compares what goes to each file system with its free space."""
  needed: dict[int, tuple[str, int]] = {}
  for build in builds:
    if build.folder:
      place = existing(build.folder)
      device = os.stat(place).st_dev
      first, size = needed.get(device, (build.folder, 0))
      needed[device] = first, size + build.size
  facts = []
  for folder, size in needed.values():
    free = shutil.disk_usage(existing(folder)).free
    facts.append({"folder": folder, "needed": size, "free": free})
    if size > free:
      findings.problem(f"{folder}: index files take {size} bytes, and {free} are free; make room or name another folder.")
  return facts


def check_memory(builds: list[Build], findings: Findings) -> dict[str, int | None]:
  """Compares what must be in memory at a time with what is free: indices that stay there, and those being built."""
  held = sum(build.size for build in builds if not build.folder)
  workers = os.cpu_count() or 1
  sizes = sorted((build.size for build in builds if build.folder and not build.of_blend), reverse=True)
  blends = [build.size for build in builds if build.folder and build.of_blend]
  needed, free = held + max(sum(sizes[:workers]), *blends, 0), available_memory()
  if free is not None and needed > free:
    findings.problem(
        f"the indices to be built take {needed} bytes of memory, and {free} are free; build them on a larger machine by "
        "mmap-index convert, or ask for fewer samples."
    )
  return {"needed": needed, "free": free}


def available_memory() -> int | None:
  """Returns the bytes of memory that a new process can have, where the system says it."""
  try:
    with open("/proc/meminfo", encoding="ascii") as file:
      return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
  except (OSError, StopIteration, ValueError):
    return None


def check_output(config, findings: Findings) -> None:
  """Looks at the folder of checkpoints and logs."""
  folder = config.base_output_directory
  if not folder or "://" in folder:
    return
  if config.enable_checkpointing and not os.path.isabs(folder):
    findings.problem(f"base_output_directory is {folder!r}; checkpoints need an absolute path.")
  elif not can_write(folder):
    findings.problem(f"base_output_directory {folder} cannot be written; name another folder or change its rights.")
