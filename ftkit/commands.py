"""The commands as tables: what each does, the words and options it takes, examples."""

from dataclasses import dataclass
from typing import Literal

from ftkit.options import (
    ChatOptions,
    EvaluateOptions,
    ExportOptions,
    GenerateOptions,
    MergeOptions,
)
from ftkit.recipe import Method

FINETUNE: dict[str, Method] = {"finetune": "lora", "finetune_lora": "lora", "finetune_full": "full"}

COMMANDS = {
    "finetune": "fine-tune with LoRA or QLoRA (the same as finetune_lora)",
    "finetune_lora": "fine-tune with LoRA or QLoRA",
    "finetune_full": "fine-tune every parameter",
    "plan": "predict memory, disk and steps before anything is loaded",
    "download": "fetch a base model from the Hugging Face hub",
    "checkpoints": "list, show, verify, clean up or compare what runs have saved",
    "generate": "answer one prompt or many with the result of a run, or any model",
    "chat": "talk with the result of a run, or any model",
    "evaluate": "measure a result on held-out data: loss, perplexity, exact match",
    "merge": "make a LoRA run's adapter and its base model one Hugging Face model",
    "export": "write a result for Hugging Face, LitGPT or PEFT",
}


@dataclass(frozen=True, kw_only=True)
class Using:
    """A command that uses a result: what it does, its options, how it is called."""

    text: str
    options: type
    examples: tuple[str, ...]
    takes_data: bool = False


USING = {
    "generate": Using(
        text="Answer prompts with a result: the adapter or model of a run, one of its "
        "checkpoints, an adapter, or a base model. Prompts are made as the run made them.",
        options=GenerateOptions,
        examples=(
            "out/finetune/lora --prompt 'Tell me a story.' --temperature 0.8",
            "out/finetune/lora --prompts questions.txt --out answers.jsonl",
            "out/finetune/lora --prompt 'Tell me a story.' --compare_base",
        ),
    ),
    "chat": Using(
        text="Talk with a result, line by line. Ctrl+C stops an answer, Ctrl+D ends. What was "
        "said before counts where the prompt style has a place for it (llama3, r1).",
        options=ChatOptions,
        examples=("out/finetune/lora --temperature 0.8",),
    ),
    "evaluate": Using(
        text="Measure a result on the validation data of its run, in the way of the run: the "
        "numbers are those that it reported. Or on other data: then a single file is taken whole, "
        "unless --data.val_split_fraction is given.",
        options=EvaluateOptions,
        examples=(
            "out/finetune/lora",
            "out/finetune/lora --data JSON --data.json_path held_out.json",
        ),
        takes_data=True,
    ),
    "merge": Using(
        text="Add what LoRA has learned to the weights of the base model, and write the whole as "
        "a Hugging Face model. Memory holds one file of weights, not the model. Logits on a "
        "sample show how close it comes to the result itself.",
        options=MergeOptions,
        examples=(
            "out/finetune/lora --out out/merged",
            "out/finetune/qlora --out out/merged --base original --dtype bfloat16",
        ),
    ),
    "export": Using(
        text="Write a full fine-tune, one of its checkpoints or any model for Hugging Face or "
        "LitGPT, or the adapter of a LoRA run or checkpoint for PEFT. To write a LoRA run as a "
        "model, merge it first.",
        options=ExportOptions,
        examples=(
            "out/finetune/full --format litgpt --out out/for-litgpt",
            "out/finetune/full/checkpoints/step-00001500 --format hf --out out/step-1500",
            "out/finetune/lora/checkpoints/step-00001500 --format peft --out out/adapter-1500",
        ),
    ),
}
RESULT = (
    "A run (its out_dir), one of its checkpoints, a PEFT adapter, a model directory (Hugging Face "
    "or LitGPT), a hub name, or embedded:quickstart."
)


@dataclass(frozen=True, kw_only=True)
class Managing:
    """A command of ftkit checkpoints: what it does, what it takes, how it is called."""

    text: str
    words: tuple[str, ...]
    options: tuple[str, ...]
    example: str


FORMATS: dict[str, Literal["table", "json"]] = {"table": "table", "json": "json"}
_FORMAT = ("format",)
CHECKPOINTS = {
    "list": Managing(
        text="Show the checkpoints of a run, whether each is complete, and what a crash left.",
        words=("OUT_DIR",),
        options=_FORMAT,
        example="out/finetune/lora --format json",
    ),
    "show": Managing(
        text="Show all that a checkpoint says about itself: training, hardware, files.",
        words=("OUT_DIR", "[STEP]"),
        options=_FORMAT,
        example="out/finetune/lora 1500",
    ),
    "verify": Managing(
        text="Compare every file with its checksum. The exit code is 1 if any is damaged.",
        words=("OUT_DIR", "[STEP]"),
        options=_FORMAT,
        example="out/finetune/lora",
    ),
    "clean": Managing(
        text="Delete old checkpoints and what a crash left. What checkpoint.keep_every and "
        "checkpoint.keep_best of the recipe keep for good stays, and damaged ones do.",
        words=("OUT_DIR",),
        options=("keep_last", "dry_run"),
        example="out/finetune/lora --keep_last 1 --dry_run",
    ),
    "diff": Managing(
        text="Show which fields differ between the recipes of two checkpoints, or of the newest "
        "ones of two runs.",
        words=("A", "B"),
        options=_FORMAT,
        example="out/finetune/lora out/finetune/lora-2",
    ),
}
WORDS = {
    "OUT_DIR": "The run: its out_dir, or the checkpoints in it.",
    "[STEP]": "Which checkpoint, by its step.",
    "A": "A checkpoint, or a run.",
    "B": "Another one.",
}
WITH_STEP = "The run: its out_dir, the checkpoints in it, or one of these."
