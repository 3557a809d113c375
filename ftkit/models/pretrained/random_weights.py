"""Random weights: every parameter is a view of one small table of random numbers."""

import torch
from torch import Tensor

# The initializer_range of most config.json files.
INITIAL_STD = 0.02

_NUMBERS = 2**22
"""Numbers that random weights are made of; a power of 2, so that odd distances reach every place.
A matrix may have a quarter as many rows, the experts of a layer together half as many."""

_SPREAD = 1_296_111
"""Numbers between the beginnings of one random weight and the next, modulo half of the table. By
the golden section, so that few weights lie close together."""


def random_numbers() -> Tensor:
    """Draw the table that all random weights are views of; every rank draws the same.

    Returns:
        [_NUMBERS] float32 in host memory.
    """
    # Drawn on the host, because generators of other devices give other numbers.
    generator = torch.Generator(device="cpu").manual_seed(0)
    numbers = torch.empty(_NUMBERS, dtype=torch.float32, device="cpu")
    return numbers.normal_(std=INITIAL_STD, generator=generator)


def random_weight(shape: torch.Size, place: int, numbers: Tensor) -> Tensor:
    """View a part of the table as a parameter, which takes neither time nor memory.

    Each row of its matrices is a window of the table. The next window begins ``step`` numbers
    later: at the end of the last or, in a large parameter, inside it.

    Args:
        shape: of matrices; the last size is that of a row.
        place: of the parameter among those of the model.
        numbers: the table.
    """
    room = len(numbers) // 2  # for the windows; the other half is for where the first begins
    rows, columns = shape[:-1].numel(), shape[-1]
    step = min(columns, (room - columns) // max(1, rows - 1))
    # Windows in succession belong to different experts, whose own rows are therefore further apart:
    # with row i at number i, a matrix would be symmetric.
    strides = [step * shape[:axis].numel() for axis in range(len(shape) - 1)]
    # An odd factor, so that no two parameters begin at one number.
    start = place * _SPREAD % room
    return numbers.as_strided(shape, (*strides, 1), start)
