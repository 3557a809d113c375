"""Keys of recipes: names, types, allowed classes, and their words in messages and help."""

import dataclasses
import functools
import shlex
import types
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import yaml

from ftkit.errors import UserError
from ftkit.recipe.key_types import Kind, Range
from ftkit.recipe.optimizers import OPTIMIZERS
from ftkit.recipe.plugin import own_name
from ftkit.recipe.readers import foreign_key
from ftkit.recipe.recipe import Component, Lora, LoraRecipe, Method, Recipe
from ftkit.recipe.recipe_sections import recipe_type
from ftkit.utils.names import leaves, nearest
from ftkit.utils.urls import display_path

COMPONENTS = {
    "data": "litgpt.data",
    "objective": "",
    "optimizer": "torch.optim",
    "peft": "",
    "strategy": "",
}
"""Fields that name a class, with the package of short names."""

OF_DATA = ("litgpt.data", "ftkit.data")
"""Packages of class paths of data, beside which those of optimizers are rows. A recipe never makes
ftkit import anything else."""

ONE_OF = {"data": ("path", "json_path", "sources")}
"""Arguments with one meaning: the one that is set later replaces the others."""

MAPPINGS = ("checkpoint.keep_every", "eval.sets")
"""Keys whose value may be a mapping, and not a group of keys."""

SPELLINGS = {"quantize": {"bnb.int8-training": "bnb.int8"}}
"""Values of LitGPT that have another name here."""

OTHER_WORDS = {
    "ema": "train.ema_decay",
    "lr": "optimizer.lr",
    "model": "checkpoint_dir",
    "model_name": "checkpoint_dir",
}
"""Usual names of keys that no table of another program has, with ours."""

USUAL = {
    "checkpoint.max_staged_bytes": "1073741824",
    "eval.patience": "3",
    "train.ema_decay": "0.999",
    "train.neftune_noise_alpha": "5",
}
"""Values of keys that are empty by default, where not any number would do."""

_PRETRAINING = "LitGPT's pretraining"
FOREIGN_RECIPES = (
    ("torchtune", {"tokenizer", "model", "checkpointer"}),
    (_PRETRAINING, {"model_name", "initial_checkpoint_dir"}),
    (_PRETRAINING, {"model_name", "tokenizer_dir"}),
    (_PRETRAINING, {"model_config", "tokenizer_dir"}),
)
"""Programs, with keys that only their recipes have."""

OF_COMMANDS = {
    "plugin": "names a file that is executed, so it is only an option of commands. Remove it, and "
    "add --plugin FILE.py to the command",
    "metric": "names a file that is executed, so it is only an option of ftkit finetune, "
    "finetune_lora, finetune_full and evaluate. Remove it, and add --metric FILE.py:FUNCTION to "
    "the command",
    "trust_task_code": "says which code may run, so it is only an option of ftkit finetune, "
    "finetune_lora, finetune_full and evaluate. Remove it, and add --trust_task_code DIR to the "
    "command",
}
"""Options that a recipe cannot set, with the reason."""

TEXTS_OF_DATA = frozenset(
    {
        *("path", "json_path", "subset", "split", "revision", "data_files", "chat_template"),
        *("download_dir", "file_url", "file_name", "repo_id", "subsets", "url", "access_token"),
        *("data_path", "pack_impl", "text_key", "val_path"),
    }
)
"""Options of data whose values are texts or paths, whatever YAML would make of them."""

LORA_KEYS = {field.name for field in dataclasses.fields(Lora)}


@functools.cache
def key_groups() -> frozenset[str]:
    """Return the keys of a recipe that hold keys: train, eval."""
    fields = dataclasses.fields(recipe_type("full"))
    return frozenset(f.name for f in fields if dataclasses.is_dataclass(f.type))


def key_types(method: Method) -> dict[str, Any]:
    """Dotted keys of a recipe with their types."""
    return {key: field_type(field) for key, field in key_fields(recipe_type(method))}


def field_type(field: "dataclasses.Field[Any]") -> Any:
    """Type of the values of a field; where they name rows of a registry, a Literal of the names."""
    kind: Any = field.type
    if typing.get_origin(kind) is typing.Annotated:  # with its class on resume, in recipes
        kind = kind.__origin__
    if (names := field.metadata.get("names")) is None:
        return kind
    name: Any = Literal.__getitem__(tuple(names()))
    is_list = list[str] in accepted_types(kind)
    return name | types.GenericAlias(list, (name,)) if is_list else name


def kind_on_resume(field: "dataclasses.Field[Any]") -> Kind:
    """Whether a resumed run may change a field."""
    kind: Kind = typing.cast(Any, field.type).__metadata__[0]
    return kind


def range_of(field: "dataclasses.Field[Any]") -> Range | None:
    """The numbers that a field may have; None: any of its type."""
    found = typing.cast(Any, field.type).__metadata__[1:]
    return found[0] if found else None


def check_names(recipe: Recipe) -> None:
    """Refuse names that are not those of rows of a registry.

    Raises:
        UserError: suggests one.
    """
    for field in dataclasses.fields(recipe):
        if (names := field.metadata.get("names")) is None:
            continue
        value = getattr(recipe, field.name)
        named = value if isinstance(value, list) else [value]
        if not set(named) <= set(names()):
            method: Method = "lora" if isinstance(recipe, LoraRecipe) else "full"
            raise UserError(
                f"{field.name} is {shown_value(value)}, but must be "
                f"{describe(field_type(field))}. "
                f"Try --{field.name} {example_of(field.name, method, value)}."
            )


def key_fields(
    recipe_class: type, prefix: str = ""
) -> Iterator[tuple[str, "dataclasses.Field[Any]"]]:
    """Yield the dotted keys of a recipe with their fields."""
    for field in dataclasses.fields(recipe_class):
        if dataclasses.is_dataclass(field.type):
            yield from key_fields(typing.cast(type, field.type), f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", field


def is_text(key: str) -> bool:
    """Return whether the value of a key is a text or a path, also if it looks like a number."""
    *groups, name = key.replace(".init_args.", ".").split(".")
    if groups == ["data"] or (groups[:2] == ["eval", "sets"] and len(groups) == 3):
        return name in TEXTS_OF_DATA
    if groups == ["eval", "sets"]:  # a set in short: its path
        return True
    if groups[-1:] == ["columns"]:
        return groups[0] in ("data", "eval")
    return all(kind in (str, Path) for kind in accepted_types(key_types("lora").get(key)))


def accepted_types(kind: Any) -> list[Any]:
    """Types that a key accepts, without None; a Literal is one type."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [k for k in typing.get_args(kind) if k is not types.NoneType]
    return [kind]


def describe(kind: Any) -> str:
    """Describe a type: 'a whole number', 'true or false', 'one of: auto, cpu, cuda'."""
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        return f"one of: {', '.join(map(str, choices))}" if len(choices) > 1 else repr(choices[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(describe(k) for k in accepted_types(kind))
    if typing.get_origin(kind) is list:
        return f"a list of {'them' if _is_choice(typing.get_args(kind)[0]) else 'names'}"
    if typing.get_origin(kind) is dict:
        is_named = typing.get_args(kind)[0] is str
        return "names with a file each" if is_named else "a mapping of whole numbers"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(kind, "a path" if kind is Path else "a name, or class_path with init_args")


def _is_choice(kind: Any) -> bool:
    return typing.get_origin(kind) is Literal


@functools.cache
def field_texts(documented: type) -> dict[str, str]:
    """Strings below the fields of a class and its ancestors, each on one line."""
    import docstring_parser

    found: dict[str, str] = {}
    for ancestor in reversed(documented.__mro__[:-1]):
        for item in docstring_parser.parse_from_object(ancestor).params:
            found[item.arg_name] = " ".join((item.description or "").split())
    return found


def placeholder_of(kind: Any) -> str:
    """Placeholder for a value of this type in help: {auto,cpu,cuda}, NUMBER, PATH."""
    words = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH", bool: "{true,false}"}
    words[tuple] = "[NUMBER,...]"  # betas of optimizers without annotations
    found = []
    for accepted in accepted_types(kind):
        origin, parts = typing.get_origin(accepted), typing.get_args(accepted)
        if origin is Literal:
            choices = [str(choice) for choice in parts]
            found.append(f"{{{','.join(choices)}}}" if len(choices) > 1 else choices[0])
        elif origin is list:
            names = parts[0] is str or _is_choice(parts[0])
            found.append("[NAME,...]" if names else f"[{placeholder_of(parts[0])},...]")
        elif origin is dict:
            found.append("{KEY:VALUE,...}")
        elif origin is tuple:
            found.append(f"[{','.join(map(placeholder_of, parts))}]")
        elif accepted in words:
            found.append(words[accepted])
    return "|".join(found) or "NAME"


def check_keys(merged: dict[str, Any], method: Method) -> None:
    """Refuse keys that a recipe of this method does not have.

    Raises:
        UserError: suggests a key.
    """
    known = key_types(method)
    for program, telling in FOREIGN_RECIPES:
        if telling <= merged.keys():
            raise UserError(
                f"This is a recipe of {program}: {' and '.join(sorted(telling))} are not keys of "
                "ftkit, which reads recipes in LitGPT's format for fine-tuning: base model, data "
                "and settings have other names there. Try ftkit finetune CHECKPOINT_DIR --data "
                "JSON --data.path FILE --print_config, and edit what it prints."
            )
    for key, _ in flatten(merged):
        if key in known:
            continue
        if key in LORA_KEYS:
            others = sorted(LORA_KEYS & merged.keys() - {key})
            more = f"; remove {', '.join(others)} with it" * bool(others)
            raise UserError(
                f"{key} does not belong to full fine-tuning: it is a key of LoRA. Use ftkit "
                f"finetune instead of ftkit finetune_full, or remove the key{more}."
            )
        if reason := OF_COMMANDS.get(key.rpartition(".")[2]):
            raise UserError(f"{key} is not a key of a recipe: it {reason}.")
        raise UserError(f"{key} is not a key of a recipe.{_meant(key, known)}")


def _meant(key: str, known: Iterable[str]) -> str:
    names = list(known)
    last_name = key.rpartition(".")[2]
    by_last = {name.rpartition(".")[2]: name for name in names}
    if last_name in OTHER_WORDS:
        return f" Did you mean {OTHER_WORDS[last_name]}?"
    words = None if last_name in by_last else foreign_key(last_name)
    # A word without an effect may also be one of ours, mistyped by a letter: --device.
    if words and (words.kind != "no effect" or not nearest(key, names, cutoff=0.85)):
        return f" {words.text}"
    longer = [name for name in names if name.startswith(f"{key}_")]
    close = min(longer, key=len) if longer else nearest(key, names)
    if not close:
        last = nearest(last_name, by_last)
        close = by_last[last] if last else None
    return f" Did you mean {close}?" if close else " See ftkit finetune --help for all keys."


def check_component(field: str, component: Component | None) -> None:
    """Refuse a class from a package that recipes may not name.

    Raises:
        UserError: lists the allowed packages.
    """
    if component is None or field not in ("data", "optimizer"):
        return
    class_path = component["class_path"]
    if own_name(class_path) is not None:  # known where it is made: a recipe alone executes nothing
        return
    package, _, name = class_path.rpartition(".")
    is_data = field == "data"
    allowed = OF_DATA if is_data else OPTIMIZERS.names
    if package not in allowed or not name.isidentifier():
        file = class_path.removeprefix(f"{COMPONENTS[field]}.")
        if is_data and ("/" in file or Path(file).exists()):
            raise UserError(
                f"--data is {file}, but must be a kind of data; files and data sets on the hub "
                f"are given as --data.path. Try --data JSON --data.path {shlex.quote(file)}."
            )
        raise UserError(
            f"{field}.class_path is {class_path!r}, but recipes may only name classes "
            f"of {' or '.join(allowed)}. Try --{field} {default_name(field)}, or --plugin FILE.py "
            "for one of your own."
        )


def default_class(field: str) -> str:
    """Default class path of data, optimizer or strategy."""
    (default,) = [f.default_factory for f in dataclasses.fields(LoraRecipe) if f.name == field]
    assert callable(default)
    return str(default()["class_path"])


def default_name(field: str) -> str:
    """Name of the default class of data, optimizer or strategy."""
    return default_class(field).rpartition(".")[2]


def example_of(key: str, method: Method, wrong: Any = None) -> str:
    """A value that the key accepts: the most similar choice, or the default."""
    field = dict(key_fields(recipe_type(method)))[key]
    accepted = accepted_types(field_type(field))
    literals = [kind for kind in accepted if typing.get_origin(kind) is Literal]
    choices = [str(c) for kind in literals for c in typing.get_args(kind)]
    if isinstance(wrong, list) and choices:
        meant = [nearest(str(item), choices, cutoff=0.3) or choices[0] for item in wrong]
        return shlex.quote(f"[{', '.join(dict.fromkeys(meant))}]")
    if close := nearest(str(wrong), choices, cutoff=0.3):
        return close
    if accepted == [str]:
        return shlex.quote(str(wrong))
    if accepted == [dict[str, Any]]:
        return "'{code: code.jsonl}'"
    if field.default is not None:
        return yaml.safe_dump(plain(field.default)).partition("\n")[0]
    if choices:
        return choices[0]
    examples = {int: "100", float: "1.0", bool: "true"}
    return USUAL.get(key) or examples.get(accepted[0], "[lm_head]")


def shown_value(value: Any) -> str:
    """A value as it is written in recipes."""
    if value is None:
        return "empty"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def plain(value: Any) -> Any:
    """Convert a value to plain types for YAML and JSON."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return display_path(value) if isinstance(value, Path) else value


def flatten(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves by dotted keys; components and mappings stay whole."""
    return leaves(values, prefix, whole={*COMPONENTS, *MAPPINGS})
