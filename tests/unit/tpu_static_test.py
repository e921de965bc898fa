# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/tpu_static.py` without libtpu: its reading of libtpu's dumps, and its arguments."""

import importlib
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
import jax
import pytest

from maxtext.kernels.kda import chunk_kda
from support import one_sentence

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PACKED, FINAL = "schedule-analysis_packed-bundles-post-ra", "schedule-analysis_final_bundles"
# As in a compiled program: two kernels, the second a twin of the first, and something else.
HLO = """
ENTRY %main.7 {
  %q.1 = bf16[1,64,1,8]{3,2,1,0} parameter(0)
  %jvp_kda_forward_.1 = f32[1,1,64,8]{3,2,1,0:T(8,128)} custom-call(%q.1), custom_call_target="tpu_custom_call"
  %copy.5 = f32[1,1,64,8]{3,2,1,0:T(8,128)} copy(%jvp_kda_forward_.1)
  %x.3 = f32[8]{0} custom-call(%q.1), custom_call_target="Sharding", metadata={op_name="jit(f)/kda_forward"}
  ROOT %closed_call.4 = (f32[8]{0}) custom-call(%copy.5), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/kda_backward/pallas_call"}
}
"""  # fmt: skip # noqa: E501


@pytest.fixture(scope="module", autouse=True)
def modules():
  """The benchmark's modules, which import each other as scripts do."""
  with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(BENCHMARKS)
    yield SimpleNamespace(static=importlib.import_module("tpu_static"), bundles=importlib.import_module("tpu_bundles"))


def analysis(total, empty) -> str:
  return f"Schedule analysis:\n\ttotal scheduled bundles:    {total}\n\tempty scheduled bundles:    {empty}\n\tother: 7\n"


@pytest.fixture
def dumps(tmp_path) -> Path:
  """A folder of dumps: two kernels with schedules, and files that are of no interest."""
  texts = {
      f"17961-jvp_kda_forward_.1-00-{PACKED}": analysis(900, 30),
      "17961-jvp_kda_forward_.1-01-packed-bundles-post-ra": "0 : { %s1 = sld }",
      f"17961-jvp_kda_forward_.1-02-{FINAL}": analysis(880, 10),
      "17962-twins-00-deduplication-map": "key:jvp_kda_forward_.1\nequivalent_hlos[size=1]:\n  closed_call.4\n",
      f"17963-copy.5-00-{PACKED}": "",
  }
  for name, text in texts.items():
    (tmp_path / f"{name}.txt").write_text(text)
  return tmp_path


@pytest.fixture(scope="module")
def jaxpr():
  """Forward and backward of two chunks of one head, traced."""
  shapes = [jax.ShapeDtypeStruct((1, 128, 1, 8), "float32")] * 4 + [jax.ShapeDtypeStruct((1, 128, 1), "float32")]
  loss = lambda *arrays: chunk_kda(*arrays, implementation="pallas")[0].sum()
  return jax.jit(jax.grad(loss)).trace(*shapes).jaxpr.jaxpr


def test_each_kernel_has_its_name_grid_and_bundles(modules, dumps, jaxpr):
  counts = {"grid": [1, 1, 2], "bundles": 900, "empty": 30, "final": 880}
  assert modules.bundles.kernel_rows(HLO, jaxpr, dumps) == [
      {"name": "kda_forward", **counts},
      {"name": "closed_call", **counts},
  ]


def test_a_kernel_without_schedule_is_named(modules, dumps, jaxpr):
  (dumps / f"17961-jvp_kda_forward_.1-02-{FINAL}.txt").unlink()
  with pytest.raises(ValueError, match=f"kernel jvp_kda_forward_.1 has no {FINAL}") as error:
    modules.bundles.kernel_rows(HLO, jaxpr, dumps)
  one_sentence(error.value)


def test_a_kernel_that_no_pallas_call_made_is_named(modules, dumps):
  empty = jax.jit(lambda x: x).trace(1.0).jaxpr.jaxpr
  with pytest.raises(ValueError, match="kernel jvp_kda_forward_.1 is none of the Pallas calls") as error:
    modules.bundles.kernel_rows(HLO, empty, dumps)
  one_sentence(error.value)


@given(total=st.integers(0, 10**9), empty=st.integers(0, 10**9))
def test_counts_are_read_as_written(modules, total, empty):
  assert modules.bundles.read_counts(analysis(total, empty)) == (total, empty)


@pytest.mark.parametrize("text", ["", "Schedule analysis:\n\ttotal scheduled bundles: 5\n", "total scheduled bundles: x"])
def test_an_analysis_of_another_form_is_refused(modules, text):
  with pytest.raises(ValueError, match="scheduled bundles: N") as error:
    modules.bundles.read_counts(text)
  one_sentence(error.value)


def test_an_error_of_a_compilation_is_its_line_of_the_traceback(modules):
  log = "W1201 warning\nTraceback (most recent call last):\n  File x\nValueError: q is wrong.\n--------------------\n"
  assert modules.static.last_error(log) == "ValueError: q is wrong."
  assert modules.static.last_error("") == "the process ended without a word"


def arguments_error(modules, capsys, *arguments) -> str:
  with pytest.raises(SystemExit) as ended:
    modules.static.parse_arguments([*arguments])
  assert ended.value.code == 2
  return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--topology", "v4:2x2"], "'v4:2x2' is no topology; a family of v5e, v5p, v6e"),
        (["--topology", "v6e"], "'v6e' is no topology"),
        (["--segments", "8", "-1"], "'-1' is no number of 0 or more"),
        (["--heads", "0"], "--heads: '0' is no number of 1 or more."),
        (["--target", "theirs"], "--target: invalid choice: 'theirs'"),
    ],
)
def test_wrong_arguments_are_named(modules, capsys, arguments, words):
  assert words in arguments_error(modules, capsys, *arguments)


def test_without_libtpu_a_sentence_says_how_to_get_it(modules, capsys, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  assert "libtpu is not installed" in (message := arguments_error(modules, capsys)) and "pip install" in message


def test_only_tokamax_has_a_program_for_each_number_of_segments(modules, monkeypatch):
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
  options = modules.static.parse_arguments(["--segments", "0", "16", "128"])
  jobs = [*modules.static.jobs(options)]
  programs = {
      target: [modules.static.program_of(job) for job in jobs if job["target"] == target] for target in options.target
  }
  assert [job["segments"] for job in programs["tokamax"]] == [0, 16, 128]
  assert [job["segments"] for job in programs["ours"]] == [0, 1, 1]
  assert {json.dumps(job | {"segments": 0}) for job in programs["ours"]} == {json.dumps(programs["ours"][0])}
