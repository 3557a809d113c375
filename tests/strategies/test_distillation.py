"""Promises P1 and P2 for distillation, where a second model computes beside the trained one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import NO_EVALUATION, Case, Outcome, Run, make_run, needs_deepspeed
from tiny import make_llama

pytestmark = pytest.mark.slow
STRATEGIES = ("ddp", "fsdp", pytest.param("deepspeed", marks=needs_deepspeed))
STAGE_3 = (("strategy.stage", 3),)
Changes = tuple[tuple[str, Any], ...]
LAYOUTS: dict[str, Changes] = {
    "one by one": (("train.micro_batch_size", 1),),
    "two": (("train.micro_batch_size", 2),),
    "five, padded": (("train.micro_batch_size", 5), ("train.padding_free", False)),
    "a number of tokens": (("train.micro_batch_size", None), ("train.micro_batch_tokens", 90)),
    "checkpointed": (("memory.activation_checkpointing", True),),
}
OPTIONS: dict[str, Changes] = {
    "forward": (),
    "reverse": (
        ("objective.divergence", "reverse"),
        ("objective.temperature", 2.0),
        ("objective.sft_weight", 0.5),
    ),
}
Found = dict[tuple[str, ...], Outcome]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wider and deeper model than the student, of which it is surer."""
    return make_llama(
        tmp_path_factory.mktemp("teacher") / "large",
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=6,
        initializer_range=0.1,
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="module")
def found(run: Run, teacher: Path) -> Found:
    """All runs, by the divergence and what they are."""
    known: Found = {}
    single: dict[tuple[str, ...], Case] = {}
    double: dict[tuple[str, ...], Case] = {}
    for name, options in OPTIONS.items():
        changes = (
            ("objective", "distill"),
            *options,
            ("teacher", str(teacher)),
            ("train.epochs", 1),
            *NO_EVALUATION,
            ("eval.interval", 2),
        )
        method = "full" if name == "forward" else "lora"
        single[name,] = Case("single", method, changes=changes)
        single[name, "half"] = Case("single", method, changes=changes, stop_after=2)
        if name == "forward":
            for layout, others in LAYOUTS.items():
                single[name, layout] = Case("single", method, changes=(*changes, *others))
    alone = run(1, list(single.values()))
    known = {key: alone[case] for key, case in single.items()}
    for name in OPTIONS:
        case = single[name,]
        for strategy in ("ddp", "fsdp", "deepspeed"):
            changes = case.changes + (STAGE_3 if strategy == "deepspeed" else ())
            double[name, strategy] = Case(strategy, case.method, changes=changes)
            start = known[name, "half"].out_dir
            double[name, strategy, "resumed"] = Case(
                strategy, case.method, changes=changes, start=start
            )
    in_two = run(2, list(double.values()))
    return known | {key: in_two[case] for key, case in double.items()}


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert len(expected.losses) == 5
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.validation_losses == pytest.approx(expected.validation_losses, rel=1e-5)
    values = [row["cross_entropy"] for row in expected.rows]
    assert [row["cross_entropy"] for row in found.rows] == pytest.approx(values, rel=1e-5)
    weights = found.weights()
    for name, tensor in expected.weights().items():
        torch.testing.assert_close(weights.pop(name), tensor, rtol=0, atol=1e-5)
    assert not weights


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_of_micro_batches_changes_nothing(layout: str, found: Found) -> None:
    assert_same(found["forward", layout], found["forward",])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("options", OPTIONS)
def test_two_ranks_learn_as_one_does(options: str, strategy: str, found: Found) -> None:
    assert_same(found[options, strategy], found[options,])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_run_resumes_under_every_strategy(options: str, strategy: str, found: Found) -> None:
    assert_same(found[options, strategy, "resumed"], found[options,])


@pytest.mark.parametrize("options", OPTIONS)
def test_the_student_comes_closer_to_its_teacher(options: str, found: Found) -> None:
    losses = found[options,].losses
    assert losses[-1] < losses[0] - 0.01
