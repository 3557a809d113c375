"""Linear layers of torchao: products of float8 numbers, and weights rounded in training (QAT).

Float8: Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433. Quantisation-aware training:
Jacob et al. 2018, https://arxiv.org/abs/1712.05877.

Every scale belongs to a token or to the whole weight, never to the tokens of a micro-batch, so that
losses are the same on every layout.

Private parts that are used here, as they are in torchao 0.18: `Float8Linear` with its attributes,
`matmul_with_hp_or_float8_args`, `LinearMMConfig` and `ScaledMMConfig`.
"""

from dataclasses import replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torchao.core.config import AOBaseConfig
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear, matmul_with_hp_or_float8_args
from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig
from torchao.quantization import (
    Int8DynamicActivationIntxWeightConfig,
    IntxWeightOnlyConfig,
    PerAxis,
    PerGroup,
    quantize_,
)
from torchao.quantization.qat import QATConfig

from ftkit.errors import UserError
from ftkit.extensions.torchao.keys import Qat, RoundingKeys
from ftkit.models.bodies.body import Body
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.recipe.recipe import Recipe
from ftkit.recipe.recipe_sections import keys_of

FLOAT8_WIDTHS = 16
"""Kernels of float8 take matrices whose sides are multiples of it."""
_EMULATED = LinearMMConfig(*[ScaledMMConfig(emulate=True)] * 3)
"""Products of float32 numbers that were rounded to float8."""


class _Float8Layer(Float8Linear):  # type: ignore[misc]
    """A linear layer whose products are of float8 numbers in training."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (as torch names it)
        # What is served has the weights themselves.
        if not self.training:
            return F.linear(input, self.weight, self.bias)
        kind = input.device.type
        # torchao's own forward only looks at autocast of CUDA.
        if torch.is_autocast_enabled(kind):
            input = input.to(torch.get_autocast_dtype(kind))  # noqa: A001
        # Kernels give results in bfloat16 alone, in which sums of another order differ by more.
        is_exact = input.dtype == torch.float32
        how = _EMULATED if is_exact else self.linear_mm_config
        with torch.autocast(kind, enabled=False):
            product: Tensor = matmul_with_hp_or_float8_args.apply(
                input, self.weight.t(), how, self.config
            )
            return product if self.bias is None else product + self.bias.to(product.dtype)


def round_layers(body: Body, base: BaseModel, recipe: Recipe, trains: bool) -> None:
    """Replace the linear layers of the blocks by those that a recipe asks for.

    Args:
        body: on the meta device; its parameters keep their names.
        base: the model that it computes.
        recipe: with float8 or qat.
        trains: False: it computes a result.

    Raises:
        UserError: torchao does not round such layers, or the result could not be written.
    """
    keys = keys_of(recipe, RoundingKeys)
    if trains and keys.float8:
        compute_in_float8(body)
        return
    if trains:
        _require_text_alone(base, keys.qat)
    round_in_forward(body, keys.qat)


def compute_in_float8(body: Body) -> None:
    """Replace the linear layers of the blocks by those that multiply float8 numbers.

    Args:
        body: on the meta device.

    Raises:
        UserError: it has experts, or no layer of the right widths.
    """
    # torchao's recipe with gradients of weights in high precision: the others scale a gradient and
    # an input by the largest number of all tokens in a micro-batch. Its scales are rounded to
    # powers of two; these are not, because a loss is multiplied by the number of ranks, and three
    # times a gradient would be rounded otherwise than the gradient.
    config = replace(
        Float8LinearConfig.from_recipe_name("rowwise_with_gw_hp"), round_scales_to_power_of_2=False
    )
    layers = {
        name: layer
        for name, layer in _linear_layers(body, "float8 is true", "--float8 false").items()
        if layer.in_features % FLOAT8_WIDTHS == 0 and layer.out_features % FLOAT8_WIDTHS == 0
    }
    if not layers:
        raise UserError(
            "float8 is true, but no linear layer in the blocks has widths that are multiples of "
            f"{FLOAT8_WIDTHS}. Try --float8 false."
        )
    for name, layer in layers.items():
        body.blocks.set_submodule(name, _Float8Layer.from_float(layer, config))


def qat_config(qat: Qat) -> AOBaseConfig:
    """Description, for torchao, of what a model is rounded to."""
    assert qat.weights is not None
    dtype = getattr(torch, qat.weights)
    granularity = PerAxis(0) if qat.group_size is None else PerGroup(qat.group_size)
    if qat.activations is None:
        return IntxWeightOnlyConfig(weight_dtype=dtype, granularity=granularity)
    return Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=granularity)


def _require_text_alone(base: BaseModel, qat: Qat) -> None:
    """Refuse to train a model for a form in which it cannot be written.

    Raises:
        UserError: it has parts beside its language model.
    """
    # Their files have other names than transformers' modules, by which torchao's form is read.
    if base.architecture.rest_shapes:
        raise UserError(
            f"qat.weights is {qat.weights}, but {base.name} has parts beside its language model, "
            "and such a model is not exported with rounded weights. Try --qat.weights null."
        )


def round_in_forward(body: Body, qat: Qat) -> None:
    """Replace the linear layers of the blocks by those that round weights and inputs.

    Args:
        body: its parameters keep their names.
        qat: what they are rounded to.

    Raises:
        UserError: the model has experts, or a layer whose rows do not divide into groups.
    """
    layers = _linear_layers(body, f"qat.weights is {qat.weights}", "--qat.weights null")
    for name, layer in layers.items():
        if qat.group_size is not None and layer.in_features % qat.group_size:
            # The largest power of two that divides the width.
            fitting = layer.in_features & -layer.in_features
            raise UserError(
                f"qat.group_size is {qat.group_size}, but the rows of {name} have "
                f"{layer.in_features} weights, which do not divide into such "
                f"groups. Try --qat.group_size {min(fitting, 32) if fitting > 1 else 'null'}."
            )
    prepare = QATConfig(qat_config(qat), step="prepare")
    quantize_(body.blocks, prepare, filter_fn=lambda _, name: name in layers)


def _linear_layers(body: Body, setting: str, off: str) -> dict[str, nn.Linear]:
    """Linear layers by their names in the blocks.

    Args:
        body: of the model.
        setting: what is refused, in words.
        off: the option that switches it off.
    """
    names = {name.rpartition(".")[2] for name, _ in body.blocks.named_modules()}
    if "experts" in names:
        raise UserError(
            f"{setting}, but this model has experts, whose matrices torchao's layers do not "
            f"compute. Try {off}."
        )
    return {
        name: layer
        for name, layer in body.blocks.named_modules()
        # Exactly nn.Linear: subclasses compute something else, too.
        if type(layer) is nn.Linear and name not in body.kept_in_full
    }
