"""Kinds of devices: the table of what differs between them; no torch.

What torch answers for every kind alike is asked of `torch.accelerator` where it is needed. What it
does not, or not of every kind, stands here: another kind of device is another row.
"""

from dataclasses import dataclass
from typing import Literal

HOST_KIND, USUAL_KIND = "cpu", "cuda"
"""The kind that every machine has, and the one that is taken where nothing is said."""

StrategyOfKind = Literal["single", "ddp", "fsdp", "deepspeed"]


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """What is known of a kind of device. The defaults hold for one that has no row."""

    name: str
    """As torch calls it in `torch.device`: cpu, cuda, xpu, mps, ..."""
    noun: str = "device"
    """What one of them is called in messages."""
    tried: bool = False
    """Whether ftkit has been tried on it: on simulated ones at least."""
    communication: str | None = None
    """The backend of torch.distributed that takes its tensors; None: ranks cannot speak."""
    strategies: tuple[StrategyOfKind, ...] = ("single",)
    """What runs on it."""
    counts_memory: bool = False
    """Whether torch.accelerator counts its memory: allocated, requested and reserved bytes."""
    allocator_block_bytes: int = 1
    """Sizes are rounded up to a multiple of it."""
    grows_segments: bool = False
    """Whether its allocator takes the setting `expandable_segments`."""
    times_events: bool = False
    """Whether its events have times: a line of Python returns before its kernels have run."""
    pins_host_memory: bool = False
    """Whether copies from page-locked host memory run beside the host."""
    registers_host_memory: bool = False
    """Whether ordinary host memory can be page-locked: by cudaHostRegister."""
    pages_optimizer_state: bool = False
    """Whether bitsandbytes' paged optimizers keep their state in memory that the driver moves to
    the host."""
    nvml_tells_use: bool = False
    """Whether NVIDIA's library tells how busy it is."""
    has_float64: bool = True
    """Whether it computes in float64, in which losses are added up."""
    has_flash: bool = False
    """Whether torch's flash attention over variable lengths runs on it, in 16 bits."""
    has_triton: bool = False
    """Whether the kernels of Liger run on it."""


DEVICE_KINDS = {
    kind.name: kind
    for kind in (
        DeviceKind(
            name=HOST_KIND,
            noun="CPU",
            tried=True,
            communication="gloo",
            strategies=("single", "ddp", "fsdp", "deepspeed"),
        ),
        # GPUs of NVIDIA; those of AMD too, in builds of torch for ROCm, where they have this name.
        DeviceKind(
            name=USUAL_KIND,
            noun="GPU",
            tried=True,
            communication="nccl",
            strategies=("single", "ddp", "fsdp", "deepspeed"),
            counts_memory=True,
            allocator_block_bytes=512,  # kMinBlockSize in c10/cuda/CUDACachingAllocator.h
            grows_segments=True,
            times_events=True,
            pins_host_memory=True,
            registers_host_memory=True,
            pages_optimizer_state=True,
            nvml_tells_use=True,
            has_flash=True,
            has_triton=True,
        ),
        # GPUs of Intel.
        DeviceKind(
            name="xpu",
            noun="GPU",
            communication="xccl",
            strategies=("single", "ddp", "fsdp"),
            counts_memory=True,
            allocator_block_bytes=512,  # kMinBlockSize in c10/xpu/XPUCachingAllocator.cpp
            times_events=True,
            pins_host_memory=True,
        ),
        # GPUs of Apple: one in a machine, with the memory of the host, which torch.accelerator
        # counts from torch 2.13 on at the earliest (https://github.com/pytorch/pytorch/pull/186748).
        DeviceKind(name="mps", noun="GPU", has_float64=False),
    )
}


def device_kind(name: str) -> DeviceKind:
    """What is known of a kind; of one without a row, what holds for all."""
    return DEVICE_KINDS.get(name) or DeviceKind(name=name)


def kind_of_backend(backend: str) -> str:
    """The kind whose tensors a backend of torch.distributed takes.

    One that takes those of several kinds takes those of the host.
    """
    return next(
        (kind.name for kind in DEVICE_KINDS.values() if kind.communication == backend), HOST_KIND
    )
