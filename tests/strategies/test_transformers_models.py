"""Promises P1 and P2 over models that transformers computes: windows, experts, a tied head."""

from pathlib import Path
from typing import Any

import pytest
from conversions import assert_equal, merge, own_logits, transformers_logits
from rank_jobs import Case, Outcome, Run, assert_same_maths, make_run, needs_deepspeed
from transformers_models import make_transformers_model

MODELS = {
    "window": "mistral window",
    "experts": "qwen3_moe",
    "tied": "gemma",
}
OTHER_EXPERTS = ("mixtral", "gpt_oss", "olmoe")
THEIRS: tuple[tuple[str, Any], ...] = (
    ("model_implementation", "transformers"),
    # A tied model says the last token of its prompt again: a word, not the end of a line.
    ("data.prompt_style", "litgpt.prompts.Default"),
)
pytestmark = pytest.mark.slow
STRATEGIES = ("ddp", "fsdp", pytest.param("deepspeed", marks=needs_deepspeed))


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[tuple[str, Any], ...]]:
    directory = tmp_path_factory.mktemp("transformers")
    return {
        name: (*THEIRS, ("checkpoint_dir", str(make_transformers_model(directory / name, model))))
        for name, model in MODELS.items()
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


Found = dict[tuple[str, ...], Outcome]


@pytest.fixture(scope="module")
def alone(run: Run, changes: dict[str, tuple[tuple[str, Any], ...]]) -> Found:
    cases: dict[tuple[str, ...], Case] = {}
    for model, changed in changes.items():
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
        if model == "experts":
            adapted = (*changed, ("quantize", "bnb.nf4"), ("lora_experts", True))
            cases[model, "adapted"] = Case("single", "lora", changes=adapted)
            half = Case("single", "lora", changes=adapted, stop_after=2)
            cases[model, "half of adapted"] = half
    found = run(1, list(cases.values()))
    return {name: found[case] for name, case in cases.items()}


@pytest.fixture(scope="module")
def in_two(run: Run, changes: dict[str, tuple[tuple[str, Any], ...]], alone: Found) -> Found:
    cases: dict[tuple[str, ...], Case] = {}
    for model, changed in changes.items():
        quantized = (*changed, ("quantize", "bnb.nf4"))
        for strategy in ("ddp", "fsdp", "deepspeed"):
            cases[model, strategy, "full"] = Case(strategy, "full", changes=changed)
            cases[model, strategy, "nf4"] = Case(strategy, "lora", changes=quantized)
        if model == "experts":
            adapted = (*quantized, ("lora_experts", True))
            for strategy in ("ddp", "fsdp", "deepspeed"):
                cases[model, strategy, "adapted"] = Case(strategy, "lora", changes=adapted)
            half = alone[model, "half of adapted"].out_dir
            cases[model, "fsdp", "adapted resumed"] = Case(
                "fsdp", "lora", changes=adapted, start=half
            )
        half = alone[model, "half"].out_dir
        cases[model, "fsdp", "resumed"] = Case("fsdp", "lora", changes=changed, start=half)
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


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_pairs_of_quantised_experts_learn_the_same_everywhere(
    strategy: str, in_two: Found, alone: Found
) -> None:
    found = alone["experts", "adapted"]
    assert found.losses[-1] < found.losses[0] and found.losses != alone["experts", "nf4"].losses
    assert any(".experts.base_layer.lora_B." in name for name in found.weights())
    assert_same_maths(in_two["experts", strategy, "adapted"], found)


def test_pairs_of_experts_go_on_under_another_strategy(in_two: Found, alone: Found) -> None:
    assert_same_maths(in_two["experts", "fsdp", "adapted resumed"], alone["experts", "adapted"])


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
        quantized = (*changed, ("quantize", "bnb.nf4"))
        for strategy in ("single", "ddp", "fsdp", "deepspeed"):
            of = cases[1 if strategy == "single" else 2]
            of[model, strategy, "full"] = Case(strategy, "full", changes=changed)
            of[model, strategy, "nf4"] = Case(strategy, "lora", changes=quantized)
    found: Found = {}
    for world_size, chosen in cases.items():
        outcomes = run(world_size, list(chosen.values()))
        found |= {name: outcomes[case] for name, case in chosen.items()}
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("model", OTHER_EXPERTS)
@pytest.mark.parametrize("method", ["full", "nf4"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_ranks_learn_what_one_learns_with_other_shapes_of_experts(
    model: str, strategy: str, method: str, of_others: Found
) -> None:
    alone = of_others[model, "single", method]
    assert alone.losses[-1] < alone.losses[0]
    assert_same_maths(of_others[model, strategy, method], alone)


@pytest.mark.parametrize("model", MODELS)
def test_a_run_goes_on_under_another_strategy(model: str, in_two: Found, alone: Found) -> None:
    assert_same_maths(in_two[model, "fsdp", "resumed"], alone[model, "lora"])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", ["full", "lora", "nf4"])
def test_the_loss_falls(model: str, method: str, alone: Found) -> None:
    losses = alone[model, method].losses
    assert losses[-1] < losses[0]
