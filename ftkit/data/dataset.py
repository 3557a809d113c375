"""Data sets: the sources of a recipe's data, tokenised or taken from the cache, in one order."""

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import numpy as np
import numpy.typing as npt

from ftkit.data.cache import (
    Building,
    CacheEntry,
    DamagedEntry,
    OutdatedEntry,
    SampleCache,
    address_of_content,
    address_of_records,
    cache_directory,
    directory_of,
    rendering_of,
)
from ftkit.data.prepare import (
    NO_LABELS,
    Counts,
    Prepared,
    advice_for,
    make_renderer,
    prepare_records,
)
from ftkit.data.records.shape_rows import shape_row
from ftkit.data.rendering import NO_OUTPUT, Example, Renderer
from ftkit.data.samples.sample_set import JoinedSamples, Samples, interleave
from ftkit.data.samples.sampler import EpochOrder
from ftkit.data.sources import data_source, validation_sets
from ftkit.data.spec import DataSource, Part, PartSource
from ftkit.errors import UserError
from ftkit.models.chat_templates.prompt_styles import AnyStyle
from ftkit.recipe.objectives import Preference
from ftkit.recipe.recipe import Component
from ftkit.utils.registry import imported

if TYPE_CHECKING:
    from ftkit.data.samples.stream import Stream
    from ftkit.models.pretrained.tokenizer import Tokenizer

Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = get_args(Split)
OnSplitProgress = Callable[[str, int, int], None]
"""Called with the split that is tokenised, records done, and records in all."""


@dataclass(frozen=True, kw_only=True)
class LoadedPart:
    """A part of a data set, tokenised."""

    source: PartSource
    part: Part
    """Without its records."""
    renderer: Renderer
    """Renderer that made the samples."""
    splits: dict[Split, Prepared]
    """Samples by split; only the requested splits."""
    notices: tuple[str, ...]
    """Warnings about the cache."""


def _load_part(
    source: PartSource,
    tokenizer: "Tokenizer",
    max_seq_length: int,
    splits: Sequence[Split],
    progress: OnSplitProgress,
) -> LoadedPart:
    """Take the samples of a part from the cache, or make them and keep them there."""
    if source.load is not None:
        made: LoadedPart = source.load(tokenizer, max_seq_length, progress)
        return made
    return _Loading(source, tokenizer, max_seq_length, progress).load(splits)


def find_part(
    source: PartSource, tokenizer: "Tokenizer", max_seq_length: int, splits: Sequence[Split]
) -> dict[Split, Prepared] | None:
    """The samples of a part if they are all in the cache, or it makes them itself of its files."""
    if source.load is not None:
        made: LoadedPart = source.load(tokenizer, max_seq_length, lambda *_: None)
        return made.splits
    if source.content is None:
        return None
    found = _Loading(source, tokenizer, max_seq_length, lambda *_: None).find(splits)
    return found if len(found) == len(splits) else None


class _Loading:
    """State of loading one part."""

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
        """The part as it was read, with its records."""
        self._known: Part | None = None
        """Without its records."""
        self._notices: list[str] = []
        self._folder = ""
        """Of the files of its records, where these are known; paths of media begin there."""
        self._read_at_ns = 0
        self._stamps = self._stamp()
        self._address = self._find_address()

    def load(self, splits: Sequence[Split]) -> LoadedPart:
        found = self.find(splits)
        if missing := [split for split in splits if split not in found]:
            # All ranks of all runs come here at once: one makes the samples, the others map its
            # files.
            with self._turn() as building:
                # Another process may have made them while this one waited for the lock.
                found |= self.find(missing)
                for split in splits:
                    if split not in found:
                        found[split] = self._make(split, building)
        assert self._known is not None
        renderer = make_renderer(self._known, self._tokenizer)
        for prepared in found.values():
            prepared.samples.media_reader = renderer.media_reader
        return LoadedPart(
            source=self._source,
            part=self._known,
            renderer=renderer,
            splits=found,
            notices=tuple(dict.fromkeys(self._notices)),
        )

    def find(self, splits: Sequence[Split]) -> dict[Split, Prepared]:
        """Return the splits that are in the cache, undamaged and rendered as they would be now."""
        found: dict[Split, Prepared] = {}
        if self._address is None:
            return found
        for split in splits:
            try:
                entry = self._cache.find(
                    self._address, split, self._source.name, self._prompt_style, self._folder
                )
            except DamagedEntry as error:
                self._notices.append(f"A damaged entry of the data cache is rebuilt: {error}.")
                continue
            except OutdatedEntry as error:
                self._notices.append(
                    f"Samples are made anew: {error} has changed since they were made of it."
                )
                continue
            # The address has the name of a template, not its text, which may have changed since.
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
            self._read_at_ns = time.time_ns()
            self._part = self._source.read()
            self._known = dataclasses.replace(self._part, train=(), val=(), bad={})
        return self._part

    def _find_address(self) -> str | None:
        """Return the address in the cache; None: files are unreadable, which reading reports."""
        content = self._source.content
        if content is None:
            return address_of_records(self._read(), self._tokenizer, self._max_seq_length)
        try:
            self._folder = directory_of(content)
            return address_of_content(content, self._tokenizer, self._max_seq_length)
        except OSError:
            return None

    def _stamp(self) -> list[tuple[int, int, int]] | None:
        """Return inode, time and size of every file, which change when it is written to."""
        if self._source.content is None:
            return None
        with contextlib.suppress(OSError):
            groups = self._source.content.files()
            stats = [file.stat() for files in groups for file in files]
            return [(stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats]
        return None

    @contextlib.contextmanager
    def _turn(self) -> Iterator[Building | None]:
        """Hold the lock of these samples, if the cache can be written."""
        with contextlib.ExitStack() as stack:
            building = None
            if self._address is not None:
                turn = self._cache.building(self._address, self._progress)
                try:
                    building = stack.enter_context(turn)
                # NotImplementedError: filelock 3.16 raises it on file systems without flock.
                except (OSError, NotImplementedError) as error:
                    self._warn_unwritable(error)
            yield building

    def _make(self, split: Split, building: Building | None) -> Prepared:
        part = self._read()
        assert self._known is not None

        def progress(done: int, total: int) -> None:
            self._progress(split, done, total)
            if building is not None:
                building.report(split, done, total)

        records = part.train if split == "train" else part.val
        renderer = make_renderer(part, self._tokenizer)
        prepared = prepare_records(
            records,
            renderer,
            self._max_seq_length,
            part.rules.overlong,
            progress,
            part.rules.min_tokens,
            part.bad.get(split, ()),
            part.media_files,
        )
        if prepared.bad.count and not part.skips_bad:
            raise prepared.bad.refusal(len(records), may_skip=prepared.counts.used > 0)
        # A file that was written to while it was read has another address now.
        if self._address is None or building is None or self._stamp() != self._stamps:
            return prepared
        try:
            rendering = rendering_of(self._known, self._tokenizer)
            entry = CacheEntry(prepared=prepared, part=self._known, rendering=rendering)
            return self._cache.keep(self._address, split, entry, self._folder, self._read_at_ns)
        except OSError as error:
            self._warn_unwritable(error)
            return prepared

    def _warn_unwritable(self, error: Exception) -> None:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        self._notices.append(
            f"The data cache {cache_directory()} cannot be written ({os.fspath(reason)}): every "
            "process of every run tokenises the data for itself. Set FTKIT_CACHE_DIR to a "
            "directory that can."
        )


class Questions(Sequence[Example]):
    """Validation records as questions with answers, each rendered when it is accessed."""

    def __init__(self, parts: Sequence[LoadedPart]) -> None:
        """Interleave the questions of all parts evenly."""
        self._parts = parts
        sizes = [len(part.splits["val"].records) for part in self._parts]
        self._of_parts, self._places = interleave(sizes)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> list[Example]: ...
    def __getitem__(self, index: int | slice) -> Example | list[Example]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        part = self._parts[self._of_parts[index]]
        return part.renderer.example(part.splits["val"].records[int(self._places[index])])


@dataclass(frozen=True, kw_only=True)
class _Loaded:
    """The sources of a data set."""

    parts: tuple[LoadedPart, ...]
    """One part per source."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the sources."""
        return tuple(part.source.name for part in self.parts)

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sample of all splits; 0: there are none."""
        samples = [one.samples for part in self.parts for one in part.splits.values()]
        # + 1: lengths count inputs, which are all tokens but the last.
        return max((int(one.longest.max()) + 1 for one in samples if len(one)), default=0)

    @cached_property
    def questions(self) -> Questions:
        """Validation records as prompts with expected answers."""
        return Questions(self.parts)


@dataclass(frozen=True, kw_only=True)
class DataSets(_Loaded):
    """The data of a recipe, tokenised."""

    takes: tuple[int, ...]
    """Training samples that an epoch takes of each source."""
    train: Samples
    """Training samples of all sources, one source after another."""
    val: Samples
    """Validation samples, interleaved so that the first ones have the same share of each source."""
    stream: "Stream | None" = None
    """What is trained on, where an epoch has no known length: `train` is then of its first
    records. None: `train` is."""

    @property
    def samples_per_epoch(self) -> int:
        """Training samples that an epoch takes; 0: nobody knows."""
        return 0 if self.stream is not None else sum(self.takes)

    @property
    def longest_tokens(self) -> int:
        return super().longest_tokens if self.stream is None else self.stream.most_tokens

    @property
    def counts(self) -> dict[Split, Counts]:
        """Counts of records and samples by split, summed over the sources."""
        return {split: _counts(self.parts, split) for split in SPLITS}

    @property
    def prompt_source(self) -> LoadedPart:
        """First source of the shape that shows best how to prompt the result."""
        return min(self.parts, key=lambda part: shape_row(part.part.shape).prompts)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end what is learned."""
        return frozenset().union(*(part.renderer.stop_ids for part in self.parts))

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the samples and of how many an epoch takes, whatever their files."""
        train = [part.splits["train"].samples for part in self.parts]
        if self.stream is not None:
            # Of the first records too, which say what the tokenizer makes of texts.
            texts = [self.stream.fingerprint, *(one.fingerprint for one in train)]
            return hashlib.sha256(json.dumps(texts).encode()).hexdigest()
        # As it was before there were several sources: checkpoints of earlier versions have this
        # one.
        if len(train) == 1 and self.takes == (len(train[0]),):
            return train[0].fingerprint
        of_sources = [(one.fingerprint, take) for one, take in zip(train, self.takes, strict=True)]
        return hashlib.sha256(json.dumps(of_sources).encode()).hexdigest()

    @property
    def repetitions(self) -> npt.NDArray[np.float64]:
        """[training samples], how often an epoch takes each, in the mean."""
        if self.stream is not None:
            return np.ones(len(self.train))
        sizes = self._sizes
        return np.repeat(np.array(self.takes) / np.maximum(sizes, 1), sizes)

    def passes(self, samples: int) -> float:
        """Passes over the training data in so many samples of the run, the newest of them made."""
        if self.stream is not None:
            return self.stream.epochs(samples)
        return samples / self.samples_per_epoch

    def epochs(self, seed: int) -> EpochOrder:
        """Return the order of the training samples."""
        in_order = any(part.source.in_order for part in self.parts)
        return EpochOrder(self._sizes, self.takes, seed, in_order=in_order)

    @property
    def _sizes(self) -> list[int]:
        return [len(part.splits["train"].samples) for part in self.parts]


@dataclass(frozen=True, kw_only=True)
class ValidationSets(_Loaded):
    """The sets of eval.sets; each is the part of its name."""

    def samples(self, most: int) -> Samples:
        """Concatenate the first samples of each set, at most `most` of each."""
        sets = [part.splits["val"].samples for part in self.parts]
        return JoinedSamples.one_after_another(sets, most=most)


@dataclass(frozen=True, kw_only=True)
class HeldOut(_Loaded):
    """The validation records of a data set, to evaluate on."""

    samples: Samples
    """Validation samples, interleaved so that the first ones have the same share of each source."""


def load_data(
    data: Component,
    tokenizer: "Tokenizer",
    max_seq_length: int,
    *,
    preference: Preference | None = None,
    progress: OnSplitProgress | None = None,
) -> DataSets:
    """Read, and if necessary download, a data set and tokenise it; or take it from the cache.

    Ids and labels of instruction records are those of litgpt.data.SFTDataset. Records without an
    answer, or whose answer lies behind max_seq_length, are left out and counted.

    Args:
        data: the recipe's data.
        tokenizer: of the base model.
        max_seq_length: most tokens of a sample; `overlong` of the data applies to longer ones.
        preference: how records say which answers are better; None: they do not.
        progress: called at least every 1000 records, where they are tokenised.

    Raises:
        UserError: the data cannot be read, are not what they should be, or no sample is left.
    """
    source = data_source(data, preference=preference)
    parts = _load(source, tokenizer, max_seq_length, SPLITS, progress)
    for part in parts:
        # All records of a source may be equal to those of others: then it has none.
        if part.splits["train"].counts.records or len(parts) == 1:
            _require_samples([part], "train", tokenizer, max_seq_length)
    _require_samples(parts, "val", tokenizer, max_seq_length)
    train = [part.splits["train"].samples for part in parts]
    several = len(parts) > 1
    stream: Stream | None = None
    if source.stream_place:
        opened: Stream = imported(source.stream_place)(source, tokenizer, max_seq_length)
        stream, train = opened, [opened.as_trained(one) for one in train]
    return DataSets(
        parts=parts,
        takes=tuple(_take(part.source, len(part.splits["train"].samples)) for part in parts),
        train=JoinedSamples.one_after_another(train) if several else train[0],
        val=_interleaved(parts),
        stream=stream,
    )


def load_held_out(
    data: Component,
    tokenizer: "Tokenizer",
    max_seq_length: int,
    *,
    given: Collection[str] = (),
    preference: Preference | None = None,
    progress: OnSplitProgress | None = None,
) -> HeldOut:
    """The validation part of what `load_data` gives.

    Args:
        data: the recipe's data.
        tokenizer: of the base model.
        max_seq_length: no sample has more tokens.
        given: the options of the data that were named for this alone.
        preference: how records say which answers are better; None: they do not.
        progress: called at least every 1000 records, where they are tokenised.

    Raises:
        UserError: the data cannot be read, are not what they should be, or no sample is left.
    """
    source = data_source(data, preference=preference).for_evaluation(given)
    parts = _load(source, tokenizer, max_seq_length, ("val",), progress)
    _require_samples(parts, "val", tokenizer, max_seq_length)
    return HeldOut(parts=parts, samples=_interleaved(parts))


def load_sets(
    data: Component,
    sets: Mapping[str, Any] | None,
    tokenizer: "Tokenizer",
    max_seq_length: int,
    *,
    preference: Preference | None = None,
    progress: OnSplitProgress | None = None,
) -> ValidationSets:
    """The records of eval.sets, tokenised as `load_data` does.

    Args:
        data: the recipe's data.
        sets: as the recipe has them.
        tokenizer: of the base model.
        max_seq_length: no sample has more tokens.
        preference: how records say which answers are better; None: they do not.
        progress: called at least every 1000 records, where they are tokenised.

    Raises:
        UserError: a set cannot be read, is not what it should be, or has no sample left.
    """
    parts: list[LoadedPart] = []
    for name, source in validation_sets(data, sets, preference=preference).items():
        of_set = _load(source, tokenizer, max_seq_length, ("val",), progress)
        _require_samples(of_set, "val", tokenizer, max_seq_length, f"eval.sets.{name}")
        parts += of_set
    return ValidationSets(parts=tuple(parts))


def _load(
    source: DataSource,
    tokenizer: "Tokenizer",
    max_seq_length: int,
    splits: Sequence[Split],
    progress: OnSplitProgress | None,
) -> tuple[LoadedPart, ...]:
    assert max_seq_length > 0
    progress = progress or (lambda *_: None)
    source.files()  # a missing file is named first
    _check_tokenizer(tokenizer)
    parts = source.parts()
    loaded = tuple(_load_part(part, tokenizer, max_seq_length, splits, progress) for part in parts)
    for part in loaded:
        # A generator: the tokens are looked through only if the tokenizer has such ids.
        of_splits = (prepared.samples.arrays.tokens for prepared in part.splits.values())
        largest = (int(np.max(tokens, initial=-1)) for tokens in of_splits)
        tokenizer.require_embedded(largest, f"A sample of {part.source.where}")
    return loaded


def _interleaved(parts: Sequence[LoadedPart]) -> Samples:
    val = [part.splits["val"].samples for part in parts]
    return JoinedSamples.interleaved(val) if len(val) > 1 else val[0]


def _take(source: PartSource, size: int) -> int:
    """Training samples that an epoch takes of a source."""
    if not size:
        if source.samples is None:
            return 0
        raise UserError(
            f"data.sources: samples of {source.name} is {source.samples}, but data.drop_equal is "
            "true, and all its records are equal to those of earlier sources.\n"
            "Remove the source, or set data.drop_equal to false."
        )
    if source.samples is not None:
        return source.samples
    take = size if source.weight is None else round(source.weight * size)
    if take < 1:
        raise UserError(
            f"data.sources: the weight of {source.name} is {source.weight}, which selects none of "
            f"its {size:,} samples in an epoch.\n"
            "Try samples: 1 in place of the weight, or remove the source."
        )
    return take


def _counts(parts: Sequence[LoadedPart], split: Split) -> Counts:
    return sum((part.splits[split].counts for part in parts), Counts())


def _check_tokenizer(tokenizer: "Tokenizer") -> None:
    needed = {"eos_token": tokenizer.eos_id, "bos_token": tokenizer.bos_id}
    if not tokenizer.use_bos:
        del needed["bos_token"]
    for key, token_id in needed.items():
        if token_id is None:
            raise UserError(
                f"checkpoint_dir is a copy of {tokenizer.model_name} whose tokenizer names no "
                f"{key}, but samples need one.\nAdd {key} to its tokenizer_config.json."
            )


def _require_samples(
    parts: Sequence[LoadedPart],
    split: Split,
    tokenizer: "Tokenizer",
    max_seq_length: int,
    key: str = "data",
) -> None:
    """Refuse data that leave no sample."""
    counts = _counts(parts, split)
    if counts.samples:
        return
    what = {"train": "train on", "val": "validate on"}[split]
    words = {
        NO_OUTPUT: "have no output",
        NO_LABELS: f"have none within train.max_seq_length, which is {max_seq_length}",
    }
    reasons = [
        f"{count:,} {words.get(reason, f'are left out ({reason})')}"
        for reason, count in counts.reasons.items()
    ]
    most = max(counts.reasons, key=lambda reason: counts.reasons[reason], default=NO_OUTPUT)
    if counts.dropped:
        reasons.append(
            f"{counts.dropped:,} are longer than train.max_seq_length, which is {max_seq_length}, "
            "and data.overlong drops them"
        )
    if counts.short:
        reasons.append(f"{counts.short:,} have fewer tokens than data.min_tokens")
    if counts.short > max(counts.dropped, counts.reasons.get(most, 0)):
        longest = min(counts.longest_tokens, max_seq_length)
        advice = f"Try --data.min_tokens {longest} or less."
    elif counts.dropped > counts.reasons.get(most, 0):
        longest = counts.longest_tokens
        advice = f"Try --train.max_seq_length {longest}, or --data.overlong truncate."
    elif most == NO_LABELS:
        lengths = [part.splits[split].sufficient_length for part in parts]
        # The length with which at least one record has a label.
        sufficient = min(length for length in lengths if length is not None)
        advice = f"Try --train.max_seq_length {sufficient} or more."
    else:
        part = max(parts, key=lambda one: one.splits[split].counts.reasons.get(most, 0))
        kept = part.splits[split].kept.get(most, [])
        advice = advice_for(most, kept, part.part, tokenizer)
    raise UserError(
        f"{key} leaves nothing to {what}: of {counts.records:,} records, "
        f"{', '.join(reasons) or 'there are none'}.\n"
        f"{advice}"
    )
