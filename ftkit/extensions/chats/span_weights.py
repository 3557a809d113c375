"""Weights of parts of messages: which characters of a rendered conversation have them.

Parts are located by rendering the conversation once more with brackets around them.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from ftkit.extensions.chats.turns import NO_TURN, WeightedSpan, Written, plain_messages
from ftkit.models.chat_templates.arguments import ARGUMENTS
from ftkit.models.chat_templates.template import ChatTemplate, Span, TemplateRefusal

PARTS_CHANGED = "the template changes a text of which a part is not to be learned"
"""Reason to skip a conversation: these characters cannot be located."""

_OPENING, _CLOSING = "\ue010", "\ue011"
"""Brackets; of Unicode's private use, so texts hardly ever have them."""


def with_span_weights(
    template: ChatTemplate, record: dict[str, Any], samples: list[Written], *, of_all: bool
) -> list[Written]:
    """Return samples with the weights of parts of their messages; at 0, without loss.

    Args:
        template: rendered the texts.
        record: the conversation; `spans` of a message has the weights of characters of its content.
        samples: of all its messages, or of the first ones.
        of_all: whether messages of other roles are learned too.

    Raises:
        TemplateRefusal: the parts cannot be separated from the rest of the text, or no text that
            carries loss is left.
    """
    messages = record["messages"]
    # Only parts of messages that carry loss matter.
    weighted = [
        message
        for message in messages
        if "spans" in message and (of_all or message["role"] == "assistant")
    ]
    if not weighted:
        return samples
    parts = [part for message in weighted for part in _parts(message)]
    template = template.with_arguments(record.get(ARGUMENTS))
    plain = plain_messages(
        [_bracketed_parts(message) if message in weighted else message for message in messages]
    )
    made = []
    for sample in samples:
        spans = _spans_in(sample.text, template, plain, record.get("tools"), parts)
        without_loss = [(first, end) for first, end, weight in spans if not weight]
        rest = [
            (*left, weight)
            for first, end, weight in sample.weights
            for left in _without([(first, end)], [span[:2] for span in spans])
        ]
        of_spans = [span for span in spans if span[2] not in (0, 1)]
        made.append(
            sample._replace(
                trained=_without(sample.trained, without_loss), weights=sorted(rest + of_spans)
            )
        )
    if not any(sample.trained for sample in made):
        raise TemplateRefusal(NO_TURN)
    return [sample for sample in made if sample.trained]


class _Part(NamedTuple):
    """Characters of a message with a weight of their own."""

    text: str
    """Without white space around it, unless it is nothing else."""
    weight: float


def _parts(message: dict[str, Any]) -> list[_Part]:
    texts = ((message["content"][first:end], weight) for first, end, weight in message["spans"])
    # A part of white space alone is taken whole.
    return [_Part(text.strip() or text, weight) for text, weight in texts]


def _bracketed_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with brackets around its parts, inside any white space there.

    So a template that trims texts trims them as before.
    """
    content, text, done = message["content"], "", 0
    if _OPENING in content or _CLOSING in content:
        raise TemplateRefusal(PARTS_CHANGED)
    for (first, end, _), part in zip(message["spans"], _parts(message), strict=True):
        bracketed = content[first:end].replace(part.text, _OPENING + part.text + _CLOSING, 1)
        text += content[done:first] + bracketed
        done = end
    return message | {"content": text + content[done:]}


def _spans_in(
    text: str,
    template: ChatTemplate,
    messages: Sequence[dict[str, Any]],
    tools: Any,
    parts: Sequence[_Part],
) -> list[WeightedSpan]:
    """Positions of bracketed parts in a text without brackets, apart from each other.

    Args:
        text: of the first messages.
        template: rendered it.
        messages: all, with brackets around parts.
        tools: of the conversation.
        parts: of all messages, in their order.
    """
    # A sample may end at any turn of the conversation.
    for count in range(len(messages), 0, -1):
        try:
            found, spans = _unbracketed(template.render(messages[:count], tools=tools))
        except TemplateRefusal:  # no sample ends there
            continue
        tails = [tail for message in messages[:count] for tail in _tails(message["content"])]
        of_text = parts[: len(tails)]
        said = [found[first:end] for first, end in spans]
        # The same text without brackets, and each part once: else the template looked at the text.
        if found != text or said != [part.text for part in of_text]:
            continue
        made: list[WeightedSpan] = []
        for span, tail, part in zip(spans, tails, of_text, strict=True):
            first, end = _with_space(text, span, tail)
            if made and made[-1][1] > first:  # a part of white space, which belongs to this one
                made[-1] = (made[-1][0], first, made[-1][2])
            made.append((first, end, part.weight))
        return [span for span in made if span[0] < span[1]]
    raise TemplateRefusal(PARTS_CHANGED)


def _tails(content: str) -> list[int]:
    """Return, for each bracketed part, the number of spaces after it that end its message."""
    *parts, last = content.split(_CLOSING)
    if not parts:
        return []
    return [0] * (len(parts) - 1) + [0 if last.strip() else len(last)]


def _with_space(text: str, span: Span, tail: int) -> Span:
    """Extend a span by the white space before it and `tail` spaces behind it.

    A word is one token with the space before it. So that space is learned if the word is.
    """
    first, end = len(text[: span[0]].rstrip()), span[1]
    behind = text[end : end + tail]
    return first, end + len(behind) - len(behind.lstrip())


def _unbracketed(text: str) -> tuple[str, list[Span]]:
    """Remove brackets from a text; also return the span inside each pair."""
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
    """Return spans without the characters of others; both are in rising order."""
    left: list[Span] = []
    for first, end in spans:
        for begin, stop in others:
            if begin < end and stop > first:
                left += [(first, begin)] * (first < begin)
                first = max(first, stop)
        left += [(first, end)] * (first < end)
    return left
