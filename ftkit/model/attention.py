"""Causal self-attention over the sequences of a micro-batch, each by itself, padded or in a row."""

import inspect
import math
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Literal

import litgpt
import torch
import torch.nn as nn
import torch.nn.functional as F
from litgpt.model import CausalSelfAttention, apply_rope, apply_rope_interleave, do_softcapping
from torch import Tensor

from ftkit.config.plan import Plan
from ftkit.errors import UserError

AttentionPath = Literal["varlen", "sdpa per sequence", "padded"]
"""How attention sees a micro-batch: its tokens in a row, which torch's attention over variable
lengths takes whole, or in a row whose sequences are taken one by one, or padded to a rectangle."""

LARGEST_FLASH_HEAD = 256
"""Numbers in a head of flash attention, at most; a multiple of 8."""


def attention_path(config: litgpt.Config, plan: Plan) -> AttentionPath:
    """How attention sees the micro-batches of a plan.

    Without `train.padding_free`, a row is chosen where it is faster: on CPUs always, on GPUs where
    one kernel takes all of it. Elsewhere many small kernels would cost more than padding does.

    Raises:
        UserError: rows are asked for, and the model's attention knows none.
    """
    asked = plan.recipe.train.padding_free
    if config.latent_attention:
        if asked:
            raise UserError(
                "train.padding_free is true, but the model's latent attention takes padded "
                "micro-batches alone. Leave train.padding_free empty."
            )
        return "padded"
    if asked is False:
        return "padded"
    if plan.has_flash and _flash_takes(config):
        return "varlen"
    return "sdpa per sequence" if asked or plan.accelerator == "cpu" else "padded"


def _flash_takes(config: litgpt.Config) -> bool:
    size = config.head_size
    assert size is not None
    is_plain = config.attention_logit_softcapping is None
    return is_plain and size % 8 == 0 and size <= LARGEST_FLASH_HEAD


@dataclass(frozen=True)
class Sequences:
    """Which tokens of a micro-batch belong together."""

    lengths: tuple[int, ...]
    """Tokens of each sequence; they lie one after the other."""
    starts: Tensor | None = None
    """[sequences + 1] int32, where each begins and the last one ends, for torch's attention over
    variable lengths; None: that is not used."""

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Neighbours of one length: how many, and how long."""
        return [(len(list(run)), length) for length, run in groupby(self.lengths)]


class QKV(nn.Module):
    """Query, key and value as three layers, so that adapters are those of other libraries."""

    def __init__(self, config: litgpt.Config, *, bias: bool) -> None:
        super().__init__()
        assert config.head_size is not None and config.n_query_groups is not None
        width = config.n_embd
        self.q_proj = nn.Linear(width, config.n_head * config.head_size, bias=bias)
        self.k_proj = nn.Linear(width, config.n_query_groups * config.head_size, bias=bias)
        self.v_proj = nn.Linear(width, config.n_query_groups * config.head_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """As litgpt's fused layer, which it stands in for where a key-value cache is used."""
        return torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=-1)


class Attention(CausalSelfAttention):
    """litgpt's attention with three projections, and with sequences in a row."""

    def __init__(self, config: litgpt.Config, block_idx: int) -> None:
        super().__init__(config, block_idx)
        self.qkv = QKV(config, bias=config.bias or config.attn_bias)

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
        found = attend(*heads, mask, scale=scale, softcap=self.config.attention_logit_softcapping)
        result: Tensor = self.proj(found.view(*x.shape[:2], -1))
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
        q, k = self._rotated(q, cos, sin), self._rotated(k, cos, sin)
        return q.flatten(0, 1).to(v.dtype), k.flatten(0, 1).to(v.dtype), v.flatten(0, 1)

    def _rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """[batch, tokens, heads, head size], turned by the tokens' positions."""
        rotate = apply_rope_interleave if self.config.rope_interleave else apply_rope
        count = self.config.rope_n_elem
        turned: Tensor = rotate(x[..., :count].transpose(1, 2), cos, sin).transpose(1, 2)
        return turned if count == x.size(-1) else torch.cat((turned, x[..., count:]), dim=-1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sequences: Sequences,
    *,
    scale: float,
    softcap: float | None,
) -> Tensor:
    """Causal attention within each sequence.

    Args:
        q: [tokens, heads, head size].
        k: [tokens, groups, head size]; each group serves as many heads.
        v: likewise.
        sequences: which tokens belong together.
        scale: factor of the scores.
        softcap: their bound, approached by a tangent; None: they have none.

    Returns:
        [tokens, heads, head size].
    """
    if sequences.starts is not None:
        return _varlen(q, k, v, sequences, scale)
    runs = sequences.runs
    sizes = [count * length for count, length in runs]
    found = []
    for (count, _), *parts in zip(
        runs, q.split(sizes), k.split(sizes), v.split(sizes), strict=True
    ):
        one, other, third = (_by_heads(part, count) for part in parts)
        result = (
            _sdpa(one, other, third, scale)
            if softcap is None
            else _softcapped(one, other, third, scale, softcap)
        )
        found.append(result.transpose(1, 2).flatten(0, 1))
    return found[0] if len(found) == 1 else torch.cat(found)


def _by_heads(part: Tensor, count: int) -> Tensor:
    """[count * length, heads, size] as [count, heads, length, size]."""
    return part.unflatten(0, (count, -1)).transpose(1, 2)


def _repeated(part: Tensor, heads: int, dim: int) -> Tensor:
    """Each group as often as it has heads."""
    groups = part.size(dim)
    return part if groups == heads else part.repeat_interleave(heads // groups, dim)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    k, v = _repeated(k, q.size(1), 1), _repeated(v, q.size(1), 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def _softcapped(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float) -> Tensor:
    """As litgpt computes it: SDPA knows no bound of scores."""
    k, v = _repeated(k, q.size(1), 1), _repeated(v, q.size(1), 1)
    scores = do_softcapping(q @ k.mT * scale, softcap)
    length = q.size(2)
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(diagonal=1)
    scores = scores.masked_fill(later, torch.finfo(q.dtype).min)
    return F.softmax(scores, dim=-1, dtype=torch.float).to(dtype=q.dtype) @ v


@cache
def _groups_in_varlen() -> bool:
    """Whether torch's attention over variable lengths says that it takes groups: from 2.12 on."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _varlen(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, scale: float) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    grouped = {"enable_gqa": True} if _groups_in_varlen() else {}
    if not grouped:
        k, v = _repeated(k, q.size(1), 1), _repeated(v, q.size(1), 1)
    starts, longest = sequences.starts, max(sequences.lengths)
    found: Tensor = varlen_attn(
        q, k, v, starts, starts, longest, longest, scale=scale, window_size=(-1, 0), **grouped
    )
    return found
