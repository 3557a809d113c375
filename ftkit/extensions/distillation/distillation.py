"""Distillation: the distributions of another model, the teacher, on given answers.

For each label token the student learns the teacher's probabilities of all tokens of the vocabulary,
and not only which token is written there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ftkit.data.samples.sample_set import Samples
from ftkit.extensions.other_models.divergence import Direction, Divergence
from ftkit.extensions.other_models.reference import TEACHER_HEAD, TEACHER_ROWS
from ftkit.models.loss import HeadOutput
from ftkit.objectives.objective import LOSS, Amounts, Batch, Objective, Term
from ftkit.objectives.supervised import Supervised, own_probability


class Distill(Objective):
    """The mean divergence from a teacher over the label tokens of a step, in nats.

    With p the distribution of the teacher over the next token and q that of the student, both of
    logits divided by the temperature t, the divergence of a token is:

    - forward: t^2 KL(p, q), the student covers everything that the teacher may say. Hinton et al.
      2015, https://arxiv.org/abs/1503.02531.
    - reverse: t^2 KL(q, p), the student keeps to what the teacher finds likely. Gu et al. 2023
      (MiniLLM), https://arxiv.org/abs/2306.08543.

    On given answers both are the supervised case of Agarwal et al. 2023 (GKD),
    https://arxiv.org/abs/2306.13649. Where tokens have weights, it is the weighted mean.
    """

    needs_teacher = True
    shares_sequences = True
    _further: Mapping[str, Any] = {}

    def __init__(
        self,
        *,
        divergence: Direction = "forward",
        temperature: float = 1.0,
        sft_weight: float = 0.0,
    ) -> None:
        """Choose the divergence.

        Args:
            divergence: its direction.
            temperature: by which the logits are divided.
            sft_weight: of the cross-entropy of the given answers beside it.
        """
        self._direction, self._temperature = divergence, temperature
        self._sft_weight = sft_weight
        divisor = "label_tokens"
        self.terms = (Term(name=LOSS, divisor=divisor),)
        if sft_weight:
            self.terms += (Term(name="divergence", divisor=divisor, coefficient=None),)
        self.terms += (Term(name="cross_entropy", divisor=divisor, coefficient=None),)

    @property
    def alone(self) -> Objective:
        return Supervised()

    def amounts(self, samples: Samples) -> Amounts:
        return Supervised().amounts(samples)

    def output(self, batch: Batch) -> HeadOutput:
        return Divergence(
            batch[TEACHER_HEAD],
            batch[TEACHER_ROWS],
            direction=self._direction,
            temperature=self._temperature,
            cross_entropy_weight=self._sft_weight,
            weights=batch.get("weights"),
            **self._further,
        )

    def sums(self, output: Tensor, batch: Batch) -> Sequence[Tensor]:
        loss, divergence, cross_entropy = output
        if self._sft_weight:
            return loss, divergence, cross_entropy
        return loss, cross_entropy


class Asft(Distill):
    """Anchored supervised fine-tuning: the loss of dft, close to a reference, the teacher.

    The mean over the label tokens of a step of p CE + alpha KL(q, p'), in nats, with CE the
    cross-entropy of a label, p its probability as a constant, and p' and q the distributions of
    the model and of the reference. Zhu et al. 2025, "Anchored supervised fine-tuning",
    https://arxiv.org/abs/2509.23753; the direction is that of LLaMA-Factory.
    """

    def __init__(self, *, alpha: float = 0.1) -> None:
        """Choose the weight of the divergence."""
        super().__init__(sft_weight=1.0)
        self._further = {"divergence_weight": alpha, "token_weight": own_probability}

    @property
    def validated(self) -> Objective:
        # As of dft, so that losses of runs compare.
        return Supervised()
