"""Backup of newer files of a run's directory: they are moved there, and nothing is deleted."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ftkit.errors import UserError
from ftkit.runs.directory import RunDirectory
from ftkit.runs.report.metrics import cut_rows
from ftkit.runs.resume import Start
from ftkit.utils.files import remove
from ftkit.utils.remote.urls import display_path

_LONGEST_ROW_BYTES = 2**16


@contextmanager
def ready_to_go_on(run: RunDirectory, start: Start | None) -> Iterator[None]:
    """The directory of a run as it was at its start; all that is later is in a backup.

    Without a start, an attempt that saved nothing is moved there as a whole. If that fails, or
    the block ends with a UserError, the directory is as it was before.

    Args:
        run: its directory, locked.
        start: the checkpoint in it that the run goes on from.
    """
    existed = {path for path in run.written if path.exists()}
    for path in run.continued:
        if path.exists():
            copy = run.before / path.relative_to(run.path)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
    target = _next_number(run.backups)
    with ExitStack() as undoing:
        undoing.callback(_put_back, run, existed, target)
        if start is None:
            _move(sorted(existed), target)
        else:
            _back_up_later(run, start.metadata.step, target)
        undo = undoing.pop_all()
    try:
        yield
    except UserError:  # nothing has run
        undo.close()
        raise


def copy_rows(start: Start, run: RunDirectory) -> None:
    """Give a run that branches off the rows of its origin up to the checkpoint.

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
            cut_rows(own, start.metadata.step, run.state / own.name)


def lost_rows(start: Start, run: RunDirectory) -> str:
    """What to say if metrics.csv lacks the last rows up to the checkpoint; empty: it has them.

    A run writes a row for each step, and the checkpoint cannot bring them back: it knows how many
    there were, and carries what the report sums up.

    Args:
        start: the checkpoint that the run goes on from; nothing is expected of one that was
            imported.
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
        "lost. The run goes on, and its report still counts them."
    )


def _last_step(rows: Path) -> int:
    """The step of the last row, which is whole; 0: there is none."""
    if not rows.exists():
        return 0
    with rows.open("rb") as file:
        file.seek(max(0, rows.stat().st_size - _LONGEST_ROW_BYTES))
        cell = (file.read().splitlines() or [b""])[-1].partition(b",")[0]
    return int(cell) if cell.isdigit() else 0


def _next_number(directory: Path) -> Path:
    taken = [int(p.name) for p in directory.glob("*") if p.name.isdecimal()]
    return directory / str(max(taken, default=0) + 1)


def _back_up_later(run: RunDirectory, step: int, target: Path) -> None:
    later = run.store.move_later(step, target)
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
    """Undo: what was moved goes back where it was; rows are not moved but restored."""
    if backup.store.directory.exists() and run.store.directory.exists():
        run.store.put_back(backup.path)
    for entry in backup.path.iterdir():
        if entry not in backup.rows:
            remove(run.path / entry.name)
            entry.rename(run.path / entry.name)
    shutil.rmtree(backup.path)
    if not any(run.backups.iterdir()):
        run.backups.rmdir()
