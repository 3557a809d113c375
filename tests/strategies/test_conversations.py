"""Promises P1 and P2 over masked conversations: several trained spans in a sample, some in none."""

import json
import random
from typing import Any

import pytest
from rank_jobs import Case, Outcome, Run, chosen, make_run, repeated
from tiny import WORDS

SPLIT = """
{%- for message in messages -%}
{{- '<' ~ message.role ~ '>' -}}
{%- if message.reasoning_content and loop.last -%}({{ message.reasoning_content }}){%- endif -%}
{{- message.content ~ eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}<assistant>{%- endif -%}
"""
"""Shows what the assistant thought in its last turn alone, so that conversations are split."""
KEYS = ("ddp", *repeated("fsdp", "deepspeed"))
"""Under FSDP a run resumes."""
pytestmark = pytest.mark.slow


def conversation(rng: random.Random) -> dict[str, Any]:
    """One to four turns; some are not trained on, some were thought about."""

    def words() -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))

    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": "system", "content": words()})
    turns = rng.randint(1, 4)
    for turn in range(turns):
        answer: dict[str, Any] = {"role": "assistant", "content": words()}
        if rng.random() < 0.3:
            answer["reasoning_content"] = words()
        if turn < turns - 1 and rng.random() < 0.3:
            answer["train"] = False
        messages += [{"role": "user", "content": words()}, answer]
    return {"messages": messages}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[str, Any], ...]:
    directory = tmp_path_factory.mktemp("conversations")
    rng = random.Random(7)
    lines = [json.dumps(conversation(rng)) + "\n" for _ in range(30)]
    (directory / "chats.jsonl").write_text("".join(lines))
    (directory / "template.jinja").write_text(SPLIT)
    return (
        ("data.json_path", None),
        ("data.mask_prompt", None),
        ("data.path", str(directory / "chats.jsonl")),
        ("data.chat_template", str(directory / "template.jinja")),
        ("train.epochs", 1),
        ("eval.max_new_tokens", 0),
        ("eval.exact_match", 0),
        ("eval.rouge_l", 0),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


@pytest.fixture(scope="module")
def alone(run: Run, data: tuple[tuple[str, Any], ...]) -> dict[str, Outcome]:
    cases = {
        "whole": Case("single", "lora", changes=data),
        "one by one": Case("single", "lora", changes=(*data, ("train.micro_batch_size", 1))),
        "half": Case("single", "lora", changes=data, stop_after=2),
    }
    found = run(1, list(cases.values()))
    return {name: found[case] for name, case in cases.items()}


@pytest.fixture(scope="module")
def in_two(
    run: Run,
    data: tuple[tuple[str, Any], ...],
    alone: dict[str, Outcome],
    request: pytest.FixtureRequest,
) -> dict[str, Outcome]:
    selected = chosen(request, test_two_ranks_learn_from_conversations_as_one_does)
    names = [params["strategy"] for params in selected]
    cases = {name: Case(name, "lora", changes=data) for name in names}
    cases["resumed"] = Case("fsdp", "lora", changes=data, start=alone["half"].out_dir)
    found = run(2, list(cases.values()))
    return {name: found[case] for name, case in cases.items()}


def assert_learned_the_same(found: Outcome, expected: Outcome) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.validation_losses == pytest.approx(expected.validation_losses, rel=1e-5)
    columns = ("samples", "tokens")
    assert [[row[c] for c in columns] for row in found.rows] == [
        [row[c] for c in columns] for row in expected.rows
    ]


def test_samples_of_these_tests_have_several_spans_and_some_are_split(
    alone: dict[str, Outcome],
) -> None:
    report = alone["whole"].report
    assert report.data is not None
    counts = report.data["train"]
    assert counts.samples is not None and counts.samples > counts.used
    assert 0 < counts.split_by_turn < counts.used
    assert counts.tokens is not None and 0 < (counts.label_tokens or 0) < counts.tokens / 2


@pytest.mark.parametrize("strategy", KEYS)
def test_two_ranks_learn_from_conversations_as_one_does(
    strategy: str, in_two: dict[str, Outcome], alone: dict[str, Outcome]
) -> None:
    assert_learned_the_same(in_two[strategy], alone["whole"])


def test_the_size_of_micro_batches_changes_nothing(alone: dict[str, Outcome]) -> None:
    assert_learned_the_same(alone["one by one"], alone["whole"])


def test_a_run_resumes_under_another_strategy(
    in_two: dict[str, Outcome], alone: dict[str, Outcome]
) -> None:
    assert_learned_the_same(in_two["resumed"], alone["whole"])
