"""Parts of a data set, tokenised: from the cache, or from their records."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ftkit.data.cache import (
    Building,
    Damaged,
    SampleCache,
    address_of_content,
    address_of_records,
    cache_directory,
    rendering_of,
)
from ftkit.data.instruction_renderer import InstructionRenderer
from ftkit.data.prepare import Prepared, prepare
from ftkit.data.renderer import Renderer
from ftkit.data.spec import Part, PartSource, Rules, Shape
from ftkit.errors import UserError

if TYPE_CHECKING:
    from litgpt.tokenizer import Tokenizer


Split = Literal["train", "val"]
OnSplitProgress = Callable[[str, int, int], None]
"""Called with what is being tokenised, records done, and records in all."""


@dataclass(frozen=True, kw_only=True)
class LoadedPart:
    """One part of a data set, tokenised."""

    source: PartSource
    shape: Shape
    rules: Rules
    renderer: Renderer
    """Made the samples."""
    splits: dict[Split, Prepared]
    """Those that were asked for."""
    notices: tuple[str, ...]
    """What a person should know about the cache."""


def make_renderer(part: Part, tokenizer: "Tokenizer | None") -> Renderer:
    """What makes samples of the records of a part.

    Args:
        part: its shape and rules count.
        tokenizer: of the base model; None: nothing but texts will be asked for.
    """
    rules = part.rules
    assert part.shape == "instruction" and rules.prompt_style is not None
    return InstructionRenderer(tokenizer, rules.prompt_style, mask_prompt=rules.train_on != "all")


def load_part(
    source: PartSource,
    tokenizer: "Tokenizer",
    max_seq_length: int,
    splits: Sequence[Split],
    progress: OnSplitProgress,
) -> LoadedPart:
    """Take the samples of a part from the cache, or make them and keep them there.

    Args:
        source: of the part.
        tokenizer: of the base model.
        max_seq_length: no sample has more tokens.
        splits: what is wanted.
        progress: called at least every 1000 records, where samples are made.

    Raises:
        UserError: the data cannot be had, or are not what they should be.
    """
    return _Loading(source, tokenizer, max_seq_length, progress).load(splits)


def find_part(
    source: PartSource, tokenizer: "Tokenizer", max_seq_length: int, splits: Sequence[Split]
) -> dict[Split, Prepared] | None:
    """The samples of a part if they are all in the cache; nothing is read or made."""
    if source.content is None:
        return None
    loading = _Loading(source, tokenizer, max_seq_length, lambda *_: None)
    found = loading.find(splits)
    return found if len(found) == len(splits) else None


class _Loading:
    """How far a part is loaded."""

    def __init__(
        self,
        source: PartSource,
        tokenizer: "Tokenizer",
        max_seq_length: int,
        progress: OnSplitProgress,
    ) -> None:
        self._source, self._tokenizer = source, tokenizer
        self._max_seq_length, self._progress = max_seq_length, progress
        self._cache = SampleCache(cache_directory())
        self._part: Part | None = None
        self._shape: Shape | None = None
        self._notices: list[str] = []
        self._stamps = self._stamp()
        self._address = self._find_address()

    def load(self, splits: Sequence[Split]) -> LoadedPart:
        found = self.find(splits)
        if missing := [split for split in splits if split not in found]:
            with self._turn() as building:
                found |= self.find(missing)
                for split in splits:
                    if split not in found:
                        found[split] = self._make(split, building)
        shape, rules, renderer = self._settings()
        return LoadedPart(
            source=self._source,
            shape=shape,
            rules=rules,
            renderer=renderer,
            splits=found,
            notices=tuple(dict.fromkeys(self._notices)),
        )

    def find(self, splits: Sequence[Split]) -> dict[Split, Prepared]:
        """Those that are in the cache, whole and made as they would be now."""
        found: dict[Split, Prepared] = {}
        if self._address is None:
            return found
        for split in splits:
            try:
                entry = self._cache.find(self._address, split)
            except Damaged as error:
                self._notices.append(f"A damaged entry of the data cache is made anew: {error}.")
                continue
            if entry is None:
                continue
            prepared, shape, rendering = entry
            if rendering == rendering_of(shape, self._rules(shape)):
                found[split] = prepared
                self._shape = shape
        return found

    def _settings(self) -> tuple[Shape, Rules, Renderer]:
        """Shape, rules and renderer; the records need not be here."""
        shape = self._part.shape if self._part is not None else self._shape
        assert shape is not None
        rules = self._rules(shape)
        if rules.overlong == "split" and shape != "text":
            raise UserError(
                f"data.overlong is split, but the records of {self._source.name} are of the shape "
                f"{shape}, and only texts are cut into several samples.\n"
                "Try --data.overlong truncate, or --data.overlong drop."
            )
        part = Part(name=self._source.name, shape=shape, rules=rules, train=(), val=())
        return shape, rules, make_renderer(part, self._tokenizer)

    def _rules(self, shape: Shape) -> Rules:
        if self._part is not None:
            return self._part.rules
        assert self._source.content is not None
        return self._source.content.rules(shape)

    def _read(self) -> Part:
        if self._part is None:
            self._part = self._source.read()
        return self._part

    def _find_address(self) -> str | None:
        """None: its files cannot be read, as those who read the records will say."""
        content = self._source.content
        if content is None:
            return address_of_records(self._read(), self._tokenizer, self._max_seq_length)
        try:
            return address_of_content(content, self._tokenizer, self._max_seq_length)
        except OSError:
            return None

    def _stamp(self) -> list[tuple[int, int, int]] | None:
        """What changes with the files."""
        if self._source.content is None:
            return None
        with contextlib.suppress(OSError):
            stats = [file.stat() for file in self._source.content.files()]
            return [(stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats]
        return None

    @contextlib.contextmanager
    def _turn(self) -> Iterator[Building | None]:
        """Wait until no other process makes these samples; without a cache, all make them."""
        with contextlib.ExitStack() as stack:
            building = None
            if self._address is not None:
                turn = self._cache.building(self._address, self._progress)
                try:
                    building = stack.enter_context(turn)
                except (OSError, NotImplementedError) as error:
                    self._warn_of(error)
            yield building

    def _make(self, split: Split, building: Building | None) -> Prepared:
        part = self._read()
        shape, rules, renderer = self._settings()

        def progress(done: int, total: int) -> None:
            self._progress(split, done, total)
            if building is not None:
                building.tell(split, done, total)

        records = part.train if split == "train" else part.val
        prepared = prepare(records, renderer, self._max_seq_length, rules.overlong, progress)
        # A file that was written to while it was read has another address now.
        if self._address is None or building is None or self._stamp() != self._stamps:
            return prepared
        try:
            rendering = rendering_of(shape, rules)
            return self._cache.keep(self._address, split, prepared, shape, rendering)
        except OSError as error:
            self._warn_of(error)
            return prepared

    def _warn_of(self, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        self._notices.append(
            f"The data cache {cache_directory()} cannot be written ({os.fspath(reason)}): every "
            "process of every run tokenises the data for itself. Set FTKIT_CACHE_DIR to a "
            "directory that can."
        )
