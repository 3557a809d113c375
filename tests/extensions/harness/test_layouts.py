"""Tasks before and after training: equal scores under every strategy, also after a resume."""

import json
from pathlib import Path
from typing import Any

import pytest
from command import Command
from local_tasks import ALL, LETTERS, write_tasks
from rank_jobs import HAS_DEEPSPEED, NO_EVALUATION, Case, Outcome, Run, chosen, make_run, repeated

from ftkit.cli.app import run as command
from ftkit.runs.report.answers import TaskScore


@pytest.fixture(scope="module")
def changes(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[str, Any], ...]:
    tasks = write_tasks(tmp_path_factory.mktemp("tasks"), *ALL)
    asked = (("eval.tasks", (str(tasks),)), ("eval.limit", 5))
    asked += (("train.epochs", 1),)
    return (*NO_EVALUATION, *asked)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory)


@pytest.fixture(scope="module")
def alone(run: Run, changes: tuple[tuple[str, Any], ...]) -> dict[str, Outcome]:
    """A run with tasks, its first session, and a run without tasks."""
    without = tuple(change for change in changes if change[0] != "eval.tasks")
    cases = {
        "whole": Case("single", "full", changes=changes),
        "half": Case("single", "full", changes=changes, stop_after=1),
        "without": Case("single", "full", changes=without),
    }
    found = run(1, list(cases.values()))
    return {name: found[case] for name, case in cases.items()}


@pytest.fixture(scope="module")
def single(alone: dict[str, Outcome]) -> Outcome:
    return alone["whole"]


@pytest.fixture(scope="module")
def two_ranks(
    run: Run, changes: tuple[tuple[str, Any], ...], request: pytest.FixtureRequest
) -> dict[str, Outcome]:
    selected = chosen(request, test_every_strategy_gives_the_scores_of_one_rank)
    strategies = sorted({params["strategy"] for params in selected})
    strategies = [name for name in strategies if HAS_DEEPSPEED or name != "deepspeed"]
    found = run(2, [Case(strategy, "full", changes=changes) for strategy in strategies])
    return {case.strategy: outcome for case, outcome in found.items()}


def assert_same(found: Outcome, expected: Outcome) -> None:
    assert len(found.report.tasks) == len(expected.report.tasks) == 6
    for one, other in zip(found.report.tasks, expected.report.tasks, strict=True):
        assert (one.task, one.metric) == (other.task, other.metric)
        assert one.before == pytest.approx(other.before, rel=1e-4)
        assert one.after == pytest.approx(other.after, rel=1e-4)


@pytest.mark.slow
def test_a_run_has_scores_before_and_after_training(alone: dict[str, Outcome]) -> None:
    single, without = alone["whole"], alone["without"]
    score: TaskScore = next(s for s in single.report.tasks if s.metric == "bits_per_byte")
    assert score.before is not None and score.after is not None
    assert score.after != pytest.approx(score.before, rel=1e-4)
    assert (score.samples, score.higher_is_better) == (5, False)
    log = (single.out_dir / "run.log").read_text()
    assert "texts before training: bits_per_byte" in log
    assert without.report.tasks == []
    assert without.losses == single.losses, "tasks do not affect training"


@pytest.mark.slow
def test_the_result_has_the_scores_of_the_run(
    single: Outcome, changes: tuple[tuple[str, Any], ...], capsys: pytest.CaptureFixture[str]
) -> None:
    single.complete()
    (tasks,) = dict(changes)["eval.tasks"]
    words = ["evaluate", str(single.out_dir), "--tasks", tasks, "--limit", "5"]
    assert command([*words, "--accelerator", "cpu", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["tasks"]
    for one, score in zip(found, single.report.tasks, strict=True):
        assert (one["task"], one["metric"]) == (score.task, score.metric)
        assert one["value"] == pytest.approx(score.after, rel=1e-4)


@pytest.mark.slow
def test_a_resumed_run_keeps_its_first_scores(
    run: Run, changes: tuple[tuple[str, Any], ...], alone: dict[str, Outcome], single: Outcome
) -> None:
    begun = alone["half"]
    assert all(score.after is None for score in begun.report.tasks)
    rest = Case("single", "full", changes=changes, start=begun.out_dir)
    assert_same(run(1, [rest])[rest], single)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", *repeated("ddp", "deepspeed")])
def test_every_strategy_gives_the_scores_of_one_rank(
    two_ranks: dict[str, Outcome], single: Outcome, strategy: str
) -> None:
    assert_same(two_ranks[strategy], single)


def test_tasks_are_refused_before_anything_is_written(ftkit: Command, tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks", LETTERS)
    words = ("finetune", "--checkpoint_dir", "random:pythia-14m", "--out_dir", "out")
    for tasks, text in (
        ("[hellaswag]", "--trust_task_code"),
        ("[tasks/missing.yaml]", "there is no such task file"),
    ):
        found = ftkit(*words, "--eval.tasks", tasks)
        assert found.returncode == 2
        assert text in found.stderr and "Traceback" not in found.stderr
        assert not (tmp_path / "out").exists()


def test_no_recipe_trusts_code(ftkit: Command, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    for text in ("trust_task_code: .\n", "eval: {trust_task_code: .}\n"):
        recipe.write_text(text)
        found = ftkit("finetune", recipe)
        assert found.returncode == 2
        assert "trust_task_code is not a key of a recipe" in found.stderr
        assert "add --trust_task_code DIR to the command" in found.stderr
