"""Corpora as data of a recipe: their options, and what is read of them before a run."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self, get_args

from ftkit.data.own_data import OwnData
from ftkit.data.records.paths import is_hub_name
from ftkit.data.records.record import Record
from ftkit.data.spec import DataSource, Part, PartSource, Rules, check_init_args, check_value
from ftkit.errors import UserError
from ftkit.extensions.streamed_corpora.files import (
    Lines,
    Pieces,
    Reading,
    find_files,
    find_on_hub,
)
from ftkit.extensions.streamed_corpora.places import Place, PlacedFile
from ftkit.models.chat_templates.prompt_styles import AnyStyle, resolve_prompt_style
from ftkit.recipe.hubs import HubFiles, HubName, hub_of
from ftkit.recipe.recipe import Component, Train
from ftkit.utils.console.formatting import bytes_text

_SAMPLE_CHARACTERS = 2**18
"""What is read of a corpus before a run, to learn how long its samples are."""
_VALIDATION_CHARACTERS = 2**20
"""What is read of the pieces that are held out, at most."""


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """The init_args of Corpus data."""

    path: str | Path | None = None
    """A directory with all files below it, a pattern such as 'texts/**/*.jsonl', or a file: .jsonl,
    .txt or .parquet; .jsonl and .txt also as .gz or .zst, which are read as a whole. A url of a
    directory or file: s3://, gs:// or az://. A data set of the Hugging Face hub (owner/name), whose
    files are read by ranges. Or embedded:documents."""
    sources: list[dict[str, Any]] | None = None
    """Several corpora instead of path: a list of objects with path and, optionally, weight (its
    share of the samples, relative to the others; default 1), text_key, val_path, revision and
    data_files."""
    revision: str | None = None
    """Version of a hub data set: a commit, a tag or a branch. A run keeps the commit with which it
    began."""
    data_files: str | None = None
    """A file in the repository of a hub data set, or a pattern such as 'data/**'. Default: all."""
    text_key: str = "text"
    """Key or column of the text of a document."""
    text_files: Lines = "document"
    """What a .txt file holds: one document, or one in each of its lines. One that is a document is
    read as a whole."""
    join_documents: bool = True
    """Whether documents are joined, each with its end token, and cut to train.max_seq_length:
    attention then crosses their borders. False: each document is cut by itself."""
    piece_kib: int = 128
    """Size of the pieces in which files are read and put in a random order; a document belongs to
    the piece that it begins in."""
    window_pieces: int = 16
    """Pieces that are tokenised together, and whose samples are put in a random order. A run begins
    as soon as this many are tokenised."""
    val_path: str | Path | None = None
    """Documents to validate on, as of data JSON. Default: those of the pieces that are held out."""
    val_pieces: int = 1
    """Without val_path, so many pieces are held out, evenly spread; a megabyte of them is validated
    on."""
    skip_bad_documents: bool = False
    """Leave out records without a text, such as a line that is not JSON; otherwise one ends the run
    where it is reached. May be set to go on after that."""
    windows_ahead: int = 1
    """Windows of each corpus that threads tokenise ahead of the steps. 0: each is tokenised when it
    is needed."""
    cache_gib: float = 20.0
    """Most disk space for tokenised pieces, of all corpora together: those that were not used for
    longest are removed. 0: none are kept, and every rank tokenises for itself."""


_OF_HUB = ("revision", "data_files")
_OF_ONE = ("path", "val_path", *_OF_HUB)
_OF_SOURCES = ("path", "weight", "text_key", "val_path", *_OF_HUB)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def _options_of(init_args: Mapping[str, Any]) -> CorpusOptions:
    names = [field.name for field in dataclasses.fields(CorpusOptions)]
    check_init_args(init_args, names, "Corpus")
    given = {key: value for key, value in init_args.items() if value is not None}
    for key, value in given.items():
        _check(f"data.{key}", key, value)
    if "sources" in given:
        for key in _OF_ONE:
            if key in given:
                raise UserError(
                    f"data.{key} is {given[key]}, but data.sources names several.\n"
                    "Move it into the entry of data.sources that it is for."
                )
        for number, entry in enumerate(given["sources"]):
            _check_source(f"data.sources[{number}]", entry)
    elif "path" not in given:
        raise UserError(
            "data.path is missing; Corpus data needs a directory with files of documents.\n"
            "Try --data.path DIRECTORY."
        )
    return CorpusOptions(**given)


def _check_source(key: str, entry: Any) -> None:
    if not isinstance(entry, dict) or not entry.get("path"):
        raise UserError(
            f"{key} is {entry!r}, but has to be an object with a path.\n"
            "Write it as {path: DIRECTORY}, with weight if needed."
        )
    for name, value in entry.items():
        if name not in _OF_SOURCES:
            raise UserError(
                f"{key} has no key {name}, only {', '.join(_OF_SOURCES)}.\nRemove {name}."
            )
        _check(f"{key}.{name}", name, value)


def _check(key: str, name: str, value: Any) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    is_number = is_whole or isinstance(value, float)
    if name in ("path", "val_path"):
        check_value(key, value, isinstance(value, str | Path), "the path of files", "DIRECTORY")
    elif name in _OF_HUB:
        works = "main" if name == "revision" else "'data/**'"
        check_value(key, value, isinstance(value, str) and bool(value), "a text", works)
    elif name == "text_key":
        check_value(key, value, isinstance(value, str) and bool(value), "a text", "text")
    elif name == "sources":
        accepted = isinstance(value, list) and bool(value)
        works = "'[{path: books}, {path: code, weight: 2}]'"
        check_value(key, value, accepted, "a list of objects with a path each", works)
    elif name == "text_files":
        choices = get_args(Lines)
        check_value(key, value, value in choices, f"one of {', '.join(choices)}", choices[0])
    elif name in ("join_documents", "skip_bad_documents"):
        check_value(key, value, isinstance(value, bool), "true or false", "true")
    elif name in ("piece_kib", "window_pieces", "val_pieces"):
        default = getattr(CorpusOptions(), name)
        check_value(key, value, is_whole and value > 0, "a whole number above 0", str(default))
    elif name == "windows_ahead":
        check_value(key, value, is_whole and 0 <= value <= 64, "a whole number up to 64", "1")
    elif name == "cache_gib":
        accepted = is_number and 0 <= value < math.inf
        check_value(key, value, accepted, "a number, 0 or more", "20")
    elif name == "weight":
        accepted = is_number and 0 < value < math.inf
        check_value(key, value, accepted, "a number above 0", "1")


class OneCorpus:
    """One of the corpora of a recipe."""

    def __init__(
        self, options: CorpusOptions, entry: Mapping[str, Any], key: str, name: str
    ) -> None:
        """Take options; nothing is looked for yet.

        Args:
            options: of the data.
            entry: those of this corpus.
            key: of its path, for errors.
            name: in reports.
        """
        self._options, self._key, self.name = options, key, name
        self.where = str(entry["path"])
        """Its path, for people."""
        self.of_hub = {name: entry[name] for name in _OF_HUB if entry.get(name) is not None}
        """What of a hub data set is read."""
        self._val_path: str | Path | None = entry.get("val_path")
        self.text_key: str = entry.get("text_key") or options.text_key
        self.weight = float(entry.get("weight") or 1)
        self.window_pieces, self.join_documents = options.window_pieces, options.join_documents
        self.cache_bytes = int(options.cache_gib * 2**30)

    @cached_property
    def found(self) -> tuple[Place, list[PlacedFile]]:
        """Where it lies, and its files."""
        if self.is_on_hub:
            return find_on_hub(self.where, self._hub_files, self._key)
        return find_files(self.where, self._key)

    @cached_property
    def is_on_hub(self) -> bool:
        """Whether it is a data set of a hub; no request is sent.

        Raises:
            UserError: options of hub data sets of another corpus, or nothing reads those of hubs.
        """
        if is_hub_name(self.where):
            hub_of(self.where, self._key)
            return True
        for name, value in self.of_hub.items():
            group = self._key.rpartition(".")[0]
            works = "" if "[" in group else f" (--{group}.{name} null)"
            raise UserError(
                f"{group}.{name} is {value}, but {self.where} is no data set of a hub, and only "
                f"those have it.\nRemove {name}{works}."
            )
        return False

    @cached_property
    def _hub_files(self) -> HubFiles:
        hub, name = hub_of(self.where, self._key)
        return hub.data_files(HubName(name=name, **self.of_hub))

    def pinned(self, saved: Mapping[str, Any] | None) -> dict[str, Any]:
        """Its revision as a commit: that of a checkpoint if it was the same data set, or today's.

        Args:
            saved: the entry of the checkpoint that the run continues from; None: of none.
        """
        if not self.is_on_hub:
            return {}
        given = self.of_hub.get("revision")
        is_same = saved is not None and str(saved.get("path")) == self.where
        if saved is not None and is_same and not _COMMIT.fullmatch(given or ""):
            self.of_hub |= {"revision": saved.get("revision") or given}
        self.found  # noqa: B018 - a data set that is not there is refused now
        return {"revision": self._hub_files.commit}

    @cached_property
    def validation(self) -> OwnData | None:
        """The documents of val_path; None: pieces are held out."""
        if self._val_path is None:
            return None
        entry: dict[str, Any] = {"path": self._val_path}
        if self.text_key != "text":
            entry["columns"] = {"text": self.text_key}
        return OwnData.validation_set(self.name, entry, {})

    def reading(self, piece_bytes: int) -> Reading:
        """How its files are read, in pieces of this size."""
        return Reading(
            text_key=self.text_key,
            text_files=self._options.text_files,
            piece_bytes=piece_bytes,
            skips_bad=self._options.skip_bad_documents,
        )

    @cached_property
    def pieces(self) -> Pieces:
        """Its pieces, those that are held out too."""
        made = Pieces(*self.found, self.reading(self._options.piece_kib * 2**10))
        if not len(made):
            raise UserError(
                f"{self._key} is {self.where}, whose files are all empty.\nGive files with "
                "documents."
            )
        held = self._options.val_pieces if self.validation is None else 0
        if len(made) <= held:
            raise UserError(
                f"data.val_pieces is {held}, but {self._key} is {self.where}, which has "
                f"{len(made)} pieces of {self._options.piece_kib} KiB (a file that is read as a "
                "whole is one).\nTry --data.val_path FILE with documents to validate on, or a "
                "smaller --data.piece_kib."
            )
        return made

    @cached_property
    def held_out(self) -> tuple[int, ...]:
        """Pieces that are not trained on, rising."""
        if self.validation is not None:
            return ()
        count, held = len(self.pieces), self._options.val_pieces
        return tuple((2 * number + 1) * count // (2 * held) for number in range(held))

    @property
    def trained_pieces(self) -> int:
        """Number of pieces that are trained on."""
        return len(self.pieces) - len(self.held_out)

    def trained_piece(self, number: int) -> int:
        """The number among all pieces of one that is trained on."""
        for held in self.held_out:
            number += number >= held
        return number

    def read(self) -> Part:
        """The first documents to train on, and those to validate on."""
        every = (self.trained_piece(number) for number in range(self.trained_pieces))
        first = self._texts(every, _SAMPLE_CHARACTERS)
        train = [{"text": text} for text in first]
        if self.validation is None:
            val = [{"text": text} for text in self._texts(self.held_out, _VALIDATION_CHARACTERS)]
        else:
            val = self._given_validation()
        files = len(self.pieces.files)
        version = f" of version {self._hub_files.commit[:7]}" if self.is_on_hub else ""
        said = (
            f"{files:,} file{'s' * (files != 1)} of {bytes_text(self.pieces.size_bytes)}{version} "
            f"in {len(self.pieces):,} pieces, read as they are trained on; only their first "
            f"{len(first):,} documents were looked at, and {len(val):,} more to validate on"
        )
        if self.pieces.bad:
            said += f"; {self.pieces.bad:,} bad records among these are left out"
        return Part(
            name=self.name,
            description=said,
            shape="text",
            rules=Rules(overlong="split", train_on="all"),
            train=train,
            val=val,
        )

    def _given_validation(self) -> list[Record]:
        assert self.validation is not None
        (source,) = self.validation.parts()
        part = source.read()
        if part.shape != "text":
            raise UserError(
                f"data.val_path is {self._val_path}, which holds records of the shape "
                f"{part.shape}, but a corpus has documents.\nGive documents, or name such records "
                "as a set of eval.sets."
            )
        return list(part.val)

    def _texts(self, pieces: Iterable[int], most: int) -> list[str]:
        """Documents of pieces, up to so many characters, but at least one."""
        found: list[str] = []
        for piece in pieces:
            for text in self.pieces.texts(piece):
                if found and most < len(text):
                    return found
                found.append(text)
                most -= len(text)
        return found


class CorpusSource(DataSource):
    """Corpora that are read as they are trained on."""

    stream_place = "ftkit.extensions.streamed_corpora.stream:open_stream"

    def __init__(self, options: CorpusOptions) -> None:
        """Take checked options; no file is looked for yet."""
        self._options = options
        self.windows_ahead = options.windows_ahead
        entries = options.sources
        if entries is None:
            entry = {name: getattr(options, name) for name in _OF_ONE}
            self.corpora = [OneCorpus(options, entry, "data.path", "Corpus")]
            return
        paths = [str(entry["path"]).rstrip("/") for entry in entries]
        short = [path.rpartition("/")[2] for path in paths]
        names = short if len({*short}) == len(short) else paths
        self.corpora = [
            OneCorpus(options, entry, f"data.sources[{number}].path", name)
            for number, (entry, name) in enumerate(zip(entries, names, strict=True))
        ]

    @classmethod
    def documented(cls, name: str) -> type:
        return CorpusOptions

    @classmethod
    def of(cls, data: Component) -> Self:
        return cls(_options_of(data["init_args"]))

    def files(self) -> tuple[Path, ...] | None:
        found: list[Path] = []
        are_here = True
        for corpus in self.corpora:
            if corpus.is_on_hub:
                are_here = False
            else:
                place, placed = corpus.found
                are_here = are_here and place.is_local
                found += [file.path for file in placed]
            if corpus.validation is not None:
                files = corpus.validation.files()
                if files is None:
                    return None
                found += files
        return tuple(found) if are_here else None

    def prompt_style(self) -> AnyStyle:
        return resolve_prompt_style("alpaca")

    def parts(self) -> tuple[PartSource, ...]:
        return tuple(
            PartSource(name=corpus.name, where=corpus.where, read=corpus.read)
            for corpus in self.corpora
        )

    def rendering(self) -> dict[str, Any]:
        key = self.corpora[0].text_key
        return {} if key == "text" else {"columns": {"text": key}}

    def pinned(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        before: list[Mapping[str, Any]] = saved.get("sources") or [saved]
        if self._options.sources is None:
            return self.corpora[0].pinned(before[0])
        known = [*before, *[None] * len(self.corpora)]
        pinned = [corpus.pinned(entry) for corpus, entry in zip(self.corpora, known, strict=False)]
        if not any(pinned):
            return {}
        entries = zip(self._options.sources, pinned, strict=True)
        return {"sources": [entry | more for entry, more in entries]}

    def check_run(self, train: Train) -> None:
        if train.max_tokens is not None and not self._options.join_documents:
            raise UserError(
                f"train.max_tokens is {train.max_tokens}, but data.join_documents is false: nobody "
                "knows how many tokens a step will have. Try --train.max_tokens null "
                "--train.max_steps 1000."
            )
