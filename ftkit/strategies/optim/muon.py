"""Muon: orthogonalised updates for the matrices of the blocks, and AdamW for everything else.

Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; with the learning rate and weight
decay of AdamW: Liu et al. 2025, https://arxiv.org/abs/2502.16982.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

MUON = "torch.optim.Muon"
"""What recipes call it."""


class MuonWithAdamW(torch.optim.Optimizer):
    """torch's two optimizers as one, with one state: Muon takes matrices of hidden layers alone."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        fused: bool = False,
        **of_muon: Any,
    ) -> None:
        """Make both.

        Args:
            params: matrices and others, or groups of them; those of a group with `is_hidden`
                false are AdamW's, whatever their shape.
            lr: of both. Unless asked otherwise, updates of Muon have the size of those of AdamW.
            weight_decay: of both.
            fused: whether torch's fused AdamW is taken.
            **of_muon: other arguments of torch's Muon.
        """
        groups = [group if isinstance(group, dict) else {"params": [group]} for group in params]
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        for group in groups:
            for parameter in group["params"]:
                is_matrix = parameter.ndim == 2 and group.get("is_hidden", True)
                (matrices if is_matrix else others).append(parameter)
        arguments = {"adjust_lr_fn": "match_rms_adamw"} | of_muon
        muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, **arguments)
        adamw = torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, fused=fused or None)
        self._parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update what has a gradient."""
        muon, adamw = self._parts
        muon.param_groups = [group for group in self.param_groups if is_muons(group)]
        adamw.param_groups = [group for group in self.param_groups if not is_muons(group)]
        muon.step()
        adamw.step()


def is_muons(group: dict[str, Any]) -> bool:
    """Whether Muon updates a group of parameters, and so keeps no count of steps for them."""
    return "ns_steps" in group


def muon_groups(model: Any) -> list[dict[str, Any]]:
    """What a language model trains, for `MuonWithAdamW`."""
    hidden = set(hidden_matrices(model))
    others = [p for p in model.parameters() if p.requires_grad and p not in hidden]
    in_order = [p for p in model.parameters() if p in hidden]
    return [{"params": in_order}, {"params": others, "is_hidden": False}]


def hidden_matrices(model: Any) -> list[nn.Parameter]:
    """The matrices of its blocks that are trained."""
    return [p for p in model.body.blocks.parameters() if p.requires_grad and p.ndim == 2]
