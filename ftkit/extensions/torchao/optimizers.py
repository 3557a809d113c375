"""torchao's optimizers, whose state has 4 or 8 bits; no torch."""

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ftkit.errors import UserError
from ftkit.recipe.facts import Facts
from ftkit.recipe.optimizers import ADAM, UNKNOWN, OptimizerPackage, OptimizerTraits

_NAME = "torchao.optim"


def _number_bytes(name: str, arguments: Mapping[str, Any]) -> float:
    # A code for each number and a share of the block's float32 scale.
    is_packed = name.endswith("4bit")
    return (0.5 if is_packed else 1) + 4 / arguments.get("block_size", 128 if is_packed else 256)


def _refuse(facts: Facts) -> None:
    recipe, strategy = facts.recipe, facts.strategy.name
    optimizer, arguments = recipe.optimizer["class_path"], recipe.optimizer["init_args"]
    if importlib.util.find_spec("torchao") is None:
        raise UserError(
            f"optimizer is {optimizer}, but torchao is not installed. Try pip install "
            "'ftkit[torchao]', or --optimizer bitsandbytes.optim.AdamW8bit."
        )
    block = arguments.get("block_size", 256)
    if not (type(block) is int and block > 0 and block % 2 == 0):
        raise UserError(
            f"optimizer.block_size is {block!r}, but must be an even number of at least 2, because "
            f"a byte has two codes of 4 bits. Try --optimizer.block_size 256."
        )
    if arguments.get("amsgrad"):
        raise UserError(
            f"optimizer.amsgrad is true, but {optimizer} cannot compare quantised moments. Try "
            "--optimizer.amsgrad false, or --optimizer AdamW."
        )
    has_copies = strategy == "ddp" or "HYBRID_SHARD" in recipe.strategy["init_args"].values()
    if arguments.get("bf16_stochastic_round") and has_copies:
        raise UserError(
            "optimizer.bf16_stochastic_round is true, but several ranks have copies of the same "
            "weights, which each would round by chance. Try --optimizer.bf16_stochastic_round "
            "false, or --strategy fsdp --strategy.sharding FULL_SHARD."
        )


_PIECES = replace(ADAM, used="ftkit.extensions.torchao.state:in_pieces")
_PLAIN = OptimizerTraits(
    unusable=f"which keeps no quantised state. Try --optimizer {_NAME}.AdamW8bit, or "
    "--optimizer AdamW"
)
_QUANTISED = [f"{name}{bits}" for name in ("Adam", "AdamW") for bits in ("4bit", "8bit", "Fp8")]
ROWS = (
    OptimizerPackage(
        name=_NAME,
        optimizers=dict.fromkeys(_QUANTISED, _PIECES)
        | {"_AdamW": _PLAIN, "CPUOffloadOptimizer": _PLAIN},
        others=replace(UNKNOWN, used=_PIECES.used),
        of_slices=False,
        few_bits=True,
        number_bytes=_number_bytes,
        elsewhere={"adamw_torch_4bit": "AdamW4bit", "adamw_torch_8bit": "AdamW8bit"},
        refuse=_refuse,
    ),
)
