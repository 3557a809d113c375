"""Host copies of the training state, from which a thread writes while training continues."""

import dataclasses
import mmap
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ftkit.checkpoint.shards import Piece
from ftkit.utils.accelerators.kinds import device_kind
from ftkit.utils.accelerators.use import accelerator_in_use

# Off until checkpoints written by a GPU under load have been compared with synchronous ones: tests
# on CPUs cannot show that passes overlap the copies and that every byte is of the right step.
COPIES_BESIDE_TRAINING = False
"""Whether training continues while the device copies."""


class HostCopies:
    """Copies in one block of memory, which the first save takes and the next ones reuse.

    On CUDA it is page-locked, so that the device copies into it at full speed by itself.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._is_registered = False
        self._stream: Any = None
        self._done: Any = None
        """Device event after the newest copies; None: the host has waited for them."""
        self._sources: list[Piece] = []
        """Sources of copies that no update waits for yet; their memory must not be reused."""
        self.refusal: str | None = None
        """Why the memory could not be page-locked."""

    @property
    def size_bytes(self) -> int:
        """Size of the memory block."""
        return 0 if self._memory is None else self._memory.nbytes

    def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Copy pieces; their memory may change once `before_update` has returned.

        The copies are valid until the next call, and may be read once `wait` has returned.
        """
        pieces = list(pieces)
        _synchronize()  # the host copies paged state itself, and the device may be writing it
        tensors = [t for piece in pieces for t in (piece.values, piece.scales) if t is not None]
        copies = iter(self._places(tensors))
        if not ((device := accelerator_in_use()) and COPIES_BESIDE_TRAINING):
            copied = [_copied(piece, copies) for piece in pieces]
            _synchronize()
            return copied
        self._stream = self._stream or torch.Stream(device)
        # Copies begin after the update of this step, whose kernels may still be queued.
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            copied = [_copied(piece, copies) for piece in pieces]
            self._done = torch.Event(device)
            self._done.record(self._stream)
        self._sources = pieces
        return copied

    def settle(self) -> None:
        """Wait for all work queued on the device."""
        _synchronize()

    def wait(self) -> None:
        """Wait until the copies are complete; any thread may call this."""
        if (done := self._done) is not None:
            done.synchronize()

    def before_update(self) -> None:
        """Make updates on the device wait for the copies; the host continues."""
        if self._sources:
            torch.accelerator.current_stream().wait_event(self._done)
            self._sources = []

    def release(self) -> None:
        """Wait for the copies, then free their memory; nothing may read it afterwards."""
        self.wait()
        if self._is_registered:
            assert self._memory is not None
            # Before the memory is freed: CUDA registered its addresses.
            _runtime().cudaHostUnregister(self._memory.data_ptr())
        self._memory, self._is_registered = None, False
        self._done, self._sources = None, []

    def _places(self, tensors: list[Tensor]) -> list[Tensor]:
        """A view of the memory for each tensor, of its shape and dtype."""
        size_bytes = sum(tensor.nbytes for tensor in tensors)
        # The state of a run has one size from its first step on, so this happens once.
        if size_bytes != self.size_bytes:
            self.release()
            self._take_memory(size_bytes)
        places: list[Tensor] = [torch.empty(0)] * len(tensors)
        start = 0
        # Widest dtype first, so that every tensor is aligned to its width.
        by_width = sorted(range(len(tensors)), key=lambda i: -tensors[i].itemsize)
        for index in by_width:
            tensor = tensors[index]
            assert self._memory is not None
            bytes_ = self._memory[start : start + tensor.nbytes]
            places[index] = bytes_.view(tensor.dtype).view(tensor.shape)
            start += tensor.nbytes
        return places

    def _take_memory(self, size_bytes: int) -> None:
        if not size_bytes:
            return
        # Not torch's pinned allocator: it rounds each tensor up to a power of two, which takes a
        # third more for a whole model than ftkit.planning.memory counts.
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory = torch.frombuffer(pages, dtype=torch.uint8)
        device = accelerator_in_use()
        if device is not None and device_kind(device.type).registers_host_memory:
            self.refusal = _register(self._memory, device)
            self._is_registered = self.refusal is None


def _copied(piece: Piece, places: Any) -> Piece:
    """Copy a piece to the next places."""
    # Without waiting for each: the caller waits once for all copies.
    values = next(places).copy_(piece.values, non_blocking=True)
    if piece.scales is None:
        return dataclasses.replace(piece, values=values)
    scales = next(places).copy_(piece.scales, non_blocking=True)
    return dataclasses.replace(piece, values=values, scales=scales)


def _synchronize() -> None:
    if accelerator_in_use() is not None:
        torch.accelerator.synchronize()


def _runtime() -> Any:
    """The CUDA (or HIP) runtime under torch, for functions that torch does not wrap."""
    return torch.cuda.cudart()


def _register(memory: Tensor, device: torch.device) -> str | None:
    """Page-lock memory; returns the error if that fails."""
    runtime = _runtime()
    code = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(code) == 0:
        return None
    # CUDA reports the error again to the next caller, and torch asks after each kernel: let this
    # one take it.
    with suppress(RuntimeError):
        torch.zeros(1, device=device)
    return str(runtime.cudaGetErrorString(code))
