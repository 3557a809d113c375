"""The LightningModule: the loss of a step, its optimizer and its learning rate."""

from collections.abc import Callable
from typing import Any, Self

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.distributed.tensor import DTensor

from ftkit.config.plan import Plan
from ftkit.model.language_model import LanguageModel, trainable
from ftkit.optim.clipping import clip_gradients
from ftkit.optim.optimizers import base_learning_rate, make_optimizer
from ftkit.optim.schedule import Schedule
from ftkit.strategies.lightning import make_sharding
from ftkit.strategies.sharding import Sharding


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
        total = self.model(batch["input_ids"], batch["label_indices"], batch["labels"])
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
