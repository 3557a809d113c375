"""Optimizers: the one of a recipe, with its parameter groups (LoRA+) and its fused steps.

LoRA+: Hayou et al. 2024, https://arxiv.org/abs/2402.12354.
"""

import importlib
import inspect
from typing import Any

import torch

from ftkit.errors import UserError, is_out_of_memory
from ftkit.models.language_model import trainable
from ftkit.recipe.recipe import LoraRecipe, Recipe
from ftkit.strategies.optim.muon import MUON, MuonWithAdamW, muon_groups
from ftkit.utils.names import nearest


def base_learning_rate(recipe: Recipe) -> float:
    """The full learning rate: the recipe's, or the optimizer's own default."""
    given = recipe.optimizer["init_args"].get("lr")
    if given is None:
        signature = inspect.signature(_optimizer_class(recipe.optimizer["class_path"]))
        given = signature.parameters["lr"].default
    return float(given)


def make_optimizer(
    recipe: Recipe,
    model: torch.nn.Module,
    optimizer_class: type[torch.optim.Optimizer],
    arguments: dict[str, Any],
) -> torch.optim.Optimizer:
    """The recipe's optimizer over the trained parameters.

    Args:
        recipe: which parameters have which learning rate.
        model: what is trained.
        optimizer_class: from `resolve_optimizer`, or a class made of it.
        arguments: likewise.

    Raises:
        UserError: the class refuses its arguments.
    """
    chosen = recipe.optimizer
    is_muon = optimizer_class is MuonWithAdamW
    groups = muon_groups(model) if is_muon else _groups(recipe, model)
    try:
        return optimizer_class(groups, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"optimizer {chosen['class_path']} refuses its arguments {chosen['init_args']}: {error}"
        ) from None


def _groups(recipe: Recipe, model: torch.nn.Module) -> list[dict[str, Any]]:
    """What is trained, in groups of one learning rate; the first has the recipe's."""
    ratio = recipe.lora_plus_ratio if isinstance(recipe, LoraRecipe) else None
    if ratio is None:
        return [{"params": trainable(model)}]
    found: dict[bool, list[torch.nn.Parameter]] = {False: [], True: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[".lora_B." in name].append(parameter)
    rate = base_learning_rate(recipe)
    return [{"params": found[False], "lr": rate}, {"params": found[True], "lr": rate * ratio}]


def resolve_optimizer(
    recipe: Recipe, *, may_fuse: bool, class_path: str | None = None
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The recipe's optimizer: its class and arguments.

    torch's fused implementation is chosen where it exists: it is faster and needs no temporary
    copy of the parameters.

    Args:
        recipe: names the class and its arguments.
        may_fuse: whether that implementation suits the strategy and the precision.
        class_path: a class that does the same as the recipe's, instead of it.

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
        arguments["betas"] = tuple(arguments["betas"])
    if class_path == MUON:
        return MuonWithAdamW, arguments | {"fused": may_fuse}
    implementation = {"fused", "foreach", "capturable", "differentiable"}
    if "fused" in known and may_fuse and not implementation & arguments.keys():
        arguments["fused"] = True
    return optimizer_class, arguments


def _optimizer_class(class_path: str) -> type[torch.optim.Optimizer]:
    package, _, name = class_path.rpartition(".")
    try:
        found = getattr(importlib.import_module(package), name, None)
    except ImportError as error:
        raise UserError(f"optimizer {class_path} needs a package: {error}.") from None
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        known = [n for n in dir(torch.optim) if n[:1].isupper()]
        close = nearest(name, known)
        raise UserError(
            f"optimizer is {class_path!r}, but there is no such optimizer. "
            f"Try --optimizer {close or 'AdamW'}."
        )
    return found
