"""Functions for the device in use that torch.accelerator does not offer for every kind."""

from typing import Any

import torch

from ftkit.utils.accelerators.kinds import HOST_KIND, device_kind


def accelerator_in_use() -> torch.device | None:
    """Device of the kind that this process has begun to use; None: it only uses the host."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return None
    # Only kinds that are initialised on first use have this function.
    has_begun = getattr(torch.get_device_module(found), "is_initialized", lambda: True)
    return found if has_begun() else None


def take_device(device: torch.device) -> None:
    """Compute on a device from here on, and reset its memory counters."""
    if device.type == HOST_KIND:
        return
    torch.accelerator.set_device_index(device)
    if device_kind(device.type).counts_memory:
        torch.accelerator.reset_peak_memory_stats()


def free_cached_memory() -> None:
    """Return the unused memory of torch's allocator to the device."""
    if (found := accelerator_in_use()) is not None:
        module: Any = torch.get_device_module(found)
        # Modules of torch's own kinds have it; others' only need what torch.accelerator calls.
        getattr(module, "empty_cache", torch.accelerator.empty_cache)()


def compilations(device: torch.device) -> int | None:
    """Programs that a device has compiled in this process; None: it compiles nothing by itself."""
    if not device_kind(device.type).computes_late:
        return None
    module: Any = torch.get_device_module(device)
    # Private to torch_tpu, which counts nothing else; seen in 0.2.0.
    return int(module._get_cache_misses())


def product_name(device: torch.device) -> str | None:
    """Product name of a device; None: it is the host, or torch does not know it."""
    if device.type == HOST_KIND:
        return None
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return None if name is None else str(name(device))


def sum_dtype(device: torch.device) -> torch.dtype:
    """Number format for sums of losses and counts: float64 where a device has it."""
    return torch.float64 if device_kind(device.type).has_float64 else torch.float32


def pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor in page-locked host memory, if copies to the device are faster from there."""
    return tensor.pin_memory() if device_kind(device.type).pins_host_memory else tensor
