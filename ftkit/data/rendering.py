"""Renderers: how records become the token ids of samples, and which tokens carry loss."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import compress, groupby, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from ftkit.data.media import MediaReader
from ftkit.data.records.media import Medium
from ftkit.data.records.record import Record
from ftkit.data.spec import Rules
from ftkit.models.chat_templates.prompt_styles import DEFAULT, AnyStyle, template_of_style
from ftkit.models.chat_templates.template import ChatTemplate

if TYPE_CHECKING:
    from ftkit.models.pretrained.tokenizer import Tokenizer

NO_OUTPUT = "no output"
"""Reason for a record without sample: it has no answer."""


class Rendered(NamedTuple):
    """The tokens of a sample, however long it is."""

    ids: list[int]
    trained: tuple[tuple[int, int], ...]
    """Spans [first, end) of the tokens that carry loss, rising. Two only touch where their weights
    differ."""
    weights: tuple[float, ...] = ()
    """Weight of the tokens of each span; none: all weigh 1."""
    target: tuple[float, ...] = ()
    """What is learned of it as a whole, in numbers: 1 or 0 for an answer that is desirable or not;
    none: its tokens are learned."""
    media: tuple[Medium, ...] = ()
    """Its media, in the order of their tokens."""

    @property
    def label_count(self) -> int:
        """Tokens that carry loss. The first one never does: nothing predicts it."""
        return sum(end - max(first, 1) for first, end in self.trained)

    def times(self, weight: float) -> "Rendered":
        """The same with all weights multiplied."""
        weights = self.weights or (1.0,) * len(self.trained)
        return self._replace(weights=tuple(weight * one for one in weights))


class Rendering(NamedTuple):
    """Samples of a record, or the reason why there are none."""

    samples: tuple[Rendered, ...] = ()
    refused: str | None = None
    omits_reasoning: bool = False
    """Whether a turn that carries loss has reasoning that the template does not write."""
    is_divided: bool = False
    """Whether an answer is encoded apart from its prompt: the whole text has other tokens there."""
    bad_file: tuple[str, str] | None = None
    """File that makes it a bad record, and what is wrong with it as the end of a sentence."""


class Example(NamedTuple):
    """A record as a question with its answer, for evaluation."""

    prompt: list[int]
    """Token ids of what the model is given."""
    expected: list[int]
    """Token ids of the expected answer, as they are trained, without the one that ends it."""
    stop_ids: frozenset[int]
    """Tokens that end its answer."""
    record: Record
    """Record that it was made of."""
    instruction: str
    """Question, for people."""
    input: str = ""
    """Input of the question, where the record has one."""
    is_whole: bool = True
    """Whether the answer ends behind the expected tokens; else they are its beginning."""
    media: tuple[Medium, ...] = ()
    """Media of the prompt."""
    media_reader: MediaReader | None = None
    """Reads them; None: there are none."""


def without_end(text: str, end: str) -> str:
    """Remove the text of an end token, which is added to every answer, from the end of an answer.

    Returns:
        The rest; "" if that is white space alone.
    """
    while (bare := text.rstrip()).endswith(end):
        text = bare.removesuffix(end)
    return text if text.strip() else ""


def up_to_end(ids: Sequence[int], stop_ids: frozenset[int]) -> list[int]:
    """Return the tokens before the first one that ends an answer."""
    return list(takewhile(lambda token: token not in stop_ids, ids))


class Renderer(ABC):
    """Makes samples of records of one shape.

    What it does follows from the record, the tokenizer and its own settings alone, so that samples
    may be made in any order, in several processes, and kept.
    """

    is_python_bound = False
    """Whether Python takes most of the time, so that processes help; else a library does."""
    per_sample = 1
    """Sequences of a sample: neighbours among those of a rendering."""
    names: tuple[str, ...] = ()
    """A name for each sequence of a sample; none where it has one."""
    answers = True
    """Whether its samples end with what the model is to say."""
    media_settings: Mapping[str, Any] = {}
    """What decides how media become tokens, as JSON values."""
    media_reader: MediaReader | None = None
    """Reads the media of its samples; None: they have none."""

    @property
    @abstractmethod
    def template(self) -> "ChatTemplate":
        """Chat template that makes the same prompts in other programs."""

    @property
    @abstractmethod
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer and do not belong to it."""

    def system(self, record: Record) -> str:
        """Return the system prompt of a record; "": it has none."""
        return ""

    @abstractmethod
    def text(self, record: Record) -> str:
        """Return the text of a record, without a tokenizer; empty where it becomes no sample."""

    def size(self, record: Record) -> tuple[int, Sequence[int]]:
        """Return a bound of the tokens of a record, and what each of its media costs to encode.

        Each token of a text stands for a byte at least. 0: it becomes no sample.
        """
        return len(self.text(record).encode()), ()

    @abstractmethod
    def render(self, records: Sequence[Record]) -> Iterator[Rendering]:
        """Render records in their order."""

    @abstractmethod
    def example(self, record: Record) -> Example:
        """Turn a record into a question whose expected answer is its last one."""


def cut(sample: Rendered, max_seq_length: int, first: int = 0) -> Rendered:
    """Cut tokens from `first` on out of a sample, with the spans that still hold a label.

    A medium is never cut: the sample ends before it. A sample that has media keeps its beginning.
    """
    assert not (first and sample.media)
    kept_media = tuple(medium for medium in sample.media if medium.end <= max_seq_length)
    if len(kept_media) < len(sample.media):
        max_seq_length = min(max_seq_length, sample.media[len(kept_media)].first)
    ids = sample.ids[first : first + max_seq_length]
    spans = [(max(begin - first, 0), min(end - first, len(ids))) for begin, end in sample.trained]
    # Nothing predicts a first token, but what is learned of a whole text may be all of one.
    least = 0 if sample.target else 1
    kept = [max(begin, least) < end for begin, end in spans]
    weights = tuple(compress(sample.weights, kept))
    return Rendered(ids, tuple(compress(spans, kept)), weights, sample.target, kept_media)


class PromptedRenderer(Renderer):
    """Renders prompt, answer and end; ids and labels are those of litgpt.data.SFTDataset.

    Unlike there, BOS and EOS in a prompt stay, and an answer ends with EOS also if its text does.
    """

    def __init__(self, tokenizer: "Tokenizer | None", *, mask_prompt: bool) -> None:
        """Set the rules of rendering.

        Args:
            tokenizer: of the base model; None: only texts are rendered.
            mask_prompt: whether answers alone carry loss.
        """
        self._tokenizer, self._mask_prompt = tokenizer, mask_prompt

    @abstractmethod
    def prompt(self, record: Record) -> str:
        """Return the prompt of a record."""

    @abstractmethod
    def answer(self, record: Record) -> str:
        """Return the answer of a record."""

    @property
    def stop_ids(self) -> frozenset[int]:
        assert self._tokenizer is not None
        return frozenset({self._tokenizer.eos_id})

    def text(self, record: Record) -> str:
        answer = self.answer(record)
        return self.prompt(record) + answer if answer.strip() else ""

    def render(self, records: Sequence[Record]) -> Iterator[Rendering]:
        assert self._tokenizer is not None
        end = self._tokenizer.token_text(self._tokenizer.eos_id)
        answers = [without_end(self.answer(record), end) for record in records]
        answered = [(record, text) for record, text in zip(records, answers, strict=True) if text]
        # Texts are encoded in two batches, not one by one: the tokenizer then uses all cores.
        encoded = zip(
            self._tokenizer.encode_all([self.prompt(record) for record, _ in answered]),
            self._tokenizer.encode_all([text for _, text in answered], bos=False, eos=True),
            strict=True,
        )
        for text in answers:
            if not text:
                yield Rendering(refused=NO_OUTPUT)
                continue
            # Encoded apart, as LitGPT does: no token holds characters of both.
            prompt, answer = next(encoded)
            first = len(prompt) if self._mask_prompt else 0
            ids = prompt + answer
            yield Rendering((Rendered(ids, ((first, len(ids)),)),))

    def _example(self, record: Record, instruction: str, further: str = "") -> Example:
        assert self._tokenizer is not None
        end = self._tokenizer.token_text(self._tokenizer.eos_id)
        (prompt,) = self._tokenizer.encode_all([self.prompt(record)])
        (answer,) = self._tokenizer.encode_all([without_end(self.answer(record), end)], bos=False)
        return Example(
            prompt=prompt,
            expected=up_to_end(answer, self.stop_ids),
            stop_ids=self.stop_ids,
            record=record,
            instruction=instruction,
            input=further,
        )


class InstructionRenderer(PromptedRenderer):
    """Renders instruction and input in a prompt style, and the output."""

    def __init__(
        self, tokenizer: "Tokenizer | None", prompt_style: AnyStyle, *, mask_prompt: bool
    ) -> None:
        """Set the rules of rendering.

        Args:
            tokenizer: of the base model; None: only texts are needed.
            prompt_style: how instruction and input become a prompt.
            mask_prompt: whether answers alone carry loss.
        """
        super().__init__(tokenizer, mask_prompt=mask_prompt)
        self._prompt_style = prompt_style

    @classmethod
    def of(cls, rules: Rules, tokenizer: "Tokenizer | None") -> Self:
        """The renderer of instruction records by these rules."""
        assert rules.prompt_style is not None
        return cls(tokenizer, rules.prompt_style, mask_prompt=rules.train_on != "all")

    @cached_property
    def template(self) -> ChatTemplate:
        assert self._tokenizer is not None
        return template_of_style(self._prompt_style, self._tokenizer)

    def prompt(self, record: Record) -> str:
        return self._prompt_style.apply(prompt=record["instruction"], **record)

    def answer(self, record: Record) -> str:
        return record["output"]

    def system(self, record: Record) -> str:
        return str(record.get("sys_prompt") or "")

    def example(self, record: Record) -> Example:
        return self._example(record, record["instruction"], record.get("input", ""))


class CompletionRenderer(PromptedRenderer):
    """Renders prompt and completion as they are."""

    @classmethod
    def of(cls, rules: Rules, tokenizer: "Tokenizer | None") -> Self:
        """The renderer of completions by these rules."""
        return cls(tokenizer, mask_prompt=rules.train_on != "all")

    @cached_property
    def template(self) -> ChatTemplate:
        assert self._tokenizer is not None
        return template_of_style(DEFAULT, self._tokenizer)

    def prompt(self, record: Record) -> str:
        return record["prompt"]

    def answer(self, record: Record) -> str:
        return record["completion"]

    def example(self, record: Record) -> Example:
        return self._example(record, record["prompt"])


NO_TEXT = "no text"
"""Reason for a document without sample."""

_SHOWN = 128
"""Tokens of a document in an example, and as many that are expected."""


class TextRenderer(Renderer):
    """Renders a document and its end."""

    def __init__(self, tokenizer: "Tokenizer | None") -> None:
        """Set the rules of rendering.

        Args:
            tokenizer: of the base model; None: only texts are needed.
        """
        self._tokenizer = tokenizer

    @classmethod
    def of(cls, rules: Rules, tokenizer: "Tokenizer | None") -> Self:
        """The renderer of documents."""
        return cls(tokenizer)

    @cached_property
    def template(self) -> ChatTemplate:
        assert self._tokenizer is not None
        return template_of_style(DEFAULT, self._tokenizer)

    @property
    def stop_ids(self) -> frozenset[int]:
        assert self._tokenizer is not None
        return frozenset({self._tokenizer.eos_id})

    def text(self, record: Record) -> str:
        return record["text"] if record["text"].strip() else ""

    def render(self, records: Sequence[Record]) -> Iterator[Rendering]:
        assert self._tokenizer is not None
        for record in records:
            if not record["text"].strip():
                yield Rendering(refused=NO_TEXT)
                continue
            ids = self._tokenizer.encode(record["text"], eos=True).tolist()
            yield Rendering((Rendered(ids, ((0, len(ids)),)),))

    def example(self, record: Record) -> Example:
        """Ask for the continuation of the first half of a document."""
        assert self._tokenizer is not None
        ids = self._tokenizer.encode(record["text"]).tolist()
        given = ids[: min(_SHOWN, len(ids) // 2 + 1)]
        rest = ids[len(given) :]
        expected = up_to_end(rest[:_SHOWN], self.stop_ids)
        return Example(
            prompt=given,
            expected=expected,
            stop_ids=self.stop_ids,
            record=record,
            instruction=self._tokenizer.decode(torch.tensor(given)),
            is_whole=len(rest) <= _SHOWN or len(expected) < _SHOWN,
        )


NO_TOKEN = "no token carries loss"
"""Reason for a token sequence without sample."""
UNKNOWN_TOKEN = "it has a token id that the tokenizer does not have"
"""Reason for a refusal of a token sequence."""


class TokensRenderer(TextRenderer):
    """Renders token ids, whose loss has a weight each, as they are."""

    is_python_bound = True

    def text(self, record: Record) -> str:
        """The ids in words: at least one byte for each token."""
        return " ".join(map(str, record["input_ids"])) if any(record["weights"][1:]) else ""

    def render(self, records: Sequence[Record]) -> Iterator[Rendering]:
        assert self._tokenizer is not None
        for record in records:
            ids, weights = record["input_ids"], record["weights"]
            if not any(weights[1:]):  # nothing predicts the first token
                yield Rendering(refused=NO_TOKEN)
            elif max(ids) > self._tokenizer.largest_id:
                yield Rendering(refused=UNKNOWN_TOKEN)
            else:
                spans = list(_weighted_spans(weights))
                of_spans = tuple(weight for _, _, weight in spans)
                trained = tuple((first, end) for first, end, _ in spans)
                is_plain = set(of_spans) == {1.0}
                yield Rendering((Rendered(ids, trained, () if is_plain else of_spans),))

    def example(self, record: Record) -> Example:
        """Ask for the last tokens that carry loss; where all do, for the second half."""
        assert self._tokenizer is not None
        ids = record["input_ids"]
        *_, (first, end, _) = _weighted_spans([float(weight > 0) for weight in record["weights"]])
        first = first if first > 1 else len(ids) // 2 + 1
        expected = up_to_end(ids[first:end], self.stop_ids)
        return Example(
            prompt=ids[:first],
            expected=expected,
            stop_ids=self.stop_ids,
            record=record,
            instruction=self._tokenizer.decode(torch.tensor(ids[:first])),
            is_whole=len(expected) < end - first,
        )


def _weighted_spans(weights: Sequence[float]) -> Iterator[tuple[int, int, float]]:
    """Runs [first, end) of equal weights above 0, with the weight."""
    end = 0
    for weight, run in groupby(weights):
        first, end = end, end + len(list(run))
        if weight:
            yield first, end, weight
