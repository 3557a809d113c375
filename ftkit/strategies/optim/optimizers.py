"""Optimizers: a recipe's optimizer and its groups, Muon, and updates in the backward pass.

LoRA+: Hayou et al. 2024, https://arxiv.org/abs/2402.12354.
Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; with the learning rate and
weight decay of AdamW: Liu et al. 2025, https://arxiv.org/abs/2502.16982.
Updates in the backward pass (LOMO): Lv et al. 2023, https://arxiv.org/abs/2306.09782.
"""

import importlib
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ftkit.errors import UserError, is_out_of_memory
from ftkit.models.language_model import trainable
from ftkit.recipe.recipe import LoraRecipe, Recipe
from ftkit.strategies.optim.clipping import global_norm, norms_of
from ftkit.utils.names import nearest

_MUON = "torch.optim.Muon"
"""Class path in recipes."""


def base_learning_rate(recipe: Recipe) -> float:
    """Full learning rate: the recipe's, or the default of its optimizer."""
    given = recipe.optimizer["init_args"].get("lr")
    if given is None:
        signature = inspect.signature(_optimizer_class(recipe.optimizer["class_path"]))
        given = signature.parameters["lr"].default
    return float(given)


def make_optimizer(
    recipe: Recipe,
    model: nn.Module,
    optimizer_class: type[Optimizer],
    arguments: dict[str, Any],
) -> Optimizer:
    """Create the recipe's optimizer over the trained parameters.

    Args:
        recipe: of the run.
        model: that is trained.
        optimizer_class: from `resolve_optimizer`, or a class derived from it.
        arguments: from `resolve_optimizer`.

    Raises:
        UserError: the class refuses its arguments.
    """
    chosen = recipe.optimizer
    is_muon = optimizer_class is MuonWithAdamW
    groups = _muon_groups(model) if is_muon else _groups(recipe, model)
    try:
        return optimizer_class(groups, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"optimizer {chosen['class_path']} refuses its arguments {chosen['init_args']}: {error}"
        ) from None


def _groups(recipe: Recipe, model: nn.Module) -> list[dict[str, Any]]:
    """Trained parameters in groups of one learning rate; the first one has the recipe's rate."""
    ratio = recipe.lora_plus_ratio if isinstance(recipe, LoraRecipe) else None
    if ratio is None:
        return [{"params": trainable(model)}]
    found: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # LoRA+ trains B at a higher rate than A.
            found[".lora_B." in name].append(parameter)
    rate = base_learning_rate(recipe)
    return [{"params": found[False], "lr": rate}, {"params": found[True], "lr": rate * ratio}]


def resolve_optimizer(
    recipe: Recipe, *, may_fuse: bool, class_path: str | None = None
) -> tuple[type[Optimizer], dict[str, Any]]:
    """Class and arguments of the recipe's optimizer.

    Args:
        recipe: of the run.
        may_fuse: whether torch's fused implementation suits the strategy and the precision.
        class_path: an equivalent class to use instead of the recipe's.

    Raises:
        UserError: the class does not exist or does not take the arguments.
    """
    class_path = class_path or recipe.optimizer["class_path"]
    arguments = dict(recipe.optimizer["init_args"])
    optimizer_class = _optimizer_class(class_path)
    known = inspect.signature(optimizer_class).parameters
    for name in arguments:
        if name not in known:
            close = nearest(name, known)
            hint = f"Did you mean {close}?" if close else f"Known: {', '.join(list(known)[1:])}."
            raise UserError(
                f"optimizer.init_args.{name} is not an argument of {class_path}. {hint}"
            )
    if "betas" in arguments:
        # YAML only has lists.
        arguments["betas"] = tuple(arguments["betas"])
    if class_path == _MUON:
        return MuonWithAdamW, arguments | {"fused": may_fuse}
    # Fused steps are faster and need no temporary copy of the parameters.
    implementation = {"fused", "foreach", "capturable", "differentiable"}
    if "fused" in known and may_fuse and not implementation & arguments.keys():
        arguments["fused"] = True
    return optimizer_class, arguments


def _optimizer_class(class_path: str) -> type[Optimizer]:
    package, _, name = class_path.rpartition(".")
    try:
        found = getattr(importlib.import_module(package), name, None)
    except ImportError as error:
        raise UserError(f"optimizer {class_path} needs a package: {error}.") from None
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        known = [n for n in dir(torch.optim) if n[:1].isupper()]
        close = nearest(name, known)
        raise UserError(
            f"optimizer is {class_path!r}, but there is no such optimizer. "
            f"Try --optimizer {close or 'AdamW'}."
        )
    return found


# Muon


class MuonWithAdamW(Optimizer):
    """Muon for the matrices of hidden layers and AdamW for everything else, with one state."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        fused: bool = False,
        **muon_arguments: Any,
    ) -> None:
        """Create both optimizers.

        Args:
            params: parameters, or groups of them; AdamW takes all of a group with `is_hidden`
                false, even its matrices.
            lr: of both.
            weight_decay: of both.
            fused: whether to use torch's fused AdamW.
            **muon_arguments: other arguments of torch's Muon.
        """
        groups = [group if isinstance(group, dict) else {"params": [group]} for group in params]
        matrices: list[Tensor] = []
        others: list[Tensor] = []
        for group in groups:
            for parameter in group["params"]:
                is_matrix = parameter.ndim == 2 and group.get("is_hidden", True)
                (matrices if is_matrix else others).append(parameter)
        # By default updates have the size of AdamW's, so that one learning rate suits both.
        arguments = {"adjust_lr_fn": "match_rms_adamw"} | muon_arguments
        muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, **arguments)
        adamw = torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, fused=fused or None)
        self._parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        # One state in one place: checkpoints need not know that there are two optimizers.
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        muon, adamw = self._parts
        # Groups may have been replaced since, as OptimizerInBackward does.
        muon.param_groups = [group for group in self.param_groups if uses_muon(group)]
        adamw.param_groups = [group for group in self.param_groups if not uses_muon(group)]
        muon.step()
        adamw.step()


def uses_muon(group: dict[str, Any]) -> bool:
    """Whether Muon updates a parameter group."""
    # Newton-Schulz steps, which only Muon's groups have.
    return "ns_steps" in group


def _muon_groups(model: Any) -> list[dict[str, Any]]:
    hidden = set(hidden_matrices(model))
    others = [p for p in model.parameters() if p.requires_grad and p not in hidden]
    in_order = [p for p in model.parameters() if p in hidden]
    return [{"params": in_order}, {"params": others, "is_hidden": False}]


def hidden_matrices(model: Any) -> list[nn.Parameter]:
    """Trained matrices of a language model's blocks."""
    return [p for p in model.body.blocks.parameters() if p.requires_grad and p.ndim == 2]


# Updates in the backward pass


class OptimizerInBackward:
    """Updates each parameter, and frees its gradient, as soon as the gradient is complete.

    So the gradients of all parameters never exist at once. An update is final: there must be one
    backward pass in a step, and its gradients must include those of all ranks. The hooks last as
    long as this object.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        """Register a hook for every parameter.

        Args:
            optimizer: whose updates of parameters do not depend on each other.
        """
        self._optimizer = optimizer
        self._norms: dict[nn.Parameter, Tensor] = {}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), index))

    def take_norm(self) -> Tensor:
        """Global norm of the gradients since the last call, as `clip_gradients` measures it."""
        in_order = [p for group in self._optimizer.param_groups for p in group["params"]]
        norm = global_norm([self._norms[p] for p in in_order if p in self._norms])
        self._norms.clear()
        return norm

    def update(self, index: int, parameter: nn.Parameter) -> None:
        """Update one parameter of a group and free its gradient."""
        assert parameter.grad is not None
        (self._norms[parameter],) = norms_of([parameter.grad])
        groups = self._optimizer.param_groups
        # One optimizer that sees one parameter at a time, not one for each: checkpoints, rates and
        # bitsandbytes' settings then work as for any other optimizer.
        self._optimizer.param_groups = [groups[index] | {"params": [parameter]}]
        self._optimizer.step()
        self._optimizer.param_groups = groups
        parameter.grad = None


def _hook(
    owner: weakref.ReferenceType[OptimizerInBackward], index: int
) -> Callable[[nn.Parameter], None]:
    # A weak reference: torch never frees parameters whose hooks refer to them.
    def hook(parameter: nn.Parameter) -> None:
        if (updates := owner()) is not None:
            updates.update(index, parameter)

    return hook
