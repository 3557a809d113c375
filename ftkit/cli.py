"""The command: parse, call one function, print a UserError without a traceback."""

import argparse
import dataclasses
import difflib
import os
import sys
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jsonargparse import ArgumentParser, DefaultHelpFormatter

from ftkit import __version__
from ftkit.errors import UserError
from ftkit.options import ChatOptions, EvaluateOptions, GenerateOptions, choices, read_options
from ftkit.parsing import Override, accepted_types, add_recipe_keys, key_types, read_recipe, to_yaml
from ftkit.recipe import RECIPE_OF, Method

FINETUNE: dict[str, Method] = {"finetune": "lora", "finetune_lora": "lora", "finetune_full": "full"}

COMMANDS = {
    "finetune": "fine-tune with LoRA or QLoRA (the same as finetune_lora)",
    "finetune_lora": "fine-tune with LoRA or QLoRA",
    "finetune_full": "fine-tune every parameter",
    "download": "fetch a base model from the Hugging Face hub",
    "checkpoints": "list, show, verify, clean up or compare what runs have saved",
    "generate": "answer one prompt or many with the result of a run, or any model",
    "chat": "talk with the result of a run, or any model",
    "evaluate": "measure a result on held-out data: loss, perplexity, exact match",
}


@dataclass(frozen=True, kw_only=True)
class _Using:
    """A command that uses a result: what it does, its options, how it is called."""

    text: str
    options: type
    examples: tuple[str, ...]
    takes_data: bool = False


USING = {
    "generate": _Using(
        text="Answer prompts with a result: the adapter or model of a run, one of its "
        "checkpoints, an adapter, or a base model. Prompts are made as the run made them.",
        options=GenerateOptions,
        examples=(
            "out/finetune/lora --prompt 'Tell me a story.' --temperature 0.8",
            "out/finetune/lora --prompts questions.txt --out answers.jsonl",
            "out/finetune/lora --prompt 'Tell me a story.' --compare_base",
        ),
    ),
    "chat": _Using(
        text="Talk with a result, line by line. Ctrl+C stops an answer, Ctrl+D ends. What was "
        "said before counts where the prompt style has a place for it (llama3, r1).",
        options=ChatOptions,
        examples=("out/finetune/lora --temperature 0.8",),
    ),
    "evaluate": _Using(
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
}
RESULT = (
    "A run (its out_dir), one of its checkpoints, a PEFT adapter, a model directory (Hugging Face "
    "or LitGPT), a hub name, or embedded:quickstart."
)


@dataclass(frozen=True, kw_only=True)
class _Managing:
    """A command of ftkit checkpoints: what it does, what it takes, how it is called."""

    text: str
    words: tuple[str, ...]
    options: tuple[str, ...]
    example: str


FORMATS: dict[str, Literal["table", "json"]] = {"table": "table", "json": "json"}
_FORMAT = ("format",)
CHECKPOINTS = {
    "list": _Managing(
        text="Show the checkpoints of a run, whether each is complete, and what a crash left.",
        words=("OUT_DIR",),
        options=_FORMAT,
        example="out/finetune/lora --format json",
    ),
    "show": _Managing(
        text="Show all that a checkpoint says about itself: training, hardware, files.",
        words=("OUT_DIR", "[STEP]"),
        options=_FORMAT,
        example="out/finetune/lora 1500",
    ),
    "verify": _Managing(
        text="Compare every file with its checksum. The exit code is 1 if any is damaged.",
        words=("OUT_DIR", "[STEP]"),
        options=_FORMAT,
        example="out/finetune/lora",
    ),
    "clean": _Managing(
        text="Delete old checkpoints and what a crash left. What checkpoint.keep_every and "
        "checkpoint.keep_best of the recipe keep for good stays, and damaged ones do.",
        words=("OUT_DIR",),
        options=("keep_last", "dry_run"),
        example="out/finetune/lora --keep_last 1 --dry_run",
    ),
    "diff": _Managing(
        text="Show which fields differ between the recipes of two checkpoints, or of the newest "
        "ones of two runs.",
        words=("A", "B"),
        options=_FORMAT,
        example="out/finetune/lora out/finetune/lora-2",
    ),
}
_WORDS = {
    "OUT_DIR": "The run: its out_dir, or the checkpoints in it.",
    "[STEP]": "Which checkpoint, by its step.",
    "A": "A checkpoint, or a run.",
    "B": "Another one.",
}
_WITH_STEP = "The run: its out_dir, the checkpoints in it, or one of these."


SWITCHES = ("help", "overwrite", "print_config")
"""Options without a value."""


@dataclass
class Options:
    """A command line, sorted: words, options with a value in their order, and switches."""

    words: list[str] = field(default_factory=list)
    values: list[Override] = field(default_factory=list)
    switches: set[str] = field(default_factory=set)


def main() -> None:
    """Entry point of the `ftkit` command."""
    try:
        code = run(sys.argv[1:])
        sys.stdout.flush()
    except UserError as error:
        print(f"ftkit: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # `| head` has seen enough; see docs.python.org/3/library/signal.html
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Run one command line (without the program's name); the exit code."""
    if not argv or argv[0] in ("-h", "--help"):
        _parser().print_help()
        return 0 if argv else UserError.exit_code
    if argv[0] == "--version":
        print(f"ftkit {__version__}")
        return 0
    if argv[0].startswith("--print_shtab"):
        _parser(with_keys=True).parse_args(list(argv))  # prints and exits
    name, rest = argv[0], argv[1:]
    if name in FINETUNE:
        return _finetune(name, rest)
    if name == "download":
        return _download(rest)
    if name == "checkpoints":
        return _checkpoints(rest)
    if name in USING:
        return _use(name, rest)
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    hint = f"Did you mean ftkit {close[0]}?" if close else "See ftkit --help."
    raise UserError(f"{name!r} is not a command. {hint} Commands: {', '.join(COMMANDS)}.")


def split_options(
    argv: Sequence[str], switches: Sequence[str] = SWITCHES, most_words: int = 0
) -> Options:
    """Sort a command line.

    Args:
        argv: `--key value`, `--key=value`, switches and words that are no option.
        switches: options that take no value.
        most_words: how many words may stand on their own.
    """
    options = Options()
    words = iter(argv)
    for word in words:
        word = "--help" if word == "-h" else word
        if not word.startswith("-") and len(options.words) < most_words:
            options.words.append(word)
            continue
        if not word.startswith("--") or word == "--":
            raise UserError(f"{word!r} is not an option. Write --KEY VALUE, such as --devices 1.")
        key, equals, value = word[2:].partition("=")
        if key in switches:
            if equals:
                raise UserError(f"--{key} is a switch and takes no value. Try --{key}.")
            options.switches.add(key)
        else:
            options.values.append((key, value if equals else _value_of(key, words)))
    return options


def _value_of(key: str, words: Iterator[str]) -> str:
    value = next(words, None)
    if value is None or (value.startswith("--") and not value[2:3].isspace()):
        raise UserError(f"--{key} needs a value: --{key} VALUE.")
    return value


def _finetune(name: str, argv: Sequence[str]) -> int:
    options = split_options(argv)
    if "help" in options.switches:
        _finetune_parser(name).print_help()
        return 0
    own: dict[str, list[str]] = {"config": [], "stop_after": []}
    overrides = [(key, value) for key, value in options.values if key not in own]
    for key, value in options.values:
        if key in own:
            own[key].append(value)
    recipe = read_recipe(own["config"], overrides, method=FINETUNE[name])
    if "print_config" in options.switches:
        print(to_yaml(recipe), end="")
        return 0
    from ftkit.job import StopAfter
    from ftkit.launch import launch
    from ftkit.resume import follow_moved

    if own["config"] and "out_dir" not in dict(overrides):
        recipe = follow_moved(recipe, Path(own["config"][-1]))
    return launch(
        recipe,
        command=["ftkit", name, *argv],
        overwrite="overwrite" in options.switches,
        stop_after=StopAfter.parse(own["stop_after"][-1]) if own["stop_after"] else None,
    )


def _download(argv: Sequence[str]) -> int:
    repository = argv[0] if argv and not argv[0].startswith("-") else None
    options = split_options(argv[1:] if repository else argv, switches=["help"])
    if "help" in options.switches:
        _download_parser().print_help()
        return 0
    values = dict(options.values)
    repository = repository or values.pop("repo_id", None)
    token = values.pop("access_token", None)
    root = Path(values.pop("checkpoint_dir", "checkpoints"))
    if values:
        raise UserError(
            f"--{next(iter(values))} is not an option of ftkit download. See ftkit download --help."
        )
    if repository is None:
        raise UserError("Which model? Try ftkit download TinyLlama/TinyLlama_v1.1.")
    from ftkit.base.hub import download

    directory = download(repository, token=token, root=root)
    print(f"{directory} is ready: use it with --checkpoint_dir {directory}")
    return 0


def _checkpoints(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        parser = _checkpoints_parser()
        _add_managing(parser)
        parser.print_help()
        return 0 if argv else UserError.exit_code
    name, rest = argv[0], argv[1:]
    if name not in CHECKPOINTS:
        close = difflib.get_close_matches(name, CHECKPOINTS, n=1)
        hint = f" Did you mean ftkit checkpoints {close[0]}?" if close else ""
        raise UserError(
            f"{name!r} is not a command of ftkit checkpoints.{hint} "
            f"Commands: {', '.join(CHECKPOINTS)}."
        )
    command = CHECKPOINTS[name]
    options = split_options(rest, switches=["help", "dry_run"], most_words=len(command.words))
    if "help" in options.switches:
        _managing_parser(name).print_help()
        return 0
    values = dict(options.values)
    for key in (*values, *options.switches):
        if key not in command.options:
            raise UserError(
                f"--{key} is not an option of ftkit checkpoints {name}. "
                f"See ftkit checkpoints {name} --help."
            )
    example = f"Try ftkit checkpoints {name} {command.example}."
    missing = command.words[len(options.words) :]
    if missing and not missing[0].startswith("["):
        raise UserError(f"{missing[0]} is missing: {_WORDS[missing[0]]} {example}")
    form = FORMATS.get(values.get("format", "table"))
    if form is None:
        raise UserError(
            f"--format is {values['format']!r}, but must be table or json. Try --format json."
        )
    first, second = Path(options.words[0]), next(iter(options.words[1:]), None)
    from ftkit import manage

    if name == "list":
        return manage.list_checkpoints(first, form)
    if name == "show":
        return manage.show_checkpoint(first, second, form)
    if name == "verify":
        return manage.verify_checkpoints(first, second, form)
    if name == "diff":
        assert second is not None
        return manage.compare_recipes(first, Path(second), form)
    keep_last = values.get("keep_last")
    if keep_last is None:
        raise UserError(f"--keep_last is missing: how many of the newest stay? {example}")
    if not (keep_last.isascii() and keep_last.isdecimal() and int(keep_last)):
        raise UserError(
            f"--keep_last is {keep_last!r}, but must be a whole number from 1 up. {example}"
        )
    return manage.clean_checkpoints(first, int(keep_last), dry_run="dry_run" in options.switches)


def _use(name: str, argv: Sequence[str]) -> int:
    command = USING[name]
    known = [f for f in dataclasses.fields(command.options) if f.type is bool]
    switches = ["help", *(f.name for f in known)]
    options = split_options(argv, switches=switches, most_words=1)
    if "help" in options.switches:
        _using_parser(name).print_help()
        return 0
    data = [
        (key, value)
        for key, value in options.values
        if command.takes_data and key.partition(".")[0] == "data"
    ]
    values = [pair for pair in options.values if pair not in data]
    asked: Any = read_options(name, command.options, values, sorted(options.switches))
    if not options.words:
        raise UserError(f"RESULT is missing: {RESULT} Try ftkit {name} {command.examples[0]}.")
    from ftkit.result import find_result

    result = find_result(options.words[0])
    if name == "generate":
        from ftkit.generate import generate

        return generate(result, asked)
    if name == "chat":
        from ftkit.chat import chat

        return chat(result, asked)
    from ftkit.evaluate import evaluate

    return evaluate(result, asked, data)


class _Help(DefaultHelpFormatter):
    """Help in words: choices and kinds as placeholders, defaults as a recipe has them."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if getattr(action, "_required", False):
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


def _parser(*, with_keys: bool = False) -> ArgumentParser:
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
            makers = {"download": _download_parser, "checkpoints": _checkpoints_parser}
            if name in FINETUNE:
                command = _finetune_parser(name)
            else:
                command = _using_parser(name) if name in USING else makers[name]()
        commands.add_subcommand(name, command, help=text)
        if with_keys and name == "checkpoints":
            _add_managing(command)
    return parser


def _finetune_parser(name: str) -> ArgumentParser:
    method = FINETUNE[name]
    parser = ArgumentParser(
        prog=f"ftkit {name}",
        usage=f"ftkit {name} [--config RECIPE.yaml] [--KEY VALUE ...]",
        description=RECIPE_OF[method].__doc__,
        formatter_class=_Help,
    )
    parser.add_argument(
        "--config",
        metavar="RECIPE.yaml",
        help="Recipe to start from. May be given several times, later ones win; keys given as "
        "options win over all of them.",
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


def _download_parser() -> ArgumentParser:
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


def _checkpoints_parser() -> ArgumentParser:
    return ArgumentParser(
        prog="ftkit checkpoints",
        usage="ftkit checkpoints COMMAND OUT_DIR [--KEY VALUE ...]",
        description="Look after the checkpoints of a run, in OUT_DIR/checkpoints.",
        epilog="Example: ftkit checkpoints list out/finetune/lora. "
        "ftkit checkpoints COMMAND --help explains a command.",
        formatter_class=_Help,
    )


def _add_managing(parser: ArgumentParser) -> None:
    """Give ftkit checkpoints its commands: only once it is itself in its place (jsonargparse)."""
    commands = parser.add_subcommands(required=False)
    for name, command in CHECKPOINTS.items():
        text = command.text.partition(".")[0]
        commands.add_subcommand(name, _managing_parser(name), help=text[0].lower() + text[1:])


def _managing_parser(name: str) -> ArgumentParser:
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
        text = _WITH_STEP if word == "OUT_DIR" and "[STEP]" in command.words else _WORDS[word]
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


def _using_parser(name: str) -> ArgumentParser:
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
