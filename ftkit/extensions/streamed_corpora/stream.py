"""The samples of a corpus by their number: an order that is made window by window.

An epoch of a source permutes its pieces. W of them are a window: their documents are tokenised,
joined and cut (or cut one by one), and the samples permuted. Which sample a number is follows from
the seed and the number alone, so a run goes on anywhere after it has tokenised one window. Several
sources share each thousand samples by their weights, in an order of its own.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ftkit.data.cache import address_of
from ftkit.data.samples.layout import IntArray
from ftkit.data.samples.sample_set import JoinedSamples, Sample, Samples, SampleSet
from ftkit.data.samples.sampler import permutation
from ftkit.data.samples.stream import Stream, StreamPosition
from ftkit.errors import UserError
from ftkit.extensions.streamed_corpora.files import digest_of
from ftkit.extensions.streamed_corpora.source import CorpusSource, OneCorpus
from ftkit.extensions.streamed_corpora.token_cache import TokenCache, Tokens
from ftkit.utils.files import cache_root

if TYPE_CHECKING:
    from ftkit.models.pretrained.tokenizer import Tokenizer

BLOCK = 1000
"""Samples in which every source has its share."""
_MOST_LISTED = 2**20
"""Pieces of which an epoch has its order in memory; of more, each is computed when it is needed."""
_ROUNDS = 8
_TEXTS_AT_ONCE = 1000
_FORMAT = 1
"""Of kept pieces: raised when a piece becomes other tokens."""


def open_stream(source: CorpusSource, tokenizer: "Tokenizer", max_seq_length: int) -> Stream:
    """Open the samples of a corpus; its files are counted, and none is read.

    Raises:
        UserError: there are no files, or none that can be read in pieces.
    """
    return CorpusStream(source, tokenizer, max_seq_length)


def joined(tokens: Sequence[Tokens], max_seq_length: int) -> SampleSet:
    """Join documents and cut them to samples of this many tokens, of which the last is shorter.

    Each begins with the last token of the one before, so that every token is learned once.
    """
    nothing = np.empty(0, dtype=np.int32)
    every = np.concatenate([nothing, *(piece.ids for piece in tokens)])
    return _cut(every, [(0, len(every))], max_seq_length)


def separate(tokens: Sequence[Tokens], max_seq_length: int) -> SampleSet:
    """Cut each document to samples of this many tokens, in the same way."""
    nothing = np.empty(0, dtype=np.int32)
    every = np.concatenate([nothing, *(piece.ids for piece in tokens)])
    starts = np.cumsum([0, *(len(piece.ids) for piece in tokens)])
    of_pieces = zip(starts.tolist(), tokens, strict=False)
    ends = [start + end for start, piece in of_pieces for end in piece.ends.tolist()]
    return _cut(every, zip([0, *ends], ends, strict=False), max_seq_length)


def scattered(places: IntArray, count: int, seed: int, *key: int) -> IntArray:
    """[places], the numbers that a random order of range(count) has there.

    A Feistel network permutes all numbers of an even number of bits; one that leaves the range goes
    through it again, until it is back. The order itself is never made: that of eight million pieces
    takes a second and 64 MB, in every epoch and on every rank.
    """
    keys = np.random.SeedSequence(seed % 2**64, spawn_key=key)
    rounds = np.random.Philox(keys).random_raw(_ROUNDS)
    half = np.uint64(-(-(count - 1).bit_length() // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    found = places.astype(np.uint64)
    outside = np.ones(len(found), dtype=np.bool_)
    while outside.any():
        left, right = found[outside] >> half, found[outside] & mask
        for one in rounds:
            left, right = right, left ^ (_mixed(right ^ one) & mask)
        found[outside] = left << half | right
        outside = found >= count
    return found.astype(np.int64)


def _mixed(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scatter bits, as SplitMix64 (Steele et al. 2014, https://doi.org/10.1145/2714064.2660195)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    return bits ^ (bits >> np.uint64(31))


def _cut(
    every: npt.NDArray[np.int32], documents: Iterable[tuple[int, int]], most: int
) -> SampleSet:
    parts = [
        every[place : min(place + most, end)]
        for start, end in documents
        for place in range(start, end - 1, most - 1)
    ]
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    spans = np.zeros((len(parts), 2), dtype=np.int32)
    spans[:, 1] = lengths
    return SampleSet(
        np.concatenate([np.empty(0, dtype=np.int32), *parts]),
        np.concatenate([[0], np.cumsum(lengths)]),
        spans,
        np.arange(len(parts) + 1, dtype=np.int64),
    )


class _Windows:
    """The windows of one source, in the order of a seed."""

    def __init__(
        self, number: int, corpus: OneCorpus, tokenizer: "Tokenizer", max_seq_length: int
    ) -> None:
        self._number, self._corpus, self._tokenizer = number, corpus, tokenizer
        self._max_seq_length = max_seq_length
        pieces = corpus.pieces
        content = pieces.content | {"streamed": _FORMAT, "skips_bad": pieces.how.skips_bad}
        self._cache = TokenCache(
            cache_root() / "pieces",
            address_of(content, tokenizer, 0),
            len(pieces),
            corpus.cache_bytes,
        )
        self.per_epoch = -(-corpus.trained_pieces // corpus.window_pieces)
        """Windows of an epoch."""
        self._order: tuple[tuple[int, int], IntArray] | None = None

    def make(self, seed: int, window: int) -> SampleSet:
        """Tokenise a window, and permute its samples."""
        pieces = self._pieces(seed, window)
        tokens = [self._cache.find(piece) for piece in pieces]
        if None in tokens:
            with self._cache.turn(window):
                tokens = [
                    found or self._cache.find(piece) or self._tokenised(piece)
                    for piece, found in zip(pieces, tokens, strict=True)
                ]
        known = [piece for piece in tokens if piece is not None]
        cut = joined if self._corpus.join_documents else separate
        samples = cut(known, self._max_seq_length)
        self._tokenizer.require_embedded(
            (int(piece.ids.max(initial=-1)) for piece in known),
            f"A document of {self._corpus.where}",
        )
        order = permutation(len(samples), seed, window, self._number, 0)
        return _permuted(samples, order)

    def _pieces(self, seed: int, window: int) -> list[int]:
        epoch, place = divmod(window, self.per_epoch)
        count, size = self._corpus.trained_pieces, self._corpus.window_pieces
        places = np.arange(place * size, min((place + 1) * size, count))
        if count > _MOST_LISTED:
            chosen = scattered(places, count, seed, epoch, self._number)
        else:
            known = self._order
            if known is None or known[0] != (seed, epoch):
                known = (seed, epoch), permutation(count, seed, epoch, self._number)
                self._order = known
            chosen = known[1][places]
        return [self._corpus.trained_piece(number) for number in chosen.tolist()]

    def _tokenised(self, piece: int) -> Tokens:
        texts = self._corpus.pieces.texts(piece)
        if not self._cache.is_as_known(piece, digest_of(texts)):
            raise UserError(
                f"{self._corpus.pieces.name_of(piece)} has changed since it was read first.\n"
                "Restore it; or, if it was meant to change, remove the directory "
                f"{self._cache.directory} and start a new run with another --out_dir."
            )
        ids: list[list[int]] = []
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            ids += self._tokenizer.encode_all(texts[start : start + _TEXTS_AT_ONCE], eos=True)
        tokens = Tokens(
            np.concatenate(
                [np.empty(0, dtype=np.int32), *(np.array(one, dtype=np.int32) for one in ids)]
            ),
            np.cumsum([len(one) for one in ids], dtype=np.int64),
        )
        self._cache.keep(piece, tokens)
        return tokens


def _permuted(samples: SampleSet, order: IntArray) -> SampleSet:
    """Samples of one span each in another order, in arrays of their own."""
    tokens, offsets, spans, *_ = samples.arrays
    lengths = np.diff(offsets)[order]
    parts = [tokens[offsets[place] : offsets[place + 1]] for place in order.tolist()]
    return SampleSet(
        np.concatenate([np.empty(0, dtype=np.int32), *parts]),
        np.concatenate([[0], np.cumsum(lengths)]),
        spans[order],
        np.arange(len(order) + 1, dtype=np.int64),
    )


class _Place:
    """Where the samples of one source go on: its windows from some number on."""

    def __init__(self, window: int, samples: int, digest: int | None) -> None:
        self.first_window = window
        self.starts = [samples]
        """Samples of the source before each window from the first on, and behind the last known."""
        self.windows: dict[int, SampleSet] = {}
        self.expected = digest
        """Of the first window; None: nobody knows."""

    def window_of(self, sample: int) -> int:
        """The newest known window that begins at a sample or before it."""
        assert sample >= self.starts[0], "earlier samples are not taken"
        return self.first_window + bisect_right(self.starts, sample) - 1

    def start(self, window: int) -> int:
        """Samples before a window."""
        return self.starts[window - self.first_window]

    @property
    def end(self) -> int:
        """The first window that nobody has made."""
        return self.first_window + len(self.starts) - 1


class CorpusStream(Stream):
    """The samples of one or several corpora."""

    def __init__(self, source: CorpusSource, tokenizer: "Tokenizer", max_seq_length: int) -> None:
        """Count the pieces; see `open_stream`."""
        self._source, self._max_seq_length = source, max_seq_length
        self._corpora = source.corpora
        self._windows = [
            _Windows(number, corpus, tokenizer, max_seq_length)
            for number, corpus in enumerate(self._corpora)
        ]
        self._shares = shares([corpus.weight for corpus in self._corpora])
        ahead = source.windows_ahead
        # Threads, which need no fork: a rank has begun to communicate before the first step.
        self._pool = ThreadPoolExecutor(ahead, "windows") if ahead else None
        self._coming: dict[tuple[int, int], Future[SampleSet]] = {}
        self._places: list[_Place] = []
        self._seed = 0
        self._blocks: dict[int, IntArray] = {}
        self._oldest = [0] * len(self._corpora)

    @cached_property
    def fingerprint(self) -> str:
        every = [
            [
                corpus.pieces.content,
                corpus.window_pieces,
                list(corpus.held_out),
                corpus.join_documents,
                corpus.weight,
            ]
            for corpus in self._corpora
        ]
        text = json.dumps([every, self._max_seq_length], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def most_tokens(self) -> int:
        return self._max_seq_length

    def begin(self, seed: int, samples: int, position: StreamPosition | None) -> None:
        if position is None:
            position = [{"window": 0, "samples": 0}] * len(self._corpora)
        self._seed, self._blocks, self._coming = seed, {}, {}
        self._places = [
            _Place(one["window"], one["samples"], one.get("digest")) for one in position
        ]
        self._oldest = [place.first_window for place in self._places]

    def position(self, samples: int) -> StreamPosition:
        found = []
        for place, sample in zip(self._places, self._before(samples), strict=True):
            window = place.window_of(sample)
            made = place.windows.get(window)
            digest = {} if made is None else {"digest": _digest(made)}
            found.append({"window": window, "samples": place.start(window), **digest})
        return found

    def epochs(self, samples: int) -> float:
        passes = []
        each = zip(self._windows, self._places, self._before(samples), strict=True)
        for windows, place, sample in each:
            window = place.window_of(sample)
            done = 0.0
            if window < place.end:
                first, last = place.start(window), place.start(window + 1)
                done = (sample - first) / max(last - first, 1)
            passes.append((window + done) / windows.per_epoch)
        return min(passes)

    def sources(self, numbers: IntArray) -> IntArray:
        return np.bincount(self._located(numbers)[0], minlength=len(self._corpora))

    def gathered(self, numbers: IntArray) -> Samples:
        of_source, within = self._located(numbers)
        sets: list[SampleSet] = []
        of_set, places = np.zeros(len(numbers), np.int32), np.zeros(len(numbers), np.int64)
        for source in np.unique(of_source).tolist():
            (chosen,) = np.nonzero(of_source == source)
            wanted = within[chosen]
            windows = self._windows_with(source, int(wanted[0]), int(wanted[-1]))
            place = self._places[source]
            for window in windows:
                first, last = place.start(window), place.start(window + 1)
                of_window = chosen[(wanted >= first) & (wanted < last)]
                if len(of_window):
                    of_set[of_window] = len(sets)
                    places[of_window] = within[of_window] - first
                    sets.append(self._window(source, window))
            self._release(source, windows[0])
        return JoinedSamples(sets, of_set, places)

    def as_trained(self, documents: SampleSet) -> SampleSet:
        if not self._corpora[0].join_documents:
            return documents
        tokens, offsets, *_ = documents.arrays
        return joined([Tokens(tokens, offsets[1:])], self._max_seq_length)

    def sequences(self, index: int) -> tuple[Sample, ...]:
        (source,), (sample,) = self._located(np.array([index]))
        *_, window = self._windows_with(int(source), int(sample), int(sample))
        first = self._places[source].start(window)
        return self._window(int(source), window).sequences(int(sample) - first)

    def _windows_with(self, source: int, first: int, last: int) -> range:
        """The windows that the samples [first, last] of a source lie in, of which all are known."""
        place, empty = self._places[source], 0
        while place.starts[-1] <= last:
            made = self._window(source, place.end)
            empty = 0 if len(made) else empty + 1
            if empty >= self._windows[source].per_epoch:
                raise UserError(
                    f"{self._corpora[source].where} holds no document with a token to learn.\n"
                    "Give files with texts."
                )
        return range(place.window_of(first), place.window_of(last) + 1)

    def _window(self, source: int, window: int) -> SampleSet:
        """A window, which is made if it is not there, while those behind it are made ahead."""
        place, windows = self._places[source], self._windows[source]
        made = place.windows.get(window)
        if made is None:
            coming = self._coming.pop((source, window), None)
            made = windows.make(self._seed, window) if coming is None else coming.result()
            if window == place.first_window and place.expected not in (None, _digest(made)):
                raise UserError(
                    f"The documents of {self._corpora[source].where} have changed since the "
                    "checkpoint, or become other tokens.\nRestore them, or start a new run with "
                    "another --out_dir."
                )
            place.windows[window] = made
            if window == place.end:
                place.starts.append(place.starts[-1] + len(made))
        for later in range(window + 1, window + 1 + self._source.windows_ahead):
            key = (source, later)
            if self._pool is not None and later not in place.windows and key not in self._coming:
                self._coming[key] = self._pool.submit(windows.make, self._seed, later)
        return made

    def _release(self, source: int, needed: int) -> None:
        """Forget windows before the one that the step before needed first."""
        kept = self._places[source].windows
        for window in [window for window in kept if window < self._oldest[source]]:
            del kept[window]
        self._oldest[source] = needed

    def _before(self, samples: int) -> list[int]:
        """Samples of each source among the first ones of a run."""
        block, rest = divmod(samples, BLOCK)
        counts = np.bincount(self._block(block)[:rest], minlength=len(self._shares))
        return [
            block * share + int(count) for share, count in zip(self._shares, counts, strict=True)
        ]

    def _located(self, numbers: IntArray) -> tuple[IntArray, IntArray]:
        """[numbers], the source of each and its number there; they are neighbours."""
        first, last = int(numbers[0]), int(numbers[-1])
        of_source = np.concatenate(
            [self._block(block) for block in range(first // BLOCK, last // BLOCK + 1)]
        )[first % BLOCK :][: len(numbers)]
        within = np.zeros(len(numbers), dtype=np.int64)
        for source, before in enumerate(self._before(first)):
            (chosen,) = np.nonzero(of_source == source)
            within[chosen] = before + np.arange(len(chosen))
        return of_source, within

    def _block(self, number: int) -> IntArray:
        """[samples of a block], the source of each."""
        if number not in self._blocks:
            while len(self._blocks) > 8:
                del self._blocks[next(iter(self._blocks))]
            of_source = np.repeat(np.arange(len(self._shares)), self._shares)
            self._blocks[number] = of_source[permutation(BLOCK, self._seed, number)]
        return self._blocks[number]


def shares(weights: Sequence[float]) -> list[int]:
    """Samples of each source in a block: those of its weight, rounded, the largest rests up."""
    exact = [BLOCK * weight / sum(weights) for weight in weights]
    found = [int(share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda source: found[source] - exact[source])
    for source in by_rest[: BLOCK - sum(found)]:
        found[source] += 1
    return found


def _digest(samples: SampleSet) -> int:
    """Digest of a window, as a number of JSON that no reader rounds."""
    return int(samples.fingerprint[:12], 16)
