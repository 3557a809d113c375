"""Duplicates: samples with the tokens of another one, inside train and between train and val."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ftkit.data.samples.sample_set import SampleSet

MOST_EXAMPLES = 2
_PROBES = 16
"""Tokens of a sample that tell most samples apart."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

RecordPlace = tuple[int, int]
"""Number of the source, and of the sample in it."""


@dataclass(frozen=True, kw_only=True)
class FoundDuplicates:
    """How many there are, and where a few of them are."""

    train: int
    """Training samples that repeat an earlier one."""
    val: int
    """Validation samples that repeat an earlier one."""
    val_in_train: int
    """Validation samples that are trained on."""
    train_places: tuple[RecordPlace, ...]
    """Of some of the first."""
    val_in_train_places: tuple[RecordPlace, ...]
    """Of some of the last."""


def find_duplicates(train: Sequence[SampleSet], val: Sequence[SampleSet]) -> FoundDuplicates:
    """Find samples with the same tokens, whatever is trained of them.

    A few tokens of each tell nearly all samples apart; only what they do not is read in full. So a
    million samples take about a second.

    Args:
        train: samples of each source.
        val: the same for validation.
    """
    keys = np.concatenate([_keys(samples) for samples in (*train, *val)])
    _, group, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    alike = sizes[group] > 1
    seen: set[bytes] = set()
    repeats: list[RecordPlace] = []
    shared: list[RecordPlace] = []
    seen_in_val: set[bytes] = set()
    val_repeats = 0
    start = 0
    for number, samples in enumerate((*train, *val)):
        is_val = number >= len(train)
        tokens, offsets = samples.arrays.tokens, samples.arrays.offsets
        for index in np.flatnonzero(alike[start : start + len(samples)]).tolist():
            ids = tokens[offsets[index] : offsets[index + 1]]
            digest = hashlib.blake2b(ids.data, digest_size=16).digest()
            if not is_val:
                if digest in seen:
                    repeats.append((number, index))
                seen.add(digest)
                continue
            if digest in seen:
                shared.append((number - len(train), index))
            val_repeats += digest in seen_in_val
            seen_in_val.add(digest)
        start += len(samples)
    return FoundDuplicates(
        train=len(repeats),
        val=val_repeats,
        val_in_train=len(shared),
        train_places=tuple(repeats[:MOST_EXAMPLES]),
        val_in_train_places=tuple(shared[:MOST_EXAMPLES]),
    )


def _keys(samples: SampleSet) -> npt.NDArray[np.uint64]:
    """[samples], a number of each, the same for the same tokens."""
    tokens, offsets = samples.arrays.tokens, samples.arrays.offsets
    starts, sizes = offsets[:-1], np.diff(offsets)
    keys = sizes.astype(np.uint64)
    for probe in range(_PROBES):
        at = starts + (sizes - 1) * probe // (_PROBES - 1)
        keys = (keys ^ tokens[at].astype(np.uint64)) * _FACTOR
        keys ^= keys >> np.uint64(29)
    return keys
