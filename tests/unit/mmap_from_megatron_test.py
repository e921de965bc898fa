# SPDX-License-Identifier: Apache-2.0
"""`from-megatron`: Megatron-LM's arguments become a config that reads the samples which megatron-core reads."""

import json
from pathlib import Path
import shlex

from hypothesis import given
from hypothesis import strategies as st
import numpy as np
import pytest
import yaml

from maxtext.configs import pyconfig
from maxtext.input_pipeline import _mmap_stream as streams
from maxtext.input_pipeline._mmap_files import MMapError
from maxtext.input_pipeline._mmap_indexed_dataset import IndexedDatasetWriter
from maxtext.input_pipeline.mmap_cli import main as command_line
from maxtext.input_pipeline.mmap_cli import megatron_arguments
from maxtext.input_pipeline.mmap_cli.megatron_keys import translate

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "megatron_arguments.json").read_text(encoding="utf-8"))
RUN = "--seq-length 8 --global-batch-size 4 --train-iters 100"


def keys_of(text: str, **options) -> dict:
  return translate(shlex.split(text), **options)["keys"]


def refusal(text: str, **options) -> str:
  with pytest.raises(MMapError) as caught:
    translate(shlex.split(text), **options)
  message = str(caught.value)
  assert "\n" not in message and message.endswith("."), message
  return message


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
  """The datasets of the golden file: running token numbers from 10,000, 20,000, ... on."""
  folder = tmp_path_factory.mktemp("data")
  for number, dataset in enumerate(GOLDEN["lengths"]):
    ((name, lengths),) = dataset.items()
    first = 10_000 * number
    with IndexedDatasetWriter(str(folder / name), np.uint16) as writer:
      for length in lengths:
        writer.add_document(np.arange(first, first + length))
        first += length
  return folder


def load(path: Path):
  """Reads a YAML as a run does; the model's keys are what the YAML leaves to the user."""
  keys = {
    "run_name": "t", "base_output_directory": str(path.parent), "model_name": "gpt3-52k", "hardware": "cpu",
    "override_model_config": True, "vocab_size": 65536, "skip_jax_distributed_system": True, "log_config": False,
    "mmap_eod_id": 0,
  }  # fmt: skip
  return pyconfig.initialize(["", str(path), *(f"{key}={value}" for key, value in keys.items())])


@pytest.mark.parametrize("number", range(len(GOLDEN["cases"])))
def test_samples_are_those_that_megatron_core_reads(data, tmp_path, monkeypatch, number):
  case = GOLDEN["cases"][number]
  for name, text in case["files"].items():
    (data / name).write_text(text.replace("{data}", str(data)))
  monkeypatch.chdir(tmp_path)
  words = [word.replace("{data}", str(data)) for word in case["arguments"]]
  assert command_line.main(["from-megatron", "--output", "run.yml", *words]) == 0
  config = load(tmp_path / "run.yml")
  assert (config.eval_interval > 0) == (case["valid"] is not None)
  for evaluation, theirs in ((False, case["train"]), (True, case["valid"])):
    if theirs is not None:
      stream = streams.open_stream(streams.settings_for(config, evaluation))
      assert len(stream) >= len(theirs)
      np.testing.assert_array_equal(stream.source.read_rows(np.arange(len(theirs))), theirs)


def test_keys_of_a_plain_run():
  keys = keys_of(f"--data-path a --split 9,1 {RUN} --seed 5 --eval-interval 10 --eval-iters 3", eod_id=2, devices=2)
  assert keys == {
    "grain_train_files": "indices|a",
    "mmap_npy_split": "9,1",
    "max_target_length": 8,
    "data_shuffle_seed": 5,
    "mmap_npy_num_samples": 400,
    "steps": 100,
    "per_device_batch_size": 2,
    "grain_eval_files": "indices|a",
    "eval_interval": 10,
    "eval_steps": 3,
    "mmap_npy_num_eval_samples": (100 // 10 + 1) * 3 * 4,
    "reset_attention_mask": False,
    "eod_mask_loss": False,
    "packing_max_segments_per_sample": 0,
    "mmap_eod_id": 2,
  }


def test_a_blend_of_one_asks_for_the_surplus():
  run = f"{RUN} --eval-interval 50 --eval-iters 5"
  weighted = keys_of(f"--data-path 1.0 a {run}")
  assert (weighted["mmap_npy_num_samples"], weighted["mmap_npy_num_eval_samples"]) == (402, 61)  # 400 and 60, * 1.005
  assert keys_of(f"--data-path a {run}")["mmap_npy_num_samples"] == 400
  assert keys_of(f"--train-data-path 1.0 a {run}")["mmap_npy_num_samples"] == 400  # no blend to Megatron


def test_another_batch_size_for_evaluation():
  keys = keys_of(f"--data-path a {RUN} --eval-global-batch-size 8 --eval-interval 10 --eval-iters 3", devices=2)
  assert (keys["eval_per_device_batch_size"], keys["mmap_npy_num_eval_samples"]) == (4, 11 * 3 * 8)


def continued_with_rest(consumed: int) -> str:
  facts = translate(shlex.split(f"--data-path a {RUN}"), consumed_samples=consumed)
  return facts["no_equal"].get(f"--consumed-samples {consumed}", "")


def test_continuing_a_run():
  keys = keys_of(f"--data-path a {RUN}", consumed_samples=120)
  assert (keys["mmap_npy_start_sample"], keys["mmap_npy_num_samples"], keys["steps"]) == (120, 400, 70)
  assert not continued_with_rest(120)
  assert "the last 2 of the run's 400 samples are not read" in continued_with_rest(118)
  assert "leaves no step" in refusal(f"--data-path a {RUN}", consumed_samples=398)


def test_folder_of_index_files():
  arguments = f"--data-path 1 a 2 b {RUN} --data-cache-path /cache"
  keys, others = keys_of(arguments), keys_of(arguments, index_dir="npy")
  assert (keys["grain_train_files"], keys["blend_index_dir"]) == ("/cache|a,1;/cache|b,2", "/cache")
  assert others["grain_train_files"] == "npy|a,1;npy|b,2" and "blend_index_dir" not in others
  assert "blend_index_dir" not in keys_of(f"--data-path a {RUN} --data-cache-path /cache")


@pytest.mark.parametrize(
  "arguments",
  ["--split 1", "--split 99,0,1", "--eval-iters 0", "--eval-interval 0"],
)
def test_no_evaluation(arguments):
  keys = keys_of(f"--data-path a {RUN} {arguments}")
  assert keys["eval_interval"] == -1 and "grain_eval_files" not in keys


def test_masks_and_positions():
  run = f"--data-path a {RUN}"
  both = translate(shlex.split(f"{run} --reset-position-ids --reset-attention-mask --eod-mask-loss"))
  assert both["keys"]["reset_attention_mask"] and both["keys"]["eod_mask_loss"]
  assert not any("alone" in name for name in both["no_equal"])
  for name, reset in (("--reset-attention-mask", True), ("--reset-position-ids", False)):
    facts = translate(shlex.split(f"{run} {name}"))
    assert facts["keys"]["reset_attention_mask"] == reset and f"{name} alone" in facts["no_equal"]


def test_other_keys():
  keys = keys_of(
    f"--data-path a b {RUN} --num-workers 3 --save-interval 7 --vocab-size 50257 --tensor-model-parallel-size 2 "
    "--mid-level-dataset-surplus 0.007 --object-storage-cache-path /c"
  )
  assert (keys["grain_worker_count"], keys["checkpoint_period"], keys["mmap_remote_cache_dir"]) == (3, 7, "/c")
  assert keys["vocab_size"] == 50432 and keys["vocab_size"] % 256 == 0
  assert 1 + keys["mmap_npy_blend_margin"] / 100 == 1.007


def test_mock_data():
  keys = keys_of(f"--mock-data {RUN}")
  assert keys["dataset_type"] == "synthetic" and "grain_train_files" not in keys and "mmap_npy_num_samples" not in keys


@pytest.mark.parametrize(
  ("arguments", "name"),
  [
    ("--test-data-path c --train-data-path a", "--test-data-path"),
    ("--data-path a --rampup-batch-size 2 2 10 --train-samples 100", "--rampup-batch-size"),
    ("--data-path a --fim-data", "--fim-data"),
    ("--data-path a --dataloader-type cyclic", "--dataloader-type cyclic"),
    ("--data-path a", "--split (test part)"),
    ("--data-path a", "evaluation after the first"),
    ("--data-path 0 a 1 b", "weight 0"),
    ("--train-data-path a --valid-data-path a b --multiple-validation-sets", "--multiple-validation-sets"),
    ("--data-path a --sft", "--sft"),
    ("--data-path a --phase-transition-iterations 5", "--phase-transition-iterations"),
  ],
)
def test_what_has_no_equal_is_named(arguments, name):
  length = "" if "--train-samples" in arguments else "--train-iters 100"
  facts = translate(shlex.split(f"{arguments} --seq-length 8 --global-batch-size 4 {length}"))
  assert name in facts["no_equal"]
  text = " ".join(line.removeprefix("#").strip() for line in facts["yaml"].splitlines())
  assert f"{name}: {facts['no_equal'][name]}" in text


def test_other_arguments_are_ignored_without_fuss():
  words = shlex.split(f"torchrun train.py --num-layers 4 --data-path a {RUN} --lr=1e-4 --bf16 --min-lr -1 --bf16")
  facts = translate(words)
  assert facts["ignored"] == ["--num-layers", "--lr", "--bf16", "--min-lr"]
  assert "# - --num-layers, --lr, --bf16, --min-lr" in facts["yaml"].splitlines()
  assert "# Ignored, since they do not concern the data or are not known:" in facts["yaml"].splitlines()


def test_the_tokenizer_of_megatron_is_named():
  facts = translate(shlex.split(f"--data-path a {RUN} --tokenizer-model '$DIR/t.model'"))
  assert "tokenizer_path (Megatron: --tokenizer-model $DIR/t.model), run_name" in facts["to_set"][0]
  broken = translate([*shlex.split(f"--data-path a {RUN}"), "--tokenizer-model", "a\u2028b: c"])  # a line's end in YAML
  assert yaml.safe_load(broken["yaml"])["grain_train_files"] == "indices|a"
  assert "Megatron" not in translate(shlex.split(f"--data-path a {RUN}"))["to_set"][0]


@pytest.mark.parametrize(
  ("arguments", "told"),
  [
    ("--data-path 0.7 books code", ["'0.7' of --data-path"]),
    ("--data-path books 5", ["'5' of --data-path"]),
    ("--train-data-path a --valid-data-path 1 2 3", [f"'{n}' of --valid-data-path" for n in (1, 2, 3)]),
    ("--data-path 0.7 books 0.3 code", []),
    ("--data-path books code", []),
  ],
)
def test_a_number_taken_as_a_path_is_told(arguments, told):
  lines = [line for line in translate(shlex.split(f"{arguments} {RUN}"))["to_set"] if line.startswith("weights: ")]
  assert [line.partition(" is taken as a dataset's path")[0].removeprefix("weights: ") for line in lines] == told


@pytest.mark.parametrize(
  ("arguments", "words"),
  [
    ("", "(none given)"),
    (f"--data-path a --train-data-path b {RUN}", "--data-path, --train-data-path given"),
    (f"--data-path a --mock-data {RUN}", "--mock-data given"),
    (f"--valid-data-path a {RUN}", "no data for training"),
    (f"--train-data-path a --split 1 {RUN}", "--split does not go with --train-data-path"),
    ("--data-path a --global-batch-size 4 --train-iters 9", "--seq-length is missing"),
    ("--data-path a --seq-length 4 --train-iters 9", "--global-batch-size is missing"),
    ("--data-path a --seq-length 4 --global-batch-size 2", "--train-iters or --train-samples"),
    (f"--data-path a {RUN} --train-samples 9", "--train-iters or --train-samples"),
    (f"--data-path a {RUN} --rampup-batch-size 2 2 10", "Megatron refuses"),
    ("--data-path a --seq-length 4 --global-batch-size 4 --train-samples 9 --rampup-batch-size 3 2 9", "does not lead"),
    ("--data-path a --seq-length 4 --global-batch-size 4 --train-samples 9 --rampup-batch-size 3 2", "three numbers"),
    (f"--data-path 0.5 a b c {RUN}", "'b' stands for a weight"),
    (f"--data-path nan a {RUN}", "'nan' stands for a weight"),
    (f"--data-path 0 a 0 b {RUN}", "add up to 0"),
    (f"--data-path {RUN}", "--data-path has no value"),
    (f"--data-path '$DATA' {RUN}", "$DATA (--data-path)"),
    (f"--data-path 'x|y' {RUN}", "'x|y' cannot be named"),
    (f"--data-path 'x,5' y z {RUN}", "'x,5' cannot be named"),
    (f"--data-path a {RUN} --seed x", "--seed is 'x'; expected a whole number"),
    (f"--data-path a {RUN} --mid-level-dataset-surplus x", "expected a number, 0 or more"),
    (f"--data-path a {RUN} --split x", "--split is 'x'"),
    (f"--data-path a {RUN} --split 1,1,1,1", "expected one to three shares"),
    (f"--data_path a {RUN}", "write --data-path"),
  ],
)
def test_what_cannot_be_used_is_refused(arguments, words):
  assert words in refusal(arguments)


def test_more_devices_than_samples():
  assert keys_of(f"--data-path a {RUN}", devices=8)["per_device_batch_size"] == 0.5
  assert keys_of(f"--data-path a {RUN}", devices=64)["per_device_batch_size"] == 4 / 64


def test_devices_that_do_not_divide_the_batch():
  assert "cannot be divided among 3 devices" in refusal(f"--data-path a {RUN}", devices=3)
  assert "--eval-global-batch-size 6" in refusal(f"--data-path a {RUN} --eval-global-batch-size 6", devices=4)


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"train": 1}', '{"train": [null]}'])
def test_a_file_of_parts_that_cannot_be_used(tmp_path, text):
  (tmp_path / "parts.json").write_text(text)
  assert "parts.json" in refusal(f"--per-split-data-args-path {tmp_path}/parts.json {RUN}")


def test_launch_script(tmp_path, capsys):
  (tmp_path / "launch.sh").write_text(f"""
    #SBATCH --nodes=4
    MODEL="--num-layers 2 --hidden-size 8"
    DATA_ARGS=(
        --data-path 0.7 "data/some books" 0.3 'data/web'   # a comment
        --split 99,1,0 \\
    )
    EVAL=(--eval-interval 10 --eval-iters 2)
    TRAIN=" {RUN}
      --seed 3"
    torchrun --nproc_per_node 8 pretrain_gpt.py ${{MODEL[@]}} ${{DATA_ARGS[@]}}
  """)
  assert command_line.main(["from-megatron", "--args-file", str(tmp_path / "launch.sh"), "--json", "--seed", "4"]) == 0
  facts = json.loads(capsys.readouterr().out)
  assert facts["keys"]["grain_train_files"] == "indices|data/some books,0.7;indices|data/web,0.3"
  assert facts["keys"]["eval_steps"] == 2 and facts["keys"]["data_shuffle_seed"] == 3  # the last one counts
  assert facts["ignored"] == ["--num-layers", "--hidden-size", "--nproc_per_node"]


def keys_of_script(text: str) -> dict:
  return translate(megatron_arguments.words_of_script(text))["keys"]


def test_launch_script_with_variables_and_arguments_in_one_word():
  keys = keys_of_script("""
    CHECKPOINT=${1:-"checkpoints/8b"}
    SEQ_LENGTH=8192   # tokens
    # SEQ_LENGTH=4096
    export BATCH="128"
    DATA='data/books'
    TP=${TP:-1}
    TRAINING_ARGS=(
      --micro-batch-size $MICRO --global-batch-size $BATCH
      --train-samples 12800 --lr ${LR:-0.1} --tensor-model-parallel-size $TP
    )
    DATA_ARGS=( "--data-path 0.7 ${DATA} 0.3 'data/some code'" "--seq-length $SEQ_LENGTH" )
    DATA_ARGS+=(
      "--tokenizer-model $TOKENIZER" "--vocab-file $VOCAB"
      "--split '99,1,0'" "--data-cache-path=some cache"
    )
    torchrun pretrain_gpt.py ${TRAINING_ARGS[@]} ${DATA_ARGS[@]} --save $CHECKPOINT
  """)
  assert keys["grain_train_files"] == "some cache|data/books,0.7;some cache|data/some code,0.3"
  assert (keys["max_target_length"], keys["per_device_batch_size"], keys["steps"]) == (8192, 128, 100)
  assert keys["mmap_npy_split"] == "99,1,0" and "vocab_size" not in keys


@pytest.mark.parametrize(
  "setting",
  [
    "", "X=1\nX=2", "X=8\nX=8", "X=8; X=9", "X=8\nX+=1", "X=8 true", "X=${1:-8}", "X=$(nproc)", "X=$Y", "X=",
    'X="8 9"', "X=8\nfor X in 1 2; do true; done", "# X=8",
  ],
)  # fmt: skip
def test_variables_without_one_plain_value_are_all_named(setting):
  script = f"{setting}\nrun --data-path ${{X}}/a $Y --seq-length $X --seed ${{S:-1}} --global-batch-size 4 --lr $LR"
  with pytest.raises(MMapError) as caught:
    keys_of_script(f"{script} --train-iters 9 --merge-file $M")
  message = "no value is known for ${X} (--data-path), $Y (--data-path), $X (--seq-length), ${S:-1} (--seed); write"
  assert str(caught.value).startswith(message)


def test_script_with_an_open_quote():
  with pytest.raises(MMapError, match="check their quotes"):
    megatron_arguments.words_of_script("--data-path 'a")


@given(words=st.lists(st.text("abz/._-0159", min_size=1, max_size=6), max_size=6))
def test_yaml_says_what_the_keys_say(words):
  try:
    facts = translate(["--data-path", *words, *shlex.split(RUN)])
  except MMapError:
    return
  assert yaml.safe_load(facts["yaml"]) == {"base_config": "mmap_npy_megatron_gpt.yml", **facts["keys"]}
