"""The body of a model: the modules between token ids and the head, whoever implements them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn as nn
from torch import Tensor

from ftkit.models.architectures.router_loss import RouterLoss
from ftkit.models.bodies.attention import AttentionKernel
from ftkit.models.bodies.experts import FusedExperts
from ftkit.models.bodies.routing import Routing


@dataclass(frozen=True)
class GatedMlp:
    """An MLP that computes `down(activation(gate(x)) * up(x))`."""

    module: nn.Module
    activation: Literal["silu", "gelu tanh"]
    gate: str
    """Name of the layer in the module."""
    up: str
    down: str


class Body(nn.Module, ABC):
    """All of a model below its output layer; made on the meta device, before it is adapted.

    The names of its parameters are ours. Embedding, blocks and others are called as modules, so
    that hooks of strategies run, and hold all parameters.
    """

    @property
    @abstractmethod
    def embedding(self) -> nn.Embedding:
        """What token ids become."""

    @property
    @abstractmethod
    def blocks(self) -> nn.ModuleList:
        """In the order of the computation."""

    @property
    @abstractmethod
    def others(self) -> list[nn.Module]:
        """What else holds parameters: the norm after the last block, embeddings of positions."""

    @abstractmethod
    def take_head(self) -> nn.Linear:
        """The output layer, which is no part of the body from then on; once."""

    @abstractmethod
    def gated_mlps(self) -> Iterator[GatedMlp]:
        """Those for which there may be a fused kernel."""

    @abstractmethod
    def fused_experts(self) -> Iterator[FusedExperts]:
        """Experts whose matrices are one parameter of three dimensions."""

    @property
    @abstractmethod
    def kept_in_full(self) -> frozenset[str]:
        """Names in the blocks of the layers that are not quantised."""

    @abstractmethod
    def exclude_from_compile(self) -> None:
        """Leave attention and experts out of compiled graphs: lengths are others in each step."""

    @abstractmethod
    def watch_routing(self, loss: RouterLoss | None) -> Routing:
        """Have what looks at routers and experts in place, once the model is adapted.

        Args:
            loss: of the routers; None: none is trained with.
        """

    # Positions

    @abstractmethod
    def build_rope_cache(self, device: torch.device, length: int) -> None:
        """Compute the rotary embeddings of so many positions; float32 whatever the parameters."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Of the rotary tables: where it computes."""

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Positions that the rotary tables have."""

    # Computation

    @abstractmethod
    def hidden(
        self, input_ids: Tensor, lengths: Sequence[int] | None, kernel: AttentionKernel
    ) -> Tensor:
        """[batch, sequence, width], what the head takes.

        Args:
            input_ids: [batch, sequence], padded on the right; or [1, tokens], sequences in a row.
            lengths: tokens of each sequence in a row; None: there is one in each line.
            kernel: what computes attention.
        """

    @abstractmethod
    def start_cache(self, batch: int, length: int) -> None:
        """Take memory for keys and values of so many sequences of so many positions."""

    @abstractmethod
    def hidden_cached(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """As `hidden`, of tokens that follow those in the cache, which it extends.

        Args:
            input_ids: [batch, sequence].
            positions: [batch, sequence], where the tokens stand in their sequences.
        """

    @abstractmethod
    def end_cache(self) -> None:
        """Free the cache, if there is one."""
