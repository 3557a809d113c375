"""`ftkit checkpoints`: list, show, verify, clean up and compare the checkpoints of a run.

Results go to standard output, as a table or as JSON; progress goes to standard error. No command
changes a run that is still training.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ftkit.checkpoint import store as checks
from ftkit.checkpoint.metadata import RECIPE, CheckpointError, Layout, Metadata, read_metadata
from ftkit.checkpoint.store import KeepEvery, step_of
from ftkit.errors import UserError
from ftkit.recipe.options import (
    CheckpointOptions,
    CheckpointsOptions,
    CleanOptions,
    DiffOptions,
)
from ftkit.recipe.parsing import read_keys
from ftkit.redaction import REMOVED, is_secret, shown
from ftkit.runs.checkpoints import (
    CheckpointEntry,
    RunCheckpoints,
    entry_of,
    find,
    find_all,
    leftover,
    misnamed,
    size_of,
)
from ftkit.runs.lock import claimed, is_at_work
from ftkit.runs.url_runs import fetch_without_shards, url_checkpoints
from ftkit.utils.console.display import Display, Phase
from ftkit.utils.console.formatting import (
    age_text,
    bytes_text,
    duration_text,
    loss_text,
    number_text,
    shortened,
)
from ftkit.utils.console.terminal import labelled_grid
from ftkit.utils.files import remove
from ftkit.utils.json_values import for_json
from ftkit.utils.progress import print_shown
from ftkit.utils.urls import display_path

_ANY_WIDTH = 1000
"""More than a row takes."""
PROGRESS_AFTER_S = 2.0
"""Seconds after which verifying shows how far it is."""


def list_checkpoints(options: CheckpointsOptions) -> int:
    """Show the checkpoints of a run and the leftovers of crashes; return the exit code."""
    place = find_all(options.out_dir)
    at_work = is_at_work(place)
    entries = [entry_of(path) for path in place.directories()]
    entries += [leftover(path, at_work) for path in place.store.leftovers() if path.is_dir()]
    entries = [entry for entry in entries if entry.path.exists()]  # not deleted meanwhile
    # Leftovers without a step in their name come first.
    entries.sort(key=lambda entry: (entry.step if entry.step is not None else -1, entry.state))
    if options.format == "json":
        return _print_json([entry.as_dict() for entry in entries])
    if not entries:
        return _print(f"{display_path(options.out_dir)} holds no checkpoint")
    table = _table("step", "epoch", "loss", "val loss", "size", "age", "layout", "state")
    for entry in entries:
        table.add_row(*_cells(entry, time.time()))
    problems = (problem for entry in entries for problem in entry.problems)
    return _print(table, *problems)


def show_checkpoint(options: CheckpointOptions) -> int:
    """Show the metadata and the files of a checkpoint; return the exit code.

    Raises:
        UserError: there is no such checkpoint, or it has no metadata.
    """
    place = find(options.out_dir)
    entry = entry_of(place.chosen(options.step))
    if entry.metadata is None:
        raise UserError(
            f"{entry.problems[0]}\n"
            "It cannot be shown. List the others with ftkit checkpoints list "
            f"{place.store.directory}."
        )
    if options.format == "json":
        return _print_json(entry.as_dict())
    title = Rule(
        Text(shown(display_path(entry.path)), "bold"), characters="-", align="left", style="dim"
    )
    grid = labelled_grid(_rows(entry, entry.metadata))
    files = _table("file", "size", "sha256")
    for name, file in sorted(entry.metadata.files.items()):
        files.add_row(Text(shown(name)), bytes_text(file.size_bytes), file.sha256[:12])
    return _print(title, grid, "", files)


def verify_checkpoints(options: CheckpointOptions) -> int:
    """Compare every file with its checksum; return 1 if any checkpoint is damaged, else 0.

    Without a step all checkpoints of the run are checked.

    Raises:
        UserError: there is no such checkpoint.
    """
    place = find(options.out_dir)
    newest = place.chosen(options.step)
    directories = place.directories() if options.step is None else [newest]
    problems: dict[Path, list[str]] = {}
    with _Verifying(directories) as verifying:
        for directory in directories:
            # Its files may all match: a copy under the name of another step is wrong only in its
            # name.
            found = misnamed(directory) or checks.verify(directory, verifying.progress)
            verifying.next()
            if directory.exists():  # a running run may have deleted it meanwhile
                problems[directory] = found
    damaged = any(problems.values())
    if options.format == "json":
        return _print_json(
            [
                {
                    "step": step_of(directory.name),
                    "path": display_path(directory),
                    "sound": not found,
                    "problems": found,
                }
                for directory, found in problems.items()
            ],
            code=int(damaged),
        )
    lines = []
    for directory, found in problems.items():
        lines.append(f"{directory.name}  {'damaged' if found else 'intact'}")
        lines += [f"  {problem}" for problem in found]
    return _print(*lines, code=int(damaged))


def clean_checkpoints(options: CleanOptions) -> int:
    """Delete all but the newest checkpoints, and the leftovers of crashes; return the exit code.

    Checkpoints that the recipe keeps (keep_every, keep_best) and damaged ones stay.

    Raises:
        UserError: the run is running, or something cannot be deleted.
    """
    path, dry_run = options.out_dir.expanduser(), options.dry_run
    verb = "would remove" if dry_run else "removed"
    with ExitStack() as stack:
        # Claimed before the listing is read, so that no run starts there in between.
        at_url = stack.enter_context(url_checkpoints(path, print, hold=not dry_run))
        place = find_all(path)
        store = place.store
        stack.enter_context(claimed(place, hold=not dry_run))
        if not dry_run:
            # A crash while a checkpoint was replaced leaves the old one under another name.
            store.restore_replaced()
        every, best = _kept_for_good(place)
        # Cleaning follows the recipe of the run: what its owner keeps for good is not deleted by a
        # shorter --keep_last.
        rule = {"keep_every": every, "keep_best": best}
        kept = store.kept(options.keep_last, every, best)
        steps = store.steps()
        # Damaged ones are in `kept`; they are listed apart, with their problem.
        damaged = {step: found for step in steps if (found := store.check_files(step))}
        freed = 0

        def delete(step: int) -> None:
            if at_url is not None:
                at_url.delete(step)
            store.delete(step)

        removals: list[tuple[Path, int, Callable[[], object]]] = [
            *((path, size_of(path), partial(remove, path)) for path in store.leftovers()),
            *(
                (store.path(step), size_of(store.path(step)), partial(delete, step))
                for step in steps
                if step not in kept
            ),
        ]
        # Parts of checkpoints at the url alone: interrupted uploads.
        if at_url is not None:
            removals += [
                (store.directory / name, size, partial(at_url.delete_incomplete, name))
                for name, size in at_url.incomplete().items()
            ]
        for path, size, remove_one in removals:
            try:
                if not dry_run:
                    remove_one()
            except OSError as error:
                raise UserError(
                    f"{display_path(path)} cannot be removed ({error.strerror}). Check who owns it."
                ) from None
            freed += size
            print_shown(f"{verb} {path.name} ({bytes_text(size)})")
    for step, problems in damaged.items():
        print_shown(f"{store.path(step).name} is damaged and stays: {problems[0]}")
    print_shown(_cleaned_text(sorted(kept - damaged.keys()), freed, rule, dry_run))
    return 0


def compare_recipes(options: DiffOptions) -> int:
    """Show which keys differ between the recipes of two checkpoints; return the exit code.

    A run means its newest checkpoint.

    Raises:
        UserError: one has no recipe, or a damaged one.
    """
    directories = [find(path).chosen(None) for path in (options.a, options.b)]
    left, right = map(_recipe_of, directories)
    # In the order of the files, each key once.
    different = [key for key in dict.fromkeys([*left, *right]) if left.get(key) != right.get(key)]
    if options.format == "json":
        return _print_json(
            {
                "a": display_path(directories[0]),
                "b": display_path(directories[1]),
                "differences": [
                    {"key": key, "a": _shown(key, left), "b": _shown(key, right)}
                    for key in different
                ],
            }
        )
    heads = [f"{name}: {display_path(path)}" for name, path in zip("AB", directories, strict=True)]
    if not different:
        return _print(*heads, "their recipes are equal")
    table = _table("field", "A", "B")
    for key in different:
        values = (Text(shown(_value_text(_shown(key, recipe)))) for recipe in (left, right))
        table.add_row(Text(shown(key), "cyan"), *values)
    return _print(*heads, table)


class _Verifying:
    """Progress of verifying several checkpoints, shown if it takes long."""

    def __init__(self, directories: list[Path]) -> None:
        noun = "checkpoint" if len(directories) == 1 else "checkpoints"
        self._title = f"verifying {len(directories)} {noun}"
        self._total = sum(map(size_of, directories))
        self._before = self._now = 0
        self._start_s = time.monotonic()
        self._stack = ExitStack()
        self._phase: Phase | None = None

    def __enter__(self) -> "_Verifying":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def progress(self, done: int, total: int) -> None:
        """Set the verified and the total bytes of the current checkpoint."""
        self._now = total
        # No line flashes up where verifying takes a moment.
        if self._phase is None and time.monotonic() - self._start_s >= PROGRESS_AFTER_S:
            display = self._stack.enter_context(Display(None, stream=sys.stderr))
            self._phase = self._stack.enter_context(display.phase(self._title, brief=True))
        if self._phase:
            self._phase.advance(self._before + done, self._total)

    def next(self) -> None:
        """Start with the next checkpoint."""
        self._before += self._now
        self._now = 0


def _kept_for_good(place: RunCheckpoints) -> tuple[KeepEvery, int]:
    """keep_every and keep_best of the recorded recipe."""
    newest = place.store.newest()
    # The recipe in out_dir is the newest; that of a checkpoint is as old as the checkpoint.
    candidates = [run.recipe for run in place.runs]
    if newest is not None:
        candidates.append(place.store.path(newest) / RECIPE)
    recipe = next((read_keys(path) for path in candidates if path.is_file()), {})
    every, best = (recipe.get(f"checkpoint.{name}") for name in ("keep_every", "keep_best"))
    numbers = [n for pair in every.items() for n in pair] if isinstance(every, dict) else [every]
    for name, value, parts in (("keep_every", every, numbers), ("keep_best", best, [best])):
        # type(): isinstance would take true for a number.
        if any(part is not None and (type(part) is not int or part < 0) for part in parts):
            raise UserError(
                f"checkpoint.{name} in the recipe of {display_path(place.path)} is {value!r}, but "
                "must be a whole number. Correct its recipe.yaml, or delete checkpoints by hand."
            )
    return every, best or 0


def _recipe_of(directory: Path) -> dict[str, Any]:
    """The dotted keys of the recipe that a checkpoint records."""
    fetch_without_shards(directory)
    try:
        expected = read_metadata(directory).files.get(RECIPE)
    except CheckpointError as error:
        raise UserError(f"{error} Name another checkpoint.") from None
    if expected is None:
        raise UserError(f"{directory} records no recipe. Name another checkpoint.")
    if problem := checks.problem_of(directory, RECIPE, expected):
        raise UserError(f"{problem} Name another checkpoint.")
    return read_keys(directory / RECIPE)


def _shown(key: str, recipe: dict[str, Any]) -> Any:
    """A value of a recipe without the tokens and passwords that somebody may have written there."""
    value = recipe.get(key)
    return REMOVED if value is not None and is_secret(key) else for_json(value)


# --- Showing them ---------------------------------------------------------------------------------


def _cells(entry: CheckpointEntry, now_s: float) -> list[str | Text]:
    """The row of a checkpoint in the list."""
    known = entry.metadata
    style = {"complete": "green", "damaged": "bold red"}.get(entry.state, "yellow")
    return [
        "" if entry.step is None else f"{entry.step:,}",
        f"{known.epochs:.2f}" if known else "",
        loss_text(known.loss if known else None),
        loss_text(known.validation_loss if known else None),
        bytes_text(entry.size_bytes),
        age_text(now_s - entry.written_s),
        Text(shown(_layout_text(known.layout)) if known else ""),
        Text(entry.state, style),
    ]


_LABELS = {
    "carried": "report so far",
    "optimizer_scalars": "optimizer values",
    "rng": "random state",
    "training_s": "training time",
}
"""Labels of fields of the metadata whose names say too little."""


def _rows(entry: CheckpointEntry, metadata: Metadata) -> Iterator[tuple[str, str]]:
    """Labels and texts of the metadata, without the files."""
    yield "state", "\n".join([entry.state, *entry.problems])
    yield "size", bytes_text(entry.size_bytes)
    yield "written", f"{metadata.saved_at} ({age_text(time.time() - entry.written_s)} ago)"
    yield "strategy", _layout_text(metadata.layout)
    texts = {
        "samples": f"{metadata.samples:,}",
        "tokens": f"{metadata.tokens:,}",
        "step": f"{metadata.step:,} of {metadata.total_steps:,}",
        "epochs": f"{metadata.epochs:.2f}",
        "training_s": duration_text(metadata.training_s),
        "loss": loss_text(metadata.loss),
        "validation_loss": loss_text(metadata.validation_loss),
        "changes": "\n".join(metadata.changes),
    }
    for name, value in dataclasses.asdict(metadata).items():
        text = texts[name] if name in texts else _value_text(value)
        if text and name not in ("files", "saved_at", "total_steps"):
            yield _LABELS.get(name, name.replace("_", " ")), text


def _value_text(value: Any) -> str:
    """A value for people: nested ones shortened, empty entries of a dict left out."""
    if isinstance(value, dict):
        texts = {key: shortened(_value_text(item)) for key, item in value.items() if item != []}
        return ", ".join(f"{key} {text}" for key, text in texts.items() if text)
    # Before numbers: True is an int.
    if isinstance(value, bool | None):
        return {None: "not set", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return json.dumps(value, ensure_ascii=False)
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _layout_text(layout: Layout) -> str:
    """Strategy and ranks, such as `fsdp x2`."""
    return layout.strategy + (f" x{layout.world_size}" if layout.world_size > 1 else "")


def _cleaned_text(kept: list[int], freed: int, rule: dict[str, KeepEvery], dry_run: bool) -> str:
    """Summary of what was deleted and what stays."""
    verb = "would free" if dry_run else "freed"
    rules = " and ".join(f"{name} {value}" for name, value in rule.items() if value)
    reason = f" (the recipe has {rules})" if rules else ""
    steps = ", ".join(number_text(step) for step in kept) or "none"
    return f"{verb} {bytes_text(freed)}; kept: {steps}{reason}"


class _ByWidth(Table):
    """A table with narrower gaps where the terminal is narrow."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unlimited = options.update(max_width=_ANY_WIDTH)
        if Measurement.get(console, unlimited, self).maximum > options.max_width:
            self.padding = (0, 1, 0, 0)
        yield from super().__rich_console__(console, options)


def _table(*columns: str) -> Table:
    table = _ByWidth(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        numbers = column in ("step", "epoch", "loss", "val loss", "size", "age")
        table.add_column(column, justify="right" if numbers else "left", overflow="fold")
    return table


def _print(*parts: str | RenderableType, code: int = 0) -> int:
    """Print tables, and texts without wrapping, so that paths can be copied."""
    with Display(None) as display:
        for part in parts:
            if isinstance(part, str):
                # Not through rich, which would wrap it.
                print_shown(part)
            else:
                display.show(part)
    return code


def _print_json(value: object, code: int = 0) -> int:
    print(json.dumps(value, indent=2))
    return code
