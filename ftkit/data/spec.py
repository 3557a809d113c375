"""The interface of a data source, and the checks of options that data sources share.

Imports neither torch nor litgpt, so that a mistake shows before any process is started.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Self

from ftkit.data.records.bad import BadKind
from ftkit.data.records.keys import UnusedKeys
from ftkit.data.records.media import MediaFile, files_of
from ftkit.data.records.paths import how_to_set
from ftkit.data.records.record import Record, Shape
from ftkit.errors import UserError
from ftkit.models.chat_templates import Reasoning, TrainOn
from ftkit.models.chat_templates.prompt_styles import AnyStyle
from ftkit.recipe.objectives import Preference
from ftkit.recipe.readers import foreign_key
from ftkit.recipe.recipe import Component, Train
from ftkit.utils.names import nearest

OWN_DATA = "--data JSON --data.path FILE"
"""Options by which records of one's own are given."""
Overlong = Literal["truncate", "drop", "split"]
"""Handling of a sample longer than max_seq_length: its end is cut off, it is dropped, or it is cut
into several."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Rendering rules of records: everything but the tokenizer."""

    prompt_style: AnyStyle | None = None
    """How the instruction of a record becomes a prompt, also each of a conversation; None: a chat
    template says it, or records are of another shape."""
    chat_template: str | None = None
    """How a conversation becomes text: tokenizer, a name, a file, or a jinja text; None: it does
    not, or as the prompt style says."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Values of variables that the chat template reads, by name."""
    train_on: TrainOn = "assistant"
    reasoning: Reasoning = "split"
    overlong: Overlong = "truncate"
    min_tokens: int = 0
    """Samples with fewer tokens are left out."""
    preference: Preference | None = None
    """How records say what is learned of them beside their texts. pairs: each has two records under
    chosen and rejected; others: each has a target; None: they do not."""
    media_options: Mapping[str, int] = field(default_factory=dict)
    """Options of data that say how media become tokens, by name; only those that are given."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The records of one source of a data set, all of one shape."""

    name: str
    """Name in reports and messages."""
    shape: Shape
    rules: Rules
    train: Sequence[Record]
    val: Sequence[Record]
    description: str = ""
    """Number and kind of records, for people."""
    unused: UnusedKeys = field(default_factory=UnusedKeys)
    """Keys of the records that are not used."""
    bad: Mapping[str, Sequence[BadKind]] = field(default_factory=dict)
    """Bad records that are left out, by split."""
    media: tuple[str, ...] = ()
    """Kinds of media in its records."""
    skips_bad: bool = False
    """Whether a record whose image or other file is bad is left out."""

    @property
    def media_files(self) -> list[MediaFile]:
        """Files of the media of all its records, also of bad ones."""
        found = [file for record in chain(self.train, self.val) for file in files_of(record)]
        return found + [
            file for kinds in self.bad.values() for kind in kinds for file in kind.files
        ]

    @property
    def summary(self) -> str:
        """Description of the records and of their unused keys."""
        unused = self.unused.text
        return self.description + (f"; not used: {unused}" if unused else "")


@dataclass(frozen=True, kw_only=True)
class Content:
    """Files and options that decide a part, where they are known before it is read."""

    files: Callable[[], tuple[tuple[Path, ...], ...]]
    """Files for training and for validation; see `DataSource.files`."""
    options: Mapping[str, Any]
    """JSON values: the same files with the same options give the same records and rules."""
    prompt_style: Callable[[], AnyStyle]
    """The one of the rules, if they have one."""


@dataclass(frozen=True, kw_only=True)
class PartSource:
    """One part of a data set before it is read."""

    name: str
    """Name of the part."""
    where: str
    """File, directory or data set that it comes from, for people."""
    read: Callable[[], Part]
    content: Content | None = None
    """None: the part is known only after reading."""
    weight: float | None = None
    """An epoch takes this many times its samples; None: every one once, or as `samples` says."""
    samples: int | None = None
    """An epoch takes so many of its samples."""
    load: Callable[..., Any] | None = None
    """Makes its samples itself: takes what `ftkit.data.dataset.load_data` does (tokenizer, most
    tokens of a sample, progress), and returns the `LoadedPart`. None: they are made of records."""
    in_order: bool = False
    """Whether every epoch takes its samples in their own order; else it shuffles them. Sources are
    all of this kind, or all of the other. In their own order, an epoch takes each sample once."""


class DataSource(ABC):
    """Origin of records: a kind of data with the options of a recipe.

    Made without torch and litgpt. What makes samples of the records, fingerprints, evaluates and
    plans them is the same for every kind: it uses this interface alone.
    """

    stream_place: str = ""
    """MODULE:FUNCTION that opens the samples to train on, given the source, the tokenizer and the
    most tokens of a sample, where nobody knows how many there are: a run then ends by its steps,
    and what `parts` read for training are the first records. "": an epoch's are counted."""

    @classmethod
    @abstractmethod
    def documented(cls, name: str) -> type:
        """The class whose arguments are the options of data of this name, with their texts."""

    @classmethod
    @abstractmethod
    def of(cls, data: Component) -> Self:
        """The source that the `data` section of a recipe describes.

        Raises:
            UserError: a key that it does not have, or a value out of range.
        """

    @abstractmethod
    def files(self) -> tuple[Path, ...] | None:
        """The files that the records are in; None: they may have to be downloaded.

        Raises:
            UserError: they are not there, or of another kind.
        """

    @abstractmethod
    def prompt_style(self) -> AnyStyle:
        """Return the style in which instructions become prompts, without reading records.

        Raises:
            UserError: there is no such style.
        """

    @abstractmethod
    def parts(self) -> tuple[PartSource, ...]:
        """The parts that it has, at least one; no file is looked for yet."""

    @abstractmethod
    def rendering(self) -> dict[str, Any]:
        """The init_args with which JSON data reads and renders other records as these."""

    def of_preference(self, preference: Preference) -> "DataSource":
        """The source whose records say which answers are better.

        Args:
            preference: how they do.

        Raises:
            UserError: they do not.
        """
        raise UserError(
            f"data is {self.parts()[0].name}, which has no {preference.partition(' ')[0]}, but the "
            f"objective learns from these.\nTry {OWN_DATA}."
        )

    def given_records(self) -> Iterable[Record]:
        """The records to train on, before any are held out.

        Raises:
            UserError: they cannot be read, or not by themselves.
        """
        raise UserError(
            f"data is {self.parts()[0].name}, whose records cannot be read by themselves.\n"
            f"Try {OWN_DATA}."
        )

    def check_run(self, train: Train) -> None:  # noqa: B027 - most data suit any
        """Refuse settings of a run that its samples do not suit.

        Raises:
            UserError: names the key.
        """

    def pinned(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Options that replace those of the recipe, so that all ranks and sessions read the same.

        Such as the commit of a hub data set, of which a recipe may name a branch.

        Args:
            saved: the init_args of the checkpoint that the run continues from; {}: of none.

        Raises:
            UserError: the data are not there.
        """
        return {}

    def for_evaluation(self, given: Collection[str]) -> "DataSource":
        """The source whose validation records are evaluated on.

        Args:
            given: the options that were named for the evaluation alone.
        """
        return self


def check_init_args(init_args: Iterable[str], known: Iterable[str], module: str) -> None:
    """Refuse keys that the data source does not have.

    Raises:
        UserError: naming the nearest key there is.
    """
    known = sorted(known)
    for key in init_args:
        if key not in known:
            near = nearest(key, known)
            advice = f"--data.{near}" if near else "removing it"
            if words := foreign_key(key):
                raise UserError(f"data.{key} is not an option of {module}. {words.text}")
            raise UserError(
                f"data.{key} is not an option of {module}, which has {', '.join(known)}.\n"
                f"Try {advice}."
            )


def check_value(key: str, value: object, accepted: bool, rule: str, works: str) -> None:
    """Refuse a value.

    Args:
        key: the whole of it, such as data.path.
        value: what it is.
        accepted: whether it may be that.
        rule: what it has to be.
        works: a value that is.

    Raises:
        UserError: it is not accepted.
    """
    if not accepted:
        raise UserError(f"{key} is {value!r}, but has to be {rule}.\n{how_to_set(key, works)}")


def check_shared_values(init_args: Mapping[str, Any], *, may_validate_on_all: bool = False) -> None:
    """Check the options that all data sources share.

    Args:
        init_args: options by name.
        may_validate_on_all: whether no share of the records need be held out.

    Raises:
        UserError: a value out of range.
    """
    for option, value in init_args.items():
        key = f"data.{option}"
        whole = isinstance(value, int) and not isinstance(value, bool)
        if option == "mask_prompt":
            check_value(key, value, isinstance(value, bool), "true or false", "true")
        elif option == "val_split_fraction":
            number = whole or isinstance(value, float)
            held_out = number and 0 < value < 1
            accepted = held_out or (may_validate_on_all and number and value == 0)
            rule = "0, or between 0 and 1" if may_validate_on_all else "between 0 and 1"
            check_value(key, value, accepted, rule, "0.05")
        elif option == "ignore_index":
            rule = "-100: ftkit hands the model the labelled positions and needs no such mark"
            check_value(key, value, whole and value == -100, rule, "-100")
        elif option == "seed":
            accepted = whole and 0 <= value < 2**63
            check_value(key, value, accepted, "a whole number, 0 or more", "42")
        elif option == "num_workers":
            check_value(key, value, whole and value >= 0, "a whole number, 0 or more", "4")
