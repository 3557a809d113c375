"""Model cards of what is written from a result of a run, without torch."""

from pathlib import Path

from ftkit.evaluation.result import Result, report_of
from ftkit.exchange.model_card.card import CardKind, card_text
from ftkit.models.pretrained.hub import CARD


def card_files(result: Result, base: Path | None, kind: CardKind) -> dict[str, bytes]:
    """The model card of what is written, by its name; {} where nothing tells of its run.

    Args:
        result: what it is made of.
        base: directory of the base model; None: it is not known.
        kind: what it becomes.
    """
    report = report_of(result)
    return {} if report is None else {CARD: card_text(report, base, kind).encode()}
