"""The training loop: steps, validations and saves between them, and how training ends."""

import gc
import math
import signal
import time
from contextlib import nullcontext
from enum import IntEnum
from types import FrameType

from ftkit.checkpoint.state import capture
from ftkit.data.media import Coming
from ftkit.data.samples.loader import train_batches
from ftkit.errors import EXIT_BY_SIGNAL
from ftkit.objectives.step_loss import StepLoss
from ftkit.planning.meter import MemoryMeter, steps_to_measure
from ftkit.runs.job import StopAfter
from ftkit.runs.report.meters import StepRecord
from ftkit.strategies.distributed import broadcast_ints, max_over_ranks, rank
from ftkit.training.callbacks import Callbacks
from ftkit.training.checkpointing import Checkpointing
from ftkit.training.evaluator import Evaluator
from ftkit.training.finite import (
    NotFinite,
    diverged,
    first_not_finite,
    kept_numbers,
    own_weights,
)
from ftkit.training.journal import Journal
from ftkit.training.loggers import Loggers
from ftkit.training.setup import Setup
from ftkit.training.step import TrainStep


class Interrupted(BaseException):
    """A signal ended the run where there is no optimizer step to finish."""

    def __init__(self, signal_number: int) -> None:
        self.signal_number = signal_number
        super().__init__(signal.Signals(signal_number).name)


class StopRequest:
    """Handles signals that ask the run to end.

    During training a signal only sets a flag, and the run ends after the current optimizer step.
    At any other time it raises `Interrupted` at once.
    """

    SIGNALS = tuple(EXIT_BY_SIGNAL)

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.wait_for_step = False
        self.raised: Interrupted | None = None
        """The exception that was raised; libraries may have turned it into one of their own."""

    def requested(self) -> int:
        """Number of the signal that asks to end, or 0, equal on all ranks; every rank calls this.

        The supervisor passes a signal to all ranks, but not at the same moment, so rank 0 decides.
        """
        (number,) = broadcast_ints(self.signal_number or 0)
        return number

    def install(self) -> None:
        """Handle the signals of this process."""
        for number in self.SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.signal_number = number
        if not self.wait_for_step:
            self.raised = Interrupted(number)
            raise self.raised


class LoopEvent(IntEnum):
    """Event after a step, as rank 0 sees it."""

    NONE = 0
    OUT_OF_TIME = 1
    SESSION_ENDS = 2
    CHECKPOINT_OVERDUE = 3


class Training:
    """Training with its evaluations before, during and after it."""

    def __init__(
        self,
        setup: Setup,
        evaluator: Evaluator,
        checkpointing: Checkpointing | None,
        stop: StopRequest,
        journal: Journal,
        loggers: Loggers,
        callbacks: Callbacks,
        *,
        began_s: float,
        stop_after: StopAfter | None,
    ) -> None:
        """Prepare training.

        Args:
            setup: of this rank.
            evaluator: for validations and scores.
            checkpointing: saves the training state; None: nothing is saved.
            stop: signals that ask to end.
            journal: for messages and measurements.
            loggers: beside metrics.csv.
            callbacks: called at its events.
            began_s: when the command started, by `time.monotonic`.
            stop_after: when this session ends, if before the end of training.
        """
        self._setup, self._recipe, self._start = setup, setup.recipe, setup.start
        self._order, self._evaluator, self._checkpointing = setup.order, evaluator, checkpointing
        self._stop, self._loggers, self._callbacks = stop, loggers, callbacks
        self._display, self._recorder = journal.display, journal.recorder
        self._recorded = None
        if self._recipe.train.record_steps:
            from ftkit.training.recorded_steps import recorded_steps

            self._recorded = recorded_steps(setup, journal.warn)
        self._began_s, self._stop_after = began_s, stop_after
        companion = setup.companion_of(setup.data.train)
        self._meter = MemoryMeter(
            setup.strategy,
            setup.model,
            # One or two steps only: following all tensors costs a tenth of a second a step. No
            # step of a compiled model: the meter cannot see into its graphs.
            set() if self._recipe.compile else steps_to_measure(self._order),
            self._recorder.device_peak,
            self._recorder.on_step_memory,
            beside=(
                *(() if companion is None else companion.models),
                *setup.model.body.beside,
            ),
        )
        self.signal_number: int | None = None
        """The signal that ended training, if any."""
        self.exit_reason = ""
        self.stopped = False
        """Whether it ended by stop_after, and continues in another session."""

    def run(self) -> None:
        """Train to the end of the schedule, of the session or of the time limit, or to a signal."""
        try:
            with self._display.training(
                self._order.total_steps, self._start.step
            ) as self._progress:
                self._run()
        except BaseException as exception:
            if isinstance(exception, NotFinite):
                self._finish_saving()
            self._meter.on_exception(exception)
            self._loggers.finalize("failed")
            raise
        self._loggers.finalize("success")
        self._stop.wait_for_step = False

    def _finish_saving(self) -> None:
        """Complete the checkpoint that is being written: the run continues from it."""
        try:
            if self._checkpointing is not None:
                self._checkpointing.finish()
        finally:
            max_over_ranks(0)  # a rank that ended before would take the others with it

    def _run(self) -> None:
        first, end = self._start.step, self._order.total_steps
        self._require_finite_start()
        self._callbacks.on_begin()
        if first == end:  # the session before stopped between the last step and the end
            self.exit_reason = self._completed_reason()
        else:
            self._begin()
        setup = self._setup
        train_step = TrainStep(
            setup.model,
            StepLoss(setup.objective, setup.model, setup.companion_of(setup.data.train)),
            setup.strategy,
            setup.schedule,
            self._recipe.train,
            learning_rate=setup.learning_rate,
            seed=self._recipe.seed,
            seed_names=self._start.seed_names,
            compiles=self._recipe.compile,
            meter=self._meter,
            before_update=self._checkpointing.before_update
            if self._checkpointing
            else lambda: None,
            recorded=self._recorded,
        )
        batches = Coming(
            train_batches(
                setup.data.train if setup.data.stream is None else setup.data.stream,
                self._order,
                start_step=first,
                end_step=end,
                joined=setup.objective.joined,
                fills_media=bool(setup.base.architecture.beside),
                pin_memory=setup.plan.kind.pins_host_memory,
            )
        )
        ends = self.signal_number is not None or bool(self.exit_reason)
        self._meter.look_around()
        # Models and what set-up has imported are several 100,000 objects. A full collection looked
        # at all of them, for up to 0.4 s in the middle of a step.
        gc.collect()
        gc.freeze()
        for step in range(first, end):
            if ends:
                break
            record = train_step.run(step, batches)
            if self._recorded is not None:
                self._recorder.note(recorded_steps=self._recorded.counts)
            self._log_step(record)
            self._callbacks.on_step(record)
            ends = self._between_steps(record.step)
        self._end()

    def _require_finite_start(self) -> None:
        """Test what is trained before it is trained, as of a checkpoint of an earlier version.

        Raises:
            NotFinite: it holds numbers that are not finite.
        """
        step, setup = self._start.step, self._setup
        tensors = own_weights(setup)
        if step:
            state = setup.strategy.state_view()
            pieces = capture(setup.model, state, rank(), setup.plan.world_size)
            tensors = kept_numbers(setup, pieces)
        if name := first_not_finite(tensors):
            fact = f"{name} has a number that is not finite"
            if step:
                fact += f" in the checkpoint of step {step}"
            raise diverged(setup, fact, computed_from=step)

    def _begin(self) -> None:
        """Evaluate before the first step of a session."""
        self._stop.wait_for_step = True
        step, settings = self._start.step, self._recipe.eval
        if step == 0:
            wanted = settings.initial_validation
            self._evaluate(0, validation=wanted, scores=True, example=wanted)
        elif self._validation_due(step) and not self._start.is_validated:
            # A signal ended the session before this validation.
            self._evaluate(step, validation=True, scores=False, example=True)
            loss = self._evaluator.validation_loss(step)
            if self._checkpointing is not None and loss is not None:
                self._checkpointing.amend(step, loss)
        self.signal_number = self._stop.requested() or None
        (request,) = max_over_ranks(self._callbacks.stop_request)
        if request:
            self.exit_reason = self._callbacks.reason(request)
        # Once the report says so, whoever stops the run knows that the step will be finished.
        self._recorder.enter("training")

    def _log_step(self, record: StepRecord) -> None:
        """Report, show and log a step.

        Raises:
            NotFinite: its loss or the norm of its gradients is not finite.
        """
        several, mixed = self._setup.plan.world_size > 1, len(self._setup.data.parts) > 1
        self._recorder.on_step(
            record,
            self._order.imbalance(record.step - 1) if several else None,
            follows_memory=self._meter.follows(record.step - 1),
            of_sources=self._order.sources(record.step - 1).tolist() if mixed else (),
        )
        step, norm = record.step, record.gradient_norm
        if not math.isfinite(record.loss):
            fact = f"The loss of step {step} is {record.loss}"
            raise diverged(self._setup, fact, computed_from=step - 1)
        # Where the loss is scaled, such a step is left out and the scale lowered.
        if not (math.isfinite(norm) or self._setup.strategy.scales_loss):
            fact = f"The norm of the gradients of step {step} is {norm}"
            raise diverged(self._setup, fact, computed_from=step - 1)
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
            values |= record.terms
            if record.router_aux_loss is not None:
                values["router_aux_loss"] = record.router_aux_loss
            self._loggers.log(values | self._recorder.system.newest(), record.step)

    def _between_steps(self, step: int) -> bool:
        """Validate and save if it is time; returns whether training ends here."""
        # `requested` is a collective: ranks must agree whether they validate.
        if self._validation_due(step) and not self._stop.requested():
            self._evaluate(step, validation=True, scores=False, example=True)
            self._recorder.enter("training")
        # One message for everything that rank 0 decides, because clocks and signals differ between
        # ranks, and for the callbacks of all ranks.
        decided = (self._stop.signal_number or 0, self._event(), self._is_candidate(step))
        signal_number, event, is_candidate, request = max_over_ranks(
            *(decided if rank() == 0 else (0, 0, 0)), self._callbacks.stop_request
        )
        ends = True
        if signal_number:
            self.signal_number = signal_number
        elif step == self._order.total_steps:
            self.exit_reason = self._completed_reason()
        elif request:
            self.exit_reason = self._callbacks.reason(request)
        elif event == LoopEvent.OUT_OF_TIME:
            self.exit_reason = f"train.max_time of {self._recipe.train.max_time:g} s reached"
        elif event == LoopEvent.SESSION_ENDS or self._is_last_of_session(step):
            self.stopped = True
            self.exit_reason = f"{self._stop_after} reached"
        else:
            ends = False
        if self._checkpointing is not None:
            overdue = event == LoopEvent.CHECKPOINT_OVERDUE
            # At the end too: whoever continues with more steps begins here.
            if ends or overdue or is_candidate or self._checkpointing.due(step):
                self._save(step, wait=bool(signal_number) or self.stopped)
            self._checkpointing.report()
        return ends

    def _validation_due(self, step: int) -> bool:
        """Whether to validate after a step; the last step has its own validation."""
        interval = self._setup.validation_interval
        return bool(interval) and step % interval == 0 and step < self._order.total_steps

    def _is_candidate(self, step: int) -> bool:
        """Whether the state after a step may be one of the best, which are kept."""
        settings, known = self._recipe.checkpoint, self._recorder.report.loss
        if self._evaluator.validation_loss(step) is None:
            return False
        is_best = known is not None and known.validation_best_step == step
        return settings.keep_best > 0 or (settings.result == "best" and is_best)

    def _event(self) -> LoopEvent:
        """Event by the clocks of this rank."""
        max_time, after = self._recipe.train.max_time, self._stop_after
        if max_time is not None and self._recorder.training_s >= max_time:
            return LoopEvent.OUT_OF_TIME
        if after and after.seconds and time.monotonic() - self._began_s >= after.seconds:
            return LoopEvent.SESSION_ENDS
        if self._checkpointing is not None and self._checkpointing.overdue():
            return LoopEvent.CHECKPOINT_OVERDUE
        return LoopEvent.NONE

    def _is_last_of_session(self, step: int) -> bool:
        after = self._stop_after
        return after is not None and step - self._start.step == after.steps

    def _save(self, step: int, *, wait: bool) -> None:
        assert self._checkpointing is not None
        self._recorder.enter("saving")
        phase = self._display.phase("saving a checkpoint", brief=True) if wait else nullcontext()
        with phase:
            loss = self._evaluator.validation_loss(step)
            self._checkpointing.save(
                step, validation_loss=loss, callbacks=self._callbacks.capture(), wait=wait
            )
        self._callbacks.on_save()
        self._recorder.enter("training")

    def _end(self) -> None:
        """Evaluate and finish checkpoints after the last step of a session."""
        if self.signal_number is None and not self.stopped:
            wanted = self._recipe.eval.final_validation
            step = self._recorder.steps
            # An earlier session may have validated this step.
            known = step == self._start.step and self._start.is_validated
            known = known or self._evaluator.validation_loss(step) is not None
            validates = wanted and not known
            if self._checkpointing is not None and self._recipe.checkpoint.result == "best":
                self._evaluate(step, validation=validates, scores=False, example=False)
                validates = False
                if not self._stop.requested():
                    self._checkpointing.load_best(step, self._evaluator.validation_loss(step))
            # Averages stay in place of the weights: answers and result are then of the same
            # numbers.
            self._setup.evaluated_weights.keep()
            if name := first_not_finite(own_weights(self._setup)):
                raise diverged(
                    self._setup, f"After step {step}, {name} has a number that is not finite"
                )
            self._evaluate(step, validation=validates, scores=True, example=wanted)
            self.signal_number = self._stop.requested() or None
            if self._checkpointing is not None:
                self._recorder.enter("saving")
                self._checkpointing.amend(step, self._evaluator.validation_loss(step))
        elif self._checkpointing is not None:
            self._checkpointing.finish()
        if self._checkpointing is not None:
            self._checkpointing.release()
        self._callbacks.on_end()

    def _evaluate(self, step: int, *, validation: bool, scores: bool, example: bool) -> None:
        """Evaluate, and call back after a validation; see `Evaluator.evaluate`."""
        values = self._evaluator.evaluate(
            step, validation=validation, scores=scores, example=example
        )
        if values is not None:
            self._callbacks.on_validation(values)

    def _completed_reason(self) -> str:
        train = self._recipe.train
        if self._order.total_steps == train.max_steps:
            return f"train.max_steps of {train.max_steps} reached"
        if self._setup.data.stream is not None:
            return f"train.max_tokens of {train.max_tokens:,} reached"
        return f"all {train.epochs} epochs done" if train.epochs != 1 else "the epoch is done"
