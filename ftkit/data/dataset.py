"""Data sets of tokenised samples."""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from ftkit.config.recipe import Component
from ftkit.data.instruction_renderer import InstructionRenderer
from ftkit.data.renderer import Rendered, Renderer, cut
from ftkit.data.sampler import IntArray
from ftkit.data.sources import data_source
from ftkit.data.spec import DataSource, Part, Splits
from ftkit.errors import UserError
from ftkit.records.record import Record

if TYPE_CHECKING:
    from litgpt.prompts import PromptStyle
    from litgpt.tokenizer import Tokenizer


OnSplitProgress = Callable[[str, int, int], None]
"""Called with what is being tokenised, records done, and records in all."""

_TOKENISE_AT_ONCE = 1000


class Sample(NamedTuple):
    """The tokens of a sample, and which of them carry loss."""

    ids: npt.NDArray[np.int32]
    """[tokens]."""
    trained: npt.NDArray[np.int32]
    """[spans, 2]: first token and end of each span that carries loss. The first token of all never
    does: nothing predicts it."""


class SampleSet(Dataset[Sample]):
    """Tokenised samples, all in one array, so that millions fit."""

    def __init__(
        self,
        tokens: npt.NDArray[np.int32],
        offsets: IntArray,
        spans: npt.NDArray[np.int32],
        span_offsets: IntArray,
    ) -> None:
        """Hold samples, each of which has at least one label.

        Args:
            tokens: [tokens of all samples].
            offsets: [samples + 1], where each sample starts, and the end.
            spans: [spans of all samples, 2], as in Sample.
            span_offsets: [samples + 1], where the spans of each sample start, and the end.
        """
        self._tokens, self._offsets = tokens, offsets
        self._spans, self._span_offsets = spans, span_offsets

    @classmethod
    def of(cls, samples: Sequence[Rendered]) -> "SampleSet":
        """Lay samples one behind the other."""
        ids = [np.array(sample.ids, dtype=np.int32) for sample in samples]
        spans = [np.array(sample.trained, dtype=np.int32) for sample in samples]
        return cls(np.concatenate(ids), _offsets(ids), np.concatenate(spans), _offsets(spans))

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        ids = self._tokens[self._offsets[index] : self._offsets[index + 1]]
        return Sample(ids, self._spans[self._span_offsets[index] : self._span_offsets[index + 1]])

    @cached_property
    def lengths(self) -> IntArray:
        """[samples], tokens that the model is given: all but the last."""
        return np.diff(self._offsets) - 1

    @cached_property
    def label_counts(self) -> IntArray:
        """[samples], tokens that carry loss."""
        labels = self._spans[:, 1] - np.maximum(self._spans[:, 0], 1)
        return np.add.reduceat(labels, self._span_offsets[:-1], dtype=np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of tokens, sample boundaries and masks, wherever they came from.

        Where every sample is a prompt and an answer, its mask counts as the length of its prompt,
        as it did when there were no others.
        """
        masks = [(self._spans, "<i4"), (self._span_offsets, "<i8")]
        lengths = np.diff(self._offsets)
        if len(self._spans) == len(self) and (self._spans[:, 1] == lengths).all():
            masks = [(self._spans[:, 0], "<i4")]
        digest = hashlib.sha256()
        for array, dtype in [(self._tokens, "<i4"), (self._offsets, "<i8"), *masks]:
            digest.update(np.ascontiguousarray(array, dtype=dtype).data)
        return digest.hexdigest()


def _offsets(parts: Sequence[npt.NDArray[np.int32]]) -> IntArray:
    """[parts + 1], where each part starts when they lie one behind the other, and the end."""
    return np.cumsum([0, *map(len, parts)], dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class DataSets:
    """What a recipe's data became."""

    train: SampleSet
    val: SampleSet
    val_records: Sequence[Record]
    """Those that samples of `val` were made of."""
    counts: dict[str, dict[str, int]]
    """For train and val: records = used + skipped_empty_output + skipped_no_labels; of those used,
    how many were truncated, their tokens (model input) and label_tokens."""
    renderer: Renderer
    """Made the samples."""
    prompt_style: "PromptStyle | None"
    """How an instruction becomes a prompt."""


def load_data(
    data: Component,
    tokenizer: "Tokenizer",
    max_seq_length: int,
    *,
    progress: OnSplitProgress | None = None,
) -> DataSets:
    """Read, and if necessary download, a data set and tokenise it.

    Ids and labels are those of litgpt.data.SFTDataset. Records without an answer, or whose answer
    lies behind max_seq_length, are left out and counted.

    Args:
        data: the recipe's data.
        tokenizer: of the base model.
        max_seq_length: samples are cut to this many tokens.
        progress: called at least every 1000 records.

    Raises:
        UserError: the data cannot be had, are not what they should be, or no sample is left.
    """
    assert max_seq_length > 0
    source = _read(data_source(data), tokenizer)
    (part,) = source.parts
    renderer = make_renderer(part, tokenizer)
    progress = progress or (lambda *_: None)
    train = _tokenise("train", part.train, renderer, max_seq_length, progress)
    val = _tokenise("val", part.val, renderer, max_seq_length, progress)
    return DataSets(
        train=train.samples,
        val=val.samples,
        val_records=val.records,
        counts={"train": train.counts, "val": val.counts},
        renderer=renderer,
        prompt_style=part.rules.prompt_style,
    )


def make_renderer(part: Part, tokenizer: "Tokenizer | None") -> Renderer:
    """What makes samples of the records of a part.

    Args:
        part: its shape and rules count.
        tokenizer: of the base model; None: nothing but texts will be asked for.
    """
    rules = part.rules
    assert part.shape == "instruction" and rules.prompt_style is not None
    return InstructionRenderer(tokenizer, rules.prompt_style, mask_prompt=rules.train_on != "all")


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The validation records of a data set, to evaluate on."""

    samples: SampleSet
    records: Sequence[Record]
    """Those that the samples were made of."""
    counts: dict[str, int]
    """As in DataSets."""
    renderer: Renderer
    """Made the samples."""


def load_held_out(
    data: Component,
    tokenizer: "Tokenizer",
    max_seq_length: int,
    *,
    given: Collection[str] = (),
    progress: OnSplitProgress = lambda *_: None,
) -> HeldOut:
    """The validation part of what `load_data` gives.

    Args:
        data: the recipe's data.
        tokenizer: of the base model.
        max_seq_length: samples are cut to this many tokens.
        given: the options of the data that were named for this alone.
        progress: called at least every 1000 records.

    Raises:
        UserError: the data cannot be had, are not what they should be, or no sample is left.
    """
    source = _read(data_source(data).for_evaluation(given), tokenizer)
    (part,) = source.parts
    renderer = make_renderer(part, tokenizer)
    val = _tokenise("val", part.val, renderer, max_seq_length, progress)
    return HeldOut(samples=val.samples, records=val.records, counts=val.counts, renderer=renderer)


def _read(source: DataSource, tokenizer: "Tokenizer") -> Splits:
    source.files()  # a missing file is named first
    _check_tokenizer(tokenizer)
    return source.read()


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


@dataclass(frozen=True, kw_only=True)
class _Tokenised:
    """One split."""

    samples: SampleSet
    records: Sequence[Record]
    """Those that samples were made of."""
    counts: dict[str, int]


def _tokenise(
    split: str,
    records: Sequence[Record],
    renderer: Renderer,
    max_seq_length: int,
    progress: OnSplitProgress,
) -> _Tokenised:
    """Tokenise the records of one split, and count what became of them."""
    used: list[Record] = []
    samples: list[Rendered] = []
    counts = {"records": len(records), "used": 0, "skipped_empty_output": 0}
    counts |= {"skipped_no_labels": 0, "truncated": 0}
    sufficient_length = None
    progress(split, 0, len(records))
    for start in range(0, len(records), _TOKENISE_AT_ONCE):
        chunk = records[start : start + _TOKENISE_AT_ONCE]
        for record, rendering in zip(chunk, renderer.render(chunk), strict=True):
            if rendering.refused is not None:
                counts["skipped_empty_output"] += 1
                continue
            (whole,) = rendering.samples
            kept = cut(whole, max_seq_length)
            if kept.trained:
                used.append(record)
                samples.append(kept)
                counts["truncated"] += len(kept.ids) < len(whole.ids)
                continue
            counts["skipped_no_labels"] += 1
            if cut(whole, len(whole.ids)).trained:
                needed = max(whole.trained[0][0], 1) + 1
                sufficient_length = min(needed, sufficient_length or needed)
        progress(split, start + len(chunk), len(records))
    counts["used"] = len(used)
    if not used:
        raise UserError(_explain_nothing_left(split, counts, max_seq_length, sufficient_length))
    sample_set = SampleSet.of(samples)
    counts["tokens"] = int(sample_set.lengths.sum())
    counts["label_tokens"] = int(sample_set.label_counts.sum())
    return _Tokenised(samples=sample_set, records=used, counts=counts)


def _explain_nothing_left(
    split: str, counts: dict[str, int], max_seq_length: int, sufficient_length: int | None
) -> str:
    what = {"train": "train on", "val": "validate on"}[split]
    advice = "Add records with an output."
    if sufficient_length is not None:
        advice = f"Try --train.max_seq_length {sufficient_length} or more."
    return (
        f"data leaves nothing to {what}: of {counts['records']} records, "
        f"{counts['skipped_empty_output']} have no output and {counts['skipped_no_labels']} have "
        f"none within train.max_seq_length, which is {max_seq_length}.\n{advice}"
    )
