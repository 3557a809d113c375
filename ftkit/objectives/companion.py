"""What an objective needs of a model that is not trained, in every micro-batch."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ftkit.models.language_model import LanguageModel, output_of
from ftkit.models.loss import LogProbabilities
from ftkit.objectives.objective import Batch, sequence_sums

Context = Callable[[], AbstractContextManager[object]]


class Companion(ABC):
    """A model that is not trained, and of which an objective needs numbers."""

    models: tuple[LanguageModel, ...] = ()
    """Models that it holds in memory beside the one that is trained."""

    @abstractmethod
    def add_to(self, batch: Batch) -> None:
        """Add what the objective needs of it to a micro-batch on its device."""


@torch.no_grad()
def sequence_log_probabilities(model: LanguageModel, batch: Batch) -> Tensor:
    """Log-probability of each sequence of a micro-batch, [sequences] in nats, without gradients."""
    return sequence_sums(output_of(model, batch, LogProbabilities()), batch)
