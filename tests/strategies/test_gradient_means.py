"""Means of gradients over ranks, here threads, taken once the passes of a step are done."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn as nn
from torch import Tensor

from ftkit.recipe.devices import Devices
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.plan import make_plan
from ftkit.strategies import gradient_means
from ftkit.strategies.gradient_means import average_gradients
from ftkit.strategies.strategy import make_strategy

RANKS = 3
SHAPES = [(5,), (3, 4), (2, 2), (1,)]


def averaged(of_ranks: list[list[Tensor | None]]) -> list[list[Tensor | None]]:
    """Gradients of each rank afterwards, from those before."""
    sent: list[Tensor] = [torch.empty(0)] * len(of_ranks)
    barrier = threading.Barrier(len(of_ranks))

    def on_rank(rank: int) -> list[Tensor | None]:
        def send(values: Tensor) -> None:
            sent[rank] = values.clone()
            barrier.wait(60)
            values.copy_(torch.stack(sent).sum(0))
            barrier.wait(60)

        known = [g for own in of_ranks for g in own if g is not None]
        parameters = []
        for shape, gradient in zip(SHAPES, of_ranks[rank], strict=True):
            parameters.append(nn.Parameter(torch.zeros(shape, dtype=known[0].dtype)))
            parameters[-1].grad = None if gradient is None else gradient.clone()
        average_gradients(parameters, send, len(of_ranks))
        return [parameter.grad for parameter in parameters]

    with ThreadPoolExecutor(len(of_ranks)) as pool:
        return list(pool.map(on_rank, range(len(of_ranks))))


def drawn(dtype: torch.dtype) -> list[list[Tensor | None]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
        for _ in range(RANKS)
    ]


@pytest.mark.parametrize("at_once", [1, 4, 7, 2**24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_in_float32_however_they_are_cut(
    dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_means, "_AT_ONCE", at_once)
    before = drawn(dtype)
    for found in averaged(before):
        for gradient, *of_ranks in zip(found, *before, strict=True):
            wide = torch.stack([one.float() for one in of_ranks if one is not None])
            assert gradient is not None and gradient.equal((wide.sum(0) / RANKS).to(dtype))


def test_what_a_rank_does_not_have_counts_as_zeros_and_what_none_has_stays_none() -> None:
    before = drawn(torch.float32)
    before[1][0] = None
    before[0][1] = before[2][1] = None
    for own in before:
        own[2] = None
    first, second, last = (before[0][0], before[1][1], before[2][0])
    assert first is not None and second is not None and last is not None
    for found in averaged(before):
        assert found[2] is None and found[3] is not None
        assert found[0] is not None and found[0].equal(torch.stack([first, last]).sum(0) / RANKS)
        assert found[1] is not None and found[1].equal(second / RANKS)


@pytest.mark.parametrize(
    ("precision", "context", "records", "is_after"),
    [
        ("bf16-true", 1, False, False),
        ("32-true", 2, False, False),
        ("bf16-mixed", 2, False, False),
        ("bf16-true", 2, False, True),
        ("32-true", 1, True, True),
        ("bf16-true", 1, True, True),
        # Nothing is recorded there.
        ("16-mixed", 1, True, False),
        ("32-true", 2, True, False),
    ],
)
def test_ddp_averages_after_the_passes_where_nothing_is_sent_in_them_or_pieces_are_in_16_bits(
    precision: str, context: int, records: bool, is_after: bool
) -> None:
    keys = {
        "checkpoint_dir": "base",
        "devices": "2",
        "strategy": "ddp",
        "precision": precision,
        "strategy.context": str(context),
        "train.record_steps": str(records),
    }
    devices = Devices(accelerator="cuda", count=2, names=("H100",) * 2)
    plan = make_plan(read_recipe([], list(keys.items()), method="lora"), devices)
    strategy = make_strategy(plan)
    sent: list[Tensor] = []
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    strategy.average_gradients([parameter], sent.append)
    # Or torch's module has buckets, in which it averages them.
    assert strategy.keeps_gradient_buckets != is_after
    assert bool(sent) == is_after and parameter.grad.equal(torch.full((3,), 0.5 if is_after else 1))
