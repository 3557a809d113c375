"""Promise P1 with weights: ranks, strategies and micro-batches never change what is learned."""

import json
from pathlib import Path

import pytest
from rank_jobs import NO_EVALUATION, Case, Outcome, Run, make_run, needs_deepspeed
from tiny import make_records

WEIGHTS = (0.25, 1, 3)
VALIDATED = (*NO_EVALUATION, ("eval.interval", 3), ("eval.initial_validation", True))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Files of the same records: without weights, with equal ones, and with different ones."""
    directory = tmp_path_factory.mktemp("data")
    records = make_records(60)
    weights = {
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


def case(strategy: str, file: str, micro_batch_size: int, start: Path | None = None) -> Case:
    changes = (("data.json_path", file), ("train.micro_batch_size", micro_batch_size), *VALIDATED)
    return Case(strategy, "lora", changes=changes, start=start)


@pytest.fixture(scope="module")
def single(run: Run, data: dict[str, str]) -> dict[str, Outcome]:
    cases = {name: case("single", file, 5) for name, file in data.items()}
    outcomes = run(1, list(cases.values()))
    return {name: outcomes[one] for name, one in cases.items()}


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.validation_losses == pytest.approx(expected.validation_losses, rel=1e-5)
    assert len(expected.validation_losses) > 1


def test_equal_weights_change_nothing_and_others_do(single: dict[str, Outcome]) -> None:
    assert_same(single["equal"], single["plain"])
    assert single["different"].losses != pytest.approx(single["plain"].losses, rel=1e-3)
    before = [outcome.validation_losses[0] for outcome in single.values()]
    assert before[0] == pytest.approx(before[1], rel=1e-6) != pytest.approx(before[2], rel=1e-4)


@pytest.mark.parametrize(
    ("strategy", "micro_batch_size"),
    [
        pytest.param("fsdp", 1, marks=pytest.mark.slow),
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
    of_two = case(strategy, data["different"], micro_batch_size)
    assert_same(run(2, [of_two])[of_two], single["different"])
