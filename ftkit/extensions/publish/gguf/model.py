"""Results as GGUF files: models of a known family, and LoRA adapters of such models."""

import importlib.util
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from peft.utils.other import get_pattern_key
from torch import Tensor

from ftkit.errors import UserError
from ftkit.evaluation.loading import full_weights, open_result
from ftkit.evaluation.prompting import prompting_of
from ftkit.evaluation.result import Result, find_result
from ftkit.extensions.gguf.families import FAMILIES, NamedTensor, Rule, named_tensors
from ftkit.extensions.gguf.header import packed_bytes
from ftkit.extensions.publish.commands import ExportOptions, GgufNumbers
from ftkit.extensions.publish.gguf.importance import (
    IMPORTANCE_FILE,
    Importance,
    measured_importance,
)
from ftkit.extensions.publish.gguf.kquants import K_QUANTS, pack
from ftkit.extensions.publish.gguf.metadata import (
    GgufMetadata,
    complete_settings,
    model_metadata,
    rotary_factors,
    vocabulary_metadata,
)
from ftkit.extensions.publish.gguf.mixture import FILE_TYPES, MIXTURES, kinds_of
from ftkit.extensions.publish.gguf.modelfile import MODELFILE, modelfile
from ftkit.extensions.publish.model_card import card_files
from ftkit.models.architectures.transformers_architecture import TransformersArchitecture
from ftkit.models.lora.adapter_reading import stored_adapter
from ftkit.models.pretrained.base_model import (
    BaseModel,
    companions,
    licences,
    parameter_shapes,
    storage_of,
)
from ftkit.recipe.peft_adapter import adapter_keys
from ftkit.recipe.peft_names import CONFIG
from ftkit.utils.output_files import check_space, output_directory
from ftkit.utils.progress import OnProgress

_OF_DTYPES: Mapping[torch.dtype, GgufNumbers] = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
}
"""The number format that holds a tensor as it is stored."""


class GgufFile(NamedTuple):
    """A GGUF file that was written."""

    path: Path
    is_part: bool
    """True if the model also sees or hears, by parts that are not in the file."""


def write_gguf_model(result: Result, options: ExportOptions, progress: OnProgress) -> GgufFile:
    """Write a model and its Modelfile; of one that sees or hears, its language model.

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
    base = open_result(result, options.checkpoint_dir, "--checkpoint_dir")
    settings = _settings_for_gguf(base)
    family = settings["model_type"]
    # The first tensor stands for all: their number format is the default of the file.
    _, first = next(full_weights(result, base))
    numbers = options.quantization or _OF_DTYPES[first.dtype]
    names = _named_tensors(base, settings)
    _require_known(base, names)
    # Planned as a whole first: the header lists all tensors, and the disk must have room.
    factors = rotary_factors(settings)
    shapes = {name: values.shape for name, values in factors.items()}
    shapes |= {name: tensor.shape for name, tensor in names.items()}
    planned = planned_tensors(shapes, numbers, settings)
    prompting = prompting_of(result, base)
    # A style that is known by name has no template: the file gets none.
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
            puts_bos=prompting.puts_bos(base.tokenizer),
        ),
    }
    check_space(out, file_bytes(planned))
    ours: dict[str, list[str]] = {}
    for name, named in names.items():
        ours.setdefault(named.theirs, []).append(name)
    stored = full_weights(result, base)
    if not isinstance(base.architecture, TransformersArchitecture):
        # By Hugging Face's names and rules first; from those llama.cpp's follow.
        stored = storage_of(base.architecture, "hf").written(stored)
    file = f"model-{numbers}.gguf"
    importance = None
    if options.imatrix is not None:
        run = find_result(options.imatrix)
        importance = measured_importance(result, run, names, options.checkpoint_dir, progress)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, values in factors.items():
            yield name, torch.from_numpy(values)
        for theirs, tensor in stored:
            if base.architecture.is_beside(theirs):
                continue  # such as a trained projector
            for name in ours[theirs]:
                yield name, _as_llama_cpp(tensor, names[name].rule, settings)

    with output_directory(out, overwrite=options.overwrite) as partial:
        write_file(
            partial / file,
            FAMILIES[family].architecture,
            metadata,
            planned,
            tensors(),
            progress,
            importance,
        )
        if importance is not None:
            importance.write(partial / IMPORTANCE_FILE, FAMILIES[family].architecture)
        text = modelfile(file, base, prompting)
        (partial / MODELFILE).write_text(text, encoding="utf-8")
        beside = {**dict(licences(base)), **card_files(result, result.directory, "gguf")}
        for name, content in beside.items():
            (partial / name).write_bytes(content)
    return GgufFile(out / file, _whole(base) is not None)


def _settings_for_gguf(base: BaseModel) -> dict[str, Any]:
    """All settings of a model that a GGUF file is written of."""
    whole = _whole(base)
    known = (
        dict(base.settings) or base.architecture.settings_in("hf")
        if whole is None
        else whole.config.to_dict()
    )
    if known is None:
        raise UserError(
            f"{base.name} is not described by a config.json, from which GGUF files are written. "
            "Copy config.json of the original model into its directory."
        )
    # The number of rows that is written, whatever config.json says.
    rows = parameter_shapes(base)[base.architecture.embedding][0]
    return complete_settings(
        known | {"vocab_size": rows, "tie_word_embeddings": base.tied},
        base.name,
        is_part=whole is not None,
    )


def _whole(base: BaseModel) -> TransformersArchitecture | None:
    """The architecture of a model that has its language model as a part; None: it is one."""
    found = base.architecture
    return found if isinstance(found, TransformersArchitecture) and found.is_part else None


def _named_tensors(base: BaseModel, settings: Mapping[str, Any]) -> dict[str, NamedTensor]:
    """As `named_tensors`, with our names of a language model that is a part."""
    found = named_tensors(settings)
    if (whole := _whole(base)) is None:
        return found
    prefix = f"{whole.language_name}."
    return {
        ours: named._replace(theirs=re.sub(r"^model\.", prefix, named.theirs))
        for ours, named in found.items()
    }


def _require_known(base: BaseModel, names: Mapping[str, NamedTensor]) -> None:
    """Refuse a model whose parameters are not those of its family's table."""
    architecture = base.architecture
    # LitGPT's are fused otherwise, and known to be dense.
    if not isinstance(architecture, TransformersArchitecture):
        return
    known = {named.theirs for named in names.values()}
    for name in parameter_shapes(base):
        if name not in known and not architecture.is_beside(name):
            raise UserError(
                f"{base.name} holds {name}, which GGUF files of its family are not written of. "
                "Try --format hf, and llama.cpp's own convert_hf_to_gguf.py."
            )


def _as_llama_cpp(tensor: Tensor, rule: Rule, settings: Mapping[str, Any]) -> Tensor:
    """Convert a tensor of Hugging Face, whose rows are outputs, to llama.cpp's convention."""
    match rule:
        case "pairs":
            return _pairs_beside_each_other(tensor, settings["head_dim"])
        case "plus one":
            return tensor.float() + 1  # its norms multiply by one more than their weight
        case "first half" | "second half":
            return tensor.chunk(2, dim=-2)[rule == "second half"]
        case "first columns" | "second columns":
            return tensor.chunk(2, dim=-1)[rule == "second columns"].transpose(-1, -2)
        case "even" | "odd":
            own = tensor[..., int(rule == "odd") :: 2]
            return own.transpose(-1, -2) if own.ndim == 3 else own  # but not a bias
        case "transposed":
            return tensor.transpose(-1, -2)
        case "tiled":
            return _tiled(tensor, settings)
        case "tiled columns":
            return _tiled(tensor.T, settings).T
        case "decay":
            return -_tiled(tensor.float(), settings).exp()
        case _:
            return tensor


def _pairs_beside_each_other(tensor: Tensor, head_size: int) -> Tensor:
    """Reorder rows of rotated heads from two halves, as in Hugging Face, to neighbouring pairs."""
    halves = tensor.reshape(-1, 2, head_size // 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape)


def _tiled(tensor: Tensor, settings: Mapping[str, Any]) -> Tensor:
    """Reorder value heads of a linear attention, which are the last rows, for llama.cpp.

    Where several of them share a key, Hugging Face has those of a key beside each other, and
    llama.cpp repeats all keys.
    """
    heads, keys = settings["linear_num_value_heads"], settings["linear_num_key_heads"]
    rows = tensor.shape[0]
    size = settings["linear_value_head_dim"] if rows > heads else 1  # or one number of each head
    columns = tensor.reshape(rows, -1)  # a convolution has one of 1 between
    others, values = columns.split([rows - heads * size, heads * size])
    values = values.unflatten(0, (keys, heads // keys, size)).transpose(0, 1).flatten(0, 2)
    tiled = torch.cat([others, values])
    return tiled.flatten() if tensor.ndim == 1 else tiled


def _described(result: Result, base: BaseModel) -> GgufMetadata:
    from gguf import size_label

    is_beside = base.architecture.is_beside
    total = sum(s.numel() for name, s in parameter_shapes(base).items() if not is_beside(name))
    return {
        "general.type": "model",
        "general.name": Path(result.name).name or base.name,
        "general.quantization_version": QUANTIZATION_VERSION,
        "general.size_label": size_label(total, total, 0, 0),
    }


_PREFIX = "base_model.model."
"""Prefix of PEFT's names."""
_MATRICES = {"lora_A.weight": "lora_a", "lora_B.weight": "lora_b"}


def write_gguf_adapter(result: Result, options: ExportOptions, progress: OnProgress) -> GgufFile:
    """Write an adapter.

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
    if options.quantization in MIXTURES:
        raise UserError(
            f"--quantization is {options.quantization}, but matrices of an adapter are too narrow "
            "for its blocks. Try --quantization q8_0."
        )
    # Before the base model is looked for, which may be a download.
    _check_kind(result, keys)
    base = open_result(result, options.checkpoint_dir, "--checkpoint_dir")
    settings = _settings_for_gguf(base)
    tensors_of_base = _named_tensors(base, settings)
    theirs = {named.theirs.removesuffix(".weight"): ours for ours, named in tensors_of_base.items()}
    stored = stored_adapter(directory)
    first = next(iter(stored.values()))
    numbers = options.quantization or _OF_DTYPES[first.dtype]
    names = {name: _name_in_gguf(name, theirs, result) for name in stored}
    shapes = {names[name]: tuple(tensor.shape) for name, tensor in stored.items()}
    planned = planned_tensors(shapes, numbers, settings)
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
            layer, _, matrix = names[name].rpartition(".")
            rule = tensors_of_base[layer].rule
            # Rows of B are outputs of the layer, columns of A its inputs; the others are ranks.
            if (matrix == "lora_b") != (rule == "tiled columns"):
                tensor = _as_llama_cpp(tensor, rule, settings)
            if matrix == "lora_b":
                factor = factors[name]
                tensor = tensor if factor == 1 else tensor.float() * factor
            yield names[name], tensor

    file = f"adapter-{numbers}.gguf"
    architecture = FAMILIES[settings["model_type"]].architecture
    with output_directory(out, overwrite=options.overwrite) as partial:
        write_file(partial / file, architecture, metadata, planned, tensors(), progress)
        for name, content in card_files(result, base.directory, "gguf").items():
            (partial / name).write_bytes(content)
    return GgufFile(out / file, _whole(base) is not None)


def base_problem(result: Result, checkpoint_dir: str | None) -> str | None:
    """Why the base model of an adapter cannot be written as a GGUF file; None: it can be.

    Args:
        result: an adapter that could be written itself.
        checkpoint_dir: its base model, if it is not where the adapter says.
    """
    base = open_result(result, checkpoint_dir, "--checkpoint_dir")
    files, settings = dict(companions(base)), _settings_for_gguf(base)
    try:
        vocabulary_metadata(
            base.tokenizer,
            files,
            settings,
            name=base.name,
            template=None,
            end_ids=(),
            puts_bos=base.tokenizer.use_bos,
        )
    except UserError as error:
        return str(error)
    return None


def _check_kind(result: Result, keys: Mapping[str, Any]) -> None:
    problem = None
    if (peft := keys.get("peft")) is not None:
        problem = f"is {peft['class_path']}, which llama.cpp does not compute"
    elif keys["lora_variant"] == "dora":
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
            # By PEFT's own rule, because patterns are regular expressions.
            own = patterns.get(get_pattern_key(list(patterns), layer), alpha)
            rank = tensor.shape[1]
            # rsLoRA scales by alpha / sqrt(rank), which is alpha / rank times sqrt(rank).
            root = math.sqrt(rank) if config.get("use_rslora") else 1.0
            found[name] = own / alpha * root
    return found


_ALIGNMENT = 32
"""GGUF's own, where general.alignment is not said."""
_CHUNK_NUMBERS = 2**22
"""Numbers held in memory as float32 at a time, unless a row has more."""
_LARGEST_F16 = 65504.0
QUANTIZATION_VERSION = 2
"""general.quantization_version: of how blocks are packed."""


@dataclass(frozen=True, kw_only=True)
class PlannedTensor:
    """A tensor that a file will hold."""

    shape: tuple[int, ...]
    kind: str
    """A key of `BLOCKS`."""

    @property
    def nbytes(self) -> int:
        """Bytes in the file, without padding."""
        return packed_bytes(self.shape, self.kind)


def planned_tensors(
    shapes: Mapping[str, tuple[int, ...]], numbers: GgufNumbers, settings: Mapping[str, Any]
) -> dict[str, PlannedTensor]:
    """Plan tensors of these shapes, by llama.cpp's names.

    Args:
        shapes: as torch has them.
        numbers: requested number format.
        settings: of the model, from `complete_settings`.
    """
    kinds = kinds_of(shapes, numbers, settings)
    return {name: PlannedTensor(shape=shape, kind=kinds[name]) for name, shape in shapes.items()}


def require_gguf() -> None:
    """Refuse to start without the package that packs numbers.

    Raises:
        UserError: it is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            "--format gguf needs the package gguf. Install it: pip install 'ftkit[gguf]'."
        )


def file_bytes(tensors: Mapping[str, PlannedTensor]) -> int:
    """Bytes of a file's tensors, with the padding between them."""
    return sum(_padded(tensor.nbytes) for tensor in tensors.values())


# Our own code: the package gguf does not convert models. llama.cpp's converter is a script, reads a
# model from a directory alone, and cannot take tensors one by one.
def write_file(
    file: Path,
    architecture: str,
    metadata: GgufMetadata,
    planned: Mapping[str, PlannedTensor],
    tensors: Iterable[tuple[str, Tensor]],
    progress: OnProgress,
    importance: Importance | None = None,
) -> None:
    """Write a GGUF file.

    Args:
        file: its place, in a directory that exists.
        architecture: llama.cpp's name of the family.
        metadata: all but the architecture.
        planned: every tensor, by llama.cpp's name.
        tensors: the same with numbers, in any order.
        progress: receives the number of bytes.
        importance: of the numbers in matrices; None: it was not measured.

    Raises:
        OSError: it cannot be written.
        UserError: a number is not finite, or does not fit its format.
        ValueError: the tensors are not those that were planned.
    """
    # The package gguf writes the header; positions of tensors follow from the planned sizes.
    _write_header(file, architecture, metadata, planned)
    start, starts = _padded(file.stat().st_size), {}
    for name, tensor in planned.items():
        starts[name] = start
        start += _padded(tensor.nbytes)
    total_bytes, done_bytes = sum(tensor.nbytes for tensor in planned.values()), 0
    with file.open("r+b") as out:
        # The full size at once: tensors come in any order, and the padding between them is zeros.
        out.truncate(start)
        for name, values in tensors:
            if name not in starts or tuple(values.shape) != planned[name].shape:
                raise ValueError(f"{name} {list(values.shape)} is twice, unknown or misshapen")
            out.seek(starts.pop(name))
            weights = None if importance is None else importance.of(name)
            for packed in _packed(name, values, planned[name].kind, weights):
                out.write(packed)
                done_bytes += len(packed)
                progress(done_bytes, total_bytes)
    if starts:
        raise ValueError(f"not given: {', '.join(starts)}")


def _write_header(
    file: Path,
    architecture: str,
    metadata: GgufMetadata,
    planned: Mapping[str, PlannedTensor],
) -> None:
    from gguf import GGMLQuantizationType, GGUFWriter

    writer = GGUFWriter(file, architecture)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, tensor in planned.items():
        writer.add_tensor_info(
            name,
            tensor.shape,
            # float32 for every format: of uint8 gguf would take the shape for bytes.
            np.dtype(np.float32),
            tensor.nbytes,
            GGMLQuantizationType[tensor.kind],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()


def _add(writer: Any, key: str, value: Any) -> None:
    match value:
        # Before int: True is an int, too.
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _packed(name: str, values: Tensor, kind: str, importance: np.ndarray | None) -> Iterator[bytes]:
    """Yield the bytes of a tensor, in pieces."""
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    for rows in _row_chunks(values):
        chunk = rows.detach().to(device="cpu", dtype=torch.float32).contiguous().numpy()
        _require_numbers(name, chunk, kind)
        if kind in K_QUANTS:
            yield from pack(chunk.reshape(-1, chunk.shape[-1]), kind, importance)
        else:
            yield quantize(chunk, GGMLQuantizationType[kind]).tobytes()


def _row_chunks(values: Tensor) -> Iterator[Tensor]:
    # Whole rows, because blocks are packed along them.
    rows = max(_CHUNK_NUMBERS // max(values[0].numel(), 1), 1)
    yield from values.split(rows)


def _require_numbers(name: str, values: np.ndarray, kind: str) -> None:
    # NaN and infinity come through the maximum.
    largest = float(np.abs(values).max())
    if not math.isfinite(largest):
        raise UserError(
            f"{name} holds numbers that are not finite. Its training has diverged: use an earlier "
            "checkpoint."
        )
    if kind == "F16" and largest > _LARGEST_F16:
        raise UserError(
            f"{name} holds {largest:.4g}, which f16 cannot hold. Try --quantization bf16."
        )


def _padded(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
