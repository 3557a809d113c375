"""Files by which sentence-transformers knows what the vector of a text is."""

import json
from pathlib import Path
from typing import Any

from ftkit.errors import UserError
from ftkit.recipe.objectives import Pooling
from ftkit.utils.damaged_files import reading, require_regular
from ftkit.utils.json_values import from_json

MODULES, POOLING = "modules.json", "1_Pooling/config.json"
"""Files of sentence-transformers beside a model that gives vectors."""
_PACKAGE = "sentence_transformers.models."
_MODULES = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
_MODES: dict[Pooling, tuple[str, str]] = {
    "last": ("lasttoken", "pooling_mode_lasttoken"),
    "mean": ("mean", "pooling_mode_mean_tokens"),
}
"""Names of poolings, and their keys in files that all versions read."""
_OTHER_MODES = (
    "pooling_mode_cls_token",
    "pooling_mode_max_tokens",
    "pooling_mode_mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens",
)


def vector_files(width: int, pooling: Pooling) -> dict[str, bytes]:
    """Return the files of a model that gives vectors of length 1, by name.

    Args:
        width: of its hidden states.
        pooling: of these.
    """
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"{_PACKAGE}{kind}"}
        for number, (kind, path) in enumerate(_MODULES.items())
    ]
    modes = {key: name == pooling for name, (_, key) in _MODES.items()}
    settings = {"word_embedding_dimension": width, **modes, **dict.fromkeys(_OTHER_MODES, False)}
    return {
        MODULES: _as_json(modules),
        POOLING: _as_json(settings | {"include_prompt": True}),
        "2_Normalize/config.json": _as_json({}),
        "config_sentence_transformers.json": _as_json({"similarity_fn_name": "cosine"}),
    }


def _as_json(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def pooling_in(directory: Path, name: str) -> Pooling:
    """Return where the files of a model say that its vectors are.

    Args:
        directory: with modules.json.
        name: of the model, for errors.

    Raises:
        UserError: its vectors are something else, or a file is damaged.
    """
    modules = _read(directory / MODULES, list[dict[str, Any]])
    kinds = [str(one.get("type")).rpartition(".")[2] for one in modules]
    if any(kind not in _MODULES for kind in kinds) or "Pooling" not in kinds:
        raise UserError(
            f"{MODULES} of {name} names the modules {', '.join(kinds) or 'none'}, but an embedding "
            f"model here has Transformer, Pooling and Normalize. Remove {MODULES} to train its "
            "language model alone."
        )
    # By its last part alone: a model's files name nothing outside of its directory.
    place = Path(str(modules[kinds.index("Pooling")].get("path"))).name
    file = directory / place / "config.json"
    settings = _read(file, dict[str, Any])
    mode = settings.get("pooling_mode")
    for pooling, (named, key) in _MODES.items():
        if mode == named or (mode is None and settings.get(key) is True):
            return pooling
    raise UserError(
        f"{file} names another pooling than that of the last token, or the mean. Remove {MODULES} "
        "to train the language model alone."
    )


def _read(file: Path, kind: Any) -> Any:
    require_regular(file)
    with reading(file, "JSON of sentence-transformers", advice="Download it again."):
        return from_json(kind, json.loads(file.read_text(encoding="utf-8")))
