# SPDX-License-Identifier: Apache-2.0
"""The digest of a global batch: its published definition, and that hosts put together give the whole batch's."""

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
import numpy as np
import pytest
import xxhash

from maxtext.input_pipeline import _mmap_digest as mmap_digest
from maxtext.input_pipeline.input_pipeline_utils import MegatronSplitInputsTargets

SHAPES = hnp.array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=9)
TOKENS = hnp.arrays(np.int32, SHAPES, elements=st.integers(0, 99))


def as_documented(tokens) -> str:
  """The lines of the module's docstring."""
  rows = [xxhash.xxh3_64_intdigest(row.astype("<i4").tobytes()) for row in tokens]
  return xxhash.xxh3_64_hexdigest(np.array(rows, "<u8").tobytes())


def test_known_digest():
  assert mmap_digest.batch_digest(np.arange(10).reshape(2, 5)) == "da308fcbf15415e5"


@given(tokens=TOKENS, dtype=st.sampled_from(["int32", "int64", "uint16", ">i4"]))
def test_definition_holds_for_any_integers(tokens, dtype):
  assert mmap_digest.batch_digest(tokens.astype(dtype)) == as_documented(tokens)


@given(tokens=TOKENS)
def test_fields_give_the_raw_tokens_back(tokens):
  split = MegatronSplitInputsTargets(eod_id=3)
  rows = [split.map({"text": row}) for row in tokens]
  batch = {name: np.stack([row[name] for row in rows]) for name in ("inputs", "targets")}
  np.testing.assert_array_equal(mmap_digest.raw_tokens(batch), tokens)


@given(places=st.lists(st.integers(-1, 3), max_size=9), seed=st.integers(0, 99))
def test_hosts_together_give_the_digest_of_the_batch(places, seed):
  """Rows of all hosts in whatever order; those that the step cuts off, at -1, do not count."""
  rng = np.random.default_rng(seed)
  offsets = rng.permutation([*range(len(places)), *([-1] * (seed % 4))])
  tokens = rng.integers(0, 1000, (len(offsets), 6))
  in_order = tokens[[np.flatnonzero(offsets == place)[0] for place in range(len(places))]]
  digests = mmap_digest.in_order(mmap_digest.row_digests(tokens), offsets)
  assert mmap_digest.combine(digests) == mmap_digest.batch_digest(in_order)


@pytest.mark.parametrize("change", ["token", "order"])
def test_a_change_shows(change):
  tokens = np.arange(12).reshape(3, 4)
  other = tokens.copy()
  if change == "token":
    other[1, 3] = 99
  else:
    other[[0, 1]] = other[[1, 0]]
  assert mmap_digest.batch_digest(tokens) != mmap_digest.batch_digest(other)


def test_line():
  assert mmap_digest.line(7, "0123", 28, 4) == "step 7: batch digest 0123 (samples 28 to 31)"
