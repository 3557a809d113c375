"""Results as GGUF files: models of a known family, and LoRA adapters of such models."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from peft.utils.other import get_pattern_key
from torch import Tensor

from ftkit.errors import UserError
from ftkit.evaluation.loading import full_weights, open_result
from ftkit.evaluation.prompting import prompting_of
from ftkit.evaluation.result import Result
from ftkit.exchange.gguf.metadata import (
    ARCHITECTURES,
    GgufMetadata,
    complete_settings,
    model_metadata,
    rotary_factors,
    vocabulary_metadata,
)
from ftkit.exchange.gguf.modelfile import MODELFILE, modelfile
from ftkit.exchange.gguf.writer import (
    FILE_TYPES,
    QUANTIZATION_VERSION,
    PlannedTensor,
    file_bytes,
    planned_tensor,
    require_gguf,
    write_file,
)
from ftkit.exchange.model_card import card_files
from ftkit.exchange.output_files import check_space, output_directory
from ftkit.models.lora.load import stored_adapter
from ftkit.models.pretrained.base_model import (
    BaseModel,
    companions,
    licences,
    parameter_shapes,
    storage_of,
)
from ftkit.models.pretrained.gguf.model import tensor_names
from ftkit.recipe.options import ExportOptions, GgufNumbers
from ftkit.recipe.peft_adapter import CONFIG, adapter_keys
from ftkit.utils.progress import OnProgress

_OF_DTYPES: Mapping[torch.dtype, GgufNumbers] = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
}
"""The number format that holds a tensor as it is stored."""


def write_gguf_model(result: Result, options: ExportOptions, progress: OnProgress) -> Path:
    """Write a model and its Modelfile; the GGUF file.

    Args:
        result: no adapter.
        options: where to, and in which numbers.
        progress: receives the number of bytes.

    Raises:
        UserError: llama.cpp does not compute this model, or has no such tokenizer; the package
            gguf is missing; there is no room.
    """
    require_gguf()
    out = options.directory
    base = open_result(result)
    settings = _settings_for_gguf(base)
    family = settings["model_type"]
    _, first = next(full_weights(result, base))
    numbers = options.quantization or _OF_DTYPES[first.dtype]
    names = tensor_names(settings)
    factors = rotary_factors(settings)
    planned = {name: planned_tensor(name, values.shape, "f32") for name, values in factors.items()}
    planned |= {name: planned_tensor(name, shape, numbers) for name, (_, shape) in names.items()}
    prompting = prompting_of(result, base)
    template = None if prompting.origin == "name" else prompting.template.source
    files = {**dict(companions(base)), **prompting.files(base)}
    metadata = {
        **_described(result, base),
        "general.file_type": FILE_TYPES[numbers],
        **model_metadata(settings),
        **vocabulary_metadata(
            base.tokenizer,
            files,
            settings,
            name=base.name,
            template=template,
            end_ids=sorted(prompting.end_ids),
        ),
    }
    check_space(out, file_bytes(planned))
    ours = {theirs: name for name, (theirs, _) in names.items()}
    stored = storage_of(base.architecture, "hf").written(full_weights(result, base))
    file = f"model-{numbers}.gguf"

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, values in factors.items():
            yield name, torch.from_numpy(values)
        for theirs, tensor in stored:
            yield ours[theirs], _as_llama_cpp(ours[theirs], tensor, settings)

    with output_directory(out, overwrite=options.overwrite) as partial:
        write_file(
            partial / file,
            ARCHITECTURES[family],
            metadata,
            planned,
            tensors(),
            progress,
        )
        text = modelfile(file, base, prompting)
        (partial / MODELFILE).write_text(text, encoding="utf-8")
        beside = {**dict(licences(base)), **card_files(result, result.directory, "gguf")}
        for name, content in beside.items():
            (partial / name).write_bytes(content)
    return out / file


def _settings_for_gguf(base: BaseModel) -> dict[str, Any]:
    """All settings of a model that a GGUF file is written of."""
    known = dict(base.settings) or base.architecture.settings_in("hf")
    if known is None:
        raise UserError(
            f"{base.name} is not described by a config.json, from which GGUF files are written. "
            "Copy config.json of the original model into its directory."
        )
    rows = parameter_shapes(base)[base.architecture.embedding][0]
    return complete_settings(
        known | {"vocab_size": rows, "tie_word_embeddings": base.tied}, base.name
    )


def _as_llama_cpp(name: str, tensor: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Convert a tensor of Hugging Face, whose rows are outputs, to llama.cpp's convention."""
    family = settings["model_type"]
    if family in ("llama", "mistral") and (".attn_q." in name or ".attn_k." in name):
        return _pairs_beside_each_other(tensor, settings["head_dim"])
    if family == "gemma2" and name.endswith("norm.weight"):
        return tensor.float() + 1  # its norms multiply by one more than their weight
    return tensor


def _pairs_beside_each_other(tensor: Tensor, head_size: int) -> Tensor:
    """Rows of rotated heads: Hugging Face has the first numbers of all pairs before the second."""
    halves = tensor.reshape(-1, 2, head_size // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _described(result: Result, base: BaseModel) -> GgufMetadata:
    from gguf import size_label

    total = sum(shape.numel() for shape in parameter_shapes(base).values())
    return {
        "general.type": "model",
        "general.name": Path(result.name).name or base.name,
        "general.quantization_version": QUANTIZATION_VERSION,
        "general.size_label": size_label(total, total, 0, 0),
    }


_PREFIX = "base_model.model."
"""Prefix of PEFT's names."""
_MATRICES = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b"}


def write_gguf_adapter(result: Result, options: ExportOptions, progress: OnProgress) -> Path:
    """Write an adapter; the GGUF file.

    Args:
        result: an adapter.
        options: where to, in which numbers, and where its base model is.
        progress: receives the number of bytes.

    Raises:
        UserError: llama.cpp does not compute such an adapter or its model; the package gguf is
            missing; there is no room.
    """
    require_gguf()
    out, directory = options.directory, result.directory
    keys = adapter_keys(directory)
    _check_kind(result, keys)
    base = open_result(result, options.checkpoint_dir, "--checkpoint_dir")
    settings = _settings_for_gguf(base)
    theirs = {
        name.removesuffix(".weight"): ours for ours, (name, _) in tensor_names(settings).items()
    }
    stored = stored_adapter(directory)
    first = next(iter(stored.values()))
    numbers = options.quantization or _OF_DTYPES[first.dtype]
    names = {name: _name_in_gguf(name, theirs, result) for name in stored}
    planned: dict[str, PlannedTensor] = {
        names[name]: planned_tensor(names[name], tuple(tensor.shape), numbers)
        for name, tensor in stored.items()
    }
    factors = _factors(directory, stored)
    metadata: GgufMetadata = {
        "general.type": "adapter",
        "general.name": Path(result.name).name or base.name,
        "adapter.type": "lora",
        "adapter.lora.alpha": float(keys["lora_alpha"]),
        "general.quantization_version": QUANTIZATION_VERSION,
    }
    check_space(out, file_bytes(planned))

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in stored.items():
            ours = names[name]
            if ours.endswith("lora_b"):
                tensor = _as_llama_cpp(ours, tensor, settings)
                factor = factors[name]
                tensor = tensor if factor == 1 else tensor.float() * factor
            yield ours, tensor

    file = f"adapter-{numbers}.gguf"
    architecture = ARCHITECTURES[settings["model_type"]]
    with output_directory(out, overwrite=options.overwrite) as partial:
        write_file(partial / file, architecture, metadata, planned, tensors(), progress)
        for name, content in card_files(result, base.directory, "gguf").items():
            (partial / name).write_bytes(content)
    return out / file


def _check_kind(result: Result, keys: Mapping[str, Any]) -> None:
    problem = None
    if keys["lora_variant"] == "dora":
        problem = "is DoRA, whose magnitudes llama.cpp does not compute"
    elif keys["lora_modules_to_save"]:
        whole = ", ".join(keys["lora_modules_to_save"])
        problem = f"holds fully trained layers ({whole}), which llama.cpp lacks"
    elif keys["lora_experts"]:
        problem = "adapts experts, which GGUF files are not written of"
    if problem is not None:
        raise _refusal(result, problem)


def _refusal(result: Result, problem: str) -> UserError:
    return UserError(
        f"{result.name} {problem} from an adapter. Try ftkit merge {result.name} --out DIR, then "
        "ftkit export DIR --format gguf."
    )


def _name_in_gguf(name: str, theirs: Mapping[str, str], result: Result) -> str:
    """llama.cpp's name of a matrix of an adapter."""
    for end, ours in _MATRICES.items():
        layer = name.removeprefix(_PREFIX).removesuffix(f".{end}")
        if name.endswith(end) and layer in theirs:
            return f"{theirs[layer]}.{ours}"
    raise _refusal(result, f"holds {name}, which llama.cpp does not support")


def _factors(directory: Path, stored: Mapping[str, Tensor]) -> dict[str, float]:
    """Factor for B in layers that PEFT scales by something other than alpha / rank.

    llama.cpp has one alpha for all layers, and takes the rank from B.
    """
    config = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
    patterns, alpha = config.get("alpha_pattern") or {}, config["lora_alpha"]
    found = {}
    for name, tensor in stored.items():
        if name.endswith("lora_B.weight"):
            layer = name.removeprefix(_PREFIX).removesuffix(".lora_B.weight")
            own = patterns.get(get_pattern_key(list(patterns), layer), alpha)
            rank = tensor.shape[1]
            # rsLoRA scales by alpha / sqrt(rank), which is alpha / rank times sqrt(rank).
            root = math.sqrt(rank) if config.get("use_rslora") else 1.0
            found[name] = own / alpha * root
    return found
