# SPDX-License-Identifier: Apache-2.0
"""The picture of `stats`: matplotlib, without a display; imported only for `--plot`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from maxtext.input_pipeline._mmap_files import MMapError
from maxtext.input_pipeline.mmap_cli.histogram import LengthHistogram

_DARK, _MIDDLE, _LIGHT = "0.15", "0.5", "0.8"  # readable in grey


def draw(path: str, facts: dict[str, Any], lengths: LengthHistogram) -> None:
  """Draws document lengths and, where they were counted, segments, merge settings and shares, to an image file.

  Raises:
    MMapError: if matplotlib is not installed, or the file cannot be written.
  """
  try:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
  except ImportError as error:
    raise MMapError(f"--plot {path} needs matplotlib, which is not installed; run pip install matplotlib.") from error
  panels = [_documents]
  if "segments" in facts:
    panels += [_segments, _merges]
  if len(facts["datasets"]) > 1:
    panels.append(_shares if "segments" in facts else _datasets)
  rows, columns = -(-len(panels) // 2), min(len(panels), 2)
  figure = Figure(figsize=(5.2 * columns, 3.6 * rows), layout="constrained")
  FigureCanvasAgg(figure)
  for place, panel in enumerate(panels):
    axes = figure.add_subplot(rows, columns, place + 1)
    for side in ("top", "right"):
      axes.spines[side].set_visible(False)
    panel(axes, facts, lengths)
  try:
    figure.savefig(path, dpi=150, format=os.path.splitext(path)[1][1:] or "png")
  except ValueError as error:
    raise MMapError(f"--plot {path}: {' '.join(str(error).split())}; give a name that ends in .png.") from error
  except OSError as error:
    raise MMapError(f"cannot write {path} ({error.strerror}); give a file in a writable folder.") from error


def _documents(axes, facts, lengths: LengthHistogram) -> None:
  del facts
  last = int(np.log2(max(lengths.longest or 1, 2))) + 1
  edges = 2.0 ** np.arange(0, last + 0.5, 0.5)
  whole = np.unique(np.ceil(edges).astype(np.int64))
  counts, tokens = lengths.buckets(whole)
  for values, name, style, color in ((counts, "documents", "-", _DARK), (tokens, "their tokens", "--", _MIDDLE)):
    axes.stairs(100 * values / max(values.sum(), 1), whole, label=name, linestyle=style, color=color, linewidth=1.6)
  axes.set_xscale("log", base=2)
  axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
  axes.set(title="Document lengths", xlabel="length [tokens]", ylabel="share [%]", ylim=(0, None))
  axes.legend(frameon=False)


def _segments(axes, facts, lengths) -> None:
  del lengths
  histogram = np.array(facts["histogram"])
  edges = np.unique(np.linspace(1, max(len(histogram), 2), min(len(histogram), 60) + 1).astype(int))
  sums = np.add.reduceat(np.append(histogram, np.zeros(2, np.int64)), edges)[:-1]
  axes.stairs(100 * sums / histogram.sum(), edges - 0.5, fill=True, color=_LIGHT, edgecolor=_DARK)
  limit = facts["recommended"]["max_kda_segments"]
  axes.axvline(limit, color=_DARK, linestyle=":")
  title = f"Segments of a sample, L = {facts['seq_length']:,}, P = {facts['merge']}"
  label = f"segments [count]   (dotted: max_kda_segments = {limit})"
  axes.set(title=title, xlabel=label, ylabel="share of samples [%]", ylim=(0, None))


def _merges(axes, facts, lengths) -> None:
  del lengths
  rows = facts["merges"]
  names = [str(row["packing_max_segments_per_sample"]) for row in rows]
  bars = axes.bar(names, [100 * row["joined_share"] for row in rows], color=_LIGHT, edgecolor=_DARK)
  axes.bar_label(bars, [f"most {row['most']}" for row in rows], fontsize=7)
  axes.set(title="Documents joined to the one before", xlabel="packing_max_segments_per_sample, P [count]")
  axes.set(ylabel="joined [%]", ylim=(0, max(1.0, *(115 * row["joined_share"] for row in rows))))


def _shares(axes, facts, lengths) -> None:
  """Bars of each dataset's share of tokens, and of its target where it has one."""
  del lengths
  datasets = facts["datasets"]
  place = np.arange(len(datasets))
  axes.barh(place - 0.2, [100 * own["share"] for own in datasets], 0.38, color=_MIDDLE, edgecolor=_DARK, label="read")
  if datasets[0]["target"] is not None:
    targets = [100 * own["target"] for own in datasets]
    axes.barh(place + 0.2, targets, 0.38, color="1", edgecolor=_DARK, hatch="///", label="target")
  axes.set(title="Share of tokens by dataset", xlabel="share [%]")
  axes.legend(edgecolor="1")
  _name_bars(axes, datasets)


def _datasets(axes, facts, lengths) -> None:
  del lengths
  datasets = facts["datasets"]
  axes.barh(range(len(datasets)), [own["tokens"] for own in datasets], 0.6, color=_MIDDLE, edgecolor=_DARK)
  axes.xaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
  axes.set(title="Tokens by dataset", xlabel="tokens [count]")
  _name_bars(axes, datasets)


def _name_bars(axes, datasets) -> None:
  axes.set_yticks(range(len(datasets)), [os.path.basename(own["dataset"].rstrip("/"))[-24:] for own in datasets])
  axes.invert_yaxis()
