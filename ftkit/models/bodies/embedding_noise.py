"""NEFTune: uniform noise on the embeddings in training, from counters instead of a generator.

Jain et al. 2023, https://arxiv.org/abs/2310.05914. Each number is an integer function of that of
its token (`ftkit.models.token_numbers`) and of its channel.
"""

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from ftkit.models.token_numbers import ONES, TokenNumbers, hashes, mixed

_NUMBERS_AT_ONCE = 2**20
"""Numbers of noise made at once: a few integer tensors of 8 MiB, which fit caches."""


class EmbeddingNoise:
    """Adds noise to the output of an embedding while a micro-batch of training is computed."""

    def __init__(self, embedding: nn.Module, alpha: float, tokens: TokenNumbers) -> None:
        """Register a hook on an embedding.

        Args:
            embedding: its output is [batch, sequence, width].
            alpha: the noise of a sample lies between -a and a, a = alpha / sqrt(tokens * width).
            tokens: of the model; outside of its micro-batches there is no noise.
        """
        self._alpha, self._tokens = alpha, tokens
        tokens.is_used = True
        embedding.register_forward_hook(self._add)

    def _add(self, _: nn.Module, __: Any, output: Tensor) -> Tensor | None:
        of_tokens = self._tokens.hashes
        if of_tokens is None:
            return None
        width, device = output.shape[-1], output.device
        on_host = torch.zeros(len(of_tokens), 1, dtype=torch.float32, device="cpu")
        for start, end, length in self._tokens.spans:
            on_host[start:end] = self._alpha / length**0.5
        scales = on_host.to(device) / width**0.5
        counters = of_tokens.long() & ONES
        channels = torch.from_numpy(hashes(f"{self._tokens.seed} channels", width)).to(device)
        noise = torch.empty(len(scales), width, dtype=output.dtype, device=device)
        rows = max(1, _NUMBERS_AT_ONCE // width)
        for first in range(0, len(scales), rows):
            part = slice(first, first + rows)
            bits = mixed(counters[part] ^ channels)
            # 24 bits, which float32 holds exactly: every device computes the same number in [-1,
            # 1).
            noise[part] = ((bits >> 8).float() * 2.0**-23 - 1) * scales[part]
        return output + noise.view_as(output)
