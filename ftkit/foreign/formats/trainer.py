"""Checkpoints of transformers' Trainer, which TRL and axolotl write too.

checkpoint-N holds the model or the adapter in Hugging Face's layout, and beside it
`trainer_state.json` and `optimizer.pt`, or what DeepSpeed writes. `training_args.bin` is a
pickle of objects and is not read.
"""

from pathlib import Path
from typing import Any

from ftkit.config.peft_adapter import CONFIG, adapter_keys
from ftkit.config.recipe import Method
from ftkit.errors import UserError
from ftkit.foreign.formats.torch_optimizer import NamedState, names_by_shape
from ftkit.foreign.formats.zero import ZeroFiles, zero_directory
from ftkit.foreign.parameter_order import TrainedParameter
from ftkit.foreign.state import ForeignRun, ForeignState, ForeignTensors, TrainedModel
from ftkit.foreign.unpickling import held, load_torch_file
from ftkit.lora.load import stored_adapter
from ftkit.pretrained.hub import has_tokenizer, read_json, weight_files
from ftkit.pretrained.weights.files import stored_tensors

STATE = "trainer_state.json"
_OPTIMIZER = "optimizer.pt"


class TrainerRun(ForeignRun):
    """A checkpoint-N of transformers' Trainer."""

    program = "transformers' Trainer"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._told = read_json(directory / STATE)
        if not isinstance(self._told.get("global_step"), int):
            raise self.broken(f"its {STATE} has no global_step")

    @property
    def method(self) -> Method:
        return "full" if self.adapter is None else "lora"

    @property
    def adapter(self) -> Path | None:
        return self.directory if (self.directory / CONFIG).is_file() else None

    def told(self) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        if self.adapter is not None:
            config = read_json(self.adapter / CONFIG)
            keys = adapter_keys(self.adapter) | {"lora_dropout": config.get("lora_dropout", 0.0)}
            base = config.get("base_model_name_or_path")
            if isinstance(base, str) and base:
                keys["checkpoint_dir"] = base
        elif weight_files(self.directory) and has_tokenizer(self.directory):
            keys["checkpoint_dir"] = str(self.directory)
        if isinstance(self._told.get("max_steps"), int) and self._told["max_steps"] > 0:
            keys["train"] = {"max_steps": self._told["max_steps"], "epochs": None}
        return keys

    def state(self, model: TrainedModel) -> ForeignState:
        if (directory := zero_directory(self.directory)) is not None:
            return ZeroFiles(directory).state(model, **self._progress())
        return self._plain(model)

    def _plain(self, model: TrainedModel) -> ForeignState:
        file = self.directory / _OPTIMIZER
        if not file.is_file():
            raise UserError(
                f"{self.directory} has no {_OPTIMIZER}: it was saved without the state of the "
                "optimizer (save_only_model), so no run can go on from it. Start a new one from "
                "its weights, with --checkpoint_dir or --adapter."
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

    def _weights(self) -> ForeignTensors:
        if self.adapter is not None:
            stored = stored_adapter(self.adapter)
            return {name: held(tensor) for name, tensor in stored.items()}
        files = weight_files(self.directory)
        if not files:
            raise self.broken("it holds no weights (model.safetensors)")
        return stored_tensors(files)

    def _progress(self) -> dict[str, Any]:
        epochs = self._told.get("epoch")
        history = self._told.get("log_history")
        entries = history if isinstance(history, list) else []
        losses = [
            entry["loss"]
            for entry in entries
            if isinstance(entry, dict) and isinstance(entry.get("loss"), int | float)
        ]
        return {
            "step": self._told["global_step"],
            "epochs": float(epochs) if isinstance(epochs, int | float) else None,
            "loss": float(losses[-1]) if losses else None,
        }
