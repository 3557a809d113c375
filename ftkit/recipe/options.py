"""Options of every command, with their types, defaults and help.

The class of a command's options says what its command line may hold: words, options, switches, and
whether keys of recipes may stand beside them. The string below a field is its ``--help``.
"""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ftkit.errors import UserError
from ftkit.recipe.own_metric import OwnMetric, own_metrics
from ftkit.recipe.parsing import Override
from ftkit.recipe.readers import READERS, Terms
from ftkit.recipe.recipe import METRICS, AcceleratorKey, Precision, Quantization

OutputFormat = Literal["table", "json"]
Storage = Quantization | Literal["none"]


def option(
    default: Any = dataclasses.MISSING,
    *,
    ask: str = "",
    placeholder: str = "",
    example: object = None,
    least: float | None = None,
    most: float | None = None,
    names: Callable[[], list[str]] | None = None,
    alone: str | None = None,
) -> Any:
    """Declare an option that needs more than a default.

    Args:
        default: its value where it is not given; without one it is required.
        ask: the question in the error where it is missing.
        placeholder: what stands for its value in help; "": derived from its type.
        example: a value that works.
        least: smallest value allowed.
        most: largest value allowed.
        names: gives the words that it takes, where a registry has them.
        alone: its value where none follows it; None: one has to.
    """
    metadata = {
        "ask": ask, "placeholder": placeholder, "example": example, "least": least, "most": most,
        "names": names, "alone": alone,
    }  # fmt: skip
    return field(default=default, metadata=metadata)


def word(
    placeholder: str,
    default: Any = dataclasses.MISSING,
    *,
    ask: str = "",
    takes_url: bool = False,
) -> Any:
    """Declare a word, which stands alone without ``--``; a tuple takes all remaining words.

    Args:
        placeholder: what stands for it in usage and messages.
        default: its value where it is not given; without one it is required.
        ask: the question in the error where it is missing; "": its help is shown.
        takes_url: whether a path may be a URL of object storage.
    """
    metadata = {"word": True, "placeholder": placeholder, "ask": ask, "takes_url": takes_url}
    return field(default=default, metadata=metadata)


def keys_beside(*heads: str) -> Any:
    """Declare the field that takes keys of recipes, with their texts in the order given.

    Args:
        heads: first parts of the keys that are taken; none: all keys.
    """
    return field(default=(), metadata={"keys": heads})


def command_line() -> Any:
    """Declare the field that takes the whole command line as it was typed."""
    return field(default=(), metadata={"line": True})


@dataclass(frozen=True, kw_only=True)
class CommonOptions:
    """Options of all commands but watch."""

    quiet: bool = False
    """Show only errors, warnings and the result: no progress, no notices."""


@dataclass(frozen=True, kw_only=True)
class PluginOptions:
    """Options of commands that use the objective, the optimizer or the data of a recipe."""

    plugin: str | None = option(None, placeholder="FILE.py")
    """Python file of your own, which is executed: it may define objectives, optimizers and data
    sets that recipes name, and callbacks, metrics and loggers, which are used. Cannot be set in a
    recipe."""


@dataclass(frozen=True, kw_only=True)
class ForeignOptions:
    """Options of commands that read files of other programs."""

    without: tuple[str, ...] = option((), placeholder="KEY")
    """Of a file of axolotl, LLaMA-Factory or TRL: accept that ftkit does not do what this key says;
    can be repeated."""
    from_devices: int = option(1, placeholder="N", least=1)
    """Of such a file: the devices, over all machines, that trained with it there. Its batch is that
    of one device, and is multiplied by them."""

    tool: str | None = option(None, placeholder="PROGRAM", names=lambda: READERS.names)
    """Whose file it is. Default: known by its keys; commands of TRL share many of theirs."""

    @property
    def terms(self) -> Terms:
        """All of them, for the reader of recipes."""
        return Terms(without=self.without, devices=self.from_devices, tool=self.tool)


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(ForeignOptions, PluginOptions, CommonOptions):
    """Options of ftkit finetune, finetune_lora and finetune_full."""

    words: tuple[str, ...] = word("RECIPE.yaml", ())
    """Recipes to start from; --config FILE does the same. Later ones override earlier ones, and
    options override all of them. embedded:NAME.yaml is a recipe that comes with ftkit. A word that
    does not end in .yaml is the base model (checkpoint_dir)."""
    config: tuple[str, ...] = option((), placeholder="RECIPE.yaml")
    """The same as RECIPE.yaml without --config; can be repeated. -: standard input."""
    print_config: bool = False
    """Print the resolved recipe and exit."""
    overwrite: bool = False
    """Replace the contents of out_dir. Default: keep them and write to OUT_DIR-2, OUT_DIR-3, ...;
    if out_dir holds a run that can be resumed, stop with an error."""
    force: bool = False
    """Start even if the predicted memory certainly exceeds that of the GPUs or the host."""
    stop_after: str | None = option(None, placeholder="N|DURATION")
    """Save and stop after this many optimizer steps of this command, or after a time such as 90min.
    The learning rate schedule stays that of the whole run; --resume auto continues it."""
    metric: tuple[str, ...] = option((), placeholder="FILE.py:FUNCTION")
    """Before and after training, also score generated answers with your own function, called with
    (answer, expected, record), on as many validation records as eval.exact_match and eval.rouge_l
    use, or 100. Can be repeated."""
    trust_task_code: Path | None = option(None, placeholder="DIR")
    """Allow task files of eval.tasks to run Python code from this directory, without restrictions.
    Cannot be set in a recipe."""
    keys: tuple[Override, ...] = keys_beside()
    """Keys of the recipe."""
    line: tuple[str, ...] = command_line()
    """The command line, for the report."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions(ForeignOptions, PluginOptions, CommonOptions):
    """Options of ftkit plan."""

    words: tuple[str, ...] = word("RECIPE.yaml", ())
    """Recipes and sweeps; each recipe and each run of a sweep is planned on its own. --config FILE
    does the same. embedded:NAME.yaml is a recipe that comes with ftkit. A word that does not end in
    .yaml is the base model (checkpoint_dir). finetune, finetune_lora or finetune_full as the first
    word plans that command; without it, recipes without LoRA keys and without quantize are planned
    as full fine-tuning, all others as LoRA."""
    config: tuple[str, ...] = option((), placeholder="RECIPE.yaml")
    """The same as RECIPE.yaml without --config; can be repeated. -: standard input."""
    gpu: str | None = option(None, placeholder="GPU")
    """Device of each rank: a GPU by name (listed above), a memory size such as 24GiB, or auto for
    the GPU of this machine. Default: the devices that a run on this machine would use, GPUs or else
    the CPU."""
    sweep: tuple[str, ...] = option((), placeholder="KEY=A,B,C")
    """Plan once for each value; can be repeated, for all combinations."""
    fit: bool = False
    """Show the smallest changes that make the run fit, starting with those that cost the least
    speed."""
    format: OutputFormat = "table"
    """json: print only JSON to standard output."""
    keys: tuple[Override, ...] = keys_beside()
    """Keys of all recipes."""


@dataclass(frozen=True, kw_only=True)
class DataOptions(ForeignOptions, PluginOptions, CommonOptions):
    """Options of ftkit data."""

    words: tuple[str, ...] = word("RECIPE.yaml", ())
    """Recipes to start from; --config FILE does the same. Later ones override earlier ones, and
    options override all of them. embedded:NAME.yaml is a recipe that comes with ftkit. A word that
    does not end in .yaml is the base model (checkpoint_dir)."""
    config: tuple[str, ...] = option((), placeholder="RECIPE.yaml")
    """The same as RECIPE.yaml without --config; can be repeated. -: standard input."""
    show: int = option(3, placeholder="N", least=0)
    """Number of training samples to show token by token."""
    format: Literal["text", "html", "json"] = "text"
    """html: a self-contained page. html, json: print only that to standard output."""
    out: Path | None = option(None, placeholder="FILE")
    """Write to this file, replacing it if it exists. Default: standard output."""
    keys: tuple[Override, ...] = keys_beside()
    """Keys of the recipe."""


@dataclass(frozen=True, kw_only=True)
class CheckpointsOptions(CommonOptions):
    """Options of ftkit checkpoints list."""

    out_dir: Path = word("OUT_DIR", takes_url=True)
    """out_dir of the run, or its directory of checkpoints; a path, s3://, gs:// or az://."""
    format: OutputFormat = "table"
    """json: print only JSON to standard output."""


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(CommonOptions):
    """Options of ftkit checkpoints show and verify."""

    out_dir: Path = word("OUT_DIR", takes_url=True)
    """out_dir of the run, its directory of checkpoints, or one checkpoint; a path, s3://, gs:// or
    az://."""
    step: str | None = word("STEP", None)
    """Step of the checkpoint."""
    format: OutputFormat = "table"
    """json: print only JSON to standard output."""


@dataclass(frozen=True, kw_only=True)
class CleanOptions(CommonOptions):
    """Options of ftkit checkpoints clean."""

    out_dir: Path = word("OUT_DIR", takes_url=True)
    """out_dir of the run, or its directory of checkpoints; a path, s3://, gs:// or az://."""
    keep_last: int = option(ask="how many of the newest checkpoints to keep?", example=1, least=1)
    """Number of the newest checkpoints to keep."""
    dry_run: bool = False
    """Only print what would be deleted."""


@dataclass(frozen=True, kw_only=True)
class DiffOptions(CommonOptions):
    """Options of ftkit checkpoints diff."""

    a: Path = word("A", takes_url=True)
    """A checkpoint or a run."""
    b: Path = word("B", takes_url=True)
    """Another checkpoint or run."""
    format: OutputFormat = "table"
    """json: print only JSON to standard output."""


@dataclass(frozen=True, kw_only=True)
class ExtensionsOptions(CommonOptions):
    """Options of ftkit extensions."""

    format: OutputFormat = "table"
    """json: print only JSON to standard output."""


@dataclass(frozen=True, kw_only=True)
class ResultOptions(CommonOptions):
    """Options of a command that uses a result."""

    result: str = word("RESULT")
    """A run (its out_dir), one of its checkpoints, a PEFT adapter, a model directory (Hugging Face
    or LitGPT), the URL (s3://, gs:// or az://) of any of these, a hub name, or
    embedded:quickstart."""


@dataclass(frozen=True, kw_only=True)
class UseOptions:
    """Options of loading a result."""

    base: str | None = None
    """Path of the base model. Default: where the run loaded it from."""
    quantize: Storage | None = None
    """Quantization of the base model; none: not quantized, and not rounded after
    quantisation-aware training. Default: as in the run."""
    precision: Precision | None = option(None, example="bf16-true")
    """Number format. Default: as in the run; without a run, 16 bits on GPUs and 32 on CPUs."""
    accelerator: AcceleratorKey = option("auto", example="cpu")
    """Device type. Default: cuda if there is one, else tpu if torch_tpu is installed and finds one,
    else cpu. Other types of torch.accelerator, such as xpu or mps, are accepted, but ftkit has not
    been tested on them."""


@dataclass(frozen=True, kw_only=True)
class AnswerOptions(UseOptions):
    """Options of generating answers."""

    max_new_tokens: int = option(256, least=1)
    """Longest answer, in tokens."""
    temperature: float = option(0.0, example=0.8, least=0)
    """0 takes the most likely token; higher values sample more freely."""
    top_k: int | None = option(None, example=50, least=1)
    """Sample only from this many of the most likely tokens."""
    top_p: float = option(1.0, example=0.95, least=0, most=1)
    """Sample only from the most likely tokens whose probabilities add up to this."""
    seed: int = option(1337, least=0)
    """Random seed for sampling; the same seed gives the same answer."""
    system: str | None = None
    """System message for conversations without one."""
    chat_template: str | None = None
    """Chat template for prompts: tokenizer (the model's own), a name such as chatml, a file, or a
    jinja text. Default: as in the run; without a run, the model's own, or else the prompt style
    that LitGPT has for models of this name."""
    prompt_style: str | None = None
    """Prompt style of LitGPT, such as alpaca, instead of a chat template."""
    raw: bool = False
    """Use the text as the whole prompt, without a template."""

    def __post_init__(self) -> None:
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            key, value = ("top_k", self.top_k) if self.top_k is not None else ("top_p", self.top_p)
            raise UserError(
                f"--{key} is {value}, but temperature 0 always takes the most likely token. Try "
                "--temperature 0.8 with it."
            )
        self._check_prompting()
        _check_text("system", self.system)
        if self.seed >= 2**63:
            raise UserError(f"--seed is {self.seed}, but must be below 2**63. Try --seed 1337.")

    def _check_prompting(self) -> None:
        given = {
            "raw": self.raw,
            "prompt_style": self.prompt_style is not None,
            "chat_template": self.chat_template is not None,
        }
        named = [f"--{key}" for key, is_given in given.items() if is_given]
        if self.raw and self.system is not None:
            named.append("--system")
        if len(named) > 1:
            raise UserError(f"{named[0]} and {named[1]} exclude each other. Leave one of them out.")


def _check_text(key: str, value: str | None) -> None:
    """Refuse bytes of a command line that are not text: no tokenizer takes them."""
    try:
        (value or "").encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"--{key} is not text in {sys.getfilesystemencoding()}: character {error.start + 1} is "
            f"{(value or '')[error.start]!a}. Convert it, as iconv does."
        ) from None


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(AnswerOptions, ResultOptions):
    """Options of ftkit generate."""

    prompt: str | None = None
    """The prompt."""
    input: str | None = None
    """Input of the instruction, for prompt styles that use one."""
    image: tuple[str, ...] = option((), placeholder="FILE")
    """Images before the prompt, for models that see; may be given several times."""
    prompts: Path | None = None
    """File of prompts: one per line (.txt), or records of any format that data supports (.jsonl,
    .json, .csv, .parquet); the last turn of a conversation is answered."""
    out: Path | None = None
    """Write the answers to this file, one record per line."""
    overwrite: bool = False
    """Replace the file given by --out."""
    compare_base: bool = False
    """Also show the answer of the base model."""
    format: OutputFormat = "table"
    """json: print only JSON to standard output."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_text("prompt", self.prompt)
        _check_text("input", self.input)
        if (self.prompt is None) == (self.prompts is None):
            what = "is missing" if self.prompt is None else "and --prompts exclude each other"
            raise UserError(
                f"--prompt {what}: what should be answered? Try --prompt 'Tell me a story.', or "
                "--prompts FILE without --prompt."
            )
        if self.prompts is not None and not self.prompts.expanduser().is_file():
            raise UserError(f"--prompts {self.prompts} is not a file. Name one with prompts.")
        if self.image and (self.raw or self.prompts is not None or self.input is not None):
            other = "raw" if self.raw else "input" if self.input is not None else "prompts"
            raise UserError(
                "--image is for a single prompt in a chat template. Leave out --image or "
                f"--{other}."
            )
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
class ChatOptions(AnswerOptions, ResultOptions):
    """Options of ftkit chat."""

    format: Literal["text", "json"] = "text"
    """json: for programs; each input line is {"prompt": TEXT}, perhaps with "images": [FILE], each
    answer one line of JSON."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(PluginOptions, UseOptions, ResultOptions):
    """Options of ftkit evaluate."""

    data: tuple[Override, ...] = keys_beside("data")
    """Data to use instead of those of the run; options as --data.NAME VALUE, such as --data.path
    FILE."""
    sets: str | None = option(None, placeholder="{NAME:FILE,...}")
    """Further validation sets by name, as eval.sets in recipes; null: none. Default: as in the run,
    unless --data is given."""
    reference: str | None = option(None, placeholder="PATH")
    """The model that a preference result is compared with, if it is not where the run had it."""
    micro_batch_size: int | None = option(None, example=4, least=1)
    """Sequences per forward pass. Affects only time and memory. Default: as in the run."""
    max_iters: int | None = option(None, example=100, least=1)
    """Validate on at most this many batches, of the run's train.global_batch_size. Default: as in
    the run."""
    exact_match: int | None = option(None, example=100, least=0)
    """Generate greedy answers to this many records and count how many equal the expected text.
    Default: as in the run, or 100; 0: none."""
    rouge_l: int | None = option(None, example=100, least=0)
    """Generate greedy answers to this many records and compare them with the expected text by
    ROUGE-L. Default: as in the run; 0: none."""
    metric: tuple[str, ...] = option((), placeholder="FILE.py:FUNCTION")
    """Also score answers with your own function, called with (answer, expected, record), on as many
    records as exact_match and rouge_l use, or 100. Can be repeated."""
    max_new_tokens: int | None = option(None, example=100, least=1)
    """Longest answer for rouge_l and metric, in tokens. Default: as in the run, or 100."""
    tasks: str | None = option(None, placeholder="NAME,...")
    """Run tasks of the lm-evaluation-harness instead (pip install 'ftkit[tasks]'): names such as
    arc_easy,gsm8k, task files, or directories of them."""
    limit: int | None = option(None, example=100, least=1)
    """Use this many records of each task. Default: all."""
    num_fewshot: int | None = option(None, example=5, least=0)
    """Examples in each prompt of a task. Default: as the task defines."""
    apply_chat_template: bool = False
    """Format the prompts of tasks with the chat template of the result. Default: plain text."""
    trust_task_code: Path | None = option(None, placeholder="DIR")
    """Allow task files to run Python code from this directory, without restrictions."""
    format: OutputFormat = "table"
    """json: print only JSON to standard output."""

    @property
    def metrics(self) -> tuple[OwnMetric, ...]:
        """Functions that --metric names."""
        return own_metrics(self.metric)

    def __post_init__(self) -> None:
        own_metrics(self.metric)  # refused before the result is looked for
        of_records = {
            "data": bool(self.data),
            "sets": self.sets is not None,
            "max_iters": self.max_iters is not None,
            "reference": self.reference is not None,
            **{name: getattr(self, name) is not None for name in METRICS},
            "metric": bool(self.metric),
            "max_new_tokens": self.max_new_tokens is not None,
        }
        of_tasks = {
            "limit": self.limit is not None,
            "num_fewshot": self.num_fewshot is not None,
            "apply_chat_template": self.apply_chat_template,
            "trust_task_code": self.trust_task_code is not None,
        }
        # Options that the chosen kind of evaluation would ignore.
        for key, is_given in (of_tasks if self.tasks is None else of_records).items():
            if is_given and self.tasks is None:
                raise UserError(f"--{key} is for tasks. Add --tasks NAME, or leave it out.")
            if is_given:
                raise UserError(
                    f"--tasks and --{key} exclude each other: tasks have records of their own. "
                    "Leave one of them out."
                )
