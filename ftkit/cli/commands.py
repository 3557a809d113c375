"""The table of commands: what each does, the words and options it takes, examples."""

from dataclasses import dataclass
from typing import Literal

from ftkit.config.command_options import (
    ChatOptions,
    EvaluateOptions,
    ExportOptions,
    GenerateOptions,
    MergeOptions,
)

COMMANDS = {
    "finetune": "fine-tune with LoRA or QLoRA (the same as finetune_lora)",
    "finetune_lora": "fine-tune with LoRA or QLoRA",
    "finetune_full": "fine-tune every parameter",
    "sweep": "run variations of recipes one after another, and compare them",
    "plan": "predict memory, disk and steps before anything is loaded",
    "download": "fetch a base model from the Hugging Face hub",
    "compare": "put runs side by side: what differs, what came out; as a table and as a picture",
    "watch": "follow a run from another terminal: progress, loss curve, memory, checkpoint",
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
    module: str
    """What has a function of the command's name; imported only when the command is run."""
    options: type
    examples: tuple[str, ...]
    takes_data: bool = False


USING = {
    "generate": Using(
        text="Answer prompts with a result: the adapter or model of a run, one of its "
        "checkpoints, an adapter, or a base model. Prompts are made as the run made them.",
        module="ftkit.inference.generate",
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
        module="ftkit.inference.chat",
        options=ChatOptions,
        examples=("out/finetune/lora --temperature 0.8",),
    ),
    "evaluate": Using(
        text="Measure a result on the validation data of its run, in the way of the run: the "
        "numbers are those that it reported. Or on other data: then a single file is taken whole, "
        "unless --data.val_split_fraction is given.",
        module="ftkit.inference.evaluate",
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
        module="ftkit.convert.merge",
        options=MergeOptions,
        examples=(
            "out/finetune/lora --out out/merged",
            "out/finetune/qlora --out out/merged --base original",
        ),
    ),
    "export": Using(
        text="Write a full fine-tune, one of its checkpoints or any model for Hugging Face or "
        "LitGPT, or the adapter of a LoRA run or checkpoint for PEFT. To write a LoRA run as a "
        "model, merge it first.",
        module="ftkit.convert.export",
        options=ExportOptions,
        examples=(
            "out/finetune/full --format litgpt --out out/for-litgpt",
            "out/full/checkpoints/step-00001500 --format hf --out out/hf",
            "out/lora --format peft --out out/adapter",
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


@dataclass(frozen=True, kw_only=True)
class Option:
    """An option: one of its choices (the first is the default), a value, or else a switch."""

    text: str
    placeholder: str | None = None
    choices: tuple[str, ...] = ()

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return not self.choices and self.placeholder is None


@dataclass(frozen=True, kw_only=True)
class Looking:
    """A command that looks at runs: what it does, its words, its options, how it is called."""

    text: str
    word: str
    word_help: str
    most_words: int
    options: dict[str, Option]
    examples: tuple[str, ...]


LOOKING = {
    "compare": Looking(
        text="Put runs side by side, whatever became of them: the settings that differ, outcome, "
        "loss, speed, time and peak memory. A star marks the best of those that ended well.",
        word="RUN",
        word_help="Runs (each its out_dir), or directories that hold runs at any depth.",
        most_words=10_000,
        options={
            "sort": Option(
                placeholder="KEY",
                text="Sort by a result such as tokens_per_s, best first, or by a setting such as "
                "train.micro_batch_size; JSON and CSV have all keys. Default: runs that ended "
                "well first, by validation loss, and by tokens_per_s where it is equal.",
            ),
            "format": Option(
                choices=("table", "json", "csv", "markdown"),
                text="json, csv, markdown: nothing else is written to standard output.",
            ),
            "plot": Option(
                placeholder="FILE",
                text="Also draw loss by step and by time, peak memory and throughput into "
                "FILE.png, or into FILE.html together with the table, as one page that loads "
                "nothing.",
            ),
        },
        examples=(
            "out/finetune/lora out/finetune/lora-2",
            "out --sort allocated_bytes --format csv",
            "out/* --plot comparison.html",
        ),
    ),
    "watch": Looking(
        text="Follow a run, at work or ended, from another terminal: progress, loss curve, speed, "
        "memory, newest checkpoint, time left, and how it ended. Reads its files and writes "
        "nothing. Ends with the run; Ctrl+C ends it earlier and leaves the run alone.",
        word="OUT_DIR",
        word_help="The run: its out_dir.",
        most_words=1,
        options={
            "once": Option(text="Show how the run is now, and end."),
            "interval": Option(placeholder="DURATION", text="Time between two looks. Default: 2s."),
        },
        examples=("out/finetune/lora", "out/finetune/lora --once"),
    ),
}
