"""Attention on a GPU: one kernel over a row equals each sequence alone."""

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from ftkit.models.bodies.attention import AttentionKernel, Scores, Sequences, attend

needs_flash = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0),
    reason="no CUDA GPU of compute capability 8.0 or later here",
)
LENGTHS = (1, 17, 64, 64, 300, 2)
HEADS, SIZE = 8, 64


def computed(kernel: AttentionKernel, dtype: torch.dtype, groups: int) -> list[Tensor]:
    """Result and gradients of the same numbers, as float32."""
    tokens = sum(LENGTHS)
    generator = torch.Generator().manual_seed(0)
    values = [
        torch.randn(tokens, heads, SIZE, generator=generator).bfloat16().to("cuda", dtype)
        for heads in (HEADS, groups, groups, HEADS)
    ]
    *inputs, gradient = values
    for value in inputs:
        value.requires_grad_()
    starts = None
    if kernel == "flash":
        ends = [0, *accumulate(LENGTHS)]
        starts = torch.tensor(ends, dtype=torch.int32, device="cuda")
    q, k, v = inputs
    found = attend(q, k, v, Sequences(LENGTHS, kernel, starts), Scores(SIZE**-0.5))
    return [t.float() for t in (found, *torch.autograd.grad(found, inputs, gradient))]


@needs_flash
@pytest.mark.parametrize("groups", [1, 2, HEADS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sequences_in_a_row_equal_each_sequence_alone(dtype: torch.dtype, groups: int) -> None:
    """Its error is no larger than that of SDPA on each sequence in the same dtype."""
    exact = computed("sdpa", torch.float32, groups)
    alone, in_row = (computed(kernel, dtype, groups) for kernel in ("sdpa", "flash"))
    for expected, usual, found in zip(exact, alone, in_row, strict=True):
        usual_error, error = ((value - expected).abs().max() for value in (usual, found))
        assert 0 < error <= 2 * usual_error
