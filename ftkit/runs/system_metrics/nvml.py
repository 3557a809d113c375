"""What NVIDIA's library tells of GPUs while they are used."""

from collections.abc import Callable
from typing import Any

import torch

from ftkit.utils.accelerators.kinds import device_kind


class NvmlDevice:
    """A GPU; it is asked for numbers that its driver has anyway, and never waited for."""

    def __init__(self, index: int) -> None:
        """Find it.

        Args:
            index: among those that CUDA shows.

        Raises:
            Exception: there is no library or driver, or it does not know the GPU.
        """
        import pynvml as nvml

        nvml.nvmlInit()
        # Not by its index, which is another one: NVML lists every GPU, in the order of the bus.
        uuid = torch.cuda.get_device_properties(index).uuid
        gpu = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        self._asked: dict[str, Callable[[], Any]] = {
            "utilization": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
            "memory_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
        }

    def read(self) -> dict[str, float]:
        """Fraction of time it was busy, power, and memory in use by all.

        What it does not tell, as a slice of a GPU its power, is left out.
        """
        found = {}
        for name, ask in self._asked.items():
            try:
                found[name] = float(ask())
            except Exception:  # NVMLError, which is not there without the library
                continue
        return found


def gpus_in_use(device: torch.device, count: int) -> list[NvmlDevice]:
    """GPUs of a run on this host; none where the library does not know them.

    Args:
        device: of this rank, which is the first.
        count: how many to find.
    """
    if not device_kind(device.type).nvml_tells_use:
        return []
    own = device.index or 0
    others = [i for i in range(torch.cuda.device_count()) if i != own]
    try:
        return [NvmlDevice(index) for index in (own, *others)[:count]]
    except Exception:
        return []
