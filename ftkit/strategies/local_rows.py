"""bitsandbytes' optimizers over parameters that FSDP has sharded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class _OnLocalRows:
    """Mixin that updates this rank's rows of a DTensor as the optimizer would update all rows.

    The 8-bit state is quantised in blocks of 256 numbers. Where each rank's rows begin at a
    multiple of 256, as in nearly all shapes on 2, 4 or 8 ranks, the blocks are those of the whole
    parameter and the updates are equal; elsewhere they differ by rounding to 8 bits.
    """

    param_groups: list[dict[str, Any]]
    state: Any

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        bitsandbytes: Any = super()
        config: dict[str, Any] = bitsandbytes.get_config(gindex, pindex, group)
        # Small parameters keep 32-bit state: the size of all rows decides, not of this rank's.
        whole = self.param_groups[gindex]["params"][pindex]
        is_large = whole.numel() >= config["min_8bit_size"]
        return config | {"min_8bit_size": 0 if is_large else float("inf")}

    def init_state(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        bitsandbytes: Any = super()
        with self._local_rows(p) as rows:
            bitsandbytes.init_state(group, rows, gindex, pindex)

    def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        bitsandbytes: Any = super()
        with self._local_rows(p) as rows:
            if rows.numel():  # there may be fewer rows than ranks
                bitsandbytes.update_step(group, rows, gindex, pindex)

    @contextmanager
    def _local_rows(self, parameter: Tensor) -> Iterator[Tensor]:
        """This rank's rows with their gradient and state; they share the parameter's memory."""
        assert isinstance(parameter, DTensor)
        rows = parameter.to_local().detach()
        if isinstance(parameter.grad, DTensor):
            rows.grad = parameter.grad.to_local()
        # bitsandbytes looks state up by parameter.
        self.state[rows] = self.state[parameter]
        try:
            yield rows
        finally:
            # Only while it runs: checkpoints see one entry for each parameter.
            del self.state[rows]


def over_local_rows(optimizer_class: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Derive an optimizer of bitsandbytes for parameters that FSDP has sharded."""
    # Under the same name, which messages show and `canonical_kind` goes by.
    return type(optimizer_class.__name__, (_OnLocalRows, optimizer_class), {})
