"""GPU kinds with their memory, overhead of a CUDA process, and the devices of this machine."""

import dataclasses
from dataclasses import dataclass
from typing import Literal

from ftkit.errors import UserError
from ftkit.recipe.devices import AMPERE, Devices, free_bytes, has_float8, visible_gpus
from ftkit.utils.accelerators.kinds import HOST_KIND, USUAL_KIND, device_kind
from ftkit.utils.console.formatting import parse_size
from ftkit.utils.hardware import available_host_bytes, host_limit

_GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A kind of GPU, or the host memory that stands in its place on CPUs."""

    name: str
    memory_bytes: int
    """Memory that CUDA offers to programs: less than the product's name says."""
    kind: str = USUAL_KIND
    """Kind of device, as torch calls it."""
    bf16: bool = True
    """Whether it computes bfloat16 in hardware (see `Devices.bf16_native`)."""
    float8: bool = True
    """Whether it computes float8 in hardware (compute capability 8.9 and later)."""
    swap_bytes: int = 0
    """Swap beside host memory, which is far too slow to train in."""
    host_bytes: int | None = None
    """Host memory and swap for each rank beside its GPU; None: not known, as of a GPU elsewhere."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(name="a100-40gb", memory_bytes=int(39.4 * _GIB), float8=False),
        Gpu(name="a100-80gb", memory_bytes=int(79.1 * _GIB), float8=False),
        Gpu(name="h100", memory_bytes=int(79.1 * _GIB)),
        Gpu(name="h100-nvl", memory_bytes=int(93.0 * _GIB)),
        Gpu(name="h200", memory_bytes=int(139.8 * _GIB)),
        Gpu(name="gh200", memory_bytes=int(94.4 * _GIB)),
        Gpu(name="b200", memory_bytes=int(178.3 * _GIB)),
        Gpu(name="a10", memory_bytes=int(21.9 * _GIB), float8=False),
        Gpu(name="a10g", memory_bytes=int(22.0 * _GIB), float8=False),
        Gpu(name="l4", memory_bytes=int(22.0 * _GIB)),
        Gpu(name="l40", memory_bytes=int(44.3 * _GIB)),
        Gpu(name="l40s", memory_bytes=int(44.3 * _GIB)),
        Gpu(name="a40", memory_bytes=int(44.3 * _GIB), float8=False),
        Gpu(name="a6000", memory_bytes=int(47.4 * _GIB), float8=False),
        Gpu(name="rtx3090", memory_bytes=int(23.5 * _GIB), float8=False),
        Gpu(name="rtx4090", memory_bytes=int(23.6 * _GIB)),
        Gpu(name="rtx5090", memory_bytes=int(31.3 * _GIB)),
        Gpu(name="v100-16gb", memory_bytes=int(15.7 * _GIB), bf16=False, float8=False),
        Gpu(name="v100-32gb", memory_bytes=int(31.7 * _GIB), bf16=False, float8=False),
        Gpu(name="t4", memory_bytes=int(14.6 * _GIB), bf16=False, float8=False),
        # What Google's pages say of a chip (cloud.google.com/tpu/docs/v5e and so on), and torch_tpu
        # gives to programs; what its runtime takes of it is not known.
        Gpu(name="v5e", kind="tpu", memory_bytes=16 * _GIB),
        Gpu(name="v5p", kind="tpu", memory_bytes=95 * _GIB),
        Gpu(name="v6e", kind="tpu", memory_bytes=32 * _GIB),
    )
}
"""Memory as torch gives it in its out-of-memory messages ("total capacity of 79.10 GiB"): the
least that people have reported for a card, rounded down. It depends a little on the driver."""

HOST = "host memory"
"""Name used in place of a GPU: the memory of this machine, for ranks on CPUs."""

# Estimates from public reports. On one H200 with CUDA 13, four recipes of scripts/calibrate_memory
# gave a context of 0.73 GiB, workspaces of 64 MiB, fragmentation of 0.5 to 2.8 % and an error of
# 0.02 %: too few cards to take these numbers over.
CONTEXT_BYTES = int(0.5 * _GIB)
"""CUDA context and loaded kernels of a process; about 0.3 to 0.6 GiB."""
WORKSPACE_BYTES = 2 * 32 * 2**20
"""cuBLAS' workspaces, which torch allocates with its tensors: one for the thread of forward passes
and one for autograd's, each of 8 MiB, on Hopper of 32 MiB (CUBLAS_WORKSPACE_CONFIG in the
documentation of cuBLAS)."""
COMMUNICATION_BYTES = int(0.5 * _GIB)
"""NCCL's buffers for several ranks; grows with the number of channels and peers."""
FRAGMENTATION = 0.04
"""Share that the caching allocator holds beyond the tensors, usually; less is to be expected with
segments that can grow (`ftkit.launch.ranks.ALLOCATOR_SETTINGS`), which is not calibrated either."""
FRAGMENTATION_RANGE = (0.0, 0.10)
"""Lowest and highest such share: before it gives up, it returns what it does not use."""
TENSOR_ERROR = 0.02
"""Relative error of the bytes in tensors: CUDA kernels keep other things than CPU kernels."""


def find_gpu(text: str) -> Gpu:
    """Return the GPU for a name, for a size such as 24GiB, or of this machine (auto).

    Raises:
        UserError: it is none of these, or this machine has no GPU.
    """
    name = text.strip().lower()
    if name in GPUS:
        return GPUS[name]
    if name == "auto":
        return _gpu_here()
    # "24g" means GiB here, as in the names of products.
    in_any_case = f"{name}ib" if name.endswith("g") else name
    if size_bytes := parse_size(in_any_case.upper().replace("IB", "iB")):
        return Gpu(name=text.strip(), memory_bytes=size_bytes)
    raise UserError(
        f"--gpu is {text!r}, but must be one of {', '.join(GPUS)}, a size such as 24GiB, or auto. "
        "Try --gpu 24GiB."
    )


def _gpu_here() -> Gpu:
    """Smallest GPU, or MIG instance, that programs see on this machine."""
    try:
        found = visible_gpus()
    except UserError as error:
        raise UserError(
            f"--gpu is auto, but {error}\nName a GPU: --gpu a100-80gb, or give its memory: "
            "--gpu 24GiB."
        ) from None
    # All ranks do the same work, so the smallest device decides.
    smallest = min(found, key=lambda gpu: gpu.memory_bytes)
    return Gpu(
        name=smallest.name,
        memory_bytes=smallest.memory_bytes,
        bf16=smallest.capability >= AMPERE,
        float8=has_float8(smallest.capability),
    )


def ranks_here(requested: int | Literal["auto"], devices: Devices) -> int:
    """Ranks of a run on this machine, by the key `devices` of its recipe."""
    if isinstance(requested, int):
        return requested
    # auto: every GPU gets a rank, but the cores of a CPU share one.
    return 1 if devices.accelerator == HOST_KIND else devices.count


def device_here(ranks: int, devices: Devices) -> Gpu | None:
    """Memory of each rank of a run on this machine: the smallest GPU, or a share of host memory.

    Args:
        ranks: on this machine.
        devices: of this machine.

    Returns:
        None where the memory of the devices is not known.
    """
    # Ranks on one machine share its memory.
    host = host_limit(ranks)
    if devices.accelerator == HOST_KIND:
        return Gpu(
            name=HOST,
            memory_bytes=host.memory_bytes,
            bf16=devices.bf16_native,
            swap_bytes=host.swap_bytes,
        )
    # Ranks take the first devices.
    sizes = devices.memory_bytes[:ranks]
    if not sizes:
        return None
    return Gpu(
        name=devices.names[0],
        memory_bytes=min(sizes),
        bf16=devices.bf16_native,
        float8=devices.float8_native,
        host_bytes=host.memory_bytes + host.swap_bytes,
    )


def free_here(ranks: int, devices: Devices) -> Gpu:
    """Memory that each of the ranks on this machine can take now."""
    if devices.accelerator == HOST_KIND:
        free = available_host_bytes(ranks)
        return Gpu(name=HOST, memory_bytes=free, bf16=devices.bf16_native)
    # The fullest device decides, as other processes may use one of them.
    free = min(free_bytes(min(ranks, devices.count), devices.accelerator))
    # With everything else that is known of the device: only its memory differs.
    known = device_here(ranks, devices)
    if known is None:
        name = devices.names[0] if devices.names else device_kind(devices.accelerator).noun
        return Gpu(name=name, memory_bytes=free, bf16=devices.bf16_native)
    return dataclasses.replace(known, memory_bytes=free)
