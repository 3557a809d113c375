"""Set-up of a rank: the model with its schedule and data, and which ones these are."""

from functools import partial

import torch

from ftkit.checkpoint.metadata import BaseIdentity, DataIdentity, Metadata
from ftkit.checkpoint.shards import StoredState
from ftkit.checkpoint.state import check_kinds, trained_parameter
from ftkit.config.plan import Plan
from ftkit.config.recipe import LoraRecipe, Recipe
from ftkit.config.strategies import DeepSpeedOptions
from ftkit.console.display import Display
from ftkit.data.dataset import DataSets, SampleSet
from ftkit.errors import UserError
from ftkit.lora.load import Adapter, check_shapes, read_adapter
from ftkit.lora.names import our_name
from ftkit.lora.save import check_adapter
from ftkit.model.flops import flops_per_token, parameter_count
from ftkit.model.language_model import LanguageModel, outline, trainable
from ftkit.model.load_weights import fill, in_checkpoint
from ftkit.optim.optimizers import base_learning_rate, optimizer_of
from ftkit.optim.schedule import make_schedule
from ftkit.optim.state_kinds import bytes_per_number, state_kinds
from ftkit.pretrained.base_model import BaseModel, open_base
from ftkit.pretrained.fingerprint import fingerprint
from ftkit.pretrained.hub import find_here
from ftkit.pretrained.save import layout_of
from ftkit.report.report import Resolved
from ftkit.runs.checkpoints import size_of
from ftkit.runs.job import Job
from ftkit.runs.resume import check_disk
from ftkit.strategies.deepspeed_build import compile_cpu_optimizer
from ftkit.strategies.distributed import make_device, rank
from ftkit.strategies.precision import compute_dtype, parameter_dtype
from ftkit.strategies.sharding import Sharding
from ftkit.training.module import FineTuner
from ftkit.training.recorder import Recorder

_IN_LITGPT_LAYOUT = (
    "The result will be a LitGPT directory (lit_model.pth, model_config.yaml): ftkit cannot write "
    "{} for Hugging Face."
)


def warn(text: str, display: Display, recorder: Recorder) -> None:
    """Say it now and in the report."""
    display.warning(text)
    recorder.warn(text)


def position(start: Metadata | None) -> dict[str, int]:
    """Where in the data a run begins: optimizer steps and samples before it."""
    if start is None:
        return {"start_step": 0, "start_samples": 0}
    return {"start_step": start.step, "start_samples": start.samples}


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
    of_data = DataIdentity(fingerprint=data.train.fingerprint, train_samples=len(data.train))
    if start is not None and of_data != start.data:
        raise UserError(
            f"data: these are not the training samples that the checkpoint of step {start.step} "
            f"has learned from ({len(data.train):,} now, {start.data.train_samples:,} then; their "
            "text, masks or order differ). Continue with the same data and prompt style, or start "
            "a new run with another --out_dir."
        )
    if not base.has_weights:
        assert start is not None
        of_base = _identity_here(recipe.checkpoint_dir) or start.base
    else:
        of_base = BaseIdentity(name=recipe.checkpoint_dir, fingerprint=fingerprint(base))
    if start is not None and of_base.fingerprint != start.base.fingerprint:
        raise UserError(
            f"checkpoint_dir {recipe.checkpoint_dir} is not the model that the checkpoint of step "
            f"{start.step} was made from ({start.base.name}): its weights differ. Give that model, "
            "or start a new run with another --out_dir."
        )
    return of_base, of_data


def _identity_here(checkpoint_dir: str) -> BaseIdentity | None:
    """Of a base model that is not needed any more; None: it is not here, or not whole."""
    try:
        found = find_here(checkpoint_dir)
        if found is None:
            return None
        return BaseIdentity(name=checkpoint_dir, fingerprint=fingerprint(open_base(str(found))))
    except UserError:
        return None


def build(
    job: Job,
    plan: Plan,
    base: BaseModel,
    data: DataSets,
    max_seq_length: int,
    start: Metadata | None,
    stored: StoredState | None,
    display: Display,
    recorder: Recorder,
) -> FineTuner:
    """The model, adapted as the recipe says, with its schedule; still without memory.

    Args:
        job: what to do.
        plan: how.
        base: the model.
        data: tokenized.
        max_seq_length: tokens of the longest sequence.
        start: what the checkpoint says that the run continues from.
        stored: the state in it.
        display: where the summary and progress go.
        recorder: where what the recipe came to is noted.

    Raises:
        UserError: the adapter, the checkpoint or the free disk do not suit the recipe.
    """
    recipe = plan.recipe
    if recipe.checkpoint.save and not base.random:
        if isinstance(recipe, LoraRecipe):
            check_adapter(base, recipe)
        elif layout_of(base) == "litgpt":
            warn(_IN_LITGPT_LAYOUT.format(base.name), display, recorder)
    if isinstance(plan.options, DeepSpeedOptions) and plan.options.offload_optimizer:
        with display.phase("preparing DeepSpeed's CPU optimizer (compiled once, about a minute)"):
            compile_cpu_optimizer()
    if recipe.checkpoint.save and not base.random:
        optimizer_class, arguments = optimizer_of(plan)
        kinds = state_kinds(optimizer_class, arguments, make_device(plan))
        if stored is not None:
            check_kinds(kinds, stored, recipe.optimizer["class_path"])
        masters = torch.float32 if plan.strategy == "deepspeed" else parameter_dtype(plan)
        number_bytes = bytes_per_number(kinds, optimizer_class, arguments, masters)
    schedule, notices = make_schedule(
        recipe, len(data.train), base_learning_rate(recipe), **position(start)
    )
    for notice in notices:
        warn(notice, display, recorder)
    model = outline(base, recipe, parameter_dtype(plan), compute_dtype(plan))
    if recipe.checkpoint.save and not base.random and rank() == 0:
        _require_space(
            job, model, number_bytes, schedule.total_steps - position(start)["start_step"]
        )
    adapter = None if stored is not None else _adapter(recipe, base, model)

    def load(model: LanguageModel, sharding: Sharding, device: torch.device) -> None:
        with display.phase("loading weights") as phase:
            fill(
                model,
                base,
                sharding=sharding,
                device=device,
                rope_length=min(
                    base.config.block_size, max_seq_length + (recipe.eval.max_new_tokens or 0)
                ),
                seed=recipe.seed,
                trained=None if stored is None else partial(trained_parameter, stored),
                adapter=None if adapter is None else adapter.tensors,
                progress=phase.advance,
            )

    module = FineTuner(model, plan, schedule, load, start_step=position(start)["start_step"])
    recorder.expect(
        samples_per_epoch=len(data.train),
        flops_per_token=mean_flops_per_token(model, data.train),
    )
    resolved = Resolved(
        base_model=base.name,
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
        max_seq_length=max_seq_length,
        global_batch_size=recipe.train.global_batch_size,
        micro_batch_size=plan.micro_batch_size,
        micro_steps_per_step=plan.micro_steps,
        total_steps=schedule.total_steps,
        warmup_steps=schedule.warmup_steps,
        samples_per_epoch=len(data.train),
    )
    recorder.note(resolved=resolved)
    display.message(_summary(resolved, recipe.method))
    return module


def mean_flops_per_token(model: LanguageModel, samples: SampleSet) -> float:
    """In the mean over the tokens of an epoch."""
    lengths = samples.lengths.astype(float)
    return flops_per_token(
        model,
        attention_length=float((lengths**2).sum() / lengths.sum()),
        label_fraction=float(samples.label_counts.sum() / lengths.sum()),
    )


def _adapter(recipe: Recipe, base: BaseModel, model: LanguageModel) -> Adapter | None:
    """The adapter that training starts from."""
    if not isinstance(recipe, LoraRecipe) or recipe.adapter is None:
        return None
    adapter = read_adapter(recipe.adapter, base)
    check_shapes(adapter, model, recipe.adapter)
    return adapter


def _require_space(job: Job, model: LanguageModel, number_bytes: float, steps_left: int) -> None:
    """Refuse a run whose checkpoints will not fit on the disk; their small files do not count."""
    recipe = job.plan.recipe
    itemsize = parameter_dtype(job.plan).itemsize
    held = [p for name, p in model.named_parameters() if in_checkpoint(our_name(name), p)]
    checkpoint_bytes = sum(
        p.numel() * (number_bytes if p.requires_grad else itemsize) for p in held
    )
    if isinstance(recipe, LoraRecipe):
        checkpoint_bytes += sum(p.numel() for p in held) * itemsize  # the adapter beside the shards
    check_disk(
        recipe.out_dir,
        int(checkpoint_bytes),
        recipe,
        size_of(job.directory.store.directory),
        steps_left=steps_left,
    )


def _summary(resolved: Resolved, method: str) -> str:
    assert resolved.parameters and resolved.trainable_parameters
    return (
        f"{method} fine-tuning of {resolved.base_model}: "
        f"{resolved.trainable_parameters:,} of {resolved.parameters:,} parameters, "
        f"{resolved.precision} on {resolved.device}\n"
        f"{resolved.total_steps} steps of {resolved.global_batch_size} samples "
        f"({resolved.micro_steps_per_step} x {resolved.micro_batch_size}), "
        f"{resolved.samples_per_epoch:,} samples per epoch"
    )
