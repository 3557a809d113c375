"""Fabric's accelerator for kinds of devices that Lightning has none for."""

from typing import Any

import torch
from lightning.fabric.accelerators.accelerator import Accelerator as FabricAccelerator

from ftkit.utils.accelerators.kinds import HOST_KIND, USUAL_KIND


class CurrentAccelerator(FabricAccelerator):
    """The device that torch.accelerator names, behind Fabric's interface."""

    def setup_device(self, device: torch.device) -> None:
        torch.accelerator.set_device_index(device)

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> int:
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device(CurrentAccelerator.name(), index) for index in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        return torch.accelerator.device_count()

    @staticmethod
    def is_available() -> bool:
        return torch.accelerator.is_available()

    @staticmethod
    def name() -> str:
        found = torch.accelerator.current_accelerator()
        assert found is not None
        return found.type


def fabric_accelerator(kind: str) -> str | FabricAccelerator:
    """Accelerator to give to Fabric for a kind of device: its own name, or ours for any other.

    Its own tpu is torch_xla, which is not a device of torch.accelerator.
    """
    return kind if kind in (HOST_KIND, USUAL_KIND) else CurrentAccelerator()
