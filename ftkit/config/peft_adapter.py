"""PEFT's adapter_config.json as keys of a recipe; no torch."""

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ftkit.config.recipe import LAYER_SWITCHES, LoraRecipe, Recipe
from ftkit.errors import UserError

CONFIG = "adapter_config.json"
WEIGHTS, OLD_WEIGHTS = "adapter_model.safetensors", "adapter_model.bin"
NOTES_KEY = "ftkit"
"""Key of the header of WEIGHTS with what ftkit notes of fused layers, as JSON."""
BASE_KEY = "ftkit_base"
"""Key of the header of WEIGHTS with the fingerprint of the base model."""
PARTS_KEY = "parts"
"""Among the notes: Hugging Face's names of fused layers, each with our layers in order."""
_OF_LAYER = ".weight"
"""What the name of a parameter that is the weight of a linear layer ends with."""

_UNKNOWN = {
    "bias": ("none", None),
    "lora_bias": (False, None),
    "layers_to_transform": (None,),
    "exclude_modules": (None, []),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    "alora_invocation_tokens": (None,),
}
"""Settings of PEFT that change what an adapter is, with the values that change nothing."""


def adapter_keys(directory: Path) -> dict[str, Any]:
    """The keys of a recipe that an adapter decides.

    Raises:
        UserError: it is no adapter, or of a kind that ftkit does not train.
    """
    config = _config(directory)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UserError(
            f"adapter {directory} is of the kind {kind}, but LoRA, DoRA and rsLoRA are what can be "
            "trained on. Give another adapter, or none."
        )
    notes = read_notes(directory)
    for key, harmless in _UNKNOWN.items():
        if config.get(key, harmless[0]) not in harmless:
            raise UserError(
                f"adapter {directory} has {key} {json.dumps(config[key])}, which ftkit cannot "
                "train on. Give another adapter, or none."
            )
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
    found = _config(directory).get("target_parameters") or []
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
    try:
        notes = json.loads(_header(directory).get(NOTES_KEY, "{}"))
    except (ValueError, TypeError) as error:
        raise _unreadable(directory / WEIGHTS, error) from error
    return notes if isinstance(notes, dict) else {}


def base_fingerprint(directory: Path) -> str | None:
    """Of the base model that an adapter was trained on; None: ftkit did not write it there."""
    found = _header(directory).get(BASE_KEY)
    return found if isinstance(found, str) else None


def _header(directory: Path) -> dict[str, Any]:
    """What the header of the weights says beside their names; {} where there is none."""
    path = directory / WEIGHTS
    if not path.is_file():
        return {}
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, 2**27)))
        found = header.get("__metadata__", {})
    except (OSError, ValueError, AttributeError) as error:
        raise _unreadable(path, error) from error
    return found if isinstance(found, dict) else {}


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(
        f"{path} cannot be read ({error}). Take the adapter from where it was saved again."
    )


def _config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(
            f"adapter is {directory}, but there is no {CONFIG}. Give the directory of a PEFT "
            "adapter, such as a run's final/."
        ) from None
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(content, dict):
        raise UserError(
            f"{path} holds no settings. Take the adapter from where it was saved again."
        )
    return content
