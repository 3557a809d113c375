"""The auxiliary loss of routers, which makes them spread tokens evenly over experts.

Fedus et al. 2021 (Switch Transformers), https://arxiv.org/abs/2101.03961, equations 4 to 6, with
several experts per token, and all layers together.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ftkit.utils.accelerators.use import sum_dtype


class Routed(NamedTuple):
    """Choices and probabilities of routers, summed over tokens and layers."""

    choices: Tensor
    """[experts] float64 (if the device has it), how often each expert was chosen."""
    probabilities: Tensor
    """[experts] float32, with gradients."""


@dataclass(frozen=True, kw_only=True)
class RouterLoss:
    """A loss that is lowest if tokens choose all experts equally often.

    It is the number of experts, times the sum over experts of choices per token times mean
    probability. All tokens of a step in all layers count together; choices have no gradient.
    """

    experts: int
    """Number of experts in each layer."""
    chosen: int
    """Experts that a token chooses in a layer."""
    coefficient: float
    """Factor in the training loss; by default that of config.json."""

    def routed(self, logits: Tensor, is_real: Tensor) -> Routed:
        """Sum the choices and probabilities of a layer.

        Args:
            logits: [tokens, experts], as transformers records them.
            is_real: [tokens] bool; other tokens do not count.
        """
        probabilities = torch.softmax(logits, -1, dtype=torch.float32)
        chosen = probabilities.topk(self.chosen, -1).indices
        counted = is_real[:, None]
        # float32 cannot count beyond 2^24.
        choices = torch.zeros(self.experts, dtype=sum_dtype(logits.device), device=logits.device)
        choices.scatter_add_(0, chosen.flatten(), counted.expand_as(chosen).flatten().double())
        return Routed(choices, (probabilities * counted).sum(0))

    def share(self, probabilities: Tensor, choices: Tensor) -> Tensor:
        """Share of some tokens in the loss of their step, without the coefficient.

        Args:
            probabilities: [experts], sums over these tokens.
            choices: [experts], of all tokens of the step, over all ranks and micro-steps.
        """
        # Tokens times layers: each chooses `chosen` experts in every layer.
        tokens = choices.sum() / self.chosen
        of_each = (choices / tokens).to(probabilities.dtype)
        return self.experts * (of_each * probabilities).sum() / tokens
