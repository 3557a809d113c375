"""Tensors in containers: those that an optimizer or a quantised layer holds."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested containers, in bitsandbytes' states and in DeepSpeed's buckets."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from tensors_in(item)
    elif type(value).__module__.startswith(("bitsandbytes.", "deepspeed.runtime.zero")):
        yield from tensors_in(getattr(value, "__dict__", {}))
