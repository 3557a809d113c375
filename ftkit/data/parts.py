"""Parts of a data set, tokenised: from the cache, or from their records."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from ftkit.data.cache import (
    Building,
    CacheEntry,
    Damaged,
    SampleCache,
    address_of_content,
    address_of_records,
    cache_directory,
    rendering_of,
)
from ftkit.data.prepare import Prepared, prepare_records
from ftkit.data.renderers import make_renderer
from ftkit.data.rendering.renderer import Renderer
from ftkit.data.spec import Part, PartSource
from ftkit.models.chat_templates.prompt_styles import AnyStyle

if TYPE_CHECKING:
    from ftkit.models.pretrained.tokenizer import Tokenizer


Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = get_args(Split)
OnSplitProgress = Callable[[str, int, int], None]
"""Called with what is being tokenised, records done, and records in all."""


@dataclass(frozen=True, kw_only=True)
class LoadedPart:
    """One part of a data set, tokenised."""

    source: PartSource
    part: Part
    """Without its records."""
    renderer: Renderer
    """Made the samples."""
    splits: dict[Split, Prepared]
    """Those that were asked for."""
    notices: tuple[str, ...]
    """What a person should know about the cache."""


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
    found = _Loading(source, tokenizer, max_seq_length, lambda *_: None).find(splits)
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
        """As it was read."""
        self._known: Part | None = None
        """Without its records."""
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
        assert self._known is not None
        return LoadedPart(
            source=self._source,
            part=self._known,
            renderer=make_renderer(self._known, self._tokenizer),
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
                entry = self._cache.find(
                    self._address, split, self._source.name, self._prompt_style
                )
            except Damaged as error:
                self._notices.append(f"A damaged entry of the data cache is made anew: {error}.")
                continue
            if entry and entry.rendering == rendering_of(entry.part, self._tokenizer):
                found[split] = entry.prepared
                if self._part is None:  # the same records may have been written otherwise
                    self._known = entry.part
        return found

    def _prompt_style(self) -> AnyStyle | None:
        if self._source.content is not None:
            return self._source.content.prompt_style()
        return self._read().rules.prompt_style

    def _read(self) -> Part:
        if self._part is None:
            self._part = self._source.read()
            self._known = dataclasses.replace(self._part, train=(), val=())
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
            groups = self._source.content.files()
            stats = [file.stat() for files in groups for file in files]
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
                # filelock 3.16 raises the second where a file system has no flock.
                except (OSError, NotImplementedError) as error:
                    self._warn_of(error)
            yield building

    def _make(self, split: Split, building: Building | None) -> Prepared:
        part = self._read()
        assert self._known is not None

        def progress(done: int, total: int) -> None:
            self._progress(split, done, total)
            if building is not None:
                building.tell(split, done, total)

        records = part.train if split == "train" else part.val
        renderer = make_renderer(part, self._tokenizer)
        overlong = part.rules.overlong
        prepared = prepare_records(records, renderer, self._max_seq_length, overlong, progress)
        # A file that was written to while it was read has another address now.
        if self._address is None or building is None or self._stamp() != self._stamps:
            return prepared
        try:
            rendering = rendering_of(self._known, self._tokenizer)
            entry = CacheEntry(prepared=prepared, part=self._known, rendering=rendering)
            return self._cache.keep(self._address, split, entry)
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
