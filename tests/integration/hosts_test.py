# SPDX-License-Identifier: Apache-2.0
"""Runs of several hosts read the one-host stream, and another number of hosts continues it. CASES D12."""

import json
import re

import pytest

FLOAT32 = {"dtype": "float32", "weight_dtype": "float32", "log_batch_digest": True, "learning_rate": 1e-3}
STEPS = 4
PINNED = {"mmap_npy_num_samples": 40, "checkpoint_period": 2}


def digests(log: str) -> dict[int, str]:
  """The digest of each step's global batch."""
  found = re.findall(r"step (\d+): batch digest ([0-9a-f]+)", log)
  return {int(step): digest for step, digest in found}


def loss_of(said: str) -> float:
  return float(re.search(r"loss: ([0-9.]+)", said)[1])


def assert_same_run(run, whole, steps) -> None:
  """Equal batches, and losses that differ by the order of a float32 sum over hosts only: the log shows three digits."""
  assert run.code == 0, run.log[-3000:]
  assert digests(run.log) == {step: digests(whole.log)[step] for step in steps}
  assert sorted(run.losses) == list(steps)
  for step in steps:
    assert loss_of(run.losses[step]) == pytest.approx(loss_of(whole.losses[step]), abs=2e-3)


@pytest.fixture
def blend(tmp_path, write_dataset):
  """A blend of one dataset and one of two shards; returns what grain_train_files says for a folder of indices."""
  write_dataset(tmp_path / "a", seed=3)
  for name in ("b_1", "b_2"):
    write_dataset(tmp_path / name, documents=20, seed=len(name) + int(name[-1]))

  def entries(folder) -> str:
    shards = f"{tmp_path / 'b_1'}:{tmp_path / 'b_2'}"
    return f"{folder}/0|{tmp_path / 'a'},0.7;{folder}/1|{shards},0.3"

  return entries


def test_d12_hosts_with_cold_folders_of_their_own_and_another_number_of_hosts(train, train_hosts, blend, tmp_path):
  """Two hosts without a shared folder train and save; one host and four hosts continue; all read one stream."""
  keys = FLOAT32 | PINNED
  files = {"grain_train_files": blend(tmp_path / "shared")}
  whole = train("", run_name="whole", steps=STEPS, per_device_batch_size=4, **files, **keys)
  assert sorted(whole.losses) == list(range(STEPS)), whole.log[-3000:]

  first, second = train_hosts(
    2, "", lambda host: {"grain_train_files": blend(tmp_path / f"cold{host}")}, steps=2, per_device_batch_size=2, **keys
  )
  assert_same_run(first, whole, range(2))
  assert second.code == 0, second.log[-3000:]
  assert not digests(second.log), "one host logs for all"
  states = [
    json.loads((tmp_path / f"out/run/checkpoints/1/iter/process_{host}-of-2.json").read_text()) for host in range(2)
  ]
  assert states[0] == states[1] and states[0]["next_sample"] == 8

  four = train_hosts(4, "", steps=3, per_device_batch_size=1, **files, **keys)
  assert_same_run(four[0], whole, [2])
  assert [run.code for run in four] == [0] * 4
  one = train("", steps=STEPS, per_device_batch_size=4, grain_worker_count=1, **files, **keys)
  assert_same_run(one, whole, [3])
  assert "Data continues at sample 12 of the global order" in one.log


def test_two_hosts_start_cold_with_one_shared_folder(train, train_hosts, dataset):
  keys = FLOAT32 | {"steps": 3, "enable_checkpointing": False}
  whole = train(dataset, run_name="whole", per_device_batch_size=4, **keys)
  hosts = train_hosts(2, dataset, per_device_batch_size=2, grain_worker_count=1, **keys)
  assert_same_run(hosts[0], whole, range(3))
  assert hosts[1].code == 0, hosts[1].log[-3000:]


def test_a_host_with_another_copy_of_the_data_is_found_before_the_first_step(train_hosts, write_dataset, tmp_path):
  for host in range(2):
    (tmp_path / f"disk{host}").mkdir()
  files = [write_dataset(tmp_path / f"disk{host}" / "corpus", seed=host) for host in range(2)]
  own = lambda host: {"grain_train_files": f"{tmp_path}/cold{host}|{files[host]}"}
  runs = train_hosts(2, "", own, steps=2, per_device_batch_size=2, enable_checkpointing=False)
  for run in runs:
    assert run.code != 0 and not run.losses
    assert "grain_train_files: the data or the order of process 1 is not that of process 0; give all hosts" in run.log
