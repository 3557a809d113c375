"""The LightningModule: the loss of a step, its optimizer and its learning rate."""

import difflib
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Self

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.distributed.tensor import DTensor

from ftkit.errors import UserError
from ftkit.model import LanguageModel, trainable
from ftkit.out_of_memory import is_out_of_memory
from ftkit.planning import DeepSpeedOptions, Plan
from ftkit.recipe import LoraRecipe, Recipe
from ftkit.schedule import Schedule
from ftkit.sharding import Sharding
from ftkit.strategy import make_sharding

CPU_VERSIONS = {
    "torch.optim.Adam": "deepspeed.ops.adam.DeepSpeedCPUAdam",
    "torch.optim.AdamW": "deepspeed.ops.adam.DeepSpeedCPUAdam",
}
"""Optimizers for state in host memory that do the same as torch's, with vector instructions."""


class FineTuner(L.LightningModule):
    """Trains a LanguageModel so that the loss of a step is the mean over its label tokens.

    Each micro-step contributes the sum of its token losses divided by the label tokens of the
    whole step, over all ranks. The gradient is then the same however the step is split.
    """

    def __init__(
        self,
        model: LanguageModel,
        plan: Plan,
        schedule: Schedule,
        fill: Callable[[LanguageModel, Sharding, torch.device], None],
        *,
        start_step: int = 0,
    ) -> None:
        """Prepare.

        Args:
            model: outlined, without memory.
            plan: what to run.
            schedule: its steps and learning rates.
            fill: gives the model its numbers on a device.
            start_step: optimizer steps done before.
        """
        super().__init__()
        self.model = model
        self.plan = plan
        self._fill = fill
        self.on_ready: Callable[[], None] = lambda: None
        """Called when model and optimizer are in place, before the first step."""
        self.before_update: Callable[[], None] = lambda: None
        """Called between the last backward pass of a step and its update."""
        self.sharding: Sharding | None = None
        """Where the parameters live, once the processes are connected."""
        self.schedule = schedule
        self.start_step = start_step
        self.base_learning_rate = base_learning_rate(plan.recipe)
        self.step_loss = torch.zeros((), dtype=torch.float64)
        """Loss of the optimizer step so far, this rank's share, in nats per label token."""
        self.gradient_norm: Tensor | None = None
        """Global norm before clipping, of the newest optimizer step."""

    def configure_model(self) -> None:
        """Give the model its memory and its numbers, now that the processes are connected."""
        if self.sharding is None:
            self.sharding = make_sharding(self.plan, self)
            # Lightning makes the GPU torch's default device here, but what is read or drawn on the
            # way to it belongs to the host.
            with torch.device("cpu"):
                self._fill(self.model, self.sharding, self.trainer.strategy.root_device)

    def cpu(self) -> Self:
        """Stay: Lightning moves a module when it is done, but this process ends with the run."""
        return self

    def on_fit_start(self) -> None:
        # DeepSpeed has cast the tables with the parameters.
        self.model.place_rotary_tables(self.device, self.model.gpt.max_seq_length)
        self.step_loss = self.step_loss.to(self.device)
        self.on_ready()

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        """This micro-step's share of the step's loss, scaled for what Lightning divides by."""
        total = self.model(batch["input_ids"], batch["positions"], batch["targets"])
        share = total / batch["label_tokens_in_step"]
        self.step_loss += share.detach()
        return share * (self.trainer.accumulate_grad_batches * self.trainer.world_size)

    def take_step_loss(self) -> Tensor:
        """This rank's share of the finished step's loss; the next one starts from zero."""
        loss = self.step_loss.clone()
        self.step_loss.zero_()
        return loss

    def newest_gradient_norm(self) -> float:
        """Global norm before clipping, of the newest optimizer step."""
        if self.plan.strategy == "deepspeed":
            engine: Any = self.trainer.strategy.model
            return float(engine.get_global_grad_norm())
        norm = self.gradient_norm
        assert norm is not None
        return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()

    def learning_rate_of(self, step: int) -> float:
        """Learning rate of optimizer step `step` (from 0)."""
        return self.base_learning_rate * self.schedule.share(step)

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """Measure the global gradient norm, and clip by it if the recipe says so."""
        if self.plan.strategy == "deepspeed":  # does both itself
            return
        limit = self.plan.recipe.train.max_norm
        self.gradient_norm = clip_gradients(trainable(self.model), limit)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.before_update()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Step, then free the gradients at once: they never coexist with the next activations."""
        super().optimizer_step(*args, **kwargs)
        if self.plan.strategy != "deepspeed":  # called in every micro-step, and frees its own
            self.zero_grad(set_to_none=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = make_optimizer(self.plan, self.model)
        for group in optimizer.param_groups:  # a scheduler that starts later wants to know it
            group["initial_lr"] = group["lr"]
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, self.schedule.share, last_epoch=self.start_step - 1
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


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


def clip_gradients(parameters: Sequence[torch.nn.Parameter], limit: float | None) -> Tensor:
    """Measure the global norm of the gradients, and scale them so that it is at most `limit`.

    Norm and factor are float32 in every number format: in bfloat16 they would have 8 bits.

    Args:
        parameters: of one number format, on one device.
        limit: None: they are only measured.

    Returns:
        The norm before clipping, a scalar in float32; a DTensor if the gradients are.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norms = torch._foreach_norm(gradients, 2, dtype=torch.float32)
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if limit is None:
        return norm
    if gradients[0].dtype == torch.float32:
        torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm
    known = norm.full_tensor() if isinstance(norm, DTensor) else norm
    factor = (limit / (known + 1e-6)).clamp(max=1.0)
    if factor.device.type == "cuda":  # there a scalar is rounded to the format of what it scales
        factor = factor[None]
    for gradient in gradients:
        (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(factor)
    return norm


def make_optimizer(plan: Plan, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The recipe's optimizer over the trained parameters.

    Raises:
        UserError: the class does not exist or does not take the arguments.
    """
    optimizer_class, arguments = optimizer_of(plan)
    chosen = plan.recipe.optimizer
    if plan.strategy == "fsdp" and chosen["class_path"].startswith("bitsandbytes."):
        from ftkit.sharded_optimizer import over_local_rows

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
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {close[0]}?" if close else f"Known: {', '.join(list(known)[1:])}."
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
        close = difflib.get_close_matches(name, known, n=1)
        raise UserError(
            f"optimizer is {class_path!r}, but there is no such optimizer. "
            f"Try --optimizer {close[0] if close else 'AdamW'}."
        )
    return found
