"""Promise P1 where ranks share sequences: nothing is learned differently."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import (
    NO_EVALUATION,
    Case,
    Outcome,
    Run,
    assert_same_maths,
    chosen,
    make_run,
    require_deepspeed,
)
from tiny import make_records
from transformers_models import make_transformers_model

from ftkit.recipe.recipe import Method

pytestmark = pytest.mark.slow
Changes = tuple[tuple[str, Any], ...]
Layout = tuple[int, str, int | None]
CUT = 4
"""Steps of first sessions."""
NOISE: Changes = (*NO_EVALUATION, ("train.neftune_noise_alpha", 5.0))
KINDS: dict[str, tuple[Method, Changes]] = {
    # With validations and answers, and micro-batches of several short samples.
    "full": ("full", ()),
    "lora": ("lora", ()),
    "noise": ("full", NOISE),
    "nf4": ("lora", (*NO_EVALUATION, ("quantize", "bnb.nf4"))),
    # Rows of one or two samples, of which a rank may have no label.
    "economy": (
        "full",
        (
            *NO_EVALUATION,
            ("train.micro_batch_size", None),
            ("train.micro_batch_tokens", 90),
            ("memory.activation_checkpointing", True),
            ("train.ema_decay", 0.7),
        ),
    ),
    "in backward": (
        "full",
        (
            *NO_EVALUATION,
            ("train.optimizer_in_backward", True),
            ("train.micro_batch_size", 11),
            ("train.max_norm", None),
        ),
    ),
    # One by one, samples of a few tokens and others that are cut; prompts fill pieces of ranks.
    "edges": (
        "lora",
        (
            ("data.json_path", "EDGES"),
            ("data.prompt_style", "litgpt.prompts.Default"),
            ("train.micro_batch_size", 1),
            ("train.max_seq_length", 90),
        ),
    ),
    # Windows and bounds of scores; two ranks have copies of one key head.
    "windows": (
        "full",
        (
            *NO_EVALUATION,
            ("checkpoint_dir", "WINDOWS"),
            ("data.prompt_style", "litgpt.prompts.Default"),
        ),
    ),
    # Experts with a loss of their routers, attention with sinks and windows.
    "experts": (
        "full",
        (
            *NO_EVALUATION,
            ("checkpoint_dir", "EXPERTS"),
            ("data.prompt_style", "litgpt.prompts.Default"),
            ("router_aux_loss_coef", 0.5),
        ),
    ),
}
TWO = [("ddp", "lora"), ("fsdp", "full"), ("ddp", "noise"), ("fsdp", "experts"), ("fsdp", "nf4")]
TWO += [("fsdp", "economy"), ("fsdp", "in backward"), ("ddp", "edges"), ("ddp", "windows")]
MORE_OF_TWO = [("fsdp", "lora"), ("ddp", "full"), ("ddp", "economy"), ("fsdp", "windows")]
FOUR: dict[str, tuple[str, int, Changes]] = {
    "ddp, all four": ("ddp", 4, ()),
    "ddp, two by two": ("ddp", 2, ()),
    "fsdp, all four": ("fsdp", 4, ()),
    "fsdp, two by two": ("fsdp", 2, ()),
    "two nodes": (
        "fsdp",
        2,
        (("devices", 2), ("num_nodes", 2), ("strategy.sharding", "HYBRID_SHARD")),
    ),
}


def shared(strategy: str, context: int, kind: str, *more: tuple[str, Any], **keys: Any) -> Case:
    method, changes = KINDS[kind]
    return Case(strategy, method, changes=(*changes, ("strategy.context", context), *more), **keys)


def make_edges(file: Path) -> Path:
    """Records of which every third is of a few tokens, and every fourth longer than the limit."""
    records = make_records(60)
    for record in records[::3]:
        record |= {"instruction": "a", "input": "", "output": "b"}
    for record in records[1::4]:
        record["output"] = " ".join([record["output"]] * 20)
    file.write_text(json.dumps(records))
    return file


class Runs:
    """Runs cases of every kind."""

    def __init__(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self._run: Run = make_run(tmp_path_factory)
        directory = tmp_path_factory.mktemp("made")
        made = {
            "EDGES": make_edges(directory / "edges.json"),
            "EXPERTS": make_transformers_model(directory / "experts", "gpt_oss"),
            "WINDOWS": make_transformers_model(
                directory / "windows", "gemma2", num_key_value_heads=1, attn_logit_softcapping=5.0
            ),
        }
        self._made = {name: str(path) for name, path in made.items()}

    def of(self, world_size: int, cases: dict[Any, Case]) -> dict[Any, Outcome]:
        placed = {name: self._placed(case) for name, case in cases.items()}
        found = self._run(world_size, list(dict.fromkeys(placed.values())))
        return {name: found[case] for name, case in placed.items()}

    def _placed(self, case: Case) -> Case:
        changes = [(k, self._made.get(v, v) if isinstance(v, str) else v) for k, v in case.changes]
        return dataclasses.replace(case, changes=tuple(changes))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


@pytest.fixture(scope="module")
def single(runs: Runs) -> dict[str, Outcome]:
    """Each kind on one rank, and the beginning of one."""
    cases = {kind: Case("single", method, changes=own) for kind, (method, own) in KINDS.items()}
    cases["half"] = dataclasses.replace(cases["noise"], stop_after=CUT)
    return runs.of(1, cases)


@pytest.fixture(scope="module")
def two(
    runs: Runs, single: dict[str, Outcome], request: pytest.FixtureRequest
) -> dict[tuple[str, ...], Outcome]:
    """On two ranks, the selected kinds, and what begins or goes on there."""
    cases: dict[tuple[str, ...], Case] = {
        (one["strategy"], one["kind"]): shared(one["strategy"], 2, one["kind"])
        for one in chosen(request, test_two_ranks_that_share_sequences_learn_as_one)
    }
    cases["ddp", "half"] = shared("ddp", 2, "noise", stop_after=CUT)
    cases["fsdp", "resumed"] = shared("fsdp", 2, "noise", start=single["half"].out_dir)
    cases["fsdp", "noise"] = shared("fsdp", 2, "noise")
    cases["fsdp", "again"] = shared("fsdp", 2, "noise", ("data.num_workers", 0))
    return runs.of(2, cases)


def assert_same(found: Outcome, expected: Outcome, kind: str) -> None:
    validations = 0 if set(NO_EVALUATION) <= set(KINDS[kind][1]) else 3
    assert_same_maths(found, expected, validations=validations)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [*TWO, *(pytest.param(*one, marks=pytest.mark.matrix) for one in MORE_OF_TWO)],
)
def test_two_ranks_that_share_sequences_learn_as_one(
    two: dict[tuple[str, ...], Outcome], single: dict[str, Outcome], strategy: str, kind: str
) -> None:
    found = two[strategy, kind]
    assert_same(found, single[kind], kind)
    tokens, resolved = found.report.tokens, found.report.resolved
    assert tokens is not None and resolved is not None
    assert (resolved.context, resolved.attention) == (2, "sdpa per sequence")
    # A row is filled up by one token at most; "edges" has one for each sample.
    rows = 11 if kind == "edges" else 6
    assert tokens.padded is not None and tokens.padded < rows * len(found.rows)


def test_a_run_resumes_with_ranks_that_share_sequences_and_without(
    runs: Runs, two: dict[tuple[str, ...], Outcome], single: dict[str, Outcome]
) -> None:
    method, changes = KINDS["noise"]
    alone = Case("single", method, changes=changes, start=two["ddp", "half"].out_dir)
    (back,) = runs.of(1, {"back": alone}).values()
    for found in (back, two["fsdp", "resumed"]):
        assert_same(found, single["noise"], "noise")


def test_the_same_ranks_learn_the_same_to_the_last_bit(
    two: dict[tuple[str, ...], Outcome],
) -> None:
    first, again = two["fsdp", "noise"], two["fsdp", "again"]
    assert first.losses == again.losses and len(first.losses) == 9
    weights = again.weights()
    assert all(tensor.equal(weights.pop(name)) for name, tensor in first.weights().items())
    assert not weights


RESUMED: list[tuple[Layout, Layout]] = [
    ((2, "fsdp", 2), (2, "ddp", None)),
    ((2, "fsdp", None), (2, "fsdp", 2)),
    ((2, "deepspeed", None), (2, "ddp", 2)),
    ((2, "ddp", 2), (2, "deepspeed", None)),
    ((4, "fsdp", 4), (2, "ddp", 2)),
    ((4, "ddp", 2), (4, "fsdp", 4)),
]
"""Ranks, strategy and how many share sequences: before and after."""


@pytest.mark.extensions
@pytest.mark.matrix
@pytest.mark.parametrize(("before", "after"), RESUMED)
def test_a_run_resumes_among_other_ranks_that_share_sequences(
    runs: Runs, single: dict[str, Outcome], before: Layout, after: Layout
) -> None:
    require_deepspeed(before[1], after[1])
    method, changes = KINDS["noise"]

    def run(layout: Layout, **keys: Any) -> Outcome:
        ranks, strategy, context = layout
        sharing = () if context is None else (("strategy.context", context),)
        case = Case(strategy, method, changes=(*changes, *sharing), **keys)
        return runs.of(ranks, {"one": case})["one"]

    half = run(before, stop_after=CUT)
    assert_same(run(after, start=half.out_dir), single["noise"], "noise")


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["full", "lora", "nf4", "edges"])
def test_four_ranks_learn_as_one_however_they_share_sequences(
    runs: Runs, single: dict[str, Outcome], kind: str
) -> None:
    cases = {
        name: shared(strategy, context, kind, *more)
        for name, (strategy, context, more) in FOUR.items()
    }
    nodes = {"two nodes": cases.pop("two nodes")}  # ranks of one run are on as many nodes
    for found in (runs.of(4, cases) | runs.of(4, nodes)).values():
        assert_same(found, single[kind], kind)
