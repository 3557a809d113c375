"""The recipe: the settings of a run, as frozen dataclasses.

Keys, nesting and defaults follow LitGPT's finetune recipes, so that those run unchanged. Each
field is documented once, in the string below it; that string is also its ``--help``.
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

Precision = Literal["32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed"]
Quantization = Literal["bnb.nf4", "bnb.nf4-dq", "bnb.fp4", "bnb.fp4-dq", "bnb.int8"]
Method = Literal["full", "lora"]
Kernels = Literal["auto", "torch", "liger"]
AcceleratorKey = Literal["auto", "cpu", "cuda"] | str
LoggerName = Literal["csv", "tensorboard", "wandb", "mlflow", "trackio"]
LoraVariant = Literal["lora", "dora", "rslora"]
LoraInit = Literal["default", "pissa", "olora"]
LrSchedule = Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"]
MicroBatchKey = Literal["micro_batch_size", "micro_batch_tokens"]
"""What bounds a micro-batch: its sequences or its tokens."""


class Component(TypedDict):
    """A class chosen by its path, with its arguments: how recipes name data and optimizer."""

    class_path: str
    init_args: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Train:
    """How much to train, and in what steps."""

    global_batch_size: int = 16
    """Sequences per optimizer step, over all ranks."""
    micro_batch_size: int | Literal["auto"] | None = None
    """Sequences per forward pass on one rank, at most. Changes time and memory, never the loss.
    auto: as many as fit in the free memory of the device, by prediction. Default: 1, or with
    micro_batch_tokens as many as have room in it."""
    micro_batch_tokens: int | Literal["auto"] | None = None
    """Tokens per forward pass on one rank, at most, in rows without padding: a step takes as many
    forward passes as its sequences need; one that is longer has a forward pass of its own. Changes
    time and memory, never the loss. auto: as many as fit in the free memory of the device, by
    prediction."""
    padding_free: bool | None = None
    """Compute the samples of a micro-batch in one row, each by itself, without padding. Changes
    time and memory, never the loss. Default: where it is faster, on CPUs and on GPUs with flash
    attention."""
    epochs: int | None = 5
    """Passes over the training data."""
    max_steps: int | None = None
    """Stop after this many optimizer steps."""
    max_time: float | None = None
    """Stop after this many seconds of training."""
    max_tokens: int | None = None
    """Not supported for fine-tuning (LitGPT's key for pretraining); leave empty."""
    max_seq_length: int | None = None
    """Cut sequences to this many tokens. Default: what the model was built for."""
    lr_warmup_steps: int | None = 100
    """Optimizer steps over which the learning rate rises linearly to its full value."""
    lr_warmup_fraction: float | None = None
    """The warm-up as a fraction of an epoch, instead of lr_warmup_steps."""
    lr_schedule: LrSchedule = "cosine"
    """Learning rate after the warm-up. cosine, linear: falls to the end of the run; constant: stays
    there; wsd (warm-up, stable, decay): stays, and falls along a line at the end of the run;
    inverse_sqrt: falls with the square root of the steps, however long the run is."""
    lr_decay_fraction: float = 0.1
    """Of wsd: the decay at the end as a fraction of all steps of the run."""
    min_lr: float = 6e-5
    """Learning rate that the decay goes down to."""
    label_smoothing: float = 0.0
    """Of each label, this fraction is spread evenly over the vocabulary while training, as torch's
    cross_entropy defines it. The training loss includes it, the validation loss does not."""
    neftune_noise_alpha: float | None = None
    """NEFTune: noise on the embeddings while training, between -a and a with a = this /
    sqrt(tokens of the sample * width); 5 is usual. Empty: none."""
    ema_decay: float | None = None
    """Keep an exponential moving average of what is trained, in float32, of which this share stays
    in each step; 0.99 to 0.9999 are usual. Validation, answers and the result are of the average.
    Empty: none."""
    max_norm: float | None = None
    """Clip gradients to this global norm."""
    optimizer_in_backward: bool = False
    """Update each parameter as soon as its gradient is there, and free that: all gradients never
    exist at once. Changes no result. Under single and fsdp, without train.max_norm and with one
    micro-batch in a step."""
    tie_embeddings: bool | None = None
    """Share the weights of embedding and head. Default: as the base model does."""
    save_interval: int | None = 1000
    """Optimizer steps between two checkpoints; empty: none by steps, see checkpoint.save_every."""
    log_interval: int = 1
    """Optimizer steps between two values sent to the loggers of logger_name (metrics.csv has
    all)."""

    @property
    def auto_key(self) -> MicroBatchKey | None:
        """The key that is auto; micro_batch_tokens if both are, because it bounds sequences too."""
        if self.micro_batch_tokens == "auto":
            return "micro_batch_tokens"
        is_open = self.micro_batch_size == "auto" and self.micro_batch_tokens is None
        return "micro_batch_size" if is_open else None

    def with_auto_value(self, value: int) -> "Train":
        """Return the settings with this value for the key that is auto."""
        if self.auto_key == "micro_batch_tokens":
            return dataclasses.replace(self, micro_batch_tokens=value)
        assert self.auto_key == "micro_batch_size"
        return dataclasses.replace(self, micro_batch_size=value)


@dataclass(frozen=True, kw_only=True)
class Eval:
    """When and how to evaluate on the validation data."""

    interval: int = 600
    """Optimizer steps between validations."""
    patience: int | None = None
    """End training once this many validations in a row had no lower loss than one before them.
    Empty: training ends as train.epochs and train.max_steps say."""
    max_iters: int = 100
    """Validate on at most this many batches of train.global_batch_size sequences."""
    sets: dict[str, Any] | None = None
    """Further records to validate on, by names: {code: code.jsonl, french: {path: french.jsonl,
    columns: {output: answer}}}, or --eval.sets.code FILE. The loss on each is reported beside the
    validation loss. Their records are rendered as those of data; path, columns, subset, split and
    revision say which they are."""
    max_new_tokens: int | None = 100
    """Longest answer, in tokens, for the sample that is generated at each validation and for
    rouge_l; 0 or empty: no sample."""
    evaluate_example: str | int = "first"
    """Whose answer to generate: "first", "random", or the index of a validation record."""
    initial_validation: bool = False
    """Validate before the first step."""
    final_validation: bool = True
    """Validate after the last step."""
    exact_match: int = 0
    """Answer this many validation records greedily before and after training, and report how
    many answers equal the expected text."""
    rouge_l: int = 0
    """Answer this many validation records greedily before and after training, and report how much
    of the words answers share with the expected text: the mean ROUGE-L."""
    tasks: list[str] | None = None
    """Run these tasks of the lm-evaluation-harness before and after training (pip install
    'ftkit[tasks]'): names such as [arc_easy, gsm8k], task files or directories of them."""
    limit: int | None = None
    """Use this many records of each task. Default: all."""
    num_fewshot: int | None = None
    """Examples in each prompt of a task. Default: as the task says."""
    apply_chat_template: bool = False
    """Write prompts of tasks in the chat template of the run. Default: as plain text."""


@dataclass(frozen=True, kw_only=True)
class Log:
    """What a run is called in W&B, MLflow and Trackio."""

    project: str | None = None
    """Project of the run; in MLflow its experiment. Default: as their environment variables say, in
    MLflow and Trackio else ftkit."""
    run: str | None = None
    """Name of the run. Default: in MLflow and Trackio that of out_dir."""
    group: str | None = None
    """Group of the run; in MLflow its tag group."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What is kept of the run."""

    save: bool = True
    """Write checkpoints to out_dir/checkpoints and the result to out_dir/final. Switch off to
    study time and memory only."""
    save_every: str | None = "15min"
    """Time between two checkpoints, such as 60s, 15min or 2h; empty: none by time. auto: what loses
    the least time, by the measured cost of a save and checkpoint.time_between_losses."""
    time_between_losses: str = "24h"
    """For save_every auto: how long the run is expected to train between two losses of a machine.
    Losses of the run itself count beside it."""
    keep_last: int = 3
    """Keep this many of the newest checkpoints."""
    keep_every: int | dict[int, int] | None = None
    """Also keep every checkpoint whose step is a multiple of this. Several numbers thin out what is
    older: {1000: 100, 10000: 1000} keeps every 100th step up to step 1000 and every 1000th after
    it, where the last one goes on beyond step 10000."""
    keep_best: int = 0
    """Also keep this many checkpoints with the lowest validation loss."""
    result: Literal["last", "best"] = "last"
    """What the result is made of: the last step, or the checkpoint with the lowest validation loss,
    which is kept until then."""
    asynchronous: bool = True
    """Train on while a checkpoint is being written, from a copy in host memory."""
    max_staged_bytes: int | None = None
    """Bytes of host memory that this copy may take on each rank. A rank that would need more makes
    none: training waits while its numbers go through this much memory to the disk. Empty: what the
    copy needs, see ftkit plan."""

    @property
    def best_kept(self) -> int:
        """Number of checkpoints kept for their low validation loss."""
        return max(self.keep_best, 1) if self.result == "best" else self.keep_best

    def most_at_once(self, steps: int | None) -> int:
        """Most checkpoints on the disk at one time, without those of `keep_every`.

        Args:
            steps: steps to come, each with one checkpoint at most; None: unknown.
        """
        most = self.keep_last + self.best_kept + 1  # the next is written before an old one goes
        return most if steps is None else min(most, steps)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What is spent to need less memory."""

    activation_checkpointing: bool | int = False
    """Keep the input of each block alone and compute the rest again in the backward pass: far
    less memory for activations, about a third more time. Changes no result. A number N: of every
    Nth block alone, for an Nth of both."""
    offload_activations: bool = False
    """Keep these inputs in host memory, on GPUs."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Full fine-tuning: every parameter of the base model is trained."""

    checkpoint_dir: str
    """Base model: a directory (Hugging Face or LitGPT layout), a GGUF file (converted to
    checkpoints/gguf once), a hub name such as TinyLlama/TinyLlama_v1.1 (downloaded to checkpoints/
    when needed), embedded:quickstart, or random:NAME with random weights, for any model that LitGPT
    knows, by its own or its hub name, and any model type of transformers, in its default size."""
    out_dir: Path = Path("out/finetune/full")
    """Where the run writes its report, metrics and result: a directory, s3://, gs:// or az://."""
    precision: Precision | None = None
    """Number format. Default: bf16-mixed, or 16-mixed on GPUs without bfloat16. 16-true trains
    under deepspeed alone, which keeps weights in 32 bits beside it."""
    accelerator: AcceleratorKey = "auto"
    """Device kind. Default: cuda (GPUs of NVIDIA, and of AMD with torch for ROCm) where there is
    one, else cpu. Any other that torch.accelerator names, such as xpu or mps, is taken too: ftkit
    has not been tried on it."""
    devices: int | Literal["auto"] = 1
    """Devices per node."""
    num_nodes: int | Literal["auto"] = 1
    """Machines. auto: as many as torchrun or srun has started ftkit on, anew at each start;
    without them 1."""
    strategy: Component = field(default_factory=lambda: Component(class_path="auto", init_args={}))
    """How the work is spread: auto, single, ddp, fsdp or deepspeed; options as
    --strategy.NAME VALUE."""
    model_implementation: Literal["auto", "litgpt", "transformers"] = "auto"
    """Whose code computes the model: LitGPT's, or that of the library transformers, which knows
    more models. auto: LitGPT's where it knows the model with its whole context, else
    transformers'; a run that goes on keeps what it has."""
    compile: bool = False
    """Compile the blocks and the loss with torch.compile. The first steps wait for it, up to
    minutes with an empty cache; losses differ by rounding. Not under deepspeed; needs a compiler
    (g++; gcc with CUDA)."""
    kernels: Kernels = "auto"
    """Whose kernels compute norms, gated MLPs, rotary embeddings and the loss. liger: those of
    Liger-Kernel (CUDA; pip install 'ftkit[liger]'), in less memory. auto: torch's, until Liger's
    have been measured on a GPU with ftkit."""
    router_aux_loss_coef: float | None = None
    """Factor of the loss that has routers spread tokens evenly over experts, as the model defines
    it, over all tokens of a step; 0: none. A step of several micro-batches computes them once more
    to count choices. Default: as config.json says, where output_router_logits is true."""
    data: Component = field(
        default_factory=lambda: Component(class_path="litgpt.data.Alpaca", init_args={})
    )
    """Training data: a map-style module of litgpt.data, or JSON with --data.path FILE;
    options as --data.NAME VALUE."""
    train: Train = field(default_factory=Train)
    eval: Eval = field(default_factory=Eval)
    log: Log = field(default_factory=Log)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    memory: Memory = field(default_factory=Memory)
    optimizer: Component = field(
        default_factory=lambda: Component(class_path="torch.optim.AdamW", init_args={})
    )
    """Optimizer: a name of torch.optim, or a class path (torch.optim, bitsandbytes.optim);
    arguments as --optimizer.NAME VALUE."""
    logger_name: LoggerName | list[LoggerName] = "csv"
    """Loggers beside metrics.csv, which is always written: a name or a list, such as
    [tensorboard, mlflow]. All go on where a run goes on. mlflow and trackio write into out_dir
    unless MLFLOW_TRACKING_URI or TRACKIO_SERVER_URL, TRACKIO_SPACE_ID or TRACKIO_DIR say where."""
    seed: int = 1337
    """Seed of the sample order, adapter initialisation and dropout."""
    deterministic: bool = False
    """Compute the same numbers in every run on the same devices, and products of float32 in full:
    slower on GPUs, where products otherwise take TF32 and the order of sums is left to chance."""
    resume: bool | int | str = False
    """Continue from a checkpoint. auto: the newest one of out_dir; without one, start. true: the
    newest one, which has to be there. A number: that step of out_dir; later checkpoints are moved
    to out_dir/set_aside. A path or url: a run, its checkpoints or one of them; the run goes on in a
    new out_dir, unless the checkpoint is its own. Other hardware settings may be given."""
    access_token: str | None = None
    """Hugging Face token for gated models. Default: $HF_TOKEN. Never written anywhere."""

    @property
    def method(self) -> Method:
        """Whether all weights or LoRA weights are trained: `full` or `lora`."""
        return "full"

    @property
    def extra_loggers(self) -> tuple[LoggerName, ...]:
        """Loggers beside metrics.csv, without repetitions."""
        named = [self.logger_name] if isinstance(self.logger_name, str) else self.logger_name
        return tuple(dict.fromkeys(name for name in named if name != "csv"))

    @property
    def implementation(self) -> Literal["litgpt", "transformers"] | None:
        """The chosen implementation of the model; None: auto."""
        return None if self.model_implementation == "auto" else self.model_implementation


@dataclass(frozen=True, kw_only=True)
class Lora:
    """The adapter: small trained matrices beside the frozen layers of the base model."""

    quantize: Quantization | None = None
    """Quantize the frozen base model with bitsandbytes (QLoRA)."""
    lora_r: int = 8
    """Rank of the adapter matrices."""
    lora_alpha: int | float = 16
    """Scale of the adapter: its output is multiplied by lora_alpha / lora_r, in rsLoRA by
    lora_alpha / sqrt(lora_r)."""
    lora_dropout: float = 0.05
    """Dropout before the adapter."""
    lora_query: bool = True
    """Adapt the query projection."""
    lora_key: bool = False
    """Adapt the key projection."""
    lora_value: bool = True
    """Adapt the value projection."""
    lora_projection: bool = False
    """Adapt the output projection of attention."""
    lora_mlp: bool = False
    """Adapt the layers of the MLP."""
    lora_experts: bool = False
    """Adapt the matrices of experts that are one parameter, with a low-rank pair for each expert
    (Mixtral, Qwen3-MoE, gpt-oss and others that transformers computes). Needs lora_dropout 0."""
    lora_head: bool = False
    """Adapt the output head."""
    lora_targets: list[str] | str | None = None
    """Adapt these layers instead of those above: a list of names as Hugging Face calls them,
    such as [q_proj, v_proj], or a name or regular expression for full names, such as
    '.*layers.[0-3].*_proj'."""
    lora_modules_to_save: list[str] | None = None
    """Train these layers whole beside the adapter and keep them with it, such as
    [embed_tokens, lm_head]."""
    lora_variant: LoraVariant = "lora"
    """lora; dora: trains the length of each row of the weights too; rslora: scales by the square
    root of the rank, for high ranks."""
    lora_init: LoraInit = "default"
    """First values. default: random, with a product of zero; pissa: the largest singular vectors
    of the base weight; olora: its QR decomposition. Training starts at the base model with all."""
    lora_plus_ratio: float | None = None
    """LoRA+: learning rate of the matrices B as a multiple of that of A; 16 is usual."""
    adapter: Path | None = None
    """Start from this PEFT adapter: rank, scale, variant and layers are read from it."""


@dataclass(frozen=True, kw_only=True)
class LoraRecipe(Lora, Recipe):
    """LoRA and QLoRA: the base model is frozen and small adapter matrices are trained."""

    out_dir: Path = Path("out/finetune/lora")

    @property
    def method(self) -> Method:
        """Whether all weights or LoRA weights are trained: `full` or `lora`."""
        return "lora"


LAYER_SWITCHES = (
    "lora_query",
    "lora_key",
    "lora_value",
    "lora_projection",
    "lora_mlp",
    "lora_head",
)
"""Keys that choose the adapted layers where lora_targets does not."""

RECIPE_OF: dict[Method, type[Recipe]] = {"full": Recipe, "lora": LoraRecipe}

FINETUNE: dict[str, Method] = {"finetune": "lora", "finetune_lora": "lora", "finetune_full": "full"}
