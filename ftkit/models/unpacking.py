"""Frozen linear layers whose weight is packed and is unpacked for each use.

The packed weight is a parameter. What unpacks it, such as scales, is whole on every rank.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from ftkit.models.bodies.experts import packed_in


class _FrozenProduct(torch.autograd.Function):
    """Input times the weight of a packed layer, with a gradient for the input alone."""

    # bitsandbytes' own function keeps a view of the packed weight for the backward pass. Under
    # ZeRO-3 that view would keep the gathered weights of all layers alive; the parameter itself is
    # saved here, because DeepSpeed frees and gathers its content.

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: "UnpackedPerUse"
    ) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(weight)
        return layer.product(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,) = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ ctx.layer.unpacked(weight).to(gradient.dtype), None, None, None


class UnpackedPerUse(nn.Linear):
    """A linear layer with a packed weight, which has no gradient.

    Its result has the dtype of the computation, like that of a layer under autocast.
    """

    compute_dtype: torch.dtype
    """Of the arithmetic."""
    takes_stored = False
    """Whether it packs what files hold, as `weights_as_stored` reads it, and no plain weight."""
    device_kind: str | None = None
    """Kind of device that a fake weight stands for; None: it is real."""

    def allocate(self, device: torch.device) -> None:
        """Allocate what unpacks the weight, if it is to lie apart from temporaries of packing."""

    @abstractmethod
    def pack(self, value: Any) -> Tensor:
        """Keep what unpacks a weight, and return the packed tensor.

        Args:
            value: the weight, on the device of the computation.
        """

    @abstractmethod
    def unpacked(self, weight: Tensor) -> Tensor:
        """Unpack a weight to [out, in], in the dtype of the computation."""

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Result of the layer, without a gradient."""
        return F.linear(x, self.unpacked(weight), bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.compute_dtype)
        result: Tensor = _FrozenProduct.apply(x, self.weight, self.bias, self)
        return result


def allocate_scales(model: nn.Module, device: torch.device) -> None:
    """Allocate the scales of all packed weights of a model."""
    for layer in model.modules():
        if isinstance(layer, UnpackedPerUse):
            layer.allocate(device)
        for matrices in packed_in(layer).values():
            matrices.allocate(device)


def held_as_stored(model: nn.Module) -> Iterator[str]:
    """Yield the names of the parameters that a model holds as the files of its base do."""
    for name, module in model.named_modules():
        if isinstance(module, UnpackedPerUse) and module.takes_stored:
            yield f"{name}.weight"
        for kind, matrices in packed_in(module).items():
            if matrices.takes_stored:
                yield f"{name}.{kind}"


def packed(model: nn.Module, name: str, value: Any, device: torch.device) -> Tensor:
    """Return the tensor that a parameter of the model holds for a weight of the base model.

    Args:
        model: with packed layers.
        name: of the parameter.
        value: the whole weight, as the files hold it for layers that take it so; every rank passes
            the same and gets the same.
        device: of the computation.
    """
    owner, _, kind = name.rpartition(".")
    layer = model.get_submodule(owner)
    if kind == "weight" and isinstance(layer, UnpackedPerUse):
        return layer.pack(value.to(device))
    if matrices := packed_in(layer).get(kind):
        pack: Callable[[Any, torch.device], Tensor] = matrices.pack  # each takes its own form
        return pack(value, device)
    assert isinstance(value, Tensor), "nothing else takes a weight as the files hold it"
    return value
