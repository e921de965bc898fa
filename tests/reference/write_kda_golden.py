# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/kda.npz: outputs, final states and gradients of Kimi Delta Attention from two PyTorch codes.

Run in the reference environment: `python tests/reference/write_kda_golden.py [output]`. The oracles are
flash-linear-attention's `naive_recurrent_kda` (package fla-core, ops/kda/naive.py, which needs no GPU) and transformers'
`chunk_kimi_delta_attention` of Ling 3.0. fla-core's code computes in `torch.float`; here it reads that as float64, so
that its numbers are the truth to float32. Nothing of this repository's code takes part.

Arrays: "provenance" (JSON), and for each case "<case>/<name>": the inputs q, k, v, g, beta (and initial_state), the
cotangents do (and dfinal), the results o (and final_state), and the gradients dq, dk, dv, dg, dbeta (and
dinitial_state) of sum(o * do) + sum(final_state * dfinal). [T, H, ...], float32. In case "packed" the documents of
"packed/documents" lie end to end, and each ran alone. "bfloat16/<name>" is one number: the error of fla-core's code with
bfloat16 inputs in that array of case "plain", root mean square relative to that of the array, against float64 with the
same rounded inputs.
"""

import contextlib
import functools
import importlib.metadata
import importlib.util
import json
from pathlib import Path
import platform
import sys
import types

import numpy as np
import torch
from transformers.models.bailing_hybrid import modeling_bailing_hybrid

OUTPUT = Path(__file__).resolve().parents[1] / "golden" / "kda.npz"
COMMAND = "python tests/reference/write_kda_golden.py"
SEED = 20261201
LENGTH, HEADS, KEYS, VALUES = 70, 2, 8, 12
DOCUMENTS = (33, 1, 20, 16)
INPUTS = ("q", "k", "v", "g", "beta")


@functools.cache
def naive() -> types.ModuleType:
  """fla-core's naive module, by its file: the package itself imports GPU code."""
  path = importlib.metadata.distribution("fla-core").locate_file("fla/ops/kda/naive.py")
  spec = importlib.util.spec_from_file_location("naive_kda", path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@contextlib.contextmanager
def naive_in_float64():
  """fla-core's naive module with its `torch.float` read as float64."""
  names = {name: getattr(torch, name) for name in dir(torch) if not name.startswith("__")}
  module = naive()
  module.torch = types.SimpleNamespace(**names | {"float": torch.float64})
  try:
    yield
  finally:
    module.torch = torch


def provenance() -> dict:
  versions = {name: importlib.metadata.version(name) for name in ("torch", "fla-core", "transformers", "numpy")}
  return {"command": COMMAND, "seed": SEED, "python": platform.python_version(), **versions}


def draw(rng, decay, length: int = LENGTH, state: bool = False) -> dict[str, np.ndarray]:
  """Inputs and cotangents of one row. Keys have a length of about 1, as after the norm."""
  shape = length, HEADS
  case = {
      "q": rng.normal(size=(*shape, KEYS)),
      "k": rng.normal(size=(*shape, KEYS)) * KEYS**-0.5,
      "v": rng.normal(size=(*shape, VALUES)),
      "g": -decay(rng, (*shape, KEYS)),
      "beta": rng.uniform(size=shape),
      "do": rng.normal(size=(*shape, VALUES)),
  }
  if state:
    case |= {name: rng.normal(size=(HEADS, KEYS, VALUES)) for name in ("initial_state", "dfinal")}
  return {name: value.astype(np.float32) for name, value in case.items()}


def mild(rng, shape):
  return rng.uniform(size=shape)


def strong(rng, shape):
  """Up to 20 a token, and one token that leaves nothing."""
  decay = 20 * rng.uniform(size=shape) ** 2
  decay[len(decay) // 2] = 2661
  return decay


def run(function, case, dtype=torch.float64, **keywords) -> dict[str, np.ndarray]:
  """Results and gradients of one row, as arrays."""
  tensors = {name: torch.from_numpy(case[name]).to(dtype)[None].requires_grad_() for name in INPUTS}
  state = None
  if "initial_state" in case:
    state = torch.from_numpy(case["initial_state"]).double()[None].requires_grad_()
  o, final_state = function(*tensors.values(), initial_state=state, output_final_state=True, **keywords)
  loss = (o * torch.from_numpy(case["do"])[None]).sum()
  if "dfinal" in case:
    loss = loss + (final_state * torch.from_numpy(case["dfinal"])[None]).sum()
  loss.backward()
  results = {"o": o, **{f"d{name}": tensor.grad for name, tensor in tensors.items()}}
  if state is not None:
    results |= {"final_state": final_state, "dinitial_state": state.grad}
  return {name: value.detach().float().numpy()[0] for name, value in results.items()}


def run_documents(function, case, **keywords) -> dict[str, np.ndarray]:
  """Each document of a row alone, the results end to end."""
  borders = np.cumsum(DOCUMENTS)[:-1]
  split = {name: np.split(value, borders) for name, value in case.items()}
  parts = [run(function, {name: split[name][n] for name in split}, **keywords) for n in range(len(DOCUMENTS))]
  return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def errors_in_bfloat16(case) -> dict[str, np.ndarray]:
  rounded = {name: torch.from_numpy(value).to(torch.bfloat16).float().numpy() for name, value in case.items()}
  low = run(naive().naive_recurrent_kda, rounded, torch.bfloat16)
  with naive_in_float64():
    exact = run(naive().naive_recurrent_kda, rounded)
  return {name: np.linalg.norm(low[name] - value) / np.linalg.norm(value) for name, value in exact.items()}


def build_content() -> dict[str, np.ndarray]:
  torch.set_num_threads(1)
  rng = np.random.default_rng(SEED)
  drawn = {
      "plain": draw(rng, mild),
      "strong": draw(rng, strong),
      "state": draw(rng, mild, state=True),
      "packed": draw(rng, mild),
      "norm": draw(rng, mild),
  }
  results = {}
  with naive_in_float64():
    for name in ("plain", "strong", "state"):
      results[name] = run(naive().naive_recurrent_kda, drawn[name])
    results["packed"] = run_documents(naive().naive_recurrent_kda, drawn["packed"])
  results["packed"]["documents"] = np.array(DOCUMENTS)
  chunked = modeling_bailing_hybrid.chunk_kimi_delta_attention
  results["norm"] = run(chunked, drawn["norm"], torch.float32, use_qk_l2norm_in_kernel=True)
  content = {f"{name}/{key}": x for name in drawn for key, x in (drawn[name] | results[name]).items()}
  return content | {f"bfloat16/{name}": np.array(x) for name, x in errors_in_bfloat16(drawn["plain"]).items()}


def main(output=OUTPUT) -> None:
  np.savez_compressed(output, provenance=np.array(json.dumps(provenance())), **build_content())


if __name__ == "__main__":
  main(*sys.argv[1:2])
