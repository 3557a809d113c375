"""Data sets: what a recipe's data become, source by source and in one order."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from ftkit.data.advice import advice_for
from ftkit.data.parts import SPLITS, LoadedPart, OnSplitProgress, Split, load_part
from ftkit.data.prepare import NO_LABELS, Counts
from ftkit.data.rendering.renderer import NO_OUTPUT, Example
from ftkit.data.samples.sample_set import JoinedSamples, Samples, interleave
from ftkit.data.samples.sampler import EpochOrder
from ftkit.data.sources import data_source, validation_sets
from ftkit.data.spec import DataSource, PartSource
from ftkit.errors import UserError
from ftkit.recipe.recipe import Component

if TYPE_CHECKING:
    from ftkit.models.pretrained.tokenizer import Tokenizer


class Questions(Sequence[Example]):
    """Validation records as questions with their answers; each is made when it is asked for."""

    def __init__(self, parts: Sequence[LoadedPart]) -> None:
        """Those of all parts, spread evenly."""
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
    """One of each source."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the sources."""
        return tuple(part.source.name for part in self.parts)

    @property
    def longest_tokens(self) -> int:
        """Of the longest sample, to train on or to validate on; 0: there is none."""
        samples = [one.samples for part in self.parts for one in part.splits.values()]
        return max((int(one.lengths.max()) + 1 for one in samples if len(one)), default=0)

    @cached_property
    def questions(self) -> Questions:
        """The validation records, to be answered."""
        return Questions(self.parts)


@dataclass(frozen=True, kw_only=True)
class DataSets(_Loaded):
    """What a recipe's data became."""

    takes: tuple[int, ...]
    """Training samples that an epoch takes of each source."""
    train: Samples
    """Of all sources, one after another."""
    val: Samples
    """Of all sources, so that the first few hold as large a share of each."""

    @property
    def samples_per_epoch(self) -> int:
        """Training samples that an epoch takes."""
        return sum(self.takes)

    @property
    def counts(self) -> dict[Split, Counts]:
        """What became of the records of each split."""
        return {split: _counts(self.parts, split) for split in SPLITS}

    @property
    def asked(self) -> LoadedPart:
        """The first source of those that say most about how a result is asked."""
        shapes = ("messages", "instruction", "completion", "text")
        return min(self.parts, key=lambda part: shapes.index(part.part.shape))

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end what is learned."""
        return frozenset().union(*(part.renderer.stop_ids for part in self.parts))

    @property
    def fingerprint(self) -> str:
        """The same wherever the data came from: of what an epoch takes, and of what."""
        train = [part.splits["train"].samples for part in self.parts]
        if len(train) == 1 and self.takes == (len(train[0]),):
            return train[0].fingerprint
        of_sources = [(one.fingerprint, take) for one, take in zip(train, self.takes, strict=True)]
        return hashlib.sha256(json.dumps(of_sources).encode()).hexdigest()

    @property
    def repetitions(self) -> npt.NDArray[np.float64]:
        """[training samples], how often an epoch takes each, in the mean."""
        sizes = self._sizes
        return np.repeat(np.array(self.takes) / np.array(sizes), sizes)

    def epochs(self, seed: int) -> EpochOrder:
        """The order of the training samples."""
        return EpochOrder(self._sizes, self.takes, seed)

    @property
    def _sizes(self) -> list[int]:
        return [len(part.splits["train"].samples) for part in self.parts]


@dataclass(frozen=True, kw_only=True)
class ValidationSets(_Loaded):
    """The sets of eval.sets; each is the part of its name."""

    def samples(self, most: int) -> Samples:
        """Of all sets, one after another: up to `most` of each, the first ones."""
        sets = [part.splits["val"].samples for part in self.parts]
        return JoinedSamples.one_after_another(sets, most=most)


@dataclass(frozen=True, kw_only=True)
class HeldOut(_Loaded):
    """The validation records of a data set, to evaluate on."""

    samples: Samples
    """Of all sources, so that the first few hold as large a share of each."""


def load_data(
    data: Component,
    tokenizer: "Tokenizer",
    max_seq_length: int,
    *,
    progress: OnSplitProgress | None = None,
) -> DataSets:
    """Read, and if necessary download, a data set and tokenise it; or take it from the cache.

    Ids and labels of instruction records are those of litgpt.data.SFTDataset. Records without an
    answer, or whose answer lies behind max_seq_length, are left out and counted.

    Args:
        data: the recipe's data.
        tokenizer: of the base model.
        max_seq_length: no sample has more tokens; the data say what becomes of those that have.
        progress: called at least every 1000 records, where they are tokenised.

    Raises:
        UserError: the data cannot be had, are not what they should be, or no sample is left.
    """
    source = data_source(data)
    parts = _load(source, tokenizer, max_seq_length, SPLITS, progress)
    for part in parts:
        _require_samples([part], "train", tokenizer, max_seq_length)
    _require_samples(parts, "val", tokenizer, max_seq_length)
    train = [part.splits["train"].samples for part in parts]
    several = len(parts) > 1
    return DataSets(
        parts=parts,
        takes=tuple(_take(part.source, len(part.splits["train"].samples)) for part in parts),
        train=JoinedSamples.one_after_another(train) if several else train[0],
        val=_interleaved(parts),
    )


def load_held_out(
    data: Component,
    tokenizer: "Tokenizer",
    max_seq_length: int,
    *,
    given: Collection[str] = (),
    progress: OnSplitProgress | None = None,
) -> HeldOut:
    """The validation part of what `load_data` gives.

    Args:
        data: the recipe's data.
        tokenizer: of the base model.
        max_seq_length: no sample has more tokens.
        given: the options of the data that were named for this alone.
        progress: called at least every 1000 records, where they are tokenised.

    Raises:
        UserError: the data cannot be had, are not what they should be, or no sample is left.
    """
    source = data_source(data).for_evaluation(given)
    parts = _load(source, tokenizer, max_seq_length, ("val",), progress)
    _require_samples(parts, "val", tokenizer, max_seq_length)
    return HeldOut(parts=parts, samples=_interleaved(parts))


def load_sets(
    data: Component,
    sets: Mapping[str, Any] | None,
    tokenizer: "Tokenizer",
    max_seq_length: int,
    *,
    progress: OnSplitProgress | None = None,
) -> ValidationSets:
    """The records of eval.sets, tokenised as `load_data` does.

    Args:
        data: the recipe's data.
        sets: as the recipe has them.
        tokenizer: of the base model.
        max_seq_length: no sample has more tokens.
        progress: called at least every 1000 records, where they are tokenised.

    Raises:
        UserError: a set cannot be had, is not what it should be, or has no sample left.
    """
    parts: list[LoadedPart] = []
    for name, source in validation_sets(data, sets).items():
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
    return tuple(load_part(part, tokenizer, max_seq_length, splits, progress) for part in parts)


def _interleaved(parts: Sequence[LoadedPart]) -> Samples:
    val = [part.splits["val"].samples for part in parts]
    return JoinedSamples.interleaved(val) if len(val) > 1 else val[0]


def _take(source: PartSource, size: int) -> int:
    """Training samples that an epoch takes of a source."""
    if source.samples is not None:
        return source.samples
    take = size if source.weight is None else round(source.weight * size)
    if take < 1:
        raise UserError(
            f"data.sources: the weight of {source.name} is {source.weight}, which takes none of "
            f"its {size:,} samples in an epoch.\nTry samples: 1 in place of the weight, or remove "
            "the source."
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
    """Refuse data of which nothing is left."""
    counts = _counts(parts, split)
    if counts.samples:
        return
    what = {"train": "train on", "val": "validate on"}[split]
    words = {
        NO_OUTPUT: "have no output",
        NO_LABELS: f"have none within train.max_seq_length, which is {max_seq_length}",
    }
    told = [
        f"{count:,} {words.get(reason, f'are left out ({reason})')}"
        for reason, count in counts.reasons.items()
    ]
    most = max(counts.reasons, key=lambda reason: counts.reasons[reason], default=NO_OUTPUT)
    if counts.dropped:
        told.append(
            f"{counts.dropped:,} are longer than train.max_seq_length, which is {max_seq_length}, "
            "and data.overlong drops them"
        )
    if counts.dropped > counts.reasons.get(most, 0):
        longest = counts.longest_tokens
        advice = f"Try --train.max_seq_length {longest}, or --data.overlong truncate."
    elif most == NO_LABELS:
        lengths = [part.splits[split].sufficient_length for part in parts]
        sufficient = min(length for length in lengths if length is not None)
        advice = f"Try --train.max_seq_length {sufficient} or more."
    else:
        part = max(parts, key=lambda one: one.splits[split].counts.reasons.get(most, 0))
        kept = part.splits[split].kept.get(most, [])
        advice = advice_for(most, kept, part.part, tokenizer)
    raise UserError(
        f"{key} leaves nothing to {what}: of {counts.records:,} records, "
        f"{', '.join(told) or 'none is there'}.\n{advice}"
    )
