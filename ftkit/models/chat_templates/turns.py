"""Turns of the assistant: which characters of a rendered conversation carry loss.

A prompt is the rendering of all messages before a turn; the text that is added with the turn is the
assistant's, its end included. Both are rendered for each turn that is trained on, and the whole
conversation has to begin with both: so a turn is learned after exactly the prompt that the model
gets when it answers. Spans that a template marks as generated are cut to their turn.

Each text is rendered once more, with brackets around every other message: so the code that makes
tokens of it can check that none of these messages carries loss, independently of the turns.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile
from typing import Any, NamedTuple

from ftkit.models.chat_templates import Reasoning, TrainOn
from ftkit.models.chat_templates.confined import Exceeded, run_each_confined
from ftkit.models.chat_templates.sandbox import NotRendered
from ftkit.models.chat_templates.template import ChatTemplate, MarksNotFound, Span, TemplateRefusal

NO_TURN = "no turn to train on"
"""Reason to skip a conversation in which no assistant says anything, or all of it is masked."""
CHANGED = "the template changes earlier turns"
"""Reason to skip one if data.reasoning is refuse."""
OTHER_PROMPT = "the template's prompt is not what it writes before an answer"
"""Reason to skip one: the model would never get the prompt that it is trained to answer."""
NO_TOOLS = "the template leaves out tools or tool calls"
"""Reason to skip one with tools: its answers would come from nowhere."""
NOT_MARKED = "the template marks no generation in it"
"""Reason to skip one if the template marks generated text in others."""
REFUSED = "the template refuses it: "
"""Beginning of the reason if the template raises; its own words follow."""

_MOST_SHOWN = 40
"""Characters of a prompt in a reason."""
_PRIVATE_USE = (0xE000, 0xF900)
"""Characters of Unicode that no text needs: two of them are brackets."""


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


class _Turn(NamedTuple):
    """Position of one answer of the assistant in the rendered conversation."""

    start: int
    """End of the prompt before it."""
    space_end: int
    """End of the turn, its end token and the white space that the template writes behind it."""
    generated: list[Span]
    """Spans of the turn, and of the white space behind it, that the template marks; without marks,
    the turn."""


class TurnFinder:
    """Finds the turns of conversations in what a template makes of them."""

    def __init__(
        self,
        template: ChatTemplate,
        added_tokens: Collection[str],
        *,
        train_on: TrainOn,
        reasoning: Reasoning,
    ) -> None:
        """Prepare for conversations of one template.

        Args:
            template: renders the conversations.
            added_tokens: texts of the tokens that may end a turn.
            train_on: rule for messages without a `train` key.
            reasoning: handling of conversations whose earlier turns are changed.
        """
        self._template = template
        self._train_on, self._reasoning = train_on, reasoning
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
        conversation, count = _Conversation(self._template, record), len(record["messages"])
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
            spans = _between([turn for turn in turns if turn], len(conversation.whole))
            # Earlier turns may well be written without their thoughts: nothing is split here.
            sample = conversation.written(count, spans, learned=chosen[-1:], others=masked)
            return [sample._replace(weights=_weights(record, weighted, of_weighted))]
        # All turns in one sample, if later ones leave earlier ones as they were; else one sample
        # each.
        turns = [self._turn(conversation, i) for i in chosen]
        if None not in turns:
            spans = [span for turn in turns if turn for span in turn.generated]
            others = {*range(count)}.difference(chosen)
            sample = conversation.written(count, spans, learned=chosen, others=others)
            samples = [sample._replace(weights=_weights(record, chosen, turns))]
        elif self._reasoning == "refuse":
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
                    yield [
                        Written(
                            text,
                            _spans(trained),
                            _spans(others),
                            omits_reasoning,
                            [(first, end, weight) for first, end, weight in weights],
                        )
                        for text, trained, others, omits_reasoning, weights in found
                    ]
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

    def _turn(self, conversation: "_Conversation", index: int) -> _Turn | None:
        """Locate a turn in the whole conversation; None if later turns changed it."""
        start, text, marks = self._said(conversation, index)
        whole = conversation.whole
        # By rendering up to the turn, in every conversation: few templates mark turns, and the text
        # of a turn may also occur elsewhere.
        for end in self._ends(text, start):
            if whole.startswith(text[:end]):
                return _found(start, end, marks, text, whole)
        return None

    def _alone(self, conversation: "_Conversation", record: dict[str, Any], index: int) -> Written:
        """Return the conversation up to a turn; only that turn is trained on."""
        start, text, marks = self._said(conversation, index)
        turn = _found(start, next(self._ends(text, start)), marks, text, text)
        sample = conversation.written(
            index + 1, turn.generated, learned=[index], others=range(index)
        )
        return sample._replace(weights=_weights(record, [index], [turn]))

    def _said(
        self, conversation: "_Conversation", index: int
    ) -> tuple[int, str, list[Span] | None]:
        """End of the prompt of a turn, the text up to the turn's end, and marked spans."""
        # The turn is what the answer adds to the prompt, which it has to leave as it is.
        prompt = conversation.prompt(index)
        text, marks = conversation.until(index + 1)
        if not text.startswith(prompt) or len(text) == len(prompt):
            raise TemplateRefusal(OTHER_PROMPT + conversation.added_by(prompt, text))
        if not all(name in text[len(prompt) :] for name in _called(conversation.messages[index])):
            raise TemplateRefusal(NO_TOOLS)
        return len(prompt), text, marks

    def _ends(self, text: str, start: int) -> Iterator[int]:
        """Yield possible ends of a turn, last first: behind an end token or at the end of the text.

        Some templates end not only a turn, but then the conversation.
        """
        end = len(text)
        if not self._end.search(text, start):
            # No end token: the turn reaches to the end of the text.
            yield end
        while found := self._end.search(text, start, end):
            yield found.end("token")
            end = found.start()


class _Conversation:
    """Renderings of the first messages of a conversation; each is made once."""

    def __init__(self, template: ChatTemplate, record: dict[str, Any]) -> None:
        self._template = template
        self.messages, self._tools = plain_messages(record["messages"]), record.get("tools")
        self._until: dict[int, tuple[str, list[Span] | None]] = {}
        self._prompts: dict[int, str] = {}

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

    def written(
        self, count: int, trained: list[Span], *, learned: Sequence[int], others: Collection[int]
    ) -> Written:
        """Return the first messages as a sample.

        Args:
            count: of messages, the first ones.
            trained: characters that carry loss.
            learned: numbers of turns that carry loss.
            others: numbers of messages of which nothing may carry loss.
        """
        text = self.until(count)[0]
        # Rendered a second time with brackets, and not taken from the turns: a check must not trust
        # what it checks.
        unused = (chr(code) for code in range(*_PRIVATE_USE) if chr(code) not in text)
        # Characters that the text does not have, so that brackets cannot be mistaken.
        opening, closing = next(unused), next(unused)
        messages = [
            _bracketed(message, opening, closing) if i in others else message
            for i, message in enumerate(self.messages[:count])
        ]
        try:
            bracketed = self._template.render(messages, tools=self._tools)
        except TemplateRefusal:  # it looks at how a text begins or ends
            bracketed = ""
        places = _inside(bracketed, opening, closing, text)
        return Written(text, trained, places, any(map(self._omits_reasoning, learned)))

    def _omits_reasoning(self, index: int) -> bool:
        """Return whether a turn has reasoning that its rendering does not contain."""
        # Templates trim and indent thoughts, so white space does not count.
        thought = _squeezed(self.messages[index].get("reasoning_content") or "")
        if not thought:
            return False
        text = self.until(index + 1)[0]
        with suppress(TemplateRefusal):  # where every token is learned, there may be no prompt
            text = text.removeprefix(self.prompt(index))
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


def _spans(pairs: Iterable[Sequence[int]]) -> list[Span]:
    """Spans that came as JSON, which has no tuples."""
    return [(first, end) for first, end in pairs]


def _squeezed(text: str) -> str:
    return " ".join(text.split())


def _bracketed(message: dict[str, Any], opening: str, closing: str) -> dict[str, Any]:
    """Return a message with brackets around what it says, inside any white space around it.

    So a template that trims its texts trims them as before.
    """

    def bracketed(text: str) -> str:
        core = text.strip()
        return text.replace(core, opening + core + closing, 1) if core else text

    keys = ("content", "reasoning_content")
    return message | {key: bracketed(message[key]) for key in keys if message.get(key)}


def _inside(bracketed: str, opening: str, closing: str, text: str) -> list[Span]:
    """Return spans between brackets, as positions in the bare text; [] if the texts differ."""
    spans: list[Span] = []
    pieces: list[str] = []
    at, begun = 0, None
    for piece in re.split(f"([{opening}{closing}])", bracketed):
        if piece == opening:
            begun = at
        elif piece == closing:
            if begun is not None:
                spans.append((begun, at))
            # A bracket may be lost or doubled in what a template makes; only pairs count.
            begun = None
        else:
            pieces.append(piece)
            at += len(piece)
    return spans if "".join(pieces) == text else []
