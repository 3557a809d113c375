"""Preference tuning on pairs: which of two answers to a prompt is the better one.

An answer's log-probability is the sum over its label tokens. A pair is one sample: its two
sequences are always in one micro-batch, the chosen one first.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ftkit.data.samples.sample_set import Samples
from ftkit.models.loss import HeadOutput, LogProbabilities
from ftkit.objectives.objective import LOSS, Amounts, Batch, Objective, Term, sequence_sums

DpoLoss = Literal["sigmoid", "ipo", "hinge", "conservative", "robust"]
PAIRS, CHOSEN_TOKENS = "pairs", "chosen_tokens"


class Answers(NamedTuple):
    """One half of the pairs of a micro-batch: all chosen answers, or all rejected ones."""

    log_probability: Tensor
    """[pairs] float64 (if the device has it), in nats, summed over the answer's tokens."""
    tokens: Tensor
    """[pairs], label tokens of each answer."""
    reference: Tensor | None
    """[pairs]: log-probability under the reference model; None: there is none."""

    @property
    def ratio(self) -> Tensor:
        """[pairs]: log-probability relative to the reference model."""
        assert self.reference is not None
        return self.log_probability - self.reference

    @property
    def mean(self) -> Tensor:
        """[pairs]: log-probability per token."""
        return self.log_probability / self.tokens


class Paired(Objective):
    """An objective on pairs."""

    preference = "pairs"
    shares_sequences = True
    of_sequences = True

    def amounts(self, samples: Samples) -> Amounts:
        return {
            PAIRS: np.ones(len(samples), dtype=np.int64),
            CHOSEN_TOKENS: samples.label_counts_by_sequence[:, 0],
        }

    def output(self, batch: Batch) -> HeadOutput:
        return LogProbabilities()

    def sums(self, output: Tensor, batch: Batch) -> Sequence[Tensor]:
        tokens = sequence_sums(torch.ones_like(output), batch)
        log_probabilities = sequence_sums(output, batch)
        reference = batch.get("reference")
        halves = []
        for half in (0, 1):
            of_half = slice(half, None, 2)  # chosen and rejected answers in turn
            halves.append(
                Answers(
                    log_probabilities[of_half],
                    # A filler has no tokens: 0 / 0 would be NaN, and NaN times 0 is NaN.
                    tokens[of_half].clamp(min=1),
                    None if reference is None else reference[of_half],
                )
            )
        chosen, rejected = halves
        # Fillers count for nothing. They are not left out, because then the host would have to wait
        # for a device to know how many pairs there are.
        real = batch["is_real_sequence"][::2]
        losses = self.losses(chosen, rejected, real)
        with torch.no_grad():
            better, worse = self.rewards(chosen), self.rewards(rejected)
        return *losses, *sums_of_rewards(better, worse, real)

    @abstractmethod
    def losses(self, chosen: Answers, rejected: Answers, real: Tensor) -> Sequence[Tensor]:
        """Sum the terms of the loss over the pairs of a micro-batch.

        Args:
            chosen: the better answers.
            rejected: the others.
            real: [pairs] bool; others are fillers.
        """

    @abstractmethod
    def rewards(self, answers: Answers) -> Tensor:
        """[pairs]: implicit rewards, whose difference the loss raises."""


def terms_of_rewards() -> tuple[Term, ...]:
    """Terms that are reported of the rewards of pairs."""
    names = ("accuracy", "margin", "chosen_reward", "rejected_reward")
    return tuple(
        Term(name=name, divisor=PAIRS, coefficient=None, is_share=name == "accuracy")
        for name in names
    )


@torch.no_grad()
def sums_of_rewards(better: Tensor, worse: Tensor, real: Tensor) -> Sequence[Tensor]:
    """Sums for `terms_of_rewards`.

    Args:
        better: [pairs], rewards of the chosen answers.
        worse: [pairs], of the others.
        real: [pairs] bool; others are fillers.
    """
    # A tie is half right: what a coin would get, not what a broken model would.
    right = (better > worse).to(better.dtype) + 0.5 * (better == worse)
    return [(values * real).sum() for values in (right, better - worse, better, worse)]


class Dpo(Paired):
    """Direct preference optimisation, with a reference model.

    With d the difference of the pair's log-probability ratios, the loss of a pair is:

    - sigmoid: -log s(beta d). Rafailov et al. 2023, https://arxiv.org/abs/2305.18290.
    - conservative: -(1 - e) log s(beta d) - e log s(-beta d), e the share of wrong labels.
      Mitchell 2023, https://ericmitchell.ai/cdpo.pdf.
    - robust: (-(1 - e) log s(beta d) + e log s(-beta d)) / (1 - 2 e).
      Chowdhury et al. 2024, https://arxiv.org/abs/2403.00409.
    - hinge: max(0, 1 - beta d). Zhao et al. 2023 (SLiC), https://arxiv.org/abs/2305.10425.
    - ipo: (d - 1 / (2 beta))^2, with ratios per token. Azar et al. 2023,
      https://arxiv.org/abs/2310.12036.
    """

    needs_reference = True

    def __init__(
        self,
        *,
        beta: float = 0.1,
        loss: DpoLoss = "sigmoid",
        label_noise: float = 0.0,
        sft_weight: float = 0.0,
    ) -> None:
        """Choose the loss.

        Args:
            beta: how closely the model stays to the reference.
            loss: its kind.
            label_noise: share of pairs whose answers are taken to be swapped, for conservative and
                robust.
            sft_weight: of the cross-entropy of the chosen answers, per token, beside it.
        """
        self._beta, self._loss, self._noise = beta, loss, label_noise
        terms = [Term(name="preference_loss" if sft_weight else LOSS, divisor=PAIRS)]
        if sft_weight:
            term = Term(name="sft_loss", divisor=CHOSEN_TOKENS, coefficient=sft_weight)
            terms.append(term)
        self._has_sft = bool(sft_weight)
        self.terms = (*terms, *terms_of_rewards())

    def losses(self, chosen: Answers, rejected: Answers, real: Tensor) -> Sequence[Tensor]:
        loss = (self._pair_losses(chosen, rejected) * real).sum()
        # Fillers have no tokens, so their log-probabilities are 0.
        return (loss, -chosen.log_probability.sum()) if self._has_sft else (loss,)

    def _pair_losses(self, chosen: Answers, rejected: Answers) -> Tensor:
        if self._loss == "ipo":
            difference = chosen.ratio / chosen.tokens - rejected.ratio / rejected.tokens
            return (difference - 1 / (2 * self._beta)) ** 2
        scaled = self._beta * (chosen.ratio - rejected.ratio)
        if self._loss == "hinge":
            return torch.relu(1 - scaled)
        right, wrong, noise = -F.logsigmoid(scaled), -F.logsigmoid(-scaled), self._noise
        if self._loss == "conservative":
            return (1 - noise) * right + noise * wrong
        if self._loss == "robust":
            return ((1 - noise) * right - noise * wrong) / (1 - 2 * noise)
        return right

    def rewards(self, answers: Answers) -> Tensor:
        return self._beta * answers.ratio


class Orpo(Paired):
    """Odds-ratio preference optimisation: no reference model.

    The cross-entropy of the chosen answers, per token, plus `weight` times -log s of the log odds
    ratio, with probabilities per token. Hong et al. 2024, https://arxiv.org/abs/2403.07691.
    """

    def __init__(self, *, weight: float = 0.1) -> None:
        """Choose the weight of the odds ratio beside the cross-entropy."""
        self.terms = (
            Term(name="sft_loss", divisor=CHOSEN_TOKENS),
            Term(name="odds_ratio_loss", divisor=PAIRS, coefficient=weight),
            *terms_of_rewards(),
        )

    def losses(self, chosen: Answers, rejected: Answers, real: Tensor) -> Sequence[Tensor]:
        # A filler has probability 1, whose odds are infinite; any other number does.
        means = [torch.where(real, answers.mean, -1.0) for answers in (chosen, rejected)]
        odds_ratio = _log_odds(means[0]) - _log_odds(means[1])
        return -chosen.log_probability.sum(), -(F.logsigmoid(odds_ratio) * real).sum()

    def rewards(self, answers: Answers) -> Tensor:
        return answers.mean


class SimPo(Paired):
    """Simple preference optimisation: no reference model, and a margin.

    -log s(beta (p - q) - beta gamma), with p and q the log-probabilities per token of chosen and
    rejected answer. Meng et al. 2024, https://arxiv.org/abs/2405.14734, whose margin is beta gamma
    here.
    """

    def __init__(self, *, beta: float = 2.0, margin: float = 0.5) -> None:
        """Choose the scale of the rewards, and the margin relative to it."""
        self._beta, self._margin = beta, margin
        self.terms = (Term(name=LOSS, divisor=PAIRS), *terms_of_rewards())

    def losses(self, chosen: Answers, rejected: Answers, real: Tensor) -> Sequence[Tensor]:
        difference = chosen.mean - rejected.mean - self._margin
        return (-(F.logsigmoid(self._beta * difference) * real).sum(),)

    def rewards(self, answers: Answers) -> Tensor:
        return self._beta * answers.mean


def _log_odds(log_probability: Tensor) -> Tensor:
    """Log of p / (1 - p), from log p."""
    # expm1: the difference 1 - exp(log p) would have few digits where p is near 1.
    return log_probability - torch.log(-torch.expm1(log_probability))
