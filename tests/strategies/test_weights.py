"""Promise P1 with weights and adapted losses: ranks and micro-batches never change what is learned.

Weights are of records; `dft` weighs each token by its own probability besides, and a z-loss is a
second number of each token.
"""

import json
from typing import Any

import pytest
from rank_jobs import NO_EVALUATION, Case, Outcome, Run, make_run, needs_deepspeed
from tiny import make_records

WEIGHTS = (0.25, 1, 3)
VALIDATED = (
    *NO_EVALUATION,
    ("train.epochs", 1),
    ("eval.interval", 2),
    ("eval.initial_validation", True),
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files of the same records: without weights, with equal ones, and with different ones."""
    directory = tmp_path_factory.mktemp("data")
    records = make_records(60)
    weights: dict[str, list[float]] = {
        "plain": [1] * len(records),
        "equal": [0.5] * len(records),
        "different": [WEIGHTS[i % len(WEIGHTS)] for i in range(len(records))],
    }
    files = {}
    for name, of_records in weights.items():
        rows = [
            row | {"loss_weight": weight} for row, weight in zip(records, of_records, strict=True)
        ]
        file = directory / f"{name}.json"
        file.write_text(json.dumps(rows))
        files[name] = str(file)
    return files


Changes = tuple[tuple[str, Any], ...]
LOSSES: dict[str, Changes] = {
    "different": (),
    "dft": (("objective", "dft"),),
    "z-loss": (("objective.z_loss", 0.01),),
}
"""Losses of data with different weights, and what chooses them."""


def case(strategy: str, file: str, micro_batch_size: int, changes: Changes = ()) -> Case:
    keys = {"data.json_path": file, "train.micro_batch_size": micro_batch_size}
    return Case(strategy, "lora", changes=(*keys.items(), *changes, *VALIDATED))


@pytest.fixture(scope="module")
def single(run: Run, data: dict[str, str]) -> dict[str, Outcome]:
    cases = {name: case("single", file, 5) for name, file in data.items()}
    cases |= {name: case("single", data["different"], 5, one) for name, one in LOSSES.items()}
    outcomes = run(1, list(cases.values()))
    return {name: outcomes[one] for name, one in cases.items()}


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.validation_losses == pytest.approx(expected.validation_losses, rel=1e-5)
    assert len(expected.validation_losses) > 1


@pytest.mark.slow
def test_equal_weights_change_nothing_and_others_do(single: dict[str, Outcome]) -> None:
    assert_same(single["equal"], single["plain"])
    assert single["different"].losses != pytest.approx(single["plain"].losses, rel=1e-3)
    before = {name: outcome.validation_losses[0] for name, outcome in single.items()}
    assert before["equal"] == pytest.approx(before["plain"], rel=1e-6)
    assert before["different"] != pytest.approx(before["plain"], rel=1e-4)


@pytest.mark.slow
def test_an_adapted_loss_is_smaller_and_validated_by_cross_entropy(
    single: dict[str, Outcome],
) -> None:
    adapted, plain = single["dft"], single["different"]
    assert adapted.losses[0] < plain.losses[0] / 10, "a random model holds all for unlikely"
    assert adapted.validation_losses[0] == plain.validation_losses[0]
    assert adapted.validation_losses[-1] < adapted.validation_losses[0]


@pytest.mark.slow
def test_a_z_loss_is_reported_for_each_step_and_no_part_of_validations(
    single: dict[str, Outcome],
) -> None:
    columns = ("loss", "cross_entropy", "z_loss")
    loss, cross_entropy, z_loss = (float(single["z-loss"].rows[0][name] or 0) for name in columns)
    assert cross_entropy == pytest.approx(single["different"].losses[0], rel=1e-6)
    assert loss == pytest.approx(cross_entropy + 0.01 * z_loss, rel=1e-6)
    assert single["z-loss"].validation_losses[0] == single["different"].validation_losses[0]


@pytest.mark.parametrize(
    ("strategy", "micro_batch_size"),
    [
        pytest.param("fsdp", 3, marks=pytest.mark.slow),
        pytest.param("ddp", 2, marks=pytest.mark.matrix),
        pytest.param("deepspeed", 2, marks=[pytest.mark.matrix, needs_deepspeed]),
    ],
)
def test_two_ranks_learn_the_same_from_weights(
    run: Run,
    single: dict[str, Outcome],
    data: dict[str, str],
    strategy: str,
    micro_batch_size: int,
) -> None:
    cases = {
        name: case(strategy, data["different"], micro_batch_size, changes)
        for name, changes in LOSSES.items()
    }
    outcomes = run(2, list(cases.values()))
    for name, of_two in cases.items():
        assert_same(outcomes[of_two], single[name])
