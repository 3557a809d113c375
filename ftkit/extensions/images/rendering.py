"""The renderer of conversations with media: each becomes the tokens that stand for it."""

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate, compress
from typing import Any, ClassVar, NamedTuple

from ftkit.data.records.media import (
    MEDIA,
    MOST_MEDIA,
    PLACES,
    Medium,
    Prompt,
    media_row,
    moved_places,
    place_of,
)
from ftkit.data.records.record import Record
from ftkit.data.rendering import Example, Rendered, Renderer, Rendering, cut
from ftkit.data.spec import Part
from ftkit.errors import UserError
from ftkit.extensions.chats.rendering import ChatRenderer
from ftkit.extensions.images.found_files import BrokenMedium
from ftkit.extensions.images.media_kinds import DAMAGED, LITERAL, WITHOUT
from ftkit.extensions.images.media_model import MediaModel
from ftkit.extensions.images.media_models import MODELS
from ftkit.extensions.images.reader import TowerReader
from ftkit.extensions.images.template import MediaTemplate
from ftkit.models.chat_templates.template import ChatTemplate

_THREADS = 4
_Key = tuple[str, bool]
"""Digest of a medium, and whether it is the only one of its sample."""
_Found = Mapping[_Key, tuple[str, int] | BrokenMedium]
"""Text and cost of media, or what is wrong with one."""


def renderer(part: Part, tokenizer: Any) -> Renderer:
    """Make the renderer of a part whose records have media of a kind.

    Raises:
        UserError: the records are no conversations, or the model takes no such media.
    """
    (kind,) = part.media
    if part.rules.chat_template is None:
        raise UserError(
            f"The records of {part.name} have {media_row(kind).noun}, which only a chat template "
            "writes, but their prompts are made by a prompt style.\n"
            "Try --data.chat_template tokenizer."
        )
    plain = ChatRenderer.of(part.rules, tokenizer)
    if tokenizer is None:
        return plain
    model = MODELS[kind].of(tokenizer.directory, tokenizer, part.rules.media_options)
    if model.family.has_prefix and part.rules.train_on == "all":
        raise UserError(
            f"data.train_on is all, but in {tokenizer.directory.name} the tokens before an answer "
            "see each other, so none of them can be predicted.\nTry --data.train_on assistant."
        )
    return MediaRenderer(
        _MediaTokenizer(tokenizer),
        MediaTemplate.of(plain.template, model.mark, kind),
        train_on=part.rules.train_on,
        reasoning=part.rules.reasoning,
        model=model,
    )


class _Encoded(NamedTuple):
    """Tokens of a text with their character spans."""

    ids: list[int]
    offsets: list[tuple[int, int]]


class _MediaTokenizer:
    """A tokenizer for which the character of a place is all that its medium becomes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.texts: Mapping[str, str] = {}
        """Text of the medium at each place."""

    def __getattr__(self, name: str) -> Any:
        """Anything else is the tokenizer's own."""
        if name.startswith("__") or name == "_tokenizer":  # asked for by pickle
            raise AttributeError(name)
        return getattr(self._tokenizer, name)

    def encode_all_rendered(self, texts: Sequence[str]) -> list[_Encoded]:
        """Encode texts with media in them."""
        whole = [PLACES.sub(lambda place: self.texts[place.group()], text) for text in texts]
        encodings = self._tokenizer.encode_all_rendered(whole)
        return [
            _Encoded(encoded.ids, self._moved(text, encoded.offsets))
            for text, encoded in zip(texts, encodings, strict=True)
        ]

    def _moved(self, text: str, offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """Places of tokens in the text in which each medium is one character."""
        starts, ends, at = list[int](), list[int](), list[int]()
        longer = 0
        for place in PLACES.finditer(text):
            length = len(self.texts[place.group()])
            starts.append(place.start() + longer)
            ends.append(place.start() + longer + length)
            at.append(place.start())
            longer += length - 1
        if not starts:
            return list(offsets)

        def moved(position: int, *, is_end: bool) -> int:
            before = bisect_right(starts, position - is_end) - 1
            if before < 0:
                return position
            if position - is_end < ends[before]:  # within the medium
                return at[before] + is_end
            return at[before] + 1 + position - ends[before]

        return [
            (moved(first, is_end=False), max(moved(end, is_end=True), moved(first, is_end=False)))
            for first, end in offsets
        ]


class MediaRenderer(ChatRenderer):
    """Renders conversations with media, whose tokens never carry loss."""

    def __init__(
        self,
        tokenizer: _MediaTokenizer,
        template: MediaTemplate,
        *,
        model: MediaModel,
        **rules: Any,
    ) -> None:
        """Set the rules of rendering.

        Args:
            tokenizer: of the base model.
            template: writes the conversations.
            model: of which the media become tokens.
            rules: as of `ChatRenderer`.
        """
        self._media, self._model = tokenizer, model
        self.media_settings, self.media_reader = model.settings, TowerReader(model)
        super().__init__(tokenizer, template, **rules)

    def render(self, records: Sequence[Record]) -> Iterator[Rendering]:
        for some in _groups(records):
            yield from self._render(some)

    def size(self, record: Record) -> tuple[int, Sequence[int]]:
        size, _ = super().size(record)
        if not size or MEDIA not in record:
            return size, ()
        found = [
            self._model.text_by_header(medium["file"], is_alone=is_alone)
            for medium, (_, is_alone) in _media_of(record)
        ]
        # A token of a medium counts once, however long its text is.
        texts = (text.replace(self._model.token, "x") for text, _ in found)
        return size + sum(len(text.encode()) for text in texts), [cost for _, cost in found]

    def example(self, record: Record) -> Example:
        found = _read(self._model, [record])
        if (refusal := self._refusal(record, found)) is not None:
            raise UserError(
                f"A record cannot be asked about: {refusal.refused}.\nRemove the record."
            )
        self._media.texts = _texts([record], found)
        example = super().example(record)
        prompt = _with_media(self._model, Rendered(example.prompt, ()), record, found)
        return example._replace(
            instruction=PLACES.sub(f"<{self._model.kind}>", example.instruction),
            media=prompt.media,
            media_reader=self.media_reader if prompt.media else None,
        )

    def _encoded_end(self, text: str) -> Any:
        # Not kept: a place is another medium in other records.
        return self._encoded(text) if PLACES.search(text) else super()._encoded_end(text)

    def _render(self, records: Sequence[Record]) -> Iterator[Rendering]:
        found = _read(self._model, records)
        refusals = [self._refusal(record, found) for record in records]
        taken = [record for record, bad in zip(records, refusals, strict=True) if bad is None]
        self._media.texts = _texts(taken, found)
        firsts = accumulate((len(record.get(MEDIA, ())) for record in taken), initial=0)
        rendered = super().render([_moved(*one) for one in zip(taken, firsts, strict=False)])
        for record, refusal in zip(records, refusals, strict=True):
            if refusal is not None:
                yield refusal
                continue
            one = next(rendered)
            samples = tuple(_with_media(self._model, s, record, found) for s in one.samples)
            yield one._replace(samples=samples)

    def _refusal(self, record: Record, found: _Found) -> Rendering | None:
        """Why a record becomes no sample; None: it may become one."""
        said = json.dumps([record["messages"], record.get("tools")], ensure_ascii=False)
        if self._model.token in said:
            return Rendering(refused=f"{LITERAL[self._model.kind]} ({self._model.token})")
        if self._model.family.has_prefix and not record.get(MEDIA):
            return Rendering(refused=WITHOUT)
        for medium, key in _media_of(record):
            if isinstance(broken := found[key], BrokenMedium):
                return Rendering(
                    refused=DAMAGED[self._model.kind], bad_file=(medium["file"], str(broken))
                )
        return None


class _MediaPrompter:
    """Makes prompts with media of a kind; see `ftkit.data.records.media.Prompter`."""

    kind: ClassVar[str]
    """Name of the kind."""

    def __init__(self, template: ChatTemplate, tokenizer: Any, options: Mapping[str, Any]) -> None:
        """Take the template of prompts, the tokenizer of the base model, and options of its data.

        Raises:
            UserError: the model is given no such media.
        """
        self._model = MODELS[self.kind].of(tokenizer.directory, tokenizer, options)
        self._tokenizer = _MediaTokenizer(tokenizer)
        self.template = MediaTemplate.of(template, self._model.mark, self.kind)

    def encode(self, text: str, media: Sequence[Mapping[str, Any]]) -> Prompt:
        """Encode a prompt with media."""
        if self._model.token in text:
            noun = media_row(self.kind).noun
            raise UserError(
                f"The prompt has {self._model.token}, which stands for {noun} in this model.\n"
                "Leave it out."
            )
        record = {MEDIA: media}
        found = _read(self._model, [record])
        for medium, key in _media_of(record):
            if isinstance(broken := found[key], BrokenMedium):
                raise UserError(f"The {self.kind} {medium['file']} {broken}.\nGive another one.")
        self._tokenizer.texts = _texts([record], found)
        (encoded,) = self._tokenizer.encode_all_rendered([text])
        sample = _with_media(self._model, Rendered(encoded.ids, ()), record, found)
        reader = TowerReader(self._model)
        return Prompt(sample.ids, sample.media, partial(reader.read, [sample.media], [sample.ids]))


class ImagePrompter(_MediaPrompter):
    """As `_MediaPrompter`, of images."""

    kind = "image"


class AudioPrompter(_MediaPrompter):
    """As `_MediaPrompter`, of audio."""

    kind = "audio"


def _media_of(record: Record) -> list[tuple[Record, _Key]]:
    """Media of a record, with their keys."""
    media = record.get(MEDIA, ())
    return [(medium, (medium["sha256"], len(media) == 1)) for medium in media]


def _read(model: MediaModel, records: Sequence[Record]) -> _Found:
    """Read and count the media of some records."""
    files = {key: m["file"] for record in records for m, key in _media_of(record)}

    def read(item: tuple[_Key, str]) -> tuple[str, int] | BrokenMedium:
        (digest, is_alone), file = item
        try:
            return model.text_of(model.files.content(file, digest), is_alone=is_alone)
        except BrokenMedium as broken:
            return broken

    with ThreadPoolExecutor(_THREADS) as pool:
        return dict(zip(files, pool.map(read, files.items()), strict=True))


def _with_media(model: MediaModel, sample: Rendered, record: Record, found: _Found) -> Rendered:
    """A sample with the media that it has, which carry no loss."""
    places = [i for i, token in enumerate(sample.ids) if token == model.token_id]
    media, at = list[Medium](), 0
    for medium, key in _media_of(record):
        if at == len(places):  # a sample may end before the last turns
            break
        text, patches = _text_of(found, key)
        own = places[at : at + text.count(model.token)]
        at += len(own)
        file = (medium["sha256"], medium["file"])
        spans = (own[0], own[-1] + 1, patches)
        media.append(Medium(model.kind, *file, *spans, medium["is_relative"]))
    assert at == len(places), "the tokenizer keeps the tokens of media apart"
    sample = _without_loss(sample, media)._replace(media=tuple(media))
    # Nothing is predicted at the end, where a medium would lack its last token.
    while sample.media and sample.media[-1].end == len(sample.ids):
        sample = cut(sample, sample.media[-1].first)
    return sample


def _texts(records: Sequence[Record], found: _Found) -> dict[str, str]:
    """Texts of the media of some records, by places that count over all of them."""
    keys = (key for record in records for _, key in _media_of(record))
    return {place_of(i): _text_of(found, key)[0] for i, key in enumerate(keys)}


def _text_of(found: _Found, key: _Key) -> tuple[str, int]:
    """Text and cost of a medium that was read."""
    made = found[key]
    assert not isinstance(made, BrokenMedium), "records with such media are refused before"
    return made


def _groups(records: Sequence[Record]) -> Iterator[Sequence[Record]]:
    """Records whose media have places that differ."""
    first, count = 0, 0
    for number, record in enumerate(records):
        own = len(record.get(MEDIA, ()))
        if count + own > MOST_MEDIA:
            yield records[first:number]
            first, count = number, 0
        count += own
    yield records[first:]


def _moved(record: Record, by: int) -> Record:
    """A record whose places begin with another number."""
    if not by or MEDIA not in record:
        return record
    messages = [
        message | {"content": moved_places(message["content"], by)}
        for message in record["messages"]
    ]
    return record | {"messages": messages}


def _without_loss(sample: Rendered, media: Sequence[Medium]) -> Rendered:
    """A sample of which no token of a medium carries loss."""
    spans = list(sample.trained)
    weights = list(sample.weights or [1.0] * len(spans))
    for medium in media:
        cut = [
            (parts, weight)
            for (first, end), weight in zip(spans, weights, strict=True)
            for parts in ((first, min(end, medium.first)), (max(first, medium.end), end))
            if parts[0] < parts[1]
        ]
        # A span beside the medium stands in both parts whole.
        kept = dict(cut)
        spans, weights = list(kept), list(kept.values())
    of_spans = tuple(weights) if sample.weights else ()
    kept_spans = [max(first, 1) < end for first, end in spans]
    return sample._replace(
        trained=tuple(compress(spans, kept_spans)), weights=tuple(compress(of_spans, kept_spans))
    )
