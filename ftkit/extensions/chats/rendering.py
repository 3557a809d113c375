"""The renderer of conversations: which tokens of the whole text lie in trained turns."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from ftkit.data.records.record import Record
from ftkit.data.rendering import (
    Example,
    Rendered,
    Renderer,
    Rendering,
    up_to_end,
    without_end,
)
from ftkit.data.spec import Rules
from ftkit.extensions.chats.span_weights import with_span_weights
from ftkit.extensions.chats.stops import TYPICAL
from ftkit.extensions.chats.turns import (
    TurnFinder,
    WeightedSpan,
    Written,
    plain_messages,
)
from ftkit.models.chat_templates import Reasoning, TrainOn
from ftkit.models.chat_templates.arguments import ARGUMENTS
from ftkit.models.chat_templates.confined import Exceeded, run_each_confined
from ftkit.models.chat_templates.prompt_styles import template_of_style
from ftkit.models.chat_templates.sandbox import NotRendered
from ftkit.models.chat_templates.template import (
    OF_TOKENIZER,
    ChatTemplate,
    Span,
    TemplateRefusal,
    resolve_chat_template,
    text_template,
)

LOST = "no token lies in a turn of the assistant"
"""Reason for a conversation without sample: the tokenizer makes no token of its answer."""
_LONGEST_END = 64
"""Characters of the end of a prompt whose tokens are kept."""
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


class _Tokens(NamedTuple):
    """Tokens of a text with their character spans."""

    ids: list[int]
    offsets: list[Span]


class _Made(NamedTuple):
    """Samples of a text."""

    samples: list[Rendered]
    holds_others: bool
    """Whether a token that carries loss holds what another message says."""
    is_divided: bool
    """Whether the whole text has other tokens than a prompt and the answer behind it."""


class ChatRenderer(Renderer):
    """Renders conversations; a token of the whole text carries loss if it lies in a trained turn.

    A turn is learned behind the tokens of its prompt, as the model gets them when it answers: where
    the whole text has others, because one would hold the end of the prompt and the start of the
    answer, both are encoded apart, in a sample of this turn. White space behind a turn may belong
    to its last token. Each sample is checked once it is made of tokens: if one that carries loss
    holds a character that another message says, the record is refused.
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
        # Not functools.cache: other processes get a copy of this.
        self._ends: dict[str, _Tokens] = {}
        # For the expected answers of `example`: the last turn, whatever is trained.
        self._answers = self._turns("last", "split")

    @classmethod
    def of(cls, rules: Rules, tokenizer: Any) -> Self:
        """The renderer of conversations by these rules.

        Raises:
            UserError: there is no such chat template.
        """
        template = _template(rules, tokenizer)
        return cls(tokenizer, template, train_on=rules.train_on, reasoning=rules.reasoning)

    @property
    def template(self) -> ChatTemplate:
        return self._template

    @cached_property
    def stop_ids(self) -> frozenset[int]:
        """EOS, and the last token of each turn where it is one of its own."""
        assert self._tokenizer is not None
        # A template may end turns with another token than EOS (<|im_end|>), and the model learns to
        # write that one.
        own = (self._tokenizer.added_tokens[text] for text in self._ends_of_turns if text)
        return frozenset((*own, self._tokenizer.eos_id))

    @cached_property
    def _added_ids(self) -> frozenset[int]:
        assert self._tokenizer is not None
        return frozenset(self._tokenizer.added_tokens.values())

    @cached_property
    def _ends_of_turns(self) -> frozenset[str]:
        """Added tokens with which turns end, before white space; "" where one ends with none."""
        assert self._tokenizer is not None
        finder = self._turns("assistant", "split")
        written: list[Written] = []
        for record in TYPICAL.values():
            try:
                written += finder.written(record)
            except TemplateRefusal:  # it has no tools
                continue
        # A template may mark the line end behind a turn as generated, too.
        turns = [sample.whole[:end].rstrip() for sample in written for _, end in sample.trained]
        added = sorted(self._tokenizer.added_tokens, key=len, reverse=True)
        return frozenset(next(filter(turn.endswith, added), "") for turn in turns)

    @cached_property
    def _end(self) -> str:
        """Text of the token with which the template ends every turn; "": no single one does."""
        (end, *others) = self._ends_of_turns or [""]
        return "" if others else end

    def _turns(self, train_on: TrainOn, reasoning: Reasoning) -> TurnFinder:
        tokenizer = self._tokenizer
        added, stops = (tokenizer.added_tokens, tokenizer.stops) if tokenizer else ((), ())
        return TurnFinder(self._template, added, stops, train_on=train_on, reasoning=reasoning)

    def system(self, record: Record) -> str:
        said = (one["content"] for one in record["messages"] if one["role"] == "system")
        return str(next(said, ""))

    def text(self, record: Record) -> str:
        try:
            return max((sample.whole for sample in self._finder.written(record)), key=len)
        except TemplateRefusal:
            return ""

    def render(self, records: Sequence[Record]) -> Iterator[Rendering]:
        records = [self._without_ends(record) for record in records]
        each = zip(records, self._finder.written_each(records), strict=True)
        found = [self._with_span_weights(record, written) for record, written in each]
        texts = [sample for written in found if not isinstance(written, str) for sample in written]
        tokens = self._tokens(texts, of_all=self._learns_all)
        for written in found:
            if isinstance(written, str):
                yield Rendering(refused=written)
                continue
            made = [next(tokens) for _ in written]
            if any(one.holds_others for one in made):
                yield Rendering(refused=OTHERS_SAID)
                continue
            kept = tuple(sample for one in made for sample in one.samples if sample.trained)
            omits_reasoning = any(sample.omits_reasoning for sample in written)
            is_divided = any(one.is_divided for one in made)
            yield Rendering(kept, None if kept else LOST, omits_reasoning, is_divided)

    def whole(self, records: Sequence[Record]) -> Iterator[list[int] | str]:
        """Yield the tokens of each conversation whatever its turns are, or why it has none."""
        try:
            for text in run_each_confined(self.whole_text, records):
                yield str(text) if isinstance(text, NotRendered) else self._encoded(text).ids
        except Exceeded as error:
            raise self._template.explained(error) from None

    def whole_text(self, record: Record) -> str:
        """Return the text of a conversation, without the beginning of an answer.

        Raises:
            TemplateRefusal: the template does not take it.
        """
        template = self._template.with_arguments(record.get(ARGUMENTS))
        return template.render(plain_messages(record["messages"]), tools=record.get("tools"))

    def example(self, record: Record) -> Example:
        record = self._without_ends(record)
        messages, tools = plain_messages(record["messages"]), record.get("tools")
        said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        last = said[-1] if said else len(messages)
        template = self._template.with_arguments(record.get(ARGUMENTS))
        prompt = template.render(messages[:last], tools=tools, add_generation_prompt=True)
        ids = self._encoded(prompt).ids
        return Example(
            prompt=ids,
            expected=self._expected(record, messages[: last + 1], len(ids)) if said else [],
            stop_ids=self.stop_ids,
            record=record,
            instruction=_shown(messages[:last]),
        )

    def _expected(
        self, record: Record, messages: Sequence[dict[str, Any]], prompt_tokens: int
    ) -> list[int]:
        """The last message as it is trained behind its prompt, without its end."""
        *before, answer = messages
        try:
            (written,) = self._answers.written(
                record | {"messages": [*before, answer | {"train": True}]}
            )
        except TemplateRefusal:
            return self._encoded(answer["content"]).ids
        ((sample, *_),) = (made.samples for made in self._tokens([written]))
        end = sample.trained[-1][1] if sample.trained else prompt_tokens
        return up_to_end(sample.ids[prompt_tokens:end], self.stop_ids)

    def _without_ends(self, record: Record) -> Record:
        """Remove the end from answers that have the one that the template writes behind them."""
        messages = [
            message | {"content": without_end(message["content"], self._end)}
            if self._has_end(message)
            else message
            for message in record["messages"]
        ]
        return record | {"messages": messages}

    def _has_end(self, message: Mapping[str, Any]) -> bool:
        # Where its parts have weights, these count characters of the content.
        is_answer = message["role"] == "assistant" and "spans" not in message
        return is_answer and self._end in message["content"] and bool(self._end)

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

    def _tokens(self, written: Sequence[Written], *, of_all: bool = False) -> Iterator[_Made]:
        """Samples of texts; where all is learned, each text is one."""
        assert self._tokenizer is not None
        encodings = self._tokenizer.encode_all_rendered([sample.whole for sample in written])
        for sample, encoded in zip(written, encodings, strict=True):
            tokens, divided = _Tokens(encoded.ids, encoded.offsets), []
            for start in sample.starts:
                found, is_divided = self._behind_prompt(sample.whole, tokens, start)
                divided += [start] * is_divided
                tokens = tokens if is_divided and not of_all else found
            parts = [(sample, tokens)]
            if divided and not of_all:
                # Each behind its own prompt, in which earlier answers have the tokens of the whole.
                parts = [(_without_turns(sample, divided), tokens)]
                for start in divided:
                    turn = _turn_alone(sample, start)
                    alone = self._encoded(turn.text)
                    parts.append((turn, self._behind_prompt(turn.text, alone, start)[0]))
            made = [
                (Rendered(tokens.ids, _token_spans(tokens.offsets, part)), tokens.offsets, part)
                for part, tokens in parts
                if part.trained
            ]
            yield _Made(
                [_weighted(one, offsets, part.weights) for one, offsets, part in made],
                any(_hold(offsets, one.trained, part.others) for one, offsets, part in made),
                bool(divided),
            )

    def _behind_prompt(self, text: str, tokens: _Tokens, start: int) -> tuple[_Tokens, bool]:
        """Tokens that begin with those of a prompt, and whether the whole text has others.

        Args:
            text: the whole.
            tokens: of it.
            start: characters of the prompt.
        """
        ids, offsets = tokens
        # The first token that ends behind the prompt.
        first = bisect_right(offsets, start, key=itemgetter(1))
        # What stands behind an added token is encoded for itself: only the end of a prompt, which
        # is the same in most, has to be compared.
        last = next((i for i in range(first - 1, 0, -1) if ids[i] in self._added_ids), 0)
        # Tokens of one character belong together: those of an image.
        while last and offsets[last - 1] == offsets[last]:
            last -= 1
        begin = offsets[last][0] if last else 0
        prompt = self._encoded_end(text[begin:start])
        end = last + len(prompt.ids)
        is_divided = ids[last:end] != prompt.ids
        if not is_divided and (not end or offsets[end - 1][1] >= start):
            return tokens, False
        # Some tokenizers leave white space out of the offsets of the token that holds it.
        before = offsets[first - 1][1] if first else 0
        if not is_divided:
            behind = _Tokens(ids[end:], offsets[end:])
        elif first < len(ids) and min(offsets[first][0], before) < start:
            behind = self._encoded_behind(text[start:], start)
        else:
            behind = _Tokens(ids[first:], offsets[first:])
        of_prompt = [*offsets[:last], *_moved(prompt.offsets, begin)]
        if of_prompt:  # white space that is in no token belongs to the prompt, too
            of_prompt[-1] = (of_prompt[-1][0], start)
        made = _Tokens([*ids[:last], *prompt.ids, *behind.ids], [*of_prompt, *behind.offsets])
        return made, is_divided

    def _encoded_behind(self, text: str, start: int) -> _Tokens:
        """Encode a text that stands behind another one, of which no token holds a character."""
        # Some tokenizers put a space before a text, which is not in the whole: a line break shows
        # what its tokens are further behind.
        marked = self._encoded("\n" + text)
        first = sum(begin < 1 for begin, _ in marked.offsets)
        if all(end <= 1 for _, end in marked.offsets[:first]):
            return _Tokens(marked.ids[first:], _moved(marked.offsets[first:], start - 1))
        alone = self._encoded(text)
        return _Tokens(alone.ids, _moved(alone.offsets, start))

    def _encoded_end(self, text: str) -> _Tokens:
        """Encode the end of a prompt, each once where it is short."""
        if len(text) > _LONGEST_END:
            return self._encoded(text)
        if text not in self._ends:
            self._ends[text] = self._encoded(text)
        return self._ends[text]

    def _encoded(self, text: str) -> _Tokens:
        assert self._tokenizer is not None
        (encoded,) = self._tokenizer.encode_all_rendered([text])
        return _Tokens(encoded.ids, encoded.offsets)


def ends_of_turns(tokenizer: _ChatTokenizer, template: ChatTemplate) -> frozenset[int]:
    """Return the tokens that end an answer in a template: EOS, and those that end its turns."""
    return ChatRenderer(tokenizer, template, train_on="assistant").stop_ids


def _template(rules: Rules, tokenizer: Any) -> ChatTemplate:
    if rules.prompt_style is not None:
        return template_of_style(rules.prompt_style, tokenizer or _NoTokenizer())
    assert rules.chat_template is not None
    if tokenizer is not None:
        template = resolve_chat_template(rules.chat_template, tokenizer)
    elif rules.chat_template == OF_TOKENIZER:
        # Texts alone are shown, without the model: any template stands in for its own.
        return text_template("chatml", {})
    else:
        template = text_template(rules.chat_template, {})
    return template.with_defaults(rules.chat_template_kwargs)


class _NoTokenizer:
    """Stand-in for a tokenizer where a prompt style only renders text."""

    use_bos = False
    bos_gap = ""
    special_tokens: Mapping[str, str] = {"bos_token": "", "eos_token": ""}


def _moved(offsets: Sequence[Span], by: int) -> list[Span]:
    return [(first + by, end + by) for first, end in offsets]


def _turn_of(sample: Written, end: int) -> int:
    """Start of the turn that trained characters up to an end belong to."""
    return max(start for start in sample.starts if start < end)


def _without_turns(sample: Written, starts: Sequence[int]) -> Written:
    trained = [span for span in sample.trained if _turn_of(sample, span[1]) not in starts]
    return sample._replace(trained=trained)


def _turn_alone(sample: Written, start: int) -> Written:
    """The text up to the end of a turn, with the white space behind it."""
    trained = [span for span in sample.trained if _turn_of(sample, span[1]) == start]
    end = trained[-1][1] if trained else start
    end = len(sample.whole) - len(sample.whole[end:].lstrip())
    return sample._replace(
        text=sample.whole[:end],
        stop="",
        trained=trained,
        others=[span for span in sample.others if span[1] <= end],
    )


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
