"""Duplicates are samples with the same tokens: no more and no fewer."""

from collections.abc import Sequence

import numpy as np
import pytest

from ftkit.data.inspection.findings import find_duplicates
from ftkit.data.rendering import Rendered
from ftkit.data.samples.sample_set import SampleSet

Tokens = tuple[int, ...]


def sample_set(samples: Sequence[Tokens], first_trained: int = 0) -> SampleSet:
    return SampleSet.of([Rendered(list(ids), ((first_trained, len(ids)),)) for ids in samples])


@pytest.mark.parametrize("seed", range(10))
def test_duplicates_are_those_of_a_set_of_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)

    def draw(count: int) -> list[Tokens]:
        return [tuple(rng.integers(0, 3, rng.integers(2, 8)).tolist()) for _ in range(count)]

    train, val = [draw(60), draw(40)], [draw(10), draw(20)]
    found = find_duplicates([sample_set(one) for one in train], [sample_set(one) for one in val])
    in_train, in_val = [*train[0], *train[1]], [*val[0], *val[1]]
    assert found.train == len(in_train) - len(set(in_train))
    assert found.val == len(in_val) - len(set(in_val))
    assert found.val_in_train == sum(ids in set(in_train) for ids in in_val)
    for source, number in found.val_in_train_places:
        assert val[source][number] in set(in_train)
    for source, number in found.train_places:
        assert in_train.count(train[source][number]) > 1


def test_samples_that_differ_in_one_token_are_not_duplicates() -> None:
    whole = tuple(range(200))
    others = [(*whole[:i], 999, *whole[i + 1 :]) for i in range(200)]
    found = find_duplicates([sample_set([whole, *others])], [sample_set([(*whole, 7)])])
    assert (found.train, found.val, found.val_in_train) == (0, 0, 0)


def test_what_is_trained_of_them_does_not_matter() -> None:
    found = find_duplicates([sample_set([(1, 2, 3)])], [sample_set([(1, 2, 3)], first_trained=2)])
    assert found.val_in_train == 1


def test_data_without_validation_samples_have_those_of_train() -> None:
    found = find_duplicates([sample_set([(1, 2), (1, 2), (1, 2)])], [sample_set([])])
    assert (found.train, found.val, found.val_in_train) == (2, 0, 0)


def test_a_pair_repeats_another_if_both_answers_do() -> None:
    prompt, first, second = [1, 2], [3, 4], [5]
    pairs = [(first, second), (second, first), (first, second), (first, first)]
    ids = [[*prompt, *answer] for pair in pairs for answer in pair]
    rendered = [Rendered(one, ((2, len(one)),)) for one in ids]
    samples = SampleSet.of(rendered, per_sample=2)
    found = find_duplicates([samples], [samples])
    assert (found.train, found.train_places) == (1, ((0, 2),))
    assert (found.val, found.val_in_train) == (1, 4)
