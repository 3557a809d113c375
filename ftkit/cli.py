"""The command: parse, call one function, print a UserError without a traceback."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from jsonargparse import ArgumentParser

from ftkit import __version__
from ftkit.errors import UserError
from ftkit.parsing import Override, read_recipe, recipe_parser, to_yaml
from ftkit.recipe import Method

FINETUNE: dict[str, Method] = {"finetune": "lora", "finetune_lora": "lora", "finetune_full": "full"}

COMMANDS = {
    "finetune": "fine-tune with LoRA or QLoRA (the same as finetune_lora)",
    "finetune_lora": "fine-tune with LoRA or QLoRA",
    "finetune_full": "fine-tune every parameter",
    "download": "fetch a base model from the Hugging Face hub",
}


@dataclass
class Options:
    """A command line, sorted: recipe files, dotted overrides, and what is no key of a recipe."""

    files: list[str] = field(default_factory=list)
    overrides: list[Override] = field(default_factory=list)
    overwrite: bool = False
    print_config: bool = False
    help: bool = False


def main() -> None:
    """Entry point of the `ftkit` command."""
    try:
        code = run(sys.argv[1:])
    except UserError as error:
        print(f"ftkit: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
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
        _parser(with_keys=True).parse_args(list(argv))
    name, rest = argv[0], argv[1:]
    if name in FINETUNE:
        return _finetune(name, rest)
    if name == "download":
        return _download(rest)
    raise UserError(f"{name!r} is not a command. Commands: {', '.join(COMMANDS)}.")


def split_options(argv: Sequence[str]) -> Options:
    """Sort a command line; the order of options never matters, except among equal keys.

    Every option takes one value, as `--key value` or `--key=value`; the switches take none.
    """
    options = Options()
    words = iter(argv)
    for word in words:
        if word in ("-h", "--help"):
            options.help = True
            continue
        if not word.startswith("--") or word == "--":
            raise UserError(f"{word!r} is not an option. Write --KEY VALUE, such as --devices 1.")
        key, equals, value = word[2:].partition("=")
        if key in ("overwrite", "print_config") and not equals:
            setattr(options, key, True)
            continue
        if not equals:
            value = _value_of(key, words)
        if key == "config":
            options.files.append(value)
        else:
            options.overrides.append((key, value))
    return options


def _value_of(key: str, words: Iterator[str]) -> str:
    value = next(words, None)
    if value is None or (value.startswith("--") and not value[2:3].isspace()):
        raise UserError(f"--{key} needs a value: --{key} VALUE.")
    return value


def _finetune(name: str, argv: Sequence[str]) -> int:
    options = split_options(argv)
    method = FINETUNE[name]
    if options.help:
        _finetune_parser(name).print_help()
        return 0
    recipe = read_recipe(options.files, options.overrides, method=method)
    if options.print_config:
        print(to_yaml(recipe), end="")
        return 0
    from ftkit.launch import launch

    return launch(recipe, command=["ftkit", name, *argv], overwrite=options.overwrite)


def _download(argv: Sequence[str]) -> int:
    parser = _download_parser()
    repository = argv[0] if argv and not argv[0].startswith("-") else None
    options = split_options(argv[1:] if repository else argv)
    if options.help:
        parser.print_help()
        return 0
    values = dict(options.overrides)
    repository = repository or values.pop("repo_id", None)
    token = values.pop("access_token", None)
    root = Path(values.pop("checkpoint_dir", "checkpoints"))
    if values:
        raise UserError(
            f"--{next(iter(values))} is not an option of ftkit download. See ftkit download --help."
        )
    if repository is None:
        raise UserError("Which model? Try ftkit download TinyLlama/TinyLlama_v1.1.")
    from ftkit.hub import download

    directory = download(repository, token=token, root=root)
    print(f"{directory} is ready: use it with --checkpoint_dir {directory}")
    return 0


def _parser(*, with_keys: bool = False) -> ArgumentParser:
    """The whole command line; the keys of recipes are only needed for completion."""
    parser = ArgumentParser(
        prog="ftkit",
        description="Fine-tune language models on the hardware you happen to have.",
        epilog="ftkit COMMAND --help explains a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="show the version and exit")
    commands = parser.add_subcommands(required=False)
    for name, text in COMMANDS.items():
        command = ArgumentParser(prog=f"ftkit {name}")
        if with_keys:
            command = _finetune_parser(name) if name in FINETUNE else _download_parser()
        commands.add_subcommand(name, command, help=text)
    return parser


def _finetune_parser(name: str) -> ArgumentParser:
    parser = recipe_parser(FINETUNE[name], f"ftkit {name}")
    run = parser.add_argument_group("The run")
    run.add_argument("--config", help="recipe file; may be given several times, later ones win")
    run.add_argument(
        "--print_config", action="store_true", help="print the resolved recipe and exit"
    )
    run.add_argument(
        "--overwrite",
        action="store_true",
        help="replace what is in out_dir; default: a used out_dir makes the run take OUT_DIR-2",
    )
    return parser


def _download_parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="ftkit download",
        usage="ftkit download REPO_ID [--access_token TOKEN] [--checkpoint_dir DIR]",
        description="Fetch a base model from the Hugging Face hub, or finish an earlier download.",
    )
    parser.add_argument("--repo_id", help="the model, such as TinyLlama/TinyLlama_v1.1")
    parser.add_argument("--access_token", help="for gated models; default: $HF_TOKEN")
    parser.add_argument("--checkpoint_dir", default="checkpoints", help="where models are kept")
    return parser
