# SPDX-License-Identifier: Apache-2.0
"""The look at a checkpoint's data position before a run resumes: what is read, and the sentence for what cannot be."""

import json
import types

from etils import epath
import numpy as np
import pytest

from maxtext.common import checkpointing, grain_utility
from maxtext.input_pipeline._mmap_iterator import GlobalOrderDataset
from maxtext.input_pipeline._mmap_order import STATE_FORMAT
from support import refusal

ORDER = {"seed": 1, "num_epochs": 1, "requested_samples": 40, "available_samples": 40, "needed_samples": 40}
STATE = {"format": STATE_FORMAT, "next_sample": 8, "order": ORDER}


class Numbers:
  """Forty samples."""

  def __len__(self):
    return 40

  def rows(self, indices):
    return {"x": np.array(indices)[:, None]}


@pytest.fixture
def resume(tmp_path, monkeypatch):
  """Puts files into the state folder of a checkpoint of step 3, and has a run look at it; returns what it logs."""
  logged = []
  monkeypatch.setattr(checkpointing, "_released_load", lambda *arguments, **keys: (None, None))
  monkeypatch.setattr(checkpointing.release, "latest_step", lambda manager: manager.step)
  for level in ("log", "warning"):
    monkeypatch.setattr(checkpointing.max_logging, level, logged.append)

  def look(files: dict[str, str] | None, start: int = 0, steps: int = 10, batch: int = 4, full_state: str = "") -> str:
    folder = tmp_path / "3" / "iter"
    for name, text in (files or {}).items():
      folder.mkdir(parents=True, exist_ok=True)
      (folder / name).write_text(text)
    manager = types.SimpleNamespace(directory=epath.Path(tmp_path), step=None if files is None else 3)
    iterator = types.SimpleNamespace(local_iterator=iter(GlobalOrderDataset(Numbers(), batch, 0, 1, ORDER, start=start)))
    config = types.SimpleNamespace(steps=steps)
    checkpointing.load_state_if_possible(manager, iterator, "", full_state, maxtext_config=config)
    return "\n".join(logged)

  return look


@pytest.mark.parametrize("name", ["process_0-of-1.json", "process_0-of-4.json", "process_3-of-8.json"])
def test_the_file_of_any_host_of_any_number_will_do(resume, name):
  assert "Data continues at sample 8 of the global order (" in resume({name: json.dumps(STATE)})


def test_this_process_reads_its_own_file_where_there_is_one(tmp_path):
  for name in ("process_0-of-2.json", "process_0-of-1.json", "process_1-of-2.json", "process_x-of-1.json"):
    (tmp_path / name).touch()
  assert grain_utility.saved_process(epath.Path(tmp_path)) == (0, 1)
  (tmp_path / "process_0-of-1.json").unlink()
  assert grain_utility.saved_process(epath.Path(tmp_path)) == (0, 2)


DAMAGED = ["", "{", "[" * 10_000, "\0", json.dumps(STATE)[:30], json.dumps({**STATE, "format": 0})]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_is_named(resume, tmp_path, text):
  message = refusal(resume, {"process_0-of-1.json": text})
  assert message.startswith(f"{tmp_path}/3/iter/process_0-of-1.json: the checkpoint's data iterator state was not saved")


def test_another_order_names_the_file_that_has_it(resume, tmp_path):
  saved = json.dumps({**STATE, "order": {**ORDER, "seed": 2}})
  message = refusal(resume, {"process_0-of-1.json": saved})
  assert message.startswith(f"{tmp_path}/3/iter/process_0-of-1.json: ") and "the seed is 2 there and 1 here" in message


@pytest.mark.parametrize("name", ["process_0.json", "state.json"])
def test_a_folder_without_a_file_of_ours(resume, name):
  assert "iter has no process_0-of-N.json, so the data's position is not known" in refusal(resume, {name: "{}"})


def test_a_file_that_cannot_be_read(resume, tmp_path):
  (tmp_path / "3" / "iter" / "process_0-of-1.json").mkdir(parents=True)
  assert "process_0-of-1.json cannot be read (Is a directory); " in refusal(resume, {})


def test_steps_beyond_the_end_of_the_order_at_another_batch_size(resume):
  state = {"process_0-of-1.json": json.dumps(STATE)}
  assert "continues at sample 8" in resume(state, steps=12, batch=4)  # 8 more steps: 32 samples
  message = refusal(resume, state, steps=12, batch=5)
  assert "8 more steps of 5 samples read past the 40 of the order; lower steps" in message


@pytest.mark.parametrize("start", [0, 12])
def test_a_full_state_from_elsewhere_says_where_the_data_starts(resume, start):
  text = resume(None, start=start, full_state="gs://elsewhere/3/items")
  assert f"the data starts at sample {start} of its order, as mmap_npy_start_sample says" in text
