"""Classes and functions that a plugin defines: their options are checked without torch."""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import NoneType
from typing import Any, Literal, Union

from ftkit.errors import UserError
from ftkit.recipe.plugin import Plugin
from ftkit.utils.json_values import from_json
from ftkit.utils.names import nearest
from ftkit.utils.own_code import line_in

Kind = Literal["objective", "optimizer", "data", "callback", "metric", "logger"]
_TYPES: dict[str, type] = {"bool": bool, "int": int, "float": float, "str": str, "None": NoneType}


@dataclass(frozen=True, kw_only=True)
class OwnOption:
    """An option of a class: an argument of its `__init__`."""

    name: str
    types: tuple[str, ...] = ()
    """Names of types that it accepts; empty: any value."""
    choices: tuple[Any, ...] = ()
    """Values that it accepts besides."""
    default: Any = None
    required: bool = False
    """Whether it has no default."""

    @property
    def annotation(self) -> Any:
        """Its type."""
        kinds = [_TYPES[name] for name in self.types]
        if self.choices:
            kinds.append(Literal[self.choices])  # type: ignore[arg-type]
        return Union[tuple(kinds)] if kinds else Any  # noqa: UP007  # of types known at run time

    def check(self, value: Any, key: str) -> None:
        """Refuse a value of another type.

        Raises:
            UserError: it is not accepted.
        """
        # Types themselves, not subclasses: in Python, true is an int.
        kinds = {_TYPES[name] for name in self.types}
        if float in kinds:
            kinds.add(int)
        if not (self.types or self.choices) or type(value) in kinds or value in self.choices:
            return
        words = {"bool": "true or false", "int": "a whole number", "float": "a number"}
        words |= {"str": "text", "None": "empty"}
        wanted = [words[name] for name in self.types]
        if self.choices:
            wanted.append(f"one of: {', '.join(map(str, self.choices))}")
        example = self.choices[0] if self.choices else self.default
        advice = "Give another value." if example is None else f"Try --{key} {example}."
        raise UserError(f"{key} is {value!r}, but must be {' or '.join(wanted)}. {advice}")


@dataclass(frozen=True, kw_only=True)
class Defined:
    """A class or function that a plugin defines, and ftkit uses."""

    name: str
    kind: Kind
    options: tuple[OwnOption, ...] = ()
    rules: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of an objective: its `ftkit.recipe.objectives.ObjectiveRules`, but for the options."""
    missing: tuple[str, ...] = ()
    """Methods that it has to define and does not."""

    @cached_property
    def options_class(self) -> type:
        """A dataclass of its options."""
        fields: list[Any] = []
        for option in sorted(self.options, key=lambda one: not one.required):
            default = () if option.required else (dataclasses.field(default=option.default),)
            fields.append((option.name, option.annotation, *default))
        return dataclasses.make_dataclass(self.name, fields, frozen=True, kw_only=True)

    def check_options(self, given: Mapping[str, Any], beside: tuple[str, ...] = ()) -> None:
        """Check options that a recipe gives.

        Args:
            given: by name.
            beside: options of the same component that are not of this class.

        Raises:
            UserError: one is unknown, missing, or of another type.
        """
        known = {option.name: option for option in self.options}
        for name, value in given.items():
            if name in beside:
                continue
            if name not in known:
                near = nearest(name, (*known, *beside))
                has = f"It takes {', '.join(known)}." if known else "It takes none; remove it."
                advice = f"Did you mean {self.kind}.{near}?" if near else has
                raise UserError(f"{self.kind}.{name} is not an option of {self.name}. {advice}")
            known[name].check(value, f"{self.kind}.{name}")
        for option in self.options:
            if option.required and option.name not in given:
                raise UserError(
                    f"{self.kind}.{option.name} is missing: {self.name} needs it. "
                    f"Try --{self.kind}.{option.name} VALUE."
                )

    def to_json(self) -> dict[str, Any]:
        """Plain values, as a plugin holds them."""
        found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return found


def definitions_of(plugin: Plugin, kind: Kind) -> list[Defined]:
    """Return the classes and functions of a kind that a plugin defines."""
    found: tuple[Defined, ...] = from_json(tuple[Defined, ...], list(plugin.definitions))
    return [one for one in found if one.kind == kind]


def make(plugin: Plugin, defined: Defined, /, *arguments: Any, **options: Any) -> Any:
    """Make an object of one of the classes of a plugin.

    Raises:
        UserError: it lacks a method, or does not take the arguments.
    """
    plugin.check(defined.kind, defined.name)
    try:
        return getattr(plugin.module, defined.name)(*arguments, **options)
    except UserError:
        raise
    except Exception as error:  # of any kind: it is the user's code
        line = line_in(error, plugin.file)
        where = f" (line {line})" if line else ""
        raise UserError(
            f"{plugin.option}: {defined.name} cannot be made: {type(error).__name__}: {error}"
            f"{where}. Correct it, or its options."
        ) from error
