"""The architecture of a model: what it is before it has numbers, whoever implements it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from ftkit.models.architectures.naming import Fused, Naming
from ftkit.models.architectures.router_loss import RouterLoss

ModelLayout = Literal["hf", "litgpt"]
"""Whose directories: Hugging Face's, or LitGPT's."""

LITGPT_SETTINGS = "model_config.yaml"
"""The settings file of LitGPT's layout."""

Implementation = Literal["litgpt", "transformers"]
"""Whose code computes a model."""

Initial = Literal["normal", "ones", "zeros"]
"""What a parameter is before training."""

HEAD = "lm_head.weight"
"""Our name of the weight of the output layer, in every architecture."""


@dataclass(frozen=True, kw_only=True)
class AttentionTraits:
    """What the choice of a kernel for attention depends on, and its cost."""

    heads: int
    head_size: int
    is_plain: bool
    """Whether kernels know its scores: no bound of them, no sinks, values as large as keys."""
    takes_rows: bool
    """Whether it takes sequences in a row; else padded micro-batches alone."""


class Architecture(ABC):
    """What a model is made of; `ftkit.models.language_model` builds it.

    Our names of parameters are the implementation's: they depend on the architecture alone, and
    checkpoints and adapters are written by them.
    """

    implementation: ClassVar[Implementation]
    """Whose code computes it."""

    @property
    @abstractmethod
    def name(self) -> str:
        """By which prompt styles and messages know it."""

    @property
    @abstractmethod
    def class_name(self) -> str | None:
        """Hugging Face's class of such models; None: it has none that ftkit knows."""

    @property
    @abstractmethod
    def context_length(self) -> int:
        """Positions that it was built for, or that its attention is run on."""

    @property
    @abstractmethod
    def window(self) -> int | None:
        """The sliding window that the context is cut to; None: it is whole."""

    @property
    @abstractmethod
    def layers(self) -> int:
        """Number of blocks."""

    @property
    @abstractmethod
    def has_equal_layers(self) -> bool:
        """Whether all blocks compute and keep the same."""

    @property
    @abstractmethod
    def attention(self) -> AttentionTraits:
        """Of every block."""

    @property
    @abstractmethod
    def logit_softcap(self) -> float | None:
        """The bound of the logits, approached by a tangent; None: they have none."""

    @property
    @abstractmethod
    def logit_scale(self) -> float:
        """The factor of the products of the head, before they are bounded."""

    @property
    @abstractmethod
    def expert_share(self) -> float:
        """How many of the experts of a layer a token passes, as a share of all; 1 without."""

    @property
    @abstractmethod
    def router_loss(self) -> RouterLoss | None:
        """The auxiliary loss of its routers; None: there are none, or it is not known."""

    @property
    @abstractmethod
    def asks_for_router_loss(self) -> bool:
        """Whether its settings say that it is trained with that loss."""

    @property
    @abstractmethod
    def embedding(self) -> str:
        """Our name of the weight of the embedding."""

    @property
    @abstractmethod
    def is_usually_tied(self) -> bool:
        """Whether embedding and head are one where config.json does not say."""

    @property
    @abstractmethod
    def lora_layers(self) -> Mapping[str, Sequence[str]]:
        """Keys of LoRA recipes, and the ends of our names of the layers that each adapts."""

    @property
    @abstractmethod
    def untied_shapes(self) -> dict[str, torch.Size]:
        """`parameter_shapes` where embedding and head are two."""

    @property
    def rest_shapes(self) -> Mapping[str, torch.Size]:
        """Name and shape of what a model has beside its language model: kept as it is.

        Empty where there is nothing else.
        """
        return {}

    def parameter_shapes(self, *, tied: bool) -> dict[str, torch.Size]:
        """Our name and the shape of every parameter, in the order of the model's modules.

        Args:
            tied: whether embedding and head are one; there is no head's weight then.
        """
        shapes = dict(self.untied_shapes)
        if tied:
            del shapes[HEAD]
        return shapes

    @abstractmethod
    def initial(self, name: str, shape: torch.Size) -> Initial:
        """What a parameter of ours is before training."""

    @abstractmethod
    def with_layers(self, layers: int) -> Self:
        """The same with another number of blocks."""

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """What changes the function that given weights compute, each thing said in one way.

        The same for a model in either layout.
        """

    @abstractmethod
    def naming_in(self, layout: ModelLayout) -> Naming | None:
        """What files of a layout call the parameters; None: no such file holds this model."""

    @abstractmethod
    def settings_in(self, layout: ModelLayout) -> dict[str, Any] | None:
        """The settings file of a layout: config.json, or model_config.yaml.

        None: it cannot be made from the architecture; only the model's own says all.
        """

    @abstractmethod
    def obstacle_to(self, layout: ModelLayout) -> str | None:
        """What keeps a model from being written in a layout, with advice; None: nothing does.

        The rest of a sentence that begins with the model's name.
        """

    def part_of(self, tensor: Tensor, fused: Fused, name: str) -> Tensor:
        """The rows of a fused tensor that are our parameter.

        Args:
            tensor: [rows of all parts, ...].
            fused: how.
            name: of the parameter, or of one of the same layer and with its rows.

        Raises:
            ValueError: it is no part of such a tensor.
        """
        shapes = self.parameter_shapes(tied=True)
        names = fused.parameters_beside(name)
        rows = [shapes[part][0] for part in names]
        if fused.layout == "heads":
            count = self.attention.heads
            of_heads = tensor.unflatten(0, (count, -1))
            per_head = [part // count for part in rows]
            return of_heads.split(per_head, dim=1)[names.index(name)].flatten(0, 1)
        return tensor.split(rows)[names.index(name)]

    def fuse(self, parts: Sequence[Tensor], fused: Fused) -> Tensor:
        """The inverse of `part_of`: all parts, in their order, as one."""
        if fused.layout == "heads":
            of_heads = [part.unflatten(0, (self.attention.heads, -1)) for part in parts]
            return torch.cat(of_heads, dim=1).flatten(0, 1)
        return torch.cat(list(parts))
