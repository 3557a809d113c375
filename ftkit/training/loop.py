"""The training loop, with evaluations before, during and after it."""

import dataclasses
import math
import random
import time
from contextlib import nullcontext
from enum import IntEnum

from lightning.pytorch.loggers import Logger

from ftkit.checkpoint.shards import StoredState
from ftkit.config.plan import Plan
from ftkit.console.display import Display
from ftkit.data.dataset import DataSets
from ftkit.data.loader import train_batches, validation_loader
from ftkit.data.sampler import ElasticOrder
from ftkit.errors import UserError
from ftkit.memory.meter import MemoryMeter, steps_to_measure
from ftkit.pretrained.base_model import BaseModel
from ftkit.report.metrics import perplexity
from ftkit.report.report import ExactMatch, Example
from ftkit.runs.job import StopAfter
from ftkit.strategies.distributed import make_device, of_rank_0, rank
from ftkit.strategies.lightning import make_plugins, make_strategy
from ftkit.training.callbacks import StepMeter, StepRecord, make_trainer
from ftkit.training.checkpointing import Checkpointing
from ftkit.training.evaluation import answer_records, exact_matches, validation_loss
from ftkit.training.module import FineTuner
from ftkit.training.recorder import Recorder
from ftkit.training.signals import StopRequest


class _Occasion(IntEnum):
    """Why something is to be done after a step, by the clock of rank 0."""

    NONE = 0
    OUT_OF_TIME = 1
    SESSION_ENDS = 2
    CHECKPOINT_OVERDUE = 3


class NonFiniteLoss(Exception):
    """Training cannot go on: the loss is not a number any more."""


class Training:
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
        *,
        checkpointing: Checkpointing | None,
        stored: StoredState | None,
        start_is_validated: bool,
        stop_after: StopAfter | None,
        command_started_at_s: float,
        loggers: list[Logger],
    ) -> None:
        """Prepare.

        Args:
            plan: what to run.
            module: what is trained.
            data: what it is trained on.
            base: its tokenizer is used.
            stop: the user's wish to end.
            display: where messages and progress go.
            recorder: where measurements go.
            checkpointing: saves the state of training; None: nothing is saved.
            stored: the state of training that this run continues from.
            start_is_validated: whether the validation loss of this state is known.
            stop_after: when this session ends.
            command_started_at_s: what a time in it counts from, in seconds since the epoch.
            loggers: beside metrics.csv.
        """
        self.checkpointing, self._stored = checkpointing, stored
        self._start_is_validated = start_is_validated
        self._stop_after, self._command_started_at_s = stop_after, command_started_at_s
        self._loggers = loggers
        self.plan, self.module, self.data, self.base = plan, module, data, base
        self.stop, self.display, self.recorder = stop, display, recorder
        self.recipe, self.evaluation = plan.recipe, plan.recipe.eval
        self.signal_number: int | None = None
        """What ended training before its time, if a signal did."""
        self.exit_reason = ""
        self.stopped = False
        """Whether it ended by stop_after, and goes on in another session."""
        self._validation: tuple[int, float] | None = None
        """The newest validation: step and loss."""
        self.validated_at: int | None = None
        self.example = _example_index(self.evaluation.evaluate_example, data, self.recipe.seed)

    def fit(self, order: ElasticOrder) -> None:
        """Train to the end of the schedule, of the session or of the time limit, or to a signal."""
        device = make_device(self.plan)
        self.order = order
        self.total_steps = order.total_steps
        self._followed = steps_to_measure(order)
        self.trainer = make_trainer(
            self.plan,
            accelerator=self.plan.accelerator,
            devices=self.plan.devices,
            num_nodes=self.recipe.num_nodes,
            strategy=make_strategy(self.plan, self.module),
            plugins=make_plugins(self.plan),
            logger=self._loggers,
            log_every_n_steps=1,
            default_root_dir=self.recipe.out_dir,
            callbacks=[
                MemoryMeter(
                    self._followed,
                    device,
                    self.recorder.device_peak,
                    self.recorder.on_step_memory,
                ),
                StepMeter(
                    at_start=self._at_start,
                    on_step=self._on_step,
                    between_steps=self._between_steps,
                    at_end=self._at_end,
                    seed=self.recipe.seed,
                ),
            ],
        )
        batches = train_batches(
            self.data.train,
            order,
            start_step=order.start_step,
            end_step=order.total_steps,
            pin_memory=device.type == "cuda",
        )
        self.module.on_ready = self._on_ready
        with self.display.training(order.total_steps) as self.progress:
            self.trainer.fit(self.module, batches)
        self.stop.wait_for_step = False

    def _on_ready(self) -> None:
        """Model and optimizer are in place: continue from a checkpoint, if there is one."""
        if self.checkpointing is not None:
            self.checkpointing.attach(self.trainer, self._stored)
        self._stored = None
        start = self.module.start_step
        done = self.trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
        done.optimizer.step.total.ready = done.optimizer.step.total.completed = start
        if start == self.total_steps:  # stopped between the last step and the end
            self.exit_reason = self._reason()
            self._at_end()

    def _at_start(self) -> None:
        self.stop.install()  # Lightning has taken SIGTERM over
        self.stop.wait_for_step = True
        step = self.module.start_step
        if step == 0:
            wanted = self.evaluation.initial_validation
            self._evaluate(step=0, validation=wanted, exact_match=True, example=wanted)
        elif self._validation_due(step) and not self._start_is_validated:
            # A signal came first: what was due then is done now.
            self._evaluate(step, validation=True, exact_match=False, example=True)
            if self.checkpointing is not None and self._validated(step) is not None:
                self.checkpointing.amend(step, self._validated(step))
        self.recorder.enter("training")
        if signal_number := self.stop.requested():
            self.trainer.should_stop = True
            self.signal_number = signal_number

    def _on_step(self, record: StepRecord) -> None:
        several = self.plan.world_size > 1
        self.recorder.on_step(
            record,
            self.order.imbalance(record.step - 1) if several else None,
            follows_memory=record.step - 1 in self._followed,
        )
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
        """Validate and save if it is time; whether to end training here."""
        if self._validation_due(step) and not self.stop.requested():
            self._evaluate(step, validation=True, exact_match=False, example=True)
            self.recorder.enter("training")
        signal_number, occasion = divmod(of_rank_0(self._wishes()), len(_Occasion))
        ends = True
        if signal_number:
            self.signal_number = signal_number
        elif step == self.total_steps:
            self.exit_reason = self._reason()
        elif occasion == _Occasion.OUT_OF_TIME:
            self.exit_reason = f"train.max_time of {self.recipe.train.max_time:g} s reached"
        elif occasion == _Occasion.SESSION_ENDS or self._session_ends(step):
            self.stopped = True
            self.exit_reason = f"{self._stop_after} reached"
        else:
            ends = False
        if self.checkpointing is not None:
            keeps_best = self.recipe.checkpoint.keep_best and self._validated(step) is not None
            overdue = occasion == _Occasion.CHECKPOINT_OVERDUE
            if ends or overdue or keeps_best or self.checkpointing.due(step):
                self._save(step, wait=bool(signal_number) or self.stopped)
            self.checkpointing.report()
        return ends

    def _validation_due(self, step: int) -> bool:
        """Whether there is a validation after a step that is not the last."""
        interval = self.evaluation.interval
        return bool(interval) and step % interval == 0 and step < self.total_steps

    def _wishes(self) -> int:
        """What this rank's signals and clocks ask for, as one number: a signal and an occasion."""
        occasion = _Occasion.NONE
        max_time, after = self.recipe.train.max_time, self._stop_after
        if max_time is not None and self.recorder.training_s >= max_time:
            occasion = _Occasion.OUT_OF_TIME
        elif after and after.seconds and time.time() - self._command_started_at_s >= after.seconds:
            occasion = _Occasion.SESSION_ENDS
        elif self.checkpointing is not None and self.checkpointing.overdue():
            occasion = _Occasion.CHECKPOINT_OVERDUE
        return (self.stop.signal_number or 0) * len(_Occasion) + occasion

    def _session_ends(self, step: int) -> bool:
        after = self._stop_after
        return after is not None and step - self.module.start_step == after.steps

    def _save(self, step: int, *, wait: bool) -> None:
        assert self.checkpointing is not None
        self.recorder.enter("saving")
        title = "saving a checkpoint" if wait else None
        with self.display.phase(title, brief=True) if title else nullcontext():
            self.checkpointing.save(step, validation_loss=self._validated(step), wait=wait)
        self.recorder.enter("training")

    def _validated(self, step: int) -> float | None:
        """The validation loss of this very step, if there was a validation."""
        known = self._validation
        return known[1] if known is not None and known[0] == step else None

    def _at_end(self) -> None:
        if self.signal_number is None and not self.stopped:
            wanted = self.evaluation.final_validation
            step = self.recorder.steps
            # An earlier session may have come as far as this.
            known = step == self.module.start_step and self._start_is_validated
            self._evaluate(step, validation=wanted and not known, exact_match=True, example=wanted)
            self.signal_number = self.stop.requested() or None
            if self.checkpointing is not None:
                self.recorder.enter("saving")
                self.checkpointing.amend(step, self._validated(step))
        elif self.checkpointing is not None:
            self.checkpointing.finish()
        if self.checkpointing is not None:
            self.checkpointing.release()

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
        self.module.sharding.reshard(self.module.model)
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
                self.module.model,
                batches,
                self.module.device,
                context=self.trainer.precision_plugin.forward_context,
                stopped=self.stop.requested,
                progress=phase.advance,
            )
        if loss is None:
            return
        self._validation = step, loss
        self.recorder.on_validation(step, loss)
        self._log({"val_loss": loss}, step)
        self.display.message(
            f"step {step}: validation loss {loss:.4f}, perplexity {perplexity(loss):.3g}"
        )

    def _count_matches(self, step: int) -> None:
        records = self.data.val.records[: self.evaluation.exact_match]
        title = f"answering {len(records)} validation records"
        with self.display.phase(title, brief=True) as phase:
            share = exact_matches(
                self.module.model,
                self.base.tokenizer,
                self.data.prompt_style,
                records,
                batch_size=self.plan.micro_batch_size,
                context=self.trainer.precision_plugin.forward_context,
                stopped=self.stop.requested,
                progress=phase.advance,
            )
        if share is None:
            return
        when = "before" if step == 0 else "after"
        self.display.message(
            f"exact match {when} training: {share:.1%} of {len(records)} held-out records"
        )
        known = self.recorder.report.exact_match or ExactMatch(samples=len(records))
        self.recorder.note(
            exact_match=dataclasses.replace(known, before=share)
            if step == 0
            else dataclasses.replace(known, after=share)
        )

    def _show_example(self, step: int) -> None:
        record = self.data.val.records[self.example]
        with self.display.phase("answering an example", brief=True):
            (answer,) = answer_records(
                self.module.model,
                self.base.tokenizer,
                self.data.prompt_style,
                [record],
                max_new_tokens=self.evaluation.max_new_tokens or 0,
                context=self.trainer.precision_plugin.forward_context,
            )
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

    def _log(self, values: dict[str, float], step: int) -> None:
        if rank() > 0:
            return
        for logger in self.trainer.loggers:
            try:
                logger.log_metrics(values, step=step)
            except (OSError, ValueError) as error:  # TensorBoard: ValueError from OSError
                cause = error.__context__ or error
                if not isinstance(cause, OSError):
                    raise
                self.trainer.loggers = [kept for kept in self.trainer.loggers if kept is not logger]
                text = (
                    f"{self.recipe.logger_name} gets no values any more ({cause.strerror}); "
                    "metrics.csv has all of them"
                )
                self.display.warning(text)
                self.recorder.warn(text)


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
