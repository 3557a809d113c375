"""Recipe files and dotted overrides, read into a checked Recipe.

The merge happens on plain nested dicts before anything is typed, so that the order of options
does not matter, an override of ``data.json_path`` lands inside ``data.init_args``, and a
``class_path`` is compared with the allow-list before any code could see it.
"""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from ftkit.errors import UserError
from ftkit.recipe import RECIPE_OF, Component, Lora, Method, Recipe

COMPONENTS = {"data": "litgpt.data", "optimizer": "torch.optim", "strategy": ""}
"""Fields that name a class, with the package a short name belongs to."""

ALLOWED_PACKAGES = {
    "data": ("litgpt.data", "ftkit.data"),
    "optimizer": ("torch.optim", "bitsandbytes.optim", "deepspeed.ops.adam"),
}
"""Where a class_path may come from. A recipe never makes ftkit import anything else."""

SPELLINGS = {"quantize": {"bnb.int8-training": "bnb.int8"}}
"""Values of LitGPT that have another name here."""

EXCLUSIVE = [("train.lr_warmup_steps", "train.lr_warmup_fraction")]
"""Two ways to say one thing: the one that is set later replaces the other."""

Override = tuple[str, str]


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 2e-4 as a number and refuses a key that appears twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} appears twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def read_recipe(
    files: Iterable[str | Path], overrides: Sequence[Override] = (), *, method: Method | None = None
) -> Recipe:
    """Merge recipe files (later ones win) and overrides (they win over files) into a Recipe.

    Args:
        files: YAML recipes in LitGPT's finetune format.
        overrides: dotted key and YAML text, such as ``("train.epochs", "2")``.
        method: what the command says; None reads it from the keys (any LoRA key means LoRA).

    Raises:
        UserError: unreadable file, unknown key, value of the wrong type, or a class that recipes
            may not name.
    """
    merged: dict[str, Any] = {}
    for file in files:
        for key, value in _flatten(_load_file(Path(file))):
            _assign(merged, key, value)
    for key, text in overrides:
        _assign(merged, key, _parse_value(key, text))
    if method is None:
        method = "lora" if _LORA_KEYS & merged.keys() else "full"
    _check_keys(merged, method)
    for name in COMPONENTS:
        _check_component(name, merged.get(name))
    return _instantiate(merged, method)


def recipe_parser(method: Method, prog: str) -> ArgumentParser:
    """The parser of a recipe's keys: help, types and completion come from the dataclasses."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    recipe_class = RECIPE_OF[method]
    parser = ArgumentParser(
        prog=prog,
        description=recipe_class.__doc__,
        usage=f"{prog} [--config RECIPE.yaml] [--KEY VALUE ...]",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_class_arguments(Recipe)
    if issubclass(recipe_class, Lora):
        parser.add_class_arguments(Lora)
    parser.set_defaults(
        {f.name: f.default for f in dataclasses.fields(recipe_class) if f.name == "out_dir"}
    )
    return parser


def to_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe as nested plain values, ready for YAML or JSON; never with the access token."""
    values = _plain(dataclasses.asdict(recipe))
    values["access_token"] = None
    return values


def to_yaml(recipe: Recipe) -> str:
    """The recipe with every default filled in, in the format that `read_recipe` reads."""
    return yaml.safe_dump(to_dict(recipe), sort_keys=False, allow_unicode=True)


def from_dict(values: dict[str, Any], method: Method) -> Recipe:
    """A Recipe from what `to_dict` returned."""
    _check_keys(values, method)
    return _instantiate(values, method)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _load_file(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise UserError(_missing_file(path)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path} cannot be read: {error}.") from None
    except yaml.YAMLError as error:
        raise UserError(f"--config {path} is not valid YAML: {error}") from None
    if not isinstance(loaded, dict):
        raise UserError(f"--config {path} must hold keys and values, such as 'seed: 1337'.")
    return loaded


def _missing_file(path: Path) -> str:
    folder = path.parent
    known = [str(folder / f.name) for f in folder.glob("*.y*ml")] if folder.is_dir() else []
    close = difflib.get_close_matches(str(path), known, n=1, cutoff=0.5)
    hint = f" Did you mean {close[0]}?" if close else " Check the path; recipes/ holds examples."
    return f"--config {path} does not exist.{hint}"


def _parse_value(key: str, text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.YAMLError:
        if key.partition(".")[0] in COMPONENTS and text.lstrip().startswith(("{", "[")):
            raise UserError(f"--{key} {text!r} is not valid YAML or JSON.") from None
        return text


def _flatten(values: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Leaves as dotted keys; class choices stay whole, to be merged by `_assign`."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and path not in COMPONENTS:
            yield from _flatten(value, f"{path}.")
        else:
            yield path, value


def _assign(merged: dict[str, Any], key: str, value: Any) -> None:
    head, _, rest = key.partition(".")
    if head in COMPONENTS:
        merged[head] = _merge_component(head, merged.get(head), rest, value)
        return
    if isinstance(value, dict):
        for leaf, item in _flatten(value, f"{key}."):
            _assign(merged, leaf, item)
        return
    target = merged
    *groups, last = key.split(".")
    for group in groups:
        inner = target.setdefault(group, {})
        if not isinstance(inner, dict):
            raise UserError(f"{key} cannot be set: {group} is a single value, not a group of keys.")
        target = inner
    target[last] = SPELLINGS.get(key, {}).get(value, value) if isinstance(value, str) else value
    for pair in EXCLUSIVE:
        if key in pair and value is not None:
            (other,) = set(pair) - {key}
            group, _, name = other.partition(".")
            merged.setdefault(group, {})[name] = None


def _merge_component(
    field: str, current: Component | None, rest: str, value: Any
) -> Component | None:
    """Naming another class starts from its defaults; a dotted key sets one of its arguments."""
    if rest.startswith("init_args."):
        rest = rest.removeprefix("init_args.")
    if rest and rest != "class_path" and rest != "init_args":
        if current is None:
            current = Component(class_path=_default_class(field), init_args={})
        arguments = dict(current["init_args"])
        target = arguments
        *groups, last = rest.split(".")
        for group in groups:
            target[group] = dict(target.get(group) or {})
            target = target[group]
        target[last] = value
        return Component(class_path=current["class_path"], init_args=arguments)
    if rest:
        value = {rest: value}
    if value is None:
        return None
    if isinstance(value, str):
        value = {"class_path": value}
    if not isinstance(value, dict):
        raise UserError(
            f"{field} is {value!r}, but must be a name, or a mapping with class_path and init_args."
        )
    unknown = value.keys() - {"class_path", "init_args"}
    if unknown:
        raise UserError(
            f"{field} has the key {sorted(unknown)[0]!r}, but holds class_path and init_args only. "
            f"Put it under {field}.init_args."
        )
    class_path = value.get("class_path")
    arguments = value.get("init_args") or {}
    if class_path is None:
        class_path = current["class_path"] if current else _default_class(field)
    if not isinstance(class_path, str) or not isinstance(arguments, dict):
        raise UserError(f"{field} must have a class_path (text) and init_args (keys and values).")
    package = COMPONENTS[field]
    if package and "." not in class_path:
        class_path = f"{package}.{class_path}"
    if current and current["class_path"] == class_path:
        arguments = {**current["init_args"], **arguments}
    return Component(class_path=class_path, init_args=dict(arguments))


def _default_class(field: str) -> str:
    (default,) = [f.default_factory for f in dataclasses.fields(Recipe) if f.name == field]
    assert callable(default)
    return str(default()["class_path"])


def _check_component(field: str, component: Component | None) -> None:
    allowed = ALLOWED_PACKAGES.get(field)
    if component is None or allowed is None:
        return
    package, _, name = component["class_path"].rpartition(".")
    if package not in allowed or not name.isidentifier():
        raise UserError(
            f"{field}.class_path is {component['class_path']!r}, but recipes may only name classes "
            f"of {' or '.join(allowed)}. Try --{field} {_default_class(field).rpartition('.')[2]}."
        )


_LORA_KEYS = {field.name for field in dataclasses.fields(Lora)}


def _key_types(recipe_class: type, prefix: str = "") -> dict[str, Any]:
    """Every dotted key of a recipe with its type."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(recipe_class):
        if dataclasses.is_dataclass(field.type):
            found |= _key_types(typing.cast(type, field.type), f"{prefix}{field.name}.")
        else:
            found[f"{prefix}{field.name}"] = field.type
    return found


def _check_keys(merged: dict[str, Any], method: Method) -> None:
    known = _key_types(RECIPE_OF[method])
    groups = {key.partition(".")[0] for key in known if "." in key}
    for key, _ in _flatten(merged):
        if key in known or key in groups:
            continue
        if key in _LORA_KEYS:
            advice = (
                "Quantization is for LoRA (QLoRA)." if key == "quantize" else "It is a LoRA key."
            )
            raise UserError(
                f"{key} does not belong to full fine-tuning. {advice} "
                "Use ftkit finetune instead of ftkit finetune_full, or remove the key."
            )
        raise UserError(f"{key} is not a key of a recipe.{_nearest(key, known)}")


def _nearest(key: str, known: Iterable[str]) -> str:
    names = list(known)
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    if not close:
        last = {name.rpartition(".")[2]: name for name in names}
        match = difflib.get_close_matches(key.rpartition(".")[2], list(last), n=1, cutoff=0.6)
        close = [last[match[0]]] if match else []
    return f" Did you mean {close[0]}?" if close else " See ftkit finetune --help for all keys."


def _instantiate(merged: dict[str, Any], method: Method) -> Recipe:
    recipe_class = RECIPE_OF[method]
    parser = recipe_parser(method, "ftkit")
    given = {key: value for key, value in merged.items() if value is not None}
    components = {key: given.pop(key) for key in COMPONENTS if key in given}
    if "checkpoint_dir" not in given:
        raise UserError(
            "checkpoint_dir is not set: which base model? "
            "Try --checkpoint_dir TinyLlama/TinyLlama_v1.1 or --config RECIPE.yaml."
        )
    try:
        values = parser.instantiate_classes(parser.parse_object(given))
    except (ArgumentError, TypeError, ValueError) as error:
        raise UserError(_type_message(str(error), merged, method)) from None
    fields = {f.name: values[f.name] for f in dataclasses.fields(recipe_class)}
    return recipe_class(**fields | components)


def _type_message(text: str, merged: dict[str, Any], method: Method) -> str:
    found = re.search(r'[Kk]ey "([\w.]+)"', text)
    kinds = _key_types(RECIPE_OF[method])
    if not found or found.group(1) not in kinds:
        return f"The recipe is not valid: {' '.join(text.split())}"
    key = found.group(1)
    value: Any = merged
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return f"{key} is {value!r}, but must be {_describe(kinds[key])}."


def _describe(kind: Any) -> str:
    """A type in words: 'a whole number', 'true or false', 'one of: auto, cpu, cuda'."""
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        return f"one of: {', '.join(map(str, choices))}" if len(choices) > 1 else repr(choices[0])
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(_describe(k) for k in typing.get_args(kind) if k is not type(None))
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return words.get(kind, "a path" if kind is Path else "a name, or class_path with init_args")
