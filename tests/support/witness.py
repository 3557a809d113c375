"""Writes down what a rank does beside training: messages, and optimizer state on the move."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ftkit.strategies.distributed import rank
from ftkit.training.step import TrainStep

MESSAGES = ("all_gather", "all_gather_object", "all_reduce", "barrier", "broadcast")
FORWARD, UPDATED, MOVED = "forward", "updated", "moved"


class Watched(torch.Tensor):
    """Records each move to another device."""

    tell: Callable[[str], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.to, torch.Tensor.cpu):
            cls.tell(MOVED)
        return super().__torch_function__(func, types, args, kwargs)


def watch(directory: Path) -> None:
    """Write a line for each forward pass, update, message, and move of optimizer state."""
    log = directory / f"witness-{rank()}.log"

    def tell(what: str) -> None:
        with log.open("a") as file:
            file.write(f"{what}\n")

    def telling(name: str, do: Callable[..., Any]) -> Callable[..., Any]:
        def recording(*args: Any, **kwargs: Any) -> Any:
            tell(name)
            return do(*args, **kwargs)

        return recording

    update = TrainStep.update

    def update_and_watch(self: TrainStep) -> float:
        norm = update(self)
        tell(UPDATED)
        for state in self._strategy.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    state[key] = value.as_subclass(Watched)
        return norm

    Watched.tell = staticmethod(tell)
    for name in MESSAGES:
        setattr(dist, name, telling(name, getattr(dist, name)))
    TrainStep.micro_step = telling(FORWARD, TrainStep.micro_step)
    TrainStep.update = update_and_watch


def recorded(directory: Path, of_rank: int = 0) -> list[str]:
    """The lines of a rank."""
    return (directory / f"witness-{of_rank}.log").read_text().split()
