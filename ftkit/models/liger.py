"""Fused kernels of Liger-Kernel in place of torch's operations, with the same parameters.

Hsu et al. 2024, https://arxiv.org/abs/2410.10989. Private parts that are used here, as they are in
Liger-Kernel 0.8.5: `liger_cross_entropy_kernel` with its arguments. Other versions than
`ftkit.recipe.kernels.LIGER` are refused.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ftkit.models.bodies.attention import AttentionLayer
from ftkit.models.bodies.body import GatedMlp
from ftkit.models.bodies.norm import RMSNorm
from ftkit.models.loss import OutputLayer

_LARGEST_BLOCK = 2**15
"""Most numbers of a row that the kernel of the loss takes at once, as in Liger."""


def apply_liger(model: nn.Module, gated_mlps: Iterable[GatedMlp]) -> None:
    """Compute a model's norms, gated MLPs, rotary embeddings and loss with Liger's kernels.

    Layers for which Liger has no kernel stay as they are.

    Args:
        model: outlined; its parameters and their names stay.
        gated_mlps: those of the model.
    """
    from liger_kernel.ops import LigerGELUMulFunction, LigerSiLUMulFunction

    products = {"silu": LigerSiLUMulFunction, "gelu tanh": LigerGELUMulFunction}
    for mlp in gated_mlps:
        mlp.module.forward = partial(_gated, mlp, products[mlp.activation])
    module: Any
    for module in model.modules():
        kind = type(module)
        if kind is RMSNorm:
            module.forward = partial(_norm, module)
        # Liger's kernel has no rotation of neighbouring numbers.
        elif isinstance(module, AttentionLayer) and module.rotation == "halves":
            module.rotate = _rotated
        elif isinstance(module, OutputLayer):
            module.loss_and_grad = _loss_and_grad


def _norm(norm: Any, x: Tensor) -> Tensor:
    from liger_kernel.ops import LigerRMSNormFunction

    # "gemma": all of it in float32, as LitGPT computes it. False: not in the memory of the
    # gradient, which a residual connection uses too.
    offset = 1.0 if norm.add_unit_offset else 0.0
    result: Tensor = LigerRMSNormFunction.apply(x, norm.weight, norm.eps, offset, "gemma", False)
    return result


def _gated(mlp: GatedMlp, function: Any, x: Tensor) -> Tensor:
    gate, up, down = (getattr(mlp.module, name) for name in (mlp.gate, mlp.up, mlp.down))
    # The backward pass overwrites the results of both layers: nothing else keeps them.
    result: Tensor = down(function.apply(gate(x), up(x)))
    return result


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops import LigerRopeFunction

    # It overwrites query and key if they are contiguous.
    q, k = LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


def _loss_and_grad(logits: Tensor, wanted: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    from liger_kernel.ops.cross_entropy import liger_cross_entropy_kernel

    rows, vocabulary = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    # Only this kernel, within our head, which takes 512 to 1,024 rows at a time. Liger's own fused
    # linear cross-entropy waits for the GPU twice in each call, and takes rows by the width of the
    # model: with few labels and a large vocabulary, a handful at once.
    liger_cross_entropy_kernel[(rows,)](
        X_ptr=logits,
        X_stride=logits.stride(0),
        Y_ptr=wanted,
        Y_stride=wanted.stride(0),
        weight_ptr=None,
        loss_ptr=losses,
        z_loss_ptr=None,
        loss_stride=1,
        token_accuracy_ptr=None,
        token_accuracy_stride=0,
        predicted_tokens_ptr=None,
        predicted_tokens_stride=0,
        n_cols=vocabulary,
        n_non_ignore=rows,
        sum_non_ignore_weight=rows,
        weight_sum=0.0,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="sum",
        softcap=softcap,
        RETURN_Z_LOSS=False,
        RETURN_TOKEN_ACCURACY=False,
        RETURN_PREDICTED_TOKENS=False,
        HAS_WEIGHT=False,
        HAS_SOFTCAPPING=softcap is not None,
        HAS_GRADIENTS=True,
        # The next power of two, as Triton requires.
        BLOCK_SIZE=min(_LARGEST_BLOCK, 1 << (vocabulary - 1).bit_length()),
        num_warps=32,
    )
    return losses.sum(), logits  # which hold their gradient now
