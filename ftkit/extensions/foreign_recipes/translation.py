"""The table of a program's keys: what each becomes, and how a file is translated with it.

A table is data: messages, `ftkit convert`, words on the command line and docs/coming-from.md are
made from it. What several keys decide together is a function of the program's module, which the
rows of these keys name in words.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ftkit.errors import UserError
from ftkit.extensions.foreign_recipes.value_types import Accepts, typed
from ftkit.recipe.readers import Kind
from ftkit.redaction import is_secret
from ftkit.utils.json_values import value_text
from ftkit.utils.names import nearest
from ftkit.utils.urls import is_url

OFF = (None, False, 0, "", "no", "none", "null", "false", "off")
"""Values by which a file says that it does not use something."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A key of another program."""

    key: str
    kind: Kind
    accepts: Accepts = "any"
    """Type of its value, see the module `value_types`; of a key that becomes ours."""
    ours: tuple[str, ...] = ()
    """Keys of ours that it decides, alone or with others."""
    default: Any = None
    """What the program does without it."""
    note: str = ""
    """How it becomes ours, why it has no effect here, or what ftkit does not have."""
    value: Callable[[Any], Any] | None = None
    """Our value, if this key alone decides one of ours; None: the function of the program does."""
    harmless: tuple[Any, ...] = OFF
    """Values of a key that is not there with which nothing is missing."""


def same(
    key: str, accepts: Accepts, ours: str, default: Any, note: str = "", *, value: Any = None
) -> Row:
    """A key that alone decides one of ours."""

    def unchanged(given: Any) -> Any:
        return given

    row = part(key, accepts, ours, default, note)
    return dataclasses.replace(row, value=value or unchanged)


def part(key: str, accepts: Accepts, ours: str | tuple[str, ...], default: Any, note: str) -> Row:
    """A key that decides ours together with others."""
    keys = (ours,) if isinstance(ours, str) else ours
    return Row(key=key, kind="ours", accepts=accepts, ours=keys, default=default, note=note)


def idle(note: str, *keys: str) -> list[Row]:
    """Keys without an effect here."""
    return [Row(key=key, kind="no effect", note=note) for key in keys]


def missing(note: str, *keys: str, harmless: tuple[Any, ...] = ()) -> list[Row]:
    """Keys that change what is learned, and have no equal here."""
    off = (*OFF, *harmless)
    return [Row(key=key, kind="not there", note=note, harmless=off) for key in keys]


@dataclass(frozen=True)
class Refused:
    """A key of a file that has no equal here."""

    key: str
    value: Any
    why: str
    """What is missing, as a noun: the capability by which refusals are counted."""


@dataclass(kw_only=True)
class Reading:
    """A file while it is translated."""

    rows: Mapping[str, Row]
    values: Mapping[str, Any]
    """Those of the file that are not empty, of the types of their rows."""
    without: frozenset[str]
    ranks: int
    """Devices that train, which multiply the batch of one."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """Our keys, dotted, with their values; None: written out as empty."""
    refused: list[Refused] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)
    """Differences that remain, and which the file cannot say away."""

    def __getitem__(self, key: str) -> Any:
        """Value of a key, or what the program does without it."""
        return self.values.get(key, self.rows[key].default)

    def has(self, key: str) -> bool:
        """Return whether the file gives a key a value."""
        return key in self.values

    def set(self, **keys: Any) -> None:
        """Set keys of ours that are not None; dots are written as two underscores."""
        given = {key: value for key, value in keys.items() if value is not None}
        self.recipe.update({key.replace("__", "."): value for key, value in given.items()})

    def empty(self, key: str) -> None:
        """Set a key of ours to nothing, where its default is something."""
        self.recipe[key] = None

    def refuse(self, key: str, why: str) -> None:
        """Refuse the value of a key, unless the difference was accepted by its name."""
        if key.partition(".")[0] not in self.without and key not in self.without:
            self.refused.append(Refused(key, self.values.get(key.partition(".")[0]), why))

    def tell(self, difference: str) -> None:
        """Tell a difference that remains, once."""
        if difference not in self.differs:
            self.differs.append(difference)


@dataclass(frozen=True, kw_only=True)
class Program:
    """Another program, as far as its training files are concerned."""

    name: str
    """Its name for people."""
    rows: Mapping[str, Row]
    finish: Callable[[Reading], None]
    """Decides what several keys decide together."""
    may_be: Callable[[Mapping[str, Any]], bool] = lambda values: True
    """Whether the values, or the data that they name, may be those of this command."""
    covers: tuple[str, ...] = ()
    """Beginnings of keys that its files may have without a row, because another key decides."""

    def translate(
        self, values: Mapping[Any, Any], *, file: str, without: Iterable[str], ranks: int
    ) -> "Translation":
        """See `ftkit.recipe.readers.Program.translate`."""
        return translate(self, values, file=file, without=without, ranks=ranks)


@dataclass(frozen=True, kw_only=True)
class Translation:
    """A file of another program as a recipe, and the rows of its keys."""

    program: Program
    recipe: dict[str, Any]
    """Dotted keys of ours, those of the program's defaults included; None: empty."""
    became: tuple[tuple[str, Any, Row], ...]
    """Keys of the file with their values and rows."""
    accepted: tuple[str, ...]
    """Keys whose difference was accepted."""
    differs: tuple[str, ...]
    refused: tuple[Refused, ...]

    def told(self, file: str, batch: str) -> list[str]:
        """See `ftkit.recipe.readers.Translation.told`."""
        kinds = [row.kind for _, _, row in self.became]
        first = (
            f"{file} is a file of {self.program.name}: {kinds.count('ours')} of its keys became "
            f"ours, {kinds.count('no effect')} have no effect here. ftkit convert {file} explains "
            "each."
        )
        return [
            first,
            f"{file}: {batch}",
            *(f"{file} differs here: {difference}." for difference in self.differs),
        ]

    def check(self, file: str) -> None:
        """See `ftkit.recipe.readers.Translation.check`."""
        if not self.refused:
            return
        lines = [
            f"  {one.key}: {value_text(one.value, one.key)}: {one.why}"
            + _instead(one.key) * is_secret(one.key, one.value)
            for one in self.refused
        ]
        heads = dict.fromkeys(refused.key.partition(".")[0] for refused in self.refused)
        options = " ".join(f"--without {key}" for key in heads)
        raise UserError(
            f"{file} is a file of {self.program.name}, and ftkit would learn something else:\n"
            + "\n".join(lines)
            + f"\nChange the file, or accept what is different: {options}."
        )


def translate(
    program: Program,
    values: Mapping[Any, Any],
    *,
    file: str,
    without: Iterable[str] = (),
    ranks: int = 1,
) -> Translation:
    """Translate a file of a program; see `ftkit.recipe.readers.Program.translate`."""
    accepted = frozenset(without)
    given = {str(key): value for key, value in values.items()}
    for key in accepted - given.keys():
        close = nearest(key, list(given))
        hint = f" Did you mean {close}?" if close else ""
        raise UserError(f"--without names {key}, which the file does not have.{hint}")
    types = {row.key: row.accepts for row in program.rows.values()}
    read = typed(given, types, f"{file}, a file of {program.name},")
    reading = Reading(rows=program.rows, values=read, without=accepted, ranks=ranks)
    became = []
    for key, value in given.items():
        if value is not None and is_secret(key, value):
            reading.tell(f"{key}: the secret is neither used nor written{_instead(key)}")
        row = program.rows.get(key)
        if row is not None:
            became.append((key, value, row))
            if row.kind == "not there" and not _is_in(value, row.harmless):
                reading.refuse(key, row.note)
        elif value is not None and not key.startswith(program.covers or "\0"):
            reading.refuse(key, f"a key that ftkit does not know of {program.name}")
    for row in program.rows.values():
        if row.kind == "ours" and row.value is not None:
            theirs = reading[row.key]
            if theirs is not None:
                reading.recipe[row.ours[0]] = row.value(theirs)
    program.finish(reading)
    if is_url(str(reading.recipe.get("out_dir", ""))):  # copies would leave this machine
        reading.recipe.pop("out_dir")
        reading.tell("output_dir: results go to a url only if the command line says so: --out_dir")
    return Translation(
        program=program,
        recipe=reading.recipe,
        became=tuple(became),
        accepted=tuple(sorted(accepted)),
        differs=tuple(reading.differs),
        refused=tuple({(one.key, one.why): one for one in reading.refused}.values()),
    )


def _instead(key: str) -> str:
    """From where ftkit reads what a secret of a file is for."""
    found = next((name for words, name in _VARIABLES if re.search(words, key, re.IGNORECASE)), None)
    return "" if found is None else f"; ftkit reads ${found} from the environment"


_VARIABLES = (
    ("wandb", "WANDB_API_KEY"),
    ("mlflow", "MLFLOW_TRACKING_TOKEN"),
    ("(^|_)(hf|hub|huggingface|access|auth)(_|$)", "HF_TOKEN"),
)
"""Variables of the environment by the keys of secrets, as regular expressions."""


def rows_by_key(*groups: Row | Iterable[Row]) -> dict[str, Row]:
    """Rows by their keys; a later row replaces an earlier one."""
    found: dict[str, Row] = {}
    for group in groups:
        for row in [group] if isinstance(group, Row) else group:
            found[row.key] = row
    return found


def _is_in(value: Any, values: tuple[Any, ...]) -> bool:
    if isinstance(value, list | dict):
        return not value
    return any(value == other and isinstance(value, bool) == isinstance(other, bool)
               for other in values)  # fmt: skip
