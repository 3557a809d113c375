"""The recipe: the settings of a run, as frozen dataclasses.

Keys, nesting and defaults follow LitGPT's finetune recipes, so that those run unchanged. Each
field is documented once, in the string below it; that string is also its ``--help``. Its type says
whether a resumed run may change it (`ftkit.recipe.changes`).
"""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from ftkit.recipe.implementations import AUTO, implementation_names
from ftkit.recipe.key_types import (
    FRACTION,
    SHARE,
    Fixed,
    Hardware,
    Range,
    Tunable,
    above_0,
    at_least,
    not_negative,
)
from ftkit.recipe.loggers import CSV, logger_names

Precision = Literal["32-true", "bf16-true", "bf16-mixed", "16-true", "16-mixed"]
Quantization = Literal["bnb.nf4", "bnb.nf4-dq", "bnb.fp4", "bnb.fp4-dq", "bnb.int8", "stored"]
Method = Literal["full", "lora"]
Kernels = Literal["auto", "torch", "liger"]
AcceleratorKey = Literal["auto", "cpu", "cuda"] | str
LoraVariant = Literal["lora", "dora", "rslora"]
LoraInit = Literal["default", "pissa", "olora", "loftq"]
RELATIVE_INITS = ("pissa", "olora")
"""First values that are subtracted, so that training starts at the base model."""
LrSchedule = Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"]
LrWarmupCurve = Literal["linear", "quadratic"]
ALL_LINEAR = "all-linear"
"""Value of lora_targets, PEFT's word for all linear layers but the head."""
PEFT_DEFAULT = "peft-default"
"""Value of lora_targets: the layers that PEFT adapts of a type of models where none is named."""
LrEnds = Literal["within", "around"]
"""Where the curve of the learning rate begins and ends: in the first and last step, or beside
them."""
MicroBatchKey = Literal["micro_batch_size", "micro_batch_tokens"]
"""Key that limits a micro-batch, by its sequences or by its tokens."""


class Component(TypedDict):
    """A class chosen by its path, with its arguments: how recipes name data and optimizer."""

    class_path: str
    init_args: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Train:
    """Length of the training, batch sizes and learning rate."""

    global_batch_size: Annotated[Tunable[int], at_least(1)] = 16
    """Sequences per optimizer step, over all ranks; preference pairs, and queries with their
    documents, count as one."""
    global_batch_tokens: Annotated[Tunable[int | None], at_least(1)] = None
    """In the place of global_batch_size: a step takes samples in their order up to so many tokens
    over all ranks, at least one, and ends with the epoch. How they lie in rows never changes it."""
    step_ends_with_epoch: Tunable[bool] = False
    """Whether the last step of an epoch takes only the samples that are left, as in transformers'
    Trainer; else every step but the run's last one has the same size."""
    micro_batch_size: Annotated[Hardware[int | Literal["auto"] | None], at_least(1)] = None
    """Most sequences (or pairs, or queries) per forward pass on one rank. Affects time and memory,
    never the loss. auto: as many as are predicted to fit in the free memory of the device. Default:
    as many as fit in micro_batch_tokens."""
    micro_batch_tokens: Annotated[Hardware[int | Literal["auto"] | None], at_least(1)] = None
    """Most tokens per forward pass on one rank, in rows without padding: a step takes as many
    forward passes as its sequences need, and a longer sequence gets one of its own. Models that
    only take padded micro-batches get as many sequences as the longest would fit in. Affects time
    and memory, never the loss. auto: as many as are predicted to fit in the free memory of the
    device. Default: of micro_batch_size alone; if that is empty too, 8,192 on GPUs and 2,048 on
    CPUs, more of which bring little, or as many as fit in the memory of the device."""
    padding_free: Hardware[bool | None] = None
    """Concatenate the samples of a micro-batch into one row, without padding and without attention
    between them. Affects time and memory, never the loss. Default: on where it is faster, on CPUs
    and on GPUs with flash attention."""
    epochs: Annotated[Tunable[int | None], at_least(1)] = 5
    """Passes over the training data."""
    max_steps: Annotated[Tunable[int | None], at_least(1)] = None
    """Stop after this many optimizer steps."""
    max_time: Annotated[Hardware[float | None], above_0("null for no limit")] = None
    """Stop after this many seconds of training."""
    max_tokens: Annotated[Tunable[int | None], at_least(1)] = None
    """Stop after as many optimizer steps as train on this many tokens. Only of data without a known
    length (data Corpus), which need it or max_steps; epochs has no effect there."""
    max_seq_length: Annotated[Fixed[int | None], at_least(2)] = None
    """Cut sequences to this many tokens. Default: the context length of the model."""
    lr_warmup_steps: Annotated[Tunable[int | Literal["auto"] | None], at_least(0)] = "auto"
    """Optimizer steps over which the learning rate rises to its full value. auto: 100, in
    a short run at most a tenth of its steps; a resumed run keeps the warm-up that it began with."""
    lr_warmup_fraction: Annotated[Tunable[float | None], FRACTION] = None
    """The warm-up as a fraction of an epoch, instead of lr_warmup_steps."""
    lr_warmup_run_fraction: Annotated[Tunable[float | None], FRACTION] = None
    """The warm-up as a fraction of all steps of the run, rounded up, instead of lr_warmup_steps."""
    lr_warmup_curve: Tunable[LrWarmupCurve] = "linear"
    """How the rate rises in the warm-up: linear, or quadratic, which begins more slowly."""
    lr_schedule: Tunable[LrSchedule] = "cosine"
    """Learning rate after the warm-up. cosine, linear: decays until the end of the run; constant:
    stays the same; wsd (warm-up, stable, decay): stays the same, then decays linearly at the end of
    the run; inverse_sqrt: decays with the square root of the steps, independent of the length of
    the run."""
    lr_decay_fraction: Annotated[
        Tunable[float], Range("be above 0 and at most 1", lambda x: 0 < x <= 1, "0.1")
    ] = 0.1
    """For wsd: length of the final decay, as a fraction of all steps of the run."""
    min_lr: Annotated[Tunable[float], not_negative("0")] = 6e-5
    """Learning rate at the end of the decay."""
    lr_ends: Tunable[LrEnds] = "within"
    """within: a warm-up of N steps begins with an Nth of the full rate, and the last step has
    train.min_lr. around: as in transformers, the first step of a warm-up has a rate of 0, and
    train.min_lr would be reached in the step after the last one."""
    label_smoothing: Annotated[Tunable[float], SHARE] = 0.0
    """Share of each label that is spread evenly over the vocabulary in training, as in torch's
    cross_entropy. The training loss includes it, the validation loss does not."""
    neftune_noise_alpha: Annotated[Tunable[float | None], above_0("5, or null for no noise")] = None
    """NEFTune: add noise to the embeddings in training, uniform between -a and a, with a = this /
    sqrt(tokens of the sample * width); 5 is usual. Empty: no noise."""
    ema_decay: Annotated[
        Tunable[float | None],
        Range("lie between 0 and 1", lambda x: 0 < x < 1, "0.999, or null for no average"),
    ] = None
    """Keep an exponential moving average of the trained weights, in float32, with this decay per
    step; 0.99 to 0.9999 are usual. Validation, generated answers and the result use the average.
    Empty: no average."""
    max_norm: Annotated[Tunable[float | None], above_0("null for no limit")] = None
    """Clip gradients to this global norm."""
    decay_norms_and_biases: Tunable[bool] = True
    """Whether optimizer.weight_decay also shrinks the weights of norms and all biases. False: they
    do not decay, as in transformers' Trainer."""
    optimizer_in_backward: Hardware[bool] = False
    """Update each parameter as soon as its gradient is computed, and free the gradient: the
    gradients never exist all at once. Does not change the result. Needs single or fsdp, no
    train.max_norm, and one micro-batch per step."""
    record_steps: Hardware[bool] = False
    """Record the forward and backward pass of micro-batches as CUDA graphs, which the host replays
    in one call each: faster where a step is so short that launching its kernels takes longer than
    computing them. Micro-batches are filled up to at most 8 shapes, each recorded at its third
    micro-batch. Does not change the loss. What cannot be recorded runs as without it, and a line
    says why."""
    tie_embeddings: Fixed[bool | None] = None
    """Share the weights of embedding and head. Default: as in the base model."""
    only: Fixed[str | None] = None
    """Only of finetune_full: train the parameters with a match of this regular expression in their
    Hugging Face name, such as embed_tokens or 'layers[.]{last 8}[.]'. {last 8} stands for the
    numbers of the last 8 layers, {first 8} for those of the first. All others stay frozen: they
    take no gradients, no optimizer state and no space in checkpoints."""
    freeze: Fixed[str | None] = None
    """Only of finetune_full: do not train the parameters with a match of this regular expression in
    their Hugging Face name, even if train.only has chosen them. {language} stands for all of the
    language model: what images.projector and images.tower add is trained alone."""
    from_scratch: Fixed[bool] = False
    """Only of finetune_full: begin with new random weights, drawn by the seed as transformers draws
    those of such a model, instead of the weights of checkpoint_dir, whose settings and tokenizer
    are used. The numbers are the same on any hardware."""
    save_interval: Annotated[Hardware[int | None], at_least(1)] = 1000
    """Optimizer steps between two checkpoints; empty: save by time only, see
    checkpoint.save_every."""
    save_interval_epochs: Annotated[Hardware[float | None], above_0("0.25")] = None
    """The same as a share of an epoch, instead of save_interval: 0.25 saves four times in an
    epoch."""
    log_interval: Annotated[Hardware[int], at_least(1)] = 1
    """Optimizer steps between two values sent to the loggers of logger_name (metrics.csv has every
    step)."""

    @property
    def trains_part(self) -> bool:
        """Whether parameters are chosen by name, so that some may stay those of the base model."""
        return self.only is not None or self.freeze is not None

    @property
    def auto_key(self) -> MicroBatchKey | None:
        """The key that is auto; micro_batch_tokens if both are, because it bounds sequences too."""
        if self.micro_batch_tokens == "auto":
            return "micro_batch_tokens"
        is_open = self.micro_batch_size == "auto" and self.micro_batch_tokens is None
        return "micro_batch_size" if is_open else None

    @property
    def is_open(self) -> bool:
        """Whether it leaves micro-batches to ftkit."""
        return self.micro_batch_size is None and self.micro_batch_tokens is None

    def with_auto_value(self, value: int) -> "Train":
        """Return the settings with this value for the key that is auto."""
        if self.auto_key == "micro_batch_tokens":
            return dataclasses.replace(self, micro_batch_tokens=value)
        assert self.auto_key == "micro_batch_size"
        return dataclasses.replace(self, micro_batch_size=value)


METRICS = {"exact_match": "exact match", "rouge_l": "ROUGE-L"}
"""Metrics of answers, with their names in tables: keys of `Eval`, and options of `ftkit
evaluate`."""


@dataclass(frozen=True, kw_only=True)
class Eval:
    """When and how to evaluate on the validation data."""

    interval: Annotated[Hardware[int], at_least(0)] = 600
    """Optimizer steps between validations."""
    interval_epochs: Annotated[Hardware[float | None], above_0("0.25")] = None
    """The same as a share of an epoch, instead of interval: 0.25 validates four times in an
    epoch."""
    patience: Annotated[Tunable[int | None], at_least(1)] = None
    """Stop training when this many validations in a row did not lower the best validation loss.
    Empty: no early stopping."""
    max_iters: Annotated[Hardware[int], at_least(1)] = 100
    """Validate on at most this many batches of train.global_batch_size sequences."""
    # Not part of what is learned, but further columns in validation.csv.
    sets: Tunable[dict[str, Any] | None] = None
    """Further validation sets by name: {code: code.jsonl, french: {path: french.jsonl, columns:
    {output: answer}}}, or --eval.sets.code FILE. The loss on each is reported beside the validation
    loss. Their records are rendered like those of data; path, columns, subset, split, revision and
    data_files choose the records."""
    max_new_tokens: Annotated[Hardware[int | None], at_least(0)] = 100
    """Longest answer, in tokens, for the sample that is generated at each validation and for
    rouge_l; 0 or empty: generate no sample."""
    evaluate_example: Annotated[Hardware[str | int], at_least(0)] = "first"
    """Validation record for which a sample is generated: "first", "random", or its index."""
    initial_validation: Hardware[bool] = False
    """Validate before the first step."""
    final_validation: Hardware[bool] = True
    """Validate after the last step."""
    # A key for each score and not a list of names, which would need the number of records besides.
    exact_match: Annotated[Hardware[int], at_least(0)] = 0
    """Generate greedy answers to this many validation records before and after training, and report
    how many equal the expected text."""
    rouge_l: Annotated[Hardware[int], at_least(0)] = 0
    """Generate greedy answers to this many validation records before and after training, and report
    the mean ROUGE-L: how many words they share with the expected text, in order."""
    tasks: Hardware[list[str] | None] = None
    """Run these tasks of the lm-evaluation-harness before and after training (pip install
    'ftkit[tasks]'): names such as [arc_easy, gsm8k], task files, or directories of task files."""
    limit: Annotated[Hardware[int | None], at_least(1)] = None
    """Use this many records of each task. Default: all."""
    num_fewshot: Annotated[Hardware[int | None], at_least(0)] = None
    """Examples in each prompt of a task. Default: as the task defines."""
    apply_chat_template: Hardware[bool] = False
    """Format the prompts of tasks with the chat template of the run. Default: plain text."""

    @property
    def validates(self) -> bool:
        """True if the loss on the validation data is computed at any time."""
        during = self.interval or self.interval_epochs
        return bool(during or self.initial_validation or self.final_validation)

    @property
    def metrics(self) -> dict[str, int]:
        """Records to answer for each metric, by its name."""
        return {name: getattr(self, name) for name in METRICS}


@dataclass(frozen=True, kw_only=True)
class Log:
    """Names of the run in W&B, MLflow and Trackio."""

    project: Hardware[str | None] = None
    """Project of the run; in MLflow its experiment. Default: from their environment variables; in
    MLflow and Trackio ftkit if these are not set."""
    run: Hardware[str | None] = None
    """Name of the run. Default: in MLflow and Trackio the name of out_dir."""
    group: Hardware[str | None] = None
    """Group of the run; in MLflow its tag group."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Checkpoints and the result of the run."""

    save: Hardware[bool] = True
    """Write checkpoints to out_dir/checkpoints and the result to out_dir/final. Switch off to
    measure only time and memory."""
    save_every: Hardware[str | None] = "15min"
    """Time between two checkpoints, such as 60s, 15min or 2h; empty: save by steps only. auto: the
    interval that loses the least time, from the measured cost of a save and
    checkpoint.time_between_losses."""
    time_between_losses: Hardware[str] = "24h"
    """For save_every auto: expected training time between two failures of a machine. Failures of
    the run itself are counted too."""
    keep_last: Annotated[Hardware[int], at_least(1)] = 3
    """Keep this many of the newest checkpoints."""
    keep_every: Annotated[Hardware[int | dict[int, int] | None], at_least(1)] = None
    """Also keep every checkpoint whose step is a multiple of this. A mapping keeps fewer of the
    older ones: {1000: 100, 10000: 1000} keeps every 100th step up to step 1000 and every 1000th
    after it, also beyond step 10000."""
    keep_best: Annotated[Hardware[int], at_least(0)] = 0
    """Also keep this many checkpoints with the lowest validation loss."""
    result: Hardware[Literal["last", "best"]] = "last"
    """Source of the result: the last step, or the checkpoint with the lowest validation loss, which
    is kept until the end."""
    asynchronous: Hardware[bool] = True
    """Continue training while a checkpoint is being written, from a copy in host memory."""
    max_staged_bytes: Annotated[Hardware[int | None], at_least(2**20)] = None
    """Most bytes of host memory for the copy of an asynchronous save, on each rank. A rank that
    would need more makes no copy: training waits while its tensors are written through a small
    buffer. Empty: as much as the copy needs, see ftkit plan."""

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
    """Ways to trade time for memory."""

    activation_checkpointing: Annotated[Hardware[bool | int], at_least(1)] = False
    """Keep only the input of each block and recompute the rest in the backward pass: far less
    memory for activations, about a third more time. Does not change the result. A number N: only
    for every Nth block, which saves and costs an Nth of that."""
    offload_activations: Hardware[bool] = False
    """Keep the inputs of checkpointed blocks in host memory instead of GPU memory, but for the last
    two. Copies run beside the computation. Does not change the result."""
    shard_model_beside: Hardware[bool] = False
    """Shard the frozen model beside the trained one (a teacher, or the reference of kto) over all
    ranks, where each has the trained model whole (ddp, deepspeed stages 1 and 2): a rank keeps a
    share of its weights, and gathers them block by block. Does not change the result."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Full fine-tuning: every parameter of the base model is trained."""

    # The model is known by its fingerprint, wherever it lies; so is the teacher.
    checkpoint_dir: Hardware[str]
    """Base model: a directory (Hugging Face or LitGPT layout), a GGUF file (converted once, to
    checkpoints/gguf), a hub name such as TinyLlama/TinyLlama_v1.1, or ORG/NAME@VERSION with a
    commit, a tag or a branch (downloaded to checkpoints/ when needed), embedded:quickstart, or
    random:NAME for random weights, where NAME is a model that LitGPT knows (its own name or that on
    the hub) or a model type of transformers in its default size."""
    out_dir: Hardware[Path] = Path("out/finetune/full")
    """Where the run writes its report, metrics and result: a directory, s3://, gs:// or az://."""
    precision: Tunable[Precision | None] = None
    """Number format. Default: that of the checkpoint of a resumed run, else bf16-mixed; 16-mixed on
    GPUs without bfloat16, 32-true on CPUs without instructions for it (AMX, AVX-512 BF16, Arm's
    BF16). 16-true needs deepspeed, which keeps a 32-bit copy of the weights."""
    accelerator: Hardware[AcceleratorKey] = "auto"
    """Device type. Default: cuda (GPUs of NVIDIA, and of AMD with torch for ROCm) if there is one,
    else tpu if torch_tpu is installed and finds one, else cpu. Other types of torch.accelerator,
    such as xpu or mps, are accepted, but ftkit has not been tested on them."""
    devices: Annotated[Hardware[int | Literal["auto"]], at_least(1)] = 1
    """Devices per machine."""
    num_nodes: Annotated[Hardware[int | Literal["auto"]], at_least(1)] = 1
    """Number of machines. auto: as many as torchrun or srun started ftkit on, counted at each
    start; 1 without them."""
    strategy: Hardware[Component] = field(
        default_factory=lambda: Component(class_path="auto", init_args={})
    )
    """Distribution over devices: auto, single, ddp, fsdp or deepspeed; options as --strategy.NAME
    VALUE."""
    # A checkpoint says which one: `open_base_model` keeps it.
    model_implementation: Hardware[str] = field(
        default=AUTO, metadata={"names": implementation_names}
    )
    """Code that computes the model: LitGPT, or transformers, which supports more models. auto:
    LitGPT if it is installed and has the same layers with the whole context, else transformers, so
    that losses do not depend on it; a resumed run keeps its implementation."""
    compile: Hardware[bool] = False
    """Compile the blocks and the loss with torch.compile. The first steps wait for the compiler, up
    to minutes with an empty cache; losses differ by rounding. Not with deepspeed; needs a compiler
    (g++; gcc with CUDA)."""
    kernels: Hardware[Kernels] = "auto"
    """Kernels for norms, gated MLPs, rotary embeddings and the loss. liger: Liger-Kernel, which
    needs less memory (CUDA; pip install 'ftkit[liger]'). auto: torch, until Liger-Kernel has been
    measured with ftkit on a GPU."""
    router_aux_loss_coef: Annotated[
        Tunable[float | Literal["model"] | None], not_negative("0.001")
    ] = None
    """Weight of the auxiliary loss that makes routers spread tokens evenly over experts, as the
    model defines it, over all tokens of a step; 0: no such loss; model: that of config.json. With
    several micro-batches per step, one more forward pass of each counts the choices. Default: as in
    config.json, if output_router_logits is true."""
    data: Hardware[Component] = field(
        default_factory=lambda: Component(class_path="litgpt.data.Alpaca", init_args={})
    )
    """Training data: a map-style module of litgpt.data, or JSON with --data.path FILE; options as
    --data.NAME VALUE."""
    objective: Fixed[Component] = field(
        default_factory=lambda: Component(class_path="sft", init_args={})
    )
    """What is learned: sft, the answers of records, or another objective, such as dpo, which of two
    answers is better; --objective.help lists them. Options as --objective.NAME VALUE."""
    reference: Fixed[str | None] = None
    """The model that dpo and kto compare with, if it is not the one with which training begins: a
    directory or name as for checkpoint_dir, with the same vocabulary. For dpo its log-probabilities
    are computed before the first step; for kto it stays in memory during training, distributed as
    the trained model is. kto needs it in full fine-tuning and with lora_modules_to_save, such as
    checkpoint_dir again, of which it then holds a frozen copy."""
    teacher: Hardware[str | None] = None
    """The model that distill learns from: a directory or name as for checkpoint_dir, with the same
    tokenizer and vocabulary. It stays in memory during training, distributed as the trained model
    is, and is not changed."""
    train: Train = field(default_factory=Train)
    eval: Eval = field(default_factory=Eval)
    log: Log = field(default_factory=Log)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    memory: Memory = field(default_factory=Memory)
    optimizer: Tunable[Component] = field(
        default_factory=lambda: Component(class_path="torch.optim.AdamW", init_args={})
    )
    """Optimizer: a name from torch.optim, or a class path (torch.optim, bitsandbytes.optim,
    torchao.optim); arguments as --optimizer.NAME VALUE."""
    logger_name: Hardware[str | list[str]] = field(default=CSV, metadata={"names": logger_names})
    """Loggers beside metrics.csv, which is always written: a name or a list, such as [tensorboard,
    mlflow]. A resumed run continues in all of them. mlflow and trackio write to out_dir unless
    MLFLOW_TRACKING_URI or TRACKIO_SERVER_URL, TRACKIO_SPACE_ID or TRACKIO_DIR is set."""
    seed: Annotated[Fixed[int], at_least(0)] = 1337
    """Seed of the sample order, adapter initialisation and dropout."""
    deterministic: Hardware[bool] = False
    """Compute the same numbers in every run on the same devices, with float32 products in full
    precision. Slower on GPUs, which otherwise use TF32 and an undefined order of sums."""
    resume: Hardware[bool | int | str] = False
    """Continue from a checkpoint. auto: the newest one in out_dir; start from the beginning if
    there is none. true: the newest one, which must exist. A number: the checkpoint of that step in
    out_dir; later ones are moved to out_dir/set_aside. A path or URL: a run, its checkpoints or one
    of them; the run continues in a new out_dir, unless the checkpoint is its own. Hardware settings
    may change."""
    access_token: Hardware[str | None] = None
    """Hugging Face token for gated models. Default: $HF_TOKEN. Never stored."""

    @property
    def data_token(self) -> str | None:
        """Hugging Face token with which the data are read; None: $HF_TOKEN."""
        own: str | None = self.data["init_args"].get("access_token")
        return own or self.access_token

    @property
    def added_tokens(self) -> tuple[str, ...]:
        """Texts of the tokens that are added to the vocabulary of the base model."""
        given = self.data["init_args"].get("add_tokens")
        # Another type is refused where the options of data are checked.
        return tuple(given) if isinstance(given, list) else ()

    @property
    def method(self) -> Method:
        """Whether all weights or LoRA weights are trained: `full` or `lora`."""
        return "full"

    @property
    def extra_loggers(self) -> tuple[str, ...]:
        """Loggers beside metrics.csv, without repetitions."""
        named = [self.logger_name] if isinstance(self.logger_name, str) else self.logger_name
        return tuple(dict.fromkeys(name for name in named if name != CSV))

    @property
    def implementation(self) -> str | None:
        """The chosen implementation of the model; None: auto."""
        return None if self.model_implementation == AUTO else self.model_implementation


@dataclass(frozen=True, kw_only=True)
class Lora:
    """LoRA: small trained matrices beside the frozen layers of the base model."""

    peft: Fixed[Component] = field(
        default_factory=lambda: Component(class_path="lora", init_args={})
    )
    """Type of adapter, computed by PEFT's layers: lora, by the keys lora_*, or another that
    --peft.help lists, such as vera. Options as --peft.NAME VALUE. All types adapt the layers that
    lora_targets, or lora_query and its like, choose."""
    quantize: Fixed[Quantization | None] = None
    """Quantize the frozen base model with bitsandbytes (QLoRA). stored: keep the weights that its
    files have in FP8 or MXFP4 in this form, with the same numbers."""
    lora_r: Fixed[int] = 16
    """Rank of the adapter matrices. Default: 16, or 8 where keys name the layers to adapt."""
    lora_alpha: Annotated[Fixed[int | float], above_0("16")] = 32
    """Scale of the adapter: its output is multiplied by lora_alpha / lora_r, with rsLoRA by
    lora_alpha / sqrt(lora_r). Default: 32, or 16 where keys name the layers to adapt."""
    lora_dropout: Annotated[Tunable[float], SHARE] = 0.05
    """Dropout before the adapter. Its masks follow from seed, step and sample, on any hardware."""
    lora_query: Fixed[bool] = True
    """Adapt the query projection. If one of the keys lora_query, lora_key, lora_value,
    lora_projection, lora_mlp and lora_head is given, the others have LitGPT's defaults: query and
    value. Without any of them, all linear layers are adapted, see lora_targets."""
    lora_key: Fixed[bool] = False
    """Adapt the key projection."""
    lora_value: Fixed[bool] = True
    """Adapt the value projection."""
    lora_projection: Fixed[bool] = False
    """Adapt the output projection of attention."""
    lora_mlp: Fixed[bool] = False
    """Adapt the layers of the MLP."""
    lora_experts: Fixed[bool] = False
    """Adapt experts whose matrices are stored in one parameter, with a low-rank pair for each
    expert (Mixtral, Qwen3-MoE, gpt-oss and others that transformers computes). Needs lora_dropout
    0."""
    lora_head: Fixed[bool] = False
    """Adapt the output head."""
    lora_targets: Fixed[list[str] | str | None] = ALL_LINEAR
    """Adapt these layers instead of the ones above: a list of Hugging Face names, such as [q_proj,
    v_proj], a name or regular expression for full names, such as '.*layers.[0-3].*_proj', or
    all-linear: all linear layers but routers and the head, or peft-default: those that PEFT adapts
    of the model's type where none is named, most often query and value. Default: all-linear, or the
    layers of lora_query and its like if one of them is given."""
    # Which layers there are, the model and lora_targets say.
    lora_skip_missing: Hardware[bool] = False
    """Leave out names of a list in lora_targets that the model does not have, with a warning, as
    PEFT does without one. At least one name must be there."""
    lora_modules_to_save: Fixed[list[str] | None] = None
    """Layers to train fully and save with the adapter, such as [embed_tokens, lm_head]."""
    lora_variant: Fixed[LoraVariant] = "lora"
    """lora; dora: also trains the magnitude of each row of the weights; rslora: scales by the
    square root of the rank, for high ranks."""
    lora_init: Fixed[LoraInit] = "default"
    """Initialisation. default: A is random, B zero; pissa: the largest singular vectors
    of the base weight; olora: its QR decomposition. With each of them training starts from the
    outputs of the base model. loftq, with quantize: the largest singular vectors of what
    quantisation has changed in the base weight, so that training starts nearer to the outputs of
    the model that is not quantised."""
    lora_plus_ratio: Annotated[Tunable[float | None], above_0("16")] = None
    """LoRA+: learning rate of the matrices B as a multiple of that of A; 16 is usual."""
    adapter: Fixed[Path | None] = None
    """Start from this adapter: a run, one of its checkpoints, or the directory of a PEFT adapter.
    Its rank, scale, variant and layers are used."""


@dataclass(frozen=True, kw_only=True)
class LoraRecipe(Lora, Recipe):
    """LoRA and QLoRA: the base model is frozen and small adapter matrices are trained."""

    out_dir: Hardware[Path] = Path("out/finetune/lora")

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

FINETUNE: dict[str, Method] = {"finetune": "lora", "finetune_lora": "lora", "finetune_full": "full"}
