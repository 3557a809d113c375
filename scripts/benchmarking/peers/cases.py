"""Cases of the comparison, fixed before anything is measured, and the programs with their settings.

A case is a model, a method, a precision and a batch. All programs train on the same samples in the
same order, with AdamW without weight decay and clipping, along the same cosine, without dropout, on
answers alone; other objectives on pairs of answers or answers with labels, beside TRL alone, which
begins with the adapter and the score that ftkit draws. LitGPT's first step has a learning rate of
0, which cannot be switched off: it gets the first batch twice, and its own first step is not
counted.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from benchmarking.ftkit_run import LEARNING_RATE

LORA_RANK, LORA_ALPHA = 8, 16
QKV = ["q_proj", "v_proj"]
"""Projections that ftkit and LitGPT adapt by default."""


Kind = Literal["answers", "pairs", "labels"]
"""Samples: an answer to a prompt, two of them with the better one first, or one with a label."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """An objective that ftkit and TRL both have."""

    keys: dict[str, Any]
    """Keys of ftkit's recipe."""
    trainer: Literal["SFT", "DPO", "KTO", "Reward", "ORPO", "CPO"] = "SFT"
    """Trainer of TRL; the last two are in trl.experimental."""
    records: Kind = "pairs"
    """What its samples are."""
    longest_prompt: int | None = None
    """Words that are left of prompts; None: all."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of its configuration."""
    column: str = "loss"
    """Column of ftkit's metrics.csv that is compared step by step."""
    logged: str = "loss"
    """Name of the same number in TRL's log."""
    factor: float = 1.0
    """Factor of TRL's number."""
    differs: str = ""
    """Why the losses of both programs differ; empty: they are the same number."""


OBJECTIVES = {
    "sft": Objective(keys={"objective": "sft"}, records="answers", settings={"loss_type": "nll"}),
    "dft": Objective(keys={"objective": "dft"}, records="answers", settings={"loss_type": "dft"}),
    "dpo": Objective(keys={"objective": "dpo"}, trainer="DPO"),
    "dpo with sft": Objective(
        keys={"objective": "dpo", "objective.sft_weight": 0.5},
        trainer="DPO",
        settings={"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
    ),
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
    # The odds ratio is compared, which TRL logs with the opposite sign.
    "orpo": Objective(
        keys={"objective": "orpo"},
        trainer="ORPO",
        column="odds_ratio_loss",
        logged="log_odds_ratio",
        factor=-1.0,
        differs="TRL's cross-entropy counts the tokens of prompts, too",
    ),
    # Then all tokens of a sequence but the first belong to the answer.
    "orpo after one token": Objective(keys={"objective": "orpo"}, trainer="ORPO", longest_prompt=1),
    "reward": Objective(keys={"objective": "reward"}, trainer="Reward"),
    "centred reward": Objective(
        keys={"objective": "reward", "objective.center_weight": 0.01},
        trainer="Reward",
        settings={"center_rewards_coefficient": 0.01},
    ),
    "kto": Objective(
        keys={"objective": "kto", "objective.undesirable_weight": 0.75},
        trainer="KTO",
        records="labels",
        settings={"undesirable_weight": 0.75},
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
    learning_rate: float = LEARNING_RATE
    """Highest of its schedule."""

    @property
    def name(self) -> str:
        """Name in tables."""
        batch = f"micro-batch {self.micro_batch_size} of {self.global_batch_size}"
        objective = "" if self.objective == "sft" else f"{self.objective}, "
        return f"{self.model}, {objective}{self.method}, {self.precision}, {batch}"

    @property
    def kind(self) -> Kind:
        """What the samples are."""
        return OBJECTIVES[self.objective].records

    @property
    def differs(self) -> str:
        """Why the losses differ from TRL's; empty: they are the same numbers."""
        if self.objective == "kto" and self.micro_steps > 1:
            return "TRL's reference point is that of a micro-batch"
        return OBJECTIVES[self.objective].differs

    @property
    def micro_steps(self) -> int:
        """Forward and backward passes in a step."""
        return self.global_batch_size // self.micro_batch_size


def _on_cpu(
    method: Any, precision: Any, micro: int, batch: int, steps: int, objective: str = "sft"
) -> Case:
    moving = {"full": 1e-3, "lora": 1e-2}
    return Case(
        model="llama-34m",
        method=method,
        precision=precision,
        micro_batch_size=micro,
        global_batch_size=batch,
        steps=steps,
        objective=objective,
        # Preferences move slowly at first, and equal losses would say little.
        learning_rate=LEARNING_RATE if objective in ("sft", "dft") else moving[method],
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
    _on_cpu("full", "32-true", 4, 8, 6, "dpo"),
    # The mean over label tokens is that of a micro-batch in TRL: there is one in a step.
    _on_cpu("full", "32-true", 8, 8, 6, "dpo with sft"),
    *(
        _on_cpu("full", "32-true", 4, 8, 6, name)
        for name in ("ipo", "hinge", "robust", "simpo", "orpo")
    ),
    _on_cpu("full", "32-true", 8, 8, 6, "orpo after one token"),
    _on_cpu("full", "32-true", 4, 8, 6, "reward"),
    _on_cpu("full", "32-true", 4, 8, 6, "centred reward"),
    # The reference point is that of a micro-batch in TRL.
    _on_cpu("lora", "32-true", 8, 8, 6, "kto"),
    _on_cpu("lora", "32-true", 4, 8, 6, "kto"),
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
    dataclasses.replace(
        case,
        model="llama-1m",
        steps=4,
        global_batch_size=4,
        micro_batch_size=4 // case.micro_steps,
        learning_rate=1e-2,
    )
    for case in CPU_CASES
    if case.objective != "sft" or (case.method == "full" and case.precision == "32-true")
]
"""Quick: whether everything runs, and losses are equal."""

BARS = {"32-true": (2.5, 0.5), "bf16-true": (3.0, 0.5)}
"""Goals of ftkit at micro-batch 8 of 8 on CPU, by precision: at least this multiple of LitGPT's
tokens per second, at most this multiple of its memory."""

IN_ORDER = {"train_sampling_strategy": "sequential"}
NO_RECOMPUTATION = {"gradient_checkpointing": False}
WITHOUT_PADDING_FREE = ("DPO", "KTO", "Reward", "ORPO", "CPO")
"""Trainers that cannot train on rows without padding: in 1.16 DPOTrainer says so and pads."""
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

PREFERENCE_PROGRAMS = ("ftkit", "trl", "trl best", "trl no recomputation")
"""Programs that are run for cases on pairs or labels."""
PROGRAMS = ["ftkit", "litgpt", *TRL_SETTINGS]
DEFAULT_PROGRAMS = ["ftkit", "litgpt", "trl", "trl best"]
