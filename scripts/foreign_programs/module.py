"""Lightning's Trainer with a module around transformers' model: one file, or sharded.

python module.py BASE OUT [--sharded]
"""

import argparse
from pathlib import Path
from typing import Any

import lightning
import torch
from common import MAX_NORM, RATE, STEPS, note_next, read_samples
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM


class Module(lightning.LightningModule):
    """As Lightning's documentation has it: the model is an attribute."""

    def __init__(self, base: Path) -> None:
        super().__init__()
        self.save_hyperparameters({"learning_rate": RATE})
        self.model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> Any:
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)


def main() -> None:
    """Train, save, and train one step more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    asked = parser.parse_args()
    samples = torch.tensor(read_samples(asked.base))
    module = Module(asked.base)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        max_epochs=-1,
        gradient_clip_val=MAX_NORM,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(samples, batch_size=len(samples)))
    trainer.save_checkpoint(asked.out / "checkpoint.ckpt")
    # A second call of fit would begin with a new optimizer.
    trainer.fit_loop.epoch_loop.max_steps = STEPS + 1
    saved = str(asked.out / "checkpoint.ckpt")
    trainer.fit(module, DataLoader(samples, batch_size=len(samples)), ckpt_path=saved)
    note_next(asked.out, module.losses[-1], RATE, dict(module.model.named_parameters()))


if __name__ == "__main__":
    main()
