"""The reference: the model that an objective compares with, which is not trained.

It is the model as it is before the first step, or another one. Below an adapter the first is always
there; else log-probabilities are computed once, before training begins, or, where they depend on
the order of the samples, the reference stays in memory beside the trained model.
"""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ftkit.data.samples.layout import FILLER
from ftkit.extensions.other_models.divergence import FrozenHead, HiddenRows
from ftkit.models.language_model import LanguageModel, output_of
from ftkit.models.load_weights import Sharding
from ftkit.models.lora.experts import expert_pairs
from ftkit.models.lora.peft_layers import tuner_layers
from ftkit.models.loss import HeadOutput, LogProbabilities
from ftkit.objectives.companion import Companion, Context, sequence_log_probabilities
from ftkit.objectives.objective import Batch, sequence_sums
from ftkit.recipe.adapter_types import is_adapter
from ftkit.utils.accelerators.use import sum_dtype

TEACHER_HEAD, TEACHER_ROWS = "teacher_head", "teacher_rows"
"""Keys of a micro-batch: the teacher's head, and [labels, width], the rows it takes."""


class Reference(Companion):
    """Log-probabilities of answers under the reference model."""

    def add_to(self, batch: Batch) -> None:
        batch["reference"] = self.log_probabilities(batch)

    @abstractmethod
    def log_probabilities(self, batch: Batch) -> Tensor:
        """Log-probability of each sequence, summed over its label tokens.

        Args:
            batch: a micro-batch on its device.

        Returns:
            [sequences], in nats, in the dtype of sums, without gradients; 0 for fillers.
        """


class Frozen(Companion):
    """A model of its own that computes beside the trained one."""

    def __init__(self, model: LanguageModel, sharding: Sharding, context: Context) -> None:
        """Wrap a loaded model.

        Args:
            model: frozen, in evaluation mode.
            sharding: where its parameters are.
            context: in which it computes.
        """
        self.models = (model,)
        self._model, self._sharding, self._context = model, sharding, context

    @torch.no_grad()
    def _output(self, batch: Batch, output: HeadOutput) -> Tensor:
        """Compute an output of its head for a micro-batch."""
        with self._context():
            found = output_of(self._model, batch, output)
        # What it has gathered would stay beside the activations of the trained model.
        self._sharding.reshard(self._model)
        return found


class FrozenReference(Frozen, Reference):
    """Another model as the reference, or a copy of the base model as it is before training."""

    # For sequences that nobody knows before a step: the answers of some samples to the prompts of
    # others.

    def log_probabilities(self, batch: Batch) -> Tensor:
        return sequence_sums(self._output(batch, LogProbabilities()), batch)


class Teacher(Frozen):
    """The model whose distributions are learned; it computes each batch beside the student."""

    # Its logits are never whole: only hidden rows of the labels are kept until the student's head
    # computes, which then takes a few rows of both.

    def __init__(self, model: LanguageModel, sharding: Sharding, context: Context) -> None:
        super().__init__(model, sharding, context)
        self._head = FrozenHead(model.head, sharding.whole)

    def add_to(self, batch: Batch) -> None:
        batch[TEACHER_ROWS] = self._output(batch, HiddenRows())
        batch[TEACHER_HEAD] = self._head


class AdapterSwitch:
    """Switches the adapter of a model off, so that the model computes what its base does."""

    def __init__(self, model: nn.Module) -> None:
        # Found once: looking through all modules takes as long as a small layer computes.
        self._layers = [layer for _, layer in tuner_layers(model)]
        self._pairs = [pairs for _, pairs in expert_pairs(model)]

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context in which the adapter adds nothing, and its dropout draws nothing."""
        self._switch(is_on=False)
        try:
            yield
        finally:
            self._switch(is_on=True)

    def _switch(self, *, is_on: bool) -> None:
        for layer in self._layers:
            # PEFT 0.21 has a public method, but it also freezes the matrices.
            layer._disable_adapters = not is_on
        for pairs in self._pairs:
            pairs.is_on = is_on


class BelowAdapter(Reference):
    """The model that is trained, with its adapter switched off: the base model, in its weights."""

    # Weights are there once, and nothing is kept between steps: it is the same after a resume,
    # under any strategy, and for data that nobody knew at the start.

    def __init__(self, model: LanguageModel, context: Context) -> None:
        """Prepare to switch the adapter of a model off.

        Args:
            model: of which nothing but the adapter is trained.
            context: in which it computes.
        """
        trained = (name for name, one in model.named_parameters() if one.requires_grad)
        assert all(map(is_adapter, trained)), "below the adapter nothing is trained"
        self._model, self._context = model, context
        self._adapter = AdapterSwitch(model)

    def log_probabilities(self, batch: Batch) -> Tensor:
        with self._adapter.off(), self._context():
            return sequence_log_probabilities(self._model, batch)


class Computed(Reference):
    """Log-probabilities that were computed before training."""

    def __init__(self, values: npt.NDArray[np.float64]) -> None:
        """Wrap the values of a data set, [samples, sequences of each]; NaN: not known."""
        self._values = values.reshape(-1)

    def log_probabilities(self, batch: Batch) -> Tensor:
        numbers = np.array(batch["numbers"])
        found = np.where(numbers == FILLER, 0.0, self._values[numbers])
        assert not np.isnan(found).any(), "every sample of the run was computed"
        device: torch.device = batch["labels"].device
        return torch.from_numpy(found).to(sum_dtype(device)).to(device)
