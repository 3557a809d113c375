"""LitGPT's own commands: full fine-tuning, whose checkpoints hold the optimizer's state, and LoRA.

python gpt.py BASE OUT [--lora]
"""

import argparse
import csv
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from common import RATE, STEPS, note_next, read_samples
from litgpt.config import Config
from litgpt.data import DataModule, get_sft_collate_fn
from litgpt.prompts import Default
from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
from litgpt.utils import save_config
from safetensors.torch import load_file
from torch.utils.data import DataLoader

WHOLE_RUN = 8
"""Steps over which the learning rate falls."""
SETTINGS = {"lr": RATE, "betas": [0.9, 0.95], "weight_decay": 0.1}
ADAPTED = ("query", "value", "projection", "mlp")
RANK, ALPHA = 4, 8
WEIGHTS = "lit_model.pth"


class Samples(DataModule):
    """The samples, as one batch."""

    def __init__(self, base: str) -> None:
        super().__init__()
        self.prompt_style = Default()
        counts = {"raw": 1, "raw_plus_prompt_template": 1}
        self._samples = [
            {"input_ids": torch.tensor(ids), "labels": torch.tensor(ids), "token_counts": counts}
            for ids in read_samples(Path(base))
        ]

    def connect(self, *_: Any, **__: Any) -> None:
        """Do nothing: the samples need no preparation."""

    def train_dataloader(self) -> Any:
        return DataLoader(
            self._samples, batch_size=len(self._samples), collate_fn=get_sft_collate_fn()
        )

    def val_dataloader(self) -> Any:
        return self.train_dataloader()


def main() -> None:
    """Train past the checkpoint, and record the step after it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lora", action="store_true")
    options = parser.parse_args()
    base = Path("base")
    _convert(options.base, options.out / base)
    os.chdir(options.out)  # so that no checkpoint names a directory of this machine
    data = {"class_path": "gpt.Samples", "init_args": {"base": str(base)}}
    optimizer = {"class_path": "torch.optim.AdamW", "init_args": SETTINGS}
    command = f"finetune_{'lora' if options.lora else 'full'}"
    words = ["litgpt", command, "base", "--out_dir", "run", "--precision", "32-true"]
    words += ["--data", json.dumps(data), "--optimizer", json.dumps(optimizer), "--devices", "1"]
    words += ["--train", json.dumps({"save_interval": 1, "log_interval": 1, "lr_warmup_steps": 1})]
    words += ["--train.global_batch_size", "6", "--train.micro_batch_size", "6"]
    words += ["--train.epochs", "100", "--train.max_steps", str(WHOLE_RUN)]
    words += ["--eval.interval", "1000", "--eval.final_validation", "false", "--seed", "0"]
    if options.lora:
        words += ["--lora_r", str(RANK), "--lora_alpha", str(ALPHA), "--lora_dropout", "0"]
        words += [f"--lora_{part}=true" for part in ADAPTED]
    sys.argv = words
    from litgpt.__main__ import main as litgpt

    litgpt()
    found, after = (Path("run") / f"step-{step:06d}" for step in (STEPS, STEPS + 1))
    if options.lora:
        _note_adapter(base, found)
        return
    with next(Path("run").rglob("metrics.csv")).open() as file:
        rows = [row for row in csv.DictReader(file) if row["loss"]]
    optimizer_state = torch.load(found / WEIGHTS, weights_only=True)["optimizer"]
    weights = torch.load(after / WEIGHTS, weights_only=True)["model"]
    rate = optimizer_state["param_groups"][0]["lr"]
    note_next(Path.cwd(), float(rows[STEPS]["loss"]), rate, weights)


def _convert(base: Path, out: Path) -> None:
    """Write the base model in LitGPT's layout."""
    settings = json.loads((base / "config.json").read_text())
    config = Config(
        name="tiny",
        block_size=settings["max_position_embeddings"],
        vocab_size=settings["vocab_size"],
        padded_vocab_size=settings["vocab_size"],
        n_layer=settings["num_hidden_layers"],
        n_head=settings["num_attention_heads"],
        n_query_groups=settings["num_key_value_heads"],
        n_embd=settings["hidden_size"],
        intermediate_size=settings["intermediate_size"],
        norm_class_name="RMSNorm",
        norm_eps=settings["rms_norm_eps"],
        mlp_class_name="LLaMAMLP",
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
    )
    out.mkdir()
    weights: dict[str, torch.Tensor] = {}
    copy_weights_hf_llama(config, {}, weights, load_file(base / "model.safetensors"))
    torch.save(weights, out / WEIGHTS)
    save_config(config, out)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "samples.json"):
        shutil.copyfile(base / name, out / name)


def _note_adapter(base: Path, found: Path) -> None:
    """Record the step of a new optimizer after an adapter: LitGPT saves no optimizer with one."""
    from litgpt.lora import GPT, mark_only_lora_as_trainable
    from litgpt.lora import Config as LoraConfig
    from litgpt.utils import chunked_cross_entropy

    adapted: dict[str, Any] = {f"lora_{part}": True for part in ADAPTED}
    settings = {"lora_r": RANK, "lora_alpha": ALPHA} | adapted
    model = GPT(LoraConfig.from_file(found / "model_config.yaml", **settings))
    model.load_state_dict(torch.load(Path("base") / WEIGHTS, weights_only=True), strict=False)
    adapter = torch.load(found / f"{WEIGHTS}.lora", weights_only=True)["model"]
    model.load_state_dict(adapter, strict=False)
    mark_only_lora_as_trainable(model)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), **SETTINGS)
    ids = torch.tensor(read_samples(base))
    loss = chunked_cross_entropy(model(ids)[..., :-1, :], ids[..., 1:])
    loss.backward()
    optimizer.step()
    note_next(Path.cwd(), loss.item(), RATE, trained)


if __name__ == "__main__":
    main()
