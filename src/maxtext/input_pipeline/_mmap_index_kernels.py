# SPDX-License-Identifier: Apache-2.0
"""Compiled loops of the index builder, of the sample reader and of the fields. NumPy and Numba only.

`shuffle` reproduces `numpy.random.RandomState.shuffle` exactly: the same permutation and the same generator state
afterwards. NumPy draws, for i from n - 1 down to 1, 32-bit words of the Mersenne Twister (MT19937, Matsumoto and
Nishimura 1998), masks them to the bits of i, rejects what is above i, and swaps elements i and j. Here the words are
made 624 at a time and rejected without a branch, and the swaps follow in a second loop whose accesses do not wait for
the generator: their cache lines are asked for some swaps ahead. `RandomState` is the oracle in the tests.
"""

from __future__ import annotations

from llvmlite import ir
import numba
from numba.core import cgutils, types
from numba.extending import intrinsic
import numpy as np

_WORDS = 624
_BLOCK = 1 << 12  # draws between two runs of swaps: they stay in the first-level cache
_CHUNK = 64  # words that are compared with one bound
_AHEAD = 96  # accesses between the prefetch of a cache line and its use
DRAWS = _BLOCK

# Shuffles of at most this many elements are done here; NumPy draws 64-bit words beyond.
MAX_SHUFFLE = 1 << 32

_pread = types.ExternalFunction("pread", types.intp(types.intc, types.voidptr, types.uintp, types.int64))


def jit(function):
  """Compiles a function without the GIL; kept on disk where a folder for it can be written."""
  try:
    return numba.njit(function, cache=True, nogil=True)
  except RuntimeError:  # no folder for compiled code can be written: compile in every process
    return numba.njit(function, nogil=True)


@intrinsic
def prefetch(typingctx, array, index):
  """Asks for the cache line of array[index], [n] at uint64, into the second-level cache; `index` is not checked.

  Into the second level because the first keeps fewer misses in flight than it takes to hide the memory's latency.
  """
  del typingctx

  def generate(context, builder, signature, arguments):
    data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
    address = builder.bitcast(builder.gep(data, [arguments[1]]), cgutils.voidptr_t)
    word = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, word, word, word])
    prefetch = builder.module.declare_intrinsic("llvm.prefetch", [cgutils.voidptr_t], kind)
    builder.call(prefetch, [address, word(0), word(2), word(1)])  # to be read, locality 2 of 0 to 3, data
    return context.get_dummy_value()

  return types.void(array, types.uint64), generate


@jit
def _next_words(key, out):
  """Advances the generator's 624 words and writes them, tempered, to `out`."""
  upper, lower, matrix = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint32(0x9908B0DF)
  for k in range(227):
    y = (key[k] & upper) | (key[k + 1] & lower)
    key[k] = key[k + 397] ^ (y >> np.uint32(1)) ^ (matrix & (np.uint32(0) - (y & np.uint32(1))))
  for k in range(227, 623):
    y = (key[k] & upper) | (key[k + 1] & lower)
    key[k] = key[k - 227] ^ (y >> np.uint32(1)) ^ (matrix & (np.uint32(0) - (y & np.uint32(1))))
  y = (key[623] & upper) | (key[0] & lower)
  key[623] = key[396] ^ (y >> np.uint32(1)) ^ (matrix & (np.uint32(0) - (y & np.uint32(1))))
  temper(key, out)


@jit
def temper(key, out):
  """Writes the generator's output for its 624 words `key` to `out`, both uint32[624]."""
  for k in range(_WORDS):
    y = key[k]
    y ^= y >> np.uint32(11)
    y ^= (y << np.uint32(7)) & np.uint32(0x9D2C5680)
    y ^= (y << np.uint32(15)) & np.uint32(0xEFC60000)
    out[k] = y ^ (y >> np.uint32(18))


@jit
def _draw(key, words, position, first, count, draws):
  """Fills `draws[:count]` with the partners of elements first, first - 1, ..., and returns the word position."""
  n = np.int64(0)
  i = np.int64(first)
  last = i - count
  while i > last:
    mask = np.uint32(i)
    for shift in (1, 2, 4, 8, 16):
      mask |= mask >> np.uint32(shift)
    low = max(last, np.int64(mask >> np.uint32(1)))  # this mask holds while i > low
    while i > low:
      if position == _WORDS:
        _next_words(key, words)
        position = 0
      stop = min(_WORDS, position + min(_CHUNK, i - low))
      begin = n
      if _any_close(words, position, stop, mask, np.uint32(i)):
        for k in range(position, stop):
          j = words[k] & mask
          draws[n] = j
          n += np.int64(j <= np.uint32(i - (n - begin)))
      else:
        n = _accept(words, position, stop, mask, np.uint32(i), draws, n)
      i -= n - begin
      position = stop
  return position


@jit
def _any_close(words, position, stop, mask, bound):
  """Whether a draw of words[position:stop] may lie on either side of the bound, which falls by 1 with each accepted."""
  close, span = np.uint32(0), np.uint32(stop - position)
  for k in range(np.uint64(position), np.uint64(stop)):
    close |= np.uint32(np.uint32(bound - (words[k] & mask)) < span)
  return close != 0


@jit
def _accept(words, position, stop, mask, bound, draws, n):
  """Appends the draws up to a fixed bound at draws[n], without a branch; returns the new n."""
  end, high = np.uint64(n), np.uint64(bound)
  for k in range(np.uint64(position), np.uint64(stop)):
    j = words[k] & mask
    draws[end] = j
    end += np.uint64(1) - ((high - np.uint64(j)) >> np.uint64(63))
  return np.int64(end)


@jit
def _swap(array, first, count, draws):
  for t in range(count):
    prefetch(array, np.uint64(draws[min(t + _AHEAD, count - 1)]))  # pyrefly: ignore[missing-argument]
    i = np.uint64(first - t)
    j = np.uint64(draws[t])
    value = array[i]
    array[i] = array[j]
    array[j] = value


@jit
def shuffle_steps(array, key, words, position, first, last, draws):
  """Does the shuffle's steps for elements first, first - 1, ..., last + 1.

  Args:
    array: integers, [n], shuffled in place.
    key: uint32[624], state of the generator, updated.
    words: uint32[624], tempered `key`, updated.
    position: words already used, as in `RandomState.get_state()`.
    draws: uint32[DRAWS], scratch.

  Returns:
    The new position.
  """
  while first > last:
    count = min(first - last, _BLOCK)
    position = _draw(key, words, position, first, count, draws)
    _swap(array, first, count, draws)
    first -= count
  return position


@jit
def fill_epochs(out, begin, count):
  """Fills int32[epochs * count] with begin, ..., begin + count - 1 once an epoch."""
  for epoch in range(0, out.shape[0], max(count, 1)):
    for k in range(count):
      out[epoch + k] = begin + k


@jit
def sample_index_rows(sizes, document_index, first, last, state, sequence_length, extra, out):
  """Writes the sample index rows that begin in documents `first` to `last` of the document index.

  A sample's first token is the extra token of the sample before it; so row s >= 1 lies in the document that holds
  token s * L - 1 + extra of the epoch's stream, at the token after it (extra = 0) or at it (extra = 1).

  Args:
    sizes: int32[N], sequence lengths.
    document_index: int32[D], global sequence ids in training order.
    state: int64[3], updated: position of the next document's first token, of the next row's token, next row.
    out: int32 or int64 [samples + 1, 2].
  """
  start, wanted, row = state[0], state[1], state[2]
  rows = out.shape[0]
  shift = np.int64(1 - extra)
  for d in range(first, last):
    prefetch(sizes, np.uint64(document_index[min(d + _AHEAD, last - 1)]))  # pyrefly: ignore[missing-argument]
    end = start + sizes[np.uint64(document_index[d])]
    while wanted < end and row < rows:
      out[row, 0] = d
      out[row, 1] = wanted - start + shift
      row += 1
      wanted += sequence_length
    start = end
  state[0], state[1], state[2] = start, wanted, row


@jit
def read_sample(descriptor, itemsize, sizes, pointers, document_index, sample_index, sample, extra, out):
  """Reads the tokens of one sample from a `.bin` file, a system call per piece.

  Args:
    descriptor: open file descriptor of `.bin`.
    itemsize: bytes of a token.
    sizes, pointers: int32[N] tokens and int64[N] byte offset of each sequence.
    document_index, sample_index: int32[D] and int32 or int64 [samples + 1, 2].
    sample: row of `sample_index`, which must be there; what the arrays say is checked, as their files may have changed.
    extra: tokens after the end that the sample includes, 1 in training.
    out: uint8[capacity], filled from the front.

  Returns:
    Bytes read; or -1 - d if the piece in entry d of the document index could not be read or is outside its sequence, or
    there is no such entry.
  """
  document, offset = np.int64(sample_index[sample, 0]), np.int64(sample_index[sample, 1])
  last, end = np.int64(sample_index[sample + 1, 0]), np.int64(sample_index[sample + 1, 1]) + extra
  if document < 0 or last >= document_index.shape[0]:
    return np.int64(-1)
  filled = np.int64(0)
  while document <= last:
    sequence = document_index[document]
    if sequence < 0 or sequence >= sizes.shape[0]:
      return -1 - document
    stop = end if document == last else np.int64(sizes[sequence])
    wanted = min((stop - offset) * itemsize, np.int64(out.shape[0]) - filled)
    if stop > sizes[sequence] or wanted < 0:
      return -1 - document
    position = pointers[sequence] + offset * itemsize
    while wanted > 0:
      got = _pread(descriptor, out[filled:].ctypes, np.uint64(wanted), position)
      if got <= 0:
        return -1 - document
      filled += got
      position += got
      wanted -= got
    document += 1
    offset = 0
  return filled


@jit
def any_outside(values, low, high):
  """Whether an integer array, [n], has a value outside low..high (both included)."""
  bad = False
  for value in values:
    bad |= (value < low) | (value > high)
  return bad


@jit
def segments_and_positions(tokens, eod_id, min_segment_length, segments, positions):
  """Numbers documents from 1 and tokens within them from 0.

  Args:
    tokens: integers, [length].
    eod_id: ends a document and belongs to it.
    min_segment_length: with 2 or more, a document begins a segment only if it begins more than this after the beginning
      of the last segment; 0 and 1 keep all, as in the release.
    segments, positions: int32[length], filled.
  """
  distance = min_segment_length if min_segment_length > 1 else 0
  segment, first = 1, 0
  for k in range(tokens.shape[0]):
    if k > 0 and tokens[k - 1] == eod_id and k - first > distance:
      segment += 1
      first = k
    segments[k] = segment
    positions[k] = k - first


@jit
def read_samples(descriptor, itemsize, sizes, pointers, document_index, sample_index, samples, extra, out, filled):
  """Calls `read_sample` for several samples.

  Args:
    samples: integers, [n], rows of `sample_index`.
    out: uint8[n, capacity].
    filled: int64[n], what `read_sample` returns for each.
    Others: see `read_sample`.
  """
  for k in range(samples.shape[0]):
    filled[k] = read_sample(
      descriptor, itemsize, sizes, pointers, document_index, sample_index, samples[k], extra, out[k]
    )


@jit
def batch_segments_and_positions(tokens, eod_id, min_segment_length, segments, positions):
  """Calls `segments_and_positions` for each row; tokens integers [n, length], the results int32[n, length]."""
  for k in range(tokens.shape[0]):
    segments_and_positions(tokens[k], eod_id, min_segment_length, segments[k], positions[k])


@jit
def _larger(value, place, other, other_place):
  """Returns the larger of two values and its place; the first on a tie."""
  more = other > value
  return (other if more else value), (other_place if more else place)


@jit
def _blend_few(weights, first, drawn, dataset_index, dataset_sample_index):
  """Does what `blend` does, for up to 8 datasets whose counts stay in registers.

  Those that are not there have weight -1, so that they lag least. Places are floats: the compiler turns choices between
  floats into masks, and choices between integers into jumps that no processor can foresee.
  """
  shares, counts = np.empty(8), np.empty(8)
  for i in range(8):
    there = i < weights.shape[0]
    shares[i], counts[i] = weights[i] if there else -1.0, drawn[i] if there else 0.0
  w0, w1, w2, w3, w4, w5, w6, w7 = (
      shares[0], shares[1], shares[2], shares[3], shares[4], shares[5], shares[6], shares[7],
  )  # fmt: skip
  d0, d1, d2, d3, d4, d5, d6, d7 = (
      counts[0], counts[1], counts[2], counts[3], counts[4], counts[5], counts[6], counts[7],
  )  # fmt: skip
  for k in range(dataset_index.shape[0]):
    draws = max(float(first + k), 1.0)
    low, low_at = _larger(w0 * draws - d0, 0.0, w1 * draws - d1, 1.0)
    other, other_at = _larger(w2 * draws - d2, 2.0, w3 * draws - d3, 3.0)
    high, high_at = _larger(w4 * draws - d4, 4.0, w5 * draws - d5, 5.0)
    last, last_at = _larger(w6 * draws - d6, 6.0, w7 * draws - d7, 7.0)
    low, low_at = _larger(low, low_at, other, other_at)
    high, high_at = _larger(high, high_at, last, last_at)
    _, at = _larger(low, low_at, high, high_at)
    d0 += 1.0 if at == 0.0 else 0.0
    d1 += 1.0 if at == 1.0 else 0.0
    d2 += 1.0 if at == 2.0 else 0.0
    d3 += 1.0 if at == 3.0 else 0.0
    d4 += 1.0 if at == 4.0 else 0.0
    d5 += 1.0 if at == 5.0 else 0.0
    d6 += 1.0 if at == 6.0 else 0.0
    d7 += 1.0 if at == 7.0 else 0.0
    chosen = np.int64(at)
    dataset_index[k] = chosen
    dataset_sample_index[k] = np.int64(drawn[chosen])
    drawn[chosen] += 1.0


@jit
def blend(weights, first, drawn, dataset_index, dataset_sample_index):
  """Draws from several datasets so that the share of each follows its weight: draws `first` and on of a blend.

  Each draw takes the dataset whose count lags its share most, the lowest on ties; in the arithmetic of megatron-core's
  `build_blending_indices`. The two halves are searched side by side, since a search waits for each comparison.

  Args:
    weights: float64[datasets], positive, of sum 1.
    first: draws made before.
    drawn: float64[datasets], how often each dataset was drawn; updated.
    dataset_index, dataset_sample_index: int16[n] and int64[n], filled: dataset of each draw, and its draws before.
  """
  datasets = weights.shape[0]
  if 3 < datasets <= 8:  # fewer are faster below
    _blend_few(weights, first, drawn, dataset_index, dataset_sample_index)
    return
  half = datasets // 2
  for k in range(dataset_index.shape[0]):
    draws = max(float(first + k), 1.0)
    low, low_at = weights[0] * draws - drawn[0], 0
    high, high_at = weights[half] * draws - drawn[half], half
    for i in range(1, half):
      lag = weights[i] * draws - drawn[i]
      more = lag > low
      low = lag if more else low
      low_at = i if more else low_at
      lag = weights[half + i] * draws - drawn[half + i]
      more = lag > high
      high = lag if more else high
      high_at = half + i if more else high_at
    if datasets & 1:
      lag = weights[datasets - 1] * draws - drawn[datasets - 1]
      high_at = datasets - 1 if lag > high else high_at
      high = max(lag, high)
    chosen = high_at if high > low else low_at
    dataset_index[k] = chosen
    dataset_sample_index[k] = np.int64(drawn[chosen])
    drawn[chosen] += 1.0


@jit
def blend_exhaustively(sizes, weights, left, first, drawn, dataset_index, dataset_sample_index):
  """Like `blend`, but draws exactly `sizes[i]` times from dataset i: one that is used up takes no part any more.

  Args:
    sizes: int64[datasets].
    weights: float64[datasets], share of each size in their sum.
    left: int64[datasets + 1], updated: datasets that are not used up, ascending, and their number at the end.
    first, drawn, dataset_index, dataset_sample_index: see `blend`.
  """
  for k in range(dataset_index.shape[0]):
    draws = max(float(first + k), 1.0)
    place = 0
    most = weights[left[0]] * draws - drawn[left[0]]
    for p in range(1, left[-1]):
      lag = weights[left[p]] * draws - drawn[left[p]]
      more = lag > most
      most = lag if more else most
      place = p if more else place
    chosen = left[place]
    dataset_index[k] = chosen
    dataset_sample_index[k] = np.int64(drawn[chosen])
    drawn[chosen] += 1.0
    if drawn[chosen] == sizes[chosen]:
      left[-1] -= 1
      for p in range(place, left[-1]):
        left[p] = left[p + 1]
