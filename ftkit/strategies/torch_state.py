"""The training state of torch's and bitsandbytes' optimizers, as checkpoints take it."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ftkit.errors import UserError
from ftkit.models.lora.targets import our_name
from ftkit.strategies.optim.average import AVERAGE, StateOf
from ftkit.strategies.optim.muon import is_muons
from ftkit.strategies.optim.state_kinds import canonical_kind, is_scalar_state, is_tensor_state
from ftkit.strategies.state import PARAMETER, StatePart


def whole_part(tensor: Tensor, kind: str) -> StatePart:
    """All of a tensor, which every rank has."""
    values = tensor.detach().view(-1)
    return StatePart(kind=kind, shape=tensor.shape, start=0, values=values, replicated=True)


class TorchState:
    """Of an optimizer that updates the parameters themselves, which this rank has whole."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, averages: StateOf | None = None
    ) -> None:
        """Find it.

        Args:
            model: what is trained.
            optimizer: that updates it.
            averages: of what is trained; None: there are none.
        """
        self._optimizer, self._averages = optimizer, averages
        self._names = {
            parameter: our_name(name)
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }

    def local_values(self, tensor: Tensor) -> Tensor:
        """What this rank has of a tensor."""
        return tensor

    def local(self, tensor: Tensor, kind: str) -> StatePart:
        """The same, as a part of a checkpoint."""
        return whole_part(tensor, kind)

    def parts(self, parameter: nn.Parameter) -> Iterator[StatePart]:
        whole = self.local(parameter, PARAMETER)
        yield whole
        state = self._optimizer.state.get(parameter, {})
        if self._averages is not None:
            state = state | self._averages[parameter]
        for key, value in state.items():
            if not is_tensor_state(key, value, parameter):
                continue
            values = self.local_values(value)
            kind = canonical_kind(self._optimizer, key)
            if values.numel() != whole.values.numel():  # of a shape of its own
                yield self.local(value, kind)
                continue
            number = key.removeprefix("state")
            yield StatePart(
                kind=kind,
                shape=whole.shape,
                start=whole.start,
                values=values.detach().view(-1),
                scales=state.get(f"absmax{number}"),
                code=state.get(f"qmap{number}"),
                replicated=whole.replicated,
                copy=whole.copy,
            )

    def scalars(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for parameter in self._names:
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if is_scalar_state(value):
                    number = float(value)
                    if found.setdefault(key, number) != number:
                        raise UserError(
                            f"The optimizer {type(self._optimizer).__name__} keeps a {key} of its "
                            "own for each parameter, which checkpoints cannot hold. "
                            "Try --optimizer AdamW."
                        )
        return found

    def allocate(
        self, kinds: Mapping[str, Mapping[str, torch.Size]], scalars: dict[str, float]
    ) -> None:
        optimizer: Any = self._optimizer
        is_bitsandbytes = hasattr(optimizer, "init_state")
        if is_bitsandbytes and not optimizer.initialized:
            optimizer.check_overrides()
            optimizer.initialized = True
        for group_index, group in enumerate(optimizer.param_groups):
            # torch keeps the step of a fused optimizer beside the parameters
            beside = group.get("fused") or group.get("capturable")
            for index, parameter in enumerate(group["params"]):
                wanted = dict(kinds.get(self._names[parameter], {}))
                if wanted.pop(AVERAGE, None) is not None and self._averages is not None:
                    average = torch.empty_like(parameter, dtype=torch.float32)
                    self._averages[parameter][AVERAGE] = average
                state = optimizer.state[parameter]
                if is_bitsandbytes:
                    optimizer.init_state(group, parameter, group_index, index)
                    state.update({key: int(value) for key, value in scalars.items()})
                    continue
                for kind, shape in wanted.items():
                    if kind not in state:
                        like = torch.empty_like(parameter)
                        state[kind] = like if shape == like.shape else like.new_empty(shape)
                if is_muons(group):
                    continue
                device = parameter.device if beside else torch.device("cpu")
                for key, value in scalars.items():
                    state[key] = torch.tensor(value, dtype=torch.float32, device=device)
