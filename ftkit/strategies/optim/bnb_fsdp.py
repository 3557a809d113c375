"""bitsandbytes' optimizers under FSDP, where a rank has some rows of each parameter."""

from typing import Any

from bitsandbytes.optim.optimizer import Optimizer8bit
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class _OnLocalRows(Optimizer8bit):
    """Updates this rank's rows of a DTensor, with the numbers of an optimizer over all rows.

    Whether the state of a parameter has 8 bits depends on the size of all its rows. The state is
    quantised in blocks of 256 numbers: where each rank's rows begin at a multiple of 256, as they
    do in nearly all shapes on 2, 4 or 8 ranks, the blocks are those of the whole parameter and
    the updates are equal; elsewhere they differ by the rounding to 8 bits.
    """

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        config: dict[str, Any] = super().get_config(gindex, pindex, group)
        whole = self.param_groups[gindex]["params"][pindex]
        is_large = whole.numel() >= config["min_8bit_size"]
        return config | {"min_8bit_size": 0 if is_large else float("inf")}

    def init_state(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        rows = _local_rows(p)
        self.state[rows] = self.state[p]
        try:
            super().init_state(group, rows, gindex, pindex)
        finally:
            del self.state[rows]

    def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        rows = _local_rows(p)
        if not rows.numel():  # fewer rows than ranks
            return
        self.state[rows] = self.state[p]
        try:
            super().update_step(group, rows, gindex, pindex)
        finally:
            del self.state[rows]


def _local_rows(parameter: Tensor) -> Tensor:
    """This rank's rows with their gradient; they share the parameter's memory."""
    assert isinstance(parameter, DTensor)
    rows = parameter.to_local().detach()
    if isinstance(parameter.grad, DTensor):
        rows.grad = parameter.grad.to_local()
    return rows


def over_local_rows(optimizer_class: type[Optimizer]) -> type[Optimizer]:
    """An optimizer of bitsandbytes for the parameters that FSDP has sharded."""
    return type(optimizer_class.__name__, (_OnLocalRows, optimizer_class), {})
