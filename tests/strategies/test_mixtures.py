"""Promise P1 over data of several sources: ranks and micro-batches never change what is learned."""

import json
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import Case, Entries, Outcome, Run, make_run
from tiny import make_records

from ftkit.data.samples.sampler import EpochOrder
from ftkit.runs.report.metrics import read_validation

OF_RUNS = ("some.json", "others.json")
pytestmark = pytest.mark.slow
VALIDATED = (("eval.interval", 3), ("eval.exact_match", 4), ("eval.max_new_tokens", 2))
SHORT = (*VALIDATED, ("train.epochs", 1))


def sources(directory: Path, weight: float = 3) -> tuple[tuple[str, Any], ...]:
    """30 records that an epoch takes a third of, and 15 that it takes three times."""
    entries: list[dict[str, Any]] = [
        {"path": str(directory / OF_RUNS[0]), "samples": 8},
        {"path": str(directory / OF_RUNS[1]), "weight": weight},
    ]
    return (("data.json_path", None), ("data.sources", Entries(entries)), *SHORT)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sources")
    records = make_records(45)
    for name, part in zip(OF_RUNS, (records[:30], records[30:]), strict=True):
        (path / name).write_text(json.dumps(part))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


@pytest.fixture(scope="module")
def single(run: Run, directory: Path) -> dict[str, Outcome]:
    whole = Case("single", "lora", changes=sources(directory))
    half = Case("single", "lora", changes=sources(directory), stop_after=2)
    first = run(1, [whole, half])
    rest = Case("single", "lora", changes=sources(directory), start=first[half].out_dir)
    return {"whole": first[whole], "half": first[half], "resumed": run(1, [rest])[rest]}


@pytest.fixture(scope="module")
def two_ranks(run: Run, directory: Path) -> Outcome:
    case = Case("ddp", "lora", changes=(*sources(directory), ("train.micro_batch_size", 3)))
    return run(2, [case])[case]


def assert_learned_the_same(found: Outcome, expected: Outcome) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    columns = ("step", "samples", "tokens", "samples/some.json", "samples/others.json")
    for column in columns:
        assert [row[column] for row in found.rows] == [row[column] for row in expected.rows]
    ours, theirs = (read_validation(o.out_dir / "validation.csv") for o in (found, expected))
    for column in ("val_loss", "val_loss/some.json", "val_loss/others.json"):
        values = [row[column] or 0.0 for row in ours]
        assert values == pytest.approx([row[column] or 0.0 for row in theirs], rel=1e-5)
    assert found.report.exact_match == expected.report.exact_match


def test_two_ranks_learn_from_a_mixture_as_one_does(
    two_ranks: Outcome, single: dict[str, Outcome]
) -> None:
    assert_learned_the_same(two_ranks, single["whole"])


def test_a_resumed_run_on_a_mixture_equals_an_uninterrupted_one(
    single: dict[str, Outcome],
) -> None:
    assert_learned_the_same(single["resumed"], single["whole"])
    found, expected = (single[name].report.sources for name in ("resumed", "whole"))
    for name in OF_RUNS:
        assert found[name].samples == expected[name].samples
        for when in ("first", "last", "best"):
            key = f"validation_{when}"
            values = getattr(found[name], key), getattr(expected[name], key)
            assert values[0] == pytest.approx(values[1], rel=1e-5) and values[0] is not None


def test_samples_and_losses_of_each_source_are_reported(single: dict[str, Outcome]) -> None:
    outcome = single["whole"]
    sizes, takes = [24, 12], [8, 36]
    order = EpochOrder(sizes, takes, seed=1337)
    assert outcome.report.resolved.samples_per_epoch == 44
    for row in outcome.rows:
        taken = order.sources(order.of(0)[: int(row["samples"] or 0)]).tolist()
        assert [row[f"samples/{name}"] for name in OF_RUNS] == taken
    assert taken == takes
    sources = outcome.report.sources
    assert [sources[name].samples_per_epoch for name in OF_RUNS] == takes
    assert [sources[name].samples for name in OF_RUNS] == takes
    assert [sources[name].data["train"].samples for name in OF_RUNS] == sizes
    assert outcome.report.data["train"].samples == 36
    last = read_validation(outcome.out_dir / "validation.csv")[-1]
    of_sources = [last[f"val_loss/{name}"] or 0.0 for name in OF_RUNS]
    assert [sources[name].validation_last for name in OF_RUNS] == of_sources
    assert min(of_sources) < (last["val_loss"] or 0.0) < max(of_sources)


def test_other_weights_are_other_data(
    run: Run, directory: Path, single: dict[str, Outcome]
) -> None:
    """Ranks refuse them even without the comparison of recipes that the command makes first."""
    start = single["half"].out_dir
    other = Case("single", "lora", changes=sources(directory, weight=2), start=start)
    with pytest.raises(Exception, match=r"not the training samples.*32 now, 44 then"):
        run(1, [other])
