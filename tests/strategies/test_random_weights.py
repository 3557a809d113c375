"""Random weights are the same under every strategy, also where they are quantised."""

from typing import Any

import pytest
from rank_jobs import DEEPSPEED, HAS_DEEPSPEED, Case, Outcome, make_run

RANDOM: tuple[tuple[str, Any], ...] = (
    ("checkpoint_dir", "random:pythia-14m"),
    ("train.max_steps", 2),
    ("train.epochs", None),
    ("eval.initial_validation", False),
    ("eval.exact_match", None),
    ("eval.rouge_l", None),
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


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Outcome]:
    run = make_run(tmp_path_factory)
    alone = run(1, [case("single", kind) for kind in KINDS])
    return alone | run(
        2, [case(*pair) for pair in PAIRS if pair[0] != "deepspeed" or HAS_DEEPSPEED]
    )


def case(strategy: str, kind: str) -> Case:
    return Case(strategy, "lora", changes=KINDS[kind])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        pytest.param(*pair, marks=DEEPSPEED.marks if pair[0] == "deepspeed" else ())
        for pair in PAIRS
    ],
)
def test_a_run_on_random_weights_learns_as_on_one_rank(
    outcomes: dict[Case, Outcome], strategy: str, kind: str
) -> None:
    single, found = outcomes[case("single", kind)], outcomes[case(strategy, kind)]
    assert len(single.losses) == 2 and single.losses[0] > 5, "nothing has been learned yet"
    assert found.losses == pytest.approx(single.losses, rel=1e-5)
