"""CUDA graphs of the simulated cards: mistakes that a real one would make silently fail."""

from collections.abc import Iterator

import pytest
from command import command_environment
from simulated_card.build import needs_card
from simulated_card.machine import Machine, cards, machine, with_cards

pytestmark = [needs_card, pytest.mark.extensions]


@pytest.fixture(scope="module")
def card() -> Iterator[Machine]:
    with machine(with_cards(command_environment(), cards("h100"))) as found:
        yield found


def test_a_recording_happens_when_it_is_replayed_with_what_its_memory_holds_then(
    card: Machine,
) -> None:
    def body() -> list[object]:
        import torch

        x, total = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
        factor = 2.0
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = torch.full((3,), 5.0, device="cuda")
            total += (x * factor).cumsum(0) + made.view(1, 3)[0]
        found = [total.tolist()]
        factor = 100.0  # no replay knows
        for value in (1.0, 10.0):
            x.fill_(value)
            graph.replay()
            found.append(total.tolist())
        return [*found, made.isnan().all().item()]

    zero, once, twice, is_lost = card.run(body)
    assert zero == [0, 0, 0]
    assert once == [7, 9, 11]
    assert twice == [7 + 25, 9 + 45, 11 + 65]
    assert is_lost  # what a graph makes is overwritten by the next one


def test_results_that_grow_and_copies_between_memory_are_recorded(card: Machine) -> None:
    def body() -> list[list[float]]:
        import torch

        x, y = torch.zeros(3, device="cuda"), torch.zeros(6, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y[1:4].copy_(x)
            y[3:] = torch.cat([x[:1], torch.arange(2, 4, device="cuda")])
            y.add_(torch.where(y == 0, 1, y))
        found = [y.tolist()]
        for value in (1.0, 10.0):
            x.fill_(value)
            graph.replay()
            found.append(y.tolist())
        return found

    assert card.run(body) == [[0] * 6, [1, 2, 2, 2, 4, 6], [2, 20, 20, 20, 4, 6]]


def test_backward_passes_are_recorded_too(card: Machine) -> None:
    def body() -> list[object]:
        import torch

        weight = torch.ones(2, 2, device="cuda", requires_grad=True)
        x = torch.ones(1, 2, device="cuda")
        weight.grad = torch.zeros_like(weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (x @ weight).square().sum().backward()
        found: list[object] = [weight.grad.tolist()]
        for value in (1.0, 2.0):
            x.fill_(value)
            graph.replay()
            found.append(weight.grad.tolist())
        return found

    assert card.run(body) == [[[0, 0]] * 2, [[4, 4]] * 2, [[20, 20]] * 2]


def test_what_a_stream_cannot_record_fails(card: Machine) -> None:
    def body() -> list[str]:
        import torch

        x = torch.ones(3, device="cuda")
        event = torch.Event("cuda", enable_timing=True)
        refused = []
        for wrong in (
            lambda: x.sum().item(),
            lambda: x.nonzero(),
            lambda: x.cpu(),
            lambda: torch.ones(3).cuda(),
            lambda: x[torch.tensor([0, 1])],
            lambda: torch.cuda.synchronize(),
            lambda: event.record(),
            lambda: torch.cuda.get_rng_state(),
        ):
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph):
                    wrong()
            except RuntimeError as error:
                refused.append(str(error))
        # Everything works again.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x += 1
        graph.replay()
        return [*refused, str(x.sum().item())]

    *refused, total = card.run(body)
    assert len(refused) == 8
    assert all("not permitted when stream is capturing" in text for text in refused)
    assert total == "6.0"


def test_memory_that_was_freed_since_is_missed(card: Machine) -> None:
    def body() -> str:
        import torch

        x, total = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            total += x
        graph.replay()
        del x
        try:
            graph.replay()
        except RuntimeError as error:
            return str(error)
        return ""

    assert "freed" in card.run(body)


def test_a_replay_launches_what_was_recorded_without_views(card: Machine) -> None:
    def body() -> int:
        from typing import Any

        import torch

        x = torch.ones(2, 3, device="cuda")
        graph: Any = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.t()[1:].unsqueeze(0).mul_(2)
            (x + 1).sum()
        return int(graph.operations())

    assert card.run(body) == 3
