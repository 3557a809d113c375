"""Checkpointing of a run: when a checkpoint is due, what goes in, and what came of it."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor

from ftkit.checkpoint.metadata import BaseIdentity, DataIdentity, Layout, Metadata, write_metadata
from ftkit.checkpoint.saver import Retention, Saver
from ftkit.checkpoint.shards import StoredState
from ftkit.checkpoint.state import Holder, TorchState, ZeroState, capture, restore
from ftkit.config.parsing import to_yaml
from ftkit.config.recipe import LoraRecipe
from ftkit.console.display import Display
from ftkit.console.formatting import utc_now
from ftkit.lora.save import save_adapter
from ftkit.model.load_weights import trained_weights
from ftkit.pretrained.base_model import BaseModel, save_companions
from ftkit.runs.job import Job
from ftkit.strategies.distributed import rank
from ftkit.training.module import FineTuner
from ftkit.training.recorder import Recorder
from ftkit.utils.hardware import versions
from ftkit.utils.units import parse_duration

LOSS_SCALE, LOSS_SCALE_AGE = "loss_scale", "loss_scale_age"
"""Names among a checkpoint's optimizer_scalars."""


def goes_on_in_place(job: Job) -> bool:
    """Whether the run continues from a checkpoint of its own."""
    own = job.directory.store.directory.resolve()
    return job.start is not None and Path(job.start).resolve().parent == own


class Checkpointing:
    """Saves the state of training, and puts it back where a run continues."""

    def __init__(
        self,
        job: Job,
        module: FineTuner,
        base: BaseModel,
        *,
        base_identity: BaseIdentity,
        data_identity: DataIdentity,
        max_seq_length: int,
        start: Metadata | None,
        run_ids: dict[str, str],
        recorder: Recorder,
        display: Display,
    ) -> None:
        """Prepare.

        Args:
            job: what is done.
            module: what is trained.
            base: the model that it starts from, or started from.
            base_identity: which model that is.
            data_identity: which data it learns.
            max_seq_length: as resolved.
            start: the checkpoint that training continues from.
            run_ids: of loggers, for their next session.
            recorder: where measurements go.
            display: where messages go.
        """
        self._job, self._module, self._base = job, module, base
        self._base_identity, self._data_identity = base_identity, data_identity
        self._max_seq_length = max_seq_length
        self._start, self._run_ids = start, run_ids
        self._recorder, self._display = recorder, display
        self._plan = job.plan
        settings = self._plan.recipe.checkpoint
        self._retention = Retention(
            keep_last=settings.keep_last,
            keep_every=settings.keep_every,
            keep_best=settings.keep_best,
        )
        self._store = job.directory.store
        self._saver = Saver(
            self._store,
            [job.directory.rank(r).path for r in range(self._plan.world_size)],
            rank(),
            self._retention,
            asynchronous=settings.asynchronous,
        )
        every = settings.save_every
        self._interval_s = parse_duration(every) if every is not None else float("inf")
        self._versions = versions()  # looking them up takes time that training would stand still
        self._refusal_is_told = False
        self._saved_at = time.monotonic()
        self._saved_step = start.step if start is not None and goes_on_in_place(job) else None

    def attach(self, trainer: L.Trainer, stored: StoredState | None) -> None:
        """Take the optimizer of a trainer that is set up; put its state back if there is one."""
        self._trainer = trainer
        self._module.before_update = self._saver.copies.before_update
        self._holder: Holder
        if self._plan.strategy == "deepspeed":
            self._holder = ZeroState(trainer.strategy.model)
        else:
            self._holder = TorchState(self._module.model, trainer.optimizers[0])
        if stored is not None and self._start is not None:
            scalars = dict(self._start.optimizer_scalars)
            self._set_loss_scale(scalars.pop(LOSS_SCALE, None), scalars.pop(LOSS_SCALE_AGE, 0.0))
            restore(self._module.model, self._holder, stored, scalars)

    def due(self, step: int) -> bool:
        """Whether the step is one of those that are saved; the same on all ranks."""
        train, settings = self._plan.recipe.train, self._plan.recipe.checkpoint
        intervals = (train.save_interval, settings.keep_every)
        return any(interval and step % interval == 0 for interval in intervals)

    def overdue(self) -> bool:
        """Whether the last checkpoint is too old, by the clock of this rank."""
        return time.monotonic() - self._saved_at > self._interval_s and not self._saver.busy

    def save(self, step: int, *, validation_loss: float | None, wait: bool) -> None:
        """Save after an optimizer step; every rank calls this.

        Args:
            step: optimizer steps done.
            validation_loss: if it was measured at this step.
            wait: until the checkpoint is complete.
        """
        if step != self._saved_step:
            started = time.perf_counter()
            module = self._module
            assert module.sharding is not None
            module.sharding.reshard(module.model)
            companions = self._companions()
            pieces = capture(module.model, self._holder, rank(), self._plan.world_size)
            metadata = self._metadata(step, validation_loss)
            self._saver.save(metadata, pieces, companions, wait=wait, started=started)
            self._saved_at, self._saved_step = time.monotonic(), step
            if (refusal := self._saver.copies.refusal) and not self._refusal_is_told:
                self._refusal_is_told = True
                self._warn(
                    f"Host memory for checkpoints cannot be page-locked ({refusal}): training "
                    "stands still longer for each."
                )
        elif wait:
            self._saver.wait()
        self.report()

    def report(self) -> None:
        """Tell what became of the checkpoints that were being written.

        Raises:
            SavingFailed: they could not be, time and again.
        """
        for saved in self._saver.finished():
            if saved.error is None:
                self._recorder.on_save(
                    saved.path,
                    size_bytes=saved.size_bytes,
                    stall_s=saved.stall_s,
                    write_s=saved.write_s,
                )
            else:
                self._recorder.on_failed_save()
                self._warn(
                    f"The checkpoint of step {saved.step} could not be saved: {saved.error}. "
                    "The ones before it are untouched."
                )
            if saved.note is not None:
                self._warn(f"After the checkpoint of step {saved.step}: {saved.note}.")
        self._saver.require_success()

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
        changes: dict[str, Any] = {"carried": self._recorder.carried()}
        if validation_loss is not None:
            changes["validation_loss"] = validation_loss
        metadata = dataclasses.replace(self._store.metadata(step), **changes)
        try:
            write_metadata(metadata, self._store.path(step))
            self._store.prune(**dataclasses.asdict(self._retention))
        except OSError as error:
            self._warn(f"The checkpoint of step {step} lacks its validation loss: {error}")

    def _warn(self, text: str) -> None:
        self._display.warning(text)
        self._recorder.warn(text)

    def _companions(self) -> Callable[[Path], list[Path]] | None:
        """What writes the files beside the shards, on rank 0."""
        recipe = self._plan.recipe
        module, base = self._module, self._base
        fingerprint = self._base_identity.fingerprint
        adapter: list[tuple[str, Tensor]] = []
        if isinstance(recipe, LoraRecipe):
            assert module.sharding is not None
            weights = trained_weights(module.model, module.sharding)
            adapter = [(name, tensor.cpu().clone()) for name, tensor in weights if rank() == 0]
        if rank() > 0:
            return None

        def write(directory: Path) -> list[Path]:
            self._recorder.sync_rows()
            own, others = directory / "recipe.yaml", directory / "base"
            text = to_yaml(dataclasses.replace(recipe, resume=False))
            own.write_text(text, encoding="utf-8")
            if isinstance(recipe, LoraRecipe):
                others = directory / "adapter"
                save_adapter(adapter, base, recipe, others, fingerprint)
            else:
                others.mkdir()
                save_companions(base, others)
            return [own, *(path for path in others.rglob("*") if path.is_file())]

        return write

    def _metadata(self, step: int, validation_loss: float | None) -> Metadata:
        plan, recorder, schedule = self._plan, self._recorder, self._module.schedule
        recipe, carried = plan.recipe, recorder.carried()
        return Metadata(
            method=recipe.method,
            step=step,
            samples=recorder.samples,
            tokens=recorder.tokens,
            epochs=recorder.epochs,
            training_s=recorder.training_s,
            total_steps=schedule.total_steps,
            learning_rate=self._module.learning_rate_of(step),
            schedule=dataclasses.asdict(schedule),
            loss=carried["loss"]["last"],
            validation_loss=validation_loss,
            max_seq_length=self._max_seq_length,
            optimizer=recipe.optimizer["class_path"],
            optimizer_scalars=self._holder.scalars() | self._loss_scale(),
            rng={"seed": recipe.seed, "rule": "every step seeds from (seed, step, rank)"},
            base=self._base_identity,
            data=self._data_identity,
            layout=Layout(
                strategy=plan.strategy,
                world_size=plan.world_size,
                devices=plan.devices,
                num_nodes=recipe.num_nodes,
                precision=plan.precision,
                micro_batch_size=plan.micro_batch_size,
                accelerator=plan.accelerator,
            ),
            versions=self._versions,
            saved_at=utc_now(),
            changes=[*(self._start.changes if self._start else []), *self._job.changes],
            loggers=self._run_ids,
            carried=carried,
        )

    def _loss_scale(self) -> dict[str, float]:
        """Of float16 training: its factor, and steps since that last changed."""
        if not self._plan.precision.startswith("16"):
            return {}
        if self._plan.strategy == "deepspeed":
            engine: Any = self._trainer.strategy.model
            return {LOSS_SCALE: float(engine.optimizer.cur_scale)}
        scaler: Any = self._trainer.precision_plugin
        state = scaler.scaler.state_dict()
        return {LOSS_SCALE: state["scale"], LOSS_SCALE_AGE: float(state["_growth_tracker"])}

    def _set_loss_scale(self, scale: float | None, age: float) -> None:
        if scale is None or not self._plan.precision.startswith("16"):
            return
        if self._plan.strategy == "deepspeed":
            engine: Any = self._trainer.strategy.model
            engine.optimizer.cur_scale = scale
            return
        scaler: Any = self._trainer.precision_plugin
        state = scaler.scaler.state_dict() | {"scale": scale, "_growth_tracker": int(age)}
        scaler.scaler.load_state_dict(state)
