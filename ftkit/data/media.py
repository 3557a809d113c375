"""Media of micro-batches: read in threads, ahead of the step that needs them."""

import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import islice
from typing import Any, Self, TypeVar

from ftkit.data.records.media import MEDIA, Medium

AHEAD = 2
"""Micro-batches whose media are read beside the computation."""
_MOST_THREADS = 8
"""Media of which each is read by a thread of its own."""
_Read = TypeVar("_Read")


class MediaReader(ABC):
    """Makes tensors of the media of micro-batches, for one base model."""

    @abstractmethod
    def read(
        self,
        media: Sequence[Sequence[Medium]],
        ids: Sequence[Any],
        width: int | None,
        answers: Sequence[int] | None = None,
    ) -> Mapping[str, Any]:
        """Read the media of a micro-batch; threads call this beside the computation.

        Args:
            media: of each sequence.
            ids: [tokens] of each sequence, as the model is given them.
            width: of the padded sequences; None: they lie in a row.
            answers: first token with loss of each sequence, or how many it has if none has; None:
                they are prompts.

        Returns:
            What `ftkit.models.bodies.body.Body.hidden` takes as media. Where there are none, this
            is of a blank one.

        Raises:
            UserError: a file is not what it was when the samples were made.
        """


class Pending:
    """Media of a micro-batch that are not read yet."""

    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        """Take what reads them."""
        self._read, self._pins = read, False
        self._future: Future[Mapping[str, Any]] | None = None

    def pin_memory(self) -> Self:
        """Read into page-locked memory, from which copies to a GPU wait for nothing.

        Torch's loader calls this on objects of a micro-batch, as it pins its tensors.
        """
        self._pins = True
        return self

    def begin(self) -> None:
        """Begin to read in a thread."""
        if self._future is None:
            self._future = _threads().submit(self._result)

    def _result(self) -> Mapping[str, Any]:
        found = self._read()
        if not self._pins:
            return found
        from torch.utils.data._utils.pin_memory import pin_memory

        pinned: Mapping[str, Any] = pin_memory(found)
        return pinned

    def take(self) -> Mapping[str, Any]:
        """Return what was read; nothing of it is kept here."""
        self.begin()
        assert self._future is not None
        future, self._future = self._future, None
        return future.result()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(AHEAD + 1, thread_name_prefix="media")


@cache
def _threads_of_media() -> ThreadPoolExecutor:
    # Apart from those of micro-batches, which wait for these.
    count = min(_MOST_THREADS, os.cpu_count() or 1)
    return ThreadPoolExecutor(count, thread_name_prefix="medium")


def read_each(read: Callable[[Medium], _Read], media: Sequence[Medium]) -> Iterator[_Read]:
    """Read media in threads, in their order.

    Args:
        read: reads one.
        media: of a micro-batch.
    """
    return _threads_of_media().map(read, media)


class Coming(Iterator[dict[str, Any]]):
    """Micro-batches of a run, of which the next ones can be seen before they are taken."""

    def __init__(self, batches: Iterable[dict[str, Any]]) -> None:
        """Take the micro-batches in their order."""
        self._batches = iter(batches)
        self._seen: deque[dict[str, Any]] = deque()

    def __next__(self) -> dict[str, Any]:
        return self._seen.popleft() if self._seen else next(self._batches)

    def following(self) -> Iterator[dict[str, Any]]:
        """Yield the next ones, which stay there; use it before another is taken."""
        yield from self._seen
        for batch in self._batches:
            self._seen.append(batch)
            yield batch


def with_media(
    batches: Iterable[dict[str, Any]], following: Iterable[dict[str, Any]] = ()
) -> Iterator[dict[str, Any]]:
    """Yield micro-batches with their media, and read those of the next ones meanwhile.

    They are made for the micro-batch that is next, never for a whole step: a step of 512 images of
    a megapixel would take 6 GB.

    Args:
        batches: which are yielded.
        following: those of the next step, whose media are begun behind these.
    """
    waiting: deque[dict[str, Any]] = deque()
    later = iter(following)

    def begin(batch: dict[str, Any]) -> None:
        if MEDIA in batch:
            batch[MEDIA].begin()

    def ready(batch: dict[str, Any]) -> dict[str, Any]:
        pending = batch.get(MEDIA)
        return batch if pending is None else {**batch, MEDIA: pending.take()}

    for batch in batches:
        begin(batch)
        waiting.append(batch)
        if len(waiting) > AHEAD:
            yield ready(waiting.popleft())
    begun = 0
    while waiting:
        for batch in islice(later, AHEAD + 1 - len(waiting) - begun):
            begin(batch)
            begun += 1
        yield ready(waiting.popleft())
