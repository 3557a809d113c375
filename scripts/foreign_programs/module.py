"""Lightning's Trainer with a module around transformers' model: one file, or sharded.

python module.py BASE OUT
torchrun --nproc_per_node N module.py BASE OUT --sharded
"""

import argparse
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from common import MAX_NORM, RATE, STEPS, note_next, read_samples
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM


class Module(lightning.LightningModule):
    """Module as in Lightning's documentation: the model is an attribute."""

    def __init__(self, base: Path) -> None:
        super().__init__()
        self.save_hyperparameters({"learning_rate": RATE})
        self.model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Shard the model if the strategy has a device mesh; Lightning calls it at every start."""
        if self.device_mesh is None or isinstance(self.model, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def training_step(self, batch: Any, _: int) -> Any:
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        mean = loss.detach().clone()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(mean)
            mean /= torch.distributed.get_world_size()
        self.losses.append(float(mean))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)


class Saving(lightning.Callback):
    """Saves before the last step, and records that step."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == STEPS:
            trainer.save_checkpoint(self._out / "checkpoint.ckpt")

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        weights = {name: whole(value) for name, value in pl_module.model.named_parameters()}
        if trainer.is_global_zero:
            note_next(self._out, pl_module.losses[-1], RATE, weights)


def main() -> None:
    """Train, save, and train one step more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sharded", action="store_true")
    options = parser.parse_args()
    lightning.seed_everything(0)
    samples = torch.tensor(read_samples(options.base))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    module = Module(options.base)
    sharding = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=sharding if options.sharded else "auto",
        max_steps=STEPS + 1,
        max_epochs=-1,
        gradient_clip_val=MAX_NORM,
        callbacks=[Saving(options.out)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(samples, batch_size=len(samples) // world))


def whole(parameter: Any) -> torch.Tensor:
    """The whole parameter, gathered from all ranks."""
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


if __name__ == "__main__":
    main()
