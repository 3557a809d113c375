"""Renderers of records that say which answers are better, over those of records with one answer."""

from collections.abc import Iterator, Sequence
from typing import Any

from ftkit.data.records.record import Record
from ftkit.data.rendering import Example, Renderer, Rendering
from ftkit.models.chat_templates.template import ChatTemplate

ANSWERED_IN_PARTS = "an answer of several turns, which the template writes as several samples"
"""Reason for a pair, or an answer with a label, without sample."""


class PreferenceRenderer(Renderer):
    """Renders by the renderer of a record with one answer."""

    def __init__(self, of_answers: Renderer, tokenizer: Any = None, **options: Any) -> None:
        """Take the renderer of a record with one answer.

        Args:
            of_answers: that renderer.
            tokenizer: of the base model; None: only texts are rendered.
            **options: what the preference has behind its name.
        """
        self._of_answers, self._tokenizer = of_answers, tokenizer
        self.is_python_bound = of_answers.is_python_bound

    @property
    def template(self) -> ChatTemplate:
        return self._of_answers.template

    @property
    def stop_ids(self) -> frozenset[int]:
        return self._of_answers.stop_ids


class PairRenderer(PreferenceRenderer):
    """Renders both answers of preference pairs: a sample has the chosen one, then the other."""

    per_sample = 2
    names = ("chosen", "rejected")

    def system(self, record: Record) -> str:
        return self._of_answers.system(record["chosen"])  # both have the same prompt

    def text(self, record: Record) -> str:
        texts = [self._of_answers.text(record[answer]) for answer in ("chosen", "rejected")]
        return max(texts, key=len) if all(texts) else ""

    def render(self, records: Sequence[Record]) -> Iterator[Rendering]:
        both = [record[answer] for record in records for answer in ("chosen", "rejected")]
        renderings = self._of_answers.render(both)
        for chosen, rejected in zip(renderings, renderings, strict=True):
            refused = chosen.refused or rejected.refused
            samples = (*chosen.samples, *rejected.samples)
            if refused is None and len(samples) != self.per_sample:
                refused = ANSWERED_IN_PARTS
            omits = chosen.omits_reasoning or rejected.omits_reasoning
            is_divided = chosen.is_divided or rejected.is_divided
            if refused:
                yield Rendering(refused=refused)
            else:
                yield Rendering(samples, None, omits, is_divided)

    def example(self, record: Record) -> Example:
        return self._of_answers.example(record["chosen"])


class LabelRenderer(PreferenceRenderer):
    """Renders answers with a label: a sample has one of them, and whether it is desirable."""

    def system(self, record: Record) -> str:
        return self._of_answers.system(record)

    def text(self, record: Record) -> str:
        return self._of_answers.text(record)

    def size(self, record: Record) -> tuple[int, Sequence[int]]:
        return self._of_answers.size(record)

    def render(self, records: Sequence[Record]) -> Iterator[Rendering]:
        for record, rendering in zip(records, self._of_answers.render(records), strict=True):
            if rendering.refused is None and len(rendering.samples) != 1:
                yield Rendering(refused=ANSWERED_IN_PARTS)
                continue
            labelled = (one._replace(target=(*record["target"],)) for one in rendering.samples)
            yield rendering._replace(samples=tuple(labelled))

    def example(self, record: Record) -> Example:
        return self._of_answers.example(record)
