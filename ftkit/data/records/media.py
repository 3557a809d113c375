"""Media of records: files, such as images, that stand for tokens of a sample.

A record has them under `MEDIA`, each with the place of its file, and each place in a text is one
character that no text has. A kind of media says how files become tokens and tensors; nothing here
knows what is in them.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ftkit.data.records.record import Misfit, Record
from ftkit.errors import UserError
from ftkit.utils.registry import Registry, imported

MEDIA = "media"
"""Key of a canonical record: a list of objects with `kind`, `file` and what its kind adds. While a
record is read, they are `Found`."""
MEDIA_OF = "media_of"
"""Key of a micro-batch that has media: those of each sequence, as `Medium`."""
_FIRST_PLACE, _LAST_PLACE = 0xF0000, 0xFFFFD
"""Characters for private use of which each is the place of a medium in a text."""
PLACES = re.compile(f"[{chr(_FIRST_PLACE)}-{chr(_LAST_PLACE)}]")
MOST_MEDIA = _LAST_PLACE - _FIRST_PLACE + 1
"""Most media whose places differ in one text."""


class Medium(NamedTuple):
    """A medium of a sequence."""

    kind: str
    """Name of a `MediaKind`."""
    digest: str
    """SHA-256 of its file."""
    file: str
    """Where it lies."""
    first: int
    """First of the tokens that it stands for, among those of the sequence."""
    end: int
    size: int
    """What it costs to encode, in units of its kind: patches of an image."""


class Found(NamedTuple):
    """A medium of a record as it was read."""

    kind: str
    value: Any
    where: str
    """Its place within the record."""


@dataclass(frozen=True, kw_only=True)
class MediaKind:
    """A kind of media."""

    name: str
    mark: str
    """Place in the texts of a record whose media stand in a column."""
    columns: tuple[str, ...]
    """Keys of a record, or of a message, that hold such media."""
    parts: tuple[str, ...]
    """Types of content parts that hold one."""
    reference_place: str
    """MODULE:FUNCTION that takes a value of such a column or part and the directory of its file of
    records, or None, and returns the object of a canonical record; it raises Misfit for a value
    that it cannot read."""
    renderer_place: str
    """MODULE:FUNCTION that takes a part and its tokenizer, and returns the renderer of records with
    such media, which has their reader; None for a tokenizer: texts alone are needed."""
    prompter_place: str
    """MODULE:CLASS of the `Prompter` of such media."""
    encoder_place: str
    """MODULE:CLASS of the `ftkit.models.bodies.body.MediaEncoder` of models that take them."""
    simulated_place: str
    """MODULE:FUNCTION that takes the directory of a base model, the size of a micro-batch and the
    number format of the model, and returns the media as its reader does, on the meta device."""


class Prompter(Protocol):
    """Makes prompts with media; it is made of a chat template and the tokenizer of a base model."""

    template: Any
    """The template whose texts have the character of a place for each medium."""

    def encode(self, text: str, media: Sequence[Mapping[str, Any]]) -> "Prompt":
        """Encode a text of that template.

        Args:
            text: with places.
            media: of a canonical record, in the order of their numbers.

        Raises:
            UserError: a medium is not what it was, or the text has a token that stands for media.
        """


class Prompt(NamedTuple):
    """A prompt with its media."""

    ids: list[int]
    media: tuple[Medium, ...]
    read: Callable[[int], Mapping[str, Any]]
    """Reads the media, given the width to which the prompt is padded."""


MEDIA_KINDS: Registry[MediaKind] = Registry("media_kinds", (MediaKind,), core=())
"""Kinds of media by name."""


def place_of(number: int) -> str:
    """The character that is the place of a medium, by its number."""
    return chr(_FIRST_PLACE + number)


def number_of(place: str) -> int:
    """The number of the medium at a place."""
    return ord(place) - _FIRST_PLACE


def kind_of_column(key: str) -> MediaKind | None:
    """Return the kind of media that a column holds; None: none that is here."""
    return next((kind for kind in MEDIA_KINDS if key in kind.columns), None)


def kind_of_part(part: Any) -> MediaKind | None:
    """Return the kind of media that a content part is; None: none that is here."""
    found = part.get("type") if isinstance(part, dict) else None
    return next((kind for kind in MEDIA_KINDS if found in kind.parts), None)


def media_row(name: str) -> MediaKind:
    """Return the row of a kind of media that a record of ours has."""
    row = MEDIA_KINDS.get(name)
    assert row is not None, f"a record with media of the kind {name} was read by its extension"
    return row


def numbered(messages: Iterable[Record]) -> tuple[list[Record], list[dict[str, Any]]]:
    """Messages of several turns, each with its own media, as those of one conversation.

    Args:
        messages: whose places count from 0 in each; the media of one are under `MEDIA`.

    Returns:
        The messages, whose places count over all of them, and all media.
    """
    made, media = list[Record](), list[dict[str, Any]]()
    for message in messages:
        own = {key: value for key, value in message.items() if key != MEDIA}
        if MEDIA in message:
            own["content"] = moved(message["content"], len(media))
            media += message[MEDIA]
        made.append(own)
    return made, media


def as_given(record: Record) -> Record:
    """A canonical record with its media in columns and marks in its texts, as people write it."""
    if MEDIA not in record:
        return record
    made = {key: value for key, value in record.items() if key != MEDIA}
    for medium in record[MEDIA]:
        made.setdefault(media_row(medium["kind"]).columns[0], []).append(medium["file"])
    marks = [media_row(medium["kind"]).mark for medium in record[MEDIA]]

    def mark(place: re.Match[str]) -> str:
        return marks[number_of(place.group())]

    messages = [m | {"content": PLACES.sub(mark, m["content"])} for m in record["messages"]]
    return made | {"messages": messages}


def with_files(text: str, kind: str, files: Iterable[str]) -> Record:
    """Return a message of a user with media before its text.

    Args:
        text: what is said.
        kind: of the media.
        files: their paths.

    Raises:
        UserError: a file is not there, or nothing that can be read.
    """
    try:
        media = [reference_to(kind, file, Path()) for file in files]
    except Misfit as misfit:
        words = str(misfit).partition("\n")[0].removeprefix(": its ")
        raise UserError(f"The {words}\nGive another file.") from None
    places = "".join(place_of(number) for number in range(len(media)))
    message = {"role": "user", "content": places + text}
    return message | {MEDIA: media} if media else message


def moved(text: str, by: int) -> str:
    """Return a text whose places have other numbers.

    Args:
        text: any.
        by: what is added to each number.
    """
    return PLACES.sub(lambda place: place_of(number_of(place.group()) + by), text)


def kinds_in(records: Iterable[Record]) -> tuple[str, ...]:
    """Names of the kinds of media in some records, each once."""
    return tuple(sorted({one["kind"] for record in records for one in record.get(MEDIA, ())}))


def with_references(record: Record, folder: Path | None) -> Record:
    """Return a record that was read with its media as canonical records have them.

    Args:
        record: perhaps with media that were found.
        folder: of the file that it was read from; None: it has none.

    Raises:
        Misfit: a medium is not there, or nothing that can be read; or an answer of several has
            some.
    """
    for key, inside in record.items():
        if isinstance(inside, dict) and MEDIA in inside:
            raise Misfit(
                f": {key} has {_names(inside)}, but only records with one answer may have them so "
                "far.\nRemove the record, or train on one answer."
            )
    if MEDIA not in record:
        return record
    media = []
    for kind, value, where in record[MEDIA]:
        try:
            media.append(reference_to(kind, value, folder))
        except Misfit as misfit:
            raise Misfit(f"{where}{misfit}") from None
    return record | {MEDIA: media}


def reference_to(kind: str, value: Any, folder: Path | None) -> dict[str, Any]:
    """Return the object of a canonical record for a medium.

    Args:
        kind: of the medium.
        value: as it was read or given.
        folder: in which relative paths begin; None: nowhere.

    Raises:
        Misfit: it is not there, or nothing that can be read.
    """
    return {"kind": kind, **imported(media_row(kind).reference_place)(value, folder)}


def _names(record: Record) -> str:
    return " and ".join(sorted({f"{found.kind}s" for found in record[MEDIA]}))
