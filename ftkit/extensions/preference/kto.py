"""Preference tuning on labels: whether an answer is desirable, without another to compare with."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ftkit.data.samples.sample_set import Sample, Samples
from ftkit.models.loss import HeadOutput, LogProbabilities
from ftkit.objectives.objective import (
    LOSS,
    OF_STEP,
    Amounts,
    Batch,
    Objective,
    Term,
    sequence_sums,
)

EXAMPLES, DESIRABLE, UNDESIRABLE = "examples", "desirable", "undesirable"


def mismatched(prompt: Sample, answer: Sample, most: int) -> Sample:
    """Join the prompt of a sample and the answer of another.

    Args:
        prompt: everything before its first token that carries loss is taken.
        answer: everything from its first token that carries loss on is taken.
        most: tokens of the result; the rest is cut off.
    """
    ends, begins = (int(one.trained[0, 0]) for one in (prompt, answer))
    ids = np.concatenate([prompt.ids[:ends], answer.ids[begins:]])[:most]
    trained = np.minimum(answer.trained - begins + ends, len(ids)).astype(np.int32)
    return Sample(ids, trained[trained[:, 0] < trained[:, 1]])


class Kto(Objective):
    """Kahneman-Tversky optimisation, with a reference model.

    With r the log-probability of an answer relative to the reference and z the reference point, the
    loss of an example is w (1 - s(beta (r - z))) if it is desirable, and w (1 - s(beta (z - r)))
    otherwise. Ethayarajh et al. 2024, https://arxiv.org/abs/2402.01306.

    The reference point estimates the divergence of the model from the reference: the mean of r over
    the step's prompts, each with the answer to another one, and at least 0. It has no gradient. It
    is one number for the step, however the step is split.
    """

    preference = "labels"
    target_size = 1
    needs_reference = True
    shares_sequences = True
    of_sequences = True
    observes = "joined"
    joined = staticmethod(mismatched)
    terms = (
        Term(name=LOSS, divisor=EXAMPLES),
        Term(name="accuracy", divisor=EXAMPLES, coefficient=None, is_share=True),
        Term(name="chosen_reward", divisor=DESIRABLE, coefficient=None),
        Term(name="rejected_reward", divisor=UNDESIRABLE, coefficient=None),
        Term(name="reference_point", divisor=EXAMPLES, coefficient=None),
    )

    def __init__(
        self,
        *,
        beta: float = 0.1,
        desirable_weight: float = 1.0,
        undesirable_weight: float = 1.0,
    ) -> None:
        """Choose the scale and the weights.

        Args:
            beta: how closely the model stays to the reference.
            desirable_weight: of the losses of desirable answers.
            undesirable_weight: of the others.
        """
        self._beta, self._weights = beta, (desirable_weight, undesirable_weight)

    def amounts(self, samples: Samples) -> Amounts:
        assert samples.targets is not None, "the data were read with their labels"
        desirable = samples.targets[:, 0].astype(np.int64)
        examples = np.ones(len(samples), dtype=np.int64)
        return {EXAMPLES: examples, DESIRABLE: desirable, UNDESIRABLE: examples - desirable}

    def output(self, batch: Batch) -> HeadOutput:
        return LogProbabilities()

    def observed(self, output: Tensor, batch: Batch) -> Tensor:
        return (sequence_sums(output, batch) - batch["reference"])[:, None]

    def of_step(self, observed: Tensor) -> Tensor:
        """Return the reference point."""
        return observed.mean().clamp(min=0)

    def sums(self, output: Tensor, batch: Batch) -> Sequence[Tensor]:
        point: Tensor = batch[OF_STEP]
        ratios = sequence_sums(output, batch) - batch["reference"]
        real, desirable = batch["is_real_sequence"], batch["targets"][:, 0] > 0
        # Distance from the reference point, in the direction that the label wants.
        distance = torch.where(desirable, ratios - point, point - ratios)
        weights = torch.where(desirable, *self._weights)
        losses = weights * (1 - torch.sigmoid(self._beta * distance))
        with torch.no_grad():
            # A tie is half right: before the first step all of them are.
            right = (distance > 0).to(losses.dtype) + 0.5 * (distance == 0)
            rewards = self._beta * ratios
            reported = (right, rewards * desirable, rewards * ~desirable, point.expand_as(rewards))
        return (losses * real).sum(), *((values * real).sum() for values in reported)
