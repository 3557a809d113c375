"""The loss of a step: the terms of its objective, and those of the model beside it."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ftkit.models.language_model import LanguageModel, output_of
from ftkit.objectives.companion import Companion, Context
from ftkit.objectives.objective import EXCHANGE, Batch, Objective, checked_sums, shares_of_rank
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
        self._statistics: Tensor | None = None
        """[statistics]: of the objective, of the whole step; None: it needs none."""

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
        return of_routers or self.objective.observes_mismatched

    def begin(self) -> None:
        """Forget the statistics of the step before."""
        self._choices = self._statistics = None

    def observe_mismatched(self, batch: Batch, context: Context) -> None:
        """Add a micro-batch to the statistics of the objective, if it needs any.

        Args:
            batch: on its device.
            context: in which the model computes.
        """
        if self.objective.observes_mismatched:
            found = mismatched_statistics(
                self.objective, self._model, self._companion, batch, context
            )
            self._statistics = found if self._statistics is None else self._statistics + found

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

    def finish_statistics(self) -> None:
        """Sum the statistics over all ranks; every rank calls this."""
        if self._choices is not None:
            self._choices = sum_over_ranks(self._choices)
        if self._statistics is not None:
            self._statistics = sum_over_ranks(self._statistics)

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
        if self._statistics is not None:
            batch["statistics"] = self._statistics
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
def mismatched_statistics(
    objective: Objective,
    model: LanguageModel,
    companion: Companion | None,
    batch: Batch,
    context: Context,
) -> Tensor:
    """Statistics of the mismatched sequences of a micro-batch.

    Args:
        objective: what is learned.
        model: its dropout is off meanwhile, so that statistics do not depend on ranks.
        companion: if the objective needs one; it computes these sequences anew.
        batch: on its device, with these sequences under "mismatched".
        context: in which the model computes.

    Returns:
        [statistics].
    """
    mismatched: Batch = {**batch["mismatched"], EXCHANGE: model.body.exchange}
    is_training = model.training
    model.eval()
    with context():
        output = output_of(model, mismatched, objective.output(mismatched))
    model.train(is_training)
    # After the model itself: in its first pass, DeepSpeed learns which parameters its layers use,
    # and refuses those of an adapter that was off then.
    if companion is not None:
        companion.add_to(mismatched)
    (found,) = shares_of_rank(objective, [objective.statistics(output, mismatched)], mismatched)
    return found
