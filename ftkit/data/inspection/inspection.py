"""Inspection of a recipe's data, as plain values for text, page and JSON."""

from dataclasses import dataclass, field
from typing import Literal

from ftkit.data.records.keys import UnusedKeys
from ftkit.data.records.media import MediaNumbers, ShownMedium

FindingKind = Literal[
    "bad_records",
    "no_end_of_turn",
    "end_of_turn_not_known",
    "bos_twice",
    "nothing_trained",
    "tools_dropped",
    "reasoning_dropped",
    "system_message_dropped",
    "many_cut",
    "train_in_validation",
    "prompt_divided",
    "equal_answers",
    "one_label",
    "template_not_used",
]
Severity = Literal["warning", "notice"]
"""warning: the model probably learns something unwanted. notice: it may."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A property of the data that harms a run, or may."""

    kind: FindingKind
    severity: Severity
    text: str
    """Description with numbers."""
    advice: str
    """Recommended change, with key and value where one works."""

    @property
    def words(self) -> str:
        """Description and advice on one line."""
        return f"{self.text} {self.advice}"


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar of a histogram of lengths."""

    first: int
    """Tokens of the shortest samples that it counts."""
    last: int
    """Tokens of the longest ones."""
    samples: int
    over: int
    """Samples in it that are longer than max_seq_length."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Tokens of samples before anything is done about those that are too long."""

    samples: int
    shortest: int
    median: int
    p90: int
    p99: int
    longest: int
    over: int
    """Samples that are longer than max_seq_length."""
    bars: list[Bar]


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Records that become no sample, for one reason."""

    reason: str
    records: int
    example: str
    """Beginning of one of them."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Weights of the tokens that carry loss."""

    least: float
    most: float
    mean: float
    """Over all tokens that carry loss."""


@dataclass(frozen=True, kw_only=True)
class SplitNumbers:
    """Counts of records, samples and tokens of one split of a source."""

    records: int
    used: int
    """Records that become samples."""
    left_out: list[LeftOut]
    samples: int
    truncated: int
    """Samples whose end is cut off."""
    dropped: int
    """Samples that are left out because they are too long."""
    short: int
    """Samples that are left out because they have fewer tokens than data.min_tokens."""
    split: int
    """Samples that are too long and become several."""
    split_by_turn: int
    """Conversations that become several samples: the template changes earlier turns, or the tokens
    of a turn's prompt are others within the conversation."""
    tokens: int
    """Input tokens of the samples."""
    trained_tokens: int
    """Tokens that carry loss."""
    weights: Weights | None
    """Their weights; None: all are 1."""
    labels: dict[str, int]
    """Samples by their label, the most frequent one first; {}: they have none."""
    lost_tokens: int
    """Tokens that are cut off, dropped or skipped."""
    lengths: Lengths | None
    """None: no record became a sample."""
    media: list[MediaNumbers] = field(default_factory=list)
    """About the images and other media of its samples, by kind."""


@dataclass(frozen=True, kw_only=True)
class SourceNumbers:
    """Numbers and rendering of one source."""

    name: str
    where: str
    """The file, directory or data set that it is of."""
    records: str
    """Number and kind of its records, in words."""
    unused: UnusedKeys
    """Keys that the records have, and of which nothing is known."""
    shape: str
    """instruction, completion, messages, text or tokens."""
    template: str
    """Name of the template or style that renders its records."""
    train_on: str
    """assistant, last or all."""
    overlong: str
    """truncate, drop or split."""
    per_epoch: int
    """Training samples that an epoch takes of it."""
    train: SplitNumbers
    val: SplitNumbers


@dataclass(frozen=True, kw_only=True)
class Duplicates:
    """Samples whose tokens and media are those of another one."""

    train: int
    """Training samples that repeat an earlier one."""
    val: int
    """Validation samples that repeat an earlier one."""
    val_in_train: int
    """Validation samples that are trained on."""
    train_examples: list[str]
    """Beginnings of some duplicates in train."""
    val_in_train_examples: list[str]
    """Beginnings of some validation samples that are in train."""


Answer = Literal["chosen", "rejected"]


@dataclass(frozen=True, kw_only=True)
class ShownSample:
    """A training sample, token by token."""

    source: str
    number: int
    """Number among the training samples of its source, from 0."""
    answer: str | None
    """Which sequence of its sample it is, such as the chosen answer of a pair; None: samples have
    one."""
    label: str | None
    """Its label, such as desirable; None: it has none."""
    shared: int
    """First tokens of a rejected answer that are those of the chosen one: the prompt of both."""
    ids: list[int]
    texts: list[str]
    """Text of each token; a character of several tokens is in the last of them."""
    trained: list[bool]
    """Whether each carries loss."""
    weights: list[float]
    """Weight of the loss of each; 0: it carries none."""
    special: list[bool]
    """Whether each is a special token of the tokenizer, such as BOS."""
    media: list[ShownMedium] = field(default_factory=list)
    """Its images and other media, in the order of their tokens."""


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """Everything that is reported about the data of a recipe."""

    base_model: str
    max_seq_length: int
    """No sample has more tokens: train.max_seq_length, or what the model takes."""
    model_context: int
    """Tokens that the model takes at most."""
    sources: list[SourceNumbers]
    lengths: Lengths
    """Lengths of the training samples of all sources."""
    duplicates: Duplicates
    findings: list[Finding]
    refusal: str | None = None
    """Why a run refuses these data: bad records, which are not among the samples; None: it does
    not."""
    samples: list[ShownSample]
