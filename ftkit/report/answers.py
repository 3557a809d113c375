"""What the model answers before and after training: how often it is right, and one example."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ExactMatch:
    """Greedy answers to validation records that equal the expected text."""

    samples: int
    """Records answered."""
    before: float | None = None
    """Fraction right before the first step."""
    after: float | None = None
    """Fraction right after the last step."""


@dataclass(frozen=True, kw_only=True)
class AnsweredExample:
    """One validation record with the answers of the model."""

    instruction: str
    """What the model was asked."""
    input: str = ""
    """The material it was asked about."""
    expected: str = ""
    """The answer in the data."""
    before: str | None = None
    """The model's answer before training."""
    after: str | None = None
    """The model's answer after training."""
