"""The memory prediction of a plan, before anything is loaded."""

import math
from dataclasses import dataclass, field
from typing import Any

from ftkit.config.plan import Plan
from ftkit.config.recipe import LoraRecipe
from ftkit.config.strategies import FsdpOptions
from ftkit.memory import gpus
from ftkit.memory.simulate import CPU, Peaks, Simulation, simulate
from ftkit.memory.tracker import CATEGORIES, Category
from ftkit.memory.zero import with_zero
from ftkit.optim.optimizers import optimizer_of
from ftkit.optim.state_kinds import bytes_per_number, state_kinds
from ftkit.pretrained.base_model import BaseModel
from ftkit.pretrained.blueprint import read_blueprint
from ftkit.report.step_memory import Breakdown, MicroBatchSize, PredictedStep, RankStepMemory
from ftkit.strategies.precision import parameter_dtype

PROCESS_BYTES = int(1.2 * 2**30)
"""Host memory of a rank with its libraries and no model, roughly."""


@dataclass(frozen=True, kw_only=True)
class PredictedMemory:
    """What a rank will need."""

    peak_bytes: int
    """Tensors on the device at the highest moment of a step. On CPUs, that is host memory."""
    breakdown_bytes: dict[Category, int]
    """The same by category."""
    moment: str
    """Where in a step that is."""
    host_bytes: int
    """Host memory of the rank's process, with what is offloaded and the copy of a save."""
    reserved_bytes: int
    """What torch will take from the device for these tensors, most likely."""
    low_bytes: int
    """The device memory that it needs at least, everything counted."""
    high_bytes: int
    """The device memory that it needs at most."""
    checkpoint_bytes: int
    """Of one checkpoint, over all ranks."""
    parameters: int = 0
    """Numbers in the model."""
    trained_parameters: int = 0
    """Numbers that are trained."""
    offloaded_bytes: dict[Category, int] = field(default_factory=dict)
    """Part of host_bytes: what would be on the device otherwise."""

    @property
    def without_batch_bytes(self) -> int:
        """A part of low_bytes that is needed whatever the micro-batch."""
        of_batch: tuple[Category, ...] = ("gradients", "activations", "temporaries", "unattributed")
        return self.low_bytes - sum(self.breakdown_bytes[category] for category in of_batch)

    def fits(self, memory_bytes: int) -> bool | None:
        """Whether a device of this size is enough; None: it is too close to say."""
        if self.high_bytes <= memory_bytes:
            return True
        return False if self.low_bytes > memory_bytes else None


def predict(
    base: BaseModel, plan: Plan, batch: MicroBatchSize, *, accumulates: bool | None = None
) -> PredictedMemory:
    """The memory of a plan's ranks.

    Args:
        base: whose architecture is trained; its weights are not read.
        plan: how.
        batch: the largest micro-batch.
        accumulates: whether it adds to gradients of others before it; None: where there are any.
    """
    accumulates = plan.micro_steps > 1 if accumulates is None else accumulates
    simulation = simulate(base, plan, batch, accumulates=accumulates)
    peaks, offloaded = _on_device(simulation, plan)
    if plan.accelerator == "cpu":  # there is one kind of memory
        moment = max(peaks, key=lambda name: peaks[name].total_bytes)
        breakdown = {c: peaks[moment].bytes[c] + offloaded.get(c, 0) for c in CATEGORIES}
        offloaded = {}
    else:
        moment = max(peaks, key=lambda name: peaks[name].total_bytes)
        breakdown = dict(peaks[moment].bytes)
        breakdown["temporaries"] += gpus.WORKSPACE_BYTES
    peak_bytes = sum(breakdown.values())
    number_bytes = _number_bytes(plan)
    trained = simulation.sizes.trained
    saved_bytes = round(trained * number_bytes)
    host_bytes = PROCESS_BYTES + sum(offloaded.values())
    if plan.recipe.checkpoint.save and plan.recipe.checkpoint.asynchronous:
        host_bytes += math.ceil(saved_bytes / plan.world_size)
    if plan.accelerator == "cpu":
        low, reserved, high = (peak_bytes + host_bytes,) * 3
        host_bytes += peak_bytes
        reserved = peak_bytes
    else:
        low, reserved, high = _device_bytes(peak_bytes, plan)
    if isinstance(plan.recipe, LoraRecipe):
        saved_bytes += trained * parameter_dtype(plan).itemsize  # the adapter beside the shards
    return PredictedMemory(
        peak_bytes=peak_bytes,
        breakdown_bytes=breakdown,
        moment=moment,
        host_bytes=host_bytes,
        reserved_bytes=reserved,
        low_bytes=low,
        high_bytes=high,
        checkpoint_bytes=saved_bytes,
        parameters=simulation.sizes.parameters,
        trained_parameters=trained,
        offloaded_bytes=offloaded,
    )


def predict_measured(base: str, plan: Plan, measured: RankStepMemory) -> PredictedStep | None:
    """The step that a rank has measured, as it would have been predicted.

    Args:
        base: the base model: a directory, or random:NAME.
        plan: what was run.
        measured: tells which micro-step needed most, and the size of its micro-batch.
    """
    if measured.micro_batch is None or measured.micro_step is None:
        return None
    accumulates = measured.micro_step > 1
    memory = predict(read_blueprint(base), plan, measured.micro_batch, accumulates=accumulates)
    return PredictedStep(
        peak_bytes=memory.peak_bytes,
        peak_breakdown_bytes=Breakdown(**memory.breakdown_bytes),
        error_fraction=memory.peak_bytes / measured.peak_bytes - 1,
    )


def _on_device(simulation: Simulation, plan: Plan) -> tuple[Peaks, dict[Category, int]]:
    """The stretches of a step on the device, and what is in host memory instead."""
    if plan.strategy == "deepspeed":
        peaks, host = with_zero(simulation, plan)
        return peaks, host.bytes
    if plan.accelerator == "cpu":
        return simulation.peaks, {}
    kinds: list[Category] = []
    if isinstance(plan.options, FsdpOptions) and plan.options.cpu_offload:
        kinds = ["parameters", "gradients", "optimizer_state"]
    elif plan.recipe.optimizer["class_path"].rpartition(".")[2].startswith("Paged"):
        kinds = ["optimizer_state"]  # the driver moves it to the host when it is short
    if not kinds:
        return simulation.peaks, {}
    offloaded = {
        kind: max(peak.bytes[kind] for peak in simulation.peaks.values()) for kind in kinds
    }
    if "parameters" in kinds:  # page-locked, unlike the state of an optimizer
        offloaded["parameters"] = max(offloaded["parameters"], simulation.sizes.pinned_bytes)
        trained_bytes = simulation.sizes.pinned_trained_bytes
        offloaded["gradients"] = max(offloaded["gradients"], trained_bytes)
    peaks = {
        name: type(peak)({k: 0 if k in kinds else v for k, v in peak.bytes.items()})
        for name, peak in simulation.peaks.items()
    }
    return peaks, offloaded


def _device_bytes(peak_bytes: int, plan: Plan) -> tuple[int, int, int]:
    """What a rank needs of its device at least, reserves most likely, and needs at most."""
    beside = gpus.CONTEXT_BYTES
    if plan.world_size > 1:
        beside += gpus.COMMUNICATION_BYTES
    least, most = gpus.FRAGMENTATION_RANGE
    error = gpus.TENSOR_ERROR
    return (
        round(peak_bytes * (1 - error) * (1 + least)) + beside,
        round(peak_bytes * (1 + gpus.FRAGMENTATION)),
        round(peak_bytes * (1 + error) * (1 + most)) + beside,
    )


def _number_bytes(plan: Plan) -> float:
    """What a checkpoint needs for each trained number."""
    import torch

    optimizer_class, arguments = optimizer_of(plan)
    kinds: Any = state_kinds(optimizer_class, arguments, CPU)
    masters = torch.float32 if plan.strategy == "deepspeed" else parameter_dtype(plan)
    return bytes_per_number(kinds, optimizer_class, arguments, masters)
