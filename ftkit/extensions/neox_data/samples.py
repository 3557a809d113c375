"""Samples of corpora, which are read from their mapped files when they are taken."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from ftkit.data.prepare import Counts, Prepared
from ftkit.data.records.record import Record
from ftkit.data.samples.layout import IntArray
from ftkit.data.samples.sample_set import Sample, SampleSet
from ftkit.errors import UserError
from ftkit.extensions.neox_data.files import Corpus, open_corpus, tokens_file
from ftkit.extensions.neox_data.index import (
    SampleIndex,
    counts_of_mixture,
    make_index,
    mix,
    split_documents,
)
from ftkit.extensions.neox_data.kept import OnWaiting, index_of_neox, kept_arrays
from ftkit.extensions.neox_data.source import NeoxOptions

if TYPE_CHECKING:
    from ftkit.data.dataset import OnSplitProgress, Split
    from ftkit.models.pretrained.tokenizer import Tokenizer

_BLOCKS, _BLOCK_TOKENS = 64, 4096
"""Pieces of a corpus, evenly spread, by which it is known again: all of it would take minutes."""
_MOST_RECORDS = 1000
"""Samples that are records too."""
_AT_ONCE = 2**24
"""Tokens that are looked through at once."""


@dataclass(frozen=True, kw_only=True)
class _CorpusSamples:
    """The samples of one corpus."""

    corpus: Corpus
    index: SampleIndex
    seq_length: int

    def ids(self, place: int) -> npt.NDArray[np.int64]:
        """[seq_length + 1], tokens of the sample at a place of the order."""
        number = int(self.index.order[self.index.within(place)])
        (first, begin), (last, end) = self.index.samples[number : number + 2].tolist()
        pieces = [self.corpus.tokens[:0]]  # a damaged index may name none
        for at in range(first, last + 1):
            document = self.index.documents[at]
            start, size = int(self.corpus.starts(document)), int(self.corpus.sizes[document])
            stop = start + (end + 1 if at == last else size)
            pieces.append(self.corpus.tokens[start + (begin if at == first else 0) : stop])
        ids = np.concatenate(pieces).astype(np.int64)
        if len(ids) != self.seq_length + 1:
            raise UserError(
                f"The index of {self.corpus.prefix} says that a sample has {len(ids):,} tokens, "
                f"but data.seq_length is {self.seq_length}.\nDelete the files "
                f"{self.corpus.prefix.name}_*_idx.npy beside it; the index is made anew."
            )
        return ids

    def eods(self, eod: int, waiting: OnWaiting) -> IntArray:
        """[samples in their order], how many of the tokens that a model is given end a document."""
        tokens, index = self.corpus.tokens, self.index
        address = {"ends": eod, "corpus": sampled(self.corpus), "size": len(tokens)}
        found = kept_arrays(address, lambda: {"places": _places_of(eod, tokens)}, waiting)["places"]
        starts = self.corpus.starts(index.documents)
        before = np.searchsorted(found, starts)
        of_each = np.searchsorted(found, starts + self.corpus.sizes[index.documents]) - before
        # Ends before the first token of each sample, among all documents joined.
        joined = np.concatenate([[0], np.cumsum(of_each)])
        places, offsets = index.samples[:, 0], index.samples[:, 1]
        inside = np.searchsorted(found, starts[places] + offsets) - before[places]
        counts: IntArray = np.diff(joined[places] + inside)
        return counts[index.order]


def _places_of(eod: int, tokens: npt.NDArray[Any]) -> IntArray:
    """Where a token stands in the file."""
    found = [
        first + np.flatnonzero(tokens[first : first + _AT_ONCE] == eod)
        for first in range(0, len(tokens), _AT_ONCE)
    ]
    return np.concatenate(found).astype(np.int64)


def sampled(corpus: Corpus) -> str:
    """Digest of a corpus: sizes of all documents, and pieces of its tokens."""
    digest = hashlib.sha256(f"{corpus.tokens.dtype.str} {len(corpus.tokens)}".encode())
    for array in (corpus.sizes, corpus.places):
        digest.update(np.ascontiguousarray(array).data)
    for block in _blocks(corpus):
        digest.update(np.ascontiguousarray(block).data)
    return digest.hexdigest()


def _blocks(corpus: Corpus) -> list[npt.NDArray[Any]]:
    last = max(len(corpus.tokens) - _BLOCK_TOKENS, 0)
    starts = sorted({last * block // (_BLOCKS - 1) for block in range(_BLOCKS)})
    return [corpus.tokens[start : start + _BLOCK_TOKENS] for start in starts]


class NeoxSamples(SampleSet):
    """Samples of one corpus or of a mixture, numbered in the order in which they are taken."""

    def __init__(
        self,
        corpora: Sequence[_CorpusSamples],
        mixture: Mapping[str, npt.NDArray[Any]] | None,
        count: int,
        *,
        rows: int,
        eod: int | None,
        waiting: OnWaiting,
    ) -> None:
        """Describe samples, none of which is read yet.

        Args:
            corpora: that they are of.
            mixture: corpora and places of all samples; None: there is one corpus.
            count: of the samples, from the first one on.
            rows: embeddings of the model.
            eod: token that ends documents, if the one behind it carries no loss.
            waiting: called while another process looks for these.
        """
        nothing = np.empty(0, dtype=np.int32)
        offsets = np.zeros(1, dtype=np.int64)
        super().__init__(nothing, offsets, nothing.reshape(0, 2), offsets)
        self._corpora, self._mixture, self._count = tuple(corpora), mixture, count
        self._rows, self._eod, self._waiting = rows, eod, waiting
        self._seq_length = corpora[0].seq_length
        for one in corpora:
            for block in _blocks(one.corpus):
                self._require_embedded(block, one.corpus)

    def __len__(self) -> int:
        return self._count

    def keep(self, count: int) -> None:
        """Leave out samples at the end, before anything is known of them."""
        self._count = count

    def sequences(self, index: int) -> tuple[Sample, ...]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        corpus, place = 0, index
        if self._mixture is not None:
            corpus, place = (int(self._mixture[key][index]) for key in ("corpora", "places"))
        ids = self._corpora[corpus].ids(place)
        self._require_embedded(ids, self._corpora[corpus].corpus)
        spans = np.array([[1, len(ids)]], dtype=np.int32)
        if self._eod is not None:
            spans = _spans(ids[:-1] != self._eod)
        return (Sample(ids.astype(np.int32), spans),)

    @cached_property
    def lengths_by_sequence(self) -> IntArray:
        return np.broadcast_to(np.int64(self._seq_length), (len(self), 1))

    @cached_property
    def label_counts_by_sequence(self) -> IntArray:
        return self.label_counts.reshape(-1, 1)

    # One number for all samples takes no memory.
    @cached_property
    def lengths(self) -> IntArray:
        return np.broadcast_to(np.int64(self._seq_length), len(self))

    @property
    def longest(self) -> IntArray:
        return self.lengths

    @cached_property
    def label_counts(self) -> IntArray:
        if self._eod is None:
            return self.lengths
        ends = [one.eods(self._eod, self._waiting) for one in self._corpora]
        if self._mixture is None:
            return self._seq_length - ends[0][: len(self)]
        found = np.empty(len(self), dtype=np.int64)
        for number, (one, of_each) in enumerate(zip(self._corpora, ends, strict=True)):
            chosen = np.flatnonzero(self._mixture["corpora"][: len(self)] == number)
            found[chosen] = of_each[one.index.within(self._mixture["places"][chosen])]
        return self._seq_length - found

    @property
    def sources(self) -> npt.NDArray[np.int32]:
        return np.broadcast_to(np.int32(0), len(self))

    @property
    def largest_label(self) -> int:
        """Largest id among those that were looked at; all others are when they are taken."""
        return max(int(block.max()) for one in self._corpora for block in _blocks(one.corpus))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the order, of which tokens carry loss, and of pieces of the tokens."""
        settings = {"samples": len(self), "seq_length": self._seq_length, "eod": self._eod}
        digest = hashlib.sha256(json.dumps(settings).encode())
        for one in self._corpora:
            digest.update(sampled(one.corpus).encode())
            for array in one.index:
                # GPT-NeoX's own files may hold the same numbers in another type.
                for first in range(0, len(array), _AT_ONCE):
                    digest.update(array[first : first + _AT_ONCE].astype("<i8").tobytes())
        for _, array in sorted((self._mixture or {}).items()):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def _require_embedded(self, ids: npt.NDArray[Any], corpus: Corpus) -> None:
        least, most = int(ids.min()), int(ids.max())
        if least < 0 or most >= self._rows:
            raise UserError(
                f"{tokens_file(corpus.prefix)} has the token {most if least >= 0 else least:,}, "
                f"but the model has {self._rows:,} embeddings: the corpus was made with the "
                "tokenizer of another model.\nGive the model that it is for, as --checkpoint_dir."
            )


class _Records(Sequence[Record]):
    """Some samples as records of token ids, which are asked for as questions are."""

    def __init__(self, samples: NeoxSamples) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return min(len(self._samples), _MOST_RECORDS)

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        sample = self._samples[range(len(self))[index]]
        weights = np.zeros(len(sample.ids))
        for first, end in sample.trained:
            weights[first:end] = 1
        return {"input_ids": sample.ids.tolist(), "weights": weights.tolist()}


class _Loading:
    """State of loading the samples of both splits."""

    def __init__(
        self, options: NeoxOptions, tokenizer: "Tokenizer", progress: "OnSplitProgress"
    ) -> None:
        assert options.seq_length is not None
        self._options, self._progress = options, progress
        self._seq_length = options.seq_length
        self._rows = tokenizer.rows or tokenizer.largest_id + 1
        self._eod = tokenizer.eos_id if options.eod_mask_loss else None

    def load(self) -> tuple[dict["Split", Prepared], str]:
        options = self._options
        if options.data_path is not None:
            corpus = open_corpus(Path(options.data_path).expanduser())
            documents = split_documents(options.shares, len(corpus.sizes))
            trained = self._corpus_samples(corpus, "train", documents[0], options.samples)
            held_out = self._corpus_samples(corpus, "valid", documents[1], None)
            train, val = self._joined([trained], [1.0]), self._joined([held_out], [1.0])
            used = len(documents[0]), len(documents[1])
        else:
            train, of_train = self._mixed("train", options.samples)
            val, of_val = self._mixed("valid", None)
            used = of_train, of_val
        if train is None:
            raise UserError(
                f"data.seq_length is {self._seq_length}, but the documents to train on have too "
                "few tokens for two samples of this length.\nTry a smaller --data.seq_length."
            )
        whole, micro_batch = len(train), options.micro_batch
        # GPT-NeoX leaves out a last micro-batch that is not full.
        train.keep(whole - whole % micro_batch)
        if not len(train):
            raise UserError(
                f"data.train_batch_size is {options.train_batch_size}, but {whole:,} samples are "
                f"fewer than a micro-batch of GPT-NeoX, {micro_batch:,}.\nGive "
                "data.train_batch_size and data.gradient_accumulation_steps as in its run."
            )
        description = f"{used[0]:,} documents, {len(train):,} samples in the order of GPT-NeoX"
        if val is None:
            val, used = train, (used[0], used[0])
            description += ", the first of them also to validate on"
        else:
            description += f"; {used[1]:,} more documents to validate on"
        return {
            "train": self._prepared(train, used[0]),
            "val": self._prepared(val, used[1]),
        }, description

    def _mixed(self, name: str, samples: int | None) -> tuple[NeoxSamples | None, int]:
        """Samples of train_data_paths or valid_data_paths, and how many documents they are of."""
        paths = getattr(self._options, f"{name}_data_paths") or []
        weights = getattr(self._options, f"{name}_data_weights") or [1.0] * len(paths)
        needed = [None] * len(paths) if samples is None else counts_of_mixture(weights, samples)
        corpora = [open_corpus(Path(path).expanduser()) for path in paths]
        found = [
            self._corpus_samples(corpus, f"{name}_{number}", range(len(corpus.sizes)), count)
            for number, (corpus, count) in enumerate(zip(corpora, needed, strict=True))
        ]
        return self._joined(found, weights), sum(len(corpus.sizes) for corpus in corpora)

    def _joined(
        self, corpora: Sequence[_CorpusSamples | None], weights: Sequence[float]
    ) -> NeoxSamples | None:
        """Samples of corpora, mixed; None: one has too few tokens, or there is none."""
        known = [one for one in corpora if one is not None]
        if not known or len(known) < len(corpora):
            return None
        count = sum(one.index.taken for one in known)
        mixture = None
        if len(known) > 1:
            address = {"weights": list(weights), "size": count}

            def make() -> dict[str, npt.NDArray[Any]]:
                return dict(zip(("corpora", "places"), mix(weights, count), strict=True))

            mixture = kept_arrays(address, make, self._progress)
        return NeoxSamples(
            known, mixture, count, rows=self._rows, eod=self._eod, waiting=self._progress
        )

    def _corpus_samples(
        self, corpus: Corpus, name: str, documents: range, samples: int | None
    ) -> _CorpusSamples | None:
        """Samples of some documents; None: these have too few tokens."""
        wanted: dict[str, Any] = {
            "samples": samples,
            "seq_length": self._seq_length,
            "seed": self._options.seed,
        }
        index = index_of_neox(corpus, name, documents, **wanted)
        if index is None:
            sizes = hashlib.sha256(np.ascontiguousarray(corpus.sizes).data).hexdigest()
            address = {"sizes": sizes, "documents": [documents.start, documents.stop], **wanted}

            def make() -> dict[str, npt.NDArray[Any]]:
                made = make_index(corpus.sizes, documents, **wanted)
                return {} if made is None else made._asdict()

            arrays = kept_arrays(address, make, self._progress)
            index = SampleIndex(**arrays) if arrays else None
        if index is None:
            return None
        return _CorpusSamples(corpus=corpus, index=index, seq_length=self._seq_length)

    def _prepared(self, samples: NeoxSamples, documents: int) -> Prepared:
        tokens = len(samples) * self._seq_length
        counts = Counts(
            records=documents,
            used=documents,
            samples=len(samples),
            tokens=tokens,
            label_tokens=int(samples.label_counts.sum()),
            longest_tokens=self._seq_length + 1,
            rendered_tokens=tokens + len(samples),
        )
        return Prepared(
            samples=samples,
            records=_Records(samples),
            counts=counts,
            sufficient_length=None,
            # As train.max_seq_length is compared: with the tokens that the model is given.
            whole_lengths=np.broadcast_to(np.int32(self._seq_length), len(samples)),
            examples={},
            kept={},
        )


def load_splits(
    options: NeoxOptions,
    tokenizer: "Tokenizer",
    max_seq_length: int,
    progress: "OnSplitProgress",
) -> tuple[dict["Split", Prepared], str]:
    """Find the samples of both splits, and describe them for people.

    Args:
        options: of the data.
        tokenizer: of the base model.
        max_seq_length: most tokens that the model is given.
        progress: called while another process makes the index.

    Raises:
        UserError: files are damaged, or samples would be longer, or none.
    """
    assert options.seq_length is not None
    if options.seq_length > max_seq_length:
        raise UserError(
            f"data.seq_length is {options.seq_length}, but the model is given at most "
            f"{max_seq_length} tokens (train.max_seq_length), and samples of GPT-NeoX are not "
            f"cut.\nTry --train.max_seq_length {options.seq_length}, or another model."
        )
    return _Loading(options, tokenizer, progress).load()


def _spans(carries: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """[spans, 2] of the tokens behind those that are marked."""
    edges = np.flatnonzero(np.diff(carries.astype(np.int8), prepend=0, append=0))
    return (edges.reshape(-1, 2) + 1).astype(np.int32)
