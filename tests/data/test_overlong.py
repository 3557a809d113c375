"""Samples that are longer than max_seq_length: cut, dropped or split, and counted."""

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import pytest
from tiny import make_tokenizer

from ftkit.data.dataset import DataSets, load_data
from ftkit.data.prepare import Counts, fit, prepare_records
from ftkit.data.records.record import Record
from ftkit.data.rendering import Example, Rendered, Renderer, Rendering
from ftkit.data.spec import Overlong
from ftkit.errors import UserError
from ftkit.models.chat_templates.template import ChatTemplate
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.recipe.recipe import Component

LONG = Rendered(list(range(10)), ((2, 5), (7, 10)))


def test_a_sample_that_fits_stays_as_it_is() -> None:
    for overlong in get_args(Overlong):
        assert fit(LONG, 10, overlong) == [LONG]


def test_a_long_sample_is_cut_with_its_spans_or_dropped() -> None:
    assert fit(LONG, 8, "truncate") == [Rendered(list(range(8)), ((2, 5), (7, 8)))]
    assert fit(LONG, 7, "truncate") == [Rendered(list(range(7)), ((2, 5),))]
    assert fit(LONG, 2, "truncate") == []
    assert fit(LONG, 9, "drop") == []


@pytest.mark.parametrize("max_seq_length", [2, 3, 5, 9, 10, 11])
@pytest.mark.parametrize("length", [2, 3, 9, 10, 11, 19, 20, 50])
def test_every_token_of_a_split_text_is_learned_once(length: int, max_seq_length: int) -> None:
    """But for the very first, which nothing predicts."""
    whole = Rendered(list(range(100, 100 + length)), ((0, length),))
    parts = fit(whole, max_seq_length, "split")
    learned = [t for ids, ((first, end),), *_ in parts for t in ids[max(first, 1) : end]]
    assert learned == whole.ids[1:]
    assert all(2 <= len(ids) <= max_seq_length for ids, *_ in parts)
    assert sum(part.label_count for part in parts) == length - 1
    for before, after in itertools.pairwise(parts):
        assert after.ids[0] == before.ids[-1]


class Numbers(Renderer):
    """A record has the length of its sample, or of several, or why there is none."""

    stop_ids = frozenset({0})

    @property
    def template(self) -> ChatTemplate:
        raise AssertionError

    def text(self, record: Record) -> str:
        raise AssertionError

    def render(self, records: Sequence[Record]) -> Iterator[Rendering]:
        for record in records:
            if "refused" in record:
                yield Rendering(refused=record["refused"])
            else:
                lengths = record["lengths"]
                yield Rendering(tuple(Rendered([1] * n, ((n // 2, n),)) for n in lengths))

    def example(self, record: Record) -> Example:
        raise AssertionError


def counts(records: list[Record], overlong: Overlong, min_tokens: int = 0) -> Counts:
    made = prepare_records(records, Numbers(), 10, overlong, lambda *_: None, min_tokens=min_tokens)
    assert min(made.samples.lengths + 1) >= min_tokens
    return made.counts


RECORDS: list[Record] = [
    {"lengths": [4]},
    {"lengths": [16, 6]},
    {"lengths": [40]},
    {"refused": "thinking changes earlier turns"},
    {"refused": "thinking changes earlier turns"},
    {"refused": "no output"},
]


@pytest.mark.parametrize(
    ("overlong", "expected"),
    [
        (
            "truncate",
            Counts(used=2, samples=3, truncated=1, skipped_no_labels=1, lost_tokens=46),
        ),
        ("drop", Counts(used=2, samples=2, dropped=2, lost_tokens=56)),
        ("split", Counts(used=3, samples=7, split=2)),
    ],
)
def test_used_cut_and_dropped_records_are_counted(overlong: Overlong, expected: Counts) -> None:
    found = counts(RECORDS, overlong)
    assert (found.records, found.skipped_empty_output) == (6, 1)
    assert found.refused == {"thinking changes earlier turns": 2}
    assert (found.longest_tokens, found.rendered_tokens) == (40, 66)
    for name in ("used", "samples", "truncated", "dropped", "split", "lost_tokens"):
        assert getattr(found, name) == getattr(expected, name), name
    assert found.lost_fraction == pytest.approx(expected.lost_tokens / 66)


@pytest.mark.parametrize(
    ("overlong", "least", "expected"),
    [
        ("truncate", 5, Counts(used=1, samples=2, truncated=1, short=1, lost_tokens=50)),
        ("truncate", 4, Counts(used=2, samples=3, truncated=1, lost_tokens=46)),
        ("drop", 5, Counts(used=1, samples=1, dropped=2, short=1, lost_tokens=60)),
        # 16 tokens become 10 and 7; the first half of 40 has no label.
        ("split", 8, Counts(used=2, samples=3, split=2, short=4, lost_tokens=4 + 7 + 6 + 4)),
    ],
)
def test_samples_with_too_few_tokens_are_left_out_and_counted(
    overlong: Overlong, least: int, expected: Counts
) -> None:
    found = counts(RECORDS, overlong, least)
    for name in ("used", "samples", "truncated", "dropped", "short", "split", "lost_tokens"):
        assert getattr(found, name) == getattr(expected, name), name


def test_counts_of_sources_add_up() -> None:
    total = counts(RECORDS, "drop") + counts(RECORDS[:3], "drop")
    assert (total.records, total.dropped, total.longest_tokens) == (9, 4, 40)
    assert total.refused == {"thinking changes earlier turns": 2}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(directory)
    return Tokenizer(directory)


def load(
    tmp_path: Path,
    tokenizer: Tokenizer,
    overlong: str,
    most: int,
    shortest: int = 1,
    **options: int,
) -> DataSets:
    records = [{"instruction": "red", "output": "blue " * n} for n in range(shortest, 101)]
    (tmp_path / "records.json").write_text(json.dumps(records))
    init_args = {"path": str(tmp_path / "records.json"), "overlong": overlong, **options}
    return load_data(Component(class_path="JSON", init_args=init_args), tokenizer, most)


def test_long_samples_of_a_recipe_are_dropped(tmp_path: Path, tokenizer: Tokenizer) -> None:
    cut = load(tmp_path, tokenizer, "truncate", 100)
    kept = load(tmp_path, tokenizer, "drop", 100)
    assert cut.counts["train"].truncated == kept.counts["train"].dropped > 0
    assert len(kept.train) == len(cut.train) - kept.counts["train"].dropped
    assert kept.train.lengths.max() < 100


def test_dropping_every_sample_is_refused_with_a_length_that_works(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with pytest.raises(UserError, match=r"data.overlong drops them") as error:
        load(tmp_path, tokenizer, "drop", 60, shortest=50)
    works = int(str(error.value).partition("--train.max_seq_length ")[2].split(",")[0])
    assert load(tmp_path, tokenizer, "drop", works, shortest=50).counts["train"].dropped == 0


def test_leaving_out_every_sample_is_refused_with_a_number_that_works(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    with pytest.raises(UserError, match=r"fewer tokens than data\.min_tokens") as error:
        load(tmp_path, tokenizer, "truncate", 100, min_tokens=101)
    works = int(str(error.value).partition("--data.min_tokens ")[2].split()[0])
    found = load(tmp_path, tokenizer, "truncate", 100, min_tokens=works)
    assert found.counts["train"].short > 0 and set(found.train.lengths + 1) == {works}
