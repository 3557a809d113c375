"""Supervised fine-tuning: the cross-entropy of the answers' tokens."""

from collections.abc import Sequence

from torch import Tensor

from ftkit.data.samples.sample_set import Samples
from ftkit.models.loss import HeadOutput, SummedLoss
from ftkit.objectives.objective import LOSS, Amounts, Batch, Objective, Term


class Supervised(Objective):
    """The mean cross-entropy over the label tokens of a step, in nats.

    Where tokens have weights, the weighted mean: sum(weight x loss) / sum(weights).
    """

    terms = (Term(name=LOSS, divisor="label_tokens"),)
    is_cross_entropy = True

    def amounts(self, samples: Samples) -> Amounts:
        weights = samples.label_weights
        return {"label_tokens": samples.label_counts if weights is None else weights}

    def output(self, batch: Batch) -> HeadOutput:
        return SummedLoss(batch.get("weights"))

    def sums(self, output: Tensor, batch: Batch) -> Sequence[Tensor]:
        return (output,)
