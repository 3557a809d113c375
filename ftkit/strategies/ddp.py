"""The strategy ddp: every rank has everything, and gradients are added up over the ranks.

Li et al. 2020, https://arxiv.org/abs/2006.15704.
"""

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch.nn as nn
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from torch.nn.parallel import DistributedDataParallel

from ftkit.strategies.strategy import Strategy
from ftkit.utils.accelerators.kinds import USUAL_KIND

_SYNC_BUFFERS = next(  # torch 2.13 warns of the older name
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in inspect.signature(DistributedDataParallel).parameters
)


class _OnAnyKind(DDPStrategy):
    """Fabric's strategy, which takes every device with an index for one of CUDA."""

    def _determine_ddp_device_ids(self) -> list[int] | None:
        return super()._determine_ddp_device_ids() if self.root_device.type == USUAL_KIND else None


class Ddp(Strategy):
    """torch's DistributedDataParallel."""

    keeps_gradient_buckets = True

    def _fabric_strategy(self, model: nn.Module) -> FabricStrategy:
        tables: dict[str, Any] = {_SYNC_BUFFERS: False}  # every rank computes them
        return _OnAnyKind(
            process_group_backend=self.plan.communication,
            gradient_as_bucket_view=True,  # saves a copy of the gradients
            **tables,
        )

    def micro_step(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Gradients travel once in a step, with the last micro-batch."""
        return self._fabric.no_backward_sync(self._forward, enabled=not is_last)
