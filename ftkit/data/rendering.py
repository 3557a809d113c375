"""Renderers: how records become the token ids of samples, and which tokens carry loss."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from ftkit.data.records.record import Record
from ftkit.models.chat_templates.prompt_styles import DEFAULT, AnyStyle, template_of_style
from ftkit.models.chat_templates.template import ChatTemplate

if TYPE_CHECKING:
    from ftkit.models.chat_templates.template import ChatTemplate
    from ftkit.models.pretrained.tokenizer import Tokenizer

NO_OUTPUT = "no output"
"""Reason for a record without sample: it has no answer."""


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
    """Samples of a record, or the reason why there are none."""

    samples: tuple[Rendered, ...] = ()
    refused: str | None = None
    omits_reasoning: bool = False
    """Whether a turn that carries loss has reasoning that the template does not write."""


class Example(NamedTuple):
    """A record as a question with its answer, for evaluation."""

    prompt: list[int]
    """Token ids of what the model is given."""
    expected: str
    """Expected answer."""
    stop_ids: frozenset[int]
    """Tokens that end its answer."""
    record: Record
    """Record that it was made of."""
    instruction: str
    """Question, for people."""
    input: str = ""
    """Input of the question, where the record has one."""


class Renderer(ABC):
    """Makes samples of records of one shape.

    What it does follows from the record, the tokenizer and its own settings alone, so that samples
    may be made in any order, in several processes, and kept.
    """

    is_python_bound = False
    """Whether Python takes most of the time, so that processes help; else a library does."""

    @property
    @abstractmethod
    def template(self) -> "ChatTemplate":
        """Chat template that makes the same prompts in other programs."""

    @property
    @abstractmethod
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer and do not belong to it."""

    @abstractmethod
    def text(self, record: Record) -> str:
        """Return the text of a record, without a tokenizer; empty where it becomes no sample."""

    @abstractmethod
    def render(self, records: Sequence[Record]) -> Iterator[Rendering]:
        """Render records in their order."""

    @abstractmethod
    def example(self, record: Record) -> Example:
        """Turn a record into a question whose expected answer is its last one."""


def cut(sample: Rendered, max_seq_length: int, first: int = 0) -> Rendered:
    """Cut tokens from `first` on out of a sample, with the spans that still hold a label."""
    ids = sample.ids[first : first + max_seq_length]
    spans = ((max(begin - first, 0), min(end - first, len(ids))) for begin, end in sample.trained)
    return Rendered(ids, tuple((begin, end) for begin, end in spans if max(begin, 1) < end))


class PromptedRenderer(Renderer):
    """Renders prompt, answer and end; ids and labels are those of litgpt.data.SFTDataset."""

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
        answered = [record for record in records if self.answer(record).strip()]
        prompts = iter(_encode(self._tokenizer, [self.prompt(record) for record in answered]))
        answers = iter(
            _encode(self._tokenizer, [self.answer(record) for record in answered], answer=True)
        )
        for record in records:
            if not self.answer(record).strip():
                yield Rendering(refused=NO_OUTPUT)
                continue
            prompt, answer = next(prompts), next(answers)
            first = len(prompt) if self._mask_prompt else 0
            # Encoded apart, as LitGPT does: no token holds characters of both.
            ids = prompt + answer
            yield Rendering((Rendered(ids, ((first, len(ids)),)),))


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

    @cached_property
    def template(self) -> ChatTemplate:
        assert self._tokenizer is not None
        return template_of_style(self._prompt_style, self._tokenizer)

    def prompt(self, record: Record) -> str:
        return self._prompt_style.apply(prompt=record["instruction"], **record)

    def answer(self, record: Record) -> str:
        return record["output"]

    def example(self, record: Record) -> Example:
        assert self._tokenizer is not None
        return Example(
            prompt=self._tokenizer.encode(self.prompt(record)).tolist(),
            expected=record["output"],
            stop_ids=self.stop_ids,
            record=record,
            instruction=record["instruction"],
            input=record.get("input", ""),
        )


class CompletionRenderer(PromptedRenderer):
    """Renders prompt and completion as they are."""

    @cached_property
    def template(self) -> ChatTemplate:
        assert self._tokenizer is not None
        return template_of_style(DEFAULT, self._tokenizer)

    def prompt(self, record: Record) -> str:
        return record["prompt"]

    def answer(self, record: Record) -> str:
        return record["completion"]

    def example(self, record: Record) -> Example:
        assert self._tokenizer is not None
        prompt = record["prompt"]
        return Example(
            prompt=self._tokenizer.encode(prompt).tolist(),
            expected=record["completion"],
            stop_ids=self.stop_ids,
            record=record,
            instruction=prompt,
        )


def _encode(tokenizer: "Tokenizer", texts: list[str], *, answer: bool = False) -> list[list[int]]:
    """Encode texts like litgpt.Tokenizer.encode, many at once where that is safe."""
    bos = False if answer else None
    if tokenizer.backend != "huggingface" or tokenizer.processor.padding is not None:
        # A batch would be padded to its longest text.
        return [tokenizer.encode(text, bos=bos, eos=answer).tolist() for text in texts]
    # fast: without offsets, which nothing here reads.
    encodings = tokenizer.processor.encode_batch_fast(texts)
    return [
        _mark_ends(encoding.ids, tokenizer, bos=tokenizer.use_bos and not answer, eos=answer)
        for encoding in encodings
    ]


def _mark_ends(ids: list[int], tokenizer: "Tokenizer", *, bos: bool, eos: bool) -> list[int]:
    """Add start and end token by the rules of litgpt.Tokenizer.encode, odd ones included.

    An end token that is already there is removed, whether or not one is requested.
    """
    if bos:
        assert tokenizer.bos_id is not None, "texts that begin with BOS have one"
        if not ids or ids[0] != tokenizer.bos_id:
            ids = [tokenizer.bos_id, *ids]
    elif ids and ids[0] == tokenizer.bos_id:
        ids = ids[1:]
    if ids and ids[-1] == tokenizer.eos_id:
        return ids[:-1]
    return [*ids, tokenizer.eos_id] if eos else ids


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
        expected = ids[len(given) : len(given) + _SHOWN]
        return Example(
            prompt=given,
            expected=self._tokenizer.decode(torch.tensor(expected)) if expected else "",
            stop_ids=self.stop_ids,
            record=record,
            instruction=self._tokenizer.decode(torch.tensor(given)),
        )
