"""Sweeps: named variations over recipes, from a file or from the command line."""

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.recipe.parsing import Override, as_text, read_recipe
from ftkit.recipe.peft_adapter import with_adapter
from ftkit.recipe.plugin import plugin_in_use
from ftkit.recipe.recipe import FINETUNE, Recipe
from ftkit.utils.embedded import recipe_file
from ftkit.utils.yaml_files import load_yaml

_NAME = re.compile(r"[\w+=-][\w.,+=-]*")
"""Allowed names of a run, and of its directory."""
_EXAMPLE = (
    "runs:\n  - {name: small, command: finetune, config: recipe.yaml, train.micro_batch_size: 1}"
)
OF_THE_SWEEP = ("out_dir", "resume")
"""Keys of a recipe that the sweep sets itself."""


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """One run of a sweep."""

    name: str
    """Also the name of its directory."""
    command: str
    """finetune, finetune_lora or finetune_full."""
    files: tuple[str, ...]
    """Recipes, later ones win."""
    varied: tuple[Override, ...]
    """Keys that this run varies."""
    overrides: tuple[Override, ...]
    """Keys of all runs; they win over varied ones."""
    out_dir: Path
    """Its directory."""
    note: str | None = None
    """What its file says about it, for people."""

    @property
    def words(self) -> list[str]:
        """Words of its command line, without --resume and --overwrite."""
        return [
            self.command,
            # With = in one word: a value may begin with a dash.
            *(f"--config={file}" for file in self.files),
            *(f"--{key}={value}" for key, value in (*self.varied, *self.overrides)),
            f"--out_dir={self.out_dir}",
            *([] if (plugin := plugin_in_use()) is None else [f"--plugin={plugin.file}"]),
        ]

    @property
    def varied_text(self) -> str:
        """The varied keys, for people."""
        return ", ".join(f"{key} {value}" for key, value in self.varied)

    def recipe(self) -> Recipe:
        """Read the recipe of the run.

        Raises:
            UserError: names the run.
        """
        # Later ones win.
        overrides = [*self.varied, *self.overrides, ("out_dir", str(self.out_dir))]
        try:
            return with_adapter(read_recipe(self.files, overrides, method=FINETUNE[self.command]))
        except UserError as error:
            raise UserError(f"{self.name}: {error}") from None


def is_sweep(file: Path) -> bool:
    """Return whether a YAML file is a sweep, which lists runs, and not a recipe.

    Raises:
        UserError: it cannot be read.
    """
    return "runs" in load_yaml(file)


def runs_of_file(file: Path, overrides: Sequence[Override], out_dir: Path | None) -> list[SweepRun]:
    """Read the runs of a SWEEP.yaml.

    Args:
        file: has `runs`, a list of mappings with `name`, `command`, `config` (beside the file),
            optionally `note`, and keys of recipes; and may have `out_dir`.
        overrides: for all runs.
        out_dir: where the runs go, each into a directory of its name; None: as the file says, or
            out/sweeps/NAME of the file.

    Raises:
        UserError: it is not such a file.
    """
    content = load_yaml(file)
    for key in content.keys() - {"out_dir", "runs"}:
        raise UserError(
            f"{file} has the key {key!r}; a sweep has only out_dir and runs. A key of all runs is "
            f"an option, --{key} VALUE; one of a single run belongs to it. {_try()}"
        )
    listed = content.get("runs")
    if not isinstance(listed, list) or not listed:
        raise UserError(f"{file} must hold a list of runs. {_try()}")
    where = content.get("out_dir") or f"out/sweeps/{file.stem}"
    out_dir = out_dir or Path(str(where))
    return [_run_of(file, item, overrides, out_dir) for item in listed]


def _run_of(file: Path, item: Any, overrides: Sequence[Override], out_dir: Path) -> SweepRun:
    if not isinstance(item, dict):
        raise UserError(f"{file}: {item!r} is not a run with a name and a command. {_try()}")
    keys = dict(item)
    of_run = ("name", "command", "config", "note")
    name, command, config, note = (keys.pop(key, None) for key in of_run)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UserError(
            f"{file}: the name of a run is {name!r}, but must be letters, digits and .,+=-_ "
            f"(it is the name of its directory). {_try()}"
        )
    if command not in FINETUNE:
        raise UserError(
            f"{file}: the command of {name} is {command!r}, but must be one of "
            f"{', '.join(FINETUNE)}. {_try()}"
        )
    if note is not None and not isinstance(note, str):
        raise UserError(f"{file}: the note of {name} is {note!r}, but must be a text. {_try()}")
    for key in (key for key in OF_THE_SWEEP if key in keys):
        raise UserError(f"{file}: {name} has the key {key}, which the sweep sets. Remove it.")
    configs = [config] if isinstance(config, str) else config or []
    # Recipes are named relative to the sweep, which may be run from anywhere.
    folder = recipe_file(file).parent
    return SweepRun(
        name=name,
        command=command,
        files=tuple(os.path.normpath(folder / path) for path in configs),
        varied=tuple((str(key), as_text(value, str(key))) for key, value in keys.items()),
        overrides=tuple(overrides),
        out_dir=out_dir / name,
        note=note,
    )


def _try() -> str:
    return f"Try\n{_EXAMPLE}"


_CLOSING = {"[": "]", "{": "}", '"': '"', "'": "'"}


def variations(sweeps: Sequence[str]) -> list[tuple[Override, ...]]:
    """Every combination of the values in texts such as `key=a,b,c`; without texts, an empty one.

    A comma inside brackets or quotes belongs to its value: `lora_targets=[q_proj,v_proj],[o_proj]`.

    Raises:
        UserError: a text is not of this form, or a key or a value is named twice.
    """
    choices: dict[str, list[Override]] = {}
    for sweep in sweeps:
        key, equals, text = sweep.removeprefix("--").partition("=")
        values = list(_split(text))
        if not (equals and key and all(values)):
            raise UserError(
                f"--sweep is {sweep!r}, but must be a key and its values. "
                "Try --sweep train.micro_batch_size=1,2,4."
            )
        if key in choices:
            together = ",".join([*(value for _, value in choices[key]), *values])
            raise UserError(
                f"--sweep names {key} twice, but takes all its values at once. "
                f"Try --sweep {key}={together}."
            )
        if len(set(values)) < len(values):
            once = ",".join(dict.fromkeys(values))
            raise UserError(
                f"--sweep is {sweep!r}, but must name each value once. Try --sweep {key}={once}."
            )
        choices[key] = [(key, value) for value in values]
    return list(itertools.product(*choices.values()))


def _split(text: str) -> Iterator[str]:
    """Split at commas outside of brackets and quotes."""
    part = ""
    open_: list[str] = []
    for letter in text:
        if open_ and letter == open_[-1]:
            open_.pop()
        # Brackets inside quotes are text.
        elif letter in _CLOSING and (not open_ or open_[-1] not in "\"'"):
            open_.append(_CLOSING[letter])
        if letter == "," and not open_:
            yield part.strip()
            part = ""
        else:
            part += letter
    yield part.strip()
