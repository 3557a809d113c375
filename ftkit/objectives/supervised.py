"""Supervised fine-tuning: the cross-entropy of the answers' tokens."""

from collections.abc import Sequence

from torch import Tensor

from ftkit.data.samples.sample_set import Samples
from ftkit.models.loss import HeadOutput, SummedLoss
from ftkit.objectives.objective import LOSS, Amounts, Batch, Objective, Term


class Supervised(Objective):
    """The mean cross-entropy over the label tokens of a step, in nats."""

    terms = (Term(name=LOSS, divisor="label_tokens"),)
    is_cross_entropy = True

    def amounts(self, samples: Samples) -> Amounts:
        return {"label_tokens": samples.label_counts}

    def output(self, batch: Batch) -> HeadOutput:
        return SummedLoss()

    def sums(self, output: Tensor, batch: Batch) -> Sequence[Tensor]:
        return (output,)
