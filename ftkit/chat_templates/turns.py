"""Turns of the assistant: which characters of a rendered conversation carry loss.

A prompt is what the template makes of all messages before a turn; what it adds with the turn is
what the assistant says, its end included. Both are rendered for each turn that is trained on, and
have to stand in the whole as they are: so a turn is learned after exactly what the model is given
when it answers.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from ftkit.chat_templates.options import Reasoning, TrainOn
from ftkit.chat_templates.template import ChatTemplate, Span, TemplateRefusal

NO_TURN = "no turn to train on"
"""Why a conversation becomes no sample: no assistant says anything, or all of it is masked."""
CHANGED = "the template changes earlier turns"
"""Why one is refused where data.reasoning is refuse."""
OTHER_PROMPT = "the template's prompt is not what it writes before an answer"
"""Why one is refused: the model would never be given what it is trained to answer."""
NO_TOOLS = "the template leaves out tools or tool calls"
"""Why one is refused that has them: its answers would come from nowhere."""
NOT_MARKED = "the template marks no generation in it"
"""Why one is refused of a template that says itself what is generated."""

_MOST_SHOWN = 40
"""Characters of a prompt in a reason."""


class Written(NamedTuple):
    """A conversation as text."""

    text: str
    trained: list[Span]
    """Characters that carry loss, rising and apart from each other."""


class _Turn(NamedTuple):
    """What the assistant says at once, in the whole."""

    start: int
    """Where the prompt before it ends."""
    end: int
    """With the token that ends it."""
    generated: list[Span]
    """What the template marks of it; without marks, all."""


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
        """Prepare.

        Args:
            template: writes the conversations.
            added_tokens: texts of the tokens that may end a turn.
            train_on: of messages that do not say it themselves.
            reasoning: what becomes of conversations whose earlier turns are changed.
        """
        self._template = template
        self._train_on, self._reasoning = train_on, reasoning
        longest_first = sorted(filter(str.strip, added_tokens), key=len, reverse=True)
        self._end = re.compile(
            f"(?P<token>{'|'.join(map(re.escape, longest_first)) or '(?!)'})\\s*\\Z"
        )

    def written(self, record: dict[str, Any]) -> list[Written]:
        """A conversation as the texts of samples: one, or one for each turn.

        Raises:
            TemplateRefusal: it becomes none; the text is the reason.
        """
        chosen, masked = self._chosen(record["messages"])
        if not chosen:
            raise TemplateRefusal(NO_TURN)
        conversation = _Conversation(self._template, record)
        if not all(name in conversation.whole for name in _tool_names(record)):
            raise TemplateRefusal(NO_TOOLS)
        if self._train_on == "all":
            turns = [self._turn(conversation, i) for i in masked]
            if None in turns:
                raise TemplateRefusal(CHANGED)
            whole = conversation.whole
            return [Written(whole, _between([t for t in turns if t], len(whole)))]
        turns = [self._turn(conversation, i) for i in chosen]
        if None not in turns:
            spans = [span for turn in turns if turn for span in turn.generated]
            samples = [Written(conversation.whole, spans)]
        elif self._reasoning == "refuse":
            raise TemplateRefusal(CHANGED)
        else:
            samples = [self._alone(conversation, i) for i in chosen]
        samples = [sample for sample in samples if sample.trained]
        if not samples:
            raise TemplateRefusal(NOT_MARKED)
        return samples

    def _chosen(self, messages: Sequence[dict[str, Any]]) -> tuple[list[int], list[int]]:
        """Messages that carry loss, and those of the assistant that are kept from it.

        The second are looked for where everything else is trained on. What the assistant says
        before anybody has asked carries loss only if the message says so.
        """
        said = [
            i
            for i, message in enumerate(messages)
            if message["role"] == "assistant" and _says_something(message)
        ]
        asked = next((i for i, m in enumerate(messages) if m["role"] == "user"), len(messages))
        by_rule = {i for i in said if i > asked}
        if self._train_on == "last":
            by_rule = set(said[-1:]) & by_rule
        chosen = [i for i in said if messages[i].get("train", i in by_rule)]
        masked = [i for i in said if messages[i].get("train") is False]
        return chosen, masked if self._train_on == "all" else []

    def _turn(self, conversation: "_Conversation", index: int) -> _Turn | None:
        """A turn in the whole; None: it is not there as it was when it was said."""
        start, text, marks = self._said(conversation, index)
        for end in self._ends(text, start):
            if conversation.whole.startswith(text[:end]):
                return _Turn(start, end, _generated(start, end, marks))
        return None

    def _alone(self, conversation: "_Conversation", index: int) -> Written:
        """The conversation up to a turn, which alone is trained on."""
        start, text, marks = self._said(conversation, index)
        return Written(text, _generated(start, next(self._ends(text, start)), marks))

    def _said(
        self, conversation: "_Conversation", index: int
    ) -> tuple[int, str, list[Span] | None]:
        """Where the prompt of a turn ends, the text up to the turn's end, and what is marked."""
        prompt = conversation.prompt(index)
        text, marks = conversation.until(index + 1)
        if not text.startswith(prompt) or len(text) == len(prompt):
            raise TemplateRefusal(OTHER_PROMPT + conversation.added_by(prompt, text))
        if not all(name in text[len(prompt) :] for name in _called(conversation.messages[index])):
            raise TemplateRefusal(NO_TOOLS)
        return len(prompt), text, marks

    def _ends(self, text: str, start: int) -> Iterator[int]:
        """Where a turn may end, the last place first: with a token that ends it, or with the text.

        Some templates end not only a turn, but then the conversation.
        """
        end = len(text)
        if not self._end.search(text, start):
            yield end
        while found := self._end.search(text, start, end):
            yield found.end("token")
            end = found.start()


class _Conversation:
    """What a template makes of the first messages of a conversation; each text is made once."""

    def __init__(self, template: ChatTemplate, record: dict[str, Any]) -> None:
        self._template = template
        self.messages, self._tools = plain_messages(record["messages"]), record.get("tools")
        self._until: dict[int, tuple[str, list[Span] | None]] = {}

    @property
    def whole(self) -> str:
        return self.until(len(self.messages))[0]

    def until(self, count: int) -> tuple[str, list[Span] | None]:
        """The text of some messages, and what the template marks; None: it marks nothing ever."""
        if count not in self._until:
            messages = self.messages[:count]
            self._until[count] = (
                self._template.render_marked(messages, tools=self._tools)
                if self._template.marks_generation
                else (self._template.render(messages, tools=self._tools), None)
            )
        return self._until[count]

    def added_by(self, prompt: str, text: str) -> str:
        """What a prompt ends with and a text does not, if no message says it: for people."""
        pairs = enumerate(zip(prompt, text, strict=False))
        same = next((i for i, (a, b) in pairs if a != b), min(len(prompt), len(text)))
        rest = prompt[same:]
        said = any(m["content"] and m["content"] in rest for m in self.messages)
        return f": it ends with {rest!r}" if 0 < len(rest) <= _MOST_SHOWN and not said else ""

    def prompt(self, count: int) -> str:
        """What the model is given after some messages, to say the next one."""
        messages = self.messages[:count]
        return self._template.render(messages, tools=self._tools, add_generation_prompt=True)


def plain_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages without what is said about their training."""
    marks = ("train", "untrained")
    return [{key: value for key, value in m.items() if key not in marks} for m in messages]


def _says_something(message: dict[str, Any]) -> bool:
    texts = (message["content"], message.get("reasoning_content") or "")
    return bool(message.get("tool_calls")) or any(text.strip() for text in texts)


def _tool_names(record: dict[str, Any]) -> Iterator[str]:
    """Of the functions that may be called, and of those that are."""
    for tool in record.get("tools") or ():
        yield tool["function"]["name"]
    for message in record["messages"]:
        yield from _called(message)


def _called(message: dict[str, Any]) -> list[str]:
    return [call["function"]["name"] for call in message.get("tool_calls") or ()]


def _generated(start: int, end: int, marks: list[Span] | None) -> list[Span]:
    if marks is None:
        return [(start, end)]
    return [span for span in marks if span[1] > start]


def _between(turns: list[_Turn], length: int) -> list[Span]:
    """All characters but those of the turns."""
    edges = [0, *(edge for turn in turns for edge in (turn.start, turn.end)), length]
    spans = zip(edges[::2], edges[1::2], strict=True)
    return [(first, end) for first, end in spans if first < end]
