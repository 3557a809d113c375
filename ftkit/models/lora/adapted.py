"""A frozen linear layer with plain LoRA, computed as one operation forwards and backwards."""

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from peft.tuners.lora import Linear
from torch import Tensor

from ftkit.models.lora.targets import TRAINED
from ftkit.models.loss import autocast_dtype
from ftkit.models.token_numbers import TokenDropout, dropped
from ftkit.models.unpacking import UnpackedPerUse


class AdaptedLinear(Linear):
    """PEFT's layer around a plain linear layer, or one whose weight is packed.

    Around others, such as those whose weight hooks gather (ZeRO-3), and without its adapter, it is
    PEFT's own.
    """

    # Autograd would write the gradient of the input once for the layer and once for the adapter,
    # and add both: one operation adds them within a product, and a step has fewer launches.

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Compute [..., out] of [..., in]."""
        base: Any = self.base_layer
        dropout: Any = self.lora_dropout[TRAINED]
        matrix, second = (of[TRAINED].weight for of in (self.lora_A, self.lora_B))
        packed = base if isinstance(base, UnpackedPerUse) else None
        dtype = base.weight.dtype if packed is None else packed.compute_dtype
        if autocast_dtype(x.device.type) is not None:
            is_one_dtype = packed is None or dtype == autocast_dtype(x.device.type)
        else:
            is_one_dtype = dtype == matrix.dtype == x.dtype
        is_known = packed is not None or type(base) is nn.Linear
        has_hooks = base._forward_pre_hooks or base._forward_hooks
        if not is_known or has_hooks or not is_one_dtype or self.disable_adapters:
            result: Tensor = super().forward(x, *arguments, **options)
            return result
        drops = dropout.training and isinstance(dropout, TokenDropout)
        adapted: Tensor = _Adapted.apply(
            x,
            packed,
            base.weight,
            base.bias,
            matrix,
            second,
            self.scaling[TRAINED],
            dropout.kept(x) if drops else None,
            1 / (1 - dropout.p) if drops else 1.0,
        )
        return adapted


class _Adapted(torch.autograd.Function):
    """x W' + bias + scaling (x dropped A') B', with gradients of x, A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        packed: UnpackedPerUse | None,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor,
        b: Tensor,
        scaling: float,
        kept: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Compute [..., out].

        Args:
            ctx: of autograd.
            x: [..., in].
            packed: the layer that unpacks the weight; None: it is as it is.
            weight: [out, in], or packed; frozen.
            bias: [out], frozen.
            a: [rank, in].
            b: [out, rank].
            scaling: of their product.
            kept: like x, the mask of dropout; None: nothing is dropped.
            scale: of the numbers that are kept.
        """
        kind = x.device.type
        dtype = autocast_dtype(kind) or x.dtype
        ctx.packed, ctx.scaling, ctx.scale = packed, scaling, scale
        ctx.dtypes = x.dtype, a.dtype, b.dtype
        rows, a, b = x.flatten(0, -2).to(dtype), a.to(dtype), b.to(dtype)
        bias = None if bias is None else bias.to(dtype)
        if packed is None:
            weight = weight.to(dtype)
            result = F.linear(rows, weight, bias)
        else:
            result = packed.product(rows, weight, bias)
        narrow = F.linear(rows if kept is None else dropped(rows, kept.view_as(rows), scale), a)
        if kept is not None and kind == "cpu":
            narrow.mul_(scale)  # narrow, so that nothing wide is scaled
        result.addmm_(narrow, b.t(), alpha=scaling)
        # All adapters of an input keep the same tensor; cast or after dropout, each its own.
        ctx.save_for_backward(x, weight, a, b, narrow, kept)
        # Callers may add to it in place, which autograd refuses on a view made in here.
        return torch.ops.aten._unsafe_view(result, (*x.shape[:-1], result.shape[-1]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b, narrow, kept = ctx.saved_tensors
        of_x_dtype, of_a_dtype, of_b_dtype = ctx.dtypes
        gradient = gradients[0].flatten(0, -2)
        rows = x.flatten(0, -2).to(gradient.dtype)
        # Of the first argument only the shape counts: beta is 0.
        of_narrow = torch.addmm(narrow, gradient, b, beta=0, alpha=ctx.scaling)
        of_b = torch.addmm(b, gradient.t(), narrow, beta=0, alpha=ctx.scaling)
        scale, seen = ctx.scale, rows
        if kept is not None:
            kept = kept.view_as(rows)
            if x.device.type == "cpu":
                of_narrow, scale = of_narrow.mul_(scale), 1.0
            seen = dropped(rows, kept, scale)
        of_a = of_narrow.t() @ seen
        del seen  # as wide as the input, like each of what follows
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = of_narrow @ a
            if kept is not None:
                of_x = dropped(of_x, kept, scale)
            if ctx.packed is not None:
                weight = ctx.packed.unpacked(weight).to(gradient.dtype)
            # Added within the wide product, which has no memory of its own.
            of_x = of_x.addmm_(gradient, weight).to(of_x_dtype).view_as(x)
        return of_x, None, None, None, of_a.to(of_a_dtype), of_b.to(of_b_dtype), *(None,) * 3
