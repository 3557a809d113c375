"""Checkpoints of Lightning's Trainer: one file, or a directory that is sharded."""

from pathlib import Path

from torch import Tensor

from ftkit.exchange.foreign.distributed import DCP_METADATA, distributed_state
from ftkit.exchange.foreign.names import TrainedParameter, plain_names
from ftkit.exchange.foreign.state import ForeignRun, ForeignState, TrainedModel
from ftkit.exchange.foreign.torch_optimizer import NamedState, names_by_shape
from ftkit.exchange.foreign.unpickling import IN_LIGHTNING, held, load_torch_file, mapping_in

_REST = "meta.pt"
"""File of a sharded checkpoint with everything but model and optimizer."""
_STEP = "global_step"


class LightningRun(ForeignRun):
    """A .ckpt of Lightning."""

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
        if self._is_sharded:
            return distributed_state([self.directory], model, step=step)
        weights = mapping_in(self._content, "state_dict", self._file)
        optimizers = self._content.get("optimizer_states")
        if not isinstance(optimizers, list) or len(optimizers) != 1:
            count = len(optimizers) if isinstance(optimizers, list) else 0
            raise self.broken(
                f"it has the state of {count} optimizers, but a run can continue with only one"
            )
        names = plain_names(weights, [parameter.name for parameter in model.parameters])
        trained = {parameter.name: parameter for parameter in model.parameters}
        order = [trained[plain] for name in weights if (plain := names[name]) in trained]
        found = NamedState(
            optimizers[0], names_by_shape(optimizers[0], _orders(order), self._file), self._file
        )
        return ForeignState(
            step=step,
            parameters={
                names[name]: held(tensor)
                for name, tensor in weights.items()
                if isinstance(tensor, Tensor)
            },
            moments=found.moments,
            scalars=found.scalars,
            groups=found.groups,
        )


def _orders(order: list[TrainedParameter]) -> list[list[list[TrainedParameter]]]:
    """Usual groupings of parameters in an optimizer: all, or two groups by weight decay."""
    matrices = [p for p in order if len(p.shape) > 1]
    vectors = [p for p in order if len(p.shape) <= 1]
    decayed = [p for p in order if p.is_decayed]
    others = [p for p in order if not p.is_decayed]
    return [[order], [matrices, vectors], [decayed, others]]


def is_sharded(directory: Path) -> bool:
    """Whether a directory is a sharded checkpoint of Lightning."""
    return (directory / _REST).is_file() and (directory / DCP_METADATA).is_file()
