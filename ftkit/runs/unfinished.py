"""Runs that are not complete: what is saved of them, and the command that continues them."""

import shlex
from pathlib import Path

from ftkit.errors import UserError
from ftkit.recipe.recipe import Method
from ftkit.runs.directory import RunDirectory
from ftkit.runs.report.report import Report, read_report
from ftkit.utils.urls import display_path, local_path


class DamagedCheckpoint(UserError):
    """A checkpoint that cannot be continued from; says why, and what helps."""

    def __init__(self, checkpoint: Path, why: str, advice: str) -> None:
        super().__init__(f"{why} {advice}")
        self.checkpoint, self.why = checkpoint, why


def continue_command(out_dir: Path, method: Method, options: str = "--resume auto") -> str:
    """The command that continues the run in out_dir, or one with other options."""
    name = "finetune" if method == "lora" else "finetune_full"
    run = RunDirectory(out_dir)
    command = f"ftkit {name} --config {shlex.quote(display_path(run.recipe))} {options}"
    if not run.plugin.exists():
        return command
    return f"{command} --plugin {shlex.quote(display_path(run.plugin))}"


def exit_summary(
    out_dir: Path,
    method: Method,
    steps: int,
    remedy: str = "",
    diverged_from: int | None = None,
) -> str:
    """Summary of a run that ended before it was complete: what is saved, and how to continue.

    Args:
        out_dir: of the run.
        method: of the run.
        steps: optimizer steps done.
        remedy: options with which it is worth continuing; empty: none are needed, or none help.
        diverged_from: see `Report`.
    """
    store = RunDirectory(out_dir).store
    newest = max((step for step in store.steps() if step != diverged_from), default=None)
    stopped = f"stopped after step {steps:,}" if steps else "stopped before the first step"
    if newest is None and remedy:
        again = continue_command(out_dir, method, f"--overwrite {remedy}")
        return f"{stopped}; nothing to go on from was saved\nstart again with: {again}"
    if newest is None:
        return f"{stopped}; nothing was saved"
    saved = "saved to" if newest == steps else f"the newest checkpoint is of step {newest:,}:"
    separator = ", " if newest == steps else "; "
    return (
        f"{stopped}{separator}{saved} {display_path(store.path(newest))}\n"
        f"continue with: {continue_command(out_dir, method)}{remedy and f' {remedy}'}"
    )


def resumes_in_place(resume: bool | int | str, out_dir: Path) -> bool:
    """Return whether a run continues the one in its out_dir, rather than starting a new one.

    Args:
        resume: key of the recipe.
        out_dir: key of the recipe.
    """
    if not isinstance(resume, str) or resume == "auto":
        return resume is not False
    # Resolved, because a link may lead to the run in out_dir.
    path = local_path(resume).expanduser().resolve()
    run = RunDirectory(out_dir.expanduser().resolve())
    return path == run.path or path.is_relative_to(run.store.directory)


def follow_moved(resume: bool | int | str, out_dir: Path, file: Path) -> Path:
    """The out_dir of a recipe, or the directory where its run is now, if that was moved or copied.

    Args:
        resume: key of the recipe.
        out_dir: key of the recipe.
        file: it was read from.
    """
    run = RunDirectory(file.expanduser().resolve().parent)
    # A path in `resume` names its checkpoint, wherever the run is now.
    by_out_dir = resume == "auto" or not isinstance(resume, str)
    if resume is False or not by_out_dir or file.name != run.recipe.name:
        return out_dir
    if run.path == out_dir.expanduser().resolve() or run.store.newest() is None:
        return out_dir
    return run.path


def require_free(out_dir: Path, method: Method) -> None:
    """Refuse a new run in the place of one that is not complete and can be continued.

    Raises:
        UserError: there is such a run.
    """
    run = RunDirectory(out_dir)
    newest = run.store.newest()
    report = sound_report(run.report)
    # A run without a checkpoint cannot be continued, and a complete one has nothing left to do.
    if newest is None or (report is not None and report.outcome == "completed"):
        return
    raise UserError(
        f"out_dir {display_path(out_dir)} holds a run that stopped at step {newest:,} and can be "
        f"continued. Try {continue_command(out_dir, method)}, or replace it with --overwrite, or "
        "try another --out_dir."
    )


def sound_report(file: Path) -> Report | None:
    """The report in a file; None: there is none, or one that cannot be read."""
    try:
        return read_report(file)
    except UserError:
        return None
