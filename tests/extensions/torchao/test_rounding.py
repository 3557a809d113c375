"""Float8 products and quantisation-aware training: the same losses on every layout."""

from typing import Any

import pytest
import torch
from evaluating import values_from
from rank_jobs import Case, Outcome, Run, chosen, layouts, make_run

from ftkit.evaluation.result import base_result, find_result

pytestmark = pytest.mark.slow
ROUNDINGS: dict[str, tuple[tuple[str, Any], ...]] = {
    "float8": (("float8", True),),
    "int4 and int8": (("qat.weights", "int4"), ("qat.activations", "int8")),
    "int3 by row": (("qat.weights", "int3"), ("qat.group_size", None)),
}
BEFORE: tuple[tuple[str, Any], ...] = (
    ("eval.exact_match", 0),
    ("eval.rouge_l", 0),
    ("eval.max_new_tokens", 0),
    ("train.save_interval", 4),
    ("optimizer.lr", 1e-3),
)
CUT = 4
"""Steps of a first session."""
ON_TWO = [(strategy, rounding) for rounding in ROUNDINGS for strategy in ("ddp", "fsdp")]
OFTEN = [("fsdp", "float8"), ("ddp", "int4 and int8")]
"""Outside the matrix; the others repeat them."""
each_often = pytest.mark.parametrize(
    "rounding", layouts([(name,) for name in ROUNDINGS], [("float8",)])
)
"""What a rank multiplies its loss by changes the numbers of float8; others repeat it."""
both_often = pytest.mark.parametrize(
    "rounding",
    layouts([(name,) for name in ROUNDINGS], [("float8",), ("int4 and int8",)]),
)
"""int3 by row is int4 with other numbers."""
OF_MIXED = ("float8", "int4 and int8")
on_two_ranks = pytest.mark.parametrize(("strategy", "rounding"), layouts(ON_TWO, OFTEN))


def case_of(
    rounding: str | None, strategy: str = "single", *further: tuple[str, Any], **keys: Any
) -> Case:
    changes = ROUNDINGS[rounding] if rounding else ()
    return Case(strategy, "full", changes=(*BEFORE, *changes, *further), **keys)


WHOLE = ("train.micro_batch_size", 11)
TOKENS = (("train.micro_batch_size", None), ("train.micro_batch_tokens", 400))
MICRO_BATCHES: dict[str, tuple[tuple[str, Any], ...]] = {
    "whole steps": (WHOLE,),
    "padded": (("train.micro_batch_size", 3), ("train.padding_free", False)),
    "rows of tokens": TOKENS,
    "checkpointed": (WHOLE, ("memory.activation_checkpointing", True)),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


@pytest.fixture(scope="module")
def alone(run: Run, request: pytest.FixtureRequest) -> dict[Case, Outcome]:
    """Runs on one rank: without rounding, with it, their first sessions, and micro-batches."""
    names = (None, *ROUNDINGS)
    whole = [case_of(name) for name in names]
    firsts = [case_of(name, stop_after=CUT) for name in names]
    others = [
        case_of(params["rounding"], "single", *MICRO_BATCHES[params["micro_batches"]])
        for params in chosen(request, test_micro_batches_do_not_change_what_is_rounded)
    ]
    return run(1, [*whole, *firsts, *others])


@pytest.fixture(scope="module")
def on_two(
    run: Run, alone: dict[Case, Outcome], request: pytest.FixtureRequest
) -> dict[Case, Outcome]:
    """Runs on two ranks of the selected tests: at once, and continued from one rank."""
    whole, second = (
        [case_of(params["rounding"], params["strategy"]) for params in chosen(request, test)]
        for test in (
            test_two_ranks_round_as_one_does,
            test_a_rounded_model_continues_under_another_strategy,
        )
    )
    return run(2, [*whole, *(second_of(alone, case) for case in second)])


@pytest.fixture(scope="module")
def on_three(run: Run, request: pytest.FixtureRequest) -> dict[Case, Outcome]:
    """Runs on three ranks of the selected tests."""
    selected = chosen(request, test_three_ranks_round_as_one_does)
    return run(3, [case_of(params["rounding"], "ddp") for params in selected])


@pytest.fixture(scope="module")
def mixed(run: Run, request: pytest.FixtureRequest) -> dict[Case, Outcome]:
    """Runs of the selected tests on two ranks in mixed precision."""
    selected = chosen(request, test_in_mixed_precision_every_layout_rounds_float32_weights)
    names = [params["rounding"] for params in selected]
    return run(2, [mixed_case(name, s) for name in names for s in ("ddp", "fsdp")])


@pytest.fixture(scope="module")
def continued(run: Run, alone: dict[Case, Outcome]) -> dict[Case, Outcome]:
    """Second sessions on one rank, one of which begins to round."""
    same = [second_of(alone, case_of(rounding)) for rounding in ROUNDINGS]
    return run(1, [*same, begins_to_round(alone)])


def mixed_case(rounding: str, strategy: str) -> Case:
    return case_of(rounding, strategy, precision="bf16-mixed")


def begins_to_round(alone: dict[Case, Outcome]) -> Case:
    return case_of("int4 and int8", start=alone[case_of(None, stop_after=CUT)].out_dir)


def second_of(firsts: dict[Case, Outcome], case: Case) -> Case:
    first = next(
        one for one in firsts if one.stop_after is not None and one.changes == case.changes
    )
    return Case(**(vars(case) | {"start": firsts[first].out_dir}))


def assert_same(found: Outcome, expected: Outcome, rounding: str) -> None:
    """The first step is equal; later, sums in another order turn numbers that lie between two.

    A weight that is turned moves by 1/7 of the largest of its group in int4, and by 1/3 in int3.
    A number of float8 moves by 1/8 of itself: that changed losses of steps by up to 1e-4, with
    instructions of AVX2 and of AVX-512, and those of validation, which rounds none, by 1e-5.
    Scales of all tokens in a micro-batch show in the first step: its norm is another by 2e-4.
    """
    norms, others = ([row["grad_norm"] or 0 for row in one.rows] for one in (found, expected))
    assert norms[0] == pytest.approx(others[0], rel=3e-6)
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=1e-6)
    of_steps, of_validations = (3e-4, 2e-5) if rounding == "float8" else (2e-3, 2e-3)
    assert found.losses == pytest.approx(expected.losses, rel=of_steps)
    assert found.validation_losses == pytest.approx(expected.validation_losses, rel=of_validations)


@on_two_ranks
def test_two_ranks_round_as_one_does(
    on_two: dict[Case, Outcome], alone: dict[Case, Outcome], strategy: str, rounding: str
) -> None:
    assert_same(on_two[case_of(rounding, strategy)], alone[case_of(rounding)], rounding)


@each_often
def test_three_ranks_round_as_one_does(
    on_three: dict[Case, Outcome], alone: dict[Case, Outcome], rounding: str
) -> None:
    """Each rank multiplies its loss by 3: other than by 2, that changes how numbers are rounded."""
    assert_same(on_three[case_of(rounding, "ddp")], alone[case_of(rounding)], rounding)


@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
@both_often
def test_micro_batches_do_not_change_what_is_rounded(
    alone: dict[Case, Outcome], rounding: str, micro_batches: str
) -> None:
    found = alone[case_of(rounding, "single", *MICRO_BATCHES[micro_batches])]
    assert_same(found, alone[case_of(rounding)], rounding)


@on_two_ranks
def test_a_rounded_model_continues_under_another_strategy(
    on_two: dict[Case, Outcome], alone: dict[Case, Outcome], strategy: str, rounding: str
) -> None:
    second = on_two[second_of(alone, case_of(rounding, strategy))]
    assert_same(second, alone[case_of(rounding)], rounding)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_rounded_model_continues_on_the_same_layout_to_the_bit(
    continued: dict[Case, Outcome], alone: dict[Case, Outcome], rounding: str
) -> None:
    second = continued[second_of(alone, case_of(rounding))]
    expected = alone[case_of(rounding)]
    assert second.losses == expected.losses
    weights = expected.weights()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in second.weights().items())


def test_a_run_may_begin_to_round_when_it_is_resumed(
    continued: dict[Case, Outcome], alone: dict[Case, Outcome]
) -> None:
    found, plain = continued[begins_to_round(alone)].losses, alone[case_of(None)].losses
    assert found[:CUT] == plain[:CUT]
    assert found[CUT] != pytest.approx(plain[CUT], rel=1e-6)
    assert found == pytest.approx(plain, rel=0.1)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_a_rounded_model_learns_and_its_result_has_plain_weights(
    alone: dict[Case, Outcome], rounding: str
) -> None:
    plain, rounded = alone[case_of(None)], alone[case_of(rounding)]
    assert rounded.losses != pytest.approx(plain.losses, rel=1e-4)
    assert rounded.losses == pytest.approx(plain.losses, rel=0.1)
    assert rounded.losses[-1] < 0.9 * rounded.losses[0]
    resolved = rounded.report.resolved
    assert (
        resolved is not None
        and resolved.rounding
        == {
            "float8": "float8",
            "int4 and int8": "QAT with int4 weights in groups of 32, int8 inputs",
            "int3 by row": "QAT with int3 weights by row",
        }[rounding]
    )
    expected = plain.weights()
    for name, tensor in rounded.weights().items():
        assert (tensor.shape, tensor.dtype) == (expected[name].shape, torch.float32)


def test_validation_computes_what_will_be_served(alone: dict[Case, Outcome]) -> None:
    """Weights that quantisation-aware training rounds are served rounded, those of float8 not."""
    before = {name: alone[case_of(name)].validation_losses[0] for name in (None, *ROUNDINGS)}
    assert before["float8"] == before[None]
    assert before["int4 and int8"] != pytest.approx(before[None], rel=1e-5)


@pytest.mark.parametrize("rounding", ["float8", "int4 and int8"])
def test_a_result_is_evaluated_as_its_run_validated_it(
    alone: dict[Case, Outcome], rounding: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = alone[case_of(rounding)]
    found.complete()
    evaluated = values_from(capsys)
    values = evaluated(found.out_dir)
    assert values["loss"] == pytest.approx(found.validation_losses[-1], rel=1e-6)
    plain = evaluated(found.out_dir, "--quantize", "none")
    if rounding == "float8":
        assert (plain["loss"], values["quantize"]) == (values["loss"], None)
    else:
        assert values["quantize"] == "int4 weights in groups of 32, int8 inputs"
        assert plain["loss"] != pytest.approx(values["loss"], rel=1e-5)
        # The model that it was trained from is another one, which nothing rounds.
        base = find_result(str(found.out_dir))
        assert base_result(base).rounding is None


@pytest.mark.parametrize("rounding", layouts([(n,) for n in OF_MIXED], [("float8",)]))
def test_in_mixed_precision_every_layout_rounds_float32_weights(
    mixed: dict[Case, Outcome], rounding: str
) -> None:
    ddp, fsdp = (mixed[mixed_case(rounding, strategy)] for strategy in ("ddp", "fsdp"))
    assert fsdp.losses == pytest.approx(ddp.losses, rel=1e-3)
