"""PEFT's adapter_config.json as keys of a recipe; no torch."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftkit.config.peft_settings import AGAIN, read_peft_settings, require_known
from ftkit.config.recipe import LAYER_SWITCHES, LoraRecipe, Recipe
from ftkit.errors import UserError
from ftkit.utils.damaged_files import reading, require_regular
from ftkit.utils.json_values import from_json

CONFIG = "adapter_config.json"
WEIGHTS, OLD_WEIGHTS = "adapter_model.safetensors", "adapter_model.bin"
NOTES_KEY = "ftkit"
"""Key of the header of WEIGHTS with what ftkit notes of fused layers, as JSON."""
BASE_KEY = "ftkit_base"
"""Key of the header of WEIGHTS with the fingerprint of the base model."""
PARTS_KEY = "parts"
"""Among the notes: Hugging Face's names of fused layers, each with our layers in order."""
_NOTES: dict[str, Any] = {"lora_r": int, "lora_alpha": float, "lora_targets": list[str]}
"""What ftkit notes beside the parts, with its kinds."""
_ARGUMENTS = (
    *("r", "lora_alpha", "lora_dropout", "target_modules", "target_parameters", "modules_to_save"),
    *("rank_pattern", "alpha_pattern", "use_dora", "use_rslora", "fan_in_fan_out"),
)
"""Settings of which PEFT makes the layers of an adapter."""
_OF_LAYER = ".weight"
"""What the name of a parameter that is the weight of a linear layer ends with."""


def adapter_keys(directory: Path) -> dict[str, Any]:
    """The keys of a recipe that an adapter decides.

    Raises:
        UserError: it is no adapter, or of a kind that ftkit does not train.
    """
    config = peft_settings(directory)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UserError(
            f"adapter {directory} is of the kind {kind}, but LoRA, DoRA and rsLoRA are what can be "
            "trained on. Give another adapter, or none."
        )
    notes = read_notes(directory)
    require_known(config, directory)
    if (config.get("rank_pattern") or config.get("alpha_pattern")) and not notes:
        raise UserError(
            f"adapter {directory} has ranks of its own for some layers (rank_pattern "
            f"{json.dumps(config.get('rank_pattern'))}), but lora_r is one for all. Give another "
            "adapter, or none."
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
    }
    keys |= {key: value for key, value in notes.items() if key != PARTS_KEY}
    wanted = ["lora_r", "lora_alpha", *(["lora_targets"] * (not keys["lora_experts"]))]
    missing = [key for key in wanted if not keys[key]]
    if missing:
        raise UserError(
            f"{directory / CONFIG} does not say {', '.join(missing)}. Take the adapter from where "
            "it was saved again."
        )
    variant = "dora" if config.get("use_dora") else "rslora" if config.get("use_rslora") else "lora"
    if isinstance(keys["lora_targets"], list):
        keys["lora_targets"] = sorted(keys["lora_targets"])
    elif keys["lora_targets"] is None:
        keys["lora_targets"] = []
    return keys | {"lora_variant": variant}


def with_adapter(recipe: Recipe) -> Recipe:
    """The recipe with what the adapter that it starts from decides.

    Raises:
        UserError: there is no such adapter, or the recipe asks for another kind.
    """
    if not isinstance(recipe, LoraRecipe) or recipe.adapter is None:
        return recipe
    keys = adapter_keys(recipe.adapter)
    defaults = {field.name: field.default for field in dataclasses.fields(recipe)}
    for key, value in keys.items():
        asked = getattr(recipe, key)
        if asked != defaults[key] and _in_order(asked) != _in_order(value):
            raise UserError(
                f"{key} is {json.dumps(asked)}, but the adapter {recipe.adapter} has "
                f"{json.dumps(value)}. Remove {key}, which is read from the adapter."
            )
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
    return dataclasses.replace(recipe, **keys)


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
        return "|".join([f"({modules})", *(rf"(.*\.)?{re.escape(name)}" for name in weights)])
    return [*(modules or []), *weights]


def _in_order(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value


def read_notes(directory: Path) -> dict[str, Any]:
    """What ftkit noted of the layers that an adapter of its own fuses; {} for others."""
    with reading(directory / WEIGHTS, "JSON", key=f"__metadata__.{NOTES_KEY}", advice=AGAIN):
        notes = json.loads(_header(directory).get(NOTES_KEY, "{}"))
        notes = notes if isinstance(notes, dict) else {}
        parts = from_json(dict[str, list[str]], notes.get(PARTS_KEY, {}))
        known = {key: notes[key] for key in _NOTES if key in notes}
        for key, value in known.items():
            from_json(_NOTES[key], value)
        if known.get("lora_r", 1) < 1:
            raise ValueError(f"lora_r is {known['lora_r']}")
    return known | {PARTS_KEY: parts} if notes else {}


def base_fingerprint(directory: Path) -> str | None:
    """Of the base model that an adapter was trained on; None: ftkit did not write it there."""
    found = _header(directory).get(BASE_KEY)
    return found if isinstance(found, str) else None


def _header(directory: Path) -> dict[str, Any]:
    """What the header of the weights says beside their names; {} where there is none."""
    path = directory / WEIGHTS
    require_regular(path)
    if not path.is_file():
        return {}
    with reading(path, "a header of safetensors", advice=AGAIN), path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > path.stat().st_size:
            raise ValueError(f"its header of {size:,} bytes is longer than the file")
        found = json.loads(file.read(size)).get("__metadata__", {})
    return found if isinstance(found, dict) else {}


def peft_settings(directory: Path) -> dict[str, Any]:
    """What ftkit uses of an adapter's settings; see `read_peft_settings`.

    Raises:
        UserError: there are none, or they are damaged.
    """
    return read_peft_settings(directory / CONFIG)


def peft_arguments(directory: Path) -> dict[str, Any]:
    """Arguments of `peft.LoraConfig` for an adapter: none that names a module, class or place.

    Raises:
        UserError: as `adapter_keys`.
    """
    adapter_keys(directory)
    settings = peft_settings(directory)
    return {key: settings[key] for key in _ARGUMENTS if key in settings}
