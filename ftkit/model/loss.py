"""The loss: the output layer with its cross-entropy, in chunks of logits."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGITS_CHUNK_ELEMENTS = 2**25
"""Logits held at once, as a number of elements (128 MiB in float32)."""


def step_share(total: Tensor, label_tokens: Tensor | int) -> Tensor:
    """What a micro-batch adds to the loss of its step, in nats per label token.

    The loss of a step is the sum of its token losses divided by its label tokens: so it is the
    same however the step is split.

    Args:
        total: summed loss of the micro-batch, in nats.
        label_tokens: of the whole step, over all ranks and micro-steps.
    """
    return total / label_tokens


class Head(nn.Module):
    """The output layer and the loss in one, so that the logits of a batch never exist at once."""

    def __init__(self, lm_head: nn.Module, softcap: float | None) -> None:
        super().__init__()
        self.lm_head = lm_head
        self.softcap = softcap

    def forward(self, hidden: Tensor, label_indices: Tensor, labels: Tensor | None) -> Tensor:
        """Logits at some positions, or the summed loss there.

        Args:
            hidden: [batch, sequence, width].
            label_indices: [n], indices into the flattened batch and sequence.
            labels: [n], the token that follows each position; None asks for the logits.

        Returns:
            [n, vocabulary] logits in float32, or the sum of the n cross-entropies in nats.
        """
        rows = hidden.flatten(0, 1).index_select(0, label_indices)
        if labels is None:
            return self._logits(rows)
        chunk = max(1, LOGITS_CHUNK_ELEMENTS // self._vocabulary)
        pieces = list(zip(rows.split(chunk), labels.split(chunk), strict=True))
        if len(pieces) == 1:
            return self._loss(rows, labels)
        losses = [checkpoint(self._loss, *piece, use_reentrant=False) for piece in pieces]
        return torch.stack(losses).sum()

    @property
    def _vocabulary(self) -> int:
        out_features = self.lm_head.out_features
        assert isinstance(out_features, int)
        return out_features

    def _logits(self, rows: Tensor) -> Tensor:
        logits: Tensor = self.lm_head(rows).float()
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits

    def _loss(self, rows: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self._logits(rows), labels, reduction="sum")
