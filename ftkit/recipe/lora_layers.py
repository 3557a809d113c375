"""Which layers a LoRA recipe adapts, and the defaults that depend on it.

A recipe that names no layers adapts all linear ones. One that names layers has LitGPT's defaults
for the rest, so that LitGPT's recipes mean here what they mean there.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ftkit.recipe.recipe import ALL_LINEAR, LAYER_SWITCHES, Lora, LoraRecipe, Recipe

NAMED_LAYERS: dict[str, Any] = {"lora_targets": None, "lora_r": 8, "lora_alpha": 16}
"""Defaults of recipes that name layers. Earlier versions of ftkit had them for all recipes."""


def names_layers(given: Mapping[str, Any]) -> bool:
    """Return whether the keys that a recipe sets name the layers to adapt."""
    if (targets := given.get("lora_targets")) is not None:
        return bool(targets != ALL_LINEAR)
    return any(key in given for key in LAYER_SWITCHES)


def names_no_layers(lora: Lora) -> bool:
    """Return whether layers, rank and scale are the defaults of a recipe that names no layers."""
    defaults = {field.name: field.default for field in dataclasses.fields(Lora)}
    return all(getattr(lora, key) == defaults[key] for key in NAMED_LAYERS)


def adapted_text(lora: Lora) -> str:
    """What is adapted, in words: 'all linear layers, rank 16, alpha 32'."""
    targets = lora.lora_targets
    if targets == ALL_LINEAR:
        layers = "all linear layers"
    elif targets is None:
        chosen = [key for key in LAYER_SWITCHES if getattr(lora, key)]
        layers = ", ".join(key.removeprefix("lora_") for key in chosen)
    else:
        layers = targets if isinstance(targets, str) else ", ".join(targets)
    parts = [layers, "experts" * lora.lora_experts]
    if lora.peft["class_path"] == "lora":
        parts += [f"rank {lora.lora_r}", f"alpha {lora.lora_alpha:g}"]
    else:
        parts += [lora.peft["class_path"], *(f"{k} {v}" for k, v in lora.peft["init_args"].items())]
    return ", ".join(filter(None, parts))


def kept_from(saved: Recipe, now: Recipe) -> dict[str, Any]:
    """Keys in which a run keeps the earlier defaults, with which it began.

    A recipe does not know which of its keys were given, so a default counts as not given.

    Args:
        saved: recipe of the run.
        now: recipe with which the run is asked for again.

    Returns:
        The values of the run, by key; `now` has today's defaults in their place.
    """
    if not (isinstance(saved, LoraRecipe) and isinstance(now, LoraRecipe)):
        return {}
    defaults = {field.name: field.default for field in dataclasses.fields(LoraRecipe)}
    return {
        key: earlier
        for key, earlier in NAMED_LAYERS.items()
        if getattr(saved, key) == earlier and getattr(now, key) == defaults[key]
    }
