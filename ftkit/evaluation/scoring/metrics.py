"""Metrics of answers: which are asked for, and for how many records."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ftkit.evaluation.scoring.rouge import rouge_l
from ftkit.recipe.own_metric import LoadedMetric, OwnMetric

EXACT_MATCH = "exact_match"
DEFAULT_RECORDS = 100
"""Answered where nobody has said how many."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A score of answers: its mean over the first so many records."""

    name: str
    records: int
    score: Callable[[str, str, Mapping[str, Any], int], float]
    """Of an answer, given what is expected, the record, and its place."""
    own: OwnMetric | None = None
    """Whose function it is; None: ftkit's."""

    @property
    def is_exact_match(self) -> bool:
        """Whether it is the share of right answers."""
        return self.name == EXACT_MATCH and self.own is None


class Score(NamedTuple):
    """What came out for a metric."""

    metric: Metric
    mean: float
    records: int
    """Those that there were."""


class Scoring:
    """The metrics of an evaluation."""

    def __init__(
        self,
        *,
        exact_match: int,
        rouge_l: int,
        own: Sequence[OwnMetric],
        max_new_tokens: int,
        executes: bool = True,
    ) -> None:
        """Prepare.

        Args:
            exact_match: records whose answers are compared with what is expected.
            rouge_l: records whose answers are compared by ROUGE-L.
            own: metrics of one's own, for as many records as the others, or 100.
            max_new_tokens: of an answer that is looked at as a whole.
            executes: whether metrics of one's own are computed here; else the answers are given
                for them alone.

        Raises:
            UserError: a metric of one's own cannot be executed.
        """
        own_records = (max(exact_match, rouge_l) or DEFAULT_RECORDS) if own else 0
        self.exact_match = exact_match
        """Records whose answers have to be right."""
        self.records = max(exact_match, rouge_l, own_records)
        """That are answered."""
        self.whole_records = max(rouge_l, own_records)
        """Whose answers are of interest to their end."""
        self.max_new_tokens = max_new_tokens
        """Of such an answer."""
        metrics = [
            Metric(name=EXACT_MATCH, records=exact_match, score=_equal),
            Metric(name="rouge_l", records=rouge_l, score=_rouge_l),
        ]
        for metric in map(LoadedMetric, own if executes else ()):
            metrics.append(
                Metric(
                    name=metric.metric.function,
                    records=own_records,
                    score=metric.score,
                    own=metric.metric,
                )
            )
        self.metrics = tuple(metric for metric in metrics if metric.records)


def _equal(answer: str, expected: str, _: object, __: int) -> float:
    return float(answer == expected)


def _rouge_l(answer: str, expected: str, _: object, __: int) -> float:
    return rouge_l(answer, expected)
