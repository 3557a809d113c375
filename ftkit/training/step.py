"""The optimizer step: its micro-batches, its update, and what is measured of it."""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from ftkit.models.bodies.embedding_noise import EmbeddingNoise
from ftkit.models.compiled import compiled_graphs
from ftkit.models.loss import normalize_loss
from ftkit.planning.meter import MemoryMeter
from ftkit.runs.report.step_record import PARTS, StepPart, StepRecord
from ftkit.strategies.distributed import rank, sum_over_ranks
from ftkit.training.setup import Setup
from ftkit.utils.accelerators.kinds import HOST_KIND, device_kind
from ftkit.utils.accelerators.use import sum_dtype

Batch = dict[str, Any]
"""As `ftkit.data.samples.loader.collate` returns it."""


def seed_of_step(seed: int, step: int, rank: int) -> int:
    """The seed of everything that is drawn at random in an optimizer step on a rank (dropout).

    A step can be done again, or for the first time after a resume, with nothing saved.
    """
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class StepClock:
    """Seconds of a step by part.

    Where a Python line returns before its kernels have run, the parts are timed by events on the
    device's own clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._has_events = device_kind(device.type).times_events
        self._marks: list[tuple[StepPart, Any]] = []
        self._start: Any = self._now()

    def mark(self, part: StepPart) -> None:
        """The time since the mark before belongs to this part."""
        self._marks.append((part, self._now()))

    def take(self) -> dict[StepPart, float]:
        """The parts since the last take; the device must have finished."""
        parts: dict[StepPart, float] = dict.fromkeys(PARTS, 0.0)
        before = self._start
        for part, moment in self._marks:
            elapsed = before.elapsed_time(moment) / 1000 if self._has_events else moment - before
            parts[part] += elapsed
            before = moment
        self.restart()
        return parts

    def restart(self) -> None:
        """Forget the time since the last take: it belongs to no step."""
        self._marks = []
        self._start = self._now()

    def _now(self) -> Any:
        if not self._has_events:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


class TrainStep:
    """Makes one optimizer step after the other, and measures each."""

    def __init__(self, setup: Setup, meter: MemoryMeter, before_update: Callable[[], None]) -> None:
        """Prepare.

        Args:
            setup: what is trained, with its strategy, which is set up.
            meter: follows the memory of some steps.
            before_update: called before the first update of a step: after its last backward
                pass, or before that one if it updates.
        """
        self._setup, self._strategy = setup, setup.strategy
        self._meter, self._before_update = meter, before_update
        self._in_backward = setup.job.recipe.train.optimizer_in_backward
        self._device = setup.strategy.device
        self._clock = StepClock(self._device)
        self._loss = torch.zeros((), dtype=sum_dtype(self._device), device=self._device)
        """Of the step so far, this rank's share, in nats per label token."""
        train, model = setup.job.recipe.train, setup.model
        alpha = train.neftune_noise_alpha
        self._noise = alpha and EmbeddingNoise(model.body.embedding, alpha, setup.job.recipe.seed)
        self._routing = model.routing
        self._router_loss = torch.zeros_like(self._loss)
        """The same of the routers' auxiliary loss, without its coefficient."""
        self._choices: Tensor | None = None
        """What the routers' loss knows of the whole step before; None: it is one micro-batch."""
        self._graphs = compiled_graphs() if setup.job.recipe.compile else 0

    def run(self, step: int, batches: Iterator[Batch]) -> StepRecord:
        """Train on the micro-batches of a step, as many as there are, and update once.

        Args:
            step: optimizer steps done before.
            batches: the next one is the first of the step.
        """
        began = time.perf_counter()
        self._clock.restart()
        self._loss.zero_()
        self._router_loss.zero_()
        counts = [0, 0, 0, 0]
        of_step = list(_of_step(batches))
        self._choices = self._count_choices(step, of_step) if len(of_step) > 1 else None
        self._draw_from(step)
        self._strategy.set_learning_rate(self._setup.schedule.share(step))
        for number, waiting in enumerate(of_step):
            batch = move_data_to_device(waiting, self._device)
            if not number:
                self._meter.begin_step(step)
            with (
                self._strategy.micro_step(is_last=batch["is_last_of_step"]),
                self._noise_of(step, batch),
            ):
                self.micro_step(batch)
            counts = [old + new for old, new in zip(counts, _counts(batch), strict=True)]
        self.update()
        self._clock.mark("optimizer")
        return self._record(step, counts, len(of_step), began)

    def _draw_from(self, step: int) -> None:
        """Have what is drawn at random follow from the step."""
        torch.manual_seed(seed_of_step(self._setup.job.recipe.seed, step, rank()))

    def _noise_of(self, step: int, batch: Batch) -> AbstractContextManager[None]:
        """The embeddings of a micro-batch have their noise in this context, if there is any."""
        return self._noise.of(step, batch) if self._noise else nullcontext()

    @torch.no_grad()
    def _count_choices(self, step: int, batches: Sequence[Batch]) -> Tensor | None:
        """How often each expert will be chosen in a step, over all ranks: [experts].

        The routers' loss depends on it, and gradients of the first micro-batch on that loss. None:
        there is no such loss.

        Args:
            step: optimizer steps done before.
            batches: all of the step.
        """
        if self._routing.loss is None:
            return None
        self._draw_from(step)  # what training will draw
        choices = torch.zeros((), dtype=sum_dtype(self._device), device=self._device)
        for waiting in batches:
            batch = move_data_to_device(waiting, self._device)
            with (
                self._strategy.precision.forward_context(),
                self._routing.of(batch["is_real"]),
                self._noise_of(step, batch),
            ):
                self._setup.model(
                    batch["input_ids"],
                    batch["label_indices"][:0],
                    sequence_lengths=batch["sequence_lengths"],
                )
                routed = self._routing.take()
            assert routed is not None
            choices = choices + routed.choices
        self._clock.mark("forward")
        return sum_over_ranks(choices)

    def micro_step(self, batch: Batch) -> None:
        """The forward and backward pass of a micro-batch, whose gradients are added up."""
        self._meter.before_forward(batch)
        self._clock.mark("data")
        with self._routing.of(batch["is_real"]):
            loss = self._scaled_loss(batch)
            self._meter.before_backward()
            self._clock.mark("forward")
            if self._in_backward:
                self._before_update()
            self._strategy.backward(loss)
        del loss
        self._meter.after_backward()
        self._clock.mark("backward")

    def _scaled_loss(self, batch: Batch) -> Tensor:
        """The share of a micro-batch in the loss of the step, as its gradients need it."""
        share = normalize_loss(self._strategy.forward(batch), batch["label_tokens_in_step"])
        self._loss += share.detach()
        routed, loss = self._routing.take(), self._routing.loss
        if routed is not None and loss is not None:
            choices = self._choices
            if choices is None:  # there is no other micro-batch
                choices = sum_over_ranks(routed.choices)
            of_routers = loss.share(routed.probabilities, choices)
            self._router_loss += of_routers.detach()
            share = share + loss.coefficient * of_routers
        return share * self._setup.plan.world_size  # gradients are a mean over the ranks

    def update(self) -> None:
        """Clip the gradients that were added up, update, and free them."""
        if not self._in_backward:
            self._before_update()
        self._strategy.clip_gradients(self._setup.job.recipe.train.max_norm)
        self._strategy.update()
        self._meter.end_step()

    def _record(self, step: int, counts: list[int], micro_steps: int, began: float) -> StepRecord:
        kind = sum_dtype(self._device)
        sums = torch.tensor([0.0, 0.0, *counts], dtype=kind, device=self._device)
        sums[0], sums[1] = self._loss, self._router_loss
        loss, router_loss, *found = sum_over_ranks(sums).tolist()
        samples, tokens, label_tokens, padded_tokens = map(int, found)
        gradient_norm = self._strategy.gradient_norm()
        self._clock.mark("other")
        if self._device.type != HOST_KIND:
            torch.accelerator.synchronize()
        return StepRecord(
            step=step + 1,
            samples=samples,
            tokens=tokens,
            label_tokens=label_tokens,
            padded_tokens=padded_tokens,
            micro_steps=micro_steps,
            loss=loss,
            router_aux_loss=None if self._routing.loss is None else router_loss,
            learning_rate=self._setup.learning_rate(step),
            gradient_norm=gradient_norm,
            duration_s=time.perf_counter() - began,
            parts_s=self._clock.take(),
            compiled_graphs=self._new_graphs(),
        )

    def _new_graphs(self) -> int | None:
        """What torch.compile has made since the last call."""
        if not self._setup.job.recipe.compile:
            return None
        before, self._graphs = self._graphs, compiled_graphs()
        return self._graphs - before


def _of_step(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The micro-batches up to the end of a step."""
    for batch in batches:
        yield batch
        if batch["is_last_of_step"]:
            return


def _counts(batch: Batch) -> tuple[int, int, int, int]:
    """Of a micro-batch: samples, real tokens, label tokens, padded positions."""
    tokens, positions = int(batch["tokens"]), int(batch["padded_tokens"])
    return int(batch["samples"]), tokens, len(batch["labels"]), positions - tokens
