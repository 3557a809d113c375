"""NEFTune: uniform noise on the embeddings in training, from counters instead of a generator.

Jain et al. 2023, https://arxiv.org/abs/2310.05914. Each number is an integer function of seed,
step, sample, place in the sample and channel: a sample has the same noise on any device, rank,
strategy and micro-batch.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn as nn
from torch import Tensor

# The mask of 32 bits.
_ONES = 2**32 - 1
_NUMBERS_AT_ONCE = 2**20
"""Numbers of noise made at once: a few integer tensors of 8 MiB, which fit caches."""

Integers = TypeVar("Integers", npt.NDArray[np.int64], Tensor)


class EmbeddingNoise:
    """Adds noise to the output of an embedding while a micro-batch of training is computed."""

    def __init__(self, embedding: nn.Module, alpha: float, seed: int) -> None:
        """Register a hook on an embedding.

        Args:
            embedding: its output is [batch, sequence, width].
            alpha: the noise of a sample lies between -a and a, a = alpha / sqrt(tokens * width).
            seed: of the run.
        """
        self._alpha, self._seed = alpha, seed
        self._counters: Tensor | None = None
        """[tokens, 1] int64, of the current micro-batch."""
        self._scales: Tensor | None = None
        """[tokens, 1] float32, of width 1; 0 where there is no sample."""
        embedding.register_forward_hook(self._add)

    @contextmanager
    def of(self, step: int, batch: dict[str, Any]) -> Iterator[None]:
        """Add noise in this context.

        Args:
            step: optimizer steps done before.
            batch: from `ftkit.data.samples.loader.collate`, on its device, with sample numbers.
        """
        input_ids, lengths = batch["input_ids"], batch["lengths"]
        # In a row, samples follow each other; padded ones begin at equal distances.
        apart = 0 if batch["sequence_lengths"] is not None else input_ids.shape[1]
        counters = np.zeros((input_ids.numel(), 1), dtype=np.int64)
        scales = np.zeros((input_ids.numel(), 1), dtype=np.float32)
        start = 0
        for number, length in zip(batch["numbers"], lengths, strict=True):
            # Samples that only fill a micro-batch have no number, and get no noise.
            if number >= 0:
                end = start + length
                counters[start:end, 0] = _counters(f"{self._seed} {step} {number}", length)
                scales[start:end] = self._alpha / length**0.5
            start += apart or length
        self._counters = torch.from_numpy(counters).to(input_ids.device)
        self._scales = torch.from_numpy(scales).to(input_ids.device)
        try:
            yield
        finally:
            self._counters = self._scales = None

    def _add(self, _: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        if self._counters is None or self._scales is None:
            return None
        width = output.shape[-1]
        channels = torch.from_numpy(_counters(f"{self._seed} channels", width)).to(output.device)
        scales = self._scales / width**0.5
        noise = torch.empty(len(scales), width, dtype=output.dtype, device=output.device)
        rows = max(1, _NUMBERS_AT_ONCE // width)
        for first in range(0, len(scales), rows):
            part = slice(first, first + rows)
            bits = _mixed(self._counters[part] ^ channels)
            # 24 bits, which float32 holds exactly: every device computes the same number in [-1,
            # 1).
            noise[part] = ((bits >> 8).float() * 2.0**-23 - 1) * scales[part]
        return output + noise.view_as(output)


def _counters(name: str, count: int) -> npt.NDArray[np.int64]:
    """Return `count` integers of 32 bits that look random, determined by a name."""
    first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    return _mixed(first + np.arange(count, dtype=np.int64) & _ONES)


def _mixed(integers: Integers) -> Integers:
    """Permute the integers of 32 bits so that each bit of the result depends on all bits."""
    # The multipliers, of https://github.com/skeeto/hash-prospector, have 31 bits, so that no
    # product has more than 63.
    for shift, factor in ((16, 0x7FEB352D), (15, 0x21F0AAAD)):
        integers = (integers ^ integers >> shift) * factor & _ONES
    return integers ^ integers >> 16
