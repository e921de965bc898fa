# SPDX-License-Identifier: Apache-2.0
"""Trains a small model on a real Megatron dataset on the CPU: tokenize, build indices, train, stop, resume.

The text is the Python standard library's own source; the tokenizer is the SentencePiece model among the release's assets.
Everything goes to `demo_output/`; a second call keeps the dataset and the indices and trains anew.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
import re
import shutil
import subprocess
import sys
import sysconfig
import time

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / "tools" / "data_processing"
EOD, VOCAB = 2, 32000
LENGTH, BATCH, STEPS, STOP, SEED = 512, 4, 20, 10, 1234
SAMPLES = STEPS * BATCH


def main() -> int:
  options = parse_arguments()
  output = Path(options.output).resolve()
  output.mkdir(parents=True, exist_ok=True)
  start = time.monotonic()
  prefix, indices = output / "data" / "stdlib", output / "indices"
  tokenize(prefix)
  built = build_indices(prefix, indices)
  run = output / "run"
  shutil.rmtree(run, ignore_errors=True)
  step("3/4", f"train {STOP} steps, and stop")
  first = train(output, prefix, indices, STOP)
  step("4/4", f"resume, and train to step {STEPS}")
  second = train(output, prefix, indices, STEPS)
  print(summary(first, second, built, run, indices, time.monotonic() - start))
  return 0


def parse_arguments() -> argparse.Namespace:
  parser = argparse.ArgumentParser(
      description=__doc__,
      epilog="example:\n  python end_to_end/demo.py --output /tmp/demo",
      formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument("--output", default=ROOT / "demo_output", metavar="DIR", help="default: %(default)s")
  return parser.parse_args()


def step(number: str, what: str) -> None:
  print(f"[{number}] {what} ...", flush=True)


def tokenize(prefix: Path) -> None:
  """Makes the dataset, unless it is there."""
  import maxtext

  step("1/4", "tokenize the Python standard library")
  if prefix.with_suffix(".idx").exists():
    print(f"      {prefix} is there already")
    return
  tokenizer = Path(maxtext.__path__[-1]) / "assets" / "tokenizers" / "tokenizer.llama2"
  source = sysconfig.get_path("stdlib")
  call(
      [TOOLS / "mmap_tokenize.py", "--input", source, "--suffix", ".py", "--exclude", "site-packages,test,tests"],
      ["--document", "file", "--output-prefix", prefix, "--tokenizer", tokenizer, "--append-eod", "--eod-id", EOD],
  )


def build_indices(prefix: Path, indices: Path) -> dict:
  """Builds the indices as a run would; returns the builder's summary."""
  step("2/4", "build document, sample and shuffle index")
  arguments = ["--input", prefix, "--output-dir", indices, "--seq-length", LENGTH, "--num-samples", SAMPLES]
  printed = call([TOOLS / "mmap_index_builder.py", "convert", *arguments, "--seed", SEED, "--json"], show=False)
  built = json.loads(printed)
  print(f"      {built['documents']:,} documents, {built['tokens_per_epoch']:,} tokens, {built['samples']:,} samples")
  return built


def train(output: Path, prefix: Path, indices: Path, steps: int) -> str:
  """Trains to a step, from the last checkpoint if there is one; returns the log."""
  keys = {
      "run_name": "run",
      "base_output_directory": output,
      "model_name": "gpt3-52k",
      "override_model_config": True,
      "vocab_size": VOCAB,
      "grain_train_files": f"{indices}|{prefix}",
      "mmap_eod_id": EOD,
      "max_target_length": LENGTH,
      "per_device_batch_size": BATCH,
      "steps": steps,
      "mmap_npy_num_samples": SAMPLES,
      "learning_rate_schedule_steps": STEPS,
      "learning_rate": 0.01,
      "checkpoint_period": STOP,
      "hardware": "cpu",
      "skip_jax_distributed_system": True,
      "enable_goodput_recording": False,
      "log_config": False,
  }
  log = output / f"train_to_step_{steps}.log"
  command = [sys.executable, "-m", "maxtext.trainers.pre_train.train", "mmap_npy_megatron_gpt.yml"]
  command += [f"{key}={value}" for key, value in keys.items()]
  environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
  with open(log, "w", encoding="utf-8") as file:
    code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment, check=False).returncode
  text = log.read_text(encoding="utf-8", errors="replace")
  if code or not losses(text):
    sys.exit(f"error: training ended with code {code}; the last line of {log} is:\n{text.rstrip().splitlines()[-1]}")
  for number, loss in losses(text).items():
    if number % 5 == 0 or number == steps - 1:
      print(f"      step {number:2}  loss {loss}")
  return text


def losses(log: str) -> dict[int, str]:
  return {int(number): loss for number, loss in re.findall(r"completed step: (\d+),.*?, loss: ([\d.]+)", log)}


def call(*parts, show: bool = True) -> str:
  """Runs a tool with this Python; its error ends the demo."""
  command = [sys.executable, *(str(word) for part in parts for word in part)]
  done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
  if done.returncode:
    sys.exit(done.returncode)
  if show:
    print("".join(f"      {line}\n" for line in done.stdout.splitlines()), end="")
  return done.stdout


def summary(first: str, second: str, built: dict, run: Path, indices: Path, seconds: float) -> str:
  """Returns the closing table, and fails if the resumed run did not go on where the first one stopped."""
  before, after = losses(first), losses(second)
  resumed = re.search(r"Data continues at sample (\d+)", second)
  if sorted(before) != list(range(STOP)) or sorted(after) != list(range(STOP, STEPS)) or not resumed:
    sys.exit(f"error: steps {sorted(before)} and then {sorted(after)} were trained; see the logs in {run.parent}.")
  rows = {
      "tokens read": f"{SAMPLES * LENGTH:,} of {built['tokens_per_epoch']:,} ({SAMPLES} samples of {LENGTH})",
      "loss": f"{before[0]} at step 0, {after[STEPS - 1]} at step {STEPS - 1}",
      "resumed": f"after step {STOP - 1}, at sample {resumed[1]} of Megatron's order",
      "indices": indices,
      "checkpoints": run / "checkpoints",
      "TensorBoard": f"{run / 'tensorboard'} (tensorboard --logdir)",
      "logs": run.parent / "train_to_step_*.log",
      "seconds": f"{seconds:.0f}",
  }
  return "\n".join(["", *(f"{name:<14}{value}" for name, value in rows.items())])


if __name__ == "__main__":
  sys.exit(main())
