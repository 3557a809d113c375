"""Statistics of a step that need prompts with the answers to others."""

import torch
from torch import Tensor

from ftkit.models.language_model import LanguageModel
from ftkit.objectives.objective import Batch, Objective
from ftkit.objectives.reference import Companion, Context


@torch.no_grad()
def mismatched_statistics(
    objective: Objective,
    model: LanguageModel,
    companion: Companion | None,
    batch: Batch,
    context: Context,
) -> Tensor:
    """Statistics of the mismatched sequences of a micro-batch.

    Args:
        objective: what is learned.
        model: its dropout is off meanwhile, so that statistics do not depend on ranks.
        companion: if the objective needs one; it computes these sequences anew.
        batch: on its device, with these sequences under "mismatched".
        context: in which the model computes.

    Returns:
        [statistics].
    """
    mismatched: Batch = dict(batch["mismatched"])
    is_training = model.training
    model.eval()
    with context():
        output = model(
            mismatched["input_ids"],
            mismatched["label_indices"],
            mismatched["labels"],
            objective.output(mismatched),
            sequence_lengths=mismatched["sequence_lengths"],
        )
    model.train(is_training)
    # After the model itself: in its first pass, DeepSpeed learns which parameters its layers use,
    # and refuses those of an adapter that was off then.
    if companion is not None:
        companion.add_to(mismatched)
    return objective.statistics(output, mismatched)
