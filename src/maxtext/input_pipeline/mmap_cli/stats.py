# SPDX-License-Identifier: Apache-2.0
"""`stats`: how long documents are, how many segments samples hold, and which settings follow."""

from __future__ import annotations

import argparse
import collections
from typing import Any

from maxtext.input_pipeline.mmap_cli import build, console

NAME = "stats"
SUMMARY = "distributions of documents and segments, blend shares, recommended settings"
DESCRIPTION = """\
Shows how long documents are; with --seq-length also how many segments the samples of an order hold.

Only .idx files are read: segments are counted as if every document ended with EOD and held no other, which the last
tokens of some documents check, and --read checks in samples. A segment is a document's part of a sample.

Recommended max_kda_segments: the most segments in any sample, rounded up to a multiple of 8; without --samples a quarter
more, since other epochs pack other documents. It is for one row, and the key counts all rows of one device: multiply it
by the rows that a device holds (per_device_batch_size, times the devices that share rows).

Recommended packing_max_segments_per_sample: 0, which keeps every document apart as Megatron does. With P > 0, a document
that begins L // P tokens or less after the last kept beginning is joined to the one before it; the table says how many
that would be.
"""
EXAMPLE = """\
example (one dataset, a blend with a picture):
  mmap-index stats data/books --seq-length 2048 --eod-id 2
  mmap-index stats --datasets 'data/books,0.7;data/code,0.3' --seq-length 2048 --samples 8000 --plot stats.png
"""

_QUANTILES = (0.01, 0.1, 0.5, 0.9, 0.99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  add = parser.add_argument
  add("paths", nargs="*", metavar="DATASET", help="dataset, shards joined by ':', or 'npy_dir|dataset' to use indices")
  add("--datasets", metavar="LIST", help="a blend instead, 'dataset,0.7;dataset,0.3'")
  add("--seq-length", type=console.positive, metavar="L", help="tokens of a sample: max_target_length of the run")
  add("--samples", type=console.positive, metavar="N", help="samples of the run; default: one epoch")
  add("--merge", type=console.not_negative, default=0, metavar="P", help="packing_max_segments_per_sample; default: 0")
  add("--eod-id", type=console.not_negative, metavar="ID", help="token that ends documents; default: the usual last one")
  build.add_order(parser, extra_token=False)
  add("--margin", type=float, default=0.5, metavar="PERCENT", help="mmap_npy_blend_margin; default: %(default)s")
  add(
      "--read",
      nargs="?",
      type=console.positive,
      const=1000,
      metavar="N",
      help="also read N samples (default 1000) of each dataset and count their EOD tokens",
  )
  add("--plot", metavar="PNG", help="draw the distributions to a file; needs matplotlib (pip install 'maxtext[plot]')")


def run(options: argparse.Namespace) -> dict:
  """Counts, and draws if asked to; returns all that is shown."""
  from maxtext.input_pipeline._mmap_files import MMapError
  from maxtext.input_pipeline._mmap_shards import ShardedDataset
  from maxtext.input_pipeline.mmap_cli import mixtures

  build.check_split(options)
  entries, progress = mixtures.entries_of(options), console.progress_bars("samples")
  if options.seq_length is None and (options.read or options.samples):
    raise MMapError("samples need a length; give --seq-length, max_target_length of the run.")
  planned = []
  if options.seq_length is not None:
    planned = mixtures.plan(entries, options.samples, options.margin, progress)
    entries = [child.entry for child in planned]
  datasets = [ShardedDataset(entry.paths) for entry in entries]
  lengths, described = _documents(zip(entries, datasets, strict=True), options.eod_id)
  facts: dict[str, Any] = {"document_lengths": _lengths_facts(lengths), "datasets": described, "plot": options.plot}
  if planned:
    from maxtext.input_pipeline.mmap_cli import segments

    facts |= segments.count(planned, datasets, options, described, progress)
  if options.plot:
    from maxtext.input_pipeline.mmap_cli import plots

    plots.draw(options.plot, facts, lengths)
  return facts


# Documents.


def _documents(opened, eod_id: int | None):
  """Returns the lengths of all documents that have tokens, and facts of each dataset."""
  from maxtext.input_pipeline._mmap_index_utils import iter_document_sizes
  from maxtext.input_pipeline.mmap_cli import documents, histogram

  lengths, described = histogram.LengthHistogram(), []
  for entry, dataset in opened:
    own, empty, ends = histogram.LengthHistogram(), 0, collections.Counter()
    for shard in dataset.shards:
      shard.scan()  # the rest trusts the index
      for piece in iter_document_sizes(shard):
        empty += int((piece == 0).sum())
        for target in (own, lengths):
          target.add(piece[piece > 0])
      ends.update(documents.last_tokens(shard, max(1, 1000 // len(dataset.shards))).tolist())
    token = eod_id if eod_id is not None else next((token for token, _ in ends.most_common(1)), None)
    described.append({
        "dataset": entry.text,
        "sequences": len(dataset),
        "empty_documents": empty,
        **_lengths_facts(own),
        "eod_id": token,
        "ends_looked_at": sum(ends.values()),
        "ends_with_eod": ends[token],
    })
  return lengths, described


def _lengths_facts(lengths) -> dict[str, Any]:
  return {
      "documents": lengths.count,
      "tokens": lengths.total,
      "mean": round(lengths.total / lengths.count, 1) if lengths.count else None,
      "shortest": lengths.shortest,
      **{f"{share:.0%}": lengths.quantile(share) for share in _QUANTILES},
      "longest": lengths.longest,
  }


# For people.


def render(facts: dict) -> str:
  parts = [_documents_table(facts)]
  if "segments" in facts:
    parts += [_segments_table(facts), _merges_table(facts)]
  if any(dataset.get("target") is not None for dataset in facts["datasets"]):
    parts.append(_shares_table(facts))
  if "read" in facts:
    parts.append(_read_table(facts))
  if "recommended" in facts:
    parts.append(_recommended_table(facts))
  if facts["plot"]:
    parts.append(f"drawn to {facts['plot']}")
  return "\n\n".join(parts)


def _documents_table(facts: dict) -> str:
  names = ("documents", "tokens", "mean", "shortest", *(f"{share:.0%}" for share in _QUANTILES), "longest")
  rows = [(own["dataset"], own, f"{own['eod_id']}: {_ends(own)}") for own in facts["datasets"]]
  if len(rows) > 1:
    rows.append(("all", facts["document_lengths"], "-"))
  body = [(name, *(_number(own[key]) for key in names), ends) for name, own, ends in rows]
  return console.columns(("document lengths", *names, "ends"), body)


def _ends(dataset: dict) -> str:
  return f"{dataset['ends_with_eod'] / dataset['ends_looked_at']:.1%}" if dataset["ends_looked_at"] else "-"


def _number(value) -> str:
  return "-" if value is None else f"{value:,}"


def _segments_table(facts: dict) -> str:
  segments = facts["segments"]
  values = ", ".join(f"{key} {segments[key]:,}" for key in segments if key not in ("mean", "most"))
  return console.table({
      "samples": f"{facts['samples']:,} of {facts['seq_length']:,} tokens",
      "segments a sample": f"mean {segments['mean']:.2f}, {values}, most {segments['most']:,} "
      f"(packing_max_segments_per_sample={facts['merge']})",
      "tokens with loss": f"{facts['loss_share']:.3%} with eod_mask_loss=true, all without",
  })


def _merges_table(facts: dict) -> str:
  header = ("packing_max_segments_per_sample", "joins within", "documents joined", "share", "mean", "most")
  rows = [
      (
          f"{row['packing_max_segments_per_sample']:,}",
          f"{row['joins_up_to']:,}" if row["joins_up_to"] else "-",
          f"{row['joined']:,}",
          f"{row['joined_share']:.1%}",
          f"{row['mean']:.2f}",
          f"{row['most']:,}",
      )
      for row in facts["merges"]
  ]
  return console.columns(header, rows)


def _shares_table(facts: dict) -> str:
  header = ("dataset", "samples", "share of tokens", "target", "epochs")
  rows = [
      (own["dataset"], f"{own['samples']:,}", f"{own['share']:.3%}", f"{own['target']:.3%}", f"{own['epochs']:,}")
      for own in facts["datasets"]
  ]
  return console.columns(header, rows)


def _read_table(facts: dict) -> str:
  header = ("samples read", "samples", "EOD tokens", "counted without reading", "mean segments", "most")
  rows = [
      (
          read["dataset"],
          f"{read['samples']:,}",
          f"{read['eods']:,}",
          f"{read['assumed_eods']:,}",
          f"{read['mean']:.2f}",
          f"{read['most']:,}",
      )
      for read in facts["read"]
  ]
  return console.columns(header, rows)


def _recommended_table(facts: dict) -> str:
  kda, packing = (facts["recommended"][key] for key in ("max_kda_segments", "packing_max_segments_per_sample"))
  rule = "the most of this order" if facts["whole_order"] else "the most of one epoch and a quarter more"
  return console.table({
      "recommended": [
          f"packing_max_segments_per_sample={packing} (keeps every document apart)",
          f"max_kda_segments={kda} for each row of a device, with packing_max_segments_per_sample={facts['merge']} "
          f"({rule}, to a multiple of 8)",
      ]
  })
