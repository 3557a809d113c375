"""A rank of a run: job -> setup -> training -> result. The only place that wires it all.

The supervisor starts it as `python -m ftkit.training.rank JOB.json ITS_PID TERMINAL`, with
standard output and error in a log from the first import on, and the terminal as an open file
descriptor.
"""

import gc
import io
import json
import logging
import os
import sys
import time
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TextIO

from ftkit.redaction import redacted, redacted_output
from ftkit.strategies.optim.schedule import sample_budget
from ftkit.utils.imports import postpone_modules, without_hub_kernels
from ftkit.utils.process import die_with_parent
from ftkit.utils.progress import loading_shown, set_verbosity

if __name__ == "__main__":  # before the slow imports: a supervisor may die at any moment
    die_with_parent(int(sys.argv[2]))
    gc.disable()  # as in quick_imports
    without_hub_kernels()
    postpone_modules()
    _loading = ExitStack()
    if os.environ["RANK"] == "0" and not json.loads(Path(sys.argv[1]).read_bytes())["quiet"]:
        _screen = _loading.enter_context(os.fdopen(int(sys.argv[3]), "w", closefd=False))
        _loading.enter_context(loading_shown(_screen))

import torch

from ftkit.checkpoint.metadata import DamagedPart, Metadata, read_metadata
from ftkit.checkpoint.saver import SavingFailed
from ftkit.data.prompt_styles import prompt_style_file
from ftkit.data.samples.sampler import ElasticOrder, Position
from ftkit.errors import UserError, device_line, is_out_of_memory
from ftkit.evaluation.scoring.metrics import Scoring
from ftkit.evaluation.validation import EvaluatedWeights
from ftkit.models.load_weights import trained_weights
from ftkit.models.lora.save import save_adapter
from ftkit.models.lora.serving import serving_notice
from ftkit.models.pretrained.save import layout_of, save_hf, save_litgpt
from ftkit.planning.memory import predict_measured
from ftkit.recipe.recipe import LoraRecipe
from ftkit.runs.directory import RankDirectory
from ftkit.runs.job import Job, RankError
from ftkit.strategies.distributed import make_device, rank
from ftkit.strategies.precision import set_arithmetic
from ftkit.training.checkpointing import Checkpointing
from ftkit.training.journal import Journal
from ftkit.training.loggers import Loggers, make_loggers
from ftkit.training.loop import NonFiniteLoss, Training
from ftkit.training.recorder import Recorder
from ftkit.training.setup import Setup, load, set_up
from ftkit.training.signals import Interrupted, StopRequest
from ftkit.training.starting_point import StartingPoint
from ftkit.utils.accelerators.use import take_device
from ftkit.utils.console.display import Display


def run_job(job: Job, metadata: Metadata | None, stop: StopRequest, journal: Journal) -> None:
    """Set up, train, evaluate, save; what stops it is raised.

    Args:
        job: what to do.
        metadata: of the checkpoint that it continues from.
        stop: the user's wish to end.
        journal: where messages and measurements go.
    """
    plan, recipe, recorder = job.plan, job.recipe, journal.recorder
    for notice in plan.notices:
        journal.warn(notice)
    torch.manual_seed(recipe.seed + rank())  # for dropout: every rank has masks of its own
    set_arithmetic(recipe)
    device = make_device(plan)
    take_device(device)
    scoring = _scoring(job)
    start = StartingPoint.of(job, metadata)
    setup = set_up(job, start, journal)
    run_ids = dict(metadata.loggers) if metadata is not None and start.in_place else {}
    loggers = make_loggers(plan, start_step=start.step, run_ids=run_ids)
    load(setup, journal)
    weights = EvaluatedWeights(setup.strategy)
    checkpointing = Checkpointing(setup, journal, run_ids, weights) if setup.is_saved else None
    training = Training(
        setup,
        _order(setup),
        scoring,
        stop,
        journal,
        Loggers(loggers, recipe, journal),
        checkpointing,
        weights,
    )
    training.run()
    if training.signal_number is not None:
        raise Interrupted(training.signal_number)
    if training.stopped:
        recorder.note(outcome="stopped", exit_code=0, exit_reason=training.exit_reason)
        return
    if setup.is_saved:
        recorder.enter("saving")
        with journal.display.phase("saving the result"):
            _save(setup, job.directory.final)
        is_adapter = recipe.method == "lora" and rank() == 0
        if is_adapter and (refused := serving_notice(job.directory.final)) is not None:
            journal.warn(refused)
        recorder.saved(job.directory.final.name)
    recorder.note(outcome="completed", exit_code=0, exit_reason=training.exit_reason)


def _scoring(job: Job) -> Scoring:
    """What is asked of answers; rank 0 speaks, so that one's own metrics are executed there."""
    evaluation = job.recipe.eval
    return Scoring(
        exact_match=evaluation.exact_match,
        rouge_l=evaluation.rouge_l,
        own=job.metrics,
        max_new_tokens=evaluation.max_new_tokens or 0,
        executes=rank() == 0,
    )


def _order(setup: Setup) -> ElasticOrder:
    """The samples of every step, on this rank."""
    recipe, start, samples = setup.job.recipe, setup.start, setup.data.train
    return ElasticOrder(
        samples.lengths,
        samples.label_counts,
        epochs=setup.data.epochs(recipe.seed),
        global_batch_size=recipe.train.global_batch_size,
        total_samples=sample_budget(
            recipe,
            setup.data.samples_per_epoch,
            setup.schedule,
            start_step=start.step,
            start_samples=start.samples,
        ),
        layout=setup.layout,
        start=Position(step=start.step, samples=start.samples),
    )


def _save(setup: Setup, out: Path) -> None:
    """Write the result; every rank takes part in gathering."""
    recipe, base, beside = setup.job.recipe, setup.base, setup.chat_files
    tensors = trained_weights(setup.model, setup.strategy.sharding)
    if rank() > 0:
        for _ in tensors:
            pass
    elif isinstance(recipe, LoraRecipe):
        save_adapter(tensors, base, recipe, out, setup.identities[0].fingerprint, beside)
    elif layout_of(base) == "hf":
        save_hf(base, tensors, out, others=beside)
    else:
        style = setup.data.asked.part.rules.prompt_style
        others = beside | ({} if style is None else prompt_style_file(style))
        save_litgpt(base, tensors, out, others=others)


def run_rank(job_path: Path, terminal: TextIO) -> int:
    """Run one rank of a job; the exit code of its process.

    Args:
        job_path: the job's file.
        terminal: where rank 0 speaks. What libraries print goes to standard output and error.
    """
    stop = StopRequest()
    stop.install()
    job = Job.read(job_path)
    if job.quiet:
        set_verbosity("quiet")
    state = job.directory.rank(rank())
    state.path.mkdir(exist_ok=True)
    _log_libraries()
    with _display(job, state, terminal) as display:
        try:
            start = None if job.start is None else read_metadata(Path(job.start))
            with Recorder(job, state, start=start, show_warning=display.warning) as recorder:
                try:
                    run_job(job, start, stop, Journal(display, recorder))
                except BaseException as failure:
                    _tell(stop.raised or failure, job, state)  # now: other ranks wait for this one
                    raise
                finally:
                    _note_prediction(job, recorder, display)
        except BaseException as exception:
            _tell(exception, job, state)
            return 1
        finally:
            state.completing.unlink(missing_ok=True)
    return 0


def _tell(exception: BaseException, job: Job, state: RankDirectory) -> None:
    """Say how this rank failed, once: what goes wrong after that is noise."""
    if state.error.exists():
        return
    if rank() == 0:  # its report is not complete yet
        with suppress(OSError):
            state.completing.touch()
    error = _explain(exception)
    error.write(state)
    if error.kind in ("failed", "out_of_memory"):
        _log_traceback(exception, job)


def _note_prediction(job: Job, recorder: Recorder, display: Display) -> None:
    """What steps were expected to need; it takes a second, after all else."""
    measured, resolved = recorder.report.step_memory, recorder.report.resolved
    if rank() > 0 or measured is None or resolved is None:
        return
    longest = resolved.longest_sample_tokens
    assert longest is not None
    try:
        with display.phase("predicting memory", brief=True):
            told = predict_measured(job.base, job.plan, measured, longest)
    except Exception as error:  # a report is not worth less without it
        recorder.warn(f"memory was not predicted: {type(error).__name__}: {error}")
    else:
        recorder.note(step_memory=told)


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


def _display(job: Job, state: RankDirectory, terminal: TextIO) -> Display:
    """Rank 0 speaks; the others keep their lines to themselves."""
    if rank() == 0:
        return Display(job.recipe.out_dir, stream=terminal)
    return Display(state.path, stream=_Silence())


class _Silence(io.StringIO):
    """Where ranks other than the first write what a person would read."""

    def write(self, text: str) -> int:
        return len(text)


def _log_traceback(exception: BaseException, job: Job) -> None:
    lines = traceback.format_exception(exception)
    if job.plan.world_size > 1:
        lines = [f"rank {rank()}:\n", *lines]
    with suppress(OSError), job.directory.log.open("a", encoding="utf-8") as file:
        file.write(redacted("".join(lines)))


def _explain(exception: BaseException) -> RankError:
    """What ended the run, for the supervisor."""
    now = time.time()
    if isinstance(exception, UserError):
        return RankError(kind="user", message=str(exception), happened_at_s=now)
    if isinstance(exception, DamagedPart):
        file = f"{exception.file.parent.name}/{exception.file.name}"
        return RankError(kind="damaged", message=str(exception), happened_at_s=now, file=file)
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
    _loading.close()
    gc.freeze()
    gc.enable()
    sys.stdout, sys.stderr = map(redacted_output, (sys.stdout, sys.stderr))
    with os.fdopen(int(sys.argv[3]), "w") as _terminal:
        sys.exit(run_rank(Path(sys.argv[1]), _terminal))
