"""Checkpoints of transformers' Trainer (TRL and axolotl too), of Lightning and of LitGPT."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ftkit.errors import UserError
from ftkit.extensions.foreign_checkpoints.deepspeed import ZeroFiles, zero_directory
from ftkit.extensions.foreign_checkpoints.distributed import DCP_METADATA, distributed_state
from ftkit.extensions.foreign_checkpoints.state import (
    ForeignRun,
    ForeignState,
    ForeignTensors,
    ParameterGroup,
    TrainedModel,
    TrainedParameter,
    note_scalar,
    plain_names,
)
from ftkit.extensions.foreign_checkpoints.unpickling import (
    IN_LIGHTNING,
    held,
    load_torch_file,
    mapping_in,
)
from ftkit.models.lora.adapter_reading import stored_adapter
from ftkit.models.lora.targets import TRAINED
from ftkit.models.pretrained.base_model import BaseModel, parameter_shapes
from ftkit.models.pretrained.model_files import has_tokenizer, read_json, weight_files
from ftkit.models.pretrained.weight_files import stored_tensors
from ftkit.recipe.peft_adapter import adapter_keys, peft_settings
from ftkit.recipe.peft_names import CONFIG
from ftkit.recipe.recipe import LAYER_SWITCHES, Method
from ftkit.strategies.state import is_scalar_state
from ftkit.utils.damaged_files import reading
from ftkit.utils.json_values import value_text
from ftkit.utils.names import nearest
from ftkit.utils.yaml_files import load_yaml

_EXPECTED = "the state of an optimizer of torch, by the numbers of its parameters"
_IN_8_BITS = ("qmap1", "absmax1", "__bnb_optimizer_quant_state__")


class NamedState:
    """State of an optimizer by the names of its parameters."""

    def __init__(self, content: Any, names: Sequence[Sequence[str]], file: Path) -> None:
        """Sort the state by kinds.

        Args:
            content: as `state_dict` gave it, of parameters by their numbers.
            names: of the parameters of each group, in their order.
            file: that it was read from, for messages.

        Raises:
            UserError: it is not such a state, or keeps what checkpoints cannot hold.
        """
        self.scalars: dict[str, float] = {}
        self.groups: list[ParameterGroup] = []
        """All parameters."""
        with reading(file, _EXPECTED, advice="Copy the whole checkpoint again."):
            moments = self._sorted(content, names, file)
        self.moments: Mapping[str, ForeignTensors] = {
            kind: {name: held(tensor) for name, tensor in tensors.items()}
            for kind, tensors in moments.items()
        }
        """State tensors by kind and name."""

    def with_weights(self, parameters: ForeignTensors, **progress: Any) -> ForeignState:
        """State of training with these weights; `progress` is what other files say."""
        return ForeignState(
            **progress,
            parameters=parameters,
            moments=self.moments,
            scalars=self.scalars,
            groups=self.groups,
        )

    def _sorted(
        self, content: Any, names: Sequence[Sequence[str]], file: Path
    ) -> dict[str, dict[str, Tensor]]:
        states = mapping_in(content, "state", file)
        moments: dict[str, dict[str, Tensor]] = {}
        for group, of_group in zip(groups_in(content, file), names, strict=True):
            self.groups.append(ParameterGroup(names=tuple(of_group), settings=group))
            for number, name in zip(group["params"], of_group, strict=True):
                for kind, value in states.get(number, {}).items():
                    # Their numbers mean something only with bitsandbytes' tables of levels.
                    if kind in _IN_8_BITS:
                        raise UserError(
                            f"{file} keeps its state in 8 bits ({kind}), which ftkit cannot take "
                            "over. Start a new run from the weights, with --checkpoint_dir or "
                            "--adapter."
                        )
                    if is_scalar_state(value):
                        note_scalar(self.scalars, kind, float(value), file)
                    elif isinstance(value, Tensor):
                        moments.setdefault(kind, {})[name] = value
                    elif value is not None:
                        raise TypeError(f"{kind} of {name} is a {type(value).__name__}")
        keys = {frozenset(state) for state in states.values() if state}
        # Parameters without any state are frozen or were never stepped; those with state keep the
        # same kinds.
        if len(keys) > 1:
            different = sorted(map(str, frozenset.union(*keys) - frozenset.intersection(*keys)))
            raise UserError(
                f"{file} keeps {different[0]} of some parameters, and not of others. Copy the "
                "checkpoint again."
            )
        return moments


def groups_in(content: Any, file: Path) -> list[dict[str, Any]]:
    """The groups of a state dictionary, each with the numbers of its parameters.

    Raises:
        UserError: it has no such groups.
    """
    groups = content.get("param_groups") if isinstance(content, dict) else None
    if not isinstance(groups, list) or not all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    ):
        raise UserError(
            f"{file} is not the state of a torch optimizer. Give a checkpoint as its program wrote "
            "it."
        )
    return groups


def names_by_shape(
    content: Any, orders: Sequence[Sequence[Sequence[TrainedParameter]]], file: Path
) -> list[list[str]]:
    """Names of the parameters of each group, in the first order whose shapes agree.

    Args:
        content: a state dictionary.
        orders: for each way in which a program may group them the parameters of each group.
        file: that it was read from, for messages.

    Raises:
        UserError: none of them agrees.
    """
    # The optimizer numbers its parameters, and programs group them in different orders: shapes are
    # all that distinguishes the orders.
    groups, states = groups_in(content, file), mapping_in(content, "state", file)
    with reading(file, _EXPECTED, advice="Copy the whole checkpoint again."):
        for order in orders:
            if len(order) == len(groups) and all(
                _agrees(group["params"], of_group, states)
                for group, of_group in zip(groups, order, strict=True)
            ):
                return [[parameter.name for parameter in of_group] for of_group in order]
    sizes = " and ".join(str(len(group["params"])) for group in groups)
    expected = " or ".join(
        " and ".join(str(len(of_group)) for of_group in order) for order in orders
    )
    raise UserError(
        f"{file} has groups of {sizes} parameters, but the model has {expected}, or they have "
        "other shapes: it is not the optimizer of this model, or its parameters were grouped "
        "otherwise. Give the base model, and the adapter's settings, of this very run."
    )


def _agrees(
    numbers: Sequence[int], parameters: Sequence[TrainedParameter], states: Mapping[int, Any]
) -> bool:
    """Return whether the counts agree and each state has the shape of its parameter."""
    # Only the shapes of state can be compared: groups hold numbers, no shapes.
    if len(numbers) != len(parameters):
        return False
    return all(
        not isinstance(value, Tensor) or value.dim() == 0 or value.shape == parameter.shape
        for number, parameter in zip(numbers, parameters, strict=True)
        for value in states.get(number, {}).values()
    )


STATE = "trainer_state.json"
_OPTIMIZER = "optimizer.pt"
_SHARDED = ("pytorch_model_fsdp_0", "optimizer_0")
"""Directories with model and optimizer under FSDP, as accelerate writes them."""
_GATHERED = ("pytorch_model_fsdp.bin", "optimizer.bin")
"""Files with the same, where FSDP's state was gathered (FULL_STATE_DICT)."""


def _by_decay(parameters: Sequence[TrainedParameter]) -> list[list[TrainedParameter]]:
    """Groups of the Trainer: parameters with weight decay, and those without."""
    decayed = [parameter for parameter in parameters if parameter.is_decayed]
    return [decayed, [parameter for parameter in parameters if not parameter.is_decayed]]


def _by_dimensions(parameters: Sequence[TrainedParameter]) -> list[list[TrainedParameter]]:
    """Groups of nanoGPT and its kin: matrices, and vectors without weight decay."""
    matrices = [parameter for parameter in parameters if len(parameter.shape) > 1]
    return [matrices, [parameter for parameter in parameters if len(parameter.shape) <= 1]]


def _renamed(weights: Mapping[str, Any], names: Mapping[str, str]) -> ForeignTensors:
    """The tensors among a program's weights, by their names in files."""
    return {
        names[name]: held(tensor) for name, tensor in weights.items() if isinstance(tensor, Tensor)
    }


class TrainerRun(ForeignRun):
    """A checkpoint-N of transformers' Trainer.

    It holds the model or the adapter in Hugging Face's layout, and beside it `trainer_state.json`
    and `optimizer.pt`, or what DeepSpeed or FSDP write. `training_args.bin` is a pickle of objects
    and is not read.
    """

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

    def _recipe_keys(self) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        if self.adapter is not None:
            config = peft_settings(self.adapter)
            keys = adapter_keys(self.adapter) | {"lora_dropout": config.get("lora_dropout", 0.0)}
            if "peft" in keys:
                raise UserError(
                    f"{self.adapter} is an adapter of the type {keys['peft']['class_path']}, but "
                    "only checkpoints of LoRA are taken over. Try ftkit finetune --adapter "
                    f"{self.adapter}, which begins with a new optimizer."
                )
            base = config.get("base_model_name_or_path")
            if isinstance(base, str) and base:
                keys["checkpoint_dir"] = base
        elif weight_files(self.directory) and has_tokenizer(self.directory):
            keys["checkpoint_dir"] = str(self.directory)
        # The Trainer resolves it, also where a run was given epochs.
        most = self._trainer_state.get("max_steps")
        if isinstance(most, int) and most > 0:
            keys["train"] = {"max_steps": most, "epochs": None}
        return keys

    def _state(self, model: TrainedModel) -> ForeignState:
        # DeepSpeed and FSDP write files of their own in place of optimizer.pt.
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
        # The Trainer's own groups first, then those of optimizers that scripts bring along.
        orders: list[Sequence[Sequence[TrainedParameter]]] = [
            _by_decay(parameters),
            _by_dimensions(parameters),
            [parameters],
            [parameters, ()],
        ]
        optimizer = NamedState(content, names_by_shape(content, orders, file), file)
        return optimizer.with_weights(self._weights(), **self._progress())

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
        optimizer = NamedState(
            content, [[names[name] for name in of_group] for of_group in numbered], of_optimizer
        )
        return optimizer.with_weights(_renamed(weights, names), **self._progress())

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
        # The newest entry may be one of an evaluation, which has no loss of training.
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


_REST = "meta.pt"
"""File of a sharded checkpoint with everything but model and optimizer."""
_STEP = "global_step"


class LightningRun(ForeignRun):
    """A .ckpt of Lightning's Trainer: one file, or a directory that is sharded."""

    program = "Lightning"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._is_sharded = directory.is_dir()
        self._file = directory / _REST if self._is_sharded else directory
        self._content = load_torch_file(self._file, IN_LIGHTNING)
        if not isinstance(self._content, dict) or not isinstance(self._content.get(_STEP), int):
            raise self.broken(f"{self._file.name} has no {_STEP}")

    def _state(self, model: TrainedModel) -> ForeignState:
        step = self._content[_STEP]
        # Sharded state is keyed by names, so no order of parameters is needed.
        if self._is_sharded:
            return distributed_state([self.directory], model, step=step)
        weights = mapping_in(self._content, "state_dict", self._file)
        optimizers = self._content.get("optimizer_states")
        # ftkit's loop has one optimizer; training of GANs, for one, has two.
        if not isinstance(optimizers, list) or len(optimizers) != 1:
            count = len(optimizers) if isinstance(optimizers, list) else 0
            raise self.broken(
                f"it has the state of {count} optimizers, but a run can continue with only one"
            )
        # A LightningModule holds the model under a name of its own.
        names = plain_names(weights, [parameter.name for parameter in model.parameters])
        trained = {parameter.name: parameter for parameter in model.parameters}
        # In the order of the module's own state, which its optimizer was made from.
        order = [trained[plain] for name in weights if (plain := names[name]) in trained]
        orders = [[order], _by_dimensions(order), _by_decay(order)]
        state = NamedState(
            optimizers[0], names_by_shape(optimizers[0], orders, self._file), self._file
        )
        return state.with_weights(_renamed(weights, names), step=step)


def is_sharded(directory: Path) -> bool:
    """Return whether a directory is a sharded checkpoint of Lightning."""
    return (directory / _REST).is_file() and (directory / DCP_METADATA).is_file()


LITGPT_WEIGHTS = "lit_model.pth"
LITGPT_ADAPTER = f"{LITGPT_WEIGHTS}.lora"
_SETTINGS_FILE = "hyperparameters.yaml"
_OPTIMIZER_KEY, _STEP_COUNT = "optimizer", "step_count"
_DIRECTORY = re.compile(r"step-(\d+)")
_ENABLED = (("q_proj", "lora_query"), ("k_proj", "lora_key"), ("v_proj", "lora_value"))
"""Our parts of the projection that LitGPT adapts as one, each with the key that adapts it."""
_TAKEN = ("global_batch_size", "max_steps", "epochs", "max_seq_length", "max_norm", "min_lr")
"""Keys of `train` that mean the same in both."""
_OF_ADAPTER = ("lora_r", "lora_alpha", "lora_dropout", *LAYER_SWITCHES)
_LEFT_OUT = ("max_tokens", "max_time", "tie_embeddings")
"""Keys of `train` that change what is learned, and are named as not taken over."""
_KNOWN = frozenset(
    (
        *("checkpoint_dir", "out_dir", "precision", "quantize", "devices", "num_nodes", "resume"),
        *("data", "train", "eval", "log", _OPTIMIZER_KEY, "logger_name", "seed", "access_token"),
        *("model_name", "model_config", "initial_checkpoint_dir", "tokenizer_dir", *_OF_ADAPTER),
        *(f"train.{key}" for key in (*_TAKEN, *_LEFT_OUT)),
        *("train.save_interval", "train.log_interval", "train.micro_batch_size"),
        *("train.lr_warmup_steps", "train.lr_warmup_fraction"),
    )
)
"""Keys that LitGPT 0.5.13 writes; those below `data`, `eval` and `log` play no role here."""


class LitgptRun(ForeignRun):
    """A directory written by LitGPT during training, or at its end.

    `lit_model.pth` holds a whole model, `lit_model.pth.lora` an adapter. Full fine-tuning and
    pre-training keep the optimizer's state in those of their steps; those in `final`, and those of
    adapters, hold weights alone. `hyperparameters.yaml` beside them has the keys of the run.
    """

    program = "LitGPT"

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        is_adapter = (directory / LITGPT_ADAPTER).is_file()
        self._file = directory / (LITGPT_ADAPTER if is_adapter else LITGPT_WEIGHTS)
        if not (directory / _SETTINGS_FILE).is_file():
            raise UserError(
                f"{directory} is a model, or lacks the {_SETTINGS_FILE} that LitGPT writes beside "
                "the checkpoints of a run. Start a new run from a model with --checkpoint_dir; "
                "copy the checkpoint of a run whole."
            )
        self._settings = load_yaml(directory / _SETTINGS_FILE)
        self._method: Method = "lora" if is_adapter else "full"
        train = self._settings.get("train") or {}
        if not isinstance(train, dict):
            raise self.broken(f"train in {_SETTINGS_FILE} is {value_text(train)}")
        self._train = train
        self._notes = self._unused_keys()

    @property
    def method(self) -> Method:
        return self._method

    def _recipe_keys(self) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        # A path of the machine that trained: taken only if it exists here.
        base = self._settings.get("checkpoint_dir") if self._method == "lora" else None
        if isinstance(base, str) and Path(base).is_dir():
            keys["checkpoint_dir"] = base
        elif self._method == "full" and has_tokenizer(self.directory):
            keys["checkpoint_dir"] = str(self.directory)
        # Not only numbers: the recipe refuses other values by name.
        train = self._train
        found = {key: train[key] for key in _TAKEN if train.get(key) is not None}
        # With both it stops at whichever comes first, as we do.
        if "max_steps" in found:
            found.setdefault("epochs", None)
        # Its fine-tuning has no such key, and does not clip.
        keys["train"] = {"max_norm": None} | found
        if self._method == "lora":
            wanted = ("quantize", _OPTIMIZER_KEY, *_OF_ADAPTER)
            given = self._settings
            keys |= {key: given[key] for key in wanted if given.get(key) is not None}
            if isinstance(optimizer := given.get(_OPTIMIZER_KEY), dict):
                with reading(
                    self.directory / _SETTINGS_FILE, "an optimizer of torch", key=_OPTIMIZER_KEY
                ):
                    # Only for its checks: a learning rate that is text would fail in the first
                    # step.
                    ParameterGroup(names=(), settings=optimizer.get("init_args") or {})
        return keys

    def _state(self, model: TrainedModel) -> ForeignState:
        content = load_torch_file(self._file)
        if self._method == "full" and isinstance(content, dict) and _OPTIMIZER_KEY in content:
            return self._whole(content)
        # Weights alone: an adapter, or the end of a run.
        weights = _tensors(mapping_in(content, "model", self._file))
        named = _DIRECTORY.fullmatch(self.directory.resolve().name)
        # An adapter's file has no step: the name of its directory is all that tells it.
        step = int(named[1]) if named else 0
        unknown = "the step is unknown, because LitGPT did not save it: steps are counted from 0"
        notes = [*self._notes, *([] if named else [unknown])]
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
        """State with that of the optimizer, whose parameters are numbered in the model's order."""
        if not isinstance(content.get(_STEP_COUNT), int):
            raise self.broken(f"{self._file.name} has no {_STEP_COUNT}")
        step = content[_STEP_COUNT]
        weights = _tensors(mapping_in(content, "model", self._file))
        # LitGPT makes its optimizer of all parameters at once, without groups: decay plays no role.
        order = [TrainedParameter(name, tensor.shape, True) for name, tensor in weights.items()]
        optimizer = content[_OPTIMIZER_KEY]
        names = names_by_shape(optimizer, [[order]], self._file)
        return NamedState(optimizer, names, self._file).with_weights(
            {name: held(tensor) for name, tensor in weights.items()},
            step=step,
            samples=self._samples(step),
            layout="litgpt",
            notes=self._notes,
        )

    def _adapter(self, weights: Mapping[str, Tensor], base: BaseModel) -> dict[str, Tensor]:
        """Split LitGPT's adapter, where query, key and value are one matrix, into ours."""
        shapes = parameter_shapes(base)
        parts = [part for part, key in _ENABLED if self._settings.get(key)]
        found: dict[str, Tensor] = {}
        for name, tensor in weights.items():
            layer, _, matrix = name.rpartition(".")
            end = f"{matrix}.{TRAINED}.weight"
            if f"{layer}.weight" in shapes:
                found[f"{layer}.{end}"] = tensor
                continue
            # LitGPT has one matrix for query, key and value (qkv), and its adapter rows for the
            # enabled ones alone.
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
                    f"{name} in {self._file.name} has {tensor.shape[0]} rows, but "
                    f"{_SETTINGS_FILE} and {base.name} say {sum(rows)}"
                )
            split = zip(of_parts, tensor.split(rows), strict=True)
            found |= {f"{part}.{end}": piece for part, piece in split}
        return found

    def _samples(self, step: int) -> int | None:
        batch = self._train.get("global_batch_size")
        return step * batch if isinstance(batch, int) else None

    def _unused_keys(self) -> list[str]:
        """Notes about keys that may change what is learned, and are not taken over.

        Raises:
            UserError: one of them may say which layers are adapted, or how.
        """
        settings = self._settings | {f"train.{key}": value for key, value in self._train.items()}
        given = {str(key): value for key, value in settings.items() if value}
        notes = []
        for key in sorted(given.keys() - _KNOWN):
            near = nearest(key, _KNOWN - given.keys())
            hint = f" Did you mean {near}?" if near else ""
            if key.startswith("lora_"):
                raise UserError(
                    f"{self.directory / _SETTINGS_FILE} has {key} {value_text(given[key])}, which "
                    "this ftkit does not know and which may change what the adapter computes."
                    f"{hint or ' Remove it if it does not.'}"
                )
            notes.append(f"not used: {key} of {_SETTINGS_FILE}, which ftkit does not know.{hint}")
        return notes + [
            f"not taken over: train.{key} {value_text(given[f'train.{key}'])}"
            for key in _LEFT_OUT
            if f"train.{key}" in given
        ]


def _tensors(content: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}
