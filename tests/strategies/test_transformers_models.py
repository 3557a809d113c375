"""Promises P1 and P2 over models that transformers computes: windows, experts, a tied head.

And the language model of one that sees, whose rest is with every result.
"""

from typing import Any

import pytest
import torch
from multimodal_models import make_multimodal_model
from rank_jobs import (
    METHODS,
    Case,
    Outcome,
    Run,
    assert_same_maths,
    make_run,
    needs_deepspeed,
)
from safetensors.torch import load_file
from transformers_models import make_transformers_model

from ftkit.config.recipe import Method

MODELS = {
    "window": "mistral window",
    "experts": "qwen3_moe",
    "tied": "gemma",
}
THEIRS: tuple[tuple[str, Any], ...] = (
    ("model_implementation", "transformers"),
    # A tied model says the last token of its prompt again: a word, not the end of a line.
    ("data.prompt_style", "litgpt.prompts.Default"),
)
SEES = "sees"
pytestmark = pytest.mark.slow
STRATEGIES = ("ddp", "fsdp", pytest.param("deepspeed", marks=needs_deepspeed))


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[tuple[str, Any], ...]]:
    directory = tmp_path_factory.mktemp("transformers")
    made = {name: make_transformers_model(directory / name, m) for name, m in MODELS.items()}
    made[SEES] = make_multimodal_model(directory / SEES, "gemma3")
    return {name: (*THEIRS, ("checkpoint_dir", str(where))) for name, where in made.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


Found = dict[tuple[str, ...], Outcome]


@pytest.fixture(scope="module")
def alone(run: Run, changes: dict[str, tuple[tuple[str, Any], ...]]) -> Found:
    cases: dict[tuple[str, ...], Case] = {}
    for model in MODELS:
        changed = changes[model]
        one = (*changed, ("train.micro_batch_size", 1))
        padded = (*changed, ("train.padding_free", False))
        cases |= {
            (model, "full"): Case("single", "full", changes=changed),
            (model, "lora"): Case("single", "lora", changes=changed),
            (model, "nf4"): Case("single", "lora", changes=(*changed, ("quantize", "bnb.nf4"))),
            (model, "one by one"): Case("single", "full", changes=one),
            (model, "padded"): Case("single", "full", changes=padded),
            (model, "half"): Case("single", "lora", changes=changed, stop_after=2),
        }
    for method in METHODS:
        cases[SEES, method] = Case("single", method, changes=changes[SEES])
        cases[SEES, method, "half"] = Case("single", method, changes=changes[SEES], stop_after=2)
    found = run(1, list(cases.values()))
    return {name: found[case] for name, case in cases.items()}


@pytest.fixture(scope="module")
def in_two(run: Run, changes: dict[str, tuple[tuple[str, Any], ...]], alone: Found) -> Found:
    cases: dict[tuple[str, ...], Case] = {}
    for model in MODELS:
        changed = changes[model]
        quantized = (*changed, ("quantize", "bnb.nf4"))
        for strategy in ("ddp", "fsdp", "deepspeed"):
            cases[model, strategy, "full"] = Case(strategy, "full", changes=changed)
            cases[model, strategy, "nf4"] = Case(strategy, "lora", changes=quantized)
        half = alone[model, "half"].out_dir
        cases[model, "fsdp", "resumed"] = Case("fsdp", "lora", changes=changed, start=half)
    for method in METHODS:
        half = alone[SEES, method, "half"].out_dir
        cases[SEES, method, "resumed"] = Case("fsdp", method, changes=changes[SEES], start=half)
    found = run(2, list(cases.values()))
    return {name: found[case] for name, case in cases.items()}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("how", ["one by one", "padded"])
def test_the_micro_batch_changes_nothing(model: str, how: str, alone: Found) -> None:
    assert_same_maths(alone[model, how], alone[model, "full"])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", ["full", "nf4"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_learn_what_one_learns(
    model: str, strategy: str, method: str, in_two: Found, alone: Found
) -> None:
    assert_same_maths(in_two[model, strategy, method], alone[model, method])


@pytest.mark.parametrize("model", MODELS)
def test_a_run_goes_on_under_another_strategy(model: str, in_two: Found, alone: Found) -> None:
    assert_same_maths(in_two[model, "fsdp", "resumed"], alone[model, "lora"])


@pytest.mark.parametrize("method", METHODS)
def test_the_language_model_of_one_that_sees_goes_on_under_another_strategy(
    method: Method, in_two: Found, alone: Found
) -> None:
    losses = alone[SEES, method].losses
    assert losses[-1] < losses[0]
    assert_same_maths(in_two[SEES, method, "resumed"], alone[SEES, method])


def test_results_of_one_that_sees_hold_what_was_not_trained_as_it_was(
    changes: dict[str, tuple[tuple[str, Any], ...]], in_two: Found, alone: Found
) -> None:
    before = load_file(f"{dict(changes[SEES])['checkpoint_dir']}/model.safetensors")
    rest = [name for name in before if "language_model" not in name]
    assert len(rest) > 20
    for outcome in (alone[SEES, "full"], in_two[SEES, "full", "resumed"]):
        after = load_file(outcome.out_dir / "final/model.safetensors")
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in rest)
        assert not any(torch.equal(after[name], before[name]) for name in before.keys() - set(rest))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", ["full", "lora", "nf4"])
def test_the_loss_falls(model: str, method: str, alone: Found) -> None:
    losses = alone[model, method].losses
    assert losses[-1] < losses[0]
