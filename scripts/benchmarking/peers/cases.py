"""Cases of the comparison, fixed before anything is measured, and the programs with their settings.

A case is a model, a method, a precision and a batch. All programs train on the same samples in the
same order, with AdamW without weight decay and clipping, along the same cosine, without dropout, on
answers alone; preference cases on pairs of answers, beside TRL alone. LitGPT's first step has a
learning rate of 0, which cannot be switched off: it gets the first batch twice, and its own first
step is not counted.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

LORA_RANK, LORA_ALPHA = 8, 16
QKV = ["q_proj", "v_proj"]
"""Projections that ftkit and LitGPT adapt by default."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """An objective that ftkit and TRL both have."""

    keys: dict[str, Any]
    """Keys of ftkit's recipe."""
    trainer: Literal["SFT", "DPO", "ORPO", "CPO"] = "SFT"
    """Trainer of TRL; the last two are in trl.experimental."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of its configuration."""
    column: str = "loss"
    """Column of ftkit's metrics.csv that is compared step by step."""
    logged: str = "loss"
    """Name of the same number in TRL's log."""
    factor: float = 1.0
    """Factor of TRL's number."""


OBJECTIVES = {
    "sft": Objective(keys={"objective": "sft"}, settings={"loss_type": "nll"}),
    "dft": Objective(keys={"objective": "dft"}, settings={"loss_type": "dft"}),
    "dpo": Objective(keys={"objective": "dpo"}, trainer="DPO"),
    "ipo": Objective(
        keys={"objective": "dpo", "objective.loss": "ipo"},
        trainer="DPO",
        settings={"loss_type": ["ipo"]},
    ),
    "hinge": Objective(
        keys={"objective": "dpo", "objective.loss": "hinge"},
        trainer="DPO",
        settings={"loss_type": ["hinge"]},
    ),
    "robust": Objective(
        keys={"objective": "dpo", "objective.loss": "robust", "objective.label_noise": 0.1},
        trainer="DPO",
        settings={"loss_type": ["robust"], "label_smoothing": 0.1},
    ),
    # TRL's margin is not multiplied by beta.
    "simpo": Objective(
        keys={"objective": "simpo", "objective.beta": 2.0, "objective.margin": 0.5},
        trainer="CPO",
        settings={"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0},
    ),
    # TRL's cross-entropy counts the prompt's tokens too, ftkit's the chosen answer's alone: the
    # other term is compared, which TRL logs with the opposite sign.
    "orpo": Objective(
        keys={"objective": "orpo"},
        trainer="ORPO",
        column="odds_ratio_loss",
        logged="log_odds_ratio",
        factor=-1.0,
    ),
}
"""By name in cases. beta is 0.1 in all but SimPO, which is the default of both programs."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison."""

    model: str
    """One of the sizes of the workload."""
    method: Literal["full", "lora", "qlora"]
    precision: Literal["32-true", "bf16-true"]
    micro_batch_size: int
    global_batch_size: int
    """Samples of a step: sequences, or pairs of them."""
    steps: int
    objective: str = "sft"
    """One of OBJECTIVES; LitGPT has only the first one."""

    @property
    def name(self) -> str:
        """Name in tables."""
        batch = f"micro-batch {self.micro_batch_size} of {self.global_batch_size}"
        objective = "" if self.objective == "sft" else f"{self.objective}, "
        return f"{self.model}, {objective}{self.method}, {self.precision}, {batch}"

    @property
    def on_pairs(self) -> bool:
        """Whether the samples are pairs of answers."""
        return OBJECTIVES[self.objective].trainer != "SFT"

    @property
    def yardstick(self) -> str:
        """Program that speed and memory are relative to."""
        return "litgpt" if self.objective == "sft" else "trl"

    @property
    def micro_steps(self) -> int:
        """Forward and backward passes in a step."""
        return self.global_batch_size // self.micro_batch_size


def _on_cpu(
    method: Any, precision: Any, micro: int, batch: int, steps: int, objective: str = "sft"
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
    _on_cpu("lora", "32-true", 4, 8, 6, "dpo"),
    # In full: adapters begin with other random values, so their losses differ from step 2 on.
    *(
        _on_cpu("full", "32-true", 4, 8, 6, name)
        for name, objective in OBJECTIVES.items()
        if objective.trainer != "SFT"
    ),
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
WITHOUT_PADDING_FREE = ("ORPO", "CPO")
"""Trainers that cannot train on rows without padding."""
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

PAIR_PROGRAMS = ("ftkit", "trl", "trl best", "trl no recomputation")
"""Programs that are run for cases on pairs."""
PROGRAMS = ["ftkit", "litgpt", *TRL_SETTINGS]
DEFAULT_PROGRAMS = ["ftkit", "litgpt", "trl", "trl best"]
