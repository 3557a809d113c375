"""The run report: what was measured, as ``report.json`` and as a table for people.

A report is written for every run, also one that failed or was stopped: what it did not reach is
None. The keys of the file are the names of the fields below.
"""

import dataclasses
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from ftkit.errors import UserError
from ftkit.machine import Hardware
from ftkit.recipe import Recipe

SCHEMA_VERSION = 1
FILE_NAME = "report.json"

OutcomeName = Literal["completed", "interrupted", "out_of_memory", "failed"]
PhaseName = Literal["set_up", "training", "validation", "saving"]


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What the recipe came to on the devices at hand."""

    base_model: str | None = None
    """Name or directory of the base model."""
    accelerator: str | None = None
    """cpu or cuda."""
    device: str | None = None
    """Name of the device of rank 0, as its maker calls it."""
    devices: int | None = None
    """Devices per node."""
    world_size: int | None = None
    """Ranks over all nodes; one device each."""
    strategy: str | None = None
    """single, ddp, fsdp or deepspeed."""
    precision: str | None = None
    """Number format of training."""
    quantize: str | None = None
    """Format of the frozen base weights; None: not quantized."""
    optimizer: str | None = None
    """Class path of the optimizer."""
    parameters: int | None = None
    """Parameters of the model, adapter included, each counted once however it is sharded."""
    trainable_parameters: int | None = None
    """Parameters the optimizer changes."""
    max_seq_length: int | None = None
    """Sequences are cut to this many tokens."""
    global_batch_size: int | None = None
    """Sequences per step, over all ranks."""
    micro_batch_size: int | None = None
    """Sequences per forward pass on one rank."""
    micro_steps_per_step: int | None = None
    """Forward and backward passes of one rank per step."""
    total_steps: int | None = None
    """Steps of the whole run, had nothing stopped it."""
    warmup_steps: int | None = None
    """Steps over which the learning rate rises."""
    samples_per_epoch: int | None = None
    """Training samples used in one pass over the data."""


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """Seconds by phase. The phases do not overlap; total is the time of the whole command."""

    set_up: float | None = None
    """From the start of the command to the first step: processes, data, weights."""
    training: float | None = None
    """Steps only; validation and saving are taken out."""
    validation: float | None = None
    """All validations, sample answers and exact-match answers."""
    saving: float | None = None
    """Writing the result."""
    total: float | None = None
    """From the start of the command to its end."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Mean seconds of one step, by part, over the steps of the throughput window on rank 0."""

    data: float | None = None
    """Waiting for the batch and moving it to the device."""
    forward: float | None = None
    """Forward passes of all micro-steps, loss included."""
    backward: float | None = None
    """Backward passes of all micro-steps, gradient exchange included."""
    optimizer: float | None = None
    """Clipping and update."""
    other: float | None = None
    """The rest of the step."""
    total: float | None = None
    """The whole step; the sum of the parts."""


@dataclass(frozen=True, kw_only=True)
class DataCounts:
    """One split of the data."""

    records: int
    """Records in the source."""
    used: int
    """Records that became samples."""
    skipped_empty_output: int = 0
    """Left out: the expected answer is empty."""
    skipped_no_labels: int = 0
    """Left out: after cutting to max_seq_length no token of the answer is left."""
    truncated: int = 0
    """Used, but cut to max_seq_length."""
    tokens: int | None = None
    """Tokens of the used samples, after cutting, without padding."""
    label_tokens: int | None = None
    """Those of them that carry loss."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far training came."""

    steps: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """Samples trained on, over all ranks; fillers are not counted."""
    epochs: float = 0.0
    """Samples divided by the samples of one epoch."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokens of all training steps, over all ranks."""

    real: int
    """Tokens of samples, prompt and answer; padding and fillers are not counted."""
    label: int
    """Real tokens that carry loss."""
    padded: int
    """Positions that were computed and were padding."""
    padding_fraction: float
    """padded / (real + padded)."""


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Speed over the window: training steps without the first few, see ThroughputMeter."""

    tokens_per_s: float
    """Real tokens per second, over all ranks."""
    samples_per_s: float
    """Samples per second, over all ranks."""
    steps_per_s: float
    """Optimizer steps per second."""
    window_steps: int
    """Steps in the window."""
    window_s: float
    """Their time; validation and saving lie outside."""
    tokens_per_s_per_device: float
    """tokens_per_s / world_size."""
    mfu: float | None = None
    """Model FLOPs of the real tokens as a fraction of what the devices can do; None: unknown."""
    device_utilization: float | None = None
    """Mean fraction of time the GPUs were busy, as the driver reports it; None on CPU."""
    cpu_utilization: float | None = None
    """Mean fraction of all hardware threads that this run's processes kept busy."""


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Highest memory of one rank since the run started."""

    rank: int
    """Global rank."""
    allocated_bytes: int | None = None
    """Device memory in tensors, as torch counts it; None on CPU."""
    reserved_bytes: int | None = None
    """Device memory torch took from the driver; None on CPU."""
    rss_bytes: int | None = None
    """Resident host memory, file-mapped pages included."""
    host_bytes: int | None = None
    """Resident host memory without file-mapped pages, highest value sampled."""


@dataclass(frozen=True, kw_only=True)
class PeakMemory:
    """Highest memory by rank, and the largest value over the ranks; see RankMemory."""

    ranks: list[RankMemory]
    """One entry per rank."""
    allocated_bytes: int | None = None
    """Largest over the ranks."""
    reserved_bytes: int | None = None
    """Largest over the ranks."""
    rss_bytes: int | None = None
    """Largest over the ranks."""
    host_bytes: int | None = None
    """Largest over the ranks."""

    @classmethod
    def of(cls, ranks: Sequence[RankMemory]) -> "PeakMemory":
        """The maxima over the ranks; None where no rank knows the value."""

        def largest(values: list[int | None]) -> int | None:
            return max((value for value in values if value is not None), default=None)

        return cls(
            ranks=list(ranks),
            allocated_bytes=largest([rank.allocated_bytes for rank in ranks]),
            reserved_bytes=largest([rank.reserved_bytes for rank in ranks]),
            rss_bytes=largest([rank.rss_bytes for rank in ranks]),
            host_bytes=largest([rank.host_bytes for rank in ranks]),
        )


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Cross-entropy in nats per label token."""

    first: float | None = None
    """Of the first step."""
    last: float | None = None
    """Of the last step."""
    validation_first: float | None = None
    """Of the validation before the first step."""
    validation_last: float | None = None
    """Of the last validation."""
    validation_best: float | None = None
    """Lowest of all validations."""
    perplexity: float | None = None
    """exp(validation_last)."""


@dataclass(frozen=True, kw_only=True)
class ExactMatch:
    """Greedy answers to validation records that equal the expected text."""

    samples: int
    """Records answered."""
    before: float | None = None
    """Fraction right before the first step."""
    after: float | None = None
    """Fraction right after the last step."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One validation record with the answers of the model."""

    instruction: str
    """What the model was asked."""
    input: str = ""
    """The material it was asked about."""
    expected: str = ""
    """The answer in the data."""
    before: str | None = None
    """The model's answer before training."""
    after: str | None = None
    """The model's answer after training."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """What the run left behind; paths relative to its out_dir."""

    final: str | None = None
    """Directory of the result."""
    metrics: str | None = None
    """One row per step."""
    validation: str | None = None
    """One row per validation."""
    log: str | None = None
    """What was shown while it ran."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was measured in one run."""

    schema_version: int = SCHEMA_VERSION
    """Version of these definitions."""
    outcome: OutcomeName
    """How the run ended."""
    exit_reason: str
    """Why, in one sentence."""
    exit_code: int
    """Exit code of the command."""
    phase: PhaseName
    """The phase in which it ended."""
    started_at: str
    """ISO 8601, UTC."""
    finished_at: str
    """ISO 8601, UTC."""
    command: list[str] = field(default_factory=list)
    """The command line, tokens removed."""
    method: str | None = None
    """full or lora."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """What was asked, defaults filled in, tokens removed."""
    resolved: Resolved | None = None
    """What it came to."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of Python and of the packages that count."""
    hardware: Hardware | None = None
    """The machine of rank 0."""
    phases_s: PhaseTimes | None = None
    """Seconds by phase."""
    step_s: StepTimes | None = None
    """Seconds of a step by part."""
    data: dict[str, DataCounts] = field(default_factory=dict)
    """Counts by split."""
    progress: Progress | None = None
    """How far training came."""
    tokens: Tokens | None = None
    """Tokens trained on."""
    throughput: Throughput | None = None
    """Speed of training."""
    peak_memory: PeakMemory | None = None
    """Highest memory."""
    loss: Loss | None = None
    """Loss of training and validation."""
    exact_match: ExactMatch | None = None
    """Right answers before and after."""
    examples: list[Example] = field(default_factory=list)
    """Answers before and after."""
    warnings: list[str] = field(default_factory=list)
    """What the user should know, one line each."""
    files: Files | None = None
    """What the run left behind."""


def write_report(report: Report, out_dir: Path) -> Path:
    """Write ``out_dir/report.json``: the new report is there complete, or the old one still is.

    Access tokens are removed wherever they stand; a number that is not finite becomes null, since
    JSON has no word for it.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(_clean(dataclasses.asdict(report)), indent=2, allow_nan=False) + "\n"
    path = out_dir / FILE_NAME
    temporary = out_dir / f".{FILE_NAME}.{os.getpid()}"
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    directory = os.open(out_dir, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return path


def read_report(path: Path) -> Report:
    """Read a report from its file or from the run's directory; unknown keys are passed over.

    Raises:
        UserError: there is none, it is damaged, or it follows other definitions.
    """
    file = path / FILE_NAME if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror}).\n"
            "Name the directory of a run that has ended."
        ) from error
    except ValueError as error:
        raise UserError(f"{file} is not a report: it is not valid JSON ({error}).") from error
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version is None:
        raise UserError(f"{file} is not a report: it has no schema_version.")
    if version != SCHEMA_VERSION:
        raise UserError(
            f"{file} has schema_version {version}, but this ftkit reads version {SCHEMA_VERSION}.\n"
            "Read it with the ftkit that wrote it (see its versions.ftkit)."
        )
    try:
        report = _parse(Report, content)
    except (TypeError, KeyError) as error:
        raise UserError(f"{file} is not a report: {error}") from error
    assert isinstance(report, Report)
    return report


def _parse(kind: Any, value: Any) -> Any:
    """The value as the given type: dataclass, list, dict, union with None, literal or scalar."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any or (origin is Literal and value in arguments):
        return value
    if origin in (Union, UnionType):
        if value is None:
            return None
        (kind,) = (argument for argument in arguments if argument is not NoneType)
        return _parse(kind, value)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        hints = get_type_hints(kind)
        known = {key: _parse(hints[key], item) for key, item in value.items() if key in hints}
        return kind(**known)
    if origin is list and isinstance(value, list):
        return [_parse(arguments[0], item) for item in value]
    if origin is dict and isinstance(value, dict):
        return {key: _parse(arguments[1], item) for key, item in value.items()}
    if kind is float and type(value) in (int, float):
        return float(value)
    if type(value) is kind:
        return value
    raise TypeError(f"{value!r} is not {getattr(kind, '__name__', kind)}.")


_SECRET = r"[\w.-]*(?:access_token|hf_token|api_key)"
_SECRET_KEY = re.compile(_SECRET)
_SECRET_FLAG = re.compile(rf"--{_SECRET}")
_SECRET_ASSIGNMENT = re.compile(rf"""({_SECRET}["']?\s*[=:]\s*["']?)[^\s"',}}]+""")
_HUB_TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{20,}")
REMOVED = "***"


def recipe_as_dict(recipe: Recipe) -> dict[str, Any]:
    """The recipe with its defaults, ready for JSON, without access tokens at any depth."""
    cleaned: dict[str, Any] = _clean(dataclasses.asdict(recipe))
    return cleaned


def without_tokens(argv: Sequence[str]) -> list[str]:
    """The command line with the values of access tokens replaced."""
    cleaned: list[str] = []
    for argument in argv:
        if cleaned and _SECRET_FLAG.fullmatch(cleaned[-1]):
            cleaned.append(REMOVED)
        else:
            cleaned.append(_redact(_SECRET_ASSIGNMENT.sub(rf"\g<1>{REMOVED}", argument)))
    return cleaned


def _redact(text: str) -> str:
    return _HUB_TOKEN.sub(REMOVED, text)


def _clean(value: Any) -> Any:
    """The value ready for JSON: tokens removed, paths as text, numbers finite or None."""
    if isinstance(value, dict):
        return {k: _clean(v) for k, v in value.items() if not _SECRET_KEY.fullmatch(str(k))}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str | Path):
        return _redact(str(value))
    return value


class ThroughputMeter:
    """Speed over the window: all training steps without the first few.

    The first steps also compile kernels, fill caches and allocate memory, so up to skip_steps of
    them are left out, but never more than a quarter of the steps: a run of 12 or more steps leaves
    out 3, one of 4 to 7 leaves out 1, and one of fewer than 4 steps counts them all.
    ``Throughput.window_steps`` says how many were counted.
    """

    def __init__(self, skip_steps: int = 3) -> None:
        self.skip_steps = skip_steps
        self._first: list[tuple[float, int, int]] = []
        self._steps = 0
        self._sums = (0.0, 0, 0)

    def add(self, *, duration_s: float, tokens: int, samples: int) -> None:
        """Count one step.

        Args:
            duration_s: time of the step, without validation and saving.
            tokens: real tokens of the step, over all ranks.
            samples: samples of the step, over all ranks.
        """
        step = (duration_s, tokens, samples)
        self._steps += 1
        if len(self._first) < self.skip_steps:
            self._first.append(step)
        self._sums = _plus(self._sums, step)

    @property
    def skipped_steps(self) -> int:
        """Steps left out of the window so far."""
        return min(self.skip_steps, self._steps // 4)

    def result(self, world_size: int) -> Throughput | None:
        """The speed over the window, or None before the first step.

        Args:
            world_size: ranks that share the tokens.
        """
        window_s, tokens, samples = self._sums
        for duration_s, step_tokens, step_samples in self._first[: self.skipped_steps]:
            window_s -= duration_s
            tokens -= step_tokens
            samples -= step_samples
        window_steps = self._steps - self.skipped_steps
        if window_steps == 0 or window_s <= 0:
            return None
        return Throughput(
            tokens_per_s=tokens / window_s,
            samples_per_s=samples / window_s,
            steps_per_s=window_steps / window_s,
            window_steps=window_steps,
            window_s=window_s,
            tokens_per_s_per_device=tokens / window_s / world_size,
        )


def _plus(a: tuple[float, int, int], b: tuple[float, int, int]) -> tuple[float, int, int]:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2]


def utc_now() -> str:
    """The time in UTC, ISO 8601, to the second: 2026-11-20T21:30:00Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def render(report: Report, out_dir: Path | None = None) -> Group:
    """The report as a table for people; what was not reached has no row.

    It has no box characters, so that it reads the same in a terminal, in a log file and without
    colour.

    Args:
        report: of a run with any outcome.
        out_dir: the run's directory as the reader should see it; without it, the paths of the
            files are shown as the report has them.
    """
    model = (report.resolved and report.resolved.base_model) or report.recipe.get("checkpoint_dir")
    title = " ".join(filter(None, ("ftkit", report.method, model and f"on {model}")))
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(overflow="fold")
    words = report.outcome.replace("_", " ")
    end = "" if report.outcome == "completed" else f" (during {_PHASE_WORDS[report.phase]})"
    style = _OUTCOME_STYLES[report.outcome]
    table.add_row(Text(words, style), Text(printable(report.exit_reason) + end))
    for label, value in _measured_rows(report):
        if value:
            table.add_row(Text(label), _Parts(value))
    for label, value in _text_rows(report, out_dir):
        table.add_row(Text(label), Text(printable(value)))
    line = Rule(Text(printable(title), "bold"), characters="-", align="left", style="dim")
    return Group(line, table)


_PHASE_WORDS: dict[PhaseName, str] = {
    "set_up": "set-up",
    "training": "training",
    "validation": "validation",
    "saving": "saving",
}
_OUTCOME_STYLES: dict[OutcomeName, str] = {
    "completed": "bold green",
    "interrupted": "bold yellow",
    "out_of_memory": "bold red",
    "failed": "bold red",
}


class _Parts:
    """A text that wraps after its commas, so that no number is torn from its unit."""

    def __init__(self, text: str) -> None:
        self._text = printable(text)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [""]
        for part in self._text.split(", "):
            longer = f"{lines[-1]}, {part}" if lines[-1] else part
            if len(longer) < options.max_width or not lines[-1]:
                lines[-1] = longer
            else:
                lines[-1] += ","
                lines.append(part)
        yield Text("\n".join(lines), overflow="fold")


def _measured_rows(report: Report) -> Iterator[tuple[str, str]]:
    """Label and value of every measurement; empty where there is none."""
    world_size = (report.resolved and report.resolved.world_size) or 1
    if report.resolved:
        yield from _resolved_rows(report.resolved)
    if report.progress:
        yield "trained", _progress_text(report.progress, report.tokens)
    if report.phases_s:
        parts = {word: getattr(report.phases_s, name) for name, word in _PHASE_WORDS.items()}
        yield "time", _parts_text(report.phases_s.total, parts)
    if report.throughput:
        yield "throughput", _throughput_text(report.throughput, world_size)
    if report.step_s:
        parts = dataclasses.asdict(report.step_s)
        yield "step", _parts_text(parts.pop("total"), parts)
    if report.tokens:
        yield "padding", f"{percent_text(report.tokens.padding_fraction)} of computed positions"
    if report.peak_memory:
        yield "peak memory", _memory_text(report.peak_memory)
    if report.loss:
        yield from _loss_rows(report.loss)
    if match := report.exact_match:
        fractions = _from_to(match.before, match.after, percent_text)
        yield "exact match", fractions and f"{fractions} of {_count(match.samples, 'answer')}"
    for split, counts in report.data.items():
        yield f"{split} data", _losses_of_data_text(counts)


def _text_rows(report: Report, out_dir: Path | None) -> Iterator[tuple[str, str]]:
    """Label and value of what is told in words: an example, warnings, where things are."""
    for example in report.examples[:1]:
        yield from _example_rows(example)
    for warning in report.warnings:
        yield "warning", warning
    if report.files:
        yield from _file_rows(report.files, out_dir)


def _resolved_rows(resolved: Resolved) -> Iterator[tuple[str, str]]:
    if resolved.parameters and resolved.trainable_parameters is not None:
        share = percent_text(resolved.trainable_parameters / resolved.parameters)
        trained, every = map(number_text, (resolved.trainable_parameters, resolved.parameters))
        yield "parameters", f"{trained} of {every} trained ({share})"
    device = resolved.device or resolved.accelerator
    if device:
        base = f"base weights {resolved.quantize}" if resolved.quantize else None
        device = f"{resolved.world_size or 1} x {device}"
        yield "devices", _joined((device, resolved.strategy, resolved.precision, base))


def _progress_text(progress: Progress, tokens: Tokens | None) -> str:
    epochs = f"{progress.epochs:.2f}".rstrip("0").rstrip(".")
    return _joined(
        (
            _count(progress.steps, "step"),
            f"{epochs} epoch" if epochs == "1" else f"{epochs} epochs",
            _count(progress.samples, "sample"),
            tokens and _count(tokens.real, "token"),
        )
    )


def _parts_text(total: float | None, parts: dict[str, float | None]) -> str:
    """A time and what it consists of: "4.2 s: data 1 ms, forward 1.2 s"."""
    known = _joined(f"{k} {duration_text(v)}" for k, v in parts.items() if v is not None)
    return ": ".join(filter(None, (duration_text(total) if total is not None else "", known)))


def _throughput_text(speed: Throughput, world_size: int) -> str:
    each = f" ({number_text(speed.tokens_per_s_per_device)} per device)" if world_size > 1 else ""
    return _joined(
        (
            f"{number_text(speed.tokens_per_s)} tokens/s{each}",
            f"{number_text(speed.samples_per_s)} samples/s",
            speed.mfu is not None and f"MFU {percent_text(speed.mfu)}",
            speed.device_utilization is not None
            and f"GPU busy {percent_text(speed.device_utilization)}",
            f"over {_count(speed.window_steps, 'step')}",
        )
    )


def _memory_text(memory: PeakMemory) -> str:
    values = {
        "allocated": memory.allocated_bytes,
        "reserved": memory.reserved_bytes,
        "host": memory.host_bytes if memory.host_bytes is not None else memory.rss_bytes,
    }
    text = _joined(f"{bytes_text(v)} {word}" for word, v in values.items() if v is not None)
    ranks = len(memory.ranks)
    return f"{text} (largest of {ranks} ranks)" if text and ranks > 1 else text


def _loss_rows(loss: Loss) -> Iterator[tuple[str, str]]:
    yield "loss", _from_to(loss.first, loss.last, _loss_text)
    if validation := _from_to(loss.validation_first, loss.validation_last, _loss_text):
        best = loss.validation_best
        perplexity = loss.perplexity
        yield (
            "validation",
            _joined(
                (
                    validation,
                    best not in (None, loss.validation_last) and f"best {_loss_text(best)}",
                    perplexity is not None and f"perplexity {number_text(perplexity)}",
                )
            ),
        )


def _example_rows(example: Example) -> Iterator[tuple[str, str]]:
    question = f"{example.instruction} {example.input}"
    answers = (("expected", example.expected), ("before", example.before), ("after", example.after))
    yield "example", shortened(question)
    for label, answer in answers:
        if answer is not None:
            yield f"  {label}", shortened(answer) or "(empty)"


def _losses_of_data_text(counts: DataCounts) -> str:
    losses = _joined(
        (
            counts.skipped_empty_output
            and f"{counts.skipped_empty_output:,} skipped (empty output)",
            counts.skipped_no_labels
            and f"{counts.skipped_no_labels:,} skipped (answer lies beyond max_seq_length)",
            counts.truncated and f"{counts.truncated:,} cut to max_seq_length",
        )
    )
    return losses and f"of {_count(counts.records, 'record')}: {losses}"


def _file_rows(files: Files, out_dir: Path | None) -> Iterator[tuple[str, str]]:
    def shown(name: str) -> str:
        return str(out_dir / name) if out_dir else name

    if files.final:
        yield "result", shown(files.final)
    logs = [shown(name) for name in (files.metrics, files.validation, files.log) if name]
    if logs:
        yield "logs", _joined(logs)


def printable(text: str) -> str:
    """The text without terminal escape sequences and control characters, lines kept.

    Answers of a model and records of a data set can hold anything.
    """
    return _UNPRINTABLE.sub("", text.expandtabs(4))


_UNPRINTABLE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def shortened(text: str, limit: int = 240) -> str:
    """The text on one line, cut to the limit."""
    line = " ".join(printable(text).split())
    return line if len(line) <= limit else line[: limit - 4].rstrip() + " ..."


def duration_text(seconds: float) -> str:
    """412 ms, 3.2 s, 2 min 10 s, 58 min, 1 h 02 min."""
    if round(seconds, 3) < 1:
        return f"{seconds * 1000:.0f} ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 600:
        return f"{whole // 60} min {whole % 60:02} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02} min"


def bytes_text(count: int) -> str:
    """3.2 GiB, 812 MiB, 0.4 MiB."""
    mib = count / 2**20
    if round(mib) >= 1024:
        return f"{mib / 1024:,.1f} GiB"
    return f"{mib:.0f} MiB" if mib >= 10 else f"{mib:.1f} MiB"


def number_text(value: float) -> str:
    """12,345 from 100 up, three digits below: 98.2, 3.33, 0.0421."""
    if round(abs(value), 1) >= 100:
        return f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


def percent_text(fraction: float) -> str:
    """41.2 %, 0.409 %, 0 %, 100 %."""
    return f"{number_text(fraction * 100)} %"


def _loss_text(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _from_to(first: float | None, last: float | None, text: Callable[[float], str]) -> str:
    return " -> ".join(text(value) for value in (first, last) if value is not None)


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _joined(parts: Iterable[object]) -> str:
    return ", ".join(str(part) for part in parts if part)
