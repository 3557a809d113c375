"""The norm of gradients: right for many numbers, too, and in every number format."""

import pytest
import torch

from ftkit.strategies.optimizers import clip_gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3000, 2000), (7, 11, 13), (5,), (1, 1)])
def test_the_norm_is_that_of_all_numbers(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = torch.randn(shape, generator=generator).to(dtype)
    norm = clip_gradients([parameter], None)
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(float(parameter.grad.double().norm()), rel=1e-6)


def test_gradients_are_scaled_to_the_limit() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(40, 30)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    before = clip_gradients(parameters, 0.5)
    assert float(before) == pytest.approx(3600**0.5)
    assert float(clip_gradients(parameters, None)) == pytest.approx(0.5, rel=1e-5)
