"""Ranks in torch.distributed: numbers, devices, sums and broadcasts."""

import os

import torch
import torch.distributed as dist
from torch import Tensor

from ftkit.recipe.plan import Plan
from ftkit.utils.accelerators.kinds import HOST_KIND, kind_of_backend


def broadcast_ints(*values: int) -> list[int]:
    """What rank 0 says, in one message; every rank calls this."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(values)
    said = torch.tensor(values, device=kind_of_backend(dist.get_backend()))
    dist.broadcast(said, src=0)
    return [int(value) for value in said.tolist()]


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of a tensor over all ranks, in place; every rank calls this."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def local_rank() -> int:
    """This process among those of its machine."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Processes of this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def rank() -> int:
    """This process among all."""
    return int(os.environ.get("RANK", "0"))


def make_device(plan: Plan) -> torch.device:
    """The device of this rank."""
    if plan.accelerator == HOST_KIND:
        return torch.device(HOST_KIND)
    return torch.device(plan.accelerator, local_rank())


def broadcast_text(text: str) -> str:
    """A text that rank 0 has; every rank calls this."""
    data = text.encode()
    (size,) = broadcast_ints(len(data))
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return text
    device = kind_of_backend(dist.get_backend())
    said = torch.zeros(size, dtype=torch.uint8, device=device)
    if dist.get_rank() == 0:
        said.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(said, src=0)
    return bytes(said.cpu().numpy()).decode()
