"""The renderer of conversations: which tokens of the whole text lie in trained turns."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ftkit.data.records.record import Record
from ftkit.data.rendering import Example, Rendered, Renderer, Rendering
from ftkit.models.chat_templates import Reasoning, TrainOn
from ftkit.models.chat_templates.arguments import ARGUMENTS
from ftkit.models.chat_templates.span_weights import with_span_weights
from ftkit.models.chat_templates.stops import TYPICAL
from ftkit.models.chat_templates.template import ChatTemplate, Span, TemplateRefusal
from ftkit.models.chat_templates.turns import (
    TurnFinder,
    WeightedSpan,
    Written,
    plain_messages,
)

LOST = "no token lies in a turn of the assistant"
"""Reason for a conversation without sample: its answer is only inside tokens that begin earlier."""
OTHERS_SAID = "what another message says would carry loss"
"""Reason for a refusal: a token holds both an answer and what another message says."""


class _EncodedText(Protocol):
    """Tokens of a text with their character spans."""

    @property
    def ids(self) -> list[int]: ...

    @property
    def offsets(self) -> list[Span]: ...


class _ChatTokenizer(Protocol):
    """The part of a tokenizer that this renderer uses."""

    eos_id: int

    @property
    def added_tokens(self) -> dict[str, int]: ...

    @property
    def stops(self) -> tuple[str, ...]: ...

    def encode_all_rendered(self, texts: Sequence[str]) -> Sequence[_EncodedText]: ...


class ChatRenderer(Renderer):
    """Renders conversations; a token of the whole text carries loss if it lies in a trained turn.

    White space behind the turn may belong to its last token. Each sample is checked once it is made
    of tokens: if one that carries loss holds a character that another message says, the record is
    refused.
    """

    is_python_bound = True

    def __init__(
        self,
        tokenizer: _ChatTokenizer | None,
        template: ChatTemplate,
        *,
        train_on: TrainOn,
        reasoning: Reasoning = "split",
    ) -> None:
        """Set the rules of rendering.

        Args:
            tokenizer: of the base model; None: only texts are rendered.
            template: writes the conversations.
            train_on: which turns carry loss.
            reasoning: handling of conversations whose later turns change earlier ones.
        """
        self._tokenizer, self._template = tokenizer, template
        self._finder = self._turns(train_on, reasoning)
        self._learns_all = train_on == "all"
        # For the expected answers of `example`: the last turn, whatever is trained.
        self._answers = self._turns("last", "split")

    @property
    def template(self) -> ChatTemplate:
        return self._template

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """EOS, and the last token of each turn where it is one of its own."""
        assert self._tokenizer is not None
        finder = self._turns("assistant", "split")
        written: list[Written] = []
        for record in TYPICAL.values():
            try:
                written += finder.written(record)
            except TemplateRefusal:  # it has no tools
                continue
        samples = filter(None, self._tokens(written))
        # A template may end turns with another token than EOS (<|im_end|>), and the model learns to
        # write that one.
        last = {sample.ids[end - 1] for sample in samples for _, end in sample.trained}
        return frozenset(last & {*self._tokenizer.added_tokens.values()} | {self._tokenizer.eos_id})

    def _turns(self, train_on: TrainOn, reasoning: Reasoning) -> TurnFinder:
        tokenizer = self._tokenizer
        added, stops = (tokenizer.added_tokens, tokenizer.stops) if tokenizer else ((), ())
        return TurnFinder(self._template, added, stops, train_on=train_on, reasoning=reasoning)

    def text(self, record: Record) -> str:
        try:
            return max((sample.whole for sample in self._finder.written(record)), key=len)
        except TemplateRefusal:
            return ""

    def render(self, records: Sequence[Record]) -> Iterator[Rendering]:
        each = zip(records, self._finder.written_each(records), strict=True)
        found = [self._with_span_weights(record, written) for record, written in each]
        texts = [sample for written in found if not isinstance(written, str) for sample in written]
        samples = self._tokens(texts)
        for written in found:
            if isinstance(written, str):
                yield Rendering(refused=written)
                continue
            made = [next(samples) for _ in written]
            if None in made:
                yield Rendering(refused=OTHERS_SAID)
                continue
            kept = tuple(sample for sample in made if sample and sample.trained)
            omits_reasoning = any(sample.omits_reasoning for sample in written)
            yield Rendering(kept, None if kept else LOST, omits_reasoning)

    def example(self, record: Record) -> Example:
        messages, tools = plain_messages(record["messages"]), record.get("tools")
        said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        last = said[-1] if said else len(messages)
        template = self._template.with_arguments(record.get(ARGUMENTS))
        prompt = template.render(messages[:last], tools=tools, add_generation_prompt=True)
        assert self._tokenizer is not None
        return Example(
            prompt=self._tokenizer.encode_all_rendered([prompt])[0].ids,
            expected=self._expected(record | {"messages": messages[: last + 1]}) if said else "",
            stop_ids=self.stop_ids,
            record=record,
            instruction=_shown(messages[:last]),
        )

    def _expected(self, record: Record) -> str:
        """The text of the last message; where it has none, how its tool calls are written."""
        said = str(record["messages"][-1]["content"])
        if said.strip():
            return said
        try:
            (written,) = self._answers.written(record)
        except TemplateRefusal:
            return ""
        text = "".join(written.whole[first:end] for first, end in written.trained)
        assert self._tokenizer is not None
        # The token that ends the turn belongs to no expected answer.
        ends = (token for token in self._tokenizer.added_tokens if text.endswith(token))
        return text.removesuffix(max(ends, key=len, default="")).strip()

    def _with_span_weights(
        self, record: Record, written: list[Written] | str
    ) -> list[Written] | str:
        """The texts of a conversation's samples, or the reason why there is none."""
        if isinstance(written, str):
            return written
        try:
            return with_span_weights(self._template, record, written, of_all=self._learns_all)
        except TemplateRefusal as refusal:
            return str(refusal)

    def _tokens(self, written: Sequence[Written]) -> Iterator[Rendered | None]:
        """Tokens of texts; None: some that carry loss hold what another message says."""
        assert self._tokenizer is not None
        encodings = self._tokenizer.encode_all_rendered([sample.whole for sample in written])
        for sample, encoded in zip(written, encodings, strict=True):
            ids, offsets = self._divided(sample, encoded)
            trained = _token_spans(offsets, sample)
            if _hold(offsets, trained, sample.others):
                yield None
            else:
                yield _weighted(Rendered(ids, trained), offsets, sample.weights)

    def _divided(self, sample: Written, encoded: _EncodedText) -> tuple[list[int], list[Span]]:
        """Tokens of a sample and their characters, so that it begins with those of its prompt."""
        end = sample.prompt_end
        if not end:
            return encoded.ids, encoded.offsets
        assert self._tokenizer is not None
        prompt, answer = self._tokenizer.encode_all_rendered(
            [sample.whole[:end], sample.whole[end:]]
        )
        if encoded.ids[: len(prompt.ids)] == prompt.ids:
            return encoded.ids, encoded.offsets
        # A token would hold the end of the prompt and the start of the answer, as two line breaks
        # in one. The model reads the prompt alone when it answers, and begins a token behind it.
        moved = [(first + end, last + end) for first, last in answer.offsets]
        return [*prompt.ids, *answer.ids], [*prompt.offsets, *moved]


def _weighted(
    sample: Rendered, offsets: Sequence[Span], characters: Sequence[WeightedSpan]
) -> Rendered:
    """Split the spans of tokens where weights change: a token has that of its first character."""
    if not characters:
        return sample
    begins = _begins(offsets)
    of_tokens = np.ones(len(begins))
    for first, end, weight in characters:
        of_tokens[slice(*np.searchsorted(begins, (first, end)))] = weight
    changes = (np.flatnonzero(np.diff(of_tokens)) + 1).tolist()
    spans = [
        span
        for first, end in sample.trained
        for span in pairwise([first, *(at for at in changes if first < at < end), end])
    ]
    weights = tuple(float(of_tokens[first]) for first, _ in spans)
    return Rendered(sample.ids, tuple(spans), weights)


def _token_spans(offsets: Sequence[Span], sample: Written) -> tuple[Span, ...]:
    """Find the tokens that lie in the trained characters of a text.

    A token that begins before them is none of them. White space behind them may belong to their
    last token: some tokenizers add it to the token that ends a turn.
    """
    edges = np.searchsorted(_begins(offsets), np.array(sample.trained, dtype=np.int64)).tolist()
    spans: list[Span] = []
    for (first, end), (_, last) in zip(edges, sample.trained, strict=True):
        while first < end and sample.whole[last : offsets[end - 1][1]].strip():
            end -= 1
        if first < end:
            spans.append((first, end))
    return tuple(spans)


def _hold(offsets: Sequence[Span], tokens: Sequence[Span], characters: Sequence[Span]) -> bool:
    """Return whether tokens hold one of the characters, by the spans of the tokenizer."""
    if not characters:
        return False
    begins, ends = np.sort(np.array(characters, dtype=np.int64), axis=0).T
    for first, end in tokens:
        starts, stops = np.array(offsets[first:end], dtype=np.int64).T
        # Spans that begin before the token ends, without those that end before it begins.
        held = np.searchsorted(begins, stops) > np.searchsorted(ends, starts, side="right")
        if np.any(held & (starts < stops)):
            return True
    return False


def _begins(offsets: Sequence[Span]) -> npt.NDArray[np.int64]:
    """[tokens], the character with which each token begins.

    Some tokenizers leave white space out of the offsets of the token that holds it: tokens lie one
    behind the other, so it begins where the one before ends.
    """
    places = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    ends = np.maximum.accumulate(places[:, 1])
    begins = places[:, 0].copy()
    begins[1:] = np.minimum(begins[1:], ends[:-1])
    begins[:1] = 0
    return np.maximum.accumulate(begins)


def _shown(messages: Sequence[Mapping[str, Any]]) -> str:
    """What comes before an answer, for people: one question alone, or messages with their roles."""
    if [message["role"] for message in messages] == ["user"]:
        return str(messages[0]["content"])
    return "\n".join(f"{message['role']}: {_said(message)}" for message in messages)


def _said(message: Mapping[str, Any]) -> str:
    called = [f"(calls {call['function']['name']})" for call in message.get("tool_calls") or ()]
    return " ".join(filter(None, (message["content"], *called)))
