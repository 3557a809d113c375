"""Data of one's own: options of files and hub data sets, their split and their rendering."""

import copy
import dataclasses
import hashlib
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self, get_args

from ftkit.data.records.bad import SKIP
from ftkit.data.records.formats import files_of, format_of
from ftkit.data.records.media import MEDIA, kinds_in
from ftkit.data.records.paths import DataFiles, find_files, how_to_set, is_hub_name
from ftkit.data.records.read import RecordSet, read_files, read_hub
from ftkit.data.records.record import Record, Shape
from ftkit.data.records.shape_rows import (
    CONVERSATION,
    PREFERENCES,
    RECORD_SHAPES,
    PreferenceRow,
    preference_row,
    shape_row,
)
from ftkit.data.spec import (
    Content,
    DataSource,
    Overlong,
    Part,
    PartSource,
    Rules,
    check_init_args,
    check_shared_values,
    check_value,
)
from ftkit.errors import UserError
from ftkit.models.chat_templates import Reasoning, TrainOn
from ftkit.models.chat_templates.arguments import (
    ARGUMENTS,
    RULE,
    arguments_problem,
    given_arguments,
)
from ftkit.models.chat_templates.prompt_styles import AnyStyle, resolve_prompt_style
from ftkit.recipe.hubs import HubName, hub_of
from ftkit.recipe.objectives import Preference
from ftkit.recipe.recipe import Component
from ftkit.utils.names import nearest
from ftkit.utils.registry import imported


@dataclass(frozen=True, kw_only=True)
class OwnDataOptions:
    """The init_args of JSON data. What LitGPT's has keeps its name and default."""

    path: str | Path | None = None
    """A file (.json, .jsonl, .csv, .tsv, .parquet, .txt; texts also as .gz or .zst), a directory
    with train and val files or with any, a pattern such as 'data/*.jsonl', a data set of the
    Hugging Face hub (owner/name), or embedded:NAME, where NAME is quickstart, preference, chats,
    tools, reasoning or documents."""
    json_path: str | Path | None = None
    """Older name of path."""
    sources: list[dict[str, Any]] | None = None
    """Several sources instead of path: a list of objects with path and, optionally, weight (how
    often an epoch repeats its samples; default 1) or samples (how many an epoch takes), and options
    for this source only: columns, subset, split, revision, data_files, prompt_style, chat_template,
    chat_template_kwargs, train_on, mask_prompt, drop_system."""
    columns: dict[str, str] | None = None
    """Names of the records' keys where they differ from ftkit's: --data.columns.instruction
    question --data.columns.output answer. ftkit's names are instruction, input, output, sys_prompt,
    history; prompt, completion; messages, tools, system; text; of some objectives chosen, rejected;
    label, text_pair; query, positive, negative; inside messages role and content. user_role,
    assistant_role, system_role and tool_role are the names of roles."""
    subset: str | None = None
    """Subset (configuration) of a hub data set."""
    split: str | None = None
    """Split of a hub data set to train on, or a part of it, such as 'train[:1000]'; default: train.
    The split val, validation, valid, dev or test is used for validation."""
    revision: str | None = None
    """Version of a hub data set: a commit, a tag or a branch."""
    data_files: str | None = None
    """A file in the repository of a hub data set, or a pattern such as 'data/*.jsonl', in the place
    of its splits."""
    chat_template: str | None = None
    """Template that turns a conversation into text: tokenizer (the model's own; the default for
    conversations), a name (chatml, llama3, ...), a file, or the jinja text itself. Also turns
    instructions into conversations."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Values of variables that the chat template reads: --data.chat_template_kwargs.enable_thinking
    false. The template that is kept with the result has them as defaults."""
    train_on: TrainOn | None = None
    """Trained tokens: every turn of the assistant (the default for conversations), only its last
    turn (the default for prompts with completions), messages, which are the assistant's turns with
    the header that the template writes before each, or all. For instructions use mask_prompt."""
    drop_system: bool = False
    """Leave out the system message with which a conversation begins."""
    reasoning: Reasoning = "split"
    """Handling of conversations whose earlier turns the template renders differently once later
    turns follow, for instance because it drops thinking. split: one sample per turn; refuse: an
    error."""
    overlong: Overlong | None = None
    """Handling of samples longer than train.max_seq_length: truncate, drop, or split (the default
    for documents)."""
    min_tokens: int | None = None
    """Leave out samples with fewer tokens, and pairs of which an answer with its prompt has fewer.
    A document that is split is several samples."""
    image_max_pixels: int | None = None
    """Scale down images with more pixels, such as 589824 (768 x 768), before the model's own
    processor, which may scale them again. Fewer pixels are fewer tokens for models whose images
    have tokens by size. Default: as the processor says."""
    image_min_pixels: int | None = None
    """Scale up images with fewer pixels, in the same way."""
    drop_equal: bool = False
    """Of records with equal contents, keep only the first, before a part is held out: over all
    sources that are rendered alike, records to train on before those to validate on."""
    shuffle: bool = True
    """false: every epoch takes the samples in the order of the file, one source after the other,
    without weight and samples of sources. What is held out for validation is chosen at random."""
    skip_bad_records: bool = False
    """Leave out records that cannot be used, such as a line that is not JSON or a missing key, and
    count them in the report; otherwise such data are refused."""
    add_tokens: list[str] | None = None
    """Texts that become tokens of their own, such as [<tool>, </tool>]: the vocabulary of tokenizer
    and model grows. Rows of embedding and head begin as the mean of the others and are trained,
    with LoRA beside the adapter."""
    mask_prompt: bool = False
    """Train only on the answers. For instructions."""
    val_split_fraction: float | None = None
    """Share of the data used for validation if they have no validation file or split; default:
    0.05. 0: every record is trained on, and validation measures the same records."""
    prompt_style: Any = "alpaca"
    """Template that turns instruction and input into a prompt: a name, a class of litgpt.prompts,
    or a text such as "Q: {instruction}\\nA: ", optionally with {input} and {sys_prompt}; or two of
    these, {with_input: ..., without_input: ...}."""
    ignore_index: int = -100
    """Only LitGPT's default is accepted."""
    seed: int = 42
    """Seed of the split into training and validation data."""
    num_workers: int = 4
    """Accepted for compatibility with LitGPT and not used: batches are collated in the training
    process."""


@dataclass(frozen=True, kw_only=True)
class _SourceOptions:
    """Options of one source."""

    path: str | Path
    key: str = "data.path"
    """Key under which path was given, for errors."""
    given: Collection[str] = ()
    """Options given for this source."""
    name: str | None = None
    """Name in reports; None: derived from path."""
    weight: float | None = None
    samples: int | None = None
    columns: Mapping[str, str] | None = None
    subset: str | None = None
    split: str | None = None
    revision: str | None = None
    data_files: str | None = None
    prompt_style: Any = "alpaca"
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    train_on: TrainOn | None = None
    mask_prompt: bool | None = None
    drop_system: bool = False


_EXCLUSIVE = (
    ("path", "json_path", "sources"),
    ("mask_prompt", "train_on"),
    ("prompt_style", "chat_template"),
    ("prompt_style", ARGUMENTS),
)
"""Groups of options that exclude each other."""
_OF_HUB = ("subset", "split", "revision", "data_files")
_OF_ONE_SOURCE = ("path", "json_path", *_OF_HUB)
_OF_RENDERING = (
    *("prompt_style", "chat_template", ARGUMENTS, "train_on", "mask_prompt", "drop_system"),
)
_INHERITED = ("columns", *_OF_RENDERING)
# Beside the other options and not among the keys of an extension: options of data are one class,
# of which what a resumed run may change is known without data.
_OF_MEDIA = ("image_max_pixels", "image_min_pixels")
_FLAGS = ("drop_system", "drop_equal", "shuffle", SKIP)
_RENDERING = (*_OF_RENDERING, "reasoning", "overlong", "min_tokens", *_OF_MEDIA)
"""Options that decide how records are rendered."""
OPTIONS_WITHOUT_FILES = (
    *("columns", *_RENDERING),
    *("val_split_fraction", "seed", "ignore_index", "num_workers", "add_tokens", "drop_equal"),
    "shuffle",
    SKIP,
)
"""Options that do not say where records are."""
KEYS_OF_SETS = ("path", "columns", *_OF_HUB)
"""Options of a set of eval.sets; it inherits the others."""
_CHOICES = {
    "train_on": TrainOn,
    "reasoning": Reasoning,
    "overlong": Overlong,
}


def _options_of(init_args: Mapping[str, Any]) -> OwnDataOptions:
    """Check the options; empty ones count as not given."""
    check_init_args(init_args, _field_names(OwnDataOptions), "JSON")
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


def _sources_of(options: OwnDataOptions, given: Collection[str]) -> tuple[_SourceOptions, ...]:
    """Make the options of each source, with those that it inherits."""
    inherited = {key: getattr(options, key) for key in _INHERITED if key in given}
    if options.sources is None:
        key = "json_path" if options.path is None else "path"
        path = getattr(options, key)
        hub = {key: getattr(options, key) for key in _OF_HUB}
        return (_SourceOptions(path=path, key=f"data.{key}", given=given, **inherited, **hub),)
    return tuple(
        _source(entry, f"data.sources[{i}]", inherited) for i, entry in enumerate(options.sources)
    )


def _check_shuffle(options: OwnDataOptions, sources: Sequence[_SourceOptions]) -> None:
    """Refuse an epoch in the order of the file that takes a part of a file, or takes it twice."""
    for i, source in enumerate(sources):
        for key in ("weight", "samples"):
            if not options.shuffle and (value := getattr(source, key)) is not None:
                raise UserError(
                    f"data.shuffle is false, but data.sources[{i}].{key} is {value}: in the order "
                    "of the files, an epoch takes every sample once.\n"
                    f"Remove {key} of the source, or set data.shuffle to true."
                )


def _source(entry: Any, key: str, inherited: dict[str, Any]) -> _SourceOptions:
    if not isinstance(entry, dict) or not entry.get("path"):
        raise UserError(
            f"{key} is {entry!r}, but has to be an object with a path.\n"
            "Write it as {path: FILE}, with weight or samples if needed."
        )
    known = [name for name in _field_names(_SourceOptions) if name not in ("key", "given", "name")]
    for name in entry:
        if name not in known:
            near = nearest(str(name), known)
            advice = f"Write {near} instead" if near else f"Remove {name}"
            raise UserError(f"{key} has no key {name}, only {', '.join(known)}.\n{advice}.")
    own = {name: value for name, value in entry.items() if value is not None}
    _check_values(own, f"{key}.")
    for group in (*_EXCLUSIVE, ("weight", "samples")):
        _check_one_of(group, own, key)
    # An option of the source replaces those that exclude it, not only the one of its name.
    others = {name for group in _EXCLUSIVE if own.keys() & set(group) for name in group}
    kept = {name: value for name, value in inherited.items() if name not in others}
    return _SourceOptions(key=f"{key}.path", given=frozenset(own), **kept | own)


def _set_of(name: str, entry: Any, rendering: Mapping[str, Any]) -> _SourceOptions:
    """Make the options of a set of eval.sets, with those that it inherits."""
    key = f"eval.sets.{name}"
    own = {"path": entry} if isinstance(entry, str | Path) else entry
    for option in own if isinstance(own, dict) else ():
        if option in _RENDERING:
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
    return _SourceOptions(key=f"{key}.path", given=frozenset(own), name=name, **kept | own)


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
        check_shared_values(given, may_validate_on_all=True)
        _check_order(given)
    for key, value in given.items():
        name = prefix + key
        # bool is a subclass of int.
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if key in ("path", "json_path"):
            rule = "the path of a file or directory"
            check_value(name, value, isinstance(value, str | Path), rule, "FILE")
        elif key in (*_OF_HUB, "chat_template"):
            accepted = isinstance(value, str) and bool(value)
            check_value(name, value, accepted, "a text", f"'\"{value}\"'")
        elif key == ARGUMENTS:
            _check_arguments(name, value)
        elif key in _CHOICES:
            choices = get_args(_CHOICES[key])
            near = nearest(str(value), choices, cutoff=0.3) or choices[0]
            check_value(name, value, value in choices, f"one of {', '.join(choices)}", near)
        elif key == "columns":
            _check_columns(name, value)
        elif key == "add_tokens":
            accepted = isinstance(value, list) and all(_is_token(text) for text in value)
            accepted = accepted and len(set(value)) == len(value) > 0
            rule = "a list of different texts without spaces around them"
            check_value(name, value, accepted, rule, "'[<tool>, </tool>]'")
        elif key == "sources":
            rule = "a list of objects with a path each"
            accepted = isinstance(value, list) and bool(value)
            check_value(name, value, accepted, rule, "'[{path: a.jsonl}, {path: b.jsonl}]'")
        elif key in ("min_tokens", *_OF_MEDIA):
            accepted = number and isinstance(value, int) and value > 0
            works = "16" if key == "min_tokens" else "589824"
            check_value(name, value, accepted, "a whole number above 0", works)
        elif key == "weight":
            check_value(name, value, number and value > 0, "a number above 0", "1")
        elif key == "samples":
            accepted = number and isinstance(value, int) and value > 0
            check_value(name, value, accepted, "a whole number above 0", "1000")
        elif key in _FLAGS or (key == "mask_prompt" and of_source):
            check_value(name, value, isinstance(value, bool), "true or false", "true")


def _check_order(given: Mapping[str, Any]) -> None:
    """Refuse a least size of images above the largest."""
    most, least = (given.get(key) for key in _OF_MEDIA)
    if isinstance(most, int) and isinstance(least, int) and least > most:
        raise UserError(
            f"data.image_min_pixels is {least}, but data.image_max_pixels is {most}, and no image "
            f"has more than these.\n{how_to_set('data.image_min_pixels', most)}"
        )


def _is_token(text: Any) -> bool:
    return isinstance(text, str) and text != "" and text == text.strip()


def _check_arguments(name: str, value: Any) -> None:
    if (problem := arguments_problem(value)) is not None:
        raise UserError(
            f"{name} {problem}, but has to be {RULE}.\n"
            f"{how_to_set(f'{name}.enable_thinking', 'false')}"
        )


def _check_columns(name: str, value: Any) -> None:
    works = "'{instruction: question, output: answer}'"
    is_names = isinstance(value, dict) and all(isinstance(key, str) for key in value.values())
    check_value(
        name,
        value,
        is_names and bool(value),
        "a mapping from ftkit's keys to those of the records",
        works,
    )
    known = [key for one in (*RECORD_SHAPES, *PREFERENCES) for key in one.columns]
    # Others stand beside a record of any shape.
    shapes = [one.columns for one in RECORD_SHAPES]
    shapes += [one.columns for one in PREFERENCES if one.answers]
    known += [key for one in RECORD_SHAPES for key in one.inside]
    for ours in value:
        if ours not in known:
            near = nearest(str(ours), known) or "instruction"
            raise UserError(
                f"{name}.{ours} is {value[ours]}, but records have no {ours}, only "
                f"{', '.join(known)}.\n{how_to_set(f'{name}.{near}', value[ours])}"
            )
    shapes = [keys for keys in shapes if value.keys() & set(keys)]
    if len(shapes) > 1:
        kinds = " and ".join(sorted(value.keys() & set(keys))[0] for keys in shapes[:2])
        raise UserError(
            f"{name} names {kinds}, which no record has together.\n"
            f"Keep those of one kind, such as {', '.join(shapes[0])}."
        )


def _field_names(options: type) -> list[str]:
    return [field.name for field in dataclasses.fields(options)]


_DEFAULT_VAL_SPLIT_FRACTION = 0.05  # of litgpt.data.JSON
_NOT_OF_CONTENT = (
    *("path", "json_path", "sources", "key", "name", "weight", "samples"),
    *("num_workers", "ignore_index"),
)
"""Options that decide neither records nor rules of a source."""
_OPTION = re.compile(rf"\bdata\.({'|'.join(KEYS_OF_SETS)})\b")
"""Option of data in a message about records, which may be about a set of eval.sets instead."""


class OwnData(DataSource):
    """Files or hub data sets; what has no validation records of its own is split."""

    _taken_whole: frozenset[str] = frozenset({"path", "json_path", "sources", "split"})
    """Options that name other data: nothing of these was trained on."""

    def __init__(
        self,
        options: OwnDataOptions,
        sources: Sequence[_SourceOptions],
        *,
        given: Collection[str] = (),
        evaluated: Collection[str] = (),
        preference: Preference | None = None,
    ) -> None:
        """Take options; nothing is read yet.

        Args:
            options: checked.
            sources: those that they name.
            given: the options that were named.
            evaluated: the options that were named for an evaluation alone; a source named there is
                taken whole: nothing of it was trained on.
            preference: how records say which answers are better; None: they do not.
        """
        self._preference = preference
        self._options, self._sources = options, sources
        self._given, self._evaluated = frozenset(given), frozenset(evaluated)
        self._whole = bool(self._evaluated & self._taken_whole)
        self._digests: dict[str, frozenset[bytes]] = {}

    @classmethod
    def documented(cls, name: str) -> type:
        return OwnDataOptions

    @classmethod
    def of(cls, data: Component) -> Self:
        init_args = data["init_args"]
        options = _options_of(init_args)
        given = [key for key, value in init_args.items() if value is not None]
        sources = _sources_of(options, given)
        _check_shuffle(options, sources)
        return cls(options, sources, given=given)

    @classmethod
    def without_files(cls, name: str, init_args: Mapping[str, Any]) -> Self:
        """The source of records that come from elsewhere; a subclass reads them.

        Args:
            name: of the source, for people.
            init_args: options of their split and their rendering, `OPTIONS_WITHOUT_FILES`.

        Raises:
            UserError: a value out of range.
        """
        given = {key: value for key, value in init_args.items() if value is not None}
        _check_values(given, "data.")
        for group in _EXCLUSIVE:
            _check_one_of(group, given)
        inherited = {key: given[key] for key in _INHERITED if key in given}
        source = _SourceOptions(path=name, key="data", given=tuple(given), **inherited)
        return cls(OwnDataOptions(**given), [source], given=given)

    @classmethod
    def validation_set(cls, name: str, entry: Any, rendering: Mapping[str, Any]) -> Self:
        """The records of a set of eval.sets, all held out.

        Args:
            name: of the set.
            entry: what the recipe has under it.
            rendering: see `DataSource.rendering`.

        Raises:
            UserError: an unknown key or a value out of range.
        """
        source = _set_of(name, entry, rendering)
        return cls(OwnDataOptions(**rendering), [source], evaluated=source.given)

    def files(self) -> tuple[Path, ...] | None:
        """The files that are to be split, or those for training and those for validation.

        Raises:
            UserError: no such files.
        """
        for source in self._sources:
            if source.chat_template is not None:
                from ftkit.models.chat_templates.template import check_chat_template  # needs jinja2

                check_chat_template(source.chat_template)
        found = [self._found(source) for source in self._sources]
        fraction = self._options.val_split_fraction
        # A key without effect would let a user think that this share is held out.
        if fraction is not None and all(files is not None and files.val for files in found):
            key, path = self._sources[0].key, self._sources[0].path
            raise UserError(
                f"data.val_split_fraction is {fraction}, but {key} is the directory {path}, whose "
                "val file is the validation data.\n"
                f"Remove data.val_split_fraction, or set {key} to a single file."
            )
        here = [files for files in found if files is not None]
        if len(here) < len(found):
            return None
        return tuple(
            file for files in here for path in (*files.train, *files.val) for file in files_of(path)
        )

    def prompt_style(self) -> AnyStyle:
        return resolve_prompt_style(self._options.prompt_style)

    def rendering(self) -> dict[str, Any]:
        kept = self._given & {"columns", SKIP, *_RENDERING}
        return {key: getattr(self._options, key) for key in kept}

    def parts(self) -> tuple[PartSource, ...]:
        return tuple(
            PartSource(
                name=name,
                where=str(source.path),
                read=partial(self._part, source, name),
                content=self._content(source),
                weight=source.weight,
                samples=source.samples,
                in_order=not self._options.shuffle,
            )
            for source, name in zip(self._sources, _source_names(self._sources), strict=True)
        )

    def of_preference(self, preference: Preference) -> DataSource:
        preferred = copy.copy(self)
        preferred._preference, preferred._digests = preference, {}
        return preferred

    def given_records(self) -> Iterator[Record]:
        for source in self._sources:
            yield from self._read(source).train

    def for_evaluation(self, given: Collection[str]) -> DataSource:
        """Hold out all data named for the evaluation alone: nothing of it was trained on."""
        if not self._taken_whole & set(given) or "val_split_fraction" in given:
            return self
        held_out = copy.copy(self)
        held_out._options = dataclasses.replace(self._options, val_split_fraction=None)
        held_out._evaluated, held_out._whole = frozenset(given), True
        return held_out

    def _content(self, source: _SourceOptions) -> Content | None:
        """Describe the files and options that decide a source; None: they do not alone."""
        deciding = (source, *self._before(source))
        # The files of a hub data set are only known after a request, so its records give the
        # address.
        if any(is_hub_name(one.path) for one in deciding):
            return None

        def files() -> tuple[tuple[Path, ...], ...]:
            groups = []
            for one in deciding:
                found = self._found(one)
                assert found is not None
                groups += [found.train, found.val]
            return tuple(
                tuple(file for path in paths for file in files_of(path)) for paths in groups
            )

        options = self._deciding_options(source)
        if len(deciding) > 1:
            options["before"] = [self._deciding_options(one) for one in deciding[1:]]
        options["whole"], options["preference"] = self._whole, self._preference
        style = partial(resolve_prompt_style, source.prompt_style)
        return Content(files=files, options=options, prompt_style=style)

    def _deciding_options(self, source: _SourceOptions) -> dict[str, Any]:
        options = dataclasses.asdict(self._options) | dataclasses.asdict(source)
        # These decide the address in the cache. Where files lie, how often they are repeated and
        # how they are called in reports do not change a token.
        options = {key: value for key, value in options.items() if key not in _NOT_OF_CONTENT}
        options["given"] = sorted(set(source.given) - set(_NOT_OF_CONTENT))
        return options

    def _before(self, source: _SourceOptions) -> tuple[_SourceOptions, ...]:
        """Sources of which a record keeps out equal ones of this source."""
        drops = self._options.drop_equal and not self._whole
        return tuple(self._sources[: self._sources.index(source)]) if drops else ()

    def _found(self, source: _SourceOptions) -> DataFiles | None:
        """Find the files of a source; None: it is a hub data set."""
        if is_hub_name(source.path):
            hub_of(str(source.path), source.key)  # refuses now what could not be read
            return None
        files = find_files(source.path, source.key)
        group = source.key.rpartition(".")[0]
        for key in _OF_HUB:
            if (value := getattr(source, key)) is not None:
                raise UserError(
                    f"{group}.{key} is {value}, but {source.path} is on this machine, and only hub "
                    "data sets have it.\n"
                    f"Remove {key}{'' if '[' in group else f' (--{group}.{key} null)'}."
                )
        return files

    def _part(self, source: _SourceOptions, name: str) -> Part:
        try:
            records = self._read(source)
        except UserError as error:
            if source.name is None:
                raise
            # Readers name keys of data; the records of a set stand under eval.sets.NAME.
            raise UserError(_OPTION.sub(rf"eval.sets.{source.name}.\1", str(error))) from error
        rules, shape = self._rules(source, records)
        train, val = self._as_rendered(source, records, rules, shape)
        self._check_media(source, records, kinds_in(chain(train, val or ())))
        left_out = ""
        if self._options.drop_equal and not self._whole:
            seen = {digest for one in self._before(source) for digest in self._digests_of(one)}
            every = len(train) + len(val or ())
            train = _unequal(train, source, seen)
            val = None if val is None else _unequal(val, source, seen)
            left_out = f"; {every - len(train) - len(val or ()):,} equal ones left out"
        said = records.form.counted(len(train))
        if records.version is not None:
            said += f" of version {records.version}"
        bad = records.bad
        if val is not None:
            split = f" (split {records.val_split})" if records.val_split else ""
            said += f", {len(val):,} more to validate on{split}"
        elif self._whole:
            train, val, bad = [], train, {"val": bad["train"]}
        elif self._options.val_split_fraction == 0:
            val = train
            said += ", which are also those to validate on"
        else:
            fraction = self._options.val_split_fraction
            fraction = _DEFAULT_VAL_SPLIT_FRACTION if fraction is None else fraction
            if self._before(source) and not int(len(train) * fraction):
                val = []  # equal records have left too few, and other sources have some
            else:
                train, val = self._held_out(train, fraction, records.where, source.key)
            said += f", {len(val):,} of them to validate on"
        return Part(
            name=name,
            description=said + left_out,
            shape=shape,
            rules=rules,
            train=train,
            val=val,
            unused=records.unused,
            bad={split: of_split.kinds for split, of_split in bad.items()},
            media=kinds_in(chain(train, val)),
            skips_bad=self._options.skip_bad_records,
        )

    def _held_out(
        self, records: list[Record], fraction: float, where: str, key: str
    ) -> tuple[list[Record], list[Record]]:
        train, val = _split(len(records), fraction, self._options.seed, where, key)
        if not self._options.shuffle:
            train = sorted(train)
        return [records[i] for i in train], [records[i] for i in val]

    def _check_media(
        self, source: _SourceOptions, records: RecordSet, media: Collection[str]
    ) -> None:
        """Refuse options of media that have no effect on a single source."""
        for key in _OF_MEDIA if len(self._sources) == 1 and source.name is None else ():
            if getattr(self._options, key) is not None and "image" not in media:
                raise UserError(
                    f"data.{key} is {getattr(self._options, key)}, but {records.where} holds no "
                    f"images.\nRemove data.{key} (on the command line: --data.{key} null)."
                )

    def _read(self, source: _SourceOptions) -> RecordSet:
        files, skips_bad = self._found(source), self._options.skip_bad_records
        if files is not None:
            where = str(source.path)
            return read_files(
                files, where, source.columns, preference=self._preference, skips_bad=skips_bad
            )
        wanted = HubName(
            name=str(source.path),
            subset=source.subset,
            split=source.split,
            revision=source.revision,
            data_files=source.data_files,
        )
        fraction = self._options.val_split_fraction
        # A share that is named is split off, even if the hub has a validation split.
        whole = "split" in self._evaluated or fraction is not None
        return read_hub(
            wanted,
            source.columns,
            whole=whole,
            preference=self._preference,
            skips_bad=skips_bad,
        )

    def _digests_of(self, source: _SourceOptions) -> frozenset[bytes]:
        """Digests of all records of a source."""
        if source.key not in self._digests:
            records = self._read(source)
            train, val = self._as_rendered(source, records, *self._rules(source, records))
            every = (*train, *(val or ()))
            self._digests[source.key] = frozenset(_digest(record, source) for record in every)
        return self._digests[source.key]

    def _rules(self, source: _SourceOptions, records: RecordSet) -> tuple[Rules, Shape]:
        """Choose the rendering rules of a source, and the shape that is rendered."""
        row = shape_row(records.form.shape)
        _check_meant(source, self._options, records, self._preference)
        rules = Rules(
            reasoning=self._options.reasoning,
            overlong=self._options.overlong or ("split" if row.is_split else "truncate"),
            min_tokens=self._options.min_tokens or 0,
            preference=self._preference,
            media_options={
                key: value
                for key in _OF_MEDIA
                if (value := getattr(self._options, key)) is not None
            },
        )
        # The prompt of a pair is in both halves, and says nothing about which one is better.
        masked: TrainOn = "last" if source.mask_prompt or self._preference else "all"
        if row.has_style and source.chat_template is None:
            style = resolve_prompt_style(source.prompt_style)
            rules = dataclasses.replace(
                rules, prompt_style=style, train_on=source.train_on or masked
            )
            # A prompt of one question has no place for others: with them it is a conversation.
            every = (*records.train, *(records.val or ()))
            has_history = any("history" in _first(record, self._preferred) for record in every)
            if has_history:
                return rules, shape_row(CONVERSATION, "The history of an instruction").name
            return rules, row.name
        shape, template, default = row.name, None, row.train_on
        if row.has_template:
            shape = shape_row(CONVERSATION, "data.chat_template").name
            template = source.chat_template or "tokenizer"
            if row.has_style and source.mask_prompt is not None:
                default = masked
            elif self._preferred is not None and not row.has_style:
                default = self._preferred.turns
        return dataclasses.replace(
            rules,
            chat_template=template,
            chat_template_kwargs=given_arguments(source.chat_template_kwargs or {}) or None,
            train_on=source.train_on or default,
        ), shape

    @property
    def _preferred(self) -> PreferenceRow | None:
        return None if self._preference is None else preference_row(self._preference)

    def _as_rendered(
        self, source: _SourceOptions, records: RecordSet, rules: Rules, shape: Shape
    ) -> tuple[list[Record], list[Record] | None]:
        """Records to train on and to validate on, as they are rendered."""
        place = shape_row(shape).adapt_place
        if not place or (shape == records.form.shape and not source.drop_system):
            return records.train, records.val
        # A template that a style became, or one like it, has a place of its own for the input.
        has_place = "message.input" in (rules.chat_template or "")
        adapt = partial(
            imported(place),
            keeps_input=rules.prompt_style is not None or has_place,
            drop_system=source.drop_system,
        )
        answers = self._preferred.answers if self._preferred else ()

        def adapted(record: Record) -> Record:
            if not answers:
                return adapt(record)
            made = {}
            for answer in answers:
                found = record[answer]
                is_list = isinstance(found, list)
                made[answer] = [*map(adapt, found)] if is_list else adapt(found)
            return record | made

        train, val = records.train, records.val
        return [*map(adapted, train)], None if val is None else [*map(adapted, val)]


def _digest(record: Record, source: _SourceOptions) -> bytes:
    """Digest of a record and of how it is rendered."""
    rendering = {key: getattr(source, key) for key in _OF_RENDERING}
    if MEDIA in record:  # what files hold, not where they lie
        media = [(one["kind"], one["sha256"]) for one in record[MEDIA]]
        record = record | {MEDIA: media}
    text = json.dumps([rendering, record], sort_keys=True, default=str)
    # Digests, because the texts of many long records would fill memory.
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def _unequal(records: Sequence[Record], source: _SourceOptions, seen: set[bytes]) -> list[Record]:
    """Records without those that were seen, each of which is seen from now on."""
    kept = []
    for record in records:
        if (digest := _digest(record, source)) not in seen:
            seen.add(digest)
            kept.append(record)
    return kept


def _first(record: Record, preferred: PreferenceRow | None) -> Record:
    """The record with the first answer of a record that says which answers are better."""
    if not preferred or not preferred.answers:
        return record
    found = record[preferred.answers[0]]
    first: Record = found[0] if isinstance(found, list) else found
    return first


def _check_meant(
    source: _SourceOptions,
    options: OwnDataOptions,
    records: RecordSet,
    preference: Preference | None,
) -> None:
    """Refuse options that have no effect on records of this shape."""
    row = shape_row(records.form.shape)
    refused = dict(row.refused)
    # Of completions that are compared, answers alone are trained in any case.
    if preference and row.name == "completion" and source.mask_prompt:
        del refused["mask_prompt"]
    if row.has_style and source.chat_template is None:
        instead = "Give chat_template too, or remove {key}"
        refused[ARGUMENTS] = refused["drop_system"] = instead
    group = source.key.rpartition(".")[0]
    for key, advice in refused.items():
        if key in source.given:
            raise UserError(
                f"{group}.{key} is {getattr(source, key)}, but {records.where} holds "
                f"{records.form.plural}, for which it means nothing.\n"
                f"{advice.format(key=f'{group}.{key}')} (on the command line: --data.{key} null)."
            )
    if row.learned and source.train_on not in (None, "all"):
        raise UserError(
            f"data.train_on is {source.train_on}, but {records.where} holds "
            f"{records.form.plural}, which are {row.learned}.\nRemove train_on, or set it to all."
        )
    if not row.is_split and options.overlong == "split":
        raise UserError(
            f"data.overlong is split, but {records.where} holds {records.form.plural}, and only "
            "documents are split.\nTry --data.overlong drop."
        )


def _source_names(sources: Sequence[_SourceOptions]) -> list[str]:
    """Shortest names that tell the sources apart in reports."""
    if len(sources) == 1:
        return [sources[0].name or "JSON"]
    paths = [str(source.path).rstrip("/") for source in sources]
    short = [path.rpartition("/")[2] for path in paths]
    names = short if len({*short}) == len(short) else paths
    return [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names, 1)]


def _split(
    size: int, val_split_fraction: float, seed: int, where: str, key: str
) -> tuple[list[int], list[int]]:
    """Numbers of records to train and to validate on, those of litgpt.data.JSON by this seed."""
    import torch
    from torch.utils.data import Subset, random_split

    if size < 2:
        ending = Path(where).suffix if format_of(Path(where)) else ".json"
        raise UserError(
            f"{where} holds one record, but training and validation need one each.\n"
            f"Add records, or set {key} to a directory with train{ending} and val{ending}.\n"
            "To train on all of it, and hold nothing out: --data.val_split_fraction 0."
        )
    # random_split rounds down, so a share of few records may come to none.
    if not 0 < int(size * val_split_fraction) < size:
        raise UserError(
            f"data.val_split_fraction is {val_split_fraction}, which leaves nothing to train or "
            f"to validate on: {where} holds {size} records.\n"
            f"{how_to_set('data.val_split_fraction', 0.1 if size >= 10 else 0.5)}"
        )
    splits: list[Subset[int]] = random_split(
        range(size),  # type: ignore[arg-type]  # any sequence will do
        [1.0 - val_split_fraction, val_split_fraction],
        generator=torch.Generator().manual_seed(seed),
    )
    train, val = (list(split.indices) for split in splits)
    return train, val
