"""Tensors alive in a step are counted byte by byte, real or fake."""

import gc
import mmap
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from ftkit.planning.tracker import LiveTensors, Snapshot  # type: ignore[attr-defined]

BATCH, WIDTH, INNER = 32, 64, 256
WEIGHTS = 4 * (WIDTH * INNER + INNER + INNER * WIDTH + WIDTH)


@pytest.fixture(params=["real", "fake"], autouse=True)
def _tensors(request: pytest.FixtureRequest) -> Iterator[None]:
    with FakeTensorMode() if request.param == "fake" else nullcontext():
        yield


class Layers(nn.Module):
    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.checkpointed = checkpointed

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).exp())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointed:
            return checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)


def step(model: nn.Module, live: LiveTensors) -> dict[str, Snapshot]:
    x = torch.randn(BATCH, WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    live.assign(model.parameters(), "parameters")
    with live:
        live.restart()
        live.assign([x], "activations")
        live.begin_forward()
        loss = model(x).sum()
        live.end_forward()
        moments = {"after forward": live.now()}
        loss.backward()
        live.assign((p.grad for p in model.parameters()), "gradients")
        moments["after backward"] = live.now()
        del loss
        optimizer.step()
        state = [v for values in optimizer.state.values() for v in values.values()]
        live.assign(state, "optimizer_state")
        optimizer.zero_grad()
        moments["after the optimizer step"] = live.now()
    return moments | {"peak": live.peak()}


def test_every_byte_of_a_step_is_counted_where_it_belongs() -> None:
    found = step(Layers(), LiveTensors(torch.device("cpu")))
    loss, x, inner = 4, 4 * BATCH * WIDTH, 4 * BATCH * INNER
    forward = found["after forward"].bytes
    assert forward["parameters"] == WEIGHTS
    # The result of exp is its own derivative; the inner layer's result is not needed.
    assert forward["activations"] == x + inner + loss
    assert forward["gradients"] == forward["temporaries"] == forward["unattributed"] == 0
    backward = found["after backward"].bytes
    assert backward["gradients"] == WEIGHTS
    assert backward["activations"] == x + loss
    end = found["after the optimizer step"].bytes
    assert end["optimizer_state"] == 2 * WEIGHTS + 4 * 4  # a step count per parameter
    assert end["gradients"] == 0
    assert found["peak"].total_bytes >= max(m.total_bytes for m in found.values())


def test_a_gradient_is_one_from_its_first_moment_on() -> None:
    model, live = Layers(), LiveTensors(torch.device("cpu"))
    live.assign(model.parameters(), "parameters")
    with live:
        live.restart()
        loss = model(torch.randn(BATCH, WIDTH)).sum()
        loss.backward()
        assert live.now().bytes["gradients"] == 0
        live.assign((p.grad for p in model.parameters()), "gradients")
        model.zero_grad()
    assert live.peak().bytes["gradients"] == WEIGHTS
    assert live.now().bytes["gradients"] == 0


def test_what_is_computed_again_is_temporary() -> None:
    plain = step(Layers(), LiveTensors(torch.device("cpu")))["after forward"].bytes
    found = step(Layers(checkpointed=True), LiveTensors(torch.device("cpu")))
    checkpointed = found["after forward"].bytes
    assert plain["activations"] - checkpointed["activations"] == 4 * BATCH * INNER
    assert found["peak"].bytes["temporaries"] >= 4 * BATCH * INNER


def test_views_count_once_and_resized_storages_by_their_size() -> None:
    live = LiveTensors(torch.device("cpu"))
    with live:
        whole = torch.empty(100)
        views = [whole[:50], whole.view(10, 10).t()]
        assert live.now().total_bytes == 400
        whole.untyped_storage().resize_(0)
        assert live.now().total_bytes == 0
        whole.untyped_storage().resize_(400)
        assert live.now().total_bytes == 400
        del whole, views
        assert live.now().total_bytes == 0
    assert live.peak().total_bytes == 400


def test_sizes_are_rounded_up_as_an_allocator_does() -> None:
    with LiveTensors(torch.device("cpu"), granularity_bytes=512) as live:
        kept = torch.empty(129), torch.empty(1)
    assert live.now().total_bytes == 1024 + 512
    del kept


def test_memory_of_another_device_does_not_count() -> None:
    with LiveTensors(torch.device("cpu")) as live:
        kept = torch.empty(100, device="meta")
    assert live.now().total_bytes == 0
    del kept


def test_what_was_there_before_counts_from_the_start_once_it_is_shown() -> None:
    gradient, other = torch.randn(100), torch.randn(10)
    with LiveTensors(torch.device("cpu")) as live:
        live.assign_unknown([other])
        live.restart()
        assert live.now().total_bytes == 40
        live.assign([gradient], "gradients")
    (whole,) = live.stretches()
    assert whole.start.bytes["gradients"] == 400
    assert whole.start.bytes["unattributed"] == 40


def test_memory_outside_of_torch_is_not_tracked() -> None:
    mapped = torch.frombuffer(mmap.mmap(-1, 400), dtype=torch.float32)
    own = torch.randn(10)
    live = LiveTensors(torch.device("cpu"))
    live.assign_unknown([mapped, own])
    assert live.now().total_bytes == 40
    live.assign([mapped], "parameters")
    assert live.now().bytes["parameters"] == 400, "what a step is known to need counts"


def test_a_gradient_buffer_made_in_a_forward_pass_is_not_an_activation() -> None:
    with LiveTensors(torch.device("cpu")) as live:
        live.restart()
        live.begin_forward()
        buffer = torch.empty(100)
        live.end_forward()
        assert live.now().bytes["activations"] == 400
        live.mark("after the pass")
        live.assign([buffer], "gradients")
    _, after = live.stretches()
    assert after.start.bytes["gradients"] == 400
    assert live.peak().bytes["activations"] == 0


def test_garbage_may_be_collected_at_any_moment() -> None:
    """With tensors in it, also while what is alive is gone through."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.disable()
    try:
        with LiveTensors(torch.device("cpu")) as live:
            live.begin_forward()
            kept = [torch.empty(1) for _ in range(5000)]  # more than there are tuples to reuse
            cycle: list[object] = [torch.empty(1)]
            cycle.append(cycle)
            del cycle
            assert live.now().total_bytes == 5001 * 4
            gc.set_threshold(gc.get_count()[0] + 100)
            gc.enable()
            live.end_forward()
            gc.collect()
            assert live.now().bytes["activations"] == 5000 * 4
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
    del kept
