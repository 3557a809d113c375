"""Promises P1 and P2 where routers have an auxiliary loss, which is one of the whole step."""

import itertools
from typing import Any

import pytest
from rank_jobs import (
    DEEPSPEED,
    NO_EVALUATION,
    Case,
    Outcome,
    assert_same_maths,
    chosen,
    layouts,
    make_run,
)
from transformers_models import make_transformers_model

from ftkit.recipe.recipe import Method
from ftkit.runs.directory import RunDirectory
from ftkit.runs.report.report import ExpertLoad, read_report

pytestmark = pytest.mark.slow
STRATEGIES = ("ddp", "fsdp", DEEPSPEED)
Found = dict[tuple[str, ...], Outcome]
Changes = tuple[tuple[str, Any], ...]
ONE_BY_ONE: Changes = (("train.micro_batch_size", 1),)
AT_ONCE: Changes = (("train.micro_batch_size", 11),)
PADDED: Changes = (("train.padding_free", False),)
CHECKPOINTED: Changes = (("memory.activation_checkpointing", True),)
QUANTIZED: Changes = (("quantize", "bnb.nf4"),)
HEAD = ("train.only", "lm_head")
OFTEN = [
    *[("ddp", "full"), ("fsdp", "full"), ("deepspeed", "full"), ("fsdp", "nf4")],
]
"""Strategies and methods outside the matrix; the others repeat them."""
UNCLIPPED: Changes = (*AT_ONCE, ("train.max_norm", None))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Found:
    """Runs, on two ranks those of the selected tests, by their ranks and what they are."""
    run = make_run(tmp_path_factory)
    model = make_transformers_model(tmp_path_factory.mktemp("routers") / "model", "gpt_oss")
    routers: Changes = (
        *NO_EVALUATION,
        ("train.epochs", 1),  # five steps, the last one short: the loss is one of each step
        ("checkpoint_dir", str(model)),
        ("model_implementation", "transformers"),
        ("data.prompt_style", "litgpt.prompts.Default"),
        ("router_aux_loss_coef", 0.5),
    )
    single = {
        ("full",): Case("single", "full", changes=routers),
        # Routers below what is trained have a loss without gradients.
        ("head",): Case("single", "full", changes=(*routers, HEAD)),
        ("one by one",): Case("single", "full", changes=(*routers, *ONE_BY_ONE)),
        ("at once",): Case("single", "full", changes=(*routers, *AT_ONCE)),
        ("padded",): Case("single", "full", changes=(*routers, *PADDED)),
        ("checkpointed",): Case("single", "full", changes=(*routers, *CHECKPOINTED)),
        ("unclipped",): Case("single", "full", changes=(*routers, *UNCLIPPED)),
        ("in backward",): Case(
            "single",
            "full",
            changes=(*routers, *UNCLIPPED, ("train.optimizer_in_backward", True)),
        ),
        ("nf4",): Case("single", "lora", changes=(*routers, *QUANTIZED)),
        ("lora",): Case("single", "lora", changes=routers),
        ("half",): Case("single", "lora", changes=routers, stop_after=2),
        ("without",): Case("single", "lora", changes=(*routers, ("router_aux_loss_coef", 0))),
    }
    alone = run(1, list(single.values()))
    known = {name: alone[case] for name, case in single.items()}
    double = {
        ("fsdp", "resumed"): Case("fsdp", "lora", changes=routers, start=known["half",].out_dir),
        ("ddp", "padded"): Case("ddp", "full", changes=(*routers, *PADDED)),
    }
    methods: dict[str, tuple[Method, Changes]] = {
        "full": ("full", ()),
        "head": ("full", (HEAD,)),
        "nf4": ("lora", QUANTIZED),
    }
    wanted = {
        (params["strategy"], params["method"])
        for params in chosen(request, test_two_ranks_learn_as_one_does)
    }
    loads = chosen(request, test_the_load_of_experts_on_two_ranks_adds_up_to_that_of_one)
    wanted |= {(params["strategy"], "full") for params in loads}
    for strategy, kind in sorted(wanted):
        method, more = methods[kind]
        double[strategy, kind] = Case(strategy, method, changes=(*routers, *more))
    in_two = run(2, list(double.values()))
    return known | {name: in_two[case] for name, case in double.items()}


def router_losses(outcome: Outcome) -> list[float]:
    return [float(row["router_aux_loss"] or 0) for row in outcome.rows]


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert_same_maths(found, expected, validations=0)
    assert router_losses(found) == pytest.approx(router_losses(expected), rel=1e-5)


@pytest.mark.parametrize("how", ["one by one", "at once", "padded", "checkpointed"])
def test_micro_batch_size_and_checkpointing_change_nothing(how: str, found: Found) -> None:
    assert_same(found[how,], found["full",])


def test_updates_in_the_backward_pass_change_nothing(found: Found) -> None:
    assert_same(found["in backward",], found["unclipped",])


@pytest.mark.parametrize(
    ("strategy", "method"),
    layouts(itertools.product(("ddp", "fsdp", "deepspeed"), ("full", "nf4", "head")), OFTEN),
)
def test_two_ranks_learn_as_one_does(strategy: str, method: str, found: Found) -> None:
    assert_same(found[strategy, method], found[method,])


def test_padding_does_not_count_in_the_router_loss(found: Found) -> None:
    assert_same(found["ddp", "padded"], found["full",])


def test_a_run_resumes_under_another_strategy(found: Found) -> None:
    assert_same(found["fsdp", "resumed"], found["lora",])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_load_of_experts_on_two_ranks_adds_up_to_that_of_one(
    strategy: str, found: Found
) -> None:
    directory = RunDirectory(found[strategy, "full"].out_dir)
    parts = [read_report(directory.rank(rank).report).expert_load for rank in range(2)]
    expected = found["full",].report
    assert ExpertLoad.of_ranks(parts) == expected.expert_load
    assert expected.expert_load.choices == 2 * expected.tokens.real


def test_the_router_loss_is_trained(found: Found) -> None:
    losses = router_losses(found["full",])
    assert losses[-1] < losses[0]
    assert found["full",].report.loss.router_aux_loss == losses[-1]


def test_without_a_router_loss_there_is_no_column(
    found: Found,
) -> None:
    rows = found["without",].rows
    assert "router_aux_loss" not in rows[0]
    assert rows[0]["loss"] == pytest.approx(found["lora",].rows[0]["loss"], rel=1e-6)
