"""Chat templates that write media: each becomes the character of its place.

Conversations hold one character for each medium (`ftkit.data.records.media`). A template of a model
that sees or hears takes content parts and writes a mark for each; all other templates take the text
as it is. Either way the rendered text has the characters, so that what finds turns in it needs to
know nothing of media. Imports no torch: templates are rendered in a process of their own.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ftkit.data.records.media import PLACES, media_row, place_of
from ftkit.models.chat_templates.template import ChatTemplate, Message, TemplateRefusal

Takes = Literal["texts", "parts for media", "parts"]
"""What a template takes as contents: texts alone, parts where a message has a medium, or always."""
_PROBE = "probe"


@dataclass(frozen=True)
class MediaTemplate(ChatTemplate):
    """A template whose text has the character of a place for each medium."""

    mark: str = ""
    """What the template writes for a medium in a content part."""
    kind: str = ""
    """Type of such a part."""
    takes: Takes = "texts"

    @classmethod
    def of(cls, template: ChatTemplate, mark: str, kind: str) -> "MediaTemplate":
        """Find out what a template takes, by rendering a message.

        Args:
            template: any.
            mark: as in this class.
            kind: as in this class.
        """
        values = {
            field.name: getattr(template, field.name) for field in dataclasses.fields(template)
        }
        made = cls(**values, mark=mark, kind=kind)
        for takes in ("parts for media", "parts"):
            tried = dataclasses.replace(made, takes=takes)
            if tried._writes(f"{place_of(0)}{_PROBE}") and tried._writes(_PROBE):
                return tried
        return made

    def _writes(self, content: str) -> bool:
        """Whether the texts and the media of a message are written, each once."""
        try:
            text = self.render([{"role": "user", "content": content}])
        except TemplateRefusal:
            return False
        return sorted(PLACES.findall(text)) == PLACES.findall(content) and _PROBE in text

    def _run(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> tuple[str, list[tuple[int, str]]]:
        row = media_row(self.kind)
        places = [p for message in messages for p in PLACES.findall(message["content"] or "")]
        if self.takes == "texts":
            text, blocks = super()._run(messages, tools, add_generation_prompt, variables)
            # One that leaves out a message would give its medium to the next place.
            if (written := PLACES.findall(text)) != places:
                raise TemplateRefusal(
                    f"the template writes {row.count_text(len(written))} for {len(places)}, or in "
                    "another order"
                )
            return text, blocks
        given = [
            {**message, "content": _parts(message["content"] or "", self.kind)}
            if self.takes == "parts" or PLACES.search(message["content"] or "")
            else message
            for message in messages
        ]
        text, blocks = super()._run(given, tools, add_generation_prompt, variables)
        found = text.count(self.mark)
        if found != len(places):
            raise TemplateRefusal(
                f"the template writes {row.count_text(found)} for {len(places)}; or a text has "
                f"{self.mark}"
            )
        return _with_places(text, blocks, self.mark, places)


def _parts(content: str, kind: str) -> list[dict[str, str]]:
    """Content parts of a text with places."""
    pieces = re.split(f"({PLACES.pattern})", content)
    return [
        {"type": kind} if PLACES.fullmatch(piece) else {"type": "text", "text": piece}
        for piece in pieces
        if piece
    ]


def _with_places(
    text: str, blocks: Sequence[tuple[int, str]], mark: str, places: Sequence[str]
) -> tuple[str, list[tuple[int, str]]]:
    """Replace the marks in a text and its generation blocks by places, in their order."""
    first, *rest = text.split(mark)
    made = first + "".join(place + piece for place, piece in zip(places, rest, strict=True))
    moved = []
    for start, block in blocks:
        before, inside = text.count(mark, 0, start), block.count(mark)
        own, *others = block.split(mark)
        behind = zip(places[before : before + inside], others, strict=True)
        moved.append(
            (
                start - before * (len(mark) - 1),
                own + "".join(place + piece for place, piece in behind),
            )
        )
    return made, moved
