"""TRL's supervised fine-tuning on images, with a line for the benchmark after each step.

Runs in TRL's environment, without ftkit: ``trl_images_run.py FILE`` with the settings of the
training in a JSON file. Images stand in a column as paths, which datasets opens when a sample is
taken; TRL's own collator makes pixels of them.
"""

import json
import sys
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Image, List
from transformers import AutoProcessor
from trl import SFTConfig, SFTTrainer
from trl_run import (  # type: ignore[import-not-found]  # it lies beside this script
    Counter,
    StepLines,
    adapter,
    model_settings,
)

FROZEN = ("vision_tower", "multi_modal_projector")
"""Names of the parts that see, which ftkit does not train."""


def sample_of(record: dict[str, Any]) -> dict[str, Any]:
    """Return a conversation under TRL's names."""
    question, answer = record["messages"]
    words = [part["text"] for part in question["content"] if part["type"] == "text"]
    images = [part["image"] for part in question["content"] if part["type"] == "image"]
    return {
        "prompt": [{"role": "user", "content": " ".join(words)}],
        "completion": [answer],
        "images": images,
    }


def main(what: dict[str, Any]) -> None:
    """Train."""
    records = json.loads(Path(what["records"]).read_text())
    samples = Dataset.from_list([sample_of(record) for record in records])
    samples = samples.cast(Features({**samples.features, "images": List(Image())}))
    config = SFTConfig(
        output_dir=what["out_dir"],
        model_init_kwargs=model_settings(what),
        per_device_train_batch_size=what["micro_batch_size"],
        gradient_accumulation_steps=what["micro_steps"],
        max_steps=what["steps"],
        learning_rate=what["learning_rate"],
        lr_scheduler_type="cosine",
        warmup_steps=0,
        weight_decay=0.0,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        max_length=None,
        **what["settings"],
    )
    trainer = SFTTrainer(
        model=what["model"],
        args=config,
        train_dataset=samples,
        processing_class=AutoProcessor.from_pretrained(what["model"], backend="pil"),
        peft_config=adapter(what),
    )
    for name, parameter in trainer.model.named_parameters():
        if any(part in name for part in FROZEN):
            parameter.requires_grad_(False)
    counter = Counter()
    trainer.model.register_forward_pre_hook(counter, with_kwargs=True)
    trainer.add_callback(StepLines(counter, "loss", 1.0))
    trainer.train()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
