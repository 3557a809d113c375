"""Renderers of texts that are scored or compared as wholes, over those of texts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ftkit.data.records.record import Record
from ftkit.data.rendering import (
    NO_TEXT,
    Example,
    Rendered,
    Renderer,
    Rendering,
    TextRenderer,
    TokensRenderer,
)
from ftkit.extensions.chats.rendering import ChatRenderer
from ftkit.extensions.heads.queries import TEXTS
from ftkit.extensions.heads.text_pairs import (
    encode_alone,
    encode_wholes,
    pair_template,
    text_of,
)
from ftkit.extensions.preference.rendering import LabelRenderer, PreferenceRenderer
from ftkit.models.chat_templates.template import ChatTemplate, TemplateRefusal

_NOTHING_WRITTEN = "the template writes nothing of it"


class ClassRenderer(LabelRenderer):
    """Renders texts, conversations and other records with a label, each as one sample."""

    answers = False

    def text(self, record: Record) -> str:
        return _text(self._of_answers, record)

    def render(self, records: Sequence[Record]) -> Iterator[Rendering]:
        if not isinstance(self._of_answers, ChatRenderer | TextRenderer) or isinstance(
            self._of_answers, TokensRenderer
        ):
            yield from super().render(records)
            return
        each = zip(records, _wholes(self._of_answers, self._tokenizer, records), strict=True)
        for record, ids in each:
            if isinstance(ids, str):
                yield Rendering(refused=ids)
            else:
                yield Rendering((_whole(ids, record.get("target", ())),))


class QueryRenderer(PreferenceRenderer):
    """Renders queries with their documents: together, or each by itself, the query first."""

    answers = False

    def __init__(
        self,
        of_answers: Renderer,
        tokenizer: Any = None,
        *,
        negatives: int,
        together: bool = False,
        **options: Any,
    ) -> None:
        """Take the renderer of a text or conversation.

        Args:
            of_answers: that renderer.
            tokenizer: of the base model; None: only texts are rendered.
            negatives: documents of each sample that do not answer its query.
            together: whether a sequence is a query and a document.
            **options: what the reader takes besides.
        """
        super().__init__(of_answers, tokenizer, **options)
        self._together = together
        others = (
            ("negative",) if negatives == 1 else (f"negative {n + 1}" for n in range(negatives))
        )
        self.names = (*(() if together else ("query",)), "positive", *others)
        self._together, self.per_sample = together, len(self.names)
        if self.per_sample == 1:
            self.names = ()

    @property
    def template(self) -> ChatTemplate:
        if self._together and isinstance(self._of_answers, TextRenderer):
            return pair_template(self._tokenizer)
        return super().template

    def system(self, record: Record) -> str:
        return self._of_answers.system(record[TEXTS][0])

    def text(self, record: Record) -> str:
        texts = [_text(self._of_answers, one) for one in record[TEXTS]]
        return max(texts, key=len) if all(texts) else ""

    def render(self, records: Sequence[Record]) -> Iterator[Rendering]:
        every = [one for record in records for one in record[TEXTS]]
        wholes = _wholes(self._of_answers, self._tokenizer, every, vectors=not self._together)
        for record in records:
            found = [next(wholes) for _ in record[TEXTS]]
            refused = next((one for one in found if isinstance(one, str)), None)
            if refused is not None:
                yield Rendering(refused=refused)
                continue
            target = record.get("target", ())
            yield Rendering(tuple(_whole(ids, target) for ids in found if not isinstance(ids, str)))

    def example(self, record: Record) -> Example:
        return self._of_answers.example(record[TEXTS][0])


def _text(of_answers: Renderer, record: Record) -> str:
    if isinstance(of_answers, TextRenderer):
        return text_of(record) if of_answers.text(record) else ""
    if not isinstance(of_answers, ChatRenderer):
        return of_answers.text(record)
    try:
        return of_answers.whole_text(record)
    except TemplateRefusal:
        return ""


def _wholes(
    of_answers: ChatRenderer | TextRenderer | Renderer,
    tokenizer: Any,
    records: Sequence[Record],
    *,
    vectors: bool = False,
) -> Iterator[list[int] | str]:
    """Yield the tokens of each text or conversation alone, or why it has none."""
    if isinstance(of_answers, ChatRenderer):
        # Whoever says the last word: nothing is answered.
        for ids in of_answers.whole(records):
            yield ids or _NOTHING_WRITTEN
        return
    assert isinstance(of_answers, TextRenderer), "queries and documents are texts or conversations"
    # Given alone, without the token that ends documents.
    written = [record for record in records if _is_written(record)]
    if vectors:
        encoded = iter(encode_alone(tokenizer, [record["text"] for record in written]))
    else:
        encoded = iter(encode_wholes(tokenizer, written))
    for record in records:
        yield next(encoded) if _is_written(record) else NO_TEXT


def _is_written(record: Mapping[str, Any]) -> bool:
    return all(record[key].strip() for key in ("text", "text_pair") if key in record)


def _whole(ids: list[int], target: Sequence[float]) -> Rendered:
    return Rendered(ids, ((0, len(ids)),), target=tuple(target))
