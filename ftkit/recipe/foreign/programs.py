"""The programs whose files are read, and how a file of theirs becomes keys of a recipe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftkit.errors import UserError
from ftkit.recipe.foreign.axolotl import AXOLOTL
from ftkit.recipe.foreign.llama_factory import LLAMA_FACTORY
from ftkit.recipe.foreign.llama_factory_v1 import LLAMA_FACTORY_V1
from ftkit.recipe.foreign.table import Kind, Program, Row, Translation, translate
from ftkit.recipe.foreign.trl import TRL_DPO, TRL_KTO, TRL_REWARD, TRL_SFT

PROGRAMS = (TRL_SFT, TRL_DPO, TRL_KTO, TRL_REWARD, LLAMA_FACTORY, LLAMA_FACTORY_V1, AXOLOTL)
BY_SHORT_NAME = {program.short: program for program in PROGRAMS}


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


def programs_of(values: Mapping[Any, Any]) -> tuple[Program, ...]:
    """Programs whose file may have these keys.

    None: it is a recipe. Several: commands of one program, between which the file does not decide.
    """
    given = {key for key, value in values.items() if value is not None}
    found = [p for p in PROGRAMS if any(mark <= given for mark in p.marks)]
    rivals = [p for p in found if p is found[0] or (p.family and p.family == found[0].family)]
    if len(rivals) < 2:
        return tuple(rivals)
    known = {p.short: len(given & p.rows.keys()) for p in rivals}
    rivals = [p for p in rivals if known[p.short] == max(known.values())]
    possible = tuple(p for p in rivals if p.may_be(values))
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
    found = programs_of(values) if terms.tool is None else (BY_SHORT_NAME[terms.tool],)
    if not found:
        raise UserError(
            f"{file} is no file of {_listed([p.name for p in PROGRAMS])}: it has none of the keys "
            "by which these are known. If it is one, name the program: --tool axolotl."
        )
    if len(found) > 1:
        options = _listed([f"--tool {p.short}" for p in found])
        raise UserError(
            f"{file} is a file of {found[0].family}, but its keys do not say of which command: "
            f"{_listed([p.name for p in found])}. Add {options}."
        )
    (program,) = found
    translation = translate(program, values, file=file, without=terms.without, ranks=terms.devices)
    translation.check(file)
    return translation


def rows_named(key: str) -> list[tuple[Program, Row]]:
    """Rows of a key in the tables of all programs; those that say more come first."""
    order: Sequence[str] = ("ours", "not there", "no effect")
    found = [(program, program.rows[key]) for program in PROGRAMS if key in program.rows]
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
