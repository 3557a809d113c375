"""The renderer of texts with a label, over that of texts."""

from collections.abc import Iterator, Sequence

from ftkit.data.records.record import Record
from ftkit.data.rendering import Rendered, Rendering, TextRenderer
from ftkit.extensions.preference.rendering import LabelRenderer


class ClassRenderer(LabelRenderer):
    """Renders texts, conversations and other records with a label, each as one sample."""

    def render(self, records: Sequence[Record]) -> Iterator[Rendering]:
        for rendering in super().render(records):
            # A text that is classified is given alone, without the token that ends documents.
            if isinstance(self._of_answers, TextRenderer) and rendering.samples:
                (sample,) = rendering.samples
                rendering = rendering._replace(samples=(_without_last(sample),))
            yield rendering


def _without_last(sample: Rendered) -> Rendered:
    ids = sample.ids[:-1]
    return sample._replace(ids=ids, trained=((0, len(ids)),))
