"""Options of the commands that use a result: each declared once, with its help and its rule."""

import typing
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from ftkit.config.parsing import SPELLINGS, Override, accepted_types, describe
from ftkit.config.recipe import Precision, Quantization
from ftkit.errors import UserError
from ftkit.utils.nearest import nearest
from ftkit.utils.units import SIZE_UNITS, parse_size

Format = Literal["table", "json"]
Storage = Quantization | Literal["none"]
Dtype = Literal["float32", "bfloat16", "float16"]

_Options = TypeVar("_Options")

_MODEL_FILES = ("config.json", "model_config.yaml", "adapter_config.json")
"""What tells a model or an adapter."""


def option(
    default: Any,
    text: str,
    *,
    example: object,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """A field of a class of options.

    Args:
        default: if it is not given; of a switch, False.
        text: its help.
        example: a value that works.
        least: smallest value allowed.
        most: largest value allowed.
    """
    metadata = {"help": text, "example": example, "least": least, "most": most}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class UseOptions:
    """How a result computes."""

    base: str | None = option(
        None,
        "Where the base model is. Default: where the run had it.",
        example="TinyLlama/TinyLlama_v1.1",
    )
    quantize: Storage | None = option(
        None,
        "How the weights of the base model are stored; none: as numbers. Default: as in the run.",
        example="bnb.nf4",
    )
    precision: Precision | None = option(
        None,
        "Number format. Default: that of the run; without one, 16 bits on GPUs and 32 on CPUs.",
        example="bf16-true",
    )
    accelerator: Literal["auto", "cpu", "cuda"] = option(
        "auto", "Device kind. Default: cuda where there is one, else cpu.", example="cpu"
    )


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(UseOptions):
    """How answers are made."""

    max_new_tokens: int = option(256, "Longest answer, in tokens.", example=256, least=1)
    temperature: float = option(
        0.0, "0 takes the most likely token; higher values draw more freely.", example=0.8, least=0
    )
    top_k: int | None = option(
        None, "Draw among this many of the most likely tokens.", example=50, least=1
    )
    top_p: float = option(
        1.0,
        "Draw among the most likely tokens that together have this probability.",
        example=0.95,
        least=0,
        most=1,
    )
    seed: int = option(
        1337, "Of the drawing: the same seed gives the same answer.", example=1337, least=0
    )
    prompt_style: str | None = option(
        None,
        "How an instruction becomes a prompt, such as alpaca. Default: as in the run; without "
        "one, what LitGPT knows for models of this name.",
        example="alpaca",
    )
    raw: bool = option(False, "Give the text to the model as it is.", example=True)

    def __post_init__(self) -> None:
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            key, value = ("top_k", self.top_k) if self.top_k is not None else ("top_p", self.top_p)
            raise UserError(
                f"--{key} is {value}, but temperature 0 takes the most likely token alone. "
                "Try --temperature 0.8 with it."
            )
        if self.raw and self.prompt_style is not None:
            raise UserError("--raw and --prompt_style exclude each other. Leave one of them out.")
        if self.seed >= 2**63:
            raise UserError(f"--seed is {self.seed}, but must be below 2**63. Try --seed 1337.")


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(AnswerOptions):
    """Of ftkit generate."""

    prompt: str | None = option(None, "What to ask.", example="'Who is Lena?'")
    input: str | None = option(
        None, "Material that the prompt is about, for styles that have a place for it.", example="x"
    )
    prompts: Path | None = option(
        None,
        "What to ask, many times: a text file with a prompt per line, or .jsonl or .json with "
        "records of instruction and, if needed, input.",
        example="prompts.txt",
    )
    out: Path | None = option(
        None, "Write the answers to this file, a record per line.", example="answers.jsonl"
    )
    overwrite: bool = option(False, "Replace the file of --out.", example=True)
    compare_base: bool = option(
        False, "Show the answer of the base model beside that of the result.", example=True
    )
    format: Format = option(
        "table", "json: nothing else is written to standard output.", example="json"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.prompt is None) == (self.prompts is None):
            what = "is missing" if self.prompt is None else "and --prompts exclude each other"
            raise UserError(
                f"--prompt {what}: what to ask? "
                "Try --prompt 'Tell me a story.', or --prompts FILE alone."
            )
        if self.prompts is not None and not self.prompts.expanduser().is_file():
            raise UserError(f"--prompts {self.prompts} is not a file. Name one with prompts.")
        if self.input is not None and (self.raw or self.prompts is not None):
            other = "raw" if self.raw else "prompts"
            raise UserError(
                f"--input is for a single prompt in a prompt style. Leave out --input or --{other}."
            )
        if self.out is not None:
            out = self.out.expanduser()
            if not out.parent.is_dir():
                raise UserError(f"--out {out}: there is no directory {out.parent}. Make it first.")
            if out.exists() and not self.overwrite:
                raise UserError(f"--out {out} exists. Try another name, or --overwrite.")


@dataclass(frozen=True, kw_only=True)
class ChatOptions(AnswerOptions):
    """Of ftkit chat."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(UseOptions):
    """Of ftkit evaluate; --data and its keys come beside."""

    micro_batch_size: int | None = option(
        None,
        "Sequences per forward pass. Changes time and memory alone. Default: as in the run.",
        example=4,
        least=1,
    )
    max_iters: int | None = option(
        None,
        "Validate on at most this many batches of train.global_batch_size of the run. Default: "
        "as in the run.",
        example=100,
        least=1,
    )
    exact_match: int | None = option(
        None,
        "Answer this many records greedily and count how many answers are exactly the expected "
        "ones. Default: as in the run, or 100; 0: none.",
        example=100,
        least=0,
    )
    format: Format = option(
        "table", "json: nothing else is written to standard output.", example="json"
    )


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Of commands that write a model or an adapter."""

    out: Path | None = option(None, "Directory to write.", example="out/merged")
    overwrite: bool = option(
        False, "Replace the model or adapter in --out, once the new one is complete.", example=True
    )
    dtype: Dtype | None = option(
        None, "Number format of the weights. Default: as they are stored.", example="bfloat16"
    )
    max_shard_size: str = option(
        "5GB", "Largest file of weights in Hugging Face's layout.", example="5GB"
    )

    @property
    def directory(self) -> Path:
        """Where to write."""
        assert self.out is not None
        return self.out.expanduser()

    @property
    def max_shard_bytes(self) -> int:
        """Largest file of weights."""
        bytes_ = parse_size(self.max_shard_size)
        if not bytes_:
            raise UserError(
                f"--max_shard_size is {self.max_shard_size!r}, but must be a number with "
                f"{', '.join(SIZE_UNITS)}. Try --max_shard_size 5GB."
            )
        return bytes_

    def __post_init__(self) -> None:
        assert self.max_shard_bytes
        if self.out is None:
            raise UserError("--out is missing: where to write? Try --out out/merged.")
        out = self.directory
        if not out.exists() or (out.is_dir() and not any(out.iterdir())):
            return
        if not out.is_dir():
            raise UserError(f"--out {out} is a file. Try the name of a directory.")
        if not self.overwrite:
            raise UserError(f"--out {out} exists. Try another name, or --overwrite.")
        is_model = any((out / name).is_file() for name in _MODEL_FILES)
        if not is_model or any(path.is_dir() for path in out.iterdir()):
            raise UserError(
                f"--out {out} holds more than a model or an adapter, so --overwrite does not "
                "replace it. Try another name, or remove it yourself."
            )


@dataclass(frozen=True, kw_only=True)
class MergeOptions(OutputOptions):
    """Of ftkit merge."""

    base: Literal["quantized", "original"] | None = option(
        None,
        "Of QLoRA: add what was learned to the quantised weights as training saw them, turned "
        "back into numbers; or to the original ones. Default: quantized.",
        example="original",
    )
    checkpoint_dir: str | None = option(
        None,
        "Where the base model is. Default: where the run had it.",
        example="TinyLlama/TinyLlama_v1.1",
    )


@dataclass(frozen=True, kw_only=True)
class ExportOptions(OutputOptions):
    """Of ftkit export."""

    format: Literal["hf", "litgpt", "peft"] | None = option(
        None,
        "hf: Hugging Face's layout; litgpt: LitGPT's; peft: the adapter of a LoRA run.",
        example="hf",
    )

    def __post_init__(self) -> None:
        if self.format is None:
            raise UserError(
                "--format is missing: for which program? Try --format hf, litgpt or peft."
            )
        if self.format == "peft" and self.dtype is not None:
            raise UserError(
                "--dtype: an adapter is exported as it is. Leave it out, or try --format hf."
            )
        super().__post_init__()


def read_options(
    command: str, kind: type[_Options], values: Sequence[Override], switches: Sequence[str]
) -> _Options:
    """Typed options from a command line.

    Args:
        command: for messages.
        kind: the class of its options.
        values: options with a value, in their order; the last one counts.
        switches: options without one.

    Raises:
        UserError: an unknown option, or a value that it does not take.
    """
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]  # a dataclass
    given: dict[str, Any] = {}
    for key in (*switches, *(key for key, _ in values)):
        if key not in known:
            close = nearest(key, known)
            hint = f"Did you mean --{close}?" if close else f"See ftkit {command} --help."
            raise UserError(f"--{key} is not an option of ftkit {command}. {hint}")
    given |= dict.fromkeys(switches, True)
    for key, text in values:
        given[key] = _typed(key, text, known[key].type, known[key].metadata)
    return kind(**given)


def choices(kind: Any) -> list[str]:
    """The words that an option of this type takes; [] if it takes any."""
    found = []
    for accepted in accepted_types(kind):
        if typing.get_origin(accepted) is Literal:
            found += [str(choice) for choice in typing.get_args(accepted)]
    return found


def _typed(key: str, text: str, kind: Any, rule: typing.Mapping[str, Any]) -> Any:
    text = SPELLINGS.get(key, {}).get(text, text)
    words = choices(kind)
    (accepted, *_) = accepted_types(kind)
    least, most = rule["least"], rule["most"]
    try:
        if words:
            if text not in words:
                raise ValueError
            return text
        value = accepted(text)
        if isinstance(value, int | float) and not (
            (least is None or value >= least) and (most is None or value <= most)
        ):
            raise ValueError
    except ValueError:
        expected = f"one of: {', '.join(words)}" if words else describe(kind)
        if most is not None:
            expected += f" between {least} and {most}"
        elif least is not None:
            expected += f" of at least {least}"
        example = nearest(text, words) or rule["example"]
        raise UserError(
            f"--{key} is {text!r}, but must be {expected}. Try --{key} {example}."
        ) from None
    return value
