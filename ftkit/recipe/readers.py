"""Training files of other programs: which program reads a file, and the recipe that it becomes."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ftkit.errors import UserError
from ftkit.utils.registry import Registry, imported

Kind = Literal["ours", "no effect", "not there"]
"""What a key of another program is here."""


class Row(Protocol):
    """A key of another program."""

    @property
    def key(self) -> str:
        """Its name."""

    @property
    def accepts(self) -> Any:
        """Type of its value, as its program writes types."""

    @property
    def kind(self) -> Kind:
        """What it is here."""

    @property
    def ours(self) -> tuple[str, ...]:
        """Keys of ours that it decides, alone or with others."""

    @property
    def note(self) -> str:
        """How it becomes ours, why it has no effect here, or what ftkit does not have."""


class Translation(Protocol):
    """A file of another program as a recipe."""

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Dotted keys of ours, those of the program's defaults included; None: empty."""

    def told(self, file: str, batch: str) -> list[str]:
        """Return what is said of it, in sentences.

        Args:
            file: its name.
            batch: what a step takes, in a sentence.
        """

    def check(self, file: str) -> None:
        """Refuse the file if it changes what is learned in a way that has no equal here.

        Raises:
            UserError: names every such key, and how to accept the difference.
        """


class Program(Protocol):
    """Another program, as far as its training files are concerned."""

    @property
    def name(self) -> str:
        """Its name for people."""

    @property
    def rows(self) -> Mapping[str, Row]:
        """Its keys."""

    @property
    def may_be(self) -> Callable[[Mapping[str, Any]], bool]:
        """Whether the values, or the data that they name, may be those of this command."""

    def translate(
        self, values: Mapping[Any, Any], *, file: str, without: Iterable[str], ranks: int
    ) -> Translation:
        """Translate a file of it.

        Args:
            values: its keys and values.
            file: its name, for messages.
            without: keys whose difference is accepted.
            ranks: devices that train.

        Raises:
            UserError: a value has another type than its row, or `without` names a key that the file
                does not have.
        """


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A program whose training files can be recipes."""

    name: str
    """Its name as a value of --tool."""
    marks: tuple[frozenset[str], ...]
    """Sets of keys; a file that has all keys of one is one of its files."""
    program: str
    """MODULE:NAME of its `Program`, which is imported when such a file is read."""
    family: str = ""
    """The program of which this is a command, if its commands share their keys."""

    @functools.cached_property
    def opened(self) -> Program:
        """Its table of keys."""
        found: Program = imported(self.program)
        return found


READERS: Registry[Reader] = Registry("recipe_readers", (Reader,), core=())
"""Programs by name. Those of other packages read a file only where --tool names them: to know by
its keys whose file it is, all of them would have to be imported for every recipe."""


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a command says about the files of other programs that it reads."""

    without: tuple[str, ...] = ()
    """Keys whose difference is accepted."""
    devices: int = 1
    """Devices that trained with such a file, which multiply its batch of one device."""
    tool: str | None = None
    """Short name of the program whose file it is; None: known by its keys."""

    @property
    def batch_text(self) -> str:
        """What a step takes, in a sentence: the file has the batch of one device."""
        there = "1 device" if self.devices == 1 else f"{self.devices} devices"
        hint = "" if self.devices > 1 else " If it was used on more, add --from_devices N."
        return f"A step takes as many samples as on {there} there, on any devices here.{hint}"

    @property
    def words(self) -> list[str]:
        """Options of a command line that say the same."""
        devices = [] if self.devices == 1 else ["--from_devices", str(self.devices)]
        tool = [] if self.tool is None else ["--tool", self.tool]
        return [*(word for key in self.without for word in ("--without", key)), *devices, *tool]


NO_TERMS = Terms()


def readers_of(values: Mapping[Any, Any]) -> tuple[Reader, ...]:
    """Programs whose file may have these keys.

    None: it is a recipe. Several: commands of one program, between which the file does not decide.
    """
    given = {key for key, value in values.items() if value is not None}
    found = [r for r in READERS if any(mark <= given for mark in r.marks)]
    rivals = [r for r in found if r is found[0] or (r.family and r.family == found[0].family)]
    if len(rivals) < 2:
        return tuple(rivals)
    known = {r.name: len(given & r.opened.rows.keys()) for r in rivals}
    rivals = [r for r in rivals if known[r.name] == max(known.values())]
    possible = tuple(r for r in rivals if r.opened.may_be(values))
    return possible or tuple(rivals)


def translated(values: Mapping[Any, Any], file: str, *, terms: Terms) -> Translation:
    """Translate the keys and values of a file of another program.

    Args:
        values: its content.
        file: its name, for messages.
        terms: of the command.

    Raises:
        UserError: none of these programs reads the file, it does not say of which command it is, or
            ftkit would learn something else.
    """
    if terms.tool is None:
        found = readers_of(values)
    elif (named := READERS.get(terms.tool)) is not None:
        found = (named,)
    else:
        raise UserError(
            f"--tool is {terms.tool}, but nothing that is installed reads files of this program. "
            "ftkit extensions lists what is installed."
        )
    if not found:
        programs = ", ".join(reader.opened.name for reader in READERS)
        raise UserError(
            f"{file} is not recognised: it has no keys that only files of one of these programs "
            f"have: {programs}. Name its program, such as --tool axolotl."
        )
    if len(found) > 1:
        options = _listed([f"--tool {r.name}" for r in found])
        raise UserError(
            f"{file} is a file of {found[0].family}, but its keys do not say of which command: "
            f"{_listed([r.opened.name for r in found])}. Add {options}."
        )
    (reader,) = found
    translation = reader.opened.translate(
        values, file=file, without=terms.without, ranks=terms.devices
    )
    translation.check(file)
    return translation


def rows_named(key: str) -> list[tuple[Program, Row]]:
    """Rows of a key in the tables of all programs; those that say more come first."""
    order: Sequence[str] = ("ours", "not there", "no effect")
    programs = [reader.opened for reader in READERS]
    found = [(program, program.rows[key]) for program in programs if key in program.rows]
    return sorted(found, key=lambda item: (order.index(item[1].kind), not item[1].note))


@dataclass(frozen=True)
class ForeignKey:
    """What a key of another program is here."""

    kind: Kind
    text: str
    """In sentences."""


def foreign_key(key: str) -> ForeignKey | None:
    """Say what a key of another program is here; None: no table has it."""
    rows = rows_named(key)
    if not rows:
        return None
    program, row = rows[0]
    if row.kind == "ours":
        note = f" ({program.name}'s {key}: {row.note})" if row.note else ""
        text = f"Did you mean {' or '.join(row.ours[:2])}?{note}"
    elif row.kind == "no effect":
        text = f"It has no effect here: {row.note}. Leave it out."
    else:
        text = f"{program.name} has it, but ftkit does not have {row.note}. Leave it out."
    return ForeignKey(row.kind, text)


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}"
