"""PEFT's adapter_config.json as keys of a recipe; no torch.

Any program may have written the file. PEFT imports modules and classes that some keys name
(`megatron_core`, `auto_mapping`), so only the keys listed here are passed to it.
"""

import dataclasses
import json
import logging
import math
import re
import shlex
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.recipe.adapter_types import ADAPTER_TYPES, LORA, AdapterType, type_of
from ftkit.recipe.lora_layers import NAMED_LAYERS
from ftkit.recipe.objectives import ScoreLabels
from ftkit.recipe.peft_names import (
    BASE_KEY,
    CONFIG,
    HARMLESS_STARTS,
    NOTES_KEY,
    PARTS_KEY,
    SCORE_TASK,
    SCORES_KEY,
    TOKENS_KEY,
    VECTOR_TASK,
    WEIGHTS,
)
from ftkit.recipe.recipe import LAYER_SWITCHES, Component, LoraRecipe, Recipe
from ftkit.utils.damaged_files import reading, require_regular
from ftkit.utils.json_values import from_json

_NOTES: dict[str, Any] = {"lora_r": int, "lora_alpha": float, "lora_targets": list[str]}
"""Keys that ftkit stores beside the parts, with their types."""
_NOT_OF_LAYERS = ("peft_type", "base_model_name_or_path", "task_type", "init_lora_weights")
"""Settings of an adapter that change none of the layers that PEFT makes for it."""
_OF_LAYER = ".weight"
"""End of the name of a parameter that is the weight of a linear layer."""

_AGAIN = "Take it from where it was saved again."

# Above the width of any model: such a rank comes from a damaged file.
_MOST_RANK = 2**16
_LOG = logging.getLogger(__name__)


def _is_whole(value: Any) -> bool:
    # Not isinstance: true is an int in Python.
    return type(value) is int and 0 < value <= _MOST_RANK


def _is_number(value: Any) -> bool:
    # Python's json also reads NaN and Infinity.
    return type(value) in (int, float) and math.isfinite(value)


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_name_or_names(value: Any) -> bool:
    return _is_text(value) or _are_names(value)


def _is_start(value: Any) -> bool:
    return _is_flag(value) or _is_text(value)


def _are_ranks(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_whole, value.values()))


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


_USED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "peft_type": (_is_text, "a text"),
    "base_model_name_or_path": (_is_text, "a text"),
    "task_type": (_is_text, "a text"),
    "r": (_is_whole, f"a whole number from 1 to {_MOST_RANK:,}"),
    "lora_alpha": (_is_number, "a number"),
    "lora_dropout": (_is_share, "a number from 0 to below 1"),
    "target_modules": (_is_name_or_names, "a text or a list of texts"),
    "target_parameters": (_are_names, "a list of texts"),
    "modules_to_save": (_are_names, "a list of texts"),
    "rank_pattern": (_are_ranks, "names with whole numbers"),
    "alpha_pattern": (_are_numbers, "names with numbers"),
    "use_dora": (_is_flag, "true or false"),
    "use_rslora": (_is_flag, "true or false"),
    "fan_in_fan_out": (_is_flag, "true or false"),
    "ensure_weight_tying": (_is_flag, "true or false"),
    "init_lora_weights": (_is_start, "true, false or a text"),
}
"""Keys that ftkit uses, with the types of their values, beside the options of other types than
LoRA; null counts as absent."""

_CHANGING: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "lora_bias": (False,),
    "layers_to_transform": ([],),
    "exclude_modules": ([],),
    "trainable_token_indices": ([], {}),
    "layer_replication": ([],),
    "alora_invocation_tokens": ([],),
    "arrow_config": ({},),
    "kasa_config": ({},),
    "megatron_config": ({},),
    "monteclora_config": ({},),
    "use_bdlora": ({}, False),
    "use_qalora": (False,),
    "velora_config": ({},),
}
"""Settings that change what an adapter computes, with the values, beside null, that do not."""

_NEUTRAL = frozenset(
    (
        *("auto_mapping", "corda_config", "eva_config", "inference_mode"),
        *("layers_pattern", "loftq_config", "lora_ga_config", "megatron_core", "peft_version"),
        *("qalora_group_size", "revision", "runtime_config"),
    )
)
"""Settings that change no number of a saved adapter: how its training began, and what loads it."""
_SWITCHES = ("use_", "_config")
"""Beginning and end of PEFT's keys that switch a method on."""


_IN_RUN = ("final", "adapter", "checkpoints/step-*/adapter", "step-*/adapter")
"""Where adapters lie in a run, in a checkpoint of it, in a run without a result, and in a directory
of checkpoints (`ftkit.runs.directory`, which is above recipes)."""


def adapter_directory(path: Path) -> Path:
    """The directory of the adapter that a path means, as the commands that use results take it.

    Args:
        path: an adapter, a run (its result, or its newest checkpoint if it has none), its
            checkpoints or one of them; what is none of these is returned as it is.
    """
    path = path.expanduser()
    if (path / CONFIG).exists():
        return path
    for pattern in _IN_RUN:
        found = [inside for inside in path.glob(pattern) if (inside / CONFIG).is_file()]
        if found:  # the newest: names of later steps are longer, or of the same length and greater
            return max(found, key=lambda inside: (len(inside.parts[-2]), inside))
    return path


def adapter_keys(directory: Path) -> dict[str, Any]:
    """Read the recipe keys that an adapter determines.

    Raises:
        UserError: it is not an adapter, or of a kind that ftkit does not train.
    """
    config = peft_settings(directory)
    kind = _type_of(config, directory)
    _require_known(config, kind, directory)
    if kind.name != LORA:
        return _keys_of_type(config, kind, directory)
    notes = read_notes(directory)
    # Adapters of ftkit have patterns for fused layers: their notes say which lora_r was trained.
    for key, ours in (("rank_pattern", "lora_r"), ("alpha_pattern", "lora_alpha")):
        if config.get(key) and not notes:
            raise UserError(
                f"adapter {directory} has {key} {_shown(config[key])}, but {ours} is one for all "
                "layers. Merge it with PEFT's merge_and_unload, and use the merged model."
            )
    if config.get("use_dora") and config.get("use_rslora"):
        raise UserError(
            f"adapter {directory} is DoRA and rsLoRA in one, but lora_variant is one of the two. "
            "Give another adapter, or none."
        )
    keys = {
        "lora_r": config.get("r"),
        "lora_alpha": config.get("lora_alpha"),
        "lora_targets": _layers(config),
        "lora_modules_to_save": config.get("modules_to_save") or None,
        "lora_experts": bool(target_parameters(directory)),
        # PEFT writes all names that it was given; the weights say which layers there are.
        "lora_skip_missing": True,
    }
    # The file describes fused layers, with summed ranks; the notes have the recipe's own values.
    keys |= {key: value for key, value in notes.items() if key != PARTS_KEY}
    # An adapter of experts alone has no layers to name.
    wanted = ["lora_r", "lora_alpha", *(["lora_targets"] * (not keys["lora_experts"]))]
    missing = [key for key in wanted if not keys[key]]
    if missing:
        raise UserError(f"{directory / CONFIG} lacks {', '.join(missing)}. Copy the adapter again.")
    variant = "dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else "lora"
    if isinstance(keys["lora_targets"], list):
        # PEFT saves a set, so the order of the list means nothing.
        keys["lora_targets"] = sorted(keys["lora_targets"])
    # Only experts are adapted.
    elif keys["lora_targets"] is None:
        keys["lora_targets"] = []
    return keys | {"lora_variant": variant}


def _type_of(settings: Mapping[str, Any], directory: Path) -> AdapterType:
    """The type of an adapter."""
    name = settings.get("peft_type")
    row = ADAPTER_TYPES.get(str(name).lower())
    if row is None:
        raise UserError(
            f"adapter {directory} is of the kind {name}, but ftkit only knows "
            f"{', '.join(ADAPTER_TYPES.names)}. Give another adapter, or none."
        )
    return row


def _keys_of_type(config: Mapping[str, Any], kind: AdapterType, directory: Path) -> dict[str, Any]:
    """Recipe keys of an adapter of another type than LoRA."""
    for key in ("rank_pattern", "alpha_pattern"):
        if config.get(key):
            raise UserError(
                f"adapter {directory} has {key} {_shown(config[key])}, but peft.r and peft.alpha "
                "are one for all layers. Give another adapter, or none."
            )
    if not config.get("target_modules"):
        raise UserError(f"{directory / CONFIG} lacks target_modules. Copy the adapter again.")
    targets = config["target_modules"]
    in_file = {key: config[key] for key in _options_of(kind) if key in config}
    return {
        "peft": Component(class_path=kind.name, init_args={**kind.in_peft, **in_file}),
        "lora_targets": sorted(targets) if isinstance(targets, list) else targets,
        "lora_modules_to_save": config.get("modules_to_save") or None,
    }


def _options_of(kind: AdapterType) -> list[str]:
    """Options of a type that its files determine."""
    # What only training depends on is left to the recipe, as lora_dropout is.
    names = (field.name for field in dataclasses.fields(kind.options))
    return [name for name in names if name not in kind.of_training]


def with_adapter(recipe: Recipe) -> Recipe:
    """Return the recipe with the keys that its adapter determines.

    Raises:
        UserError: there is no such adapter, or the recipe sets other values.
    """
    if not isinstance(recipe, LoraRecipe) or recipe.adapter is None:
        return recipe
    recipe = dataclasses.replace(recipe, adapter=adapter_directory(recipe.adapter))
    assert recipe.adapter is not None
    keys = adapter_keys(recipe.adapter)
    if missing := [t for t in noted_tokens(recipe.adapter) if t not in recipe.added_tokens]:
        words = shlex.quote(json.dumps(noted_tokens(recipe.adapter)))
        raise UserError(
            f"adapter {recipe.adapter} was trained with {', '.join(missing)} as tokens of their "
            f"own, which its base model lacks. Try --data.add_tokens {words}."
        )
    defaults = {field.name: field.default for field in dataclasses.fields(recipe)}
    keys["peft"] = _joined(recipe, keys.get("peft", Component(class_path=LORA, init_args={})))
    for key, value in keys.items():
        if key == "peft":
            continue
        asked = getattr(recipe, key)
        # A default counts as not set, because the recipe does not know which keys were given.
        is_set = asked not in (defaults[key], NAMED_LAYERS.get(key, defaults[key]))
        if is_set and _in_order(asked) != _in_order(value):
            raise UserError(
                f"{key} is {json.dumps(asked)}, but the adapter {recipe.adapter} has "
                f"{json.dumps(value)}. Remove {key}, which is read from the adapter."
            )
    # They name layers in another way than lora_targets, which is read from the adapter.
    for key in LAYER_SWITCHES:
        if getattr(recipe, key) != defaults[key]:
            raise UserError(
                f"{key} is {json.dumps(getattr(recipe, key))}, but the adapter {recipe.adapter} "
                f"adapts {json.dumps(keys['lora_targets'])}. Remove {key}; the layers are read "
                "from the adapter."
            )
    if recipe.lora_init != "default":
        raise UserError(
            f"lora_init is {recipe.lora_init}, but the first values come from the adapter "
            f"{recipe.adapter}. Try --lora_init default."
        )
    # Written into the recipe, so that checkpoints and results have it whatever happens to the
    # adapter.
    return dataclasses.replace(recipe, **keys)


def _joined(recipe: LoraRecipe, found: Component) -> Component:
    """Type and options of an adapter, with those of the recipe that only training depends on."""
    asked = recipe.peft
    name = found["class_path"]
    if asked["class_path"] not in (LORA, name):
        raise UserError(
            f"peft is {asked['class_path']}, but the adapter {recipe.adapter} is {name}. Remove "
            "peft, which is read from the adapter."
        )
    kind = type_of(found)
    for key, value in asked["init_args"].items():
        if key in kind.of_training or value is None:
            continue
        if key not in found["init_args"] or found["init_args"][key] != value:
            raise UserError(
                f"peft.{key} is {json.dumps(value)}, but the adapter {recipe.adapter} has "
                f"{json.dumps(found['init_args'].get(key))}. Remove peft.{key}, which is read from "
                "the adapter."
            )
    return Component(class_path=name, init_args=asked["init_args"] | found["init_args"])


def target_parameters(directory: Path) -> list[str]:
    """Names of the parameters, not layers, that an adapter adapts: those of experts."""
    found = peft_settings(directory).get("target_parameters") or []
    return [str(name) for name in found if not str(name).endswith(_OF_LAYER)]


def _layers(config: Mapping[str, Any]) -> str | list[str] | None:
    """The layers that an adapter adapts, by their names or by those of their weights."""
    modules: str | list[str] | None = config.get("target_modules")
    parameters = [str(name) for name in config.get("target_parameters") or []]
    weights = [n.removesuffix(_OF_LAYER) for n in parameters if n.endswith(_OF_LAYER)]
    if not weights:
        return modules
    if isinstance(modules, str):
        # PEFT matches a text as a regular expression against whole names.
        return "|".join([f"({modules})", *(rf"(.*\.)?{re.escape(name)}" for name in weights)])
    return [*(modules or []), *weights]


def _in_order(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def read_notes(directory: Path) -> dict[str, Any]:
    """Notes of ftkit on the fused layers of its own adapter; {} for other adapters."""
    with reading(directory / WEIGHTS, "JSON", key=f"__metadata__.{NOTES_KEY}", advice=_AGAIN):
        notes = json.loads(_header(directory).get(NOTES_KEY, "{}"))
        notes = notes if isinstance(notes, dict) else {}
        parts = from_json(dict[str, list[str]], notes.get(PARTS_KEY, {}))
        known = {key: notes[key] for key in _NOTES if key in notes}
        for key, value in known.items():
            # Only checked: it raises if the type is another one.
            from_json(_NOTES[key], value)
        if known.get("lora_r", 1) < 1:
            raise ValueError(f"lora_r is {known['lora_r']}")
    return known | {PARTS_KEY: parts} if notes else {}


def base_fingerprint(directory: Path) -> str | None:
    """Fingerprint of the base model of an adapter; None: not recorded."""
    found = _header(directory).get(BASE_KEY)
    return found if isinstance(found, str) else None


def noted_tokens(directory: Path) -> list[str]:
    """Tokens that were added to the vocabulary of an adapter's base model."""
    with reading(directory / WEIGHTS, "JSON", key=f"__metadata__.{TOKENS_KEY}", advice=_AGAIN):
        found = from_json(list[str], json.loads(_header(directory).get(TOKENS_KEY, "[]")))
    assert isinstance(found, list)
    return found


def _header(directory: Path) -> dict[str, Any]:
    """Metadata in the header of the weights; {} where there is none."""
    found = _entries(directory).get("__metadata__", {})
    return found if isinstance(found, dict) else {}


def _entries(directory: Path) -> dict[str, Any]:
    """Header of the weights: metadata, and what it says of each tensor; {} where there is none."""
    path = directory / WEIGHTS
    require_regular(path)
    if not path.is_file():
        return {}
    with reading(path, "a header of safetensors", advice=_AGAIN), path.open("rb") as file:
        # A safetensors file begins with the length of its header, 8 bytes, little-endian. The
        # length is checked before it is read into memory.
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise ValueError(f"its header of {size:,} bytes is longer than the file")
        found: dict[str, Any] = json.loads(file.read(size))
    return found


def adapter_scores(directory: Path) -> ScoreLabels | None:
    """Return the scores that a model with an adapter gives sequences; None: it predicts tokens.

    Other programs name none: one score is then a reward, several are of classes, and vectors are
    at the last token.
    """
    task = peft_settings(directory).get("task_type")
    if task not in (SCORE_TASK, VECTOR_TASK):
        return None
    noted = _header(directory).get(SCORES_KEY)
    if noted is None and task == VECTOR_TASK:
        return ScoreLabels(names=(), pooling="last")
    if noted is None:
        with reading(directory / WEIGHTS, "shapes", advice=_AGAIN):
            shapes = [
                from_json(list[int], entry["shape"])
                for name, entry in _entries(directory).items()
                if name.endswith((".score.weight", ".score.modules_to_save.weight"))
            ]
        return ScoreLabels.unnamed(shapes[0][0] if shapes else 1)
    with reading(directory / WEIGHTS, "JSON", key=f"__metadata__.{SCORES_KEY}", advice=_AGAIN):
        found = from_json(ScoreLabels, json.loads(noted))
    assert isinstance(found, ScoreLabels)
    return found


def peft_arguments(directory: Path) -> tuple[str, dict[str, Any]]:
    """Type of an adapter and the arguments of PEFT's configuration of it.

    None of them names code or a path.

    Raises:
        UserError: as `adapter_keys`.
    """
    # Refuses what ftkit does not know before PEFT sees any of it.
    adapter_keys(directory)
    settings = peft_settings(directory)
    arguments = {key: value for key, value in settings.items() if key not in _NOT_OF_LAYERS}
    return settings["peft_type"], arguments


def peft_settings(directory: Path) -> dict[str, Any]:
    """Settings of an adapter_config.json that ftkit uses or has to refuse.

    Keys of newer versions of PEFT that are switched off pass. Others are named once and ignored,
    except for those that switch a method on, which are refused.

    Raises:
        UserError: the file is missing or damaged, or turns on something that ftkit does not know.
    """
    file = directory / CONFIG
    require_regular(file)
    if not file.is_file():
        raise UserError(
            f"adapter is {directory}, but there is no {CONFIG}. Give a run of ftkit finetune, such "
            "as out/finetune/lora, or the directory of a PEFT adapter. A whole model, such as the "
            "result of ftkit finetune_full, is given as --checkpoint_dir."
        )
    with reading(file, "a JSON object with the settings of an adapter", advice=_AGAIN):
        content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise UserError(f"{file} holds no settings. {_AGAIN}")
    given = {key: value for key, value in content.items() if value is not None}
    kind = ADAPTER_TYPES.get(str(given.get("peft_type")).lower())
    for key, value in given.items():
        if (wanted := _wanted(key, value, kind)) is not None:
            raise UserError(f"{file}: {key} is {_shown(value)}, but has to be {wanted}. {_AGAIN}")
    kind = _type_of(given, directory)
    used = {*_USED, *_CHANGING, *_options_of(kind), *kind.changing}
    # Keys of newer versions of PEFT that are off (false, 0, empty) change nothing.
    neutral = {*_NEUTRAL, *kind.neutral, *kind.of_training}
    unknown = {key: value for key, value in given.items() if key not in used | neutral and value}
    beginning, end = _SWITCHES
    for key, value in unknown.items():
        if key.startswith(beginning) or key.endswith(end):
            raise UserError(
                f"{file} has {key} {_shown(value)}, which this ftkit does not know and which may "
                "change what the adapter computes. Give another adapter, or none."
            )
    if unknown:
        _say_ignored(file, ", ".join(sorted(unknown)))
    return {key: value for key, value in given.items() if key in used}


def _wanted(key: str, value: Any, kind: AdapterType | None) -> str | None:
    """What a setting has to be; None: it is that, or nothing uses it."""
    if kind is not None and key in _options_of(kind):
        wanted = kind.rule_for(key, value)
        if key in kind.sizes and (wanted is not None or value > _MOST_RANK):
            return f"a whole number from {kind.sizes[key]} to {_MOST_RANK:,}"
        return wanted
    is_sound, wanted = _USED.get(key, (lambda _: True, None))
    return None if is_sound(value) else wanted


def _require_known(settings: Mapping[str, Any], kind: AdapterType, directory: Path) -> None:
    """Refuse settings that change what an adapter computes in a way that ftkit does not have."""
    for key, harmless in {**_CHANGING, **kind.changing}.items():
        if settings.get(key) is not None and settings[key] not in harmless:
            raise UserError(
                f"adapter {directory} has {key} {_shown(settings[key])}, which ftkit cannot train "
                "on. Give another adapter, or none."
            )
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in HARMLESS_STARTS:
        raise UserError(
            f"adapter {directory} has init_lora_weights {start}: it belongs to a base model whose "
            "weights its start has changed. Have PEFT convert it while it is saved "
            "(path_initial_model_for_weight_conversion), or give another adapter."
        )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


@lru_cache
def _say_ignored(file: Path, keys: str) -> None:
    # Once for each file, which is read several times: the function is cached.
    _LOG.warning("%s: not used, because ftkit does not know it: %s", file, keys)
