"""ROUGE-L: how much of two texts is common to both, in the same order.

The F-measure of the longest common subsequence of words, each text taken as one sentence: that of
the package rouge-score (rougeL, without a stemmer), number by number, where texts are of ASCII
characters. There, all but a-z and 0-9 separates words, so that a text in another alphabet has none
and its score is 0. Here, letters, marks and digits of every alphabet make words; in scripts without
spaces between words each character is one.
"""

import unicodedata
from collections.abc import Sequence

import regex

_WITHOUT_SPACES = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
_WORD = regex.compile(
    rf"[{_WITHOUT_SPACES}]\p{{M}}*|[[\p{{L}}\p{{M}}\p{{N}}]--[{_WITHOUT_SPACES}]]+", regex.V1
)


def rouge_l(answer: str, expected: str) -> float:
    """The score of an answer, from 0 to 1; 0 where one of the texts has no words."""
    given, wanted = _words(answer), _words(expected)
    common = _longest_common_subsequence(given, wanted)
    return 2 * common / (len(given) + len(wanted)) if common else 0.0


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text.lower()))


def _longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Its length."""
    row = [0] * (len(second) + 1)
    for word in first:
        before = row
        row = [0]
        for place, other in enumerate(second):
            row.append(before[place] + 1 if word == other else max(before[place + 1], row[place]))
    return row[-1]
