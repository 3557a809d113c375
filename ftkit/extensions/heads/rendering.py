"""The renderer of texts with a label, over that of texts."""

from collections.abc import Iterator, Sequence

from ftkit.data.records.record import Record
from ftkit.data.rendering import Rendered, Rendering, TextRenderer
from ftkit.extensions.chats.rendering import ChatRenderer
from ftkit.extensions.preference.rendering import LabelRenderer
from ftkit.models.chat_templates.template import TemplateRefusal


class ClassRenderer(LabelRenderer):
    """Renders texts, conversations and other records with a label, each as one sample."""

    answers = False

    def text(self, record: Record) -> str:
        if not isinstance(self._of_answers, ChatRenderer):
            return super().text(record)
        try:
            return self._of_answers.whole_text(record)
        except TemplateRefusal:
            return ""

    def render(self, records: Sequence[Record]) -> Iterator[Rendering]:
        if isinstance(self._of_answers, ChatRenderer):
            # Whoever says the last word: nothing is answered.
            each = zip(records, self._of_answers.whole(records), strict=True)
            for record, ids in each:
                if isinstance(ids, str):
                    yield Rendering(refused=ids)
                elif not ids:
                    yield Rendering(refused="the template writes nothing of it")
                else:
                    yield Rendering((_whole(ids, record),))
            return
        for record, rendering in zip(records, super().render(records), strict=True):
            # A text that is classified is given alone, without the token that ends documents.
            if isinstance(self._of_answers, TextRenderer) and rendering.samples:
                (sample,) = rendering.samples
                rendering = rendering._replace(samples=(_whole(sample.ids[:-1], record),))
            yield rendering


def _whole(ids: list[int], record: Record) -> Rendered:
    return Rendered(ids, ((0, len(ids)),), target=tuple(record["target"]))
