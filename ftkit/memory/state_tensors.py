"""Tensors of model and optimizer, by category, under every strategy."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ftkit.memory.tracker import Category
from ftkit.model.quantized_layer import QuantizedLayer

_ZERO_WORDS: tuple[tuple[str, Category], ...] = (
    ("grad", "gradients"),
    ("ipg", "gradients"),
    ("fp32", "optimizer_state"),
    ("16", "parameters"),
    ("lp_param", "parameters"),
)
"""What an attribute of DeepSpeed's optimizer is, by a word in its name; the first one counts."""


def parameters(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Weights, tables, and what turns packed weights into numbers, of modules one by one."""
    for module in modules:
        for parameter in module.parameters(recurse=False):
            part = getattr(parameter, "ds_tensor", None)  # under ZeRO-3
            if part is not None:
                yield part
            if part is None or getattr(parameter, "ds_persist", False):  # these stay gathered
                yield parameter
        yield from module.buffers(recurse=False)
        if isinstance(module, QuantizedLayer):
            yield from _tensors_in(vars(module))


def gradients(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Those that parameters hold."""
    for parameter in parameters:
        if parameter.grad is not None:
            yield parameter.grad


def of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Tensor, Category]]:
    """What an optimizer keeps; DeepSpeed's has weights and gradients too."""
    if type(optimizer).__module__.startswith("deepspeed.runtime.zero"):
        for name, value in vars(optimizer).items():
            for word, category in _ZERO_WORDS:
                if word in name:
                    for tensor in _tensors_in(value):
                        if not hasattr(tensor, "ds_tensor"):  # may be gathered just now
                            yield tensor, category
                        if tensor.is_leaf and tensor.grad is not None:
                            yield tensor.grad, "gradients"
                    break
        optimizer = optimizer.optimizer  # type: ignore[attr-defined]
    for tensor in _tensors_in(optimizer.state):
        yield tensor, "optimizer_state"


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested containers, in bitsandbytes' states and in DeepSpeed's buckets."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _tensors_in(item)
    elif type(value).__module__.startswith(("bitsandbytes.", "deepspeed.runtime.zero")):
        yield from _tensors_in(getattr(value, "__dict__", {}))
