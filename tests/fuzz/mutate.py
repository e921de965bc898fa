# SPDX-License-Identifier: Apache-2.0
"""Changes bytes and text at random, towards what breaks readers of files and of specs."""

import random

NUMBERS = [0, 1, 2, 7, 8, 16, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63]
WORDS = [
    ";", ",", "|", ":", "://", "gs://b/p", "s3://", "file:///", "memory://m", "http://h:80/x", " ", "\t", "\r", "\0",
    "0", "1", "0.5", "-1", "1e9", "1e400", "nan", "inf", "-0", "1_0", "٣", "½", "99,1", "969,30,1", "a", "text", "",
    "text.idx", "text.bin", "/", "..", "./", "~", "*", "[", "?", "é", "\ud800", "\udcff", "--data-path", "--split",
    "--seq-length", "--train-samples", "--train-iters", "--global-batch-size", "--rampup-batch-size", "'", '"', "\\",
    "--data-args-path",
    "#", "$X", "--per-split-data-args-path", "--train-data-path", "null", "{}",
]  # fmt: skip
JSON = [b"{", b"}", b"[", b"]", b"null", b"true", b"1e999", b"-1", b'"', b"\\u0000", b'"records"', b'"arrays"', b"NaN"]
NPY = [b"'<i4'", b"'<u4'", b"'<i8'", b"'>i4'", b"'|O'", b"'<f4'", b"True", b"False", b"(12,)", b"(-1,)", b"\x93NUMPY"]


def mutate(data: bytes, others: list[bytes], rng: random.Random, most: int) -> bytes:
  """Returns `data` after one to eight changes, at most `most` bytes; `others` are inputs to take pieces from."""
  changed = bytearray(data)
  for _ in range(1 << rng.randrange(4)):
    _change(changed, others, rng)
  return bytes(changed[:most])


def _change(data: bytearray, others: list[bytes], rng: random.Random) -> None:
  at = rng.randint(0, len(data))
  length = rng.randint(1, rng.choice((1, 4, 16, 64)))
  match rng.randrange(9):
    case 0 if data:
      data[at % len(data)] ^= 1 << rng.randrange(8)
    case 1:
      del data[at : at + length]
    case 2:
      data[at:at] = rng.randbytes(length)
    case 3:
      data[at:at] = data[at : at + length] * rng.randint(1, 4)
    case 4:
      data[at : at + length] = rng.randbytes(length)
    case 5 | 6:  # a number in place of one, near an interesting one, where the format has its fields or anywhere
      width = rng.choice((1, 2, 4, 8, 8))
      at = rng.choice((at, at // 4 * 4 + 2, 9, 17, 18, 26, 34))
      number = rng.choice(NUMBERS) + rng.choice((0, 0, 1, -1))
      data[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
    case 7:
      piece = rng.choice(others)
      start = rng.randint(0, len(piece))
      data[at : at + rng.choice((0, length))] = piece[start : start + length]
    case _:
      data[at : at + rng.choice((0, length))] = rng.choice(JSON + NPY)


def mutate_text(data: bytes, others: list[bytes], rng: random.Random, most: int) -> bytes:
  """Like `mutate`, for text in UTF-8 with surrogates: words go in and out."""
  text = data.decode("utf-8", "surrogatepass")
  for _ in range(1 << rng.randrange(4)):
    at, length = rng.randint(0, len(text)), rng.choice((0, 0, 1, 2, 5))
    piece = rng.choice(WORDS)
    if not rng.randrange(5):
      other = rng.choice(others).decode("utf-8", "surrogatepass")
      start = rng.randint(0, len(other))
      piece = other[start : start + rng.randint(1, 20)]
    text = text[:at] + piece + text[at + length :]
  return text[: most // 4].encode("utf-8", "surrogatepass")
