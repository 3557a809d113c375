"""What the simulated programs have in common: the clock of memory, 4-bit layers, optimizers."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from bitsandbytes.nn.modules import Linear4bit
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ftkit.planning.tracker import LiveTensors


@contextmanager
def simulated(dtype: torch.dtype) -> Iterator[None]:
    """Context in which tensors have no memory, and parameters are made in a dtype."""
    functional: Any = nn.functional
    dropout = functional.dropout
    torch.set_default_dtype(dtype)
    # CUDA keeps one byte per element of a mask; torch's CPU path keeps the mask in the input's
    # dtype, so the operator of CUDA is called by its name.
    functional.dropout = _dropout_of_cuda
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        functional.dropout = dropout
        torch.set_default_dtype(torch.float32)


def place(model: nn.Module) -> None:
    """Give a model of the meta device its parameters and buffers, which count from then on."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if parameter not in made:
                    made[parameter] = nn.Parameter(
                        torch.empty_like(parameter, device="cpu"), parameter.requires_grad
                    )
                module._parameters[name] = made[parameter]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")


def _dropout_of_cuda(
    x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    del inplace
    return torch.native_dropout(x, p, True)[0] if training and p else x


def peak_bytes(model: nn.Module, run: Callable[[Callable[[], None]], None]) -> int:
    """Peak of tensors on the GPU, each rounded up as CUDA's allocator does.

    Args:
        model: with its final parameters.
        run: runs training; calls its argument where the steps begin whose peak counts.
    """
    live = LiveTensors(torch.device("cpu"), granularity_bytes=512)
    live.assign(model.parameters(), "parameters")
    live.assign(model.buffers(), "parameters")
    with live:
        run(live.restart)
    return live.peak().total_bytes


def make_state(optimizer: Any, trained: Iterable[nn.Parameter]) -> None:
    """Take a step on gradients of zero, after which the optimizer has its state."""
    trained = list(trained)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for parameter in trained:
        parameter.grad = None


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters with gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


class Packed4Bit(Linear4bit):
    """A frozen linear layer in 4 bits, which is unpacked whole where it is used."""

    def __init__(self, layer: nn.Linear, *, nested: bool, keeps_input: bool) -> None:
        """Take the place of a layer.

        Args:
            layer: of which only the shape and dtype are used.
            nested: scales are quantised, too: one byte for 64 weights, else four.
            keeps_input: as bitsandbytes did before 0.43.2, whose backward pass does not need it.
        """
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.compute_dtype = layer.weight.dtype
        count = layer.weight.numel()
        packed: Any = nn.Parameter(torch.empty(count // 2, 1, dtype=torch.uint8), False)
        packed.compress_statistics, packed.quant_type = nested, "nf4"
        self.weight = packed
        blocks = -(-count // 64)
        dtype = torch.uint8 if nested else torch.float32
        self.register_buffer("scales", torch.empty(blocks, dtype=dtype))
        if nested:
            self.register_buffer("outer", torch.empty(-(-blocks // 256), dtype=torch.float32))
        self.bias = layer.bias
        self._keeps_input = keeps_input

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, in the dtype of `x`."""
        narrow = x.to(self.compute_dtype)
        shape = (self.out_features, self.in_features)
        y: Tensor = _UnpackedProduct.apply(narrow, self.weight, shape, self._keeps_input)
        return (y if self.bias is None else y + self.bias).to(x.dtype)


class _UnpackedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, shape: Any, keeps_input: bool) -> Tensor:
        # As attributes, which live as long as the graph: until the loss is gone, and not only
        # until the backward pass has come by, as those of save_for_backward.
        ctx.packed, ctx.shape = packed, shape
        ctx.kept = x if keeps_input else None
        return nn.functional.linear(x, x.new_empty(shape))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        return gradient @ gradient.new_empty(ctx.shape), None, None, None


def pack(model: nn.Module, *, nested: bool, keeps_input: bool, but: tuple[str, ...] = ()) -> None:
    """Replace linear layers by such of 4 bits, except those whose last name is in `but`."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name not in but:
                layer = Packed4Bit(child, nested=nested, keeps_input=keeps_input)
                setattr(module, name, layer)


class BitsandbytesAdamW:
    """The state of bitsandbytes' AdamW; its kernels need no memory besides."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, bits: int, paged: bool) -> None:
        """Prepare.

        Args:
            parameters: trained ones.
            bits: 8 or 32.
            paged: state of parameters with 100,000 elements is in memory that the CPU shares,
                which torch does not allocate.
        """
        self._parameters = list(parameters)
        self._bits, self._paged = bits, paged
        self._state: dict[nn.Parameter, list[Tensor]] = {}

    def step(self) -> None:
        """Make the state of parameters that have a gradient."""
        for parameter in self._parameters:
            if parameter.grad is not None and parameter not in self._state:
                self._state[parameter] = self._new_state(parameter)

    def zero_grad(self) -> None:
        """Free the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def _new_state(self, parameter: nn.Parameter) -> list[Tensor]:
        count = parameter.numel()
        if self._paged and count >= 100_000:
            return []
        if self._bits == 32 or count < 4096:
            return [torch.empty(count, dtype=torch.float32) for _ in range(2)]
        scales = -(-count // 256)
        return [
            torch.empty(count, dtype=torch.uint8),
            torch.empty(count, dtype=torch.uint8),
            torch.empty(scales, dtype=torch.float32),
            torch.empty(scales, dtype=torch.float32),
        ]


class Offloaded(torch.autograd.graph.saved_tensors_hooks):
    """Context whose activations move to the host; the last ones stay until they are copied."""

    def __init__(self, kept: int) -> None:
        """Prepare.

        Args:
            kept: number of tensors that wait for their copies.
        """
        waiting: deque[Tensor] = deque(maxlen=kept)

        def put(tensor: Tensor) -> Any:
            if isinstance(tensor, nn.Parameter) or tensor.nbytes < 1024:
                return tensor
            waiting.append(tensor)
            return tensor.shape, tensor.dtype

        def get(packed: Any) -> Tensor:
            waiting.clear()  # the forward pass is over
            if isinstance(packed, Tensor):
                return packed
            shape, dtype = packed
            return torch.empty(shape, dtype=dtype)

        super().__init__(put, get)
