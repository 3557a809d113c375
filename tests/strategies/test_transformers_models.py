"""Promises P1 and P2 over models that transformers computes: windows, experts, a tied head.

And the language model of one that sees, whose rest is with every result.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import TOKENS
from computed import logits_by
from conversions import assert_equal, merge, own_logits, transformers_logits
from multimodal_models import make_multimodal_model, multimodal_model
from rank_jobs import (
    DEEPSPEED,
    METHODS,
    NO_EVALUATION,
    Case,
    Outcome,
    Run,
    assert_same_maths,
    chosen,
    layouts,
    make_run,
    repeated,
)
from safetensors.torch import load_file
from transformers_models import make_transformers_model

from ftkit.recipe.recipe import Method

MODELS = {
    "window": "mistral window",
    "experts": "qwen3_moe",
    "tied": "gemma",
}
OTHER_EXPERTS = ("mixtral", "gpt_oss", "olmoe")
Keys = tuple[tuple[str, Any], ...]
"""Keys of a recipe, with their values."""
THEIRS: Keys = (
    *NO_EVALUATION,
    ("model_implementation", "transformers"),
    ("data.prompt_style", "litgpt.prompts.Default"),
)
SEES = "sees"
pytestmark = pytest.mark.slow
STRATEGIES = ("ddp", "fsdp", DEEPSPEED)
IN_TWO = [
    (model, strategy, method)
    for model in MODELS
    for strategy in ("ddp", "fsdp", "deepspeed")
    for method in ("full", "nf4")
]
OFTEN = {
    ("tied", "fsdp", "full"),
    ("experts", "ddp", "full"),
    ("experts", "fsdp", "full"),
    ("experts", "deepspeed", "nf4"),
}
"""Outside the matrix: experts under each strategy, and a tied head. Each resumes under FSDP."""
HOWS = ("one by one", "padded")
OFTEN_ALONE = {("window", "padded"), ("tied", "one by one"), ("experts", "one by one")}


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Keys]:
    directory = tmp_path_factory.mktemp("transformers")
    made = {name: make_transformers_model(directory / name, m) for name, m in MODELS.items()}
    made[SEES] = make_multimodal_model(directory / SEES, "gemma3")
    return {name: (*THEIRS, ("checkpoint_dir", str(where))) for name, where in made.items()}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


Found = dict[tuple[str, ...], Outcome]


def quantized(keys: Keys) -> Keys:
    return (*keys, ("quantize", "bnb.nf4"))


@pytest.fixture(scope="module")
def alone(run: Run, changes: dict[str, Keys], request: pytest.FixtureRequest) -> Found:
    cases: dict[tuple[str, ...], Case] = {}
    for model in MODELS:
        changed = changes[model]
        cases |= {
            (model, "full"): Case("single", "full", changes=changed),
            (model, "lora"): Case("single", "lora", changes=changed),
            (model, "nf4"): Case("single", "lora", changes=quantized(changed)),
            (model, "half"): Case("single", "lora", changes=changed, stop_after=2),
        }
        if model == "experts":
            adapted = (*quantized(changed), ("lora_experts", True), ("lora_dropout", 0))
            cases[model, "adapted"] = Case("single", "lora", changes=adapted)
            half = Case("single", "lora", changes=adapted, stop_after=2)
            cases[model, "half of adapted"] = half
    more = {"one by one": ("train.micro_batch_size", 1), "padded": ("train.padding_free", False)}
    for one in chosen(request, test_the_micro_batch_changes_nothing):
        model, how = one["model"], one["how"]
        cases[model, how] = Case("single", "full", changes=(*changes[model], more[how]))
    for method in METHODS:
        cases[SEES, method] = Case("single", method, changes=changes[SEES])
        cases[SEES, method, "half"] = Case("single", method, changes=changes[SEES], stop_after=2)
    cases[SEES, "nf4"] = Case("single", "lora", changes=quantized(changes[SEES]))
    found = run(1, list(cases.values()))
    return {name: found[case] for name, case in cases.items()}


def case_in_two(changed: Keys, strategy: str, method: str) -> Case:
    if method == "full":
        return Case(strategy, "full", changes=changed)
    return Case(strategy, "lora", changes=quantized(changed))


@pytest.fixture(scope="module")
def in_two(
    run: Run, changes: dict[str, Keys], alone: Found, request: pytest.FixtureRequest
) -> Found:
    cases: dict[tuple[str, ...], Case] = {}
    for one in chosen(request, test_two_ranks_learn_as_one_does):
        model, strategy, method = one["model"], one["strategy"], one["method"]
        cases[model, strategy, method] = case_in_two(changes[model], strategy, method)
    for model in MODELS:
        changed = changes[model]
        if model == "experts":
            adapted = (*quantized(changed), ("lora_experts", True), ("lora_dropout", 0))
            test = test_pairs_of_quantised_experts_learn_the_same_everywhere
            for strategy in (one["strategy"] for one in chosen(request, test)):
                cases[model, strategy, "adapted"] = Case(strategy, "lora", changes=adapted)
            half = alone[model, "half of adapted"].out_dir
            cases[model, "fsdp", "adapted resumed"] = Case(
                "fsdp", "lora", changes=adapted, start=half
            )
        half = alone[model, "half"].out_dir
        cases[model, "fsdp", "resumed"] = Case("fsdp", "lora", changes=changed, start=half)
    for method in METHODS:
        half = alone[SEES, method, "half"].out_dir
        cases[SEES, method, "resumed"] = Case("fsdp", method, changes=changes[SEES], start=half)
    cases[SEES, "nf4"] = Case("fsdp", "lora", changes=quantized(changes[SEES]))
    found = run(2, list(cases.values()))
    return {name: found[case] for name, case in cases.items()}


@pytest.mark.parametrize(("model", "how"), layouts(itertools.product(MODELS, HOWS), OFTEN_ALONE))
def test_the_micro_batch_changes_nothing(model: str, how: str, alone: Found) -> None:
    assert_same_maths(alone[model, how], alone[model, "full"], validations=0)


@pytest.mark.parametrize(("model", "strategy", "method"), layouts(IN_TWO, OFTEN))
def test_two_ranks_learn_as_one_does(
    model: str, strategy: str, method: str, alone: Found, in_two: Found
) -> None:
    assert_same_maths(in_two[model, strategy, method], alone[model, method], validations=0)


@pytest.mark.parametrize("strategy", [*repeated("ddp", "fsdp"), DEEPSPEED])
def test_pairs_of_quantised_experts_learn_the_same_everywhere(
    strategy: str, in_two: Found, alone: Found
) -> None:
    found = alone["experts", "adapted"]
    assert found.losses[-1] < found.losses[0] and found.losses != alone["experts", "nf4"].losses
    assert any(".experts.base_layer.lora_B." in name for name in found.weights())
    assert_same_maths(in_two["experts", strategy, "adapted"], found, validations=0)


def test_pairs_of_experts_go_on_under_another_strategy(in_two: Found, alone: Found) -> None:
    resumed = in_two["experts", "fsdp", "adapted resumed"]
    assert_same_maths(resumed, alone["experts", "adapted"], validations=0)


@pytest.mark.parametrize("how", ["nf4", "adapted"])
def test_a_merged_quantised_run_has_its_logits(how: str, alone: Found, tmp_path: Path) -> None:
    outcome = alone["experts", how]
    outcome.complete()
    logits = transformers_logits(merge(outcome.out_dir, tmp_path / "merged"))
    assert_equal(logits, own_logits(outcome.out_dir))
    assert (logits - own_logits(outcome.out_dir, quantize=None)).abs().max() > 1e-3


@pytest.fixture(scope="module")
def of_others(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Runs of the other shapes of experts, by model, strategy and method."""
    directory = tmp_path_factory.mktemp("others")
    cases: dict[int, dict[tuple[str, ...], Case]] = {1: {}, 2: {}}
    for model in OTHER_EXPERTS:
        made = str(make_transformers_model(directory / model, model))
        # Mixtral's router has gradients of little more than what rounding leaves, which Adam turns
        # into whole steps below its usual eps of 1e-8.
        changed = (*THEIRS, ("checkpoint_dir", made), ("optimizer.eps", 1e-6))
        packed = quantized(changed)
        for strategy in ("single", "ddp", "fsdp", "deepspeed"):
            of = cases[1 if strategy == "single" else 2]
            of[model, strategy, "full"] = Case(strategy, "full", changes=changed)
            of[model, strategy, "nf4"] = Case(strategy, "lora", changes=packed)
    found: Found = {}
    for world_size, group in cases.items():
        outcomes = run(world_size, list(group.values()))
        found |= {name: outcomes[case] for name, case in group.items()}
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("model", OTHER_EXPERTS)
@pytest.mark.parametrize("method", ["full", "nf4"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_learn_as_one_does_with_other_shapes_of_experts(
    model: str, strategy: str, method: str, of_others: Found
) -> None:
    alone = of_others[model, "single", method]
    assert alone.losses[-1] < alone.losses[0]
    assert_same_maths(of_others[model, strategy, method], alone, validations=0)


@pytest.mark.parametrize("model", MODELS)
def test_a_run_resumes_under_another_strategy(model: str, in_two: Found, alone: Found) -> None:
    assert_same_maths(in_two[model, "fsdp", "resumed"], alone[model, "lora"], validations=0)


@pytest.mark.parametrize("method", METHODS)
def test_the_language_model_of_a_multimodal_model_resumes_under_another_strategy(
    method: Method, in_two: Found, alone: Found
) -> None:
    losses = alone[SEES, method].losses
    assert losses[-1] < losses[0]
    assert_same_maths(in_two[SEES, method, "resumed"], alone[SEES, method], validations=0)


def base_of(changes: dict[str, Keys]) -> str:
    """Directory of the model that sees."""
    return str(dict(changes[SEES])["checkpoint_dir"])


def rest_of(weights: Iterable[str]) -> list[str]:
    """Weights beside the language model."""
    return [name for name in weights if "language_model" not in name]


def test_results_of_a_multimodal_model_keep_untrained_weights(
    changes: dict[str, Keys], in_two: Found, alone: Found
) -> None:
    before = load_file(f"{base_of(changes)}/model.safetensors")
    rest = rest_of(before)
    assert len(rest) > 20
    for outcome in (alone[SEES, "full"], in_two[SEES, "full", "resumed"]):
        after = load_file(outcome.out_dir / "final/model.safetensors")
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], before[name]) for name in rest)
        assert not any(torch.equal(after[name], before[name]) for name in before.keys() - set(rest))


def test_one_that_sees_is_quantised_and_merged_as_others_are_but_for_its_rest(
    changes: dict[str, Keys], in_two: Found, alone: Found, tmp_path: Path
) -> None:
    outcome = alone[SEES, "nf4"]
    assert outcome.losses[-1] < outcome.losses[0] and outcome.losses != alone[SEES, "lora"].losses
    assert_same_maths(in_two[SEES, "nf4"], outcome, validations=0)
    outcome.complete()
    merged = merge(outcome.out_dir, tmp_path / "merged")
    logits = logits_by(multimodal_model(merged), [TOKENS[0]])
    assert_equal(logits, own_logits(outcome.out_dir)[0])
    assert (logits - own_logits(outcome.out_dir, quantize=None)[0]).abs().max() > 1e-3
    before, after = (load_file(f"{d}/model.safetensors") for d in (base_of(changes), merged))
    # The head is adapted, so it is the embedding no longer.
    assert after.keys() == before.keys() | {"language_model.lm_head.weight"}
    assert all(torch.equal(after[name], before[name]) for name in rest_of(before))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", ["full", "lora", "nf4"])
def test_the_loss_falls(model: str, method: str, alone: Found) -> None:
    losses = alone[model, method].losses
    assert losses[-1] < losses[0]
