"""The programs whose files are read, and how a file of theirs becomes keys of a recipe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftkit.errors import UserError
from ftkit.recipe.foreign.axolotl import AXOLOTL
from ftkit.recipe.foreign.llama_factory import LLAMA_FACTORY
from ftkit.recipe.foreign.llama_factory_v1 import LLAMA_FACTORY_V1
from ftkit.recipe.foreign.table import Kind, Program, Row, Translation, translate
from ftkit.recipe.foreign.trl import TRL_DPO, TRL_SFT

# Those with more marks come first: a file of trl dpo has all that one of trl sft has.
PROGRAMS = (TRL_DPO, TRL_SFT, LLAMA_FACTORY, LLAMA_FACTORY_V1, AXOLOTL)
BY_SHORT_NAME = {program.short: program for program in PROGRAMS}


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a command says about the files of other programs that it reads."""

    without: tuple[str, ...] = ()
    """Keys whose difference is accepted."""
    devices: int = 1
    """Devices that trained with such a file, which multiply its batch of one device."""

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
        return [*(word for key in self.without for word in ("--without", key)), *devices]


NO_TERMS = Terms()


def program_of(values: Mapping[str, Any]) -> Program | None:
    """Return the program whose file has these keys; None: it is a recipe."""
    given = {key for key, value in values.items() if value is not None}
    return next((p for p in PROGRAMS if any(mark <= given for mark in p.marks)), None)


def translated(
    values: Mapping[str, Any],
    file: str,
    *,
    terms: Terms,
    program: Program | None = None,
) -> Translation:
    """Translate the keys and values of a file of another program.

    Args:
        values: its content.
        file: its name, for messages.
        terms: of the command.
        program: whose file it is; None: known by its keys.

    Raises:
        UserError: none of these programs reads the file, or ftkit would learn something else.
    """
    found = program or program_of(values)
    if found is None:
        raise UserError(
            f"{file} is no file of {_listed([p.name for p in PROGRAMS])}: it has none of the keys "
            "by which these are known. If it is one, name the program: --tool axolotl."
        )
    translation = translate(found, values, file=file, without=terms.without, ranks=terms.devices)
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
