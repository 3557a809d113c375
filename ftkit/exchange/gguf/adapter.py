"""LoRA adapters as GGUF files, which llama.cpp adds to a model of its own at a start."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from peft.utils.other import get_pattern_key
from torch import Tensor

from ftkit.errors import UserError
from ftkit.evaluation.loading import open_result
from ftkit.evaluation.result import Result
from ftkit.exchange.cards import card_files
from ftkit.exchange.gguf.metadata import ARCHITECTURES, GgufMetadata
from ftkit.exchange.gguf.model import OF_DTYPES, as_llama_cpp, settings_for_gguf
from ftkit.exchange.gguf.writer import (
    QUANTIZATION_VERSION,
    PlannedTensor,
    file_bytes,
    planned_tensor,
    require_gguf,
    write_file,
)
from ftkit.exchange.output_files import check_space, output_directory
from ftkit.models.lora.load import stored_adapter
from ftkit.models.pretrained.gguf.tensors import tensor_names
from ftkit.recipe.peft_adapter import CONFIG, adapter_keys
from ftkit.recipe.result_options import ExportOptions
from ftkit.utils.progress import OnProgress

_PREFIX = "base_model.model."
"""Of PEFT's names."""
_MATRICES = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b"}


def write_gguf_adapter(result: Result, options: ExportOptions, progress: OnProgress) -> Path:
    """Write an adapter; the GGUF file.

    Args:
        result: an adapter.
        options: where to, in which numbers, and where its base model is.
        progress: told of bytes.

    Raises:
        UserError: llama.cpp does not compute such an adapter or its model; the package gguf is
            missing; there is no room.
    """
    require_gguf()
    out, directory = options.directory, result.directory
    keys = adapter_keys(directory)
    _check_kind(result, keys)
    base = open_result(result, options.checkpoint_dir, "--checkpoint_dir")
    settings = settings_for_gguf(base)
    theirs = {
        name.removesuffix(".weight"): ours for ours, (name, _) in tensor_names(settings).items()
    }
    stored = stored_adapter(directory)
    first = next(iter(stored.values()))
    numbers = options.quantization or OF_DTYPES[first.dtype]
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
                tensor = as_llama_cpp(ours, tensor, settings)
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
        problem = f"holds layers that were trained whole ({whole}), which llama.cpp does not take"
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
    raise _refusal(result, f"holds {name}, which llama.cpp does not take")


def _factors(directory: Path, stored: Mapping[str, Tensor]) -> dict[str, float]:
    """What B is multiplied by where PEFT scales a layer otherwise than by alpha / rank.

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
            root = math.sqrt(rank) if config.get("use_rslora") else 1.0
            found[name] = own / alpha * root
    return found
