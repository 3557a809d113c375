"""The memory meter: categories of the memory of a step, measured in a few steps of a run."""

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.nn as nn
from torch import Tensor
from torch._subclasses import FakeTensor

from ftkit.data.records.media import MEDIA, MEDIA_OF
from ftkit.data.samples.sampler import StepOrder
from ftkit.errors import is_out_of_memory
from ftkit.models.bodies.experts import packed_in
from ftkit.models.token_numbers import TokenDropout
from ftkit.planning.media import size_of
from ftkit.planning.tracker import LiveTensors, Stretch, highest
from ftkit.strategies.distributed import rank
from ftkit.strategies.step_memory import (
    Breakdown,
    MicroBatchSize,
    RankStepMemory,
    Snapshot,
    StepMoments,
)
from ftkit.strategies.strategy import Strategy, tensors_in
from ftkit.utils.accelerators.kinds import device_kind

_STEPS_LOOKED_AT = 100
"""The step with the largest micro-batch is looked for among this many."""
SOON = 10
"""If it is among this many, no other step is measured."""

Moment = Literal["before_forward", "after_forward", "after_backward", "after_optimizer"]


def steps_to_measure(order: StepOrder) -> set[int]:
    """Steps to measure near the start of a session: the one that needs most memory, and the second.

    If the former comes soon, it is measured alone. The first step is not measured, because the
    optimizer has no state in it yet.
    """
    first, end = order.start_step, order.total_steps
    second = first + 1 if end - first > 1 else first
    near = range(second, min(first + _STEPS_LOOKED_AT, end))
    if not near:
        return set()
    if not order.sees_ahead:
        return {second}
    # The sizes of micro-batches are known from the order, before any of them is made.
    largest = max(near, key=order.largest_micro_batch)
    return {largest} if largest < first + SOON else {second, largest}


class DevicePeak:
    """The highest device memory since the start, though single steps are measured on their own."""

    def __init__(self, device: torch.device) -> None:
        self._counts = device_kind(device.type).counts_memory
        self._requested = self._allocated = self._reserved = 0

    def restart(self) -> None:
        """Start to count for `within`; the highest values so far are kept."""
        if self._counts:
            self._requested = self.requested_bytes or 0
            self._allocated, self._reserved = self.allocated_bytes or 0, self.reserved_bytes or 0
            # After the highest values so far were noted, because this forgets them.
            torch.accelerator.reset_peak_memory_stats()

    def within(self) -> int | None:
        """Highest allocated bytes since `restart`; None: they are not counted, as on CPUs."""
        return torch.accelerator.max_memory_allocated() if self._counts else None

    def now(self) -> int | None:
        """Allocated bytes; None: they are not counted."""
        return torch.accelerator.memory_allocated() if self._counts else None

    @property
    def requested_bytes(self) -> int | None:
        """Highest memory requested, before the allocator rounds it; None: not counted."""
        if not self._counts:
            return None
        stats = torch.accelerator.memory_stats()
        return max(self._requested, stats.get("requested_bytes.all.peak", 0))

    @property
    def allocated_bytes(self) -> int | None:
        """Highest memory in tensors, as torch counts it; None: not counted."""
        if not self._counts:
            return None
        return max(self._allocated, torch.accelerator.max_memory_allocated())

    @property
    def reserved_bytes(self) -> int | None:
        """Highest memory that torch took from the driver; None: not counted."""
        if not self._counts:
            return None
        return max(self._reserved, torch.accelerator.max_memory_reserved())


class MemoryMeter:
    """Follows every tensor of the chosen steps; in all others it does nothing.

    The step reports its phase to it; see `ftkit.training.step`.
    """

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        steps: Collection[int],
        device_peak: DevicePeak,
        on_measured: Callable[[RankStepMemory], None],
        *,
        beside: Sequence[nn.Module] = (),
    ) -> None:
        """Prepare.

        Args:
            strategy: knows where the tensors are; not yet set up.
            model: that is trained.
            steps: which to measure, as numbers of steps done before.
            device_peak: memory of the device, as its allocator counts it.
            on_measured: called after a step that took more than those measured before.
            beside: models that are not trained, whose parameters are counted too.
        """
        self._strategy, self._model, self._beside = strategy, model, beside
        self._steps = steps
        self._kind = device_kind(strategy.device.type)
        self._device_peak = device_peak
        self._on_measured = on_measured
        self._live = LiveTensors(
            strategy.device, granularity_bytes=self._kind.allocator_block_bytes
        )
        self._step = 0
        self._entered = False
        self._has_looked_around = False
        self._modules: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []
        self._allocated: list[int | None] = []
        """Allocated bytes at each mark."""
        self._micro_batches: list[MicroBatchSize] = []
        self._highest_bytes = 0

    def follows(self, step: int) -> bool:
        """Return whether a step, given as the number of steps done before it, is measured."""
        return step in self._steps

    def look_around(self) -> None:
        """Follow the tensors that exist, if no allocator reports the memory in use.

        Call it before `gc.freeze`, which hides objects from `gc.get_objects`.
        """
        if self._kind.counts_memory:
            return
        # Fake tensors, such as those in compiled graphs, have sizes but no memory.
        kinds = set(_with_subclasses(Tensor)) - set(_with_subclasses(FakeTensor))
        # By type(), because isinstance would run code of objects that are only half built or are
        # proxies.
        self._live.assign_unknown(item for item in gc.get_objects() if type(item) in kinds)

    def begin_step(self, step: int) -> None:
        """Begin a step, before anything of it is on the device."""
        self._step = step
        if self.follows(step):
            self._begin()

    def before_forward(self, batch: dict[str, Any]) -> None:
        """Begin a micro-step, whose batch is on the device."""
        if self._entered:
            # The batch was made before the forward pass began, but belongs to it.
            self._live.assign((v for v in batch.values() if isinstance(v, Tensor)), "activations")
            # On CPUs no operation has made these here: a thread has.
            self._live.assign(tensors_in(batch.get(MEDIA)), "activations", from_now=True)
            self._mark("before_forward")
            self._micro_batches.append(_size_of(batch))
            self._live.begin_forward()

    def before_backward(self) -> None:
        """Mark the end of a forward pass."""
        if self._entered:
            self._live.end_forward(gathered=self._strategy.gathered(self._model))
            self._mark("after_forward")

    def after_backward(self) -> None:
        """Mark the end of a backward pass."""
        if self._entered:
            self._assign_changed()
            self._mark("after_backward")
        elif self.follows(self._step + 1):
            # Buckets of gradients stay, but nothing shows them before the next backward pass.
            self._live.assign(gradients(self._model.parameters()), "gradients")

    def end_step(self) -> None:
        """Mark the update of the parameters, and end the step."""
        if self._entered:
            self._assign_changed()
            self._live.assign(parameters(self._strategy, self._modules), "parameters")
            self._mark("after_optimizer")
            self._end()
        self._step += 1

    def on_exception(self, exception: BaseException) -> None:
        """Report what is known if memory has run out: of this step, or of one measured before.

        If neither was measured, only parameters, gradients and optimizer state are known.
        """
        if is_out_of_memory(exception):
            # A step that is not followed: at least what exists now.
            if not self._entered and not self._highest_bytes:
                self._begin()
            if self._entered:
                self._assign_changed()
                # So that this step is reported, even if an earlier one took more.
                self._highest_bytes = 0
                self._end()
        elif self._entered:
            self._leave()

    def _assign_changed(self) -> None:
        """Optimizer state and gradients, which a step may create again."""
        for tensor, category in self._strategy.optimizer_memory():
            self._live.assign([tensor], category)
        self._live.assign(gradients(self._parameters), "gradients")

    def _begin(self) -> None:
        models = (self._model, *self._beside)
        self._modules = [module for each in models for module in each.modules()]
        self._parameters = list(self._model.parameters())
        self._assign_changed()
        self._live.assign(parameters(self._strategy, self._modules), "parameters")
        if not self._has_looked_around:
            self.look_around()
            self._has_looked_around = True  # what it found is followed from here on
        self._allocated.clear()
        self._micro_batches.clear()
        self._device_peak.restart()
        self._live.restart()
        # Not a with block: it begins and ends in calls from different places of the step.
        self._live.__enter__()
        self._entered = True

    def _mark(self, moment: Moment) -> None:
        self._live.mark(moment)
        self._allocated.append(self._device_peak.now())

    def _end(self) -> None:
        stretches = self._live.stretches()
        self._leave()
        peak = _with_allocated(highest(stretches).peak, self._device_peak.within())
        # Only the measured step that needed most is reported.
        if peak.total_bytes <= self._highest_bytes:
            return
        self._highest_bytes = peak.total_bytes
        moments: dict[str, Snapshot] = {}
        marked = zip(stretches[1:], self._allocated, strict=True)  # what is before has no mark
        for stretch, allocated_bytes in marked:
            # A step of several micro-steps passes each moment several times: the highest one
            # counts.
            known = moments.get(stretch.name)
            if known is None or stretch.start.total_bytes > known.total_bytes:
                moments[stretch.name] = _with_allocated(stretch.start, allocated_bytes)
        micro_step = _fullest_micro_step(stretches)
        self._on_measured(
            RankStepMemory(
                rank=rank(),
                step=self._step + 1,
                peak_bytes=peak.total_bytes,
                peak_breakdown_bytes=Breakdown(**peak.bytes),
                moments_bytes=StepMoments(
                    **{name: Breakdown(**moment.bytes) for name, moment in moments.items()}
                ),
                micro_step=micro_step,
                micro_batch=self._micro_batches[micro_step - 1] if micro_step else None,
            )
        )

    def _leave(self) -> None:
        self._live.__exit__(None, None, None)
        # The history of a step is long: free it.
        self._live.restart()
        self._entered = False


def _size_of(batch: dict[str, Any]) -> MicroBatchSize:
    lines, positions = batch["input_ids"].shape
    targets, lengths = len(batch["labels"]), batch["sequence_lengths"]
    weighted = "weights" in batch
    media = size_of(batch[MEDIA_OF], batch["lengths"]) if MEDIA_OF in batch else None
    # Padded: one line for each sequence.
    if lengths is None:
        return MicroBatchSize(
            sequences=lines,
            positions=positions,
            targets=targets,
            weighted=weighted,
            media=media,
        )
    return MicroBatchSize(
        sequences=len(lengths),
        positions=max(lengths),
        targets=targets,
        tokens=positions,
        pieces=sum(lengths) // positions,
        weighted=weighted,
        media=media,
    )


def _fullest_micro_step(stretches: Iterable[Stretch]) -> int | None:
    """Number of the micro-step with the highest peak, counted from 1; None: none was started."""
    found, micro_step, most_bytes = None, 0, 0
    for stretch in stretches:
        # Every micro-step begins with this mark.
        micro_step += stretch.name == "before_forward"
        in_pass = stretch.name in ("before_forward", "after_forward")
        if in_pass and stretch.peak.total_bytes > most_bytes:
            found, most_bytes = micro_step, stretch.peak.total_bytes
    return found


def _with_subclasses(kind: type[Tensor]) -> Iterator[type[Tensor]]:
    yield kind
    below: list[type[Tensor]] = kind.__subclasses__()
    for each in below:
        yield from _with_subclasses(each)


def _with_allocated(found: Snapshot, allocated_bytes: int | None) -> Snapshot:
    """Add allocated bytes that belong to no known tensor, as unattributed."""
    if allocated_bytes is None:
        return found
    # Workspaces of libraries, for example, are no tensors that an operation shows.
    beyond = found.bytes["unattributed"] + allocated_bytes - found.total_bytes
    return Snapshot(found.bytes | {"unattributed": beyond})


def parameters(strategy: Strategy, modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Weights, buffers, quantization scales and numbers of channels of modules."""
    for module in modules:
        for parameter in module.parameters(recurse=False):
            yield from strategy.parameter_memory(parameter)
        yield from module.buffers(recurse=False)
        if hasattr(module, "unpacked"):  # a quantised layer, whose scales are not parameters
            yield from tensors_in(vars(module))
        if isinstance(module, TokenDropout):
            yield module.channels
        for matrices in packed_in(module).values():
            yield from tensors_in(vars(matrices))


def gradients(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Gradients that parameters hold."""
    for parameter in parameters:
        if parameter.grad is not None:
            yield parameter.grad
