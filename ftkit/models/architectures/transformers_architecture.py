"""Architectures of transformers: any causal language model that the library has code for.

A model is built from `config.json` alone, on the meta device. No code from a hub is ever run.
"""

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
import torch.nn as nn
import transformers
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import (
    SCORE,
    Architecture,
    AttentionTraits,
    Initial,
    ModelLayout,
    SameNames,
    seed_of,
)
from ftkit.models.architectures.transformers_outline import (
    UNTRAINED,
    base_class_name,
    blocks_of,
    causal_class_name,
    compute_buffers,
    find_router_loss,
    finished_logits,
    freeze_stored_buffers,
    freeze_untrained,
    head_name,
    image_layers,
    language_model_name,
    layer_configs,
    model_name,
    score_class_name,
    set_depth,
    untranspose_layers,
    whole_class_name,
)
from ftkit.models.meta_device import on_meta_device
from ftkit.models.routing import RouterLoss
from ftkit.recipe.implementations import TRANSFORMERS
from ftkit.recipe.objectives import ScoreLabels

_IN_ROWS = {"full_attention", "sliding_attention"}
"""Kinds of layers in which only positions decide which tokens of its sequence a token sees."""
_OWN_MASKS = {"doge", "glm_moe_dsa"}
"""Families in which the mask of attention also depends on the values of tokens."""
_TWO_CALLS = {"diffllama"}
"""Families whose layers call attention twice for the same tokens, which our cache would mix."""
_POSITIONS_WITHOUT_LIMIT = 2048
"""Context of a model whose config.json has none."""
_FOLLOWING_LENGTH = {"dynamic", "longrope"}
"""Rotary embeddings that depend on the longest sequence of a batch, beyond the first context."""
_NO_PART = (
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id",
    "id2label", "label2id", "max_position_embeddings", "model_type", "output_router_logits",
    "pad_token_id", "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache",
    "vocab_size",
)  # fmt: skip
"""Settings that change no number for a given sequence."""

_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Names of layers that choose experts, or of modules that hold them."""
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_SWITCHED_OFF = ("output_router_logits", "use_mamba_kernels")
"""Settings that are switched off: the loss of routers, which ftkit computes itself, and kernels
without which some models refuse to run."""
_FUSED_STATES = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
"""Families whose kernels compute the last layer of a block of states with what is before it: on a
GPU, adapters of that layer would have no effect, and PEFT refuses them (seen in 0.21)."""
_MULTIPLIED = {
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba"), "dt_proj"),
    "deepseek_v4": "o_a_proj",
}
"""Layers whose weight the code of a family multiplies in its own way (seen in transformers 5.24):
adapters of them would have no effect, or another shape."""
_ASKED = {
    **dict.fromkeys(("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"), "weights_proj"),
    **dict.fromkeys(("dots3_note", "dots3_note_text"), "weights_proj"),
    "inkling2_loop_text": "_message_gate.down_proj",
}
"""Layers of whose weight the code of a family asks the dtype, to turn their input to it (seen in
transformers 5.24)."""
_INKLING_2 = ("inkling2", "inkling2_loop", "inkling2_loop_text", "inkling2_text")
_RENAMED = dict.fromkeys(_INKLING_2, "weight_proj")
"""Layers whose adapters PEFT does not find, because a rule of transformers for the family's first
files changes their names (seen in PEFT 0.21)."""
_IN_FLOAT32 = frozenset(_INKLING_2)
"""Families whose code gives float32 to some modules, which it keeps in float32."""
_GATES = ("message_gate_proj", "forget_gate_proj")
"""Linear layers among these modules."""
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN_EXPERTS = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts")
"""Keys of the number of experts in a layer, and of those that a token passes."""

_QUERY = ("q_proj", "query", "q_a_proj", "q_b_proj")
_KEY = ("k_proj", "key")
_VALUE = ("v_proj", "value")
_KEY_VALUE = ("kv_a_proj_with_mqa", "kv_b_proj")
_ALL_THREE = ("qkv_proj", "query_key_value", "c_attn", "qkv", "in_proj_qkv")


@dataclass(frozen=True)
class TransformersArchitecture(Architecture):
    """Architecture that transformers builds from a config.json."""

    settings: Mapping[str, Any]
    """Content of config.json."""
    depth: int | None = None
    """Number of blocks; None: as in the settings."""
    scores: ScoreLabels | None = None
    encoder: str | None = None
    beside: tuple[str, ...] = ()

    implementation = TRANSFORMERS
    body = "ftkit.models.bodies.transformers_body:TransformersBody"

    @cached_property
    def whole_config(self) -> PretrainedConfig:
        """Transformers' configuration of the whole model."""
        # auto_map names code on the hub, which is never run.
        fields = {key: _decoded(value) for key, value in self.settings.items() if key != "auto_map"}
        # By model type, not from a path: nothing but these fields decides what is built.
        whole = AutoConfig.for_model(fields.pop("model_type"), **fields)
        # For the dry run and predictions, which compute models of a few blocks.
        if self.depth is not None:
            set_depth(self._of_language(whole), self.depth)
        return whole

    @property
    def config(self) -> PretrainedConfig:
        """Transformers' configuration of the language model."""
        return self._of_language(self.whole_config)

    def _of_language(self, whole: PretrainedConfig) -> PretrainedConfig:
        return whole.text_config if self.is_part else whole

    @property
    def is_part(self) -> bool:
        """True if this is the language model within a multimodal one."""
        return whole_class_name(self.name) is not None

    # Our names are those in the whole model, because transformers' rules for older names, for
    # saving and for PEFT apply to the whole model.
    @cached_property
    def language_name(self) -> str:
        """Name of the language model, without its head, in the whole model."""
        return language_model_name(self.plain) if self.is_part else model_name(self.plain)

    def language_in(self, whole: PreTrainedModel) -> PreTrainedModel:
        """Return the language model, without its head."""
        language = whole.get_submodule(self.language_name)
        assert isinstance(language, PreTrainedModel)
        return language

    @property
    def name(self) -> str:
        return self.model_type

    @property
    def model_type(self) -> str:
        return str(self.settings["model_type"])

    @property
    def sees_prompts(self) -> bool:
        return self.name == "paligemma"

    @property
    def class_name(self) -> str:
        if self.scores:
            find = score_class_name if self.scores.names else base_class_name
            return find(self.name) or ""
        return self._class_name

    @property
    def _class_name(self) -> str:
        return whole_class_name(self.name) or causal_class_name(self.name) or ""

    @property
    def context_length(self) -> int:
        longest = getattr(self.config, "max_position_embeddings", None)
        rotary = getattr(self.config, "rope_parameters", None) or {}
        if rotary.get("rope_type") in _FOLLOWING_LENGTH:
            # Beyond it, the rotation of a sequence would depend on the longest one beside it.
            longest = rotary.get("original_max_position_embeddings") or longest
        return int(longest or _POSITIONS_WITHOUT_LIMIT)

    @property
    def window(self) -> None:
        """None: windows do not limit the context."""

    @property
    def layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def has_equal_layers(self) -> bool:
        return len(set(self._kinds)) == 1

    @property
    def depth_of_all_kinds(self) -> int:
        """Smallest number of first blocks with one of each kind."""
        return max(self._kinds.index(kind) for kind in self._kinds) + 1

    @cached_property
    def _kinds(self) -> list[object]:
        """Kind of each block: its type in the settings, and the shapes of its parameters."""
        types = getattr(self.config, "layer_types", None) or ()
        if len(types) != self.layers:
            types = [""] * self.layers
        # Shapes too: DeepSeek's first blocks, for one, are dense, and all others have experts.
        shapes = ({name: p.shape for name, p in b.named_parameters()} for b in self._blocks)
        return [(kind, frozenset(own.items())) for kind, own in zip(types, shapes, strict=True)]

    @property
    def can_compile(self) -> bool:
        # An error inside torch 2.13 ends it, with transformers 5.24.
        return self.name not in ("inkling2_loop", "inkling2_loop_text")

    @property
    def skipped_modules(self) -> str | None:
        # Its attention compresses stretches of a sequence, if there is a whole one.
        return "compressor" if self.name == "deepseek_v4" else None

    @cached_property
    def attention(self) -> AttentionTraits:
        config = self.config
        # Gemma 4, for one, has larger heads where attention is not windowed.
        layers = layer_configs(config)
        sizes = [_heads(layer) for layer in layers]
        names = {name.rpartition(".")[2] for name in self.untied_shapes}
        return AttentionTraits(
            heads=max(heads for heads, _ in sizes),
            head_size=max(size for _, size in sizes),
            width=sum(heads * size for heads, size in sizes),
            is_plain=not (
                getattr(config, "attn_logit_softcapping", None)
                or "sinks" in names
                # Latent attention, as in DeepSeek: keys are wider than values.
                or any(hasattr(layer, "v_head_dim") for layer in layers)
            ),
            takes_rows=self.takes_rows,
            common_heads=math.gcd(*(heads for heads, _ in sizes)),
            shares_rows=self.takes_rows,
        )

    @property
    def takes_rows(self) -> bool:
        """True if attention can be replaced, and nothing else mixes tokens."""
        # Chunked attention and state-space layers have types of their own, and are not in the set.
        kinds = set(getattr(self.config, "layer_types", None) or ())
        language = self.language_in(self.plain)
        is_interface = (
            language._supports_attention_backend and self.name not in _OWN_MASKS | _TWO_CALLS
        )
        return bool(is_interface) and kinds <= _IN_ROWS

    @property
    def _class(self) -> type[PreTrainedModel]:
        found: type[PreTrainedModel] = getattr(transformers, self._class_name)
        return found

    @property
    def logit_softcap(self) -> float | None:
        return self._of_logits[1]

    @property
    def logit_scale(self) -> float:
        return self._of_logits[0]

    @property
    def logit_count(self) -> int | None:
        return self._of_logits[2]

    @cached_property
    def _of_logits(self) -> tuple[float, float | None, int | None]:
        """Factor and bound that the model applies to its logits, and how many it keeps, if not all.

        Raises:
            UserError: it changes its logits in another way.
        """
        # Of both signs, and up to where a bound of 30 to 50 shows within the tolerance.
        products = torch.linspace(-4.0, 4.0, self.config.vocab_size, device="cpu")
        logits = finished_logits(self.build(), self.language_name, products)
        count = len(logits) if len(logits) < len(products) else None
        products = products[:count]
        known = (getattr(self.config, name, None) for name in _SOFTCAPS)
        softcap = next((cap for cap in known if cap), None)
        # The last product is near 4, so this divides by no zero.
        factor = float(logits[-1] / products[-1])
        for scale, bound in ((1.0, None), (1.0, softcap), (factor, None)):
            expected = products * scale
            expected = torch.tanh(expected / bound) * bound if bound else expected
            # Tried on numbers, because families name these settings differently, or scale without a
            # setting.
            if torch.allclose(logits, expected, rtol=1e-6, atol=0.0):
                return scale, bound, count
        raise UserError(
            f"{self.class_name} changes its logits in a way that ftkit does not know. Choose "
            "another model."
        )

    @property
    def expert_share(self) -> float:
        experts, chosen = (
            next((n for name in names if (n := getattr(self.config, name, None))), None)
            for names in (_EXPERTS, _CHOSEN_EXPERTS)
        )
        return chosen / experts if chosen and experts else 1.0

    @cached_property
    def router_loss(self) -> RouterLoss | None:
        return find_router_loss(self.outline)

    @property
    def asks_for_router_loss(self) -> bool:
        return bool(getattr(self.config, "output_router_logits", False))

    @cached_property
    def embedding(self) -> str:
        wanted = self.outline.get_input_embeddings().weight
        return next(name for name, p in self.outline.named_parameters() if p is wanted)

    @property
    def is_usually_tied(self) -> bool:
        return bool(getattr(self.whole_config, "tie_word_embeddings", False))

    @cached_property
    def lora_layers(self) -> Mapping[str, tuple[str, ...]]:
        by_key: dict[str, dict[str, None]] = {}
        for block in self._blocks:
            for name, module in block.named_modules():
                is_trained = isinstance(module, nn.Linear) and module.weight.requires_grad
                if is_trained and not self._has_no_adapter(name):
                    for key in _lora_keys(name):
                        by_key.setdefault(key, {})[name] = None
        # Over all blocks, because they may differ; a dict per key keeps the order without repeats.
        return {key: tuple(names) for key, names in by_key.items()} | {"lora_head": ("lm_head",)}

    def is_untrained(self, layer: str) -> bool:
        return not UNTRAINED.isdisjoint(layer.split("."))

    def _has_no_adapter(self, layer: str) -> bool:
        """Return whether an adapter of a linear layer has no effect, or is not found by PEFT."""
        last = layer.rpartition(".")[2]
        is_fused = self.name in _FUSED_STATES and last == "out_proj"
        others = (_MULTIPLIED.get(self.name), _RENAMED.get(self.name))
        return is_fused or last in others or self._is_gate(layer)

    def _is_gate(self, layer: str) -> bool:
        return self.name in _IN_FLOAT32 and layer.endswith(_GATES)

    @property
    def float32_modules(self) -> tuple[str, ...]:
        """Parts of the names of parameters with which the model computes in float32."""
        kept = self._class._keep_in_fp32_modules_strict
        return tuple(kept or ()) if self.name in _IN_FLOAT32 else ()

    def keeps_in_full(self, layer: str) -> bool:
        """Return whether a layer is not quantised, given its name in its block.

        Routers are not, nor are layers whose weight the code of the family reads, because a packed
        weight has another shape and dtype.
        """
        read = (_MULTIPLIED | _ASKED).get(self.name)
        is_read = read is not None and layer.endswith(read)
        return is_router(layer) or is_read or self._is_gate(layer)

    @cached_property
    def untied_shapes(self) -> dict[str, torch.Size]:
        # The head has our name in every architecture, and stands last.
        head = head_name(self.outline)
        own, of_head = {}, {}
        for name, parameter in self.outline.named_parameters():
            module, _, kind = name.rpartition(".")
            if module == head:
                of_head[f"lm_head.{kind}"] = parameter.shape
            elif not self.is_rest(name):
                own[name] = parameter.shape
        return own | of_head

    def is_rest(self, name: str) -> bool:
        """Return whether a parameter or buffer of the whole model stays as it is in the files.

        These are all outside of its language model that are not trained.
        """
        if not self.is_part or self.is_beside(name):
            return False
        ours = (f"{self.language_name}.", f"{head_name(self.outline)}.")
        return not name.startswith(ours) or name.startswith(self._of_images)

    @cached_property
    def _of_images(self) -> tuple[str, ...]:
        """Beginnings of the names of parameters in blocks that text passes by."""
        blocks = blocks_of(self.language_in(self.plain), self.layers)
        named = self.plain.named_modules()
        found = next(name for name, module in named if module is blocks)
        return tuple(f"{found}.{place}." for place in image_layers(self.config))

    @cached_property
    def rest_shapes(self) -> dict[str, torch.Size]:
        stored = self.plain.state_dict().items() if self.is_part else ()
        return {name: tensor.shape for name, tensor in stored if self.is_rest(name)}

    @cached_property
    def outline(self) -> PreTrainedModel:
        """The model on the meta device, for inspection."""
        return self.build()

    @property
    def _blocks(self) -> nn.ModuleList:
        return blocks_of(self.language_in(self.outline), self.layers)

    @cached_property
    def plain(self) -> PreTrainedModel:
        """The model on the meta device, as transformers makes it."""
        with on_meta_device():
            return self._class(copy.deepcopy(self.whole_config))

    @cached_property
    def transposed(self) -> frozenset[str]:
        """Names of weights that files hold as [in, out]."""
        layers = self.plain.named_modules()
        return frozenset(f"{name}.weight" for name, m in layers if isinstance(m, Conv1D))

    @cached_property
    def scalars(self) -> frozenset[str]:
        """Names of parameters that are [1] here and have no dimension in files."""
        return frozenset(name for name, p in self.plain.state_dict().items() if p.ndim == 0)

    def build(self) -> PreTrainedModel:
        """Build the model on the meta device, with computed buffers on the CPU.

        Embedding and head are not tied, there is no dropout, and all products are linear layers.
        """
        whole = copy.deepcopy(self.whole_config)
        config = self._of_language(whole)
        # Tied by ourselves, once the parameters are filled.
        whole.tie_word_embeddings = config.tie_word_embeddings = config.use_cache = False
        for name, value in config.to_dict().items():
            is_rate = name.endswith(("dropout", "_pdrop", "dropout_prob", "layerdrop"))
            if is_rate and isinstance(value, float):
                # Dropout of the base model would make updates depend on the rank; adapters have
                # their own.
                setattr(config, name, 0.0)
        for name in _SWITCHED_OFF:
            if hasattr(config, name):
                setattr(config, name, False)
        # Only used where ftkit's attention cannot take the place of the model's own.
        sdpa = self._class._supports_sdpa and self.name not in _OWN_MASKS
        # None: an encoder takes what its own code supports (Gemma 4's of audio lacks SDPA).
        whole._attn_implementation = None
        config._attn_implementation = "sdpa" if sdpa else "eager"
        with on_meta_device():
            model = self._class(whole)
            part = self.language_in(model) if self.is_part else model
            untranspose_layers(part)
            for place in image_layers(config):
                # Empty, so that all others keep their names; transformers calls it for no text.
                blocks_of(part, self.layers)[place] = nn.Module()
        # Rotary tables are in no file, so they need values before the weights are filled in.
        compute_buffers(part)
        freeze_untrained(part)
        for trained in (part, *map(model.get_submodule, self.beside)):
            freeze_stored_buffers(trained)
        return model

    def initial(self, name: str, shape: torch.Size) -> Initial:
        # Matrices are drawn; norms begin as the identity.
        if len(shape) > 1:
            return "normal"
        if name.endswith(".bias"):
            return "zeros"
        return "zeros" if self._adds_one(name) else "ones"

    def _adds_one(self, name: str) -> bool:
        """Return whether one is added to a parameter of a norm, which then begins with zeros."""
        layer, _, kind = name.rpartition(".")
        norm: Any = self.outline.get_submodule(layer)
        if "Norm" not in type(norm).__name__:
            return False
        # As transformers begins it, because a model may have norms of both kinds (Qwen3-Next).
        begun = copy.deepcopy(norm).to_empty(device="cpu")
        with torch.no_grad():
            begun.get_parameter(kind).fill_(1.0)
            self.outline._init_weights(begun)
            return not begun.get_parameter(kind).any()

    def drawn(self, settings: Mapping[str, Any], seed: int) -> Iterator[tuple[str, Tensor]]:
        head = head_name(self.outline)
        for name, piece in self._pieces():
            begun = copy.deepcopy(piece).to_empty(device="cpu")
            owner = self._owner(name)
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.default_generator.manual_seed(seed_of(name, seed))
                for parameter in begun.parameters():
                    parameter.fill_(math.nan)
                # Children first, as transformers does: a block may draw its layers anew.
                begun.apply(owner._init_weights)
            for kind, parameter in begun.named_parameters():
                if parameter.isnan().any():
                    raise UserError(
                        f"train.from_scratch is true, but transformers does not say how {name}."
                        f"{kind} of {self.class_name} begins. Try --train.from_scratch false."
                    )
                yield f"{'lm_head' if name == head else name}.{kind}", parameter.detach()

    def _pieces(self) -> Iterator[tuple[str, nn.Module]]:
        """Blocks, and the modules with parameters outside of them, by name.

        A block begins as a whole: how a layer in it begins may depend on its place.
        """
        blocks = set(self._blocks)
        inside = {module for block in blocks for module in block.modules()} - blocks
        for name, module in self.outline.named_modules():
            if module in inside or self.is_rest(f"{name}."):
                continue
            if module in blocks or next(module.parameters(recurse=False), None) is not None:
                yield name, module

    def _owner(self, name: str) -> PreTrainedModel:
        """The innermost model around a module, whose rules hold for it."""
        while name:
            name = name.rpartition(".")[0]
            found = self.outline.get_submodule(name)
            if isinstance(found, PreTrainedModel):
                return found
        return self.outline

    def with_layers(self, layers: int) -> Self:
        return dataclasses.replace(self, depth=layers)

    def with_vocabulary(self, size: int) -> Self:
        return dataclasses.replace(self, settings={**self.settings, "vocab_size": size})

    def with_scores(self, scores: ScoreLabels) -> Self:
        return dataclasses.replace(self, scores=scores)

    def with_encoder(self, place: str, beside: tuple[str, ...] = ()) -> Self:
        return dataclasses.replace(self, encoder=place, beside=beside or self.beside)

    def identity(self) -> dict[str, Any]:
        # Differences from the defaults: keys that a newer transformers adds change no fingerprint.
        settings = self.config.to_diff_dict()
        return {
            "implementation": "transformers",
            "model_type": self.name,
            **{key: value for key, value in settings.items() if key not in _NO_PART},
        }

    def naming_in(self, layout: ModelLayout) -> SameNames | None:
        if layout != "hf":
            return None
        if self.scores is not None and not self.scores.names:
            # As transformers saves a model without an output layer.
            prefix = f"{self.outline.base_model_prefix}."
            return SameNames(head=head_name(self.outline), prefix=prefix)
        return SameNames(head=SCORE if self.scores else head_name(self.outline))

    def settings_in(self, layout: ModelLayout) -> dict[str, Any] | None:
        return self.whole_config.to_diff_dict() if layout == "hf" else None

    def obstacle_to(self, layout: ModelLayout) -> str | None:
        if layout == "hf":
            return None
        return "is a model of transformers, which LitGPT's layout does not hold. Try --format hf."


def _heads(config: PretrainedConfig) -> tuple[int, int]:
    """Return the number of heads and the size of each, of a layer with this configuration."""
    heads = int(getattr(config, "num_attention_heads", 0))  # state-space models have none
    # Older configurations have no head_dim, and their heads divide the width.
    return heads, int(getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1))


def _decoded(value: Any) -> Any:
    """Decode floats that JSON does not have, which transformers writes as objects."""
    if isinstance(value, list):
        return [_decoded(one) for one in value]
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _decoded(one) for key, one in value.items()}
    return value


def is_router(name: str) -> bool:
    """Return whether a layer chooses experts, given its name in its block."""
    return not _ROUTERS.isdisjoint(name.split("."))


def _lora_keys(name: str) -> tuple[str, ...]:
    """Keys of recipes that adapt a linear layer, given its name in its block."""
    *path, last = name.split(".")
    if is_router(name):
        return ()
    if not any("attn" in part or "attention" in part for part in path):
        return ("lora_mlp",)
    keys = {
        "lora_query": (*_QUERY, *_ALL_THREE),
        "lora_key": (*_KEY, *_KEY_VALUE, *_ALL_THREE),
        "lora_value": (*_VALUE, *_KEY_VALUE, *_ALL_THREE),
    }
    return tuple(key for key, names in keys.items() if last in names) or ("lora_projection",)
