"""Lengths of samples: what is said of them holds for each."""

import numpy as np
import pytest

from ftkit.data.inspection.command import MOST_BARS, lengths_of


@pytest.mark.parametrize("seed", range(20))
def test_bars_count_every_sample_once_and_are_few(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = (1 + rng.lognormal(rng.uniform(0, 9), rng.uniform(0, 2), rng.integers(1, 500))).astype(
        np.int32
    )
    limit = int(rng.integers(1, tokens.max() + 10))
    found = lengths_of(tokens, limit)
    assert found is not None and found.samples == len(tokens)
    assert (found.shortest, found.longest) == (tokens.min(), tokens.max())
    assert found.over == (tokens > limit).sum() == sum(bar.over for bar in found.bars)
    assert 0 < len(found.bars) <= MOST_BARS
    for bar in found.bars:
        inside = (tokens >= bar.first) & (tokens <= bar.last)
        assert bar.samples == inside.sum()
        assert bar.over == (inside & (tokens > limit)).sum()
    assert sum(bar.samples for bar in found.bars) == len(tokens)
    for percent, value in ((50, found.median), (90, found.p90), (99, found.p99)):
        assert (tokens <= value).mean() >= percent / 100
        assert value in tokens


def test_one_long_sample_leaves_the_bars_of_all_others_apart() -> None:
    found = lengths_of(np.array([*range(100, 300), 50_000], dtype=np.int32), 512)
    assert found is not None
    assert max(bar.last - bar.first for bar in found.bars[:-1]) == 19
    assert (found.bars[-1].last, found.bars[-1].over) == (50_000, 1)


def test_without_samples_there_are_no_lengths() -> None:
    assert lengths_of(np.array([], dtype=np.int32), 10) is None
