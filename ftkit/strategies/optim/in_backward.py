"""Optimizer in backward: a parameter is updated, and its gradient freed, as soon as that is there.

So the gradients of all parameters never exist at once. Lv et al. 2023 (LOMO),
https://arxiv.org/abs/2306.09782.
"""

import weakref
from collections.abc import Callable

from torch import Tensor, nn
from torch.optim import Optimizer

from ftkit.strategies.optim.clipping import global_norm, norms_of


class OptimizerInBackward:
    """Steps an optimizer for one parameter after the other, by hooks of the backward pass.

    It stays one optimizer, with its groups and its state. An update is final: there must be one
    backward pass in a step, and gradients of all ranks in what it leaves. The hooks last as long
    as this object: torch never frees parameters whose hooks hold them.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Put the hooks in place.

        Args:
            optimizer: over parameters whose updates do not depend on each other.
        """
        self._optimizer = optimizer
        self._norms: dict[nn.Parameter, Tensor] = {}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), index))

    def take_norm(self) -> Tensor:
        """The global norm of the gradients since the last time, as `clip_gradients` measures it."""
        in_order = [p for group in self._optimizer.param_groups for p in group["params"]]
        norm = global_norm([self._norms[p] for p in in_order if p in self._norms])
        self._norms.clear()
        return norm

    def update(self, index: int, parameter: nn.Parameter) -> None:
        """Update a parameter of a group and free its gradient."""
        assert parameter.grad is not None
        (self._norms[parameter],) = norms_of([parameter.grad])
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [groups[index] | {"params": [parameter]}]
        self._optimizer.step()
        self._optimizer.param_groups = groups
        parameter.grad = None


def _hook(
    owner: weakref.ReferenceType[OptimizerInBackward], index: int
) -> Callable[[nn.Parameter], None]:
    def hook(parameter: nn.Parameter) -> None:
        if (updates := owner()) is not None:
            updates.update(index, parameter)

    return hook
