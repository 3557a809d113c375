"""Dry run of a model on fake tensors, to see that it computes a loss and gradients.

It takes a second and no memory. The code of any family may fail in its own way on settings that do
not fit each other: the user learns of it before anything else is done.
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

# Different, so that shapes of one sequence do not fit the other by chance.
_LENGTHS = (5, 3)
"""Tokens of the two sequences in the dry run."""


def require_trainable(base: BaseModel) -> None:
    """Refuse a model whose code fails to compute a loss and gradients.

    Args:
        base: its weights are not read.

    Raises:
        UserError: it fails; with the reason.
    """
    if base.architecture.implementation == "litgpt":
        return  # one network for all its families
    try:
        _try_shortened(base.architecture)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise UserError(
            f"{base.name} cannot be trained: {base.architecture.class_name} asks for values of "
            f"tensors ({error}), which the prediction of its memory does not know. Choose another "
            "model."
        ) from error
    except Exception as error:  # the code of any family may raise anything
        raise UserError(
            f"{base.name} cannot be trained: {base.architecture.class_name} of transformers fails "
            f"with its config.json ({type(error).__name__}: {error}). Choose another model."
        ) from error


def _try_shortened(architecture: Architecture) -> None:
    kinds = getattr(architecture, "depth_of_all_kinds", architecture.layers)
    # Some families cannot be cut to so few blocks: they are tried whole.
    with suppress(Exception):
        try_architecture(architecture.with_layers(kinds))
        return
    try_architecture(architecture)


def try_architecture(architecture: Architecture) -> None:
    """Run forward and backward pass; raise RuntimeError if no block has gradients."""
    with torch.device("meta"):
        # bfloat16: on fake tensors, torch computes the shapes of grouped products in this dtype
        # only.
        model = LanguageModel(architecture, tied=False).to(torch.bfloat16)
    in_rows = architecture.attention.takes_rows
    # Tables of positions are real tensors on the CPU.
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
