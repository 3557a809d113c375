"""Inputs of checkpointed blocks in host memory, from the forward pass to the backward pass.

Copies run on a stream of their own. In the forward pass the copy of a block's input may take as
long as this block and the next one compute; in the backward pass the input of the block before is
on its way back while a block computes. So two inputs are on the device at most, and the last two
stay there: copies wait for the computation, the computation waits for copies that are late, and the
host waits for nothing.

torch's `save_on_cpu` copies on the stream of the computation, which waits for every copy; in torch
2.11 the host waits too.
"""

import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ftkit.utils.accelerators.kinds import HOST_KIND, device_kind


class Copies(Protocol):
    """Copies between a device and host memory, beside the computation."""

    def to_host(self, tensor: Tensor) -> tuple[Any, Any]:
        """Begin to copy a tensor of the device.

        Returns:
            The copy, for `to_device` alone; and the moment when it is complete, for `wait`. The
            tensor must stay as it is until then.
        """

    def to_device(self, copy: Any) -> tuple[Tensor, Any]:
        """Begin to copy back.

        Returns:
            The tensor; and the moment when it is complete, for `wait`.
        """

    def wait(self, moment: Any) -> None:
        """Let the computation wait for a moment; the host continues."""


class DeviceCopies:
    """Copies on a stream of their own, where the kind of device has page-locked host memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Copies from and to other host memory wait, on whatever stream.
        self._pins = device_kind(device.type).pins_host_memory
        self._stream: Any = torch.Stream(device) if self._pins else None

    def to_host(self, tensor: Tensor) -> tuple[Tensor, Any]:
        copy = torch.empty_like(tensor, device=HOST_KIND, pin_memory=self._pins)
        return copy, self._copy(tensor, copy)

    def to_device(self, copy: Tensor) -> tuple[Tensor, Any]:
        # Memory of the computation's stream: the copy waits for its earlier use, and `wait` comes
        # before its later use. So the allocator needs no record of the other stream. A graph that
        # an error frees before `wait` ends the run.
        tensor = torch.empty_like(copy, device=self._device)
        return tensor, self._copy(copy, tensor)

    def wait(self, moment: Any) -> None:
        if moment is not None:
            self._computing().wait_event(moment)

    def _copy(self, source: Tensor, target: Tensor) -> Any:
        if not self._pins:
            target.copy_(source)
            return None
        # Not before the source is computed, and the target's memory no longer read. Page-locked
        # memory is not reused before its copies are complete: torch's allocator records those.
        self._stream.wait_stream(self._computing())
        with self._stream:
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def _computing(self) -> Any:
        return torch.accelerator.current_stream(self._device)


class _Kept:
    """A tensor that was saved for the backward pass, on the device, in host memory, or both."""

    def __init__(self, tensor: Tensor, copies: Copies, before: "_Kept | None") -> None:
        self._copies = copies
        self._tensor: Tensor | None = tensor.detach()
        self._version = tensor._version
        self._copy, self._moment = copies.to_host(tensor)
        # The graph owns what it saved: when it is freed, so are these.
        self._before = weakref.ref(before) if before is not None else None

    @property
    def before(self) -> "_Kept | None":
        """The tensor that was saved before this one, if a backward pass still needs it."""
        return None if self._before is None else self._before()

    def leave_device(self) -> None:
        """Let go of the tensor on the device, if it is there."""
        if self._tensor is not None:
            self.take()

    def come_back(self) -> Tensor:
        """Begin to copy it back, unless it is on the device."""
        if self._tensor is None:
            self._tensor, self._moment = self._copies.to_device(self._copy)
            self._version = self._tensor._version
        return self._tensor

    def take(self) -> Tensor:
        """Let go of the tensor, and return it as the computation may read it."""
        tensor = self.come_back()
        self._tensor = None
        # The computation may read it, and reuse its memory, from here on.
        self._copies.wait(self._moment)
        if tensor._version != self._version:
            # As without offloading, where torch notices: the copy may have been too late.
            raise RuntimeError("a block has changed its own input in place, which is kept of it")
        return tensor


class Offloading:
    """Keeps in host memory what blocks save for the backward pass.

    One object for all blocks of a model, in the order in which they run.
    """

    def __init__(self) -> None:
        self.copies: Copies | None = None
        """How tensors are copied; None: it is decided by the device of the first one."""
        self._newest: weakref.ref[_Kept] | None = None

    def saving(self, hidden: Tensor) -> AbstractContextManager[Any]:
        """Context in which tensors that are saved for the backward pass go to host memory.

        Args:
            hidden: input of the block that saves them; of one on the host they stay where they are.
        """
        if self.copies is None:
            if hidden.is_cpu:
                return nullcontext()
            self.copies = DeviceCopies(hidden.device)
        return saved_tensors_hooks(self._save, self._bring_back)

    def _save(self, tensor: Tensor) -> _Kept | Tensor:
        # Checkpoints also save an empty tensor.
        if not tensor.numel():
            return tensor
        assert self.copies is not None
        before = None if self._newest is None else self._newest()
        if before is not None and before.before is not None:
            before.before.leave_device()
        kept = _Kept(tensor, self.copies, before)
        self._newest = weakref.ref(kept)
        return kept

    @staticmethod
    def _bring_back(kept: _Kept | Tensor) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        tensor = kept.take()
        if kept.before is not None:
            kept.before.come_back()  # while the block that needs this one computes
        return tensor
