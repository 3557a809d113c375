"""Samples of documents, every token of which carries loss."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ftkit.data.records.record import Record
from ftkit.data.rendering.renderer import Example, Rendered, Renderer, Rendering
from ftkit.models.chat_templates.prompt_styles import DEFAULT, template_of_style
from ftkit.models.chat_templates.template import ChatTemplate

if TYPE_CHECKING:
    from ftkit.models.pretrained.tokenizer import Tokenizer

NO_TEXT = "no text"
"""Why a document becomes no sample."""

_SHOWN = 128
"""Tokens of a document that are given in an example, and as many that are expected."""


class TextRenderer(Renderer):
    """A document and its end."""

    def __init__(self, tokenizer: "Tokenizer | None") -> None:
        """Prepare.

        Args:
            tokenizer: of the base model; None: nothing but texts is asked for.
        """
        self._tokenizer = tokenizer

    @cached_property
    def template(self) -> ChatTemplate:
        assert self._tokenizer is not None
        return template_of_style(DEFAULT, self._tokenizer)

    @property
    def stop_ids(self) -> frozenset[int]:
        assert self._tokenizer is not None
        return frozenset({self._tokenizer.eos_id})

    def text(self, record: Record) -> str:
        return record["text"] if record["text"].strip() else ""

    def render(self, records: Sequence[Record]) -> Iterator[Rendering]:
        assert self._tokenizer is not None
        for record in records:
            if not record["text"].strip():
                yield Rendering(refused=NO_TEXT)
                continue
            ids = self._tokenizer.encode(record["text"], eos=True).tolist()
            yield Rendering((Rendered(ids, ((0, len(ids)),)),))

    def example(self, record: Record) -> Example:
        """How a document goes on after its first half."""
        assert self._tokenizer is not None
        ids = self._tokenizer.encode(record["text"]).tolist()
        given = ids[: min(_SHOWN, len(ids) // 2 + 1)]
        expected = ids[len(given) : len(given) + _SHOWN]
        return Example(
            prompt=given,
            expected=self._tokenizer.decode(torch.tensor(expected)) if expected else "",
            stop_ids=self.stop_ids,
            record=record,
            instruction=self._tokenizer.decode(torch.tensor(given)),
        )
