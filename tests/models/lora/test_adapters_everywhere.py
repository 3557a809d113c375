"""Promises P1 and P2 for every kind of adapter: no layout changes what it learns."""

from collections.abc import Iterable
from dataclasses import replace
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

pytestmark = pytest.mark.slow

KINDS: dict[str, tuple[tuple[str, Any], ...]] = {  # olora starts as pissa does
    "dora": (("lora_variant", "dora"),),
    "rslora": (("lora_variant", "rslora"),),
    "all linear": (("lora_targets", "all-linear"),),
    "pissa": (("lora_init", "pissa"),),
    "whole layers": (
        ("lora_modules_to_save", ("embed_tokens", "norm")),
        ("lora_plus_ratio", 4.0),
        ("optimizer.weight_decay", 0.1),
        ("train.decay_norms_and_biases", False),
        # One number of a matrix A has hardly a gradient in its first step: what is rounding below
        # Adam's usual eps of 1e-8 would become steps of 1e-5, on CPUs that add up in other orders.
        ("optimizer.eps", 1e-6),
    ),
    "dora, quantised": (("lora_variant", "dora"), ("quantize", "bnb.nf4-dq")),
    "pissa, quantised": (("lora_init", "pissa"), ("quantize", "bnb.nf4")),
}
STRATEGIES = ["ddp", "fsdp", *(["deepspeed"] if HAS_DEEPSPEED else [])]
STAGE_2 = ("strategy.stage", 2)
CUT = 4


LAYOUTS: dict[str, tuple[Any, ...]] = {name: (name,) for name in STRATEGIES}
if HAS_DEEPSPEED:
    LAYOUTS["ZeRO-2"] = ("deepspeed", STAGE_2)
SETTINGS = [
    (layout, kind)
    for layout in LAYOUTS
    for kind in KINDS
    if layout != "ZeRO-2" or kind in ("dora", "whole layers")
]
FIRST = {
    ("fsdp", "dora"),
    ("deepspeed", "dora"),
    ("fsdp", "pissa"),
    ("deepspeed", "whole layers"),
    ("ZeRO-2", "whole layers"),
    ("ddp", "dora, quantised"),
}
"""Every layout, and every kind with numbers of its own; all other pairs are in the matrix."""


def case(strategy: str, kind: str, *changes: tuple[str, Any], **keys: Any) -> Case:
    return Case(strategy, "lora", changes=(*NO_EVALUATION, *KINDS[kind], *changes), **keys)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


Cases = dict[Case, Outcome]


@pytest.fixture(scope="module")
def single(run: Run, request: pytest.FixtureRequest) -> Cases:
    """The kinds that were selected."""
    tests = (test_two_ranks_learn_what_one_learns, test_a_run_goes_on_under_another_layout)
    kinds = {one["kind"]: None for test in tests for one in chosen(request, test)}
    return run(1, [case("single", kind) for kind in kinds])


def on_two_ranks(settings: Iterable[tuple[str, str]]) -> list[Case]:
    return [case(LAYOUTS[layout][0], kind, *LAYOUTS[layout][1:]) for layout, kind in settings]


@pytest.fixture(scope="module")
def two_ranks(run: Run, request: pytest.FixtureRequest) -> Cases:
    """The pairs that were selected."""
    pairs = chosen(request, test_two_ranks_learn_what_one_learns)
    return run(2, on_two_ranks((one["layout"], one["kind"]) for one in pairs))


def assert_equal(found: Outcome, expected: Outcome) -> None:
    assert len(expected.rows) == len(found.rows) == 9
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert [row["lr"] for row in found.rows] == [row["lr"] for row in expected.rows]
    weights = found.weights()
    for name, tensor in expected.weights().items():
        torch.testing.assert_close(weights.pop(name), tensor, rtol=0, atol=1e-5)
    assert not weights


@pytest.mark.parametrize(("layout", "kind"), layouts(SETTINGS, FIRST))
def test_two_ranks_learn_what_one_learns(
    single: Cases, two_ranks: Cases, layout: str, kind: str
) -> None:
    strategy, *changes = LAYOUTS[layout]
    expected = single[case("single", kind)]
    assert expected.losses[-1] < expected.losses[0] - 0.1
    assert_equal(two_ranks[case(strategy, kind, *changes)], expected)


@pytest.fixture(scope="module")
def continued(run: Run) -> dict[tuple[str, str], Outcome]:
    """From each layout to one rank, and from one rank to each layout."""
    stopped_single = run(1, [case("single", kind, stop_after=CUT) for kind in KINDS])
    stopped_on_two = run(2, [replace(case, stop_after=CUT) for case in on_two_ranks(SETTINGS)])
    to_single: dict[tuple[str, str], Case] = {}
    from_single: dict[tuple[str, str], Case] = {}
    for layout, kind in SETTINGS:
        strategy, *changes = LAYOUTS[layout]
        stopped = stopped_on_two[case(strategy, kind, *changes, stop_after=CUT)]
        to_single[f"{layout} to single", kind] = case("single", kind, start=stopped.out_dir)
        start = stopped_single[case("single", kind, stop_after=CUT)].out_dir
        from_single[f"single to {layout}", kind] = case(strategy, kind, *changes, start=start)
    one = run(1, list(to_single.values()))
    two = run(2, list(from_single.values()))
    return {key: one[value] for key, value in to_single.items()} | {
        key: two[value] for key, value in from_single.items()
    }


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("way", "kind"),
    [
        (way, kind)
        for layout, kind in SETTINGS
        for way in (f"{layout} to single", f"single to {layout}")
    ],
)
def test_a_run_goes_on_under_another_layout(
    single: Cases, continued: dict[tuple[str, str], Outcome], way: str, kind: str
) -> None:
    assert_equal(continued[way, kind], single[case("single", kind)])
