"""FLOPs and parameter counts of the model."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch.nn as nn
from torch import Tensor

from ftkit.models.bodies.experts import packed_in
from ftkit.models.dry_run import modules_passed_back
from ftkit.models.language_model import LanguageModel
from ftkit.models.lora.peft_layers import layers_of
from ftkit.recipe.adapter_types import is_adapter
from ftkit.recipe.objectives import is_below_adapter, objective_rules
from ftkit.recipe.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class FurtherPasses:
    """Forward passes of a step beside the one that is trained on, over as many tokens."""

    of_model: int = 0
    """Those of the whole model."""
    below_adapter: int = 0
    """Those of the model without its adapter."""
    of_other: int = 0
    """Those of another model."""
    other: LanguageModel | None = None
    """The other model, outlined or filled; None: there is none."""


ONLY_TRAINING = FurtherPasses()


def further_passes(recipe: Recipe, beside: LanguageModel | None = None) -> FurtherPasses:
    """Return the passes that the objective of a recipe needs.

    Args:
        recipe: of the run.
        beside: the frozen model that is there in every step, if there is one.
    """
    rules = objective_rules(recipe.objective)
    # Joined sequences are as many as a step's own, and about as long.
    observed = int(rules.observes is not None)
    refers = rules.needs_reference and is_below_adapter(recipe)
    return FurtherPasses(
        of_model=observed,
        below_adapter=1 + observed if refers else 0,
        of_other=0 if beside is None else 1 + observed,
        other=beside,
    )


def parameter_count(model: LanguageModel) -> int:
    """Number of parameters, counting each weight of a packed layer as one."""
    known = {}
    for module in model.modules():
        if isinstance(module, nn.Linear):
            # A packed weight has fewer numbers than weights: two of 4 bits share a byte.
            known[id(module.weight)] = _weights_in(module)
        for name, matrices in packed_in(module).items():
            known[id(module.get_parameter(name))] = matrices.numbers
    return sum(known.get(id(p), p.numel()) for p in model.parameters())


def _weights_in(layer: nn.Linear) -> int:
    return layer.in_features * layer.out_features


def flops_per_token(
    model: LanguageModel,
    *,
    attention_length: float,
    label_fraction: float,
    further: FurtherPasses = ONLY_TRAINING,
) -> float:
    """Floating-point operations of one training step, per token.

    Each parameter of a matrix counts 2 in the forward pass, 2 in the backward pass for the gradient
    of its input, and 2 more if it is trained; causal attention counts 6 x layers x width x length.
    Layers before the first trained one have no backward pass: their matrices and attention count 2.
    The output layer counts for tokens that carry loss, because it is computed for these alone;
    experts count for the tokens that pass them. Recomputation does not count. See Chowdhery et al.
    2022 (PaLM), appendix B.

    Args:
        model: outlined or filled.
        attention_length: length of the sequence of a token, averaged over tokens: the sum of the
            squared lengths over the sum of the lengths.
        label_fraction: share of the tokens that carry loss.
        further: passes beside the one that is trained on.
    """
    passed_back = modules_passed_back(model) if model.trains_part else None

    def of_step(name: str, weight: Tensor) -> int:
        passes = 1 + further.of_model + (0 if is_adapter(name) else further.below_adapter)
        # The gradients of the input and of the weight take as much as the forward pass each.
        passes += passed_back is None or name in passed_back
        return 2 * (passes + weight.requires_grad)

    blocks = list(model.body.blocks)
    backward = len(blocks)
    if passed_back is not None:
        names = {module: name for name, module in model.named_modules()}
        backward = sum(
            names[block] in passed_back or any(p.requires_grad for p in block.parameters())
            for block in blocks
        )
    lengths = attention_length, label_fraction
    passes = further.of_model + further.below_adapter
    per_score = 2 + 2 * passes + 4 * backward / len(blocks)
    found = _flops(model, of_step, per_score, *lengths)
    if further.other is not None:
        found += further.of_other * forward_flops_per_token(
            further.other, attention_length=attention_length, label_fraction=label_fraction
        )
    return found


def forward_flops_per_token(
    model: LanguageModel, *, attention_length: float, label_fraction: float
) -> float:
    """Floating-point operations of a forward pass alone, per token.

    Args:
        model: outlined or filled.
        attention_length: see `flops_per_token`.
        label_fraction: share of the tokens for which the output layer is computed.
    """
    return _flops(model, lambda *_: 2, 2, attention_length, label_fraction)


_PerWeight = Callable[[str, Tensor], int]
"""Operations for each weight of a matrix and token, by the matrix and the name of its layer."""


def _flops(
    model: LanguageModel,
    per_weight: _PerWeight,
    per_score: float,
    attention_length: float,
    label_fraction: float,
) -> float:
    architecture = model.architecture
    # PaLM counts 12 for whole attention in training; causal attention needs half of the scores.
    of_scores = architecture.attention.width * attention_length
    # Of vectors, the output layer computes nothing.
    computes = architecture.scores is None or architecture.scores.names
    of_head = _matrix_flops(model, "head", per_weight) * label_fraction if computes else 0.0
    of_body = _matrix_flops(model, "body", per_weight)
    return per_score * of_scores + of_body + of_head


def attention_cost(model: LanguageModel, *, label_fraction: float) -> float:
    """Cost of attention per token of the sequence, relative to that of the matrices.

    Args:
        model: outlined or filled.
        label_fraction: share of the tokens that carry loss.
    """
    # Linear in the length: its slope is the difference of two lengths.
    matrices, with_one = (
        flops_per_token(model, attention_length=length, label_fraction=label_fraction)
        for length in (0, 1)
    )
    return with_one / matrices - 1


def media_cost(model: LanguageModel, *, label_fraction: float) -> float:
    """Tokens of a step that cost as much as encoding media of size 1.

    Args:
        model: outlined or filled.
        label_fraction: share of the tokens that carry loss.
    """
    return model.body.media_flops / flops_per_token(
        model, attention_length=0, label_fraction=label_fraction
    )


def _matrix_flops(model: LanguageModel, end: str, per_weight: _PerWeight) -> float:
    """Operations of the matrices of the body or the head of a model, for one token."""
    total = 0.0
    expert_share = model.architecture.expert_share
    for name, part in model.get_submodule(end).named_modules(prefix=end):
        # Whole words: every token passes the shared experts, which have other names.
        share = expert_share if "experts" in name.split(".") else 1.0
        if isinstance(part, nn.Linear):
            total += _weights_in(part) * share * per_weight(name, part.weight)
        elif model.lora is not None and hasattr(part, "adapter_layer_names"):
            for kind, factor, numbers in layers_of(model.lora).products(part):
                total += numbers * share * per_weight(f"{name}.{kind}", factor)
        else:  # the matrices of experts are stacked
            # A Conv1d of a state-space model has three dimensions too, but no experts.
            share = 1.0 if isinstance(part, nn.Conv1d) else expert_share
            packed = packed_in(part)
            for kind, parameter in part.named_parameters(recurse=False):
                if kind in packed:
                    total += packed[kind].numbers * share * per_weight(name, parameter)
                # An embedding has two dimensions, and is looked up, not multiplied.
                elif parameter.ndim == 3:
                    total += parameter.numel() * share * per_weight(name, parameter)
    return total


def mean_flops_per_token(
    model: LanguageModel,
    lengths: npt.NDArray[np.int64],
    label_counts: npt.NDArray[np.int64],
    repetitions: npt.NDArray[np.float64] | float = 1.0,
    *,
    further: FurtherPasses = ONLY_TRAINING,
    media_sizes: npt.NDArray[np.int64] | None = None,
) -> float:
    """Floating-point operations per token, averaged over the tokens of an epoch.

    Args:
        model: in any state.
        lengths: [samples], tokens of each sample.
        label_counts: [samples], tokens of each that carry loss.
        repetitions: [samples] or one for all, how often an epoch contains each.
        further: see `flops_per_token`.
        media_sizes: [samples], what the media of each cost to encode; None: none has any.
    """
    tokens = (lengths * repetitions).sum()
    of_media = 0.0
    if media_sizes is not None:
        of_media = model.body.media_flops * float((media_sizes * repetitions).sum() / tokens)
    return of_media + flops_per_token(
        model,
        attention_length=float((lengths.astype(float) ** 2 * repetitions).sum() / tokens),
        label_fraction=float((label_counts * repetitions).sum() / tokens),
        further=further,
    )
