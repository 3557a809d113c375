"""The inspection of a recipe's data: what there is to know before a run, as plain values."""

from dataclasses import dataclass
from typing import Literal

from ftkit.data.records.keys import UnusedKeys

FindingKind = Literal[
    "no_end_of_turn",
    "end_of_turn_not_known",
    "bos_twice",
    "nothing_trained",
    "tools_dropped",
    "reasoning_dropped",
    "system_message_dropped",
    "many_cut",
    "train_in_validation",
    "template_not_used",
]
Severity = Literal["warning", "notice"]
"""warning: what is learned is hardly what is wanted. notice: it may be."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that ruins runs, or may."""

    kind: FindingKind
    severity: Severity
    text: str
    """What is found, with its numbers."""
    advice: str
    """What to change, with a key and a value that works where one does."""

    @property
    def words(self) -> str:
        """All on one line."""
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
    """Those of them that are longer than max_seq_length."""


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
    """How one of them begins."""


@dataclass(frozen=True, kw_only=True)
class SplitNumbers:
    """What becomes of the records of one split of a source."""

    records: int
    used: int
    """Records that become samples."""
    left_out: list[LeftOut]
    samples: int
    truncated: int
    """Samples whose end is cut off."""
    dropped: int
    """Samples that are left out because they are too long."""
    split: int
    """Samples that are too long and become several."""
    split_by_turn: int
    """Conversations that become a sample for each turn: the template changes earlier ones."""
    tokens: int
    """Of the samples, as the model is given them."""
    trained_tokens: int
    """Those that carry loss."""
    lost_tokens: int
    """Tokens that are cut off, dropped or skipped."""
    lengths: Lengths | None
    """None: no record has any."""


@dataclass(frozen=True, kw_only=True)
class SourceNumbers:
    """One source of the data, and how its records become tokens."""

    name: str
    where: str
    """The file, directory or data set that it is of."""
    records: str
    """How many of which kind, in words."""
    unused: UnusedKeys
    """Keys that the records have, and of which nothing is known."""
    shape: str
    """instruction, completion, messages or text."""
    template: str
    """What makes texts of its records, in words."""
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
    """Samples whose tokens are those of another one."""

    train: int
    """Training samples that repeat an earlier one."""
    val: int
    """Validation samples that repeat an earlier one."""
    val_in_train: int
    """Validation samples that are trained on."""
    train_examples: list[str]
    """How some of the first kind begin."""
    val_in_train_examples: list[str]
    """How some of the last kind begin."""


@dataclass(frozen=True, kw_only=True)
class ShownSample:
    """A training sample, token by token."""

    source: str
    number: int
    """Among the training samples of its source, from 0."""
    ids: list[int]
    texts: list[str]
    """Of each token; of one that ends within a character nothing, and the next one has it."""
    trained: list[bool]
    """Whether each carries loss."""
    special: list[bool]
    """Whether each is a mark of the tokenizer, such as BOS, and no text."""


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """What a run will be trained on."""

    base_model: str
    max_seq_length: int
    """No sample has more tokens: train.max_seq_length, or what the model takes."""
    model_context: int
    """Tokens that the model takes at most."""
    sources: list[SourceNumbers]
    lengths: Lengths
    """Of the training samples of all sources."""
    duplicates: Duplicates
    findings: list[Finding]
    samples: list[ShownSample]
