"""Keys of data modules, optimizers and strategies: names, types, defaults and texts, for help."""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import docstring_parser

from ftkit.data.sources import KINDS
from ftkit.errors import UserError
from ftkit.recipe.command_options import field_texts
from ftkit.recipe.recipe_keys import ALLOWED_PACKAGES, COMPONENTS
from ftkit.recipe.strategies import RULES, STRATEGIES
from ftkit.utils.imports import quick_imports, silence_libraries
from ftkit.utils.names import nearest

KNOWN_WITHOUT_IMPORTS = (("data", "JSON"), ("strategy", "fsdp"), ("strategy", "deepspeed"))
"""Components and names whose keys are known before torch is loaded."""

_NOUNS = {"data": "no data module", "optimizer": "no optimizer", "strategy": "no strategy"}
_GIVEN_BY_FTKIT = ("self", "params", "args", "kwargs")
_SIGNATURE_DEFAULT = re.compile(r"[\s,;]*\(default: [^()]*(\([^()]*\))?[^()]*\)")


@dataclass(frozen=True, kw_only=True)
class ComponentKey:
    """A key of a class that recipes name, such as data.path."""

    name: str
    kind: Any
    default: Any
    required: bool
    text: str
    """"": nobody has written one."""


def component_names(component: str) -> list[str]:
    """What may stand for data, optimizer or strategy; optimizers outside torch with their paths."""
    if component == "data":
        return list(KINDS)
    if component == "strategy":
        return list(STRATEGIES)
    found = _optimizers("torch.optim")
    try:
        others = _optimizers("bitsandbytes.optim")
    except ImportError:
        others = {}
    return [*found, *(f"bitsandbytes.optim.{name}" for name in others)]


def component_keys(component: str, name: str) -> list[ComponentKey]:
    """The keys of a data module, an optimizer or a strategy.

    Args:
        component: data, optimizer or strategy.
        name: which one, as a recipe names it.

    Raises:
        UserError: there is none of this name.
    """
    if component == "strategy":
        rules = RULES.get("single" if name == "auto" else name)
        found = rules.options if rules else None
    elif component == "data":
        found = _data_module(name)
    else:
        found = _optimizer(name)
    if found is None:
        names = component_names(component)
        by_last = {known.rpartition(".")[2]: known for known in reversed(names)}  # torch's win
        close = nearest(name.rpartition(".")[2], by_last)
        advice = f"Try --{component}.help {by_last[close]}. " if close else ""
        raise UserError(
            f"--{component}.help is {name!r}, but {_NOUNS[component]} has this name. {advice}"
            f"--{component}.help alone lists the names."
        )
    return _keys_of(found)


def _data_module(name: str) -> type | None:
    name = name.removeprefix("litgpt.data.").removeprefix("ftkit.data.")
    return KINDS[name].documented(name) if name in KINDS else None


def _optimizer(name: str) -> type | None:
    package, _, name = name.rpartition(".")
    package = package or COMPONENTS["optimizer"]
    if package not in ALLOWED_PACKAGES["optimizer"]:
        return None
    try:
        return _optimizers(package).get(name)
    except ImportError as error:
        raise UserError(f"--optimizer.help {package}.{name} needs a package: {error}.") from None


def _optimizers(package: str) -> dict[str, type]:
    """The optimizers of a package by their names."""
    silence_libraries()
    with quick_imports():
        import torch

        module = importlib.import_module(package)
    return {
        name: found
        for name, found in sorted(vars(module).items())
        if isinstance(found, type)
        and issubclass(found, torch.optim.Optimizer)
        and found is not torch.optim.Optimizer
    }


def _keys_of(described: type) -> list[ComponentKey]:
    if dataclasses.is_dataclass(described):
        texts = field_texts(described)
    else:
        initialiser = cast(Any, described).__init__
        texts = _argument_texts(d.__doc__ for d in (described, initialiser) if d.__doc__)
    return [
        ComponentKey(
            name=parameter.name,
            kind=_kind_of(parameter),
            default=None if parameter.default is parameter.empty else parameter.default,
            required=parameter.default is parameter.empty,
            text=texts.get(parameter.name, ""),
        )
        for parameter in inspect.signature(described).parameters.values()
        if parameter.name not in _GIVEN_BY_FTKIT
    ]


def _kind_of(parameter: inspect.Parameter) -> Any:
    """Its type, if need be that of its default."""
    if parameter.annotation is not parameter.empty:
        return parameter.annotation
    if parameter.default in (None, parameter.empty):
        return Any
    if isinstance(parameter.default, tuple):
        return tuple[tuple(map(type, parameter.default))]  # type: ignore[misc]  # not a static type
    inferred = type(parameter.default)
    return float if inferred is int else inferred  # 0 stands for 0.9 too


def _argument_texts(docstrings: Iterable[str]) -> dict[str, str]:
    """What docstrings say of each argument, without its default."""
    found = {}
    for docstring in docstrings:
        for item in docstring_parser.parse(docstring).params:
            text = _SIGNATURE_DEFAULT.sub("", " ".join((item.description or "").split()))
            found[item.arg_name] = f"{text[:1].upper()}{text[1:].rstrip('.')}." if text else ""
    return found
