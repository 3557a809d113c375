"""Optimizers: groups of parameters, gradient clipping, Muon, and updates in the backward pass.

LoRA+: Hayou et al. 2024, https://arxiv.org/abs/2402.12354.
Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; with the learning rate and
weight decay of AdamW: Liu et al. 2025, https://arxiv.org/abs/2502.16982.
Updates in the backward pass (LOMO): Lv et al. 2023, https://arxiv.org/abs/2306.09782.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.optim import Optimizer

from ftkit.errors import UserError, is_out_of_memory
from ftkit.models.language_model import trainable
from ftkit.recipe.optimizers import OPTIMIZERS, names_elsewhere, traits_of
from ftkit.recipe.plugin import require_own
from ftkit.recipe.recipe import Component
from ftkit.utils.imports import dtensor
from ftkit.utils.names import nearest
from ftkit.utils.registry import imported

# 256 KiB in float32: a piece stays in the cache of a core between conversion and sum.
PIECE = 2**16
"""16-bit numbers that are converted to float32 at once on a CPU, to sum their squares."""


def base_learning_rate(optimizer: Component) -> float:
    """Full learning rate: that of the arguments, or the default of the class."""
    given: Any = optimizer["init_args"].get("lr")
    if given is None:
        signature = inspect.signature(_optimizer_class(optimizer["class_path"]))
        given = getattr(signature.parameters.get("lr"), "default", inspect.Parameter.empty)
    if given is inspect.Parameter.empty:
        raise UserError(
            f"optimizer.lr is missing: {optimizer['class_path']} has no default. "
            "Try --optimizer.lr 1e-4."
        )
    return float(given)


def make_optimizer(
    chosen: Component,
    model: nn.Module,
    optimizer_class: type[Optimizer],
    arguments: dict[str, Any],
    *,
    lora_plus_ratio: float | None = None,
    decays_norms_and_biases: bool = True,
) -> Optimizer:
    """Create an optimizer over the trained parameters.

    Args:
        chosen: the recipe's optimizer.
        model: that is trained.
        optimizer_class: from `resolve_optimizer`, or a class derived from it.
        arguments: from `resolve_optimizer`.
        lora_plus_ratio: learning rate of LoRA's matrices B, relative to that of A; None: equal.
        decays_norms_and_biases: whether weight decay applies to them.

    Raises:
        UserError: the class refuses its arguments, or has no weight decay to leave out.
    """
    if issubclass(optimizer_class, MuonWithAdamW):
        groups = _muon_groups(model)
    elif lora_plus_ratio is None:
        groups = [{"params": trainable(model)}]
    else:
        groups = _lora_plus_groups(model, base_learning_rate(chosen), lora_plus_ratio)
    if not decays_norms_and_biases:
        if "weight_decay" not in inspect.signature(optimizer_class).parameters:
            raise UserError(
                "train.decay_norms_and_biases is false, but the optimizer "
                f"{chosen['class_path']} has no weight_decay. Leave the key out."
            )
        groups = _sparing(groups, norms_and_biases(model))
    try:
        return optimizer_class(groups, **arguments)
    # RuntimeError: torch's error for `fused` together with `foreach` or `differentiable`, but also
    # for memory.
    except (TypeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"optimizer {chosen['class_path']} refuses its arguments {chosen['init_args']}: {error}"
        ) from None


def _lora_plus_groups(model: nn.Module, rate: float, ratio: float) -> list[dict[str, Any]]:
    """Trained parameters in two groups: LoRA+ trains B at a higher rate than A."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    of_b = [p for name, p in named if ".lora_B." in name]
    others = [p for name, p in named if ".lora_B." not in name]
    # The first group has the recipe's own rate, which is the one that reports show.
    return [{"params": others, "lr": rate}, {"params": of_b, "lr": rate * ratio}]


def norms_and_biases(model: nn.Module) -> list[nn.Parameter]:
    """Trained parameters that transformers' Trainer leaves out of weight decay."""
    found = []
    for prefix, module in model.named_modules():
        # By the kind of layer: blocks name their norms differently in each implementation.
        is_norm = "norm" in type(module).__name__.lower()
        for name, parameter in module.named_parameters(prefix, recurse=False):
            # Experts in one parameter have their biases in another, such as gate_up_proj_bias.
            if parameter.requires_grad and (is_norm or "bias" in name):
                found.append(parameter)
    return found


def _sparing(groups: list[dict[str, Any]], spared: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """The same groups, in which spared parameters are a group of their own that does not decay."""
    without = set(spared)
    parts = []
    for group in groups:
        decaying = [p for p in group["params"] if p not in without]
        others = [p for p in group["params"] if p in without]
        if decaying or not others:
            parts.append(group | {"params": decaying})
        if others:
            parts.append(group | {"params": others, "weight_decay": 0.0})
    return parts


def resolve_optimizer(
    chosen: Component, *, may_fuse: bool
) -> tuple[type[Optimizer], dict[str, Any]]:
    """Class and arguments of an optimizer.

    Args:
        chosen: its class path and arguments, as in a recipe.
        may_fuse: whether torch's fused implementation suits the strategy and the precision.

    Raises:
        UserError: the class does not exist or does not take the arguments.
    """
    class_path, arguments = chosen["class_path"], dict(chosen["init_args"])
    optimizer_class = _optimizer_class(class_path)
    traits = traits_of(class_path)
    known = [*inspect.signature(optimizer_class).parameters, *traits.further]
    for name in arguments:
        # Here, because the class would raise a TypeError without a suggestion.
        if name not in known:
            close = nearest(name, known)
            hint = f"Did you mean {close}?" if close else f"Known: {', '.join(known[1:])}."
            raise UserError(
                f"optimizer.init_args.{name} is not an argument of {class_path}. {hint}"
            )
    if "betas" in arguments:
        # YAML only has lists.
        arguments["betas"] = tuple(arguments["betas"])
    used = derived(traits.used, optimizer_class)
    # Fused steps are faster and need no temporary copy of the parameters.
    implementation = {"fused", "foreach", "capturable", "differentiable"}
    has_fused = "fused" in inspect.signature(used).parameters
    if has_fused and may_fuse and not implementation & arguments.keys():
        arguments["fused"] = True
    return used, arguments


def derived(place: str, optimizer_class: type[Optimizer]) -> type[Optimizer]:
    """Return the class that trains in place of another.

    Args:
        place: MODULE:FUNCTION that returns it, from a row; empty: the class itself.
        optimizer_class: the class.
    """
    if not place:
        return optimizer_class
    found: type[Optimizer] = imported(place)(optimizer_class)
    return found


def _optimizer_class(class_path: str) -> type[Optimizer]:
    package, _, name = class_path.rpartition(".")
    row = OPTIMIZERS.get(package)
    try:
        found: Any = None if row is None else row.content().get(name)
    except ImportError as error:
        raise UserError(f"optimizer {class_path} needs a package: {error}.") from None
    is_class = isinstance(found, type) and issubclass(found, Optimizer)
    if not is_class or found is Optimizer:
        require_own("optimizer", class_path)
        known = [n for n in dir(torch.optim) if n[:1].isupper()]
        known += [n for held in OPTIMIZERS.held.values() for n in held.optimizers]
        close = names_elsewhere().get(name) or nearest(name, known)
        raise UserError(
            f"optimizer is {class_path!r}, but there is no such optimizer. "
            f"Try --optimizer {close or 'AdamW'}, or --plugin FILE.py for one of your own."
        )
    of_package: type[Optimizer] = found
    return of_package


# Gradient clipping by the global norm, also of sharded gradients


def norms_of(gradients: list[Tensor]) -> Sequence[Tensor]:
    """Norm of each gradient, in float32."""
    if gradients and gradients[0].device.type == "cpu":
        return [_norm_on_cpu(gradient) for gradient in gradients]
    # One kernel for many gradients; torch.nn.utils calls the same one, but in their dtype.
    norms: Sequence[Tensor] = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    return norms


def _norm_on_cpu(gradient: Tensor) -> Tensor:
    # By rows: a CPU adds squares one by one, and over many millions the error reaches 1e-3. It
    # also takes half the time in float32, and a quarter in 16 bits if these are converted first.
    of_rows = partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float32)
    is_plain = not (isinstance(gradient, dtensor()) or is_fake(gradient))
    if is_plain and gradient.ndim > 1 and gradient.itemsize == 2:
        pieces = gradient.flatten(0, -2).split(max(1, PIECE // gradient.size(-1)))
        return torch.linalg.vector_norm(torch.cat([of_rows(piece.float()) for piece in pieces]))
    return torch.linalg.vector_norm(of_rows(gradient))


def global_norm(norms: Sequence[Tensor]) -> Tensor:
    """Norm of all gradients together, a scalar."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return norm


def clip_gradients(parameters: Sequence[torch.nn.Parameter], limit: float | None) -> Tensor:
    """Measure the global norm of the gradients, and scale them so that it is at most `limit`.

    Args:
        parameters: of one dtype, on one device.
        limit: None: the norm is only measured.

    Returns:
        Norm before clipping, a scalar in float32; a DTensor if the gradients are.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = global_norm(norms_of(gradients))
    if limit is None:
        return norm
    if gradients[0].dtype == torch.float32:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm
    # torch's function would round norm and factor to the dtype of the gradients: bfloat16 has 8
    # bits of precision.
    # A collective under FSDP: every rank must have the same factor.
    known = norm.full_tensor() if isinstance(norm, dtensor()) else norm
    # The same 1e-6 as in torch.nn.utils.clip_grad_norm_.
    factor = (limit / (known + 1e-6)).clamp(max=1.0)
    if factor.device.type != "cpu":  # a GPU rounds a scalar to the dtype of the other operand
        factor = factor[None]
    for gradient in gradients:
        (gradient.to_local() if isinstance(gradient, dtensor()) else gradient).mul_(factor)
    return norm


# Muon


class MuonWithAdamW(Optimizer):
    """Muon for the matrices of hidden layers and AdamW for everything else, with one state."""

    muon: type[torch.optim.Muon] = torch.optim.Muon
    """Class of the part that is Muon."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        fused: bool = False,
        **muon_arguments: Any,
    ) -> None:
        """Create both optimizers.

        Args:
            params: parameters, or groups of them, which may have a `weight_decay` of their own;
                AdamW takes all of a group with `is_hidden` false, even its matrices.
            lr: of both.
            weight_decay: of both, for groups without their own.
            betas: of AdamW.
            fused: whether to use torch's fused AdamW.
            **muon_arguments: other arguments of torch's Muon.
        """
        groups = [group if isinstance(group, dict) else {"params": [group]} for group in params]
        matrices: dict[float, list[Tensor]] = {}
        others: dict[float, list[Tensor]] = {}
        for group in groups:
            decay: Any = group.get("weight_decay", weight_decay)
            for parameter in group["params"]:
                is_matrix = parameter.ndim == 2 and group.get("is_hidden", True)
                (matrices if is_matrix else others).setdefault(decay, []).append(parameter)
        # By default updates have the size of AdamW's, so that one learning rate suits both.
        arguments = {"adjust_lr_fn": "match_rms_adamw"} | muon_arguments
        parts: list[Optimizer] = []
        # An optimizer without parameters is refused by torch; a part of a model may have one kind.
        if matrices:
            parts.append(self.muon(_by_decay(matrices), lr=lr, **arguments))
        if others:
            adamw = torch.optim.AdamW(_by_decay(others), lr=lr, betas=betas, fused=fused or None)
            parts.append(adamw)
        self._parts = parts
        # The dictionaries of the groups are shared with both parts, so a new rate reaches them.
        super().__init__([group for part in parts for group in part.param_groups], {})
        # One state in one place: checkpoints need not know that there are two optimizers.
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for part in self._parts:
            # Groups may have been replaced since, as OptimizerInBackward does.
            is_muon = isinstance(part, torch.optim.Muon)
            part.param_groups = [
                group for group in self.param_groups if uses_muon(group) == is_muon
            ]
            part.step()


def with_adamw(optimizer_class: type[Optimizer]) -> type[Optimizer]:
    """Return the class that trains in place of torch's Muon, which only takes matrices."""
    assert optimizer_class is torch.optim.Muon
    return MuonWithAdamW


def _by_decay(parameters: dict[float, list[Tensor]]) -> list[dict[str, Any]]:
    return [{"params": some, "weight_decay": decay} for decay, some in parameters.items()]


def uses_muon(group: dict[str, Any]) -> bool:
    """Return whether Muon updates a parameter group."""
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
        # In the order of the groups: the sum must not depend on the order of the backward pass.
        in_order = [p for group in self._optimizer.param_groups for p in group["params"]]
        norm = global_norm([self._norms[p] for p in in_order if p in self._norms])
        self._norms.clear()
        return norm

    def update(self, index: int, parameter: nn.Parameter) -> None:
        """Update one parameter of a group and free its gradient."""
        assert parameter.grad is not None
        # Before the step, because the gradient is freed after it.
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
