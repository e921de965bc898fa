# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention forward and backward, ours and tokamax's, with and without segments in the rows.

Timed are jitted gradients of q, k, v, g and beta, in float32 with normalised q and k and the safe gate, on the CPU unless
JAX_PLATFORMS says otherwise. tokamax has its arrays with heads first beforehand, and room for as many segments as there
are. Segments have random lengths. Each timed call follows one of the same program that is not timed; ratios are medians
over the turns of the ratio within a turn.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from absl import logging
from common import SEED, interleave, median, parse_arguments, report, say, target
import jax
import jax.numpy as jnp
import numpy as np
import tokamax

from maxtext.kernels.kda import chunk_kda, resolve_implementation
from maxtext.layers.attention_kda import segment_ids_to_cu_seqlens

EXAMPLE = "python benchmarks/kda.py --recurrence > kda.json"
SWITCHES = {"--recurrence": "also tokamax's recurrence, a step of the sequence at a time: ten times as slow"}
LOWER_BOUND = -5.0
TOLERANCE = 1e-4  # between the gradients, of an array's largest entry
PACKED = 8  # segments of the rows that tokamax gets
_AT_ONCE = 20  # conversions of segment ids in one timing


@dataclasses.dataclass(frozen=True)
class Problem:
  """The sizes of a row, and arrays of them."""

  length: int
  heads: int
  width: int

  def inputs(self) -> list[jax.Array]:
    """q, k, v and the gate's input [1, T, H, D], beta [1, T, H], the gate's log rate [H], the outputs' cotangent."""
    rng = np.random.default_rng(SEED)
    draw = lambda *shape: jnp.asarray(rng.normal(size=(1, self.length, self.heads, *shape)), jnp.float32)
    q, k, v, g, cotangent = (draw(self.width) for _ in range(5))
    return [q, k, v, g, jax.nn.sigmoid(draw()), jnp.zeros(self.heads), cotangent]

  def segment_ids(self, segments: int, rows: int = 1, seed: int = SEED) -> jax.Array:
    """Ids from 1 on, int32 [rows, T], with borders at random places."""
    rng, begins = np.random.default_rng(seed), np.zeros((rows, self.length), np.int32)
    for row in begins:
      row[rng.choice(np.arange(1, self.length), segments - 1, replace=False)] = 1
    return jnp.asarray(1 + np.cumsum(begins, axis=1), jnp.int32)


class Program:
  """The compiled gradients of a KDA, and arguments for it.

  Args:
    forward: (q, k, v, g, beta, log rate, segments) -> outputs.
    arguments: those of `Problem.inputs`, and segments.
    quick: compile without optimisation, which takes most of a quick run.
  """

  def __init__(self, name: str, forward: Callable, *arguments, quick: bool):
    def loss(q, k, v, g, beta, rate, cotangent, segments):
      return jnp.sum(forward(q, k, v, g, beta, rate, segments) * cotangent)

    say(f"compiling {name}")
    self.arguments = arguments
    function = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4)), compiler_options=compiler_options(quick))
    self._compiled = function.lower(*arguments).compile()
    memory = self._compiled.memory_analysis()
    self.temporary_mib = round(memory.temp_size_in_bytes / 2**20, 1) if memory else None

  def gradients(self, *segments):
    """With the program's segments, or with others of the same shape."""
    return self._compiled(*self.arguments[: 7 if segments else 8], *segments)[1]

  def timed(self, *segments) -> Callable[[], dict[str, float]]:
    """A call that times `gradients`, run a second time: the first finds the caches as another program left them."""

    def twice() -> dict[str, float]:
      jax.block_until_ready(self.gradients(*segments))
      return seconds(lambda: self.gradients(*segments))

    return twice


def compiler_options(quick: bool) -> dict:
  return {"xla_backend_optimization_level": 0} if quick else {}


def seconds(function: Callable) -> dict[str, float]:
  start = time.perf_counter()
  jax.block_until_ready(function())
  return {"seconds": time.perf_counter() - start}


def our_forward(q, k, v, g, beta, rate, segments):
  """segments: the entry's arguments for them."""
  o, _ = chunk_kda(
      q, k, v, g, beta,
      A_log=rate, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, safe_gate=True, lower_bound=LOWER_BOUND,
      **segments,
  )  # fmt: skip
  return o


def tokamax_forward(implementation: str, room: int | None = None) -> Callable:
  """room: for how many segments. Segments are ids, or None."""

  def forward(q, k, v, g, beta, rate, segments):
    o, _ = tokamax.ops.kimi_delta_attention(
        q, k, v, g, beta,
        a_log=rate, use_qk_l2norm=True, use_gate_in_kernel=True, lower_bound=LOWER_BOUND,
        segment_ids=segments, max_num_segments=room, implementation=implementation,
    )  # fmt: skip
    return o

  return forward


def heads_first(inputs: list[jax.Array]) -> list[jax.Array]:
  return [jnp.moveaxis(x, 2, 0) if x.ndim > 1 else x for x in inputs]


def main() -> None:
  started, options = time.monotonic(), parse_arguments(__doc__, EXAMPLE, 15, datasets=False, switches=SWITCHES)
  logging.set_verbosity(logging.ERROR)  # tokamax says for each program that it was not tuned
  problem = Problem(256, 2, 32) if options.quick else Problem(2048, 4, 128)
  counts = (PACKED, 64) if options.quick else (PACKED, 128, 1024)
  results = {
      "device": jax.devices()[0].device_kind,
      "versions": {"jax": jax.__version__, "tokamax": tokamax.__version__},
      "ours is": resolve_implementation("auto"),
      "shape": dataclasses.asdict(problem),
      **gradients(problem, counts, options),
      "segment_ids_to_cu_seqlens": conversion(problem, options),
  }
  report("kda", options, started, results, targets(results, counts))


def gradients(problem: Problem, counts: tuple[int, ...], options) -> dict:
  """Times all, without segments and with each number of them."""
  inputs, quick = problem.inputs(), options.quick
  theirs, ids = heads_first(inputs), problem.segment_ids(PACKED)
  ours = Program("ours, unpacked", our_forward, *inputs, {}, quick=quick)
  packed = Program("ours, packed", our_forward, *inputs, {"segment_ids": ids}, quick=quick)
  chunked = Program("tokamax, unpacked", tokamax_forward("xla_chunked"), *theirs, None, quick=quick)
  chunked_packed = Program("tokamax, packed", tokamax_forward("xla_chunked", PACKED), *theirs, ids, quick=quick)
  programs = {
      "ours, unpacked": ours,
      **{f"ours, {count} segments": packed for count in counts},
      "tokamax, unpacked": chunked,
      f"tokamax, {PACKED} segments": chunked_packed,
  }
  calls = {name: program.timed() for name, program in programs.items()}
  calls |= {f"ours, {count} segments": packed.timed({"segment_ids": problem.segment_ids(count)}) for count in counts}
  turns = interleave(options.repeats, calls, "forward and backward")
  ratios = {"tokamax / ours, unpacked": ("tokamax, unpacked", "ours, unpacked")}
  ratios[f"tokamax / ours, {PACKED} segments"] = (f"tokamax, {PACKED} segments", f"ours, {PACKED} segments")
  for name in programs:
    who, rows = name.split(", ")
    if rows != "unpacked":
      ratios[f"packed / unpacked, {name}"] = (name, f"{who}, unpacked")
  results = {
      "forward and backward": {name: figures(turns[name], program) for name, program in programs.items()},
      "ratios": {name: quotient(turns[one], turns[other]) for name, (one, other) in ratios.items()},
      "same_gradients, unpacked": agree(ours.gradients(), chunked.gradients()),
      f"same_gradients, {PACKED} segments": agree(packed.gradients(), chunked_packed.gradients()),
  }
  if options.recurrence:
    results["recurrence"] = recurrence(ours, theirs, options)
  return results


def figures(rows: list[dict], program: Program) -> dict:
  return {
      "seconds": median(rows),
      "fastest": min(row["seconds"] for row in rows),
      "temporary MiB": program.temporary_mib,
  }


def quotient(rows: list[dict], others: list[dict]) -> float:
  """Median over the turns of the ratio of two calls in the same turn."""
  return statistics.median(row["seconds"] / other["seconds"] for row, other in zip(rows, others, strict=True))


def agree(ours, theirs) -> bool:
  """Whether two sets of gradients are the same, theirs with heads first."""
  for x, y in zip(ours, theirs, strict=True):
    x, y = np.asarray(x), np.moveaxis(np.asarray(y), 0, 2)
    if not np.abs(x - y).max() <= TOLERANCE * np.abs(y).max():
      return False
  return True


def conversion(problem: Problem, options) -> dict:
  """What the offsets cost that tokamax and tops need: alone, and in a forward step of ours that takes offsets."""
  results = {}
  sizes = ((problem, 1, PACKED),) if options.quick else ((problem, 1, 1024), (Problem(8192, 1, 1), 8, 1024))
  for one, rows, room in sizes:
    stack = jnp.stack([one.segment_ids(room // rows, rows, seed) for seed in range(_AT_ONCE)])
    convert = jax.jit(lambda stack, room=room: jax.lax.map(lambda ids: segment_ids_to_cu_seqlens(ids, room), stack))
    turns = interleave(options.repeats, {"alone": lambda c=convert, s=stack: seconds(lambda: c(s))}, "offsets")
    results[f"ids [{rows}, {one.length}], room for {room}: microseconds"] = median(turns["alone"]) / _AT_ONCE * 1e6
  return results | {"forward step that makes them / that is given them": step_with_offsets(problem, options)}


def step_with_offsets(problem: Problem, options) -> float:
  """Time of ours with offsets that the step makes of ids, over its time with the offsets as an argument."""
  ids, arrays = problem.segment_ids(PACKED), problem.inputs()[:6]
  compiled = functools.partial(jax.jit, compiler_options=compiler_options(options.quick))
  given = compiled(lambda arrays, offsets: our_forward(*arrays, {"cu_seqlens": offsets}))
  made = compiled(lambda arrays, ids: our_forward(*arrays, {"cu_seqlens": segment_ids_to_cu_seqlens(ids, PACKED)}))
  offsets = segment_ids_to_cu_seqlens(ids, PACKED)
  calls = {"given": lambda: seconds(lambda: given(arrays, offsets)), "made": lambda: seconds(lambda: made(arrays, ids))}
  turns = interleave(options.repeats, calls, "a step with offsets")
  return quotient(turns["made"], turns["given"])


def recurrence(ours: Program, theirs: list[jax.Array], options) -> dict:
  """tokamax's recurrence, in turns with ours."""
  program = Program("tokamax's recurrence", tokamax_forward("xla"), *theirs, None, quick=options.quick)
  turns = interleave(min(options.repeats, 3), {"ours": ours.timed(), "theirs": program.timed()}, "recurrence")
  return figures(turns["theirs"], program) | {"tokamax xla / ours": quotient(turns["theirs"], turns["ours"])}


def targets(results: dict, counts: tuple[int, ...]) -> list[dict]:
  ratios, name = results["ratios"], "tokamax / ours, unpacked"
  rows = [target(name, ratios[name], 1)]
  for count in counts:
    name = f"packed / unpacked, ours, {count} segments"
    rows.append(target(name, ratios[name], 1.05, at_most=True))
  return rows


if __name__ == "__main__":
  main()
