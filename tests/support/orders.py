"""Elastic orders from numbers, and lengths like those of a data set."""

import numpy as np
import numpy.typing as npt

from ftkit.data.samples.layout import IntArray, RankLayout
from ftkit.data.samples.sampler import ElasticOrder, EpochOrder, Position


def alpaca_like(samples: int, seed: int = 0) -> IntArray:
    """Lengths with the mean (133), the tail and the cap (512) of Alpaca."""
    spread = 0.9
    normal = np.random.default_rng(seed).normal(np.log(141) - spread**2 / 2, spread, samples)
    return np.clip(np.exp(normal).astype(np.int64), 8, 512)


def make_elastic_order(
    lengths: npt.ArrayLike,
    label_counts: npt.ArrayLike,
    *,
    seed: int,
    global_batch_size: int,
    micro_batch_size: int,
    total_samples: int,
    start_step: int = 0,
    start_samples: int = 0,
    rank: int = 0,
    world_size: int = 1,
    micro_batch_tokens: int | None = None,
) -> ElasticOrder:
    """The order of a run on one rank, in rows without padding if their tokens are bounded.

    See `ElasticOrder`.
    """
    lengths = np.asarray(lengths)
    return ElasticOrder(
        lengths,
        {"label_tokens": label_counts},
        epochs=EpochOrder([len(lengths)], [len(lengths)], seed),
        global_batch_size=global_batch_size,
        total_samples=total_samples,
        layout=RankLayout(
            micro_batch_size=micro_batch_size,
            micro_batch_tokens=micro_batch_tokens,
            padding_free=micro_batch_tokens is not None,
            rank=rank,
            world_size=world_size,
        ),
        start=Position(step=start_step, samples=start_samples),
    )
