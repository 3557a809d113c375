"""`ftkit plan`: one recipe, several, or variations of them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from ftkit.errors import UserError
from ftkit.fit import changes_that_fit
from ftkit.memory.gpus import find_gpu
from ftkit.parsing import Override
from ftkit.plan_table import show, show_changes
from ftkit.prediction import Planned, plan
from ftkit.variations import variations

EXIT_DOES_NOT_FIT = 3


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
        files: recipes, each a plan of its own.
        overrides: for all of them.
        gpu: name or size, see `find_gpu`.
        sweeps: see `variations`.
        form: of what is shown.
        fit: show changes that make a single plan fit.
    """
    device = None if gpu is None else find_gpu(gpu)
    found: list[Planned] = []
    for recipe in [[file] for file in files] or [[]]:
        for variation in variations(sweeps):
            names = [Path(file).stem for file in recipe]
            names += [f"{key.rpartition('.')[2]} {value}" for key, value in variation]
            found.append(
                plan(
                    recipe,
                    [*overrides, *variation],
                    gpu=device,
                    name=", ".join(names),
                )
            )
    if not fit:
        show(found, form)
        return _exit_code(found)
    if device is None or len(found) != 1:
        raise UserError(
            "--fit is for one plan and one GPU. Try ftkit plan RECIPE.yaml --gpu a100-80gb --fit."
        )
    changes = changes_that_fit(
        found[0],
        lambda changed: plan(files[:1], [*overrides, *changed], gpu=device),
    )
    show_changes(found[0], [(c, c.command(files, overrides)) for c in changes], form)
    return _exit_code(found)


def _exit_code(found: Sequence[Planned]) -> int:
    return EXIT_DOES_NOT_FIT if all(planned.fits is False for planned in found) else 0
