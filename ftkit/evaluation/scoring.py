"""Metrics of answers: exact match, ROUGE-L, and metrics of one's own."""

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import regex

from ftkit.recipe.own_metric import LoadedMetric, OwnMetric

EXACT_MATCH = "exact_match"
DEFAULT_RECORDS = 100
"""Records to answer if no number is given."""
_WITHOUT_SPACES = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
# A character of these scripts with its marks, or a run of other letters, marks and digits. V1 of
# the package regex has differences of sets (--), which re lacks.
_WORD = regex.compile(
    rf"[{_WITHOUT_SPACES}]\p{{M}}*|[[\p{{L}}\p{{M}}\p{{N}}]--[{_WITHOUT_SPACES}]]+", regex.V1
)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A mean score of the answers to the first records."""

    name: str
    records: int
    """Number of records to score."""
    score: Callable[[str, str, Mapping[str, Any], int], float]
    """Takes an answer, the expected one, the record and its index."""
    own: OwnMetric | None = None
    """The user's function that computes it; None: it is one of ftkit's."""

    @property
    def is_exact_match(self) -> bool:
        """True if this is ftkit's share of right answers."""
        return self.name == EXACT_MATCH and self.own is None


class Score(NamedTuple):
    """A metric with its value."""

    metric: Metric
    mean: float
    records: int
    """Records that were scored; fewer than the metric takes if there were fewer."""


class Scoring:
    """The metrics of an evaluation, and how many answers they need."""

    def __init__(
        self,
        built_in: Mapping[str, int],
        *,
        own: Sequence[OwnMetric],
        max_new_tokens: int,
        executes: bool = True,
    ) -> None:
        """Choose the metrics.

        Args:
            built_in: records to score by each of ftkit's metrics.
            own: metrics of one's own, for as many records as the others, or 100.
            max_new_tokens: most tokens of an answer that is scored as a whole.
            executes: whether this rank computes metrics of one's own; the others answer alone.

        Raises:
            UserError: a metric of one's own cannot be executed.
        """
        own_records = (max(built_in.values()) or DEFAULT_RECORDS) if own else 0
        self.exact_match = built_in[EXACT_MATCH]
        """Records to score by exact match."""
        self.records = max(*built_in.values(), own_records)
        """Records to answer."""
        # Exact match needs an answer up to its first mistake, the others need all of it.
        whole = (records for name, records in built_in.items() if name != EXACT_MATCH)
        self.whole_records = max(*whole, own_records)
        """Records whose answers are generated to their end."""
        self.max_new_tokens = max_new_tokens
        """Most tokens of an answer that is generated to its end."""
        metrics = [
            Metric(name=name, records=records, score=_SCORES[name])
            for name, records in built_in.items()
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


# Our own few lines: the package rouge-score brings nltk and absl for a stemmer that is not used.
# 20,000 random pairs of ASCII texts have the same numbers in both.
def rouge_l(answer: str, expected: str) -> float:
    """ROUGE-L: the F-measure of the longest common subsequence of words, from 0 to 1.

    Each text counts as one sentence. For ASCII texts this is rougeL of the package rouge-score,
    without a stemmer, number by number. There everything but a-z and 0-9 separates words, so that a
    text in another alphabet scores 0. Here letters, marks and digits of every alphabet form words,
    and in scripts without spaces between words each character is one.
    """
    given, wanted = _words(answer), _words(expected)
    common = _longest_common_subsequence(given, wanted)
    return 2 * common / (len(given) + len(wanted)) if common else 0.0


def _words(text: str) -> list[str]:
    # Full-width letters and ligatures then equal their plain forms.
    return _WORD.findall(unicodedata.normalize("NFKC", text.lower()))


def _longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Length of the longest common subsequence, in one row of its table at a time."""
    row = [0] * (len(second) + 1)
    for word in first:
        before = row
        row = [0]
        for place, other in enumerate(second):
            row.append(before[place] + 1 if word == other else max(before[place + 1], row[place]))
    return row[-1]


_SCORES: dict[str, Callable[[str, str, Mapping[str, Any], int], float]] = {
    EXACT_MATCH: _equal,
    "rouge_l": _rouge_l,
}
"""Functions of ftkit's metrics, `ftkit.recipe.recipe.METRICS`."""
