"""Turns of the assistant: which characters of a rendered conversation carry loss.

A prompt is the rendering of all messages before a turn; the text that is added with the turn is the
assistant's, its end included. Both are rendered for each turn that is trained on, and the whole
conversation has to begin with both: so a turn is learned after exactly the prompt that the model
gets when it answers. If the turn does not begin with the prompt, because that opens or closes a
thought, the answer is put behind it (`ftkit.extensions.chats.continuation`). Spans that a
template marks as generated are cut to their turn.

Each text is rendered once more, with brackets around every other message: so the code that makes
tokens of it can check that none of these messages carries loss, independently of the turns.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import Any, NamedTuple

from ftkit.extensions.chats.continuation import Brackets, Continuer, unused_brackets
from ftkit.extensions.chats.stops import Stops
from ftkit.models.chat_templates import NO_TOOLS, Reasoning, TrainOn
from ftkit.models.chat_templates.arguments import ARGUMENTS
from ftkit.models.chat_templates.confined import Exceeded, run_each_confined
from ftkit.models.chat_templates.sandbox import NotRendered
from ftkit.models.chat_templates.template import ChatTemplate, MarksNotFound, Span, TemplateRefusal

NO_TURN = "no turn to train on"
"""Reason to skip a conversation in which no assistant says anything, or all of it is masked."""
CHANGED = "the template changes earlier turns"
"""Reason to skip one if data.reasoning is refuse."""
OTHER_PROMPT = "the template's prompt is not what it writes before an answer"
"""Reason to skip one: the model would never get the prompt that it is trained to answer."""
NOT_MARKED = "the template marks no generation in it"
"""Reason to skip one if the template marks generated text in others."""
REFUSED = "the template refuses it: "
"""Beginning of the reason if the template raises; its own words follow."""

_MOST_SHOWN = 40
"""Characters of a prompt in a reason."""


WeightedSpan = tuple[int, int, float]
"""First character, end, and weight."""


class Written(NamedTuple):
    """A conversation as text."""

    text: str
    trained: list[Span]
    """Characters that carry loss, in rising order, without overlaps."""
    others: list[Span]
    """Spans of messages that must not carry loss, without white space around them. A message that
    the template does not write unchanged is missing here."""
    omits_reasoning: bool
    """True if a turn that carries loss has reasoning that the template does not write with it."""
    weights: Sequence[WeightedSpan] = ()
    """Weights of characters whose weight is not 1, rising and apart from each other."""
    stop: str = ""
    """Token behind the text that ends its last turn, if it begins the message that would follow."""
    starts: Sequence[int] = ()
    """Characters of the prompt of each turn that carries loss, rising: the text up to there is what
    the model gets when it answers. Where every token is learned, a turn may have none."""

    @property
    def whole(self) -> str:
        """The text with the token that ends it."""
        return self.text + self.stop


class _Turn(NamedTuple):
    """Position of one answer of the assistant in the rendered conversation."""

    start: int
    """End of the prompt before it."""
    space_end: int
    """End of the turn, its end token and the white space that the template writes behind it."""
    generated: list[Span]
    """Spans of the turn, and of the white space behind it, that the template marks; without marks,
    the turn. With the header before it, if messages are learned."""


class TurnFinder:
    """Finds the turns of conversations in what a template makes of them."""

    def __init__(
        self,
        template: ChatTemplate,
        added_tokens: Collection[str],
        stops: Collection[str],
        *,
        train_on: TrainOn,
        reasoning: Reasoning,
    ) -> None:
        """Prepare for conversations of one template.

        Args:
            template: renders the conversations.
            added_tokens: texts of the tokens that may end a turn.
            stops: texts of those at which the model's settings stop.
            train_on: rule for messages without a `train` key.
            reasoning: handling of conversations whose earlier turns are changed.
        """
        self._template = template
        self._train_on, self._reasoning = train_on, reasoning
        self._added_tokens = tuple(added_tokens)
        self._stops = Stops(template, stops)
        # The expression takes the first alternative that matches, so longer tokens stand before
        # their own beginnings. Tokens of white space end no turn.
        longest_first = sorted(filter(str.strip, added_tokens), key=len, reverse=True)
        # (?!) matches nothing: a tokenizer without added tokens has no end of a turn.
        self._end = re.compile(
            f"(?P<token>{'|'.join(map(re.escape, longest_first)) or '(?!)'})\\s*\\Z"
        )

    def written(self, record: dict[str, Any]) -> list[Written]:
        """Render a conversation to the texts of samples: one, or one for each turn.

        Raises:
            TemplateRefusal: it makes no sample; the text is the reason.
        """
        chosen, masked = self._chosen(record["messages"])
        if not chosen:
            raise TemplateRefusal(NO_TURN)
        conversation, count = self._conversation(record), len(record["messages"])
        # By name, because each template writes tools in a form of its own.
        if not all(name in conversation.whole for name in _tool_names(record)):
            raise TemplateRefusal(NO_TOOLS)
        # Everything but the masked turns, which are located to be left out.
        if self._train_on == "all":
            turns = [self._turn(conversation, i) for i in masked]
            weighted = [i for i in chosen if "weight" in record["messages"][i]]
            of_weighted = [self._turn(conversation, i) for i in weighted]
            if None in (*turns, *of_weighted):
                raise TemplateRefusal(CHANGED)
            stop = ""
            if chosen[-1] == count - 1:
                with suppress(TemplateRefusal):  # where every token is learned, it needs no prompt
                    stop = self._stop(conversation, count - 1)
            length = len(conversation.whole) + len(stop)
            spans = _between([turn for turn in turns if turn], length)
            # Earlier turns may well be written without their thoughts: nothing is split here.
            sample = conversation.written(spans, stop, learned=chosen[-1:], others=masked)
            return [
                sample._replace(
                    weights=_weights(record, weighted, of_weighted),
                    starts=self._starts(conversation, chosen),
                )
            ]
        # All turns in one sample, if later ones leave earlier ones as they were; else one sample
        # each.
        turns = [self._turn(conversation, i) for i in chosen]
        if None not in turns:
            spans = [span for turn in turns if turn for span in turn.generated]
            others = {*range(count)}.difference(chosen)
            stop = self._stop(conversation, count - 1) if chosen[-1] == count - 1 else ""
            sample = conversation.written(spans, stop, learned=chosen, others=others)
            starts = [turn.start for turn in turns if turn and turn.generated]
            samples = [sample._replace(weights=_weights(record, chosen, turns), starts=starts)]
        elif self._reasoning == "refuse" and not (
            chosen == [count - 1] and conversation.said(count - 1).is_put_together
        ):
            raise TemplateRefusal(CHANGED)
        else:
            samples = [self._alone(conversation, record, i) for i in chosen]
        # A template may mark the generation of some turns only.
        samples = [sample for sample in samples if sample.trained]
        if not samples:
            raise TemplateRefusal(NOT_MARKED)
        return samples

    def written_each(self, records: Iterable[dict[str, Any]]) -> Iterator[list[Written] | str]:
        """Yield the texts of samples of each conversation, or the reason why it makes none.

        Raises:
            UserError: the template exceeds its bounds.
        """
        try:
            for found in run_each_confined(self.written, records):
                if isinstance(found, NotRendered):
                    yield str(found)
                else:
                    yield [_from_lists(*sample) for sample in found]
        except Exceeded as error:
            raise self._template.explained(error) from None

    def _chosen(self, messages: Sequence[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """Messages that carry loss, and those of the assistant that are excluded from it.

        The second are only needed where everything else is trained on. A message of the assistant
        before the first user message carries loss only if its `train` key says so.
        """
        said = [
            i
            for i, message in enumerate(messages)
            if message["role"] == "assistant" and _says_something(message)
        ]
        users = (i for i, message in enumerate(messages) if message["role"] == "user")
        first_user = next(users, len(messages))
        # A greeting before the first question answers nothing.
        by_rule = {i for i in said if i > first_user}
        if self._train_on == "last":
            by_rule = set(said[-1:]) & by_rule
        chosen = [i for i in said if messages[i].get("train", i in by_rule)]
        masked = [
            i
            for i, message in enumerate(messages)
            if message["role"] == "assistant" and message.get("train") is False
        ]
        return chosen, masked if self._train_on == "all" else []

    def _conversation(self, record: dict[str, Any]) -> "_Conversation":
        template = self._template.with_arguments(record.get(ARGUMENTS))
        return _Conversation(template, record, self._added_tokens)

    def _turn(self, conversation: "_Conversation", index: int) -> _Turn | None:
        """Locate a turn in the whole conversation; None if it is not there behind its prompt."""
        start, text, marks, _ = conversation.said(index)
        stop = self._stop(conversation, index)
        is_last = index == len(conversation.messages) - 1
        whole = conversation.whole + stop * is_last
        # By rendering up to the turn, in every conversation: few templates mark turns, and the text
        # of a turn may also occur elsewhere.
        for end in self._ends(text, start, stop):
            if whole.startswith((text + stop)[:end]):
                turn = _found(start, end, marks, text + stop, whole)
                return self._with_header(conversation, index, turn, text)
        return None

    def _with_header(
        self, conversation: "_Conversation", index: int, turn: _Turn, text: str
    ) -> _Turn:
        """Add to what is learned of a turn the header before it, if messages are learned."""
        before = conversation.until(index)[0]
        has_header = text.startswith(before) and len(before) < turn.start
        if self._train_on != "messages" or not has_header or not turn.generated:
            return turn
        (first, end), *others = turn.generated
        header = (len(before), end if first == turn.start else turn.start)
        behind = others if first == turn.start else turn.generated
        return turn._replace(generated=[header, *behind])

    def _starts(self, conversation: "_Conversation", numbers: Sequence[int]) -> list[int]:
        """Ends of the prompts of turns, of those that the conversation has behind their prompt."""
        starts = []
        for number in numbers:
            with suppress(TemplateRefusal):
                turn = self._turn(conversation, number)
                starts += [turn.start] if turn else []
        return starts

    def _alone(self, conversation: "_Conversation", record: dict[str, Any], index: int) -> Written:
        """Return the conversation up to a turn; only that turn is trained on."""
        start, text, marks, _ = conversation.said(index)
        stop = self._stop(conversation, index)
        end = next(self._ends(text, start, stop))
        turn = _found(start, end, marks, text + stop, text + stop)
        turn = self._with_header(conversation, index, turn, text)
        sample = conversation.written_until(index, turn.generated, stop)
        return sample._replace(weights=_weights(record, [index], [turn]), starts=[start])

    def _stop(self, conversation: "_Conversation", index: int) -> str:
        """The token that ends a turn from the message behind it; "" if it has one of its own."""
        start, text, *_ = conversation.said(index)
        if self._end.search(text, start):
            return ""
        return self._stops.behind(conversation.messages, index)

    def _ends(self, text: str, start: int, stop: str) -> Iterator[int]:
        """Yield possible ends of a turn, last first: behind an end token or at the end of the text.

        Some templates end not only a turn, but then the conversation; some end it with the token
        that begins the next message.
        """
        end = len(text)
        if not self._end.search(text, start):
            if stop:
                yield end + len(stop)
            # No end token: the turn reaches to the end of the text.
            yield end
        while found := self._end.search(text, start, end):
            yield found.end("token")
            end = found.start()


class _Said(NamedTuple):
    """A turn behind its prompt."""

    start: int
    """Characters of the prompt."""
    text: str
    """Prompt and turn."""
    marks: list[Span] | None
    """Spans of the text that the template marks; None: it never marks any."""
    is_put_together: bool
    """Whether the template would write the turn otherwise than behind this prompt."""


class _Conversation:
    """Renderings of the first messages of a conversation; each is made once."""

    def __init__(
        self, template: ChatTemplate, record: dict[str, Any], added_tokens: Collection[str]
    ) -> None:
        self._template, self._added_tokens = template, added_tokens
        self.messages, self._tools = plain_messages(record["messages"]), record.get("tools")
        self._until: dict[int, tuple[str, list[Span] | None]] = {}
        self._prompts: dict[int, str] = {}
        self._said: dict[int, _Said] = {}

    @property
    def whole(self) -> str:
        return self.until(len(self.messages))[0]

    def until(self, count: int) -> tuple[str, list[Span] | None]:
        """Render the first messages, with the marked spans; None if the template never marks."""
        if count not in self._until:
            messages = self.messages[:count]
            with _refusals():
                self._until[count] = (
                    self._template.render_marked(messages, tools=self._tools)
                    if self._template.marks_generation
                    else (self._template.render(messages, tools=self._tools), None)
                )
        return self._until[count]

    def said(self, index: int) -> _Said:
        """Return the prompt of a turn with what the turn adds to it.

        Raises:
            TemplateRefusal: that cannot be told, or tool calls are left out.
        """
        if index not in self._said:
            prompt = self.prompt(index)
            text, marks = self.until(index + 1)
            is_put_together = not text.startswith(prompt)
            if is_put_together:
                text, marks = self._put_together(index)
            if len(text) == len(prompt):
                raise TemplateRefusal(OTHER_PROMPT)
            if not all(name in text[len(prompt) :] for name in _called(self.messages[index])):
                raise TemplateRefusal(NO_TOOLS)
            self._said[index] = _Said(len(prompt), text, marks, is_put_together)
        return self._said[index]

    def _put_together(self, index: int) -> tuple[str, list[Span] | None]:
        prompt = self.prompt(index)
        text, marks = self.until(index + 1)
        continuer = Continuer(self._template, self.messages, self._tools, self._added_tokens)
        added = continuer.after(prompt, text, index)
        if added is None:
            raise TemplateRefusal(OTHER_PROMPT + self.added_by(prompt, text))
        if marks is None:
            return prompt + added, None
        # The marks lie in another text. A turn that has one is generated as a whole.
        before = len(self.until(index)[0])
        is_marked = any(end > before for _, end in marks)
        return prompt + added, [(len(prompt), len(prompt) + len(added))] * is_marked

    def written(
        self, trained: list[Span], stop: str, *, learned: Sequence[int], others: Collection[int]
    ) -> Written:
        """Return the whole conversation as a sample.

        Args:
            trained: characters that carry loss.
            stop: token behind the text that ends the last turn.
            learned: numbers of turns that carry loss.
            others: numbers of messages of which nothing may carry loss.
        """
        places = self._places(self.whole, len(self.messages), others)
        omits_reasoning = any(map(self._omits_reasoning, learned))
        return Written(self.whole, trained, places, omits_reasoning, stop=stop)

    def written_until(self, index: int, trained: list[Span], stop: str) -> Written:
        """Return the conversation up to a turn, which alone carries loss, as a sample.

        Args:
            index: of the turn.
            trained: characters of it that carry loss.
            stop: token behind the text that ends the turn.
        """
        start, text, _, is_put_together = self.said(index)
        places = (
            self._places(text[:start], index, range(index), add_generation_prompt=True)
            if is_put_together
            else self._places(text, index + 1, range(index))
        )
        return Written(
            text,
            trained,
            places,
            self._omits_reasoning(index),
            stop=stop,
        )

    def _places(
        self, text: str, count: int, others: Collection[int], **options: bool
    ) -> list[Span]:
        """Places of messages in the text of the first ones."""
        # Rendered a second time with brackets, and not taken from the turns: a check must not trust
        # what it checks.
        brackets = next(unused_brackets(text))
        messages = [
            brackets.around(message) if i in others else message
            for i, message in enumerate(self.messages[:count])
        ]
        try:
            bracketed = self._template.render(messages, tools=self._tools, **options)
        except TemplateRefusal:  # it looks at how a text begins or ends
            bracketed = ""
        return _inside(bracketed, brackets, text)

    def _omits_reasoning(self, index: int) -> bool:
        """Return whether a turn has reasoning that its rendering does not contain."""
        # Templates trim and indent thoughts, so white space does not count.
        thought = _squeezed(self.messages[index].get("reasoning_content") or "")
        if not thought:
            return False
        text = self.until(index + 1)[0]
        with suppress(TemplateRefusal):  # where every token is learned, there may be no prompt
            start, said, *_ = self.said(index)
            text = said[start:]
        return thought not in _squeezed(text)

    def added_by(self, prompt: str, text: str) -> str:
        """Describe text at the end of a prompt that is in no message, for the refusal."""
        pairs = enumerate(zip(prompt, text, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(text)))
        rest = prompt[same:]
        said = any(m["content"] and m["content"] in rest for m in self.messages)
        return f": it ends with {rest!r}" if 0 < len(rest) <= _MOST_SHOWN and not said else ""

    def prompt(self, count: int) -> str:
        """Render the prompt after the first messages."""
        if count not in self._prompts:
            messages = self.messages[:count]
            with _refusals():
                self._prompts[count] = self._template.render(
                    messages, tools=self._tools, add_generation_prompt=True
                )
        return self._prompts[count]


@contextmanager
def _refusals() -> Iterator[None]:
    """Mark refusals raised in the block as the words of the template."""
    try:
        yield
    except MarksNotFound:
        raise
    except TemplateRefusal as refusal:
        raise TemplateRefusal(f"{REFUSED}{refusal}") from None


def plain_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without the keys that control their training."""
    marks = ("train", "weight", "spans")
    return [{key: value for key, value in m.items() if key not in marks} for m in messages]


def _says_something(message: dict[str, Any]) -> bool:
    texts = (message["content"], message.get("reasoning_content") or "")
    return bool(message.get("tool_calls")) or any(text.strip() for text in texts)


def _tool_names(record: dict[str, Any]) -> Iterator[str]:
    """Names of the functions that may be called, and of those that are."""
    for tool in record.get("tools") or ():
        yield tool["function"]["name"]
    for message in record["messages"]:
        yield from _called(message)


def _called(message: dict[str, Any]) -> list[str]:
    return [call["function"]["name"] for call in message.get("tool_calls") or ()]


def _found(start: int, end: int, marks: list[Span] | None, text: str, sample: str) -> _Turn:
    """Return a turn with the spans that carry loss: the marks inside it, or all of it.

    A mark may include the line end behind the turn, which is then learned as in transformers. Where
    the template ends the conversation too, the mark reaches further than the turn in the sample.

    Args:
        start: of the turn.
        end: of the turn.
        marks: of the text; None: the template marks nothing.
        text: up to the turn, as the template writes it.
        sample: begins as the text does up to the turn's end.
    """
    # White space after the turn belongs to it only if the sample has the same there.
    behind = zip(text[end:], sample[end : len(text)], strict=False)
    same = takewhile(lambda pair: pair[0] == pair[1] and pair[0].isspace(), behind)
    space_end = end + sum(1 for _ in same)
    if marks is None:
        return _Turn(start, space_end, [(start, end)])
    spans: list[Span] = []
    for first, last in sorted(marks):
        first, last = max(first, start), min(last, space_end)
        if spans and first <= spans[-1][1]:  # one mark may hold another
            first, last = spans[-1][0], max(spans.pop()[1], last)
        if first < last:
            spans.append((first, last))
    return _Turn(start, space_end, spans)


def _weights(
    record: dict[str, Any], numbers: Sequence[int], turns: Sequence[_Turn | None]
) -> list[WeightedSpan]:
    """Weights of the characters of turns, where they are not 1."""
    messages = [record["messages"][number] for number in numbers]
    return [
        (first, end, message["weight"])
        for message, turn in zip(messages, turns, strict=True)
        if turn and "weight" in message
        for first, end in turn.generated
    ]


def _between(turns: list[_Turn], length: int) -> list[Span]:
    """Return the spans of all characters outside of turns and of the white space after them."""
    edges = [0, *(edge for turn in turns for edge in (turn.start, turn.space_end)), length]
    # What lies between turns: from the start to the first, from one to the next, and to the end.
    spans = zip(edges[::2], edges[1::2], strict=True)
    return [(first, end) for first, end in spans if first < end]


def _from_lists(
    text: str,
    trained: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
    omits_reasoning: bool,
    weights: Sequence[tuple[int, int, float]],
    *rest: Any,
) -> Written:
    """Return a sample from another process, which has lists in place of tuples."""
    given = [(first, end, weight) for first, end, weight in weights]
    return Written(text, _spans(trained), _spans(others), omits_reasoning, given, *rest)


def _spans(pairs: Iterable[Sequence[int]]) -> list[Span]:
    """Spans that came as JSON, which has no tuples."""
    return [(first, end) for first, end in pairs]


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def _inside(bracketed: str, brackets: Brackets, text: str) -> list[Span]:
    """Return spans between brackets, as positions in the bare text; [] if the texts differ."""
    spans: list[Span] = []
    pieces: list[str] = []
    at, begun = 0, None
    for piece in re.split(f"([{brackets.opening}{brackets.closing}])", bracketed):
        if piece == brackets.opening:
            begun = at
        elif piece == brackets.closing:
            if begun is not None:
                spans.append((begun, at))
            # A bracket may be lost or doubled in what a template makes; only pairs count.
            begun = None
        else:
            pieces.append(piece)
            at += len(piece)
    return spans if "".join(pieces) == text else []
