"""Reward models: a score of whole sequences, higher for the better answer of a pair."""

from collections.abc import Sequence

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from ftkit.data.samples.sample_set import Samples, ScoredSamples
from ftkit.extensions.preference.preference import PAIRS, sums_of_rewards, terms_of_rewards
from ftkit.models.loss import HeadOutput, Scores
from ftkit.objectives.objective import LOSS, Amounts, Batch, Objective, Term, sequence_sums


class Reward(Objective):
    """A reward model, whose score of a sequence is its output at the last token.

    The loss of a pair is -log s(chosen score - rejected score), the model of Bradley and Terry
    1952, https://doi.org/10.1093/biomet/39.3-4.324, as Ouyang et al. 2022 train it,
    https://arxiv.org/abs/2203.02155. Scores have no zero of their own: `center_weight` times the
    square of the sum of both keeps them around 0. Eisenstein et al. 2023,
    https://arxiv.org/abs/2312.09244.
    """

    shares_sequences = True
    of_sequences = True

    def __init__(self, *, center_weight: float = 0.0) -> None:
        """Choose the weight of the squared sum of the scores of a pair."""
        terms = [Term(name="preference_loss" if center_weight else LOSS, divisor=PAIRS)]
        if center_weight:
            terms.append(Term(name="center_loss", divisor=PAIRS, coefficient=center_weight))
        self._centers = bool(center_weight)
        self.terms = (*terms, *terms_of_rewards())

    def view(self, samples: Samples) -> Samples:
        return ScoredSamples(samples)

    def amounts(self, samples: Samples) -> Amounts:
        return {PAIRS: np.ones(len(samples), dtype=np.int64)}

    def output(self, batch: Batch) -> HeadOutput:
        return Scores()

    def sums(self, output: Tensor, batch: Batch) -> Sequence[Tensor]:
        # A sequence has one label, at its last token. Fillers have none, so their scores are 0.
        scores = sequence_sums(output, batch)
        better, worse = scores[::2], scores[1::2]
        real = batch["is_real_sequence"][::2]
        losses = [-(F.logsigmoid(better - worse) * real).sum()]
        if self._centers:
            losses.append(((better + worse) ** 2).sum())
        return *losses, *sums_of_rewards(better.detach(), worse.detach(), real)
