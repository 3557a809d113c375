"""Data sets of tokenised samples."""

import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from ftkit.config.recipe import Component
from ftkit.data.json_records import Record
from ftkit.data.sampler import IntArray
from ftkit.data.sources import data_source
from ftkit.data.spec import DataSource, Splits
from ftkit.errors import UserError

if TYPE_CHECKING:
    from litgpt.prompts import PromptStyle
    from litgpt.tokenizer import Tokenizer


OnSplitProgress = Callable[[str, int, int], None]
"""Called with what is being tokenised, records done, and records in all."""

_TOKENISE_AT_ONCE = 1000


class Sample(NamedTuple):
    """A tokenised record."""

    ids: npt.NDArray[np.int32]
    """[tokens] of prompt and answer."""
    prompt_length: int
    """How many of the first tokens are no labels; 0 where the prompt is learned too."""


class SampleSet(Dataset[Sample]):
    """Tokenised samples, all in one array, so that millions fit."""

    def __init__(
        self,
        tokens: npt.NDArray[np.int32],
        offsets: IntArray,
        prompt_lengths: npt.NDArray[np.int32],
        records: Sequence[Record] = (),
    ) -> None:
        """Hold samples, each of which has at least one label.

        Args:
            tokens: [tokens of all samples].
            offsets: [samples + 1], where each sample starts, and the end.
            prompt_lengths: [samples], tokens at the start of each that are no labels.
            records: the texts of the samples; kept for validation, where answers are generated.
        """
        self._tokens = tokens
        self._offsets = offsets
        self._prompt_lengths = prompt_lengths
        self.records = records

    def __len__(self) -> int:
        return len(self._prompt_lengths)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        ids = self._tokens[self._offsets[index] : self._offsets[index + 1]]
        return Sample(ids, int(self._prompt_lengths[index]))

    @cached_property
    def lengths(self) -> IntArray:
        """[samples], tokens that the model is given: all but the last."""
        return np.diff(self._offsets) - 1

    @cached_property
    def label_counts(self) -> IntArray:
        """[samples], tokens that carry loss. The first token is never one: nothing predicts it."""
        return np.diff(self._offsets) - np.maximum(self._prompt_lengths, 1)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of tokens, sample boundaries and masks, wherever they came from."""
        digest = hashlib.sha256()
        for array, dtype in (
            (self._tokens, "<i4"),
            (self._offsets, "<i8"),
            (self._prompt_lengths, "<i4"),
        ):
            digest.update(np.ascontiguousarray(array, dtype=dtype).data)
        return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class DataSets:
    """What a recipe's data became."""

    train: SampleSet
    """Without records."""
    val: SampleSet
    """With records: sample i was made of records[i]."""
    counts: dict[str, dict[str, int]]
    """For train and val: records = used + skipped_empty_output + skipped_no_labels; of those used,
    how many were truncated, their tokens (model input) and label_tokens."""
    prompt_style: "PromptStyle"
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
    sets, counts = {}, {}
    for split, records in (("train", source.train), ("val", source.val)):
        sets[split], counts[split] = _tokenise(
            split,
            records,
            tokenizer,
            source.prompt_style,
            mask_prompt=source.mask_prompt,
            max_seq_length=max_seq_length,
            progress=progress or (lambda *_: None),
        )
    sets["train"].records = ()
    return DataSets(**sets, counts=counts, prompt_style=source.prompt_style)


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The validation records of a data set, to evaluate on."""

    samples: SampleSet
    """With records."""
    counts: dict[str, int]
    """As in DataSets."""
    prompt_style: "PromptStyle"
    """How an instruction becomes a prompt."""


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
    samples, counts = _tokenise(
        "val",
        source.val,
        tokenizer,
        source.prompt_style,
        mask_prompt=source.mask_prompt,
        max_seq_length=max_seq_length,
        progress=progress,
    )
    return HeldOut(samples=samples, counts=counts, prompt_style=source.prompt_style)


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


def _tokenise(
    split: str,
    records: Sequence[Record],
    tokenizer: "Tokenizer",
    prompt_style: "PromptStyle",
    *,
    mask_prompt: bool,
    max_seq_length: int,
    progress: OnSplitProgress,
) -> tuple[SampleSet, dict[str, int]]:
    """Tokenise the records of one split, and count what became of them."""
    answered = [record for record in records if record["output"].strip()]
    used: list[Record] = []
    samples: list[npt.NDArray[np.int32]] = []
    prompt_lengths: list[int] = []
    truncated = 0
    sufficient_length = None
    pairs = prompts_and_answers(
        answered, tokenizer, prompt_style, lambda done: progress(split, done, len(answered))
    )
    for record, (prompt, answer) in zip(answered, pairs, strict=True):
        length = len(prompt) + len(answer)
        first_label = max(len(prompt) if mask_prompt else 0, 1)
        if first_label < min(length, max_seq_length):
            used.append(record)
            samples.append(np.array((prompt + answer)[:max_seq_length], dtype=np.int32))
            prompt_lengths.append(len(prompt) if mask_prompt else 0)
            truncated += length > max_seq_length
        elif first_label < length:
            sufficient_length = min(first_label + 1, sufficient_length or first_label + 1)
    counts = {
        "records": len(records),
        "used": len(used),
        "skipped_empty_output": len(records) - len(answered),
        "skipped_no_labels": len(answered) - len(used),
        "truncated": truncated,
    }
    if not used:
        raise UserError(_explain_nothing_left(split, counts, max_seq_length, sufficient_length))
    offsets = np.zeros(len(samples) + 1, dtype=np.int64)
    np.cumsum([len(ids) for ids in samples], out=offsets[1:])
    sample_set = SampleSet(
        np.concatenate(samples), offsets, np.array(prompt_lengths, np.int32), used
    )
    counts["tokens"] = int(sample_set.lengths.sum())
    counts["label_tokens"] = int(sample_set.label_counts.sum())
    return sample_set, counts


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


def prompts_and_answers(
    records: Sequence[Record],
    tokenizer: "Tokenizer",
    prompt_style: "PromptStyle",
    progress: Callable[[int], None],
) -> Iterator[tuple[list[int], list[int]]]:
    """The token ids of prompt and answer of each record."""
    progress(0)
    for start in range(0, len(records), _TOKENISE_AT_ONCE):
        chunk = records[start : start + _TOKENISE_AT_ONCE]
        texts = [prompt_style.apply(prompt=record["instruction"], **record) for record in chunk]
        prompts = _encode(tokenizer, texts)
        answers = _encode(tokenizer, [record["output"] for record in chunk], answer=True)
        yield from zip(prompts, answers, strict=True)
        progress(start + len(chunk))


def _encode(tokenizer: "Tokenizer", texts: list[str], *, answer: bool = False) -> list[list[int]]:
    """Token ids as litgpt.Tokenizer.encode gives them, many texts at once where that is safe.

    Args:
        tokenizer: of the base model.
        texts: prompts, or answers.
        answer: encode as an answer: with an end and without a start token.
    """
    bos = False if answer else None
    if tokenizer.backend != "huggingface" or tokenizer.processor.padding is not None:
        # A batch would be padded to its longest text.
        return [tokenizer.encode(text, bos=bos, eos=answer).tolist() for text in texts]
    encodings = tokenizer.processor.encode_batch_fast(texts)
    return [
        _mark_ends(encoding.ids, tokenizer, bos=tokenizer.use_bos and not answer, eos=answer)
        for encoding in encodings
    ]


def _mark_ends(ids: list[int], tokenizer: "Tokenizer", *, bos: bool, eos: bool) -> list[int]:
    """Add start and end token by the rules of litgpt.Tokenizer.encode, odd ones included.

    So an end token that is already there is removed, whether or not one is asked for.
    """
    if bos:
        if not ids or ids[0] != tokenizer.bos_id:
            ids = [tokenizer.bos_id, *ids]
    elif ids and ids[0] == tokenizer.bos_id:
        ids = ids[1:]
    if ids and ids[-1] == tokenizer.eos_id:
        return ids[:-1]
    return [*ids, tokenizer.eos_id] if eos else ids
