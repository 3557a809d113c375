"""`ftkit plan`: one recipe, several, variations of them, or the runs of a sweep."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftkit.config.command_options import PlanOptions
from ftkit.config.parsing import Override
from ftkit.config.recipe import FINETUNE, Method
from ftkit.config.sweep import is_sweep, runs_of_file, variations
from ftkit.errors import DoesNotFit, UserError
from ftkit.memory.gpus import find_gpu
from ftkit.utils.imports import silence_libraries

silence_libraries()  # before they are imported

from ftkit.planner.predict import Planned, plan_files  # noqa: E402
from ftkit.planner.suggest import changes_that_fit  # noqa: E402
from ftkit.planner.table import show, show_changes  # noqa: E402


def plan_all(options: PlanOptions) -> int:
    """Plan every recipe in every variation and show them; the exit code."""
    device = None if options.gpu is None else find_gpu(options.gpu)
    found: list[Planned] = []
    given: list[Override] = []
    for recipe in _asked([*options.recipes, *options.config]):
        for variation in variations(options.sweep):
            varied = [f"{key.rpartition('.')[2]} {value}" for key, value in variation]
            given = [*recipe.overrides, *options.keys, *variation]
            name = ", ".join([*recipe.names, *varied])
            found.append(
                plan_files(recipe.files, given, method=recipe.method, gpu=device, name=name)
            )
    if not options.fit:
        show(found, options.format)
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
    show_changes(found[0], [(c, c.command(recipe.files, given)) for c in changes], options.format)
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
