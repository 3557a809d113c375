"""The strategy single: one device."""

import torch.nn as nn
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from lightning.fabric.strategies.strategy import Strategy as FabricStrategy

from ftkit.strategies.strategy import Strategy


class Single(Strategy):
    """One device, and nobody to talk to."""

    def _fabric_strategy(self, model: nn.Module) -> FabricStrategy:
        return SingleDeviceStrategy(self.device)
