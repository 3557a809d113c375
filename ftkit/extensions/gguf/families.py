"""Families of models in GGUF files: names of tensors on both sides, and what llama.cpp expects.

A family is data: names in blocks and around them, with shapes as words of `_sizes`; how numbers are
changed between Hugging Face's convention and llama.cpp's; settings that llama.cpp takes for
granted; and keys of the metadata. Seen in llama.cpp of July 2026 (llama-cpp-python 0.3.36):
gguf-py/gguf/tensor_mapping.py, conversion, src/models.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

Rule = Literal[
    "",
    "pairs",
    "plus one",
    "first half",
    "second half",
    "first columns",
    "second columns",
    "even",
    "odd",
    "transposed",
    "tiled",
    "tiled columns",
    "decay",
]
"""How llama.cpp's numbers follow from Hugging Face's.

pairs: the two numbers of a rotated pair are neighbours, not in the two halves of a head. plus one:
norms multiply by one more. halves: of the rows. first, second, even, odd: columns, which become
rows. tiled: of the value heads of a linear attention the first ones of all key heads come first,
not all of one key head; they are the last rows, or the columns. decay: tiled, and minus the
exponential.
"""


class Row(NamedTuple):
    """A tensor of a family, or of each of its blocks."""

    name: str
    """llama.cpp's."""
    theirs: str
    """Hugging Face's."""
    shape: str
    """Words of `_sizes`."""
    rule: Rule = ""
    needs: str = ""
    """The setting that has to be on for a model to have the tensor; "": every model has it."""
    layers: str = ""
    """Kind of the layers that have the tensor, as `_kinds` says; "": all have it."""


class NamedTensor(NamedTuple):
    """A tensor of a model."""

    theirs: str
    """Hugging Face's name."""
    shape: tuple[int, ...]
    """In torch's order, as llama.cpp has it."""
    rule: Rule


_NORMS = (
    Row("attn_norm.weight", "input_layernorm.weight", "width"),
    Row("ffn_norm.weight", "post_attention_layernorm.weight", "width"),
)
_NORMS_AFTER = (
    Row("post_attention_norm.weight", "post_attention_layernorm.weight", "width"),
    Row("post_ffw_norm.weight", "post_feedforward_layernorm.weight", "width"),
)
_GEMMA_NORMS = (
    Row("attn_norm.weight", "input_layernorm.weight", "width"),
    Row("ffn_norm.weight", "pre_feedforward_layernorm.weight", "width"),
    *_NORMS_AFTER,
)
_ATTENTION = (
    Row("attn_q.weight", "self_attn.q_proj.weight", "queries width"),
    Row("attn_k.weight", "self_attn.k_proj.weight", "keys width"),
    Row("attn_v.weight", "self_attn.v_proj.weight", "keys width"),
    Row("attn_output.weight", "self_attn.o_proj.weight", "width queries"),
)
_BIASES = (
    Row("attn_q.bias", "self_attn.q_proj.bias", "queries"),
    Row("attn_k.bias", "self_attn.k_proj.bias", "keys"),
    Row("attn_v.bias", "self_attn.v_proj.bias", "keys"),
)
_OUTPUT_BIAS = Row("attn_output.bias", "self_attn.o_proj.bias", "width")
_HEAD_NORMS = (
    Row("attn_q_norm.weight", "self_attn.q_norm.weight", "head"),
    Row("attn_k_norm.weight", "self_attn.k_norm.weight", "head"),
)
_FEED_FORWARD = (
    Row("ffn_gate.weight", "mlp.gate_proj.weight", "inner width"),
    Row("ffn_up.weight", "mlp.up_proj.weight", "inner width"),
    Row("ffn_down.weight", "mlp.down_proj.weight", "width inner"),
)
_FEED_FORWARD_BIASES = (
    Row("ffn_gate.bias", "mlp.gate_proj.bias", "inner", needs="mlp_bias"),
    Row("ffn_up.bias", "mlp.up_proj.bias", "inner", needs="mlp_bias"),
    Row("ffn_down.bias", "mlp.down_proj.bias", "width", needs="mlp_bias"),
)
# llama.cpp keeps such fused matrices as they are; ffn_up is gate and up.
_FUSED_FEED_FORWARD = (
    Row("ffn_up.weight", "mlp.gate_up_proj.weight", "both width"),
    Row("ffn_down.weight", "mlp.down_proj.weight", "width inner"),
)
_EXPERTS = (
    Row("ffn_gate_inp.weight", "mlp.gate.weight", "experts width"),
    Row("ffn_gate_exps.weight", "mlp.experts.gate_up_proj", "experts expert width", "first half"),
    Row("ffn_up_exps.weight", "mlp.experts.gate_up_proj", "experts expert width", "second half"),
    Row("ffn_down_exps.weight", "mlp.experts.down_proj", "experts width expert"),
)
_GPT_OSS = (
    Row("attn_norm.weight", "input_layernorm.weight", "width"),
    Row("post_attention_norm.weight", "post_attention_layernorm.weight", "width"),
    *_ATTENTION,
    *_BIASES,
    _OUTPUT_BIAS,
    Row("attn_sinks.weight", "self_attn.sinks", "heads"),
    Row("ffn_gate_inp.weight", "mlp.router.weight", "experts width"),
    Row("ffn_gate_inp.bias", "mlp.router.bias", "experts"),
    Row("ffn_gate_exps.weight", "mlp.experts.gate_up_proj", "experts inner width", "even"),
    Row("ffn_gate_exps.bias", "mlp.experts.gate_up_proj_bias", "experts inner", "even"),
    Row("ffn_up_exps.weight", "mlp.experts.gate_up_proj", "experts inner width", "odd"),
    Row("ffn_up_exps.bias", "mlp.experts.gate_up_proj_bias", "experts inner", "odd"),
    Row("ffn_down_exps.weight", "mlp.experts.down_proj", "experts width inner", "transposed"),
    Row("ffn_down_exps.bias", "mlp.experts.down_proj_bias", "experts width"),
)


def _with(
    rows: tuple[Row, ...], rule: Rule = "", needs: str = "", layers: str = ""
) -> tuple[Row, ...]:
    return tuple(
        row._replace(rule=rule or row.rule, needs=needs or row.needs, layers=layers or row.layers)
        for row in rows
    )


# Gated delta nets; llama.cpp names them as it names Mamba's.
_LINEAR_ATTENTION = (
    Row("attn_qkv.weight", "linear_attn.in_proj_qkv.weight", "mixed width", "tiled"),
    Row("attn_gate.weight", "linear_attn.in_proj_z.weight", "values width", "tiled"),
    Row("ssm_conv1d.weight", "linear_attn.conv1d.weight", "mixed kernel", "tiled"),
    Row("ssm_dt.bias", "linear_attn.dt_bias", "states", "tiled"),
    Row("ssm_a", "linear_attn.A_log", "states", "decay"),
    Row("ssm_beta.weight", "linear_attn.in_proj_b.weight", "states width", "tiled"),
    Row("ssm_alpha.weight", "linear_attn.in_proj_a.weight", "states width", "tiled"),
    Row("ssm_norm.weight", "linear_attn.norm.weight", "state"),
    Row("ssm_out.weight", "linear_attn.out_proj.weight", "width values", "tiled columns"),
)
_GEMMA4_ATTENTION = (
    _ATTENTION[0],
    *_with((*_ATTENTION[1:2], _HEAD_NORMS[1]), layers="own keys"),
    *_with(_ATTENTION[2:3], layers="own values"),
    _ATTENTION[3],
    _HEAD_NORMS[0],
)
_GEMMA4_INPUTS = _with(
    (
        Row("inp_gate.weight", "per_layer_input_gate.weight", "input width"),
        Row("proj.weight", "per_layer_projection.weight", "width input"),
        Row("post_norm.weight", "post_per_layer_input_norm.weight", "width"),
    ),
    needs="hidden_size_per_layer_input",
)
_GEMMA4_EXPERTS = _with(
    (
        Row("ffn_gate_inp.weight", "router.proj.weight", "experts width"),
        Row("ffn_gate_inp.scale", "router.scale", "width"),
        Row("ffn_gate_up_exps.weight", "experts.gate_up_proj", "experts pair width"),
        Row("ffn_down_exps.weight", "experts.down_proj", "experts width expert"),
        Row("ffn_down_exps.scale", "router.per_expert_scale", "experts"),
        Row("pre_ffw_norm_2.weight", "pre_feedforward_layernorm_2.weight", "width"),
        Row("post_ffw_norm_1.weight", "post_feedforward_layernorm_1.weight", "width"),
        Row("post_ffw_norm_2.weight", "post_feedforward_layernorm_2.weight", "width"),
    ),
    needs="enable_moe_block",
)
_LLAMA4_EXPERTS = (
    Row("ffn_gate_inp.weight", "feed_forward.router.weight", "experts width"),
    Row(
        "ffn_gate_exps.weight",
        "feed_forward.experts.gate_up_proj",
        "experts expert width",
        "first columns",
    ),
    Row(
        "ffn_up_exps.weight",
        "feed_forward.experts.gate_up_proj",
        "experts expert width",
        "second columns",
    ),
    Row(
        "ffn_down_exps.weight",
        "feed_forward.experts.down_proj",
        "experts width expert",
        "transposed",
    ),
    Row("ffn_gate_shexp.weight", "feed_forward.shared_expert.gate_proj.weight", "expert width"),
    Row("ffn_up_shexp.weight", "feed_forward.shared_expert.up_proj.weight", "expert width"),
    Row("ffn_down_shexp.weight", "feed_forward.shared_expert.down_proj.weight", "width expert"),
)
_LLAMA4_FEED_FORWARD = (
    Row("ffn_gate.weight", "feed_forward.gate_proj.weight", "inner width"),
    Row("ffn_up.weight", "feed_forward.up_proj.weight", "inner width"),
    Row("ffn_down.weight", "feed_forward.down_proj.weight", "width inner"),
)


_ROTATED = (*_with(_ATTENTION[:2], "pairs"), *_ATTENTION[2:])
_LLAMA = (
    *_NORMS,
    *_ROTATED,
    *_with(_BIASES[:2], "pairs", "attention_bias"),
    *_with((_BIASES[2], _OUTPUT_BIAS), needs="attention_bias"),
    *_FEED_FORWARD,
    *_FEED_FORWARD_BIASES,
)
_AROUND = (
    Row("token_embd.weight", "model.embed_tokens.weight", "vocabulary width"),
    Row("output_norm.weight", "model.norm.weight", "width"),
    Row("output.weight", "lm_head.weight", "vocabulary width"),
)


@dataclass(frozen=True)
class Family:
    """What llama.cpp and Hugging Face call the parts of a family."""

    architecture: str
    """llama.cpp's name."""
    block: tuple[Row, ...]
    around: tuple[Row, ...] = _AROUND
    expected: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    """Settings that llama.cpp does not read; it computes these values."""
    stretched: tuple[str, ...] = ("linear",)
    """Ways to stretch positions that it computes."""
    counts: Mapping[str, str] = field(default_factory=dict)
    """Further keys of the metadata that are whole numbers, with the settings that they hold."""
    factors: Mapping[str, str] = field(default_factory=dict)
    """The same for keys that are floats."""
    alike: Mapping[str, str] = field(default_factory=dict)
    """Settings that llama.cpp takes for the same as others."""
    sliding: int = 0
    """llama.cpp takes each such layer for one that sees all tokens, and the others for ones with a
    window; 0: it knows no windows of single layers."""
    rotates_part: bool = False
    """True: of the numbers of a head some may not be rotated."""
    heads_fill_width: bool = False
    """True: heads have the width of the model together."""
    says_head_size: bool = True
    """True: also where the size of heads follows from others."""
    says_rotated: bool = False
    """True: how many numbers of a head are rotated, and the size of the vocabulary."""
    written: bool = True
    """False: files are read alone."""


_SILU = {"hidden_act": "silu"}
_GELU = {"hidden_activation": "gelu_pytorch_tanh"}
_GEMMA_ROWS = _with((*_GEMMA_NORMS, *_HEAD_NORMS), "plus one")
_LLAMA_FAMILY = Family("llama", _LLAMA, stretched=("linear", "llama3"), says_rotated=True)
_EXPERT_COUNTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_GEMMA4_AROUND = (
    *_AROUND,
    *_with(
        (
            Row(
                "per_layer_token_embd.weight",
                "model.embed_tokens_per_layer.weight",
                "vocabulary inputs",
            ),
            Row(
                "per_layer_model_proj.weight",
                "model.per_layer_model_projection.weight",
                "inputs width",
            ),
            Row("per_layer_proj_norm.weight", "model.per_layer_projection_norm.weight", "input"),
        ),
        needs="hidden_size_per_layer_input",
    ),
)
_GEMMA_AROUND = (_AROUND[0], *_with(_AROUND[1:2], "plus one"), _AROUND[2])

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA_FAMILY,
    "mistral": _LLAMA_FAMILY,
    "qwen2": Family(
        "qwen2",
        (*_NORMS, *_ATTENTION, *_BIASES, *_FEED_FORWARD),
        says_head_size=False,
    ),
    "qwen3": Family(
        "qwen3",
        (*_NORMS, *_ATTENTION, *_HEAD_NORMS, *_FEED_FORWARD),
        expected=_SILU | {"attention_bias": False},
    ),
    "qwen3_moe": Family(
        "qwen3moe",
        (*_NORMS, *_ATTENTION, *_HEAD_NORMS, *_EXPERTS),
        expected=_SILU
        | {
            "attention_bias": False,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        counts=_EXPERT_COUNTS | {"expert_feed_forward_length": "moe_intermediate_size"},
    ),
    "qwen3_5_text": Family(
        "qwen35",
        (
            *_with(_NORMS[:1], "plus one"),
            *_with(_NORMS_AFTER[:1], "plus one"),
            *_with(
                (
                    _ATTENTION[0]._replace(shape="gated width"),
                    *_ATTENTION[1:],
                    *_with(_HEAD_NORMS, "plus one"),
                ),
                layers="full_attention",
            ),
            *_with(_LINEAR_ATTENTION, layers="linear_attention"),
            *_FEED_FORWARD,
        ),
        _GEMMA_AROUND,
        expected=_SILU | {"attention_bias": False},
        counts={
            "ssm.conv_kernel": "linear_conv_kernel_dim",
            "ssm.state_size": "linear_key_head_dim",
            "ssm.group_count": "linear_num_key_heads",
            "ssm.time_step_rank": "linear_num_value_heads",
        },
        alike={"linear_value_head_dim": "linear_key_head_dim"},
        rotates_part=True,
    ),
    "llama4_text": Family(
        "llama4",
        (
            *_NORMS,
            *_ATTENTION,
            *_with(_LLAMA4_EXPERTS, layers="experts"),
            *_with(_LLAMA4_FEED_FORWARD, layers="dense"),
        ),
        expected=_SILU
        | {
            "attention_bias": False,
            "attention_chunk_size": 8192,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        stretched=("linear", "llama3"),
        counts=_EXPERT_COUNTS
        | {
            "expert_feed_forward_length": "moe_intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        says_rotated=True,
    ),
    "gemma": Family(
        "gemma",
        (*_with(_NORMS, "plus one"), *_ATTENTION, *_FEED_FORWARD),
        _GEMMA_AROUND,
        expected=_GELU,
        written=False,
    ),
    "gemma2": Family(
        "gemma2",
        (*_with(_GEMMA_NORMS, "plus one"), *_ATTENTION, *_FEED_FORWARD),
        _GEMMA_AROUND,
        expected=_GELU | {"attention_bias": False, "tie_word_embeddings": True},
        counts={"attention.sliding_window": "sliding_window"},
        factors={
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
    ),
    "gemma3_text": Family(
        "gemma3",
        (*_GEMMA_ROWS, *_ATTENTION, *_FEED_FORWARD),
        _GEMMA_AROUND,
        expected=_GELU
        | {
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        counts={"attention.sliding_window": "sliding_window"},
        factors={"final_logit_softcapping": "final_logit_softcapping"},
        sliding=6,
    ),
    "gemma4_text": Family(
        "gemma4",
        (
            *_GEMMA_NORMS,
            *_GEMMA4_ATTENTION,
            *_FEED_FORWARD,
            Row("layer_output_scale.weight", "layer_scalar", "one"),
            *_GEMMA4_INPUTS,
            *_GEMMA4_EXPERTS,
        ),
        _GEMMA4_AROUND,
        expected=_GELU | {"attention_bias": False},
        stretched=("proportional",),
        counts=_EXPERT_COUNTS
        | {
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
            "attention.sliding_window": "sliding_window",
        },
        rotates_part=True,
    ),
    "phi3": Family(
        "phi3",
        (
            *_NORMS,
            Row("attn_qkv.weight", "self_attn.qkv_proj.weight", "fused width"),
            _ATTENTION[3],
            *_FUSED_FEED_FORWARD,
        ),
        stretched=("longrope",),
        rotates_part=True,
        says_head_size=False,
    ),
    "gpt_oss": Family(
        "gpt-oss",
        _GPT_OSS,
        expected={
            "attention_bias": True,
            "tie_word_embeddings": False,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        stretched=("linear", "yarn"),
        counts=_EXPERT_COUNTS
        | {
            "attention.sliding_window": "sliding_window",
            "expert_feed_forward_length": "intermediate_size",
        },
        sliding=2,
    ),
    "glm4": Family(
        "glm4",
        (
            *_NORMS,
            Row("post_attention_norm.weight", "post_self_attn_layernorm.weight", "width"),
            Row("post_ffw_norm.weight", "post_mlp_layernorm.weight", "width"),
            *_ATTENTION,
            *_with(_BIASES, needs="attention_bias"),
            *_FUSED_FEED_FORWARD,
        ),
        rotates_part=True,
    ),
    "olmo2": Family(
        "olmo2",
        (
            *_NORMS_AFTER,
            *_ATTENTION,
            Row("attn_q_norm.weight", "self_attn.q_norm.weight", "queries"),
            Row("attn_k_norm.weight", "self_attn.k_norm.weight", "keys"),
            *_FEED_FORWARD,
        ),
        expected=_SILU | {"attention_bias": False, "tie_word_embeddings": False},
        heads_fill_width=True,
        says_head_size=False,
    ),
    "granite": Family(
        "granite",
        (*_NORMS, *_ROTATED, *_FEED_FORWARD),
        expected=_SILU | {"attention_bias": False, "mlp_bias": False},
        stretched=("linear", "llama3"),
        factors={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        says_head_size=False,
        says_rotated=True,
    ),
}
"""By model_type of transformers."""
WRITTEN = tuple(name for name, family in FAMILIES.items() if family.written)


def _kinds(settings: Mapping[str, Any], layer: int) -> set[str]:
    """What a layer is, in words of `Row.layers`."""
    kinds = {"experts" if layer in settings.get("moe_layers", ()) else "dense"}
    if "layer_types" in settings:
        kinds.add(settings["layer_types"][layer])
    if layer < settings["num_hidden_layers"] - settings.get("num_kv_shared_layers", 0):
        kinds.add("own keys")
        # Keys may be the values of layers that see all tokens.
        if not (settings.get("attention_k_eq_v") and "full_attention" in kinds):
            kinds.add("own values")
    return kinds


def sizes_of_layer(settings: Mapping[str, Any], layer: int) -> dict[str, int]:
    """Sizes of a layer that others may not have, by the names of settings."""
    names = ("head_dim", "num_key_value_heads", "intermediate_size")
    found = {name: settings[name] for name in names}
    found |= settings.get("per_layer_config", {}).get(str(layer), {})
    if settings.get("use_double_wide_mlp") and "own keys" not in _kinds(settings, layer):
        found["intermediate_size"] *= 2
    return found


def _sizes(settings: Mapping[str, Any]) -> dict[str, int]:
    """Numbers by the words of `Row.shape`."""
    head, heads = settings["head_dim"], settings["num_attention_heads"]
    queries, keys = heads * head, settings["num_key_value_heads"] * head
    inner = settings["intermediate_size"]
    # Of a linear attention: a state has as many rows and columns as a head has numbers.
    state, states = (
        settings.get(f"linear_{key}", 0) for key in ("key_head_dim", "num_value_heads")
    )
    return {
        "width": settings["hidden_size"],
        "inner": inner,
        "both": 2 * inner,
        "head": head,
        "heads": heads,
        "queries": queries,
        "gated": 2 * queries,
        "keys": keys,
        "fused": queries + 2 * keys,
        "vocabulary": settings["vocab_size"],
        "experts": settings.get("num_local_experts") or 0,
        "expert": (expert := settings.get("moe_intermediate_size") or 0),
        "pair": 2 * expert,
        "one": 1,
        "input": (own := settings.get("hidden_size_per_layer_input", 0)),
        "inputs": own * settings["num_hidden_layers"],
        "state": state,
        "states": states,
        "values": states * state,
        "mixed": (2 * settings.get("linear_num_key_heads", 0) + states) * state,
        "kernel": settings.get("linear_conv_kernel_dim", 0),
    }


def named_tensors(settings: Mapping[str, Any]) -> dict[str, NamedTensor]:
    """Return the tensors of a model by llama.cpp's names, in the order of its layers.

    Args:
        settings: of a model of one of `FAMILIES`.
    """
    family = FAMILIES[settings["model_type"]]
    first, *last = family.around
    of_model = _sizes(settings)
    rows = [(row.name, row.theirs, row, of_model) for row in (first,)]
    for layer in range(settings["num_hidden_layers"]):
        kinds = _kinds(settings, layer)
        sizes = _sizes({**settings, **sizes_of_layer(settings, layer)})
        rows += [
            (f"blk.{layer}.{row.name}", f"model.layers.{layer}.{row.theirs}", row, sizes)
            for row in family.block
            if not row.layers or row.layers in kinds
        ]
    rows += [(row.name, row.theirs, row, of_model) for row in last]
    is_tied = settings["tie_word_embeddings"]
    return {
        name: NamedTensor(theirs, tuple(sizes[word] for word in row.shape.split()), row.rule)
        for name, theirs, row, sizes in rows
        if not row.needs or settings.get(row.needs)
        if not (is_tied and name == "output.weight")
    }
