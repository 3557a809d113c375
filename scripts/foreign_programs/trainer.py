"""transformers' Trainer and TRL's SFTTrainer: full or LoRA.

python trainer.py BASE OUT --trainer transformers --schedule constant [--lora]
torchrun --nproc_per_node N trainer.py BASE OUT --deepspeed STAGE | --fsdp STATE_DICT_TYPE

The Trainer uses DeepSpeed and FSDP on GPUs only. `_as_on_gpus` makes it use them on the CPU; all
else is its own, and so are the files that it writes.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from common import MAX_NORM, RATE, STEPS, note_next, read_samples
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)


class _Watch(TrainerCallback):
    """Records the learning rate of the last step."""

    def __init__(self) -> None:
        self.rate = 0.0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        self.rate = known["optimizer"].param_groups[0]["lr"]


def main() -> None:
    """Train, save, and train one step more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--trainer", choices=["transformers", "trl"], default="transformers")
    parser.add_argument("--schedule", default="constant")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--deepspeed", type=int, help="stage of ZeRO")
    parser.add_argument("--fsdp", choices=["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
    options = parser.parse_args()
    samples = read_samples(options.base)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    if options.deepspeed is not None or options.fsdp:
        _as_on_gpus()
    model = AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    settings: dict[str, Any] = {
        "output_dir": str(options.out),
        "max_steps": 8,
        "per_device_train_batch_size": len(samples) // world,
        "learning_rate": RATE,
        "lr_scheduler_type": options.schedule,
        "max_grad_norm": MAX_NORM,
        "weight_decay": 0.0,
        "adam_beta2": 0.95,
        "save_steps": STEPS,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": options.deepspeed is None and not options.fsdp,
        "seed": 0,
        "optim": "adamw_torch",
    }
    if options.deepspeed is not None:
        settings["deepspeed"] = {
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": options.deepspeed},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
    if options.fsdp:
        settings["fsdp"] = True
        settings["fsdp_config"] = {
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "state_dict_type": options.fsdp,
        }
    watch = _Watch()
    # A label at the first token is never used, but would be counted.
    data = Dataset.from_list([{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in samples])
    if options.trainer == "trl":
        from trl import SFTConfig, SFTTrainer

        plain = Dataset.from_list(
            [{"input_ids": ids, "completion_mask": [0] + [1] * (len(ids) - 1)} for ids in samples]
        )
        trainer: Any = SFTTrainer(
            model=model,
            args=SFTConfig(**settings, bf16=False, max_length=None, packing=False),
            train_dataset=plain,
            peft_config=_adapter() if options.lora else None,
            callbacks=[watch],
            processing_class=_tokenizer(options.base),
        )
    else:
        if options.lora:
            from peft import get_peft_model

            model = get_peft_model(model, _adapter())
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**settings),
            train_dataset=data,
            data_collator=default_data_collator,
            callbacks=[watch],
        )
    trainer.add_callback(_StopAfterNext())
    trainer.train()
    weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    if int(os.environ.get("RANK", "0")) == 0:
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        if options.lora:
            weights = {name: value for name, value in weights.items() if "lora_" in name}
        note_next(options.out, losses[STEPS], watch.rate, weights)


class _StopAfterNext(TrainerCallback):
    """Ends the training after the step that follows the checkpoint."""

    def on_step_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        control.should_training_stop = state.global_step > STEPS


def _as_on_gpus() -> None:
    """Have accelerate use CPUs like GPUs: with gloo, and with FSDP and DeepSpeed."""
    import accelerate
    from accelerate.utils import DistributedType

    os.environ.pop("ACCELERATE_USE_CPU", None)
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"

    def backend_of(*_: Any, **__: Any) -> Any:
        return "gloo", DistributedType.MULTI_GPU

    accelerate.state.PartialState._prepare_backend = backend_of


def _adapter() -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.0,
        target_modules=["q_proj", "v_proj", "down_proj"],
        task_type="CAUSAL_LM",
    )


def _tokenizer(base: Path) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


if __name__ == "__main__":
    main()
