"""Every optimizer that a row of ftkit lists."""

from ftkit.recipe.optimizers import OPTIMIZERS

DEEPSPEED = "deepspeed.ops.adam"
"""The package of DeepSpeed's optimizers."""
KNOWN = {
    f"{package.name}.{name}": traits
    for package in OPTIMIZERS
    for name, traits in package.optimizers.items()
}
"""By class path."""
