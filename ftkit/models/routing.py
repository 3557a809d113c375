"""Routers of experts: counts of the experts that tokens choose, and the loss that spreads tokens.

Fedus et al. 2021 (Switch Transformers), https://arxiv.org/abs/2101.03961, equations 4 to 6, with
several experts per token, and all layers together.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn as nn
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
        choices.scatter_add_(0, chosen.flatten(), counted.expand_as(chosen).flatten().to(choices))
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


class Routing:
    """Records the choices of a model's routers while it computes a micro-batch."""

    # All sums stay on the device until they are read, so that the host never waits for it.

    def __init__(self, layers: Sequence[int], experts: int, loss: RouterLoss | None) -> None:
        """Start without counts.

        Args:
            layers: indices of the blocks with experts; empty: their choices cannot be counted.
            experts: number in each layer.
            loss: of the routers, with the coefficient of a run; None: training uses none.
        """
        self.layers, self._experts, self.loss = list(layers), experts, loss
        self._load: Tensor | None = None
        self._is_real: Tensor | None = None
        """[tokens] bool, of the current micro-batch."""
        self._counted: Tensor | None = None
        """[tokens] int64, 1 for a token whose choices count."""
        self._collects = False
        self._routed: list[Routed] = []

    @property
    def load(self) -> list[list[int]]:
        """Counts of training's choices on this rank, for each layer and expert.

        Empty if nothing was counted, or if the device has failed.
        """
        try:
            return [] if self._load is None else self._load.tolist()
        # After an error of a kernel, CUDA fails in every later call, too; the report is still
        # written.
        except RuntimeError:
            return []

    @contextmanager
    def of(self, is_real: Tensor) -> Iterator[None]:
        """Record one micro-batch: its forward pass up to `take`, and its backward pass.

        Args:
            is_real: [batch, sequence] bool, whether a token belongs to a sample.
        """
        if self._load is None:
            shape = len(self.layers), self._experts
            self._load = torch.zeros(shape, dtype=torch.long, device=is_real.device)
        self._is_real, self._collects = is_real.flatten(), True
        # Evaluations and the pass that counts choices for the loss have no gradients, and do not
        # count.
        self._counted = self._is_real.long() * torch.is_grad_enabled()
        try:
            yield
        finally:
            self._is_real = self._counted = None
            self._routed.clear()

    def take(self) -> Routed | None:
        """End the forward pass and return the inputs of the loss; None without a loss.

        Recomputation in the backward pass does not count.
        """
        self._collects = False
        if self._counted is not None:
            self._counted.zero_()  # in place, so that compiled graphs stay the same
        if self.loss is None:
            return None
        choices, probabilities = zip(*self._routed, strict=True)
        self._routed.clear()
        return Routed(torch.stack(choices).sum(0), torch.stack(probabilities).sum(0))

    def watch_router(self, module: nn.Module, place: int) -> None:
        """Record the logits of a router.

        Args:
            module: a router, or a module that holds one.
            place: index of the logits among several results.
        """
        loss = self.loss
        assert loss is not None

        def look(_: nn.Module, __: Any, output: Any) -> None:
            if self._is_real is None:
                return
            logits: Tensor = output[place] if isinstance(output, tuple) else output
            # Also in recomputation: the backward pass needs every tensor that was saved before.
            routed = loss.routed(logits.reshape(-1, loss.experts), self._is_real)
            if self._collects:
                self._routed.append(routed)

        # Compiled, recomputation could drop what has no further use; in eager mode it is the same.
        module.register_forward_hook(torch.compiler.disable(look))

    def watch_experts(self, module: nn.Module, row: int) -> None:
        """Count the experts that tokens choose.

        Args:
            module: the experts of a layer; it is called with hidden states, [tokens, chosen] int64
                experts of each token, and their weights.
            row: index of the layer among those with experts.
        """

        def look(_: nn.Module, given: tuple[Any, ...]) -> None:
            if self._load is None or self._counted is None:
                return
            chosen: Tensor = given[1]
            counted = self._counted[:, None].expand_as(chosen).flatten()
            self._load[row].scatter_add_(0, chosen.flatten(), counted)

        module.register_forward_pre_hook(look)
