"""LitGPT's own command line, with a line for the benchmark after each step.

Runs in LitGPT's environment, without ftkit: ``litgpt_run.py convert MODEL DIRECTORY`` writes a
Llama of Hugging Face in LitGPT's layout, ``litgpt_run.py run STEPS finetune_lora ...`` is
``litgpt finetune_lora ...`` up to the end of step STEPS. LitGPT's own logs are unchanged.
"""

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MARK = "benchmark: "


def convert(source: Path, target: Path) -> None:
    """Write a model in LitGPT's layout: its own conversion only knows models by name."""
    import torch
    import yaml
    from litgpt.config import Config
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
    from safetensors.torch import load_file

    settings = json.loads((source / "config.json").read_text())
    config = Config(
        name=source.name,
        block_size=settings["max_position_embeddings"],
        vocab_size=settings["vocab_size"],
        padded_vocab_size=settings["vocab_size"],
        n_layer=settings["num_hidden_layers"],
        n_head=settings["num_attention_heads"],
        n_query_groups=settings["num_key_value_heads"],
        n_embd=settings["hidden_size"],
        intermediate_size=settings["intermediate_size"],
        rotary_percentage=1.0,
        rope_base=int(settings["rope_theta"]),
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=settings["rms_norm_eps"],
        mlp_class_name="LLaMAMLP",
    )
    weights: dict[str, Any] = {}
    for file in sorted(source.glob("*.safetensors")):
        weights |= load_file(file)
    state: dict[str, Any] = {}
    copy_weights_hf_llama(config, {}, state, weights)
    target.mkdir(parents=True, exist_ok=True)
    torch.save(state, target / "lit_model.pth")
    (target / "model_config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config)))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, target / name)


class StepLines:
    """Prints a line for each optimizer step from LitGPT's logs."""

    def __init__(self, steps: int) -> None:
        self._steps, self._seen = steps, 0

    def log(self, values: Mapping[str, Any]) -> None:
        """Take a dictionary that LitGPT logs; end the process after the last step."""
        step = values.get("step", 0)
        if "loss" not in values or step == self._seen:
            return
        self._seen = step
        tell(
            {
                "step": step,
                "loss": float(values["loss"]),
                "total_tokens": int(values["total_tokens"]),
            }
        )
        if step == self._steps:
            tell({"device_memory": device_memory()})
            # At once: LitGPT would go on to save the model.
            os._exit(0)


def tell(event: dict[str, Any]) -> None:
    """Report an event to the benchmark."""
    print(MARK + json.dumps(event), flush=True)


def device_memory() -> list[int] | None:
    """Highest memory allocated and reserved on the GPU; None on CPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]


def run(steps: int) -> None:
    """Run LitGPT's main function with the command line of this program."""
    from lightning.fabric import Fabric
    from litgpt.__main__ import main

    lines = StepLines(steps)
    log_dict = Fabric.log_dict

    def log(self: Fabric, metrics: Mapping[str, Any], step: int | None = None) -> None:
        log_dict(self, metrics, step)
        lines.log(metrics)

    setattr(Fabric, "log_dict", log)  # noqa: B010  # a method, to mypy
    main()


if __name__ == "__main__":
    what, *words = sys.argv[1:]
    if what == "convert":
        convert(Path(words[0]), Path(words[1]))
    else:
        sys.argv = ["litgpt", *words[1:]]
        run(int(words[0]))
