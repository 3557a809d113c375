"""Promise P1 where ranks share the sequences of preferences: no rank has a whole answer."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import NO_EVALUATION, Case, Outcome, chosen, make_run
from tiny import make_labelled, make_pairs

from ftkit.recipe.recipe import Method

pytestmark = pytest.mark.slow
Changes = tuple[tuple[str, Any], ...]
DPO: Changes = (("objective", "dpo"), ("objective.beta", 0.5))
KTO: Changes = (("objective", "kto"), ("objective.beta", 0.5))
KINDS: dict[str, tuple[Method, str, Changes]] = {
    # The reference is below the adapter, computed before training, or beside it.
    "dpo, adapter": ("lora", "pairs", DPO),
    "dpo, full": ("full", "pairs", (*DPO, ("objective.sft_weight", 1))),
    "orpo": ("full", "pairs", (("objective", "orpo"), ("objective.weight", 0.5))),
    "simpo": ("lora", "pairs", (("objective", "simpo"), ("lora_dropout", 0.1))),
    "kto, adapter": ("lora", "labelled", KTO),
    "kto, full": ("full", "labelled", (*KTO, ("reference", "BASE"))),
    "reward": ("full", "pairs", (("objective", "reward"), ("objective.center_weight", 0.1))),
}
TERMS = ("accuracy", "margin", "chosen_reward", "rejected_reward", "reference_point", "sft_loss")
LONGER: Changes = (("train.epochs", 3),)
OFTEN = ("dpo, adapter", "dpo, full", "kto, full", "reward")


@pytest.fixture(scope="module")
def found(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[tuple[str, str], Outcome]:
    """Runs of the selected kinds, on one rank, on two, and on four."""
    run = make_run(tmp_path_factory)
    directory = tmp_path_factory.mktemp("answers")
    for name, made in (("pairs", make_pairs(40)), ("labelled", make_labelled(40))):
        (directory / f"{name}.json").write_text(json.dumps(made))
    two, four = (
        [one["kind"] for one in chosen(request, test)]
        for test in (
            test_two_ranks_that_share_answers_learn_as_one,
            test_four_ranks_that_share_answers_learn_as_one,
        )
    )
    single = {("single", kind): case("single", kind, directory) for kind in two}
    single |= {("nine steps", kind): case("single", kind, directory, LONGER) for kind in four}
    double = {("shared", kind): shared(2, kind, directory) for kind in two}
    many = {
        (f"shared by {n}", kind): shared(n, kind, directory, LONGER)
        for n in (2, 4)
        for kind in four
    }
    found: dict[tuple[str, str], Outcome] = {}
    for ranks, cases in ((1, single), (2, double), (4, many)):
        outcomes = run(ranks, list(cases.values()))
        found |= {name: outcomes[one] for name, one in cases.items()}
    return found


def shared(ranks: int, kind: str, directory: Path, more: Changes = ()) -> Case:
    strategy = "ddp" if "full" in kind else "fsdp"
    return case(strategy, kind, directory, (("strategy.context", ranks), *more))


def case(strategy: str, kind: str, directory: Path, more: Changes = ()) -> Case:
    method, data, changes = KINDS[kind]
    common: Changes = (
        *NO_EVALUATION,
        ("data.json_path", str(directory / f"{data}.json")),
        ("data.mask_prompt", None),
        ("train.epochs", 1),
        ("eval.interval", 2),
        ("eval.final_validation", True),
        ("optimizer.lr", 1e-3),
        # Adam's usual eps lets it turn the rounding of tiny gradients into steps of 1e-5.
        ("optimizer.eps", 1e-5),
    )
    return Case(
        strategy, method, changes=(*common, *changes, *more), tied=kind.startswith("reward")
    )


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.matrix) for kind in KINDS],
)
def test_two_ranks_that_share_answers_learn_as_one(
    kind: str, found: dict[tuple[str, str], Outcome]
) -> None:
    assert len(found["single", kind].losses) == 3
    assert_same(found["shared", kind], found["single", kind])


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["dpo, adapter", "dpo, full"])
def test_four_ranks_that_share_answers_learn_as_one(
    kind: str, found: dict[tuple[str, str], Outcome]
) -> None:
    assert len(found["nine steps", kind].losses) == 9
    for ranks in (2, 4):
        assert_same(found[f"shared by {ranks}", kind], found["nine steps", kind])


def assert_same(shared: Outcome, expected: Outcome) -> None:
    assert len(expected.validation_losses) >= 2
    assert shared.losses == pytest.approx(expected.losses, rel=1e-5)
    assert shared.validation_losses == pytest.approx(expected.validation_losses, rel=1e-5)
    for name in ("grad_norm", *(name for name in TERMS if name in expected.rows[0])):
        values = [float(row[name] or 0) for row in expected.rows]
        assert [float(row[name] or 0) for row in shared.rows] == pytest.approx(
            values, rel=1e-4, abs=1e-6
        ), name
    for column in ("samples", "tokens"):
        assert [row[column] for row in shared.rows] == [row[column] for row in expected.rows]
    weights = shared.weights()
    for name, tensor in expected.weights().items():
        torch.testing.assert_close(weights.pop(name), tensor, rtol=0, atol=1e-5)
    assert not weights
