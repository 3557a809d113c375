"""One rank of a run: plan -> Trainer.fit -> measurements. The only place that wires it all.

The supervisor starts it as `python -m ftkit.train JOB.json ITS_PID TERMINAL`, with standard output
and error in a log from the first import on, and the terminal as an open file descriptor.
"""

import dataclasses
import importlib.util
import io
import logging
import math
import os
import random
import sys
import time
import traceback
from pathlib import Path
from typing import TextIO

from ftkit.process import die_with_parent

if __name__ == "__main__":  # before the slow imports: a supervisor may die at any moment
    die_with_parent(int(sys.argv[2]))

import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from torch import Tensor

from ftkit.adapter import check_adapter, save_adapter
from ftkit.base.base_model import BaseModel, open_base, save_hf
from ftkit.callbacks import (
    Interrupted,
    StepMeter,
    StepRecord,
    StopRequest,
    make_trainer,
    validation_loss,
)
from ftkit.data.files import Record
from ftkit.data.order import ElasticOrder
from ftkit.data.samples import DataSets, load_data, train_batches, validation_loader
from ftkit.decode import answer_greedily
from ftkit.errors import UserError
from ftkit.finetuner import FineTuner, base_learning_rate, compile_cpu_optimizer
from ftkit.job import Job, RankError
from ftkit.model import (
    LanguageModel,
    fill,
    flops_per_token,
    outline,
    parameter_count,
    trainable,
    trained_weights,
)
from ftkit.planning import DeepSpeedOptions, Plan, make_schedule, sample_budget
from ftkit.ranks import ERROR, rank_directory
from ftkit.recipe import LoraRecipe
from ftkit.recorder import FINAL, LOG, Recorder
from ftkit.report.display import Display
from ftkit.report.metrics import perplexity
from ftkit.report.report import DataCounts, ExactMatch, Example, Resolved
from ftkit.sharding import Sharding
from ftkit.strategy import (
    compute_dtype,
    make_device,
    make_plugins,
    make_strategy,
    parameter_dtype,
    rank,
)


def run(job: Job, stop: StopRequest, display: Display, recorder: Recorder) -> None:
    """Set up, train, evaluate, save; what stops it is raised.

    Args:
        job: what to do.
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
    base = open_base(job.base)
    max_seq_length = _max_seq_length(base, recipe.train.max_seq_length)
    with display.phase("reading data") as phase:
        data = load_data(
            recipe.data,
            base.tokenizer,
            max_seq_length,
            progress=lambda _, done, total: phase.advance(done, total),
        )
    recorder.note(data={split: DataCounts(**counts) for split, counts in data.counts.items()})
    module = _build(job, plan, base, data, max_seq_length, display, recorder)
    order = ElasticOrder(
        data.train.lengths,
        data.train.label_counts,
        seed=recipe.seed,
        global_batch_size=recipe.train.global_batch_size,
        micro_batch_size=plan.micro_batch_size,
        total_samples=sample_budget(recipe, len(data.train), module.schedule),
        rank=rank(),
        world_size=plan.world_size,
    )
    training = _Training(plan, module, data, base, stop, display, recorder)
    training.fit(order)
    if training.signal_number is not None:
        raise Interrupted(training.signal_number)
    if recipe.checkpoint.save and not base.random:
        recorder.enter("saving")
        with display.phase("saving the result"):
            _save(module, base, recipe.out_dir / FINAL)
        recorder.saved(FINAL)
    recorder.note(outcome="completed", exit_code=0, exit_reason=training.exit_reason)


def _warn(text: str, display: Display, recorder: Recorder) -> None:
    display.warning(text)
    recorder.warn(text)


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
    display: Display,
    recorder: Recorder,
) -> FineTuner:
    """The model, adapted as the recipe says, with its schedule; still without memory."""
    recipe = plan.recipe
    if isinstance(recipe, LoraRecipe) and recipe.checkpoint.save and not base.random:
        check_adapter(base)
    if isinstance(plan.options, DeepSpeedOptions) and plan.options.offload_optimizer:
        with display.phase("preparing DeepSpeed's CPU optimizer (compiled once, about a minute)"):
            compile_cpu_optimizer()
    schedule, notices = make_schedule(recipe, len(data.train), base_learning_rate(recipe))
    for notice in notices:
        _warn(notice, display, recorder)
    model = outline(base, recipe, parameter_dtype(plan), compute_dtype(plan))

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
                progress=phase.advance,
            )

    module = FineTuner(model, plan, schedule, load)
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


def _save(module: FineTuner, base: BaseModel, out: Path) -> None:
    recipe = module.plan.recipe
    assert module.sharding is not None
    tensors = trained_weights(module.model, module.sharding)
    if rank() > 0:
        for _ in tensors:  # every rank takes part in gathering
            pass
    elif isinstance(recipe, LoraRecipe):
        save_adapter(tensors, base, recipe, out)
    else:
        save_hf(base, tensors, out)


class _Training:
    """Training with its evaluations before, during and after it."""

    def __init__(
        self,
        plan: Plan,
        module: FineTuner,
        data: DataSets,
        base: BaseModel,
        stop: StopRequest,
        display: Display,
        recorder: Recorder,
    ) -> None:
        self.plan, self.module, self.data, self.base = plan, module, data, base
        self.stop, self.display, self.recorder = stop, display, recorder
        self.recipe, self.evaluation = plan.recipe, plan.recipe.eval
        self.signal_number: int | None = None
        """What ended training before its time, if a signal did."""
        self.exit_reason = ""
        self.validated_at: int | None = None
        self.example = _example_index(self.evaluation.evaluate_example, data, self.recipe.seed)

    def fit(self, order: ElasticOrder) -> None:
        """Train to the end of the schedule, the time limit or a signal."""
        device = make_device(self.plan)
        self.order = order
        self.total_steps = order.total_steps
        self.trainer = make_trainer(
            self.plan,
            accelerator=self.plan.accelerator,
            devices=self.plan.devices,
            num_nodes=self.recipe.num_nodes,
            strategy=make_strategy(self.plan),
            plugins=make_plugins(self.plan),
            logger=_loggers(self.plan),
            log_every_n_steps=1,
            default_root_dir=self.recipe.out_dir,
            callbacks=[
                StepMeter(
                    at_start=self._at_start,
                    on_step=self._on_step,
                    between_steps=self._between_steps,
                    at_end=self._at_end,
                )
            ],
        )
        batches = train_batches(
            self.data.train,
            order,
            start_step=0,
            end_step=order.total_steps,
            num_workers=self.recipe.data["init_args"].get("num_workers", 0),
            pin_memory=device.type == "cuda",
        )
        self.stop.wait_for_step = True
        with self.display.training(order.total_steps) as self.progress:
            self.trainer.fit(self.module, batches)
        self.stop.wait_for_step = False

    def _at_start(self) -> None:
        self.stop.install()  # Lightning has taken SIGTERM over
        wanted = self.evaluation.initial_validation
        self._evaluate(step=0, validation=wanted, exact_match=True, example=wanted)
        self.recorder.enter("training")
        self.started = time.perf_counter()
        if signal_number := self.stop.requested():
            self.trainer.should_stop = True
            self.signal_number = signal_number

    def _on_step(self, record: StepRecord) -> None:
        several = self.plan.world_size > 1
        self.recorder.on_step(record, self.order.imbalance(record.step - 1) if several else None)
        if not math.isfinite(record.loss):
            raise NonFiniteLoss(
                f"The loss of step {record.step} is {record.loss}. Try a lower learning rate, "
                "--train.max_norm 1.0, or --precision 32-true."
            )
        self.progress.step(
            record.step,
            loss=record.loss,
            lr=record.learning_rate,
            tokens_per_s=record.tokens / record.duration_s,
            epoch=self.recorder.epochs,
        )
        if record.step % self.recipe.train.log_interval == 0:
            values = {
                "loss": record.loss,
                "learning_rate": record.learning_rate,
                "gradient_norm": record.gradient_norm,
                "tokens_per_s": record.tokens / record.duration_s,
            }
            self._log(values, record.step)

    def _between_steps(self, step: int) -> bool:
        """Validate if it is time; whether to end training here."""
        interval = self.evaluation.interval
        is_due = interval and step % interval == 0 and step < self.total_steps
        if is_due and not self.stop.requested():
            self._evaluate(step, validation=True, exact_match=False, example=True)
            self.recorder.enter("training")
        if signal_number := self.stop.requested():
            self.signal_number = signal_number
        elif step == self.total_steps:
            self.exit_reason = self._reason()
        elif self._out_of_time():
            self.exit_reason = f"train.max_time of {self.recipe.train.max_time:g} s reached"
        else:
            return False
        return True

    def _out_of_time(self) -> bool:
        """Whether the time limit is reached, by the clock of rank 0."""
        limit_s = self.recipe.train.max_time
        if limit_s is None:
            return False
        return self.trainer.strategy.broadcast(time.perf_counter() - self.started >= limit_s)

    def _at_end(self) -> None:
        if self.signal_number is None:
            wanted = self.evaluation.final_validation
            step = self.recorder.steps
            self._evaluate(step, validation=wanted, exact_match=True, example=wanted)
            self.signal_number = self.stop.requested() or None

    def _reason(self) -> str:
        train = self.recipe.train
        if self.total_steps == train.max_steps:
            return f"train.max_steps of {train.max_steps} reached"
        return f"all {train.epochs} epochs done" if train.epochs != 1 else "the epoch is done"

    def _evaluate(self, step: int, *, validation: bool, exact_match: bool, example: bool) -> None:
        """Validation loss, exact match and sample answer, as far as wanted and asked for."""
        if not len(self.data.val):
            return
        self.recorder.enter("validation")
        self.module.eval()
        if validation:
            self._validate(step)
        if exact_match and self.evaluation.exact_match:
            self._count_matches(step)
        if example and self.evaluation.max_new_tokens:
            self._show_example(step)
        assert self.module.sharding is not None
        self.module.sharding.after_evaluation(self.module.model)
        self.module.train()

    def _validate(self, step: int) -> None:
        limit = self.evaluation.max_iters * self.recipe.train.global_batch_size
        batches = validation_loader(
            self.data.val,
            limit=limit,
            micro_batch_size=self.plan.micro_batch_size,
            rank=rank(),
            world_size=self.plan.world_size,
        )
        with self.display.phase("validating", brief=True) as phase:
            loss = validation_loss(
                self.trainer, self.module, batches, self.stop, progress=phase.advance
            )
        if loss is None:
            return
        self.recorder.on_validation(step, loss)
        self._log({"val_loss": loss}, step)
        self.display.message(
            f"step {step}: validation loss {loss:.4f}, perplexity {perplexity(loss):.3g}"
        )

    def _count_matches(self, step: int) -> None:
        indices = range(min(self.evaluation.exact_match, len(self.data.val)))
        expected = [self.data.val.records[i]["output"].strip() for i in indices]
        longest = max(len(self.base.tokenizer.encode(text)) for text in expected)
        right = 0
        title = f"answering {len(indices)} validation records"
        with self.display.phase(title, brief=True) as phase:
            size = max(1, self.plan.micro_batch_size)
            for start in range(0, len(indices), size):
                if self.stop.requested():
                    return
                chunk = indices[start : start + size]
                answers = self._answer(list(chunk), max_new_tokens=longest + 1)
                right += sum(a == expected[i] for a, i in zip(answers, chunk, strict=True))
                phase.advance(start + len(chunk), len(indices))
        share = right / len(indices)
        when = "before" if step == 0 else "after"
        self.display.message(
            f"exact match {when} training: {share:.1%} of {len(indices)} held-out records"
        )
        known = self.recorder.report.exact_match or ExactMatch(samples=len(indices))
        self.recorder.note(
            exact_match=dataclasses.replace(known, before=share)
            if step == 0
            else dataclasses.replace(known, after=share)
        )

    def _show_example(self, step: int) -> None:
        record = self.data.val.records[self.example]
        with self.display.phase("answering an example", brief=True):
            (answer,) = self._answer([self.example], self.evaluation.max_new_tokens or 0)
        asked = " ".join(filter(None, (record["instruction"], record.get("input"))))
        self.display.message(f"sample: {asked}\nanswer: {answer}")
        known = self.recorder.report.examples or [
            Example(
                instruction=record["instruction"],
                input=record.get("input", ""),
                expected=record["output"],
            )
        ]
        example = (
            dataclasses.replace(known[0], before=answer)
            if step == 0
            else dataclasses.replace(known[0], after=answer)
        )
        self.recorder.note(examples=[example])

    def _answer(self, indices: list[int], max_new_tokens: int) -> list[str]:
        tokenizer = self.base.tokenizer
        assert tokenizer.eos_id is not None
        prompts = [self._prompt(self.data.val.records[i]) for i in indices]
        with self.trainer.precision_plugin.forward_context():
            answers = answer_greedily(
                self.module.model,
                prompts,
                eos_id=tokenizer.eos_id,
                max_new_tokens=max_new_tokens,
            )
        return [tokenizer.decode(answer).strip() for answer in answers]

    def _prompt(self, record: Record) -> Tensor:
        text = self.data.prompt_style.apply(prompt=record["instruction"], **record)
        return self.base.tokenizer.encode(text)

    def _log(self, values: dict[str, float], step: int) -> None:
        if rank() > 0:
            return
        for logger in self.trainer.loggers:
            logger.log_metrics(values, step=step)


def _example_index(choice: str | int, data: DataSets, seed: int) -> int:
    if choice == "random":
        return random.Random(seed).randrange(max(1, len(data.val)))
    index = 0 if choice == "first" else int(choice)
    if index and index >= len(data.val):
        raise UserError(
            f"eval.evaluate_example is {index}, but there are {len(data.val)} validation records "
            "(counted from 0). Try --eval.evaluate_example first."
        )
    return index


def _loggers(plan: Plan) -> list[Logger]:
    """The loggers beside metrics.csv."""
    recipe = plan.recipe
    if recipe.logger_name == "tensorboard":
        return [TensorBoardLogger(recipe.out_dir, name="tensorboard", version="")]
    if recipe.logger_name == "wandb":
        if importlib.util.find_spec("wandb") is None:
            raise UserError(
                "logger_name is wandb, but W&B is not installed. Try pip install wandb, or "
                "--logger_name tensorboard."
            )
        return [
            WandbLogger(
                save_dir=recipe.out_dir,
                project=recipe.log.project,
                name=recipe.log.run,
                group=recipe.log.group,
            )
        ]
    return []


_HOST_MEMORY = "DefaultCPUAllocator: can't allocate memory"
"""In the RuntimeError of torch when host memory is exhausted."""


class NonFiniteLoss(Exception):
    """Training cannot go on: the loss is not a number any more."""


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
            with Recorder(job, job.plan, make_device(job.plan), state, rank()) as recorder:
                run(job, stop, display, recorder)
        except BaseException as exception:
            error = _explain(exception)
            error.write(state / ERROR)
            if error.kind in ("failed", "out_of_memory"):
                _log_traceback(exception, job)
            return 1
    return 0


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
    with (job.recipe.out_dir / LOG).open("a", encoding="utf-8") as file:
        file.write("".join(lines))


def _explain(exception: BaseException) -> RankError:
    """What ended the run, for the supervisor."""
    now = time.time()
    if isinstance(exception, UserError):
        return RankError(kind="user", message=str(exception), happened_at_s=now)
    if isinstance(exception, Interrupted):
        return RankError(kind="interrupted", message=str(exception), happened_at_s=now)
    message = str(exception)
    if isinstance(exception, torch.OutOfMemoryError | MemoryError) or _HOST_MEMORY in message:
        message = message or type(exception).__name__
        return RankError(kind="out_of_memory", message=message, happened_at_s=now)
    if not isinstance(exception, NonFiniteLoss):
        message = f"{type(exception).__name__}: {message}"
    return RankError(kind="failed", message=message, happened_at_s=now)


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[3]), "w") as _terminal:
        sys.exit(run_rank(Path(sys.argv[1]), _terminal))
