"""Options of data of one's own: where records lie, what they hold, how they become tokens."""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from ftkit.data.records.paths import how_to_set
from ftkit.data.records.shapes import COLUMNS
from ftkit.data.rendering.renderer import Overlong
from ftkit.data.spec import check_init_args, check_shared_values, check_value
from ftkit.errors import UserError
from ftkit.models.chat_templates import Reasoning, TrainOn
from ftkit.utils.names import nearest


@dataclass(frozen=True, kw_only=True)
class OwnDataOptions:
    """The init_args of JSON data. What LitGPT's has keeps its name and default."""

    path: str | Path | None = None
    """A file (.json, .jsonl, .csv, .tsv, .parquet, .txt; texts also as .gz or .zst), a directory
    with train and val files or with any, a pattern such as 'data/*.jsonl', a data set of the
    Hugging Face hub (owner/name), or embedded:quickstart."""
    json_path: str | Path | None = None
    """The older name of path."""
    sources: list[dict[str, Any]] | None = None
    """Several, instead of path: a list of objects with path and, if needed, weight (how often an
    epoch takes its samples; 1 if not given) or samples (how many it takes), and what else only one
    of them needs: columns, subset, split, revision, prompt_style, chat_template, train_on,
    mask_prompt."""
    columns: dict[str, str] | None = None
    """Keys of the records that are named otherwise: --data.columns.instruction question
    --data.columns.output answer; ours are instruction, input, output, sys_prompt, history;
    prompt, completion; messages, tools, system; text."""
    subset: str | None = None
    """Which subset (configuration) of a hub data set."""
    split: str | None = None
    """Which split of a hub data set to train on, also a part, as 'train[:1000]'; train if not
    given. Its counterpart (val, validation, valid, dev, test) is validated on."""
    revision: str | None = None
    """Which version of a hub data set: a commit, a tag or a branch."""
    chat_template: str | None = None
    """How a conversation becomes text: tokenizer (the model's own; the default for conversations),
    a name (chatml, llama3, ...), or a file. Makes conversations of instructions too."""
    train_on: TrainOn | None = None
    """What is learned: every turn of the assistant (the default for conversations), its last one
    alone (for prompts with completions), or all. For instructions mask_prompt says it."""
    reasoning: Reasoning = "split"
    """What happens to a conversation whose template writes earlier turns otherwise once others
    follow, as where thinking is dropped: a sample for each turn, or an error."""
    overlong: Overlong | None = None
    """What happens to a sample longer than train.max_seq_length: truncate, drop, or split, which is
    for documents and their default."""
    mask_prompt: bool = False
    """Train on the answers only. For instructions."""
    val_split_fraction: float | None = None
    """Share that is used for validation where the data have no validation file or split; 0.05 if
    not given."""
    prompt_style: Any = "alpaca"
    """How instruction and input become a prompt: a name, a class of litgpt.prompts, or a text such
    as "Q: {instruction}\\nA: ", with {input} and {sys_prompt} if wanted."""
    ignore_index: int = -100
    """Accepted with LitGPT's default only."""
    seed: int = 42
    """Seed of the split for validation."""
    num_workers: int = 4
    """Accepted as LitGPT's; the process that trains collates batches itself."""


@dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """Of one source."""

    path: str | Path
    key: str = "data.path"
    """Where path was given, for errors."""
    given: Collection[str] = ()
    """What was said for this source alone."""
    name: str | None = None
    """In reports; None: by its path."""
    weight: float | None = None
    samples: int | None = None
    columns: Mapping[str, str] | None = None
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    prompt_style: Any = "alpaca"
    chat_template: str | None = None
    train_on: TrainOn | None = None
    mask_prompt: bool | None = None


_EXCLUSIVE = (
    ("path", "json_path", "sources"),
    ("mask_prompt", "train_on"),
    ("prompt_style", "chat_template"),
)
"""Options of which one alone is given."""
_OF_HUB = ("subset", "split", "revision")
_OF_ONE_SOURCE = ("path", "json_path", *_OF_HUB)
_INHERITED = ("columns", "prompt_style", "chat_template", "train_on", "mask_prompt")
RENDERING = ("prompt_style", "chat_template", "train_on", "mask_prompt", "reasoning", "overlong")
"""Options that decide what becomes of records once they are read."""
KEYS_OF_SETS = ("path", "columns", *_OF_HUB)
"""What a set of eval.sets says itself."""
_CHOICES = {
    "train_on": TrainOn,
    "reasoning": Reasoning,
    "overlong": Overlong,
}


def options_of(init_args: Mapping[str, Any]) -> OwnDataOptions:
    """The options, checked; an empty one is not given.

    Raises:
        UserError: an unknown key, a value out of range, or two that exclude each other.
    """
    check_init_args(init_args, _names(OwnDataOptions), "JSON")
    given = {key: value for key, value in init_args.items() if value is not None}
    _check_values(given, "data.")
    for group in _EXCLUSIVE:
        _check_one_of(group, given)
    if "sources" in given:
        for key in _OF_ONE_SOURCE:
            if key in given:
                raise UserError(
                    f"data.{key} is {given[key]}, but data.sources names several.\n"
                    f"Move it into the entry of data.sources that it is for."
                )
    elif not (given.get("path") or given.get("json_path")):
        key = "json_path" if "json_path" in init_args else "path"
        raise UserError(
            f"data.{key} is missing; JSON data needs a file of records, a directory with "
            "train.json and val.json, or the name of a hub data set.\n"
            f"Try --data.{key} FILE."
        )
    return OwnDataOptions(**given)


def sources_of(options: OwnDataOptions, given: Collection[str]) -> tuple[SourceOptions, ...]:
    """The sources that the options name, each with all that holds for it.

    Args:
        options: checked.
        given: those that were named.

    Raises:
        UserError: an entry of data.sources has an unknown key or a value out of range.
    """
    inherited = {key: getattr(options, key) for key in _INHERITED if key in given}
    if options.sources is None:
        key = "json_path" if options.path is None else "path"
        path = getattr(options, key)
        hub = {key: getattr(options, key) for key in _OF_HUB}
        return (SourceOptions(path=path, key=f"data.{key}", given=given, **inherited, **hub),)
    return tuple(
        _source(entry, f"data.sources[{i}]", inherited) for i, entry in enumerate(options.sources)
    )


def _source(entry: Any, key: str, inherited: dict[str, Any]) -> SourceOptions:
    if not isinstance(entry, dict) or not entry.get("path"):
        raise UserError(
            f"{key} is {entry!r}, but has to be an object with a path.\n"
            "Write it as {path: FILE}, with weight or samples if needed."
        )
    known = [name for name in _names(SourceOptions) if name not in ("key", "given", "name")]
    for name in entry:
        if name not in known:
            near = nearest(str(name), known)
            advice = f"Write {near} instead" if near else f"Remove {name}"
            raise UserError(f"{key} has no key {name}, only {', '.join(known)}.\n{advice}.")
    own = {name: value for name, value in entry.items() if value is not None}
    _check_values(own, f"{key}.")
    for group in (*_EXCLUSIVE, ("weight", "samples")):
        _check_one_of(group, own, key)
    others = {name for group in _EXCLUSIVE if own.keys() & set(group) for name in group}
    kept = {name: value for name, value in inherited.items() if name not in others}
    return SourceOptions(key=f"{key}.path", given=frozenset(own), **kept | own)


def set_of(name: str, entry: Any, rendering: Mapping[str, Any]) -> SourceOptions:
    """A set of eval.sets, with all that holds for it.

    Args:
        name: of the set.
        entry: a path, or an object with one.
        rendering: options of the data as whose its records are rendered.

    Raises:
        UserError: an unknown key or a value out of range.
    """
    key = f"eval.sets.{name}"
    own = {"path": entry} if isinstance(entry, str | Path) else entry
    for option in own if isinstance(own, dict) else ():
        if option in RENDERING:
            raise UserError(
                f"{key}.{option} is {own[option]!r}, but the records of a set are rendered as "
                f"those of data, so that their losses compare.\nRemove {key}.{option}."
            )
        if option not in KEYS_OF_SETS:
            near = nearest(str(option), KEYS_OF_SETS)
            advice = f"Write {near} instead" if near else f"Remove {option}"
            raise UserError(
                f"{key} has no key {option}, only {', '.join(KEYS_OF_SETS)}.\n{advice}."
            )
    if not isinstance(own, dict) or not own.get("path"):
        raise UserError(
            f"{key} is {entry!r}, but has to be a path, or an object with one.\nTry --{key} FILE."
        )
    own = {option: value for option, value in own.items() if value is not None}
    _check_values(own, f"{key}.")
    kept = {option: rendering[option] for option in _INHERITED if option in rendering}
    return SourceOptions(key=f"{key}.path", given=frozenset(own), name=name, **kept | own)


def _check_one_of(group: Collection[str], given: Mapping[str, Any], key: str = "data") -> None:
    both = [name for name in group if name in given]
    if len(both) > 1:
        raise UserError(
            f"{key}.{both[0]} is {given[both[0]]} and {key}.{both[1]} is {given[both[1]]}, but "
            f"only one of the two may be given.\nRemove {key}.{both[1]}; on the command line: "
            f"--data.{both[1]} null."
        )


def _check_values(given: Mapping[str, Any], prefix: str) -> None:
    """Refuse values out of range; keys are those of a source, but for the prefix "data."."""
    of_source = prefix != "data."
    if not of_source:
        check_shared_values(given)
    for key, value in given.items():
        name = prefix + key
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if key in ("path", "json_path"):
            rule = "the path of a file or directory"
            check_value(name, value, isinstance(value, str | Path), rule, "FILE")
        elif key in (*_OF_HUB, "chat_template"):
            accepted = isinstance(value, str) and bool(value)
            check_value(name, value, accepted, "a text", f"'\"{value}\"'")
        elif key in _CHOICES:
            choices = get_args(_CHOICES[key])
            near = nearest(str(value), choices, cutoff=0.3) or choices[0]
            check_value(name, value, value in choices, f"one of {', '.join(choices)}", near)
        elif key == "columns":
            _check_columns(name, value)
        elif key == "sources":
            rule = "a list of objects with a path each"
            accepted = isinstance(value, list) and bool(value)
            check_value(name, value, accepted, rule, "'[{path: a.jsonl}, {path: b.jsonl}]'")
        elif key == "weight":
            check_value(name, value, number and value > 0, "a number above 0", "1")
        elif key == "samples":
            accepted = number and isinstance(value, int) and value > 0
            check_value(name, value, accepted, "a whole number above 0", "1000")
        elif key == "mask_prompt" and of_source:
            check_value(name, value, isinstance(value, bool), "true or false", "true")


def _check_columns(name: str, value: Any) -> None:
    works = "'{instruction: question, output: answer}'"
    is_names = isinstance(value, dict) and all(isinstance(key, str) for key in value.values())
    check_value(name, value, is_names and bool(value), "names of keys by ours", works)
    known = [key for keys in COLUMNS.values() for key in keys]
    for ours in value:
        if ours not in known:
            near = nearest(str(ours), known) or "instruction"
            raise UserError(
                f"{name}.{ours} is {value[ours]}, but records have no {ours}, only "
                f"{', '.join(known)}.\n{how_to_set(f'{name}.{near}', value[ours])}"
            )
    shapes = [keys for keys in COLUMNS.values() if value.keys() & set(keys)]
    if len(shapes) > 1:
        kinds = " and ".join(sorted(value.keys() & set(keys))[0] for keys in shapes[:2])
        raise UserError(
            f"{name} names {kinds}, which no record has together.\n"
            f"Keep those of one kind, such as {', '.join(shapes[0])}."
        )


def _names(options: type) -> list[str]:
    return [field.name for field in dataclasses.fields(options)]
