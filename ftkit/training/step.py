"""The optimizer step: its micro-batches, its update, and measurements of it."""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from lightning.fabric.utilities import move_data_to_device

from ftkit.checkpoint.metadata import SeedNames
from ftkit.data.media import Coming, with_media
from ftkit.data.records.media import MEDIA, MEDIA_OF
from ftkit.models.language_model import LanguageModel, compiled_graphs
from ftkit.objectives.objective import Batch
from ftkit.objectives.step_loss import ROUTER_LOSS, StepLoss, zeros_for
from ftkit.planning.meter import MemoryMeter
from ftkit.recipe.recipe import Train
from ftkit.runs.report.meters import PARTS, StepPart, StepRecord
from ftkit.strategies.distributed import rank, sum_over_ranks
from ftkit.strategies.schedule import Schedule
from ftkit.strategies.strategy import Strategy
from ftkit.utils.accelerators.kinds import HOST_KIND, device_kind
from ftkit.utils.accelerators.use import compilations, sum_dtype

if TYPE_CHECKING:
    from ftkit.training.recorded_steps import RecordedSteps


def seed_of_step(seed: int, step: int, rank: int) -> int:
    """Seed of what a generator draws in a step on a rank, such as the rounding of an optimizer.

    So a step can be repeated, or made for the first time after a resume, without any saved state.
    Dropout and noise need no seed: they belong to tokens.
    """
    digest = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class StepClock:
    """Seconds of a step by part.

    Where a Python line returns before its kernels have run, the parts are timed by events on the
    device's own clock. Where they only begin when a number is read, there are no parts.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        kind = device_kind(device.type)
        self._has_events, self._has_parts = kind.times_events, not kind.computes_late
        self._marks: list[tuple[StepPart, Any]] = []
        self._start: Any = self._now()

    def mark(self, part: StepPart) -> None:
        """Add the time since the previous mark to this part."""
        self._marks.append((part, self._now()))

    def take(self) -> dict[StepPart, float]:
        """Seconds by part since the last call; the device must have finished. {}: not known."""
        if not self._has_parts:
            return {}
        parts: dict[StepPart, float] = dict.fromkeys(PARTS, 0.0)
        before = self._start
        for part, moment in self._marks:
            elapsed = before.elapsed_time(moment) / 1000 if self._has_events else moment - before
            parts[part] = parts.get(part, 0.0) + elapsed
            before = moment
        self.restart()
        return parts

    def restart(self) -> None:
        """Drop the time since the last call of `take`: it belongs to no step."""
        self._marks = []
        self._start = self._now()

    def _now(self) -> Any:
        if not self._has_events:
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


class _Totals(NamedTuple):
    """Numbers of a step over all ranks."""

    terms: dict[str, float]
    samples: int
    tokens: int
    label_tokens: int
    padded_tokens: int
    media: int


class TrainStep:
    """Makes optimizer steps, and measures each of them."""

    def __init__(
        self,
        model: LanguageModel,
        step_loss: StepLoss,
        strategy: Strategy,
        schedule: Schedule,
        train: Train,
        *,
        learning_rate: float,
        seed: int,
        seed_names: SeedNames,
        compiles: bool,
        meter: MemoryMeter,
        before_update: Callable[[], None],
        recorded: "RecordedSteps | None" = None,
    ) -> None:
        """Prepare to train a model whose strategy is set up.

        Args:
            model: to be trained.
            step_loss: what it learns.
            strategy: of the run.
            schedule: of the learning rate.
            train: section of the recipe.
            learning_rate: the full one.
            seed: of the recipe.
            seed_names: whose names seed dropout; with those of the implementation, it and noise
                are what they were in earlier versions.
            compiles: whether the model is compiled.
            meter: measures the memory of some steps.
            before_update: called before the first update of a step: after its last backward
                pass, or before that pass if it updates.
            recorded: records micro-steps and replays them; None: all are computed.
        """
        self._model, self._strategy, self._schedule = model, strategy, schedule
        self._learning_rate, self._seed = learning_rate, seed
        self._max_norm, self._in_backward = train.max_norm, train.optimizer_in_backward
        self._compiles, self._recorded = compiles, recorded
        self._meter, self._before_update = meter, before_update
        self._device = strategy.device
        self._clock = StepClock(self._device)
        self._step_loss = step_loss
        self._shares = zeros_for(step_loss, self._device)
        """[terms]: this rank's share of each term of the step so far."""
        self._beside = [p for p in model.body.trained_beside if p.requires_grad]
        """Parameters that only media have gradients of."""
        self._tokens = tokens = model.body.tokens
        by_model, embedding = seed_names == "model", model.body.embedding
        tokens.prepare(seed, self._device, model.architecture.seed_name if by_model else str)
        if (alpha := train.neftune_noise_alpha) is not None:
            from ftkit.models.bodies.embedding_noise import EmbeddingNoise

            # Earlier versions also scaled the noise where LitGPT's code computes Gemma.
            scale = 1.0 if by_model else getattr(embedding, "output_scale", 1.0)
            EmbeddingNoise(embedding, alpha * scale, tokens)
        self._graphs = self._count_graphs()

    def run(self, step: int, batches: Coming) -> StepRecord:
        """Train on the micro-batches of one step, and update once.

        Without an update if the loss is not finite, or the norm of the gradients.

        Args:
            step: optimizer steps already done.
            batches: the next one is the first of this step.
        """
        began = time.perf_counter()
        self._clock.restart()
        self._shares.zero_()
        counts = [0, 0, 0, 0, 0]
        # On the host, so that a step of many micro-batches takes no memory of the device.
        of_step = list(_of_step(batches))
        self._meter.begin_step(step)
        self._step_loss.begin()
        if self._step_loss.needs_pass(len(of_step)):
            self._observe(step, of_step)
        self._seed_step(step)
        self._strategy.set_learning_rate(self._schedule.share(step))
        # Texts alone are there at once, and would only take memory.
        has_media = any(MEDIA in one for one in of_step)
        recorded, is_followed = self._recorded, self._meter.follows(step)
        for waiting in with_media(of_step, batches.following() if has_media else ()):
            # The meter does not see into replays: only what is filled up may be one.
            if recorded is not None and not is_followed:
                waiting = recorded.filled(waiting)
            batch = move_data_to_device(waiting, self._device)
            self._clock.mark("data")
            self._step_loss.refer(batch)
            with (
                self._strategy.micro_step(is_last=batch["is_last_of_step"]),
                self._tokens.of(step, batch),  # for dropout and noise
            ):
                if recorded is not None and recorded.replays(batch, self._passes):
                    self._clock.mark("recorded")
                else:
                    self.micro_step(batch)
            counts = [old + new for old, new in zip(counts, _counts(batch), strict=True)]
        del waiting, batch  # media may be large, and the update needs memory
        self.clip()
        self._clock.mark("optimizer")
        # Read before the update, so that one which would spoil the weights is not made.
        totals = self._totals(counts)
        self._clock.mark("other")
        loss = self._step_loss.objective.loss_of(totals.terms)
        if self._beside and not totals.media:
            # As in a plain loop, where these have no gradient in such a step.
            self._strategy.leave_out(self._beside)
        norm = self.update() if math.isfinite(loss) else math.nan
        self._clock.mark("optimizer")
        return self._record(step, totals, loss, norm, len(of_step), began)

    def _seed_step(self, step: int) -> None:
        torch.manual_seed(seed_of_step(self._seed, step, rank()))

    @torch.no_grad()
    def _observe(self, step: int, batches: Sequence[Batch]) -> None:
        """Compute what the loss needs of the whole step before its first backward pass."""
        self._seed_step(step)
        for waiting in with_media(batches):
            batch = move_data_to_device(waiting, self._device)
            context = self._strategy.precision.forward_context
            self._step_loss.observe(batch, step, context)
            if len(batches) > 1:
                with context(), self._tokens.of(step, batch):
                    self._step_loss.observe_routing(batch)
        self._clock.mark("forward")
        self._step_loss.finish_observing()

    def micro_step(self, batch: Batch) -> None:
        """Make the forward and backward pass of a micro-batch, which adds up its gradients."""
        self._meter.before_forward(batch)
        # The graph is gone before memory after the backward pass is measured.
        self._passes(batch, self._between_passes)
        self._meter.after_backward()
        self._clock.mark("backward")

    def _passes(self, batch: Batch, between: Callable[[], None] = lambda: None) -> None:
        """Make both passes with nothing else between them than is given."""
        with self._step_loss.watching(batch):
            loss = self._step_loss.of_micro_batch(self._strategy.forward, batch, self._shares)
            # Strategies average gradients over the ranks; the loss of a step is their sum.
            loss = loss * self._strategy.plan.world_size
            between()
            self._strategy.backward(loss)

    def _between_passes(self) -> None:
        self._meter.before_backward()
        self._clock.mark("forward")
        if self._in_backward:
            self._before_update()

    def clip(self) -> None:
        """Measure the norm of the gradients, and clip them."""
        if not self._in_backward:
            self._before_update()
        self._strategy.clip_gradients(self._max_norm)

    def update(self) -> float:
        """Update the parameters if the norm of the gradients is finite, and free the gradients.

        Returns:
            The norm before clipping.
        """
        norm = self._strategy.update()
        self._meter.end_step()
        return norm

    def _totals(self, counts: list[int]) -> _Totals:
        # One collective for all numbers of the step.
        kind = sum_dtype(self._device)
        sums = torch.cat([self._shares, torch.tensor(counts, dtype=kind, device=self._device)])
        values = sum_over_ranks(sums).tolist()
        names = self._step_loss.names
        return _Totals(dict(zip(names, values, strict=False)), *map(int, values[len(names) :]))

    def _record(
        self,
        step: int,
        totals: _Totals,
        loss: float,
        norm: float,
        micro_steps: int,
        began: float,
    ) -> StepRecord:
        terms, objective = totals.terms, self._step_loss.objective
        if self._device.type != HOST_KIND:
            # Otherwise the duration of a step would leave out kernels that are still queued.
            torch.accelerator.synchronize()
        return StepRecord(
            step=step + 1,
            samples=totals.samples,
            tokens=totals.tokens,
            label_tokens=totals.label_tokens,
            padded_tokens=totals.padded_tokens,
            micro_steps=micro_steps,
            loss=loss,
            terms={one.name: terms[one.name] for one in objective.reported if one.name in terms},
            router_aux_loss=terms.get(ROUTER_LOSS),
            learning_rate=self._learning_rate * self._schedule.share(step),
            gradient_norm=norm,
            duration_s=time.perf_counter() - began,
            parts_s=self._clock.take(),
            compiled_graphs=self._new_graphs(),
        )

    def _new_graphs(self) -> int | None:
        """Graphs that were compiled or recorded since the last call, or programs of the device."""
        before, self._graphs = self._graphs, self._count_graphs()
        return None if before is None or self._graphs is None else self._graphs - before

    def _count_graphs(self) -> int | None:
        if self._recorded is not None:
            return self._recorded.count
        return compiled_graphs() if self._compiles else compilations(self._device)


def _of_step(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Micro-batches up to the end of a step."""
    for batch in batches:
        yield batch
        if batch["is_last_of_step"]:
            return


def _counts(batch: Batch) -> tuple[int, int, int, int, int]:
    """Samples, tokens, label tokens, padded positions and media of a micro-batch."""
    tokens, positions = int(batch["tokens"]), int(batch["padded_tokens"])
    media = sum(map(len, batch.get(MEDIA_OF, ())))
    return int(batch["samples"]), tokens, int(batch["label_tokens"]), positions - tokens, media
