"""Renderers: how records become the token ids of samples, and which of them carry loss."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from ftkit.data.records.record import Record

if TYPE_CHECKING:
    from ftkit.models.chat_templates.template import ChatTemplate


Overlong = Literal["truncate", "drop", "split"]
"""What becomes of a sample that is longer than max_seq_length: its end is cut off, it is left out,
or it is cut into several."""

NO_OUTPUT = "no output"
"""Why a record without an answer becomes no sample."""


class Rendered(NamedTuple):
    """The tokens of a sample, however long it is."""

    ids: list[int]
    trained: tuple[tuple[int, int], ...]
    """Spans [first, end) of the tokens that carry loss, rising and apart from each other."""

    @property
    def label_count(self) -> int:
        """Tokens that carry loss. The first one never does: nothing predicts it."""
        return sum(end - max(first, 1) for first, end in self.trained)


class Rendering(NamedTuple):
    """What a record became: samples, or the reason why there is none."""

    samples: tuple[Rendered, ...] = ()
    refused: str | None = None
    omits_reasoning: bool = False
    """Whether a turn that carries loss has reasoning that the template does not write."""


class Example(NamedTuple):
    """A record as a question with its answer, for evaluation."""

    prompt: list[int]
    """Token ids of what the model is given."""
    expected: str
    """What it should answer."""
    stop_ids: frozenset[int]
    """Tokens that end its answer."""
    record: Record
    """Where all of this is from."""
    instruction: str
    """The question for people."""
    input: str = ""
    """What belongs to the question, where the record has it apart."""


class Renderer(ABC):
    """Makes samples of the records of one shape.

    What it does follows from the record, the tokenizer and its own settings alone, so that samples
    may be made in any order, in several processes, and kept.
    """

    is_python_bound = False
    """Whether rendering takes the time of Python itself, and not that of a library's threads."""

    @property
    @abstractmethod
    def template(self) -> "ChatTemplate":
        """Makes the same prompts of messages, in other programs too."""

    @property
    @abstractmethod
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer and are no part of it."""

    @abstractmethod
    def text(self, record: Record) -> str:
        """What is tokenised of a record; empty where it becomes no sample. Needs no tokenizer."""

    @abstractmethod
    def render(self, records: Sequence[Record]) -> Iterator[Rendering]:
        """What each of the records becomes, in their order."""

    @abstractmethod
    def example(self, record: Record) -> Example:
        """The question that a record asks: up to its last answer, which is expected."""


def cut(sample: Rendered, max_seq_length: int, first: int = 0) -> Rendered:
    """Tokens of a sample from `first` on, with the spans that still hold a label."""
    ids = sample.ids[first : first + max_seq_length]
    spans = ((max(begin - first, 0), min(end - first, len(ids))) for begin, end in sample.trained)
    return Rendered(ids, tuple((begin, end) for begin, end in spans if max(begin, 1) < end))
