"""Transformers' models as bodies: their own modules and names, with ftkit's attention in them."""

from collections.abc import Iterator, Sequence
from typing import Any, Self

import torch
import torch.nn as nn
from torch import Tensor

from ftkit.models.architectures.router_loss import RouterLoss
from ftkit.models.architectures.transformers_architecture import TransformersArchitecture, is_router
from ftkit.models.architectures.transformers_outline import (
    blocks_of,
    experts_of,
    head_name,
    router_outputs,
)
from ftkit.models.bodies.attention import AttentionKernel, Sequences
from ftkit.models.bodies.body import Body, GatedMlp
from ftkit.models.bodies.experts import FusedExperts
from ftkit.models.bodies.norm import replace_norms
from ftkit.models.bodies.routing import Routing
from ftkit.models.bodies.transformers_attention import Attended, KeyValueCache, follow
from ftkit.models.bodies.transformers_experts import compute_experts, fused_experts

_ACTIVATIONS = {"SiLUActivation": "silu", "SiLU": "silu", "GELUTanh": "gelu tanh"}
"""Activations by the names of their classes."""

_LIKE_PARAMETERS = {"bias", "mup_vector"}
"""Tables of factors, which have the dtype of the parameters; the others hold angles."""


_MASKS_OF_STATES = ("_update_mamba_mask", "_update_linear_attn_mask")
"""Methods that read a mask of padding to see if it is needed; there is none here."""


class TransformersBody(Body):
    """Transformers' model below its output layer."""

    def __init__(self, architecture: TransformersArchitecture) -> None:
        super().__init__()
        whole = architecture.build()
        self._heads = [whole.get_submodule(head_name(whole))]  # in a list: not registered
        model = architecture.language_in(whole)
        self._model_name = architecture.language_name
        self._place(model)
        self._takes_rows = architecture.takes_rows
        self._attended = Attended()
        if self._takes_rows:
            follow(model, self._attended)
        compute_experts(model)
        replace_norms(model)
        _compute_without_values(model)
        # Before adapters are added: `train` switches those only.
        self._own = tuple(model.modules())
        self._depth = architecture.layers
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
        self.train()

    def train(self, mode: bool = True) -> Self:
        """Switch the layers of adapters alone: the model's own have no dropout and no noise."""
        super().train(mode)
        # Dropout, jitter and sampled routing would make updates depend on the rank, and read
        # values.
        for module in self._own:
            module.training = False
        return self

    @property
    def _model(self) -> Any:
        return self.get_submodule(self._model_name)

    def _place(self, model: nn.Module) -> None:
        """Register the language model under its name in the whole model, which may be a path."""
        *path, last = self._model_name.split(".")
        parent: nn.Module = self
        for name in path:
            parent.add_module(name, nn.Module())
            parent = parent.get_submodule(name)
        parent.add_module(last, model)

    @property
    def embedding(self) -> nn.Embedding:
        found = self._model.get_input_embeddings()
        assert isinstance(found, nn.Embedding)
        return found

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
        return fused_experts(self._model)

    @property
    def kept_in_full(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.blocks.named_modules() if is_router(name))

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
            follows = kind in _LIKE_PARAMETERS and table.is_floating_point()
            dtype = self.embedding.weight.dtype if follows else table.dtype
            self._model.get_submodule(owner)._buffers[kind] = table.to(device, dtype, copy=True)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def max_length(self) -> int:
        return self._max_length

    def hidden(
        self, input_ids: Tensor, lengths: Sequence[int] | None, kernel: AttentionKernel
    ) -> Tensor:
        sequences = Sequences.of(input_ids, lengths, kernel)
        self._attended.sequences, self._attended.cache = sequences, None
        if lengths is None:
            places = torch.arange(input_ids.shape[1], device=input_ids.device)
        else:
            places = sequences.positions(input_ids.device)
        return self._last_hidden(input_ids, places.expand_as(input_ids))

    def _last_hidden(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        found = self._model(input_ids=input_ids, position_ids=positions, use_cache=False)
        hidden: Tensor = found.last_hidden_state
        return hidden

    def start_cache(self, batch: int, length: int) -> None:
        if self._takes_rows:
            self._attended.cache = KeyValueCache((batch, length))
        else:
            self._so_far = torch.zeros(batch, length, dtype=torch.long, device=self.device)

    def hidden_cached(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        if self._so_far is not None:
            return self._computed_again(input_ids, positions)
        cache = self._attended.cache
        assert cache is not None, "start_cache comes first"
        positions = positions.expand_as(input_ids)
        cache.positions = positions
        return self._last_hidden(input_ids, positions)

    def _computed_again(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Compute all tokens so far again, for models whose own cache is not supported."""
        assert self._so_far is not None
        positions = positions.expand_as(input_ids)
        # Slow, but right for any model: state-space layers have caches of their own.
        self._so_far.scatter_(1, positions, input_ids)
        length = int(positions.max()) + 1
        tokens = self._so_far[:, :length]
        places = torch.arange(length, device=tokens.device).expand_as(tokens)
        hidden = self._last_hidden(tokens, places)
        return hidden.gather(1, positions[..., None].expand(-1, -1, hidden.size(-1)))

    def end_cache(self) -> None:
        self._attended.cache = self._so_far = None


def _beside(module: nn.Module, known: set[nn.Module]) -> Iterator[nn.Module]:
    """Largest modules with parameters that neither are nor contain a known one."""
    for child in module.children():
        if child in known:
            continue
        if known.intersection(child.modules()):
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
        order = experts.argsort(stable=True)
        counts = torch.zeros(module.num_experts, dtype=torch.int64, device=hidden.device)
        counts = counts.scatter_add_(0, experts, torch.ones_like(experts))
        return order, order // module.top_k, weights[order], counts, logits
