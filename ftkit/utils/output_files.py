"""Output directories of commands that write a model: whether they can be written, their files."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ftkit.errors import UserError
from ftkit.utils.console.formatting import bytes_text
from ftkit.utils.files import free_disk_bytes, new_directory

_SPARE_BYTES = 2**26
"""Space reserved for tokenizer, settings and the file system."""


def check_apart(out: Path, *sources: Path | None) -> None:
    """Refuse to replace a directory by something that is made from it.

    Raises:
        UserError: ``out`` is one of the sources, or holds one.
    """
    for source in sources:
        # resolve: a link to the source is the source.
        if source is not None and source.resolve().is_relative_to(out.resolve()):
            raise UserError(
                f"--out {out} is, or holds, {source}, which is read. Try another directory."
            )


@contextmanager
def output_directory(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a directory to fill, which is `out` after the block; see `new_directory`.

    Raises:
        UserError: it cannot be written, and all is as it was.
    """
    try:
        with new_directory(out, overwrite=overwrite) as partial:
            yield partial
    except OSError as error:
        raise UserError(
            f"--out {out} cannot be written ({error.strerror or error}). Free some space, or try "
            "another directory."
        ) from error


def check_space(out: Path, needed_bytes: int) -> None:
    """Refuse what the disk has no room for; what is replaced goes only afterwards.

    Raises:
        UserError: there is too little.
    """
    free_bytes = free_disk_bytes(out)
    if free_bytes < needed_bytes + _SPARE_BYTES:
        raise UserError(
            f"--out {out} needs {bytes_text(needed_bytes + _SPARE_BYTES)}, but the disk has "
            f"{bytes_text(free_bytes)} free. Free some, or try --out on another disk."
        )


def as_written(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in the number format of its file.

    Raises:
        UserError: it holds what that format, or any, cannot.
    """
    converted = tensor.to(dtype)
    # float16 ends at 65,504: a larger weight would become infinite without a word.
    if not torch.isfinite(converted).all():
        largest = tensor.abs().max().item()
        advice = "Try --dtype bfloat16." if math.isfinite(largest) else "Its training has diverged."
        text = str(dtype).removeprefix("torch.")
        raise UserError(f"{name} holds {largest:.4g}, which {text} cannot hold. {advice}")
    return converted
