"""Other models for each use: a run, an evaluation, a prediction (`ftkit.recipe.companions`)."""

from typing import TYPE_CHECKING, Any

from ftkit.extensions.other_models.second_model import check_context, check_files, check_logits
from ftkit.recipe.objectives import is_below_adapter, model_beside

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ftkit.evaluation.evaluate import ResultCompanion
    from ftkit.evaluation.result import Result
    from ftkit.evaluation.validation import Wanted
    from ftkit.models.language_model import LanguageModel
    from ftkit.models.load_weights import Sharding
    from ftkit.models.pretrained.base_model import BaseModel
    from ftkit.objectives.companion import Companion, Context
    from ftkit.objectives.objective import Objective
    from ftkit.planning.predict import PlannedBeside, PlannedReference
    from ftkit.planning.sequence_length import SequenceLength
    from ftkit.recipe.options import EvaluateOptions
    from ftkit.recipe.plan import Plan
    from ftkit.runs.job import Job
    from ftkit.training.setup import RunCompanion
    from ftkit.training.start import StartingPoint

__all__ = ["check_files", "check_settings", "of_result", "of_run", "planned", "simulated"]

# Imported where they are used: a supervisor checks files without torch.


def check_settings(base: "BaseModel", other: "BaseModel", key: str, max_seq_length: int) -> None:
    """Refuse a model by its settings.

    Args:
        base: the trained model.
        other: the other one.
        key: of the recipe, which names it.
        max_seq_length: tokens of the longest sequence.

    Raises:
        UserError: it has other logits than a teacher needs, or takes shorter sequences.
    """
    if key == "teacher":
        check_logits(base, other, key)
    check_context(other, key, max_seq_length)


def of_run(
    job: "Job", start: "StartingPoint", base: "BaseModel", max_seq_length: int
) -> "RunCompanion":
    """Open the other model of a run, without its weights.

    Raises:
        UserError: it has other tokens than the trained model, or takes shorter sequences.
    """
    from ftkit.extensions.other_models.beside import ModelInMemory
    from ftkit.extensions.other_models.references import BelowAdapterInRun, ComputedBefore

    if (beside := model_beside(job.recipe)) is not None:
        return ModelInMemory(job, beside, start, base, max_seq_length)
    if is_below_adapter(job.recipe):
        return BelowAdapterInRun()
    return ComputedBefore(job, base, max_seq_length)


def of_result(
    result: "Result",
    options: "EvaluateOptions",
    base: "BaseModel",
    max_seq_length: int,
    wanted: "Sequence[Wanted]",
) -> "ResultCompanion":
    """Find the other model of a result; see `ftkit.extensions.other_models.result_reference`."""
    from ftkit.extensions.other_models.result_reference import ReferenceOfResult

    return ReferenceOfResult(result, options, base, max_seq_length, wanted)


def planned(
    base: "BaseModel",
    made: "Plan",
    length: "SequenceLength",
    steps: int | None,
    other: "BaseModel | None",
) -> "PlannedReference | PlannedBeside | None":
    """Predict what it costs; see `ftkit.extensions.other_models.planned`."""
    from ftkit.extensions.other_models import planned as planning

    return planning.planned(base, made, length, steps, other)


def simulated(
    objective: "Objective",
    plan: "Plan",
    model: "LanguageModel",
    frozen: "LanguageModel | None",
    sharding: "Sharding",
    context: "Context",
    sequences: int,
) -> "Companion":
    """Make what an objective needs, of fake tensors.

    Args:
        objective: needs another model.
        plan: of the run.
        model: the trained model.
        frozen: the model that is held beside it; None: there is none.
        sharding: where its parameters are.
        context: in which models compute.
        sequences: of a micro-batch.
    """
    import numpy as np

    from ftkit.extensions.other_models.reference import (
        BelowAdapter,
        Computed,
        FrozenReference,
        Teacher,
    )

    if frozen is not None:
        kind: Any = Teacher if objective.needs_teacher else FrozenReference
        found: Companion = kind(frozen, sharding, context)
        return found
    if is_below_adapter(plan.recipe):
        return BelowAdapter(model, context)
    return Computed(np.zeros(sequences))
