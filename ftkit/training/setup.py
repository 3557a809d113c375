"""Set-up of training: data, model, schedule and strategy of a job, and which ones these are."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from ftkit.checkpoint.metadata import BaseIdentity, DataIdentity, Metadata
from ftkit.checkpoint.state import check_kinds, trained_parameter
from ftkit.checkpoint.store import check_disk
from ftkit.data.dataset import DataSets, ValidationSets, load_data, load_sets
from ftkit.data.inspection.findings import TOLD_BY_COUNTS, Evidence, findings
from ftkit.data.prepare import Counts
from ftkit.data.samples.layout import IntArray, RankLayout
from ftkit.errors import UserError
from ftkit.models.architectures.architecture import Implementation
from ftkit.models.bodies.attention import AttentionPath, attention_kernel, attention_path
from ftkit.models.chat_templates.named import OF_TOKENIZER, resolve_chat_template
from ftkit.models.chat_templates.template import ChatTemplate
from ftkit.models.dry_run import require_trainable
from ftkit.models.flops import attention_cost, mean_flops_per_token, parameter_count
from ftkit.models.language_model import LanguageModel, outline, trainable, trained_router_loss
from ftkit.models.load_weights import fill, kept_parameters
from ftkit.models.lora.load import Adapter, check_shapes, read_adapter
from ftkit.models.lora.save import check_adapter
from ftkit.models.pretrained.base_model import BaseModel, checked_length, open_base, open_companions
from ftkit.models.pretrained.base_outline import OUTLINE
from ftkit.models.pretrained.chat_files import chat_files, end_tokens
from ftkit.models.pretrained.fingerprint import fingerprint, implementation_of
from ftkit.models.pretrained.hub import find_here
from ftkit.models.pretrained.save import layout_of
from ftkit.recipe.checks import check_validations
from ftkit.recipe.plan import Plan
from ftkit.recipe.recipe import LoraRecipe, Recipe
from ftkit.runs.checkpoints import size_of
from ftkit.runs.job import Job
from ftkit.runs.report.report import DataCounts, Resolved, Source
from ftkit.runs.report.rows import losses_of_data_text, summary_text
from ftkit.strategies.distributed import rank
from ftkit.strategies.optim.optimizers import base_learning_rate, hidden_matrices
from ftkit.strategies.optim.schedule import Schedule, make_schedule
from ftkit.strategies.precision import compute_dtype, parameter_dtype, updated_dtype
from ftkit.strategies.state import bytes_per_number, state_kinds
from ftkit.strategies.strategy import Strategy, make_strategy
from ftkit.training.journal import Journal
from ftkit.training.starting_point import StartingPoint
from ftkit.utils.console.formatting import percent_text

_IN_LITGPT_LAYOUT = (
    "The result will be a LitGPT directory (lit_model.pth, model_config.yaml): ftkit cannot write "
    "{} for Hugging Face."
)

_MOST_SHOWN = 40
"""Characters of the place of data in a line about them; of longer ones, the last part alone."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a rank trains, and where it begins."""

    job: Job
    plan: Plan
    base: BaseModel
    """The model that it starts from, or what a checkpoint has of it."""
    data: DataSets
    max_seq_length: int
    """Tokens of the longest sequence."""
    start: StartingPoint
    identities: tuple[BaseIdentity, DataIdentity]
    """Which model and which data these are; empty on other ranks than the first."""
    schedule: Schedule
    model: LanguageModel
    """Adapted as the recipe says; without memory until it is loaded."""
    attention: AttentionPath
    """How attention sees a micro-batch."""
    strategy: Strategy
    sets: ValidationSets = dataclasses.field(default_factory=lambda: ValidationSets(parts=()))
    """Further ones to validate on."""

    @cached_property
    def layout(self) -> RankLayout:
        """How the samples of a step are laid out on this rank."""
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

    @property
    def is_saved(self) -> bool:
        """Whether there will be checkpoints and a result."""
        return self.job.recipe.checkpoint.save and not self.base.random

    @cached_property
    def chat_files(self) -> dict[str, bytes]:
        """What says beside the weights how the result is asked."""
        return chat_files(self.base, self.template.source, self.stop_ids)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end what the result says."""
        if self._keeps_template and self.base.directory is not None:
            return self.data.stop_ids | end_tokens(self.base.directory)
        return self.data.stop_ids

    @property
    def template(self) -> ChatTemplate:
        """In which the result is asked: as it was trained."""
        if self._keeps_template:
            return resolve_chat_template(OF_TOKENIZER, self.base.tokenizer)
        return self.data.asked.renderer.template

    @property
    def _keeps_template(self) -> bool:
        """Whether the model had a template, and nothing was trained but documents."""
        return self.data.asked.part.shape == "text" and bool(self.base.tokenizer.chat_template)

    def learning_rate(self, step: int) -> float:
        """Of optimizer step `step` (from 0), in the first parameter group."""
        return base_learning_rate(self.job.recipe) * self.schedule.share(step)


def identities(
    recipe: Recipe, base: BaseModel, data: DataSets, start: Metadata | None
) -> tuple[BaseIdentity, DataIdentity]:
    """Which model and which data these are; rank 0 alone looks, the others get empty ones.

    Args:
        recipe: what names the model.
        base: its files, or what a checkpoint has of it.
        data: tokenized.
        start: what the checkpoint says that the run continues from.

    Raises:
        UserError: they are not those that the checkpoint has learned from.
    """
    if rank() > 0:
        return BaseIdentity(name="", fingerprint=""), DataIdentity(fingerprint="", train_samples=0)
    if not base.has_weights:
        assert start is not None
        known = implementation_of(start.base.fingerprint)
        of_base = _identity_here(recipe.checkpoint_dir, known) or start.base
    else:
        of_base = BaseIdentity(name=recipe.checkpoint_dir, fingerprint=fingerprint(base))
    if start is not None and of_base.fingerprint != start.base.fingerprint:
        raise UserError(
            f"checkpoint_dir {recipe.checkpoint_dir} is not the model that the checkpoint of step "
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


def _identity_here(checkpoint_dir: str, implementation: Implementation) -> BaseIdentity | None:
    """Of a base model that is not needed any more; None: it is not here, or not whole."""
    try:
        found = find_here(checkpoint_dir)
        if found is None:
            return None
        base = open_base(str(found), implementation)
        return BaseIdentity(name=checkpoint_dir, fingerprint=fingerprint(base))
    except UserError:
        return None


def set_up(job: Job, start: StartingPoint, journal: Journal) -> Setup:
    """Read the data and outline the model of a job; nothing has memory on a device yet.

    Args:
        job: what to do.
        start: where training begins.
        journal: where the summary and progress go, and what the recipe came to.

    Raises:
        UserError: data, adapter, checkpoint or the free disk do not suit the recipe.
    """
    plan, recipe = job.plan, job.recipe
    is_outlined = start.metadata is not None and (Path(job.base) / OUTLINE).is_file()
    base = (
        open_companions(Path(job.base))
        if is_outlined  # by the checkpoint, which has the weights
        else open_base(job.base, start.implementation(recipe))
    )
    require_trainable(base)
    attention = attention_path(base.architecture.attention, plan)
    max_seq_length = checked_length(base, recipe.train.max_seq_length)
    router_loss = trained_router_loss(base.architecture, recipe)
    with journal.display.phase("reading data") as phase:

        def advance(_: str, done: int, total: int) -> None:
            phase.advance(done, total)

        becomes = base.tokenizer, max_seq_length
        data = load_data(recipe.data, *becomes, progress=advance)
        sets = load_sets(recipe.data, recipe.eval.sets, *becomes, progress=advance)
    tell_data(data, journal)
    tell_sets(sets, journal)
    if rank() == 0:
        _tell_findings(data, base, max_seq_length, journal)
    found = identities(recipe, base, data, start.metadata)
    strategy = make_strategy(plan)
    if recipe.checkpoint.save and not base.random:
        if isinstance(recipe, LoraRecipe):
            check_adapter(base, recipe)
        elif layout_of(base) == "litgpt":
            journal.warn(_IN_LITGPT_LAYOUT.format(base.name))
    strategy.prepare(journal.display.phase)
    schedule, notices = make_schedule(
        recipe,
        data.samples_per_epoch,
        base_learning_rate(recipe),
        start_step=start.step,
        start_samples=start.samples,
    )
    for notice in (*notices, *check_validations(recipe, schedule.total_steps)):
        journal.warn(notice)
    with journal.display.phase("building the model", brief=True):
        model = outline(base, recipe, parameter_dtype(plan), compute_dtype(plan))
    model.kernel = attention_kernel(base.architecture.attention, plan)
    model.routing = model.body.watch_routing(router_loss)
    setup = Setup(
        job=job,
        plan=plan,
        base=base,
        data=data,
        max_seq_length=max_seq_length,
        start=start,
        identities=found,
        schedule=schedule,
        model=model,
        attention=attention,
        strategy=strategy,
        sets=sets,
    )
    if setup.is_saved:
        _check_checkpoints(setup)
    _tell(setup, journal)
    return setup


def load(setup: Setup, journal: Journal) -> None:
    """Connect the ranks; give the model its memory and its numbers, and make the optimizer."""
    recipe, base, model, stored = setup.job.recipe, setup.base, setup.model, setup.start.stored
    adapter = None if stored is not None else _adapter(recipe, base, model)
    strategy = setup.strategy
    strategy.connect(model)
    with journal.display.phase("loading weights") as phase:
        fill(
            model,
            base,
            sharding=strategy.sharding,
            device=strategy.device,
            rope_length=min(
                base.architecture.context_length,
                setup.max_seq_length + (recipe.eval.max_new_tokens or 0),
            ),
            seed=recipe.seed,
            trained=None if stored is None else partial(trained_parameter, stored),
            adapter=None if adapter is None else adapter.tensors,
            progress=phase.advance,
        )
    strategy.set_up(model)


def tell_data(data: DataSets, journal: Journal) -> None:
    """Note what became of the records, and say what is not trained on as it is."""
    sources = {}
    for part, take in zip(data.parts, data.takes, strict=True):
        counts = {str(split): data_counts(one.counts) for split, one in part.splits.items()}
        sources[part.source.name] = Source(data=counts, samples_per_epoch=take)
        of_source = f" of {part.source.name}" if len(data.parts) > 1 else ""
        where = part.source.where
        shown = where if len(where) <= _MOST_SHOWN else Path(where).name
        journal.display.message(f"data of {shown}: {part.part.summary}")
        for split, known in counts.items():
            if text := losses_of_data_text(known):
                journal.display.message(f"{split} data{of_source}: {text}{_why(known)}")
        for notice in part.notices:
            journal.warn(notice)
    of_all = {str(split): data_counts(counts) for split, counts in data.counts.items()}
    journal.recorder.on_data(of_all, sources)


def tell_sets(sets: ValidationSets, journal: Journal) -> None:
    """Note what became of the records of each set, and say what is not validated on as it is."""
    counts = {}
    for part in sets.parts:
        name, known = part.source.name, data_counts(part.splits["val"].counts)
        counts[name] = Source(data={"val": known})
        journal.display.message(f"set {name}: {part.part.summary}")
        if text := losses_of_data_text(known):
            journal.display.message(f"set {name}: {text}{_why(known)}")
        for notice in part.notices:
            journal.warn(notice)
    journal.recorder.on_sets(counts)


def _tell_findings(data: DataSets, base: BaseModel, max_seq_length: int, journal: Journal) -> None:
    """Say what in the data ruins runs, but for what its counts say."""
    evidence = Evidence(
        data=data,
        tokenizer=base.tokenizer,
        end_ids=end_tokens(base.tokenizer_directory),
        max_seq_length=max_seq_length,
        model_context=base.architecture.context_length,
    )
    for finding in findings(evidence):
        if finding.kind in TOLD_BY_COUNTS:
            continue
        if finding.severity == "warning":
            journal.warn(finding.words)
        else:
            journal.display.message(f"notice: {finding.words}")


def data_counts(counts: Counts) -> DataCounts:
    """The counts as a report has them."""
    known = {field.name for field in dataclasses.fields(DataCounts)}
    values = {name: value for name, value in vars(counts).items() if name in known}
    return DataCounts(**values, lost_fraction=counts.lost_fraction)


def _why(counts: DataCounts) -> str:
    """How much of the tokens that is, and what changes it."""
    lengths = counts.skipped_no_labels + counts.truncated + counts.dropped + counts.split
    if not lengths:
        return ""
    return (
        f"; the longest sample has {counts.longest_tokens:,} tokens, "
        f"{percent_text(counts.lost_fraction or 0.0)} of all tokens are lost "
        "(train.max_seq_length decides that; of JSON data, data.overlong too)"
    )


def _check_checkpoints(setup: Setup) -> None:
    """Refuse an optimizer that cannot continue, and a disk on which checkpoints will not fit."""
    plan, strategy, stored = setup.plan, setup.strategy, setup.start.stored
    optimizer_class, arguments = strategy.optimizer_of()
    kinds = state_kinds(optimizer_class, arguments, strategy.device)
    if stored is not None:
        check_kinds(kinds, stored, plan.recipe.optimizer["class_path"])
    trained = sum(p.numel() for p in trainable(setup.model))
    hidden = sum(p.numel() for p in hidden_matrices(setup.model))
    number_bytes = strategy.average_bytes + bytes_per_number(
        kinds, optimizer_class, arguments, updated_dtype(plan), hidden / trained
    )
    if rank() == 0:
        _require_space(setup, number_bytes)


def _tell(setup: Setup, journal: Journal) -> None:
    """Note what the recipe came to, and say it in two lines."""
    job, plan, recipe, model = setup.job, setup.plan, setup.job.recipe, setup.model
    samples_per_epoch = setup.data.samples_per_epoch
    journal.recorder.expect(
        samples_per_epoch,
        mean_flops_per_token(
            model,
            setup.data.train.lengths,
            setup.data.train.label_counts,
            setup.data.repetitions,
        ),
        model.routing,
    )
    resolved = Resolved(
        base_model=setup.base.name,
        accelerator=plan.accelerator,
        device=job.devices.names[0] if job.devices.names else "CPU",
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
        kept_bytes=setup.base.rest_bytes or None,
        chat_template=setup.template.name,
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
    if text := _alone_text(setup.data.train.lengths, plan.micro_batch_tokens):
        journal.display.message(f"notice: {text}")


def _adapter(recipe: Recipe, base: BaseModel, model: LanguageModel) -> Adapter | None:
    """The adapter that training starts from."""
    if not isinstance(recipe, LoraRecipe) or recipe.adapter is None:
        return None
    adapter = read_adapter(recipe.adapter, base)
    check_shapes(adapter, model, recipe.adapter)
    return adapter


def _require_space(setup: Setup, number_bytes: float) -> None:
    """Refuse a run whose checkpoints will not fit on the disk; their small files do not count."""
    recipe = setup.job.recipe
    itemsize = parameter_dtype(setup.plan).itemsize
    held = list(kept_parameters(setup.model).values())
    checkpoint_bytes = sum(
        p.numel() * (number_bytes if p.requires_grad else itemsize) for p in held
    )
    if isinstance(recipe, LoraRecipe):
        checkpoint_bytes += sum(p.numel() for p in held) * itemsize  # the adapter beside the shards
    check_disk(
        recipe.out_dir,
        int(checkpoint_bytes),
        recipe.checkpoint,
        size_of(setup.job.directory.store.directory),
        steps_left=setup.schedule.total_steps - setup.start.step,
    )


def _alone_text(lengths: IntArray, most_tokens: int | None) -> str:
    """How many samples are longer than a micro-batch should be; empty: none."""
    longer = 0 if most_tokens is None else int((lengths > most_tokens).sum())
    if not longer:
        return ""
    return (
        f"{longer:,} of {len(lengths):,} training samples have more than "
        f"train.micro_batch_tokens {most_tokens:,}, up to {int(lengths.max()):,}: each is computed "
        "alone"
    )
