"""Parts of transformers' models that ask for values of tensors, computed without asking.

A prediction runs a model on tensors without values, and a device is not waited for.
"""

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

_MASKS_OF_STATES = ("_update_mamba_mask", "_update_linear_attn_mask")
"""Methods that look whether a mask of padding is of use; there is none here."""


def compute_without_values(model: nn.Module) -> None:
    """Have a model compute its states' masks and its routing as below.

    Args:
        model: of transformers.
    """
    for module in model.modules():
        for name in _MASKS_OF_STATES:
            if hasattr(module, name):
                setattr(module, name, _same_mask)
        if type(module).__name__.endswith("TopKGating"):
            module.forward = _Gating(module)


def _same_mask(attention_mask: Tensor | None, *_: Any) -> Tensor | None:
    """As it is: sequences are padded on the right, where no token sees the padding."""
    return attention_mask


class _Gating:
    """Chooses the experts of each token, and sorts tokens by them."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """[tokens, width] in.

        Returns:
            order: [tokens * experts of each], of the pairs of token and expert.
            tokens: of these pairs.
            weights: likewise.
            counts: [experts], of tokens.
            logits: [tokens, experts].
        """
        module = self._module
        logits = module.layer(hidden).float()
        best, chosen = logits.topk(module.top_k, dim=1)
        weights = best.softmax(1).type_as(hidden).flatten()
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        counts = torch.zeros(module.num_experts, dtype=torch.int64, device=hidden.device)
        counts = counts.scatter_add_(0, experts, torch.ones_like(experts))
        return order, order // module.top_k, weights[order], counts, logits
