"""A model tried on fake tensors: whether it gives a loss and gradients, in a second and no memory.

Any family's code may fail in a way of its own, for settings that do not fit each other, or where it
asks for what is not there. That is told before anything else is done.
"""

from contextlib import suppress

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import Architecture
from ftkit.models.language_model import LanguageModel
from ftkit.models.pretrained.base_model import BaseModel

_LENGTHS = (5, 3)
"""Tokens of the two sequences that are computed."""


def require_trainable(base: BaseModel) -> None:
    """Refuse a model whose code does not give a loss and gradients.

    Args:
        base: its weights are not read.

    Raises:
        UserError: it does not; says why.
    """
    if base.architecture.implementation == "litgpt":
        return  # whose code is one for all
    try:
        _try_shortened(base.architecture)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UserError(
            f"{base.name} cannot be trained: {base.architecture.class_name} asks for values of "
            f"tensors ({error}), which the prediction of its memory does not know. Choose another "
            "model."
        ) from error
    except Exception as error:  # of any family's code
        raise UserError(
            f"{base.name} cannot be trained: {base.architecture.class_name} of transformers fails "
            f"with its config.json ({type(error).__name__}: {error}). Choose another model."
        ) from error


def _try_shortened(architecture: Architecture) -> None:
    """With a block of each kind alone, where the family can be cut so."""
    kinds = getattr(architecture, "depth_of_all_kinds", architecture.layers)
    with suppress(Exception):
        try_architecture(architecture.with_layers(kinds))
        return
    try_architecture(architecture)


def try_architecture(architecture: Architecture) -> None:
    """Forward and backward; some block has gradients."""
    with torch.device("meta"):
        model = LanguageModel(architecture, tied=False).to(torch.bfloat16)
    in_rows = architecture.attention.takes_rows
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        model.body.build_rope_cache(torch.device("cpu"), max(_LENGTHS))
        model.kernel = "cpu"
        shape = (1, sum(_LENGTHS)) if in_rows else (2, max(_LENGTHS))
        tokens = torch.zeros(shape, dtype=torch.long, device="cpu")
        labels = torch.zeros(tokens.numel(), dtype=torch.long, device="cpu")
        places = torch.arange(tokens.numel(), device="cpu")
        lengths = _LENGTHS if in_rows else None
        loss = model(tokens, places, labels, sequence_lengths=lengths)
        loss.backward()
    if not any(parameter.grad is not None for parameter in model.body.blocks.parameters()):
        raise RuntimeError("no parameter of its blocks has a gradient")
