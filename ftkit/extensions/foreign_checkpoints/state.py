"""Foreign state: what a checkpoint of another program holds, by its names of the parameters."""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import ModelLayout
from ftkit.models.lora.peft_layers import stored_config
from ftkit.models.meta_device import on_meta_device
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.models.pretrained.weight_files import WeightTensor
from ftkit.recipe.recipe import Method
from ftkit.utils.confinement import without_limits
from ftkit.utils.damaged_files import reading

# As in transformers.Trainer.get_decay_parameter_names, besides all LayerNorms.
_UNDECAYED = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Names that transformers' Trainer leaves out of weight decay, in lower case."""
_OF_ADAPTER = ".default"
"""Name of an adapter in PEFT's memory, which its files leave out."""
# transformers 5.24 calls GPT-NeoX's head lm_head in memory, and still embed_out in files.
_OF_FILES = {("gpt_neox", "lm_head.weight"): "embed_out.weight"}


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter of transformers' or PEFT's model that is trained."""

    name: str
    """Name in files."""
    shape: torch.Size
    is_decayed: bool
    """Whether transformers' Trainer applies weight decay."""


def trained_parameters(base: BaseModel, adapter: Path | None) -> tuple[TrainedParameter, ...]:
    """Trained parameters of a model, in the order of its modules.

    Args:
        base: in Hugging Face's layout.
        adapter: directory of PEFT's settings; None: all of the model is trained.

    Raises:
        UserError: transformers does not know the model, or PEFT the adapter.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if not base.settings:
        raise UserError(
            f"checkpoint_dir {base.name} has no config.json, which is needed to match the "
            "parameters of the checkpoint. Give the base model in Hugging Face's layout."
        )
    settings = dict(base.settings)
    # for_model takes the family as an argument of its own.
    family = settings.pop("model_type")
    config = AutoConfig.for_model(family, **settings)
    with on_meta_device():
        with without_limits():  # those are for the checkpoint, and this is as large as its base
            model: Any = AutoModelForCausalLM.from_config(config)
        if adapter is not None:
            from peft import get_peft_model

            model = get_peft_model(model, stored_config(adapter))
    # The Trainer finds LayerNorms by class, other norms by name.
    norms = tuple(
        f"{name}." for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)
    )
    return tuple(
        TrainedParameter(
            _OF_FILES.get((family, name)) or _in_files(name),
            parameter.shape,
            not (name.startswith(norms) or _UNDECAYED.search(name.lower())),
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    )


def _in_files(name: str) -> str:
    """Turn PEFT's name of a parameter in memory into that in files; other names stay."""
    # PEFT keeps a copy of a layer that it trains whole; its files name the copy like the layer.
    name = name.replace(".modules_to_save.default.", ".")
    # PEFT inserts the name of the adapter, "default", and leaves it out when it saves.
    head, found, tail = name.rpartition(_OF_ADAPTER)
    return f"{head}{tail}" if found and ".lora_" in head and tail in ("", ".weight") else name


def plain_names(given: Iterable[str], known: Collection[str]) -> dict[str, str]:
    """Map the names that a program gives parameters to those in the model's own files.

    Programs wrap models, which puts a word before every name: `module.`, `model.`.

    Args:
        given: the program's.
        known: in files.

    Returns:
        For each of the program's names the one in files; names of other tensors without the prefix.
    """
    names = {name: _in_files(name) for name in given}
    # The longest name is the least ambiguous: what stands before it is the prefix of all.
    wanted = max(known, key=len)
    # With dots, so that only whole words of a name count.
    prefixes = {
        found.removesuffix(wanted) for found in names.values() if f".{found}".endswith(f".{wanted}")
    }
    prefix = min(prefixes, key=len, default="")
    return {name: found.removeprefix(prefix) for name, found in names.items()}


_MOST = 2**53
"""Limit of counts: above it, JSON cannot hold every number, and no training gets there."""
ForeignTensors = Mapping[str, WeightTensor]
"""Tensors by the names of Hugging Face, PEFT or others: see `ForeignState.layout`."""


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters with the same settings of the optimizer."""

    names: tuple[str, ...]
    """Names of the parameters."""
    settings: Mapping[str, Any]
    """lr, initial_lr, weight_decay, betas, eps, ..., as far as the program keeps them."""

    def __post_init__(self) -> None:
        """Refuse settings that no optimizer can have.

        Raises:
            ValueError: one is of another type, negative or not finite.
        """
        for key in ("lr", "initial_lr", "weight_decay", "eps", "momentum"):
            _check_number(key, self.settings.get(key))
        betas = self.settings.get("betas")
        if betas is not None:
            if not isinstance(betas, tuple | list) or len(betas) != 2:
                raise ValueError(f"betas are {betas!r:.100}")
            for beta in betas:
                _check_number("betas", beta)


@dataclass(frozen=True, kw_only=True)
class ForeignState:
    """The state of training in a foreign checkpoint; its tensors are read when needed."""

    step: int
    """Optimizer steps done."""
    samples: int | None = None
    """Samples that they consumed; None: the program does not say."""
    iteration: int | None = None
    """Steps as GPT-NeoX counts them, by which it finds its position in the data; None: another
    program wrote it."""
    micro_batch: int | None = None
    """Samples of one forward pass on all processes; None: the program does not say."""
    epochs: float | None = None
    """Passes over the data; None: the program does not say."""
    loss: float | None = None
    """Loss of the newest step that was logged."""
    layout: ModelLayout | Literal["ftkit"] = "hf"
    """Naming of the tensors; ftkit: as in our checkpoints."""
    parameters: ForeignTensors
    """Trained parameters, in the highest available precision."""
    moments: Mapping[str, ForeignTensors] | None
    """State of the optimizer, by torch's names of its kinds (exp_avg, ...). None: the program has
    kept none, so that the optimizer starts without state."""
    scalars: Mapping[str, float]
    """State that is one number for all parameters, such as Adam's step."""
    groups: Sequence[ParameterGroup]
    """All parameters that the optimizer updates."""
    notes: Sequence[str] = ()
    """Notes about what was not taken over, and its effect."""

    def __post_init__(self) -> None:
        """Refuse what no training can come to.

        Raises:
            ValueError: a number is of another type, negative or not finite, or a tensor holds
                something else than floating-point numbers.
        """
        counts = {
            "step": self.step,
            "iteration": self.iteration,
            "samples": self.samples,
            "samples of a step": self.micro_batch,
        }
        for key, count in counts.items():
            if count is not None and (type(count) is not int or not 0 <= count < _MOST):
                raise ValueError(f"{key}: {count!r:.100}")
        _check_number("epoch", self.epochs)
        for key, number in self.scalars.items():
            _check_number(key, number)
        for tensors in (self.parameters, *(self.moments or {}).values()):
            for name, tensor in tensors.items():
                if not tensor.dtype.is_floating_point:
                    raise ValueError(f"{name} holds numbers of {tensor.dtype}")

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the group with the most parameters."""
        largest = max(self.groups, key=lambda group: len(group.names), default=None)
        return {} if largest is None else largest.settings

    @property
    def learning_rate(self) -> float | None:
        """Learning rate of the next step; None: the program does not say."""
        found = self.settings.get("lr")
        return float(found) if found is not None else None


def _check_number(key: str, value: Any) -> None:
    """Refuse a setting or count that is neither None nor a finite number from 0 on."""
    # torch allows tensors here, such as a learning rate that is one.
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if value is not None and not (
        isinstance(value, int | float) and 0 <= value < _MOST  # not NaN either
    ):
        raise ValueError(f"{key}: {value!r:.100}")


def note_scalar(scalars: dict[str, float], kind: str, value: float, source: Path) -> None:
    """Add a parameter's number to those that hold for all parameters.

    Args:
        scalars: by kind, as in `ForeignState`.
        kind: its name, such as step.
        value: of this parameter.
        source: that it was read from, for messages.

    Raises:
        UserError: another parameter has another number, which a checkpoint cannot hold.
    """
    if scalars.setdefault(kind, value) != value:
        raise UserError(
            f"{source} has another {kind} for each parameter ({scalars[kind]:g} and {value:g}): "
            "some were not trained from the start. Start a new run from the weights, with "
            "--checkpoint_dir or --adapter."
        )


@dataclass(frozen=True)
class TrainedModel:
    """The model that a foreign run trains, as its own program calls its parameters."""

    base: BaseModel
    adapter: Path | None = None
    """Directory of the adapter's settings; None: all of it is trained."""

    @cached_property
    def parameters(self) -> tuple[TrainedParameter, ...]:
        """Trained parameters in the order of transformers' (and PEFT's) modules."""
        return trained_parameters(self.base, self.adapter)


class ForeignRun(ABC):
    """A checkpoint of another program, whose small files have been read."""

    program: str
    """Program that wrote it, for messages."""

    def __init__(self, directory: Path) -> None:
        """Keep the directory; subclasses read the small files.

        Raises:
            UserError: a file is missing or damaged.
        """
        self.directory = directory

    @property
    def method(self) -> Method | None:
        """Method of the run; None: only the recipe says it."""
        return None

    @property
    def adapter(self) -> Path | None:
        """Directory of PEFT's settings, where an adapter is trained."""
        return None

    def recipe_keys(self) -> dict[str, Any]:
        """Keys of a recipe that the checkpoint's small files decide.

        Raises:
            UserError: they are damaged.
        """
        with self.reading():
            return self._recipe_keys()

    def state(self, model: TrainedModel) -> ForeignState:
        """State of training at this checkpoint.

        Raises:
            UserError: a file is missing, damaged, unsafe, or of another model.
        """
        with self.reading():
            return self._state(model)

    def reading(self) -> AbstractContextManager[None]:
        """The guard around whatever reads the checkpoint."""
        return reading(
            self.directory,
            f"a checkpoint as {self.program} writes it",
            advice="Copy the whole checkpoint again.",
        )

    def _recipe_keys(self) -> dict[str, Any]:
        return {}

    @abstractmethod
    def _state(self, model: TrainedModel) -> ForeignState: ...

    def broken(self, what: str) -> UserError:
        """Error for a checkpoint that its program would not write."""
        return UserError(
            f"{self.directory} ({self.program}): {what}. Give a whole checkpoint, and the base "
            "model and method (full or LoRA) that it is of."
        )
