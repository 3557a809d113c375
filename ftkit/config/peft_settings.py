"""The settings of a PEFT adapter, which any program may have written: checked by key; no torch.

PEFT itself imports the modules and takes the classes that some keys name (`megatron_core`,
`auto_mapping`), so that nothing of a foreign file reaches it but what is listed here.
"""

import json
import logging
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.utils.damaged_files import reading, require_regular

AGAIN = "Take it from where it was saved again."
HARMLESS_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""First values (init_lora_weights) that leave the base model's weights as they are."""

_MOST_RANK = 2**16
_LOG = logging.getLogger(__name__)


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 < value <= _MOST_RANK


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_name_or_names(value: Any) -> bool:
    return _is_text(value) or _are_names(value)


def _is_start(value: Any) -> bool:
    return _is_flag(value) or _is_text(value)


def _are_ranks(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_whole, value.values()))


def _are_numbers(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_number, value.values()))


_USED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "peft_type": (_is_text, "a text"),
    "base_model_name_or_path": (_is_text, "a text"),
    "r": (_is_whole, f"a whole number from 1 to {_MOST_RANK:,}"),
    "lora_alpha": (_is_number, "a number"),
    "lora_dropout": (_is_share, "a number from 0 to below 1"),
    "target_modules": (_is_name_or_names, "a text or a list of texts"),
    "target_parameters": (_are_names, "a list of texts"),
    "modules_to_save": (_are_names, "a list of texts"),
    "rank_pattern": (_are_ranks, "names with whole numbers"),
    "alpha_pattern": (_are_numbers, "names with numbers"),
    "use_dora": (_is_flag, "true or false"),
    "use_rslora": (_is_flag, "true or false"),
    "fan_in_fan_out": (_is_flag, "true or false"),
    "init_lora_weights": (_is_start, "true, false or a text"),
}
"""What ftkit uses, with the kind of its values; null is as if the key were not there."""

CHANGING: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "lora_bias": (False,),
    "layers_to_transform": ([],),
    "exclude_modules": ([],),
    "trainable_token_indices": ([], {}),
    "layer_replication": ([],),
    "alora_invocation_tokens": ([],),
    "arrow_config": ({},),
    "kasa_config": ({},),
    "megatron_config": ({},),
    "monteclora_config": ({},),
    "use_bdlora": ({}, False),
    "use_qalora": (False,),
    "velora_config": ({},),
}
"""Settings that change what an adapter computes, with the values, beside null, that do not."""

_NEUTRAL = frozenset(
    (
        *("auto_mapping", "corda_config", "ensure_weight_tying", "eva_config", "inference_mode"),
        *("layers_pattern", "loftq_config", "lora_ga_config", "megatron_core", "peft_version"),
        *("qalora_group_size", "revision", "runtime_config", "task_type"),
    )
)
"""Settings that change no number of a saved adapter: how it was begun, and what loads it."""
_SWITCHES = ("use_", "_config")
"""Beginning and end of PEFT's keys that switch a method on."""


def read_peft_settings(file: Path) -> dict[str, Any]:
    """What ftkit uses of an adapter_config.json, and what it has to refuse.

    Keys of newer versions of PEFT that are switched off pass; others are named once and ignored,
    but for those that switch a method on.

    Raises:
        UserError: there is no such file, it is damaged, or switches on what ftkit does not know.
    """
    require_regular(file)
    if not file.is_file():
        raise UserError(
            f"adapter is {file.parent}, but there is no {file.name}. Give the directory of a PEFT "
            "adapter, such as a run's final/."
        )
    with reading(file, "a JSON object with the settings of an adapter", advice=AGAIN):
        content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise UserError(f"{file} holds no settings. {AGAIN}")
    given = {key: value for key, value in content.items() if value is not None}
    for key, (is_sound, wanted) in _USED.items():
        if key in given and not is_sound(given[key]):
            raise UserError(
                f"{file}: {key} is {_shown(given[key])}, but has to be {wanted}. {AGAIN}"
            )
    unknown = {k: v for k, v in given.items() if k not in (*_USED, *CHANGING, *_NEUTRAL) and v}
    beginning, end = _SWITCHES
    for key, value in unknown.items():
        if key.startswith(beginning) or key.endswith(end):
            raise UserError(
                f"{file} has {key} {_shown(value)}, which this ftkit does not know and which may "
                "change what the adapter computes. Give another adapter, or none."
            )
    if unknown:
        _say_ignored(file, ", ".join(sorted(unknown)))
    return {key: value for key, value in given.items() if key in _USED or key in CHANGING}


def require_known(settings: Mapping[str, Any], directory: Path) -> None:
    """Refuse an adapter with a setting that changes what it computes in a way ftkit does not know.

    Args:
        settings: from `read_peft_settings`.
        directory: of the adapter.

    Raises:
        UserError: names the key.
    """
    for key, harmless in CHANGING.items():
        if settings.get(key) is not None and settings[key] not in harmless:
            raise UserError(
                f"adapter {directory} has {key} {_shown(settings[key])}, which ftkit cannot train "
                "on. Give another adapter, or none."
            )
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower() not in HARMLESS_STARTS:
        raise UserError(
            f"adapter {directory} has init_lora_weights {start}: it belongs to a base model whose "
            "weights its start has changed. Have PEFT convert it while it is saved "
            "(path_initial_model_for_weight_conversion), or give another adapter."
        )


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


@lru_cache
def _say_ignored(file: Path, keys: str) -> None:
    _LOG.warning("%s: not used, because ftkit does not know it: %s", file, keys)
