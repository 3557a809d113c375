"""Attention of transformers' models: each sequence by itself, padded, in a row, or from a cache.

Transformers calls the attention that a model's settings name, and makes no masks for one that it
does not know itself. What a mask would say follows from the sequences here.
"""

from dataclasses import dataclass, field
from typing import Any

import torch.nn as nn
from torch import Tensor
from transformers import AttentionInterface

from ftkit.models.bodies.attention import Scores, Sequences, attend, attend_to_cache

ATTENTION = "ftkit"
"""By which name transformers finds the attention below."""


@dataclass
class KeyValueCache:
    """Keys and values of all layers by the positions of their tokens."""

    shape: tuple[int, int]
    """Sequences, and positions of each."""
    positions: Tensor | None = None
    """[sequences, tokens], those of the tokens that are computed now."""
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """[sequences, groups, positions, size] each, by the number of the layer."""

    def extended(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, with those of the tokens that are computed now.

        Args:
            layer: its number.
            keys: [sequences, groups, tokens, size].
            values: [sequences, groups, tokens, value size].
        """
        assert self.positions is not None
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
    """What the attention layers of a model see: the same for all of them."""

    sequences: Sequences | None = None
    """Which tokens belong together, where there is no cache."""
    cache: KeyValueCache | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        """Attention of one layer.

        Args:
            layer: its number.
            q: [batch, heads, tokens, size].
            k: [batch, groups, tokens, size].
            v: [batch, groups, tokens, value size].
            scores: how they become weights.

        Returns:
            [batch, tokens, heads, value size].
        """
        q, k = q.to(v.dtype), k.to(v.dtype)  # rotation may have made them float32
        if self.cache is not None:
            assert self.cache.positions is not None
            keys, values = self.cache.extended(layer, k, v)
            return attend_to_cache(q, keys, values, self.cache.positions, scores)
        assert self.sequences is not None
        batch = len(q)
        q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))
        return attend(q, k, v, self.sequences, scores).unflatten(0, (batch, -1))


def follow(model: nn.Module, attended: Attended) -> None:
    """Have a model use the attention below, all of whose layers look at what they see there.

    Args:
        model: of transformers, whose attention is an interface.
        attended: which changes with each micro-batch.
    """
    model.config._attn_implementation = ATTENTION  # type: ignore[union-attr]  # a PreTrainedModel
    for module in model.modules():
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
    """What transformers calls; [batch, heads, tokens, size] each.

    Returns:
        [batch, tokens, heads, value size], and None instead of the weights.
    """
    assert attention_mask is None, "masks are made for transformers' own attention alone"
    attended: Attended = module.attended
    scores = Scores(
        scale=query.size(-1) ** -0.5 if scaling is None else scaling,
        softcap=softcap,
        window=_window(module, sliding_window),
        sinks=s_aux,
    )
    return attended.attend(module.layer_idx, query, key, value, scores), None


def _window(module: Any, given: int | None) -> int | None:
    """Of a layer: as its kind says, where layers have kinds."""
    kinds = getattr(module.config, "layer_types", None)
    if kinds is not None and kinds[module.layer_idx] == "full_attention":
        return None
    return given or (None if kinds is None else module.config.sliding_window)


AttentionInterface.register(ATTENTION, _attention)
