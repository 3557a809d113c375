"""A rank of a run: job -> set-up -> training -> result.

The supervisor starts it as `python -m ftkit.training.rank ITS_PID JOB.json TERMINAL`. Standard
output and error are a log from the first import on; the terminal is an open file descriptor.
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

from ftkit.recipe.implementations import HF
from ftkit.redaction import redacted, redacted_output
from ftkit.utils.imports import prepare_imports
from ftkit.utils.process import begin_as_child
from ftkit.utils.progress import loading_shown, set_verbosity

if __name__ == "__main__":  # before the slow imports: the supervisor may die during them
    begin_as_child()
    gc.disable()  # during imports, as in quick_imports
    prepare_imports()
    _loading = ExitStack()
    if os.environ["RANK"] == "0" and not json.loads(Path(sys.argv[1]).read_bytes())["quiet"]:
        # closefd=False: the same descriptor becomes the terminal of the run below.
        _screen = _loading.enter_context(os.fdopen(int(sys.argv[2]), "w", closefd=False))
        _loading.enter_context(loading_shown(_screen))

import torch

from ftkit.checkpoint.metadata import DamagedPart, Metadata, read_metadata
from ftkit.checkpoint.saver import SavingFailed
from ftkit.errors import UserError, device_line, is_out_of_memory
from ftkit.evaluation.scoring import Scoring
from ftkit.models.chat_templates.prompt_styles import prompt_style_file
from ftkit.models.load_weights import result_weights
from ftkit.models.lora.adapter_files import save_adapter
from ftkit.models.lora.serving import serving_notice
from ftkit.models.pretrained.model_files import read_json
from ftkit.models.pretrained.save import layout_of, save_hf, save_in_own_layout
from ftkit.planning.memory import predict_measured
from ftkit.recipe.peft_names import CONFIG
from ftkit.recipe.plugin import place_in_plugin, using
from ftkit.recipe.recipe import LoraRecipe
from ftkit.recipe.strategies import emulates_bf16
from ftkit.runs.directory import RankDirectory
from ftkit.runs.job import Job, RankError
from ftkit.strategies.distributed import make_device, rank, world_size
from ftkit.strategies.strategy import bf16_cost, set_arithmetic
from ftkit.training.callbacks import make_callbacks
from ftkit.training.checkpointing import Checkpointing
from ftkit.training.evaluator import Evaluator
from ftkit.training.finite import NotFinite
from ftkit.training.journal import Journal
from ftkit.training.loggers import Loggers, make_loggers
from ftkit.training.loop import Interrupted, StopRequest, Training
from ftkit.training.recorder import Recorder
from ftkit.training.setup import Setup, set_up
from ftkit.training.start import StartingPoint, open_start
from ftkit.utils.accelerators.backends import load_backend
from ftkit.utils.accelerators.kinds import HOST_KIND
from ftkit.utils.accelerators.use import take_device
from ftkit.utils.console.display import Display


def run_job(job: Job, metadata: Metadata | None, stop: StopRequest, journal: Journal) -> None:
    """Set up, train, evaluate, and save the result.

    Args:
        job: of the run: what the command line asks of all parts of a rank.
        metadata: of the checkpoint that the run continues from.
        stop: signals that ask to end.
        journal: for messages and measurements.

    Raises:
        Interrupted: a signal ended the run.
        UserError: the recipe, its data or its checkpoint cannot be used.
    """
    plan, recipe, recorder = job.plan, job.recipe, journal.recorder
    for notice in plan.notices:
        journal.warn(notice)
    if plan.accelerator == HOST_KIND and emulates_bf16(plan.precision, job.devices):
        journal.display.message(
            f"a product takes {bf16_cost():.0f} times as long in bfloat16 as in float32 here"
        )
    load_backend(plan.accelerator)
    # Nothing of ftkit draws from it before a step, which has a seed of its own; a plugin may.
    torch.manual_seed(recipe.seed + rank())
    set_arithmetic(plan)
    take_device(make_device(plan.accelerator))
    scoring = Scoring(
        recipe.eval.metrics,
        own=job.metrics,
        max_new_tokens=recipe.eval.max_new_tokens or 0,
        executes=rank() == 0,  # the user's own metrics run once
    )

    start = StartingPoint()
    if job.start is not None and metadata is not None:
        start = open_start(Path(job.start), metadata, job.directory.store.directory)
    device_name = [*job.devices.names, "CPU"][0]
    setup = set_up(job, start, device_name, journal)
    # A branch is a new run in every logger.
    run_ids = dict(metadata.loggers) if metadata is not None and start.in_place else {}
    loggers = make_loggers(
        recipe.extra_loggers, recipe.out_dir, recipe.log, start_step=start.step, run_ids=run_ids
    )
    checkpointing = None
    if setup.is_saved:
        checkpointing = Checkpointing(
            setup, journal, run_ids=run_ids, changes=job.changes, restarts=len(job.restarts)
        )
    # Only now: a checkpoint has the id of W&B's run before W&B is contacted.
    started_loggers = Loggers(loggers, recipe, journal.warn)
    training = Training(
        setup,
        Evaluator(
            setup,
            scoring,
            stop.requested,
            journal,
            started_loggers,
            trusted=None if job.trusted is None else Path(job.trusted),
        ),
        checkpointing,
        stop,
        journal,
        started_loggers,
        make_callbacks(setup, journal, started_loggers.log),
        began_s=job.began_s,
        stop_after=job.stop_after,
    )
    training.run()

    # An interrupted or stopped run has no result yet.
    if training.signal_number is not None:
        raise Interrupted(training.signal_number)
    if training.stopped:
        recorder.note(outcome="stopped", exit_code=0, exit_reason=training.exit_reason)
        return
    if setup.is_saved:
        recorder.enter("saving")
        with journal.display.phase("saving the result"):
            _save_result(setup, setup.directory.final)
        is_adapter = recipe.method == "lora" and rank() == 0
        if (
            is_adapter
            and (refused := serving_notice(read_json(setup.directory.final / CONFIG))) is not None
        ):
            journal.warn(refused)
        recorder.saved(setup.directory.final.name)
    recorder.note(outcome="completed", exit_code=0, exit_reason=training.exit_reason)


def _save_result(setup: Setup, out: Path) -> None:
    """Write the result; every rank takes part in gathering the weights."""
    recipe, base, beside = setup.recipe, setup.base, setup.chat_files
    # One parameter at a time: the whole model never exists beside its shards.
    tensors = result_weights(setup.model, setup.strategy.sharding)
    if rank() > 0:
        # Gathering a parameter is a collective, which every rank has to reach.
        for _ in tensors:
            pass
    elif isinstance(recipe, LoraRecipe):
        save_adapter(
            tensors,
            base,
            recipe,
            out,
            tie_embeddings=recipe.train.tie_embeddings,
            base_fingerprint=setup.identities[0].fingerprint,
            beside=beside,
        )
    elif (layout := layout_of(base)) == HF:
        save_hf(base, tensors, out, others=beside)
    else:
        style = setup.data.prompt_source.part.rules.prompt_style
        others = beside | ({} if style is None else prompt_style_file(style))
        save_in_own_layout(base, tensors, out, layout=layout, others=others)


def run_rank(job_path: Path, terminal: TextIO) -> int:
    """Run one rank of a job, and return the exit code of its process.

    Args:
        job_path: the job's file.
        terminal: for messages of rank 0; libraries print to standard output and error.
    """
    stop = StopRequest()
    # Before anything else, so that a signal during the set-up is reported as one.
    stop.install()
    job = Job.read(job_path)
    if job.quiet:
        set_verbosity("quiet")
    state = job.directory.rank(rank())
    state.path.mkdir(exist_ok=True)
    _log_libraries()
    with using(job.plugin), _display(state, terminal) as display:
        try:
            start = None if job.start is None else read_metadata(Path(job.start))
            with Recorder(
                job.new_report(start),
                state,
                job.plan,
                began_s=job.began_s,
                start=start,
                show_warning=display.warning,
            ) as recorder:
                try:
                    run_job(job, start, stop, Journal(display, recorder))
                except BaseException as failure:
                    # At once: other ranks wait for this one.
                    _report_failure(stop.raised or failure, state)
                    raise
                finally:
                    _note_prediction(recorder, job, display)
        # Failures before the recorder exists, or of its last report. A reported one is only counted
        # once.
        except BaseException as exception:
            _report_failure(exception, state)
            return 1
        finally:
            # The mark asked the supervisor to wait for the report, which is complete now.
            state.completing.unlink(missing_ok=True)
    return 0


def _report_failure(exception: BaseException, state: RankDirectory) -> None:
    """Write how this rank failed, for the supervisor."""
    if state.error.exists():  # only the first failure counts: later ones follow from it
        return
    if rank() == 0:  # its report is not complete yet
        with suppress(OSError):
            state.completing.touch()
    error = _explain(exception)
    error.write(state)
    if error.kind in ("failed", "out_of_memory"):
        _log_traceback(exception, state.run.log)


def _note_prediction(recorder: Recorder, job: Job, display: Display) -> None:
    """Add the predicted memory of the measured step to the report."""
    # In rank 0, where everything is imported already, and at the end, when nothing waits for it.
    measured, resolved = recorder.report.step_memory, recorder.report.resolved
    if rank() > 0 or measured is None or resolved is None:
        return
    longest = resolved.longest_sample_tokens
    assert longest is not None
    recorder.end_phases()
    try:
        with display.phase("predicting memory", brief=True):
            predicted = predict_measured(
                job.base, job.beside, job.plan, measured, longest, resolved.heaviest_media
            )
    except Exception as error:  # the report is complete without it
        recorder.warn(f"memory was not predicted: {type(error).__name__}: {error}")
    else:
        recorder.note(step_memory=predicted)


def _log_libraries() -> None:
    """Send warnings and logs of libraries to standard error."""
    logging.captureWarnings(True)
    for name in list(logging.root.manager.loggerDict):
        # Some libraries write to the console themselves, beside the root logger.
        logging.getLogger(name).handlers.clear()
    # Without time stamps, so that lines equal to those of rank 0 can be recognised.
    time_stamp = "%(asctime)s " if rank() == 0 else ""
    logging.basicConfig(
        level=logging.WARNING, format=f"{time_stamp}%(name)s: %(message)s", force=True
    )


def _display(state: RankDirectory, terminal: TextIO) -> Display:
    """Display of this rank; only rank 0 writes to the terminal."""
    if rank() == 0:
        return Display(state.run.path, stream=terminal)
    return Display(state.path, stream=_Silence())


class _Silence(io.StringIO):
    """Discards the messages of ranks other than 0."""

    def write(self, text: str) -> int:
        return len(text)


def _log_traceback(exception: BaseException, log: Path) -> None:
    lines = traceback.format_exception(exception)
    if world_size() > 1:
        lines = [f"rank {rank()}:\n", *lines]
    with suppress(OSError), log.open("a", encoding="utf-8") as file:
        file.write(redacted("".join(lines)))


def _explain(exception: BaseException) -> RankError:
    """Describe the end of the run for the supervisor."""
    now = time.time()
    if isinstance(exception, UserError):
        return RankError(kind="user", message=str(exception), happened_at_s=now)
    if isinstance(exception, DamagedPart):
        file = f"{exception.file.parent.name}/{exception.file.name}"
        return RankError(kind="damaged", message=str(exception), happened_at_s=now, file=file)
    if isinstance(exception, Interrupted):
        return RankError(kind="interrupted", message=str(exception), happened_at_s=now)
    message = str(exception)
    if "Duplicate GPU detected" in message:  # from NCCL
        message = (
            "Two ranks have the same GPU. Start one process for each GPU, or show each a GPU of "
            f"its own: srun --gpus-per-task=1. ({message.strip().splitlines()[-1]})"
        )
        return RankError(kind="user", message=message, happened_at_s=now)
    if is_out_of_memory(exception):
        line = device_line(message)
        if line and not isinstance(exception, torch.OutOfMemoryError):
            message = f"{type(exception).__name__}: {line}"  # without advice on debugging kernels
        message = message or type(exception).__name__
        return RankError(kind="out_of_memory", message=message, happened_at_s=now)
    if isinstance(exception, NotFinite):
        return RankError(
            kind="not_finite",
            message=message,
            happened_at_s=now,
            remedy=exception.remedy,
            computed_from=exception.computed_from,
        )
    # This message is written for users; others need the name of the exception.
    if not isinstance(exception, SavingFailed):
        message = f"{type(exception).__name__}: {message}"
    if (place := place_in_plugin(exception)) is not None:
        message = f"{message} ({place})"
    return RankError(kind="failed", message=message, happened_at_s=now)


if __name__ == "__main__":
    _loading.close()
    # What was imported is never garbage: without this every full collection would look at all of
    # it.
    gc.freeze()
    gc.enable()
    # Libraries quote urls with keys in their warnings.
    sys.stdout, sys.stderr = map(redacted_output, (sys.stdout, sys.stderr))
    with os.fdopen(int(sys.argv[2]), "w") as _terminal:
        sys.exit(run_rank(Path(sys.argv[1]), _terminal))
