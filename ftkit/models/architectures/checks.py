"""Checks of the settings of a model before anything is built.

A number that no model has would make lists and tensors of that size. Later, settings that pass are
compared with the weights beside them, tensor by tensor.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ftkit.errors import UserError

_MOST_LAYERS = 2**10
"""The deepest published language models have an eighth of this."""
_MOST_EXPERTS = 2**16
"""Most experts of one layer."""
# Vocabularies reach 2^18 and layers 2^16; a list or an outline of this size is still possible.
_MOST_SIZE = 2**24
# Contexts of published models reach ten million positions (Llama 4 Scout).
_MOST_POSITIONS = 2**27
# Below Python's limit of recursion, and far above any config.json.
_MOST_NESTING = 32


@dataclasses.dataclass(frozen=True)
class _Rule:
    keys: re.Pattern[str]
    least: float
    most: float
    is_one: bool
    """True if the value must be one number; otherwise lists of numbers pass, too."""

    @property
    def text(self) -> str:
        return f"a number from {self.least:,} to {self.most:,}"

    def allows(self, value: Any) -> bool:
        """Return whether a value is possible; null and other types are left to the model."""
        if isinstance(value, list | Mapping) and not self.is_one:
            items = value.values() if isinstance(value, Mapping) else value
            return all(self.allows(item) for item in items)
        if value is None:
            return True
        # bool first: True is an int in Python.
        if isinstance(value, bool) or not isinstance(value, int | float):
            return not self.is_one
        return self.least <= value <= self.most


_RULES = tuple(
    _Rule(re.compile(keys), least, most, is_one)
    for keys, least, most, is_one in (
        (r"num_hidden_layers|n_layers?|num_layers|num_blocks", 1, _MOST_LAYERS, True),
        (r"hidden_size|vocab_size|padded_vocab_size|n_embd|d_model|head_dim", 1, _MOST_SIZE, True),
        (r"(\w+_)?max_position_embeddings|n_positions|n_ctx|block_size", -1, _MOST_POSITIONS, True),
        (r"(n|num)_\w*experts?", 0, _MOST_EXPERTS, False),
        (r"(n|num)_\w+|\w+_(size|dim|rank|width)", -1, _MOST_SIZE, False),
        (r"partial_rotary_factor|rotary_pct|rotary_percentage", 0.0, 1.0, True),
        (r"\w*(dropout|_pdrop|dropout_prob|layerdrop)", 0.0, 1.0, False),
        (r"(\w+_)?(eps|epsilon)", 0.0, 1.0, True),
        (r"rope_theta|rotary_emb_base|rope_base", 1.0, 1e30, True),
        (r"factor|low_freq_factor|high_freq_factor", 1e-9, 1e9, True),
        (r"\w*router_logit_softcapping", 0.0, 1e30, True),  # 0: none (Laguna)
        (r"\w+_softcapping|query_pre_attn_scalar|attention_scores_scalar", 1e-9, 1e30, True),
    )
)
"""The first rule that fits a key applies. Some models write -1 for an unlimited size."""
_FLAGS = frozenset(
    (
        *("tie_word_embeddings", "attention_bias", "mlp_bias"),
        *("use_sliding_window", "use_parallel_residual"),
    )
)
"""Keys of booleans: any string would count as true."""


def require_plausible(settings: Mapping[str, Any], file: Path | str) -> None:
    """Refuse settings with a number that no model has.

    Args:
        settings: the content of a config.json or model_config.yaml.
        file: the file that they were read from, for messages.

    Raises:
        UserError: names the key, its value and the values allowed.
    """
    # Also nested settings: text_config and others become configurations of their own.
    for key, value, depth in _entries(settings, 0):
        if depth > _MOST_NESTING:
            raise implausible(file, f"{key} is nested too deeply")
        rule = next((rule for rule in _RULES if rule.keys.fullmatch(key)), None)
        if rule is not None and not rule.allows(value):
            raise implausible(file, f"{key} is {shown_setting(value)}, but has to be {rule.text}")
        if key in _FLAGS and not isinstance(value, bool | None):
            raise implausible(file, f"{key} is {shown_setting(value)}, but has to be true or false")


def _entries(value: Mapping[str, Any] | list[Any], depth: int) -> Iterator[tuple[str, Any, int]]:
    """Yield every key, its value and its depth, also in nested settings."""
    keyed = value.items() if isinstance(value, Mapping) else (("a list", v) for v in value)
    for key, item in keyed:
        yield str(key), item, depth
        # One level more than is allowed, so that the caller notices.
        if isinstance(item, Mapping | list) and depth <= _MOST_NESTING:
            yield from _entries(item, depth + 1)


def shown_setting(value: Any) -> str:
    """Return a value as messages about settings show it."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def implausible(file: Path | str, problem: str) -> UserError:
    """Return the error of a file with settings that no model has."""
    return UserError(f"{file} describes no model: {problem}. Take it from the original model.")
