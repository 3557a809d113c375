"""Supervised fine-tuning: the cross-entropy of the answers' tokens, also adapted to the model."""

import math
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from ftkit.data.samples.sample_set import Samples
from ftkit.models.loss import HeadOutput, SummedLoss
from ftkit.models.token_losses import TokenWeight
from ftkit.objectives.objective import LOSS, Amounts, Batch, Objective, Term

EAFT_TOKENS = 20
"""Likeliest tokens whose entropy EAFT takes."""


def own_probability(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the probability of each label, [n, 1].

    Args:
        log_probabilities: [n, vocabulary].
        labels: [n, 1].
    """
    return log_probabilities.gather(1, labels).exp()


def likeliest_entropy(log_probabilities: Tensor, _: Tensor, alpha: float) -> Tensor:
    """Return the entropy of the likeliest tokens at each label, [n, 1].

    Args:
        log_probabilities: [n, vocabulary].
        alpha: exponent of the entropy, which is 1 where these tokens are equally likely.
    """
    count = min(EAFT_TOKENS, log_probabilities.size(1))
    likeliest = log_probabilities.topk(count, dim=1).values.log_softmax(1)
    entropy = -(likeliest.exp() * likeliest).sum(1, keepdim=True) / math.log(count)
    return entropy**alpha


class Supervised(Objective):
    """The mean cross-entropy over the label tokens of a step, in nats.

    Where tokens have weights, the weighted mean: sum(weight x loss) / sum(weights).

    A z-loss is a coefficient times the mean of (log Z)^2 beside it, with Z the sum of exp(logits),
    by which the softmax divides: it keeps logits from drifting. Chowdhery et al. 2022 (PaLM),
    https://arxiv.org/abs/2204.02311.
    """

    terms: tuple[Term, ...] = (Term(name=LOSS, divisor="label_tokens"),)
    is_smoothed = True
    shares_sequences = True
    is_cross_entropy = True
    _token_weight: TokenWeight | None = None
    _z_loss = 0.0

    def __init__(self, *, z_loss: float = 0.0) -> None:
        """Choose the coefficient of the z-loss; 0: there is none."""
        self._z_loss = z_loss
        if z_loss:
            # The loss is the sum of both, which has one gradient: each is only reported.
            self.terms += tuple(
                Term(name=name, divisor="label_tokens", coefficient=None)
                for name in ("cross_entropy", "z_loss")
            )

    def amounts(self, samples: Samples) -> Amounts:
        weights = samples.label_weights
        return {"label_tokens": samples.label_counts if weights is None else weights}

    def output(self, batch: Batch) -> HeadOutput:
        return SummedLoss(
            batch.get("weights"), token_weight=self._token_weight, z_loss=self._z_loss
        )

    def sums(self, output: Tensor, batch: Batch) -> Sequence[Tensor]:
        return tuple(output) if self._z_loss else (output,)

    @property
    def validated(self) -> Objective:
        # Cross-entropy, whatever is trained: so losses and perplexities of runs compare.
        return Supervised()


class Dft(Supervised):
    """Dynamic fine-tuning: unlikely tokens weigh less.

    Wu et al. 2025, "On the generalization of SFT: a reinforcement learning perspective with reward
    rectification", https://arxiv.org/abs/2508.05629.
    """

    is_smoothed = False  # its weight is of the label alone

    def __init__(self) -> None:
        # Not an attribute of the class, of which the function would become a method.
        self._token_weight = own_probability


class Eaft(Supervised):
    """Entropy-adaptive fine-tuning: tokens weigh less where the model is sure.

    Diao et al. 2026, "Entropy-adaptive fine-tuning: resolving confident conflicts to mitigate
    forgetting", https://arxiv.org/abs/2601.02151. The authors' code in LLaMA-Factory divides the
    entropy by 3, which is ln 20 rounded.
    """

    is_smoothed = False  # as in `Dft`

    def __init__(self, *, alpha: float = 1.0) -> None:
        """Choose the exponent of the entropy; 0: plain cross-entropy."""
        self._token_weight = partial(likeliest_entropy, alpha=alpha)
