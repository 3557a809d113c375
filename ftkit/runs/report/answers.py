"""Scores of answers and of tasks, and one answered example, before and after training."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ftkit.data.records.media import ShownMedium
from ftkit.recipe.recipe import METRICS
from ftkit.utils.console.formatting import Pictured

MOST_SHOWN = 8
"""Most media of an example in a report, which holds their pictures."""


@dataclass(frozen=True, kw_only=True)
class ExactMatch:
    """Greedy answers to validation records that equal the expected text."""

    samples: int
    """Records answered."""
    before: float | None = None
    """Fraction of right answers before the first step."""
    after: float | None = None
    """Fraction of right answers after the last step."""


@dataclass(frozen=True, kw_only=True)
class AnswerScore:
    """The mean of another score over greedy answers to validation records."""

    name: str
    """rouge_l, or the name of the user's function."""
    samples: int
    """Records answered."""
    before: float | None = None
    """Before the first step."""
    after: float | None = None
    """After the last step."""
    file: str | None = None
    """Name of the file with the function; None: it is ftkit's."""
    sha256: str | None = None
    """Checksum of that file: it distinguishes functions of the same name."""

    @property
    def identity(self) -> tuple[str, str | None]:
        """Identity of this score among others."""
        return self.name, self.sha256

    @property
    def title(self) -> str:
        """Name of the score in tables."""
        return score_title(self.name, is_own=self.sha256 is not None)


@dataclass(frozen=True, kw_only=True)
class AnsweredExample:
    """One validation record with the answers of the model."""

    instruction: str
    """Instruction of the record; of a conversation, all messages before the answer."""
    input: str = ""
    """Further input of the record."""
    expected: str = ""
    """The answer in the data, as it is trained: compared with the model's by exact match."""
    before: str | None = None
    """The model's answer before training, with the white space and special tokens it has."""
    after: str | None = None
    """The model's answer after training."""
    media: list[ShownMedium] = field(default_factory=list)
    """What the record shows the model, at most `MOST_SHOWN`."""
    further_media: int = 0
    """Media of the record beyond these."""

    @property
    def media_texts(self) -> list[Pictured]:
        """Descriptions of the media, each with its picture."""
        texts = [Pictured(one.words, one.picture) for one in self.media]
        further = [Pictured(f"and {self.further_media:,} more", "")] if self.further_media else []
        return texts + further


def score_title(name: str, *, is_own: bool) -> str:
    """Return the name of a score in tables: of a metric of ftkit, or the user's function."""
    return name if is_own else METRICS.get(name, name)


@dataclass(frozen=True, kw_only=True)
class _OfTask:
    """A metric of a task or group."""

    task: str
    """Its name, as the harness has it."""
    metric: str
    """Metric: acc, exact_match, word_perplexity, ..."""
    filter: str | None = None
    """Filter that the answers went through first; None: none."""
    samples: int
    """Records of the task that were answered."""
    higher_is_better: bool | None = None
    """Which values are good; None: not known."""

    @property
    def name(self) -> str:
        """Metric and filter, as tables show them."""
        return self.metric if self.filter is None else f"{self.metric} ({self.filter})"


@dataclass(frozen=True, kw_only=True)
class TaskResult(_OfTask):
    """One metric of one model on an lm-evaluation-harness task or group."""

    value: float
    """The number."""
    stderr: float | None
    """Its standard error, where it is a mean."""


@dataclass(frozen=True, kw_only=True)
class TaskScore(_OfTask):
    """One metric of a task or group, before and after training."""

    before: float | None = None
    """Before the first step."""
    after: float | None = None
    """After the last step."""
    stderr: float | None = None
    """Standard error of the newer one, where it is a mean."""


def score_text(value: float) -> str:
    """Format a score: 0.1234 below 100, as the harness writes shares; four digits from there on."""
    return f"{value:.4f}" if abs(value) < 100 else f"{value:.4g}"


def with_results(
    scores: Sequence[TaskScore], results: Iterable[TaskResult], *, before: bool
) -> list[TaskScore]:
    """Return the scores with new results added, in the order of the results.

    Args:
        scores: so far; tasks that have no new result are left out.
        results: of the current model.
        before: whether they were measured before training.
    """
    known = {(score.task, score.metric, score.filter): score for score in scores}
    merged = []
    for result in results:
        score = known.get((result.task, result.metric, result.filter)) or TaskScore(
            task=result.task, metric=result.metric, filter=result.filter, samples=result.samples
        )
        # Count and error are of the newer model; its value goes into one of two fields.
        score = dataclasses.replace(
            score,
            samples=result.samples,
            higher_is_better=result.higher_is_better,
            stderr=result.stderr,
        )
        merged.append(
            dataclasses.replace(score, before=result.value)
            if before
            else dataclasses.replace(score, after=result.value)
        )
    return merged
