"""LitGPT's GPT as a body, with ftkit's attention, experts and norms in it."""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import litgpt.model
import torch
import torch.nn as nn
from litgpt.config import Config
from litgpt.model import (
    CausalSelfAttention,
    GemmaMLP,
    LLaMAMLP,
    LLaMAMoE,
    apply_rope,
    apply_rope_interleave,
)
from torch import Tensor

from ftkit.extensions.litgpt.architecture import LitgptArchitecture, OutlineOfGpt
from ftkit.models.bodies.attention import (
    AttentionKernel,
    AttentionLayer,
    FixedRow,
    KeyValueCache,
    Scores,
    Sequences,
)
from ftkit.models.bodies.body import Body, GatedMlp
from ftkit.models.bodies.experts import FusedExperts
from ftkit.models.bodies.norm import RMSNorm
from ftkit.models.bodies.rotation import rotated_halves, saves_launches
from ftkit.models.routing import RouterLoss, Routing
from ftkit.models.token_numbers import TokenNumbers


class LitgptBody(OutlineOfGpt, Body):
    """LitGPT's GPT without its head."""

    config: Config
    transformer: Any
    lm_head: nn.Module
    cos: Tensor
    """[positions, rotated], or [positions, rotated, 2]: for global and for local attention."""
    sin: Tensor
    max_seq_length: int
    cache: KeyValueCache | None = None
    """Of the answer that is being made; LitGPT's latent attention has its own."""

    def __init__(self, architecture: LitgptArchitecture) -> None:
        config = architecture.config
        plain = copy.copy(config)
        # The head is taken away, and applies this bound itself.
        plain.final_logit_softcapping = None
        # No sequence is longer than the window; with it, LitGPT would fill a mask in every layer.
        plain.sliding_window_size = plain.sliding_window_indices = None
        # The embedding scales its output itself.
        plain.scale_embeddings = False
        super().__init__(plain)
        if config.scale_embeddings:
            self.transformer.wte = ScaledEmbedding(plain.padded_vocab_size, plain.n_embd)
        self.tokens = TokenNumbers()
        if not config.latent_attention:
            for index, block in enumerate(self.transformer.h):
                block.attn = Attention(plain, index)
        self._replace_modules()

    def _replace_modules(self) -> None:
        """Replace LitGPT's RMSNorm and experts by ours; names stay."""
        for name, module in list(self.named_modules()):
            if isinstance(module, litgpt.model.RMSNorm):
                (size,) = module.weight.shape
                norm = RMSNorm(size, module.eps, add_unit_offset=module.add_unit_offset)
                self.set_submodule(name, norm)
            elif isinstance(module, LLaMAMoE):
                self.set_submodule(name, Experts(module.config, self.tokens))

    @property
    def embedding(self) -> nn.Embedding:
        return self.transformer.wte

    @property
    def blocks(self) -> nn.ModuleList:
        return self.transformer.h

    @property
    def others(self) -> list[nn.Module]:
        return [self.transformer.ln_f]

    def take_head(self) -> nn.Linear:
        head, self.lm_head = self.lm_head, nn.Identity()
        assert isinstance(head, nn.Linear), "the head is taken once"
        return head

    def gated_mlps(self) -> Iterator[GatedMlp]:
        for module in self.modules():
            kind = type(module)
            if kind is LLaMAMLP:
                yield GatedMlp(module, "silu", gate="fc_1", up="fc_2", down="proj")
            elif kind is GemmaMLP and self.config.gelu_approximate == "tanh":
                yield GatedMlp(module, "gelu tanh", gate="fc_1", up="fc_2", down="proj")

    def fused_experts(self) -> Iterator[FusedExperts]:
        yield from ()  # each expert has linear layers of its own

    @property
    def kept_in_full(self) -> frozenset[str]:
        return frozenset()

    def exclude_from_compile(self) -> None:
        for layer in self.modules():
            if isinstance(layer, AttentionLayer):
                layer.attend = torch.compiler.disable(layer.attend)
                layer.attend_to_cache = torch.compiler.disable(layer.attend_to_cache)
            elif isinstance(layer, Experts):
                layer.forward = torch.compiler.disable(layer.forward)  # type: ignore[method-assign]

    def watch_routing(self, loss: RouterLoss | None) -> Routing:
        return Routing((), 0, loss)  # LitGPT's experts do not show which tokens choose them

    def build_rope_cache(self, device: torch.device, length: int) -> None:
        # Not by the property, whose setter keeps tables of this length, even without values.
        self._max_seq_length = length
        self.cos, self.sin = super().rope_cache(device)

    @property
    def device(self) -> torch.device:
        return self.cos.device

    @property
    def max_length(self) -> int:
        return self.max_seq_length

    def hidden(
        self,
        input_ids: Tensor,
        lengths: Sequence[int] | FixedRow | None,
        kernel: AttentionKernel,
        media: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Compute what `litgpt.GPT.forward` computes without a cache."""
        sequences = Sequences.of(input_ids, lengths, kernel, self.exchange)
        cos, sin = self._rotary_tables(input_ids, None if lengths is None else sequences)
        # LitGPT's latent attention only takes its own masks, so micro-batches are padded.
        seen = None if self.config.latent_attention else sequences
        return self._through_blocks(input_ids, cos, sin, seen)

    def _through_blocks(
        self, input_ids: Tensor, cos: Tensor, sin: Tensor, seen: Sequences | KeyValueCache | None
    ) -> Tensor:
        config, x = self.config, self.embedding(input_ids)
        for index, block in enumerate(self.blocks):
            if config.rope_indices is None:
                x = block(x, cos, sin, seen)
            else:  # one table for local attention, one for global
                kind = config.rope_indices[index]
                x = block(x, cos[..., kind], sin[..., kind], seen)
        return self.transformer.ln_f(x)

    def _rotary_tables(self, input_ids: Tensor, row: Sequences | None) -> tuple[Tensor, Tensor]:
        """Return cos and sin at the positions of the tokens, [1, tokens, rotated ...] each."""
        if row is None:
            length = input_ids.shape[1]
            return self.cos[None, :length], self.sin[None, :length]
        places = row.positions(input_ids.device)
        return self.cos[None, places], self.sin[None, places]

    def start_cache(self, batch: int, length: int) -> None:
        if self.config.latent_attention:
            super().set_kv_cache(batch_size=batch, max_seq_length=length, device=self.device)
        else:
            self.cache = KeyValueCache((batch, length))

    def hidden_cached(
        self, input_ids: Tensor, positions: Tensor, media: Mapping[str, Any] | None = None
    ) -> Tensor:
        if self.cache is None:
            return self(input_ids, input_pos=positions)
        self.cache.positions = positions.expand_as(input_ids)
        return self._through_blocks(input_ids, self.cos[positions], self.sin[positions], self.cache)

    def end_cache(self) -> None:
        self.cache = None
        super().clear_kv_cache()


class ScaledEmbedding(nn.Embedding):
    """Gemma's embedding, which scales its output, as in transformers: noise is added to that."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.output_scale = width**0.5

    def forward(self, input_ids: Tensor) -> Tensor:
        """Look up and scale, [..., width]."""
        x = super().forward(input_ids)
        # Rounded to the dtype first, as in LitGPT and transformers: equal numbers in 16 bits.
        return x * torch.tensor(self.output_scale, dtype=x.dtype)


class QKV(nn.Module):
    """Query, key and value as three layers, so that adapters fit those of other libraries."""

    # One product instead of three would save 0.5 to 1.3 % of a step.

    def __init__(self, config: Config, *, bias: bool) -> None:
        super().__init__()
        assert config.head_size is not None and config.n_query_groups is not None
        width = config.n_embd
        self.q_proj = nn.Linear(width, config.n_head * config.head_size, bias=bias)
        self.k_proj = nn.Linear(width, config.n_query_groups * config.head_size, bias=bias)
        self.v_proj = nn.Linear(width, config.n_query_groups * config.head_size, bias=bias)


class Attention(CausalSelfAttention, AttentionLayer):  # type: ignore[misc]  # litgpt has no types
    """LitGPT's attention with three projections, and with sequences in a row."""

    def __init__(self, config: Config, block_idx: int) -> None:
        super().__init__(config, block_idx)
        self.qkv = QKV(config, bias=config.bias or config.attn_bias)
        self.rotation = "pairs" if config.rope_interleave else "halves"

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        seen: Sequences | KeyValueCache,
        *_: None,
    ) -> Tensor:
        """Causal attention within each sequence.

        Args:
            x: [batch, tokens, width].
            cos: [batch or 1, tokens, rotated], the rotary table at the tokens' positions.
            sin: likewise.
            seen: the sequences in batch * tokens, or a cache with the positions of the tokens.
            _: positions in LitGPT's cache, which is not used.
        """
        heads = self._heads(x, cos, sin)
        scale = self.mscale**2 / math.sqrt(
            self.config.attention_scores_scalar or self.config.head_size
        )
        scores = Scores(scale, softcap=self.config.attention_logit_softcapping)
        if isinstance(seen, KeyValueCache):
            parts = (part.unflatten(0, x.shape[:2]).transpose(1, 2) for part in heads)
            attended = self.attend_to_cache(seen, self.block_idx, *parts, scores)
        else:
            attended = self.attend(*heads, seen, scores)
        result: Tensor = self.proj(attended.reshape(*x.shape[:2], -1))
        return result

    def _heads(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, [batch * tokens, heads, head size] each."""
        q, k, v = self.qkv.q_proj(x), self.qkv.k_proj(x), self.qkv.v_proj(x)
        kind = self.config.norm_qk_type if self.config.norm_qk else None
        if kind == "olmo2":
            q, k = self.norm_q(q), self.norm_k(k)
        q, k, v = (part.unflatten(-1, (-1, self.config.head_size)) for part in (q, k, v))
        # OLMo 2 normalises whole rows, all others each head.
        if kind == "default":
            q, k = self.norm_q(q), self.norm_k(k)
        if self.rotate is not None:
            q, k = self.rotate(q, k, cos, sin)
        else:
            q, k = self._rotated(q, k, cos, sin)
        return q.flatten(0, 1).to(v.dtype), k.flatten(0, 1).to(v.dtype), v.flatten(0, 1)

    def _rotated(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate [batch, tokens, heads, head size] each by the tokens' positions."""
        count = self.config.rope_n_elem
        parts = q[..., :count], k[..., :count]
        if self.rotation == "halves" and count % 2 == 0 and saves_launches(q):
            turned = rotated_halves(*parts, cos[..., None, :], sin[..., None, :])
        else:
            rotate = apply_rope if self.rotation == "halves" else apply_rope_interleave
            turned = tuple(rotate(part.transpose(1, 2), cos, sin).transpose(1, 2) for part in parts)
        if count == q.size(-1):
            return turned
        # Partial rotary embeddings leave the rest of each head as it is.
        q, k = (
            torch.cat((part, x[..., count:]), dim=-1)
            for part, x in zip(turned, (q, k), strict=True)
        )
        return q, k


class Experts(LLaMAMoE):  # type: ignore[misc]  # litgpt declares no types
    """LitGPT's experts, each called once with its tokens in a row."""

    # LitGPT searches the tokens of each expert in a way that fake tensors do not support.

    def __init__(self, config: Config, numbers: TokenNumbers) -> None:
        super().__init__(config)
        self._numbers = numbers

    def forward(self, x: Tensor) -> Tensor:
        """Compute [batch, tokens, width], given the same shape."""
        from ftkit.models.bodies.expert_products import count_of_each, rows_of_each

        tokens = x.flatten(0, 1)
        weights, chosen = self._route(tokens)
        of_each = chosen.size(-1)
        experts = chosen.flatten()
        # Stable, so that sums over tokens have the same order in every run.
        order = experts.argsort(stable=True)
        ends = count_of_each(experts, len(self.experts)).cumsum(0)
        rows = rows_of_each(ends, len(experts))
        # Experts without tokens are called too: sharded ranks wait for each other in each layer.
        results = []
        for expert, own in zip(self.experts, rows, strict=True):
            places = order[own] // of_each
            with self._numbers.within(self._numbers.at(places)):
                results.append(expert(tokens[places]))
        weighted = torch.cat(results) * weights.flatten()[order, None]
        # Back in the order of tokens, so that each sum is over the experts of one token.
        result = weighted[order.argsort()].unflatten(0, (-1, of_each)).sum(1).view_as(x)
        if self.config.n_shared_expert:
            result = result + self.shared_experts(x)
        return result

    def _route(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts of each token, [tokens, experts per token] each."""
        if self.config.n_expert_groups:
            weights, chosen = self.gate(tokens)
        else:
            scores, chosen = self.gate(tokens).topk(self.config.n_expert_per_token)
            weights = scores.softmax(dim=1, dtype=torch.float).to(tokens.dtype)
        return weights * self.config.routed_scaling_factor, chosen
