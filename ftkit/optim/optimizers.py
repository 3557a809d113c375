"""Optimizers: the one of a recipe, with its parameter groups (LoRA+) and its fused steps.

LoRA+: Hayou et al. 2024, https://arxiv.org/abs/2402.12354.
"""

import importlib
import inspect
from typing import Any

import torch

from ftkit.config.plan import Plan
from ftkit.config.recipe import LoraRecipe, Recipe
from ftkit.config.strategies import DeepSpeedOptions
from ftkit.errors import UserError
from ftkit.model.language_model import trainable
from ftkit.utils.nearest import nearest
from ftkit.utils.out_of_memory import is_out_of_memory

CPU_VERSIONS = {
    "torch.optim.Adam": "deepspeed.ops.adam.DeepSpeedCPUAdam",
    "torch.optim.AdamW": "deepspeed.ops.adam.DeepSpeedCPUAdam",
}
"""Optimizers for state in host memory that do the same as torch's, with vector instructions."""


def base_learning_rate(recipe: Recipe) -> float:
    """The full learning rate: the recipe's, or the optimizer's own default."""
    given = recipe.optimizer["init_args"].get("lr")
    if given is None:
        signature = inspect.signature(_optimizer_class(recipe.optimizer["class_path"]))
        given = signature.parameters["lr"].default
    if not isinstance(given, int | float) or given < 0:
        raise UserError(
            f"optimizer.init_args.lr is {given!r}, but must be a number of at least 0. "
            "Try --optimizer.lr 2e-4."
        )
    return float(given)


def make_optimizer(plan: Plan, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimizer over the trained parameters.

    Raises:
        UserError: the class does not exist or does not take the arguments.
    """
    optimizer_class, arguments = optimizer_of(plan)
    chosen = plan.recipe.optimizer
    if plan.strategy == "fsdp" and chosen["class_path"].startswith("bitsandbytes."):
        from ftkit.optim.bnb_fsdp import over_local_rows

        optimizer_class = over_local_rows(optimizer_class)
    try:
        return optimizer_class(_groups(plan, model), **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise
        raise UserError(
            f"optimizer {chosen['class_path']} refuses its arguments {chosen['init_args']}: {error}"
        ) from None


def _groups(plan: Plan, model: torch.nn.Module) -> list[dict[str, Any]]:
    """What is trained, in groups of one learning rate; the first has the recipe's."""
    recipe = plan.recipe
    ratio = recipe.lora_plus_ratio if isinstance(recipe, LoraRecipe) else None
    if ratio is None:
        return [{"params": trainable(model)}]
    found: dict[bool, list[torch.nn.Parameter]] = {False: [], True: []}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[".lora_B." in name].append(parameter)
    rate = base_learning_rate(recipe)
    return [{"params": found[False], "lr": rate}, {"params": found[True], "lr": rate * ratio}]


def optimizer_of(plan: Plan) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The recipe's optimizer for the plan's strategy, and its arguments.

    torch's fused implementation is chosen where it exists: it is faster and needs no temporary
    copy of the parameters.

    Raises:
        UserError: the class does not exist or does not take the arguments.
    """
    chosen = plan.recipe.optimizer
    class_path, arguments = chosen["class_path"], dict(chosen["init_args"])
    options = plan.options
    if isinstance(options, DeepSpeedOptions) and options.offload_optimizer:
        class_path = CPU_VERSIONS.get(class_path, class_path)
    optimizer_class = _optimizer_class(class_path)
    known = inspect.signature(optimizer_class).parameters
    for name in arguments:
        if name not in known:
            close = nearest(name, known)
            hint = f"Did you mean {close}?" if close else f"Known: {', '.join(list(known)[1:])}."
            raise UserError(
                f"optimizer.init_args.{name} is not an argument of {class_path}. {hint}"
            )
    if class_path == CPU_VERSIONS["torch.optim.AdamW"]:
        arguments.setdefault("adamw_mode", chosen["class_path"] != "torch.optim.Adam")
        arguments.setdefault("weight_decay", 0.01 if arguments["adamw_mode"] else 0.0)
    if "betas" in arguments:
        arguments["betas"] = tuple(arguments["betas"])
    implementation = {"fused", "foreach", "capturable", "differentiable"}
    # 16-mixed clips unscaled gradients before the step, DeepSpeed updates slices of its own.
    may_fuse = plan.precision != "16-mixed" and plan.strategy != "deepspeed"
    if plan.strategy == "fsdp":  # torch has fused steps over DTensors for these alone
        may_fuse = may_fuse and class_path in ("torch.optim.Adam", "torch.optim.AdamW")
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
