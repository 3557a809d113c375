"""LitGPT's GPT as a body, with attention and norms of our own."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import litgpt.model
import torch
import torch.nn as nn
from litgpt.config import Config
from litgpt.model import GPT, GemmaMLP, LLaMAMLP, LLaMAMoE
from torch import Tensor

from ftkit.models.architectures.router_loss import RouterLoss
from ftkit.models.bodies.attention import AttentionKernel, AttentionLayer, Sequences
from ftkit.models.bodies.body import Body, GatedMlp
from ftkit.models.bodies.experts import FusedExperts
from ftkit.models.bodies.litgpt_attention import Attention
from ftkit.models.bodies.litgpt_experts import Experts
from ftkit.models.bodies.norm import RMSNorm
from ftkit.models.bodies.routing import Routing


class LitgptBody(GPT, Body):  # type: ignore[misc]  # litgpt declares no types
    """LitGPT's GPT without its head."""

    config: Config
    transformer: Any
    lm_head: nn.Module
    cos: Tensor
    """[positions, rotated], or [positions, rotated, 2]: for global and for local attention."""
    sin: Tensor
    max_seq_length: int
    mask_cache: Tensor | None

    def __init__(self, config: Config) -> None:
        plain = copy.copy(config)
        plain.final_logit_softcapping = None
        # No sequence is longer than the window, whose mask LitGPT fills row by row in every layer.
        plain.sliding_window_size = plain.sliding_window_indices = None
        super().__init__(plain)
        if not config.latent_attention:
            for index, block in enumerate(self.transformer.h):
                block.attn = Attention(plain, index)
        self._replace_modules()

    def _replace_modules(self) -> None:
        """Put our RMSNorm and experts in place of LitGPT's; names stay."""
        for name, module in list(self.named_modules()):
            if isinstance(module, litgpt.model.RMSNorm):
                (size,) = module.weight.shape
                found = RMSNorm(size, module.eps, add_unit_offset=module.add_unit_offset)
                self.set_submodule(name, found)
            elif isinstance(module, LLaMAMoE):
                self.set_submodule(name, Experts(module.config))

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
        yield from ()  # each has linear layers of its own

    @property
    def kept_in_full(self) -> frozenset[str]:
        return frozenset()

    def keep_apart(self) -> None:
        for layer in self.modules():
            if isinstance(layer, AttentionLayer):
                layer.attend = torch.compiler.disable(layer.attend)
            elif isinstance(layer, Experts):
                layer.forward = torch.compiler.disable(layer.forward)  # type: ignore[method-assign]

    def watch_routing(self, loss: RouterLoss | None) -> Routing:
        return Routing((), 0, loss)  # LitGPT's experts do not tell who asks for them

    def place_rotary_tables(self, device: torch.device, length: int) -> None:
        self._max_seq_length = length
        self.cos, self.sin = super().rope_cache(device=device)

    @property
    def device(self) -> torch.device:
        return self.cos.device

    @property
    def max_length(self) -> int:
        return self.max_seq_length

    def hidden(
        self, input_ids: Tensor, lengths: Sequence[int] | None, kernel: AttentionKernel
    ) -> Tensor:
        """What `litgpt.GPT.forward` computes without a cache."""
        config = self.config
        sequences = Sequences.of(input_ids, lengths, kernel)
        cos, sin = self._rotary_tables(input_ids, None if lengths is None else sequences)
        seen = None if config.latent_attention else sequences
        x = self.embedding(input_ids)
        if config.scale_embeddings:
            x = x * torch.tensor(config.n_embd**0.5, dtype=x.dtype)
        for index, block in enumerate(self.blocks):
            if config.rope_indices is None:
                x = block(x, cos, sin, seen)
            else:  # one table for local attention, one for global
                kind = config.rope_indices[index]
                x = block(x, cos[..., kind], sin[..., kind], seen)
        return self.transformer.ln_f(x)

    def _rotary_tables(self, input_ids: Tensor, row: Sequences | None) -> tuple[Tensor, Tensor]:
        """[1, tokens, rotated ...] each, at the positions of the tokens."""
        if row is None:
            length = input_ids.shape[1]
            return self.cos[None, :length], self.sin[None, :length]
        places = row.positions(input_ids.device)
        return self.cos[None, places], self.sin[None, places]

    def start_cache(self, batch: int, length: int) -> None:
        super().set_kv_cache(batch_size=batch, max_seq_length=length, device=self.device)

    def hidden_cached(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self(input_ids, input_pos=positions)

    def end_cache(self) -> None:
        super().clear_kv_cache()
