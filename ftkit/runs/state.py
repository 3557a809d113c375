"""The state of a run as its files tell it: running, killed or ended, and its report.

Nothing is written, so any number of processes may look, also from another machine with the same
disk.
"""

import dataclasses
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ftkit.errors import UserError
from ftkit.remote.fetch import unreachable
from ftkit.remote.objects import StorageError
from ftkit.remote.urls import spelt
from ftkit.report.peak_memory import PeakMemory
from ftkit.report.report import OutcomeName, Report, read_report
from ftkit.runs.carrying.seen import UrlCopy
from ftkit.runs.checkpoints import RunCheckpoints
from ftkit.runs.directory import RunDirectory
from ftkit.runs.lock import is_at_work
from ftkit.runs.session_report import brought_up_to_files, is_report_of

StateName = Literal["starting", OutcomeName, "running", "killed"]
"""`starting`: it has no report yet; `killed`: it ended and nobody could write its report."""
AT_WORK: tuple[StateName, ...] = ("starting", "running")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A run at one moment."""

    out_dir: Path
    """Its directory, as it was given."""
    state: StateName
    """At work, or how it ended."""
    report: Report | None
    """Of a run that has ended; else what its ranks have noted so far, which is a few seconds old.
    None: they have noted nothing."""

    @property
    def at_work(self) -> bool:
        """Whether more is to come."""
        return self.state in AT_WORK


def look(out_dir: Path, copy: UrlCopy | None = None) -> RunState:
    """The state of a run.

    Args:
        out_dir: its directory.
        copy: of a run that is not at work on this machine, but at a url: what there is of it.

    Raises:
        UserError: the directory is none of a run, or its report is damaged.
    """
    is_at_work_elsewhere = copy is not None and _look_at(copy)
    run = RunDirectory(out_dir if copy is None else copy.directory)
    if not run.is_run():
        raise UserError(
            f"{spelt(out_dir)} holds no run. Name the out_dir of a run, such as out/finetune/lora."
        )
    at_work = is_at_work_elsewhere or (
        copy is None and is_at_work(RunCheckpoints(path=out_dir, store=run.store))
    )
    # A run that ends writes its report, then removes its state, and only then lets go of the lock.
    if at_work:
        noted = _noted(run)
        return RunState(out_dir=out_dir, state="running" if noted else "starting", report=noted)
    if run.lock.exists() and not is_report_of(run.report, run.job):
        noted = _noted(run)
        left = None if noted is None else brought_up_to_files(noted, run)
        return RunState(out_dir=out_dir, state="killed", report=left)
    if not run.report.exists():
        raise UserError(
            f"{spelt(out_dir)} holds no report: its run left none, or has not begun yet."
        )
    report = read_report(run.path)
    return RunState(out_dir=out_dir, state=report.outcome, report=report)


def _look_at(copy: UrlCopy) -> bool:
    try:
        return copy.look()
    except StorageError as error:
        raise unreachable(error) from error


def _noted(run: RunDirectory) -> Report | None:
    """What the ranks have noted: the report of rank 0 with the memory of all."""
    reports = []
    for rank in run.ranks():
        with suppress(UserError):  # not there yet, or not any more
            reports.append(read_report(rank.report))
    if not reports:
        return None
    memory = [rank for report in reports if report.peak_memory for rank in report.peak_memory.ranks]
    return dataclasses.replace(reports[0], peak_memory=PeakMemory.of(memory) if memory else None)
