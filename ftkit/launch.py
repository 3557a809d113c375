"""The supervisor: owns the run's directory, starts the rank, and says how the run ended.

It is no rank itself and imports no torch, so it can still name the cause, write the report and
leave nothing behind when a rank is killed.
"""

import dataclasses
import fcntl
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal

from ftkit.adapter_config import with_adapter
from ftkit.aside import copy_rows, ready_to_go_on
from ftkit.base.hub import find_or_download
from ftkit.checkpoint.store import Store
from ftkit.data.files import check_data
from ftkit.devices import find_devices, has_deepspeed
from ftkit.durable import insist, make_reserve, write_durably
from ftkit.errors import UserError
from ftkit.job import FOR_MEMORY, RESERVE, WITHOUT_A_WORD, Job, RankError, StopAfter
from ftkit.parsing import to_yaml
from ftkit.planning import make_plan
from ftkit.ranks import (
    ERROR,
    EXIT_BY_SIGNAL,
    EXIT_OUT_OF_MEMORY,
    STATE,
    ExternalRanks,
    Ranks,
    external_ranks,
    output_log,
    rank_directory,
)
from ftkit.recipe import Recipe
from ftkit.report.display import Display
from ftkit.report.formatting import utc_now
from ftkit.report.json_values import without_tokens
from ftkit.report.memory import StepMemory
from ftkit.report.report import (
    ENDED_WELL,
    FILE_NAME,
    PeakMemory,
    PhaseName,
    PhaseTimes,
    Progress,
    Report,
    read_report,
    write_report,
)
from ftkit.report.table import render
from ftkit.resume import (
    CHECKPOINTS,
    RECIPE,
    Completed,
    Start,
    find_start,
    goes_on_in_place,
    last_words,
    require_free,
    verify_start,
)
from ftkit.room import find_shortage, require_room, shortage_text, with_micro_batch
from ftkit.run_state import Supervisor
from ftkit.survey import Place, is_at_work

BASE = "base"
"""What a full fine-tune needs of its base model but weights, in a checkpoint or beside the job."""
Use = Literal["new", "overwrite", "go_on"]
"""What a run wants of its directory: an empty one, this one emptied, or this one as it is."""


def launch(
    recipe: Recipe,
    *,
    command: Sequence[str],
    overwrite: bool = False,
    stop_after: StopAfter | None = None,
    force: bool = False,
) -> int:
    """Check, start and supervise one run; the exit code of the command.

    Under torchrun or SLURM, which start a process for each rank, this one looks after its rank.

    Args:
        recipe: what was asked.
        command: the command line, for the report.
        overwrite: replace what is in out_dir instead of taking another directory.
        stop_after: end this sitting before the run is done.
        force: start even if memory is certainly too small.

    Raises:
        UserError: before anything has started, and nothing is left behind.
    """

    def prepared(received: Sequence[signal.Signals]) -> AbstractContextManager[Job]:
        return prepare(
            recipe,
            command,
            overwrite,
            started_at_s,
            stop_after,
            received,
            force=force,
            placed=placed,
        )

    started_at_s = time.time()
    placed = external_ranks()
    try:
        recipe = with_adapter(recipe)
        if placed is not None:
            from ftkit.external import take_part

            recipe = placed.applied_to(recipe)
            return take_part(placed, prepared, conclude)
        if recipe.num_nodes > 1:
            raise UserError(
                f"num_nodes is {recipe.num_nodes}, but this command starts ranks on one machine "
                "only. Start it on every machine with torchrun or srun, or try --num_nodes 1."
            )
        with Ranks() as ranks, prepared(ranks.received) as job:
            ranks.run(job, job.recipe.out_dir / STATE)
            return conclude(job, ranks.received)
    except Completed as completed:
        print(completed, flush=True)
        return 0


@contextmanager
def prepare(
    recipe: Recipe,
    command: Sequence[str],
    overwrite: bool,
    started_at_s: float,
    stop_after: StopAfter | None = None,
    received: Sequence[signal.Signals] = (),
    *,
    force: bool = False,
    placed: ExternalRanks | None = None,
) -> Iterator[Job]:
    """A job whose every setting is checked, with its base model at hand and its directory claimed.

    Raises:
        UserError: and everything is as it was.
        Completed: the run that was to go on is complete.
    """
    check_data(recipe.data)
    devices = find_devices(recipe)
    if placed is not None:
        recipe = placed.on(recipe, devices)
    recipe = with_micro_batch(recipe, devices)
    plan = make_plan(recipe, devices)
    if plan.strategy == "deepspeed" and not has_deepspeed():
        raise UserError(
            "strategy is deepspeed, but DeepSpeed is not installed. Install g++ and try "
            "DS_BUILD_OPS=0 pip install --no-build-isolation ninja deepspeed, or --strategy fsdp."
        )
    if overwrite and recipe.resume is not False:
        raise UserError(
            f"resume is {recipe.resume}, but --overwrite would remove what the run is to continue "
            "from. Leave one of the two out: try --resume false."
        )
    wanted = recipe.out_dir.expanduser()
    in_place = goes_on_in_place(recipe)
    with ExitStack() as stack:
        if in_place:  # locked first: a run at work may be writing what is looked at here
            out_dir = stack.enter_context(claim(wanted, "go_on"))
            Store(out_dir / CHECKPOINTS).remove_leftovers()
        start = find_start(dataclasses.replace(recipe, precision=plan.precision))
        if not force:
            require_room(recipe, devices, command)
        base = _find_base(recipe, start)
        if not in_place:
            place = Place(path=wanted, store=Store(wanted / CHECKPOINTS))
            if not overwrite and not is_at_work(place):  # which is left alone like a complete one
                require_free(wanted, recipe.method)
            out_dir = stack.enter_context(claim(wanted, "overwrite" if overwrite else "new"))
            if out_dir != wanted:
                print(f"{wanted} holds another run: this one goes to {out_dir}", flush=True)
        state = out_dir / STATE
        job = Job(
            recipe=dataclasses.replace(recipe, out_dir=out_dir),
            devices=devices,
            base=base or str(state / BASE),
            command=tuple(without_tokens(command)),
            started_at_s=started_at_s,
            start=str(start.checkpoint) if start else None,
            start_step=start.metadata.step if start else 0,
            stop_after=stop_after,
            changes=start.changes if start else (),
        )
        try:
            if in_place:
                stack.enter_context(ready_to_go_on(out_dir, start, state))
            if start is not None:
                _go_on(start, job, received, copy_base=base is None)
            written = dataclasses.replace(job.recipe, resume=False)
            write_durably(out_dir / RECIPE, to_yaml(written))
            job.write(state / "job.json")
            make_reserve(state / RESERVE)
        except OSError as error:
            raise _unwritable(out_dir, error) from None
        yield job


def _find_base(recipe: Recipe, start: Start | None) -> str | None:
    """The base model; None: the checkpoint has all that is needed of it."""
    base = recipe.checkpoint_dir
    if base.startswith("random:"):
        if start is not None:
            raise UserError(
                f"checkpoint_dir is {base}, but the checkpoint {start.checkpoint} was made from "
                f"{start.metadata.base.name}. Try --checkpoint_dir {start.metadata.base.name}."
            )
        return base
    if start is not None and recipe.method == "full" and (start.checkpoint / BASE).is_dir():
        return None
    try:
        return str(find_or_download(base, token=recipe.access_token).resolve())
    except UserError as error:
        if start is None:
            raise
        raise UserError(
            f"{error}\nThe checkpoint {start.checkpoint} continues from the base model "
            f"{start.metadata.base.name}: say where it is with --checkpoint_dir PATH."
        ) from None


def _go_on(start: Start, job: Job, received: Sequence[signal.Signals], *, copy_base: bool) -> None:
    """Check the checkpoint, take from it what the run needs, and say what goes on and how."""
    out_dir = job.recipe.out_dir
    with Display(out_dir) as display:
        verify_start(start, display, interrupted=lambda: bool(received))
        if copy_base:  # the checkpoint may be deleted while the run goes on
            shutil.copytree(start.checkpoint / BASE, out_dir / STATE / BASE)
        if not start.in_place:
            copy_rows(start, out_dir, out_dir / STATE)
        step = start.metadata.step
        display.message(f"going on from step {step:,}: {start.checkpoint}")
        for change in start.changes:
            display.message(f"changed: {change}")


@contextmanager
def claim(wanted: Path, use: Use) -> Iterator[Path]:
    """A run directory of one's own, locked while the run lasts.

    For a new run, a directory that holds anything is left alone and WANTED-2, WANTED-3, ... is
    taken. What is overwritten is put back after a mistake; a run that goes on finds all as it was.

    Raises:
        UserError: another run is at work there, or it cannot be written.
    """
    out_dir = wanted
    number = 2
    try:
        while use == "new" and out_dir.is_dir() and any(out_dir.iterdir()):
            out_dir = wanted.with_name(f"{wanted.name}-{number}")
            number += 1
        state = out_dir / STATE
        created = [path for path in (out_dir, *out_dir.parents) if not path.exists()]
        state.mkdir(parents=True, exist_ok=True)
        lock = (state / "lock").open("a")  # what a run at work wrote into it stays
    except OSError as error:
        raise _unwritable(out_dir, error) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"out_dir {out_dir} belongs to a run that is still at work. "
                "Wait for it, or try another --out_dir."
            ) from None
        lock.truncate(0)
        lock.write(Supervisor.here().to_json())
        lock.flush()
        _remove_entries(state, keep="lock")  # of a run that was killed with its supervisor
        replaced = state / "replaced"
        replaced.mkdir()
        if use != "go_on":
            _move_entries(out_dir, replaced)
        try:
            yield out_dir
        except UserError:  # nothing has run: leave the directory as it was
            if use != "go_on":
                _remove_entries(out_dir, keep=STATE)
                _move_entries(replaced, out_dir)
            raise
        finally:
            shutil.rmtree(state, ignore_errors=True)
            for path in created:
                if any(path.iterdir()):
                    break
                path.rmdir()


def _unwritable(out_dir: Path, error: OSError) -> UserError:
    return UserError(
        f"out_dir {out_dir} cannot be written: {error.strerror}. Try another --out_dir."
    )


def _remove_entries(directory: Path, *, keep: str) -> None:
    for entry in directory.iterdir():
        if entry.name != keep:
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()


def _move_entries(source: Path, target: Path) -> None:
    for entry in source.iterdir():
        if entry.name != STATE:
            entry.rename(target / entry.name)


def conclude(job: Job, received: Sequence[signal.Signals]) -> int:
    """Write and show the report of a run whose ranks have ended; the exit code of the command.

    Args:
        job: what was done.
        received: signals that asked for the end, the first one first.

    Raises:
        UserError: what the user can mend, found before the first step.
    """
    out_dir = job.recipe.out_dir
    reports = [_last_report(job, rank) for rank in range(job.plan.world_size)]
    rank, error = _cause(job)
    steps = (reports[0].progress or Progress()).steps
    if error is not None and error.kind == "user" and steps <= job.start_step:
        raise UserError(error.message)
    memory = [rank for report in reports if report.peak_memory for rank in report.peak_memory.ranks]
    report = dataclasses.replace(
        _with_outcome(reports[0], received, error, phase=reports[rank].phase),
        peak_memory=PeakMemory.of(memory) if memory else None,
        step_memory=StepMemory.of([report.step_memory for report in reports]),
        warnings=_all_warnings(reports),
        phases_s=dataclasses.replace(
            reports[0].phases_s or PhaseTimes(), total=time.time() - job.started_at_s
        ),
    )
    with Display(out_dir) as display:
        try:
            insist(lambda: write_report(report, out_dir), out_dir / STATE / RESERVE)
        except OSError as failure:
            display.warning(f"{out_dir / FILE_NAME} cannot be written ({failure.strerror})")
        if report.outcome == "out_of_memory":
            with display.phase("looking for what would fit"):
                shortage = find_shortage(job, reports[rank].peak_memory, report.exit_reason)
            report = dataclasses.replace(report, shortage=shortage)
            with suppress(OSError):
                write_report(report, out_dir)
        with suppress(OSError):
            _collect_output(out_dir, job.plan.world_size)
        display.show(render(report, out_dir))
        if report.shortage is not None:
            display.message(
                shortage_text(report.shortage, job.plan.accelerator, report.exit_reason)
            )
        if report.outcome != "completed":
            display.message(last_words(out_dir, job.recipe.method, max(steps, job.start_step)))
    return report.exit_code


def _cause(job: Job) -> tuple[int, RankError | None]:
    """The rank that ended the run, and how; the noise that this makes on others is passed over.

    A rank that ended without a word is found a moment late, when others may have missed it.
    """
    state = job.recipe.out_dir / STATE
    found = [
        (rank, error)
        for rank in range(job.plan.world_size)
        if (error := RankError.read(rank_directory(state, rank) / ERROR))
    ]
    if not found:
        return 0, None
    rank, error = min(
        found, key=lambda item: (item[1].kind not in WITHOUT_A_WORD, item[1].happened_at_s)
    )
    if job.plan.world_size == 1 or error.kind in ("user", "interrupted"):
        return rank, error
    return rank, dataclasses.replace(error, message=f"rank {rank}: {error.message}")


def _last_report(job: Job, rank: int) -> Report:
    """The report as the rank last wrote it."""
    file = rank_directory(job.recipe.out_dir / STATE, rank) / FILE_NAME
    return read_report(file) if file.exists() else _report_of_nothing(job)


def _all_warnings(reports: Sequence[Report]) -> list[str]:
    """The warnings of rank 0, and those that only other ranks have."""
    found = dict.fromkeys(reports[0].warnings, 0)
    for rank, report in enumerate(reports):
        for text in report.warnings:
            found.setdefault(text, rank)
    return [f"rank {rank}: {text}" if rank else text for text, rank in found.items()]


def _collect_output(out_dir: Path, world_size: int) -> None:
    """Add to the run's log what libraries said on other ranks and not on rank 0, once."""
    log = output_log(out_dir, 0)
    known = log.read_text(encoding="utf-8", errors="replace")
    with log.open("a", encoding="utf-8") as file:
        for rank in range(1, world_size):
            output = output_log(out_dir, rank)
            text = output.read_text(encoding="utf-8", errors="replace") if output.exists() else ""
            for line in dict.fromkeys(text.splitlines()):
                if line not in known:
                    file.write(f"rank {rank}: {line}\n")
            known += text


def _report_of_nothing(job: Job) -> Report:
    """What is known of a rank that ended before it could write a report."""
    seconds = time.time() - job.started_at_s
    return dataclasses.replace(job.new_report(), phases_s=PhaseTimes(set_up=seconds, total=seconds))


def _with_outcome(
    report: Report, received: Sequence[signal.Signals], error: RankError | None, phase: PhaseName
) -> Report:
    """The report of rank 0, completed with how the run ended and in which phase of that rank."""
    report = dataclasses.replace(report, finished_at=utc_now())
    if report.outcome in ENDED_WELL and (error is None or error.kind == "interrupted"):
        return report
    report = dataclasses.replace(report, outcome="failed", exit_code=1, phase=phase)
    if error is None or error.kind == "interrupted":
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
    return dataclasses.replace(report, exit_reason=error.message)
