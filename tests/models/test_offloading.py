"""Inputs of checkpointed blocks in host memory: same gradients, whatever time the copies take."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ftkit.models.offloading import DeviceCopies, Offloading

BLOCKS = 6


def of_storage(storage: "weakref.ref[torch.UntypedStorage]", like: Tensor) -> Tensor:
    found = storage()
    assert found is not None, "freed before it was copied"
    return torch.empty(0).set_(found).view_as(like)


def _copy(source: Tensor, target: Tensor) -> None:
    target.copy_(source)


class LateCopies:
    """Copies as late as they are allowed to be: when somebody waits for them.

    Until then a target holds NaN. A source that is freed before is an error, as its memory would
    have been used again.
    """

    def __init__(self) -> None:
        self.to_host_count = self.to_device_count = self.most_on_device = 0
        self._on_device: list[weakref.ref[torch.UntypedStorage]] = []

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Callable[[], None]]:
        self.to_host_count += 1
        self._note(tensor)
        copy = torch.full_like(tensor, float("nan"), requires_grad=False)
        storage = weakref.ref(tensor.untyped_storage())
        return copy, lambda: _copy(of_storage(storage, copy), copy)

    def to_device(self, copy: Tensor) -> tuple[Tensor, Callable[[], None]]:
        self.to_device_count += 1
        tensor = torch.full_like(copy, float("nan"))
        self._note(tensor)
        storage = weakref.ref(tensor.untyped_storage())
        return tensor, lambda: _copy(copy, of_storage(storage, copy))

    def wait(self, moment: Callable[[], None]) -> None:
        moment()

    def alive(self) -> int:
        """Tensors on the device that were copied to the host, or back."""
        return sum(storage() is not None for storage in self._on_device)

    def _note(self, tensor: Tensor) -> None:
        self._on_device.append(weakref.ref(tensor.untyped_storage()))
        self.most_on_device = max(self.most_on_device, self.alive())


class Chain(nn.Module):
    """Blocks that are checkpointed, every one or every second."""

    def __init__(self, every: int, block: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(BLOCKS))
        self._every, self._block = every, block

    def forward(self, hidden: Tensor, offloading: Offloading | None) -> Tensor:
        hidden = hidden * 1  # not of the caller, who keeps it
        for number, layer in enumerate(self.blocks):
            if number % self._every:
                hidden = self._block(layer, hidden)
            elif offloading is None:
                hidden = self._checkpointed(layer, hidden)
            else:
                with offloading.saving(hidden):
                    hidden = self._checkpointed(layer, hidden)
        return hidden.square().sum()

    def _checkpointed(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        result: Tensor = checkpoint(self._block, layer, hidden, use_reentrant=False)
        return result


def plain(layer: nn.Module, hidden: Tensor) -> Tensor:
    return hidden + torch.tanh(layer(hidden))


def gradients(
    offloading: Offloading | None, *, every: int = 1, backward_passes: int = 1
) -> list[Tensor]:
    torch.manual_seed(0)
    model = Chain(every, plain)
    for micro_step in range(2):
        loss = model(torch.randn(3, 4) + micro_step, offloading)
        for number in range(backward_passes):
            loss.backward(retain_graph=number + 1 < backward_passes)
        del loss
    found = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in found)
    return [gradient for gradient in found if gradient is not None]


def late() -> tuple[Offloading, LateCopies]:
    offloading, copies = Offloading(), LateCopies()
    offloading.copies = copies
    return offloading, copies


@pytest.mark.parametrize(("every", "backward_passes"), [(1, 1), (2, 1), (1, 2)])
def test_gradients_are_equal_to_the_last_bit(every: int, backward_passes: int) -> None:
    offloading, _ = late()
    found = gradients(offloading, every=every, backward_passes=backward_passes)
    expected = gradients(None, every=every, backward_passes=backward_passes)
    assert all(map(torch.equal, found, expected))


def test_memory_that_is_not_page_locked_serves_as_well() -> None:
    offloading = Offloading()
    offloading.copies = DeviceCopies(torch.device("cpu"))
    assert all(map(torch.equal, gradients(offloading), gradients(None)))


def test_the_last_two_inputs_stay_and_the_others_come_back_one_block_ahead() -> None:
    offloading, copies = late()
    gradients(offloading)
    assert copies.to_host_count == 2 * BLOCKS
    assert copies.to_device_count == 2 * (BLOCKS - 2)
    # The input of the block that runs, and that of the one before it: on its way out in the forward
    # pass, on its way back in the backward pass.
    assert copies.most_on_device == 2


def test_an_input_that_its_block_changes_is_an_error_as_without_offloading() -> None:
    def changing(layer: nn.Module, hidden: Tensor) -> Tensor:
        return plain(layer, hidden.mul_(2))

    for offloading in (None, late()[0]):
        model = Chain(1, changing)
        with pytest.raises(RuntimeError, match=r"in.?place"):
            model(torch.randn(3, 4), offloading).backward()


def test_a_graph_that_is_freed_without_a_backward_pass_leaves_nothing_behind() -> None:
    offloading, copies = late()
    loss: Any = Chain(1, plain)(torch.randn(3, 4), offloading)
    assert copies.alive() == 2
    del loss
    assert copies.alive() == 0


def test_on_a_host_nothing_is_copied() -> None:
    offloading = Offloading()
    assert all(map(torch.equal, gradients(offloading), gradients(None)))
    assert offloading.copies is None
