"""Classifiers and regressions: scores of whole sequences, learned from labels."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ftkit.data.samples.sample_set import Samples, ScoredSamples
from ftkit.models.loss import HeadOutput, Scores
from ftkit.objectives.objective import (
    LOSS,
    Amounts,
    Batch,
    Measure,
    Objective,
    Term,
    sequence_sums,
)
from ftkit.recipe.objectives import ProblemType

EXAMPLES = "examples"
F1_MACRO, PEARSON = "f1_macro", "pearson"


class Classify(Objective):
    """A head that gives a sequence scores at its last token.

    The loss of a sequence is that of transformers' `ForSequenceClassification`: the cross-entropy
    of its class; with several classes the mean over all of them of the binary cross-entropy; of a
    number the squared difference. The loss of a step is the mean over its sequences.
    """

    shares_sequences = True
    of_sequences = True

    def __init__(self, *, problem_type: ProblemType, classes: Sequence[str] | None = None) -> None:
        """Choose what labels are.

        Args:
            problem_type: one class, several, or a number.
            classes: their names; None: there are none.
        """
        assert problem_type == "regression" or classes, "see ftkit.data.sources.settled"
        self._problem = problem_type
        self.terms: tuple[Term, ...] = (Term(name=LOSS, divisor=EXAMPLES),)
        if problem_type == "regression":
            self.measures = (Measure(name=PEARSON),)
        else:
            right = Term(name="accuracy", divisor=EXAMPLES, coefficient=None, is_share=True)
            self.terms += (right,)
            self.measures = (Measure(name=F1_MACRO, is_share=True),)

    def view(self, samples: Samples) -> Samples:
        return ScoredSamples(samples)

    def amounts(self, samples: Samples) -> Amounts:
        return {EXAMPLES: np.ones(len(samples), dtype=np.int64)}

    def output(self, batch: Batch) -> HeadOutput:
        return Scores()

    def sums(self, output: Tensor, batch: Batch) -> Sequence[Tensor]:
        scores, targets, real = self._of_sequences(output, batch)
        if self._problem == "regression":
            return (((scores - targets) ** 2 * real).sum(),)
        if self._problem == "single_label_classification":
            losses = F.cross_entropy(scores, targets, reduction="none")
            right = scores.detach().argmax(1) == targets
        else:
            losses = F.binary_cross_entropy_with_logits(scores, targets, reduction="none").mean(1)
            right = ((scores.detach() > 0) == (targets > 0)).all(1)
        return (losses * real).sum(), (right * real).sum()

    def tallies(self, output: Tensor, batch: Batch) -> Tensor:
        """Sums of products of scores and targets; of classes, how often they are met."""
        scores, targets, real = self._of_sequences(output, batch)
        kind = sequence_sums(output, batch).dtype
        if self._problem == "regression":
            x, y = scores.to(kind), targets.to(kind)
            columns = torch.stack([torch.ones_like(x), x, y, x * x, y * y, x * y])
            return (columns * real).sum(1)
        if self._problem == "single_label_classification":
            count = scores.size(1)
            found = F.one_hot(scores.argmax(1), count).bool()
            labelled = F.one_hot(targets, count).bool()
        else:
            found, labelled = scores > 0, targets > 0
        every = torch.cat([found & labelled, found, labelled], dim=1)
        return (every & real[:, None]).sum(0).to(kind)

    def measured(self, tallies: Tensor) -> Mapping[str, float]:
        if self._problem == "regression":
            value = pearson(tallies)
            return {} if value is None else {PEARSON: value}
        right, found, labelled = tallies.view(3, -1)
        return {F1_MACRO: f1_macro(right, found, labelled)}

    def _of_sequences(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Scores and targets of sequences, and which are real.

        Returns:
            [sequences, ...] float32, [sequences, ...], and [sequences] bool, false for fillers.
        """
        # A sequence has one label, at its last token.
        scores = sequence_sums(output, batch).float()
        targets: Tensor = batch["targets"]
        if self._problem == "regression":
            targets = targets[:, 0]
        elif self._problem == "single_label_classification":
            targets = targets[:, 0].long()
        return scores, targets, batch["is_real_sequence"]


def f1_macro(right: Tensor, found: Tensor, labelled: Tensor) -> float:
    """Mean over classes of the harmonic mean of precision and recall.

    Classes that are neither found nor labelled do not count, as in scikit-learn.

    Args:
        right: [classes], samples of each in which it is found and labelled.
        found: [classes], samples in which it is found.
        labelled: [classes], samples that have it.
    """
    both = found + labelled
    is_met = both > 0
    return float((2 * right[is_met] / both[is_met]).mean()) if is_met.any() else 0.0


def pearson(sums: Tensor) -> float | None:
    """Correlation of two columns of numbers; None: one of them is constant.

    Args:
        sums: [6]: how many, the sums of x, y, x * x, y * y and x * y.
    """
    count, x, y, xx, yy, xy = sums.double().tolist()
    spread_x, spread_y = count * xx - x * x, count * yy - y * y
    # Differences of large numbers: what is left of equal ones is rounding.
    least = 1e-12 * count
    if spread_x <= least * xx or spread_y <= least * yy:
        return None
    return float((count * xy - x * y) / (spread_x * spread_y) ** 0.5)
