"""Data sets of tokenised samples, their micro-batches, and the loaders that yield them."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ftkit.data.files import Record, check_data
from ftkit.data.order import FILLER, ElasticOrder, IntArray, validation_batches
from ftkit.data.sources import load_source
from ftkit.errors import UserError
from ftkit.recipe import Component

if TYPE_CHECKING:
    from litgpt.prompts import PromptStyle
    from litgpt.tokenizer import Tokenizer

Progress = Callable[[str, int, int], None]
"""Called with what is being tokenised, records done, and records in all."""

_TOKENISE_AT_ONCE = 1000


class Sample(NamedTuple):
    """A tokenised record."""

    ids: npt.NDArray[np.int32]
    """[tokens] of prompt and answer."""
    masked: int
    """How many of the first tokens are no targets."""


class SampleSet(Dataset[Sample]):
    """Tokenised samples, all in one array, so that millions fit."""

    def __init__(
        self,
        tokens: npt.NDArray[np.int32],
        offsets: IntArray,
        masked: npt.NDArray[np.int32],
        records: Sequence[Record] = (),
    ) -> None:
        """Hold samples, each of which has at least one target.

        Args:
            tokens: [tokens of all samples].
            offsets: [samples + 1], where each sample starts, and the end.
            masked: [samples], tokens at the start of each that are no targets.
            records: the texts of the samples; kept for validation, where answers are generated.
        """
        self._tokens = tokens
        self._offsets = offsets
        self._masked = masked
        self.records = records

    def __len__(self) -> int:
        return len(self._masked)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        ids = self._tokens[self._offsets[index] : self._offsets[index + 1]]
        return Sample(ids, int(self._masked[index]))

    @cached_property
    def lengths(self) -> IntArray:
        """[samples], tokens that the model is given: all but the last."""
        return np.diff(self._offsets) - 1

    @cached_property
    def label_counts(self) -> IntArray:
        """[samples], tokens that carry loss. The first token is never one: nothing predicts it."""
        return np.diff(self._offsets) - np.maximum(self._masked, 1)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of tokens, sample boundaries and masks, wherever they came from."""
        digest = hashlib.sha256()
        for array, dtype in ((self._tokens, "<i4"), (self._offsets, "<i8"), (self._masked, "<i4")):
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
    progress: Progress | None = None,
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
    check_data(data)
    _check_tokenizer(tokenizer)
    source = load_source(data, tokenizer, max_seq_length)
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
    split: bool,
    progress: Progress = lambda *_: None,
) -> HeldOut:
    """The validation part of what `load_data` gives.

    Args:
        data: the recipe's data.
        tokenizer: of the base model.
        max_seq_length: samples are cut to this many tokens.
        split: split it off a single JSON file, as training does; else take the whole file.
        progress: called at least every 1000 records.

    Raises:
        UserError: the data cannot be had, are not what they should be, or no sample is left.
    """
    check_data(data)
    _check_tokenizer(tokenizer)
    source = load_source(data, tokenizer, max_seq_length, split=split)
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
    progress: Progress,
) -> tuple[SampleSet, dict[str, int]]:
    """Tokenise the records of one split, and count what became of them."""
    answered = [record for record in records if record["output"].strip()]
    used: list[Record] = []
    samples: list[npt.NDArray[np.int32]] = []
    masked: list[int] = []
    truncated = 0
    sufficient_length = None
    pairs = prompts_and_answers(
        answered, tokenizer, prompt_style, lambda done: progress(split, done, len(answered))
    )
    for record, (prompt, answer) in zip(answered, pairs, strict=True):
        length = len(prompt) + len(answer)
        first_target = max(len(prompt) if mask_prompt else 0, 1)
        if first_target < min(length, max_seq_length):
            used.append(record)
            samples.append(np.array((prompt + answer)[:max_seq_length], dtype=np.int32))
            masked.append(len(prompt) if mask_prompt else 0)
            truncated += length > max_seq_length
        elif first_target < length:
            sufficient_length = min(first_target + 1, sufficient_length or first_target + 1)
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
    sample_set = SampleSet(np.concatenate(samples), offsets, np.array(masked, np.int32), used)
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


def collate(samples: Sequence[Sample | None], label_tokens_in_step: int) -> dict[str, Any]:
    """Pad samples to a micro-batch.

    Args:
        samples: at least one; None is a filler, which becomes one token without a target.
        label_tokens_in_step: over all ranks and micro-steps, the share of this micro-batch is
            taken of it.

    Returns:
        input_ids: [batch, sequence] int64, all but the last token, padded on the right with 0.
        positions: [targets] int64, indices into batch * sequence of the tokens whose next token
            carries loss.
        targets: [targets] int64, those next tokens.
        label_tokens_in_step: scalar float64.
        samples: how many, without fillers.
        tokens: how many, without padding and fillers.
        padded_tokens: batch * sequence.
    """
    real = [(row, sample) for row, sample in enumerate(samples) if sample is not None]
    lengths = [len(sample.ids) - 1 for _, sample in real]
    sequence = max(lengths, default=1)
    input_ids = np.zeros((len(samples), sequence), dtype=np.int64)
    positions = [np.empty(0, dtype=np.int64)]
    targets = [np.empty(0, dtype=np.int64)]
    for (row, (ids, masked)), length in zip(real, lengths, strict=True):
        first_target = max(masked, 1)
        input_ids[row, :length] = ids[:-1]
        start = row * sequence
        positions.append(np.arange(start + first_target - 1, start + length))
        targets.append(ids[first_target:].astype(np.int64))
    return {
        "input_ids": torch.from_numpy(input_ids),
        "positions": torch.from_numpy(np.concatenate(positions)),
        "targets": torch.from_numpy(np.concatenate(targets)),
        "label_tokens_in_step": torch.tensor(label_tokens_in_step, dtype=torch.float64),
        "samples": len(real),
        "tokens": sum(lengths),
        "padded_tokens": input_ids.size,
    }


def train_batches(
    samples: SampleSet,
    order: ElasticOrder,
    start_step: int,
    end_step: int,
    *,
    pin_memory: bool = False,
) -> DataLoader[dict[str, Any]]:
    """This rank's micro-batches of the steps [start_step, end_step), one per micro-step.

    Starting later replays nothing.

    Args:
        samples: the training data.
        order: of these samples.
        start_step: first step, counted from the start of the run.
        end_step: last step + 1.
        pin_memory: for copies to a GPU beside the computation.

    Returns:
        Loader of what collate returns; its len is the number of micro-steps.
    """
    return _loader(samples, _StepSampler(order, start_step, end_step), pin_memory)


def validation_loader(
    samples: SampleSet,
    limit: int,
    micro_batch_size: int,
    *,
    rank: int = 0,
    world_size: int = 1,
    pin_memory: bool = False,
) -> DataLoader[dict[str, Any]]:
    """This rank's batches of the first `limit` validation samples, as many on every rank.

    Args:
        samples: the validation data.
        limit: samples over all ranks.
        micro_batch_size: most samples per batch on one rank.
        rank: this rank, in [0, world_size).
        world_size: number of ranks.
        pin_memory: for copies to a GPU beside the computation.

    Returns:
        Loader of what collate returns; label_tokens_in_step counts the whole validation.
    """
    label_tokens = int(samples.label_counts[:limit].sum())
    batches = validation_batches(samples.lengths, limit, micro_batch_size, rank, world_size)
    return _loader(samples, [(batch, label_tokens) for batch in batches], pin_memory)


_Key = tuple[list[int], int]  # samples of a micro-batch, label tokens of its step


class _StepSampler(Sampler[_Key]):
    """What to collate, micro-step by micro-step."""

    def __init__(self, order: ElasticOrder, start_step: int, end_step: int) -> None:
        assert order.start_step <= start_step <= end_step <= order.total_steps
        self._order = order
        self._start_step = start_step
        self._end_step = end_step

    def __iter__(self) -> Iterator[_Key]:
        for step in range(self._start_step, self._end_step):
            label_tokens = self._order.label_tokens(step)
            for micro_batch in self._order.micro_batches(step):
                yield micro_batch, label_tokens

    def __len__(self) -> int:
        return (self._end_step - self._start_step) * self._order.micro_steps


class _MicroBatches(Dataset[dict[str, Any]]):
    """Collated micro-batches, by the samples in them."""

    def __init__(self, samples: SampleSet) -> None:
        self._samples = samples

    def __getitem__(self, key: _Key) -> dict[str, Any]:
        indices, label_tokens = key
        samples = [None if i == FILLER else self._samples[i] for i in indices]
        return collate(samples, label_tokens)


def _loader(
    samples: SampleSet, sampler: Sampler[_Key] | list[_Key], pin_memory: bool
) -> DataLoader[dict[str, Any]]:
    # Without workers, whatever num_workers says: the samples are tokenised already, collating
    # takes 0.05 ms, and forking a process that runs communication threads is not safe.
    return DataLoader(
        _MicroBatches(samples),
        batch_size=None,
        sampler=sampler,
        collate_fn=_keep,  # type: ignore[arg-type]  # without batch_size it gets one item
        pin_memory=pin_memory,
    )


def _keep(batch: dict[str, Any]) -> dict[str, Any]:
    """Leave the batch as it is; the loader's default would turn its counts into tensors."""
    return batch
