"""Random weights are the same under every strategy, also where they are quantised."""

from typing import Any

import pytest
from rank_jobs import HAS_DEEPSPEED, NO_EVALUATION, Case, Outcome, chosen, layouts, make_run

RANDOM: tuple[tuple[str, Any], ...] = (
    *NO_EVALUATION,
    ("checkpoint_dir", "random:pythia-14m"),
    ("train.max_steps", 2),
    ("train.epochs", None),
)
KINDS = {
    "plain": RANDOM,
    "nf4": (*RANDOM, ("quantize", "bnb.nf4")),
    "int8": (*RANDOM, ("quantize", "bnb.int8")),
}
PAIRS = [
    *((strategy, kind) for strategy in ("ddp", "fsdp", "deepspeed") for kind in ("plain", "nf4")),
    ("ddp", "int8"),  # which the others refuse
]
OFTEN = [("fsdp", "plain"), ("deepspeed", "nf4"), ("ddp", "int8")]
"""Outside the matrix: each strategy and each kind of weights."""


@pytest.fixture(scope="module")
def outcomes(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[Case, Outcome]:
    selected = chosen(request, test_a_run_on_random_weights_learns_as_on_one_rank)
    pairs = [(params["strategy"], params["kind"]) for params in selected]
    run = make_run(tmp_path_factory)
    alone = run(1, [case("single", kind) for kind in KINDS])
    return alone | run(
        2, [case(*pair) for pair in pairs if pair[0] != "deepspeed" or HAS_DEEPSPEED]
    )


def case(strategy: str, kind: str) -> Case:
    return Case(strategy, "lora", changes=KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "kind"), layouts(PAIRS, OFTEN))
def test_a_run_on_random_weights_learns_as_on_one_rank(
    outcomes: dict[Case, Outcome], strategy: str, kind: str
) -> None:
    single, found = outcomes[case("single", kind)], outcomes[case(strategy, kind)]
    assert len(single.losses) == 2 and single.losses[0] > 5, "nothing has been learned yet"
    assert found.losses == pytest.approx(single.losses, rel=1e-5)
