"""Full fine-tuning of a part of a model, on any layout, and what checkpoints have of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import (
    HAS_DEEPSPEED,
    NO_EVALUATION,
    Case,
    Outcome,
    Run,
    chosen,
    layouts,
    make_run,
)
from safetensors.torch import load_file

from ftkit.checkpoint.metadata import read_metadata
from ftkit.checkpoint.stored_state import StoredState
from ftkit.evaluation.loading import full_weights, open_result
from ftkit.evaluation.result import find_result
from ftkit.models.pretrained.base_model import storage_of

pytestmark = pytest.mark.slow
PARTS: dict[str, tuple[tuple[tuple[str, Any], ...], bool]] = {
    # Nothing below it has a backward pass.
    "matrices of the last layer": (
        (("train.only", "layers[.]1[.]"), ("train.freeze", "norm")),
        False,
    ),
    "head": ((("train.only", "lm_head"),), False),
    # One parameter that is embedding and head, and the last norm.
    "tied embedding": ((("train.freeze", "layers"),), True),
    # Matrices alone, which Muon updates without AdamW beside it.
    "by Muon": ((("train.only", "mlp"), ("optimizer", "Muon")), False),
    "averaged, updated in the backward pass": (
        (
            ("train.only", "layers[.]1[.]"),
            ("train.max_norm", None),
            ("train.micro_batch_size", 11),
            ("train.optimizer_in_backward", True),
            ("train.ema_decay", 0.7),
        ),
        False,
    ),
}
"""What is trained: changed keys, and whether embedding and head are one."""
EVERYWHERE = ["matrices of the last layer", "head", "tied embedding"]
ON_TWO = [
    *((strategy, part) for part in EVERYWHERE for strategy in ("ddp", "fsdp", "deepspeed")),
    ("fsdp", "averaged, updated in the backward pass"),
]
OFTEN = [
    ("deepspeed", "matrices of the last layer"),
    ("fsdp", "averaged, updated in the backward pass"),
]
OFTEN_CONTINUED = [
    ("fsdp", "matrices of the last layer"),
    ("ddp", "head"),
    ("fsdp", "tied embedding"),
]
"""Outside the matrix; the others repeat them, and what continues under a strategy learns there."""
CUT = 4
"""Steps of a first session."""


def case_of(name: str, strategy: str, **keys: Any) -> Case:
    changes, tied = PARTS[name]
    return Case(strategy, "full", changes=(*NO_EVALUATION, *changes), tied=tied, **keys)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


@pytest.fixture(scope="module")
def alone(run: Run) -> dict[Case, Outcome]:
    """Runs on one rank: at once, and their first sessions."""
    cases = [case_of(name, "single") for name in PARTS]
    firsts = [case_of(name, "single", stop_after=CUT) for name in PARTS]
    return run(1, [*cases, *firsts])


@pytest.fixture(scope="module")
def on_two(
    run: Run, alone: dict[Case, Outcome], request: pytest.FixtureRequest
) -> dict[Case, Outcome]:
    """Runs on two ranks of the selected tests: at once, and continued from one rank."""
    whole, second = (
        [
            case_of(params["part"], params["strategy"])
            for params in chosen(request, test)
            if HAS_DEEPSPEED or params["strategy"] != "deepspeed"
        ]
        for test in (
            test_two_ranks_train_a_part_as_one_does,
            test_a_part_continues_under_another_strategy,
        )
    )
    return run(2, [*whole, *(second_of(alone, case) for case in second)])


@pytest.fixture(scope="module")
def continued(run: Run, alone: dict[Case, Outcome]) -> dict[Case, Outcome]:
    """Second sessions on one rank."""
    return run(1, [second_of(alone, case_of(part, "single")) for part in PARTS])


def second_of(firsts: dict[Case, Outcome], case: Case) -> Case:
    first = next(
        one for one in firsts if one.stop_after is not None and one.changes == case.changes
    )
    return Case(**(vars(case) | {"start": firsts[first].out_dir}))


def changed(outcome: Outcome) -> set[str]:
    """Names of the parameters that training changed."""
    base = load_file(Path(outcome.report.recipe["checkpoint_dir"]) / "model.safetensors")
    weights = outcome.weights()
    assert weights.keys() == base.keys(), "a whole model"
    return {name for name, tensor in weights.items() if not torch.equal(tensor, base[name])}


@pytest.mark.parametrize(
    ("part", "names"),
    [
        (
            "matrices of the last layer",
            {
                f"model.layers.1.{name}.weight"
                for name in (
                    *(f"self_attn.{kind}_proj" for kind in "qkvo"),
                    *(f"mlp.{kind}_proj" for kind in ("gate", "up", "down")),
                )
            },
        ),
        ("head", {"lm_head.weight"}),
        ("tied embedding", {"model.embed_tokens.weight", "model.norm.weight"}),
    ],
)
def test_the_result_is_a_whole_model_of_which_the_part_alone_is_trained(
    alone: dict[Case, Outcome], part: str, names: set[str]
) -> None:
    found = alone[case_of(part, "single")]
    assert changed(found) == names
    assert found.losses[-1] < found.losses[0]
    resolved = found.report.resolved
    assert resolved is not None
    numbers = sum(tensor.numel() for name, tensor in found.weights().items() if name in names)
    assert resolved.trainable_parameters == numbers


@pytest.mark.parametrize(("strategy", "part"), layouts(ON_TWO, OFTEN))
def test_two_ranks_train_a_part_as_one_does(
    on_two: dict[Case, Outcome], alone: dict[Case, Outcome], strategy: str, part: str
) -> None:
    assert_same_losses(on_two[case_of(part, strategy)], alone[case_of(part, "single")])


@pytest.mark.parametrize(("strategy", "part"), layouts(ON_TWO, OFTEN_CONTINUED))
def test_a_part_continues_under_another_strategy(
    on_two: dict[Case, Outcome], alone: dict[Case, Outcome], strategy: str, part: str
) -> None:
    second = on_two[second_of(alone, case_of(part, strategy))]
    assert_same_losses(second, alone[case_of(part, "single")])


@pytest.mark.parametrize("part", PARTS)
def test_a_part_continues_on_the_same_layout_to_the_bit(
    continued: dict[Case, Outcome], alone: dict[Case, Outcome], part: str
) -> None:
    second = continued[second_of(alone, case_of(part, "single"))]
    expected = alone[case_of(part, "single")]
    assert second.losses == expected.losses
    weights = expected.weights()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in second.weights().items())


def test_a_checkpoint_holds_the_part_alone_and_gives_the_result_with_its_base(
    alone: dict[Case, Outcome],
) -> None:
    for part in ("matrices of the last layer", "averaged, updated in the backward pass"):
        found = alone[case_of(part, "single")]
        metadata = read_metadata(found.checkpoint)
        stored = StoredState.in_checkpoint(found.checkpoint, metadata).names()
        trained = {name.partition("/")[2] for name in stored}
        assert len(trained) == len(changed(found)), "a fused name is none of these"
        result = find_result(str(found.checkpoint))
        base = open_result(result)
        written = storage_of(base.architecture, "hf").written(full_weights(result, base))
        weights = found.weights()
        for name, tensor in written:
            assert torch.equal(tensor, weights.pop(name)), name
        assert not weights


def assert_same_losses(found: Outcome, expected: Outcome) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    weights = found.weights()
    for name, tensor in expected.weights().items():
        torch.testing.assert_close(weights[name], tensor, rtol=0, atol=1e-5)
