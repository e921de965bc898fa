# SPDX-License-Identifier: Apache-2.0
"""Our indices against the release's own on random datasets, where the release agrees with megatron-core.

That is without empty sequences, and with splits whose shares add up the same with and without compensated summation.
"""

import json

import numpy as np
import pytest

from maxtext.input_pipeline import _mmap_index_utils as utils
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter

CASES = 120
RUN_RELEASED = """
import json, sys
import numpy as np
from maxtext.input_pipeline import _mmap_index_utils as utils

folder, results = sys.argv[1], {}
for number, settings in enumerate(json.load(open(f"{folder}/settings.json"))):
  for name, array in zip(("document", "sample", "shuffle"), utils.build_indices([f"{folder}/data-{number}"], **settings)):
    results[f"{number}-{name}"] = array
np.savez(f"{folder}/results.npz", module=np.array(utils.__file__), **results)
"""


def random_settings(rng, tokens) -> dict:
  split = rng.choice(["", "", "50,50", "1,1,2", "75,25"])
  seq_length = int(rng.integers(1, 20))
  settings = {"seq_length": seq_length, "seed": int(rng.integers(2**32)), "split": str(split) or None}
  if split:
    settings["split_index"] = int(rng.integers(2))
  if rng.random() < 0.3 and not split and tokens > seq_length:
    return settings | {"num_epochs": int(rng.integers(1, 4))}
  return settings | {"num_samples": int(rng.integers(1, 5 * tokens // seq_length + 2))}


@pytest.fixture(scope="module")
def released(tmp_path_factory, run_released):
  """A folder of datasets, the settings of each, and the indices that the release's own code builds of them."""
  folder = tmp_path_factory.mktemp("released")
  rng, settings = np.random.default_rng(5), []
  for number in range(CASES):
    lengths = rng.integers(1, rng.choice([2, 5, 60]), rng.integers(4, 40), endpoint=True)
    with IndexedDatasetWriter(f"{folder}/data-{number}", np.uint16) as writer:
      writer.add_documents(np.zeros(lengths.sum(), np.uint16), lengths)
    settings.append(random_settings(rng, int(lengths.sum())))
  (folder / "settings.json").write_text(json.dumps(settings), encoding="utf-8")
  return folder, settings, run_released(folder, RUN_RELEASED, folder)


def test_indices_equal_the_releases(released):
  folder, settings, results = released
  assert len(results) == 3 * CASES
  for number, arguments in enumerate(settings):
    ours = utils.build_indices([f"{folder}/data-{number}"], **arguments)
    for name, array in zip(("document", "sample", "shuffle"), ours, strict=False):
      expected = results[f"{number}-{name}"]
      assert array.dtype == expected.dtype, (arguments, name)
      np.testing.assert_array_equal(array, expected, f"{arguments} {name}")
