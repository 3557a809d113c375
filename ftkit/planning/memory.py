"""The memory prediction of a plan, before anything is loaded."""

import dataclasses
import math
from dataclasses import dataclass, field

from ftkit.models.bodies.attention import attention_path
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.models.pretrained.blueprint import read_blueprint
from ftkit.planning import gpus
from ftkit.planning.simulate import CPU, largest_micro_batch, simulate
from ftkit.recipe.checks import has_liger
from ftkit.recipe.plan import Plan
from ftkit.recipe.recipe import LoraRecipe, Recipe
from ftkit.strategies.optim.state_kinds import bytes_per_number, state_kinds
from ftkit.strategies.precision import parameter_dtype, updated_dtype
from ftkit.strategies.select import make_strategy
from ftkit.strategies.step_memory import (
    CATEGORIES,
    Breakdown,
    Category,
    HeaviestStep,
    MicroBatchSize,
    PredictedStep,
    StepMemory,
)
from ftkit.strategies.strategy import Strategy
from ftkit.utils.accelerators.kinds import HOST_KIND

PROCESS_BYTES = int(1.2 * 2**30)
"""Host memory of a rank with its libraries and no model, roughly."""
CPU_PROCESS_BYTES = int(0.5 * 2**30)
"""The same of a rank that computes on CPUs, without CUDA's libraries."""
HOST_ERROR = 0.05
"""Of the bytes in tensors in host memory: pages that nothing has written to take none."""


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
    host_low_bytes: int
    """What of it is needed at least, whatever the micro-batch, beside a GPU."""
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

    def fits(self, device: gpus.Gpu, low_bytes: int) -> bool | None:
        """Whether a device and the host memory beside it are enough; None: it is too close to say.

        What fits with the help of swap alone is too close: it is killed only where that is full.

        Args:
            device: what each rank has.
            low_bytes: the device memory that is needed at least.
        """
        host_bytes = device.host_bytes
        if low_bytes > device.memory_bytes + device.swap_bytes:
            return False
        if host_bytes is not None and self.host_low_bytes > host_bytes:
            return False
        is_enough = host_bytes is None or self.host_bytes <= host_bytes
        return True if is_enough and self.high_bytes <= device.memory_bytes else None


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
    if plan.accelerator == HOST_KIND:  # there is one kind of memory
        breakdown = {c: peaks[moment].bytes[c] + offloaded.get(c, 0) for c in CATEGORIES}
        offloaded = {}
    else:
        breakdown = dict(peaks[moment].bytes)
        breakdown["temporaries"] += gpus.WORKSPACE_BYTES
    peak_bytes = sum(breakdown.values())
    trained = simulation.sizes.trained
    number_bytes = _number_bytes(strategy, simulation.sizes.hidden / trained)
    saved_bytes = round(trained * number_bytes)
    on_cpu = plan.accelerator == HOST_KIND
    process_bytes = CPU_PROCESS_BYTES if on_cpu else PROCESS_BYTES
    host_bytes = process_bytes + sum(offloaded.values())
    if plan.recipe.checkpoint.save and plan.recipe.checkpoint.asynchronous:
        staged_bytes = math.ceil(saved_bytes / plan.world_size)
        host_bytes += min(staged_bytes, plan.recipe.checkpoint.max_staged_bytes or staged_bytes)
    if on_cpu:
        low, reserved = round(peak_bytes * (1 - HOST_ERROR)), peak_bytes
        high = host_bytes + round(peak_bytes * (1 + HOST_ERROR))
        host_bytes += peak_bytes
    else:
        low, reserved, high = _device_bytes(peak_bytes, plan)
    if isinstance(plan.recipe, LoraRecipe):
        saved_bytes += trained * parameter_dtype(plan).itemsize  # the adapter beside the shards
    return PredictedMemory(
        peak_bytes=peak_bytes,
        breakdown_bytes=breakdown,
        moment=moment,
        host_bytes=host_bytes,
        host_low_bytes=round(_kept_in_host_bytes(plan, offloaded) * (1 - HOST_ERROR)),
        reserved_bytes=reserved,
        low_bytes=low,
        high_bytes=high,
        checkpoint_bytes=saved_bytes,
        parameters=simulation.sizes.parameters,
        trained_parameters=trained,
        is_more_because=_is_more_because(plan.recipe),
        offloaded_bytes=offloaded,
    )


def _kept_in_host_bytes(plan: Plan, offloaded: dict[Category, int]) -> int:
    """What is in host memory for certain; the driver moves a paged state there when it must."""
    kept: list[Category] = ["parameters", "gradients"]
    if not plan.recipe.optimizer["class_path"].rpartition(".")[2].startswith("Paged"):
        kept.append("optimizer_state")
    return sum(offloaded.get(category, 0) for category in kept)


def _is_more_because(recipe: Recipe) -> str:
    """What of a recipe saves memory and is not simulated."""
    reasons = []
    if recipe.compile:
        reasons.append("compiled blocks keep less")
    if recipe.kernels == "liger" and not has_liger():
        reasons.append("Liger-Kernel is not installed here, and torch's kernels need more")
    return "; ".join(reasons)


def heaviest_micro_batch(base: BaseModel, plan: Plan, tokens: int) -> MicroBatchSize:
    """What no micro-batch of a plan exceeds.

    Args:
        base: whose attention takes it.
        plan: how it is trained.
        tokens: of the longest sample.
    """
    return largest_micro_batch(
        plan.micro_batch_size,
        tokens,
        padding_free=attention_path(base.architecture.attention, plan) != "padded",
        most_tokens=plan.micro_batch_tokens,
    )


def predict_measured(
    base: str, plan: Plan, measured: StepMemory, longest_sample_tokens: int
) -> StepMemory:
    """What a run has measured on rank 0, beside what is predicted of it.

    Predicted are the measured step, whose micro-batch is known now, and the heaviest step that
    there can be, which `ftkit plan` predicts beforehand.

    Args:
        base: the base model: a directory, or random:NAME.
        plan: what was run.
        measured: tells which micro-step needed most, and the size of its micro-batch.
        longest_sample_tokens: of all samples to train on and to validate on.
    """
    first = measured.ranks[0]
    model = read_blueprint(base, plan.recipe.implementation)
    batch = heaviest_micro_batch(model, plan, longest_sample_tokens)
    memory = predict(model, plan, batch)
    heaviest = HeaviestStep(
        peak_bytes=memory.peak_bytes,
        peak_breakdown_bytes=Breakdown(**memory.breakdown_bytes),
        micro_batch=batch,
    )
    predicted = None
    if first.micro_batch is not None and first.micro_step is not None:
        accumulates = first.micro_step > 1
        if (first.micro_batch, accumulates) != (batch, plan.accumulates):
            memory = predict(model, plan, first.micro_batch, accumulates=accumulates)
        predicted = PredictedStep(
            peak_bytes=memory.peak_bytes,
            peak_breakdown_bytes=Breakdown(**memory.breakdown_bytes),
            error_fraction=memory.peak_bytes / first.peak_bytes - 1,
        )
    return dataclasses.replace(measured, predicted=predicted, heaviest=heaviest)


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
