"""Preparation: records are rendered, cut to length and counted, with advice on those left out."""

import json
import multiprocessing
import os
import signal
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from ftkit.data.records.bad import BadKind, BadRecords
from ftkit.data.records.media import MEDIA_KINDS, MediaFile
from ftkit.data.records.record import Record
from ftkit.data.records.shape_rows import (
    lacks_extension,
    preference_options,
    preference_row,
    shape_row,
)
from ftkit.data.rendering import (
    NO_OUTPUT,
    NO_TEXT,
    NO_TOKEN,
    UNKNOWN_TOKEN,
    Rendered,
    Renderer,
    Rendering,
    cut,
)
from ftkit.data.samples.sample_set import SampleRows, SampleSet
from ftkit.data.spec import Overlong, Part
from ftkit.errors import UserError
from ftkit.utils.process import die_with_parent
from ftkit.utils.progress import OnProgress
from ftkit.utils.registry import imported

NO_LABELS = "no answer within max_seq_length"
"""Reason for a record with an answer but without a label."""
NO_WEIGHT = "its weight is 0"
"""Reason for a record that is not to be learned."""
NO_REASONING = "the template leaves out reasoning"
"""Remark about records that are trained on."""

_BEGINNING = 200
"""Characters of a record that are shown to identify it."""
_MOST_KEPT = 8
"""Records that are kept for each reason."""
_MOST_KEPT_CHARACTERS = 50_000
"""Most characters of a record that is kept."""


@dataclass(kw_only=True)
class Counts:
    """Counts of the records, samples and tokens of a split.

    records = used + skipped_empty_output + skipped_no_labels + all that are refused + dropped +
    short, where each record is one sample.
    """

    records: int = 0
    used: int = 0
    """Records that became samples."""
    skipped_empty_output: int = 0
    skipped_no_labels: int = 0
    """Records without a label within max_seq_length."""
    refused: dict[str, int] = field(default_factory=dict)
    """Records that cannot become samples, by the reason."""
    samples: int = 0
    truncated: int = 0
    """Samples whose end was cut off."""
    dropped: int = 0
    """Samples that were left out because they are too long."""
    short: int = 0
    """Samples that were left out because they have fewer tokens than data.min_tokens."""
    split: int = 0
    """Samples that were too long and became several."""
    split_by_turn: int = 0
    """Conversations that became several samples: the template changes earlier turns, or the tokens
    of a turn's prompt are others within the conversation."""
    without_reasoning: int = 0
    """Records that became samples, with a turn that is trained without the reasoning it has."""
    divided: int = 0
    """Records that became samples, with an answer that is encoded apart from its prompt: the whole
    text has other tokens where they meet."""
    tokens: int = 0
    """Input tokens of the samples: all but the last of each."""
    label_tokens: int = 0
    longest_tokens: int = 0
    """Tokens of the longest sample before it was cut, split or dropped."""
    rendered_tokens: int = 0
    """Tokens of all samples before they were cut, split or dropped."""
    lost_tokens: int = 0
    """Tokens that were cut off, dropped or skipped."""

    @property
    def reasons(self) -> dict[str, int]:
        """Records without anything to train on, by reason; dropped ones are not among them."""
        skipped = {NO_OUTPUT: self.skipped_empty_output, NO_LABELS: self.skipped_no_labels}
        return {reason: count for reason, count in (skipped | self.refused).items() if count}

    @property
    def lost_fraction(self) -> float:
        """Lost tokens among all."""
        return self.lost_tokens / max(self.rendered_tokens, 1)

    def __add__(self, other: "Counts") -> "Counts":
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        refused = dict(values.pop("refused"))
        for reason, count in other.refused.items():
            refused[reason] = refused.get(reason, 0) + count
        longest = max(self.longest_tokens, other.longest_tokens)
        summed = {name: value + getattr(other, name) for name, value in values.items()}
        return Counts(**(summed | {"refused": refused, "longest_tokens": longest}))


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """The samples of one split of a part."""

    samples: SampleSet
    records: Sequence[Record]
    """Records that became samples; empty for training records from the cache."""
    counts: Counts
    sufficient_length: int | None
    """A max_seq_length within which a record that was skipped has a label."""
    whole_lengths: npt.NDArray[np.int32]
    """[samples before anything was done about their length], tokens of each."""
    examples: dict[str, str]
    """Beginning of the first record without anything to train on, by reason."""
    kept: dict[str, list[Record]]
    """Some of the records that are not fully trained on, by reason, to try changes on."""
    bad: BadRecords = field(default_factory=BadRecords)
    """Bad records whose image or other file is at fault; empty for samples from the cache."""


def fit(sample: Rendered, max_seq_length: int, overlong: Overlong) -> list[Rendered]:
    """Cut a sample to the parts that fit and hold a label.

    Where it is split, a part begins with the last token of the part before: the first token of a
    sample carries no loss, so every token but the very first is learned once.
    """
    length = len(sample.ids)
    starts: Sequence[int] = (0,)
    if length > max_seq_length and overlong == "drop":
        return []
    if length > max_seq_length and overlong == "split" and not sample.media:
        starts = range(0, length - 1, max(max_seq_length - 1, 1))
    parts = (cut(sample, max_seq_length, first) for first in starts)
    return [part for part in parts if part.trained]


class _Preparation:
    """Samples and counts of a split, record by record."""

    def __init__(
        self, max_seq_length: int, overlong: Overlong, min_tokens: int, per_sample: int
    ) -> None:
        self._max_seq_length, self._overlong = max_seq_length, overlong
        self._min_tokens, self._per_sample = min_tokens, per_sample
        self.rows = SampleRows(per_sample)
        self.used: list[Record] = []
        self.counts = Counts()
        self.sufficient_length: int | None = None
        self.whole_lengths = array("i")
        self.examples: dict[str, str] = {}
        self.kept: dict[str, list[Record]] = {}
        self._looked_at: dict[str, int] = {}
        self.bad = BadRecords()

    def add(self, record: Record, rendering: Rendering) -> None:
        """Add the samples of a record, or count why there are none."""
        counts = self.counts
        counts.records += 1
        weight = record.get("weight", 1)
        if not weight:
            rendering = Rendering(refused=NO_WEIGHT)
        if rendering.bad_file is not None:
            file, what = rendering.bad_file
            self.bad.add(file, f" {what}.\nCorrect it, or remove the record that names it.", record)
        if rendering.refused is not None:
            self._note_example(rendering.refused, record)
        if rendering.refused == NO_OUTPUT:
            counts.skipped_empty_output += 1
        elif rendering.refused is not None:
            counts.refused[rendering.refused] = counts.refused.get(rendering.refused, 0) + 1
        else:
            left_out = counts.dropped + counts.short
            # Neither is a sequence with a target: half of it says nothing of the whole.
            if self._per_sample > 1 or rendering.samples[0].target:
                parts = self._fit_together(rendering.samples)
            else:
                parts = [part for whole in rendering.samples for part in self._fit(whole)]
            if weight != 1:
                parts = [part.times(weight) for part in parts]
            if parts:
                counts.split_by_turn += len(rendering.samples) > self._per_sample
                if rendering.omits_reasoning:
                    counts.without_reasoning += 1
                    self._note_example(NO_REASONING, record)
                counts.divided += rendering.is_divided
                self.used.append(record)
                self.rows.extend(parts)
                counts.used += 1
            # Samples left out for their length have been counted in _fit.
            elif counts.dropped + counts.short == left_out:
                counts.skipped_no_labels += 1
                self._note_example(NO_LABELS, record)

    def add_bad(self, kind: BadKind) -> None:
        """Count records that could not be read."""
        self.counts.records += kind.count
        self.counts.refused[kind.reason] = kind.count
        self.examples[kind.reason] = f"{kind.where}: {kind.example}".removesuffix(": ")

    def _fit(self, whole: Rendered) -> list[Rendered]:
        counts, length = self.counts, len(whole.ids)
        counts.rendered_tokens += length
        counts.longest_tokens = max(counts.longest_tokens, length)
        self.whole_lengths.append(length)
        parts = fit(whole, self._max_seq_length, self._overlong)
        kept = [part for part in parts if len(part.ids) >= self._min_tokens]
        counts.short += len(parts) - len(kept)
        counts.lost_tokens += sum(len(p.ids) for p in parts) - sum(len(p.ids) for p in kept)
        counts.samples += len(kept)
        counts.tokens += sum(len(part.ids) - 1 for part in kept)
        counts.label_tokens += sum(part.label_count for part in kept)
        if length > self._max_seq_length and self._overlong == "drop":
            counts.dropped += 1
            counts.lost_tokens += length
        elif not parts:
            counts.lost_tokens += length
            self._note_sufficient_length(whole)
        elif length > self._max_seq_length and self._overlong == "truncate":
            counts.truncated += 1
            counts.lost_tokens += length - len(parts[0].ids)
        elif len(parts) > 1:
            counts.split += 1
        return kept

    def _fit_together(self, wholes: Sequence[Rendered]) -> list[Rendered]:
        """Cut the sequences of a sample; one that cannot be used leaves out all of them."""
        counts, lengths = self.counts, [len(whole.ids) for whole in wholes]
        counts.rendered_tokens += sum(lengths)
        counts.longest_tokens = max(counts.longest_tokens, *lengths)
        self.whole_lengths.extend(lengths)
        is_longer = max(lengths) > self._max_seq_length
        parts = [cut(whole, self._max_seq_length) for whole in wholes]
        if is_longer and self._overlong == "drop":
            counts.dropped += 1
            parts = []
        elif not all(part.trained for part in parts):
            for whole, part in zip(wholes, parts, strict=True):
                if not part.trained:
                    self._note_sufficient_length(whole)
            parts = []
        elif min(len(part.ids) for part in parts) < self._min_tokens:
            counts.short += 1
            parts = []
        else:
            counts.samples += 1
            counts.truncated += is_longer
        counts.lost_tokens += sum(lengths) - sum(len(part.ids) for part in parts)
        counts.tokens += sum(len(part.ids) - 1 for part in parts)
        counts.label_tokens += sum(part.label_count for part in parts)
        return parts

    def _note_example(self, reason: str, record: Record) -> None:
        looked_at = self._looked_at.get(reason, 0)
        if looked_at == _MOST_KEPT:
            return
        self._looked_at[reason] = looked_at + 1
        # Only some are kept, and of bounded size: the advice tries templates on them, and a refused
        # record may be a whole book.
        text = json.dumps(record, ensure_ascii=False)
        self.examples.setdefault(reason, text[:_BEGINNING])
        if len(text) <= _MOST_KEPT_CHARACTERS:
            self.kept.setdefault(reason, []).append(record)

    def _note_sufficient_length(self, whole: Rendered) -> None:
        if found := cut(whole, len(whole.ids)).trained:
            # The first token is never a label, because nothing predicts it.
            needed = max(found[0][0], 1) + 1
            self.sufficient_length = min(needed, self.sufficient_length or needed)


def prepare_records(
    records: Sequence[Record],
    renderer: Renderer,
    max_seq_length: int,
    overlong: Overlong,
    progress: OnProgress,
    min_tokens: int = 0,
    bad: Sequence[BadKind] = (),
    files: Sequence[MediaFile] = (),
) -> Prepared:
    """Render, fit and count the records of one split.

    Args:
        records: of the split.
        renderer: makes samples of them.
        max_seq_length: no sample has more tokens.
        overlong: handling of longer samples.
        progress: called at least every 1000 records.
        min_tokens: no sample has fewer tokens.
        bad: the records that were left out when the others were read; they count too.
        files: of media of all records of the part, which decide which of them are in this split.
    """
    made = _Preparation(max_seq_length, overlong, min_tokens, renderer.per_sample)
    made.rows.note_files(files)
    progress(0, len(records))
    for chunk, renderings in rendered_chunks(renderer, records):
        for record, rendering in zip(chunk, renderings, strict=True):
            made.add(record, rendering)
        progress(made.counts.records, len(records))
    for kind in bad:
        made.add_bad(kind)
    return Prepared(
        samples=made.rows.finish(),
        records=made.used,
        counts=made.counts,
        sufficient_length=made.sufficient_length,
        whole_lengths=np.frombuffer(made.whole_lengths, dtype=np.int32),
        examples=made.examples,
        kept=made.kept,
        bad=made.bad,
    )


def make_renderer(part: Part, tokenizer: Any) -> Renderer:
    """Make the renderer for the records of a part.

    Args:
        part: its shape and rules count.
        tokenizer: of the base model; None: only texts are rendered.

    Raises:
        UserError: there is no such chat template, or an extension is missing.
    """
    rules = part.rules
    renderer: Renderer
    if part.media:
        renderer = _media_renderer(part, tokenizer)
    else:
        renderer = imported(shape_row(part.shape).renderer_place).of(rules, tokenizer)
    if rules.preference is not None:
        made = imported(preference_row(rules.preference).renderer_place)
        renderer = made(renderer, tokenizer, **preference_options(rules.preference))
    return renderer


def _media_renderer(part: Part, tokenizer: Any) -> Renderer:
    """Make the renderer for records with media, of one kind."""
    name, *others = part.media
    row = MEDIA_KINDS.get(name)
    if row is None:
        raise UserError(f"A record with an {name} {lacks_extension(f'{name}s')}")
    if others:
        raise UserError(
            f"The records of {part.name} have media of several kinds ({', '.join(part.media)}), "
            "but those of a source are of one.\nGive each kind as a source of its own."
        )
    renderer: Renderer = imported(row.renderer_place)(part, tokenizer)
    return renderer


RECORDS_AT_ONCE = 1000
"""Records of a chunk."""
LEAST_RECORDS = 50_000
"""Fewest records for which processes are started: their imports take seconds."""
# Each has its own interpreter and tokenizer in memory.
_MOST_PROCESSES = 32

Chunk = tuple[Sequence[Record], Sequence[Rendering]]


def rendered_chunks(renderer: Renderer, records: Sequence[Record]) -> Iterator[Chunk]:
    """Render records chunk by chunk, in their order.

    Where rendering is the work of Python and there is much of it, all cores take part, each in an
    interpreter of its own: a rank may have threads and a GPU, which no fork survives. What comes
    out is the same.
    """
    starts = range(0, len(records), RECORDS_AT_ONCE)
    chunks = [records[start : start + RECORDS_AT_ONCE] for start in starts]
    done = 0
    cores = min(os.cpu_count() or 1, _MOST_PROCESSES)
    if renderer.is_python_bound and len(records) >= LEAST_RECORDS and cores > 1:
        try:
            for renderings in _in_processes(renderer, chunks, cores):
                yield chunks[done], renderings
                done += 1
        except BrokenProcessPool:
            pass  # no memory for so many: the rest is rendered here
    for chunk in chunks[done:]:
        yield chunk, list(renderer.render(chunk))


def _in_processes(
    renderer: Renderer, chunks: Sequence[Sequence[Record]], count: int
) -> Iterator[list[Rendering]]:
    pool = ProcessPoolExecutor(
        count,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(renderer, os.getpid()),
    )
    try:
        yield from pool.map(_render, chunks)
    finally:
        # Chunks that still wait are dropped where the caller stops early, as after an error.
        pool.shutdown(cancel_futures=True)


_RENDERER: list[Renderer] = []
"""The renderer of this process, if it is a worker."""


def _begin(renderer: Renderer, parent: int) -> None:
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # every core has a process already
    _RENDERER.append(renderer)


def _render(records: Sequence[Record]) -> list[Rendering]:
    return list(_RENDERER[0].render(records))


_TO_RECORDS = {
    NO_OUTPUT: "Add an output to them, or remove them.",
    NO_TEXT: "Add a text to them, or remove them.",
    NO_TOKEN: "Give a weight above 0 to a token behind the first, or remove them.",
    UNKNOWN_TOKEN: "Make the ids with the tokenizer of checkpoint_dir.",
    NO_WEIGHT: "Give them a loss_weight above 0, or remove them.",
}


def advice_for(
    reason: str,
    records: Sequence[Record],
    part: Part,
    tokenizer: Any,
    *,
    used: Sequence[Record] = (),
) -> str:
    """Recommend a change with which records are trained on as they are meant.

    Args:
        reason: why they are not.
        records: some of them; each change is tried on these.
        part: how they become samples.
        tokenizer: of the base model.
        used: some records that are trained on, which a change must not lose.
    """
    if reason in _TO_RECORDS:
        return _TO_RECORDS[reason]
    for kind in filter(None, map(MEDIA_KINDS.get, part.media)):
        for beginning, works in kind.advice.items():
            if reason.startswith(beginning):
                return works
    place = shape_row(part.shape).advice_place
    if not place:
        return "Correct or remove them."
    advice: str = imported(place)(reason, records, part, tokenizer, used=used)
    return advice
