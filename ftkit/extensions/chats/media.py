"""Media of conversations: of content parts, or of a column with marks in the texts."""

from collections.abc import Mapping, Sequence
from typing import Any

from ftkit.data.records.keys import is_empty
from ftkit.data.records.media import (
    MEDIA,
    MOST_MEDIA,
    PLACES,
    Found,
    MediaKind,
    column_values,
    explain_counts,
    kind_of_part,
    number_of,
    place_of,
)
from ftkit.data.records.record import Misfit, Record

_VALUES = ("url", "path", "content", "value")
"""Keys of a content part that may hold a medium, beside its types."""
_CORRECT = "Correct or remove the record."


class MediaOfRow:
    """Media of a row, found while its messages are read, in their order."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        """Look for columns of media.

        Args:
            row: what was read.
        """
        self._columns = column_values(row)
        self._found: list[tuple[str, Any, str]] = []
        """Kind, value and place of each; a value of None comes from a column."""

    def as_texts(self, parts: Sequence[Any], where: str) -> list[Any]:
        """Return content parts with a text in place of each medium: the character of its place.

        Args:
            parts: of a message.
            where: the message's place within the record.
        """
        texts = []
        for number, part in enumerate(parts, 1):
            kind = kind_of_part(part)
            if kind is None:
                texts.append(part)
                continue
            text = self._place(kind, _value_of(part, kind), f"{where}, part {number}")
            others = {key: item for key, item in part.items() if key in ("train", "weight")}
            texts.append({**others, "type": "text", "text": text})
        return texts

    def added_to(self, record: Record) -> Record:
        """Return a conversation with its media.

        Raises:
            Misfit: there are more places than media, or fewer.
        """
        if not (self._columns or self._found):
            return record
        messages = self._marked(record["messages"])
        given = {name: iter(values) for name, (_, _, values) in self._columns.items()}
        counts = dict.fromkeys(self._columns, 0)
        found = []
        for kind, value, where in self._found:
            if value is None and kind in given:
                counts[kind] += 1
                value = next(given[kind], None)
            found.append(Found(kind, value, where))
        for name, (row, key, values) in self._columns.items():
            if counts[name] != len(values):
                raise explain_counts(row, key, values, counts[name])
        for kind, value, where in found:
            if value is None:
                raise Misfit(f"{where} is an {kind} without a file.\n{_CORRECT}")
        places = [p for message in messages for p in PLACES.findall(message["content"])]
        # In the order of the texts, in which a system message may have been put first.
        if [*map(number_of, places)] != [*range(len(found))]:
            raise Misfit(
                " has characters from U+F0000 to U+FFFFD, which stand for media, in a text.\n"
                "Remove these characters, or the record."
            )
        return record | {"messages": messages, MEDIA: found}

    def _marked(self, messages: list[Record]) -> list[Record]:
        """Put places for the marks of columns whose media no part has."""
        by_mark = {
            kind.mark: kind
            for kind, _, _ in self._columns.values()
            if not any(name == kind.name for name, _, _ in self._found)
        }
        for mark, kind in by_mark.items():
            made = []
            for number, message in enumerate(messages, 1):
                first, *rest = message["content"].split(mark)
                for text in rest:
                    first += self._place(kind, None, f", message {number}") + text
                if rest and "spans" in message:
                    raise Misfit(
                        f", message {number} has {mark}, and weights of some of its characters.\n"
                        "Give the media as content parts."
                    )
                made.append(message | {"content": first} if rest else message)
            messages = made
        return messages

    def _place(self, kind: MediaKind, value: Any, where: str) -> str:
        if len(self._found) == MOST_MEDIA:
            raise Misfit(f" has more than {MOST_MEDIA:,} media.\n{_CORRECT}")
        self._found.append((kind.name, value, where))
        return place_of(len(self._found) - 1)


def keys_of_part(part: Any) -> frozenset[str]:
    """Keys that are read of a content part that is a medium; none: it is no medium."""
    kind = kind_of_part(part)
    return frozenset() if kind is None else frozenset(("type", "base64", *kind.parts, *_VALUES))


def _value_of(part: Mapping[str, Any], kind: MediaKind) -> Any:
    """What a content part holds, under any of the keys that programs use; None: nothing."""
    found = (part[key] for key in (*kind.parts, *_VALUES) if not is_empty(part.get(key)))
    text = part.get("base64")
    if isinstance(text, str) and text and not text.startswith("data:"):
        return {"bytes": text}
    return next(found, text)
