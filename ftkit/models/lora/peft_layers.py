"""PEFT's layers around those of a model, and what each type of adapter does with them."""

import importlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn as nn
from torch import Tensor

from ftkit.models.lora.targets import TRAINED
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.recipe.adapter_types import peft_type
from ftkit.recipe.recipe import Lora
from ftkit.utils.imports import hidden

AdapterFiles = tuple[dict[str, Tensor], dict[str, str], Any]
"""Tensors of an adapter by PEFT's names, notes for their file, and PEFT's configuration."""


class PeftLayers:
    """What is special in the layers of one type of adapter; what is not abstract does nothing."""

    dropout: ClassVar[str | None] = None
    """Attribute of a layer that holds its dropout by the name of the adapter; None: it has none."""
    merged_kinds: ClassVar[tuple[str, ...]] = ("weight",)
    """Parameters of a base layer that a merge changes."""

    def __init__(self, lora: Lora) -> None:
        """Keep the type's options, and with them those that all types share."""
        self.lora = lora

    def check(self, base: BaseModel, layers: Sequence[str]) -> None:
        """Refuse, by a UserError, layers whose adapter could not be saved, by our names of them."""

    @abstractmethod
    def add(self, model: nn.Module, base: BaseModel, targets: list[str]) -> None:
        """Put PEFT's layers around the chosen ones; no memory is taken.

        Args:
            model: outlined on the meta device, and frozen.
            base: gives Hugging Face's names of the layers.
            targets: full names of the layers in the model, at least one.

        Raises:
            UserError: an option does not fit a layer.
        """

    def first_number(self, name: str) -> float | None:
        """Return the first value of all numbers of a parameter; None: they are drawn at random."""
        return None

    def fill(self, model: nn.Module, device: torch.device) -> None:
        """Compute what the layers hold beside parameters, on every rank alike."""

    def cast(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Give what the layers hold beside parameters the number format of products."""

    def products(self, layer: Any) -> Iterator[tuple[str, Tensor, int]]:
        """Yield what the inputs of a layer are multiplied by, beside linear layers in it.

        Yields:
            Name in the layer, a tensor that is trained if the factor is, and multiplications for
            each token.
        """
        yield from ()

    @abstractmethod
    def files(self, adapter: Mapping[str, Tensor], base: BaseModel) -> AdapterFiles:
        """Return the content of an adapter's files by our names and values of its parameters."""

    def take_beside(self, stored: dict[str, Tensor], directory: Path) -> None:
        """Remove what belongs to no layer from the tensors of an adapter, by PEFT's names of them.

        Raises:
            UserError: it is not what the layers are filled with.
        """

    @abstractmethod
    def merged(self, layer: Any, values: Mapping[str, Tensor], kind: str, base: Tensor) -> Tensor:
        """Merge an adapter into a parameter of a base layer as PEFT does, in float32.

        Args:
            layer: PEFT's, without numbers.
            values: of its parameters, by their names in it.
            kind: one of `merged_kinds`.
            base: the base layer's, weight [out, in] or bias [out]; it stays as it is.
        """


def layers_of(lora: Lora) -> PeftLayers:
    """Return what is special in the layers of a recipe's type of adapter."""
    module, _, name = peft_type(lora).class_path.rpartition(".")
    made: PeftLayers = getattr(importlib.import_module(module), name)(lora)
    return made


@contextmanager
def without_bitsandbytes() -> Iterator[None]:
    """Keep PEFT from importing bitsandbytes, which takes seconds for all of torch's compiler."""
    # PEFT 0.21 imports it wherever it is installed, and caches whether it is. Quantised layers have
    # imported it before, but need none of PEFT's layers for it.
    with hidden("bitsandbytes"):
        from peft.import_utils import is_bnb_4bit_available, is_bnb_available

        checks = (is_bnb_available, is_bnb_4bit_available)
        for check in checks:
            check.cache_clear()
        try:
            yield
        finally:
            for check in checks:
                check.cache_clear()


def stored_config(directory: Path) -> Any:
    """Return PEFT's configuration of an adapter's files, without any code or path they name.

    Raises:
        UserError: as `adapter_keys`.
    """
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from peft.utils.peft_types import PeftType

    from ftkit.recipe.peft_adapter import peft_arguments

    kind, arguments = peft_arguments(directory)
    return PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(kind)](**arguments)


def tuner_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and module of every linear layer that an adapter of any type adapts."""
    for name, module in model.named_modules():
        if hasattr(module, "adapter_layer_names"):
            yield name, module


def parameter_of(kind: str) -> str:
    """Return the name of a parameter in its layer by that in PEFT's files: without the adapter's.

    They are `vera_lambda_b` and `oft_R.weight` in files, and `vera_lambda_b.default` and
    `oft_R.default.weight` in layers.
    """
    first, dot, rest = kind.partition(".")
    return f"{first}.{TRAINED}{dot}{rest}"
