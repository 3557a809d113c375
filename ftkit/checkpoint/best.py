"""The best checkpoint: the one with the lowest validation loss, among those of a run."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ftkit.checkpoint.metadata import CheckpointError
from ftkit.checkpoint.store import Store, verify


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """A directory with checkpoints of one run."""

    directory: Path
    last_step: int
    """Later ones are not looked at."""

    def losses(self) -> Iterator[tuple[float, int]]:
        """Validation loss and step of those that have one and can be read."""
        store = Store(self.directory)
        for step in store.steps():
            try:
                loss = store.metadata(step).validation_loss
            except CheckpointError:
                continue
            if loss is not None and step <= self.last_step:
                yield loss, step


def best_checkpoint(
    places: Iterable[Candidates], now: tuple[float, int] | None, tell: Callable[[str], None]
) -> tuple[int, int] | None:
    """Step of the lowest validation loss, and the index of its place; of equal ones the newest.

    Args:
        places: where there are checkpoints; of one step, the first place counts.
        now: loss and step of the state that training has come to, if it was measured.
        tell: what is wrong with one that cannot be taken.

    Returns:
        None if no loss is known. The index of a state that needs no checkpoint is -1.
    """
    found = [] if now is None else [(now[0], -now[1], -1)]
    directories = []
    for index, place in enumerate(places):
        directories.append(place.directory)
        found += [(loss, -step, index) for loss, step in place.losses()]
    for _, minus_step, index in sorted(found):
        if index < 0:
            return -minus_step, index
        problems = verify(Store(directories[index]).path(-minus_step))
        if not problems:
            return -minus_step, index
        tell(f"the checkpoint with the lowest validation loss cannot be taken: {problems[0]}")
    return None
