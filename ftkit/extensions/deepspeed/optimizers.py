"""Optimizers that DeepSpeed has, which its strategy alone runs."""

from ftkit.recipe.optimizers import OptimizerPackage, OptimizerTraits

_ADAM = OptimizerTraits(family="Adam")
_OF_ZENFLOW = OptimizerTraits(unusable="a part of DeepSpeed's ZenFlow. Try --optimizer AdamW")

ROWS = (
    OptimizerPackage(
        name="deepspeed.ops.adam",
        optimizers={
            "DeepSpeedCPUAdam": _ADAM,
            "FusedAdam": _ADAM,
            "ZenFlowCPUAdam": _OF_ZENFLOW,
            "ZenFlowSelectiveAdamW": _OF_ZENFLOW,
            "ZenFlowSelectiveAdamW_stage3": _OF_ZENFLOW,
        },
        strategy="deepspeed",
        kinds={"exp_avg": 1, "exp_avg_sq": 1},  # they take a second to construct
    ),
)
