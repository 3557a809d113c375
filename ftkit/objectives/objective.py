"""The interface of an objective, its terms, and the objective that a recipe names."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ftkit.data.samples.sample_set import Joined, Samples
from ftkit.errors import UserError
from ftkit.models.loss import HeadOutput
from ftkit.recipe.objectives import Observed, objective_options, objective_row
from ftkit.recipe.recipe import Component
from ftkit.utils.accelerators.use import sum_dtype

Batch = dict[str, Any]
"""Micro-batch as `ftkit.data.samples.loader.collate` returns it."""
EXCHANGE = "exchange"
"""Key of what a micro-batch is given where ranks share its sequences: how they exchange."""
OF_STEP = "of_step"
"""Key of what `Objective.of_step` has made of a whole step, in the micro-batches of it."""
LOSS = "loss"
"""Name of the loss of a step, and of the term of an objective that has one alone."""
Amounts = Mapping[str, npt.NDArray[np.int64] | npt.NDArray[np.float64]]
"""By name, [samples]: how much each sample adds to a divisor of its step."""


@dataclass(frozen=True, kw_only=True)
class Term:
    """A part of the loss: a sum over the samples of a step, divided by a number of the whole step.

    So its value does not depend on how a step is split into ranks and micro-batches.
    """

    name: str
    """Name in reports."""
    divisor: str
    """Name of the amount by which the sum is divided; where a step has none, the term is 0."""
    coefficient: float | None = 1.0
    """Factor in the loss of the step; None: the term is only reported."""
    is_share: bool = False
    """Whether it is a share from 0 to 1, which is shown in per cent."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A number of validation that is computed from sums over all samples, such as F1."""

    name: str
    """Name in reports."""
    is_share: bool = False
    """Whether it is a share from 0 to 1, which is shown in per cent."""


class Objective(ABC):
    """What is learned from the samples of a step.

    The loss of a step is the sum of its terms times their coefficients. An objective computes the
    sums of one micro-batch; the loop divides them and adds them up.

    What has to be known before torch is loaded stands in `ftkit.recipe.objectives`; an objective of
    a plugin has it as attributes of the same names, such as `preference = "pairs"`.
    """

    terms: tuple[Term, ...]
    """The terms. One that is the whole loss is called `LOSS`."""
    measures: tuple[Measure, ...] = ()
    """What validation reports beside the terms, by `tallies` and `measured`."""
    needs_reference = False
    """Whether micro-batches need `reference`: the log-probability of each sequence under the
    reference model."""
    needs_teacher = False
    """Whether micro-batches need what the companion of the name teacher adds to them."""
    observes: Observed | None = None
    """The sequences of which it needs `observed` before the first backward pass of a step: its own,
    or those that `joined` makes; None: of none."""
    joined: Joined | None = None
    """Makes a sequence of a sample, the one before it in the order of the step, and the tokens that
    it may have at most; None: `observes` is not joined."""
    is_smoothed = False
    """Whether train.label_smoothing applies: to what `SummedLoss` computes without a `token_loss`.
    A class of a plugin that has another `output` does not inherit it."""
    shares_sequences = False
    """Whether ranks may each have pieces of its sequences (strategy.context). A class of a plugin
    that has another `output` or other `sums` does not inherit it."""
    target_size = 0
    """Numbers of the target of a sequence, what is learned of it as a whole; 0: it has none."""
    of_sequences = False
    """Whether its sums are of whole sequences, by `sequence_sums`, and not of tokens."""
    is_cross_entropy = False
    """Whether exp(validation loss) is a perplexity."""

    @property
    def reported(self) -> tuple[Term | Measure, ...]:
        """Terms that are reported beside the loss, and measures."""
        return (*(term for term in self.terms if term.name != LOSS), *self.measures)

    def loss_of(self, values: Mapping[str, float]) -> float:
        """Loss of a step from the values of its terms, by name."""
        return sum(
            values[term.name] * term.coefficient
            for term in self.terms
            if term.coefficient is not None
        )

    @property
    def validated(self) -> "Objective":
        """The objective that validation measures: by default this one."""
        return self

    @property
    def alone(self) -> "Objective":
        """The objective that measures a result without other models, such as a teacher."""
        return self.validated

    def view(self, samples: Samples) -> Samples:
        """Choose what the model is given of samples: by default all tokens but the last."""
        return samples

    @abstractmethod
    def amounts(self, samples: Samples) -> Amounts:
        """Count what the terms are divided by.

        Args:
            samples: a whole data set, as `view` returns it.
        """

    @abstractmethod
    def output(self, batch: Batch) -> HeadOutput:
        """Choose what the model computes of a micro-batch."""

    @abstractmethod
    def sums(self, output: Tensor, batch: Batch) -> Sequence[Tensor]:
        """Sum the terms over a micro-batch.

        Args:
            output: of the model.
            batch: the same micro-batch.

        Returns:
            A scalar for each term.
        """

    def tallies(self, output: Tensor, batch: Batch) -> Tensor:
        """Sum over a micro-batch what the measures are functions of.

        Args:
            output: of the model.
            batch: the same micro-batch.

        Returns:
            [numbers], in the dtype of sums.
        """
        # Not abstract: only objectives with measures have them.
        raise NotImplementedError

    def measured(self, tallies: Tensor) -> Mapping[str, float]:
        """Compute the measures, by name; one that the samples say nothing about is left out.

        Args:
            tallies: [numbers], summed over all samples, on the host.
        """
        # Not abstract, as `tallies`.
        raise NotImplementedError

    def observed(self, output: Tensor, batch: Batch) -> Tensor:
        """Compute what the loss needs of each sequence before any of it is known; see `observes`.

        Args:
            output: of the model, without gradients. Of a step's own sequences dropout is that of
                the pass that trains; of joined ones it is off.
            batch: these sequences, with `reference` if the objective needs one.

        Returns:
            [sequences, numbers]; those of fillers count for nothing.
        """
        # Not abstract: only objectives that observe steps have it.
        raise NotImplementedError

    def of_step(self, observed: Tensor) -> Any:
        """Make what `sums` finds under `OF_STEP` in each micro-batch of a step.

        Such as a mean, or gradients of the loss with respect to vectors (two passes, as in Gao et
        al. 2021, https://arxiv.org/abs/2101.06983). In a validation, all its samples are the step.

        Args:
            observed: [sequences of the step, numbers], in their order, the same on every rank.
        """
        # Not abstract, as `observed`.
        raise NotImplementedError


def make_objective(objective: Component) -> Objective:
    """Make the objective of a recipe.

    Raises:
        UserError: unknown objective or option, or a value out of its range.
    """
    name, options = objective["class_path"], objective_options(objective)
    made = objective_row(name).make(options)
    assert isinstance(made, Objective)
    check_terms(made)
    check_observing(made)
    return made


def ignores_padding(objective: Objective) -> bool:
    """Whether labels of weight 0, and of no sequence, count for nothing in an objective."""
    # A class of a plugin may count labels by itself, also one that inherits from a class of ours.
    return type(objective).__module__.startswith("ftkit.")


def check_terms(objective: Objective) -> None:
    """Refuse an objective whose terms make no loss.

    Raises:
        UserError: it has none, two of one name, or none that counts in the loss.
    """
    name, terms = type(objective).__name__, tuple(getattr(objective, "terms", ()))
    names = [term.name for term in terms if isinstance(term, Term)]
    if len(names) < len(terms) or not terms:
        raise UserError(
            f"{name}.terms is {terms!r}, but must be the terms of the loss. "
            'Try terms = (ftkit.Term(name="loss", divisor="label_tokens"),).'
        )
    if len({*names}) < len(names):
        raise UserError(f"{name}.terms has two terms of one name: {', '.join(names)}. Rename one.")
    if all(term.coefficient is None for term in terms):
        raise UserError(
            f"{name}.terms has no term with a coefficient, so there is no loss. Leave out "
            "coefficient=None of one."
        )


def check_observing(objective: Objective) -> None:
    """Refuse an objective that observes steps and does not say what.

    Raises:
        UserError: `observes` is something else, or a method that it needs is missing.
    """
    name, observes = type(objective).__name__, objective.observes
    if observes not in (None, *get_args(Observed)):
        raise UserError(f"{name}.observes is {observes!r}, but must be own, joined or None.")
    needed = ["observed", "of_step"] if observes else []
    needed += ["joined"] if observes == "joined" else []
    for method in needed:
        if getattr(type(objective), method) is getattr(Objective, method):
            raise UserError(
                f"{name}.observes is {observes}, but {name} has no {method}. Define it, or leave "
                "observes out."
            )


def checked_amounts(objective: Objective, samples: Samples) -> Amounts:
    """Count what the terms of an objective are divided by.

    Raises:
        UserError: a divisor of a term is missing, or does not have one number for each sample.
    """
    # The shape too: the sum of an array of [samples, sequences] is a number, but another one.
    name, amounts = type(objective).__name__, objective.amounts(samples)
    for term in objective.terms:
        found = amounts.get(term.divisor)
        shape = None if found is None else np.shape(found)
        if shape != (len(samples),):
            what = "is missing" if shape is None else f"has the shape {shape}"
            raise UserError(
                f"{name}.amounts: {term.divisor}, by which the term {term.name} is divided, "
                f"{what}; it returns {', '.join(amounts) or 'nothing'}. Return an array of "
                f"{len(samples)} numbers, one for each sample."
            )
    return amounts


def checked_sums(objective: Objective, output: Tensor, batch: Batch) -> Sequence[Tensor]:
    """Sum the terms of an objective over a micro-batch.

    Raises:
        UserError: there is not one scalar tensor for each term.
    """
    # Shapes and types alone: a value would make the host wait for the device in every step.
    name, sums = type(objective).__name__, objective.sums(output, batch)
    if not isinstance(sums, tuple | list) or len(sums) != len(objective.terms):
        count = f"{len(sums)} sums" if isinstance(sums, tuple | list) else "no tuple"
        terms = ", ".join(term.name for term in objective.terms)
        raise UserError(
            f"{name}.sums returns {count}, but its terms are: {terms}. Return a tuple with one sum "
            "for each."
        )
    for term, value in zip(objective.terms, sums, strict=True):
        if not isinstance(value, Tensor) or value.ndim:
            is_tensor = isinstance(value, Tensor)
            found = f"of shape {list(value.shape)}" if is_tensor else f"a {type(value).__name__}"
            raise UserError(
                f"{name}.sums: the sum of the term {term.name} has to be a scalar tensor, but is "
                f"{found}. Sum a tensor, without .item()."
            )
    return shares_of_rank(objective, sums, batch)


def checked_observed(objective: Objective, output: Tensor, batch: Batch) -> Tensor:
    """Compute what an objective observes of a micro-batch.

    Raises:
        UserError: it is not a row of numbers for each sequence.
    """
    name, count = type(objective).__name__, len(batch["lengths"])
    rows = objective.observed(output, batch)
    if not isinstance(rows, Tensor) or rows.ndim != 2 or len(rows) != count:
        is_tensor = isinstance(rows, Tensor)
        found = f"of shape {list(rows.shape)}" if is_tensor else f"a {type(rows).__name__}"
        raise UserError(
            f"{name}.observed has to be a tensor of {count} rows of numbers, one for each "
            f"sequence, but is {found}. Return values[:, None] for one number of each."
        )
    return rows


def shares_of_rank(objective: Objective, sums: Sequence[Tensor], batch: Batch) -> Sequence[Tensor]:
    """Return what this rank adds to sums over all ranks.

    Args:
        objective: which has computed them.
        sums: of a micro-batch, or of the tokens of it that are here.
        batch: the micro-batch.
    """
    exchange = batch.get(EXCHANGE)
    if exchange is None or not objective.of_sequences:
        return sums
    # All ranks that share the sequences have computed the same.
    return [value / exchange.piece.count for value in sums]


def sequence_sums(values: Tensor, batch: Batch) -> Tensor:
    """Sum what each label token has over its sequence.

    Where ranks share sequences, each calls this with its tokens.

    Args:
        values: [labels, ...].
        batch: the micro-batch they are of.

    Returns:
        [sequences, ...], in the dtype of sums.
    """
    # In float64 where there is one: a difference of two sums of hundreds of nats is what counts.
    kind, count = sum_dtype(values.device), len(batch["lengths"])
    # One more: labels that only pad the micro-batch are of no sequence.
    sums = values.new_zeros(count + 1, *values.shape[1:], dtype=kind)
    sums = sums.index_add(0, batch["label_sequences"], values.to(kind))[:count]
    exchange = batch.get(EXCHANGE)
    return sums if exchange is None else exchange.summed(sums)
