"""Help and completion of every command, as parsers of jsonargparse."""

import argparse
import dataclasses
import typing
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, DefaultHelpFormatter

from ftkit.cli.commands import (
    CHECKPOINTS,
    COMMANDS,
    FORMATS,
    LOOKING,
    RESULT,
    USING,
    WITH_STEP,
    WORDS,
)
from ftkit.config.command_options import choices
from ftkit.config.parsing import accepted_types, add_recipe_keys, key_types
from ftkit.config.recipe import FINETUNE, RECIPE_OF
from ftkit.memory.gpus import GPUS


class _Help(DefaultHelpFormatter):
    """Help in words: choices and kinds as placeholders, defaults as a recipe has them."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if getattr(action, "_required", False) and action.nargs != "*":
            return f"{text} Required."
        switch = action.nargs == 0
        if switch or default in (None, argparse.SUPPRESS) or "Default:" in text:
            return text
        if isinstance(default, dict):
            default = default["class_path"].rpartition(".")[2]
        return f"{text} Default: {str(default).lower() if isinstance(default, bool) else default}."


class _HelpWithExamples(_Help):
    """Help whose examples keep their lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if text.startswith("Examples:"):
            return "".join(f"{indent}{line}\n" for line in text.splitlines())
        return super()._fill_text(text, width, indent)


def _placeholder(kind: Any) -> str:
    """What stands for the value of a key: {auto,cpu,cuda}, NUMBER, PATH."""
    words = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH", bool: "{true,false}"}
    found = []
    for accepted in accepted_types(kind):
        if typing.get_origin(accepted) is Literal:
            choices = typing.get_args(accepted)
            found.append(f"{{{','.join(choices)}}}" if len(choices) > 1 else choices[0])
        elif typing.get_origin(accepted) is list:
            found.append("[NAME,...]")
        else:
            found.append(words.get(accepted, "NAME"))
    return "|".join(found)


def whole_parser(*, with_keys: bool = False) -> ArgumentParser:
    """The whole command line; the keys of recipes are only needed for completion."""
    parser = ArgumentParser(
        prog="ftkit",
        description="Fine-tune language models on the hardware you happen to have.",
        epilog="ftkit COMMAND --help explains a command.",
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="store_true", help="Show the version and exit.")
    commands = parser.add_subcommands(required=False)
    for name, text in COMMANDS.items():
        command = ArgumentParser(prog=f"ftkit {name}")
        if with_keys:
            makers = {
                "plan": plan_parser,
                "sweep": sweep_parser,
                "download": download_parser,
                "checkpoints": checkpoints_parser,
            }
            if name in FINETUNE:
                command = finetune_parser(name)
            elif name in LOOKING:
                command = looking_parser(name)
            else:
                command = using_parser(name) if name in USING else makers[name]()
        commands.add_subcommand(name, command, help=text)
        if with_keys and name == "checkpoints":
            add_managing(command)
    return parser


def finetune_parser(name: str) -> ArgumentParser:
    """The options of a fine-tuning command: its own, and every key of its recipe."""
    method = FINETUNE[name]
    parser = ArgumentParser(
        prog=f"ftkit {name}",
        usage=f"ftkit {name} [RECIPE.yaml ...] [CHECKPOINT_DIR] [--KEY VALUE ...]",
        description=RECIPE_OF[method].__doc__,
        formatter_class=_Help,
    )
    parser.add_argument(
        "words",
        metavar="RECIPE.yaml",
        nargs="*",
        help="Recipes to start from, also as --config FILE: later ones win, and keys given as "
        "options win over all of them. What does not end in .yaml is the base model: "
        "checkpoint_dir.",
    )
    parser.add_argument(
        "--config",
        metavar="RECIPE.yaml",
        help="As a word on its own; several times.",
    )
    parser.add_argument(
        "--print_config", action="store_true", help="Print the resolved recipe and exit."
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="Replace what is in out_dir. Default: leave it and take OUT_DIR-2, OUT_DIR-3, ...; "
        "a run there that can be continued is refused.",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="Start even if, by prediction, the GPU's memory is certainly too small.",
    )
    parser.add_argument(
        "--stop_after",
        metavar="N|DURATION",
        help="Save and stop after this many optimizer steps of this command, or after a time such "
        "as 90min. The schedule stays that of the whole run; --resume auto continues it.",
    )
    add_recipe_keys(parser, method)
    kinds = key_types(method)
    for action in parser._actions:
        if action.dest in kinds:
            action.metavar = _placeholder(kinds[action.dest])
            # jsonargparse offers --KEY+ to append to a list
            action.option_strings = [o for o in action.option_strings if not o.endswith("+")]
        elif any(key.startswith(f"{action.dest}.") for key in kinds):
            action.help = argparse.SUPPRESS  # a group as a whole: for recipe files
    return parser


def plan_parser() -> ArgumentParser:
    """The options of ftkit plan; keys of recipes come beside them."""
    parser = ArgumentParser(
        prog="ftkit plan",
        usage="ftkit plan [RECIPE.yaml | SWEEP.yaml ...] [--gpu GPU] [--sweep KEY=A,B ...] [--fit] "
        "[--KEY VALUE ...]",
        description="Predict what recipes need: memory of each rank with its parts, host memory, "
        "disk, steps. No weights are loaded or downloaded, and no GPU is needed. Several recipes, "
        "the runs of a sweep and variations become one table. Any LoRA key or quantize means LoRA, "
        "else full fine-tuning. The exit code is 3 if it does not fit on the GPU; of several, if "
        "none does.",
        epilog="Examples:\n"
        "  ftkit plan recipes/open-llama-7b-full.yaml --precision bf16-true --gpu a100-80gb\n"
        "  ftkit plan recipes/*.yaml --gpu 24GiB\n"
        "  ftkit plan recipes/sweeps/single_gpu.yaml --gpu a100-80gb\n"
        "  ftkit plan recipes/tiny-llama-full.yaml --sweep train.micro_batch_size=1,2,4,8",
        formatter_class=_HelpWithExamples,
    )
    parser.add_argument("recipes", metavar="RECIPE.yaml", nargs="*", help="Also as --config FILE.")
    parser.add_argument(
        "--gpu",
        metavar="GPU",
        help=f"What each rank runs on: {', '.join(GPUS)}, a size such as 24GiB, or auto for the "
        "one here.",
    )
    parser.add_argument(
        "--sweep",
        metavar="KEY=A,B,C",
        help="Plan once for each value; several sweeps: for every combination.",
    )
    parser.add_argument(
        "--fit",
        action="store_true",
        help="Show the smallest changes that make it fit on the GPU, cheapest in speed first.",
    )
    parser.add_argument(
        "--format",
        choices=list(FORMATS),
        default="table",
        help="json: nothing else is written to standard output.",
    )
    return parser


def sweep_parser() -> ArgumentParser:
    """The options of ftkit sweep; keys of recipes come beside them."""
    parser = ArgumentParser(
        prog="ftkit sweep",
        usage="ftkit sweep SWEEP.yaml [--KEY VALUE ...]\n"
        "       ftkit sweep finetune|finetune_full --config RECIPE.yaml --sweep KEY=A,B ... "
        "[--KEY VALUE ...]",
        description="Run variations of recipes one after another, each in its own process and "
        "directory, and compare them in the end. An out-of-memory or a failure does not stop the "
        "sweep. Ctrl+C ends the current run gracefully and the sweep with it; the same command "
        "goes on: what is complete is skipped, the stopped run resumes. Keys of recipes given as "
        "options hold for all runs. The exit code is 1 if a run failed, 3 if all ran out of "
        "memory.",
        epilog="Examples:\n"
        "  ftkit sweep recipes/sweeps/single_gpu.yaml --plot single_gpu.html\n"
        "  ftkit sweep recipes/sweeps/multi_gpu.yaml --only 'a100-*'\n"
        "  ftkit sweep finetune_full --config recipes/tiny-llama-full.yaml \\\n"
        "    --sweep train.micro_batch_size=4,8 --sweep precision=bf16-true,32-true",
        formatter_class=_HelpWithExamples,
    )
    parser.add_argument(
        "sweep_file",
        metavar="SWEEP.yaml",
        help="A list of runs, each with name, command, config (its recipe, beside the file) and "
        "keys of recipes; or a fine-tuning command, to vary keys of one recipe.",
    )
    parser.add_argument(
        "--config", metavar="RECIPE.yaml", help="Recipe of a command; later ones win."
    )
    parser.add_argument(
        "--sweep",
        metavar="KEY=A,B,C",
        help="Run the command once for each value; several sweeps: for every combination.",
    )
    parser.add_argument(
        "--out_dir",
        metavar="PATH",
        help="Where the runs go, each into a directory of its name. Default: out_dir of "
        "SWEEP.yaml, or that of the recipe with -sweep.",
    )
    parser.add_argument(
        "--only", metavar="PATTERN", help="Only runs of such names, as 'a100-*'; repeatable."
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="Draw the comparison into FILE.png or FILE.html."
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="Do all runs again, also complete ones."
    )
    parser.add_argument(
        "--dry_run", action="store_true", help="Only say what would be done, as command lines."
    )
    return parser


def download_parser() -> ArgumentParser:
    """The options of ftkit download."""
    parser = ArgumentParser(
        prog="ftkit download",
        usage="ftkit download REPO_ID [--access_token TOKEN] [--checkpoint_dir PATH]",
        description="Fetch a base model from the Hugging Face hub, or finish an earlier download.",
        formatter_class=_Help,
    )
    parser.add_argument(
        "repo_id", metavar="REPO_ID", help="The model, such as TinyLlama/TinyLlama_v1.1."
    )
    parser.add_argument(
        "--access_token",
        metavar="TOKEN",
        help="Hugging Face token for gated models. Default: $HF_TOKEN.",
    )
    parser.add_argument(
        "--checkpoint_dir", metavar="PATH", default="checkpoints", help="Where models are kept."
    )
    return parser


def checkpoints_parser() -> ArgumentParser:
    """What ftkit checkpoints says of itself, without its commands; see `add_managing`."""
    return ArgumentParser(
        prog="ftkit checkpoints",
        usage="ftkit checkpoints COMMAND OUT_DIR [--KEY VALUE ...]",
        description="Look after the checkpoints of a run, in OUT_DIR/checkpoints.",
        epilog="Example: ftkit checkpoints list out/finetune/lora. "
        "ftkit checkpoints COMMAND --help explains a command.",
        formatter_class=_Help,
    )


def add_managing(parser: ArgumentParser) -> None:
    """Give ftkit checkpoints its commands: only once it is itself in its place (jsonargparse)."""
    commands = parser.add_subcommands(required=False)
    for name, command in CHECKPOINTS.items():
        text = command.text.partition(".")[0]
        commands.add_subcommand(name, managing_parser(name), help=text[0].lower() + text[1:])


def managing_parser(name: str) -> ArgumentParser:
    """The words and options of ftkit checkpoints NAME."""
    command = CHECKPOINTS[name]
    shown = {"format": "[--format table|json]", "keep_last": "--keep_last N"}
    options = " ".join(shown.get(option, f"[--{option}]") for option in command.options)
    parser = ArgumentParser(
        prog=f"ftkit checkpoints {name}",
        usage=f"ftkit checkpoints {name} {' '.join(command.words)} {options}",
        description=command.text,
        epilog=f"Example: ftkit checkpoints {name} {command.example}",
        formatter_class=_Help,
    )
    for word in command.words:
        text = WITH_STEP if word == "OUT_DIR" and "[STEP]" in command.words else WORDS[word]
        nargs = "?" if word.startswith("[") else None
        parser.add_argument(
            word.strip("[]").lower(), metavar=word.strip("[]"), help=text, nargs=nargs
        )
    if "format" in command.options:
        parser.add_argument(
            "--format",
            choices=list(FORMATS),
            default="table",
            help="json: nothing else is written to standard output.",
        )
    if "keep_last" in command.options:
        parser.add_argument(
            "--keep_last", metavar="N", type=int, required=True, help="How many of the newest stay."
        )
        parser.add_argument(
            "--dry_run", action="store_true", help="Only say what would be deleted."
        )
    return parser


def using_parser(name: str) -> ArgumentParser:
    """The options of a command that uses a result."""
    command = USING[name]
    lines = "".join(f"\n  ftkit {name} {example}" for example in command.examples)
    parser = ArgumentParser(
        prog=f"ftkit {name}",
        usage=f"ftkit {name} RESULT [--KEY VALUE ...]",
        description=command.text,
        epilog=f"Examples:{lines}",
        formatter_class=_HelpWithExamples,
    )
    parser.add_argument("result", metavar="RESULT", help=RESULT)
    if command.takes_data:
        parser.add_argument(
            "--data",
            metavar="NAME",
            help="Other data than those of the run; options as --data.NAME VALUE, such as "
            "--data.json_path FILE.",
        )
    own_first = sorted(
        dataclasses.fields(command.options),
        key=lambda option: option.name not in command.options.__annotations__,
    )
    for option in own_first:
        text, words = option.metadata["help"], choices(option.type)
        if option.type is bool:
            parser.add_argument(f"--{option.name}", action="store_true", help=text)
        elif words:
            parser.add_argument(
                f"--{option.name}", choices=words, default=option.default, help=text
            )
        else:
            parser.add_argument(
                f"--{option.name}",
                metavar=_placeholder(option.type),
                default=option.default,
                help=text,
            )
    return parser


def looking_parser(name: str) -> ArgumentParser:
    """The words and options of a command that looks at runs."""
    command = LOOKING[name]
    lines = "".join(f"\n  ftkit {name} {example}" for example in command.examples)
    several = command.most_words > 1
    parser = ArgumentParser(
        prog=f"ftkit {name}",
        usage=f"ftkit {name} {command.word}{'...' if several else ''} [--KEY VALUE ...]",
        description=command.text,
        epilog=f"Examples:{lines}",
        formatter_class=_HelpWithExamples,
    )
    parser.add_argument(
        command.word.lower(),
        metavar=command.word,
        help=command.word_help,
        nargs="+" if several else None,
    )
    for name, option in command.options.items():
        if option.is_switch:
            parser.add_argument(f"--{name}", action="store_true", help=option.text)
        elif option.choices:
            parser.add_argument(
                f"--{name}", choices=option.choices, default=option.choices[0], help=option.text
            )
        else:
            parser.add_argument(f"--{name}", metavar=option.placeholder, help=option.text)
    return parser
