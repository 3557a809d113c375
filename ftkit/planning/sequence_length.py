"""Sequence lengths of a run, as far as they are known before it starts.

The longest sample decides how much memory a step needs. It is searched for with as little
tokenising as possible.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ftkit.data.dataset import SPLITS, Split, find_part
from ftkit.data.prepare import Prepared, fit, make_renderer
from ftkit.data.records.media import media_row
from ftkit.data.records.record import Record, has_weights
from ftkit.data.rendering import Renderer
from ftkit.data.samples.sample_set import Samples
from ftkit.data.sources import data_source, validation_sets
from ftkit.data.spec import DataSource, Overlong, Part
from ftkit.errors import UserError
from ftkit.models.chat_templates.template import OF_TOKENIZER
from ftkit.models.pretrained.base_model import BaseModel
from ftkit.models.pretrained.model_files import has_tokenizer
from ftkit.models.pretrained.tokenizer import Tokenizer
from ftkit.planning.media import heaviest_media, heaviest_of, size_of
from ftkit.recipe.objectives import Preference
from ftkit.recipe.plugin import plugin_in_use
from ftkit.recipe.recipe import Component
from ftkit.strategies.step_memory import MediaSize

_BESIDE_TEXT = 8
"""Tokens of a sample that no byte of its text stands for, at most: special ones at both ends of
prompt and answer, and the space that some tokenizers put before each."""
MOST_BYTES = 16 * 2**20
"""Bytes of text that are tokenised at most: a few seconds on one core."""
# Samples between two looks at whether longer ones can follow.
_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class Longest:
    """Length of the longest sample that can be trained on."""

    at_most: int
    """Tokens that no sample exceeds; of a large data set, most likely."""
    at_least: int = 0
    """Tokens of the longest sample that was tokenised; 0: none was."""
    label_tokens: int = 0
    """Number of its tokens that carry loss."""
    is_exact: bool = False
    """Whether this sample is the longest of all."""
    weighted: bool = False
    """Whether some sample has tokens with a weight other than 1."""
    media: MediaSize | None = None
    """Media of the sample that costs most to encode; None: there are none, or not known."""


def _longest_of(samples: Samples) -> Longest | None:
    """The longest of samples that are here; None: there are none."""
    if not len(samples):
        return None
    index = int(samples.longest.argmax())
    tokens = int(samples.longest[index]) + 1
    labels = int(samples.label_counts[index])
    return Longest(
        at_most=tokens,
        at_least=tokens,
        label_tokens=labels,
        is_exact=True,
        weighted=samples.label_weights is not None,
        media=heaviest_media((samples,)),
    )


def _longest_in_all(found: Iterable[Longest | None]) -> Longest | None:
    """The longest sample of several sources; None: they make none."""
    known = [longest for longest in found if longest is not None]
    if not known:
        return None
    longest = max(known, key=lambda one: one.at_least)
    return dataclasses.replace(
        longest,
        at_most=max(one.at_most for one in known),
        is_exact=all(one.is_exact for one in known),
        weighted=any(one.weighted for one in known),
        media=heaviest_of(one.media for one in known),
    )


def longest_sample(
    records: Sequence[Record],
    renderer: Renderer,
    *,
    max_seq_length: int,
    overlong: Overlong = "truncate",
    by_bytes: bool = False,
) -> Longest | None:
    """The longest sample among records, as `load_data` would make them; None: it would make none.

    A token stands for at least one byte. So samples are tokenised from the largest down, until the
    next one has fewer bytes than the longest has tokens.

    Args:
        records: of the data set, or of a part of it.
        renderer: makes samples of them.
        max_seq_length: no sample has more tokens.
        overlong: handling of longer samples.
        by_bytes: there is no tokenizer here, and bytes are all that is known.
    """
    # Bytes, because byte-level tokenizers make up to one token of each.
    found = [(record, *renderer.size(record)) for record in records]
    answered = [(record, costs) for record, size, costs in found if size]
    if not answered:
        return None
    sizes = np.array([size for _, size, _ in found if size])
    by_size_desc = np.argsort(-sizes, kind="stable")
    largest = int(sizes[by_size_desc[0]])
    if by_bytes:
        return Longest(at_most=min(largest + _BESIDE_TEXT, max_seq_length))
    weighted = any(has_weights(record) for record, _ in answered)
    seeing = [one for one in answered if one[1]]
    # That with most media, and that with the largest one.
    heavy = [max(seeing, key=lambda one: how(one[1]))[0] for how in (sum, max) if seeing]
    media = _media_of(heavy, renderer, max_seq_length, overlong) if heavy else None
    tokens = label_tokens = done_bytes = 0
    densest = 0.0
    for start in range(0, len(by_size_desc), _AT_ONCE):
        chunk = by_size_desc[start : start + _AT_ONCE]
        largest = int(sizes[chunk[0]])
        if tokens >= min(largest + _BESIDE_TEXT, max_seq_length):
            break
        if done_bytes > MOST_BYTES:
            # The rest is as dense as the densest sample so far: most likely, not certainly.
            expected = max(tokens, math.ceil(densest * largest))
            at_most = min(expected, largest + _BESIDE_TEXT, max_seq_length)
            return Longest(
                at_most=at_most,
                at_least=tokens,
                label_tokens=label_tokens,
                weighted=weighted,
                media=media,
            )
        renderings = renderer.render([answered[i][0] for i in chunk])
        for index, rendering in zip(chunk, renderings, strict=True):
            for whole in rendering.samples:
                densest = max(densest, len(whole.ids) / sizes[index])
                for kept in fit(whole, max_seq_length, overlong):
                    if tokens < len(kept.ids):
                        tokens, label_tokens = len(kept.ids), kept.label_count
        done_bytes += int(sizes[chunk].sum())
    if not tokens:
        return None
    return Longest(
        at_most=tokens,
        at_least=tokens,
        label_tokens=label_tokens,
        is_exact=True,
        weighted=weighted,
        media=media,
    )


def _media_of(
    records: Sequence[Record], renderer: Renderer, max_seq_length: int, overlong: Overlong
) -> MediaSize | None:
    """Media of the samples of some records, see `heaviest_of`; None: they have none."""
    samples = (
        kept
        for rendering in renderer.render(records)
        for whole in rendering.samples
        for kept in fit(whole, max_seq_length, overlong)
    )
    return heaviest_of(size_of([one.media], [len(one.ids) - 1]) for one in samples)


_ASSUMED_TOKENS = 2048
"""Length assumed where nothing is known; most instruction data sets have shorter records."""

LengthSource = Literal[
    "data", "largest_samples", "bytes", "max_seq_length", "model_context", "assumed"
]
"""data: the longest sample was found. largest_samples: it is estimated by those that were
tokenised. bytes: it has no more tokens than bytes. The others: the data are not known, and what
limits them is the recipe, or the model, or nothing but an assumption."""


@dataclass(frozen=True, kw_only=True)
class SequenceLength:
    """Tokens of a run's longest sequence."""

    tokens: int
    """Upper bound or assumption, cut to train.max_seq_length."""
    source: LengthSource
    trained: Longest | None = None
    """The longest training sample; None: the data are not known."""
    train_samples: int | None = None
    """Samples of an epoch at most; records that give no sample are known only after tokenising.
    None: nobody knows."""
    is_of_stream: bool = False
    """Whether the data are read as they are trained on: only the first records were looked at, and
    nobody knows how many samples an epoch has."""
    lacks: Literal["data", "tokenizer"] = "data"
    """Missing part, where nothing is known of the samples."""
    media: MediaSize | None = None
    """Media of the sample that costs most to encode; None: there are none, or not known."""

    @property
    def words(self) -> str:
        """Length and its source as a text."""
        count = f"{self.tokens:,} tokens"
        if self.media is not None:
            count += f" (and {media_row(self.media.kind).count_text(len(self.media.sizes))})"
        lacking = "the data are not known"
        if self.lacks == "tokenizer":
            lacking = "the tokenizer is not on this machine"
        if self.is_of_stream and self.trained is not None:
            return f"at most {count}; of the data, only the first records were looked at"
        return {
            "data": f"{count}: the longest sample",
            "largest_samples": f"about {count} at most, by the largest samples",
            "bytes": f"at most {count}, by the bytes of the longest sample (no tokenizer found)",
            "max_seq_length": f"at most {count} by train.max_seq_length; {lacking}",
            "model_context": f"at most {count} by the model; {lacking}",
            "assumed": f"{count} assumed, because {lacking} before the run; "
            "--train.max_seq_length N cuts them to N",
        }[self.source]


def sequence_length(
    data: Component,
    base: BaseModel,
    asked: int | None,
    sets: Mapping[str, Any] | None = None,
    *,
    preference: Preference | None = None,
) -> SequenceLength:
    """Tokens of the longest sequence that a run will train on or validate on.

    Args:
        data: of the recipe, checked.
        base: the model; its tokenizer is looked for beside its settings.
        asked: requested train.max_seq_length.
        sets: eval.sets of the recipe, checked; those that are not here count as no longer.
        preference: how records say which answers are better; None: they do not.

    Raises:
        UserError: as a run would, for data that are here.
    """
    context = base.architecture.context_length
    limit = asked or context
    described = data_source(data, preference=preference)
    is_of_stream = bool(described.stream_place)
    files = described.files()
    if files is None:
        return dataclasses.replace(_unknown(asked, context), is_of_stream=is_of_stream)
    for one in validation_sets(data, sets).values():
        files += one.files() or ()
    # Part of the key of the cache below: a changed file is read anew.
    stamps = tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    if (plugin := plugin_in_use()) is not None:
        stamps += ((Path(plugin.sha256), 0, 0),)
    directory = base.tokenizer_directory if has_tokenizer(base.tokenizer_directory) else None
    texts = json.dumps(data, default=str), json.dumps(sets, default=str)
    found = _longest(*texts, stamps, directory, limit, preference)
    train, val, count = found or (None, None, 0)
    if train is None:  # the run will say so
        lacks: Literal["data", "tokenizer"] = "tokenizer" if found is None else "data"
        unknown = _unknown(asked, context)
        return dataclasses.replace(unknown, lacks=lacks, is_of_stream=is_of_stream)
    tokens = max(train.at_most, val.at_most if val else 0)
    source: LengthSource = "data"
    if directory is None:
        source = "bytes"
    elif not train.is_exact or (val and not val.is_exact):
        source = "largest_samples"
    media = heaviest_of((train.media, None if val is None else val.media))
    if is_of_stream:
        # Later records may be longer.
        tokens, train = limit, dataclasses.replace(train, at_most=limit)
    return SequenceLength(
        tokens=tokens,
        source=source,
        trained=train,
        train_samples=None if is_of_stream else count,
        is_of_stream=is_of_stream,
        media=media,
    )


def _unknown(asked: int | None, context: int) -> SequenceLength:
    if asked is not None:
        return SequenceLength(tokens=asked, source="max_seq_length")
    if context <= _ASSUMED_TOKENS:
        return SequenceLength(tokens=context, source="model_context")
    return SequenceLength(tokens=_ASSUMED_TOKENS, source="assumed")


_Stamps = tuple[tuple[Path, int, int], ...]
"""Files with the time of their last change and their size, which identify them; of a plugin its
checksum."""


@lru_cache(maxsize=32)
def _longest(
    data: str,
    sets: str,
    stamps: _Stamps,
    tokenizer_directory: Path | None,
    limit: int,
    preference: Preference | None,
) -> tuple[Longest | None, Longest | None, int] | None:
    """The longest sample to train on, and to validate on, also of sets; how many an epoch takes.

    A plan is made many times over where changes are looked for. None: nothing is known, since the
    texts are those of a tokenizer that is not here.
    """
    try:
        tokenizer = None if tokenizer_directory is None else Tokenizer(tokenizer_directory)
        added = json.loads(data)["init_args"].get("add_tokens") or ()
        tokenizer = tokenizer and tokenizer.with_tokens(tokenizer.lacks(added))
    except UserError:  # the run will say so
        tokenizer = None
    of_parts = []
    for number, source in enumerate(data_source(json.loads(data), preference=preference).parts()):
        found = tokenizer and find_part(source, tokenizer, limit, SPLITS)
        if found:
            of_part: _OfPart | None = _of_cache(found)
        else:
            of_part = _of_records(_part(data, stamps, number, preference), tokenizer, limit)
        if of_part is None:
            return None
        train, val, count = of_part
        taken = source.samples or round(count * (source.weight or 1))
        if train is not None and taken < count:  # an epoch may be without the longest
            train = dataclasses.replace(train, at_least=0, label_tokens=0)
        of_parts.append((train, val, taken))
    trains, vals, counts = zip(*of_parts, strict=True)
    others = validation_sets(json.loads(data), json.loads(sets), preference=preference).values()
    vals += tuple(_of_set(source, tokenizer, limit) for source in others)
    return _longest_in_all(trains), _longest_in_all(vals), sum(counts)


_OfPart = tuple[Longest | None, Longest | None, int]


def _of_cache(found: dict[Split, Prepared]) -> _OfPart:
    train, val = (_longest_of(found[split].samples) for split in SPLITS)
    return train, val, len(found["train"].samples)


def _of_set(source: DataSource, tokenizer: Tokenizer | None, limit: int) -> Longest | None:
    """The longest sample of a set of eval.sets; None: it is not known."""
    if source.files() is None:
        return None
    (part,) = source.parts()
    found = tokenizer and find_part(part, tokenizer, limit, ("val",))
    if found:
        return _longest_of(found["val"].samples)
    read = part.read()
    return _longest_among(read.val, read, tokenizer, limit) if _is_known(read, tokenizer) else None


def _of_records(part: Part, tokenizer: Tokenizer | None, limit: int) -> _OfPart | None:
    if not _is_known(part, tokenizer):
        return None
    train, val = (
        _longest_among(records, part, tokenizer, limit) for records in (part.train, part.val)
    )
    return train, val, len(part.train)


def _is_known(part: Part, tokenizer: Tokenizer | None) -> bool:
    """Whether the texts of the samples of a part are known."""
    return tokenizer is not None or part.rules.chat_template != OF_TOKENIZER


def _longest_among(
    records: Sequence[Record], part: Part, tokenizer: Tokenizer | None, limit: int
) -> Longest | None:
    return longest_sample(
        records,
        make_renderer(part, tokenizer),
        max_seq_length=limit,
        overlong=part.rules.overlong,
        by_bytes=tokenizer is None,
    )


@lru_cache(maxsize=4)
def _part(data: str, stamps: _Stamps, number: int, preference: Preference | None) -> Part:
    return data_source(json.loads(data), preference=preference).parts()[number].read()
