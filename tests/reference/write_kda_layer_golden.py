# SPDX-License-Identifier: Apache-2.0
"""Writes tests/golden/kda_layer.npz: outputs and gradients of transformers' Kimi Delta Attention layer.

Run in the reference environment: `python tests/reference/write_kda_layer_golden.py [output]`. The layer is
`BailingHybridDeltaAttention` of Ling 3.0 in plain PyTorch, float32. Its parameters and inputs are drawn by NumPy. Each
document runs alone, since the layer knows no documents, and the gradients are summed: what rows of several documents must
give. Nothing of this repository's code takes part.

Arrays: "provenance" (JSON); "inputs" [documents' tokens, E] and "cotangents" of the same shape, the documents of
"documents" laid end to end; "parameters/<name>"; and for both gates ("safe", "softplus") "<gate>/output",
"<gate>/inputs" and "<gate>/<parameter>", the gradients of sum(output * cotangents). "<gate>/bfloat16/<name>" is one
number: the error of the layer in bfloat16 in that array, root mean square relative to that of the array, against the
layer in float32 with parameters and inputs rounded to bfloat16.
"""

import importlib.metadata
import json
import math
from pathlib import Path
import platform
import sys

import numpy as np
import torch
from transformers.models.bailing_hybrid.configuration_bailing_hybrid import BailingHybridConfig
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention

OUTPUT = Path(__file__).resolve().parents[1] / "golden" / "kda_layer.npz"
COMMAND = "python tests/reference/write_kda_layer_golden.py"
SEED = 20260412
HIDDEN, HEADS, HEAD_DIM, LOWER_BOUND, EPSILON = 32, 2, 16, -5.0, 1e-6
DOCUMENTS = (70, 5, 1, 64)
FLOAT32 = ("A_log", "dt_bias", "conv1d.weight")  # transformers keeps these in float32, and so do we


def provenance() -> dict:
  versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")}
  settings = {"hidden_size": HIDDEN, "heads": HEADS, "head_dim": HEAD_DIM, "lower_bound": LOWER_BOUND, "epsilon": EPSILON}
  return {"command": COMMAND, "seed": SEED, "python": platform.python_version(), **versions, **settings}


def make_layer(safe_gate: bool) -> BailingHybridDeltaAttention:
  config = BailingHybridConfig(
      hidden_size=HIDDEN,
      num_attention_heads=HEADS,
      num_key_value_heads=HEADS,
      head_dim=HEAD_DIM,
      num_hidden_layers=6,
      rms_norm_eps=EPSILON,
      kda_safe_gate=safe_gate,
      kda_lower_bound=LOWER_BOUND,
  )
  return BailingHybridDeltaAttention(config, layer_idx=0)


def draw_parameters(layer, rng) -> dict[str, np.ndarray]:
  """Numbers of the size that training starts from; weights of norms are not all 1, so that a mix-up shows."""
  drawn = {}
  for name, parameter in sorted(layer.named_parameters()):
    shape = tuple(parameter.shape)
    if name.endswith("A_log"):
      value = np.log(rng.uniform(1.0, 16.0, shape))
    elif name.endswith("dt_bias"):
      step = np.exp(rng.uniform(math.log(1e-3), math.log(1e-1), shape))
      value = step + np.log(-np.expm1(-step))
    elif name.startswith("o_norm"):
      value = rng.uniform(0.5, 1.5, shape)
    elif name.startswith("conv1d"):
      value = rng.uniform(-0.5, 0.5, shape)
    else:
      value = rng.normal(size=shape) * shape[-1] ** -0.5
    drawn[name] = value.astype(np.float32)
  return drawn


def run_layer(safe_gate: bool, parameters, inputs, cotangents, low: bool = False) -> dict[str, np.ndarray]:
  """Outputs and gradients of the documents, each run alone; with `low` in bfloat16, but for what always stays float32."""
  layer = make_layer(safe_gate)
  layer.load_state_dict({name: torch.from_numpy(value) for name, value in parameters.items()})
  x = torch.from_numpy(inputs)
  if low:
    for name, parameter in layer.named_parameters():
      if not name.endswith(FLOAT32):
        parameter.data = parameter.data.to(torch.bfloat16)
    x = x.to(torch.bfloat16)
  x.requires_grad_()
  outputs = torch.cat([layer(document[None])[0] for document in torch.split(x, DOCUMENTS)])
  (outputs * torch.from_numpy(cotangents).to(outputs.dtype)).sum().backward()
  gradients = {name: parameter.grad.float().numpy() for name, parameter in layer.named_parameters()}
  return {"output": outputs.detach().float().numpy(), "inputs": x.grad.float().numpy(), **gradients}


def rounded(value: np.ndarray) -> np.ndarray:
  return torch.from_numpy(value).to(torch.bfloat16).float().numpy()


def errors_in_bfloat16(safe_gate: bool, parameters, inputs, cotangents) -> dict[str, np.ndarray]:
  parameters = {name: value if name.endswith(FLOAT32) else rounded(value) for name, value in parameters.items()}
  numbers = parameters, rounded(inputs), rounded(cotangents)
  exact, low = (run_layer(safe_gate, *numbers, low=low) for low in (False, True))
  return {name: np.linalg.norm(low[name] - value) / np.linalg.norm(value) for name, value in exact.items()}


def build_content() -> dict[str, np.ndarray]:
  torch.set_num_threads(1)
  rng = np.random.default_rng(SEED)
  parameters = draw_parameters(make_layer(True), rng)
  inputs, cotangents = (rng.normal(size=(sum(DOCUMENTS), HIDDEN)).astype(np.float32) for _ in range(2))
  content = {"documents": np.array(DOCUMENTS), "inputs": inputs, "cotangents": cotangents}
  content |= {f"parameters/{name}": value for name, value in parameters.items()}
  for gate in ("safe", "softplus"):
    results = run_layer(gate == "safe", parameters, inputs, cotangents)
    content |= {f"{gate}/{name}": value for name, value in results.items()}
    errors = errors_in_bfloat16(gate == "safe", parameters, inputs, cotangents)
    content |= {f"{gate}/bfloat16/{name}": np.array(value) for name, value in errors.items()}
  return content


def main(output=OUTPUT) -> None:
  np.savez_compressed(output, provenance=np.array(json.dumps(provenance())), **build_content())


if __name__ == "__main__":
  main(*sys.argv[1:2])
