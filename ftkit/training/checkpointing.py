"""Checkpointing of a run: when a checkpoint is due, its content, and the choice of the best one."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from torch import Tensor

from ftkit.checkpoint.metadata import (
    ADAPTER,
    BASE,
    PLUGIN,
    RECIPE,
    Layout,
    Metadata,
    read_metadata,
    write_metadata,
)
from ftkit.checkpoint.saver import Retention, Saved, Saver
from ftkit.checkpoint.state import capture, replace_trained
from ftkit.checkpoint.store import Store, best_checkpoint, is_milestone
from ftkit.errors import UserError
from ftkit.models.chat_templates.template import CHAT_TEMPLATE
from ftkit.models.load_weights import result_weights
from ftkit.models.lora.adapter_files import save_adapter
from ftkit.models.pretrained.base_model import BaseModel, save_without_weights
from ftkit.models.pretrained.tokenizer import GENERATION
from ftkit.recipe.parsing import to_yaml
from ftkit.recipe.plugin import plugin_in_use
from ftkit.recipe.recipe import LoraRecipe, Recipe
from ftkit.runs.report.metrics import loss_columns, read_validation
from ftkit.runs.report.report import ChosenResult
from ftkit.strategies.distributed import broadcast_ints, rank
from ftkit.training.callbacks import CallbackState
from ftkit.training.finite import diverged, first_not_finite, kept_numbers
from ftkit.training.journal import Journal
from ftkit.training.setup import Setup
from ftkit.utils.console.formatting import bytes_text, duration_text, parse_duration, utc_now
from ftkit.utils.finite_numbers import finite
from ftkit.utils.hardware import versions
from ftkit.utils.process import launcher_starts_again

_FIRST_INTERVAL_S = 60.0
"""Interval of save_every auto until a save has been measured."""


class Checkpointing:
    """Saves the training state, when it is due, and loads the best one at the end."""

    def __init__(
        self,
        setup: Setup,
        journal: Journal,
        *,
        run_ids: dict[str, str],
        changes: Sequence[str],
        restarts: int,
    ) -> None:
        """Prepare to save.

        Args:
            setup: of this rank.
            journal: for messages and measurements.
            run_ids: of loggers, for their next session.
            changes: of the recipe since the checkpoint from which the run continues.
            restarts: of the run up to now.
        """
        self._setup, self._journal = setup, journal
        self._weights, self._run_ids = setup.evaluated_weights, run_ids
        self._changes, self._restarts = changes, restarts
        self._directory = directory = setup.directory
        self._settings, start = setup.recipe.checkpoint, setup.start
        settings = self._settings
        self._retention = Retention(
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            keep_best=settings.best_kept,
        )
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
        # Averages take the place of the weights in the same memory, which may still be copied.
        self._weights.before = self.before_update
        self._between_losses_s = parse_duration(settings.time_between_losses)
        self._stalls_s: list[float] = []
        self._advised_s: float | None = None
        """Interval that loses the least time, once a save was measured."""
        self._versions = versions()  # now: during a save training would wait for it
        self._has_warned_of_refusal = self._has_warned_of_limit = False
        self._saved_at = time.monotonic()
        # The checkpoint that the run starts from lies in its own directory, unless the run is a
        # branch.
        self._saved_step = start.step if start.in_place else None
        self._state = setup.strategy.state_view()

    def due(self, step: int) -> bool:
        """Return whether a step is saved because of its number; equal on all ranks."""
        # keep_every too: a milestone can only be kept if it is saved.
        rules = (self._setup.save_interval or None, self._settings.keep_every)
        return any(is_milestone(step, rule) for rule in rules)

    def overdue(self) -> bool:
        """Return whether a checkpoint is due by the clock of this rank."""
        # While files are written, the next save would have to wait for them: it is due afterwards.
        return time.monotonic() - self._saved_at > self._interval_s() and not self._saver.busy

    def _interval_s(self) -> float:
        every = self._settings.save_every
        if every == "auto":
            return _FIRST_INTERVAL_S if self._advised_s is None else self._advised_s
        return float("inf") if every is None else parse_duration(every)

    def save(
        self, step: int, *, validation_loss: float | None, callbacks: CallbackState, wait: bool
    ) -> None:
        """Save after an optimizer step; every rank calls this.

        Args:
            step: optimizer steps done.
            validation_loss: if it was measured at this step.
            callbacks: their state.
            wait: return only when the checkpoint is complete.

        Raises:
            NotFinite: a number to be saved is not finite; nothing is saved or deleted.
        """
        if step != self._saved_step:
            # Everything from here on counts as waiting, until the saver lets training continue.
            started = time.perf_counter()
            setup = self._setup
            # After an evaluation FSDP may still hold gathered parameters, which are no shards.
            setup.strategy.sharding.reshard(setup.model)
            pieces = list(capture(setup.model, self._state, rank(), setup.plan.world_size))
            if name := first_not_finite(kept_numbers(setup, pieces)):
                raise diverged(setup, f"After step {step}, {name} has a number that is not finite")
            companions = self._companion_writer(callbacks)
            metadata = self._metadata(step, validation_loss)
            self._saver.save(metadata, pieces, companions, wait=wait, started=started)
            self._saved_at, self._saved_step = time.monotonic(), step
            if (refusal := self._saver.copies.refusal) and not self._has_warned_of_refusal:
                self._has_warned_of_refusal = True
                self._journal.warn(
                    f"Host memory for checkpoints cannot be page-locked ({refusal}): training "
                    "waits longer for each."
                )
            self._warn_of_limit()
        elif wait:
            self._saver.wait()
        self.report()

    def _warn_of_limit(self) -> None:
        """Warn once if a copy was too large."""
        needed, settings = self._saver.unstaged_bytes, self._settings
        if needed and settings.asynchronous and not self._has_warned_of_limit:
            self._has_warned_of_limit = True
            self._journal.warn(
                f"The host copy of a checkpoint would take {bytes_text(needed)} on this rank, and "
                f"checkpoint.max_staged_bytes allows {bytes_text(settings.max_staged_bytes or 0)}: "
                "training waits for each checkpoint."
            )

    def report(self) -> None:
        """Report saves that ended since the last call.

        Raises:
            SavingFailed: several in a row failed.
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
                    "Earlier checkpoints are untouched."
                )
            if saved.note is not None:
                self._journal.warn(f"After the checkpoint of step {saved.step}: {saved.note}.")
        self._saver.require_success()

    def _advise(self, saved: Saved) -> None:
        """Compute the best interval from the cost of a save, if the run may be interrupted."""
        recorder, chosen = self._journal.recorder, self._settings.save_every == "auto"
        if not (chosen or self._restarts or launcher_starts_again()):
            return
        self._stalls_s.append(saved.stall_s)
        cost_s = usual_save_s(self._stalls_s)
        between_s = mean_between_losses_s(
            self._between_losses_s, recorder.training_s, self._restarts
        )
        # A save begins when the one before is complete.
        advised_s = max(best_interval_s(cost_s, between_s), saved.write_s)
        if len(self._stalls_s) == 2 and not chosen:  # the first one takes longer
            self._journal.display.message(
                f"a checkpoint costs {duration_text(cost_s)}: one every {duration_text(advised_s)} "
                f"loses the least time, if a machine is lost every {duration_text(between_s)} "
                "(checkpoint.save_every auto)"
            )
        self._advised_s = advised_s
        if (noted := recorder.report.checkpoints) is not None:
            recorder.note(checkpoints=dataclasses.replace(noted, advised_every_s=advised_s))

    def load_best(self, step: int, validation_loss: float | None) -> None:
        """Load the weights of the checkpoint with the lowest validation loss into the model.

        Every rank calls this, after the last step.

        Args:
            step: of the model's current weights.
            validation_loss: of these weights, if it was measured in this session.
        """
        self.finish()
        start, recorder = self._setup.start, self._journal.recorder
        # Into the trained model, not only into the result: scores and the sample answer after
        # training are then those of the result.
        places = [(self._store, step)]
        if start.directory is not None and not start.in_place:  # steps before the run branched off
            # Its later steps belong to the other run.
            places.append((Store(start.directory.parent), start.step))
        found = None
        if rank() == 0:
            # Only rank 0 reads checkpoints in full; the others get its choice.
            now = None if validation_loss is None else (validation_loss, step)
            found = best_checkpoint(places, now, self._journal.warn)
        # Without any known loss, the result is of the current step.
        best, place = broadcast_ints(*(found or (step, -1)))
        loss = validation_loss if best == step else None
        if best != step or (loss is None and place >= 0):
            # An earlier session may have measured the loss of the current step: the checkpoint has
            # it.
            checkpoint = places[place][0].path(best)
            metadata = read_metadata(checkpoint)
            loss = metadata.validation_loss
            if best != step:
                from ftkit.checkpoint.stored_state import StoredState

                stored = StoredState.in_checkpoint(checkpoint, metadata)
                with self._journal.display.phase("taking the best checkpoint", brief=True):
                    replace_trained(self._setup.model, self._setup.strategy.sharding, stored)
                self._weights.are_kept()
        losses = self._losses_of(best)
        recorder.note(result=ChosenResult(step=best, validation_loss=loss, losses=losses))
        self._log_best(best, loss)

    def _losses_of(self, step: int) -> dict[str, float]:
        """Validation losses of a step by source and set, on rank 0."""
        try:
            rows = read_validation(self._directory.validation) if rank() == 0 else []
        except UserError as error:  # another program has changed the file
            self._journal.warn(f"{error} The report lacks the losses of the result.")
            return {}
        row = next((row for row in rows if row["step"] == step), {})
        found = ((name, row.get(column)) for name, column in loss_columns(rows))
        return {name: loss for name, value in found if (loss := finite(value)) is not None}

    def _log_best(self, step: int, loss: float | None) -> None:
        """Show the step of the result, and warn if a better one was not saved."""
        if loss is None:
            self._journal.warn("No validation loss is known: the result is of the last step.")
            return
        self._journal.display.message(f"the result is of step {step}: validation loss {loss:.4f}")
        known = self._journal.recorder.report.loss
        if known is not None and known.validation_best is not None and known.validation_best < loss:
            self._journal.warn(
                f"The lowest validation loss, {known.validation_best:.4f}, was that of step "
                f"{known.validation_best_step}, which was not saved: the result is of step {step}."
            )

    def finish(self) -> None:
        """Wait for the checkpoint that is being written."""
        self._saver.wait()
        self.report()

    def release(self) -> None:
        """Free the memory for saves; nothing can be saved afterwards."""
        self._saver.release()

    def amend(self, step: int, validation_loss: float | None) -> None:
        """Add later measurements to the newest checkpoint, if it is of this step."""
        self.finish()
        # The checkpoint of this step is missing if its save failed.
        if rank() > 0 or self._store.newest() != step:
            return
        changes: dict[str, Any] = {"carried": self._journal.recorder.carried()}
        if validation_loss is not None:
            changes["validation_loss"] = validation_loss
        metadata = dataclasses.replace(self._store.metadata(step), **changes)
        try:
            write_metadata(metadata, self._store.path(step))
            # The new loss may change which checkpoints are among the best.
            self._store.prune(**dataclasses.asdict(self._retention))
        except OSError as error:
            self._journal.warn(f"The checkpoint of step {step} lacks its validation loss: {error}")

    def _companion_writer(self, callbacks: CallbackState) -> Callable[[Path], list[Path]] | None:
        """Gather the adapter; on rank 0, returns a function that writes files beside the shards."""
        setup, recipe = self._setup, self._setup.recipe
        adapter: list[tuple[str, Tensor]] = []
        if isinstance(recipe, LoraRecipe):
            with self._weights.in_place():
                weights = result_weights(setup.model, setup.strategy.sharding)
                # Copied now, because a thread writes the files while training changes the weights.
                adapter = [(name, tensor.cpu().clone()) for name, tensor in weights if rank() == 0]
        if rank() > 0:
            # Only now: gathering the adapter is a collective.
            return None
        plugin = plugin_in_use()

        def write(directory: Path) -> list[Path]:
            # A run that continues from the checkpoint needs the rows before it, so they must be on
            # the disk.
            self._journal.recorder.sync_rows()
            written = write_companions(
                directory,
                recipe,
                setup.base,
                setup.chat_files,
                adapter=adapter,
                fingerprint=setup.identities[0].fingerprint,
            )
            if setup.companion is not None:
                written += setup.companion.write(directory)
            if callbacks:
                written.append(callbacks.write(directory))
            if plugin is not None:
                written.append(directory / PLUGIN)
                written[-1].write_text(plugin.source, encoding="utf-8")
            return written

        return write

    def _metadata(self, step: int, validation_loss: float | None) -> Metadata:
        setup, recorder, start = self._setup, self._journal.recorder, self._setup.start.metadata
        plan, recipe, carried = setup.plan, setup.recipe, recorder.carried()
        of_base, of_data = setup.identities
        stream, samples = setup.data.stream, recorder.samples
        return Metadata(
            method=recipe.method,
            step=step,
            samples=samples,
            tokens=recorder.tokens,
            epochs=recorder.epochs,
            training_s=recorder.training_s,
            total_steps=setup.schedule.total_steps,
            learning_rate=setup.learning_rate * setup.schedule.share(step),
            schedule=setup.schedule.numbers(),
            lr_schedule=setup.schedule.kind,
            loss=carried["loss"]["last"],
            validation_loss=validation_loss,
            max_seq_length=setup.max_seq_length,
            optimizer=recipe.optimizer["class_path"],
            optimizer_scalars=self._state.scalars() | setup.strategy.loss_scale(),
            rng={"seed": recipe.seed, "rule": "every step seeds from (seed, step, rank)"},
            seed_names=setup.start.seed_names,
            base=of_base,
            data=of_data,
            stream=None if stream is None else [dict(one) for one in stream.position(samples)],
            beside=None if setup.companion is None else setup.companion.identity,
            layout=Layout(
                strategy=plan.strategy,
                world_size=plan.world_size,
                devices=plan.devices,
                num_nodes=plan.num_nodes,
                precision=plan.precision,
                micro_batch_size=plan.micro_batch_size,
                micro_batch_tokens=plan.micro_batch_tokens,
                accelerator=plan.accelerator,
            ),
            versions=self._versions,
            saved_at=utc_now(),
            # The changes of all sessions, so that the newest checkpoint tells the history.
            changes=[*(start.changes if start else []), *self._changes],
            # Loggers add their ids to this dictionary, some of them after it was passed here.
            loggers=self._run_ids,
            carried=carried,
        )


def write_companions(
    directory: Path,
    recipe: Recipe,
    base: BaseModel,
    chat_files: dict[str, bytes],
    *,
    adapter: Iterable[tuple[str, Tensor]],
    fingerprint: str,
) -> list[Path]:
    """Write the files of a checkpoint beside its shards, and return their paths.

    Args:
        directory: of the checkpoint.
        recipe: of the run, saved as a whole.
        base: the base model.
        chat_files: files that say how the result is prompted.
        adapter: trained parameters of LoRA, by our names.
        fingerprint: of the base model.
    """
    own, others = directory / RECIPE, directory / BASE
    # resume belongs to this command: a run with the stored recipe begins anew.
    own.write_text(to_yaml(dataclasses.replace(recipe, resume=False)), encoding="utf-8")
    written = [own]
    if isinstance(recipe, LoraRecipe):
        others = directory / ADAPTER
        save_adapter(
            adapter,
            base,
            recipe,
            others,
            tie_embeddings=recipe.train.tie_embeddings,
            base_fingerprint=fingerprint,
            beside=chat_files,
        )
        return [*written, *others.iterdir()]
    others.mkdir()
    save_without_weights(base, others)
    # Beside base/ and not in it: there, chat_template tokenizer has to mean the base model's own.
    prompting = [directory / name for name in (CHAT_TEMPLATE, GENERATION)]
    for file in prompting:
        file.write_bytes(chat_files[file.name])
    return [*written, *prompting, *others.iterdir()]


# The interval between checkpoints


def best_interval_s(save_s: float, between_losses_s: float) -> float:
    """Seconds of training between two saves with which the least time is lost.

    Frequent saves cost time themselves; rare ones lose more steps when a machine is lost.

    J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
    Future Generation Computer Systems 22 (2006), 303-312, equation 37. Its first term is
    J. W. Young's, "A first order approximation to the optimum checkpoint interval",
    Communications of the ACM 17 (1974), 530-531.

    Args:
        save_s: time for which training waits for a save; above 0.
        between_losses_s: mean time between two losses; above 0.
    """
    # The second case of the equation: the series below only holds for shorter saves.
    if save_s >= 2 * between_losses_s:
        return between_losses_s
    share = save_s / (2 * between_losses_s)
    first_order_s = math.sqrt(2 * save_s * between_losses_s)
    return first_order_s * (1 + math.sqrt(share) / 3 + share / 9) - save_s


def usual_save_s(saves_s: Sequence[float]) -> float:
    """Median duration of the saves so far, at least one; the first also allocates memory."""
    return median(saves_s[1:] or saves_s)


def mean_between_losses_s(expected_s: float, training_s: float, losses: int) -> float:
    """Mean time between two losses of a machine; the expectation counts as one loss.

    Args:
        expected_s: time between two losses, from the recipe.
        training_s: of the run so far.
        losses: of the run so far.
    """
    return (expected_s + training_s) / (1 + losses)
