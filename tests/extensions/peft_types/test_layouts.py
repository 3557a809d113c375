"""Promises P1 and P2 for adapters of other types than LoRA."""

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from adapters import TYPES
from rank_jobs import NO_EVALUATION, Case, Outcome, assert_same_maths, chosen, layouts, make_run

pytestmark = pytest.mark.slow
STRATEGIES = ("ddp", "fsdp", "deepspeed")
Changes = tuple[tuple[str, Any], ...]
Found = Mapping[tuple[str, str], Outcome]
# The recipe of all cases says lora_dropout 0.2, which belongs to LoRA alone.
BASIS: Changes = (*NO_EVALUATION, ("lora_dropout", 0.05), ("optimizer.lr", 1e-2))
KINDS: dict[str, Changes] = {
    **{
        name: (*BASIS, *((key.replace("__", "."), value) for key, value in options.items()))
        for name, options in TYPES.items()
    },
}
# At 1e-2, Adam made a difference of 1e-5 of what rounding left of a gradient near zero.
KINDS["loha"] = (*KINDS["loha"], ("optimizer.lr", 3e-3))
DROPOUT: Changes = (*KINDS["vera"], ("peft.vera_dropout", 0.3))
QUANTIZED = {
    f"{name}, nf4": (*KINDS[name], ("quantize", "bnb.nf4")) for name in ("vera", "oft", "ia3")
}
ALL_KINDS = KINDS | QUANTIZED
ONE_BY_ONE: Changes = (("train.micro_batch_size", 1),)
CHECKPOINTED: Changes = (("memory.activation_checkpointing", True),)
OFTEN = [("ddp", "loha"), ("fsdp", "vera"), ("fsdp", "oft, nf4"), ("deepspeed", "lokr")]
"""Strategies and types outside the matrix; every type resumes under FSDP."""
HOWS = ("one by one", "checkpointed")
OFTEN_ALONE = [("one by one", "oft"), ("checkpointed", "lokr")]
"""Outside the matrix, beside dropout, which depends on both most."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Found:
    """Runs, on two ranks those of the selected tests, by what is special in them and their type."""
    run = make_run(tmp_path_factory)
    wanted = {
        (params["strategy"], params["kind"])
        for params in chosen(request, test_two_ranks_learn_as_one_does)
    }
    kinds = dict.fromkeys([*KINDS, *(kind for _, kind in sorted(wanted))])
    cases = {("single", kind): Case("single", "lora", changes=ALL_KINDS[kind]) for kind in kinds}
    for params in chosen(request, test_micro_batch_size_and_checkpointing_change_nothing):
        how, name = params["how"], params["name"]
        more = ONE_BY_ONE if how == "one by one" else CHECKPOINTED
        cases[how, name] = Case("single", "lora", changes=(*KINDS[name], *more))
    for name, changes in KINDS.items():
        cases["half", name] = Case("single", "lora", changes=changes, stop_after=4)
    cases["single", "dropout"] = Case("single", "lora", changes=DROPOUT)
    cases["checkpointed", "dropout"] = Case("single", "lora", changes=(*DROPOUT, *CHECKPOINTED))
    cases["one by one", "dropout"] = Case("single", "lora", changes=(*DROPOUT, *ONE_BY_ONE))
    alone = run(1, list(cases.values()))
    known = {key: alone[case] for key, case in cases.items()}
    in_two = {(s, kind): Case(s, "lora", changes=ALL_KINDS[kind]) for s, kind in sorted(wanted)}
    for params in chosen(request, test_a_run_resumes_under_another_strategy):
        name = params["name"]
        start = known["half", name].out_dir
        in_two["resumed", name] = Case("fsdp", "lora", changes=KINDS[name], start=start)
    outcomes = run(2, list(in_two.values())) if in_two else {}
    return known | {key: outcomes[case] for key, case in in_two.items()}


@pytest.mark.parametrize(("how", "name"), layouts(itertools.product(HOWS, TYPES), OFTEN_ALONE))
def test_micro_batch_size_and_checkpointing_change_nothing(
    how: str, name: str, found: Found
) -> None:
    assert_same_maths(found[how, name], found["single", name], validations=0)


def test_dropout_belongs_to_the_tokens(found: Found) -> None:
    for how in ("checkpointed", "one by one"):
        # With Adam at 1e-2, rounding moved one weight by 1.4e-5.
        expected = found["single", "dropout"]
        assert_same_maths(found[how, "dropout"], expected, weights_within=1e-4, validations=0)
    assert found["single", "dropout"].losses != found["single", "vera"].losses


@pytest.mark.parametrize("name", TYPES)
def test_the_loss_falls(name: str, found: Found) -> None:
    losses = found["single", name].losses
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.parametrize(
    ("strategy", "kind"), layouts(itertools.product(STRATEGIES, ALL_KINDS), OFTEN)
)
def test_two_ranks_learn_as_one_does(strategy: str, kind: str, found: Found) -> None:
    assert_same_maths(found[strategy, kind], found["single", kind], validations=0)


@pytest.mark.parametrize("name", TYPES)
def test_a_run_resumes_under_another_strategy(name: str, found: Found) -> None:
    assert_same_maths(found["resumed", name], found["single", name], validations=0)
