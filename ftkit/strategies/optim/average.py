"""The average of what is trained over the steps, which validation and the result are of.

After each update average = decay * average + (1 - decay) * weight, beginning with the weights after
the first one. So it depends on the steps alone, not on where they were made.
Morales-Brotons et al. 2024, https://arxiv.org/abs/2411.18704.
"""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

AVERAGE = "average"
"""Name of the average among the state that is kept for a parameter, in checkpoints too."""

StateOf = defaultdict[Tensor, dict[str, Any]]
"""State by what it is kept for, as optimizers have it."""


@torch.no_grad()
def update_average(weights: Iterable[Tensor], states: StateOf, decay: float) -> None:
    """Take the weights after an update into their averages.

    Args:
        weights: what is trained; of one that is sharded, the rows of this rank count.
        states: where averages are, and are put if there is none yet: float32.
        decay: share of the average that stays.
    """
    for weight in weights:
        state = states[weight]
        if AVERAGE not in state:
            state[AVERAGE] = weight.detach().to(torch.float32, copy=True)
        else:
            local_rows(state[AVERAGE]).lerp_(local_rows(weight).to(torch.float32), 1 - decay)


def local_rows(tensor: Any) -> Tensor:
    """What this rank has of a tensor, sharded or not."""
    rows: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return rows
