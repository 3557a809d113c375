"""The supervisor of a run: owns its directory, starts its ranks, and says how it ended.

It is no rank itself and imports no torch, so it can still name the cause, write the report and
leave nothing behind when a rank is killed.
"""

import dataclasses
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from ftkit.checkpoint.metadata import BASE
from ftkit.data.sources import check_data
from ftkit.errors import UserError
from ftkit.evaluation.tasks.finding import find_tasks
from ftkit.launch.conclude import DamageFound, conclude
from ftkit.launch.environment import ExternalRanks, external_ranks
from ftkit.launch.interfaces import check_interfaces
from ftkit.launch.last_session import restarts_of
from ftkit.launch.preflight import require_room, with_micro_batch
from ftkit.launch.ranks import Ranks
from ftkit.launch.requeue import requeue_if_out_of_time
from ftkit.models.pretrained.base_outline import keeps_rest
from ftkit.models.pretrained.hub import find_or_download
from ftkit.recipe.checks import check_kernels_installed, check_loggers_installed
from ftkit.recipe.devices import find_devices
from ftkit.recipe.own_metric import OwnMetric
from ftkit.recipe.parsing import to_yaml
from ftkit.recipe.peft_adapter import with_adapter
from ftkit.recipe.plan import make_plan
from ftkit.recipe.recipe import Recipe
from ftkit.runs.backup import copy_rows, lost_rows, ready_to_go_on
from ftkit.runs.carrying.files import Others
from ftkit.runs.checkpoints import RunCheckpoints
from ftkit.runs.directory import RunDirectory
from ftkit.runs.job import Job, StopAfter
from ftkit.runs.lock import LOST_S, claim, is_at_work, unwritable
from ftkit.runs.mirror import UploadFailed
from ftkit.runs.remote_run import mirrored, require_unclaimed
from ftkit.runs.report.report import read_report
from ftkit.runs.resume import (
    Completed,
    Start,
    find_start,
    require_free,
    resumes_in_place,
    verify_start,
)
from ftkit.utils.console.display import Display
from ftkit.utils.console.terminal import fitted
from ftkit.utils.files import make_reserve, write_durably
from ftkit.utils.json_values import without_tokens
from ftkit.utils.process import launcher_starts_again, print_line
from ftkit.utils.progress import is_quiet, print_notice
from ftkit.utils.remote.providers import require_provider
from ftkit.utils.remote.urls import display_path, url_of


def launch(
    recipe: Recipe,
    *,
    command: Sequence[str],
    overwrite: bool = False,
    stop_after: StopAfter | None = None,
    force: bool = False,
    metrics: tuple[OwnMetric, ...] = (),
    trusted: Path | None = None,
) -> int:
    """Check, start and supervise one run; the exit code of the command.

    Under torchrun or SLURM, which start a process for each rank, this one looks after its rank.

    Args:
        recipe: what was asked.
        command: the command line, for the report.
        overwrite: replace what is in out_dir instead of taking another directory.
        stop_after: end this session before the run is done.
        force: start even if memory is certainly too small.
        metrics: of one's own.
        trusted: directory whose Python code tasks may run.

    Raises:
        UserError: before anything has started, and nothing is left behind.
    """

    def prepared(
        received: Sequence[signal.Signals], others: Others | None = None
    ) -> AbstractContextManager[Job]:
        return prepare_run(
            recipe,
            command,
            overwrite,
            started_at_s,
            stop_after,
            received,
            force=force,
            metrics=metrics,
            trusted=trusted,
            placed=placed,
            others=others,
        )

    def ended(job: Job, received: Sequence[signal.Signals]) -> int:
        code = conclude(job, received)
        requeue_if_out_of_time(code, received)
        return code

    started_at_s = time.time()
    placed = external_ranks()
    try:
        recipe = with_adapter(recipe)
        if placed is not None:
            from ftkit.launch.torchrun import take_part

            return take_part(placed, prepared, ended)
        if recipe.num_nodes not in ("auto", 1):
            raise UserError(
                f"num_nodes is {recipe.num_nodes}, but this command starts ranks on one machine "
                "only. Start it on every machine with torchrun or srun, or try --num_nodes 1."
            )
        doubted: set[Path] = set()
        while True:
            with Ranks() as ranks:
                try:
                    with prepared(ranks.received) as job:
                        ranks.run(job)
                        return ended(job, ranks.received)
                except DamageFound as found:
                    is_known = found.checkpoint in doubted  # though all of it was read since
                    if recipe.resume != "auto" or ranks.received or is_known:
                        raise
                    doubted.add(found.checkpoint)
                    print_notice(f"{found.why} Reading all of it ...")
    except Completed as completed:
        print(completed, flush=True)
        return 0
    except UploadFailed as error:
        print_line(f"ftkit: {error}")
        return 1


@contextmanager
def prepare_run(
    recipe: Recipe,
    command: Sequence[str],
    overwrite: bool,
    started_at_s: float,
    stop_after: StopAfter | None = None,
    received: Sequence[signal.Signals] = (),
    *,
    force: bool = False,
    metrics: tuple[OwnMetric, ...] = (),
    trusted: Path | None = None,
    placed: ExternalRanks | None = None,
    others: Others | None = None,
) -> Iterator[Job]:
    """A job whose every setting is checked, with its base model at hand and its directory claimed.

    Raises:
        UserError: and everything is as it was.
        Completed: the run that was to go on is complete.
    """
    if (url := url_of(recipe.out_dir)) is not None:
        require_provider(url.partition(":")[0])
    check_data(recipe.data, recipe.eval.sets)
    find_tasks(recipe.eval.tasks or (), key="eval.tasks", trusted=trusted)
    asked = recipe
    if placed is not None:
        recipe = placed.applied_to(recipe)
    devices = find_devices(recipe, on_asking=_say_that_torch_is_asked)
    if placed is not None:
        recipe = placed.on(recipe, devices)
    recipe = with_micro_batch(recipe, devices)
    plan = make_plan(recipe, devices)
    plan.rules.check_installed()
    check_kernels_installed(recipe, plan.accelerator)
    check_loggers_installed(recipe)
    check_interfaces(plan.communication)
    if overwrite and recipe.resume is not False:
        raise UserError(
            f"resume is {recipe.resume}, but --overwrite would remove what the run is to continue "
            "from. Leave one of the two out: try --resume false."
        )
    wanted = recipe.out_dir.expanduser()
    in_place = resumes_in_place(recipe)
    with ExitStack() as stack:
        if in_place:  # locked first: a run at work may be writing what is looked at here
            # What is lost may take a while to end: a machine that was cut off notices it, too.
            patience_s = LOST_S if launcher_starts_again() else 0.0
            run = stack.enter_context(claim(wanted, "go_on", patience_s=patience_s))
            mirror = stack.enter_context(
                mirrored(run, print_notice, received, goes_on=True, several=others is not None)
            )
            run.store.remove_leftovers()
        told = dataclasses.replace(recipe, precision=plan.precision)
        start = find_start(told)
        if not force:
            require_room(recipe, devices, command)
        base = _find_base(recipe, start)
        if not in_place:
            require_unclaimed(wanted, print_notice)
            place = RunCheckpoints(path=wanted, store=RunDirectory(wanted).store)
            if not overwrite and not is_at_work(place):  # which is left alone like a complete one
                require_free(wanted, recipe.method)
            run = stack.enter_context(claim(wanted, "overwrite" if overwrite else "new"))
            if run.path != wanted:
                own = display_path(run.path)
                text = f"{display_path(wanted)} holds another run: this one goes to {own}"
                print_notice(fitted(text, sys.stdout))
            mirror = stack.enter_context(mirrored(run, print_notice, received, goes_on=False))
        if start is not None:
            with Display(None) as display:
                start = verify_start(start, told, display, interrupted=lambda: bool(received))
        job = Job(
            recipe=dataclasses.replace(recipe, out_dir=run.path),
            devices=devices,
            base=base or str(run.base),
            command=tuple(without_tokens(command)),
            started_at_s=started_at_s,
            start=str(start.checkpoint) if start else None,
            start_step=start.metadata.step if start else 0,
            stop_after=stop_after,
            changes=start.changes if start else (),
            quiet=is_quiet(),
            metrics=metrics,
            trusted=None if trusted is None else str(trusted.expanduser().resolve()),
        )
        if in_place or start is not None:
            restarts = restarts_of(
                run, start, world_size=plan.world_size, started_at_s=started_at_s
            )
            job = dataclasses.replace(job, restarts=restarts)
        try:
            if in_place:
                stack.enter_context(ready_to_go_on(run, start))
            with Display(run.path) as display:
                if start is not None:
                    _go_on(start, job, display, copy_base=base is None)
                if placed is not None and (notice := placed.notice(asked)):
                    display.message(notice)
                display.message(_beginning(job))
            written = dataclasses.replace(job.recipe, resume=False)
            if asked.num_nodes == "auto":  # also at the next start, wherever that is
                written = dataclasses.replace(written, num_nodes="auto")
            write_durably(run.recipe, to_yaml(written))
            job.write(run.job)
            make_reserve(run.reserve)
            if mirror is not None:
                mirror.begin(lambda: _has_begun(job), overwrites=not in_place, others=others)
        except OSError as error:
            raise unwritable(run.path, error) from None
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
    if start is not None and recipe.method == "full" and _has_base(start.checkpoint):
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


def _has_base(checkpoint: Path) -> bool:
    """Whether a checkpoint of full fine-tuning has all that is needed of the base model."""
    directory = checkpoint / BASE
    return directory.is_dir() and not keeps_rest(directory)


def _go_on(start: Start, job: Job, display: Display, *, copy_base: bool) -> None:
    """Take from the checkpoint what the run needs, and say what goes on and how."""
    if copy_base:  # the checkpoint may be deleted while the run goes on
        shutil.copytree(start.checkpoint / BASE, job.directory.base)
    if not start.in_place:
        copy_rows(start, job.directory)
    for why in start.passed_over:
        display.warning(f"{why} It is kept in {display_path(job.directory.backups)}.")
    if lost := lost_rows(start, job.directory):
        display.warning(lost)
    step = start.metadata.step
    display.message(f"going on from step {step:,}: {display_path(start.checkpoint)}")
    for change in start.changes:
        display.message(f"changed: {change}")


def _say_that_torch_is_asked() -> None:
    print_notice("asking torch about the devices ...")  # in a child that imports it


def _has_begun(job: Job) -> bool:
    """Whether a step was done: until then a mistake leaves everything as it was."""
    run = job.directory
    if (run.store.newest() or 0) > job.start_step:
        return True
    try:
        progress = read_report(run.rank(0).report).progress
    except UserError:  # not there yet
        return False
    return progress is not None and progress.steps > job.start_step


def _beginning(job: Job) -> str:
    """What is about to begin: imports in the ranks take longer than all that came before."""
    plan, recipe = job.plan, job.recipe
    ranks = "1 process" if plan.world_size == 1 else f"{plan.world_size} processes"
    device = job.devices.names[0] if job.devices.names else "CPU"
    return (
        f"starting {ranks} on {device} ({plan.strategy}, {plan.precision})\n"
        f"{recipe.method} fine-tuning of {recipe.checkpoint_dir}\n"
        f"into {display_path(recipe.out_dir)}"
    )
