"""Host copies of the training state, written by a thread while training goes on."""

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

COPIES_BESIDE_TRAINING = False
"""Whether training goes on while the device copies. Whether forward and backward passes then really
run beside the copies, and every byte is that of the step, no CPU can show: this stays off until
checkpoints of a card under load have been compared with synchronous ones."""


class HostCopies:
    """Copies in one piece of memory, which is taken by the first save and kept for the next ones.

    On CUDA it is page-locked, so that a device copies into it at full speed and by itself. It is
    ordinary memory, registered with the driver: torch's pinned allocator rounds each tensor up to
    a power of two, which takes a third more for a whole model than
    `ftkit.planning.memory` counts.
    """

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._is_registered = False
        self._stream: Any = None
        self._done: Any = None
        """Event of the device after the newest copies; None: the host has waited for them."""
        self._sources: list[Piece] = []
        """Of copies that no update waits for yet; their memory must not be given to others."""
        self.refusal: str | None = None
        """Why the memory is not page-locked, if it should be."""

    @property
    def size_bytes(self) -> int:
        """Of the memory that is held."""
        return 0 if self._memory is None else self._memory.nbytes

    def take(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Copy pieces; what they show may change once `before_update` has returned.

        The copies hold until the next call. They may be read once `wait` has returned.
        """
        pieces = list(pieces)
        _synchronize()  # the host itself copies paged state, which the device may be writing
        tensors = [t for piece in pieces for t in (piece.values, piece.scales) if t is not None]
        copies = iter(self._places(tensors))
        if not ((device := accelerator_in_use()) and COPIES_BESIDE_TRAINING):
            copied = [_copied(piece, copies) for piece in pieces]
            _synchronize()
            return copied
        self._stream = self._stream or torch.Stream(device)
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            copied = [_copied(piece, copies) for piece in pieces]
            self._done = torch.Event(device)
            self._done.record(self._stream)
        self._sources = pieces
        return copied

    def settle(self) -> None:
        """Until the device has computed all that it was asked to."""
        _synchronize()

    def wait(self) -> None:
        """Until the copies are complete; in any thread."""
        if (done := self._done) is not None:
            done.synchronize()

    def before_update(self) -> None:
        """Have the device update nothing before it has copied; the host goes on."""
        if self._sources:
            torch.accelerator.current_stream().wait_event(self._done)
            self._sources = []

    def release(self) -> None:
        """Give the memory back; nobody reads it any more."""
        self.wait()
        if self._is_registered:
            assert self._memory is not None
            _runtime().cudaHostUnregister(self._memory.data_ptr())
        self._memory, self._is_registered = None, False
        self._done, self._sources = None, []

    def _places(self, tensors: list[Tensor]) -> list[Tensor]:
        """For each tensor a place of its shape and format in the memory."""
        size_bytes = sum(tensor.nbytes for tensor in tensors)
        if size_bytes != self.size_bytes:
            self.release()
            self._take_memory(size_bytes)
        places: list[Tensor] = [torch.empty(0)] * len(tensors)
        start = 0
        # Those with wide numbers first: then each one begins at a multiple of its width.
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
        pages = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory = torch.frombuffer(pages, dtype=torch.uint8)
        device = accelerator_in_use()
        if device is not None and device_kind(device.type).registers_host_memory:
            self.refusal = _register(self._memory, device)
            self._is_registered = self.refusal is None


def _copied(piece: Piece, places: Any) -> Piece:
    """The piece with its numbers in the next places."""
    values = next(places).copy_(piece.values, non_blocking=True)
    if piece.scales is None:
        return dataclasses.replace(piece, values=values)
    scales = next(places).copy_(piece.scales, non_blocking=True)
    return dataclasses.replace(piece, values=values, scales=scales)


def copied_to_host(piece: Piece) -> Piece:
    """The piece where a file can be written from; nothing may change it meanwhile."""
    _synchronize()
    scales = piece.scales
    return dataclasses.replace(
        piece,
        values=piece.values.cpu().contiguous(),
        scales=None if scales is None else scales.cpu().contiguous(),
    )


def _synchronize() -> None:
    if accelerator_in_use() is not None:
        torch.accelerator.synchronize()


def _runtime() -> Any:
    """The library of CUDA (or HIP) under torch, for what torch itself does not offer."""
    return torch.cuda.cudart()


def _register(memory: Tensor, device: torch.device) -> str | None:
    """Page-lock memory; why not, if it cannot be."""
    runtime = _runtime()
    code = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(code) == 0:
        return None
    # CUDA keeps the error for whoever asks next, and torch asks after each kernel: after this one.
    with suppress(RuntimeError):
        torch.zeros(1, device=device)
    return str(runtime.cudaGetErrorString(code))
