"""`ftkit export`: a result in the layout of Hugging Face, LitGPT, PEFT or torchao, or as GGUF."""

import importlib.util
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from ftkit.errors import UserError
from ftkit.evaluation.loading import full_weights, open_result, with_extra_weights
from ftkit.evaluation.prompting import prompting_of
from ftkit.evaluation.result import Result, require_answers
from ftkit.extensions.publish.commands import ExportOptions
from ftkit.extensions.publish.gguf.mixture import MIXTURES
from ftkit.extensions.publish.gguf.model import base_problem, write_gguf_adapter, write_gguf_model
from ftkit.extensions.publish.gguf.modelfile import MODELFILE
from ftkit.extensions.publish.model_card import CardKind, card_files
from ftkit.extensions.torchao.keys import RoundingKeys
from ftkit.models.lora.serving import DEFAULT_RANK, VLLM_VERSION, serving_notice, serving_rank
from ftkit.models.pretrained.base_model import BaseModel, open_base, parameter_shapes
from ftkit.models.pretrained.model_files import CARD, TOKENIZER_FILES
from ftkit.models.pretrained.places import find_or_download
from ftkit.models.pretrained.save import save_hf, save_in_own_layout
from ftkit.models.pretrained.tokenizer import GENERATION
from ftkit.recipe.implementations import HF, layout_in
from ftkit.recipe.peft_adapter import adapter_keys, peft_settings
from ftkit.recipe.peft_names import CONFIG, OLD_WEIGHTS, WEIGHTS
from ftkit.recipe.recipe_sections import keys_of
from ftkit.utils.console.display import Display
from ftkit.utils.console.formatting import bytes_text
from ftkit.utils.imports import silence_libraries
from ftkit.utils.output_files import as_written, check_apart, check_space, output_directory
from ftkit.utils.process import cleaning_up_on_signals
from ftkit.utils.progress import OnProgress, gives_advice, print_next, print_shown


def export(result: Result, options: ExportOptions) -> int:
    """Write a result for another program; return the exit code.

    Args:
        result: a full fine-tune, a checkpoint, a model, or, for PEFT and llama.cpp, an adapter.
        options: for which program, and where to.

    Raises:
        UserError: it is nothing that the program takes, or there is no room.
    """
    if options.check is not None:
        return _check(result)
    out, is_adapter = options.directory, result.kind == "adapter"
    # One command makes models of adapters, ftkit merge: it says into which base weights.
    if is_adapter and options.format not in ("peft", "gguf"):
        to_litgpt = f", then ftkit export {out} --format litgpt" * (options.format == "litgpt")
        raise UserError(
            f"{result.name} is an adapter, but --format {options.format} is for whole models. "
            f"Try ftkit merge {result.name} --out {out}{to_litgpt}."
        )
    if not is_adapter and options.format == "peft":
        raise UserError(
            f"{result.name} is a whole model, but PEFT's layout is for adapters. Try --format hf."
        )
    if options.format == "torchao":
        _require_rounded(result)
        silence_libraries()
    if options.format in ("gguf", "litgpt"):
        require_answers(result, f"--format {options.format}")
    check_apart(out, result.directory)
    with (
        cleaning_up_on_signals(),
        Display(None, stream=sys.stderr) as display,
        display.phase(f"writing {out}", brief=True) as phase,
    ):
        if options.format == "gguf":
            silence_libraries()
            write = write_gguf_adapter if is_adapter else write_gguf_model
            written = write(result, options, phase.advance)
        elif is_adapter:
            _copy_adapter(result.directory, out, overwrite=options.overwrite)
        else:
            _write_model(result, options, phase.advance)
    size_bytes = sum(path.stat().st_size for path in out.iterdir())
    print_shown(f"{out} is ready for {options.format}: {bytes_text(size_bytes)}")
    if options.format == "torchao":
        if gives_advice():
            print_shown(f"transformers: AutoModelForCausalLM.from_pretrained({str(out)!r})")
    elif options.format != "gguf":
        print_next(f"ftkit {'evaluate' if result.scores else 'chat'} {shlex.quote(str(out))}")
    elif gives_advice():
        print_shown(
            _beside_base(written.path, result, options.checkpoint_dir)
            if is_adapter
            else _next(written.path, result, options)
        )
        if written.is_part:
            print_shown(
                "mmproj:    what sees or hears is not in this file; llama.cpp's "
                "convert_hf_to_gguf.py --mmproj writes it, of models that it knows"
            )
    return 0


def _require_rounded(result: Result) -> None:
    """Refuse a model that was not trained to be rounded, or where torchao is not installed."""
    if result.rounding is None:
        raise UserError(
            "--format torchao writes the weights as quantisation-aware training has rounded them, "
            f"but {result.name} was trained without it. Try --format hf, or train with "
            "--qat.weights int4."
        )
    if importlib.util.find_spec("torchao") is None:
        raise UserError(
            "--format is torchao, but torchao is not installed. Try pip install 'ftkit[torchao]'."
        )


def _check(result: Result) -> int:
    """Print whether vLLM can serve a result; return the exit code."""
    if result.kind == "checkpoint":
        raise UserError(
            f"{result.name} is a checkpoint of a full fine-tune, in shards that only ftkit reads. "
            f"Try ftkit export {result.name} --format hf --out out/hf, and serve that."
        )
    print_shown(f"rules of vLLM {VLLM_VERSION}")
    if result.kind == "model":
        # vLLM reads Hugging Face's layout alone.
        if layout_in(result.directory) != HF:
            print_shown(
                f"no   {result.directory} is in LitGPT's layout. Try ftkit export --format hf."
            )
            return 1
        print_shown(f"yes  vllm serve {result.directory}\n     if it knows models of this family")
        return 0
    if (notice := serving_notice(peft_settings(result.directory))) is not None:
        print_shown(f"no   {notice}\n     ftkit merge {result.name} --out out/merged")
        return 1
    rank = serving_rank(peft_settings(result.directory))
    limit = f" --max-lora-rank {rank}" * (rank != DEFAULT_RANK)
    base = str(result.base)
    # A name that only ftkit resolves: vLLM gets the directory.
    if base.startswith("embedded:"):
        base = str(find_or_download(base))
    if Path(base).is_relative_to(Path.cwd()):
        base = str(Path(base).relative_to(Path.cwd()))
    print_shown(
        f"yes  vllm serve {base} --enable-lora{limit} "
        f"--lora-modules mine={result.directory}\n     if vLLM supports LoRA for this model family"
    )
    return 0


def _beside_base(file: Path, result: Result, checkpoint_dir: str | None) -> str:
    """Commands that write the base model of an adapter as a GGUF file, and read both."""
    if (problem := base_problem(result, checkpoint_dir)) is not None:
        return f"its base:  {problem}\nllama.cpp: llama-cli -m BASE.gguf --lora {file}"
    directory, base = file.parent.with_name("base-gguf"), str(checkpoint_dir or result.base)
    return (
        f"its base:  ftkit export {shlex.quote(base)} --format gguf --quantization f16 "
        f"--out {directory}\n"
        f"llama.cpp: llama-cli -m {directory / 'model-f16.gguf'} --lora {file}"
    )


def _next(file: Path, result: Result, options: ExportOptions) -> str:
    """Commands that use the GGUF file of a model, and one that writes a smaller one."""
    numbers = file.stem.partition("-")[2]
    own, name = file.with_name(MODELFILE), _ollama_name(result.name)
    has_template = "\nTEMPLATE " in own.read_text(encoding="utf-8")
    lines = [
        f"llama.cpp: llama-cli -m {shlex.quote(str(file))}",
        f"Ollama:    ollama create {name} -f {shlex.quote(str(own))} && ollama run {name}",
    ]
    if not has_template:
        lines.append("           (it may need a TEMPLATE first: see the comment in it)")
    if numbers not in MIXTURES:
        base = options.checkpoint_dir
        words = [result.name, "--format", "gguf", "--quantization", "q4_k_m"]
        words += [] if base is None else ["--checkpoint_dir", base]
        words += ["--out", str(file.parent.with_name(f"{file.parent.name}-q4_k_m"))]
        lines.append(f"smaller:   ftkit export {shlex.join(words)}")
    return "\n".join(lines)


def _ollama_name(name: str) -> str:
    """Name of a result as Ollama takes names: small letters, digits and some signs."""
    return re.sub(r"[^a-z0-9._-]+", "-", Path(name).name.lower()).strip("-._") or "mine"


def _opened(result: Result, options: ExportOptions) -> BaseModel:
    """Open a result, as a model of LitGPT for its layout if LitGPT's code can compute it whole."""
    if options.format == "litgpt" and result.kind == "model":
        with suppress(UserError):
            found = open_base(str(result.directory), "litgpt")
            if found.architecture.window is None:
                return found
    return open_result(result, options.checkpoint_dir, "--checkpoint_dir")


def _write_model(result: Result, options: ExportOptions, progress: OnProgress) -> None:
    out = options.directory
    # A model with more than its language part (vision, MTP) is written whole, with the base model's
    # tensors for the rest.
    base = with_extra_weights(
        _opened(result, options),
        result,
        options.checkpoint_dir,
        "--checkpoint_dir",
    )
    dtype: torch.dtype | None = None if options.dtype is None else getattr(torch, options.dtype)
    shapes = parameter_shapes(base)
    # The first tensor stands for all of them: its number format is for the size alone.
    _, first = next(full_weights(result, base))
    numbers = sum(shape.numel() for shape in shapes.values())
    written_bytes = numbers * (dtype or first.dtype).itemsize + base.extra_weights_bytes
    packing = None
    if options.format == "torchao":
        from ftkit.extensions.publish.torchao_model import TorchaoWeights  # takes a second

        assert result.recipe is not None
        qat = keys_of(result.recipe, RoundingKeys).qat
        packing = TorchaoWeights(base, qat, dtype or first.dtype)
        # It converts what it writes, once it is rounded.
        written_bytes, dtype = packing.bytes, None
    check_space(out, written_bytes)
    tensors = _converted(full_weights(result, base), dtype, len(shapes), progress)
    kind: CardKind = "litgpt" if options.format == "litgpt" else "hf"
    others = {
        **prompting_of(result, base).files(base),
        **card_files(result, result.directory, kind),
    }
    if kind == "hf":
        save_hf(
            base,
            tensors,
            out,
            max_shard_bytes=options.max_shard_bytes,
            overwrite=options.overwrite,
            others=others,
            packing=packing,
        )
    else:
        save_in_own_layout(
            base, tensors, out, layout="litgpt", overwrite=options.overwrite, others=others
        )


def _converted(
    tensors: Iterator[tuple[str, Tensor]],
    dtype: torch.dtype | None,
    count: int,
    progress: OnProgress,
) -> Iterator[tuple[str, Tensor]]:
    for done, (name, tensor) in enumerate(tensors, start=1):
        yield name, tensor if dtype is None else as_written(name, tensor, dtype)
        progress(done, count)


def _copy_adapter(directory: Path, out: Path, *, overwrite: bool) -> None:
    """Copy an adapter, which has PEFT's layout already, with its tokenizer, and no other files."""
    adapter_keys(directory)  # refuses what is none
    names = (CONFIG, WEIGHTS, OLD_WEIGHTS, GENERATION, CARD, *TOKENIZER_FILES)
    files = [directory / name for name in names]
    found = [file for file in files if file.is_file()]
    check_space(out, sum(file.stat().st_size for file in found))
    with output_directory(out, overwrite=overwrite) as partial:
        for file in found:
            shutil.copyfile(file, partial / file.name)
