# SPDX-License-Identifier: Apache-2.0
"""Tokens per second of batches through Grain, and memory, against the pipeline of MaxText 0.2.5, in one run.

Batches of 32 samples of 2,048 tokens in the training order of 1,000,000 sequences of 100 to 1,100 tokens, with the fields
of strict Megatron GPT semantics, as the training loop gets them before they go to a device. Read by 16 threads in the
training process (0 workers), and by 2 worker processes of 16 threads; all other keys of Grain are MaxText's defaults.
"""

from __future__ import annotations

import contextlib
import time

from common import Peer, TreeMemory, interleave, median, parse_arguments, ratio, report, target, uniform_dataset, warm

EXAMPLE = "python benchmarks/mmap_pipeline.py --repeats 5 > pipeline.json"
SEQ_LENGTH = 2048
BATCH = 32
WORKERS = (0, 2)
BATCHES = {"ours": 900, "release": 120}  # in a turn
WARM_UP = 40  # batches that use up what was read ahead: 500 samples in each process, and what waits between them
COMPARED = 4
QUICK = 30  # times fewer


def main() -> None:
  started, options = time.monotonic(), parse_arguments(__doc__, EXAMPLE, repeats=5)
  sequences = 20_000 if options.quick else 1_000_000
  prefix = uniform_dataset(options.data_dir, sequences, 100, 1100)
  warm(prefix)
  with contextlib.ExitStack() as stack:
    peers = {name: stack.enter_context(Peer(name, options, "peer_stream.py")) for name in BATCHES}
    steps = sequences // 2 // BATCH
    results = {f"{workers} workers": measure(options, peers, prefix, steps, workers) for workers in WORKERS}
  targets = [target(f"{noun}: times the release", row["ours / release"], 5) for noun, row in results.items()]
  report("mmap_pipeline", options, started, results, targets)


def measure(options, peers, prefix: str, steps: int, workers: int) -> dict:
  """Returns medians of tokens per second, their ratio, peak memory, and whether both gave the same batches."""
  peak, compared, less = {}, {}, QUICK if options.quick else 1
  batches, warm_up = {name: count // less for name, count in BATCHES.items()}, WARM_UP // less
  keys = {"steps": steps, "per_device_batch_size": BATCH, "max_target_length": SEQ_LENGTH, "grain_worker_count": workers}
  for name, peer in peers.items():
    files = f"{options.data_dir / f'pipeline-{name}-{steps}'}|{prefix}"
    with TreeMemory(peer) as memory:  # apart from the timed turns, which it would disturb
      compared[name] = peer.ask("open", compared=COMPARED, grain_train_files=files, **keys)["checksums"]
      peer.ask("read", warm_up=warm_up, batches=batches[name] // 2)
    peak[name] = memory.peak
  calls = {
      name: lambda name=name: peers[name].ask("read", warm_up=warm_up, batches=batches[name]) for name in peers
  }
  rows = interleave(options.repeats, calls, f"pipeline with {workers} workers")
  for peer in peers.values():
    peer.ask("close")
  rates = {name: batches[name] * BATCH * SEQ_LENGTH / median(row) for name, row in rows.items()}
  return {
      "tokens/s": rates,
      "ours / release": ratio(rates["ours"], rates["release"]),
      "peak memory of all processes": peak,
      "same_batches": compared["ours"] == compared["release"],
  }


if __name__ == "__main__":
  main()
