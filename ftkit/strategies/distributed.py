"""Ranks: their numbers and devices, sums over them, and broadcasts from rank 0."""

import os
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from ftkit.recipe.mesh import Mesh
from ftkit.utils.accelerators.kinds import HOST_KIND, kind_of_backend


def broadcast_ints(*values: int) -> list[int]:
    """Integers of rank 0, in one message; every rank calls this."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(values)
    # NCCL only sends tensors in the memory of a GPU.
    sent = torch.tensor(values, device=kind_of_backend(dist.get_backend()))
    dist.broadcast(sent, src=0)
    return [int(value) for value in sent.tolist()]


def max_over_ranks(*values: int) -> list[int]:
    """Largest of each integer over all ranks, in one message; every rank calls this."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(values)
    sent = torch.tensor(values, device=kind_of_backend(dist.get_backend()))
    dist.all_reduce(sent, dist.ReduceOp.MAX)
    return [int(value) for value in sent.tolist()]


def broadcast_floats(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Array of rank 0, exactly; every rank calls this with one of the same shape."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    # As integers of 64 bits: not every device has float64.
    sent = torch.from_numpy(values.view(np.int64)).to(kind_of_backend(dist.get_backend()))
    dist.broadcast(sent, src=0)
    return sent.cpu().numpy().view(np.float64)


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum a tensor over all ranks, in place; every rank calls this."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


@cache
def context_group(mesh: Mesh, accelerator: str) -> Any:
    """Process group of the ranks that share rows with this one.

    Making it is a collective, so it is made once.
    """
    from torch.distributed.device_mesh import init_device_mesh

    shape = (mesh.data_ranks, mesh.context)
    made = init_device_mesh(accelerator, shape, mesh_dim_names=("data", "context"))
    return made.get_group("context")


def local_rank() -> int:
    """Number of this process on its machine."""
    # From torchrun's variables, which are set before the process group exists. Without them, there
    # is a single process.
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Number of processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def rank() -> int:
    """Number of this process among all."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of processes on all machines."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def make_device(accelerator: str) -> torch.device:
    """Device of this rank, of this kind."""
    if accelerator == HOST_KIND:
        return torch.device(HOST_KIND)
    return torch.device(accelerator, local_rank())


def broadcast_text(text: str, *, source: int = 0) -> str:
    """A text of rank 0, or of another one; every rank calls this."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return text
    data, is_source = text.encode(), dist.get_rank() == source
    # The size first: a receiver needs a tensor of the right length.
    (size,) = max_over_ranks(len(data) if is_source else 0)
    device = kind_of_backend(dist.get_backend())
    sent = torch.zeros(size, dtype=torch.uint8, device=device)
    if is_source:
        sent.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(sent, src=source)
    return bytes(sent.cpu().numpy()).decode()
