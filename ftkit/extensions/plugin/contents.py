"""Finds what a plugin defines, in a process of its own.

`python -m ftkit.extensions.plugin.contents PARENT DESCRIPTOR SECONDS` reads a `Plugin` without
definitions from a file, executes it, and writes what it defines, or why it cannot be used, to that
file.
"""

import dataclasses
import faulthandler
import gc
import inspect
import json
import os
import signal
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

from ftkit.redaction import is_secret
from ftkit.utils.imports import prepare_imports, silence_libraries
from ftkit.utils.process import begin_as_child

if __name__ == "__main__":
    begin_as_child()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl+C, of which the parent tells
    gc.disable()  # as in quick_imports
    prepare_imports()
    silence_libraries()

import torch
from lightning.fabric.loggers.logger import Logger

from ftkit.data.source_rows import DATA_SOURCES
from ftkit.errors import UserError
from ftkit.extensions.plugin.definitions import Defined, Kind, OwnOption
from ftkit.objectives.objective import Objective
from ftkit.recipe.objectives import OBJECTIVES, ObjectiveRules
from ftkit.recipe.own_metric import METRIC_ARGUMENTS
from ftkit.recipe.plugin import Plugin
from ftkit.training.callbacks import Callback

_BASES: dict[type, Kind] = {
    Objective: "objective",
    Callback: "callback",
    torch.optim.Optimizer: "optimizer",
    Logger: "logger",
}
_WITH_OPTIONS: tuple[Kind, ...] = ("objective", "data", "callback")
_TYPE_NAMES = {bool: "bool", int: "int", float: "float", str: "str", types.NoneType: "None"}
_BUILT_IN = (dict, list, str, tuple)
"""Bases of classes with `__len__` and `__getitem__` that are not data sets."""


def definitions_in(plugin: Plugin) -> list[Defined]:
    """Execute a plugin and find what it defines.

    Raises:
        UserError: it fails, or defines nothing that ftkit uses.
    """
    module = plugin.module
    found = [
        defined
        for name, value in vars(module).items()
        # Not what it imports, and not what it keeps to itself.
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
        if (defined := _defined(name, value)) is not None
    ]
    if not found:
        raise UserError(
            f"{plugin.option} defines nothing that ftkit uses: no subclass of ftkit.Objective, "
            "ftkit.Callback, torch.optim.Optimizer or lightning's Logger, no data set with "
            f"__len__ and __getitem__, no metric of ({', '.join(METRIC_ARGUMENTS)}). Define one, "
            "whose name does not begin with _, or leave out --plugin."
        )
    for one in found:
        if (
            (one.kind == "optimizer" and hasattr(torch.optim, one.name))
            or (one.kind == "objective" and one.name in OBJECTIVES.names)
            or (one.kind == "data" and one.name in DATA_SOURCES.names)
        ):
            raise UserError(
                f"{plugin.option} defines {one.kind} {one.name}, but there is one of this name "
                "without it. Rename it."
            )
        if one.rules.get("scores"):
            raise UserError(
                f"{plugin.option}: {one.name} sets scores, but only ftkit's own objectives, such "
                "as reward and classify, train models that give scores or vectors. Remove scores."
            )
        if one.rules.get("needs_teacher") and one.rules.get("needs_reference"):
            raise UserError(
                f"{plugin.option}: {one.name} sets needs_teacher and needs_reference, but an "
                "objective has one other model at most. Remove one of them."
            )
        for option in one.options:
            if is_secret(option.name):
                raise UserError(
                    f"{plugin.option}: {one.name} has the option {option.name}, but options are "
                    "stored with the run, and tokens never are. Read it from the environment."
                )
        if one.kind == "callback" and any(option.required for option in one.options):
            raise UserError(
                f"{plugin.option}: {one.name} is made without arguments, but its __init__ needs "
                f"{', '.join(option.name for option in one.options if option.required)}. Give "
                "them defaults."
            )
    return found


def _defined(name: str, value: Any) -> Defined | None:
    """Describe a class or function; None: ftkit does not use it."""
    if inspect.isfunction(value):
        is_metric = tuple(inspect.signature(value).parameters)[:3] == METRIC_ARGUMENTS
        return Defined(name=name, kind="metric") if is_metric else None
    kind = _kind_of(value) if isinstance(value, type) else None
    if kind is None:
        return None
    rules = {}
    if kind == "objective":
        names = [field.name for field in dataclasses.fields(ObjectiveRules)]
        rules = {name: getattr(value, name) for name in names if hasattr(value, name)}
        # The head smooths labels: with an output of its own, the setting might have no effect and
        # nobody would know. Nor does anybody know what other sums need of a sequence.
        rules["is_smoothed"] = _inherits(value, "is_smoothed", "output")
        rules["shares_sequences"] = _inherits(value, "shares_sequences", "output", "sums")
        if rules.get("preference") == "pairs":
            rules["sequences"] = 2
    return Defined(
        name=name,
        kind=kind,
        options=tuple(_options_of(value)) if kind in _WITH_OPTIONS else (),
        rules=rules,
        missing=tuple(sorted(getattr(value, "__abstractmethods__", ()))),
    )


def _kind_of(value: type) -> Kind | None:
    for base, kind in _BASES.items():
        if issubclass(value, base):
            return kind
    is_sequence = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    return "data" if is_sequence and not issubclass(value, _BUILT_IN) else None


def _inherits(objective: type[Objective], rule: str, *methods: str) -> bool:
    """Whether a rule holds, which a class inherits only with these methods."""
    nearest = next(one for one in objective.__mro__ if {rule, *methods} & vars(one).keys())
    return bool(vars(nearest).get(rule))


def _options_of(value: type) -> Iterator[OwnOption]:
    """Arguments of a class that have a name."""
    if value.__init__ is object.__init__:  # type: ignore[misc]
        return
    signature = inspect.signature(value)
    try:
        hints = typing.get_type_hints(value.__init__)  # type: ignore[misc]
    except Exception:  # names that are imported for type checkers alone
        hints = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            continue
        kinds, choices = _accepted(hints.get(name, Any))
        required = parameter.default is parameter.empty
        default = None if required else parameter.default
        yield OwnOption(
            name=name,
            types=kinds,
            choices=choices,
            default=default if type(default) in _TYPE_NAMES else None,
            required=required,
        )


def _accepted(hint: Any) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Names of types and single values that an annotation accepts; both empty: any value."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds: list[str] = []
    choices: list[Any] = []
    for part in typing.get_args(hint) if is_union else (hint,):
        if typing.get_origin(part) is typing.Literal:
            choices += typing.get_args(part)
        elif part in _TYPE_NAMES:
            kinds.append(_TYPE_NAMES[part])
        else:
            return (), ()
    return tuple(kinds), tuple(choices)


def _contents(values: dict[str, Any]) -> dict[str, Any]:
    try:
        found = definitions_in(Plugin.from_json(values))
    except UserError as error:
        return {"error": str(error)}
    return {"definitions": [one.to_json() for one in found]}


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[1]), "r+b") as _exchange:
        _exchange.seek(0)
        _given = json.loads(_exchange.read())
        # The kernel ends this process, whatever it is doing, and before that the place is written
        # behind what was given.
        faulthandler.register(signal.SIGALRM, _exchange, all_threads=False, chain=True)
        signal.setitimer(signal.ITIMER_REAL, float(sys.argv[2]))
        _answer = json.dumps(_contents(_given)).encode()
        _exchange.seek(0)
        _exchange.truncate()
        _exchange.write(_answer)
    # Threads that it has left may never end.
    os._exit(0)
