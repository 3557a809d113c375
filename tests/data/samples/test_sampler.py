import numpy as np
import pytest
from orders import alpaca_like, make_elastic_order

from ftkit.data.samples import sampler
from ftkit.data.samples.layout import FILLER, IntArray, RankLayout
from ftkit.data.samples.sampler import ElasticOrder, EpochOrder, Position, permutation


def make_order(samples: int = 50, *, epochs: float = 1, **changes: int) -> ElasticOrder:
    lengths = alpaca_like(samples)
    settings = {
        "seed": 1,
        "global_batch_size": 12,
        "micro_batch_size": 2,
        "total_samples": int(epochs * samples),
    }
    return make_elastic_order(lengths, lengths // 2, **(settings | changes))


def all_ranks(world_size: int, **settings: int) -> list[ElasticOrder]:
    return [make_order(**settings, rank=r, world_size=world_size) for r in range(world_size)]


def padded_tokens(lengths: IntArray, micro_batches: list[list[int]]) -> int:
    real = [batch for batch in micro_batches if batch != [FILLER]]
    return sum(int(lengths[batch].max()) * len(batch) for batch in real)


@pytest.mark.parametrize("global_batch_size", [1, 7, 12, 50, 64, 130])
def test_every_epoch_takes_every_sample_exactly_once(global_batch_size: int) -> None:
    order = make_order(samples=50, epochs=3, global_batch_size=global_batch_size)
    taken = np.concatenate([order.samples(step) for step in range(order.total_steps)])
    for epoch in range(3):
        assert sorted(taken[50 * epoch : 50 * (epoch + 1)]) == list(range(50))


def test_epochs_and_seeds_give_different_orders() -> None:
    orders = [tuple(permutation(50, seed, epoch)) for seed in (1, 2, -1) for epoch in (0, 1)]
    assert len(set(orders)) == len(orders)


def test_the_order_of_a_seed_never_changes() -> None:
    """Pinned: a run started with one version of ftkit or numpy must go on with another."""
    assert permutation(10, seed=1337, epoch=0).tolist() == [7, 0, 4, 6, 8, 2, 9, 3, 5, 1]


@pytest.mark.parametrize("micro_batch_size", [1, 2, 5, 64])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_neither_ranks_nor_micro_batch_size_change_the_samples_of_a_step(
    world_size: int, micro_batch_size: int
) -> None:
    plain = make_order(epochs=2)
    for order in all_ranks(world_size, epochs=2, micro_batch_size=micro_batch_size):
        assert order.total_steps == plain.total_steps
        for step in range(plain.total_steps):
            assert order.samples(step).tolist() == plain.samples(step).tolist()
            assert order.divisors(step) == plain.divisors(step)


@pytest.mark.parametrize("global_batch_size", [1, 7, 12, 64, 130])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 5, 64])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ranks_together_run_exactly_the_samples_of_the_step_in_equally_many_micro_steps(
    world_size: int, micro_batch_size: int, global_batch_size: int
) -> None:
    orders = all_ranks(
        world_size,
        epochs=3,
        micro_batch_size=micro_batch_size,
        global_batch_size=global_batch_size,
    )
    for step in range(orders[0].total_steps):
        samples = orders[0].samples(step)
        micro_steps = -(-global_batch_size // (micro_batch_size * world_size))
        layouts = [order.micro_batches(step) for order in orders]
        assert {len(layout) for layout in layouts} == {micro_steps}
        batches = [batch for layout in layouts for batch in layout]
        assert all(1 <= len(batch) <= micro_batch_size for batch in batches)
        run = [sample for batch in batches if batch != [FILLER] for sample in batch]
        assert sorted(run) == sorted(samples)


@pytest.mark.parametrize("global_batch_size", [1, 7, 12, 64])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 5, 64])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_a_rank_gets_a_filler_only_if_there_are_fewer_samples_than_places(
    world_size: int, micro_batch_size: int, global_batch_size: int
) -> None:
    orders = all_ranks(
        world_size, micro_batch_size=micro_batch_size, global_batch_size=global_batch_size
    )
    for step in range(orders[0].total_steps):
        places = [batch for order in orders for batch in order.micro_batches(step)]
        samples = len(orders[0].samples(step))
        assert places.count([FILLER]) == max(0, len(places) - samples)
        if samples == global_batch_size:  # a shorter last step may run micro-steps of fillers
            for ranks in zip(*(order.micro_batches(step) for order in orders), strict=True):
                assert list(ranks) != [[FILLER]] * world_size


def test_with_one_sample_per_step_the_other_rank_runs_a_filler() -> None:
    orders = all_ranks(2, global_batch_size=1)
    batches = [order.micro_batches(0) for order in orders]
    assert sorted(batches) == [[[FILLER]], [orders[0].samples(0).tolist()]]
    assert orders[0].imbalance(0) == 2.0


@pytest.mark.parametrize(
    ("samples", "global_batch_size", "sizes"),
    [
        (50, 12, [12, 12, 12, 12, 2]),
        (48, 12, [12, 12, 12, 12]),
        (50, 64, [50]),
        (30, 64, [30]),
    ],
)
def test_only_the_last_step_is_shorter(
    samples: int, global_batch_size: int, sizes: list[int]
) -> None:
    order = make_order(samples, global_batch_size=global_batch_size)
    assert [len(order.samples(step)) for step in range(order.total_steps)] == sizes


def test_a_step_larger_than_the_data_set_takes_samples_of_several_epochs() -> None:
    order = make_order(samples=5, epochs=4, global_batch_size=12)
    counts = np.bincount(order.samples(0), minlength=5)
    assert counts.sum() == 12
    assert set(counts) == {2, 3}


def test_max_steps_ends_the_run_within_an_epoch() -> None:
    order = make_order(samples=50, epochs=5, total_samples=3 * 12)
    assert order.total_steps == 3
    with pytest.raises(AssertionError):
        order.samples(3)


def taken(order: ElasticOrder) -> list[list[int]]:
    return [order.samples(step).tolist() for step in range(order.start_step, order.total_steps)]


@pytest.mark.parametrize("total_samples", [150, 100, 7])
@pytest.mark.parametrize("global_batch_size", [1, 7, 12, 64])
def test_a_run_that_continues_at_any_step_takes_what_the_uninterrupted_one_takes(
    global_batch_size: int, total_samples: int
) -> None:
    settings = {"global_batch_size": global_batch_size, "total_samples": total_samples}
    whole = make_order(**settings)
    for step in range(whole.total_steps + 1):
        rest = make_order(**settings, start_step=step, start_samples=whole.consumed(step))
        assert rest.total_steps == whole.total_steps
        assert taken(rest) == taken(whole)[step:]
        assert [rest.micro_batches(s) for s in range(step, rest.total_steps)] == [
            whole.micro_batches(s) for s in range(step, whole.total_steps)
        ]


@pytest.mark.parametrize("later", [1, 5, 12, 64])
@pytest.mark.parametrize("earlier", [1, 7, 12])
def test_no_sample_is_lost_or_doubled_where_the_global_batch_size_changes(
    earlier: int, later: int
) -> None:
    whole = make_order(epochs=3, global_batch_size=earlier)
    for step in range(whole.total_steps + 1):
        position = whole.consumed(step)
        rest = make_order(
            epochs=3, global_batch_size=later, start_step=step, start_samples=position
        )
        assert rest.total_steps == step + -(-(150 - position) // later)
        both = [*taken(whole)[:step], *taken(rest)]
        assert np.array_equal(np.concatenate(both), np.concatenate(taken(whole)))


def test_the_position_after_each_step_is_the_samples_consumed() -> None:
    order = make_order(global_batch_size=12, start_step=3, start_samples=20)
    assert [order.consumed(step) for step in range(3, 7)] == [20, 32, 44, 50]
    assert order.total_steps == 6


def test_steps_before_the_start_raise() -> None:
    order = make_order(start_step=2, start_samples=24)
    for ask in (order.samples, order.consumed):
        with pytest.raises(AssertionError):
            ask(1)


def test_starting_late_costs_no_more_than_starting_early(monkeypatch: pytest.MonkeyPatch) -> None:
    epochs = []
    monkeypatch.setattr(
        sampler,
        "permutation",
        lambda *args: (epochs.append(args[2]), permutation(*args))[1],  # type: ignore[func-returns-value]
    )
    order = make_order(epochs=1e6, start_step=1_000_000, start_samples=12_000_005)
    order.micro_batches(1_000_000)
    assert epochs == [12_000_005 // 50]


@pytest.mark.parametrize("step", [1, 1_000_000])
def test_a_late_step_costs_no_more_than_an_early_one(
    monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    order = make_order(samples=50, epochs=10_000_000)
    epochs = []
    monkeypatch.setattr(
        sampler,
        "permutation",
        lambda *args: (epochs.append(args[2]), permutation(*args))[1],  # type: ignore[func-returns-value]
    )
    order.micro_batches(step)
    order.divisors(step)["label_tokens"]
    assert len(epochs) == 1


def test_a_whole_run_makes_one_permutation_per_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    order = make_order(samples=50, epochs=7)
    epochs = []
    monkeypatch.setattr(
        sampler,
        "permutation",
        lambda *args: (epochs.append(args[2]), permutation(*args))[1],  # type: ignore[func-returns-value]
    )
    for step in range(order.total_steps):
        order.micro_batches(step)
        order.divisors(step)["label_tokens"]
    assert epochs == list(range(7))


@pytest.mark.parametrize(
    ("world_size", "micro_batch_size", "bound"),
    [(2, 4, 1.1), (2, 1, 1.02), (4, 1, 1.05), (4, 2, 1.15), (8, 1, 1.2), (3, 4, 1.05)],
)
def test_ranks_carry_nearly_equal_tokens(
    world_size: int, micro_batch_size: int, bound: float
) -> None:
    """With at least eight micro-steps per step, or places to spare."""
    order = make_order(
        samples=6400,
        global_batch_size=64,
        micro_batch_size=micro_batch_size,
        world_size=world_size,
    )
    assert max(order.imbalance(step) for step in range(100)) < bound


def test_imbalance_is_the_fullest_rank_over_the_mean() -> None:
    order = make_order(world_size=2)
    ranks = all_ranks(2)
    lengths = alpaca_like(50)
    tokens = [lengths[np.concatenate(rank.micro_batches(0)).astype(int)].sum() for rank in ranks]
    assert order.imbalance(0) == pytest.approx(max(tokens) / np.mean(tokens))
    assert make_order(world_size=1).imbalance(0) == 1.0


def test_little_is_padded() -> None:
    lengths = alpaca_like(6400)
    order = make_order(samples=6400, global_batch_size=64, micro_batch_size=4)
    real = sorted_padding = random_padding = 0
    for step in range(100):
        samples = order.samples(step)
        real += lengths[samples].sum()
        sorted_padding += padded_tokens(lengths, order.micro_batches(step))
        random_padding += padded_tokens(lengths, samples.reshape(-1, 4).tolist())
    assert 1 - real / sorted_padding < 0.1
    assert 1 - real / random_padding > 0.35


@pytest.mark.parametrize(("micro_batch_size", "world_size"), [(4, 1), (4, 2), (5, 3), (1, 2)])
def test_the_largest_micro_batches_come_first(micro_batch_size: int, world_size: int) -> None:
    lengths = alpaca_like(640)
    orders = all_ranks(
        world_size, samples=640, global_batch_size=64, micro_batch_size=micro_batch_size
    )
    for step in range(10):
        largest = [
            max(padded_tokens(lengths, [batch]) for batch in ranks)
            for ranks in zip(*(order.micro_batches(step) for order in orders), strict=True)
        ]
        assert largest == sorted(largest, reverse=True)


def test_the_longest_sequence_is_in_the_first_micro_step_where_all_places_are_full() -> None:
    lengths = alpaca_like(640)
    order = make_order(samples=640, global_batch_size=64, micro_batch_size=4)
    for step in range(10):
        first = order.micro_batches(step)[0]
        assert lengths[first].max() == lengths[order.samples(step)].max()


def test_places_to_spare_shorten_the_micro_batches_of_long_sequences() -> None:
    lengths = np.array([500, 100, 100, 100, 100, 100, 100, 100])
    batches = [
        make_elastic_order(
            lengths,
            lengths,
            seed=1,
            global_batch_size=8,
            micro_batch_size=8,
            total_samples=8,
            rank=rank,
            world_size=2,
        ).micro_batches(0)
        for rank in range(2)
    ]
    assert sorted(lengths[micro_batch].tolist() for [micro_batch] in batches) == [[100] * 7, [500]]


def test_a_million_samples_are_sampled_quickly() -> None:
    order = make_order(samples=1_000_000, global_batch_size=4096, micro_batch_size=3, world_size=7)
    assert len(order.samples(200)) == 4096
    assert order.imbalance(200) < 1.02


# --- Sources and their weights ------------------------------------------------------------------


def epochs_of(order: EpochOrder, count: int) -> list[list[int]]:
    return [order.of(epoch).tolist() for epoch in range(count)]


@pytest.mark.parametrize("seed", [1, 2])
def test_sources_that_are_taken_whole_have_the_order_of_one(seed: int) -> None:
    together = EpochOrder([50], [50], seed)
    apart = EpochOrder([20, 5, 25], [20, 5, 25], seed)
    assert epochs_of(apart, 3) == epochs_of(together, 3)


@pytest.mark.parametrize("takes", [[10, 50], [40, 7], [20, 49], [1, 150], [60, 25]])
def test_an_epoch_takes_as_many_of_each_source_as_it_should(takes: list[int]) -> None:
    order = EpochOrder([20, 50], takes, seed=1)
    assert order.samples == sum(takes)
    for samples in epochs_of(order, 5):
        assert len(samples) == order.samples
        assert order.sources(np.array(samples)).tolist() == takes


@pytest.mark.parametrize("take", [1, 7, 19, 21, 40, 55])
def test_a_source_is_walked_through_from_epoch_to_epoch_without_repetition(take: int) -> None:
    """Each sample as often as any other, but for the walk that is on its way."""
    order = EpochOrder([20, 10], [take, 10], seed=3)
    taken = np.zeros(30, dtype=int)
    for epoch in range(12):
        taken += np.bincount(order.of(epoch), minlength=30)
        assert taken[:20].max() - taken[:20].min() <= 1
        assert set(taken[20:]) == {epoch + 1}


def test_walks_and_epochs_differ_from_each_other() -> None:
    order = EpochOrder([30, 30], [60, 60], seed=1)
    first, second = (order.of(epoch) for epoch in range(2))
    assert first.tolist() != second.tolist()
    of_source = [samples[samples < 30].tolist() for samples in (first, second)]
    others = [(samples[samples >= 30] - 30).tolist() for samples in (first, second)]
    assert len({tuple(samples) for samples in (*of_source, *others)}) == 4


def test_the_order_of_a_mixture_never_changes() -> None:
    """Pinned: a run started with one version of ftkit must go on with another."""
    order = EpochOrder([4, 3, 2], [2, 3, 4], seed=1337)
    assert epochs_of(order, 2) == [[8, 0, 6, 7, 7, 4, 5, 8, 3], [6, 7, 8, 5, 2, 1, 4, 7, 8]]


def mixed(**changes: int) -> ElasticOrder:
    lengths = alpaca_like(50)
    return ElasticOrder(
        lengths,
        {"label_tokens": lengths // 2},
        epochs=EpochOrder([30, 20], [15, 60], seed=1),
        global_batch_size=changes.get("global_batch_size", 12),
        total_samples=3 * 75,
        layout=RankLayout(
            micro_batch_size=changes.get("micro_batch_size", 2),
            rank=changes.get("rank", 0),
            world_size=changes.get("world_size", 1),
        ),
        start=Position(step=changes.get("start_step", 0), samples=changes.get("start_samples", 0)),
    )


def test_a_position_in_a_mixture_is_one_integer() -> None:
    whole = np.concatenate(taken(mixed()))
    assert len(whole) == 3 * 75
    for later in (5, 12, 64):
        rest = mixed(global_batch_size=later, start_step=7, start_samples=84)
        assert np.array_equal(np.concatenate(taken(rest)), whole[84:])


@pytest.mark.parametrize("micro_batch_size", [1, 5, 64])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_samples_of_a_mixed_step_are_the_same_on_every_layout(
    world_size: int, micro_batch_size: int
) -> None:
    plain = mixed()
    ranks = [
        mixed(rank=rank, world_size=world_size, micro_batch_size=micro_batch_size)
        for rank in range(world_size)
    ]
    for step in range(plain.total_steps):
        run = [i for rank in ranks for batch in rank.micro_batches(step) for i in batch]
        assert sorted(i for i in run if i != FILLER) == sorted(plain.samples(step))
        assert plain.sources(step).sum() == len(plain.samples(step))
