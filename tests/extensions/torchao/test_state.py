"""torchao's optimizers with state of 4 or 8 bits: what ftkit changes about them, and what not."""

from typing import Any

import pytest
import torch
import torchao.optim
from torch import nn

from ftkit.extensions.torchao import state as ours
from ftkit.strategies.state import StatePart, bytes_per_number, coded_part, state_kinds

CPU = torch.device("cpu")
NAMES = ["AdamW4bit", "AdamW8bit", "AdamWFp8", "Adam4bit", "Adam8bit", "AdamFp8"]
SHAPES = [(96, 128), (64, 100), (300, 5), (8192,)]
"""In blocks of 256, of 128 alone, too small for blocks, and a vector."""


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def give_gradients(some: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in some:
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def derived(name: str) -> Any:
    return ours.in_pieces(getattr(torchao.optim, name))


def stepped(name: str) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    some = parameters(torch.float32)
    optimizer = derived(name)(some, lr=0.01)
    for step in range(2):
        give_gradients(some, step)
        optimizer.step()
    return optimizer, some


@pytest.mark.parametrize("at_once", [1024, 2**17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_updates_in_pieces_are_torchaos_own(
    name: str, dtype: torch.dtype, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "_AT_ONCE", at_once)
    found, expected = parameters(dtype), parameters(dtype)
    pair = derived(name)(found, lr=0.01), getattr(torchao.optim, name)(expected, lr=0.01)
    for step in range(3):
        for some, optimizer in zip((found, expected), pair, strict=True):
            give_gradients(some, step)
            with torch.compiler.set_stance("force_eager"):
                optimizer.step()
    for one, other in zip(found, expected, strict=True):
        assert one.equal(other)


def numbers_of(part: StatePart) -> torch.Tensor:
    assert part.code is not None and part.scales is not None
    codes = part.values
    if len(part.code) == 16:
        codes = torch.stack([codes >> 4, codes & 15], dim=-1).view(-1)
    return part.code[codes.long()] * part.scales.repeat_interleave(part.block)


@pytest.mark.parametrize("name", NAMES)
def test_the_codes_of_a_state_are_its_numbers_and_can_be_set(name: str) -> None:
    optimizer, (matrix, *_) = stepped(name)
    whole = StatePart(kind="parameter", shape=matrix.shape, start=0, values=matrix.view(-1))
    for kind in ("exp_avg", "exp_avg_sq"):
        state = optimizer.state[matrix][kind]
        found = ours.codes_in(state)
        assert found is not None
        part = coded_part(found, state, kind, whole)
        assert part.quantize is not None
        assert part.numel == matrix.numel()
        assert numbers_of(part).equal(state.dequantize().view(-1))
        other = torch.rand(matrix.numel(), generator=torch.Generator().manual_seed(3))
        part.quantize(other)
        error = (numbers_of(part) - other).abs().max()
        # Half the distance of two levels: 4 bits, and those of FP8 below 1.
        assert error < (0.13 if "4bit" in name else 0.04)
        assert numbers_of(part).equal(state.dequantize().view(-1))


@pytest.mark.parametrize("block_size", [None, 64, 256])
@pytest.mark.parametrize("name", NAMES)
def test_the_size_of_their_state_is_known(name: str, block_size: int | None) -> None:
    arguments = {} if block_size is None else {"block_size": block_size}
    optimizer_class = derived(name)
    matrix = nn.Parameter(torch.randn(64, 128))
    matrix.grad = torch.randn(64, 128)
    optimizer = optimizer_class([matrix], **arguments)
    optimizer.step()
    kinds = state_kinds(optimizer_class, arguments, CPU)
    assert kinds == {"exp_avg": 1, "exp_avg_sq": 1}
    found = [ours.codes_in(optimizer.state[matrix][kind]) for kind in kinds]
    held = sum(one.codes.nbytes + one.scales.nbytes for one in found if one is not None)
    per_number = bytes_per_number(optimizer_class, arguments, torch.float32, CPU, 1.0)
    assert matrix.numel() * (per_number - 4) == held
