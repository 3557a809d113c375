"""Which answers are better: DPO, ORPO, SimPO, KTO, and reward models."""

MOVED = {
    f"ftkit.objectives.{module}": module  # where plugins have found them
    for module in ("preference", "kto", "reward")
} | {"ftkit.data.records.pairs": "pairs"}
