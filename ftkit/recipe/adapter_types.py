"""Types of adapters: the registry, the options of each, and what it supports; no torch."""

import dataclasses
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ftkit.errors import UserError
from ftkit.recipe.facts import Facts
from ftkit.recipe.lora_layers import NAMED_LAYERS
from ftkit.recipe.objectives import objective_rules
from ftkit.recipe.quantizations import is_quantised
from ftkit.recipe.recipe import (
    ALL_LINEAR,
    LAYER_SWITCHES,
    PEFT_DEFAULT,
    Component,
    Lora,
    LoraRecipe,
)
from ftkit.recipe.recipe_keys import accepted_types, describe
from ftkit.utils.names import nearest, unknown_option
from ftkit.utils.registry import Registry

LORA = "lora"
"""The type whose keys begin with lora_."""


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Options of `peft: lora`: there are none here, its keys begin with lora_."""


@dataclass(frozen=True, kw_only=True)
class AdapterType:
    """A type of adapter that PEFT's layers compute, by PEFT's name in lower case."""

    name: str
    title: str
    """Its name in texts."""
    summary: str
    """What is trained, as a part of a sentence."""
    class_path: str
    """Module and class of its layers, a `PeftLayers` of `ftkit.models.lora.peft_layers`: imported
    only where such an adapter is used, because it needs torch."""
    options: type[Any]
    """Its options, the keys below `peft`, with the names that PEFT has."""
    parameters: tuple[str, ...]
    """Beginnings of the names of its parameters."""
    of_training: tuple[str, ...] = ()
    """Options that the computed function does not depend on."""
    tunable: tuple[str, ...] = ()
    """Options that a resumed run may change."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Options that are sizes in layers, with the least value of each."""
    below_1: tuple[str, ...] = ()
    """Options from 0 to below 1."""
    complete: Callable[[Any, Mapping[str, Any]], Any] | None = None
    """Makes options of those with defaults and those that are given, or refuses them by a
    UserError; None: all are as they are given."""
    refuse: Callable[[LoraRecipe], None] | None = None
    """Refuses, by a UserError, settings of a recipe that exclude each other; None: there are none
    of its own."""
    in_peft: Mapping[str, Any] = field(default_factory=dict)
    """PEFT's defaults of the options that have others here."""
    changing: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Settings of PEFT beside the options that change what an adapter computes, with the values,
    beside null, that do not."""
    neutral: tuple[str, ...] = ()
    """Settings of PEFT beside the options that change no number of a saved adapter."""

    def rule_for(self, option: str, value: Any) -> str | None:
        """Return what the value of an option has to be; None: it is that."""
        kind = typing.get_type_hints(self.options)[option]
        if not _is_of(kind, value):
            return describe(kind)
        if option in self.below_1 and not 0 <= value < 1:
            return "from 0 to below 1"
        if option in self.sizes and value < self.sizes[option]:
            return f"at least {self.sizes[option]}"
        return None


def _refuse_of_lora(recipe: LoraRecipe) -> None:
    """Refuse settings of LoRA that exclude each other."""
    if recipe.lora_r < 1:
        raise UserError(f"lora_r is {recipe.lora_r}, but must be at least 1. Try --lora_r 8.")
    if recipe.lora_variant == "dora" and recipe.lora_init != "default":
        raise UserError(
            f"lora_init is {recipe.lora_init}, but lora_variant dora starts from the lengths of "
            "the base model's own rows. Try --lora_init default."
        )
    if recipe.lora_init == "loftq":
        _check_loftq(recipe)
    if recipe.lora_experts:
        _check_experts(recipe)


def _check_loftq(recipe: LoraRecipe) -> None:
    """Refuse LoftQ where nothing is quantised, or the model below the adapter is compared with."""
    if not is_quantised(recipe):
        raise UserError(
            "lora_init is loftq, which begins with what quantisation has changed in the weights, "
            f"but quantize is {recipe.quantize or 'not set'}. Try --quantize bnb.nf4."
        )
    if objective_rules(recipe.objective).needs_reference and recipe.reference is None:
        raise UserError(
            f"lora_init is loftq, but objective is {recipe.objective['class_path']}, which "
            "compares with the model below the adapter, and loftq does not begin at that. Try "
            "--lora_init default."
        )


def _check_experts(recipe: LoraRecipe) -> None:
    """Refuse settings that PEFT does not have for adapters of experts."""
    for key, value, known in (
        ("lora_dropout", f"{recipe.lora_dropout:g}", ["0"]),
        ("lora_variant", recipe.lora_variant, ["lora", "rslora"]),
        ("lora_init", recipe.lora_init, ["default"]),
    ):
        if value not in known:
            raise UserError(
                f"{key} is {value}, but lora_experts is true, and a PEFT adapter of experts only "
                f"supports {' and '.join(known)}. Try --{key} {known[0]}, or --lora_experts false."
            )


ADAPTER_TYPES = Registry(
    "adapter_types",
    (AdapterType,),
    core=[
        AdapterType(
            name=LORA,
            title="LoRA",
            summary="low-rank matrices, by the keys lora_*",
            class_path="ftkit.models.lora.lora_type.LoraLayers",
            options=LoraOptions,
            parameters=("lora_",),
            refuse=_refuse_of_lora,
        ),
    ],
)
"""Types by name. A new one is a row with its options, and the class of its layers."""

_OF_LORA = (
    *("lora_r", "lora_alpha", "lora_dropout", "lora_experts", "lora_variant", "lora_init"),
    "lora_plus_ratio",
)
"""Keys of LoRA alone. All types share those that choose layers, `lora_modules_to_save`, `quantize`
and `adapter`."""


def peft_name(recipe: Lora) -> str:
    """Return the name of a recipe's type of adapter."""
    return recipe.peft["class_path"]


def method_text(method: str, peft: Any) -> str:
    """Return the method of a run in texts: full, lora, or another type of adapter.

    Args:
        method: of the run.
        peft: the key of its recipe; None: there is none, as in earlier versions.
    """
    is_named = method == "lora" and peft is not None
    return str(peft["class_path"]) if is_named else method


def peft_type(recipe: Lora) -> AdapterType:
    """Return a recipe's type of adapter."""
    return type_of(recipe.peft)


def type_of(component: Component) -> AdapterType:
    """Return the type of adapter that a component names.

    Raises:
        UserError: there is none of this name.
    """
    name: Any = component["class_path"]
    row = ADAPTER_TYPES.get(name) if isinstance(name, str) else None
    if row is None:
        known = ADAPTER_TYPES.names
        raise UserError(
            f"peft is {name!r}, but must be one of: {', '.join(known)}. "
            f"Try --peft {nearest(str(name), known) or LORA}."
        )
    return row


def type_title(name: str) -> str:
    """Return the name in texts of a type of adapter; one that is not here is called by its name."""
    row = ADAPTER_TYPES.get(name)
    return name if row is None else row.title


def peft_options(component: Component) -> Any:
    """Return the options of a type of adapter, with defaults of those that are not given.

    Raises:
        UserError: unknown type or option, or a value that it cannot have.
    """
    name, given = component["class_path"], component["init_args"]
    row = type_of(component)
    kinds = typing.get_type_hints(row.options)
    for key, value in given.items():
        if key not in kinds:
            raise unknown_option("peft", str(key), name, kinds, "Its keys begin with lora_.")
        default = getattr(row.options(), key)
        if value is None or value == default or (rule := row.rule_for(key, value)) is None:
            continue
        example = "'[down_proj]'" if kinds[key] == list[str] | None else default or 32
        raise UserError(f"peft.{key} is {value!r}, but must be {rule}. Try --peft.{key} {example}.")
    found = row.options(**{key: value for key, value in given.items() if value is not None})
    return found if row.complete is None else row.complete(found, given)


def _is_of(kind: Any, value: Any) -> bool:
    """Return whether an option of a kind may have a value."""
    (accepted,) = accepted_types(kind)
    if accepted == list[str]:
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    if accepted is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is accepted  # true is an int in Python


def check_peft(recipe: LoraRecipe) -> None:
    """Refuse settings that adapters, or a recipe's type of them, do not have.

    Raises:
        UserError: names the key.
    """
    kind, name = peft_type(recipe), peft_name(recipe)
    peft_options(recipe.peft)
    if name != LORA:
        _check_no_lora(recipe)
    for key, pattern in (("only", recipe.train.only), ("freeze", recipe.train.freeze)):
        if pattern is not None:
            raise UserError(
                f"train.{key} is {pattern!r}, but LoRA freezes the whole base model. Choose the "
                "layers that it adapts with --lora_targets, train a part of the model itself with "
                f"ftkit finetune_full, or remove it with --train.{key} null."
            )
    if recipe.lora_targets == PEFT_DEFAULT and name != LORA:
        raise UserError(
            f"lora_targets is {PEFT_DEFAULT}, which names layers for LoRA, but peft is {name}. Try "
            f"--lora_targets {ALL_LINEAR}."
        )
    if recipe.added_tokens and recipe.lora_targets is None and recipe.lora_head:
        raise UserError(
            "lora_head is true, but data.add_tokens trains the head itself, with rows for the new "
            "tokens. Try --lora_head false."
        )
    if kind.refuse is not None:
        kind.refuse(recipe)
    if recipe.lora_experts:
        return
    if recipe.lora_targets is not None:
        if not recipe.lora_targets:
            raise UserError(
                "lora_targets is empty: no layer is adapted. Try --lora_targets '[q_proj, v_proj]'."
            )
        return
    if not any(getattr(recipe, layer) for layer in LAYER_SWITCHES):
        raise UserError(
            "No layer is adapted: every one of lora_query, lora_key, lora_value, lora_projection, "
            "lora_mlp and lora_head is false. Try --lora_query true --lora_value true."
        )


def _check_no_lora(recipe: LoraRecipe) -> None:
    """Refuse keys of LoRA alone with another type."""
    defaults = {field.name: field.default for field in dataclasses.fields(recipe)}
    # A default counts as not set, because the recipe does not know which keys were given.
    given = {
        key: value
        for key in _OF_LORA
        if (value := getattr(recipe, key)) not in (defaults[key], NAMED_LAYERS.get(key))
    }
    if given:
        shown = ", ".join(f"{key} is {value}" for key, value in given.items())
        kind, name = peft_type(recipe), peft_name(recipe)
        of_type = ", ".join(f"peft.{field.name}" for field in dataclasses.fields(kind.options))
        raise UserError(
            f"{shown}, but peft is {name}, which has keys of its own: {of_type}. Try "
            + " ".join(f"--{key} null" for key in given)
            + "."
        )


def check_targets(facts: Facts) -> list[str]:
    """Return notices about layer switches that lora_targets overrides."""
    recipe = facts.recipe
    if not isinstance(recipe, LoraRecipe) or recipe.lora_targets is None:
        return []
    defaults = {field.name: field.default for field in dataclasses.fields(recipe)}
    ignored = [key for key in LAYER_SWITCHES if getattr(recipe, key) != defaults[key]]
    return [f"lora_targets chooses the layers: {', '.join(ignored)} has no effect."] * bool(ignored)


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter, of any type."""
    rows = (*ADAPTER_TYPES, *ADAPTER_TYPES.opened.values())
    return any(f".{start}" in name for row in rows for start in row.parameters)
