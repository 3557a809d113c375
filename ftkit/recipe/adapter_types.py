"""Kinds of adapters beside LoRA: their keys, and what each supports; no torch.

Keys and defaults are those of PEFT's configurations. PEFT's own layers compute them.
"""

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

LORA = "lora"
"""The type whose keys begin with lora_."""


@dataclass(frozen=True, kw_only=True)
class LoraOptions:
    """Options of `peft: lora`: there are none here, its keys begin with lora_."""


@dataclass(frozen=True, kw_only=True)
class VeraOptions:
    """Options of `peft: vera`."""

    r: int = 256
    """Rank of the two random matrices that all layers share."""
    vera_dropout: float = 0.0
    """Dropout before the adapter."""
    d_initial: float = 0.1
    """First value of the trained vectors of length r; those of the other kind begin at 0."""
    projection_prng_key: int | None = None
    """Seed of the random matrices. Default: seed."""
    save_projection: bool = True
    """Whether the result holds the random matrices. Without them, PEFT draws them again."""


@dataclass(frozen=True, kw_only=True)
class OftOptions:
    """Options of `peft: oft`."""

    # Without module_dropout, which PEFT 0.21 keeps for linear layers and does not apply.
    oft_block_size: int = 32
    """Inputs that are rotated together; 0: given by r. It divides the inputs of every layer."""
    r: int = 0
    """Number of blocks in a layer, instead of oft_block_size."""
    block_share: bool = False
    """Whether the blocks of a layer have the same rotation."""


@dataclass(frozen=True, kw_only=True)
class LohaOptions:
    """Options of `peft: loha`."""

    r: int = 8
    """Rank of both factors."""
    alpha: int = 8
    """Scale of the adapter: it is multiplied by alpha / r."""


@dataclass(frozen=True, kw_only=True)
class LokrOptions:
    """Options of `peft: lokr`."""

    r: int = 8
    """Rank of the large factor of the Kronecker product."""
    alpha: int = 8
    """Scale of the adapter: it is multiplied by alpha / r."""
    decompose_both: bool = False
    """Whether the small factor has this rank too."""
    decompose_factor: int = -1
    """Size of the small factor; -1: as near to the root of the layer's size as it divides it."""


@dataclass(frozen=True, kw_only=True)
class Ia3Options:
    """Options of `peft: ia3`."""

    feedforward_modules: list[str] | None = None
    """Adapted layers, by Hugging Face's names, whose inputs are scaled, and not their outputs.
    Default: the last layers of MLPs."""


@dataclass(frozen=True, kw_only=True)
class AdapterType:
    """A kind of adapter."""

    title: str
    """Its name in texts."""
    summary: str
    """What is trained, as a part of a sentence."""
    options: type[Any]
    """Its options, the keys below `peft`, with the names that PEFT has."""
    config: str = ""
    """PEFT's class of its settings, in the package of this name in `peft.tuners`."""
    model: str = ""
    """PEFT's class that adds its layers to a model."""
    parameters: tuple[str, ...] = ()
    """Beginnings of the names of its parameters."""
    of_packed: bool = True
    """Whether PEFT's layers take a quantised base layer."""
    of_training: tuple[str, ...] = ()
    """Options that the computed function does not depend on."""
    tunable: tuple[str, ...] = ()
    """Options that a resumed run may change."""
    least: Mapping[str, float] = field(default_factory=dict)
    """Least values of options."""
    below_1: tuple[str, ...] = ()
    """Options from 0 to below 1."""
    complete: Callable[[Any, Mapping[str, Any]], Any] | None = None
    """Makes options of those with defaults and those that are given, or refuses them by a
    UserError; None: all are as they are given."""
    refuse: Callable[[LoraRecipe], None] | None = None
    """Refuses, by a UserError, settings of a recipe that exclude each other; None: there are none
    of its own."""


def _complete_oft(options: OftOptions, given: Mapping[str, Any]) -> OftOptions:
    if options.r and "oft_block_size" not in given:
        options = dataclasses.replace(options, oft_block_size=0)  # PEFT wants that to be written
    if bool(options.r) == bool(options.oft_block_size):
        raise UserError(
            f"peft.oft_block_size is {options.oft_block_size} and peft.r is {options.r}, but one "
            "of them has to be 0: it follows from the other. Try --peft.r 0 "
            "--peft.oft_block_size 32."
        )
    return options


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


PEFT_TYPES = {
    LORA: AdapterType(
        title="LoRA",
        summary="low-rank matrices, by the keys lora_*",
        options=LoraOptions,
        parameters=("lora_",),
        refuse=_refuse_of_lora,
    ),
    "vera": AdapterType(
        title="VeRA",
        summary="two vectors for each layer, between random matrices that all layers share",
        options=VeraOptions,
        config="VeraConfig",
        model="VeraModel",
        parameters=("vera_lambda_",),
        of_training=("vera_dropout", "d_initial"),
        tunable=("vera_dropout",),
        least={"r": 1, "projection_prng_key": 0},
        below_1=("vera_dropout",),
    ),
    "oft": AdapterType(
        title="OFT",
        summary="rotations of the inputs of each layer, block by block",
        options=OftOptions,
        config="OFTConfig",
        model="OFTModel",
        parameters=("oft_R",),
        least={"r": 0, "oft_block_size": 0},
        complete=_complete_oft,
    ),
    "loha": AdapterType(
        title="LoHa",
        summary="the product, number by number, of two low-rank matrices",
        options=LohaOptions,
        config="LoHaConfig",
        model="LoHaModel",
        parameters=("hada_",),
        of_packed=False,
        least={"r": 1, "alpha": 1},
    ),
    "lokr": AdapterType(
        title="LoKr",
        summary="a Kronecker product of a small and a low-rank matrix",
        options=LokrOptions,
        config="LoKrConfig",
        model="LoKrModel",
        parameters=("lokr_",),
        of_packed=False,
        least={"r": 1, "alpha": 1},
    ),
    "ia3": AdapterType(
        title="(IA)3",
        summary="one factor for each output, or input, of a layer",
        options=Ia3Options,
        config="IA3Config",
        model="IA3Model",
        parameters=("ia3_l",),
    ),
}
"""Types by name: PEFT's, in lower case. A new one is a row and its options here, and its first
values in `ftkit.models.lora.peft_layers`."""

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
    return _type_of(recipe.peft)


def _type_of(component: Component) -> AdapterType:
    name: Any = component["class_path"]
    if name not in PEFT_TYPES:
        raise UserError(
            f"peft is {name!r}, but must be one of: {', '.join(PEFT_TYPES)}. "
            f"Try --peft {nearest(str(name), PEFT_TYPES) or LORA}."
        )
    return PEFT_TYPES[name]


def peft_options(component: Component) -> Any:
    """Return the options of a type of adapter, with defaults of those that are not given.

    Raises:
        UserError: unknown type or option, or a value that it cannot have.
    """
    name, given = component["class_path"], component["init_args"]
    row = _type_of(component)
    options = row.options
    kinds = typing.get_type_hints(options)
    for key, value in given.items():
        if key not in kinds:
            raise unknown_option("peft", str(key), name, kinds, "Its keys begin with lora_.")
        default = getattr(options(), key)
        if value is None or value == default:
            continue
        example = "'[down_proj]'" if kinds[key] == list[str] | None else default or 32
        if not _is_of(kinds[key], value):
            rule = describe(kinds[key])
        elif key in row.below_1 and not 0 <= value < 1:
            rule = "from 0 to below 1"
        elif key in row.least and value < row.least[key]:
            rule = f"at least {row.least[key]:g}"
        else:
            continue
        raise UserError(f"peft.{key} is {value!r}, but must be {rule}. Try --peft.{key} {example}.")
    found = options(**{key: value for key, value in given.items() if value is not None})
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
        check_packed(recipe)
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


def check_packed(lora: Lora) -> None:
    """Refuse a quantised base model below a type whose layers need the shape of its weights.

    Raises:
        UserError: names both.
    """
    if is_quantised(lora) and not peft_type(lora).of_packed:
        raise UserError(
            f"quantize is {lora.quantize} and peft is {peft_name(lora)}, whose layers in PEFT "
            "have the shape of the base layer's weight, which is packed. Try --quantize null, or "
            "--peft vera."
        )


def is_adapter(name: str) -> bool:
    """Return whether a parameter belongs to an adapter, of any type."""
    return any(f".{start}" in name for kind in PEFT_TYPES.values() for start in kind.parameters)
