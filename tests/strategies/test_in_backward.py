"""Updates in the backward pass: the same numbers as after it, one gradient at a time."""

import gc
import weakref
from typing import Any

import pytest
import torch
from bitsandbytes.optim.adamw import AdamW8bit
from torch import nn

from ftkit.strategies.optimizers import OptimizerInBackward, clip_gradients

WIDTH = 64


class Chain(nn.Module):
    """Layers one after another, the first one once more as the last."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.layers, self.layers[0]):
            x = torch.tanh(layer(x))
        return x.square().sum()


def make(kind: Any, **arguments: Any) -> tuple[Chain, torch.optim.Optimizer]:
    """With a rate of its own for biases."""
    model = Chain()
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if name.endswith("weight")], "lr": 1e-2},
        {"params": [p for name, p in named.items() if name.endswith("bias")], "lr": 1e-1},
    ]
    return model, kind(groups, **arguments)


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adafactor, {}),
        (AdamW8bit, {"min_8bit_size": WIDTH * WIDTH}),
    ],
)
def test_the_numbers_are_those_of_updates_after_it(kind: Any, arguments: dict[str, Any]) -> None:
    plain, optimizer = make(kind, **arguments)
    model, updated = make(kind, **arguments)
    in_backward = OptimizerInBackward(updated)
    for step in range(3):
        for group, other in zip(optimizer.param_groups, updated.param_groups, strict=True):
            group["lr"] = other["lr"] = group["lr"] * 0.9
        plain(batch(step)).backward()
        norm = clip_gradients(list(plain.parameters()), None)
        optimizer.step()
        optimizer.zero_grad()
        model(batch(step)).backward()
        assert in_backward.take_norm().item() == pytest.approx(norm.item(), rel=1e-6)
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert parameter.equal(expected)
        ours, theirs = updated.state[parameter], optimizer.state[expected]
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[k], v) for k, v in theirs.items() if torch.is_tensor(v))
    assert [len(group["params"]) for group in updated.param_groups] == [3, 3]


def test_one_gradient_is_there_at_a_time() -> None:
    model, optimizer = make(torch.optim.SGD)
    alive: list[int] = []

    def count(_: nn.Parameter) -> None:
        alive.append(sum(p.grad is not None for p in model.parameters()))

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    in_backward = OptimizerInBackward(optimizer)
    model(batch(0)).backward()
    assert in_backward.take_norm() > 0
    assert alive == [1] * 6
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_was_trained_so_can_be_freed() -> None:
    model, optimizer = make(torch.optim.SGD)
    in_backward = OptimizerInBackward(optimizer)
    model(batch(0)).backward()
    weight = weakref.ref(model.layers[0].weight)
    del model, optimizer, in_backward
    gc.collect()
    assert weight() is None
