# SPDX-License-Identifier: Apache-2.0
"""What several test files use; on the path of all tests, see pyproject.toml."""

import numpy as np
import pytest

from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter, MMapError


def refusal(action, *arguments, **settings) -> str:
  """The message of the MMapError that an action raises: one sentence."""
  with pytest.raises(MMapError) as caught:
    action(*arguments, **settings)
  message = str(caught.value)
  assert "\n" not in message and message.endswith("."), message
  return message


def one_sentence(error: Exception) -> str:
  text = str(error)
  assert text.endswith(".") and "\n" not in text and ". " not in text, text
  return text


def content_of(path: str) -> bytes:
  with open(path, "rb") as file:
    return file.read()


def write_numbered(prefix, lengths, first: int = 0) -> str:
  """Writes sequences of tokens 100 * (first + sequence) + position, each a document; returns the prefix."""
  with IndexedDatasetWriter(str(prefix), np.int32) as writer:
    for row, length in enumerate(lengths, first):
      writer.add_sequence(100 * row + np.arange(length))
      writer.end_document()
  return str(prefix)


class TextRows:
  """The samples of a source as the rows of a global order, tokens alone."""

  def __init__(self, source):
    self.source = source

  def __len__(self):
    return len(self.source)

  def rows(self, indices):
    return {"text": self.source.read_rows(indices)}
