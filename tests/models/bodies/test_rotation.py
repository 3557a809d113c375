"""Rotary embeddings in few kernels are those of LitGPT and of transformers."""

import inspect
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from litgpt.model import apply_rope
from torch import Tensor, nn
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.glm4 import modeling_glm4
from transformers.models.llama import modeling_llama

from ftkit.models.bodies import rotation
from ftkit.models.bodies.rotation import rotate_in_few_kernels, rotated_halves

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


@pytest.fixture(params=[modeling_llama, modeling_gemma3], ids=lambda module: module.__name__)
def replaced(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """Transformers' function, and what takes its place."""
    module = request.param
    theirs = inspect.unwrap(module.apply_rotary_pos_emb)
    monkeypatch.setattr(module, "apply_rotary_pos_emb", theirs)  # put back after the test
    layer = type("Layer", (nn.Module,), {"__module__": module.__name__})
    rotate_in_few_kernels(layer())
    once = module.apply_rotary_pos_emb
    rotate_in_few_kernels(layer())
    assert theirs is not once is module.apply_rotary_pos_emb
    return theirs, once


def test_models_of_transformers_rotate_alike_in_few_kernels(
    replaced: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs, ours = replaced
    torch.manual_seed(0)
    parts = [part.transpose(1, 2) for part in heads(torch.float32)]
    # Of either half other angles, as the function allows.
    cos, sin = torch.randn(2, 1, TOKENS, SIZE)
    rotated = Mock(side_effect=rotated_halves)
    monkeypatch.setattr(rotation, "rotated_halves", rotated)
    expected = theirs(*parts, cos, sin)
    assert torch.equal(ours(*parts, cos, sin)[0], expected[0])
    rotated.assert_not_called()  # on a CPU
    monkeypatch.setattr(rotation, "saves_launches", lambda q: True)
    found = ours(*parts, cos, sin)
    rotated.assert_called()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    gradients = [torch.randn_like(part) for part in parts]
    of_parts, expected_of_parts = (
        torch.autograd.grad(turned, parts, gradients) for turned in (found, expected)
    )
    torch.testing.assert_close(of_parts, expected_of_parts, rtol=0, atol=1e-6)


def test_a_model_with_another_rotation_keeps_it() -> None:
    before = modeling_glm4.apply_rotary_pos_emb
    layer = type("Layer", (nn.Module,), {"__module__": modeling_glm4.__name__})
    rotate_in_few_kernels(layer())
    assert modeling_glm4.apply_rotary_pos_emb is before
