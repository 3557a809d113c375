"""Set-up of a rank: everything that it needs for the first step, from the plan."""

import dataclasses
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from ftkit.checkpoint.metadata import (
    BaseIdentity,
    CheckpointError,
    DamagedPart,
    DataIdentity,
    Metadata,
)
from ftkit.checkpoint.shards import StoredState
from ftkit.checkpoint.state import check_kinds, has_average, restore, trained_parameter
from ftkit.checkpoint.store import check_disk
from ftkit.data.dataset import DataSets, ValidationSets, load_data, load_sets
from ftkit.data.inspection.findings import REPORTED_BY_COUNTS, Evidence, findings
from ftkit.data.prepare import Counts
from ftkit.data.samples.layout import RankLayout
from ftkit.data.samples.sample_set import Samples
from ftkit.data.samples.sampler import ElasticOrder, Position
from ftkit.errors import UserError
from ftkit.evaluation.references import (
    References,
    compute_references,
    reference_model,
    samples_of_run,
)
from ftkit.evaluation.validation import EvaluatedWeights
from ftkit.models.architectures.architecture import Implementation
from ftkit.models.bodies.attention import (
    AttentionPath,
    attention_kernel,
    common_path,
    planned_path,
)
from ftkit.models.chat_templates.template import OF_TOKENIZER, ChatTemplate, resolve_chat_template
from ftkit.models.dry_run import require_trainable
from ftkit.models.flops import attention_cost, mean_flops_per_token, parameter_count
from ftkit.models.language_model import LanguageModel, outline, trainable, trained_router_loss
from ftkit.models.load_weights import fill, kept_parameters
from ftkit.models.lora.adapter_files import Adapter, check_adapter, check_shapes, read_adapter
from ftkit.models.pretrained.base_model import (
    BaseModel,
    checked_length,
    fingerprint,
    implementation_of,
    open_base,
    open_without_weights,
)
from ftkit.models.pretrained.hub import OUTLINE, find_here
from ftkit.models.pretrained.reward_model import base_for
from ftkit.models.pretrained.save import chat_files, layout_of
from ftkit.models.pretrained.second_model import check_context, check_logits, check_tokens
from ftkit.models.pretrained.tokenizer import end_tokens
from ftkit.objectives.distillation import Teacher
from ftkit.objectives.objective import Objective, checked_amounts, make_objective
from ftkit.objectives.reference import BelowAdapter, Companion
from ftkit.recipe.objectives import is_below_adapter, objective_rules
from ftkit.recipe.plan import Plan, check_validations
from ftkit.recipe.recipe import LoraRecipe, Recipe
from ftkit.runs.checkpoints import size_of
from ftkit.runs.directory import RunDirectory
from ftkit.runs.job import Job
from ftkit.runs.report.report import DataCounts, Resolved, Source
from ftkit.runs.report.table import losses_of_data_text, summary_text
from ftkit.strategies.distributed import rank
from ftkit.strategies.frozen import frozen, outline_frozen
from ftkit.strategies.optimizers import base_learning_rate, hidden_matrices
from ftkit.strategies.schedule import Schedule, make_schedule, sample_budget
from ftkit.strategies.state import bytes_per_number, state_kinds
from ftkit.strategies.strategy import (
    Strategy,
    compute_dtype,
    make_strategy,
    parameter_dtype,
    updated_dtype,
)
from ftkit.training.recorder import Recorder
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import percent_text

_MOST_SHOWN = 40
"""Characters of a data path in a message; of a longer one only the last part is shown."""


@dataclass(frozen=True)
class Journal:
    """Output of a rank: messages and progress on the display, measurements in the report."""

    display: Display
    recorder: Recorder

    def warn(self, text: str) -> None:
        """Show a warning and add it to the report."""
        self.display.warning(text)
        self.recorder.warn(text)


@dataclass(frozen=True, kw_only=True)
class StartingPoint:
    """Where training begins: the base model, or a checkpoint."""

    metadata: Metadata | None = None
    """Metadata of the checkpoint; None: training begins with the base model."""
    stored: StoredState | None = None
    """Training state of the checkpoint."""
    directory: Path | None = None
    """Directory of the checkpoint."""
    in_place: bool = False
    """Whether the checkpoint belongs to this run, and not to one from which it branches off."""

    @property
    def step(self) -> int:
        """Optimizer steps already done."""
        return self.metadata.step if self.metadata else 0

    @property
    def samples(self) -> int:
        """Samples already consumed: the position in the data."""
        return self.metadata.samples if self.metadata else 0

    @property
    def is_validated(self) -> bool:
        """Whether the validation loss of this state is known."""
        return self.metadata is not None and self.metadata.validation_loss is not None


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
    learning_rate: float
    """Full learning rate, of the first parameter group."""
    attention: AttentionPath
    """How attention handles the sequences of a micro-batch."""
    model: LanguageModel
    objective: Objective
    references: References | None = None
    """The reference of the data sets, if the objective needs one."""
    strategy: Strategy
    teacher: Teacher | None = None
    """The model that is learned from, if the objective needs one."""
    teacher_identity: BaseIdentity | None = None
    """Its identity, on rank 0."""
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

    @cached_property
    def layout(self) -> RankLayout:
        """Layout of a step's samples on this rank."""
        samples = self.data.train
        return RankLayout.of(
            self.plan,
            padding_free=self.attention != "padded",
            attention_cost=attention_cost(
                self.model,
                label_fraction=float(samples.label_counts.sum() / samples.lengths.sum()),
            ),
            rank=rank(),
        )

    @cached_property
    def order(self) -> ElasticOrder:
        """Samples of every step on this rank."""
        samples, start = self.data.train, self.start
        return ElasticOrder(
            samples.widths(padding_free=self.layout.padding_free),
            checked_amounts(self.objective, samples),
            epochs=self.data.epochs(self.recipe.seed),
            global_batch_size=self.recipe.train.global_batch_size,
            total_samples=sample_budget(
                self.recipe.train,
                self.data.samples_per_epoch,
                self.schedule,
                start_step=start.step,
                start_samples=start.samples,
            ),
            layout=self.layout,
            start=Position(step=start.step, samples=start.samples),
        )

    def companion_of(self, samples: Samples) -> Companion | None:
        """Model that the objective needs for some samples beside the trained one, if any."""
        if self.teacher is not None:
            return self.teacher
        return None if self.references is None else self.references.of(samples)

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

    Args:
        job: of the run.
        start: the base model or a checkpoint.
        device_name: product name of the device, for the report.
        journal: for progress, a summary, and what the recipe was resolved to.

    Raises:
        UserError: data, adapter, checkpoint or the free disk space do not suit the recipe.
    """
    plan, recipe, display = job.plan, job.recipe, journal.display
    train = recipe.train

    base = base_for(_open_base(job.base, start, recipe.implementation), recipe.objective)
    require_trainable(base)
    max_seq_length = checked_length(base, train.max_seq_length)
    traits = base.architecture.attention
    kernel = attention_kernel(traits, plan.accelerator, has_flash=plan.has_flash)
    attention = planned_path(traits, plan)
    other = None if job.reference is None else open_base(job.reference)
    if other is not None:
        check_tokens(base, other, "reference")
        check_context(other, "reference", max_seq_length)
    teacher = None
    if job.teacher is not None:
        teacher = _open_teacher(job.teacher, base, start.metadata, max_seq_length)
        attention = common_path(attention, planned_path(teacher.architecture.attention, plan))
    router_loss = trained_router_loss(base.architecture, recipe.router_aux_loss_coef)

    objective = make_objective(recipe.objective)
    strategy = make_strategy(plan)
    strategy.optimizer_of()  # an optimizer that does not exist is refused before data are read

    with display.phase("reading data") as phase:
        loading: dict[str, Any] = {
            "preference": objective_rules(recipe.objective).preference,
            "progress": lambda _, done, total: phase.advance(done, total),
        }
        data = load_data(recipe.data, base.tokenizer, max_seq_length, **loading)
        data = dataclasses.replace(
            data, train=objective.view(data.train), val=objective.view(data.val)
        )
        sets = load_sets(recipe.data, recipe.eval.sets, base.tokenizer, max_seq_length, **loading)
    log_data_summary(data, journal)
    log_sets_summary(sets, journal)
    if rank() == 0:
        _log_findings(data, base, max_seq_length, journal)
    # Before the model is built and filled: a mistake in the recipe shows at once.
    known = identities(recipe.checkpoint_dir, base, data, start.metadata)
    of_teacher = None if teacher is None else _teacher_identity(recipe, teacher, start.metadata)

    if recipe.checkpoint.save and not base.random:
        if isinstance(recipe, LoraRecipe):
            check_adapter(base, recipe)
        elif layout_of(base) == "litgpt":
            journal.warn(
                "The result will be a LitGPT directory (lit_model.pth, model_config.yaml): ftkit "
                f"cannot write {base.name} for Hugging Face."
            )
    strategy.prepare(display.phase)
    learning_rate = base_learning_rate(recipe.optimizer)
    schedule, notices = make_schedule(
        train,
        data.samples_per_epoch,
        learning_rate,
        start_step=start.step,
        start_samples=start.samples,
    )
    takes_best = recipe.checkpoint.result == "best"
    notices += check_validations(recipe.eval, schedule.total_steps, takes_best=takes_best)
    for notice in notices:
        journal.warn(notice)
    # On the meta device: the whole model never exists on a rank, which fills only its own part.
    with display.phase("building the model", brief=True):
        model = outline(base, recipe, parameter_dtype(plan), compute_dtype(plan))
    model.kernel = kernel
    model.routing = model.body.watch_routing(router_loss)

    setup = Setup(
        plan=plan,
        start=start,
        base=base,
        data=data,
        sets=sets,
        max_seq_length=max_seq_length,
        identities=known,
        schedule=schedule,
        learning_rate=learning_rate,
        attention=attention,
        model=model,
        objective=objective,
        strategy=strategy,
        teacher_identity=of_teacher,
    )
    if objective.observes_mismatched:
        _check_several(setup)
    _check_checkpoints(setup, size_of(setup.directory.store.directory))
    _log_summary(setup, device_name, journal)

    adapter: Adapter | None = None
    # A checkpoint already has the adapter's values, trained further.
    if isinstance(recipe, LoraRecipe) and recipe.adapter is not None and start.stored is None:
        adapter = read_adapter(recipe.adapter, base)
        check_shapes(adapter, model, recipe.adapter)
    strategy.connect(model)
    if objective.needs_reference:
        setup = dataclasses.replace(setup, references=_references(setup, other, journal))
    with display.phase("loading weights") as phase:
        fill(
            model,
            base,
            sharding=strategy.sharding,
            device=strategy.device,
            # Answers may be longer than training samples.
            rope_length=min(
                base.architecture.context_length,
                max_seq_length + (recipe.eval.max_new_tokens or 0),
            ),
            seed=recipe.seed,
            trained=None if start.stored is None else partial(trained_parameter, start.stored),
            adapter=None if adapter is None else adapter.tensors,
            progress=phase.advance,
        )
    strategy.set_up(model)
    if start.metadata is not None and start.stored is not None:
        scalars = dict(start.metadata.optimizer_scalars)
        # It also takes the scale out of the scalars, which `restore` gives to the optimizer.
        strategy.restore_loss_scale(scalars)
        restore(model, strategy.state_view(), start.stored, scalars)
        _log_average(strategy, start.stored, display)
    if teacher is not None:
        setup = dataclasses.replace(setup, teacher=_load_teacher(teacher, setup, display))
    return setup


def _references(setup: Setup, other: BaseModel | None, journal: Journal) -> References:
    """Find the reference of a run, and compute what has to be computed of it.

    Args:
        setup: without it; the strategy is connected, and the model not filled.
        other: the recipe's reference, if it is here.
        journal: for progress.
    """
    plan, recipe, strategy, start = setup.plan, setup.recipe, setup.strategy, setup.start
    if is_below_adapter(recipe):
        return References(BelowAdapter(setup.model, strategy.precision.forward_context), None)
    base, adapter = other, None
    if recipe.reference is None:
        base = setup.base
        if not base.has_weights:  # what a checkpoint has of it
            base = _local_base(recipe.checkpoint_dir, base.architecture.implementation)
        if isinstance(recipe, LoraRecipe) and recipe.adapter is not None:
            adapter = read_adapter(recipe.adapter, setup.base)
    model = None
    if base is not None:
        model = reference_model(
            base,
            plan,
            strategy,
            setup.layout,
            max_seq_length=setup.max_seq_length,
            is_own=recipe.reference is None,
            adapter=adapter,
        )
    limit = recipe.eval.max_iters * recipe.train.global_batch_size
    further = setup.objective.view(setup.sets.samples(limit)) if setup.sets.parts else None
    values = compute_references(
        samples_of_run(setup.data, further, setup.order, limit),
        model,
        strategy,
        known=() if start.directory is None else (start.directory,),
        display=journal.display,
        warn=journal.warn,
    )
    return References(None, values)


# The teacher


def _open_teacher(
    directory: str, base: BaseModel, start: Metadata | None, max_seq_length: int
) -> BaseModel:
    """Open the model that is learned from, without its weights.

    Raises:
        UserError: its tokens are not those of the trained model, or its context is too short.
    """
    known = None if start is None else start.teacher
    # Its fingerprint depends on the implementation, which a resumed run keeps.
    teacher = open_base(directory, None if known is None else implementation_of(known.fingerprint))
    check_logits(base, teacher, "teacher")
    check_tokens(base, teacher, "teacher")
    check_context(teacher, "teacher", max_seq_length)
    return teacher


def _teacher_identity(
    recipe: Recipe, teacher: BaseModel, start: Metadata | None
) -> BaseIdentity | None:
    """Identity of the teacher, on rank 0.

    Raises:
        UserError: it differs from that of the checkpoint.
    """
    if rank() > 0:
        return None
    assert recipe.teacher is not None
    found = BaseIdentity(name=recipe.teacher, fingerprint=fingerprint(teacher))
    known = None if start is None else start.teacher
    if start is not None and known is not None and found.fingerprint != known.fingerprint:
        raise UserError(
            f"teacher {recipe.teacher} is not the model that the run learned from up to step "
            f"{start.step} ({known.name}): its weights differ. Try --teacher {known.name}, or "
            "start a new run with another --out_dir."
        )
    return found


def _load_teacher(teacher: BaseModel, setup: Setup, display: Display) -> Teacher:
    """Load the teacher beside the trained model, distributed as that is."""
    strategy = setup.strategy
    with display.phase("loading the teacher") as phase:
        model = setup.contexts.enter_context(
            frozen(
                outline_frozen(teacher, setup.plan),
                teacher,
                strategy,
                rope_length=setup.max_seq_length,
                seed=setup.recipe.seed,
                progress=phase.advance,
            )
        )
    return Teacher(model, strategy.sharding, strategy.precision.forward_context)


# The starting point and the base model


def open_start(checkpoint: Path, metadata: Metadata, own: Path) -> StartingPoint:
    """Open the checkpoint that a run continues from.

    Args:
        checkpoint: its directory.
        metadata: read from it.
        own: directory of the checkpoints of the run itself.

    Raises:
        DamagedPart: a file of the checkpoint is damaged.
        UserError: it cannot be read.
    """
    try:
        stored = StoredState.in_checkpoint(checkpoint, metadata)
    except DamagedPart:  # the supervisor may try an earlier checkpoint
        raise
    except CheckpointError as error:
        raise UserError(
            f"{error} Take an earlier checkpoint with --resume STEP; ftkit checkpoints list "
            "shows those there are."
        ) from error
    return StartingPoint(
        metadata=metadata,
        stored=stored,
        directory=checkpoint,
        in_place=checkpoint.resolve().parent == own.resolve(),
    )


def _open_base(
    directory: str, start: StartingPoint, implementation: Implementation | None
) -> BaseModel:
    if start.metadata is None:
        return open_base(directory, implementation)
    if (Path(directory) / OUTLINE).is_file():  # written by the checkpoint, which has the weights
        return open_without_weights(Path(directory))
    # Tensors of a checkpoint have the names of the implementation that wrote it.
    known = implementation_of(start.metadata.base.fingerprint)
    if implementation not in (None, known):
        raise UserError(
            f"model_implementation is {implementation}, but the checkpoint of step {start.step} "
            f"was made with {known}, whose names its tensors have. Try --model_implementation "
            f"{known}."
        )
    return open_base(directory, known)


def identities(
    checkpoint_dir: str, base: BaseModel, data: DataSets, start: Metadata | None
) -> tuple[BaseIdentity, DataIdentity]:
    """Identities of base model and data; only rank 0 computes them, other ranks get empty ones.

    Args:
        checkpoint_dir: name of the base model in the recipe.
        base: its files, or what a checkpoint has of it.
        data: tokenized.
        start: metadata of the checkpoint that the run continues from.

    Raises:
        UserError: they differ from those of the checkpoint.
    """
    if rank() > 0:
        return BaseIdentity(name="", fingerprint=""), DataIdentity(fingerprint="", train_samples=0)
    if not base.has_weights:
        assert start is not None
        known = implementation_of(start.base.fingerprint)
        of_base = _local_identity(checkpoint_dir, known) or start.base
    else:
        of_base = BaseIdentity(name=checkpoint_dir, fingerprint=fingerprint(base))
    if start is not None and of_base.fingerprint != start.base.fingerprint:
        raise UserError(
            f"checkpoint_dir {checkpoint_dir} is not the model that the checkpoint of step "
            f"{start.step} was made from ({start.base.name}): its weights differ. Give that model, "
            "or start a new run with another --out_dir."
        )
    epoch = data.samples_per_epoch
    of_data = DataIdentity(fingerprint=data.fingerprint, train_samples=epoch)
    if start is not None and of_data != start.data:
        raise UserError(
            f"data: these are not the training samples that the checkpoint of step {start.step} "
            f"has learned from ({epoch:,} now, {start.data.train_samples:,} then; their "
            "text, masks or order differ). Continue with the same data and prompt style, or start "
            "a new run with another --out_dir."
        )
    return of_base, of_data


def _local_identity(checkpoint_dir: str, implementation: Implementation) -> BaseIdentity | None:
    """Identity of a base model that is not needed any more, if all of it is on this machine."""
    with suppress(UserError):
        base = _local_base(checkpoint_dir, implementation)
        if base is not None:
            return BaseIdentity(name=checkpoint_dir, fingerprint=fingerprint(base))
    return None


def _local_base(checkpoint_dir: str, implementation: Implementation) -> BaseModel | None:
    """The base model, if all of it is on this machine."""
    with suppress(UserError):
        found = find_here(checkpoint_dir)
        return None if found is None else open_base(str(found), implementation)
    return None


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
    kinds = state_kinds(optimizer_class, arguments, strategy.device)
    if setup.start.stored is not None:
        check_kinds(kinds, setup.start.stored, recipe.optimizer["class_path"])
    if not setup.is_saved or rank() > 0:
        return
    trained = sum(p.numel() for p in trainable(setup.model))
    hidden = sum(p.numel() for p in hidden_matrices(setup.model))
    number_bytes = strategy.average_bytes + bytes_per_number(
        kinds, optimizer_class, arguments, updated_dtype(plan), hidden / trained
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


def log_data_summary(data: DataSets, journal: Journal) -> None:
    """Report the records and samples of each source, and show which ones are not trained on."""
    sources = {}
    for part, take in zip(data.parts, data.takes, strict=True):
        counts = {str(split): _report_counts(one.counts) for split, one in part.splits.items()}
        sources[part.source.name] = Source(data=counts, samples_per_epoch=take)
        of_source = f" of {part.source.name}" if len(data.parts) > 1 else ""
        where = part.source.where
        shown = where if len(where) <= _MOST_SHOWN else Path(where).name
        journal.display.message(f"data of {shown}: {part.part.summary}")
        for split, known in counts.items():
            if text := losses_of_data_text(known):
                journal.display.message(f"{split} data{of_source}: {text}{_lost_text(known)}")
        for notice in part.notices:
            journal.warn(notice)
    of_all = {str(split): _report_counts(counts) for split, counts in data.counts.items()}
    journal.recorder.on_data(of_all, sources)


def log_sets_summary(sets: ValidationSets, journal: Journal) -> None:
    """Report the records and samples of each set, and show which ones are left out."""
    counts = {}
    for part in sets.parts:
        name, known = part.source.name, _report_counts(part.splits["val"].counts)
        counts[name] = Source(data={"val": known})
        journal.display.message(f"set {name}: {part.part.summary}")
        if text := losses_of_data_text(known):
            journal.display.message(f"set {name}: {text}{_lost_text(known)}")
        for notice in part.notices:
            journal.warn(notice)
    journal.recorder.on_sets(counts)


def _log_findings(data: DataSets, base: BaseModel, max_seq_length: int, journal: Journal) -> None:
    """Show problems of the data, except for those that its counts already show."""
    evidence = Evidence(
        data=data,
        tokenizer=base.tokenizer,
        end_ids=end_tokens(base.tokenizer_directory),
        max_seq_length=max_seq_length,
        model_context=base.architecture.context_length,
    )
    for finding in findings(evidence):
        if finding.kind in REPORTED_BY_COUNTS:
            continue
        if finding.severity == "warning":
            journal.warn(finding.words)
        else:
            journal.display.message(f"notice: {finding.words}")


def _report_counts(counts: Counts) -> DataCounts:
    known = {field.name for field in dataclasses.fields(DataCounts)}
    values = {name: value for name, value in vars(counts).items() if name in known}
    return DataCounts(**values, lost_fraction=counts.lost_fraction)


def _lost_text(counts: DataCounts) -> str:
    """Share of the tokens that are lost because samples are too long, and the key to change."""
    if not counts.skipped_no_labels + counts.truncated + counts.dropped + counts.split:
        return ""
    return (
        f"; the longest sample has {counts.longest_tokens:,} tokens, "
        f"{percent_text(counts.lost_fraction or 0.0)} of all tokens are lost "
        "(train.max_seq_length decides that; of JSON data, data.overlong too)"
    )


def _log_summary(setup: Setup, device_name: str, journal: Journal) -> None:
    """Report what the recipe was resolved to, and show it in two lines."""
    plan, recipe, model, train = setup.plan, setup.recipe, setup.model, setup.data.train
    samples_per_epoch = setup.data.samples_per_epoch
    journal.recorder.expect(
        samples_per_epoch,
        mean_flops_per_token(
            model,
            train.lengths,
            train.label_counts,
            setup.data.repetitions,
            refers_below_adapter=setup.objective.needs_reference and is_below_adapter(recipe),
        ),
        model.routing,
    )
    resolved = Resolved(
        base_model=setup.base.name,
        accelerator=plan.accelerator,
        device=device_name,
        devices=plan.devices,
        world_size=plan.world_size,
        strategy=plan.strategy,
        sharding=plan.sharding,
        communication=plan.communication,
        precision=plan.precision,
        quantize=recipe.quantize if isinstance(recipe, LoraRecipe) else None,
        optimizer=recipe.optimizer["class_path"],
        parameters=parameter_count(model),
        trainable_parameters=sum(parameter.numel() for parameter in trainable(model)),
        kept_bytes=setup.base.extra_weights_bytes or None,
        chat_template=result_template(setup.base, setup.data).name,
        max_seq_length=setup.max_seq_length,
        longest_sample_tokens=max(setup.data.longest_tokens, setup.sets.longest_tokens),
        global_batch_size=recipe.train.global_batch_size,
        micro_batch_size=plan.micro_batch_size,
        micro_batch_tokens=plan.micro_batch_tokens,
        attention=setup.attention,
        micro_steps_per_step=plan.micro_steps,
        total_steps=setup.schedule.total_steps,
        warmup_steps=setup.schedule.warmup_steps,
        samples_per_epoch=samples_per_epoch,
    )
    journal.recorder.note(resolved=resolved)
    journal.display.message(summary_text(resolved, recipe.method))
    most_tokens = plan.micro_batch_tokens
    longer = 0 if most_tokens is None else int((train.lengths > most_tokens).sum())
    if longer:
        journal.display.message(
            f"notice: {longer:,} of {len(train.lengths):,} training samples have more than "
            f"train.micro_batch_tokens {most_tokens:,}, up to {int(train.lengths.max()):,}: each "
            "is computed on its own"
        )


def _log_average(strategy: Strategy, stored: StoredState, display: Display) -> None:
    """Show if a checkpoint has an average that the recipe does not want, or the reverse."""
    if strategy.averages is not None and not has_average(stored):
        display.message(
            "notice: the checkpoint has no average of the weights: it starts at this step"
        )
    elif strategy.averages is None and has_average(stored):
        display.message("notice: train.ema_decay is empty: the checkpoint's average is dropped")
