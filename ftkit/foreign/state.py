"""Foreign state: what a checkpoint of another program holds, by its names of the parameters."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from ftkit.architectures.architecture import ModelLayout
from ftkit.config.recipe import Method
from ftkit.errors import UserError
from ftkit.foreign.parameter_order import TrainedParameter, trained_parameters
from ftkit.pretrained.base_model import BaseModel
from ftkit.pretrained.weights.files import WeightTensor

ForeignTensors = Mapping[str, WeightTensor]
"""By Hugging Face's names, of adapters by PEFT's, or by others: as `ForeignState.layout` says."""


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters with the same settings of the optimizer."""

    names: tuple[str, ...]
    """Of the parameters."""
    settings: Mapping[str, Any]
    """lr, initial_lr, weight_decay, betas, eps, ..., as far as the program keeps them."""


@dataclass(frozen=True, kw_only=True)
class ForeignState:
    """The state of training in a foreign checkpoint; its tensors are read when they are asked."""

    step: int
    """Optimizer steps done."""
    samples: int | None = None
    """Samples that they consumed; None: the program does not say."""
    epochs: float | None = None
    """Passes over the data; None: the program does not say."""
    loss: float | None = None
    """Of the newest step that was logged."""
    layout: ModelLayout | Literal["ftkit"] = "hf"
    """Whose names the tensors have; ftkit: those of our checkpoints."""
    parameters: ForeignTensors
    """Trained parameters, in the highest precision that is there."""
    moments: Mapping[str, ForeignTensors] | None
    """State of the optimizer, by torch's names of its kinds (exp_avg, ...). None: the program has
    kept none, so that the optimizer begins anew."""
    scalars: Mapping[str, float]
    """State that is one number for all parameters, such as Adam's step."""
    groups: Sequence[ParameterGroup]
    """All parameters that the optimizer updates."""
    notes: Sequence[str] = ()
    """What was not taken over, and what that means."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """Of the group with the most parameters."""
        largest = max(self.groups, key=lambda group: len(group.names), default=None)
        return {} if largest is None else largest.settings

    @property
    def learning_rate(self) -> float | None:
        """Of the next step; None: the program does not say."""
        found = self.settings.get("lr")
        return float(found) if found is not None else None


@dataclass(frozen=True)
class TrainedModel:
    """The model that a foreign run trains, as its own program calls its parameters."""

    base: BaseModel
    adapter: Path | None = None
    """Directory of the adapter's settings; None: all of it is trained."""

    @cached_property
    def parameters(self) -> tuple[TrainedParameter, ...]:
        """In the order of transformers' (and PEFT's) modules."""
        return trained_parameters(self.base, self.adapter)


class ForeignRun(ABC):
    """A checkpoint of another program, of which the small files are read."""

    program: str
    """What wrote it, for messages."""

    def __init__(self, directory: Path) -> None:
        """Look at a checkpoint; see `told`.

        Raises:
            UserError: a file is missing or damaged.
        """
        self.directory = directory

    @property
    def method(self) -> Method | None:
        """How the model is adapted; None: the recipe has to say."""
        return None

    @property
    def adapter(self) -> Path | None:
        """Directory of PEFT's settings, where an adapter is trained."""
        return None

    def told(self) -> dict[str, Any]:
        """Keys of a recipe that the checkpoint's small files decide."""
        return {}

    @abstractmethod
    def state(self, model: TrainedModel) -> ForeignState:
        """The state of training.

        Raises:
            UserError: a file is missing, damaged, unsafe, or of another model.
        """

    def broken(self, what: str) -> UserError:
        """What is said of a checkpoint that is not as its program writes it."""
        return UserError(
            f"{self.directory} ({self.program}): {what}. Give a whole checkpoint, and the base "
            "model and method (full or LoRA) that it is of."
        )
