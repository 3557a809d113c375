"""The memory tracker: which tensors are alive, by category, at every moment of a step.

Works on real tensors and on fake ones (`torch._subclasses.FakeTensorMode`), so that what is
measured in a run and what is predicted before it are counted by the same code:

    live = LiveTensors(torch.device("cpu"))
    live.assign(model.parameters(), "parameters")
    with live:                      # the storages of all operations are followed from here on
        live.restart()              # the step begins
        live.begin_forward()
        loss = model(batch)
        live.end_forward()
        loss.backward()
        live.assign((p.grad for p in model.parameters()), "gradients")
        optimizer.step()
    live.peak().bytes["activations"]

A storage counts once, however many tensors look at it. One that an operation makes is temporary,
unless it turns out to be something else: it is assigned, such as a gradient after the backward
pass, or it was made in a forward pass and is alive when the pass ends, which makes it an
activation. It then counts as such from the beginning. This may be known only after the peak, so
the changes are kept, and `stretches` replays them.
"""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from ftkit.strategies.step_memory import CATEGORIES, Category, Snapshot
from ftkit.utils.imports import dtensor

_PLAIN = {Tensor, torch.nn.Parameter}
"""Types of tensors that surely have memory of their own, and one piece of it."""


@dataclass(frozen=True)
class Stretch:
    """Part of a step: from one mark to the next, or to the end."""

    name: str
    """Name of the mark where it begins; empty before the first mark."""
    start: Snapshot
    """When it begins."""
    peak: Snapshot
    """Its moment with the most bytes alive; the first, if there are several."""


class _Storage:
    """A storage that is, or was, alive."""

    __slots__ = ("born", "category", "nbytes", "reference", "size_bytes", "turned_out")

    def __init__(self, born: int) -> None:
        self.nbytes = 0
        """Size as torch gives it; `size_bytes` is the memory that the allocator takes for it."""
        self.size_bytes = 0
        self.category: Category = "temporaries"
        self.turned_out: Category | None = None
        """Category that it turned out to have while it still seemed temporary."""
        self.born = born
        """Forward passes begun when it was first seen; 0: there was none."""
        self.reference: Any = None
        """Weak reference, whose callback runs when the storage is freed."""

    def as_counted(self, category: Category) -> Category:
        """Category by what is known now: temporaries may turn out to be something else."""
        return self.turned_out or category if category == "temporaries" else category


# A dispatch mode, not a pack hook of autograd, which would keep ZeRO-3's gathered weights alive.
# torch's MemTracker only follows simulations, and fixes the category of a tensor when it is made.
class LiveTensors(TorchDispatchMode):
    """Follows the storages of one device while it is entered; see the module's text.

    A storage that existed before counts from the start, once it is assigned. An input that is not
    known yet was made inside another operation: it is temporary from then on. Memory that an
    operation allocates and frees internally is not seen; storages that are freed by resizing them,
    as FSDP does, are.
    """

    def __init__(self, device: torch.device, *, granularity_bytes: int = 1) -> None:
        """Prepare.

        Args:
            device: storages of this kind of device are counted; cpu for fake tensors on cpu.
            granularity_bytes: sizes are rounded up to a multiple, as allocators do (CUDA's: 512).
        """
        super().__init__()
        self._device = device.type
        self._granularity_bytes = granularity_bytes
        self._alive: dict[int, _Storage] = {}
        self._changes: list[tuple[_Storage, int, Category, int, Category]] = []
        """Storage; bytes and category before; the same after."""
        self._changes_before = 0
        """Number of changes that only describe what was alive at the start."""
        self.total_bytes = 0
        """Bytes alive, over all categories."""
        self._marks: list[tuple[int, str]] = []
        """Start of each stretch of the step, as a number of changes, and its name."""
        self._forward_passes = 0
        self._resize: Any = None

    def __enter__(self) -> Self:
        self._resize = resize = torch.UntypedStorage.resize_

        def resize_and_count(storage: torch.UntypedStorage, size: int) -> Any:
            known = self._alive.get(storage._cdata)
            if known is None and storage.device.type == self._device:
                # Older than this context: it counts from the start, with the size that it had.
                known = self._enter(storage, "temporaries", is_new=False)
            result = resize(storage, size)
            if known is not None:
                self._change(known, storage, known.category)
            return result

        # FSDP frees a gathered parameter by resizing its storage to 0, which is no operation of the
        # dispatcher.
        torch.UntypedStorage.resize_ = resize_and_count  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, trace)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if dtensor() in types:
            return NotImplemented  # its operations on local tensors come here again
        if func is torch.ops.prim.device.default:  # most calls on fake tensors, and no operation
            return args[0].device
        kwargs = kwargs or {}
        self._see_all(args)
        self._see_all(kwargs.values())
        result = func(*args, **kwargs)
        self._see_all((result,))
        return result

    def assign(
        self, tensors: Iterable[Tensor | None], category: Category, *, from_now: bool = False
    ) -> None:
        """Set the category of tensors until they are freed.

        Args:
            tensors: also sharded ones, of which the part in this process counts; None is skipped.
            category: of these tensors.
            from_now: whether those that are not known yet came only now, as from another thread;
                else they were there from the start.
        """
        for storage in self._storages(tensors):
            known = self._alive.get(storage._cdata)
            if known is None:
                self._enter(storage, category, is_new=from_now)
            else:
                if known.category == "temporaries":
                    known.turned_out = category
                self._change(known, storage, category)

    def assign_unknown(self, tensors: Iterable[Tensor]) -> None:
        """Add all other tensors that exist; those that are not followed yet are unattributed.

        Memory that torch has not allocated is not counted, as no allocator counts it: files that
        are mapped, and the host's copy of a checkpoint.
        """
        for storage in self._storages(tensors):
            # resizable() only holds for memory that torch has allocated itself.
            if storage._cdata not in self._alive and storage.nbytes() and storage.resizable():
                self._enter(storage, "unattributed", is_new=False)

    def restart(self) -> None:
        """Forget the history: `stretches` and `peak` begin with what is alive now."""
        # What is alive becomes the first changes, from nothing to its size: the history starts
        # there.
        self._changes = [
            (storage, 0, storage.category, storage.size_bytes, storage.category)
            for storage in list(self._alive.values())
        ]
        self._changes_before = len(self._changes)
        self._marks.clear()
        self._forward_passes = 0
        for storage, *_ in self._changes:
            # No forward pass of the step that begins now has made it.
            storage.born = 0

    def begin_forward(self) -> None:
        """Begin a forward pass: tensors that it makes and leaves alive are activations."""
        self._forward_passes += 1

    def end_forward(self, gathered: Iterable[Tensor] = ()) -> None:
        """End the forward pass.

        Args:
            gathered: parameters in the form that the forward pass needed; what they hold for it
                stays temporary.
        """
        # FSDP and ZeRO-3 gather parameters in the pass: alive at its end, but no activations.
        spared = {storage._cdata for storage in self._storages(gathered)}
        # A copy, and not of pairs: making those may collect garbage, and tensors with it.
        for key, storage in self._alive.copy().items():
            made_in_it = storage.born == self._forward_passes and storage.size_bytes > 0
            if made_in_it and storage.category == "temporaries" and key not in spared:
                storage.turned_out = "activations"

    def now(self) -> Snapshot:
        """Bytes alive by category, as far as they are known."""
        found = dict.fromkeys(CATEGORIES, 0)
        for storage in list(self._alive.values()):
            found[storage.as_counted(storage.category)] += storage.size_bytes
        return Snapshot(found)

    def mark(self, name: str) -> None:
        """Begin a stretch of the step."""
        self._marks.append((len(self._changes) - self._changes_before, name))

    def stretches(self) -> list[Stretch]:
        """Stretches since `restart`, in the order of the marks, as far as they are known."""
        now = dict.fromkeys(CATEGORIES, 0)
        total = 0

        def follow(first: int, last: int) -> Snapshot:
            nonlocal total
            top_total, top = total, dict(now)
            # Categories as they are known now: what turned out later to be an activation was one
            # all along.
            for storage, size_before, before, size_after, after in self._changes[first:last]:
                now[storage.as_counted(before)] -= size_before
                now[storage.as_counted(after)] += size_after
                total += size_after - size_before
                if total > top_total:
                    top_total, top = total, dict(now)
            return Snapshot(top)

        # Up to the state at the start, which belongs to no stretch.
        follow(0, self._changes_before)
        found = []
        end = (len(self._changes) - self._changes_before, "")
        for (first, name), (last, _) in pairwise([(0, ""), *self._marks, end]):
            start = Snapshot(dict(now))
            peak = follow(self._changes_before + first, self._changes_before + last)
            found.append(Stretch(name, start, peak))
        return found

    def peak(self) -> Snapshot:
        """The highest moment of all stretches."""
        return highest(self.stretches()).peak

    def _storages(self, tensors: Iterable[Tensor | None]) -> Iterator[torch.UntypedStorage]:
        """The memory of tensors, as far as it is on the device."""
        for whole in tensors:
            for tensor in () if whole is None else _plain(whole):
                if tensor.device.type == self._device:
                    yield tensor.untyped_storage()

    def _see_all(self, values: Iterable[Any]) -> None:
        """Count the tensors that an operation has taken or made: single ones, or lists of them."""
        for value in values:
            if isinstance(value, Tensor):
                self._see(value)
            elif isinstance(value, list | tuple):
                self._see_all(value)

    def _see(self, tensor: Tensor) -> None:
        """Follow a tensor; called tens of thousands of times in a step, so it must be quick."""
        for part in (tensor,) if type(tensor) in _PLAIN else _plain(tensor):
            storage = part.untyped_storage()
            known = self._alive.get(storage._cdata)
            if known is not None:
                if known.nbytes != storage.nbytes():
                    self._change(known, storage, known.category)
            elif part.device.type == self._device:
                self._enter(storage, "temporaries", is_new=True)

    def _enter(
        self, storage: torch.UntypedStorage, category: Category, *, is_new: bool
    ) -> _Storage:
        """Follow a storage; one that no operation has made here existed from the start."""
        # The address in C++: a key that does not keep the storage alive.
        key = storage._cdata
        entered = self._alive[key] = _Storage(self._forward_passes if is_new else 0)

        def leave(_: Any) -> None:
            self._change(self._alive.pop(key), None, entered.category)

        entered.reference = weakref.ref(storage, leave)
        self._change(entered, storage, category)
        if not is_new and self._changes and self._changes[-1][0] is entered:
            # It was alive from the start, before any change of the step.
            self._changes.insert(self._changes_before, self._changes.pop())
            self._changes_before += 1
        return entered

    def _change(
        self, known: _Storage, storage: torch.UntypedStorage | None, category: Category
    ) -> None:
        """Record a change of a storage's size or category; None: it is freed."""
        known.nbytes = 0 if storage is None else storage.nbytes()
        # Rounded up, as the allocator does it.
        size_bytes = -(-known.nbytes // self._granularity_bytes) * self._granularity_bytes
        if (known.size_bytes, known.category) != (size_bytes, category):
            change = (known, known.size_bytes, known.category, size_bytes, category)
            self._changes.append(change)
            self.total_bytes += size_bytes - known.size_bytes
            known.size_bytes, known.category = size_bytes, category


def highest(stretches: Iterable[Stretch]) -> Stretch:
    """The one with the most bytes alive at its peak; the first, if there are several."""
    return max(stretches, key=lambda stretch: stretch.peak.total_bytes)


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory of their own that a tensor consists of in this process."""
    whole: Any = tensor
    if isinstance(tensor, dtensor()):
        yield from _plain(tensor._local_tensor)
    elif is_traceable_wrapper_subclass(whole):
        # A wrapper has no memory itself: its inner tensors do.
        for name in whole.__tensor_flatten__()[0]:
            yield from _plain(getattr(whole, name))
    else:
        yield tensor
