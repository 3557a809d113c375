"""One rank of a run: plan -> Trainer.fit -> measurements. The only place that wires it all.

The supervisor starts it as `python -m ftkit.train JOB.json ITS_PID TERMINAL`, with standard output
and error in a log from the first import on, and the terminal as an open file descriptor.
"""

import dataclasses
import errno
import io
import logging
import os
import sys
import time
import traceback
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TextIO

from ftkit.process import die_with_parent

if __name__ == "__main__":  # before the slow imports: a supervisor may die at any moment
    die_with_parent(int(sys.argv[2]))

import torch

from ftkit.adapter import Adapter, check_adapter, check_shapes, read_adapter, save_adapter
from ftkit.base.base_model import BaseModel, open_base, open_companions
from ftkit.base.fingerprint import fingerprint
from ftkit.base.hub import find_here
from ftkit.base.writing import save_hf
from ftkit.callbacks import (
    Interrupted,
    StopRequest,
)
from ftkit.checkpoint.metadata import (
    BaseIdentity,
    CheckpointError,
    DataIdentity,
    Metadata,
    read_metadata,
)
from ftkit.checkpoint.shards import StoredState
from ftkit.checkpointing import Checkpointing, goes_on_in_place
from ftkit.data.order import ElasticOrder
from ftkit.data.samples import DataSets, load_data
from ftkit.errors import UserError
from ftkit.extensions import compile_cpu_optimizer
from ftkit.finetuner import FineTuner, base_learning_rate, optimizer_of
from ftkit.job import Job, RankError
from ftkit.lora import our_name
from ftkit.memory.predict import predict_measured
from ftkit.model import (
    LanguageModel,
    fill,
    flops_per_token,
    in_checkpoint,
    outline,
    parameter_count,
    trainable,
    trained_weights,
)
from ftkit.planning import DeepSpeedOptions, Plan, make_schedule, sample_budget
from ftkit.ranks import ERROR, rank_directory
from ftkit.recipe import LoraRecipe, Recipe
from ftkit.recorder import Recorder
from ftkit.report.display import LOG_NAME, Display
from ftkit.report.report import DataCounts, Resolved
from ftkit.resume import CHECKPOINTS, FINAL, check_disk
from ftkit.saving import SavingFailed
from ftkit.sharding import Sharding
from ftkit.strategy import (
    compute_dtype,
    make_device,
    parameter_dtype,
    rank,
)
from ftkit.training import NonFiniteLoss, Training, make_loggers
from ftkit.training_state import bytes_per_number, check_kinds, state_kinds, trained_parameter


def run(
    job: Job, start: Metadata | None, stop: StopRequest, display: Display, recorder: Recorder
) -> None:
    """Set up, train, evaluate, save; what stops it is raised.

    Args:
        job: what to do.
        start: what the checkpoint says that it continues from.
        stop: the user's wish to end.
        display: where messages and progress go.
        recorder: where measurements go.
    """
    plan, recipe = job.plan, job.recipe
    for notice in plan.notices:
        _warn(notice, display, recorder)
    torch.manual_seed(recipe.seed + rank())  # for dropout: every rank has masks of its own
    torch.set_float32_matmul_precision("high")
    device = make_device(plan)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.reset_peak_memory_stats()
    stored = _stored_state(job, start)
    continues_alone = start is not None and recipe.method == "full"
    base = open_companions(Path(job.base)) if continues_alone else open_base(job.base)
    max_seq_length = _max_seq_length(base, recipe.train.max_seq_length)
    with display.phase("reading data") as phase:
        data = load_data(
            recipe.data,
            base.tokenizer,
            max_seq_length,
            progress=lambda _, done, total: phase.advance(done, total),
        )
    recorder.note(data={split: DataCounts(**counts) for split, counts in data.counts.items()})
    base_identity, data_identity = _identities(recipe, base, data, start)
    module = _build(job, plan, base, data, max_seq_length, start, stored, display, recorder)
    run_ids = dict(start.loggers) if start is not None and goes_on_in_place(job) else {}
    if job.start is not None:
        recorder.resumed(Path(job.start), job.changes)
    loggers = make_loggers(plan, start_step=module.start_step, run_ids=run_ids)
    checkpointing = None
    if recipe.checkpoint.save and not base.random:
        checkpointing = Checkpointing(
            job,
            module,
            base,
            base_identity=base_identity,
            data_identity=data_identity,
            max_seq_length=max_seq_length,
            start=start,
            run_ids=run_ids,
            recorder=recorder,
            display=display,
        )
    order = ElasticOrder(
        data.train.lengths,
        data.train.label_counts,
        seed=recipe.seed,
        global_batch_size=recipe.train.global_batch_size,
        micro_batch_size=plan.micro_batch_size,
        total_samples=sample_budget(recipe, len(data.train), module.schedule, **_position(start)),
        rank=rank(),
        world_size=plan.world_size,
        **_position(start),
    )
    training = Training(
        plan,
        module,
        data,
        base,
        stop,
        display,
        recorder,
        checkpointing=checkpointing,
        stored=stored,
        start_is_validated=start is not None and start.validation_loss is not None,
        stop_after=job.stop_after,
        command_started_at_s=job.started_at_s,
        loggers=loggers,
    )
    training.fit(order)
    if training.signal_number is not None:
        raise Interrupted(training.signal_number)
    if training.stopped:
        recorder.note(outcome="stopped", exit_code=0, exit_reason=training.exit_reason)
        return
    if recipe.checkpoint.save and not base.random:
        recorder.enter("saving")
        with display.phase("saving the result"):
            _save(module, base, base_identity.fingerprint, recipe.out_dir / FINAL)
        recorder.saved(FINAL)
    recorder.note(outcome="completed", exit_code=0, exit_reason=training.exit_reason)


def _warn(text: str, display: Display, recorder: Recorder) -> None:
    display.warning(text)
    recorder.warn(text)


def _stored_state(job: Job, start: Metadata | None) -> StoredState | None:
    """The state of training that the run continues from."""
    if job.start is None or start is None:
        return None
    shards = [name for name in start.files if name.startswith("shard-")]
    try:
        return StoredState(Path(job.start) / name for name in shards)
    except CheckpointError as error:
        raise UserError(
            f"{error} Take an earlier checkpoint with --resume STEP; ftkit checkpoints list shows "
            "those there are."
        ) from error


def _position(start: Metadata | None) -> dict[str, int]:
    """Where in the data a run begins."""
    if start is None:
        return {"start_step": 0, "start_samples": 0}
    return {"start_step": start.step, "start_samples": start.samples}


def _identities(
    recipe: Recipe, base: BaseModel, data: DataSets, start: Metadata | None
) -> tuple[BaseIdentity, DataIdentity]:
    """Which model and which data these are; rank 0 alone looks.

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


def _max_seq_length(base: BaseModel, asked: int | None) -> int:
    longest = base.config.block_size
    if asked is not None and asked > longest:
        raise UserError(
            f"train.max_seq_length is {asked}, but {base.name} was built for at most {longest} "
            f"positions. Try --train.max_seq_length {longest}."
        )
    return asked or longest


def _build(
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
    """The model, adapted as the recipe says, with its schedule; still without memory."""
    recipe = plan.recipe
    if isinstance(recipe, LoraRecipe) and recipe.checkpoint.save and not base.random:
        check_adapter(base, recipe)
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
        recipe, len(data.train), base_learning_rate(recipe), **_position(start)
    )
    for notice in notices:
        _warn(notice, display, recorder)
    model = outline(base, recipe, parameter_dtype(plan), compute_dtype(plan))
    if recipe.checkpoint.save and not base.random and rank() == 0:
        _require_space(
            job, model, number_bytes, schedule.total_steps - _position(start)["start_step"]
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

    module = FineTuner(model, plan, schedule, load, start_step=_position(start)["start_step"])
    recorder.expect(
        samples_per_epoch=len(data.train),
        flops_per_token=flops_per_token(model, float(data.train.lengths.mean())),
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


def _adapter(recipe: Recipe, base: BaseModel, model: LanguageModel) -> Adapter | None:
    """The adapter that training starts from."""
    if not isinstance(recipe, LoraRecipe) or recipe.adapter is None:
        return None
    adapter = read_adapter(recipe.adapter, base)
    shapes = {
        our_name(name): parameter.shape
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    check_shapes(adapter, shapes, recipe.adapter)
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
    there = (recipe.out_dir / CHECKPOINTS).rglob("*")
    check_disk(
        recipe.out_dir,
        int(checkpoint_bytes),
        recipe,
        sum(path.stat().st_size for path in there if path.is_file()),
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


def _save(module: FineTuner, base: BaseModel, fingerprint: str, out: Path) -> None:
    recipe = module.plan.recipe
    assert module.sharding is not None
    tensors = trained_weights(module.model, module.sharding)
    if rank() > 0:
        for _ in tensors:  # every rank takes part in gathering
            pass
    elif isinstance(recipe, LoraRecipe):
        save_adapter(tensors, base, recipe, out, fingerprint)
    else:
        save_hf(base, tensors, out)


_HOST_MEMORY = (
    "DefaultCPUAllocator: can't allocate memory",  # torch
    os.strerror(errno.ENOMEM),  # files mapped into memory, threads
    "std::bad_alloc",
)
"""In errors of other types when host memory is exhausted."""


def run_rank(job_path: Path, terminal: TextIO) -> int:
    """Run one rank of a job; the exit code of its process.

    Args:
        job_path: the job's file; what the rank leaves for the supervisor lies beside it.
        terminal: where rank 0 speaks. What libraries print goes to standard output and error.
    """
    stop = StopRequest()
    stop.install()
    job = Job.read(job_path)
    state = rank_directory(job_path.parent, rank())
    state.mkdir(exist_ok=True)
    _log_libraries()
    with _display(job, state, terminal) as display:
        try:
            start = None if job.start is None else read_metadata(Path(job.start))
            device = make_device(job.plan)
            with Recorder(
                job, job.plan, device, state, rank(), start=start, show_warning=display.warning
            ) as recorder:
                try:
                    run(job, start, stop, display, recorder)
                finally:
                    _note_prediction(job, recorder)
        except BaseException as exception:
            error = _explain(exception)
            error.write(state / ERROR)
            if error.kind in ("failed", "out_of_memory"):
                _log_traceback(exception, job)
            return 1
    return 0


def _note_prediction(job: Job, recorder: Recorder) -> None:
    """What the measured step was expected to need; it takes a second, after all else."""
    measured = recorder.report.step_memory
    if rank() > 0 or measured is None:
        return
    try:
        predicted = predict_measured(job.base, job.plan, measured.ranks[0])
    except Exception as error:  # a report is not worth less without it
        recorder.warn(f"memory was not predicted: {type(error).__name__}: {error}")
    else:
        recorder.note(step_memory=dataclasses.replace(measured, predicted=predicted))


def _log_libraries() -> None:
    """Have the warnings and logs of libraries written to standard error."""
    logging.captureWarnings(True)
    for name in list(logging.root.manager.loggerDict):
        logging.getLogger(name).handlers.clear()
    # Without the time, lines of other ranks can be compared with those of rank 0.
    time_stamp = "%(asctime)s " if rank() == 0 else ""
    logging.basicConfig(
        level=logging.WARNING, format=f"{time_stamp}%(name)s: %(message)s", force=True
    )


def _display(job: Job, state: Path, terminal: TextIO) -> Display:
    """Rank 0 speaks; the others keep their lines to themselves."""
    if rank() == 0:
        return Display(job.recipe.out_dir, stream=terminal)
    return Display(state, stream=_Silence())


class _Silence(io.StringIO):
    """Where ranks other than the first write what a person would read."""

    def write(self, text: str) -> int:
        return len(text)


def _log_traceback(exception: BaseException, job: Job) -> None:
    lines = traceback.format_exception(exception)
    if job.plan.world_size > 1:
        lines = [f"rank {rank()}:\n", *lines]
    with suppress(OSError), (job.recipe.out_dir / LOG_NAME).open("a", encoding="utf-8") as file:
        file.write("".join(lines))


def _explain(exception: BaseException) -> RankError:
    """What ended the run, for the supervisor."""
    now = time.time()
    if isinstance(exception, UserError):
        return RankError(kind="user", message=str(exception), happened_at_s=now)
    if isinstance(exception, Interrupted):
        return RankError(kind="interrupted", message=str(exception), happened_at_s=now)
    message = str(exception)
    host_memory = any(words in message for words in _HOST_MEMORY)
    if host_memory or isinstance(exception, torch.OutOfMemoryError | MemoryError):
        message = message or type(exception).__name__
        return RankError(kind="out_of_memory", message=message, happened_at_s=now)
    if not isinstance(exception, NonFiniteLoss | SavingFailed):
        message = f"{type(exception).__name__}: {message}"
    return RankError(kind="failed", message=message, happened_at_s=now)


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[3]), "w") as _terminal:
        sys.exit(run_rank(Path(sys.argv[1]), _terminal))
