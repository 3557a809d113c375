"""Predictions of a plan: memory, disk and steps, before weights are loaded or downloaded."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ftkit.data.sources import check_data, check_run_length, settled
from ftkit.errors import UserError
from ftkit.models.architectures.architecture import Implementation, ModelLayout
from ftkit.models.dry_run import require_trainable
from ftkit.models.language_model import outline
from ftkit.models.lora.adapter_files import check_adapter
from ftkit.models.lora.targets import skipped_targets, unadapted_experts
from ftkit.models.pretrained.base_model import BaseModel, checked_length, read_blueprint
from ftkit.models.pretrained.model_names import naming
from ftkit.models.pretrained.places import ROOT, fetch_settings, find_single_file
from ftkit.models.pretrained.recipe_model import base_for
from ftkit.models.pretrained.save import layout_of
from ftkit.models.pretrained.single_file import Conversion
from ftkit.models.trained_part import trained_names
from ftkit.planning.gpus import HOST, Gpu, device_here, free_here, ranks_here
from ftkit.planning.media import with_encoder
from ftkit.planning.memory import (
    PredictedMemory,
    heaviest_micro_batch,
    predict,
)
from ftkit.planning.sequence_length import SequenceLength, sequence_length
from ftkit.planning.simulate import CPU, largest_micro_batch
from ftkit.recipe.batches import MicroBatch, check_shapes
from ftkit.recipe.companions import companion_row
from ftkit.recipe.devices import Devices, find_devices
from ftkit.recipe.hubs import as_owner_of
from ftkit.recipe.objectives import model_beside, objective_rules
from ftkit.recipe.parsing import Override, read_recipe
from ftkit.recipe.peft_adapter import with_adapter
from ftkit.recipe.plan import Plan, make_plan
from ftkit.recipe.readers import NO_TERMS, Terms
from ftkit.recipe.recipe import (
    FINETUNE,
    AcceleratorKey,
    LoraRecipe,
    Method,
    MicroBatchKey,
    Recipe,
    Train,
)
from ftkit.recipe.recipe_sections import rounding_of
from ftkit.strategies.optimizers import base_learning_rate
from ftkit.strategies.schedule import CountedSteps, make_schedule, without_epochs
from ftkit.strategies.step_memory import MicroBatchSize
from ftkit.strategies.strategy import compute_dtype, make_strategy, parameter_dtype
from ftkit.utils.accelerators.kinds import HOST_KIND, device_kind
from ftkit.utils.console.formatting import bytes_text

ResultLayout = ModelLayout | Literal["peft"]
# Recipes without LoRA keys mean full fine-tuning unless the command says more: the tutorial's
# recipes are written so.
MethodSource = Literal["command", "recipe", "default"]
"""Source of the method: the command, the keys of a recipe (any LoRA key or quantize means LoRA), or
neither, which means LoRA, as with `ftkit finetune`."""
_TOKENS_APART = 128
"""Numbers of tokens that are tried for a micro-batch are multiples of this."""


@dataclass(frozen=True, kw_only=True)
class MicroBatchBound:
    """Size of a micro-batch that can be reduced to save memory."""

    key: MicroBatchKey
    """Key of the recipe, below train."""
    full: int
    """Current value of the key."""
    least: int
    """Value of the key for a micro-batch of one sequence."""

    def between(self) -> Iterator[int]:
        """Values from full down to least: halves for sequences, finer steps for tokens."""
        if self.key == "micro_batch_tokens":
            yield from range(
                (self.full - 1) // _TOKENS_APART * _TOKENS_APART, self.least, -_TOKENS_APART
            )
            return
        size = self.full // 2
        while size > self.least:
            yield size
            size //= 2


@dataclass(frozen=True, kw_only=True)
class PlannedReference:
    """What the reference model of an objective costs."""

    in_every_step: bool
    """Whether it is computed below the adapter, with a forward pass in each micro-step; otherwise
    once for every sequence, before the first step."""
    more_fraction: float
    """Operations of its passes and of those that observe the step, relative to training on the
    same samples without them."""
    sequences: int | None = None
    """Sequences to train on that are computed before the first step, at most; None: not known."""
    kept_bytes: int | None = None
    """Bytes that their log-probabilities take in the cache, and in each checkpoint."""
    other_bytes: int | None = None
    """Bytes of another model's weights, over all ranks that share it; they are there before
    training alone. None: it is the model with which training begins."""
    least_bytes: int = 0
    """Memory that each rank certainly needs while another model computes; 0: there is none, or a
    checkpoint has what it computed."""
    high_bytes: int = 0
    """Memory that each rank needs for that at most."""


@dataclass(frozen=True, kw_only=True)
class PlannedBeside:
    """What the frozen model costs that is held in memory beside the trained one."""

    key: Literal["teacher", "reference"]
    """What it is to the objective."""
    name: str
    parameters: int
    """Numbers in it."""
    rank_bytes: int
    """Bytes of its weights on each rank, which are part of the predicted memory."""
    more_fraction: float
    """Operations of its passes and of those that observe the step, relative to a step on the same
    samples without them."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A recipe resolved on devices, with what it will need."""

    name: str
    """Name of this plan among several."""
    plan: Plan
    base_model: str
    known_as: str | None
    """ORG/NAME whose sizes LitGPT knows, where config.json is missing; None: not needed."""
    max_seq_length: int
    """Tokens that longer samples are cut to."""
    length: SequenceLength
    """Length of the longest sample, for which the memory is predicted."""
    memory: PredictedMemory
    """Predicted memory of a rank."""
    least_bytes: int
    """The device memory that it needs at least, whatever is not known of the data; before training
    or in it."""
    gpu: Gpu | None
    """Device of each rank: a GPU, or the host memory of CPUs; None: its memory is not known."""
    method_source: MethodSource
    """Source of the decision between LoRA and full fine-tuning."""
    conversion: Conversion | None
    """Conversion of the base model before the run; None: not needed."""
    published: str | None
    """Form in 4 or 8 bits in which the base model is published; None: in plain numbers."""
    can_stay: bool
    """Whether it can be kept in this form in memory."""
    kept_bytes: int
    """Bytes of the base model beside its language model, which are loaded only for media."""
    disk_bytes: int
    """Disk space of checkpoints and result at most, without those that keep_every adds."""
    result_layout: ResultLayout | None
    """Layout of the result; None: nothing is saved."""
    tokens_per_step: int
    """Tokens of a step at most, if all samples were as long as the longest."""
    samples: int | None
    """Training samples of an epoch at most; None: not known until the data is local."""
    steps: int | None
    """Optimizer steps at most; None: not known until the data is local."""
    reference: PlannedReference | None = None
    """The reference model of the objective; None: it compares with none, or with one beside."""
    beside: PlannedBeside | None = None
    """The frozen model that is held beside the trained one; None: there is none."""
    note: str | None = None
    """What the file of a sweep says about the run."""
    left_out: str | None = None
    """Notice about experts that LoRA of all linear layers leaves out; None: it does not."""

    @property
    def high_bytes(self) -> int:
        """The device memory that it needs at most, before training or in it."""
        before = 0 if self.reference is None else self.reference.high_bytes
        return max(self.memory.high_bytes, before)

    @property
    def fits(self) -> bool | None:
        """Whether the memory of each rank is enough; None: too close to call, or not known."""
        if self.gpu is None:
            return None
        fits = self.memory.fits(self.gpu, self.least_bytes)
        return None if fits and self.high_bytes > self.gpu.memory_bytes else fits

    @property
    def other_model_words(self) -> str:
        """What of the needed memory is for another model; empty: nothing, or little of it."""
        if self.beside is not None:
            weights = bytes_text(self.beside.rank_bytes)
            return f"{weights} of it for the weights of the {self.beside.key}"
        if self.reference is not None and self.reference.high_bytes == self.high_bytes:
            return "for the reference, before training begins"
        return ""

    @property
    def micro_steps(self) -> int:
        """Forward and backward passes of each rank in a step; with a number of tokens, at most."""
        return self.plan.most_micro_steps(self.length.tokens - 1)

    @property
    def micro_batch(self) -> MicroBatchBound:
        """Size of its micro-batches that can be reduced."""
        sequences, tokens = self.plan.largest_micro_batch, self.plan.micro_batch_tokens
        if tokens is None:
            return MicroBatchBound(key="micro_batch_size", full=sequences, least=1)
        longest = self.length.tokens - 1
        full = min(tokens, sequences * longest)
        return MicroBatchBound(key="micro_batch_tokens", full=full, least=longest)

    def as_dict(self) -> dict[str, Any]:
        """Plain values of the plan, for JSON."""
        plan, train = self.plan, self.plan.recipe.train
        memory = dataclasses.asdict(self.memory)
        return {
            "name": self.name,
            "note": self.note,
            "fits": self.fits,
            "gpu": self.gpu and self.gpu.name,
            "gpu_memory_bytes": self.gpu and self.gpu.memory_bytes,
            "base_model": self.base_model,
            "known_as": self.known_as,
            "method": plan.recipe.method,
            "accelerator": plan.accelerator,
            "devices": plan.devices,
            "num_nodes": plan.num_nodes,
            "world_size": plan.world_size,
            "context": plan.mesh.context,
            "strategy": plan.strategy,
            "precision": plan.precision,
            "optimizer": plan.recipe.optimizer["class_path"],
            "quantize": getattr(plan.recipe, "quantize", None),
            "rounding": rounding_of(plan.recipe),
            "activation_checkpointing": plan.recipe.memory.activation_checkpointing,
            "global_batch_size": train.global_batch_size,
            "micro_batch_size": plan.micro_batch_size,
            "micro_batch_tokens": plan.micro_batch_tokens,
            "micro_batch_source": None if plan.chosen is None else plan.chosen.source,
            "micro_steps_per_step": self.micro_steps,
            "max_seq_length": self.max_seq_length,
            "longest_sample_tokens": self.length.tokens,
            "length_source": self.length.source,
            "heaviest_media": self.length.media and dataclasses.asdict(self.length.media),
            **memory,
            "least_bytes": self.least_bytes,
            "conversion": self.conversion
            and dataclasses.asdict(self.conversion) | {"place": str(self.conversion.place)},
            "published": self.published,
            "kept_bytes": self.kept_bytes,
            "disk_bytes": self.disk_bytes,
            "result_layout": self.result_layout,
            "tokens_per_step": self.tokens_per_step,
            "samples_per_epoch": self.samples,
            "steps": self.steps,
            "reference": self.reference and dataclasses.asdict(self.reference),
            "beside": self.beside and dataclasses.asdict(self.beside),
        }


def plan_files(
    files: Sequence[str | Path] = (),
    overrides: Sequence[Override] = (),
    *,
    command: str | None = None,
    gpu: Gpu | None = None,
    name: str = "",
    terms: Terms = NO_TERMS,
    chosen: MicroBatch | None = None,
    shrinks: bool = True,
) -> Planned:
    """Predict what a run will need.

    Where the recipe leaves micro-batches open, the plan has the largest that fits for sure.

    Args:
        files: recipes, later ones win.
        overrides: dotted key and YAML text, as on the command line.
        command: finetune, finetune_lora or finetune_full; None: see `MethodSource`.
        gpu: what it is to run on; None: this machine, as the run itself would.
        name: of the result, among several.
        terms: of the command for files of other programs.
        chosen: largest micro-batch where the recipe leaves it open; None: the usual one.
        shrinks: False: that one, whether it fits or not.

    Raises:
        UserError: as a run would.
    """
    source: MethodSource = "command" if command else "recipe" if files else "default"
    method: Method | None = None if source == "recipe" else FINETUNE[command or "finetune"]
    recipe = with_adapter(read_recipe(files, overrides, method=method, terms=terms))
    name = name or (Path(files[-1]).stem if files else "")
    place = _place(recipe, gpu)
    key = recipe.train.auto_key
    check_shapes(recipe.train, device_kind(place.devices.accelerator))  # before auto is a number
    recipe = settled(recipe)
    if key is None:
        whole = _plan_at(place, recipe, source, name, chosen)
        return _fitting(whole, place, source, name) if shrinks else whole
    ranks = ranks_here(recipe.devices, place.devices)
    if gpu is None:
        place = dataclasses.replace(place, gpu=free_here(ranks, place.devices))

    def with_bound(bound: int) -> Planned:
        filled = dataclasses.replace(recipe, train=recipe.train.with_auto_value(bound))
        return _plan_at(place, filled, source, name)

    least = 1 if key == "micro_batch_size" else with_bound(1).micro_batch.least
    nodes = 1 if recipe.num_nodes == "auto" else recipe.num_nodes
    # Another value is refused where the plan is made.
    sharing = recipe.strategy["init_args"].get("context")
    data_ranks = nodes * ranks / (sharing if type(sharing) is int and sharing > 0 else 1)
    whole = with_bound(math.ceil(recipe.train.global_batch_size / data_ranks) * least)
    return whole if whole.fits else largest_that_fits(whole, with_bound) or with_bound(least)


def largest_that_fits(whole: Planned, attempt: Callable[[int], Planned]) -> Planned | None:
    """The plan with the largest smaller micro-batch that fits.

    If none is sure to fit, the plan with one sequence, which may; None: that does not fit.

    Args:
        whole: with the full micro-batch, which does not fit for sure.
        attempt: plans with another bound of it.
    """
    assert whole.gpu is not None
    bound, there = whole.micro_batch, whole.gpu.memory_bytes
    if bound.full <= bound.least or whole.memory.without_batch_bytes > there:
        return None
    one = attempt(bound.least)
    if not one.fits:
        return None if one.fits is False else one
    # Memory grows about linearly with the micro-batch: sizes that cannot fit are not simulated.
    more_bytes = whole.memory.high_bytes - one.memory.high_bytes
    each_bytes = more_bytes / (bound.full - bound.least)
    for smaller in bound.between():
        if one.memory.high_bytes + (smaller - bound.least) * each_bytes <= there:
            found = attempt(smaller)
            if found.fits:
                return found
    return one


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Machine and device that a plan is made for."""

    devices: Devices
    gpu: Gpu | None
    is_here: bool


def _place(recipe: Recipe, gpu: Gpu | None) -> _Place:
    """This machine, or as many of the named GPU as the recipe needs."""
    if gpu is not None:
        devices = _devices_of(recipe.accelerator, recipe.devices, gpu)
        return _Place(devices=devices, gpu=gpu, is_here=False)
    try:
        devices = find_devices(recipe.accelerator, recipe.devices)
    except UserError as error:
        raise _with_advice(error, recipe) from None
    device = device_here(ranks_here(recipe.devices, devices), devices)
    return _Place(devices=devices, gpu=device, is_here=True)


def _fitting(whole: Planned, place: _Place, source: MethodSource, name: str) -> Planned:
    """The plan, with a smaller micro-batch if that is ftkit's to choose and does not fit."""
    chosen, recipe = whole.plan.chosen, whole.plan.recipe
    if chosen is None or chosen.tokens is None or whole.gpu is None or whole.fits:
        return whole

    def with_tokens(tokens: int) -> Planned:
        smaller = dataclasses.replace(chosen, tokens=tokens, source="memory")
        return _plan_at(place, recipe, source, name, smaller)

    return largest_that_fits(whole, with_tokens) or with_tokens(whole.micro_batch.least)


def _plan_at(
    place: _Place,
    recipe: Recipe,
    source: MethodSource,
    name: str,
    chosen: MicroBatch | None = None,
) -> Planned:
    """Make the plan of a recipe at a place."""
    rules = objective_rules(recipe.objective)
    check_data(recipe.data, recipe.eval.sets, preference=rules.preference)
    check_run_length(recipe)
    gpu = place.gpu
    try:
        made = make_plan(recipe, place.devices, chosen=chosen)
    except UserError as error:
        raise (_with_advice(error, recipe) if place.is_here else error) from None
    make_strategy(made).check_optimizer(CPU)  # refuses what the run would refuse
    unreached = fetch_settings(recipe.checkpoint_dir, token=recipe.access_token)
    found = read_blueprint(recipe.checkpoint_dir, recipe.implementation, unreached=unreached)
    base = base_for(found, recipe)
    require_trainable(base, made.strategy, compiles=recipe.compile)
    if recipe.train.trains_part:
        trained_names(base, recipe.train)  # refuses what the run would refuse
    beside, other = _other_models(recipe)
    layout: ResultLayout | None = None
    if recipe.checkpoint.save and not base.random:
        if isinstance(recipe, LoraRecipe):
            check_adapter(base, recipe)  # refuses what the run would refuse
            layout = "peft"
        else:
            layout = layout_of(base)
    file = find_single_file(recipe.checkpoint_dir)
    max_seq_length = checked_length(base, recipe.train.max_seq_length)
    row, second = companion_row(recipe.objective), beside or other
    if row is not None and second is not None:
        row.code().check_settings(base, second, row.name, max_seq_length)
    with as_owner_of(recipe.data_token):
        length = sequence_length(
            recipe.data,
            base,
            recipe.train.max_seq_length,
            recipe.eval.sets,
            preference=rules.preference,
        )
    base = with_encoder(base, made, () if length.media is None else (length.media.kind,))
    samples = length.train_samples
    steps = recipe.train.max_steps
    if length.is_of_stream:
        steps = without_epochs(recipe.train, max_seq_length).max_steps
    elif samples is not None:
        rate = base_learning_rate(recipe.optimizer)
        steps = _steps(recipe.train, samples, rate)
    weighted = length.trained is not None and length.trained.weighted
    largest = heaviest_micro_batch(
        base, made, length.tokens, weighted=weighted, beside=beside, media=length.media
    )
    memory = predict(base, made, largest, beside=beside)
    least_bytes = memory.low_bytes
    in_row = largest.tokens is not None
    certain = certain_micro_batch(made, length, steps, padding_free=in_row)
    if gpu is not None and certain != largest and least_bytes > gpu.memory_bytes:
        # A refusal rests only on what the run computes for certain: an assumption may be wrong, and
        # a run that is out of memory says so anyway.
        least_bytes = predict(base, made, certain, accumulates=False, beside=beside).low_bytes
    reference, companion = None, None
    if row is not None:
        found = row.code().planned(base, made, length, steps, second)
        reference = found if isinstance(found, PlannedReference) else None
        companion = found if isinstance(found, PlannedBeside) else None
    if reference is not None:
        least_bytes = max(least_bytes, reference.least_bytes)
    return Planned(
        name=name,
        plan=made,
        base_model=base.name,
        known_as=base.known_as,
        max_seq_length=max_seq_length,
        length=length,
        memory=memory,
        least_bytes=least_bytes,
        gpu=gpu,
        method_source=source,
        conversion=None if file is None else file.planned_conversion(ROOT),
        published=None if base.form is None else base.form.title,
        can_stay=base.form is not None and base.form.can_stay,
        kept_bytes=base.extra_weights_bytes,
        disk_bytes=_disk_bytes(made, memory, steps, base.extra_weights_bytes) if layout else 0,
        result_layout=layout,
        tokens_per_step=recipe.train.global_batch_tokens
        or recipe.train.global_batch_size * rules.sequences * (length.tokens - 1),
        samples=samples,
        steps=steps,
        reference=reference,
        beside=companion,
        left_out=_left_out(base, made),
    )


def _left_out(base: BaseModel, made: Plan) -> str | None:
    """Notices about experts and layers that are not adapted, as the run gives them."""
    recipe = made.recipe
    # Where they are linear layers, none is left out, and building so many takes a while.
    architecture = base.architecture
    has_others = not architecture.experts_are_layers and architecture.expert_share < 1
    if not isinstance(recipe, LoraRecipe) or not (has_others or recipe.lora_skip_missing):
        return None
    model = outline(base, recipe, parameter_dtype(made), compute_dtype(made))
    notices = (look(model, base, recipe) for look in (unadapted_experts, skipped_targets))
    return " ".join(filter(None, notices)) or None


def _other_models(recipe: Recipe) -> tuple[BaseModel | None, BaseModel | None]:
    """Describe the frozen model beside the trained one, and another reference that is not there."""
    beside = model_beside(recipe)
    if beside is not None:
        return _read_other(recipe, beside.name, beside.key, beside.implementation), None
    if recipe.reference is None:
        return None, None
    return None, _read_other(recipe, recipe.reference, "reference")


def _read_other(
    recipe: Recipe, name: str, key: str, implementation: Implementation | None = None
) -> BaseModel:
    """Describe a second model of a recipe, under a key."""
    with naming(key):
        unreached = fetch_settings(name, token=recipe.access_token)
        return read_blueprint(name, implementation, unreached=unreached)


def _with_advice(error: UserError, recipe: Recipe) -> UserError:
    """Return the error, with advice if the recipe, all of it, could run on other machines."""
    gpus = Gpu(name="GPU", memory_bytes=0)
    try:
        make_plan(recipe, _devices_of(recipe.accelerator, recipe.devices, gpus))
    except UserError:
        return error
    return UserError(
        f"{error}\nftkit plan plans for this machine. Try --gpu a100-80gb, which plans for GPUs "
        "elsewhere."
    )


def _devices_of(accelerator: AcceleratorKey, requested: int | Literal["auto"], gpu: Gpu) -> Devices:
    """Devices that a recipe needs, on whatever machine it will run."""
    count = requested if isinstance(requested, int) else 1
    if accelerator == HOST_KIND and gpu.name == HOST:
        return Devices(accelerator=HOST_KIND, count=count, bf16_native=gpu.bf16)
    if accelerator == HOST_KIND:
        raise UserError(f"accelerator is cpu, but --gpu is {gpu.name}. Leave one of them out.")
    return Devices(
        accelerator=gpu.kind if accelerator == "auto" else accelerator,
        count=max(count, 1),
        names=(gpu.name,),
        bf16_native=gpu.bf16,
        float8_native=gpu.float8,
    )


def certain_micro_batch(
    made: Plan, length: SequenceLength, steps: int | None, *, padding_free: bool = False
) -> MicroBatchSize:
    """A micro-batch that the run will compute on for certain, the largest that is known.

    Its largest is of whole micro-batches only where the global batch is cut into equal ones, and
    where the step that takes the longest sample is not the last of the run, which may be shorter.
    """
    recipe, known, samples = made.recipe, length.trained, length.train_samples
    batch = recipe.train.global_batch_size
    taken = 0 if steps is None or recipe.train.max_time or recipe.resume is not False else steps
    if recipe.train.global_batch_tokens is not None or recipe.train.step_ends_with_epoch:
        taken = 0  # how long the samples of its micro-batches are is known only in the run
    pieces = made.mesh.context
    rules = objective_rules(recipe.objective)
    if known is None or not known.at_least or samples is None or taken * batch < samples:
        each = rules.sequences
        return largest_micro_batch(each, 2, padding_free=padding_free, pieces=pieces, each=each)
    places = made.micro_batch_size * made.mesh.data_ranks
    is_even = made.micro_steps is not None and places * made.micro_steps == batch
    rows = made.micro_batch_size if is_even and (taken - 1) * batch >= samples else 1
    rows *= rules.sequences
    targets = known.label_tokens + rows - 1
    positions = known.at_least - 1
    if rules.scores:
        targets, positions = rows, known.at_least
    in_row = positions + rows - 1
    if rules.scores and rules.scores.pooling == "mean":
        targets = in_row
    here = -(-in_row // pieces)
    return MicroBatchSize(
        sequences=rows + (here * pieces > in_row),
        positions=positions,
        targets=-(-targets // pieces),  # the rank that has most
        tokens=here if padding_free else None,
        pieces=pieces,
        weighted=known.weighted,
    )


def _disk_bytes(
    made: Plan, memory: PredictedMemory, steps: int | None, extra_weights_bytes: int
) -> int:
    kept = made.recipe.checkpoint
    if not kept.save:
        return 0
    itemsize = parameter_dtype(made).itemsize
    if isinstance(made.recipe, LoraRecipe):
        result = memory.trained_parameters * itemsize
    else:
        result = memory.parameters * itemsize + extra_weights_bytes
    return kept.most_at_once(steps) * memory.checkpoint_bytes + result


def _steps(train: Train, samples: int, learning_rate: float) -> int | None:
    """Steps of a run; None: they depend on the tokens of all samples."""
    if train.global_batch_tokens is not None:
        return None if train.epochs else train.max_steps
    counted = None
    if train.step_ends_with_epoch:
        per_epoch = math.ceil(samples / train.global_batch_size)
        total = train.max_steps or per_epoch * (train.epochs or 1)
        total = min(total, per_epoch * train.epochs) if train.epochs else total
        counted = CountedSteps(total=total, per_epoch=per_epoch)
    return make_schedule(train, samples, learning_rate, counted=counted)[0].total_steps
