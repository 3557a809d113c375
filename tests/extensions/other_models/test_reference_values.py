"""Log-probabilities of a reference are kept by sample, whatever the data sets that it is in."""

from pathlib import Path

import numpy as np
import pytest

from ftkit.data.rendering import Rendered
from ftkit.data.samples.sample_set import JoinedSamples, SampleSet
from ftkit.extensions.other_models.reference_values import (
    ReferenceCache,
    ReferenceValues,
    read_values,
    write_values,
)

MODEL: dict[str, object] = {"model": "a", "precision": "32-true"}


def pairs(count: int, first: int) -> SampleSet:
    """Pairs of different tokens."""
    sequences = [Rendered([first + i, 7, 8, 9], ((2, 4),)) for i in range(2 * count)]
    return SampleSet.of(sequences, per_sample=2)


ONE, TWO = pairs(3, 10), pairs(4, 100)


def filled(*numbers: int) -> ReferenceValues:
    """Values of some samples of both sets, interleaved: the number of each and of its half."""
    values = ReferenceValues([ONE, TWO])
    chosen = np.array(numbers, dtype=np.int64)
    values.put(JoinedSamples.interleaved([ONE, TWO]), chosen, chosen[:, None] + [0.25, 0.5])
    return values


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ReferenceCache:
    monkeypatch.setenv("FTKIT_CACHE_DIR", str(tmp_path))
    return ReferenceCache(MODEL)


def test_a_sample_has_its_value_in_every_data_set_that_it_is_in() -> None:
    joined = JoinedSamples.interleaved([ONE, TWO])
    values = filled(*range(7))
    assert values.of(joined)[:, 0].tolist() == [n + 0.25 for n in range(7)]
    for one in (ONE, TWO):
        numbers = np.flatnonzero([joined.sets[source] is one for source in joined.sources])
        assert values.of(one)[:, 1].tolist() == [n + 0.5 for n in numbers]
    first = JoinedSamples.one_after_another([TWO, ONE], most=2)
    assert values.of(first).tolist() == [*values.of(TWO)[:2].tolist(), *values.of(ONE)[:2].tolist()]


def test_samples_without_a_value_are_missing() -> None:
    joined = JoinedSamples.interleaved([ONE, TWO])
    assert filled(1, 4).missing(joined, np.array([4, 2, 1, 6])).tolist() == [2, 6]


def test_a_file_of_a_checkpoint_gives_what_is_not_known(tmp_path: Path) -> None:
    file = tmp_path / "reference.safetensors"
    write_values(filled(0, 3), file)
    values = filled(5)
    values.add(read_values(file))
    assert values.missing(JoinedSamples.interleaved([ONE, TWO]), np.arange(7)).tolist() == [
        1, 2, 4, 6,
    ]  # fmt: skip
    assert read_values(tmp_path / "none") == {}


def test_the_cache_grows_with_what_runs_compute(cache: ReferenceCache) -> None:
    cache.keep(filled(0, 1, 2))
    cache.keep(filled(5))
    values = ReferenceValues([TWO, ONE])
    cache.load_into(values)
    joined = JoinedSamples.interleaved([ONE, TWO])
    assert values.missing(joined, np.arange(7)).tolist() == [3, 4, 6]
    assert values.of(joined)[5].tolist() == [5.25, 5.5]


def test_another_model_or_precision_has_values_of_its_own(cache: ReferenceCache) -> None:
    cache.keep(filled(*range(7)))
    for change in ({"model": "b"}, {"precision": "bf16-mixed"}):
        values = ReferenceValues([ONE])
        ReferenceCache(MODEL | change).load_into(values)
        assert np.isnan(values.of(ONE)).all()


def test_a_damaged_file_counts_as_none(cache: ReferenceCache, tmp_path: Path) -> None:
    cache.keep(filled(*range(7)))
    for file in (tmp_path / "reference").iterdir():
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content)
    values = ReferenceValues([ONE, TWO])
    cache.load_into(values)
    assert np.isnan(values.of(ONE)).all() and np.isnan(values.of(TWO)).all()
    cache.keep(filled(*range(7)))
    cache.load_into(values)
    assert not np.isnan(values.of(ONE)).any()
