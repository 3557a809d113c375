"""Reward models as results: what needs a model that predicts tokens is refused for them."""

import json
from pathlib import Path

import pytest
from messages import message_of, says
from tiny import make_pairs, make_scored_model

from ftkit.cli.app import run
from ftkit.evaluation.result import find_result
from ftkit.recipe.objectives import ScoreLabels


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model without a run."""
    directory = tmp_path_factory.mktemp("reward")
    return make_scored_model(directory, ScoreLabels())


@pytest.fixture(scope="module")
def pairs(model: Path) -> list[str]:
    file = model.with_name("pairs.json")
    file.write_text(json.dumps(make_pairs(8)))
    return ["--data", "JSON", "--data.path", str(file)]


REFUSED = {
    "generate": ["--prompt", "hello"],
    "chat": [],
    "evaluate": ["--tasks", "arc_easy"],
    "export gguf": ["--format", "gguf", "--out", "OUT"],
    "export litgpt": ["--format", "litgpt", "--out", "OUT"],
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_predicts_tokens_is_refused(command: str, model: Path, tmp_path: Path) -> None:
    words = [word.replace("OUT", str(tmp_path / "out")) for word in REFUSED[command]]
    message = message_of(run, [command.split()[0], str(model), *words])
    assert says(message, str(model), "reward", "ftkit evaluate")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("words", [["--exact_match", "3"], ["--rouge_l", "3"]])
def test_scores_of_answers_are_refused(words: list[str], model: Path, pairs: list[str]) -> None:
    key = f"eval.{words[0].removeprefix('--')}"
    message = message_of(run, ["evaluate", str(model), *pairs, *words])
    assert says(message, key, "3", "reward", f"--{key} 0")


def test_a_reward_model_without_a_run_is_evaluated_on_pairs(
    model: Path, pairs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert find_result(str(model)).scores
    assert run(["evaluate", str(model), *pairs]) == 0
    shown = capsys.readouterr().out
    assert says(shown, "8 records", "accuracy", "margin", "chosen reward", "rejected reward")
    assert "perplexity" not in shown and "exact match" not in shown and "tokens" not in shown


def test_a_base_of_a_reward_model_answers(model: Path) -> None:
    assert not find_result(str(model.with_name("base"))).scores


@pytest.mark.parametrize(
    ("words", "key", "works"),
    [
        (["--eval.exact_match", "5"], "eval.exact_match", "0"),
        (["--eval.tasks", "[arc_easy]"], "eval.tasks", "null"),
        (["--train.label_smoothing", "0.1"], "train.label_smoothing", "0"),
        (["--train.tie_embeddings", "true"], "train.tie_embeddings", "null"),
        (["--lora_head", "true"], "lora_head", "false"),
        (["--objective.center_weight", "-1"], "objective.center_weight", "0"),
    ],
)
def test_settings_of_answers_are_refused_in_training(
    words: list[str], key: str, works: str, model: Path, pairs: list[str]
) -> None:
    base = str(model.with_name("base"))
    command = ["finetune", base, "--objective", "reward", *pairs, *words]
    message = message_of(run, [*command, "--out_dir", str(model.with_name("out"))])
    assert says(message, key, f"--{key} {works}")
