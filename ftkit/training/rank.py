"""A rank of a run: plan -> Trainer.fit -> measurements. The only place that wires it all.

The supervisor starts it as `python -m ftkit.training.rank JOB.json ITS_PID TERMINAL`, with
standard output and error in a log from the first import on, and the terminal as an open file
descriptor.
"""

import dataclasses
import gc
import io
import logging
import os
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from ftkit.optim.schedule import sample_budget
from ftkit.utils.imports import without_hub_kernels
from ftkit.utils.process import die_with_parent

if __name__ == "__main__":  # before the slow imports: a supervisor may die at any moment
    die_with_parent(int(sys.argv[2]))
    gc.disable()  # as in quick_imports
    without_hub_kernels()

import torch

from ftkit.checkpoint.metadata import CheckpointError, Metadata, read_metadata
from ftkit.checkpoint.saver import SavingFailed
from ftkit.checkpoint.shards import StoredState
from ftkit.config.recipe import LoraRecipe
from ftkit.console.display import LOG_NAME, Display
from ftkit.data.dataset import DataSets, load_data
from ftkit.data.prompt_styles import prompt_style_file
from ftkit.data.sampler import ElasticOrder
from ftkit.errors import UserError
from ftkit.lora.save import save_adapter
from ftkit.memory.predict import predict_measured
from ftkit.model.load_weights import trained_weights
from ftkit.pretrained.base_model import BaseModel, open_base, open_companions
from ftkit.pretrained.save import layout_of, save_hf, save_litgpt
from ftkit.report.report import DataCounts
from ftkit.runs.directory import COMPLETING, ERROR, FINAL, rank_directory
from ftkit.runs.job import Job, RankError
from ftkit.strategies.distributed import make_device, rank
from ftkit.strategies.lightning import set_arithmetic
from ftkit.training.checkpointing import Checkpointing, goes_on_in_place
from ftkit.training.loggers import make_loggers
from ftkit.training.loop import NonFiniteLoss, Training
from ftkit.training.module import FineTuner
from ftkit.training.recorder import Recorder
from ftkit.training.setup import build, checked_length, identities, position, warn
from ftkit.training.signals import Interrupted, StopRequest
from ftkit.utils.out_of_memory import device_line, is_out_of_memory


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
        warn(notice, display, recorder)
    torch.manual_seed(recipe.seed + rank())  # for dropout: every rank has masks of its own
    set_arithmetic(recipe)
    device = make_device(plan)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.reset_peak_memory_stats()
    stored = _stored_state(job, start)
    continues_alone = start is not None and recipe.method == "full"
    base = open_companions(Path(job.base)) if continues_alone else open_base(job.base)
    max_seq_length = checked_length(base, recipe.train.max_seq_length)
    with display.phase("reading data") as phase:
        data = load_data(
            recipe.data,
            base.tokenizer,
            max_seq_length,
            progress=lambda _, done, total: phase.advance(done, total),
        )
    recorder.note(data={split: DataCounts(**counts) for split, counts in data.counts.items()})
    base_identity, data_identity = identities(recipe, base, data, start)
    module = build(job, plan, base, data, max_seq_length, start, stored, display, recorder)
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
        total_samples=sample_budget(recipe, len(data.train), module.schedule, **position(start)),
        rank=rank(),
        world_size=plan.world_size,
        **position(start),
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
            _save(module, base, base_identity.fingerprint, data, recipe.out_dir / FINAL)
        recorder.saved(FINAL)
    recorder.note(outcome="completed", exit_code=0, exit_reason=training.exit_reason)


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


def _save(module: FineTuner, base: BaseModel, fingerprint: str, data: DataSets, out: Path) -> None:
    recipe = module.plan.recipe
    assert module.sharding is not None
    tensors = trained_weights(module.model, module.sharding)
    if rank() > 0:
        for _ in tensors:  # every rank takes part in gathering
            pass
    elif isinstance(recipe, LoraRecipe):
        save_adapter(tensors, base, recipe, out, fingerprint)
    elif layout_of(base) == "hf":
        save_hf(base, tensors, out)
    else:
        save_litgpt(base, tensors, out, others=prompt_style_file(data.prompt_style))


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
                except BaseException as failure:
                    _tell(stop.raised or failure, job, state)  # now: other ranks wait for this one
                    raise
                finally:
                    _note_prediction(job, recorder)
        except BaseException as exception:
            _tell(exception, job, state)
            return 1
        finally:
            (state / COMPLETING).unlink(missing_ok=True)
    return 0


def _tell(exception: BaseException, job: Job, state: Path) -> None:
    """Say how this rank failed, once: what goes wrong after that is noise."""
    if (state / ERROR).exists():
        return
    if rank() == 0:  # its report is not complete yet
        with suppress(OSError):
            (state / COMPLETING).touch()
    error = _explain(exception)
    error.write(state / ERROR)
    if error.kind in ("failed", "out_of_memory"):
        _log_traceback(exception, job)


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
    if "Duplicate GPU detected" in message:  # NCCL's words
        message = (
            "Two ranks have the same GPU. Start one process for each GPU, or show each a GPU of "
            f"its own: srun --gpus-per-task=1. ({message.strip().splitlines()[-1]})"
        )
        return RankError(kind="user", message=message, happened_at_s=now)
    if is_out_of_memory(exception):
        line = device_line(message)
        if line and not isinstance(exception, torch.OutOfMemoryError):
            message = f"{type(exception).__name__}: {line}"  # the rest is how to debug kernels
        message = message or type(exception).__name__
        return RankError(kind="out_of_memory", message=message, happened_at_s=now)
    if not isinstance(exception, NonFiniteLoss | SavingFailed):
        message = f"{type(exception).__name__}: {message}"
    return RankError(kind="failed", message=message, happened_at_s=now)


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    with os.fdopen(int(sys.argv[3]), "w") as _terminal:
        sys.exit(run_rank(Path(sys.argv[1]), _terminal))
