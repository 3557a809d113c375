"""Rotary embeddings in few kernels are those of LitGPT."""

import pytest
import torch
from litgpt.model import apply_rope
from torch import Tensor

from ftkit.models.bodies.rotation import rotated_halves

TOKENS, HEADS, GROUPS, SIZE = 7, 4, 2, 8


def tables() -> tuple[Tensor, Tensor]:
    angles = torch.randn(TOKENS, SIZE // 2).repeat(1, 2)
    return angles.cos()[None], angles.sin()[None]


def heads(dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(1, TOKENS, n, SIZE).to(dtype).requires_grad_() for n in (HEADS, GROUPS)]


def of_litgpt(parts: list[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    return [apply_rope(part.transpose(1, 2), cos, sin).transpose(1, 2) for part in parts]


def ours(parts: list[Tensor], cos: Tensor, sin: Tensor) -> list[Tensor]:
    q, k = parts
    return [*rotated_halves(q, k, cos[..., None, :], sin[..., None, :])]


@pytest.mark.parametrize(
    ("dtype", "within"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-6)], ids=str
)
def test_heads_and_their_gradients_are_rotated_as_by_litgpt(
    dtype: torch.dtype, within: float
) -> None:
    torch.manual_seed(0)
    parts, gradients, (cos, sin) = heads(dtype), heads(dtype), tables()
    found, expected = (rotate(parts, cos, sin) for rotate in (ours, of_litgpt))
    assert {part.dtype for part in found} == {dtype}
    torch.testing.assert_close(found, expected, rtol=0, atol=within)
    of_parts, expected_of_parts = (
        torch.autograd.grad(turned, parts, gradients) for turned in (found, expected)
    )
    torch.testing.assert_close(of_parts, expected_of_parts, rtol=0, atol=within)


def test_16_bits_are_rounded_once() -> None:
    """Also in the backward pass, where LitGPT's operations round both terms and their sum."""
    torch.manual_seed(0)
    parts, gradients, (cos, sin) = heads(torch.bfloat16), heads(torch.bfloat16), tables()
    found = ours(parts, cos, sin)
    of_parts = torch.autograd.grad(found, parts, gradients)
    expected = of_litgpt([part.detach().float() for part in parts], cos, sin)
    expected_of_parts = of_litgpt([part.detach().float() for part in gradients], cos, -sin)
    for exact, rounded in zip([*expected, *expected_of_parts], [*found, *of_parts], strict=True):
        assert torch.equal(exact.bfloat16(), rounded)


def test_nothing_of_the_size_of_the_heads_is_kept() -> None:
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ours(heads(torch.float32), *tables())
    assert sum(kept) == 2 * TOKENS * SIZE
