"""Mistakes of the first minutes, and the advice they get."""

import shlex
from pathlib import Path

import pytest
from messages import message_of, says

from ftkit.cli.app import run
from ftkit.errors import UserError
from ftkit.recipe.parsing import read_recipe
from ftkit.strategies.schedule import make_schedule
from ftkit.utils.names import nearest_directory


def refusal_of(*words: str) -> str:
    return message_of(run, words)


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("train", "Did you mean ftkit finetune?"),
        ("eval", "Did you mean ftkit evaluate?"),
        ("predict", "Did you mean ftkit generate?"),
        ("serve", "ftkit export RESULT --check vllm"),
    ],
)
def test_a_command_is_known_by_its_name_in_other_programs(typed: str, advice: str) -> None:
    assert advice in refusal_of(typed)


@pytest.mark.parametrize("file", ["chats.jsonl", "my data/a.json.gz", "A.CSV", "b.parquet"])
def test_a_file_of_data_as_a_word_is_not_taken_for_a_model(file: str) -> None:
    assert says(refusal_of("finetune", file), f"file of data ... --data.path {shlex.quote(file)}")


def test_arguments_of_a_component_may_stand_next_to_its_class(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"

    def optimizer_of(text: str) -> object:
        file.write_text(f"checkpoint_dir: x\noptimizer: {text}")
        return read_recipe([file]).optimizer

    assert optimizer_of("{lr: 0.001}") == optimizer_of("{init_args: {lr: 0.001}}")
    named = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "momentum": 0.9}}
    assert optimizer_of("{class_path: SGD, lr: 0.1, init_args: {momentum: 0.9}}") == named
    with pytest.raises(UserError, match="optimizer has lr twice"):
        optimizer_of("{lr: 0.1, init_args: {lr: 0.2}}")


@pytest.mark.parametrize("data", ["data/alpaca.json", "tatsu-lab/alpaca", "litgpt.data.x/y"])
def test_a_file_or_a_hub_name_as_data_gets_the_option_for_it(data: str) -> None:
    message = refusal_of("finetune", "random:pythia-14m", "--data", data)
    path = data.removeprefix("litgpt.data.")
    assert says(message, f"--data is {path} ... Try --data JSON --data.path {path}")
    assert "class_path" not in message


def test_a_file_without_a_directory_as_data_gets_the_option_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.json").write_text("[]")
    message = refusal_of("finetune", "random:pythia-14m", "--data", "d.json")
    assert says(message, "Try --data JSON --data.path d.json")


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("LitGPT's pretraining", "model_name: pythia-14m\ninitial_checkpoint_dir: null\n"),
        ("LitGPT's pretraining", "model_name: pythia-14m\ntokenizer_dir: t\ndata: TinyStories\n"),
        ("LitGPT's pretraining", "model_config: {name: x, n_layer: 2}\ntokenizer_dir: t\n"),
    ],
)
def test_a_recipe_of_another_program_is_named_as_such(
    program: str, text: str, tmp_path: Path
) -> None:
    file = tmp_path / "other.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=f"This is a recipe of {program}: "):
        read_recipe([file])


@pytest.mark.extensions
@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--sample_packing", "true", "train.global_batch_tokens"),
        ("--packing", "true", "train.global_batch_tokens"),
        ("--load_in_4bit", "true", "quantize ... bnb.nf4-dq"),
        ("--per_device_train_batch_size", "2", "train.micro_batch_size"),
        ("--gradient_accumulation_steps", "4", "train.global_batch_size"),
        ("--warmup_ratio", "0.1", "train.lr_warmup_run_fraction"),
        ("--evals_per_epoch", "4", "eval.interval_epochs"),
        ("--learning_rate", "1e-4", "optimizer.lr"),
        ("--output_dir", "x", "out_dir"),
        ("--wandb_project", "x", "no effect ... --logger_name"),
        ("--streaming", "true", "streaming data"),
        ("--data.streaming", "true", "streaming data"),
        ("--use_galore", "true", "GaLore"),
        ("--optimizer", "adamw_bnb_8bit", "--optimizer bitsandbytes.optim.AdamW8bit"),
    ],
)
def test_words_of_other_programs_get_our_key(option: str, value: str, words: str) -> None:
    line = ("finetune", "random:pythia-14m", "--data", "JSON", "--data.path", "embedded:quickstart")
    assert says(refusal_of(*line, option, value), words)


def test_a_mistyped_directory_gets_a_suggestion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models/llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.json").write_text('[{"instruction": "a", "output": "b"}]')
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert nearest_directory("nowhere/lama") == nearest_directory("models/other") == ""
    message = refusal_of("finetune", "models/lama", "--data", "JSON", "--data.path", "d.json")
    assert says(message, "Did you mean ... models/llama")


@pytest.mark.extensions
@pytest.mark.parametrize(
    "words", [("generate", "models/lama", "--prompt", "x"), ("merge", "models/lama", "--out", "m")]
)
def test_a_mistyped_result_gets_a_suggestion(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models/llama").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert says(refusal_of(*words), "Did you mean ... models/llama")


def notices(**train: object) -> list[str]:
    keys = [("checkpoint_dir", "x"), *((f"train.{k}", str(v)) for k, v in train.items())]
    recipe = read_recipe([], keys, method="full")
    return make_schedule(recipe.train, 54, 1e-3)[1]


def test_a_step_larger_than_the_data_has_a_notice() -> None:
    few = {"epochs": 5, "lr_warmup_steps": 0}
    assert notices(global_batch_size=54, **few) == []
    (notice,) = notices(global_batch_size=1000, **few)
    assert says(
        notice,
        "train.global_batch_size 1,000 ... 54 samples ... 1 step ... --train.global_batch_size 13",
    )


def test_a_learning_rate_of_0_has_a_notice() -> None:
    recipe = read_recipe([], [("checkpoint_dir", "x"), ("train.lr_warmup_steps", "0")])
    (notice,) = make_schedule(recipe.train, 54, 0.0)[1]
    assert says(notice, "learning rate is 0 ... --optimizer.lr 2e-4")
