"""A trainer of TRL, with a line for the benchmark after each step.

Runs in TRL's environment, without ftkit: ``trl_run.py FILE`` with the settings of the training in a
JSON file. The trainer and its settings are TRL's own; a hook counts tokens and positions.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

MARK = "benchmark: "


class Counter:
    """Real tokens and computed positions of forward passes, counted on the device."""

    def __init__(self) -> None:
        self.tokens: Any = 0
        self.positions = 0

    def __call__(self, module: Any, words: Any, keys: dict[str, Any]) -> None:
        """Count the inputs of a forward pass with gradients: not those of a reference."""
        if not torch.is_grad_enabled():
            return
        ids = keys["input_ids"] if "input_ids" in keys else words[0]
        mask = keys.get("attention_mask")
        self.positions += ids.numel()
        self.tokens = self.tokens + (ids.numel() if mask is None else mask.sum())


class StepLines(TrainerCallback):
    """Prints a line for each optimizer step."""

    def __init__(self, counter: Counter, logged: str, factor: float) -> None:
        self._counter, self._logged, self._factor = counter, logged, factor

    def on_log(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Report what the trainer logs after a step."""
        logs = more["logs"]
        if self._logged not in logs:
            return
        tell(
            {
                "step": state.global_step,
                "loss": self._factor * float(logs[self._logged]),
                "total_tokens": int(self._counter.tokens),
                "total_positions": self._counter.positions,
            }
        )


def tell(event: dict[str, Any]) -> None:
    """Report an event to the benchmark."""
    print(MARK + json.dumps(event), flush=True)


def adapter(what: dict[str, Any]) -> Any:
    """LoRA on the projections of queries and values, the default of ftkit and LitGPT."""
    if what["method"] != "lora":
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=what["rank"],
        lora_alpha=what["alpha"],
        lora_dropout=0.0,
        target_modules=what["targets"],
        task_type="CAUSAL_LM",
    )


def model_settings(what: dict[str, Any]) -> dict[str, Any]:
    """Options for loading the weights."""
    settings: dict[str, Any] = {"dtype": what["dtype"]}
    if what["quantize"]:
        from transformers import BitsAndBytesConfig

        settings["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=getattr(torch, what["dtype"]),
        )
    return settings


def sample_of(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record under TRL's names."""
    if "prompt" in record:
        return record
    return {"prompt": record["instruction"], "completion": record["output"]}


def classes(trainer: str) -> tuple[Any, Any]:
    """Return configuration and trainer by the trainer's short name."""
    if trainer == "SFT":
        return SFTConfig, SFTTrainer
    if trainer == "DPO":
        from trl import DPOConfig, DPOTrainer

        return DPOConfig, DPOTrainer
    if trainer == "KTO":
        from trl import KTOConfig, KTOTrainer

        return KTOConfig, KTOTrainer
    if trainer == "Reward":
        from trl import RewardConfig, RewardTrainer

        return RewardConfig, RewardTrainer
    if trainer == "ORPO":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOConfig, ORPOTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    return CPOConfig, CPOTrainer


def main(what: dict[str, Any]) -> None:
    """Train."""
    records = json.loads(Path(what["records"]).read_text())
    samples = [sample_of(record) for record in records]
    config_class, trainer_class = classes(what["trainer"])
    config = config_class(
        output_dir=what["out_dir"],
        model_init_kwargs=model_settings(what),
        per_device_train_batch_size=what["micro_batch_size"],
        gradient_accumulation_steps=what["micro_steps"],
        max_steps=what["steps"],
        learning_rate=what["learning_rate"],
        lr_scheduler_type="cosine",
        warmup_steps=0,
        weight_decay=0.0,
        # The Trainer does not clip at 0.
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        **what["settings"],
    )
    tokenizer = AutoTokenizer.from_pretrained(what["model"])
    tokenizer.bos_token = None  # some trainers would put it before every sequence, others not
    trainer = trainer_class(
        model=what["model"],
        args=config,
        train_dataset=Dataset.from_list(samples),
        processing_class=tokenizer,
        peft_config=adapter(what),
    )
    unknown = trainer.model.load_state_dict(load_file(what["start"]), strict=False).unexpected_keys
    if unknown:
        raise RuntimeError(f"the trained model has no parameters {', '.join(unknown)}")
    counter = Counter()
    trainer.model.register_forward_pre_hook(counter, with_kwargs=True)
    trainer.add_callback(StepLines(counter, what["logged"], what["factor"]))
    trainer.train()
    memory = None
    if torch.cuda.is_available():
        memory = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    tell({"device_memory": memory})


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
