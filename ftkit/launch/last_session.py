"""Restarts of a run as its directory tells of them: how the last session ended, and those before.

A session that ends says so in the run's report. One that is killed with its supervisor, as by a
machine that is lost, leaves its state behind: what its ranks had noted, and its job, which knows
of the restarts before it.
"""

from dataclasses import dataclass
from pathlib import Path

from ftkit.errors import UserError
from ftkit.runs.directory import RunDirectory
from ftkit.runs.job import Job, RankError
from ftkit.runs.lock import Supervisor
from ftkit.runs.report.report import ENDED_WELL, Progress, Report, read_report
from ftkit.runs.report.restarts import Restart
from ftkit.runs.resume import Start
from ftkit.runs.state import brought_up_to_files
from ftkit.utils.console.formatting import utc_text
from ftkit.utils.json_values import from_json
from ftkit.utils.process import launcher_starts_again


@dataclass(frozen=True, kw_only=True)
class LastSession:
    """The session before this one, and the restarts up to it."""

    reason: str | None
    """Why it ended; None: it had done what was asked."""
    ended_at: str
    """When it ended, or was last heard of; ISO 8601, UTC."""
    steps: int
    """Optimizer steps done then."""
    world_size: int | None
    """Its ranks."""
    restarts: tuple[Restart, ...]
    """Up to its own beginning."""


def restarts_of(
    run: RunDirectory, start: Start | None, *, world_size: int, started_at_s: float
) -> tuple[Restart, ...]:
    """All restarts of a run up to the session that begins now.

    Args:
        run: its directory, locked, as the last session left it.
        start: what the session goes on from.
        world_size: its ranks.
        started_at_s: when it began, in seconds since the epoch.
    """
    carried = start.metadata.carried.get("restarts") if start else None
    known = tuple(from_json(list[Restart], carried or []))
    if start is not None and not start.in_place:
        return known
    last = last_session(run)
    if last is None:
        return known
    known = max(known, last.restarts, key=len)  # one may be older than the other, never different
    if last.reason is None:
        return known
    step = start.metadata.step if start else 0
    grew = last.world_size is not None and world_size > last.world_size
    by_launcher = last.reason == "SIGTERM" and launcher_starts_again()
    restart = Restart(
        reason=last.reason + ", for machines that have joined" * (grew and by_launcher),
        ended_at=last.ended_at,
        started_at=utc_text(started_at_s),
        from_step=step,
        steps_lost=max(0, last.steps - step),
        world_size=world_size,
        world_size_before=last.world_size,
    )
    return (*known, restart)


def last_session(run: RunDirectory) -> LastSession | None:
    """The last session of a run that is not at work; None: nothing tells of one."""
    report = _read(run.report)
    job = _job_of_killed(run)
    if job is not None and (report is None or report.started_at != utc_text(job.started_at_s)):
        return _killed(run, job)
    if report is None:
        return None
    return LastSession(
        reason=None if report.outcome in ENDED_WELL else report.exit_reason,
        ended_at=report.finished_at,
        steps=(report.progress or Progress()).steps,
        world_size=report.resolved.world_size if report.resolved else None,
        restarts=tuple(report.restarts),
    )


def _killed(run: RunDirectory, job: Job) -> LastSession:
    """A session whose supervisor did not live to write its report."""
    rank = run.rank_of_killed(0)
    noted = _read(rank.report)
    left = [path for path in (run.job_of_killed, rank.report) if path.exists()]
    heard_s = max(path.stat().st_mtime for path in left)
    return LastSession(
        reason=_reason(run, job),
        ended_at=utc_text(heard_s),
        steps=_steps_of_killed(run, job, noted),
        world_size=job.plan.world_size,
        restarts=job.restarts,
    )


def _steps_of_killed(run: RunDirectory, job: Job, noted: Report | None) -> int:
    """Steps by the rows on the disk, which a rank writes more often than its report."""
    report = brought_up_to_files(noted or job.new_report(), run)
    return max((report.progress or Progress()).steps, job.start_step)


def _reason(run: RunDirectory, job: Job) -> str:
    """What a rank has said, if one has, or else who has not said anything."""
    found = []
    for rank in range(job.plan.world_size):
        if error := RankError.read(run.rank_of_killed(rank)):
            found.append((error.happened_at_s, f"rank {rank}: {error.message}"))
    holder = Supervisor.in_file(run.lock_of_killed)
    where = f" on {holder.host}" if holder is not None else ""
    killed = f"rank 0{where} was killed with its supervisor, or its machine is gone"
    return f"{killed} ({min(found)[1]})" if found else killed


def _job_of_killed(run: RunDirectory) -> Job | None:
    try:
        return Job.read(run.job_of_killed)
    except UserError:  # damaged, or of another version
        return None


def _read(file: Path) -> Report | None:
    try:
        return read_report(file)
    except UserError:
        return None
