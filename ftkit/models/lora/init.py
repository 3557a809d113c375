"""Initial values of LoRA adapters: random as PEFT draws them, PiSSA, OLoRA; DoRA's magnitudes.

PiSSA: Meng et al. 2024, https://arxiv.org/abs/2404.02948. OLoRA: Büyükakyüz 2024,
https://arxiv.org/abs/2406.01775.
"""

import math
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ftkit.models.lora.names import INITIAL, TRAINED
from ftkit.recipe.recipe import LoraRecipe


def initial_adapter(name: str, shape: torch.Size, seed: int) -> Tensor:
    """The first values of a LoRA matrix, the same on every device and layout.

    A is drawn as PEFT draws it (Kaiming-uniform), B is zero, so that training starts at the base
    model. Each matrix has a generator of its own: no other matrix changes its values. They are
    float32 whatever the precision of the run, in which other numbers would be drawn.
    """
    if ".lora_B." in name:
        return torch.zeros(shape, dtype=torch.float32, device="cpu")
    generator = torch.Generator(device="cpu").manual_seed(seed ^ zlib.crc32(name.encode()))
    matrix = torch.empty(shape, dtype=torch.float32, device="cpu")
    # Those of experts are one after the other, as PEFT has them.
    nn.init.kaiming_uniform_(matrix.flatten(0, -2), a=math.sqrt(5), generator=generator)
    return matrix


def follows_from_base(name: str, recipe: LoraRecipe) -> bool:
    """Whether the first values of an adapter's parameter depend on the base weight."""
    return recipe.lora_init != "default" or ".lora_magnitude_vector." in name


def adapter_from_base(weight: Tensor, layer: Any, recipe: LoraRecipe) -> Mapping[str, Tensor]:
    """First values that follow from the base weight, by the end of the parameter's name.

    Args:
        weight: [out, in], what the layer computes with.
        layer: that is adapted.
        recipe: its LoRA keys.
    """
    numbers = weight.float()
    if recipe.lora_variant == "dora":
        return {f"lora_magnitude_vector.{TRAINED}.weight": torch.linalg.vector_norm(numbers, dim=1)}
    rank, scaling = recipe.lora_r, layer.scaling[TRAINED]
    if recipe.lora_init == "pissa":
        left, values, right = torch.linalg.svd(numbers, full_matrices=False)
        root = (values[:rank] / scaling).sqrt()
        a, b = root[:, None] * right[:rank], left[:, :rank] * root
    else:
        q, r = torch.linalg.qr(numbers)
        a, b = r[:rank], q[:, :rank]
    return {
        f"lora_{matrix}.{adapter}.weight": tensor
        for matrix, tensor in (("A", a), ("B", b))
        for adapter in (TRAINED, INITIAL)
    }
