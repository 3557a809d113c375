"""LitGPT's attention with three projections, and with sequences in a row."""

import math

import torch
import torch.nn as nn
from litgpt.config import Config
from litgpt.model import CausalSelfAttention, apply_rope, apply_rope_interleave
from torch import Tensor

from ftkit.models.bodies.attention import AttentionLayer, Scores, Sequences


class QKV(nn.Module):
    """Query, key and value as three layers, so that adapters are those of other libraries."""

    def __init__(self, config: Config, *, bias: bool) -> None:
        super().__init__()
        assert config.head_size is not None and config.n_query_groups is not None
        width = config.n_embd
        self.q_proj = nn.Linear(width, config.n_head * config.head_size, bias=bias)
        self.k_proj = nn.Linear(width, config.n_query_groups * config.head_size, bias=bias)
        self.v_proj = nn.Linear(width, config.n_query_groups * config.head_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """As litgpt's fused layer, which it stands in for where a key-value cache is used."""
        return torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=-1)


class Attention(CausalSelfAttention, AttentionLayer):  # type: ignore[misc]  # litgpt has no types
    """litgpt's attention with three projections, and with sequences in a row."""

    def __init__(self, config: Config, block_idx: int) -> None:
        super().__init__(config, block_idx)
        self.qkv = QKV(config, bias=config.bias or config.attn_bias)
        self.rotation = "pairs" if config.rope_interleave else "halves"

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | Sequences | None = None,
        input_pos: Tensor | None = None,
        input_pos_maxp1: int | None = None,
    ) -> Tensor:
        """What each token takes from those before it in its sequence.

        Args:
            x: [batch, tokens, width].
            cos: [1, tokens, rotated], the rotary table at the tokens' positions.
            sin: likewise.
            mask: the sequences in batch * tokens; with a key-value cache, litgpt's mask.
            input_pos: positions in the key-value cache; None: it is not used.
            input_pos_maxp1: see litgpt.
        """
        if not isinstance(mask, Sequences):
            cached: Tensor = super().forward(x, cos, sin, mask, input_pos, input_pos_maxp1)
            return cached
        heads = self._heads(x, cos, sin)
        scale = self.mscale**2 / math.sqrt(
            self.config.attention_scores_scalar or self.config.head_size
        )
        scores = Scores(scale, softcap=self.config.attention_logit_softcapping)
        found = self.attend(*heads, mask, scores)
        result: Tensor = self.proj(found.reshape(*x.shape[:2], -1))
        return result

    def _heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, [batch * tokens, heads, head size] each."""
        q, k, v = self.qkv.q_proj(x), self.qkv.k_proj(x), self.qkv.v_proj(x)
        kind = self.config.norm_qk_type if self.config.norm_qk else None
        if kind == "olmo2":
            q, k = self.norm_q(q), self.norm_k(k)
        q, k, v = (part.unflatten(-1, (-1, self.config.head_size)) for part in (q, k, v))
        if kind == "default":
            q, k = self.norm_q(q), self.norm_k(k)
        if self.rotate is not None:
            q, k = self.rotate(q, k, cos, sin)
        else:
            q, k = self._rotated(q, cos, sin), self._rotated(k, cos, sin)
        return q.flatten(0, 1).to(v.dtype), k.flatten(0, 1).to(v.dtype), v.flatten(0, 1)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, tokens, heads, head size], turned by the tokens' positions."""
        rotate = apply_rope if self.rotation == "halves" else apply_rope_interleave
        count = self.config.rope_n_elem
        turned: Tensor = rotate(x[..., :count].transpose(1, 2), cos, sin).transpose(1, 2)
        return turned if count == x.size(-1) else torch.cat((turned, x[..., count:]), dim=-1)
