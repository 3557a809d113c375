"""Untrained parts of messages: which characters of a rendered conversation they are.

The conversation is rendered once more, with brackets around those parts: so they are found wherever
the template puts them, and a template that writes them otherwise is noticed.
"""

from collections.abc import Collection, Sequence
from typing import Any

from ftkit.models.chat_templates.template import ChatTemplate, Span, TemplateRefusal
from ftkit.models.chat_templates.turns import NO_TURN, Written, plain_messages

PARTS_CHANGED = "the template changes a text of which a part is not to be learned"
"""Why a conversation is refused: nobody knows which characters these are."""

_OPENING, _CLOSING = "\ue010", "\ue011"
"""Brackets; of Unicode's private use, so hardly a text has them."""


def without_untrained(
    template: ChatTemplate, record: dict[str, Any], samples: list[Written], *, of_all: bool
) -> list[Written]:
    """Samples of a conversation, with no loss on the parts of its messages that are not learned.

    Args:
        template: made the texts.
        record: the conversation; `untrained` of a message has spans of its content.
        samples: of all its messages, or of the first ones.
        of_all: whether what others than the assistant say is learned too.

    Raises:
        TemplateRefusal: the parts cannot be told from what stands around them, or nothing is left.
    """
    messages = record["messages"]
    bracketed = [
        _bracketed(message)
        if "untrained" in message and (of_all or message["role"] == "assistant")
        else message
        for message in messages
    ]
    if bracketed == messages:
        return samples
    plain = plain_messages(bracketed)
    made = []
    for sample in samples:
        spans = _spans_in(sample.text, template, plain, record.get("tools"))
        made.append(sample._replace(trained=_without(sample.trained, spans)))
    if not any(sample.trained for sample in made):
        raise TemplateRefusal(NO_TURN)
    return [sample for sample in made if sample.trained]


def _bracketed(message: dict[str, Any]) -> dict[str, Any]:
    """A message with brackets around its untrained parts; white space around them stays outside.

    So a template that trims texts trims them as before.
    """
    content, text, done = message["content"], "", 0
    if _OPENING in content or _CLOSING in content:
        raise TemplateRefusal(PARTS_CHANGED)
    for first, end in message["untrained"]:
        part = content[first:end]
        core = part.strip() or part
        text += content[done:first] + part.replace(core, _OPENING + core + _CLOSING, 1)
        done = end
    return message | {"content": text + content[done:]}


def _spans_in(
    text: str, template: ChatTemplate, messages: Sequence[dict[str, Any]], tools: Any
) -> list[Span]:
    """Where brackets stand in a text that was made of the first messages, without them."""
    for count in range(len(messages), 0, -1):
        try:
            found, spans = _unbracketed(template.render(messages[:count], tools=tools))
        except TemplateRefusal:  # no sample ends there
            continue
        tails = [tail for message in messages[:count] for tail in _tails(message["content"])]
        if found == text and len(spans) == len(tails):
            return [_with_space(text, span, tail) for span, tail in zip(spans, tails, strict=True)]
    raise TemplateRefusal(PARTS_CHANGED)


def _tails(content: str) -> list[int]:
    """How many spaces belong to each part in brackets: those behind it that end the message."""
    *parts, last = content.split(_CLOSING)
    if not parts:
        return []
    return [0] * (len(parts) - 1) + [0 if last.strip() else len(last)]


def _with_space(text: str, span: Span, tail: int) -> Span:
    """A part with the white space before it, and so many spaces behind it.

    A word is one token with the space before it. So that space is learned if the word is.
    """
    first, end = len(text[: span[0]].rstrip()), span[1]
    behind = text[end : end + tail]
    return first, end + len(behind) - len(behind.lstrip())


def _unbracketed(text: str) -> tuple[str, list[Span]]:
    """A text without brackets, and what was inside each pair."""
    pieces: list[str] = []
    spans: list[Span] = []
    length = 0
    for piece in text.split(_OPENING):
        inside, closed, behind = piece.partition(_CLOSING)
        if closed:
            spans.append((length, length + len(inside)))
        pieces += (inside, behind)
        length += len(inside) + len(behind)
    return "".join(pieces), spans


def _without(spans: Collection[Span], others: Collection[Span]) -> list[Span]:
    """Spans without the characters of others; both are rising."""
    left: list[Span] = []
    for first, end in spans:
        for begin, stop in others:
            if begin < end and stop > first:
                left += [(first, begin)] * (first < begin)
                first = max(first, stop)
        left += [(first, end)] * (first < end)
    return left
