"""The memory prediction of a plan, before anything is loaded."""

import dataclasses
import math
from dataclasses import dataclass, field

from ftkit.models.bodies.attention import common_path, planned_path
from ftkit.models.pretrained.base_model import BaseModel, read_blueprint
from ftkit.models.pretrained.recipe_model import base_for
from ftkit.planning import gpus
from ftkit.planning.media import waiting_bytes, with_encoder, with_media
from ftkit.planning.simulate import CPU, largest_micro_batch, simulate, simulate_alone
from ftkit.recipe.kernels import has_liger
from ftkit.recipe.objectives import model_beside, objective_rules
from ftkit.recipe.optimizers import is_paged
from ftkit.recipe.plan import Plan
from ftkit.recipe.recipe import Kernels, LoraRecipe
from ftkit.strategies.optimizers import MuonWithAdamW
from ftkit.strategies.state import bytes_per_number
from ftkit.strategies.step_memory import (
    CATEGORIES,
    Breakdown,
    Category,
    HeaviestStep,
    MediaSize,
    MicroBatchSize,
    PredictedStep,
    Sizes,
    StepMemory,
)
from ftkit.strategies.strategy import Strategy, make_strategy, parameter_dtype, updated_dtype
from ftkit.utils.accelerators.kinds import HOST_KIND

_PROCESS_BYTES = int(1.2 * 2**30)
"""Host memory of a rank with its libraries and no model, roughly."""
_CPU_PROCESS_BYTES = int(0.5 * 2**30)
"""Host memory of a rank that computes on CPUs, without CUDA's libraries, roughly."""
_HOST_ERROR = 0.05
"""Relative error of tensor bytes in host memory: pages that were never written take none."""


@dataclass(frozen=True, kw_only=True)
class PredictedMemory:
    """Predicted memory of a rank."""

    peak_bytes: int
    """Tensors on the device at the highest moment of a step. On CPUs, that is host memory."""
    breakdown_bytes: dict[Category, int]
    """`peak_bytes` by category."""
    moment: str
    """Moment of a step at which the peak occurs."""
    host_bytes: int
    """Host memory of the rank's process, with what is offloaded, the copy of a save, and media that
    are read ahead."""
    host_low_bytes: int
    """Least part of `host_bytes` that is needed beside a GPU, whatever the micro-batch."""
    reserved_bytes: int
    """Memory that torch will most likely reserve on the device for these tensors."""
    low_bytes: int
    """The device memory that it needs at least, everything counted."""
    high_bytes: int
    """The device memory that it needs at most."""
    checkpoint_bytes: int
    """Bytes of one checkpoint, over all ranks."""
    parameters: int = 0
    """Numbers in the model."""
    trained_parameters: int = 0
    """Numbers that are trained."""
    is_more_because: str = ""
    """Why a run will need less than predicted; empty: no known reason."""
    offloaded_bytes: dict[Category, int] = field(default_factory=dict)
    """Part of host_bytes: what would be on the device otherwise."""

    @property
    def without_batch_bytes(self) -> int:
        """A part of low_bytes that is needed whatever the micro-batch."""
        of_batch: tuple[Category, ...] = ("gradients", "activations", "temporaries", "unattributed")
        return self.low_bytes - sum(self.breakdown_bytes[category] for category in of_batch)

    def fits(self, device: gpus.Gpu, low_bytes: int) -> bool | None:
        """Whether a device and the host memory beside it are enough; None: too close to call.

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
    base: BaseModel,
    plan: Plan,
    batch: MicroBatchSize,
    *,
    accumulates: bool | None = None,
    beside: BaseModel | None = None,
) -> PredictedMemory:
    """The memory of a plan's ranks.

    Args:
        base: whose architecture is trained; its weights are not read.
        plan: how.
        batch: the largest micro-batch.
        accumulates: whether it adds to gradients of others before it; None: where there are any.
        beside: the frozen model that is held beside the trained one, if there is one.
    """
    records = False
    if plan.recipe.train.record_steps:
        from ftkit.recipe.recorded import why_unrecorded

        records = why_unrecorded(plan) is None
    if accumulates is None:
        # Gradients of recorded steps stay, and are there before each first micro-step.
        accumulates = plan.accumulates or records
    simulation = simulate(base, plan, batch, accumulates=accumulates, beside=beside)
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
        breakdown["temporaries"] += _workspace_bytes(plan)
    peak_bytes = sum(breakdown.values())
    trained = simulation.sizes.trained
    number_bytes = _number_bytes(strategy, simulation.sizes)
    saved_bytes = round(trained * number_bytes)
    on_cpu = plan.accelerator == HOST_KIND
    process_bytes = _CPU_PROCESS_BYTES if on_cpu else _PROCESS_BYTES
    host_bytes = process_bytes + sum(offloaded.values())
    host_bytes += waiting_bytes(base, batch, is_copied=not on_cpu)
    if plan.recipe.checkpoint.save and plan.recipe.checkpoint.asynchronous:
        staged_bytes = math.ceil(saved_bytes / plan.world_size)
        host_bytes += min(staged_bytes, plan.recipe.checkpoint.max_staged_bytes or staged_bytes)
    if on_cpu:
        low, reserved = round(peak_bytes * (1 - _HOST_ERROR)), peak_bytes
        # On CPUs tensors and the process share one memory.
        high = host_bytes + round(peak_bytes * (1 + _HOST_ERROR))
        host_bytes += peak_bytes
    else:
        low, reserved, high = _device_bytes(peak_bytes, plan)
        if records:
            # Graphs keep the memory of their passes beside that of steps which are computed. Not
            # needed at least: where it is missing, nothing is recorded.
            of_passes = max(
                peak.bytes["activations"] + peak.bytes["temporaries"] for peak in peaks.values()
            )
            reserved, high = reserved + of_passes, high + of_passes
    if isinstance(plan.recipe, LoraRecipe):
        saved_bytes += trained * parameter_dtype(plan).itemsize  # the adapter beside the shards
    return PredictedMemory(
        peak_bytes=peak_bytes,
        breakdown_bytes=breakdown,
        moment=moment,
        host_bytes=host_bytes,
        host_low_bytes=round(_kept_in_host_bytes(plan, offloaded) * (1 - _HOST_ERROR)),
        reserved_bytes=reserved,
        low_bytes=low,
        high_bytes=high,
        checkpoint_bytes=saved_bytes,
        parameters=simulation.sizes.parameters,
        trained_parameters=trained,
        is_more_because=_unsimulated_savings(
            compiles=plan.recipe.compile, kernels=plan.recipe.kernels
        ),
        offloaded_bytes=offloaded,
    )


def predict_alone(base: BaseModel, plan: Plan, tokens: int) -> tuple[int, int]:
    """Memory of each rank while a model computes log-probabilities, before there is another one.

    Args:
        base: the model; its weights are not read.
        plan: of the run.
        tokens: of the longest sample.

    Returns:
        Bytes on the device that are certainly needed, and those that may be; on CPUs, of host
        memory.
    """
    is_row = planned_path(base.architecture.attention, plan, whose=base.name) != "padded"
    least = largest_micro_batch(1, 2, padding_free=is_row, pieces=plan.mesh.context)
    # More than in training: all samples are one step, so no micro-batch is cut short.
    samples = plan.micro_batch_size if is_row else plan.padded_samples(max(1, tokens - 1))
    each = objective_rules(plan.recipe.objective).sequences
    most = largest_micro_batch(
        samples * each,
        tokens,
        each=each,
        padding_free=is_row,
        most_tokens=plan.micro_batch_tokens if is_row else None,
        pieces=plan.mesh.context,
    )

    def needed(batch: MicroBatchSize) -> tuple[int, int]:
        found = make_strategy(plan).on_device(simulate_alone(base, plan, batch))
        peak_bytes = max(peak.total_bytes for peak in found.peaks.values())
        if plan.accelerator != HOST_KIND:
            low, _, high = _device_bytes(peak_bytes + _workspace_bytes(plan), plan)
            return low, high
        peak_bytes += sum(found.host.values())
        high = _CPU_PROCESS_BYTES + round(peak_bytes * (1 + _HOST_ERROR))
        return round(peak_bytes * (1 - _HOST_ERROR)), high

    return needed(least)[0], needed(most)[1]


def _kept_in_host_bytes(plan: Plan, offloaded: dict[Category, int]) -> int:
    """Bytes that are certainly in host memory; a paged optimizer state may stay on the device."""
    kept: list[Category] = ["parameters", "gradients"]
    if not is_paged(plan.recipe.optimizer):
        kept.append("optimizer_state")
    return sum(offloaded.get(category, 0) for category in kept)


def _unsimulated_savings(*, compiles: bool, kernels: Kernels) -> str:
    """Settings that save memory and are not simulated, in words."""
    reasons = []
    if compiles:
        reasons.append("compiled blocks keep less")
    if kernels == "liger" and not has_liger():
        reasons.append(
            "no Liger-Kernel that ftkit knows is installed on this machine, and torch's kernels "
            "need more memory"
        )
    return "; ".join(reasons)


def heaviest_micro_batch(
    base: BaseModel,
    plan: Plan,
    tokens: int,
    *,
    weighted: bool = False,
    beside: BaseModel | None = None,
    media: MediaSize | None = None,
) -> MicroBatchSize:
    """Upper bound of the micro-batches of a plan.

    Args:
        base: whose attention takes it.
        plan: how it is trained.
        tokens: of the longest sample.
        weighted: whether some labels have a weight other than 1.
        beside: another model, which computes on them too.
        media: of the sample that costs most to encode; None: there are none.
    """
    path = planned_path(base.architecture.attention, plan)
    if beside is not None:
        traits = beside.architecture.attention
        path = common_path(path, planned_path(traits, plan, whose=beside.name))
    rules, is_row = objective_rules(plan.recipe.objective), path != "padded"
    samples = plan.largest_micro_batch
    if not is_row:
        samples = min(samples, plan.padded_samples(max(1, tokens - 1)))
    largest = largest_micro_batch(
        samples * rules.sequences,
        tokens,
        each=rules.sequences,
        padding_free=is_row,
        most_tokens=plan.micro_batch_tokens if is_row else None,
        pieces=plan.mesh.context,
        # Labels that only pad have a weight, 0.
        weighted=weighted or plan.kind.compiles_shapes,
        scores=rules.scores,
    )
    return with_media(largest, media, samples * rules.sequences)


def predict_measured(
    base: str,
    beside: str | None,
    plan: Plan,
    measured: StepMemory,
    longest_sample_tokens: int,
    media: MediaSize | None = None,
) -> StepMemory:
    """Memory that a run measured on rank 0, beside its prediction.

    Predicted are the measured step, whose micro-batch is known now, and the heaviest step that
    there can be, which `ftkit plan` predicts beforehand.

    Args:
        base: the base model: a directory, or random:NAME.
        beside: the same, of the frozen model beside it; None: there is none.
        plan: what was run.
        measured: has the micro-step that needed most, and the size of its micro-batch.
        longest_sample_tokens: of all samples to train on and to validate on.
        media: of that sample of them that costs most to encode; None: there are none.
    """
    first = measured.ranks[0]
    recipe = plan.recipe
    model = base_for(read_blueprint(base, recipe.implementation), recipe)
    model = with_encoder(model, plan, () if media is None else (media.kind,))
    weighted = first.micro_batch is not None and first.micro_batch.weighted
    known, other = model_beside(plan.recipe), None
    if known is not None and beside is not None:
        other = read_blueprint(beside, known.implementation)
    batch = heaviest_micro_batch(
        model, plan, longest_sample_tokens, weighted=weighted, beside=other, media=media
    )
    memory = predict(model, plan, batch, beside=other)
    heaviest = HeaviestStep(
        peak_bytes=memory.peak_bytes,
        peak_breakdown_bytes=Breakdown(**memory.breakdown_bytes),
        micro_batch=batch,
    )
    predicted = None
    if first.micro_batch is not None and first.micro_step is not None:
        accumulates = first.micro_step > 1
        # Usually the same simulation, which takes a second or more.
        if (first.micro_batch, accumulates) != (batch, plan.accumulates):
            memory = predict(model, plan, first.micro_batch, accumulates=accumulates, beside=other)
        predicted = PredictedStep(
            peak_bytes=memory.peak_bytes,
            peak_breakdown_bytes=Breakdown(**memory.breakdown_bytes),
            error_fraction=memory.peak_bytes / first.peak_bytes - 1,
        )
    return dataclasses.replace(measured, predicted=predicted, heaviest=heaviest)


def _workspace_bytes(plan: Plan) -> int:
    """Memory that libraries of products take with the tensors."""
    return 0 if plan.kind.unpredicted_memory else gpus.WORKSPACE_BYTES


def _device_bytes(peak_bytes: int, plan: Plan) -> tuple[int, int, int]:
    """Device memory that a rank needs at least, will likely reserve, and needs at most."""
    beside = 0 if plan.kind.unpredicted_memory else gpus.CONTEXT_BYTES
    if plan.world_size > 1:
        beside += gpus.COMMUNICATION_BYTES
    least, most = gpus.FRAGMENTATION_RANGE
    error = gpus.TENSOR_ERROR
    return (
        round(peak_bytes * (1 - error) * (1 + least)) + beside,
        round(peak_bytes * (1 + gpus.FRAGMENTATION)),
        round(peak_bytes * (1 + error) * (1 + most)) + beside,
    )


def _number_bytes(strategy: Strategy, sizes: Sizes) -> float:
    """Bytes in a checkpoint for each trained number."""
    optimizer_class, arguments = strategy.optimizer_of()
    matrices = sizes.hidden if optimizer_class is MuonWithAdamW else sizes.matrices
    share, dtype = matrices / sizes.trained, updated_dtype(strategy.plan)
    of_state = bytes_per_number(optimizer_class, arguments, dtype, CPU, share)
    return of_state + strategy.average_bytes
