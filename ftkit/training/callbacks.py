"""Callbacks of the Trainer: the meter of each step, seeds, and its stop."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import lightning as L
import torch

from ftkit.config.plan import Plan
from ftkit.strategies.distributed import sum_over_ranks
from ftkit.training.module import FineTuner

Part = Literal["data", "forward", "backward", "optimizer", "other"]
PARTS: tuple[Part, ...] = ("data", "forward", "backward", "optimizer", "other")


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One optimizer step, as it was measured; numbers are over all ranks."""

    step: int
    """Optimizer steps done, this one included."""
    samples: int
    """Samples of this step."""
    tokens: int
    """Real input tokens of this step."""
    label_tokens: int
    """Tokens of this step that carry loss."""
    padded_tokens: int
    """Positions that were computed and were padding."""
    loss: float
    """Mean over the label tokens, in nats."""
    learning_rate: float
    """Of this step, first parameter group."""
    gradient_norm: float
    """Global norm before clipping."""
    duration_s: float
    """From the end of the step before, without validation and saving."""
    parts_s: dict[Part, float]
    """Where duration_s went."""


def seed_of_step(seed: int, step: int, rank: int) -> int:
    """The seed of everything that is drawn at random in an optimizer step on a rank (dropout).

    A step can be done again, or for the first time after a resume, with nothing saved.
    """
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class StepClock:
    """Seconds of a step by part.

    On CUDA the parts are timed by events on the device's own clock, because a Python line
    returns before its kernels have run.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[Part, Any]] = []
        self._start: Any = self._now()

    def mark(self, part: Part) -> None:
        """The time since the mark before belongs to this part."""
        self._marks.append((part, self._now()))

    def take(self) -> dict[Part, float]:
        """The parts since the last take; the device must have finished."""
        parts: dict[Part, float] = dict.fromkeys(PARTS, 0.0)
        before = self._start
        for part, moment in self._marks:
            elapsed = before.elapsed_time(moment) / 1000 if self._cuda else moment - before
            parts[part] += elapsed
            before = moment
        self.restart()
        return parts

    def restart(self) -> None:
        """Forget the time since the last take: it belongs to no step."""
        self._marks = []
        self._start = self._now()

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class StepMeter(L.Callback):
    """Measures every optimizer step, hands its record on, and calls what comes between steps.

    Args:
        at_start: called when the model is in place, before the first step.
        on_step: called with the record of each step.
        between_steps: called after it, with the number of steps done; its time is in no step.
            Returns whether to end training.
        at_end: called after the last step, while the model is still in place.
        seed: of the run; with the step and the rank, determines what is drawn at random.
    """

    def __init__(
        self,
        *,
        at_start: Callable[[], None],
        on_step: Callable[[StepRecord], None],
        between_steps: Callable[[int], bool],
        at_end: Callable[[], None],
        seed: int,
    ) -> None:
        self._seed = seed
        self._at_start = at_start
        self._on_step = on_step
        self._between_steps = between_steps
        self._at_end = at_end
        self._counts = [0, 0, 0, 0]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._at_start()
        self._clock = StepClock(pl_module.device)
        self._last_end = time.perf_counter()

    def on_train_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: dict[str, Any],
        batch_idx: int,
    ) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            torch.manual_seed(seed_of_step(self._seed, trainer.global_step, trainer.global_rank))
        self._clock.mark("data")

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._at_end()

    def on_before_backward(self, *_: Any) -> None:
        self._clock.mark("forward")

    def on_after_backward(self, *_: Any) -> None:
        self._clock.mark("backward")

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: dict[str, Any],
        batch_idx: int,
    ) -> None:
        assert isinstance(pl_module, FineTuner)
        tokens, positions = int(batch["tokens"]), int(batch["padded_tokens"])
        added = (int(batch["samples"]), tokens, len(batch["labels"]), positions - tokens)
        self._counts = [old + new for old, new in zip(self._counts, added, strict=True)]
        if trainer.fit_loop._should_accumulate():
            self._clock.mark("other")
            return
        self._clock.mark("optimizer")
        sums = torch.tensor([0.0, *self._counts], dtype=torch.float64, device=pl_module.device)
        sums[0] = pl_module.take_step_loss()
        loss, *counts = sum_over_ranks(sums).tolist()
        samples, tokens, label_tokens, padded_tokens = map(int, counts)
        self._counts = [0, 0, 0, 0]
        gradient_norm = pl_module.newest_gradient_norm()
        self._clock.mark("other")
        if pl_module.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        step = trainer.global_step
        self._on_step(
            StepRecord(
                step=step,
                samples=samples,
                tokens=tokens,
                label_tokens=label_tokens,
                padded_tokens=padded_tokens,
                loss=loss,
                learning_rate=pl_module.learning_rate_of(step - 1),
                gradient_norm=gradient_norm,
                duration_s=now - self._last_end,
                parts_s=self._clock.take(),
            )
        )
        trainer.should_stop = self._between_steps(step)
        self._clock.restart()
        self._last_end = time.perf_counter()


def make_trainer(plan: Plan, **parts: Any) -> L.Trainer:
    """Lightning's Trainer with everything off that ftkit does itself."""
    trainer = L.Trainer(
        max_epochs=1,
        accumulate_grad_batches=plan.micro_steps,
        gradient_clip_val=plan.recipe.train.max_norm if plan.strategy == "deepspeed" else None,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **parts,
    )
    # Several ranks tell each other before every micro-step whether SIGTERM has come, and the host
    # waits for the device to hear it. Signals are StopRequest's.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    return trainer
