"""The architecture of a model: its description without weights, and its names of parameters."""

import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from ftkit.errors import UserError
from ftkit.models.routing import RouterLoss
from ftkit.recipe.objectives import ScoreLabels

ModelLayout = str
"""Layout of a model's directory: hf, or the name of an implementation with a layout of its own."""

Implementation = str
"""Library whose code computes a model: transformers, or one of `ftkit.recipe.implementations`."""

Initial = Literal["normal", "ones", "zeros"]
"""Initial values of a parameter."""

HEAD = "lm_head.weight"
"""Our name of the weight of the output layer, in every architecture."""
SCORE = "score"
"""Hugging Face's name of the output layer of a reward model."""

# The first number in a name is the layer; a later one would be an expert in it.
_LAYER = re.compile(r"\.(\d+)(?=\.)")


@dataclass(frozen=True, kw_only=True)
class AttentionTraits:
    """Traits of attention that determine its kernel and its cost."""

    heads: int
    """Largest number of heads in any layer."""
    head_size: int
    """Largest size of a head in any layer."""
    width: int
    """Number of heads times their size, summed over all layers."""
    is_plain: bool
    """True if kernels can compute its scores: no bound, no sinks, values as large as keys."""
    takes_rows: bool
    """True if it computes sequences in a row; otherwise micro-batches must be padded."""
    common_heads: int = 1
    """Largest number that divides the number of query heads in every layer."""
    shares_rows: bool = False
    """True if its layers exchange heads for tokens with the ranks that have the rest of a row
    (`ftkit.models.bodies.exchange`), and nothing else mixes tokens."""


@dataclass(frozen=True)
class Fused:
    """Several of our modules stored as one."""

    parts: tuple[str, ...]
    """Our modules, in the order of their rows."""
    layout: Literal["rows", "heads"] = "rows"
    """rows: one part after the other. heads: for each head, its rows of every part."""

    def modules_beside(self, ours: str) -> list[str]:
        """Return the names of all parts in a layer, given one of them or its parameter.

        Raises:
            ValueError: the name is not in a layer.
        """
        layer = _LAYER.search(ours)
        if layer is None:
            raise ValueError(f"{ours} is not in a layer")
        return [part.format(layer[1]) for part in self.parts]

    def parameters_beside(self, ours: str) -> list[str]:
        """Return the names of a parameter (weight or bias) in all parts, given one of them."""
        kind = ours.rpartition(".")[2]
        return [f"{module}.{kind}" for module in self.modules_beside(ours)]


@dataclass(frozen=True)
class Naming:
    """Names of a checkpoint's modules, by ours; ``{}`` stands for the number of the layer."""

    modules: Mapping[str, str]
    """Our name -> the checkpoint's, one to one."""
    fused: Mapping[str, Fused] = field(default_factory=lambda: MappingProxyType({}))
    """Name in files -> our names, for tensors that hold several of our parameters."""

    def theirs(self, ours: str) -> str | None:
        """Return the checkpoint's name of a module or parameter; None if it is fused."""
        return _renamed(ours, self.modules)

    def stored_in(self, ours: str) -> tuple[str, Fused | None]:
        """Return the name of the tensor that holds our parameter, and the others fused in it."""
        for module, fused in self.fused.items():
            # All parts map to the one tensor, whose name then has the number of the layer.
            if theirs := _renamed(ours, dict.fromkeys(fused.parts, module)):
                return theirs, fused
        theirs = self.theirs(ours)
        assert theirs is not None, f"{ours} is not a parameter of this architecture"
        return theirs, None


@dataclass(frozen=True)
class SameNames(Naming):
    """Names equal to ours, except for the output layer."""

    modules: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    head: str = "lm_head"
    """The checkpoint's name of the output layer."""
    prefix: str = ""
    """Beginning of our names that the checkpoint's do not have."""

    def theirs(self, ours: str) -> str:
        """Return the checkpoint's name of a module or parameter."""
        module, *kind = ours.split(".", 1)
        if module == "lm_head":
            return ".".join((self.head, *kind))
        return ours.removeprefix(self.prefix)


def _renamed(name: str, modules: Mapping[str, str]) -> str | None:
    """Replace the module at the start of a name; None: it is not among the modules."""
    layer = _LAYER.search(name)
    # As in the table, with {} for the number of the layer.
    module = name if layer is None else f"{name[: layer.start()]}.{{}}{name[layer.end() :]}"
    suffix = ""
    # The longest known beginning of the name wins: adapters add modules below those of the table.
    while module and module not in modules:
        module, _, last = module.rpartition(".")
        suffix = f".{last}{suffix}"
    if not module:
        return None
    return (modules[module] + suffix).format(layer.group(1) if layer else "")


def seed_of(name: str, seed: int) -> int:
    """Seed of the random numbers of one part of a model, given that of a run."""
    # Python's own hash() of a name differs between processes.
    return seed ^ zlib.crc32(name.encode())


class Architecture(ABC):
    """Description of a model, from which `ftkit.models.language_model` builds it.

    Our names of parameters are those of the implementation: they depend on the architecture alone,
    and checkpoints use them.
    """

    implementation: ClassVar[Implementation]
    """Library whose code computes the model."""
    body: ClassVar[str]
    """MODULE:CLASS of its modules, which are made of the architecture."""
    is_one_network: ClassVar[bool] = False
    """Whether one network computes all families, so that none has code of its own to be tried."""
    experts_are_layers: ClassVar[bool] = False
    """Whether each expert has linear layers of its own, which adapters find like any others."""
    scores: ScoreLabels | None = None
    """What its output layer gives a sequence, a row for each score; None: logits of tokens."""
    encoder: str | None = None
    """MODULE:CLASS of the `ftkit.models.bodies.body.MediaEncoder` beside the language model; None:
    the model is given texts alone."""
    beside: tuple[str, ...] = ()
    """Modules of the encoder that are trained: their parameters are among the model's own."""

    def require_media(self, kinds: Collection[str], name: str) -> None:
        """Refuse data or prompts without media, if all tokens of a prompt see each other.

        Only what reads media says where a prompt ends.

        Args:
            kinds: of media that are there.
            name: of the model, for the message.

        Raises:
            UserError: there are none, and the model needs some.
        """
        if self.sees_prompts and not kinds:
            raise UserError(
                f"{name} takes prompts with media, such as images, all of whose tokens see each "
                "other, and here are none. Add some, or choose another model."
            )

    @property
    def sees_prompts(self) -> bool:
        """Whether all tokens of a prompt see each other, the later ones too."""
        return False

    def is_beside(self, name: str) -> bool:
        """Return whether a module or parameter is one of `beside`, or in one."""
        return f"{name}.".startswith(self._beginnings)

    @cached_property
    def _beginnings(self) -> tuple[str, ...]:
        return tuple(f"{module}." for module in self.beside)

    @property
    @abstractmethod
    def name(self) -> str:
        """Name in messages, by which prompt styles are chosen too."""

    @property
    @abstractmethod
    def model_type(self) -> str | None:
        """Hugging Face's type of such models; None: unknown."""

    @property
    @abstractmethod
    def class_name(self) -> str | None:
        """Hugging Face's class of such models; None: unknown."""

    @property
    @abstractmethod
    def context_length(self) -> int:
        """Most positions of a sequence."""

    @property
    @abstractmethod
    def window(self) -> int | None:
        """Sliding window to which the context is limited; None: the context is whole."""

    @property
    @abstractmethod
    def layers(self) -> int:
        """Number of blocks."""

    @property
    @abstractmethod
    def has_equal_layers(self) -> bool:
        """True if all blocks have the same structure."""

    @property
    def can_compile(self) -> bool:
        """True if torch can compile the blocks."""
        return True

    @property
    def skipped_modules(self) -> str | None:
        """Name of the modules that are not computed for short sequences; None: there are none."""
        return None

    @property
    @abstractmethod
    def attention(self) -> AttentionTraits:
        """Traits of the attention in every block."""

    @property
    @abstractmethod
    def logit_softcap(self) -> float | None:
        """Bound of the logits, by a hyperbolic tangent; None: no bound."""

    @property
    @abstractmethod
    def logit_scale(self) -> float:
        """Factor of the logits, before they are bounded."""

    @property
    def logit_count(self) -> int | None:
        """Number of the first logits, if the model drops the others; None: there are no others."""
        return None

    @property
    @abstractmethod
    def expert_share(self) -> float:
        """Share of the experts of a layer that a token passes; 1 without experts."""

    @property
    @abstractmethod
    def router_loss(self) -> RouterLoss | None:
        """Auxiliary loss of the routers; None: no routers, or an unknown loss."""

    @property
    @abstractmethod
    def asks_for_router_loss(self) -> bool:
        """True if the settings turn the routers' loss on."""

    @property
    @abstractmethod
    def embedding(self) -> str:
        """Our name of the embedding's weight."""

    @property
    @abstractmethod
    def is_usually_tied(self) -> bool:
        """True if embedding and head are tied where config.json does not say."""

    @property
    @abstractmethod
    def lora_layers(self) -> Mapping[str, Sequence[str]]:
        """Layers that each key of LoRA recipes adapts, by the end of our names."""

    def is_untrained(self, layer: str) -> bool:
        """Return whether training leaves a layer as it is, given our name of it."""
        return False

    @property
    @abstractmethod
    def untied_shapes(self) -> dict[str, torch.Size]:
        """Shapes of all parameters if embedding and head are not tied."""

    @property
    def rest_shapes(self) -> Mapping[str, torch.Size]:
        """Shapes of parameters beside the language model, by name; they are kept unchanged."""
        return {}

    def parameter_shapes(self, *, tied: bool) -> dict[str, torch.Size]:
        """Our name and the shape of every parameter, in the order of the model's modules.

        Args:
            tied: whether embedding and head are one, so that the head has no weight.
        """
        shapes = dict(self.untied_shapes)
        if self.scores:
            width = shapes[HEAD][1]
            own = {name: shape for name, shape in shapes.items() if not name.startswith("lm_head.")}
            count = len(self.scores.names)
            return own | ({HEAD: torch.Size((count, width))} if count else {})
        if tied:
            del shapes[HEAD]
        return shapes

    def seed_name(self, ours: str) -> str:
        """Name by which random numbers of a module or parameter are seeded, given ours.

        It is that of transformers' model, so that all implementations draw the same numbers; ours
        where that model has no such part.
        """
        return ours

    @abstractmethod
    def initial(self, name: str, shape: torch.Size) -> Initial:
        """Initial values of one of our parameters."""

    @abstractmethod
    def drawn(self, settings: Mapping[str, Any], seed: int) -> Iterator[tuple[str, Tensor]]:
        """Yield our name and the values of every parameter, untied, as a new model begins.

        They are float32 in host memory, and follow from the arguments alone.

        Args:
            settings: the content of config.json; {} where there is none.
            seed: of the random numbers.

        Raises:
            UserError: it is not known how a parameter begins.
        """

    @abstractmethod
    def with_layers(self, layers: int) -> Self:
        """Copy with another number of blocks."""

    @abstractmethod
    def with_vocabulary(self, size: int) -> Self:
        """Copy with another number of rows in embedding and head."""

    @abstractmethod
    def with_scores(self, scores: ScoreLabels) -> Self:
        """Copy whose output layer gives scores, or that gives vectors."""

    def with_encoder(self, place: str, beside: tuple[str, ...] = ()) -> Self:
        """Copy that is given media, too.

        Args:
            place: of the `encoder`.
            beside: as the attribute.

        Raises:
            UserError: its implementation takes none.
        """
        raise UserError(
            f"The records have media, which the code of {self.implementation} does not take. "
            "Try --model_implementation transformers."
        )

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """Settings that change the results of given weights, the same in either layout."""

    @abstractmethod
    def naming_in(self, layout: ModelLayout) -> Naming | None:
        """Names of the parameters in files of a layout; None: the layout cannot hold this model."""

    @abstractmethod
    def settings_in(self, layout: ModelLayout) -> dict[str, Any] | None:
        """Content of a layout's settings file: config.json, or model_config.yaml.

        None: it cannot be made from the architecture; the model's own file is needed.
        """

    @abstractmethod
    def obstacle_to(self, layout: ModelLayout) -> str | None:
        """Reason why a model cannot be written in a layout, with advice; None: it can.

        It continues a sentence that begins with the model's name.
        """

    def part_of(self, tensor: Tensor, fused: Fused, name: str) -> Tensor:
        """Return the rows of a fused tensor that are our parameter.

        Args:
            tensor: [rows of all parts, ...].
            fused: its parts and layout.
            name: of the parameter, or of another with the same rows in the same layer.

        Raises:
            ValueError: it is not part of such a tensor.
        """
        # Only layers in blocks are fused, so it does not matter here whether the head is tied.
        shapes = self.parameter_shapes(tied=True)
        names = fused.parameters_beside(name)
        rows = [shapes[part][0] for part in names]
        if fused.layout == "heads":
            count = self.attention.heads
            # GPT-NeoX stores query, key and value of the first head, then those of the second.
            of_heads = tensor.unflatten(0, (count, -1))
            per_head = [part // count for part in rows]
            return of_heads.split(per_head, dim=1)[names.index(name)].flatten(0, 1)
        return tensor.split(rows)[names.index(name)]

    def fuse(self, parts: Sequence[Tensor], fused: Fused) -> Tensor:
        """Join all parts, in their order: the inverse of `part_of`."""
        # Each head is a block of rows: the rows of its query, then of its key, then of its value.
        if fused.layout == "heads":
            of_heads = [part.unflatten(0, (self.attention.heads, -1)) for part in parts]
            return torch.cat(of_heads, dim=1).flatten(0, 1)
        return torch.cat(list(parts))
