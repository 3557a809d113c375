"""Supervised fine-tuning: the cross-entropy of the answers' tokens, also adapted to the model."""

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ftkit.data.samples.sample_set import Samples
from ftkit.models.loss import HeadOutput, SummedLoss, TokenLoss
from ftkit.objectives.objective import LOSS, Amounts, Batch, Objective, Term

EAFT_TOKENS = 20
"""Likeliest tokens whose entropy EAFT takes."""


def dft_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of each token times its own probability, as it is without gradient.

    Args:
        logits: [n, vocabulary].
        labels: [n].
    """
    losses = F.cross_entropy(logits, labels, reduction="none")
    return losses * torch.exp(-losses.detach())


def eaft_loss(logits: Tensor, labels: Tensor, alpha: float) -> Tensor:
    """Cross-entropy of each token times the entropy of the likeliest tokens, without gradient.

    Args:
        logits: [n, vocabulary].
        labels: [n].
        alpha: exponent of the entropy, which is 1 where these tokens are equally likely.
    """
    count = min(EAFT_TOKENS, logits.size(1))
    likeliest = logits.detach().topk(count, dim=1).values.log_softmax(1)
    entropy = -(likeliest.exp() * likeliest).sum(1) / math.log(count)
    return F.cross_entropy(logits, labels, reduction="none") * entropy**alpha


class Supervised(Objective):
    """The mean cross-entropy over the label tokens of a step, in nats.

    Where tokens have weights, the weighted mean: sum(weight x loss) / sum(weights).
    """

    terms = (Term(name=LOSS, divisor="label_tokens"),)
    is_cross_entropy = True
    _token_loss: TokenLoss | None = None

    def amounts(self, samples: Samples) -> Amounts:
        weights = samples.label_weights
        return {"label_tokens": samples.label_counts if weights is None else weights}

    def output(self, batch: Batch) -> HeadOutput:
        return SummedLoss(batch.get("weights"), self._token_loss)

    def sums(self, output: Tensor, batch: Batch) -> Sequence[Tensor]:
        return (output,)

    @property
    def validated(self) -> Objective:
        # Cross-entropy, whatever is trained: so losses and perplexities of runs compare.
        return Supervised()


class Dft(Supervised):
    """Dynamic fine-tuning: unlikely tokens weigh less.

    Wu et al. 2025, "On the generalization of SFT: a reinforcement learning perspective with reward
    rectification", https://arxiv.org/abs/2508.05629.
    """

    def __init__(self) -> None:
        self._token_loss = dft_loss


class Eaft(Supervised):
    """Entropy-adaptive fine-tuning: tokens weigh less where the model is sure.

    Diao et al. 2026, "Entropy-adaptive fine-tuning: resolving confident conflicts to mitigate
    forgetting", https://arxiv.org/abs/2601.02151. The authors' code in LLaMA-Factory divides the
    entropy by 3, which is ln 20 rounded.
    """

    def __init__(self, *, alpha: float = 1.0) -> None:
        """Choose the exponent of the entropy; 0: plain cross-entropy."""
        self._token_loss = partial(eaft_loss, alpha=alpha)
