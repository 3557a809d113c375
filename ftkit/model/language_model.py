"""The language model: LitGPT's GPT with attention of our own, and the loss as its head."""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn as nn
from litgpt.config import Config
from litgpt.model import GPT
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from ftkit.config.recipe import LoraRecipe, Quantization, Recipe
from ftkit.lora.layers import add_adapter
from ftkit.model.attention import Attention, AttentionKernel, Sequences
from ftkit.model.loss import Head
from ftkit.model.norm import replace_norms
from ftkit.pretrained.base_model import BaseModel


class LanguageModel(nn.Module):
    """A GPT whose head computes the loss.

    Parameter names are litgpt's behind a prefix: `gpt.transformer...` and `head.lm_head...`;
    `our_name` strips it.
    """

    def __init__(self, config: Config, *, tied: bool) -> None:
        super().__init__()
        body = copy.copy(config)
        body.final_logit_softcapping = None
        # No sequence is longer than the window, whose mask LitGPT fills row by row in every layer.
        body.sliding_window_size = body.sliding_window_indices = None
        self.gpt = GPT(body)
        self.head = Head(self.gpt.lm_head, config.final_logit_softcapping)
        self.gpt.lm_head = nn.Identity()
        if not config.latent_attention:
            for index, block in enumerate(self.gpt.transformer.h):
                block.attn = Attention(body, index)
        self.kernel: AttentionKernel = "sdpa"
        """What computes attention."""
        replace_norms(self.gpt)
        self.tied = tied
        self.lora: LoraRecipe | None = None
        """How the model is adapted."""
        self.quantized: Quantization | None = None
        """How the weights of the blocks are stored, if not as numbers."""
        self.tie()

    def tie(self) -> None:
        """Make embedding and head one parameter, if they are so in this model."""
        if self.tied:
            head = self.head.lm_head
            head = getattr(head, "base_layer", head)  # below an adapter
            head.weight = self.gpt.transformer.wte.weight

    def place_rotary_tables(self, device: torch.device, length: int) -> None:
        """Compute the rotary embeddings of `length` positions; float32 whatever the parameters."""
        self.gpt._max_seq_length = length
        self.gpt.cos, self.gpt.sin = self.gpt.rope_cache(device=device)

    def forward(
        self,
        input_ids: Tensor,
        label_indices: Tensor,
        labels: Tensor | None = None,
        *,
        sequence_lengths: Sequence[int] | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Summed loss of a micro-batch, or its logits at some positions.

        Args:
            input_ids: [batch, sequence], padded on the right; or [1, tokens], sequences in a row.
            label_indices: [n], indices into the flattened input_ids.
            labels: [n] or None, see `Head.forward`.
            sequence_lengths: tokens of each sequence in a row; None: there is one in each line.
            positions: [batch, sequence], where the tokens stand in their sequences; reads
                and extends the key-value cache of `gpt.set_kv_cache`.
        """
        if positions is not None:
            hidden = self.gpt(input_ids, input_pos=positions)
        else:
            hidden = self._hidden(input_ids, sequence_lengths)
        on_cpu = self.kernel == "cpu"
        result: Tensor = self.head(hidden, label_indices, labels, on_cpu=on_cpu)
        return result

    def _hidden(self, input_ids: Tensor, lengths: Sequence[int] | None) -> Tensor:
        """[batch, sequence, width]: what `litgpt.GPT.forward` computes without a cache."""
        config, layers = self.gpt.config, self.gpt.transformer
        sequences, cos, sin = self._sequences(input_ids, lengths)
        x = layers.wte(input_ids)
        if config.scale_embeddings:
            x = x * torch.tensor(config.n_embd**0.5, dtype=x.dtype)
        for index, block in enumerate(layers.h):
            if config.rope_indices is None:
                x = block(x, cos, sin, sequences)
            else:  # one table for local attention, one for global
                kind = config.rope_indices[index]
                x = block(x, cos[..., kind], sin[..., kind], sequences)
        hidden: Tensor = layers.ln_f(x)
        return hidden

    def _sequences(
        self, input_ids: Tensor, lengths: Sequence[int] | None
    ) -> tuple[Sequences | None, Tensor, Tensor]:
        """Which tokens belong together, and the rotary tables at their positions."""
        batch, length = input_ids.shape
        cos, sin = self.gpt.cos, self.gpt.sin
        if lengths is None:
            padded = Sequences((length,) * batch, self.kernel)
            latent = self.gpt.config.latent_attention
            return None if latent else padded, cos[None, :length], sin[None, :length]
        device, starts = input_ids.device, None
        places = _copied(np.concatenate([np.arange(n) for n in lengths]), device)
        if self.kernel == "flash":
            starts = _copied(np.cumsum([0, *lengths], dtype=np.int32), device)
        row = Sequences(tuple(lengths), self.kernel, starts)
        return row, cos[None, places], sin[None, places]


def _copied(values: npt.NDArray[Any], device: torch.device) -> Tensor:
    """On a device, without waiting for it."""
    found = torch.from_numpy(values)
    return found.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else found


def outline(
    base: BaseModel,
    recipe: Recipe,
    dtype: torch.dtype,
    compute_dtype: torch.dtype | None = None,
) -> LanguageModel:
    """The model without its numbers: every layer on the meta device, adapted and frozen.

    Sizes can be counted and layers sharded before any memory is taken; `fill` gives it numbers.

    Args:
        base: whose architecture it has.
        recipe: its LoRA keys choose the quantised base and the adapted layers.
        dtype: number format of the parameters that are not quantised.
        compute_dtype: number format of the arithmetic of quantised layers. Default: dtype.
    """
    asked = recipe.train.tie_embeddings
    model = outline_plain(
        base,
        dtype,
        compute_dtype,
        tied=base.tied if asked is None else asked,
        kind=recipe.quantize if isinstance(recipe, LoraRecipe) else None,
    )
    if isinstance(recipe, LoraRecipe):
        with torch.device("meta"):
            add_adapter(model, base, recipe)
        model.lora = recipe
    if recipe.kernels == "liger":
        from ftkit.model.liger import put_kernels_in_place

        put_kernels_in_place(model)
    if recipe.compile:
        from ftkit.model.compiled import compile_blocks

        compile_blocks(model.gpt.transformer.h, model.head.lm_head)
    if every := int(recipe.memory.activation_checkpointing):
        offloads = recipe.memory.offload_activations
        for block in list(model.gpt.transformer.h)[::every]:
            block.forward = partial(_keep_the_input_alone, block.forward, offloads)
    return model.to(dtype)


def _keep_the_input_alone(
    forward: Callable[..., Tensor], offloads: bool, hidden: Tensor, *rest: Any
) -> Tensor:
    """The result of a block, which is computed again where the backward pass needs it."""
    if not torch.is_grad_enabled():
        return forward(hidden, *rest)
    with in_host_memory(hidden) if offloads else nullcontext():
        # ZeRO-3 has taken the parameters back that the check would look at.
        result: Tensor = checkpoint(
            lambda hidden: forward(hidden, *rest),  # the rest is the same for all blocks
            hidden,
            use_reentrant=False,
            determinism_check="none",
        )
    return result


def in_host_memory(hidden: Tensor) -> AbstractContextManager[Any]:
    """What this context saves for the backward pass of a GPU is in page-locked host memory."""
    return save_on_cpu(pin_memory=True) if hidden.is_cuda else nullcontext()


def outline_plain(
    base: BaseModel,
    dtype: torch.dtype,
    compute_dtype: torch.dtype | None = None,
    *,
    tied: bool,
    kind: Quantization | None = None,
) -> LanguageModel:
    """The model without its numbers and without an adapter.

    Args:
        base: whose architecture it has.
        dtype: number format of the parameters that are not quantised.
        compute_dtype: number format of the arithmetic of quantised layers. Default: dtype.
        tied: whether embedding and head are one.
        kind: how the weights of the blocks are stored; None: as numbers.
    """
    with torch.device("meta"):
        model = LanguageModel(base.config, tied=tied)
        if kind is not None:
            from ftkit.model.quantization import quantize

            quantize(model.gpt.transformer.h, kind, compute_dtype or dtype)
            model.quantized = kind
    return model.to(dtype)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that an optimizer updates."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
