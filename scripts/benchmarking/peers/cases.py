"""Cases of the comparison, fixed before anything is measured, and the programs with their settings.

A case is a model, a method, a precision and a batch. All programs train on the same samples in the
same order, with AdamW without weight decay and clipping, along the same cosine, without dropout, on
answers alone. LitGPT's first step has a learning rate of 0, which cannot be switched off: it gets
the first batch twice, and its own first step is not counted.
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

LORA_RANK, LORA_ALPHA = 8, 16
QKV = ["q_proj", "v_proj"]
"""Projections that ftkit and LitGPT adapt by default."""


Objective = Literal["sft", "dft"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison."""

    model: str
    """One of the sizes of the workload."""
    method: Literal["full", "lora", "qlora"]
    precision: Literal["32-true", "bf16-true"]
    micro_batch_size: int
    global_batch_size: int
    steps: int
    objective: Objective = "sft"
    """Loss; LitGPT has only the first one."""

    @property
    def name(self) -> str:
        """Name in tables."""
        batch = f"micro-batch {self.micro_batch_size} of {self.global_batch_size}"
        name = f"{self.model}, {self.method}, {self.precision}, {batch}"
        return name if self.objective == "sft" else f"{name}, {self.objective}"

    @property
    def micro_steps(self) -> int:
        """Forward and backward passes in a step."""
        return self.global_batch_size // self.micro_batch_size


def _on_cpu(
    method: Any, precision: Any, micro: int, batch: int, steps: int, objective: Any = "sft"
) -> Case:
    return Case(
        model="llama-34m",
        method=method,
        precision=precision,
        micro_batch_size=micro,
        global_batch_size=batch,
        steps=steps,
        objective=objective,
    )


CPU_CASES = [
    _on_cpu("full", "32-true", 8, 8, 12),
    _on_cpu("lora", "32-true", 8, 8, 12),
    _on_cpu("full", "bf16-true", 8, 8, 12),
    _on_cpu("lora", "bf16-true", 8, 8, 12),
    _on_cpu("full", "32-true", 4, 16, 6),
    _on_cpu("lora", "32-true", 4, 16, 6),
    _on_cpu("full", "32-true", 8, 8, 12, "dft"),
]
GPU_CASES = [
    Case(
        model="tinyllama-1.1b",
        method="full",
        precision="bf16-true",
        micro_batch_size=8,
        global_batch_size=8,
        steps=40,
    ),
    Case(
        model="llama-7b",
        method="lora",
        precision="bf16-true",
        micro_batch_size=4,
        global_batch_size=4,
        steps=30,
    ),
    Case(
        model="llama-7b",
        method="qlora",
        precision="bf16-true",
        micro_batch_size=4,
        global_batch_size=4,
        steps=30,
    ),
]
TINY_CASES = [
    Case(
        model="llama-1m",
        method="full",
        precision="32-true",
        micro_batch_size=2,
        global_batch_size=2,
        steps=4,
        objective=objective,
    )
    for objective in OBJECTIVES
]
"""Only to check that everything runs."""

BARS = {"32-true": (2.5, 0.5), "bf16-true": (3.0, 0.5)}
"""Goals of ftkit at micro-batch 8 of 8 on CPU, by precision: at least this multiple of LitGPT's
tokens per second, at most this multiple of its memory."""

IN_ORDER = {"train_sampling_strategy": "sequential"}
NO_RECOMPUTATION = {"gradient_checkpointing": False}
PADDING_FREE = {"padding_free": True, "max_length": None}
TRL_SETTINGS: dict[str, dict[str, Any]] = {
    "trl": IN_ORDER,
    "trl best": IN_ORDER | NO_RECOMPUTATION | PADDING_FREE,
    "trl no recomputation": IN_ORDER | NO_RECOMPUTATION,
    "trl grouped by length": NO_RECOMPUTATION | {"train_sampling_strategy": "group_by_length"},
    "trl packed": IN_ORDER | NO_RECOMPUTATION | {"packing": True, "max_length": 1024},
    "trl best compiled": IN_ORDER | NO_RECOMPUTATION | PADDING_FREE | {"torch_compile": True},
}
"""Settings of SFTConfig beside those of a case. "trl" has TRL's defaults, which recompute
activations."""
OTHER_BATCHES = ("trl grouped by length", "trl packed")
"""Programs that compose their own batches: their losses differ from those of the others."""
PACKED = ("trl packed",)
"""Programs with one row of 1,024 tokens a step instead of the samples of the case."""

PROGRAMS = ["ftkit", "litgpt", *TRL_SETTINGS]
DEFAULT_PROGRAMS = ["ftkit", "litgpt", "trl", "trl best"]
