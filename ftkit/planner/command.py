"""`ftkit plan`: one recipe, several, variations of them, or the runs of a sweep."""

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ftkit.config.command_options import PlanOptions
from ftkit.config.parsing import Override, sorted_words
from ftkit.config.recipe import FINETUNE, Method
from ftkit.config.sweep import is_sweep, runs_of_file, variations
from ftkit.console.display import Display
from ftkit.errors import DoesNotFit, UserError
from ftkit.memory.gpus import find_gpu
from ftkit.utils.imports import silence_libraries
from ftkit.utils.progress import print_next
from ftkit.utils.yaml_files import STANDARD_INPUT

silence_libraries()  # before they are imported

from ftkit.planner.predict import Planned, plan_files  # noqa: E402
from ftkit.planner.suggest import Change, changes_that_fit, run_command  # noqa: E402
from ftkit.planner.table import show, show_changes  # noqa: E402


def plan_all(options: PlanOptions) -> int:
    """Plan every recipe in every variation and show them; the exit code."""
    with Display(None, stream=sys.stderr) as display:
        found, changes = _plan_and_fit(options, display)
    if changes is None:
        show(found, options.format)
    else:
        show_changes(found[0], changes, options.format)
    if options.format == "table" and len(found) == 1 and found[0].gpu is not None and not changes:
        _tell_next(found[0], options)
    return _exit_code(found)


def _tell_next(planned: Planned, options: PlanOptions) -> None:
    """What to do about one plan on a GPU: run it, or look for what makes it fit."""
    recipes, keys = sorted_words(options.recipes, options.config, options.keys)
    files = list(map(Path, recipes))
    if STANDARD_INPUT in files or options.sweep or any(map(is_sweep, files)):
        return
    if planned.fits:
        print_next(run_command(planned, recipes, keys))
    elif not options.fit:
        words = [
            *options.recipes,
            *(word for file in options.config for word in ("--config", file)),
        ]
        words += [word for key, value in options.keys for word in (f"--{key}", value)]
        print_next(shlex.join(["ftkit", "plan", *words, "--gpu", str(options.gpu), "--fit"]))


def _plan_and_fit(
    options: PlanOptions, display: Display
) -> tuple[list[Planned], list[tuple[Change, str]] | None]:
    """The plans, and with --fit what makes the one fit, each with its command line."""
    device = None if options.gpu is None else find_gpu(options.gpu)
    found: list[Planned] = []
    given: list[Override] = []
    recipes, keys = sorted_words(options.recipes, options.config, options.keys)
    for recipe in _asked(recipes):
        for variation in variations(options.sweep):
            varied = [f"{key.rpartition('.')[2]} {value}" for key, value in variation]
            given = [*recipe.overrides, *keys, *variation]
            name = ", ".join([*recipe.names, *varied])
            what = name or dict(given).get("checkpoint_dir", "it")
            plan = partial(plan_files, recipe.files, method=recipe.method, gpu=device, name=name)
            title = f"predicting what {what} needs"
            found.append(_shown(display, title, partial(plan, given)))
    if not options.fit:
        return found, None
    if device is None or len(found) != 1:
        raise UserError(
            "--fit is for one plan and one GPU. Try ftkit plan RECIPE.yaml --gpu a100-80gb --fit."
        )
    method = recipe.method if recipe.method == "lora" else None  # a change may make it LoRA

    def attempt(changed: Sequence[Override]) -> Planned:
        keys = " ".join(f"--{key} {value}" for key, value in changed)
        plan = partial(plan_files, recipe.files, [*given, *changed], method=method, gpu=device)
        return _shown(display, f"trying {keys}", plan)

    changes = changes_that_fit(found[0], attempt)
    return found, [(change, change.command(recipe.files, given)) for change in changes]


def _shown(display: Display, title: str, plan: Callable[[], Planned]) -> Planned:
    """A plan, shown while it is made."""
    refused: UserError
    with display.phase(title, brief=True):
        try:
            return plan()
        except UserError as error:  # which says all there is to say
            refused = error
    raise refused


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
            is_named = Path(file) != STANDARD_INPUT
            yield _Asked((Path(file).stem,) if is_named else (), (file,))
    if not files:
        yield _Asked()


def _exit_code(found: Sequence[Planned]) -> int:
    return DoesNotFit.exit_code if all(planned.fits is False for planned in found) else 0
