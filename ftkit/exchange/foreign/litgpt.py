"""Checkpoints of LitGPT: `lit_model.pth` of a whole model, `lit_model.pth.lora` of an adapter.

Full fine-tuning and pre-training keep the optimizer's state in those of their steps; those in
`final`, and those of adapters, hold weights alone. `hyperparameters.yaml` beside them has what the
run was asked for.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ftkit.errors import UserError
from ftkit.exchange.foreign.names import TrainedParameter
from ftkit.exchange.foreign.state import ForeignRun, ForeignState, ParameterGroup, TrainedModel
from ftkit.exchange.foreign.torch_optimizer import NamedState, names_by_shape
from ftkit.exchange.foreign.unpickling import held, load_torch_file, mapping_in
from ftkit.models.lora.targets import TRAINED
from ftkit.models.pretrained.base_model import BaseModel, parameter_shapes
from ftkit.models.pretrained.hub import has_tokenizer
from ftkit.recipe.recipe import LAYER_SWITCHES, Method
from ftkit.utils.damaged_files import reading
from ftkit.utils.yaml_files import load_yaml

LITGPT_WEIGHTS = "lit_model.pth"
LITGPT_ADAPTER = f"{LITGPT_WEIGHTS}.lora"
_ASKED = "hyperparameters.yaml"
_OPTIMIZER, _STEP = "optimizer", "step_count"
_DIRECTORY = re.compile(r"step-(\d+)")
_ENABLED = (("q_proj", "lora_query"), ("k_proj", "lora_key"), ("v_proj", "lora_value"))
"""Our parts of the projection that LitGPT adapts as one, each with the key that adapts it."""
_TAKEN = ("global_batch_size", "max_steps", "epochs", "max_seq_length", "max_norm", "min_lr")
"""Keys of `train` that mean the same in both."""


class LitgptRun(ForeignRun):
    """A directory written by LitGPT during training, or at its end."""

    program = "LitGPT"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        is_adapter = (directory / LITGPT_ADAPTER).is_file()
        self._file = directory / (LITGPT_ADAPTER if is_adapter else LITGPT_WEIGHTS)
        if not (directory / _ASKED).is_file():
            raise UserError(
                f"{directory} is a model, or lacks the {_ASKED} that LitGPT writes beside the "
                "checkpoints of a run. Start a new run from a model with --checkpoint_dir; copy "
                "the checkpoint of a run whole."
            )
        self._asked = load_yaml(directory / _ASKED)
        self._method: Method = "lora" if is_adapter else "full"

    @property
    def method(self) -> Method:
        return self._method

    def _told(self) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        base = self._asked.get("checkpoint_dir") if self._method == "lora" else None
        if isinstance(base, str) and Path(base).is_dir():
            keys["checkpoint_dir"] = base
        elif self._method == "full" and has_tokenizer(self.directory):
            keys["checkpoint_dir"] = str(self.directory)
        train = self._mapping("train")
        found = {key: train[key] for key in _TAKEN if _is_number(train.get(key))}
        if "max_steps" in found:
            found["epochs"] = None
        # Its fine-tuning has no such key, and does not clip.
        keys["train"] = {"max_norm": None} | found
        optimizer = self._mapping(_OPTIMIZER)
        if self._method == "lora" and str(optimizer.get("class_path")).startswith("torch.optim."):
            with reading(self.directory / _ASKED, "an optimizer of torch", key=_OPTIMIZER):
                ParameterGroup(names=(), settings=optimizer["init_args"])
            keys["optimizer"] = optimizer
        if self._method == "lora":
            wanted = ("lora_r", "lora_alpha", "lora_dropout", *LAYER_SWITCHES)
            keys |= {key: self._asked[key] for key in wanted if _is_number(self._asked.get(key))}
        return keys

    def _state(self, model: TrainedModel) -> ForeignState:
        content = load_torch_file(self._file)
        if self._method == "full" and isinstance(content, dict) and _OPTIMIZER in content:
            return self._whole(content)
        weights = _tensors(mapping_in(content, "model", self._file))
        named = _DIRECTORY.fullmatch(self.directory.resolve().name)
        step = int(named[1]) if named else 0
        notes = (
            []
            if named
            else ["the step is unknown, because LitGPT did not save it: steps are counted from 0"]
        )
        return ForeignState(
            step=step,
            samples=self._samples(step),
            layout="ftkit" if self._method == "lora" else "litgpt",
            parameters={
                name: held(tensor)
                for name, tensor in (
                    self._adapter(weights, model.base) if self._method == "lora" else weights
                ).items()
            },
            moments=None,
            scalars={},
            groups=(),
            notes=notes,
        )

    def _whole(self, content: Mapping[str, Any]) -> ForeignState:
        """State with the optimizer's, whose parameters are numbered in the order of the model."""
        if not isinstance(content.get(_STEP), int):
            raise self.broken(f"{self._file.name} has no {_STEP}")
        step = content[_STEP]
        weights = _tensors(mapping_in(content, "model", self._file))
        order = [TrainedParameter(name, tensor.shape, True) for name, tensor in weights.items()]
        optimizer = content[_OPTIMIZER]
        names = names_by_shape(optimizer, [[order]], self._file)
        found = NamedState(optimizer, names, self._file)
        return ForeignState(
            step=step,
            samples=self._samples(step),
            layout="litgpt",
            parameters={name: held(tensor) for name, tensor in weights.items()},
            moments=found.moments,
            scalars=found.scalars,
            groups=found.groups,
        )

    def _adapter(self, weights: Mapping[str, Tensor], base: BaseModel) -> dict[str, Tensor]:
        """Split LitGPT's adapter, where query, key and value are one matrix, into ours."""
        shapes = parameter_shapes(base)
        parts = [part for part, key in _ENABLED if self._asked.get(key)]
        found: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            layer, _, matrix = name.rpartition(".")
            end = f"{matrix}.{TRAINED}.weight"
            if f"{layer}.weight" in shapes:
                found[f"{layer}.{end}"] = tensor
                continue
            of_parts = [f"{layer}.{part}" for part in parts]
            if matrix not in ("lora_A", "lora_B") or any(
                f"{part}.weight" not in shapes for part in of_parts
            ):
                raise self.broken(
                    f"{self._file.name} holds {name}, which {base.name} does not have"
                )
            rows = [shapes[f"{part}.weight"][0] for part in of_parts]
            if matrix == "lora_A":
                # A has the rows of one rank for each part.
                rows = [tensor.shape[0] // len(parts)] * len(parts)
            if sum(rows) != tensor.shape[0]:
                raise self.broken(
                    f"{name} in {self._file.name} has {tensor.shape[0]} rows, but {_ASKED} and "
                    f"{base.name} say {sum(rows)}"
                )
            split = zip(of_parts, tensor.split(rows), strict=True)
            found |= {f"{part}.{end}": piece for part, piece in split}
        return found

    def _samples(self, step: int) -> int | None:
        batch = self._mapping("train").get("global_batch_size")
        return step * batch if isinstance(batch, int) else None

    def _mapping(self, key: str) -> dict[str, Any]:
        found = self._asked.get(key)
        return found if isinstance(found, dict) else {}


def _tensors(content: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float)
