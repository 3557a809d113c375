"""The report of a run, ``report.json``: its sections, and reading and writing it.

Every run writes one, also a run that failed or was stopped: what it did not reach is None. The
keys of the file are the names of the fields below.

A run that continues from a checkpoint has several sessions and a report of each. `Report.restarts`,
`Report.progress`, `Report.loss`, `Report.exact_match`, `Report.tasks`, `Report.examples`, and
samples and losses in `Report.sources` and `Report.sets` cover the whole run, from its very first
step. Everything else, such as times, tokens and throughput, covers the last session alone.
"""

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from ftkit.errors import UserError
from ftkit.runs.report.answers import AnsweredExample, AnswerScore, ExactMatch, TaskScore
from ftkit.runs.report.metrics import perplexity
from ftkit.strategies.step_memory import MediaSize, Shortage, StepMemory
from ftkit.utils.damaged_files import reading
from ftkit.utils.files import write_durably
from ftkit.utils.finite_numbers import finite, lowest
from ftkit.utils.hardware import Hardware
from ftkit.utils.json_values import for_json, from_json

SCHEMA_VERSION = 2
READABLE_VERSIONS = (1, SCHEMA_VERSION)
"""Version 2 has `Report.step_memory` besides; nothing else has changed its meaning."""
FILE_NAME = "report.json"

OutcomeName = Literal["completed", "stopped", "interrupted", "out_of_memory", "failed"]
ENDED_WELL: tuple[OutcomeName, ...] = ("completed", "stopped")
"""Outcomes of runs that did all their steps, or as many as --stop_after allows."""
PhaseName = Literal["set_up", "reference", "training", "validation", "saving"]


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """Values of the recipe as they were resolved for the devices at hand."""

    base_model: str | None = None
    """Name or directory of the base model."""
    beside: str | None = None
    """Name or directory of the frozen model that is held beside the trained one; None: there is
    none."""
    beside_key: Literal["teacher", "reference"] | None = None
    """What that model is to the objective."""
    beside_parameters: int | None = None
    """Its parameters, each counted once however it is sharded."""
    beside_rank_bytes: int | None = None
    """Size of its weights on each rank."""
    accelerator: str | None = None
    """Kind of device, as torch calls it: cpu, cuda, ..."""
    device: str | None = None
    """Name of the device of rank 0, as its maker calls it."""
    devices: int | None = None
    """Devices per node."""
    world_size: int | None = None
    """Ranks over all nodes; one device each."""
    context: int | None = None
    """Ranks that share the sequences of a micro-batch; None: each has its own."""
    strategy: str | None = None
    """single, ddp, fsdp or deepspeed."""
    sharding: str | None = None
    """Shares of parameters, gradients and optimizer state, and which of them are in host memory."""
    communication: str | None = None
    """Library that carries messages between ranks: nccl or gloo; None: there is one rank."""
    precision: str | None = None
    """Number format of training."""
    quantize: str | None = None
    """Format of the frozen base weights; None: not quantized."""
    rounding: str | None = None
    """Rounded numbers from which linear layers compute: float8, or QAT; None: their own numbers."""
    published: str | None = None
    """Form in 4 or 8 bits in which the base model is published; None: in plain numbers."""
    optimizer: str | None = None
    """Class path of the optimizer."""
    parameters: int | None = None
    """Parameters of the model, adapter included, each counted once however it is sharded."""
    trainable_parameters: int | None = None
    """Parameters the optimizer changes."""
    kept_bytes: int | None = None
    """Size of what the base model has beside its language model, which is kept; None: nothing."""
    chat_template: str | None = None
    """Chat template that makes prompts of records, in training and for the result."""
    max_seq_length: int | None = None
    """Sequences are cut to this many tokens."""
    longest_sample_tokens: int | None = None
    """Tokens of the longest sample to train on or to validate on, after cutting."""
    heaviest_media: MediaSize | None = None
    """Media of the sample among these that costs most to encode; None: there are none."""
    global_batch_size: int | None = None
    """Sequences per step, over all ranks."""
    global_batch_tokens: int | None = None
    """Most tokens of a step over all ranks, in the place of a number of sequences."""
    micro_batch_size: int | None = None
    """Most sequences per forward pass on one rank."""
    micro_batch_tokens: int | None = None
    """Most tokens per forward pass on one rank, but for a longer sequence; None: not limited."""
    micro_batch_source: Literal["usual", "memory", "checkpoint"] | None = None
    """Why ftkit chose this micro-batch: more would hardly be faster, as many as fit the memory, or
    as in the checkpoint; None: the recipe names it."""
    attention: str | None = None
    """How attention sees a micro-batch: varlen (sequences in a row, in one kernel), sdpa per
    sequence (in a row, one by one) or padded (all as long as the longest)."""
    padded_lengths: list[int] | None = None
    """Lengths that padded sequences have, where devices compile programs for each; None: a
    micro-batch is as long as its longest sequence."""
    micro_steps_per_step: int | None = None
    """Forward and backward passes of one rank per step; None: as many as the tokens of its
    sequences need, see Throughput.micro_steps_per_step."""
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
    """From the start of the command to the first step, without the reference: processes, data,
    weights."""
    reference: float | None = None
    """Loading the reference model and computing its log-probabilities before the first step; None:
    the run needs none from before."""
    training: float | None = None
    """Time in training steps, without validation and saving."""
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
    recorded: float | None = None
    """Replays of recorded micro-steps, forward and backward; None: none is recorded."""
    optimizer: float | None = None
    """Clipping and update."""
    other: float | None = None
    """The rest of the step."""
    total: float | None = None
    """The whole step; the sum of the parts."""


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Speed over the window of steps that `ftkit.runs.report.meters.ThroughputMeter` counts."""

    tokens_per_s: float
    """Real tokens per second, over all ranks."""
    samples_per_s: float
    """Samples per second, over all ranks."""
    steps_per_s: float
    """Optimizer steps per second."""
    window_steps: int
    """Steps in the window."""
    window_s: float
    """Seconds in the window; validation and saving lie outside."""
    tokens_per_s_per_device: float
    """tokens_per_s / world_size."""
    micro_steps_per_step: float | None = None
    """Forward and backward passes of one rank per step, in the mean."""
    compiled_graphs: int | None = None
    """Graphs that torch.compile made or that were recorded in the training steps of rank 0; those
    steps lie outside the window. None: nothing is compiled or recorded."""
    rank_imbalance: float | None = None
    """Tokens of the fullest rank relative to the mean rank, averaged over the steps; 1 is perfect.
    None: there is one rank."""
    mfu: float | None = None
    """Model FLOPs of the real tokens as a fraction of what the devices can do; None: unknown."""
    device_utilization: float | None = None
    """Mean fraction of time the GPU of rank 0 was busy in steps at full speed, as the driver says:
    after the first ones, without validation and saving. None: unknown."""
    energy_wh: float | None = None
    """Energy that the GPUs of rank 0's host took since the first step, from samples of their
    power; None: unknown."""
    cpu_utilization: float | None = None
    """Mean fraction of all hardware threads that this run's processes kept busy."""


@dataclass(frozen=True, kw_only=True)
class RecordedSteps:
    """Micro-steps that are recorded once and replayed, with train.record_steps, of rank 0."""

    shapes: int
    """Shapes of micro-batches that were recorded, once each."""
    recording_s: float
    """Seconds that recording took."""
    micro_steps: int
    """Micro-steps of the session, recorded or not."""
    replayed: int
    """Those that were replays."""
    filled_fraction: float | None
    """Share of the positions in micro-batches of these shapes that only fill them up; None: there
    was no such micro-batch."""


@dataclass(frozen=True, kw_only=True)
class DataCounts:
    """Counts of records, samples and tokens in one split of the data."""

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
    """Tokens of the used samples that carry loss."""
    samples: int | None = None
    """Samples made of the used records; more than those where records became several."""
    refused: dict[str, int] = field(default_factory=dict)
    """Records left out because they cannot become samples, by the reason."""
    dropped: int = 0
    """Samples left out because they are longer than max_seq_length."""
    short: int = 0
    """Samples left out because they have fewer tokens than data.min_tokens."""
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
    """Loss on them in the last validation, in nats per label token."""
    validation_best: float | None = None
    """Lowest loss on them of all validations of the run."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of training over all sessions."""

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
        """Return these tokens and those of further steps."""
        real, padded = self.real + real, (self.padded or 0) + padded
        fraction = padded / (real + padded)
        label += self.label or 0
        return type(self)(real=real, label=label, padded=padded, padding_fraction=fraction)


@dataclass(frozen=True, kw_only=True)
class ExpertLoad:
    """Choices of experts by the real tokens of all training steps of this session, all ranks."""

    layers: list[int]
    """Numbers of the layers with experts, from 0."""
    choices: int
    """Choices in each of these layers: tokens times the experts that a token chooses."""
    fractions: list[list[float]]
    """For each of these layers, the fraction of its choices that fell on each expert."""
    even: float
    """Fraction of each expert if all were chosen equally often."""
    lowest: float
    """Smallest fraction of all layers."""
    highest: float
    """Largest fraction of all layers: the load of the most used expert."""
    least_even_layer: int
    """The layer with the fraction that is furthest from even."""

    @classmethod
    def of_choices(cls, layers: Sequence[int], choices: Sequence[Sequence[int]]) -> Self | None:
        """Return the load from counts of choices [layers, experts]; None: there are none."""
        if not any(map(sum, choices)):
            return None
        fractions = [[of_one / sum(of_layer) for of_one in of_layer] for of_layer in choices]
        even = 1 / len(fractions[0])
        furthest = [max(abs(of_one - even) for of_one in of_layer) for of_layer in fractions]
        return cls(
            layers=list(layers),
            # The same in every layer: each token passes all of them.
            choices=sum(choices[0]),
            fractions=fractions,
            even=even,
            lowest=min(map(min, fractions)),
            highest=max(map(max, fractions)),
            least_even_layer=layers[furthest.index(max(furthest))],
        )

    @classmethod
    def of_ranks(cls, parts: Sequence["ExpertLoad | None"]) -> "ExpertLoad | None":
        """Return the load over all ranks; None: no rank counted any."""
        found = [part for part in parts if part is not None]
        if not found:
            return None
        of_ranks = [
            # Reports hold fractions; counts of integers come back exactly.
            [[round(of_one * part.choices) for of_one in layer] for layer in part.fractions]
            for part in found
        ]
        choices = [
            [sum(of_one) for of_one in zip(*layer, strict=True)]
            for layer in zip(*of_ranks, strict=True)
        ]
        return cls.of_choices(found[0].layers, choices)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Highest memory of one rank since the run started."""

    rank: int
    """Global rank."""
    requested_bytes: int | None = None
    """Device memory that was requested, before torch's allocator rounds it up; None on CPU."""
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
    requested_bytes: int | None = None
    """Largest over the ranks."""
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
        """Return the maxima over the ranks; None where no rank knows the value."""

        def largest(values: list[int | None]) -> int | None:
            return max((value for value in values if value is not None), default=None)

        return cls(
            ranks=list(ranks),
            requested_bytes=largest([rank.requested_bytes for rank in ranks]),
            allocated_bytes=largest([rank.allocated_bytes for rank in ranks]),
            reserved_bytes=largest([rank.reserved_bytes for rank in ranks]),
            rss_bytes=largest([rank.rss_bytes for rank in ranks]),
            host_bytes=largest([rank.host_bytes for rank in ranks]),
        )


@dataclass(frozen=True, kw_only=True)
class Loss:
    """Loss of the objective over all sessions: of supervised fine-tuning, nats per label token."""

    first: float | None = None
    """Loss of the very first step of the run."""
    last: float | None = None
    """Loss of the last step."""
    validation_first: float | None = None
    """Loss of the validation before the first step."""
    validation_last: float | None = None
    """Loss of the last validation."""
    validation_best: float | None = None
    """Lowest loss on them of all validations of the run."""
    validation_best_step: int | None = None
    """Steps done at that validation."""
    validations_since_best: int = 0
    """Validations after it, none of which was better."""
    perplexity: float | None = None
    """exp(validation_last), if the loss is a cross-entropy."""
    router_aux_loss: float | None = None
    """Auxiliary loss of the routers in the last step, without its coefficient; it is in none of the
    others. None: it is not trained with."""

    def with_validation(self, step: int, loss: float, *, is_cross_entropy: bool = True) -> Self:
        """Return the losses after one more validation, done after so many steps."""
        # Of equal losses the earlier validation stays the best.
        best = lowest(self.validation_best, loss)
        is_best = best != self.validation_best
        return dataclasses.replace(
            self,
            validation_first=loss if step == 0 else self.validation_first,
            validation_last=loss,
            validation_best=best,
            validation_best_step=step if is_best else self.validation_best_step,
            validations_since_best=0 if is_best else self.validations_since_best + 1,
            perplexity=perplexity(loss) if is_cross_entropy else None,
        )

    @property
    def is_of_start(self) -> bool:
        """True if the only validation was the one before the first step."""
        # A chain: equal, and not None.
        only_one = self.validation_first == self.validation_last is not None
        return only_one and self.validation_best_step == 0 and not self.validations_since_best

    def has_exhausted(self, patience: int | None) -> bool:
        """Return whether so many validations in a row were no better; never if patience is None."""
        return patience is not None and self.validations_since_best >= patience


@dataclass(frozen=True, kw_only=True)
class TermValues:
    """Values of a term that the objective reports beside the loss, over all sessions."""

    first: float | None = None
    """Value of the very first step of the run."""
    last: float | None = None
    """Value of the last step."""
    validation_first: float | None = None
    """Value of the validation before the first step."""
    validation_last: float | None = None
    """Value of the last validation."""
    is_share: bool = False
    """Whether it is a share from 0 to 1, which is shown in per cent."""

    def with_step(self, value: float | None) -> Self:
        """Return the values after one more step."""
        first = value if self.first is None else self.first
        return dataclasses.replace(self, first=first, last=value)

    def with_validation(self, step: int, value: float | None) -> Self:
        """Return the values after one more validation, done after so many steps."""
        first = value if step == 0 else self.validation_first
        return dataclasses.replace(self, validation_first=first, validation_last=value)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and maximum of a time in seconds that was measured repeatedly."""

    mean: float
    """Average."""
    max: float
    """Longest."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        """Return mean and maximum of at least one time."""
        return cls(mean=sum(seconds) / len(seconds), max=max(seconds))


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Checkpoint that this session continued from."""

    from_step: int
    """Optimizer steps done before this session."""
    checkpoint: str
    """Its directory; relative to out_dir if it lies in there."""
    strategy: str
    """Strategy that wrote it."""
    world_size: int
    """Ranks that wrote it."""
    changes: list[str] = field(default_factory=list)
    """Changed keys of the recipe, one line each."""


@dataclass(frozen=True, kw_only=True)
class Restart:
    """A session that continued after one that was lost or interrupted."""

    reason: str
    """Why the session before ended."""
    ended_at: str
    """When it ended or last wrote a file; ISO 8601, UTC."""
    started_at: str
    """When this session began; ISO 8601, UTC."""
    from_step: int
    """Optimizer steps that this session began with; 0: from the base model."""
    steps_lost: int = 0
    """Steps that were done a second time; after a kill, counted from rows of metrics.csv."""
    world_size: int
    """Ranks of this session."""
    world_size_before: int | None = None
    """Ranks of the session before; None: it ended before they were known."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Checkpoints saved in this session."""

    saved: int = 0
    """Checkpoints completed, those that were deleted again included."""
    failed: int = 0
    """Checkpoints that could not be written."""
    last: str | None = None
    """Directory of the newest, relative to out_dir."""
    last_bytes: int | None = None
    """Size of all its files."""
    stall_s: Spread | None = None
    """Time that training waited for a checkpoint."""
    write_s: Spread | None = None
    """Time from the request to the completed checkpoint; training continues for most of it."""
    advised_every_s: float | None = None
    """Interval that would lose the least time; None: the run is not expected to be interrupted."""


@dataclass(frozen=True, kw_only=True)
class Files:
    """Files that the run wrote; paths relative to its out_dir."""

    final: str | None = None
    """Directory of the result."""
    metrics: str | None = None
    """One row per step."""
    validation: str | None = None
    """One row per validation."""
    log: str | None = None
    """The output of the run."""


@dataclass(frozen=True, kw_only=True)
class ChosenResult:
    """The checkpoint that was chosen as the result."""

    step: int
    """Optimizer steps done."""
    validation_loss: float | None = None
    """Validation loss of the result; None: it was not measured."""
    losses: dict[str, float] = field(default_factory=dict)
    """Losses of the result by source of the data, where there are several, and by set of eval.sets,
    under their names in columns; without those that were not measured."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Measurements of one run."""

    schema_version: int = SCHEMA_VERSION
    """Version of these definitions."""
    outcome: OutcomeName
    """Outcome of the run."""
    exit_reason: str
    """Why it ended, in one sentence."""
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
    """The recipe with its defaults filled in and access tokens removed."""
    resolved: Resolved | None = None
    """Values of the recipe as they were resolved for the devices at hand."""
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of Python and of the main packages."""
    hardware: Hardware | None = None
    """The machine of rank 0."""
    phases_s: PhaseTimes | None = None
    """Seconds by phase."""
    step_s: StepTimes | None = None
    """Seconds of a step by part."""
    data: dict[str, DataCounts] = field(default_factory=dict)
    """Counts by split."""
    shape: str | None = None
    """Shape of the records by which the result is prompted, such as messages; None: not known."""
    sources: dict[str, Source] = field(default_factory=dict)
    """Counts and losses of each source of the data by its name, where there are several."""
    sets: dict[str, Source] = field(default_factory=dict)
    """Counts and losses of each set of eval.sets by its name; none is trained on."""
    resumed: Resumed | None = None
    """Checkpoint that this session continued from; None: it is the first."""
    restarts: list[Restart] = field(default_factory=list)
    """Sessions that continued after one that was lost or interrupted."""
    micro_batch_halved: int = 0
    """How often ftkit has halved the micro-batch that it chose, because memory ran out."""
    progress: Progress | None = None
    """Steps, samples and epochs done."""
    tokens: Tokens | None = None
    """Tokens trained on."""
    throughput: Throughput | None = None
    """Speed of training."""
    recorded_steps: RecordedSteps | None = None
    """Micro-steps that are replayed; None: none may be recorded."""
    expert_load: ExpertLoad | None = None
    """Choices of each expert; None: there are no experts, or it is not known."""
    peak_memory: PeakMemory | None = None
    """Highest memory."""
    step_memory: StepMemory | None = None
    """Memory of a step by what it holds."""
    shortage: Shortage | None = None
    """Missing memory, if it ran out."""
    diverged_from: int | None = None
    """Step whose weights gave a loss or gradient that is infinite or not a number, which ended the
    run: --resume auto passes over its checkpoint. None: none did."""
    loss: Loss | None = None
    """Loss of training and validation."""
    terms: dict[str, TermValues] = field(default_factory=dict)
    """What the objective reports beside the loss, such as the accuracy on preference pairs."""
    exact_match: ExactMatch | None = None
    """Answers that equal the expected ones, before and after training."""
    scores: list[AnswerScore] = field(default_factory=list)
    """Other scores of answers, before and after training."""
    tasks: list[TaskScore] = field(default_factory=list)
    """Numbers of lm-evaluation-harness tasks, before and after training."""
    examples: list[AnsweredExample] = field(default_factory=list)
    """Answers to one validation record, before and after training."""
    checkpoints: Checkpoints | None = None
    """Checkpoints saved in this session; None: none."""
    warnings: list[str] = field(default_factory=list)
    """Warnings, one line each."""
    files: Files | None = None
    """Files that the run wrote."""
    result: ChosenResult | None = None
    """The checkpoint that is the result, with checkpoint.result best; None: the last step is."""
    numbers: dict[str, float | None] = field(default_factory=dict)
    """Numbers of `ftkit.runs.report.numbers` with a measurement of their own, by their keys."""

    @property
    def validation_loss(self) -> float | None:
        """Validation loss of the result: of the chosen step, or the last one after a step."""
        if self.result is not None:
            return self.result.validation_loss
        return None if self.loss is None or self.loss.is_of_start else self.loss.validation_last


def write_report(report: Report, out_dir: Path) -> Path:
    """Write ``out_dir/report.json`` at once: the file is the new report or still the old one.

    Access tokens are removed wherever they stand; a number that is not finite becomes null, since
    JSON has no word for it.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    content = dataclasses.asdict(report)
    if not report.numbers:  # most runs: their files are as they were before there were such numbers
        del content["numbers"]
    text = json.dumps(for_json(content), indent=2, allow_nan=False) + "\n"
    path = out_dir / FILE_NAME
    write_durably(path, text)
    return path


def read_report(path: Path) -> Report:
    """Read a report from its file or from the run's directory; unknown keys are ignored.

    Raises:
        UserError: there is no report, it is damaged, or its schema_version is not known.
    """
    file = path / FILE_NAME if path.is_dir() else path
    try:
        text = file.read_bytes()
    except OSError as error:
        raise UserError(
            f"{file} cannot be read ({error.strerror}).\n"
            "Name the directory of a run that has ended."
        ) from error
    advice = "Name another run, or continue this one: --resume auto."
    with reading(file, "a report, as a run of ftkit leaves it", advice=advice):
        # Python's json also reads NaN and Infinity, and 1e999 as the latter: no comparison may get
        # them.
        content = json.loads(
            text,
            parse_constant=lambda _: None,
            parse_float=lambda number: finite(float(number)),
        )
        # Before any field: those of another version may mean something else.
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
