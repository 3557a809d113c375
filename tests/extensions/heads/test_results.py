"""Classifiers apart from a run: how texts become samples and prompts, and what is refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from messages import message_of, says
from tiny import make_scored_model

from ftkit.cli.app import run
from ftkit.data.dataset import load_data
from ftkit.data.samples.sample_set import SampleSet
from ftkit.evaluation.result import find_result
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.objectives import ScoreLabels, objective_rules
from ftkit.recipe.recipe import Component

SCORES = ScoreLabels(names=("bad", "good"), problem_type="single_label_classification")
USER, ANSWER = {"role": "user", "content": "Red?"}, {"role": "assistant", "content": "Yes"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier without a run."""
    directory = tmp_path_factory.mktemp("classifier")
    return make_scored_model(directory, SCORES)


def samples_of(
    model: Path, file: Path, rows: Sequence[dict[str, Any]], **options: Any
) -> SampleSet:
    file.write_text(json.dumps(rows))
    init_args = {"path": str(file), "val_split_fraction": 0, **options}
    data: Component = {"class_path": "JSON", "init_args": init_args}
    preference = objective_rules(SCORES.objective).preference
    found = load_data(data, Tokenizer(model), 200, preference=preference).train
    assert isinstance(found, SampleSet)
    return found


def test_a_text_is_given_alone(model: Path, tmp_path: Path) -> None:
    rows = [{"text": "a red cat", "label": "good"}, {"text": "a", "label": "bad"}]
    samples, tokenizer = samples_of(model, tmp_path / "texts.json", rows), Tokenizer(model)
    assert samples.targets is not None and samples.targets.tolist() == [[1], [0]]
    for number, row in enumerate(rows):
        expected = tokenizer.encode(row["text"]).tolist()
        assert samples[number].ids.tolist() == expected
        assert expected[0] == tokenizer.bos_id and expected[-1] != tokenizer.eos_id


@pytest.mark.parametrize("messages", [[USER], [USER, ANSWER], [USER, ANSWER, USER]])
def test_a_conversation_is_given_whole(
    messages: list[dict[str, str]], model: Path, tmp_path: Path
) -> None:
    rows = [{"messages": messages, "label": "good"}] * 2
    samples = samples_of(model, tmp_path / "chats.json", rows, chat_template="chatml")
    tokenizer = Tokenizer(model)
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    assert samples[0].ids.tolist() == tokenizer.encode_rendered(text)[0]


def test_two_targets_are_two_data_sets_and_a_bool_is_hashed_as_before(
    model: Path, tmp_path: Path
) -> None:
    """KTO's labels keep the fingerprint that they had when nothing else had a target."""
    rows = [{"text": "a red cat", "label": label} for label in ("good", "bad")]
    samples = samples_of(model, tmp_path / "one.json", rows)
    others = samples_of(model, tmp_path / "two.json", rows[::-1])
    assert samples.fingerprint != others.fingerprint
    assert samples.targets is not None
    numbers = SampleSet(*samples.arrays._replace(targets=samples.targets + 0.5))
    assert numbers.fingerprint not in (samples.fingerprint, others.fingerprint)


def test_a_classifier_without_a_run_is_used(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find_result(str(model)).scores == SCORES
    file = tmp_path / "texts.json"
    file.write_text(json.dumps([{"text": f"cat {n}", "label": n % 2} for n in range(8)]))
    assert run(["evaluate", str(model), "--data", "JSON", "--data.path", str(file)]) == 0
    shown = capsys.readouterr().out
    assert says(shown, "8 records", "loss", "accuracy", "f1 macro")
    assert "perplexity" not in shown and "exact match" not in shown and "tokens" not in shown
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    prompts.write_text("a red cat\nthe sun\n")
    assert run(["generate", str(model), "--prompts", str(prompts), "--out", str(out)]) == 0
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [one["instruction"] for one in answers] == ["a red cat", "the sun"]
    for one in answers:
        assert one["label"] == max(one["probabilities"], key=one["probabilities"].get)
        assert {*one["probabilities"]} == {"good", "bad"}
        assert sum(one["probabilities"].values()) == pytest.approx(1)


@pytest.mark.parametrize(
    "labels", [["bad", "good"], {"0": "bad", "1": "bad"}, {"0": "bad", "2": "good"}, {"0": {}}, 3]
)
def test_settings_that_name_no_scores_are_refused(labels: Any, model: Path, tmp_path: Path) -> None:
    settings = json.loads((model / "config.json").read_text()) | {"id2label": labels}
    for file in model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(settings))
    message = message_of(run, ["generate", str(tmp_path), "--prompt", "a"])
    assert says(message, "id2label", "config.json", str(tmp_path))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["chat", "MODEL"], ["classifier", "ftkit chat"]),
        (["evaluate", "MODEL", "--tasks", "arc_easy"], ["classifier", "--tasks"]),
        (["export", "MODEL", "--format", "gguf", "--out", "OUT"], ["classifier", "gguf"]),
        (["generate", "MODEL", "--prompt", "a", "--temperature", "1"], ["--temperature"]),
        (["generate", "MODEL", "--prompt", "a", "--compare_base"], ["--compare_base"]),
        (["generate", "MODEL", "--prompt", "cat " * 300], ["tokens long", "256"]),
        (["finetune", "MODEL", "--data", "JSON", "--data.path", "FILE"], ["--objective classify"]),
    ],
)  # fmt: skip
def test_what_predicts_tokens_is_refused(
    words: list[str], named: list[str], model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "texts.json"
    file.write_text(json.dumps([{"text": f"cat {n}"} for n in range(8)]))
    places = {"MODEL": str(model), "OUT": str(tmp_path / "out"), "FILE": str(file)}
    command = [places.get(word, word) for word in words]
    if command[0] == "finetune":
        command[0] = "plan"
    assert says(message_of(run, command), *named)
    assert not (tmp_path / "out").exists()


def test_labels_are_shown_with_the_data(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "texts.json"
    rows = [{"text": f"cat {n}", "label": ["good", "bad", "bad"][n % 3]} for n in range(9)]
    file.write_text(json.dumps(rows))
    words = ["data", str(model.with_name("base")), "--objective", "classify", "--data", "JSON"]
    words += ["--data.path", str(file), "--data.val_split_fraction", "0", "--show", "1"]
    assert run(words) == 0
    shown = capsys.readouterr().out
    assert says(shown, "6 bad, 3 good", "training sample 0, ... tokens")
    assert "learn to stop" not in shown
