"""Resume: the checkpoint that a run continues from, and its directory as it was then.

This is decided before a rank starts, without torch: the recipe is compared with that of the
checkpoint, and every file of the checkpoint is checked. Files that are newer than the checkpoint
move to a backup in set_aside; nothing is deleted.
"""

import dataclasses
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ftkit.checkpoint.file_checks import format_problem, hash_file
from ftkit.checkpoint.metadata import (
    METADATA,
    PLUGIN,
    RECIPE,
    CheckpointError,
    Metadata,
    read_metadata,
)
from ftkit.checkpoint.store import Store, check_files, step_of, verify
from ftkit.errors import Completed, UserError
from ftkit.recipe.changes import recipe_changes
from ftkit.recipe.lora_layers import kept_from
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.plugin import plugin_in_use, require_same_plugin
from ftkit.recipe.recipe import Component, Method, Precision, Recipe, Train
from ftkit.runs.directory import RunDirectory
from ftkit.runs.report.metrics import cut_rows
from ftkit.runs.report.report import Loss, Progress
from ftkit.runs.unfinished import (
    DamagedCheckpoint,
    continue_command,
    resumes_in_place,
    sound_report,
)
from ftkit.runs.url_runs import fetch_without_shards, refresh
from ftkit.strategies.schedule import make_schedule, without_epochs
from ftkit.utils.console.display import Display
from ftkit.utils.damaged_files import require_regular
from ftkit.utils.files import remove
from ftkit.utils.json_values import from_json
from ftkit.utils.progress import OnProgress
from ftkit.utils.urls import display_path, local_path

_LIMITS = ("epochs", "max_steps", "max_tokens", "max_time")
"""Keys of `train` that end a run."""
# No row is as long, however many sources the data have.
_LONGEST_ROW_BYTES = 2**16


@dataclass(frozen=True, kw_only=True)
class Start:
    """The checkpoint that a run continues from."""

    checkpoint: Path
    """Its directory, absolute."""
    metadata: Metadata
    """Its metadata."""
    in_place: bool
    """True if it belongs to out_dir; else the run branches into a new directory."""
    data: Component
    """Of its recipe."""
    kept: Mapping[str, Any] = field(default_factory=dict)
    """Keys that the recipe leaves open, and in which the run stays as it began, with their values.
    """
    changes: tuple[str, ...] = ()
    """Changes of settings that affect training from here on, one line each."""
    passed_over: tuple[str, ...] = ()
    """Problems of newer checkpoints, because of which this one is used, one line each."""


def find_start(recipe: Recipe) -> Start | None:
    """The checkpoint that a run continues from, by `resume`; None: it starts from the base model.

    With `auto`, an incomplete run continues from its newest intact one. Tensors are not read;
    see `verify_start`.

    Args:
        recipe: as requested; all of it is compared with the saved one.

    Raises:
        UserError: no such checkpoint, a damaged one, or one of a run that trains something else.
        Completed: the run is complete, and the recipe does not prolong it.
    """
    resume, run = recipe.resume, _run_in(recipe.out_dir)
    if resume is False:
        return None
    store = run.store
    # Before numbers: True is an int.
    if resume is True or resume == "auto":
        return _newest_start(recipe, run)
    if isinstance(resume, int):
        if resume not in store.steps():
            raise UserError(
                f"resume is {resume}, but {display_path(run.path)} has no checkpoint of this step. "
                f"{_there_are(store)}"
            )
        return _start(recipe, store.path(resume), in_place=True)
    in_place = resumes_in_place(resume, recipe.out_dir)
    return _start(recipe, _checkpoint_at(resume), in_place=in_place)


def verify_start(
    start: Start, recipe: Recipe, display: Display, interrupted: Callable[[], bool] = lambda: False
) -> Start:
    """Verify all files of the checkpoint, by checksum and by format.

    Files at a url are checked by size and header; ranks verify the parts that they read. A file
    without checksums of its parts, or in which a rank found damage, is read as a whole here.

    Args:
        start: from `find_start`.
        recipe: the one given there; earlier checkpoints are compared with it.
        display: shows the progress.
        interrupted: whether the run is to end anyway; then the rest is not read.

    Returns:
        The start; with `resume: auto` an earlier one, if a file is damaged.

    Raises:
        UserError: a file is damaged; offers an earlier checkpoint.
    """
    with display.phase("checking the checkpoint", brief=True) as phase:

        def advance(done: int, total: int) -> None:
            if interrupted():
                raise InterruptedError
            phase.advance(done, total)

        with suppress(InterruptedError):
            # An earlier checkpoint may be damaged, too: each is verified in turn.
            while problems := _damage(start, advance):
                damaged = _damaged(start.checkpoint, problems, recipe.resume, start.in_place)
                start = _start_before(recipe, damaged, start.passed_over)
    return start


def _damage(start: Start, advance: OnProgress) -> list[str]:
    return verify(start.checkpoint, advance, fetching=False) or [
        problem
        for name, entry in sorted(start.metadata.files.items())
        if (problem := format_problem(start.checkpoint / name, entry))
    ]


def _run_in(out_dir: Path) -> RunDirectory:
    return RunDirectory(out_dir.expanduser())


def _newest_start(recipe: Recipe, run: RunDirectory) -> Start | None:
    newest = run.store.newest()
    if newest is not None:
        checkpoint, report = run.store.path(newest), sound_report(run.report)
        try:
            if report is not None and report.diverged_from == newest:
                # Any rate gives the same loss again: it is computed with these weights.
                raise _damaged(checkpoint, [report.exit_reason], recipe.resume, in_place=True)
            start = _start(recipe, checkpoint, in_place=True)
        except DamagedCheckpoint as damaged:
            return _start_before(recipe, damaged)
        _refuse_completed(recipe, start)
        return start
    # `true` wants a checkpoint; `auto` also starts a run, as a job that restarts by itself has to.
    if recipe.resume is True:
        raise UserError(
            f"resume is true, but {display_path(run.path)} has no checkpoint. "
            "Try --resume auto, which starts a new run then."
        )
    report = sound_report(run.report)
    if report is not None and report.outcome == "completed":
        raise Completed(
            f"{display_path(run.path)} is complete ({report.exit_reason}), and has no checkpoint "
            "to train on from"
        )
    return None


def _start_before(
    recipe: Recipe, damaged: DamagedCheckpoint, passed_over: tuple[str, ...] = ()
) -> Start:
    """The newest intact checkpoint before a damaged one, for an incomplete run with `resume: auto`.

    In other cases the damage is raised.
    """
    store, step = Store(damaged.checkpoint.parent), step_of(damaged.checkpoint.name)
    if recipe.resume != "auto" or step is None or _has_finished(_run_in(recipe.out_dir), step):
        raise damaged
    # The newest first: each one passed over costs steps.
    for earlier in reversed([one for one in store.steps() if one < step]):
        passed_over += (damaged.why,)
        try:
            start = _start(recipe, store.path(earlier), in_place=True)
        except DamagedCheckpoint as error:
            damaged = error
        else:
            return dataclasses.replace(start, passed_over=passed_over)
    raise UserError("\n".join((*passed_over, str(damaged))))


def _checkpoint_at(text: str) -> Path:
    """The checkpoint of a path: itself, or the newest one of a run."""
    path = local_path(text).expanduser()
    refresh(path)
    # An empty text would mean the current directory.
    if not text or not path.is_dir():
        raise UserError(
            f"resume is {text!r}, but there is no such directory. Give auto, true, false, a step, "
            "or the path or url of a run, of its checkpoints or of one of them. Try --resume auto."
        )
    if step_of(path.resolve().name) is not None or (path / METADATA).exists():
        return path
    inside = RunDirectory(path).store
    store = inside if inside.directory.is_dir() else Store(path)
    newest = store.newest()
    if newest is None:
        raise UserError(
            f"resume is {text}, but there is no checkpoint in it. Give the path of a run, of its "
            "checkpoints or of one of them, or try --resume false."
        )
    return store.path(newest)


def _start(recipe: Recipe, checkpoint: Path, *, in_place: bool) -> Start:
    """The checkpoint as a start, if its names and sizes are right and the recipe fits."""
    checkpoint = checkpoint.resolve()
    # Shards stay at the url: ranks read the parts that they need.
    fetch_without_shards(checkpoint)
    problems = check_files(checkpoint) or _content_problems(checkpoint)
    if problems:
        raise _damaged(checkpoint, problems, recipe.resume, in_place)
    metadata = read_metadata(checkpoint)
    _check_plugin(recipe, checkpoint, metadata, in_place=in_place)
    saved = _saved_recipe(recipe, checkpoint, metadata)
    kept = kept_from(saved, recipe)
    # On any machine, whatever its default is.
    if recipe.precision is None and saved.precision is not None:
        kept["precision"] = saved.precision
    refusals, changes = recipe_changes(saved, dataclasses.replace(recipe, **kept))
    if refusals:
        differing = ", ".join(refusals)
        raise UserError(
            f"The checkpoint {display_path(checkpoint)} is of a run with other settings: "
            f"{differing}. A run cannot change what it learns. Use the checkpoint's value of "
            "each, or start a new run: try --resume false with another --out_dir."
        )
    if (plugin := plugin_in_use()) is not None and PLUGIN not in metadata.files:
        changes.append(f"plugin not set -> {plugin.file}")
    return Start(
        checkpoint=checkpoint,
        metadata=metadata,
        in_place=in_place,
        data=saved.data,
        kept=kept,
        changes=tuple(changes),
    )


def check_plugin(recipe: Recipe) -> None:
    """Refuse a plugin that is not that of the checkpoint to resume from, or the lack of it.

    Called before anything else needs the plugin; a checkpoint that is not here yet, or damaged, is
    left to `find_start`.

    Raises:
        UserError: names the checksums of both, and a command that works.
    """
    resume, store = recipe.resume, _run_in(recipe.out_dir).store
    step = store.newest() if resume is True or resume == "auto" else resume
    if step is None:
        return
    checkpoint = store.path(step) if isinstance(step, int) else _checkpoint_at(step)
    with suppress(CheckpointError):
        in_place = resumes_in_place(resume, recipe.out_dir)
        _check_plugin(recipe, checkpoint, read_metadata(checkpoint), in_place=in_place)


def _check_plugin(recipe: Recipe, checkpoint: Path, metadata: Metadata, *, in_place: bool) -> None:
    """Refuse a plugin that is not that of the checkpoint, or the lack of it."""
    entry, run = metadata.files.get(PLUGIN), _run_in(recipe.out_dir)
    command = "the same command with"
    if in_place and run.recipe.exists():
        name = "finetune" if recipe.method == "lora" else "finetune_full"
        config, resume = shlex.quote(display_path(run.recipe)), str(recipe.resume).lower()
        command = f"ftkit {name} --config {config} --resume {shlex.quote(resume)}"
    checksum = None if entry is None else entry.sha256
    require_same_plugin(checksum, checkpoint / PLUGIN, command)


def _content_problems(checkpoint: Path) -> list[str]:
    """Problems of the files that are read before everything is verified."""
    metadata = read_metadata(checkpoint)
    named = step_of(checkpoint.name)
    if named is not None and named != metadata.step:
        return [f"{checkpoint} holds the checkpoint of step {metadata.step}."]
    file = checkpoint / RECIPE
    if RECIPE not in metadata.files:
        return [f"{checkpoint / METADATA} does not list {RECIPE}."]
    try:
        changed = hash_file(file) != metadata.files[RECIPE]
    except OSError as error:
        return [f"{file} cannot be read ({error.strerror})."]
    if changed:
        return [f"{file} is damaged: its checksum differs."]
    try:
        _recipe_in(checkpoint, metadata)
    except UserError as error:
        # read_recipe takes the file for one of the command line.
        return [str(error).removeprefix("--config ")]
    return []


def _recipe_in(checkpoint: Path, metadata: Metadata) -> Recipe:
    method: Method = "lora" if metadata.method == "lora" else "full"
    return read_recipe([checkpoint / RECIPE], method=method)


def _saved_recipe(recipe: Recipe, checkpoint: Path, metadata: Metadata) -> Recipe:
    """The recipe of a checkpoint; values it left open are resolved where the new one sets them.

    The precision always is, unless nothing was trained before an imported checkpoint was written.
    """
    saved = _recipe_in(checkpoint, metadata)
    is_imported = not metadata.carried
    if recipe.precision is not None or not is_imported:
        saved = dataclasses.replace(saved, precision=cast(Precision, metadata.layout.precision))
    if recipe.train.max_seq_length is not None:
        train = dataclasses.replace(saved.train, max_seq_length=metadata.max_seq_length)
        saved = dataclasses.replace(saved, train=train)
    # Left to ftkit, the run keeps the warm-up that it began with.
    if recipe.train.lr_warmup_steps == "auto":
        saved = dataclasses.replace(
            saved, train=dataclasses.replace(saved.train, lr_warmup_steps="auto")
        )
    # A model that is held in memory is known by its fingerprint, wherever it lies. Earlier versions
    # held the base model where no reference was named.
    if metadata.beside is not None and recipe.reference is not None:
        saved = dataclasses.replace(saved, reference=recipe.reference)
    return saved


def _damaged(
    checkpoint: Path, problems: list[str], resume: bool | int | str, in_place: bool
) -> DamagedCheckpoint:
    step = step_of(checkpoint.name)
    store = Store(checkpoint.parent)
    before = [s for s in store.steps() if step is not None and s < step]
    # By names and sizes alone: this is advice, and --resume verifies what it is given.
    sound = next((s for s in reversed(before) if not store.check_files(s)), None)
    if sound is None:
        advice = "There is no other before it: try --overwrite without --resume to start again."
    elif resume is True:
        advice = "Try --resume auto, which continues from the newest intact one."
    else:
        option = sound if in_place else shlex.quote(display_path(store.path(sound)))
        advice = f"Try the one before it: --resume {option}."
    why = f"{display_path(checkpoint)} cannot be continued from: {' '.join(problems)}"
    return DamagedCheckpoint(checkpoint, why, advice)


def _there_are(store: Store) -> str:
    steps = store.steps()
    if not steps:
        return "There are none. Try --resume false."
    return f"There are {', '.join(map(str, steps))}. Try --resume {steps[-1]}."


def _refuse_completed(recipe: Recipe, start: Start) -> None:
    """Raise Completed unless steps are left, or the result is missing."""
    run, metadata = _run_in(recipe.out_dir), start.metadata
    finished = _has_finished(run, metadata.step)
    # Of a base of random weights no result is saved.
    writes_result = recipe.checkpoint.save and not recipe.checkpoint_dir.startswith("random:")
    has_result = run.final.is_dir() or not writes_result
    patience = recipe.eval.patience
    left = _steps_left(recipe.train, patience, metadata)
    # The result is missing, or a session was interrupted with steps left.
    if not has_result or (left and not finished):
        return
    if not left and not finished and writes_result:
        return  # it ended while the result was written, or before its report
    saved = _saved_recipe(recipe, start.checkpoint, metadata)
    # Complete by the limits that it had; the recipe has raised or removed one.
    if left and _grew(saved, recipe):
        return
    where = f"; the result is in {display_path(run.final)}" if run.final.is_dir() else ""
    raise Completed(
        f"{display_path(run.path)} is complete at step {metadata.step:,}{where}\n"
        f"to train longer: {continue_command(run.path, recipe.method)} "
        f"{_more(recipe.train, patience, metadata)}"
    )


def _has_finished(run: RunDirectory, newest: int) -> bool:
    """Return whether the run is complete, by a report about its newest checkpoint."""
    # An older report does not count: a session after it was killed.
    report = sound_report(run.report)
    if report is None or report.outcome != "completed":
        return False
    return (report.progress or Progress()).steps == newest


def _steps_left(train: Train, patience: int | None, metadata: Metadata) -> int:
    """Steps to come; where they are known only from the data, 1 if there are any."""
    train = _with_limits(train, metadata)
    if train.global_batch_tokens is not None or train.step_ends_with_epoch:
        ends = train.epochs and metadata.samples >= train.epochs * metadata.data.train_samples
        if ends or (train.max_steps and metadata.step >= train.max_steps):
            return 0
        return 0 if _is_out_of_patience(patience, metadata) else 1
    schedule, _ = make_schedule(
        train,
        metadata.data.train_samples,
        # Any learning rate: the number of steps does not depend on it.
        1.0,
        start_step=metadata.step,
        start_samples=metadata.samples,
    )
    return 0 if _is_out_of_patience(patience, metadata) else schedule.total_steps - metadata.step


def _with_limits(train: Train, metadata: Metadata) -> Train:
    """The settings, with nothing but what ends the run on its data."""
    if metadata.data.train_samples:
        return train
    return without_epochs(
        train,
        metadata.max_seq_length,
        start_step=metadata.step,
        start_samples=metadata.samples,
    )


def _is_out_of_patience(patience: int | None, metadata: Metadata) -> bool:
    loss = from_json(Loss, metadata.carried.get("loss") or {})
    assert isinstance(loss, Loss)
    return loss.has_exhausted(patience)


def _grew(saved: Recipe, now: Recipe) -> bool:
    """Return whether a limit of the run is higher than before, or gone."""
    pairs = [(getattr(saved.train, key), getattr(now.train, key)) for key in _LIMITS]
    pairs.append((saved.eval.patience, now.eval.patience))
    return any(before is not None and (after is None or after > before) for before, after in pairs)


def _more(train: Train, patience: int | None, metadata: Metadata) -> str:
    """Options that prolong the run."""
    options = []
    if patience is not None and _is_out_of_patience(patience, metadata):
        return f"--eval.patience {2 * patience}"
    of_tokens, train = train.max_tokens, _with_limits(train, metadata)
    if of_tokens is not None and train.max_steps == metadata.step:
        options.append(f"--train.max_tokens {2 * of_tokens}")
    if train.epochs and metadata.samples >= train.epochs * metadata.data.train_samples:
        epochs = int(metadata.samples // metadata.data.train_samples) + 1
        options.append(f"--train.epochs {max(epochs, train.epochs + 1)}")
    if train.max_steps and metadata.step >= train.max_steps:
        options.append(f"--train.max_steps {2 * metadata.step}")
    if train.max_time and not options:
        options.append(f"--train.max_time {2 * train.max_time:g}")
    return " ".join(options or [f"--train.epochs {(train.epochs or 1) + 1}"])


# --- The directory as it was at the checkpoint ----------------------------------------------------


@contextmanager
def ready_to_go_on(run: RunDirectory, start: Start | None) -> Iterator[None]:
    """The directory of a run as it was at a checkpoint; everything later is in a backup.

    Without a checkpoint, an attempt that saved nothing moves there as a whole. If that fails, or
    the block ends with a UserError, the directory is as it was before.

    Args:
        run: its directory, locked.
        start: the checkpoint in it that the run continues from.

    Raises:
        UserError: a file of the run is a pipe, a device or a directory.
    """
    # Whatever appears later is of this session, and is removed if it fails.
    existed = {path for path in run.written if path.exists()}
    # Copied, not moved: a session adds to these files.
    for path in run.continued:
        require_regular(path)  # a copy of a device never ends
        if path.exists():
            copy = run.before / path.relative_to(run.path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
    target = _next_number(run.backups)
    with ExitStack() as undoing:
        undoing.callback(_put_back, run, existed, target)
        # An attempt that saved nothing has nothing to continue.
        if start is None:
            _move(sorted(existed), target)
        else:
            _back_up_later(run, start.metadata.step, target)
        # From here on only a UserError undoes it: a run that was killed keeps what it did.
        undo = undoing.pop_all()
    try:
        yield
    except UserError:  # no step was done
        undo.close()
        raise


def copy_rows(start: Start, run: RunDirectory) -> None:
    """Copy the rows of another run up to a checkpoint, for a run that branches off there.

    Args:
        start: a checkpoint of another run.
        run: the new run.
    """
    origin = RunDirectory.of_checkpoint(start.checkpoint)
    if origin is None:  # a checkpoint alone
        return
    for source, own in zip(origin.rows, run.rows, strict=True):
        if source.exists():
            shutil.copyfile(source, own)
            # Later rows are of the other run, which keeps them: the copies go with the state.
            cut_rows(own, start.metadata.step, run.state / own.name)


def lost_rows(start: Start, run: RunDirectory) -> str:
    """Warning if metrics.csv lacks the last rows up to the checkpoint; empty: it has them.

    The checkpoint cannot restore rows: it only has their number, and the sums for the report.

    Args:
        start: the checkpoint that the run continues from; an imported one has no rows.
        run: its directory, with the rows up to the checkpoint alone.
    """
    step, is_imported = start.metadata.step, not start.metadata.carried
    if is_imported or not (start.in_place or run.metrics.exists()):
        return ""
    last = _last_step(run.metrics)
    if last >= step:
        return ""
    return (
        f"{display_path(run.metrics)} was cut: its rows of the steps {last + 1:,} to {step:,} are "
        "lost. The run continues, and its report still counts them."
    )


def _last_step(rows: Path) -> int:
    """Step of the last row; 0: there is none."""
    if not rows.exists():
        return 0
    with rows.open("rb") as file:
        # The end only: a long run has a million rows.
        file.seek(max(0, rows.stat().st_size - _LONGEST_ROW_BYTES))
        cell = (file.read().splitlines() or [b""])[-1].partition(b",")[0]
    return int(cell) if cell.isdigit() else 0


def _next_number(directory: Path) -> Path:
    taken = [int(p.name) for p in directory.glob("*") if p.name.isdecimal()]
    return directory / str(max(taken, default=0) + 1)


def _back_up_later(run: RunDirectory, step: int, target: Path) -> None:
    later = run.store.move_later(step, target)
    # Result and report describe an end that the run goes back from.
    if later or run.final.exists():
        _move([path for path in (run.final, run.report) if path.exists()], target)
    for rows in run.rows:
        cut_rows(rows, step, target / rows.name)


def _move(paths: list[Path], target: Path) -> None:
    for path in paths:
        target.mkdir(parents=True, exist_ok=True)
        path.rename(target / path.name)


def _put_back(run: RunDirectory, existed: set[Path], target: Path) -> None:
    for path in run.written:
        if path not in existed:
            remove(path)
    if target.exists():
        _move_back(RunDirectory(target), run)
    if run.before.exists():
        shutil.copytree(run.before, run.path, dirs_exist_ok=True)


def _move_back(backup: RunDirectory, run: RunDirectory) -> None:
    """Move everything back but rows, which are restored from their copies."""
    if backup.store.directory.exists() and run.store.directory.exists():
        run.store.put_back(backup.path)
    for entry in backup.path.iterdir():
        if entry not in backup.rows:
            remove(run.path / entry.name)
            entry.rename(run.path / entry.name)
    shutil.rmtree(backup.path)
    if not any(run.backups.iterdir()):
        run.backups.rmdir()
