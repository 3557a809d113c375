"""Metadata of a GGUF file: what llama.cpp has to know of a model and of its tokenizer.

Keys and their meaning: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; which of them a
family has, and what of it llama.cpp computes otherwise, as in llama.cpp of July 2026 (the source
package of llama-cpp-python 0.3.36).

llama.cpp has two tokenizers for the families that are written: `gpt2`, over bytes, which cuts
texts by a rule that it knows by name, and `llama`, which is SentencePiece with scores. What a file
says is read back and compared with the model's own tokenizer before anything is written.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ftkit.errors import UserError
from ftkit.extensions.gguf.families import FAMILIES, WRITTEN, sizes_of_layer
from ftkit.extensions.gguf.header import GgufHeader
from ftkit.extensions.gguf.tokenizer import rule_of, tokenizer_files
from ftkit.models.pretrained.tokenizer import Tokenizer

GgufMetadata = dict[str, Any]
"""Whole numbers, floats, booleans, texts, and lists of one kind, by GGUF's keys."""

_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3_text": 62}
"""Layers by which llama.cpp recognises models of 27 billion parameters, whose attention is scaled
by the width of the model."""
_LLAMA4_ROTATES, _EXPERTS_OF_MAVERICK = 4, 128
"""Llama 4: every such layer sees all tokens and rotates nothing."""
_SECTIONS = (11, 11, 10)
"""Qwen 3.5: pairs of a head that rotate by time, height and width, where it does not say them."""
_DEFAULT_THETA = 10000.0
_WORDS = {"hidden_act": "the activation", "hidden_activation": "the activation"}
"""What messages call a setting."""


def complete_settings(
    settings: Mapping[str, Any], name: str, *, is_part: bool = False
) -> dict[str, Any]:
    """The settings of a model that GGUF files are written of, with what they leave to defaults.

    Args:
        settings: the content of config.json; of a language model that is a part, its own.
        name: of the model, for messages.
        is_part: the model also sees or hears.

    Raises:
        UserError: the family is not written, or llama.cpp would compute another model.
    """
    family = settings.get("model_type")
    if family not in WRITTEN:
        raise UserError(
            f"{'The language model of ' * is_part}{name} is of the family {family}, but GGUF "
            f"files are written of {', '.join(WRITTEN)}. Try --format hf, and llama.cpp's "
            "own convert_hf_to_gguf.py"
            + (
                "; with --mmproj it writes what sees or hears, of models that it knows."
                if is_part
                else "."
            )
        )
    from transformers import AutoConfig

    # auto_map would have transformers look for code in the repository.
    plain = {key: value for key, value in settings.items() if key != "auto_map"}
    found: dict[str, Any] = AutoConfig.for_model(**plain).to_dict()
    found["head_dim"] = (
        found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"]
    )
    found["num_key_value_heads"] = found.get("num_key_value_heads") or found["num_attention_heads"]
    found["num_local_experts"] = found.get("num_local_experts") or found.get("num_experts")
    if family == "llama4_text":
        # Named as in other families; theirs are those of experts and of dense layers.
        sizes = found["intermediate_size"], found["intermediate_size_mlp"]
        found["moe_intermediate_size"], found["intermediate_size"] = sizes
    # The first one is enough: one stops the export.
    for reason in _obstacles(found):
        raise UserError(f"{name} {reason}, which llama.cpp does not compute. Try another --format.")
    return found


def _obstacles(settings: Mapping[str, Any]) -> list[str]:
    """Features of a model that llama.cpp would compute differently."""
    family, rope = FAMILIES[settings["model_type"]], _rotation(settings)
    kind = rope.get("rope_type", "default")
    found = [
        f"has {_WORDS.get(key, key)} {settings.get(key)}, not {value}"
        for key, value in family.expected.items()
        # Absent, false and empty are the same.
        if (settings.get(key) or None) != (value or None)
    ]
    if kind not in ("default", *family.stretched):
        found.append(f"stretches its positions by {kind}")
    local = settings["rope_parameters"].get("sliding_attention") or {}
    if local.get("rope_type", "default") != "default":
        found.append(f"stretches positions within its window by {local['rope_type']}")
    if settings.get("use_sliding_window"):
        found.append("has a sliding window (use_sliding_window)")
    if not family.rotates_part and rope.get("partial_rotary_factor", 1.0) != 1.0:
        found.append("rotates a part of each key (partial_rotary_factor)")
    found += [
        f"has {key} {settings[key]}, not {other} {settings[other]}"
        for key, other in family.alike.items()
        if settings[key] != settings[other]
    ]
    if "linear_num_value_heads" in settings:
        found += _obstacles_of_sections(settings)
    if settings["model_type"] == "gemma4_text":
        found += _obstacles_of_gemma4(settings)
    if settings["model_type"] == "llama4_text":
        found += _obstacles_of_llama4(settings)
    if "query_pre_attn_scalar" in settings:
        found += _obstacles_of_gemma(settings)
    if family.heads_fill_width and _width_of_heads(settings) != settings["head_dim"]:
        found.append(f"has head_dim {settings['head_dim']}, not {_width_of_heads(settings)}")
    return found


def _obstacles_of_gemma(settings: Mapping[str, Any]) -> list[str]:
    family = settings["model_type"]
    by_width = settings["num_hidden_layers"] == _SCALED_BY_WIDTH[family]
    scalar = _width_of_heads(settings) if by_width else settings["head_dim"]
    found = []
    if settings["query_pre_attn_scalar"] != scalar:
        found.append(f"has query_pre_attn_scalar {settings['query_pre_attn_scalar']}, not {scalar}")
    caps = (settings.get("attn_logit_softcapping"), settings.get("final_logit_softcapping"))
    if family == "gemma2" and not all(caps):
        found.append("has no soft caps")
    return found


def _obstacles_of_sections(settings: Mapping[str, Any]) -> list[str]:
    """Sections of Qwen 3.5 that leave pairs out, which llama.cpp does not rotate."""
    sections, head = _sections(settings), settings["head_dim"]
    pairs = int(head * settings["rope_parameters"]["partial_rotary_factor"]) // 2
    places = [pair % sum(sections) for pair in range(pairs)]
    # Time, height and width take turns.
    if sum(sections) <= head and all(place < 3 * sections[place % 3] for place in places):
        return []
    return [f"has mrope_section {sections} for {pairs} rotated pairs of heads of {head}"]


def _obstacles_of_gemma4(settings: Mapping[str, Any]) -> list[str]:
    found, rope = [], settings["rope_parameters"]
    if settings["use_bidirectional_attention"] == "all":
        found.append("attends to later tokens (use_bidirectional_attention)")
    if rope["full_attention"].get("rope_type") != "proportional":
        found.append("does not rotate in proportion (rope_type) where it sees all tokens")
    if rope["full_attention"].get("factor", 1.0) != 1.0:
        found.append("stretches its positions (factor)")
    if rope["sliding_attention"].get("partial_rotary_factor", 1.0) != 1.0:
        found.append("rotates a part of each key within its window (partial_rotary_factor)")
    # Where layers have keys of earlier ones, llama.cpp takes those of the last two with their own.
    own = settings["num_hidden_layers"] - settings["num_kv_shared_layers"]
    last = settings["layer_types"][max(own - 2, 0) : own]
    if settings["num_kv_shared_layers"] and last != ["sliding_attention", "full_attention"]:
        found.append(f"shares keys of layers that end with {last} (num_kv_shared_layers)")
    if "sliding_attention" not in settings["layer_types"]:
        found.append("has no layer with a window (layer_types)")
    sizes = {key: settings[key] for key in ("vocab_size", "vocab_size_per_layer_input")}
    if settings["hidden_size_per_layer_input"] and len(set(sizes.values())) > 1:
        found.append(f"has inputs of layers for {sizes['vocab_size_per_layer_input']} tokens alone")
    return found


def _obstacles_of_llama4(settings: Mapping[str, Any]) -> list[str]:
    layers, step = range(settings["num_hidden_layers"]), settings["interleave_moe_layer_step"]
    # llama.cpp knows Maverick, which does not normalise keys, by its experts.
    normalises = settings["num_local_experts"] != _EXPERTS_OF_MAVERICK
    rotated = [int((layer + 1) % _LLAMA4_ROTATES != 0) for layer in layers]
    expected = {
        "use_qk_norm": normalises,
        "no_rope_layers": rotated,
        "layer_types": ["chunked_attention" if kind else "full_attention" for kind in rotated],
        "moe_layers": [layer for layer in layers if (layer + 1) % step == 0],
    }
    return [
        f"has {key} {settings[key]}, not {value}"
        for key, value in expected.items()
        if settings[key] != value
    ]


def _width_of_heads(settings: Mapping[str, Any]) -> int:
    """Numbers of a head, if heads have the width of the model together."""
    return int(settings["hidden_size"]) // int(settings["num_attention_heads"])


def _rotation(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Settings of the rotary embedding; of layers that see all tokens, if others have their own."""
    rope: Mapping[str, Any] = settings["rope_parameters"]
    return rope.get("full_attention") or rope


def model_metadata(settings: Mapping[str, Any]) -> GgufMetadata:
    """Metadata of a model by llama.cpp's keys.

    Args:
        settings: from `complete_settings`.
    """
    name, rope = settings["model_type"], _rotation(settings)
    family = FAMILIES[name]
    of_layers: GgufMetadata = {
        "block_count": settings["num_hidden_layers"],
        "context_length": settings["max_position_embeddings"],
        "embedding_length": settings["hidden_size"],
        "feed_forward_length": settings["intermediate_size"],
        "attention.head_count": settings["num_attention_heads"],
        "attention.head_count_kv": settings["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(settings["rms_norm_eps"]),
    }
    theta = float(rope.get("rope_theta") or _DEFAULT_THETA)
    # Keys are left out where llama.cpp's converter leaves them out: tests compare the files.
    if name != "gemma2" or theta != _DEFAULT_THETA:
        of_layers["rope.freq_base"] = theta
    if (local := settings["rope_parameters"].get("sliding_attention")) is not None:
        of_layers["rope.freq_base_swa"] = float(local["rope_theta"])
    if family.says_head_size or settings["head_dim"] != _width_of_heads(settings):
        of_layers["attention.key_length"] = settings["head_dim"]
        of_layers["attention.value_length"] = settings["head_dim"]
    of_layers |= _stretching(rope)
    if family.says_rotated:
        of_layers["vocab_size"] = settings["vocab_size"]
    if family.says_rotated or family.rotates_part:
        part = rope.get("partial_rotary_factor") or 1.0
        of_layers["rope.dimension_count"] = int(settings["head_dim"] * part)
    of_layers |= {key: settings[own] for key, own in family.counts.items() if settings.get(own)}
    of_layers |= {
        key: float(settings[own]) for key, own in family.factors.items() if settings.get(own)
    }
    if family.sliding:
        windows = [kind == "sliding_attention" for kind in settings["layer_types"]]
        if windows != [(i + 1) % family.sliding != 0 for i in range(len(windows))]:
            of_layers["attention.sliding_window_pattern"] = windows
    if name == "phi3":
        of_layers |= _of_phi3(settings)
    if name == "gemma4_text":
        of_layers |= _of_gemma4(settings)
    if "linear_num_value_heads" in settings:
        of_layers |= _of_linear_attention(settings)
    return {f"{family.architecture}.{key}": value for key, value in of_layers.items()}


def _stretching(rope: Mapping[str, Any]) -> GgufMetadata:
    """Keys for positions that are stretched by one factor or by YaRN."""
    kind = rope.get("rope_type")
    if kind not in ("linear", "yarn"):
        return {}
    found: GgufMetadata = {
        "rope.scaling.type": kind,
        "rope.scaling.factor": float(rope["factor"]),
    }
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        ours = {
            "beta_fast": "beta_fast",
            "beta_slow": "beta_slow",
            "attention_factor": "attn_factor",
        }
        found |= {
            f"rope.scaling.yarn_{key}": float(rope[theirs])
            for theirs, key in ours.items()
            if rope.get(theirs) is not None
        }
    return found


def _of_gemma4(settings: Mapping[str, Any]) -> GgufMetadata:
    windows = [kind == "sliding_attention" for kind in settings["layer_types"]]
    layers = [sizes_of_layer(settings, layer) for layer in range(len(windows))]
    whole, local = _head_sizes(settings)
    found: GgufMetadata = {
        "attention.shared_kv_layers": settings["num_kv_shared_layers"],
        "attention.sliding_window_pattern": windows,
        "attention.key_length": whole,
        "attention.value_length": whole,
        "attention.key_length_swa": local,
        "attention.value_length_swa": local,
        "rope.dimension_count": whole,
        "rope.dimension_count_swa": local,
        "embedding_length_per_layer_input": settings["hidden_size_per_layer_input"],
        # Without the key llama.cpp takes 30; 0 is none.
        "final_logit_softcapping": float(settings["final_logit_softcapping"] or 0.0),
    }
    several = {"attention.head_count_kv": "num_key_value_heads"}
    several["feed_forward_length"] = "intermediate_size"
    for key, name in several.items():
        values = [layer[name] for layer in layers]
        if len(set(values)) > 1:
            found[key] = values
    return found


def _head_sizes(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Numbers of a head of layers that see all tokens, and of others."""
    last = settings["num_hidden_layers"] - 1  # always sees all
    return sizes_of_layer(settings, last)["head_dim"], settings["head_dim"]


def _of_linear_attention(settings: Mapping[str, Any]) -> GgufMetadata:
    kinds, sections = settings["layer_types"], _sections(settings)
    return {
        "ssm.inner_size": settings["linear_num_value_heads"] * settings["linear_value_head_dim"],
        "attention.recurrent_layers": [kind == "linear_attention" for kind in kinds],
        # For versions of llama.cpp without that list.
        "full_attention_interval": [*kinds, "full_attention"].index("full_attention") + 1,
        "rope.dimension_sections": [*sections, *[0] * (4 - len(sections))],
    }


def _sections(settings: Mapping[str, Any]) -> list[int]:
    return list(settings["rope_parameters"].get("mrope_section") or _SECTIONS)


def _of_phi3(settings: Mapping[str, Any]) -> GgufMetadata:
    rope = settings["rope_parameters"]
    longest = settings["max_position_embeddings"]
    first = _first_length(settings)
    found: GgufMetadata = {
        "rope.scaling.original_context_length": first,
        # Zero and not none, by which llama.cpp knows a Phi-4.
        "attention.sliding_window": settings.get("sliding_window") or 0,
    }
    if rope.get("rope_type") == "longrope":
        scale = longest / first
        # The attention factor of LongRoPE, as transformers computes it.
        factor = math.sqrt(1 + math.log(scale) / math.log(first)) if scale > 1 else 1.0
        found["rope.scaling.attn_factor"] = factor
    return found


def _first_length(settings: Mapping[str, Any]) -> int:
    """Positions that a Phi-3 was made for before they were stretched."""
    rope = settings["rope_parameters"]
    found = rope.get("original_max_position_embeddings") or settings.get(
        "original_max_position_embeddings"
    )
    return int(found or settings["max_position_embeddings"])


def rotary_factors(settings: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Tensors that stretch each frequency of the rotary embedding, by llama.cpp's names.

    Args:
        settings: from `complete_settings`.
    """
    rope = _rotation(settings)
    kind = rope.get("rope_type", "default")
    if kind == "longrope":
        return {
            f"rope_factors_{name}.weight": np.asarray(rope[f"{name}_factor"], np.float32)
            for name in ("long", "short")
        }
    if kind == "proportional":
        whole, _ = _head_sizes(settings)
        rotated = int(rope.get("partial_rotary_factor", 1.0) * whole // 2)
        # What is divided by so much does not rotate.
        factors = np.where(np.arange(whole // 2) < rotated, 1.0, 1e30)
        return {"rope_freqs.weight": factors.astype(np.float32)}
    if kind != "llama3":
        return {}
    size = settings["head_dim"]
    frequencies = float(rope["rope_theta"]) ** (-np.arange(0, size, 2, dtype=np.float64) / size)
    positions = rope["original_max_position_embeddings"]
    lengths = 2 * math.pi / frequencies
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    # Llama 3's rule: high frequencies stay, low ones are divided by the factor, others are mixed.
    smooth = (positions / lengths - low) / (high - low)
    between = 1 / ((1 - smooth) / rope["factor"] + smooth)
    factors = np.where(lengths > positions / low, rope["factor"], between)
    factors = np.where(lengths < positions / high, 1.0, factors)
    return {"rope_freqs.weight": factors.astype(np.float32)}


_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""
_SPACE = "▁"
_ADDED_SCORE, _UNUSED_SCORE = -1000.0, -10000.0
"""Scores that llama.cpp's converter gives tokens that no merge makes."""
_OTHER_SPECIALS = {"unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}
"""Keys of special tokens, in GGUF's spelling."""
_SAMPLES = (
    "The quick brown fox (aged 7) didn't jump over 1234567 lazy dogs; it's 3.14, isn't it?",
    "def main(a, b):\n    return a ** b  # twice\n\n\n\tprint('ok!!!')\r\n",
    "Ça va? Größe, naïve café. Привет, мир! 你好 世界。 こんにちは 안녕하세요 مرحبا 🙂🚀",
    "a  b   c    d",
    "HTTPServer ABCdef x_y-z/w https://example.org/?q=1&r=2",
)
"""Texts that tokenizers of different kinds cut differently."""


def vocabulary_metadata(
    tokenizer: Tokenizer,
    files: Mapping[str, bytes],
    settings: Mapping[str, Any],
    *,
    name: str,
    template: str | None,
    end_ids: Sequence[int],
    puts_bos: bool,
) -> GgufMetadata:
    """Metadata of a tokenizer by llama.cpp's keys.

    Args:
        tokenizer: of the model.
        files: of the tokenizer, by name.
        settings: of the model; its vocab_size is the number of embeddings.
        name: of the model, for messages.
        template: for conversations; None: the model has none.
        end_ids: tokens that end an answer; EOS is one of them, or not.
        puts_bos: whether llama.cpp puts BOS before a text that does not begin with it.

    Raises:
        UserError: llama.cpp has no tokenizer that cuts texts as this one does.
    """
    size = settings["vocab_size"]
    is_pieces = _is_pieces(tokenizer, name)
    if not is_pieces:
        found = _byte_level(tokenizer, name)
        tokens, kinds, scores = _plain_tokens(tokenizer, size, name), [_NORMAL] * size, None
    else:
        found = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
        tokens, kinds, scores = _pieces(tokenizer, files, size, name)
    for number in range(size):
        if tokens[number] is None:
            # Embeddings are often padded to a multiple of 64; llama.cpp wants a text for each row.
            # The name is its converter's.
            tokens[number], kinds[number] = f"[PAD{number}]", _UNUSED
    for number, token in tokenizer.processor.get_added_tokens_decoder().items():
        text, is_special = token.content, token.special or _looks_special(token.content)
        # llama.cpp's converter writes the spaces of such tokens as they are in texts.
        tokens[number] = text if is_special else text.replace(_SPACE, " ")
        kinds[number] = _CONTROL if is_special else _USER_DEFINED
        if scores is not None:
            scores[number] = _ADDED_SCORE
    found |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds}
    # Only SentencePiece chooses merges by scores; byte-level BPE has a list of them.
    if scores is not None:
        found["tokenizer.ggml.scores"] = [float(score) for score in scores]
        if not _begins_with_space(tokenizer):
            found["tokenizer.ggml.add_space_prefix"] = False
    found |= _special_tokens(tokenizer, files, settings, end_ids)
    found["tokenizer.ggml.add_bos_token"] = puts_bos
    found["tokenizer.ggml.add_eos_token"] = False
    if template is not None:
        # llama.cpp puts a space before a text behind BOS, whatever the tokenizer does there.
        gap = f"bos_token ~ '{tokenizer.bos_gap}'"
        found["tokenizer.chat_template"] = template.replace(gap, "bos_token")
    _check(found, tokenizer, name)
    return found


def _is_pieces(tokenizer: Tokenizer, name: str) -> bool:
    """Return whether a tokenizer comes from SentencePiece; else it is byte-level BPE."""
    model = tokenizer.processor.model
    if type(model).__name__ != "BPE":
        raise _refusal(name, f"is of the kind {type(model).__name__}")
    return bool(model.byte_fallback)


def _refusal(name: str, problem: str) -> UserError:
    return UserError(
        f"The tokenizer of {name} {problem}, for which ftkit knows no name in llama.cpp. "
        "Try --format hf, and llama.cpp's own convert_hf_to_gguf.py."
    )


def _byte_level(tokenizer: Tokenizer, name: str) -> GgufMetadata:
    # The rule itself is compared. llama.cpp's converter knows a tokenizer by the hash of a text's
    # tokens, which changes with every vocabulary, so that a model with added tokens would have no
    # name.
    rule = rule_of(tokenizer.processor)
    if rule is None:
        raise _refusal(name, "cuts texts by a rule of its own")
    merges = json.loads(tokenizer.processor.to_str())["model"]["merges"]
    # Newer versions of tokenizers write merges as pairs.
    pairs = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.merges": pairs,
    }


def _plain_tokens(tokenizer: Tokenizer, size: int, name: str) -> list[Any]:
    """The texts of tokens; None for rows of the embedding without one."""
    tokens: list[Any] = [None] * size
    for text, number in tokenizer.processor.get_vocab(with_added_tokens=True).items():
        if number >= size:
            raise UserError(
                f"The tokenizer of {name} has the token {text} with the id {number:,}, but the "
                f"model has {size:,} embeddings. Take both from the same model."
            )
        tokens[number] = text
    return tokens


def _pieces(
    tokenizer: Tokenizer, files: Mapping[str, bytes], size: int, name: str
) -> tuple[list[Any], list[int], list[float]]:
    """Texts, kinds and scores of SentencePiece's tokens.

    Scores are those of tokenizer.model; without it, tokens that earlier merges make have higher
    ones, which is where merges came from when tokenizer.json was made of tokenizer.model.
    """
    kinds, scores = [_UNUSED] * size, [_UNUSED_SCORE] * size
    if (model := _sentencepiece(files)) is not None:
        tokens: list[Any] = [None] * size
        for number in range(min(model.get_piece_size(), size)):
            tokens[number], scores[number] = model.id_to_piece(number), model.get_score(number)
            kinds[number] = _kind_of_piece(model, number)
        return tokens, kinds, scores
    tokens = _plain_tokens(tokenizer, size, name)
    numbers = {text: number for number, text in enumerate(tokens) if text is not None}
    content = json.loads(tokenizer.processor.to_str())["model"]
    for text, number in numbers.items():
        is_byte = re.fullmatch(r"<0x[0-9A-F]{2}>", text) is not None
        # SentencePiece has 256 tokens for bytes, written <0x00> to <0xFF>.
        kinds[number] = _BYTE if is_byte else _NORMAL
        # Below all that merges make, and in the order of their ids.
        scores[number] = 0.0 if is_byte else float(-len(content["merges"]) - number)
    if (unknown := tokenizer.special_tokens.get("unk_token")) in numbers:
        kinds[numbers[unknown]] = _UNKNOWN
    # Reversed: where several merges make a token, the first of them gives the score.
    for rank in reversed(range(len(content["merges"]))):
        merge = content["merges"][rank]
        made = merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge)
        scores[numbers[made]] = float(-rank)
    return tokens, kinds, scores


def _sentencepiece(files: Mapping[str, bytes]) -> Any:
    """SentencePiece model in tokenizer.model; None: missing, or of another kind."""
    if "tokenizer.model" not in files:
        return None
    from sentencepiece import SentencePieceProcessor

    try:
        return SentencePieceProcessor(model_proto=files["tokenizer.model"])
    except RuntimeError:
        return None


def _kind_of_piece(model: Any, number: int) -> int:
    if model.is_unknown(number):
        return _UNKNOWN
    if model.is_control(number):
        return _CONTROL
    if model.is_unused(number):
        return _UNUSED
    return _BYTE if model.is_byte(number) else _NORMAL


def _looks_special(text: str) -> bool:
    """Return whether a token looks special, by the rules of llama.cpp's converter.

    Files of some models (Command R, Gemma 2, DeepSeek) do not mark such tokens.
    """
    known = text in ("<pad>", "<mask>", "<2mass>", "[@BOS@]")
    ends = (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))
    return known or any(text.startswith(a) and text.endswith(b) for a, b in ends)


def _begins_with_space(tokenizer: Tokenizer) -> bool:
    """Return whether the tokenizer puts a space before a text."""
    tokens = tokenizer.processor.encode("a", add_special_tokens=False).tokens
    return str(tokens[0]).startswith(_SPACE)


def _special_tokens(
    tokenizer: Tokenizer,
    files: Mapping[str, bytes],
    settings: Mapping[str, Any],
    end_ids: Sequence[int],
) -> GgufMetadata:
    """Ids by GGUF's names."""
    ids = {"bos": tokenizer.bos_id, "eos": tokenizer.eos_id}
    named = json.loads(files.get("tokenizer_config.json", b"{}"))
    for theirs, ours in _OTHER_SPECIALS.items():
        token = named.get(f"{theirs}_token")
        text = token.get("content") if isinstance(token, dict) else token
        found = None if text is None else tokenizer.added_tokens.get(text)
        # tokenizer_config.json names the token; config.json may have its id.
        ids[ours] = settings.get(f"{theirs}_token_id") if found is None else found
    others = set(end_ids) - {tokenizer.eos_id}
    if len(others) == 1:  # of several, llama.cpp finds the well-known ones by their texts
        ids["eot"] = others.pop()
    return {
        f"tokenizer.ggml.{key}_token_id": number
        for key, number in ids.items()
        if isinstance(number, int) and 0 <= number < settings["vocab_size"]
    }


def _check(metadata: GgufMetadata, tokenizer: Tokenizer, name: str) -> None:
    """Refuse metadata that, read back, would tokenise texts differently than the model's own."""
    from tokenizers import Tokenizer as Processor

    arrays = {"tokenizer.ggml.token_type": np.int32, "tokenizer.ggml.scores": np.float32}
    content = {k: np.asarray(v, arrays[k]) if k in arrays else v for k, v in metadata.items()}
    header = GgufHeader(file=Path(name), metadata=content, tensors={})
    try:
        read = Processor.from_str(tokenizer_files(header)["tokenizer.json"].decode())
    except UserError as error:
        raise _refusal(name, f"cannot be read back ({error})") from None
    for text in _SAMPLES:
        found = read.encode(text, add_special_tokens=False).ids
        # A model whose texts are cut differently answers, but badly: nothing else would show it.
        if found != tokenizer.encode(text, bos=False).tolist():
            raise _refusal(name, f"cuts {text[:30]!r}... in a way of its own")
