"""Room on the disk for the checkpoints that a run keeps."""

from pathlib import Path

from ftkit.errors import UserError
from ftkit.recipe.recipe import Recipe
from ftkit.utils.console.formatting import bytes_text
from ftkit.utils.files import free_disk_bytes


def check_disk(
    out_dir: Path,
    checkpoint_bytes: int,
    recipe: Recipe,
    existing_bytes: int = 0,
    *,
    steps_left: int,
) -> None:
    """Refuse a run whose checkpoints will not fit on the disk.

    Args:
        out_dir: of the run; exists.
        checkpoint_bytes: size of one checkpoint.
        recipe: how many are kept. Those that `keep_every` adds are not counted.
        existing_bytes: of checkpoints that are there and will be deleted on the way.
        steps_left: optimizer steps to come; there is at most one checkpoint for each.

    Raises:
        UserError: the disk has not enough free space.
    """
    kept = recipe.checkpoint
    count = kept.most_at_once(steps_left)
    needed = count * checkpoint_bytes
    if count < steps_left:
        needed -= existing_bytes
    free = free_disk_bytes(out_dir)
    if needed <= free:
        return
    smaller = kept.keep_last + kept.keep_best > 1
    advice = "--checkpoint.keep_last 1 --checkpoint.keep_best 0, or another --out_dir"
    raise UserError(
        f"The checkpoints need {bytes_text(needed)} ({count} x {bytes_text(checkpoint_bytes)}, "
        f"for checkpoint.keep_last {kept.keep_last}"
        f"{f', checkpoint.keep_best {kept.keep_best}' if kept.keep_best else ''} and the one that "
        f"is being written), but the disk of {out_dir} has {bytes_text(free)} free. Try "
        f"{advice if smaller else 'another --out_dir, or --checkpoint.save false'}."
    )
