"""Saving of a model as a directory, in Hugging Face's layout or that of an implementation."""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ftkit.errors import UserError
from ftkit.models.architectures.architecture import HEAD, ModelLayout
from ftkit.models.chat_templates.template import CHAT_TEMPLATE
from ftkit.models.pretrained.base_model import (
    BaseModel,
    companions,
    is_tied,
    licences,
    parameter_shapes,
    settings_files,
    storage_of,
)
from ftkit.models.pretrained.model_files import TOKENIZER_CONFIG
from ftkit.models.pretrained.tokenizer import GENERATION
from ftkit.models.pretrained.weight_files import (
    DTYPES,
    Packing,
    ShardWriter,
    Tensors,
    WeightStorage,
    write_settings,
)
from ftkit.recipe.implementations import HF, implementation_row
from ftkit.utils.files import new_directory

_ALSO_TEMPLATES = (TOKENIZER_CONFIG, "chat_template.json")
"""Files in which older programs look for a chat template."""
_NOTE = "_from_model_config"
"""Key with which transformers takes end tokens from config.json."""


def layout_of(base: BaseModel) -> ModelLayout:
    """Choose the layout of a fine-tuned model: Hugging Face's if possible."""
    # Otherwise it came from a directory in the layout of its implementation, and a run must not end
    # without a result.
    if base.architecture.naming_in(HF) is None:
        return base.architecture.implementation
    is_described = base.layout == HF or bool(base.settings)
    is_possible = is_described or base.architecture.settings_in(HF) is not None
    return HF if is_possible else base.architecture.implementation


def save_in_own_layout(
    base: BaseModel,
    tensors: Tensors,
    out: Path,
    *,
    layout: ModelLayout,
    overwrite: bool = False,
    others: Mapping[str, bytes] | None = None,
) -> None:
    """Write a model in the layout of an implementation; further arguments as of `save_hf`.

    Raises:
        UserError: as `save_hf`, or its library is not installed.
    """
    row = implementation_row(layout)
    row.require(f"{row.title}'s layout is written with {row.title}'s own code.")
    row.code().save(base, tensors, out, overwrite=overwrite, others=others)


def save_hf(
    base: BaseModel,
    tensors: Tensors,
    out: Path,
    *,
    max_shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
    others: Mapping[str, bytes] | None = None,
    packing: Packing | None = None,
) -> None:
    """Write a model that `transformers.AutoModelForCausalLM.from_pretrained(out)` loads.

    A model with scores is written for `AutoModelForSequenceClassification`, one that gives vectors
    for `AutoModel` and sentence-transformers.

    The directory appears complete or not at all. Memory holds one shard at a time.

    Args:
        base: the original model, whose settings, tokenizer and licence are copied.
        tensors: all of the model.
        out: a directory that is empty or does not exist.
        max_shard_bytes: size of the files that the weights are split into.
        overwrite: replace the directory, once the new one is complete.
        others: further files, by name; they replace those of the base model.
        packing: form in which some tensors are written; None: as they are.

    Raises:
        UserError: Hugging Face has no such model, its other weights are missing, or ``out`` exists
            or cannot be written.
        ValueError: the tensors are not those of the model.
    """
    storage = storage_for(base, "hf")
    # Everything that can be refused is refused before the directory is made.
    require_extra_weights(base)
    settings = settings_without_code(base.settings) or base.architecture.settings_in("hf")
    if settings is None:
        raise UserError(
            f"{base.architecture.name} cannot be written for Hugging Face without its config.json. "
            "Copy config.json of the original model into its directory."
        )
    embedding, head = ends_in_files(base, storage)
    with written_directory(out, overwrite) as partial:
        writer = ShardWriter(
            partial, max_shard_bytes, None if packing is None else packing.metadata
        )
        for name, tensor in storage.written(tensors):
            for part in [(name, tensor)] if packing is None else packing.parts(name, tensor):
                writer.add(*part)
        # Weights beside the language model, byte for byte.
        for name, kept in base.rest.items():
            writer.add(name, kept.read())
        writer.finish()
        # From what was written: training may have untied the head or changed the format.
        dtype, is_now_tied = writer.dtypes[embedding], head not in writer.dtypes
        # Gemma 4 has a form without towers, whose settings are those of a whole model all the same.
        if base.architecture.rest_shapes or "text_config" in settings:
            settings = _of_whole(settings, base, writer.dtypes, tied=is_now_tied)
        else:
            settings |= facts_of_weights(settings, base, dtype, tied=is_now_tied)
            if base.architecture.scores is not None:
                from ftkit.models.pretrained.scored_model import score_settings

                settings |= score_settings(base, others or {})
            # Without these keys, transformers assumes the defaults of the family.
            settings.setdefault("bos_token_id", base.tokenizer.bos_id)
            settings.setdefault("eos_token_id", base.tokenizer.eos_id)
        if packing is not None:
            settings |= packing.settings
        write_settings(partial / "config.json", settings)
        scores, beside = base.architecture.scores, dict(licences(base))
        if scores is not None and scores.pooling is not None:
            from ftkit.models.pretrained.vector_files import vector_files

            shapes = base.architecture.untied_shapes
            beside |= vector_files(shapes[HEAD][1], scores.pooling)
        save_beside(base, {**beside, **(others or {})}, partial)


def require_extra_weights(base: BaseModel) -> None:
    """Refuse to write a multimodal model without its weights beside the language model.

    Raises:
        UserError: these weights are missing.
    """
    if base.architecture.rest_shapes and not base.rest:
        raise UserError(
            f"{base.name} has parts beside its language model, which are only in its own files, "
            "and these were not found. Give their path with --checkpoint_dir PATH."
        )


def storage_for(base: BaseModel, layout: ModelLayout) -> WeightStorage:
    """Return the rules by which a layout stores the model; UserError if it cannot."""
    if (obstacle := base.architecture.obstacle_to(layout)) is not None:
        raise UserError(f"{base.name} {obstacle}")
    return storage_of(base.architecture, layout)


def ends_in_files(base: BaseModel, storage: WeightStorage) -> tuple[str, str]:
    """Names of embedding and head in the files."""
    return storage.written_name(base.architecture.embedding), storage.written_name(HEAD)


def settings_without_code(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without the key that names code in the model's repository."""
    # That code was not used here, and transformers would ask to trust it.
    return {key: value for key, value in settings.items() if key != "auto_map"}


def _of_whole(
    settings: Mapping[str, Any], base: BaseModel, dtypes: Mapping[str, torch.dtype], *, tied: bool
) -> dict[str, Any]:
    """Update number format and tied head in the settings of a model with a trained language part.

    The format in the settings is the widest of those that are written.
    """
    # Integers that are only copied do not count.
    weights = [dtype for dtype in dtypes.values() if dtype in DTYPES.values()]
    widest = str(reduce(torch.promote_types, weights)).removeprefix("torch.")
    changed: dict[str, Any] = {key: widest for key in ("dtype", "torch_dtype") if key in settings}
    # Otherwise the settings stay as they were, to the key.
    if tied != is_tied(base.architecture, settings):
        ties = {"tie_word_embeddings": tied}
        changed |= ties
        if "text_config" in settings:
            changed["text_config"] = settings["text_config"] | ties
    return {**settings, **changed}


def facts_of_weights(
    settings: Mapping[str, Any], base: BaseModel, dtype: Any, *, tied: bool
) -> dict[str, Any]:
    """Entries of config.json that describe the written weights."""
    return {
        # transformers 5 has renamed the key, and reads both.
        "dtype" if "dtype" in settings else "torch_dtype": str(dtype).removeprefix("torch."),
        "tie_word_embeddings": tied,
        "vocab_size": parameter_shapes(base)[base.architecture.embedding][0],
    }


def save_beside(base: BaseModel, others: Mapping[str, bytes] | None, directory: Path) -> None:
    """Write the files beside the weights of a model: tokenizer and generation settings.

    Args:
        base: the original model, whose files are copied.
        others: further files, by name; they replace those of the base model.
        directory: exists.
    """
    for name, content in {**dict(companions(base)), **(others or {})}.items():
        if name not in settings_files():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(content)


@contextmanager
def written_directory(out: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a new directory to fill; turn write errors into a UserError."""
    try:
        with new_directory(out, overwrite=overwrite) as partial:
            yield partial
    except FileExistsError:
        raise UserError(f"{out} exists already. Remove it or choose another directory.") from None
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{out} cannot be written ({error}). Free some space or choose another directory."
        ) from error
    except RuntimeError as error:
        # torch.save raises RuntimeError where the disk is full.
        if "PytorchStreamWriter" not in str(error):
            raise
        raise UserError(
            f"{out} cannot be written ({str(error).splitlines()[0]}). Free some space or choose "
            "another directory."
        ) from error


def chat_files(base: BaseModel, template: str, stop_ids: Collection[int]) -> dict[str, bytes]:
    """Return the chat template and generation settings of a trained model, by file name.

    Args:
        base: the original model, with its tokenizer and generation settings.
        template: jinja source that the model was trained with.
        stop_ids: tokens that end its answers; at least one.
    """
    own = dict(companions(base))
    files = {CHAT_TEMPLATE: template.encode(), GENERATION: _generation(base, own, stop_ids)}
    if base.architecture.scores:
        from ftkit.models.pretrained.scored_model import tokenizer_settings

        own[TOKENIZER_CONFIG] = _as_json(tokenizer_settings(base, own, stop_ids))
        files[TOKENIZER_CONFIG] = own[TOKENIZER_CONFIG]
    for name in _ALSO_TEMPLATES:
        settings = json.loads(own.get(name, b"{}"))
        # Some programs still prefer the template in tokenizer_config.json to the file.
        if "chat_template" in settings:
            files[name] = _as_json(settings | {"chat_template": template})
    return files


def _generation(base: BaseModel, own: Mapping[str, bytes], stop_ids: Collection[int]) -> bytes:
    """Generation settings of the base model with the trained end tokens."""
    keys = ("bos_token_id", "pad_token_id")
    known = {key: base.settings[key] for key in keys if base.settings.get(key) is not None}
    settings = known | json.loads(own.get(GENERATION, b"{}"))
    settings.pop(_NOTE, None)
    first, *others = sorted(stop_ids)
    return _as_json(settings | {"eos_token_id": [first, *others] if others else first})


def _as_json(settings: Mapping[str, Any]) -> bytes:
    return (json.dumps(settings, indent=2, ensure_ascii=False) + "\n").encode()
