"""Dry run of a model on fake tensors, to see that it computes a loss and gradients.

It takes a second and no memory. The code of any family may fail in its own way on settings that do
not fit each other: the user learns of it before anything else is done.
"""

from contextlib import suppress

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import Architecture
from ftkit.models.fake_tensors import fake_tensors
from ftkit.models.language_model import LanguageModel
from ftkit.models.meta_device import on_meta_device
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.recipe.strategy_rows import strategy_rules

# Different, so that shapes of one sequence do not fit the other by chance.
_LENGTHS = (5, 3)
"""Tokens of the two sequences in the dry run."""


def require_trainable(base: BaseModel, strategy: str, *, compiles: bool = False) -> None:
    """Refuse a model whose code fails to compute a loss and gradients.

    Args:
        base: its weights are not read.
        strategy: of the run.
        compiles: whether its blocks are compiled.

    Raises:
        UserError: it fails, or has no place in such a run; with the reason.
    """
    if compiles and not base.architecture.can_compile:
        raise UserError(
            f"compile is true, but torch fails to compile {base.architecture.class_name}. "
            "Try --compile false."
        )
    # The others give these modules a gradient of 0, for which their weights must be there.
    if base.architecture.skipped_modules and strategy_rules(strategy).waits_for_every_gradient:
        raise UserError(
            f"strategy {strategy}: short sequences skip some modules of {base.name}, and ranks "
            f"would wait for each other's gradients. Try --strategy fsdp."
        )
    if base.architecture.is_one_network:
        return
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
    # Before fake tensors: it may have to build the model.
    in_rows = architecture.attention.takes_rows
    model = _outlined(architecture, tied=False)
    # Tables of positions are real tensors on the CPU.
    with fake_tensors():
        _loss(model, in_rows=in_rows).backward()
    if not any(parameter.grad is not None for parameter in model.body.blocks.parameters()):
        raise RuntimeError("no parameter of its blocks has a gradient")


def modules_passed_back(model: LanguageModel) -> frozenset[str]:
    """Names of the modules whose input gets a gradient in the backward pass of a model.

    The others are below everything that is trained: the backward pass ends before them.

    Args:
        model: some of whose parameters are trained; only their names are used.
    """
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    in_rows = model.architecture.attention.takes_rows
    copy = _outlined(model.architecture, tied=model.tied)
    for name, parameter in copy.named_parameters():
        parameter.requires_grad_(name in trained)
    found: set[str] = set()

    def note(name: str, inputs: tuple[object, ...], options: dict[str, object]) -> None:
        given = (*inputs, *options.values())
        if any(isinstance(one, torch.Tensor) and one.requires_grad for one in given):
            found.add(name)

    for name, module in copy.named_modules():
        module.register_forward_pre_hook(
            lambda _, inputs, options, name=name: note(name, inputs, options), with_kwargs=True
        )
    with fake_tensors():
        _loss(copy, in_rows=in_rows)
    return frozenset(found)


def _outlined(architecture: Architecture, *, tied: bool) -> LanguageModel:
    with on_meta_device():
        # bfloat16: on fake tensors, torch computes the shapes of grouped products in this dtype
        # only.
        return LanguageModel(architecture, tied=tied).to(torch.bfloat16)


def _loss(model: LanguageModel, *, in_rows: bool) -> torch.Tensor:
    """Loss of two sequences, on fake tensors."""
    model.to_empty(device="cpu")
    model.tie()
    model.body.build_rope_cache(torch.device("cpu"), max(_LENGTHS))
    model.kernel = "cpu"
    shape = (1, sum(_LENGTHS)) if in_rows else (2, max(_LENGTHS))
    tokens = torch.zeros(shape, dtype=torch.long, device="cpu")
    labels = torch.zeros(tokens.numel(), dtype=torch.long, device="cpu")
    places = torch.arange(tokens.numel(), device="cpu")
    loss: torch.Tensor = model(
        tokens, places, labels, sequence_lengths=_LENGTHS if in_rows else None
    )
    return loss
