"""Checkpointing of a run: when a checkpoint is due, what goes in, and what came of it."""

import dataclasses
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from ftkit.checkpoint.interval import (
    FIRST_S,
    best_interval_s,
    mean_between_losses_s,
    usual_save_s,
)
from ftkit.checkpoint.metadata import (
    ADAPTER,
    BASE,
    RECIPE,
    Layout,
    Metadata,
    read_metadata,
    write_metadata,
)
from ftkit.checkpoint.saver import Retention, Saved, Saver
from ftkit.checkpoint.shards import StoredState
from ftkit.checkpoint.state import capture, has_average, replace_trained, restore
from ftkit.checkpoint.store import Store, best_checkpoint, is_milestone
from ftkit.evaluation.validation import EvaluatedWeights
from ftkit.models.chat_templates.template import CHAT_TEMPLATE
from ftkit.models.load_weights import trained_weights
from ftkit.models.lora.save import save_adapter
from ftkit.models.pretrained.base_model import save_companions
from ftkit.models.pretrained.chat_files import GENERATION
from ftkit.recipe.parsing import to_yaml
from ftkit.recipe.recipe import LoraRecipe
from ftkit.runs.report.metrics import loss_columns, read_validation
from ftkit.runs.report.report import ChosenResult
from ftkit.strategies.distributed import broadcast_ints, rank
from ftkit.training.journal import Journal
from ftkit.training.setup import Setup
from ftkit.utils.console.formatting import bytes_text, duration_text, parse_duration, utc_now
from ftkit.utils.hardware import versions
from ftkit.utils.process import launcher_starts_again

LOSS_SCALE, LOSS_SCALE_AGE = "loss_scale", "loss_scale_age"
"""Names among a checkpoint's optimizer_scalars: the factor of float16 training, and steps since
it last changed."""


class Checkpointing:
    """Saves the state of training, and puts it back where a run continues."""

    def __init__(
        self,
        setup: Setup,
        journal: Journal,
        run_ids: dict[str, str],
        weights: EvaluatedWeights,
    ) -> None:
        """Prepare; training continues from the checkpoint that it starts from, if it does.

        Args:
            setup: what is trained, in place on its device.
            journal: where messages and measurements go.
            run_ids: of loggers, for their next session.
            weights: what is evaluated: an adapter beside the state of training is of these.
        """
        self._weights = weights
        self._setup, self._journal, self._run_ids = setup, journal, run_ids
        settings, start = setup.job.recipe.checkpoint, setup.start
        self._retention = Retention(
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            keep_best=settings.best_kept,
        )
        directory = setup.job.directory
        self._store = directory.store
        self._saver = Saver(
            self._store,
            [directory.rank(r).path for r in range(setup.plan.world_size)],
            rank(),
            self._retention,
            asynchronous=settings.asynchronous,
            max_staged_bytes=settings.max_staged_bytes,
        )
        self.before_update = self._saver.copies.before_update
        """To be called before the first update of a step."""
        weights.before = self.before_update
        self._between_losses_s = parse_duration(settings.time_between_losses)
        self._stalls_s: list[float] = []
        self._advised_s: float | None = None
        """Time between two checkpoints that loses the least, once a save was measured."""
        self._versions = versions()  # looking them up takes time that training would stand still
        self._refusal_is_told = self._bound_is_told = False
        self._saved_at = time.monotonic()
        self._saved_step = start.step if start.in_place else None
        self._state = setup.strategy.state_view()
        if start.metadata is not None and start.stored is not None:
            scalars = dict(start.metadata.optimizer_scalars)
            scale, age = scalars.pop(LOSS_SCALE, None), scalars.pop(LOSS_SCALE_AGE, 0.0)
            if scale is not None:
                setup.strategy.set_loss_scale(scale, age)
            restore(setup.model, self._state, start.stored, scalars)
            self._tell_of_average(start.stored)

    def _tell_of_average(self, stored: StoredState) -> None:
        """Say if a checkpoint has an average that nobody wants, or lacks one."""
        is_wanted, message = (
            self._setup.strategy.averages is not None,
            self._journal.display.message,
        )
        if is_wanted and not has_average(stored):
            message("notice: the average of the weights begins here: the checkpoint has none")
        elif not is_wanted and has_average(stored):
            message("notice: train.ema_decay is empty: the checkpoint's average is dropped")

    def due(self, step: int) -> bool:
        """Whether the step is one of those that are saved; the same on all ranks."""
        train, settings = self._setup.job.recipe.train, self._setup.job.recipe.checkpoint
        rules = (train.save_interval, settings.keep_every)
        return any(is_milestone(step, rule) for rule in rules)

    def overdue(self) -> bool:
        """Whether the last checkpoint is too old, by the clock of this rank."""
        return time.monotonic() - self._saved_at > self._interval_s() and not self._saver.busy

    def _interval_s(self) -> float:
        """Time between two checkpoints."""
        every = self._setup.job.recipe.checkpoint.save_every
        if every == "auto":
            return FIRST_S if self._advised_s is None else self._advised_s
        return float("inf") if every is None else parse_duration(every)

    def save(self, step: int, *, validation_loss: float | None, wait: bool) -> None:
        """Save after an optimizer step; every rank calls this.

        Args:
            step: optimizer steps done.
            validation_loss: if it was measured at this step.
            wait: until the checkpoint is complete.
        """
        if step != self._saved_step:
            started = time.perf_counter()
            setup = self._setup
            setup.strategy.sharding.reshard(setup.model)
            companions = self._companions()
            pieces = capture(setup.model, self._state, rank(), setup.plan.world_size)
            metadata = self._metadata(step, validation_loss)
            self._saver.save(metadata, pieces, companions, wait=wait, started=started)
            self._saved_at, self._saved_step = time.monotonic(), step
            if (refusal := self._saver.copies.refusal) and not self._refusal_is_told:
                self._refusal_is_told = True
                self._journal.warn(
                    f"Host memory for checkpoints cannot be page-locked ({refusal}): training "
                    "stands still longer for each."
                )
            self._warn_of_bound()
        elif wait:
            self._saver.wait()
        self.report()

    def _warn_of_bound(self) -> None:
        """Say once that a copy was too large to be made."""
        needed, settings = self._saver.unstaged_bytes, self._setup.job.recipe.checkpoint
        if needed and settings.asynchronous and not self._bound_is_told:
            self._bound_is_told = True
            self._journal.warn(
                f"The host copy of a checkpoint would take {bytes_text(needed)} on this rank, and "
                f"checkpoint.max_staged_bytes allows {bytes_text(settings.max_staged_bytes or 0)}: "
                "training waits for each checkpoint."
            )

    def report(self) -> None:
        """Tell what became of the checkpoints that were being written.

        Raises:
            SavingFailed: they could not be, time and again.
        """
        for saved in self._saver.finished():
            if saved.error is None:
                self._journal.recorder.on_save(
                    saved.path,
                    size_bytes=saved.size_bytes,
                    stall_s=saved.stall_s,
                    write_s=saved.write_s,
                )
                self._advise(saved)
            else:
                self._journal.recorder.on_failed_save()
                self._journal.warn(
                    f"The checkpoint of step {saved.step} could not be saved: {saved.error}. "
                    "The ones before it are untouched."
                )
            if saved.note is not None:
                self._journal.warn(f"After the checkpoint of step {saved.step}: {saved.note}.")
        self._saver.require_success()

    def _advise(self, saved: Saved) -> None:
        """What the cost of a save means for the interval, where losses are to be expected."""
        job, recorder = self._setup.job, self._journal.recorder
        chosen = job.recipe.checkpoint.save_every == "auto"
        if not (chosen or job.restarts or launcher_starts_again()):
            return
        self._stalls_s.append(saved.stall_s)
        cost_s = usual_save_s(self._stalls_s)
        between_s = mean_between_losses_s(
            self._between_losses_s, recorder.training_s, len(job.restarts)
        )
        # The next one begins when this one is complete.
        advised_s = max(best_interval_s(cost_s, between_s), saved.write_s)
        if len(self._stalls_s) == 2 and not chosen:  # the first takes longer
            self._journal.display.message(
                f"a checkpoint costs {duration_text(cost_s)}: one every {duration_text(advised_s)} "
                f"loses the least time, if a machine is lost every {duration_text(between_s)} "
                "(checkpoint.save_every auto)"
            )
        self._advised_s = advised_s
        if (noted := recorder.report.checkpoints) is not None:
            recorder.note(checkpoints=dataclasses.replace(noted, advised_every_s=advised_s))

    def take_best(self, step: int, validation_loss: float | None) -> None:
        """Give the model the numbers of the checkpoint with the lowest validation loss.

        Every rank calls this, after the last step.

        Args:
            step: whose numbers the model has.
            validation_loss: of them, if it was measured in this session.
        """
        self.finish()
        start, job, recorder = self._setup.start, self._setup.job, self._journal.recorder
        places = [(self._store, step)]
        if job.start is not None and not start.in_place:  # what came before the branch
            places.append((Store(Path(job.start).parent), start.step))
        found = None
        if rank() == 0:
            now = None if validation_loss is None else (validation_loss, step)
            found = best_checkpoint(places, now, self._journal.warn)
        best, place = broadcast_ints(*(found or (step, -1)))
        loss = validation_loss if best == step else None
        if best != step or (loss is None and place >= 0):
            checkpoint = places[place][0].path(best)
            metadata = read_metadata(checkpoint)
            loss = metadata.validation_loss
            if best != step:
                stored = StoredState.in_checkpoint(checkpoint, metadata)
                with self._journal.display.phase("taking the best checkpoint", brief=True):
                    replace_trained(self._setup.model, self._setup.strategy.sharding, stored)
                self._weights.are_kept()
        losses = self._losses_of(best)
        recorder.note(result=ChosenResult(step=best, validation_loss=loss, losses=losses))
        self._tell_best(best, loss)

    def _losses_of(self, step: int) -> dict[str, float]:
        """Of the validation of a step, on each source and set; rank 0 alone has its row."""
        table = self._setup.job.directory.validation
        rows = read_validation(table) if rank() == 0 else []
        row = next((row for row in rows if row["step"] == step), {})
        found = ((name, row.get(column)) for name, column in loss_columns(rows))
        return {name: loss for name, loss in found if loss is not None}

    def _tell_best(self, step: int, loss: float | None) -> None:
        """Say which step the result is of, and whether another one was better."""
        if loss is None:
            self._journal.warn("No validation loss is known: the result is of the last step.")
            return
        self._journal.display.message(f"the result is of step {step}: validation loss {loss:.4f}")
        known = self._journal.recorder.report.loss
        if known is not None and known.validation_best is not None and known.validation_best < loss:
            self._journal.warn(
                f"The lowest validation loss, {known.validation_best:.4f}, was that of step "
                f"{known.validation_best_step}, of which there is no checkpoint: the result is of "
                f"step {step}."
            )

    def finish(self) -> None:
        """Wait for what is being written."""
        self._saver.wait()
        self.report()

    def release(self) -> None:
        """Give back what is kept for further saves; there are none."""
        self._saver.release()

    def amend(self, step: int, validation_loss: float | None) -> None:
        """Add to the newest checkpoint, of this step, what was measured after it was saved."""
        self.finish()
        if rank() > 0 or self._store.newest() != step:
            return
        changes: dict[str, Any] = {"carried": self._journal.recorder.carried()}
        if validation_loss is not None:
            changes["validation_loss"] = validation_loss
        metadata = dataclasses.replace(self._store.metadata(step), **changes)
        try:
            write_metadata(metadata, self._store.path(step))
            self._store.prune(**dataclasses.asdict(self._retention))
        except OSError as error:
            self._journal.warn(f"The checkpoint of step {step} lacks its validation loss: {error}")

    def _companions(self) -> Callable[[Path], list[Path]] | None:
        """What writes the files beside the shards, on rank 0."""
        setup, recipe = self._setup, self._setup.job.recipe
        adapter: list[tuple[str, Tensor]] = []
        if isinstance(recipe, LoraRecipe):
            with self._weights.in_place():
                weights = trained_weights(setup.model, setup.strategy.sharding)
                adapter = [(name, tensor.cpu().clone()) for name, tensor in weights if rank() == 0]
        if rank() > 0:
            return None

        def write(directory: Path) -> list[Path]:
            self._journal.recorder.sync_rows()
            return write_companions(setup, adapter, directory)

        return write

    def _metadata(self, step: int, validation_loss: float | None) -> Metadata:
        setup, recorder, start = self._setup, self._journal.recorder, self._setup.start.metadata
        plan, recipe, carried = setup.plan, setup.job.recipe, recorder.carried()
        of_base, of_data = setup.identities
        return Metadata(
            method=recipe.method,
            step=step,
            samples=recorder.samples,
            tokens=recorder.tokens,
            epochs=recorder.epochs,
            training_s=recorder.training_s,
            total_steps=setup.schedule.total_steps,
            learning_rate=setup.learning_rate(step),
            schedule=setup.schedule.numbers(),
            lr_schedule=setup.schedule.kind,
            loss=carried["loss"]["last"],
            validation_loss=validation_loss,
            max_seq_length=setup.max_seq_length,
            optimizer=recipe.optimizer["class_path"],
            optimizer_scalars=self._state.scalars() | self._loss_scale(),
            rng={"seed": recipe.seed, "rule": "every step seeds from (seed, step, rank)"},
            base=of_base,
            data=of_data,
            layout=Layout(
                strategy=plan.strategy,
                world_size=plan.world_size,
                devices=plan.devices,
                num_nodes=plan.num_nodes,
                precision=plan.precision,
                micro_batch_size=plan.micro_batch_size,
                accelerator=plan.accelerator,
            ),
            versions=self._versions,
            saved_at=utc_now(),
            changes=[*(start.changes if start else []), *setup.job.changes],
            loggers=self._run_ids,
            carried=carried,
        )

    def _loss_scale(self) -> dict[str, float]:
        found = self._setup.strategy.loss_scale()
        return {} if found is None else dict(zip((LOSS_SCALE, LOSS_SCALE_AGE), found, strict=True))


def write_companions(
    setup: Setup, adapter: Iterable[tuple[str, Tensor]], directory: Path
) -> list[Path]:
    """Write what a checkpoint holds beside the shards; the files.

    Args:
        setup: of the run.
        adapter: of LoRA: our names and values of what is trained.
        directory: of the checkpoint.
    """
    recipe, base = setup.job.recipe, setup.base
    own, others = directory / RECIPE, directory / BASE
    own.write_text(to_yaml(dataclasses.replace(recipe, resume=False)), encoding="utf-8")
    if isinstance(recipe, LoraRecipe):
        others = directory / ADAPTER
        fingerprint = setup.identities[0].fingerprint
        save_adapter(adapter, base, recipe, others, fingerprint, setup.chat_files)
        return [own, *others.iterdir()]
    others.mkdir()
    save_companions(base, others)
    asked = [directory / name for name in (CHAT_TEMPLATE, GENERATION)]
    for file in asked:
        file.write_bytes(setup.chat_files[file.name])
    return [own, *asked, *others.iterdir()]
