"""GPT-NeoX's index of a corpus: which tokens each of its samples has, and their order.

All documents of all epochs are shuffled together and joined. A sample is the next `seq_length`
tokens of this, and the one behind them, with which the next sample begins. Samples are shuffled
too. Both draw from one generator of numpy whose numbers never change again, so that the order is
GPT-NeoX's own (megatron/data/gpt2_dataset.py and helpers.cpp in EleutherAI/gpt-neox).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_AT_ONCE = 2**22
"""Samples that are placed at once: arrays of all of them would take gigabytes more."""
_MARGIN = 1.005
"""Samples of a corpus in a mixture are made so many times over: shares are met only nearly."""


class SampleIndex(NamedTuple):
    """The three arrays of GPT-NeoX's index, as it keeps them in files."""

    documents: npt.NDArray[Any]
    """[documents of all epochs], the number of each in the corpus."""
    samples: npt.NDArray[Any]
    """[samples + 1, 2], where each one's first token is: the place among `documents`, and the place
    in that document."""
    order: npt.NDArray[Any]
    """[samples], the number of each in `samples`, in the order in which they are taken."""

    @property
    def taken(self) -> int:
        """Samples that GPT-NeoX says there are: it never counts the last one."""
        return len(self.order) - 1

    def within(self, places: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Places in the order, for some that may lie behind its end.

        A mixture may ask for more samples of a corpus than there are. GPT-NeoX then takes the place
        modulo those it counts; the last one, which it does not count, is there.
        """
        places = np.asarray(places, dtype=np.int64)
        return np.where(places < len(self.order), places, places % self.taken)

    def fits(self, sizes: npt.NDArray[np.int32], documents: range) -> bool:
        """Whether arrays that were read can be an index of documents.

        Args:
            sizes: tokens of each document of the corpus.
            documents: those that it has to be of.
        """
        shapes = self.documents.ndim, self.samples.shape, self.order.shape
        if shapes != (1, (len(self.order) + 1, 2), (len(self.order),)) or self.taken < 1:
            return False
        if any(array.dtype.kind not in "iu" for array in self):
            return False
        places, offsets = self.samples[:, 0], self.samples[:, 1]
        if not (
            _are_within(self.documents, documents)
            and _are_within(places, range(len(self.documents)))
            and _are_within(self.order, range(len(self.order)))
        ):
            return False
        # The very first one may be a document without tokens, as none is passed over there.
        follow = offsets[1:] < sizes[self.documents[places[1:]]]
        return int(offsets.min()) >= 0 and offsets[0] == 0 and bool(follow.all())


def _are_within(numbers: npt.NDArray[Any], bounds: range) -> bool:
    return bounds.start <= int(numbers.min()) and int(numbers.max()) < bounds.stop


def make_index(
    sizes: npt.NDArray[np.int32],
    documents: range,
    *,
    samples: int | None,
    seq_length: int,
    seed: int,
) -> SampleIndex | None:
    """Make the index of some documents of a corpus.

    Args:
        sizes: tokens of each document of the corpus.
        documents: those that samples are made of.
        samples: that are needed; None: one epoch.
        seq_length: tokens of a sample that a model is given.
        seed: of the generator.

    Returns:
        None: the documents have too few tokens for two samples.
    """
    tokens = int(sizes[documents.start : documents.stop].sum(dtype=np.int64))
    if not tokens:
        return None
    # The least number of epochs in which the samples and the one token behind the last fit.
    epochs = 1 if samples is None else max(1, -(-(samples * seq_length + 1) // tokens))
    count = (epochs * tokens - 1) // seq_length
    if count < 2:
        return None
    generator = np.random.RandomState(seed)
    order_of_documents = np.tile(np.arange(documents.start, documents.stop, dtype=np.int32), epochs)
    generator.shuffle(order_of_documents)
    # The types of GPT-NeoX's files, which are half as large for most corpora.
    placed = np.empty(
        (count + 1, 2), dtype=np.int32 if 2 * (count + 1) < np.iinfo(np.int32).max else np.int64
    )
    ends = np.cumsum(sizes[order_of_documents], dtype=np.int64)
    for first in range(0, count + 1, _AT_ONCE):
        at = np.arange(first, min(first + _AT_ONCE, count + 1), dtype=np.int64) * seq_length
        places = np.searchsorted(ends, at, side="right")
        placed[first : first + len(at), 0] = places
        placed[first : first + len(at), 1] = at - (ends[places] - sizes[order_of_documents[places]])
    placed[0] = 0
    order = np.arange(count, dtype=np.uint32 if count < np.iinfo(np.uint32).max - 1 else np.int64)
    generator.shuffle(order)
    return SampleIndex(order_of_documents, placed, order)


def split_documents(shares: Sequence[float], documents: int) -> tuple[range, range, range]:
    """Divide the documents of a corpus into those to train on, to validate on and to test on.

    Args:
        shares: of each, at most three, relative to their sum.
        documents: of the corpus.
    """
    given = [*shares, 0.0, 0.0][:3]
    total = sum(given)
    counts = [round(share / total * documents) for share in given]
    ends = np.cumsum(counts)
    # What rounding has added or taken away is made up for by the first part.
    first, second, last = (max(int(end), 0) for end in ends - (ends[-1] - documents))
    return range(first), range(first, second), range(second, last)


def counts_of_mixture(weights: Sequence[float], samples: int) -> list[int]:
    """Samples that are made of each corpus of a mixture."""
    total = sum(weights)
    return [math.ceil(samples * (weight / total) * _MARGIN) for weight in weights]


def mix(weights: Sequence[float], size: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Mix corpora: each sample is of the one that is furthest behind its share.

    Rounded as GPT-NeoX's code for x86 does, without fused products.

    Args:
        weights: of the corpora, relative to their sum.
        size: samples of the mixture.

    Returns:
        [size] the number of the corpus of each sample, and its place among those of the corpus.
    """
    normalised = [weight / sum(weights) for weight in weights]
    # Once more, as there: numpy adds up in another order.
    of_each = np.array(normalised, dtype=np.float64)
    shares: list[float] = (of_each / of_each.sum()).tolist()
    taken = [0] * len(shares)
    corpora, places = np.empty(size, dtype=np.uint8), np.empty(size, dtype=np.int64)
    for number in range(size):
        at = float(max(number, 1))
        behind = [share * at - count for share, count in zip(shares, taken, strict=True)]
        corpus = behind.index(max(behind))  # of equal ones the first
        corpora[number], places[number] = corpus, taken[corpus]
        taken[corpus] += 1
    return corpora, places
