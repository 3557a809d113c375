"""Launches, bytes and products of a step on a GPU, counted on tensors without values.

ftkit's own training step and generation run on fake tensors of a simulated card: models have their
real sizes, and no memory is taken. A call of torch that computes or copies is one launch; views are
free. Layers of a model are alike, so that two of its depths give every other.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal
from unittest.mock import patch

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ftkit.models import token_numbers
from ftkit.models.bodies import attention, expert_products
from ftkit.models.bodies.attention import attention_kernel
from ftkit.models.language_model import LanguageModel, outline
from ftkit.models.pretrained.base_model import BaseModel, open_base
from ftkit.models.quantization import FourBit
from ftkit.objectives.objective import Batch, make_objective
from ftkit.objectives.step_loss import StepLoss
from ftkit.planning.meter import DevicePeak, MemoryMeter
from ftkit.planning.simulate import with_layers
from ftkit.recipe.devices import Devices
from ftkit.recipe.parsing import read_recipe
from ftkit.recipe.plan import make_plan
from ftkit.strategies.schedule import Schedule
from ftkit.strategies.strategy import Strategy, compute_dtype, make_strategy, parameter_dtype
from ftkit.training.step import TrainStep

SEQUENCES, LENGTH = 8, 512
"""Samples of a step, and tokens of each; and tokens in the cache when one more is generated."""
PEAK_FLOPS, PRODUCTS_REACH = 989e12, 0.65
"""Of an H100 in bfloat16, and the share of it that matrix products reach."""
PEAK_BYTES_S, OTHERS_REACH = 3.35e12, 0.8
"""Of its memory, and the share of it that all other kernels reach."""
LAUNCHES_US = (8.0, 31.0)
"""Time of the host for a launch: of a fast processor, and of the one beside the measured H200."""

ALL_LAYERS = (("lora_key", "true"), ("lora_projection", "true"), ("lora_mlp", "true"))
DROPOUT = ("lora_dropout", "0.05")


@dataclass(frozen=True)
class Case:
    """What is counted."""

    model: str
    method: Literal["full", "lora"]
    keys: tuple[tuple[str, str], ...] = ()
    generates: bool = False
    """Whether one token is generated, instead of a step of training."""


CASES = {
    "full, TinyLlama 1.1B": Case("tiny-llama-1.1b", "full"),
    "LoRA of all layers, Llama 2 7B": Case("Llama-2-7b-hf", "lora", (*ALL_LAYERS, DROPOUT)),
    "LoRA of all layers without dropout, Llama 2 7B": Case(
        "Llama-2-7b-hf", "lora", (*ALL_LAYERS, ("lora_dropout", "0"))
    ),
    "QLoRA nf4 of all layers, Llama 2 7B": Case(
        "Llama-2-7b-hf", "lora", (*ALL_LAYERS, DROPOUT, ("quantize", "bnb.nf4"))
    ),
    "experts, LoRA of attention, Qwen3 MoE": Case("qwen3_moe", "lora", (*ALL_LAYERS[:2], DROPOUT)),
    "windows, full, Gemma 3 text": Case("gemma3_text", "full"),
    "generation, TinyLlama 1.1B": Case("tiny-llama-1.1b", "full", generates=True),
}

functional: Any = torch.nn.functional

PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "_grouped_mm", "gemm_4bit"}
_WITHOUT_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"} | {
    "_unsafe_view",
    "is_same_size",
    "lift_fresh",
    "_reshape_alias",
    "is_pinned",
    "prim::device",
}
_ONLY_WRITE = {"copy_", "fill_", "zero_", "bernoulli_"}
"""Operations that change a tensor without reading it."""
_OF_ROWS = {"embedding", "index", "gather", "index_select"}
"""Operations that read as much of their first argument as they return."""


@dataclass(frozen=True)
class Work:
    """Work of a step, or of a part of it."""

    launches: int = 0
    flops: int = 0
    """Of matrix products, without those of attention."""
    product_bytes: int = 0
    """Read and written by matrix products and attention."""
    other_bytes: int = 0
    """Read and written by all other kernels."""

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(_numbers(self), _numbers(other), strict=True)))

    def __sub__(self, other: "Work") -> "Work":
        return self + other * -1

    def __mul__(self, times: int) -> "Work":
        return Work(*(number * times for number in _numbers(self)))


def _numbers(work: Work) -> tuple[int, ...]:
    return work.launches, work.flops, work.product_bytes, work.other_bytes


class Count(TorchDispatchMode):
    """Counts what torch computes on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()
        self.calls: Counter[str] = Counter()
        """Launches by the name of the operation."""

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.split("::")[1]
        given, made = _tensors((args, kwargs)), _tensors(result)
        if any(t.device.type == "cuda" for t in (*given, *made)) and not _is_free(func, name):
            self.calls[name] += 1
            size_bytes = _bytes(func, name, args, kwargs, given, made)
            is_product = name in PRODUCTS
            of_products = is_product or "attn" in name or "attention" in name
            self.work += Work(
                launches=1,
                flops=_flops(name, args, made) if is_product else 0,
                product_bytes=size_bytes if of_products else 0,
                other_bytes=0 if of_products else size_bytes,
            )
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _is_free(func: OpOverload, name: str) -> bool:
    """Whether it launches nothing: views, and memory without content."""
    aliases = [value.alias_info for value in func._schema.returns]
    is_view = bool(aliases) and all(alias and not alias.is_write for alias in aliases)
    return is_view or name in _WITHOUT_KERNEL or func.namespace == "prim"


def _bytes(
    func: OpOverload,
    name: str,
    args: Any,
    kwargs: Mapping[str, Any],
    given: list[Tensor],
    made: list[Tensor],
) -> int:
    """Bytes that an operation reads and writes, each tensor once."""
    changed, overwritten = [], set()
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info and argument.alias_info.is_write:
            tensors = _tensors(args[index] if index < len(args) else kwargs.get(argument.name))
            changed += tensors
            if argument.is_out or name in _ONLY_WRITE:
                overwritten |= {id(tensor) for tensor in tensors}
    known = {id(tensor) for tensor in given}
    written = changed + [tensor for tensor in made if id(tensor) not in known]
    read = {id(t): t for t in given if id(t) not in overwritten}
    if name in _OF_ROWS:
        read.pop(id(args[0]), None)
        read |= {id(t): t for t in made}
    return sum(t.nbytes for t in (*read.values(), *written))


def _flops(name: str, args: Any, made: list[Tensor]) -> int:
    """Twice the multiplications of a product of `left` and a second matrix."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    left = tensors[1] if name in ("addmm", "addmm_") else tensors[0]
    return int(2 * left.numel() * made[0].shape[-1])


def work_of(case: Case) -> tuple[Work, Work]:
    """Work of a whole step, and of one layer in it."""
    base = open_base(f"random:{case.model}")
    fewer, more = (counted(case, with_layers(base, layers)).work for layers in (2, 3))
    of_layer = more - fewer
    return fewer + of_layer * (base.architecture.layers - 2), of_layer


def counted(case: Case, base: BaseModel) -> Count:
    """Count the second step of a model, when there are optimizer states; or one token."""
    keys = {
        "checkpoint_dir": base.name,
        "precision": "bf16-true",
        "data": "JSON",
        "data.path": "embedded:quickstart",
        "train.micro_batch_size": str(SEQUENCES),
        "train.global_batch_size": str(SEQUENCES),
        "train.max_norm": "1.0",
        **dict(case.keys),
    }
    recipe = read_recipe([], list(keys.items()), method=case.method)
    plan = make_plan(recipe, Devices(accelerator="cuda", count=1))
    model = outline(base, recipe, parameter_dtype(plan), compute_dtype(plan))
    model.kernel = attention_kernel(
        base.architecture.attention, plan.accelerator, has_flash=plan.has_flash
    )
    model.routing = model.body.watch_routing(None)
    strategy = make_strategy(plan)
    strategy.connect(model)
    device = strategy.device
    with FakeTensorMode(allow_non_fake_inputs=True), _as_on_a_gpu():
        strategy.sharding.allocate(model, device)
        model.body.build_rope_cache(device, 2 * LENGTH)
        for layer in model.modules():
            if isinstance(layer, FourBit):
                weight = torch.empty(layer.out_features, layer.in_features, device=device)
                layer.pack(weight, at_once=weight.numel())
        count = Count()
        if case.generates:
            _generate(model, count)
        else:
            strategy.set_up(model)
            _train(model, strategy, count)
    return count


def _train(model: LanguageModel, strategy: Strategy, count: Count) -> None:
    recipe = strategy.plan.recipe
    step = TrainStep(
        model,
        StepLoss(make_objective(recipe.objective), model, None),
        strategy,
        Schedule(total_steps=2, warmup_steps=0, final_share=1.0),
        recipe.train,
        learning_rate=1e-4,
        seed=0,
        seed_names="model",
        compiles=False,
        meter=MemoryMeter(strategy, model, (), DevicePeak(strategy.device), lambda _: None),
        before_update=lambda: None,
    )
    model.train()
    for context in (nullcontext(), count):
        made = move_data_to_device(_batch(), strategy.device)
        numbered = model.body.tokens.of(0, made)
        with context, strategy.micro_step(is_last=True), numbered:
            step.micro_step(made)
            step.clip()
            # The norm of fake gradients cannot be read.
            with patch.object(strategy, "gradient_norm", return_value=1.0):
                step.update()


def _batch() -> Batch:
    """A micro-batch of sequences in a row, as `ftkit.data.samples.loader.collate` makes it."""
    tokens = SEQUENCES * LENGTH
    return {
        "input_ids": torch.zeros(1, tokens, dtype=torch.long),
        "label_indices": torch.arange(tokens),
        "labels": torch.zeros(tokens, dtype=torch.long),
        "label_sequences": torch.zeros(tokens, dtype=torch.long),
        "is_real": torch.ones(1, tokens, dtype=torch.bool),
        "is_real_sequence": torch.ones(SEQUENCES, dtype=torch.bool),
        "lengths": (LENGTH,) * SEQUENCES,
        "numbers": tuple(range(SEQUENCES)),
        "first": 0,
        "sequence_lengths": (LENGTH,) * SEQUENCES,
        "divisors": defaultdict(lambda: torch.tensor(1.0, dtype=torch.float64)),
    }


@torch.no_grad()
def _generate(model: LanguageModel, count: Count) -> None:
    """The pass of one token after those in the cache; it has no values, so that none is chosen."""
    model.eval()
    device = model.body.device
    model.body.start_cache(1, 2 * LENGTH)
    for tokens, context in ((LENGTH, nullcontext()), (1, count)):
        newest = torch.zeros(1, tokens, dtype=torch.long, device=device)
        places = torch.arange(tokens, device=device)[None]
        last = torch.tensor([tokens - 1], device=device)
        with context:
            model(newest, last, positions=places)
    model.body.end_cache()


@torch.library.custom_op("ftkit_counted::rms_norm", mutates_args=())
def _norm(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Stand-in for torch's fused norm, which builds without CUDA do not have."""
    raise NotImplementedError  # only fake tensors come here: they take the shapes below


@torch.library.custom_op("ftkit_counted::rms_norm_backward", mutates_args=())
def _norm_backward(gradient: Tensor, x: Tensor, factor: Tensor, weight: Tensor) -> list[Tensor]:
    """Stand-in for its backward pass; the gradient of the weight only where it is trained."""
    raise NotImplementedError  # only fake tensors come here: they take the shapes below


_norm.register_fake(
    lambda x, weight: (torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32))
)
_norm_backward.register_fake(
    lambda gradient, x, factor, weight: [
        torch.empty_like(x),
        *([torch.empty_like(weight)] if weight.requires_grad else []),
    ]
)


class _FusedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        result, factor = _norm(x, weight)
        ctx.save_for_backward(x, factor, weight)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = _norm_backward(gradients[0], *ctx.saved_tensors)
        return (found[0], found[1]) if len(found) == 2 else (found[0], None)


@contextmanager
def _as_on_a_gpu() -> Iterator[None]:
    """Put in what builds for CPUs lack: the fused norm, grouped products, pinned memory."""
    modules: list[Any] = [attention, token_numbers]
    pinned, norm, products = modules[0].pinned, functional.rms_norm, expert_products._products
    for module in modules:
        module.pinned = lambda tensor, device: tensor
    functional.rms_norm = lambda x, shape, weight, eps: _FusedNorm.apply(x, weight)
    # Fake tensors take a way of their own there, because not every dtype has such a product.
    expert_products._products = lambda x, weight, ends: functional.grouped_mm(x, weight, offs=ends)
    try:
        yield
    finally:
        for module in modules:
            module.pinned = pinned
        functional.rms_norm, expert_products._products = norm, products


def estimate(work: Work) -> float:
    """Seconds that an H100 is busy with work."""
    products_s = max(
        work.flops / (PEAK_FLOPS * PRODUCTS_REACH),
        work.product_bytes / (PEAK_BYTES_S * OTHERS_REACH),
    )
    return products_s + work.other_bytes / (PEAK_BYTES_S * OTHERS_REACH)


def header(launches_us: Sequence[float]) -> str:
    """The head of the table, with two columns for each time of a launch."""
    of_hosts = "".join(f" host, {launch_us:g} us | tokens/s |" for launch_us in launches_us)
    first = "| Case | launches | in a layer | read and written | GPU |"
    return f"{first}{of_hosts}\n|---|---|---|---|---|{'---|---|' * len(launches_us)}"


def row(name: str, work: Work, of_layer: Work, launches_us: Sequence[float]) -> str:
    """A row of the table in docs/performance.md.

    Args:
        name: of the case.
        work: of a step.
        of_layer: of one layer in it.
        launches_us: times of the host for a launch.
    """
    size = (work.product_bytes + work.other_bytes) / 1e9
    gpu_s = estimate(work)
    tokens = 1 if CASES[name].generates else SEQUENCES * LENGTH
    cells = [name, f"{work.launches:,}", of_layer.launches, f"{size:,.1f} GB"]
    cells.append(f"{gpu_s * 1e3:.1f} ms")
    for launch_us in launches_us:
        host_s = work.launches * launch_us * 1e-6
        # The longer one of both is the time of the step.
        cells += [f"{host_s * 1e3:.1f} ms", f"{tokens / max(gpu_s, host_s):,.0f}"]
    return f"| {' | '.join(map(str, cells))} |"
