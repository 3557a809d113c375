"""Restarts of a run: sessions that ended before it was complete, from the files they left.

A session that ends writes the run's report. One that is killed with its supervisor, as when its
machine is lost, leaves its state: reports of its ranks, and its job with the restarts before it.
"""

from dataclasses import dataclass

from ftkit.errors import UserError
from ftkit.runs.directory import RunDirectory
from ftkit.runs.job import Job, RankError
from ftkit.runs.lock import Supervisor
from ftkit.runs.report.report import ENDED_WELL, Progress, Restart
from ftkit.runs.resume import Start
from ftkit.runs.state import brought_up_to_files, texts_of_start
from ftkit.runs.unfinished import sound_report
from ftkit.utils.console.formatting import utc_text
from ftkit.utils.json_values import from_json
from ftkit.utils.process import launcher_starts_again


@dataclass(frozen=True, kw_only=True)
class LastSession:
    """The session before this one, and the restarts up to it."""

    reason: str | None
    """Reason for its end; None: it was complete."""
    ended_at: str
    """When it ended, or last wrote a file; ISO 8601, UTC."""
    steps: int
    """Optimizer steps done until then."""
    world_size: int | None
    """Number of its ranks."""
    restarts: tuple[Restart, ...]
    """Restarts up to its start."""


def restarts_of(
    run: RunDirectory, start: Start | None, *, world_size: int, started_at_s: float
) -> tuple[Restart, ...]:
    """All restarts of a run up to the session that starts now.

    Args:
        run: its directory, locked, as the last session left it.
        start: the checkpoint that the session continues from.
        world_size: number of its ranks.
        started_at_s: when it started, in seconds since the epoch.
    """
    carried = start.metadata.carried.get("restarts") if start else None
    known = tuple(from_json(list[Restart], carried or []))
    # A branch into a new directory: no session came before in it.
    if start is not None and not start.in_place:
        return known
    last = last_session(run)
    if last is None:
        return known
    known = max(known, last.restarts, key=len)  # one may lack the newest ones of the other
    if last.reason is None:
        return known
    step = start.metadata.step if start else 0
    grew = last.world_size is not None and world_size > last.world_size
    # An elastic launcher ends all ranks with SIGTERM, and starts them again with those that joined.
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
    """The last session of a run that is not running; None: there was none."""
    report = sound_report(run.report)
    job = _job_of_killed(run)
    # A report of another session: that of the killed one was never written.
    if job is not None and (
        report is None or report.started_at not in texts_of_start(job.started_at_s)
    ):
        # Steps by the rows, which a rank writes more often than its report.
        rank = run.rank_of_killed(0)
        noted = brought_up_to_files(sound_report(rank.report) or job.new_report(), run)
        left = [path for path in (run.job_of_killed, rank.report) if path.exists()]
        return LastSession(
            reason=_reason_of_killed(run, job.plan.world_size),
            # The supervisor wrote no time of its end: its newest file is the best that there is.
            ended_at=utc_text(max(path.stat().st_mtime for path in left)),
            steps=max((noted.progress or Progress()).steps, job.start_step),
            world_size=job.plan.world_size,
            restarts=job.restarts,
        )
    if report is None:
        return None
    return LastSession(
        reason=None if report.outcome in ENDED_WELL else report.exit_reason,
        ended_at=report.finished_at,
        steps=(report.progress or Progress()).steps,
        world_size=report.resolved.world_size if report.resolved else None,
        restarts=tuple(report.restarts),
    )


def _reason_of_killed(run: RunDirectory, world_size: int) -> str:
    """Say that the session was killed, with the first error of a rank, if one left any."""
    found = []
    for rank in range(world_size):
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
