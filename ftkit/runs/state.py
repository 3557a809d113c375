"""State of a run, from its files: running, killed or ended, its report, and its restarts.

Nothing is written, so any number of processes may look, also from another machine with the same
disk.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ftkit.checkpoint.store import step_of
from ftkit.errors import UserError
from ftkit.runs.checkpoints import RunCheckpoints, size_of
from ftkit.runs.directory import RunDirectory
from ftkit.runs.lock import is_at_work
from ftkit.runs.report.meters import SourceMeter
from ftkit.runs.report.metrics import (
    ROUTER_COLUMN,
    Row,
    loss_column,
    read_metrics,
    read_validation,
    samples_column,
    term_column,
)
from ftkit.runs.report.report import (
    Checkpoints,
    Loss,
    OutcomeName,
    PeakMemory,
    Progress,
    Report,
    Tokens,
    read_report,
)
from ftkit.runs.url_runs import RunCopy
from ftkit.utils.console.formatting import exact_utc_text, utc_text
from ftkit.utils.damaged_files import reading
from ftkit.utils.url_files import StorageError, unreachable
from ftkit.utils.urls import display_path

if TYPE_CHECKING:
    pass

StateName = Literal["starting", OutcomeName, "running", "killed"]
"""`starting`: it has no report yet; `killed`: it ended and nobody could write its report."""
AT_WORK: tuple[StateName, ...] = ("starting", "running")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """A run at one moment."""

    out_dir: Path
    """Its directory, as given."""
    state: StateName
    """At work, or how it ended."""
    report: Report | None
    """The final report, or that of the ranks so far, a few seconds old; None: there is none yet."""

    @property
    def at_work(self) -> bool:
        """True while the run is running."""
        return self.state in AT_WORK


def look(out_dir: Path, copy: RunCopy | None = None) -> RunState:
    """The state of a run.

    Args:
        out_dir: its directory.
        copy: of a run at a url that is not running on this machine.

    Raises:
        UserError: the directory holds no run, or its report is damaged.
    """
    is_at_work_elsewhere = copy is not None and _look_at(copy)
    run = RunDirectory(out_dir if copy is None else copy.directory)
    if not run.is_run():
        raise UserError(
            f"{display_path(out_dir)} holds no run. Name the out_dir of a run, such as "
            "out/finetune/lora."
        )
    at_work = is_at_work_elsewhere or (
        copy is None and is_at_work(RunCheckpoints(path=out_dir, store=run.store))
    )
    # A run that ends writes its report, then removes its state, and only then lets go of the lock.
    if at_work:
        noted = _noted(run)
        return RunState(out_dir=out_dir, state="running" if noted else "starting", report=noted)
    # Its state is still there, and no report is of its session: it was killed.
    if run.lock.exists() and not is_report_of(run.report, run.job):
        noted = _noted(run)
        left = None if noted is None else brought_up_to_files(noted, run)
        return RunState(out_dir=out_dir, state="killed", report=left)
    if not run.report.exists():
        raise UserError(
            f"{display_path(out_dir)} has no report: its run wrote none, or has not started yet."
        )
    report = read_report(run.path)
    return RunState(out_dir=out_dir, state=report.outcome, report=report)


def _look_at(copy: RunCopy) -> bool:
    try:
        return copy.look()
    except StorageError as error:
        raise unreachable(error) from error


def _noted(run: RunDirectory) -> Report | None:
    """The reports of the ranks so far: that of rank 0 with the memory of all."""
    reports = []
    for rank in run.ranks():
        with suppress(UserError):  # not there yet, or not any more
            reports.append(read_report(rank.report))
    if not reports:
        return None
    memory = [rank for report in reports if report.peak_memory for rank in report.peak_memory.ranks]
    return dataclasses.replace(reports[0], peak_memory=PeakMemory.of(memory) if memory else None)


def brought_up_to_files(noted: Report, run: RunDirectory) -> Report:
    """The report of rank 0, updated from newer rows and checkpoints of its session.

    Times, throughput and memory stay: no other file has them. Damaged rows change nothing but the
    warnings.

    Args:
        noted: the report of rank 0 as it last wrote it.
        run: its directory, as the session has left it.
    """
    # A rank writes its report every few seconds, but rows of metrics.csv and checkpoints at once:
    # those of a killed rank are newer.
    report = _with_checkpoints(noted, run)
    if report.files is not None and run.final.is_dir():  # it is renamed once it is complete
        files = dataclasses.replace(report.files, final=run.final.name)
        report = dataclasses.replace(report, files=files)
    try:
        report = _with_validations(report, _rows_of(run.validation))
        return _with_steps(report, _rows_of(run.metrics))
    except UserError as error:
        return dataclasses.replace(report, warnings=[*report.warnings, str(error)])


def is_report_of(report: Path, job_file: Path) -> bool:
    """Return whether a report belongs to the session of a job file."""
    try:
        # By the time of the start, which a report and a job have in common.
        with reading(job_file, "a JSON object with a number started_at_s"):
            texts = texts_of_start(float(json.loads(job_file.read_bytes())["started_at_s"]))
        return read_report(report).started_at in texts
    except UserError:
        return False


def texts_of_start(started_at_s: float) -> tuple[str, str]:
    """Return how a report writes when its session started."""
    # Two sessions may start in one second; reports of earlier versions say no more than that.
    return exact_utc_text(started_at_s), utc_text(started_at_s)


def _rows_of(file: Path) -> list[Row]:
    if not file.exists():
        return []
    read = read_validation if file.name.startswith("validation") else read_metrics
    return read(file)


def _with_steps(report: Report, rows: Sequence[Row]) -> Report:
    """Update steps; rows of earlier sessions are in the report already."""
    first = report.resumed.from_step if report.resumed else 0
    rows = [row for row in rows if (row["step"] or 0) > first]
    noted = report.progress or Progress()
    if not rows or (rows[-1]["step"] or 0) < noted.steps:  # the disk had no room for newer rows
        return report
    last, loss = rows[-1], report.loss or Loss()
    samples = int(last["samples"] or 0)
    real = sum(int(row["tokens"] or 0) for row in rows)
    tokens = report.tokens
    if tokens is None or tokens.real != real:  # rows do not have the tokens that carry loss
        tokens = Tokens(real=real)
    return dataclasses.replace(
        report,
        progress=Progress(
            steps=int(last["step"] or 0), samples=samples, epochs=_epochs(report, samples)
        ),
        loss=dataclasses.replace(
            loss,
            first=rows[0]["loss"] if loss.first is None else loss.first,
            last=last["loss"],
            router_aux_loss=last.get(ROUTER_COLUMN),
        ),
        terms={
            name: dataclasses.replace(
                known,
                first=rows[0].get(name) if known.first is None else known.first,
                last=last.get(name),
            )
            for name, known in report.terms.items()
        },
        tokens=tokens,
        sources={
            name: dataclasses.replace(
                source, samples=int(last.get(samples_column(name)) or source.samples)
            )
            for name, source in report.sources.items()
        },
    )


def _epochs(report: Report, samples: int) -> float:
    noted = report.progress or Progress()
    if report.resolved is not None and report.resolved.samples_per_epoch:
        return samples / report.resolved.samples_per_epoch
    # Without the length of an epoch, in proportion to what the rank had noted.
    return noted.epochs * samples / noted.samples if noted.samples else 0.0


def _with_validations(report: Report, rows: Sequence[Row]) -> Report:
    """Update validations."""
    steps, loss = (report.progress or Progress()).steps, report.loss or Loss()
    terms = report.terms
    sources, sets = (
        SourceMeter(list(before), before, least=1) for before in (report.sources, report.sets)
    )
    for row in rows:
        step, value = int(row["step"] or 0), row["val_loss"]
        # Rows that the report already counts.
        if step < steps or (step == steps and value == loss.validation_last):
            continue
        # An empty cell is a loss that was not a number.
        loss = loss.with_validation(
            step,
            math.nan if value is None else value,
            is_cross_entropy=row["perplexity"] is not None,
        )
        terms = {
            name: known.with_validation(step, row.get(term_column(name)))
            for name, known in terms.items()
        }
        for meter in (sources, sets):
            meter.validate(
                {name: row.get(loss_column(name)) for name in meter.sources}, is_first=step == 0
            )
    return dataclasses.replace(
        report, loss=loss, terms=terms, sources=sources.sources, sets=sets.sources
    )


def _with_checkpoints(report: Report, run: RunDirectory) -> Report:
    """Update checkpoints, with those that were complete before the rank could count them."""
    noted = report.checkpoints or Checkpoints()
    # The report counts those up to its last one; newer ones were committed after it was written.
    known = step_of(Path(noted.last).name) if noted.last else None
    if known is None:
        known = report.resumed.from_step if report.resumed else 0
    new = [step for step in run.store.steps() if step > known]
    if not new:
        return report
    newest = run.store.path(new[-1])
    checkpoints = dataclasses.replace(
        noted,
        saved=noted.saved + len(new),
        last=run.shown_path(newest),
        last_bytes=size_of(newest),
    )
    return dataclasses.replace(report, checkpoints=checkpoints)
