"""The training loop: its steps, what comes between them, and how it ends."""

import math
import time
from contextlib import nullcontext
from enum import IntEnum

from ftkit.data.samples.loader import train_batches
from ftkit.data.samples.sampler import ElasticOrder
from ftkit.evaluation.scoring.metrics import Scoring
from ftkit.evaluation.validation import EvaluatedWeights
from ftkit.planning.meter import MemoryMeter, steps_to_measure
from ftkit.runs.report.step_record import StepRecord
from ftkit.strategies.distributed import broadcast_ints
from ftkit.training.checkpointing import Checkpointing
from ftkit.training.evaluator import Evaluator
from ftkit.training.journal import Journal
from ftkit.training.loggers import Loggers
from ftkit.training.setup import Setup
from ftkit.training.signals import StopRequest
from ftkit.training.step import TrainStep


class _Occasion(IntEnum):
    """Why something is to be done after a step, as rank 0 sees it."""

    NONE = 0
    OUT_OF_PATIENCE = 1
    OUT_OF_TIME = 2
    SESSION_ENDS = 3
    CHECKPOINT_OVERDUE = 4


class NonFiniteLoss(Exception):
    """Training cannot go on: the loss is not a number any more."""


class Training:
    """Training with its evaluations before, during and after it."""

    def __init__(
        self,
        setup: Setup,
        order: ElasticOrder,
        scoring: Scoring,
        stop: StopRequest,
        journal: Journal,
        loggers: Loggers,
        checkpointing: Checkpointing | None,
        weights: EvaluatedWeights,
    ) -> None:
        """Prepare.

        Args:
            setup: what is trained, in place on its device.
            order: the samples of its steps.
            scoring: what is asked of answers before and after it.
            stop: the user's wish to end.
            journal: where messages and measurements go.
            loggers: beside metrics.csv.
            checkpointing: saves the state of training; None: nothing is saved.
            weights: what is evaluated, and what the model has in the end.
        """
        self._setup, self._order, self._stop = setup, order, stop
        self._display, self._recorder = journal.display, journal.recorder
        self._loggers, self._checkpointing = loggers, checkpointing
        self._recipe, self._start = setup.job.recipe, setup.start
        self._stop_after = setup.job.stop_after
        self._weights = weights
        self._evaluator = Evaluator(setup, scoring, stop, journal, loggers, weights)
        self._meter = MemoryMeter(
            setup.strategy,
            setup.model,
            # The meter cannot see into compiled graphs.
            set() if self._recipe.compile else steps_to_measure(order),
            self._recorder.device_peak,
            self._recorder.on_step_memory,
        )
        self.signal_number: int | None = None
        """What ended training before its time, if a signal did."""
        self.exit_reason = ""
        self.stopped = False
        """Whether it ended by stop_after, and goes on in another session."""

    def run(self) -> None:
        """Train to the end of the schedule, of the session or of the time limit, or to a signal."""
        try:
            with self._display.training(
                self._order.total_steps, self._start.step
            ) as self._progress:
                self._run()
        except BaseException as exception:
            self._meter.on_exception(exception)
            self._loggers.finalize("failed")
            raise
        self._loggers.finalize("success")
        self._stop.wait_for_step = False

    def _run(self) -> None:
        first, end = self._start.step, self._order.total_steps
        if first == end:  # stopped between the last step and the end
            self.exit_reason = self._reason()
        else:
            self._begin()
        copies = self._checkpointing.before_update if self._checkpointing else lambda: None
        train_step = TrainStep(self._setup, self._meter, copies)
        batches = iter(
            train_batches(
                self._setup.data.train,
                self._order,
                start_step=first,
                end_step=end,
                pin_memory=self._setup.plan.kind.pins_host_memory,
            )
        )
        ends = self.signal_number is not None or bool(self.exit_reason)
        for step in range(first, end):
            if ends:
                break
            record = train_step.run(step, batches)
            self._tell(record)
            ends = self._between_steps(record.step)
        self._end()

    def _begin(self) -> None:
        """What comes before the first step of a session."""
        self._stop.wait_for_step = True
        step, settings = self._start.step, self._recipe.eval
        if step == 0:
            wanted = settings.initial_validation
            self._evaluator.evaluate(0, validation=wanted, scores=True, example=wanted)
        elif self._validation_due(step) and not self._start.is_validated:
            # A signal came first: what was due then is done now.
            self._evaluator.evaluate(step, validation=True, scores=False, example=True)
            loss = self._evaluator.validation_loss(step)
            if self._checkpointing is not None and loss is not None:
                self._checkpointing.amend(step, loss)
        self.signal_number = self._stop.requested() or None
        (occasion,) = broadcast_ints(self._occasion())
        if occasion == _Occasion.OUT_OF_PATIENCE:  # the session before ended before its result
            self.exit_reason = self._patience_reason()
        self._recorder.enter("training")  # whoever reads this knows that the step will be finished

    def _tell(self, record: StepRecord) -> None:
        """Report, show and log a step."""
        several, mixed = self._setup.plan.world_size > 1, len(self._setup.data.parts) > 1
        self._recorder.on_step(
            record,
            self._order.imbalance(record.step - 1) if several else None,
            follows_memory=self._meter.follows(record.step - 1),
            of_sources=self._order.sources(record.step - 1).tolist() if mixed else (),
        )
        if not math.isfinite(record.loss):
            if record.step == 1:  # computed with the weights as they came
                raise NonFiniteLoss(
                    f"The loss of step 1 is {record.loss}, before anything was learned: the base "
                    "model's weights hold values that are no finite numbers, or are too large for "
                    f"{self._setup.plan.precision}. Try --precision 32-true, or fetch the base "
                    "model again."
                )
            raise NonFiniteLoss(
                f"The loss of step {record.step} is {record.loss}. Try a lower learning rate, "
                "--train.max_norm 1.0, or --precision 32-true."
            )
        tokens_per_s = record.tokens / record.duration_s
        self._progress.step(
            record.step,
            loss=record.loss,
            lr=record.learning_rate,
            tokens_per_s=tokens_per_s,
            epoch=self._recorder.epochs,
        )
        if record.step % self._recipe.train.log_interval == 0:
            values = {
                "loss": record.loss,
                "learning_rate": record.learning_rate,
                "gradient_norm": record.gradient_norm,
                "tokens_per_s": tokens_per_s,
            }
            if record.router_aux_loss is not None:
                values["router_aux_loss"] = record.router_aux_loss
            self._loggers.log(values | self._recorder.system.newest(), record.step)

    def _between_steps(self, step: int) -> bool:
        """Validate and save if it is time; whether to end training here."""
        if self._validation_due(step) and not self._stop.requested():
            self._evaluator.evaluate(step, validation=True, scores=False, example=True)
            self._recorder.enter("training")
        signal_number, occasion, is_candidate = broadcast_ints(
            self._stop.signal_number or 0, self._occasion(), self._is_candidate(step)
        )
        ends = True
        if signal_number:
            self.signal_number = signal_number
        elif step == self._order.total_steps:
            self.exit_reason = self._reason()
        elif occasion == _Occasion.OUT_OF_PATIENCE:
            self.exit_reason = self._patience_reason()
        elif occasion == _Occasion.OUT_OF_TIME:
            self.exit_reason = f"train.max_time of {self._recipe.train.max_time:g} s reached"
        elif occasion == _Occasion.SESSION_ENDS or self._session_ends(step):
            self.stopped = True
            self.exit_reason = f"{self._stop_after} reached"
        else:
            ends = False
        if self._checkpointing is not None:
            overdue = occasion == _Occasion.CHECKPOINT_OVERDUE
            if ends or overdue or is_candidate or self._checkpointing.due(step):
                self._save(step, wait=bool(signal_number) or self.stopped)
            self._checkpointing.report()
        return ends

    def _validation_due(self, step: int) -> bool:
        """Whether there is a validation after a step that is not the last."""
        interval = self._recipe.eval.interval
        return bool(interval) and step % interval == 0 and step < self._order.total_steps

    def _is_candidate(self, step: int) -> bool:
        """Whether the state after a step may be one of the best to be kept."""
        settings, known = self._recipe.checkpoint, self._recorder.report.loss
        if self._evaluator.validation_loss(step) is None:
            return False
        is_best = known is not None and known.validation_best_step == step
        return settings.keep_best > 0 or (settings.result == "best" and is_best)

    def _occasion(self) -> _Occasion:
        """What the validations and clocks of this rank ask for."""
        loss = self._recorder.report.loss
        if loss is not None and loss.has_exhausted(self._recipe.eval.patience):
            return _Occasion.OUT_OF_PATIENCE
        max_time, after = self._recipe.train.max_time, self._stop_after
        if max_time is not None and self._recorder.training_s >= max_time:
            return _Occasion.OUT_OF_TIME
        since_command_s = time.time() - self._setup.job.started_at_s
        if after and after.seconds and since_command_s >= after.seconds:
            return _Occasion.SESSION_ENDS
        if self._checkpointing is not None and self._checkpointing.overdue():
            return _Occasion.CHECKPOINT_OVERDUE
        return _Occasion.NONE

    def _session_ends(self, step: int) -> bool:
        after = self._stop_after
        return after is not None and step - self._start.step == after.steps

    def _save(self, step: int, *, wait: bool) -> None:
        assert self._checkpointing is not None
        self._recorder.enter("saving")
        phase = self._display.phase("saving a checkpoint", brief=True) if wait else nullcontext()
        with phase:
            loss = self._evaluator.validation_loss(step)
            self._checkpointing.save(step, validation_loss=loss, wait=wait)
        self._recorder.enter("training")

    def _end(self) -> None:
        """What comes after the last step of a session."""
        if self.signal_number is None and not self.stopped:
            wanted = self._recipe.eval.final_validation
            step = self._recorder.steps
            # An earlier session may have come as far as this.
            known = step == self._start.step and self._start.is_validated
            known = known or self._evaluator.validation_loss(step) is not None
            validates = wanted and not known
            if self._checkpointing is not None and self._recipe.checkpoint.result == "best":
                self._evaluator.evaluate(step, validation=validates, scores=False, example=False)
                validates = False
                if not self._stop.requested():
                    self._checkpointing.take_best(step, self._evaluator.validation_loss(step))
            self._weights.keep()
            self._evaluator.evaluate(step, validation=validates, scores=True, example=wanted)
            self.signal_number = self._stop.requested() or None
            if self._checkpointing is not None:
                self._recorder.enter("saving")
                self._checkpointing.amend(step, self._evaluator.validation_loss(step))
        elif self._checkpointing is not None:
            self._checkpointing.finish()
        if self._checkpointing is not None:
            self._checkpointing.release()

    def _patience_reason(self) -> str:
        loss = self._recorder.report.loss
        assert loss is not None
        return (
            f"eval.patience of {self._recipe.eval.patience} reached: no validation loss below "
            f"{loss.validation_best or math.nan:.4f}, of step {loss.validation_best_step}"
        )

    def _reason(self) -> str:
        train = self._recipe.train
        if self._order.total_steps == train.max_steps:
            return f"train.max_steps of {train.max_steps} reached"
        return f"all {train.epochs} epochs done" if train.epochs != 1 else "the epoch is done"
