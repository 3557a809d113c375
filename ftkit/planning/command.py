"""`ftkit plan`: one recipe, several, variations of them, or the runs of a sweep."""

import dataclasses
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ftkit.errors import DoesNotFit, UserError
from ftkit.planning.gpus import find_gpu
from ftkit.recipe.options import PlanOptions
from ftkit.recipe.parsing import Override, sorted_words
from ftkit.recipe.recipe import FINETUNE
from ftkit.recipe.recipe_keys import LORA_KEYS
from ftkit.recipe.sweep import is_sweep, runs_of_file, variations
from ftkit.utils.console.display import Display
from ftkit.utils.imports import silence_libraries
from ftkit.utils.json_values import without_tokens
from ftkit.utils.progress import print_next
from ftkit.utils.yaml_files import STANDARD_INPUT

silence_libraries()  # before they are imported

from ftkit.planning.predict import Planned, plan_files  # noqa: E402
from ftkit.planning.suggest import Change, changes_that_fit, run_command  # noqa: E402
from ftkit.planning.table import show, show_changes  # noqa: E402


def plan_all(options: PlanOptions) -> int:
    """Plan every recipe in every variation, show the plans and return the exit code."""
    with Display(None, stream=sys.stderr) as display:
        asked = list(_plans(options, display))
    found = [one.planned for one in asked]
    changes: list[tuple[Change, str]] = []
    if not options.fit:
        show(found, options.format)
    elif found[0].gpu is None or len(found) != 1:
        raise UserError(
            "--fit is for one plan, and for devices whose memory is known. "
            "Try ftkit plan RECIPE.yaml --gpu a100-80gb --fit."
        )
    else:
        # With its verdict, before changes are tried, which takes a while.
        if options.format == "table":
            show(found, options.format)
            sys.stdout.flush()
        with Display(None, stream=sys.stderr) as display:
            changes = _changes(asked[0], options, display)
        show_changes(found[0], changes, options.format)
    if options.format == "table" and len(found) == 1 and not changes:
        _tell_next(found[0], options)
    return _exit_code(found)


def _tell_next(planned: Planned, options: PlanOptions) -> None:
    """Print the next command for one plan: run it, or search for changes that make it fit."""
    _, words = _command_and_words(options.words)
    recipes, keys = sorted_words(words, options.config, options.keys)
    files = list(map(Path, recipes))
    # Standard input cannot be read again, and several plans have no single next command.
    if STANDARD_INPUT in files or options.sweep or any(map(is_sweep, files)):
        return
    if planned.fits or planned.gpu is None:
        print_next(run_command(planned, recipes, keys, options.terms))
    elif not options.fit:
        # The same command line again, with --fit.
        again = [
            *options.words,
            *(word for file in options.config for word in ("--config", file)),
        ]
        again += [word for key, value in options.keys for word in (f"--{key}", value)]
        again += [] if options.gpu is None else ["--gpu", options.gpu]
        again += [] if options.plugin is None else ["--plugin", options.plugin]
        again += options.terms.words
        print_next(shlex.join(["ftkit", "plan", *without_tokens(again), "--fit"]))


@dataclass(frozen=True)
class _PlanOf:
    """A plan, and of what it is."""

    planned: Planned
    files: tuple[str, ...]
    given: list[Override]


def _plans(options: PlanOptions, display: Display) -> Iterator[_PlanOf]:
    """Plan every recipe in every variation."""
    device = None if options.gpu is None else find_gpu(options.gpu)
    command, words = _command_and_words(options.words)
    recipes, keys = sorted_words(words, options.config, options.keys)
    # Each recipe, or run of a sweep, in each variation of --sweep.
    asked = list(_asked(recipes, command))
    for recipe in asked:
        for variation in variations(options.sweep):
            varied = [f"{key.rpartition('.')[2]} {value}" for key, value in variation]
            given = [*recipe.overrides, *keys, *variation]
            name = ", ".join([*recipe.names, *varied])
            what = name or dict(given).get("checkpoint_dir", "it")
            plan = partial(
                plan_files,
                recipe.files,
                command=recipe.command,
                gpu=device,
                name=name,
                terms=options.terms,
            )
            title = f"predicting what {what} needs"
            try:
                planned = _shown(display, title, partial(plan, given))
            except UserError as error:
                if len(asked) == 1:
                    raise
                raise type(error)(f"{name}: {error}") from None
            yield _PlanOf(dataclasses.replace(planned, note=recipe.note), recipe.files, given)


def _changes(one: _PlanOf, options: PlanOptions, display: Display) -> list[tuple[Change, str]]:
    """The changes that make a plan fit, each with its command."""
    device = None if options.gpu is None else find_gpu(options.gpu)
    method = one.planned.plan.recipe.method

    def attempt(changed: Sequence[Override]) -> Planned:
        keys = " ".join(f"--{key} {value}" for key, value in changed)
        # A change may turn full fine-tuning into LoRA, and then needs that command.
        is_lora = method == "lora" or LORA_KEYS & dict(changed).keys()
        command = "finetune" if is_lora else "finetune_full"
        plan = partial(
            plan_files,
            one.files,
            [*one.given, *changed],
            command=command,
            gpu=device,
            terms=options.terms,
        )
        return _shown(display, f"trying {keys}", plan)

    return [
        (change, change.command(one.files, one.given, options.terms))
        for change in changes_that_fit(one.planned, attempt)
    ]


def _shown(display: Display, title: str, plan: Callable[[], Planned]) -> Planned:
    """Make a plan, and show a title meanwhile."""
    refused: UserError
    with display.phase(title, brief=True):
        try:
            return plan()
        except UserError as error:  # which says all there is to say
            refused = error
    # After the phase has ended, so that it leaves no line beside the message.
    raise refused


@dataclass(frozen=True)
class _Asked:
    """One recipe to plan, before it is varied."""

    names: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    overrides: tuple[Override, ...] = ()
    command: str | None = None
    """None: the keys of the recipe decide."""
    note: str | None = None
    """What the file of a sweep says about a run."""


def _command_and_words(words: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """The command that the first word names, and the other words; None: it names none."""
    is_named = bool(words) and words[0] in FINETUNE
    return (words[0], words[1:]) if is_named else (None, words)


def _asked(files: Sequence[str], command: str | None) -> Iterator[_Asked]:
    for file in files:
        if not is_sweep(Path(file)):
            is_named = Path(file) != STANDARD_INPUT
            yield _Asked((Path(file).stem,) if is_named else (), (file,), command=command)
            continue
        if command is not None:
            raise UserError(
                f"{file} is a sweep, whose runs name their commands. Leave {command} out: "
                f"try ftkit plan {file}."
            )
        for run in runs_of_file(Path(file), (), None):
            yield _Asked((run.name,), run.files, run.varied, run.command, run.note)
    if not files:
        yield _Asked(command=command)


def _exit_code(found: Sequence[Planned]) -> int:
    return DoesNotFit.exit_code if all(planned.fits is False for planned in found) else 0
