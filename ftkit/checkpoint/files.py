"""File names inside a checkpoint."""

import re

METADATA = "metadata.json"
"""What the checkpoint says about itself, written last."""
RECIPE = "recipe.yaml"
"""Recipe of the run."""
ADAPTER = "adapter"
"""Directory of a LoRA run: the adapter, ready for use."""
BASE = "base"
"""Directory of a full fine-tune: what is needed of the base model but weights."""
_SHARD = "shard-"
_RECEIPT = re.compile(r"saved-([0-9]+)\.json")


def shard_name(rank: int, world_size: int) -> str:
    """File name of a rank's shard."""
    return f"{_SHARD}{rank:05d}-of-{world_size:05d}.safetensors"


def is_shard(name: str) -> bool:
    """Whether a file holds the state of training, in a format that ranks write."""
    return name.startswith(_SHARD)


def receipt_name(step: int) -> str:
    """File name of what a rank leaves for rank 0 when its files of a checkpoint are written."""
    return f"saved-{step}.json"


def step_of_receipt(name: str) -> int:
    """The step that `receipt_name` was given."""
    found = _RECEIPT.fullmatch(name)
    assert found is not None, name
    return int(found[1])
