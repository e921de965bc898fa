# SPDX-License-Identifier: Apache-2.0
"""Tests of tools/data_processing/mmap_tokenize.py and the library under it."""

import importlib.util
import json
from pathlib import Path
import subprocess
import sys

import numpy as np
import pytest

import maxtext
from maxtext.input_pipeline import _mmap_tokenize as library
from maxtext.input_pipeline._mmap_indexed_dataset import MMapError, MMapIndexedDataset

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "data_processing" / "mmap_tokenize.py"
LLAMA2_EOS = 2
WORDS = ["the", "cat", "sat", "on", "a", "mat", "</s>", "<s>"]
WORD_EOS = WORDS.index("</s>")


@pytest.fixture(scope="module")
def tool():
  spec = importlib.util.spec_from_file_location("mmap_tokenize", SCRIPT)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


@pytest.fixture(scope="module")
def llama2():
  """Path of the SentencePiece model in the release's assets."""
  found = [Path(folder) / "assets" / "tokenizers" / "tokenizer.llama2" for folder in maxtext.__path__]
  return str(next(path for path in found if path.is_file()))


@pytest.fixture(scope="module")
def sentencepiece_model(llama2):
  return pytest.importorskip("sentencepiece").SentencePieceProcessor(model_file=llama2)


@pytest.fixture
def words(tmp_path):
  """Folder of a Hugging Face tokenizer of eight words that would add BOS if it were asked for special tokens."""
  tokenizers = pytest.importorskip("tokenizers")
  model = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
  model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  bos = ("<s>", WORDS.index("<s>"))
  model.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
  model.enable_truncation(2)
  folder = tmp_path / "words"
  folder.mkdir()
  model.save(str(folder / "tokenizer.json"))
  config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
  (folder / "tokenizer_config.json").write_text(json.dumps(config))
  return folder


def write(path: Path, data: str | bytes) -> str:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_bytes(data.encode() if isinstance(data, str) else data)
  return str(path)


def bytes_of(prefix) -> tuple[bytes, bytes]:
  return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def documents_of(prefix) -> list[list[int]]:
  """Tokens of each document, read back; no document may have two sequences."""
  dataset = MMapIndexedDataset(str(prefix))
  counts = np.diff(dataset.doc_idx)
  assert counts.max() <= 1
  return [dataset[first].tolist() if count else [] for first, count in zip(dataset.doc_idx, counts, strict=False)]


def tokenize(tool, *arguments) -> None:
  assert tool.main([str(argument) for argument in (*arguments, "--workers", "1")]) == 0


def error_of(tool, capsys, output: Path, *arguments) -> str:
  """Runs the tool, which must fail with one sentence and leave no file; returns the sentence."""
  arguments = ["--output-prefix", output, "--workers", "1", *arguments]
  assert tool.main([str(argument) for argument in arguments]) == 1
  captured = capsys.readouterr()
  assert captured.out == ""
  assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
  assert not list(output.parent.glob(output.name + "*"))
  return captured.err.removeprefix("error: ").strip()


def test_a_line_is_a_document_and_an_empty_line_one_without_sequence(tool, llama2, sentencepiece_model, tmp_path):
  lines = ["hello world", "", "  two\tspaces ", "", "", "naïve 日本語 🙂", "\x0cform\u2028feed"]
  source = write(tmp_path / "text.txt", "\n".join(lines))
  tokenize(tool, "--input", source, "--output-prefix", tmp_path / "out", "--tokenizer", llama2)
  assert documents_of(tmp_path / "out") == [sentencepiece_model.encode(line) for line in lines]
  dataset = MMapIndexedDataset(str(tmp_path / "out"))
  assert (len(dataset), dataset.dtype) == (4, np.uint16)
  assert dataset.doc_idx.tolist() == [0, 1, 1, 2, 2, 2, 3, 4]


def test_append_eod_ends_documents_that_have_tokens(tool, llama2, sentencepiece_model, tmp_path):
  source = write(tmp_path / "text.txt", "hello\n\nworld\n")
  tokenize(tool, "--input", source, "--output-prefix", tmp_path / "out", "--tokenizer", llama2, "--append-eod")
  hello, world = sentencepiece_model.encode(["hello", "world"])
  assert documents_of(tmp_path / "out") == [[*hello, LLAMA2_EOS], [], [*world, LLAMA2_EOS]]


def test_eod_id_overrules_the_tokenizers(tool, words, tmp_path):
  source = write(tmp_path / "text.txt", "the cat")
  arguments = ("--output-prefix", tmp_path / "out", "--tokenizer", words / "tokenizer.json")
  tokenize(tool, "--input", source, *arguments, "--append-eod", "--eod-id", 99)
  assert documents_of(tmp_path / "out") == [[0, 1, 99]]


@pytest.mark.parametrize("ending", ["\n", "\r\n", ""])
def test_line_ends_and_byte_order_mark_are_no_text(tool, llama2, sentencepiece_model, tmp_path, ending):
  source = write(tmp_path / "text.txt", "\ufeffone\r\ntwo" + ending)
  tokenize(tool, "--input", source, "--output-prefix", tmp_path / "out", "--tokenizer", llama2)
  assert documents_of(tmp_path / "out") == sentencepiece_model.encode(["one", "two"])


def test_a_file_can_be_a_document(tool, llama2, sentencepiece_model, tmp_path):
  texts = {"b.py": "x = 1\n\ny = 2\n", "a.py": "", "c/d.py": "z\r\n", "c/skipped.md": "no"}
  for name, text in texts.items():
    write(tmp_path / "in" / name, text)
  arguments = ("--output-prefix", tmp_path / "out", "--tokenizer", llama2, "--suffix", ".py", "--document", "file")
  tokenize(tool, "--input", tmp_path / "in", *arguments)
  assert documents_of(tmp_path / "out") == [sentencepiece_model.encode(texts[n]) for n in ("a.py", "b.py", "c/d.py")]


def test_jsonl_lines_are_documents(tool, llama2, sentencepiece_model, tmp_path):
  texts = ["two\nlines", "", "é 日本"]
  lines = [json.dumps({"id": 1, "body": text}) for text in texts]
  source = write(tmp_path / "data.jsonl", "\n".join([*lines, ""]) + "\n")
  arguments = ("--output-prefix", tmp_path / "out", "--tokenizer", llama2, "--json-key", "body")
  tokenize(tool, "--input", source, *arguments)
  assert documents_of(tmp_path / "out") == [*sentencepiece_model.encode(texts), []]


def test_format_overrules_the_suffix(tool, words, tmp_path):
  as_json = write(tmp_path / "data.txt", '{"text": "the cat"}\n')
  as_text = write(tmp_path / "data.json", "on the mat\n")
  for source, kind, expected in ((as_json, "jsonl", [0, 1]), (as_text, "text", [3, 0, 5])):
    arguments = ("--output-prefix", tmp_path / kind, "--tokenizer", words / "tokenizer.json", "--format", kind)
    tokenize(tool, "--input", source, *arguments)
    assert documents_of(tmp_path / kind) == [expected]


@pytest.mark.parametrize("name", ["", "tokenizer.json"])
def test_hugging_face_tokenizers_add_and_cut_nothing(tool, words, tmp_path, name):
  if not name:
    pytest.importorskip("transformers")
  source = write(tmp_path / "text.txt", "the cat sat on the mat\n\ncat\n")
  arguments = ("--output-prefix", tmp_path / "out", "--tokenizer", words / name, "--append-eod")
  tokenize(tool, "--input", source, *arguments)
  assert documents_of(tmp_path / "out") == [[0, 1, 2, 3, 0, 5, WORD_EOS], [], [1, WORD_EOS]]


def test_three_workers_write_the_bytes_of_one(llama2, tmp_path):
  rng = np.random.default_rng(0)
  text = ["".join(map(chr, rng.integers(32, 900, rng.integers(0, 200)))) for _ in range(300)]
  files = [write(tmp_path / "a.txt", "\n".join(text[:250])), write(tmp_path / "b.jsonl", json.dumps({"text": text[-1]}))]
  tokenizer = library.load_tokenizer(llama2)
  recipe = library.Recipe(llama2, "auto", "text", False, LLAMA2_EOS, "uint16")
  for workers in (1, 3):
    done = []
    summary = library.tokenize_files(
        files, f"{tmp_path}/{workers}", tokenizer, recipe, workers=workers, progress=done.append, batch_bytes=1500
    )
    assert len(done) > 12
    assert sum(done) == summary.bytes_read == sum(Path(path).stat().st_size for path in files)
  assert bytes_of(tmp_path / "1") == bytes_of(tmp_path / "3")


def test_a_worker_reports_the_first_bad_line(llama2, tmp_path):
  good = '{"text": "some words"}\n'
  source = write(tmp_path / "data.jsonl", good * 500 + "{\n" + good * 500 + "[]\n")
  recipe = library.Recipe(llama2, "auto", "text", False, None, "uint16")
  with pytest.raises(MMapError, match="data.jsonl, line 501: not valid JSON"):
    library.tokenize_files(
        [source], f"{tmp_path}/out", library.load_tokenizer(llama2), recipe, workers=2, batch_bytes=2000
    )
  assert not list(tmp_path.glob("out*"))


def test_a_dead_worker_is_one_sentence(llama2, tmp_path):
  source = write(tmp_path / "text.txt", "some words\n" * 1000)
  unloadable = library.Recipe(f"{tmp_path}/gone", "auto", "text", False, None, "uint16")
  with pytest.raises(MMapError, match="a worker process died"):
    library.tokenize_files(
        [source], f"{tmp_path}/out", library.load_tokenizer(llama2), unloadable, workers=2, batch_bytes=1000
    )
  assert not list(tmp_path.glob("out*"))


def test_reading_ahead_is_bounded(llama2):
  class Done:
    def __init__(self, batch):
      self.result = lambda: batch

  class Pool:
    submit = staticmethod(lambda work, batch: Done(batch))

  taken = []
  batches = (taken.append(i) or [i] for i in range(100))
  for number, block in enumerate(library._encode_in_order(Pool, 4, batches)):
    assert block == [number]
    assert len(taken) <= number + 4


def test_batches_end_by_bytes_and_by_documents(monkeypatch):
  monkeypatch.setattr(library, "BATCH_DOCUMENTS", 3)
  documents = [library.RawDocument("f", i, b"x" * size, False) for i, size in enumerate([4, 6, 20, 1, 1, 1, 0])]
  assert [[d.line for d in batch] for batch in library.batched(documents, 10)] == [[0, 1], [2], [3, 4, 5], [6]]


def test_files_keep_the_order_given_and_folders_are_sorted(tmp_path):
  for name in ("in/b.txt", "in/a/z.txt", "in/a/skip/y.txt", "in/c.md", "first.md"):
    write(tmp_path / name, "x")
  found = library.find_files([str(tmp_path / "first.md"), str(tmp_path / "in")], [".txt"], ["sk*"])
  assert [Path(path).relative_to(tmp_path).as_posix() for path in found] == ["first.md", "in/a/z.txt", "in/b.txt"]


def test_dtype_follows_the_vocabulary(tool, llama2, words, tmp_path):
  assert library.choose_dtype("auto", 65499, None) == np.uint16
  assert library.choose_dtype("auto", 65500, None) == np.int32
  assert library.choose_dtype("auto", 100, 70000) == np.int32
  source = write(tmp_path / "text.txt", "the cat")
  for dtype in ("uint16", "int32"):
    arguments = ("--output-prefix", tmp_path / dtype, "--tokenizer", llama2, "--dtype", dtype)
    tokenize(tool, "--input", source, *arguments)
    assert MMapIndexedDataset(str(tmp_path / dtype)).dtype == np.dtype(dtype).type
  assert documents_of(tmp_path / "uint16") == documents_of(tmp_path / "int32")


def test_a_dtype_too_small_for_the_ids_is_refused(tool, capsys, llama2, tmp_path):
  source = write(tmp_path / "text.txt", "x")
  common = ("--input", source, "--tokenizer", llama2, "--append-eod")
  message = error_of(tool, capsys, tmp_path / "out", *common, "--eod-id", 70000, "--dtype", "uint16")
  assert message == "ids go up to 70000, and uint16 holds at most 65535; use --dtype int32."


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ('{"text": "a"}\n{"text": \n', "line 2: not valid JSON"),
        ('{"text": "a"}\n["a"]\n', "line 2: found a JSON list; expected one object a line."),
        ('{"text": "a"}\n\n{"body": 1, "id": 2}\n', "line 3: no key 'text' among 'body', 'id'; see --json-key."),
        ('{"text": ["a", "b"]}\n', "line 1: 'text' holds a list; expected one string (sentences are not split)."),
        ('{"text": null}\n', "line 1: 'text' holds a NoneType; expected one string"),
        ('{"text": "\\ud800"}\n', "line 1: 'text' holds half of a surrogate pair"),
        ("[" * 100000 + "\n", "line 1: not valid JSON"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', "line 2: byte 0xff is not UTF-8; convert the file first."),
    ],
)
def test_bad_jsonl_is_named_by_file_and_line(tool, capsys, words, tmp_path, lines, expected):
  source = write(tmp_path / "data.jsonl", lines)
  message = error_of(tool, capsys, tmp_path / "out", "--input", source, "--tokenizer", words / "tokenizer.json")
  assert message.startswith(f"{source}, {expected}")


@pytest.mark.parametrize("document", ["line", "file"])
def test_text_that_is_not_utf8_is_named_by_line(tool, capsys, words, tmp_path, document):
  source = write(tmp_path / "text.txt", b"the cat\nsat\n\xe9t\xe9\n")
  common = ("--input", source, "--tokenizer", words / "tokenizer.json", "--document", document)
  message = error_of(tool, capsys, tmp_path / "out", *common)
  assert message == f"{source}, line 3: byte 0xe9 is not UTF-8; convert the file first."


def test_a_missing_eos_is_asked_for(tool, capsys, words, tmp_path):
  (words / "tokenizer_config.json").unlink()
  source = write(tmp_path / "text.txt", "the cat")
  message = error_of(tool, capsys, tmp_path / "out", "--input", source, "--tokenizer", words, "--append-eod")
  assert message == f"{words} names no EOS token to append; give the id with --eod-id."


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--input", "nowhere.txt"], "nowhere.txt does not exist; --input takes files and folders."),
        (["--input", ".", "--suffix", ".none"], ". has no file that ends in .none; see --suffix."),
        (["--eod-id", "3"], "--eod-id 3 has no effect without --append-eod; give both or neither."),
        (["--append-eod", "--eod-id", "-1"], "--eod-id is -1; expected 0 or more."),
        (["--tokenizer", "nowhere"], "nowhere does not exist; give the path of a tokenizer's file or folder."),
        (["--tokenizer", "text.txt"], "text.txt cannot be loaded as a sentencepiece tokenizer: "),
        (["--tokenizer", "broken.json"], "broken.json cannot be loaded as a huggingface tokenizer: "),
        (["--input", "empty.txt"], "out: the input has 2 documents and not one token; nothing was written."),
    ],
)
def test_what_cannot_be_used_is_one_sentence(tool, capsys, words, tmp_path, monkeypatch, arguments, expected):
  monkeypatch.chdir(tmp_path)
  write(tmp_path / "text.txt", "the cat")
  write(tmp_path / "empty.txt", "\n\n")
  write(tmp_path / "broken.json", "{}")
  common = ["--input", "text.txt", "--tokenizer", words / "tokenizer.json"]
  assert error_of(tool, capsys, Path("out"), *common, *arguments).startswith(expected)


def test_an_output_prefix_needs_a_name(tool, capsys, llama2, tmp_path):
  source = write(tmp_path / "text.txt", "x")
  assert tool.main(["--input", source, "--output-prefix", f"{tmp_path}/d/", "--tokenizer", llama2]) == 1
  assert "is no --output-prefix" in capsys.readouterr().err


def test_an_error_leaves_an_older_dataset_as_it_was(tool, capsys, words, tmp_path):
  good, bad = write(tmp_path / "good.txt", "the cat"), write(tmp_path / "bad.txt", b"\xff")
  common = ["--output-prefix", str(tmp_path / "out"), "--tokenizer", str(words / "tokenizer.json"), "--workers", "1"]
  assert tool.main(["--input", good, *common]) == 0
  before = bytes_of(tmp_path / "out")
  assert tool.main(["--input", good, bad, *common]) == 1
  assert bytes_of(tmp_path / "out") == before
  assert len(list(tmp_path.glob("out*"))) == 2


def test_the_summary_counts(tool, capsys, words, tmp_path):
  source = write(tmp_path / "text.txt", "the cat\n\nmat\n")
  arguments = ("--output-prefix", tmp_path / "out", "--tokenizer", words / "tokenizer.json", "--append-eod")
  tokenize(tool, "--input", source, *arguments, "--json")
  summary = json.loads(capsys.readouterr().out)
  assert summary.pop("seconds") >= 0
  assert summary.pop("tokens_per_second") > 0
  assert summary == {
      "documents": 3,
      "sequences": 2,
      "tokens": 5,
      "empty_documents": 1,
      "dtype": "uint16",
      "vocab_size": 8,
      "eod_id": WORD_EOS,
      "input_files": 1,
      "bytes_read": 13,
      "bytes_written": sum(map(len, bytes_of(tmp_path / "out"))),
      "files": [f"{tmp_path}/out.bin", f"{tmp_path}/out.idx"],
  }
  tokenize(tool, "--input", source, *arguments)
  assert "empty documents  1\n" in capsys.readouterr().out


def test_the_script_runs_and_imports_neither_jax_nor_grain(llama2, tmp_path):
  source = write(tmp_path / "text.txt", "hello\n")
  arguments = ["--input", source, "--output-prefix", str(tmp_path / "out"), "--tokenizer", llama2]
  run = subprocess.run(
      [sys.executable, "-X", "importtime", str(SCRIPT), *arguments], capture_output=True, text=True, check=True
  )
  imported = {line.rsplit("|", 1)[-1].strip() for line in run.stderr.splitlines()}
  assert "sentencepiece" in imported
  assert imported.isdisjoint({"jax", "grain", "transformers", "tokenizers", "numba", "tqdm"})
  assert "documents        1\n" in run.stdout
