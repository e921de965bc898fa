# SPDX-License-Identifier: Apache-2.0
"""What Megatron-LM's command-line arguments say of the data: the datasets, and how many samples of each it asks for.

The rules are those of Megatron's argument parser and training loop, and of megatron-core's `get_blend_from_list` and
`BlendedMegatronDatasetBuilder`. Standard library only.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
import dataclasses
import json
import math
import re
import shlex
from typing import Any

from maxtext.input_pipeline._mmap_files import MMapError

DEFAULT_SPLIT = "969, 30, 1"  # Megatron's, where --data-path comes without --split
PARTS = ("train", "valid", "test")

_FLAGS = """
  reset-position-ids reset-attention-mask eod-mask-loss mock-data full-validation multiple-validation-sets fim-data sft
  dataloader-inter-document-masking allow-ambiguous-pad-tokens skip-train
"""
_VALUES = """
  split data-args-path per-split-data-args-path seq-length seed train-samples train-iters global-batch-size
  micro-batch-size eval-interval eval-iters eval-global-batch-size start-eval-at-iter data-cache-path num-workers
  dataloader-type save-interval vocab-size padded-vocab-size make-vocab-size-divisible-by tensor-model-parallel-size
  mid-level-dataset-surplus object-storage-cache-path phase-transition-iterations step-batch-size-schedule
  fim-rate fim-spm-rate fim-split-sample fim-fragment-rate fim-no-prefix
  fim-prefix-token fim-middle-token fim-suffix-token fim-pad-token fim-eod-token
  tokenizer-type tokenizer-model vocab-file merge-file
"""
_LISTS = "data-path train-data-path valid-data-path test-data-path rampup-batch-size iterations-to-skip"
_UNREAD = """
  tokenizer-type tokenizer-model vocab-file merge-file micro-batch-size test-data-path iterations-to-skip
  phase-transition-iterations step-batch-size-schedule
  fim-rate fim-spm-rate fim-split-sample fim-fragment-rate fim-no-prefix
  fim-prefix-token fim-middle-token fim-suffix-token fim-pad-token fim-eod-token
"""  # no key comes from their values
_PADDING = ("--make-vocab-size-divisible-by", "--tensor-model-parallel-size")  # only read beside --vocab-size
_FLAG, _ONE, _MANY = range(3)
_KINDS = {
    f"--{name}": kind for kind, names in enumerate((_FLAGS, _VALUES, _LISTS)) for name in names.split()
}  # fmt: skip


class Arguments:
  """Megatron's arguments by name, as text; those that do not concern the data are only remembered by name.

  Attributes:
    ignored: names of the other arguments, in order, each once.
  """

  def __init__(self, words: Sequence[str]):
    self._values: dict[str, list[str]] = {}
    ignored: list[str] = []
    for name, values in _groups(words):
      if name in _KINDS:
        self._values[name] = _checked(name, values)  # the last one counts
      elif (meant := name.replace("_", "-")) in _KINDS:
        raise MMapError(f"{name} is not an argument of Megatron-LM; write {meant}.")
      else:
        ignored.append(name)
    self.ignored = tuple(dict.fromkeys(ignored))
    self._check_variables()

  def _check_variables(self) -> None:
    """Refuses variables of a shell script in values that are read."""
    unread = {f"--{name}" for name in _UNREAD.split()}
    if "--vocab-size" not in self._values or "--padded-vocab-size" in self._values:
      unread.update(_PADDING)
    found = {
        f"{variable if variable != '$' else '$(...)'} ({name})": None
        for name, values in self._values.items()
        if name not in unread
        for value in values
        for variable in re.findall(r"\$(?:\{[^}]*\}?|\w+|[^\w{]?)", value)
    }
    if found:
      raise MMapError(
          f"no value is known for {', '.join(found)}; write the value in place of each variable of a shell script."
      )

  def __contains__(self, name: str) -> bool:
    return name in self._values

  def names(self) -> tuple[str, ...]:
    """The arguments that concern the data, in order."""
    return tuple(self._values)

  def text(self, name: str, default: str | None = None) -> str | None:
    return self._values[name][0] if name in self._values else default

  def words(self, name: str) -> list[str] | None:
    return self._values.get(name)

  def given(self, name: str, least: int = 0) -> int | None:
    """Returns a whole number, or None if the argument is not there."""
    text = self.text(name)
    return None if text is None else self._number(name, text, least, int, "a whole number")

  def whole(self, name: str, default: int, least: int = 0) -> int:
    value = self.given(name, least)
    return default if value is None else value

  def real(self, name: str, default: float) -> float:
    text = self.text(name)
    return default if text is None else self._number(name, text, 0, float, "a number")

  def _number(self, name: str, text: str, least: int, read: Callable, noun: str) -> Any:
    value = _read_number(text, read)
    if value is None or not least <= value < math.inf:
      raise MMapError(f"{name} is {text!r}; expected {noun}, {least} or more.")
    return value

  def ramp(self) -> tuple[int, int, int] | None:
    """Returns --rampup-batch-size: first batch, increment, samples."""
    words = self.words("--rampup-batch-size")
    if words is None:
      return None
    numbers = [number for word in words if (number := _read_number(word, int)) is not None]
    if len(numbers) != 3 or len(words) != 3 or min(numbers[:2]) < 1 or numbers[2] < 0:
      raise MMapError(
          f"--rampup-batch-size is {' '.join(words)!r}; expected three numbers: first batch, increment and samples."
      )
    first, increment, samples = numbers
    return first, increment, samples


def _groups(words: Sequence[str]) -> Iterable[tuple[str, list[str]]]:
  """Yields each argument's name with the words after it; words before the first (a program's name) are left out."""
  name, values = "", []
  for word in words:
    if re.match(r"--[A-Za-z]", word):
      if name:
        yield name, values
      name, equals, value = word.partition("=")
      values = [value] if equals else []
    elif word == "--":
      if name:
        yield name, values
      name, values = "", []
    else:
      values.append(word)
  if name:
    yield name, values


def _checked(name: str, values: list[str]) -> list[str]:
  """Returns the words that belong to a known argument, where it has as many as it needs."""
  values = {_FLAG: values[:0], _ONE: values[:1], _MANY: values}[_KINDS[name]]
  if not values and _KINDS[name] != _FLAG:
    raise MMapError(f"{name} has no value; give one.")
  return values


def _read_number(text: str, read: Callable) -> Any:
  try:
    return read(text)
  except ValueError:
    return None


def words_of_script(text: str) -> list[str]:
  """Splits text to words as a shell does: a list of arguments, or a launch script with variables that hold some.

  A variable that the script sets once, to plain text, is replaced by it. The end of a variable that holds arguments is
  the word "--", which ends the list of an argument too.
  """
  try:
    return _split_words(_with_values(re.sub(r"\\\r?\n", " ", text)))
  except ValueError as error:
    raise MMapError(f"the arguments cannot be split to words ({error}); check their quotes.") from None


_PLAIN = re.compile(
    r"""^[ \t]*(?:export[ \t]+)?(\w+)=(["']?)(?!--)([^\s"'$`()#;&|<>\\]+)\2[ \t]*(?:[ \t]#.*)?\r?$""", re.MULTILINE
)
_COMMENT = re.compile(r"(?:^|(?<=[ \t]))#.*", re.MULTILINE)
_SET = re.compile(r"(?<![\w$.{-])(?:(?:for|read)[ \t]+(\w+)|(\w+)\+?=)")


def _with_values(text: str) -> str:
  """Puts in the values of variables that a script sets in one place, by a line of its own, to plain text."""
  times = collections.Counter(looped or name for looped, name in _SET.findall(_COMMENT.sub("", text)))
  values = {name: value for name, _, value in _PLAIN.findall(text) if times[name] == 1}
  return re.sub(r"(?<!\\)\$(?:\{(\w+)\}|(\w+))", lambda found: values.get(found[1] or found[2], found[0]), text)


def _split_words(text: str) -> list[str]:
  lexer = shlex.shlex(text, posix=True, punctuation_chars="()")
  lexer.whitespace_split = True
  words: list[str] = []
  for word in lexer:
    variable = re.fullmatch(r"\w+\+?=(\s*--.*)", word, re.DOTALL)
    if variable:  # NAME="--first ... --second ..."
      words += ["--", *_split_words(variable[1]), "--"]
    elif re.match(r"\s*--[\w-]+\s", word):  # "--first ...", an argument and its values in one word
      words += shlex.split(word)
    elif set(word) <= set("()"):  # NAME=( --first ... --second ... )
      words[-1:] = [word for word in words[-1:] if not re.fullmatch(r"\w+\+?=", word)]
      words.append("--")
    else:
      words.append(word)
  return words


@dataclasses.dataclass(frozen=True)
class Blend:
  """The datasets of one part.

  Attributes:
    prefixes: as written.
    weights: as written, or None where there are none; then several are blended by their lengths.
  """

  prefixes: tuple[str, ...]
  weights: tuple[str, ...] | None

  def numbers(self) -> list[str]:
    """Returns the prefixes that look like weights, where there are no weights."""
    return [] if self.weights else [prefix for prefix in self.prefixes if _read_number(prefix, float) is not None]


def read_blend(words: Sequence[str] | None, name: str) -> Blend | None:
  """Reads a list of prefixes, or of weights and prefixes in turn, by the rules of megatron-core's `get_blend_from_list`.

  Raises:
    MMapError: if only some of the datasets have a weight, or a weight cannot be used.
  """
  if not words:
    return None
  numbers = [_read_number(word, float) for word in words[::2]]
  if len(words) % 2 or all(number is None for number in numbers):
    return Blend(tuple(map(str.strip, words)), None)
  for word, number in zip(words[::2], numbers, strict=True):
    if number is None or not math.isfinite(number) or number < 0:
      raise MMapError(f"{name}: {word!r} stands for a weight; expected a finite number of 0 or more before each dataset.")
  if not sum(number for number in numbers if number):
    raise MMapError(f"{name}: the weights add up to 0; give a dataset a positive one.")
  return Blend(tuple(map(str.strip, words[1::2])), tuple(words[::2]))


@dataclasses.dataclass(frozen=True)
class MegatronData:
  """What a run of Megatron reads.

  Attributes:
    parts: blends of train, valid and test; with a split, the same one three times.
    split: shares such as "969,30,1", or "" where each part has datasets of its own.
    samples: what it asks for in each part; None for one pass.
  """

  parts: tuple[Blend | None, ...]
  split: str
  samples: tuple[int, int | None, int]
  seq_length: int
  seed: int
  global_batch_size: int
  eval_batch_size: int
  train_iters: int
  eval_interval: int
  eval_iters: int
  surplus: float

  def evaluates(self) -> bool:
    valid = self.parts[1] is not None and (not self.split or shares_of(self.split)[1] > 0)
    return valid and self.samples[1] != 0 and self.eval_interval > 0

  def requested(self, part: int) -> int | None:
    """Samples to ask for of a part: for one dataset, those of the dataset; for several, those of the blend.

    A split blend of one weighted dataset is a blend to Megatron: it asks the dataset for the surplus too.
    """
    samples, blend = self.samples[part], self.parts[part]
    if samples is None or blend is None or len(blend.prefixes) > 1 or blend.weights is None or not self.split:
      return samples
    return math.ceil(samples * (1 + self.surplus))


def read_data(arguments: Arguments) -> MegatronData:
  """Works out what a run with these arguments reads.

  Raises:
    MMapError: if an argument is missing or cannot be used, or if Megatron would refuse them.
    OSError: if a file that an argument names cannot be read.
  """
  parts, split = _parts(arguments)
  seq_length = _required(arguments, "--seq-length")
  global_batch_size = _required(arguments, "--global-batch-size")
  eval_batch_size = arguments.whole("--eval-global-batch-size", global_batch_size, 1)
  train_samples, train_iters = _length(arguments, global_batch_size)
  eval_interval, eval_iters = arguments.whole("--eval-interval", 1000), arguments.whole("--eval-iters", 100)
  evaluations = train_iters // eval_interval + 1 if eval_interval else 0
  if eval_interval and (start := arguments.whole("--start-eval-at-iter", 0)):
    evaluations = max(evaluations - start // eval_interval, 0)
  eval_samples = None if "--full-validation" in arguments else evaluations * eval_iters * eval_batch_size
  return MegatronData(
      parts,
      split,
      (train_samples, eval_samples, eval_iters * eval_batch_size),
      seq_length,
      arguments.whole("--seed", 1234),
      global_batch_size,
      eval_batch_size,
      train_iters,
      eval_interval,
      eval_iters,
      arguments.real("--mid-level-dataset-surplus", 0.005),
  )


def _required(arguments: Arguments, name: str) -> int:
  value = arguments.given(name, 1)
  if value is None:
    advice = ""
    if name == "--global-batch-size":
      advice = " (without it, Megatron takes --micro-batch-size times the data-parallel size)"
    raise MMapError(f"{name} is missing; give it{advice}.")
  return value


def _length(arguments: Arguments, global_batch_size: int) -> tuple[int, int]:
  """Returns the training samples and iterations."""
  samples, iters = arguments.given("--train-samples", 1), arguments.given("--train-iters", 1)
  if (samples is None) == (iters is None):
    raise MMapError("the length of the run is not clear; give either --train-iters or --train-samples.")
  ramp = arguments.ramp()
  if samples is None:
    assert iters is not None
    if ramp:
      raise MMapError("--rampup-batch-size comes with --train-iters, which Megatron refuses; give --train-samples.")
    return iters * global_batch_size, iters
  return samples, ramped_iterations(samples, global_batch_size, ramp)


def ramped_iterations(samples: int, global_batch_size: int, ramp: tuple[int, int, int] | None) -> int:
  """Returns the iterations that take `samples` samples, as Megatron counts them.

  Args:
    ramp: first batch size, increment, and samples over which it grows.
  """
  if ramp is None:
    return samples // global_batch_size
  first, increment, over = ramp
  if first > global_batch_size or (global_batch_size - first) % increment:
    raise MMapError(
        f"--rampup-batch-size does not lead from {first} by steps of {increment} to --global-batch-size "
        f"{global_batch_size}, and Megatron refuses it; change one of them."
    )
  steps = (global_batch_size - first) // increment
  consumed = iterations = 0
  while steps and over and consumed <= min(over, samples):
    consumed += first + int(consumed / (over / steps)) * increment
    iterations += 1
  return iterations + max(samples - consumed, 0) // global_batch_size


def _parts(arguments: Arguments) -> tuple[tuple[Blend | None, ...], str]:
  """Returns the blends of the parts, and the split they have in common or ""."""
  together = [name for name in ("--data-path", "--data-args-path") if name in arguments]
  each = (*(f"--{part}-data-path" for part in PARTS), "--per-split-data-args-path")
  apart = [name for name in each if name in arguments]
  mock = ["--mock-data"] if "--mock-data" in arguments else []
  if len(together) + bool(apart) + len(mock) != 1 or len(apart) > 1 and apart[-1] == "--per-split-data-args-path":
    found = ", ".join(together + apart + mock) or "none"
    raise MMapError(f"one source of data is needed ({found} given); give --data-path, or paths for each part.")
  if mock:
    return (None,) * len(PARTS), ""
  if together:
    return (_together(arguments),) * 3, _split(arguments)
  if "--split" in arguments:
    raise MMapError(f"--split does not go with {apart[0]}, which names the data of each part; leave one out.")
  parts = _apart(arguments)
  if parts[0] is None:
    raise MMapError(f"{', '.join(apart)}: no data for training; give --train-data-path.")
  return parts, ""


def _split(arguments: Arguments) -> str:
  text = arguments.text("--split", DEFAULT_SPLIT if "--data-path" in arguments else None)
  if text is None:
    raise MMapError("--data-args-path comes without --split, which Megatron refuses; give --split.")
  shares = re.findall(r"[.0-9]+", text)  # whatever separates them, as Megatron reads it
  if not 1 <= len(shares) <= len(PARTS) or not sum(_read_number(share, float) or 0 for share in shares):
    raise MMapError(f"--split is {text!r}; expected one to three shares such as 969,30,1.")
  return ",".join(shares)


def shares_of(split: str) -> list[float]:
  """Returns the three shares of a split as written; missing ones are 0."""
  shares = [float(share) for share in split.split(",")]
  return shares + [0.0] * (len(PARTS) - len(shares))


def _together(arguments: Arguments) -> Blend | None:
  path = arguments.text("--data-args-path")
  if path is None:
    return read_blend(arguments.words("--data-path"), "--data-path")
  with open(path, encoding="utf-8") as file:
    blend = read_blend(file.read().split(), path)
  if blend is None:
    raise MMapError(f"{path} is empty; expected the words of --data-path.")
  return blend


def _apart(arguments: Arguments) -> tuple[Blend | None, ...]:
  path = arguments.text("--per-split-data-args-path")
  if path is None:
    return tuple(read_blend(arguments.words(f"--{part}-data-path"), f"--{part}-data-path") for part in PARTS)
  with open(path, encoding="utf-8") as file:
    try:
      lists = json.load(file)
    except ValueError as error:
      raise MMapError(f"{path} is not JSON ({error}); expected an object of train, valid and test.") from None
  if not isinstance(lists, dict):
    raise MMapError(f"{path} is no JSON object; expected one of train, valid and test.")
  return tuple(read_blend(_words(lists.get(part), f"{path}: {part}"), f"{path}: {part}") for part in PARTS)


def _words(value, where: str) -> list[str]:
  """Returns the words of a part in a JSON file, where they are a text or a list."""
  words = value.split() if isinstance(value, str) else value or []
  if not isinstance(words, list) or not all(isinstance(word, str | int | float) for word in words):
    raise MMapError(f"{where} is {value!r}; expected a list of datasets, or of weights and datasets in turn.")
  return [str(word) for word in words]
