"""The auxiliary loss of routers: what has them spread tokens evenly over experts.

Fedus et al. 2021 (Switch Transformers), https://arxiv.org/abs/2101.03961, equations 4 to 6; with
several choices of each token, and all layers together.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ftkit.utils.accelerators.use import sum_dtype


class Routed(NamedTuple):
    """What routers did with some tokens, summed over these and over layers."""

    choices: Tensor
    """[experts] float64 (where a device has it), how often each expert was chosen."""
    probabilities: Tensor
    """[experts] float32, which have gradients."""


@dataclass(frozen=True, kw_only=True)
class RouterLoss:
    """A loss that is least where a model's tokens choose all experts equally often.

    The number of experts, times the sum over them of their choices per token times their mean
    probability. All tokens of a step in all layers are counted together; choices have no gradient.
    """

    experts: int
    """Of each layer."""
    chosen: int
    """Experts that a token chooses in a layer."""
    coefficient: float
    """Its factor in the loss of training, as config.json has it."""

    def routed(self, logits: Tensor, is_real: Tensor) -> Routed:
        """What the loss needs to know of a layer.

        Args:
            logits: [tokens, experts], as transformers takes them from the model.
            is_real: [tokens] bool; others are not counted.
        """
        probabilities = torch.softmax(logits, -1, dtype=torch.float32)
        chosen = probabilities.topk(self.chosen, -1).indices
        counted = is_real[:, None]
        choices = torch.zeros(self.experts, dtype=sum_dtype(logits.device), device=logits.device)
        choices.scatter_add_(0, chosen.flatten(), counted.expand_as(chosen).flatten().double())
        return Routed(choices, (probabilities * counted).sum(0))

    def share(self, probabilities: Tensor, choices: Tensor) -> Tensor:
        """What some tokens add to the loss of their step; no coefficient is in it.

        Args:
            probabilities: [experts], sums over these tokens.
            choices: [experts], of all tokens of the step, over all ranks and micro-steps.
        """
        tokens = choices.sum() / self.chosen
        of_each = (choices / tokens).to(probabilities.dtype)
        return self.experts * (of_each * probabilities).sum() / tokens
