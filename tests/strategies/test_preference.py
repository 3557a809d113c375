"""Promises P1 and P2 for preference pairs, whose losses depend on a reference model."""

import json
import math
from typing import Any

import pytest
import torch
from rank_jobs import NO_EVALUATION, Case, Outcome, Run, make_run, needs_deepspeed
from tiny import make_pairs

from ftkit.recipe.recipe import Method

pytestmark = pytest.mark.slow
STRATEGIES = ("ddp", "fsdp", pytest.param("deepspeed", marks=needs_deepspeed))
Changes = tuple[tuple[str, Any], ...]
LAYOUTS: dict[str, Changes] = {
    "one pair at a time": (("train.micro_batch_size", 1),),
    "two pairs": (("train.micro_batch_size", 2),),
    "five pairs, padded": (("train.micro_batch_size", 5), ("train.padding_free", False)),
    "a number of tokens": (
        ("train.micro_batch_size", None),
        ("train.micro_batch_tokens", 90),
    ),
    "checkpointed": (("memory.activation_checkpointing", True),),
}
Found = dict[tuple[str, ...], Outcome]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Changes:
    """What makes the recipe of all cases one of preference pairs."""
    file = tmp_path_factory.mktemp("pairs") / "pairs.json"
    file.write_text(json.dumps(make_pairs(40)))
    return (
        ("objective", "dpo"),
        ("objective.beta", 0.5),
        ("data.json_path", str(file)),
        ("data.mask_prompt", None),
        ("train.epochs", 1),
        *NO_EVALUATION,
        ("eval.interval", 2),
    )


@pytest.fixture(scope="module")
def found(run: Run, pairs: Changes) -> Found:
    """All runs, by method and what they are."""
    single = {
        ("lora",): Case("single", "lora", changes=pairs),
        ("lora", "half"): Case("single", "lora", changes=pairs, stop_after=1),
        **{("lora", name): Case("single", "lora", changes=(*pairs, *layout))
           for name, layout in LAYOUTS.items()},
    }  # fmt: skip
    alone = run(1, list(single.values()))
    known = {name: alone[case] for name, case in single.items()}
    double = {}
    for strategy in ("ddp", "fsdp", "deepspeed"):
        double["lora", strategy] = Case(strategy, "lora", changes=pairs)
        start = known["lora", "half"].out_dir
        double["lora", strategy, "resumed"] = Case(strategy, "lora", changes=pairs, start=start)
    in_two = run(2, list(double.values()))
    return known | {name: in_two[case] for name, case in double.items()}


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert len(expected.losses) == 3
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.validation_losses == pytest.approx(expected.validation_losses, rel=1e-5)
    weights = found.weights()
    for name, tensor in expected.weights().items():
        torch.testing.assert_close(weights.pop(name), tensor, rtol=0, atol=1e-5)
    assert not weights


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", ["lora"])
def test_the_layout_of_micro_batches_changes_nothing(
    method: Method, layout: str, found: Found
) -> None:
    assert_same(found[method, layout], found[method,])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("method", ["lora"])
def test_two_ranks_learn_as_one_does(method: Method, strategy: str, found: Found) -> None:
    assert_same(found[method, strategy], found[method,])


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("method", ["lora"])
def test_a_run_resumes_under_every_strategy(method: Method, strategy: str, found: Found) -> None:
    assert_same(found[method, strategy, "resumed"], found[method,])


@pytest.mark.parametrize("method", ["lora"])
def test_training_begins_at_the_reference(method: Method, found: Found) -> None:
    losses = found[method,].losses
    assert losses[0] == pytest.approx(math.log(2), rel=1e-6)
    assert losses[-1] < losses[0] - 0.01
