"""Models without values: what they consist of, before any memory is allocated."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Make tensors on the meta device, and skip first values, which it cannot hold."""
    with torch.device("meta"), _OnlyShapes():
        yield


def allocate(module: nn.Module, device: torch.device) -> None:
    """Give all tensors of a module memory on a device, with any values, as `to_empty` does."""
    with _OnlyShapes():
        module.to_empty(device=device)


class _OnlyShapes(TorchFunctionMode):
    """Keeps torch from asking how dtypes of tensors without values are promoted.

    It asks for first values of parameters and for tensors like others, and imports SymPy for it.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        if func is torch.empty_like and type(args[0]) in (Tensor, nn.Parameter):
            options = {"dtype": args[0].dtype, "device": args[0].device} | kwargs
            return torch.empty_strided(args[0].shape, args[0].stride(), **options)
        return func(*args, **kwargs)
