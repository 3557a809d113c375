"""File names inside a checkpoint."""

METADATA = "metadata.json"
"""What the checkpoint says about itself, written last."""
RECIPE = "recipe.yaml"
"""Recipe of the run."""
ADAPTER = "adapter"
"""Directory of a LoRA run: the adapter, ready for use."""
BASE = "base"
"""Directory of a full fine-tune: what is needed of the base model but weights."""
_SHARD = "shard-"


def shard_name(rank: int, world_size: int) -> str:
    """File name of a rank's shard."""
    return f"{_SHARD}{rank:05d}-of-{world_size:05d}.safetensors"


def is_shard(name: str) -> bool:
    """Whether a file holds the state of training, in a format that ranks write."""
    return name.startswith(_SHARD)
