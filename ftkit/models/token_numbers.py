"""Random numbers of tokens, from counters instead of a generator, and dropout by them.

The numbers of a token are integer functions of seed, step, sample and place in the sample: they are
the same on any device, rank and strategy, in any micro-batch, and when a block is computed again.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn as nn
from torch import Tensor

from ftkit.utils.accelerators.kinds import HOST_KIND, device_kind
from ftkit.utils.accelerators.use import pinned

ONES = 2**32 - 1
"""The mask of 32 bits."""
_AT_ONCE_ON_HOST, _AT_ONCE = 2**18, 2**25
"""Numbers of a mask made at once, of 4 bytes: on CPUs so that they stay in a core's cache, else so
that their memory is bounded (128 MiB) and a GPU launches few kernels."""

Integers = TypeVar("Integers", npt.NDArray[np.int64], Tensor)


class TokenNumbers:
    """A number of each token of the micro-batch that a model is trained on."""

    def __init__(self) -> None:
        self.hashes: Tensor | None = None
        """[tokens, 1] int32, of the rows that are computed; None: they are of no known tokens."""
        self.spans: list[tuple[int, int, int]] = []
        """First row, last row + 1 and tokens of each sample in the micro-batch, without fillers; of
        one that other ranks have too, the rows here."""
        self.dropouts: list[TokenDropout] = []
        """Layers that use the numbers."""
        self.is_used = False
        """Whether something uses the numbers; else there are none."""
        self.device_kind: str | None = None
        """Kind of device for which masks are made in pieces; None: that of the tensors."""
        self.seed = 0
        """Of the run."""

    def prepare(
        self, seed: int, device: torch.device, seed_name: Callable[[str], str] = str
    ) -> None:
        """Make the numbers of channels, once before the first micro-batch.

        Args:
            seed: of the run.
            device: of the model.
            seed_name: gives the name by which a layer's numbers are seeded, from ours.
        """
        self.seed = seed
        if not self.dropouts:
            return
        # In one piece of memory, and in one copy.
        host = np.concatenate(
            [hashes(f"{seed} dropout {seed_name(each.name)}", each.width) for each in self.dropouts]
        )
        # Odd, so that multiplying by them is a permutation of the integers of 32 bits.
        tables = _on(device, host | 1).split([each.width for each in self.dropouts])
        for each, table in zip(self.dropouts, tables, strict=True):
            each.channels = table

    @contextmanager
    def of(self, step: int, batch: dict[str, Any]) -> Iterator[None]:
        """Context in which a micro-batch is computed, forward and backward.

        Args:
            step: optimizer steps done before.
            batch: from `ftkit.data.samples.loader.collate`, on its device, with sample numbers.
        """
        if not self.is_used:
            yield
            return
        input_ids, lengths, row = batch["input_ids"], batch["lengths"], batch["sequence_lengths"]
        # In a row, samples follow each other; padded ones begin at equal distances.
        apart = 0 if row is not None else input_ids.shape[1]
        # Of the whole row, of which this rank may have a piece.
        of_tokens = np.zeros((input_ids.numel() if row is None else sum(row), 1), dtype=np.int64)
        first = batch["first"]
        end = first + input_ids.numel()
        start = 0
        for number, length in zip(batch["numbers"], lengths, strict=True):
            # Samples that only fill a micro-batch have no number: nothing is learned of them.
            if number >= 0:
                of_sample = hashes(f"{self.seed} {step} {number}", length)
                of_tokens[start : start + length, 0] = of_sample
                if first < start + length and start < end:
                    here = max(start, first) - first, min(start + length, end) - first
                    self.spans.append((*here, length))
            start += apart or length
        self.hashes = _on(input_ids.device, of_tokens[first:end])
        try:
            yield
        finally:
            self.hashes = None
            self.spans.clear()

    @contextmanager
    def within(self, found: Tensor | None) -> Iterator[None]:
        """Context in which other rows are computed, whose numbers are [rows, 1]."""
        before, self.hashes = self.hashes, found
        try:
            yield
        finally:
            self.hashes = before

    def at(self, indices: Tensor) -> Tensor | None:
        """Return the numbers of some tokens, [n, 1], by their indices; None: there are none."""
        return None if self.hashes is None else self.hashes.index_select(0, indices)


class TokenDropout(nn.Dropout):
    """Dropout of the inputs of a layer, whose masks belong to the tokens and not to a generator."""

    def __init__(self, p: float, name: str, width: int, tokens: TokenNumbers) -> None:
        """Register a layer among those that use the numbers of tokens.

        Args:
            p: share of the numbers that is dropped.
            name: our name of the layer; each has masks of its own.
            width: of the input.
            tokens: of the model.
        """
        super().__init__(p)
        self.name, self.width = name, width
        self._tokens = tokens
        self.channels = torch.empty(0, dtype=torch.int32, device="meta")
        """[width] int32, odd, once they are prepared."""
        self._least = math.floor(p * 2**32) - 2**31
        """Integers of 32 bits below it are dropped."""
        tokens.dropouts.append(self)
        tokens.is_used = True

    def forward(self, x: Tensor) -> Tensor:
        """Drop numbers of [..., width] and scale the others, in training alone."""
        if not self.training:
            return x
        return torch.where(self.kept(x), x / (1 - self.p), 0)

    def kept(self, x: Tensor) -> Tensor:
        """Return the mask of an input: like x, bool, False for what is dropped.

        Args:
            x: [..., width], whose rows are those of the tokens.
        """
        of_rows = self._tokens.hashes
        if of_rows is None or len(of_rows) * self.width != x.numel():
            # Rows of no known tokens, such as those of a layer that is called by itself.
            return torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - self.p)
        # The high bits of a product of two random numbers, one of them odd: each pair of places is
        # dropped independently of each other (multiply-shift hashing, Dietzfelbinger et al. 1997).
        # Products keep their low 32 bits on every device, as the instructions of CPUs and GPUs do.
        kind = self._tokens.device_kind or x.device.type
        if torch.compiler.is_compiling() or device_kind(kind).compiles_shapes:
            # A compiler makes one kernel of it, for any number of rows.
            return (of_rows * self.channels >= self._least).view_as(x)
        at_once = _AT_ONCE_ON_HOST if kind == HOST_KIND else _AT_ONCE
        rows = max(1, at_once // self.width)
        kept = torch.empty(len(of_rows), self.width, dtype=torch.bool, device=x.device)
        numbers = of_rows.new_empty(min(rows, len(of_rows)), self.width)
        for some, result in zip(of_rows.split(rows), kept.split(rows), strict=True):
            of_some = numbers[: len(some)]
            torch.mul(some, self.channels, out=of_some)
            torch.ge(of_some, self._least, out=result)
        return kept.view_as(x)


def dropped(x: Tensor, kept: Tensor, scale: float) -> Tensor:
    """Set numbers to zero where the mask is not set; scale the others, but not on CPUs."""
    if x.device.type == "cpu":
        return _masked(x, kept)
    # One kernel that reads both once; a mask of the numbers' type would be written and read, too.
    return torch.ops.aten.native_dropout_backward(x, kept, scale)


def _masked(x: Tensor, kept: Tensor) -> Tensor:
    """Set numbers to zero where the mask is not set."""
    # CPUs take several times as long for a product of two dtypes.
    return kept.view(torch.uint8).to(x.dtype).mul_(x)


def _on(device: torch.device, integers: npt.NDArray[np.int64]) -> Tensor:
    """Copy integers of 32 bits to a device, as int32, without waiting for it."""
    host = pinned(torch.from_numpy(integers.astype(np.uint32).view(np.int32)), device)
    # Memory of torch's own also on CPUs, so that it is counted.
    found = torch.empty(host.shape, dtype=torch.int32, device=device)
    return found.copy_(host, non_blocking=True)


def hashes(name: str, count: int) -> npt.NDArray[np.int64]:
    """Return `count` integers of 32 bits that look random, determined by a name."""
    first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return mixed(first + np.arange(count, dtype=np.int64) & ONES)


def mixed(integers: Integers) -> Integers:
    """Permute the integers of 32 bits so that each bit of the result depends on all bits."""
    # The multipliers, of https://github.com/skeeto/hash-prospector, have 31 bits, so that no
    # product has more than 63.
    for shift, factor in ((16, 0x7FEB352D), (15, 0x21F0AAAD)):
        integers = (integers ^ integers >> shift) * factor & ONES
    return integers ^ integers >> 16
