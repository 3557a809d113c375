"""Recipe keys that a resumed run may change.

Fixed keys decide what is learned, tunable ones how it is learned, all others time and memory.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from ftkit.recipe.adapter_types import peft_options, peft_type
from ftkit.recipe.key_types import Kind
from ftkit.recipe.objectives import OBJECTIVES
from ftkit.recipe.optimizers import family_of
from ftkit.recipe.parsing import to_dict
from ftkit.recipe.recipe import LoraRecipe, Recipe
from ftkit.recipe.recipe_keys import key_fields, kind_on_resume
from ftkit.recipe.recipe_sections import recipe_type


@functools.cache
def kinds() -> dict[str, Kind]:
    """Return whether a resumed run may change a key, of every key of recipes.

    Some need a further look: `data` is known by its fingerprint but for the keys of _DATA_DEFAULTS,
    and an optimizer is tunable within a family.
    """
    return {key: kind_on_resume(field) for key, field in key_fields(recipe_type("lora"))}


_DATA_DEFAULTS: dict[str, Any] = {
    "mask_prompt": False,
    "prompt_style": None,
    "ignore_index": -100,
    "include_multiturn_conversations": False,
    "chat_template": None,
    "chat_template_kwargs": None,
    "train_on": None,
    "reasoning": "split",
    "drop_system": False,
    "overlong": None,
    "min_tokens": None,
    "image_max_pixels": None,
    "image_min_pixels": None,
    "drop_equal": False,
    "shuffle": True,
    "skip_bad_records": False,
    "add_tokens": None,
    "text_key": "text",
    "text_files": "document",
    "join_documents": True,
    "piece_kib": 128,
    "window_pieces": 16,
}
"""Fixed arguments of data modules: they decide texts and labels. A missing one is the default."""

_PROMPT_STYLES = {"FLAN": "flan", "LongForm": "longform"}
"""Default prompt styles of LitGPT's data modules; alpaca for all others."""


def recipe_changes(saved: Recipe, now: Recipe) -> tuple[list[str], list[str]]:
    """Differences between the recipe of a resumed run and that of its checkpoint.

    Args:
        saved: recipe of the checkpoint.
        now: recipe of the resumed run.

    Returns:
        Changes that are refused, and changes that are allowed; one line for each key, such as
        "train.epochs 1 -> 3". Keys of the hardware are in neither.
    """
    if saved.method != now.method:
        return [f"method {saved.method} -> {now.method}"], []
    before, after = dict(_values(saved)), dict(_values(now))
    tunable: list[str] = []
    if isinstance(now, LoraRecipe):
        tunable = [f"peft.{option}" for option in peft_type(now).tunable]
    lines: dict[Kind, list[str]] = {"fixed": [], "tunable": [], "hardware": []}
    for key in {**before, **after}:  # in the order of the recipe
        old, new = before.get(key), after.get(key)
        head, _, option = key.partition(".")
        # The options of another class are other ones.
        is_of_other = head in ("objective", "peft") and before[head] != after[head]
        if old == new or (option and is_of_other):
            continue
        kind = "tunable" if key in tunable else _kind(key)
        if key == "optimizer" and not carries_over(str(old), str(new)):
            kind = "fixed"
        lines[kind].append(f"{key} {_shown(old)} -> {_shown(new)}")
    return lines["fixed"], lines["tunable"]


def default_prompt_style(class_path: str) -> str:
    """Prompt style of a kind of data where the recipe names none."""
    return _PROMPT_STYLES.get(class_path.rpartition(".")[2], "alpaca")


def carries_over(saved: str, now: str) -> bool:
    """Whether the state of one optimizer class can be continued by another.

    Args:
        saved: class path of the checkpoint's.
        now: class path in the resumed run.
    """
    return family_of(saved) == family_of(now)


def _kind(key: str) -> Kind:
    head, _, rest = key.partition(".")
    if head == "data":
        is_fixed = rest in _DATA_DEFAULTS or rest.startswith("sources[")
        return "fixed" if is_fixed else "hardware"
    if key.startswith("eval.sets."):
        return kinds()["eval.sets"]
    return kinds()[head if head in ("optimizer", "objective", "peft") else key]


def _values(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """Values by dotted keys; those that name a class are class paths."""
    for name, value in to_dict(recipe).items():
        if name == "data":
            yield "data", value["class_path"]
            yield from ((f"data.{key}", item) for key, item in _data_values(recipe).items())
        elif name == "optimizer":
            yield name, value["class_path"]
            yield from ((f"optimizer.{key}", v) for key, v in value["init_args"].items())
        elif name == "objective":
            yield name, value["class_path"]
            options = _objective_options(value["class_path"]) | value["init_args"]
            yield from ((f"objective.{key}", v) for key, v in options.items())
        elif name == "peft":
            yield name, value["class_path"]
            options = dataclasses.asdict(peft_options(value))
            yield from ((f"peft.{key}", v) for key, v in options.items())
        elif isinstance(value, dict) and name not in kinds():
            plain = {key: item for key, item in value.items() if (name, key) != ("eval", "sets")}
            yield from ((f"{name}.{key}", item) for key, item in plain.items())
        else:
            yield name, value
    for name, entry in (recipe.eval.sets or {}).items():
        is_path = isinstance(entry, dict) and entry.keys() == {"path"}
        yield f"eval.sets.{name}", entry["path"] if is_path else entry


def _objective_options(name: str) -> dict[str, Any]:
    """Defaults of the options of an objective; {} for a plugin's own, which may not be here."""
    known = OBJECTIVES.get(name)
    return {} if known is None else known.defaults


def _data_values(recipe: Recipe) -> dict[str, Any]:
    """The fixed arguments of the data module, with defaults filled in."""
    given = recipe.data["init_args"]
    values = {
        key: default if given.get(key) is None else given[key]
        for key, default in _DATA_DEFAULTS.items()
    }
    if values["prompt_style"] is None:
        values["prompt_style"] = default_prompt_style(recipe.data["class_path"])
    return values | dict(_shares(given.get("sources")))


def _shares(sources: Any) -> Iterator[tuple[str, Any]]:
    """Samples and weight of each source of a mixture."""
    for i, source in enumerate(sources or ()):
        samples = source.get("samples")
        weight = source.get("weight")
        yield f"sources[{i}].samples", samples
        yield f"sources[{i}].weight", float(weight or 1) if samples is None else None


def _shown(value: Any) -> str:
    if value is None:
        return "not set"
    return str(value).lower() if isinstance(value, bool) else str(value)
