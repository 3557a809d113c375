"""The loss of a step: the terms of its objective, and those of the model beside it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ftkit.models.language_model import LanguageModel, output_of
from ftkit.objectives.companion import Companion, Context
from ftkit.objectives.objective import (
    EXCHANGE,
    OF_STEP,
    Batch,
    Objective,
    checked_observed,
    checked_sums,
)
from ftkit.strategies.distributed import sum_over_ranks
from ftkit.utils.accelerators.use import sum_dtype

ROUTER_LOSS = "router_aux_loss"
"""Name of the term of the routers, without its coefficient."""


class StepLoss:
    """Makes the loss of each micro-batch, so that their sum is the loss of the step."""

    def __init__(
        self, objective: Objective, model: LanguageModel, companion: Companion | None = None
    ) -> None:
        """Prepare for the steps of a model.

        Args:
            objective: what is learned.
            model: its routers may add a term.
            companion: another model, for the training samples, if the objective needs one.
        """
        self.objective, self._model, self._routing = objective, model, model.routing
        self._companion = companion
        self._choices: Tensor | None = None
        """[experts]: choices of the routers in the whole step; None: it has one micro-batch."""
        self._observed: Tensor | None = None
        """[sequences of the step + 1, numbers]: those that are here; None: the objective needs
        none."""
        self._of_step: Any = None
        """What the objective has made of them."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the terms, in the order of `of_micro_batch`."""
        names = tuple(term.name for term in self.objective.terms)
        return names if self._routing.loss is None else (*names, ROUTER_LOSS)

    def needs_pass(self, micro_batches: int) -> bool:
        """Whether a step of this many micro-batches needs a pass over all of them first."""
        # The routers' loss is a product of means over the whole step, so the gradients of the
        # first micro-batch already depend on the choices in all of them.
        of_routers = self._routing.loss is not None and micro_batches > 1
        return of_routers or self.objective.observes is not None

    def begin(self) -> None:
        """Forget the step before."""
        self._choices = self._observed = self._of_step = None

    def observe(self, batch: Batch, step: int, context: Context) -> None:
        """Add a micro-batch to what the objective needs of a step, if it needs any.

        Args:
            batch: on its device.
            step: optimizer steps done before.
            context: in which the model computes.
        """
        if self.objective.observes:
            is_own, tokens = self.objective.observes == "own", self._model.body.tokens
            with tokens.of(step, batch) if is_own else nullcontext():
                self._observed = with_observed(
                    self._observed, self.objective, self._model, self._companion, batch, context
                )

    @torch.no_grad()
    def observe_routing(self, batch: Batch) -> None:
        """Add a micro-batch to the choices of the routers, if they have a loss."""
        if self._routing.loss is None:
            return
        with self._routing.of(batch["is_real"]):
            self._model(
                batch["input_ids"],
                # No positions: the head computes nothing, only routers matter.
                batch["label_indices"][:0],
                sequence_lengths=batch["sequence_lengths"],
            )
            routed = self._routing.take()
        assert routed is not None
        self._choices = routed.choices if self._choices is None else self._choices + routed.choices

    def finish_observing(self) -> None:
        """Gather what was observed over all ranks; every rank calls this."""
        if self._choices is not None:
            self._choices = sum_over_ranks(self._choices)
        if self._observed is not None:
            self._of_step = of_whole_step(self.objective, self._observed)
            self._observed = None

    def refer(self, batch: Batch) -> None:
        """Add what the objective needs of other ranks, and of another model, to a micro-batch.

        Args:
            batch: on its device; outside `watching` and without noise, which are of the model that
                is trained.
        """
        batch[EXCHANGE] = self._model.body.exchange
        if self._companion is not None:
            self._companion.add_to(batch)

    def watching(self, batch: Batch) -> AbstractContextManager[None]:
        """Context for the forward and backward pass of a micro-batch."""
        return self._routing.of(batch["is_real"])

    def of_micro_batch(
        self, forward: Callable[..., Tensor], batch: Batch, shares: Tensor
    ) -> Tensor:
        """Share of a micro-batch in the loss of its step, with gradients.

        Args:
            forward: computes an output of the model for the micro-batch.
            batch: the micro-batch.
            shares: [terms]; the micro-batch's share of each is added.
        """
        objective = self.objective
        batch[OF_STEP] = self._of_step
        sums = checked_sums(objective, forward(batch, objective.output(batch)), batch)
        loss: Tensor | None = None
        for number, (term, total) in enumerate(zip(objective.terms, sums, strict=True)):
            divisor = batch["divisors"][term.divisor]
            # A step may have none of what is counted, as desirable answers; then the sum is 0.
            share = total / torch.where(divisor == 0, 1, divisor)
            shares[number] += share.detach()
            if term.coefficient is not None:
                added = share if term.coefficient == 1 else term.coefficient * share
                loss = added if loss is None else loss + added
        assert loss is not None
        routed, of_routers = self._routing.take(), self._routing.loss
        if routed is not None and of_routers is not None:
            choices = self._choices
            if choices is None:  # this is the only micro-batch
                choices = sum_over_ranks(routed.choices)
            share = of_routers.share(routed.probabilities, choices)
            shares[-1] += share.detach()
            loss = loss + of_routers.coefficient * share
        return loss


def zeros_for(step_loss: StepLoss, device: torch.device) -> Tensor:
    """[terms] zeros, to add shares to."""
    return torch.zeros(len(step_loss.names), dtype=sum_dtype(device), device=device)


@torch.no_grad()
def with_observed(
    known: Tensor | None,
    objective: Objective,
    model: LanguageModel,
    companion: Companion | None,
    batch: Batch,
    context: Context,
) -> Tensor:
    """Add what the objective observes of a micro-batch to what is known of its step.

    Args:
        known: of micro-batches before it on this rank, see the result; None: it is the first one.
        objective: what is learned.
        model: dropout is off for joined sequences, so that they do not depend on ranks.
        companion: if the objective needs one; joined sequences are computed anew.
        batch: on its device.
        context: in which the model computes.

    Returns:
        [sequences of the step + 1, numbers], in their order, 0 for those that other ranks have; the
        last row is of fillers.
    """
    is_joined, is_training = objective.observes == "joined", model.training
    seen: Batch = {**(batch["joined"] if is_joined else batch), EXCHANGE: model.body.exchange}
    model.train(is_training and not is_joined)
    with context():
        output = output_of(model, seen, objective.output(seen))
    model.train(is_training)
    # After the model itself: in its first pass, DeepSpeed learns which parameters its layers use,
    # and refuses those of an adapter that was off then.
    if companion is not None:
        companion.add_to(seen)
    rows = checked_observed(objective, output, seen)
    if known is None:
        known = rows.new_zeros(batch["sequences_of_step"] + 1, rows.shape[1])
    exchange = model.body.exchange
    if exchange is None or exchange.piece.index == 0:  # of ranks that share sequences, the first
        known[torch.tensor(batch["places"], device=known.device)] = rows
    return known


@torch.no_grad()
def of_whole_step(objective: Objective, observed: Tensor) -> Any:
    """Make what the objective needs of a whole step; every rank calls this.

    Args:
        objective: what is learned.
        observed: by `with_observed`, of all micro-batches of this rank.
    """
    # Every sequence is of one rank, so the sums are exact, and the same on every rank.
    return objective.of_step(sum_over_ranks(observed[:-1].contiguous()))
