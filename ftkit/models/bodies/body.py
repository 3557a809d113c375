"""The body of a model: the modules between token ids and the head, in any implementation."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.nn as nn
from torch import Tensor

from ftkit.models.bodies.attention import AttentionKernel, FixedRow
from ftkit.models.bodies.experts import FusedExperts
from ftkit.models.routing import RouterLoss, Routing
from ftkit.models.token_numbers import TokenNumbers

if TYPE_CHECKING:
    from ftkit.models.bodies.exchange import Exchange


@dataclass(frozen=True)
class GatedMlp:
    """An MLP that computes `down(activation(gate(x)) * up(x))`."""

    module: nn.Module
    activation: Literal["silu", "gelu tanh"]
    gate: str
    """Name of the layer in the module."""
    up: str
    down: str


class MediaEncoder(Protocol):
    """The parts of a model that compute media; each rank has them whole, but for what is trained.

    It is made of an architecture and transformers' whole model, on the meta device. Modules in the
    architecture's `beside` are the body's own: strategies shard and fill them.
    """

    @classmethod
    def modules_of(cls, base: Any, parts: Sequence[str]) -> Sequence[str]:
        """Return the names of the modules of a base model that are trained.

        Args:
            base: `ftkit.models.pretrained.base_model.BaseModel`.
            parts: names that the encoder knows.

        Raises:
            UserError: they cannot be trained.
        """

    def load(self, rest: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        """Fill its other parameters; arguments as of `Body.load_beside`."""

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The parts."""

    @property
    def flops(self) -> float:
        """Floating-point operations of encoding media of size 1, roughly."""

    def arguments(
        self, input_ids: Tensor, language: nn.Module, media: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        """Return what the language model is given in the place of token ids.

        Modules are called in the same order with media and without: under ZeRO-3, ranks gather
        parameters as they are called.

        Args:
            input_ids: [batch, sequence].
            language: the model, whose embedding is called.
            media: as `ftkit.data.media.MediaReader` has read them; None: there are none.
        """


class Body(nn.Module, ABC):
    """All of a model below its output layer, built on the meta device before it is adapted.

    Its parameters have our names. Embedding, blocks and others hold all of them, and are called as
    modules, so that hooks of strategies run.
    """

    tokens: TokenNumbers
    """Numbers of the tokens that it is trained on, for dropout and noise."""
    exchange: "Exchange | None" = None
    """With the ranks that share rows of tokens in training; None: rows are whole."""

    @property
    @abstractmethod
    def embedding(self) -> nn.Embedding:
        """Embedding of the token ids."""

    @property
    @abstractmethod
    def blocks(self) -> nn.ModuleList:
        """Blocks in the order of the computation."""

    @property
    @abstractmethod
    def others(self) -> list[nn.Module]:
        """Other modules with parameters: the norm after the last block, embeddings of positions.

        Each is called as a whole.
        """

    @abstractmethod
    def take_head(self) -> nn.Linear:
        """Remove the output layer from the body and return it; called once."""

    @abstractmethod
    def gated_mlps(self) -> Iterator[GatedMlp]:
        """MLPs that a fused kernel may compute."""

    @abstractmethod
    def fused_experts(self) -> Iterator[FusedExperts]:
        """Experts whose matrices are one parameter of three dimensions."""

    @property
    @abstractmethod
    def kept_in_full(self) -> frozenset[str]:
        """Names within the blocks of the layers that are not quantised."""

    @abstractmethod
    def exclude_from_compile(self) -> None:
        """Keep attention and experts out of compiled graphs: their lengths change in each step."""

    @abstractmethod
    def watch_routing(self, loss: RouterLoss | None) -> Routing:
        """Register hooks that record the choices of routers, once the model is adapted.

        Args:
            loss: auxiliary loss of the routers; None: training uses none.
        """

    # Positions

    @abstractmethod
    def build_rope_cache(self, device: torch.device, length: int) -> None:
        """Compute the rotary embeddings of `length` positions, in float32 for any parameters."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Device of the rotary tables, on which the body computes."""

    @property
    @abstractmethod
    def max_length(self) -> int:
        """Number of positions in the rotary tables."""

    # Computation

    @abstractmethod
    def hidden(
        self,
        input_ids: Tensor,
        lengths: Sequence[int] | FixedRow | None,
        kernel: AttentionKernel,
        media: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Compute the hidden states for the head, [batch, sequence, width].

        Args:
            input_ids: [batch, sequence], padded on the right; or [1, tokens], sequences in a row,
                or with an `exchange` this rank's piece of it.
            lengths: tokens of each sequence in the whole row; None: one sequence in each line.
            kernel: of attention.
            media: as `ftkit.data.media.MediaReader` has read them; only a body that is made for
                them is given some.
        """

    def add_encoder(self, place: str, rest: Mapping[str, Any]) -> None:
        """Load what computes media into a loaded body, which is given it if it has none.

        Args:
            place: as `ftkit.models.architectures.architecture.Architecture.encoder`.
            rest: as of `load_beside`.
        """
        # Not abstract: only bodies of transformers take media.
        raise NotImplementedError("only for bodies of architectures that take media")

    def load_beside(self, rest: Mapping[str, Any]) -> None:
        """Load what computes media, once the body has its tables.

        Args:
            rest: stored tensors outside of the language model, by their names in files; none: the
                values do not matter.
        """

    @property
    def media_flops(self) -> float:
        """Floating-point operations of encoding media of size 1, roughly; 0: it is given none."""
        return 0.0

    @property
    def trained_beside(self) -> list[nn.Parameter]:
        """Its own parameters that compute media."""
        return []

    def hold_beside(self) -> None:
        """Register the parameters of `trained_beside` without the modules that compute with them.

        So hooks on the body's modules leave them alone.
        """

    @property
    def beside(self) -> list[nn.Module]:
        """Modules that compute media; strategies have nothing to do with those of others."""
        return []

    @abstractmethod
    def start_cache(self, batch: int, length: int) -> None:
        """Allocate keys and values of `batch` sequences of `length` positions."""

    @abstractmethod
    def hidden_cached(
        self, input_ids: Tensor, positions: Tensor, media: Mapping[str, Any] | None = None
    ) -> Tensor:
        """Compute the hidden states of tokens that follow those in the cache, and extend it.

        Args:
            input_ids: [batch, sequence].
            positions: [batch, sequence], of the tokens in their sequences.
            media: as of `hidden`, where these tokens are whole prompts.
        """

    @abstractmethod
    def end_cache(self) -> None:
        """Free the cache if there is one."""
