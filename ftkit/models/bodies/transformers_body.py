"""Transformers' models as bodies: their own modules, with ftkit's attention and experts in them.

Transformers calls the attention that a model's settings name, and makes no masks for an attention
that is not its own. Here the sequences take the place of a mask.

For experts whose matrices are one parameter of three dimensions, transformers calls the function
that a model's settings name; older models have modules of their own. The code of transformers uses
products that fake tensors do not support in float32, or reads values of tensors, and cannot use
quantised matrices.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
import torch.nn as nn
from torch import Tensor
from torch.func import functional_call
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ftkit.models.architectures.transformers_architecture import TransformersArchitecture
from ftkit.models.architectures.transformers_outline import (
    blocks_of,
    experts_of,
    head_name,
    router_outputs,
)
from ftkit.models.bodies.attention import (
    AttentionKernel,
    Blocks,
    FixedRow,
    KeyValueCache,
    Scores,
    Sequences,
    attend,
)
from ftkit.models.bodies.body import Body, GatedMlp, MediaEncoder
from ftkit.models.bodies.expert_products import (
    count_of_each,
    grouped_product,
    packed_product,
    rows_of_each,
)
from ftkit.models.bodies.experts import PAIRS, FusedExperts, packed_in
from ftkit.models.bodies.norm import replace_norms
from ftkit.models.bodies.rotation import rotate_in_few_kernels
from ftkit.models.routing import RouterLoss, Routing
from ftkit.models.token_numbers import TokenNumbers
from ftkit.utils.registry import imported

_OURS = "ftkit"
"""Name by which transformers finds the functions for attention and experts below."""

_ACTIVATIONS = {"SiLUActivation": "silu", "SiLU": "silu", "GELUTanh": "gelu tanh"}
"""Activations by the names of their classes."""

_LIKE_PARAMETERS = {"bias", "mup_vector", "weights"}
"""Tables of factors, or of embeddings of positions (XGLM), which have the dtype of the parameters;
the others hold angles."""

_MASKS_OF_STATES = ("_update_mamba_mask", "_update_linear_attn_mask")
"""Methods that read a padding mask to see if it is needed; ftkit passes no such mask."""


class TransformersBody(Body):
    """Transformers' model below its output layer."""

    def __init__(self, architecture: TransformersArchitecture) -> None:
        super().__init__()
        self.tokens = TokenNumbers()
        whole = architecture.build()
        self._heads = [whole.get_submodule(head_name(whole))]  # in a list: not registered
        model = architecture.language_in(whole)
        self._model_name = architecture.language_name
        # Not registered but for what is trained: strategies, checkpoints and optimizers have
        # nothing to do with the rest.
        self._encoders: list[MediaEncoder] = []
        self._architecture = architecture
        if architecture.encoder is not None:
            self._encoders.append(imported(architecture.encoder)(architecture, whole))
        trained_beside = [whole.get_submodule(name) for name in architecture.beside]
        for name, module in zip(architecture.beside, trained_beside, strict=True):
            self._place(name, module)
        self._place(self._model_name, model)
        self._takes_rows = architecture.takes_rows
        self._attended = _Attended()
        if self._takes_rows:
            _use_attention(model, self._attended)
        # The model's own code computes all but its attention, experts and norms.
        _use_experts(model)
        replace_norms(model)
        rotate_in_few_kernels(model)
        _compute_without_values(model)
        _compute_in_float32(model, architecture.float32_modules)
        # Listed before adapters are added, the only modules that `train` switches.
        self._own = (*model.modules(), *(m for one in trained_beside for m in one.modules()))
        self._depth = architecture.layers
        self._keeps_in_full = architecture.keeps_in_full
        if architecture.skipped_modules is not None:
            for block in self.blocks:
                block.register_forward_hook(partial(_reach, architecture.skipped_modules))
        self._routers = dict(router_outputs(model))
        self._experts = [
            (layer, name, experts)
            for layer, block in enumerate(self.blocks)
            for name, experts in experts_of(block)
        ]
        """Index of the layer, name in it, and number of experts."""
        self._max_length = architecture.context_length
        self._device = torch.device("meta")
        self._tables = {
            name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta
        }
        """Buffers that no file holds, as the model has computed them on the CPU."""
        self._so_far: Tensor | None = None
        self._seen: tuple[Mapping[str, Any], int] | None = None
        """Media of the prompts whose tokens are computed again, and their padded width."""
        self._behind: Tensor | None = None
        """[batch], what is added to positions behind prompts with media; None: nothing."""
        self.train()

    def train(self, mode: bool = True) -> Self:
        """Switch only the layers of adapters: the model's own have no dropout and no noise."""
        super().train(mode)
        # Dropout, jitter and sampled routing would make updates depend on the rank.
        for module in self._own:
            module.training = False
        return self

    @property
    def _model(self) -> Any:
        return self.get_submodule(self._model_name)

    def _place(self, path: str, module: nn.Module) -> None:
        """Register a module under its name in the whole model, which may be a path."""
        *around, last = path.split(".")
        parent: nn.Module = self
        for name in around:
            if name not in parent._modules:
                parent.add_module(name, nn.Module())
            parent = parent.get_submodule(name)
        parent.add_module(last, module)

    @property
    def embedding(self) -> nn.Embedding:
        embedding = self._model.get_input_embeddings()
        assert isinstance(embedding, nn.Embedding)
        return embedding

    @property
    def blocks(self) -> nn.ModuleList:
        return blocks_of(self._model, self._depth)

    @property
    def others(self) -> list[nn.Module]:
        return list(_beside(self._model, {self.blocks, self.embedding}))

    def take_head(self) -> nn.Linear:
        head = self._heads.pop()
        assert isinstance(head, nn.Linear)
        return head

    def gated_mlps(self) -> Iterator[GatedMlp]:
        for module in self._model.modules():
            activation = _ACTIVATIONS.get(type(getattr(module, "act_fn", None)).__name__)
            names = ("gate_proj", "up_proj", "down_proj")
            if activation and all(type(getattr(module, n, None)) is nn.Linear for n in names):
                gate, up, down = names
                yield GatedMlp(module, activation, gate=gate, up=up, down=down)  # type: ignore[arg-type]

    def fused_experts(self) -> Iterator[FusedExperts]:
        return _fused_experts(self._model)

    @property
    def kept_in_full(self) -> frozenset[str]:
        return frozenset(
            name for name, _ in self.blocks.named_modules() if self._keeps_in_full(name)
        )

    def exclude_from_compile(self) -> None:
        self._attended.attend = torch.compiler.disable(self._attended.attend)  # type: ignore[method-assign]
        for experts in self.fused_experts():
            experts.module.forward = torch.compiler.disable(experts.module.forward)

    def watch_routing(self, loss: RouterLoss | None) -> Routing:
        layers = [layer for layer, _, _ in self._experts]
        count = max((experts for _, _, experts in self._experts), default=0)
        routing = Routing(layers, count, loss)
        for row, (layer, name, _) in enumerate(self._experts):
            routing.watch_experts(self.blocks[layer].get_submodule(name), row)
        for name, place in self._routers.items() if loss is not None else ():
            routing.watch_router(self._model.get_submodule(name), place)
        return routing

    def build_rope_cache(self, device: torch.device, length: int) -> None:
        self._device, self._max_length = device, length
        for name, table in self._tables.items():
            owner, _, kind = name.rpartition(".")
            # Angles keep their float32; a float32 factor would turn states of 16 bits into float32.
            follows = kind in _LIKE_PARAMETERS and table.is_floating_point()
            dtype = self.embedding.weight.dtype if follows else table.dtype
            self._model.get_submodule(owner)._buffers[kind] = table.to(device, dtype, copy=True)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def max_length(self) -> int:
        return self._max_length

    def add_encoder(self, place: str, rest: Mapping[str, Any]) -> None:
        if not self._encoders:
            architecture = self._architecture
            self._encoders.append(imported(place)(architecture, architecture.build()))
        self.load_beside(rest)

    def load_beside(self, rest: Mapping[str, Any]) -> None:
        for encoder in self._encoders:
            encoder.load(rest, self.embedding.weight.dtype, self.device)

    @property
    def media_flops(self) -> float:
        return sum(encoder.flops for encoder in self._encoders)

    @property
    def trained_beside(self) -> list[nn.Parameter]:
        beside = map(self.get_submodule, self._architecture.beside)
        return [parameter for module in beside for parameter in module.parameters()]

    def hold_beside(self) -> None:
        for name in self._architecture.beside:
            self._place(name, _holder(self.get_submodule(name)))

    @property
    def beside(self) -> list[nn.Module]:
        return [module for encoder in self._encoders for module in encoder.modules]

    def hidden(
        self,
        input_ids: Tensor,
        lengths: Sequence[int] | FixedRow | None,
        kernel: AttentionKernel,
        media: Mapping[str, Any] | None = None,
    ) -> Tensor:
        sequences = Sequences.of(input_ids, lengths, kernel, self.exchange)
        self._attended.sequences, self._attended.cache = sequences, None
        if lengths is None:
            places = torch.arange(input_ids.shape[1], device=input_ids.device)
        else:
            places = sequences.positions(input_ids.device)
        self._attended.blocks = None if media is None else media.get("blocks")
        return self._last_hidden(input_ids, places.expand_as(input_ids), media)

    def _last_hidden(
        self, input_ids: Tensor, positions: Tensor, media: Mapping[str, Any] | None = None
    ) -> Tensor:
        given: dict[str, Any] = {"input_ids": input_ids}
        for encoder in self._encoders:
            given = encoder.arguments(input_ids, self._model, media)
        if media is not None:
            # Where positions have several axes: [axes, batch, sequence].
            positions = media.get("positions", positions)
        outputs = self._model(**given, position_ids=positions, use_cache=False)
        hidden: Tensor = outputs.last_hidden_state
        dtype = self.embedding.weight.dtype
        # Mamba adds up in float32, whatever its weights are.
        return hidden.to(dtype) if dtype.itemsize < hidden.dtype.itemsize else hidden

    def start_cache(self, batch: int, length: int) -> None:
        if self._takes_rows:
            # Our attention has a cache by position, so that prompts of different lengths share a
            # batch.
            self._attended.cache = KeyValueCache((batch, length))
        else:
            self._so_far = torch.zeros(batch, length, dtype=torch.long, device=self.device)

    def hidden_cached(
        self, input_ids: Tensor, positions: Tensor, media: Mapping[str, Any] | None = None
    ) -> Tensor:
        if self._so_far is not None:
            return self._computed_again(input_ids, positions, media)
        cache = self._attended.cache
        assert cache is not None, "start_cache comes first"
        positions = positions.expand_as(input_ids)
        cache.positions = positions
        cache.blocks = None if media is None else media.get("blocks")
        if media is not None and "positions" in media:
            # Behind the prompt they go on from the largest one, not from the count of tokens.
            self._behind = media["behind"]
        elif self._behind is not None:
            positions = positions + self._behind[:, None]
        return self._last_hidden(input_ids, positions, media)

    def _computed_again(
        self, input_ids: Tensor, positions: Tensor, media: Mapping[str, Any] | None
    ) -> Tensor:
        """Compute all tokens so far again, for models whose own cache is not supported."""
        assert self._so_far is not None
        if media is not None:
            self._seen = media, input_ids.size(1)
        positions = positions.expand_as(input_ids)
        # Slow, but right for any model: state-space layers have caches of their own.
        self._so_far.scatter_(1, positions, input_ids)
        length = int(positions.max()) + 1
        tokens = self._so_far[:, :length]
        places = torch.arange(length, device=tokens.device).expand_as(tokens)
        seen = None if self._seen is None else _of_length(*self._seen, places)
        hidden = self._last_hidden(tokens, places, seen)
        return hidden.gather(1, positions[..., None].expand(-1, -1, hidden.size(-1)))

    def end_cache(self) -> None:
        self._attended.cache = self._so_far = self._behind = self._seen = None


def _of_length(media: Mapping[str, Any], width: int, places: Tensor) -> dict[str, Any]:
    """Media of prompts, behind which answers stand.

    Args:
        media: of the prompts.
        width: to which these are padded.
        places: [batch, length], of all tokens so far in their sequences.
    """
    length = places.size(1)
    flat = media["places"]
    made = {**media, "places": flat // width * length + flat % width}
    if (known := media.get("positions")) is not None:
        # Padding behind a prompt has become the answer.
        behind = (places + media["behind"][:, None]).expand(3, -1, -1).clone()
        for row, end in enumerate(media["lengths"]):
            behind[:, row, :end] = known[:, row, :end]
        made["positions"] = behind
    return made


def _beside(module: nn.Module, known: set[nn.Module]) -> Iterator[nn.Module]:
    """Largest modules with parameters that are called, and neither are nor contain a known one."""
    for child in module.children():
        if child in known:
            continue
        # It contains the blocks or the embedding, or is a list: only its other children count.
        if known.intersection(child.modules()) or isinstance(child, nn.ModuleList):
            yield from _beside(child, known)
        elif any(True for _ in child.parameters()):
            yield child


def _compute_without_values(model: nn.Module) -> None:
    """Replace parts of a model that read values of tensors.

    A prediction runs a model on tensors without values, and training does not wait for the device.

    Args:
        model: of transformers.
    """
    for module in model.modules():
        for name in _MASKS_OF_STATES:
            if hasattr(module, name):
                setattr(module, name, _same_mask)
        # JetMoe, for one: its own forward calls tolist().
        if type(module).__name__.endswith("TopKGating"):
            module.forward = _Gating(module)


def _compute_in_float32(model: nn.Module, names: Sequence[str]) -> None:
    """Make modules compute with float32 copies of their parameters.

    Args:
        model: of transformers.
        names: parts of the names of the parameters.
    """
    owners = {
        name.rpartition(".")[0]
        for name, _ in model.named_parameters()
        if any(part in name for part in names)
    }
    for owner in owners:
        module = model.get_submodule(owner)
        # The weight of a convolution is read by the module around it.
        if isinstance(module, nn.Conv1d):
            module = model.get_submodule(owner.rpartition(".")[0])
        module.forward = _InFloat32(module)


def _reach(skipped: str, block: nn.Module, _: Any, output: Tensor) -> Tensor:
    """Give modules that a short sequence skips a gradient of 0, for which other ranks wait.

    So the optimizer also steps them in every strategy alike.
    """
    if not torch.is_grad_enabled():
        return output
    trained = [
        parameter.flatten()[:1]
        for name, parameter in block.named_parameters()
        if skipped in name.split(".") and parameter.requires_grad
    ]
    return output + torch.cat(trained).sum().to(output.dtype) * 0 if trained else output


class _InFloat32:
    """Forward pass of a module with float32 copies of its parameters, if they have 16 bits."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._plain = module, module.forward

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        copies = {
            name: parameter.float()
            for name, parameter in self._module.named_parameters()
            if parameter.dtype in (torch.bfloat16, torch.float16)
        }
        # Called once more with the copies in the place of the parameters.
        if copies:
            return functional_call(self._module, copies, inputs, options)
        return self._plain(*inputs, **options)


def _same_mask(attention_mask: Tensor | None, *_: Any) -> Tensor | None:
    return attention_mask  # padding is on the right, where no token sees it


class _Gating:
    """Router that chooses the experts of each token, and sorts tokens by expert."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, hidden: Tensor) -> tuple[Tensor, ...]:
        """Route [tokens, width].

        The results are the order of the pairs of token and expert, [tokens * experts per token],
        the token and the weight of each pair, [experts] counts of tokens, and [tokens, experts]
        logits.
        """
        module = self._module
        logits = module.layer(hidden).float()
        best, chosen = logits.topk(module.top_k, dim=1)
        weights = best.softmax(1).type_as(hidden).flatten()
        experts = chosen.flatten()
        # Stable, so that the tokens of an expert have the same order in every run.
        order = experts.argsort(stable=True)
        counts = torch.zeros(module.num_experts, dtype=torch.int64, device=hidden.device)
        counts = counts.scatter_add_(0, experts, torch.ones_like(experts))
        return order, order // module.top_k, weights[order], counts, logits


@dataclass
class _Attended:
    """State that all attention layers of a model share in a forward pass."""

    sequences: Sequences | None = None
    """Sequences of the batch; None: the cache is used."""
    cache: KeyValueCache | None = None
    blocks: Blocks | None = None
    """Of the sequences; None: no token sees a later one."""

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
            return self.cache.attend(layer, q, k, v, scores)
        assert self.sequences is not None
        batch = len(q)
        # All sequences in a row, as in ftkit's attention for rows.
        q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v))
        attended = attend(q, k, v, self.sequences, scores, self.blocks)
        return attended.unflatten(0, (batch, -1))


def _holder(module: nn.Module) -> nn.Module:
    """A module that computes nothing, with the parameters of another one."""
    made = nn.Module()
    for name, parameter in module.named_parameters(recurse=False):
        made.register_parameter(name, parameter)
    for name, child in module.named_children():
        made.add_module(name, _holder(child))
    return made


def _use_attention(model: nn.Module, attended: _Attended) -> None:
    """Make a model compute its attention by the function below.

    Args:
        model: of transformers, with a replaceable attention.
        attended: state that its layers share; it changes with each micro-batch.
    """
    # Transformers then makes no mask either.
    model.config._attn_implementation = _OURS  # type: ignore[union-attr]  # a PreTrainedModel
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
    attended: _Attended = module.attended
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


AttentionInterface.register(_OURS, _attention)


def _use_experts(model: nn.Module) -> None:
    """Make a model compute its experts by the functions below.

    Args:
        model: of transformers.
    """
    for experts in _fused_experts(model):
        module: Any = experts.module
        # Such modules call the function that the settings name; the others are given a forward of
        # ours.
        if experts.takes_pairs:
            module.config._experts_implementation = _OURS
        elif _stands_alone(module):
            module.forward = _RowsOfEach(module, transposed=experts.transposed)
        else:
            module.forward = _AllRows(module)
    for module in model.modules():
        if type(module).__name__ == "DbrxExperts":
            module.forward = _DbrxExperts(module)


def _fused_experts(model: nn.Module) -> Iterator[FusedExperts]:
    """Yield experts whose matrices are one parameter: all of a layer, or one of its products.

    Args:
        model: of transformers.
    """
    for module in model.modules():
        if hasattr(module, "is_transposed") and hasattr(module, "num_experts"):
            own, packed = module.named_parameters(recurse=False), packed_in(module)
            matrices = tuple(name for name, p in own if p.ndim == 3 or name in packed)
            yield FusedExperts(module, matrices, transposed=bool(module.is_transposed))
        elif _stands_alone(module):
            transposed = type(module).__name__.endswith("Gemm")
            yield FusedExperts(module, ("weight",), transposed, takes_pairs=False)
        elif type(module).__name__ == "Llama4TextExperts":
            names = ("gate_up_proj", "down_proj")
            yield FusedExperts(module, names, transposed=True, takes_pairs=False)


def _stands_alone(module: nn.Module) -> bool:
    """Return whether a module is one product of all experts, inside a layer that does the rest."""
    # By name: each family has a class of its own.
    return type(module).__name__.endswith(("ParallelExperts", "GroupedExpertsGemm"))


class _RowsOfEach:
    """Product of each row with the matrix of its expert."""

    def __init__(self, module: Any, *, transposed: bool) -> None:
        self._module, self._transposed = module, transposed

    def __call__(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Multiply [rows, in], sorted by expert, given the number of rows of each expert."""
        weight, counts = self._module.weight, counts.to(rows.device)
        ends = counts.cumsum(0, dtype=torch.int32)
        if matrices := packed_in(self._module).get("weight"):
            return packed_product(rows, weight, matrices, ends, rows_of_each(ends, len(rows)))
        return grouped_product(rows, weight, ends, transposed=self._transposed)


class _AllRows:
    """Llama 4's experts: each computes all tokens, multiplied by 0 where it was not chosen."""

    def __init__(self, module: Any) -> None:
        self._module, self._unquantized = module, module.forward

    def __call__(self, hidden: Tensor) -> Tensor:
        """Compute [experts * tokens, width], sorted by expert."""
        module, packed = self._module, packed_in(self._module)
        # Unquantised matrices go through transformers' own batched product.
        if not packed:
            result: Tensor = self._unquantized(hidden)
            return result
        tokens, experts = len(hidden) // module.num_experts, module.num_experts
        rows = [slice(i * tokens, (i + 1) * tokens) for i in range(experts)]
        ends = tokens * torch.arange(1, experts + 1, dtype=torch.int32, device=hidden.device)

        def product(given: Tensor, name: str) -> Tensor:
            return packed_product(given, getattr(module, name), packed[name], ends, rows)

        gate, up = product(hidden, "gate_up_proj").chunk(2, dim=-1)
        return product(up * module.act_fn(gate), "down_proj")


def _experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Experts function for transformers: it takes and returns hidden states, [tokens, width].

    chosen, int64, and weights are [tokens, experts per token].
    """
    pairs = _Pairs.of(chosen, module.num_experts)
    packed = packed_in(module)
    rows = rows_of_each(pairs.ends, len(pairs.order)) if packed else []

    def product(given: Tensor, name: str) -> Tensor:
        weight = getattr(module, name)
        if matrices := packed.get(name):
            result = packed_product(given, weight, matrices, pairs.ends, rows)
        else:
            result = grouped_product(given, weight, pairs.ends, transposed=module.is_transposed)
        if module.has_bias:
            # A bias for each expert, gathered for the rows in their sorted order.
            result = result + getattr(module, f"{name}_bias")[chosen.flatten()[pairs.order]]
        adapter = getattr(module, f"{name}{PAIRS}", None)
        # In the memory of the result, as LoRA of linear layers does.
        if adapter is None or not adapter.is_on:
            return result
        return result.add_(adapter(given, pairs.ends))

    x = pairs.rows_of(hidden)
    if module.has_gate:
        x = module._apply_gate(product(x, "gate_up_proj"))
    else:
        x = module.act_fn(product(x, "up_proj"))
    return pairs.sums(product(x, "down_proj"), weights).to(hidden.dtype)


@dataclass(frozen=True)
class _Pairs:
    """Pairs of a token and an expert that it chooses, sorted by expert."""

    order: Tensor
    """[pairs], the index of each pair among the choices of all tokens."""
    ends: Tensor
    """[experts] int32, the end of the pairs of each."""
    of_each: int
    """Experts of a token."""

    @classmethod
    def of(cls, chosen: Tensor, experts: int) -> Self:
        """Sort the choices, [tokens, experts per token]."""
        flat = chosen.flatten()
        # Stable, so that the tokens of an expert have the same order in every run.
        order = flat.argsort(stable=True)
        ends = count_of_each(flat, experts).cumsum(0, dtype=torch.int32)
        return cls(order, ends, chosen.size(-1))

    def rows_of(self, hidden: Tensor) -> Tensor:
        """Return the row of [tokens, width] for each pair."""
        return hidden[self.order // self.of_each]

    def sums(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Sum the rows of each token, [pairs, width], with [tokens, experts per token] weights."""
        x = rows * weights.flatten()[self.order, None]
        # Back in the order of tokens: index_add_ would sum in an order of its own on a GPU.
        return x[self.order.argsort()].unflatten(0, (-1, self.of_each)).sum(1)


class _DbrxExperts:
    """DBRX's experts: the matrices of all of them are below each other in one of two dimensions."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Compute [batch, sequence, width]; chosen and weights as in `_experts`."""
        mlp = self._module.mlp
        pairs = _Pairs.of(chosen, self._module.num_experts)

        def product(given: Tensor, weight: Tensor, *, transposed: bool = False) -> Tensor:
            of_each = weight.view(self._module.num_experts, -1, weight.size(-1))
            return grouped_product(given, of_each, pairs.ends, transposed=transposed)

        x = pairs.rows_of(hidden.flatten(0, 1))
        x = mlp.activation_fn(product(x, mlp.w1)) * product(x, mlp.v1)
        x = product(x, mlp.w2, transposed=True)
        return pairs.sums(x, weights).to(hidden.dtype).view_as(hidden)


ALL_EXPERTS_FUNCTIONS.register(_OURS, _experts)
