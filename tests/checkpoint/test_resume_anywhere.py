"""Promise P2: a run stopped under any strategy and number of ranks resumes under any other."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from rank_jobs import HAS_DEEPSPEED, METHODS, NO_EVALUATION, Case, Outcome, Run, chosen, make_run

from ftkit.recipe.recipe import Method

LAST = 9
"""Optimizer steps of the whole run."""
MICRO_BATCH: dict[str, tuple[tuple[str, object], ...]] = {
    "ddp": (("train.micro_batch_size", None), ("train.micro_batch_tokens", 400)),
}
"""Micro-batch of the first session by strategy, if not 4 sequences."""
OTHER_MICRO_BATCH: dict[str, tuple[tuple[str, object], ...]] = {
    "single": (("train.micro_batch_size", 3),),
    "ddp": (("train.micro_batch_size", None), ("train.micro_batch_tokens", 600)),
    "fsdp": (("train.padding_free", False),),
    "deepspeed": (("train.micro_batch_size", None), ("train.micro_batch_tokens", 250)),
}
"""Micro-batch of the second session by strategy."""
CUT = 4
"""Steps of the first session; it ends in the middle of the first epoch."""


@dataclass(frozen=True, order=True)
class Layout:
    """A strategy on a number of ranks."""

    strategy: str
    world_size: int

    def __str__(self) -> str:
        return f"{self.strategy} x{self.world_size}"


LAYOUTS = [
    Layout("single", 1),
    *(
        Layout(strategy, world_size)
        for strategy in ("ddp", "fsdp", *(["deepspeed"] if HAS_DEEPSPEED else []))
        for world_size in (1, 2, 3)
    ),
]
SMALL = [layout for layout in LAYOUTS if layout == Layout("single", 1) or layout.world_size == 2]
HUBS: dict[Method, set[Layout]] = {"full": {SMALL[0], SMALL[-1]}, "lora": {SMALL[0]}}
"""Every other layout resumes on these, and these on it; the format between them is the same."""


ONE, FSDP = Layout("single", 1), Layout("fsdp", 2)
FAST = [(ONE, FSDP, "lora")]
OFTEN = [
    # From each strategy and to each, for full training.
    *((ONE, layout, "full") for layout in SMALL[1:]),
    *((layout, ONE, "full") for layout in SMALL[1:]),
    # Between strategies of several ranks, and where what a rank has is cut elsewhere.
    (Layout("ddp", 2), Layout("deepspeed", 2), "full"),
    (Layout("deepspeed", 2), FSDP, "full"),
    (Layout("fsdp", 3), Layout("deepspeed", 2), "full"),
    (Layout("deepspeed", 3), ONE, "full"),
    (FSDP, ONE, "lora"),
    (ONE, Layout("deepspeed", 2), "lora"),
]
"""Outside the matrix; one process of a strategy writes what one device does."""


def marks_of(source: Layout, target: Layout, method: Method) -> tuple[pytest.MarkDecorator, ...]:
    move = (source, target, method)
    if move in FAST:
        return ()
    return (pytest.mark.slow if move in OFTEN else pytest.mark.matrix,)


MOVES = [
    pytest.param(
        source,
        target,
        method,
        id=f"{source} to {target}-{method}",
        marks=marks_of(source, target, method),
    )
    for source, target in itertools.product(LAYOUTS, repeat=2)
    for method in METHODS
    if {source, target} <= set(SMALL) or {source, target} & HUBS[method]
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


@pytest.fixture(scope="module")
def whole(run: Run, request: pytest.FixtureRequest) -> dict[Method, Outcome]:
    """Runs of the selected methods that nothing interrupted."""
    methods = sorted({one["method"] for one in chosen(request, test_a_run_resumes_anywhere)})
    cases = {method: Case("single", method, changes=NO_EVALUATION) for method in methods}
    found = run(1, list(cases.values()))
    return {method: found[case] for method, case in cases.items()}


Runs = dict[tuple[Layout, Method], Outcome]
Move = tuple[Layout, Layout, Method]
Continued = dict[Move, Outcome]


def first_sessions(run: Run, sources: set[tuple[Layout, Method]]) -> Runs:
    found: Runs = {}
    ordered = sorted(sources, key=lambda source: (source[0].world_size, source))
    for world_size, group in itertools.groupby(ordered, key=lambda source: source[0].world_size):
        cases = {
            (layout, method): Case(
                layout.strategy,
                method,
                changes=(*NO_EVALUATION, *MICRO_BATCH.get(layout.strategy, ())),
                stop_after=CUT,
            )
            for layout, method in group
        }
        outcomes = run(world_size, list(cases.values()))
        found |= {key: outcomes[case] for key, case in cases.items()}
    return found


def second_sessions(run: Run, sources: Runs, moves: set[Move]) -> Continued:
    """Runs that stopped, continued on other layouts, with other micro-batches."""
    found: Continued = {}
    targets = sorted({target for _, target, _ in moves}, key=_ranks)
    for world_size, group in itertools.groupby(targets, key=_ranks):
        cases = {
            (source, target, method): Case(
                target.strategy,
                method,
                start=outcome.out_dir,
                changes=(*NO_EVALUATION, *OTHER_MICRO_BATCH[target.strategy]),
            )
            for target in group
            for (source, method), outcome in sources.items()
            if (source, target, method) in moves
        }
        outcomes = run(world_size, list(cases.values()))
        found |= {key: outcomes[case] for key, case in cases.items()}
    return found


def _ranks(layout: Layout) -> int:
    return layout.world_size


@pytest.fixture(scope="module")
def continued(run: Run, request: pytest.FixtureRequest) -> Continued:
    """The moves that were selected."""
    moves: set[Move] = {
        (one["source"], one["target"], one["method"])
        for one in chosen(request, test_a_run_resumes_anywhere)
    }
    sources = {(source, method) for source, _, method in moves}
    return second_sessions(run, first_sessions(run, sources), moves)


def assert_continues(found: Outcome, expected: Outcome) -> None:
    """The second session learns what the uninterrupted run learned from there on."""
    assert found.report.checkpoints is not None
    assert (found.report.checkpoints.saved, found.report.checkpoints.failed) == (1, 0)
    assert [row["step"] for row in found.rows] == list(range(1, LAST + 1))
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    for column in ("samples", "tokens", "lr"):
        assert [row[column] for row in found.rows] == [row[column] for row in expected.rows]
    weights = found.weights()
    for name, tensor in expected.weights().items():
        torch.testing.assert_close(weights.pop(name), tensor, rtol=0, atol=1e-5)
    assert not weights


@pytest.mark.parametrize(("source", "target", "method"), MOVES)
def test_a_run_resumes_anywhere(
    continued: Continued,
    whole: dict[Method, Outcome],
    source: Layout,
    target: Layout,
    method: Method,
) -> None:
    """Under another strategy, on other ranks, with another micro-batch size."""
    assert_continues(continued[source, target, method], whole[method])
