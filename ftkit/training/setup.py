"""Set-up of a rank: everything that it needs for the first step, from the plan."""

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ftkit.checkpoint.metadata import (
    BaseIdentity,
    DataIdentity,
)
from ftkit.checkpoint.state import check_kinds, has_average, restore, trained_parameter
from ftkit.checkpoint.store import check_disk
from ftkit.data.dataset import DataSets, LoadedPart, ValidationSets, load_data, load_sets
from ftkit.data.samples.cuts import StepCuts, cut_steps
from ftkit.data.samples.layout import RankLayout
from ftkit.data.samples.sample_set import Samples
from ftkit.data.samples.sampler import ElasticOrder, Position, StepOrder
from ftkit.errors import UserError
from ftkit.evaluation.validation import EvaluatedWeights
from ftkit.models.architectures.architecture import HEAD
from ftkit.models.bodies.attention import (
    AttentionKernel,
    AttentionPath,
    attention_kernel,
    planned_path,
)
from ftkit.models.chat_templates.template import OF_TOKENIZER, ChatTemplate, resolve_chat_template
from ftkit.models.dry_run import require_trainable
from ftkit.models.flops import (
    attention_cost,
    further_passes,
    mean_flops_per_token,
    media_cost,
    parameter_count,
)
from ftkit.models.language_model import LanguageModel, outline, trainable, trained_router_loss
from ftkit.models.load_weights import fill, kept_parameters
from ftkit.models.lora.adapter_files import check_adapter
from ftkit.models.lora.targets import skipped_targets, unadapted_experts
from ftkit.models.pretrained.base_model import (
    BaseModel,
    checked_length,
    parameter_shapes,
)
from ftkit.models.pretrained.recipe_model import base_for
from ftkit.models.pretrained.save import chat_files, layout_of
from ftkit.models.pretrained.tokenizer import end_tokens
from ftkit.models.routing import RouterLoss
from ftkit.objectives.companion import Companion
from ftkit.objectives.objective import (
    Objective,
    checked_amounts,
    ignores_padding,
    make_objective,
)
from ftkit.planning.media import heaviest_media, with_encoder
from ftkit.recipe.adapter_types import method_text
from ftkit.recipe.companions import companion_row
from ftkit.recipe.implementations import HF, implementation_row
from ftkit.recipe.objectives import model_beside, objective_rules
from ftkit.recipe.plan import Plan
from ftkit.recipe.recipe import LoraRecipe, Recipe, Train
from ftkit.recipe.recipe_sections import rounding_of, trained_parts
from ftkit.recipe.sections import check_validations
from ftkit.runs.checkpoints import size_of
from ftkit.runs.directory import RunDirectory
from ftkit.runs.job import Job
from ftkit.runs.report.report import Resolved
from ftkit.runs.report.table import summary_text
from ftkit.strategies.distributed import rank
from ftkit.strategies.frozen import bytes_on_rank
from ftkit.strategies.optimizers import base_learning_rate
from ftkit.strategies.schedule import (
    CountedSteps,
    Schedule,
    interval_steps,
    make_schedule,
    sample_budget,
    without_epochs,
)
from ftkit.strategies.state import (
    bytes_per_number,
    shapes_like,
    state_kinds,
    updated_as_matrices,
)
from ftkit.strategies.step_memory import MediaSize
from ftkit.strategies.strategy import (
    Strategy,
    compute_dtype,
    make_strategy,
    parameter_dtype,
    updated_dtype,
)
from ftkit.training.journal import Journal, log_data_summary, log_findings, log_sets_summary
from ftkit.training.start import StartingPoint, identities, open_base_model
from ftkit.utils.console.display import Display

if TYPE_CHECKING:
    from ftkit.checkpoint.stored_state import StoredState
    from ftkit.data.samples.shapes import FixedShapes
    from ftkit.models.lora.adapter_reading import Adapter


class RunCompanion(ABC):
    """The other model of a run, which its objective needs (`ftkit.recipe.companions`).

    Its methods are called in this order, each by every rank; this class is for one of which nothing
    lies in memory beside the trained model.
    """

    outlined: LanguageModel | None = None
    """The model that is held in memory beside the trained one, outlined or loaded; None: none is,
    or it is not outlined so far."""
    identity: BaseIdentity | None = None
    """Of that model, on rank 0."""

    def path(self, own: AttentionPath) -> AttentionPath:
        """Return how attention handles the sequences of a micro-batch, with that of this model."""
        return own

    def identify(self) -> None:  # noqa: B027 - nothing to compare
        """Compare its weights with those of the run so far.

        Raises:
            UserError: they are others.
        """

    def outline(self) -> None:  # noqa: B027 - nothing to build
        """Build what is held beside the trained model on the meta device."""

    def prepare(self, setup: "Setup", journal: Journal) -> None:  # noqa: B027 - nothing to compute
        """Compute what is needed of it before training, once the ranks are connected.

        No weights are loaded, which could lie beside its own.

        Raises:
            UserError: it is not here.
        """

    def load(self, setup: "Setup", display: Display) -> None:  # noqa: B027 - nothing to load
        """Load what is held beside the trained model, which is loaded."""

    @abstractmethod
    def of(self, samples: Samples) -> Companion:
        """Return what computes, or has computed, micro-batches of some samples."""

    def write(self, directory: Path) -> list[Path]:
        """Write what a session elsewhere might not be able to compute again to a checkpoint.

        Returns:
            the files that are written.
        """
        return []


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything that a rank trains with."""

    plan: Plan
    start: StartingPoint
    base: BaseModel
    """The base model, or what a checkpoint has of it."""
    data: DataSets
    sets: ValidationSets
    """Further sets to validate on."""
    max_seq_length: int
    """Tokens of the longest sequence."""
    identities: tuple[BaseIdentity, DataIdentity]
    """Identities of base model and data; empty on ranks other than 0."""
    schedule: Schedule
    cuts: StepCuts | None
    """Where steps end that are not all of one size; None: all are."""
    validation_interval: int
    """Steps between validations; 0: there are none before the end."""
    save_interval: int
    """Steps between checkpoints that are saved for their number; 0: there are none."""
    learning_rate: float
    """Full learning rate, of the first parameter group."""
    attention: AttentionPath
    """How attention handles the sequences of a micro-batch."""
    model: LanguageModel
    objective: Objective
    strategy: Strategy
    companion: RunCompanion | None
    """The other model that the objective needs; None: it needs none."""
    contexts: ExitStack = field(default_factory=ExitStack)
    """Contexts in which models that are not trained compute: they end with the process."""

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run."""
        return self.plan.recipe

    @property
    def directory(self) -> RunDirectory:
        """Directory of the run."""
        return RunDirectory(self.recipe.out_dir)

    @property
    def is_saved(self) -> bool:
        """Whether there will be checkpoints and a result."""
        return self.recipe.checkpoint.save and not self.base.random

    @property
    def validation_limit(self) -> int:
        """Most samples of a validation, of the data and of each further set."""
        return self.recipe.eval.max_iters * self.recipe.train.global_batch_size

    @cached_property
    def further_samples(self) -> Samples | None:
        """What is validated of the further sets; None: there are no such sets."""
        if not self.sets.parts:
            return None
        return self.objective.view(self.sets.samples(self.validation_limit))

    @cached_property
    def heaviest_media(self) -> MediaSize | None:
        """Media of the sample that costs most to encode, of all; None: there are none."""
        further = self.further_samples
        others = () if further is None else (further,)
        return heaviest_media((self.data.train, self.data.val, *others))

    @cached_property
    def layout(self) -> RankLayout:
        """Layout of a step's samples on this rank."""
        return RankLayout.of(
            self.plan,
            padding_free=self.attention != "padded",
            attention_cost=attention_cost(self.model, label_fraction=self._label_fraction),
            longest=max(self.data.longest_tokens, self.sets.longest_tokens) - 1,
            rank=rank(),
            shapes=self._shapes(),
        )

    def _shapes(self) -> "FixedShapes | None":
        """Sizes of all micro-batches; None: the devices compute any shape at once."""
        if not self.plan.kind.compiles_shapes:
            return None
        from ftkit.data.samples.shapes import FixedShapes

        further, stream = self.further_samples, self.data.stream
        return FixedShapes.of(
            self.plan,
            [
                self.data.train,
                self.data.val,
                *([] if further is None else [further]),
                *([] if stream is None else [stream.largest]),
            ],
            pads_labels=ignores_padding(self.objective),
        )

    @cached_property
    def order(self) -> StepOrder:
        """Samples of every step on this rank."""
        samples, start = self.data.train, self.start
        if (stream := self.data.stream) is not None:
            metadata, batch = start.metadata, self.recipe.train.global_batch_size
            from ftkit.data.samples.stream import StreamedOrder

            stream.begin(
                self.recipe.seed, start.samples, None if metadata is None else metadata.stream
            )
            return StreamedOrder(
                stream,
                view=self.objective.view,
                amounts=partial(checked_amounts, self.objective),
                global_batch_size=batch,
                total_samples=start.samples + (self.schedule.total_steps - start.step) * batch,
                layout=self.layout,
                start=Position(step=start.step, samples=start.samples),
            )
        if self.cuts is None:
            total_samples = sample_budget(
                self.recipe.train,
                self.data.samples_per_epoch,
                self.schedule,
                start_step=start.step,
                start_samples=start.samples,
            )
        else:
            total_samples = int(self.cuts.positions[-1])
        return ElasticOrder(
            samples.widths(padding_free=self.layout.padding_free),
            checked_amounts(self.objective, samples),
            epochs=self.data.epochs(self.recipe.seed),
            global_batch_size=self.recipe.train.global_batch_size,
            total_samples=total_samples,
            layout=self.layout,
            start=Position(step=start.step, samples=start.samples),
            positions=None if self.cuts is None else self.cuts.positions,
            work=self._media_work,
        )

    @property
    def _media_work(self) -> npt.NDArray[np.int64] | None:
        """[samples], tokens that cost as much as encoding the media of each; None: no media."""
        samples = self.data.train
        if samples.media_sizes is None:
            return None
        cost = media_cost(self.model, label_fraction=self._label_fraction)
        return np.ceil(samples.media_sizes * cost).astype(np.int64)

    @property
    def _label_fraction(self) -> float:
        samples = self.data.train
        return float(samples.label_counts.sum() / samples.lengths.sum())

    def companion_of(self, samples: Samples) -> Companion | None:
        """Model that the objective needs for some samples beside the trained one, if any."""
        return None if self.companion is None else self.companion.of(samples)

    @cached_property
    def evaluated_weights(self) -> EvaluatedWeights:
        """The weights to evaluate: those that are trained, or their averages."""
        return EvaluatedWeights(self.strategy)

    @cached_property
    def chat_files(self) -> dict[str, bytes]:
        """Files beside the weights of the result that say how it is prompted."""
        return result_chat_files(self.base, self.data)


def set_up(job: Job, start: StartingPoint, device_name: str, journal: Journal) -> Setup:
    """Set up this rank, up to the first step.

    What costs less comes first, so that a mistake in the recipe shows before the time is spent:
    settings of models, then data, then the steps, then models without numbers, and weights last.

    Args:
        job: of the run.
        start: the base model or a checkpoint.
        device_name: product name of the device, for the report.
        journal: for progress, a summary, and what the recipe was resolved to.

    Raises:
        UserError: data, adapter, checkpoint or the free disk space do not suit the recipe.
    """
    plan, recipe, display = job.plan, job.recipe, journal.display
    models = _open_models(job, start, journal)
    base, companion = models.base, models.companion
    objective = make_objective(recipe.objective)
    strategy = make_strategy(plan)
    strategy.check_optimizer(strategy.device)
    data, sets = _read_data(models, objective, recipe, journal)
    kinds = {kind for one in (*data.parts, *sets.parts) for kind in one.part.media}
    base.architecture.require_media(kinds, base.name)
    base = with_encoder(base, plan, kinds)
    if (beside := trained_parts(recipe)) is not None and data.train.media_reader is None:
        row, (part, *_) = beside
        raise UserError(
            f"{row.name}.{part} is true, but the training data have no {row.name}, so nothing "
            f"would change it. Try --{row.name}.{part} false, or other data."
        )
    # Before the model is built and filled: other data or another base model show at once.
    known = identities(recipe, base, data, start.metadata)
    if companion is not None:
        companion.identify()
    _check_result(base, recipe, journal)
    strategy.prepare(display.phase)
    steps = _lay_out_steps(data, start, recipe, models.max_seq_length, journal)
    # On the meta device: the whole model never exists on a rank, which fills only its own part.
    with display.phase("building the model", brief=True):
        model = outline(base, recipe, parameter_dtype(plan), compute_dtype(plan))
        if companion is not None:
            companion.outline()
    if isinstance(recipe, LoraRecipe):
        for look in (unadapted_experts, skipped_targets):
            if (left_out := look(model, base, recipe)) is not None:
                journal.warn(left_out)
    model.kernel = models.kernel
    model.routing = model.body.watch_routing(models.router_loss)

    setup = Setup(
        plan=plan,
        start=start,
        base=base,
        data=data,
        sets=sets,
        max_seq_length=models.max_seq_length,
        identities=known,
        schedule=steps.schedule,
        cuts=steps.cuts,
        validation_interval=steps.validation_interval,
        save_interval=steps.save_interval,
        learning_rate=steps.learning_rate,
        attention=models.attention,
        model=model,
        objective=objective,
        strategy=strategy,
        companion=companion,
    )
    if objective.observes:
        _check_several(setup)
    _check_checkpoints(setup, size_of(setup.directory.store.directory))
    _log_summary(setup, device_name, journal)
    _load_model(setup, journal)
    if companion is not None:
        # With the strategy set up, which shards it; its contexts stay open for all steps.
        companion.load(setup, display)
    return setup


class _Models(NamedTuple):
    """Settings and tokenizers of the models of a run, without their weights."""

    base: BaseModel
    companion: RunCompanion | None
    max_seq_length: int
    attention: AttentionPath
    kernel: AttentionKernel
    router_loss: RouterLoss | None


def _open_models(job: Job, start: StartingPoint, journal: Journal) -> _Models:
    """Open the models, and refuse those that the run cannot train or compare with."""
    plan, recipe = job.plan, job.recipe
    opened = open_base_model(job.base, start, recipe.implementation)
    base = base_for(opened, recipe)
    if recipe.added_tokens and not base.added_tokens and start.metadata is None:
        journal.warn(
            f"data.add_tokens has no effect: the vocabulary of {base.name} has all of these tokens."
        )
    require_trainable(base, plan.strategy, compiles=recipe.compile)
    if recipe.train.trains_part:
        from ftkit.models.trained_part import trained_names

        trained_names(base, recipe.train)  # refuses a part that does not exist
    max_seq_length = checked_length(base, recipe.train.max_seq_length)
    traits = base.architecture.attention
    attention = planned_path(traits, plan)
    companion: RunCompanion | None = None
    if (row := companion_row(recipe.objective)) is not None:
        companion = row.code().of_run(job, start, base, max_seq_length)
        assert companion is not None
        attention = companion.path(attention)
    return _Models(
        base=base,
        companion=companion,
        max_seq_length=max_seq_length,
        attention=attention,
        kernel=attention_kernel(traits, plan.accelerator, has_flash=plan.has_flash),
        router_loss=trained_router_loss(base.architecture, recipe.router_aux_loss_coef),
    )


def _read_data(
    models: _Models, objective: Objective, recipe: Recipe, journal: Journal
) -> tuple[DataSets, ValidationSets]:
    """Read the data as the objective sees them, and show what they are."""
    base, longest = models.base, models.max_seq_length
    with journal.display.phase("reading data") as phase:
        loading: dict[str, Any] = {
            "preference": objective_rules(recipe.objective).preference,
            "progress": lambda _, done, total: phase.advance(done, total),
        }
        data = load_data(recipe.data, base.tokenizer, longest, **loading)
        data = dataclasses.replace(
            data, train=objective.view(data.train), val=objective.view(data.val)
        )
        sets = load_sets(recipe.data, recipe.eval.sets, base.tokenizer, longest, **loading)
    for part in (*data.parts, *sets.parts):
        _require_logits(part, base)
    log_data_summary(data, journal)
    log_sets_summary(sets, journal)
    if rank() == 0:
        log_findings(data, base, longest, recipe, journal)
    return data, sets


def _check_result(base: BaseModel, recipe: Recipe, journal: Journal) -> None:
    """Refuse a run whose result could not be written; warn of another layout than usual."""
    if not recipe.checkpoint.save or base.random:
        return
    if isinstance(recipe, LoraRecipe):
        check_adapter(base, recipe)
    elif (layout := layout_of(base)) != HF:
        row = implementation_row(layout)
        journal.warn(
            f"The result will be a {row.title} directory ({row.weights_file}, "
            f"{row.settings_file}): ftkit cannot write {base.name} for Hugging Face."
        )


class _Steps(NamedTuple):
    """The steps of a run: see the fields of `Setup` with these names."""

    schedule: Schedule
    cuts: StepCuts | None
    validation_interval: int
    save_interval: int
    learning_rate: float


def _lay_out_steps(
    data: DataSets, start: StartingPoint, recipe: Recipe, max_seq_length: int, journal: Journal
) -> _Steps:
    """Count the steps of a run, which its data and its starting point give."""
    train = recipe.train
    if data.stream is not None:
        if train.epochs not in (None, Train().epochs):
            journal.warn("train.epochs has no effect: nobody knows how many samples an epoch has.")
        train = without_epochs(
            train, max_seq_length, start_step=start.step, start_samples=start.samples
        )
    learning_rate = base_learning_rate(recipe.optimizer)
    cuts = cut_steps(
        train,
        data.epochs(recipe.seed),
        (data.train.lengths_by_sequence + 1).sum(1),
        start_step=start.step,
        start_samples=start.samples,
    )
    counted = None
    steps_per_epoch = math.ceil(data.samples_per_epoch / train.global_batch_size)
    if cuts is not None:
        steps_per_epoch = cuts.steps_per_epoch
        total = start.step + len(cuts.positions) - 1
        counted = CountedSteps(total=total, per_epoch=steps_per_epoch)
    schedule, notices = make_schedule(
        train,
        data.samples_per_epoch,
        learning_rate,
        counted=counted,
        start_step=start.step,
        start_samples=start.samples,
        begun_warmup=start.warmup_steps,
    )
    takes_best = recipe.checkpoint.result == "best"
    validation_interval, save_interval = (
        interval_steps(steps, share, steps_per_epoch)
        for steps, share in (
            (recipe.eval.interval, recipe.eval.interval_epochs),
            (train.save_interval, train.save_interval_epochs),
        )
    )
    notices += check_validations(
        recipe.eval, validation_interval, schedule.total_steps, takes_best=takes_best
    )
    for notice in notices:
        journal.warn(notice)
    return _Steps(schedule, cuts, validation_interval, save_interval, learning_rate)


def _load_model(setup: Setup, journal: Journal) -> None:
    """Connect the ranks, and load what they train."""
    recipe, strategy, start = setup.recipe, setup.strategy, setup.start
    base, model, display = setup.base, setup.model, journal.display
    adapter: Adapter | None = None
    # A checkpoint already has the adapter's values, trained further.
    if isinstance(recipe, LoraRecipe) and recipe.adapter is not None and start.stored is None:
        from ftkit.models.lora.adapter_reading import check_shapes, read_adapter

        adapter = read_adapter(recipe.adapter, base)
        check_shapes(adapter, model, recipe.adapter)
    strategy.connect(model)
    model.body.exchange = strategy.exchange
    # Before the weights are loaded: another model has its own, which are not to lie beside them.
    if setup.companion is not None:
        setup.companion.prepare(setup, journal)
    with display.phase("loading weights") as phase:
        fill(
            model,
            base,
            sharding=strategy.sharding,
            device=strategy.device,
            # Answers may be longer than training samples.
            rope_length=min(
                base.architecture.context_length,
                setup.max_seq_length + (recipe.eval.max_new_tokens or 0),
            ),
            seed=recipe.seed,
            trained=None if start.stored is None else partial(trained_parameter, start.stored),
            adapter=None if adapter is None else adapter.tensors,
            source=_new_weights(base, recipe) if recipe.train.from_scratch else None,
            progress=phase.advance,
        )
    # The optimizer is made of filled parameters, and then takes its state of the checkpoint.
    strategy.set_up(model)
    if start.metadata is not None and start.stored is not None:
        scalars = dict(start.metadata.optimizer_scalars)
        # It also takes the scale out of the scalars, which `restore` gives to the optimizer.
        strategy.restore_loss_scale(scalars)
        restore(model, strategy.state_view(), start.stored, scalars)
        _log_average(strategy, start.stored, display)


def _require_logits(part: LoadedPart, base: BaseModel) -> None:
    """Refuse labels for which the model has no logits: some heads have fewer rows than embeddings.

    Raises:
        UserError: names the token.
    """
    architecture, tokenizer = base.architecture, base.tokenizer
    if architecture.scores:
        return
    rows = architecture.parameter_shapes(tied=False)[HEAD][0]
    logits = min(rows, architecture.logit_count or rows)
    if tokenizer.largest_id < logits:
        return
    largest = max(prepared.samples.largest_label for prepared in part.splits.values())
    if largest >= logits:
        raise UserError(
            f"A sample of {part.source.where} trains the token {tokenizer.token_text(largest)!r}, "
            f"whose id is {largest:,}, but {base.name} has {logits:,} logits (ids up to "
            f"{logits - 1:,}): the model only reads it. Leave it out of answers, or choose what "
            "is trained with --data.train_on or --data.mask_prompt."
        )


def _new_weights(base: BaseModel, recipe: Recipe) -> Iterator[tuple[str, Tensor]]:
    """Weights with which training from scratch begins, tied as those of the base model are."""
    if base.architecture.rest_shapes:
        raise UserError(
            f"train.from_scratch is true, but {base.name} is more than a language model, whose "
            "other parts stay as they are. Try --train.from_scratch false."
        )
    shapes = parameter_shapes(base)
    drawn = base.architecture.drawn(base.settings, recipe.seed)
    return ((name, values) for name, values in drawn if name in shapes)


# How the result is prompted


def result_template(base: BaseModel, data: DataSets) -> ChatTemplate:
    """Chat template of the result: the one of training."""
    if _keeps_template(base, data):
        return resolve_chat_template(OF_TOKENIZER, base.tokenizer)
    return data.prompt_source.renderer.template


def result_stop_ids(base: BaseModel, data: DataSets) -> frozenset[int]:
    """Tokens that end an answer of the result."""
    if _keeps_template(base, data) and base.directory is not None:
        return data.stop_ids | end_tokens(base.directory)
    return data.stop_ids


def result_chat_files(base: BaseModel, data: DataSets) -> dict[str, bytes]:
    """Files beside the weights of the result that say how it is prompted, by name."""
    return chat_files(base, result_template(base, data).source, result_stop_ids(base, data))


def _keeps_template(base: BaseModel, data: DataSets) -> bool:
    # Documents alone teach no other way to be prompted, and of token ids nothing is known.
    is_free = data.prompt_source.part.shape in ("text", "tokens")
    return is_free and bool(base.tokenizer.chat_template)


# Checks


def _check_several(setup: Setup) -> None:
    """Refuse a step, or validation data, of one sample, which has no other to compare with."""
    order, name = setup.order, setup.recipe.objective["class_path"]
    steps, batch = order.total_steps, setup.recipe.train.global_batch_size
    why = f"objective is {name}, which compares each example with another one"
    if (
        setup.cuts is not None
        and (alone := np.flatnonzero(np.diff(setup.cuts.positions) == 1)).size
    ):
        number = order.start_step + int(alone[0]) + 1
        raise UserError(
            f"Step {number} of the run has one example, but {why}: its epoch ends there, or "
            "train.global_batch_tokens has room for one. Try --train.step_ends_with_epoch false "
            "--train.global_batch_size 16."
        )
    if order.start_step < steps and len(order.samples(steps - 1)) == 1:
        raise UserError(
            f"train.global_batch_size is {batch}: the last step of the run, {steps}, has one "
            f"example, but {why}. Try --train.max_steps {steps - 1}, or --train.global_batch_size "
            f"{batch + 1}."
        )
    if len(setup.data.val) == 1:
        raise UserError(
            f"data has one validation record, but {why}. Try --data.val_split_fraction 0.1, or add "
            "validation records."
        )


def _check_checkpoints(setup: Setup, existing_bytes: int) -> None:
    """Refuse an optimizer that cannot continue, and a disk on which checkpoints will not fit."""
    plan, strategy, recipe = setup.plan, setup.strategy, setup.recipe
    if not (setup.is_saved or setup.start.stored is not None):
        return
    optimizer_class, arguments = strategy.optimizer_of()
    shapes = shapes_like(setup.model, optimizer_class)
    kinds = state_kinds(optimizer_class, arguments, strategy.device, shapes)
    if setup.start.stored is not None:
        check_kinds(kinds, setup.start.stored, recipe.optimizer["class_path"])
    if not setup.is_saved or rank() > 0:
        return
    trained = sum(p.numel() for p in trainable(setup.model))
    matrices = sum(p.numel() for p in updated_as_matrices(setup.model, optimizer_class))
    number_bytes = strategy.average_bytes + bytes_per_number(
        optimizer_class, arguments, updated_dtype(plan), strategy.device, matrices / trained
    )
    itemsize = parameter_dtype(plan).itemsize
    held = list(kept_parameters(setup.model).values())
    # The few small files of a checkpoint are not counted.
    checkpoint_bytes = sum(
        p.numel() * (number_bytes if p.requires_grad else itemsize) for p in held
    )
    if isinstance(recipe, LoraRecipe):
        checkpoint_bytes += sum(p.numel() for p in held) * itemsize  # the adapter beside the shards
    check_disk(
        recipe.out_dir,
        int(checkpoint_bytes),
        recipe.checkpoint,
        existing_bytes,
        steps_left=setup.schedule.total_steps - setup.start.step,
    )


# Messages and the report


def _log_summary(setup: Setup, device_name: str, journal: Journal) -> None:
    """Report what the recipe was resolved to, and show it in two lines."""
    plan, recipe, model, train = setup.plan, setup.recipe, setup.model, setup.data.train
    outlined = None if setup.companion is None else setup.companion.outlined
    journal.recorder.expect(
        setup.data.passes,
        mean_flops_per_token(
            model,
            train.lengths,
            train.label_counts,
            setup.data.repetitions,
            further=further_passes(recipe, outlined),
            media_sizes=train.media_sizes,
        ),
        model.routing,
    )
    beside = model_beside(recipe)
    shapes = setup.layout.shapes
    resolved = Resolved(
        base_model=setup.base.name,
        beside=None if beside is None else beside.name,
        beside_key=None if beside is None else beside.key,
        beside_parameters=None if outlined is None else parameter_count(outlined),
        beside_rank_bytes=None if outlined is None else bytes_on_rank(outlined, plan),
        accelerator=plan.accelerator,
        device=device_name,
        devices=plan.devices,
        world_size=plan.world_size,
        context=plan.mesh.context if plan.mesh.context > 1 else None,
        strategy=plan.strategy,
        sharding=plan.sharding,
        communication=plan.communication,
        precision=plan.precision,
        quantize=recipe.quantize if isinstance(recipe, LoraRecipe) else None,
        rounding=rounding_of(recipe),
        published=None if setup.base.form is None else setup.base.form.title,
        optimizer=recipe.optimizer["class_path"],
        parameters=parameter_count(model),
        trainable_parameters=sum(parameter.numel() for parameter in trainable(model)),
        kept_bytes=setup.base.extra_weights_bytes or None,
        chat_template=result_template(setup.base, setup.data).name,
        max_seq_length=setup.max_seq_length,
        longest_sample_tokens=max(setup.data.longest_tokens, setup.sets.longest_tokens),
        heaviest_media=setup.heaviest_media,
        global_batch_size=recipe.train.global_batch_size,
        global_batch_tokens=recipe.train.global_batch_tokens,
        micro_batch_size=plan.micro_batch_size,
        micro_batch_tokens=plan.micro_batch_tokens,
        micro_batch_source=None if plan.chosen is None else plan.chosen.source,
        attention=setup.attention,
        padded_lengths=None if shapes is None else list(shapes.lengths),
        micro_steps_per_step=plan.micro_steps,
        total_steps=setup.schedule.total_steps,
        warmup_steps=setup.schedule.warmup_steps,
        samples_per_epoch=setup.data.samples_per_epoch or None,
    )
    journal.recorder.note(resolved=resolved)
    method = method_text(recipe.method, getattr(recipe, "peft", None))
    journal.display.message(summary_text(resolved, method))
    if isinstance(recipe, LoraRecipe) and recipe.adapter is not None and setup.start.stored is None:
        journal.display.message(f"starts from the adapter {recipe.adapter}, trained before")
    if shapes is not None and not shapes.pads_labels:
        journal.warn(
            f"objective is {recipe.objective['class_path']}, of a plugin: its labels are not "
            f"padded, and a {plan.kind.noun} compiles programs for each number of them."
        )
    most_tokens = None if plan.chosen else plan.micro_batch_tokens
    longer = 0 if most_tokens is None else int((train.lengths > most_tokens).sum())
    if longer:
        journal.display.message(
            f"notice: {longer:,} of {len(train.lengths):,} training samples have more than "
            f"train.micro_batch_tokens {most_tokens:,}, up to {int(train.lengths.max()):,}: each "
            "is computed on its own"
        )


def _log_average(strategy: Strategy, stored: "StoredState", display: Display) -> None:
    """Show if a checkpoint has an average that the recipe does not want, or the reverse."""
    if strategy.averages is not None and not has_average(stored):
        display.message(
            "notice: the checkpoint has no average of the weights: it starts at this step"
        )
    elif strategy.averages is None and has_average(stored):
        display.message("notice: train.ema_decay is empty: the checkpoint's average is dropped")
