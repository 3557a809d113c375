"""The run report: what was measured, as ``report.json``.

A report is written for every run, also one that failed or was stopped: what it did not reach is
None. The keys of the file are the names of the fields below.

A run that goes on from a checkpoint has several sessions and a report of each. `Report.restarts`,
`Report.progress`, `Report.loss`, `Report.exact_match`, `Report.tasks`, `Report.examples` and
samples and losses of `Report.sources` and `Report.sets` cover the whole run, from its very first
step; everything else, such as times, tokens and throughput, is of the session that is reported.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from ftkit.errors import UserError
from ftkit.runs.report.answers import AnsweredExample, AnswerScore, ExactMatch, TaskScore
from ftkit.runs.report.expert_load import ExpertLoad
from ftkit.runs.report.metrics import perplexity
from ftkit.runs.report.peak_memory import PeakMemory
from ftkit.runs.report.restarts import Restart, Resumed
from ftkit.runs.report.throughput import StepTimes, Throughput
from ftkit.strategies.step_memory import Shortage, StepMemory
from ftkit.utils.damaged_files import reading
from ftkit.utils.files import write_durably
from ftkit.utils.hardware import Hardware
from ftkit.utils.json_values import for_json, from_json

SCHEMA_VERSION = 2
READABLE_VERSIONS = (1, SCHEMA_VERSION)
"""Version 2 has `Report.step_memory` besides; nothing else has changed its meaning."""
FILE_NAME = "report.json"

OutcomeName = Literal["completed", "stopped", "interrupted", "out_of_memory", "failed"]
ENDED_WELL: tuple[OutcomeName, ...] = ("completed", "stopped")
"""What was asked for was done: the whole run, or as much of it as --stop_after allows."""
PhaseName = Literal["set_up", "training", "validation", "saving"]


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What the recipe came to on the devices at hand."""

    base_model: str | None = None
    """Name or directory of the base model."""
    accelerator: str | None = None
    """Kind of device, as torch calls it: cpu, cuda, ..."""
    device: str | None = None
    """Name of the device of rank 0, as its maker calls it."""
    devices: int | None = None
    """Devices per node."""
    world_size: int | None = None
    """Ranks over all nodes; one device each."""
    strategy: str | None = None
    """single, ddp, fsdp or deepspeed."""
    sharding: str | None = None
    """Which of parameters, gradients and optimizer state are split, and what is in host memory."""
    communication: str | None = None
    """What carries messages between ranks: nccl or gloo; None: there is one rank."""
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
    kept_bytes: int | None = None
    """Of what the base model has beside its language model, which is kept; None: nothing."""
    chat_template: str | None = None
    """How prompts are made of records, and how the result is asked: whose chat template."""
    max_seq_length: int | None = None
    """Sequences are cut to this many tokens."""
    longest_sample_tokens: int | None = None
    """Tokens of the longest sample to train on or to validate on, after cutting."""
    global_batch_size: int | None = None
    """Sequences per step, over all ranks."""
    micro_batch_size: int | None = None
    """Most sequences per forward pass on one rank."""
    micro_batch_tokens: int | None = None
    """Most tokens per forward pass on one rank, but for a longer sequence; None: not limited."""
    attention: str | None = None
    """How attention sees a micro-batch: varlen (sequences in a row, in one kernel), sdpa per
    sequence (in a row, one by one) or padded (all as long as the longest)."""
    micro_steps_per_step: int | None = None
    """Forward and backward passes of one rank per step; None: as many as the tokens of its
    sequences need, see throughput.micro_steps_per_step."""
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
    samples: int | None = None
    """Made of the used records: more than those where records became several samples."""
    refused: dict[str, int] = field(default_factory=dict)
    """Records left out because they cannot become samples, by the reason."""
    dropped: int = 0
    """Samples left out because they are longer than max_seq_length."""
    split: int = 0
    """Samples that were longer than max_seq_length and became several."""
    split_by_turn: int = 0
    """Conversations that became a sample for each turn, since the template changes earlier ones."""
    longest_tokens: int | None = None
    """Tokens of the longest sample, before anything was done about its length."""
    lost_fraction: float | None = None
    """Share of the tokens of all samples that is not trained on, because it was cut off, or is in
    samples that were dropped or skipped."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One source of the data, where there are several, or one set of eval.sets."""

    data: dict[str, DataCounts] = field(default_factory=dict)
    """Counts by split."""
    samples_per_epoch: int | None = None
    """Training samples that an epoch takes of it, by its weight."""
    samples: int = 0
    """Samples of it that were trained on, over all sessions."""
    validation_first: float | None = None
    """Loss on its validation samples before the first step, in nats per label token."""
    validation_last: float | None = None
    """The same in the last validation."""
    validation_best: float | None = None
    """Lowest of all validations of the run."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far training came, over all sessions."""

    steps: int = 0
    """Optimizer steps done."""
    samples: int = 0
    """Samples trained on, over all ranks; fillers are not counted."""
    epochs: float = 0.0
    """Samples divided by the samples of one epoch."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokens of all training steps of this session, over all ranks."""

    real: int
    """Tokens of samples, prompt and answer; padding and fillers are not counted."""
    label: int | None = None
    """Real tokens that carry loss; None: the rank was killed before it noted them."""
    padded: int | None = None
    """Positions that were computed and were padding or fillers; None as for `label`."""
    padding_fraction: float | None = None
    """padded / (real + padded); None as for `label`."""

    def with_more(self, *, real: int, label: int, padded: int) -> Self:
        """The same with those of further steps."""
        real, padded = self.real + real, (self.padded or 0) + padded
        fraction = padded / (real + padded)
        label += self.label or 0
        return type(self)(real=real, label=label, padded=padded, padding_fraction=fraction)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Cross-entropy in nats per label token, over all sessions."""

    first: float | None = None
    """Of the very first step of the run."""
    last: float | None = None
    """Of the last step."""
    validation_first: float | None = None
    """Of the validation before the first step."""
    validation_last: float | None = None
    """Of the last validation."""
    validation_best: float | None = None
    """Lowest of all validations of the run."""
    validation_best_step: int | None = None
    """Steps done at that validation."""
    validations_since_best: int = 0
    """Validations after it, none of which was better."""
    perplexity: float | None = None
    """exp(validation_last)."""
    router_aux_loss: float | None = None
    """Auxiliary loss of the routers in the last step, without its coefficient; it is in none of the
    others. None: it is not trained with."""

    def with_validation(self, step: int, loss: float) -> Self:
        """The same after one more validation.

        Args:
            step: optimizer steps done.
            loss: that was found.
        """
        best, is_number = self.validation_best, math.isfinite(loss)
        is_best = is_number and (best is None or loss < best)
        return dataclasses.replace(
            self,
            validation_first=loss if step == 0 else self.validation_first,
            validation_last=loss,
            validation_best=loss if is_best else best,
            validation_best_step=step if is_best else self.validation_best_step,
            validations_since_best=0 if is_best else self.validations_since_best + 1,
            perplexity=perplexity(loss),
        )

    @property
    def is_of_start(self) -> bool:
        """Whether nothing was validated but what there was before the first step."""
        only_one = self.validation_first == self.validation_last is not None
        return only_one and self.validation_best_step == 0 and not self.validations_since_best

    def has_exhausted(self, patience: int | None) -> bool:
        """Whether so many validations in a row were no better; None: any number may be."""
        return patience is not None and self.validations_since_best >= patience


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Of a time in seconds that was measured repeatedly."""

    mean: float
    """Average."""
    max: float
    """Longest."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """Of some times, at least one."""
        return cls(mean=sum(seconds) / len(seconds), max=max(seconds))


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """What was saved in this session, so that the run can go on from there."""

    saved: int = 0
    """Checkpoints completed, those that were deleted again included."""
    failed: int = 0
    """Checkpoints that could not be written."""
    last: str | None = None
    """Directory of the newest, relative to out_dir."""
    last_bytes: int | None = None
    """Size of all its files."""
    stall_s: Spread | None = None
    """Time that training stood still for a checkpoint."""
    write_s: Spread | None = None
    """Time from the request to the completed checkpoint; training goes on for most of it."""
    advised_every_s: float | None = None
    """Time between two that would lose the least; None: the run is not expected to lose any."""


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
class ChosenResult:
    """The checkpoint that the result was made of, where it was chosen."""

    step: int
    """Optimizer steps done."""
    validation_loss: float | None = None
    """Of the result; None: none was measured."""
    losses: dict[str, float] = field(default_factory=dict)
    """Of the result on each source of the data, where there are several, and each set of
    eval.sets, by their names in columns; what was not measured is not there."""


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
    sources: dict[str, Source] = field(default_factory=dict)
    """The same and more for each source of the data by its name, where there are several."""
    sets: dict[str, Source] = field(default_factory=dict)
    """The same for each set of eval.sets by its name; nothing of them is trained on."""
    resumed: Resumed | None = None
    """Where this session went on from; None: it is the first."""
    restarts: list[Restart] = field(default_factory=list)
    """Sessions that went on after one that was lost or interrupted."""
    progress: Progress | None = None
    """How far training came."""
    tokens: Tokens | None = None
    """Tokens trained on."""
    throughput: Throughput | None = None
    """Speed of training."""
    expert_load: ExpertLoad | None = None
    """How often each expert was chosen; None: there are none, or they do not tell."""
    peak_memory: PeakMemory | None = None
    """Highest memory."""
    step_memory: StepMemory | None = None
    """What the memory of a step consists of."""
    shortage: Shortage | None = None
    """How much memory was missing, if it ran out."""
    loss: Loss | None = None
    """Loss of training and validation."""
    exact_match: ExactMatch | None = None
    """Right answers before and after."""
    scores: list[AnswerScore] = field(default_factory=list)
    """Other scores of answers before and after."""
    tasks: list[TaskScore] = field(default_factory=list)
    """Numbers of tasks before and after."""
    examples: list[AnsweredExample] = field(default_factory=list)
    """Answers before and after."""
    checkpoints: Checkpoints | None = None
    """What was saved to go on from; None: nothing."""
    warnings: list[str] = field(default_factory=list)
    """What the user should know, one line each."""
    files: Files | None = None
    """What the run left behind."""
    result: ChosenResult | None = None
    """Of which step the result is, with checkpoint.result best; None: of the last."""

    @property
    def validation_loss(self) -> float | None:
        """Of the result; without a chosen one, of the last validation that came after a step."""
        if self.result is not None:
            return self.result.validation_loss
        return None if self.loss is None or self.loss.is_of_start else self.loss.validation_last


def write_report(report: Report, out_dir: Path) -> Path:
    """Write ``out_dir/report.json``: the new report is there complete, or the old one still is.

    Access tokens are removed wherever they stand; a number that is not finite becomes null, since
    JSON has no word for it.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(for_json(dataclasses.asdict(report)), indent=2, allow_nan=False) + "\n"
    path = out_dir / FILE_NAME
    write_durably(path, text)
    return path


def read_report(path: Path) -> Report:
    """Read a report from its file or from the run's directory; unknown keys are passed over.

    Raises:
        UserError: there is none, it is damaged, or it follows other definitions.
    """
    file = path / FILE_NAME if path.is_dir() else path
    try:
        text = file.read_bytes()
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror}).\n"
            "Name the directory of a run that has ended."
        ) from error
    advice = "Name another run, or go on with this one: --resume auto."
    with reading(file, "a report, as a run of ftkit leaves it", advice=advice):
        content = json.loads(text)
        version = content.get("schema_version") if isinstance(content, dict) else None
        if version is None:
            raise UserError(f"{file} is not a report: it has no schema_version.")
        if version not in READABLE_VERSIONS:
            raise UserError(
                f"{file} has schema_version {version}, but this ftkit reads versions "
                f"{' and '.join(map(str, READABLE_VERSIONS))}.\n"
                "Read it with the ftkit that wrote it (see its versions.ftkit)."
            )
        report = from_json(Report, content)
        assert isinstance(report, Report)
    return report
