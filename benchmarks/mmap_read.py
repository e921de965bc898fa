# SPDX-License-Identifier: Apache-2.0
"""Samples and fields per second in one thread, and bytes read, against MaxText 0.2.5 and megatron-core, in one run.

Samples of 2,048 tokens are read in random order from 1,000,000 sequences of 100 to 1,100 tokens, and from 600 documents
of 300,000. Ours and the release give tokens; megatron-core's GPTDataset gives its fields too. Fields are what
MegatronSplitInputsTargets makes of samples in memory. The pipeline is both with batching, for information.
"""

from __future__ import annotations

import contextlib
import time

from common import (
  SEED,
  Peer,
  interleave,
  median,
  parse_arguments,
  peer_names,
  ratio,
  report,
  target,
  uniform_dataset,
  warm,
)
import numpy as np

EXAMPLE = "python benchmarks/mmap_read.py --repeats 9 > read.json"
SEQ_LENGTH = 2048
TOKEN_BYTES = 2
BATCH = 8
THREADS = {"1 thread": 1, "16 threads": 16}


def main() -> None:
  started, options = time.monotonic(), parse_arguments(__doc__, EXAMPLE, repeats=9)
  with contextlib.ExitStack() as stack:
    peers = {name: stack.enter_context(Peer(name, options)) for name in peer_names(options)}
    short = measure_samples(options, peers, "short", *((20_000, 1_000) if options.quick else (1_000_000, 10_000)))
    fields = measure_fields(options, peers, short.pop("positions"))
    pipeline = measure_pipeline(options, peers, 800 if options.quick else 8_000)
    long = measure_samples(options, peers, "long", *((20, 100) if options.quick else (600, 2_000)))
    long.pop("positions")
  results = {"sequences of 100 to 1,100": short, "documents of 300,000": long, "fields": fields, "pipeline": pipeline}
  targets = [
      target("samples/s: times the release", short["ours / others"]["release"], 2),
      target("300,000-token documents: bytes read / needed", long["bytes read / needed"]["ours"], 1.05, at_most=True),
      target("fields/s: times the release", fields["ours / release"]["no merging"], 10),
  ]
  report("mmap_read", options, started, results, targets)


def measure_samples(options, peers, noun: str, sequences: int, count: int) -> dict:
  """Returns medians of samples per second and of bytes read per byte needed, over `count` random samples."""
  low, high = (100, 1100) if noun == "short" else (300_000, 300_000)
  prefix = uniform_dataset(options.data_dir, sequences, low, high)
  warm(prefix)
  num_samples = sequences * (low + high) // (2 * SEQ_LENGTH) * 7 // 10 if noun == "long" else sequences // 2
  order = {"prefix": prefix, "seq_length": SEQ_LENGTH, "seed": SEED, "num_samples": num_samples}
  lengths = {
      name: peer.ask("open_source", folder=str(options.data_dir / f"{noun}-{name}"), **order)["samples"]
      for name, peer in peers.items()
  }
  assert len(set(lengths.values())) == 1, lengths
  positions = np.random.default_rng(SEED).integers(0, lengths["ours"], count).tolist()
  sums = [peer.ask("sample_checksum", positions=positions[:200]) for peer in peers.values()]
  calls = {name: lambda peer=peer: peer.ask("read", positions=positions) for name, peer in peers.items()}
  rows = interleave(options.repeats, calls, f"reading {noun} sequences")
  rates = {name: count / median(rows[name]) if name in rows else None for name in ("ours", "release", "megatron")}
  needed = count * (SEQ_LENGTH + 1) * TOKEN_BYTES
  return {
      "samples/s": rates,
      "ours / others": {name: ratio(rates["ours"], rates[name]) for name in ("release", "megatron")},
      # megatron-core maps the file, so that its reads are not counted.
      "bytes read / needed": {name: median(rows[name], "bytes") / needed for name in ("ours", "release")},
      "same_samples": all(row == sums[0] for row in sums),
      "positions": positions,
  }


def measure_fields(options, peers, positions: list[int]) -> dict:
  """Returns fields per second, without merging of short segments and with MaxText's default of L // 25."""
  settings, rounds = {"no merging": 0, "merging": 25}, {"ours": 20, "release": 1}
  positions = positions[:200]
  calls = {
      f"{name}, {noun}": lambda peer=peers[name], merge=merge: peer.ask(
          "fields", positions=positions, seq_length=SEQ_LENGTH, merge=merge, rounds=rounds[peer.name]
      )
      for noun, merge in settings.items()
      for name in rounds
  }
  rows = interleave(options.repeats, calls, "fields")
  rates = {name: len(positions) * rounds[name.split(",")[0]] / median(row) for name, row in rows.items()}
  same = all(rows[f"ours, {noun}"][0]["checksums"] == rows[f"release, {noun}"][0]["checksums"] for noun in settings)
  ratios = {noun: ratio(rates[f"ours, {noun}"], rates[f"release, {noun}"]) for noun in settings}
  return {"fields/s": rates, "ours / release": ratios, "same_fields": same}


def measure_pipeline(options, peers, samples: int) -> dict:
  """Returns samples per second of batches of fields, with one thread and with MaxText's default of 16."""
  counts = {"ours": samples, "release": samples // 4}
  calls = {
      f"{name}, {noun}": lambda peer=peers[name], threads=threads: peer.ask(
          "pipeline", samples=counts[peer.name], seq_length=SEQ_LENGTH, batch=BATCH, threads=threads
      )
      for noun, threads in THREADS.items()
      for name in counts
  }
  rows = interleave(min(options.repeats, 5), calls, "pipeline")
  return {"samples/s": {name: counts[name.split(",")[0]] / median(row) for name, row in rows.items()}}


if __name__ == "__main__":
  main()
