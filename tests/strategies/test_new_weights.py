"""Training from scratch: it begins with the same numbers on any ranks and micro-batches."""

import pytest
from rank_jobs import NO_EVALUATION, Case, Outcome, Run, make_run, needs_deepspeed


def case(strategy: str, micro_batch_size: int, *, is_new: bool = True) -> Case:
    keys = {"train.from_scratch": is_new, "train.micro_batch_size": micro_batch_size}
    return Case(strategy, "full", changes=(*keys.items(), *NO_EVALUATION, ("train.epochs", 1)))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


@pytest.fixture(scope="module")
def single(run: Run) -> Outcome:
    new, given = case("single", 5), case("single", 5, is_new=False)
    outcomes = run(1, [new, given])
    assert outcomes[new].losses[0] != pytest.approx(outcomes[given].losses[0], rel=1e-4)
    return outcomes[new]


@pytest.mark.parametrize(
    ("strategy", "micro_batch_size"),
    [
        pytest.param("fsdp", 1, marks=pytest.mark.slow),
        pytest.param("ddp", 2, marks=pytest.mark.matrix),
        pytest.param("deepspeed", 2, marks=[pytest.mark.matrix, needs_deepspeed]),
    ],
)
def test_new_weights_are_the_same_on_every_layout(
    run: Run, single: Outcome, strategy: str, micro_batch_size: int
) -> None:
    asked = case(strategy, micro_batch_size)
    assert run(2, [asked])[asked].losses == pytest.approx(single.losses, rel=1e-5)
