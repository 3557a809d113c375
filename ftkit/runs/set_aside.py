"""Set aside: newer files of a run's directory are moved to a backup, and nothing is deleted."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ftkit.checkpoint.store import LATEST, Store
from ftkit.console.display import LOG_NAME
from ftkit.errors import UserError
from ftkit.report.metrics import METRICS_NAME, VALIDATION_NAME, cut_rows
from ftkit.report.report import FILE_NAME
from ftkit.runs.directory import CHECKPOINTS, FINAL, RECIPE
from ftkit.runs.resume import Start

SET_ASIDE = "set_aside"
"""Directory inside out_dir; in it a numbered one for each time."""
ROWS = (METRICS_NAME, VALIDATION_NAME)

_REWRITTEN = (RECIPE, FILE_NAME, *ROWS, LOG_NAME, f"{CHECKPOINTS}/{LATEST}")
_OWN = (RECIPE, FILE_NAME, *ROWS, LOG_NAME, FINAL, CHECKPOINTS, "tensorboard", "wandb")
"""What runs write into out_dir; anything else there is not ours."""


@contextmanager
def ready_to_go_on(out_dir: Path, start: Start | None, state: Path) -> Iterator[None]:
    """The directory of a run as it was at its start; all that is later is set aside.

    Without a start, an attempt that saved nothing is set aside as a whole. If that fails, or
    the block ends with a UserError, the directory is as it was before.

    Args:
        out_dir: of the run, locked.
        start: the checkpoint in it that the run goes on from.
        state: for files that are needed meanwhile.
    """
    existed = {name for name in _OWN if (out_dir / name).exists()}
    before = state / "before"
    for name in _REWRITTEN:
        if (out_dir / name).exists():
            (before / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(out_dir / name, before / name)
    target = _next_number(out_dir / SET_ASIDE)
    with ExitStack() as undoing:
        undoing.callback(_put_back, out_dir, existed, before, target)
        if start is None:
            _move(sorted(existed), out_dir, target)
        else:
            _set_later_aside(out_dir, start.metadata.step, target)
        undo = undoing.pop_all()
    try:
        yield
    except UserError:  # nothing has run
        undo.close()
        raise


def copy_rows(start: Start, out_dir: Path, state: Path) -> None:
    """Give a run that branches off the rows of its origin up to the checkpoint.

    Args:
        start: a checkpoint of another run.
        out_dir: of the new run.
        state: for files that are needed meanwhile.
    """
    origin = start.checkpoint.parent
    if origin.name != CHECKPOINTS:  # a checkpoint alone
        return
    for name in ROWS:
        if (origin.parent / name).exists():
            shutil.copyfile(origin.parent / name, out_dir / name)
            cut_rows(out_dir / name, start.metadata.step, state / name)


def _next_number(directory: Path) -> Path:
    taken = [int(p.name) for p in directory.glob("*") if p.name.isdecimal()]
    return directory / str(max(taken, default=0) + 1)


def _set_later_aside(out_dir: Path, step: int, target: Path) -> None:
    later = Store(out_dir / CHECKPOINTS).set_aside(step, target)
    if later or (out_dir / FINAL).exists():
        _move([n for n in (FINAL, FILE_NAME) if (out_dir / n).exists()], out_dir, target)
    for name in ROWS:
        cut_rows(out_dir / name, step, target / name)


def _move(names: list[str], source: Path, target: Path) -> None:
    for name in names:
        target.mkdir(parents=True, exist_ok=True)
        (source / name).rename(target / name)


def _put_back(out_dir: Path, existed: set[str], before: Path, target: Path) -> None:
    for name in _OWN:
        if name not in existed:
            _remove(out_dir / name)
    if target.exists():
        _move_back(target, out_dir)
    if before.exists():
        shutil.copytree(before, out_dir, dirs_exist_ok=True)


def _move_back(target: Path, out_dir: Path) -> None:
    """Undo: what was moved goes back where it was; rows are not moved but restored."""
    checkpoints = target / CHECKPOINTS
    if checkpoints.exists() and (out_dir / CHECKPOINTS).exists():
        for entry in checkpoints.iterdir():
            entry.rename(out_dir / CHECKPOINTS / entry.name)
        checkpoints.rmdir()
    for entry in target.iterdir():
        if entry.name not in ROWS:
            _remove(out_dir / entry.name)
            entry.rename(out_dir / entry.name)
    shutil.rmtree(target)
    if not any(target.parent.iterdir()):
        target.parent.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
