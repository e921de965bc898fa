# SPDX-License-Identifier: Apache-2.0
"""A digest of a global batch: equal for equal tokens in equal order, whatever the hosts, workers or framework.

With the L + 1 raw tokens of each row, in the order of the global batch (row r of step s is sample s * B + r):

    rows = [xxhash.xxh3_64_intdigest(row.astype("<i4").tobytes()) for row in tokens]  # tokens: [B, L + 1]
    digest = xxhash.xxh3_64_hexdigest(np.array(rows, "<u8").tobytes())

The raw tokens are the inputs followed by the last target. Masks and positions take no part. NumPy and xxhash only.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xxhash


def raw_tokens(batch: Mapping[str, np.ndarray]) -> np.ndarray:
  """Returns the raw tokens of a batch of fields, int32[rows, L + 1]; `inputs` and `targets` are [rows, L]."""
  return np.concatenate([batch["inputs"], batch["targets"][:, -1:]], axis=1).astype(np.int32)


def row_digests(tokens: np.ndarray) -> np.ndarray:
  """Returns a digest of each row of tokens, integers of any type [rows, L + 1], as uint64[rows]."""
  rows = np.ascontiguousarray(tokens, dtype="<i4")
  return np.array([xxhash.xxh3_64_intdigest(row) for row in rows], np.uint64)


def combine(digests: np.ndarray) -> str:
  """Returns the digest of a batch, 16 hexadecimal digits, from those of its rows in global order, uint64[rows]."""
  return xxhash.xxh3_64_hexdigest(np.asarray(digests).astype("<u8").tobytes())


def batch_digest(tokens: np.ndarray) -> str:
  """Returns the digest of a whole batch of raw tokens, integers [B, L + 1]: for Megatron, its `text` rows of a step."""
  return combine(row_digests(tokens))


def in_order(digests: np.ndarray, offsets: np.ndarray) -> np.ndarray:
  """Returns the rows that a step uses in global order, from those of all hosts.

  Args:
    digests: [rows].
    offsets: [rows], place of each in the global batch; -1 for a row that the step cuts off.
  """
  used = offsets >= 0
  return digests[used][np.argsort(offsets[used])]


def line(step: int, digest: str, first_sample: int, samples: int) -> str:
  """Returns what a run logs of the batch of a step."""
  return f"step {step}: batch digest {digest} (samples {first_sample} to {first_sample + samples - 1})"
