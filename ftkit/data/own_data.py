"""Data of one's own as a source: files and hub data sets, split and given their rules."""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from ftkit.data.own_data_options import (
    KEYS_OF_SETS,
    RENDERING,
    OwnDataOptions,
    SourceOptions,
    options_of,
    set_of,
    sources_of,
)
from ftkit.data.prompt_styles import resolve_prompt_style
from ftkit.data.records.conversations import conversation_of
from ftkit.data.records.formats import files_of, format_of
from ftkit.data.records.hub import HubName
from ftkit.data.records.paths import DataFiles, find_files, how_to_set, is_hub_name
from ftkit.data.records.read import RecordSet, read_files, read_hub
from ftkit.data.records.record import Record, Shape
from ftkit.data.spec import Content, DataSource, Part, PartSource, Rules
from ftkit.errors import UserError
from ftkit.models.chat_templates import TrainOn
from ftkit.models.chat_templates.prompt_styles import AnyStyle
from ftkit.recipe.recipe import Component

_DEFAULT_VAL_SPLIT_FRACTION = 0.05  # of litgpt.data.JSON
_TRAINED: dict[Shape, TrainOn] = {
    "instruction": "assistant",
    "messages": "assistant",
    "completion": "last",
    "text": "all",
}
"""What is learned of each shape, where nobody says it and no prompt style is used."""
_TAKEN_WHOLE = {"path", "json_path", "sources", "split"}
_NOT_OF_CONTENT = (
    *("path", "json_path", "sources", "key", "name", "weight", "samples"),
    *("num_workers", "ignore_index"),
)
"""Options that decide neither records nor rules of a source."""
_OPTION = re.compile(rf"\bdata\.({'|'.join(KEYS_OF_SETS)})\b")
"""Of data, in what is said of records; a set of eval.sets has it too."""


class OwnData(DataSource):
    """Files or hub data sets; what has no validation records of its own is split."""

    def __init__(
        self,
        options: OwnDataOptions,
        sources: Sequence[SourceOptions],
        *,
        given: Collection[str] = (),
        evaluated: Collection[str] = (),
    ) -> None:
        """Describe the data; nothing is read.

        Args:
            options: checked.
            sources: those that they name.
            given: the options that were named.
            evaluated: the options that were named for an evaluation alone; a source named there is
                taken whole: nothing of it was trained on.
        """
        self._options, self._sources = options, sources
        self._given, self._evaluated = frozenset(given), frozenset(evaluated)
        self._whole = bool(self._evaluated & _TAKEN_WHOLE)

    @classmethod
    def documented(cls, name: str) -> type:
        return OwnDataOptions

    @classmethod
    def of(cls, data: Component) -> Self:
        init_args = data["init_args"]
        options = options_of(init_args)
        given = [key for key, value in init_args.items() if value is not None]
        return cls(options, sources_of(options, given), given=given)

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
        source = set_of(name, entry, rendering)
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
        return {key: getattr(self._options, key) for key in self._given & {"columns", *RENDERING}}

    def parts(self) -> tuple[PartSource, ...]:
        return tuple(
            PartSource(
                name=name,
                where=str(source.path),
                read=partial(self._part, source, name),
                content=None if is_hub_name(source.path) else self._content(source),
                weight=source.weight,
                samples=source.samples,
            )
            for source, name in zip(self._sources, _names(self._sources), strict=True)
        )

    def for_evaluation(self, given: Collection[str]) -> DataSource:
        """All of what is named for the evaluation alone: nothing of it was trained on."""
        if not _TAKEN_WHOLE & set(given) or "val_split_fraction" in given:
            return self
        options = dataclasses.replace(self._options, val_split_fraction=None)
        return OwnData(options, self._sources, given=self._given, evaluated=given)

    def _content(self, source: SourceOptions) -> Content:
        """What a source follows from that is here."""

        def files() -> tuple[tuple[Path, ...], ...]:
            found = self._found(source)
            assert found is not None
            return tuple(
                tuple(file for path in paths for file in files_of(path))
                for paths in (found.train, found.val)
            )

        options = dataclasses.asdict(self._options) | dataclasses.asdict(source)
        options = {key: value for key, value in options.items() if key not in _NOT_OF_CONTENT}
        options["whole"] = self._whole
        options["given"] = sorted(set(source.given) - set(_NOT_OF_CONTENT))
        style = partial(resolve_prompt_style, source.prompt_style)
        return Content(files=files, options=options, prompt_style=style)

    def _found(self, source: SourceOptions) -> DataFiles | None:
        """The files of a source; None: it is of the hub."""
        if is_hub_name(source.path):
            return None
        files = find_files(source.path, source.key)
        group = source.key.rpartition(".")[0]
        for key in ("subset", "split", "revision"):
            if (value := getattr(source, key)) is not None:
                raise UserError(
                    f"{group}.{key} is {value}, but {source.path} is here, "
                    "and only hub data sets have it.\n"
                    f"Remove {key}{'' if '[' in group else f' (--{group}.{key} null)'}."
                )
        return files

    def _part(self, source: SourceOptions, name: str) -> Part:
        try:
            records = self._read(source)
        except UserError as error:
            if source.name is None:
                raise
            raise UserError(_OPTION.sub(rf"eval.sets.{source.name}.\1", str(error))) from error
        rules, shape = self._rules(source, records)
        train, val = records.train, records.val
        said = records.form.counted(len(train))
        if records.version is not None:
            said += f" of version {records.version}"
        if val is not None:
            split = f" (split {records.val_split})" if records.val_split else ""
            said += f", {len(val):,} more to validate on{split}"
        elif self._whole:
            train, val = [], train
        else:
            fraction = self._options.val_split_fraction or _DEFAULT_VAL_SPLIT_FRACTION
            train, val = _split(train, fraction, self._options.seed, records.where, source.key)
            said += f", {len(val):,} of them to validate on"
        if shape != records.form.shape:
            keeps_input = rules.prompt_style is not None
            train, val = (
                [conversation_of(record, keeps_input=keeps_input) for record in split]
                for split in (train, val)
            )
        return Part(
            name=name,
            description=said,
            shape=shape,
            rules=rules,
            train=train,
            val=val,
            unused=records.unused,
        )

    def _read(self, source: SourceOptions) -> RecordSet:
        files = self._found(source)
        if files is not None:
            where = str(source.path)
            return read_files(files, where, source.columns)
        wanted = HubName(
            name=str(source.path),
            subset=source.subset,
            split=source.split,
            revision=source.revision,
        )
        fraction = self._options.val_split_fraction
        whole = "split" in self._evaluated or fraction is not None
        return read_hub(wanted, source.columns, whole=whole)

    def _rules(self, source: SourceOptions, records: RecordSet) -> tuple[Rules, Shape]:
        """How records of a source become tokens, and the shape in which they do."""
        shape = records.form.shape
        _check_meant(source, self._options, records)
        rules = Rules(
            reasoning=self._options.reasoning,
            overlong=self._options.overlong or ("split" if shape == "text" else "truncate"),
        )
        masked: TrainOn = "last" if source.mask_prompt else "all"
        if shape == "instruction" and source.chat_template is None:
            style = resolve_prompt_style(source.prompt_style)
            rules = dataclasses.replace(
                rules, prompt_style=style, train_on=source.train_on or masked
            )
            # A prompt of one question has no place for others: with them it is a conversation.
            every = (*records.train, *(records.val or ()))
            return rules, "messages" if any("history" in one for one in every) else shape
        template, default = None, _TRAINED[shape]
        if shape in ("instruction", "messages"):
            template = source.chat_template or "tokenizer"
            if shape == "instruction" and source.mask_prompt is not None:
                default = masked
            shape = "messages"
        train_on = source.train_on or default
        return dataclasses.replace(rules, chat_template=template, train_on=train_on), shape


def _check_meant(source: SourceOptions, options: OwnDataOptions, records: RecordSet) -> None:
    """Refuse options that mean nothing for records of this shape.

    Raises:
        UserError: names the option, and what to use instead.
    """
    shape, refused = records.form.shape, {}
    if shape != "instruction":
        instead = "Set train_on (assistant, last or all) instead, and remove {key}"
        refused = {"mask_prompt": instead, "prompt_style": "Remove {key}"}
    if shape == "messages":
        refused["prompt_style"] = "Set chat_template instead, and remove {key}"
    if shape in ("completion", "text"):
        refused["chat_template"] = "Remove {key}"
    group = source.key.rpartition(".")[0]
    for key, advice in refused.items():
        if key in source.given:
            raise UserError(
                f"{group}.{key} is {getattr(source, key)}, but {records.where} holds "
                f"{records.form.plural}, for which it means nothing.\n"
                f"{advice.format(key=f'{group}.{key}')} (on the command line: --data.{key} null)."
            )
    if shape == "text" and source.train_on not in (None, "all"):
        raise UserError(
            f"data.train_on is {source.train_on}, but {records.where} holds documents, which are "
            "learned whole.\nRemove train_on, or set it to all."
        )
    if shape != "text" and options.overlong == "split":
        raise UserError(
            f"data.overlong is split, but {records.where} holds {records.form.plural}, and only "
            "documents are split.\nTry --data.overlong drop."
        )


def _names(sources: Sequence[SourceOptions]) -> list[str]:
    """A name for each source, in reports: as short as tells them apart."""
    if len(sources) == 1:
        return [sources[0].name or "JSON"]
    paths = [str(source.path).rstrip("/") for source in sources]
    short = [path.rpartition("/")[2] for path in paths]
    names = short if len({*short}) == len(short) else paths
    return [name if names.count(name) == 1 else f"{name} ({i})" for i, name in enumerate(names, 1)]


def _split(
    records: Sequence[Record], val_split_fraction: float, seed: int, where: str, key: str
) -> tuple[list[Record], list[Record]]:
    """Split off validation records, exactly as litgpt.data.JSON does with the same seed."""
    import torch
    from torch.utils.data import Subset, random_split

    size = len(records)
    if size < 2:
        ending = Path(where).suffix if format_of(Path(where)) else ".json"
        raise UserError(
            f"{where} holds one record, but training and validation need one each.\n"
            f"Add records, or set {key} to a directory with train{ending} and val{ending}."
        )
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
    train, val = ([records[i] for i in split.indices] for split in splits)
    return train, val
