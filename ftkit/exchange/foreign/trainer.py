"""Checkpoints of transformers' Trainer, which TRL and axolotl write too.

checkpoint-N holds the model or the adapter in Hugging Face's layout, and beside it
`trainer_state.json` and `optimizer.pt`, or what DeepSpeed or FSDP write. `training_args.bin` is a
pickle of objects and is not read.
"""

import math
from pathlib import Path
from typing import Any

from torch import Tensor

from ftkit.errors import UserError
from ftkit.exchange.foreign.deepspeed import ZeroFiles, zero_directory
from ftkit.exchange.foreign.distributed import DCP_METADATA, distributed_state
from ftkit.exchange.foreign.names import TrainedParameter, plain_names
from ftkit.exchange.foreign.state import ForeignRun, ForeignState, ForeignTensors, TrainedModel
from ftkit.exchange.foreign.torch_optimizer import NamedState, groups_in, names_by_shape
from ftkit.exchange.foreign.unpickling import held, load_torch_file
from ftkit.models.lora.load import stored_adapter
from ftkit.models.pretrained.hub import has_tokenizer, read_json, weight_files
from ftkit.models.pretrained.weight_files import stored_tensors
from ftkit.recipe.peft_adapter import CONFIG, adapter_keys, peft_settings
from ftkit.recipe.recipe import Method

STATE = "trainer_state.json"
_OPTIMIZER = "optimizer.pt"
_SHARDED = ("pytorch_model_fsdp_0", "optimizer_0")
"""Directories with model and optimizer under FSDP, as accelerate writes them."""
_GATHERED = ("pytorch_model_fsdp.bin", "optimizer.bin")
"""Files with the same, where FSDP's state was gathered (FULL_STATE_DICT)."""


class TrainerRun(ForeignRun):
    """A checkpoint-N of transformers' Trainer."""

    program = "transformers' Trainer"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._trainer_state = read_json(directory / STATE)
        if not isinstance(self._trainer_state.get("global_step"), int):
            raise self.broken(f"its {STATE} has no global_step")

    @property
    def method(self) -> Method:
        return "full" if self.adapter is None else "lora"

    @property
    def adapter(self) -> Path | None:
        return self.directory if (self.directory / CONFIG).is_file() else None

    def _told(self) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        if self.adapter is not None:
            config = peft_settings(self.adapter)
            keys = adapter_keys(self.adapter) | {"lora_dropout": config.get("lora_dropout", 0.0)}
            base = config.get("base_model_name_or_path")
            if isinstance(base, str) and base:
                keys["checkpoint_dir"] = base
        elif weight_files(self.directory) and has_tokenizer(self.directory):
            keys["checkpoint_dir"] = str(self.directory)
        most = self._trainer_state.get("max_steps")
        if isinstance(most, int) and most > 0:
            keys["train"] = {"max_steps": most, "epochs": None}
        return keys

    def _state(self, model: TrainedModel) -> ForeignState:
        if (directory := zero_directory(self.directory)) is not None:
            return ZeroFiles(directory).state(model, **self._progress())
        if (self.directory / _SHARDED[1] / DCP_METADATA).is_file():
            parts = [self.directory / name for name in _SHARDED]
            return distributed_state(parts, model, **self._progress())
        if (self.directory / _GATHERED[1]).is_file():
            return self._gathered(model)
        return self._plain(model)

    def _plain(self, model: TrainedModel) -> ForeignState:
        file = self.directory / _OPTIMIZER
        if not file.is_file():
            raise UserError(
                f"{self.directory} has no {_OPTIMIZER}: it was saved without the optimizer state "
                "(save_only_model), so a run cannot continue from it. Start a new run from its "
                "weights, with --checkpoint_dir or --adapter."
            )
        content = load_torch_file(file)
        parameters = model.parameters
        decayed = [p for p in parameters if p.is_decayed]
        others = [p for p in parameters if not p.is_decayed]
        matrices = [p for p in parameters if len(p.shape) > 1]
        vectors = [p for p in parameters if len(p.shape) <= 1]
        everything = list(parameters)
        orders: list[list[list[TrainedParameter]]] = [
            [decayed, others],
            [matrices, vectors],
            [everything],
            [everything, []],
        ]
        found = NamedState(content, names_by_shape(content, orders, file), file)
        return ForeignState(
            **self._progress(),
            parameters=self._weights(),
            moments=found.moments,
            scalars=found.scalars,
            groups=found.groups,
        )

    def _gathered(self, model: TrainedModel) -> ForeignState:
        """State that rank 0 of FSDP gathered and wrote; the optimizer's is keyed by names."""
        of_model, of_optimizer = (self.directory / name for name in _GATHERED)
        weights, content = load_torch_file(of_model), load_torch_file(of_optimizer)
        if not isinstance(weights, dict):
            raise self.broken(f"{of_model.name} holds no tensors by name")
        numbered = [group["params"] for group in groups_in(content, of_optimizer)]
        given = {*weights, *(name for of_group in numbered for name in of_group)}
        if not all(isinstance(name, str) for name in given):
            raise self.broken(f"{of_optimizer.name} numbers its parameters, and names none")
        names = plain_names(given, [parameter.name for parameter in model.parameters])
        found = NamedState(
            content, [[names[name] for name in of_group] for of_group in numbered], of_optimizer
        )
        return ForeignState(
            **self._progress(),
            parameters={
                names[name]: held(tensor)
                for name, tensor in weights.items()
                if isinstance(tensor, Tensor)
            },
            moments=found.moments,
            scalars=found.scalars,
            groups=found.groups,
        )

    def _weights(self) -> ForeignTensors:
        if self.adapter is not None:
            stored = stored_adapter(self.adapter)
            return {name: held(tensor) for name, tensor in stored.items()}
        files = weight_files(self.directory)
        if not files:
            raise self.broken("it holds no weights (model.safetensors)")
        return stored_tensors(files)

    def _progress(self) -> dict[str, Any]:
        history = self._trainer_state.get("log_history")
        entries = history if isinstance(history, list) else []
        losses = [
            entry["loss"]
            for entry in entries
            if isinstance(entry, dict) and isinstance(entry.get("loss"), float)
        ]
        # Of one process; processes that train together write a file of random states each.
        batch = self._trainer_state.get("train_batch_size")
        processes = len(list(self.directory.glob("rng_state_*.pth"))) or 1
        return {
            "step": self._trainer_state["global_step"],
            "epochs": self._trainer_state.get("epoch"),
            "micro_batch": batch * processes if isinstance(batch, int) and batch > 0 else None,
            "loss": losses[-1] if losses and math.isfinite(losses[-1]) else None,
        }
