"""Routing: which experts the tokens of a micro-batch choose, and what their loss needs of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ftkit.models.architectures.router_loss import Routed, RouterLoss


class Routing:
    """Looks at the routers of a model while it computes a micro-batch.

    Nothing is added up by the host, and nothing is asked of the device before it is to be told.
    """

    def __init__(self, layers: Sequence[int], experts: int, loss: RouterLoss | None) -> None:
        """Begin.

        Args:
            layers: numbers of the blocks with experts, from 0; none: their use is not known.
            experts: of each layer.
            loss: of the routers, with the coefficient of a run; None: none is trained with.
        """
        self.layers, self._experts, self.loss = list(layers), experts, loss
        self._load: Tensor | None = None
        self._is_real: Tensor | None = None
        """[tokens] bool, of the micro-batch that is computed."""
        self._counted: Tensor | None = None
        """[tokens] int64, 1 for a token whose choices count."""
        self._collects = False
        self._routed: list[Routed] = []

    @property
    def load(self) -> list[list[int]]:
        """How often each expert of each layer was chosen in training so far, on this rank.

        Empty where nothing was counted, and where the device does not answer any more.
        """
        try:
            return [] if self._load is None else self._load.tolist()
        except RuntimeError:
            return []

    @contextmanager
    def of(self, is_real: Tensor) -> Iterator[None]:
        """Look at one micro-batch: its forward pass up to `take`, and its backward pass.

        Args:
            is_real: [batch, sequence] bool, whether a token is one of a sample.
        """
        if self._load is None:
            shape = len(self.layers), self._experts
            self._load = torch.zeros(shape, dtype=torch.long, device=is_real.device)
        self._is_real, self._collects = is_real.flatten(), True
        self._counted = self._is_real.long() * torch.is_grad_enabled()
        try:
            yield
        finally:
            self._is_real = self._counted = None
            self._routed.clear()

    def take(self) -> Routed | None:
        """End of the forward pass: what the loss needs of it; None: there is no loss.

        What is computed again from here on does not count.
        """
        self._collects = False
        if self._counted is not None:
            self._counted.zero_()  # compiled graphs stay the same
        if self.loss is None:
            return None
        choices, probabilities = zip(*self._routed, strict=True)
        self._routed.clear()
        return Routed(torch.stack(choices).sum(0), torch.stack(probabilities).sum(0))

    def watch_router(self, module: nn.Module, place: int) -> None:
        """Look at what a module gives.

        Args:
            module: a router, or what holds one.
            place: of the logits among several results.
        """
        loss = self.loss
        assert loss is not None

        def look(_: nn.Module, __: Any, output: Any) -> None:
            if self._is_real is None:
                return
            logits: Tensor = output[place] if isinstance(output, tuple) else output
            # Also where it is computed again: the backward pass wants all that was kept before.
            routed = loss.routed(logits.reshape(-1, loss.experts), self._is_real)
            if self._collects:
                self._routed.append(routed)

        # In eager mode it computes the same when it is done again, whatever becomes of the result.
        module.register_forward_hook(torch.compiler.disable(look))

    def watch_experts(self, module: nn.Module, row: int) -> None:
        """Count what a module is asked for.

        Args:
            module: the experts of a layer; it is called with hidden states, [tokens, chosen] int64
                experts of each, and their weights.
            row: of the layer among those with experts.
        """

        def look(_: nn.Module, given: tuple[Any, ...]) -> None:
            if self._load is None or self._counted is None:
                return
            chosen: Tensor = given[1]
            counted = self._counted[:, None].expand_as(chosen).flatten()
            self._load[row].scatter_add_(0, chosen.flatten(), counted)

        module.register_forward_pre_hook(look)
