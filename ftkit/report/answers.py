"""What the model answers before and after training: its scores, and one example."""

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
class AnswerScore:
    """The mean of another score over greedy answers to validation records."""

    name: str
    """rouge_l, or the function of one's own."""
    samples: int
    """Records answered."""
    before: float | None = None
    """Before the first step."""
    after: float | None = None
    """After the last step."""
    file: str | None = None
    """Name of the file with the function; None: it is ftkit's."""
    sha256: str | None = None
    """Of that file: it tells functions of one name apart."""

    @property
    def identity(self) -> tuple[str, str | None]:
        """Tells scores apart."""
        return self.name, self.sha256

    @property
    def title(self) -> str:
        """What people call it."""
        return score_title(self.name, is_own=self.sha256 is not None)


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


def score_title(name: str, *, is_own: bool) -> str:
    """What people call a score of answers: ROUGE-L, or the function of one's own."""
    return name if is_own else "ROUGE-L"
