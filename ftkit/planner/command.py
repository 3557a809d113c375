"""`ftkit plan`: one recipe, several, variations of them, or the runs of a sweep."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ftkit.config.parsing import Override
from ftkit.config.recipe import FINETUNE, Method
from ftkit.config.sweep import is_sweep, runs_of_file, variations
from ftkit.errors import DoesNotFit, UserError
from ftkit.memory.gpus import find_gpu
from ftkit.planner.predict import Planned, plan_files
from ftkit.planner.suggest import changes_that_fit
from ftkit.planner.table import show, show_changes


def plan_all(
    files: Sequence[str],
    overrides: Sequence[Override],
    *,
    gpu: str | None,
    sweeps: Sequence[str],
    form: Literal["table", "json"],
    fit: bool,
) -> int:
    """Plan every recipe in every variation and show them; the exit code.

    Args:
        files: recipes, each a plan of its own, and sweeps, whose runs are.
        overrides: for all of them.
        gpu: name or size, see `find_gpu`.
        sweeps: see `variations`.
        form: of what is shown.
        fit: show changes that make a single plan fit.
    """
    device = None if gpu is None else find_gpu(gpu)
    found: list[Planned] = []
    given: list[Override] = []
    for recipe in _asked(files):
        for variation in variations(sweeps):
            varied = [f"{key.rpartition('.')[2]} {value}" for key, value in variation]
            given = [*recipe.overrides, *overrides, *variation]
            name = ", ".join([*recipe.names, *varied])
            found.append(
                plan_files(recipe.files, given, method=recipe.method, gpu=device, name=name)
            )
    if not fit:
        show(found, form)
        return _exit_code(found)
    if device is None or len(found) != 1:
        raise UserError(
            "--fit is for one plan and one GPU. Try ftkit plan RECIPE.yaml --gpu a100-80gb --fit."
        )
    method = recipe.method if recipe.method == "lora" else None  # a change may make it LoRA
    changes = changes_that_fit(
        found[0],
        lambda changed: plan_files(recipe.files, [*given, *changed], method=method, gpu=device),
    )
    show_changes(found[0], [(c, c.command(recipe.files, given)) for c in changes], form)
    return _exit_code(found)


@dataclass(frozen=True)
class _Asked:
    """What is to be planned, before it is varied."""

    names: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    overrides: tuple[Override, ...] = ()
    method: Method | None = None
    """None: the keys tell."""


def _asked(files: Sequence[str]) -> Iterator[_Asked]:
    for file in files:
        if is_sweep(Path(file)):
            for run in runs_of_file(Path(file), (), None):
                yield _Asked((run.name,), run.files, run.varied, FINETUNE[run.command])
        else:
            yield _Asked((Path(file).stem,), (file,))
    if not files:
        yield _Asked()


def _exit_code(found: Sequence[Planned]) -> int:
    return DoesNotFit.exit_code if all(planned.fits is False for planned in found) else 0
