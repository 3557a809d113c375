"""Experts of LitGPT's models: the tokens of each in a row through its own layers."""

import torch
from litgpt.model import LLaMAMoE
from torch import Tensor

from ftkit.models.bodies.experts import count_of_each, rows_of_each


class Experts(LLaMAMoE):  # type: ignore[misc]  # litgpt declares no types
    """LitGPT's experts, sorted once: its own search for the tokens of each has no fake tensors."""

    def forward(self, x: Tensor) -> Tensor:
        """[batch, tokens, width] of the same."""
        tokens = x.flatten(0, 1)
        weights, chosen = self._route(tokens)
        of_each = chosen.size(-1)
        experts = chosen.flatten()
        order = experts.argsort(stable=True)
        rows = rows_of_each(count_of_each(experts, len(self.experts)), len(experts))
        # All are called, also for no token: strategies wait for each other in their layers.
        results = [
            expert(tokens[order[own] // of_each])
            for expert, own in zip(self.experts, rows, strict=True)
        ]
        found = torch.cat(results) * weights.flatten()[order, None]
        found = found[order.argsort()].unflatten(0, (-1, of_each)).sum(1).view_as(x)
        if self.config.n_shared_expert:
            found = found + self.shared_experts(x)
        return found

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts of each token, [tokens, experts of each]."""
        if self.config.n_expert_groups:
            weights, chosen = self.gate(tokens)
        else:
            scores, chosen = self.gate(tokens).topk(self.config.n_expert_per_token)
            weights = scores.softmax(dim=1, dtype=torch.float).to(tokens.dtype)
        return weights * self.config.routed_scaling_factor, chosen
