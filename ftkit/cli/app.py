"""The command line: parse, call one function, print a UserError without a traceback."""

import dataclasses
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftkit import __version__
from ftkit.cli.commands import CHECKPOINTS, COMMANDS, FORMATS, LOOKING, RESULT, USING, WORDS
from ftkit.cli.help import (
    add_managing,
    checkpoints_parser,
    download_parser,
    finetune_parser,
    looking_parser,
    managing_parser,
    plan_parser,
    sweep_parser,
    using_parser,
    whole_parser,
)
from ftkit.config.command_options import read_options
from ftkit.config.parsing import Override, read_recipe, to_yaml
from ftkit.config.recipe import FINETUNE
from ftkit.errors import UserError
from ftkit.utils.imports import quick_imports, silence_libraries, without_hub_kernels
from ftkit.utils.nearest import nearest
from ftkit.utils.units import parse_duration

SWITCHES = ("force", "help", "overwrite", "print_config")
"""Options without a value."""


@dataclass
class Options:
    """A command line, sorted: words, options with a value in their order, and switches."""

    words: list[str] = field(default_factory=list)
    values: list[Override] = field(default_factory=list)
    switches: set[str] = field(default_factory=set)


def main() -> None:
    """Entry point of the `ftkit` command."""
    # OpenMP's threads wait for each other spinning: far too long for a busy machine by default.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    without_hub_kernels()
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
        whole_parser().print_help()
        return 0 if argv else UserError.exit_code
    if argv[0] == "--version":
        print(f"ftkit {__version__}")
        return 0
    if argv[0].startswith("--print_shtab"):
        whole_parser(with_keys=True).parse_args(list(argv))  # prints and exits
    name, rest = argv[0], argv[1:]
    if name in FINETUNE:
        return _finetune(name, rest)
    if name == "plan":
        return _plan(rest)
    if name == "sweep":
        return _sweep(rest)
    if name == "download":
        return _download(rest)
    if name == "checkpoints":
        return _checkpoints(rest)
    if name in LOOKING:
        return _look(name, rest)
    if name in USING:
        return _use(name, rest)
    close = nearest(name, COMMANDS)
    hint = f"Did you mean ftkit {close}?" if close else "See ftkit --help."
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
    switch = ""  # the word before, if it is one
    for word in words:
        word = "--help" if word == "-h" else word
        if switch and word in ("true", "false"):
            raise UserError(f"--{switch} is a switch and takes no value. Try --{switch}.")
        switch = ""
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
            switch = key
        else:
            options.values.append((key, value if equals else _value_of(key, words)))
    return options


def _value_of(key: str, words: Iterator[str]) -> str:
    value = next(words, None)
    if value is None or (value.startswith("--") and not value[2:3].isspace()):
        raise UserError(f"--{key} needs a value: --{key} VALUE.")
    return value


def _finetune(name: str, argv: Sequence[str]) -> int:
    options = split_options(argv, most_words=len(argv))
    if "help" in options.switches:
        finetune_parser(name).print_help()
        return 0
    own: dict[str, list[str]] = {"config": [], "stop_after": []}
    overrides = [(key, value) for key, value in options.values if key not in own]
    for word in options.words:
        if Path(word).suffix in (".yaml", ".yml"):
            own["config"].append(word)
        elif "checkpoint_dir" in dict(overrides):
            raise UserError(
                f"{word!r} is one base model too many: there is "
                f"{dict(overrides)['checkpoint_dir']!r} already. Recipes end in .yaml, options "
                "begin with --."
            )
        else:
            overrides.append(("checkpoint_dir", word))
    for key, value in options.values:
        if key in own:
            own[key].append(value)
    recipe = read_recipe(own["config"], overrides, method=FINETUNE[name])
    if "print_config" in options.switches:
        print(to_yaml(recipe), end="")
        return 0
    from ftkit.launch.supervisor import launch
    from ftkit.runs.job import StopAfter
    from ftkit.runs.resume import follow_moved

    if own["config"] and "out_dir" not in dict(overrides):
        recipe = follow_moved(recipe, Path(own["config"][-1]))
    return launch(
        recipe,
        command=["ftkit", name, *argv],
        overwrite="overwrite" in options.switches,
        stop_after=StopAfter.parse(own["stop_after"][-1]) if own["stop_after"] else None,
        force="force" in options.switches,
    )


def _plan(argv: Sequence[str]) -> int:
    options = split_options(argv, ["help", "fit"], most_words=len(argv))
    if "help" in options.switches:
        plan_parser().print_help()
        return 0
    own: dict[str, list[str]] = {"config": options.words, "gpu": [], "sweep": [], "format": []}
    overrides = [(key, value) for key, value in options.values if key not in own]
    for key, value in options.values:
        if key in own:
            own[key].append(value)
    form = (own["format"] or ["table"])[-1]
    if form not in FORMATS:
        raise UserError(f"--format is {form!r}, but must be table or json. Try --format json.")
    silence_libraries()  # before they are imported
    with quick_imports():
        from ftkit.planner.command import plan_all

    return plan_all(
        own["config"],
        overrides,
        gpu=own["gpu"][-1] if own["gpu"] else None,
        sweeps=own["sweep"],
        form=FORMATS[form],
        fit="fit" in options.switches,
    )


def _sweep(argv: Sequence[str]) -> int:
    options = split_options(argv, ["help", "overwrite", "dry_run"], most_words=1)
    if "help" in options.switches:
        sweep_parser().print_help()
        return 0
    own: dict[str, list[str]] = {"config": [], "sweep": [], "only": [], "out_dir": [], "plot": []}
    overrides = [(key, value) for key, value in options.values if key not in own]
    for key, value in options.values:
        if key in own:
            own[key].append(value)
    if not options.words:
        raise UserError(
            "What is to be run? Name a file, such as ftkit sweep recipes/sweeps/single_gpu.yaml, "
            "or a command, such as ftkit sweep finetune --config RECIPE.yaml --sweep seed=1,2."
        )
    if "resume" in dict(overrides):
        raise UserError(
            "--resume is not for sweeps, which go on by themselves. Leave it out, or start all "
            "over with --overwrite."
        )
    from ftkit.config.sweep import runs_of_file, runs_of_keys
    from ftkit.launch.sweep import sweep

    (word,) = options.words
    out_dir = Path(own["out_dir"][-1]) if own["out_dir"] else None
    if word in FINETUNE:
        runs = runs_of_keys(word, own["config"], own["sweep"], overrides, out_dir)
    elif own["config"] or own["sweep"]:
        raise UserError(
            f"--config and --sweep go with a command, not with {word}. "
            f"Try ftkit sweep finetune --config RECIPE.yaml --sweep seed=1,2."
        )
    else:
        runs = runs_of_file(Path(word), overrides, out_dir)
    return sweep(
        runs,
        only=own["only"],
        overwrite="overwrite" in options.switches,
        dry_run="dry_run" in options.switches,
        plot=Path(own["plot"][-1]) if own["plot"] else None,
    )


def _download(argv: Sequence[str]) -> int:
    repository = argv[0] if argv and not argv[0].startswith("-") else None
    options = split_options(argv[1:] if repository else argv, switches=["help"])
    if "help" in options.switches:
        download_parser().print_help()
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
    from ftkit.pretrained.hub import download

    directory = download(repository, token=token, root=root)
    print(f"{directory} is ready: use it with --checkpoint_dir {directory}")
    return 0


def _checkpoints(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        parser = checkpoints_parser()
        add_managing(parser)
        parser.print_help()
        return 0 if argv else UserError.exit_code
    name, rest = argv[0], argv[1:]
    if name not in CHECKPOINTS:
        close = nearest(name, CHECKPOINTS)
        hint = f" Did you mean ftkit checkpoints {close}?" if close else ""
        raise UserError(
            f"{name!r} is not a command of ftkit checkpoints.{hint} "
            f"Commands: {', '.join(CHECKPOINTS)}."
        )
    command = CHECKPOINTS[name]
    options = split_options(rest, switches=["help", "dry_run"], most_words=len(command.words))
    if "help" in options.switches:
        managing_parser(name).print_help()
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
        raise UserError(f"{missing[0]} is missing: {WORDS[missing[0]]} {example}")
    form = FORMATS.get(values.get("format", "table"))
    if form is None:
        raise UserError(
            f"--format is {values['format']!r}, but must be table or json. Try --format json."
        )
    first, second = Path(options.words[0]), next(iter(options.words[1:]), None)
    from ftkit.cli import checkpoints

    if name == "list":
        return checkpoints.list_checkpoints(first, form)
    if name == "show":
        return checkpoints.show_checkpoint(first, second, form)
    if name == "verify":
        return checkpoints.verify_checkpoints(first, second, form)
    if name == "diff":
        assert second is not None
        return checkpoints.compare_recipes(first, Path(second), form)
    keep_last = values.get("keep_last")
    if keep_last is None:
        raise UserError(f"--keep_last is missing: how many of the newest stay? {example}")
    if not (keep_last.isascii() and keep_last.isdecimal() and int(keep_last)):
        raise UserError(
            f"--keep_last is {keep_last!r}, but must be a whole number from 1 up. {example}"
        )
    return checkpoints.clean_checkpoints(
        first, int(keep_last), dry_run="dry_run" in options.switches
    )


def _look(name: str, argv: Sequence[str]) -> int:
    command = LOOKING[name]
    switches = ["help", *(key for key, option in command.options.items() if option.is_switch)]
    options = split_options(argv, switches=switches, most_words=command.most_words)
    if "help" in options.switches:
        looking_parser(name).print_help()
        return 0
    values = dict(options.values)
    for key, value in values.items():
        if key not in command.options:
            close = nearest(key, command.options)
            hint = f"Did you mean --{close}?" if close else f"See ftkit {name} --help."
            raise UserError(f"--{key} is not an option of ftkit {name}. {hint}")
        words = command.options[key].choices
        if words and value not in words:
            raise UserError(
                f"--{key} is {value!r}, but must be one of {', '.join(words)}. "
                f"Try --{key} {words[0]}."
            )
    if not options.words:
        raise UserError(
            f"{command.word} is missing: {command.word_help} "
            f"Try ftkit {name} {command.examples[0]}."
        )
    if name == "watch":
        from ftkit.runs.watch import watch

        interval_s = parse_duration(values.get("interval", "2s"), "interval")
        once = "once" in options.switches
        return watch(Path(options.words[0]), once=once, interval_s=interval_s)
    from ftkit.comparison.compare import compare_runs

    plot = Path(values["plot"]) if "plot" in values else None
    return compare_runs(options.words, values.get("format", "table"), values.get("sort"), plot)


def _use(name: str, argv: Sequence[str]) -> int:
    command = USING[name]
    known = [f for f in dataclasses.fields(command.options) if f.type is bool]
    switches = ["help", *(f.name for f in known)]
    options = split_options(argv, switches=switches, most_words=1)
    if "help" in options.switches:
        using_parser(name).print_help()
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
    from ftkit.inference.result import find_result

    result = find_result(options.words[0])
    with quick_imports():
        use = getattr(importlib.import_module(command.module), name)
    code: int = use(result, asked, data) if command.takes_data else use(result, asked)
    return code
