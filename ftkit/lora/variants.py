"""LoRA variants: what DoRA, PiSSA and OLoRA compute beside plain LoRA, and their merged weights.

DoRA: Liu et al. 2024, https://arxiv.org/abs/2402.09353. PiSSA: https://arxiv.org/abs/2404.02948.
OLoRA: https://arxiv.org/abs/2406.01775.
"""

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ftkit.lora.names import INITIAL


class Magnitude(nn.Module):
    """DoRA's trained length of each row of a weight."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows))

    def forward(self, result: Tensor, norms: Tensor) -> Tensor:
        """The result of rows of the length `norms`, had they the trained lengths."""
        return result * (self.weight / norms.to(self.weight.dtype)).to(result.dtype)


class Dora:
    """DoRA for every layer and strategy that ftkit has, as a variant of PEFT's LoRA layers.

    PEFT's own reads bitsandbytes' parameters and multiplies by the base weight a second time if
    there is dropout. Here dropout is on the input of the low-rank matrices alone; without it, and
    in evaluation, the results are PEFT's.
    """

    @staticmethod
    def forward(
        module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any
    ) -> Tensor:
        """The layer's result with adapted directions and trained lengths of the rows."""
        a, b = module.lora_A[active_adapter], module.lora_B[active_adapter]
        scaling = module.scaling[active_adapter]
        update = b(a(module.lora_dropout[active_adapter](x))) * scaling
        base = module.get_base_layer()
        bias = base.bias
        norms = row_norms(numbers_of(base), a.weight, b.weight, scaling)
        magnitude = module.lora_magnitude_vector[active_adapter]
        if bias is None:
            return magnitude(result + update, norms)
        return magnitude(result - bias + update, norms) + bias


class FromInitial:
    """LoRA relative to its first values, as a variant of PEFT's LoRA layers (PiSSA, OLoRA).

    Taking the first product off the base weight would round that weight, and would have to be
    repeated exactly wherever training goes on. Taking it off the result is the same in exact
    arithmetic, starts at the base model in every number format, on shards and quantised weights
    too, and is what a PEFT adapter of the original model needs.
    """

    @staticmethod
    def forward(
        module: Any, active_adapter: str, x: Tensor, result: Tensor, **kwargs: Any
    ) -> Tensor:
        """The layer's result with what its low-rank product has changed."""
        a, b, dropout = module.lora_A, module.lora_B, module.lora_dropout[active_adapter]
        trained = b[active_adapter](a[active_adapter](dropout(x)))
        difference: Tensor = trained - b[INITIAL](a[INITIAL](x))
        return result + difference * module.scaling[active_adapter]


def numbers_of(layer: Any) -> Tensor:
    """[out, in], the weight of a linear layer, unpacked if it is quantised."""
    weight: Tensor = layer.weight
    return layer.unpacked(weight) if hasattr(layer, "unpacked") else weight


@torch.no_grad()
def row_norms(weight: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """[out] float32, the lengths of the rows of an adapted weight; no gradient, as in the paper."""
    with torch.autocast(weight.device.type, enabled=False):
        adapted = torch.addmm(weight.float(), b.float(), a.float(), alpha=scaling)
        return torch.linalg.vector_norm(adapted, dim=1)


@torch.no_grad()
def merged(
    weight: Tensor, a: Tensor, b: Tensor, scaling: float, magnitude: Tensor | None
) -> Tensor:
    """[out, in] float32, the weight of a plain layer that computes what an adapted one does.

    Args:
        weight: [out, in], the base layer's.
        a: [rank, in].
        b: [out, rank].
        scaling: of their product.
        magnitude: [out], DoRA's trained lengths of the rows; None: not DoRA.
    """
    adapted = torch.addmm(weight.float(), b.float(), a.float(), alpha=scaling)
    if magnitude is not None:
        lengths = torch.linalg.vector_norm(adapted, dim=1)
        adapted *= (magnitude.float() / lengths)[:, None]
    return adapted
