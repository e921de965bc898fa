# SPDX-License-Identifier: Apache-2.0
"""What no bit of a result may depend on: a document's neighbours in the row, and later tokens (K5)."""

import numpy as np
import pytest

from kda_support import CHUNKED, IMPLEMENTATIONS, LENGTH, LONG_RUN, ROWS, TOKENS, draw, row_of, run

PER_TOKEN = ("o", *(f"d{name}" for name in TOKENS))
PREFIX = 68


def run_in_place(document, start, others, runs, implementation):
  """Results of a document's tokens, placed among others in every row; `runs` are the ids of the row.

  Every row gives the same bits, and one is returned.
  """
  inside = slice(start, start + document["q"].shape[1])
  placed = dict(others)
  for name in (*TOKENS, "do"):
    placed[name] = others[name].copy()
    placed[name][:, inside] = document[name]
  found = run(placed, implementation, segment_ids=np.tile(row_of(*runs), (ROWS, 1)))
  for name in PER_TOKEN:
    assert_same_bits(found[name][:1, inside], found[name][1:, inside], name)
  return {name: found[name][0, inside] for name in PER_TOKEN}


def assert_same_bits(found, expected, message):
  bits = (np.ascontiguousarray(x).view(np.uint32) for x in (found, expected))
  np.testing.assert_array_equal(*bits, err_msg=str(message))


def without_numbers_in_states(arrays):
  return arrays | {name: np.zeros_like(arrays[name]) for name in ("initial_state", "dfinal")}


@pytest.mark.parametrize("implementation", CHUNKED)
@pytest.mark.parametrize("start, length", [(20, 46), (64, 64), (63, 2), (40, 1)])
def test_a_document_does_not_depend_on_its_neighbours(start, length, implementation):
  """Other tokens, decays, borders and states around it; padding around it, and no states."""
  document = draw(1, rows=1, length=length)
  around = [(1, start), (2, length), (3, LENGTH)]
  many = [*((3 + n % 2, 7) for n in range(start // 7)), (5, start % 7), (2, length), (0, 1), (6, LENGTH)]
  alone = [(0, start), (2, length)]
  expected = run_in_place(document, start, draw(2), around, implementation)
  for others, runs in ((draw(3, strength=30), many), (without_numbers_in_states(draw(4)), alone)):
    found = run_in_place(document, start, others, runs, implementation)
    for name in PER_TOKEN:
      assert_same_bits(found[name], expected[name], name)


@pytest.mark.parametrize("implementation", CHUNKED)
@pytest.mark.parametrize("start, length", [(20, 46), (0, 64), (63, 2), (40, 1)])
def test_a_document_does_not_depend_on_the_number_of_its_chunk(start, length, implementation):
  """A chunk later, between other documents. States are zero, since the first and the last document have them."""
  document = draw(1, rows=1, length=length)
  found = [
      run_in_place(
          document, place, without_numbers_in_states(draw(place)), [(1, place), (2, length), (3, LENGTH)], implementation
      )
      for place in (start, start + 64)
  ]
  for name in PER_TOKEN:
    assert_same_bits(found[1][name], found[0][name], name)


def cut(arrays, length):
  """The first tokens of a row, with cotangents for the outputs of the prefix only."""
  tokens = {name: arrays[name][:, :length] for name in (*TOKENS, "do")}
  tokens["do"] = np.where(np.arange(length)[:, None, None] < PREFIX, tokens["do"], 0)
  return tokens | {"initial_state": arrays["initial_state"]}


def ids_up_to(end, length):
  return (np.arange(length) < end).astype(np.int32)[None]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_k5_causality(implementation):
  """Rows of 80 and of 70 tokens that differ from token 68 on, or have padding there. Long runs take rows of 68 too."""
  arrays, other = draw(5, rows=1, length=80), draw(6, rows=1, length=80, strength=5)
  alone = run(cut(arrays, 80), implementation, segment_ids=ids_up_to(PREFIX, 80))
  cases = [(length, names) for length in (80, 70) for names in ((), ("g",), ("k",), ("v",), TOKENS)]
  for length, names in cases + [(PREFIX, ())] * LONG_RUN:
    changed = {name: np.concatenate([arrays[name][:, :PREFIX], other[name][:, PREFIX:]], axis=1) for name in names}
    found = run(cut(arrays | changed, length), implementation, segment_ids=ids_up_to(length, length))
    assert_same_bits(found["dinitial_state"], alone["dinitial_state"], (length, names))
    for name in PER_TOKEN:
      assert_same_bits(found[name][:, :PREFIX], alone[name][:, :PREFIX], (length, names, name))
      assert name == "o" or not found[name][:, PREFIX:].any(), (length, names, name)
