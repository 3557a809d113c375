"""Parsing of recipes: YAML files and dotted overrides, read into a checked Recipe.

The merge happens on plain nested dicts before anything is typed, so that the order of options
does not matter, an override of ``data.path`` lands inside ``data.init_args``, and a
``class_path`` is compared with the allow-list before any code could see it.
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
import shlex
import sys
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ftkit.errors import UserError
from ftkit.recipe.lora_layers import NAMED_LAYERS, names_layers
from ftkit.recipe.plugin import own_path
from ftkit.recipe.readers import (
    NO_TERMS,
    Terms,
    readers_of,
    translated,
)
from ftkit.recipe.recipe import Component, Lora, Method, Recipe
from ftkit.recipe.recipe_keys import (
    COMPONENTS,
    LORA_KEYS,
    MAPPINGS,
    ONE_OF,
    SPELLINGS,
    check_component,
    check_keys,
    check_names,
    default_class,
    default_name,
    describe,
    example_of,
    flatten,
    is_text,
    key_groups,
    key_types,
    plain,
    shown_value,
)
from ftkit.recipe.recipe_sections import recipe_type, sections
from ftkit.utils.json_values import for_json, without_secrets
from ftkit.utils.names import leaves
from ftkit.utils.progress import print_notice
from ftkit.utils.url_files import url_files
from ftkit.utils.urls import is_url, local_path
from ftkit.utils.yaml_files import dump_yaml, load_yaml, parse_yaml

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

PROMPT_MARK = "{instruction}"
"""What distinguishes a prompt template from the name of a prompt style."""
TEMPLATE_MARKS = ("{{", "{%")
"""A chat template that has one of these is its own text, and no name or file."""
EXCLUSIVE = (
    ("train.global_batch_size", "train.global_batch_tokens"),
    ("train.lr_warmup_steps", "train.lr_warmup_fraction", "train.lr_warmup_run_fraction"),
    ("train.save_interval", "train.save_interval_epochs"),
    ("eval.interval", "eval.interval_epochs"),
)
"""Keys with one meaning: the one that is set later replaces the others."""

_DATA_ENDINGS = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt", ".arrow")
"""Endings of data files, which no base model has."""

Override = tuple[str, str]


def read_recipe(
    files: Iterable[str | Path],
    overrides: Sequence[Override] = (),
    *,
    method: Method | None = None,
    terms: Terms = NO_TERMS,
) -> Recipe:
    """Merge recipe files (later ones win) and overrides, which win over files, into a Recipe.

    Args:
        files: YAML recipes in LitGPT's finetune format, or files of the programs of
            `ftkit.recipe.readers`, which are translated; paths or urls.
        overrides: dotted key and YAML text, such as ``("train.epochs", "2")``. Their order
            matters only where one key is given twice: the last one wins.
        method: of the command; None: read from the keys (any LoRA key means LoRA). A file of
            another program says itself that it trains all parameters.
        terms: of the command for such files.

    Raises:
        UserError: unreadable file, unknown key, value of the wrong type, a class that recipes
            may not name, or a file with which ftkit would learn something else.
    """
    merged: dict[str, Any] = {}
    is_foreign = False
    for place, file in enumerate(files):
        path = local_path(file)
        if is_url(file):
            # The file may have changed since it was fetched.
            path.unlink(missing_ok=True)
            url_files(path).fetch_missing(path.parent, [path.name])
        values = load_yaml(path, "--config ")
        is_named = terms.tool is not None and place == 0  # further files may be recipes
        if not is_named and not readers_of(values):
            for key, value in flatten(values):
                _assign(merged, key, value)
            continue
        translation = translated(values, str(file), terms=terms)
        for text in translation.told(str(file), terms.batch_text):
            _say_once(text)
        is_foreign = True
        for key, value in translation.recipe.items():
            _assign(merged, key, value)
    if terms != NO_TERMS and not is_foreign:
        raise UserError(
            f"{' '.join(terms.words[:2])} is for a file of another program, but there is "
            "none among the recipes. Leave it out."
        )
    if is_foreign and method == "lora" and not LORA_KEYS & merged.keys():
        method = None
    return _overridden(merged, overrides, method)


def recipe_of_keys(keys: Mapping[str, Any]) -> Recipe:
    """Make a recipe of dotted keys with their values; the keys say the method.

    Raises:
        UserError: see `read_recipe`.
    """
    merged: dict[str, Any] = {}
    for key, value in keys.items():
        _assign(merged, key, value)
    return _overridden(merged, (), None)


@functools.cache
def _say_once(text: str) -> None:
    """A notice that is not repeated where a recipe is read several times."""
    print_notice(text, sys.stderr)  # standard output may hold a recipe or JSON


def sorted_words(
    words: Sequence[str], config: Sequence[str], keys: Sequence[Override]
) -> tuple[list[str], list[Override]]:
    """Sort words into recipe files and the base model, which joins the keys.

    Raises:
        UserError: there is more than one base model, or a word names a file of data.
    """
    recipes: list[str] = []
    overrides = list(keys)
    for text in words:
        if Path(text).suffix in (".yaml", ".yml"):
            recipes.append(text)
        elif _is_data(Path(text)):
            raise UserError(
                f"{text!r} is a file of data, but a word on its own is a recipe or the base model. "
                f"Try --data JSON --data.path {shlex.quote(text)}, with the base model before it."
            )
        elif "checkpoint_dir" in dict(overrides):
            raise UserError(
                f"{text!r} is one base model too many: there is "
                f"{dict(overrides)['checkpoint_dir']!r} already. Recipes end in .yaml, options "
                "begin with --."
            )
        else:
            overrides.append(("checkpoint_dir", text))
    # --config comes last, so its files win.
    return [*recipes, *config], overrides


def _is_data(path: Path) -> bool:
    """Return whether a word names a file of data by its ending, compressed or not."""
    endings = [suffix.lower() for suffix in path.suffixes[-2:]]
    if endings and endings[-1] in (".gz", ".zst"):
        endings.pop()
    return bool(endings) and endings[-1] in _DATA_ENDINGS


def with_overrides(recipe: Recipe, overrides: Sequence[Override]) -> Recipe:
    """Return a recipe with some keys overridden, as `read_recipe` does it.

    Raises:
        UserError: unknown key, value of the wrong type, or a class that recipes may not name.
    """
    merged: dict[str, Any] = {}
    for key, value in flatten(plain(dataclasses.asdict(recipe))):
        _assign(merged, key, value)
    return _overridden(merged, overrides, recipe.method)


def _overridden(
    merged: dict[str, Any], overrides: Sequence[Override], method: Method | None
) -> Recipe:
    # A class first: it would drop the arguments that were set before it.
    for key, text in sorted(overrides, key=_specificity):
        _assign(merged, key, _parse_value(key, text))
    if method is None:
        method = "lora" if LORA_KEYS & merged.keys() else "full"
    check_keys(merged, method)
    # Class paths are compared with the allowed packages before anything could import them.
    for name in COMPONENTS:
        check_component(name, merged.get(name))
    return _instantiate(merged, method)


def add_recipe_keys(parser: "ArgumentParser", method: Method) -> None:
    """Add the keys of a recipe to a parser, with types, defaults and help, but no components.

    jsonargparse would have a key for each entry of a `Component`, and load what it names.
    """
    recipe_class = recipe_type(method)
    parser.add_class_arguments(Recipe, skip=set(COMPONENTS))
    assert parser.groups is not None
    parser.groups["Recipe"].title = "Model, hardware and training"
    if issubclass(recipe_class, Lora):
        parser.add_class_arguments(Lora, skip={"peft"})
    for section in sections():
        parser.add_class_arguments(section.keys)
    parser.set_defaults(
        {f.name: f.default for f in dataclasses.fields(recipe_class) if f.name == "out_dir"}
    )


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as nested plain values, ready for YAML or JSON; never with an access token."""
    # Recipes are stored in checkpoints and reports, which people share.
    values: dict[str, Any] = without_secrets(plain(dataclasses.asdict(recipe)))
    return values | {"access_token": None}


def to_yaml(recipe: Recipe) -> str:
    """The recipe with every default filled in, in the format that `read_recipe` reads."""
    return dump_yaml(to_dict(recipe))


def recipe_as_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain values to publish: also without passwords in urls."""
    cleaned: dict[str, Any] = for_json(to_dict(recipe))
    return cleaned


def from_dict(values: dict[str, Any], method: Method) -> Recipe:
    """Make a Recipe from the values that `to_dict` returned."""
    check_keys(values, method)
    return _instantiate(values, method)


def read_keys(path: Path) -> dict[str, Any]:
    """Dotted keys and values of a recorded recipe, unchecked: another version may have written it.

    Raises:
        UserError: it cannot be read, or is not a recipe.
    """
    return dict(leaves(load_yaml(path), whole=MAPPINGS))


def as_text(value: Any, key: str) -> str:
    """A key's value as the text of an override; text stays unquoted, as on the command line.

    Raises:
        UserError: no recipe can hold the value, such as a function.
    """
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, default=os.fspath)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{key} is {value!r}, but keys of a recipe hold text, numbers, booleans, lists and "
            "mappings. Code of your own belongs in a file: plugin='FILE.py' (docs/extending.md)."
        ) from error


def _specificity(override: Override) -> int:
    """Sort key of overrides: a class or a whole group comes before single keys of it."""
    head, _, rest = override[0].partition(".")
    if head in COMPONENTS:
        return {"": 0, "class_path": 1, "init_args": 2}.get(rest, 3)
    return override[0].count(".")


def _parse_value(key: str, text: str) -> Any:
    # YAML would read "Q: {instruction}" as a mapping.
    is_plain = not any(mark in text for mark in ("class_path", "without_input"))
    if key.endswith(".prompt_style") and PROMPT_MARK in text and is_plain:
        return _prompt_text(text)
    if key.endswith(".chat_template") and any(mark in text for mark in TEMPLATE_MARKS):
        return _unquoted(text) or text
    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        # Text that is not valid YAML is a text, such as a regular expression; braces show that a
        # mapping was meant.
        holds_keys = key.partition(".")[0] in COMPONENTS or _is_of_mapping(key)
        if holds_keys and text.lstrip().startswith(("{", "[")):
            problem = getattr(error, "problem", None) or ""
            twice = f": {problem}" if "twice" in problem else ""
            raise UserError(
                f"--{key} {text!r} is not valid YAML or JSON{twice}. "
                "Check its brackets, or set single keys as --KEY.NAME VALUE."
            ) from None
        return text
    if value is None or isinstance(value, str):
        return value
    if key.endswith(".prompt_style") and isinstance(value, dict) and is_plain:
        return text  # a prompt, "Q: {instruction}"
    # A directory called 2024 is a number in YAML.
    is_mapping = isinstance(value, dict) and _is_of_mapping(key)  # a set of eval.sets
    return text if is_text(key) and not is_mapping else value


def _prompt_text(text: str) -> str:
    r"""A prompt as text, which YAML would often read as a mapping; \n is a new line."""
    return _unquoted(text) or text.replace("\\n", "\n")


def _unquoted(text: str) -> str | None:
    """A text in quotes, which are YAML's and have its escapes; None: it is not in quotes."""
    if text[:1] in ("'", '"'):
        with contextlib.suppress(yaml.YAMLError):
            return str(parse_yaml(text))
    return None


def _assign(merged: dict[str, Any], key: str, value: Any) -> None:
    head, _, rest = key.partition(".")
    if head in COMPONENTS:
        merged[head] = _merge_component(head, merged.get(head), rest, value)
        return
    is_whole = _is_of_mapping(key)
    if isinstance(value, dict) and not is_whole:
        for leaf, item in flatten(value, f"{key}."):
            _assign(merged, leaf, item)
        return
    # A whole group can only be set as a mapping; an empty one in a file leaves its defaults.
    if key in key_groups():
        if value is not None:
            example = next(name for name in key_types("full") if name.startswith(f"{key}."))
            raise UserError(
                f"{key} is {shown_value(value)}, but holds keys of its own. "
                f"Try --{example} {example_of(example, 'full')}."
            )
        return
    target = merged
    *groups, last = key.split(".")
    for group in groups:
        # An empty mapping in a file is None.
        inner = {} if target.get(group) is None and is_whole else target.setdefault(group, {})
        if isinstance(inner, str) and key.startswith("eval.sets."):
            inner = {"path": inner}  # a set that was given in short
        if not isinstance(inner, dict):
            raise UserError(
                f"{key} cannot be set: {group} is a single value, not a group of keys. "
                f"Remove --{key}."
            )
        target[group] = inner
        target = inner
    if groups == ["eval", "sets"] and isinstance(value, str):
        # A set in short. jsonargparse reads it as YAML once more, but nothing inside a mapping.
        with contextlib.suppress(yaml.YAMLError):
            value = value if isinstance(parse_yaml(value), str) else {"path": value}
    target[last] = SPELLINGS.get(key, {}).get(value, value) if isinstance(value, str) else value
    # The other key may come from a recipe that this one overrides.
    for keys in EXCLUSIVE:
        if key in keys and value is not None:
            for other in set(keys) - {key}:
                group, _, name = other.partition(".")
                merged.setdefault(group, {})[name] = None


def _is_of_mapping(key: str) -> bool:
    """Return whether a key may hold a mapping, or is a key of one."""
    return any(key == name or key.startswith(f"{name}.") for name in MAPPINGS)


def _merge_component(
    field: str, current: Component | None, rest: str, value: Any
) -> Component | None:
    """Merge one key into a component: another class starts from its defaults.

    In a mapping, arguments may stand beside `class_path` as well as in `init_args`.
    """
    if rest.startswith("init_args."):
        rest = rest.removeprefix("init_args.")
    # A single argument.
    if rest and rest != "class_path" and rest != "init_args":
        if current is None:
            current = Component(class_path=default_class(field), init_args={})
        # Copies at every level: the values of a file that is merged stay unchanged.
        arguments = dict(current["init_args"])
        target = arguments
        *groups, last = rest.split(".")
        for group in groups:
            inner = target.get(group) or {}
            if not isinstance(inner, dict):
                raise UserError(
                    f"{field}.{rest} cannot be set: {group} is {inner!r}, a single value. "
                    f"Remove --{field}.{rest}."
                )
            target[group] = dict(inner)
            target = target[group]
        target[last] = value
        arguments = _without_others(field, arguments, [rest] if value is not None else [])
        return Component(class_path=current["class_path"], init_args=arguments)
    if rest:
        # class_path or init_args alone, as part of a whole component.
        value = {rest: value}
    if value is None:
        return None
    if isinstance(value, str):
        value = {"class_path": value}
    if not isinstance(value, dict):
        raise UserError(
            f"{field} is {shown_value(value)}, but must be a name, or a mapping with "
            f"class_path and init_args. Try --{field} {default_name(field)}."
        )
    class_path = value.get("class_path")
    arguments = value.get("init_args") or {}
    # Arguments alone belong to the class that was chosen before.
    if class_path is None:
        class_path = current["class_path"] if current else default_class(field)
    if not isinstance(class_path, str) or not isinstance(arguments, dict):
        raise UserError(
            f"{field} must have a class_path (text) and init_args (keys and values). "
            f"Try --{field} {default_name(field)}."
        )
    beside = {k: v for k, v in value.items() if k not in ("class_path", "init_args")}
    for key in beside.keys() & arguments.keys():
        raise UserError(
            f"{field} has {key} twice: beside init_args and in it. Leave one of the two out."
        )
    arguments = arguments | beside
    if "." not in class_path:  # a short name such as AdamW
        package = COMPONENTS[field]
        usual = f"{package}.{class_path}" if package else class_path
        class_path = own_path(field, class_path) or usual
    # The same class keeps its arguments; those of another class would not fit.
    if current and current["class_path"] == class_path:
        given = [key for key, item in arguments.items() if item is not None]
        arguments = {**_without_others(field, current["init_args"], given), **arguments}
    return Component(class_path=class_path, init_args=dict(arguments))


def _without_others(field: str, arguments: dict[str, Any], given: Iterable[str]) -> dict[str, Any]:
    """Drop arguments that a given one replaces: see `ONE_OF`."""
    ways = set(ONE_OF.get(field, ()))
    replaced = ways.difference(given) if ways.intersection(given) else set()
    return {key: value for key, value in arguments.items() if key not in replaced}


def _instantiate(merged: dict[str, Any], method: Method) -> Recipe:
    recipe_class = recipe_type(method)
    from jsonargparse import ArgumentError

    parser = _parser(method)
    given = _without_empty(merged, method)
    if method == "lora" and names_layers(given):
        given = NAMED_LAYERS | given
    # jsonargparse would import the classes that they name.
    components = {key: given.pop(key) for key in COMPONENTS if key in given}
    if isinstance(out_dir := given.get("out_dir"), str):
        # A run with a url works in a local directory; supervisors upload it.
        given["out_dir"] = str(local_path(out_dir))
    # Its own message: the parser would only say that a key is required.
    if "checkpoint_dir" not in given:
        raise UserError(
            "checkpoint_dir is not set: which base model? "
            "Try --checkpoint_dir TinyLlama/TinyLlama_v1.1 or --config RECIPE.yaml."
        )
    try:
        # Without defaults, which the dataclasses have: to parse each of them again would take ten
        # times as long.
        values = parser.instantiate(parser.parse_object(given, defaults=False))
    except (ArgumentError, TypeError, ValueError) as error:
        raise UserError(_type_message(str(error), merged, method)) from None
    names = {f.name for f in dataclasses.fields(recipe_class)} - COMPONENTS.keys()
    recipe = recipe_class(**{name: values[name] for name in names if name in values}, **components)
    check_names(recipe)
    return recipe


@functools.cache
def _parser(method: Method) -> "ArgumentParser":
    """The parser that gives types to the values of a recipe."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    add_recipe_keys(parser, method)
    return parser


def _without_empty(merged: dict[str, Any], method: Method) -> dict[str, Any]:
    """Drop empty keys, of which LitGPT's recipes are full: they mean the default.

    An empty key is kept where None is a value (`epochs:`).
    """
    kinds = key_types(method)

    def kept(key: str, value: Any) -> bool:
        return value is not None or ("." in key and types.NoneType in typing.get_args(kinds[key]))

    given: dict[str, Any] = {}
    for name, value in merged.items():
        if name in key_groups():
            given[name] = {k: v for k, v in value.items() if kept(f"{name}.{k}", v)}
        elif kept(name, value):
            given[name] = value
    return given


def _type_message(text: str, merged: dict[str, Any], method: Method) -> str:
    # jsonargparse names the key only in the text of its message.
    found = re.search(r'[Kk]ey "([\w.]+)"', text)
    kinds = key_types(method)
    if not found or found.group(1) not in kinds:
        return f"The recipe is not valid: {' '.join(text.split())}"
    key = found.group(1)
    value: Any = merged
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return (
        f"{key} is {shown_value(value)}, but must be {describe(kinds[key])}. "
        f"Try --{key} {example_of(key, method, value)}."
    )
