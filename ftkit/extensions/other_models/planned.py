"""What the other model of a recipe costs, for `ftkit plan`."""

from dataclasses import dataclass

from ftkit.models.flops import (
    ONLY_TRAINING,
    FurtherPasses,
    flops_per_token,
    further_passes,
    parameter_count,
)
from ftkit.models.language_model import LanguageModel, outline
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.planning.memory import predict_alone
from ftkit.planning.predict import PlannedBeside, PlannedReference
from ftkit.planning.sequence_length import SequenceLength
from ftkit.recipe.objectives import is_below_adapter, model_beside, objective_rules
from ftkit.recipe.plan import Plan
from ftkit.strategies.frozen import bytes_of, bytes_on_rank, outline_frozen
from ftkit.strategies.strategy import compute_dtype, parameter_dtype

_VALUE_BYTES = 8
"""Bytes of a log-probability."""


def planned(
    base: BaseModel,
    made: Plan,
    length: SequenceLength,
    steps: int | None,
    other: BaseModel | None,
) -> PlannedReference | PlannedBeside | None:
    """Predict what the other model of a recipe costs.

    Args:
        base: the trained model.
        made: plan of the run.
        length: of the longest sample.
        steps: of the run; None: not known.
        other: a model of its own; None: it is the trained one, before training.
    """
    recipe, samples = made.recipe, length.train_samples
    rules = objective_rules(recipe.objective)
    if model_beside(recipe) is not None:
        assert other is not None
        return _beside(base, made, length, other)
    if not rules.needs_reference:  # a teacher that is not named
        return None
    step = _StepFlops.of(base, made, length)
    if is_below_adapter(recipe):
        return PlannedReference(in_every_step=True, more_fraction=step.more(further_passes(recipe)))
    sequences = kept_bytes = other_bytes = None
    least_bytes = high_bytes = 0
    model = step.model
    if samples is not None:
        taken = samples
        if steps is not None and recipe.train.global_batch_tokens is None:
            taken = min(samples, steps * recipe.train.global_batch_size)
        sequences = taken * rules.sequences
        kept_bytes = samples * rules.sequences * _VALUE_BYTES
    if other is not None:
        model = outline_frozen(other, made)
        other_bytes = bytes_of(model.parameters())
        if recipe.resume is False:
            least_bytes, high_bytes = predict_alone(other, made, length.tokens)
    return PlannedReference(
        in_every_step=False,
        more_fraction=step.more(FurtherPasses(of_other=1, other=model)),
        sequences=sequences,
        kept_bytes=kept_bytes,
        other_bytes=other_bytes,
        least_bytes=least_bytes,
        high_bytes=high_bytes,
    )


def _beside(
    base: BaseModel, made: Plan, length: SequenceLength, beside: BaseModel
) -> PlannedBeside:
    known = model_beside(made.recipe)
    assert known is not None
    model = outline_frozen(beside, made)
    return PlannedBeside(
        key=known.key,
        name=beside.name,
        parameters=parameter_count(model),
        rank_bytes=bytes_on_rank(model, made),
        more_fraction=_StepFlops.of(base, made, length).more(further_passes(made.recipe, model)),
    )


@dataclass(frozen=True)
class _StepFlops:
    """Operations of a step on samples that are all as the longest one, per token."""

    model: LanguageModel
    attention_length: float
    label_fraction: float

    @classmethod
    def of(cls, base: BaseModel, made: Plan, length: SequenceLength) -> "_StepFlops":
        known = length.trained
        labels = known.label_tokens / known.at_least if known and known.at_least else 1.0
        model = outline(base, made.recipe, parameter_dtype(made), compute_dtype(made))
        return cls(model, length.tokens, labels)

    def more(self, further: FurtherPasses) -> float:
        """Operations of further passes, relative to those of a step without them."""

        def per_token(passes: FurtherPasses) -> float:
            return flops_per_token(
                self.model,
                attention_length=self.attention_length,
                label_fraction=self.label_fraction,
                further=passes,
            )

        return per_token(further) / per_token(ONLY_TRAINING) - 1
