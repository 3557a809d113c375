"""Attention of transformers' models: each sequence by itself, padded, in a row, or from a cache.

Transformers calls the attention that a model's settings name, and makes no masks for an attention
that is not its own. Here the sequences take the place of a mask.
"""

from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn
from torch import Tensor
from transformers import AttentionInterface

from ftkit.models.bodies.attention import Scores, Sequences, attend, attend_to_cache

ATTENTION = "ftkit"
"""Name by which transformers finds the attention below."""


@dataclass
class KeyValueCache:
    """Keys and values of all layers by the positions of their tokens."""

    shape: tuple[int, int]
    """Number of sequences, and of positions in each."""
    positions: Tensor | None = None
    """[sequences, tokens], of the tokens in the current pass."""
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """[sequences, groups, positions, size] each, by the index of the layer."""

    def extended(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of the current pass and return all of a layer.

        Args:
            layer: its index.
            keys: [sequences, groups, tokens, size].
            values: [sequences, groups, tokens, value size].
        """
        assert self.positions is not None
        # Allocated in the first pass, when shapes and dtype of the layer are known.
        if layer not in self.layers:
            count, length = self.shape
            self.layers[layer] = (
                keys.new_zeros(count, keys.size(1), length, keys.size(3)),
                values.new_zeros(count, values.size(1), length, values.size(3)),
            )
        for kept, new in zip(self.layers[layer], (keys, values), strict=True):
            places = self.positions[:, None, :, None].expand_as(new)
            kept.scatter_(2, places, new.to(kept.dtype))
        return self.layers[layer]


@dataclass
class Attended:
    """State that all attention layers of a model share."""

    sequences: Sequences | None = None
    """Tokens that belong together, if there is no cache."""
    cache: KeyValueCache | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        """Attention of one layer.

        Args:
            layer: its index.
            q: [batch, heads, tokens, size].
            k: [batch, groups, tokens, size].
            v: [batch, groups, tokens, value size].
            scores: how products become weights.

        Returns:
            [batch, tokens, heads, value size].
        """
        q, k = q.to(v.dtype), k.to(v.dtype)  # rotation may return float32
        if self.cache is not None:
            assert self.cache.positions is not None
            keys, values = self.cache.extended(layer, k, v)
            return attend_to_cache(q, keys, values, self.cache.positions, scores)
        assert self.sequences is not None
        batch = len(q)
        q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))
        return attend(q, k, v, self.sequences, scores).unflatten(0, (batch, -1))


def follow(model: nn.Module, attended: Attended) -> None:
    """Make a model use the attention below.

    Args:
        model: of transformers, with a replaceable attention.
        attended: shared by its layers; it changes with each micro-batch.
    """
    model.config._attn_implementation = ATTENTION  # type: ignore[union-attr]  # a PreTrainedModel
    for module in model.modules():
        # Transformers' attention layers; other modules with an index never look at it.
        if hasattr(module, "layer_idx"):
            module.attended = attended  # type: ignore[assignment]  # no module


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention function for transformers: it takes [batch, heads, tokens, size] each.

    It returns [batch, tokens, heads, value size], and None instead of the weights.
    """
    assert attention_mask is None, "transformers makes masks for its own attention alone"
    attended: Attended = module.attended
    scores = Scores(
        scale=query.size(-1) ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        window=_window(module, sliding_window),
        sinks=s_aux,
    )
    return attended.attend(module.layer_idx, query, key, value, scores), None


def _window(module: Any, given: int | None) -> int | None:
    """Window of a layer, which depends on its kind if layers have kinds."""
    kinds = getattr(module.config, "layer_types", None)
    if kinds is not None and kinds[module.layer_idx] == "full_attention":
        return None
    return given or (None if kinds is None else module.config.sliding_window)


AttentionInterface.register(ATTENTION, _attention)
