"""The model that is trained: litgpt's GPT with unfused QKV, a head that is its own loss, LoRA."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import litgpt
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ftkit import lora
from ftkit.base.base_model import BaseModel, weights
from ftkit.lora import is_adapter, our_name
from ftkit.recipe import LoraRecipe, Quantization, Recipe
from ftkit.sharding import Rows, Sharding

LOGITS_CHUNK_ELEMENTS = 2**25
"""Logits held at once, as a number of elements (128 MiB in float32)."""


class QKV(nn.Module):
    """Query, key and value as three layers, so that adapters are those of other libraries.

    Stands in for litgpt's fused layer: its output is the concatenation that litgpt expects.
    """

    def __init__(self, config: litgpt.Config, *, bias: bool) -> None:
        super().__init__()
        assert config.head_size is not None and config.n_query_groups is not None
        width = config.n_embd
        self.q_proj = nn.Linear(width, config.n_head * config.head_size, bias=bias)
        self.k_proj = nn.Linear(width, config.n_query_groups * config.head_size, bias=bias)
        self.v_proj = nn.Linear(width, config.n_query_groups * config.head_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), dim=-1)


class Head(nn.Module):
    """The output layer and the loss in one, so that the logits of a batch never exist at once."""

    def __init__(self, lm_head: nn.Module, softcap: float | None) -> None:
        super().__init__()
        self.lm_head = lm_head
        self.softcap = softcap

    def forward(self, hidden: Tensor, positions: Tensor, targets: Tensor | None) -> Tensor:
        """Logits at some positions, or the summed loss there.

        Args:
            hidden: [batch, sequence, width].
            positions: [n], indices into the flattened batch and sequence.
            targets: [n], the token that follows each position; None asks for the logits.

        Returns:
            [n, vocabulary] logits in float32, or the sum of the n cross-entropies in nats.
        """
        rows = hidden.flatten(0, 1).index_select(0, positions)
        if targets is None:
            return self._logits(rows)
        chunk = max(1, LOGITS_CHUNK_ELEMENTS // self._vocabulary)
        pieces = list(zip(rows.split(chunk), targets.split(chunk), strict=True))
        if len(pieces) == 1:
            return self._loss(rows, targets)
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

    def _loss(self, rows: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self._logits(rows), targets, reduction="sum")


class LanguageModel(nn.Module):
    """A GPT whose head computes the loss.

    Parameter names are litgpt's behind a prefix: `gpt.transformer...` and `head.lm_head...`;
    `our_name` strips it.
    """

    def __init__(self, config: litgpt.Config, *, tied: bool) -> None:
        super().__init__()
        body = copy.copy(config)
        body.final_logit_softcapping = None
        # No sequence is longer than the window, whose mask LitGPT fills row by row in every layer.
        body.sliding_window_size = body.sliding_window_indices = None
        self.gpt = litgpt.GPT(body)
        self.head = Head(self.gpt.lm_head, config.final_logit_softcapping)
        self.gpt.lm_head = nn.Identity()
        for block in self.gpt.transformer.h:
            block.attn.qkv = QKV(config, bias=config.bias or config.attn_bias)
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
        positions: Tensor,
        targets: Tensor | None = None,
        cache_positions: Tensor | None = None,
    ) -> Tensor:
        """Summed loss of a micro-batch, or its logits at some positions.

        Args:
            input_ids: [batch, sequence], padded on the right.
            positions: [n], indices into the flattened batch and sequence.
            targets: [n] or None, see `Head.forward`.
            cache_positions: [batch, sequence], where the tokens stand in their sequences; reads
                and extends the key-value cache of `gpt.set_kv_cache`.
        """
        hidden = self.gpt(input_ids, input_pos=cache_positions)
        result: Tensor = self.head(hidden, positions, targets)
        return result


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
            lora.add_adapter(model, base, recipe)
        model.lora = recipe
    if recipe.memory.activation_checkpointing:
        for block in model.gpt.transformer.h:
            block.forward = partial(_keep_the_inputs_alone, block.forward)
    return model.to(dtype)


def _keep_the_inputs_alone(forward: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """The result of a block, which is computed again where the backward pass needs it."""
    if not torch.is_grad_enabled():
        return forward(*inputs)
    # ZeRO-3 has taken the parameters back that the check would look at.
    return checkpoint(forward, *inputs, use_reentrant=False, determinism_check="none")


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
            from ftkit.quantization import quantize

            quantize(model.gpt.transformer.h, kind, compute_dtype or dtype)
            model.quantized = kind
    return model.to(dtype)


def fill(
    model: LanguageModel,
    base: BaseModel,
    *,
    sharding: Sharding,
    device: torch.device,
    rope_length: int,
    seed: int,
    trained: Callable[[str], Rows] | None = None,
    adapter: Mapping[str, Tensor] | None = None,
    source: Iterable[tuple[str, Tensor]] | None = None,
    progress: Callable[[int, int], None],
) -> None:
    """Give an outlined model its memory and its numbers, parameter by parameter.

    Args:
        model: from `outline`.
        base: where the weights come from.
        sharding: which part of them this rank gets.
        device: where the parameters live.
        rope_length: positions of the table of rotary embeddings.
        seed: of the adapter's initial values.
        trained: gives a parameter that a checkpoint holds by our name, if training continues.
            Where those are all parameters, nothing is read of the base.
        adapter: first values of what is trained, by our names, instead of those that the recipe
            names.
        source: the weights by our names, where they are not those of the base.
        progress: called with (parameters filled, parameters in all).
    """
    names = {our_name(name): name for name, _ in model.named_parameters()}
    adapted = _adapted_weights(model)
    left = dict.fromkeys(names)
    sharding.allocate(model, device)
    if model.quantized is not None:
        from ftkit.quantization import allocate

        allocate(model, device)
    model.place_rotary_tables(device, rope_length)

    def put(ours: str, value: Rows) -> None:
        sharding.put(model, names[ours], value)
        del left[ours]
        progress(len(names) - len(left), len(names))

    with torch.no_grad():
        for ours, name in names.items():
            parameter = model.get_parameter(name)
            if trained is not None and in_checkpoint(ours, parameter):
                put(ours, trained(ours))
            elif adapter is not None and ours in adapter:
                put(ours, adapter[ours])
            elif is_adapter(ours):
                assert model.lora is not None
                if not lora.follows_from_base(ours, model.lora):
                    put(ours, lora.initial_adapter(ours, parameter.shape, seed))
        if not left:
            return
        for ours, tensor in _weights(base, model, source):
            if ours not in left:  # trained whole beside the adapter
                continue
            dtype = model.get_parameter(names[ours]).dtype
            stored = _stored(model, names[ours], tensor, device)
            put(ours, stored)
            for name in adapted.get(ours, ()):
                if any(key.startswith(f"{our_name(name)}.lora_") for key in left):
                    assert model.lora is not None
                    layer = model.get_submodule(name)
                    numbers = _numbers(layer, stored.to(device), dtype)
                    for end, value in lora.adapter_from_base(numbers, layer, model.lora).items():
                        put(f"{our_name(name)}.{end}", value)


def in_checkpoint(name: str, parameter: nn.Parameter) -> bool:
    """Whether checkpoints hold a parameter: it is trained, or no base model tells it."""
    return parameter.requires_grad or is_adapter(name)


def _adapted_weights(model: LanguageModel) -> dict[str, list[str]]:
    """Our name of a weight and the layers that adapt it; two where embedding and head are one."""
    names = {parameter: our_name(name) for name, parameter in model.named_parameters()}
    found: dict[str, list[str]] = {}
    for name, layer in lora.lora_layers(model):
        found.setdefault(names[layer.get_base_layer().weight], []).append(name)
    return found


def _weights(
    base: BaseModel, model: LanguageModel, source: Iterable[tuple[str, Tensor]] | None
) -> Iterator[tuple[str, Tensor]]:
    """The base model's weights, tied or untied as the model is."""
    for name, tensor in weights(base) if source is None else source:
        if name == "lm_head.weight" and model.tied:
            continue
        yield name, tensor
        if name == "transformer.wte.weight" and base.tied and not model.tied:
            yield "lm_head.weight", tensor


def _stored(model: LanguageModel, name: str, tensor: Tensor, device: torch.device) -> Tensor:
    """What a parameter holds of a weight: the weight itself, or its quantised form."""
    if model.quantized is None:
        return tensor
    from ftkit.quantization import packed

    return packed(model, name, tensor, device)


def _numbers(layer: Any, stored: Tensor, dtype: torch.dtype) -> Tensor:
    """What an adapted layer computes with, given what its weight holds: [out, in]."""
    base = layer.get_base_layer()
    unpacked: Tensor = base.unpacked(stored) if hasattr(base, "unpacked") else stored.to(dtype)
    return unpacked


def parameter_count(model: LanguageModel) -> int:
    """Numbers in the model, however many of them a byte holds."""
    linear = {id(m.weight): _weights_in(m) for m in model.modules() if isinstance(m, nn.Linear)}
    return sum(linear.get(id(p), p.numel()) for p in model.parameters())


def _weights_in(layer: nn.Linear) -> int:
    return layer.in_features * layer.out_features


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that an optimizer updates."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def flops_per_token(
    model: LanguageModel, *, attention_length: float, label_fraction: float
) -> float:
    """Floating-point operations of one training step, per token.

    2 per parameter of a matrix in the forward pass and 2 in the backward pass for the gradient of
    its input, 2 more where the parameter is trained; causal attention 6 x layers x width x
    length. The output layer counts for the tokens that carry loss, because it is computed for
    these alone. Recomputation does not count. As in Chowdhery et al. 2022 (PaLM), appendix B.

    Args:
        model: outlined or filled.
        attention_length: of the sequence that a token lies in, in the mean over tokens: the sum of
            the squared lengths over the sum of the lengths.
        label_fraction: tokens that carry loss, as a share of all.
    """
    config = model.gpt.config
    assert config.head_size is not None
    attention = 6 * config.n_layer * config.n_head * config.head_size * attention_length
    return attention + _matrix_flops(model.gpt) + _matrix_flops(model.head) * label_fraction


def _matrix_flops(module: nn.Module) -> int:
    """Of the matrices of a module, for one token."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    return sum(_weights_in(layer) * (6 if layer.weight.requires_grad else 4) for layer in layers)


def trained_weights(model: LanguageModel, sharding: Sharding) -> Iterator[tuple[str, Tensor]]:
    """What a result is written from, by our name and whole; called by every rank.

    Every trained parameter, and what belongs to the adapter besides.
    """
    sharding.settle(model)
    for name, parameter in model.named_parameters():
        if in_checkpoint(our_name(name), parameter):
            yield our_name(name), sharding.whole(parameter)
