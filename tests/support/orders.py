"""Elastic orders from numbers."""

import numpy as np
import numpy.typing as npt

from ftkit.samples.sampler import ElasticOrder, EpochOrder, Position, RankLayout


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
) -> ElasticOrder:
    """The order of a run on one rank; see `ElasticOrder`."""
    lengths = np.asarray(lengths)
    return ElasticOrder(
        lengths,
        label_counts,
        epochs=EpochOrder([len(lengths)], [len(lengths)], seed),
        global_batch_size=global_batch_size,
        total_samples=total_samples,
        layout=RankLayout(micro_batch_size=micro_batch_size, rank=rank, world_size=world_size),
        start=Position(step=start_step, samples=start_samples),
    )
