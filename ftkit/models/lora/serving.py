"""Serving of adapters by vLLM: a table of the adapters that it refuses, without torch.

The rules are those of PEFTHelper (vllm/lora/peft_helper.py) and of max_lora_rank
(vllm/config/lora.py). A test compares them with an installed vLLM.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ftkit.recipe.peft_names import HARMLESS_STARTS

VLLM_VERSION = "0.33.0"
"""Version that the rules are from."""
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that --max-lora-rank of vLLM may have."""
DEFAULT_RANK = 16
"""Its default."""
_PEFT_RANK = 8
"""Rank of an adapter that does not say."""
_SERVED_WHOLE = ("classifier", "score")


@dataclass(frozen=True)
class ServingRule:
    """A property of adapters that vLLM refuses."""

    key: str
    """Key of adapter_config.json."""
    broken: Callable[[Any], bool]
    """True if vLLM refuses a value of the key."""
    text: str
    """Description of such an adapter."""


# A table of our own: vLLM is half a gigabyte and needs its devices.
SERVING_RULES = (
    ServingRule(
        "peft_type", lambda kind: kind not in (None, "LORA"), "it is another type than LoRA"
    ),
    ServingRule("use_dora", bool, "it is DoRA"),
    ServingRule(
        "modules_to_save",
        lambda names: bool(set(names or ()) - set(_SERVED_WHOLE)),
        "layers were trained whole",
    ),
    ServingRule("bias", lambda kind: kind not in (None, "none"), "biases were trained"),
    ServingRule("lora_bias", bool, "its matrices have biases"),
    ServingRule(
        "init_lora_weights",
        lambda start: isinstance(start, str) and start.lower() not in HARMLESS_STARTS,
        "it belongs to a base model whose weights its start has changed",
    ),
    ServingRule("alora_invocation_tokens", bool, "it is an activated LoRA"),
    ServingRule("layer_replication", bool, "it repeats layers of its base model"),
    ServingRule("use_bdlora", bool, "it is block-diagonal"),
    ServingRule("use_qalora", bool, "it is a QA-LoRA"),
)


def _rank_of(config: Mapping[str, Any]) -> int:
    """Highest rank of an adapter, by its adapter_config.json."""
    ranks = (config.get("rank_pattern") or {}).values()
    return max([int(config.get("r", _PEFT_RANK)), *map(int, ranks)])


def serving_rank(config: Mapping[str, Any]) -> int | None:
    """Lowest --max-lora-rank that serves an adapter; None: no value is large enough."""
    return next((rank for rank in RANKS if rank >= _rank_of(config)), None)


def obstacles(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the reasons why vLLM refuses an adapter, each with its key and value.

    Args:
        config: its adapter_config.json.
    """
    for rule in SERVING_RULES:
        if rule.broken(value := config.get(rule.key)):
            yield f"{rule.text} ({rule.key}: {value})"
    if serving_rank(config) is None:
        yield f"its rank is {_rank_of(config)}, above {RANKS[-1]}"


def serving_notice(config: Mapping[str, Any]) -> str | None:
    """Notice about an adapter with these settings; None: vLLM serves it."""
    found = "; ".join(obstacles(config))
    if not found:
        return None
    return (
        f"vLLM does not serve this adapter: {found}. ftkit merge makes a model of it that vLLM "
        "serves."
    )
