"""ROUGE-L: the numbers of the package rouge-score, and words of alphabets that it does not know."""

import pytest

from ftkit.evaluation.scoring import rouge_l


@pytest.mark.parametrize(
    ("answer", "expected", "score"),
    [
        ("The cat sat on the mat.", "A cat was sitting on the mat!", 0.6153846153846153),
        ("it's 1,000_times better", "It is 1000 times better", 0.5454545454545454),
        ("the gunman kill police", "police kill the gunman", 0.5),
        ("police killed the gunman", "police kill the gunman", 0.75),
        ("a b c d", "d c b a", 0.25),
        ("one\ttwo\n three", "one - two", 0.8),
        ("YES", " yes? ", 1.0),
        ("no", "yes", 0.0),
        ("", "yes", 0.0),
        ("yes", "", 0.0),
        ("?!", "?!", 0.0),
    ],
)
def test_ascii_texts_have_the_score_of_rouge_score(
    answer: str, expected: str, score: float
) -> None:
    """rougeL without a stemmer, its F-measure: written down from rouge-score 0.1.2."""
    assert rouge_l(answer, expected) == pytest.approx(score, abs=1e-12)
    assert rouge_l(expected, answer) == pytest.approx(score, abs=1e-12)


@pytest.mark.parametrize(
    ("answer", "expected", "score"),
    [
        ("Größe über alles", "Größe unter allem", 1 / 3),  # gr and e are no words
        ("Gro\u0308ße", "größe", 1.0),  # a letter and its marks, or both in one character
        ("мама мыла раму", "Мама мыла окно", 2 / 3),
        ("लड़का खाना खाता है", "लड़का खाना बनाता है", 3 / 4),
        ("나는 고양이를 좋아한다", "나는 개를 좋아한다", 2 / 3),
        ("我喜欢猫。", "我喜欢狗", 3 / 4),
        ("猫が好き", "犬が好き", 3 / 4),
        ("กินข้าว", "กินน้ำ", 2 * 3 / (5 + 4)),
        ("我用 Python3", "你用 python3", 2 / 3),
        ("\uff12\uff10", "20", 1.0),
    ],
)
def test_words_of_every_alphabet_count(answer: str, expected: str, score: float) -> None:
    assert rouge_l(answer, expected) == pytest.approx(score)
