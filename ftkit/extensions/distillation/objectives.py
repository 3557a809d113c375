"""The objectives with a teacher, with their options."""

from dataclasses import dataclass
from typing import Literal

from ftkit.recipe.objectives import ObjectiveRow


@dataclass(frozen=True, kw_only=True)
class DistillOptions:
    """Options of `objective: distill`."""

    divergence: Literal["forward", "reverse"] = "forward"
    """Direction of the KL divergence between teacher and student. forward: the student covers
    whatever the teacher may say; reverse: it keeps to what the teacher finds likely."""
    temperature: float = 1.0
    """Number by which the logits of both are divided: above 1, unlikely tokens count more."""
    sft_weight: float = 0.0
    """Weight of the cross-entropy of the given answers, per token, beside the divergence."""


@dataclass(frozen=True, kw_only=True)
class AsftOptions:
    """Options of `objective: asft`."""

    alpha: float = 0.1
    """Weight of the KL divergence from the model that teacher names, beside the loss of dft."""


ROWS = (
    ObjectiveRow(
        name="distill",
        summary="how likely a teacher holds every token of answers",
        class_path="ftkit.extensions.distillation.distillation.Distill",
        options=DistillOptions,
        above_0=("temperature",),
        shares_sequences=True,
        needs_teacher=True,
    ),
    ObjectiveRow(
        name="asft",
        summary="answers as in dft, close to the model before training",
        class_path="ftkit.extensions.distillation.distillation.Asft",
        options=AsftOptions,
        needs_teacher=True,
        shares_sequences=True,
    ),
)
