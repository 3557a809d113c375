"""The memory prediction of a plan, before anything is loaded."""

import math
from dataclasses import dataclass, field

from ftkit.config.checks import has_liger
from ftkit.config.plan import Plan
from ftkit.config.recipe import LoraRecipe, Recipe
from ftkit.memory import gpus
from ftkit.memory.simulate import CPU, simulate
from ftkit.optim.state_kinds import bytes_per_number, state_kinds
from ftkit.pretrained.base_model import BaseModel
from ftkit.pretrained.blueprint import read_blueprint
from ftkit.report.step_memory import (
    CATEGORIES,
    Breakdown,
    Category,
    MicroBatchSize,
    PredictedStep,
    RankStepMemory,
)
from ftkit.strategies.precision import parameter_dtype, updated_dtype
from ftkit.strategies.select import make_strategy
from ftkit.strategies.strategy import Strategy

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
    is_more_because: str = ""
    """Why a run will need rather less than all this; empty: there is no such reason."""
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
    accumulates = plan.accumulates if accumulates is None else accumulates
    simulation = simulate(base, plan, batch, accumulates=accumulates)
    strategy = make_strategy(plan)
    found = strategy.on_device(simulation)
    peaks, offloaded = found.peaks, dict(found.host)
    if simulation.hosted_bytes:
        offloaded["activations"] = simulation.hosted_bytes
    moment = max(peaks, key=lambda name: peaks[name].total_bytes)
    if plan.accelerator == "cpu":  # there is one kind of memory
        breakdown = {c: peaks[moment].bytes[c] + offloaded.get(c, 0) for c in CATEGORIES}
        offloaded = {}
    else:
        breakdown = dict(peaks[moment].bytes)
        breakdown["temporaries"] += gpus.WORKSPACE_BYTES
    peak_bytes = sum(breakdown.values())
    trained = simulation.sizes.trained
    number_bytes = _number_bytes(strategy, simulation.sizes.hidden / trained)
    saved_bytes = round(trained * number_bytes)
    host_bytes = PROCESS_BYTES + sum(offloaded.values())
    if plan.recipe.checkpoint.save and plan.recipe.checkpoint.asynchronous:
        staged_bytes = math.ceil(saved_bytes / plan.world_size)
        host_bytes += min(staged_bytes, plan.recipe.checkpoint.max_staged_bytes or staged_bytes)
    if plan.accelerator == "cpu":
        host_bytes += peak_bytes
        low = high = host_bytes
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
        is_more_because=_is_more_because(plan.recipe),
        offloaded_bytes=offloaded,
    )


def _is_more_because(recipe: Recipe) -> str:
    """What of a recipe saves memory and is not simulated."""
    reasons = []
    if recipe.compile:
        reasons.append("compiled blocks keep less")
    if recipe.kernels == "liger" and not has_liger():
        reasons.append("Liger-Kernel is not installed here, and torch's kernels need more")
    return "; ".join(reasons)


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
    model = read_blueprint(base, plan.recipe.implementation)
    memory = predict(model, plan, measured.micro_batch, accumulates=accumulates)
    return PredictedStep(
        peak_bytes=memory.peak_bytes,
        peak_breakdown_bytes=Breakdown(**memory.breakdown_bytes),
        error_fraction=memory.peak_bytes / measured.peak_bytes - 1,
    )


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


def _number_bytes(strategy: Strategy, hidden_fraction: float) -> float:
    """What a checkpoint needs for each trained number."""
    optimizer_class, arguments = strategy.optimizer_of()
    kinds = state_kinds(optimizer_class, arguments, CPU)
    dtype = updated_dtype(strategy.plan)
    of_state = bytes_per_number(kinds, optimizer_class, arguments, dtype, hidden_fraction)
    return of_state + strategy.average_bytes
