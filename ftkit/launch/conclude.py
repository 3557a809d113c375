"""End of a run: exit code, cause of a failure, and its report, combined from those of its ranks."""

import dataclasses
import shlex
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ftkit.checkpoint.file_checks import mark_damaged
from ftkit.checkpoint.metadata import CheckpointError, read_metadata
from ftkit.errors import EXIT_BY_SIGNAL, EXIT_OUT_OF_MEMORY, UserError
from ftkit.recipe.batches import MicroBatch
from ftkit.recipe.objectives import objective_rules
from ftkit.recipe.recipe import Recipe
from ftkit.runs.directory import RunDirectory
from ftkit.runs.job import DIED, FOR_MEMORY, Job, RankError
from ftkit.runs.report.report import (
    ENDED_WELL,
    ExpertLoad,
    PeakMemory,
    PhaseName,
    PhaseTimes,
    Progress,
    Report,
    read_report,
    write_report,
)
from ftkit.runs.report.table import render, summary_line
from ftkit.runs.run_ends import RUN_ENDS, write_beside_result
from ftkit.runs.state import brought_up_to_files
from ftkit.runs.unfinished import DamagedCheckpoint, exit_summary
from ftkit.strategies.step_memory import StepMemory
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import count_text, utc_now
from ftkit.utils.files import write_with_reserve
from ftkit.utils.progress import gives_advice, next_text
from ftkit.utils.urls import display_path


class DamageFound(DamagedCheckpoint):
    """A rank found damage in the checkpoint that its session was to continue from."""


def conclude(job: Job, received: Sequence[signal.Signals]) -> int:
    """Write and show the report of a run whose ranks have ended; return the exit code.

    Args:
        job: of the run; a rank that left no report gets an empty one, which has most of it.
        received: signals that requested the end, the first one first.

    Raises:
        UserError: a mistake of the user's, found before the first step.
        DamageFound: the checkpoint to continue from is damaged, also found before that.
    """
    out_dir = job.recipe.out_dir
    run, world_size = job.directory, job.plan.world_size
    reports = _reports(job)
    rank, error = _cause(run, world_size)
    steps = (reports[0].progress or Progress()).steps
    # Before the first step, a mistake of the user's leaves everything as it was.
    if error is not None and steps <= job.start_step:
        if error.kind == "user":
            raise UserError(error.message)
        if error.kind == "damaged":
            assert job.start is not None and error.file is not None
            _doubt_start(Path(job.start), error.file, error.message)
    report = _combined(job, reports, received, rank, error)
    with Display(out_dir) as display:
        try:
            # First of all, before what would fit is searched for: whatever happens then, the report
            # is there.
            write_with_reserve(lambda: write_report(report, out_dir), run.reserve)
        except OSError as failure:
            display.warning(f"{run.report} cannot be written ({failure.strerror})")
        if report.outcome == "out_of_memory":
            from ftkit.launch.shortage import find_shortage

            with display.phase("searching for changes that would make it fit"):
                # In a process of its own, for at most 60 s.
                shortage = find_shortage(
                    dataclasses.replace(job.located_recipe, devices=job.plan.devices),
                    job.devices,
                    job.command,
                    reports[rank].peak_memory,
                    report.exit_reason,
                    job.plan.chosen,
                )
            # The report is on the disk already: if there is no room for the advice, it stays as it
            # is.
            report = dataclasses.replace(report, shortage=shortage)
            with suppress(OSError):
                write_report(report, out_dir)
        if run.final.is_dir():
            write_beside_result(report, Path(job.base), run.final)
        with suppress(OSError):
            _collect_output(run, world_size)
        display.notice(render(report, out_dir))
        # --quiet leaves out the table above, so one line stands for it.
        if job.quiet:
            display.show_text(summary_line(report, out_dir))
        if report.shortage is not None:
            from ftkit.launch.shortage import shortage_text

            display.show_text(
                shortage_text(report.shortage, job.plan.accelerator, report.exit_reason)
            )
        if report.outcome != "completed":
            done = max(steps, job.start_step)
            remedy = "" if error is None else error.remedy
            display.show_text(
                exit_summary(out_dir, job.recipe.method, done, remedy, report.diverged_from)
            )
        elif gives_advice() and (commands := next_commands(run, job.recipe)):
            display.show_text(next_text(commands))
    return report.exit_code


def note_shortage(job: Job, smaller: MicroBatch) -> bool:
    """Note that a run ran out of memory and starts again; return False if it ended otherwise.

    Its report says why, as that of a session that others follow.

    Args:
        job: of the run, whose ranks have ended.
        smaller: micro-batch with which it starts again.
    """
    rank, error = _cause(job.directory, job.plan.world_size)
    if error is None or error.kind not in FOR_MEMORY:
        return False
    reports = _reports(job)
    if reports[rank].phase == "set_up":  # which no micro-batch is part of
        return False
    report = _combined(job, reports, (), rank, error)
    out_dir = job.recipe.out_dir
    with Display(out_dir) as display, suppress(OSError):
        write_report(report, out_dir)
        plan = job.plan
        before = _size_text(plan.micro_batch_size, smaller.tokens and plan.micro_batch_tokens)
        now = _size_text(smaller.sequences, smaller.tokens)
        display.warning(
            f"out of memory with micro-batches of at most {before}, which ftkit chose "
            f"({report.exit_reason.splitlines()[0]}); starting again with {now}"
        )
    return True


def _size_text(sequences: int, tokens: int | None) -> str:
    return count_text(sequences, "sequence") if tokens is None else count_text(tokens, "token")


def _reports(job: Job) -> list[Report]:
    """The reports of all ranks; that of rank 0 up to date."""
    run, world_size = job.directory, job.plan.world_size
    files = [run.rank(rank).report for rank in range(world_size)]
    reports = [read_report(file) if file.exists() else _empty_report(job) for file in files]
    return [brought_up_to_files(reports[0], run), *reports[1:]]


def _combined(
    job: Job,
    reports: Sequence[Report],
    received: Sequence[signal.Signals],
    rank: int,
    error: RankError | None,
) -> Report:
    """The report of a run; `rank` is the one that failed first, with its error."""
    # Rank 0's report stands for the run; what differs between ranks is combined over all.
    memory = [rank for report in reports if report.peak_memory for rank in report.peak_memory.ranks]
    return dataclasses.replace(
        _with_outcome(reports[0], received, error, phase=reports[rank].phase),
        peak_memory=PeakMemory.of(memory) if memory else None,
        expert_load=ExpertLoad.of_ranks([report.expert_load for report in reports]),
        step_memory=StepMemory.of([report.step_memory for report in reports]),
        warnings=[*_all_warnings(reports), *_notices(job.directory)],
        phases_s=dataclasses.replace(
            reports[0].phases_s or PhaseTimes(), total=time.monotonic() - job.began_s
        ),
    )


def _doubt_start(checkpoint: Path, name: str, message: str) -> None:
    """Raise DamageFound, and mark the file so that the next start reads all of it.

    `name` is that of the checkpoint's directory, and of the file in it.
    """
    file = checkpoint.parent / name
    if file.parent != checkpoint:  # of another checkpoint, which the result was to be taken from
        return
    with suppress(OSError):  # then the next start finds the same damage
        mark_damaged(file)
    raise DamageFound(
        checkpoint,
        f"{display_path(checkpoint)} cannot be continued from: {message}",
        "Try --resume auto, which continues from the newest intact one.",
    )


def next_commands(run: RunDirectory, recipe: Recipe) -> list[str]:
    """Commands to try after a complete run, ready to be typed."""
    use = "evaluate" if objective_rules(recipe.objective).scores else "chat"
    # Of a base of random weights nothing is saved.
    own = [f"ftkit {use} {shlex.quote(display_path(run.path))}"] * run.final.is_dir()
    return own + [command for row in RUN_ENDS for command in row.next_commands(run, recipe)]


def _cause(run: RunDirectory, world_size: int) -> tuple[int, RankError | None]:
    """The rank that failed first, and its error."""
    found = [
        (rank, error) for rank in range(world_size) if (error := RankError.read(run.rank(rank)))
    ]
    if not found:
        return 0, None
    # A rank that died is noticed late: others may have failed before, because of it.
    rank, error = min(found, key=lambda item: (item[1].kind not in DIED, item[1].happened_at_s))
    # A mistake of the user's, damage, a signal and such numbers do not depend on the rank.
    if world_size == 1 or error.kind in ("user", "damaged", "interrupted", "not_finite"):
        return rank, error
    return rank, dataclasses.replace(error, message=f"rank {rank}: {error.message}")


def _all_warnings(reports: Sequence[Report]) -> list[str]:
    """The warnings of rank 0, and those that only other ranks have."""
    found = dict.fromkeys(reports[0].warnings, 0)
    for rank, report in enumerate(reports):
        for text in report.warnings:
            found.setdefault(text, rank)
    return [f"rank {rank}: {text}" if rank else text for text, rank in found.items()]


def _notices(run: RunDirectory) -> list[str]:
    """Warnings of the supervisor, from the time when the ranks were running."""
    try:
        return run.notices.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []


def _collect_output(run: RunDirectory, world_size: int) -> None:
    """Add output of other ranks to the run's log, once, unless rank 0 printed the same."""
    known = run.log.read_text(encoding="utf-8", errors="replace")
    with run.log.open("a", encoding="utf-8") as file:
        for rank in range(1, world_size):
            output = run.rank(rank).output
            text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
            # Libraries repeat their warnings: each line is added once, also if several ranks print
            # it.
            for line in dict.fromkeys(text.splitlines()):
                if line not in known:
                    file.write(f"rank {rank}: {line}\n")
            known += text


def _empty_report(job: Job) -> Report:
    """The report of a rank that ended before it wrote one."""
    seconds = time.monotonic() - job.began_s
    start = None
    if job.start is not None:
        # Another run, or the user, may have deleted it meanwhile: the report then says less.
        with suppress(CheckpointError):
            start = read_metadata(Path(job.start))
    phases = PhaseTimes(set_up=seconds, total=seconds)
    return dataclasses.replace(job.new_report(start), phases_s=phases)


def _with_outcome(
    report: Report, received: Sequence[signal.Signals], error: RankError | None, phase: PhaseName
) -> Report:
    """The report of rank 0 with the outcome of the run; `phase` is that of the rank that failed."""
    report = dataclasses.replace(report, finished_at=utc_now())
    # A signal after the last step changes nothing: the rank has completed its report.
    if report.outcome in ENDED_WELL and (error is None or error.kind == "interrupted"):
        return report
    report = dataclasses.replace(report, outcome="failed", exit_code=1, phase=phase)
    if error is None or error.kind == "interrupted":
        # Under torchrun or SLURM the signal may have reached the supervisor of another rank alone,
        # whose error then names it.
        first = received[0] if received else signal.Signals[error.message] if error else None
        if first is None:
            return report
        exit_code, reason = EXIT_BY_SIGNAL[first]
        return dataclasses.replace(
            report, outcome="interrupted", exit_code=exit_code, exit_reason=reason
        )
    if error.kind in FOR_MEMORY:
        return dataclasses.replace(
            report,
            outcome="out_of_memory",
            exit_code=EXIT_OUT_OF_MEMORY,
            exit_reason=error.message,
        )
    return dataclasses.replace(
        report, exit_reason=error.message, diverged_from=error.computed_from or None
    )
