"""Tensors of a model by category, under every strategy."""

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from ftkit.models.bodies.experts import packed_in
from ftkit.models.quantized_layer import QuantizedLayer
from ftkit.strategies.strategy import Strategy, tensors_in


def parameters(strategy: Strategy, modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Weights, tables, and what turns packed weights into numbers, of modules one by one."""
    for module in modules:
        for parameter in module.parameters(recurse=False):
            yield from strategy.parameter_memory(parameter)
        yield from module.buffers(recurse=False)
        if isinstance(module, QuantizedLayer):
            yield from tensors_in(vars(module))
        for matrices in packed_in(module).values():
            yield from tensors_in(vars(matrices))


def gradients(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Those that parameters hold."""
    for parameter in parameters:
        if parameter.grad is not None:
            yield parameter.grad
