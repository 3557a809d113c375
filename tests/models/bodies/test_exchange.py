"""Attention over ranks that share a row equals attention on one, with its gradients.

Ranks are threads here; tests/strategies/test_context.py has processes.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from ftkit.models.bodies.attention import AttentionKernel, Scores, Sequences, attend
from ftkit.models.bodies.exchange import Exchange
from ftkit.recipe.mesh import Piece

LENGTHS = (5, 9, 9, 2, 8, 1, 2)
"""Of samples in a row of 36 tokens, which 2, 3 and 4 ranks cut in the middle of one."""
SIZE = 8


class Post:
    """What ranks have sent to each other."""

    def __init__(self, ranks: int) -> None:
        self.parts: list[Tensor] = [torch.empty(0)] * ranks
        self.barrier = threading.Barrier(ranks)


class AmongThreads(Exchange):
    """An exchange with other threads."""

    def __init__(self, piece: Piece, post: Post) -> None:
        super().__init__(piece, None)
        self._post = post

    def _all(self, mine: Tensor) -> list[Tensor]:
        self._post.parts[self.piece.index] = mine.clone()
        self._post.barrier.wait(60)
        found = [*self._post.parts]
        self._post.barrier.wait(60)
        return found

    def sent(self, parts: Tensor) -> Tensor:
        return torch.stack([of_rank[self.piece.index] for of_rank in self._all(parts)])

    def added(self, values: Tensor) -> Tensor:
        return torch.stack(self._all(values)).sum(0)


def on_ranks(count: int, work: Callable[[Exchange], Any]) -> list[Any]:
    post = Post(count)
    with ThreadPoolExecutor(count) as pool:
        pieces = [Piece(index=index, count=count) for index in range(count)]
        return list(pool.map(lambda piece: work(AmongThreads(piece, post)), pieces))


SCORES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 4},
    "bound": {"softcap": 2.0},
    "sinks": {"sinks": True, "window": 3},
}


@pytest.mark.parametrize("kernel", ["cpu", "sdpa"])
@pytest.mark.parametrize("rule", SCORES)
@pytest.mark.parametrize(
    ("ranks", "heads", "groups"),
    [(2, 4, 4), (2, 4, 2), (2, 4, 1), (2, 6, 3), (3, 6, 2), (4, 8, 2), (4, 12, 6), (4, 4, 1)],
)
def test_ranks_that_share_a_row_attend_as_one(
    ranks: int, heads: int, groups: int, rule: str, kernel: AttentionKernel
) -> None:
    generator = torch.Generator().manual_seed(0)
    # The kernel of CPUs computes gradients in float32.
    dtype, within = (torch.float32, 1e-5) if kernel == "cpu" else (torch.float64, 1e-12)
    shapes = [(sum(LENGTHS), count, SIZE) for count in (heads, groups, groups, heads)]
    q, k, v, gradient = (torch.randn(shape, dtype=dtype, generator=generator) for shape in shapes)
    sinks = torch.randn(heads, dtype=dtype, generator=generator)

    def learned(exchange: Exchange | None, here: slice) -> list[Tensor]:
        mine = [value[here].clone().requires_grad_() for value in (q, k, v)]
        own_q, own_k, own_v = mine
        own_sinks = sinks.clone().requires_grad_()
        rules = SCORES[rule] | ({"sinks": own_sinks} if "sinks" in SCORES[rule] else {})
        sequences = Sequences(LENGTHS, kernel, exchange=exchange)
        found = attend(own_q, own_k, own_v, sequences, Scores(SIZE**-0.5, **rules))
        found.backward(gradient[here])
        of_sinks = torch.zeros_like(sinks) if own_sinks.grad is None else own_sinks.grad
        return [found.detach(), *(value.grad for value in mine if value.grad is not None), of_sinks]

    expected = learned(None, slice(0, sum(LENGTHS)))
    parts = on_ranks(ranks, lambda exchange: learned(exchange, exchange.piece.span(sum(LENGTHS))))
    *tokens, of_sinks = zip(*parts, strict=True)
    for found, whole in zip(tokens, expected, strict=False):
        torch.testing.assert_close(torch.cat(found), whole, rtol=0, atol=within)
    torch.testing.assert_close(torch.stack(of_sinks).sum(0), expected[-1], rtol=0, atol=within)


def test_positions_are_those_in_the_samples() -> None:
    whole = Sequences(LENGTHS).positions(torch.device("cpu"))
    found = on_ranks(
        3, lambda exchange: Sequences(LENGTHS, exchange=exchange).positions(torch.device("cpu"))
    )
    assert torch.cat(found).equal(whole)


def test_a_whole_row_is_not_exchanged() -> None:
    exchange = Exchange(Piece(index=1, count=2), None)
    ids = torch.zeros(1, sum(LENGTHS), dtype=torch.long)
    assert Sequences.of(ids, LENGTHS, "cpu", exchange).exchange is None
    assert Sequences.of(ids[:, :18], LENGTHS, "cpu", exchange).exchange is exchange


def test_a_sum_over_ranks_has_the_gradient_of_the_sum_of_their_losses() -> None:
    def learned(exchange: Exchange) -> Tensor:
        values = torch.tensor([float(exchange.piece.index), 2.0], requires_grad=True)
        total = exchange.summed(values)
        # Each rank computes all of the loss, and has a share of it.
        (total.pow(2).sum() / exchange.piece.count).backward()
        assert values.grad is not None
        return torch.stack([total.detach(), values.grad])

    for found in on_ranks(3, learned):
        assert found.tolist() == [[3.0, 6.0], [6.0, 12.0]]
