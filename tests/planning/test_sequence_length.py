"""The longest sample is the one that tokenising everything would find."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny import WORDS, make_tokenizer

from ftkit.data.records.record import Record
from ftkit.data.rendering import InstructionRenderer, Rendering
from ftkit.models.chat_templates.prompt_styles import resolve_prompt_style
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.planning import sequence_length as longest
from ftkit.planning.sequence_length import longest_sample

STYLE = resolve_prompt_style("alpaca")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory)
    return Tokenizer(directory)


def records(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Some answers are words of the tokenizer, others take a token for every byte."""
    rng = random.Random(seed)
    return [
        {
            "instruction": " ".join(rng.choices(WORDS, k=rng.randint(1, 60))),
            "input": rng.choice(["", "xyz" * rng.randint(1, 30)]),
            "output": rng.choice([" ".join(rng.choices(WORDS, k=200)), "é漢字" * 50, "x", "  "]),
        }
        for _ in range(count)
    ]


def lengths(found: list[dict[str, str]], tokenizer: Any, most: int, mask: bool) -> list[int]:
    """Length of every sample, as training makes them."""
    whole = [
        sample
        for rendering in renderer(tokenizer, mask).render(found)
        for sample in rendering.samples
    ]
    return [
        min(len(ids), most)
        for ids, ((first, _),), *_ in whole
        if max(first, 1) < min(len(ids), most)
    ]


def renderer(tokenizer: Any, mask: bool) -> InstructionRenderer:
    return InstructionRenderer(tokenizer, STYLE, mask_prompt=mask)


@pytest.mark.parametrize("most", [100_000, 400, 150])
@pytest.mark.parametrize("mask", [False, True])
def test_the_longest_sample_is_that_of_training(
    tokenizer: Tokenizer, most: int, mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(longest, "_AT_ONCE", 8)
    found = records(200)
    expected = lengths(found, tokenizer, most, mask)
    known = longest_sample(found, renderer(tokenizer, mask), max_seq_length=most)
    if not expected:
        assert known is None
        return
    assert known is not None and known.is_exact
    assert known.at_most == max(expected)
    assert 0 < known.label_tokens < known.at_least
    bound = longest_sample(found, renderer(None, mask), max_seq_length=most, by_bytes=True)
    assert bound is not None and max(expected) <= bound.at_most <= most and bound.at_least == 0


def test_few_samples_are_tokenised(tokenizer: Tokenizer) -> None:
    tokenised = 0

    class Counted(InstructionRenderer):
        def render(self, records: Sequence[Record]) -> Iterator[Rendering]:
            nonlocal tokenised
            tokenised += len(records)
            return super().render(records)

    counted = Counted(tokenizer, STYLE, mask_prompt=False)
    short = [{"instruction": "red", "output": "blue"} for _ in range(2000)]
    long = {"instruction": "red", "output": "漢字" * 500}
    found = longest_sample([*short, long], counted, max_seq_length=100_000)
    assert found is not None and found.is_exact and found.at_most > 2000
    assert tokenised < 500
    tokenised = 0
    cut = longest_sample(records(2000), counted, max_seq_length=64)
    assert cut is not None and cut.at_most == 64 and tokenised < 500


def test_of_very_much_text_a_part_is_tokenised_and_the_rest_estimated(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(longest, "_AT_ONCE", 10)
    monkeypatch.setattr(longest, "MOST_BYTES", 10_000)
    found = [record for record in records(500) if "cat" in record["output"]]
    part = longest_sample(found, renderer(tokenizer, False), max_seq_length=100_000)
    assert part is not None and not part.is_exact
    expected = max(lengths(found, tokenizer, 100_000, False))
    assert part.at_least <= expected <= part.at_most


def test_without_an_answer_there_is_no_sample(tokenizer: Tokenizer) -> None:
    nothing = [{"instruction": "red", "output": " "}]
    for by_bytes in (False, True):
        found = longest_sample(
            nothing, renderer(tokenizer, False), max_seq_length=64, by_bytes=by_bytes
        )
        assert found is None


def test_a_prompt_that_fills_the_sample_is_not_trained_on(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    found = [{"instruction": "zz" * 300, "output": "red"}, {"instruction": "red", "output": "sun"}]
    masked = longest_sample(found, renderer(tokenizer, True), max_seq_length=300)
    assert masked is not None and masked.at_most < 300
    whole = longest_sample(found, renderer(tokenizer, False), max_seq_length=300)
    assert whole is not None and whole.at_most == 300


@pytest.mark.parametrize("weight", [1, 0.5])
def test_weights_of_shorter_samples_are_known_too(tokenizer: Tokenizer, weight: float) -> None:
    short = {"instruction": "red", "output": "blue"} | ({"weight": weight} if weight != 1 else {})
    found = [{"instruction": "red", "output": "blue " * 20}, short]
    longest_one = longest_sample(found, renderer(tokenizer, False), max_seq_length=64)
    assert longest_one is not None and longest_one.weighted == (weight != 1)
