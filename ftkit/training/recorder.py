"""Recorder of a rank: keeps its report and metrics.csv up to date while it trains."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, get_args

import torch

from ftkit.checkpoint.metadata import Metadata
from ftkit.data.sources import data_source, validation_sets
from ftkit.models.routing import Routing
from ftkit.objectives.objective import make_objective
from ftkit.planning.meter import DevicePeak
from ftkit.recipe.plan import Plan
from ftkit.runs.directory import RankDirectory
from ftkit.runs.report import numbers
from ftkit.runs.report.meters import SourceMeter, StepRecord, ThroughputMeter
from ftkit.runs.report.metrics import MetricsWriter, ValidationWriter
from ftkit.runs.report.report import (
    Checkpoints,
    DataCounts,
    ExpertLoad,
    Files,
    Loss,
    PeakMemory,
    PhaseName,
    PhaseTimes,
    Progress,
    RankMemory,
    Report,
    Source,
    Spread,
    TermValues,
    Throughput,
    Tokens,
    write_report,
)
from ftkit.runs.system_metrics import SystemSampler
from ftkit.strategies.distributed import make_device
from ftkit.strategies.step_memory import RankStepMemory, StepMemory
from ftkit.utils.accelerators.kinds import peak_flops
from ftkit.utils.accelerators.use import product_name
from ftkit.utils.files import write_with_reserve
from ftkit.utils.hardware import CpuUtilization, host_memory
from ftkit.utils.json_values import from_json

STATE_INTERVAL_S = 5.0
"""Longest training time that a report lacks after a kill, in seconds."""


class Recorder:
    """Measurements of one rank.

    The report so far is kept in the state directory, so that the supervisor has one however the
    rank ends. A run that continues from a checkpoint keeps its logs and those sections of the
    report that cover the whole run; see `ftkit.runs.report.report`.

    A full disk does not stop a run: rows wait for space, and the report is written later.
    """

    def __init__(
        self,
        report: Report,
        state: RankDirectory,
        plan: Plan,
        *,
        began_s: float,
        start: Metadata | None = None,
        show_warning: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Open the logs and start the report.

        Args:
            report: of the session before its first step.
            state: directory of this rank's report. Rank 0 also writes metrics.csv and
                validation.csv, whose rows after the start were removed before
                (`ftkit.runs.report.metrics.cut_rows`).
            plan: of the run.
            began_s: when the command started, by `time.monotonic`.
            start: metadata of the checkpoint to continue from; None: the run begins.
            show_warning: shows a warning of the recorder itself.
        """
        self._show_warning = show_warning
        self._start = start
        self._start_step = start.step if start else 0
        self._run, self._plan, self._state = state.run, plan, state
        self._device = device = make_device(plan.accelerator)
        self._rank = state.rank
        # Few runs compute a reference, and the others do not mention it.
        phases: tuple[PhaseName, ...] = get_args(PhaseName)
        self._times: dict[PhaseName, float] = dict.fromkeys(phases, 0.0)
        del self._times["reference"]
        # The phase of set-up began with the command, before this process existed.
        self._began_s = self._since = began_s
        self._is_over = False
        self._written_at = time.monotonic()
        self._meter = ThroughputMeter()
        self._first_loss: float | None = None
        self._last_record: StepRecord | None = None
        self._imbalance_sum = 0.0
        self._tokens = Tokens(real=0, label=0, padded=0, padding_fraction=0.0)
        self._passes: Callable[[int], float] = float
        self._flops_per_token: float | None = None
        self._routing = Routing((), 0, None)
        run = self._run
        tables = run if state.rank == 0 else state
        # Columns of the tables are known before any data are read.
        names = [part.name for part in data_source(plan.recipe.data).parts()]
        sets = tuple(validation_sets(plan.recipe.data, plan.recipe.eval.sets))
        before = start.carried if start else {}
        self._sources = SourceMeter.from_carried(names, before.get("sources"))
        # least=1: even a single set has a loss of its own, where a single source is all of the
        # data.
        self._sets = SourceMeter.from_carried(sets, before.get("sets"), least=1)
        after, sources = start.step if start else None, tuple(self._sources.sources)
        self._objective = make_objective(plan.recipe.objective)
        self._metrics = MetricsWriter(
            tables.metrics,
            after_step=after,
            sources=sources,
            terms=tuple(term.name for term in self._objective.reported),
        )
        sources += sets
        self._validation = ValidationWriter(
            tables.validation,
            after_step=after,
            sources=sources,
            terms=tuple(term.name for term in self._objective.validated.reported),
            is_cross_entropy=self._objective.is_cross_entropy,
        )
        of_terms = from_json(dict[str, TermValues], before.get("terms") or {})
        self._stalls_s: list[float] = []
        self._writes_s: list[float] = []
        self.device_peak = DevicePeak(device)
        # Every rank samples its own device for the report; only rank 0 writes rows.
        written = None if state.rank else run.system
        self._phases_entered = 0
        self.system = SystemSampler(
            device,
            lambda: self.steps,
            path=written,
            after_step=after,
            stretch=self._stretch_at_full_speed,
        )
        self._cpu = CpuUtilization()
        self._host_bytes = 0
        self.report = dataclasses.replace(
            report,
            files=Files(metrics=run.metrics.name, validation=run.validation.name, log=run.log.name),
            sources=self._sources.sources,
            sets=self._sets.sources,
            terms={
                term.name: of_terms.get(term.name, TermValues(is_share=term.is_share))
                for term in self._objective.reported
            },
        )
        self.note(loss=self.report.loss or Loss())

    def __enter__(self) -> "Recorder":
        self._try_to_write()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        self.system.stop()
        self._metrics.close()
        self._validation.close()
        self._note_failures()
        # The steps since the last write are not in the report yet.
        self._summarise()
        self._account(self.report.phase)
        # The last report must be written on a full disk too: space is reserved for it.
        write_with_reserve(self._write, self._run.reserve)

    @property
    def steps(self) -> int:
        """Optimizer steps done, over all sessions."""
        return self._last_record.step if self._last_record else self._start_step

    @property
    def samples(self) -> int:
        """Samples trained on over all sessions, which is the position in the data."""
        assert self.report.progress is not None
        return self.report.progress.samples

    @property
    def epochs(self) -> float:
        """Samples trained on, relative to one epoch."""
        assert self.report.progress is not None
        return self.report.progress.epochs

    @property
    def tokens(self) -> int:
        """Real tokens trained on, over all sessions."""
        return self._tokens.real + (self._start.tokens if self._start else 0)

    @property
    def training_s(self) -> float:
        """Seconds of training so far, over all sessions, without validation and saving."""
        # The time of the current phase is added to the others only when it ends.
        running = time.monotonic() - self._since if self.report.phase == "training" else 0.0
        return self._times["training"] + running + (self._start.training_s if self._start else 0.0)

    def carried(self) -> dict[str, Any]:
        """Return the sections of the report that cover all sessions, for a checkpoint."""
        return {
            "loss": dataclasses.asdict(self._loss()),
            "terms": {name: dataclasses.asdict(one) for name, one in self.report.terms.items()},
            "exact_match": (match := self.report.exact_match) and dataclasses.asdict(match),
            "tasks": [dataclasses.asdict(score) for score in self.report.tasks],
            "examples": [dataclasses.asdict(example) for example in self.report.examples],
            "scores": [dataclasses.asdict(score) for score in self.report.scores],
            "sources": self._sources.carried,
            "sets": self._sets.carried,
            "restarts": [dataclasses.asdict(restart) for restart in self.report.restarts],
        }

    def on_save(self, checkpoint: Path, *, size_bytes: int, stall_s: float, write_s: float) -> None:
        """Count a complete checkpoint.

        Args:
            checkpoint: its directory.
            size_bytes: total of its files.
            stall_s: how long training waited for it.
            write_s: from the request to its completion.
        """
        for table in (self._metrics, self._validation):
            table.flush()  # a run that continues from there needs the rows before it
        self._stalls_s.append(stall_s)
        self._writes_s.append(write_s)
        self.note(
            checkpoints=dataclasses.replace(
                self._checkpoints(),
                saved=len(self._stalls_s),
                last=self._run.shown_path(checkpoint),
                last_bytes=size_bytes,
                stall_s=Spread.of(self._stalls_s),
                write_s=Spread.of(self._writes_s),
            )
        )
        self._try_to_write()  # once deleted, a checkpoint cannot be counted by its directory

    def sync_rows(self) -> None:
        """Wait until the rows so far are on the disk, as a checkpoint requires."""
        self._metrics.sync()
        self._validation.sync()

    def on_failed_save(self) -> None:
        """Count a checkpoint that could not be written."""
        before = self._checkpoints()
        self.note(checkpoints=dataclasses.replace(before, failed=before.failed + 1))

    def saved(self, final: str) -> None:
        """Set the directory of the result, relative to out_dir."""
        assert self.report.files is not None
        self.note(files=dataclasses.replace(self.report.files, final=final))

    def note(self, **changes: Any) -> None:
        """Set sections of the report."""
        self.report = dataclasses.replace(self.report, **changes)

    def warn(self, text: str) -> None:
        """Add a line to the report's warnings."""
        self.note(warnings=[*self.report.warnings, text])

    def expect(
        self, passes: Callable[[int], float], flops_per_token: float, routing: Routing
    ) -> None:
        """Set what later numbers are relative to, and what counts the load of experts.

        Args:
            passes: over the training data, in so many samples.
            flops_per_token: of a step.
            routing: of the model.
        """
        self._passes = passes
        self._flops_per_token = flops_per_token
        self._routing = routing
        if routing.loss is not None:
            self._metrics.add_router_loss()

    def on_data(self, counts: dict[str, DataCounts], sources: dict[str, Source]) -> None:
        """Set the counts of the data, and of each source if there are several."""
        self._sources.prepare(sources)
        self.note(data=counts, sources=self._sources.sources)

    def on_sets(self, sets: dict[str, Source]) -> None:
        """Set the counts of the sets of eval.sets."""
        self._sets.prepare(sets)

    def enter(self, phase: PhaseName) -> None:
        """Begin a phase: time from now on counts for it."""
        self._account(phase)
        self._try_to_write()

    def end_phases(self) -> None:
        """Count time from now on for no phase: the run is over, its report is not yet."""
        self._account(self.report.phase)
        self._is_over = True

    def _account(self, phase: PhaseName) -> None:
        now = time.monotonic()
        before = self.report.phase
        if not self._is_over:
            self._times[before] = self._times.get(before, 0.0) + now - self._since
        self._since = now
        self._phases_entered += phase != before
        times = PhaseTimes(**self._times, total=now - self._began_s)
        self.note(phase=phase, phases_s=times)
        # From the first step on: imports and downloads would lower the mean.
        if phase == "training" and not self._cpu.started:
            self._cpu.start()
            self.system.start()

    def _stretch_at_full_speed(self) -> int | None:
        """Number of the stretch of steps that it is now; None: others than the speed is of."""
        is_training = self.report.phase == "training" and not self._is_over
        return self._phases_entered if is_training and self._meter.at_full_speed else None

    def on_step(
        self,
        record: StepRecord,
        imbalance: float | None,
        *,
        follows_memory: bool = False,
        of_sources: Sequence[int] = (),
    ) -> None:
        """Count an optimizer step and write its row of metrics.csv.

        Args:
            record: its measurements.
            imbalance: tokens of the fullest rank relative to the mean; None with a single rank.
            follows_memory: whether its memory was measured, which takes time.
            of_sources: its samples by source, if there are several.
        """
        self._sources.add(of_sources)
        self._imbalance_sum += imbalance or 0.0
        if self._last_record is None:
            self._first_loss = record.loss
        self._last_record = record
        self._tokens = self._tokens.with_more(
            real=record.tokens, label=record.label_tokens, padded=record.padded_tokens
        )
        self._meter.add(
            duration_s=record.duration_s,
            tokens=record.tokens,
            samples=record.samples,
            micro_steps=record.micro_steps,
            parts_s={str(part): seconds for part, seconds in record.parts_s.items()},
            follows_memory=follows_memory,
            compiled_graphs=record.compiled_graphs,
        )
        samples = self.samples + record.samples
        progress = Progress(steps=record.step, samples=samples, epochs=self._passes(samples))
        self.note(progress=progress)
        terms = {
            name: known.with_step(record.terms.get(name))
            for name, known in self.report.terms.items()
        }
        self.note(terms=terms)
        self._metrics.write(
            step=record.step,
            samples=samples,
            loss=record.loss,
            lr=record.learning_rate,
            grad_norm=record.gradient_norm,
            tokens=record.tokens,
            tokens_per_s=record.tokens / record.duration_s,
            of_sources=self._sources.samples,
            terms=[known.last for known in terms.values()],
            router_aux_loss=record.router_aux_loss,
        )
        self._note_failures()
        # Not after every step, because short steps would mostly write reports.
        if time.monotonic() - self._written_at > STATE_INTERVAL_S:
            self._summarise()
            # The same phase again: its time so far is counted, and the report written.
            self.enter(self.report.phase)

    def on_step_memory(self, measured: RankStepMemory) -> None:
        """Set what the memory of a step consists of."""
        self.note(step_memory=StepMemory(ranks=[measured]))

    def on_validation(
        self,
        step: int,
        loss: float,
        losses: Mapping[str, float | None] | None = None,
        terms: Mapping[str, float] | None = None,
    ) -> None:
        """Add a validation and write its row of validation.csv.

        Args:
            step: optimizer steps done.
            loss: of all samples.
            losses: by source, if there are several, and by set.
            terms: what the objective reports beside the loss, by name.
        """
        self._validation.write(
            step=step,
            samples=self.samples,
            val_loss=loss,
            of_sources=losses,
            terms=terms,
        )
        for meter in (self._sources, self._sets):
            meter.validate(losses or {}, is_first=step == 0)
        self._note_failures()
        before = self.report.loss
        assert before is not None
        self.note(
            loss=before.with_validation(
                step, loss, is_cross_entropy=self._objective.is_cross_entropy
            ),
            terms={
                name: known.with_validation(step, (terms or {}).get(name))
                for name, known in self.report.terms.items()
            },
        )

    def _summarise(self) -> None:
        """Update the sections that follow from the steps."""
        self.note(peak_memory=PeakMemory.of([self._memory()]))
        if self._last_record is None:
            return
        self.note(
            loss=self._loss(),
            tokens=self._tokens,
            step_s=self._meter.step_times(),
            throughput=self._throughput(),
            expert_load=ExpertLoad.of_choices(self._routing.layers, self._routing.load),
        )
        self.note(numbers=numbers.measured(self.report, self._warn_once))

    def _loss(self) -> Loss:
        """Loss with the newest step; the first one may be of an earlier session."""
        before = self.report.loss
        assert before is not None
        if self._last_record is None:
            return before
        first = self._first_loss if before.first is None else before.first
        last, of_routers = self._last_record.loss, self._last_record.router_aux_loss
        return dataclasses.replace(before, first=first, last=last, router_aux_loss=of_routers)

    def _checkpoints(self) -> Checkpoints:
        return self.report.checkpoints or Checkpoints()

    def _throughput(self) -> Throughput | None:
        speed = self._meter.result(self._plan.world_size)
        if speed is None or not self._cpu.started:
            return speed
        several = self._plan.world_size > 1
        # Only this session was measured.
        steps = self.steps - self._start_step
        return dataclasses.replace(
            speed,
            rank_imbalance=self._imbalance_sum / steps if several else None,
            mfu=self._mfu(speed),
            device_utilization=self.system.device_utilization,
            energy_wh=self.system.energy_wh,
            cpu_utilization=self._cpu.mean(),
        )

    def _mfu(self, speed: Throughput) -> float | None:
        """Model FLOPs utilization: floating-point operations per second relative to the peak."""
        name, precision = product_name(self._device), self._plan.precision
        if name is None or self._flops_per_token is None:
            return None
        # Dense peaks of a GPU in TF32 are several times those in float32.
        tf32 = torch.get_float32_matmul_precision() != "highest"
        # None for devices whose peak is not listed.
        peak = peak_flops(name, precision.partition("-")[0], tf32=tf32)
        return peak and speed.tokens_per_s_per_device * self._flops_per_token / peak

    def _memory(self) -> RankMemory:
        host = host_memory()
        # Linux keeps a peak of all resident pages, but none without mapped files: samples stand for
        # it.
        self._host_bytes = max(self._host_bytes, host.rss_anon_plus_shmem_bytes)
        return RankMemory(
            rank=self._rank,
            requested_bytes=self.device_peak.requested_bytes,
            allocated_bytes=self.device_peak.allocated_bytes,
            reserved_bytes=self.device_peak.reserved_bytes,
            rss_bytes=host.peak_rss_bytes,
            host_bytes=self._host_bytes,
        )

    def _note_failures(self) -> None:
        """Warn once of rows that cannot be written, and of files that others have changed."""
        run = self._run
        for file, table in ((run.metrics, self._metrics), (run.validation, self._validation)):
            if table.interference is not None:
                self._warn_once(f"{file.name} {table.interference}")
            if table.failure is None:
                continue
            reason = table.failure.strerror or table.failure
            text = f"{file.name} cannot be written ({reason}): its rows wait until there is space"
            self._warn_once(text)

    def _warn_once(self, text: str) -> None:
        # What warns runs after every step, or every few seconds.
        if text not in self.report.warnings:
            self.warn(text)
            self._show_warning(text)

    def _try_to_write(self) -> None:
        """Write the report so far, unless the disk is full."""
        with suppress(OSError):
            self._write()

    def _write(self) -> None:
        self._written_at = time.monotonic()
        write_report(self.report, self._state.path)
