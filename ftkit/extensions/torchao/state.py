"""torchao's optimizers, whose state has 4 or 8 bits: updates in pieces, and the codes of states.

Private parts that are used here, as they are in torchao 0.18: `_AdamBase` and its
`_subclass_zeros`, `single_param_adam`, and the attributes of its quantised
states; of torch `_dynamo.utils.disable_cache_limit`, as torchao uses it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.optim import Optimizer

from ftkit.strategies.coded_state import CodedState, Codes
from ftkit.utils.accelerators.kinds import device_kind
from ftkit.utils.imports import dtensor

_LEAST = 4096
"""Parameters with fewer numbers keep the state of the parameters' own dtype, as in torchao."""
# A piece needs about 60 bytes for each number if nothing fuses its operations: on a CPU it stays in
# the cache.
_AT_ONCE, _AT_ONCE_FUSED = 2**17, 2**24
"""Numbers of a piece."""


class InPieces(CodedState):
    """Mixin that updates a parameter in pieces, of which this rank may have some rows.

    torchao updates a parameter at once, and compiles that for each shape. Without a compiler the
    memory for the update of an embedding would be several times that of the model; pieces of one
    size need little of it, and one compilation where kernels are compiled.
    """

    block_size: int
    bf16_stochastic_round: bool
    is_adamw: bool
    _subclass_zeros: Callable[[Tensor, bool, int], Tensor]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if not self.state[parameter]:
                        self.state[parameter] = self.new_state(parameter)
                    self._update(parameter, group)

    def new_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {
            "step": torch.tensor(0.0),
            "exp_avg": self._zeros(parameter, signed=True),
            "exp_avg_sq": self._zeros(parameter, signed=False),
        }

    def codes_in(self, state: Tensor) -> Codes | None:
        return codes_in(state)

    def _zeros(self, parameter: Tensor, *, signed: bool) -> Tensor:
        rows = _local(parameter)
        # By the size of the whole parameter: how many ranks share it does not decide its rounding.
        has_blocks = parameter.numel() >= _LEAST and parameter.numel() % self.block_size == 0
        if has_blocks and rows.numel() and rows.numel() % self.block_size == 0:
            return self._subclass_zeros(rows, signed, self.block_size)
        return torch.zeros_like(rows)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        from torchao.optim.adam import single_param_adam

        assert parameter.grad is not None
        state = self.state[parameter]
        state["step"] += 1
        rows, gradient = _local(parameter).view(-1), _local(parameter.grad).reshape(-1)
        if not rows.numel():  # there may be fewer rows than ranks
            return
        update, at_once = single_param_adam, _AT_ONCE
        limits: AbstractContextManager[None] = nullcontext()
        if device_kind(rows.device.type).has_triton:
            update = torch.compile(single_param_adam, fullgraph=True, dynamic=False)
            at_once = _AT_ONCE_FUSED
            # What is left of each parameter has a size of its own, but a model has few of them.
            limits = torch._dynamo.utils.disable_cache_limit()
        # A tensor: a compiled update would be compiled again for each new rate.
        rate = torch.as_tensor(group["lr"], dtype=torch.float32)
        with limits:
            for part in self._pieces(rows, at_once):
                update(
                    rows[part],
                    gradient[part],
                    state["step"],
                    _piece(state["exp_avg"], part),
                    _piece(state["exp_avg_sq"], part),
                    None,
                    rate,
                    group["betas"][0],
                    group["betas"][1],
                    group["weight_decay"],
                    group["eps"],
                    self.is_adamw,
                    self.bf16_stochastic_round and rows.dtype is torch.bfloat16,
                )

    def _pieces(self, rows: Tensor, at_once: int) -> Iterator[slice]:
        """Ranges of numbers that begin with a block."""
        size = max(1, at_once // self.block_size) * self.block_size
        # Fake tensors only tell what memory an update takes: each piece takes the same.
        numel = min(rows.numel(), size) if is_fake(rows) else rows.numel()
        for first in range(0, numel, size):
            yield slice(first, min(first + size, numel))


def in_pieces(optimizer_class: type[Optimizer]) -> type[Optimizer]:
    """Derive an optimizer of torchao that updates in pieces, if its state is quantised."""
    from torchao.optim.adam import _AdamBase

    if not issubclass(optimizer_class, _AdamBase):
        return optimizer_class
    # Under the same name, which messages show and `canonical_kind` goes by.
    derived: Any = type(optimizer_class.__name__, (InPieces, optimizer_class), {})
    for signed in (True, False):
        # torchao computes tables of levels once in a process, which a simulation could not.
        derived._subclass_zeros(torch.zeros(256), signed, 256)
    found: type[Optimizer] = derived
    return found


def codes_in(state: Any) -> Codes | None:
    """Codes and scales of an optimizer state; None: torchao does not quantise it."""
    if not type(state).__module__.startswith("torchao.optim."):
        return None
    codes, code = state.codes.view(-1), getattr(state, "qmap", None)
    if code is None:  # FP8, whose codes are numbers themselves
        codes, code = codes.view(torch.uint8), _values_of_fp8(codes.dtype)
    return Codes(codes, state.scale, code, state.block_size)


def _values_of_fp8(dtype: torch.dtype) -> Tensor:
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    # Quantised numbers are finite; JSON has no others.
    return every.nan_to_num(0.0)


def _piece(moment: Any, part: slice) -> Tensor:
    """A range of a moment, as a view."""
    if (found := codes_in(moment)) is None:
        view: Tensor = moment.view(-1)[part]
        return view
    in_byte = 2 if len(found.code) == 16 else 1
    codes = moment.codes.view(-1)[part.start // in_byte : part.stop // in_byte]
    scales = found.scales[part.start // found.block : part.stop // found.block]
    if not hasattr(moment, "qmap"):
        return type(moment)(codes, scales)
    shape = [(part.stop - part.start,)] if in_byte == 2 else []
    return type(moment)(codes, scales, moment.qmap, moment.signed, *shape)


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, dtensor()) else tensor
    return local
