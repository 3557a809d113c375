"""What the model answers before and after training: its scores, and one example."""

import dataclasses
from collections.abc import Iterable, Sequence
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


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """A number of a task or group, of one model."""

    task: str
    """Its name, as the harness has it."""
    metric: str
    """What is measured: acc, exact_match, word_perplexity, ..."""
    filter: str | None
    """How the answers were read before; None: as they are."""
    samples: int
    """Records of the task that were asked."""
    value: float
    """The number."""
    stderr: float | None
    """Its standard error, where it is a mean."""
    higher_is_better: bool | None
    """Which values are good; None: not known."""

    @property
    def name(self) -> str:
        """Of the number."""
        return _metric_name(self.metric, self.filter)


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """A number of a task or group, before and after training."""

    task: str
    """Its name, as the harness has it."""
    metric: str
    """What is measured: acc, exact_match, word_perplexity, ..."""
    filter: str | None = None
    """How the answers were read before; None: as they are."""
    samples: int
    """Records of the task that were asked."""
    higher_is_better: bool | None = None
    """Which values are good; None: not known."""
    before: float | None = None
    """Before the first step."""
    after: float | None = None
    """After the last step."""
    stderr: float | None = None
    """Standard error of the newer one, where it is a mean."""

    @property
    def name(self) -> str:
        """Of the number."""
        return _metric_name(self.metric, self.filter)


def _metric_name(metric: str, filter_name: str | None) -> str:
    """A metric with the filter before it."""
    return metric if filter_name is None else f"{metric} ({filter_name})"


def score_text(value: float) -> str:
    """A number of a task: a share as the harness writes it, a perplexity short."""
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.4g}"


def with_results(
    scores: Sequence[TaskScore], results: Iterable[TaskResult], *, before: bool
) -> list[TaskScore]:
    """The scores with new numbers in them, in the order of the new ones.

    Args:
        scores: so far; those of tasks that are no longer asked are left out.
        results: of the model now.
        before: whether training has not begun.
    """
    known = {(score.task, score.metric, score.filter): score for score in scores}
    found = []
    for result in results:
        score = known.get((result.task, result.metric, result.filter)) or TaskScore(
            task=result.task, metric=result.metric, filter=result.filter, samples=result.samples
        )
        score = dataclasses.replace(
            score,
            samples=result.samples,
            higher_is_better=result.higher_is_better,
            stderr=result.stderr,
        )
        found.append(
            dataclasses.replace(score, before=result.value)
            if before
            else dataclasses.replace(score, after=result.value)
        )
    return found
