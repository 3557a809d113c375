"""Commands of the extension, with their options."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ftkit.cli.command import FIND_RESULT, Command
from ftkit.errors import UserError
from ftkit.recipe.options import OutputFormat, ResultOptions, option, word
from ftkit.utils.console.formatting import SIZE_UNITS, parse_size

Dtype = Literal["float32", "bfloat16", "float16"]
GgufNumbers = Literal["f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m"]

K_QUANT_FILES: tuple[GgufNumbers, ...] = ("q4_k_m", "q5_k_m", "q6_k")
"""Number formats whose matrices are mostly K-quants."""

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_GGUF_FILES = tuple(f"{k}-{n}.gguf" for k in ("model", "adapter") for n in get_args(GgufNumbers))
_MODEL_FILES = ("config.json", "model_config.yaml", "adapter_config.json", *_GGUF_FILES)
"""Files by which a model or an adapter is recognised."""


@dataclass(frozen=True, kw_only=True)
class OutputOptions(ResultOptions):
    """Options of commands that write a model or an adapter."""

    out: Path | None = option(ask="where to write?", example="out/merged")
    """Output directory."""
    overwrite: bool = False
    """Replace the model or adapter in --out, once the new one is complete."""
    dtype: Dtype | None = option(None, example="bfloat16")
    """Number format of the weights. Default: as stored."""
    max_shard_size: str = "5GB"
    """Size of the largest weight file in the Hugging Face layout."""

    @property
    def directory(self) -> Path:
        """Directory to write."""
        assert self.out is not None
        return self.out.expanduser()

    @property
    def max_shard_bytes(self) -> int:
        """Size of the largest file of weights."""
        return _size_bytes(self.max_shard_size)

    def __post_init__(self) -> None:
        _size_bytes(self.max_shard_size)
        out = self.directory
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return
        if not out.is_dir():
            raise UserError(f"--out {out} is a file. Try the name of a directory.")
        if not self.overwrite:
            raise UserError(f"--out {out} exists. Try another name, or --overwrite.")
        # A wrong path must not delete other files: only what looks like a model is replaced.
        is_model = any((out / name).is_file() for name in _MODEL_FILES)
        if not is_model or any(path.is_dir() for path in out.iterdir()):
            raise UserError(
                f"--out {out} holds more than a model or an adapter, so --overwrite does not "
                "replace it. Try another name, or remove it yourself."
            )


@dataclass(frozen=True, kw_only=True)
class MergeOptions(OutputOptions):
    """Options of ftkit merge."""

    base: Literal["quantized", "original"] | None = option(None, example="original")
    """For QLoRA: add the adapter to the dequantized weights that it was trained with, or to the
    original ones. Default: quantized."""
    checkpoint_dir: str | None = None
    """Path of the base model. Default: where the run loaded it from."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions(OutputOptions):
    """Options of ftkit export."""

    out: Path | None = option(None, example="out/exported")
    """Output directory, also for gguf."""
    format: Literal["hf", "litgpt", "peft", "gguf", "torchao"] | None = option(None, example="hf")
    """hf: Hugging Face layout; litgpt: LitGPT layout; peft: the adapter of a LoRA run; gguf: a
    model or an adapter for llama.cpp and Ollama; torchao: Hugging Face layout with the weights as
    quantisation-aware training has rounded them."""
    check: Literal["vllm"] | None = option(None, example="vllm")
    """Write nothing; only check whether vLLM can serve the result as it is and, if not, explain why
    and what to do. The exit code is 1 if it cannot."""
    quantization: GgufNumbers | None = option(None, example="q4_k_m")
    """Number format of the matrices in a GGUF file. q4_k_m is what most people run: some 4.9 bits a
    number, with the matrices that suffer most in six. Default: as stored."""
    imatrix: str | None = option(None, placeholder="RUN", example="out/lora")
    """Run whose training data tell which numbers of a GGUF file matter most: K-quants are packed
    with the least error for such texts. What was measured is written beside the file, in the form
    of llama-imatrix."""
    checkpoint_dir: str | None = None
    """Path of the base model. An exported checkpoint takes from it what was not trained: the parts
    of a vision or audio model beside its language model, or all that train.only and train.freeze
    left out. Default: where the run loaded it from."""

    def __post_init__(self) -> None:
        if self.check is not None:
            given = {"format": self.format, "out": self.out, "dtype": self.dtype}
            for name, value in given.items():
                if value is not None:
                    raise UserError(
                        f"--{name} is {value}, but --check writes nothing. Leave one of them out."
                    )
            return
        if self.format is None:
            raise UserError(
                "--format is missing: for which program? Try --format hf, litgpt, peft, gguf or "
                "torchao."
            )
        if self.out is None:
            raise UserError("--out is missing: where to write? Try --out out/exported.")
        if self.format == "peft" and self.dtype is not None:
            raise UserError(
                "--dtype: an adapter is exported as it is. Leave it out, or try --format hf."
            )
        if self.format == "gguf" and self.dtype is not None:
            raise UserError(
                f"--dtype is {self.dtype}, but GGUF files have number formats of their own. Try "
                "--quantization f16 instead."
            )
        if self.format == "gguf" and self.out.suffix == ".gguf":
            raise UserError(
                f"--out is {self.out}, but it names a directory, for the GGUF file and what goes "
                f"with it. Try --out {self.out.with_suffix('')}."
            )
        if self.format != "gguf" and self.quantization is not None:
            raise UserError(
                f"--quantization is {self.quantization}, but only GGUF files have it. Leave it "
                "out, or try --format gguf."
            )
        if self.imatrix is not None and self.quantization not in K_QUANT_FILES:
            raise UserError(
                f"--imatrix is {self.imatrix}, but only K-quants are packed by importance. Leave "
                "it out, or try --quantization q4_k_m."
            )
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class PushOptions(ResultOptions):
    """Options of ftkit push."""

    repo_id: str = word("REPO_ID", ask="to which repository?")
    """Repository on the hub, such as me/my-model; created if it does not exist."""
    public: bool = False
    """Make the repository public. Default: private."""
    base: str | None = option(None, example="TinyLlama/TinyLlama_v1.1")
    """Repository of the base model that users of the adapter will load. Default: the one that the
    run used."""
    dry_run: bool = False
    """Only list what would be uploaded, and as what. Asks the hub nothing, and needs no token."""
    message: str | None = None
    """Commit message."""
    access_token: str | None = option(None, placeholder="TOKEN")
    """Hugging Face token with write access. Default: $HF_TOKEN, or that of hf auth login."""
    format: OutputFormat = "table"
    """json: print only JSON to standard output."""

    def __post_init__(self) -> None:
        for key, name in {"REPO_ID": self.repo_id, "--base": self.base}.items():
            if name is not None and not _REPOSITORY.fullmatch(name):
                raise UserError(f"{key} is {name}, but must be ORG/NAME. Try me/my-model.")


def _size_bytes(text: str) -> int:
    bytes_ = parse_size(text)
    if not bytes_:
        raise UserError(
            f"--max_shard_size is {text!r}, but must be a number with {', '.join(SIZE_UNITS)}. "
            "Try --max_shard_size 5GB."
        )
    return bytes_


ROWS = (
    Command(
        name="merge",
        summary="merge the adapter of a LoRA run and its base model into a Hugging Face model",
        text="Add the trained LoRA matrices to the weights of the base model, and write a "
        "Hugging Face model. Loads one weight file at a time, not the whole model. Compares "
        "its logits with those of the result on a sample.",
        options=MergeOptions,
        opens=FIND_RESULT,
        function="ftkit.extensions.publish.merge:merge",
        examples=(
            "out/finetune/lora --out out/merged",
            "out/finetune/qlora --out out/merged --base original",
        ),
        elsewhere={"merge_lora": ""},
    ),
    Command(
        name="export",
        summary="write a result for Hugging Face, LitGPT, PEFT or llama.cpp",
        text="Write a full fine-tune, one of its checkpoints or any model for Hugging Face, "
        "LitGPT or llama.cpp (GGUF), or the adapter of a LoRA run or checkpoint for PEFT or "
        "llama.cpp. To write a LoRA run as a model, merge it first.",
        options=ExportOptions,
        opens=FIND_RESULT,
        function="ftkit.extensions.publish.export:export",
        usage=("RESULT --format FORMAT --out DIR [--KEY VALUE ...]", "RESULT --check vllm"),
        examples=(
            "out/finetune/full --format litgpt --out out/for-litgpt",
            "out/finetune/full --format gguf --quantization q4_k_m --out out/gguf",
            "out/full/checkpoints/step-00001500 --format hf --out out/hf",
            "out/lora --format peft --out out/adapter",
            "out/lora --check vllm",
        ),
        elsewhere={
            "convert_from_litgpt": "",
            "serve": "export RESULT --check vllm, which says how vLLM serves a result",
        },
    ),
    Command(
        name="push",
        summary="upload a result with its model card to the Hugging Face hub",
        text="Upload the adapter or model of a run, or the output of merge or export (GGUF "
        "files too), with its model card, in one commit. A new repository is private unless "
        "--public is given. An interrupted upload continues where it stopped. Edit README.md "
        "beside the result, not on the hub: it is uploaded each time.",
        options=PushOptions,
        function="ftkit.extensions.publish.push:push",
        examples=(
            "out/finetune/lora me/my-adapter",
            "out/merged me/my-model --public",
            "out/finetune/lora me/my-adapter --dry_run",
        ),
        elsewhere={"upload": ""},
    ),
)
