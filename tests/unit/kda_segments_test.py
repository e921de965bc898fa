# SPDX-License-Identifier: Apache-2.0
"""segment_ids_to_cu_seqlens: the specification's examples, its three traps, and random rows against a plain loop."""

from hypothesis import given
from hypothesis import strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtext.layers.attention_kda import segment_ids_to_cu_seqlens
from support import one_sentence

convert = jax.jit(segment_ids_to_cu_seqlens, static_argnums=1)


def offsets_of(rows, room: int) -> list[int]:
  return convert(jnp.asarray(rows, jnp.int32), room).tolist()


def slow_offsets(rows, room: int) -> list[int]:
  """The same, token by token."""
  begins, end = [], 0
  for number, row in enumerate(rows):
    begun, before = False, 0
    for place, value in enumerate(row):
      token = number * len(row) + place
      if value and value != before:
        begins.append(token if begun else number * len(row))
        begun = True
      end = token + 1 if value else end
      before = value
  if not begins:
    return [0] * (room + 1)
  offsets = [0, *begins[1:], end]
  if len(begins) > room:
    return [*offsets[:room], -1]
  return offsets + [end] * (room + 1 - len(offsets))


@pytest.mark.parametrize(
    "row, expected",
    [
        ([1, 1, 2, 2, 0, 0], [0, 2, 4, 4, 4]),
        ([1, 1, 1, 2, 2, 2], [0, 3, 6, 6, 6]),
        ([1, 1, 1, 1, 0, 0], [0, 4, 4, 4, 4]),
        ([1, 2, 3, 4], [0, 1, 2, 3, 4]),
        ([1, 1, 3, 3], [0, 2, 4, 4, 4]),
        ([7], [0, 1, 1, 1, 1]),
    ],
)
def test_examples(row, expected):
  assert offsets_of([row], 4) == expected


def test_a_row_start_is_a_border_between_equal_ids():
  assert offsets_of([[1, 1], [1, 1]], 4) == [0, 2, 4, 4, 4]
  assert offsets_of([[1, 1, 0], [1, 1, 0]], 4) == [0, 3, 5, 5, 5]


def test_padding_anywhere():
  assert offsets_of([[0, 0, 1, 1]], 3) == [0, 4, 4, 4], "in front: the first segment's"
  assert offsets_of([[1, 0, 2, 2]], 3) == [0, 2, 4, 4], "between: the segment's before it"
  assert offsets_of([[1, 0, 0], [0, 1, 2]], 3) == [0, 3, 5, 6], "at a row's start: that row's first segment's"
  assert offsets_of([[0, 0], [5, 5]], 3) == [0, 4, 4, 4]
  assert offsets_of([[5, 5], [0, 0], [5, 0]], 3) == [0, 4, 5, 5]
  assert offsets_of([[0, 0], [0, 0]], 3) == [0, 0, 0, 0]


def test_more_segments_than_room_end_in_minus_one():
  assert offsets_of([[1, 2, 3, 4]], 3) == [0, 1, 2, -1]
  assert offsets_of([[1, 1], [1, 1]], 1) == [0, -1]
  assert offsets_of([[1, 2, 3, 4]], 4)[-1] == 4


# Few shapes, so that few compilations serve all examples.
@given(st.sampled_from([(1, 9, 3), (3, 5, 4), (2, 16, 8)]), st.integers(0, 3), st.data())
def test_random_rows_are_what_a_loop_finds(sizes, ids, data):
  rows, length, room = sizes
  values = data.draw(st.lists(st.integers(0, ids), min_size=rows * length, max_size=rows * length))
  grid = np.array(values).reshape(rows, length)
  assert offsets_of(grid, room) == slow_offsets(grid.tolist(), room)


@pytest.mark.parametrize("ids", [np.ones(4, np.int32), np.ones((1, 4), np.float32)], ids=["one axis", "floats"])
def test_other_arrays_are_refused(ids):
  with pytest.raises(ValueError, match="segment_ids has shape") as caught:
    segment_ids_to_cu_seqlens(jnp.asarray(ids), 4)
  one_sentence(caught.value)


def test_no_room_is_refused():
  with pytest.raises(ValueError, match="max_segs is 0") as caught:
    segment_ids_to_cu_seqlens(jnp.ones((1, 4), jnp.int32), 0)
  one_sentence(caught.value)
