"""Models of transformers on the meta device: how they are looked at, and made ready for ftkit."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ftkit.errors import UserError

_MOST_BUFFER_BYTES = 2**31
"""Of masks and rotary tables; GPT-J's 28 masks of 2048 x 2048 take an eighteenth of it."""


def blocks_of(model: nn.Module, count: int) -> nn.ModuleList:
    """The blocks of a model: its outermost list of so many modules.

    Raises:
        UserError: there is none.
    """
    lists = [
        (name.count("."), module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise UserError(
            f"{type(model).__name__} has no list of {count} blocks. Choose another model."
        )
    return min(lists, key=lambda found: found[0])[1]


def model_name(model: PreTrainedModel) -> str:
    """The name of all that is below the output layer."""
    return model.base_model_prefix if hasattr(model, model.base_model_prefix) else "model"


def head_name(model: PreTrainedModel) -> str:
    """The name of the output layer in transformers' model."""
    head = model.get_output_embeddings()
    return next(name for name, module in model.named_modules() if module is head)


def set_depth(config: PretrainedConfig, layers: int) -> None:
    """Give a model another number of blocks; lists with an entry for each are cut, too."""
    before = config.num_hidden_layers
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == before and before != layers:
            setattr(config, name, (value * layers)[:layers])
    config.num_hidden_layers = layers
    if hasattr(config, "num_blocks"):  # xLSTM's own word
        config.num_blocks = layers


def untranspose_layers(model: nn.Module) -> None:
    """Put linear layers in place of those that hold their weight the other way round."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            model.set_submodule(name, nn.Linear(module.nx, module.nf))


@torch.no_grad()
def compute_buffers(model: PreTrainedModel) -> None:
    """Have the model compute on the CPU what no file holds, as it does after loading.

    Raises:
        ValueError: that would take more memory than any model's.
    """
    needed = sum(buffer.nbytes for _, buffer in model.named_non_persistent_buffers())
    if needed > _MOST_BUFFER_BYTES:
        raise ValueError(f"tables of its positions would take {needed / 2**30:,.0f} GiB")
    with torch.device("cpu"):
        for name, buffer in list(model.named_non_persistent_buffers()):
            owner, _, kind = name.rpartition(".")
            model.get_submodule(owner)._buffers[kind] = torch.empty_like(buffer, device="cpu")
        for tensor in (*model.parameters(), *_stored_buffers(model)):
            tensor._is_hf_initialized = True  # type: ignore[attr-defined]  # left as it is
        for module in model.modules():
            module._is_hf_initialized = False  # type: ignore[assignment]
        model.initialize_weights()


def _stored_buffers(model: PreTrainedModel) -> Iterator[Tensor]:
    computed = {name for name, _ in model.named_non_persistent_buffers()}
    return (buffer for name, buffer in model.named_buffers() if name not in computed)


def freeze_stored_buffers(model: PreTrainedModel) -> None:
    """Numbers that files hold and nothing trains become parameters, which are read and written."""
    computed = {name for name, _ in model.named_non_persistent_buffers()}
    for name, buffer in list(model.named_buffers()):
        if name not in computed and buffer.is_floating_point():
            owner, _, kind = name.rpartition(".")
            module = model.get_submodule(owner)
            del module._buffers[kind]
            module.register_parameter(kind, nn.Parameter(buffer, requires_grad=False))
    for name, parameter in list(model.named_parameters()):
        if parameter.ndim == 0:  # which cannot be sharded
            owner, _, kind = name.rpartition(".")
            trained = parameter.requires_grad
            value = nn.Parameter(parameter.detach()[None], requires_grad=trained)
            setattr(model.get_submodule(owner), kind, value)


class _Outputs(tuple[Tensor]):
    """What a model gives: the hidden states first, and nothing else by any name."""

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None

    def __getitem__(self, place: Any) -> Any:
        """By its place, or by its name."""
        return getattr(self, place) if isinstance(place, str) else super().__getitem__(place)

    def keys(self) -> tuple[str, ...]:
        """Of what may be taken by its name."""
        return ("last_hidden_state",)


class _Given(nn.Module):
    """In the place of a model: gives what it was made with, and notes what it is called with."""

    def __init__(self, hidden: Tensor, embedding: nn.Embedding, model: nn.Module) -> None:
        super().__init__()
        self._hidden = hidden
        self._embedding = embedding
        self._numbers = {name: v for name, v in vars(model).items() if isinstance(v, int | float)}
        self.arguments: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        """Numbers are the model's; any other part of it is this one."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self._embedding if name == "embed_tokens" else self._numbers.get(name, self)

    def get_input_embeddings(self) -> nn.Embedding:
        return self._embedding

    def forward(self, *_: Any, **arguments: Any) -> "_Outputs":
        self.arguments = arguments
        return _Outputs((self._hidden,))


class _SameProducts(nn.Identity):
    """In the place of a head: gives what it takes."""

    weight = torch.ones((), device="cpu")
    """Some models ask for its number format."""


@dataclass(frozen=True)
class Called:
    """What a whole model does on text."""

    tokens: Tensor
    """[1, tokens] that it was given."""
    embeddings: Tensor
    """[1, tokens, width] of these."""
    arguments: dict[str, Any]
    """With which it has called its language model, by name."""
    logits: Tensor
    """[1, tokens, vocabulary] that it has made of the products of its head."""


def call_apart(model: PreTrainedModel, language: str, tokens: Tensor, products: Tensor) -> Called:
    """Have a model compute all but its language model and the products of its head.

    Args:
        model: on the meta device; it is of no use afterwards.
        language: name of the language model in it.
        tokens: [1, tokens].
        products: [1, tokens, vocabulary], of the head.
    """
    with torch.device("cpu"), torch.no_grad():
        embedding = nn.Embedding(int(tokens.max()) + 1, 2)
        given = _Given(products, embedding, model.get_submodule(language))
        model.set_submodule(head_name(model), _SameProducts())
        model.set_submodule(language, given)
        logits: Tensor = model.eval()(input_ids=tokens).logits
        return Called(tokens, embedding(tokens), given.arguments, logits)


def finished_logits(model: PreTrainedModel, language: str, products: Tensor) -> Tensor:
    """The logits that a model makes of the products of its head.

    Args:
        model: which is of no use afterwards.
        language: name of the language model in it.
        products: [vocabulary].
    """
    tokens = torch.zeros(1, 1, dtype=torch.long, device="cpu")
    return call_apart(model, language, tokens, products[None, None]).logits[0, 0]
