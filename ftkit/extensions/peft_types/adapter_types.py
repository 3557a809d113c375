"""Types of adapters beside LoRA: their options, and what each supports.

Options and defaults are those of PEFT's configurations.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ftkit.errors import UserError
from ftkit.recipe.adapter_types import AdapterType, peft_name
from ftkit.recipe.quantizations import is_quantised
from ftkit.recipe.recipe import Lora


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


def _complete_vera(options: VeraOptions, given: Mapping[str, Any]) -> VeraOptions:
    if (options.projection_prng_key or 0) < 0:
        raise UserError(
            f"peft.projection_prng_key is {options.projection_prng_key}, but must be at least 0. "
            "Try --peft.projection_prng_key 32."
        )
    return options


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


def check_packed(lora: Lora) -> None:
    """Refuse a quantised base model below a type whose layers need the shape of its weights.

    Raises:
        UserError: names both.
    """
    if is_quantised(lora):
        raise UserError(
            f"quantize is {lora.quantize} and peft is {peft_name(lora)}, whose layers in PEFT "
            "have the shape of the base layer's weight, which is packed. Try --quantize null, or "
            "--peft vera."
        )


_LAYERS = "ftkit.extensions.peft_types.layers"
ROWS = (
    AdapterType(
        name="vera",
        title="VeRA",
        summary="two vectors for each layer, between random matrices that all layers share",
        class_path=f"{_LAYERS}.Vera",
        options=VeraOptions,
        parameters=("vera_lambda_",),
        of_training=("vera_dropout", "d_initial"),
        tunable=("vera_dropout",),
        sizes={"r": 1},
        below_1=("vera_dropout",),
        complete=_complete_vera,
        in_peft={"projection_prng_key": 0},
        neutral=("init_weights",),
    ),
    AdapterType(
        name="oft",
        title="OFT",
        summary="rotations of the inputs of each layer, block by block",
        class_path=f"{_LAYERS}.Oft",
        options=OftOptions,
        parameters=("oft_R",),
        sizes={"r": 0, "oft_block_size": 0},
        complete=_complete_oft,
        changing={
            "coft": (False,),
            "use_cayley_neumann": (True,),
            "num_cayley_neumann_terms": (5,),
        },
        neutral=("eps", "init_weights", "module_dropout"),
    ),
    AdapterType(
        name="loha",
        title="LoHa",
        summary="the product, number by number, of two low-rank matrices",
        class_path=f"{_LAYERS}.Loha",
        options=LohaOptions,
        parameters=("hada_",),
        sizes={"r": 1, "alpha": 1},
        refuse=check_packed,
        changing={"use_effective_conv2d": (False,)},
        neutral=("init_weights", "module_dropout", "rank_dropout"),
    ),
    AdapterType(
        name="lokr",
        title="LoKr",
        summary="a Kronecker product of a small and a low-rank matrix",
        class_path=f"{_LAYERS}.Lokr",
        options=LokrOptions,
        parameters=("lokr_",),
        sizes={"r": 1, "alpha": 1},
        refuse=check_packed,
        changing={"use_effective_conv2d": (False,)},
        neutral=("init_weights", "module_dropout", "rank_dropout", "rank_dropout_scale"),
    ),
    AdapterType(
        name="ia3",
        title="(IA)3",
        summary="one factor for each output, or input, of a layer",
        class_path=f"{_LAYERS}.Ia3",
        options=Ia3Options,
        parameters=("ia3_l",),
        in_peft={"feedforward_modules": []},
        neutral=("init_ia3_weights",),
    ),
)
