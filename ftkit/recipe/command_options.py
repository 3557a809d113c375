"""Options of commands: how they are declared, and those of commands on recipes and runs.

The class of a command's options says all that its command line may hold: words, options with their
types and defaults, switches, and whether keys of recipes may stand beside them. Each field is
explained once, in the string below it, which is also its ``--help``.
"""

import dataclasses
import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import docstring_parser

from ftkit.recipe.parsing import Override
from ftkit.recipe.recipe_keys import COMPONENTS, accepted_types

OutputFormat = Literal["table", "json"]


def option(
    default: Any = dataclasses.MISSING,
    *,
    ask: str = "",
    placeholder: str = "",
    example: object = None,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """An option that a plain default does not declare in full.

    Args:
        default: its value where it is not given; without one it has to be.
        ask: what is asked where it is missing.
        placeholder: what stands for its value; "": what tells its type.
        example: a value that works.
        least: smallest value allowed.
        most: largest value allowed.
    """
    metadata = {
        "ask": ask, "placeholder": placeholder, "example": example, "least": least, "most": most,
    }  # fmt: skip
    return field(default=default, metadata=metadata)


def word(
    placeholder: str,
    default: Any = dataclasses.MISSING,
    *,
    ask: str = "",
    takes_url: bool = False,
) -> Any:
    """What stands on its own, without ``--``; a tuple takes all words that are left.

    Args:
        placeholder: what stands for it in usage and messages.
        default: its value where it is not given; without one it has to be.
        ask: what is asked where it is missing, with what works, or a question alone; "": its
            explanation is shown.
        takes_url: whether a path may be a url of object storage; else it is refused.
    """
    metadata = {"word": True, "placeholder": placeholder, "ask": ask, "takes_url": takes_url}
    return field(default=default, metadata=metadata)


def keys_beside(*heads: str) -> Any:
    """Keys of recipes beside the options, with their texts in the order given.

    Args:
        heads: first parts of the keys that are taken; none: all other keys.
    """
    return field(default=(), metadata={"keys": heads})


def command_line() -> Any:
    """The words of the whole command line, as they were typed."""
    return field(default=(), metadata={"line": True})


@dataclass(frozen=True, kw_only=True)
class Declared:
    """An option or a word, as the class of a command's options declares it."""

    name: str
    kind: Any
    """Its type."""
    default: Any
    """None also where it has to be given."""
    text: str
    rules: Mapping[str, Any]
    """See `option` and `word`."""
    required: bool

    @property
    def is_word(self) -> bool:
        """Whether it stands on its own."""
        return "word" in self.rules

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return self.kind is bool

    @property
    def takes_several(self) -> bool:
        """Whether it may be given several times."""
        return typing.get_origin(self.kind) is tuple

    @property
    def placeholder(self) -> str:
        """What stands for its value; "": what tells its type."""
        return str(self.rules.get("placeholder", ""))

    @property
    def choices(self) -> list[str]:
        """The words that it takes, or knows where it takes others too; [] if it takes any."""
        literals = [k for k in accepted_types(self.kind) if typing.get_origin(k) is Literal]
        return [str(choice) for kind in literals for choice in typing.get_args(kind)]


@functools.cache
def declared(options: type) -> tuple[Declared, ...]:
    """What a class of options declares: words, then its own options, then what it inherits."""
    texts = field_texts(options)
    found = [
        Declared(
            name=f.name,
            kind=f.type,
            default=None if f.default is dataclasses.MISSING else f.default,
            text=texts.get(f.name, ""),
            rules=f.metadata,
            required=f.default is dataclasses.MISSING,
        )
        for f in dataclasses.fields(options)
        if not f.metadata.keys() & {"keys", "line"}
    ]
    own = options.__annotations__
    return tuple(
        sorted(
            found, key=lambda item: (not item.is_word, not item.is_word and item.name not in own)
        )
    )


def heads_of(options: type) -> tuple[str, ...] | None:
    """First parts of the keys of recipes that may stand beside; (): of all; None: there are none.

    Where heads are named, the field is named after the one it has.
    """
    found = [f.metadata["keys"] for f in dataclasses.fields(options) if "keys" in f.metadata]
    return found[0] if found else None


def components_of(options: type) -> list[str]:
    """Which of data, optimizer and strategy may stand beside, with their keys."""
    heads = heads_of(options)
    return [] if heads is None else [name for name in COMPONENTS if name in heads or not heads]


def field_texts(documented: type) -> dict[str, str]:
    """The string below each field of a class, also of those that it inherits, on one line."""
    found: dict[str, str] = {}
    for ancestor in reversed(documented.__mro__[:-1]):
        for item in docstring_parser.parse_from_object(ancestor).params:
            found[item.arg_name] = " ".join((item.description or "").split())
    return found


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Of all commands that end by themselves."""

    quiet: bool = False
    """Show errors, warnings and the result alone: no progress, no notices."""


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(CommonOptions):
    """Of ftkit finetune, finetune_lora and finetune_full."""

    words: tuple[str, ...] = word("RECIPE.yaml", ())
    """Recipes to start from, also as --config FILE: later ones win, and keys given as options win
    over all of them. embedded:NAME.yaml is one that comes with ftkit. What does not end in .yaml is
    the base model: checkpoint_dir."""
    config: tuple[str, ...] = option((), placeholder="RECIPE.yaml")
    """As a word on its own; several times. -: standard input."""
    print_config: bool = False
    """Print the resolved recipe and exit."""
    overwrite: bool = False
    """Replace what is in out_dir. Default: leave it and take OUT_DIR-2, OUT_DIR-3, ...; a run there
    that can be continued is refused."""
    force: bool = False
    """Start even if, by prediction, the memory of the GPUs or of the host is certainly too
    small."""
    stop_after: str | None = option(None, placeholder="N|DURATION")
    """Save and stop after this many optimizer steps of this command, or after a time such as 90min.
    The schedule stays that of the whole run; --resume auto continues it."""
    metric: tuple[str, ...] = option((), placeholder="FILE.py:FUNCTION")
    """Before and after training, also score answers to validation records by a function of your
    own, called with (answer, expected, record): as many as eval.exact_match and eval.rouge_l say,
    or 100. Several times."""
    trust_task_code: Path | None = option(None, placeholder="DIR")
    """Let task files of eval.tasks run Python code of this directory, with all that it may do. No
    recipe can say this."""
    keys: tuple[Override, ...] = keys_beside()
    """Of the recipe."""
    line: tuple[str, ...] = command_line()
    """For the report."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(CommonOptions):
    """Of ftkit plan."""

    words: tuple[str, ...] = word("RECIPE.yaml", ())
    """Recipes, each a plan of its own, and sweeps, whose runs are. Also as --config FILE.
    embedded:NAME.yaml is one that comes with ftkit. What does not end in .yaml is the base model:
    checkpoint_dir. finetune, finetune_lora or finetune_full as the first word plans that command;
    without it a recipe without a LoRA key and without quantize is a full fine-tuning, all else
    LoRA."""
    config: tuple[str, ...] = option((), placeholder="RECIPE.yaml")
    """As a word on its own; several times. -: standard input."""
    gpu: str | None = option(None, placeholder="GPU")
    """What each rank runs on: a GPU by its name, see above, a size such as 24GiB, or auto for the
    one here. Default: this machine, as a run would take it, its GPUs or else its CPU."""
    sweep: tuple[str, ...] = option((), placeholder="KEY=A,B,C")
    """Plan once for each value; several sweeps: for every combination."""
    fit: bool = False
    """Show the smallest changes that make it fit, cheapest in speed first."""
    format: OutputFormat = "table"
    """json: nothing else is written to standard output."""
    keys: tuple[Override, ...] = keys_beside()
    """Of all recipes."""


@dataclass(frozen=True, kw_only=True)
class DataOptions(CommonOptions):
    """Of ftkit data."""

    words: tuple[str, ...] = word("RECIPE.yaml", ())
    """Recipes to start from, also as --config FILE: later ones win, and keys given as options win
    over all of them. embedded:NAME.yaml is one that comes with ftkit. What does not end in .yaml is
    the base model: checkpoint_dir."""
    config: tuple[str, ...] = option((), placeholder="RECIPE.yaml")
    """As a word on its own; several times. -: standard input."""
    show: int = option(3, placeholder="N", least=0)
    """Training samples that are shown token by token."""
    format: Literal["text", "html", "json"] = "text"
    """html: a page that loads nothing. html, json: nothing else is written to standard output."""
    out: Path | None = option(None, placeholder="FILE")
    """Write it there; what is there is replaced. Default: to standard output."""
    keys: tuple[Override, ...] = keys_beside()
    """Of the recipe."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions(CommonOptions):
    """Of ftkit import."""

    source: Path = word("SOURCE", ask="which checkpoint is to be imported?")
    """The checkpoint of the other program: its directory, or its file."""
    out: Path = option(ask="where is the run to lie? Try --out out/imported.", placeholder="DIR")
    """Where the run goes: a directory that is not there yet."""
    config: tuple[str, ...] = option((), placeholder="RECIPE.yaml")
    """What is learned from here on: data, and what the checkpoint does not tell; later ones win,
    and keys given as options win over all of them. -: standard input."""
    overwrite: bool = False
    """Replace what is in DIR."""
    keys: tuple[Override, ...] = keys_beside()
    """Of the recipe; what neither says is as the checkpoint tells."""


@dataclass(frozen=True, kw_only=True)
class SweepOptions(CommonOptions):
    """Of ftkit sweep."""

    sweep_file: str = word(
        "SWEEP.yaml",
        ask="what is to be run? Name a file, such as ftkit sweep recipes/sweeps/single_gpu.yaml, "
        "or a command, such as ftkit sweep finetune --config RECIPE.yaml --sweep seed=1,2.",
    )
    """A list of runs, each with name, command, config (its recipe, beside the file) and keys of
    recipes; or a fine-tuning command, to vary keys of one recipe."""
    config: tuple[str, ...] = option((), placeholder="RECIPE.yaml")
    """Recipe of a command; later ones win."""
    sweep: tuple[str, ...] = option((), placeholder="KEY=A,B,C")
    """Run the command once for each value; several sweeps: for every combination."""
    out_dir: Path | None = None
    """Where the runs go, each into a directory of its name. Default: out_dir of SWEEP.yaml, or that
    of the recipe with -sweep."""
    only: tuple[str, ...] = option((), placeholder="PATTERN")
    """Only runs of such names, as 'a100-*'; repeatable."""
    plot: Path | None = option(None, placeholder="FILE")
    """Draw the comparison into FILE.png or FILE.html."""
    overwrite: bool = False
    """Do all runs again, also complete ones."""
    dry_run: bool = False
    """Only say what would be done, as command lines."""
    keys: tuple[Override, ...] = keys_beside()
    """Of all runs."""


@dataclass(frozen=True, kw_only=True)
class DownloadOptions(CommonOptions):
    """Of ftkit download."""

    repo_id: str = word("REPO_ID", ask="which model?")
    """The model, such as TinyLlama/TinyLlama_v1.1."""
    access_token: str | None = option(None, placeholder="TOKEN")
    """Hugging Face token for gated models. Default: $HF_TOKEN."""
    checkpoint_dir: Path = Path("checkpoints")
    """Where models are kept."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions(CommonOptions):
    """Of ftkit compare."""

    runs: tuple[str, ...] = word("RUN")
    """Runs (each its out_dir, or its url: s3://, gs:// or az://), or directories that hold runs at
    any depth."""
    sort: str | None = option(None, placeholder="KEY")
    """Sort by a result such as tokens_per_s, best first, or by a setting such as
    train.micro_batch_size; JSON and CSV have all keys. Default: runs that ended well first, by
    validation loss, and by tokens_per_s where it is equal."""
    format: Literal["table", "json", "csv", "markdown"] = "table"
    """json, csv, markdown: nothing else is written to standard output."""
    plot: Path | None = option(None, placeholder="FILE")
    """Also draw loss by step and by time, peak memory and throughput into FILE.png, or into
    FILE.html together with the table, as one page that loads nothing."""


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Of ftkit watch."""

    out_dir: Path = word("OUT_DIR", takes_url=True)
    """The run: its out_dir; a directory, s3://, gs:// or az://."""
    serve: int | None = option(None, placeholder="PORT", example=8321, least=0, most=65535)
    """Show it, or all runs of a directory, as a page for browsers of this machine, on this port; 0:
    on a free one."""
    once: bool = False
    """Show how the run is now, and end."""
    interval: str = option("2s", placeholder="DURATION")
    """Time between two looks."""


@dataclass(frozen=True, kw_only=True)
class CheckpointsOptions(CommonOptions):
    """Of ftkit checkpoints list."""

    out_dir: Path = word("OUT_DIR", takes_url=True)
    """The run: its out_dir, or the checkpoints in it; a directory, s3://, gs:// or az://."""
    format: OutputFormat = "table"
    """json: nothing else is written to standard output."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(CommonOptions):
    """Of ftkit checkpoints show and verify."""

    out_dir: Path = word("OUT_DIR", takes_url=True)
    """The run: its out_dir, the checkpoints in it, or one of these; a directory,
    s3://, gs:// or az://."""
    step: str | None = word("STEP", None)
    """Which checkpoint, by its step."""
    format: OutputFormat = "table"
    """json: nothing else is written to standard output."""


@dataclass(frozen=True, kw_only=True)
class CleanOptions(CommonOptions):
    """Of ftkit checkpoints clean."""

    out_dir: Path = word("OUT_DIR", takes_url=True)
    """The run: its out_dir, or the checkpoints in it; a directory, s3://, gs:// or az://."""
    keep_last: int = option(ask="how many of the newest stay?", example=1, least=1)
    """How many of the newest stay."""
    dry_run: bool = False
    """Only say what would be deleted."""


@dataclass(frozen=True, kw_only=True)
class DiffOptions(CommonOptions):
    """Of ftkit checkpoints diff."""

    a: Path = word("A", takes_url=True)
    """A checkpoint, or a run."""
    b: Path = word("B", takes_url=True)
    """Another one."""
    format: OutputFormat = "table"
    """json: nothing else is written to standard output."""
