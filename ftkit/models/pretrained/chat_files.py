"""Chat files: what says beside a model how it is asked, its chat template and its end tokens."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ftkit.models.chat_templates.template import CHAT_TEMPLATE
from ftkit.models.pretrained import hub
from ftkit.models.pretrained.base_model import BaseModel, companions

GENERATION = "generation_config.json"
_ALSO_TEMPLATES = ("tokenizer_config.json", "chat_template.json")
"""Where older programs look for a chat template."""
_NOTE = "_from_model_config"
"""Where it is true, transformers takes end tokens from config.json."""


def chat_files(base: BaseModel, template: str, stop_ids: Collection[int]) -> dict[str, bytes]:
    """The files that say how a version of a model is asked, by name.

    Args:
        base: whose tokenizer and generation settings they belong to.
        template: what it was trained with, as jinja.
        stop_ids: tokens that end what it says; at least one.
    """
    own = dict(companions(base))
    files = {CHAT_TEMPLATE: template.encode(), GENERATION: _generation(base, own, stop_ids)}
    for name in _ALSO_TEMPLATES:
        settings = json.loads(own.get(name, b"{}"))
        if "chat_template" in settings:
            files[name] = _as_json(settings | {"chat_template": template})
    return files


def end_tokens(directory: Path) -> frozenset[int]:
    """The tokens that end what a model says, by its settings; none: they do not say.

    Raises:
        UserError: a file is no JSON object.
    """
    settings = hub.read_json(directory / "config.json")
    of_language = settings.get("text_config")
    of_language = of_language if isinstance(of_language, dict) else {}
    for known in (hub.read_json(directory / GENERATION), settings, of_language):
        value = known.get("eos_token_id")
        found = value if isinstance(value, list) else [value]
        if ids := frozenset(token for token in found if isinstance(token, int)):
            return ids
    return frozenset()


def _generation(base: BaseModel, own: Mapping[str, bytes], stop_ids: Collection[int]) -> bytes:
    """The generation settings of the base model, with the end tokens that were trained."""
    keys = ("bos_token_id", "pad_token_id")
    known = {key: base.settings[key] for key in keys if base.settings.get(key) is not None}
    settings = known | json.loads(own.get(GENERATION, b"{}"))
    settings.pop(_NOTE, None)
    first, *others = sorted(stop_ids)
    return _as_json(settings | {"eos_token_id": [first, *others] if others else first})


def _as_json(settings: Mapping[str, Any]) -> bytes:
    return (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
