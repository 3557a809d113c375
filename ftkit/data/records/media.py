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

from ftkit.data.records.keys import is_empty
from ftkit.data.records.record import Misfit, Record
from ftkit.errors import UserError
from ftkit.utils.console.formatting import percent_text, shortened
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
_MOST_OF_NAME = 40
"""Characters of the name of a file that people see."""


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
    is_relative: bool = False
    """Whether its path is given relative to the file of its record, with which it moves."""


class MediaFile(NamedTuple):
    """A file of media."""

    kind: str
    digest: str
    """SHA-256 of what it held; "": it could not be used."""
    file: str
    is_relative: bool
    """As of a `Medium`."""


class BadMedium(Misfit):
    """A medium of a record cannot be used as it is now."""

    def __init__(self, message: str, file: MediaFile | None = None) -> None:
        """Take the message of a `Misfit` and, of a medium that lies in a file, the file."""
        super().__init__(message)
        self.file = file


class Look(NamedTuple):
    """How a medium is shown to people."""

    size: str
    """In words, such as 640 x 480."""
    picture: str
    """data: url that holds the picture itself; "": there is none."""


@dataclass(frozen=True, kw_only=True)
class ShownMedium:
    """A medium of a sample or prompt, as people see it."""

    kind: str
    name: str
    """Name of its file."""
    size: str
    """In words, such as 640 x 480."""
    first: int
    """First of its tokens, among those of the sample or prompt."""
    end: int
    picture: str
    """Url with a small picture of it, data:image/jpeg;base64,...; "": there is none."""

    @property
    def words(self) -> str:
        """Description in the place of its tokens."""
        return f"[{self.kind} {self.name}, {self.size}, {self.end - self.first:,} tokens]"


@dataclass(frozen=True, kw_only=True)
class MediaNumbers:
    """Numbers about the media of one kind in some samples."""

    kind: str
    count: int
    """Places in samples; a file may have several."""
    least_tokens: int
    """Tokens of the smallest one."""
    median_tokens: int
    most_tokens: int
    share: float
    """Their tokens among all of the samples."""

    @property
    def text(self) -> str:
        """Description on one line, such as "12 images of 4 to 30 tokens, median 9"."""
        least, most = self.least_tokens, self.most_tokens
        each = f"{least:,} to {most:,} tokens, median {self.median_tokens:,}"
        if least == most:
            each = f"{least:,} token{'s' * (least != 1)}"
        named = media_row(self.kind).count_text(self.count)
        return f"{named} of {each}; {percent_text(self.share)} of all tokens"


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
    noun: str
    """Such media in a sentence, such as images."""
    counted: tuple[str, str]
    """One and several of them behind a number, such as piece of audio and pieces of audio."""
    mark: str
    """Place in the texts of a record whose media stand in a column."""
    columns: tuple[str, ...]
    """Keys of a record, or of a message, that hold such media."""
    parts: tuple[str, ...]
    """Types of content parts that hold one."""
    reference_place: str
    """MODULE:FUNCTION that takes a value of such a column or part and the directory of its file of
    records, or None, and by name names_files, whether it may be a file of this machine. It returns
    the object of a canonical record: file, sha256 and is_relative, and
    raises a Misfit for a value that it cannot read: BadMedium where it names a file."""
    settings_place: str
    """MODULE:FUNCTION that takes the directory of a base model and returns what of it decides how
    such media become tokens and tensors, as JSON values; None: it takes none."""
    renderer_place: str
    """MODULE:FUNCTION that takes a part and its tokenizer, and returns the renderer of records with
    such media, which has their reader; None for a tokenizer: texts alone are needed."""
    prompter_place: str
    """MODULE:CLASS of the `Prompter` of such media."""
    look_place: str
    """MODULE:FUNCTION that takes a file and its digest, and returns the `Look` of the medium."""
    advice: Mapping[str, str]
    """What to do about records that the renderer refuses, by the beginning of the reason."""
    encoder_place: str
    """MODULE:CLASS of the `ftkit.models.bodies.body.MediaEncoder` of models that take them."""
    simulated_place: str
    """MODULE:FUNCTION that takes a base model, the size of a micro-batch and the
    number format of the model, and returns the media as its reader does, on the meta device."""

    def count_text(self, count: int) -> str:
        """Return a number of such media in words, such as "10 pieces of audio"."""
        return f"{count:,} {self.counted[count != 1]}"


class Prompter(Protocol):
    """Makes prompts with media.

    It is made of a chat template, the tokenizer of a base model, and options of the data that the
    model was trained on.
    """

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


def shown_medium(medium: Medium) -> ShownMedium:
    """Return how people see a medium.

    Raises:
        UserError: its file is not what it was when its sample was made.
    """
    look = imported(media_row(medium.kind).look_place)(medium.file, medium.digest)
    # Of one that a record holds, the cache has a file with the digest as its name.
    name = Path(medium.file).name
    return ShownMedium(
        kind=medium.kind,
        name=medium.digest[:8] if name == medium.digest else shortened(name, _MOST_OF_NAME),
        size=look.size,
        first=medium.first,
        end=medium.end,
        picture=look.picture,
    )


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
            own["content"] = moved_places(message["content"], len(media))
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

    def marked(value: Any) -> Any:
        if isinstance(value, str):
            return PLACES.sub(mark, value)
        if isinstance(value, list):
            return [marked(one) for one in value]
        return {k: marked(v) for k, v in value.items()} if isinstance(value, dict) else value

    files = [key for medium in record[MEDIA] for key in media_row(medium["kind"]).columns]
    return {key: value if key in files else marked(value) for key, value in made.items()}


def asked_with(text: str, kind: str, files: Iterable[str]) -> Record:
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


def column_values(row: Mapping[str, Any]) -> dict[str, tuple[MediaKind, str, list[Any]]]:
    """Return the columns of media of a row by their kind: kind, key and values."""
    return {
        kind.name: (kind, key, value if isinstance(value, list) else [value])
        for kind in MEDIA_KINDS
        for key in kind.columns
        # A number of an ordinary table, such as a count of images.
        if not is_empty(value := row.get(key)) and not isinstance(value, bool | int | float)
    }


def explain_counts(kind: MediaKind, key: str, values: Sequence[Any], places: int) -> Misfit:
    """A record has other media in a column than places for them in its texts."""
    return Misfit(
        f": {key} has {len(values)}, but the texts have {places} place{'s' * (places != 1)} for "
        f"them ({kind.mark} in a text, or a part of the type {kind.parts[0]}).\n"
        f"Correct {key} or the texts, or remove the record."
    )


def with_marks(texts: Sequence[str], row: Mapping[str, Any]) -> tuple[list[str], list[Found]]:
    """Put places in texts for the marks of columns of media.

    Args:
        texts: of a record, in their order.
        row: that it was read from.

    Raises:
        Misfit: a column has more media than there are marks of it, or fewer.
    """
    made, found = [*texts], list[Found]()
    for kind, key, values in column_values(row).values():
        places = sum(text.count(kind.mark) for text in texts)
        # A text may be the name of a file of a table, which nothing else is about.
        if not places and isinstance(row[key], str):
            continue
        if places != len(values) or places > MOST_MEDIA:
            raise explain_counts(kind, key, values, places)
        if found or any(PLACES.search(text) for text in texts):
            raise Misfit(
                " has media of several kinds, or characters from U+F0000 to U+FFFFD, which stand "
                "for media.\nRemove one of the kinds, or these characters."
            )
        for number, text in enumerate(texts):
            first, *rest = text.split(kind.mark)
            for piece in rest:
                found.append(Found(kind.name, values[len(found)], f", {key} {len(found) + 1}"))
                first += place_of(len(found) - 1) + piece
            made[number] = first
    return made, found


def is_column(key: str, record: Record) -> bool:
    """Whether a key of a row holds the media of its record."""
    return MEDIA in record and kind_of_column(key) is not None


def moved_places(text: str, by: int) -> str:
    """A text whose places have other numbers."""
    return PLACES.sub(lambda place: place_of(number_of(place.group()) + by), text)


def kinds_in(records: Iterable[Record]) -> tuple[str, ...]:
    """Names of the kinds of media in some records, each once."""
    return tuple(sorted({one["kind"] for record in records for one in record.get(MEDIA, ())}))


def with_references(record: Record, folder: Path | None, *, names_files: bool = True) -> Record:
    """Return a record that was read with its media as canonical records have them.

    Args:
        record: perhaps with media that were found.
        folder: of the file that it was read from; None: it has none.
        names_files: whether it may name files of this machine; one that was downloaded may not.

    Raises:
        BadMedium: a medium is not there, or nothing that can be read.
        Misfit: an answer of several has some.
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
            media.append(reference_to(kind, value, folder, names_files=names_files))
        except Misfit as misfit:
            file = misfit.file if isinstance(misfit, BadMedium) else None
            raise BadMedium(f"{where}{misfit}", file) from None
    return record | {MEDIA: media}


def files_of(record: Record) -> list[MediaFile]:
    """Files of the media of a canonical record."""
    return [
        MediaFile(one["kind"], one["sha256"], one["file"], one["is_relative"])
        for one in record.get(MEDIA, ())
    ]


def with_files(record: Record, place: Callable[[str], str]) -> Record:
    """Return a canonical record whose media with relative paths lie elsewhere.

    Args:
        record: in canonical form.
        place: function that gives where such a file lies.
    """
    if MEDIA not in record:
        return record
    media = [
        one | {"file": place(one["file"])} if one["is_relative"] else one for one in record[MEDIA]
    ]
    return record | {MEDIA: media}


def reference_to(
    kind: str, value: Any, folder: Path | None, *, names_files: bool = True
) -> dict[str, Any]:
    """Return the object of a canonical record for a medium.

    Args:
        kind: of the medium.
        value: as it was read or given.
        folder: in which relative paths begin; None: nowhere.
        names_files: as of `with_references`.

    Raises:
        Misfit: it is not there, or nothing that can be read.
    """
    found = imported(media_row(kind).reference_place)(value, folder, names_files=names_files)
    return {"kind": kind, **found}


def _names(record: Record) -> str:
    return " and ".join(sorted({media_row(found.kind).noun for found in record[MEDIA]}))
