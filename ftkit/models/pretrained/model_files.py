"""Files of the directory of a base model: settings, tokenizer, weights, licences."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, get_args

from ftkit.errors import UserError
from ftkit.models.pretrained.stored_forms import quantized_weights, stored_form
from ftkit.models.pretrained.vector_files import MODULES, POOLING, pooling_in
from ftkit.recipe.hubs import HUBS
from ftkit.recipe.implementations import HF, layout_in
from ftkit.recipe.objectives import ProblemType, ScoreLabels
from ftkit.utils.damaged_files import reading, require_regular

TOKENIZER_CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)

PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)
"""Settings of multimodal models for preparing images and sounds."""

CARD = "README.md"
"""A model card; its head names the licence of a base model."""


SETTINGS_FILES = (
    *("config.json", "generation_config.json"),
    *TOKENIZER_FILES,
    *PROCESSOR_FILES,
    *(MODULES, POOLING),
)
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Weight files in the order of transformers, which reads the first that exists, also in shards."""
DOWNLOADED = Path(".cache/huggingface")
"""Directory that huggingface_hub leaves in each download."""
_QUANTIZED_NOTES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Files beside config.json by which older quantisers, which do not change it, are recognised."""

_SUFFIXES = (".safetensors", ".bin")

# Not followed by a letter: `noticed` is no licence.
_LICENCE = re.compile(r"(licen[cs]es?|notices?|use_policy)(?![a-z])[^/]*", re.IGNORECASE)

OUTLINE = "base.json"
"""File of a checkpoint that describes its base model without weights."""
EXTRA_WEIGHTS = "keeps_rest"
"""Key of that file for models with more weights than the language model that is trained."""


def has_tokenizer(directory: Path) -> bool:
    """Return whether a directory contains a tokenizer."""
    return any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))


def missing_files(directory: Path) -> list[str]:
    """List the files that a directory lacks to be a base model; [] if complete.

    Only names are compared. A directory in the layout of an implementation needs its two files, one
    of Hugging Face config.json and every weight file of its index.
    """
    # Checked first: the files that are there may look complete without the unfinished ones.
    if incomplete_files(directory):
        works = " (run ftkit download again)" if any(HUBS) else ""
        return [f"the rest of an interrupted download{works}"]
    if layout_in(directory) != HF:
        return []
    require_regular(settings := directory / "config.json")
    missing, weights = [] if settings.is_file() else [settings.name], weight_files(directory)
    if not weights:
        missing.append("weights (model.safetensors)")
    return missing + [file.name for file in weights if not file.is_file()]


def is_classifier(settings: Mapping[str, Any]) -> bool:
    """Return whether config.json describes a model that gives sequences scores."""
    named = settings.get("architectures")
    names = named if isinstance(named, list) else []
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def scores_of_model(directory: Path, settings: Mapping[str, Any], name: str) -> ScoreLabels | None:
    """Return the scores that a model gives sequences; None: it predicts tokens.

    Args:
        directory: of its files.
        settings: the content of config.json.
        name: of the model, for errors.

    Raises:
        UserError: its files say it otherwise than transformers and sentence-transformers do.
    """
    if is_classifier(settings):
        return scores_in(settings, name)
    if not (directory / MODULES).is_file():
        return None
    return ScoreLabels(names=(), pooling=pooling_in(directory, name))


def scores_in(settings: Mapping[str, Any], name: str) -> ScoreLabels:
    """Return the scores that the config.json of a classifier names.

    Args:
        settings: its content.
        name: of the model, for errors.

    Raises:
        UserError: it names them otherwise than transformers.
    """
    # Two is the default of transformers, which files therefore leave out.
    labels = settings.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    found = labels if isinstance(labels, dict) else {}
    named = [found.get(str(place)) for place in range(len(found))]
    names = tuple(str(one) for one in named if isinstance(one, str | int))
    if not found or len({*names}) < len(found):
        raise UserError(
            f"id2label in the config.json of {name} has to be an object with a name for each of "
            "0, 1 and so on, all different. Take it from the same model."
        )
    problem = settings.get("problem_type")
    is_one_class = len(names) == 1 and problem == "single_label_classification"
    if problem not in get_args(ProblemType) or is_one_class:  # as of a reward model
        return replace(ScoreLabels.unnamed(len(names)), names=names)
    return ScoreLabels(names=names, problem_type=problem)


def weight_files(directory: Path) -> list[Path]:
    """List the weight files of a Hugging Face directory, existing or not; [] if unknown.

    Raises:
        UserError: the index of the shards cannot be read.
    """
    for name in WEIGHTS:
        require_regular(single := directory / name)
        # A whole file is read even beside an index, as transformers does.
        if single.is_file():
            return [single]
        if (index := directory / f"{name}.index.json").is_file():
            return indexed_files(read_json(index), index)
    return []


def read_json(file: Path) -> dict[str, Any]:
    """Read a settings file; {} if it does not exist.

    Raises:
        UserError: it is not a JSON object.
    """
    require_regular(file)
    if not file.is_file():
        return {}
    with reading(file, "a JSON object"):
        content = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise UserError(f"{file} is not a JSON object. Download it again.")
    return content


def require_readable_weights(directory: Path) -> None:
    """Refuse a directory whose weights are stored in a form that cannot be read."""
    if stored_form(read_json(directory / "config.json"), str(directory)) is not None:
        return
    for note, method in _QUANTIZED_NOTES.items():
        if (directory / note).is_file():
            raise quantized_weights({"quant_method": method}, str(directory))


def incomplete_files(directory: Path) -> list[Path]:
    """List the files in a directory whose download huggingface_hub has not finished."""
    return sorted((directory / DOWNLOADED / "download").rglob("*.incomplete"))


def indexed_files(content: Mapping[str, Any], index: Path) -> list[Path]:
    """Return the weight files that an index names, existing or not; sorted.

    Only names are compared: a link may lead out of the directory, as the files of a hub's cache do.

    Args:
        content: of the index.
        index: model.safetensors.index.json or pytorch_model.bin.index.json.

    Raises:
        UserError: it lists no files, or names one outside of its own directory.
    """
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index} does not list the weight files. Download it again.")
    files = set()
    for tensor, name in weight_map.items():
        # A null byte would raise where the file is looked for.
        place = PurePath(name) if isinstance(name, str) and "\0" not in name else PurePath()
        if place.is_absolute() or ".." in place.parts or place.suffix not in _SUFFIXES:
            raise UserError(
                f"{index} says that {tensor} lies in {name!r}, but it has to name a weight file in "
                f"{index.parent}, such as model-00001-of-00002{_SUFFIXES[0]}. Download it again."
            )
        files.add(index.parent / place)
    return sorted(files)


def licence_files(directory: Path) -> list[Path]:
    """Licence files of the model in a directory."""
    return sorted(file for file in directory.iterdir() if is_licence(file.name) and file.is_file())


def is_licence(name: str) -> bool:
    """Return whether a file of this name is a licence, with any suffix."""
    return _LICENCE.fullmatch(name) is not None


def has_extra_weights(directory: Path) -> bool:
    """Return whether a result needs weights of the base model that no checkpoint contains.

    Args:
        directory: of a checkpoint, with settings, tokenizer and outline.

    Raises:
        UserError: the outline is damaged.
    """
    return bool(read_json(directory / OUTLINE).get(EXTRA_WEIGHTS))
