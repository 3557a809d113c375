"""Restarts of a run: how sessions ended is known to those that go on, however they ended."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from messages import says
from saved_runs import ended, recipe, save_run

from ftkit.errors import UserError
from ftkit.recipe.devices import Devices
from ftkit.recipe.recipe import Recipe
from ftkit.runs.directory import RunDirectory
from ftkit.runs.job import Job, RankError
from ftkit.runs.lock import claim
from ftkit.runs.report.report import Progress, Resolved, Restart, read_report, write_report
from ftkit.runs.report.table import restart_text
from ftkit.runs.restarts import restarts_of
from ftkit.runs.resume import find_start
from ftkit.runs.state import look

NOW_S = 1_800_000_000.0
EARLIER = Restart(
    reason="rank 1: node2 has sent no heartbeat for 90 s",
    ended_at="2026-01-01T00:00:00Z",
    started_at="2026-01-01T00:01:00Z",
    from_step=5,
    steps_lost=2,
    world_size=1,
    world_size_before=2,
)


@pytest.fixture
def resumed(tmp_path: Path) -> Recipe:
    return recipe(tmp_path / "out", resume="auto", accelerator="cpu", precision="bf16-mixed")


def killed(resumed: Recipe, *, steps: int, error: str | None = None) -> None:
    """A session of two ranks was killed with its supervisor; rank 0 had noted its steps."""
    run = RunDirectory(resumed.out_dir)
    job = Job(
        recipe=dataclasses.replace(resumed, devices=2),
        devices=Devices(accelerator="cpu", count=2),
        base="base",
        command=("ftkit",),
        started_at_s=NOW_S - 1000,
        restarts=(EARLIER,),
    )
    for rank in (0, 1):
        run.rank(rank).path.mkdir(parents=True)
    report = dataclasses.replace(job.new_report(), progress=Progress(steps=steps))
    write_report(report, run.rank(0).path)
    run.lock.write_text('{"host": "node1", "process": 4711}')
    if error is not None:
        RankError(kind="failed", message=error, happened_at_s=NOW_S).write(run.rank(1))
    job.write(run.job)


@contextmanager
def going_on(resumed: Recipe, world_size: int = 1) -> Iterator[tuple[Restart, ...]]:
    """The restarts as a session that goes on finds them."""
    with claim(resumed.out_dir, "go_on") as run:
        yield restarts_of(run, find_start(resumed), world_size=world_size, started_at_s=NOW_S)


def found(resumed: Recipe, world_size: int = 1) -> tuple[Restart, ...]:
    with going_on(resumed, world_size) as restarts:
        return restarts


def test_a_failed_session_is_a_restart_with_the_steps_lost(resumed: Recipe) -> None:
    save_run(resumed, 5, 10)
    ended(resumed.out_dir, "failed", 12)
    failed = dataclasses.replace(
        read_report(resumed.out_dir), exit_reason="rank 1: gone", resolved=Resolved(world_size=2)
    )
    write_report(failed, resumed.out_dir)
    (restart,) = found(resumed)
    assert (restart.reason, restart.ended_at) == ("rank 1: gone", "2026-01-02T03:04:05Z")
    assert restart.started_at == "2027-01-15T08:00:00Z"
    assert (restart.from_step, restart.steps_lost) == (10, 2)
    assert (restart.world_size_before, restart.world_size) == (2, 1)
    assert says(
        restart_text(restart),
        "2027-01-15T08:00:00Z ... step 10 ... 1 rank (2 before) ... 2 steps again ... rank 1: gone",
    )


@pytest.mark.parametrize("outcome", ["completed", "stopped"])
def test_a_complete_session_is_not_counted_as_a_restart(resumed: Recipe, outcome: str) -> None:
    save_run(resumed, 5)
    ended(resumed.out_dir, outcome, 5)
    assert found(resumed) == ()


def test_a_killed_session_is_a_restart_by_the_files_it_left(resumed: Recipe) -> None:
    """It knew of the restarts before it, which no checkpoint may know yet."""
    save_run(resumed, 5, 10)
    killed(resumed, steps=14)
    before, restart = found(resumed, world_size=3)
    assert before == EARLIER
    assert says(restart.reason, "rank 0 on node1 ... machine is gone")
    assert (restart.from_step, restart.steps_lost) == (10, 4)
    assert (restart.world_size_before, restart.world_size) == (2, 3)


@pytest.mark.parametrize(
    ("started_at", "state"),
    [
        ("2027-01-15T07:43:20.000Z", "interrupted"),
        ("2027-01-15T07:43:20Z", "interrupted"),  # as earlier versions wrote it
        ("2027-01-15T07:43:20.250Z", "killed"),  # another session, in the same second
        ("2027-01-15T07:43:19.999Z", "killed"),
    ],
)
def test_a_report_is_that_of_the_session_with_its_start(
    resumed: Recipe, started_at: str, state: str
) -> None:
    save_run(resumed, 5)
    ended(resumed.out_dir, "interrupted", 5)
    report = dataclasses.replace(read_report(resumed.out_dir), started_at=started_at)
    write_report(report, resumed.out_dir)
    killed(resumed, steps=7)
    assert look(resumed.out_dir).state == state


def test_the_error_of_another_rank_is_part_of_the_reason(resumed: Recipe) -> None:
    save_run(resumed, 5)
    killed(resumed, steps=7, error="connection closed by peer")
    *_, restart = found(resumed)
    assert says(restart.reason, "machine is gone (rank 1: connection closed by peer)")


def test_a_mistake_keeps_the_state_of_a_killed_session(resumed: Recipe) -> None:
    save_run(resumed, 5)
    killed(resumed, steps=7)
    run = RunDirectory(resumed.out_dir)
    before = {path: path.read_bytes() for path in run.state.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="a mistake"), going_on(resumed):
        raise UserError("a mistake")
    assert {path: path.read_bytes() for path in run.state.rglob("*") if path.is_file()} == before
    assert look(resumed.out_dir).state == "killed"
    assert len(found(resumed)) == 2
    assert not run.state.exists()


def test_restarts_go_with_checkpoints_into_copies_and_branches(
    resumed: Recipe, tmp_path: Path
) -> None:
    carried = {"restarts": [dataclasses.asdict(EARLIER)]}
    store = save_run(resumed, 5, carried=carried)
    assert found(resumed) == (EARLIER,)
    ended(resumed.out_dir, "failed", 7)
    branch = dataclasses.replace(resumed, out_dir=tmp_path / "b", resume=str(store.path(5)))
    assert found(branch) == (EARLIER,)
    assert len(found(resumed)) == 2


def test_a_run_that_had_saved_nothing_starts_over(resumed: Recipe) -> None:
    save_run(resumed)
    killed(resumed, steps=3)
    *_, restart = found(resumed)
    assert (restart.from_step, restart.steps_lost) == (0, 3)
