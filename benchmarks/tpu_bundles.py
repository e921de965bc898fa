# SPDX-License-Identifier: Apache-2.0
"""What a compiled TPU program says of its Mosaic kernels: names, grids, and bundles in the schedule that libtpu dumped.

A bundle is what a TPU core issues in one cycle. libtpu dumps two schedules of each HLO: `packed-bundles-post-ra`, after
registers are allocated, where each cycle of a stall is an empty bundle; and `final_bundles`, the program as it is stored,
where a run of empty bundles is a delay written into the one before. Loop bodies count once in both.
"""

from __future__ import annotations

from collections.abc import Iterator
import dataclasses
from pathlib import Path
import re

LABELS = ("schedule-analysis_packed-bundles-post-ra", "schedule-analysis_final_bundles")
DEDUPLICATION = "deduplication-map"
_FILE = re.compile(rf"\d+-(?P<hlo>.+)-\d+-(?P<label>{'|'.join((*LABELS, DEDUPLICATION))})\.txt")
_CALL = re.compile(r"^\s*(?:ROOT )?%(?P<hlo>[\w.\-]+) = .*custom_call_target=\"tpu_custom_call\".*$", re.MULTILINE)
_SCOPE = re.compile(r"op_name=\"([^\"]*)\"")


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Bundles of one HLO: with its stalls, the stalls alone, and as stored."""

  bundles: int
  empty: int
  final: int


def dump_flags(folder: str) -> str:
  """What LIBTPU_INIT_ARGS needs to hold for libtpu to write its schedules into a folder."""
  labels = "|".join(label.removeprefix("schedule-analysis_") for label in (*LABELS, DEDUPLICATION))
  return f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*({labels}).*"


def find_dumps(folder: str | Path) -> dict[str, dict[str, Path]]:
  """The files of schedules in a folder, by HLO and label. HLOs that share another's program have its files."""
  files: dict[str, dict[str, Path]] = {}
  same: dict[str, str] = {}
  for path in sorted(Path(folder).iterdir()):
    if not (match := _FILE.fullmatch(path.name)):
      continue
    if match["label"] == DEDUPLICATION:
      same |= read_duplicates(path.read_text())
    else:
      files.setdefault(match["hlo"], {})[match["label"]] = path
  return {hlo: files[first] for hlo, first in same.items() if first in files} | files


def read_schedule(hlo: str, files: dict[str, dict[str, Path]]) -> Schedule:
  """The schedule of an HLO in what `find_dumps` found.

  Raises:
    ValueError: it has none, or one of another form.
  """
  found = files.get(hlo, {})
  if missing := [label for label in LABELS if label not in found]:
    raise ValueError(f"kernel {hlo} has no {' and no '.join(missing)} in libtpu's dumps; try another version of libtpu.")
  (bundles, empty), (final, _) = (read_counts(found[label].read_text()) for label in LABELS)
  return Schedule(bundles, empty, final)


def read_counts(text: str) -> tuple[int, int]:
  """Bundles and empty bundles of a schedule's analysis.

  Raises:
    ValueError: a text of another form.
  """
  counts = []
  for title in ("total", "empty"):
    found = re.search(rf"^\s*{title} scheduled bundles:\s*(\d+)\s*$", text, re.MULTILINE)
    if not found:
      raise ValueError(
          f"a schedule's analysis begins with {text[:60]!r} and has no line '{title} scheduled bundles: N'; this libtpu "
          "writes dumps in another form, try another version."
      )
    counts.append(int(found[1]))
  return counts[0], counts[1]


def read_duplicates(text: str) -> dict[str, str]:
  """The names of a deduplication map, each with the name whose program it runs."""
  same, key = {}, ""
  for line in text.splitlines():
    if line.startswith("key:"):
      key = line.removeprefix("key:").strip()
    elif line.startswith(" ") and line.strip():
      same[line.strip()] = key
  return same


def pallas_grids(jaxpr, scope: str = "") -> Iterator[tuple[str, str, list]]:
  """The Pallas calls of a traced program in their order: name, name of the enclosing jitted function, grid."""
  for equation in jaxpr.eqns:
    parameters = equation.params
    if equation.primitive.name == "pallas_call":
      name = parameters.get("name") or getattr(parameters.get("name_and_src_info"), "name", "") or ""
      yield name, scope, [size if isinstance(size, int) else str(size) for size in parameters["grid_mapping"].grid]
      continue
    inside = parameters.get("name", scope) if equation.primitive.name in ("jit", "pjit") else scope
    for value in parameters.values():
      for item in value if isinstance(value, (tuple, list)) else (value,):
        inner = getattr(item, "jaxpr", item)
        if hasattr(inner, "eqns"):
          yield from pallas_grids(inner, inside)


def kernel_rows(hlo_text: str, jaxpr, folder: str | Path) -> list[dict]:
  """A row for each Mosaic kernel of a compiled program, in its order.

  Args:
    hlo_text: the compiled program.
    jaxpr: the traced program, which has the grids.
    folder: with the dumps.

  Raises:
    ValueError: a kernel has no schedule in the dumps, or no Pallas call.
  """
  grids, files, rows = list(pallas_grids(jaxpr)), find_dumps(folder), []
  for call in _CALL.finditer(hlo_text):
    hlo, scope = call["hlo"], _SCOPE.search(call[0])
    where = f"{scope[1] if scope else ''} {hlo}"
    known = [entry for entry in grids if _longest(entry, where)]
    if not known:
      raise ValueError(f"kernel {hlo} is none of the Pallas calls {[entry[:2] for entry in grids]}; compare their names.")
    entry = max(known, key=lambda entry: _longest(entry, where))
    grids.remove(entry)
    rows.append({"name": _plain(hlo), "grid": entry[2], **dataclasses.asdict(read_schedule(hlo, files))})
  return rows


def _longest(entry: tuple[str, str, list], text: str) -> int:
  """Length of a Pallas call's name, or of its function's, that a text holds; 0 if it holds neither."""
  return max(len(name) if name in text else 0 for name in entry[:2])


def _plain(hlo: str) -> str:
  """A kernel's name without the number that XLA adds and the marks of differentiation."""
  name = re.sub(r"\.\d+$", "", hlo)
  while marked := re.fullmatch(r"(?:jvp|transpose)_(.+)_", name):
    name = marked[1]
  return name
